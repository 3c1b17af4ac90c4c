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

from kvdist.kvstore.backend import Average
from kvdist.schema import real_number
from kvdist.training.data import Feed
from kvdist.training.exchange import Exchange
from kvdist.training.grad_checks import Stale
from kvdist.training.join import Join, NextStep
from kvdist.training.model import Model
from kvdist.training.parameters import Grads, divide
from kvdist.training.trainer_config import refuse_updated_there

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
    """Steps for each update of the weights on the store."""
    on_server = False
    """Whether servers hold the weights."""
    updates_here = True
    """Whether the trainer's optimizer runs in this process."""
    counts_steps = False
    """Whether `Trainer.version` counts the steps of this worker rather than the updates of the store."""
    has_own_pace = False
    """Whether a worker makes as many steps as it can, and waits for none of another worker."""
    is_exchanged = True
    """Whether the store has all steps of this worker."""
    handed_out = 0
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
        model.read_groups()
        model.refuse_untrained()
        model.require_unchanged()
        grads = model.gradients(call.on_stale)
        self._make(grads, self._checked(call))

    def _checked(self, call: StepCall) -> StepCall:
        """Return the call as the step uses it; raises a `ValueError` if it does not fit earlier steps."""
        return call

    @abc.abstractmethod
    def _make(self, grads: Grads, call: StepCall) -> None:
        """Make a step with these gradients, which are checked."""

    @abc.abstractmethod
    def skip(self) -> None:
        """Take part in a step of the others without gradients."""

    def meet(self) -> None:
        """Within `Trainer.join`, announce a step of this worker; no error of its call is raised after that."""
        if self.join is not None:
            self._model.read_groups()
            self.join.meet(NextStep.STEPS)

    def broadcast(self) -> None:  # noqa: B027  # without a store nobody else has weights
        """Copy rank 0's weights to all workers and to the store."""

    def fetch(self) -> None:  # noqa: B027  # without a store nobody else has weights
        """Take the weights of the store."""

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
            rounds: updates of the store then.
            updates: the version that follows from it alone.
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
        self._model.read_groups()

    def update(self, call: StepCall) -> None:
        self._update(call, None, self._feed.examples_of(call.batch_size, call.samples))


class StoreSteps(Steps):
    """Steps with a store.

    Args:
        model, feed: as of `Steps`.
        exchange: the exchange with the store.
    """

    def __init__(self, model: Model, feed: Feed, exchange: Exchange) -> None:
        super().__init__(model, feed)
        self._exchange = exchange

    def broadcast(self) -> None:
        self.settle()
        self._exchange.broadcast()
        self.note_weights()

    def fetch(self) -> None:
        self._exchange.fetch()
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
        if self._exchange.has_others:
            self._push([None] * len(self._model.trained), True, self._feed.unpushed)
        else:
            self._model.watch.note_grads()

    def _push(self, grads: Grads, average: Average, samples: int) -> None:
        model = self._model
        try:
            model.grad_norm = self._exchange.update(grads, average, samples, model.clip_norm)
        finally:
            self.note_weights()  # they were written, also if it failed
        model.updates += 1
        model.samples += samples
        model.watch.note_grads()


class WorkerSteps(StoreSteps):
    """Each step sums gradients over the store, and every worker updates its weights with the sums."""

    _summed: list[bool] | None = None
    """Trained parameters whose gradient `sum_gradients` has summed, until they are updated."""

    def begin(self) -> None:
        super().begin()
        self._exchange.open_ballot(self._model.optimizer)

    def _make(self, grads: Grads, call: StepCall) -> None:
        self.meet()
        # Each worker divides before the sum: others may give other sizes, or skip this step.
        divide(grads, call.divisor(self._model.num_devices))
        self._sum_and_update(grads, call.average, self._feed.examples_of(call.batch_size, call.samples))

    def skip(self) -> None:
        if self._exchange.has_others:
            self._sum_and_update([None] * len(self._model.trained), True, 0)
        else:
            self._model.watch.note_grads()

    def _sum_and_update(self, grads: Grads, average: Average, samples: int) -> None:
        has_grad = self._exchange.sum(grads, average, samples)
        self._model.update(1, has_grad, self._exchange.examples)

    def sum_gradients(self, average: bool, on_stale: Stale) -> None:
        model = self._model
        model.read_groups()
        if self.join is not None:
            raise RuntimeError(
                "allreduce_grads() cannot be used within trainer.join(), because a worker that is done cannot repeat"
                " your changes of gradients. Call step(), with clip_norm to clip"
            )
        grads = model.watch.grads(on_stale)
        model.require_finite(grads)
        self._summed = self._exchange.sum(grads, average, self._feed.examples_of())

    def update(self, call: StepCall) -> None:
        summed, self._summed = self._summed, None
        examples = self._feed.examples_of(call.batch_size, call.samples) if summed is None else self._exchange.examples
        self._update(call, summed, examples)
