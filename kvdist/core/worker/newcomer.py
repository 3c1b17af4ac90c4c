"""A worker that joins a running job: queues its calls until the rounds wait for it. Pure.

Its program begins anew, while the others are in the middle of theirs. Until its first push it looks on: it may read,
and its first values and statements change nothing, as the other workers have agreed on them before; only a Trainer's
description of its model is compared, by the scheduler. The first push, or the question when it is due, waits, with all
later calls, until every server has announced where this worker's push counters begin. The same happens once more in a
store whose rounds do not wait for it yet.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.worker import requests as req
from kvdist.core.worker.transfers import Transfers
from kvdist.naming import model_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

GIVES = (req.RunKind.INITIALISE, req.RunKind.REPLACE, req.RunKind.REPLACE_STATE)
"""Calls that a worker without pushes must not make: the cluster has values."""


class Newcomer:
    """Answers or queues the calls of a worker that no round waits for yet.

    Args:
        transfers: its pushes and pulls.
        servers: number of a server in the placement → server that has its slices.
    """

    def __init__(self, transfers: Transfers, servers: dict[int, Member]) -> None:
        self.is_member = False
        self.looks_on = True
        """Whether the worker has pushed nothing yet."""
        self._transfers = transfers
        self._servers = servers
        self.silent: set[Member] = set()
        """The servers that have not sent `Counters` yet."""
        self._later: set[int] = set()
        """The slices whose rounds do not wait for this worker yet."""
        self._begun: set[int] = set()
        """The slices with counters from a server."""
        self._restored: dict[int, int] = {}
        """Slice → the updates of its weights minus its rounds."""
        self._stores: list[tuple[int, int, int]] = []
        """(first slice, end of the slices, store) of each declaration."""
        self.queued: list[req.Request] = []
        """Calls that wait until it takes part, in order."""
        self._wish = msg.Ready(0)

    def declared(self, request: req.DeclareKeys, first: int, last: int, later: Iterable[int]) -> None:
        """Record the slices of the declared keys of a store. Rounds of `later` have begun without this worker."""
        self._stores.append((first, last + 1, request.store))
        self._later |= set(later) - self._begun

    def accept(self, request: req.Request) -> list[fx.Effect] | None:
        """Queue a call of the user, or answer it; None if it is handled as on any worker."""
        if isinstance(request, req.Leave) and request.failure:
            return None
        if self.queued:
            self.queued.append(request)
            return []
        match request:
            case req.TakePart() if not self._waits_for(self._numbers_of(request.store)):
                return [fx.CompleteRequest(request.request, self._updates_of(request.store))]
            case req.TakePart():
                return self._queue(request, request.store)
            case req.Transfer() if request.runs:
                return self._transfer(request)
            case req.EnterBarrier() if self.looks_on and not self.is_member and model_of(request.statement):
                return None  # the scheduler compares it with what the others have said
            case req.EnterBarrier() | req.LoadStore() | msg.Command() if self.looks_on:
                return [fx.CompleteRequest(request.request)]
            case req.ClaimFolder() | req.SaveStore() if self.looks_on:
                return [fx.CompleteRequest(request.request, "")]  # of no run: it saves nothing
            case _:
                return None

    def _transfer(self, request: req.Transfer) -> list[fx.Effect] | None:
        if self.looks_on and request.kind in GIVES:
            return [fx.CompleteRequest(request.request)]
        if not request.kind.pushes:
            return None
        if self._waits_for({number for run in request.runs for number in run.plan.ids.tolist()}):
            return self._queue(request, self._store_of(request))
        self.looks_on = False
        return None

    def _queue(self, request: req.Request, store: int) -> list[fx.Effect]:
        self.queued.append(request)
        self._wish = msg.Ready(store)
        if not self.is_member:
            self.silent = set(self._servers.values())
        return [fx.Send(SCHEDULER_MEMBER, self._wish)]

    @property
    def ready_again(self) -> list[msg.Ready]:
        """The message to repeat while calls are queued."""
        return [self._wish] if self.queued else []

    def _waits_for(self, numbers: set[int]) -> bool:
        """Whether rounds of some of these slices do not wait for this worker yet."""
        return not self.is_member or bool(self._later & numbers)

    def _store_of(self, request: req.Transfer) -> int:
        number = int(request.runs[0].plan.ids[0])
        return next(store for first, stop, store in self._stores if first <= number < stop)

    def _numbers_of(self, store: int) -> set[int]:
        return {number for first, stop, of in self._stores if of == store for number in range(first, stop)}

    def _updates_of(self, store: int) -> int:
        pushed = self._transfers.slices.pushed
        return max((int(pushed[one]) + self._restored.get(one, 0) for one in self._numbers_of(store)), default=0)

    @property
    def is_waiting(self) -> bool:
        """Whether servers still have to announce where counters begin."""
        return bool(self.queued)

    def counters(self, sender: Member, message: msg.Counters) -> int:
        """Set the start of counters from a server; return the highest."""
        later = message.steps == msg.LATER
        self._later.difference_update(message.ids[~later].tolist())
        self._later.update(message.ids[later].tolist())
        self._begun.update(message.ids[~later].tolist())
        columns = (message.ids[~later], message.steps[~later], message.updates[~later])
        self._restored.update(
            {one: count - step for one, step, count in zip(*map(np.ndarray.tolist, columns), strict=True)}
        )
        self._transfers.slices.begin_at(message.ids[~later], message.steps[~later])
        self.silent.discard(sender)
        self.is_member = self.is_member or not self.silent
        return int(message.steps[~later].max(initial=0))

    def rewind(self) -> list[req.Request]:
        """Become a member as all rounds wait for this worker after a rollback; returns the queued requests."""
        self._later.clear()
        self.silent.clear()
        self.is_member = True
        queued, self.queued = self.queued, []
        return queued

    def pop_requests(self) -> list[req.Request]:
        """The queued requests that may go on, in the order of the calls; the worker may queue them again."""
        if not self.queued or not self.is_member:
            return []
        match self.queued[0]:
            case req.TakePart(store=store):
                awaited = self._numbers_of(store)
            case req.Transfer(runs=runs):
                awaited = {number for run in runs for number in run.plan.ids.tolist()}
            case _:
                awaited = set()
        if self._later & awaited:
            return []
        queued, self.queued = self.queued, []
        return queued
