"""A rank's side of the consistency checks: report what is called, and wait for agreement where that is needed.

States of an operation: *called* (reported at once, so agreement runs ahead of the work) → *waited*, unless the response
cache predicts it → *agreed*, *refused* (ranks differ: `CollectiveMismatch`, the group goes on), or *ended* (a rank is
gone or the group has failed) → *done*. A predicted operation begins at once and is reported at the next tick of the
control thread, or with 64 others. Where ranks differ, at most one of them has a predicted operation, so gloo never
combines data of different operations. A rank whose operations rank 0 has reordered predicts nothing any more: its
history is no longer that of the others.

Threads of users and groups ask, the control thread brings answers. Groups are called without holding the lock.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Protocol

from kvdist.collective.signature import ALWAYS_AGREED, Signature
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
"""Length in operations of the context that predicts the next one where the last operation alone does not."""
STEPS_MAX = 32_768
"""Transitions that are remembered. Beyond this all are forgotten: some programs use a new name for each call."""

_AMBIGUOUS = b""


class ResponseCache:
    """Predicts the next operation of a program from the ones before it, on all ranks alike.

    Gloo combines data that does not belong together, and ends a process that receives more bytes than it expects. So
    where ranks differ, at most one side may have begun. An operation is *predicted* if all ranks agreed on it after the
    same previous operation, and no other one ever followed that. Where several did, such as a metric after some of the
    steps, the last `PAST` operations are the context; if several followed even these, the ranks ask each time.

    All ranks predict the same, because predictions follow from the common history. Forgetting is always allowed: it
    only makes a rank ask. Pure; there is one for each group.
    """

    def __init__(self) -> None:
        self._past = b""
        self._next: dict[bytes, bytes] = {}
        self._agreed: set[bytes] = set()

    def call(self, digest: bytes) -> tuple[bool, bytes]:
        """Record an operation that the program calls; return whether it was predicted, and its history for `agree`."""
        past, near = self._past, self._past[-DIGEST_BYTES:]
        if len(self._next) >= 2 * STEPS_MAX:
            self._forget()
        for context in (near, past):
            if self._next.setdefault(context, digest) != digest:
                self._next[context] = _AMBIGUOUS
        self._past = (past + digest)[-PAST * DIGEST_BYTES :]
        context = past if self._next[near] == _AMBIGUOUS else near
        return self._next[context] == digest and context + digest in self._agreed, past

    def agree(self, past: bytes, digest: bytes) -> None:
        """Record that all ranks have called this operation after that history."""
        if len(self._agreed) >= 2 * STEPS_MAX:
            self._forget()
        self._agreed |= {past[-DIGEST_BYTES:] + digest, past + digest}

    def restart(self) -> None:
        """Forget the history too: ranks have called different operations."""
        self._past = b""
        self._forget()

    def _forget(self) -> None:
        self._next.clear()
        self._agreed.clear()


class ConsistencyCheck:
    """Checks that the ranks of a group are at the same operation, and explains failures; for a rank alone all is well.

    With several ranks it is a `CoordinatedCheck`.
    """

    def called(self, group: int, signature: Signature) -> None:
        """Record the next operation that the program calls in a group. Does not block."""

    def admit(self, group: int, sequence: int) -> None:
        """Block on the group's thread until the operation may begin.

        Raises:
            CollectiveError: the ranks are at different operations, or one is gone.
        """

    def done(self, group: int) -> None:
        """Record that an operation has ended, successfully or not."""

    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        """Return the error for the user in place of torch's; may wait a moment for the cause."""
        return CollectiveError(f"{signature} failed: {error}")

    def stand_in(self, group: int, sequence: int) -> Participate | AllJoined:
        """Wait for what this rank, which has joined, must do next.

        Raises:
            CollectiveError: a rank is gone, or the group has failed.
        """
        return AllJoined(group, sequence, 0)


BATCH = 64
"""Predicted operations that are reported together."""
ALIVE_S = 1.0
"""How often a waiting rank reports that it is alive."""
DEFINED_MAX = 32_768
"""Signatures that rank 0 is assumed to remember. Beyond this all are sent again."""
STUCK_S = 1.0
"""Waits of this length are reported: rank 0 refuses operations that no rank can be at the same one of."""
EXPLAIN_S = 4.0
"""How long rank 0 may take to explain an error of torch: longer than its own `EXPLAIN_S`."""
LEFT = "it has called shutdown() or has ended"
"""The cause named for a rank that left without a failure."""

