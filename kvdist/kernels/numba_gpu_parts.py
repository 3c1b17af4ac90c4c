"""What kernels for GPUs are made of: arithmetic that is rounded as the host rounds it, halves as bits, raw addresses.

Rules that hold here: nothing is contracted to a fused multiply-add, because every product goes through `_times`, whose
instruction the compiler may not fuse (numba has no switch for that); divisions and square roots are rounded to nearest.
So a kernel that adds and multiplies in the reference's order gives the reference's bits. Halves are looked at as the
bits they have, so that one text serves every GPU and numba's simulator.

The simulator runs a kernel as plain Python, one thread for each CUDA thread. What only a compiler knows (to look at a
float as bits, to read at an address) is there a second time, in Python. It runs when NUMBA_ENABLE_CUDASIM=1 was set
before numba was imported.
"""

from __future__ import annotations

import ctypes
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import cuda
from numba.core import types as nt

SIMULATED = bool(numba.config.ENABLE_CUDASIM)
"""Whether kernels run in numba's simulator."""

F32, U8, U16, U32, U64 = np.float32, np.uint8, np.uint16, np.uint32, np.uint64

REALS: dict[str, Any] = {"float32": nt.float32, "float64": nt.float64}
INTEGERS: dict[str, Any] = {"int8": nt.int8, "int32": nt.int32, "int64": nt.int64, "uint8": nt.uint8}
HALVES: dict[str, Any] = {"float16": nt.uint16, "bfloat16": nt.uint16}
"""numba's type of an element, by the label of a `DType`. Halves are bits."""

STORED: dict[str, Any] = {**REALS, **INTEGERS, **HALVES}
SUMMED: dict[str, Any] = {**REALS, **INTEGERS, **dict.fromkeys(HALVES, nt.float32)}


def part(function: Callable[..., Any]) -> Any:
    """Make a function part of kernels."""
    return function if SIMULATED else cuda.jit(device=True)(function)


if SIMULATED:
    _UNSIGNED = {1: ctypes.c_uint8, 2: ctypes.c_uint16, 4: ctypes.c_uint32, 8: ctypes.c_uint64}

    def bits_of(value):
        """The 32 bits of a float32."""
        return F32(value).view(U32)

    def float_of(bits):
        """The float32 with these 32 bits."""
        return U32(bits).view(F32)

    def _at(width: int) -> tuple[Any, Any]:
        unsigned = _UNSIGNED[width]

        def load(address, index):
            return unsigned.from_address(int(address) + width * int(index)).value

        def store(address, index, value):
            unsigned.from_address(int(address) + width * int(index)).value = value

        return load, store

    _EXACT: dict[str, Any] = {"_times": operator.mul, "_divided": operator.truediv, "_root": np.sqrt}
    ARITHMETIC = {"float32": _EXACT, "float64": _EXACT}
