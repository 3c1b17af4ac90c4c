"""Updates that a worker makes itself: without a store, or with the sums of gradients that a store has made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvdist.kvstore import values
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.step import Extent
from kvdist.optimizer.updater import Updater
from kvdist.parameters import Parameter

if TYPE_CHECKING:
    import torch


class LocalUpdate:
    """An optimizer that runs here, with states of its own for each device.

    Args:
        optimizer: the rule and its numbers.
        num_devices: how many replicas each parameter has.
    """

    def __init__(self, optimizer: Optimizer, num_devices: int) -> None:
        self._updaters = [Updater(optimizer) for _ in range(num_devices)]

    @property
    def updater(self) -> Updater:
        """Of the first device; the others' have the same states."""
        return self._updaters[0]

    def spread(self) -> None:
        """The first device's states are new: give the others copies of them."""
        for other in self._updaters[1:]:
            for key, state in self.updater.states.items():
                other.restore(key, state.copy())

    def apply(self, parameters: Iterable[tuple[int, Parameter]]) -> None:
        """Update every replica that has a gradient, in place.

        Args:
            parameters: with their keys.

        Raises:
            TypeError, ValueError: a gradient does not fit its weight.
        """
        for key, parameter in parameters:
            for updater, replica in zip(self._updaters, parameter.replicas, strict=True):
                if replica.grad is not None:
                    _update(updater, key, replica, replica.grad)


def _update(updater: Updater, key: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    shape, dtype = values.describe(weight)
    values.require(key, grad, shape, dtype)
    bits = values.writable_bits(weight)
    target = values.read_bits(weight).copy() if bits is None else bits
    scales, extent = [updater.optimizer.rescale_grad], Extent(key, shape)
    updater.update(key, target, [values.read_bits(grad)], scales, dtype, target, extent=extent)
    if bits is None:
        values.write_bits(weight, target)
