"""GPUs of a store: sums of values on a GPU, and transfers between GPUs and the host.

*Upload*: the results of a call land side by side in a block of pinned memory, from which each GPU gets them in a single
copy. *Download*: the small pieces of a run are packed on each GPU, summed on one of them, and copied to the run's
payload. Invariants: only GPUs on which values lie are touched; copies are enqueued on the stream that was current
at the user's call, and the calling thread does not wait for them.
"""

from __future__ import annotations

import math
import mmap
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo, Plan, RunPlan, RunSlice
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent, Kernels
from kvdist.kvstore import values
from kvdist.kvstore.local_values import DeviceCodec, LocalValue
from kvdist.kvstore.placement import Devices, Matched, OnDevice, Part, as_host_bits, home_of
from kvdist.kvstore.values import Bits, Key, Shape
from kvdist.protocol.arrays import padded
from kvdist.runtime.node import Finish


def uploaded(bits: Bits, device: Device) -> OnDevice:
    """A copy of host values on a GPU. Waits for the copy."""
    copy = device.kernels.empty(bits.size, bits.dtype)
    device.upload(bits, copy)
    device.mark().wait()
    return OnDevice(device, copy)


def new_value(kind: str, device: Device, shape: Shape, dtype: DType) -> Any:
    """An uninitialized array of a kind (`values.kind_of`) on a GPU."""
    tensor = values.empty_tensor(kind, shape, dtype)
    return device.kernels.empty(math.prod(shape), dtype.storage).reshape(shape) if tensor is None else tensor


def summed(home: Device, parts: Sequence[OnDevice], dtype: DType, out: Array | None = None) -> OnDevice:
    """The sum of parts, in their order, on the GPU `home` in a single pass.

    Args:
        home: the GPU that sums. Parts on other GPUs are copied there.
        parts: contributions of one length and type.
        dtype: type of their elements.
        out: array on `home` for the sum; None for a new array, or for a single part on `home` that part itself.
    """
    arrays = [moved(part, home) for part in parts]
    if len(arrays) == 1 and out is None:
        return OnDevice(home, arrays[0])
    total = home.kernels.empty(parts[0].size, dtype.storage) if out is None else out
    home.kernels.weighted_sum(arrays, [1.0] * len(arrays), dtype, total)
    return OnDevice(home, total)


def moved(part: OnDevice, home: Device) -> Array:
    """A part as an array on `home`: the part's array if it lies on `home`, else a copy."""
    if part.device.index == home.index:
        return part.array
    copy = home.kernels.empty(part.size, part.array.dtype)
    home.copy(part.array, copy, part.device)
    return copy


ALIGNMENT_BYTES = 256
"""Alignment of results in a pinned block, as that of GPU allocators."""
LARGE_BYTES = 1 << 18
"""Results of at least this many bytes are copied separately."""
PINNED_BYTES_MIN = 1 << 14
"""Smallest block that is pinned: pinning takes longer than a copy of fewer bytes, and a loop over keys would pin a page
for each key."""
KEPT_MAX = 4
"""Number of free pinned blocks that are kept for the next calls."""


@dataclass(slots=True, eq=False)
class PinnedBlock:
    """Host memory for the results of a call."""

    memory: Bits
    pin: Any = None
    """Object that keeps the memory pinned; None if it is not pinned."""
    marks: list[DeviceEvent] = field(default_factory=list)
    """Events after which the block may be reused."""

    def wait(self) -> None:
        """Wait until no GPU reads the block any more."""
        while self.marks:
            self.marks[-1].wait()
            self.marks.pop()


class PinnedBlocks:
    """The pinned blocks of a store. Any thread."""

    def __init__(self) -> None:
        self._free: deque[PinnedBlock] = deque()
        self._lock = threading.Lock()

    def take(self, nbytes: int, device: Device) -> PinnedBlock:
        """A block of at least `nbytes` bytes that no GPU reads, pinned unless it is small."""
        if nbytes < PINNED_BYTES_MIN:
            return PinnedBlock(np.empty(nbytes, np.uint8))
        with self._lock:
            fitting = [block for block in self._free if block.memory.size >= nbytes]
            found = min(fitting, key=lambda block: block.memory.size, default=None)
            if found is not None:
                self._free.remove(found)
        if found is None:
            # Whole pages of its own: what is pinned is pinned by the page.
            memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
            return PinnedBlock(memory, device.pin(memory))
        found.wait()
        return found

    def give_back(self, block: PinnedBlock) -> None:
        """Keep a block for the next call, which waits for its marks. Of more than `KEPT_MAX` the smallest is freed."""
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
        """Wait until no GPU reads the blocks any more, and release them."""
        with self._lock:
            free, self._free = self._free, deque()
        for block in free:
            block.wait()


