"""Functions for a single element, which `numba_cpu` and `numba_cuda` compile as parts of their kernels.

These are expressions of rules with the functions that they call, and casts of halves. A part is a copy of a function
whose globals hold the compiled functions that it calls. The functions of `kvdist.kernels.elementwise` that are NumPy's
there have versions for a single element here.
"""

from __future__ import annotations

import hashlib
import math
import types
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from kvdist.kernels import elementwise

Function = Callable[..., Any]

_real: Any = np.float32
"""The type of elements of the kernel that is being built: every kernel has copies of the functions below."""


def _sqrt(value):
    return math.sqrt(value)


def _sign(value):
    if value != value:
        return value
    return _real(1) if value > 0 else _real(-1) if value < 0 else _real(0)


def _maximum(one, other):
    return other if one <= other or other != other else one


def _above_zero(value):
    return _real(0) if value < 0 else value


def _negated(value):
    return _real(0) - value


def limited(value, limit):
    """Cut to ±limit; NaN stays NaN."""
    value = -limit if value < -limit else value
    return limit if value > limit else value


_FOR_ONE_ELEMENT: dict[Any, Function] = {
    elementwise.sqrt: _sqrt,
    elementwise.sign: _sign,
    elementwise.maximum: _maximum,
    elementwise.above_zero: _above_zero,
    elementwise.negated: _negated,
    elementwise.limited: limited,
}


# Casts of halves, which are their bits. Floats are looked at as bits, so no instruction is needed that some processors
# lack.

_U16, _U32 = np.uint16, np.uint32
_bits: Any = None
"""The 32 bits of a float32: a function of the compiler."""
_float: Any = None
"""The float32 with 32 bits: a function of the compiler."""


def to_float16(value):
    """The bits of the nearest float16, ties to even; numbers that are too large become infinite."""
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


def from_float16(half):
    """The float32 of these bits of a float16."""
    wide = _U32(half)
    sign = (wide & _U32(0x8000)) << _U32(16)
    shifted = (wide & _U32(0x7FFF)) << _U32(13)
    # Multiplied by 2^112 the exponent is right, of small numbers too; infinity and NaN get theirs back.
    size = _bits(_float(shifted) * _float(_U32(239 << 23)))
    size = size | _U32(0x7F800000) if shifted >= _U32(0x7C00 << 13) else size
    return _float(size | sign)


def to_bfloat16(value):
    """The bits of the nearest bfloat16, ties to even; numbers that are too large become infinite."""
    bits = _bits(value)
    rounded = (bits + _U32(0x7FFF) + ((bits >> _U32(16)) & _U32(1))) >> _U32(16)
    return _U16((bits >> _U32(16)) | _U32(0x40) if value != value else rounded)


def from_bfloat16(half):
    """The float32 of these bits of a bfloat16."""
    return _float(_U32(half) << _U32(16))


# Compiling.


class Compiler(NamedTuple):
    """How functions become parts of kernels.

    Attributes:
        part: compiles a function that kernels call.
        real: the type of elements, such as `numpy.float32`.
        replacements: function of `kvdist.kernels.elementwise` → the compiler's own version for one element.
        rewritten: changes an expression, or a function that it calls, before it is compiled.
    """

    part: Function
    real: Any
    replacements: Mapping[Any, Function] = {}
    rewritten: Callable[[Function], Function] = lambda function: function

    def compiled(self, function: Function) -> Function:
        """An expression, or a function that it calls, as a part of a kernel.

        Raises:
            TypeError: the function is a closure, whose variables a copy would not have; or it has a number other than
                0, which the compiler would take for float64 or int64.
        """
        own = self.replacements.get(function) or _FOR_ONE_ELEMENT.get(function)
        if own is not None:
            return self.copied(own, {"_real": self.real})
        if function.__closure__:
            raise TypeError(
                f"the expression {function.__qualname__} is a closure, which cannot be compiled: move it out"
            )
        number = next((one for one in _constants(function) if type(one) in (int, float) and one), None)
        if number is not None:
            raise TypeError(
                f"the expression {function.__qualname__} has the number {number}, as a literal or a constant of a"
                " module, with which a compiled kernel would have other bits than NumPy: pass it with the numbers of"
                " the Equation"
            )
        parts = {name: self.compiled(one) for name, one in called(function).items()}
        return self.copied(self.rewritten(function), parts)

    def copied(self, function: Function, own: Mapping[str, Any]) -> Function:
        """A part of a kernel: a copy of a function with other globals."""
        part: Function = self.part(with_globals(function, own))
        return part


def with_globals(function: Function, own: Mapping[str, Any]) -> Any:
    """A copy of a function in which some globals have other values."""
    return types.FunctionType(function.__code__, {**function.__globals__, **own}, function.__name__)


def called(function: Function) -> dict[str, Function]:
    """The functions of Python that a function may call, by their names in its module."""
    named = {name: function.__globals__.get(name) for name in function.__code__.co_names}
    return {name: value for name, value in named.items() if isinstance(value, types.FunctionType)}


def _constants(function: Function) -> list[Any]:
    """The constants of a function: literals, and values of names in its module and in modules that it names."""
    code, names = function.__code__, function.__globals__
    found = [names[name] for name in code.co_names if name in names]
    modules = [one for one in found if isinstance(one, types.ModuleType)]
    return [*code.co_consts, *found, *[getattr(one, name, None) for one in modules for name in code.co_names]]


def digest(function: Function) -> str:
    """Digest of an expression and of the functions that it calls, for caches that know the kernel's file only."""
    found, waiting, seen = hashlib.blake2b(digest_size=8), [function], set()
    while waiting:
        one = waiting.pop()
        if one in seen:
            continue
        seen.add(one)
        calls, code = called(one), one.__code__
        constants = [value for value in code.co_consts if value != one.__doc__]
        values = [one.__globals__.get(name) for name in code.co_names if name not in calls]
        found.update(repr((code.co_code, constants, code.co_names, code.co_varnames, values)).encode())
        waiting += calls.values()
    return found.hexdigest()
