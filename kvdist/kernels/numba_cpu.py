"""Kernels that numba compiles for this processor: a sum, and a sum with an optimizer, in a single pass over memory.

Rules that hold in this module: every operation is the reference's, in the reference's order and type, without fast-
math, so that the results are equal bit by bit (a NaN stays a NaN, its payload may differ). Every function has a single
explicit signature and never compiles for another: arrays of another type, unaligned or strided arrays are refused with
a TypeError. Sources and weights are declared read-only, which admits writable ones too. The GIL is released while a
kernel runs.

Only `kvdist.kernels.cpu` imports this module, because importing numba takes long.
"""

from __future__ import annotations

import logging
import types
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import types as nt
from numba.core.types.containers import UniTuple
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kvdist.kernels import parts
from kvdist.kernels.interface import SOURCES_MAX, STATES_MAX, UpdateKernel

LOG = logging.getLogger("kvdist")

VERSION = f"numba {numba.__version__}"

FLOATS = {"float32": numba.float32, "float64": numba.float64}

# LLVM makes vector instructions of a loop only if it knows that no iteration writes what another one reads. Seven
# arrays are too many for it to compare at run time, and a weight that is updated in place would always fail the
# comparison. So each access says itself to which array it belongs. What it promises holds: iteration i touches element
# i alone, and reads it before it writes it.

_WRITTEN = ("out", "first", "second", "third")


def _scopes(builder: Any, names: tuple[str, ...]) -> Any:
    module = builder.module
    domain = module.add_metadata(["kvdist"])
    return module.add_metadata([module.add_metadata([name, domain]) for name in names])


@intrinsic
def _read(_context: Any, array: Any, index: Any) -> Any:
    """array[index], which no other iteration writes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        load = builder.load(builder.gep(data, [arguments[1]]))
        load.set_metadata("noalias", _scopes(builder, _WRITTEN))
        return load

    return array.dtype(array, nt.intp), generate


def _writer(name: str) -> Any:
    """An intrinsic for array[index] = value on the array `name`, which overlaps no other written array."""
    others = tuple(other for other in _WRITTEN if other != name)

    def write(_context: Any, array: Any, index: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = make_array(signature.args[0])(context, builder, arguments[0]).data
            store = builder.store(arguments[2], builder.gep(data, [arguments[1]]))
            store.set_metadata("alias.scope", _scopes(builder, (name,)))
            store.set_metadata("noalias", _scopes(builder, others))
            return context.get_dummy_value()

        return nt.void(array, nt.intp, array.dtype), generate

    return intrinsic(write)


_write_out, _write_first, _write_second, _write_third = map(_writer, _WRITTEN)

_PARTS = f"{zlib.crc32(Path(parts.__file__).read_bytes()):08x}"
"""For names in numba's cache, which knows changes of this file only."""

_part = numba.njit(nogil=True, error_model="numpy")
"""For functions that become part of a kernel."""

_limited = _part(parts.limited)

# One element of a rule with no state, and with one to three. `grad` is summed, rescaled and clipped.

_expression: Any = None
"""The compiled expression of the kernel that is being built."""


def _step_0(i, grad, out, weight, first, second, third, numbers):
    _write_out(out, i, _expression(grad, _read(weight, i), *numbers))


def _step_1(i, grad, out, weight, first, second, third, numbers):
    w, one = _expression(grad, _read(weight, i), _read(first, i), *numbers)
    _write_first(first, i, one)
    _write_out(out, i, w)


def _step_2(i, grad, out, weight, first, second, third, numbers):
    w, one, two = _expression(grad, _read(weight, i), _read(first, i), _read(second, i), *numbers)
    _write_first(first, i, one)
    _write_second(second, i, two)
    _write_out(out, i, w)


def _step_3(i, grad, out, weight, first, second, third, numbers):
    w, one, two, three = _expression(
        grad, _read(weight, i), _read(first, i), _read(second, i), _read(third, i), *numbers
    )
    _write_first(first, i, one)
    _write_second(second, i, two)
    _write_third(third, i, three)
    _write_out(out, i, w)


_STEPS: tuple[Any, ...] = (_step_0, _step_1, _step_2, _step_3)
_step: Any = None
"""The entry of `_STEPS` for the kernel that is being built."""


def _update(out, weight, first, second, third, a, b, c, d, count, p, q, r, s, scaling):
    """The rule for the gradient factor·(p·a + q·b + r·c + s·d), with the first `count` terms, cut to ±limit.

    `scaling` has factor, limit, and the numbers of the rule.
    """
    factor, limit, numbers = scaling[0], scaling[1], scaling[2:]
    if count == 1:
        for i in range(out.size):
            grad = _read(a, i) * p
            _step(i, _limited(grad * factor, limit), out, weight, first, second, third, numbers)
    elif count == 2:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q
            _step(i, _limited(grad * factor, limit), out, weight, first, second, third, numbers)
    elif count == 3:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q + _read(c, i) * r
            _step(i, _limited(grad * factor, limit), out, weight, first, second, third, numbers)
    else:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q + _read(c, i) * r + _read(d, i) * s
            _step(i, _limited(grad * factor, limit), out, weight, first, second, third, numbers)


