"""Leases of examples: which worker trains on which part of the data. Pure.

A pass goes over all examples, `epochs` times each. Examples without a holder are free, in ranges of places in the order
of an epoch, which workers derive from the seed. Invariants:

* Every place of an epoch is free, leased to a single worker, or used.
* A worker uses its ranges in order, so a single number identifies the examples that are used.
* The unused ranges of a lost worker are free again when every server has accounted for its pushes, not before.
* A worker without examples rests: no round, barrier or checkpoint waits for it. Resting workers continue only when all
  others rest, so not in the middle of a step, and when every server awaits them.
* The pass is over when no range is free, leased or unaccounted for, and no worker is joining.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from kvdist.core import machine as fx
from kvdist.core.scheduler.agreement import MemberWait
from kvdist.core.scheduler.membership import Membership
from kvdist.nodes import Member
from kvdist.protocol import messages as msg

SHARES = 8
"""A lease is at most 1 / (SHARES · workers) of the rest of an epoch, so that the wait at its end is short."""

_NUMBERS = ("length", "epochs", "seed")
NO_NUMBERS: Sequence[Sequence[int]] = ((), ())

ALL = 1 << 64
"""More examples than any worker has."""

CheckpointId = tuple[int, int]
"""A checkpoint: (store, number of earlier checkpoints of the store)."""


class Range(NamedTuple):
    """The places `start` … `stop` - 1 in the order of an epoch; a free range may extend into later epochs."""

    epoch: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of places. Not `__len__`, which Python uses to copy a tuple."""
        return self.stop - self.start


class Plan(NamedTuple):
    """Arguments of a sampler."""

    length: int
    epochs: int
    shuffle: bool
    seed: int

    def __str__(self) -> str:
        return f"QueueSampler({self.length}, epochs={self.epochs}, shuffle={self.shuffle}, seed={self.seed})"


