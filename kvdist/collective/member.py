"""A rank's part in seeing that all ranks are at the same operations: what it has called, and what rank 0 says of that.

An operation is reported when it is called, so that agreement runs ahead of the work. Whoever calls one that is not the
usual one behind those before waits, before it begins, until all ranks are known to have called the same; the usual one
is begun at once, and reported at the next tick of the control thread, or with 64 others. Where ranks differ, it is the
usual one on at most one side, so that what does not belong together never meets; see `kvdist.collective.habits`.

The threads of the groups ask, the control thread brings the news, and the lock is held for neither's waiting. Where a
group is told, no lock of this object is held.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from kvdist.collective.habits import Habits
from kvdist.collective.referee import Referee
from kvdist.collective.signature import ALWAYS_AGREED, Signature
from kvdist.config.exit_codes import exit_with_peer_lost
from kvdist.errors import CollectiveError, CollectiveMismatch, RankLostError
from kvdist.protocol.collective import (
    ENTRY_BYTES,
    WHOLE_JOB,
    Agreed,
    Bye,
    Define,
    Differ,
    Fail,
    Gone,
    Joined,
    LastCalls,
    Leaving,
    Members,
    Pace,
    Play,
    Report,
    Stall,
    ToCoordinator,
    ToMember,
    Trouble,
)

BATCH = 64
"""Operations that are reported together where nobody waits for them."""
ALIVE_S = 1.0
"""How often a rank that waits says that it lives."""
DEFINED_MAX = 32_768
"""Signatures that rank 0 is taken to remember. All are told again beyond this, for programs whose names never end."""
EXPLAIN_S = 4.0
"""How long rank 0 may take to say what an error of torch means: longer than it waits for news itself."""
LEFT = "it has called shutdown() or has ended"
"""Why a rank is gone that has not failed."""

_NO_WAIT, _WAIT = b"\0", b"\1"


class Told(Protocol):
    """A group, as far as it is told of the end of things."""

    number: int
    ranks: tuple[int, ...]
    is_open: bool

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """End operations that begin with this one; the error is made for what is waited for."""


@dataclass(slots=True)
class _Book:
    """A group's operations.

    Attributes:
        called, done, reported, reported_done: how many.
        unreported: entries of a `Report`.
        habits: what is usual.
        waited: those that are not agreed on yet → what was called before, and the digest.
        refused: those that differ → what was said of it.
        orders: what a rank that has joined is to do.
        ends_at, end: no operation from this one on is admitted, and why.
    """

    called: int = 0
    done: int = 0
    reported: int = 0
    reported_done: int = 0
    habits: Habits = field(default_factory=Habits)
    unreported: bytearray = field(default_factory=bytearray)
    waited: dict[int, tuple[bytes, bytes]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    orders: deque[Play | Joined] = field(default_factory=deque)
    is_paced: bool = False
    ends_at: int | None = None
    end: BaseException | None = None


class Member(Referee):
    """See the module.

    Args:
        rank: this one.
        host: where it is.
        ring: wakes the control thread; safe from any thread.
        say: tells the user a sentence.
    """

    def __init__(self, rank: int, host: str, ring: Callable[[], None], say: Callable[[str], None]) -> None:
        self.rank = rank
        self._host = host
        self._ring = ring
        self._say = say
        self._news = threading.Condition(threading.Lock())
        # What the others say of a group may come before this rank has begun with it.
        self._books: defaultdict[int, _Book] = defaultdict(_Book)
        self._groups: dict[int, Told] = {}
        self._defined: set[bytes] = set()
        self._outbox: deque[ToCoordinator] = deque()
        self._ends: list[tuple[int, Callable[[str], BaseException], int]] = []
        """What has ended, and by which rank's leave (-1 for none): for groups that begin later."""
        self._leaving: list[tuple[int, Callable[[str], BaseException], dict[int, int]]] = []
        """The ranks that call nothing more, and how much they have called of each group: for later groups."""
        self._said_alive = 0.0

    # On the threads of users and groups.

    def enter(self, group: Told) -> None:
        """A group begins: first its opening, then itself."""
        with self._news:
            is_known = group.number in self._groups
            self._groups[group.number] = group
            # Here and not at the first operation: the control thread goes through the books meanwhile.
            self._books[group.number]
            if group.number and not is_known:
                self._outbox.append(Members(group.number, group.ranks))
            ends, leaving = list(self._ends), list(self._leaving)
        for number, error_of, rank in ends:
            if number in (WHOLE_JOB, group.number) or rank in group.ranks:
                self._end(group.number, error_of)
        for rank, error_of, counts in leaving:
            self._limit(group, rank, error_of, counts)

    def leave(self, number: int) -> None:
        """A group is no more."""
        with self._news:
            self._groups.pop(number, None)
            self._books.pop(number, None)

    def called(self, group: int, signature: Signature) -> None:
        digest = signature.digest
        book = self._books[group]
        with self._news:
            is_usual, past = book.habits.call(digest)
            waits = not is_usual or book.is_paced or signature.kind in ALWAYS_AGREED
            if waits:
                book.waited[book.called] = past, digest
                if digest not in self._defined:
                    self._define(digest, signature)
            book.called += 1
            book.unreported += (_WAIT if waits else _NO_WAIT) + digest
            is_due = waits or len(book.unreported) >= BATCH * ENTRY_BYTES
        if is_due:
            self._ring()

    def admit(self, group: int, sequence: int) -> None:
        book = self._book(group)
        if book.end is None and sequence not in book.waited and sequence not in book.refused:
            return
        with self._news:
            while sequence in book.waited and sequence not in book.refused and not _has_ended(book, sequence):
                self._news.wait()
            book.waited.pop(sequence, None)
            refusal = book.refused.pop(sequence, None)
        if refusal is not None:
            raise CollectiveMismatch(refusal)
        if book.end is not None and _has_ended(book, sequence):
            raise book.end

    def done(self, group: int) -> None:
        self._book(group).done += 1

    def explain(self, error: BaseException, group: int, sequence: int, signature: Signature) -> BaseException:
        text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        told = f"{signature} failed on rank {self.rank} on host {self._host}: {type(error).__name__}: {text}"
        book = self._book(group)
        with self._news:
            # Torch's groups raise RuntimeError when a connection breaks; what else there is has its cause here.
            self._outbox.append(Trouble(group, sequence, isinstance(error, RuntimeError), told))
        self._ring()
        with self._news:
            self._news.wait_for(lambda: book.end is not None and _has_ended(book, sequence), EXPLAIN_S)
        return book.end or CollectiveError(told)

    def stand_in(self, group: int, sequence: int) -> Play | Joined:
        book = self._books[group]
        with self._news:
            self._news.wait_for(lambda: book.orders or _has_ended(book, sequence))
            if _has_ended(book, sequence):
                assert book.end is not None
                raise book.end
            order = book.orders.popleft()
            if isinstance(order, Play):
                book.called += 1
                book.reported += 1
                book.waited = {sequence + 1 if at == sequence else at: of for at, of in book.waited.items()}
            else:
                # What the others have called meanwhile is unknown here.
                book.habits.restart()
        return order

    def counts(self) -> tuple[tuple[int, int], ...]:
        """How many operations of each group are done."""
        return tuple((number, book.done) for number, book in list(self._books.items()) if number in self._groups)

    @property
    def has_failed(self) -> bool:
        """Whether everything is over."""
        return any(number == WHOLE_JOB for number, _, _ in self._ends)

    @property
    def has_groups_without_rank_0(self) -> bool:
        """Whether this rank can still do something with others when rank 0 has left."""
        return any(0 not in group.ranks for group in list(self._groups.values()))

    def say_last_calls(self, counts: Mapping[int, int]) -> None:
        """Tell the others that no more is called here: so many operations of each group, which are still finished."""
        with self._news:
            self._outbox.append(LastCalls(tuple(counts.items())))
        self._ring()

    def say_goodbye(self, failure: str) -> None:
        """Leave the job."""
        with self._news:
            self._outbox.append(Bye(failure, self.counts()))
        self._ring()

    # On the control thread.

    def take(self, now: float) -> list[ToCoordinator]:
        """What is to be sent now."""
        with self._news:
            outgoing = list(self._outbox)
            self._outbox.clear()
            waits = False
            # The group of all is last: all of a set is reported before its removal.
            for number, book in sorted(self._books.items(), reverse=True):
                waits = waits or book.done < book.called
                if book.unreported or book.done != book.reported_done:
                    outgoing.append(self._report(number, book))
                    self._said_alive = now
            if waits and now - self._said_alive >= ALIVE_S:
                self._said_alive = now
                outgoing += [self._report(at, book) for at, book in self._books.items() if book.done < book.called]
        # What is defined is reported behind that, and a goodbye says the last word.
        return sorted(outgoing, key=lambda message: isinstance(message, Bye))

    def hear(self, message: ToMember) -> None:
        """Rank 0 has said something."""
        match message:
            case Agreed():
                self._agree(message)
            case Differ(group=group, sequence=sequence, is_fatal=is_fatal, text=text):
                if is_fatal:
                    self._end(group, lambda _: CollectiveMismatch(text), sequence)
                else:
                    self._refuse(group, sequence, text)
            case Fail(group=group, text=text):
                self._end(group, lambda _: CollectiveError(text))
            case Gone():
                self._lose(message)
            case Leaving(rank=rank, host=host, counts=counts):
                self._hear_last_calls(rank, _error_of(self.rank, rank, host, LEFT), dict(counts))
            case Play(group=group) | Joined(group=group):
                with self._news:
                    self._books[group].orders.append(message)
                    self._news.notify_all()
            case Pace(group=group, waits=waits):
                self._books[group].is_paced = waits
            case Stall(text=text):
                self._say(text)

    def fail(self, error_of: Callable[[str], BaseException]) -> None:
        """Everything is over."""
        self._end(WHOLE_JOB, error_of)

    def lose(self, rank: int, host: str, cause: str, counts: Mapping[int, int] | None = None) -> None:
        """A rank is gone; with `counts` it has only left, and what it has done can be done."""
        error_of = _error_of(self.rank, rank, host, cause)
        if counts is None:
            self.fail(error_of)
            return
        with self._news:
            self._ends.append((-1, error_of, rank))
            groups = list(self._groups.items())
        for number, group in groups:
            # Where it was connected it has waited for all to be, so the connections of this rank come about without it.
            is_coming_about = not group.is_open and number in counts
            if rank in group.ranks and not is_coming_about:
                self._end(number, error_of, counts.get(number, 0))

    def _hear_last_calls(self, rank: int, error_of: Callable[[str], BaseException], counts: dict[int, int]) -> None:
        with self._news:
            self._leaving.append((rank, error_of, counts))
            groups = list(self._groups.values())
        for group in groups:
            self._limit(group, rank, error_of, counts)

    def _limit(
        self, group: Told, rank: int, error_of: Callable[[str], BaseException], counts: Mapping[int, int]
    ) -> None:
        """End what a rank that calls nothing more has not called. It still connects where it has begun to."""
        if group.is_open and rank in group.ranks and group.number in counts:
            self._end(group.number, error_of, counts[group.number])

    # Under the lock, or what takes it.

    def _book(self, group: int) -> _Book:
        """That of a group; one to be thrown away where a thread that was left alone outlives its group."""
        return self._books.get(group) or _Book()

    def _define(self, digest: bytes, signature: Signature) -> None:
        if len(self._defined) >= DEFINED_MAX:
            self._defined.clear()
        self._defined.add(digest)
        self._outbox.append(
            Define(signature.kind, signature.name, signature.tensors, signature.detail, signature.device)
        )

    def _report(self, number: int, book: _Book) -> Report:
        report = Report(number, book.reported, book.done, bytes(book.unreported))
        book.reported += len(book.unreported) // ENTRY_BYTES
        book.reported_done = book.done
        book.unreported.clear()
        return report

    def _agree(self, message: Agreed) -> None:
        with self._news:
            book = self._books[message.group]
            for sequence in [at for at in book.waited if at < message.sequence]:
                book.habits.agree(*book.waited.pop(sequence))
            self._news.notify_all()

    def _refuse(self, group: int, sequence: int, text: str) -> None:
        with self._news:
            self._books[group].refused[sequence] = text
            self._books[group].habits.restart()
            self._news.notify_all()

    def _lose(self, message: Gone) -> None:
        cause = message.cause or LEFT
        self.lose(message.rank, message.host, cause, None if message.cause else dict(message.counts))

    def _end(self, number: int, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        with self._news:
            if number not in self._groups:
                self._ends.append((number, error_of, -1))
            numbers = list(self._groups) if number == WHOLE_JOB else [number]
        for each in numbers:
            group = self._groups.get(each)
            if group is None:
                continue
            # First those who wait for a result, so that the error names what they wait for.
            group.fail(error_of, from_sequence)
            with self._news:
                book = self._books[each]
                if book.ends_at is None or from_sequence < book.ends_at:
                    book.ends_at, book.end = from_sequence, error_of("")
                self._news.notify_all()


def _error_of(own: int, rank: int, host: str, cause: str) -> Callable[[str], BaseException]:
    """Makes the error of a rank that is gone, for what this one waits for."""
    exit_with_peer_lost()

    def error_of(awaited: str) -> BaseException:
        waits = f"; rank {own} waited for {awaited}" if awaited else ""
        return RankLostError(f"rank {rank} on host {host} is gone: {cause}{waits}", f"rank {rank}", host, cause)

    return error_of


def _has_ended(book: _Book, sequence: int) -> bool:
    return book.ends_at is not None and sequence >= book.ends_at
