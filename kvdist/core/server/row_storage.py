"""Where the rows of a table lie: memory that grows without a copy, and an index from ids to slots in it.

A row is moved as an opaque element (NumPy's void type): measured twice as fast as fancy indices over two dimensions,
and independent of alignment.

The index is a hash table in whole-array steps: open addressing with a different step for each id, at most half full;
when a good part of all possible ids exists, it becomes a direct table of all of them.
A batch of ids is looked up together: each iteration reads the next place of every id that is not settled yet, so only
the first few iterations are long. Single ids are never removed.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdist.kernels.interface import Array

Slots = NDArray[np.int64]
Where = slice | Slots
"""Rows of a matrix: a slice of consecutive rows, or row numbers."""

_IN_PLACE = sys.platform == "linux"
"""Whether the system can enlarge a mapping by moving pages instead of bytes."""

DIRECT = 4
"""The index becomes a direct table of its whole range when that has at most this many times the places of a hash table:
up to 64 bytes for each row that exists, and no search."""
_ROWS_MIN = 64
_PLACES_MIN = 256
_BATCH = 1 << 18
"""Number of ids that are entered together, so that intermediate results stay in the cache."""


class GrowingRows:
    """A matrix whose first `reserve`d rows may be used. Fresh rows are zeros and take memory once written.

    Args:
        width: elements of a row.
        dtype: their NumPy type.

    Attributes:
        rows: the matrix, shape (at least the reserved rows, width). `reserve` replaces it: keep no view.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self._width = width
        self._dtype = dtype
        self._mapping: mmap.mmap | None = None
        self.rows: Array = np.zeros((0, width), dtype)

    @property
    def row_nbytes(self) -> int:
        """Bytes of a row."""
        return self._width * self._dtype.itemsize

    def reserve(self, count: int, exactly: bool = False) -> None:
        """Provide at least this many rows. Unless `exactly`, the number at least doubles: small steps are cheap."""
        have = len(self.rows)
        if count <= have:
            return
        want = count if exactly else max(count, 2 * have, _ROWS_MIN)
        nbytes = want * self.row_nbytes
        if not (_IN_PLACE and nbytes):
            rows = np.zeros((want, self._width), self._dtype)
            rows[:have] = self.rows
            self.rows = rows
            return
        self._map(nbytes, have)
        assert self._mapping is not None
        self.rows = np.frombuffer(self._mapping, self._dtype).reshape(want, self._width)

    def _map(self, nbytes: int, have: int) -> None:
        """Enlarge the mapping: the system moves its pages, no byte is copied.

        Raises:
            MemoryError: out of memory; the rows are unchanged.
        """
        if self._mapping is None:
            self._mapping = _mapped(nbytes)
            return
        self.rows = np.zeros((0, self._width), self._dtype)  # a mapping that an array shows cannot move
        try:
            self._mapping.resize(nbytes)
        except BufferError:  # a view is still in use, by a debugger say: copy
            larger = _mapped(nbytes)
            larger[: have * self.row_nbytes] = self._mapping[: have * self.row_nbytes]
            self._mapping = larger
        except OSError as error:
            self.rows = np.frombuffer(self._mapping, self._dtype).reshape(have, self._width)
            raise MemoryError(f"no memory for {nbytes} bytes of rows: {error}") from error


