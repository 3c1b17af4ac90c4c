"""`OuterSteps` of a trainer: workers make steps of their own, and exchange what these have changed.

What travels is the weights of the last exchange minus those of now, which an optimizer on the servers takes for a
gradient. So servers know nothing of it: a version is made of one contribution of each worker, as ever. Between two
exchanges the weights of workers differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from kvdist.config.policies import LocalSteps
from kvdist.kvstore.backend import Average
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.training.parameters import Grads, Parameter


def outer_optimizer(policy: LocalSteps) -> Optimizer:
    """What servers apply the changes with."""
    return create("torch.sgd", lr=policy.learning_rate, momentum=policy.momentum, nesterov=policy.momentum > 0)


class OuterSteps:
    """Counts the steps of a worker since the last exchange, and makes the next one.

    Args:
        policy: how many steps.
        parameters: the trained ones, each with one replica.
        update: pushes changes and writes the new weights; see `Exchange.update`.
    """

    def __init__(
        self,
        policy: LocalSteps,
        parameters: Sequence[Parameter],
        update: Callable[[Grads, Average, int], object],
    ) -> None:
        self._policy = policy
        self._weights = [parameter.replicas[0].detach() for parameter in parameters]
        self._update = update
        self._before = [weight.clone() for weight in self._weights]
        """The weights of the last exchange."""
        self.begin()

    @property
    def every(self) -> int:
        """How many steps there are between two exchanges."""
        return self._policy.every

    @property
    def is_due(self) -> bool:
        """Whether as many have been made."""
        return self.passed >= self.every

    def begin(self) -> None:
        """Count from here on: the weights are those of the store."""
        self.passed = 0
        """Steps since the last exchange, those without gradients included."""
        self.made = 0
        """Those with gradients."""
        self.samples = 0
        """Of how many examples they were, as far as that was said."""
        self.examples = 0
        """Of how many examples all of them were, as far as that is known."""
        self.handed_out = 0
        """How many examples of a queue were handed out for these steps."""
        torch._foreach_copy_(self._before, self._weights)

    def require_alike(self, samples: int | None) -> None:
        """Refuse a step if only some since the last exchange say of how many examples they are: a `ValueError`."""
        if self.made and (samples is None) != (self.samples == 0):
            raise ValueError(
                f"step({'' if samples is None else f'samples={samples}'}) after {self.made} steps"
                f" {'without samples' if samples else 'with samples'} since the last exchange: give samples in all"
                " steps, or in none"
            )

    def exchange(self, samples: int) -> None:
        """Push what the steps have changed, and get the new weights. Two passes over the weights, and one copy.

        Args:
            samples: of how many examples they are; 0 if that is not known.
        """
        differences = torch._foreach_sub(self._before, self._weights)
        changes: Grads = [[difference] if self.made else None for difference in differences]
        self._update(changes, "samples" if self.samples else True, samples)
        self.begin()
