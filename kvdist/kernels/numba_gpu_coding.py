"""Kernels for GPUs that encode: one or two bits an element, and halves. `kvdist.kernels.quantised` is the definition.

A thread makes a byte of codes, which are its own four or eight elements, or decodes an element.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.core import types as nt

from kvdist.kernels.numba_gpu_parts import CASTS, F32, U8, U16, itself, specialised

_widened = _narrowed = itself
_infinite = U16(0)
"""Every kernel has its own copy of what follows, with others here."""


def _quantise2(grad, residual, limit, out):
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
        out[place] = U8(byte)


def _worth2(data, limit, i):
    code = (data[i >> 2] >> (6 - 2 * (i & 3))) & 3
    above = limit if code == 3 else F32(0)
    return -limit if code == 2 else above


def _dequantise2(data, limit, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _worth2(data, limit, i)


def _add2(data, limit, total):
    for i in range(cuda.grid(1), total.size, cuda.gridsize(1)):
        total[i] = total[i] + _worth2(data, limit, i)


def _quantise1(grad, residual, limit, out):
    for place in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        byte = 0
        for i in range(8 * place, min(8 * place + 8, grad.size)):
            value = residual[i] + grad[i]
            if value > limit:
                byte |= 1 << (7 - (i & 7))
                residual[i] = value - F32(1)
            else:
                residual[i] = value - F32(-1)
        out[place] = U8(byte)


def _worth1(data, i):
    return F32(1) if (data[i >> 3] >> (7 - (i & 7))) & 1 else F32(-1)


def _dequantise1(data, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _worth1(data, i)


def _add1(data, total):
    for i in range(cuda.grid(1), total.size, cuda.gridsize(1)):
        total[i] = total[i] + _worth1(data, i)


def _narrow(values, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _narrowed(values[i])


def _widen(bits, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _widened(bits[i])


def _round(grad, residual, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        value = residual[i] + grad[i]
        half = _narrowed(value)
        finite = abs(value) < F32(float("inf"))
        if finite and (half & U16(0x7FFF)) == _infinite:
            half = U16(half - U16(1))
        out[i] = half
        residual[i] = value - _widened(half) if finite else F32(0)


_F, _B, _H, _S = nt.float32[::1], nt.uint8[::1], nt.uint16[::1], nt.float32

_CODERS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "quantise2": (_quantise2, (_F, _F, _S, _B)),
    "dequantise2": (_dequantise2, (_B, _S, _F)),
    "add2": (_add2, (_B, _S, _F)),
    "quantise1": (_quantise1, (_F, _F, _S, _B)),
    "dequantise1": (_dequantise1, (_B, _F)),
    "add1": (_add1, (_B, _F)),
}
_CASTING: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "narrow": (_narrow, (_F, _H)),
    "widen": (_widen, (_H, _F)),
    "round": (_round, (_F, _F, _H)),
}


def template(what: str, label: str, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A kernel and the types of its arguments; None where there is none of that name here."""
    if what in _CODERS:
        (function, signature), chosen = _CODERS[what], {}
    elif what in _CASTING and label in CASTS:
        (function, signature), chosen = _CASTING[what], CASTS[label]
    else:
        return None
    own = specialised(globals(), (_worth1, _worth2), chosen)
    return types.FunctionType(function.__code__, own, function.__name__), signature


def names() -> list[tuple[str, str, int]]:
    """Every kernel, for a test that compiles them all."""
    return [(what, "float32", 0) for what in _CODERS] + [(what, label, 0) for what in _CASTING for label in CASTS]
