"""The table of the README, out of the committed run of the headline: ``python benchmarks/readme.py`` writes it.

Needs nothing but Python. A test compares the README with what this gives.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HEADLINE = ROOT / "benchmarks" / "results" / "headline.json"
BEGIN, END = "<!-- benchmarks/readme.py writes this table -->\n", "<!-- until here -->\n"

ROWS = [
    ("push and pull of 25 arrays of 4 MB, against MXNet 1.9.1 `dist_sync`", "large", "kvdist", "mxnet"),
    ("the same over TCP", "large", "kvdist-tcp", "mxnet"),
    ("the same with Adam on the server", "large-adam", "kvdist", "mxnet"),
    ("the same without it, against gloo's all-reduce of one flat tensor", "large", "kvdist", "gloo-flat"),
    ("1000 arrays of 4 kB, against MXNet", "small", "kvdist", "mxnet"),
    ("the same, against Horovod 0.28.1 (gloo)", "small", "kvdist", "horovod"),
    ("a perceptron of 10 million weights, against DDP (gloo)", "mlp", "kvdist", "ddp"),
    (
        "25 arrays of 4 MB between two hosts at 1 Gbit/s, against the least that the line allows",
        "line",
        "kvdist",
        "bound",
    ),
]
"""Sentence, contest, our system, the other one."""


def table(record: dict[str, Any]) -> str:
    """The rows in Markdown; a ratio is the other's median time over ours."""
    times = {(one["contest"], one["name"]): one["median_ms"] for one in record["contests"] if "median_ms" in one}
    lines = ["| one step | kvdist | the other | ratio |", "|---|---|---|---|"]
    for sentence, contest, name, peer in ROWS:
        ours, theirs = times[contest, name], times[contest, peer]
        lines.append(f"| {sentence} | {rounded(ours)} ms | {rounded(theirs)} ms | {theirs / ours:.2g} |")
    return "\n".join(lines) + "\n"


def rounded(ms: float) -> str:
    """Two digits, or all before the point."""
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"


def with_table(readme: str, record: dict[str, Any]) -> str:
    """The README with the table between its two marks."""
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(record)}\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text("utf-8"), json.loads(HEADLINE.read_text("utf-8"))), "utf-8")
