"""The stores ``local`` and ``device``: values shared by the devices of one process. No other process, no thread.

Everything is done when a call returns, so the futures of the ``*_async`` methods are resolved already. Invariants:

* All keys and values of a call are checked before the first one is touched.
* The stored bits are the store's own: what comes in is summed into them, what goes out is copied from them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdist.core.server.table_rows import TableRows, obstacle
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import PushRefused
from kvdist.kernels.interface import Device, Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.backend import (
    Ability,
    Backend,
    Lending,
    LoadJob,
    PushOptions,
    PushPull,
    Reduction,
    SaveJob,
    resolved,
)
from kvdist.kvstore.keys import Ids, KeyArrays, Rows, alone, as_dense, require_no_tables
from kvdist.kvstore.local_values import HostValue, LocalValue, Updaters, require_runs_on
from kvdist.kvstore.placement import Devices, home_of, require_one_kind
from kvdist.kvstore.registry import COMPRESSING_NAMES
from kvdist.kvstore.rowsparse import LazyRows, RowSparse
from kvdist.kvstore.sparse import MixedTransfers
from kvdist.kvstore.values import Bits, Key, Keys, UpdaterFunction, Value
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.initializer import initializer_from
from kvdist.optimizer.states import SliceState
from kvdist.protocol.messages import ROWS

if TYPE_CHECKING:
    from kvdist.kvstore.checkpoints import Checkpoint, Held, WorkerSaving
    from kvdist.kvstore.compression import StoreCompression

Matched = list[tuple[LocalValue, list[Any]]]
"""The values of a call's keys, with the arrays of the call, each checked to fit."""


