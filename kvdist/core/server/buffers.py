"""Memory for versions of values and for replies, laid out as a payload: written once, then shown to all readers.

A reader holds a *lease* until it has received the payload. A payload in flight never changes: a buffer is written again
only when it is not leased.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.protocol.arrays import U32, Bits, offsets, padded

BUFFERS_KEPT_MAX = 8
"""Reply buffers kept for later replies: the first touch of fresh memory costs several times a copy."""
BUFFER_UNIT_BYTES = 64 << 10
"""Sizes of reply buffers are multiples of this, so that a buffer serves replies of similar sizes."""

Allocate = Callable[[int], npt.NDArray[np.uint8]]
"""Returns uninitialised memory of that many bytes, which the transport can send without a copy."""


def ordinary_memory(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory of this process."""
    return np.empty(nbytes, np.uint8)


@dataclass(slots=True, eq=False)
class Buffer:
    """Memory for a version or a reply. While `leases` is not 0 it is being read.

    array: the elements of all arrays, with the padding between them.
    payload: the same memory as bytes, with the padding at its end, ready to be sent.
    pooled: whether it may be written again; False for a part of a larger buffer.
    """

    array: Bits
    payload: memoryview
    leases: int = 0
    pooled: bool = True


@dataclass(slots=True, eq=False)
class BufferPool:
    """Buffers for arrays of one dtype side by side.

    Attributes:
        dtype: the element type of all arrays.
        counts: (n,) elements of each array.
        starts: the first element of each array in the buffer.
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
        """Return a buffer without leases. A pool has at most two buffers more than it has slow readers."""
        for i, buffer in enumerate(self.free_buffers):
            if buffer.leases == 0:
                return self.free_buffers.pop(i)
        return self.fresh()

    def give_back(self, buffer: Buffer) -> None:
        """Take back a buffer that is no longer published."""
        if buffer.pooled:
            self.free_buffers.append(buffer)

    def joined(self, parts: Sequence[tuple[BufferPool, Buffer | None]]) -> Buffer | None:
        """Return a new buffer with the arrays of other buffers, in order, by a single copy; None if any is missing."""
        target, position = None, 0
        for pool, buffer in parts if all(buffer is not None for _, buffer in parts) else ():
            target = target or self.fresh()
            assert buffer is not None
            for index in range(len(pool.counts)):
                self.array(target, position)[...] = pool.array(buffer, index)
                position += 1
        return target

    def array(self, buffer: Buffer, position: int) -> Bits:
        """Return the array at a position of a buffer."""
        start = self.starts[position]
        return buffer.array[start : start + int(self.counts[position])]

    def part(self, buffer: Buffer, begin: int, end: int) -> Buffer:
        """Return some of the arrays, as a buffer over the same memory."""
        first, last = self.starts[begin], self.starts[end - 1] + int(self.counts[end - 1])
        itemsize = self.dtype.itemsize
        stop = self.starts[end] * itemsize if end < len(self.starts) else self._nbytes
        return Buffer(buffer.array[first:last], buffer.payload[first * itemsize : stop], pooled=False)


class ReplyBuffers:
    """Buffers for replies with gathered rows, used again when they are no longer leased.

    Args:
        allocate: returns memory.
    """

    def __init__(self, allocate: Allocate) -> None:
        self.allocate = allocate
        self.all: list[Buffer] = []

    def acquire(self, nbytes: int) -> Buffer:
        """Return a free buffer of at least this many bytes and not many more."""
        free = [buffer for buffer in self.all if buffer.leases == 0]
        sizes = range(nbytes, 4 * nbytes + BUFFER_UNIT_BYTES + 1)
        fitting = next((buffer for buffer in free if len(buffer.payload) in sizes), None)
        if fitting is None:
            memory = self.allocate(max(1, -(-nbytes // BUFFER_UNIT_BYTES)) * BUFFER_UNIT_BYTES)
            fitting = Buffer(memory, memory.data)
            self.all.append(fitting)
        others = [buffer for buffer in free if buffer is not fitting]
        for buffer in others[: max(0, len(self.all) - BUFFERS_KEPT_MAX)]:
            self.all.remove(buffer)
        return fitting
