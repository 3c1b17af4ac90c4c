"""A `Device` made of NumPy, for what works with devices: as strict as a GPU where a GPU is strict.

* Its arrays obey NumPy's functions, as CuPy's do, and refuse to become arrays of the host, or to meet those of another
  device, by accident.
* What is downloaded is in the host's memory only when a mark made behind it has been waited for, and what is uploaded
  must not have changed before.
* It counts what crosses to the host and back.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.reference import REFERENCE


class DeviceArray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array of a `NumpyDevice`."""

    def __init__(self, memory: np.ndarray, device: NumpyDevice) -> None:
        self.memory = memory
        self.device = device

    shape = property(operator.attrgetter("memory.shape"))
    dtype = property(operator.attrgetter("memory.dtype"))
    size = property(operator.attrgetter("memory.size"))
    ndim = property(operator.attrgetter("memory.ndim"))
    nbytes = property(operator.attrgetter("memory.nbytes"))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.memory.__array_interface__, "version": 3}

    def __dlpack_device__(self) -> tuple[int, int]:
        return 2, self.device.index

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("an array of a device does not become one of the host by itself; download it")

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        assert self.device.is_active, "a function of NumPy would run in another order than the device's own"
        if out is not None:
            options["out"] = tuple(self._of(one) for one in out)
        return self._given_back(getattr(ufunc, method)(*[self._of(one) for one in inputs], **options), out)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        plain = {name: self._of(one) for name, one in options.items()}
        return self._given_back(function(*[self._of(one) for one in args], **plain), options.get("out"))

    def _of(self, value: Any) -> Any:
        if isinstance(value, DeviceArray):
            assert value.device is self.device, f"an array of {value.device.name} meets one of {self.device.name}"
            return value.memory
        assert not isinstance(value, np.ndarray) or value.ndim == 0, "an array of the host meets one of a device"
        return value

    def _given_back(self, result: Any, out: Any) -> Any:
        if out is not None:
            return out[0] if isinstance(out, tuple) else out
        return DeviceArray(result, self.device) if isinstance(result, np.ndarray) else result

    def __getitem__(self, place: Any) -> DeviceArray:
        return DeviceArray(self.memory[place], self.device)

    def __setitem__(self, place: Any, value: Any) -> None:
        assert self.device.is_active, "an assignment would run in another order than what the device is asked for"
        self.memory[place] = self._of(value)

    def __len__(self) -> int:
        return len(self.memory)

    def reshape(self, *shape: Any) -> DeviceArray:
        return DeviceArray(self.memory.reshape(*shape), self.device)

    def view(self, dtype: Any) -> DeviceArray:
        return DeviceArray(self.memory.view(dtype), self.device)

    def copy(self) -> DeviceArray:
        return DeviceArray(self.memory.copy(), self.device)

    def get(self) -> np.ndarray:
        return self.memory.copy()

    def set(self, values: np.ndarray) -> None:
        self.memory[...] = values

    def mean(self, axis: int) -> DeviceArray:
        return DeviceArray(self.memory.mean(axis=axis), self.device)

    def any(self) -> bool:
        return bool(self.memory.any())

    def clip(self, low: float, high: float, out: DeviceArray) -> DeviceArray:
        self.memory.clip(low, high, out=self._of(out))
        return out


@dataclass(eq=False)
class PassedEvent:
    """See `kvdist.kernels.interface.DeviceEvent`."""

    device: NumpyDevice
    number: int

    def wait(self) -> None:
        self.device.catch_up(self.number)


