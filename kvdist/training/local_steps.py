"""`PolicySteps` of a trainer, and `OuterSteps`: workers step alone, and exchange the changes of several steps.

What travels is the weights of the last exchange minus those of now, which an optimizer on the servers takes for a
gradient. So servers know nothing of it: a version has a contribution of each worker, as always. Between two
exchanges the weights of workers differ.
"""

from __future__ import annotations

import abc
import contextlib
import heapq
import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar, cast

import torch

from kvdist.config.policies import LocalSteps, Quota, TrainingPolicy
from kvdist.errors import ConfigError
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.protocol.messages import Due, DueWhen
from kvdist.runtime.waits import wait_for
from kvdist.training.data import Feed, Reached, count_as_used
from kvdist.training.model import Model
from kvdist.training.parameters import Grads
from kvdist.training.steps import StepCall, StoreSteps

T = TypeVar("T")
LOG = logging.getLogger("kvdist")


class Counts(NamedTuple):
    """Of the steps since an exchange of everything; the names are those of `PolicySteps`."""

    passed: int
    made: int
    samples: int
    pending: int
    examples: int


NOTHING = Counts(0, 0, 0, 0, 0)


def outer_optimizer(policy: TrainingPolicy) -> Optimizer:
    """What servers apply the changes with."""
    assert isinstance(policy, LocalSteps | Quota)
    return create("torch.sgd", lr=policy.learning_rate, momentum=policy.momentum, nesterov=policy.momentum > 0)


