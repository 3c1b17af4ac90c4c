"""A GPU driven by CuPy: memory, streams, copies, and the launches of our own kernels. See `kvdist.kernels.interface`.

Rules that hold here: this is the only importer of CuPy, and is imported only when a GPU is asked for. Each
call names its device and its stream and leaves CuPy's current ones as they were. Kernels are compiled when they are
first launched, each by itself, in some tenths of a second. CuPy's own kernels, which take subnormal numbers for zero,
do only what is left: they sort rows' indices, and run the optimizers that have no kernel, under `Kernels.active`.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.cupy_cuda import COMPILE_OPTIONS, THREADS, family_of, source
from kvdist.kernels.cupy_cuda.arithmetic import CudaArithmetic
from kvdist.kernels.interface import Array, Device, Equation

_NO_DEVICE, _OLD_DRIVER, _PEER_ALREADY = 100, 35, 704
"""Numbers of CUDA's errors."""

_READ_ONLY = 8
"""The flag of memory that may be registered although it cannot be written to, where the device can do that."""

_DIRECT_STREAMS = int(cupy.__version__.partition(".")[0]) >= 14
"""Whether CuPy takes streams of others by their protocol; before that, by their address."""


def open_device(index: int) -> Device:
    """The GPU of this number among the visible ones; begins to use it.

    Raises:
        DeviceError: there is none, or it cannot be used; the message says why and what to do.
    """
    try:
        count = runtime.getDeviceCount()
    except runtime.CUDARuntimeError as error:
        raise DeviceError(_missing(error)) from error
    if not 0 <= index < count:
        there = "cuda:0 is" if count == 1 else f"cuda:0 to cuda:{count - 1} are"
        raise DeviceError(f"there is no cuda:{index}: {there} visible here; name one of these, or set"
                          " CUDA_VISIBLE_DEVICES before the program starts")  # fmt: skip
    device = CupyDevice(index)
    with device.kernels.active():
        runtime.memGetInfo()
    return device


class CupyEvent:
    """See `DeviceEvent`. A thread that waits sleeps."""

    def __init__(self, event: Any, name: str) -> None:
        self.event = event
        self._name = name

    def wait(self) -> None:
        """See `DeviceEvent.wait`.

        Raises:
            DeviceError: something that was asked for before failed.
        """
        with _translated(self._name):
            self.event.synchronize()


