"""`LocalStore`: values shared by the devices of one process. No other process, no thread.

Everything is done when a call returns, so the futures of the ``*_async`` methods are resolved already. Rules:

* All keys and values of a call are checked before the first one is touched.
* The stored bits are the store's own: what comes in is summed into them, what goes out is copied from them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.format import read_manifest
from kvdist.checkpoint.locks import Locks
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, chosen_optimizer
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, OptimizerMismatch, PushRefused, StoreClosed
from kvdist.kernels.gpu import HOST
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import local_saving, saved, values
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.calls import Calls
from kvdist.kvstore.compression import StoreCompression, require_no_keys, require_uncompressed
from kvdist.kvstore.device import Devices
from kvdist.kvstore.keys import as_table, require_no_tables
from kvdist.kvstore.local_arrays import LocalArrays
from kvdist.kvstore.local_rows import LocalRows, resolved
from kvdist.kvstore.local_values import LocalValue, Updaters
from kvdist.kvstore.metrics import as_averaged, as_given, like
from kvdist.kvstore.registry import COMPRESSING_NAMES, command_of
from kvdist.kvstore.staging import Lending, PushOptions
from kvdist.kvstore.values import Bits, Key
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.states import SliceState
from kvdist.rowsparse import LazyRows, RowSparse

LOG = logging.getLogger("kvdist")


class LocalStore(KVStore):
    """The stores ``local`` and ``device`` and their other spellings; on CPU arrays they do the same.

    Args:
        type_name: the name it was created by.
        kernels: what does the arithmetic on the host.
        devices: the GPUs that it uses; None where values of GPUs are brought to the host.
    """

    def __init__(self, type_name: str, kernels: Kernels = REFERENCE, devices: Devices | None = None) -> None:
        self._type = type_name
        self._kernels = kernels
        own = devices or Devices(HOST, insists=False)
        self._arrays = LocalArrays(kernels, own)
        self._uncompressed: set[Key] = set()
        self._closed = False
        self._locks = Locks()
        self._last_save = saved.LastSave()
        self._rows = LocalRows(kernels, self._optimizer)
        self._calls = Calls(self._rows.keys, self._arrays, self._rows, self._arrays.__getitem__, own)

    @property
    def type(self) -> str:
        """The name with which the store was created."""
        return self._type

    @property
    def rank(self) -> int:
        """0: there is one worker."""
        return 0

    @property
    def num_workers(self) -> int:
        """1: this process."""
        return 1

    @property
    def num_servers(self) -> int:
        """0: the values are in this process."""
        return 0

    @property
    def has_optimizer(self) -> bool:
        """Whether pushes are gradients; see `KVStore.has_optimizer`."""
        return self._arrays.updaters is not None

    def num_dead_nodes(self) -> int:
        """0: there is nobody else."""
        return 0

    def init(self, key: Keys, value: Value) -> None:
        """Store copies of the values; see `KVStore.init`."""
        fresh: list[LocalValue] = []
        given = [(one, [as_table(one, array) for array in arrays]) for one, arrays in self._given(key, value)]
        undeclared = self._rows.keys.undeclared([pair for pair in given if self._is_table(*pair)])
        tables = [(one, table) for one, table, *_ in undeclared]
        for one, arrays in given:
            if self._is_table(one, arrays):
                continue
            entry = self._arrays.fresh(one, arrays)
            if entry is not None:
                fresh.append(entry)
        values.require_same_type((entry.key for entry in fresh), [*self._arrays.entries, *self._rows.blocks])
        values.require_same_type((one for one, _ in tables), self._arrays.entries)
        if self._arrays.compressing is not None:
            self._arrays.compressing.require((entry.key, entry.dtype) for entry in fresh)
        if tables and self._arrays.function is not None:
            raise TypeError(
                f"key {tables[0][0]!r} is a table of rows, which only an optimizer updates; this store has an"
                " updater: call set_optimizer, or make another store"
            )
        for one, table in tables:
            self._rows.add(one, table)
        self._arrays.entries.update((entry.key, entry) for entry in fresh)

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Sum over the devices and update or replace the stored value; see `KVStore.push`."""
        self._require_open()
        self._calls.push(key, value, priority, PushOptions(average, samples))

    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Copy the stored values out; see `KVStore.pull`."""
        self._require_open()
        return self._calls.pull(key, out, priority, ignore_sparse).result()

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: bool = False,
        samples: int = 0,
    ) -> None:
        """`push`, then `pull`; see `KVStore.pushpull`."""
        self._require_open()
        self._calls.pushpull(key, value, out, priority, PushOptions(average, samples), Lending.NOTHING).result()

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future that has its result."""
        self.push(key, value, priority, average=average, samples=samples)
        return resolved(None)

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """`pull`, with a future that has its result."""
        return resolved(self.pull(key, out, priority, ignore_sparse))

    def pushpull_async(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: bool = False,
        samples: int = 0,
    ) -> Future[None]:
        """`pushpull`, with a future that has its result."""
        self.pushpull(key, value, out, priority, average=average, samples=samples)
        return resolved(None)

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Read rows of tables; see `KVStore.row_sparse_pull`."""
        return self.row_sparse_pull_async(key, out, priority, row_ids).result()

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Future[Any]:
        """`row_sparse_pull`, with a future that has its result."""
        self._require_open()
        return self._calls.row_sparse_pull(key, out, priority, row_ids)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull`; there is no memory of others to show. See `KVStore.pushpull_shared`."""
        self.pushpull(key, value, out, priority, average=average, samples=samples)
        return [None] * len(values.pairs(key, out))

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Store the values, in place of those that are there, and copy them out; see `KVStore.broadcast`."""
        given = [(one, arrays) for one, arrays in self._given(key, value) if one in self._rows.blocks]
        require_no_tables(self._rows.blocks, given)
        self.init(key, value)
        arrays = [(one, own) for one, own in values.pairs(key, value) if one not in self._rows.blocks]
        results = self._arrays.writable(key, out) if len(arrays) == len(values.pairs(key, value)) else None
        self._arrays.replace(arrays)
        if results is None:
            self.pull(key, out)
        else:
            self._arrays.hand_out(results)

    def barrier(self, timeout: float | None = None) -> None:
        """Nothing to wait for."""
        self._require_open()

    def agree(self, statement: str) -> None:
        """Nobody to agree with."""
        self._require_open()

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """A copy of the value; see `KVStore.average`."""
        self._require_open()
        array = as_averaged(value)
        if not counts:
            array[...] = float("nan")
        return as_given(value, array)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """ReplicatedValues of the values; see `KVStore.from_rank_0`."""
        self._require_open()
        copies = [like(value) for value in values]
        for copy, value in zip(copies, values, strict=True):
            copy[...] = value
        return copies

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Update the values with this optimizer from now on; see `KVStore.set_optimizer`."""
        self._require_open()
        chosen = create(optimizer, **hyperparameters)
        self._rows.require_fit(chosen)
        present = self._optimizer()
        if present is not None and chosen.rule() != present.rule():
            raise OptimizerMismatch(
                f"the store updates its values with {present} and cannot change to {chosen}; use a second store"
            )
        self._arrays.set_optimizer(chosen)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what each device pushes, as if it travelled; see `KVStore.set_gradient_compression`."""
        self._require_open()
        if self._type not in COMPRESSING_NAMES:
            raise ValueError(f"a {self._type!r} store does not compress gradients: that needs 'dist' or 'device'")
        compressing = StoreCompression(compression_params, self._uncompressed, self._kernels)
        if compressing.compression.pulled_as is not DType.FLOAT32:
            raise ValueError(
                f"'pull' is for stores whose values travel, and those of {self._type!r} do not: leave it out, or use"
                " 'dist'"
            )
        if self._arrays.compressing is not None:
            self._arrays.compressing.require_equal(compressing)
            return
        require_no_keys(self._arrays.entries)
        self._arrays.compressing = compressing

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Leave these keys as they are; see `KVStore.leave_uncompressed`."""
        self._require_open()
        require_uncompressed(self._arrays.compressing, keys, self._arrays.entries)
        self._uncompressed.update(keys)

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Update the values with ``updater(key, received, stored)`` from now on; see `KVStore.set_updater`."""
        self._require_open()
        if not callable(updater):
            raise TypeError(f"an updater is a function of (key, received, stored), not {type(updater).__name__}")
        if self._rows.blocks:
            table = next(iter(self._rows.blocks))
            raise TypeError(f"key {table!r} is a table of rows, which only an optimizer updates; call set_optimizer")
        self._arrays.function = updater
        self._arrays.updaters = None

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Nothing: there are no servers."""
        self._require_open()
        command_of(head, body)  # which checks them

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Any = None,
        keep: int | None = None,
        names: saved.Names | None = None,
    ) -> Future[Path]:
        """Write values and states; complete when the call returns. See `KVStore.save_checkpoint`."""
        self._require_open()
        self._last_save.before_next()
        folder, number = saved.place(directory, step), saved.checked_keep(keep)
        content = saved.own_file(state, names, 0)
        what = (EVERYTHING, self._held(), self._arrays.updaters, self._locks)
        run = local_saving.claim(folder, self._locks)
        return self._last_save.run(
            folder, lambda: local_saving.save(folder, *what, run, saved.checked_step(step), number, content)
        )

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> saved.Checkpoint:
        """Read values and states; see `KVStore.load_checkpoint`."""
        self._require_open()
        folder = saved.find(directory, step)
        checkpoint = saved.loaded(folder, read_manifest(folder), 0)
        contents = EVERYTHING if states else (WEIGHTS,)
        self._take(local_saving.load(folder, contents, self._held(), self._arrays.updaters))
        return checkpoint

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the states; see `KVStore.save_optimizer_states`."""
        self._require_open()
        folder = saved.absolute(fname)
        run = local_saving.claim(folder, self._locks)
        local_saving.save(folder, (STATES,), self._held(), self._arrays.updaters, self._locks, run)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read the states; see `KVStore.load_optimizer_states`."""
        self._require_open()
        folder = saved.absolute(fname)
        description = read_manifest(folder).optimizer
        if self._arrays.updaters is None and description is not None:
            self.set_optimizer(chosen_optimizer(description))
        local_saving.load(folder, (STATES,), self._held(), self._arrays.updaters)

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """What the optimizer remembers; see `KVStore.optimizer_states`."""
        updaters = self._with_states()
        states = [updaters.state_of(key) for key in keys]
        return [None if state is None else state.copy() for state in states]

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Give it these; see `KVStore.replace_optimizer_states`."""
        updaters = self._with_states()
        for key, state in zip(keys, states, strict=True):
            updaters.restore(key, None if state is None else state.copy())

    def _with_states(self) -> Updaters:
        self._require_open()
        if self._arrays.updaters is None:
            raise PushRefused("this store has no optimizer, so there are no states: call set_optimizer before")
        return self._arrays.updaters

    def _held(self) -> list[local_saving.Holding]:
        return [*self._arrays.held(), *self._rows.held]

    def _take(self, found: Sequence[Bits | None]) -> None:
        """Take these values, in the order of `_held`; None leaves one as it is."""
        self._arrays.load(found[: len(self._arrays.entries)])  # behind them the tables, which have theirs
        if self._arrays.compressing is not None:
            self._arrays.compressing.forget()

    def _optimizer(self) -> Optimizer | None:
        updaters = self._arrays.updaters
        return None if updaters is None else updaters.optimizer

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``; see `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in ordinary memory; see `KVStore.empty`."""
        return np.empty(shape, values.as_numpy_dtype(dtype))

    def _close(self, wait: bool) -> None:
        self._closed = True
        self._arrays.entries.clear()
        self._rows.blocks.clear()
        self._locks.close()
        if wait:
            self._last_save.at_close()

    def _is_table(self, key: Key, arrays: Sequence[Any]) -> bool:
        is_rows = bool(arrays) and isinstance(arrays[0], RowSparse | LazyRows)
        if (is_rows and key in self._arrays.entries) or (not is_rows and key in self._rows.blocks):
            kinds = ("an array", "a table of rows")
            raise InitMismatch(f"key {key!r} was initialised as {kinds[not is_rows]}, and now as {kinds[is_rows]}")
        return is_rows

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {self._type!r} store has been closed; create another one")

    def _given(self, key: Keys, value: Value) -> list[tuple[Key, list[Any]]]:
        self._require_open()
        return values.pairs(key, value)
