"""The user of a simulated worker that trains on leased examples, and what must hold of them at the end."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from kvdist.checkpoint.snapshot import EVERYTHING, WEIGHTS, Manifest
from kvdist.core.sharding import Slice
from kvdist.core.worker.requests import (
    EnterBarrier,
    Leave,
    LoadStore,
    ReportProgress,
    Run,
    RunKind,
    TakePart,
    Transfer,
    make_plan,
)
from kvdist.protocol.messages import DueWhen, Lease, Leased, Progress, Used
from tests.core.ledger import Books
from tests.core.shelf import FULL
from tests.core.workload import KEYS, SERVER_DECIDES, STORE, Program, User, _landing, _payload, _sinks

EPOCHS = 2
BATCH = 3
LAST = 999
"""The step of a checkpoint of all that was made."""

Place = tuple[int, int]
"""(epoch, place in its order)."""


@dataclass(eq=False)
class LeasingUser(User):
    """Pushes ones for each batch, every slice in every step, and leaves when all examples are used."""

    trained: dict[int, list[Place]] = field(default_factory=dict)
    """How many pushes its slices had counted of it before → the places that a push sums."""
    _pushes: int = 0
    _batch: list[Place] = field(default_factory=list)
    _places: deque[Place] = field(default_factory=deque)
    _used: int = 0
    _version: int = 0

    def _work(self) -> Program:
        yield from self._begin()
        if self.life:
            yield from self._look_on()
        yield from self._go_on(0)

    def _look_on(self) -> Program:
        """As a script that starts anew, and may ask where the others are before it asks for data."""
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        if self.random.random() < 0.5:
            joined = self._ask(lambda number: TakePart(number, STORE))
            yield [joined]
            self.since = self._pushes = self._version = joined.result()

    def _note_since(self) -> None:
        is_open = self._first is not None
        super()._note_since()
        if is_open and self._first is None:
            assert self.since is not None
            self.trained[self.since] = self._batch
            self._pushes = self._version = self.since

    def _begin_anew(self, accepted: Future[Any]) -> Program:
        """A server was lost, and all have gone back to a step: what was leased is void."""
        error = accepted.result()
        assert error is not None, f"worker {self.rank} hears that all went back, and is not told so"
        self.rollbacks += 1
        self._places.clear()
        self._used, self._landed, self._first = 0, [], None
        self._pushes = self._version = error.step
        self.since = self.since if self.since is not None or not self.life else error.step
        yield from self._go_on(error.step)

    def _go_on(self, begun: int) -> Program:
        while (yield from self._get_more()):
            step = self.round = self._pushes
            if step == self.job.leaver_rounds and self.rank == self.job.leaver:
                yield from self._go()
                return
            self._batch = [self._places.popleft() for _ in range(min(BATCH, len(self._places)))]
            if not self.life or self.since is not None:
                self.trained[step] = self._batch
            pushed = self._push(len(self._batch))
            if self.life and self.since is None:  # it says when it has joined which push that is
                self._first = [piece.number for info in self.infos.values() for piece in info.slices]
            yield [pushed]
            self._pushes += 1
            self._used += len(self._batch)
            self._version += 1
            if self._version % 5 == 0:
                yield from self._meet(f"version {self._version}" if self.job.mode == "sync" else "")
            if self._version % 3 == 0 and self.job.saves:
                yield [self._ask(lambda number: Used(number, self._used, False))]
                yield from self._save(self._version)
        yield self._landed
        yield from self._meet("the end")
        if self.job.saves:
            yield [self._ask(lambda number: Used(number, self._used, False))]
            yield from self._save(LAST)
            yield self._landed
        yield from self._meet("the very end")
        yield from self._require(self._final(), "something is missing at the end")
        self.reads += 1
        self._let_go()
        yield [self._ask(Leave)]

    def _go(self) -> Program:
        """As a spot machine has to, with examples that it has not used."""
        yield self._landed
        yield [self._ask(lambda number: Used(number, self._used, bool(self._places)))]
        self._let_go()
        yield [self._ask(Leave)]

    def _get_more(self) -> Any:
        """Have a place at least; returns False at the end."""
        if self._places and self.random.random() < 0.6:
            return True
        leased = yield from self._lease(rests=False)
        while not self._places and not leased.is_over:
            leased = yield from self._lease(rests=True)
        return bool(self._places)

    def _lease(self, *, rests: bool) -> Any:
        asked: Future[Leased] = self._ask(
            lambda number: Lease(
                number, STORE, 0, self.job.examples, EPOCHS, True, 7, BATCH, 12, self._used, self._version, rests
            )
        )
        yield [asked]
        leased = asked.result()
        self._version = max(self._version, leased.version)
        self._places.extend((leased.epoch, place) for place in range(leased.start, leased.stop))
        return leased

    def _push(self, samples: int) -> Future[Any]:
        infos = list(self.infos.values())
        plan = make_plan(infos, 64)
        ones = {key.name: np.ones(key.size, key.dtype.storage) for key in KEYS}
        reading = self._reading(infos)
        runs = [
            Run(run, memoryview(_payload(run, plan.keys, ones)), _sinks(run, reading.results), settings=SERVER_DECIDES)
            for run in plan.runs
        ]
        runs = [replace(run, flags=np.zeros(len(run.plan.ids), np.uint8), samples=samples) for run in runs]
        return self._ask(lambda number: Transfer(number, RunKind.PUSHPULL, "step", runs))

    def _final(self) -> dict[int | str, Any]:
        """First values, and a one for each push that is counted."""
        values = {}
        for key in KEYS:
            value = np.copy(self.oracle.firsts[key.name])
            for piece in self.oracle.slices[key.name]:
                value[piece.start : piece.stop] += sum(map(len, self.oracle.books.rounds[piece.number]))
            values[key.name] = value
        return values


@dataclass(eq=False)
class QuotaLeasingUser(LeasingUser):
    """Makes batches of leased examples at its own pace and pushes when a server says that it is time, as `QuotaSteps`.

    It rests when there is nothing to lease. After the last example all make exchanges and checkpoints of them, average
    a number, and load the last checkpoint.
    """

    _made: list[Place] = field(default_factory=list)
    """What it has made since its last push."""
    _pushed_last: list[Future[Any]] = field(default_factory=list)
    """That push; it may be under way while the next examples are made, and not while this worker rests."""

    def _look_on(self) -> Program:
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]

    def _go_on(self, begun: int) -> Program:
        while (yield from self._get_more()):
            yield from self._take_part()
            self.round = self._pushes
            self._made += [self._places.popleft() for _ in range(min(BATCH, len(self._places)))]
            report = self._report()
            yield [self._read(["bias"], is_checked=False)[1]]
            if report.done() and report.result() is not None:
                yield from self._push_what_it_has(waits=self.job.in_step)
        for _ in range(2):
            yield from self._exchange(together=True)
            if self.job.saves:
                yield [self._ask(lambda number: Used(number, self._used, False))]
                yield from self._save(self._machine.transfers.slices.rounds_of(self._piece.number))
        yield self._landed
        yield from self._average(0)
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        yield from self._require(self._final(), "something is missing at the end")
        self.reads += 1
        yield [self._ask(lambda number: EnterBarrier(number, STORE))]
        if self.shelf.called_for():
            yield from self._load(max(self.shelf.called_for()))
        self._let_go()
        yield [self._ask(Leave)]

    def _load(self, folder: str) -> Program:
        self.oracle.went_back = True
        loading = self._ask(lambda number: LoadStore(number, STORE, folder, EVERYTHING))
        yield [_landing(loading)]
        assert loading.exception() is None or FULL in str(loading.exception()), loading.exception()
        if loading.exception() is None:
            yield from self._require(self.shelf.gathered(folder, WEIGHTS), "what was saved is not what was loaded")

    def _take_part(self) -> Program:
        if self.life and self.since is None:
            joined = self._ask(lambda number: TakePart(number, STORE))
            yield [joined]
            self.since = self._pushes = self._machine.transfers.slices.rounds_of(self._piece.number)
            self._version = max(self._version, joined.result())

    def _get_more(self) -> Any:
        if self._places and self.random.random() < 0.6:
            return True
        leased = yield from self._lease(rests=False)
        while not self._places:
            yield from self._exchange(together=False)
            if leased.is_over:
                return False
            leased = yield from self._lease(rests=True)
            yield [self._read(list(self.infos), is_checked=False)[1]]
        return True

    def _exchange(self, together: bool) -> Program:
        """Push all that was made; with the others, until all have come here."""
        yield self._pushed_last
        if not together and not self._made:
            return  # else one that joins would have to be a member before it rests
        yield from self._take_part()
        while True:
            report = self._report(now=not together, together=together)
            yield [report]
            yield from self._push_what_it_has(waits=True)
            if not together or report.result().together:
                return

    def _push_what_it_has(self, waits: bool) -> Program:
        self.trained[self._pushes], self._made = self._made, []
        used = len(self.trained[self._pushes])
        pushed = self._push(used)
        pushed.add_done_callback(lambda done: self._land(done, used))
        self._pushes += 1
        self._version += 1
        self._pushed_last = [pushed]
        yield self._pushed_last if waits else []

    def _land(self, pushed: Future[Any], used: int) -> None:
        if pushed.exception() is None:
            self._used += used

    def _report(self, *, now: bool = False, together: bool = False) -> Future[Any]:
        made = len(self._made) if self.job.when == DueWhen.QUOTA else int(bool(self._made))
        progress = Progress(self._piece.number, 0, made, self.job.when, self.job.quota, now, together)
        return self._ask(lambda number: ReportProgress(number, self._piece.server, progress))

    @property
    def _piece(self) -> Slice:
        return self.infos["weight"].slices[0]


def require_position(users: Sequence[LeasingUser], books: Books, examples: int, manifest: Manifest) -> None:
    """A checkpoint goes on with all that no push has used which is in it."""
    assert manifest.data is not None
    trained = {user.node.machine.me: user.trained for user in users}
    counted = {one for rounds in books.rounds.values() for said in rounds[: manifest.step] for one in said}
    used = {place for member, step in counted for place in trained[member][step]}
    every = {(epoch, place) for epoch in range(EPOCHS) for place in range(examples)}
    ranges = manifest.data["left"]  # they may go over the end of an epoch
    left = {(epoch + at // examples, at % examples) for epoch, start, stop in ranges for at in range(start, stop)}
    lacks, again = sorted(every - used - left), sorted(left & used)
    assert not lacks and not again, f"the checkpoint of step {manifest.step} lacks {lacks}, and has {again} again"


def require_used_once(users: Sequence[LeasingUser], books: Books, examples: int) -> None:
    """Each place of each epoch is in exactly one push that any server has counted."""
    counts: Counter[Place] = Counter()
    trained = {user.node.machine.me: user.trained for user in users}
    counted = {one for rounds in books.rounds.values() for said in rounds for one in said}
    for member, step in counted:
        counts.update(trained[member][step])
    for epoch in range(EPOCHS):
        for place in range(examples):
            found = counts.pop((epoch, place), 0)
            assert found == 1, f"place {place} of epoch {epoch} is counted {found} times"
    assert not counts, f"places that are not in the data: {sorted(counts)}"