else:
    from numba.cuda import libdevice
    from numba.cuda.extending import intrinsic

    @intrinsic
    def bits_of(_context: Any, value: Any) -> Any:
        """The 32 bits of a float32."""

        def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.IntType(32))

        return nt.uint32(nt.float32), generate

    @intrinsic
    def float_of(_context: Any, bits: Any) -> Any:
        """The float32 with these 32 bits."""

        def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.FloatType())

        return nt.float32(nt.uint32), generate

    def _at(width: int) -> tuple[Any, Any]:
        unsigned: Any = {1: nt.uint8, 2: nt.uint16, 4: nt.uint32, 8: nt.uint64}[width]
        # Address space 1 is the memory of the device: the compiler need not find out at run time where it is.
        pointer = ir.IntType(8 * width).as_pointer(1)

        def place(builder: Any, arguments: Any) -> Any:
            return builder.gep(builder.inttoptr(arguments[0], pointer), [arguments[1]])

        def load(_context: Any, address: Any, index: Any) -> Any:
            def generate(_: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                return builder.load(place(builder, arguments))

            return unsigned(nt.uint64, nt.int64), generate

        def store(_context: Any, address: Any, index: Any, value: Any) -> Any:
            def generate(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
                builder.store(arguments[2], place(builder, arguments))
                return context.get_dummy_value()

            return nt.void(nt.uint64, nt.int64, unsigned), generate

        return intrinsic(load), intrinsic(store)

    ARITHMETIC = {
        "float32": {"_times": libdevice.fmul_rn, "_divided": libdevice.fdiv_rn, "_root": libdevice.fsqrt_rn},
        "float64": {"_times": libdevice.dmul_rn, "_divided": libdevice.ddiv_rn, "_root": libdevice.dsqrt_rn},
    }

load8, store8 = _at(1)
load16, store16 = _at(2)
load32, store32 = _at(4)
load64, store64 = _at(8)


# Between halves and float32. The host's kernels do the same, and say why.

_product = ARITHMETIC["float32"]["_times"]


@part
def to_float16(value):
    """The bits of the nearest float16, ties to even; what is too large is infinite."""
    bits = bits_of(value)
    sign = U32(bits & U32(0x80000000))
    size = U32(bits ^ sign)
    magic = U32(126 << 23)
    small = U32(bits_of(float_of(size) + float_of(magic)) - magic)
    usual = U32(U64(U64(size) + U64(0xC8000FFF) + U64((size >> U32(13)) & U32(1))) >> U64(13))
    half = small if size < U32(113 << 23) else usual
    large = U32(0x7E00) if size > U32(0x7F800000) else U32(0x7C00)
    half = large if size >= U32(143 << 23) else half
    return U16((half | (sign >> U32(16))) & U32(0xFFFF))


@part
def from_float16(half):
    """The float32 of these bits of a float16."""
    wide = U32(half)
    sign = U32((wide & U32(0x8000)) << U32(16))
    shifted = U32((wide & U32(0x7FFF)) << U32(13))
    size = bits_of(_product(float_of(shifted), float_of(U32(239 << 23))))
    size = U32(size | U32(0x7F800000)) if shifted >= U32(0x7C00 << 13) else size
    return float_of(U32(size | sign))


@part
def to_bfloat16(value):
    """The bits of the nearest bfloat16, ties to even; what is too large is infinite."""
    bits = bits_of(value)
    kept = U32(bits >> U32(16))
    rounded = U32((U64(bits) + U64(0x7FFF) + U64(kept & U32(1))) >> U64(16))
    return U16((kept | U32(0x40) if value != value else rounded) & U32(0xFFFF))


@part
def from_bfloat16(half):
    """The float32 of these bits of a bfloat16."""
    return float_of(U32(U32(half) << U32(16)))


@part
def itself(value):
    """Of types that are summed as they are stored."""
    return value


@part
def unscaled(value, scale):
    """Of integers, which have no scales."""
    return value


CASTS: dict[str, dict[str, Any]] = {
    "float16": {"_widened": from_float16, "_narrowed": to_float16, "_infinite": U16(0x7C00)},
    "bfloat16": {"_widened": from_bfloat16, "_narrowed": to_bfloat16, "_infinite": U16(0x7F80)},
}


def arithmetic(label: str) -> dict[str, Any]:
    """What the names `_times`, `_divided`, `_root`, `_widened` and `_narrowed` mean for elements of a type."""
    if label in INTEGERS:
        return {"_times": unscaled, "_widened": itself, "_narrowed": itself}
    own = ARITHMETIC["float64" if label == "float64" else "float32"]
    return {**own, **CASTS.get(label, {"_widened": itself, "_narrowed": itself})}


def specialised(
    names: Mapping[str, Any], functions: tuple[Callable[..., Any], ...], chosen: Mapping[str, Any]
) -> dict[str, Any]:
    """A module's names with copies of its functions, in which some names mean what this kernel needs.

    Args:
        names: of the module, as ``globals()``.
        functions: those that become part of the kernel; they see the chosen names, and each other's copies.
        chosen: what some names mean.
    """
    own = {**names, **chosen}
    for function in functions:
        own[function.__name__] = part(types.FunctionType(function.__code__, own, function.__name__))
    return own
