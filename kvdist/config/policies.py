"""Policies: what workers exchange, and how often. For ``kv.create('dist', policy=…)``, ``--policy``, `KVDIST_POLICY`.

Without a policy, workers push a gradient in each step. With `local_sgd` and `diloco` each worker makes local steps in
between, and a `Trainer` pushes by how much the weights have changed: traffic is divided by the number of steps. With
`quota` workers push when all together have processed a number of examples, however many each of them has processed;
with a ``quorum`` of local steps, when enough workers have reached it. With `asynchronous` each push is a version. A
policy is a class, whose fields state how a text has them, and a row of `POLICIES`.
"""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, TypeAlias

from kvdist.config.suggestions import did_you_mean

EVERY_MAX = 1_000_000
"""Steps between two exchanges: more is a mistake."""
QUOTA_MAX = 1 << 40
"""Examples of a version: more is a mistake."""
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
    """All at the request of a server, each with its gradients or changes by then."""
    ALONE = enum.auto()
    """Each by itself; every push is a version."""


KINDS = ("first", "flag", "outer", "named", "word")
"""How a text has a field, in the order of a text: its value first, its name if it is true, its value beside that of the
other outer hyper-parameter, ``name=value`` if it is not the default, or its value always."""


def _part(kind: str, form: str, default: Any = MISSING) -> Any:
    """A field of a policy: its kind, and how messages show it in the form of a text."""
    return field(default=default, metadata={"kind": kind, "form": form})


def _parts(policy: Any) -> list[tuple[Field[Any], str]]:
    """The fields of a policy with their kinds, in the order of a text."""
    parts = [(each, each.metadata["kind"]) for each in fields(policy)]
    return sorted(parts, key=lambda part: (KINDS.index(part[1]), part[0].name * (part[1] == "flag")))


def _text(policy: Any) -> str:
    parts = [(each, kind, getattr(policy, each.name)) for each, kind in _parts(policy)]
    has_outer = any(value != each.default for each, kind, value in parts if kind == "outer")
    names = [name for name, (cls, outer) in POLICIES.items() if cls is type(policy) and (outer or not has_outer)]
    words = []
    for each, kind, value in parts:
        if has_outer if kind == "outer" else kind == "word" or value not in (each.default, None):
            words.append({"flag": each.name, "named": f"{each.name}={value}"}.get(kind, str(value)))
    return f"{names[0]}:{','.join(words)}"


@dataclass(frozen=True, slots=True)
class LocalSteps:
    """Policy: each worker makes local steps, then all exchange the changes. See `local_sgd` and `diloco`.

    Attributes:
        every, learning_rate, momentum, fragments, delay, bits, quorum: as in `diloco`.

    Raises:
        ValueError: a number is out of range.
    """

    every: int = _part("first", ":STEPS")
    learning_rate: float = _part("outer", "[,LEARNING_RATE,MOMENTUM]", 1.0)
    momentum: float = _part("outer", "", 0.0)
    fragments: int = _part("named", "[,fragments=NUMBER]", 1)
    delay: int | None = _part("named", "[,delay=STEPS]", None)
    bits: int = _part("named", "[,bits=16|8|4]", WHOLE)
    quorum: int | None = _part("named", "[,quorum=WORKERS]", None)
    __str__ = _text

    @property
    def pace(self) -> Pace:
        """Timing of the pushes."""
        return Pace.TOGETHER if self.quorum is None else Pace.OWN

    def __post_init__(self) -> None:
        _require_whole("", self.every, "steps between two exchanges", 1, EVERY_MAX)
        _require_outer(self.learning_rate, self.momentum)
        if type(self.fragments) is not int or not 1 <= self.fragments <= self.every:
            raise ValueError(
                f"{self.fragments!r} fragments in {self.every} steps; each is exchanged at a step of its own, so it"
                f" must be a whole number from 1 to {self.every}"
            )
        if self.delay is not None and (type(self.delay) is not int or not 0 <= self.delay < self.every):
            raise ValueError(
                f"a delay of {self.delay!r} steps; a fragment is back before it leaves again, so it must be a whole"
                f" number from 0 to {self.every - 1}"
            )
        _require_bits(self.bits)
        if self.quorum is not None:
            _require_whole("a quorum of", self.quorum, "workers", 1, WORKERS_MAX)
            if self.fragments > 1 or self.delay is not None:
                raise ValueError(
                    "a quorum exchanges all parameters at once, and no worker waits for the result, so fragments and"
                    " delay have no meaning: leave them out, or the quorum"
                )

    @property
    def steps_until_answer(self) -> int:
        """Number of steps between the push of a fragment and the use of the result."""
        if self.delay is None:
            return self.every // self.fragments if self.fragments > 1 else 0
        return self.delay


