"""Copies of slices on a second server, so that a server's death costs nothing: `KVDIST_REPLICAS=1`. Pure.

Server k keeps a copy of the slices of server k - 1, and server 0 of those of the last one. Walk of a round: it closes
as any, but the pushes are summed first, and the rule is applied to the sum (`ReplicatedDense`); the sum goes to the
backup (`Replicate`), which applies the same rule (`CopiedDense`), and says so (`Replicated`). Rules that hold here:

* What a server says in answer to a message waits until its backup has all that the server has done by then. So nothing
  is pulled, shown or acknowledged as counted that a death could take back.
* A copy is told what its server was told, in the same order: what workers give as values, what the scheduler says.
* With a sum goes who is in it, so that a push that is sent again, because nobody has answered it, counts once.
* At the death of a server its backup takes the copy over. What the scheduler has said meanwhile, and the dead server
  had not passed on, the copy hears first. It has no further copy: the death of a neighbour ends the job then.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.config.settings import Limits
from kvdist.core.commands import Handler
from kvdist.core.joining import SCHEDULER_MEMBER, Introduction
from kvdist.core.machine import (
    Connect,
    Effect,
    Event,
    Forget,
    Halt,
    PeerDisconnected,
    SchedulerReturned,
    Send,
    Unreachable,
)
from kvdist.core.round import agreed_settings, scale_of, setting_of
from kvdist.core.server.block import Block, Contribution
from kvdist.core.server.buffers import Allocate, Buffer, ordinary_memory
from kvdist.core.server.server import Server
from kvdist.core.server.shard import DenseShard, Shard, code_of
from kvdist.core.server.snapshots import Restoring
from kvdist.core.server.sparse_table import RowContribution, SparseShard, SparseTable
from kvdist.core.server.table_rows import merged
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.nodes import Member, Role, worker
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.updater import Arithmetic
from kvdist.protocol.arrays import Arrays, PayloadView, padded, views
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import (
    Assign,
    Contributor,
    Counters,
    Cut,
    ErrorCode,
    FindCut,
    Flag,
    Goodbye,
    InitRows,
    InitValues,
    MarkPushes,
    Message,
    ReplaceState,
    ReplaceValues,
    Replicate,
    Replicated,
    ReplicateRows,
    Rest,
    Roster,
    SetOptimizer,
    Settled,
)

GIVEN = (InitValues, ReplaceValues, ReplaceState, InitRows)
"""What workers give that no round makes."""
SAID = (Assign, SetOptimizer, Roster, Cut, FindCut, Rest)
"""What the scheduler says of slices and of those who push to them. It says the same to all servers."""
NOBODY = Member(worker(0), 0)
"""No process has this incarnation, so it gets no replies."""
_EMPTY, _CLIPPED = int(Flag.EMPTY), int(Flag.MEASURE | Flag.APPLY)
_NO_VALUES = np.zeros(0, np.uint8)

Tell = Callable[[Message, tuple[Buffer, ...] | None], None]
"""Takes what the backup must hear, and the token of that message."""
Said = tuple[type[Message], int]
"""A message of the scheduler: its kind, and the number of its request or roster."""


class _Replicated(Shard[Any]):
    """What arrays and tables have in common that have a copy elsewhere."""

    tell: Tell | None = None
    """None: there is no backup."""
    number: int | None = None
    """Of the server whose slices they were from the start, as placement names it."""
    taken_over: set[int]
    """Slices that were another server's, and have no copy."""

    def is_alone(self, number: int) -> bool:
        """Whether a slice has no copy."""
        return self.tell is None or number in self.taken_over

    def _numbers(self) -> set[int]:
        return {number for holder in self for number in holder.ids.tolist()}

    def note_assigned(self, rank: int, before: set[int]) -> None:
        """Slices of the server of this rank have been added to those that were here before."""
        self.number = rank if self.number is None else self.number
        if rank != self.number:
            self.taken_over |= self._numbers() - before


