"""What the simulated workers do, and what the weights must be: gradients of integers, so that every sum is exact.

Under a quota each push is the mean of a number of examples, which differs by worker and by round and may be none.

A worker contributes to every key once a round, in an order and in lists of its own, by `push` or `pushpull`, with or
without waiting, and reads in between; a few small keys most workers push as the same list. A value that it reads must
be one that the servers had at some version, not older than its own pushes before the read, nor than what it has read
before; and one that it reads where the server keeps it must not change until its successor has come.

After some rounds, the same for all, every worker saves a checkpoint and goes on. At the end they go back to the newest
one and make one more round.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.snapshot import EVERYTHING, WEIGHTS
from kvdist.core.sharding import Slice
from kvdist.core.worker.requests import (
    AcceptRollback,
    ClaimFolder,
    DeclareKeys,
    Encoded,
    EnterBarrier,
    KeyInfo,
    Leave,
    LoadStore,
    Register,
    ReportProgress,
    Run,
    RunKind,
    RunPlan,
    SaveStore,
    TakePart,
    Transfer,
    make_plan,
)
from kvdist.core.worker.worker import Worker
from kvdist.dtypes import DType
from kvdist.errors import BarrierTimeout, CheckpointError, KvdistError, RolledBackError
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member
from kvdist.optimizer.compression import Codec, Half, TopK, encode
from kvdist.optimizer.registry import create
from kvdist.protocol.messages import Configure, DueWhen, Flag, Progress, SavedFile
from kvdist.runtime.node import AnswerByKey, Node
from tests.core.ledger import Books, Counted
from tests.core.row_workload import TABLES, RowOracle, RowUser
from tests.core.shelf import FULL, Shelf

Array = npt.NDArray[Any]
Program = Generator[Sequence["Future[Any]"], None, None]

STORE = 0
MEANS = 1
"""The store of what workers average."""
SECOND = 2
"""The store of a second model, which is declared after the first one."""
GARBAGE = 0x5A
"""Buffers are overwritten with it as soon as they belong to the worker again."""
LOSSLESS: tuple[Codec, ...] = (Half(DType.FLOAT16), Half(DType.BFLOAT16), TopK(1.0))
"""Of small integers."""
SERVER_DECIDES = ((math.nan, math.nan, math.nan),)


@dataclass(frozen=True)
class Key:
    """One key of the workload."""

    name: int | str
    size: int
    dtype: DType


KEYS = (
    Key("bias", 3, DType.FLOAT32),
    Key(7, 45, DType.FLOAT32),
    Key("scale", 1, DType.FLOAT64),
    Key("none", 0, DType.FLOAT32),
    Key("weight", 40, DType.FLOAT64),
    Key("small", 2, DType.FLOAT32),
    Key("smaller", 1, DType.FLOAT32),
    Key("no", 0, DType.FLOAT32),
    Key("more", 4, DType.FLOAT32),
)
"""Small ones; one that is cut over all servers (7); one of several slices on one server; two without elements."""
TOGETHER: tuple[int | str, ...] = ("bias", "none", "small", "smaller", "no", "more")
"""A list of small keys that fits into one run, so that servers make a group of it."""
BIGARRAY_BOUND = 42


@dataclass(frozen=True)
class Job:
    """What is to be done.

    optimizer: None, ``test`` (w += g), ``sgd`` with learning rate 1 (w -= g), or ``momentum`` of a half beside that.
    leaver_rounds: after how many rounds one worker leaves; None = with all others.
    leaver: which one; None = the last.
    holds: whether results are read where servers keep them now and then.
    saves: how probable it is that a checkpoint follows a round.
    encodes: how probable it is that a run of float32 travels encoded, in an encoding that loses nothing of its numbers;
        unless it is 0, values of float32 come back as halves.
    tables: whether there are tables of rows, too.
    in_step: whether a worker finishes a round before it begins the next one, as a `Trainer` does.
    examples: how many examples the data has that workers lease; 0 for rounds without data.
    means: after which rounds workers average a number, in a store of its own.
    waits: whether all wait for lost workers, which go on where they were.
    second: whether there is a second model.
    quota: after how many examples of all workers a round is due; 0: at once.
    when: what else that number is of.
    barrier_s: for how long a worker waits at a barrier at most, before it calls it again; 0: for ever.
    """

    num_workers: int
    rounds: int
    mode: str = "sync"
    optimizer: str | None = None
    leaver_rounds: int | None = None
    leaver: int | None = None
    holds: bool = True
    saves: float = 0.0
    encodes: float = 0.0
    tables: bool = False
    in_step: bool = False
    examples: int = 0
    means: Sequence[int] = ()
    waits: bool = False
    quota: int = 0
    second: bool = False
    when: DueWhen = DueWhen.QUOTA
    barrier_s: float = 0.0

    def rounds_of(self, rank: int) -> int:
        """How many rounds a worker takes part in."""
        leaver = self.num_workers - 1 if self.leaver is None else self.leaver
        leaves_early = self.leaver_rounds is not None and rank == leaver
        return self.leaver_rounds if leaves_early and self.leaver_rounds is not None else self.rounds


class Oracle:
    """The contributions of a seed, and the value of every slice at every version, by what servers have counted."""

    def __init__(self, job: Job, generator: random.Random) -> None:
        self.job = job
        self.books = Books()
        self.made: dict[int, dict[Member, int]] = {}
        """Round → a worker → how many examples it has reported for it."""
        self.due: set[int] = set()
        """The rounds of which a worker knows that they are due."""
        self.dropped = 0
        """How many turns were too late."""
        self.lost: set[int] = set()
        """The ranks that have been struck."""
        self.went_back = False
        """Whether a worker has begun to load a checkpoint: from then on values are those of no round."""
        self.slices: dict[int | str, tuple[Slice, ...]] = {}
        """Key → its slices, once a worker knows them."""
        self.firsts: dict[int | str, Array] = {}
        self.given: dict[tuple[int, int, int | str], Array | None] = {}
        """(rank, round, key) → the gradient, or None for an empty contribution."""
        self.samples: dict[tuple[int, int], int] = {}
        """(rank, round) → of how many examples its gradients are the mean; 0 for nothing. Under a quota only."""
        self._states: dict[int, list[tuple[Array, Array]]] = {}
        """Slice → its value, and what the optimizer remembers of it, at each version."""
        self.saves = [generator.random() < job.saves for _ in range(job.rounds)]
        """Round → whether a checkpoint follows it."""
        self.together = [generator.random() < 0.8 for _ in range(job.rounds)]
        """Round → whether the workers push the small keys as one list."""
        # Halves hold integers up to 256, or 2048, exactly.
        by_rank, by_turn = (2, 8) if job.encodes else (10, 100)
        if job.quota and job.mode == "sync":
            places = [(rank, turn) for rank in self._ranks for turn in range(job.rounds)]
            self.samples = {(rank, turn): (3 * rank + 2 * turn + 1) % 7 for rank, turn in places}
        for number, key in enumerate(KEYS):
            self.firsts[key.name] = (np.arange(key.size) % 5 + number).astype(key.dtype.storage)
            for rank in range(job.num_workers):
                for turn in range(job.rounds_of(rank)):
                    grad = np.arange(key.size) % 7 + 1 + by_rank * rank + by_turn * turn
                    empty = generator.random() < (0.005 if key.name in TOGETHER else 0.1)
                    empty = empty or self.samples.get((rank, turn)) == 0
                    self.given[rank, turn, key.name] = None if empty else grad.astype(key.dtype.storage)
        turns = [job.rounds_of(rank) for rank in self._ranks]
        self.rows = RowOracle(turns, job.optimizer, generator, self.books) if job.tables else None

    def encore(self, key: Key, weight: Array, momentum: Array | None) -> Array:
        """The value after one more round of ones by all who are there at the end."""
        momentum = np.zeros(key.size) if momentum is None else momentum
        after = np.copy(weight)
        for piece in self.slices[key.name]:
            ones = sum(step == self.job.rounds for one in self.books.rounds[piece.number] for _, step in one)
            part = slice(piece.start, piece.stop)
            after[part] = self._updated(key, weight[part], momentum[part], np.full(piece.count, ones))[0]
        return after

    def require_saved(self, shelf: Shelf, folder: str, turn: int) -> None:
        """Whether a checkpoint that was called for after a round has what it must."""
        manifest = shelf.manifests[folder]
        tables = [] if self.rows is None else [table.name for table in TABLES]
        assert [one.key for one in manifest.keys] == [*[key.name for key in KEYS], *tables]
        if self.rows is not None and manifest.exact:
            self.rows.require_saved(shelf.slices(folder), turn + 1)
        assert manifest.exact == (self.job.mode == "sync")
        weights = shelf.gathered(folder, WEIGHTS)
        momenta = remembered_in(shelf, folder, self.job)
        for key in KEYS:
            found = weights[key.name]
            if manifest.exact:
                wanted, momentum = self.at(key, turn + 1)
                assert np.array_equal(found, wanted), f"{folder} has {found} of key {key.name!r}, not {wanted}"
                if momenta:
                    assert np.array_equal(momenta[key.name], momentum), f"{folder}: {key.name!r}"
            else:
                change = (found - self.firsts[key.name]) * self._sign
                stayed = [rank for rank in self._ranks if rank not in self.lost]
                least, most = self._pushed(key, turn + 1, stayed), self._pushed(key, self.job.rounds, self._ranks)
                assert (change >= least).all() and (change <= most).all(), f"{folder} of {key.name!r}: {change}"

    def final(self, key: Key) -> Array:
        """The value when all that stay have made their pushes, before any more."""
        return self.at(key, self.job.rounds if self.job.mode == "sync" else None)[0]

    def least_final(self, piece: Slice) -> int:
        """The first version of a slice that has all pushes of all that are not lost."""
        ranks = [rank for rank in self._ranks if rank not in self.lost]
        found = [self.books.version_with(piece.number, rank, self.job.rounds_of(rank)) for rank in ranks]
        versions = [version for version in found if version is not None]
        assert len(versions) == len(found), f"pushes to slice {piece.number} are not counted at the end"
        return max(versions, default=0)

    def at(self, key: Key, version: int | None) -> tuple[Array, Array]:
        """The value of a key, and what the optimizer remembers, at one version of all slices; None for the newest."""
        value, momentum = (np.zeros(key.size, key.dtype.storage) for _ in range(2))
        for piece in self.slices[key.name]:
            states = self.states(key, piece)
            value[piece.start : piece.stop], momentum[piece.start : piece.stop] = states[
                -1 if version is None else version
            ]
        return value, momentum

    def states(self, key: Key, piece: Slice) -> list[tuple[Array, Array]]:
        """The same of one slice, at each version that it has had so far."""
        part = slice(piece.start, piece.stop)
        first = self.firsts[key.name][part]
        states = self._states.setdefault(piece.number, [(first, np.zeros_like(first))])
        del states[self.books.undone.pop(piece.number, len(states)) + 1 :]
        for counted in self.books.rounds[piece.number][len(states) - 1 :]:
            if any(step >= self.job.rounds_of(member.node.rank) for member, step in counted):
                break  # the round after the store was loaded
            summed, before = self._sum_of(counted, key, part), states[-1]
            states.append(before if summed is None else self._updated(key, *before, summed))
        return states

    def _sum_of(self, counted: Counted, key: Key, part: slice) -> Array | None:
        """What a version is made of: a sum, or under a quota the mean over the examples in it. None for nothing."""
        pushes = [(member.node.rank, step) for member, step in counted]
        given = {(rank, step): self.given[rank, step, key.name] for rank, step in pushes}
        present = {push: grad[part] for push, grad in given.items() if grad is not None}
        if not present or not self.samples:
            return np.sum([*present.values()], axis=0) if present else None
        examples = sum(self.samples[push] for push in pushes)
        mean = np.empty(part.stop - part.start, key.dtype.storage)
        weights = [self.samples[push] / examples for push in present]
        REFERENCE.weighted_sum([*present.values()], weights, key.dtype, mean)  # as servers round
        return mean

    @property
    def _ranks(self) -> range:
        return range(self.job.num_workers)

    @property
    def _sign(self) -> int:
        return 1 if self.job.optimizer == "test" else -1

    def _pushed(self, key: Key, rounds: int, ranks: Iterable[int]) -> Array:
        """What these workers have pushed in the first rounds."""
        turns = [self.given.get((rank, turn, key.name)) for rank in ranks for turn in range(rounds)]
        return np.sum([np.zeros(key.size), *(grad for grad in turns if grad is not None)], axis=0)

    def _updated(self, key: Key, state: Array, momentum: Array, summed: Array) -> tuple[Array, Array]:
        summed = summed.astype(key.dtype.storage)
        if self.job.optimizer is None:
            return summed, momentum
        if self.job.optimizer == "momentum":
            momentum = momentum.astype(key.dtype.storage) / 2 - summed
            return state + momentum, momentum
        return state + self._sign * summed, momentum


def remembered_in(shelf: Shelf, folder: str, job: Job) -> Mapping[int | str, Array]:
    """The momentum of each key, in a checkpoint."""
    return shelf.gathered(folder, "momentum") if job.optimizer == "momentum" else {}


@dataclass
class Reading:
    """One read: where the values go, and the least each slice must have."""

    infos: Sequence[KeyInfo]
    results: list[Array]
    pushed: dict[int | str, int]
    seen: dict[int, int]


@dataclass(eq=False)
class User:
    """The thread of one worker's user, as far as the node can tell."""

    rank: int
    node: Node
    job: Job
    oracle: Oracle
    random: random.Random
    shelf: Shelf
    life: int = 0
    """How often a process of its rank was started before."""
    infos: dict[int | str, KeyInfo] = field(default_factory=dict)
    round: int = -1
    done: bool = False
    error: BaseException | None = None
    asked: list[Future[Any]] = field(default_factory=list)
    reads: int = 0
    saves: dict[int, Future[Any]] = field(default_factory=dict)
    """Round → the checkpoint that was called for after it."""
    since: int | None = None
    """The round in which it has joined the others, if it came later."""
    repeats: int = 0
    """Slices that had made a step without it which its earlier life had begun, and it makes again."""
    restored: bool | None = None
    """Whether the newest checkpoint could be loaded at the end; None if there was none."""
    late: int = 0
    """At how many barriers it has not met all others in time."""
    rollbacks: int = 0
    """How often it has heard that all went back to a snapshot."""
    _landed: list[Future[Any]] = field(default_factory=list)
    """Per checkpoint: done when it is there or has failed."""
    _waiting: Sequence[Future[Any]] = ()
    _program: Program | None = None
    _last_turn: list[Future[Any]] = field(default_factory=list)
    _pushed: dict[int | str, int] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _held: dict[int, tuple[Array, bytes]] = field(default_factory=dict)
    """Slice → the newest value that is read where it lies, and what it was when it came."""
    _leaving: bool = False
    _first: list[int] | None = None
    """The slices of its first push, until it knows which push that is."""
    _rows: RowUser | None = None
    """What it does with tables of rows."""
    _means: int = 0
    """How many it has taken part in."""
    _second: RunPlan | None = None
    """Of the second model, if there is one."""

    def advance(self) -> None:
        """Go on as far as the futures allow."""
        if self._program is None:
            self._program = self._work()
        self._check_held()
        self._note_since()
        while not self.done and all(future.done() for future in self._waiting):
            try:
                for future in self._waiting:
                    future.result()
                self._waiting = next(self._program)
            except StopIteration:
                self.done = True
            except BarrierTimeout as late:
                self._waiting = self._program.throw(late)
            except RolledBackError:
                accepted = self._ask(AcceptRollback)
                self._waiting, self._program = [accepted], self._begin_anew(accepted)
            except KvdistError as error:
                self.error = error
                self.done = True
                self._let_go()
                if not self.node.stopped:
                    self._ask(lambda number: Leave(number, "its user met an error"))

    @property
    def has_left(self) -> bool:
        """Whether it has said goodbye, or is about to."""
        return self.done or self._leaving

    def _begin_anew(self, accepted: Future[Any]) -> Program:
        """A server was lost, and all have gone back to a step."""
        error = accepted.result()
        assert error is not None, f"worker {self.rank} hears that all went back, and is not told so"
        step = error.step
        self.rollbacks += 1
        self.round = step
        self._pushed = dict.fromkeys(self._pushed, step)
        self._seen.clear()
        self._last_turn = []
        self._landed = []
        self._first = None
        if self._rows is not None:
            self._rows._seen.clear()
            self._rows.begin_at(step)
        yield from self._go_on(step)

    def _ask(self, make: Any, finish: Any = None) -> Future[Any]:
        future = self.node.submit(make, finish)
        self.asked.append(future)
        return future

    def _work(self) -> Program:
        yield from self._begin()
        if self.life:
            yield from self._come_back() if self.job.waits else self._join()
        begun = 0 if self.since is None else self.since
        if begun > self.job.rounds:  # the others are at their ends
            yield [self._ask(Leave)]
            return
        if self.job.second:
            yield from self._begin_second()
        yield from self._go_on(begun)

    def _go_on(self, begun: int) -> Program:
        for turn in range(begun, self.job.rounds_of(self.rank)):
            self.round = turn
            if turn != self.since or self.rollbacks or self.job.waits:  # else it has pushed before its first turn
                if self.job.quota:
                    yield from self._ask_for(turn) if self.job.mode == "async" else self._make_progress(turn)
                yield from self._take_turn(turn)
            yield from self._end_turn(turn)
        if begun == self.job.rounds:
            yield [self._ask(lambda number: EnterBarrier(number, STORE))]
            yield [self._ask(Leave)]
            return
        if self.job.rounds_of(self.rank) == self.job.rounds:
            yield from self._check_the_end()
            yield from self._go_back()
        elif self.random.random() < 0.5:
            yield self._landed
        self._let_go()
        yield [self._ask(Leave)]

    def _begin(self) -> Program:
        yield [self._ask(Register)]
        declared = self._ask(
            lambda number: DeclareKeys(
                number,
                STORE,
                self.job.mode,
                tuple(key.name for key in KEYS),
                tuple((key.size,) for key in KEYS),
                tuple(key.dtype for key in KEYS),
                tuple(DType.FLOAT16 if self._is_narrow(key.dtype) else key.dtype for key in KEYS),
            )
        )
        yield [declared]
        self.infos = {info.key: info for info in declared.result()}
        self.oracle.slices = {info.key: info.slices for info in declared.result()}
        if self.job.optimizer is not None:
            name, more = ("sgd", {"momentum": 0.5}) if self.job.optimizer == "momentum" else (self.job.optimizer, {})
            description = create(name, learning_rate=1.0, **more).describe()
            yield [self._ask(lambda number: Configure(number, STORE, description))]
        if self.oracle.rows is not None:
            self._rows = RowUser(self.rank, self.job.mode, self.oracle.rows, self.random, self._ask, GARBAGE)
            yield [self._rows.declare(STORE)]
        if self.rank == 0:
            yield [self._initialise(), *(() if self._rows is None else self._rows.initialise())]

    def _look_on(self) -> Program:
        """As a script that starts anew: what it does at the start changes nothing."""
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        garbage = {key.name: np.full(key.size, 13, key.dtype.storage) for key in KEYS}
        yield [self._transfer(RunKind.REPLACE, garbage)]
        if self.shelf.called_for():
            folder = min(self.shelf.called_for())
            yield [self._ask(lambda number: LoadStore(number, STORE, folder, EVERYTHING))]
        is_checked = not self.oracle.went_back
        yield [self._read(self._some_keys(), is_checked)[1]]

    def _come_back(self) -> Program:
        """All have waited for this worker: it finds the weights with which its earlier life has begun the step."""
        yield from self._look_on()
        joined = self._ask(lambda number: TakePart(number, STORE))
        yield [joined]
        since = self.since = joined.result()
        slices, self._pushed = self._machine.transfers.slices, {key.name: since for key in KEYS}
        pieces = [piece for info in self.infos.values() for piece in info.slices]
        assert {int(slices.pushed[piece.number]) for piece in pieces} == {since}, "it is at one step in all slices"
        self._seen = {piece.number: since for piece in pieces}
        if since <= self.job.rounds and not self.oracle.went_back:
            made = {piece.number: len(self.oracle.books.rounds[piece.number]) for piece in pieces}
            self.repeats += sum(one > since for one in made.values())
            yield from self._require({key.name: self.oracle.at(key, since)[0] for key in KEYS}, "it goes on elsewhere")
        if self._rows is not None:
            self._rows.begin_at(since)
            if since <= self.job.rounds:
                reads = self._rows.check_the_end()
                yield [future for _, _, future in reads]
                self._rows.require_at(reads, since)

    def _join(self) -> Program:
        """As a script that does not ask where the others are: it pushes ones."""
        yield from self._look_on()
        if self.job.quota and self.job.mode != "async":  # or it would push whenever it likes
            joined = self._ask(lambda number: TakePart(number, STORE))
            yield [joined]
            yield from self._make_progress(joined.result())
        elif self.random.random() < 0.5:
            yield from self._take_part()
        ones = {key.name: np.ones(key.size, key.dtype.storage) for key in KEYS}
        pushed = self._transfer(RunKind.PUSH, ones, self._samples_at_first)
        assert self._machine._newcomer is not None, "it has come late"
        # The oracle has to know what it gives before servers have it, so as soon as the worker itself knows its place.
        self._first = [piece.number for info in self.infos.values() for piece in info.slices]
        yield [pushed]
        self._note_since()
        if self._rows is not None:
            assert self.since is not None
            tables = [table.name for table in TABLES]
            self._rows.begin_at(self.since)
            if self.since < self.job.rounds:
                yield [one for table in tables for one in self._rows.contribute(self.since, table)]

    def _take_part(self) -> Program:
        """Learn at which version it joins, before the first gradient; until that, it still looks on."""
        joined = self._ask(lambda number: TakePart(number, STORE))
        yield [joined]
        if self.job.mode == "sync":
            slices = self._machine.transfers.slices
            counters = {int(slices.pushed[piece.number]) for info in self.infos.values() for piece in info.slices}
            # Without the first workers, which are lost or have ended, versions may be made of nothing.
            is_alone = len(self.oracle.lost) == self.job.num_workers or max(counters) > self.job.rounds
            assert is_alone or self.oracle.went_back or counters == {joined.result()}, (
                "the weights have had as many updates as there were rounds"
            )
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]

    @property
    def _machine(self) -> Worker:
        machine = self.node.machine
        assert isinstance(machine, Worker)
        return machine

    def _note_since(self) -> None:
        newcomer = None if self._first is None else self._machine._newcomer
        if self._first is None or newcomer is None or not newcomer.is_member:
            return
        slices, numbers = self._machine.transfers.slices, self._first
        counters = {int(slices.pushed[number]) for number in numbers}
        assert len(counters) == 1, f"worker {self.rank} has joined at {sorted(counters)}"
        self._first = None
        since = self.since = counters.pop() - 1
        if self._samples_at_first:
            self.oracle.samples[self.rank, since] = self._samples_at_first
        for key in KEYS:
            self.oracle.given[self.rank, since, key.name] = np.ones(key.size, key.dtype.storage)
            self._pushed[key.name] = since + 1

    @property
    def _samples_at_first(self) -> int:
        """Of how many examples the first push of a newcomer is; 0 where that is not said."""
        return 3 + self.rank if self.oracle.samples else 0

    def _transfer(self, kind: RunKind, given: dict[int | str, Array], samples: int = 0) -> Future[Any]:
        plan = make_plan(list(self.infos.values()), 64)
        runs = [Run(run, memoryview(_payload(run, plan.keys, given)), settings=SERVER_DECIDES) for run in plan.runs]
        flag = int(Flag.WEIGHTED if samples else 0)
        runs = [replace(run, flags=np.full(len(run.plan.ids), flag, np.uint8), samples=samples) for run in runs]
        return self._ask(lambda number: Transfer(number, kind, kind.value, runs))

    def _end_turn(self, turn: int) -> Program:
        if self.job.in_step:
            yield self._last_turn
        if self.job.leaver_rounds is None and turn % 2 == 1:
            # Without rounds no place says which barrier is a newcomer's first.
            yield from self._meet(f"turn {turn}" if self.job.mode == "sync" else "")
        if turn in self.job.means:
            yield from self._average(turn)
        if not self.job.in_step and self.random.random() < 0.5:
            yield self._last_turn
        if self.oracle.saves[turn]:
            yield from self._save(turn)

    def _meet(self, statement: str) -> Program:
        """Arrive at a barrier, again and again as long as it is late."""
        while True:
            timeout_s = self.random.uniform(0, self.job.barrier_s) if self.job.barrier_s else None
            try:
                yield [self._ask(lambda number, limit=timeout_s: EnterBarrier(number, STORE, limit, statement))]
                return
            except BarrierTimeout:
                self.late += 1
            if self.random.random() < 0.5:
                yield [self._read(["bias"], is_checked=False)[1]]

    def _average(self, turn: int) -> Program:
        """As `KVStore.average` does; a sum shows how many are in it, and that they gave it for the same turn."""
        yield [self._ask(lambda number: EnterBarrier(number, MEANS, statement=f"average of turn {turn}"))]
        shape, kind = (((1,),), (DType.FLOAT64,))
        declared = self._ask(lambda number: DeclareKeys(number, MEANS, "sync", ("mean",), shape, kind, kind))
        yield [declared]
        plan = make_plan(declared.result(), 64)

        def runs(value: float, sinks: Sequence[Array] = ()) -> list[Run]:
            data = np.full(1, value).tobytes()
            return [Run(run, memoryview(data), sinks, np.zeros(1, np.uint8), SERVER_DECIDES) for run in plan.runs]

        if declared.result()[0].giver == self.rank and self._means == 0:
            yield [self._ask(lambda number: Transfer(number, RunKind.INITIALISE, "init", runs(0.0)))]
        self._means += 1
        found, mine = np.zeros(1), 1000.0 + turn
        yield [self._ask(lambda number: Transfer(number, RunKind.PUSHPULL, "average", runs(mine, [found])))]
        assert found[0] % mine == 0 < found[0], f"worker {self.rank} averages {found} in turn {turn}"

    def _begin_second(self) -> Program:
        """Some time after the first model, and before the first step."""
        if not self.life:
            yield [self._ask(lambda number: EnterBarrier(number, STORE))]
            for _ in range(self.random.randint(0, 20)):
                yield [self._read(["bias"], is_checked=False)[1]]
        shape, kind = (((2,),), (DType.FLOAT64,))
        description = create("test", learning_rate=1.0).describe()
        optimizer_first = self.random.random() < 0.5
        if optimizer_first:
            yield [self._ask(lambda number: Configure(number, SECOND, description))]
        declared = self._ask(lambda number: DeclareKeys(number, SECOND, "sync", ("second",), shape, kind, kind))
        yield [declared]
        if not optimizer_first:
            yield [self._ask(lambda number: Configure(number, SECOND, description))]
        self._second = make_plan(declared.result(), 64)
        if declared.result()[0].giver == self.rank:
            yield [self._transfer_second(RunKind.INITIALISE, 0.0)]

    def _transfer_second(self, kind: RunKind, value: float, sinks: Sequence[Array] = ()) -> Future[Any]:
        assert self._second is not None
        data = np.full(2, value).tobytes()
        runs = [Run(run, memoryview(data), sinks, np.zeros(1, np.uint8), SERVER_DECIDES) for run in self._second.runs]
        return self._ask(lambda number: Transfer(number, kind, kind.value, runs))

    def _require_second(self) -> Program:
        """Each step of each worker counts once."""
        found = np.zeros(2)
        yield [self._transfer_second(RunKind.PULL, 0.0, [found])]
        ranks = range(self.job.num_workers)
        made = sum((10.0 + rank) * (turn + 1) for rank in ranks for turn in range(self.job.rounds))
        assert (found == made).all(), f"worker {self.rank}: the second model ended as {found}, not as {made}"

    def _is_narrow(self, dtype: DType) -> bool:
        return bool(self.job.encodes) and dtype is DType.FLOAT32

    def _initialise(self) -> Future[Any]:
        plan = make_plan(list(self.infos.values()), 64)
        runs = [Run(run, memoryview(_payload(run, plan.keys, self.oracle.firsts))) for run in plan.runs]
        return self._ask(lambda number: Transfer(number, RunKind.INITIALISE, "init", runs))

    def _make_progress(self, turn: int) -> Program:
        """As a trainer under a quota: make examples until the round is due, or wait for all others to come here."""
        made, piece = 0, self.infos["weight"].slices[0]
        together = turn % 3 == 2
        while True:
            made += self.random.randint(0, 4) if self.job.when == DueWhen.QUOTA else self._makes_it(made)
            mine = self.oracle.made.setdefault(turn, {})
            mine[self._machine.me] = max(mine.get(self._machine.me, 0), made)
            progress = Progress(piece.number, 0, made, self.job.when, self.job.quota, False, together)
            report = self._ask(partial(ReportProgress, server=piece.server, progress=progress))
            yield [report] if together else [self._read(["bias"], is_checked=False)[1]]
            due = report.result() if report.done() else None
            if due is not None:
                break
        enough = sum(mine.values()) >= self._enough()
        is_later = self.job.when != DueWhen.QUOTA and due.step > turn  # it need have nothing, and hears of both at once
        assert due.step == turn or is_later, f"worker {self.rank} makes round {turn}, and hears that {due.step} is due"
        is_known = is_later or turn in self.oracle.due
        assert due.together or enough or is_known, f"round {turn} is due after {mine}"
        self.oracle.due.add(turn)

    def _makes_it(self, made: int) -> bool:
        """Whether a worker has something now, and had nothing: some need long, and others report again meanwhile."""
        return not made and self.random.random() < 0.2

    def _enough(self) -> int:
        """How much must have been made for a round to be due, at least. Who is struck may still be awaited."""
        there = self.job.num_workers - len(self.oracle.lost)
        if self.job.when == DueWhen.QUOTA:
            return self.job.quota
        return max(1, min(self.job.quota, there))

    def _ask_for(self, turn: int) -> Program:
        """As a trainer whose pushes are versions: ask before each, and push nothing if it would be too late."""
        piece = self.infos["weight"].slices[0]
        progress = Progress(piece.number, 0, 1, self.job.when, self.job.quota, False, False)
        report = self._ask(partial(ReportProgress, server=piece.server, progress=progress))
        yield [report]
        due = report.result()
        if due.delay > self.job.quota:
            self.oracle.dropped += 1
            for key in KEYS:
                self.oracle.given[self.rank, turn, key.name] = None

    def _take_turn(self, turn: int) -> Program:
        names = [key.name for key in KEYS]
        self.random.shuffle(names)
        lists: list[list[int | str]] = []
        if self.oracle.together[turn] and self.random.random() < 0.95:
            names = [name for name in names if name not in TOGETHER]
            lists.append(list(TOGETHER))
        while names:
            count = self.random.randint(1, len(names))
            lists.append(names[:count])
            names = names[count:]
        self.random.shuffle(lists)
        outstanding: list[Future[Any]] = []
        tables = [] if self._rows is None else self.random.sample([table.name for table in TABLES], len(TABLES))
        for group in lists:
            if self._rows is not None and tables and self.random.random() < 0.5:
                outstanding += self._rows.contribute(turn, tables.pop())
            outstanding.append(self._contribute(turn, group, pull=self.random.random() < 0.5))
            if self.random.random() < 0.4:
                outstanding.append(self._pull(self._some_keys()))
            if self.random.random() < 0.2:
                reads = self._pull_key_by_key(list(TOGETHER))
                outstanding += reads.values()
                # What needs only pushes of earlier turns comes, whatever stands beside it in the message.
                yield [future for name, future in reads.items() if self._pushed.get(name, 0) <= turn]
            if self._last_turn and self.random.random() < 0.3:
                # Within a turn one may only wait for turns before it: others may wait for what is still to come.
                yield self._last_turn
        if self._rows is not None:
            for name in tables:
                outstanding += self._rows.contribute(turn, name)
        if self._second is not None:
            outstanding.append(self._transfer_second(RunKind.PUSH, (10.0 + self.rank) * (turn + 1)))
        self._last_turn = outstanding

    def _some_keys(self) -> list[int | str]:
        if self.random.random() < 0.7:
            return list(TOGETHER)
        return self.random.sample(list(self.infos), self.random.randint(1, len(KEYS)))

    def _check_the_end(self) -> Program:
        if self._second is not None:
            yield from self._require_second()
        last_alone = self.job.mode == "sync"
        if not last_alone:
            yield [future for future in self.asked if future not in self.saves.values()]
            yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        reading, future = self._read(list(self.infos))
        yield [future]
        for info, result in zip(reading.infos, reading.results, strict=True):
            key = next(key for key in KEYS if key.name == info.key)
            for piece in info.slices:
                states = [value for value, _ in self.oracle.states(key, piece)][self.oracle.least_final(piece) :]
                found = result[piece.start : piece.stop]
                assert any(np.array_equal(found, state) for state in states), (
                    f"worker {self.rank}: key {info.key!r} ended as {found}, not as one of {states}"
                )
        if self._rows is not None:
            reads = self._rows.check_the_end()
            yield [future for _, _, future in reads]
            self._rows.require_final(reads)
            self.reads += self._rows.reads

    def _go_back(self) -> Program:
        """To the newest checkpoint, if there is one; and one round more from there."""
        yield self._landed
        if not self.shelf.called_for():
            return
        folder = max(self.shelf.called_for())
        self.oracle.went_back = True
        loading = self._ask(lambda number: LoadStore(number, STORE, folder, EVERYTHING))
        yield [_landing(loading)]
        self.restored = loading.exception() is None
        assert self.restored or FULL in str(loading.exception()), f"{folder} was not loaded: {loading.exception()}"
        if not self.restored:
            values = {key.name: self.oracle.final(key) for key in KEYS}
            yield from self._require(values, "a checkpoint that could not be loaded has changed something")
            return
        weights = self.shelf.gathered(folder, WEIGHTS)
        yield from self._require(weights, "what was saved is not what was loaded")
        if self._rows is not None and self.job.mode == "sync":  # else a checkpoint has later pushes of others, too
            reads = self._rows.check_the_end()
            yield [future for _, _, future in reads]
            self._rows.require_at(reads, int(folder[-3:]) + 1)
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        yield [self._transfer(RunKind.PUSH, {key.name: np.ones(key.size, key.dtype.storage) for key in KEYS})]
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        momenta = remembered_in(self.shelf, folder, self.job)
        after = {key.name: self.oracle.encore(key, weights[key.name], momenta.get(key.name)) for key in KEYS}
        yield from self._require(after, "a round after loading came to something else")

    def _require(self, values: Mapping[int | str, Array], complaint: str) -> Program:
        """All present values are these."""
        reading, future = self._read(list(self.infos), is_checked=False)
        yield [future]
        for info, result in zip(reading.infos, reading.results, strict=True):
            wanted = values[info.key]
            assert np.array_equal(result, wanted), f"{complaint}: key {info.key!r} is {result}, not {wanted}"

    # Calls.

    def _save(self, turn: int) -> Program:
        """Save what there is after a round; sometimes wait for it, or for an earlier one."""
        place = (STORE, f"/checkpoints/step-{turn:03}", EVERYTHING, "0123456789abcdef", turn, 0, SavedFile("", 0, ""))
        if self.life and not self.saves:
            claim = self._ask(lambda number: ClaimFolder(number, *place[:3]))
            yield [_landing(claim)]
        keys = (*self.infos.values(), *(() if self._rows is None else self._rows.infos.values()))
        future = self._ask(lambda number: SaveStore(number, *place, keys))
        self.saves[turn] = future
        self._landed.append(_landing(future))
        if self.random.random() < 0.5:
            yield self._landed[: self.random.randint(1, len(self._landed))]

    def _contribute(self, turn: int, names: list[int | str], pull: bool) -> Future[Any]:
        infos = [self.infos[name] for name in names]
        grads = {name: self.oracle.given[self.rank, turn, name] for name in names}
        plan = make_plan(infos, 64)
        for name in grads:
            self._pushed[name] = self._pushed.get(name, 0) + 1
        reading = self._reading(infos)
        codecs = [self._codec(run) for run in plan.runs]
        payloads, encoded = zip(
            *(_encoded(run, plan.keys, grads, codec) for run, codec in zip(plan.runs, codecs, strict=True)), strict=True
        )
        holds = pull and self.job.holds and self.random.random() < (0.05 if names == list(TOGETHER) else 0.5)
        stays = self.random.random() < 0.5
        samples = self.oracle.samples.get((self.rank, turn), 0)
        flag = int(Flag.HOLD if holds else 0) | int(Flag.WEIGHTED if samples else 0)
        runs = [
            Run(
                run,
                memoryview(payload),
                _sinks(run, reading.results) if pull else (),
                np.array([flag | (Flag.EMPTY if grads[plan.keys[i].key] is None else 0) for i in run.key_of], np.uint8),
                SERVER_DECIDES,
                kept=Kept(run, _sinks(run, reading.results), self._hold) if holds else None,
                stays=stays,
                samples=samples,
                encoded=how,
            )
            for run, payload, how in zip(plan.runs, payloads, encoded, strict=True)
        ]

        def finish() -> None:
            for payload in payloads:
                payload[:] = bytes([GARBAGE]) * len(payload)
            if pull:
                self._check(reading)

        kind = RunKind.PUSHPULL if pull else RunKind.PUSH
        priority = self.random.randint(-2, 2)
        return self._ask(lambda number: Transfer(number, kind, kind.value, runs, priority), finish)

    def _codec(self, run: RunPlan) -> Codec | None:
        """How a run is encoded now; None for not at all."""
        if not self.job.encodes or self.random.random() >= self.job.encodes or (run.dtypes != DType.FLOAT32).any():
            return None
        return self.random.choice(LOSSLESS)

    def _pull(self, names: list[int | str]) -> Future[Any]:
        return self._read(names)[1]

    def _pull_key_by_key(self, names: list[int | str]) -> dict[int | str, Future[Any]]:
        infos = [self.infos[name] for name in names]
        reading = self._reading(infos)
        runs = [Run(run, sinks=_sinks(run, reading.results)) for run in make_plan(infos, 64).runs]
        futures: list[Future[Any]] = [Future() for _ in infos]
        self.asked += futures
        answer = KeyByKey(reading, futures, self._check)
        self.node.submit_for(
            answer, lambda number: Transfer(number, RunKind.PULL, "pull of each", runs, key_by_key=True)
        )
        return dict(zip(names, futures, strict=True))

    def _read(self, names: list[int | str], is_checked: bool = True) -> tuple[Reading, Future[Any]]:
        infos = [self.infos[name] for name in names]
        reading = self._reading(infos)
        runs = [Run(run, sinks=_sinks(run, reading.results)) for run in make_plan(infos, 64).runs]
        priority = self.random.randint(-2, 2)
        future = self._ask(
            lambda number: Transfer(number, RunKind.PULL, "pull", runs, priority),
            lambda: self._check(reading) if is_checked else None,
        )
        return reading, future

    def _reading(self, infos: Sequence[KeyInfo]) -> Reading:
        results: list[Array] = [np.full(info.size, -1, info.dtype.storage) for info in infos]
        pushed = {info.key: self._pushed.get(info.key, 0) for info in infos}
        return Reading(infos, results, pushed, dict(self._seen))

    def _hold(self, number: int, array: Array) -> None:
        """A value has come that is read where it lies; its predecessor was there until now."""
        self._check_held()
        if self._leaving:
            return
        self._held[number] = (array, array.tobytes())

    def _let_go(self) -> None:
        """Who leaves reads nothing any more."""
        self._leaving = True
        self._held.clear()

    def _check_held(self) -> None:
        for number, (array, content) in self._held.items():
            assert array.tobytes() == content, f"worker {self.rank}: slice {number} was written while it was held"

    def _check(self, reading: Reading) -> None:
        self.reads += 1
        for info, result in zip(reading.infos, reading.results, strict=True):
            key = next(key for key in KEYS if key.name == info.key)
            for piece in info.slices:
                self._check_slice(reading, key, piece, result[piece.start : piece.stop])

    def _check_slice(self, reading: Reading, key: Key, piece: Slice, found: Array) -> None:
        """It is what the servers had at some version, which has all pushes of this worker so far."""
        states = [value for value, _ in self.oracle.states(key, piece)]
        number = piece.number
        least = max(self._version_with_own(number, reading.pushed[key.name]), reading.seen.get(number, 0))
        for version in range(least, len(states)):
            if np.array_equal(states[version], found):
                self._seen[number] = max(self._seen.get(number, 0), version)
                break
        else:
            raise AssertionError(
                f"worker {self.rank} read {found} of key {key.name!r}, no version from {least} on of"
                f" {[state.tolist() for state in states]}"
            )

    def _version_with_own(self, number: int, pushes: int) -> int:
        version = self.oracle.books.version_with(number, self.rank, pushes)
        assert version is not None, f"worker {self.rank} reads slice {number} before its push {pushes - 1} is counted"
        return version


