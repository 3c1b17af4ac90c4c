"""Policies: what workers exchange, and how often. For ``kv.create('dist', policy=…)``, ``--policy``, `KVDIST_POLICY`.

Without one, workers push a gradient in each step. With `local_sgd` and `diloco` each makes steps of its own in between,
and what its weights have changed by is what a `Trainer` pushes: traffic is divided by the number of steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

EVERY_MAX = 1_000_000
"""Steps between two exchanges: more is a mistake."""
FORMS = "local_sgd:STEPS, diloco:STEPS or diloco:STEPS,LEARNING_RATE,MOMENTUM"


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Workers make steps of their own, and exchange what these have changed; see `local_sgd` and `diloco`.

    Attributes:
        every: how many steps.
        learning_rate, momentum: of the outer optimizer, on the servers: SGD, with Nesterov's momentum if it has any.

    Raises:
        ValueError: a number is out of range.
    """

    every: int
    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if type(self.every) is not int or not 1 <= self.every <= EVERY_MAX:
            raise ValueError(
                f"{self.every} steps between two exchanges; it must be a whole number from 1 to {EVERY_MAX}"
            )
        if not (0 < self.learning_rate < math.inf and 0 <= self.momentum < 1):
            raise ValueError(
                f"the outer optimizer has learning rate {self.learning_rate} and momentum {self.momentum}; the rate"
                " must be above 0, and the momentum from 0 to below 1"
            )

    def __str__(self) -> str:
        numbers = (self.learning_rate, self.momentum)
        return f"local_sgd:{self.every}" if numbers == (1.0, 0.0) else f"diloco:{self.every},{numbers[0]},{numbers[1]}"


def local_sgd(every: int) -> LocalSteps:
    """Average the workers' weights after so many steps of each.

    Source: Stich, Local SGD Converges Fast and Communicates Little (2019).
    """
    return LocalSteps(every)


def diloco(every: int, learning_rate: float = 0.7, momentum: float = 0.9) -> LocalSteps:
    """Let an outer optimizer apply what so many steps of each worker have changed: SGD with Nesterov's momentum.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023); its numbers.
    """
    return LocalSteps(every, learning_rate, momentum)


def policy_from(text: str) -> LocalSteps:
    """A policy by its name, such as ``diloco:100``.

    Raises:
        ValueError: there is none of that name, or a number is out of range.
    """
    name, _, numbers = text.partition(":")
    try:
        every, *outer = map(float, numbers.split(","))
    except ValueError:
        raise ValueError(f"there is no policy {text!r}: write {FORMS}") from None
    if (name, len(outer)) not in (("local_sgd", 0), ("diloco", 0), ("diloco", 2)) or not every.is_integer():
        raise ValueError(f"there is no policy {text!r}: write {FORMS}")
    try:
        return local_sgd(int(every)) if name == "local_sgd" else diloco(int(every), *outer)
    except ValueError as error:
        raise ValueError(f"the policy {text!r} is not possible: {error}") from None
