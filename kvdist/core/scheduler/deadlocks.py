"""The scheduler's search for deadlocks: workers all of whose threads wait for each other. Pure.

A worker that reports (`core.worker.pending`) waits with all its threads. It is in a deadlock if all its waits need an
action of another worker in the deadlock: another push of a slice, the initialisation of a key, arrival at a barrier.
If a push is not due yet, any worker that the server awaits may make it due, so all of them must be in the deadlock.
From all workers that report, those that can go on are removed until none can; the rest wait for ever.

A single search is not enough. The next search, after `CONFIRM_S`, must yield the same set with the same reports, and
then each of its members must confirm its report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass

import numpy as np

from kvdist.core import machine as fx
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U32

LOOK_AFTER_S = 0.5
"""Time in which reports are collected for a common search."""
CONFIRM_S = 2.0
NAMED_MAX = 8
"""Maximum number of workers that the error names."""
LEAVING = "leaving the cluster"
"""`Blocked.call` of a worker whose program has ended."""

Waits = Mapping[tuple[int, int], Set[int]]
"""(rank of a worker, its request) → ranks of the workers that must act first."""
KeyOf = Callable[[int], int | str]
"""Number of a slice → its key."""


@dataclass(slots=True)
class _Blocked:
    """A report and its sender."""

    member: Member
    said: msg.Blocked


class Deadlocks:
    """Reports of the workers, and the set of workers that is being confirmed."""

    def __init__(self) -> None:
        self.due = fx.NEVER
        """Time at which `look` should run."""
        self._blocked: dict[int, _Blocked] = {}
        self._found: dict[int, int] = {}
        """Rank → number of its report, for the result of the last search."""
        self._unconfirmed: set[int] | None = None
        """Workers of that result that were asked to confirm and have not answered; None before they are asked."""

    def report(self, sender: Member, message: msg.Blocked, now: float) -> None:
        """Record that a worker waits, goes on, or confirms its report."""
        rank = sender.node.rank
        if message.call:
            self._blocked[rank] = _Blocked(sender, message)
        else:
            self._blocked.pop(rank, None)
        if self._unconfirmed is not None and self._found.get(rank) == message.number:
            self._unconfirmed.discard(rank)
        self.due = min(self.due, now + LOOK_AFTER_S)

    def forget(self, member: Member, now: float) -> None:
        """Forget the report of a lost worker, and the confirmation that it cannot send."""
        self._blocked.pop(member.node.rank, None)
        self._found, self._unconfirmed = {}, None
        if self._blocked:
            self.due = min(self.due, now + LOOK_AFTER_S)

    def look(self, live: Set[int], waits: Waits, key_of: KeyOf, now: float) -> tuple[list[fx.Effect], str]:
        """Search again.

        Args:
            live: ranks of the workers that have not left.
            waits: requests to the scheduler that wait for workers.
            key_of: returns the key of a slice.
            now: the time.

        Returns:
            Questions to workers, and the error text of a certain deadlock, or ''.
        """
        self._blocked = {rank: one for rank, one in self._blocked.items() if rank in live}
        members = self._stuck(live, waits)
        found = {rank: one.said.number for rank, one in members.items()}
        if not found:
            self._found, self._unconfirmed, self.due = {}, None, fx.NEVER
            return [], ""
        if found != self._found:
            self._found, self._unconfirmed = found, None
            self.due = now + CONFIRM_S
            return [], ""
        if self._unconfirmed is None:
            self._unconfirmed = set(found)
            self.due = fx.NEVER  # until the workers answer
            return [fx.Send(one.member, msg.CheckBlocked()) for one in members.values()], ""
        if self._unconfirmed:
            self.due = fx.NEVER
            return [], ""
        return [], _sentence(members, waits, key_of)

    def _stuck(self, live: Set[int], waits: Waits) -> dict[int, _Blocked]:
        members = dict(self._blocked)
        while members:
            bounds = np.unique(np.concatenate([one.said.firsts for one in members.values()]))
            columns = [_at(one.said.firsts, one.said.pushed, bounds) for one in members.values()]
            fewest = np.min(columns, axis=0, initial=np.iinfo(np.uint32).max)
            stuck = {
                rank: one
                for rank, one in members.items()
                if _waits_for(rank, one.said, members.keys(), live, waits, bounds, fewest)
            }
            if len(stuck) == len(members):
                return members
            members = stuck
        return {}


def _at(firsts: U32, column: U32, bounds: U32) -> U32:
    """Return the value of a column in each stretch that begins at `bounds`; 0 before the first stretch of the
    report."""
    stretches = np.searchsorted(firsts, bounds, side="right")
    return np.concatenate([np.zeros(1, np.uint32), column])[stretches]


def _waits_for(
    rank: int, said: msg.Blocked, members: Set[int], live: Set[int], waits: Waits, bounds: U32, fewest: U32
) -> bool:
    """Return whether every wait of a worker needs one of `members` to act first."""
    reports_to = live & set(said.awaits)
    awaited = _at(said.firsts, said.awaited, bounds)
    waits_for_rounds = awaited > 0
    if not (said.requests or waits_for_rounds.any() or reports_to) or not reports_to <= members:
        return False
    if any(members.isdisjoint(waits.get((rank, request), ())) for request in said.requests):
        return False
    return bool((fewest < awaited)[waits_for_rounds].all())


# The error text.


def _sentence(members: Mapping[int, _Blocked], waits: Waits, key_of: KeyOf) -> str:
    chain = _cycle(members, waits)
    others = [rank for rank in sorted(members) if rank not in chain]
    shown = (chain + others)[:NAMED_MAX]
    texts = [_told(rank, members, waits, key_of) for rank in shown]
    if len(shown) < len(members):
        texts.append(f"{len(members) - len(shown)} more workers wait as well")
    calls = [rank for rank in shown if _slice(members[rank].said)[0] < 0 and members[rank].said.call != LEAVING]
    pushes = any(_slice(one.said)[0] >= 0 for one in members.values())
    if calls and len(calls) < len(members):
        names = " and ".join(f"worker-{rank}" for rank in calls)
        advice = f"Every worker must make the call of {names}, outside of any `if rank == 0:`"
    else:
        advice = "Every worker must make the same calls in the same order"
    if pushes:
        advice += "; where workers have different numbers of batches, take `with trainer.join():` or a QueueSampler"
    return f"deadlock: {'; '.join(texts)}. {advice}"


def _cycle(members: Mapping[int, _Blocked], waits: Waits) -> list[int]:
    """Return a cycle of workers, each waiting for the next, from its lowest rank on."""
    chain: list[int] = []
    rank = min(members)
    while rank not in chain:
        chain.append(rank)
        rank = min(_awaited(rank, members, waits))
    chain = chain[chain.index(rank) :]
    lowest = chain.index(min(chain))
    return chain[lowest:] + chain[:lowest]


def _awaited(rank: int, members: Mapping[int, _Blocked], waits: Waits) -> list[int]:
    """Return the members for which the newest call of a worker waits."""
    number, awaited = _slice(members[rank].said)
    if number < 0:
        said = members[rank].said
        return sorted(members.keys() & (waits[rank, said.requests[-1]] if said.requests else said.awaits))
    return [other for other, one in sorted(members.items()) if _pushes(one.said.pushed, one.said, number) < awaited]


def _slice(said: msg.Blocked) -> tuple[int, int]:
    """Return the slice for whose round a worker waits, and the number of pushes that all must reach; -1 without a
    round."""
    if said.slice >= 0 and (awaited := _pushes(said.awaited, said, said.slice)):
        return said.slice, awaited
    if said.requests or not said.awaited.any():
        return -1, 0
    stretch = int(np.flatnonzero(said.awaited)[0])
    return int(said.firsts[stretch]), int(said.awaited[stretch])


def _pushes(column: U32, said: msg.Blocked, number: int) -> int:
    return int(_at(said.firsts, column, np.array([number], np.uint32))[0])


def _told(rank: int, members: Mapping[int, _Blocked], waits: Waits, key_of: KeyOf) -> str:
    one = members[rank]
    names = ", ".join(f"worker-{other}" for other in _awaited(rank, members, waits)[:NAMED_MAX])
    number, awaited = _slice(one.said)
    if number < 0:
        return f"worker-{rank} waits for {names} in {one.said.call}"
    return f"worker-{rank} waits for {names} to push {name_of(key_of(number))} (step {awaited}), in {one.said.call}"
