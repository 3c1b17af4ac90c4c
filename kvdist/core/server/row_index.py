"""Which slot a row has: a hash table from 64-bit ids to consecutive numbers, in whole-array steps.

Open addressing with a step of its own for each id, at most half full. A batch of ids is looked up together: each round
reads one place for all that are not settled yet, so a batch takes as many rounds as its unluckiest id has probes, and
all but the first few rounds are short. Nothing is ever removed, but everything at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdist.core.server.row_memory import GrowingRows, Slots

_PLACES_MIN = 256
_BATCH = 1 << 18
"""How many ids are entered at a time, so that what is computed of each stays in the cache."""


class RowIndex:
    """Ids in the order in which they came, and the number of each in that order."""

    def __init__(self) -> None:
        self._ids = GrowingRows(1, np.dtype(np.int64))
        self._table: NDArray[Any] = np.full(_PLACES_MIN, -1, np.int32)
        self.count = 0

    @property
    def ids(self) -> Slots:
        """The id of each slot; shows the index's memory."""
        return self._ids.rows[: self.count, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of the ids."""
        return self._table.nbytes + 8 * self.count

    def find(self, ids: Slots) -> Slots:
        """The slot of each id, -1 where it has none."""
        slots = np.empty(len(ids), np.int64)
        for start in range(0, len(ids), _BATCH):
            part = slice(start, start + _BATCH)
            self._find(ids[part], slots[part])
        return slots

    def add(self, ids: Slots) -> Slots:
        """Give new ids, each once, the next slots."""
        before, after = self.count, self.count + len(ids)
        self._ids.reserve(after)
        self._ids.rows[before:after, 0] = ids
        if 2 * after > len(self._table):
            size = 1 << (2 * after - 1).bit_length()
            self._table = np.full(size, -1, np.int32 if size <= 2**31 else np.int64)
            self._enter(0, after)
        else:
            self._enter(before, after)
        self.count = after
        return np.arange(before, after)

    def clear(self) -> None:
        """Forget all ids."""
        self.count = 0
        self._table.fill(-1)

    def _find(self, ids: Slots, slots: Slots) -> None:
        table, known, mask = self._table, self._ids.rows.reshape(-1), len(self._table) - 1
        if not self.count:
            slots.fill(-1)
            return
        place, step = _places(ids, mask)
        slots[...] = table[place]
        # An empty place says -1, whose id is some other row's or none: it is settled either way.
        pending = np.flatnonzero((slots >= 0) & (known[slots] != ids))
        place, step, wanted = place[pending], step[pending], ids[pending]
        while len(pending):
            place = (place + step) & mask
            there = table[place].astype(np.int64)
            slots[pending] = there
            rest = np.flatnonzero((there >= 0) & (known[there] != wanted))
            pending, place, step, wanted = pending[rest], place[rest], step[rest], wanted[rest]

    def _enter(self, start: int, stop: int) -> None:
        for first in range(start, stop, _BATCH):
            self._enter_batch(first, min(first + _BATCH, stop))

    def _enter_batch(self, start: int, stop: int) -> None:
        """Each slot that is not in yet writes itself to its next place if that is free; who is read there then is in.

        Two slots may want one place in one round: one of them is what is read back, the other goes on.
        """
        table, mask = self._table, len(self._table) - 1
        slots = np.arange(start, stop).astype(table.dtype)
        place, step = _places(self._ids.rows[start:stop, 0], mask)
        while len(slots):
            free = table[place] < 0
            table[place[free]] = slots[free]
            rest = np.flatnonzero(table[place] != slots)
            slots, step = slots[rest], step[rest]
            place = (place[rest] + step) & mask

    def validate(self) -> None:
        """Check every invariant."""
        assert 2 * self.count <= len(self._table), "at most half of the table is in use"
        assert int((self._table >= 0).sum()) == self.count, "each slot is in the table once"
        assert (self.find(self.ids) == np.arange(self.count)).all(), "each id is found in its slot"


def _places(ids: Slots, mask: int) -> tuple[Slots, Slots]:
    """Where each id is looked for first, and how much farther on each time after; steps are odd, so they reach all.

    The mixer is that of splitmix64: ids that share their low or high bits lie apart all the same.
    """
    mixed = ids.astype(np.uint64)
    mixed += np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    step = (mixed >> np.uint64(20)).astype(np.int64) & mask | 1
    mixed ^= mixed >> np.uint64(31)
    return mixed.astype(np.int64) & mask, step
