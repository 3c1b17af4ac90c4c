"""The NumPy-side half of the compiled kernels that encode contributions: checks, and the reference where they lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.loading import Kernel
from kvdist.kernels.quantised import (
    WORD_ELEMENTS_1BIT,
    WORD_ELEMENTS_2BIT,
    check_dequantised,
    check_quantised,
    check_rounded,
)
from kvdist.kernels.reference import REFERENCE

Find = Callable[[str, int], Kernel | None]
"""The compiled kernel of a name, or None; told how many elements it is for."""


def coders_of(find: Find) -> dict[str, Any]:
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


def _fit(*arrays: Array) -> bool:
    return all((flags := array.flags).c_contiguous and flags.aligned for array in arrays)
