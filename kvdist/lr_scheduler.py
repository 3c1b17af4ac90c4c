"""Learning rate schedules: functions of the number of updates, with the names, arguments and values of MXNet.

Pass a schedule to an optimizer (``lr_scheduler=``). It is sent to the servers in the description of the optimizer, as a
name and numbers, and counts the updates of each slice of a parameter on the server. So a worker that joins late, or an
asynchronous store with many workers, needs no count on the workers. Invariants:

* A schedule is frozen and has no state: the learning rate depends only on the count, so a resumed run continues at the
right rate.
* Counts begin with 1 at the first update, and include the steps of the warm-up, as in MXNet.

For any other function of the step, let each worker set the rate: ``trainer.set_learning_rate(f(step))``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar

from kvdist.schema import Value, number, schema_of, whole, whole_number, word

__all__ = ["CosineScheduler", "FactorScheduler", "LRScheduler", "MultiFactorScheduler", "PolyScheduler"]

STEPS_MAX = 32
"""Steps of a `MultiFactorScheduler`: each is an entry of the optimizer's description, which has room for 64."""

ENTRY = "lr_scheduler"
"""The entry of an optimizer's description that names its schedule; its numbers have this name and a dot before them."""


class LRScheduler(ABC):
    """Base class of schedules: ``schedule(count)`` is the learning rate of update number `count`.

    While count < warmup_steps, the rate is begin + (base − begin)·count/warmup_steps with ``warmup_mode='linear'``, and
    begin with ``'constant'``.

    Attributes:
        base_lr: rate after the warm-up, at least 0.
        warmup_steps: number of updates of the warm-up, at least 0.
        warmup_begin_lr: begin, from 0 to base_lr.
        warmup_mode: ``'linear'`` or ``'constant'``.
    """

    name: ClassVar[str]
    """Name in descriptions."""
    list_name: ClassVar[str] = ""
    """Name of the only field that is a list of numbers, if any."""

    base_lr: float
    warmup_steps: int
    warmup_begin_lr: float
    warmup_mode: str

    def __post_init__(self) -> None:
        for field, schema in schema_of(type(self), without=(self.list_name,)).items():
            object.__setattr__(self, field, schema.check(field, getattr(self, field)))
        if self.warmup_begin_lr > self.base_lr:
            raise ValueError(f"warmup_begin_lr is {self.warmup_begin_lr:g}, above base_lr, which is {self.base_lr:g}")
        self._check()

    def _check(self) -> None:  # noqa: B027  # most have nothing more to check
        """Refuse numbers that do not fit each other."""

    def __call__(self, num_update: int) -> float:
        """The learning rate of the update with this number; the first one is 1, and before it there is 0."""
        if num_update >= self.warmup_steps:
            return self._after_warmup(num_update)
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    @abstractmethod
    def _after_warmup(self, num_update: int) -> float:
        """The rate from the end of the warm-up on."""

    def with_base(self, base_lr: float) -> LRScheduler:
        """Return the same schedule with another base rate."""
        return replace(self, base_lr=base_lr)  # type: ignore[type-var]  # every schedule is a dataclass

    def describe(self) -> dict[str, Value]:
        """Return name and numbers as entries of an optimizer's description."""
        entries: dict[str, Value] = {ENTRY: self.name}
        for field in fields(self):  # type: ignore[arg-type]  # every schedule is a dataclass
            value = getattr(self, field.name)
            if isinstance(value, tuple):
                entries.update((f"{ENTRY}.{field.name}.{i}", one) for i, one in enumerate(value))
            else:
                entries[f"{ENTRY}.{field.name}"] = value
        return entries


