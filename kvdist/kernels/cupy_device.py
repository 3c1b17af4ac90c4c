"""A GPU that CuPy drives, with the kernels of `kvdist.kernels.numba_cuda`. See `kvdist.kernels.interface`.

Rules that hold for the arithmetic: arguments are checked as the reference checks them; numbers are rounded once, to the
type in which the kernel computes; arrays without elements launch nothing. CuPy's own kernels, which take subnormal
numbers for zero, do only what is left: they sort the indices of rows, and evaluate rules that have no kernel.
"""

from __future__ import annotations

import logging
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import cupy
import numpy as np
from cupy.cuda import runtime

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels import numba_cuda
from kvdist.kernels.cupy_runtime import CupyRuntime, NotCompiledError, torch_with_cuda, translated
from kvdist.kernels.interface import STATES_MAX, Array, Device, Equation, Kernels
from kvdist.kernels.numba_cuda import CHUNK_BYTES, SOURCES_MAX, THREADS, Kernel
from kvdist.kernels.quantization import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import check_sum, factored, update_rows

LOG = logging.getLogger("kvdist")

_NO_DEVICE, _OLD_DRIVER, _PEER_ALREADY = 100, 35, 704
"""Numbers of CUDA's errors."""

_READ_ONLY = 8
"""The flag of memory that may be registered although it cannot be written to, where the device can do that."""

WHOLE = 1 << 62
"""`Kernels.chunk_elements`: a GPU takes everything at once."""

_WORD_ELEMENTS = {1: WORD_ELEMENTS_1BIT, 2: WORD_ELEMENTS_2BIT}
_NUMPY_FLOATS = {dtype.storage: dtype for dtype in (DType.FLOAT32, DType.FLOAT64, DType.FLOAT16)}


