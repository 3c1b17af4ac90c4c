"""`LocalStore`: values shared by the devices of one process. No other process, no thread.

Everything is done when a call returns, so the futures of the ``*_async`` methods are resolved already. Rules:

* All keys and values of a call are checked before the first one is touched.
* The stored bits are the store's own: what comes in is summed into them, what goes out is copied from them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.manifest import EVERYTHING, STATES, WEIGHTS, chosen_optimizer, read_manifest
from kvdist.dtypes import DType
from kvdist.errors import CheckpointError, InitMismatch, KeyNotInitialised, OptimizerMismatch, StoreClosed
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import local_saving, saved, values
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.commands import command_of
from kvdist.kvstore.together import as_averaged, as_given, like
from kvdist.kvstore.values import Bits, Key, Shape
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.step import Extent
from kvdist.optimizer.updater import Updater

LOG = logging.getLogger("kvdist")


@dataclass(slots=True, eq=False)
class _Entry:
    """One key: what it holds and what kind of array it came as."""

    key: Key
    shape: Shape
    dtype: DType
    kind: str
    bits: Bits


class LocalStore(KVStore):
    """The stores ``local`` and ``device`` and their other spellings; on CPU arrays they do the same.

    Args:
        type_name: the name it was created by.
        kernels: what does the arithmetic.
    """

    def __init__(self, type_name: str, kernels: Kernels = REFERENCE) -> None:
        self._type = type_name
        self._kernels = kernels
        self._entries: dict[Key, _Entry] = {}
        self._updater: Updater | None = None
        self._function: UpdaterFunction | None = None
        self._closed = False

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

    def num_dead_nodes(self) -> int:
        """0: there is nobody else."""
        return 0

    def init(self, key: Keys, value: Value) -> None:
        """Store copies of the values; see `KVStore.init`."""
        fresh: list[_Entry] = []
        for one, arrays in self._given(key, value):
            shape, dtype = values.first_shape(one, arrays)
            entry = self._entries.get(one)
            if entry is None:
                fresh.append(_Entry(one, shape, dtype, values.kind_of(arrays[0]), values.read_bits(arrays[0]).copy()))
            elif (entry.shape, entry.dtype) != (shape, dtype):
                raise InitMismatch(
                    f"key {one!r} was initialised with shape {entry.shape} and dtype {entry.dtype.label},"
                    f" and now with shape {shape} and dtype {dtype.label}"
                )
        values.require_same_type((entry.key for entry in fresh), self._entries)
        self._entries.update((entry.key, entry) for entry in fresh)

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Sum over the devices and update or replace the stored value; see `KVStore.push`."""
        self._contribute(self._matched(key, value))

    def pull(
        self,
        key: Keys,
        out: Value | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
    ) -> Any:
        """Copy the stored values out; see `KVStore.pull`."""
        if out is not None:
            self._hand_out(self._writable(key, out))
            return None
        self._require_open()
        copies = [_copy_of(self._entry(one)) for one in values.keys(key)]
        return copies if isinstance(key, (list, tuple)) else copies[0]

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
        contributions = self._matched(key, value)
        results = self._writable(key, value if out is None else out)
        self._contribute(contributions)
        self._hand_out(results)

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future that has its result."""
        self.push(key, value, priority, average=average, samples=samples)
        return _resolved(None)

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """`pull`, with a future that has its result."""
        return _resolved(self.pull(key, out, priority, ignore_sparse))

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
        return _resolved(None)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull`; there is no memory of others to show. See `KVStore.pushpull_shared`."""
        self.pushpull(key, value, out, priority, average=average, samples=samples)
        return [None] * len(values.pairs(key, out))

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Store the values, in place of those that are there, and copy them out; see `KVStore.broadcast`."""
        self.init(key, value)
        results = self._writable(key, out)
        for entry, arrays in self._matched(key, value):
            entry.bits[...] = values.read_bits(arrays[0])
        self._hand_out(results)

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
        """Copies of the values; see `KVStore.from_rank_0`."""
        self._require_open()
        copies = [like(value) for value in values]
        for copy, value in zip(copies, values, strict=True):
            copy[...] = value
        return copies

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Update the values with this optimizer from now on; see `KVStore.set_optimizer`."""
        self._require_open()
        chosen = create(optimizer, **hyperparameters)
        if self._updater is None:
            self._updater = Updater(chosen, self._kernels)
        elif chosen.rule() == self._updater.optimizer.rule():
            self._updater.optimizer = chosen
        else:
            raise OptimizerMismatch(
                f"the store updates its values with {self._updater.optimizer} and cannot change to"
                f" {chosen}; use a second store"
            )
        self._function = None

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Update the values with ``updater(key, received, stored)`` from now on; see `KVStore.set_updater`."""
        self._require_open()
        if not callable(updater):
            raise TypeError(f"an updater is a function of (key, received, stored), not {type(updater).__name__}")
        self._function = updater
        self._updater = None

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
        folder, number = saved.place(directory, step), saved.checked_keep(keep)
        content = saved.own_file(state, names, 0)
        future: Future[Path] = Future()
        try:
            local_saving.save(folder, EVERYTHING, self._held(), self._updater, step, number, content)
            future.set_result(folder)
        except CheckpointError as error:
            LOG.error("no checkpoint was made: %s", error)
            future.set_exception(error)
        return future

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> saved.Checkpoint:
        """Read values and states; see `KVStore.load_checkpoint`."""
        self._require_open()
        folder = saved.find(directory, step)
        checkpoint = saved.loaded(folder, read_manifest(folder), 0)
        contents = EVERYTHING if states else (WEIGHTS,)
        found = local_saving.load(folder, contents, self._held(), self._updater)
        for entry, bits in zip(self._entries.values(), found, strict=True):
            entry.bits[...] = bits
        return checkpoint

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the states; see `KVStore.save_optimizer_states`."""
        self._require_open()
        local_saving.save(saved.absolute(fname), (STATES,), self._held(), self._updater)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read the states; see `KVStore.load_optimizer_states`."""
        self._require_open()
        folder = saved.absolute(fname)
        description = read_manifest(folder).optimizer
        if self._updater is None and description is not None:
            self.set_optimizer(chosen_optimizer(description))
        local_saving.load(folder, (STATES,), self._held(), self._updater)

    def _held(self) -> list[local_saving.Held]:
        return [local_saving.Held(one.key, one.shape, one.dtype, one.bits) for one in self._entries.values()]

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``; see `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in ordinary memory; see `KVStore.empty`."""
        return np.empty(shape, values.as_numpy_dtype(dtype))

    def close(self, wait: bool = True) -> None:
        """Let go of all values."""
        self._closed = True
        self._entries = {}

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {self._type!r} store has been closed; create another one")

    def _given(self, key: Keys, value: Value) -> list[tuple[Key, list[Any]]]:
        self._require_open()
        return values.pairs(key, value)

    def _entry(self, key: Key) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise KeyNotInitialised(values.unknown_key(key, self._entries))
        return entry

    def _matched(self, key: Keys, value: Value) -> list[tuple[_Entry, list[Any]]]:
        """The entries of a call, with their arrays, each checked to fit."""
        matched = [(self._entry(one), arrays) for one, arrays in self._given(key, value)]
        for entry, arrays in matched:
            for array in arrays:
                values.require(entry.key, array, entry.shape, entry.dtype)
        return matched

    def _writable(self, key: Keys, value: Value) -> list[tuple[_Entry, list[Any]]]:
        matched = [(self._entry(one), arrays) for one, arrays in self._given(key, value)]
        for entry, arrays in matched:
            for array in arrays:
                values.require_writable(entry.key, array, entry.shape, entry.dtype)
        return matched

    def _contribute(self, contributions: list[tuple[_Entry, list[Any]]]) -> None:
        for entry, arrays in contributions:
            if not arrays:
                continue  # an empty contribution: it adds nothing, and there is nobody else
            if self._updater is not None:
                self._update(self._updater, entry, arrays)
            elif self._function is not None:
                self._call(self._function, entry, arrays)
            else:
                values.sum_devices(arrays, entry.dtype, self._kernels, out=entry.bits)

    @staticmethod
    def _update(updater: Updater, entry: _Entry, arrays: list[Any]) -> None:
        contributions = [values.read_bits(array) for array in arrays]
        scales = [updater.optimizer.rescale_grad] * len(contributions)
        extent = Extent(entry.key, entry.shape)
        updater.update(entry.key, entry.bits, contributions, scales, entry.dtype, entry.bits, extent=extent)

    def _call(self, function: UpdaterFunction, entry: _Entry, arrays: list[Any]) -> None:
        # A sum of its own, even of one array: the function may write into what it received.
        total = values.sum_devices(arrays, entry.dtype, self._kernels, out=np.empty_like(entry.bits))
        library = entry.kind.partition(":")[0]
        received = values.like(library, entry.shape, entry.dtype, total)
        function(entry.key, received, values.like(library, entry.shape, entry.dtype, entry.bits))

    def _hand_out(self, results: list[tuple[_Entry, list[Any]]]) -> None:
        for entry, arrays in results:
            for array in arrays:
                values.write_bits(array, entry.bits)


def _copy_of(entry: _Entry) -> Any:
    return values.like(entry.kind, entry.shape, entry.dtype, entry.bits.copy())


def _resolved(result: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(result)
    return future