_NO_WAIT, _WAIT = b"\0", b"\1"


class Failable(Protocol):
    """A group, open or still connecting, whose operations can be failed."""

    number: int
    ranks: tuple[int, ...]
    is_open: bool

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """Fail the operations from this one on; `error_of` makes the error for the operation that is waited for."""

    def move(self, place: int, to: int) -> None:
        """Do an operation before those from `to` on, none of which has begun."""

    def stuck_at(self, before: float) -> int | None:
        """The first operation that the program has waited for since then, if it can call no other before that ends."""


@dataclass(slots=True)
class _GroupCalls:
    """The operations of one group on this rank.

    Attributes:
        called, done, reported, reported_done: numbers of operations.
        cache: predicts the next operation.
        unreported: entries for the next `CallReport`.
        waited: operations without agreement yet → their history and digest.
        refused: operations in which the ranks differ → the explanation.
        orders: what this rank does while it has joined.
        is_throttled: every operation waits for agreement, because a rank has joined.
        reorders: how often rank 0 has changed their order, after which every operation waits for agreement.
        ends_at, end: the first operation that is not admitted any more, and the error.
    """

    called: int = 0
    done: int = 0
    reported: int = 0
    reported_done: int = 0
    cache: ResponseCache = field(default_factory=ResponseCache)
    unreported: bytearray = field(default_factory=bytearray)
    waited: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    orders: deque[Participate | AllJoined] = field(default_factory=deque)
    is_throttled: bool = False
    reorders: int = 0
    ends_at: int | None = None
    end: BaseException | None = None


