"""Memory of this process that its peers on the same host can map, so that values in it need not be sent.

`Arena.allocate` returns ordinary arrays: the memory is free again when the last array or memoryview that shows it
is collected. Invariants:

* The arena does not know readers in other processes: the sender of a descriptor keeps its array until the receiver has
  answered.
* A finalizer may run in any thread, in the middle of anything, `allocate` included: it only appends to a deque.
* Freed blocks are kept by size first, because training asks for the same sizes in every step. They are joined with
  their neighbours when no other block fits.
* A forked child maps the same pages as its parent: it reads, and allocates nothing.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any

import numpy as np

from kvdist.errors import ForkError, StoreClosed
from kvdist.transport.shared_memory.mapping import PAGE_BYTES, Bytes, address_of
from kvdist.transport.shared_memory.segments import SegmentTable, create_file


class FreeSpace:
    """Free stretches of a range of addresses: first fit, neighbours joined. Pure bookkeeping."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """(start, end) of each free stretch."""
        return list(zip(self._starts, self._ends, strict=True))

    def take(self, nbytes: int, alignment: int) -> int | None:
        """Take `nbytes` at a multiple of `alignment`; returns their start, or None if no stretch is long enough."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            begin = -(-start // alignment) * alignment
            if begin + nbytes <= end:
                rest = [(start, begin), (begin + nbytes, end)]
                self._put(index, index + 1, [(left, right) for left, right in rest if left < right])
                return begin
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make a stretch free again."""
        end = start + nbytes
        index = bisect_left(self._starts, start)
        first, last = index, index
        if index > 0 and self._ends[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end:
            last, end = index + 1, self._ends[index]
        self._put(first, last, [(start, end)])

    def _put(self, first: int, last: int, stretches: list[tuple[int, int]]) -> None:
        self._starts[first:last] = [start for start, _ in stretches]
        self._ends[first:last] = [end for _, end in stretches]


SEGMENT_BYTES = 4 << 20
SEGMENT_BYTES_MAX = 64 << 20
"""Sizes of the first and of the largest segments. A new segment's pages are entered at once: 64 MiB take some 50 ms, so
a small job creates small segments."""
PAGES_FROM_BYTES = 64 << 10
"""Size from which allocations begin at a page and fill whole pages; smaller allocations are aligned to `LINE_BYTES`."""
LINE_BYTES = 64
GAP_BYTES = PAGE_BYTES
"""Free bytes at the beginning of each segment, so that no allocation spans two segments with neighbouring addresses."""


class _Allocation(np.ndarray[Any, np.dtype[np.uint8]]):
    """Base of all views of an allocation, which keep it alive. A subclass, as NumPy would skip a plain array as a
    base."""


class _AllocationRef(weakref.ref[_Allocation]):
    """A weak reference to an allocation, with its address."""

    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


class Arena:
    """Grows by segments that are as large as all before them, up to 64 MiB; larger where a single array needs it.

    Args:
        bytes_max: largest total size of all segments.
        segment_bytes: size of the first segment.

    Attributes:
        file: the file that peers map.
        table: its segments, as they are mapped in this process.

    Raises:
        OSError: this system has no such memory.
    """

    def __init__(self, bytes_max: int, segment_bytes: int = SEGMENT_BYTES) -> None:
        self.bytes_max = bytes_max
        self.table = SegmentTable()
        self.file = create_file()
        self._segment_bytes = segment_bytes
        self._pid = os.getpid()
        self._free = FreeSpace()
        self._kept: dict[int, list[int]] = {}
        """Size → addresses of freed blocks of this size."""
        self._freed: deque[weakref.ref[_Allocation]] = deque()
        self._live: dict[int, _AllocationRef] = {}
        self._lock = threading.RLock()
        self._is_busy = False
        self._is_closed = False

    def allocate(self, nbytes: int) -> Bytes:
        """Allocate `nbytes` of writable memory, not cleared; at the start of a page from 64 KiB on. Any thread.

        Raises:
            MemoryError: the arena has reached its limit, or the system has no memory.
            ForkError: in a forked child.
            StoreClosed: after `close`.
        """
        if nbytes < 0:
            raise ValueError(f"nbytes is {nbytes}; it must be 0 or more")
        if os.getpid() != self._pid:
            raise ForkError("this process was forked from one with a kvdist store; its shared memory is the parent's")
        with self._lock:
            if self._is_closed:
                raise StoreClosed("this arena is closed; make a new one")
            if self._is_busy:
                # A signal handler interrupted this method. Ordinary memory is sent like any other.
                return np.empty(nbytes, np.uint8)
            self._is_busy = True
            try:
                return self._allocate(nbytes)
            finally:
                self._is_busy = False

    def locate(self, buffer: Any) -> int | None:
        """The offset in `file` of a contiguous, non-empty buffer; None when it does not lie in this arena."""
        found = self.table.find(address_of(buffer), memoryview(buffer).nbytes)
        return None if found is None else found[0].offset + found[1]

    @property
    def bytes_reserved(self) -> int:
        """Bytes of all segments."""
        return sum(segment.nbytes for segment in self.table.segments())

    @property
    def bytes_used(self) -> int:
        """Bytes of all live allocations, rounded up."""
        with self._lock:
            self._sweep()
            return sum(place.nbytes for place in self._live.values())

    def close(self) -> None:
        """Close the file, so that no more peers can open it. Arrays, and peers that have mapped it, keep it.
        Idempotent."""
        with self._lock:
            self._is_closed = True
            for segment in self.table.segments():
                self.table.discard(segment)
            self.file.close()

    def _allocate(self, nbytes: int) -> Bytes:
        self._sweep()
        size = max(1, -(-nbytes // LINE_BYTES)) * LINE_BYTES
        if size >= PAGES_FROM_BYTES:
            size = -(-size // PAGE_BYTES) * PAGE_BYTES
        kept = self._kept.get(size)
        address = kept.pop() if kept else self._find(size)
        found = self.table.find(address, size)
        assert found is not None
        segment, offset = found
        # Over what lies under the segment's array: of a chain of arrays NumPy keeps only the ends as bases.
        block = _Allocation.__new__(_Allocation, (nbytes,), np.uint8, segment.memory.base, offset)
        place = _AllocationRef(block, self._freed.append)
        place.address, place.nbytes = address, size
        self._live[address] = place
        return block.view(np.ndarray)

    def _find(self, size: int) -> int:
        alignment = PAGE_BYTES if size >= PAGES_FROM_BYTES else LINE_BYTES
        address = self._free.take(size, alignment)
        if address is None and self._kept:
            for kept_size, addresses in self._kept.items():
                for kept in addresses:
                    self._free.give(kept, kept_size)
            self._kept.clear()
            address = self._free.take(size, alignment)
        if address is None:
            self._grow(size)
            address = self._free.take(size, alignment)
        assert address is not None
        return address

    def _sweep(self) -> None:
        """Free the allocations that finalizers have reported."""
        while self._freed:
            place = self._freed.popleft()
            assert isinstance(place, _AllocationRef)
            del self._live[place.address]
            self._kept.setdefault(place.nbytes, []).append(place.address)

    def _grow(self, size: int) -> None:
        least = GAP_BYTES + -(-size // PAGE_BYTES) * PAGE_BYTES
        allowed = (self.bytes_max - self.bytes_reserved) // PAGE_BYTES * PAGE_BYTES
        if least > allowed:
            raise MemoryError(
                f"cannot allocate {size} bytes of shared memory: no free range is large enough, and of {self.bytes_max}"
                f" bytes {self.bytes_reserved} are reserved and {self.bytes_used} in use; raise the limit, or drop"
                " arrays that are no longer needed"
            )
        try:
            usual = min(max(self._segment_bytes, self.bytes_reserved), SEGMENT_BYTES_MAX)
            segment = self.file.grow(max(least, min(usual, allowed)))
        except OSError as error:
            raise MemoryError(f"the system has no {least} bytes of shared memory: {error.strerror}") from error
        self.table.add(segment)
        self._free.give(segment.address + GAP_BYTES, segment.nbytes - GAP_BYTES)
