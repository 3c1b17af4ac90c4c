"""The store ``hybrid``: tables of rows on parameter servers, every other key summed by all-reduce on the workers.

A key goes to the servers where its first value is rows (`RowSparse`, a sparse tensor, `LazyRows`), or where
`expect_rows` has named it, as a `Trainer` does for parameters whose gradients are sparse. Invariants:

* One optimizer serves both sides: servers run it on their keys, each worker on its copy of the others. Its numbers are
  read at each push, on both.
* The parts of a call travel side by side. All workers agree on which keys go where before the first value moves.
* Checkpoints lie where a store on servers has them; what workers hold is in a folder ``workers`` beside their steps.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.collective.signature import ASIDE
from kvdist.kvstore import values
from kvdist.kvstore.backend import (
    Ability,
    Backend,
    Lending,
    LoadJob,
    PushPull,
    Reduction,
    SaveJob,
    combined,
)
from kvdist.kvstore.collective import CollectiveBackend
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.keys import KeyArrays, as_table
from kvdist.kvstore.rowsparse import LazyRows, RowSparse
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState

Side = DistBackend | CollectiveBackend


class HybridBackend(Backend):
    """Some keys on servers, the others on workers.

    Args:
        servers: keeps the tables.
        workers: sums the rest, and updates it; both end with this store.
    """

    abilities = frozenset({Ability.OPTIMIZER, Ability.COMPRESSION, Ability.ROWS, Ability.STATES, Ability.WEIGHTS})

    def __init__(self, servers: DistBackend, workers: CollectiveBackend) -> None:
        super().__init__(workers.type, servers.rank, servers.num_workers, servers.num_servers, servers.devices)
        self._servers = servers
        self._workers = workers
        self.errors = workers.errors = servers.errors
        self.keys, self.rows = servers.keys, servers.rows
        self.watchers, self.rollback_watchers = servers.watchers, servers.rollback_watchers
        self.arrays: Sides = Sides(servers, workers)
        self._on_servers = self.arrays.on_servers
        self._known: set[Key] = set()

    @property
    def optimizer(self) -> Optimizer | None:
        return self._servers.optimizer

    @property
    def holdings(self) -> str:
        return f"{len(self._on_servers & self._known)} of {len(self._known)} keys on servers"

    def num_dead_nodes(self) -> int:
        return max(self._servers.num_dead_nodes(), self._workers.num_dead_nodes())

    @property
    def members(self) -> tuple[int, ...]:
        return self._servers.members

    @property
    def leasing_side(self) -> DistBackend | None:
        """The servers, if they alone have the keys of one worker; else what that keeps has its place in the data."""
        return self._servers if self.num_workers == 1 and self._known <= self._on_servers else None

    def check(self) -> None:
        self._servers.check()

    def note_error(self, error: BaseException) -> None:
        self._servers.note_error(error)  # which tells a push that is lost from one whose answer leaving overtook

    def wait(self, future: Future[Any], lends: bool = False) -> Any:
        return self._servers.wait(future, lends)

    def reporting(self) -> contextlib.AbstractContextManager[None]:
        return self._workers.reporting()

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory that servers of this host are shown."""
        return self._servers.allocate(nbytes)

    # Keys.

    def require(self, key: Key) -> object:
        return self.arrays.side_of(key).require(key)

    def declare(self, given: KeyArrays) -> None:
        self._place(given)
        for side, part in self._split(given):
            side.declare(part)
            self._known.update(one for one, _ in part)

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        self._place(given)
        places = dict(values.pairs(key, out))
        for side, part in self._split(given):
            names = [one for one, _ in part]
            side.replace(part, names, [places[one] for one in names], priority)
            self._known.update(names)

    def _place(self, given: KeyArrays) -> None:
        """Agree with all workers on where new keys go."""
        with self.reporting():
            new = [(one, arrays) for one, arrays in given if one not in self._known]
            tables = {
                one
                for one, arrays in new
                if any(isinstance(as_table(one, array), RowSparse | LazyRows) for array in arrays)
            }
        if new:
            there = sorted((one for one, _ in new if one in self._on_servers or one in tables), key=repr)
            said = f"of {len(new)} new keys these go to the servers: "
            named = ", ".join(map(name_of, there))
            self._workers.meet(statement=f"{said}{there}{ASIDE}{said}{named or 'none'}")
        self._on_servers.update(tables)

    def _split(self, given: KeyArrays) -> list[tuple[Side, KeyArrays]]:
        """The sides that have keys of a call, with those."""
        positions = self.arrays.positions([one for one, _ in given])
        return [(side, [given[i] for i in chosen]) for side, chosen in positions]

    # All workers together.

    def meet(self, timeout: float | None = None, statement: str | None = None) -> None:
        self._servers.meet(timeout, statement)

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        return self._workers.reduce(arrays, how)

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._servers.set_optimizer(optimizer)
        self._workers.set_optimizer(optimizer)

    def compress(self, params: Mapping[str, Any]) -> None:
        self._workers.compress(params)
        self._servers.compress(params)

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        self._workers.leave_uncompressed(keys)
        self._servers.leave_uncompressed(keys)

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        self._workers.leave_unkept([one for one in keys if one not in self._on_servers])

    def expect_rows(self, keys: Sequence[Key]) -> None:
        self._on_servers.update(one for one in keys if one not in self._known)

    def command(self, head: int, body: str) -> None:
        self._servers.command(head, body)

    # Files.

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        found: dict[Key, SliceState | None] = {}
        for side, chosen in self.arrays.positions(keys):
            own = [keys[position] for position in chosen]
            found.update(zip(own, side.states(own), strict=True))
        return [found[key] for key in keys]

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        for side, chosen in self.arrays.positions(keys):
            side.replace_states([keys[i] for i in chosen], [states[i] for i in chosen])

    def totals(self, keys: Sequence[Key]) -> tuple[int, int] | None:
        (side, chosen), *_ = self.arrays.positions(keys)
        return side.totals([keys[position] for position in chosen])

    def save(self, job: SaveJob) -> Future[Path]:
        self._workers.position, self._workers.samples = self.position, self.samples
        (first, folder), *others = self._folders(job.directory, "-workers" if job.states_only else "/workers")
        if not job.states_only and others:
            # Before the workers write what would stay if it were refused.
            self._servers.claim(replace(job, directory=folder))
        # Of a step that the servers have, the workers' part is there: it is written before, and goes away after.
        keep = job.keep + 1 if isinstance(job.keep, int) and job.keep > 0 else job.keep
        for _, beside in others:
            written = self._workers.save(SaveJob(beside, job.step, keep=keep, states_only=job.states_only))
            if written.has_failed:
                return written
        return first.save(replace(job, directory=folder))

    def load(self, job: LoadJob) -> Any:
        (first, folder), *others = self._folders(job.directory, "/workers" if job.values else "-workers")
        # The newest step is the last one that both sides have complete: servers come last in saving, and first here.
        found = first.load(replace(job, directory=folder))
        for side, beside in others:
            there = side.load(replace(job, directory=beside, step=found.step if job.values else None))
            found = replace(found, data=there.data)  # the servers have that of queues of other stores
        return found

    def _folders(self, given: str | os.PathLike[str], suffix: str) -> list[tuple[Side, Path]]:
        """Where each side that has keys keeps its files: the first one in the folder that was given."""
        from kvdist.kvstore.checkpoints import absolute

        path = absolute(given)
        there, here = self._on_servers & self._known, self._known - self._on_servers
        if not there:
            return [(self._workers, path)]
        return [(self._servers, path), (self._workers, Path(f"{path}{suffix}"))] if here else [(self._servers, path)]

    def close(self, wait: bool, failure: str = "") -> None:
        try:
            self._workers.close(wait, failure)
        finally:
            self._servers.close(wait, failure)


