"""Requests of a worker's user that are not fulfilled yet, and what barriers and checkpoints among them need. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import NEVER, CompleteRequest, Effect, FailRequest, Send
from kvdist.core.worker.requests import ClaimFolder, EnterBarrier, LoadStore, SaveStore
from kvdist.core.worker.transfers import Transfers
from kvdist.errors import BarrierTimeout
from kvdist.nodes import Member
from kvdist.protocol.messages import CHECKPOINT, Barrier, Claim, Load, MarkPushes, Save, Waiting

ASK_AGAIN_S = 1.0
"""How long the scheduler has to say who is missing at a barrier that is late."""
SLICES_PER_MARK = 1 << 18


@dataclass(slots=True, eq=False)
class Pending:
    """A request without a reply."""

    request: int
    label: str
    since: float
    error: Exception | None = None
    due: float = field(default=NEVER)
    """When it times out."""
    asked: bool = False
    """Whether it is late, and the scheduler was asked who is missing."""
    in_background: bool = False
    """Whether its user goes on meanwhile, so that other requests are explained first."""


class PendingRequests:
    """All requests without a reply, in the order of the calls."""

    def __init__(self) -> None:
        self._all: dict[int, Pending] = {}
        """In the order of the calls, so the first one is the oldest."""
        self._timed: dict[int, Pending] = {}
        """Requests with a deadline."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, request: int) -> Pending:
        return self._all[request]

    def get(self, request: int) -> Pending | None:
        """The request of this number, if it waits."""
        return self._all.get(request)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._all.values())

    @property
    def newest(self) -> Pending:
        """The last call; there must be one."""
        return next(reversed(self._all.values()))

    @property
    def oldest(self) -> Pending | None:
        """The request that has waited longest; one in the background only if there is no other."""
        found = None
        for pending in self._all.values():
            if not pending.in_background:
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
        return min((pending.due for pending in self._timed.values()), default=NEVER)

    def open(self, request: int, label: str, now: float, due: float = NEVER) -> Pending:
        """Add a request, which times out at `due`."""
        pending = self._all[request] = Pending(request, label, now, due=due)
        if due < NEVER:
            self._timed[request] = pending
        return pending

    def close(self, pending: Pending, result: object = None) -> Effect:
        """Remove a request that has its result or error."""
        self._all.pop(pending.request, None)
        self._timed.pop(pending.request, None)
        if pending.error is not None:
            return FailRequest(pending.request, pending.error)
        return CompleteRequest(pending.request, result)

    def fail_all(self, error: Exception) -> list[Effect]:
        """Fail all requests."""
        effects: list[Effect] = [FailRequest(request, error) for request in self._all]
        self._all.clear()
        self._timed.clear()
        return effects


class BarrierCalls:
    """The barriers that this worker waits at.

    Args:
        pending: all requests of the worker.
        name: says who a worker is, with its host, by its rank.
    """

    def __init__(self, pending: PendingRequests, name: Callable[[int], str]) -> None:
        self._pending = pending
        self._name = name
        self._passed: dict[int, int] = {}
        """Store → how many of its barriers this worker has passed."""
        self._open: dict[int, Barrier] = {}
        """By request."""

    def enter(self, request: EnterBarrier) -> list[Effect]:
        """Arrive at the next barrier of the store."""
        counter = self._passed.get(request.store, 0)
        barrier = self._open[request.request] = Barrier(request.request, request.store, counter, request.statement)
        return [Send(SCHEDULER_MEMBER, barrier)]

    def answered(self, request: int) -> None:
        """Note that a barrier was passed: the next one of its store has another number."""
        barrier = self._open.pop(request, None)
        if barrier is not None:
            passed = self._passed.get(barrier.store, 0)
            self._passed[barrier.store] = max(passed, barrier.counter + 1)

    def late(self, pending: Pending, now: float) -> list[Effect] | None:
        """React to a deadline: first ask once more who is missing. None if the request is not a barrier."""
        barrier = self._open.get(pending.request)
        if barrier is None:
            return None
        if not pending.asked:
            pending.asked = True
            pending.due = now + ASK_AGAIN_S
            return [Send(SCHEDULER_MEMBER, barrier)]
        return [self._time_out(pending, (), now)]

    def hinted(self, hint: Waiting, now: float) -> list[Effect]:
        """Fail late barriers with the names of the missing workers, which the scheduler says."""
        late = [pending for pending in self._pending.timed if pending.asked and self._is_about(hint, pending)]
        return [self._time_out(pending, hint.ranks, now) for pending in late]

    def _is_about(self, hint: Waiting, pending: Pending) -> bool:
        return hint.subject == f"barrier {self._open[pending.request].counter}"

    def _time_out(self, pending: Pending, missing: Sequence[int], now: float) -> Effect:
        counter = self._open.pop(pending.request).counter
        names = ", ".join(map(self._name, missing)) or "every worker"
        waited = now - pending.since
        text = f"barrier {counter} was not reached by {names} within {waited:.1f} s"
        pending.error = BarrierTimeout(text, tuple(missing))
        return self._pending.close(pending)


