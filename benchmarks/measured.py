"""The tables of docs/measured/, out of the committed results: ``python benchmarks/measured.py`` writes them.

A page marks a place by ``<!-- table 2 of benchmarks/results/sparse.md -->``, or by ``<!-- medians of
benchmarks/results/full.json -->`` for the works of `WORKS`; the table ends at ``<!-- end of table -->``. Needs nothing
but Python. A test compares the pages with what this gives.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "measured"
PLACE = re.compile(r"(<!-- (?:table (\d+)|medians) of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)

WORKS = {
    "bytes-1024": "25 × 4 kB",
    "bytes-16384": "25 × 64 kB",
    "bytes-131072": "25 × 0.5 MB",
    "bytes-4194304": "25 × 16 MB",
    "keys-10000": "10,000 × 400 B",
    "resnet50": "ResNet-50's parameters",
    "vgg16": "VGG-16's",
    "bert-base": "BERT-base's",
    "async-sgd": "25 × 4 MB, asynchronous, SGD on the server",
}
"""Contest → the words for its work."""
SYSTEMS = {
    "kvdist": "kvdist",
    "kvdist-resident": "resident",
    "kvdist-shared": "resident and shown",
    "mxnet": "MXNet",
    "horovod": "Horovod",
    "gloo-flat": "gloo, flat",
    "ddp": "DDP",
}
"""Name in a contest → the head of its column."""


def with_tables(page: str) -> str:
    """The page with the tables that it names.

    Raises:
        IndexError: a file has fewer tables than the page asks for.
    """

    def filled(match: re.Match[str]) -> str:
        begin, number, file, end = match.groups()
        text = (ROOT / file).read_text("utf-8")
        return f"{begin}\n{TABLE.findall(text)[int(number) - 1] if number else medians(text)}\n{end}"

    return PLACE.sub(filled, page)


def medians(record: str) -> str:
    """A row of median milliseconds for each work, the least in bold."""
    contests = json.loads(record)["contests"]
    times = {(entry["contest"], entry["name"]): entry["median_ms"] for entry in contests if "median_ms" in entry}
    lines = [f"| work | {' | '.join(SYSTEMS.values())} |", "|---" * (1 + len(SYSTEMS)) + "|"]
    for contest, words in WORKS.items():
        row = {name: times[contest, name] for name in SYSTEMS if (contest, name) in times}
        least = min(row.values())
        cells = [cell(row[name], row[name] == least) if name in row else "" for name in SYSTEMS]
        lines.append(f"| {words} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(ms: float, is_least: bool) -> str:
    """A time with one decimal below 20 ms."""
    text = f"{ms:.1f}" if ms < 20 else f"{ms:.0f}"
    return f"**{text}**" if is_least else text


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
