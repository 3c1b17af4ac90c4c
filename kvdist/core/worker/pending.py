"""Requests of a worker's user that are not fulfilled yet: the state of its barriers and checkpoints, and reports to the
scheduler that all threads of the user wait for other workers. Pure.

The scheduler finds deadlocks in these reports (`core.scheduler.deadlocks`), so a report must be certain. It is sent
only if every thread that may act waits, without a time-out, and every open request needs an action of another worker: a
push, the initialisation of a key, the arrival at a barrier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from kvdist import errors
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.worker import requests as req
from kvdist.core.worker.transfers import Transfers
from kvdist.nodes import Member
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32

ASK_AGAIN_S = 1.0
"""Time that the scheduler has to name the missing workers of a late barrier."""
SLICES_PER_MARK = 1 << 18
REPORT_AFTER_S = 2.0
"""Shorter waits are not reported."""
LOOK_EVERY_S = 1.0
STRETCHES_MAX = 1 << 16
"""Largest number of stretches in a report; a longer report is not sent."""
REQUESTS_MAX = 64
NONE: U32 = np.zeros(0, np.uint32)


@dataclass(slots=True, eq=False)
class Pending:
    """A request without a reply."""

    request: int
    label: str
    since: float
    error: Exception | None = None
    due: float = field(default=fx.NEVER)
    """When it times out."""
    asked: bool = False
    """Whether it is late, and the scheduler was asked for the missing workers."""
    in_background: bool = False
    """Whether its user continues meanwhile, so that other requests are explained first."""
    deed: str = ""
    """For a request that asks when a push is due: the action of other workers that makes it due. Its user may continue
    meanwhile."""
    awaits: tuple[int, ...] | None = None
    """Ranks of the workers that `deed` is about, by the server's answer; None before the answer."""
    is_queued: bool = False
    """Whether this worker has queued it until the worker takes part, or until all are back at a snapshot."""
    asked_for: msg.Message | None = None
    """The message that asked the scheduler."""


