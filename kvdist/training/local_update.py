"""Updates that a worker makes itself: without a store, or with the sums of gradients that a store has made.

A replica on a GPU is updated there, with its states beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvdist.config.settings import gpu_from_env
from kvdist.kernels.interface import Device
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.devices import Devices, OnDevice, as_host_bits
from kvdist.kvstore.updaters import Updaters
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.training.parameters import Parameter

if TYPE_CHECKING:
    import torch


class LocalUpdate:
    """An optimizer that runs here, with states of its own for each device.

    Args:
        optimizer: the rule and its numbers.
        parameters: all, in the order of their keys; they have the same number of replicas.
        devices: the GPUs that are used; None for what the environment says.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Parameter], devices: Devices | None = None) -> None:
        self.devices = Devices(gpu_from_env(), insists=False) if devices is None else devices
        self._parameters = parameters
        count = len(parameters[0].replicas)
        self._updaters = [Updaters(optimizer, REFERENCE, self._home(place)) for place in range(count)]

    @property
    def updater(self) -> Updaters:
        """Of the first device; the others' have the same states."""
        return self._updaters[0]

    def spread(self) -> None:
        """The first device's states are new: give the others copies of them."""
        for key in range(len(self._parameters)) if len(self._updaters) > 1 else ():
            state = self.updater.state_of(key)
            for other in self._updaters[1:]:
                other.restore(key, None if state is None else state.copy())

    def apply(self, parameters: Iterable[tuple[int, Parameter]]) -> None:
        """Update every replica that has a gradient, in place.

        Args:
            parameters: with their keys.

        Raises:
            TypeError, ValueError: a gradient does not fit its weight.
            DeviceError: the optimizer cannot run on a weight's GPU.
        """
        for key, parameter in parameters:
            for updaters, replica in zip(self._updaters, parameter.replicas, strict=True):
                if replica.grad is not None:
                    self._update(updaters, key, replica, replica.grad)

    def _home(self, place: int) -> Callable[[Hashable], Device | None]:
        def home(key: Hashable) -> Device | None:
            assert isinstance(key, int), "states are named by keys"
            return self.devices.of(self._parameters[key].replicas[place])

        return home

    def _update(self, updaters: Updaters, key: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
        shape, dtype = values.describe(weight)
        values.require(key, grad, shape, dtype)
        updater, extent = updaters.of(key), Extent(key, shape)
        scales = [updater.optimizer.rescale_grad]
        present, gradient = self.devices.read(weight, dtype), self.devices.read(grad, dtype)
        if isinstance(present, OnDevice):
            assert isinstance(gradient, OnDevice), "torch gives a gradient where its weight is"
            # A weight out of order was copied into order, and takes the new one from that copy.
            target = self.devices.place(weight, dtype) or present
            updater.update(key, present.array, [gradient.array], scales, dtype, target.array, extent=extent)
            if target is present:
                values.write_bits(weight, target.on_host())
            return
        bits = values.writable_bits(weight)
        own = present.copy() if bits is None else bits
        updater.update(key, own, as_host_bits([gradient]), scales, dtype, own, extent=extent)
        if bits is None:
            values.write_bits(weight, own)
