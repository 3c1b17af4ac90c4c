"""Which functions do the arithmetic on this host, and the NumPy-side half of the compiled ones.

A compiled kernel takes the place of the reference where it is measured to be faster: any optimizer's update of float32
or float64, and sums that cost the reference more than one pass. Where it is not there yet, or does not fit, the
reference works instead. Both give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, NUMBERS_MAX, SOURCES_MAX, Array, Equation, Kernels
from kvdist.kernels.loading import LOADER, Kernel, Loader
from kvdist.kernels.quantization import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import REFERENCE, check_sum, factored

Find = Callable[[str, int], Kernel | None]
"""The compiled kernel of a name, for a number of elements; None where there is none yet."""

_ONES = (1.0,) * SOURCES_MAX
_ZEROS = (0.0,) * NUMBERS_MAX
_OFF = float("inf")
_LABELS = {np.dtype(np.float32): "float32", np.dtype(np.float64): "float64"}


def choose(setting: str, loader: Loader = LOADER) -> Kernels:
    """The kernels of a setting (``KVDIST_KERNELS``).

    Args:
        setting: ``numpy`` is the reference; ``auto`` starts with it and goes over to numba in the background when
            there is work enough and numba is installed; ``numba`` imports it now and waits for every kernel.
        loader: where compiled kernels come from.

    Raises:
        ConfigError: ``numba`` is asked for and cannot be imported.
    """
    if setting == "numpy":
        return REFERENCE
    if setting == "numba":
        loader.require()
        compiled = Compiled(loader.demanded)
    else:
        compiled = Compiled(loader.offered)
    coders = _coders_of(compiled.kernel)
    return replace(
        REFERENCE, name=setting, weighted_sum=compiled.weighted_sum, fused_update=compiled.fused_update, **coders
    )


class Compiled:
    """Calls compiled kernels with what they take.

    Args:
        kernel: gives the compiled kernel of a name for a number of elements; None where there is none yet.
    """

    def __init__(self, kernel: Callable[[str, int], Kernel | None]) -> None:
        self.kernel = kernel

    def weighted_sum(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """See `WeightedSum`. One pass of up to four contributions; each more is added in the cache."""
        count = len(contributions)
        label = _LABELS.get(dtype.storage)
        # One array, or two without a scale, are one pass of the reference too.
        if label is not None and (count > 2 or (count == 2 and (scales[0] != 1 or scales[-1] != 1))):
            kernel = self.kernel(f"sum_{label}", out.size)
            if kernel is not None and _fit(out, *contributions):
                check_sum(contributions, scales, dtype, out)
                _sum(kernel, contributions, *factored(scales), out)
                return
        REFERENCE.weighted_sum(contributions, scales, dtype, out)

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
        """See `FusedUpdate`. Halves go the way of many passes."""
        label = _LABELS.get(weight.dtype)
        if label is None or not contributions or master is not None:
            return False
        kernel = self.kernel(f"{equation.name}_{label}", weight.size)
        if kernel is None or not _fit(weight, out, *states, *contributions):
            return False
        own, factor = factored(scales)
        tail = (factor, _OFF if clip is None else clip, *equation.numbers, *_ZEROS[len(equation.numbers) :])
        if len(contributions) <= SOURCES_MAX:
            _update(kernel, weight, contributions, own, out, states, tail)
            return True
        add = self.kernel(f"sum_{label}", weight.size)
        if add is None:
            return False
        total = np.empty(min(weight.size, CHUNK_ELEMENTS), weight.dtype)
        for start in range(0, weight.size, CHUNK_ELEMENTS):
            part = slice(start, start + CHUNK_ELEMENTS)
            target = out[part]
            _sum(add, [each[part] for each in contributions], own, 1.0, total[: target.size])
            arrays = [state[part] for state in states]
            _update(kernel, weight[part], [total[: target.size]], (1.0,), target, arrays, tail)
        return True


def _fit(*arrays: Array) -> bool:
    """Whether a compiled kernel can work on the arrays where they lie."""
    return all((flags := array.flags).c_contiguous and flags.aligned for array in arrays)


def _padded(contributions: Sequence[Array], scales: Sequence[float]) -> tuple[object, ...]:
    """Four arrays, how many of them count, and four scales."""
    count = len(contributions)
    missing = SOURCES_MAX - count
    return (*contributions, *(contributions[0],) * missing, count, *scales, *_ONES[:missing])


def _sum(kernel: Kernel, contributions: Sequence[Array], scales: Sequence[float], factor: float, out: Array) -> None:
    """A sum of two arrays or more."""
    count = len(contributions)
    if count <= SOURCES_MAX:
        kernel(out, *_padded(contributions, scales), factor)
        return
    for start in range(0, out.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        target = out[part]
        kernel(target, *_padded([each[part] for each in contributions[:SOURCES_MAX]], scales[:SOURCES_MAX]), 1.0)
        for i in range(SOURCES_MAX, count):
            last = factor if i == count - 1 else 1.0
            kernel(target, *_padded([contributions[i][part]], [scales[i]]), last)


def _update(
    kernel: Kernel,
    weight: Array,
    contributions: Sequence[Array],
    scales: Sequence[float],
    out: Array,
    states: Sequence[Array],
    tail: tuple[float, ...],
) -> None:
    # A rule without the states leaves the arrays that stand for them alone.
    first, second = (*states, out, out)[:2]
    kernel(out, weight, first, second, *_padded(contributions, scales), *tail)


# Coding.


def _coders_of(find: Find) -> dict[str, Any]:
    """The fields of `Kernels` that encode and decode, each compiled where its kernel is there."""
    return {
        "to_float32": _widening(find),
        "from_float32": _narrowing(find),
        "round_to_half": _rounding(find),
        "quantise_2bit": _quantising(find, "quantise2_float32", WORD_ELEMENTS_2BIT, REFERENCE.quantise_2bit),
        "quantise_1bit": _quantising(find, "quantise1_float32", WORD_ELEMENTS_1BIT, REFERENCE.quantise_1bit),
        "dequantise_2bit": _dequantising(find, "dequantise2_float32", WORD_ELEMENTS_2BIT, REFERENCE.dequantise_2bit),
        "dequantise_1bit": _dequantising(find, "dequantise1_float32", WORD_ELEMENTS_1BIT, REFERENCE.dequantise_1bit),
    }


def _quantising(find: Find, name: str, word_elements: int, reference: Any) -> Any:
    def quantise(grad: Array, residual: Array, threshold: float, out: Array) -> None:
        kernel = find(name, grad.size)
        if kernel is None or not _fit(grad, residual, out):
            reference(grad, residual, threshold, out)
            return
        check_quantised(grad, residual, out, word_elements)
        kernel(grad, residual, threshold, out)

    return quantise


def _dequantising(find: Find, name: str, word_elements: int, reference: Any) -> Any:
    def dequantise(data: Array, threshold: float, out: Array) -> None:
        kernel = find(name, out.size)
        if kernel is None or not _fit(data, out):
            reference(data, threshold, out)
            return
        check_dequantised(data, out, word_elements)
        kernel(data, threshold, out)

    return dequantise


def _rounding(find: Find) -> Any:
    def round_to_half(grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        kernel = find(f"round_{dtype.label}", grad.size)
        if kernel is None or not _fit(grad, residual, out):
            REFERENCE.round_to_half(grad, residual, dtype, out)
            return
        check_rounded(grad, residual, dtype, out)
        kernel(grad, residual, out.view(np.uint16))

    return round_to_half


def _narrowing(find: Find) -> Any:
    def from_float32(values: Array, dtype: DType, out: Array | None = None) -> Array:
        kernel = find(f"narrow_{dtype.label}", values.size) if _is_half(dtype) else None
        if kernel is None or values.dtype != np.float32 or not _fit(values):
            return REFERENCE.from_float32(values, dtype, out)
        bits = np.empty(values.size, dtype.storage) if out is None else out
        if not _fit(bits) or bits.size != values.size or bits.dtype != dtype.storage:
            return REFERENCE.from_float32(values, dtype, out)
        kernel(values, bits.view(np.uint16))
        return bits

    return from_float32


def _widening(find: Find) -> Any:
    def to_float32(bits: Array, dtype: DType, out: Array | None = None) -> Array:
        kernel = find(f"widen_{dtype.label}", bits.size) if _is_half(dtype) else None
        if kernel is None or bits.dtype != dtype.storage or not _fit(bits):
            return REFERENCE.to_float32(bits, dtype, out)
        values = np.empty(bits.size, np.float32) if out is None else out
        if not _fit(values) or values.size != bits.size or values.dtype != np.float32:
            return REFERENCE.to_float32(bits, dtype, out)
        kernel(bits.view(np.uint16), values)
        return values

    return to_float32


def _is_half(dtype: DType) -> bool:
    return dtype is DType.FLOAT16 or dtype is DType.BFLOAT16
