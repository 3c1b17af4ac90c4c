"""`OuterSteps` of a trainer: workers make steps of their own, and exchange what these have changed.

What travels is the weights of the last exchange minus those of now, which an optimizer on the servers takes for a
gradient. So servers know nothing of it: a version is made of one contribution of each worker, as ever. Between two
exchanges the weights of workers differ.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Sequence

import torch

from kvdist.config.policies import LocalSteps, Quota
from kvdist.kvstore.backend import Average
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.training.data import HandedOut
from kvdist.training.parameters import Grads, Parameter


def outer_optimizer(policy: LocalSteps | Quota) -> Optimizer:
    """What servers apply the changes with."""
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

    def __init__(self, parameters: Sequence[Parameter], unpushed: Callable[[], int]) -> None:
        self._weights = [parameter.replicas[0].detach() for parameter in parameters]
        self._unpushed = unpushed
        self._before = [weight.clone() for weight in self._weights]
        """The weights of the last exchange."""
        self.begin()

    def begin(self) -> None:
        """Count from here on: the weights are those of the store."""
        self._count_anew()
        torch._foreach_copy_(self._before, self._weights)

    def _count_anew(self) -> None:
        self.passed = 0
        """Steps since the last exchange, those without gradients included."""
        self.made = 0
        """Those with gradients."""
        self.samples = 0
        """Of how many examples they were, as far as that was said."""
        self.examples = 0
        """Of how many examples all of them were, as far as that is known."""
        self.handed_out = 0
        """How many examples of a queue were handed out that are not used."""

    def stepping(self) -> contextlib.AbstractContextManager[None]:
        """A context for what a step changes here."""
        return contextlib.nullcontext()

    def left(self) -> HandedOut:
        """What pushes have brought to servers that this worker has not heard of; for `count_as_used`."""
        return {}

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


class OuterSteps(Exchanges):
    """Exchanges after a number of steps of each worker.

    Args:
        policy: how many steps.
        parameters, unpushed: as of `Exchanges`.
        update: pushes changes and writes the new weights; see `Exchange.update`.
    """

    def __init__(
        self,
        policy: LocalSteps,
        parameters: Sequence[Parameter],
        unpushed: Callable[[], int],
        update: Callable[[Grads, Average, int], object],
    ) -> None:
        self.every = policy.every
        self._update = update
        super().__init__(parameters, unpushed)

    def require_alike(self, samples: int | None) -> None:
        if self.made and (samples is None) != (self.samples == 0):
            raise ValueError(
                f"step({'' if samples is None else f'samples={samples}'}) after {self.made} steps"
                f" {'without samples' if samples else 'with samples'} since the last exchange: give samples in all"
                " steps, or in none"
            )

    def after_step(self) -> None:
        if self.passed >= self.every:
            self.finish(together=True)

    def finish(self, together: bool) -> None:
        if not self.passed:
            return
        changes: Grads = [[change] if self.made else None for change in self._changes()]
        self._update(changes, "samples" if self.samples else True, self._unpushed() or self.examples)
        self.begin()
