"""The optimizer of a local store, and its states wherever the keys rest: on the host and on GPUs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from kvdist.kernels.interface import Device, Kernels
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.offload import on_device, on_host, require_runs_on
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.updater import Updater


class Updaters:
    """One updater for the host, and one for each GPU on which a key rests. A state follows its key.

    Args:
        optimizer: the rule and its numbers.
        kernels: the host's.
        home: tells on which GPU a key rests now; None for the host.
    """

    def __init__(self, optimizer: Optimizer, kernels: Kernels, home: Callable[[Hashable], Device | None]) -> None:
        self._host = Updater(optimizer, kernels)
        self._on_gpus: dict[int, Updater] = {}
        self._home = home
        self._rested: dict[Hashable, Device | None] = {}
        """Key → where its state is."""

    @property
    def optimizer(self) -> Optimizer:
        """What updates the values."""
        return self._host.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Optimizer) -> None:
        for updater in (self._host, *self._on_gpus.values()):
            updater.optimizer = optimizer

    def of(self, key: Hashable) -> Updater:
        """What updates a key where it rests; its state is there.

        Raises:
            DeviceError: the optimizer cannot run on that GPU.
        """
        device = self._home(key)
        updater = self._on(device)
        before = self._rested.get(key, device)
        if before is not device:
            state = _lifted(self._on(before).state_of(key), before)
            self._on(before).restore(key, None)
            updater.restore(key, _put_down(state, device))
        self._rested[key] = device
        return updater

    def state_of(self, key: Hashable) -> SliceState | None:
        """The state of a key, in the host's memory; None if it has never been updated.

        That of a key of the host is live: copy what must not change.
        """
        return _lifted(self.of(key).state_of(key), self._rested[key])

    def restore(self, key: Hashable, state: SliceState | None) -> None:
        """Go on from this state; see `Updater.restore`."""
        self.of(key).restore(key, _put_down(state, self._rested[key]))

    def _on(self, device: Device | None) -> Updater:
        if device is None:
            return self._host
        updater = self._on_gpus.get(device.index)
        if updater is None:
            require_runs_on(self.optimizer, device)
            updater = self._on_gpus[device.index] = Updater(self.optimizer, device.kernels)
        return updater


def _lifted(state: SliceState | None, device: Device | None) -> SliceState | None:
    return state if state is None or device is None else on_host(state, device)


def _put_down(state: SliceState | None, device: Device | None) -> SliceState | None:
    return state if state is None or device is None else on_device(state, device)