class SavingCalls:
    """What this worker has asked to be saved and restored.

    Args:
        transfers: knows what has been pushed.
    """

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._saved: dict[int, int] = {}
        """Store → how many of its checkpoints this worker has marked."""
        self._loaded: dict[int, int] = {}
        self.waiting: list[LoadStore] = []
        """Loads that wait until no push is under way. Empty nearly always."""
        self.hint: Waiting | None = None
        """Who is missing in a checkpoint."""

    def claim(self, request: ClaimFolder) -> list[Effect]:
        """Ask for the directory into which the next checkpoint is to be saved."""
        counter = self._saved.get(request.store, 0)
        claim = Claim(request.request, request.store, counter, request.folder, request.contents)
        return [Send(SCHEDULER_MEMBER, claim)]

    def save(self, request: SaveStore, servers: dict[int, Member]) -> list[Effect]:
        """Mark the pushes of this worker at every server, before any later one leaves."""
        counter = self._saved.get(request.store, 0)
        self._saved[request.store] = counter + 1
        numbers: dict[int, list[int]] = {rank: [] for rank in servers}
        for info in request.keys:
            for piece in info.slices:
                numbers[piece.server].append(piece.number)
        effects: list[Effect] = []
        for rank, mine in sorted(numbers.items()):
            ids = np.array(mine, np.uint32)
            for start in range(0, len(ids) or 1, SLICES_PER_MARK):
                some = ids[start : start + SLICES_PER_MARK]
                steps, is_last = self._transfers.slices.pushed[some], start + SLICES_PER_MARK >= len(ids)
                contents = () if request.failure else request.contents
                where = (request.store, counter, request.folder, contents, request.run, request.step)
                effects.append(Send(servers[rank], MarkPushes(*where, is_last, some, steps)))
        place = (request.store, counter, request.folder, request.contents, request.run, request.step, request.keep)
        save = Save(request.request, *place, len(request.keys), request.file, request.failure)
        return [*effects, Send(SCHEDULER_MEMBER, save)]

    def hinted(self, hint: Waiting) -> bool:
        """Whether this is about a checkpoint, which is not what the user's other calls wait for."""
        if not hint.subject.startswith(CHECKPOINT):
            return False
        self.hint = hint
        return True

    def load(self, request: LoadStore) -> None:
        """Ask for it as soon as no push of this worker is under way."""
        self.waiting.append(request)

    def settle(self) -> list[Effect]:
        """Send the loads that waited, once no push is under way."""
        if not self._transfers.is_idle:
            return []
        effects: list[Effect] = []
        for request in self.waiting:
            counter = self._loaded.get(request.store, 0)
            self._loaded[request.store] = counter + 1
            load = Load(request.request, request.store, counter, request.folder, request.contents, request.failure)
            effects.append(Send(SCHEDULER_MEMBER, load))
        self.waiting.clear()
        return effects
