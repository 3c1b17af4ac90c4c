"""`Quotas`: when workers push, under policies that count their examples or the workers themselves. Pure.

A single server counts for all: the owner of the slice that the workers name, so no other server has to know. It only
announces *when* each worker makes its next push, a mean of its accumulated gradient. A version still consists of a push
of every worker, so all slices agree on its content, and losses, repetitions and rollbacks need no special treatment.
Where each push is a version, `Delays` reports how stale a push is, before the worker makes it. Rules:

* Reports hold totals since the last push, not increments, so a repeated report changes nothing. Its sender waits, and
  the answer names the workers that are awaited.
* A worker makes its n-th push only after an announcement that it is due. So a server without state, which has taken
  over the slices of a lost server, infers the last announcement from the newest report of each worker; from a worker
  that has joined later, only after its second push. How long workers come after a quorum, and how stale pushes are, it
  measures anew.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Set

from kvdist.core import machine as fx
from kvdist.core.server.peers import Peers
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

GRACE = 1.5
"""A version waits beyond its quorum for this multiple of the longest recent delay of a worker …"""
REACH = 0.25
"""… among the delays of at most this fraction of the time that the version has taken to reach its quorum."""
RECENT = 16
"""Number of arrivals after a quorum whose delays are remembered."""


class Quotas:
    """The workers' reports of their progress, and the announcements of due pushes.

    Args:
        peers: record of the live workers.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._said: dict[int, dict[Member, msg.Progress]] = {}
        """Slice → the newest report of each worker."""
        self._due: dict[int, msg.Due] = {}
        """Slice → the last announcement to all workers."""
        self._graces: dict[int, Grace] = {}
        self._delays: dict[int, Delays] = {}

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return min((grace.until for grace in self._graces.values()), default=fx.NEVER)

    def tick(self, now: float) -> list[fx.Effect]:
        """Announce pushes whose quorum has waited long enough for the other workers."""
        effects: list[fx.Effect] = []
        for number, grace in self._graces.items():
            if grace.until <= now:
                effects += self._look(number, now)
                grace.until = fx.NEVER  # also if those are gone that were ready
        return effects

    def heard(self, sender: Member, message: msg.Progress, now: float) -> list[fx.Effect]:
        """Handle a worker's report."""
        if message.when == msg.DueWhen.ASYNC:
            return [self._delays.setdefault(message.slice, Delays(self._peers)).heard(sender, message)]
        said, due = self._said.setdefault(message.slice, {}), self._due.get(message.slice)
        is_repeated, said[sender] = said.get(sender) == message, message
        if due is not None and message.step <= due.step:
            return [fx.Send(sender, due)]
        effects = self._look(message.slice, now)
        if effects or not is_repeated:
            return effects
        return [fx.Send(sender, msg.NotDue(message.slice, message.step, self._awaited_with(message, sender)))]

    def _awaited_with(self, report: msg.Progress, sender: Member) -> tuple[int, ...]:
        """The ranks of the workers any of which may still do something for the push of a report to be due."""
        reports = [(one.node.rank, other) for one, other in self._said[report.slice].items()]
        said = {rank: other for rank, other in reports if other.step == report.step}
        together = {rank for rank, other in said.items() if other.together}
        ready = {rank for rank, other in said.items() if other.samples and other.when != msg.DueWhen.QUOTA}
        done = together if report.together else together | ready | {sender.node.rank}
        return tuple(sorted(self._peers.awaited - done))

    def roster(self, now: float) -> list[fx.Effect]:
        """Handle a change of the roster or of the resting workers: drop reports of departed workers and check all
        slices."""
        for number, said in self._said.items():
            self._said[number] = {one: report for one, report in said.items() if self._peers.has(one)}
        for delays in self._delays.values():
            delays.roster()
        return [effect for number in self._said for effect in self._look(number, now)]

    def clear(self) -> None:
        """Forget all reports and announcements: all processes go back to a snapshot."""
        self._said.clear()
        self._due.clear()
        self._graces.clear()

    def _look(self, number: int, now: float) -> list[fx.Effect]:
        """Announce the next push of a slice if it is due."""
        said, told = self._said[number], self._due.get(number)
        if not said:
            return []
        since = self._peers.since
        pushed = [report.step for one, report in said.items() if report.step > since.get(one.node.rank, 0)]
        open_ = max(-1 if told is None else told.step + 1, min(report.step for report in said.values()), *pushed, 0)
        reports = {one.node.rank: report for one, report in said.items() if report.step == open_}
        awaited = {rank for rank in self._peers.awaited if since.get(rank, 0) <= open_}
        together = awaited <= {rank for rank, report in reports.items() if report.together}
        is_enough = self._is_enough(number, reports, awaited, now)
        if any(together or report.now or is_enough for report in reports.values()):
            if number in self._graces:
                self._graces[number].over(awaited, now)
            return self._tell(msg.Due(number, open_, together, 0))
        if any(report.step < open_ for report in said.values()) and (told is None or told.step < open_ - 1):
            return self._tell(msg.Due(number, open_ - 1, False, 0))
        return []

    def _is_enough(self, number: int, reports: Mapping[int, msg.Progress], awaited: Set[int], now: float) -> bool:
        """Whether these reports of the open version suffice for it. A worker that waits for all others is not
        awaited."""
        one = next(iter(reports.values()), None)
        if one is None or one.when == msg.DueWhen.QUOTA:
            return one is not None and sum(report.samples for report in reports.values()) >= one.quota
        busy = awaited - {rank for rank, report in reports.items() if report.together}
        ready = {rank for rank, report in reports.items() if report.samples and not report.together}
        grace = self._graces.setdefault(number, Grace())
        grace.look(ready, max(1, min(one.quota, len(busy))), now)
        return bool(ready) and (busy <= ready or now >= grace.until)

    def _tell(self, due: msg.Due) -> list[fx.Effect]:
        self._due[due.slice] = due
        return [fx.Send(member, due) for member in self._peers.workers.values()]


