"""Memory for versions of values, laid out as a payload: written once, then shown to any number of readers.

A reader holds a *lease* until it has what it read. What has been handed out never changes: a buffer is written again
only when it is not leased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.protocol.arrays import U32, Bits, offsets, padded

Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Gives that many bytes of uninitialised memory that travels well."""


def ordinary_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this process."""
    return np.empty(nbytes, np.uint8)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for one version. While `leases` is not 0 it is being read.

    array: the elements from the first array's first to the last one's last, padding between them included.
    payload: the bytes of all that and the padding behind it, ready to be sent.
    pooled: whether it may be written again; not when it is a part of a larger buffer.
    """

    array: Bits
    payload: memoryview
    leases: int = 0
    pooled: bool = True


@dataclass(slots=True, eq=False)
class BufferPool:
    """Buffers for arrays of one dtype side by side.

    Attributes:
        dtype: of them all.
        counts: (n,) elements of each.
        starts: where each begins, in elements.
        size: elements of a buffer's array.
    """

    dtype: DType
    counts: U32
    allocate: Allocate
    starts: list[int] = field(init=False)
    size: int = field(init=False)
    free_buffers: list[Buffer] = field(default_factory=list)
    """Buffers that are no longer published; they may still be leased."""
    _nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        if len(self.counts) == 1:
            self.starts, self.size = [0], int(self.counts[0])
            self._nbytes = padded(self.size * self.dtype.itemsize)
            return
        starts, self._nbytes = offsets(np.full(len(self.counts), self.dtype, np.uint8), self.counts)
        self.starts = (starts // self.dtype.itemsize).tolist()
        self.size = self.starts[-1] + int(self.counts[-1])

    def fresh(self) -> Buffer:
        """A new buffer, uninitialised except for the padding, which is sent too."""
        memory = self.allocate(self._nbytes)
        nbytes = self.size * self.dtype.itemsize
        memory[0 if len(self.counts) > 1 else nbytes :] = 0
        return Buffer(memory[:nbytes].view(self.dtype.storage), memory.data)

    def acquire(self) -> Buffer:
        """A buffer without leases. There are at most two more buffers than readers that lag behind."""
        for i, buffer in enumerate(self.free_buffers):
            if buffer.leases == 0:
                return self.free_buffers.pop(i)
        return self.fresh()

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer that is no longer published."""
        if buffer.pooled:
            self.free_buffers.append(buffer)

    def joined(self, parts: Sequence[tuple[BufferPool, Buffer | None]]) -> Buffer | None:
        """A new buffer with the arrays of others, in their order; one copy. None if one of those is missing."""
        target, position = None, 0
        for pool, buffer in parts if all(buffer is not None for _, buffer in parts) else ():
            target = target or self.fresh()
            assert buffer is not None
            for own in range(len(pool.counts)):
                self.array(target, position)[...] = pool.array(buffer, own)
                position += 1
        return target

    def array(self, buffer: Buffer, position: int) -> Bits:
        """One of the arrays in a buffer."""
        start = self.starts[position]
        return buffer.array[start : start + int(self.counts[position])]

    def part(self, buffer: Buffer, begin: int, end: int) -> Buffer:
        """Some of the arrays, as a buffer over the same memory."""
        first, last = self.starts[begin], self.starts[end - 1] + int(self.counts[end - 1])
        itemsize = self.dtype.itemsize
        stop = self.starts[end] * itemsize if end < len(self.starts) else self._nbytes
        return Buffer(buffer.array[first:last], buffer.payload[first * itemsize : stop], pooled=False)