class PendingRequests:
    """All requests without a reply, in the order of the calls."""

    def __init__(self) -> None:
        self._all: dict[int, Pending] = {}
        """Number → request, in the order of the calls, so the oldest first."""
        self._timed: dict[int, Pending] = {}
        """Requests with a deadline."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, request: int) -> Pending:
        return self._all[request]

    def get(self, request: int) -> Pending | None:
        """The request with this number, if it is open."""
        return self._all.get(request)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._all.values())

    @property
    def newest(self) -> Pending:
        """The last call; a call with a `deed` only if all calls have a deed. Requires a call."""
        calls = list(self._all.values())
        return next((one for one in reversed(calls) if not one.deed), calls[-1])

    @property
    def oldest(self) -> Pending | None:
        """The request that has waited longest; a request in the background only if all are in the background."""
        found = None
        for pending in self._all.values():
            if not (pending.in_background or pending.deed):
                return pending
            found = found or pending
        return found

    @property
    def timed(self) -> list[Pending]:
        """Requests with a deadline."""
        return list(self._timed.values())

    @property
    def deadline(self) -> float:
        """The earliest deadline."""
        return min([pending.due for pending in self._timed.values()]) if self._timed else fx.NEVER

    def ask(self, request: int, message: msg.Message) -> fx.Send:
        """Ask the scheduler for the answer to a request."""
        pending = self._all.get(request)  # None for a goodbye that nobody waits for
        if pending is not None:
            pending.asked_for = message
        return fx.Send(SCHEDULER_MEMBER, message)

    def open(self, request: int, label: str, now: float, due: float = fx.NEVER) -> Pending:
        """Add a request, which times out at `due`."""
        pending = self._all[request] = Pending(request, label, now, due=due)
        if due < fx.NEVER:
            self._timed[request] = pending
        return pending

    def release(self, request: int) -> None:
        """Remove a request that was queued, as it is called anew."""
        del self._all[request]

    def close(self, pending: Pending, result: object = None) -> fx.Effect:
        """Remove a request that has its result or error."""
        self._all.pop(pending.request, None)
        self._timed.pop(pending.request, None)
        if pending.error is not None:
            return fx.FailRequest(pending.request, pending.error)
        return fx.CompleteRequest(pending.request, result)

    def fail_all(self, error: Exception) -> list[fx.Effect]:
        """Fail all requests."""
        effects: list[fx.Effect] = [fx.FailRequest(request, error) for request in self._all]
        self._all.clear()
        self._timed.clear()
        return effects


class BarrierCalls:
    """The barriers that this worker waits at.

    Args:
        pending: all requests of the worker.
        name: returns a worker's name and host, by its rank.
    """

    def __init__(self, pending: PendingRequests, name: Callable[[int], str]) -> None:
        self._pending = pending
        self._name = name
        self._open: dict[int, msg.Barrier] = {}
        """Number of a request → its barrier."""
        self._entered: set[int] = set()
        """Stores of which this worker has entered a barrier, and has had no answer in time."""

    def enter(self, request: req.EnterBarrier, pushes: int) -> fx.Effect:
        """Arrive at the next barrier of the store after `pushes` pushes, or again at a barrier without an answer."""
        repeats, said = request.store in self._entered, (request.statement, request.giver)
        barrier = msg.Barrier(request.request, request.store, *said, pushes, repeats)
        self._open[request.request] = barrier
        self._entered.add(request.store)
        return self._pending.ask(request.request, barrier)

    def answered(self, request: int) -> None:
        """End the barrier of a request that has its answer, if the request is of a barrier."""
        barrier = self._open.pop(request, None)
        if barrier is not None:
            self._entered.discard(barrier.store)

    def forget(self) -> None:
        """Forget the barriers without an answer: the next barrier of each store is that of the other workers."""
        self._entered.clear()

    def late(self, pending: Pending, now: float) -> list[fx.Effect] | None:
        """Handle a deadline: first ask once more for the missing workers. None if the request is not a barrier."""
        barrier = self._open.get(pending.request)
        if barrier is None:
            return None
        if not pending.asked:
            pending.asked = True
            pending.due = now + ASK_AGAIN_S
            return [fx.Send(SCHEDULER_MEMBER, replace(barrier, repeats=True))]
        return [self._time_out(pending, "reach the barrier", (), now)]

    def hinted(self, hint: msg.Waiting, now: float) -> list[fx.Effect]:
        """Fail a late barrier with the names of the missing workers, from the scheduler's hint."""
        pending = self._pending.get(hint.request)
        if pending is None or not (pending.asked and hint.ranks):
            return []
        return [self._time_out(pending, hint.deed, hint.ranks, now)]

    def _time_out(self, pending: Pending, deed: str, missing: Sequence[int], now: float) -> fx.Effect:
        del self._open[pending.request]
        names = ", ".join(map(self._name, missing)) or "the other workers"
        text = f"{names} did not {deed} within {now - pending.since:.1f} s"
        pending.error = errors.BarrierTimeout(text, tuple(missing))
        return self._pending.close(pending)


