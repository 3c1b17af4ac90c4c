"""Tables as lines of text, the same on a terminal and in a file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WIDTH = 160


def text_table(titles: Sequence[str], rows: Iterable[Sequence[str]], right: bool = False) -> str:
    """A table without colours; a row that is too short is filled with blanks.

    Args:
        titles: of the columns.
        rows: the cells.
        right: whether all columns but the first are numbers, which stand at the right.
    """
    # Imported here because a job on one machine needs no table, and importing takes longer than starting it.
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, title in enumerate(titles):
        made.add_column(Text(title), no_wrap=True, justify="right" if right and index else "left")
    for row in rows:
        made.add_row(*map(Text, row))
    width = max(WIDTH, sum(len(title) + 20 for title in titles))
    console = Console(width=width, no_color=True, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(made)
    return "\n".join(line.rstrip() for line in capture.get().splitlines() if line.strip())
