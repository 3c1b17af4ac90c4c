"""Rank 0's side of the consistency checks: compare the calls of the ranks, notice lost ranks and stalls.

Pure: `Coordinator` gets messages with rank and time, and returns the answers. In the steady state, where ranks repeat
earlier sequences of operations, reports come in batches and need no answer.

An operation that a rank *waits* for has not begun on that rank. If the ranks' next operations differ and all of them
wait, each gets an error and the group goes on. If one has begun, its data may be anywhere, and the group fails.

Named operations pair by kind and name, others by their order. An operation that all ranks have called is next, and
ranks that called it later than other waiting calls learn it by `Reorder`. A rank that has joined takes part in the
operations that it had called before, and with zeros in the rest. Ranks get an error where names agree and the rest does
not, or where every rank is stuck.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field

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
    RankWaits,
    Reorder,
    StallWarning,
    Throttle,
    ToCoordinator,
    ToMember,
)

RECENT_MAX = 1024
"""Agreed operations that are remembered; a rank's work is never further behind."""

STEADY = 256
"""Operations after a `Reorder` for which the ranks wait for agreement: a rank that begins predicted operations reports
them late, and ranks that call others would wait for that."""
FOR_EVER = 1 << 62

Entry = tuple[bytes, bool]
"""The digest of a called operation, and whether its rank waits for agreement."""


@dataclass(slots=True)
class RankProgress:
    """Progress of a rank within a group.

    Attributes:
        queue: calls of this rank, from `first` on; its `join` is the last.
        first: the number of its first call that is not paired.
        taken: calls in the queue that are paired.
        places: key → calls with it that are not paired, oldest first; filled where ranks have different orders.
        keys: call in `places` → its key.
        indexed: first call that has not been added to `places`.
        called, done: numbers of operations since the beginning.
        since: when it began to wait for its oldest unfinished operation.
        stuck_at: operation before whose end it calls no other; -1 if it may.
        has_joined: whether it has called `join`.
    """

    queue: deque[Entry] = field(default_factory=deque)
    first: int = 0
    taken: set[int] = field(default_factory=set)
    places: dict[str, deque[int]] = field(default_factory=dict)
    keys: dict[int, str] = field(default_factory=dict)
    indexed: int = 0
    called: int = 0
    done: int = 0
    since: float = 0.0
    stuck_at: int = -1
    has_joined: bool = False

    @property
    def waits(self) -> bool:
        return self.done < self.called

    @property
    def pending(self) -> list[bytes]:
        """The digests of the calls that are not paired."""
        return [digest for call, (digest, _) in enumerate(self.queue, self.first) if call not in self.taken]

    def entry(self, call: int) -> Entry:
        return self.queue[call - self.first]

    def index(self, key_of: Callable[[bytes], str]) -> list[str]:
        """Add the calls since the last time to `places`, and return their keys."""
        end = self.first + len(self.queue) - self.has_joined
        fresh = range(max(self.indexed, self.first), end)
        self.indexed = end
        for call in fresh:
            key = self.keys[call] = key_of(self.queue[call - self.first][0])
            self.places.setdefault(key, deque()).append(call)
        return [self.keys[call] for call in fresh]

    def take(self, call: int) -> None:
        """Remove a paired call, the oldest with its key."""
        if call in self.keys:
            key = self.keys.pop(call)
            self.places[key].popleft()
            if not self.places[key]:
                del self.places[key]
        if call != self.first:
            self.taken.add(call)
            return
        self.queue.popleft()
        self.first += 1
        while self.first in self.taken:
            self.taken.remove(self.first)
            self.queue.popleft()
            self.first += 1


