"""Base class of optimizers: a name, checked numbers, and a rule for an array.

A rule is an expression (`kvdist.kernels.elementwise`), which `Optimizer.equation` gives with the numbers of an update;
or else a class overrides `Optimizer.apply`.

An optimizer travels to the servers as its description, a small table of names and numbers, never as code. Its
hyper-parameters are therefore frozen: a later change would never reach a server. Only `learning_rate`, `wd`,
`rescale_grad` and the multipliers may change, because they travel with every push.

A rule is final: a class derives from `Optimizer`, or from the abstract base of its family. Most rules handle each
element by itself. A rule that needs more declares it: `norm_count` norms of the whole parameter, or `by_rows`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from kvdist import lr_scheduler as schedules
from kvdist.kernels.elementwise import evaluate
from kvdist.kernels.interface import Array, Equation
from kvdist.lr_scheduler import LRScheduler
from kvdist.removed import AVERAGES_ELSEWHERE
from kvdist.schema import Schema, Value, finite_number, flag, number, optional_number, schema_of

States = tuple[Array, ...]
"""Arrays that a rule keeps of a slice, in the order of `Optimizer.state_names`."""

LIVE = ("learning_rate", "wd", "rescale_grad", "lr_mult", "wd_mult")
"""What may change after creation."""

_MULTIPLIERS = ("lr_mult", "wd_mult")

HINTS: Mapping[str, str] = MappingProxyType(
    {
        "lr": "learning_rate",
        "weight_decay": "wd",
        "betas": "beta1 and beta2",
        "eps": "epsilon",
        "clip_grad": "clip_gradient",
        "scheduler": "lr_scheduler",
        "alpha": "rho",
        "gamma1": "rho",
        "gamma2": "momentum",
        "momentum_decay": "schedule_decay",
        "lambda1": "lamda1",
        "lambda_": "lamda",
        "trust_coefficient": "eta",
    }
)
"""Words of other frameworks and of earlier versions of MXNet → our word."""

REMOVED: Mapping[str, str] = MappingProxyType({"average_half_life": AVERAGES_ELSEWHERE, "kept_names": "state_names"})
"""Attributes of earlier versions → what to use instead."""


def numbers_of(cls: type[Optimizer]) -> dict[str, Schema]:
    """The schema of each hyper-parameter but for the schedule, in the order of the fields."""
    return schema_of(cls, without=(schedules.ENTRY,))


@dataclass(kw_only=True, eq=False)
class Optimizer(ABC):
    """Base class of all optimizers. Its fields are keyword arguments of the constructor.

    In the formulas of the subclasses w is the weight, g the gradient (summed, rescaled and clipped), ĝ the gradient
    with weight decay, lr the learning rate, wd the weight decay, and t the number of updates including the present.

    Attributes:
        learning_rate: step size, at least 0. With `lr_scheduler`, an explicit rate replaces the `base_lr` of the
            schedule and cannot change later.
        wd: weight decay, at least 0.
        rescale_grad: factor for each contribution before the sum.
        clip_gradient: bound on the elements of the summed gradient, which are clipped to ±clip_gradient; None or 0: no
            clipping.
        multi_precision: keep a float32 master copy of float16 and bfloat16 weights, and update that; the weight is the
            rounded master. If the weight is changed otherwise, the master follows.
        lazy_update: in a row-sparse table, update only rows with a gradient in the round, including their momentum and
            decay. False: the other rows get a gradient of zeros, as in a dense parameter.
        lr_scheduler: a schedule of `kvdist.lr_scheduler`, which counts updates in the process that holds the weights;
            None for a constant rate.
        lr_mult, wd_mult: dicts of factors by key; absent keys have factor 1.
    """

    name: ClassVar[str]
    """Name for users and descriptions, in lower case."""
    norm_count: ClassVar[int] = 0
    """Number of calls of `measure` before `apply`; each requests norms of the whole parameter."""
    by_rows: ClassVar[bool] = False
    """Whether the rule needs whole rows of a matrix. Its states then have an element per row."""
    by_place: ClassVar[bool] = False
    """Whether the update depends on the position of an element in its parameter."""
    on_host: ClassVar[bool] = False
    """Whether the rule needs arrays in host memory, because it draws random numbers on the CPU."""
    clips_itself: ClassVar[bool] = False
    """Whether the rule clips to `clip_gradient` itself, because it changes or measures the gradient before clipping."""
    states_from_weight: ClassVar[tuple[str, ...]] = ()
    """Entries of `state_names` that start as a copy of the weight. The others start as zeros."""
    initial_scalars: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Names and initial values of the scalars that the rule keeps per slice, in addition to its arrays."""

    learning_rate: float = number(0.01, at_least=0)
    wd: float = number(0.0, at_least=0)
    rescale_grad: float = number(1.0)
    clip_gradient: float | None = optional_number()
    multi_precision: bool = flag(False)
    lazy_update: bool = flag(False)
    lr_scheduler: LRScheduler | None = None

    def __post_init__(self) -> None:
        self.lr_mult: dict[Any, float] = {}
        self.wd_mult: dict[Any, float] = {}
        self._set_groups: Callable[[], Callable[[str, float], None] | None] | None = None
        """Weak reference to what sets rate and decay in the parameter groups of a `Trainer`; None without a trainer."""
        self._as_made: dict[str, Any] | None = None
        """Attributes that the `Trainer` of this optimizer may change, as they were before; None without a trainer."""
        if self.lr_scheduler is not None:
            # Identity tells a rate that was given from the class's own, even if they are equal.
            if self.learning_rate is default_of(type(self), "learning_rate"):
                self.learning_rate = self.lr_scheduler.base_lr
            else:
                self.lr_scheduler = self.lr_scheduler.with_base(self.learning_rate)
        self._frozen = True

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """Names of the state arrays of each slice, in the order in which the expression and `apply` get them.

        A subclass has a tuple as a class attribute, or a property if the states depend on the hyper-parameters.
        """

    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Write the new weight to `out` and the new state to `state`: those of `equation`, evaluated with NumPy.

        All arrays are one-dimensional, of the same length (states of a rule `by_rows` have one element per row) and of
        the same floating-point type. Arithmetic must keep the type: use Python floats, not float64 scalars of NumPy.

        Args:
            weight: current weight, read-only. It may be the same array as `out`.
            grad: gradient, summed, rescaled and clipped (not clipped if `clips_itself`). The rule may overwrite it.
            out: array for the new weight.
            state: an array for each of `state_names`, updated in place.
            scratch: temporary memory of arbitrary content.
            step: numbers of this update.

        Raises:
            NotImplementedError: the rule has no equation, and does not define this method.
        """
        equation = self._formula(step)
        if equation is None:
            raise NotImplementedError(f"{self.name} has no equation, so it must define apply()")
        apply_equation(equation, weight, grad, out, state, scratch)

    def measure(self, turn: int, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> States:
        """Return the arrays of this piece whose norms over the whole parameter `apply` needs.

        It is called for all pieces with turn 0, then for all with turn 1, and so on up to `norm_count`. `step.norms`
        has the norms of earlier turns; `apply` gets all of them. A turn may already update `state`; `apply` must not
        repeat that.

        Args:
            turn: number of the turn, from 0.
            weight, grad, state, scratch, step: as in `apply`.
        """
        raise NotImplementedError(f"{self.name} has norm_count {self.norm_count}, so it must define measure()")

    def for_key(self, key: Hashable) -> Optimizer:
        """Return the rule for a key: `self`, unless groups of keys have different hyper-parameters."""
        return self

    @classmethod
    def arguments(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Translate a user's hyper-parameters into keyword arguments of the constructor."""
        return dict(given)

    def advance(self, scalars: tuple[float, ...], count: int) -> tuple[float, ...]:
        """Return the scalars for update number `count`, computed from those of the previous update."""
        return scalars

    def check_update(self, lr: float, wd: float, extent: Extent) -> None:  # noqa: B027  # most have no such limits
        """Check that the rule can use these numbers and this parameter.

        Raises:
            ValueError: it cannot; the message has the reason.
        """

    def rests(self, wd: float) -> bool:
        """Whether a gradient of zeros leaves finite weights and states unchanged, so that such rows can be skipped.

        Unchanged means bit by bit, except for the sign of a zero.

        Args:
            wd: weight decay of the update.
        """
        return False

    def equation(self, lr: float, wd: float, count: int) -> Equation | None:
        """Return the rule as an expression, with its numbers; None if it needs more of `Step`, or is no expression.

        Kernels are made from the expression, and `apply` evaluates it with NumPy.

        Args:
            lr, wd, count: as in `Step`.
        """
        return None

    def _formula(self, step: Step) -> Equation | None:
        """Return `equation` for rules whose numbers need more of the step: norms, scalars or the key."""
        return self.equation(step.lr, step.wd, step.count)

    @property
    def is_elementwise(self) -> bool:
        """Whether each element is updated independently of the others, so that short arrays can be joined."""
        return not (self.norm_count or self.by_rows or self.by_place)

    @property
    def needs_norms(self) -> bool:
        """Whether the rule needs norms of the whole parameter, which must then be on a single server."""
        return self.norm_count > 0

    if not TYPE_CHECKING:  # for type checkers all other attributes would exist too

        def __getattr__(self, name: str) -> Any:
            """Raises an `AttributeError`: the optimizer has no such attribute, or not any more."""
            if name in REMOVED:
                raise AttributeError(f"{name} was removed: use {REMOVED[name]}")
            return object.__getattribute__(self, name)  # with the error of a property

    def __setattr__(self, attribute: str, value: object) -> None:
        if attribute.startswith("_"):
            object.__setattr__(self, attribute, value)
        elif attribute in _MULTIPLIERS:
            object.__setattr__(self, attribute, _checked_multipliers(attribute, value))
        else:
            checked = self._checked(attribute, value)
            set_groups = vars(self).get("_set_groups") if attribute in ("learning_rate", "wd") else None
            if set_groups is not None and (alive := set_groups()) is not None:
                alive(attribute, checked)
            object.__setattr__(self, attribute, checked)

    def _checked(self, attribute: str, value: object) -> Value | LRScheduler:
        if attribute in REMOVED:
            raise AttributeError(f"{attribute} was removed: use {REMOVED[attribute]}")
        schemas = numbers_of(type(self))
        is_schedule = attribute == schedules.ENTRY
        if attribute not in schemas and not is_schedule:
            hint = HINTS.get(attribute)
            advice = f"; here it is called {hint}" if hint else f"; it has {', '.join(schemas)}, {', '.join(LIVE[3:])}"
            raise AttributeError(f"{self.name} has no hyper-parameter {attribute}{advice}")
        frozen = "_frozen" in vars(self)
        if attribute == "learning_rate" and frozen and self.lr_scheduler is not None and value != self.learning_rate:
            raise AttributeError(
                f"the learning rate follows {self.lr_scheduler}; to set it yourself, create the optimizer without"
                " lr_scheduler"
            )
        if attribute not in LIVE and frozen:
            raise AttributeError(
                f"{attribute} cannot change after creation, because servers would never learn of it: create another "
                f"optimizer. {', '.join(LIVE)} may change at any time, they travel with every push"
            )
        return schedules.given(value) if is_schedule else schemas[attribute].check(attribute, value)

    def change_here(self, field: str, value: float | None) -> None:
        """Change a hyper-parameter before the servers know it, or for weights that this process updates.

        Raises:
            ValueError: the number is out of its range.
        """
        object.__setattr__(self, field, numbers_of(type(self))[field].check(field, value))

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: nothing that a `Trainer` has written, but rate and decay, which users set."""
        state = vars(self) | (self._as_made or {}) | {"_as_made": None, "_set_groups": None}
        return state | {name: dict(state[name]) for name in _MULTIPLIERS}

    def take(self, as_made: Mapping[str, Any]) -> None:
        """Assign the optimizer to a `Trainer`.

        Args:
            as_made: result of `__getstate__` before the trainer changed anything.
        """
        self._as_made = {name: value for name, value in as_made.items() if name not in ("learning_rate", "wd")}

    def release(self) -> None:
        """Release the optimizer from its `Trainer` and restore the values that the trainer has changed."""
        vars(self).update(self.__getstate__())

    @property
    def is_taken(self) -> bool:
        """Whether a `Trainer` uses the optimizer."""
        return self._as_made is not None

    def twin(self) -> Optimizer:
        """Return a second optimizer with the present attributes, including those that a `Trainer` has changed."""
        made = object.__new__(type(self))
        vars(made).update(vars(self) | {"_set_groups": None})
        return made

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the factors {key: number} of the learning rate; absent keys have factor 1."""
        self.lr_mult = dict(multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the factors {key: number} of the weight decay; absent keys have factor 1."""
        self.wd_mult = dict(multipliers)

    def pushed_lr(self, key: Hashable) -> float:
        """Learning rate that a push of the key carries; with a schedule, the factor for the rate of the schedule."""
        factor = self.lr_mult.get(key, 1.0)
        return factor if self.lr_scheduler is not None else self.learning_rate * factor

    def lr_at(self, pushed: float, count: int) -> float:
        """Learning rate of update number `count`, for a push with `pushed_lr` equal to `pushed`."""
        return pushed if self.lr_scheduler is None else self.lr_scheduler(count) * pushed

    def wd_for(self, key: Hashable) -> float:
        """Current weight decay of a key."""
        return self.wd * self.wd_mult.get(key, 1.0)

    def rule(self) -> dict[str, Value]:
        """Return the part of `describe` that cannot change: everything except the live numbers."""
        return {name: number for name, number in self.describe().items() if name not in LIVE}

    def __str__(self) -> str:
        """The name, and what of the rule is not the default."""
        defaults = {field: default_of(type(self), field) for field in numbers_of(type(self))}
        rule = {name: value for name, value in self.rule().items() if name in defaults and value != defaults[name]}
        if self.lr_scheduler is not None:
            rule[schedules.ENTRY] = str(self.lr_scheduler)
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in rule.items())})"

    def describe(self) -> dict[str, Value]:
        """Return name and hyper-parameters, as sent to the servers. Equal descriptions mean equal optimizers.

        `learning_rate`, `wd` and `rescale_grad` are included with their present values, `lr_mult` and `wd_mult` are
        not.
        """
        values: dict[str, Value] = {"name": self.name}
        values.update((field, vars(self)[field]) for field in numbers_of(type(self)))
        values.update({schedules.ENTRY: None} if self.lr_scheduler is None else self.lr_scheduler.describe())
        return values


def apply_equation(
    equation: Equation, weight: Array, grad: Array, out: Array, state: Sequence[Array], scratch: Array
) -> None:
    """Compute `Optimizer.apply` by an equation."""
    if equation.is_negative:
        np.negative(grad, out=grad)
    states = equation.chosen(state)
    evaluate(equation.expression, (grad, weight, *states), equation.numbers, (out, *states), scratch)


def formula_of(optimizer: Optimizer, step: Step) -> Equation | None:
    """Return the rule of an update as an expression with all its numbers; None if only `apply` can compute it."""
    return optimizer._formula(step)


def has_rule(cls: type[Optimizer]) -> bool:
    """Whether a class defines a rule: an `equation` or an `apply`."""
    names = ("apply", "equation", "_formula")
    return any(getattr(cls, name) is not getattr(Optimizer, name) for name in names)


def default_of(cls: type[Optimizer], field: str) -> object:
    """What the class gives a hyper-parameter that the user does not."""
    return cls.__dataclass_fields__[field].default


def _checked_multipliers(attribute: str, value: object) -> dict[Any, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{attribute} must be a dict of key to number, not {type(value).__name__}")
    return {key: finite_number(f"{attribute}[{key!r}]", factor) for key, factor in value.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """Range of a parameter that an array holds.

    Attributes:
        key: key of the parameter.
        shape: shape of the whole parameter.
        start: index of the array's first element in the parameter, in row-major order.
    """

    key: Hashable
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """Number of elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        """Number of elements of a row: all elements with the same first index."""
        return math.prod(self.shape[1:])


@dataclass(slots=True, eq=False)
class Piece:
    """One array of an update.

    Attributes:
        index: names the state, such as a key and the number of its slice.
        weight: the present weight, one-dimensional, of `DType.storage`. It is only read. If it was the `out` of the
            update before under this index, its content is unchanged since.
        contributions: gradients of the same length and type; none at all is a gradient of zeros.
        scales: a finite factor for each contribution.
        out: another array like `weight`, or `weight` itself; it overlaps nothing else.
        extent: where the array lies in its parameter.
    """

    index: Hashable
    weight: Array
    contributions: Sequence[Array]
    scales: Sequence[float]
    out: Array
    extent: Extent


@dataclass(slots=True, eq=False)
class Step:
    """Numbers of an update of a piece of a parameter. Read-only, although not frozen, which would cost a microsecond.

    Attributes:
        lr: learning rate of this key in this update.
        wd: weight decay of this key in this update.
        count: number of updates of the slice, including this update.
        extent: range of the slice in its parameter.
        start: index of the piece's first element in the parameter.
        scalars: scalars of the rule for this update, in the order of `Optimizer.initial_scalars`.
        norms: norms of the whole parameter that `Optimizer.measure` has requested, in its order.
        pusher: rank of the worker whose push causes this update, for a dense array of a `dist_async` store; None in
            other stores, for rows of tables, and outside servers.
    """

    lr: float
    wd: float
    count: int
    extent: Extent
    start: int = 0
    scalars: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()
    pusher: int | None = None

    def moved(self, elements: int) -> Step:
        """Return the same update for a piece that begins `elements` later."""
        start = self.start + elements
        return Step(self.lr, self.wd, self.count, self.extent, start, self.scalars, self.norms, self.pusher)

    def knowing(self, norms: tuple[float, ...]) -> Step:
        """Return the same update with these norms."""
        return Step(self.lr, self.wd, self.count, self.extent, self.start, self.scalars, norms, self.pusher)
