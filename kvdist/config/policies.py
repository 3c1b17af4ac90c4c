"""Policies: what workers exchange, and how often. For ``kv.create('dist', policy=…)``, ``--policy``, `KVDIST_POLICY`.

Without one, workers push a gradient in each step. With `local_sgd` and `diloco` each makes steps of its own in between,
and what its weights have changed by is what a `Trainer` pushes: traffic is divided by the number of steps. With `quota`
workers push when all together have made a number of examples, however many each of them has made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

EVERY_MAX = 1_000_000
"""Steps between two exchanges: more is a mistake."""
QUOTA_MAX = 1 << 40
"""Examples of one version: more is a mistake."""
FORMS = (
    "local_sgd:STEPS, diloco:STEPS, diloco:STEPS,LEARNING_RATE,MOMENTUM, either with fragments=NUMBER, delay=STEPS"
    " or bits=16|8|4 behind it, quota:SAMPLES, quota:SAMPLES,exact, quota:SAMPLES,local_steps or"
    " quota:SAMPLES,local_steps,LEARNING_RATE,MOMENTUM"
)
WHOLE = 32
COMPRESSIONS = {WHOLE: None, 16: "fp16", 8: "int8", 4: "int4"}
"""Bits of a number that is pushed → the type of compression."""
NAMED = ("fragments", "delay", "bits")
"""Numbers of local steps that are written with their names."""


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Workers make steps of their own, and exchange what these have changed; see `local_sgd` and `diloco`.

    Attributes:
        every: how many steps.
        learning_rate, momentum: of the outer optimizer, on the servers: SGD, with Nesterov's momentum if it has any.
        fragments: how many groups of parameters are exchanged by turns, each once in so many steps.
        delay: how many steps a worker makes between the push of a fragment and taking the answer; None for as many as
            there are between two fragments, or none where there is one.
        bits: of each number that is pushed: 32, or 16, 8 or 4 with the rest kept for the next push.

    Raises:
        ValueError: a number is out of range.
    """

    every: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int | None = None
    bits: int = WHOLE

    def __post_init__(self) -> None:
        if type(self.every) is not int or not 1 <= self.every <= EVERY_MAX:
            raise ValueError(
                f"{self.every} steps between two exchanges; it must be a whole number from 1 to {EVERY_MAX}"
            )
        _require_outer(self.learning_rate, self.momentum)
        if type(self.fragments) is not int or not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"{self.fragments} fragments in {self.every} steps; each is exchanged at a step of its own, so it must"
                f" be a whole number from 1 to {self.every}"
            )
        if self.delay is not None and (type(self.delay) is not int or not 0 <= self.delay < self.every):
            raise ValueError(
                f"a delay of {self.delay} steps; a fragment is back before it leaves again, so it must be a whole"
                f" number from 0 to {self.every - 1}"
            )
        if self.bits not in COMPRESSIONS:
            raise ValueError(f"changes of {self.bits} bits; they can be of 32, 16, 8 or 4")

    @property
    def compression(self) -> dict[str, str] | None:
        """How the changes are compressed; see `KVStore.set_gradient_compression`. None for not at all."""
        kind = COMPRESSIONS[self.bits]
        return None if kind is None else {"type": kind}

    @property
    def steps_until_answer(self) -> int:
        """How many steps a worker makes between the push of a fragment and taking the answer."""
        if self.delay is None:
            return self.every // self.fragments if self.fragments > 1 else 0
        return self.delay

    def __str__(self) -> str:
        numbers = (self.learning_rate, self.momentum)
        own = f"local_sgd:{self.every}" if numbers == (1.0, 0.0) else f"diloco:{self.every},{numbers[0]},{numbers[1]}"
        own += f",fragments={self.fragments}" if self.fragments > 1 else ""
        own += "" if self.delay is None else f",delay={self.delay}"
        return own + (f",bits={self.bits}" if self.bits < WHOLE else "")


@dataclass(frozen=True, slots=True)
class Quota:
    """Workers exchange when all together have made a number of examples; see `quota`.

    Attributes:
        samples: how many, at least.
        local_steps: whether each worker makes steps of its own meanwhile; else it adds its gradients up.
        exact: whether workers wait for the new weights before they go on.
        learning_rate, momentum: of the outer optimizer of local steps, as of `LocalSteps`.

    Raises:
        ValueError: a number is out of range.
    """

    samples: int
    local_steps: bool = False
    exact: bool = False
    learning_rate: float = 1.0
    momentum: float = 0.0

    def __post_init__(self) -> None:
        if type(self.samples) is not int or not 1 <= self.samples <= QUOTA_MAX:
            raise ValueError(f"a quota of {self.samples} examples; it must be a whole number from 1 to {QUOTA_MAX}")
        if not self.local_steps and (self.learning_rate, self.momentum) != (1.0, 0.0):
            raise ValueError(
                "a quota of gradients has no outer optimizer: give the learning rate and momentum to the Trainer's"
                " optimizer, or set local_steps=True"
            )
        _require_outer(self.learning_rate, self.momentum)

    def __str__(self) -> str:
        words = [str(self.samples)] + ["exact"] * self.exact + ["local_steps"] * self.local_steps
        numbers = (self.learning_rate, self.momentum)
        words += [] if numbers == (1.0, 0.0) else map(str, numbers)
        return f"quota:{','.join(words)}"


