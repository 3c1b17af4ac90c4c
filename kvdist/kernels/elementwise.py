"""Expressions of optimizers' rules: the functions that they may call, and how NumPy evaluates them.

An expression is a pure function ``(gradient, weight, *states, *numbers)``. It returns the new weight; a rule with
states returns a tuple of the new weight and the new states, in their order. Every kernel comes from it: NumPy
evaluates it on arrays (`evaluate`), numba compiles it for a single element (`kvdist.kernels.numba_cpu`).

Rules that hold for an expression, so that both give the same bits:

* It is a function of a module, without a closure, and is the same object at every update: it is compiled once.
* It uses ``+ - * /``, `abs`, the functions of this module, and functions of modules that obey the same rules.
* It has no literal numbers, which numba would take for float64. Numbers arrive rounded to the type of the arrays; what
  is computed from hyper-parameters alone is computed outside, in float64.
* It branches on numbers only, never on elements. NaN, infinities and zeros of both signs need no care.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Expression

DEVICE_ELEMENTS = 1 << 24
"""How many elements of a GPU's arrays are evaluated at a time, which bounds the memory that an expression takes."""

PLANNED_ELEMENTS = 4096
"""Shorter arrays are evaluated as the expression stands: to find a plan takes longer than it saves."""

_ZERO = 0.0
"""The constant of the functions below; plans know it by its identity."""


# Functions that numba has its own versions of: `kvdist.kernels.parts`.


def sqrt(value: Array) -> Array:
    """√value, rounded to nearest."""
    root: Array = np.sqrt(value)
    return root


def sign(value: Array) -> Array:
    """1, −1, or 0 without a sign; NaN stays NaN."""
    signs: Array = np.sign(value)
    return signs


def maximum(one: Array, other: Array) -> Array:
    """The larger of two, elements at least 0; NaN where either is NaN."""
    larger: Array = np.maximum(one, other)
    return larger


def above_zero(value: Array) -> Array:
    """max(value, 0); NaN stays NaN."""
    larger: Array = np.maximum(value, _ZERO)
    return larger


def negated(value: Array) -> Array:
    """0 − value: unlike −value it makes zeros without a sign of zeros."""
    difference: Array = np.subtract(_ZERO, value)
    return difference


def limited(value: Array, limit: float) -> Array:
    """Value cut to ±limit; NaN stays NaN. An infinite limit cuts nothing."""
    if limit == math.inf:
        return value
    cut: Array = np.minimum(np.maximum(value, -limit), limit)
    return cut


# Functions that numba compiles as they stand.


def decayed(value: Array, weight: Array, wd: float) -> Array:
    """value + wd·weight; the value itself if wd is 0, so that an infinite weight does no harm."""
    return value + weight * wd if wd != 0 else value


def pulled(mean: Array, value: Array, pull: float, from_mean: float) -> Array:
    """The mean moved a share of the way to the value, as torch's ``lerp``; see `pull_of`."""
    return (mean if from_mean != 0 else value) + (value - mean) * pull


# For equations.


def pull_of(share: float) -> tuple[float, float]:
    """The last two arguments of `pulled` for a share of the way: it starts from the nearer end."""
    return (share, 1.0) if share < 0.5 else (share - 1.0, 0.0)


def no_limit(limit: float | None) -> float:
    """The limit that `limited` takes: infinite for None."""
    return math.inf if limit is None else limit


# Evaluation with NumPy.


def evaluate(
    expression: Expression,
    inputs: Sequence[Array],
    numbers: Sequence[float],
    outs: Sequence[Array],
    scratch: Array | None = None,
) -> None:
    """Compute outs ← expression(*inputs, *numbers) with NumPy's functions.

    Args:
        expression: see the module.
        inputs: arrays of the same floating type and length, of the host or of a device. The first may be overwritten.
        numbers: floats of Python, which are rounded to that type.
        outs: an array for each result. It may have the memory of an input; otherwise it overlaps none.
        scratch: memory of any content, of the type and length of the inputs; None to allocate it.
    """
    first: Any = inputs[0]
    if not isinstance(first, np.ndarray):
        for start in range(0, len(first), DEVICE_ELEMENTS):
            part = slice(start, start + DEVICE_ELEMENTS)
            _evaluate_at_once(expression, [one[part] for one in inputs], numbers, [one[part] for one in outs])
        return
    plan = None
    if len(first) >= PLANNED_ELEMENTS and first.ndim == 1:
        rounded = np.array(numbers, first.dtype).tolist()
        plan = _planned(expression, len(inputs), rounded, tuple([_place_of(out, inputs) for out in outs]))
    if plan is None or not plan.steps:
        _evaluate_at_once(expression, inputs, numbers, outs)
    else:
        plan.run(inputs, outs, rounded, np.empty_like(first) if scratch is None else scratch)


def _place_of(out: Array, inputs: Sequence[Array]) -> int | None:
    """Place of the input that is an out, or has its memory; None if no input has."""
    for place, one in enumerate(inputs):
        if one is out:
            return place
    for place, one in enumerate(inputs):
        if np.may_share_memory(one, out):
            return place
    return None


