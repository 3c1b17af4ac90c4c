"""Copies of slices on a second server, so that a server's death costs nothing: `KVDIST_REPLICAS=1`. Pure.

Server k keeps a copy of the slices of server k - 1, and server 0 a copy of those of the last server. Walk of a round:
it closes as usual, but the pushes are summed first, and the rule is applied to the sum (`ReplicatedShard`); the sum
goes to the backup (`Replicate`), which applies the same rule (`CopiedShard`) and acknowledges it (`Replicated`).
Invariants:

* The answer of a server to a message is held until its backup has everything that the server has done by then. So no
  worker pulls, reads or counts anything that a death could take back.
* A copy receives the same messages as its server, in the same order: first values and states from workers, and orders
  from the scheduler.
* A sum travels with the list of its contributors, so that a push that is repeated, for want of an answer, counts once.
* At the death of a server its backup promotes the copy. The copy first handles the orders of the scheduler that the
  dead server had not forwarded.
* Slices without a copy are filled in: a server with a new backup, or that has taken slices over, sends it slice after
  slice (`Fill`), each as it is between two of its rounds, in order with the forwarded messages about slices already in
  the copy. So a slice is in the copy from its `Fill` on. After the last slice the server reports to the scheduler
  (`Seen.whole`), and may be lost from then on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.checkpoint.snapshot import EVERYTHING
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.round import Admission, Contribution, Round, agreed_settings, numbers_of, scales_of, setting_of
from kvdist.core.server import slice_parts
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Allocate, Buffer, ordinary_memory
from kvdist.core.server.checkpoints import Restoring
from kvdist.core.server.commands import Handler
from kvdist.core.server.decoding import parts_of_sum
from kvdist.core.server.holder import Holder, optimizer_of
from kvdist.core.server.server import Server
from kvdist.core.server.shard import Shard, code_of
from kvdist.core.server.sparse_table import SparseTable
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.nodes import Member, Role, worker
from kvdist.optimizer.updater import Arithmetic
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import PayloadView, views

GIVEN = (msg.InitValues, msg.ReplaceValues, msg.ReplaceState, msg.InitRows)
"""Messages of workers with values from outside a round."""
SAID = (msg.Assign, msg.SetOptimizer, msg.Roster, msg.Join)
"""Messages of the scheduler about slices and members. All servers receive the same messages."""
NOBODY = Member(worker(0), 0)
"""No process has this incarnation, so it gets no replies."""
_EMPTY, _CLIPPED = int(msg.Flag.EMPTY), int(msg.Flag.MEASURE | msg.Flag.APPLY)
_NO_VALUES = np.zeros(0, np.uint8)

OUT_OF_REACH_S_MIN = 10.0
"""Least time that a server waits for a link to its backup. A handshake may take 8 s of it."""

FILLS_AHEAD = 2
"""Blocks or tables in flight to the backup that are not in the copy yet. Answers wait behind them."""

Tell = Callable[[msg.Message, tuple[Buffer, ...] | None], None]
"""Takes a message for the backup, and its token."""


class ReplicatedShard(Shard):
    """The slices of a server that has a backup."""

    tell: Tell | None = None
    """Forwards a message to the backup; None without a backup."""
    uncopied: dict[int, None]
    """Slices that are not in the copy yet, though the server has a backup."""

    def is_alone(self, number: int) -> bool:
        """Whether a slice has no copy."""
        return self.tell is None or number in self.uncopied

    def mark_uncopied(self) -> None:
        """Mark all slices as not copied, for a new backup, which has nothing."""
        self.uncopied.update({number: None for holder in self for number in holder.ids.tolist()})

    def absorb(self, other: Shard) -> None:
        """Take over a copy, with its states."""
        for (incarnation, store), examples in (other._credited | self._credited).items():
            most = max(examples, other._credited.get((incarnation, store), 0))
            fate = msg.Fate(0, incarnation, store, 0, 0, 0, 0, most)
            for shard in (self, other):  # a lost worker's examples that count in some slices count in all
                shard.credit([fate])
        self._credited = other._credited | self._credited
        for holder in other:
            self.uncopied.update(dict.fromkeys(holder.ids.tolist()))
        for block in other.blocks:
            self.blocks.add(block)
        self.tables.update(other.tables)
        for store, updater in other._updaters.items():
            for index, state in list(updater.states.items()):
                self._updaters[store].restore(index, state)

    def apply(self, holders: Sequence[Holder], rounds: Sequence[Sequence[Contribution]]) -> None:
        """Sum a round, apply the rule to the sum, and forward the sum to the backup."""
        if self.is_alone(int(holders[0].ids[0])):
            super().apply(holders, rounds)
            return
        try:
            sums = self._sums(holders, rounds)
            super().apply(holders, [[summed] for summed, _ in sums] or [()] * len(holders))
        except (errors.OptimizerMismatch, errors.PushRefused) as error:
            self._forward(holders, rounds, (), (code_of(error), str(error)))
            raise
        self._forward(holders, rounds, sums)

    def _sums(
        self, holders: Sequence[Holder], rounds: Sequence[Sequence[Contribution]]
    ) -> list[tuple[Contribution, Buffer]]:
        """Return the sum for each holder as a contribution, with its buffer; an empty list without any gradient.

        Raises:
            OptimizerMismatch, PushRefused: the contributions cannot be summed.
        """
        first = holders[0].round
        if any(one.flags & _CLIPPED for one in rounds[0]):
            raise errors.PushRefused(
                f"{name_of(first.key)}: clip_norm is not possible with replicas of servers: unset clip_norm, or"
                " start without --replicas"
            )
        present = [[one for one in contributions if not one.is_empty] for contributions in rounds]
        gradients = next(filter(None, present), None)
        if gradients is None:
            return []
        lr, wd = agreed_settings(first.key, gradients, first.began.keys(), first.policy)
        optimizer = optimizer_of(self._updaters.get(holders[0].store))
        sums = []
        for holder, some, every in zip(holders, present, rounds, strict=True):
            try:
                buffer, row_ids = holder.summed(some, scales_of(some, every, optimizer))
            except (MemoryError, TypeError, ValueError) as error:
                raise errors.PushRefused(f"{name_of(holder.round.key)}: {error}") from error
            numbers = (lr, wd, 1.0)
            summed = replace(gradients[0], flags=0, setting=numbers, values=buffer.array, row_ids=row_ids)
            sums.append((summed, buffer))
        return sums

    def _forward(
        self,
        holders: Sequence[Holder],
        rounds: Sequence[Sequence[Contribution]],
        sums: Sequence[tuple[Contribution, Buffer]],
        refusal: tuple[int, str] = (-1, ""),
    ) -> None:
        """Send a round to the backup. Each sum is leased until the backup has it."""
        assert self.tell is not None
        for i, (holder, contributions) in enumerate(zip(holders, rounds, strict=True)):
            summed, buffer = sums[i] if sums else (None, None)
            parts = holder.forwarded(buffer, None if summed is None else summed.row_ids)
            setting = (None, None, 1.0) if summed is None else summed.setting
            contributors = tuple([one.contributor for one in contributions])
            round_ = (holder.round.version, contributors, (numbers_of(setting),), *refusal)
            for position, arrays in enumerate(parts):
                if buffer is not None:
                    buffer.leases += 1
                more = i < len(holders) - 1 or position < len(parts) - 1
                ids = np.resize(holder.ids, len(arrays.counts))
                message = msg.Replicate(ids, *round_, not sums, more, arrays)
                self.tell(message, None if buffer is None else (buffer,))

    def fills(self, holder: Holder) -> Iterator[tuple[msg.Fill, tuple[Buffer, ...] | None]]:
        """Yield the messages that fill the slices of a holder in on the backup, each with its token."""
        contents = EVERYTHING if holder.has_value or isinstance(holder, SparseTable) else ()
        images, leased = self.images_of(holder.ids.tolist(), contents)
        standings, limit = _standings(holder.round)
        for image in images:
            del self.uncopied[image.number]
            about = (image.version, standings, limit, holder.round.restored, holder.has_value, image.initializer)
            messages = list(slice_parts.packed(image))
            for parts, arrays in messages:
                is_last = arrays is messages[-1][1]
                token = (leased,) if leased is not None and is_last and image is images[-1] else None
                ids = np.full(len(parts), image.number, np.uint32)
                yield msg.Fill(ids, parts, *about, not is_last, arrays), token

    def next_fills(self) -> list[tuple[msg.Fill, tuple[Buffer, ...] | None]]:
        """Return the messages that fill in the next slices that are alone, with all slices of a joint update."""
        holder = self.holder(next(iter(self.uncopied)))
        joint = (holder.joint if isinstance(holder, Block) else ()) or (holder,)
        return [fill for one in joint if one is not None for fill in self.fills(one)]


class CopiedShard(Shard):
    """A copy of the slices of another server, which closes the rounds."""

    _begun: Sequence[tuple[Holder, Sequence[Contribution]]] = ()
    """Holders that are updated together with the slices of the next messages."""
    _parts: Sequence[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = ()
    """The parts of a sum of rows that have arrived: ids and values."""

    def close_if_ready(self, holder: Holder) -> None:
        """Do nothing: the other server closes the rounds."""

    def replicate(self, message: msg.Replicate) -> None:
        """Count a round, and apply the rule to its sum."""
        empty = Contribution(NOBODY, 0, 0, 0, 0, _EMPTY, setting_of(message.settings[0]), _NO_VALUES)
        contributors = parts_of_sum(empty, message.contributors)
        member = contributors[0].member if len(contributors) == 1 else NOBODY
        summed = replace(empty, member=member, flags=0)
        table = self.tables.get(int(message.ids[0]))
        if message.has_rows is (table is None):
            return  # this copy had no memory for the table, or its sender is broken
        received: list[tuple[Holder, Sequence[Contribution]]] = []
        if table is None:
            payload = PayloadView(message.arrays)
            for first, last, block in self.blocks.cover_merged(message.ids):
                if not message.is_empty:
                    values = payload.stretch(first, last, block.dtype)[: block.pool.size]
                    summed = replace(summed, values=values)
                received.append((block, () if message.is_empty else (summed,)))
        else:
            row_ids, values = views(message.arrays)
            parts = [*self._parts, (row_ids, values)]
            self._parts = parts if message.more else ()
            if message.more:
                return
            if len(parts) > 1:
                row_ids, values = (np.concatenate(column) for column in zip(*parts, strict=True))
            summed = replace(summed, values=values, row_ids=row_ids)
            received.append((table, () if message.is_empty else (summed,)))
        for holder, _ in received:
            _count(self, holder, message, contributors)
        if message.more:
            self._begun = [*self._begun, *received]
            return
        groups = [[*self._begun, *received]] if self._begun else [[one] for one in received]
        self._begun = ()
        for group in groups if message.code < 0 else ():
            holders, rounds = zip(*group, strict=True)
            self.apply(holders, rounds)


class Copy(Server):
    """The copy of the slices of another server."""

    SHARD = CopiedShard
    shard: CopiedShard
    rank = -1
    """The rank of that server."""
    _numbers: tuple[int, ...] = ()
    _pieces: Sequence[tuple[int, npt.NDArray[Any]]] = ()
    """The pieces of a slice that is being filled in, each with its part."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """See `Server`."""
        return self._numbers

    def hear(self, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle a message that the server has forwarded. Returns the answers that the server would have sent."""
        match message:
            case msg.Fill():
                self._fill(message)
            case msg.Roster():
                self._numbers = _owned(message.owners, self.rank, self.joining.introduction.num_servers)
                return self.handle(SCHEDULER_MEMBER, message, now)
            case msg.Replicate():
                self.shard.replicate(message)
            case _:
                return self.handle(NOBODY if isinstance(message, GIVEN) else SCHEDULER_MEMBER, message, now)
        return []

    def _fill(self, message: msg.Fill) -> None:
        """Fill in a slice, or keep a piece of it until the last piece has arrived."""
        pieces = zip(message.parts.tolist(), views(message.arrays), strict=True)
        self._pieces = [*self._pieces, *((part, array.copy()) for part, array in pieces)]
        if message.more:
            return
        received, self._pieces, number = self._pieces, (), int(message.ids[0])
        holder = self.shard.holder(number)
        if holder is None:
            return
        parts = {part: np.concatenate([piece for of, piece in received if of == part]) for part, _ in received}
        (image,), _ = self.shard.images_of([number], ())
        image = slice_parts.with_parts(replace(image, initializer=message.initializer), parts)
        self.shard.load(holder.store, [image])
        holder = self.shard.holder(number)
        assert holder is not None
        if isinstance(holder, SparseTable):
            holder.has_value = message.has_value
        _stand(holder.round, message)