@dataclass(frozen=True)
class KeyByKey(AnswerByKey):
    """Takes the answers of a read key by key."""

    reading: Reading
    futures: list[Future[Any]]
    check: Callable[[Reading], None]

    def set_keys(self, keys: Sequence[int], error: Exception | None) -> None:
        for index in keys:
            assert not self.futures[index].done(), "a key is answered once"
            if error is not None:
                self.futures[index].set_exception(error)
                continue
            read = self.reading
            self.check(replace(read, infos=[read.infos[index]], results=[read.results[index]]))
            self.futures[index].set_result(None)

    def set_result(self, result: Any) -> None:
        assert all(future.done() for future in self.futures), "all keys are answered before the whole is"

    def set_exception(self, exception: BaseException) -> None:
        for future in self.futures:
            if not future.done():
                future.set_exception(exception)


class Kept(dict[int, Array]):
    """The values of a run that are read where they lie. They are compared as soon as they come."""

    def __init__(self, run: RunPlan, sinks: Sequence[Array], hold: Callable[[int, Array], None]) -> None:
        super().__init__()
        self._run, self._sinks, self._hold = run, sinks, hold

    def update(self, values: Any) -> None:  # type: ignore[override]  # as the worker calls it
        """Values have come: (place in the run, array)."""
        for position, array in values:
            self._sinks[position][...] = array
            self._hold(int(self._run.ids[position]), array)


