"""The definition of quantization: float32 as codes of 1 or 2 bits an element, with the error kept for the next call.

Per element, with gradient g, residual r and threshold t, all in float32: r ← r + g, and then

* 2-bit: code 3, of value +t, where r ≥ t; code 2, of value -t, where r ≤ -t; else code 0, of value 0.
* 1-bit: code 1, of value +1, where r > t; else code 0, of value -1.

The value of the code is subtracted from r. The first of the elements in a byte has its highest bits; the rest of the
last word of four bytes is zero. NaN is neither above nor below: it stays in the residual, and its code has the value 0
(-1 in 1-bit). An infinity stays in the residual too, and its code has the value ±t (±1) each time.
"""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array

WORD_ELEMENTS_2BIT = 16
WORD_ELEMENTS_1BIT = 32


def to_float32(bits: Array, dtype: DType, out: Array | None = None) -> Array:
    """See `ToFloat32`. Makes a single pass."""
    _require_half(dtype)
    values = np.empty(bits.size, np.float32) if out is None else out
    if dtype is DType.FLOAT16:
        np.copyto(values, bits)
    else:
        # A bfloat16 is the upper half of a float32. `dtype` keeps NumPy 1 from shifting in 16 bits.
        np.left_shift(bits, 16, out=values.view(np.uint32), dtype=np.uint32)
    return values


def from_float32(values: Array, dtype: DType, out: Array | None = None) -> Array:
    """See `FromFloat32`. Passes: 1 for float16, 7 for bfloat16 (all but the first in cache)."""
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
    """Add half of the last kept bit, minus 1 if that bit is even, and cut: ties go to even."""
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


