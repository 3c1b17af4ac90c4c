"""The scheduler: gives out seats, agrees on keys and optimizers, keeps barriers, judges who is dead. Pure.

It is off the data path: pushes and pulls never pass through here. What it decides it decides once, from sets and
never from counts of messages, so a repeated request changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from kvdist.config.settings import ClusterConfig
from kvdist.core.commands import pass_on
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import (
    NEVER,
    Bind,
    ChildEnded,
    Effect,
    Event,
    Halt,
    LauncherGone,
    Log,
    Machine,
    PeerConnected,
    PeerDisconnected,
    Persisted,
    ProcessStarted,
    Send,
    Unreachable,
)
from kvdist.core.scheduler.agreements import Agreements
from kvdist.core.scheduler.barriers import Barriers
from kvdist.core.scheduler.checkpoints import Checkpoints
from kvdist.core.scheduler.deadlocks import Deadlocks
from kvdist.core.scheduler.membership import Seats
from kvdist.core.scheduler.servers_asked import ServersAsked
from kvdist.core.sharding import Placer
from kvdist.errors import ConfigError, DeadlockError, KvdistError, PeerLostError
from kvdist.nodes import UNRANKED, Member, Role
from kvdist.protocol.messages import (
    Abort,
    Barrier,
    Blocked,
    Claim,
    Command,
    Configure,
    Declare,
    Done,
    ErrorCode,
    Failed,
    Goodbye,
    Hello,
    Load,
    Message,
    Rejected,
    Roster,
    Save,
    Saved,
    Stop,
    Waiting,
    Welcome,
)

ROSTER_GAP_S = 0.001
"""Between two rosters, for each member: to tell all of all costs the square of their number, and a thousand workers
leave at nearly the same time."""


class Scheduler(Machine):
    """The pure machine of the scheduler.

    Args:
        config: the size of the cluster and how keys are placed.
        now: the time.
        first_incarnation: where incarnations begin. A number that differs from job to job keeps processes of an earlier
            job on the same port from being taken for members of this one.
    """

    def __init__(self, config: ClusterConfig, now: float, first_incarnation: int = 1) -> None:
        self.config = config
        self.limits = config.limits
        self.me = SCHEDULER_MEMBER
        self.epoch = 0
        self.step = 0
        self.complete = False
        self.seats = Seats(config, first_incarnation)
        self.steps: dict[Member, int] = {}
        self.barriers = Barriers()
        self.asked = ServersAsked()
        placer = Placer(
            config.num_servers,
            config.bigarray_bound,
            config.limits.slice_bytes,
            config.placement == "hash",
            config.limits.priority_slice_bytes,
        )
        self.agreements = Agreements(self.seats, placer, self.asked)
        self.checkpoints = Checkpoints(self.seats, self.agreements, self.asked)
        self.deadlocks = Deadlocks()
        self._suspects: dict[Member, tuple[float, str]] = {}
        """Member → when it counts as lost, and why."""
        self._servers_gone: set[int] = set()
        """Servers that have ended after they were told to."""
        self._never_joined: set[int] = set()
        """Workers whose process ended well without having joined."""
        self._started_at = now
        self._form_by = now + config.limits.form_timeout_s
        self._next_look = now + config.limits.explain_after_s
        self._announced_at = -NEVER
        self._announce_at = NEVER
        """When a change that has not been told yet must be."""
        self._stop_by = NEVER
        self._stopped = False

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        suspects = min((due for due, _ in self._suspects.values()), default=NEVER)
        form_by = NEVER if self.complete else self._form_by
        return min(suspects, form_by, self._next_look, self._announce_at, self._stop_by, self.deadlocks.due)

    def refuses(self, source: Member, message: Message) -> str | None:
        """Listen to those who have a seat, and to the hello of those who want one."""
        if self.seats.holds(source):
            return None
        if source.node.rank == UNRANKED and source.node.role is not Role.SCHEDULER:
            return None if isinstance(message, Hello) else ""
        return f"{source} has no seat in this job: it is of an earlier one, or was replaced; start the whole job again"

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """React to a message of a server or a worker."""
        is_worker = sender.node.role is Role.WORKER
        match message:
            case Hello():
                return self._hello(sender, message)
            case Declare() if is_worker:
                return self.agreements.declare(sender, message, now)
            case Configure() if is_worker:
                return self.agreements.configure(sender, message)
            case Barrier() if is_worker:
                return self.barriers.enter(sender, message, self.seats.workers.keys(), now)
            case Blocked() if is_worker:
                self.deadlocks.report(sender, message, now)
                return []
            case Claim() if is_worker:
                return self.checkpoints.claim(sender, message)
            case Save() if is_worker:
                return self.checkpoints.save(sender, message, now)
            case Load() if is_worker:
                return self.checkpoints.load(sender, message, now)
            case Saved() if not is_worker:
                return self.checkpoints.saved(sender, message, now)
            case Command() if is_worker:
                return pass_on(sender, message, self.seats, self.asked)
            case Goodbye() if is_worker:
                return self._goodbye(sender, message, now)
            case Goodbye() if message.failure:
                return self._lost(sender, message.failure)
            case Done():
                return self.asked.answered(sender, message.request, "")
            case Failed():
                return self.asked.answered(sender, message.request, f"{sender}: {message.reason}")
            case _:
                return []

    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to connections and to what the launcher saw."""
        match event:
            case PeerDisconnected(member, reason, after_silence):
                if self.seats.holds(member) and member.node not in self.seats.left:
                    self._suspects[member] = (now + self.limits.reconnect_grace_s(after_silence), reason)
            case PeerConnected(member):
                self._suspects.pop(member, None)
            case Unreachable(member, reason):
                return self._lost(member, reason)
            case ChildEnded():
                return self._child_ended(event, now)
            case ProcessStarted(node, host, pid):
                self.seats.places[node] = f" on {host} (pid {pid} was started there, no hello yet)"
            case Persisted():
                return self.checkpoints.persisted(event)
            case LauncherGone():
                return self._abort(
                    "launcher", self.config.root_host, "it ended or was killed", None, "the launcher is gone"
                )
        return self._stop_if_alone()

    def tick(self, now: float) -> list[Effect]:
        """Judge the suspects, hint at who is awaited, enforce deadlines."""
        for member, (due, reason) in list(self._suspects.items()):
            if now >= due:
                del self._suspects[member]
                return self._server_gone(member) if self._is_over else self._lost(member, reason)
        if now >= self._stop_by:
            return self._stop(None)
        if not self.complete and now >= self._form_by:
            missing = ", ".join(self.seats.missing())
            return self._abort(
                missing.split(",")[0].split(" ")[0],
                "",
                f"did not register within {self.limits.form_timeout_s:g} s",
                None,
                f"the cluster is incomplete after {self.limits.form_timeout_s:g} s: {missing} did not register",
            )
        if now >= self._announce_at:
            return self._announce_late(now)
        if now >= self.deadlocks.due:
            return self._look_for_deadlocks(now)
        if now >= self._next_look:
            self._next_look = now + self.limits.explain_after_s / 2
            return self._hints(now)
        return []

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """A server has heard that it shall stop: the only message here that has a token."""
        return self._server_gone(member)

    @property
    def waiting_since(self) -> float | None:
        """Since when the scheduler waits for the cluster to form."""
        return None if self.complete else self._started_at

    def explain(self, now: float) -> str | None:
        """Who is awaited, by the oldest of those who wait."""
        if not self.complete:
            return self.seats.roster()
        for book in self.agreements.books.values():
            wait = book.oldest_wait(self.seats.workers.keys())
            if wait is not None:
                request, key, missing = wait
                waited = now - request.since
                return f"{request.member} has waited {waited:.1f} s for {_names(missing)} to initialise key {key!r}"
        barrier = self.barriers.oldest_wait(self.seats.workers.keys())
        if barrier is not None:
            counter, since, missing = barrier
            return f"barrier {counter} has waited {now - since:.1f} s for {_names(missing)}"
        saving = self.checkpoints.oldest_wait(self.seats.workers.keys())
        if saving is not None:
            subject, since, missing = saving
            return f"{subject} has waited {now - since:.1f} s" + (f" for {_names(missing)}" if missing else "")
        return None

    def validate(self) -> None:
        """Check every invariant."""
        self.seats.validate()
        self.barriers.validate(self.seats.workers.keys())
        self.checkpoints.validate()

    # Seats.

    def _hello(self, sender: Member, message: Hello) -> list[Effect]:
        try:
            known = self.seats.known(sender, message)
            if known is not None:
                return [Send(sender, Welcome(known.node.rank, known.incarnation)), Bind(sender, known)]
            member = self.seats.give(sender, message)
        except ConfigError as error:
            return [Send(sender, Rejected(str(error)))]
        effects: list[Effect] = [Send(sender, Welcome(member.node.rank, member.incarnation)), Bind(sender, member)]
        if self._is_over and member.node.role is Role.SERVER:
            effects.append(Send(member, Stop(), member))
        elif self.seats.all_taken:
            self.complete = True
            effects += self._announce()
        elif self._never_joined:
            effects += self._incomplete_for_ever()
        return effects

    def _announce_soon(self, now: float) -> list[Effect]:
        """Tell everybody who has left: now, or with the next who leave if all were told of another just before."""
        self._announce_at = self._announced_at + ROSTER_GAP_S * len(self.seats.peers)
        return self._announce_late(now) if now >= self._announce_at else []

    def _announce_late(self, now: float) -> list[Effect]:
        self._announced_at, self._announce_at = now, NEVER
        return self._announce()

    def _announce(self) -> list[Effect]:
        """Tell everybody who is in the cluster."""
        self.epoch += 1
        present = self.seats.present
        return [Send(peer.member, Roster(present)) for peer in present]

    # Leaving, dying, ending.

    def _goodbye(self, sender: Member, message: Goodbye, now: float) -> list[Effect]:
        effects: list[Effect] = [Send(sender, Done(message.request))]
        if message.failure:
            return effects + self._lost(sender, message.failure)
        if sender.node in self.seats.left:
            return effects
        self.seats.left.add(sender.node)
        self._suspects.pop(sender, None)
        effects += self._announce_soon(now)
        effects += self.barriers.release(self.seats.workers.keys())
        effects += self.checkpoints.release()
        return effects + self.agreements.advance_all() + self._end_if_alone(now)

    @property
    def _is_over(self) -> bool:
        """Whether every worker is gone and the servers have been told to stop."""
        return self._stop_by < NEVER

    def _end_if_alone(self, now: float) -> list[Effect]:
        """The last worker has gone: stop the servers, those too that have not registered yet."""
        gone = {node.rank for node in self.seats.left} | self._never_joined
        if len(gone) < self.config.num_workers or self._is_over:
            return []
        self._stop_by = now + self.limits.farewell_s
        self._announce_at = NEVER
        if len(self._never_joined) == self.config.num_workers:
            return [
                Log("no worker joined the cluster: does the script call kv.create('dist')?"),
                *self._stop_servers(),
            ]
        return self._stop_servers()

    def _stop_servers(self) -> list[Effect]:
        return [Send(server, Stop(), server) for server in self.seats.servers]

    def _server_gone(self, server: Member) -> list[Effect]:
        """The server has ended after it was told to, or is about to."""
        self._servers_gone.add(server.node.rank)
        return self._stop_if_alone()

    def _stop_if_alone(self) -> list[Effect]:
        over = self._is_over and len(self._servers_gone) == self.config.num_servers
        return self._stop(None) if over else []

    def _child_ended(self, event: ChildEnded, now: float) -> list[Effect]:
        node = event.node
        peer = self.seats.peers.get(node)
        if event.clean and node.role is Role.WORKER and (node in self.seats.left or peer is None):
            if peer is None:
                self._never_joined.add(node.rank)
                return self._end_if_alone(now) or self._incomplete_for_ever()
            return []
        if event.clean and self._is_over:
            return self._server_gone(Member(node, 0))
        member = peer.member if peer else Member(node, 0)
        return self._lost(member, event.cause + ("" if peer else " before it had joined the cluster"))

    def _incomplete_for_ever(self) -> list[Effect]:
        """A worker's process ended without joining: an error if others wait for it."""
        waiting = [node for node in self.seats.peers if node.role is Role.WORKER]
        if not waiting:
            return []
        absent = f"worker-{min(self._never_joined)}"
        cause = "ended without having joined the cluster"
        sentence = f"{absent} {cause}, but {waiting[0]} waits for it: every worker must call kv.create('dist')"
        return self._abort(absent, "", cause, None, sentence)

    def _lost(self, member: Member, cause: str) -> list[Effect]:
        peer = self.seats.peers.get(member.node)
        host = peer.host if peer else ""
        step = self.steps.get(member) if member.node.role is Role.WORKER else None
        where = f" (host {peer.host}, pid {peer.pid})" if peer else ""
        # Workers tell their step once a second, and with each message to the scheduler.
        when = "" if step is None else f", last heard of in step {step}"
        return self._abort(str(member), host, cause, step, f"{member}{where} was lost{when}: {cause}")

    def _abort(self, node: str, host: str, cause: str, step: int | None, sentence: str) -> list[Effect]:
        if self._stopped:
            return []
        verdict = Abort(ErrorCode.PEER_LOST, node, host, cause, -1 if step is None else step, sentence)
        return self._tell_all(verdict, PeerLostError(sentence, node, host, cause, step))

    def _look_for_deadlocks(self, now: float) -> list[Effect]:
        live = self.seats.workers.keys()
        books = [book.waits(live) for book in self.agreements.books.values()]
        known = chain(self.barriers.waits(live), self.checkpoints.waits(live), *books)
        waits = {(rank, request): missing for rank, request, missing in known}
        effects, sentence = self.deadlocks.look(live, waits, self.agreements.key_of, now)
        if not sentence or self._stopped:
            return effects
        return self._tell_all(Abort(ErrorCode.DEADLOCK, "", "", "deadlock", -1, sentence), DeadlockError(sentence))

    def _tell_all(self, verdict: Abort, error: KvdistError) -> list[Effect]:
        """The job ends, for all but the process that the verdict is about."""
        others = [peer.member for peer in self.seats.present if str(peer.member) != verdict.node]
        effects: list[Effect] = [Send(member, verdict) for member in others]
        return effects + self._stop(error)

    def _stop(self, error: KvdistError | None) -> list[Effect]:
        if self._stopped:
            return []
        self._stopped = True
        return [Halt(error)]

    # Hints.

    def _hints(self, now: float) -> list[Effect]:
        """Tell workers that have waited long for whom they wait."""
        if not self.complete:
            hint = Waiting(f"{', '.join(self.seats.missing())} to register", (), now - self._started_at)
            return [Send(peer.member, hint) for peer in self.seats.present]
        live = self.seats.workers.keys()
        effects = [*self.barriers.hints(live, now), *self.checkpoints.hints(live, now)]
        for book in self.agreements.books.values():
            wait = book.oldest_wait(live)
            if wait is not None:
                request, key, missing = wait
                hint = Waiting(f"the declaration of key {key!r}", missing, now - request.since)
                effects.append(Send(request.member, hint))
        return effects


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"worker-{rank}" for rank in ranks) or "the servers"