TrainingPolicy: TypeAlias = LocalSteps | Quota


def _require_outer(learning_rate: float, momentum: float) -> None:
    if not (0 < learning_rate < math.inf and 0 <= momentum < 1):
        raise ValueError(
            f"the outer optimizer has learning rate {learning_rate} and momentum {momentum}; the rate"
            " must be above 0, and the momentum from 0 to below 1"
        )


def local_sgd(every: int, *, fragments: int = 1, delay: int | None = None, bits: int = WHOLE) -> LocalSteps:
    """Average the workers' weights after so many steps of each.

    Args:
        every: how many steps.
        fragments, delay, bits: as of `diloco`.

    Raises:
        ValueError: a number is out of range.

    Source: Stich, Local SGD Converges Fast and Communicates Little (2019).
    """
    return LocalSteps(every, fragments=fragments, delay=delay, bits=bits)


def diloco(
    every: int,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    *,
    fragments: int = 1,
    delay: int | None = None,
    bits: int = WHOLE,
) -> LocalSteps:
    """Let an outer optimizer apply what so many steps of each worker have changed: SGD with Nesterov's momentum.

    Args:
        every: how many steps.
        learning_rate, momentum: of the outer optimizer.
        fragments: exchange the parameters in so many groups of about equal bytes, one after the other, each once in
            `every` steps. The network is used all the time, rather than for everything at once.
        delay: steps that a worker makes between the push of a fragment and taking the answer, in which the exchange
            overlaps with computing; then it waits. What it has changed meanwhile is kept. By default as many as there
            are between two fragments, and none without fragments.
        bits: push changes in so many bits a number, 32, 16, 8 or 4; what that loses is kept, and is in the next push.
            Parameters must be float32 then.

    Raises:
        ValueError: a number is out of range.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023); its numbers.
    Douillard et al., Streaming DiLoCo with Overlapping Communication (2025).
    """
    return LocalSteps(every, learning_rate, momentum, fragments, delay, bits)


def quota(
    samples: int, *, local_steps: bool = False, exact: bool = False, learning_rate: float = 1.0, momentum: float = 0.0
) -> Quota:
    """Make a version of each `samples` examples, however many of them each worker has made: nobody waits for the slow.

    Workers add up the gradients of their micro-batches, or with `local_steps` make steps of their own optimizers. When
    all together have made `samples` examples, each pushes its mean at the end of its micro-batch, weighted by its
    examples. Meanwhile it goes on with the weights it has, and what it makes counts in the next version: a gradient is
    at most one version old. So each version has at least `samples` examples, and at most a micro-batch of each worker
    more. Every step says its examples, ``trainer.step(samples=n)``; the data come from a `QueueSampler`.

    Args:
        samples: examples of a version: the batch size that you would train with on one machine; of local steps 4 to 8
            times as many.
        local_steps: make steps with the worker's own optimizer, and exchange what they have changed.
        exact: wait for the new weights, so that no gradient is of older ones. Every version waits for the micro-batch
            that the slowest worker is at.
        learning_rate, momentum: of the outer optimizer of local steps, on the servers; the usual ones take the mean.

    Raises:
        ValueError: a number is out of range.

    Source: Tyurin and Richtárik, Optimal Time Complexities of Parallel Stochastic Optimization Methods (2023), Rennala
    SGD; hivemind's ``target_batch_size``.
    """
    return Quota(samples, bool(local_steps), bool(exact), learning_rate, momentum)


def policy_from(text: str) -> TrainingPolicy:
    """A policy by its name, such as ``diloco:100`` or ``quota:512,local_steps``.

    Raises:
        ValueError: there is none of that name, or a number is out of range.
    """
    name, _, rest = text.partition(":")
    words = rest.split(",")
    more = _named_numbers(words) if name in ("local_sgd", "diloco") else {}
    words = [word for word in words if word.partition("=")[0] not in more]
    known = {"exact", "local_steps"} if name == "quota" else set()
    flags = {word for word in words if word in known}
    try:
        first, *outer = [float(word) for word in words if word not in known]
    except ValueError:
        raise ValueError(f"there is no policy {text!r}: write {FORMS}") from None
    forms = {"local_sgd": (0,), "diloco": (0, 2), "quota": (0, 2)}
    if len(outer) not in forms.get(name, ()) or not first.is_integer() or len(flags) + 1 + len(outer) < len(words):
        raise ValueError(f"there is no policy {text!r}: write {FORMS}")
    try:
        if name == "quota":
            return Quota(int(first), "local_steps" in flags, "exact" in flags, *outer)
        return local_sgd(int(first), **more) if name == "local_sgd" else diloco(int(first), *outer, **more)
    except ValueError as error:
        raise ValueError(f"the policy {text!r} is not possible: {error}") from None


def _named_numbers(words: Sequence[str]) -> dict[str, int]:
    """The whole numbers behind names, such as ``fragments=4``; what is not one of them stays where it is."""
    pairs = (word.partition("=") for word in words)
    return {name: int(number) for name, _, number in pairs if name in NAMED and number.isascii() and number.isdigit()}
