"""The stores ``local`` and ``device``: values shared by the devices of a process. No other process, no thread.

A call has done everything when it returns, so the futures of the ``*_async`` methods are resolved already. Invariants:

* A call checks all its keys and values before it touches the first value.
* The store shares no memory with the caller: contributions are summed into its values, results are copied from them.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from kvdist.core.server.table_rows import TableRows, obstacle
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import KeyNotInitialised, PushRefused
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
from kvdist.kvstore.keys import Ids, KeyArrays, Rows, alone, require_no_tables
from kvdist.kvstore.local_values import HostValue, LocalValue, Updaters, require_runs_on
from kvdist.kvstore.placement import Devices, Matched, home_of, require_one_kind
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
    from kvdist.kvstore.checkpoints import Checkpoint, CheckpointFuture, Held, Workers, WorkerSaving
    from kvdist.kvstore.compression import StoreCompression


class LocalBackend(Backend):
    """Values within this process; on CPU arrays ``local`` and ``device`` do the same.

    Args:
        type_name: name by which the store was created.
        kernels: kernels for arithmetic on the host.
        devices: GPUs that the store uses; None where values of GPUs are brought to the host.
        rank, num_workers: this worker's rank, and number of workers whose stores hold the same values.

    Attributes:
        entries: value of each key that is an array.
        updaters: change a value by a contribution; without them, and without `function`, the sum replaces the value.
        lock: held while values change or are read.
    """

    abilities = frozenset(Ability) - {Ability.CLIPPING}
    lock: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    _ranks: Workers | None = None
    """Workers that save together; None for a single process."""

    def __init__(
        self,
        type_name: str,
        kernels: Kernels = REFERENCE,
        devices: Devices | None = None,
        rank: int = 0,
        num_workers: int = 1,
    ) -> None:
        super().__init__(type_name, rank, num_workers, devices=devices, kernels=kernels)
        if type_name not in COMPRESSING_NAMES:
            self.abilities = self.abilities - {Ability.COMPRESSION}
        self.entries: dict[Key, LocalValue] = {}
        self.rows: LocalRows = LocalRows(self)
        self.updaters: Updaters | None = None
        self.function: UpdaterFunction | None = None
        self._settled: dict[Key, tuple[int, int]] = {}
        """Key that has had a contribution → the number of its GPU (-1 for the host), and its bytes."""
        self._saving: WorkerSaving | None = None

    @property
    def optimizer(self) -> Optimizer | None:
        return None if self.updaters is None else self.updaters.optimizer

    # Keys.

    def declare(self, given: KeyArrays) -> None:
        fresh = self.keys.undeclared(given)
        tables = [(alone(new), new[1]) for new in fresh if new[-1]]
        arrays = [(alone(new), new[1]) for new in fresh if not new[-1]]
        if self.compression is not None:
            self.compression.require((info.key, info.dtype) for info, _ in arrays)
        if tables and self.function is not None:
            raise TypeError(
                f"{tables[0][0].name} is a table of rows, which only an optimizer updates; this store has an"
                " updater: call set_optimizer, or make another store"
            )
        entries = {info.key: self.new_value(info, first) for info, first in arrays}
        for info, first in tables:
            self.rows.add(info, first)  # may refuse a table; the tables before it are initialised then
            self.keys.add(info, first)
        self.entries.update(entries)
        for info, first in arrays:
            self.keys.add(info, first)

    def new_value(self, info: KeyInfo, first: Any) -> LocalValue:
        """Copy the first value of a key, where it lies."""
        device, kind = self.devices.of(first), values.kind_of(first)
        if device is None:
            return HostValue(info.key, info.shape, info.dtype, kind, self.kernels, values.read_bits(first).copy())
        from kvdist.kvstore.device import DeviceValue  # a feature at a seam: loaded where it is used

        value = DeviceValue(info.key, info.shape, info.dtype, kind, self.devices, device, first)
        value.replace(first)
        return value

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        require_no_tables(self.rows.blocks, [(one, arrays) for one, arrays in given if one in self.rows.blocks])
        self.declare(given)
        plain = [(one, arrays) for one, arrays in given if one not in self.rows.blocks]
        results = self.keys.writable(values.pairs(key, out)) if len(plain) == len(given) else None
        for info, arrays in self._contributions(plain):
            self.entries[info.key].replace(arrays[0])
            if self.compression is not None:
                self.compression.forget([info.key])
        if results is None:
            MixedTransfers(self).transfer(PushPull(key, None, out, priority, Lending.EVERYTHING, pushes=False)).result()
        else:
            self.write_to(results)

    # Values.

    def transfer(self, call: PushPull) -> Future[Any]:
        if not call.pushes:
            return resolved(self.reading(call)())
        contributions = self._contributions(values.pairs(call.key, call.value))
        places = call.value if call.out is None else call.out
        results = self.keys.writable(values.pairs(call.key, places)) if call.pulls else []
        self.contribute(contributions, self.compression)
        self.write_to(results)
        return resolved(None)

    def reading(self, call: PushPull) -> Callable[[], Any]:
        """Check a pull, and return the function that writes its results, or returns them if they are new arrays."""
        if call.out is not None:
            places = self.keys.writable(values.pairs(call.key, call.out), call.skips_rows)
            return lambda: self.write_to(places)
        infos = [self.keys[one] for one in values.keys(call.key)]
        if isinstance(call.key, (list, tuple)):
            return lambda: [self.entries[info.key].new() for info in infos]
        return lambda: self.entries[infos[0].key].new()

    def contribute(self, contributions: Matched, compression: StoreCompression | None = None) -> None:
        """Change values by contributions of devices, which `compression` encodes as if they travelled."""
        for info, arrays in contributions:
            if not arrays:
                continue  # an empty contribution: it adds nothing, and there is no other worker
            codec = compression if compression is not None and compression.covers(info.key) else None
            home = self._home_for(self.entries[info.key], arrays)
            if self.updaters is not None:
                home.update(self.updaters, arrays, codec)
            elif self.function is not None:
                home.call(self.function, arrays, codec)
            else:
                home.sum(arrays, codec)

    def write_to(self, results: Sequence[tuple[KeyInfo, Sequence[Any]]]) -> None:
        """Copy values into arrays."""
        for info, arrays in results:
            value = self.entries[info.key]
            for array in arrays:
                value.write_to(array)

    def _contributions(self, given: KeyArrays) -> Matched:
        """Check what a call contributes."""
        contributions = self.keys.contributed(given, self.devices)
        for info, arrays in contributions:
            require_one_kind(info.key, arrays)
        return contributions

    def _home_for(self, entry: LocalValue, arrays: Sequence[Any]) -> LocalValue:
        """Return the value, which from its first contribution on rests where that comes from."""
        if entry.key in self._settled:
            return entry
        nbytes = math.prod(entry.shape) * entry.dtype.itemsize
        devices = {device.index: device for device in map(self.devices.of, arrays) if device is not None}
        if not devices:
            self._settled[entry.key] = -1, nbytes
            return entry
        load = Counter[int]()
        for index, settled_bytes in self._settled.values():
            load[index] += settled_bytes
        home = home_of(list(devices.values()), load)
        self._settled[entry.key] = home.index, nbytes
        return self._moved(entry, home, next(array for array in arrays if self.devices.of(array) is home))

    def _moved(self, entry: LocalValue, home: Device, like: Any) -> LocalValue:
        from kvdist.kvstore.device import DeviceValue  # a feature at a seam: loaded where it is used

        if isinstance(entry, DeviceValue):
            entry.move(home)
            return entry
        moved = DeviceValue(entry.key, entry.shape, entry.dtype, entry.kind, self.devices, home, like)
        moved.load(entry.host_bits())
        self.entries[entry.key] = moved
        return moved

    # All workers together.

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        copies = [values.zeros_like(array) for array in arrays]
        for copy, array in zip(copies, arrays, strict=True):
            copy[...] = float("nan") if how is Reduction.MEAN_OF_OTHERS else array
        return copies

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        """Return: this worker is alone."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self.rows.require_fit(optimizer)
        for entry in self.entries.values():
            require_runs_on(optimizer, entry.device)
        if self.updaters is None:
            self.updaters = Updaters(optimizer, self.kernels, self._device_of)
        else:
            self.updaters.optimizer = optimizer
        self.function = None

    def _device_of(self, key: Hashable) -> Device | None:
        assert isinstance(key, int | str), "states are named by keys"
        return self.entries[key].device

    def set_updater(self, function: UpdaterFunction) -> None:
        if self.rows.blocks:
            table = next(iter(self.rows.blocks))
            raise TypeError(f"{name_of(table)} is a table of rows, which only an optimizer updates; call set_optimizer")
        self.function, self.updaters = function, None

    def require_compression(self, chosen: StoreCompression) -> None:
        if chosen.compression.pulled_as is not DType.FLOAT32:
            raise ValueError(
                f"'pull' is for stores whose values travel, and those of {self.type!r} do not: leave it out, or use"
                " 'dist'"
            )

    # Files.

    def _quiesce(self) -> None:
        """Wait until the values have all calls: a call within a process is done when it returns."""

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        self._quiesce()
        with self.lock:
            updaters, infos = self._with_states(keys)
            states = [updaters.state_of(info.key) for info in infos]
            return [None if state is None else state.copy() for state in states]

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        self._quiesce()
        with self.lock:
            updaters, infos = self._with_states(keys)
            for info, state in zip(infos, states, strict=True):
                updaters.restore(info.key, None if state is None else state.copy())

    def save(self, job: SaveJob) -> CheckpointFuture:
        self._quiesce()
        return self._files().save(job)

    def load(self, job: LoadJob) -> Checkpoint:
        self._quiesce()
        files = self._files()
        if not job.values:
            self.adopt_optimizer(files.saved_optimizer(job))
        # Not under the lock: workers agree behind the sums under way, whose thread takes it.
        checkpoint, held, images = files.read(job)
        with self.lock:
            bits = files.restore(held, images)
            for entry, value in zip(self.entries.values(), bits, strict=False):  # behind them tables, which have theirs
                if value is not None:
                    entry.load(value)
            if job.values and self.compression is not None:
                self.compression.forget()
        return checkpoint

    def held(self) -> list[Held]:
        """The keys for a checkpoint, in the order of initialisation: arrays, then tables."""
        from kvdist.kvstore.checkpoints import HeldArray

        with self.lock:
            arrays = [
                HeldArray(entry.key, entry.shape, entry.dtype, entry.host_bits(), self.samples)
                for entry in self.entries.values()
            ]
            return [*arrays, *self.rows.held()]

    def close(self, wait: bool, failure: str = "") -> None:  # nobody hears it
        self.entries.clear()
        self.rows.blocks.clear()
        if self._saving is not None:
            self._saving.close(wait)

    def _files(self) -> WorkerSaving:
        if self._saving is None:
            from kvdist.kvstore.checkpoints import WorkerSaving

            self._saving = WorkerSaving(self._ranks, self.held, lambda: self.updaters)
            self._saving.position = lambda: self.position()
        return self._saving

    def _with_states(self, keys: Sequence[Key]) -> tuple[Updaters, list[KeyInfo]]:
        if self.updaters is None:
            raise PushRefused("this store has no optimizer, and so no states: call set_optimizer first")
        infos = [self.keys[key] for key in keys]
        for info in infos:
            if info.key not in self.entries:
                raise KeyNotInitialised(f"the store keeps no state of {info.name}: it is a table, or is only summed")
        return self.updaters, infos


