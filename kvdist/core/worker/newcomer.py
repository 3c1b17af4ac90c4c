"""A worker that joins a running job: what it holds back until the rounds wait for it. Pure.

Its program begins anew, while the others are in the middle of theirs. Until its first push it looks on: it may read,
and what it gives changes nothing. That push waits, and everything behind it, until every server has said where this
worker's push counters begin. The same happens once more in a store where rounds do not wait for it yet.
"""

from __future__ import annotations

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import CompleteRequest, Effect, FailRequest, Send
from kvdist.core.worker.requests import DeclareKeys, Leave, Request, RunKind, Transfer
from kvdist.core.worker.transfers import Transfers
from kvdist.nodes import Member
from kvdist.protocol.messages import LATER, Counters, Ready

GIVES = (RunKind.INITIALISE, RunKind.INITIALISE_ROWS, RunKind.REPLACE, RunKind.REPLACE_STATE)
"""What a worker that looks on must not do: the cluster has values."""


class Newcomer:
    """What such a worker does otherwise.

    Args:
        transfers: its pushes and pulls.
        servers: rank → each server, as the worker knows them.
    """

    def __init__(self, transfers: Transfers, servers: dict[int, Member]) -> None:
        self.is_member = False
        self._transfers = transfers
        self._servers = servers
        self._silent: set[Member] = set()
        """The servers that have not said where counters begin."""
        self._later: set[int] = set()
        """The slices whose rounds do not wait for this worker yet."""
        self._stores: list[tuple[int, int, int]] = []
        """(first slice, the one after the last, store) of what was declared."""
        self._held: list[Request] = []

    def declared(self, request: DeclareKeys, first: int, last: int) -> None:
        """Keys of this store have these slices."""
        self._stores.append((first, last + 1, request.store))

    def accept(self, request: Request) -> list[Effect] | None:
        """Hold a call of the user back, or answer it; None if it is like those of others."""
        if isinstance(request, Leave) and request.failure:
            return None
        if self._held:
            self._held.append(request)
            return []
        if not isinstance(request, Transfer) or not request.runs:
            return None
        if not self.is_member and request.kind in GIVES:
            return [CompleteRequest(request.request)]
        if not self._must_wait(request):
            return None
        self._held.append(request)
        if not self.is_member:
            self._silent = set(self._servers.values())
        return [Send(SCHEDULER_MEMBER, Ready(self._store_of(request)))]

    def _must_wait(self, request: Transfer) -> bool:
        if not request.kind.pushes:
            return False
        return not self.is_member or any(self._later.intersection(run.plan.ids.tolist()) for run in request.runs)

    def _store_of(self, request: Transfer) -> int:
        number = int(request.runs[0].plan.ids[0])
        return next(store for first, stop, store in self._stores if first <= number < stop)

    def counters(self, sender: Member, message: Counters) -> int:
        """A server says where counters begin; returns the highest."""
        later = message.steps == LATER
        self._later.difference_update(message.ids[~later].tolist())
        self._later.update(message.ids[later].tolist())
        self._transfers.slices.begin_at(message.ids[~later], message.steps[~later])
        self._silent.discard(sender)
        self.is_member = self.is_member or not self._silent
        return int(message.steps[~later].max(initial=0))

    def take(self) -> list[Request]:
        """What was held back and may go on, in the order of the calls; it may be held back again."""
        if not self._held or not self.is_member:
            return []
        first = self._held[0]
        if isinstance(first, Transfer) and self._must_wait(first):
            return []
        held, self._held = self._held, []
        return held

    def fail(self, error: Exception) -> list[Effect]:
        """There will be no answer."""
        held, self._held = self._held, []
        return [FailRequest(request.request, error) for request in held]
