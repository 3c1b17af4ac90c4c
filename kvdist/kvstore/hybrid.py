"""The store ``hybrid``: tables of rows on parameter servers, every other key summed by all-reduce on the workers.

A key goes to the servers where its first value is rows (`RowSparse`, a sparse tensor, `LazyRows`), or where
`expect_rows` has named it, as a `Trainer` does for parameters whose gradients are sparse. Invariants:

* An optimizer serves both sides: servers run it on their keys, each worker on its copy of the others. Its numbers are
  read at each push, on both.
* The parts of a call travel side by side. All workers agree on which keys go where before the first value moves.
* Checkpoints lie where a store on servers has them; what workers hold is in a folder ``workers`` beside their steps.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from kvdist.collective.signature import ASIDE
from kvdist.kvstore import values
from kvdist.kvstore.backend import Ability, Backend, Lending, LoadJob, PushPull, SaveJob, combined
from kvdist.kvstore.collective import CollectiveBackend
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.keys import KeyArrays, as_table
from kvdist.kvstore.rowsparse import LazyRows, RowSparse
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState

Side: TypeAlias = DistBackend | CollectiveBackend
T = TypeVar("T")


class HybridBackend(Backend):
    """Some keys on servers, the others on workers.

    Args:
        servers: keeps the tables.
        workers: sums the other keys, and updates them; both sides end with this store.
    """

    abilities = frozenset({Ability.OPTIMIZER, Ability.COMPRESSION, Ability.ROWS, Ability.STATES, Ability.WEIGHTS})

    # A method of one side alone.
    optimizer = property(attrgetter("_servers.optimizer"))
    members = property(attrgetter("_servers.members"))
    check = property(attrgetter("_servers.check"))
    note_error = property(attrgetter("_servers.note_error"))  # tells a lost push from an answer that leaving overtook
    wait = property(attrgetter("_servers.wait"))
    allocate = property(attrgetter("_servers.allocate"))
    meet = property(attrgetter("_servers.meet"))
    command = property(attrgetter("_servers.command"))
    reporting = property(attrgetter("_workers.reporting"))
    reduce = property(attrgetter("_workers.reduce"))

    def __init__(self, servers: DistBackend, workers: CollectiveBackend) -> None:
        super().__init__(workers.type, servers.rank, servers.num_workers, servers.num_servers, servers.devices)
        self._servers = servers
        self._workers = workers
        self.errors = workers.errors = servers.errors
        self.keys, self.rows = servers.keys, servers.rows
        self.watchers, self.rollback_watchers = servers.watchers, servers.rollback_watchers
        self._on_servers: set[Key] = set()
        """Keys that go to the servers, initialised or not."""
        self._known: set[Key] = set()
        """Initialised keys of both sides."""

    @property
    def holdings(self) -> str:
        return f"{len(self._on_servers & self._known)} of {len(self._known)} keys on servers"

    def num_dead_nodes(self) -> int:
        return max(self._servers.num_dead_nodes(), self._workers.num_dead_nodes())

    @property
    def leasing_side(self) -> DistBackend | None:
        """The servers, if they alone have the keys of a single worker; else the workers' checkpoints have its place."""
        return self._servers if self.num_workers == 1 and self._known <= self._on_servers else None

    def _split(self, keys: Sequence[Key]) -> list[tuple[Side, list[int]]]:
        """Split keys between the sides: the positions of each side's keys. No other method decides where a key is.

        Servers come first: they work while workers sum.
        """
        parts: dict[Side, list[int]] = {self._servers: [], self._workers: []}
        for position, key in enumerate(keys):
            parts[self._servers if key in self._on_servers else self._workers].append(position)
        return [(side, positions) for side, positions in parts.items() if positions]

    # Keys.

    def require(self, key: Key) -> object:
        ((side, _),) = self._split([key])
        return side.require(key)

    def declare(self, given: KeyArrays) -> None:
        self._agree_on_sides(given)
        for side, positions in self._split([key for key, _ in given]):
            part = picked(given, positions)
            side.declare(part)
            self._known.update(key for key, _ in part)

    def replace(self, given: KeyArrays, key: Keys, out: Value, priority: int) -> None:
        self._agree_on_sides(given)
        places = dict(values.pairs(key, out))
        for side, positions in self._split([key for key, _ in given]):
            part = picked(given, positions)
            names = [key for key, _ in part]
            side.replace(part, names, [places[name] for name in names], priority)
            self._known.update(names)

    def _agree_on_sides(self, given: KeyArrays) -> None:
        """Agree with all workers on the sides of new keys."""
        with self.reporting():
            new = [(key, arrays) for key, arrays in given if key not in self._known]
            tables = {
                key
                for key, arrays in new
                if any(isinstance(as_table(key, array), RowSparse | LazyRows) for array in arrays)
            }
        if new:
            to_servers = sorted((key for key, _ in new if key in self._on_servers or key in tables), key=repr)
            begin = f"of {len(new)} new keys these go to the servers: "
            named = ", ".join(map(name_of, to_servers))
            self._workers.meet(statement=f"{begin}{to_servers}{ASIDE}{begin}{named or 'none'}")
        self._on_servers.update(tables)

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        self._workers.leave_uncompressed(keys)
        self._servers.leave_uncompressed(keys)

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        self._workers.leave_unkept([key for key in keys if key not in self._on_servers])

    def expect_rows(self, keys: Sequence[Key]) -> None:
        self._on_servers.update(key for key in keys if key not in self._known)

    # Values.

    def transfer(self, call: PushPull) -> Future[Any]:
        parts = self._split(values.keys(call.key))
        if len(parts) == 1:
            return parts[0][0].transfer(call)
        futures = [side.transfer(_part(call, positions)) for side, positions in parts]
        if call.pushes or call.out is not None:
            return combined(futures)
        return combined(futures, lambda: _merged(parts, [future.result() for future in futures]))

    # All workers together.

    def set_optimizer(self, optimizer: Optimizer) -> None:
        self._servers.set_optimizer(optimizer)
        self._workers.set_optimizer(optimizer)

    def compress(self, params: Mapping[str, Any]) -> None:
        self._workers.compress(params)
        self._servers.compress(params)

    # Files.

    def states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        parts = self._split(keys)
        return _merged(parts, [side.states(picked(keys, positions)) for side, positions in parts])

    def replace_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        for side, positions in self._split(keys):
            side.replace_states(picked(keys, positions), picked(states, positions))

    def totals(self, keys: Sequence[Key]) -> tuple[int, int] | None:
        (side, positions), *_ = self._split(keys)
        return side.totals(picked(keys, positions))

    def save(self, job: SaveJob) -> Future[Path]:
        self._workers.position, self._workers.samples = self.position, self.samples
        (first, folder), *others = self._folders(job.directory, "-workers" if job.states_only else "/workers")
        if not job.states_only and others:
            # Before the workers write files that would stay if the servers refused.
            self._servers.claim(replace(job, directory=folder))
        # A step that the servers have has its workers' part: it is written before, and goes away after.
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
            part = side.load(replace(job, directory=beside, step=found.step if job.values else None))
            found = replace(found, data=part.data)  # the servers have the place of queues of other stores
        return found

    def _folders(self, directory: str | os.PathLike[str], suffix: str) -> list[tuple[Side, Path]]:
        """Return the folder of each side that has keys: `directory` for the first side."""
        from kvdist.kvstore.checkpoints import absolute

        path = absolute(directory)
        sides = [side for side, _ in self._split([*self._known])] or [self._workers]
        return list(zip(sides, (path, Path(f"{path}{suffix}")), strict=False))

    def close(self, wait: bool, failure: str = "") -> None:
        try:
            self._workers.close(wait, failure)
        finally:
            self._servers.close(wait, failure)


def picked(items: Sequence[T], positions: Sequence[int]) -> list[T]:
    """The items at these positions."""
    return [items[position] for position in positions]


def _merged(parts: Sequence[tuple[Side, list[int]]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """The results of each side's keys, in the order of the call."""
    merged: dict[int, Any] = {}
    for (_, positions), part in zip(parts, results, strict=True):
        merged.update(zip(positions, part, strict=True))
    return [merged[position] for position in range(len(merged))]


def _part(call: PushPull, positions: Sequence[int]) -> PushPull:
    """The part of a call for some of its keys. Only resident arrays are lent: another side may write the others."""

    def of(items: Any) -> Any:
        if items is None:
            return None
        if not isinstance(items, (list, tuple)) or len(items) != len(call.key):  # type: ignore[arg-type]
            values.pairs(call.key, items)  # raises
        return picked(items, positions)

    keys = picked(call.key, positions)  # type: ignore[arg-type]  # several keys are a list
    lending = Lending.RESIDENT if call.pushes and call.pulls else call.lending
    return replace(
        call, key=keys, value=of(call.value) if call.pushes else None, out=of(call.out), lending=lending, shared=False
    )