@dataclass(frozen=True, slots=True)
class Quota:
    """Policy: the workers exchange when all together have processed a number of examples. See `quota`.

    Attributes:
        samples, local_steps, exact, learning_rate, momentum, bits: as in `quota`.

    Raises:
        ValueError: a number is out of range.
    """

    pace: ClassVar = Pace.OWN
    samples: int = _part("first", ":SAMPLES")
    local_steps: bool = _part("flag", "[,local_steps]", False)
    exact: bool = _part("flag", "[,exact]", False)
    learning_rate: float = _part("outer", "[,LEARNING_RATE,MOMENTUM]", 1.0)
    momentum: float = _part("outer", "", 0.0)
    bits: int = _part("named", "[,bits=16|8|4]", WHOLE)
    __str__ = _text

    def __post_init__(self) -> None:
        _require_whole("a quota of", self.samples, "examples", 1, QUOTA_MAX)
        if not self.local_steps and (self.learning_rate, self.momentum) != (1.0, 0.0):
            raise ValueError(
                "a quota of gradients has no outer optimizer: give the learning rate and momentum to the Trainer's"
                " optimizer, or set local_steps=True"
            )
        _require_outer(self.learning_rate, self.momentum)
        _require_bits(self.bits)


@dataclass(frozen=True, slots=True)
class Asynchronous:
    """Policy: each gradient is an update, unless it is too old. See `asynchronous`.

    Attributes:
        max_delay, damping: as in `asynchronous`.

    Raises:
        ValueError: a number is out of range, or `damping` is unknown.
    """

    pace: ClassVar = Pace.ALONE
    max_delay: int | None = _part("first", ":[MAX_DELAY]", None)
    damping: str = _part("word", "[,none|sqrt|inverse]", "none")
    __str__ = _text

    def __post_init__(self) -> None:
        if self.max_delay is not None:
            _require_whole("a delay of at most", self.max_delay, "versions", 0, DELAY_MAX)
        if self.damping not in DAMPINGS:
            known = ", ".join(map(repr, DAMPINGS))
            raise ValueError(f"damping is {self.damping!r}; it must be one of {known}")


TrainingPolicy: TypeAlias = LocalSteps | Quota | Asynchronous


def updates_between(policy: TrainingPolicy | None) -> bool:
    """Whether workers make local steps under a policy."""
    return isinstance(policy, LocalSteps) or (isinstance(policy, Quota) and policy.local_steps)


def _require_whole(before: str, number: object, unit: str, least: int, most: int) -> None:
    if type(number) is not int or not least <= number <= most:
        found = f"{before} {number!r} {unit}".strip()
        raise ValueError(f"{found}; it must be a whole number from {least} to {most}")


def _require_bits(bits: object) -> None:
    if bits not in COMPRESSIONS:
        raise ValueError(f"numbers of {bits!r} bits; they can be of 32, 16, 8 or 4")


def _require_outer(learning_rate: float, momentum: float) -> None:
    are_numbers = isinstance(learning_rate, float | int) and isinstance(momentum, float | int)
    if not (are_numbers and 0 < learning_rate < math.inf and 0 <= momentum < 1):
        raise ValueError(
            f"the outer optimizer has learning rate {learning_rate!r} and momentum {momentum!r}; the rate"
            " must be above 0, and the momentum from 0 to below 1"
        )


