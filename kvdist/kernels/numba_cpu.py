"""Kernels that numba compiles for this processor: a sum, and a sum with a whole optimizer, in one pass over memory.

Rules that hold here: every operation is the reference's, in the reference's order and type, without fast-math, so that
the results are equal bit by bit (a NaN stays a NaN, its payload may differ). Every function has one explicit signature
and never compiles for another: arrays of another type, unaligned or strided ones are refused with a TypeError. Sources
and weights are declared read-only, which admits writable ones too. The GIL is released while a kernel runs.

Only `kvdist.kernels.cpu` imports this module, because importing numba takes long.
"""

from __future__ import annotations

import logging
import math
import types
import zlib
from collections.abc import Callable
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba.core import types as nt
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kvdist.kernels.interface import NUMBERS_MAX, SOURCES_MAX

LOG = logging.getLogger("kvdist")

VERSION = f"numba {numba.__version__}"

FLOATS = {"float32": numba.float32, "float64": numba.float64}

# LLVM makes vector instructions of a loop only if it knows that no iteration writes what another one reads. Six arrays
# are too many for it to compare at run time, and a weight that is updated in place would always fail the comparison.
# So each access says itself to which array it belongs. What it promises holds: iteration i touches element i alone,
# and reads it before it writes it.

_WRITTEN = ("out", "first", "second")


def _scopes(builder: Any, names: tuple[str, ...]) -> Any:
    module = builder.module
    domain = module.add_metadata(["kvdist"])
    return module.add_metadata([module.add_metadata([name, domain]) for name in names])


