"""Rank 0's side of the consistency checks: compare what the ranks call, notice lost ranks and stalls.

Pure: `Coordinator` gets messages with rank and time, and returns the answers. In the steady state, where ranks repeat
earlier sequences of operations, reports come in batches and need no answer.

An operation that a rank *waits* for has not begun on that rank. If the ranks' next operations differ and all of them
wait, each gets an error and the group goes on. If one has begun, its data may be anywhere, and the group fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from kvdist.collective.signature import JOIN_SIGNATURE, REFUSED, REMOVE_SET, Signature
from kvdist.errors import ProtocolError
from kvdist.protocol.collective import (
    ENTRY_BYTES,
    WHOLE_JOB,
    Agreed,
    AllConnected,
    AllJoined,
    CallReport,
    DefineOperation,
    Farewell,
    GroupFailed,
    GroupMembers,
    LastCalls,
    Mismatch,
    OperationFailed,
    Participate,
    RankBye,
    RankGone,
    RankHello,
    RankLeaving,
    StallWarning,
    Throttle,
    ToCoordinator,
    ToMember,
)

RECENT_MAX = 1024
"""Operations that are remembered when all ranks have agreed on them: a rank is never further behind with its work."""

Entry = tuple[bytes, bool]
"""The digest of a called operation, and whether its rank waits to be admitted to it."""


@dataclass(slots=True)
class RankProgress:
    """Where one rank is.

    Attributes:
        queue: what it has called and not all have.
        called, done: how many operations, ever.
        since: when it began to wait for the one that it waits for.
    """

    queue: deque[Entry] = field(default_factory=deque)
    called: int = 0
    done: int = 0
    since: float = 0.0

    @property
    def waits(self) -> bool:
        return self.done < self.called

    @property
    def has_joined(self) -> bool:
        """Whether the next thing that it has called is `join`."""
        return bool(self.queue) and self.queue[0][0] == JOIN_SIGNATURE.digest


class GroupProgress:
    """The operations of a group.

    Args:
        ranks: its members, ascending.

    Attributes:
        agreed: up to which operation the ranks have called the same.
        joining: the ranks that have called `join`, in the order in which that was heard.
        is_paced: the ranks were told to wait for every operation.
        has_failed: it is at its end.
        reported_s: for how long the present wait had lasted when it was last told of; 0 for never.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.of: dict[int, RankProgress] = {rank: RankProgress() for rank in ranks}
        self.agreed = 0
        self.joining: list[int] = []
        self.is_paced = False
        self.has_failed = False
        self.reported_s = 0.0
        self.reported_of = -1
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)

    def call(self, rank: int, entries: bytes, done: int, now: float) -> None:
        """A rank has called these operations, and so many are done of all."""
        progress = self.of[rank]
        was_idle, was_done = not progress.waits, progress.done
        for at in range(0, len(entries), ENTRY_BYTES):
            digest = entries[at + 1 : at + ENTRY_BYTES]
            progress.queue.append((digest, entries[at] == 1))
            if digest == JOIN_SIGNATURE.digest:
                self.joining.append(rank)
        progress.called += len(entries) // ENTRY_BYTES
        progress.done = min(max(done, progress.done), progress.called)
        if was_idle or progress.done > was_done:
            progress.since = now

    def active(self) -> list[int]:
        """The ranks that have not joined."""
        if not self.joining:
            return list(self.ranks)
        return [rank for rank in self.ranks if not self.of[rank].has_joined]

    def pass_one(self, ranks: list[int], digest: bytes) -> None:
        """These ranks have dealt with the next operation, and so have those that only count it."""
        for rank in ranks:
            self.of[rank].queue.popleft()
        for rank in set(self.ranks) - set(ranks):
            # A rank that has joined has its place in the program behind what the others do without it.
            self.of[rank].called += 1
            self.of[rank].done += 1
        self.agreed += 1
        self._recent.append(digest)

    def digest_of(self, sequence: int) -> bytes | None:
        """The digest of an operation that somebody has called; None for one long past."""
        if sequence < self.agreed:
            back = self.agreed - sequence
            return self._recent[-back] if back <= len(self._recent) else None
        for progress in self.of.values():
            at = sequence - self.agreed
            if not progress.has_joined and at < len(progress.queue):
                return progress.queue[at][0]
        return None


