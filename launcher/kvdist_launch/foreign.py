"""Text of other machines, before it becomes part of the launcher's own sentences.

What a process prints is passed on as it is. A sentence of ours must not move the cursor, change colours or go on for
pages because of what a login script, ssh, rsync or an agent put into it.
"""

from __future__ import annotations

from typing import Any

TEXT_MAX = 1000
"""Characters that are kept of one text."""


def printable(text: str) -> str:
    """A text in which what cannot be seen is escaped, as in ``\\x1b``, and not too long."""
    return "".join(map(_visible, text[:TEXT_MAX]))


def all_printable(value: Any) -> Any:
    """A value of JSON with all texts in it made printable."""
    match value:
        case str():
            return printable(value)
        case list():
            return [all_printable(one) for one in value]
        case dict():
            return {str(name): all_printable(one) for name, one in value.items()}
        case _:
            return value


def _visible(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