def local_sgd(
    every: int, *, fragments: int = 1, delay: int | None = None, bits: int = WHOLE, quorum: int | None = None
) -> LocalSteps:
    """Return a policy that averages the weights of the workers after every `every` steps of each.

    Args:
        every: number of steps of each worker between two averages.
        fragments, delay, bits, quorum: as in `diloco`.

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
    """Return a policy of local steps with an outer optimizer: SGD with Nesterov's momentum, on the servers.

    Each worker makes `every` steps with its local optimizer. Then the outer optimizer applies the mean of the workers'
    weight changes, as if it were a gradient.

    Args:
        every: number of steps of each worker between two exchanges; with `quorum`, the least number.
        learning_rate, momentum: hyper-parameters of the outer optimizer.
        fragments: number of groups of parameters, of about equal bytes. They are exchanged in turn, each once in
            `every` steps, so that the network load is even.
        delay: number of steps between the push of a fragment and the use of the result; the exchange overlaps with
            these steps, and the worker waits for it at their end. Changes of the weights in between are kept. None for
            the number of steps between the pushes of two successive fragments, or 0 without fragments.
        bits: bits per pushed number, 32, 16, 8 or 4. The rounding error is added to the next push. Below 32 all
            parameters must be float32.
        quorum: number of workers whose steps start an exchange; None for all, which then wait for each other. With a
            quorum no worker waits: each goes on with its steps until the exchange begins, and steps during the exchange
            are kept. Late workers get a grace period, derived from how far apart the workers arrived lately. What a
            worker pushes after that counts in the next exchange. Pushes are weighted by examples, which
            `Trainer.batches` counts with a `QueueSampler`; without it pass them, ``trainer.step(samples=n)``. Not with
            `fragments` or `delay`.

    Raises:
        ValueError: a number is out of range.

    Source: Douillard et al., DiLoCo: Distributed Low-Communication Training of Language Models (2023), with its
    defaults. Douillard et al., Streaming DiLoCo with Overlapping Communication (2025). Quorum and grace: Decoupled
    DiLoCo (2026).
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
    """Return a policy for machines of unequal speed: a new version of the weights after every `samples` examples.

    The examples of all workers count together, and no worker waits for a slow worker. Each worker accumulates the
    gradients of its micro-batches, or with `local_steps` makes steps of its local optimizer. When the quota is reached,
    each worker pushes the mean of its gradients, or with `local_steps` the change of its weights, weighted by its
    examples, and goes on with its current weights; later examples count in the next version.

    A gradient is therefore computed with weights that are at most a version old, plus the number of versions during
    its micro-batch. A version has at least `samples` examples, and at most an additional micro-batch per worker. Use a
    `QueueSampler` for the data: then `Trainer.batches` counts the examples of each step. In a loop without `batches`
    pass their number, ``trainer.step(samples=n)``.

    Args:
        samples: examples per version: the batch size for a single machine, or 4 to 8 times as many with `local_steps`.
        local_steps: make steps with a local optimizer on each worker, and exchange the resulting changes.
        exact: wait for the new weights, so that no gradient uses older weights. Then every version waits for the
            current micro-batch of the slowest worker.
        learning_rate, momentum: hyper-parameters of the outer optimizer for local steps, on the servers; the defaults
            take the mean.
        bits: bits per pushed number, as in `diloco`.

    Raises:
        ValueError: a number is out of range.

    Source: Tyurin and Richtárik, Optimal Time Complexities of Parallel Stochastic Optimization Methods (2023), Rennala
    SGD; ``target_batch_size`` of hivemind.
    """
    return Quota(samples, bool(local_steps), bool(exact), learning_rate, momentum, bits)


def asynchronous(max_delay: int | None = None, *, damping: str = "none") -> Asynchronous:
    """Return a policy in which each gradient updates the weights at once, as on ``dist_async``, unless it is too old.

    The delay τ of a gradient is the number of gradients of other workers that were applied since its worker fetched its
    weights. A single server counts it, before the gradient is sent, which costs an additional small message per step.

    Args:
        max_delay: greatest delay; gradients with a greater delay are dropped, and `trainer.samples_dropped` counts
            their examples. With p workers a delay of p - 1 is normal, and a slow worker has more. None: no limit.
        damping: ``'sqrt'`` multiplies a gradient by 1/√(1 + τ), ``'inverse'`` by 1/(1 + τ), ``'none'`` by 1. With
            damping the same learning rate suits different numbers of workers.

    Raises:
        ValueError: a number is out of range, or `damping` is unknown.

    Source: Zhang et al., Staleness-aware Async-SGD (2016); the limit: Maranjyan et al., Ringmaster ASGD (2025).
    """
    return Asynchronous(max_delay, damping)


# Policies as text.