def quantise_2bit(grad: Array, residual: Array, threshold: float, out: Array) -> None:
    """See `Quantise`. Ten passes in cache, and a pass over memory."""
    check_quantised(grad, residual, out, WORD_ELEMENTS_2BIT)
    limit = np.float32(threshold)
    codes = np.empty(_scratch_size(grad.size), np.uint8)
    for start in range(0, grad.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        rest = residual[part]
        with np.errstate(all="ignore"):
            np.add(rest, grad[part], out=rest)
            above, below = rest >= limit, rest <= -limit
            # A zero that is taken away changes no bit.
            np.subtract(rest, limit * (above.view(np.int8) - below.view(np.int8)), out=rest)
        first, last = start // 4, -(-(start + rest.size) // 4)
        code = codes[: 4 * (last - first)]
        code[rest.size :] = 0
        np.multiply(above, np.uint8(3), out=code[: rest.size])
        code[: rest.size] |= below.view(np.uint8) << np.uint8(1)
        quads = code.reshape(-1, 4)
        packed = out[first:last]
        np.left_shift(quads[:, 0], 6, out=packed)
        for place, shift in ((1, 4), (2, 2), (3, 0)):
            packed |= quads[:, place] << np.uint8(shift)
    out[-(-grad.size // 4) :] = 0


def dequantise_2bit(data: Array, threshold: float, out: Array) -> None:
    """See `Dequantise`. Makes a single pass over memory, with a table of the values of each byte."""
    check_dequantised(data, out, WORD_ELEMENTS_2BIT)
    worth = np.array([0.0, 0.0, -np.float32(threshold), np.float32(threshold)], np.float32)
    codes = np.arange(256)[:, None] >> np.array([6, 4, 2, 0]) & 3
    _looked_up(worth[codes], data, out)


def quantise_1bit(grad: Array, residual: Array, threshold: float, out: Array) -> None:
    """See `Quantise`. Five passes in cache, and a pass over memory."""
    check_quantised(grad, residual, out, WORD_ELEMENTS_1BIT)
    limit, one = np.float32(threshold), np.float32(1)
    for start in range(0, grad.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        rest = residual[part]
        with np.errstate(all="ignore"):
            np.add(rest, grad[part], out=rest)
            above = rest > limit
            np.subtract(rest, np.where(above, one, -one), out=rest)
        out[start // 8 : -(-(start + rest.size) // 8)] = np.packbits(above)
    out[-(-grad.size // 8) :] = 0


def dequantise_1bit(data: Array, threshold: float, out: Array) -> None:  # noqa: ARG001  # a boundary, and worth nothing
    """See `Dequantise`. Makes a single pass over memory, with a table of the values of each byte."""
    check_dequantised(data, out, WORD_ELEMENTS_1BIT)
    codes = np.arange(256)[:, None] >> np.arange(7, -1, -1) & 1
    _looked_up((2 * codes - 1).astype(np.float32), data, out)


def round_to_half(grad: Array, residual: Array, dtype: DType, out: Array) -> None:
    """See `RoundToHalf`. Some twelve passes in cache, and a pass over memory."""
    check_rounded(grad, residual, dtype, out)
    for start in range(0, grad.size, CHUNK_ELEMENTS):
        part = slice(start, start + CHUNK_ELEMENTS)
        rest, half = residual[part], out[part]
        with np.errstate(all="ignore"):
            np.add(rest, grad[part], out=rest)
            from_float32(rest, dtype, half)
            back = to_float32(half, dtype)
            finite = np.isfinite(rest)
            over = np.isinf(back) & finite
            if over.any():
                bits = half.view(np.uint16)
                bits[over] -= 1  # the largest number stands before infinity
                back = to_float32(half, dtype)
            np.subtract(rest, back, out=rest)
            rest[~finite] = 0


def check_rounded(grad: Array, residual: Array, dtype: DType, out: Array) -> None:
    """Refuse the arguments that `RoundToHalf` refuses."""
    if grad.dtype != np.float32 or residual.dtype != np.float32 or out.dtype != dtype.storage:
        raise TypeError(
            f"float32 is rounded, with a residual of float32, to {dtype.storage}; not {grad.dtype}, {residual.dtype}"
            f" to {out.dtype}"
        )
    if not grad.size == residual.size == out.size:
        raise ValueError(f"lengths differ: {grad.size}, {residual.size} and {out.size}")


def _looked_up(worth: Array, data: Array, out: Array) -> None:
    """Write the values of each byte of `data`, a row of the table `worth`, to `out`; the last row may be cut."""
    per_byte = worth.shape[1]
    whole = out.size // per_byte
    np.take(worth, data[:whole], axis=0, out=out[: whole * per_byte].reshape(whole, per_byte), mode="clip")
    if whole * per_byte < out.size:
        out[whole * per_byte :] = worth[data[whole]][: out.size - whole * per_byte]


def check_quantised(grad: Array, residual: Array, out: Array, word_elements: int) -> None:
    """Refuse the arguments that `Quantise` refuses."""
    if grad.dtype != np.float32 or residual.dtype != np.float32 or out.dtype != np.uint8:
        raise TypeError(
            f"float32 is quantised, with a residual of float32, into bytes; not {grad.dtype}, {residual.dtype} into"
            f" {out.dtype}"
        )
    if residual.size != grad.size or out.size != quantised_bytes(grad.size, word_elements):
        raise ValueError(
            f"{grad.size} elements need as many in the residual and {quantised_bytes(grad.size, word_elements)} bytes,"
            f" not {residual.size} and {out.size}"
        )


def check_dequantised(data: Array, out: Array, word_elements: int) -> None:
    """Refuse the arguments that `Dequantise` refuses."""
    if data.dtype != np.uint8 or out.dtype != np.float32:
        raise TypeError(f"bytes are dequantised into float32, not {data.dtype} into {out.dtype}")
    if data.size != quantised_bytes(out.size, word_elements):
        raise ValueError(
            f"{out.size} elements come from {quantised_bytes(out.size, word_elements)} bytes, not from {data.size}"
        )


def quantised_bytes(count: int, word_elements: int) -> int:
    """Number of bytes of the codes of `count` elements: whole words of four bytes."""
    return -(-count // word_elements) * 4


def _scratch_size(count: int) -> int:
    return min(-(-count // 4) * 4, CHUNK_ELEMENTS)
