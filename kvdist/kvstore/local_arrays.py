"""The keys of a `LocalStore` that are arrays: how calls on them are checked, and what their contributions do.

All keys and values of a call are checked before the first one is touched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from typing import Any

from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised
from kvdist.kernels.interface import Device, Kernels
from kvdist.kvstore import values
from kvdist.kvstore.base import Keys, UpdaterFunction, Value
from kvdist.kvstore.compression import StoreCompression
from kvdist.kvstore.device import Devices, home_of, require_one_kind
from kvdist.kvstore.keys import as_dense
from kvdist.kvstore.local_rows import resolved
from kvdist.kvstore.local_saving import Held
from kvdist.kvstore.local_values import DeviceValue, HostValue, LocalValue, Updaters
from kvdist.kvstore.staging import Lending, PushOptions
from kvdist.kvstore.values import Bits, Key, Shape
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.offload import require_runs_on

Matched = list[tuple[LocalValue, list[Any]]]
"""The entries of a call, with their arrays, each checked to fit."""


class LocalArrays:
    """The arrays of one store.

    Args:
        kernels: what does the arithmetic on the host.
        devices: the GPUs that are used.
    """

    def __init__(self, kernels: Kernels, devices: Devices) -> None:
        self.entries: dict[Key, LocalValue] = {}
        self.updaters: Updaters | None = None
        """What a contribution changes the value by; without it, and without `function`, the sum replaces the value."""
        self.function: UpdaterFunction | None = None
        self.compressing: StoreCompression | None = None
        self._kernels = kernels
        self._devices = devices
        self._settled: dict[Key, tuple[int, int]] = {}
        """Key that has had a contribution → the number of its GPU (-1 for the host), and its bytes."""

    def __getitem__(self, key: Key) -> LocalValue:
        entry = self.entries.get(key)
        if entry is None:
            raise KeyNotInitialised(values.unknown_key(key, self.entries))
        return entry

    def fresh(self, key: Key, arrays: list[Any]) -> LocalValue | None:
        """A new entry with a copy of the first of these values; None where the key has one, which must fit.

        Raises:
            InitMismatch: it does not.
            TypeError, ValueError: the values cannot be a key's.
        """
        shape, dtype = values.first_shape(key, arrays)
        entry = self.entries.get(key)
        if entry is None:
            return self._made(key, shape, dtype, arrays[0])
        if (entry.shape, entry.dtype) != (shape, dtype):
            raise InitMismatch(
                f"key {key!r} was initialised with shape {entry.shape} and dtype {entry.dtype.label},"
                f" and now with shape {shape} and dtype {dtype.label}"
            )
        return None

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update by this one from now on; it follows the same rule as the one before."""
        for entry in self.entries.values():
            if entry.device is not None:
                require_runs_on(optimizer, entry.device)
        if self.updaters is None:
            self.updaters = Updaters(optimizer, self._kernels, self._home)
        else:
            self.updaters.optimizer = optimizer
        self.function = None

    def held(self) -> list[Held]:
        """What is to be saved, in the order of initialisation."""
        return [Held(one.key, one.shape, one.dtype, one.host_bits()) for one in self.entries.values()]

    def load(self, found: Sequence[Bits | None]) -> None:
        """Take these values, in the order of initialisation; None leaves one as it is."""
        for entry, bits in zip(self.entries.values(), found, strict=True):
            if bits is not None:
                entry.load(bits)

    def replace(self, given: Sequence[tuple[Key, list[Any]]]) -> None:
        """Take the first of each key's values."""
        for entry, arrays in self._matched(given):
            entry.replace(arrays[0])
            if self.compressing is not None:
                self.compressing.forget([entry.key])

    def writable(self, key: Keys, value: Value) -> Matched:
        """Where a call wants its results."""
        matched = [(self[one], arrays) for one, arrays in values.pairs(key, value)]
        for entry, arrays in matched:
            for array in arrays:
                values.require_writable(entry.key, array, entry.shape, entry.dtype)
        return matched

    def hand_out(self, results: Matched) -> None:
        """Copy the values out."""
        for entry, arrays in results:
            now = self.entries[entry.key]  # a contribution may have moved it
            for array in arrays:
                now.write_to(array)

    # As `kvdist.kvstore.calls.ArrayMoves`. Everything is done when a method returns.

    def push(self, key: Keys, value: Value, priority: int, options: PushOptions) -> None:
        self._contribute(self._matched(values.pairs(key, value)))

    def push_async(self, key: Keys, value: Value, priority: int, options: PushOptions) -> Future[None]:
        self.push(key, value, priority, options)
        return resolved(None)

    def pull(self, key: Keys, out: Value | None, priority: int) -> Future[Any]:
        if out is not None:
            self.hand_out(self.writable(key, out))
            return resolved(None)
        copies = [self[one].new() for one in values.keys(key)]
        return resolved(copies if isinstance(key, (list, tuple)) else copies[0])

    def pull_gathered(self, key: Keys, out: Value, priority: int) -> Future[Any]:
        return self.pull(key, out, priority)

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None,
        priority: int,
        options: PushOptions,
        lending: Lending,
        hold: bool = False,
    ) -> Future[Any]:
        contributions = self._matched(values.pairs(key, value))
        results = self.writable(key, value if out is None else out)
        self._contribute(contributions)
        self.hand_out(results)
        return resolved(None)

    def watch(self, future: Future[None]) -> None:
        """It is done, and what went wrong has been raised."""

    def _matched(self, given: Sequence[tuple[Key, list[Any]]]) -> Matched:
        matched = [(self[one], [as_dense(array, self._devices) for array in arrays]) for one, arrays in given]
        for entry, arrays in matched:
            for array in arrays:
                values.require(entry.key, array, entry.shape, entry.dtype)
            require_one_kind(entry.key, arrays)
        return matched

    def _contribute(self, contributions: Matched) -> None:
        for entry, arrays in contributions:
            if not arrays:
                continue  # an empty contribution: it adds nothing, and there is nobody else
            home = self._home_for(entry, arrays)
            compressing = self.compressing
            if compressing is not None and not compressing.covers(entry.key):
                compressing = None
            if self.updaters is not None:
                home.update(self.updaters, arrays, compressing)
            elif self.function is not None:
                home.call(self.function, arrays, compressing)
            else:
                home.sum(arrays, compressing)

    def _made(self, key: Key, shape: Shape, dtype: DType, first: Any) -> LocalValue:
        device, kind = self._devices.of(first), values.kind_of(first)
        if device is None:
            return HostValue(key, shape, dtype, kind, self._kernels, values.read_bits(first))
        entry = DeviceValue(key, shape, dtype, kind, self._devices, device, first)
        entry.replace(first)
        return entry

    def _home_for(self, entry: LocalValue, arrays: Sequence[Any]) -> LocalValue:
        """The entry, which from its first contribution on rests where that comes from."""
        if entry.key in self._settled:
            return entry
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        found = {device.index: device for device in map(self._devices.of, arrays) if device is not None}
        if not found:
            self._settled[entry.key] = -1, nbytes
            return entry
        load = Counter[int]()
        for index, settled_bytes in self._settled.values():
            load[index] += settled_bytes
        home = home_of(list(found.values()), load)
        self._settled[entry.key] = home.index, nbytes
        return self._moved(entry, home, next(array for array in arrays if self._devices.of(array) is home))

    def _moved(self, entry: LocalValue, home: Device, like: Any) -> LocalValue:
        if isinstance(entry, DeviceValue):
            entry.move(home)
            return entry
        moved = DeviceValue(entry.key, entry.shape, entry.dtype, entry.kind, self._devices, home, like)
        moved.load(entry.host_bits())
        self.entries[entry.key] = moved
        return moved

    def _home(self, key: Hashable) -> Device | None:
        assert isinstance(key, int | str), "states are named by keys"
        return self.entries[key].device