POLICIES: dict[str, tuple[Any, tuple[float, float] | None]] = {
    "sync": (None, None),
    "local_sgd": (LocalSteps, None),
    "diloco": (LocalSteps, (0.7, 0.9)),
    "quota": (Quota, (1.0, 0.0)),
    "async": (Asynchronous, None),
}
"""Name of a policy → its class, and learning rate and momentum of a text without them; None if no text has them."""


def _form(name: str, cls: Any, outer: tuple[float, float] | None) -> str:
    """How messages show the text of a policy."""
    parts = _parts(cls) if cls else []
    return name + "".join(each.metadata["form"] for each, kind in parts if outer or kind != "outer")


def _read(name: str, numbers: list[float], words: Mapping[str, float]) -> TrainingPolicy | None:
    """The policy of a text; raises a `TypeError` for a word too many or too few, a `ValueError` for a wrong value."""
    cls, outer = POLICIES[name]
    kinds = {each.name: kind for each, kind in _parts(cls)} if cls else {}
    values: dict[str, Any] = dict(zip((name for name, kind in kinds.items() if kind == "first"), numbers, strict=False))
    numbers = numbers[len(values) :]
    if len(numbers) not in ((0, 2) if outer else (0,)):
        raise TypeError
    values |= zip(("learning_rate", "momentum"), map(float, numbers or outer), strict=True) if outer else {}
    for word, value in words.items():
        is_field = kinds.get(word, "word") not in ("word", "outer")
        key = word if is_field else next((name for name, kind in kinds.items() if kind == "word"), "")
        if not key or key in values:
            raise TypeError
        values[key] = value if is_field else word
    policy: TrainingPolicy | None = cls(**values) if cls else None
    return policy


REMOVED = {
    "ssp": (
        "async, or to drop late gradients async:MAX_DELAY, which counts the steps of all other workers (p - 1 is normal"
        " with p workers)"
    ),
    "backup": "quota:SAMPLES, such as quota:256: fast workers compute more of the examples, and no gradient is dropped",
    "buffered": (
        "async:sqrt, where each gradient is a version and late ones count less, or quota:SAMPLES, a version of so many"
        " examples of all workers together"
    ),
}
"""Policies of 0.2 and before → what to write instead, for error messages."""
OFFERED = {name: _form(name, *policy) for name, policy in POLICIES.items()}
"""The forms that messages offer, by name."""
EXAMPLES = {"quota": 512, "local_sgd": 20, "diloco": 100}
"""Numbers for a policy whose number is missing."""
FORMS = " or ".join([", ".join([*OFFERED.values()][:-1]), [*OFFERED.values()][-1]])


def policy_from(text: str) -> TrainingPolicy | None:
    """A policy by its name, such as ``diloco:100`` or ``quota:512,local_steps``; None for ``sync``: all workers
    exchange in each step, as without a policy.

    Raises:
        ValueError: the name is unknown, or a number is out of range.
    """
    name, _, rest = text.partition(":")
    if name in REMOVED:
        raise ValueError(f"the policy {name!r} was removed: write {REMOVED[name]}")
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
    except ValueError:
        raise ValueError(f"there is no policy {text!r}: write {FORMS}") from None
    if name not in POLICIES:
        near = did_you_mean(name, OFFERED)
        raise ValueError(f"there is no policy {text!r}: {near or f'write {FORMS}'}")
    try:
        return _read(name, positional, named)
    except TypeError:
        raise ValueError(_misfit(text, name, rest, named)) from None
    except ValueError as error:
        raise ValueError(f"the policy {text!r} is not possible: {error}; write {OFFERED[name]}") from None


def _misfit(text: str, name: str, rest: str, named: Iterable[str]) -> str:
    """What a policy's text has too much or too little of, and what to write."""
    forms = OFFERED[name]
    required = re.match(rf"{name}:([A-Z_]+)", forms)
    if not rest and required:
        return f"the policy {text!r} lacks its number of {required[1]}: write {name}:{EXAMPLES.get(name, 1)}"
    words = re.findall(r"(?<![a-z_])[a-z_]+(?![a-z_:])", forms.removeprefix(name))
    for word in named:
        if word not in words and (near := did_you_mean(word, words)):
            return f"the policy {text!r} has an unknown word {word!r}: {near}"
    return f"there is no policy {text!r}: write {forms if ':' in forms else FORMS}"


def _number(word: str) -> float:
    try:
        return int(word)
    except ValueError:
        return float(word)
