"""Memory of one GPU, and the arrays in it, as numba drives them.

numba's own arrays have no arithmetic and wait for the device at every assignment; `NumbaArray` holds one and shows what
`kvdist.kernels.interface` promises of an array.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numba import cuda

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.interface import Array
from kvdist.kernels.numba_gpu_launch import Name, launch, launch_blocks
from kvdist.kernels.numba_gpu_parts import SIMULATED
from kvdist.kernels.numba_gpu_streams import Held, Streams, torch_with_cuda

_CUDA = 2
"""DLPack's code of CUDA memory."""


class NumbaArray:
    """A one-dimensional, contiguous array on a device.

    Args:
        native: numba's own.
        memory: of the device on which it lies.
    """

    __slots__ = ("_memory", "_native")

    def __init__(self, native: Any, memory: Memory) -> None:
        self._native, self._memory = native, memory

    @property
    def native(self) -> Any:
        """numba's own array, which its kernels take."""
        return self._native

    @property
    def memory(self) -> Memory:
        """Of the device on which it lies."""
        return self._memory

    @property
    def size(self) -> int:
        """Elements."""
        return int(self._native.size)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their type."""
        dtype: np.dtype[Any] = self._native.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def address(self) -> int:
        """Where it begins."""
        return int(self.__cuda_array_interface__["data"][0])

    @property
    def shape(self) -> tuple[int]:
        """Its length."""
        return (self.size,)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if SIMULATED:
            return {**self._native.__array_interface__, "version": 3}
        interface: dict[str, Any] = self._native.__cuda_array_interface__
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, self._memory.index

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> NumbaArray:
        if key is Ellipsis:
            return self
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(f"an array on a device is cut with slices of step 1, not with {key!r}")
        start, stop, _ = key.indices(self.size)
        if stop <= start:
            return self._memory.empty(0, self.dtype)
        with self._memory.streams.current():
            return NumbaArray(self._native[start:stop], self._memory)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if isinstance(value, NumbaArray):
            self._memory.copy(value, target)
        elif isinstance(value, int | float | np.number):
            self._memory.fill(target, value)
        else:
            raise TypeError(f"an array on a device is filled with a number or another array, not with {value!r}")

    def view(self, dtype: Any) -> NumbaArray:
        """The same memory as elements of another type."""
        return self if self.dtype == dtype else NumbaArray(self._native.view(dtype), self._memory)

    def reshape(self, shape: tuple[int, ...]) -> Any:
        """The same memory as an array of numba's own, which is what users know."""
        with self._memory.streams.current():
            return self._native.reshape(shape)

    def copy(self) -> NumbaArray:
        """The same in memory of its own."""
        copied = self._memory.empty(self.size, self.dtype)
        self._memory.copy(self, copied)
        return copied


