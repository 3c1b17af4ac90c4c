"""How messages for people name keys, and say who is waited for."""

from __future__ import annotations

from collections.abc import Sequence

NAME_MAX = 200
"""Characters of a name that are kept."""
LISTED_MAX = 3
"""Keys that a message lists."""


class NamedKey(int):
    """A key that is a number and says what it is called, such as a `kvdist.Trainer`'s ``'layer1.weight'``.

    It equals the number, and takes its place everywhere. The name travels with the declaration of the key, so that the
    scheduler and the servers can say it too.
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
    """What to call a key in a message: ``'layer1.weight'``, ``parameter 7 of shape (10, 4)``, ``key 'fc1'``."""
    return key.name if isinstance(key, NamedKey) else f"key {key!r}"


def names_of(keys: Sequence[object], count: int | None = None) -> str:
    """What to call several keys, the first ones by name: ``4 keys ('fc1', 'fc2', 'fc3', …)``.

    Args:
        keys: the keys, or at least the first ones.
        count: how many keys there are; None: all are given.
    """
    count = len(keys) if count is None else count
    if count == 1:
        return name_of(keys[0])
    listed = ", ".join([key.name if isinstance(key, NamedKey) else repr(key) for key in keys[:LISTED_MAX]])
    return f"{count} keys ({listed}{', …' if count > LISTED_MAX else ''})"


def waiting(seconds: float, who: str, deed: str) -> str:
    """The sentence of every long wait: for how long, for whom, to do what."""
    return f"waiting {seconds:.1f} s for {who} to {deed}"
