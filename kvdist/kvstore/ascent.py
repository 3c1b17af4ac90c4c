"""From results in the host's memory to arrays on GPUs.

The results of a call land side by side in one block of pinned memory. From there they rise to each GPU in one copy (to
the first of those that reach each other, and from it to the others), and one launch spreads the small ones over their
arrays; large ones are copied where they are wanted at once. All of it is asked for on the stream that was current where
the call was made, and not waited for: what the program asks of the GPU after the call finds the results.
"""

from __future__ import annotations

import mmap
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent
from kvdist.kvstore import values
from kvdist.kvstore.devices import OnDevice
from kvdist.kvstore.values import Bits

ALIGNMENT_BYTES = 256
"""Where results begin: as allocators of GPUs align."""
LARGE_BYTES = 1 << 18
"""A result of so many bytes is worth a copy of its own."""
PINNED_BYTES_MIN = 1 << 14
"""Pinning takes longer than a copy of fewer bytes does, and a loop over keys would pin a page for each of them."""
KEPT_MAX = 4
"""Blocks that are kept for the next calls."""


@dataclass(slots=True, eq=False)
class Block:
    """Memory of one call's results."""

    memory: Bits
    pin: Any = None
    """What keeps it pinned."""
    marks: list[DeviceEvent] = field(default_factory=list)
    """Behind them nobody reads it any more."""

    def wait(self) -> None:
        """Until nobody reads it any more."""
        while self.marks:
            self.marks[-1].wait()
            self.marks.pop()


class Blocks:
    """The blocks of one store. Any thread."""

    def __init__(self) -> None:
        self._free: deque[Block] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: Device) -> Block:
        """A block of so many bytes, pinned for GPUs, which nobody reads any more."""
        if nbytes < PINNED_BYTES_MIN:
            return Block(np.empty(nbytes, np.uint8))
        with self._lock:
            fitting = [block for block in self._free if block.memory.size >= nbytes]
            found = min(fitting, key=lambda block: block.memory.size, default=None)
            if found is not None:
                self._free.remove(found)
        if found is None:
            # Whole pages of its own: what is pinned is pinned by the page.
            memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            return Block(memory, device.pin(memory))
        found.wait()
        return found

    def give_back(self, block: Block) -> None:
        """It may be taken again, once its marks are passed. Of too many the smallest is let go."""
        if block.pin is None and block.memory.size < PINNED_BYTES_MIN:
            block.wait()
            return
        smallest = None
        with self._lock:
            self._free.append(block)
            if len(self._free) > KEPT_MAX:
                smallest = min(self._free, key=lambda one: one.memory.size)
                self._free.remove(smallest)
        if smallest is not None:
            smallest.wait()  # its pages go back to the system, and a GPU may still read them

    def close(self) -> None:
        """Let all of them go, when nobody reads them any more."""
        with self._lock:
            free, self._free = self._free, deque()
        for block in free:
            block.wait()


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A result that an array on a GPU takes."""

    start: int
    bits: Bits
    place: OnDevice

    @property
    def is_large(self) -> bool:
        """Whether it is copied by itself."""
        return self.bits.nbytes >= LARGE_BYTES


@dataclass(frozen=True, slots=True)
class _Risen:
    """What one GPU has."""

    device: Device
    starts: list[int]
    wanted: Sequence[_Wanted]
    packed: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class WrittenThere:
    """A result for an array on a GPU that its own library writes: it is not contiguous, or the GPU is not used here.

    Args:
        array: takes the result.
        bits: has it.
        stream: the one that was current where the call was made.
    """

    array: Any
    bits: Bits
    stream: AbstractContextManager[Any]

    @classmethod
    def of(cls, array: Any, bits: Bits) -> WrittenThere:
        """To be called where the user's call is made."""
        return cls(array, bits, values.present_stream(array))

    def write(self) -> None:
        """Copy; waits for the GPU."""
        with self.stream:
            values.write_bits(self.array, self.bits)


class Ascent:
    """The results of one call that are wanted on GPUs.

    Args:
        blocks: gives memory.
        sizes: of the keys whose results land here: elements and type.
        device: one of the GPUs.
    """

    def __init__(self, blocks: Blocks, sizes: Sequence[tuple[int, DType]], device: Device) -> None:
        starts, end = [], 0
        for count, dtype in sizes:
            starts.append(end)
            end += -(-count * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._blocks = blocks
        self._block = blocks.take(end, device)
        memory = self._block.memory
        self._starts = starts
        self.results: list[Bits] = [
            memory[start : start + count * dtype.itemsize].view(dtype.storage)
            for start, (count, dtype) in zip(starts, sizes, strict=True)
        ]
        """Where each of them lands."""
        self._wanted: dict[int, list[_Wanted]] = {}
        self._streams: dict[int, tuple[Device, Any]] = {}

    def want(self, index: int, place: OnDevice) -> None:
        """This array takes the result with this index. To be called where the user's call is made."""
        device = place.device
        if device.index not in self._streams:
            self._streams[device.index] = device, device.stream()
        wanted = _Wanted(self._starts[index], self.results[index], place)
        self._wanted.setdefault(device.index, []).append(wanted)

    def rise(self) -> None:
        """The results are there: ask for all copies."""
        risen: list[_Risen] = []
        for index, wanted in self._wanted.items():
            device, stream = self._streams[index]
            with device.on(stream):
                risen.append(self._rise_to(device, wanted, risen))
                self._block.marks.append(device.mark())
        self._blocks.give_back(self._block)

    def _rise_to(self, device: Device, wanted: Sequence[_Wanted], risen: Sequence[_Risen]) -> _Risen:
        """Copy what is wanted on one GPU, from one that has the same and is reached directly, or from the host."""
        starts = [one.start for one in wanted]
        nearest = next((one for one in risen if one.starts == starts and device.reaches(one.device)), None)
        for position, one in enumerate(wanted):
            if not one.is_large:
                continue
            if nearest is None:
                device.upload(one.bits, one.place.array)
            else:
                device.copy(nearest.wanted[position].place.array, one.place.array, nearest.device)
        small = [one for one in wanted if not one.is_large]
        return _Risen(device, starts, wanted, self._spread(device, small, nearest) if small else None)

    def _spread(self, device: Device, small: Sequence[_Wanted], nearest: _Risen | None) -> Array:
        """Bring small results to a GPU in one copy, and to their arrays in one launch. Returns them as they came."""
        start = min(one.start for one in small)
        stop = max(one.start + one.bits.nbytes for one in small)
        packed = device.kernels.empty(stop - start, np.dtype(np.uint8))
        if nearest is None or nearest.packed is None:
            device.upload(self._block.memory[start:stop], packed)
        else:
            device.copy(nearest.packed, packed, nearest.device)
        device.unpack(packed, [one.start - start for one in small], [one.place.array for one in small])
        return packed