class SavingCalls:
    """Checkpoints and loads that this worker has asked for.

    Args:
        pending: all requests of the worker.
        transfers: has the push counters.
    """

    def __init__(self, pending: PendingRequests, transfers: Transfers) -> None:
        self._pending = pending
        self._transfers = transfers
        self._saved: dict[int, int] = {}
        """Store → number of its next checkpoint on this worker."""
        self.waiting: list[req.LoadStore] = []
        """Loads that wait until no push is in flight. Empty nearly always."""
        self.hint: msg.Waiting | None = None
        """The scheduler's last hint about the missing workers of a checkpoint."""

    def begin_at(self, stores: U32, saves: U32) -> None:
        """Record the numbers of the next checkpoints of stores: others were begun without this worker."""
        self._saved.update(zip(stores.tolist(), saves.tolist(), strict=True))

    def claim(self, request: req.ClaimFolder) -> list[fx.Effect]:
        """Ask for the directory into which the next checkpoint is to be saved."""
        claim = msg.Claim(request.request, request.store, request.folder, request.contents)
        return [self._pending.ask(request.request, claim)]

    def claimed(self, asked: msg.Message | None, message: msg.Claimed) -> None:
        """Adopt the number of the next checkpoint, whether it can be saved or not."""
        if isinstance(asked, msg.Claim):
            self._saved[asked.store] = max(message.counter, self._saved.get(asked.store, 0))

    def save(self, request: req.SaveStore, servers: dict[int, Member], pushes: int) -> list[fx.Effect]:
        """Mark the pushes of this worker at every server, before any later push leaves."""
        counter = self._saved.get(request.store, 0)
        self._saved[request.store] = counter + 1
        ranks = {member: rank for rank, member in servers.items()}
        numbers: dict[Member, list[int]] = {member: [] for _, member in sorted(servers.items())}
        for info in request.keys:
            for piece in info.slices:
                if piece.server in servers:
                    numbers[servers[piece.server]].append(piece.number)
        effects: list[fx.Effect] = []
        for member, mine in numbers.items():
            ids = np.array(mine, np.uint32)
            for start in range(0, len(ids) or 1, SLICES_PER_MARK):
                some = ids[start : start + SLICES_PER_MARK]
                steps, is_last = self._transfers.slices.pushed[some], start + SLICES_PER_MARK >= len(ids)
                contents = () if request.failure else request.contents
                where = (request.store, counter, request.folder, contents, request.run, request.step)
                mark = msg.MarkPushes(*where, is_last, some, steps, pushes)
                effects.append(fx.Send(member, mark, self._transfers.note(ranks[member])))
        which = (request.store, request.folder, request.contents, counter, request.run, request.step, request.keep)
        save = msg.Save(request.request, *which, len(request.keys), request.file, request.failure, pushes)
        return [*effects, self._pending.ask(request.request, save)]

    def give_up(self, server: Member, number: int) -> list[fx.Effect]:
        """Tell a server that has taken over slices of the checkpoints in flight, which other workers may mark at it,
        too.

        Args:
            server: the server.
            number: number of the lost server whose slices it has.
        """
        nothing = np.zeros(0, np.uint32)
        effects: list[fx.Effect] = []
        for save in [one.asked_for for one in self._pending if isinstance(one.asked_for, msg.Save)]:
            where = (save.store, save.counter, save.folder, (), save.run, save.step)
            mark = msg.MarkPushes(*where, True, nothing, nothing, save.pushes)
            effects.append(fx.Send(server, mark, self._transfers.note(number)))
        return effects

    def drop(self, asked: msg.Message | None) -> None:
        """Drop a checkpoint that all workers give up, if it is a checkpoint: the next of its store has its number."""
        if isinstance(asked, msg.Save):
            self._saved[asked.store] = min(self._saved[asked.store], asked.counter)

    def hinted(self, hint: msg.Waiting) -> bool:
        """Keep a hint about a checkpoint, for which the user's other calls do not wait. Returns whether it was."""
        pending = self._pending.get(hint.request)
        if pending is None or not isinstance(pending.asked_for, msg.Save):
            return False
        self.hint = hint
        return True

    def load(self, request: req.LoadStore) -> None:
        """Queue a load until no push of this worker is in flight."""
        self.waiting.append(request)

    def send_loads(self, pushes: int) -> list[fx.Effect]:
        """Send the waiting loads, if no push is in flight."""
        if not self._transfers.is_idle:
            return []
        effects: list[fx.Effect] = []
        for request in self.waiting:
            which = (request.store, request.folder, request.contents)
            load = msg.Load(request.request, *which, request.failure, pushes)
            effects.append(self._pending.ask(request.request, load))
        self.waiting.clear()
        return effects


class Threads(Protocol):
    """The threads of the user's program. Times are those of the machine's clock."""

    def blocked_since(self) -> float | None:
        """Time since which every thread that may act waits in a call of kvdist; None if a thread does not wait."""

    def may_act(self, now: float) -> str:
        """The threads that may act while others wait, named; '' if none may act, or none waits."""

    def longest_wait_since(self) -> float | None:
        """Since when the longest waiting thread waits; None if none does."""

    def room_wait(self) -> str:
        """Why a push waits for room, such as ``for room: …``; '' if none does."""


class UnknownThreads:
    """Unknown threads: any may act."""

    def blocked_since(self) -> float | None:
        """None."""
        return None

    def may_act(self, now: float) -> str:
        """Empty."""
        return ""

    def longest_wait_since(self) -> float | None:
        """None."""
        return None

    def room_wait(self) -> str:
        """Empty."""
        return ""


