"""The scheduler: gives out seats, agrees on keys and optimizers, keeps barriers, judges who is dead. Pure.

It is off the data path: pushes and pulls never pass through here. What it decides it decides once, from sets and
never from counts of messages, so a repeated request changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvdist.config import ClusterConfig
from kvdist.core.effects import (
    NEVER,
    Adopt,
    ChildEnded,
    Connected,
    Disconnected,
    Effect,
    Event,
    LauncherGone,
    Machine,
    Send,
    Stop,
)
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.keybook import Entry, KeyBook
from kvdist.core.sharding import Placer
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, PeerLostError
from kvdist.nodes import UNRANKED, Member, NodeId, Role
from kvdist.protocol.messages import (
    Abort,
    Assign,
    Barrier,
    Configure,
    Declare,
    Done,
    ErrorCode,
    Failed,
    Goodbye,
    Hello,
    Message,
    Peer,
    Placed,
    Rejected,
    Roster,
    SetOptimizer,
    Waiting,
    Welcome,
)
from kvdist.protocol.messages import (
    Stop as StopMessage,
)

Description = dict[str, str | int | float | bool | None]


@dataclass(slots=True)
class Optimizer:
    """The optimizer of a store, and who waits until every server has it."""

    description: Description
    chosen_by: Member
    installed: bool = False
    failure: str = ""
    waiters: list[tuple[Member, int]] = field(default_factory=list)


@dataclass(slots=True)
class Broadcast:
    """A request to every server, and what to do when the last one has answered."""

    awaited: set[Member]
    then: Callable[[str], list[Effect]]
    """Called with '' or with the first failure."""
    failure: str = ""


@dataclass(slots=True)
class BarrierState:
    """Who has arrived at one barrier, with which request, since when."""

    arrived: dict[int, tuple[Member, int]] = field(default_factory=dict)
    since: float = 0.0


class Scheduler(Machine):
    """The pure machine of the scheduler.

    Args:
        config: the size of the cluster and how keys are placed.
        now: the time.
    """

    def __init__(self, config: ClusterConfig, now: float) -> None:
        self.config = config
        self.limits = config.limits
        self.me = SCHEDULER_MEMBER
        self.epoch = 0
        self.step = 0
        self.complete = False
        self.seats: dict[NodeId, Peer] = {}
        self.steps: dict[Member, int] = {}
        self.books: dict[int, KeyBook] = {}
        self.optimizers: dict[int, Optimizer] = {}
        self.barriers: dict[tuple[int, int], BarrierState] = {}
        self.passed: dict[int, int] = {}
        """Store → the number of barriers that everybody has passed."""
        self.left: set[NodeId] = set()
        self.placer = Placer(
            config.num_servers, config.bigarray_bound, config.limits.slice_bytes, config.placement == "hash"
        )
        self._tokens: dict[int, Member] = {}
        self._next_incarnation = 1
        self._broadcasts: dict[int, Broadcast] = {}
        self._next_request = 0
        self._suspects: dict[Member, tuple[float, str]] = {}
        """Member → when it counts as lost, and why."""
        self._never_joined: set[int] = set()
        """Workers whose process ended well without having joined."""
        self._started_at = now
        self._form_by = now + config.limits.form_timeout_s
        self._next_look = now + config.limits.explain_after_s
        self._stop_by = NEVER
        self._stopped = False

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        suspects = min((due for due, _ in self._suspects.values()), default=NEVER)
        return min(suspects, NEVER if self.complete else self._form_by, self._next_look, self._stop_by)

    @property
    def workers(self) -> dict[int, Member]:
        """Rank → the worker there, of those who have not left."""
        return {node.rank: peer.member for node, peer in self.seats.items() if self._is_live_worker(node)}

    @property
    def servers(self) -> list[Member]:
        """The servers, by rank."""
        peers = [peer for node, peer in self.seats.items() if node.role is Role.SERVER]
        return sorted((peer.member for peer in peers), key=lambda member: member.node.rank)

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """React to a message of a server or a worker."""
        if isinstance(message, Hello):
            return self._hello(sender, message, now)
        seat = self.seats.get(sender.node)
        if seat is None or seat.member != sender:
            return [
                Send(sender, Rejected(f"{sender} is not registered with this scheduler; start the whole job again"))
            ]
        match message:
            case Declare():
                return self._declare(sender, message, now)
            case Configure():
                return self._configure(sender, message)
            case Barrier():
                return self._barrier(sender, message, now)
            case Goodbye():
                return self._goodbye(sender, message, now)
            case Done():
                return self._answered(sender, message.request, "")
            case Failed():
                return self._answered(sender, message.request, f"{sender}: {message.reason}")
            case _:
                return []

    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to connections and to what the launcher saw."""
        match event:
            case Disconnected(member, reason):
                expected = self._stop_by < NEVER or member.node in self.left
                if self._seated(member) and not expected:
                    self._suspects[member] = (now + self.limits.reconnect_grace_s, reason)
                elif self._stop_by < NEVER:
                    self.seats.pop(member.node, None)
            case Connected(member):
                self._suspects.pop(member, None)
            case ChildEnded():
                return self._child_ended(event, now)
            case LauncherGone():
                return self._abort(
                    "launcher", self.config.root_host, "it ended or was killed", None, "the launcher is gone"
                )
        return self._stop_if_over()

    def tick(self, now: float) -> list[Effect]:
        """Judge the suspects, hint at who is awaited, enforce deadlines."""
        for member, (due, reason) in list(self._suspects.items()):
            if now >= due:
                del self._suspects[member]
                return self._lost(member, reason)
        if now >= self._stop_by:
            return self._stop(None)
        if not self.complete and now >= self._form_by:
            missing = self._missing_seats()
            return self._abort(
                missing.split(",")[0],
                "",
                f"did not register within {self.limits.form_timeout_s:g} s",
                None,
                f"the cluster is incomplete after {self.limits.form_timeout_s:g} s: {missing} did not register",
            )
        if now >= self._next_look:
            self._next_look = now + self.limits.explain_after_s / 2
            return self._hints(now)
        return []

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[Effect]:
        """Nothing here is sent with a token."""
        raise AssertionError("the scheduler sends no tokens")

    @property
    def waiting_since(self) -> float | None:
        """Since when the scheduler waits for the cluster to form."""
        return None if self.complete else self._started_at

    def explain(self, now: float) -> str | None:
        """Who is awaited, by the oldest of those who wait."""
        if not self.complete:
            return f"waiting for {self._missing_seats()} to register"
        for book in self.books.values():
            wait = book.oldest_wait(self.workers.keys())
            if wait is not None:
                request, key, missing = wait
                return f"{request.member} has waited {now - request.since:.1f} s for {_names(missing)} to initialise key {key!r}"
        for (_, counter), barrier in self.barriers.items():
            missing = tuple(sorted(self.workers.keys() - barrier.arrived.keys()))
            return f"barrier {counter} has waited {now - barrier.since:.1f} s for {_names(missing)}"
        return None

    def validate(self) -> None:
        """Check every invariant."""
        incarnations = [peer.member.incarnation for peer in self.seats.values()]
        assert len(set(incarnations)) == len(incarnations), "an incarnation belongs to one process"
        live = self.workers.keys()
        for barrier in self.barriers.values():
            assert not live or not live <= barrier.arrived.keys(), "a full barrier is released at once"
        for node, peer in self.seats.items():
            assert peer.member.node == node

    # Seats.

    def _hello(self, sender: Member, message: Hello, now: float) -> list[Effect]:
        known = self._tokens.get(sender.incarnation)
        if known is not None:
            return [Send(sender, Welcome(known.node.rank, known.incarnation))]
        refusal = self._seat_refusal(sender.node.role, message)
        if refusal:
            return [Send(sender, Rejected(refusal))]
        rank = message.wanted_rank if message.wanted_rank >= 0 else self._free_rank(sender.node.role)
        member = Member(NodeId(sender.node.role, rank), self._next_incarnation)
        self._next_incarnation += 1
        self._tokens[sender.incarnation] = member
        self.seats[member.node] = Peer(member, message.host, message.pid, message.endpoint)
        effects: list[Effect] = [Send(sender, Welcome(rank, member.incarnation)), Adopt(sender, member)]
        if len(self.seats) == self.config.num_workers + self.config.num_servers:
            self.complete = True
            effects += self._announce()
        elif self._never_joined:
            effects += self._incomplete_for_ever()
        return effects

    def _seat_refusal(self, role: Role, message: Hello) -> str:
        config = self.config
        if (message.num_workers, message.num_servers) != (config.num_workers, config.num_servers):
            return (
                f"it was told of {message.num_workers} worker(s) and {message.num_servers} server(s), the scheduler of"
                f" {config.num_workers} and {config.num_servers}: DMLC_NUM_WORKER and DMLC_NUM_SERVER must agree"
            )
        count = config.num_workers if role is Role.WORKER else config.num_servers
        if message.wanted_rank >= count:
            return f"it asks for rank {message.wanted_rank} of {count} {role}(s)"
        if message.wanted_rank >= 0:
            taken = self.seats.get(NodeId(role, message.wanted_rank))
            if taken is not None:
                return (
                    f"{taken.member} is taken by process {taken.pid} on {taken.host}; process {message.pid} on"
                    f" {message.host} claims the same rank: each needs a KVDIST_RANK of its own"
                )
        elif self._free_rank(role) >= count:
            return f"the cluster has its {count} {role}(s) already"
        return ""

    def _free_rank(self, role: Role) -> int:
        rank = 0
        while NodeId(role, rank) in self.seats:
            rank += 1
        return rank

    def _announce(self) -> list[Effect]:
        """Tell everybody who is in the cluster."""
        self.epoch += 1
        present = tuple(peer for node, peer in self.seats.items() if node not in self.left)
        return [Send(peer.member, Roster(present)) for peer in present]

    def _seated(self, member: Member) -> bool:
        seat = self.seats.get(member.node)
        return seat is not None and seat.member == member

    def _is_live_worker(self, node: NodeId) -> bool:
        return node.role is Role.WORKER and node not in self.left

    def _missing_seats(self) -> str:
        wanted = [NodeId(Role.SERVER, rank) for rank in range(self.config.num_servers)]
        wanted += [NodeId(Role.WORKER, rank) for rank in range(self.config.num_workers)]
        return ", ".join(str(node) for node in wanted if node not in self.seats)

    # Keys and optimizers.

    def _declare(self, sender: Member, message: Declare, now: float) -> list[Effect]:
        book = self.books.get(message.store)
        if book is None:
            book = self.books[message.store] = KeyBook(message.store, message.mode, sender, self.limits.slice_bytes)
        effects: list[Effect] = []
        try:
            book.declare(sender, message, now)
        except InitMismatch as error:
            effects.append(Send(sender, Failed(message.request, ErrorCode.INIT_MISMATCH, str(error))))
            for request, reason in book.take_conflicts():
                if request.member != sender or request.request != message.request:
                    effects.append(Send(request.member, Failed(request.request, ErrorCode.INIT_MISMATCH, reason)))
            return effects
        return self._advance(book)

    def _advance(self, book: KeyBook) -> list[Effect]:
        """Place what is agreed, answer what is placed."""
        entries = book.take_agreed(self.workers.keys())
        effects: list[Effect] = []
        if entries:
            effects += self._place(book, entries)
        for request in book.take_answerable():
            effects.append(Send(request.member, Placed(request.request, book.placement(request.keys))))
        return effects

    def _place(self, book: KeyBook, entries: list[Entry]) -> list[Effect]:
        keys = [entry.key for entry in entries]
        sizes = [entry.size for entry in entries]
        dtypes = [DType(entry.dtype) for entry in entries]
        placement = self.placer.place(keys, sizes, [dtype.itemsize for dtype in dtypes])
        for entry, first, home in zip(entries, placement.first_slices, placement.homes, strict=True):
            entry.first_slice, entry.home = first, home

        def placed(failure: str) -> list[Effect]:
            book.mark_placed(entries)
            return self._advance(book)

        return self._ask_servers(
            lambda request: Assign(
                request, book.store, book.mode, tuple(keys), tuple(sizes), tuple(int(d) for d in dtypes), placement
            ),
            placed,
        )

    def _configure(self, sender: Member, message: Configure) -> list[Effect]:
        present = self.optimizers.get(message.store)
        if present is None or present.failure:
            optimizer = Optimizer(message.description, sender, waiters=[(sender, message.request)])
            self.optimizers[message.store] = optimizer
            return self._ask_servers(
                lambda request: SetOptimizer(request, message.store, message.description),
                lambda failure: self._configured(optimizer, failure),
            )
        if present.description != message.description:
            reason = (
                f"{present.chosen_by} set the optimizer of this store to {_shown(present.description)}, but {sender} asks"
                f" for {_shown(message.description)}: every worker must set the same one, and only once"
            )
            return [Send(sender, Failed(message.request, ErrorCode.OPTIMIZER_MISMATCH, reason))]
        if present.installed:
            return [Send(sender, Done(message.request))]
        present.waiters.append((sender, message.request))
        return []

    def _configured(self, optimizer: Optimizer, failure: str) -> list[Effect]:
        optimizer.installed = not failure
        optimizer.failure = failure
        answers: list[Effect] = []
        for member, request in optimizer.waiters:
            answer = Failed(request, ErrorCode.CONFIG, failure) if failure else Done(request)
            answers.append(Send(member, answer))
        optimizer.waiters = []
        return answers

    def _ask_servers(self, make: Callable[[int], Message], then: Callable[[str], list[Effect]]) -> list[Effect]:
        self._next_request += 1
        request = self._next_request
        self._broadcasts[request] = Broadcast(set(self.servers), then)
        return [Send(server, make(request)) for server in self.servers]

    def _answered(self, sender: Member, request: int, failure: str) -> list[Effect]:
        broadcast = self._broadcasts.get(request)
        if broadcast is None:
            return []
        broadcast.awaited.discard(sender)
        broadcast.failure = broadcast.failure or failure
        if broadcast.awaited:
            return []
        del self._broadcasts[request]
        return broadcast.then(broadcast.failure)

    # Barriers.

    def _barrier(self, sender: Member, message: Barrier, now: float) -> list[Effect]:
        if message.counter < self.passed.get(message.store, 0):
            return [Send(sender, Done(message.request))]
        barrier = self.barriers.setdefault((message.store, message.counter), BarrierState(since=now))
        if sender.node.rank in barrier.arrived:
            # Whoever asks again wants to know who is missing.
            return [Send(sender, self._barrier_hint(message.counter, barrier, now))]
        barrier.arrived[sender.node.rank] = (sender, message.request)
        return self._release_barriers()

    def _release_barriers(self) -> list[Effect]:
        effects: list[Effect] = []
        live = self.workers.keys()
        for (store, counter), barrier in list(self.barriers.items()):
            if live <= barrier.arrived.keys():
                del self.barriers[store, counter]
                self.passed[store] = counter + 1
                effects += [Send(member, Done(request)) for member, request in barrier.arrived.values()]
        return effects

    # Leaving, dying, ending.

    def _goodbye(self, sender: Member, message: Goodbye, now: float) -> list[Effect]:
        if message.failure:
            return self._lost(sender, message.failure)
        effects: list[Effect] = [Send(sender, Done(message.request))]
        if sender.node in self.left:
            return effects
        self.left.add(sender.node)
        self._suspects.pop(sender, None)
        effects += self._announce()
        effects += self._release_barriers()
        for book in self.books.values():
            effects += self._advance(book)
        return effects + self._stop_servers_if_alone(now)

    def _stop_servers_if_alone(self, now: float) -> list[Effect]:
        gone = {node.rank for node in self.left} | self._never_joined
        if len(gone) < self.config.num_workers or self._stop_by < NEVER:
            return []
        self._stop_by = now + self.limits.farewell_s
        return [Send(server, StopMessage()) for server in self.servers] + self._stop_if_over()

    def _stop_if_over(self) -> list[Effect]:
        over = self._stop_by < NEVER and not self.servers
        return self._stop(None) if over else []

    def _child_ended(self, event: ChildEnded, now: float) -> list[Effect]:
        seat = self.seats.get(event.node)
        if event.clean and event.node.role is Role.WORKER:
            if event.node in self.left:
                return []
            if seat is None:
                self._never_joined.add(event.node.rank)
                return self._stop_servers_if_alone(now) or self._incomplete_for_ever()
        if self._stop_by < NEVER and event.clean:
            self.seats.pop(event.node, None)
            return self._stop_if_over()
        member = seat.member if seat else Member(event.node, 0)
        return self._lost(member, event.cause + ("" if seat else " before it had joined the cluster"))

    def _incomplete_for_ever(self) -> list[Effect]:
        """A worker's process ended without joining while others wait for it."""
        waiting = [node for node in self.seats if node.role is Role.WORKER]
        if not waiting:
            return []
        absent = f"worker-{min(self._never_joined)}"
        cause = "ended without having joined the cluster"
        return self._abort(
            absent,
            "",
            cause,
            None,
            f"{absent} {cause}, but {waiting[0]} waits for it: every worker must call kv.create('dist')",
        )

    def _lost(self, member: Member, cause: str) -> list[Effect]:
        seat = self.seats.get(member.node)
        host = seat.host if seat else ""
        step = self.steps.get(member)
        where = f" (host {seat.host}, pid {seat.pid})" if seat else ""
        when = "" if step is None or member.node.role is not Role.WORKER else f" in step {step}"
        return self._abort(str(member), host, cause, step, f"{member}{where} was lost{when}: {cause}")

    def _abort(self, node: str, host: str, cause: str, step: int | None, sentence: str) -> list[Effect]:
        if self._stopped:
            return []
        verdict = Abort(node, host, cause, -1 if step is None else step, sentence)
        present = [
            peer.member for node_id, peer in self.seats.items() if str(node_id) != node and node_id not in self.left
        ]
        effects: list[Effect] = [Send(member, verdict) for member in present]
        return effects + self._stop(PeerLostError(sentence, node, host, cause, step))

    def _stop(self, error: PeerLostError | None) -> list[Effect]:
        if self._stopped:
            return []
        self._stopped = True
        return [Stop(error)]

    # Hints.

    def _hints(self, now: float) -> list[Effect]:
        """Tell workers that have waited long for whom they wait."""
        if not self.complete:
            hint = Waiting(f"{self._missing_seats()} to register", (), 0.0)
            return [Send(peer.member, hint) for peer in self.seats.values() if peer.member.node.rank != UNRANKED]
        effects: list[Effect] = []
        live = self.workers.keys()
        for (_, counter), barrier in self.barriers.items():
            hint = self._barrier_hint(counter, barrier, now)
            effects += [Send(member, hint) for member, _ in barrier.arrived.values()]
        for book in self.books.values():
            wait = book.oldest_wait(live)
            if wait is not None:
                request, key, missing = wait
                effects.append(
                    Send(request.member, Waiting(f"the declaration of key {key!r}", missing, now - request.since))
                )
        return effects

    def _barrier_hint(self, counter: int, barrier: BarrierState, now: float) -> Waiting:
        missing = tuple(sorted(self.workers.keys() - barrier.arrived.keys()))
        return Waiting(f"barrier {counter}", missing, now - barrier.since)


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(f"worker-{rank}" for rank in ranks) or "the servers"


def _shown(description: Description) -> str:
    options = ", ".join(f"{name}={value!r}" for name, value in description.items() if name != "name")
    return f"{description.get('name')}({options})"
