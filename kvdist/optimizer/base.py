"""What an optimizer is: a name, checked numbers, and a rule for one array.

An optimizer travels to the servers as its description, a small table of names and numbers; never as code. So its
hyper-parameters are frozen: a later change here would never reach a server. What may change at any time are
`learning_rate`, `wd`, `rescale_grad` and the multipliers, because they travel with every push.

A rule is final: a class derives from `Optimizer` and from nothing below it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from kvdist.kernels.interface import Array, Equation
from kvdist.optimizer.schema import Value, finite_number, number, optional_number, schema_of

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
    }
)
"""Other frameworks' words, and ours."""


@dataclass(kw_only=True, eq=False)
class Optimizer(ABC):
    """Base of every optimizer; fields are the keywords of the constructor.

    Attributes:
        learning_rate: the step size, at least 0.
        wd: weight decay, at least 0.
        rescale_grad: each contribution is multiplied by it before it is summed.
        clip_gradient: elements of the summed gradient are cut to ±clip_gradient; None or 0 turns it off.
        lr_mult, wd_mult: factors of single keys, 1 where a key is absent.
    """

    name: ClassVar[str]
    """What users and descriptions call it: lower case."""

    learning_rate: float = number(0.01, at_least=0)
    wd: float = number(0.0, at_least=0)
    rescale_grad: float = number(1.0)
    clip_gradient: float | None = optional_number()

    def __post_init__(self) -> None:
        self.lr_mult: dict[Any, float] = {}
        self.wd_mult: dict[Any, float] = {}
        self._frozen = True

    @property
    @abstractmethod
    def state_names(self) -> tuple[str, ...]:
        """The arrays that the rule keeps for each slice, in the order in which it gets them. They start as zeros."""

    @abstractmethod
    def apply(
        self,
        weight: Array,
        grad: Array,
        out: Array,
        state: tuple[Array, ...],
        scratch: Array,
        lr: float,
        wd: float,
        count: int,
    ) -> None:
        """Write the new weight to `out` and the new state to `state`, element by element.

        All arrays are one-dimensional, of one length and one floating type, which the arithmetic must keep (Python
        floats do; float64 scalars of NumPy do not).

        Args:
            weight: the present weight; read only. It may be the same array as `out`.
            grad: the gradient: summed, rescaled and clipped. The rule may overwrite it.
            out: receives the new weight.
            state: one array for each of `state_names`; updated in place.
            scratch: for the rule's use; its content means nothing.
            lr: learning rate of this key in this update.
            wd: weight decay of this key in this update.
            count: how many updates this slice has had, this one included.
        """

    def equation(self, lr: float, wd: float, count: int) -> Equation | None:
        """What `apply` computes, for backends that have it in one piece; None: `apply` alone knows.

        Args:
            lr, wd, count: as of `apply`.
        """
        return None

    def __setattr__(self, attribute: str, value: object) -> None:
        if attribute.startswith("_"):
            object.__setattr__(self, attribute, value)
        elif attribute in _MULTIPLIERS:
            object.__setattr__(self, attribute, _checked_multipliers(attribute, value))
        else:
            object.__setattr__(self, attribute, self._checked(attribute, value))

    def _checked(self, attribute: str, value: object) -> float | bool | None:
        schemas = schema_of(type(self))
        if attribute not in schemas:
            hint = HINTS.get(attribute)
            advice = f"; here it is called {hint}" if hint else f"; it has {', '.join(schemas)}, {', '.join(LIVE[3:])}"
            raise AttributeError(f"{self.name} has no hyper-parameter {attribute}{advice}")
        if attribute not in LIVE and "_frozen" in vars(self):
            raise AttributeError(
                f"{attribute} cannot change after creation, because servers would never learn of it: create another "
                f"optimizer. {', '.join(LIVE)} may change at any time, they travel with every push"
            )
        return schemas[attribute].check(attribute, value)

    def set_lr_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the table of factors {key: number} on the learning rate; keys not in it have 1."""
        self.lr_mult = dict(multipliers)

    def set_wd_mult(self, multipliers: Mapping[Any, float]) -> None:
        """Replace the table of factors {key: number} on the weight decay; keys not in it have 1."""
        self.wd_mult = dict(multipliers)

    def lr_for(self, key: Hashable) -> float:
        """The learning rate of a key now."""
        return self.learning_rate * self.lr_mult.get(key, 1.0)

    def wd_for(self, key: Hashable) -> float:
        """The weight decay of a key now."""
        return self.wd * self.wd_mult.get(key, 1.0)

    def rule(self) -> dict[str, Value]:
        """What of the description can never change: everything but the live numbers."""
        return {name: number for name, number in self.describe().items() if name not in LIVE}

    def __str__(self) -> str:
        numbers = ", ".join(f"{name}={number!r}" for name, number in self.rule().items() if name != "name")
        return f"{self.name}({numbers})"

    def describe(self) -> dict[str, Value]:
        """The name and all hyper-parameters: what travels to the servers. Equal descriptions, equal optimizers.

        `learning_rate`, `wd` and `rescale_grad` stand in it with their present values; the multipliers do not.
        """
        values: dict[str, Value] = {"name": self.name}
        values.update((field, vars(self)[field]) for field in schema_of(type(self)))
        return values


def _checked_multipliers(attribute: str, value: object) -> dict[Any, float]:
    if not isinstance(value, Mapping):
        raise TypeError(f"{attribute} must be a dict of key to number, not {type(value).__name__}")
    return {key: finite_number(f"{attribute}[{key!r}]", factor) for key, factor in value.items()}