class GroupProgress:
    """The operations of a group: how far each rank has called them, and their digests.

    Args:
        number: number of the group; 0 is the group of all ranks.
        ranks: the members, ascending.

    Attributes:
        agreed: the number of operations that all ranks have called alike.
        joining: ranks that have called `join`, in the order of their reports.
        ready: keys of operations that may be next, where ranks have different orders; includes all that every rank
            called.
        steady_at: operation up to which ranks wait for agreement, because they had different orders.
        is_throttled: whether the ranks wait for agreement on every operation.
        has_failed: whether the group has failed.
        stalled_at, warned_s: the operation of the last stall, and how long it had lasted at the last warning (0: none).
    """

    def __init__(self, number: int, ranks: tuple[int, ...]) -> None:
        self.number = number
        self.ranks = ranks
        self.of: dict[int, RankProgress] = {rank: RankProgress() for rank in ranks}
        self.agreed = 0
        self.joining: list[int] = []
        self.ready: deque[str] = deque()
        self.steady_at = 0
        self.is_throttled = False
        self.has_failed = False
        self.warned_s = 0.0
        self.stalled_at = -1
        self._recent: deque[bytes] = deque(maxlen=RECENT_MAX)

    def call(self, rank: int, entries: bytes, done: int, now: float) -> None:
        """Record operations that a rank has called, and how many it has finished since the beginning."""
        progress = self.of[rank]
        was_idle, was_done = not progress.waits, progress.done
        for at in range(0, len(entries), ENTRY_BYTES):
            digest = entries[at + 1 : at + ENTRY_BYTES]
            progress.queue.append((digest, entries[at] == 1))
            if digest == JOIN_SIGNATURE.digest:
                self._join(rank)
        if entries and progress.stuck_at < FOR_EVER:
            progress.stuck_at = -1
        progress.called += len(entries) // ENTRY_BYTES
        progress.done = min(max(done, progress.done), progress.called)
        if was_idle or progress.done > was_done:
            progress.since = now

    def active(self) -> list[int]:
        """The ranks that have not joined."""
        if not self.joining:
            return list(self.ranks)
        return [rank for rank in self.ranks if not self.of[rank].has_joined]

    def shared(self, key: str) -> dict[int, int]:
        """The calls with a key, by rank; empty if a rank that has not joined lacks the key."""
        found = {}
        for rank, progress in self.of.items():
            if key in progress.places:
                found[rank] = progress.places[key][0]
            elif not progress.has_joined:
                return {}
        return found

    def pass_one(self, calls: Mapping[int, int], digest: bytes) -> None:
        """Advance by an operation that consists of these calls; the other ranks, which have joined, only count it."""
        for rank, progress in self.of.items():
            if rank in calls:
                progress.take(calls[rank])
            else:
                # The `join` of a rank stays its last operation while the others go on.
                progress.called += 1
                progress.done += 1
        self.agreed += 1
        self._recent.append(digest)

    def end_join(self) -> None:
        """Let all ranks go on after all have joined."""
        for progress in self.of.values():
            progress.has_joined = False
        self.joining.clear()
        self.pass_one({rank: progress.first for rank, progress in self.of.items()}, JOIN_SIGNATURE.digest)

    def has_called(self, rank: int, first: int, sequence: int) -> bool:
        """Whether a rank has called operation `sequence` of the rank `first`, in whichever order."""
        digest = self.digest_of(sequence, first)
        return sequence < self.agreed or digest in self.of[rank].pending

    def digest_of(self, sequence: int, rank: int) -> bytes | None:
        """The digest of an operation that a rank has called; None for an operation long past."""
        if sequence < self.agreed:
            back = self.agreed - sequence
            return self._recent[-back] if back <= len(self._recent) else None
        pending, at = self.of[rank].pending, sequence - self.agreed
        return pending[at] if not self.of[rank].has_joined and at < len(pending) else None

    def _join(self, rank: int) -> None:
        self.of[rank].has_joined = True
        self.joining.append(rank)
        # Operations that only this rank had not called may be next now.
        self.ready.extend(key for progress in self.of.values() for key in progress.places)


SILENT_S = 3.0
"""Silence, in seconds, that is mentioned: a waiting rank reports every `kvdist.collective.consistency.ALIVE_S`."""
STALL_REPEAT = 2.0
"""A warning about the same wait is repeated when it has lasted this many times as long."""
EXPLAIN_S = 2.0
"""Time that the news of a lost rank may arrive after the errors that it causes on other ranks."""
SIGNATURES_MAX = 65_536
"""Signatures that are remembered, for messages and for ranks that have joined. Ranks remember fewer (`DEFINED_MAX`), so
they send a signature again before it is forgotten."""
RANKS_SHOWN = 6

