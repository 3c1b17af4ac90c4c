"""The server: joins the cluster, obeys the scheduler, passes messages of workers to its shards. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from kvdist import errors
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.error_mapping import replicas_differ, scheduler_away, scheduler_lost, verdict
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction, Joining
from kvdist.core.policy import MODES
from kvdist.core.server.buffers import Allocate, Buffer, ordinary_memory
from kvdist.core.server.checkpoints import Restoring, ServerCheckpoints
from kvdist.core.server.commands import Handler, perform
from kvdist.core.server.decoding import decoded
from kvdist.core.server.peers import Peers
from kvdist.core.server.replies import Replies
from kvdist.core.server.shard import LatePush, Shard, hints
from kvdist.core.traffic import Traffic
from kvdist.core.worker.transfers import PRIORITY_MESSAGES_PER_WINDOW
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.nodes import Member, Role
from kvdist.optimizer.registry import from_description
from kvdist.optimizer.updater import Arithmetic, Updater
from kvdist.protocol import messages as msg

if TYPE_CHECKING:  # a feature at a seam: servers run without it
    from kvdist.core.server.progress import Quotas

HINTS_PER_WAIT = 5
"""Number of hints from a server to a worker that waits for a round, until the worker reports the wait."""


class Server(fx.Machine):
    """The pure machine of a server.

    Class attributes: the class of the shard, and how many other servers keep copies of its slices.

    Args:
        introduction: the identity of this process and its endpoint.
        limits: sizes and times.
        kernels: the arithmetic of this host; sparse tables always use it.
        now: the time.
        allocate: returns memory for values.
        handlers: the handlers of users' commands, by the command's number.
        arithmetic: the arithmetic for arrays; None for this host's.
    """

    SHARD: type[Shard] = Shard
    REPLICAS = 0
    hears_of_work = True

    def __init__(
        self,
        introduction: Introduction,
        limits: Limits,
        kernels: Kernels,
        now: float,
        allocate: Allocate = ordinary_memory,
        handlers: Mapping[int, Handler] = MappingProxyType({}),
        arithmetic: Arithmetic | None = None,
    ) -> None:
        self.limits = limits
        self.joining = Joining(introduction, limits.connect_timeout_s, limits.form_timeout_s, now)
        self.on_loss = msg.OnLoss.FAIL
        self.epoch = 0
        self.step = 0
        self.steps: dict[Member, int] = {}
        self.traffic = Traffic()
        self.peers = Peers()
        self.replies = Replies(limits, self.traffic, self.peers)
        self.checkpoints = ServerCheckpoints(self.peers)
        arithmetic = arithmetic or Arithmetic(kernels, partial(Updater, kernels=kernels))
        self.shard = self.SHARD(limits, arithmetic, kernels, allocate, self.replies, self.checkpoints)
        self._restoring = Restoring((self.shard,))
        self._handlers = handlers
        self._assigned: dict[tuple[int, int], msg.Assign] = {}
        """(store, first slice) → order of the scheduler, kept for a backup."""
        self._optimizers: dict[int, msg.SetOptimizer] = {}
        self._hold = 0
        """`Roster.hold` of the newest roster."""
        self._fates: dict[Member, tuple[msg.Fate, ...]] = {}
        """Lost worker of the roster, if this server has known it → its fate in the slices of this server."""
        self._released: set[Member] = set()
        """Lost workers of the roster whose processes have ended, and read nothing of this server any more."""
        self._quotas: Quotas | None = None
        """Progress of the workers, if a policy counts examples and this server counts them."""
        self._next_alive = fx.NEVER
        self._next_look = fx.NEVER
        self._scheduler_lost_at = fx.NEVER
        self._stopping = False

    @property
    def me(self) -> Member:  # type: ignore[override]  # read-only: the joining decides
        """This process as a member."""
        return self.joining.me

    @property
    def numbers(self) -> tuple[int, ...]:
        """Numbers in the placement whose slices this server has: its rank, and numbers that it has taken over."""
        return (self.me.node.rank,)

    @property
    def is_whole(self) -> bool:
        """Whether another server has a copy of all slices of this server."""
        return False

    @property
    def deadline(self) -> float:
        """Time at which `tick` should run next."""
        due = fx.NEVER if self._quotas is None else self._quotas.deadline
        return min(self.joining.deadline, self._next_alive, self._next_look, self._scheduler_lost_at, due)

    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Return the reason to refuse a message, unless it is of the scheduler or a live worker of the roster."""
        if source == SCHEDULER_MEMBER or self.peers.has(source):
            return None
        if source in self.peers.left or not self.joining.complete:
            return ""  # the roster is known before the sender retransmits
        if source in self.peers.lost:
            self._note_late(source, message)
            return _given_up(source)
        return f"{source} is not a worker of this cluster: it belongs to an earlier job, or was replaced"

    def _note_late(self, lost: Member, message: msg.Message) -> None:
        """Record in the ledger that a push of a worker that was evicted is refused."""
        if not isinstance(message, LatePush):
            return
        if self.shard.ledger is not None:
            self.shard.ledger.fenced(lost, message, self.shard.holder)

    def handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle a message of a worker or of the scheduler."""
        match message:
            case msg.Push():
                self.shard.push(sender, message, now)
            case msg.CompressedPush():
                self.shard.push(sender, decoded(message, self.shard.kernels), now)
            case msg.JoinedPush():
                self.shard.push_joined(sender, message, now)
            case msg.Pull():
                self.shard.pull(sender, message, now)
            case msg.PullState():
                self.shard.pull_state(sender, message)
            case msg.ReplaceState():
                self.shard.replace_state(sender, message)
            case msg.MarkPushes():
                self.checkpoints.mark(sender, message)
            case msg.Progress():
                return self._progress(sender, message, now)
            case msg.InitValues() | msg.ReplaceValues():
                self.shard.initialise(sender, message)
            case msg.InitRows():
                self.shard.initialise_rows(sender, message)
            case msg.PushRows():
                self.shard.push_rows(sender, message, now)
            case msg.PullRows():
                self.shard.pull_rows(sender, message, now)
            case _:
                return self._control(message, now) if sender.node.role is Role.SCHEDULER else []
        return self._replies()

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """Handle a connection event. Only that of the scheduler matters, which judges the workers."""
        if isinstance(event, fx.PeerDisconnected):
            if event.member == SCHEDULER_MEMBER and not self._stopping:
                # The heartbeat leaves with the next connection, and identifies it to the scheduler.
                self.joining.disconnected(now)
                if self.joining.welcomed:
                    self._next_alive = now
                    grace_s = self.limits.reconnect_grace_s(event.after_silence)
                    self._scheduler_lost_at = self.joining.scheduler_due(grace_s, event.after_silence, now)
        elif isinstance(event, fx.Unreachable):
            if event.member == SCHEDULER_MEMBER:
                return [fx.Halt(scheduler_lost(self.joining.introduction.scheduler_endpoint, self.me, event.reason))]
            if event.member in self.peers.lost:
                return []  # it acknowledges nothing, and learns of its eviction whenever it sends
            if self.on_loss is not msg.OnLoss.FAIL:  # the worker ends, and the others go on
                return [fx.Send(event.member, msg.Rejected(f"{self.me} cannot reach {event.member}: {event.reason}"))]
            return [fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, f"it cannot reach {event.member}: {event.reason}"))]
        elif isinstance(event, fx.Persisted):
            if isinstance(event.token, msg.Restore | msg.Prepare):
                return self._restoring.persisted(event)
            return self.checkpoints.persisted(event)
        elif isinstance(event, fx.Worked):
            if self.joining.complete and not self._stopping:
                computed_us, waited_us = round(event.computed_s * 1e6), round(event.waited_s * 1e6)
                return [fx.Send(SCHEDULER_MEMBER, msg.StepTimes(0, 0, 0, computed_us, waited_us, 0))]
        elif getattr(event, "member", None) == SCHEDULER_MEMBER:
            self._scheduler_lost_at = fx.NEVER
        return []

    def tick(self, now: float) -> list[fx.Effect]:
        """Send heartbeats, and hints to workers that wait; enforce deadlines."""
        try:
            effects = self.joining.tick(now)
        except errors.KvdistError as error:
            return [fx.Halt(error)]
        if now >= self._scheduler_lost_at:
            endpoint, away_s = self.joining.introduction.scheduler_endpoint, self.joining.away_s
            return [fx.Halt(scheduler_away(endpoint, self.me, away_s))]
        if now >= self._next_alive:
            self._next_alive = now + self.limits.heartbeat_s
            effects.append(fx.Send(SCHEDULER_MEMBER, msg.Alive()))
        if now >= self._next_look:
            self._next_look = now + self._look_every_s
            effects += hints(self.shard.waits(now - self._look_every_s), now)
        if self._quotas is not None:
            effects += self._quotas.tick(now)
        return effects

    def acknowledged(self, member: Member, tokens: Sequence[object], now: float) -> list[fx.Effect]:
        """Release the buffers of acknowledged values."""
        for token in tokens:
            assert isinstance(token, tuple)
            for buffer in token:
                assert isinstance(buffer, Buffer) and buffer.leases > 0
                buffer.leases -= 1
        return []

    @property
    def waiting_since(self) -> float | None:
        """Time since which this server waits for the cluster to form; None afterwards, as workers explain open
        rounds."""
        return None if self.joining.complete else self.joining.started_at

    def explain(self, now: float) -> str | None:
        """Return the oldest open round, and the workers missing in it."""
        waiting = self.joining.explain(now)
        if waiting is not None:
            return waiting
        oldest = min(
            (wait for wait in self.shard.waits(now) if wait.missing),
            key=lambda wait: wait.round.open_since,
            default=None,
        )
        return None if oldest is None else oldest.describe(now)

    def validate(self) -> None:
        """Check every invariant."""
        self.replies.validate()
        self.checkpoints.validate()
        self.shard.validate()

    def _progress(self, sender: Member, message: msg.Progress, now: float) -> list[fx.Effect]:
        if self._quotas is None:
            from kvdist.core.server.progress import Quotas  # a feature at a seam: loaded where it is used

            self._quotas = Quotas(self.peers)
        return self._quotas.heard(sender, message, now)

    # Messages of the scheduler.

    def _control(self, message: msg.Message, now: float) -> list[fx.Effect]:
        match message:
            case msg.Welcome():
                self.joining.welcome(message, now)
                self.on_loss = msg.OnLoss(message.on_loss)
                self.peers.awaits_return = self.on_loss is msg.OnLoss.WAIT
                self._next_alive = now + self.limits.heartbeat_s
                if message.replicas != self.REPLICAS:
                    return [fx.Halt(replicas_differ(self.me, self.REPLICAS, message.replicas))]
            case msg.Rejected():
                is_fenced = self.joining.complete  # else it has never joined
                return [fx.Halt(errors.FencedError(message.reason) if is_fenced else self.joining.refusal(message))]
            case msg.Roster():
                return self._roster(message, now)
            case msg.Join():
                return self._join(message)
            case msg.Assign():
                assigned = self._assign(message)
                return [*self._begin_together(message.store), fx.Send(SCHEDULER_MEMBER, assigned)]
            case msg.SetOptimizer():
                return self._set_optimizer(message, now)
            case msg.Prepare():
                return self._restoring.prepare(message, str(self.me.node))
            case msg.Restore():
                return self._restoring.read(message)
            case msg.TakeRestored() if message.rollback:
                return self._roll_back(message)
            case msg.TakeRestored() | msg.DropRestored():
                return self._restoring.end(message)
            case msg.TakeSnapshot():
                self.checkpoints.take_at(message, self.shard.versions_at(message))
                return self._replies()
            case msg.Perform():
                return [fx.Send(SCHEDULER_MEMBER, perform(self._handlers, message, self.me.node.rank))]
            case msg.Abort():
                return [fx.Halt(verdict(message))]
            case msg.Waiting():
                pass  # a hint for joining members; the scheduler prints it, too
            case msg.Stop():
                self._stopping = True
                return [fx.Halt()]
            case _:
                return [fx.Log(f"ignored an unexpected {type(message).__name__} from the scheduler")]
        return []

    def _assign(self, message: msg.Assign) -> msg.Done | msg.Failed:
        servers = self.joining.introduction.num_servers
        if MODES[message.mode].by_priority:
            self.ack_bytes_max = self.limits.priority_window_bytes // servers // PRIORITY_MESSAGES_PER_WINDOW
        failure = ""
        if message.store in self._optimizers and self._is_too_late:
            return msg.Failed(message.request, msg.ErrorCode.CONFIG, came_too_late(message.keys[0]))
        for number in self.numbers:
            failure = self.shard.assign(message, number, servers) or failure
        if failure:
            return msg.Failed(message.request, msg.ErrorCode.CONFIG, failure)
        if self.REPLICAS:
            self._assigned[message.store, min(message.placement.first_slices)] = message
        return msg.Done(message.request)

    @property
    def _look_every_s(self) -> float:
        """Time between two searches for workers that wait, which should know why when they report it after
        `explain_after_s`."""
        return self.limits.explain_after_s / HINTS_PER_WAIT

    @property
    def _is_too_late(self) -> bool:
        """Whether a key that comes now would have no place in the steps of a worker for whose return all wait."""
        return self.peers.awaits_return and self.shard.steps_made > 1

    def _roster(self, message: msg.Roster, now: float) -> list[fx.Effect]:
        self.joining.roster(message)
        gone, joined = self.peers.update(message, self.joining.introduction.endpoint)
        joined = joined if self.epoch else {}  # a new server has no rounds yet
        self.peers.name = str(self.me.node)
        self.epoch = message.epoch
        self._next_look = min(self._next_look, now + self._look_every_s)
        lost = {member.node.rank: member for member in gone if member in self.peers.lost}
        fates = self._drop(lost) if lost else {}
        self._fates |= {member: fates[rank] for rank, member in lost.items()}
        self._fates = {member: self._fates[member] for member in message.lost if member in self._fates}
        self.shard.credit(message.fates)
        counters = self._cut(message.hold, joined)
        self.shard.roster({member.node.rank for member in gone})
        self.checkpoints.roster()
        # Before checkpoints are reported as saved: the fates tell how much of the data counts.
        effects: list[fx.Effect] = [fx.Send(SCHEDULER_MEMBER, self._seen())]
        effects += [*self._replies(), *counters]
        effects += [fx.Forget(member) for member in gone if member not in self.peers.lost]
        # A worker that is cut off from the scheduler may wait for values of this server.
        effects += [fx.Send(member, msg.Rejected(_given_up(member))) for member in lost.values()]
        effects += [] if self._quotas is None else self._quotas.roster(now)
        return [*effects, *self._ended(message.ended)]

    def _seen(self) -> msg.Seen:
        """Return the answer to the newest roster."""
        told = tuple(fate for fates in self._fates.values() for fate in fates)
        valueless = np.array(self.shard.valueless() if self._fates else [], np.uint32)
        versions = self.shard.held_versions(self._versions_more)
        highest = max(versions, default=0)
        lowest = min((version for version in versions if version >= highest - 1), default=msg.LATER)
        return msg.Seen(self.epoch, told, valueless, self.is_whole, highest, lowest)

    @property
    def _versions_more(self) -> int:
        """Number of versions of each slice that may be made during a hold."""
        return 0 if self.peers.awaits_return else 1

    def _cut(self, hold: int, joined: Mapping[int, int]) -> list[fx.Effect]:
        """End the last hold, let rounds wait for workers that have become members, and begin the next hold.

        Args:
            hold: as in the roster.
            joined: rank → version from which on rounds wait for a worker.
        """
        effects: list[fx.Effect] = []
        if hold != self._hold and self._hold:
            effects = self._counters(joined, self.shard.admit(tuple(joined), max(joined.values(), default=0)))
        self._hold = hold
        if hold:
            self.shard.promise(self._versions_more)
        return effects

    def _drop(self, lost: Mapping[int, Member]) -> dict[int, tuple[msg.Fate, ...]]:
        """Drop contributions of lost workers that are not counted yet, before any round closes without these workers.

        Marks are dropped first, or a checkpoint would wait for pushes that never count. If all wait for a rejoin, the
        worker pushes again whatever is not counted, so its marks and its counted pushes stay.
        """
        if self.peers.awaits_return:
            for holder in self.shard:
                holder.round.drop_uncounted(lost.keys())
            return dict.fromkeys(lost, ())
        self.checkpoints.unmark(lost.keys())
        fates: dict[int, tuple[msg.Fate, ...]] = dict.fromkeys(lost, ())
        for fate in self.shard.drop(lost):
            fates[fate.rank] += (fate,)
        return fates

    def _join(self, message: msg.Join) -> list[fx.Effect]:
        """Let rounds of a store wait for members that they have left out, and send these their counters."""
        counters = self.shard.join(message)
        return [
            *self._replies(),
            *self._counters(message.ranks, counters),
            fx.Send(SCHEDULER_MEMBER, msg.Done(message.request)),
        ]

    def _counters(self, ranks: Iterable[int], counters: Sequence[tuple[int, int, int, int]]) -> list[fx.Effect]:
        """Return messages to workers with the start of their counters: see `Shard.admit`."""
        rows: dict[int, list[list[int]]] = {rank: [] for rank in ranks if rank in self.peers.workers}
        for rank, *row in counters:
            if rank in rows:
                rows[rank].append(row)
        effects: list[fx.Effect] = []
        for rank, columns in rows.items():
            mine = np.array(columns, np.uint32).reshape(-1, 3)
            effects.append(fx.Send(self.peers.workers[rank], msg.Counters(*(column.copy() for column in mine.T))))
        return effects

    def _begin_together(self, store: int) -> list[fx.Effect]:
        """Let new slices wait for those that have come back, where all wait for lost workers."""
        counters = self.shard.begin_together(store) if self.peers.awaits_return else []
        return self._counters({rank for rank, *_ in counters} & self.peers.workers.keys(), counters)

    def _roll_back(self, message: msg.TakeRestored) -> list[fx.Effect]:
        """Continue from a snapshot that was read, and send the workers the start of their counters."""
        self.checkpoints.clear()
        self.peers.rest(set())
        if self._quotas is not None:
            self._quotas.clear()
        slices = self.shard.roll_back(message.store, self._restoring.pop_read(message.store))
        ids = np.array([number for number, _ in slices], np.uint32)
        versions = np.array([holder.round.version for _, holder in slices], np.uint32)
        rewound = msg.Rewound(message.rollback, ids, versions)
        told = [fx.Send(member, rewound) for member in self.peers.workers.values()]
        return [*told, fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]

    def _ended(self, members: Sequence[Member]) -> list[fx.Effect]:
        """Release memory that lost workers could still read, as their processes have ended.

        A worker that was only silent may go on, and must not see values change before it learns of its eviction.
        """
        news = [member for member in members if member in self.peers.lost and member not in self._released]
        for member in news:
            self.shard.release(member)
        self._released = set(members)
        return [fx.Forget(member) for member in news]

    def _replies(self) -> list[fx.Effect]:
        effects = self.replies.pop_messages()
        if self.checkpoints.ready:
            effects += self.checkpoints.take_effects()
        return effects

    def _set_optimizer(self, message: msg.SetOptimizer, now: float) -> list[fx.Effect]:
        present = self._optimizers.get(message.store)
        if present is not None and present.description == message.description:
            return [fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]  # and its state stays
        keys = [holder.round.key for holder in self.shard if holder.store == message.store]
        if keys and self._is_too_late:
            return [
                fx.Send(SCHEDULER_MEMBER, msg.Failed(message.request, msg.ErrorCode.CONFIG, came_too_late(keys[0])))
            ]
        try:
            optimizer = from_description(message.description)
            self.shard.set_optimizer(message.store, optimizer)
        except (ValueError, TypeError, errors.DeviceError) as error:
            return [fx.Send(SCHEDULER_MEMBER, msg.Failed(message.request, msg.ErrorCode.CONFIG, str(error)))]
        self._optimizers[message.store] = message
        together = self._begin_together(message.store)
        return [*self._replies(), *together, fx.Send(SCHEDULER_MEMBER, msg.Done(message.request))]


def came_too_late(key: int | str) -> str:
    """Return why a key is refused if all wait for lost workers."""
    return (
        f"{name_of(key)} is declared after the first steps, and KVDIST_ON_LOSS is 'wait' (kvdist-launch --on-loss): a"
        " worker that comes back finds its step by the versions of the keys, so every key must be pushed in each step"
        " from the first on. Declare it before the first step and push it in each, or use continue"
    )


def _given_up(worker: Member) -> str:
    return f"{worker} was given up, and the others went on without it: this process must not go on"