class CupyDevice(CudaArithmetic):
    """See `Device`. Made by `open_device`."""

    _runtime: CupyRuntime

    def __init__(self, index: int) -> None:
        self._index = index
        super().__init__(CupyRuntime(index), f"cupy on {self.name}")
        self._peers: set[int] = set()

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def index(self) -> int:
        return self._index

    @property
    def library(self) -> str:
        version = runtime.runtimeGetVersion()
        return f"CuPy {cupy.__version__} with CUDA {version // 1000}.{version % 1000 // 10}"

    def runs(self, equation: Equation | None) -> bool:
        """See `Device.runs`. Where there is no kernel CuPy's own do, which take subnormal numbers for zero."""
        return True

    def stream(self) -> Any:
        torch = _torch_with_cuda()
        if torch is not None:
            return torch.cuda.current_stream(self._index)
        with self._runtime.active() as stream:
            return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        torch = _torch_with_cuda()
        if torch is not None and isinstance(stream, torch.cuda.Stream):
            with torch.cuda.stream(stream):
                yield
        else:
            with cupy.cuda.Device(self._index), stream:
                yield

    # Memory.

    def view(self, value: Any, dtype: DType) -> Array:
        """See `Device.view`.

        Raises:
            TypeError, ValueError: the value is not of `dtype`, or not contiguous.
            DeviceError: it lies elsewhere.
        """
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(value, torch.Tensor)
        with _translated(self.name):
            return self._view_of_tensor(value, dtype) if is_tensor else self._view_of_array(value, dtype)

    def _view_of_tensor(self, tensor: Any, dtype: DType) -> Array:
        if str(tensor.dtype) != f"torch.{dtype.label}":
            raise TypeError(f"a tensor of {tensor.dtype} was given where {dtype.label} is expected")
        if not tensor.is_contiguous():
            raise ValueError("a tensor that is not contiguous has no view: make it so with .contiguous()")
        if tensor.device.type != "cuda" or tensor.device.index != self._index:
            raise DeviceError(f"a tensor on {tensor.device} was given to {self.name}: move it with .to('{self.name}')")
        size = tensor.numel()
        memory = cupy.cuda.UnownedMemory(tensor.data_ptr(), size * dtype.itemsize, tensor.detach(), self._index)
        array: Array = cupy.ndarray((size,), dtype.storage, cupy.cuda.MemoryPointer(memory, 0))
        return array

    def _view_of_array(self, value: Any, dtype: DType) -> Array:
        with self._runtime.here():
            array = cupy.asarray(value)  # no copy, because it lies on a device
        if array.dtype != dtype.storage:
            raise TypeError(f"an array of {array.dtype} was given where {dtype.label} is expected")
        if not array.flags.c_contiguous:
            raise ValueError("an array that is not contiguous has no view: make it so with cupy.ascontiguousarray")
        if array.device.id != self._index:
            raise DeviceError(f"an array on cuda:{array.device.id} was given to {self.name}: copy it there first")
        flat: Array = array.reshape(-1)
        return flat

    def upload(self, host: Array, out: Array) -> None:
        _check_copy(host, out)
        self._runtime.copy_from_host(host, out)

    def download(self, array: Array, host: Array) -> None:
        _check_copy(array, host)
        if array.nbytes:
            with self._runtime.active() as stream:
                source = self._runtime.address(array)
                runtime.memcpyAsync(host.ctypes.data, source, array.nbytes, runtime.memcpyDeviceToHost, stream.ptr)

    def copy(self, array: Array, out: Array, source: Device) -> None:
        """See `Device.copy`. What `source` is asked for behind this waits for the copy."""
        _check_copy(array, out)
        if not array.nbytes:
            return
        foreign: Any = array
        given, target = foreign.__cuda_array_interface__["data"][0], self._runtime.address(out)
        if source.index == self._index:
            with self._runtime.active() as stream:
                runtime.memcpyAsync(target, given, array.nbytes, runtime.memcpyDeviceToDevice, stream.ptr)
            return
        mark = source.mark()
        with self._runtime.active() as stream:
            self._reach(source.index)
            if isinstance(mark, CupyEvent):
                stream.wait_event(mark.event)
            else:
                mark.wait()
            runtime.memcpyPeerAsync(target, self._index, given, source.index, array.nbytes, stream.ptr)
        if isinstance(source, CupyDevice):
            source.follow(self.mark())

    def follow(self, mark: CupyEvent) -> None:
        """Let what this thread asks for from now on wait for a mark of another device."""
        with self._runtime.active() as stream:
            stream.wait_event(mark.event)

    def reaches(self, other: Device) -> bool:
        if other.index == self._index:
            return True
        with _translated(self.name):
            return bool(runtime.deviceCanAccessPeer(self._index, other.index))

    def mark(self) -> CupyEvent:
        with self._runtime.active() as stream:
            event = cupy.cuda.Event(block=True, disable_timing=True)
            event.record(stream)
        return CupyEvent(event, self.name)

    def pin(self, host: Array) -> Any:
        if not host.nbytes:
            return None
        flags = runtime.hostAllocPortable | (0 if host.flags.writeable else _READ_ONLY)
        try:
            with cupy.cuda.Device(self._index):
                runtime.hostRegister(host.ctypes.data, host.nbytes, flags)
        except runtime.CUDARuntimeError:  # registered already, say
            return None
        return Pinned(host, self._index)

    def _reach(self, peer: int) -> None:
        """Allow direct copies from another device, once. The current device is this one."""
        if peer in self._peers:
            return
        if runtime.deviceCanAccessPeer(self._index, peer):
            try:
                runtime.deviceEnablePeerAccess(peer)
            except runtime.CUDARuntimeError as error:
                if error.status != _PEER_ALREADY:
                    raise
        self._peers.add(peer)


