"""Reports of a worker's progress between two pushes, where a policy counts examples. Pure."""

from __future__ import annotations

from dataclasses import replace

from kvdist.core import machine as fx
from kvdist.core.worker import requests as req
from kvdist.core.worker.pending import PendingRequests
from kvdist.core.worker.transfers import Transfers
from kvdist.nodes import Member
from kvdist.protocol import messages as msg


class ProgressReports:
    """The reports of a worker, and the answers of servers.

    Args:
        pending: all requests of the worker.
        transfers: the pushes of the worker.
        servers: number of a server in the placement → server that has its slices.
    """

    def __init__(self, pending: PendingRequests, transfers: Transfers, servers: dict[int, Member]) -> None:
        self._pending = pending
        self._transfers = transfers
        self._servers = servers
        self._said: dict[int, req.ReportProgress] = {}
        """Slice → the newest report."""
        self._due: dict[int, msg.Due] = {}
        """Slice → the newest answer."""

    def report(self, request: req.ReportProgress, now: float) -> list[fx.Effect]:
        """Handle a report of the user; it replaces the previous report of the slice, which gets the answer None."""
        number = request.progress.slice
        effects = self._answer(number, None)
        step = self._transfers.slices.rounds_of(number)
        progress = replace(request.progress, step=step)
        self._said[number] = request = replace(request, progress=progress)
        due = self._due.get(number)
        if due is not None and due.step >= step:
            return [*effects, fx.CompleteRequest(request.request, due)]
        self._pending.open(request.request, req.label_of(request), now).deed = _deed_of(progress)
        return [*effects, fx.Send(self._servers[request.server], progress)]

    def ask_again(self) -> list[fx.Effect]:
        """Repeat each report without an answer, as the user waits: the server names the workers that it awaits."""
        unanswered = [said for said in self._said.values() if self._pending.get(said.request) is not None]
        return [fx.Send(self._servers[said.server], said.progress) for said in unanswered]

    def not_due(self, message: msg.NotDue) -> None:
        """Store the workers that a server awaits before a push is due."""
        said = self._said.get(message.slice)
        pending = None if said is None else self._pending.get(said.request)
        if said is not None and pending is not None and said.progress.step == message.step:
            pending.awaits = message.ranks

    def due(self, message: msg.Due) -> list[fx.Effect]:
        """Answer the call whose push is due, by a server's message."""
        self._due[message.slice] = message
        said = self._said.get(message.slice)
        return self._answer(message.slice, message) if said is not None and said.progress.step <= message.step else []

    def again(self, number: int) -> list[fx.Effect]:
        """Repeat the reports to a server that has the slices of a lost server, by its number."""
        server = self._servers[number]
        return [fx.Send(server, said.progress) for said in self._said.values() if said.server == number]

    def rewind(self) -> list[int]:
        """Forget all reports and answers: all go back to a snapshot. Returns the requests without an answer."""
        waiting = [said.request for said in self._said.values() if self._pending.get(said.request) is not None]
        self._said.clear()
        self._due.clear()
        return waiting

    def _answer(self, number: int, due: msg.Due | None) -> list[fx.Effect]:
        said = self._said.get(number)
        pending = None if said is None else self._pending.get(said.request)
        return [] if pending is None else [self._pending.close(pending, due)]


_DEEDS = {
    msg.DueWhen.QUOTA: "make their part of {} examples",
    msg.DueWhen.QUORUM: "make their steps, {} of them at least",
    msg.DueWhen.ASYNC: "say how late a gradient is, of at most {} versions",
}


def _deed_of(progress: msg.Progress) -> str:
    """Return the action of other workers that makes the push due, for people."""
    if progress.together:
        deed = "make an exchange of all workers"
    elif progress.now:
        deed = "push what they have"
    else:
        deed = _DEEDS[msg.DueWhen(progress.when)].format(progress.quota)
    return f"{deed} (step {progress.step + 1})"
