"""A key of a local store: its value, the device on which it rests, its optimizer's state, its contributions.

Invariants:

* The store shares no memory with the caller: contributions are summed into the value, results are copied from it.
* A key rests where its first contributions come from: on the host, or on a GPU. Its state follows it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, Kernels
from kvdist.kvstore import values
from kvdist.kvstore.placement import OnDevice
from kvdist.kvstore.values import Bits, Key, Shape, UpdaterFunction
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.updater import Updater


class DeviceCodec(Protocol):
    """What compresses the contributions of devices, as if they travelled."""

    def through(self, key: Key, parts: Sequence[Bits]) -> list[Bits]:
        """What contributions from the host's memory become on their way."""

    def through_on_devices(self, key: Key, parts: Sequence[OnDevice], home: Device) -> list[Array]:
        """What contributions from GPUs become on their way to the GPU on which the key rests."""


class Updaters:
    """An updater for the host, and an updater for each GPU on which a key rests. A state follows its key.

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
        """The updater of the device on which a key rests; it has the key's state.

        Raises:
            DeviceError: the optimizer cannot run on that GPU.
        """
        device = self._home(key)
        updater = self._on(device)
        before = self._rested.get(key, device)
        if before is not device:
            state = _moved(self._on(before).state_of(key), before, device)
            self._on(before).restore(key, None)
            updater.restore(key, state)
        self._rested[key] = device
        return updater

    def state_of(self, key: Hashable) -> SliceState | None:
        """The state of a key, in the host's memory; None if it has never been updated.

        That of a key of the host is live: copy what must not change.
        """
        return _moved(self.of(key).state_of(key), self._rested[key], None)

    def restore(self, key: Hashable, state: SliceState | None) -> None:
        """Go on from this state; see `Updater.restore`."""
        self.of(key).restore(key, _moved(state, None, self._rested[key]))

    def _on(self, device: Device | None) -> Updater:
        if device is None:
            return self._host
        updater = self._on_gpus.get(device.index)
        if updater is None:
            require_runs_on(self.optimizer, device)
            updater = self._on_gpus[device.index] = Updater(self.optimizer, device.kernels)
        return updater


def require_runs_on(optimizer: Optimizer, device: Device | None) -> None:
    """Check that a rule can run on a GPU; None is the host, which runs all.

    Raises:
        DeviceError: it cannot.
    """
    if device is not None:
        from kvdist.optimizer import offload  # a feature at a seam: loaded where it is used

        offload.require_runs_on(optimizer, device)


def _moved(state: SliceState | None, source: Device | None, target: Device | None) -> SliceState | None:
    """A state of a GPU for another GPU; None is the host."""
    if state is None or source is target:
        return state
    from kvdist.optimizer import offload  # a feature at a seam: loaded where it is used

    on_host = state if source is None else offload.on_host(state, source)
    return on_host if target is None else offload.on_device(on_host, target)


class LocalValue(ABC):
    """A key.

    Args:
        key, shape, dtype: of it.
        kind: what came, so what comes back; see `values.kind_of`.
        kernels: what does the arithmetic where it rests.
        bits: the value, on that device.
    """

    def __init__(self, key: Key, shape: Shape, dtype: DType, kind: str, kernels: Kernels, bits: Array) -> None:
        self.key = key
        self.shape = shape
        self.dtype = dtype
        self.kind = kind
        self._kernels = kernels
        self._bits = bits

    @property
    @abstractmethod
    def device(self) -> Device | None:
        """The GPU on which it rests; None for the host."""

    @abstractmethod
    def load(self, bits: Bits) -> None:
        """Take another value, from the host's memory."""

    @abstractmethod
    def replace(self, value: Any) -> None:
        """Take another value, from wherever the user has it."""

    @abstractmethod
    def write_to(self, array: Any) -> None:
        """Copy the value into the user's array."""

    @abstractmethod
    def host_bits(self) -> Bits:
        """The value in the host's memory, to be read at once."""

    def new(self) -> Any:
        """A copy of the value, of the kind that came."""
        return values.like(self.kind, self.shape, self.dtype, self.host_bits().copy())

    def sum(self, arrays: Sequence[Any], compression: DeviceCodec | None) -> None:
        """The sum of these becomes the value."""
        self._sum_into(self._bits, arrays, compression)

    def update(self, updaters: Updaters, arrays: Sequence[Any], compression: DeviceCodec | None) -> None:
        """The optimizer changes the value by the sum of these."""
        updater = updaters.of(self.key)
        parts = self._parts(arrays, compression)
        scales = [updater.optimizer.rescale_grad] * len(parts)
        extent = Extent(self.key, self.shape)
        updater.update(self.key, self._bits, parts, scales, self.dtype, self._bits, extent=extent)

    def call(self, function: UpdaterFunction, arrays: Sequence[Any], compression: DeviceCodec | None) -> None:
        """The user's function changes the value by the sum of these."""
        # A sum of its own, even of one array: the function may write into what it received.
        received, total, stored = self._for_function()
        self._sum_into(total, arrays, compression)
        with self._kernels.active():
            function(self.key, received, stored)

    @abstractmethod
    def _for_function(self) -> tuple[Any, Array, Any]:
        """For the user's function: a new array and its bits, and the value."""

    @abstractmethod
    def _parts(self, arrays: Sequence[Any], compression: DeviceCodec | None) -> list[Array]:
        """The contributions, on the device on which the value rests."""

    def _sum_into(self, out: Array, arrays: Sequence[Any], compression: DeviceCodec | None) -> None:
        parts = self._parts(arrays, compression)
        self._kernels.weighted_sum(parts, [1.0] * len(parts), self.dtype, out)


class HostValue(LocalValue):
    """A key that rests in the host's memory."""

    @property
    def device(self) -> None:
        return None

    def load(self, bits: Bits) -> None:
        self._bits[...] = bits

    def replace(self, value: Any) -> None:
        self.load(values.read_bits(value))

    def write_to(self, array: Any) -> None:
        values.write_bits(array, self._bits, self.dtype)

    def host_bits(self) -> Bits:
        bits: Bits = self._bits
        return bits

    def _for_function(self) -> tuple[Any, Array, Any]:
        library = "torch" if self.kind.startswith("torch") else "numpy"
        total = np.empty_like(self._bits)
        received = values.like(library, self.shape, self.dtype, total)
        return received, total, values.like(library, self.shape, self.dtype, self._bits)

    def _parts(self, arrays: Sequence[Any], compression: DeviceCodec | None) -> list[Bits]:
        parts = [values.read_bits(array) for array in arrays]
        return parts if compression is None else compression.through(self.key, parts)

    def _sum_into(self, out: Array, arrays: Sequence[Any], compression: DeviceCodec | None) -> None:
        if len(arrays) == 1 and compression is None:  # a plain copy, at less than half the cost of a kernel's call
            out[...] = values.read_bits(arrays[0])
        else:
            super()._sum_into(out, arrays, compression)