class ReplicatedServer(Server):
    """A server that has a backup, and is the backup of another server."""

    SHARD, REPLICAS = ReplicatedShard, 1
    shard: ReplicatedShard

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
        super().__init__(introduction, limits, kernels, now, allocate, handlers, arithmetic)
        self._new_copy = partial(Copy, introduction, limits, kernels, now, allocate, arithmetic=arithmetic)
        self.copy: Copy | None = self._new_copy()
        """The copy of the previous server's slices; None if that server is lost."""
        self._restoring = Restoring((self.shard, self.copy.shard))
        self.shard.uncopied = {}
        self._numbers: tuple[int, ...] = ()
        self._servers: dict[int, Member] = {}
        self._backup: Member | None = None
        self._is_linked = True
        """Whether the backup has sent any message, and so receives messages."""
        self._dialled_by: Member | None = None
        """The server that has sent a message, perhaps before the roster with both servers."""
        self._out_of_reach_at = fx.NEVER
        """When this server gives itself up, because it cannot reach its backup and the scheduler hears both."""
        self._why_out_of_reach = ""
        self._turns = 0
        """Number of times that it has let others go first; see `_turn`."""
        self._judged_from = 0.0
        """Time before which a scheduler that was away may not have judged lost processes."""
        self._apart: set[Member] = set()
        """Servers to which the link is broken."""
        self._log: list[tuple[msg.Message, tuple[Buffer, ...] | None]] = []
        """Messages to forward to the backup, with their tokens."""
        self._told = self._confirmed = self._heard = 0
        """Counts of messages: forwarded to the backup, confirmed by the backup, and received for the copy."""
        self._filling: deque[int] = deque()
        """For each block or table in flight to the backup: the number of messages that the backup must have for it."""
        self._was_whole = False
        """Last report to the scheduler: whether the copy is complete, in the epoch of the newest roster."""
        self._held: deque[tuple[int, list[fx.Effect]]] = deque()
        """(messages that the backup must have, effects that are held until then)"""
        self._waiting: list[tuple[Member, msg.Message]] = []
        """Messages of workers about slices of the copy, which are handled after its promotion."""
        self._said: deque[msg.Message] = deque()
        """Messages of the scheduler, which all servers hear in the same order, that the server of the copy has not
        forwarded."""
        self._early = 0
        """Number of messages that it has forwarded before they arrived from the scheduler."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """See `Server`."""
        return self._numbers

    @property
    def is_whole(self) -> bool:
        """See `Server`."""
        return self._backup is not None and not (self._filling or self.shard.uncopied)

    def refuses(self, source: Member, message: msg.Message) -> str | None:
        """Accept messages of other servers, too."""
        if source.node.role is not Role.SERVER or source in self.peers.lost:
            return super().refuses(source, message)
        # One that has heard sooner that the cluster is complete, or who is new, may speak first.
        known = self._servers.get(source.node.rank)
        if not self._servers or known == source:
            return None
        is_new = known is None or known.incarnation < source.incarnation
        return "" if is_new else f"{source} is not a server of this cluster"

    def handle(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        """Handle a message; its answers wait for the backup."""
        if sender.node.role is Role.SERVER:
            return self._of_server(sender, message, now)
        if self._is_early(message):
            self._waiting.append((sender, message))
            return []
        if sender == SCHEDULER_MEMBER and isinstance(message, msg.Roster):
            return self._hear_roster(message, now)
        if sender == SCHEDULER_MEMBER and isinstance(message, SAID) and self._servers:
            self._note_said(message)
        if isinstance(message, (*GIVEN, *SAID)):
            self._tell(message, None)
        return self._published(super().handle(sender, message, now))

    def _hear_roster(self, message: msg.Roster, now: float) -> list[fx.Effect]:
        """Handle a roster: update the backup, the copy and the members."""
        self._judged_from = 0.0
        before = self._backup, self._numbers
        effects = self._meet(message, now)
        self._note_said(message)
        self._tell(message, None)
        done = super().handle(SCHEDULER_MEMBER, message, now)
        self._was_whole = self.is_whole
        if (self._backup, self._numbers) != before:
            for optimizer in self._optimizers.values():
                self._tell(replace(optimizer, request=0), None)
            for assigned in self._assigned.values():
                self._tell(replace(assigned, request=0), None)
        # Messages about the copy that it takes over come after its earlier messages, which may still be held.
        said = [effect for effect in effects if isinstance(effect, fx.Send)]
        effects = [effect for effect in effects if not isinstance(effect, fx.Send)]
        effects += self._published([*said, *done, *self._fill()])
        waiting, self._waiting = self._waiting, []
        for who, what in waiting:
            if self.refuses(who, what) is None:
                effects += self.handle(who, what, now)
        return effects

    def _is_early(self, message: msg.Message) -> bool:
        """Whether a message is about slices of the copy: its sender knows of a loss before this server does."""
        copy = self.copy
        if copy is None:
            return False
        if isinstance(message, msg.MarkPushes) and not self._numbers:
            return True
        ids: Sequence[int] = getattr(message, "ids", ())
        some = ids if isinstance(message, msg.MarkPushes) else ids[:1]  # marks alone are of all that a server has
        return any(copy.shard.holder(int(number)) is not None for number in some)

    def observe(self, event: fx.Event, now: float) -> list[fx.Effect]:
        """React to something that is not a message."""
        member = getattr(event, "member", None)
        if isinstance(member, Member) and member.node.role is Role.SERVER:
            if isinstance(event, fx.Unreachable) and member not in self.peers.lost:
                return [fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, f"it cannot reach {member}: {event.reason}"))]
            if isinstance(event, fx.PeerDisconnected):
                self._apart.add(member)
                if member == self._backup:
                    self._await_backup(event.reason, now)
            elif isinstance(event, fx.PeerConnected):
                self._reached(member)
            return []
        if isinstance(event, fx.PeerConnected) and member == SCHEDULER_MEMBER:  # it may have been away
            self._judged_from = now + self.limits.reconnect_grace_s(True, True) + fx.VERDICT_WAIT_S
            if self._out_of_reach_at < fx.NEVER:
                self._out_of_reach_at = max(self._out_of_reach_at, self._judged_from)
        effects = super().observe(event, now)
        return effects if isinstance(event, fx.PeerDisconnected) else self._published(effects)

    @property
    def deadline(self) -> float:
        """When `tick` should run next."""
        return min(super().deadline, self._out_of_reach_at)

    def tick(self, now: float) -> list[fx.Effect]:
        """See `Server`; and do not wait for ever for a backup that only this server cannot reach."""
        effects = super().tick(now)
        if now < self._out_of_reach_at:
            return effects
        self._out_of_reach_at = now + fx.VERDICT_WAIT_S  # it is said again, as it may be lost with a scheduler
        if self._scheduler_lost_at < fx.NEVER:  # nobody is there to judge
            return effects
        if self._turns < self._turn:
            self._turns += 1
            return effects
        reason = f"it cannot reach {self._backup}, which has the copy of its slices: {self._why_out_of_reach}"
        return [*effects, fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, reason))]

    def validate(self) -> None:
        """Check every invariant."""
        super().validate()
        assert not self._log or not self._is_linked, "the backup hears of it with the message that caused it"
        assert all(count > self._confirmed for count, _ in self._held), "what may be known is known"

    # To the backup.

    def _await_backup(self, reason: str, now: float) -> None:
        """Wait for a link to the backup. If it is lost, the scheduler announces that long before the wait ends."""
        self._out_of_reach_at = max(now + self._link_wait_s, self._judged_from)
        self._why_out_of_reach = reason
        self._turns = 0

    @property
    def _link_wait_s(self) -> float:
        """How long a link to the backup may be away."""
        return max(3 * self.limits.patience_s, OUT_OF_REACH_S_MIN)

    def _reached(self, member: Member) -> None:
        """Record a link to another server."""
        self._apart.discard(member)
        if member == self._backup:
            self._out_of_reach_at = fx.NEVER

    @property
    def _turn(self) -> int:
        """How many other servers may leave before this server does, where a link between servers is broken.

        The loss of a single server may restore all links. A server without slices leaves first; then a server without
        a link from the server before it, as no server reaches it; of two servers the second.
        """
        if not self._numbers:
            return 0
        own, count = self.me.node.rank, self.joining.introduction.num_servers
        before = self._servers.get((own - 1) % count)
        is_reached = before is not None and self._dialled_by == before and before not in self._apart
        return 1 + (own == 0 if count == 2 else is_reached)

    @property
    def _dials(self) -> bool:
        """Whether this server dials its backup: of two servers that are each other's backups only the first does."""
        return self.joining.introduction.num_servers > 2 or self.me.node.rank == 0

    def _tell(self, message: msg.Message, token: tuple[Buffer, ...] | None) -> None:
        if self._backup is not None:
            self._log.append((message, token))

    def _published(self, effects: list[fx.Effect]) -> list[fx.Effect]:
        """Return the effects to perform now: forwarded messages; the other effects are held until the backup has all.

        A new backup drops messages that arrive before its welcome. So it gets a single small message, and the others
        after its first answer: a dropped message is repeated after seconds, but behind megabytes after minutes.
        """
        may_leave = len(self._log) if self._is_linked else int(self._dials and not self._told)
        log, self._log = self._log[:may_leave], self._log[may_leave:]
        self._told += len(log)
        told: list[fx.Effect] = [fx.Send(self._backup, what, token) for what, token in log if self._backup is not None]
        must_have = self._told + len(self._log)
        if self._confirmed == must_have or any(isinstance(one, fx.Halt) for one in effects):
            return [*told, *effects]
        if effects:
            self._held.append((must_have, effects))
        return told

    def _fill(self) -> list[fx.Effect]:
        """Send the backup some of the slices that are not in the copy; report to the scheduler after the last."""
        if self._backup is None or not self._is_linked:
            return []
        while len(self._filling) < FILLS_AHEAD and self.shard.uncopied:
            try:
                fills = self.shard.next_fills()
            except MemoryError:
                self.shard.mark_uncopied()
                return _short_of_memory(f"to copy its slices to {self._backup}")
            for message, token in fills:
                self._tell(message, token)
            self._filling.append(self._told + len(self._log))
        self.shard.blocks.may_merge = not self.shard.uncopied
        if self._was_whole or not self.is_whole:
            return []
        self._was_whole = True
        return [fx.Send(SCHEDULER_MEMBER, self._seen())]

    def _replicated(self, count: int) -> list[fx.Effect]:
        """Release held effects: the backup has this number of messages."""
        self._confirmed = max(self._confirmed, count)
        while self._filling and self._filling[0] <= self._confirmed:
            self._filling.popleft()
        effects: list[fx.Effect] = []
        while self._held and self._held[0][0] <= self._confirmed:
            effects += self._held.popleft()[1]
        return effects

    # The copy, and changes of membership.

    def _of_server(self, sender: Member, message: msg.Message, now: float) -> list[fx.Effect]:
        self._reached(sender)
        self._is_linked |= sender == self._backup
        if isinstance(message, msg.Replicated):
            effects = self._replicated(message.count) if sender == self._backup else []
            return effects + self._published(self._fill())
        if self.copy is None:
            return []
        self.copy.rank = sender.node.rank
        self._dialled_by = sender
        if isinstance(message, msg.Assign | msg.SetOptimizer) and not message.request:
            super().handle(SCHEDULER_MEMBER, message, now)  # this server may be new, and not know of it either
        elif isinstance(message, SAID) and self._said:
            self._said.popleft()
        elif isinstance(message, SAID):
            self._early += 1
        try:
            self.copy.hear(message, now)
        except MemoryError:
            self.copy = None
            return _short_of_memory(f"for a copy of what {sender} has")
        self._heard += 1
        return [fx.Send(sender, msg.Replicated(self._heard)), *self._published(self._fill())]

    def _note_said(self, message: msg.Message) -> None:
        if self._early:
            self._early -= 1
        elif self.copy is not None:
            self._said.append(message)

    def _meet(self, message: msg.Roster, now: float) -> list[fx.Effect]:
        """Update the servers and their slices from a roster."""
        there = {one.member.node.rank: one for one in message.peers if one.member.node.role is Role.SERVER}
        effects: list[fx.Effect] = []
        count, own = self.joining.introduction.num_servers, self.me.node.rank
        for rank, member in self._servers.items():
            if member in self.peers.lost or (rank in there and there[rank].member == member):
                continue
            self.peers.lost.add(member)
            effects.append(fx.Forget(member))
            if member == self._backup:
                effects += self._go_on_alone()
            if rank == (own - 1) % count:
                effects += self._promote(now)
        self._servers = {rank: one.member for rank, one in there.items()}
        self._numbers = _owned(message.owners, own, count)
        if self.copy is None and (own - 1) % count in there:
            self.copy, self._heard = self._new_copy(), 0
            self._said.clear()
            self._early = 0
            self._restoring = Restoring((self.shard, self.copy.shard))
        backup = there.get((own + 1) % count)
        if self._backup is None and backup is not None:
            self._backup, self._told, self._confirmed = backup.member, 0, 0
            self.shard.tell = self._tell
            self.shard.mark_uncopied()
            self._is_linked = self._dialled_by == backup.member
            if not self._is_linked:
                self._await_backup("there was never a connection between them", now)
            if self._dials:
                effects.append(fx.Connect(backup.member, backup.endpoint))
        return effects

    def _go_on_alone(self) -> list[fx.Effect]:
        """Continue after the loss of the backup: no effect waits for it any more."""
        self._backup = self.shard.tell = None
        self._out_of_reach_at = fx.NEVER
        for _, token in self._log:
            for buffer in token or ():
                buffer.leases -= 1
        self._told, self._log = self._told + len(self._log), []
        self._filling.clear()
        self.shard.uncopied.clear()
        return self._replicated(self._told)

    def _promote(self, now: float) -> list[fx.Effect]:
        """Promote the copy after the loss of its server. Returns the messages to workers."""
        copy, self.copy = self.copy, None
        assert copy is not None
        copy.rank = (self.me.node.rank - 1) % self.joining.introduction.num_servers  # it may have heard nothing yet
        answers = [effect for message in self._said for effect in copy.hear(message, now)]
        effects: list[fx.Effect] = [
            one for one in answers if isinstance(one, fx.Send) and isinstance(one.message, msg.Counters)
        ]
        self._said.clear()
        for member, fates in copy._fates.items():
            self._fates[member] = (*self._fates.get(member, ()), *fates)
        self.shard.absorb(copy.shard)
        self._restoring = Restoring((self.shard,))
        return effects


