"""The worker: turns the user's calls into messages to the scheduler and the servers, and their answers into results.

Pure; no socket, no clock, no thread. Walk of a push: `submit` → `_transfer` (steps and places in line) → `Outbox` →
`settle` (as many messages as the window allows) → … → `handle(Values)` → copied into the user's arrays → `Complete`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvdist.config import Limits, stays_on_host
from kvdist.core.effects import (
    NEVER,
    Answered,
    Complete,
    Connect,
    Connected,
    Disconnected,
    Effect,
    Event,
    Fail,
    Machine,
    Send,
    Stop,
)
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction, Joining
from kvdist.core.outbox import Credit
from kvdist.core.requests import (
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Leave,
    Pending,
    Register,
    Request,
    SetStoreOptimizer,
    Transfer,
)
from kvdist.core.sharding import cut, row_length
from kvdist.core.traffic import Traffic
from kvdist.core.transfers import Finished, Transfers
from kvdist.core.verdict import lost, scheduler_lost
from kvdist.errors import (
    BarrierTimeout,
    ConfigError,
    FencedError,
    InitMismatch,
    KvdistError,
    OptimizerMismatch,
    PeerLostError,
    PushRefused,
    StoreClosed,
)
from kvdist.nodes import Member, Role
from kvdist.protocol.messages import (
    Abort,
    Alive,
    Barrier,
    Configure,
    Counted,
    Declare,
    Done,
    ErrorCode,
    Failed,
    Goodbye,
    Message,
    Peer,
    Placed,
    Refused,
    Rejected,
    Roster,
    Values,
    Waiting,
    Welcome,
)

VERDICT_WAIT_S = 2.0
"""How long after losing a server a worker waits for the scheduler's verdict before it judges itself."""

ASK_AGAIN_S = 1.0
"""How long the scheduler has to say who is missing at a barrier that is late."""

ERRORS: dict[int, type[KvdistError]] = {
    ErrorCode.INTERNAL: KvdistError,
    ErrorCode.INIT_MISMATCH: InitMismatch,
    ErrorCode.OPTIMIZER_MISMATCH: OptimizerMismatch,
    ErrorCode.REFUSED: PushRefused,
    ErrorCode.CONFIG: ConfigError,
}


