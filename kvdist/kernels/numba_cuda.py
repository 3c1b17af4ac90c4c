"""One GPU as numba drives it, with kernels written in Python: what takes over where CuPy is not installed.

Kernels are here for float32 and float64: the sum of any number of arrays, that sum with SGD (plain and with momentum)
or Adam, and 2-bit codes. Other functions of a `Device` compute in the host's memory, and say so once; other rules raise
an error, because their states would cross the bus at every step. Rules that hold here:

* Bits are the reference's. Every product goes through an instruction that the compiler cannot fuse with the addition
  behind it, divisions and roots are rounded to nearest, and sums are added in the order given.
* What numba owns is released with its device current: the driver refuses that otherwise. See `_release_on`.
* With NUMBA_ENABLE_CUDASIM=1 numba runs kernels as plain Python, and the host's memory is the device's. While one runs,
  the name `cuda` in this module stands for that thread's place in the grid: other code says `numba.cuda`.
"""

from __future__ import annotations

import logging
import operator
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, SupportsInt

import numba
import numpy as np
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.interface import NUMBERS_MAX, Array, Device, Equation, Kernels
from kvdist.kernels.quantization import WORD_ELEMENTS_2BIT, check_dequantised, check_quantised
from kvdist.kernels.reference import REFERENCE, check_sum, factored

LOG = logging.getLogger("kvdist")

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Whether kernels run in numba's simulator."""

if not SIMULATED and cuda.implementation != "NVIDIA":
    raise ImportError("numba needs the package numba-cuda for GPUs: pip install 'numba-cuda[cu12]'")

LIBRARY = f"numba {numba.__version__}, {'simulated' if SIMULATED else cuda.implementation}"

LAUNCH_SOURCES_MAX = 8
"""How many arrays one launch sums: a kernel is compiled for each number of them. More take several launches."""

THREADS = 2 if SIMULATED else 256
"""In a block. The simulator starts a thread of Python for each: few, but more than one, so that strides are walked."""

BLOCKS_MIN, BLOCKS_MAX = (1, 2) if SIMULATED else (128, 132 * 16)
"""Of a grid. More work than it has threads is walked in strides; with fewer blocks than the least numba warns."""

WHOLE = 1 << 62
"""`Kernels.chunk_elements`: one launch takes everything."""

