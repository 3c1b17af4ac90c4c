"""`OuterSteps` of a trainer: workers make steps of their own, and exchange what these have changed.

What travels is the weights of the last exchange minus those of now, which an optimizer on the servers takes for a
gradient. So servers know nothing of it: a version is made of one contribution of each worker, as ever. Between two
exchanges the weights of workers differ.
"""

from __future__ import annotations

import abc
import contextlib
import heapq
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch

from kvdist.config.policies import LocalSteps, Quota, TrainingPolicy
from kvdist.errors import ConfigError
from kvdist.kvstore.backend import Average
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.runtime.waits import wait_for
from kvdist.training.data import HandedOut, count_as_used
from kvdist.training.parameters import Grads, Parameter

T = TypeVar("T")
LOG = logging.getLogger("kvdist")


class Counts(NamedTuple):
    """Of the steps since an exchange of everything; the names are those of `Exchanges`."""

    passed: int
    made: int
    samples: int
    handed_out: int
    examples: int


NOTHING = Counts(0, 0, 0, 0, 0)


def outer_optimizer(policy: TrainingPolicy) -> Optimizer:
    """What servers apply the changes with."""
    assert isinstance(policy, LocalSteps | Quota)
    return create("torch.sgd", lr=policy.learning_rate, momentum=policy.momentum, nesterov=policy.momentum > 0)


class Exchanges(abc.ABC):
    """What a trainer's worker has done since its last exchange, where not every step is one.

    Args:
        parameters: the trained ones, each with one replica.
        unpushed: how many examples `batches` has handed out that no push has brought; 0 if that is not known.
    """

    every = 1
    """Steps for each update of the weights on the store."""
    counts_steps = True
    """Whether `Trainer.version` counts the steps of this worker, rather than exchanges."""
    sums_gradients = False
    """Whether gradients are added up, rather than applied here."""
    rounds = 0
    """How many exchanges of all parameters were made."""
    keeps_weights = True
    """Whether the weights of the last exchange are needed."""
    samples_dropped = 0
    """Of how many examples gradients came too late for any version."""
    given = 0
    """Of how many examples all steps were."""
    counted: Sequence[int] = (0,)
    """A parameter of each part that is exchanged by itself: the first of them that has a batch counts it as used."""

    def __init__(self, parameters: Sequence[Parameter], unpushed: Callable[[], int]) -> None:
        self._weights = [parameter.replicas[0].detach() for parameter in parameters]
        self._unpushed = unpushed
        self.known: list[tuple[int, int]] = []
        """Rounds and `Trainer.version` after them, where one does not follow from the other."""
        self._before = [weight.clone() for weight in self._weights] if self.keeps_weights else []
        """The weights of the last exchange."""
        self.begin()

    def begin(self) -> None:
        """Count from here on: the weights are those of the store."""
        self._count_anew()
        if self._before:
            torch._foreach_copy_(self._before, self._weights)

    def _count_anew(self, handed_out: int = 0) -> None:
        self.passed = 0
        """Steps since the last exchange, those without gradients included."""
        self.made = 0
        """Those with gradients."""
        self.samples = 0
        """Of how many examples they were, as far as that was said."""
        self.examples = 0
        """Of how many examples all of them were, as far as that is known."""
        self.handed_out = handed_out
        """How many examples of a queue were handed out that are not used."""

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """A context for what a step changes here."""
        return contextlib.nullcontext()

    def left(self) -> HandedOut:
        """What pushes have brought to servers that this worker has not heard of; for `count_as_used`."""
        return {}

    def settle(self) -> None:  # noqa: B027  # most have nothing under way
        """Wait until no push of this worker is under way."""

    def rewind(self, rounds: int) -> None:
        """All have gone back to a snapshot, of so many rounds."""
        self.rounds = rounds
        self.known = [one for one in self.known if one[0] <= rounds]

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """No step follows."""

    def add(self, grads: Grads, samples: int) -> None:
        """Count a step with gradients, of so many examples; 0 if that was not said."""
        self.made += 1
        self.samples += samples

    def _changes(self) -> list[torch.Tensor]:
        """What the steps have changed, as a gradient. One pass over the weights."""
        return list(torch._foreach_sub(self._before, self._weights))

    @abc.abstractmethod
    def require_alike(self, samples: int | None) -> None:
        """Refuse a step that does not go with those since the last exchange: a `ValueError`."""

    @abc.abstractmethod
    def after_step(self) -> None:
        """A step has been counted; make an exchange if it is time."""

    @abc.abstractmethod
    def finish(self, together: bool) -> None:
        """Exchange what there is, and wait for the new weights.

        Args:
            together: with all other workers, so that all have the same weights then; otherwise they may go on.
        """


