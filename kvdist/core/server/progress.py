"""`Quotas`: when workers push, where a policy counts their examples, or them. Pure.

One server counts for all: the one with the slice that the workers name, so no other has to know. What it says is only
*when* each worker makes its next push, a mean of what it has by then. A version is still made of one push of every
worker, so all slices agree on what is in it, and what is lost, repeated or rolled back is treated as ever. Where each
push is a version, `Delays` says how late it is, before the worker makes it. Rules here:

* Reports say how much there is since the last push, not how much more, so one that is repeated changes nothing. Its
  worker waits, and hears who is awaited.
* A worker that has pushed for the n-th time has heard that it was due. So a server that knows nothing, as it has the
  slices of a lost one, learns from the newest report of each worker what that one had said. Of a worker that has joined
  later, only from its second push on. How long workers come after a quorum, and how late pushes are, it learns anew.
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
"""A version waits so many times as long as workers have come after a quorum lately …"""
REACH = 0.25
"""… of those that came within this part of the time that the version has taken until its quorum was there."""
RECENT = 16
"""How many arrivals after a quorum are known."""


class Quotas:
    """What the workers have said of their progress, and what they were told.

    Args:
        peers: who is there.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._said: dict[int, dict[Member, msg.Progress]] = {}
        """Slice → the newest report of each worker."""
        self._due: dict[int, msg.Due] = {}
        """Slice → what all were told last."""
        self._graces: dict[int, Grace] = {}
        self._delays: dict[int, Delays] = {}

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return min((grace.until for grace in self._graces.values()), default=fx.NEVER)

    def tick(self, now: float) -> list[fx.Effect]:
        """Wait no longer for those beyond a quorum."""
        effects: list[fx.Effect] = []
        for number, grace in self._graces.items():
            if grace.until <= now:
                effects += self._look(number, now)
                grace.until = fx.NEVER  # also if those are gone that were ready
        return effects

    def heard(self, sender: Member, message: msg.Progress, now: float) -> list[fx.Effect]:
        """A worker reports."""
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
        """Others are there, or rest."""
        for number, said in self._said.items():
            self._said[number] = {one: report for one, report in said.items() if self._peers.has(one)}
        for delays in self._delays.values():
            delays.roster()
        return [effect for number in self._said for effect in self._look(number, now)]

    def clear(self) -> None:
        """All have gone back to a snapshot."""
        self._said.clear()
        self._due.clear()
        self._graces.clear()

    def _look(self, number: int, now: float) -> list[fx.Effect]:
        """Say whether the next push of a slice is due."""
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
        """Whether these reports of the open version suffice for it. Who waits for all others is not waited for."""
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
    """How long a version waits for workers beyond its quorum: as long as such have needed lately, and a little more.

    Who comes much later, as a slow machine does every time, makes nobody wait.
    """

    def __init__(self) -> None:
        self.until = fx.NEVER
        """When the present version waits no longer; never, while its quorum is not there."""
        self._begun = 0.0
        """When the version before was due."""
        self._reached: float | None = None
        """When the quorum of the present version was there."""
        self._ready: set[int] = set()
        """Who is ready for it."""
        self._late: set[int] = set()
        """The ranks that were not ready for the version before …"""
        self._before = 0.0
        """… whose quorum was there at this time."""
        self._delays: deque[float] = deque(maxlen=RECENT)
        """How long after a quorum others came, in seconds."""

    def look(self, ready: Set[int], quorum: int, now: float) -> None:
        """These workers are ready now."""
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
        """The version is due."""
        self._late = set() if self._reached is None else set(awaited) - self._ready
        self._delays += [math.inf] * len(self._late)  # so that what they once needed is forgotten
        self._before = now if self._reached is None else self._reached
        self._begun, self._reached, self.until = now, None, fx.NEVER
        self._ready = set()


class Delays:
    """How late each push is, in a store where every push is a version.

    Args:
        peers: who is there.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._let_through = 0
        """How many pushes were not too late."""
        self._seen: dict[Member, int] = {}
        """How many of those the weights of a worker have, at least."""
        self._answered: dict[Member, msg.Due] = {}
        """The last answers."""

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
        """Others are there, or rest."""
        self._seen = {one: count for one, count in self._seen.items() if self._peers.has(one)}
        self._answered = {one: due for one, due in self._answered.items() if self._peers.has(one)}
        self._enrol()

    def _enrol(self) -> None:
        """Weights of workers that are new here have all pushes so far."""
        for rank in self._peers.awaited & self._peers.workers.keys():
            self._seen.setdefault(self._peers.workers[rank], self._let_through)
