"""Tables of rows in the simulated workload: what workers push to them and pull from them, and what the rows must be.

As with arrays every worker contributes to every table once a round, and reads in between. A contribution may have no
rows, or no gradient, or name a row twice; its parts are a few rows long. Of a table of many more rows than anybody
touches only a few are ever named.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.snapshot import SliceImage
from kvdist.core.sharding import Slice
from kvdist.core.worker.requests import DeclareKeys, KeyInfo, RunKind, Transfer
from kvdist.dtypes import DType
from kvdist.kvstore.rowsparse import canonical
from kvdist.protocol.messages import ROWS
from tests.core.ledger import Books
from tests.core.row_runs import pull_runs, push_runs

Array = npt.NDArray[Any]
Ask = Callable[..., "Future[Any]"]
MANY = 1 << 36


@dataclass(frozen=True)
class Table:
    """One table of the workload. `ids` are the rows that are ever named, `first` what they all are at first."""

    name: str
    rows: int
    width: int
    dtype: DType
    form: str
    ids: tuple[int, ...]
    first: int


TABLES = (
    Table("eager", 11, 5, DType.FLOAT32, ROWS, tuple(range(11)), 3),
    Table("one server", 4, 3, DType.FLOAT16, ROWS, tuple(range(4)), 0),
    Table("lazy", MANY, 3, DType.FLOAT64, "constant(2.0)", (0, 1, 7, MANY // 2 - 1, MANY // 2, MANY - 9, MANY - 1), 2),
)
"""One that is cut over all servers, one that is not, and one that is larger than any memory."""


@dataclass(frozen=True)
class Gift:
    """One contribution: places in `Table.ids`, perhaps repeated and in any order, and the values of their rows."""

    places: Array
    values: Array

    def canonical(self, table: Table) -> tuple[Array, Array]:
        """What a store makes of it: ids, and values."""
        return canonical(np.array(table.ids, np.int64)[self.places], self.values, table.dtype)

    def dense(self, table: Table) -> Array:
        """The same for all rows that are ever named."""
        whole = np.zeros((len(table.ids), table.width), table.dtype.storage)
        np.add.at(whole, self.places, self.values)
        return whole


class RowOracle:
    """The contributions of a seed, and the rows of every table at every version.

    Args:
        turns: rank → how many rounds it takes part in.
        optimizer: None, ``test`` or ``sgd`` with learning rate 1.
        generator: where the contributions come from.
        books: what servers have counted.
    """

    def __init__(self, turns: Sequence[int], optimizer: str | None, generator: random.Random, books: Books) -> None:
        self.optimizer = optimizer
        self.books = books
        self.slices: dict[str, Sequence[Slice]] = {}
        """Table → its slices, once a worker knows them."""
        self.given: dict[tuple[int, int, str], Gift | None] = {}
        """(rank, round, table) → the contribution, or None for an empty one."""
        self._states: dict[int, list[Array]] = {}
        """Slice → those of its rows that are ever named, at each version."""
        for table in TABLES:
            for rank, count in enumerate(turns):
                for turn in range(count):
                    self.given[rank, turn, table.name] = self._gift(table, rank, turn, generator)

    @property
    def sign(self) -> int:
        """Of a gradient in the sum."""
        return 1 if self.optimizer == "test" else -1

    def firsts(self, table: Table) -> Array:
        """The rows at first."""
        return np.full((len(table.ids), table.width), table.first, table.dtype.storage)

    @staticmethod
    def _gift(table: Table, rank: int, turn: int, generator: random.Random) -> Gift | None:
        if generator.random() < 0.15:
            return None
        count = 0 if generator.random() < 0.15 else generator.randint(1, 2 * len(table.ids))
        places = np.array([generator.randrange(len(table.ids)) for _ in range(count)], np.int64)
        values = np.arange(count * table.width).reshape(count, table.width) % 3 + rank + turn + 1
        return Gift(places, values.astype(table.dtype.storage))

    def states(self, table: Table, piece: Slice) -> list[Array]:
        """The rows of a slice that are ever named, at each version that it has had so far."""
        rows = self.rows_of(table, piece)
        states = self._states.setdefault(piece.number, [self.firsts(table)[rows]])
        del states[self.books.undone.pop(piece.number, len(states)) + 1 :]
        for counted in self.books.rounds[piece.number][len(states) - 1 :]:
            given = [self.given[member.node.rank, step, table.name] for member, step in counted]
            present = [gift.dense(table)[rows] for gift in given if gift is not None]
            if present:
                summed = np.sum(present, axis=0, dtype=table.dtype.storage)
                states.append(summed if self.optimizer is None else states[-1] + self.sign * summed)
            else:
                states.append(states[-1])
        return states

    def require_saved(self, saved: Iterable[SliceImage], version: int) -> None:
        """Whether the slices of tables in a checkpoint have the rows of a version."""
        for table in TABLES:
            own = {one.start: one for one in saved if one.key == table.name}
            for piece in self.slices[table.name]:
                one, rows, wanted = own[piece.start], self.rows_of(table, piece), self.states(table, piece)[version]
                assert one.weight is not None
                ids, found = np.array(table.ids, np.int64)[rows], self.firsts(table)[rows]
                there = np.searchsorted(ids, ids if one.ids is None else one.ids)
                found[there] = one.weight.reshape(-1, table.width)
                assert np.array_equal(found, wanted), f"{table.name!r} was saved as {found}, and not as {wanted}"

    @staticmethod
    def rows_of(table: Table, piece: Slice) -> slice:
        """Which of the rows that are ever named lie in a slice."""
        bounds = (piece.start // table.width, piece.stop // table.width)
        low, high = np.searchsorted(np.array(table.ids, np.int64), bounds).tolist()
        return slice(low, high)


@dataclass(eq=False)
class RowUser:
    """What one worker does with the tables.

    Attributes:
        rank: the worker's.
        mode: the store's.
        oracle: what must come of it.
        random: where choices come from.
        ask: hands a request to the worker's node.
        garbage: what memory is overwritten with as soon as it belongs to the worker again.
    """

    rank: int
    mode: str
    oracle: RowOracle
    random: random.Random
    ask: Ask
    garbage: int
    infos: dict[str, KeyInfo] = field(default_factory=dict)
    reads: int = 0
    _pushed: dict[str, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    """The least version that it has shown."""

    def declare(self, store: int) -> Future[Any]:
        """Agree on the tables with all workers."""
        columns = zip(*((one.name, (one.rows, one.width), one.dtype, one.form) for one in TABLES), strict=True)
        keys, shapes, dtypes, forms = columns

        def finish_with(infos: Sequence[KeyInfo]) -> None:
            self.infos = {str(info.key): info for info in infos}
            self.oracle.slices = {str(info.key): info.slices for info in infos}

        future = self.ask(lambda number: DeclareKeys(number, store, self.mode, keys, shapes, dtypes, forms=forms))
        future.add_done_callback(lambda done: None if done.exception() else finish_with(done.result()))
        return future

    def begin_at(self, turn: int) -> None:
        """The others have contributed so often before this worker came."""
        self._pushed = {table.name: turn for table in TABLES}

    def initialise(self) -> list[Future[Any]]:
        """Give the first values of those that have some."""
        futures = []
        for table in TABLES:
            if table.form == ROWS:
                info, ids = self.infos[table.name], np.array(table.ids)
                runs, _ = push_runs(info, ids, self.oracle.firsts(table), self.random.randint(1, 4))
                futures.append(self.ask(lambda n, runs=runs: Transfer(n, RunKind.INITIALISE, "init of rows", runs)))
        return futures

    def contribute(self, turn: int, name: str) -> list[Future[Any]]:
        """Push to a table, and perhaps read from one."""
        table = next(one for one in TABLES if one.name == name)
        gift = self.oracle.given[self.rank, turn, name]
        self._pushed[name] = self._pushed.get(name, 0) + 1
        ids, values = (np.zeros(0, np.int64), None) if gift is None else gift.canonical(table)
        size, stays = self.random.randint(1, 3), self.random.random() < 0.5
        runs, memory = push_runs(self.infos[name], ids, values, size, stays=stays)

        def finish() -> None:
            for buffer in memory:
                buffer[:] = bytes([self.garbage]) * len(buffer)

        priority = self.random.randint(-2, 2)
        futures = [self.ask(lambda n: Transfer(n, RunKind.PUSH, f"push of {name}", runs, priority), finish)]
        if self.random.random() < 0.6:
            futures.append(self.pull(self.random.choice(TABLES)))
        return futures

    def pull(self, table: Table, everything: bool = False) -> Future[Any]:
        """Read rows, and compare them when they are there."""
        count = len(table.ids)
        some = sorted(self.random.sample(range(count), self.random.randint(0, count)))
        places = np.arange(count) if everything else np.array(some, np.int64)
        ids = np.array(table.ids, np.int64)[places]
        out = np.full((len(ids), table.width), -77, table.dtype.storage)
        size = self.random.randint(1, 4)
        runs = pull_runs(self.infos[table.name], ids, out, size)
        pushed, seen = self._pushed.get(table.name, 0), dict(self._seen)

        def finish() -> None:
            self.reads += 1
            self._check_versions(table, places, out, size, pushed, seen)

        priority = self.random.randint(-2, 2)
        return self.ask(lambda n: Transfer(n, RunKind.PULL, f"pull of {table.name}", runs, priority), finish)

    def check_the_end(self) -> list[tuple[Table, Array, Future[Any]]]:
        """Read everything: what `require_final` wants when the futures are done."""
        reads = []
        for table in TABLES:
            ids = np.array(table.ids, np.int64)
            out = np.full((len(ids), table.width), -77, table.dtype.storage)
            runs = pull_runs(self.infos[table.name], ids, out, 3)
            reads.append((table, out, self.ask(lambda n, r=runs: Transfer(n, RunKind.PULL, "pull of rows", r))))
        return reads

    def require_final(self, reads: Sequence[tuple[Table, Array, Future[Any]]]) -> None:
        """All rows are as all contributions make them."""
        self.require_at(reads, -1)

    def require_at(self, reads: Sequence[tuple[Table, Array, Future[Any]]], version: int) -> None:
        """All rows are as they are at this version; -1 for the newest."""
        for table, out, _ in reads:
            for piece in self.infos[table.name].slices:
                found, wanted = out[self.oracle.rows_of(table, piece)], self.oracle.states(table, piece)[version]
                assert np.array_equal(found, wanted), (
                    f"worker {self.rank}: table {table.name!r} is {found} at version {version}, not {wanted}"
                )

    def _check_versions(
        self,
        table: Table,
        places: Array,
        out: Array,
        size: int,
        pushed: int,
        seen: dict[int, int],
    ) -> None:
        """The rows of each message are those of one version, which is not too old."""
        ids = np.array(table.ids, np.int64)[places]
        for piece in self.infos[table.name].slices:
            bounds = (piece.start // table.width, piece.stop // table.width)
            low, high = np.searchsorted(ids, bounds).tolist()
            least = max(pushed, seen.get(piece.number, 0))
            first, states = self.oracle.rows_of(table, piece).start, self.oracle.states(table, piece)
            for start in range(low, high, size):
                rows = slice(start, min(start + size, high))
                shown = [state[places[rows] - first] for state in states]
                fitting = [v for v in range(least, len(states)) if np.array_equal(shown[v], out[rows])]
                assert fitting, (
                    f"worker {self.rank} read {out[rows].tolist()} of rows {ids[rows]} of {table.name!r}, no version"
                    f" from {least} on of {[one.tolist() for one in shown]}"
                )
                self._seen[piece.number] = max(self._seen.get(piece.number, 0), fitting[0])