class Queue:
    """The free ranges of a pass.

    Args:
        ranges: free ranges.
        length: examples in an epoch.
    """

    def __init__(self, ranges: Iterable[Range] = (), length: int = 1) -> None:
        self.length = length
        self.free = merged(ranges, length)
        """Free ranges, in the order of their leases; no two touch."""

    @classmethod
    def of(cls, plan: Plan) -> Queue:
        """Return the queue of a new pass: a single range for any number of epochs."""
        return cls([Range(0, 0, plan.epochs * plan.length)], max(1, plan.length))

    def lease(self, batch: int, wanted: int, workers: int) -> Range | None:
        """Remove whole batches from the first range, as far as it has them, and return them; None if no range is free.

        Args:
            batch: examples in a batch.
            wanted: maximum number of examples.
            workers: number of workers that share the rest.
        """
        if not self.free:
            return None
        first, end = self.free[0], self.length
        left = sum(min(one.stop, end) - one.start for one in self.free if one.epoch == first.epoch)
        size = max(batch, min(wanted, left // (SHARES * max(1, workers))) // batch * batch)
        taken = Range(first.epoch, first.start, min(first.start + size, first.stop, end))
        self.free[:1] = merged([Range(first.epoch, taken.stop, first.stop)], end)
        return taken

    def give_back(self, ranges: Iterable[Range]) -> None:
        """Make ranges free again."""
        self.free = merged([*self.free, *ranges], self.length)


def merged(ranges: Iterable[Range], length: int) -> list[Range]:
    """Return the places of these ranges, which may overlap, in as few ranges as possible, in order.

    Args:
        ranges: ranges to merge.
        length: examples in an epoch.
    """
    found: list[tuple[int, int]] = []
    for first, stop in sorted((one.epoch * length + one.start, one.epoch * length + one.stop) for one in ranges):
        if found and first <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        elif first < stop:
            found.append((first, stop))
    return [Range(first // length, first % length, first % length + stop - first) for first, stop in found]


def split(ranges: Iterable[Range], count: int) -> tuple[list[Range], list[Range]]:
    """Return the first `count` places of these ranges, or all if they have fewer, and the other places."""
    first: list[Range] = []
    others: list[Range] = []
    for one in ranges:
        middle = min(one.start + count, one.stop)
        count -= middle - one.start
        first += [Range(one.epoch, one.start, middle)] if middle > one.start else []
        others += [Range(one.epoch, middle, one.stop)] if middle < one.stop else []
    return first, others


def position_of(number: int, plan: Plan, left: Iterable[Range]) -> dict[str, Any]:
    """Return a position in the data for a checkpoint, as numbers and lists for JSON.

    Args:
        number: number of the pass.
        plan: arguments of its sampler.
        left: unused ranges of the pass.
    """
    found = merged(left, max(1, plan.length))  # `len` of a range may exceed the largest index
    return {"number": number, **plan._asdict(), "left": [[one.epoch, one.start, one.stop] for one in found]}


def restored(position: Mapping[str, Any]) -> tuple[int, Plan, Queue]:
    """Return the number, the plan and the free ranges of the pass of a `position_of`.

    Raises:
        ValueError: the position is not valid.
    """
    try:
        number, length, epochs, seed = (operator.index(position[name]) for name in ("number", *_NUMBERS))
        left = [Range(*map(operator.index, one)) for one in position["left"]]
        plan = Plan(length, epochs, bool(position["shuffle"]), seed)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the place in the data is not readable ({error})") from None
    for one in left:
        stop = length * (epochs - one.epoch)
        if not (0 <= one.epoch < epochs and 0 <= one.start < length and one.start < one.stop <= stop):
            raise ValueError(f"the place in the data has places that {plan} has not")
    return number, plan, Queue(left, max(1, length))


@dataclass(slots=True)
class LeaseHolder:
    """Leases of a worker.

    Attributes:
        store: store whose pushes show how many examples the worker has used.
        used: number of used examples, of all that were leased to the worker.
        ranges: unused ranges, in the order of their use.
    """

    store: int
    used: int = 0
    ranges: list[Range] = field(default_factory=list)

    def use(self, used: int) -> None:
        """Record the number of used examples; a number below a known number changes nothing."""
        more = max(0, used - self.used)
        self.used += more
        _, self.ranges = split(self.ranges, more)

    @property
    def left(self) -> int:
        """Number of unused examples."""
        return sum(one.size for one in self.ranges)


Answered = tuple[Member, msg.Lease, Range | None, bool, bool]
"""Arguments of `Leases._answer`: worker, request, new range, whether the pass is over, whether the worker has
rested."""


@dataclass(slots=True)
class Marked:
    """Examples that are not used in a checkpoint under way.

    Attributes:
        pushes: number of pushes before the checkpoint.
        ranges: worker → ranges unused when it called for the checkpoint, and leased to it since.
    """

    pushes: int
    ranges: dict[Member, list[Range]] = field(default_factory=dict)


class Leases:
    """The passes of a job, one after another.

    Args:
        membership: members of the cluster.
        go_on: lets agreements go on that have waited only for a worker that rests now.
        numbers: returns (stores, numbers of their next checkpoints), for a worker that has rested.
        is_saving: returns whether a checkpoint is under way.
    """

    def __init__(
        self,
        membership: Membership,
        go_on: Callable[[float], list[fx.Effect]],
        numbers: Callable[[], Sequence[Sequence[int]]],
        is_saving: Callable[[], bool],
    ) -> None:
        self._membership = membership
        self._go_on = go_on
        self._numbers = numbers
        self._is_saving = is_saving
        self._number = -1
        """Number of the pass."""
        self._plan: Plan | None = None
        self._said_by = ""
        self._queue = Queue()
        self._is_over = False
        self._version = 0
        self._holders: dict[Member, LeaseHolder] = {}
        self._waiting: dict[Member, tuple[msg.Lease, float]] = {}
        """Worker that rests, or was never awaited → (its request for a lease, time of the request)."""
        self._unaccounted: set[Member] = set()
        """Lost workers with leases, whose pushes servers have not accounted for."""
        self._marked: dict[CheckpointId, Marked] = {}
        """Checkpoint under way → its unused examples."""
        self._unused_at_snapshot: dict[Member, LeaseHolder] | None = None
        """Worker → ranges that were unused when the present snapshot began, and ranges leased to it since, without
        those that it gave back; None without a snapshot under way."""
        self._snapshot_version = 0
        """Version of the present snapshot."""
        self._snapshot_pass = -1
        """Number of the pass when the present snapshot began; -1 if no pass was under way."""

    # Messages of workers.

    def lease(self, sender: Member, message: msg.Lease, now: float) -> list[fx.Effect]:
        """Lease a worker its next range, or let it rest."""
        refusal = self._refusal(sender, message)
        if refusal:
            return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, refusal))]
        holder = self._holders.setdefault(sender, LeaseHolder(message.store, message.used))
        holder.use(message.used)
        if message.used or sender not in self._membership.since:  # else the version may not exist yet
            self._version = max(self._version, message.version)
        if message.number < self._number:
            return [self._answer(sender, message, None, is_over=True)]
        if self._is_over:
            has_rested = message.rests and self._membership.members.get(sender.node) == sender
            self._tell([(sender, message, None, True, has_rested)])
            return []
        is_resting = sender.node in self._membership.resting
        given = None if is_resting else self._give(sender, message)
        if given or not message.rests:
            return [self._answer(sender, message, given)]
        self._waiting[sender] = (message, now)
        self.advance()
        return self._rest(sender, now) if sender in self._waiting else []

    def used(self, sender: Member, message: msg.Used) -> list[fx.Effect]:
        """Record the used examples of a worker that is about to save, or to leave."""
        holder = self._holders.get(sender, LeaseHolder(0, message.used))
        if message.used > holder.used + holder.left:
            reason = f"{sender} says that it has used {message.used} examples, but it was leased fewer"
            return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, reason))]
        holder.use(message.used)
        if message.gives_back:
            if not holder.ranges:
                reason = f"{sender} gives back examples, but it has none: a lease is given back once"
                return [fx.Send(sender, msg.Failed(message.request, msg.ErrorCode.CONFIG, reason))]
            self._reclaim(sender)
        return [fx.Send(sender, msg.Done(message.request))]

    def on_left(self, member: Member) -> None:
        """Handle the goodbye of a worker: all its pushes count, and its unused ranges are free again."""
        self._waiting.pop(member, None)
        self._reclaim(member)
        self._holders.pop(member, None)

    def on_lost(self, member: Member) -> None:
        """Handle the loss of a worker, before its roster: the number of its used examples is not known yet."""
        self._waiting.pop(member, None)
        if self._holders.get(member, LeaseHolder(0)).ranges and self._membership.servers:
            self._unaccounted.add(member)
        else:
            self._count_as_used(member)
        self.advance()

    def _count_as_used(self, member: Member) -> None:
        self._holders.pop(member, None)

    def account(self, member: Member, fates: Iterable[msg.Fate]) -> None:
        """Free the unused ranges of a lost worker, whose pushes all servers have accounted for."""
        if member in self._unaccounted:
            self._unaccounted.discard(member)
            holder = self._holders.pop(member)
            for fate in fates:
                if fate.store == holder.store:
                    holder.use(fate.examples)
            self._give_back(member, holder)
        self.advance()

    def _refusal(self, sender: Member, message: msg.Lease) -> str:
        """Return the reason to refuse a lease, or ''. Opens the next pass."""
        plan = Plan(message.length, message.epochs, message.shuffle, message.seed)
        if self._plan is None or (self._is_over and message.number == self._number + 1):
            self._plan, self._said_by = plan, str(sender)
            self._number, self._queue, self._is_over = message.number, Queue.of(plan), False
        if message.number > self._number:
            return f"{sender} begins another QueueSampler while {self._plan} of this job has not come to its end"
        if message.number == self._number and plan != self._plan:
            return f"the workers do not agree: {self._said_by} has {self._plan}, {sender} has {plan}"
        return ""

    def _give(self, sender: Member, message: msg.Lease) -> Range | None:
        taken = self._queue.lease(max(1, message.batch), message.wanted, len(self._membership.members))
        if taken is not None:
            if self._unused_at_snapshot is not None:
                self._note_given(self._unused_at_snapshot, sender, taken)
            self._holders[sender].ranges.append(taken)
            for marked in self._marked.values():
                if sender in marked.ranges or self._is_exempt(sender, marked):
                    marked.ranges.setdefault(sender, []).append(taken)
        return taken

    def _reclaim(self, member: Member) -> None:
        holder = self._holders.get(member)
        if holder is not None:
            self._give_back(member, holder)
            holder.ranges = []
            self.advance()

    def _give_back(self, member: Member, holder: LeaseHolder) -> None:
        self._queue.give_back(holder.ranges)
        then = None if self._unused_at_snapshot is None else self._unused_at_snapshot.get(member)
        if then is not None:
            then.ranges, _ = split(then.ranges, then.left - holder.left)

    # Resting.

    def _rest(self, member: Member, now: float) -> list[fx.Effect]:
        """Stop waiting for a worker."""
        if self._membership.rest(member.node):  # else it is not awaited yet
            self._membership.views.is_stale = True
        return self._go_on(now)

    @property
    def idle(self) -> int:
        """Number of newcomers without examples, which are not ready to join before they have some."""
        return sum(self._membership.newcomers.get(member.node) == member for member in self._waiting)

    def advance(self) -> None:
        """End the pass, or let resting workers continue, if it is time."""
        if not self._waiting or self._unaccounted or any(one.ranges for one in self._holders.values()):
            return
        if self._membership.awaited.keys() - {member.node for member in self._waiting}:
            return  # working workers take free ranges first
        if self._is_saving():
            return  # a checkpoint that began without resting workers must not wait for them
        self._is_over = not self._queue.free
        woken: list[Answered] = []
        for member, (message, _) in list(self._waiting.items()):
            given = self._give(member, message)
            if given or self._is_over:
                woken.append((member, message, given, self._is_over, member.node in self._membership.resting))
                del self._waiting[member]
                self._membership.wake(member.node)
        self._tell(woken)

    def _tell(self, woken: list[Answered]) -> None:
        """Answer workers when all servers know which workers rest."""
        self._membership.views.is_stale = True
        self._membership.views.then(partial(self._answer_all, woken))

    def _answer_all(self, woken: list[Answered]) -> list[fx.Effect]:
        return [self._answer(*one) for one in woken]

    def _answer(
        self,
        sender: Member,
        message: msg.Lease,
        given: Range | None,
        is_over: bool = False,
        has_rested: bool = False,
    ) -> fx.Send:
        columns = [np.array(column, np.uint32) for column in (self._numbers() if has_rested else NO_NUMBERS)]
        range_ = given or Range(0, 0, 0)
        leased = msg.Leased(message.request, *range_, is_over, self._version, has_rested, *columns)
        return fx.Send(sender, leased)

    # Checkpoints.

    def mark(self, sender: Member, message: msg.Save) -> None:
        """Record that a worker calls for a checkpoint: examples that it uses later are not in the checkpoint.

        Nor are examples of newcomers, which do not call, as rounds wait for them only later.
        """
        marked = self._marked.setdefault((message.store, message.counter), Marked(message.pushes))
        for member in (sender, *(one for one in self._holders if self._is_exempt(one, marked))):
            marked.ranges.setdefault(member, list(self._holders.get(member, LeaseHolder(0)).ranges))

    def _is_exempt(self, member: Member, marked: Marked) -> bool:
        """Return whether no examples of a worker are in a checkpoint, because it joined later."""
        is_newcomer = self._membership.newcomers.get(member.node) == member
        return is_newcomer or self._membership.since.get(member, -1) >= marked.pushes

    def position(self, checkpoint: CheckpointId) -> dict[str, Any] | None:
        """Return the position of a checkpoint in the data: its pass, and the ranges unused at its moment."""
        if self._plan is None:
            return None
        marked = self._marked[checkpoint].ranges.values() if checkpoint in self._marked else ()
        held = [one for holder in self._holders.values() for one in holder.ranges]
        return position_of(self._number, self._plan, [*self._queue.free, *held, *chain.from_iterable(marked)])

    def saved(self, checkpoint: CheckpointId) -> None:
        """Handle the end of a checkpoint, complete or failed: resting workers may continue."""
        self._marked.pop(checkpoint, None)
        self.advance()

    # Snapshots that servers write by themselves.

    def snapshot_begins(self, version: int) -> None:
        """Note the unused ranges as a snapshot begins: every slice is taken at this version, and none is beyond it."""
        self._unused_at_snapshot = {
            one: replace(holder, ranges=[*holder.ranges]) for one, holder in self._holders.items()
        }
        self._snapshot_version, self._snapshot_pass = version, -1 if self._is_over else self._number

    def _note_given(self, then: dict[Member, LeaseHolder], member: Member, given: Range) -> None:
        """Note a lease during a snapshot, as unused in it if the worker takes part only later."""
        if member not in then:
            is_later = self._membership.since.get(member, -1) >= self._snapshot_version
            then[member] = LeaseHolder(0, ALL if is_later else self._holders[member].used)
        then[member].ranges.append(given)

    def position_at(self, trained: Mapping[int, int]) -> dict[str, Any] | None:
        """Return the position of the present snapshot in the data. Servers have taken it, so later leases are not
        noted.

        Args:
            trained: incarnation of a worker → number of its examples in the snapshot. Lost workers without an entry
                have all their counted examples in it.

        Raises:
            ValueError: another pass has begun since the snapshot began.
        """
        noted, self._unused_at_snapshot = self._unused_at_snapshot or {}, None
        if self._plan is None:
            return None
        if self._snapshot_pass not in (-1, self._number):
            raise ValueError("another pass through the data has begun meanwhile")
        for member, then in noted.items():
            then.use(trained.get(member.incarnation, ALL if member in self._membership.lost else 0))
        left = [one for then in noted.values() for one in then.ranges]
        return position_of(self._number, self._plan, [*self._queue.free, *left])

    def roll_back(self, position: Mapping[str, Any] | None) -> None:
        """Roll back to the position of a snapshot: all leases are void, and no worker rests."""
        if position is not None:
            self.restoring(position)()
            self._said_by = "the snapshot"
        else:
            self._number, self._plan, self._queue, self._is_over = -1, None, Queue(), False
            self._holders.clear()
        self._version, self._unused_at_snapshot = 0, None
        for one in (self._unaccounted, self._waiting, self._marked):
            one.clear()
        for node in list(self._membership.resting):
            self._membership.wake(node)

    def restoring(self, position: Mapping[str, Any]) -> Callable[[], None]:
        """Read a position, and return a function that continues from it. All leases are void then, and the workers know
        it.

        Raises:
            ValueError: the position is not valid.
        """
        return partial(self._restore, *restored(position))

    def _restore(self, number: int, plan: Plan, queue: Queue) -> None:
        self._number, self._plan, self._queue, self._is_over = number, plan, queue, not queue.free
        self._said_by = "the checkpoint that was loaded"
        self._holders.clear()
        self._unaccounted.clear()

    def waits(self) -> Iterator[MemberWait]:
        """Yield the waits of workers without examples for workers that have some."""
        live = {*self._membership.members.values()}
        busy = tuple(member.node for member, one in self._holders.items() if one.ranges and member in live)
        for member, (message, since) in self._waiting.items():
            yield MemberWait(
                member, message.request, since, busy, "the account of lost workers' examples", "use their examples"
            )

    def validate(self) -> None:
        """Check every invariant."""
        held = [one for holder in self._holders.values() for one in holder.ranges]
        places = sorted([*self._queue.free, *held])
        for one, other in pairwise(places):
            between = (other.epoch - one.epoch) * self._queue.length + other.start - one.stop
            assert between >= 0, "a place is leased to one worker at a time"
        assert not (self._is_over and (places or self._unaccounted)), "a pass is over when all is used"
        assert self._unaccounted <= self._holders.keys(), (
            "the ranges of a lost worker are kept until servers have accounted for its pushes"
        )
