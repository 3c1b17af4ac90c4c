"""The functions of `Kernels` on one GPU, done by kernels that numba compiles.

A sum and an update read every source once, up to `SOURCES_MAX` of them; more are added to a sum that has begun, which
costs a reading and a writing for each further `SOURCES_MAX`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import NUMBERS_MAX, Array, Equation, Kernels
from kvdist.kernels.numba_gpu_memory import Memory, NumbaArray
from kvdist.kernels.numba_gpu_sums import RULES, SOURCES_MAX
from kvdist.kernels.quantised import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import check_sum

CHUNK_ELEMENTS = 1 << 40
"""An update is one launch: nothing is cut to fit into a cache."""

PARTIAL_SUMS = 1 << 16
FEW_SUMS = 256
"""A sum of squares is made of so many, each by a thread, and those of so few, which the host adds up."""

_DOUBLE = np.dtype(np.float64)
_LABELS = {np.dtype(np.float16): "float16", np.dtype(np.float32): "float32", _DOUBLE: "float64"}


def kernels_of(own: NumbaKernels) -> Kernels:
    """The table of functions of one device."""
    memory = own.memory
    return Kernels(
        name="numba.cuda",
        chunk_elements=CHUNK_ELEMENTS,
        active=nullcontext,
        empty=memory.empty,  # type: ignore[arg-type]  # its arrays are the library's
        zeros=memory.zeros,  # type: ignore[arg-type]
        squares=own.squares,
        weighted_sum=own.weighted_sum,
        to_float32=own.to_float32,
        from_float32=own.from_float32,
        fused_update=own.fused_update,
        round_to_half=own.round_to_half,
        quantise_2bit=own.quantise_2bit,
        dequantise_2bit=own.dequantise_2bit,
        quantise_1bit=own.quantise_1bit,
        dequantise_1bit=own.dequantise_1bit,
    )


class NumbaKernels:
    """The functions themselves; see `Kernels`."""

    def __init__(self, memory: Memory) -> None:
        self.memory = self._memory = memory

    def squares(self, values: Array) -> float:
        """See `Squares`. Waits for the device; the order of additions depends on the length alone."""
        label = _LABELS[values.dtype]
        count = min(PARTIAL_SUMS, values.size)
        if not count:
            return 0.0
        partial = self._memory.empty(count, _DOUBLE)
        self._launch("squares", label, 0, count, stored(values, DType[label.upper()]), partial)
        if count > FEW_SUMS:
            few = self._memory.empty(FEW_SUMS, _DOUBLE)
            self._launch("fold", "float64", 0, FEW_SUMS, partial, few)
            partial = few
        return float(self._memory.fetched(partial).sum())

    def weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Any) -> None:
        """See `WeightedSum`."""
        check_sum(contributions, scales, dtype, out)
        if not contributions:
            out[...] = 0
        elif len(contributions) == 1 and scales[0] == 1 and out.dtype == dtype.storage:
            self._memory.copy(as_array(contributions[0]), out)
        else:
            self._sum(contributions, *_factored(scales), dtype, out)

    def _sum(
        self, contributions: Sequence[Array], scales: Sequence[float], factor: float, dtype: DType, out: Array
    ) -> None:
        """In steps of `SOURCES_MAX`; what has been summed up so far is as wide as sums are."""
        narrow = dtype.storage != dtype.accumulate and out.dtype == dtype.storage
        target = stored(out, dtype) if narrow else as_array(out)
        total = target
        if narrow and len(contributions) > SOURCES_MAX:
            total = self._memory.empty(out.size, dtype.accumulate)
        for start in range(0, len(contributions), SOURCES_MAX):
            part = slice(start, start + SOURCES_MAX)
            sources = tuple([stored(each, dtype) for each in contributions[part]])
            own = tuple([dtype.accumulate.type(scale) for scale in scales[part]])
            last = start + SOURCES_MAX >= len(contributions)
            what = ("sumon" if start else "sum") if narrow and last else ("widesumon" if start else "widesum")
            what = what if dtype.storage != dtype.accumulate else what.removeprefix("wide")
            begun = (total,) if start else ()
            written = target if last else total
            scale = dtype.accumulate.type(factor if last else 1)
            self._launch(what, dtype.label, len(sources), out.size, written, *begun, sources, own, scale)

    def fused_update(
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
        """See `FusedUpdate`. Halves are done in one piece too, with a master and without."""
        if equation.name not in RULES:
            return False
        real = dtype.accumulate.type
        sums = dtype
        own, factor = _factored(scales) if contributions else ((1.0,), 1.0)
        if len(contributions) > SOURCES_MAX or not contributions:
            # A sum of its own, which is as wide as sums are; a weight of halves has to be updated from wide gradients.
            total = self._memory.zeros(out.size, dtype.accumulate)
            if contributions:
                self._sum(contributions, own, factor, dtype, total)  # type: ignore[arg-type]
            contributions, own, factor = [total], (1.0,), 1.0  # type: ignore[list-item]
            sums = DType[dtype.accumulate.name.upper()]
        what = equation.name if sums is dtype else f"wide_{equation.name}"
        held = () if master is None else (as_array(master),)
        first, second = (*map(as_array, states), *(self._memory.empty(1, dtype.accumulate),) * 2)[:2]
        numbers = tuple([real(number) for number in (*equation.numbers, *(0.0,) * NUMBERS_MAX)[:NUMBERS_MAX]])
        self._launch(
            what if master is None else f"master_{what}", dtype.label, len(contributions), out.size,
            stored(out, dtype), stored(weight, dtype), *held, first, second,
            tuple([stored(each, sums) for each in contributions]), tuple(map(real, own)), real(factor),
            real(np.inf if clip is None else clip), numbers,
        )  # fmt: skip
        return True

    def to_float32(self, bits: Array, dtype: DType, out: Array | None = None) -> Array:
        """See `ToFloat32`."""
        _require_half(dtype)
        values: Any = self._memory.empty(bits.size, np.dtype(np.float32)) if out is None else out
        self._launch("widen", dtype.label, 0, bits.size, stored(bits, dtype), as_array(values))
        return values  # type: ignore[no-any-return]

    def from_float32(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        """See `FromFloat32`."""
        _require_half(dtype)
        bits: Any = self._memory.empty(values.size, dtype.storage) if out is None else out
        self._launch("narrow", dtype.label, 0, values.size, as_array(values), stored(bits, dtype))
        return bits  # type: ignore[no-any-return]

    def round_to_half(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        """See `RoundToHalf`."""
        check_rounded(grad, residual, dtype, out)
        self._launch("round", dtype.label, 0, grad.size, grad, residual, stored(out, dtype))

    def quantise_2bit(self, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """See `Quantise`."""
        check_quantised(grad, residual, out, WORD_ELEMENTS_2BIT)
        self._launch("quantise2", "float32", 0, out.size, grad, residual, np.float32(threshold), out)

    def quantise_1bit(self, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """See `Quantise`."""
        check_quantised(grad, residual, out, WORD_ELEMENTS_1BIT)
        self._launch("quantise1", "float32", 0, out.size, grad, residual, np.float32(threshold), out)

    def dequantise_2bit(self, data: Array, threshold: float, out: Array) -> None:
        """See `Dequantise`."""
        check_dequantised(data, out, WORD_ELEMENTS_2BIT)
        self._launch("dequantise2", "float32", 0, out.size, data, np.float32(threshold), out)

    def dequantise_1bit(self, data: Array, threshold: float, out: Array) -> None:
        """See `Dequantise`."""
        check_dequantised(data, out, WORD_ELEMENTS_1BIT)
        self._launch("dequantise1", "float32", 0, out.size, data, out)

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        """See `Device.add_dequantised_2bit`."""
        check_dequantised(data, total, WORD_ELEMENTS_2BIT)
        self._launch("add2", "float32", 0, total.size, data, np.float32(threshold), total)

    def add_dequantised_1bit(self, data: Array, total: Array) -> None:
        """See `Device.add_dequantised_1bit`."""
        check_dequantised(data, total, WORD_ELEMENTS_1BIT)
        self._launch("add1", "float32", 0, total.size, data, total)

    def _launch(self, what: str, label: str, count: int, elements: int, *arguments: Any) -> None:
        self._memory.launch((what, label, count), elements, *arguments)


def as_array(array: Any) -> NumbaArray:
    """What the seam calls an array is one of ours.

    Raises:
        TypeError: it is not.
    """
    if not isinstance(array, NumbaArray):
        raise TypeError(f"numba's kernels take arrays that its device has made or viewed, not {type(array).__name__}")
    return array


def stored(array: Any, dtype: DType) -> NumbaArray:
    """An array of `dtype.storage` as kernels take it: halves as bits."""
    return as_array(array).view(np.uint16) if dtype.itemsize == 2 else as_array(array)


def _factored(scales: Sequence[float]) -> tuple[Sequence[float], float]:
    """Each contribution's own scale, and the one of the sum. A factor of 1 changes no bit."""
    if scales.count(scales[0]) == len(scales):
        return (1.0,) * len(scales), scales[0]
    return scales, 1.0


def _require_half(dtype: DType) -> None:
    if dtype is not DType.FLOAT16 and dtype is not DType.BFLOAT16:
        raise TypeError(f"{dtype.label} is not a half: only float16 and bfloat16 are cast from and to float32")
