"""How messages for people name keys and awaited workers."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

Statement = TypeVar("Statement", bound=Hashable)

NAME_MAX = 200
"""Characters of a name that are kept."""
LISTED_MAX = 3
"""Keys that a message lists."""
LISTED_WORKERS_MAX = 8
"""Workers that a message lists."""
MODEL = re.compile(r"\d+ parameters, trained are [-\d, ]*(names [0-9a-f]+)?")
"""Begin of the statement of a Trainer."""


class NamedKey(int):
    """A numeric key with a name for messages, such as a `kvdist.Trainer`'s ``'layer1.weight'``.

    It equals the number, and replaces it everywhere. The name travels with the declaration of the key, so that the
    scheduler and the servers can use it too.
    """

    name: str

    def __new__(cls, key: int, name: str) -> NamedKey:
        """Name a key; longer names are cut."""
        named = super().__new__(cls, key)
        named.name = name[:NAME_MAX]
        return named

    def __getnewargs__(self) -> tuple[int, str]:  # type: ignore[override]
        return int(self), self.name


def name_of(key: object) -> str:
    """The name of a key in a message: ``'layer1.weight'``, ``parameter 7 of shape (10, 4)``, ``key 'fc1'``."""
    return key.name if isinstance(key, NamedKey) else f"key {key!r}"


def names_of(keys: Sequence[object], count: int | None = None) -> str:
    """The description of several keys, the first by name: ``4 keys ('fc1', 'fc2', 'fc3', …)``.

    Args:
        keys: the keys, or at least the first.
        count: number of keys; None is that of `keys`.
    """
    count = len(keys) if count is None else count
    if count == 1:
        return name_of(keys[0])
    listed = ", ".join([key.name if isinstance(key, NamedKey) else repr(key) for key in keys[:LISTED_MAX]])
    return f"{count} keys ({listed}{', …' if count > LISTED_MAX else ''})"


def minority_first(said: Iterable[tuple[int, Statement]]) -> list[tuple[str, Statement]]:
    """Group (rank, statement) pairs of workers by statement, the smallest group first.

    Returns the names of the workers of each group, and its statement.
    """
    groups: dict[Statement, list[int]] = {}
    for rank, statement in sorted(said, key=lambda one: one[0]):
        groups.setdefault(statement, []).append(rank)
    return [(workers_of(ranks), one) for one, ranks in sorted(groups.items(), key=lambda group: len(group[1]))]


def workers_of(ranks: Sequence[int]) -> str:
    """``worker-0, worker-1 and worker-3``; of many the first, and the number of the others."""
    names = [f"worker-{rank}" for rank in ranks[:LISTED_WORKERS_MAX]]
    more = len(ranks) - len(names)
    *others, last = [*names, f"{more} more"] if more else names
    return f"{', '.join(others)} and {last}" if others else last


def who_says_what(said: Iterable[tuple[int, str]]) -> str:
    """Statements of workers that disagree, as a text such as ``worker-1 says: 3; worker-0 and worker-2 say: 2``."""
    return "; ".join(f"{who} {'say' if ' ' in who else 'says'}: {text}" for who, text in minority_first(said))


def model_of(statement: str) -> str:
    """The part of a Trainer's statement that describes only its model; '' of any other statement."""
    found = MODEL.match(statement)
    return "" if found is None else found[0].rstrip(", ")


def waiting(seconds: float, who: str, deed: str) -> str:
    """The sentence of every long wait: its duration, the awaited process, and the awaited action."""
    return f"waiting {seconds:.1f} s for {who} to {deed}"