@dataclass(frozen=True, slots=True)
class _DeviceResult:
    """A result in a pinned block, and the array on a GPU into which it is copied."""

    start: int
    bits: Bits
    place: OnDevice

    @property
    def is_large(self) -> bool:
        """Whether the result is copied separately."""
        return self.bits.nbytes >= LARGE_BYTES


@dataclass(frozen=True, slots=True)
class _Uploaded:
    """The results that a GPU has got; `packed` is the array of the small results, from which other GPUs may copy."""

    device: Device
    starts: list[int]
    wanted: Sequence[_DeviceResult]
    packed: Array | None


@dataclass(frozen=True, slots=True, eq=False)
class WrittenThere:
    """A result for an array on a GPU that the array's library writes, as for an array that is not contiguous.

    Args:
        array: the array into which the result is written.
        bits: the result in host memory.
        dtype: type of the result's elements.
        stream: the stream that was current at the user's call.
    """

    array: Any
    bits: Bits
    dtype: DType
    stream: AbstractContextManager[Any]

    @classmethod
    def of(cls, array: Any, bits: Bits, dtype: DType) -> WrittenThere:
        """The write of `bits` to `array` on the current stream; to be built on the thread of the user's call."""
        return cls(array, bits, dtype, values.present_stream(array))

    def write(self) -> None:
        """Copy the result to the array; waits for the GPU."""
        with self.stream:
            values.write_bits(self.array, self.bits, self.dtype)


class Upload:
    """The results of a call that are wanted on GPUs.

    Args:
        blocks: pinned memory of the store.
        sizes: number of elements and type of each result.
        device: a GPU among those that take results; it pins the memory.
    """

    def __init__(self, blocks: PinnedBlocks, sizes: Sequence[tuple[int, DType]], device: Device) -> None:
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
        """Host memory of each result, in the order of `sizes`."""
        self._wanted: dict[int, list[_DeviceResult]] = {}
        self._streams: dict[int, tuple[Device, Any]] = {}

    def want(self, index: int, place: OnDevice) -> None:
        """Let the array `place` take the result `index`. To be called on the thread of the user's call."""
        device = place.device
        if device.index not in self._streams:
            self._streams[device.index] = device, device.stream()
        wanted = _DeviceResult(self._starts[index], self.results[index], place)
        self._wanted.setdefault(device.index, []).append(wanted)

    def start(self) -> None:
        """Enqueue all copies to GPUs; the results have arrived in host memory."""
        done: list[_Uploaded] = []
        for index, wanted in self._wanted.items():
            device, stream = self._streams[index]
            with device.on(stream):
                done.append(self._upload_to(device, wanted, done))
                self._block.marks.append(device.mark())
        self._blocks.give_back(self._block)

    def _upload_to(self, device: Device, wanted: Sequence[_DeviceResult], done: Sequence[_Uploaded]) -> _Uploaded:
        """Copy results to a GPU, from a GPU in reach that already has the same results, else from the host."""
        starts = [one.start for one in wanted]
        nearest = next((one for one in done if one.starts == starts and device.reaches(one.device)), None)
        for position, one in enumerate(wanted):
            if not one.is_large:
                continue
            if nearest is None:
                device.upload(one.bits, one.place.array)
            else:
                device.copy(nearest.wanted[position].place.array, one.place.array, nearest.device)
        small = [one for one in wanted if not one.is_large]
        return _Uploaded(device, starts, wanted, self._spread(device, small, nearest) if small else None)

    def _spread(self, device: Device, small: Sequence[_DeviceResult], nearest: _Uploaded | None) -> Array:
        """Bring small results to a GPU in a single copy, and to their arrays in a single launch.

        Returns the packed results on the GPU.
        """
        start = min(one.start for one in small)
        stop = max(one.start + one.bits.nbytes for one in small)
        packed = device.kernels.empty(stop - start, np.dtype(np.uint8))
        if nearest is None or nearest.packed is None:
            device.upload(self._block.memory[start:stop], packed)
        else:
            device.copy(nearest.packed, packed, nearest.device)
        device.unpack(packed, [one.start - start for one in small], [one.place.array for one in small])
        return packed


