"""Plots of a run: systems side by side, and time per step against bytes, workers and numbers of keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")  # no display is needed

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

Contests = list[dict[str, Any]]

COLOURS = {
    "kvdist": "#d62728",
    "kvdist-resident": "#7f0000",
    "kvdist-shared": "#ff7f0e",
    "kvdist-tcp": "#ff9896",
    "mxnet": "#1f77b4",
    "horovod": "#2ca02c",
    "gloo-tensors": "#9467bd",
    "gloo-flat": "#8c564b",
    "ddp": "#7f7f7f",
}
TITLES = {
    "large": "25 arrays of 4 MB, 2 workers",
    "large-sgd": "the same, SGD with momentum on the server",
    "large-adam": "the same, Adam on the server",
    "large-4": "25 arrays of 4 MB, 4 workers",
    "small": "1000 arrays of 4 kB, one call",
    "small-per-key": "1000 arrays of 4 kB, a call for each",
    "mlp": "a perceptron of 10 million weights",
    "line": "25 arrays of 4 MB between two hosts at 1 Gbit/s",
}
"""Contests that are shown system by system."""
MARKERS = {"kvdist": "o", "kvdist-resident": "s", "kvdist-shared": "D", "kvdist-tcp": "^"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write one picture with whatever the run has measured."""
    dimensions: list[tuple[str, str, str, str]] = [
        ("bytes-", "payload_bytes", "bytes pushed per worker and step (25 keys)", "log"),
        ("keys-", "keys", "number of keys (4 MB in all)", "log"),
        ("workers-", "workers", "workers (25×4 MB, 2 servers)", "linear"),
    ]
    held = [one for one in dimensions if measured(record["contests"], one[0])]
    beside = [(title, one) for name, title in TITLES.items() if (one := timed(record["contests"], name))]
    panels = len(held) + len(beside)
    if not panels:
        return
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(8 * columns, (6.5 if held else 2.9) * lines), squeeze=False)
    flat = list(axes.flat)
    for axis, (title, contests) in zip(flat, beside, strict=False):
        draw_systems(axis, title, contests)
    for axis, (prefix, key, label, scale) in zip(flat[len(beside) :], held, strict=False):
        draw_dimension(axis, measured(record["contests"], prefix), key, label, scale)
    for axis in flat[panels:]:
        axis.set_axis_off()
    machine = record["machine"]
    figure.suptitle(f"kvdist {machine['kvdist']}, {machine['processor']}, {machine['cores']} cores, medians of one run")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_scale(record: dict[str, Any], path: Path) -> None:
    """Write a picture of what `scale.py` predicts: a colour for each layout and mode."""
    figure, axis = plt.subplots(figsize=(9, 6))
    lines: dict[str, list[tuple[int, float, int]]] = {}
    for row in record["results"]:
        point = row["workers"], 100 * row["efficiency"], row["servers"]
        lines.setdefault(f"{row['layout']}, {row['mode']}", []).append(point)
    for label, points in lines.items():
        workers, efficiencies, _ = zip(*sorted(points), strict=True)
        axis.plot(workers, efficiencies, marker="o", linestyle="", label=label)
        for count, efficiency, servers in points:
            axis.annotate(f"{servers}", (count, efficiency), textcoords="offset points", xytext=(5, 5), fontsize=8)
    axis.set_xscale("log")
    axis.set_ylim(0, 105)
    axis.set_xlabel("workers (beside each point: servers)")
    axis.set_ylabel("efficiency: the cost model's least time over the predicted one, %")
    axis.set_title(f"{record['spec']} float32, {record['gbit']:g} Gbit/s, {record['cores']} cores a host")
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def measured(contests: Contests, prefix: str) -> Contests:
    """The timed systems of the contests whose names begin so."""
    found = [one for one in contests if one["contest"].startswith(prefix) and "median_ms" in one]
    return [one for one in found if prefix != "workers-" or one["servers"] == 2]


def draw_dimension(axis: Axes, contests: Contests, key: str, label: str, scale: str) -> None:
    """Time per step of every system against one quantity."""
    for name, colour in COLOURS.items():
        points = sorted((one[key], one["median_ms"], one["label"]) for one in contests if one["name"] == name)
        if not points:
            continue
        style = {"linewidth": 2.2, "zorder": 3} if name in MARKERS else {"linewidth": 1.3, "linestyle": "--"}
        where, times, labels = zip(*points, strict=True)
        axis.plot(where, times, color=colour, marker=MARKERS.get(name, "x"), label=labels[0], **style)
    axis.set_xscale(scale)
    axis.set_yscale("log")
    if scale == "linear":
        axis.set_xticks(sorted({one[key] for one in contests}))
    axis.set_xlabel(label)
    axis.set_ylabel("time per step, ms (lower is better)")
    axis.grid(True, which="major", alpha=0.4)
    axis.legend(fontsize=9)


def timed(contests: Contests, name: str) -> Contests:
    """The timed systems of one contest."""
    return [one for one in contests if one["contest"] == name and "median_ms" in one]


def draw_systems(axis: Axes, title: str, contests: Contests) -> None:
    """Time per step of every system of one contest: the median as a bar, a line from the 10th to the 90th percent."""
    for place, one in enumerate(contests):
        colour = COLOURS.get(one["name"], "#d62728" if one["name"].startswith("kvdist") else "#bbbbbb")
        axis.barh(place, one["median_ms"], color=colour, height=0.65)
        axis.plot([one["p10_ms"], one["p90_ms"]], [place, place], color="black", linewidth=1)
        axis.annotate(f"{one['median_ms']:.3g}", (max(one["median_ms"], one["p90_ms"]), place), xytext=(5, -3),
                      textcoords="offset points", fontsize=9)  # fmt: skip
    axis.set_yticks(range(len(contests)), [one["label"] for one in contests], fontsize=9)
    axis.invert_yaxis()
    axis.margins(x=0.1)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("ms a step (lower is better)", fontsize=9)
    axis.grid(True, axis="x", alpha=0.4)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".png"))