def _landing(future: Future[Any]) -> Future[Any]:
    """Done when the checkpoint is there, and when it could not be made or loaded."""
    landed: Future[Any] = Future()

    def end(_: Future[Any]) -> None:
        error = future.exception()
        if error is None or isinstance(error, CheckpointError):
            landed.set_result(None)
        else:
            landed.set_exception(error)

    future.add_done_callback(end)
    return landed


def _payload(run: RunPlan, keys: Sequence[KeyInfo], values: dict[int | str, Any]) -> bytearray:
    """The bytes of one run; a key without a value takes none."""
    payload = bytearray()
    for piece in run.pieces:
        value = values[keys[piece.index].key]
        if value is not None:
            part = value[piece.start : piece.stop].tobytes()
            payload += part + b"\0" * (-len(part) % 8)
    return payload


def _encoded(
    run: RunPlan, keys: Sequence[KeyInfo], values: dict[int | str, Any], codec: Codec | None
) -> tuple[bytearray, Encoded | None]:
    """The bytes of one run, and how they are encoded."""
    if codec is None:
        return _payload(run, keys, values), None
    payload, entries = bytearray(), []
    for piece in run.pieces:
        value = values[keys[piece.index].key]
        if value is None:
            entries.append(0)
            continue
        part = value[piece.start : piece.stop]
        residual = np.zeros_like(part)
        data, own = encode(codec, part, residual, REFERENCE)
        assert not residual.any(), "nothing of an integer is lost"
        payload += data.tobytes()
        entries.append(own)
    return payload, Encoded(codec.encoding, codec.parameter, np.array(entries, np.uint32))


def _sinks(run: RunPlan, results: Sequence[Array]) -> list[Array]:
    return [results[piece.index][piece.start : piece.stop] for piece in run.pieces]