def _owned(owners: Sequence[int], rank: int, num_servers: int) -> tuple[int, ...]:
    """Return the servers, as placement numbers them, whose slices the server of a rank has."""
    return tuple(number for number, owner in enumerate(owners or range(num_servers)) if owner == rank)


def _short_of_memory(what_for: str) -> list[fx.Effect]:
    """Leave the job: an incomplete copy must not be promoted, and no server may wait for it."""
    reason = f"it has no memory {what_for}: use more servers, or leave out --replicas"
    return [fx.Send(SCHEDULER_MEMBER, msg.Goodbye(0, reason))]


def _count(shard: CopiedShard, holder: Holder, message: msg.Replicate, contributions: Sequence[Contribution]) -> None:
    """Count a round of a copy as its server has."""
    round_ = holder.round
    round_.slots.update({one.member.node.rank: one for one in contributions})
    round_.close([one.member.node.rank for one in contributions])
    assert round_.version == message.version, "a copy hears of every round"
    if shard.ledger is not None:
        shard.ledger.round_closed(holder, contributions)
    if message.code >= 0:
        round_.refuse(contributions, (msg.ErrorCode(message.code), message.reason))


# Filling in.


def _standings(round_: Round) -> tuple[tuple[msg.Standing, ...], int]:
    """Return the counters of each worker in a round, and the limit of the round or -1."""
    admission = round_.admission or Admission()
    limit = -1 if admission.limit is None else admission.limit
    ranks = sorted({*round_.counted, *round_.examples, *round_.refused, *round_.began, *admission.since})
    found = []
    for rank in ranks:
        since = admission.since.get(rank, -1)
        refused, (code, reason) = round_.refused.get(rank, (-1, (-1, "")))
        before = (
            round_.counted.get(rank, 0),
            round_.examples.get(rank, 0),
            msg.LATER if since == fx.NEVER else int(since),
        )
        found.append(msg.Standing(rank, *before, round_.began.get(rank, -1), refused, code, reason))
    return tuple(found), limit


def _stand(round_: Round, message: msg.Fill) -> None:
    """Continue from the counters of another round."""
    known = message.standings
    round_.version, round_.restored = message.version, message.restored
    round_.counted = {one.rank: one.counted for one in known}
    round_.examples = {one.rank: one.examples for one in known if one.examples}
    round_.began = {one.rank: one.began for one in known if one.began >= 0}
    refused = [one for one in known if one.refused >= 0]
    round_.refused = {one.rank: (one.refused, (msg.ErrorCode(one.code), one.reason)) for one in refused}
    since = {one.rank: fx.NEVER if one.since == msg.LATER else float(one.since) for one in known if one.since >= 0}
    limit = None if message.limit < 0 else message.limit
    round_.admission = None if limit is None and not since else Admission(limit, since)