_OCTET = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Item:
    """A piece of a run, contributions of which lie on GPUs."""

    piece: RunSlice
    dtype: DType
    parts: list[OnDevice]
    view: Bits
    """Part of the run's payload into which the sum is copied."""

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of the GPUs, in the order of the contributions."""
        return tuple([part.device.index for part in self.parts])


class DeviceTransfers:
    """Transfers of a store's values between GPUs and host memory.

    Args:
        devices: the GPUs that are used.
    """

    def __init__(self, devices: Devices) -> None:
        self._devices = devices
        self._blocks = PinnedBlocks()
        self._load = Counter[int]()
        """GPU → bytes that it has summed."""

    def close(self) -> None:
        """Free the pinned memory of results; no call follows."""
        self._blocks.close()

    def places(self, matched: Matched) -> tuple[list[Bits], list[tuple[Any, Bits, DType]], Finish]:
        """Host memory for the results of keys, some of which are wanted on GPUs.

        Args:
            matched: the keys, and the arrays that take their results.

        Returns:
            The host memory of each key's result; further host arrays, each with the result that is copied to it; and
            the function that copies results to GPUs after they have arrived in host memory.
        """
        results: list[Bits | None] = []
        copies: list[tuple[Any, Bits, DType]] = []
        wanted: list[tuple[int, list[OnDevice]]] = []
        written: list[WrittenThere] = []
        for index, (info, arrays) in enumerate(matched):
            places = [self._devices.place(array, info.dtype) for array in arrays]
            if places and all(place is not None for place in places):
                results.append(None)
                wanted.append((index, [place for place in places if place is not None]))
                continue
            own = values.writable_bits(arrays[0], info.dtype) if arrays else None
            first = np.empty(info.size, info.dtype.storage) if own is None else own
            results.append(first)
            for array in arrays if own is None else arrays[1:]:
                if values.gpu_of(array) is not None:
                    written.append(WrittenThere.of(array, first, info.dtype))
                else:
                    copies.append((array, first, info.dtype))
        upload = self._upload([info for info, _ in matched], wanted, results) if wanted else None

        def bring() -> None:
            if upload is not None:
                upload.start()
            for one in written:
                one.write()

        return [one for one in results if one is not None], copies, bring

    def _upload(
        self, infos: Sequence[KeyInfo], wanted: Sequence[tuple[int, list[OnDevice]]], results: list[Bits | None]
    ) -> Upload:
        """The upload of the results of keys to GPUs; enters the host memory of each result into `results`."""
        sizes = [(infos[index].size, infos[index].dtype) for index, _ in wanted]
        upload = Upload(self._blocks, sizes, wanted[0][1][0].device)
        for number, (index, places) in enumerate(wanted):
            results[index] = upload.results[number]
            for place in places:
                upload.want(number, place)
        return upload

    def bring(
        self,
        plan: Plan,
        run: RunPlan,
        payload: memoryview,
        views: Sequence[Bits],
        arrays: Sequence[Sequence[Part]],
        kernels: Kernels,
        marks: list[DeviceEvent],
    ) -> None:
        """Sum contributions into a run's payload; copies from GPUs are enqueued.

        Args:
            plan: the plan of the push.
            run: the run of that plan whose payload is filled.
            payload: memory of the run, with zeros between the pieces.
            views: views of the pieces in `payload`.
            arrays: contributions to each key of the plan. Those in host memory are summed at once.
            kernels: kernels of the CPU.
            marks: list to which events are added; they must be waited for before the payload is sent or reused.
        """
        items = []
        for piece, view in zip(run.pieces, views, strict=True):
            dtype = plan.keys[piece.index].dtype
            parts = [part[piece.start : piece.stop] for part in arrays[piece.index]]
            on_gpus = [part for part in parts if isinstance(part, OnDevice)]
            if on_gpus:
                items.append(_Item(piece, dtype, on_gpus, view))
            else:
                kernels.weighted_sum(as_host_bits(parts), [1.0] * len(parts), dtype, view)
        if len(items) > 1 and len(items) == len(run.pieces) and len({item.places for item in items}) == 1:
            marks.append(self._together(run, payload, items))
            return
        for item in items:
            marks.append(self._alone(item))

    def _alone(self, item: _Item) -> DeviceEvent:
        home = self._home(item, item.view.nbytes)
        home.download(summed(home, item.parts, item.dtype).array, item.view)
        return home.mark()

    def _together(self, run: RunPlan, payload: memoryview, items: Sequence[_Item]) -> DeviceEvent:
        home = self._home(items[0], run.nbytes)
        offsets = [item.piece.offset for item in items]
        packed = []
        for place, first in enumerate(items[0].parts):
            device = first.device
            bucket = device.kernels.zeros(run.nbytes, _OCTET)
            device.pack([item.parts[place].array for item in items], offsets, bucket)
            packed.append(OnDevice(device, bucket))
        total = packed[0].array if len(packed) == 1 else _total(home, packed, items)
        home.download(total, np.frombuffer(payload, np.uint8))
        return home.mark()

    def _home(self, item: _Item, nbytes: int) -> Device:
        home = home_of([part.device for part in item.parts], self._load)
        self._load[home.index] += nbytes
        return home


def _total(home: Device, packed: Sequence[OnDevice], items: Sequence[_Item]) -> Array:
    """The sum of packed arrays: a pass for each stretch of pieces of the same element type, padding included."""
    total = home.kernels.empty(packed[0].size, _OCTET)
    for dtype, stretch in groupby(items, key=lambda item: item.dtype):
        pieces = [item.piece for item in stretch]
        last = pieces[-1]
        stop = last.offset + padded((last.stop - last.start) * dtype.itemsize)
        place = slice(pieces[0].offset, stop)
        parts = [OnDevice(one.device, one.array[place].view(dtype.storage)) for one in packed]
        summed(home, parts, dtype, total[place].view(dtype.storage))
    return total


RowsOnDevice = tuple[OnDevice, OnDevice]
"""The index of each row, int64, and the rows, concatenated."""


def merged_gradient(info: KeyInfo, arrays: Sequence[Any], devices: Devices) -> tuple[Bits, Bits] | None:
    """The sum of gradients of a table, if all are sparse tensors on GPUs; else None. Waits for the GPU.

    Args:
        info: the table.
        arrays: the gradient of each device.
        devices: the GPUs that are used.

    Returns:
        Row ids in ascending order, and the rows: (k, row length).
    """
    if not arrays or not all(_fits(info, array) and devices.of(array) is not None for array in arrays):
        return None
    parts = [_rows_of(array, info.dtype, devices) for array in arrays]
    ids, rows = merged(parts, info.dtype)
    found = ids.on_host(), rows.on_host()
    # Not -1: there may be no row at all, as that of an empty batch.
    return found[0], found[1].reshape(len(found[0]), row_length(info.shape))


def merged(parts: Sequence[RowsOnDevice], dtype: DType) -> RowsOnDevice:
    """The rows of all parts, each index once and in order, on the GPU of the first part."""
    home = parts[0][0].device
    ids = _joined(home, [part[0] for part in parts])
    rows = _joined(home, [part[1] for part in parts])
    different, sums = home.merge_rows(ids, rows, dtype)
    return OnDevice(home, different), OnDevice(home, sums)


def dense_on_gpu(value: Any, devices: Devices) -> Any:
    """A sparse tensor made dense on its GPU; None for any other value, and for a tensor on no GPU of `devices`.

    Halves of a repeated row are summed in float32.
    """
    if not (values.is_tensor(value) and _is_sparse(value)) or devices.of(value) is None:
        return None
    torch = sys.modules["torch"]
    if value.dtype is torch.bfloat16 or not value.dtype.is_floating_point or value.sparse_dim() != 1:
        return value.float().to_dense().to(value.dtype) if value.dtype is torch.bfloat16 else value.to_dense()
    _, dtype = values.describe(value._values())
    ids, rows = merged([_rows_of(value, dtype, devices)], dtype)
    dense = torch.zeros(value.shape, dtype=value.dtype, device=value.device)
    ids.device.add_rows(ids.device.view(dense, dtype), ids.array, rows.array)
    return dense


def _is_sparse(value: Any) -> bool:
    return value.layout is sys.modules["torch"].sparse_coo


def _fits(info: KeyInfo, value: Any) -> bool:
    """Whether `value` holds sparse rows of this table; the checks of host values refuse any other."""
    if not (values.is_tensor(value) and _is_sparse(value) and value.sparse_dim() == 1):
        return False
    return tuple(value.shape) == info.shape and values.describe(value._values())[1] is info.dtype


def _rows_of(value: Any, dtype: DType, devices: Devices) -> RowsOnDevice:
    # Not `coalesce()`: torch sums halves in their own type.
    plain = value.detach()
    device = devices.of(value)
    assert device is not None
    ids = device.view(plain._indices()[0].contiguous(), DType.INT64)
    return OnDevice(device, ids), OnDevice(device, device.view(plain._values().contiguous(), dtype))


def _joined(home: Device, parts: Sequence[OnDevice]) -> Array:
    if len(parts) == 1:
        return parts[0].array
    whole = home.kernels.empty(sum(part.size for part in parts), parts[0].array.dtype)
    start = 0
    for part in parts:
        home.copy(part.array, whole[start : start + part.size], part.device)
        start += part.size
    return whole


class DeviceValue(LocalValue):
    """The value of a key on a GPU.

    Args:
        key, shape, dtype, kind: as of `LocalValue`.
        devices: the GPUs that are used.
        device: the GPU that holds the value.
        like: a value of the user on a GPU; its library allocates the stored value.
    """

    def __init__(
        self, key: Key, shape: Shape, dtype: DType, kind: str, devices: Devices, device: Device, like: Any
    ) -> None:
        self._devices = devices
        self._library = values.kind_of(like).partition(":")[0]
        self._device = device
        self._value = self._new_array(shape, dtype)
        super().__init__(key, shape, dtype, kind, device.kernels, device.view(self._value, dtype))

    @property
    def device(self) -> Device:
        return self._device

    def move(self, device: Device) -> None:
        """Move the value to another GPU. No update may have been applied to it yet."""
        source, bits = self._device, self._bits
        self._device, self._kernels = device, device.kernels
        self._value = self._new_array(self.shape, self.dtype)
        self._bits = device.view(self._value, self.dtype)
        device.copy(bits, self._bits, source)

    def load(self, bits: Bits) -> None:
        self._device.upload(bits, self._bits)
        self._device.mark().wait()

    def replace(self, value: Any) -> None:
        part = self._devices.read(value, self.dtype)
        if isinstance(part, OnDevice):
            self._device.copy(part.array, self._bits, part.device)
        else:
            self.load(part)

    def write_to(self, array: Any) -> None:
        place = self._devices.place(array, self.dtype)
        if place is None:
            values.write_bits(array, self.host_bits(), self.dtype)
        else:
            place.device.copy(self._bits, place.array, self._device)

    def host_bits(self) -> Bits:
        return OnDevice(self._device, self._bits).on_host()

    def new(self) -> Any:
        if self.kind == "numpy" or self.kind == "torch":
            return super().new()
        copy = self._new_array(self.shape, self.dtype)
        self._device.copy(self._bits, self._device.view(copy, self.dtype), self._device)
        return copy

    def _for_function(self) -> tuple[Any, Array, Any]:
        received = self._new_array(self.shape, self.dtype)
        return received, self._device.view(received, self.dtype), self._value

    def _new_array(self, shape: Shape, dtype: DType) -> Any:
        kind = f"torch:{self._device.name}" if self._library == "torch" else self._library
        return new_value(kind, self._device, shape, dtype)

    def _parts(self, arrays: Sequence[Any], compression: DeviceCodec | None) -> list[Array]:
        read = [self._devices.read(array, self.dtype) for array in arrays]
        # What came from the host is copied to this GPU.
        parts = [part if isinstance(part, OnDevice) else uploaded(part, self._device) for part in read]
        if compression is not None:
            return compression.through_on_devices(self.key, parts, self._device)
        return [moved(part, self._device) for part in parts]
