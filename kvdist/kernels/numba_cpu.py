"""Kernels that numba compiles for this processor: a sum, and a sum with a whole optimizer, in one pass over memory.

Rules that hold here: every operation is the reference's, in the reference's order and type, without fast-math, so that
the results are equal bit by bit (a NaN stays a NaN, its payload may differ). Every function has one explicit signature
and never compiles for another: arrays of another type, unaligned or strided ones are refused with a TypeError. Sources
and weights are declared read-only, which admits writable ones too. The GIL is released while a kernel runs.

Only `kvdist.kernels.loading` imports this module, because importing numba takes long.
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
from numba.core import types as nt
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from kvdist.kernels import numba_coding
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


# One element of each rule. `grad` is summed, rescaled and clipped; the numbers are those of `Optimizer.equation`.


@_part
def _sgd(i, grad, out, weight, first, second, lr, wd, n3, n4, n5, n6, n7):
    w = _read(weight, i)
    if wd != 0:
        grad = grad + w * wd
    _write_out(out, i, w - grad * lr)


@_part
def _sgd_momentum(i, grad, out, weight, first, second, lr, wd, mu, n4, n5, n6, n7):
    w = _read(weight, i)
    if wd != 0:
        grad = grad + w * wd
    momentum = _read(first, i) * mu - grad * lr
    _write_first(first, i, momentum)
    _write_out(out, i, w + momentum)


@_part
def _nag(i, grad, out, weight, first, second, lr, wd, mu, n4, n5, n6, n7):
    w = _read(weight, i)
    if wd != 0:
        grad = grad + w * wd
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
    if wd != 0:
        grad = grad + w * wd
    ratio = _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon)
    _write_out(out, i, w - ratio * rate)


@_part
def _adamw(i, grad, out, weight, first, second, rate, wd, beta1, rest1, beta2, rest2, epsilon):
    w = _read(weight, i)
    ratio = _ratio(i, grad, first, second, beta1, rest1, beta2, rest2, epsilon)
    if wd != 0:
        ratio = ratio + w * wd
    _write_out(out, i, w - ratio * rate)


@_part
def _adagrad(i, grad, out, weight, first, second, lr, wd, epsilon, n4, n5, n6, n7):
    w = _read(weight, i)
    if wd != 0:
        grad = grad + w * wd
    history = _read(first, i) + grad * grad
    _write_first(first, i, history)
    _write_out(out, i, w - grad / (math.sqrt(history) + epsilon) * lr)


_RULES = {
    "sgd": _sgd,
    "sgd_momentum": _sgd_momentum,
    "nag": _nag,
    "adam": _adam,
    "adamw": _adamw,
    "adagrad": _adagrad,
}

_rule = _sgd
"""The rule of the kernel that is being built: every kernel has its own copy of `_update` with another one here."""


def _update(out, weight, first, second, a, b, c, d, count, p, q, r, s, factor, limit, n1, n2, n3, n4, n5, n6, n7):
    """The rule for the gradient `factor`·(p·a + q·b + r·c + s·d), of which `count` terms count, cut to ±limit."""
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
    """out ← factor·(p·a + q·b + r·c + s·d), of which `count` terms count; for 1: factor·(out + p·a)."""
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


def build(name: str) -> Callable[..., None]:
    """Compile the kernel ``{rule}_{type}`` or ``sum_{type}``, or one of `numba_coding`, or load it from numba's cache.

    Where the cache cannot be read or written, it is compiled all the same.

    Raises:
        KeyError: there is no such rule or type.
    """
    template, signature, own = numba_coding.template(name) or _template(name)
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
    number = FLOATS[label]
    read = nt.Array(number, 1, "C", readonly=True)
    written = number[::1]
    sources = [read] * SOURCES_MAX + [nt.int64] + [number] * (SOURCES_MAX + 1)
    own = {**globals(), "_rule": _RULES.get(rule)}
    if rule == "sum":
        return _sum, nt.void(written, *sources), own
    return _update, nt.void(written, read, written, written, *sources, *[number] * (1 + NUMBERS_MAX)), own


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
