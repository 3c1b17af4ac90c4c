"""Policies: what workers exchange, and how often. For ``kv.create('dist', policy=…)``, ``--policy``, `KVDIST_POLICY`.

Without one, workers push a gradient in each step. With `local_sgd` and `diloco` each makes steps of its own in between,
and what its weights have changed by is what a `Trainer` pushes: traffic is divided by the number of steps. With `quota`
and `buffered` workers push when all together have made a number of examples or steps, however many each of them has
made; with `backup`, and with a ``quorum`` of local steps, when enough of them have something. With `asynchronous` and
`ssp` each push is a version. A policy is a class here and a row of `POLICIES`.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, TypeAlias

from kvdist.config.suggestions import did_you_mean

EVERY_MAX = 1_000_000
"""Steps between two exchanges: more is a mistake."""
QUOTA_MAX = 1 << 40
"""Examples or steps of one version: more is a mistake."""
WORKERS_MAX = 1 << 16
"""Workers that a policy counts: more is a mistake."""
DELAY_MAX = 1 << 32
"""Versions that a gradient may be late: more is a mistake."""
WHOLE = 32
COMPRESSIONS = {WHOLE: None, 16: "fp16", 8: "int8", 4: "int4"}
"""Bits of a number that is pushed → the type of compression."""
DAMPINGS: dict[str, Callable[[int], float]] = {
    "none": lambda _: 1.0,
    "sqrt": lambda delay: 1 / math.sqrt(1 + delay),
    "inverse": lambda delay: 1 / (1 + delay),
}
"""How a gradient counts that is so many versions late."""


class Pace(enum.Enum):
    """When workers push."""

    TOGETHER = enum.auto()
    """All after the same number of steps."""
    OWN = enum.auto()
    """All when a server says so, each with what it has by then."""
    ALONE = enum.auto()
    """Each by itself; every push is a version."""


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
        quorum: how many workers must have made their steps; None for all of them.

    Raises:
        ValueError: a number is out of range.
    """

    every: int
    learning_rate: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int | None = None
    bits: int = WHOLE
    quorum: int | None = None

    @property
    def pace(self) -> Pace:
        """When workers push."""
        return Pace.TOGETHER if self.quorum is None else Pace.OWN

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
        _require_bits(self.bits)
        if self.quorum is not None:
            _require_whole("a quorum of", self.quorum, "workers", 1, WORKERS_MAX)
            if self.fragments > 1 or self.delay is not None:
                raise ValueError(
                    "a quorum exchanges all parameters when enough workers are ready, and nobody waits for the answer:"
                    " leave fragments and delay out, or the quorum"
                )

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
        own += _bits_word(self.bits)
        return own + ("" if self.quorum is None else f",quorum={self.quorum}")


@dataclass(frozen=True, slots=True)
class Quota:
    """Workers exchange when all together have made a number of examples; see `quota`.

    Attributes:
        samples: how many, at least.
        local_steps: whether each worker makes steps of its own meanwhile; else it adds its gradients up.
        exact: whether workers wait for the new weights before they go on.
        learning_rate, momentum: of the outer optimizer of local steps, as of `LocalSteps`.
        bits: of each number that is pushed, as of `LocalSteps`.

    Raises:
        ValueError: a number is out of range.
    """

    pace: ClassVar = Pace.OWN
    samples: int
    local_steps: bool = False
    exact: bool = False
    learning_rate: float = 1.0
    momentum: float = 0.0
    bits: int = WHOLE

    def __post_init__(self) -> None:
        _require_whole("a quota of", self.samples, "examples", 1, QUOTA_MAX)
        if not self.local_steps and (self.learning_rate, self.momentum) != (1.0, 0.0):
            raise ValueError(
                "a quota of gradients has no outer optimizer: give the learning rate and momentum to the Trainer's"
                " optimizer, or set local_steps=True"
            )
        _require_outer(self.learning_rate, self.momentum)
        _require_bits(self.bits)

    def __str__(self) -> str:
        words = [str(self.samples)] + ["exact"] * self.exact + ["local_steps"] * self.local_steps
        numbers = (self.learning_rate, self.momentum)
        words += [] if numbers == (1.0, 0.0) else map(str, numbers)
        return f"quota:{','.join(words)}{_bits_word(self.bits)}"


@dataclass(frozen=True, slots=True)
class Buffered:
    """Workers exchange when all together have made a number of steps; see `buffered`.

    Attributes:
        steps: how many, at least.
        damping: how a late gradient counts: ``'none'``, ``'sqrt'`` or ``'inverse'``.

    Raises:
        ValueError: a number is out of range, or there is no such damping.
    """

    pace: ClassVar = Pace.OWN
    steps: int
    damping: str = "sqrt"

    def __post_init__(self) -> None:
        _require_whole("versions of", self.steps, "steps", 1, QUOTA_MAX)
        _require_damping(self.damping)

    def __str__(self) -> str:
        return f"buffered:{self.steps},{self.damping}"


