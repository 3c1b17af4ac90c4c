"""How a trainer makes its steps: what a step sends, where weights are updated, and when an exchange is due.

A `Trainer` chooses its `Steps` at its first step, and calls their methods from then on; no class asks which other class
it might have been.

| steps | a step sends | weights are updated |
|---|---|---|
| `AloneSteps` | nothing, without a store | in this process |
| `ServerSteps` | gradients, and gets weights | on servers |
| `WorkerSteps` | gradients, and gets their sums | in each worker, equally |
| `OverlappedSteps` (`overlap`) | the same, while the backward pass runs | on servers, or in each worker |
| `OuterSteps` (`local_steps`) | nothing; each n-th step sends the changes of n steps | in each worker, and on servers |
| `QuotaSteps`, `QuorumSteps` (`quota`) | all finished work when a version is due | on servers, or in each worker too |
| `AsynchronousSteps` (`asynchronous`) | gradients, unless they come too late for a server | on servers |
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvdist.kvstore.adapter import Adapted
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.naming import NamedKey
from kvdist.schema import real_number
from kvdist.training.ballot import Ballot
from kvdist.training.data import Feed
from kvdist.training.grad_checks import Stale
from kvdist.training.join import Join, NextStep
from kvdist.training.model import Model
from kvdist.training.parameters import Grads, divide, named_keys, scale
from kvdist.training.trainer_config import refuse_overflow, refuse_updated_there

BATCH_SIZE_LIMIT = 1 << 32
"""Batch sizes are smaller: they travel as 32 bits."""


@dataclass(frozen=True)
class StepCall:
    """The arguments of a step.

    Attributes:
        batch_size: examples of this worker, where losses are sums; None where they are means.
        samples: examples of this worker over which the loss is a mean; None for losses that are sums or plain means.
        on_stale: how to treat gradients that the last step has used already.

    Raises:
        ValueError: `batch_size` is out of range.
    """

    batch_size: float | None
    samples: int | None
    on_stale: Stale

    def __post_init__(self) -> None:
        if self.batch_size is not None and not 0 < real_number("batch_size", self.batch_size) < BATCH_SIZE_LIMIT:
            raise ValueError(
                f"batch_size is {self.batch_size}; it is the number of examples in the gradients, above 0 and below"
                " 2^32"
            )

    def divisor(self, num_devices: int) -> float:
        """Divisor of the gradients of this worker."""
        return num_devices if self.batch_size is None else self.batch_size

    @property
    def average(self) -> Average:
        """How the store combines the gradients of workers."""
        return self.batch_size is None if self.samples is None else "samples"


class Steps(abc.ABC):
    """A way to make steps.

    Args:
        model: the parameters of this process.
        feed: the batches that the training loop has got.
    """

    every = 1
    """Steps of a worker for each round of the store, with `counts_steps`; `Trainer.version` is rounds times `every`."""
    on_server = False
    """Whether servers hold the weights."""
    updates_here = True
    """Whether the trainer's optimizer runs in this process; with `on_server`, each worker saves its state."""
    counts_steps = False
    """Whether `Trainer.version` counts the steps of this worker rather than rounds; for steps that update the weights
    here and are exchanged later. `every` is 1 without it."""
    has_own_pace = False
    """Whether a worker makes as many steps as it can, and waits for none of another worker."""
    is_exchanged = True
    """Whether the store has all steps of this worker."""
    pending = 0
    """Examples of a queue in steps that the store does not have."""
    samples_dropped = 0
    """Examples whose gradients came too late for any version."""
    rounds = 0
    """Exchanges of all parameters so far, where not every step is an exchange."""
    counted: Sequence[int] = (0,)
    """A parameter, by its position, of each part that is exchanged by itself: servers count its examples."""

    def __init__(self, model: Model, feed: Feed) -> None:
        self._model = model
        self._feed = feed
        self.join: Join | None = None
        """The block of `Trainer.join` that the steps are in."""

    def begin(self) -> None:
        """Make the weights of rank 0 those of all workers, and prepare the first step."""
        self.broadcast()

    def step(self, call: StepCall) -> None:
        """Make a step with the present gradients.

        Raises:
            RuntimeError, FloatingPointError, ValueError: as `Trainer.step`; nothing was sent.
            KvdistError: the store failed.
        """
        model = self._model
        model.groups.read()
        model.refuse_untrained()
        model.require_unchanged()
        grads = model.gradients(call.on_stale)
        self._make(grads, self._checked(call))

    def _checked(self, call: StepCall) -> StepCall:
        """Return the call as the step uses it; raises a `ValueError` if it does not fit earlier steps."""
        return call

    @abc.abstractmethod
    def _make(self, grads: Grads, call: StepCall) -> None:
        """Make a step with gradients that are checked: nothing was sent yet.

        A subclass calls `meet` before it sends, counts in `Model.updates` and `Model.samples` (as `Model.update` does),
        and calls `Watch.note_grads`; after weights were written, also by a call that failed, `note_weights`.
        """

    @abc.abstractmethod
    def skip(self) -> None:
        """Take part in a step of the others without gradients; the caller has met the others (`meet`)."""

    def meet(self) -> None:
        """Within `Trainer.join`, announce a step of this worker; no error of its call is raised after that."""
        if self.join is not None:
            self.join.meet(NextStep.STEPS)

    def broadcast(self) -> None:  # noqa: B027  # without a store nobody else has weights
        """Copy rank 0's weights to all workers and to the store; gradients that wait to be sent are dropped."""

    def fetch(self) -> None:  # noqa: B027  # without a store nobody else has weights
        """Take the weights of the store; gradients that wait to be sent are dropped."""

    def note_weights(self) -> None:
        """Remember the weights of the store, which only steps may change from now on."""
        if self.on_server:
            self._model.watch.note_weights()

    # Gluon's two halves of a step.

    def sum_gradients(self, average: bool, on_stale: Stale) -> None:
        """Replace gradients by their sums over devices and workers; see `Trainer.allreduce_grads`."""
        refuse_updated_there("allreduce_grads")

    def update(self, call: StepCall) -> None:
        """Update the weights of this process with the present gradients; see `Trainer.update`."""
        refuse_updated_there("update")

    def _update(self, call: StepCall, is_summed: Sequence[bool] | None, samples: int) -> None:
        """Update with all gradients, or with those that any worker had in `sum_gradients`."""
        model = self._model
        model.groups.read()
        grads = model.watch.grads(call.on_stale)
        model.warn_without(any(grads))
        has_grad = [grad is not None for grad in grads]
        if is_summed is not None:
            has_grad = [one and other for one, other in zip(has_grad, is_summed, strict=True)]
        model.update(call.divisor(model.num_devices), has_grad, samples)

    # Between steps.

    def exchange(self, together: bool) -> None:  # noqa: B027  # most have exchanged all
        """Send what no push has brought to the store yet, and wait for the new weights.

        Args:
            together: with all other workers, so that all have the same weights then; otherwise they may go on.
        """

    def settle(self) -> None:  # noqa: B027  # most have nothing under way
        """Wait until no push of this worker is under way."""

    def rewind(self, rounds: int, updates: int) -> int:
        """Forget later exchanges, as all go back to a snapshot; return the `Trainer.version` of the snapshot.

        Args:
            rounds: number of the store's rounds in the snapshot; a round is an exchange of all workers.
            updates: `Trainer.version` of the snapshot for steps of which exactly `every` make a round.
        """
        return updates

    def note_version(self, since: int, updates: int) -> None:  # noqa: B027  # for most it follows from rounds
        """Remember the `Trainer.version` of the exchanges after the first `since`."""

    def count_what_has_left(self) -> None:  # noqa: B027  # most know at the end of a step
        """Count examples as used whose pushes have left, before unused examples go to others."""

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backward passes send nothing."""
        return contextlib.nullcontext()

    def require_nothing_sent(self, method: str, first: str) -> None:  # noqa: B027  # most send within a step
        """Raises a `RuntimeError`: gradients of an unfinished step are under way.

        Args:
            method: the call that must not come now.
            first: the call that must come before it.
        """

    def close(self) -> None:  # noqa: B027  # most hold nothing
        """Release the parameters; no step follows."""


class AloneSteps(Steps):
    """Updates of this process alone, without a store."""

    def _make(self, grads: Grads, call: StepCall) -> None:
        has_grad = [grad is not None for grad in grads]
        self._model.update(
            call.divisor(self._model.num_devices), has_grad, self._feed.examples_of(call.batch_size, call.samples)
        )

    def skip(self) -> None:
        self._model.watch.note_grads()

    def sum_gradients(self, average: bool, on_stale: Stale) -> None:
        """There is nothing to sum."""

    def update(self, call: StepCall) -> None:
        self._update(call, None, self._feed.examples_of(call.batch_size, call.samples))


class StoreSteps(Steps):
    """Steps with a store.

    Args:
        model, feed: as of `Steps`.
        store: the store.
    """

    def __init__(self, model: Model, feed: Feed, store: KVStore | Adapted) -> None:
        super().__init__(model, feed)
        self._store = store
        self._keys = [parameter.key for parameter in model.trained]

    def broadcast(self) -> None:
        self.settle()
        model = self._model
        if model.shared is not None:
            model.shared.own()
        replicas = [parameter.carried for parameter in model.parameters]
        self._store.broadcast(named_keys(model.parameters), [devices[0] for devices in replicas], out=replicas)
        self.note_weights()

    def fetch(self) -> None:
        parameters = self._model.parameters
        if self._model.shared is not None:
            self._model.shared.own()
        assert isinstance(self._store, KVStore), "others load no checkpoints and know no snapshots"
        self._store.pull(list(range(len(parameters))), out=[parameter.carried for parameter in parameters])
        self.note_weights()


class ServerSteps(StoreSteps):
    """Each step pushes gradients to a store that updates, and takes its new weights."""

    on_server = True
    updates_here = False

    def _make(self, grads: Grads, call: StepCall) -> None:
        self.meet()
        with self._model.rescaled(call.divisor(self._model.num_devices)):
            self._push(grads, call.average, self._feed.examples_of(call.batch_size, call.samples))

    def skip(self) -> None:
        if self._store.num_workers > 1:
            self._push([None] * len(self._model.trained), True, self._feed.unpushed)
        else:
            self._model.watch.note_grads()

    def _push(self, grads: Grads, average: Average, samples: int) -> None:
        model, store = self._model, self._store
        weights = [parameter.replicas for parameter in model.trained]
        try:
            if model.clip_norm is None and model.shared is None:
                store.pushpull(self._keys, grads, out=weights, average=average, samples=samples)
            elif model.shared is not None:
                assert isinstance(store, KVStore)
                shown = store.pushpull_shared(self._keys, grads, weights, average=average, samples=samples)
                model.shared.take(shown)
            else:
                assert isinstance(store, KVStore) and model.clip_norm is not None
                model.grad_norm = store.pushpull_clipped(
                    self._keys, grads, model.clip_norm, weights, average=average, samples=samples
                )
        finally:
            self.note_weights()  # they were written, also if it failed
        model.updates += 1
        model.samples += samples
        model.watch.note_grads()


class WorkerSteps(StoreSteps):
    """Each step sums gradients over the store, and every worker updates its weights with the sums.

    Args:
        model, feed, store: as of `StoreSteps`.
        always_averages: whether sums are averages in steps with a batch size too.
    """

    _ballot: Ballot | None = None
    _summed: list[bool] | None = None
    """Trained parameters whose gradient `sum_gradients` has summed, until they are updated."""
    _examples = 0
    """Examples of the gradients of all workers in the last sum, as far as that is known."""

    def __init__(self, model: Model, feed: Feed, store: KVStore | Adapted, always_averages: bool = False) -> None:
        super().__init__(model, feed, store)
        self._always_averages = always_averages

    def begin(self) -> None:
        super().begin()
        self._ballot = open_ballot(self._store, self._model)

    def _make(self, grads: Grads, call: StepCall) -> None:
        self.meet()
        # Each worker divides before the sum: others may give other sizes, or skip this step.
        divide(grads, call.divisor(self._model.num_devices))
        self._sum_and_update(grads, call.average, self._feed.examples_of(call.batch_size, call.samples))

    def skip(self) -> None:
        if self._store.num_workers > 1:
            self._sum_and_update([None] * len(self._model.trained), True, 0)
        else:
            self._model.watch.note_grads()

    def _sum_and_update(self, grads: Grads, average: Average, samples: int) -> None:
        has_grad = self._sum(grads, average, samples)
        self._model.update(1, has_grad, self._examples)

    def sum_gradients(self, average: bool, on_stale: Stale) -> None:
        model = self._model
        model.groups.read()
        if self.join is not None:
            raise RuntimeError(
                "allreduce_grads() cannot be used within trainer.join(), because a worker that is done cannot repeat"
                " your changes of gradients. Call step(), with clip_norm to clip"
            )
        grads = model.watch.grads(on_stale)
        model.require_finite(grads)
        self._summed = self._sum(grads, average, self._feed.examples_of())

    def update(self, call: StepCall) -> None:
        summed, self._summed = self._summed, None
        examples = self._feed.examples_of(call.batch_size, call.samples) if summed is None else self._examples
        self._update(call, summed, examples)

    def _sum(self, grads: Grads, average: Average, samples: int) -> list[bool]:
        """Replace the gradients, on every device, by their sums over devices and workers.

        Args:
            grads: per trained parameter, on every device; None without a gradient.
            average: whether the sums are divided: by the number of workers, or by that of all samples.
            samples: examples of this worker's gradients; 0 if that is not known.

        Returns:
            For each trained parameter whether any worker had a gradient. Without that, it has no gradient afterwards.

        Raises:
            ValueError: some workers average and others sum, on a store that cannot mix the two; or only some give
                their samples.
            OptimizerMismatch: the workers' optimizers have different numbers.
        """
        is_weighted = average == "samples"
        average = self._always_averages or (average is True)
        here = [grad is not None for grad in grads]
        if self._ballot is None:
            self._exchange([position for position, is_here in enumerate(here) if is_here], grads, average)
            self._examples = samples
            return here
        if is_weighted:
            refuse_overflow(grads)
            divide(grads, 1 / samples)
        vote = self._ballot.cast(here, average and not is_weighted, is_weighted, samples)
        self._exchange(range(len(grads)), grads, average, (self._ballot.key, torch.from_numpy(vote)))
        given, (averaging, summing, weighing) = self._ballot.read(vote)
        for parameter, is_given in zip(self._model.trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        self._ballot.require_equal_numbers(vote)
        self._examples = self._ballot.examples(vote)
        if weighing:
            if averaging or summing:
                raise ValueError(
                    "some workers called step(samples=n), which weighs their gradients, and others step() or"
                    " step(batch_size): call the same on all workers"
                )
            scale(self._model.trained, 1 / (self._examples * self._ballot.share(vote)))
        if averaging and summing and isinstance(self._store, KVStore) and self._store.type not in DIST_NAMES:
            raise ValueError(
                "some workers called step(), which averages over the workers, and others step(batch_size), which sums:"
                f" the store {self._store.type!r} cannot do both in one step. Call the same on all workers"
            )
        return given

    def _exchange(
        self, positions: Sequence[int], grads: Grads, average: bool, vote: tuple[int, torch.Tensor] | None = None
    ) -> None:
        """Sum the gradients at these positions, and a vote: its key and its array."""
        members = [self._model.trained[position] for position in positions]
        for parameter in members:
            parameter.fill_grads()
        keys = [parameter.key for parameter in members]
        given = [grads[position] for position in positions]
        places = [parameter.grads() or [] for parameter in members]
        if vote is not None:
            key, ballot = vote
            keys, given, places = [*keys, key], [*given, [ballot]], [*places, [ballot]]
        # In place is cheaper, and the usual case: every result has a given gradient.
        complete = all(one is not None and len(one) == len(place) for one, place in zip(given, places, strict=True))
        if keys:
            self._store.pushpull(keys, given, out=None if complete else places, average=average)


def open_ballot(store: KVStore | Adapted, model: Model) -> Ballot | None:
    """Make the vote on gradients of workers that update, as a further key of the store; None for a single worker."""
    key = len(model.parameters)
    if store.num_workers == 1:
        return None
    store.leave_uncompressed([key])
    ballot = Ballot(key, model.optimizer, len(model.trained), store.rank, store.num_workers)
    blank = torch.from_numpy(np.zeros_like(ballot.cast([False] * len(model.trained), average=False)))
    store.broadcast([NamedKey(key, "the vote on who has which gradients")], [blank], out=[[blank]])
    return ballot
