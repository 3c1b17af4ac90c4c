"""CuPy's part of a GPU: current device and stream, memory, and launches of the kernels of `kvdist.kernels.numba_cuda`.

Each call names its device and its stream, and leaves CuPy's current ones as they were. A kernel is compiled for a
device when it is first launched there, in some tenths of a second.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kvdist.errors import DeviceError
from kvdist.kernels.interface import Array
from kvdist.kernels.numba_cuda import BLOCKS_MAX, SIMULATED, THREADS, Kernel, assembled, tuple_type

_DIRECT_STREAMS = int(cupy.__version__.partition(".")[0]) >= 14
"""Whether CuPy takes streams of other libraries by their protocol; before that, by their address."""


class CupyRuntime:
    """Memory and launches of a GPU. Safe to use from several threads.

    Args:
        index: index of the GPU among the visible GPUs.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._name = f"cuda:{index}"
        self._device = cupy.cuda.Device(index)
        self._compiled: dict[Kernel, Any] = {}
        self._compiling = threading.Lock()
        self._torch_allocator = cupy.cuda.PythonFunctionAllocator(_torch_alloc, _torch_free)

    @contextmanager
    def here(self) -> Iterator[Any]:
        """Context in which the GPU and its stream, its value, are current. CuPy's errors pass unchanged."""
        torch = torch_with_cuda()
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
        """As `here`; CuPy's errors become a `DeviceError`. See `Kernels.active`."""
        with translated(self._name), self.here() as stream:
            yield stream

    # Memory.

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """See `Kernels.empty`."""
        with self.active():
            array: Array = cupy.empty(count, dtype)
        return array

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Array:
        """See `Kernels.zeros`."""
        array = self.empty(count, dtype)
        self.clear(array)
        return array

    def clear(self, array: Array) -> None:
        """Fill an array with zeros."""
        if array.nbytes:
            with self.active() as stream:
                runtime.memsetAsync(self.address(array), 0, array.nbytes, stream.ptr)

    def address(self, array: Array) -> int:
        """The address of an array.

        Arrays on which a kernel would fail are refused: after such a failure a process cannot use CUDA any more.

        Raises:
            TypeError: the array is not CuPy's.
            ValueError: the array lies on another device, is strided, or is not aligned.
        """
        if not isinstance(array, cupy.ndarray):
            raise TypeError(f"{self._name} works on arrays of CuPy, not on {type(array).__name__}: give `view` of it")
        memory: Any = array.data
        if memory.device_id != self._index and array.size:
            raise ValueError(f"{self._name} was given an array on cuda:{memory.device_id}: use `copy` between devices")
        if not array.flags.c_contiguous or memory.ptr % array.itemsize:
            raise ValueError(
                f"{self._name} was given an array that is strided or not aligned: copy it into a new array"
            )
        address: int = memory.ptr
        return address

    def copy_from_host(self, host: Array, out: Array) -> None:
        """Enqueue a copy of contiguous memory of the host to as many bytes of the GPU."""
        if host.nbytes:
            with self.active() as stream:
                target = self.address(out)
                runtime.memcpyAsync(target, host.ctypes.data, host.nbytes, runtime.memcpyHostToDevice, stream.ptr)

    def sent(self, host: Array) -> Array:
        """A copy on the GPU of an array in pageable memory of the host, which CUDA has read when this returns."""
        array = self.empty(host.size, host.dtype)
        self.copy_from_host(host, array)
        return array

    def number(self, array: Array) -> Any:
        """The single element of an array. Waits for the GPU."""
        host = np.empty(1, array.dtype)
        with self.active() as stream:
            source = self.address(array)
            runtime.memcpyAsync(host.ctypes.data, source, host.nbytes, runtime.memcpyDeviceToHost, stream.ptr)
            stream.synchronize()
        return host[0]

    # CuPy's own functions.

    def grouped(self, indices: Array) -> tuple[Array, Array, Array]:
        """Sort and group int64 indices. Waits for the GPU.

        Returns:
            The different indices, ascending; positions in `indices`, by index and then by position; and where among
            those positions each different index begins.
        """
        with self.active():
            order = cupy.argsort(indices)  # stable
            ascending = indices[order]
            heads = cupy.ones(indices.size, bool)
            cupy.not_equal(ascending[1:], ascending[:-1], out=heads[1:])
            starts = cupy.flatnonzero(heads)
            return ascending[starts], order, starts

    def total(self, array: Array) -> float:
        """The sum of a float64 array, the same at each call. Waits for the GPU."""
        with self.active():
            return float(array.sum())

    # Launches.

    def launch(self, kernel: Kernel, threads: int, *arguments: Any) -> None:
        """Enqueue a kernel on the current stream.

        Args:
            kernel: a kernel of `kvdist.kernels.numba_cuda`.
            threads: number of threads that have work; a grid of at most `BLOCKS_MAX` blocks shares it.
            arguments: arrays of the GPU, tuples and lists of arrays, numbers and tuples of numbers, for `kernel.types`.
                Numbers are rounded once to their types; what is too large is infinite.
        """
        if not threads:
            return
        blocks = self.grid(threads) // THREADS
        with self.active():
            with np.errstate(all="ignore"):
                given = [self._typed(name, value) for name, value in zip(kernel.types, arguments, strict=True)]
            if SIMULATED:
                kernel.simulate(blocks, given)
            else:
                flat = [part for value in given for part in (value if isinstance(value, tuple) else (value,))]
                # `given` keeps the tables until the kernel is enqueued; what reuses their memory runs after the kernel.
                words = [part if isinstance(part, np.generic) else np.uint64(part.data.ptr) for part in flat]
                self._function(kernel)((blocks,), (THREADS,), tuple(words))

    def grid(self, threads: int) -> int:
        """Number of threads of the grid that `launch` makes for so many threads."""
        return min(-(-threads // THREADS), BLOCKS_MAX) * THREADS

    def prepare(self, kernel: Kernel) -> None:
        """Compile a kernel, unless that has been done or numba's simulator runs it.

        Raises:
            NotCompiledError: numba cannot compile the kernel.
            DeviceError: the GPU cannot load it.
        """
        if not SIMULATED:
            self._function(kernel)

    def _function(self, kernel: Kernel) -> Any:
        """CuPy's function of a kernel."""
        function = self._compiled.get(kernel)
        if function is not None:
            return function
        with self._compiling, self.active():
            if kernel not in self._compiled:
                *major, minor = self._device.compute_capability
                program, name = self._program(kernel, (int("".join(major)), int(minor)))
                module = cupy.cuda.function.Module()
                module.load(program)
                self._compiled[kernel] = module.get_function(name)
            return self._compiled[kernel]

    def _program(self, kernel: Kernel, capability: tuple[int, int]) -> tuple[bytes, str]:
        """The program of a kernel, which CUDA loads, and the kernel's name in it."""
        try:
            ptx, name = kernel.compile(capability)
        except Exception as error:
            raise NotCompiledError(
                f"numba cannot compile {kernel.function.__name__} for {self._name} ({type(error).__name__}:"
                f" {first_line(error)}); if no kernel can be compiled, install numba-cuda with its compiler, such as"
                " with `pip install 'numba-cuda[cu12]'`"
            ) from error
        return assembled(ptx, capability), name

    def _typed(self, name: str, value: Any) -> Any:
        """An argument of a kernel: a number of NumPy's, an array, or a tuple of these.

        A table of arrays is an array of their addresses on the GPU, and a list of the arrays in the simulator.

        Args:
            name: the argument's type, as in `Kernel.types`.
            value: the argument, as given to `launch`.
        """
        element, count = tuple_type(name)
        if count is not None:
            return tuple([self._typed(element, part) for part in value])
        if name.endswith("**"):
            typed = [self._typed(name[:-1], array) for array in value]
            return typed if SIMULATED else self.sent(np.array([array.data.ptr for array in typed], np.uint64))
        if not name.endswith("*"):
            return np.dtype(name).type(value)
        self.address(value)  # refuses what a kernel would fail on
        return value.view(np.ndarray).view(name[:-1]) if SIMULATED else value


class NotCompiledError(DeviceError):
    """numba cannot compile a kernel. Other failures of a GPU, such as a full memory, say nothing of the kernel."""


class _Foreign:
    """A stream of another library, as its protocol shows it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


def index_of(value: Any) -> int:
    """Index of the GPU on which an array with ``__cuda_array_interface__`` lies, as CUDA knows it; 0 without memory."""
    address = value.__cuda_array_interface__["data"][0]
    return int(runtime.pointerGetAttributes(address).device) if address else 0


def torch_with_cuda() -> Any:
    """The module torch, if it has begun to use CUDA in this process; else None."""
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


@contextmanager
def translated(name: str) -> Iterator[None]:
    """Context in which errors of CUDA, CuPy, numba and torch's allocator become a `DeviceError` with a remedy.

    Args:
        name: name of the GPU.
    """
    try:
        yield
    except DeviceError:
        raise
    except cupy.cuda.compiler.CompileException as error:  # of CuPy's own functions; not a RuntimeError
        raise DeviceError(
            f"CuPy cannot compile for {name}: {first_line(error)}; install CuPy for this driver together with CUDA's"
            " headers, such as with `pip install 'cupy-cuda12x[ctk]'`"
        ) from error
    except (MemoryError, RuntimeError) as error:
        text = str(error)
        if isinstance(error, MemoryError) or "out of memory" in text.lower() or "MemoryAllocation" in text:
            raise DeviceError(
                f"the memory of {name} is full ({first_line(error)}): keep fewer or smaller values there, or use"
                " another device"
            ) from error
        if "UNSUPPORTED_PTX_VERSION" in text or "INVALID_IMAGE" in text:
            raise DeviceError(
                f"the driver of {name} is older than the compiler of numba-cuda ({first_line(error)}): install a newer"
                " driver, or the compiler and nvJitLink of the driver's version of CUDA, such as with `pip install"
                " 'numba-cuda[cu12]'`"
            ) from error
        raise DeviceError(f"{name} failed: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """The first line of an error's message, without a full stop; the name of its class if it has no message."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
