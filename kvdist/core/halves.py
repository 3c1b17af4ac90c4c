"""The published values of float32 as halves, for workers that asked to get them so.

Rules that hold here:

* A version is cast once, when the first worker wants it, and all workers are shown the same bytes.
* Halves that a worker still reads are not written; the next version goes elsewhere, as for values themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist.core.shard import Allocate, Bits, Buffer
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.protocol.layout import offsets


class Halves:
    """The halves of one shard, or of the slices of a group one behind the other.

    Args:
        dtype: of the halves.
        counts: elements of each slice.
        kernels: what casts.
        allocate: gives memory for them.
    """

    def __init__(self, dtype: DType, counts: Sequence[int], kernels: Kernels, allocate: Allocate) -> None:
        self.dtype = dtype
        self.kernels = kernels
        self._allocate = allocate
        sizes = np.array(counts, np.uint32)
        self.dtypes = np.full(len(counts), dtype, np.uint8)
        starts, self._nbytes = offsets(self.dtypes, sizes)
        firsts = (starts // dtype.itemsize).tolist()
        self._places = [slice(first, first + count) for first, count in zip(firsts, counts, strict=True)]
        self._present: Buffer | None = None
        self._spare: list[Buffer] = []

    def of(self, values: Sequence[Bits]) -> Buffer:
        """These values, one array for each slice, as halves. One pass over them, the first time."""
        if self._present is None:
            target = self._target()
            for place, array in zip(self._places, values, strict=True):
                self.kernels.from_float32(array, self.dtype, target.array[place])
            self._present = target
        return self._present

    def forget(self) -> None:
        """There is another version."""
        if self._present is not None:
            self._spare.append(self._present)
            self._present = None

    def _target(self) -> Buffer:
        for i, buffer in enumerate(self._spare):
            if buffer.leases == 0:
                return self._spare.pop(i)
        memory = self._allocate(self._nbytes)
        memory.fill(0)  # the padding is sent too
        return Buffer(memory.view(self.dtype.storage), memory.data)