class BlockedReports:
    """The reports of a worker.

    Args:
        threads: threads of the worker's user.
        pending: open requests of the worker.
        transfers: pushes and pulls of the worker.
    """

    def __init__(self, threads: Threads, pending: PendingRequests, transfers: Transfers) -> None:
        self.next_look = fx.NEVER
        """Time of the next check for changes that the scheduler should know."""
        self._threads = threads
        self._pending = pending
        self._transfers = transfers
        self._said = msg.Blocked(0, "", (), (), -1, NONE, NONE, NONE)

    def look_later(self, now: float) -> None:
        """Report later, as a request was opened."""
        if self.next_look == fx.NEVER:
            self.next_look = now + REPORT_AFTER_S

    def look(self, leaving: int | None, now: float) -> msg.Blocked | None:
        """Return a new report; None if nothing has changed since the last report.

        Args:
            leaving: the request to leave, while pushes stand before it.
            now: the time.
        """
        said = self._said
        report = self.report(leaving, now)
        self.next_look = now + LOOK_EVERY_S if len(self._pending) else fx.NEVER
        return None if report is said else report

    def repeat(self, now: float) -> None:
        """Let the next look report again, as no process knows the last report any more."""
        self._said = replace(self._said, call="", number=self._said.number + 1)
        self.next_look = now + LOOK_EVERY_S if len(self._pending) else fx.NEVER

    def report(self, leaving: int | None, now: float) -> msg.Blocked:
        """Return a report of this worker's present waits; the last report itself if nothing has changed."""
        report = self._report(leaving, now) or msg.Blocked(0, "", (), (), -1, NONE, NONE, NONE)
        if not _says_the_same(report, self._said):
            self._said = replace(report, number=self._said.number + 1)
        return self._said

    def _report(self, leaving: int | None, now: float) -> msg.Blocked | None:
        """A report without its number; None unless it is certain that this worker cannot go on without others."""
        since = self._threads.blocked_since() if len(self._pending) else None
        if since is None or now - since < REPORT_AFTER_S or self._pending.timed:
            return None
        if any(one.is_queued for one in self._pending):
            return None
        rounds = self._transfers.awaited_rounds()
        if rounds is None:
            return None
        pushed, awaited = rounds
        is_open = self._transfers.is_open
        reports = [one.awaits for one in self._pending if one.deed]
        if None in reports:
            return None
        awaits = tuple(sorted({rank for ranks in reports for rank in ranks or ()}))
        called = [one.request for one in self._pending if not one.deed]
        others = [request for request in called if not is_open(request) and request != leaving]
        firsts = _stretches(pushed, awaited)
        if len(others) > REQUESTS_MAX or len(firsts) > STRETCHES_MAX:
            return None
        call, which = self._waiting_call(leaving, awaited)
        columns = [np.append(column, np.uint32(0))[firsts] for column in (pushed, awaited)]
        return msg.Blocked(0, call, tuple(others), awaits, which, firsts, *columns)

    def _waiting_call(self, leaving: int | None, awaited: U32) -> tuple[str, int]:
        """The call that waits, and the first slice whose round it waits for; -1 if it waits for no round."""
        room_wait, newest = self._threads.room_wait(), self._pending.newest
        if room_wait or newest.request == leaving:
            label = f"push ({room_wait})" if room_wait else newest.label
            return label, int(np.flatnonzero(awaited)[0]) if awaited.any() else -1
        return newest.label, self._transfers.first_awaited(newest.request, awaited)


def _says_the_same(one: msg.Blocked, other: msg.Blocked) -> bool:
    """Whether two reports are equal, except perhaps for their numbers."""
    whats = [(report.call, report.requests, report.awaits, report.slice) for report in (one, other)]
    if whats[0] != whats[1]:
        return False
    columns = ((one.firsts, other.firsts), (one.pushed, other.pushed), (one.awaited, other.awaited))
    return all(np.array_equal(own, others) for own, others in columns)


def _stretches(pushed: U32, awaited: U32) -> U32:
    """Positions at which a column changes, and the end of the columns."""
    changes = np.flatnonzero((pushed[1:] != pushed[:-1]) | (awaited[1:] != awaited[:-1])) + 1
    begin = np.zeros(min(1, len(pushed)), np.intp)
    return np.concatenate([begin, changes, np.array([len(pushed)], np.intp)]).astype(np.uint32)