_DLPACK_CUDA = 2
_OUT_OF_MEMORY = 2
_OLD_DRIVER = {35: "CUDA_ERROR_INSUFFICIENT_DRIVER", 222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"}
"""Numbers of the driver's errors, as in cuda.h."""
_SIMULATOR = threading.RLock()
"""numba's simulator runs one kernel at a time."""


# Kernels. Each is made for one floating type, whose arithmetic it closes over.


class _Arithmetic(NamedTuple):
    """Operations that are rounded one by one."""

    times: Callable[..., Any]
    divide: Callable[..., Any]
    root: Callable[..., Any]


if SIMULATED:
    _EXACT = _Arithmetic(operator.mul, operator.truediv, np.sqrt)
    _ARITHMETIC = {"float32": _EXACT, "float64": _EXACT}
else:
    from numba.cuda import libdevice

    _ARITHMETIC = {
        "float32": _Arithmetic(libdevice.fmul_rn, libdevice.fdiv_rn, libdevice.fsqrt_rn),
        "float64": _Arithmetic(libdevice.dmul_rn, libdevice.ddiv_rn, libdevice.dsqrt_rn),
    }


def _part(function):
    """A function that becomes part of kernels."""
    return function if SIMULATED else cuda.jit(device=True)(function)


def _sum_kernel(arithmetic: _Arithmetic) -> Any:
    times = arithmetic.times

    @cuda.jit
    def weighted_sum(out, sources, scales, factor, goes_on):
        """out ← factor · Σ scales[j]·sources[j], added to `out` where the sum goes on."""
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            total = times(sources[0][i], scales[0])
            if goes_on:
                total = out[i] + total
            for j in range(1, len(sources)):
                total = total + times(sources[j][i], scales[j])
            out[i] = times(total, factor)

    return weighted_sum


def _update_kernel(arithmetic: _Arithmetic, rule: Any) -> Any:
    times = arithmetic.times

    @cuda.jit
    def update(out, weight, first, second, sources, scales, factor, limit, numbers):
        """The rule for the gradient factor · Σ scales[j]·sources[j], cut to ±limit; NaN stays NaN."""
        for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
            grad = times(sources[0][i], scales[0])
            for j in range(1, len(sources)):
                grad = grad + times(sources[j][i], scales[j])
            grad = times(grad, factor)
            grad = -limit if grad < -limit else grad
            grad = limit if grad > limit else grad
            w = weight[i]
            if numbers[1] != 0:
                grad = grad + times(w, numbers[1])
            out[i] = rule(i, w, grad, first, second, numbers)

    return update


# One element of each rule: moves the states and returns the new weight. Numbers are those of `Optimizer.equation`.


def _sgd(arithmetic: _Arithmetic) -> Any:
    times = arithmetic.times

    def sgd(i, w, grad, first, second, numbers):
        return w - times(grad, numbers[0])

    return sgd


def _sgd_momentum(arithmetic: _Arithmetic) -> Any:
    times = arithmetic.times

    def sgd_momentum(i, w, grad, first, second, numbers):
        momentum = times(first[i], numbers[2]) - times(grad, numbers[0])
        first[i] = momentum
        return w + momentum

    return sgd_momentum


def _adam(arithmetic: _Arithmetic) -> Any:
    times, divide, root = arithmetic

    def adam(i, w, grad, first, second, numbers):
        mean = times(first[i], numbers[2]) + times(grad, numbers[3])
        variance = times(second[i], numbers[4]) + times(times(grad, grad), numbers[5])
        first[i] = mean
        second[i] = variance
        return w - times(divide(mean, root(variance) + numbers[6]), numbers[0])

    return adam


RULES: dict[str, Callable[[_Arithmetic], Any]] = {"sgd": _sgd, "sgd_momentum": _sgd_momentum, "adam": _adam}
"""What `Equation.name` may name."""


@cuda.jit
def quantise_2bit(grad, residual, limit, out):
    """A thread makes a byte of codes, which are its own four elements."""
    for place in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        byte = 0
        for i in range(4 * place, min(4 * place + 4, grad.size)):
            value = residual[i] + grad[i]
            shift = 6 - 2 * (i & 3)
            if value >= limit:
                value = value - limit
                byte |= 3 << shift
            elif value <= -limit:
                value = value - (-limit)
                byte |= 2 << shift
            residual[i] = value
        out[place] = np.uint8(byte)


@cuda.jit
def dequantise_2bit(data, limit, out, adds):
    """out ← what the codes are worth, added to `out` where `adds` says so."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        code = (data[i >> 2] >> (6 - 2 * (i & 3))) & 3
        worth = limit if code == 3 else np.float32(0)
        worth = -limit if code == 2 else worth
        out[i] = out[i] + worth if adds else worth


SUMS = {label: _sum_kernel(arithmetic) for label, arithmetic in _ARITHMETIC.items()}
UPDATES = {
    (name, label): _update_kernel(arithmetic, _part(rule(arithmetic)))
    for name, rule in RULES.items()
    for label, arithmetic in _ARITHMETIC.items()
}
"""By the label of a `DType`. numba compiles each at its first launch: half a second for each number of sources."""


# Arrays.


class NumbaArray:
    """A one-dimensional, contiguous array on a device.

    numba's own arrays wait for the device at every assignment, and release their memory with no device current.

    Args:
        native: numba's own array.
        device: on which it lies.
    """

    __slots__ = ("device", "native")

    def __init__(self, native: Any, device: NumbaDevice) -> None:
        self.native, self.device = native, device

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.native.size)

    @property
    def shape(self) -> tuple[int]:
        """Its length."""
        return (self.size,)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Their type."""
        dtype: np.dtype[Any] = self.native.dtype
        return dtype

    @property
    def nbytes(self) -> int:
        """Bytes."""
        return self.size * self.dtype.itemsize

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if SIMULATED:
            return {**self.native.__array_interface__, "version": 3}
        interface: dict[str, Any] = self.native.__cuda_array_interface__
        return interface

    def __dlpack_device__(self) -> tuple[int, int]:
        return _DLPACK_CUDA, self.device.index

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: Any) -> Any:
        if key is Ellipsis:
            return self
        if not isinstance(key, slice) or key.step not in (None, 1):
            raise TypeError(f"an array on a device is cut with slices of step 1, not with {key!r}")
        start, stop, _ = key.indices(self.size)
        if stop <= start:
            return self.device.empty(0, self.dtype)
        with self.device.current():
            return NumbaArray(self.native[start:stop], self.device)

    def __setitem__(self, key: Any, value: Any) -> None:
        target = self[key]
        if isinstance(value, NumbaArray):
            self.device.copy(value, target, value.device)
        elif isinstance(value, int | float | np.number):
            self.device.fill(target, value)
        else:
            raise TypeError(f"an array on a device is filled with a number or another array, not with {value!r}")

    def view(self, dtype: Any) -> NumbaArray:
        """The same memory as elements of another type."""
        return self if self.dtype == dtype else NumbaArray(self.native.view(dtype), self.device)

    def reshape(self, shape: tuple[int, ...]) -> Any:
        """The same memory as an array of numba's own, which is what users know."""
        with self.device.current():
            return self.native.reshape(shape)

    def copy(self) -> NumbaArray:
        """The same content in memory of its own."""
        copied: NumbaArray = self.device.empty(self.size, self.dtype)
        self.device.copy(self, copied, self.device)
        return copied