def _mapped(nbytes: int) -> mmap.mmap:
    """Return zeroed memory of this process, in large pages: rows are read at random, and large pages need fewer address
    lookups."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {nbytes} bytes of rows: {error}") from error
    with contextlib.suppress(OSError):  # a system without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def stretch_of(slots: Slots) -> Where:
    """Return the slice that these numbers form, or the numbers themselves."""
    count = len(slots)
    if not count:
        return slice(0, 0)
    first = int(slots[0])
    # Most are settled by a look at the ends.
    if int(slots[-1]) - first == count - 1 and (count < 3 or bool((slots[1:] - slots[:-1] == 1).all())):
        return slice(first, first + count)
    return slots


def take(matrix: Array, where: Where, out: Array) -> None:
    """out ← these rows. One pass over them.

    Args:
        matrix: C-contiguous.
        where: which.
        out: shape (k, width), C-contiguous, of the type of `matrix`.
    """
    if isinstance(where, slice):
        np.copyto(out, matrix[where])
    elif out.size:
        # Numbers are in range; 'clip' spares the copy that NumPy makes to be able to raise.
        np.take(_opaque(matrix), where, out=_opaque(out), mode="clip")


def copied(matrix: Array, where: Where) -> Array:
    """Return a copy of these rows, flat."""
    rows = matrix[where]
    return (rows.copy() if isinstance(where, slice) else rows).reshape(-1)


def put(matrix: Array, where: Where, rows: Array) -> None:
    """These rows ← rows. One pass over them; `rows` is shaped as `out` of `take`."""
    if isinstance(where, slice):
        np.copyto(matrix[where], rows)
    elif rows.size:
        _opaque(matrix)[where] = _opaque(rows)


def clear(matrix: Array, where: Where) -> None:
    """These rows ← 0."""
    if matrix.size:
        if isinstance(where, slice):
            matrix[where] = 0
        else:
            _opaque(matrix)[where] = np.zeros(1, f"V{matrix.strides[0]}")


def _opaque(matrix: Array) -> Array:
    """Return the same memory with each row as a single element."""
    return matrix.view(f"V{matrix.shape[1] * matrix.itemsize}").reshape(-1)


class RowIndex:
    """The slot of each id: its position in the order in which ids were added.

    Args:
        first, stop: the bounds of the ids.
    """

    def __init__(self, first: int, stop: int) -> None:
        self._first = first
        self._range = stop - first
        self._ids = GrowingRows(1, np.dtype(np.int64))
        self._table: NDArray[Any] = np.full(_PLACES_MIN, -1, np.int32)
        self._is_direct = False
        """Whether the table has a place for every possible id, so that no search is needed."""
        self.count = 0

    @property
    def ids(self) -> Slots:
        """The id of each slot; a view."""
        return self._ids.rows[: self.count, 0]

    @property
    def nbytes(self) -> int:
        """Bytes of the table and of the ids."""
        return self._table.nbytes + 8 * self.count

    def find(self, ids: Slots) -> Slots:
        """Return the slot of each id; -1 for an id without a slot."""
        if self._is_direct:
            return self._table.take(ids - self._first).astype(np.int64)
        slots = np.empty(len(ids), np.int64)
        for start in range(0, len(ids), _BATCH):
            part = slice(start, start + _BATCH)
            self._find(ids[part], slots[part])
        return slots

    def add(self, ids: Slots) -> Slots:
        """Assign the next slots to new ids, without repetitions."""
        before, after = self.count, self.count + len(ids)
        self._ids.reserve(after)
        self._ids.rows[before:after, 0] = ids
        if not self._is_direct and 2 * after > len(self._table):
            size = 1 << (2 * after - 1).bit_length()
            self._is_direct = self._range <= DIRECT * size
            size = self._range if self._is_direct else size
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
        # An empty place holds -1: settled, whatever id that points at.
        pending = np.flatnonzero((slots >= 0) & (known[slots] != ids))
        place, step, wanted = place[pending], step[pending], ids[pending]
        while len(pending):
            place = (place + step) & mask
            there = table[place].astype(np.int64)
            slots[pending] = there
            rest = np.flatnonzero((there >= 0) & (known[there] != wanted))
            pending, place, step, wanted = pending[rest], place[rest], step[rest], wanted[rest]

    def _enter(self, start: int, stop: int) -> None:
        if self._is_direct:
            self._table[self._ids.rows[start:stop, 0] - self._first] = np.arange(start, stop)
            return
        for first in range(start, stop, _BATCH):
            self._enter_batch(first, min(first + _BATCH, stop))

    def _enter_batch(self, start: int, stop: int) -> None:
        """Enter slots: each writes itself to its next place if that is free, and reads the place back.

        Two slots may write to the same place in an iteration: the slot that is not read back continues.
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
        assert self._is_direct or 2 * self.count <= len(self._table), "at most half of the table is in use"
        assert int((self._table >= 0).sum()) == self.count, "each slot is in the table once"
        assert (self.find(self.ids) == np.arange(self.count)).all(), "each id is found in its slot"


def _places(ids: Slots, mask: int) -> tuple[Slots, Slots]:
    """Return the first place of each id and the step to its next places; steps are odd, so they reach every place.

    The mixer is that of splitmix64: ids that share their low or high bits are spread all the same.
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