def _sum(out, a, b, c, d, count, p, q, r, s, factor):
    """out ← factor·(p·a + q·b + r·c + s·d), with the first `count` terms; for 1: factor·(out + p·a)."""
    if count == 1:
        for i in range(out.size):
            _write_out(out, i, (_read(out, i) + _read(a, i) * p) * factor)
    elif count == 2:
        for i in range(out.size):
            _write_out(out, i, (_read(a, i) * p + _read(b, i) * q) * factor)
    elif count == 3:
        for i in range(out.size):
            _write_out(out, i, (_read(a, i) * p + _read(b, i) * q + _read(c, i) * r) * factor)
    else:
        for i in range(out.size):
            _write_out(out, i, (_read(a, i) * p + _read(b, i) * q + _read(c, i) * r + _read(d, i) * s) * factor)


# Rows of a table, which lie anywhere: the processor is told some rows ahead which ones to fetch.

AHEAD = 8
"""Rows. From 4 to 32 measured alike, on rows of 256 bytes; none at all took more than twice as long."""
LINE_BYTES = 64


@intrinsic
def _fetch(_context: Any, array: Any, index: Any) -> Any:
    """Have the cache line of array[index] fetched meanwhile, to be written."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        octets, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [octets, number, number, number])
        prefetch = builder.module.declare_intrinsic("llvm.prefetch", [octets], kind)
        place = builder.bitcast(builder.gep(data, [arguments[1]]), octets)
        builder.call(prefetch, [place, number(1), number(3), number(1)])
        return context.get_dummy_value()

    return nt.void(array, nt.intp), generate


@intrinsic
def _at(_context: Any, array: Any, address: Any, index: Any) -> Any:
    """Element `index` of the array at an address, of the type of `array`: for any number of contributions."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(signature.args[0].dtype)
        return builder.load(builder.gep(builder.inttoptr(arguments[1], kind.as_pointer()), [arguments[2]]))

    return array.dtype(array, nt.uint64, nt.intp), generate


def _update_rows(out, first, second, third, width, slots, ids, ids_at, values_at, counts, scales, scaling):
    """The rule for the rows at `slots`, with gradient and `scaling` as of `_update`: see `UpdateRows`."""
    factor, limit, numbers = scaling[0], scaling[1], scaling[2:]
    grad, nexts, step = np.empty(width, out.dtype), np.zeros(counts.size, np.int64), LINE_BYTES // out.itemsize
    for row in range(slots.size):
        if row + AHEAD < slots.size:
            ahead = slots[row + AHEAD] * width
            for j in range(ahead, ahead + width, step):
                _fetch(out, j)
                _fetch(first, j)
                _fetch(second, j)
                _fetch(third, j)
        for source in range(counts.size):
            at, scale = nexts[source], scales[source]
            is_there = at < counts[source] and _at(ids, ids_at[source], at) == ids[row]
            nexts[source] += is_there
            values, start = values_at[source], at * width
            nothing = out.dtype.type(0) * scale  # minus zero where the scale is negative
            if source == 0:
                for j in range(width):
                    grad[j] = _at(out, values, start + j) * scale if is_there else nothing
            else:
                for j in range(width):
                    grad[j] += _at(out, values, start + j) * scale if is_there else nothing
        base = slots[row] * width
        for j in range(width):
            scaled = _limited(_read(grad, j) * factor, limit)
            _step(base + j, scaled, out, out, first, second, third, numbers)


# Coding: one or two bits an element, and halves. Floats are looked at as the bits they have, so that halves need no
# instructions that some processors lack.

BLOCK_ELEMENTS = 4096
"""How many codes wait in the cache until they are packed: a loop that does both is not vectorised."""

_F32, _U8, _U16, _U32, _U64 = np.float32, np.uint8, np.uint16, np.uint32, np.uint64


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
    """See `kernels.quantization`. A single pass: reads 8 bytes of an element, writes 4 and a quarter."""
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
    """A single pass: reads a quarter byte an element, writes 4."""
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
    """A single pass: reads 8 bytes of an element, writes 4 and an eighth."""
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
    """A single pass: reads an eighth of a byte an element, writes 4."""
    whole = out.size // 8
    for i in range(whole):
        byte = data[i]
        for j in range(8):
            out[8 * i + j] = _F32(1) if (byte >> (7 - j)) & 1 else _F32(-1)
    for i in range(8 * whole, out.size):
        out[i] = _F32(1) if (data[whole] >> (7 - (i - 8 * whole))) & 1 else _F32(-1)


_COMPILER = parts.Compiler(_part, np.float32)
_OF_BITS = {"_bits": _bits, "_float": _float}
_to_float16, _from_float16, _to_bfloat16, _from_bfloat16 = (
    _COMPILER.copied(cast, _OF_BITS)
    for cast in (parts.to_float16, parts.from_float16, parts.to_bfloat16, parts.from_bfloat16)
)

