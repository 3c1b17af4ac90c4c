"""`HybridStore`: tables of rows on parameter servers, every other key summed by all-reduce and updated by each worker.

A key goes to the servers where its first value is rows (`RowSparse`, a sparse tensor, `LazyRows`), or where
`expect_rows` has named it, as a `Trainer` does for parameters whose gradients are sparse. Rules that hold here:

* One optimizer serves both sides: servers run it on their keys, each worker on its copy of the others. Its numbers are
  read at each push, on both.
* The parts of a call travel side by side. All workers agree on which keys go where before the first value moves.
* Checkpoints lie where a store on servers has them; what workers hold is in a folder ``workers`` beside their steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NoReturn

from kvdist.kvstore import saved, values
from kvdist.kvstore.base import Keys, KVStore, UpdaterFunction, Value
from kvdist.kvstore.collective import CollectiveStore
from kvdist.kvstore.dist import DistStore
from kvdist.kvstore.keys import as_table
from kvdist.kvstore.saved import Checkpoint, CheckpointFuture, Names
from kvdist.kvstore.values import Key
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.states import SliceState
from kvdist.rowsparse import LazyRows, RowSparse

Half = tuple[list[Key], list[int]]
"""Keys of a call, and their positions in it."""


class HybridStore(KVStore):
    """The store ``hybrid``.

    Args:
        servers: keeps the tables.
        workers: sums the rest, and updates it; both end with this store.
    """

    def __init__(self, servers: DistStore, workers: CollectiveStore) -> None:
        self._servers = servers
        self._workers = workers
        self._there: set[Key] = set()
        """Keys that go to the servers."""
        self._known: set[Key] = set()

    def __repr__(self) -> str:
        return f"<hybrid store, {len(self._there & self._known)} of {len(self._known)} keys on servers>"

    @property
    def type(self) -> str:
        """``hybrid``."""
        return self._workers.type

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._servers.rank

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return self._servers.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers keep the tables."""
        return self._servers.num_servers

    @property
    def has_optimizer(self) -> bool:
        """Whether pushes are gradients. See `KVStore.has_optimizer`."""
        return self._servers.has_optimizer

    def num_dead_nodes(self) -> int:
        """How many processes are known to be lost. See `KVStore.num_dead_nodes`."""
        return max(self._servers.num_dead_nodes(), self._workers.num_dead_nodes())

    # Keys.

    def expect_rows(self, keys: Sequence[Key]) -> None:
        """Keep these keys on the servers. See `KVStore.expect_rows`."""
        self._there.update(one for one in keys if one not in self._known)

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        """See `KVStore.leave_unkept`."""
        self._workers.leave_unkept([one for one in keys if one not in self._there])

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Let these keys travel as they are. See `KVStore.leave_uncompressed`."""
        self._servers.leave_uncompressed(keys)
        self._workers.leave_uncompressed(keys)

    def init(self, key: Keys, value: Value) -> None:
        """Agree on keys with all workers; rank 0's values win. See `KVStore.init`."""
        there, here = self._placed(key, value)
        for store, half in ((self._servers, there), (self._workers, here)):
            if half[0]:
                store.init(half[0], _of(half, key, value))

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Give every worker rank 0's present values. See `KVStore.broadcast`."""
        there, here = self._placed(key, value)
        for store, half in ((self._servers, there), (self._workers, here)):
            if half[0]:
                store.broadcast(half[0], _of(half, key, value), _of(half, key, out), priority)

    def _placed(self, key: Keys, value: Value) -> tuple[Half, Half]:
        """Where the keys of a call go, once all workers have agreed on the new ones."""
        with self._workers._told():
            given = values.pairs(key, value)
            new = [(one, arrays) for one, arrays in given if one not in self._known]
            tables = [
                one
                for one, arrays in new
                if any(isinstance(as_table(one, array), RowSparse | LazyRows) for array in arrays)
            ]
        fresh = [one for one, _ in new]
        if fresh:
            there = sorted((one for one in fresh if one in self._there or one in tables), key=repr)
            self._workers.agree(f"of {len(fresh)} new keys these go to the servers: {there or 'none'}")
        self._there.update(tables)
        self._known.update(fresh)
        return self._halves(key)

    def _halves(self, key: Keys) -> tuple[Half, Half]:
        """The keys that are on the servers, and the others; a key once for all its places."""
        there: Half = ([], [])
        here: Half = ([], [])
        for position, one in enumerate(values.keys(key)):
            keys, positions = there if one in self._there else here
            keys.append(one)
            positions.append(position)
        return there, here

    # Values.

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0) -> None:
        """Contribute; returns as soon as the values are copied. See `KVStore.push`."""
        for store, half in self._sides(key):
            store.push(half[0], _of(half, key, value), priority, average=average, samples=samples)

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> Future[None]:
        """`push`, with a future."""
        return all_of(
            [
                store.push_async(half[0], _of(half, key, value), priority, average=average, samples=samples)
                for store, half in self._sides(key)
            ]
        )

    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Read. See `KVStore.pull`."""
        sides = self._sides(key)
        if out is not None:
            for store, half in sides:
                store.pull(half[0], _of(half, key, out), priority, ignore_sparse)
            return None
        found: dict[int, Any] = {}
        for store, (keys, positions) in sides:
            found.update(zip(positions, store.pull(keys, None, priority, ignore_sparse), strict=True))
        return [found[position] for position in sorted(found)] if isinstance(key, (list, tuple)) else found[0]

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """`pull`, with a future; without `out` of keys on one side alone."""
        sides = self._sides(key)
        if out is None:
            if len(sides) > 1:
                raise ValueError("pull_async without out takes keys of servers, or others, not both in one call")
            return sides[0][0].pull_async(key, None, priority, ignore_sparse)
        return all_of(
            [store.pull_async(half[0], _of(half, key, out), priority, ignore_sparse) for store, half in sides]
        )

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
        """Contribute and read the result. See `KVStore.pushpull`."""
        self.pushpull_async(key, value, out, priority, average=average, samples=samples).result()

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
        futures: list[Future[Any]] = []
        for store, half in self._sides(key):
            given, places = _of(half, key, value), None if out is None else _of(half, key, out)
            futures.append(store.pushpull_async(half[0], given, places, priority, average=average, samples=samples))
        return all_of(futures)

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: bool = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull`; nothing is shown. See `KVStore.pushpull_shared`."""
        self.pushpull(key, value, out, priority, average=average, samples=samples)
        return [None] * len(values.pairs(key, out))

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Read rows of tables, from the servers. See `KVStore.row_sparse_pull`."""
        return self._servers.row_sparse_pull(key, out, priority, row_ids)

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Future[Any]:
        """`row_sparse_pull`, with a future."""
        return self._servers.row_sparse_pull_async(key, out, priority, row_ids)

    def _sides(self, key: Keys) -> list[tuple[DistStore | CollectiveStore, Half]]:
        """The stores that have keys of a call, with those. Servers first: they work while workers sum."""
        there, here = self._halves(key)
        sides: list[tuple[DistStore | CollectiveStore, Half]] = [(self._servers, there), (self._workers, here)]
        return [(store, half) for store, half in sides if half[0]]

    # Everybody together.

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here. See `KVStore.barrier`."""
        self._servers.barrier(timeout)

    def agree(self, statement: str) -> None:
        """A barrier at which all must say the same. See `KVStore.agree`."""
        self._servers.agree(statement)

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """The mean over the workers. See `KVStore.average`."""
        return self._workers.average(value, counts=counts)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """What rank 0 has. See `KVStore.from_rank_0`."""
        return self._workers.from_rank_0(values)

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Let servers and workers update with this one. See `KVStore.set_optimizer`."""
        chosen = create(optimizer, **hyperparameters)
        self._servers.set_optimizer(chosen)
        self._workers.set_optimizer(chosen)

    def set_updater(self, updater: UpdaterFunction) -> NoReturn:
        """Always a `TypeError`: some values rest on servers, which run no code that a worker sends."""
        raise TypeError("a 'hybrid' store keeps some values on servers, which run no functions: use set_optimizer")

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress on both sides, by ``fp16`` or ``bf16``. See `KVStore.set_gradient_compression`."""
        self._workers.set_gradient_compression(compression_params)
        self._servers.set_gradient_compression(compression_params)

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Let every server run a registered handler. See `KVStore.send_command_to_servers`."""
        self._servers.send_command_to_servers(head, body)

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
        """Save what both sides keep. See `KVStore.save_checkpoint`."""
        (first, folder), *others = self._folders(directory, "workers")
        # Of a step that the servers have, the workers' part is there: it is written before, and goes away after.
        kept = keep + 1 if isinstance(keep, int) and keep > 0 else keep
        if others:
            self._servers._claim_folder(folder, step)  # before the workers write what would stay if it were refused
        for store, beside in others:
            written = store.save_checkpoint(beside, step, keep=kept)
            if isinstance(written, CheckpointFuture) and written.has_failed:
                return written
        return first.save_checkpoint(folder, step, state=state, keep=keep, names=names)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Go on from a checkpoint, on both sides. See `KVStore.load_checkpoint`."""
        folders = self._folders(directory, "workers")
        # The newest step is that of which both sides are complete: servers come last in saving, and first here.
        found = folders[0][0].load_checkpoint(folders[0][1], step, states=states)
        for store, folder in folders[1:]:
            store.load_checkpoint(folder, found.step, states=states)
        return found

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save what the optimizer remembers, on both sides. See `KVStore.save_optimizer_states`."""
        for store, folder in self._folders(fname, ""):
            store.save_optimizer_states(folder)

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Give it back. See `KVStore.load_optimizer_states`."""
        for store, folder in self._folders(fname, ""):
            store.load_optimizer_states(folder)

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """What the optimizer remembers, on both sides. See `KVStore.optimizer_states`."""
        found: dict[Key, SliceState | None] = {}
        for store, (half, _) in self._sides(list(keys)):
            found.update(zip(half, store.optimizer_states(half), strict=True))
        return [found[key] for key in keys]

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Give it these. See `KVStore.replace_optimizer_states`."""
        for store, (half, positions) in self._sides(list(keys)):
            store.replace_optimizer_states(half, [states[position] for position in positions])

    def _folders(self, given: str | os.PathLike[str], inside: str) -> list[tuple[DistStore | CollectiveStore, Path]]:
        """Where each side that has keys keeps its files: the first one in the folder that was given."""
        path = saved.absolute(given)
        beside = path / inside if inside else path.with_name(f"{path.name}-workers")
        there, here = self._halves(sorted(self._known, key=repr)) if self._known else (([], []), ([], []))
        if not there[0]:
            return [(self._workers, path)]
        return [(self._servers, path), (self._workers, beside)] if here[0] else [(self._servers, path)]

    # The store.

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``. See `KVStore.is_capable`."""
        return values.is_optimizer_capability(capability)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new array in memory that servers of this host are shown. See `KVStore.empty`."""
        return self._servers.empty(shape, dtype)

    def _close(self, wait: bool) -> None:
        try:
            self._workers.close(wait)
        finally:
            self._servers.close(wait)


def _of(half: Half, key: Keys, value: Value) -> list[Any]:
    """What a call gives for the keys of a half."""
    if not isinstance(key, (list, tuple)):
        return [value]
    if not isinstance(value, (list, tuple)) or len(value) != len(key):
        values.pairs(key, value)  # which says what is wrong
    return [value[position] for position in half[1]]


def all_of(futures: Sequence[Future[Any]]) -> Future[Any]:
    """A future of the first one's result, resolved when all are; it fails with the first error."""
    if len(futures) == 1:
        return futures[0]
    result: Future[Any] = Future()
    lock, left = threading.Lock(), [len(futures)]

    def count(_: Future[Any]) -> None:
        with lock:
            left[0] -= 1
            if left[0]:
                return
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            result.set_exception(errors[0])
        else:
            result.set_result(futures[0].result())

    for future in futures:
        future.add_done_callback(count)
    return result