SILENT_S = 3.0
"""A rank that waits says each second that it lives; see `kvdist.collective.consistency`."""
AGAIN = 2.0
"""The next sentence about the same wait comes when it has lasted this many times as long."""
NAMED_MAX = 6


@dataclass(frozen=True)
class StallReport:
    """What there was to tell."""

    text: str = ""
    is_the_end: bool = False
    answers: list[tuple[int, ToMember]] = field(default_factory=list)


class StallCheck:
    """Looks at waits.

    Args:
        check_s: one that is longer is told of; 0 for never.
        shutdown_s: one that is longer ends the job; 0 for never.
    """

    def __init__(self, check_s: float, shutdown_s: float) -> None:
        self._check_s = check_s
        self._shutdown_s = shutdown_s

    def look(
        self,
        number: int,
        progress: GroupProgress,
        hosts: Mapping[int, str],
        heard: Mapping[int, float],
        signatures: Mapping[bytes, Signature],
        now: float,
    ) -> StallReport:
        """Who waits too long in a group, for whom. The longest wait counts."""
        waiting = [rank for rank in progress.active() if rank in hosts and progress.of[rank].waits]
        if progress.has_failed or not waiting:
            return StallReport()
        first = min(waiting, key=lambda rank: (progress.of[rank].done, progress.of[rank].since))
        sequence = progress.of[first].done
        waited_s = now - min(progress.of[rank].since for rank in waiting if progress.of[rank].done == sequence)
        if progress.reported_of != sequence:
            progress.reported_of, progress.reported_s = sequence, 0.0
        is_the_end = 0 < self._shutdown_s <= waited_s
        is_due = 0 < self._check_s <= waited_s and waited_s >= AGAIN * progress.reported_s
        if not (is_due or is_the_end):
            return StallReport()
        progress.reported_s = waited_s
        text = self._sentence(number, progress, first, sequence, waited_s, hosts, heard, signatures, now)
        if is_the_end:
            return StallReport(
                f"{text}; the job ends after {self._shutdown_s:g} s of this (KVDIST_STALL_SHUTDOWN_S)", True
            )
        return StallReport(text, False, [(rank, StallWarning(text)) for rank in sorted({0, first}) if rank in hosts])

    def _sentence(
        self,
        number: int,
        progress: GroupProgress,
        first: int,
        sequence: int,
        waited_s: float,
        hosts: Mapping[int, str],
        heard: Mapping[int, float],
        signatures: Mapping[bytes, Signature],
        now: float,
    ) -> str:
        def name(sequence: int) -> str:
            signature = signatures.get(progress.digest_of(sequence) or b"")
            return f"operation {sequence}" if signature is None else f"{signature}"

        behind = [rank for rank in progress.active() if progress.of[rank].called <= sequence]
        silent = [rank for rank in progress.active() if now - heard.get(rank, now) >= SILENT_S and rank not in behind]
        here = f" (operation {sequence}" + (f" of process set {number})" if number else ")")
        text = f"rank {first} has waited {waited_s:.0f} s for {name(sequence)}{here}: "
        if behind:
            told = [
                f"rank {rank} on host {hosts.get(rank, '?')} has not called it, "
                + (
                    f"its last was {name(progress.of[rank].called - 1)}"
                    if progress.of[rank].called
                    else "nor any before"
                )
                + (
                    f", and it has been silent for {now - heard[rank]:.0f} s"
                    if rank in heard and progress.of[rank].waits and now - heard[rank] >= SILENT_S
                    else ""
                )
                for rank in behind[:NAMED_MAX]
            ]
            return text + "; ".join(told) + (f"; {len(behind) - NAMED_MAX} more" if len(behind) > NAMED_MAX else "")
        if silent:
            return text + "; ".join(
                f"rank {rank} on host {hosts.get(rank, '?')} called it and is silent for {now - heard[rank]:.0f} s"
                for rank in silent[:NAMED_MAX]
            )
        return text + "all ranks have called it and are alive; the network or a device is slow"


EXPLAIN_S = 2.0
"""How long the news of a lost rank may come behind the errors that it causes elsewhere."""
SIGNATURES_MAX = 65_536
"""Those that are remembered, for sentences and for ranks that have joined. A rank defines again what it has forgotten
first; see `kvdist.collective.consistency`."""
RANKS_SHOWN = 6

