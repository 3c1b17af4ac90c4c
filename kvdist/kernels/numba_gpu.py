"""One GPU as numba.cuda drives it: `kvdist.kernels.interface` with kernels written in Python.

Only who was asked for a device imports this module, because importing numba takes long. Without a GPU everything here
runs in numba's simulator, where NUMBA_ENABLE_CUDASIM=1 was set before numba was imported; then the memory of the device
is that of the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import Any

import numba
from numba import cuda

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.interface import Array, Device, Kernels
from kvdist.kernels.numba_gpu_kernels import NumbaKernels, as_array, kernels_of
from kvdist.kernels.numba_gpu_launch import compiled
from kvdist.kernels.numba_gpu_memory import Memory
from kvdist.kernels.numba_gpu_merge import add_rows, gather_rows, merge_rows
from kvdist.kernels.numba_gpu_parts import SIMULATED
from kvdist.kernels.numba_gpu_streams import Held
from kvdist.kernels.numba_gpu_tables import Tables

if not SIMULATED and cuda.implementation != "NVIDIA":
    raise ImportError("the CUDA part of numba is a package of its own now: pip install numba-cuda[cu12]")

LIBRARY = f"numba {numba.__version__}, {'simulated' if SIMULATED else cuda.implementation}"


def open_device(index: int) -> Device:
    """The GPU with this number.

    Raises:
        DeviceError: there is no driver, no such device, or nothing that compiles for it.
    """
    if not cuda.is_available():
        why = " ".join(str(cuda.cuda_error() or "it sees no device").split())
        raise DeviceError(
            f"cuda:{index} cannot be used: no CUDA driver or device was found ({why}); install NVIDIA's driver, or set"
            " KVDIST_GPU=host"
        )
    count = len(cuda.gpus)
    if not 0 <= index < count:
        raise DeviceError(f"there is no cuda:{index}: {count} device(s) are visible, cuda:0 to cuda:{count - 1}")
    return NumbaDevice(index)


def index_of(value: Any) -> int:
    """The number of the GPU on which an array with ``__cuda_array_interface__`` lies; the driver knows."""
    address = value.__cuda_array_interface__["data"][0]
    if SIMULATED or not address:
        return 0
    from numba.cuda.cudadrv.driver import binding, driver  # the simulator has no driver

    kind = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver.cuPointerGetAttribute(kind, binding.CUdeviceptr(address)))


class NumbaMark:
    """See `DeviceEvent`."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        with memory.streams.current():
            self._held = Held(cuda.event() if SIMULATED else cuda.event(timing=False), memory.streams)
            self.event.record(memory.streams.stream())

    @property
    def event(self) -> Any:
        """numba's own."""
        return self._held.native

    def wait(self) -> None:
        """See `DeviceEvent`."""
        with self._memory.streams.current():
            self.event.synchronize()


class NumbaDevice:
    """See `Device`. Safe to use from several threads.

    Args:
        index: its number among the visible ones.

    Raises:
        DeviceError: the device cannot be used.
    """

    def __init__(self, index: int) -> None:
        self._memory = Memory(index)
        self._functions = NumbaKernels(self._memory)
        self._kernels = kernels_of(self._functions)
        self._tables = Tables(self._memory)
        self._met: set[int] = set()
        with self._memory.streams.current():
            # What keeps kernels from being compiled is said now, not in a step.
            compiled(("copy", "uint8", 0), self._memory.streams.capability())

    @property
    def name(self) -> str:
        """See `Device`."""
        return f"cuda:{self.index}"

    @property
    def index(self) -> int:
        """See `Device`."""
        return self._memory.index

    @property
    def library(self) -> str:
        """See `Device`."""
        return LIBRARY

    @property
    def obeys_numpy(self) -> bool:
        """numba's arrays have no arithmetic."""
        return False

    @property
    def kernels(self) -> Kernels:
        """See `Device`."""
        return self._kernels

    @property
    def memory(self) -> Memory:
        """What the device's arrays lie in."""
        return self._memory

    def view(self, value: Any, dtype: DType) -> Any:
        """See `Device`."""
        return self._memory.view(value, dtype)

    def upload(self, host: Array, out: Any) -> None:
        """See `Device`."""
        self._memory.upload(host, as_array(out))

    def download(self, array: Any, host: Array) -> None:
        """See `Device`."""
        self._memory.download(as_array(array), host)

    def copy(self, array: Any, out: Any, source: Device) -> None:
        """See `Device`. The driver takes the way over the host where the two devices do not reach each other."""
        if source.index == self.index:
            self._memory.copy(as_array(array), as_array(out))
            return
        if not isinstance(source, NumbaDevice):
            raise DeviceError(f"{source.name} is driven by {source.library}: all devices of a store need one library")
        self._meet(source)
        self._follow(source)
        self._memory.copy(as_array(array), as_array(out))
        source._follow(self)

    def _follow(self, other: NumbaDevice) -> None:
        """Let this device's stream wait for what the other's has been asked for until now."""
        event = other.mark().event
        with self._memory.streams.current():
            event.wait(self._memory.streams.stream())

    def _meet(self, source: Device) -> None:
        """Let this device read the memory of another, if it can; once."""
        if source.index in self._met:
            return
        self._met.add(source.index)
        if not SIMULATED and self.reaches(source):
            with suppress(DeviceError), self._memory.streams.current():  # torch may have done it
                cuda.current_context().enable_peer_access(cuda.gpus[source.index].get_primary_context().handle)

    def reaches(self, other: Device) -> bool:
        """See `Device`."""
        if SIMULATED or other.index == self.index:
            return True
        with self._memory.streams.current():
            return bool(cuda.current_context().can_access_peer(other.index))

    def mark(self) -> NumbaMark:
        """See `Device`."""
        return NumbaMark(self._memory)

    def stream(self) -> int:
        """See `Device`."""
        return self._memory.streams.handle()

    def on(self, stream: int) -> AbstractContextManager[None]:
        """See `Device`."""
        return self._memory.streams.on(stream)

    def pin(self, host: Array) -> Any:
        """See `Device`."""
        if not host.nbytes:
            return None
        if SIMULATED:
            return host[:0]
        try:
            with self._memory.streams.current():
                pinned = cuda.current_context().mempin(host, host.ctypes.data, host.nbytes, mapped=False)
                return Held(pinned, self._memory.streams)
        except DeviceError:
            return None

    def pack(self, sources: Sequence[Any], offsets: Sequence[int], out: Any) -> None:
        """See `Device`."""
        start, arrays = as_array(out).address, list(map(as_array, sources))
        self._tables.copy(
            [(each.address, start + offset, each.nbytes) for each, offset in zip(arrays, offsets, strict=True)]
        )

    def unpack(self, source: Any, offsets: Sequence[int], outs: Sequence[Any]) -> None:
        """See `Device`."""
        start, arrays = as_array(source).address, list(map(as_array, outs))
        self._tables.copy(
            [(start + offset, each.address, each.nbytes) for each, offset in zip(arrays, offsets, strict=True)]
        )

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        """See `Device`."""
        self._functions.add_dequantised_2bit(data, threshold, total)

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:  # as `Device`
        """See `Device`."""
        self._functions.add_dequantised_1bit(data, total)

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Any, Any]:
        """See `Device`."""
        return merge_rows(self._memory, indices, rows, dtype)

    def gather_rows(self, table: Array, indices: Array, out: Array) -> None:
        """See `Device`."""
        gather_rows(self._memory, table, indices, out)

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        """See `Device`."""
        add_rows(self._memory, table, indices, rows)

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """See `Device`."""
        return self._tables.finite(arrays, dtype)