Answers = list[tuple[int, ToMember]]


class Coordinator:
    """Compares the ranks' operations and answers them.

    Args:
        size: the number of ranks.
        stall_check_s: waits longer than this are warned about; 0 for never.
        stall_shutdown_s: a wait longer than this ends the job; 0 for never.
    """

    def __init__(self, size: int, stall_check_s: float = 0.0, stall_shutdown_s: float = 0.0) -> None:
        self._size = size
        self._stall_check_s = stall_check_s
        self._stall_shutdown_s = stall_shutdown_s
        self._hosts: dict[int, str] = {}
        self._machines: dict[int, str] = {}
        self._left: set[int] = set()
        self._groups = {0: GroupProgress(0, tuple(range(size)))}
        self._signatures: dict[bytes, Signature] = {JOIN_SIGNATURE.digest: JOIN_SIGNATURE}
        self._heard: dict[int, float] = {}
        self._suspicions: dict[int, tuple[float, OperationFailed]] = {}
        """Rank that reported a broken connection → when the job fails for it, unless the cause is known by then."""
        self._last_calls: dict[int, dict[int, int]] = {}
        """Leaving rank → its final number of calls in each of its groups."""
        self._is_over = False
        self._answers: Answers = []

    @property
    def missing(self) -> list[int]:
        """The ranks that have not connected yet."""
        return [rank for rank in range(self._size) if rank not in self._hosts]

    @property
    def is_needed(self) -> bool:
        """Whether live ranks have process sets without rank 0, which still need this coordinator."""
        sets = [group for group in self._groups.values() if 0 not in group.ranks and not group.has_failed]
        return not self._is_over and any(set(group.ranks) - self._left for group in sets)

    def hear(self, rank: int, message: ToCoordinator, now: float) -> Answers:
        """Handle a message of a rank.

        Raises:
            ProtocolError: the message is invalid; nothing has changed.
        """
        self._heard[rank] = now
        match message:
            case RankHello():
                self._welcome(rank, message)
            case DefineOperation():
                self._define(Signature(*astuple(message)))
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
            case RankWaits():
                self._note_stuck(rank, message)
        return self._take()

    def lose(self, rank: int, cause: str) -> Answers:
        """Handle the loss of a rank's connection."""
        if rank not in self._left and not self._is_over:
            self._left.add(rank)
            self._is_over = True
            self._tell(self._others(rank), RankGone(rank, self._host(rank), cause))
        return self._take()

    def tick(self, now: float) -> Answers:
        """Handle the passing of time: suspicions that have become certain, and stalls."""
        due = [failed for at, failed in self._suspicions.values() if now >= at]
        if due and not self._is_over:
            self._fail(WHOLE_JOB, due[0].text)
        if not self.missing:
            for group in self._groups.values():
                if not self._is_over and not group.has_failed:
                    self._check_stall(group, now)
        return self._take()

    # Stalls.

    def _check_stall(self, group: GroupProgress, now: float) -> None:
        """Warn about the longest wait in a group if it lasts too long, or end the job."""
        waiting = [rank for rank in group.active() if self._is_alive(rank) and group.of[rank].waits]
        if not waiting:
            return
        first = min(waiting, key=lambda rank: (group.of[rank].done, group.of[rank].since))
        sequence = group.of[first].done
        waited_s = now - min(group.of[rank].since for rank in waiting if group.of[rank].done == sequence)
        if group.stalled_at != sequence:
            group.stalled_at, group.warned_s = sequence, 0.0
        is_fatal = 0 < self._stall_shutdown_s <= waited_s
        is_due = 0 < self._stall_check_s <= waited_s and waited_s >= STALL_REPEAT * group.warned_s
        if not (is_due or is_fatal):
            return
        group.warned_s = waited_s
        text = (
            f"waiting {waited_s:.1f} s for {self._stall_cause(group, first, sequence, now)}; rank {first} has called it"
        )
        if is_fatal:
            limit = f"{self._stall_shutdown_s:g} s of this (KVDIST_STALL_SHUTDOWN_S)"
            self._fail(WHOLE_JOB, f"{text}; the job ends after {limit}")
        else:
            self._answers += [(rank, StallWarning(text)) for rank in sorted({0, first}) if self._is_alive(rank)]

    def _stall_cause(self, group: GroupProgress, first: int, sequence: int, now: float) -> str:
        """The ranks that have to call or to finish the operation that `first` waits for, and their last calls or
        silence."""

        def silence(rank: int) -> str:
            silent_s = now - self._heard.get(rank, now)
            return f"rank {rank} has been silent for {silent_s:.0f} s" if silent_s >= SILENT_S else ""

        where = f"operation {sequence}" + (f" of process set {group.number}" if group.number else "")
        operation = f"{self._name(group, sequence, first)} ({where})"
        behind = [rank for rank in group.active() if not group.has_called(rank, first, sequence)]
        culprits = behind or [rank for rank in group.active() if silence(rank)]
        if not culprits:
            return f"{operation} to end: all ranks are alive, and the network or a device is slow"
        notes = []
        for rank in culprits[:RANKS_SHOWN]:
            called = group.of[rank].called
            if behind:
                last = f"rank {rank} called {self._name(group, called - 1, rank)} last" if called else ""
                notes.append(last or f"rank {rank} has called nothing before")
            if not behind or group.of[rank].waits:
                notes.append(silence(rank))
        deed = "call" if behind else "finish"
        return "; ".join([f"{self._who(culprits)} to {deed} {operation}", *filter(None, notes)])

    def _who(self, ranks: list[int]) -> str:
        """Ranks with their hosts, such as ``rank 1 (host-a) and rank 2 (host-b)``."""
        return joined([f"rank {rank} ({self._host(rank)})" for rank in ranks])

    def _name(self, group: GroupProgress, sequence: int, rank: int) -> str:
        return str(self._signatures.get(group.digest_of(sequence, rank) or b"", f"operation {sequence}"))

    def _is_alive(self, rank: int) -> bool:
        return rank in self._hosts and rank not in self._left

    # The beginning and the end.

    def _welcome(self, rank: int, hello: RankHello) -> None:
        if hello.rank != rank or not 0 <= rank < self._size or rank in self._hosts or hello.size != self._size:
            raise ProtocolError(
                f"rank {hello.rank} of {hello.size} is not expected (size {self._size}; missing: {self.missing})"
            )
        self._hosts[rank], self._machines[rank] = hello.host, hello.machine
        if not self.missing:
            ranks = range(self._size)
            places = [tuple(said[rank] for rank in ranks) for said in (self._hosts, self._machines)]
            self._tell(ranks, AllConnected(*places))

    def _see_off(self, rank: int, bye: RankBye) -> None:
        self._tell([rank], Farewell())
        if rank in self._left:
            return
        self._left.add(rank)
        # Without rank 0 there is no coordinator, so the others hear of its departure in any case.
        if not self._is_over or rank == 0:
            self._is_over = self._is_over or bool(bye.failure)
            done = dict(bye.counts)
            self._end_calls(rank, {number: done.get(number, 0) for number in self._groups})
            self._tell(self._others(rank), RankGone(rank, self._host(rank), bye.failure, bye.counts))

    def _suspect(self, rank: int, failed: OperationFailed, now: float) -> None:
        if self._is_over:
            return
        if not failed.is_connection:
            self._fail(failed.group, failed.text)
        elif not self._is_explained(failed):
            self._suspicions.setdefault(rank, (now + EXPLAIN_S, failed))

    def _end_calls(self, rank: int, counts: dict[int, int]) -> None:
        """Record the final numbers of calls of a rank; it leaves each group when they are finished."""
        self._last_calls[rank] = {
            number: count
            for number, count in counts.items()
            if number in self._groups and rank in self._groups[number].of
        }
        self._suspicions = {of: it for of, it in self._suspicions.items() if not self._is_explained(it[1])}
        for group in [self._groups[number] for number in self._last_calls[rank] if not self._is_over]:
            group.of[rank].stuck_at = FOR_EVER
            self._advance(group)

    def _is_explained(self, failed: OperationFailed) -> bool:
        """Whether the failed operation is one that a leaving rank has not called: everything else goes on."""
        counts = [of[failed.group] for of in self._last_calls.values() if failed.group in of]
        return any(failed.sequence >= count for count in counts)

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
            raise ProtocolError(f"rank {rank} cannot be in a group of ranks {ranks}")
        group = self._groups.get(members.group)
        if group is None:
            self._groups[members.group] = GroupProgress(members.group, ranks)
        elif group.ranks != ranks:
            raise ProtocolError(f"group {members.group} has the ranks {group.ranks}, not {ranks}")

    def _read(self, rank: int, report: CallReport, now: float) -> None:
        group = self._groups.get(report.group)
        if group is None and not report.entries:
            return  # the last report about a removed set
        if group is None or rank not in group.of:
            raise ProtocolError(f"rank {rank} is not in group {report.group}")
        if group.has_failed or self._is_over:
            return
        calls = group.of[rank].first + len(group.of[rank].queue)
        if len(report.entries) % ENTRY_BYTES or (report.entries and report.first != calls):
            raise ProtocolError(f"rank {rank} reports from call {report.first}, not {calls}")
        group.call(rank, report.entries, report.done, now)
        if report.entries:
            self._advance(group)

    def _note_stuck(self, rank: int, message: RankWaits) -> None:
        group = self._groups.get(message.group)
        if group is None or rank not in group.of:
            raise ProtocolError(f"rank {rank} is not in group {message.group}")
        progress = group.of[rank]
        if not self._is_over:
            progress.stuck_at = max(message.sequence, progress.stuck_at)
            self._advance(group)

    def _advance(self, group: GroupProgress) -> None:
        """Compare the calls of all ranks so far."""
        awaited = set[int]()
        while not group.has_failed:
            calls, digests = self._next_calls(group)
            if not calls:
                break
            digest = next(iter(digests))
            signature = self._signatures.get(digest)
            if signature is JOIN_SIGNATURE:
                # A rank that has joined may still wait for operations that it called before.
                self._agree(group, awaited)
                self._tell(group.ranks, AllJoined(group.number, group.agreed, group.joining[-1]))
                group.end_join()
                continue
            lacks_zeros = len(calls) < len(group.ranks) and (signature is None or not signature.takes_zeros)
            if len(digests) > 1 or lacks_zeros:
                self._agree(group, awaited)
                self._differ(group, calls)
                continue
            self._admit(group, calls, awaited)
            self._invite_joined(group, calls, signature)
            group.pass_one(calls, digest)
            if signature is not None and signature.kind == REMOVE_SET:
                self._groups.pop(int(signature.detail.rpartition(" ")[2]), None)
        self._agree(group, awaited)
        self._set_throttle(group)

    def _next_calls(self, group: GroupProgress) -> tuple[dict[int, int], set[bytes]]:
        """The ranks' calls that are the next operation or can only fail, and their digests.

        Empty if a rank must call it first; without the ranks that have joined and not called it.
        """
        queues = [progress.queue for progress in group.of.values()]
        if not all(queues):
            return {}, set()
        heads = {queue[0][0] for queue in queues}
        if len(heads) == 1:
            return {rank: progress.first for rank, progress in group.of.items()}, heads
        active = group.active()
        calls = self._shared_calls(group)
        is_stuck = bool(active) and all(group.of[rank].stuck_at >= group.agreed for rank in active)
        if is_stuck and not calls:
            calls = {rank: group.of[rank].first for rank in active}
        return calls, {group.of[rank].entry(call)[0] for rank, call in calls.items()}

    def _shared_calls(self, group: GroupProgress) -> dict[int, int]:
        """The calls of the next operation where orders differ: the operation that a rank has begun, else the oldest
        that all have called."""
        for progress in group.of.values():
            group.ready += progress.index(self._key)
        begun = {progress.queue[0][0] for progress in group.of.values() if progress.queue and not progress.queue[0][1]}
        if begun:
            return group.shared(self._key(begun.pop())) if len(begun) == 1 else {}
        while group.ready:
            calls = group.shared(group.ready[0])
            if calls:
                return calls
            group.ready.popleft()
        return {}

    def _key(self, digest: bytes) -> str:
        signature = self._signatures.get(digest)
        return signature.key if signature is not None else ""

    def _admit(self, group: GroupProgress, calls: dict[int, int], awaited: set[int]) -> None:
        """Tell ranks whose call is not their oldest, and note the others that wait."""
        for rank, call in calls.items():
            progress = group.of[rank]
            if call != progress.first:
                self._tell([rank], Reorder(group.number, group.agreed, call))
                group.steady_at = group.agreed + STEADY
                awaited.discard(rank)
            elif progress.queue[0][1]:
                awaited.add(rank)

    def _agree(self, group: GroupProgress, awaited: set[int]) -> None:
        """Tell ranks that wait that all have called the same operations up to now."""
        if awaited:
            self._tell(sorted(awaited), Agreed(group.number, group.agreed))
            awaited.clear()

    def _differ(self, group: GroupProgress, calls: dict[int, int]) -> None:
        """Report that these ranks differ, or that ranks which have joined cannot take part."""
        entries = {rank: group.of[rank].entry(call) for rank, call in calls.items()}
        is_fatal = not all(waits for _, waits in entries.values())
        text = self._difference(group, {rank: digest for rank, (digest, _) in entries.items()})
        group.has_failed = is_fatal
        for rank, call in calls.items():
            self._tell([rank], Mismatch(group.number, group.agreed, is_fatal, text, call))
        if is_fatal:
            self._tell([rank for rank in group.ranks if rank not in calls], GroupFailed(group.number, text))
        self._invite_joined(group, calls, None)
        group.pass_one(calls, next(iter(entries.values()))[0])

    def _difference(self, group: GroupProgress, heads: dict[int, bytes]) -> str:
        where = f"operation {group.agreed}" + (f" of process set {group.number}" if group.number else "")
        ranks_of: dict[str, list[int]] = {}
        for rank, digest in heads.items():
            signature = self._signatures.get(digest)
            if signature is not None and signature.is_refused:
                what = f"{signature.kind} {signature.name!r} ({where})" if signature.name else where
                reason = signature.detail.removeprefix(REFUSED)
                return f"rank {rank} on host {self._host(rank)} cannot call {what}: {reason}"
            ranks_of.setdefault(str(signature or "an operation that is not remembered any more"), []).append(rank)
        called = [f"{named(ranks)} {text}" for text, ranks in ranks_of.items()]
        if len(called) > 1:
            called[-1] += "; call them in the same order on all ranks"
            return f"ranks called different operations as {where}: {', '.join(called)}"
        gone = named([rank for rank in group.ranks if rank not in heads])
        return (
            f"{called[0]} as {where}, but {gone} called join(): only Sum and Average of allreduce can be done with"
            " those who have joined"
        )

    # Join.

    def _invite_joined(self, group: GroupProgress, calls: dict[int, int], signature: Signature | None) -> None:
        """Let ranks that have joined and have not called this operation take part."""
        if len(calls) == len(group.ranks):
            return
        order = Participate(group.number, group.agreed)
        if signature is not None:
            order = Participate(group.number, group.agreed, *astuple(signature))
        self._tell([rank for rank in group.ranks if rank not in calls], order)

    def _set_throttle(self, group: GroupProgress) -> None:
        waits = bool(group.joining) or group.agreed < group.steady_at
        if waits != group.is_throttled and not group.has_failed:
            group.is_throttled = waits
            self._tell(group.ranks, Throttle(group.number, waits))

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
    """A text such as ``ranks 1 and 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {joined([str(rank) for rank in ranks])}"


def joined(words: list[str]) -> str:
    """A list such as ``a, b and c``, or the first few of many."""
    shown = words[:RANKS_SHOWN]
    if len(words) > RANKS_SHOWN:
        shown.append(f"{len(words) - RANKS_SHOWN} more")
    return " and ".join(filter(None, [", ".join(shown[:-1]), shown[-1]]))
