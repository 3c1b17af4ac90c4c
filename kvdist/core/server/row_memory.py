"""Memory of rows: a matrix that grows without being copied, and rows that go in and out of it by their number.

Rows move as one opaque element each (NumPy's void type), which measured twice as fast as fancy indices over two
dimensions and does not care for alignment.
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
"""Rows of a matrix: a stretch of them, or their numbers."""

_IN_PLACE = sys.platform == "linux"
"""Whether the system can enlarge a mapping by moving pages instead of bytes."""

_ROWS_MIN = 64


class GrowingRows:
    """A matrix of which the first `reserve`d rows may be used. Fresh rows are zeros, and cost memory once written.

    Args:
        width: elements of a row.
        dtype: their NumPy type.

    Attributes:
        rows: the matrix, shape (at least what was reserved, width). `reserve` makes another: keep no view of it.
    """

    def __init__(self, width: int, dtype: np.dtype[Any]) -> None:
        self._width = width
        self._dtype = dtype
        self._mapping: mmap.mmap | None = None
        self.rows: Array = np.zeros((0, width), dtype)

    @property
    def row_nbytes(self) -> int:
        """Bytes of one row."""
        return self._width * self._dtype.itemsize

    def reserve(self, count: int, exactly: bool = False) -> None:
        """Have at least this many rows. Unless `exactly`, growth doubles, so that many small steps cost little."""
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
        """Enlarge the mapping: the system moves its pages, nothing is copied.

        Raises:
            MemoryError: there is not so much; the rows are as they were.
        """
        if self._mapping is None:
            self._mapping = _mapped(nbytes)
            return
        self.rows = np.zeros((0, self._width), self._dtype)  # a mapping that an array shows cannot move
        try:
            self._mapping.resize(nbytes)
        except BufferError:  # somebody else, a debugger say, still looks at a view: then it is copied
            larger = _mapped(nbytes)
            larger[: have * self.row_nbytes] = self._mapping[: have * self.row_nbytes]
            self._mapping = larger
        except OSError as error:
            self.rows = np.frombuffer(self._mapping, self._dtype).reshape(have, self._width)
            raise MemoryError(f"there is no memory for {nbytes} bytes of rows: {error}") from error


def _mapped(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process. Large pages, as rows are read at random: fewer addresses to look up."""
    try:
        mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there is no memory for {nbytes} bytes of rows: {error}") from error
    with contextlib.suppress(OSError):  # a system without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def stretch_of(slots: Slots) -> Where:
    """The slice that these numbers are, or themselves."""
    count = len(slots)
    if not count:
        return slice(0, 0)
    first = int(slots[0])
    # The ends are looked at first, which settles it for most.
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
        # Numbers are in range; 'clip' only spares the copy that NumPy makes to be able to raise.
        np.take(_opaque(matrix), where, out=_opaque(out), mode="clip")


def put(matrix: Array, where: Where, rows: Array) -> None:
    """These rows ← rows. One pass over them; `rows` as `out` of `take`."""
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
    """The same memory with each row as one element."""
    return matrix.view(f"V{matrix.shape[1] * matrix.itemsize}").reshape(-1)
