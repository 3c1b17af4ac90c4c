"""A worker's calls of `barrier`: which one each is, and what becomes of it when it is late. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import Effect, Send
from kvdist.core.worker.pending import Pending, PendingRequests
from kvdist.core.worker.requests import EnterBarrier
from kvdist.errors import BarrierTimeout
from kvdist.protocol.messages import Barrier, Waiting

ASK_AGAIN_S = 1.0
"""How long the scheduler has to say who is missing at a barrier that is late."""


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
        """Everybody has been there: the next one of this store is another."""
        barrier = self._open.pop(request, None)
        if barrier is not None:
            passed = self._passed.get(barrier.store, 0)
            self._passed[barrier.store] = max(passed, barrier.counter + 1)

    def late(self, pending: Pending, now: float) -> list[Effect] | None:
        """A deadline has passed. First ask once more who is missing. None if this is no barrier's."""
        barrier = self._open.get(pending.request)
        if barrier is None:
            return None
        if not pending.asked:
            pending.asked = True
            pending.due = now + ASK_AGAIN_S
            return [Send(SCHEDULER_MEMBER, barrier)]
        return [self._time_out(pending, (), now)]

    def hinted(self, hint: Waiting, now: float) -> list[Effect]:
        """The scheduler says who is missing: what is late fails with these names."""
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
