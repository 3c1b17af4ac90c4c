"""The worker: turns calls of the user into messages to scheduler and servers, and their replies into results.

Pure: no socket, no clock, no thread. Path of a push: `submit` → `_transfer` (counts steps, queues slices) → `Outbox` →
`_flush` (sends as many messages as the window allows) → … → `handle(Values)` → copied into the user's arrays →
`CompleteRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from kvdist import errors
from kvdist.config.endpoints import stays_on_host
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.cluster_view import ClusterView
from kvdist.core.error_mapping import (
    link_lost,
    refusal,
    scheduler_away,
    scheduler_lost,
    unreachable,
    verdict,
)
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction, Joining
from kvdist.core.policy import MODES
from kvdist.core.sharding import slices_of
from kvdist.core.traffic import Traffic
from kvdist.core.worker import requests as req
from kvdist.core.worker.peers import NEIGHBOUR_WAIT_S, Peers
from kvdist.core.worker.pending import (
    REPORT_AFTER_S,
    BarrierCalls,
    BlockedReports,
    Pending,
    PendingRequests,
    SavingCalls,
    Threads,
    UnknownThreads,
)
from kvdist.core.worker.rewinding import DROPPED, Rewinding
from kvdist.core.worker.transfers import LEADER, Credit, Transfers
from kvdist.naming import waiting
from kvdist.nodes import Member, Role, server
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: workers run without it
    from kvdist.core.worker.host_aggregation import HostAggregation
    from kvdist.core.worker.newcomer import Newcomer
    from kvdist.core.worker.progress import ProgressReports


class Worker(fx.Machine):
    """The pure machine of a worker.

    Args:
        introduction: identity of this process.
        limits: sizes and times.
        now: the time.
        aggregation: sums the pushes of workers of this host; None if every worker pushes for itself.
    """

    def __init__(
        self,
        introduction: Introduction,
        limits: Limits,
        now: float,
        aggregation: HostAggregation | None = None,
    ) -> None:
        self.limits = limits
        self.joining = Joining(introduction, limits.connect_timeout_s, limits.form_timeout_s, now)
        self.epoch = 0
        self.step = 0
        self._stepped = 0
        """Slice whose pushes `step` counts."""
        self.steps: dict[Member, int] = {}
        self.peers = Peers()
        self.traffic = Traffic()
        self.transfers = Transfers(limits, self.traffic)
        self.aggregation = aggregation
        if aggregation is not None:
            aggregation.attach(self.transfers)
        self.failure: Exception | None = None
        """Error of all present and later requests."""
        self._pending = PendingRequests()
        self._declared: dict[int, req.DeclareKeys] = {}
        self._barriers = BarrierCalls(self._pending, self.peers.worker_name)
        self._saving = SavingCalls(self._pending, self.transfers)
        self._threads: Threads = UnknownThreads()
        self._blocked = BlockedReports(self._threads, self._pending, self.transfers)
        self._registering: list[int] = []
        self._leaving: req.Leave | None = None
        self._goodbye_said = False
        self._hint: msg.Waiting | None = None
        self._next_alive = fx.NEVER
        self._newcomer: Newcomer | None = None
        """State of a worker that has joined later."""
        self._progress: ProgressReports | None = None
        """Reports of progress, if a policy counts examples."""
        self._sending_since: float | None = None
        """Time since which messages to servers are in flight; None if none are."""
        self._sent_s = 0.0
        """Time with messages in flight, since the last report of times."""
        self._rewinding: Rewinding | None = None
        """Rollback under way."""
        self.rolled_back: errors.RolledBackError | None = None
        """Error of every call until the user has received it."""

    def watch(self, threads: Threads) -> None:
        """Consider the user's threads in the search for deadlocks; to be called before all other methods."""
        self._threads = threads
        self._blocked = BlockedReports(threads, self._pending, self.transfers)

    @property
    def me(self) -> Member:  # type: ignore[override]  # read-only: the joining decides
        """This process as a member."""
        return self.joining.me

    @property
    def deadline(self) -> float:
        """Time at which `tick` should run next."""
        if self.failure is not None:
            return fx.NEVER
        aggregation = fx.NEVER if self.aggregation is None else self.aggregation.deadline
        own = (self.joining.deadline, self._next_alive, self._pending.deadline, self._blocked.next_look)
        return min(self.peers.next_lost_link, aggregation, *own)

    def submit(self, requests: Sequence[req.Request], now: float) -> list[fx.Effect]:
        """Accept calls of the user's thread, in order. Small transfers among them are sent together."""
        effects: list[fx.Effect] = []
        for request in requests:
            if self.failure is not None and not isinstance(request, req.Leave):
                effects.append(fx.FailRequest(request.request, self.failure))
            elif self._leaving is not None:
                effects.append(fx.FailRequest(request.request, errors.StoreClosed("this worker has left the cluster")))
            else:
                effects += self._accept(request, now)
        return effects + self._flush(now)

    def _counters(self, newcomer: Newcomer, sender: Member, message: msg.Counters, now: float) -> list[fx.Effect]:
        """Handle a server's message with the push counters from which its rounds wait for this worker."""
        was_member = newcomer.is_member
        self.step = max(self.step, newcomer.counters(sender, message))
        released = newcomer.pop_requests()
        # In slices that are not pushed at each step this worker takes part when it asks to as a member.
        asks = newcomer.is_member and not was_member and not released
        again = [fx.Send(SCHEDULER_MEMBER, ready) for ready in newcomer.ready_again] if asks else []
        return [*again, *self._release(released, now)]

    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Return the reason to refuse a message, unless it is of the scheduler, a live server, or an aggregating
        worker."""
        if source == SCHEDULER_MEMBER or self._is_peer(source):
            return None
        if self.aggregation is not None and self.aggregation.has_left(source):
            return ""
        return f"{source} is not a server of {self.me}'s cluster"

    def _is_peer(self, source: Member) -> bool:
        return source in self.peers.live_servers or (
            self.aggregation is not None and self.aggregation.is_member(source)
        )

    def handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle a message of the scheduler, of a server, or of a worker of this host."""
        effects: list[fx.Effect] = []
        match message:
            case msg.Values() | msg.Counted() | msg.Refused():
                effects = self._answered(message)
            case msg.HandedBack() if sender.node.role is Role.SERVER:
                if self.aggregation is not None:
                    self.aggregation.handed_back(message)
                self.transfers.handed_back(message)
            case msg.Rewound():
                effects = self._rewound(sender, message, now)
            case msg.Due() | msg.NotDue() if self._rewinding is not None:
                pass  # of a step that is undone, or the server repeats it when this worker reports
            case msg.Due() if self._progress is not None:
                effects = self._progress.due(message)
            case msg.NotDue() if self._progress is not None:
                self._progress.not_due(message)
            case msg.Counters() if self._newcomer is not None:
                effects = self._counters(self._newcomer, sender, message, now)
            case _ if sender.node.role is Role.WORKER and self.aggregation is not None:
                self.aggregation.handle(sender, message, now)
            case msg.Waiting():
                effects = self._hinted(message, now)
            case msg.Rejected():
                effects = self._fail_all(self._refusal(message))
            case _ if sender.node.role is Role.SCHEDULER:
                effects = self._control(message, now)
        return effects + self._flush(now)

    def _refusal(self, message: msg.Rejected) -> errors.KvdistError:
        is_fenced = self.joining.welcomed and not message.is_over
        return errors.FencedError(message.reason) if is_fenced else self.joining.refusal(message)

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """Handle a connection event."""
        match event:
            case fx.PeerDisconnected(member, reason, after_silence) if member == SCHEDULER_MEMBER:
                # The heartbeat leaves with the next connection, and identifies it to the scheduler.
                self.joining.disconnected(now)
                if self.joining.welcomed:
                    self._next_alive = now
                    grace_s = self.limits.reconnect_grace_s(after_silence)
                    due = self.joining.scheduler_due(grace_s, after_silence, now)
                    self.peers.disconnected(member, due, reason)
            case fx.PeerDisconnected(member, reason, after_silence) if not self._goodbye_said and self._is_peer(member):
                wait_s = NEIGHBOUR_WAIT_S if member.node.role is Role.WORKER else fx.VERDICT_WAIT_S
                # Where servers have replicas the scheduler can replace a lost server, so its verdict is awaited longer.
                wait_s += self.limits.patience_s if self.peers.num_replicas else 0.0
                due = now + self.limits.reconnect_grace_s(after_silence) + wait_s
                self.peers.disconnected(member, due, reason)
            case fx.PeerConnected(member):
                self.peers.connected(member, now + self.limits.reconnect_grace_s(True, True) + fx.VERDICT_WAIT_S)
            case fx.Unreachable(member, reason) if member == SCHEDULER_MEMBER:
                endpoint = self.joining.introduction.scheduler_endpoint
                return self._fail_all(scheduler_lost(endpoint, self.me, reason))
            case fx.Unreachable(member, reason):
                return [
                    fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, f"it cannot reach {member}: {reason}")),
                    *self._fail_all(unreachable(member, self.peers.host(member), self.me, reason)),
                ]
            case _:
                pass
        return []

    def tick(self, now: float) -> list[fx.Effect]:
        """Join, send heartbeats, enforce deadlines, search for waiting threads."""
        try:
            effects = self.joining.tick(now)
        except errors.KvdistError as error:
            return self._fail_all(error)
        lost = self.peers.lost_link(now)
        if lost is not None:
            return self._lost_link(*lost)
        if now >= self._next_alive:
            self._next_alive = now + self.limits.heartbeat_s
            effects.append(fx.Send(SCHEDULER_MEMBER, msg.Alive()))
        for pending in [pending for pending in self._pending.timed if now >= pending.due]:
            effects += self._late(pending, now)
        if self.aggregation is not None:
            self.aggregation.tick(now)
        if now >= self._blocked.next_look:
            report = self._blocked.look(self._leave_in_line, now)
            effects += [fx.Send(SCHEDULER_MEMBER, report)] if report else self._stalled(now)
            since = self._threads.longest_wait_since()
            if self._progress is not None and since is not None and now - since >= REPORT_AFTER_S:
                effects += self._progress.ask_again()
        return effects + self._flush(now)

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[fx.Effect]:
        """Return the bytes of acknowledged messages to the window."""
        if self.failure is not None:
            return []
        for token in tokens:
            assert isinstance(token, Credit)
            self.transfers.release(token)
            if token.contributors and self.aggregation is not None:
                self.aggregation.arrived(token.contributors)
        return self._flush(now)

    @property
    def waiting_since(self) -> float | None:
        """Time since which the oldest request waits."""
        oldest = self._pending.oldest
        return None if oldest is None else oldest.since

    def explain(self, now: float) -> str | None:
        """Return the oldest request, and the members for which it waits."""
        joining = self.joining.explain(now)
        if joining is not None:
            return joining
        text, oldest = self._awaited(now), self._pending.oldest
        if text is None or oldest is None or oldest.is_queued:
            return text
        servers = self.transfers.awaited_servers(oldest.request)
        is_for_workers = bool(self._hint.ranks) if self._hint is not None else not servers
        acting = self._threads.may_act(now) if is_for_workers else ""
        if not acting:
            return text
        return (
            f"{text} (a deadlock is not looked for while these threads may call kvdist: {acting};"
            " KVDIST_STALL_SHUTDOWN_S ends such a wait)"
        )

    def _awaited(self, now: float) -> str | None:
        oldest = self._pending.oldest
        if oldest is None:
            return None
        hint = self._saving.hint if oldest.in_background else self._hint
        if oldest.deed:
            who, deed = ", ".join(map(self.peers.worker_name, oldest.awaits or ())) or "the other workers", oldest.deed
        elif hint is None and oldest.is_queued:
            who, deed = self._why_queued()
        elif hint is None:
            who, deed = self._awaited_servers(oldest.request) or "the scheduler", f"answer {oldest.label}"
        elif hint.ranks:
            who, deed = ", ".join(map(self.peers.worker_name, hint.ranks)), hint.deed
        else:
            who, _, deed = hint.deed.partition(" to ")
        where = "" if oldest.label in deed else f", in {oldest.label}"
        room_wait = self._threads.room_wait()
        also = f"; another push waits {room_wait}" if room_wait else ""
        return f"{self.me}: {waiting(now - oldest.since, who, deed)}{where}{also}"

    def _why_queued(self) -> tuple[str, str]:
        """Return the members for which calls are queued, and their action."""
        if self._rewinding is not None:
            return "the others", f"go back to the snapshot of step {self._rewinding.step}"
        assert self._newcomer is not None
        servers = ", ".join(f"{member} ({self.peers.host(member)})" for member in self._newcomer.silent)
        return servers or "the servers", "let it take part"

    def _awaited_servers(self, request: int) -> str:
        """Return the servers that have not answered a request, with their hosts."""
        servers = self.transfers.awaited_servers(request)
        names = ", ".join(f"server-{rank} ({self.peers.host(self.peers.servers[rank])})" for rank in servers)
        leader = self._leader
        if leader is None or not self.transfers.slices.has_delegated:
            return names
        return f"{names}, through worker-{leader.node.rank} ({self.peers.host(leader)}) that pushes for its host,"

    def view(self, shares: Callable[[Member], bool]) -> ClusterView:
        """Return the cluster for the user's threads.

        Args:
            shares: returns whether a member reads the shared memory of this process.
        """
        leader = self._leader
        far = self.peers.far_servers()
        return ClusterView(
            self.me,
            self.epoch,
            frozenset(rank for rank, member in self.peers.servers.items() if shares(member)),
            frozenset(rank for rank, member in self.peers.servers.items() if member in far),
            self._aggregating(req.ALONE_BYTES_MIN),
            self._aggregating(0),
            leader is not None and leader != self.me and shares(leader),
            self.peers.workers,
            self.peers.on_loss,
            self.peers.num_lost,
        )

    def _aggregating(self, nbytes: int) -> frozenset[int]:
        """Return the servers for which pushes of slices of this size are summed on this host."""
        aggregation = self.aggregation
        if aggregation is None:
            return frozenset()
        return frozenset(rank for rank in self.peers.servers if aggregation.aggregates(rank, nbytes))

    def validate(self) -> None:
        """Check every invariant."""
        self.transfers.validate()
        if self.aggregation is not None:
            self.aggregation.validate()

    # Calls of the user.

    def _accept(self, request: req.Request, now: float) -> list[fx.Effect]:
        if isinstance(request, req.ReportTimes):
            return self._report_times(request)
        says_nothing = isinstance(request, req.Leave) and not request.failure
        if self.rolled_back is not None and (says_nothing or isinstance(request, DROPPED)):
            return [fx.FailRequest(request.request, self.rolled_back)]
        if self._rewinding is not None and not (isinstance(request, req.Leave) and request.failure):
            self._rewinding.queued.append(request)
            self._open(request, now).is_queued = True
            return []
        if isinstance(request, req.AcceptRollback):
            error, self.rolled_back = self.rolled_back, None
            return [fx.CompleteRequest(request.request, error)]
        if self._newcomer is not None:
            answered = self._newcomer.accept(request)
            if self._newcomer.queued and self._newcomer.queued[-1] is request:
                self._open(request, now).is_queued = True
            if answered is not None:
                return answered
        match request:
            case req.Register():
                self._open(request, now)
                self._registering.append(request.request)
                return self._registered() if self.joining.complete else []
            case req.DeclareKeys():
                self._open(request, now)
                self._declared[request.request] = request
                if MODES[request.mode].by_priority:
                    self.transfers.keep_little_flying()
                return [self._pending.ask(request.request, replace(request.message, pushes=self._pushes))]
            case req.Transfer():
                return self._transfer(request, now)
            case req.UseKernels():
                self.transfers.kernels = request.kernels
                return [fx.CompleteRequest(request.request)]
            case msg.Configure() | msg.Command() | msg.Lease() | msg.Used():
                self._open(request, now)
                rests = isinstance(request, msg.Lease) and request.rests
                rest = self.aggregation.rest() if rests and self.aggregation is not None else []
                return [*rest, self._pending.ask(request.request, request)]
            case req.EnterBarrier():
                self._open(request, now, request.timeout_s)
                return [self._barriers.enter(request, self._pushes)]
            case req.ClaimFolder():
                self._open(request, now)
                return self._saving.claim(request)
            case req.SaveStore():
                self._open(request, now).in_background = True
                there = {
                    rank: member for rank, member in self.peers.servers.items() if member in self.peers.live_servers
                }
                if len(there) < len(self.peers.servers) and not request.failure:
                    request = replace(request, failure="a server is lost, and not back yet: save again")
                return self._saving.save(request, there, self._pushes)
            case req.LoadStore():
                self._open(request, now)
                self._saving.load(request)
                return []
            case req.ReportProgress():
                return self._report(request, now)
            case req.TakePart():
                return [fx.CompleteRequest(request.request, 0)]  # rounds have waited for this worker from the start
            case req.Leave():
                return self._leave(request, now)

    def _report(self, request: req.ReportProgress, now: float) -> list[fx.Effect]:
        if self._progress is None:
            from kvdist.core.worker.progress import ProgressReports  # a feature at a seam: loaded where it is used

            self._progress = ProgressReports(self._pending, self.transfers, self.peers.servers)
        self._blocked.look_later(now)
        return self._progress.report(request, now)

    def _report_times(self, request: req.ReportTimes) -> list[fx.Effect]:
        times, self._sent_s = replace(request.times, sending_us=round(self._sent_s * 1e6)), 0.0
        return [fx.Send(SCHEDULER_MEMBER, times), fx.CompleteRequest(request.request)]

    def _release(self, held: Sequence[req.Request], now: float) -> list[fx.Effect]:
        """Submit queued calls again."""
        for request in held:
            self._pending.release(request.request)
        self._hint = None if held else self._hint
        return [effect for request in held for effect in self._accept(request, now)]

    def _open(self, request: req.Request, now: float, timeout_s: float | None = None) -> Pending:
        due = fx.NEVER if timeout_s is None else now + timeout_s
        pending = self._pending.open(request.request, req.label_of(request), now, due)
        self._hint = None if len(self._pending) == 1 else self._hint
        self._blocked.look_later(now)
        return pending

    def _transfer(self, request: req.Transfer, now: float) -> list[fx.Effect]:
        pending = self._open(request, now)
        if not request.runs:
            return [self._close(pending)]
        self.transfers.start(request)
        if request.kind.pushes:
            number = int(request.runs[0].plan.ids[0])
            pushed = int(self.transfers.slices.pushed[number])
            if pushed >= self.step:
                self.step, self._stepped = pushed, number
        return []

    @property
    def _pushes(self) -> int:
        """Position of this worker in the program: steps that it has made, and steps of the others while it rested."""
        if not self.transfers.slices.has_rested:
            return self.step
        return max(self.step, self.transfers.slices.rounds_of(self._stepped))

    def _leave(self, request: req.Leave, now: float) -> list[fx.Effect]:
        self._leaving = request
        if self.aggregation is not None:
            self.aggregation.stop_leading()
        timeout_s = self.limits.farewell_s if request.failure else None
        pending = self._open(request, now, timeout_s)
        if self.failure is not None or not self.joining.complete:
            return [self._close(pending), fx.Halt()]
        return []

    @property
    def _leave_in_line(self) -> int | None:
        """Request to leave, while pushes before it are queued."""
        leaving = self._leaving
        return leaving.request if leaving is not None and not self._may_leave else None

    @property
    def _may_leave(self) -> bool:
        """Whether no push is lost if this worker leaves. If pushes may have to be sent again, each needs its reply
        first."""
        return self.transfers.is_idle if self.peers.num_replicas else not self.transfers.slices.has_lines

    def _stalled(self, now: float) -> list[fx.Effect]:
        """End the job if the user has waited for `Limits.stall_shutdown_s`."""
        since = self._threads.longest_wait_since() if len(self._pending) else None
        if since is None or not 0 < self.limits.stall_shutdown_s <= now - since:
            return []
        limit_s = self.limits.stall_shutdown_s
        text = f"{self._awaited(now)}; the job ends after {limit_s:g} s of this (KVDIST_STALL_SHUTDOWN_S)"
        return [fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, text)), *self._fail_all(errors.DeadlineExceeded(text))]

    @property
    def _leader(self) -> Member | None:
        """Worker that pushes for this host."""
        return None if self.aggregation is None else self.aggregation.leader

    def _flush(self, now: float) -> list[fx.Effect]:
        """Send all messages that may be sent now."""
        if self.failure is not None:
            return []
        effects = [] if self.aggregation is None else self.aggregation.flush(now)
        rewinding = self._rewinding
        if rewinding is not None and not rewinding.is_quiet and self.transfers.is_quiet:
            rewinding.is_quiet = True
            effects.append(fx.Send(SCHEDULER_MEMBER, msg.Quiet(rewinding.number)))
        if self._saving.waiting:
            effects += self._saving.send_loads(self._pushes)
        for rank, message, credit in self.transfers.pop_messages():
            leader = self._leader if rank == LEADER else None
            to = self.peers.servers[rank] if leader is None else leader
            effects.append(fx.Send(to, message, credit))
        if (self._sending_since is None) is not self.transfers.is_quiet:
            self._note_sending(now)
        leaving = self._leaving
        if leaving is None or self._goodbye_said:
            return effects
        may_leave = self.transfers.everything_arrived and self._may_leave
        if may_leave and not leaving.failure and self.aggregation is not None:
            effects += self.aggregation.leave(leaving.request)
            may_leave = self.aggregation.may_leave
        if leaving.failure or may_leave:
            self._goodbye_said = True
            effects.append(
                self._pending.ask(leaving.request, msg.Goodbye(leaving.request, leaving.failure, leaving.ends))
            )
        return effects

    def _note_sending(self, now: float) -> None:
        """Record that the first message to servers is in flight, or that the last has arrived."""
        if self._sending_since is None:
            self._sending_since = now
        else:
            self._sent_s += now - self._sending_since
            self._sending_since = None

    # Messages of the scheduler.

    def _control(self, message: msg.Message, now: float) -> list[fx.Effect]:
        match message:
            case msg.Welcome():
                self.joining.welcome(message, now)
                self._next_alive = now + self.limits.heartbeat_s
                self.peers.on_loss = msg.OnLoss(message.on_loss)
                self.peers.num_replicas = message.replicas
                if message.replicas or message.on_loss not in (msg.OnLoss.FAIL, msg.OnLoss.CONTINUE):
                    self.aggregation = None  # a worker that rejoins or pushes again would push what sums already have
            case msg.Roster():
                return self._roster(message, now)
            case msg.Rewind():
                return self._rewind(message, now)
            case msg.Placed():
                return self._placed(message)
            case msg.Done():
                return self._done(message.request)
            case msg.Claimed():
                pending = self._pending.get(message.request)
                if pending is None:
                    return []
                self._saving.claimed(pending.asked_for, message)
                if message.failure:
                    pending.error = refusal(msg.ErrorCode.CHECKPOINT, message.failure)
                return [self._close(pending, message.run)]
            case msg.Failed():
                pending = self._pending.get(message.request)
                self._barriers.answered(message.request)
                if pending is not None:
                    pending.error = refusal(message.code, message.reason)
                    return [self._close(pending)]
            case msg.Leased():
                self._saving.begin_at(message.stores, message.saves)
                pending = self._pending.get(message.request)
                if message.has_rested:
                    self.transfers.slices.has_rested = True
                    self._barriers.forget()
                return [] if pending is None else [self._close(pending, message)]
            case msg.CheckBlocked():
                return [fx.Send(SCHEDULER_MEMBER, self._blocked.report(self._leave_in_line, now))]
            case msg.Abort():
                return self._fail_all(verdict(message))
            case _:
                pass
        return []

    def _roster(self, message: msg.Roster, now: float) -> list[fx.Effect]:
        if not self.joining.complete and self.me.node.rank in message.newcomers:
            from kvdist.core.worker.newcomer import Newcomer  # a feature at a seam: loaded where it is used

            self._newcomer = Newcomer(self.transfers, self.peers.servers)
            self.aggregation = None  # this host aggregates, or not, without a newcomer
        is_first, self.epoch = not self.peers.everyone, message.epoch
        effects: list[fx.Effect] = []
        for peer in self.peers.roster(message, self.joining.roster(message)):
            effects.append(fx.Connect(peer.member, peer.endpoint))
            if self._newcomer is not None or not is_first:
                effects.append(fx.Send(peer.member, msg.Ready(0)))  # or the server has no route to this worker
        effects += self._fail_over(message, now)
        for effect in () if self.aggregation is None else self.aggregation.roster(self.me, self.peers.everyone):
            if isinstance(effect, fx.Forget):
                self.peers.forget_link(effect.member)
            effects.append(effect)
        return effects + self._registered()

    def _rewind(self, message: msg.Rewind, now: float) -> list[fx.Effect]:
        """Begin a rollback after the loss of a server: drop requests, and queue new calls until all servers have rolled
        back."""
        if self.aggregation is not None:
            reason = "its host sums pushes, which cannot go back to a snapshot: set KVDIST_SNAPSHOTS on workers, too"
            return self._fail_all(errors.ConfigError(reason))
        queued = [] if self._rewinding is None else self._rewinding.queued
        queued += [] if self._newcomer is None else self._newcomer.rewind()
        kept: list[req.Request] = [one for one in queued if not isinstance(one, DROPPED)]
        self._rewinding = Rewinding(message.number, message.step, queued=kept)
        error = self.rolled_back = errors.RolledBackError(message.reason, message.step)
        effects: list[fx.Effect] = list(map(fx.Forget, self.peers.pop_lost_owners()))
        loading = {load.request for load in self._saving.waiting}
        loading.update(() if self._progress is None else self._progress.rewind())
        dropped = loading | {one.request for one in queued if isinstance(one, DROPPED)}
        self._saving.waiting.clear()
        for pending in list(self._pending):
            is_shared = isinstance(
                pending.asked_for, msg.Barrier | msg.Claim | msg.Save | msg.Load | msg.Lease | msg.Used
            )
            is_shared |= pending.request in dropped
            if is_shared or self.transfers.is_open(pending.request):
                self._barriers.answered(pending.request)
                self._saving.drop(pending.asked_for)
                pending.error = error
                effects.append(self._close(pending))
        self._barriers.forget()
        self.transfers.drop()
        self._blocked.repeat(now)
        return effects

    def _rewound(self, sender: Member, message: msg.Rewound, now: float) -> list[fx.Effect]:
        """Handle the rollback of a server. After the last server's rollback, queued calls continue."""
        rewinding = self._rewinding
        if rewinding is None or rewinding.number != message.number:
            return []
        self.transfers.slices.rewind(message.ids, message.versions)
        rewinding.told.add(sender)
        if len(rewinding.told) < self.joining.introduction.num_servers:
            return []
        self._rewinding = None
        self.step = int(self.transfers.slices.pushed.max(initial=0))
        return self._release(rewinding.queued, now)

    def _fail_over(self, message: msg.Roster, now: float) -> list[fx.Effect]:
        """Redirect messages to the servers that have the slices now, and resend the unanswered requests to lost
        servers."""
        had_slices = set(self.peers.servers.values())
        heirs: dict[Member, int] = {}
        effects: list[fx.Effect] = []
        for number, before, owner in self.peers.move(message.owners or range(self.joining.introduction.num_servers)):
            is_near = stays_on_host(owner.endpoint)
            if before is None:
                self.transfers.add_server(number, is_near)
                continue
            if self.peers.num_replicas and self._newcomer is not None and self._newcomer.is_waiting:
                cause = f"{before} was lost while this worker was joining"
                return self._fail_all(errors.PeerLostError(f"{cause}: start it again", str(before), "", cause))
            if self.peers.num_replicas:
                self.transfers.send_again(number, is_near)
                effects += [] if self._progress is None else self._progress.again(number)
            if owner.member not in had_slices:
                heirs[owner.member] = number
        lost = self.peers.pop_lost_servers()
        marks = [mark for heir, number in heirs.items() for mark in self._saving.give_up(heir, number)]
        # Forgotten last, which frees the window: later messages must follow the messages of this flush.
        return [*effects, *marks, *self._flush(now), *map(fx.Forget, lost)]

    def _registered(self) -> list[fx.Effect]:
        requests, self._registering = self._registering, []
        return [self._close(self._pending[request], self.me.node.rank) for request in requests]

    def _placed(self, message: msg.Placed) -> list[fx.Effect]:
        declared = self._declared.pop(message.request, None)
        if declared is None:
            return []
        placement = message.placement
        infos, aggregated, last = [], [], -1
        in_rounds: list[int] = []
        later: list[int] = []
        is_lockstep = MODES[declared.mode].is_lockstep
        num_servers = self.joining.introduction.num_servers  # also while a server is lost, and not back yet
        aggregation = self.aggregation if self.aggregation is not None and self.aggregation.servers else None
        pulled = declared.pulled_as or declared.dtypes
        columns = (declared.keys, declared.shapes, declared.dtypes, pulled, declared.message.forms)
        homes = (placement.first_slices, placement.homes, message.givers)
        for key, shape, dtype, pulled_as, form, first, home, giver in zip(*columns, *homes, strict=True):
            slices = slices_of(shape, dtype.itemsize, form, home, num_servers, first, placement.slice_bytes)
            last = max(last, slices[-1].number)
            if is_lockstep:
                in_rounds += range(first, slices[-1].number + 1)
            if giver == msg.LATER:
                later += range(first, slices[-1].number + 1)
            is_half = dtype.accumulate != dtype.storage  # the sum of a host could round or overflow
            if aggregation is not None and is_lockstep and not form and not is_half:  # else nothing is summed
                sizes = ((piece, piece.count * dtype.itemsize) for piece in slices)
                aggregated += [piece.number for piece, size in sizes if aggregation.aggregates(piece.server, size)]
            other = None if pulled_as is dtype else pulled_as
            infos.append(req.KeyInfo(key, shape, dtype, tuple(slices), giver, other, form=form))
        if self._newcomer is not None and declared.keys:
            self._newcomer.declared(declared, min(placement.first_slices), last, later)
        self.transfers.slices.grow(last + 1)
        self.transfers.slices.aggregated[aggregated] = True
        self.transfers.slices.is_lockstep[in_rounds] = True
        return [self._close(self._pending[message.request], tuple(infos))]

    def _done(self, request: int) -> list[fx.Effect]:
        pending = self._pending.get(request)
        if pending is None:
            return []
        self._barriers.answered(request)
        if self._leaving is not None and request == self._leaving.request:
            return [
                self._close(pending),
                *self._fail_rest(errors.StoreClosed("the store was closed meanwhile")),
                fx.Halt(),
            ]
        return [self._close(pending)]

    # Replies of servers.

    def _answered(self, message: msg.Values | msg.Counted | msg.Refused) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        if self.aggregation is not None:
            effects = self.aggregation.pass_on(message)
        refusals: dict[int, Exception] = {}
        if isinstance(message, msg.Refused):
            for request, rank in self.transfers.refused(message).items():
                refusals[request] = refusal(message.code, f"{server(rank)} refused: {message.reason}")
        if isinstance(message, msg.Values):
            finished = self.transfers.values(message)
        else:
            finished = self.transfers.answered(message)
        for request in refusals.keys() - {request for request, _ in finished.keys}:
            self._pending[request].error = refusals[request]
        effects += [fx.CompleteKeys(request, keys, refusals.get(request)) for request, keys in finished.keys]
        return [*effects, *(self._close(self._pending[request]) for request in finished.requests)]

    # The end.

    def _close(self, pending: Pending, result: object = None) -> fx.Effect:
        if pending.in_background:
            self._saving.hint = None
        else:
            self._hint = None
        return self._pending.close(pending, result)

    def _fail_rest(self, error: Exception) -> list[fx.Effect]:
        self.transfers.clear()
        for holder in (self._newcomer, self._rewinding):
            if holder is not None:
                holder.queued.clear()
        return self._pending.fail_all(error)

    def _fail_all(self, error: Exception) -> list[fx.Effect]:
        """Fail all present and later requests."""
        if self.failure is not None:
            return []
        self.failure = error
        self.peers.forget_links()
        return [*self._fail_rest(error), fx.Halt(error)]

    def _lost_link(self, member: Member, reason: str) -> list[fx.Effect]:
        if member == SCHEDULER_MEMBER and self._goodbye_said and self._leaving is not None:
            # The scheduler has ended after the goodbye, or was lost: no reply will come.
            return self._done(self._leaving.request)
        if member == SCHEDULER_MEMBER:
            endpoint, away_s = self.joining.introduction.scheduler_endpoint, self.joining.away_s
            return self._fail_all(scheduler_away(endpoint, self.me, away_s))
        return [
            fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, f"lost its connection to {member} ({reason})")),
            *self._fail_all(link_lost(member, self.peers.host(member), self.me, reason)),
        ]

    def _late(self, pending: Pending, now: float) -> list[fx.Effect]:
        """Handle the expired deadline of a barrier or of a goodbye."""
        effects = self._barriers.late(pending, now)
        self._hint = None
        return [self._close(pending), fx.Halt()] if effects is None else effects

    def _hinted(self, hint: msg.Waiting, now: float) -> list[fx.Effect]:
        if not self.joining.complete:
            self.joining.hinted(hint.deed, now)
            return []
        if self._saving.hinted(hint):
            return []
        effects = self._barriers.hinted(hint, now)
        self._hint = None if effects else hint
        return effects