def _evaluate_at_once(
    expression: Expression, inputs: Sequence[Array], numbers: Sequence[float], outs: Sequence[Array]
) -> None:
    found = _results(expression, expression(*inputs, *numbers), len(outs))
    if len(outs) == 1:
        outs[0][...] = found[0]
        return
    if not {id(one) for one in inputs}.isdisjoint(map(id, found)):  # an input as it came is saved from other results
        found = [one.copy() for one in found]
    for out, new in zip(outs, found, strict=True):
        out[...] = new


def _results(expression: Expression, found: Any, count: int) -> Sequence[Any]:
    """The results of an expression in a sequence.

    Args:
        expression: the expression, for the message.
        found: what the expression has returned.
        count: number of results that it has to return.

    Raises:
        ValueError: there are more or fewer results.
    """
    results = found if isinstance(found, tuple) else (found,)
    if len(results) != count:
        raise ValueError(
            f"{expression.__module__}.{expression.__qualname__} returns {len(results)} results, not {count}: it must"
            " return the new weight and a new array for each of the rule's states, in the order of state_names"
        )
    return results


class _Traced(np.lib.mixins.NDArrayOperatorsMixin):
    """A value of an expression that is being planned: an input, or what a function of NumPy makes of other values.

    Args:
        steps: those functions in their order, each with its operands (`_Traced`, or numbers) and its value.
    """

    __eq__, __hash__ = object.__eq__, object.__hash__  # values are told apart by identity

    def __init__(self, steps: list[tuple[Any, tuple[Any, ...], _Traced]]) -> None:
        self.steps = steps

    def __bool__(self) -> bool:
        raise TypeError("an expression branches on numbers only, not on elements")

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> _Traced:
        value = _Traced(self.steps)
        self.steps.append((function, operands, value))
        return value


Guard = tuple[Callable[[float, float], bool], int, float, bool]
"""A comparison of a number, by its place among the numbers, with another number; and how it came out."""


def _computed(_self: _Number, *others: Any) -> Any:
    if any(isinstance(one, _Traced) for one in others):
        return NotImplemented  # an array computes with it
    raise TypeError("an expression that computes numbers from its numbers has no plan: a branch may depend on them")


class _Number:
    """A number of an expression that is being planned. The expression may compare it, and take its negative.

    It is no float, and nothing can be computed from it: a plan would keep what depends on this number.

    Attributes:
        place: place among the numbers; ~place for the negative of a number.
        value: the number.
        guards: comparisons on which the plan depends; each is added.
    """

    def __init__(self, place: int, value: float, guards: list[Guard]) -> None:
        self.place, self.value, self.guards = place, value, guards

    def _compared(self, compare: Callable[[float, float], bool], other: Any) -> bool:
        if type(other) not in (int, float) or self.place < 0:
            raise TypeError("an expression compares its numbers, as they are, with constants only")
        outcome = compare(self.value, other)
        self.guards.append((compare, self.place, other, outcome))
        return outcome

    def __eq__(self, other: object) -> bool:
        return self._compared(operator.eq, other)

    def __ne__(self, other: object) -> bool:
        return self._compared(operator.ne, other)

    def __lt__(self, other: float) -> bool:
        return self._compared(operator.lt, other)

    def __le__(self, other: float) -> bool:
        return self._compared(operator.le, other)

    def __gt__(self, other: float) -> bool:
        return self._compared(operator.gt, other)

    def __ge__(self, other: float) -> bool:
        return self._compared(operator.ge, other)

    def __bool__(self) -> bool:
        return self._compared(operator.ne, 0.0)

    def __neg__(self) -> _Number:
        return _Number(~self.place, -self.value, self.guards)

    __hash__ = object.__hash__
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = __pow__ = __rpow__ = _computed
    __abs__ = __pos__ = __round__ = __int__ = __float__ = __trunc__ = __floor__ = __ceil__ = _computed


