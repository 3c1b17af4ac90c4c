"""What an optimizer is: a name, checked numbers, and a rule for one array.

An optimizer travels to the servers as its description, a small table of names and numbers; never as code. So its
hyper-parameters are frozen: a later change here would never reach a server. What may change at any time are
`learning_rate`, `wd`, `rescale_grad` and the multipliers, because they travel with every push.

A rule is final: a class derives from `Optimizer`, or from the abstract base of its family. Most rules look at each
element by itself. A rule that looks at more says so: `norm_count` lengths of the whole parameter, or `by_rows`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from kvdist import lr_scheduler as schedules
from kvdist.kernels.interface import Array, Equation
from kvdist.lr_scheduler import LRScheduler
from kvdist.schema import Schema, Value, finite_number, flag, number, optional_number, schema_of

States = tuple[Array, ...]
"""What a rule keeps of one slice, one array for each of `Optimizer.state_names`."""

AVERAGE = "average"
"""What the array is called that follows the weight: see `Optimizer.average_half_life`."""

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
"""Other frameworks' words, MXNet's earlier ones, and ours."""


def numbers_of(cls: type[Optimizer]) -> dict[str, Schema]:
    """The schema of each hyper-parameter but for the schedule, in the order of the fields."""
    return schema_of(cls, without=(schedules.ENTRY,))


@dataclass(kw_only=True, eq=False)
class Optimizer(ABC):
    """Base of every optimizer; fields are the keywords of the constructor.

    Attributes:
        learning_rate: the step size, at least 0. With a schedule its base: a rate that is given beside a schedule
            replaces the schedule's `base_lr`, and cannot change later.
        wd: weight decay, at least 0.
        rescale_grad: each contribution is multiplied by it before it is summed.
        clip_gradient: elements of the summed gradient are cut to ±clip_gradient; None or 0 turns it off.
        multi_precision: keep a float32 copy of float16 and bfloat16 weights, the master, and update that; the weight
            is the master, rounded. Where the weight was changed otherwise, the master follows.
        lazy_update: in a row-sparse table update only the rows that a round has gradients for, their momentum and
            decay included; otherwise the other rows get a gradient of zeros, as in a dense parameter.
        average_half_life: keep an exponential average of the weights beside them, in which a weight counts half as much
            after so many further updates; None or 0 keeps none. ā ← ā + (1 − ½^(1/average_half_life))·(w − ā) behind
            each update, from ā = the weight before the first one, without a correction of that bias; in float32 for
            halves, of the master where there is one. Torch's ``get_ema_multi_avg_fn(½^(1/average_half_life))`` of
            `torch.optim.swa_utils`, whose `AveragedModel` was given the initial weights too.
        lr_scheduler: a schedule of `kvdist.lr_scheduler`, or None. It counts the updates where the weights live.
        lr_mult, wd_mult: factors of single keys, 1 where a key is absent.
    """

    name: ClassVar[str]
    """What users and descriptions call it: lower case."""
    norm_count: ClassVar[int] = 0
    """How many times `measure` is asked for lengths of the whole parameter before `apply`."""
    by_rows: ClassVar[bool] = False
    """Whether the rule needs whole rows of a matrix. Its states then have one element for each row."""
    by_place: ClassVar[bool] = False
    """Whether it matters where an element lies in its parameter."""
    on_host: ClassVar[bool] = False
    """Whether the rule needs arrays of the host's memory: it draws random numbers there."""
    clips_itself: ClassVar[bool] = False
    """Whether the rule cuts at `clip_gradient`, because it does something to the gradient before."""
    states_from_weight: ClassVar[tuple[str, ...]] = ()
    """Those of `state_names` that start as a copy of the weight. The others start as zeros."""
    initial_scalars: ClassVar[Mapping[str, float]] = MappingProxyType({})
    """Numbers that the rule keeps for each slice beside its arrays, and what they start from."""

    learning_rate: float = number(0.01, at_least=0)
    wd: float = number(0.0, at_least=0)
    rescale_grad: float = number(1.0)
    clip_gradient: float | None = optional_number()
    multi_precision: bool = flag(False)
    lazy_update: bool = flag(False)
    average_half_life: float | None = optional_number()
    lr_scheduler: LRScheduler | None = None

    def __post_init__(self) -> None:
        self.lr_mult: dict[Any, float] = {}
        self.wd_mult: dict[Any, float] = {}
        self._as_made: dict[str, Any] | None = None
        """What a `Trainer` that has this optimizer may write over, as it was before; None without one."""
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
        """The arrays that the rule keeps for each slice, in the order in which it gets them."""

    @property
    def kept_names(self) -> tuple[str, ...]:
        """`state_names`, and behind them `AVERAGE` if there is one: all arrays that are kept for each slice."""
        return self.state_names if self.average_half_life is None else (*self.state_names, AVERAGE)

    @abstractmethod
    def apply(self, weight: Array, grad: Array, out: Array, state: States, scratch: Array, step: Step) -> None:
        """Write the new weight to `out` and the new state to `state`.

        All arrays are one-dimensional, of one length (states of a rule `by_rows` have one element a row) and of one
        floating type, which the arithmetic must keep (Python floats do; float64 scalars of NumPy do not).

        Args:
            weight: the present weight; read only. It may be the same array as `out`.
            grad: the gradient: summed, rescaled and, but for a rule that clips itself, clipped. The rule may overwrite
                it.
            out: receives the new weight.
            state: one array for each of `state_names`; updated in place.
            scratch: for the rule's use; its content means nothing.
            step: the numbers of this update.
        """

    def measure(self, turn: int, weight: Array, grad: Array, state: States, scratch: Array, step: Step) -> States:
        """The arrays of this piece whose lengths, over the whole parameter, `apply` finds in `step.norms`.

        It is called for all pieces with turn 0, then for all with turn 1, up to `norm_count`; the norms of earlier
        turns are in `step.norms`. A turn may update `state`; that of `apply` is then not repeated.

        Args:
            turn: which turn it is.
            weight, grad, state, scratch, step: as of `apply`.
        """
        raise NotImplementedError(f"{self.name} has norm_count {self.norm_count}, so it must define measure()")

    def for_key(self, key: Hashable) -> Optimizer:
        """The rule of a key: this one, unless the rule has groups of keys with numbers of their own."""
        return self

    @classmethod
    def arguments(cls, given: Mapping[str, object]) -> dict[str, object]:
        """The constructor's keywords, from what a user calls them."""
        return dict(given)

    def advance(self, scalars: tuple[float, ...], count: int) -> tuple[float, ...]:
        """The rule's numbers for the update with this count, from those of the update before."""
        return scalars

    def check_update(self, lr: float, wd: float, extent: Extent) -> None:  # noqa: B027  # most have no such limits
        """Refuse numbers or a parameter that the rule cannot use.

        Raises:
            ValueError: it cannot; the message says why.
        """

    def rests(self, wd: float) -> bool:
        """Whether a gradient of zeros leaves finite weights and states as they are, so that rows may be left out.

        They stay bit by bit, but for the sign of a zero.

        Args:
            wd: the weight decay of the update.
        """
        return False

    def equation(self, lr: float, wd: float, count: int) -> Equation | None:
        """What `apply` computes, for backends that have it in one piece; None: `apply` alone knows.

        Args:
            lr, wd, count: as of `Step`.
        """
        return None

    @property
    def is_elementwise(self) -> bool:
        """Whether nothing but an element's own numbers decide, so that short arrays can go as one."""
        return not (self.norm_count or self.by_rows or self.by_place)

    @property
    def needs_norms(self) -> bool:
        """Whether the rule needs lengths of the whole parameter, which must then live on one server."""
        return self.norm_count > 0

    def __setattr__(self, attribute: str, value: object) -> None:
        if attribute.startswith("_"):
            object.__setattr__(self, attribute, value)
        elif attribute in _MULTIPLIERS:
            object.__setattr__(self, attribute, _checked_multipliers(attribute, value))
        else:
            object.__setattr__(self, attribute, self._checked(attribute, value))

    def _checked(self, attribute: str, value: object) -> Value | LRScheduler:
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
        return schedules.given(value) if is_schedule else self._in_schema(schemas[attribute], attribute, value)

    def _in_schema(self, schema: Schema, field: str, value: object) -> Value:
        found = schema.check(field, value)
        if field == "average_half_life" and found is not None and self.by_rows:
            raise ValueError(
                f"{self.name} has no average_half_life: its states are by rows, as of tables, which are not averaged"
            )
        return found

    def change_here(self, field: str, value: float | None) -> None:
        """Change a number of the rule: before it is told to servers, or for weights that are updated in this process.

        Raises:
            ValueError: the number is out of its range.
        """
        object.__setattr__(self, field, self._in_schema(numbers_of(type(self))[field], field, value))

    def __getstate__(self) -> dict[str, Any]:
        """What copies and pickles have: nothing that a `Trainer` has written, but rate and decay, which users set."""
        state = vars(self) | (self._as_made or {}) | {"_as_made": None}
        return state | {name: dict(state[name]) for name in _MULTIPLIERS}

    def take(self, as_made: Mapping[str, Any], average_half_life: float | None) -> None:
        """Belong to a `Trainer`.

        Args:
            as_made: what `__getstate__` gave before the trainer changed anything.
            average_half_life: replaces the optimizer's, unless it is None.

        Raises:
            ValueError: the half life is out of its range.
        """
        if average_half_life is not None:
            self.change_here("average_half_life", average_half_life)
        self._as_made = {name: value for name, value in as_made.items() if name not in ("learning_rate", "wd")}

    def release(self) -> None:
        """Belong to nobody again, and be what a copy would be."""
        vars(self).update(self.__getstate__())

    @property
    def is_taken(self) -> bool:
        """Whether a `Trainer` has it."""
        return self._as_made is not None

    def twin(self) -> Optimizer:
        """Another one with all that this one has now, for a store that is to see changes later."""
        made = object.__new__(type(self))
        vars(made).update(vars(self))
        return made

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the table of factors {key: number} on the learning rate; keys not in it have 1."""
        self.lr_mult = dict(multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the table of factors {key: number} on the weight decay; keys not in it have 1."""
        self.wd_mult = dict(multipliers)

    def pushed_lr(self, key: Hashable) -> float:
        """What a push says about the learning rate of a key: the rate; with a schedule the factor on it."""
        factor = self.lr_mult.get(key, 1.0)
        return factor if self.lr_scheduler is not None else self.learning_rate * factor

    def lr_at(self, pushed: float, count: int) -> float:
        """The learning rate of the update with this count, if the push said `pushed`."""
        return pushed if self.lr_scheduler is None else self.lr_scheduler(count) * pushed

    def wd_for(self, key: Hashable) -> float:
        """The weight decay of a key now."""
        return self.wd * self.wd_mult.get(key, 1.0)

    def rule(self) -> dict[str, Value]:
        """What of the description can never change: everything but the live numbers."""
        return {name: number for name, number in self.describe().items() if name not in LIVE}

    def __str__(self) -> str:
        """The name, and what of the rule is not the default."""
        defaults = {field: default_of(type(self), field) for field in numbers_of(type(self))}
        rule = {name: value for name, value in self.rule().items() if name in defaults and value != defaults[name]}
        if self.lr_scheduler is not None:
            rule[schedules.ENTRY] = str(self.lr_scheduler)
        return f"{self.name}({', '.join(f'{name}={value}' for name, value in rule.items())})"

    def describe(self) -> dict[str, Value]:
        """The name and all hyper-parameters: what travels to the servers. Equal descriptions, equal optimizers.

        `learning_rate`, `wd` and `rescale_grad` stand in it with their present values; the multipliers do not.
        """
        values: dict[str, Value] = {"name": self.name}
        values.update((field, vars(self)[field]) for field in numbers_of(type(self)))
        values.update({schedules.ENTRY: None} if self.lr_scheduler is None else self.lr_scheduler.describe())
        return values