_to_half, _from_half, _infinite = _to_float16, _from_float16, _U16(0x7C00)
"""Of the kernel that is being built: every kernel has copies of the functions below, with its type's casts."""


def _narrow(values, out):
    """Cast in a single pass."""
    for i in range(out.size):
        out[i] = _to_half(values[i])


def _widen(bits, out):
    """Cast in a single pass."""
    for i in range(out.size):
        out[i] = _from_half(bits[i])


def _round(grad, residual, out):
    """See `kernels.quantization.round_to_half`. A single pass: reads 8 bytes of an element, writes 6."""
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


def build(name: str | UpdateKernel) -> Callable[..., None]:
    """Compile the kernel of an update, or ``sum_{type}``, or of a codec, or load it from numba's cache.

    Where the cache cannot be read or written, it is compiled all the same.

    Raises:
        KeyError: the name or the type is unknown.
    """
    if isinstance(name, UpdateKernel):
        template, signature, own = _update_template(name)
        label = f"{name}_{parts.digest(name.expression)}"
    else:
        template, signature, own = _coding_template(name) or _sum_template(name)
        label = name
    function = parts.with_globals(template, own)
    # Its name decides the file in the cache. numba counts the entries of one file, so two processes that write
    # at once, perhaps on machines that share a home, could exchange entries: here a file has one entry.
    function.__qualname__ = f"{label}_{_PARTS}_{_processor()}"
    try:
        return _compiled(function, signature, cache=True)
    except Exception as error:  # noqa: BLE001  # no place to write, a full disk, a damaged file: all are one to us
        LOG.debug("kernel %s is compiled without numba's cache: %s", name, error)
        return _compiled(function, signature, cache=False)


def _sum_template(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """The function of a sum, its signature, and its globals."""
    what, _, label = name.rpartition("_")
    if what != "sum":
        raise KeyError(name)
    return _sum, nt.void(FLOATS[label][::1], *_sources(FLOATS[label])), {}


def _sources(number: Any) -> list[Any]:
    """Types of the gradients, their count, their scales, and a factor."""
    return [nt.Array(number, 1, "C", readonly=True)] * SOURCES_MAX + [nt.int64] + [number] * (SOURCES_MAX + 1)


def _update_template(kernel: UpdateKernel) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """The function of an update, its signature, and its globals."""
    number, compiler = FLOATS[kernel.label], parts.Compiler(_part, np.dtype(kernel.label).type)
    expression = kernel.expression
    step = compiler.copied(_STEPS[kernel.states], {"_expression": compiler.compiled(expression)})
    own, written = {"_step": step}, number[::1]
    # Factor and limit stand for gradient and weight.
    scaling = UniTuple(number, expression.__code__.co_argcount - kernel.states)
    if kernel.by_rows:
        whole, at = nt.Array(nt.int64, 1, "C", readonly=True), nt.uint64[::1]
        rows = [nt.intp, whole, whole, at, at, nt.int64[::1], number[::1]]
        return _update_rows, nt.void(*[written] * (1 + STATES_MAX), *rows, scaling), own
    weight = nt.Array(number, 1, "C", readonly=True)
    states = [written] * STATES_MAX
    return _update, nt.void(written, weight, *states, *_sources(number)[:-1], scaling), own


def _coding_template(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any]] | None:
    """For a name such as ``quantise2_float32`` or ``narrow_float16`` a function, its signature, and its globals."""
    what, _, label = name.rpartition("_")
    read, write = nt.Array(nt.float32, 1, "C", readonly=True), nt.float32[::1]
    coder = _CODERS.get(what)
    if coder is not None:
        octets = nt.Array(nt.uint8, 1, "C", readonly=True)
        packs = what.startswith("quantise")
        signature = nt.void(read, write, nt.float32, nt.uint8[::1]) if packs else nt.void(octets, nt.float32, write)
        return coder, signature, {}
    if what in _CASTS:
        halves = nt.Array(nt.uint16, 1, "C", readonly=True)
        signature = {
            "narrow": nt.void(read, nt.uint16[::1]),
            "widen": nt.void(halves, write),
            "round": nt.void(read, write, nt.uint16[::1]),
        }[what]
        return _CASTS[what], signature, _HALVES[label]
    return None


def _compiled(function: types.FunctionType, signature: Any, cache: bool) -> Callable[..., None]:
    dispatcher: Any = numba.njit(nogil=True, error_model="numpy", cache=cache)(function)
    dispatcher.compile(signature.args)
    dispatcher.disable_compile()
    compiled: Callable[..., None] = dispatcher
    return compiled


def _processor() -> str:
    """The processor and what it can do, short enough for a file's name."""
    features = llvmlite.binding.get_host_cpu_features().flatten()
    return f"{llvmlite.binding.get_host_cpu_name()}_{zlib.crc32(features.encode()):08x}"
