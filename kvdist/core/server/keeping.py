"""What those who keep the slices of a server must do so that they can be saved and restored. Pure.

There are two of them: `Table` has the slices of arrays, `RowTables` those of tables of rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from kvdist.checkpoint.snapshot import ReadSlice, SavedSlice, WantedSlice
from kvdist.core.policy import Policy
from kvdist.core.server.buffers import Buffer


class Kept(Protocol):
    """A slice of any kind, as far as the moment of a checkpoint depends on it."""

    @property
    def owner(self) -> object:
        """What it is a part of: slices of one owner are taken together."""

    @property
    def key(self) -> int | str:
        """Whose slice it is."""

    @property
    def number(self) -> int:
        """Its name among all slices."""

    @property
    def policy(self) -> Policy:
        """When its rounds are closed."""

    @property
    def version(self) -> int:
        """How many rounds have been closed."""

    @property
    def counted(self) -> Mapping[int, int]:
        """Worker rank → how many of its pushes are in the value."""

    @property
    def has_value(self) -> bool:
        """Whether its first value is there."""


class Keeper(Protocol):
    """Who keeps slices."""

    def keeps(self, number: int) -> bool:
        """Whether a slice is here."""

    def kept(self, number: int) -> Kept:
        """A slice that is here."""

    def taken(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SavedSlice], Buffer | None]:
        """Slices as they are now, in memory that does not change; and the buffer that is leased for that, if one is.

        Args:
            numbers: slices of one owner that have a value.
            contents: what is wanted of them: `WEIGHTS`, `STATES`.

        Raises:
            MemoryError: there is no room for a copy; nothing has changed.
        """

    def wanted(self, store: int) -> list[WantedSlice]:
        """What a checkpoint must have, so that all slices of a store can go on from it."""

    def restore(self, store: int, found: Sequence[ReadSlice]) -> None:
        """Go on from what was found for the slices of a store."""