def default_of(cls: type[Optimizer], field: str) -> object:
    """What the class gives a hyper-parameter that the user does not."""
    return cls.__dataclass_fields__[field].default


def _checked_multipliers(attribute: str, value: object) -> dict[Any, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{attribute} must be a dict of key to number, not {type(value).__name__}")
    return {key: finite_number(f"{attribute}[{key!r}]", factor) for key, factor in value.items()}


@dataclass(frozen=True, slots=True)
class Extent:
    """The stretch of a parameter that an array holds.

    Attributes:
        key: the parameter.
        shape: of the whole parameter.
        start: how many of its elements come before the array's first, in row-major order.
    """

    key: Hashable
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        """Elements of one row: of all that shares the first index."""
        return math.prod(self.shape[1:])


@dataclass(slots=True, eq=False)
class Piece:
    """One array of an update.

    Attributes:
        index: names the state, such as a key and the number of its slice.
        weight: the present weight, one-dimensional, of `DType.storage`. It is only read. If it was the `out` of the
            update before under this index, it still has what that wrote.
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
    """One update of one piece of a parameter. Only to be read; it is not frozen because that would cost a microsecond.

    Attributes:
        lr: learning rate of this key in this update.
        wd: weight decay of this key in this update.
        count: how many updates the slice has had, this one included.
        extent: the slice's.
        start: elements of the parameter before the piece.
        scalars: the rule's own numbers, one for each of `Optimizer.initial_scalars`, moved on for this update.
        norms: lengths of the whole parameter that `Optimizer.measure` has asked for, in its order.
        pusher: the rank of the worker whose push is this update of a dense array of a `dist_async` store; None in other
            stores, for rows of tables, and outside servers.
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
        """The same update of a piece that begins so much later."""
        start = self.start + elements
        return Step(self.lr, self.wd, self.count, self.extent, start, self.scalars, self.norms, self.pusher)

    def knowing(self, norms: tuple[float, ...]) -> Step:
        """The same update with these norms."""
        return Step(self.lr, self.wd, self.count, self.extent, self.start, self.scalars, norms, self.pusher)
