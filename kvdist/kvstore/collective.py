"""`CollectiveStore`: values of which every worker has a copy, and sums over the workers that no server makes.

A call checks and hands the engine one operation for all its keys; whatever follows from the sums happens on the
engine's thread, in the order of the calls. Rules that hold here:

* All workers make the same calls with the same keys, in the same order. A worker without a gradient gives None; it
  still makes the call.
* Each worker keeps the values for itself, in a store within its process. They are the same everywhere because the sums
  are.
* A key that `leave_unkept` has named has no value here: `pushpull` gives its sum to the caller, and copies nothing.
* The error of a push that nobody waited for is raised by the next call on the store.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from kvdist.checkpoint.format import read_manifest
from kvdist.checkpoint.snapshot import EVERYTHING, STATES, WEIGHTS, chosen_optimizer
from kvdist.collective.engine import ALL_RANKS, CollectiveEngine
from kvdist.errors import StoreClosed
from kvdist.kernels.gpu import HOST
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore import local_saving, saved, values
from kvdist.kvstore.allreduce import Ranks
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.copies import OwnValues, ReplicatedValues
from kvdist.kvstore.declared import ROWS_ADVICE, CollectiveKeys
from kvdist.kvstore.device import Devices
from kvdist.kvstore.keys import is_sparse
from kvdist.kvstore.registry import command_of
from kvdist.kvstore.saved import Checkpoint, Names
from kvdist.kvstore.values import Key
from kvdist.kvstore.workers_saving import SavingJob, WorkersSaving
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.states import SliceState

LOG = logging.getLogger("kvdist")


class CollectiveStore(KVStore):
    """The stores ``collective``, ``horovod``, ``allreduce`` and ``byteps``.

    Args:
        type_name: the name it was created by.
        engine: this process as a rank.
        leave: called when the store is closed.
        number: of the group of ranks that share the store.
        store: unlike that of the other stores of this engine, and the same on all ranks.
        kernels: what updates values on the host.
        devices: the GPUs that it uses.
        updates: whether `set_optimizer` is for this store; else the workers update.
        predivide: by what values are divided before they are summed, and multiplied after it.
    """

    def __init__(
        self,
        type_name: str,
        engine: CollectiveEngine,
        leave: Callable[[], None] = lambda: None,
        *,
        number: int = ALL_RANKS,
        store: int = 0,
        kernels: Kernels = REFERENCE,
        devices: Devices | None = None,
        updates: bool = False,
        predivide: float = 1.0,
    ) -> None:
        self._type = type_name
        self._leave = leave
        self._ranks = Ranks(engine, number, store)
        own = devices or Devices(HOST, insists=False)
        self._updates = updates
        self._keys = CollectiveKeys(own)
        self._local = OwnValues("device", kernels, own)
        self._copies = ReplicatedValues(self._keys, self._ranks, self._local, predivide)
        self._errors: deque[BaseException] = deque()
        self._closed = False
        self._saving = WorkersSaving(self)

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
        return self._ranks.rank

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return self._ranks.size

    @property
    def num_servers(self) -> int:
        """0: there are none."""
        return 0

    @property
    def has_optimizer(self) -> bool:
        """Whether pushes are gradients; see `KVStore.has_optimizer`."""
        return self._copies.optimizer is not None

    def num_dead_nodes(self) -> int:
        """How many workers are known to be lost; the loss of one ends the job. See `KVStore.num_dead_nodes`."""
        return int(self._ranks.has_lost)

    # Keys.

    def init(self, key: Keys, value: Value) -> None:
        """Agree on keys with all workers; rank 0's values win. See `KVStore.init`."""
        self._require_usable()
        with self._ranks.told():
            fresh = self._keys.fresh(values.pairs(key, value))
        self._copies.place([(one, array, []) for one, array in self._keys.add(fresh, self._ranks.agree)])

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Give every worker rank 0's present values, in the store and in `out`. See `KVStore.broadcast`."""
        self._require_usable()
        with self._ranks.told():
            given = values.pairs(key, value)
            fresh = self._keys.fresh(given)
        self._keys.add(fresh, self._ranks.agree)
        with self._ranks.told():
            places = dict(self._keys.writable(key, out))
        self._settle()
        self._copies.place([(one, arrays[0], places.get(one, [])) for one, arrays in given])

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        """Keep no value of these keys; see `KVStore.leave_unkept`."""
        self._require_usable()
        self._copies.unkept.update(one for one in keys if one not in self._keys.infos)

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Let these keys travel as they are; see `KVStore.leave_uncompressed`."""
        self._require_usable()
        self._keys.leave_uncompressed(keys)

    # Sums.

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Contribute; returns as soon as the values are copied. See `KVStore.push`."""
        self.push_async(key, value, priority, average=average).add_done_callback(self._note_lost_error)

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future that resolves when the sum is there."""
        self._require_usable()
        with self._ranks.told():
            given = self._keys.matched(key, value)
        return self._copies.begin([(one, arrays, []) for one, arrays in given], average)

    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Copy this worker's own values out, once its pushes are summed. See `KVStore.pull`."""
        return self._waited(self.pull_async(key, out, priority, ignore_sparse))

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """`pull`, with a future of its result."""
        self._require_usable()
        return self._copies.pull(key, out, ignore_sparse)

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
        """Sum over devices and workers. See `KVStore.pushpull`."""
        self._waited(self._copies.begin(self._with_places(key, value, out), average, keeps=True))

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
        return self._copies.begin(self._with_places(key, value, out), average)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull`; there is no memory of others to show. See `KVStore.pushpull_shared`."""
        self.pushpull(key, value, out, priority, average=average)
        return [None] * len(values.pairs(key, out))

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> NoReturn:
        """Always a `TypeError`: this store has no tables of rows."""
        raise TypeError(ROWS_ADVICE)

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> NoReturn:
        """Always a `TypeError`: this store has no tables of rows."""
        raise TypeError(ROWS_ADVICE)

    def _with_places(self, key: Keys, value: Value, out: Value | None) -> list[tuple[Key, list[Any], list[Any]]]:
        self._require_usable()
        with self._ranks.told():
            if out is None and not holds_rows(value):
                return [(one, arrays, arrays) for one, arrays in self._keys.writable(key, value)]
            given = self._keys.matched(key, value)
            places = dict(self._keys.writable(key, value if out is None else out))
            return [(one, arrays, places[one]) for one, arrays in given]

    # Everybody together.

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here. See `KVStore.barrier`."""
        self._require_usable()
        if timeout is not None and not timeout > 0:
            raise ValueError(f"the time-out of a barrier is {timeout}; it must be a positive number of seconds or None")
        self._ranks.barrier(timeout)

    def agree(self, statement: str) -> None:
        """A barrier at which all must say the same. See `KVStore.agree`."""
        self._require_usable()
        self._ranks.agree(statement)

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """The mean over the workers. See `KVStore.average`."""
        self._require_usable()
        return self._ranks.average(value, counts)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """What rank 0 has. See `KVStore.from_rank_0`."""
        self._require_usable()
        return self._ranks.from_rank_0(values)

    # What is done to the values.

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Refused where the workers update, as in every store but ``hybrid``. See `KVStore.set_optimizer`.

        Raises:
            NotImplementedError: the store has no servers that could update.
        """
        self._require_usable()
        if not self._updates:
            raise NotImplementedError(
                f"the store {self._type!r} has no servers that could run an optimizer: each worker updates with the"
                " sums of gradients. A Trainer does so by itself; in a loop of your own use torch.optim, or a store"
                " with servers, 'dist'"
            )
        chosen = create(optimizer, **hyperparameters)
        self._ranks.agree(f"the optimizer {chosen.describe()}")
        self._copies.update_by(chosen)

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Update the values with ``updater(key, received, stored)``, on every worker. See `KVStore.set_updater`."""
        self._require_usable()
        self._settle()
        self._copies.call(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Let sums of float32 be made of halves; what rounding loses is not kept. See `KVStore`."""
        self._require_usable()
        with self._ranks.told():
            half = self._keys.compression(compression_params, self._type)
        self._ranks.agree(f"gradient compression by {half}")
        self._keys.half = half

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Nothing: there are no servers."""
        self._require_usable()
        command_of(head, body)  # which checks them

    # Files.

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Any = None,
        keep: int | None = None,
        names: Names | None = None,
    ) -> Future[Path]:
        """Write values and states; complete when the call returns. See `KVStore.save_checkpoint`."""
        self._settle()

        def job() -> SavingJob:
            folder, number = saved.place(directory, step), saved.checked_keep(keep)
            content = saved.own_file(state, names, self.rank)
            return SavingJob(folder, EVERYTHING, saved.checked_step(step), number, content)

        return self._saving.save_checkpoint(job, self._local.held, self._local.updater)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Read values and states. See `KVStore.load_checkpoint`."""
        self._settle()

        def find() -> Checkpoint:
            folder = saved.find(directory, step)
            return saved.loaded(folder, read_manifest(folder), self.rank)

        return self._load(find, EVERYTHING if states else (WEIGHTS,))

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Write the states. See `KVStore.save_optimizer_states`."""
        self._settle()
        job = SavingJob(saved.absolute(fname), (STATES,))
        self._saving.save(lambda: job, self._local.held, self._local.updater)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Read the states. See `KVStore.load_optimizer_states`."""
        self._settle()
        folder = saved.absolute(fname)
        description = self._saving.together(lambda: read_manifest(folder).optimizer, "it could not be read")
        if self._copies.optimizer is None and description is not None:
            self.set_optimizer(chosen_optimizer(description))
        self._load(lambda: Checkpoint(folder, 0), (STATES,))

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """What this worker's optimizer remembers. See `KVStore.optimizer_states`."""
        self._settle()
        with self._copies.lock:
            return self._local.optimizer_states(keys)

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Give it these. See `KVStore.replace_optimizer_states`."""
        self._settle()
        with self._copies.lock:
            self._local.replace_optimizer_states(keys, states)

    def _load(self, find: Callable[[], Checkpoint], contents: tuple[str, ...]) -> Checkpoint:
        with self._copies.lock:
            held, updater = self._local.held(), self._local.updater
        # Not under the lock: the engine's thread takes it for what other threads push, and only then lets ranks agree.
        checkpoint, found = self._saving.read(find, contents, held, updater)
        with self._copies.lock:
            self._local.take(local_saving.take(held, found, updater))
        return checkpoint

    # The store.

    def is_capable(self, capability: str) -> bool:
        """False for ``optimizer``: the workers update. See `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability) and self._updates

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in ordinary memory. See `KVStore.empty`."""
        return np.empty(shape, values.as_numpy_dtype(dtype))

    def _close(self, wait: bool) -> None:
        """Leave the store, once what was begun is done. Raises the error of a lost push."""
        if self._closed:
            return
        self._closed = True
        if wait:
            wait_for([self._copies.last])
        self._local.close()
        self._leave()
        self._raise_lost_error()

    def _told(self) -> contextlib.AbstractContextManager[None]:
        """Within it this worker looks at what it was given; see `Ranks.told`. A `HybridStore` uses it too."""
        self._require_usable()
        return self._ranks.told()

    def _settle(self) -> None:
        """What was begun is done: the values are those of now."""
        self._require_usable()
        wait_for([self._copies.last])
        self._raise_lost_error()

    def _waited(self, future: Future[Any]) -> Any:
        result = future.result()
        self._raise_lost_error()
        return result

    def _note_lost_error(self, future: Future[Any]) -> None:
        error = future.exception()
        if error is not None:
            self._errors.append(error)

    def _raise_lost_error(self) -> None:
        if self._errors:
            raise self._errors.popleft()

    def _require_usable(self) -> None:
        if self._closed:
            raise StoreClosed(f"this {self._type!r} store has been closed; create another one")
        self._raise_lost_error()


def holds_rows(value: Value) -> bool:
    """Whether a value, or one in a list of them, is rows."""
    return any(map(holds_rows, value)) if isinstance(value, (list, tuple)) else is_sparse(value)