class Worker(Machine):
    """The pure machine of a worker.

    Args:
        introduction: who this process is.
        limits: sizes and times.
        now: the time.
    """

    def __init__(self, introduction: Introduction, limits: Limits, now: float) -> None:
        self.limits = limits
        self.joining = Joining(introduction, limits.connect_timeout_s, limits.form_timeout_s, now)
        self.epoch = 0
        self.step = 0
        self.steps: dict[Member, int] = {}
        self.servers: dict[int, Member] = {}
        self.peers: tuple[Peer, ...] = ()
        self.traffic = Traffic()
        self.transfers = Transfers(limits, self.traffic)
        self.failure: Exception | None = None
        """Why every request fails from now on."""
        self._pending: dict[int, Pending] = {}
        """In the order of the calls, so the first one is the oldest."""
        self._timed: dict[int, Pending] = {}
        """Those with a deadline."""
        self._declared: dict[int, DeclareKeys] = {}
        self._barriers_passed: dict[int, int] = {}
        self._barrier_of: dict[int, Barrier] = {}
        """Request → (store, counter)"""
        self._registering: list[int] = []
        self._leaving: Leave | None = None
        self._goodbye_said = False
        self._hint: Waiting | None = None
        self._lost_links: dict[Member, tuple[float, str]] = {}
        """Member → when the broken connection counts as lost, and why it broke."""
        self._next_alive = NEVER

    @property
    def me(self) -> Member:  # type: ignore[override]  # read-only here: the joining decides
        """Who this process is."""
        return self.joining.me

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        if self.failure is not None:
            return NEVER
        requests = min((pending.due for pending in self._timed.values()), default=NEVER)
        links = min((due for due, _ in self._lost_links.values()), default=NEVER)
        return min(self.joining.deadline, self._next_alive, requests, links)

    def submit(self, requests: Sequence[Request], now: float) -> list[Effect]:
        """Take calls of the user's thread, in order. Small transfers among them leave joined."""
        effects: list[Effect] = []
        for request in requests:
            if self.failure is not None and not isinstance(request, Leave):
                effects.append(Fail(request.request, self.failure))
            elif self._leaving is not None:
                effects.append(Fail(request.request, StoreClosed("this worker has left the cluster")))
            else:
                effects += self._accept(request, now)
        return effects + self._settle()

    def refuses(self, source: Member, message: Message) -> str | None:
        """Listen to the scheduler and to the servers of the roster."""
        if source == SCHEDULER_MEMBER or self.servers.get(source.node.rank) == source:
            return None
        return f"{source} is not a server of {self.me}'s cluster"

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """React to a message of the scheduler or of a server."""
        match message:
            case Values():
                effects = self._finished(self.transfers.values(message))
            case Counted():
                effects = self._finished(self.transfers.answered(message))
            case Refused():
                effects = self._refused(message, sender)
            case Waiting():
                effects = self._hinted(message, now)
            case Rejected(reason):
                refusal = FencedError(reason) if self.joining.complete else self.joining.refusal(message)
                effects = self._fail_all(refusal)
            case _ if sender.node.role is Role.SCHEDULER:
                effects = self._control(message, now)
            case _:
                effects = []
        return effects + self._settle()

    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to a broken or mended connection."""
        match event:
            case Disconnected(member, reason) if member == SCHEDULER_MEMBER:
                # What is said now leaves with the next connection, and tells the scheduler whose it is.
                self.joining.disconnected(now)
                if self.joining.welcomed:
                    self._next_alive = now
                    self._lost_links[member] = (now + self.limits.reconnect_grace_s, reason)
            case Disconnected(member, reason) if not self._goodbye_said:
                self._lost_links[member] = (now + self.limits.reconnect_grace_s + VERDICT_WAIT_S, reason)
            case Connected(member):
                self._lost_links.pop(member, None)
            case _:
                pass
        return []

    def tick(self, now: float) -> list[Effect]:
        """Hello, heartbeat, deadlines."""
        try:
            effects = self.joining.tick(now)
        except KvdistError as error:
            return self._fail_all(error)
        for member, (due, reason) in list(self._lost_links.items()):
            if now >= due:
                return self._lost_link(member, reason)
        if now >= self._next_alive:
            self._next_alive = now + self.limits.heartbeat_s
            effects.append(Send(SCHEDULER_MEMBER, Alive()))
        for pending in [pending for pending in self._timed.values() if now >= pending.due]:
            effects += self._late(pending, now)
        return effects

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """Messages have arrived: their bytes are back in the window."""
        if self.failure is not None:
            return []
        for token in tokens:
            assert isinstance(token, Credit)
            self.transfers.release(token)
        return self._settle()

    @property
    def waiting_since(self) -> float | None:
        """Since when the oldest request waits."""
        oldest = next(iter(self._pending.values()), None)
        return None if oldest is None else oldest.since

    def explain(self, now: float) -> str | None:
        """The oldest request, and what it waits for."""
        joining = self.joining.explain(now)
        if joining is not None:
            return joining
        if not self._pending:
            return None
        oldest = next(iter(self._pending.values()))
        text = f"{self.me}: {oldest.label} has waited {now - oldest.since:.1f} s"
        if self._hint is not None:
            names = ", ".join(self._named(rank) for rank in self._hint.ranks)
            return f"{text}; {self._hint.subject} lacks {names or 'an answer'}"
        servers = self.transfers.awaited_servers(oldest.request)
        awaited = ", ".join(f"server-{rank} ({self._host(self.servers[rank])})" for rank in servers)
        return f"{text} for {awaited or 'the scheduler'}"

    def validate(self) -> None:
        """Check every invariant."""
        self.transfers.validate()

    # Calls of the user.

    def _accept(self, request: Request, now: float) -> list[Effect]:
        match request:
            case Register():
                self._open(request.request, "joining the cluster", now)
                self._registering.append(request.request)
                return self._registered() if self.joining.complete else []
            case DeclareKeys():
                self._open(request.request, f"init of {_keys(request.keys)}", now)
                self._declared[request.request] = request
                dtypes = tuple(int(dtype) for dtype in request.dtypes)
                declare = Declare(request.request, request.store, request.mode, request.keys, request.shapes, dtypes)
                return [Send(SCHEDULER_MEMBER, declare)]
            case Transfer():
                return self._transfer(request, now)
            case SetStoreOptimizer():
                self._open(request.request, "set_optimizer", now)
                return [Send(SCHEDULER_MEMBER, Configure(request.request, request.store, request.description))]
            case EnterBarrier():
                pending = self._open(request.request, "barrier", now)
                if request.timeout_s is not None:
                    self._set_deadline(pending, now + request.timeout_s)
                counter = self._barriers_passed.get(request.store, 0)
                barrier = Barrier(request.request, request.store, counter, request.statement)
                self._barrier_of[request.request] = barrier
                return [Send(SCHEDULER_MEMBER, barrier)]
            case Leave():
                return self._leave(request, now)

    def _open(self, request: int, label: str, now: float) -> Pending:
        pending = self._pending[request] = Pending(request, label, now)
        self._hint = None if len(self._pending) == 1 else self._hint
        return pending

    def _set_deadline(self, pending: Pending, due: float) -> None:
        pending.due = due
        self._timed[pending.request] = pending

    def _transfer(self, request: Transfer, now: float) -> list[Effect]:
        pending = self._open(request.request, request.label, now)
        if not request.runs:
            return [self._close(pending)]
        self.transfers.start(request)
        if request.kind.pushes:
            self.step = max(self.step, int(self.transfers.slices.pushed[request.runs[0].plan.ids[0]]))
        return []

    def _leave(self, request: Leave, now: float) -> list[Effect]:
        self._leaving = request
        pending = self._open(request.request, "leaving the cluster", now)
        if request.failure:
            self._set_deadline(pending, now + self.limits.farewell_s)
        if self.failure is not None or not self.joining.complete:
            return [self._close(pending), Stop()]
        return []

    def _settle(self) -> list[Effect]:
        """Let everything leave that may."""
        effects: list[Effect] = []
        for server, message, credit in self.transfers.take():
            effects.append(Send(self.servers[server], message, credit))
        leaving = self._leaving
        if leaving is None or self._goodbye_said or self.failure is not None:
            return effects
        if leaving.failure or self.transfers.everything_arrived:
            self._goodbye_said = True
            effects.append(Send(SCHEDULER_MEMBER, Goodbye(leaving.request, leaving.failure)))
        return effects

    # Answers of the scheduler.

    def _control(self, message: Message, now: float) -> list[Effect]:
        match message:
            case Welcome():
                self.joining.welcome(message, now)
                self._next_alive = now + self.limits.heartbeat_s
            case Roster():
                return self._roster(message)
            case Placed():
                return self._placed(message)
            case Done():
                return self._done(message.request)
            case Failed():
                pending = self._pending.get(message.request)
                self._leave_barrier(message.request)
                if pending is not None:
                    pending.error = ERRORS.get(message.code, KvdistError)(message.reason)
                    return [self._close(pending)]
            case Abort():
                return self._fail_all(lost(message))
            case _:
                pass
        return []

    def _roster(self, message: Roster) -> list[Effect]:
        self.peers = self.joining.roster(message)
        self.epoch += 1
        effects: list[Effect] = []
        for peer in self.peers:
            rank = peer.member.node.rank
            if peer.member.node.role is Role.SERVER and rank not in self.servers:
                self.servers[rank] = peer.member
                self.transfers.add_server(rank, stays_on_host(peer.endpoint))
                effects.append(Connect(peer.member, peer.endpoint))
        return effects + self._registered()

    def _registered(self) -> list[Effect]:
        requests, self._registering = self._registering, []
        return [self._close(self._pending[request], self.me.node.rank) for request in requests]

    def _placed(self, message: Placed) -> list[Effect]:
        declared = self._declared.pop(message.request, None)
        if declared is None:
            return []
        placement = message.placement
        infos = []
        columns = (declared.keys, declared.shapes, declared.dtypes, placement.first_slices, placement.homes)
        for key, shape, dtype, first, home, giver in zip(*columns, message.givers, strict=True):
            where = (home, len(self.servers), first, placement.slice_bytes, row_length(shape))
            slices = cut(math.prod(shape), dtype.itemsize, *where)
            self.transfers.slices.grow(slices[-1].number + 1)
            infos.append(KeyInfo(key, shape, dtype, tuple(slices), giver))
        return [self._close(self._pending[message.request], tuple(infos))]

    def _done(self, request: int) -> list[Effect]:
        pending = self._pending.get(request)
        if pending is None:
            return []
        self._leave_barrier(request)
        if self._leaving is not None and request == self._leaving.request:
            return [self._close(pending), *self._fail_rest(StoreClosed("the store was closed meanwhile")), Stop()]
        return [self._close(pending)]

    def _leave_barrier(self, request: int) -> None:
        """Everybody has been there: the next one of this store is another."""
        barrier = self._barrier_of.pop(request, None)
        if barrier is not None:
            passed = self._barriers_passed.get(barrier.store, 0)
            self._barriers_passed[barrier.store] = max(passed, barrier.counter + 1)

    # Answers of servers.

    def _refused(self, message: Refused, sender: Member) -> list[Effect]:
        error = ERRORS.get(message.code, KvdistError)(f"{sender} refused: {message.reason}")
        for request in self.transfers.refused(message):
            self._pending[request].error = error
        return self._finished(self.transfers.answered(message), error)

    def _finished(self, finished: Finished, error: Exception | None = None) -> list[Effect]:
        answered = [Answered(request, keys, error) for request, keys in finished.keys]
        return [*answered, *(self._close(self._pending[request]) for request in finished.requests)]

    # Ends.

    def _close(self, pending: Pending, result: object = None) -> Effect:
        self._pending.pop(pending.request, None)
        self._timed.pop(pending.request, None)
        self._hint = None
        if pending.error is not None:
            return Fail(pending.request, pending.error)
        return Complete(pending.request, result)

    def _fail_rest(self, error: Exception) -> list[Effect]:
        self.transfers.clear()
        effects: list[Effect] = [Fail(request, error) for request in self._pending]
        self._pending.clear()
        self._timed.clear()
        return effects

    def _fail_all(self, error: Exception) -> list[Effect]:
        """Nothing can go on: fail what waits now and what will be asked later."""
        if self.failure is not None:
            return []
        self.failure = error
        self._lost_links.clear()
        return [*self._fail_rest(error), Stop(error)]

    def _lost_link(self, member: Member, reason: str) -> list[Effect]:
        if member == SCHEDULER_MEMBER and self._goodbye_said and self._leaving is not None:
            # It has heard the goodbye and ended, or died: either way nobody will answer.
            return self._done(self._leaving.request)
        if member == SCHEDULER_MEMBER:
            return self._fail_all(scheduler_lost(self.joining.introduction.scheduler_endpoint, self.me))
        cause = (
            f"its connection to {self.me} broke ({reason}) and did not come back, though the scheduler still sees it"
        )
        host = self._host(member)
        error = PeerLostError(f"{member} (host {host}) was lost: {cause}", str(member), host, cause)
        return [
            Send(SCHEDULER_MEMBER, Goodbye(0, f"lost its connection to {member} ({reason})")),
            *self._fail_all(error),
        ]

    def _late(self, pending: Pending, now: float) -> list[Effect]:
        """A deadline has passed: of a goodbye, or of a barrier, which first asks once more who is missing."""
        barrier = self._barrier_of.get(pending.request)
        if barrier is None:
            return [self._close(pending), Stop()]
        if not pending.asked:
            pending.asked = True
            pending.due = now + ASK_AGAIN_S
            return [Send(SCHEDULER_MEMBER, barrier)]
        return [self._barrier_timed_out(pending, (), now)]

    def _hinted(self, hint: Waiting, now: float) -> list[Effect]:
        if not self.joining.complete:
            self.joining.hint = hint.subject
            return []
        self._hint = hint
        asked = [
            pending
            for pending in self._timed.values()
            if pending.asked and hint.subject == f"barrier {self._barrier_of[pending.request].counter}"
        ]
        return [self._barrier_timed_out(pending, hint.ranks, now) for pending in asked]

    def _barrier_timed_out(self, pending: Pending, missing: tuple[int, ...], now: float) -> Effect:
        counter = self._barrier_of.pop(pending.request).counter
        names = ", ".join(self._named(rank) for rank in missing) or "every worker"
        waited = now - pending.since
        pending.error = BarrierTimeout(f"barrier {counter} was not reached by {names} within {waited:.1f} s", missing)
        return self._close(pending)

    def _host(self, member: Member) -> str:
        return next((peer.host for peer in self.peers if peer.member == member), "unknown host")

    def _named(self, rank: int) -> str:
        for peer in self.peers:
            if peer.member.node.role is Role.WORKER and peer.member.node.rank == rank:
                return f"worker-{rank} ({peer.host})"
        return f"worker-{rank}"


def _keys(keys: Sequence[int | str]) -> str:
    shown = ", ".join(repr(key) for key in keys[:3])
    return f"key {shown}" if len(keys) == 1 else f"{len(keys)} keys ({shown}{', …' if len(keys) > 3 else ''})"