class _Plan(NamedTuple):
    """How an expression is evaluated by functions that write to chosen arrays.

    Places are counted through inputs, outs, scratch arrays, numbers, their negatives, and 0.

    Attributes:
        steps: function, places of its operands, place of its value. An expression without a plan has no steps.
        copies: places of values that are copied at the end, and of their outs.
        scratch: number of scratch arrays, which are parts of a single array.
        guards: what must hold for the numbers.
    """

    steps: list[tuple[Any, tuple[int, ...], int]]
    copies: list[tuple[int, int]]
    scratch: int
    guards: list[Guard]

    def fits(self, numbers: Sequence[float]) -> bool:
        """Whether the expression takes the same branches for other numbers."""
        for compare, place, other, outcome in self.guards:  # noqa: SIM110  # twice as fast
            if compare(numbers[place], other) != outcome:
                return False
        return True

    def run(self, inputs: Sequence[Array], outs: Sequence[Array], numbers: list[float], scratch: Array) -> None:
        """Evaluate the expression, as many elements at a time as the scratch array allows."""
        size = len(inputs[0])
        constants = [*numbers, *map(operator.neg, numbers), _ZERO]
        if size * self.scratch <= CHUNK_ELEMENTS:
            own = [scratch if i == 0 else np.empty_like(scratch) for i in range(self.scratch)]
            self._run([*inputs, *outs, *own, *constants])
            return
        length = min(CHUNK_ELEMENTS, size // max(1, self.scratch))
        for start in range(0, size, length):
            part = slice(start, start + length)
            given = [array[part] for array in (*inputs, *outs)]
            own = [scratch[i * length : i * length + len(given[0])] for i in range(self.scratch)]
            self._run([*given, *own, *constants])

    def _run(self, arrays: Sequence[Any]) -> None:
        for function, operands, place in self.steps:
            if len(operands) == 2:
                function(arrays[operands[0]], arrays[operands[1]], out=arrays[place])
            else:
                function(arrays[operands[0]], out=arrays[place])
        for source, target in self.copies:
            np.copyto(arrays[target], arrays[source])


_PLANS: dict[tuple[Expression, int, int, tuple[int | None, ...]], list[_Plan]] = {}
"""Expression, numbers of its inputs and numbers, and for each out the input that it is → a plan for each way through
its branches."""

_WITHOUT = _Plan([], [], 0, [])
"""In the place of a plan, for an expression that needs more than functions of NumPy."""


def _planned(
    expression: Expression, inputs: int, numbers: Sequence[float], same: tuple[int | None, ...]
) -> _Plan | None:
    """The plan of an expression for these numbers, which some 50 µs make; later calls find it."""
    plans = _PLANS.setdefault((expression, inputs, len(numbers), same), [])
    for plan in plans:
        if plan.fits(numbers):
            return plan
    plans.append(_plan(expression, inputs, numbers, same))
    return plans[-1]


def _plan(expression: Expression, inputs: int, numbers: Sequence[float], same: tuple[int | None, ...]) -> _Plan:
    """Plan an expression, so that as little memory is touched as can be.

    A value takes the place of its out, of a value or an input that is not needed any more, or of a scratch array.

    Args:
        expression: as of `evaluate`.
        inputs: number of inputs.
        numbers: numbers that choose the branches.
        same: for each out the input that it is, or None.

    Raises:
        ValueError: the expression returns more or fewer results than there are outs.
    """
    steps: list[tuple[Any, tuple[Any, ...], _Traced]] = []
    guards: list[Guard] = []
    given = [_Traced(steps) for _ in range(inputs)]
    try:
        found = expression(*given, *[_Number(place, value, guards) for place, value in enumerate(numbers)])
    except (AttributeError, TypeError):
        return _WITHOUT
    used = [one for _, operands, _ in steps for one in operands]
    if any(one is not _ZERO and not isinstance(one, _Traced | _Number) for one in used):
        return _WITHOUT  # a number that was computed from others: it would be a constant
    results = list(_results(expression, found, len(same)))
    for i, (one, own) in enumerate(zip(results, same, strict=True)):
        if one in given and given.index(one) != own:
            results[i] = np.positive(one)
    last = dict.fromkeys(given, -1)
    last |= {one: i for i, (_, operands, _) in enumerate(steps) for one in operands if isinstance(one, _Traced)}
    last |= dict.fromkeys(results, len(steps))
    step_of = {value: i for i, (_, _, value) in enumerate(steps)}
    places: dict[Any, int] = {one: i for i, one in enumerate(given)}
    # Where a value may lie → the last step of values that may. The gradient is not needed afterwards.
    until = {own: step_of[one] for one, own in zip(results, same, strict=True) if own is not None and one in step_of}
    until.setdefault(0, len(steps))
    free: list[int] = []
    first_scratch = scratch = inputs + len(results)
    for i, (_, operands, value) in enumerate(steps):
        for one in dict.fromkeys(operands):
            if isinstance(one, _Traced) and last[one] == i and (places[one] in until or places[one] >= first_scratch):
                free.append(places[one])
        out = results.index(value) if value in results else None
        own = None if out is None else same[out]
        if out is not None and own is None:
            places[value] = inputs + out
        elif own is not None and own in free:
            places[value] = own
        else:
            fit = [place for place in free if until.get(place, len(steps)) >= last[value]]
            places[value] = fit[-1] if fit else scratch
            scratch += not fit
        free = [place for place in free if place != places[value]]
    first_number = scratch

    def place_of(one: Any) -> int:
        if isinstance(one, _Traced):
            return places[one]
        place: int = 2 * len(numbers) if one is _ZERO else one.place if one.place >= 0 else len(numbers) + ~one.place
        return first_number + place

    planned = [(function, tuple(map(place_of, operands)), places[value]) for function, operands, value in steps]
    copies = [(places[one], inputs + i) for i, one in enumerate(results) if places[one] not in (inputs + i, same[i])]
    return _Plan(planned, copies, scratch - first_scratch, guards)
