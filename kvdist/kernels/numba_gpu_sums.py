"""Kernels for GPUs that sum, and that sum and apply an optimizer's rule, reading and writing memory once.

Every operation is the reference's, in the reference's order and type; see `kvdist.kernels.numba_gpu_parts`. A kernel is
compiled for one number of sources, which come as a tuple of arrays: the compiler lays the loop over them out flat.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

from numba import cuda
from numba.core.types.containers import UniTuple

from kvdist.kernels.interface import NUMBERS_MAX
from kvdist.kernels.numba_gpu_parts import HALVES, REALS, STORED, SUMMED, arithmetic, itself, specialised, unscaled

SOURCES_MAX = 8
"""How many arrays one launch sums. More would be compiled for each number of them."""

_times = _divided = unscaled
_root = _read = _widened = _narrowed = itself
"""Every kernel has its own copy of what follows, with others here. `_read` is for sources, `_widened` for weights."""


def _total(sources, scales, i):
    """Of element i: the sum, each term multiplied before it is added."""
    total = _times(_read(sources[0][i]), scales[0])
    for j in range(1, len(sources)):
        total = total + _times(_read(sources[j][i]), scales[j])
    return total


def _sum(out, sources, scales, factor):
    """out ← factor · Σ scales[j]·sources[j]."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        out[i] = _narrowed(_times(_total(sources, scales, i), factor))


def _sum_on(out, total, sources, scales, factor):
    """out ← factor · (total + scales[0]·sources[0] + …), added one after the other."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        value = total[i]
        for j in range(len(sources)):
            value = value + _times(_read(sources[j][i]), scales[j])
        out[i] = _narrowed(_times(value, factor))


def _limited(value, limit):
    """Cut to ±limit; NaN stays NaN."""
    value = -limit if value < -limit else value
    return limit if value > limit else value


# One element of each rule: moves the states and returns the new weight. `n` holds the numbers of `Optimizer.equation`.


def _sgd(i, w, grad, first, second, n):
    if n[1] != 0:
        grad = grad + _times(w, n[1])
    return w - _times(grad, n[0])


def _sgd_momentum(i, w, grad, first, second, n):
    if n[1] != 0:
        grad = grad + _times(w, n[1])
    momentum = _times(first[i], n[2]) - _times(grad, n[0])
    first[i] = momentum
    return w + momentum


def _nag(i, w, grad, first, second, n):
    if n[1] != 0:
        grad = grad + _times(w, n[1])
    step = _times(grad, n[0])
    momentum = _times(first[i], n[2]) - step
    first[i] = momentum
    return w + (_times(momentum, n[2]) - step)


def _ratio(i, grad, first, second, n):
    mean = _times(first[i], n[2]) + _times(grad, n[3])
    variance = _times(second[i], n[4]) + _times(_times(grad, grad), n[5])
    first[i] = mean
    second[i] = variance
    return _divided(mean, _root(variance) + n[6])


def _adam(i, w, grad, first, second, n):
    if n[1] != 0:
        grad = grad + _times(w, n[1])
    return w - _times(_ratio(i, grad, first, second, n), n[0])


def _adamw(i, w, grad, first, second, n):
    ratio = _ratio(i, grad, first, second, n)
    if n[1] != 0:
        ratio = ratio + _times(w, n[1])
    return w - _times(ratio, n[0])


def _adagrad(i, w, grad, first, second, n):
    if n[1] != 0:
        grad = grad + _times(w, n[1])
    history = first[i] + _times(grad, grad)
    first[i] = history
    return w - _times(_divided(grad, _root(history) + n[2]), n[0])


RULES: dict[str, Callable[..., Any]] = {
    "sgd": _sgd, "sgd_momentum": _sgd_momentum, "nag": _nag, "adam": _adam, "adamw": _adamw, "adagrad": _adagrad,
}  # fmt: skip
"""The rules that `Equation.name` may name."""

_rule = _sgd


def _update(out, weight, first, second, sources, scales, factor, limit, n):
    """The rule for the gradient factor·Σ, cut to ±limit."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        grad = _limited(_times(_total(sources, scales, i), factor), limit)
        out[i] = _narrowed(_rule(i, _widened(weight[i]), grad, first, second, n))


def _update_master(out, weight, master, first, second, sources, scales, factor, limit, n):
    """The same with a float32 weight behind a half one, which follows where somebody else has changed that."""
    for i in range(cuda.grid(1), out.size, cuda.gridsize(1)):
        grad = _limited(_times(_total(sources, scales, i), factor), limit)
        own = master[i]
        if _narrowed(own) != weight[i]:
            own = _widened(weight[i])
        own = _rule(i, own, grad, first, second, n)
        master[i] = own
        out[i] = _narrowed(own)


_SUMS = ("sum", "widesum", "sumon", "widesumon")


def _template(what: str, label: str, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A kernel's text, and the types of its arguments."""
    stored, summed = STORED[label], SUMMED[label]
    bits, wide = stored[::1], summed[::1]
    sources = (UniTuple(wide if _summed_before(what) else bits, count), UniTuple(summed, count), summed)
    numbers = UniTuple(summed, NUMBERS_MAX)
    if what in ("sum", "widesum"):
        return _sum, (bits if what == "sum" else wide, *sources)
    if what in ("sumon", "widesumon"):
        return _sum_on, (bits if what == "sumon" else wide, wide, *sources)
    if what.startswith("master_"):
        return _update_master, (bits, bits, wide, wide, wide, *sources, summed, numbers)
    return _update, (bits, bits, wide, wide, *sources, summed, numbers)


def _summed_before(what: str) -> bool:
    """Whether an update's only source is a sum, as wide as sums are."""
    return what.removeprefix("master_").startswith("wide_")


def template(what: str, label: str, count: int) -> tuple[Callable[..., Any], tuple[Any, ...]] | None:
    """A kernel and the types of its arguments; None where there is none of that name here.

    Args:
        what: ``sum`` or ``widesum`` (not rounded to a half), ``sumon`` and ``widesumon`` (to a sum that has begun), a
            rule, ``wide_`` and a rule (of a gradient that is a sum), or either behind ``master_``.
        label: the type of the elements.
        count: how many sources it has.
    """
    rule = what.removeprefix("master_").removeprefix("wide_")
    if label not in STORED or (rule not in RULES and what not in _SUMS):
        return None
    chosen = arithmetic(label)
    chosen["_read"] = itself if _summed_before(what) else chosen["_widened"]
    if what.startswith("widesum"):
        chosen["_narrowed"] = itself
    parts: tuple[Callable[..., Any], ...] = (_total,)
    if rule in RULES:
        parts = (_total, _limited, _ratio, RULES[rule])
    own = specialised(globals(), parts, chosen)
    own["_rule"] = own[RULES[rule].__name__] if rule in RULES else None
    function, signature = _template(what, label, count)
    return types.FunctionType(function.__code__, own, function.__name__), signature


def names() -> list[tuple[str, str, int]]:
    """One kernel of every kind, for a test that compiles them all."""
    sums = [("sum", label, 3) for label in STORED] + [("sumon", label, 2) for label in STORED]
    wide = [(what, label, 2) for label in HALVES for what in ("widesum", "widesumon")]
    rules = [(rule, label, count) for rule in RULES for label in (*REALS, *HALVES) for count in (1, SOURCES_MAX)]
    before = [(f"{kind}{rule}", label, 1) for kind in ("wide_", "master_wide_") for rule in RULES for label in HALVES]
    return sums + wide + rules + before + [(f"master_{rule}", label, 2) for rule in RULES for label in HALVES]