class ReplicatedDense(_Replicated, DenseShard):
    """The arrays of a server that has a backup."""

    def assign(self, message: Assign, rank: int, num_servers: int) -> None:
        """See `DenseShard`."""
        before = self._numbers() if rank != self.number else set()
        super().assign(message, rank, num_servers)
        self.note_assigned(rank, before)

    def absorb(self, other: DenseShard) -> None:
        """Take a copy over, with its states."""
        for block in other:
            self.taken_over.update(block.ids.tolist())
            self.blocks.add(block)
        for store, updater in other._updaters.items():
            for index, state in list(updater.states.items()):
                self._updaters[store].restore(index, state)

    def _apply(self, blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]]) -> None:
        if self.is_alone(int(blocks[0].ids[0])):
            super()._apply(blocks, rounds)
            return
        try:
            sums = self._sums(blocks, rounds)
            super()._apply(blocks, [[summed] for summed, _ in sums] or [()] * len(blocks))
        except (OptimizerMismatch, PushRefused) as error:
            self._forward(blocks, rounds, (), (code_of(error), str(error)))
            raise
        self._forward(blocks, rounds, sums)

    def _sums(
        self, blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]]
    ) -> list[tuple[Contribution, Buffer]]:
        """For each block what its contributions add up to, as one; nothing if there is no gradient among them.

        Raises:
            OptimizerMismatch, PushRefused: they cannot be summed.
        """
        if any(one.flags & _CLIPPED for one in rounds[0]):
            raise PushRefused(
                f"{name_of(blocks[0].key)}: clip_norm is not possible with replicas of servers: unset clip_norm, or"
                " start without --replicas"
            )
        present = [[one for one in own if not one.is_empty] for own in rounds]
        spoken = next(filter(None, present), None)
        if spoken is None:
            return []
        lr, wd = agreed_settings(blocks[0].key, spoken, blocks[0].round.later)
        updater = self._updaters.get(blocks[0].store)
        optimizer = None if updater is None else updater.optimizer
        sums = []
        for block, own in zip(blocks, present, strict=True):
            buffer = block.pool.take()
            scales = [scale_of(one, len(rounds[0]), optimizer) for one in own]
            try:
                block.kernels.weighted_sum([one.values for one in own], scales, block.dtype, buffer.array)
            except (TypeError, ValueError) as error:
                raise PushRefused(f"{name_of(block.key)}: {error}") from error
            summed = replace(spoken[0], flags=0, setting=(lr, wd, 1.0), values=buffer.array)
            sums.append((summed, buffer))
        return sums

    def _forward(
        self,
        blocks: Sequence[Block],
        rounds: Sequence[Sequence[Contribution]],
        sums: Sequence[tuple[Contribution, Buffer]],
        refusal: tuple[int, str] = (-1, ""),
    ) -> None:
        assert self.tell is not None
        for i, (block, own) in enumerate(zip(blocks, rounds, strict=True)):
            arrays = Arrays(np.full(len(block), block.dtype, np.uint8), np.zeros(len(block), np.uint32), b"")
            setting, token = _settings(None, None), None
            if sums:
                summed, buffer = sums[i]
                setting = _settings(*summed.setting[:2])
                arrays = Arrays(arrays.dtypes, block.counts, buffer.payload)
                buffer.leases += 1
                block.pool.give_back(buffer)
                token = (buffer,)
            round_ = (block.ids, block.version, _contributors(own), setting, *refusal)
            self.tell(Replicate(*round_, not sums, i < len(blocks) - 1, arrays), token)


class CopiedDense(DenseShard):
    """A copy of the arrays of another server, which closes the rounds."""

    _begun: Sequence[tuple[Block, Sequence[Contribution]]] = ()
    """Blocks that are updated with those that follow."""

    def close_if_ready(self, holder: Block) -> None:
        """Wait for the server whose slices they are."""

    def replicate(self, message: Replicate) -> None:
        """Count a round, and apply the rule to its sum."""
        payload = PayloadView(message.arrays)
        contributors = _contributions(message)
        setting = setting_of(message.settings[0])
        found: list[tuple[Block, Sequence[Contribution]]] = []
        for first, last, block in self.blocks.cover_merged(message.ids):
            _count(self, block, message, contributors)
            values = _NO_VALUES if message.is_empty else payload.stretch(first, last, block.dtype)[: block.pool.size]
            summed = Contribution(NOBODY, 0, 0, 0, 0, 0, setting, values, False)
            found.append((block, () if message.is_empty else (summed,)))
        if message.more:
            self._begun = [*self._begun, *found]
            return
        groups = [[*self._begun, *found]] if self._begun else [[one] for one in found]
        self._begun = ()
        for group in groups if message.code < 0 else ():
            blocks, rounds = zip(*group, strict=True)
            self.apply(blocks, rounds, self._updaters.get(blocks[0].store))