@dataclass(frozen=True)
class FactorScheduler(LRScheduler):
    """Multiply the rate by `factor` every `step` updates, down to at least `stop_factor_lr`.

    After n = ⌈count/step⌉ − 1 drops the rate is max(base·factorⁿ, stop). A drop takes effect at the update after
    `step`, 2·step, …; with step 2, factor 0.5 and base 1 the updates 0, 1, … have 1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125.

    Args:
        step: number of updates between two drops, at least 1.
        factor: factor of a drop, from 0 to 1.
        stop_factor_lr: lower bound of the rate.
    """

    name: ClassVar[str] = "factor"

    step: int = whole(at_least=1)
    factor: float = number(1.0, at_least=0, at_most=1)
    stop_factor_lr: float = number(1e-8, at_least=0)
    base_lr: float = number(0.01, at_least=0)
    warmup_steps: int = whole(0, at_least=0)
    warmup_begin_lr: float = number(0.0, at_least=0)
    warmup_mode: str = word("linear", "constant")

    def _after_warmup(self, num_update: int) -> float:
        drops = -(-num_update // self.step) - 1
        return self.base_lr if drops < 1 else max(self.base_lr * self.factor**drops, self.stop_factor_lr)


@dataclass(frozen=True)
class MultiFactorScheduler(LRScheduler):
    """Multiply the rate by `factor` after each of the listed updates.

    With steps [2, 5], factor 0.1 and base 1 the updates 0, 1, … have 1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01.

    Args:
        step: at most 32 numbers of updates, from 1 on, increasing.
        factor: factor of a drop, from 0 to 1.
    """

    name: ClassVar[str] = "multifactor"
    list_name: ClassVar[str] = "step"

    step: Sequence[int]
    factor: float = number(1.0, at_least=0, at_most=1)
    base_lr: float = number(0.01, at_least=0)
    warmup_steps: int = whole(0, at_least=0)
    warmup_begin_lr: float = number(0.0, at_least=0)
    warmup_mode: str = word("linear", "constant")

    def _check(self) -> None:
        if not isinstance(self.step, list | tuple):
            raise TypeError(f"step must be a list of whole numbers, not {type(self.step).__name__}")
        steps = tuple(whole_number("a step", step) for step in self.step)
        if not 1 <= len(steps) <= STEPS_MAX:
            raise ValueError(f"step has {len(steps)} numbers; it takes 1 to {STEPS_MAX}")
        if any(later <= earlier for earlier, later in zip((0, *steps), steps, strict=False)):
            raise ValueError(f"step is {list(steps)}; its numbers must be at least 1 and increase")
        object.__setattr__(self, "step", steps)

    def _after_warmup(self, num_update: int) -> float:
        return self.base_lr * self.factor ** sum(num_update > step for step in self.step)


@dataclass(frozen=True)
class PolyScheduler(LRScheduler):
    """Decay the rate along a power: final + (base − final)·(1 − (count − warm-up)/(max_update − warm-up))^pwr.

    From `max_update` on the rate is constant.

    Args:
        max_update: number of the update with the final rate; above `warmup_steps`.
        pwr: exponent, at least 0.
        final_lr: final rate.
    """

    name: ClassVar[str] = "poly"

    max_update: int = whole(at_least=1)
    base_lr: float = number(0.01, at_least=0)
    pwr: float = number(2.0, at_least=0)
    final_lr: float = number(0.0, at_least=0)
    warmup_steps: int = whole(0, at_least=0)
    warmup_begin_lr: float = number(0.0, at_least=0)
    warmup_mode: str = word("linear", "constant")

    def _check(self) -> None:
        _require_after_warmup(self.max_update, self.warmup_steps)

    def _after_warmup(self, num_update: int) -> float:
        share = _share(num_update, self.warmup_steps, self.max_update)
        return self.final_lr + (self.base_lr - self.final_lr) * math.pow(1.0 - share, self.pwr)


@dataclass(frozen=True)
class CosineScheduler(LRScheduler):
    """Decay the rate along half a cosine: final + (base − final)·(1 + cos(π·share))/2.

    The share is (count − warm-up)/(max_update − warm-up). From `max_update` on the rate is final.

    Args:
        max_update: number of the update with the final rate; above `warmup_steps`.
        final_lr: final rate.
    """

    name: ClassVar[str] = "cosine"

    max_update: int = whole(at_least=1)
    base_lr: float = number(0.01, at_least=0)
    final_lr: float = number(0.0, at_least=0)
    warmup_steps: int = whole(0, at_least=0)
    warmup_begin_lr: float = number(0.0, at_least=0)
    warmup_mode: str = word("linear", "constant")

    def _check(self) -> None:
        _require_after_warmup(self.max_update, self.warmup_steps)

    def _after_warmup(self, num_update: int) -> float:
        share = _share(num_update, self.warmup_steps, self.max_update)
        return self.final_lr + (self.base_lr - self.final_lr) * (1.0 + math.cos(math.pi * share)) / 2.0


SCHEDULES: Mapping[str, type[LRScheduler]] = MappingProxyType(
    {cls.name: cls for cls in (FactorScheduler, MultiFactorScheduler, PolyScheduler, CosineScheduler)}
)
"""Every schedule that a description can name."""


def from_description(entries: Mapping[str, Any]) -> LRScheduler:
    """The schedule that `LRScheduler.describe` described, perhaps in another process.

    Args:
        entries: untrusted; the entry `ENTRY` and all that begin with it and a dot.

    Raises:
        ValueError: it is anything else than a schedule's entries; the message says what.
    """
    name = entries[ENTRY]
    cls = SCHEDULES.get(name) if type(name) is str else None
    if cls is None:
        raise ValueError(f"unknown schedule {name!r:.80} in a description: known are {', '.join(sorted(SCHEDULES))}")
    values: dict[str, Any] = {}
    listed: list[Any] = []
    for entry, value in entries.items():
        field = entry[len(ENTRY) + 1 :]
        if entry == f"{ENTRY}.{cls.list_name}.{len(listed)}":
            listed.append(value)
        elif entry != ENTRY:
            values[field] = value
    if cls.list_name:
        values[cls.list_name] = tuple(listed)
    if values.keys() != {field.name for field in fields(cls)}:  # type: ignore[arg-type]  # they are dataclasses
        raise ValueError(f"a description of the schedule {cls.name} has other entries: {', '.join(values)!s:.200}")
    try:
        return cls(**values)
    except TypeError as error:
        raise ValueError(f"in a description of the schedule {cls.name}: {error}") from None


def _require_after_warmup(max_update: int, warmup_steps: int) -> None:
    if max_update <= warmup_steps:
        raise ValueError(f"max_update is {max_update}, which is not after the warm-up of {warmup_steps} updates")


def _share(num_update: int, begin: int, end: int) -> float:
    """How far the way from `begin` to `end` is gone, at most 1."""
    return min(1.0, (num_update - begin) / (end - begin))


def given(value: object) -> LRScheduler | None:
    """A schedule as an optimizer takes it, or None.

    Raises:
        TypeError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, LRScheduler) and type(value) is SCHEDULES.get(value.name):
        return value
    raise TypeError(
        f"lr_scheduler must be a schedule of kvdist.lr_scheduler, not {type(value).__name__}: others cannot travel to"
        " servers. Where the worker knows the rate, set learning_rate before each step instead"
    )
