"""Rank 0's part in seeing that all ranks are at the same operations, that they live, and who keeps the others waiting.

Pure: it is told what was said, by whom and when, and returns what is to be answered to whom. In the steady state, when
ranks call what they have called before, it hears of it in batches and answers nothing.

An operation that a rank *waits* to be admitted to has not begun there. If ranks differ and all of them wait, each gets
an error and the group goes on behind it. If one has begun already, its data may be anywhere, and the group ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvdist.collective.ledger import Ledger
from kvdist.collective.signature import JOIN_SIGNATURE, REFUSED, REMOVE_SET, Signature
from kvdist.collective.stalls import StallWatch
from kvdist.errors import ProtocolError
from kvdist.protocol.collective import (
    ENTRY_BYTES,
    WHOLE_JOB,
    Agreed,
    Bye,
    Complete,
    Define,
    Differ,
    Fail,
    Farewell,
    Gone,
    Hello,
    Joined,
    LastCalls,
    Leaving,
    Members,
    Pace,
    Play,
    Report,
    ToCoordinator,
    ToMember,
    Trouble,
)

EXPLAIN_S = 2.0
"""How long the news of a lost rank may come behind the errors that it causes elsewhere."""
SIGNATURES_MAX = 65_536
"""Those that are remembered, for sentences and for ranks that have joined. A rank defines again what it has forgotten
first; see `kvdist.collective.member`."""
RANKS_SHOWN = 6

Answers = list[tuple[int, ToMember]]


class Coordinator:
    """See the module.

    Args:
        size: the number of ranks.
        stalls: tells of operations that are waited for too long.
    """

    def __init__(self, size: int, stalls: StallWatch | None = None) -> None:
        self._size = size
        self._stalls = stalls or StallWatch(0.0, 0.0)
        self._hosts: dict[int, str] = {}
        self._left: set[int] = set()
        self._ledgers = {0: Ledger(tuple(range(size)))}
        self._signatures: dict[bytes, Signature] = {JOIN_SIGNATURE.digest: JOIN_SIGNATURE}
        self._heard: dict[int, float] = {}
        self._suspicions: dict[int, tuple[float, Trouble]] = {}
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
        sets = [ledger for ledger in self._ledgers.values() if 0 not in ledger.ranks and not ledger.has_failed]
        return not self._is_over and any(set(ledger.ranks) - self._left for ledger in sets)

    def hear(self, rank: int, message: ToCoordinator, now: float) -> Answers:
        """A rank has said something.

        Raises:
            ProtocolError: it makes no sense; nothing has changed.
        """
        self._heard[rank] = now
        match message:
            case Hello():
                self._welcome(rank, message)
            case Define():
                self._define(Signature(message.kind, message.name, message.tensors, message.detail, message.device))
            case Members():
                self._add_group(rank, message)
            case Report():
                self._read(rank, message, now)
            case Trouble():
                self._suspect(rank, message, now)
            case LastCalls():
                if rank not in self._left and rank not in self._last_calls and not self._is_over:
                    self._end_calls(rank, dict(message.counts))
                    self._tell(self._others(rank), Leaving(rank, self._host(rank), message.counts))
            case Bye():
                self._see_off(rank, message)
        return self._take()

    def lose(self, rank: int, cause: str) -> Answers:
        """A rank's connection is no more."""
        if rank not in self._left and not self._is_over:
            self._left.add(rank)
            self._is_over = True
            self._tell(self._others(rank), Gone(rank, self._host(rank), cause))
        return self._take()

    def tick(self, now: float) -> Answers:
        """Time has passed."""
        due = [trouble for at, trouble in self._suspicions.values() if now >= at]
        if due and not self._is_over:
            self._fail(WHOLE_JOB, due[0].text)
        if not self._is_over and not self.missing:
            alive = {rank: host for rank, host in self._hosts.items() if rank not in self._left}
            for number, ledger in self._ledgers.items():
                told = self._stalls.look(number, ledger, alive, self._heard, self._signatures, now)
                self._answers += told.answers
                if told.is_the_end:
                    self._fail(WHOLE_JOB, told.text)
                    break
        return self._take()

    # The beginning and the end.

    def _welcome(self, rank: int, hello: Hello) -> None:
        if hello.rank != rank or not 0 <= rank < self._size or rank in self._hosts or hello.size != self._size:
            raise ProtocolError(f"rank {hello.rank} of {hello.size} is none that is missing")
        self._hosts[rank] = hello.host
        if not self.missing:
            self._tell(range(self._size), Complete(tuple(self._hosts[rank] for rank in range(self._size))))

    def _see_off(self, rank: int, bye: Bye) -> None:
        self._tell([rank], Farewell())
        if rank in self._left:
            return
        self._left.add(rank)
        # Without rank 0 nobody is left to speak with, so its leave is news to the others at any time.
        if not self._is_over or rank == 0:
            self._is_over = self._is_over or bool(bye.failure)
            done = dict(bye.counts)
            self._end_calls(rank, {number: done.get(number, 0) for number in self._ledgers})
            self._tell(self._others(rank), Gone(rank, self._host(rank), bye.failure, bye.counts))

    def _suspect(self, rank: int, trouble: Trouble, now: float) -> None:
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
            if number in self._ledgers and rank in self._ledgers[number].of
        }
        self._suspicions = {of: it for of, it in self._suspicions.items() if not self._is_explained(it[1])}

    def _is_explained(self, trouble: Trouble) -> bool:
        """Whether somebody has begun, without asking, what a rank that leaves has not called: all else goes on."""
        counts = [of[trouble.group] for of in self._last_calls.values() if trouble.group in of]
        return any(trouble.sequence >= count for count in counts)

    def _fail(self, group: int, text: str) -> None:
        if group == WHOLE_JOB or group not in self._ledgers:
            self._is_over = True
            self._tell(range(self._size), Fail(WHOLE_JOB, text))
        elif not self._ledgers[group].has_failed:
            self._ledgers[group].has_failed = True
            self._tell(self._ledgers[group].ranks, Fail(group, text))

    # Agreement.

    def _define(self, signature: Signature) -> None:
        self._signatures.pop(signature.digest, None)
        self._signatures[signature.digest] = signature
        while len(self._signatures) > SIGNATURES_MAX:
            self._signatures.pop(next(iter(self._signatures)))
        self._signatures[JOIN_SIGNATURE.digest] = JOIN_SIGNATURE

    def _add_group(self, rank: int, members: Members) -> None:
        ranks = members.ranks
        if list(ranks) != sorted(set(ranks)) or rank not in ranks or ranks[-1] >= self._size:
            raise ProtocolError(f"rank {rank} is in no group of ranks {ranks}")
        ledger = self._ledgers.get(members.group)
        if ledger is None:
            self._ledgers[members.group] = Ledger(ranks)
        elif ledger.ranks != ranks:
            raise ProtocolError(f"group {members.group} has the ranks {ledger.ranks}, not {ranks}")

    def _read(self, rank: int, report: Report, now: float) -> None:
        ledger = self._ledgers.get(report.group)
        if ledger is None and not report.entries:
            return  # the last of a set that has been removed
        if ledger is None or rank not in ledger.of:
            raise ProtocolError(f"rank {rank} is not in group {report.group}")
        if ledger.has_failed or self._is_over:
            return
        if len(report.entries) % ENTRY_BYTES or (report.entries and report.first != ledger.of[rank].called):
            raise ProtocolError(f"rank {rank} reports from operation {report.first}, not {ledger.of[rank].called}")
        ledger.call(rank, report.entries, report.done, now)
        if report.entries:
            self._advance(report.group, ledger)

    def _advance(self, number: int, ledger: Ledger) -> None:
        """Compare what all ranks have called by now."""
        before, awaited = ledger.agreed, set[int]()
        while not ledger.has_failed:
            active = ledger.active()
            if not active:
                # Who has joined may still wait to be admitted to what it called before.
                self._agree(number, ledger, before, awaited)
                self._end_join(number, ledger)
                before, awaited = ledger.agreed, set()
                continue
            queues = [ledger.of[rank].queue for rank in active]
            if not all(queues):
                break
            heads = {queue[0][0] for queue in queues}
            signature = self._signatures.get(next(iter(heads)))
            refused_by_join = len(active) < len(ledger.ranks) and (signature is None or not signature.takes_zeros)
            if len(heads) > 1 or (refused_by_join and not self._is_refused(heads)):
                self._agree(number, ledger, before, awaited)
                self._differ(number, ledger, active)
                before, awaited = ledger.agreed, set()
                continue
            awaited |= {rank for rank in active if ledger.of[rank].queue[0][1]}
            self._let_play(number, ledger, active, signature)
            ledger.pass_one(active, next(iter(heads)))
            if signature is not None and signature.kind == REMOVE_SET:
                self._ledgers.pop(int(signature.detail.rpartition(" ")[2]), None)
        self._agree(number, ledger, before, awaited)
        self._set_pace(number, ledger)

    def _agree(self, number: int, ledger: Ledger, before: int, awaited: set[int]) -> None:
        if ledger.agreed > before and awaited:
            self._tell(sorted(awaited), Agreed(number, ledger.agreed))

    def _is_refused(self, heads: Iterable[bytes]) -> bool:
        signatures = [self._signatures.get(head) for head in heads]
        return all(signature is not None and signature.kind == REFUSED for signature in signatures)

    def _differ(self, number: int, ledger: Ledger, active: list[int]) -> None:
        """The active ranks have not called the same, or what cannot be done while others have joined."""
        heads = {rank: ledger.of[rank].queue[0] for rank in active}
        is_fatal = not all(waits for _, waits in heads.values())
        text = self._difference(number, ledger, {rank: digest for rank, (digest, _) in heads.items()})
        ledger.has_failed = is_fatal
        self._tell(active, Differ(number, ledger.agreed, is_fatal, text))
        if is_fatal:
            self._tell([rank for rank in ledger.ranks if rank not in heads], Fail(number, text))
        self._let_play(number, ledger, active, None)
        ledger.pass_one(active, next(iter(heads.values()))[0])

    def _difference(self, number: int, ledger: Ledger, heads: dict[int, bytes]) -> str:
        where = f"operation {ledger.agreed}" + (f" of process set {number}" if number else "")
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
        gone = named([rank for rank in ledger.ranks if rank not in heads])
        return (
            f"{called[0]} as {where}, but {gone} called join(): only Sum and Average of allreduce can be done with"
            " those who have joined"
        )

    # Join.

    def _let_play(self, number: int, ledger: Ledger, active: list[int], signature: Signature | None) -> None:
        if len(active) == len(ledger.ranks):
            return
        play = Play(number, ledger.agreed)
        if signature is not None and signature.kind != REFUSED:
            play = Play(
                number,
                ledger.agreed,
                signature.kind,
                signature.name,
                signature.tensors,
                signature.detail,
                signature.device,
            )
        self._tell([rank for rank in ledger.ranks if rank not in active], play)

    def _end_join(self, number: int, ledger: Ledger) -> None:
        self._tell(ledger.ranks, Joined(number, ledger.agreed, ledger.joining[-1]))
        ledger.joining.clear()
        ledger.pass_one(list(ledger.ranks), JOIN_SIGNATURE.digest)

    def _set_pace(self, number: int, ledger: Ledger) -> None:
        waits = bool(ledger.joining)
        if waits != ledger.is_paced and not ledger.has_failed:
            ledger.is_paced = waits
            self._tell(ledger.ranks, Pace(number, waits))

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
