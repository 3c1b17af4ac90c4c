"""Weights of a trainer that this process updates, or that are views of the servers' memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import torch

from kvdist.config.environment import read_setting
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import Device
from kvdist.kvstore import values
from kvdist.kvstore.local_values import Updaters
from kvdist.kvstore.placement import Devices, OnDevice
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.training.parameters import Parameter


class SharedWeights:
    """The parameters that are views of servers' memory, and whether the user's code has changed them.

    Args:
        parameters: the trained parameters, each with a single replica.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int | None] = [None] * len(parameters)
        """Version counters of torch at the last step; None for a parameter that is no view of servers' memory."""
        self._changed: list[str] = []

    def require_unchanged(self) -> None:
        """Refuse weights that were written to since the last step.

        Raises:
            RuntimeError: a weight was changed, and `own` was not called since.
        """
        self._changed = self._changed or [
            parameter.label
            for parameter, version in zip(self._parameters, self._versions, strict=True)
            if version is not None and _weight(parameter)._version != version
        ]
        if self._changed:
            raise RuntimeError(
                f"{', '.join(self._changed)} was changed outside of step(). With share_weights=True parameters show the"
                " servers' memory, and other workers do not see the change. Call trainer.broadcast_parameters() on"
                " every worker after changing weights, such as by load_state_dict(); nothing was sent in this step"
            )

    def take(self, shown: Sequence[Any]) -> None:
        """Make parameters views of a step's results.

        Args:
            shown: per parameter a tensor with its new value, or None if the value was written in place.
        """
        for i, (parameter, tensor) in enumerate(zip(self._parameters, shown, strict=True)):
            if tensor is None:
                self._versions[i] = None
                continue
            weight = _weight(parameter)
            # An operation on no elements writes nothing, but advances the version counter that autograd checks.
            weight.detach().view(-1)[:0].zero_()
            weight.data = tensor
            self._versions[i] = weight._version

    def own(self) -> None:
        """Copy every parameter, including the user's changes, to private memory."""
        self._changed = []
        for i, parameter in enumerate(self._parameters):
            if self._versions[i] is not None:
                weight = _weight(parameter)
                weight.data = weight.detach().clone()
                self._versions[i] = None


def _weight(parameter: Parameter) -> torch.Tensor:
    return parameter.replicas[0]


class LocalUpdate:
    """An optimizer that runs in this process, on local gradients or on a store's sums, with states for each device.

    A replica on a GPU is updated on that GPU, which holds its states too.

    Args:
        optimizer: the rule and its hyper-parameters.
        parameters: all parameters, in the order of their keys, with the same number of replicas.
        devices: the GPUs that are used; None reads the environment.
    """

    def __init__(self, optimizer: Optimizer, parameters: Sequence[Parameter], devices: Devices | None = None) -> None:
        self.devices = Devices(read_setting("KVDIST_GPU"), insists=False) if devices is None else devices
        self._parameters = parameters
        kernels, count = choose(read_setting("KVDIST_KERNELS")), len(parameters[0].replicas)
        self._updaters = [Updaters(optimizer, kernels, self._home(place)) for place in range(count)]

    @property
    def updater(self) -> Updaters:
        """Updaters of the first device; the updaters of the other devices have the same states."""
        return self._updaters[0]

    def spread(self) -> None:
        """Copy the states of the first device to the others."""
        for key in range(len(self._parameters)) if len(self._updaters) > 1 else ():
            state = self.updater.state_of(key)
            for other in self._updaters[1:]:
                other.restore(key, None if state is None else state.copy())

    def apply(self, parameters: Iterable[Parameter]) -> None:
        """Update every replica that has a gradient, in place.

        Raises:
            TypeError, ValueError: a gradient does not fit its weight.
            DeviceError: the optimizer cannot run on a weight's GPU.
        """
        for parameter in parameters:
            for updaters, replica in zip(self._updaters, parameter.replicas, strict=True):
                if replica.grad is not None:
                    self._update(updaters, parameter.key, replica, replica.grad)

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
        if self.devices.of(weight) is None:
            bits = values.writable_bits(weight, dtype)
            own = values.read_bits(weight).copy() if bits is None else bits
            updater.update(key, own, [values.read_bits(grad)], scales, dtype, own, extent=extent)
            if bits is None:
                values.write_bits(weight, own, dtype)
            return
        present, gradient = self.devices.read(weight, dtype), self.devices.read(grad, dtype)
        assert isinstance(present, OnDevice) and isinstance(gradient, OnDevice), "a gradient lies where its weight does"
        # A non-contiguous weight was copied, and takes its new value from the copy.
        target = self.devices.place(weight, dtype) or present
        updater.update(key, present.array, [gradient.array], scales, dtype, target.array, extent=extent)
        if target is present:
            values.write_bits(weight, target.on_host(), dtype)