class ReplicatedSparse(_Replicated, SparseShard):
    """The tables of a server that has a backup."""

    def assign(self, message: Assign, rank: int, num_servers: int) -> str:
        """See `SparseShard`."""
        before = self._numbers() if rank != self.number else set()
        failure = super().assign(message, rank, num_servers)
        self.note_assigned(rank, before)
        return failure

    def absorb(self, other: SparseShard) -> None:
        """Take a copy over."""
        self.taken_over.update(other.all)
        self.all.update(other.all)

    def _apply(self, tables: Sequence[SparseTable], rounds: Sequence[Sequence[RowContribution]]) -> None:
        table, own = tables[0], rounds[0]
        if self.is_alone(table.number):
            super()._apply(tables, rounds)
            return
        try:
            summed = _merged(table, own, self._optimizers.get(table.store), self.kernels)
            super()._apply(tables, [() if summed is None else (summed,)])
        except (OptimizerMismatch, PushRefused) as error:
            self._forward(table, own, None, (code_of(error), str(error)))
            raise
        self._forward(table, own, summed)

    def _forward(
        self,
        table: SparseTable,
        contributions: Sequence[RowContribution],
        summed: RowContribution | None,
        refusal: tuple[int, str] = (-1, ""),
    ) -> None:
        assert self.tell is not None
        ids, values = (np.zeros(0, np.int64), _NO_VALUES) if summed is None else summed.parts[0]
        setting = _settings(None, None) if summed is None else _settings(*summed.setting[:2])
        row = table.rows.row_length
        rows_max = max(1, DEFAULT.payload_bytes_max // (8 + row * table.rows.dtype.itemsize) - 1)
        for start in range(0, len(ids) or 1, rows_max):
            some = slice(start, start + rows_max)
            arrays = _row_arrays(ids[some], values[start * row : (start + rows_max) * row], table.rows.dtype)
            round_ = (table.ids, table.round.version, _contributors(contributions), setting, *refusal)
            self.tell(ReplicateRows(*round_, summed is None, start + rows_max < len(ids), arrays), None)


class CopiedSparse(SparseShard):
    """A copy of the tables of another server."""

    _parts: Sequence[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]] = ()
    """Of the sum that arrives."""

    def close_if_ready(self, holder: SparseTable) -> None:
        """Wait for the server whose tables they are."""

    def replicate(self, message: ReplicateRows) -> None:
        """Count a round, and apply the rule to its rows."""
        ids, values = views(message.arrays)
        parts = [*self._parts, (ids, values)]
        self._parts = parts if message.more else ()
        table = self.all.get(int(message.ids[0]))
        if message.more or table is None:
            return
        _count(self, table, message, _row_contributions(message))
        if message.code < 0:
            setting = setting_of(message.settings[0])
            summed = RowContribution(NOBODY, 0, 0, 0, 0, 0, setting, parts)
            table.apply(() if message.is_empty else (summed,), self._optimizers.get(table.store))


