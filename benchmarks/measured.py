"""The tables of docs/measured/, out of the committed results: ``python benchmarks/measured.py`` writes them.

A page marks a place by ``<!-- table 2 of benchmarks/results/sparse.md -->``; the table ends at ``<!-- end of table -->``.
Needs nothing but Python. A test compares the pages with what this gives.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "docs" / "measured"
PLACE = re.compile(r"(<!-- table (\d+) of (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)


def with_tables(page: str) -> str:
    """The page with the tables that it names.

    Raises:
        IndexError: a file has fewer tables than the page asks for.
    """

    def filled(match: re.Match[str]) -> str:
        begin, number, file, end = match.groups()
        table = TABLE.findall((ROOT / file).read_text("utf-8"))[int(number) - 1]
        return f"{begin}\n{table}\n{end}"

    return PLACE.sub(filled, page)


if __name__ == "__main__":
    for path in sorted(PAGES.glob("*.md")):
        path.write_text(with_tables(path.read_text("utf-8")), "utf-8")