@dataclass(slots=True)
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        places: which of the trained ones.
        counted: of the worker's `OuterSteps.counts`, what the last push had.
        used: what the steps of the last push have used; see `count_as_used`.
        under_way: of the last push, until its weights are taken.
        since: how many steps were made since then.
        pushed: the changes of the last push, while it is under way.
        landing: where the new weights come.
    """

    places: list[int]
    counted: Counts = NOTHING
    used: HandedOut = field(default_factory=dict)
    under_way: Future[Any] | None = None
    since: int = 0
    pushed: list[torch.Tensor] = field(default_factory=list)
    landing: list[torch.Tensor] = field(default_factory=list)

    def of(self, tensors: Sequence[T]) -> list[T]:
        """Those of its parameters."""
        return [tensors[place] for place in self.places]


class OuterSteps(Exchanges):
    """Exchanges after a number of steps of each worker, of all parameters or of one fragment of them after the other.

    All workers push the same fragment at the same step. Rounds of all fragments are aligned: of two, the one with the
    lower number has been pushed as often as the other, or once more. So a worker that joins, and all that go back to a
    snapshot, begin with the first fragment.

    Args:
        policy: how many steps, fragments, and steps until an answer is taken.
        parameters, unpushed: as of `Exchanges`.
        update: pushes changes of some parameters and writes the new weights; see `Exchange.update`.
        push: the same without waiting, and writes into given tensors; see `Exchange.begin_update`.
        take: the result of a future of these.
        handed_out: what counts as used when the first of the fragments has it; see `count_as_used`.

    Raises:
        ConfigError: there are more fragments than parameters.

    Source: Douillard et al., Streaming DiLoCo with Overlapping Communication (2025), but that what a worker changes
    until the answer comes is added to it, rather than mixed with it.
    """

    def __init__(
        self,
        policy: LocalSteps,
        parameters: Sequence[Parameter],
        unpushed: Callable[[], int],
        update: Callable[[Grads, Average, int, Sequence[int]], object],
        push: Callable[[Grads, Average, int, list[torch.Tensor], Sequence[int]], Future[Any]],
        take: Callable[[Future[Any]], Any],
        handed_out: HandedOut,
    ) -> None:
        self.every = policy.every
        self._delay = policy.steps_until_answer
        self._update = update
        self._push = push
        self._take = take
        self._handed_out = handed_out
        sizes = [parameter.replicas[0].nbytes for parameter in parameters]
        self._fragments = [Fragment(places) for places in split_evenly(sizes, policy.fragments)]
        self.counted = [one.places[0] for one in self._fragments]
        self._times = [policy.every * number // policy.fragments for number in range(1, policy.fragments + 1)]
        """At which step of a period each is pushed."""
        self._step = self._next = 0
        """Steps of the present period, and how many fragments were pushed in it."""
        super().__init__(parameters, unpushed)

    def rewind(self, rounds: int) -> None:
        super().rewind(rounds)
        self._begin_period(rounds)

    def _begin_period(self, rounds: int) -> None:
        self.rounds = rounds
        self._step = self._next = 0

    def begin(self) -> None:
        self.settle()
        for fragment in self._fragments:
            fragment.under_way, fragment.pushed, fragment.landing = None, [], []
            fragment.counted = NOTHING
        self._used = 0
        """How many examples of a queue count as used since then."""
        if not self._next:
            self._step = 0
        super().begin()

    def settle(self) -> None:
        wait_for([one.under_way for one in self._fragments if one.under_way is not None])

    def left(self) -> HandedOut:
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._count_used(fragment)  # here, as later pushes say their examples beside those
        return {}

    def require_alike(self, samples: int | None) -> None:
        if self.made and (samples is None) != (self.samples == 0):
            raise ValueError(
                f"step({'' if samples is None else f'samples={samples}'}) after {self.made} steps"
                f" {'without samples' if samples else 'with samples'} since the last exchange: give samples in all"
                " steps, or in none"
            )

    def after_step(self) -> None:
        self._step += 1
        for fragment in self._fragments:
            fragment.since += 1
            if fragment.under_way is not None and fragment.since >= self._delay:
                self._land(fragment)
        if self._step < self._times[self._next]:
            return
        fragment = self._fragments[self._next]
        if self._delay:
            self._start(fragment)
        else:
            self._exchange(fragment)
        self._next += 1
        if self._next == len(self._fragments):
            self._begin_period(self.rounds + 1)

    def finish(self, together: bool) -> None:
        if not self.passed:
            return
        self._land_all()
        self.handed_out = self._unpushed()
        if len(self._fragments) == 1:
            self._exchange(self._fragments[0])
        else:
            for fragment in self._fragments:
                self._start(fragment)
            self._land_all()
            for fragment in self._fragments[self._next :] if self._next else ():
                self._start(fragment)  # so that all have been pushed equally often
            self._land_all()
        self._begin_period(self.rounds + (2 if self._next else 1))
        self.begin()

    @property
    def _counts(self) -> Counts:
        """What the steps so far are."""
        return Counts(self.passed, self.made, self.samples, self._used + self.handed_out, self.examples)

    def _share(self, fragment: Fragment) -> tuple[Grads, Average, int]:
        """What a fragment pushes: changes since its last push, their weight, and of how many examples they are."""
        counts, before = self._counts, fragment.counted
        fragment.counted, fragment.since, fragment.used = counts, 0, dict(self._handed_out)
        is_made = counts.made > before.made
        changes = torch._foreach_sub(fragment.of(self._before), fragment.of(self._weights)) if is_made else ()
        fragment.pushed = list(changes)
        grads: Grads = [[change] for change in fragment.pushed] or [None] * len(fragment.places)
        average: Average = "samples" if counts.samples > before.samples else True
        handed_out = max(0, counts.handed_out - before.handed_out)  # less where a step was interrupted
        return grads, average, handed_out or counts.examples - before.examples

    def _exchange(self, fragment: Fragment) -> None:
        """Push, and wait for the new weights."""
        self._update(*self._share(fragment), fragment.places)
        fragment.pushed = []
        if len(self._fragments) == 1:
            self.begin()
            return
        torch._foreach_copy_(fragment.of(self._before), fragment.of(self._weights))
        self._count_used(fragment)

    def _start(self, fragment: Fragment) -> None:
        """Push, and go on."""
        share = self._share(fragment)
        fragment.landing = [torch.empty_like(weight) for weight in fragment.of(self._weights)]
        fragment.under_way = self._push(*share, fragment.landing, fragment.places)

    def _land_all(self) -> None:
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._land(fragment)

    def _land(self, fragment: Fragment) -> None:
        """Take the new weights, and add what was changed since the push."""
        assert fragment.under_way is not None
        self._take(fragment.under_way)
        before, weights = fragment.of(self._before), fragment.of(self._weights)
        if self.made > fragment.counted.made:
            moved = torch._foreach_sub(fragment.landing, before)
            if fragment.pushed:
                torch._foreach_add_(moved, fragment.pushed)
            torch._foreach_add_(weights, moved)
        else:
            torch._foreach_copy_(weights, fragment.landing)
        torch._foreach_copy_(before, fragment.landing)
        fragment.under_way, fragment.pushed, fragment.landing = None, [], []
        self._count_used(fragment)

    def _count_used(self, fragment: Fragment) -> None:
        """What a fragment has brought to the servers counts as used, though the others follow later."""
        unpushed = self._unpushed()
        count_as_used(dict(fragment.used))
        now = self._unpushed()
        self._used += unpushed - now
        self.handed_out -= unpushed - now


def split_evenly(sizes: Sequence[int], number: int) -> list[list[int]]:
    """Split parameters of so many bytes into fragments of about equal bytes; their places, ascending in each.

    The largest goes first, each to the fragment with the fewest bytes so far. Layers of equal size so go to all
    fragments by turns, which trains a little better than neighbours together (Streaming DiLoCo), and what matters
    more, no push is much larger than another.

    Raises:
        ConfigError: there are more fragments than parameters.
    """
    if number > len(sizes):
        raise ConfigError(
            f"the policy has {number} fragments, but the Trainer only {len(sizes)} parameters to train, and a parameter"
            f" is never split: use at most {len(sizes)} fragments"
        )
    fragments: list[list[int]] = [[] for _ in range(number)]
    loads = [(0, fragment) for fragment in range(number)]
    for place in sorted(range(len(sizes)), key=lambda one: -sizes[one]):
        load, fragment = heapq.heappop(loads)
        fragments[fragment].append(place)
        heapq.heappush(loads, (load + max(sizes[place], 1), fragment))
    return [sorted(fragment) for fragment in fragments]