@dataclass(eq=False)
class NumpyDevice:
    """See the module, and `kvdist.kernels.interface.Device`."""

    index: int = 0
    unreachable: frozenset[int] = frozenset()
    """Devices with which it does not copy directly."""
    memory_bytes_max: int = 1 << 40
    """What may be allocated in all, to run out of it."""
    uploaded_bytes: int = 0
    downloaded_bytes: int = 0
    copied: list[tuple[int, int]] = field(default_factory=list)
    """(source, bytes) of what came from other devices, or of itself."""
    pinned_bytes: int = 0
    allocated_bytes: int = 0
    pending: deque[tuple[str, Any, Any]] = field(default_factory=deque)
    """Copies that no mark has been waited for."""
    is_active: bool = False
    """Whether NumPy's functions run in the order of the device."""
    done: int = 0
    """Copies before those."""

    def __post_init__(self) -> None:
        own = {name: self._on_memory(getattr(REFERENCE, name)) for name in _FUNCTIONS}
        self.kernels = replace(
            REFERENCE,
            name=self.library,
            chunk_elements=1 << 60,
            active=self._active,
            empty=self._empty,
            zeros=self._zeros,
            **own,
        )

    @property
    def name(self) -> str:
        return f"cuda:{self.index}"

    @property
    def library(self) -> str:
        return "numpy of tests"

    def view(self, value: Any, dtype: DType) -> DeviceArray:
        assert value.device is self and value.memory.flags.c_contiguous
        return value.reshape(-1).view(dtype.storage)

    def upload(self, host: np.ndarray, out: DeviceArray) -> None:
        assert host.dtype == out.dtype and host.size == out.size and out.device is self
        out.memory[...] = host
        self.uploaded_bytes += host.nbytes
        self.pending.append(("up", host, host.copy()))

    def download(self, array: DeviceArray, host: np.ndarray) -> None:
        assert host.dtype == array.dtype and host.size == array.size and array.device is self
        self.downloaded_bytes += host.nbytes
        self.pending.append(("down", array.memory.copy(), host))

    def copy(self, array: DeviceArray, out: DeviceArray, source: NumpyDevice) -> None:
        assert array.device is source and out.device is self
        out.memory[...] = array.memory
        self.copied.append((source.index, out.nbytes))

    def reaches(self, other: NumpyDevice) -> bool:
        return other.index not in self.unreachable

    def mark(self) -> PassedEvent:
        return PassedEvent(self, self.done + len(self.pending))

    def catch_up(self, number: int) -> None:
        while self.done < number:
            kind, source, target = self.pending.popleft()
            self.done += 1
            if kind == "down":
                target[...] = source
            else:
                assert source.tobytes() == target.tobytes(), "what was uploaded changed before the device had it"

    def stream(self) -> int:
        return self.index

    def on(self, stream: int) -> Any:
        assert stream == self.index
        return nullcontext()

    def pin(self, host: np.ndarray) -> object:
        self.pinned_bytes += host.nbytes
        return object()

    def pack(self, sources: Sequence[DeviceArray], offsets: Sequence[int], out: DeviceArray) -> None:
        for source, start in zip(sources, offsets, strict=True):
            assert source.device is self and start % source.dtype.itemsize == 0
            out.memory[start : start + source.nbytes] = source.memory.view(np.uint8)

    def unpack(self, source: DeviceArray, offsets: Sequence[int], outs: Sequence[DeviceArray]) -> None:
        for out, start in zip(outs, offsets, strict=True):
            assert out.device is self
            out.memory.view(np.uint8)[...] = source.memory[start : start + out.nbytes]

    def add_dequantised_2bit(self, data: DeviceArray, threshold: float, total: DeviceArray) -> None:
        self._add(self.kernels.dequantise_2bit, data, threshold, total)

    def add_dequantised_1bit(self, data: DeviceArray, threshold: float, total: DeviceArray) -> None:
        self._add(self.kernels.dequantise_1bit, data, threshold, total)

    def _add(self, dequantise: Any, data: DeviceArray, threshold: float, total: DeviceArray) -> None:
        worth = self._empty(total.size, total.dtype)
        dequantise(data, threshold, worth)
        total.memory += worth.memory

    def merge_rows(self, indices: DeviceArray, rows: DeviceArray, dtype: DType) -> tuple[DeviceArray, DeviceArray]:
        different, places = np.unique(indices.memory, return_inverse=True)
        length = rows.size // max(1, indices.size)
        wide = np.zeros((len(different), length), dtype.accumulate)
        values = rows.memory if dtype.storage == dtype.accumulate else REFERENCE.to_float32(rows.memory, dtype)
        np.add.at(wide, places, values.reshape(indices.size, length))
        flat = wide.reshape(-1)
        narrow = flat if dtype.storage == dtype.accumulate else REFERENCE.from_float32(flat, dtype)
        return DeviceArray(different, self), DeviceArray(narrow, self)

    def add_rows(self, table: DeviceArray, indices: DeviceArray, rows: DeviceArray) -> None:
        length = rows.size // max(1, indices.size)
        table.memory.reshape(-1, length)[indices.memory] += rows.memory.reshape(-1, length)

    def all_finite(self, arrays: Sequence[DeviceArray], dtype: DType) -> bool:
        halves = dtype.storage != dtype.accumulate
        wide = [REFERENCE.to_float32(one.memory, dtype) if halves else one.memory for one in arrays]
        return all(bool(np.isfinite(one).all()) for one in wide)

    def array(self, values: Any) -> DeviceArray:
        """These values on the device."""
        return DeviceArray(np.array(values), self)

    @contextmanager
    def _active(self) -> Iterator[None]:
        before, self.is_active = self.is_active, True
        try:
            yield
        finally:
            self.is_active = before

    def _empty(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        self.allocated_bytes += count * np.dtype(dtype).itemsize
        if self.allocated_bytes > self.memory_bytes_max:
            raise DeviceError(f"{self.name} has no memory left for {count * np.dtype(dtype).itemsize} bytes")
        return DeviceArray(np.frombuffer(b"\xa5" * (count * np.dtype(dtype).itemsize), dtype).copy(), self)

    def _zeros(self, count: int, dtype: np.dtype[Any]) -> DeviceArray:
        array = self._empty(count, dtype)
        array.memory[...] = 0
        return array

    def _on_memory(self, function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            own = {name: self._memory_of(one) for name, one in options.items()}
            result = function(*map(self._memory_of, args), **own)
            return DeviceArray(result, self) if isinstance(result, np.ndarray) else result

        return call

    def _memory_of(self, value: Any) -> Any:
        if isinstance(value, DeviceArray):
            assert value.device is self, f"an array of {value.device.name} is given to {self.name}"
            return value.memory
        if isinstance(value, list | tuple):
            return [self._memory_of(one) for one in value]
        assert not isinstance(value, np.ndarray), "an array of the host is given to a device"
        return value


_FUNCTIONS = (
    "weighted_sum", "to_float32", "from_float32", "fused_update", "round_to_half", "quantise_2bit", "dequantise_2bit",
    "quantise_1bit", "dequantise_1bit", "squares",
)  # fmt: skip