Answers = list[tuple[int, ToMember]]


class Coordinator:
    """See the module.

    Args:
        size: the number of ranks.
        stalls: tells of operations that are waited for too long.
    """

    def __init__(self, size: int, stalls: StallCheck | None = None) -> None:
        self._size = size
        self._stalls = stalls or StallCheck(0.0, 0.0)
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._groups = {0: GroupProgress(tuple(range(size)))}
        self._signatures: dict[bytes, Signature] = {JOIN_SIGNATURE.digest: JOIN_SIGNATURE}
        self._heard: dict[int, float] = {}
        self._suspicions: dict[int, tuple[float, OperationFailed]] = {}
        """Rank whose connection broke → when that counts, if nothing has explained it by then."""
        self._last_calls: dict[int, dict[int, int]] = {}
        """Rank that calls nothing more → how much it has called of each of its groups."""
        self._is_over = False
        self._answers: Answers = []

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come yet."""
        return [rank for rank in range(self._size) if rank not in self._hosts]

    @property
    def is_needed(self) -> bool:
        """Whether ranks that have not left have process sets of their own, in which rank 0 is not."""
        sets = [progress for progress in self._groups.values() if 0 not in progress.ranks and not progress.has_failed]
        return not self._is_over and any(set(progress.ranks) - self._left for progress in sets)

    def hear(self, rank: int, message: ToCoordinator, now: float) -> Answers:
        """A rank has said something.

        Raises:
            ProtocolError: it makes no sense; nothing has changed.
        """
        self._heard[rank] = now
        match message:
            case RankHello():
                self._welcome(rank, message)
            case DefineOperation():
                self._define(Signature(message.kind, message.name, message.tensors, message.detail, message.device))
            case GroupMembers():
                self._add_group(rank, message)
            case CallReport():
                self._read(rank, message, now)
            case OperationFailed():
                self._suspect(rank, message, now)
            case LastCalls():
                if rank not in self._left and rank not in self._last_calls and not self._is_over:
                    self._end_calls(rank, dict(message.counts))
                    self._tell(self._others(rank), RankLeaving(rank, self._host(rank), message.counts))
            case RankBye():
                self._see_off(rank, message)
        return self._take()

    def lose(self, rank: int, cause: str) -> Answers:
        """A rank's connection is no more."""
        if rank not in self._left and not self._is_over:
            self._left.add(rank)
            self._is_over = True
            self._tell(self._others(rank), RankGone(rank, self._host(rank), cause))
        return self._take()

    def tick(self, now: float) -> Answers:
        """Time has passed."""
        due = [trouble for at, trouble in self._suspicions.values() if now >= at]
        if due and not self._is_over:
            self._fail(WHOLE_JOB, due[0].text)
        if not self._is_over and not self.missing:
            alive = {rank: host for rank, host in self._hosts.items() if rank not in self._left}
            for number, progress in self._groups.items():
                told = self._stalls.look(number, progress, alive, self._heard, self._signatures, now)
                self._answers += told.answers
                if told.is_the_end:
                    self._fail(WHOLE_JOB, told.text)
                    break
        return self._take()

    # The beginning and the end.

    def _welcome(self, rank: int, hello: RankHello) -> None:
        if hello.rank != rank or not 0 <= rank < self._size or rank in self._hosts or hello.size != self._size:
            raise ProtocolError(f"rank {hello.rank} of {hello.size} is none that is missing")
        self._hosts[rank] = hello.host
        if not self.missing:
            self._tell(range(self._size), AllConnected(tuple(self._hosts[rank] for rank in range(self._size))))

    def _see_off(self, rank: int, bye: RankBye) -> None:
        self._tell([rank], Farewell())
        if rank in self._left:
            return
        self._left.add(rank)
        # Without rank 0 nobody is left to speak with, so its leave is news to the others at any time.
        if not self._is_over or rank == 0:
            self._is_over = self._is_over or bool(bye.failure)
            done = dict(bye.counts)
            self._end_calls(rank, {number: done.get(number, 0) for number in self._groups})
            self._tell(self._others(rank), RankGone(rank, self._host(rank), bye.failure, bye.counts))

    def _suspect(self, rank: int, trouble: OperationFailed, now: float) -> None:
        if self._is_over:
            return
        if not trouble.is_connection:
            self._fail(trouble.group, trouble.text)
        elif not self._is_explained(trouble):
            self._suspicions.setdefault(rank, (now + EXPLAIN_S, trouble))

    def _end_calls(self, rank: int, counts: dict[int, int]) -> None:
        """A rank calls no more than that, and lets go of each group when it is done with it."""
        self._last_calls[rank] = {
            number: count
            for number, count in counts.items()
            if number in self._groups and rank in self._groups[number].of
        }
        self._suspicions = {of: it for of, it in self._suspicions.items() if not self._is_explained(it[1])}

    def _is_explained(self, trouble: OperationFailed) -> bool:
        """Whether somebody has begun, without asking, what a rank that leaves has not called: all else goes on."""
        counts = [of[trouble.group] for of in self._last_calls.values() if trouble.group in of]
        return any(trouble.sequence >= count for count in counts)

    def _fail(self, group: int, text: str) -> None:
        if group == WHOLE_JOB or group not in self._groups:
            self._is_over = True
            self._tell(range(self._size), GroupFailed(WHOLE_JOB, text))
        elif not self._groups[group].has_failed:
            self._groups[group].has_failed = True
            self._tell(self._groups[group].ranks, GroupFailed(group, text))

    # Agreement.

    def _define(self, signature: Signature) -> None:
        self._signatures.pop(signature.digest, None)
        self._signatures[signature.digest] = signature
        while len(self._signatures) > SIGNATURES_MAX:
            self._signatures.pop(next(iter(self._signatures)))
        self._signatures[JOIN_SIGNATURE.digest] = JOIN_SIGNATURE

    def _add_group(self, rank: int, members: GroupMembers) -> None:
        ranks = members.ranks
        if list(ranks) != sorted(set(ranks)) or rank not in ranks or ranks[-1] >= self._size:
            raise ProtocolError(f"rank {rank} is in no group of ranks {ranks}")
        progress = self._groups.get(members.group)
        if progress is None:
            self._groups[members.group] = GroupProgress(ranks)
        elif progress.ranks != ranks:
            raise ProtocolError(f"group {members.group} has the ranks {progress.ranks}, not {ranks}")

    def _read(self, rank: int, report: CallReport, now: float) -> None:
        progress = self._groups.get(report.group)
        if progress is None and not report.entries:
            return  # the last of a set that has been removed
        if progress is None or rank not in progress.of:
            raise ProtocolError(f"rank {rank} is not in group {report.group}")
        if progress.has_failed or self._is_over:
            return
        if len(report.entries) % ENTRY_BYTES or (report.entries and report.first != progress.of[rank].called):
            raise ProtocolError(f"rank {rank} reports from operation {report.first}, not {progress.of[rank].called}")
        progress.call(rank, report.entries, report.done, now)
        if report.entries:
            self._advance(report.group, progress)

    def _advance(self, number: int, progress: GroupProgress) -> None:
        """Compare what all ranks have called by now."""
        before, awaited = progress.agreed, set[int]()
        while not progress.has_failed:
            active = progress.active()
            if not active:
                # Who has joined may still wait to be admitted to what it called before.
                self._agree(number, progress, before, awaited)
                self._end_join(number, progress)
                before, awaited = progress.agreed, set()
                continue
            queues = [progress.of[rank].queue for rank in active]
            if not all(queues):
                break
            heads = {queue[0][0] for queue in queues}
            signature = self._signatures.get(next(iter(heads)))
            refused_by_join = len(active) < len(progress.ranks) and (signature is None or not signature.takes_zeros)
            if len(heads) > 1 or (refused_by_join and not self._is_refused(heads)):
                self._agree(number, progress, before, awaited)
                self._differ(number, progress, active)
                before, awaited = progress.agreed, set()
                continue
            awaited |= {rank for rank in active if progress.of[rank].queue[0][1]}
            self._let_play(number, progress, active, signature)
            progress.pass_one(active, next(iter(heads)))
            if signature is not None and signature.kind == REMOVE_SET:
                self._groups.pop(int(signature.detail.rpartition(" ")[2]), None)
        self._agree(number, progress, before, awaited)
        self._set_pace(number, progress)

    def _agree(self, number: int, progress: GroupProgress, before: int, awaited: set[int]) -> None:
        if progress.agreed > before and awaited:
            self._tell(sorted(awaited), Agreed(number, progress.agreed))

    def _is_refused(self, heads: Iterable[bytes]) -> bool:
        signatures = [self._signatures.get(head) for head in heads]
        return all(signature is not None and signature.kind == REFUSED for signature in signatures)

    def _differ(self, number: int, progress: GroupProgress, active: list[int]) -> None:
        """The active ranks have not called the same, or what cannot be done while others have joined."""
        heads = {rank: progress.of[rank].queue[0] for rank in active}
        is_fatal = not all(waits for _, waits in heads.values())
        text = self._difference(number, progress, {rank: digest for rank, (digest, _) in heads.items()})
        progress.has_failed = is_fatal
        self._tell(active, Mismatch(number, progress.agreed, is_fatal, text))
        if is_fatal:
            self._tell([rank for rank in progress.ranks if rank not in heads], GroupFailed(number, text))
        self._let_play(number, progress, active, None)
        progress.pass_one(active, next(iter(heads.values()))[0])

    def _difference(self, number: int, progress: GroupProgress, heads: dict[int, bytes]) -> str:
        where = f"operation {progress.agreed}" + (f" of process set {number}" if number else "")
        of = {rank: self._signatures.get(digest) for rank, digest in heads.items()}
        refused = {rank: it for rank, it in of.items() if it is not None and it.kind == REFUSED}
        if refused:
            rank, signature = next(iter(refused.items()))
            return f"rank {rank} on host {self._host(rank)} cannot call {where}: {signature.detail}"
        ranks_of: dict[str, list[int]] = {}
        for rank, found in of.items():
            ranks_of.setdefault("an operation of old" if found is None else str(found), []).append(rank)
        called = [f"{named(ranks)} {text}" for text, ranks in ranks_of.items()]
        if len(called) > 1:
            called[-1] += "; call them in the same order on all ranks"
            return f"ranks called different operations as {where}: {', '.join(called)}"
        gone = named([rank for rank in progress.ranks if rank not in heads])
        return (
            f"{called[0]} as {where}, but {gone} called join(): only Sum and Average of allreduce can be done with"
            " those who have joined"
        )

    # Join.

    def _let_play(self, number: int, progress: GroupProgress, active: list[int], signature: Signature | None) -> None:
        if len(active) == len(progress.ranks):
            return
        play = Participate(number, progress.agreed)
        if signature is not None and signature.kind != REFUSED:
            play = Participate(
                number,
                progress.agreed,
                signature.kind,
                signature.name,
                signature.tensors,
                signature.detail,
                signature.device,
            )
        self._tell([rank for rank in progress.ranks if rank not in active], play)

    def _end_join(self, number: int, progress: GroupProgress) -> None:
        self._tell(progress.ranks, AllJoined(number, progress.agreed, progress.joining[-1]))
        progress.joining.clear()
        progress.pass_one(list(progress.ranks), JOIN_SIGNATURE.digest)

    def _set_pace(self, number: int, progress: GroupProgress) -> None:
        waits = bool(progress.joining)
        if waits != progress.is_paced and not progress.has_failed:
            progress.is_paced = waits
            self._tell(progress.ranks, Throttle(number, waits))

    # Answers.

    def _host(self, rank: int) -> str:
        return self._hosts.get(rank, "?")

    def _others(self, rank: int) -> list[int]:
        return [other for other in range(self._size) if other != rank]

    def _tell(self, ranks: Iterable[int], message: ToMember) -> None:
        self._answers += [(rank, message) for rank in ranks if rank in self._hosts]

    def _take(self) -> Answers:
        answers, self._answers = self._answers, []
        return answers


def named(ranks: Sequence[int]) -> str:
    """Such as ``ranks 1 and 2``."""
    shown = [str(rank) for rank in ranks[:RANKS_SHOWN]]
    if len(ranks) > RANKS_SHOWN:
        shown.append(f"{len(ranks) - RANKS_SHOWN} more")
    return f"rank {shown[0]}" if len(shown) == 1 else f"ranks {', '.join(shown[:-1])} and {shown[-1]}"