@intrinsic
def _read(_context: Any, array: Any, index: Any) -> Any:
    """array[index], which no iteration but this one writes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        load = builder.load(builder.gep(data, [arguments[1]]))
        load.set_metadata("noalias", _scopes(builder, _WRITTEN))
        return load

    return array.dtype(array, nt.intp), generate


def _writer(name: str) -> Any:
    """An intrinsic for array[index] = value on the array that is called `name` here and overlaps no other written."""
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


_write_out, _write_first, _write_second = map(_writer, _WRITTEN)

_part = numba.njit(nogil=True, error_model="numpy")
"""For functions that become part of a kernel."""


@_part
def _limited(value, limit):
    """Cut to ±limit; NaN stays NaN."""
    value = -limit if value < -limit else value
    return limit if value > limit else value


@_part
def _decayed(grad, w, wd):
    return grad + w * wd if wd != 0 else grad


# One element of each rule. `grad` is summed, rescaled and clipped; the numbers are those of `Optimizer.equation`.


@_part
def _sgd(i, grad, out, weight, first, second, lr, wd, n3, n4, n5, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    _write_out(out, i, w - grad * lr)


@_part
def _sgd_momentum(i, grad, out, weight, first, second, lr, wd, mu, n4, n5, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    momentum = _read(first, i) * mu - grad * lr
    _write_first(first, i, momentum)
    _write_out(out, i, w + momentum)


@_part
def _nag(i, grad, out, weight, first, second, lr, wd, mu, n4, n5, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    step = grad * lr
    momentum = _read(first, i) * mu - step
    _write_first(first, i, momentum)
    _write_out(out, i, w + (momentum * mu - step))


@_part
def _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon):
    mean = _read(first, i) * beta1 + grad * rest1
    variance = _read(second, i) * beta2 + grad * grad * rest2
    _write_first(first, i, mean)
    _write_second(second, i, variance)
    return mean / (math.sqrt(variance) + epsilon)


@_part
def _adam(i, grad, out, weight, first, second, rate, wd, beta1, rest1, beta2, rest2, epsilon):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    ratio = _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon)
    _write_out(out, i, w - ratio * rate)


@_part
def _adamw(i, grad, out, weight, first, second, rate, wd, beta1, rest1, beta2, rest2, epsilon):
    w = _read(weight, i)
    ratio = _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon)
    _write_out(out, i, w - _decayed(ratio, w, wd) * rate)


@_part
def _adagrad(i, grad, out, weight, first, second, lr, wd, epsilon, n4, n5, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    history = _read(first, i) + grad * grad
    _write_first(first, i, history)
    _write_out(out, i, w - grad / (math.sqrt(history) + epsilon) * lr)


@_part
def _torch_sgd(i, grad, out, weight, first, second, lr, wd, mu, rest, nesterov, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    momentum = _read(first, i) * mu + grad * rest
    _write_first(first, i, momentum)
    _write_out(out, i, w - (grad + momentum * mu if nesterov != 0 else momentum) * lr)


@_part
def _torch_adamw(i, grad, out, weight, first, second, rate, kept, beta1, rest1, beta2, rest2, epsilon):
    ratio = _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon)
    _write_out(out, i, _read(weight, i) * kept - ratio * rate)


@_part
def _pulled(mean, value, pull):
    """The mean, moved to the value from the nearer end: see `kvdist.optimizer.torch_rules`."""
    return (mean if pull > 0 else value) + (value - mean) * pull


@_part
def _torch_adamax(i, grad, out, weight, first, second, rate, wd, pull, beta2, epsilon, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    mean = _pulled(_read(first, i), grad, pull)
    largest, size = _read(second, i) * beta2, abs(grad) + epsilon
    largest = size if largest <= size or size != size else largest
    _write_first(first, i, mean)
    _write_second(second, i, largest)
    _write_out(out, i, w - mean / largest * rate)


@_part
def _torch_radam(i, grad, out, weight, first, second, rate, wd, pull, beta2, rest2, epsilon, rectifies):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    mean = _pulled(_read(first, i), grad, pull)
    variance = _read(second, i) * beta2 + grad * rest2 * grad
    _write_first(first, i, mean)
    _write_second(second, i, variance)
    _write_out(out, i, w - (mean / (math.sqrt(variance) + epsilon) if rectifies != 0 else mean) * rate)


@_part
def _torch_rmsprop(i, grad, out, weight, first, second, lr, wd, alpha, rest, epsilon, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    squares = _read(first, i) * alpha + grad * rest * grad
    _write_first(first, i, squares)
    _write_out(out, i, w - grad * lr / (math.sqrt(squares) + epsilon))


@_part
def _torch_rmsprop_momentum(i, grad, out, weight, first, second, lr, wd, alpha, rest, epsilon, mu, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    squares = _read(first, i) * alpha + grad * rest * grad
    momentum = _read(second, i) * mu + grad / (math.sqrt(squares) + epsilon)
    _write_first(first, i, squares)
    _write_second(second, i, momentum)
    _write_out(out, i, w - momentum * lr)


@_part
def _torch_adadelta(i, grad, out, weight, first, second, lr, wd, rho, rest, epsilon, n6, n7):
    w = _read(weight, i)
    grad = _decayed(grad, w, wd)
    squares, steps = _read(first, i) * rho + grad * rest * grad, _read(second, i)
    step = grad / math.sqrt(squares + epsilon) * math.sqrt(steps + epsilon)
    _write_first(first, i, squares)
    _write_second(second, i, steps * rho + step * rest * step)
    _write_out(out, i, w - step * lr)


_RULES = {
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "nag": _nag,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
    "torch_sgd": _torch_sgd,
    "torch_adamw": _torch_adamw,
    "torch_adamax": _torch_adamax,
    "torch_radam": _torch_radam,
    "torch_rmsprop": _torch_rmsprop,
    "torch_rmsprop_momentum": _torch_rmsprop_momentum,
    "torch_adadelta": _torch_adadelta,
}

_rule = _sgd
"""The rule of the kernel that is being built: every kernel has its own copy of `_update` with another one here."""


def _update(out, weight, first, second, a, b, c, d, count, p, q, r, s, factor, limit, n1, n2, n3, n4, n5, n6, n7):
    """The rule for the gradient `factor`·(p·a + q·b + r·c + s·d), with the first `count` terms, cut to ±limit."""
    if count == 1:
        for i in range(out.size):
            grad = _read(a, i) * p
            _rule(i, _limited(grad * factor, limit), out, weight, first, second, n1, n2, n3, n4, n5, n6, n7)
    elif count == 2:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q
            _rule(i, _limited(grad * factor, limit), out, weight, first, second, n1, n2, n3, n4, n5, n6, n7)
    elif count == 3:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q + _read(c, i) * r
            _rule(i, _limited(grad * factor, limit), out, weight, first, second, n1, n2, n3, n4, n5, n6, n7)
    else:
        for i in range(out.size):
            grad = _read(a, i) * p + _read(b, i) * q + _read(c, i) * r + _read(d, i) * s
            _rule(i, _limited(grad * factor, limit), out, weight, first, second, n1, n2, n3, n4, n5, n6, n7)


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
    """Element `index` of what lies at an address and has the type of `array`. As many contributions as there are."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        kind = context.get_data_type(signature.args[0].dtype)
        return builder.load(builder.gep(builder.inttoptr(arguments[1], kind.as_pointer()), [arguments[2]]))

    return array.dtype(array, nt.uint64, nt.intp), generate


