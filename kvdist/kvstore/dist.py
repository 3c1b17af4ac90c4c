"""`DistStore`: values that rest on servers, shared by all workers of a cluster.

The user's thread checks and copies (a plain array is copied before `push` returns), makes a request, and waits on a
future if the call says so. Everything else happens on the node's thread. Rules that hold here:

* Whatever can be known to be wrong here raises here, before anything is sent.
* The error of a push that nobody waited for is raised by the next call on the store.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvdist.core.policy import SYNC, Policy
from kvdist.core.worker.requests import (
    KEYS_PER_MESSAGE,
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    RunKind,
    SetStoreOptimizer,
    UseKernels,
)
from kvdist.dtypes import DType
from kvdist.errors import DeviceError, OptimizerMismatch, PeerLostError, PushRefused, StoreClosed
from kvdist.kernels.gpu import HOST
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import values
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.calls import Calls
from kvdist.kvstore.coalescing import PLAIN
from kvdist.kvstore.compression import StoreCompression, require_no_keys, require_uncompressed
from kvdist.kvstore.device import Devices
from kvdist.kvstore.keys import Fresh, KeyTable, as_table, require_no_tables
from kvdist.kvstore.metrics import MetricsExchange
from kvdist.kvstore.push_pull import ArrayTransfers
from kvdist.kvstore.registry import command_of
from kvdist.kvstore.row_moves import RowTransfers
from kvdist.kvstore.saved import Checkpoint, Names
from kvdist.kvstore.saving import Saving
from kvdist.kvstore.staging import Lending, PushOptions
from kvdist.kvstore.state_moves import pull_states, replace_states
from kvdist.kvstore.values import Key
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.states import SliceState
from kvdist.protocol.arrays import ALIGNMENT_BYTES
from kvdist.rowsparse import RowSparse
from kvdist.runtime.cluster import Cluster

LOG = logging.getLogger("kvdist")


class DistStore(KVStore):
    """The stores ``dist``, ``dist_async`` and their other spellings.

    Args:
        type_name: the name it was created by.
        policy: when servers make a version.
        cluster: this process's membership.
        kernels: what sums over devices on the host.
        devices: the GPUs that it uses; None where values of GPUs are brought to the host.
    """

    def __init__(
        self,
        type_name: str,
        policy: Policy,
        cluster: Cluster,
        kernels: Kernels = REFERENCE,
        devices: Devices | None = None,
    ) -> None:
        self._type = type_name
        self._policy = policy
        self._cluster = cluster
        self._kernels = kernels
        self._number = cluster.open_store()
        self._keys = KeyTable()
        own = devices or Devices(HOST, insists=False)
        own.pin_with(lambda device: cluster.memory.pin(device.pin))
        self._moves = ArrayTransfers(cluster, self._keys, policy, kernels, own, self._remember, self._require_usable)
        self._rows = RowTransfers(cluster, self._moves)
        self._calls = Calls(self._keys, self._moves, self._rows, self._keys.__getitem__, own)
        self._uncompressed: set[Key] = set()
        self._barrier_lock = threading.Lock()
        self._closed = False
        self._errors: deque[BaseException] = deque()
        """Of pushes that nobody waited for."""
        waits = (cluster.wait, cluster.hold)
        self._saving = Saving(self._number, cluster.rank, self._moves.submit, *waits, cluster.memory.forget_shown)
        self._together = MetricsExchange(lambda: DistStore("dist", SYNC, cluster, kernels))

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"worker {self.rank} of {self.num_workers}, {len(self._keys)} keys"
        return f"<{self._type} store, {state}>"

    @property
    def type(self) -> str:
        """The name with which the store was created."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._cluster.rank

    @property
    def num_workers(self) -> int:
        """How many workers the cluster was started with."""
        return self._cluster.config.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers keep the values."""
        return self._cluster.config.num_servers

    @property
    def has_optimizer(self) -> bool:
        """Whether pushes are gradients. See `KVStore.has_optimizer`."""
        return self._moves.optimizer is not None

    def num_dead_nodes(self) -> int:
        """How many processes are known to be lost; the loss of one ends the job. See `KVStore.num_dead_nodes`."""
        return int(isinstance(self._cluster.node.failure, PeerLostError))

    def init(self, key: Keys, value: Value) -> None:
        """Agree on keys with all workers; rank 0's values win. See `KVStore.init`."""
        self._require_usable()
        given = [(one, [as_table(one, array) for array in arrays]) for one, arrays in values.pairs(key, value)]
        fresh = self._keys.undeclared(given)
        if not fresh:
            return
        infos = self._declare(fresh)
        compressing = self._moves.compressing
        if compressing is not None:
            infos = [replace(one, is_compressed=not one.form and compressing.covers(one.key)) for one in infos]
        before = self._keys.nbytes
        for info, (_, array, *_) in zip(infos, fresh, strict=True):
            self._keys.add(info, array)
        padding_max = ALIGNMENT_BYTES * sum(len(info.slices) for info in infos if not info.form)
        self._cluster.under_way.grow(self._keys.nbytes - before + padding_max)
        mine = [(info, array) for info, (_, array, *_) in zip(infos, fresh, strict=True) if info.giver == self.rank]
        arrays = [(info.key, array) for info, array in mine if not info.form]
        if arrays:
            self._moves.give(RunKind.INITIALISE, arrays)
        for info, array in mine:
            if isinstance(array, RowSparse):
                self._rows.give(info, array.canonical())

    def _declare(self, fresh: Sequence[Fresh]) -> list[KeyInfo]:
        """Agree on new keys with all workers; on many by several messages, so that all processes work at a time."""
        futures = []
        for start in range(0, len(fresh), KEYS_PER_MESSAGE):
            names, _, shapes, dtypes, forms = zip(*fresh[start : start + KEYS_PER_MESSAGE], strict=True)
            said = (self._policy.name, names, shapes, dtypes, self._pulled_as(names, dtypes, forms), forms)
            make = partial(_declaration, self._number, said)
            futures.append(self._moves.submit(make, None))
        return [info for future in futures for info in self._cluster.wait(future)]

    def _pulled_as(self, names: Sequence[Key], dtypes: Sequence[DType], forms: Sequence[str]) -> tuple[DType, ...]:
        """In which types values come back: tables of rows, of which little travels, as they are."""
        compressing = self._moves.compressing
        if compressing is None:
            return ()
        fresh = list(zip(names, dtypes, forms, strict=True))
        compressing.require((key, dtype) for key, dtype, form in fresh if not form)
        return tuple(dtype if form else compressing.pulled_as(key, dtype) for key, dtype, form in fresh)

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Contribute; returns as soon as the values are copied. See `KVStore.push`."""
        self._require_usable()
        self._calls.push(key, value, priority, _terms(average, samples))

    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Read; waits for this worker's own pushes to be counted. See `KVStore.pull`."""
        self._require_usable()
        result = self._cluster.wait(self._calls.pull(key, out, priority, ignore_sparse))
        self._raise_lost_error()  # of an own push that this pull was to see
        return result

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
        """Contribute and read the result in one round trip. See `KVStore.pushpull`."""
        # The caller waits, so large arrays are sent from where they are: a pass over the bytes less, and the first of
        # them are under way at once.
        self._require_usable()
        future = self._calls.pushpull(key, value, out, priority, _terms(average, samples), Lending.EVERYTHING)
        try:
            self._cluster.wait(future)
        except KeyboardInterrupt:
            LOG.warning("interrupted: waiting until the arrays under way are yours again; interrupt again to give up")
            with contextlib.suppress(Exception):
                future.result()
            raise
        self._raise_lost_error()

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future that resolves when the servers have counted it."""
        self._require_usable()
        return self._calls.push_async(key, value, priority, _terms(average, samples))

    def pull_async(
        self,
        key: Keys,
        out: Value | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
    ) -> Future[Any]:
        """`pull`, with a future of its result."""
        self._require_usable()
        pull = self._calls.pull if out is None else self._calls.pull_gathered
        return pull(key, out, priority, ignore_sparse)

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Read rows of tables. See `KVStore.row_sparse_pull`."""
        result = self._cluster.wait(self.row_sparse_pull_async(key, out, priority, row_ids))
        self._raise_lost_error()
        return result

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Future[Any]:
        """`row_sparse_pull`, with a future of its result."""
        self._require_usable()
        return self._calls.row_sparse_pull(key, out, priority, row_ids)

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
        """`pushpull`, with a future."""
        self._require_usable()
        return self._calls.pushpull(key, value, out, priority, _terms(average, samples), Lending.RESIDENT)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull` without a copy of large results. See `KVStore.pushpull_shared`."""
        self._require_usable()
        lending = Lending.EVERYTHING
        future = self._calls.pushpull(key, value, out, priority, _terms(average, samples), lending, hold=True)
        shown: list[Any] = self._cluster.wait(future)
        self._raise_lost_error()
        return shown

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Give every worker rank 0's present values; every worker calls it. See `KVStore.broadcast`."""
        self._require_usable()
        given = values.pairs(key, value)
        replaced = [(one, arrays[0]) for one, arrays in given if one in self._keys and arrays]
        require_no_tables(self._keys.tables, replaced)
        self.init(key, value)
        if replaced:
            # The pull waits for this worker's pushes to be counted, so between the two barriers nobody's push is
            # under way, and no round that was meant for the old values closes on the new ones.
            self.pull([one for one, _ in replaced])
            self.barrier()
            mine = [(one, array) for one, array in replaced if self._keys[one].giver == self.rank]
            if mine:
                self._moves.give(RunKind.REPLACE, mine)
            # Values that were shown may have been written to: this call is how such a change becomes everybody's.
            with self._barrier_lock:
                forget = self._cluster.memory.forget_shown
                self._cluster.wait(self._moves.submit(lambda number: EnterBarrier(number, self._number), forget))
            if self._moves.compressing is not None:
                self._moves.compressing.forget(one for one, _ in replaced)
        self.pull(key, out, priority)

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here. See `KVStore.barrier`."""
        self._require_usable()
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"the time-out of a barrier is {timeout}; it must be a positive number of seconds, or None"
            )
        # One at a time: a second thread's barrier is the next one, not the same.
        with self._barrier_lock:
            self._moves.ask(lambda number: EnterBarrier(number, self._number, timeout))

    def agree(self, statement: str) -> None:
        """A barrier at which all must say the same. See `KVStore.agree`."""
        self._require_usable()
        with self._barrier_lock:
            self._moves.ask(lambda number: EnterBarrier(number, self._number, None, statement))

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """The mean over the workers. See `KVStore.average`."""
        self._require_usable()
        return self._together.average(value, counts)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """What rank 0 has. See `KVStore.from_rank_0`."""
        self._require_usable()
        return self._together.from_rank_0(values)

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Let the servers update the values. See `KVStore.set_optimizer`."""
        self._require_usable()
        chosen = create(optimizer, **hyperparameters)
        if self._moves.optimizer is not None:
            if chosen.rule() != self._moves.optimizer.rule():
                raise OptimizerMismatch(
                    f"this store's servers update with {self._moves.optimizer}; it cannot be changed to"
                    f" {chosen}. Create a second store for that"
                )
        else:
            self._moves.ask(lambda number: SetStoreOptimizer(number, self._number, chosen.describe()))
        self._moves.optimizer = chosen

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress pushes, and pulls if that is asked for. See `KVStore.set_gradient_compression`."""
        self._require_usable()
        compressing = StoreCompression(compression_params, self._uncompressed, self._kernels)
        if self._moves.compressing is not None:
            self._moves.compressing.require_equal(compressing)
            return
        require_no_keys(self._keys.infos)
        self.agree(compressing.statement)
        self._moves.compressing = compressing
        self._cluster.submit(lambda number: UseKernels(number, self._kernels))

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Let these keys travel as they are. See `KVStore.leave_uncompressed`."""
        self._require_usable()
        require_uncompressed(self._moves.compressing, keys, self._keys.infos)
        self._uncompressed.update(keys)

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Always a `TypeError`: the values rest on servers, which run no code that a worker sends."""
        raise TypeError(
            f"a {self._type!r} store keeps its values on servers, and servers run no functions from workers;"
            " use set_optimizer, or a 'local' store"
        )

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Let every server run a registered handler. See `KVStore.send_command_to_servers`."""
        self._require_usable()
        self._moves.ask(command_of(head, body))

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Any = None,
        keep: int | None = None,
        names: Names | None = None,
    ) -> Future[Path]:
        """Let the servers save what they keep. See `KVStore.save_checkpoint`."""
        self._require_usable()
        return self._saving.save(self._keys.all, directory, step, state, keep, names)

    def _claim_folder(self, directory: str | os.PathLike[str], step: int) -> None:
        """Make sure that checkpoints can be saved into this directory, as the first `save_checkpoint` does.

        Raises:
            CheckpointError: as of `KVStore.save_checkpoint`.
        """
        self._require_usable()
        self._saving.claim(self._keys.all, directory, step)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Let the servers go on from a checkpoint. See `KVStore.load_checkpoint`."""
        self._require_usable()
        checkpoint = self._saving.load(directory, step, states)
        if self._moves.compressing is not None:
            self._moves.compressing.forget()
        return checkpoint

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Let the servers save what their optimizer remembers. See `KVStore.save_optimizer_states`."""
        self._require_usable()
        self._cluster.wait(self._saving.save_states(self._keys.all, fname))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Give it back to them. See `KVStore.load_optimizer_states`."""
        self._require_usable()
        self._saving.load_states(fname, self._moves.optimizer, self.set_optimizer)

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """What the servers' optimizer remembers. See `KVStore.optimizer_states`."""
        self._require_usable()
        infos, optimizer = self._with_states(keys)
        return pull_states(self._moves.ask, infos, optimizer)

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Give it these from rank 0. See `KVStore.replace_optimizer_states`."""
        self._require_usable()
        infos, optimizer = self._with_states(keys)
        if self.rank == 0:
            replace_states(self._moves.ask, infos, states, optimizer)

    def _with_states(self, keys: Sequence[Key]) -> tuple[list[KeyInfo], Optimizer]:
        optimizer = self._moves.optimizer
        if optimizer is None:
            raise PushRefused("this store has no optimizer, so there are no states: call set_optimizer before")
        infos = [self._keys[key] for key in keys]
        tables = [info.key for info in infos if info.form]
        if tables:
            raise PushRefused(f"key {tables[0]!r} is a table of rows, whose states only a checkpoint has")
        return infos, optimizer

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``. See `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in memory that servers of this host are shown. See `KVStore.empty`."""
        wanted = values.as_numpy_dtype(dtype)
        lengths = (shape,) if isinstance(shape, int) else tuple(shape)
        nbytes = math.prod(lengths) * wanted.itemsize
        return self._cluster.memory.allocate(nbytes).view(wanted).reshape(lengths)

    def _close(self, wait: bool) -> None:
        """Leave the store; the last store of the process leaves the cluster. Raises the error of a lost push."""
        if self._closed:
            return
        self._closed = True
        self._cluster.under_way.wake()
        if wait:
            self._saving.wait()
        self._together.close()
        self._cluster.stores_open -= 1
        try:
            if self._cluster.stores_open == 0:
                self._cluster.leave(wait=wait)
        finally:
            with contextlib.suppress(DeviceError):  # a GPU that has failed reads nothing any more
                self._moves.close()
        self._raise_lost_error()
        self._saving.close(wait)

    # Checks.

    def _require_usable(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {self._type!r} store has been closed; create another one")
        self._cluster.node.begin_call()
        self._raise_lost_error()

    def _raise_lost_error(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _remember(self, error: BaseException) -> None:
        # Nobody leaves before the servers have what was pushed, so a push is not lost if leaving overtook its answer.
        left_first = self._closed and isinstance(error, StoreClosed)
        if left_first:
            return
        if self._closed:
            # Other stores of the process are open, so the answer still came; nobody is going to call this one again.
            LOG.error("a push to a store that has been closed meanwhile failed: %s", error)
        self._errors.append(error)


def _declaration(store: int, said: tuple[Any, ...], number: int) -> DeclareKeys:
    return DeclareKeys(number, store, *said)


def _terms(average: bool, samples: int) -> PushOptions:
    return PLAIN if not average and samples == 0 else PushOptions(average, samples)