class LocalRows:
    """The tables of a store: each is a block of rows such as a server has.

    Args:
        backend: has the store's keys, kernels and optimizer.
    """

    def __init__(self, backend: Backend) -> None:
        self.blocks: dict[Key, TableRows] = {}
        self._backend = backend

    def add(self, info: KeyInfo, value: RowSparse | LazyRows) -> None:
        """Copy a new table."""
        initializer = None if info.form == ROWS else initializer_from(info.form)
        shape = info.shape
        _require_fit(info.key, shape, initializer is not None, self._backend.optimizer)
        kernels = self._backend.kernels
        block = TableRows(info.key, len(self.blocks), shape, info.dtype, 0, shape[0], initializer, kernels)
        if isinstance(value, RowSparse):
            ids, rows = value.canonical()
            block.put(ids, rows.reshape(-1))
        self.blocks[info.key] = block

    def held(self) -> list[Held]:
        """The tables for a checkpoint, in the order of initialisation."""
        from kvdist.kvstore.checkpoints import HeldTable

        return [HeldTable(block, self._backend.keys[key].form) for key, block in self.blocks.items()]

    def require_fit(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot update all tables."""
        for key, block in self.blocks.items():
            _require_fit(key, block.shape, block.is_lazy, optimizer)

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


def _require_fit(key: Key, shape: tuple[int, ...], is_lazy: bool, optimizer: Optimizer | None) -> None:
    reason = None if optimizer is None else obstacle(optimizer, key, shape, is_lazy)
    if reason:
        raise ValueError(reason)