class Sides:
    """Moves arrays of either side.

    Args:
        servers, workers: the sides.
    """

    def __init__(self, servers: DistBackend, workers: CollectiveBackend) -> None:
        self.on_servers: set[Key] = set()
        """Keys that go to the servers, initialised or not."""
        self._servers = servers
        self._workers = workers

    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull; a future of what the call returns."""
        positions = self.positions(values.keys(call.key))
        if len(positions) == 1:
            return positions[0][0].arrays.transfer(call)
        futures = [side.arrays.transfer(_part(call, chosen)) for side, chosen in positions]
        if call.pushes or call.out is not None:
            return combined(futures)

        def in_order() -> list[Any]:
            found: dict[int, Any] = {}
            for (_, chosen), future in zip(positions, futures, strict=True):
                found.update(zip(chosen, future.result(), strict=True))
            return [found[position] for position in sorted(found)]

        return combined(futures, in_order)

    def side_of(self, key: Key) -> Side:
        """Where a key is."""
        return self._servers if key in self.on_servers else self._workers

    def positions(self, keys: Sequence[Key]) -> list[tuple[Side, list[int]]]:
        """The sides that have some of these keys, with their positions. Servers first: they work while workers sum."""
        sides: tuple[Side, ...] = (self._servers, self._workers)
        found = [(side, [i for i, key in enumerate(keys) if self.side_of(key) is side]) for side in sides]
        return [(side, chosen) for side, chosen in found if chosen]


def _part(call: PushPull, chosen: Sequence[int]) -> PushPull:
    """What a call says about some of its keys. Only resident arrays are lent: another side may write the others."""

    def of(given: Any) -> Any:
        if given is None:
            return None
        if not isinstance(given, (list, tuple)) or len(given) != len(call.key):  # type: ignore[arg-type]
            values.pairs(call.key, given)  # which says what is wrong
        return [given[position] for position in chosen]

    keys = [call.key[position] for position in chosen]  # type: ignore[index]  # several keys are a list
    lending = Lending.RESIDENT if call.pushes and call.pulls else call.lending
    return replace(
        call, key=keys, value=of(call.value) if call.pushes else None, out=of(call.out), lending=lending, shared=False
    )