class Memory:
    """Of one GPU.

    Args:
        index: its number among the visible ones.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.streams = Streams(index)

    def empty(self, count: int, dtype: np.dtype[Any]) -> NumbaArray:
        """A new array; its content means nothing. From torch's allocator where torch uses CUDA."""
        torch = torch_with_cuda()
        with self.streams.current():
            if torch is None or not count:
                return self._own(count, dtype)
            octets = torch.empty(count * np.dtype(dtype).itemsize, dtype=torch.uint8, device=f"cuda:{self.index}")
            return NumbaArray(cuda.as_cuda_array(octets, sync=False).view(dtype), self)

    def _own(self, count: int, dtype: np.dtype[Any]) -> NumbaArray:
        """A new array in memory of numba's own. The device is current."""
        native = cuda.device_array(count, np.dtype(dtype))
        if count and not SIMULATED:
            native = cuda.as_cuda_array(Held(native, self.streams), sync=False)
        return NumbaArray(native, self)

    def zeros(self, count: int, dtype: np.dtype[Any]) -> NumbaArray:
        """A new array of zeros."""
        array = self.empty(count, dtype)
        self.fill(array, 0)
        return array

    def launch(self, name: Name, elements: int, *arguments: Any) -> None:
        """Run a kernel over so many elements. Arrays come as `NumbaArray`, and in tuples."""
        launch(self.streams, name, elements, *map(_to_native, arguments))

    def launch_blocks(self, name: Name, blocks: int, *arguments: Any) -> None:
        """Run a kernel that shares out its work by blocks."""
        launch_blocks(self.streams, name, blocks, *map(_to_native, arguments))

    def fill(self, array: NumbaArray, value: float | np.number[Any]) -> None:
        """Make every element this number."""
        label = f"uint{8 * array.dtype.itemsize}"
        bits = np.array([value]).astype(array.dtype).view(label)[0]
        self.launch(("fill", label, 0), array.size, array.view(label), bits)

    def copy(self, array: NumbaArray, out: NumbaArray) -> None:
        """Copy within this device, or from another that it reaches."""
        self._require_same(array, out)
        if out.size:
            with self.streams.current():
                out.native.copy_to_device(array.native, stream=self.streams.stream())

    def upload(self, host: Array, out: NumbaArray) -> None:
        """Copy from the host, later; `host` must not change before."""
        self._require_same(host, out)
        if out.size:
            with self.streams.current():
                out.native.copy_to_device(host, stream=self.streams.stream())

    def download(self, array: NumbaArray, host: Array) -> None:
        """Copy to the host, later."""
        self._require_same(array, host)
        if array.size:
            with self.streams.current():
                array.native.copy_to_host(host, stream=self.streams.stream())

    def fetched(self, array: NumbaArray) -> Array:
        """A copy on the host, waited for."""
        host = np.empty(array.size, array.dtype)
        self.download(array, host)
        self.streams.wait()
        return host

    def sent(self, host: Array) -> NumbaArray:
        """A copy on the device, waited for: `host` may change, and any stream may read the copy.

        It lies in memory of numba's own, which is not used again before every stream is done with it.
        """
        with self.streams.current():
            array = self._own(host.size, host.dtype)
        self.upload(host, array)
        self.streams.wait()
        return array

    def view(self, value: Any, dtype: DType) -> NumbaArray:
        """A value on this device as an array of `dtype.storage`; nothing is copied.

        Raises:
            TypeError, ValueError: it has another type, or is not contiguous.
            DeviceError: it lies elsewhere.
        """
        if isinstance(value, NumbaArray):
            if value.memory.index != self.index:
                raise DeviceError(f"a value lies on cuda:{value.memory.index} where one of cuda:{self.index} is wanted")
            return _as_bits(value, dtype)
        with self.streams.current():
            return _as_bits(NumbaArray(_native(_plain(value, dtype, self.index)), self), dtype)

    def _require_same(self, source: Array | NumbaArray, target: Array | NumbaArray) -> None:
        if source.size != target.size or source.dtype != target.dtype:
            raise ValueError(
                f"{source.size} elements of {source.dtype} cannot be copied to {target.size} of {target.dtype}"
            )


def _to_native(argument: Any) -> Any:
    if isinstance(argument, NumbaArray):
        return argument.native
    if isinstance(argument, tuple):
        return tuple([_to_native(each) for each in argument])
    return argument


def _plain(value: Any, dtype: DType, index: int) -> Any:
    """A torch tensor as one that has the array interface: flat, without a history, bfloat16 as int16."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is not contiguous: call .contiguous() on it")
    if not SIMULATED and (value.device.type != "cuda" or value.device.index != index):
        raise DeviceError(f"a tensor lies on {value.device} where one of cuda:{index} is wanted")
    flat = value.detach().reshape(-1)
    flat = flat.view(torch.int16) if value.dtype == torch.bfloat16 and dtype is DType.BFLOAT16 else flat
    return flat.numpy() if SIMULATED else flat


def _native(value: Any) -> Any:
    """numba's array of a value's memory, flat. In the simulator the memory of the host is also that of the device."""
    if not SIMULATED:
        native = cuda.as_cuda_array(value, sync=False)
        if not native.is_c_contiguous():
            raise ValueError(f"an array of shape {tuple(native.shape)} is not contiguous: make a copy of it that is")
        return native.reshape(int(native.size)) if native.ndim != 1 else native
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return value.reshape(-1) if isinstance(value, FakeCUDAArray) else FakeCUDAArray(np.asarray(value).reshape(-1))


def _as_bits(array: NumbaArray, dtype: DType) -> NumbaArray:
    if array.dtype.itemsize != dtype.itemsize or (array.dtype.kind == "f") != (dtype.storage.kind == "f"):
        raise TypeError(f"a value of {array.dtype} is not one of {dtype.label}: cast it, or say its own type")
    return array.view(dtype.storage)
