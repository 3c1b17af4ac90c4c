"""The tables of the README, out of committed runs: ``python benchmarks/readme.py`` writes them.

Needs nothing but Python. A test compares the README with what this gives.
"""

from __future__ import annotations

import json
import statistics
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- benchmarks/readme.py writes this table: {} -->\n", "<!-- until here -->\n"

STEPS = [
    ("push and pull of 25 arrays of 4 MB, against MXNet 1.9.1", "headline", "large", "kvdist", "mxnet"),
    ("1,000 arrays of 4 kB, against MXNet", "headline", "small", "kvdist", "mxnet"),
    ("the same, against Horovod 0.28.1 (gloo)", "headline", "small", "kvdist", "horovod"),
    ("25 arrays of 4 kB, against DDP (gloo)", "small_models", "bytes-1024", "kvdist", "ddp"),
    ("a perceptron of 10 million weights, against DDP (gloo)", "headline", "mlp", "kvdist", "ddp"),
    (
        "25 arrays of 4 MB between two hosts at 1 Gbit/s, against the least that the line allows",
        "headline",
        "line",
        "kvdist",
        "bound",
    ),
]
"""Sentence, file of results, contest, our system, the peer."""

MACHINES = [
    ("1, 0.6, 0.4, 0.25", "graded"),
    ("the same, one dies", "graded, death"),
    ("1, 1, 0.25", "chronic"),
    ("the same, one dies", "chronic, death"),
    ("1, 1, 0.25, slow network", "slow network"),
    ("1, 1, 1", "equal"),
]
"""Speeds of the machines, and the setting of ``limping.py`` that has them."""


def steps() -> str:
    """Rows in Markdown of what a step takes; a ratio is the peer's median time over ours."""
    times = {
        (name, one["contest"], one["name"]): one["median_ms"]
        for name in ("headline", "small_models")
        for one in read(name)["contests"]
        if "median_ms" in one
    }
    lines = ["| one step | kvdist | the other | ratio |", "|---|---|---|---|"]
    for sentence, file, contest, name, peer in STEPS:
        ours, theirs = times[file, contest, name], times[file, contest, peer]
        lines.append(f"| {sentence} | {rounded(ours)} ms | {rounded(theirs)} ms | {theirs / ours:.2g} |")
    return "\n".join(lines) + "\n"


def unequal() -> str:
    """Rows in Markdown of the seconds to an accuracy; a ratio is DDP's median time over ours."""
    seconds = defaultdict(list)
    for run in read("limping")["runs"]:
        if not run.get("examples") and not run.get("changes"):
            seconds[run["setting"], run["method"]].append(run["seconds"])
    lines = [
        "| speeds of the machines | DDP | DDP on its best machines | kvdist | DDP ÷ kvdist |",
        "|---|---|---|---|---|",
    ]
    for sentence, setting in MACHINES:
        ddp, subset, ours = (
            statistics.median(seconds[setting, method]) if seconds[setting, method] else None
            for method in ("DDP", "DDP, best subset", "quota, local steps")
        )
        shown = f"{subset:.1f}" if subset else "–"
        lines.append(f"| {sentence} | {ddp:.1f} | {shown} | {ours:.1f} | {ddp / ours:.1f} |")
    return "\n".join(lines) + "\n"


def read(name: str) -> dict[str, Any]:
    """The committed results of this name."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text("utf-8")))


def rounded(ms: float) -> str:
    """Two digits, or all before the point."""
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"


def with_tables(readme: str) -> str:
    """The README with each table between its two marks."""
    for name, table in (("unequal", unequal()), ("speed", steps())):
        before, mark, rest = readme.partition(BEGIN.format(name))
        if not mark:
            raise ValueError(f"the README has no place for the table {name!r}: write {BEGIN.format(name)!r}")
        _, _, after = rest.partition(END)
        readme = f"{before}{mark}\n{table}\n{END}{after}"
    return readme


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