def _update_rows(
    out, first, second, width, slots, ids, ids_at, values_at, counts, scales, factor, limit, n1, n2, n3, n4, n5, n6, n7
):
    """The rule for the rows at `slots`, with the gradient of `_update`: see `UpdateRows`."""
    grad, nexts, step = np.empty(width, out.dtype), np.zeros(counts.size, np.int64), LINE_BYTES // out.itemsize
    for row in range(slots.size):
        if row + AHEAD < slots.size:
            ahead = slots[row + AHEAD] * width
            for j in range(ahead, ahead + width, step):
                _fetch(out, j)
                _fetch(first, j)
                _fetch(second, j)
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
            _rule(base + j, scaled, out, out, first, second, n1, n2, n3, n4, n5, n6, n7)


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
    """See `kernels.quantization`. One pass: reads 8 bytes of an element, writes 4 and a quarter."""
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
    """See `kernels.quantization.round_to_half`. One pass: reads 8 bytes of an element, writes 6."""
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


def build(name: str) -> Callable[..., None]:
    """Compile the kernel ``{rule}_{type}``, ``{rule}_rows_{type}`` or ``sum_{type}``, or one that codes, or load it
    from numba's cache.

    Where the cache cannot be read or written, it is compiled all the same.

    Raises:
        KeyError: there is no such rule or type.
    """
    template, signature, own = _coding_template(name) or _template(name)
    function = types.FunctionType(template.__code__, own, template.__name__)
    # Its name decides the file in the cache. numba counts the entries of one file, so two processes that write
    # at once, perhaps on machines that share a home, could exchange entries: here a file has one entry.
    function.__qualname__ = f"{name}_{_processor()}"
    try:
        return _compiled(function, signature, cache=True)
    except Exception as error:  # noqa: BLE001  # no place to write, a full disk, a damaged file: all are one to us
        LOG.debug("kernel %s is compiled without numba's cache: %s", name, error)
        return _compiled(function, signature, cache=False)


def _template(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any]]:
    """A function, its signature, and its own globals."""
    rule, _, label = name.rpartition("_")
    rule, is_rows = rule.removesuffix("_rows"), rule.endswith("_rows")
    number = FLOATS[label]
    read = nt.Array(number, 1, "C", readonly=True)
    written = number[::1]
    sources = [read] * SOURCES_MAX + [nt.int64] + [number] * (SOURCES_MAX + 1)
    own = {**globals(), "_rule": _RULES.get(rule)}
    if is_rows:
        numbers = [number] * (2 + NUMBERS_MAX)
        whole, at = nt.Array(nt.int64, 1, "C", readonly=True), nt.uint64[::1]
        rows = [nt.intp, whole, whole, at, at, nt.int64[::1], number[::1]]
        return _update_rows, nt.void(written, written, written, *rows, *numbers), own
    if rule == "sum":
        return _sum, nt.void(written, *sources), own
    return _update, nt.void(written, read, written, written, *sources, *[number] * (1 + NUMBERS_MAX)), own


def _coding_template(name: str) -> tuple[Callable[..., Any], Any, dict[str, Any]] | None:
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