class CoordinatedCheck(ConsistencyCheck):
    """The check of a job with several ranks, which asks the coordinator on rank 0.

    Args:
        rank: of this process.
        host: of this process.
        wake: wakes the control thread; safe from any thread.
        warn: logs a sentence for the user.
    """

    def __init__(self, rank: int, host: str, wake: Callable[[], None], warn: Callable[[str], None]) -> None:
        self.rank = rank
        self._host = host
        self._wake = wake
        self._warn = warn
        self._changed = threading.Condition(threading.Lock())
        # Messages about a group may come before this rank has entered it.
        self._calls_of: defaultdict[int, _GroupCalls] = defaultdict(_GroupCalls)
        self._groups: dict[int, Failable] = {}
        self._defined: set[bytes] = set()
        self._outbox: deque[ToCoordinator] = deque()
        self._ends: list[tuple[int, Callable[[str], BaseException], int]] = []
        """(group, error, the rank whose departure caused it or -1): for groups that begin later."""
        self._leaving: list[tuple[int, Callable[[str], BaseException], dict[int, int]]] = []
        """(rank, error, calls per group) of ranks that call nothing more: for groups that begin later."""
        self._said_alive = 0.0
        self._said_stuck = 0.0

    # On the threads of users and groups.

    def enter(self, group: Failable) -> None:
        """Add a group: first as a `ConnectingGroup`, then the connected one."""
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

    def called(self, group: int, signature: Signature) -> None:
        digest = signature.digest
        calls = self._calls_of[group]
        with self._changed:
            is_predicted, past = calls.cache.call(digest)
            must_wait = calls.is_throttled or calls.reorders > 0 or signature.kind in ALWAYS_AGREED
            waits = must_wait or not is_predicted
            if waits:
                calls.waited[calls.called] = past, digest
                if digest not in self._defined:
                    self._define(digest, signature)
            calls.called += 1
            calls.unreported += (_WAIT if waits else _NO_WAIT) + digest
            is_due = waits or len(calls.unreported) >= BATCH * ENTRY_BYTES
        if is_due:
            self._wake()

    def admit(self, group: int, sequence: int) -> None:
        calls = self._calls(group)
        if calls.end is None and sequence not in calls.waited and sequence not in calls.refused:
            return
        with self._changed:
            while sequence in calls.waited and sequence not in calls.refused and not _has_ended(calls, sequence):
                self._changed.wait()
            calls.waited.pop(sequence, None)
            refusal = calls.refused.pop(sequence, None)
        if refusal is not None:
            raise CollectiveMismatch(refusal)
        if calls.end is not None and _has_ended(calls, sequence):
            raise calls.end

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

    def stand_in(self, group: int, sequence: int) -> Participate | AllJoined:
        calls = self._calls_of[group]
        with self._changed:
            self._changed.wait_for(lambda: calls.orders or _has_ended(calls, sequence))
            if _has_ended(calls, sequence):
                assert calls.end is not None
                raise calls.end
            order = calls.orders.popleft()
            if isinstance(order, Participate):
                calls.called += 1
                calls.reported += 1
                calls.waited = {sequence + 1 if at == sequence else at: of for at, of in calls.waited.items()}
            else:
                # This rank does not know what the others called meanwhile.
                calls.cache.restart()
        return order

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
        """Tell the other ranks how many operations of each group this one has called; it calls no more."""
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
        # Definitions come before their reports, and a goodbye is the last message.
        return sorted(outgoing, key=lambda message: isinstance(message, RankBye))

    def hear(self, message: ToMember) -> None:
        """Handle a message from rank 0."""
        match message:
            case Agreed():
                self._agree(message)
            case Reorder():
                self._reorder(message)
            case Mismatch(group=group, sequence=sequence, is_fatal=is_fatal, text=text):
                if is_fatal:
                    self._end(group, lambda _: CollectiveMismatch(text), sequence)
                else:
                    self._refuse(group, sequence, text)
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
            case Participate(group=group) | AllJoined(group=group):
                with self._changed:
                    self._calls_of[group].orders.append(message)
                    self._changed.notify_all()
            case Throttle(group=group, waits=waits):
                self._calls_of[group].is_throttled = waits
            case StallWarning(text=text):
                self._warn(text)

    def fail(self, error_of: Callable[[str], BaseException]) -> None:
        """Fail the whole job."""
        self._end(WHOLE_JOB, error_of)

    def lose(self, rank: int, host: str, cause: str, counts: Mapping[int, int] | None = None) -> None:
        """Handle the loss of a rank; with `counts` it left, and what it had called can still be finished."""
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
        """Fail what a rank that calls nothing more has not called. A connection that it has begun still completes."""
        if group.is_open and rank in group.ranks and group.number in counts:
            self._end(group.number, error_of, counts[group.number])

    # Under the lock, or what takes it.

    def _calls(self, group: int) -> _GroupCalls:
        """The calls of a group; an empty record for an abandoned thread that outlives its group."""
        return self._calls_of.get(group) or _GroupCalls()

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
        stuck = [(number, group.stuck_at(now - STUCK_S)) for number, group in self._groups.items()]
        if any(sequence is not None for _, sequence in stuck):
            self._said_stuck = now
        return [RankWaits(at, sequence, self._calls_of[at].reorders) for at, sequence in stuck if sequence is not None]

    def _reorder(self, message: Reorder) -> None:
        with self._changed:
            calls = self._calls_of[message.group]
            calls.reorders += 1
            # The group waits for the first of these, so it has begun none.
            for sequence in range(message.sequence, calls.called):
                calls.waited.setdefault(sequence, (b"", b""))
            group = self._groups.get(message.group)
        if group is not None:
            group.move(message.place, message.sequence)

    def _agree(self, message: Agreed) -> None:
        with self._changed:
            calls = self._calls_of[message.group]
            for sequence in [at for at in calls.waited if at < message.sequence]:
                calls.cache.agree(*calls.waited.pop(sequence))
            self._changed.notify_all()

    def _refuse(self, group: int, sequence: int, text: str) -> None:
        with self._changed:
            self._calls_of[group].refused[sequence] = text
            self._calls_of[group].cache.restart()
            self._changed.notify_all()

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
    """Return a function that makes the `RankLostError`, given the operation that this rank waits for."""
    exit_with_peer_lost()

    def error_of(awaited: str) -> BaseException:
        waits = f"; rank {own} waited for {awaited}" if awaited else ""
        return RankLostError(f"rank {rank} on host {host} is gone: {cause}{waits}", f"rank {rank}", host, cause)

    return error_of


def _has_ended(calls: _GroupCalls, sequence: int) -> bool:
    return calls.ends_at is not None and sequence >= calls.ends_at