@dataclass(frozen=True, slots=True)
class Backup:
    """A version is made of the first workers that have a gradient; see `backup`.

    Attributes:
        spare: how many workers it does without.

    Raises:
        ValueError: the number is out of range.
    """

    pace: ClassVar = Pace.OWN
    spare: int

    def __post_init__(self) -> None:
        _require_whole("", self.spare, "backup workers", 1, WORKERS_MAX)

    def __str__(self) -> str:
        return f"backup:{self.spare}"


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Each gradient makes a version, unless it is too old; see `asynchronous`.

    Attributes:
        max_delay: of how many versions older weights a gradient may be; None: of any.
        damping: how a late gradient counts: ``'none'``, ``'sqrt'`` or ``'inverse'``.

    Raises:
        ValueError: a number is out of range, or there is no such damping.
    """

    pace: ClassVar = Pace.ALONE
    max_delay: int | None = None
    damping: str = "none"

    def __post_init__(self) -> None:
        if self.max_delay is not None:
            _require_whole("a delay of at most", self.max_delay, "versions", 0, DELAY_MAX)
        _require_damping(self.damping)

    def __str__(self) -> str:
        words = ([] if self.max_delay is None else [str(self.max_delay)]) + [self.damping]
        return f"async:{','.join(words)}"


@dataclass(frozen=True, slots=True)
class StaleSynchronous:
    """Each gradient makes a version, and no worker is far ahead of the slowest; see `ssp`.

    Attributes:
        lead: by how many steps a worker may be ahead.

    Raises:
        ValueError: the number is out of range.
    """

    pace: ClassVar = Pace.ALONE
    lead: int

    def __post_init__(self) -> None:
        _require_whole("a lead of at most", self.lead, "steps", 0, DELAY_MAX)

    def __str__(self) -> str:
        return f"ssp:{self.lead}"


TrainingPolicy: TypeAlias = LocalSteps | Quota | Buffered | Backup | Asynchronous | StaleSynchronous


def updates_between(policy: TrainingPolicy | None) -> bool:
    """Whether workers make steps of their own, by a policy."""
    return isinstance(policy, LocalSteps) or (isinstance(policy, Quota) and policy.local_steps)


def _require_whole(before: str, number: object, unit: str, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        found = f"{before} {number} {unit}".strip()
        raise ValueError(f"{found}; it must be a whole number from {least} to {most}")


def _require_bits(bits: object) -> None:
    if bits not in COMPRESSIONS:
        raise ValueError(f"numbers of {bits} bits; they can be of 32, 16, 8 or 4")


def _bits_word(bits: int) -> str:
    return f",bits={bits}" if bits < WHOLE else ""


def _require_damping(damping: object) -> None:
    if damping not in DAMPINGS:
        raise ValueError(f"damping is {damping!r}; it must be one of {', '.join(map(repr, DAMPINGS))}")


def _require_outer(learning_rate: float, momentum: float) -> None:
    if not (0 < learning_rate < math.inf and 0 <= momentum < 1):
        raise ValueError(
            f"the outer optimizer has learning rate {learning_rate} and momentum {momentum}; the rate"
            " must be above 0, and the momentum from 0 to below 1"
        )


def local_sgd(
    every: int, *, fragments: int = 1, delay: int | None = None, bits: int = WHOLE, quorum: int | None = None
) -> LocalSteps:
    """Average the workers' weights after so many steps of each.

    Args:
        every: steps of each worker.
        fragments, delay, bits, quorum: as of `diloco`.

    Raises:
        ValueError: a number is out of range.

    Source: Stich, Local SGD Converges Fast and Communicates Little (2019).
    """
    return LocalSteps(every, fragments=fragments, delay=delay, bits=bits, quorum=quorum)


def diloco(
    every: int,
    learning_rate: float = 0.7,
    momentum: float = 0.9,
    *,
    fragments: int = 1,
    delay: int | None = None,
    bits: int = WHOLE,
    quorum: int | None = None,
) -> LocalSteps:
    """Let an outer optimizer apply what so many steps of each worker have changed: SGD with Nesterov's momentum.

    Args:
        every: steps of each worker, with a `quorum` at least so many.
        learning_rate, momentum: of the outer optimizer.
        fragments: exchange the parameters in so many groups of about equal bytes, one after the other, each once in
            `every` steps. The network is used all the time, rather than for everything at once.
        delay: steps that a worker makes between the push of a fragment and taking the answer, in which the exchange
            overlaps with computing; then it waits. What it has changed meanwhile is kept. By default as many as there
            are between two fragments, and none without fragments.
        bits: push changes in so many bits a number, 32, 16, 8 or 4; what that loses is kept, and is in the next push.
            Parameters must be float32 then.
        quorum: exchange when so many workers have made their steps, rather than all of them. The others have a little
            longer, which is measured by how far apart the workers came lately. What a worker has that is late counts in
            the next exchange, weighted by its examples, so each step says them: ``trainer.step(samples=n)``. No worker
            waits: each makes steps until the exchange begins, and those that it makes meanwhile are kept. None: all are
            awaited, and wait. Without `fragments` and `delay`.

    Raises:
        ValueError: a number is out of range.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023); its numbers.
    Douillard et al., Streaming DiLoCo with Overlapping Communication (2025). The quorum and its grace are those of
    Decoupled DiLoCo (2026).
    """
    return LocalSteps(every, learning_rate, momentum, fragments, delay, bits, quorum)


def quota(
    samples: int,
    *,
    local_steps: bool = False,
    exact: bool = False,
    learning_rate: float = 1.0,
    momentum: float = 0.0,
    bits: int = WHOLE,
) -> Quota:
    """Make a version of each `samples` examples, however many of them each worker has made: nobody waits for the slow.

    Workers add up the gradients of their micro-batches, or with `local_steps` make steps of their own optimizers. When
    all together have made `samples` examples, each pushes its mean at the end of its micro-batch, weighted by its
    examples. Meanwhile it goes on with the weights it has, and what it makes counts in the next version. So a gradient
    is of weights that are at most one version old, and as many more as are made during its micro-batch; and each
    version has at least `samples` examples, and at most a micro-batch of each worker more. Every step says its
    examples, ``trainer.step(samples=n)``; the data come from a `QueueSampler`.

    Args:
        samples: examples of a version: the batch size that you would train with on one machine; of local steps 4 to 8
            times as many.
        local_steps: make steps with the worker's own optimizer, and exchange what they have changed.
        exact: wait for the new weights, so that no gradient is of older ones. Every version waits for the micro-batch
            that the slowest worker is at.
        learning_rate, momentum: of the outer optimizer of local steps, on the servers; the usual ones take the mean.
        bits: push changes, or gradients, in so many bits a number, as of `diloco`.

    Raises:
        ValueError: a number is out of range.

    Source: Tyurin and Richtárik, Optimal Time Complexities of Parallel Stochastic Optimization Methods (2023), Rennala
    SGD; hivemind's ``target_batch_size``.
    """
    return Quota(samples, bool(local_steps), bool(exact), learning_rate, momentum, bits)


def buffered(steps: int, *, damping: str = "sqrt") -> Buffered:
    """Make a version of each `steps` steps, whichever workers have made them: a `quota` that is counted in steps.

    A gradient of older weights is kept, and multiplied by 1/√(1 + τ) with the default `damping` if it is of those τ
    versions before. Every step says its examples, ``trainer.step(samples=n)``.

    Args:
        steps: how many.
        damping: ``'sqrt'``, ``'inverse'`` for 1/(1 + τ), or ``'none'``.

    Raises:
        ValueError: a number is out of range, or there is no such damping.

    Source: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation (2022), FedBuff.
    """
    return Buffered(steps, damping)


def backup(spare: int) -> Backup:
    """Make a version of the first gradients: of all workers but `spare`, whose gradients are dropped when they come.

    Against pauses that meet one worker and then another: a machine that is always slow is only left out, so use `quota`
    for that. Each version is exact, a step of one batch of the examples in it. Who is late goes on with the new weights
    at once; `trainer.samples_dropped` counts its examples. Data have to come from a `QueueSampler`, or those of a slow
    worker are seen seldom. Every step says its examples, ``trainer.step(samples=n)``.

    Args:
        spare: how many of the workers that are there, fewer than all of them.

    Raises:
        ValueError: the number is out of range.

    Source: Chen et al., Revisiting Distributed Synchronous SGD (2016).
    """
    return Backup(spare)


def asynchronous(max_delay: int | None = None, *, damping: str = "none") -> Asynchronous:
    """Let each gradient make a version at once, as the store ``dist_async``, but none that is too old.

    The delay τ of a gradient is how many gradients of other workers were let through since its worker got its weights.
    One server counts it for all, before the gradient leaves: a step has one small message more.

    Args:
        max_delay: drop gradients with a greater delay; `trainer.samples_dropped` counts their examples. With p workers
            a delay of p - 1 is usual, and a slow worker has more. None: drop none.
        damping: multiply a gradient by 1/√(1 + τ) (``'sqrt'``) or 1/(1 + τ) (``'inverse'``), so that one learning rate
            goes with many numbers of workers.

    Raises:
        ValueError: a number is out of range, or there is no such damping.

    Source: Zhang et al., Staleness-aware Async-SGD (2016); Maranjyan et al., Ringmaster ASGD (2025), for the limit.
    """
    return Asynchronous(max_delay, damping)


def ssp(lead: int) -> StaleSynchronous:
    """Let no worker be more than `lead` steps ahead of the slowest: no gain against a machine that is always slow.

    In the long run all go at its pace; only pauses that pass, and are shorter than `lead` steps, hold nobody up. Each
    gradient makes a version at once, as on ``dist_async``. A worker with c pushes waits in `trainer.step` until every
    other has made c - lead, and then gets weights with all those. Workers that are lost, have left or have no more
    examples of a `QueueSampler` are not waited for.

    Args:
        lead: in steps, 0 or more.

    Raises:
        ValueError: the number is out of range.

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server (2013).
    """
    return StaleSynchronous(lead)


# Policies as text.


def _local_sgd(every: int, **named: int) -> LocalSteps:
    return local_sgd(every, **named)


def _diloco(every: int, *outer: float, **named: int) -> LocalSteps:
    return diloco(every, *_outer(outer, 0.7, 0.9), **named)


def _quota(samples: int, *outer: float, local_steps: bool = False, exact: bool = False, bits: int = WHOLE) -> Quota:
    return Quota(samples, local_steps, exact, *_outer(outer, 1.0, 0.0), bits)


def _asynchronous(max_delay: int | None = None, **damping: bool) -> Asynchronous:
    return Asynchronous(max_delay, *damping)


def _buffered(steps: int, *, local_steps: bool = False, **damping: bool) -> Buffered:
    if local_steps:
        raise ValueError(
            "it adds gradients up; for local steps take quota:SAMPLES,local_steps, a version of so many examples, or"
            " local_sgd:STEPS,quorum=WORKERS, a version of so many workers' steps"
        )
    return Buffered(steps, *damping)


def _outer(given: tuple[float, ...], rate: float, momentum: float) -> tuple[float, float]:
    """Learning rate and momentum, both or none of which are given."""
    if len(given) not in (0, 2):
        raise TypeError
    rate, momentum = given or (rate, momentum)
    return float(rate), float(momentum)


class _TextForm(NamedTuple):
    """How the text of a policy is read."""

    of: Callable[..., TrainingPolicy | None]
    """Takes the numbers, in order, then words as ``word=True``, and ``word=number``. A `TypeError` or `ValueError`
    means that they do not fit."""
    forms: str


_MORE = "[,fragments=NUMBER][,delay=STEPS][,bits=16|8|4][,quorum=WORKERS]"
POLICIES = {
    "sync": _TextForm(lambda: None, "sync"),
    "local_sgd": _TextForm(_local_sgd, f"local_sgd:STEPS{_MORE}"),
    "diloco": _TextForm(_diloco, f"diloco:STEPS[,LEARNING_RATE,MOMENTUM]{_MORE}"),
    "quota": _TextForm(_quota, "quota:SAMPLES[,exact][,local_steps][,LEARNING_RATE,MOMENTUM][,bits=16|8|4]"),
    "buffered": _TextForm(_buffered, "buffered:STEPS[,none|sqrt|inverse]"),
    "backup": _TextForm(Backup, "backup:WORKERS"),
    "async": _TextForm(_asynchronous, "async:[MAX_DELAY][,none|sqrt|inverse]"),
    "ssp": _TextForm(StaleSynchronous, "ssp:STEPS"),
}
FORMS = " or ".join([", ".join([one.forms for one in POLICIES.values()][:-1]), [*POLICIES.values()][-1].forms])


def policy_from(text: str) -> TrainingPolicy | None:
    """A policy by its name, such as ``diloco:100`` or ``quota:512,local_steps``; None for ``sync``: each step is one of
    all workers, as without a policy.

    Raises:
        ValueError: there is none of that name, or a number is out of range.
    """
    name, _, rest = text.partition(":")
    positional: list[float] = []
    named: dict[str, float | bool] = {}
    try:
        for word in rest.split(",") if rest else ():
            key, is_named, value = word.rpartition("=")
            if is_named:
                named[key] = _number(value)
            elif word.isidentifier():
                named[word] = True
            else:
                positional.append(_number(word))
        reader = POLICIES[name].of
    except KeyError:
        near = did_you_mean(name, {known: form.forms for known, form in POLICIES.items()})
        raise ValueError(f"there is no policy {text!r}: {near or f'write {FORMS}'}") from None
    except ValueError:
        raise ValueError(f"there is no policy {text!r}: write {FORMS}") from None
    try:
        return reader(*positional, **named)
    except TypeError:
        raise ValueError(f"there is no policy {text!r}: write {FORMS}") from None
    except ValueError as error:
        raise ValueError(f"the policy {text!r} is not possible: {error}; write {POLICIES[name].forms}") from None


def _number(word: str) -> float:
    try:
        return int(word)
    except ValueError:
        return float(word)