class Grace:
    """How long a version waits for workers beyond its quorum: as long as they have needed lately, and a little more.

    A worker that comes much later, as a slow machine does every time, delays no other.
    """

    def __init__(self) -> None:
        self.until = fx.NEVER
        """When the present version stops waiting; never, before it has reached its quorum."""
        self._begun = 0.0
        """When the previous version was due."""
        self._reached: float | None = None
        """When the present version reached its quorum; None before."""
        self._ready: set[int] = set()
        """Ranks that are ready for the present version."""
        self._late: set[int] = set()
        """Ranks that were not ready for the previous version …"""
        self._before = 0.0
        """… which reached its quorum at this time."""
        self._delays: deque[float] = deque(maxlen=RECENT)
        """Recent delays of workers after a quorum, in seconds."""

    def look(self, ready: Set[int], quorum: int, now: float) -> None:
        """Record the workers that are ready now."""
        for rank in ready - self._ready:
            if self._reached is not None:
                self._delays.append(now - self._reached)
            elif rank in self._late:
                self._delays.append(now - self._before)
        self._late -= ready
        self._ready |= ready
        if len(ready) < quorum:
            self._reached, self.until = None, fx.NEVER
        elif self._reached is None:
            self._reached = now
            reach = REACH * (now - self._begun)
            self.until = now + GRACE * max((delay for delay in self._delays if delay <= reach), default=0.0)

    def over(self, awaited: Set[int], now: float) -> None:
        """End the present version, which is due."""
        self._late = set() if self._reached is None else set(awaited) - self._ready
        self._delays += [math.inf] * len(self._late)  # so that what they once needed is forgotten
        self._before = now if self._reached is None else self._reached
        self._begun, self._reached, self.until = now, None, fx.NEVER
        self._ready = set()


class Delays:
    """Staleness of each push, in a store where every push is a version.

    Args:
        peers: record of the live workers.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._let_through = 0
        """Number of pushes that were not too stale."""
        self._seen: dict[Member, int] = {}
        """Worker → lower bound of the number of such pushes that its weights include."""
        self._answered: dict[Member, msg.Due] = {}
        """Worker → the last answer to it."""

    def heard(self, sender: Member, message: msg.Progress) -> fx.Effect:
        """Answer a worker that is about to push."""
        self._enrol()
        last = self._answered.get(sender)
        if last is None or message.step > last.step:
            delay = self._let_through - self._seen.get(sender, self._let_through)
            self._let_through += delay <= message.quota
            self._seen[sender] = self._let_through
            last = self._answered[sender] = msg.Due(message.slice, message.step, False, delay)
        return fx.Send(sender, last)

    def roster(self) -> None:
        """Handle a change of the roster or of the resting workers."""
        self._seen = {one: count for one, count in self._seen.items() if self._peers.has(one)}
        self._answered = {one: due for one, due in self._answered.items() if self._peers.has(one)}
        self._enrol()

    def _enrol(self) -> None:
        """Record that the weights of new workers include all pushes so far."""
        for rank in self._peers.awaited & self._peers.workers.keys():
            self._seen.setdefault(self._peers.workers[rank], self._let_through)
