"""A rank's side of the consistency checks: report calls, and wait for agreement where it is needed.

States of an operation: *called* (reported at once, so agreement runs ahead of the work) → *waited*, unless the response
cache predicts it → *admitted*, *refused* (ranks differ: `CollectiveMismatch`, the group goes on), or *ended* (a rank
was lost or the group has failed) → *done*. A predicted operation is admitted at once and reported at the next tick of
the control thread, or with 64 others. Calls behind an operation that waits also wait, so rank 0 can change the order of
waiting calls, and the response cache depends only on the order in which all ranks do them.

The calls of a group are numbered on each rank; *sequence* is the number of an operation, the same on all ranks.

Threads of users and groups ask, the control thread brings answers. Groups are called without holding the lock.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Protocol

from kvdist.collective.signature import ALWAYS_AGREED, JOIN, Signature
from kvdist.config.exit_codes import exit_with_peer_lost
from kvdist.errors import CollectiveError, CollectiveMismatch, RankLostError, first_line
from kvdist.protocol.collective import (
    DIGEST_BYTES,
    ENTRY_BYTES,
    WHOLE_JOB,
    Agreed,
    AllJoined,
    CallReport,
    DefineOperation,
    GroupFailed,
    GroupMembers,
    LastCalls,
    Mismatch,
    OperationFailed,
    Participate,
    RankBye,
    RankGone,
    RankLeaving,
    RankWaits,
    Reorder,
    StallWarning,
    Throttle,
    ToCoordinator,
    ToMember,
)

PAST = 16
"""Length, in operations, of the context that predicts the next operation where the last operation alone does not."""
STEPS_MAX = 32_768
"""Transitions that are remembered. Beyond this all are forgotten: some programs use a new name for each call."""

_AMBIGUOUS = b""


class ResponseCache:
    """Predicts the next operation of a group from the previous operations, on all ranks alike.

    Gloo combines data that does not belong together, and ends a process that receives more bytes than it expects. So
    where ranks differ, at most one side may have begun. An operation is *predicted* if it came after the same previous
    operation before, and no other operation ever followed that. Where several did, such as a metric after some of the
    steps, the last `PAST` operations are the context; if several followed even these, the ranks ask each time.

    All ranks predict the same, because they record the same operations in the same order. Pure; a separate cache for
    each group.
    """

    def __init__(self) -> None:
        self._past = b""
        self._next: dict[bytes, bytes] = {}

    def begin(self, digest: bytes) -> bool:
        """Whether an operation is predicted; if so, record it."""
        past = self._past
        if self._next.get(past) == digest:
            self._past = (past + digest)[-PAST * DIGEST_BYTES :]
            return True
        if self._next.get(past[-DIGEST_BYTES:]) == digest:
            self.agree(digest)
            return True
        return False

    def agree(self, digest: bytes) -> None:
        """Record an operation that all ranks do next."""
        past = self._past
        if len(self._next) >= 2 * STEPS_MAX:
            self._next.clear()
        for context in (past[-DIGEST_BYTES:], past):
            if self._next.setdefault(context, digest) != digest:
                self._next[context] = _AMBIGUOUS
        self._past = (past + digest)[-PAST * DIGEST_BYTES :]

    def restart(self) -> None:
        """Forget everything: ranks have called different operations, or have not seen the operations of the others."""
        self._past = b""
        self._next.clear()


Turn = int | Mismatch | Participate | AllJoined
"""Next action of a group: do the call of this rank with this number; refuse a call; take part in an operation of the
others while this rank has joined; end its `join`."""


@dataclass(slots=True)
class _GroupCalls:
    """The operations of a group on this rank.

    Attributes:
        called, reported: numbers of calls.
        admitted, done, reported_done: numbers of operations.
        cache: predicts the next operation.
        unreported: entries for the next `CallReport`.
        waited: calls that are not admitted yet → their digests, in the order of the program.
        turns: admitted actions that have not begun.
        is_throttled: whether every operation waits for agreement.
        ends_at, end: the first operation that is not admitted any more, and the error.
    """

    called: int = 0
    reported: int = 0
    admitted: int = 0
    done: int = 0
    reported_done: int = 0
    cache: ResponseCache = field(default_factory=ResponseCache)
    unreported: bytearray = field(default_factory=bytearray)
    waited: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    turns: deque[Turn] = field(default_factory=deque)
    is_throttled: bool = False
    ends_at: int | None = None
    end: BaseException | None = None

    def admit(self, turn: Turn) -> None:
        """Admit an action as the next operation."""
        self.turns.append(turn)
        self.admitted += 1

    def admit_until(self, sequence: int) -> None:
        """Admit calls in the order of the program, before operation `sequence`."""
        while self.waited and self.admitted < sequence:
            number, digest = self.waited.popitem(last=False)
            self.cache.agree(digest)
            self.admit(number)

    def hear(self, message: Agreed | Reorder | Mismatch | Participate | AllJoined) -> None:
        """Admit operations as a message of rank 0 asks."""
        self.admit_until(message.sequence)
        match message:
            case Reorder(call=call) if call in self.waited:
                self.cache.agree(self.waited.pop(call))
                self.admit(call)
            case Mismatch(call=call) if call in self.waited:
                self.waited.pop(call)
                self.cache.restart()
                self.admit(message)
            case Participate():
                self.admit(message)
            case AllJoined():
                self.waited.clear()  # nothing but `join` is left
                # This rank does not know what the others called meanwhile.
                self.cache.restart()
                self.admit(message)


class ConsistencyCheck:
    """Checks that the ranks of a group are at the same operation, and explains failures; a rank alone always agrees.

    With several ranks it is a `CoordinatedCheck`.
    """

    def __init__(self) -> None:
        # Messages about a group may come before this rank has entered it.
        self._calls_of: defaultdict[int, _GroupCalls] = defaultdict(_GroupCalls)

    def called(self, group: int, signature: Signature) -> int:
        """Record the next operation that the program calls in a group; return its number. Does not block."""
        calls = self._calls_of[group]
        calls.admit(AllJoined(group, calls.admitted, 0) if signature.kind == JOIN else calls.called)
        calls.called += 1
        return calls.called - 1

    def has_next(self, group: int) -> bool:
        """Whether `next` returns or raises at once."""
        return True

    def next(self, group: int, sequence: int) -> Turn:
        """Block on the group's thread until the next action of the group is known.

        Raises:
            CollectiveError: a rank was lost, or the group has failed.
        """
        return self._calls_of[group].turns.popleft()

    def done(self, group: int) -> None:
        """Record that an operation has ended, successfully or not."""

    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        """Return the error for the user in place of torch's; may wait a moment for the cause."""
        return CollectiveError(f"{signature} failed: {error}")


