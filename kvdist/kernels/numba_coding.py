"""Kernels that numba compiles for encoded contributions: one or two bits an element, and halves.

Rules as in `kvdist.kernels.numba_cpu`, which compiles what stands here. Floats are looked at as the bits they have,
so that halves need no instructions that some processors lack.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba.core import types as nt
from numba.extending import intrinsic

BLOCK_ELEMENTS = 4096
"""So many codes wait in the cache until they are packed: a loop that does both is no vector instructions."""

_F32, _U8, _U16, _U32, _U64 = np.float32, np.uint8, np.uint16, np.uint32, np.uint64
_part = numba.njit(nogil=True, error_model="numpy")


@intrinsic
def _bits(_context: Any, value: Any) -> Any:
    """The 32 bits of a float32."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.IntType(32))

    return nt.uint32(nt.float32), generate


@intrinsic
def _float(_context: Any, bits: Any) -> Any:
    """The float32 with these 32 bits."""

    def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return nt.float32(nt.uint32), generate


def _quantise2(grad, residual, limit, out):
    """See `kernels.quantised`. One pass: reads 8 bytes of an element, writes 4 and a quarter."""
    codes = np.zeros(BLOCK_ELEMENTS, np.uint8)
    quads = codes.view(np.uint32)
    for start in range(0, grad.size, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, grad.size - start)
        new, rest = grad[start : start + count], residual[start : start + count]
        for i in range(count):
            value = rest[i] + new[i]
            above, below = value >= limit, value <= -limit
            step = limit if above else _F32(0)
            rest[i] = value - (-limit if below else step)
            codes[i] = _U8(3) if above else _U8(2) if below else _U8(0)
        codes[count:] = 0
        packed = out[start // 4 : start // 4 + (count + 15) // 16 * 4]
        for i in range(packed.size):
            # The four codes of a byte, one in each byte of the product, meet in its highest.
            packed[i] = _U8((quads[i] * _U32(0x40100401)) >> _U32(24))


def _dequantise2(data, limit, out):
    """One pass: reads a quarter byte an element, writes 4."""
    whole = out.size // 4
    for i in range(whole):
        byte = data[i]
        for j in range(4):
            code = (byte >> (6 - 2 * j)) & 3
            above = limit if code == 3 else _F32(0)
            out[4 * i + j] = -limit if code == 2 else above
    for i in range(4 * whole, out.size):
        code = (data[whole] >> (6 - 2 * (i - 4 * whole))) & 3
        above = limit if code == 3 else _F32(0)
        out[i] = -limit if code == 2 else above


def _quantise1(grad, residual, limit, out):
    """One pass: reads 8 bytes of an element, writes 4 and an eighth."""
    codes = np.zeros(BLOCK_ELEMENTS, np.uint8)
    eights = codes.view(np.uint64)
    for start in range(0, grad.size, BLOCK_ELEMENTS):
        count = min(BLOCK_ELEMENTS, grad.size - start)
        new, rest = grad[start : start + count], residual[start : start + count]
        for i in range(count):
            value = rest[i] + new[i]
            above = value > limit
            rest[i] = value - (_F32(1) if above else _F32(-1))
            codes[i] = _U8(1) if above else _U8(0)
        codes[count:] = 0
        packed = out[start // 8 : start // 8 + (count + 31) // 32 * 4]
        for i in range(packed.size):
            packed[i] = _U8((eights[i] * _U64(0x8040201008040201)) >> _U64(56))


def _dequantise1(data, limit, out):
    """One pass: reads an eighth of a byte an element, writes 4."""
    whole = out.size // 8
    for i in range(whole):
        byte = data[i]
        for j in range(8):
            out[8 * i + j] = _F32(1) if (byte >> (7 - j)) & 1 else _F32(-1)
    for i in range(8 * whole, out.size):
        out[i] = _F32(1) if (data[whole] >> (7 - (i - 8 * whole))) & 1 else _F32(-1)


@_part
def _to_float16(value):
    """The bits of the nearest float16, ties to even; what is too large is infinite."""
    bits = _bits(value)
    sign = bits & _U32(0x80000000)
    size = bits ^ sign
    # What is small is shifted to where the adder of floats rounds it, the rest is rounded as an integer.
    magic = _U32(126 << 23)
    small = _bits(_float(size) + _float(magic)) - magic
    usual = (size + _U32(0xC8000FFF) + ((size >> _U32(13)) & _U32(1))) >> _U32(13)
    half = small if size < _U32(113 << 23) else usual
    large = _U32(0x7E00) if size > _U32(0x7F800000) else _U32(0x7C00)
    half = large if size >= _U32(143 << 23) else half
    return _U16(half | (sign >> _U32(16)))


@_part
def _from_float16(half):
    """The float32 of these bits of a float16."""
    wide = _U32(half)
    sign = (wide & _U32(0x8000)) << _U32(16)
    shifted = (wide & _U32(0x7FFF)) << _U32(13)
    # Multiplied by 2^112 the exponent is right, of small numbers too; infinity and NaN get theirs back.
    size = _bits(_float(shifted) * _float(_U32(239 << 23)))
    size = size | _U32(0x7F800000) if shifted >= _U32(0x7C00 << 13) else size
    return _float(size | sign)


@_part
def _to_bfloat16(value):
    """The bits of the nearest bfloat16, ties to even; what is too large is infinite."""
    bits = _bits(value)
    rounded = (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
    return _U16((bits >> _U32(16)) | _U32(0x40) if value != value else rounded)


@_part
def _from_bfloat16(half):
    """The float32 of these bits of a bfloat16."""
    return _float(_U32(half) << _U32(16))


_to_half, _from_half, _infinite = _to_float16, _from_float16, _U16(0x7C00)
"""Of the kernel that is being built: every kernel has its own copy of what follows with others here."""


def _narrow(values, out):
    """One pass."""
    for i in range(out.size):
        out[i] = _to_half(values[i])


def _widen(bits, out):
    """One pass."""
    for i in range(out.size):
        out[i] = _from_half(bits[i])


def _round(grad, residual, out):
    """See `kernels.quantised.round_to_half`. One pass: reads 8 bytes of an element, writes 6."""
    for i in range(out.size):
        value = residual[i] + grad[i]
        half = _to_half(value)
        finite = abs(value) < _F32(np.inf)
        if finite and (half & _U16(0x7FFF)) == _infinite:
            half = _U16(half - _U16(1))
        out[i] = half
        residual[i] = value - _from_half(half) if finite else _F32(0)


_HALVES = {
    "float16": {"_to_half": _to_float16, "_from_half": _from_float16, "_infinite": _U16(0x7C00)},
    "bfloat16": {"_to_half": _to_bfloat16, "_from_half": _from_bfloat16, "_infinite": _U16(0x7F80)},
}
_CODERS: dict[str, Callable[..., Any]] = {
    "quantise2": _quantise2, "dequantise2": _dequantise2, "quantise1": _quantise1, "dequantise1": _dequantise1,
}  # fmt: skip
_CASTS: dict[str, Callable[..., Any]] = {"narrow": _narrow, "widen": _widen, "round": _round}


def template(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any]] | None:
    """For a name such as ``quantise2_float32`` or ``narrow_float16`` a function, its signature, and its own globals."""
    what, _, label = name.rpartition("_")
    read, write = nt.Array(nt.float32, 1, "C", readonly=True), nt.float32[::1]
    coder = _CODERS.get(what)
    if coder is not None:
        octets = nt.Array(nt.uint8, 1, "C", readonly=True)
        packs = what.startswith("quantise")
        signature = nt.void(read, write, nt.float32, nt.uint8[::1]) if packs else nt.void(octets, nt.float32, write)
        return coder, signature, globals()
    if what in _CASTS:
        halves = nt.Array(nt.uint16, 1, "C", readonly=True)
        signature = {
            "narrow": nt.void(read, nt.uint16[::1]),
            "widen": nt.void(halves, write),
            "round": nt.void(read, write, nt.uint16[::1]),
        }[what]
        return _CASTS[what], signature, {**globals(), **_HALVES[label]}
    return None