class LocalBackend(Backend):
    """Values within this process; on CPU arrays ``local`` and ``device`` do the same.

    Args:
        type_name: the name by which the store was created.
        kernels: what does the arithmetic on the host.
        devices: the GPUs that it uses; None where values of GPUs are brought to the host.
    """

    abilities = frozenset(Ability) - {Ability.CLIPPING}

    def __init__(self, type_name: str, kernels: Kernels = REFERENCE, devices: Devices | None = None) -> None:
        super().__init__(type_name, devices=devices, kernels=kernels)
        self.arrays: LocalArrays = LocalArrays(self)
        self.rows: LocalRows = LocalRows(self)
        if type_name not in COMPRESSING_NAMES:
            self.abilities = self.abilities - {Ability.COMPRESSION}
        self._saving: WorkerSaving | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        updaters = self.arrays.updaters
        return None if updaters is None else updaters.optimizer

    def declare(self, given: KeyArrays) -> None:
        fresh = self.keys.undeclared(given)
        tables = [(alone(one), one[1]) for one in fresh if one[-1]]
        arrays = [(alone(one), one[1]) for one in fresh if not one[-1]]
        if self.compression is not None:
            self.compression.require((info.key, info.dtype) for info, _ in arrays)
        if tables and self.arrays.function is not None:
            raise TypeError(
                f"{tables[0][0].name} is a table of rows, which only an optimizer updates; this store has an"
                " updater: call set_optimizer, or make another store"
            )
        made = [self.arrays.made(info, first) for info, first in arrays]
        for info, first in tables:
            self.rows.add(info, first)  # may refuse one; those before it are initialised then
            self.keys.add(info, first)
        self.arrays.entries.update((value.key, value) for value in made)
        for info, first in arrays:
            self.keys.add(info, first)

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        require_no_tables(self.rows.blocks, [(one, arrays) for one, arrays in given if one in self.rows.blocks])
        self.declare(given)
        arrays = [(one, own) for one, own in given if one not in self.rows.blocks]
        results = self.arrays.writable(values.pairs(key, out)) if len(arrays) == len(given) else None
        self.arrays.replace(arrays)
        if results is None:
            MixedTransfers(self).transfer(PushPull(key, None, out, priority, Lending.EVERYTHING, pushes=False)).result()
        else:
            self.arrays.write_to(results)

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        copies = [values.zeros_like(array) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = float("nan") if how is Reduction.MEAN_OF_OTHERS else array
        return copies

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        """Return: this worker is the only one."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.rows.require_fit(optimizer)
        self.arrays.set_optimizer(optimizer)

    def set_updater(self, function: UpdaterFunction) -> None:
        if self.rows.blocks:
            table = next(iter(self.rows.blocks))
            raise TypeError(f"{name_of(table)} is a table of rows, which only an optimizer updates; call set_optimizer")
        self.arrays.function, self.arrays.updaters = function, None

    def require_compression(self, chosen: StoreCompression) -> None:
        if chosen.compression.pulled_as is not DType.FLOAT32:
            raise ValueError(
                f"'pull' is for stores whose values travel, and those of {self.type!r} do not: leave it out, or use"
                " 'dist'"
            )

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        updaters = self._with_states()
        states = [updaters.state_of(self.keys[key].key) for key in keys]
        return [None if state is None else state.copy() for state in states]

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        updaters = self._with_states()
        for info, state in zip([self.keys[key] for key in keys], states, strict=True):
            updaters.restore(info.key, None if state is None else state.copy())

    def save(self, job: SaveJob) -> Future[Path]:
        return self._files().save(job)

    def load(self, job: LoadJob) -> Checkpoint:
        if not job.values:
            self.adopt_optimizer(self._files().saved_optimizer(job))
        checkpoint, found = self._files().load(job)
        if job.values:
            self.take(found)
        return checkpoint

    def held(self) -> list[Held]:
        """What is to be saved."""
        return [*self.arrays.held(), *self.rows.held()]

    def take(self, found: Sequence[Bits | None]) -> None:
        """Take these values, in the order of `held`; None leaves one as it is."""
        self.arrays.load(found[: len(self.arrays.entries)])  # behind them the tables, which have theirs
        if self.compression is not None:
            self.compression.forget()

    def close(self, wait: bool, failure: str = "") -> None:  # nobody hears it
        self.arrays.entries.clear()
        self.rows.blocks.clear()
        if self._saving is not None:
            self._saving.close(wait)

    def _files(self) -> WorkerSaving:
        if self._saving is None:
            from kvdist.kvstore.checkpoints import WorkerSaving

            self._saving = WorkerSaving(None, self.held, lambda: self.arrays.updaters)
            self._saving.position = lambda: self.position()
        return self._saving

    def _with_states(self) -> Updaters:
        if self.arrays.updaters is None:
            raise PushRefused("this store has no optimizer, and so no states: call set_optimizer first")
        return self.arrays.updaters


class LocalArrays:
    """The keys of one store that are arrays.

    Args:
        backend: has its keys, kernels, GPUs and compression.
    """

    def __init__(self, backend: Backend) -> None:
        self.entries: dict[Key, LocalValue] = {}
        self.updaters: Updaters | None = None
        """What a contribution changes the value by; without it, and without `function`, the sum replaces the value."""
        self.function: UpdaterFunction | None = None
        self._backend = backend
        self._keys = backend.keys
        self._kernels = backend.kernels
        self._devices = backend.devices
        self._settled: dict[Key, tuple[int, int]] = {}
        """Key that has had a contribution → the number of its GPU (-1 for the host), and its bytes."""

    def __getitem__(self, key: Key) -> LocalValue:
        return self.entries[self._keys[key].key]

    def made(self, info: KeyInfo, first: Any) -> LocalValue:
        """A new entry with a copy of its first value."""
        device, kind = self._devices.of(first), values.kind_of(first)
        if device is None:
            return HostValue(info.key, info.shape, info.dtype, kind, self._kernels, values.read_bits(first).copy())
        from kvdist.kvstore.device import DeviceValue  # a feature at a seam: loaded where it is used

        entry = DeviceValue(info.key, info.shape, info.dtype, kind, self._devices, device, first)
        entry.replace(first)
        return entry

    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull: all of it is done when this returns."""
        contributions = self.matched(values.pairs(call.key, call.value)) if call.pushes else []
        if call.pulls and call.out is None and not call.pushes:
            copies = [self[one].new() for one in values.keys(call.key)]
            return resolved(copies if isinstance(call.key, (list, tuple)) else copies[0])
        places = call.value if call.out is None else call.out
        results = self.writable(values.pairs(call.key, places), call.skips_rows) if call.pulls else []
        self.contribute(contributions)
        self.write_to(results)
        return resolved(None)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Update by this one from now on; it follows the same rule as the one before."""
        for entry in self.entries.values():
            require_runs_on(optimizer, entry.device)
        if self.updaters is None:
            self.updaters = Updaters(optimizer, self._kernels, self._home)
        else:
            self.updaters.optimizer = optimizer
        self.function = None

    def held(self) -> list[Held]:
        """What is to be saved, in the order of initialisation."""
        from kvdist.kvstore.checkpoints import HeldArray

        entries, samples = self.entries.values(), self._backend.samples
        return [HeldArray(one.key, one.shape, one.dtype, one.host_bits(), samples) for one in entries]

    def load(self, found: Sequence[Bits | None]) -> None:
        """Take these values, in the order of initialisation; None leaves one as it is."""
        for entry, bits in zip(self.entries.values(), found, strict=True):
            if bits is not None:
                entry.load(bits)

    def replace(self, given: KeyArrays) -> None:
        """Take the first of each key's values."""
        for entry, arrays in self.matched(given):
            entry.replace(arrays[0])
            if self._backend.compression is not None:
                self._backend.compression.forget([entry.key])

    def writable(self, places: KeyArrays, skips_rows: bool = False) -> Matched:
        """Where a call wants its results, checked."""
        return [(self.entries[info.key], arrays) for info, arrays in self._keys.writable(places, skips_rows)]

    def write_to(self, results: Matched) -> None:
        """Copy values into these arrays."""
        for entry, arrays in results:
            now = self.entries[entry.key]  # a contribution may have moved it
            for array in arrays:
                now.write_to(array)

    def matched(self, given: KeyArrays) -> Matched:
        """What a call contributes, checked."""
        dense = [(one, [as_dense(one, array, self._devices) for array in arrays]) for one, arrays in given]
        matched = self._keys.matched(dense)
        for info, arrays in matched:
            require_one_kind(info.key, arrays)
        return [(self.entries[info.key], arrays) for info, arrays in matched]

    def contribute(self, contributions: Matched) -> None:
        for entry, arrays in contributions:
            if not arrays:
                continue  # an empty contribution: it adds nothing, and there is no other worker
            home = self._home_for(entry, arrays)
            compression = self._backend.compression
            if compression is not None and not compression.covers(entry.key):
                compression = None
            if self.updaters is not None:
                home.update(self.updaters, arrays, compression)
            elif self.function is not None:
                home.call(self.function, arrays, compression)
            else:
                home.sum(arrays, compression)

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
        from kvdist.kvstore.device import DeviceValue  # a feature at a seam: loaded where it is used

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


class LocalRows:
    """The tables of one store: each is a block of rows such as a server has.

    Args:
        backend: has its keys, kernels and optimizer.
    """

    def __init__(self, backend: Backend) -> None:
        self.blocks: dict[Key, TableRows] = {}
        self._backend = backend

    def add(self, info: KeyInfo, value: RowSparse | LazyRows) -> None:
        """Keep a table that is not known yet; a copy."""
        initializer = None if info.form == ROWS else initializer_from(info.form)
        shape = info.shape
        self._require_fit(info.key, shape, initializer is not None, self._backend.optimizer)
        kernels = self._backend.kernels
        block = TableRows(info.key, len(self.blocks), shape, info.dtype, 0, shape[0], initializer, kernels)
        if isinstance(value, RowSparse):
            ids, rows = value.canonical()
            block.put(ids, rows.reshape(-1))
        self.blocks[info.key] = block

    def held(self) -> list[Held]:
        """What is to be saved, in the order of initialisation."""
        from kvdist.kvstore.checkpoints import HeldTable

        return [HeldTable(block, self._backend.keys[key].form) for key, block in self.blocks.items()]

    def require_fit(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot update one of the tables."""
        for key, block in self.blocks.items():
            self._require_fit(key, block.shape, block.is_lazy, optimizer)

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Update the table by these rows."""
        if rows is not None:
            ids, bits = rows
            optimizer = self._backend.optimizer
            scale = 1.0 if optimizer is None else optimizer.rescale_grad
            self.blocks[info.key].update([(ids, bits.reshape(-1))], [scale], optimizer)
        return resolved(None)

    def pull(self, info: KeyInfo, ids: Ids, out: Bits, priority: int) -> Future[None]:
        """Read rows."""
        self.blocks[info.key].gather(ids, out)
        return resolved(None)

    @staticmethod
    def _require_fit(key: Key, shape: tuple[int, ...], is_lazy: bool, optimizer: Optimizer | None) -> None:
        reason = None if optimizer is None else obstacle(optimizer, key, shape, is_lazy)
        if reason:
            raise ValueError(reason)