BATCH = 64
"""Predicted operations that are reported together."""
ALIVE_S = 1.0
"""Interval at which a waiting rank reports that it is alive."""
DEFINED_MAX = 32_768
"""Signatures that rank 0 is assumed to remember. Beyond this all are sent again."""
STUCK_S = 1.0
"""Time after which a process reports that all its threads wait: if all ranks report it, rank 0 refuses operations that
can never pair."""
EXPLAIN_S = 4.0
"""Time that rank 0 may take to explain an error of torch: longer than `coordinator.EXPLAIN_S`."""
LEFT = "it has called shutdown() or has ended"
"""The cause named for a rank that left without a failure."""

_NO_WAIT, _WAIT = b"\0", b"\1"


class Failable(Protocol):
    """A group, open or still connecting, whose operations can be failed."""

    number: int
    ranks: tuple[int, ...]
    is_open: bool

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """Fail the operations from `from_sequence` on; `error_of` creates the error from the operation that is waited
        for."""

    def stuck_at(self, since: float, one_left: bool) -> int | None:
        """The first operation that the program waits for, if it can call no other before that ends.

        All its threads have waited since `since`; or, where a member has left, those that wait for this group.
        """


class CoordinatedCheck(ConsistencyCheck):
    """The check of a job with several ranks, which asks the coordinator on rank 0.

    Args:
        rank: rank of this process.
        host: host name of this process.
        wake: wakes the control thread; safe from any thread.
        warn: logs a sentence for the user.
    """

    def __init__(self, rank: int, host: str, wake: Callable[[], None], warn: Callable[[str], None]) -> None:
        super().__init__()
        self.rank = rank
        self._host = host
        self._wake = wake
        self._warn = warn
        self._changed = threading.Condition(threading.Lock())
        self._groups: dict[int, Failable] = {}
        self._defined: set[bytes] = set()
        self._outbox: deque[ToCoordinator] = deque()
        self._ends: list[tuple[int, Callable[[str], BaseException], int]] = []
        """(group, error, the rank whose departure caused it or -1): for groups that begin later."""
        self._leaving: list[tuple[int, Callable[[str], BaseException], dict[int, int]]] = []
        """(rank, error, calls per group) of leaving ranks, which call no more operations: for groups that begin
        later."""
        self._said_alive = 0.0
        self._said_stuck = 0.0

    # On the threads of users and groups.

    def enter(self, group: Failable) -> None:
        """Add a group: first as a `ConnectingGroup`, then the connected group."""
        with self._changed:
            is_known = group.number in self._groups
            self._groups[group.number] = group
            # Not at the first operation: the control thread iterates over this dict meanwhile.
            self._calls_of[group.number]
            if group.number and not is_known:
                self._outbox.append(GroupMembers(group.number, group.ranks))
            ends, leaving = list(self._ends), list(self._leaving)
        for number, error_of, rank in ends:
            if number in (WHOLE_JOB, group.number) or rank in group.ranks:
                self._end(group.number, error_of)
        for rank, error_of, counts in leaving:
            self._limit(group, rank, error_of, counts)

    def leave(self, number: int) -> None:
        """Remove a group."""
        with self._changed:
            self._groups.pop(number, None)
            self._calls_of.pop(number, None)

    def called(self, group: int, signature: Signature) -> int:
        digest = signature.digest
        calls = self._calls_of[group]
        with self._changed:
            number = calls.called
            calls.called += 1
            is_special = signature.kind in ALWAYS_AGREED or signature.is_refused
            must_wait = calls.waited or calls.is_throttled or is_special
            waits = must_wait or not calls.cache.begin(digest)
            if waits:
                calls.waited[number] = digest
                if digest not in self._defined:
                    self._define(digest, signature)
            else:
                calls.admit(number)
            calls.unreported += (_WAIT if waits else _NO_WAIT) + digest
            is_due = waits or len(calls.unreported) >= BATCH * ENTRY_BYTES
        if is_due:
            self._wake()
        return number

    def has_next(self, group: int) -> bool:
        calls = self._calls(group)
        return bool(calls.turns) or calls.end is not None

    def next(self, group: int, sequence: int) -> Turn:
        calls = self._calls(group)
        if not calls.turns:
            with self._changed:
                self._changed.wait_for(lambda: calls.turns or _has_ended(calls, sequence))
        if calls.end is not None and _has_ended(calls, sequence):
            raise calls.end
        return calls.turns.popleft()

    def done(self, group: int) -> None:
        self._calls(group).done += 1

    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        kind = type(error).__name__
        failure = f"{signature} failed on rank {self.rank} on host {self._host}: {kind}: {first_line(error)}"
        calls = self._calls(group)
        with self._changed:
            # Torch's groups raise RuntimeError when a connection breaks; other errors have their cause here.
            self._outbox.append(OperationFailed(group, sequence, isinstance(error, RuntimeError), failure))
        self._wake()
        with self._changed:
            self._changed.wait_for(lambda: calls.end is not None and _has_ended(calls, sequence), EXPLAIN_S)
        return calls.end or CollectiveError(failure)

    def counts(self) -> tuple[tuple[int, int], ...]:
        """The number of finished operations of each group."""
        return tuple((number, calls.done) for number, calls in list(self._calls_of.items()) if number in self._groups)

    @property
    def has_failed(self) -> bool:
        """Whether the whole job has failed."""
        return any(number == WHOLE_JOB for number, _, _ in self._ends)

    @property
    def has_groups_without_rank_0(self) -> bool:
        """Whether this rank has process sets that can go on after rank 0 has left."""
        return any(0 not in group.ranks for group in list(self._groups.values()))

    def say_last_calls(self, counts: Mapping[int, int]) -> None:
        """Tell the other ranks how many operations of each group this rank has called; it calls no more."""
        with self._changed:
            self._outbox.append(LastCalls(tuple(counts.items())))
        self._wake()

    def say_goodbye(self, failure: str) -> None:
        """Announce that this rank leaves the job."""
        with self._changed:
            self._outbox.append(RankBye(failure, self.counts()))
        self._wake()

    # On the control thread.

    def take(self, now: float) -> list[ToCoordinator]:
        """Return the messages to send now."""
        with self._changed:
            outgoing = list(self._outbox)
            self._outbox.clear()
            waits = False
            # The group of all ranks comes last: a set's operations are reported before its removal.
            for number, calls in sorted(self._calls_of.items(), reverse=True):
                waits = waits or calls.done < calls.called
                if calls.unreported or calls.done != calls.reported_done:
                    outgoing.append(self._report(number, calls))
                    self._said_alive = now
            if waits and now - self._said_alive >= ALIVE_S:
                self._said_alive = now
                outgoing += [
                    self._report(at, calls) for at, calls in self._calls_of.items() if calls.done < calls.called
                ]
            if waits and now - self._said_stuck >= ALIVE_S:
                outgoing += self._stuck(now)
        # Definitions come before their reports, and what ends them comes behind them.
        return sorted(outgoing, key=lambda message: (isinstance(message, RankBye), isinstance(message, LastCalls)))

    def hear(self, message: ToMember) -> None:
        """Handle a message from rank 0."""
        match message:
            case Mismatch(group=group, sequence=sequence, is_fatal=True, text=text):
                self._end(group, lambda _: CollectiveMismatch(text), sequence)
            case Agreed() | Reorder() | Mismatch() | Participate() | AllJoined():
                with self._changed:
                    self._calls_of[message.group].hear(message)
                    self._changed.notify_all()
            case GroupFailed(group=group, text=text):
                self._end(group, lambda _: CollectiveError(text))
            case RankGone(rank=rank, host=host, cause=cause, counts=counts):
                self.lose(rank, host, cause or LEFT, None if cause else dict(counts))
            case RankLeaving(rank=rank, host=host, counts=counts):
                error_of = _error_of(self.rank, rank, host, LEFT)
                with self._changed:
                    self._leaving.append((rank, error_of, dict(counts)))
                    groups = list(self._groups.values())
                for each in groups:
                    self._limit(each, rank, error_of, dict(counts))
            case Throttle(group=group, waits=waits):
                self._calls_of[group].is_throttled = waits
            case StallWarning(text=text):
                self._warn(text)

    def fail(self, error_of: Callable[[str], BaseException]) -> None:
        """Fail the whole job."""
        self._end(WHOLE_JOB, error_of)

    def lose(self, rank: int, host: str, cause: str, counts: Mapping[int, int] | None = None) -> None:
        """Handle the loss of a rank; with `counts` it left, and operations that it had called can still be finished."""
        error_of = _error_of(self.rank, rank, host, cause)
        if counts is None:
            self.fail(error_of)
            return
        with self._changed:
            self._ends.append((-1, error_of, rank))
            groups = list(self._groups.items())
        for number, group in groups:
            # A connected rank has waited for all to connect, so this rank's connections succeed without it.
            still_connects = not group.is_open and number in counts
            if rank in group.ranks and not still_connects:
                self._end(number, error_of, counts.get(number, 0))

    def _limit(
        self, group: Failable, rank: int, error_of: Callable[[str], BaseException], counts: Mapping[int, int]
    ) -> None:
        """Fail operations that a leaving rank has not called. A connection that it has begun still completes."""
        if group.is_open and rank in group.ranks and group.number in counts:
            self._end(group.number, error_of, counts[group.number])

    # Under the lock, or what takes it.

    def _calls(self, group: int) -> _GroupCalls:
        """The calls of a group; an ended record for an abandoned thread that outlives its group."""
        return self._calls_of.get(group) or _GroupCalls(ends_at=0, end=CollectiveError("this group has been removed"))

    def _define(self, digest: bytes, signature: Signature) -> None:
        if len(self._defined) >= DEFINED_MAX:
            self._defined.clear()
        self._defined.add(digest)
        self._outbox.append(DefineOperation(*astuple(signature)))

    def _report(self, number: int, calls: _GroupCalls) -> CallReport:
        report = CallReport(number, calls.reported, calls.done, bytes(calls.unreported))
        calls.reported += len(calls.unreported) // ENTRY_BYTES
        calls.reported_done = calls.done
        calls.unreported.clear()
        return report

    def _stuck(self, now: float) -> list[ToCoordinator]:
        left = {rank for rank, _, _ in self._leaving}
        # A rank that leaves waits only for what it has called: the others do not keep it for what they might call.
        stuck = [
            (number, group.stuck_at(now - STUCK_S, not left.isdisjoint(group.ranks)))
            for number, group in self._groups.items()
        ]
        if any(sequence is not None for _, sequence in stuck):
            self._said_stuck = now
        return [RankWaits(number, sequence) for number, sequence in stuck if sequence is not None]

    def _end(self, number: int, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        with self._changed:
            if number not in self._groups:
                self._ends.append((number, error_of, -1))
            numbers = list(self._groups) if number == WHOLE_JOB else [number]
        for each in numbers:
            group = self._groups.get(each)
            if group is None:
                continue
            # First the group, so that the error names the operation that is waited for.
            group.fail(error_of, from_sequence)
            with self._changed:
                calls = self._calls_of[each]
                if calls.ends_at is None or from_sequence < calls.ends_at:
                    calls.ends_at, calls.end = from_sequence, error_of("")
                self._changed.notify_all()


def _error_of(own: int, rank: int, host: str, cause: str) -> Callable[[str], BaseException]:
    """Return a function that creates the `RankLostError` from the operation that this rank waits for."""
    exit_with_peer_lost()

    def error_of(awaited: str) -> BaseException:
        waits = f"; rank {own} waited for {awaited}" if awaited else ""
        return RankLostError(f"rank {rank} on host {host} is gone: {cause}{waits}", f"rank {rank}", host, cause)

    return error_of


def _has_ended(calls: _GroupCalls, sequence: int) -> bool:
    return calls.ends_at is not None and sequence >= calls.ends_at