class PolicySteps(StoreSteps):
    """Steps whose pushes a policy decides, with the counts of the steps since the last push.

    Args:
        model, feed, store: as of `StoreSteps`; each parameter has a single replica.
    """

    on_server = True
    counts_steps = True
    keeps_weights = True
    """Whether the weights of the last exchange are needed."""
    given = 0
    """Examples of all steps; a step of an unknown number counts as 1."""

    def __init__(self, model: Model, feed: Feed, store: KVStore) -> None:
        super().__init__(model, feed, store)
        self._backend = cast(DistBackend, store._backend)
        self._weights = [parameter.replicas[0].detach() for parameter in model.trained]
        self._known: list[tuple[int, int]] = []
        """Rounds and `Trainer.version` after them, where the version does not follow from the rounds."""
        self._before = [weight.clone() for weight in self._weights] if self.keeps_weights else []
        """The weights of the last exchange."""
        self.restart()

    def broadcast(self) -> None:
        super().broadcast()
        self.restart()

    def fetch(self) -> None:
        super().fetch()
        self.restart()

    def restart(self) -> None:
        """Count anew, from the weights of the store on."""
        self._count_anew()
        if self._before:
            torch._foreach_copy_(self._before, self._weights)

    def _count_anew(self, pending: int = 0) -> None:
        self.passed = 0
        """Steps since the last exchange, those without gradients included."""
        self.made = 0
        """Steps with gradients since then."""
        self.samples = 0
        """Examples of these steps, as far as steps have named their number."""
        self.examples = 0
        """Examples of these steps, as far as they are known."""
        self.pending = pending
        """Examples of a queue that were handed out and are not used."""

    @property
    def is_exchanged(self) -> bool:  # type: ignore[override]
        return self.counts_steps and not self.passed

    def _make(self, grads: Grads, call: StepCall) -> None:
        self.meet()
        examples = self._feed.examples_of(call.batch_size, call.samples)
        with self.stepping():
            self.add(grads, call.samples or 0)
            self.examples += examples
            self.given += examples or 1  # as dropped gradients count
            self._apply(grads, call)
            self._end_step()

    def _apply(self, grads: Grads, call: StepCall) -> None:
        """Update the weights of this worker alone."""
        has_grad = [grad is not None for grad in grads]
        self._model.update(call.divisor(self._model.num_devices), has_grad, 0, counts=False)
        self.note_weights()

    def skip(self) -> None:
        self._model.watch.note_grads()
        with self.stepping():
            self._end_step()

    def _end_step(self) -> None:
        """Count a step, and make an exchange if it is time."""
        self.passed += 1
        self.pending = self._feed.unpushed
        self._model.updates += self.counts_steps
        try:
            self.after_step()
        finally:
            self.note_weights()  # they may have been written, also if it failed

    def exchange(self, together: bool) -> None:
        try:
            self.finish(together)
        finally:
            self.note_weights()  # they were written, also if it failed

    def count_what_has_left(self) -> None:
        count_as_used(self.left())
        self.pending = self._feed.unpushed

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for the changes of a step."""
        return contextlib.nullcontext()

    def left(self) -> Reached:
        """Return what pushes have brought to servers before their answers, for `count_as_used`."""
        return {}

    def rewind(self, rounds: int, updates: int) -> int:
        self.rounds = rounds
        self._known = [one for one in self._known if one[0] <= rounds]
        for known, version in self._known[-1:]:
            updates = version + (rounds - known) * self.every
        return updates

    def note_version(self, since: int, updates: int) -> None:
        if self.counts_steps:
            self._known += [(rounds, updates) for rounds in range(since + 1, self.rounds + 1)]

    def add(self, grads: Grads, samples: int) -> None:
        """Count a step with gradients, of so many examples; 0 if their number is not known."""
        self.made += 1
        self.samples += samples

    def _changes(self) -> list[torch.Tensor]:
        """Return the change of the weights by the steps, as a gradient, in a single pass over the weights."""
        return list(torch._foreach_sub(self._before, self._weights))

    def _push(self, grads: Grads, average: Average, samples: int, which: Sequence[int] | None = None) -> None:
        """Push for some trained parameters, by their positions, or for all, and take their new weights."""
        trained = self._model.trained if which is None else [self._model.trained[position] for position in which]
        keys, weights = [parameter.key for parameter in trained], [parameter.replicas for parameter in trained]
        self._store.pushpull(keys, grads, out=weights, average=average, samples=samples)

    def _begin_push(
        self, grads: Grads, average: Average, samples: int, out: list[torch.Tensor], which: Sequence[int] | None = None
    ) -> Future[Any]:
        """Push without waiting.

        Returns:
            A future, which is done when the new weights are in `out`, a tensor for each parameter.
        """
        keys = self._keys if which is None else [self._keys[position] for position in which]
        store = cast(KVStore, self._store)
        return store.pushpull_async(keys, grads, out=[[tensor] for tensor in out], average=average, samples=samples)

    def _report(
        self, work: int, when: DueWhen, quota: int, *, now: bool = False, together: bool = False
    ) -> Future[Due | None]:
        """Report the work of this worker since its last push; see `DistBackend.report_progress`."""
        return self._backend.report_progress(self._keys[0], work, when, quota, now, together)

    @abc.abstractmethod
    def after_step(self) -> None:
        """Make an exchange if it is time, after a step was counted."""

    @abc.abstractmethod
    def finish(self, together: bool) -> None:
        """Exchange the steps since the last exchange; see `Steps.exchange`."""


@dataclass(slots=True)
class Fragment:
    """Parameters that are exchanged together.

    Attributes:
        places: positions of the trained parameters.
        counted: of the worker's `OuterSteps.counts`, what the last push had.
        used: what the steps of the last push have used; see `count_as_used`.
        under_way: of the last push, until its weights are taken.
        since: number of steps since then.
        pushed: the changes of the last push, while it is under way.
        landing: where the new weights come.
    """

    places: list[int]
    counted: Counts = NOTHING
    used: Reached = field(default_factory=dict)
    under_way: Future[Any] | None = None
    since: int = 0
    pushed: list[torch.Tensor] = field(default_factory=list)
    landing: list[torch.Tensor] = field(default_factory=list)

    def of(self, tensors: Sequence[T]) -> list[T]:
        """Those of its parameters."""
        return [tensors[place] for place in self.places]


class OuterSteps(PolicySteps):
    """Exchanges after a number of steps of each worker, of all parameters or of their fragments in turn.

    All workers push the same fragment at the same step. Rounds of all fragments are aligned: of two, the fragment with
    the lower number has been pushed as often as the other, or once more. So a worker that joins, and all that go back
    to a snapshot, begin with the first fragment.

    Args:
        policy: how many steps, fragments, and steps until an answer is taken.
        model, feed, store: as of `PolicySteps`. What the feed has handed out counts as used when the first of the
            fragments has it.

    Raises:
        ConfigError: there are more fragments than parameters.

    Source: Douillard et al., Streaming DiLoCo with Overlapping Communication (2025), but that what a worker changes
    until the answer comes is added to it, rather than mixed with it.
    """

    def __init__(self, policy: LocalSteps, model: Model, feed: Feed, store: KVStore) -> None:
        self.every = policy.every
        self._delay = policy.steps_until_answer
        sizes = [parameter.replicas[0].nbytes for parameter in model.trained]
        self._fragments = [Fragment(places) for places in split_evenly(sizes, policy.fragments)]
        self.counted = [one.places[0] for one in self._fragments]
        self._times = [policy.every * number // policy.fragments for number in range(1, policy.fragments + 1)]
        """At which step of a period each is pushed."""
        self._step = self._next = 0
        """Steps of the present period, and how many fragments were pushed in it."""
        super().__init__(model, feed, store)

    def rewind(self, rounds: int, updates: int) -> int:
        self._begin_period(rounds)
        return super().rewind(rounds, updates)

    def _begin_period(self, rounds: int) -> None:
        self.rounds = rounds
        self._step = self._next = 0

    def restart(self) -> None:
        self.settle()
        for fragment in self._fragments:
            fragment.under_way, fragment.pushed, fragment.landing = None, [], []
            fragment.counted = NOTHING
        self._used = 0
        """How many examples of a queue count as used since then."""
        if not self._next:
            self._step = 0
        super().restart()

    def settle(self) -> None:
        wait_for([one.under_way for one in self._fragments if one.under_way is not None])

    def left(self) -> Reached:
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._count_used(fragment)  # here, as later pushes say their examples beside those
        return {}

    def _checked(self, call: StepCall) -> StepCall:
        samples = call.samples
        if self.made and (samples is None) != (self.samples == 0):
            raise ValueError(
                f"step({'' if samples is None else f'samples={samples}'}) after {self.made} steps"
                f" {'without samples' if samples else 'with samples'} since the last exchange: give samples in all"
                " steps, or in none"
            )
        return call

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
            self._push_and_wait(fragment)
        self._next += 1
        if self._next == len(self._fragments):
            self._begin_period(self.rounds + 1)

    def finish(self, together: bool) -> None:
        if not self.passed:
            return
        self._land_all()
        self.pending = self._feed.unpushed
        if len(self._fragments) == 1:
            self._push_and_wait(self._fragments[0])
        else:
            for fragment in self._fragments:
                self._start(fragment)
            self._land_all()
            for fragment in self._fragments[self._next :] if self._next else ():
                self._start(fragment)  # so that all have been pushed equally often
            self._land_all()
        self._begin_period(self.rounds + (2 if self._next else 1))
        self.restart()

    @property
    def _counts(self) -> Counts:
        """What the steps so far are."""
        return Counts(self.passed, self.made, self.samples, self._used + self.pending, self.examples)

    def _share(self, fragment: Fragment) -> tuple[Grads, Average, int]:
        """What a fragment pushes: changes since its last push, their weight, and of how many examples they are."""
        counts, before = self._counts, fragment.counted
        fragment.counted, fragment.since, fragment.used = counts, 0, dict(self._feed.reached)
        is_made = counts.made > before.made
        changes = torch._foreach_sub(fragment.of(self._before), fragment.of(self._weights)) if is_made else ()
        fragment.pushed = list(changes)
        grads: Grads = [[change] for change in fragment.pushed] or [None] * len(fragment.places)
        average: Average = "samples" if counts.samples > before.samples else True
        pending = max(0, counts.pending - before.pending)  # less where a step was interrupted
        return grads, average, pending or counts.examples - before.examples

    def _push_and_wait(self, fragment: Fragment) -> None:
        """Push, and wait for the new weights."""
        self._push(*self._share(fragment), fragment.places)
        fragment.pushed = []
        if len(self._fragments) == 1:
            self.restart()
            return
        torch._foreach_copy_(fragment.of(self._before), fragment.of(self._weights))
        self._count_used(fragment)

    def _start(self, fragment: Fragment) -> None:
        """Push, and go on."""
        share = self._share(fragment)
        fragment.landing = [torch.empty_like(weight) for weight in fragment.of(self._weights)]
        fragment.under_way = self._begin_push(*share, fragment.landing, fragment.places)

    def _land_all(self) -> None:
        for fragment in self._fragments:
            if fragment.under_way is not None:
                self._land(fragment)

    def _land(self, fragment: Fragment) -> None:
        """Take the new weights, and add the changes since the push."""
        assert fragment.under_way is not None
        self._backend.wait(fragment.under_way)
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
        unpushed = self._feed.unpushed
        count_as_used(dict(fragment.used))
        now = self._feed.unpushed
        self._used += unpushed - now
        self.pending -= unpushed - now


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
