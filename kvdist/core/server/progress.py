"""`Quotas`: when workers push, where a policy counts their examples, or them. Pure.

One server counts for all: the one with the slice that the workers name, so no other has to know. What it says is only
*when* each worker makes its next push, a mean of what it has by then. A version is still made of one push of every
worker, so all slices agree on what is in it, and what is lost, repeated or rolled back is treated as ever. Where each
push is a version, `Turns` says when a worker may make it, and how late it is. Rules here:

* Reports say how much there is since the last push, not how much more, so one that is repeated changes nothing. Its
  worker waits, and hears who is awaited.
* A worker that has pushed for the n-th time has heard that it was due. So a server that knows nothing, as it has the
  slices of a lost one, learns from the newest report of each worker what that one had said. Of a worker that has joined
  later, only from its second push on. How long workers come after a quorum, and who is how far ahead, it learns anew.
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
        self._turns: dict[int, Turns] = {}

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
        if message.when in (msg.DueWhen.STALE, msg.DueWhen.BUFFERED):
            return self._turns.setdefault(message.slice, Turns(self._peers)).heard(sender, message)
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
        looked = [effect for number in self._said for effect in self._look(number, now)]
        return [*looked, *(effect for turns in self._turns.values() for effect in turns.roster())]

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
        if one.when == msg.DueWhen.BACKUP:
            return len(ready) >= max(1, len(busy) - one.quota)
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


class Turns:
    """When each worker may make its next push, in a store where every push is a version.

    Args:
        peers: who is there.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._made: dict[Member, int] = {}
        """How many pushes a worker has completed; one that comes later begins where the slowest is."""
        self._asked: dict[Member, msg.Progress] = {}
        """The questions that have no answer."""
        self._answered: dict[Member, msg.Due] = {}
        """The last answers."""
        self._let_through = 0
        """How many pushes were."""
        self._seen: dict[Member, int] = {}
        """How many of those the weights of a worker have, at least."""
        self._meeting: dict[Member, int] = {}
        """Who waits at a barrier, perhaps for one that is held here → its number."""
        self._passed = 0
        """How many barriers were passed."""

    def heard(self, sender: Member, message: msg.Progress) -> list[fx.Effect]:
        """A worker asks whether it may push."""
        self._enrol()
        self._hear_of_barrier(sender, message)
        if message.together:
            return self._look()
        last = self._answered.get(sender)
        if last is not None and message.step <= last.step:
            return [fx.Send(sender, last)]
        is_repeated = self._asked.get(sender) == message
        if sender not in self._asked:
            self._made[sender] = self._made.get(sender, 0) + (last is not None)
        self._asked[sender] = message
        effects = self._look()
        if effects or not is_repeated:
            return effects
        least = self._made[sender] - message.quota
        behind = [one.node.rank for one in self._not_met if self._made.get(one, 0) < least]
        return [fx.Send(sender, msg.NotDue(message.slice, message.step, tuple(behind)))]

    def roster(self) -> list[fx.Effect]:
        """Others are there, or rest."""
        for known in (self._made, self._asked, self._answered, self._seen, self._meeting):
            for gone in [one for one in known if not self._peers.has(one)]:
                del known[gone]
        self._enrol()
        return self._look()

    def _hear_of_barrier(self, sender: Member, message: msg.Progress) -> None:
        """Who has passed a barrier shows that all have. One that has joined later counts barriers from there on."""
        self._meeting.pop(sender, None)
        joined = self._peers.joined
        if sender.node.rank in joined or (message.together and message.samples > self._passed):
            if message.together:
                self._meeting[sender] = message.samples
        elif not message.together:
            self._passed = max(self._passed, message.samples if message.when == msg.DueWhen.STALE else 0)
            over = [one for one, number in self._meeting.items() if number <= self._passed]
            for one in over:
                if one.node.rank not in joined:
                    del self._meeting[one]

    @property
    def _slowest(self) -> int:
        return min([self._made.get(one, 0) for one in self._not_met], default=0)

    @property
    def _not_met(self) -> list[Member]:
        """The workers that are awaited, and are not at a barrier."""
        there = [self._peers.workers[rank] for rank in sorted(self._peers.awaited) if rank in self._peers.workers]
        return [one for one in there if one not in self._meeting]

    def _enrol(self) -> None:
        awaited = [self._peers.workers[rank] for rank in self._peers.awaited if rank in self._peers.workers]
        least = min([self._made[one] for one in awaited if one in self._made], default=0)
        for one in awaited:
            self._made.setdefault(one, least)
            self._seen.setdefault(one, self._let_through)

    def _look(self) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        for member, message in list(self._asked.items()):
            if message.when == msg.DueWhen.STALE and self._made[member] - self._slowest > message.quota:
                continue
            delay = self._let_through - self._seen.get(member, self._let_through)
            self._let_through += message.when == msg.DueWhen.STALE or delay <= message.quota
            self._seen[member] = self._let_through
            self._answered[member] = due = msg.Due(message.slice, message.step, False, delay)
            del self._asked[member]
            effects.append(fx.Send(member, due))
        return effects
