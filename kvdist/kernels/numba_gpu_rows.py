"""Kernels for GPUs that move and look at elements: rows of a table, many small arrays at once, sums of squares.

Many arrays in one launch come as a table of stretches, each a few kilobytes of one of them: a block takes a stretch, so
that no block waits for a long array. A table is int64, its entries addresses and lengths.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda
from numba.core import types as nt

from kvdist.kernels.numba_gpu_parts import (
    HALVES,
    REALS,
    STORED,
    U16,
    U32,
    U64,
    arithmetic,
    itself,
    load8,
    load16,
    load32,
    load64,
    specialised,
    store8,
    store16,
    store32,
    store64,
)

COPY_COLUMNS = 4
FINITE_COLUMNS = 2
"""Entries of a stretch: see `_copy` and `_finite`."""

F64 = np.float64
_widened = _narrowed = itself
_load = load32
_exponent = U32(0)
"""Every kernel has its own copy of what follows, with others here."""


def _copy(table):
    """Each stretch: from, to, how many pieces, how many bytes a piece has."""
    for row in range(cuda.blockIdx.x, table.size // 4, cuda.gridDim.x):
        source, target = U64(table[4 * row]), U64(table[4 * row + 1])
        count, width = table[4 * row + 2], table[4 * row + 3]
        if width == 8:
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                store64(target, i, load64(source, i))
        elif width == 4:
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                store32(target, i, load32(source, i))
        elif width == 2:
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                store16(target, i, load16(source, i))
        else:
            for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
                store8(target, i, load8(source, i))


def _finite(table, found):
    """Each stretch: where, how many elements. An exponent of ones is an infinity or NaN; found[0] is 1 then."""
    for row in range(cuda.blockIdx.x, table.size // 2, cuda.gridDim.x):
        source, count = U64(table[2 * row]), table[2 * row + 1]
        for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
            if (_load(source, i) & _exponent) == _exponent:
                found[0] = 1


def _gather(table, indices, width, out):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        row = i // width
        out[i] = table[indices[row] * width + (i - row * width)]


def _add_rows(table, indices, width, rows):
    for i in range(cuda.grid(1), rows.size, cuda.gridsize(1)):
        row = i // width
        place = indices[row] * width + (i - row * width)
        table[place] = _narrowed(_widened(table[place]) + _widened(rows[i]))


def _merge(rows, order, starts, width, out):
    """out[u] ← Σ rows[order[k]] for starts[u] <= k < starts[u + 1], in that order."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        unique = i // width
        column = i - unique * width
        total = _widened(rows[order[starts[unique]] * width + column])
        for k in range(starts[unique] + 1, starts[unique + 1]):
            total = total + _widened(rows[order[k] * width + column])
        out[i] = _narrowed(total)


def _squares(values, partial):
    """partial[t] ← Σ of the squares of every partial.size-th element from t on: the same order whatever the grid."""
    for t in range(cuda.grid(1), partial.size, cuda.gridsize(1)):
        total = F64(0)
        for i in range(t, values.size, partial.size):
            value = F64(_widened(values[i]))
            total = total + value * value
        partial[t] = total


def _fold(values, partial):
    """partial[t] ← Σ of every partial.size-th value from t on."""
    for t in range(cuda.grid(1), partial.size, cuda.gridsize(1)):
        total = F64(0)
        for i in range(t, values.size, partial.size):
            total = total + values[i]
        partial[t] = total


def _fill(out, value):
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = value


_I64: Any = nt.int64
_TABLE = _I64[::1]
_DOUBLES: Any = nt.float64[::1]
_UNSIGNED: dict[str, Any] = {"uint8": nt.uint8, "uint16": nt.uint16, "uint32": nt.uint32, "uint64": nt.uint64}
_EXPONENTS: dict[str, tuple[Any, Any]] = {
    "float16": (load16, U16(0x7C00)),
    "bfloat16": (load16, U16(0x7F80)),
    "float32": (load32, U32(0x7F800000)),
    "float64": (load64, U64(0x7FF0000000000000)),
}


def _signed(what: str, label: str) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A kernel's text, and the types of its arguments."""
    if what == "copy":
        return _copy, (_TABLE,)
    if what == "fold":
        return _fold, (_DOUBLES, _DOUBLES)
    if what == "finite" and label in _EXPONENTS:
        return _finite, (_TABLE, nt.uint8[::1])
    if label in _UNSIGNED and what in ("gather", "fill"):
        bits = _UNSIGNED[label][::1]
        return (_gather, (bits, _TABLE, _I64, bits)) if what == "gather" else (_fill, (bits, _UNSIGNED[label]))
    if label not in STORED:
        return None
    own = STORED[label][::1]
    by_name: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "addrows": (_add_rows, (own, _TABLE, _I64, own)),
        "merge": (_merge, (own, _TABLE, _TABLE, _I64, own)),
        "squares": (_squares, (own, _DOUBLES)),
    }
    return by_name.get(what)


def template(what: str, label: str, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A kernel and the types of its arguments; None where there is none of that name here."""
    signed = _signed(what, label)
    if signed is None:
        return None
    function, signature = signed
    chosen = arithmetic(label) if label in STORED else {}
    if what == "finite":
        chosen["_load"], chosen["_exponent"] = _EXPONENTS[label]
    own = specialised(globals(), (), chosen)
    return types.FunctionType(function.__code__, own, function.__name__), signature


def names() -> list[tuple[str, str, int]]:
    """Every kernel, for a test that compiles them all."""
    by_width = [(what, label, 0) for what in ("gather", "fill") for label in _UNSIGNED]
    floats = [(what, label, 0) for what in ("addrows", "squares", "finite") for label in (*REALS, *HALVES)]
    single = [("copy", "uint8", 0), ("fold", "float64", 0)]
    return [*single, *by_width, *floats, *[("merge", label, 0) for label in STORED]]