def open_device(index: int) -> Device:
    """The GPU of this number among the visible ones; begins to use it.

    Raises:
        DeviceError: the GPU does not exist or cannot be used; the message says why and what to do.
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
    probe = device.kernels.zeros(1, np.dtype(np.float32))
    device.kernels.weighted_sum([probe], [1.0], DType.FLOAT32, probe)  # compiles, or says why nothing can be compiled
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
        with translated(self._name):
            self.event.synchronize()


class CupyDevice:
    """See `Device`. `open_device` makes it.

    Args:
        index: index of the GPU among the visible GPUs.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._runtime = CupyRuntime(index)
        self._peers: set[int] = set()
        self._not_compiled: set[Any] = set()
        """Expressions that numba cannot compile."""
        self._nothing = self._runtime.empty(0, np.dtype(np.uint8))
        """For arguments that a kernel does not read."""
        self._kernels = Kernels(
            name=f"cupy on {self.name}",
            chunk_elements=WHOLE,
            active=self._runtime.active,
            empty=self._runtime.empty,
            zeros=self._runtime.zeros,
            squares=self._squares,
            weighted_sum=self._weighted_sum,
            to_float32=self._to_float32,
            from_float32=self._from_float32,
            fused_update=self._fused_update,
            update_rows=update_rows,
            round_to_half=self._round_to_half,
            quantise_2bit=partial(self._quantise, 2),
            dequantise_2bit=partial(self._dequantise, 2),
            quantise_1bit=partial(self._quantise, 1),
            dequantise_1bit=partial(self._dequantise, 1),
        )

    @property
    def name(self) -> str:
        return f"cuda:{self._index}"

    @property
    def index(self) -> int:
        return self._index

    @property
    def library(self) -> str:
        version = runtime.runtimeGetVersion()
        cuda = f"CUDA {version // 1000}.{version % 1000 // 10}"
        return f"CuPy {cupy.__version__} with {cuda}, {numba_cuda.VERSION}"

    @property
    def kernels(self) -> Kernels:
        return self._kernels

    def stream(self) -> Any:
        torch = torch_with_cuda()
        if torch is not None:
            return torch.cuda.current_stream(self._index)
        with self._runtime.active() as stream:
            return stream

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        torch = torch_with_cuda()
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
            DeviceError: the value lies on another device.
        """
        torch = sys.modules.get("torch")
        is_tensor = torch is not None and isinstance(value, torch.Tensor)
        with translated(self.name):
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
        with translated(self.name):
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

    # Arithmetic that only devices need.

    def pack(self, sources: Sequence[Array], offsets: Sequence[int], out: Array) -> None:
        """See `Device.pack`. One launch, and a few small copies to the device."""
        self._copy_arrays(sources, self._parts(out, sources, offsets))

    def unpack(self, source: Array, offsets: Sequence[int], outs: Sequence[Array]) -> None:
        self._copy_arrays(self._parts(source, outs, offsets), outs)

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        self._dequantise(2, data, threshold, total, adds=True)

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        self._dequantise(1, data, threshold, total, adds=True)

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        arrays = [array for array in arrays if array.size]
        if not arrays or not dtype.is_floating:
            return True
        kernel, exponent = numba_cuda.find_not_finite(dtype)
        found = self._runtime.zeros(1, np.dtype(np.uint32))
        self._launch_for(kernel, [array.size for array in arrays], dtype.itemsize, arrays, exponent, found)
        return not self._runtime.number(found)

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        length = _row_length(indices, rows)
        if not indices.size:
            return self._runtime.empty(0, np.dtype(np.int64)), self._runtime.empty(0, dtype.storage)
        different, order, starts = self._runtime.grouped(indices)
        groups, lanes = different.size, numba_cuda.lanes_of(length)
        sums = self._runtime.empty(groups * length, dtype.storage)
        self._runtime.launch(
            numba_cuda.sum_groups(dtype), (groups if length else 0) << lanes, rows, order, starts, sums, groups,
            indices.size, length, lanes,
        )  # fmt: skip
        return different, sums

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        dtype = _NUMPY_FLOATS.get(rows.dtype)
        if dtype is None or table.dtype != rows.dtype:
            raise TypeError(f"rows of one of float32, float64 and float16 are added, not {rows.dtype} to {table.dtype}")
        length = _row_length(indices, rows)
        count, lanes = indices.size, numba_cuda.lanes_of(length)
        threads = (count if length else 0) << lanes
        self._runtime.launch(numba_cuda.add_rows(dtype), threads, table, indices, rows, length, lanes, count)

    # Kernels.

    def _weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. One launch for `SOURCES_MAX` sources; each further launch reads the sum again."""
        check_sum(contributions, scales, dtype, out)
        if not contributions:
            self._runtime.clear(out)
            return
        own, factor = factored(scales)
        is_long = len(contributions) > SOURCES_MAX
        total = self._runtime.empty(out.size, dtype.accumulate) if is_long and out.dtype != dtype.accumulate else out
        to = dtype if out.dtype == dtype.storage else DType.FLOAT32
        for start in range(0, len(contributions), SOURCES_MAX):
            sources = contributions[start : start + SOURCES_MAX]
            is_last = start + len(sources) == len(contributions)
            target, given = (out, to) if is_last or total is out else (total, DType.FLOAT32)
            before = total if start else self._nothing
            self._runtime.launch(
                numba_cuda.weighted_sum(dtype, given, len(sources)), out.size, target, before, sources,
                own[start : start + SOURCES_MAX], factor if is_last else 1.0, start > 0, out.size,
            )  # fmt: skip

    def _to_float32(self, bits: Array, dtype: DType, out: Array | None = None) -> Array:
        _require_half(dtype)
        values = self._runtime.empty(bits.size, np.dtype(np.float32)) if out is None else out
        self._cast(numba_cuda.cast(dtype, DType.FLOAT32), bits, values)
        return values

    def _from_float32(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        _require_half(dtype)
        bits = self._runtime.empty(values.size, dtype.storage) if out is None else out
        self._cast(numba_cuda.cast(DType.FLOAT32, dtype), values, bits)
        return bits

    def _cast(self, kernel: Kernel, given: Array, out: Array) -> None:
        if given.size != out.size:
            raise ValueError(f"{given.size} elements are cast to as many, not to {out.size}")
        self._runtime.launch(kernel, out.size, out, given, out.size)

    def _fused_update(
        self,
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
        """See `FusedUpdate`. One launch, and one more for each `SOURCES_MAX` sources beyond as many."""
        rule = equation.expression
        if not weight.size:
            return True
        if not dtype.is_floating or len(states) > STATES_MAX or rule in self._not_compiled:
            return False
        sources, own, is_wide = contributions, scales, False
        if not 0 < len(contributions) <= SOURCES_MAX:
            total = self._runtime.empty(weight.size, dtype.accumulate)
            self._weighted_sum(contributions, scales, dtype, total)
            sources, own, is_wide = [total], (1.0,), True
        own, factor = factored(own)
        kernel = self._update_kernel(equation, dtype, len(states), len(sources), is_wide, master is not None)
        if kernel is None:
            return False
        weights = (out, weight) if master is None else (out, weight, master)
        self._runtime.launch(
            kernel, weight.size, *weights, states or [self._nothing], sources, own,
            -factor if equation.is_negative else factor, np.inf if clip is None else clip, equation.numbers,
            weight.size,
        )  # fmt: skip
        return True

    def _update_kernel(self, equation: Equation, dtype: DType, *shape: Any) -> Kernel | None:
        """The compiled kernel of `numba_cuda.update`; None for a rule that numba cannot compile, which is logged."""
        rule = equation.expression
        try:
            states, *rest = shape
            kernel = numba_cuda.update(rule, dtype, states, len(equation.numbers), *rest)
            self._runtime.prepare(kernel)
        except (TypeError, NotCompiledError) as error:
            self._not_compiled.add(rule)
            LOG.warning(
                "%s: CuPy evaluates %s function by function, which is slower: %s", self.name, equation.name, error
            )
            return None
        return kernel

    def _round_to_half(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        _require_half(dtype)
        check_rounded(grad, residual, dtype, out)
        self._runtime.launch(numba_cuda.round_to_half(dtype), out.size, grad, residual, out, out.size)

    def _quantise(self, bits: int, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """See `Quantise`.

        Args:
            bits: bits of a code: 1 or 2.
            grad, residual, threshold, out: as in `Quantise`.
        """
        check_quantised(grad, residual, out, _WORD_ELEMENTS[bits])
        kernel = numba_cuda.QUANTISE[bits]
        self._runtime.launch(kernel, out.size, grad, residual, threshold, out, grad.size, out.size)

    def _dequantise(self, bits: int, data: Array, threshold: float, out: Array, adds: bool = False) -> None:
        """See `Dequantise`.

        Args:
            bits: bits of a code: 1 or 2.
            data, threshold, out: as in `Dequantise`.
            adds: whether values are added to `out`.
        """
        check_dequantised(data, out, _WORD_ELEMENTS[bits])
        self._runtime.launch(numba_cuda.DEQUANTISE[bits], out.size, data, threshold, out, adds, out.size)

    def _squares(self, values: Array) -> float:
        """See `Squares`. A launch, CuPy's sum of what each thread has found, and a wait."""
        dtype = _NUMPY_FLOATS.get(values.dtype)
        if dtype is None:
            raise TypeError(f"squares are summed of float32, float64 and float16, not of {values.dtype}")
        if not values.size:
            return 0.0
        partial_sums = self._runtime.empty(self._runtime.grid(values.size), np.dtype(np.float64))
        self._runtime.launch(numba_cuda.squares(dtype), values.size, values, partial_sums, values.size)
        return self._runtime.total(partial_sums)

    # Many arrays in one launch.

    def _parts(self, bucket: Array, arrays: Sequence[Array], offsets: Sequence[int]) -> list[Array]:
        """The part of a bucket for each array."""
        if bucket.dtype != np.uint8:
            raise TypeError(f"a bucket is an array of uint8, not {bucket.dtype}")
        if len(offsets) != len(arrays):
            raise ValueError(f"{len(arrays)} arrays need as many offsets, not {len(offsets)}")
        for array, offset in zip(arrays, offsets, strict=True):
            if not 0 <= offset <= bucket.size - array.nbytes:
                raise ValueError(f"{array.nbytes} bytes at {offset} do not fit into a bucket of {bucket.size}")
        return [bucket[offset : offset + array.nbytes] for array, offset in zip(arrays, offsets, strict=True)]

    def _copy_arrays(self, sources: Sequence[Array], targets: Sequence[Array]) -> None:
        """Copy the bytes of each source to its target."""
        pairs = [(source, target) for source, target in zip(sources, targets, strict=True) if source.nbytes]
        if not pairs:
            return
        places = [self._runtime.address(array) for pair in pairs for array in pair]
        sizes = [source.nbytes for source, _ in pairs]
        itemsize = math.gcd(8, *places, *sizes)
        given, taken = zip(*pairs, strict=True)
        counts = [size // itemsize for size in sizes]
        self._launch_for(numba_cuda.copy_arrays(itemsize), counts, itemsize, given, taken)

    def _launch_for(self, kernel: Kernel, sizes: Sequence[int], itemsize: int, *arguments: Any) -> None:
        """Launch a kernel that takes many arrays in chunks.

        Args:
            kernel: the kernel.
            sizes: number of elements of each array.
            itemsize: bytes of an element.
            arguments: the kernel's first arguments; the last are the sizes and chunks.
        """
        length = CHUNK_BYTES // itemsize
        chunks = [-(-size // length) for size in sizes]
        firsts = np.cumsum([0, *chunks[:-1]], dtype=np.int64)
        tables = [self._runtime.sent(table) for table in (np.array(sizes, np.int64), firsts)]
        total = sum(chunks)
        self._runtime.launch(kernel, total * THREADS, *arguments, *tables, len(sizes), total, length)


class Pinned:
    """Registered memory of the host, until this is released."""

    def __init__(self, host: Array, index: int) -> None:
        self._release = weakref.finalize(self, _unregister, host, index)


def _unregister(host: Array, index: int) -> None:
    """`host` is kept until this has run."""
    try:
        with cupy.cuda.Device(index):
            runtime.hostUnregister(host.ctypes.data)
    except runtime.CUDARuntimeError:  # at the end of the program CUDA may be gone before us
        return


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


def _require_half(dtype: DType) -> None:
    if dtype.storage == dtype.accumulate:
        raise TypeError(f"{dtype.label} is not a half: only float16 and bfloat16 are cast from and to float32")


def _row_length(indices: Array, rows: Array) -> int:
    length, rest = divmod(rows.size, max(1, indices.size))
    if indices.dtype != np.int64:
        raise TypeError(f"indices of rows are int64, not {indices.dtype}")
    if rest or (rows.size and not indices.size):
        raise ValueError(f"row data has {rows.size} elements, which is not a multiple of {indices.size} rows")
    return length
