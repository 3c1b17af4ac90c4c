"""Many arrays in one launch, on one GPU: what of them goes where comes as a table in the device's memory.

Rule that holds here: a table is sent once and kept while the same arrays come again, as the tensors of a bucket do at
every step. Then a launch sends nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.numba_gpu_kernels import as_array
from kvdist.kernels.numba_gpu_memory import Memory, NumbaArray

STRETCH_BYTES = 64 * 1024
"""What a block takes at a time; a multiple of every element's size."""

TABLES_MAX = 64
"""How many tables are kept: one for each bucket, whether it is packed or unpacked."""

_Rows = tuple[tuple[int, ...], ...]


class Tables:
    """The tables of one device, and the launches that need them. Safe to use from several threads.

    Args:
        memory: of the device.
    """

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._kept: OrderedDict[tuple[str, _Rows], NumbaArray] = OrderedDict()

    def copy(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy many stretches of memory in one launch.

        Args:
            moves: from which address, to which, how many bytes.
        """
        rows = tuple([move for move in moves if move[2]])
        if rows:
            table = self._table("copy", rows, _copies)
            self._memory.launch_blocks(("copy", "uint8", 0), table.size // 4, table)

    def finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """See `Device.all_finite`."""
        rows = tuple([(array.address, array.nbytes) for array in map(as_array, arrays) if array.size])
        if not rows or not dtype.is_floating:
            return True
        table = self._table(dtype.label, rows, lambda rows: _lengths(rows, dtype.itemsize))
        found = self._memory.zeros(1, np.dtype(np.uint8))
        self._memory.launch_blocks(("finite", dtype.label, 0), table.size // 2, table, found)
        return not self._memory.fetched(found)[0]

    def _table(self, what: str, rows: _Rows, build: Callable[[_Rows], list[int]]) -> NumbaArray:
        key = (what, rows)
        table = self._kept.pop(key, None)
        if table is None:
            table = self._memory.sent(np.array(build(rows), np.int64))
        self._kept[key] = table  # as the one that was used last
        while len(self._kept) > TABLES_MAX:
            try:
                self._kept.popitem(last=False)
            except KeyError:  # another thread was faster
                break
        return table


def _copies(rows: _Rows) -> list[int]:
    """Each stretch: from, to, how many pieces, how many bytes a piece has."""
    table = []
    for source, target, length in rows:
        for start in range(0, length, STRETCH_BYTES):
            count = min(STRETCH_BYTES, length - start)
            common = source | target | count | 8
            width = common & -common  # the largest power of two, up to 8, that divides all of them
            table += [source + start, target + start, count // width, width]
    return table


def _lengths(rows: _Rows, itemsize: int) -> list[int]:
    """Each stretch: where, how many elements."""
    table = []
    for source, length in rows:
        for start in range(0, length, STRETCH_BYTES):
            table += [source + start, min(STRETCH_BYTES, length - start) // itemsize]
    return table