class Copy(Server):
    """The slices of another server, as this one keeps them for it."""

    DENSE, SPARSE = CopiedDense, CopiedSparse
    dense: CopiedDense
    sparse: CopiedSparse
    number: int | None = None
    """Of that server."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """See `Server`."""
        return () if self.number is None else (self.number,)

    def hear(self, message: Message, now: float) -> list[Effect]:
        """What the server has done, or was told. Returns what it would have answered."""
        match message:
            case Replicate():
                self.dense.replicate(message)
            case ReplicateRows():
                self.sparse.replicate(message)
            case _:
                return self.handle(NOBODY if isinstance(message, GIVEN) else SCHEDULER_MEMBER, message, now)
        return []

    @property
    def fates(self) -> Settled:
        """What was counted here of all that were given up, and what has no value."""
        valueless = [number for shard in self._shards for number in shard.valueless()]
        told = tuple(fate for fates in self._fates.values() for fate in fates)
        return Settled(self.epoch, told, np.array(valueless, np.uint32))


class ReplicatedServer(Server):
    """A server that has a backup, and is one."""

    DENSE, SPARSE, REPLICAS = ReplicatedDense, ReplicatedSparse, 1
    dense: ReplicatedDense
    sparse: ReplicatedSparse

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
        self.copy: Copy | None = Copy(introduction, limits, kernels, now, allocate, arithmetic=arithmetic)
        """None: there is none any more."""
        self._restoring = Restoring((*self._shards, *self.copy._shards))
        self.dense.taken_over = self.sparse.taken_over = set()
        self._servers: dict[int, Member] = {}
        self._taken: tuple[int, ...] = ()
        """The servers, as placement names them, whose slices were taken over."""
        self._backup: Member | None = None
        self._is_linked = True
        """Whether there is a way to the backup."""
        self._log: list[tuple[Message, tuple[Buffer, ...] | None]] = []
        """What the backup must hear of what is being handled."""
        self._told = self._confirmed = self._heard = 0
        """Messages to the backup, those that are in the copy there, and those of the server whose copy is here."""
        self._held: deque[tuple[int, list[Effect]]] = deque()
        """(messages that the backup must have, what is done then)"""
        self._waiting: list[tuple[Member, Message]] = []
        """What workers say of slices of which there is only a copy here."""
        self._said: dict[Said, Message] = {}
        """What the scheduler has said, and the server whose copy is here has not passed on."""
        self._early: set[Said] = set()
        """What it has passed on, and is still under way to this one."""

    @property
    def numbers(self) -> tuple[int, ...]:
        """See `Server`."""
        return (self.me.node.rank, *self._taken)

    def refuses(self, source: Member, message: Message) -> str | None:
        """Listen to the other servers, too."""
        if source.node.role is not Role.SERVER or source in self.peers.lost:
            return super().refuses(source, message)
        # One that has heard sooner that the cluster is complete may speak first.
        is_known = not self._servers or self._servers.get(source.node.rank) == source
        return None if is_known else f"{source} is not a server of this cluster"

    def handle(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """React to a message; what others hear of it waits for the backup."""
        if sender.node.role is Role.SERVER:
            return self._of_server(sender, message, now)
        if self.copy is not None and self._is_early(self.copy, message):
            self._waiting.append((sender, message))
            return []
        effects: list[Effect] = []
        if sender == SCHEDULER_MEMBER and isinstance(message, SAID):
            effects = self._meet(message, now) if isinstance(message, Roster) else []
            self._note_said(message)
        if isinstance(message, (*GIVEN, *SAID)):
            self._tell(message, None)
        effects += self._published(super().handle(sender, message, now))
        if self.copy is None:
            waiting, self._waiting = self._waiting, []
            for who, what in waiting:
                if self.refuses(who, what) is None:
                    effects += self.handle(who, what, now)
        return effects

    def _is_early(self, copy: Copy, message: Message) -> bool:
        """Whether this is about slices of which there is only a copy here: its sender has heard sooner who is lost."""
        ids: Sequence[int] = getattr(message, "ids", ())
        some = ids if isinstance(message, MarkPushes) else ids[:1]  # marks alone are of all that a server has
        return any(shard.holder(int(number)) is not None for number in some for shard in copy._shards)

    def observe(self, event: Event, now: float) -> list[Effect]:
        """React to something that is not a message."""
        member = getattr(event, "member", None)
        if isinstance(member, Member) and member.node.role is Role.SERVER:
            if isinstance(event, Unreachable) and member not in self.peers.lost:
                return [Send(SCHEDULER_MEMBER, Goodbye(0, f"it cannot reach {member}: {event.reason}"))]
            return []
        effects = super().observe(event, now)
        # A scheduler that was started again may first have to hear that the backup is lost.
        return effects if isinstance(event, PeerDisconnected | SchedulerReturned) else self._published(effects)

    def validate(self) -> None:
        """Check every invariant."""
        super().validate()
        assert not self._log or not self._is_linked, "the backup hears of it with the message that caused it"
        assert all(count > self._confirmed for count, _ in self._held), "what may be known is known"

    # To the backup.

    def _tell(self, message: Message, token: tuple[Buffer, ...] | None) -> None:
        if self._backup is not None:
            self._log.append((message, token))

    def _published(self, effects: list[Effect]) -> list[Effect]:
        """What is done now: the backup is told; the rest waits until it has all."""
        told: list[Effect] = []
        if self._is_linked:
            log, self._log = self._log, []
            self._told += len(log)
            told = [Send(self._backup, what, token) for what, token in log if self._backup is not None]
        must_have = self._told + len(self._log)
        if self._confirmed == must_have or any(isinstance(one, Halt) for one in effects):
            return [*told, *effects]
        if effects:
            self._held.append((must_have, effects))
        return told

    def _replicated(self, count: int) -> list[Effect]:
        """The backup has so many of the messages."""
        self._confirmed = max(self._confirmed, count)
        effects: list[Effect] = []
        while self._held and self._held[0][0] <= self._confirmed:
            effects += self._held.popleft()[1]
        return effects

    # From the server whose copy is here, and about both.

    def _of_server(self, sender: Member, message: Message, now: float) -> list[Effect]:
        if isinstance(message, Replicated):
            return self._replicated(message.count) if sender == self._backup else []
        if self.copy is None:
            return []
        self.copy.number = sender.node.rank
        self._is_linked = True
        if isinstance(message, SAID):
            said = _said(message)
            if self._said.pop(said, None) is None:
                self._early.add(said)
        self.copy.hear(message, now)
        self._heard += 1
        return [Send(sender, Replicated(self._heard)), *self._published([])]

    def _note_said(self, message: Message) -> None:
        said = _said(message)
        if said in self._early:
            self._early.discard(said)
        elif self.copy is not None:
            self._said[said] = message

    def _meet(self, message: Roster, now: float) -> list[Effect]:
        """Hear which servers there are."""
        there = {one.member.node.rank: one for one in message.peers if one.member.node.role is Role.SERVER}
        effects: list[Effect] = []
        count, own = self.joining.introduction.num_servers, self.me.node.rank
        if not self._servers:
            backup = there[(own + 1) % count]
            self._backup = backup.member
            self.dense.tell = self.sparse.tell = self._tell
            self._is_linked = count > 2 or own == 0  # of two servers that are each other's backups one dials
            if self._is_linked:
                effects.append(Connect(backup.member, backup.endpoint))
        for rank, member in self._servers.items():
            if rank in there or member in self.peers.lost:
                continue
            self.peers.lost.add(member)
            effects.append(Forget(member))
            if member == self._backup:
                effects += self._go_on_alone()
            if rank == (own - 1) % count:
                effects += self._promote(rank, message.epoch, now)
        self._servers = self._servers or {rank: one.member for rank, one in there.items()}
        return effects

    def _go_on_alone(self) -> list[Effect]:
        """The backup is lost: nothing waits for it any more."""
        self._backup = self.dense.tell = self.sparse.tell = None
        for _, token in self._log:
            for buffer in token or ():
                buffer.leases -= 1
        self._told, self._log = self._told + len(self._log), []
        return self._replicated(self._told)

    def _promote(self, number: int, epoch: int, now: float) -> list[Effect]:
        """Take the copy over: its server is lost."""
        copy, self.copy = self.copy, None
        assert copy is not None
        copy.number = number
        effects: list[Effect] = []
        for message in self._said.values():
            effects += [one for one in copy.hear(message, now) if _is_for_workers(one)]
        self._said.clear()
        for member, fates in copy._fates.items():
            self._fates[member] = (*self._fates.get(member, ()), *fates)
        self._taken += (number,)
        self.dense.absorb(copy.dense)
        self.sparse.absorb(copy.sparse)
        self._restoring = Restoring(self._shards)
        return [*effects, Send(SCHEDULER_MEMBER, replace(copy.fates, epoch=epoch))]


def _said(message: Message) -> Said:
    return type(message), message.epoch if isinstance(message, Roster) else getattr(message, "request", 0)


def _is_for_workers(effect: Effect) -> bool:
    return isinstance(effect, Send) and isinstance(effect.message, Counters)


def _settings(lr: float | None, wd: float | None) -> tuple[tuple[float, float, float], ...]:
    return ((math.nan if lr is None else lr, math.nan if wd is None else wd, 1.0),)


def _contributors(contributions: Sequence[Contribution] | Sequence[RowContribution]) -> tuple[Contributor, ...]:
    return tuple(
        [Contributor(one.member.node.rank, one.member.incarnation, one.step, one.samples) for one in contributions]
    )


def _contributions(message: Replicate) -> list[Contribution]:
    """Who is in a round, without what they have pushed."""
    setting = setting_of(message.settings[0])
    return [
        Contribution(
            Member(worker(one.rank), one.incarnation), 0, one.step, 0, one.samples, _EMPTY, setting, _NO_VALUES, False
        )
        for one in message.contributors
    ]


def _row_contributions(message: ReplicateRows) -> list[RowContribution]:
    setting = setting_of(message.settings[0])
    return [
        RowContribution(Member(worker(one.rank), one.incarnation), 0, one.step, 0, one.samples, _EMPTY, setting, [])
        for one in message.contributors
    ]


def _count(
    shard: Shard[Any],
    holder: Block | SparseTable,
    message: Replicate | ReplicateRows,
    contributions: Sequence[Contribution] | Sequence[RowContribution],
) -> None:
    """Count a round of a copy as its server has."""
    round_: Any = holder.round
    round_.slots.update({one.member.node.rank: one for one in contributions})
    round_.take([one.member.node.rank for one in contributions])
    assert round_.version == message.version, "a copy hears of every round"
    if shard.ledger is not None:
        shard.ledger.counted(holder, contributions)
    if message.code >= 0:
        round_.refuse(contributions, (ErrorCode(message.code), message.reason))


def _merged(
    table: SparseTable, contributions: Sequence[RowContribution], optimizer: Optimizer | None, kernels: Kernels
) -> RowContribution | None:
    """What the contributions to a table add up to, as one; None if there is no gradient among them.

    Raises:
        OptimizerMismatch, PushRefused: they cannot be summed.
    """
    present = [one for one in contributions if not one.is_empty]
    if not present:
        return None
    lr, wd = agreed_settings(table.round.key, present, table.round.later)
    scales = [scale_of(one, len(contributions), optimizer) for one in present]
    parts = [table._joined(one) for one in present]
    rows = table.rows
    try:
        union, places = merged([ids for ids, _ in parts])
        shape = (len(union), rows.row_length)
        everywhere = [_spread(values, place, *shape) for (_, values), place in zip(parts, places, strict=True)]
        summed = np.empty(len(union) * rows.row_length, rows.dtype.storage)
        kernels.weighted_sum(everywhere, scales, rows.dtype, summed)
    except (MemoryError, TypeError, ValueError) as error:
        raise PushRefused(f"{name_of(table.round.key)}: {error}") from error
    return replace(present[0], flags=0, setting=(lr, wd, 1.0), parts=[(union, summed)])


def _spread(values: npt.NDArray[Any], places: npt.NDArray[Any] | None, rows: int, row_length: int) -> npt.NDArray[Any]:
    """Rows at these places among others, which are zeros; None: there are no others."""
    if places is None:
        return values
    spread = np.zeros((rows, row_length), values.dtype)
    spread[places] = values.reshape(-1, row_length)
    return spread.reshape(-1)


def _row_arrays(ids: npt.NDArray[np.int64], values: npt.NDArray[Any], dtype: DType) -> Arrays:
    """Ids and values as one payload: one copy."""
    memory = np.zeros(8 * len(ids) + padded(values.nbytes), np.uint8)
    memory[: 8 * len(ids)] = ids.view(np.uint8)
    memory[8 * len(ids) : 8 * len(ids) + values.nbytes] = values.view(np.uint8)
    counts = np.array([len(ids), len(values)], np.uint32)
    return Arrays(np.array([DType.INT64, dtype], np.uint8), counts, memory.data)