class CupyRuntime:
    """Memory and launches of one device: see `CudaRuntime`. Safe to use from several threads."""

    def __init__(self, index: int) -> None:
        self._index = index
        self._name = f"cuda:{index}"
        self._device = cupy.cuda.Device(index)
        self._compiled: dict[str, Any] = {}
        self._compiling = threading.Lock()
        self._torch_allocator = cupy.cuda.PythonFunctionAllocator(_torch_alloc, _torch_free)

    @contextmanager
    def here(self) -> Iterator[Any]:
        """Make this device and its stream current; gives the stream. Errors pass as they are."""
        torch = _torch_with_cuda()
        with self._device:
            stream = cupy.cuda.get_current_stream() if torch is None else _stream_of(torch, self._index)
            with stream:
                if torch is None:
                    yield stream
                else:
                    with cupy.cuda.using_allocator(self._torch_allocator.malloc):
                        yield stream

    @contextmanager
    def active(self) -> Iterator[Any]:
        """As `here`; errors become a `DeviceError`."""
        with _translated(self._name), self.here() as stream:
            yield stream

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        with self.active():
            array: Array = cupy.empty(count, dtype)
        return array

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Array:
        array = self.empty(count, dtype)
        self.clear(array)
        return array

    def clear(self, array: Array) -> None:
        if array.nbytes:
            with self.active() as stream:
                runtime.memsetAsync(self.address(array), 0, array.nbytes, stream.ptr)

    def address(self, array: Array) -> int:
        """See `CudaRuntime.address`. Refuses what a kernel would fail on: after such a failure CUDA does nothing more.

        Raises:
            TypeError: it is not an array of CuPy.
            ValueError: it lies elsewhere, or not as kernels expect.
        """
        if not isinstance(array, cupy.ndarray):
            raise TypeError(f"{self._name} works on arrays of CuPy, not on {type(array).__name__}: give `view` of it")
        memory: Any = array.data
        if memory.device_id != self._index and array.size:
            raise ValueError(f"{self._name} was given an array on cuda:{memory.device_id}: use `copy` between devices")
        if not array.flags.c_contiguous or memory.ptr % array.itemsize:
            raise ValueError(f"{self._name} was given an array that is strided or not aligned: copy it into a new one")
        address: int = memory.ptr
        return address

    def copy_from_host(self, host: Array, out: Array) -> None:
        """Copy contiguous memory of the host to as many bytes of the device."""
        if host.nbytes:
            with self.active() as stream:
                target = self.address(out)
                runtime.memcpyAsync(target, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def sent(self, host: Array) -> Array:
        """See `CudaRuntime.sent`. Memory that is not pinned has been read when CUDA's copy returns."""
        octets = np.ascontiguousarray(host).view(np.uint8).reshape(-1)
        array = self.empty(octets.size, octets.dtype)
        self.copy_from_host(octets, array)
        return array

    def number(self, array: Array) -> Any:
        host = np.empty(1, array.dtype)
        with self.active() as stream:
            source = self.address(array)
            runtime.memcpyAsync(host.ctypes.data, source, host.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
            stream.synchronize()
        return host[0]

    def grouped(self, indices: Array) -> tuple[Array, Array, Array]:
        """See `CudaRuntime.grouped`. CuPy's sort is stable."""
        with self.active():
            order = cupy.argsort(indices)
            ascending = indices[order]
            heads = cupy.ones(indices.size, bool)
            cupy.not_equal(ascending[1:], ascending[:-1], out=heads[1:])
            starts = cupy.flatnonzero(heads)
            return ascending[starts], order, starts

    def launch(self, kernel: str, blocks: int, *arguments: Any) -> None:
        with self.active():
            function = self._compiled.get(kernel) or self._compile(kernel)
            function((blocks,), (THREADS,), arguments)

    def _compile(self, kernel: str) -> Any:
        """Not by `cupy.RawModule`, which tells the compiler to take subnormal numbers for zero."""
        with self._compiling:
            if kernel not in self._compiled:
                text = source(family_of(kernel))
                nvrtc = cupy.cuda.compiler.compile_using_nvrtc
                program, names = nvrtc(text, COMPILE_OPTIONS, name_expressions=(kernel,))
                module = cupy.cuda.function.Module()
                module.load(program)
                self._compiled[kernel] = module.get_function(names[kernel])
            return self._compiled[kernel]


class Pinned:
    """Registered memory of the host, until this is released."""

    def __init__(self, host: Array, index: int) -> None:
        self._release = weakref.finalize(self, _unregister, host, index)


class _Foreign:
    """A stream of another library, as its protocol shows it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def _unregister(host: Array, index: int) -> None:
    """`host` is kept until this has run."""
    try:
        with cupy.cuda.Device(index):
            runtime.hostUnregister(host.ctypes.data)
    except runtime.CUDARuntimeError:  # at the end of the program CUDA may be gone before us
        return


def _torch_with_cuda() -> Any:
    """torch, if it has begun to use CUDA in this process."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)  # missing while another thread imports it
    return torch if cuda is not None and cuda.is_initialized() else None


def _stream_of(torch: Any, index: int) -> Any:
    """torch's current stream of this thread, as CuPy's."""
    address = torch.cuda.current_stream(index).cuda_stream
    if _DIRECT_STREAMS:
        return cupy.cuda.Stream.from_external(_Foreign(address))
    return cupy.cuda.ExternalStream(address, index)


def _torch_alloc(size: int, index: int) -> int:
    address: int = sys.modules["torch"].cuda.caching_allocator_alloc(size, index)
    return address


def _torch_free(address: int, _index: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None:  # else the interpreter is being taken down
        torch.cuda.caching_allocator_delete(address)


def _check_copy(source: Array, target: Array) -> None:
    if source.dtype != target.dtype or source.size != target.size:
        raise ValueError(
            f"{source.size} elements of {source.dtype} cannot be copied to {target.size} of {target.dtype}"
        )
    if not (source.flags.c_contiguous and target.flags.c_contiguous):
        raise ValueError("only contiguous arrays are copied: make them so first")


def _missing(error: Any) -> str:
    """Why there is no GPU at all."""
    if error.status == _NO_DEVICE:
        return "no GPU is visible: run on a machine with a GPU, or check CUDA_VISIBLE_DEVICES"
    if error.status == _OLD_DRIVER:
        version = runtime.runtimeGetVersion()
        return (
            f"no GPU can be used: the driver is missing or older than CuPy's CUDA {version // 1000}.x; install or"
            " update the driver, or install the CuPy for it, such as cupy-cuda12x"
        )
    return f"no GPU can be used: CUDA says {error}"


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Make sentences of what CUDA, CuPy and torch's allocator raise."""
    try:
        yield
    except DeviceError:
        raise
    except cupy.cuda.compiler.CompileException as error:
        raise DeviceError(
            f"CuPy cannot compile for {name}: {_first_line(error)}; install CuPy for this driver together with CUDA's"
            " headers, such as with `pip install 'cupy-cuda12x[ctk]'`"
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "out of memory" in str(error).lower() or "MemoryAllocation" in str(error):
            raise DeviceError(
                f"the memory of {name} is full ({_first_line(error)}): keep fewer or smaller values there, or use"
                " another device"
            ) from error
        raise DeviceError(f"{name} failed: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