class _Owned:
    """Something of numba's, which is released with its device current.

    numba gives memory, events and pinned pages back where the last reference ends, and the driver refuses that unless
    the device's context is current in that thread.

    Args:
        native: the object; nothing else may refer to it.
        device: whose context it needs.
    """

    def __init__(self, native: Any, device: NumbaDevice) -> None:
        self._native = [native]
        weakref.finalize(self, _release_on, device, self._native)

    @property
    def native(self) -> Any:
        """The object."""
        return self._native[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.native.__cuda_array_interface__
        return interface


def _release_on(device: NumbaDevice, owned: list[Any]) -> None:
    with suppress(DeviceError), device.current():  # at the end of the program CUDA may be gone already
        owned.clear()


# The device.


def open_device(index: int) -> Device:
    """The GPU of this number among the visible ones.

    Raises:
        DeviceError: there is no driver, no such device, or nothing that compiles for it.
    """
    if not numba.cuda.is_available():
        why = " ".join(str(numba.cuda.cuda_error() or "it sees no device").split())
        raise DeviceError(
            f"cuda:{index} cannot be used: no CUDA driver or device was found ({why}); install NVIDIA's driver, or set"
            " KVDIST_GPU=host"
        )
    count = len(numba.cuda.gpus)
    if not 0 <= index < count:
        raise DeviceError(f"there is no cuda:{index}: {count} device(s) are visible, cuda:0 to cuda:{count - 1}")
    device = NumbaDevice(index)
    device.compile_one()
    return device


def index_of(value: Any) -> int:
    """The number of the GPU on which an array with ``__cuda_array_interface__`` lies, as the driver knows it."""
    address = value.__cuda_array_interface__["data"][0]
    if SIMULATED or not address:
        return 0
    from numba.cuda.cudadrv.driver import binding, driver  # the simulator has no driver

    kind = binding.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    return int(driver.cuPointerGetAttribute(kind, binding.CUdeviceptr(address)))


class NumbaEvent:
    """See `DeviceEvent`."""

    def __init__(self, device: NumbaDevice) -> None:
        self._device = device
        with device.current():
            self._owned = _Owned(numba.cuda.event() if SIMULATED else numba.cuda.event(timing=False), device)
            self.native.record(device.native_stream())

    @property
    def native(self) -> Any:
        """numba's own event."""
        return self._owned.native

    def wait(self) -> None:
        with self._device.current():
            self.native.synchronize()


class NumbaDevice:
    """See `Device`. Made by `open_device`. Safe to use from several threads.

    Args:
        index: its number among the visible ones.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._streams: dict[int, Any] = {}
        self._chosen = threading.local()
        self._peers: set[int] = set()
        self._warned: set[str] = set()
        self._kernels = _kernels_of(self)

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def index(self) -> int:
        return self._index

    @property
    def library(self) -> str:
        return LIBRARY

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def runs(self, equation: Equation | None) -> bool:
        return equation is not None and equation.name in RULES and not equation.is_negative

    def compile_one(self) -> None:
        """Compile and run a kernel, so that an obstacle is reported when the device is opened.

        Raises:
            DeviceError: it cannot be compiled or run.
        """
        one = self.zeros(1, np.dtype(np.float32))
        try:
            self.kernels.weighted_sum([one, one], [1.0, 1.0], DType.FLOAT32, one)
        except DeviceError as error:
            raise DeviceError(
                f"{error}; numba-cuda needs the compiler of a CUDA toolkit that the driver knows, such as that of"
                " numba-cuda[cu12], or install cupy, whose kernels are used instead"
            ) from error

    # Context and streams.

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make this device current; the one that was current before is current again afterwards.

        Raises:
            DeviceError: numba, the driver or torch's allocator raised; says what that means.
        """
        try:
            with numba.cuda.gpus[self._index]:
                yield
        except (DeviceError, TypeError, ValueError):  # ours already, or the caller's
            raise
        except Exception as error:
            raise _translated(error, self.name) from error

    def stream(self) -> int:
        """See `Device.stream`: the driver's handle of it; 0 is the default stream."""
        torch = _torch_with_cuda()
        if torch is not None:
            return int(torch.cuda.current_stream(self._index).cuda_stream)
        chosen: int = getattr(self._chosen, "handle", 0)
        return chosen

    def native_stream(self) -> Any:
        """The current stream as an object of numba."""
        if SIMULATED:
            return 0
        handle = self.stream()
        stream = self._streams.get(handle)
        if stream is None:  # one object for each: numba remembers how kernels are launched by it
            stream = numba.cuda.external_stream(handle) if handle else numba.cuda.default_stream()
            self._streams[handle] = stream
        return stream

    @contextmanager
    def on(self, stream: int) -> Iterator[None]:
        torch = _torch_with_cuda()
        if torch is not None:
            chosen = torch.cuda.ExternalStream(stream, self.name) if stream else torch.cuda.default_stream(self.name)
            with torch.cuda.stream(chosen):
                yield
            return
        before = self.stream()
        self._chosen.handle = stream
        try:
            yield
        finally:
            self._chosen.handle = before

    def mark(self) -> NumbaEvent:
        return NumbaEvent(self)

    # Memory.

    def empty(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A new array, from torch's allocator where torch uses CUDA; its content means nothing."""
        torch = _torch_with_cuda()
        with self.current():
            if torch is not None and count:
                octets = torch.empty(count * np.dtype(dtype).itemsize, dtype=torch.uint8, device=self.name)
                return NumbaArray(numba.cuda.as_cuda_array(octets, sync=False).view(dtype), self)
            native = numba.cuda.device_array(count, np.dtype(dtype))
            if count and not SIMULATED:
                native = numba.cuda.as_cuda_array(_Owned(native, self), sync=False)
            return NumbaArray(native, self)

    def zeros(self, count: int, dtype: np.dtype[Any]) -> Any:
        """A new array of zeros."""
        array = self.empty(count, dtype)
        self.fill(array, 0)
        return array

    def fill(self, array: NumbaArray, value: float | np.number[Any]) -> None:
        """Make every element this number."""
        octets = np.array([value]).astype(array.dtype).view(np.uint8)
        if not SIMULATED and array.size and (octets == octets[0]).all():
            with self.current():
                numba.cuda.driver.device_memset(array.native, int(octets[0]), array.nbytes, stream=self.native_stream())
        elif array.size:
            self.upload(np.full(array.size, value, array.dtype), array)
            self.mark().wait()  # until then the host's array must not be released

    def view(self, value: Any, dtype: DType) -> Any:
        """See `Device.view`.

        Raises:
            TypeError, ValueError: it has another type, or is not contiguous.
            DeviceError: it lies elsewhere.
        """
        if isinstance(value, NumbaArray):
            if value.device.index != self._index:
                raise DeviceError(f"a value is on {value.device.name}, but must be on {self.name}")
            array = value
        else:
            with self.current():
                array = NumbaArray(_native(_plain(value, dtype, self.name)), self)
        if array.dtype.itemsize != dtype.itemsize or (array.dtype.kind == "f") != (dtype.storage.kind == "f"):
            raise TypeError(f"a value of {array.dtype} was passed as {dtype.label}: cast it, or pass its own dtype")
        return array.view(dtype.storage)

    def upload(self, host: Array, out: Any) -> None:
        self._copy(host, as_array(out).native)

    def download(self, array: Any, host: Array) -> None:
        native = as_array(array).native
        _require_same(native, host)
        if host.size:
            with self.current():
                native.copy_to_host(host, stream=self.native_stream())

    def copy(self, array: Any, out: Any, source: Device) -> None:
        """See `Device.copy`. The driver goes through the host where two devices do not reach each other."""
        given, target = as_array(array).native, as_array(out).native
        if source.index == self._index:
            self._copy(given, target)
            return
        if not isinstance(source, NumbaDevice):
            raise DeviceError(f"{source.name} is driven by {source.library}: all devices of a store need one library")
        self._allow_access_to(source)
        self._follow(source)
        self._copy(given, target)
        source._follow(self)

    def _copy(self, source: Any, target: Any) -> None:
        _require_same(source, target)
        if target.size:
            with self.current():
                target.copy_to_device(source, stream=self.native_stream())

    def _follow(self, other: NumbaDevice) -> None:
        """Let this device's stream wait for what the other's has been given until now."""
        event = other.mark().native
        with self.current():
            event.wait(self.native_stream())

    def _allow_access_to(self, source: NumbaDevice) -> None:
        """Let this device read the memory of another, if it can; once."""
        if source.index in self._peers:
            return
        self._peers.add(source.index)
        if not SIMULATED and self.reaches(source):
            with suppress(DeviceError), self.current():  # torch may have done it
                numba.cuda.current_context().enable_peer_access(
                    numba.cuda.gpus[source.index].get_primary_context().handle
                )

    def reaches(self, other: Device) -> bool:
        if SIMULATED or other.index == self._index:
            return True
        with self.current():
            return bool(numba.cuda.current_context().can_access_peer(other.index))

    def pin(self, host: Array) -> Any:
        if not host.nbytes or SIMULATED:
            return host[:0] if host.nbytes else None
        try:
            with self.current():
                pinned = numba.cuda.current_context().mempin(host, host.ctypes.data, host.nbytes, mapped=False)
                return _Owned(pinned, self)
        except DeviceError:
            return None

    def pack(self, sources: Sequence[Any], offsets: Sequence[int], out: Any) -> None:
        """See `Device.pack`. One copy for each source."""
        for source, offset in zip(sources, offsets, strict=True):
            octets = source.view(np.uint8)
            self.copy(octets, out[offset : offset + octets.size], self)

    def unpack(self, source: Any, offsets: Sequence[int], outs: Sequence[Any]) -> None:
        """See `Device.unpack`. One copy for each result."""
        for out, offset in zip(outs, offsets, strict=True):
            octets = out.view(np.uint8)
            self.copy(source[offset : offset + octets.size], octets, self)

    # Arithmetic.

    def launch(self, kernel: Any, elements: int, *arguments: Any) -> None:
        """Run a kernel over this many elements on the current stream; arrays come as `NumbaArray`, also in tuples."""
        if elements:
            given = [_to_native(argument) for argument in arguments]
            blocks = max(BLOCKS_MIN, min(-(-elements // THREADS), BLOCKS_MAX))
            with self.current(), _SIMULATOR if SIMULATED else nullcontext():
                kernel[(blocks, THREADS) if SIMULATED else (blocks, THREADS, self.native_stream())](*given)

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        check_dequantised(data, total, WORD_ELEMENTS_2BIT)
        self.launch(dequantise_2bit, total.size, as_array(data), np.float32(threshold), as_array(total), True)

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        """See `Device.add_dequantised_1bit`. In the host's memory."""
        self.on_host("1-bit codes", _add_dequantised_1bit, data, threshold, total, written=(total,))

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        """See `Device.merge_rows`. In the host's memory."""
        merged: tuple[Array, Array] = self.on_host("rows", _merged_rows, indices, rows, dtype)
        return merged

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        """See `Device.add_rows`. In the host's memory."""
        self.on_host("rows", _add_rows, table, indices, rows, written=(table,))

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """See `Device.all_finite`. In the host's memory."""
        return not dtype.is_floating or bool(self.on_host("checks of gradients", _all_finite, list(arrays), dtype))

    def on_host(self, what: str, function: Callable[..., Any], *arguments: Any, written: Sequence[Any] = ()) -> Any:
        """Call a function with copies in the host's memory of all arrays among its arguments.

        Args:
            what: what it computes, for the log.
            function: takes the arguments in their order; arrays that it returns are brought to the device.
            arguments: arrays, also in lists, and anything else.
            written: which of them it writes; they are brought back.
        """
        if what not in self._warned:
            self._warned.add(what)
            LOG.warning("%s: numba has no kernel for %s, which are computed in the host's memory, and slower; with cupy"
                        " they are computed on the GPU: pip install cupy-cuda12x", self.name, what)  # fmt: skip
        hosts: dict[int, Array] = {}

        def fetched(value: Any) -> Any:
            if isinstance(value, NumbaArray):
                if id(value) not in hosts:
                    hosts[id(value)] = np.empty(value.size, value.dtype)
                    self.download(value, hosts[id(value)])
                return hosts[id(value)]
            return [fetched(each) for each in value] if isinstance(value, list) else value

        copies = [fetched(argument) for argument in arguments]
        self.mark().wait()
        result = function(*copies)
        for array in written:
            self.upload(hosts[id(array)], array)
        sent = self._sent(result)
        self.mark().wait()
        return sent

    def _sent(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple([self._sent(each) for each in result])
        if not isinstance(result, np.ndarray):
            return result
        array = self.empty(result.size, result.dtype)
        self.upload(result, array)
        return array


def _kernels_of(device: NumbaDevice) -> Kernels:
    """The functions of `Kernels` on one device."""

    def here(what: str, function: Callable[..., Any], *places: int) -> Any:
        """The reference in the host's memory; `places` are the arguments that it writes."""

        def call(*arguments: Any) -> Any:
            given = [arguments[place] for place in places if place < len(arguments) and arguments[place] is not None]
            result = device.on_host(what, function, *arguments, written=given)
            return given[-1] if given and result is not None else result

        return call

    return Kernels(
        name="numba.cuda",
        chunk_elements=WHOLE,
        active=nullcontext,
        empty=device.empty,
        zeros=device.zeros,
        squares=here("norms", REFERENCE.squares),
        weighted_sum=partial(_weighted_sum, device),
        to_float32=here("halves", REFERENCE.to_float32, 2),
        from_float32=here("halves", REFERENCE.from_float32, 2),
        fused_update=partial(_fused_update, device),
        update_rows=REFERENCE.update_rows,
        round_to_half=here("halves", REFERENCE.round_to_half, 1, 3),
        quantise_2bit=partial(_quantise_2bit, device),
        dequantise_2bit=partial(_dequantise_2bit, device),
        quantise_1bit=here("1-bit codes", REFERENCE.quantise_1bit, 1, 3),
        dequantise_1bit=here("1-bit codes", REFERENCE.dequantise_1bit, 2),
    )


def _weighted_sum(
    device: NumbaDevice, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Any
) -> None:
    """See `WeightedSum`. One launch for `LAUNCH_SOURCES_MAX` sources; each further one reads the sum again."""
    check_sum(contributions, scales, dtype, out)
    if not contributions:
        out[...] = 0
    elif len(contributions) == 1 and scales[0] == 1 and out.dtype == dtype.storage:
        device.copy(contributions[0], out, device)
    elif dtype.label in SUMS:
        _sum(device, contributions, *factored(scales), dtype, as_array(out))
    else:
        what = f"sums of {dtype.label}"
        device.on_host(what, REFERENCE.weighted_sum, list(contributions), list(scales), dtype, out, written=(out,))


def _sum(
    device: NumbaDevice,
    contributions: Sequence[Array],
    scales: Sequence[float],
    factor: float,
    dtype: DType,
    out: NumbaArray,
) -> None:
    real = dtype.storage.type
    for start in range(0, len(contributions), LAUNCH_SOURCES_MAX):
        part = slice(start, start + LAUNCH_SOURCES_MAX)
        sources, own = tuple(map(as_array, contributions[part])), tuple(map(real, scales[part]))
        last = real(factor if start + LAUNCH_SOURCES_MAX >= len(contributions) else 1)
        device.launch(SUMS[dtype.label], out.size, out, sources, own, last, start > 0)


def _fused_update(
    device: NumbaDevice,
    equation: Equation,
    weight: Array,
    contributions: Sequence[Array],
    scales: Sequence[float],
    clip: float | None,
    out: Array,
    states: Sequence[Array],
    dtype: DType,
    master: Array | None = None,
) -> bool:
    """See `FusedUpdate`.

    Raises:
        TypeError: there is no kernel for this rule or type; the arrays cannot be updated function by function either.
    """
    kernel = None if equation.is_negative else UPDATES.get((equation.name, dtype.label))
    if kernel is None:
        raise TypeError(
            f"{device.library} has no kernel for {equation.name} of {dtype.label} on {device.name}: install cupy there,"
            " or keep the values in the host's memory (KVDIST_GPU=host on workers, no --server-device for servers)"
        )
    real = dtype.storage.type
    own, factor = factored(scales) if contributions else ((1.0,), 1.0)
    if len(contributions) > LAUNCH_SOURCES_MAX or not contributions:
        total = device.zeros(out.size, dtype.storage)
        if contributions:
            _sum(device, contributions, own, factor, dtype, total)
        contributions, own, factor = [total], (1.0,), 1.0
    first, second = (*map(as_array, states), *(as_array(out),) * 2)[:2]  # a rule without states leaves these alone
    numbers = tuple(map(real, (*equation.numbers, *(0.0,) * NUMBERS_MAX)[:NUMBERS_MAX]))
    device.launch(
        kernel, out.size, as_array(out), as_array(weight), first, second, tuple(map(as_array, contributions)),
        tuple(map(real, own)), real(factor), real(np.inf if clip is None else clip), numbers,
    )  # fmt: skip
    return True


def _quantise_2bit(device: NumbaDevice, grad: Array, residual: Array, threshold: float, out: Array) -> None:
    check_quantised(grad, residual, out, WORD_ELEMENTS_2BIT)
    arrays = as_array(grad), as_array(residual)
    device.launch(quantise_2bit, out.size, *arrays, np.float32(threshold), as_array(out))


def _dequantise_2bit(device: NumbaDevice, data: Array, threshold: float, out: Array) -> None:
    check_dequantised(data, out, WORD_ELEMENTS_2BIT)
    device.launch(dequantise_2bit, out.size, as_array(data), np.float32(threshold), as_array(out), False)


def as_array(array: Any) -> NumbaArray:
    """Check that an array is one of this module.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(array, NumbaArray):
        raise TypeError(f"numba's kernels take arrays that its device has made or viewed, not {type(array).__name__}")
    return array


def _to_native(argument: Any) -> Any:
    if isinstance(argument, NumbaArray):
        return argument.native
    return tuple(map(_to_native, argument)) if isinstance(argument, tuple) else argument


def _require_same(source: Any, target: Any) -> None:
    if source.size != target.size or source.dtype != target.dtype:
        raise ValueError(
            f"{source.size} elements of {source.dtype} cannot be copied to {target.size} of {target.dtype}"
        )


def _torch_with_cuda() -> Any:
    """The module torch if it has begun to use CUDA in this process, else None."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


def _plain(value: Any, dtype: DType, place: str) -> Any:
    """A torch tensor as one that has the array interface: flat, without a history, bfloat16 as int16."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor):
        return value
    if not value.is_contiguous():
        raise ValueError(f"a tensor of shape {tuple(value.shape)} is not contiguous: call .contiguous() on it")
    if not SIMULATED and value.device != torch.device(place):
        raise DeviceError(f"a tensor is on {value.device}, but must be on {place}")
    flat = value.detach().reshape(-1)
    flat = flat.view(torch.int16) if value.dtype == torch.bfloat16 and dtype is DType.BFLOAT16 else flat
    return flat.numpy() if SIMULATED else flat


def _native(value: Any) -> Any:
    """numba's array of a value's memory, flat. In the simulator the memory of the host is also that of the device."""
    if not SIMULATED:
        native = numba.cuda.as_cuda_array(value, sync=False)
        if not native.is_c_contiguous():
            raise ValueError(f"an array of shape {tuple(native.shape)} is not contiguous: make a copy of it that is")
        return native.reshape(int(native.size)) if native.ndim != 1 else native
    from numba.cuda.simulator.cudadrv.devicearray import FakeCUDAArray

    return value.reshape(-1) if isinstance(value, FakeCUDAArray) else FakeCUDAArray(np.asarray(value).reshape(-1))


def _translated(error: Exception, name: str) -> DeviceError:
    """What an error of numba, the driver or torch means."""
    first = error.args[0] if isinstance(error, CudaAPIError) else None
    code = int(first) if isinstance(first, SupportsInt) else None
    if code == _OUT_OF_MEMORY or isinstance(error, MemoryError) or "out of memory" in str(error).lower():
        return DeviceError(f"the memory of {name} is full: make batches or buckets smaller, or give it fewer processes")
    if code in _OLD_DRIVER:
        return DeviceError(
            f"the driver of {name} is too old for this numba ({_OLD_DRIVER[code]}): install a newer driver, or CUDA"
            " libraries of an older version"
        )
    why = " ".join(str(error).split()) or type(error).__name__
    return DeviceError(f"{name} failed in numba: {why}")


# What is computed in the host's memory and is not in the reference.


def _add_dequantised_1bit(data: Array, threshold: float, total: Array) -> None:
    worth = np.empty_like(total)
    REFERENCE.dequantise_1bit(data, threshold, worth)
    total += worth


def _merged_rows(indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
    if not indices.size:
        return indices, rows
    different, firsts, places = np.unique(indices, return_index=True, return_inverse=True)
    narrow = dtype.storage != dtype.accumulate
    table = (REFERENCE.to_float32(rows, dtype) if narrow else rows).reshape(indices.size, -1)
    sums = table[firsts]
    rest = np.ones(indices.size, bool)
    rest[firsts] = False
    np.add.at(sums, places[rest], table[rest])  # one after the other, in the order given
    flat = sums.reshape(-1)
    return different, REFERENCE.from_float32(flat, dtype) if narrow else flat


def _add_rows(table: Array, indices: Array, rows: Array) -> None:
    if rows.size:
        table.reshape(-1, rows.size // indices.size)[indices] += rows.reshape(indices.size, -1)


def _all_finite(arrays: Sequence[Array], dtype: DType) -> bool:
    wide = [REFERENCE.to_float32(one, dtype) if dtype.storage != dtype.accumulate else one for one in arrays]
    return all(bool(np.isfinite(one).all()) for one in wide)
