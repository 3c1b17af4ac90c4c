"""Reports to the scheduler that all threads of the user wait for other workers. Pure.

The scheduler finds deadlocks in these reports (`core.scheduler.deadlocks`), so a report must be certain. There is none
unless every thread that may act waits, without a time-out, and every open request can only go on by something that
another worker has yet to do: push, initialise a key, arrive at a barrier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import numpy as np

from kvdist.core.machine import NEVER
from kvdist.core.worker.pending import PendingRequests
from kvdist.core.worker.transfers import Transfers
from kvdist.protocol.arrays import U32
from kvdist.protocol.messages import Blocked

REPORT_AFTER_S = 2.0
"""Shorter waits are not reported."""
LOOK_EVERY_S = 1.0
STRETCHES_MAX = 1 << 16
"""A longer report is not sent."""
REQUESTS_MAX = 64
NONE: U32 = np.zeros(0, np.uint32)


class Threads(Protocol):
    """The threads of the user's program. Times are those of the machine's clock."""

    def blocked_since(self) -> float | None:
        """Since when every thread that may act waits in a call of kvdist; None while one does not."""

    def may_act(self, now: float) -> str:
        """The threads that may act while others wait, named; '' if none may act, or none waits."""

    def longest_wait_since(self) -> float | None:
        """Since when the thread waits that has waited longest; None if none does."""

    def room_wait(self) -> str:
        """What a push waits for that has no room, such as ``for room: …``; '' if none does."""


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
    """The reports of one worker.

    Args:
        threads: of its user.
        pending: its open requests.
        transfers: its pushes and pulls.
    """

    def __init__(self, threads: Threads, pending: PendingRequests, transfers: Transfers) -> None:
        self.next_look = NEVER
        """When something may have changed that the scheduler should know."""
        self._threads = threads
        self._pending = pending
        self._transfers = transfers
        self._said = Blocked(0, "", (), -1, NONE, NONE, NONE)

    def look_later(self, now: float) -> None:
        """There is a request."""
        if self.next_look == NEVER:
            self.next_look = now + REPORT_AFTER_S

    def look(self, leaving: int | None, now: float) -> Blocked | None:
        """What has changed since the last report; None if nothing has.

        Args:
            leaving: the request to leave, while pushes stand before it.
            now: the time.
        """
        said = self._said
        report = self.report(leaving, now)
        self.next_look = now + LOOK_EVERY_S if len(self._pending) else NEVER
        return None if report is said else report

    def report(self, leaving: int | None, now: float) -> Blocked:
        """What this worker waits for now; the last report itself if that says the same."""
        report = self._report(leaving, now) or Blocked(0, "", (), -1, NONE, NONE, NONE)
        if not _says_the_same(report, self._said):
            self._said = replace(report, number=self._said.number + 1)
        return self._said

    def _report(self, leaving: int | None, now: float) -> Blocked | None:
        """A report without its number; None unless it is certain that this worker cannot go on without others."""
        since = self._threads.blocked_since() if len(self._pending) else None
        if since is None or now - since < REPORT_AFTER_S or self._pending.timed:
            return None
        rounds = self._transfers.awaited_rounds()
        if rounds is None:
            return None
        pushed, awaited = rounds
        is_open = self._transfers.is_open
        others = [one.request for one in self._pending if not is_open(one.request) and one.request != leaving]
        firsts = _stretches(pushed, awaited)
        if len(others) > REQUESTS_MAX or len(firsts) > STRETCHES_MAX:
            return None
        place, which = self._place(leaving, awaited)
        columns = [np.append(column, np.uint32(0))[firsts] for column in (pushed, awaited)]
        return Blocked(0, place, tuple(others), which, firsts, *columns)

    def _place(self, leaving: int | None, awaited: U32) -> tuple[str, int]:
        """The call that waits, and the first slice whose round it waits for; -1 if it waits for no round."""
        room_wait, newest = self._threads.room_wait(), self._pending.newest
        if room_wait or newest.request == leaving:
            label = f"push ({room_wait})" if room_wait else newest.label
            return label, int(np.flatnonzero(awaited)[0]) if awaited.any() else -1
        return newest.label, self._transfers.first_awaited(newest.request, awaited)


def _says_the_same(one: Blocked, other: Blocked) -> bool:
    """Whether two reports differ in their numbers at most."""
    if (one.place, one.requests, one.slice) != (other.place, other.requests, other.slice):
        return False
    columns = ((one.firsts, other.firsts), (one.pushed, other.pushed), (one.awaited, other.awaited))
    return all(np.array_equal(own, others) for own, others in columns)


def _stretches(pushed: U32, awaited: U32) -> U32:
    """Where both columns change, and where they end."""
    changes = np.flatnonzero((pushed[1:] != pushed[:-1]) | (awaited[1:] != awaited[:-1])) + 1
    begin = np.zeros(min(1, len(pushed)), np.intp)
    return np.concatenate([begin, changes, np.array([len(pushed)], np.intp)]).astype(np.uint32)
