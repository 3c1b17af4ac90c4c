"""The definition of casts between float32 and halves, in NumPy."""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array


def to_float32(bits: Array, dtype: DType, out: Array | None = None) -> Array:
    """See `ToFloat32`. One pass."""
    _require_half(dtype)
    values = np.empty(bits.size, np.float32) if out is None else out
    if dtype is DType.FLOAT16:
        np.copyto(values, bits)
    else:
        # A bfloat16 is the upper half of a float32. `dtype` keeps NumPy 1 from shifting in 16 bits.
        np.left_shift(bits, 16, out=values.view(np.uint32), dtype=np.uint32)
    return values


def from_float32(values: Array, dtype: DType, out: Array | None = None) -> Array:
    """See `FromFloat32`. One pass for float16, seven for bfloat16 (all but the first in cache)."""
    _require_half(dtype)
    bits = np.empty(values.size, dtype.storage) if out is None else out
    if dtype is DType.FLOAT16:
        with np.errstate(all="ignore"):
            np.copyto(bits, values, casting="same_kind")
    else:
        scratch = np.empty(min(values.size, CHUNK_ELEMENTS), np.uint32)
        for start in range(0, values.size, CHUNK_ELEMENTS):
            part = slice(start, start + CHUNK_ELEMENTS)
            _round_to_bfloat16(values[part], bits[part], scratch)
    return bits


def _round_to_bfloat16(values: Array, bits: Array, scratch: Array) -> None:
    """Add half of the last kept bit, less one where that bit is even, and cut: ties go to even."""
    exact, rounded = values.view(np.uint32), scratch[: values.size]
    np.right_shift(exact, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, exact, out=rounded)
    np.right_shift(rounded, 16, out=bits, dtype=np.uint32, casting="unsafe")
    # The addition can carry a NaN to infinity or round to zero, so NaNs are cut instead and kept quiet.
    not_a_number = np.isnan(values)
    if not_a_number.any():
        bits[not_a_number] = (exact[not_a_number] >> 16) | 0x40


def _require_half(dtype: DType) -> None:
    if dtype is not DType.FLOAT16 and dtype is not DType.BFLOAT16:
        raise TypeError(f"{dtype.label} is not a half: only float16 and bfloat16 are cast from and to float32")
