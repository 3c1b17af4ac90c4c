"""Plots of a run: time per step against bytes, workers and number of keys, and the ratios against their targets."""

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
MARKERS = {"kvdist": "o", "kvdist-resident": "s", "kvdist-shared": "D", "kvdist-tcp": "^"}
REACHED = {"stretch": "#1a7a1a", "yes": "#78b878", "no": "#d08770"}


def draw(record: dict[str, Any], path: Path) -> None:
    """Write one picture with whatever the run has measured."""
    dimensions: list[tuple[str, str, str, str]] = [
        ("bytes-", "payload_bytes", "bytes pushed per worker and step (25 keys)", "log"),
        ("keys-", "keys", "number of keys (4 MB in all)", "log"),
        ("workers-", "workers", "workers (25×4 MB, 2 servers)", "linear"),
    ]
    held = [one for one in dimensions if measured(record["contests"], one[0])]
    rows = [row for row in record["rows"] if row["ratio"] is not None]
    panels = len(held) + bool(rows)
    if not panels:
        return
    columns = min(2, panels)
    lines = -(-panels // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(9 * columns, 6.5 * lines), squeeze=False)
    flat = list(axes.flat)
    for axis, (prefix, key, label, scale) in zip(flat, held, strict=False):
        draw_dimension(axis, measured(record["contests"], prefix), key, label, scale)
    if rows:
        draw_ratios(flat[len(held)], rows)
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


def draw_ratios(axis: Axes, rows: list[dict[str, Any]]) -> None:
    """Peer's time over ours as bars; a line marks what is to be reached, a dot what would be better."""
    names = [f"{title_of(row)}:  {row['ratio']:.2f}" for row in rows]
    places = range(len(rows))
    axis.barh(places, [row["ratio"] for row in rows], color=[REACHED[row["reached"]] for row in rows], height=0.6)
    for place, row in zip(places, rows, strict=True):
        axis.plot([row["target"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.8)
        axis.plot(row["stretch"], place, marker="o", color="black", markersize=4)
    axis.set_yticks(places, names, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("peer's time / ours (higher is better); line: target, dot: stretch")
    axis.grid(True, axis="x", alpha=0.4)


def title_of(row: dict[str, Any]) -> str:
    kind = row["ours"].removeprefix("kvdist").lstrip("-")
    return f"{row['title']}{f' [{kind}]' if kind else ''}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        source = Path(name)
        draw(json.loads(source.read_text(encoding="utf-8")), source.with_suffix(".png"))
