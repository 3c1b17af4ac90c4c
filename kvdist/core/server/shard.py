"""`Shard`: all slices of a server in their holders, the pushes and pulls of workers, and the rounds that close. Pure.

Walk of a push: `Shard.push` → every row is checked (`_checked`) → the blocks that the rows name (`Blocks.cover_merged`)
→ `Block.offer` → `Shard.close_if_ready`: when the round is complete (`close_round`), the holder publishes the next
version (`Holder.apply`), and every worker that waited has a `Reply`. Rows of a table take the same walk from
`Shard.push_rows` and `SparseTable.offer` on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

import numpy as np

from kvdist import errors
from kvdist.checkpoint.snapshot import SliceImage, WantedSlice
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.policy import MODES
from kvdist.core.round import UNANSWERED, Contribution, PullRequest, Round, RowIds, Verdict, setting_of
from kvdist.core.server import slice_parts
from kvdist.core.server.block import Block, Blocks
from kvdist.core.server.buffers import Allocate, Buffer, ReplyBuffers
from kvdist.core.server.checkpoints import ServerCheckpoints
from kvdist.core.server.decoding import as_push, parts_of_sum
from kvdist.core.server.holder import Holder, close_round, contributors, is_complete, optimizer_of
from kvdist.core.server.replies import Replies
from kvdist.core.server.sparse_table import SparseTable
from kvdist.core.server.table_rows import TableRows
from kvdist.core.sharding import Slice, slices_of
from kvdist.core.worker import requests as req
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of, waiting
from kvdist.nodes import Member
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.initializer import initializer_from
from kvdist.optimizer.updater import Arithmetic, SliceUpdater
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U8, U32, Arrays, Bits, PayloadView, padded, stretches, views

# Plain numbers: operators of enums are written in Python, and these are compared for every block of every push.
_EMPTY = int(msg.Flag.EMPTY)
_MEASURE = int(msg.Flag.MEASURE)
_CLIPPED = int(msg.Flag.MEASURE | msg.Flag.APPLY)
_NO_VALUES = np.zeros(0, np.uint8)


Offer: TypeAlias = Callable[[Block, Contribution, float], None]
LatePush: TypeAlias = msg.Push | msg.CompressedPush | msg.JoinedPush | msg.PushRows


class Ledger(Protocol):
    """A listener that is notified of the outcome of every push."""

    def round_closed(self, holder: Holder, contributions: Sequence[Contribution]) -> None:
        """Handle the contributions of a round that has just closed as `holder.round.version`."""

    def refused(self, holder: Holder, contributions: Sequence[Contribution], reason: str) -> None:
        """Handle contributions that are counted and have not been applied."""

    def dropped(self, holder: Holder, lost: Mapping[int, Member]) -> None:
        """Handle the loss of workers, by rank: the holder counts none of their later pushes."""

    def rolled_back(self, holder: Holder) -> None:
        """Handle a rollback of the holder to its present version."""

    def fenced(self, member: Member, message: LatePush, holder: Callable[[int], Holder | None]) -> None:
        """Handle a push of a worker that was given up before; `holder` returns the holder of a slice."""


class Shard:
    """All slices on a server: arrays in blocks, and the rows of tables.

    Args:
        limits: sizes and times.
        arithmetic: the backend for sums and updates of arrays.
        row_kernels: the backend for sums and casts of rows.
        allocate: returns memory for values and replies.
        replies: the replies to workers.
        checkpoints: the checkpoints under way.
    """

    def __init__(
        self,
        limits: Limits,
        arithmetic: Arithmetic,
        row_kernels: Kernels,
        allocate: Allocate,
        replies: Replies,
        checkpoints: ServerCheckpoints,
    ) -> None:
        self.ledger: Ledger | None = None
        """The listener for the outcome of every push."""
        self.kernels = arithmetic.kernels
        self.row_kernels = row_kernels
        self.buffers = ReplyBuffers(allocate)
        self._allocate = allocate
        self._new_updater = arithmetic.new_updater
        self._updaters: dict[int, SliceUpdater] = {}
        """Store → its updater, with the states of blocks; absent while a sum replaces the values."""
        self.blocks = Blocks(limits.slice_bytes, self._updaters.get)
        self.tables: dict[int, SparseTable] = {}
        """Slice → the rows of a table."""
        self._credited: dict[tuple[int, int], int] = {}
        """(incarnation of a lost worker, store) → the number of its examples that count in the slices."""
        self.peers = replies.peers
        self._to = replies.to
        self._traffic = replies.traffic
        self._checkpoints = checkpoints
        checkpoints.attach(self)

    # Holders.

    def __iter__(self) -> Iterator[Holder]:
        """Iterate over all holders. Blocks may be split or merged meanwhile."""
        yield from self.blocks
        yield from self.tables.values()

    def holder(self, number: int) -> Holder | None:
        """Return the holder of a slice; None if this server does not keep it."""
        return self.blocks.of(number)[0] if number in self.blocks else self.tables.get(number)

    def _locate(self, number: int) -> tuple[Holder, int]:
        """Return the holder of a slice of this server, and the position of the slice in it."""
        return self.blocks.of(number) if number in self.blocks else (self.tables[number], 0)

    def _of(self, store: int) -> Iterator[Holder]:
        return (holder for holder in self if holder.store == store)

    def _open(self) -> list[Holder]:
        """Return the holders with an open round or waiting pulls, in the order of their slices."""
        return sorted((holder for holder in self if not holder.round.is_quiet), key=lambda holder: int(holder.ids[0]))

    # Rounds.

    def close_if_ready(self, holder: Holder) -> None:
        """Close the open round as long as it is complete, and answer all workers that waited for that."""
        together = holder.together(self._updaters.get(holder.store))
        while rounds := close_round(together, self.peers.awaited):
            if self.ledger is not None:
                for one, contributions in zip(together, rounds, strict=True):
                    self.ledger.round_closed(one, contributions)
            try:
                self.apply(together, rounds)
            except (errors.OptimizerMismatch, errors.PushRefused) as error:
                for one, contributions in zip(together, rounds, strict=True):
                    others = len(one.ids) - 1
                    more = f". So it is for {others} other keys of the same push" if others else ""
                    one.round.refuse(contributions, (code_of(error), f"{error}{more}"))
                    if self.ledger is not None:
                        self.ledger.refused(one, contributions, str(error))
            for one, contributions in zip(together, rounds, strict=True):
                for contribution in contributions:
                    self._answer(one, contribution)
                if self._checkpoints.awaited:
                    self._look(one)
        for one in together:
            if one.round.pulls:
                self._answer_pulls(one)

    def apply(self, holders: Sequence[Holder], rounds: Sequence[Sequence[Contribution]]) -> None:
        """Publish the next version of holders whose rounds have closed together. The profiler wraps this.

        Raises:
            OptimizerMismatch, PushRefused: the contributions cannot be applied; nothing has changed.
        """
        first, flags = holders[0], 0
        updater = self._updaters.get(first.store)
        if self.peers.awaits_return:
            for holder, contributions in zip(holders, rounds, strict=True):
                holder.keep_version(contributions, updater)
        for contribution in rounds[0]:
            flags |= contribution.flags
        if flags & _CLIPPED or (isinstance(first, Block) and first.kept):
            from kvdist.core.server import clipping  # a feature at a seam: loaded where it is used

            if flags & _CLIPPED:
                self._count(rounds)
            rounds = clipping.turned(holders, rounds, optimizer_of(updater))
        first.apply(rounds, updater)
        self._count(rounds)

    def _count(self, rounds: Sequence[Sequence[Contribution]]) -> None:
        for contributions in rounds:
            for contribution in contributions:
                if not contribution.is_empty:
                    self._traffic.summed += contribution.values.nbytes

    def _answer(self, holder: Holder, contribution: Contribution) -> None:
        """Report the outcome of a contribution to its worker."""
        if contribution.run == UNANSWERED:
            return
        reply, run = self._to(contribution.member), contribution.run
        if (refusal := holder.round.refusal_of(contribution)) is not None:
            reply.refuse(run, holder.ids, *refusal)
        elif not (contribution.pull or contribution.flags & _MEASURE):
            reply.acknowledge(run, holder.ids, holder.round.version)
        else:
            assert isinstance(holder, Block), "pushes of rows neither pull nor measure"
            if contribution.flags & _MEASURE:
                reply.measured(run, holder)
            elif contribution.reads_in_place and holder.pulled_as is None:
                reply.lend(contribution.member, run, holder)
            else:
                reply.value(run, holder)

    def _answer_pulls(self, holder: Holder) -> None:
        for pull in holder.round.take_satisfied() if holder.has_value else ():
            self._answer_pull(holder, pull)

    def _answer_pull(self, holder: Holder, pull: PullRequest) -> None:
        """Send the values that a worker has asked for."""
        if not isinstance(holder, Block):
            assert isinstance(holder, SparseTable), "a slice is in a block or a table"
            self._send_rows(holder, pull)
        else:
            self._to(pull.member).value(pull.run, self._seen_by(pull, holder))

    @staticmethod
    def _seen_by(pull: PullRequest, block: Block) -> Block:
        """Return a block in the version that answers a pull."""
        return block.before if block.previous is not None and block.round.is_before(pull) else block

    def _send_rows(self, table: SparseTable, pull: PullRequest) -> None:
        try:
            buffer, message = table.gathered(pull, self.buffers, self.peers.awaits_return)
        except MemoryError:
            count, key = 0 if pull.row_ids is None else len(pull.row_ids), name_of(table.round.key)
            reason = f"{key}: {self.peers.name} has no memory for an answer of {count} rows: pull fewer at once"
            self._refuse(pull.member, pull.run, table.ids, reason)
        else:
            self._traffic.joined += int(message.arrays.counts[0]) * table.rows.dtype.itemsize
            self._to(pull.member).rows(message, buffer)

    def _close_open(self) -> None:
        """Close the rounds that are complete, after other workers are awaited."""
        joining = [holder for holder in self if holder.round.admission is not None and holder.round.is_quiet]
        for holder in [*self._open(), *joining]:
            self.close_if_ready(holder)

    def _look(self, holder: Holder) -> None:
        """Notify checkpoints that the counters of a holder have changed."""
        if self._checkpoints.awaited:
            self._checkpoints.look(holder.ids.tolist())

    def _refuse(self, member: Member, run: int, ids: U32, reason: object) -> None:
        self._to(member).refuse(run, ids, msg.ErrorCode.REFUSED, str(reason))

    # Membership, as the scheduler reports it.

    def drop(self, lost: Mapping[int, Member]) -> list[msg.Fate]:
        """Drop the uncounted pushes of lost workers, and return how many pushes of each are counted.

        A sum with a contribution of a lost worker cannot be taken apart, and is dropped as a whole.
        """
        for block in self.blocks:
            for rank in lost.keys() & block.round.slots.keys():
                self._drop_sum(block, rank)
        counted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        examples: dict[tuple[int, int], int] = {}
        for holder in self:
            for rank in lost.keys() & holder.round.examples.keys():
                pushed_to = (rank, holder.store)
                examples[pushed_to] = max(examples.get(pushed_to, 0), holder.round.examples[rank])
        for holder in self:
            is_used = bool(holder.round.version or holder.round.slots)
            for rank in lost:  # a push that some of the slices have counts, and never comes to the others
                holder.round.credit(examples.get((rank, holder.store), 0) - holder.round.examples.get(rank, 0))
            for rank, pushes in holder.round.drop(lost.keys()).items():
                if is_used:
                    counted.setdefault((rank, holder.store), []).append((pushes, len(holder.ids)))
                    self._credited[lost[rank].incarnation, holder.store] = examples.get((rank, holder.store), 0)
            if self.ledger is not None:
                self.ledger.dropped(holder, lost)
        return [
            _fate(lost[rank], store, counts, examples.get((rank, store), 0))
            for (rank, store), counts in counted.items()
        ]

    def _drop_sum(self, block: Block, rank: int) -> None:
        """Drop the sum with this worker's contribution, if any; each worker that expects a reply sends again."""
        slots = block.round.slots
        for other in slots[rank].summed_with if rank in slots else ():
            one = slots.pop(other)
            if one.run != UNANSWERED:
                self._to(one.member).hand_back(one.run, block.ids)

    def release(self, member: Member) -> None:
        """Release the versions that a lost worker has read in place, now that its process has ended."""
        for block in self.blocks:
            block.release(member)

    def credit(self, fates: Iterable[msg.Fate]) -> None:
        """Count the examples of lost workers that count in slices of other servers but not of this server."""
        for fate in fates:
            lost = (fate.incarnation, fate.store)
            more = fate.examples - self._credited.get(lost, fate.examples)
            if more > 0:
                self._credited[lost] = fate.examples
                for holder in self._of(fate.store):
                    holder.round.credit(more)

    def promise(self, more: int) -> None:
        """Make at most `more` versions of each slice until `admit`. An earlier promise still holds."""
        for round_ in self._rounds_of_steps:
            round_.promise(more)

    def held_versions(self, more: int) -> list[int]:
        """Return the version of each slice at the time of its promise to make at most `more` versions, if it has given
        such a promise, else its present version."""
        return [round_.held_version(more) for round_ in self._rounds_of_steps]

    @property
    def steps_made(self) -> int:
        """The highest version of the slices that an optimizer updates in each step."""
        return max((round_.version for round_ in self._rounds_of_steps), default=0)

    @property
    def _rounds_of_steps(self) -> list[Round]:
        return [holder.round for holder in self if holder.round.policy.is_lockstep and self.updates(holder.store)]

    def admit(self, ranks: Sequence[int], version: int) -> list[tuple[int, int, int, int]]:
        """End a promise, and let newcomers take part from a version on in all slices that were as far as that.

        The caller closes rounds. Returns (rank, slice, and the columns of `Counters`).
        """
        counters: list[tuple[int, int, int, int]] = []
        # Without other workers, the versions from the present version up to that of the cut have no contributions.
        made = self._versions_made() if self.peers.awaited <= set(ranks) else {}
        for holder in self:
            round_ = holder.round
            if self.peers.awaits_return:
                if self._is_awaited(holder, version):
                    round_.rejoin(ranks)
                    counters += self._begin(holder, ranks, min(round_.version, version))
                    continue
                round_.drop(set(ranks))
            begin = 0 if not round_.policy.is_lockstep else self._begin_of_newcomers(holder, version)
            round_.admit(ranks, begin)
            counters += self._begin(holder, ranks, begin, made.get(holder.store, msg.LATER))
        return counters

    def join(self, message: msg.Join) -> list[tuple[int, int, int, int]]:
        """Let members take part in the slices that have left them out: see `Join`. Returns the same as `admit`.

        These are slices that are pushed less often than in each step, such as means of an epoch: their versions are
        unrelated to the step. Members join them at a barrier, where none of their rounds is open.
        """
        counters: list[tuple[int, int, int, int]] = []
        for holder in self._of(message.store):
            since = {} if holder.round.admission is None else holder.round.admission.since
            ranks = [rank for rank in message.ranks if since.get(rank) == fx.NEVER]
            if ranks:
                together, begin = holder.together(self._updaters.get(holder.store)), 0
                if holder.round.policy.is_lockstep:
                    begin = holder.round.version + any(one.round.slots for one in together)
                holder.round.admit(ranks, begin)
                counters += self._begin(holder, ranks, begin)
        self._close_open()
        return counters

    @staticmethod
    def _updates(holder: Holder, version: int) -> int:
        """Return the number of updates of a holder's weights at a version."""
        return max(version + holder.round.restored, 0)

    def _begin(
        self, holder: Holder, ranks: Iterable[int], step: int | None, made: int = msg.LATER
    ) -> list[tuple[int, int, int, int]]:
        """Return the rows of `Counters` for workers that take part in a holder's rounds from this step on.

        Args:
            holder: the holder.
            ranks: the workers.
            step: the step; None for not yet.
            made: highest version with contributions.
        """
        updates = self._updates(holder, min(step or 0, made))
        first = msg.LATER if step is None else step
        return [(rank, number, first, updates) for rank in ranks for number in holder.ids.tolist()]

    def begin_together(self, store: int) -> list[tuple[int, int, int, int]]:
        """Let rounds of new slices wait for rejoined workers, as all pushes to the slices belong to steps.

        A rejoined worker repeats each step from its place on. Returns the same as `admit`.
        """
        counters: list[tuple[int, int, int, int]] = []
        for holder in self._of(store) if self.updates(store) else ():
            since = {} if holder.round.admission is None else holder.round.admission.since
            ranks = [rank for rank, version in since.items() if version == fx.NEVER]
            if ranks and not (holder.round.version or holder.round.slots):
                holder.round.admit(ranks, 0)
                counters += self._begin(holder, ranks, 0)
        return counters

    def _versions_made(self) -> dict[int, int]:
        """Return store → the highest version of its slices that are pushed in each step."""
        highest: dict[int, int] = {}
        for holder in self:
            if holder.round.policy.is_lockstep:
                highest[holder.store] = max(highest.get(holder.store, 0), holder.round.version)
        return highest

    def _is_awaited(self, holder: Holder, version: int) -> bool:
        """Whether a worker that has rejoined (``--on-loss wait``) continues at this version, the lowest of its step.

        It continues at the holder's version or at the version before, whose pull it repeats. A holder without any
        round begins at version 0 for all workers.
        """
        round_ = holder.round
        if not (round_.version or round_.slots):
            return self.updates(holder.store) or not version
        return self.updates(holder.store) and version <= round_.version <= version + 1

    def _begin_of_newcomers(self, holder: Holder, version: int) -> int | None:
        """Return the version from which on newcomers of a cut take part; None for not yet.

        All slices of a step have the same version. Slices that are pushed less often have other versions.
        """
        return version if not self.peers.awaits_return and _is_in_step(holder, version) else None

    def versions_at(self, message: msg.TakeSnapshot) -> dict[int, int]:
        """Return slice of a store → its version in a snapshot. To be called between `promise` and `admit`."""
        versions: dict[int, int] = {}
        for holder in self._of(message.store):
            version = message.version if _is_in_step(holder, message.version) else holder.round.version
            versions |= dict.fromkeys(holder.ids.tolist(), version)
        return versions

    def roll_back(self, store: int, read: Sequence[SliceImage]) -> list[tuple[int, Holder]]:
        """Continue from a snapshot. Slices that it lacks are sums, which no worker needs: they begin anew.

        Args:
            store: the store of the snapshot.
            read: the slices that were read.

        Returns:
            (slice, its holder) of all slices.
        """
        self.blocks.isolate(np.concatenate([np.zeros(0, np.uint32), *(block.ids for block in self.blocks)]))
        self._credited.clear()
        for holder in self:
            holder.clear_for_rollback(self.updates(holder.store))
        self.load(store, [one for one in read if self.holder(one.number) is not None])
        versions = {one.number: one.version for one in read}
        counts = [0 if one.state is None else one.state.count for one in read]
        for holder in self:
            if holder.store == store:
                holder.round.restored = max(counts, default=0) - max(versions.values(), default=0)
            version = versions.get(int(holder.ids[0]), 0)
            holder.round.rewind(version, self.peers.workers, self.peers.since.keys())
            if self.ledger is not None:
                self.ledger.rolled_back(holder)
        self.promise(0)  # until a cut, as too few workers may be alive
        return [(number, holder) for holder in self for number in holder.ids.tolist()]

    def valueless(self) -> list[int]:
        """Return the slices without first values."""
        return [number for holder in self if not holder.has_value for number in holder.ids.tolist()]

    def roster(self, gone: Set[int]) -> None:
        """Continue without these ranks: rounds no longer wait for them, and their pulls are dropped."""
        for holder in self:
            holder.forget(gone)
        self._close_open()

    # Optimizers and keys, as the scheduler assigns them.

    def updates(self, store: int) -> bool:
        """Whether pushes to a store are gradients."""
        return store in self._updaters

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Treat pushes to the store as gradients from now on. Raises `DeviceError` where the optimizer cannot run."""
        updater = self._new_updater(optimizer)
        self._updaters.pop(store, None)
        if not optimizer.is_elementwise:
            for block in [block for block in self.blocks if block.store == store]:
                self.blocks.isolate(block.ids)
        self._updaters[store] = updater
        self._close_open()

    def assign(self, message: msg.Assign, rank: int, num_servers: int) -> str:
        """Add the slices of new keys that belong to the server of this rank. Returns why that failed, or ''."""
        self._assign_blocks(message, rank, num_servers)
        return self._assign_tables(message, rank, num_servers)

    def _assign_blocks(self, message: msg.Assign, rank: int, num_servers: int) -> None:
        """Add blocks for the arrays; small neighbours share a block."""
        placement, optimizer = message.placement, optimizer_of(self._updaters.get(message.store))
        alone = optimizer is not None and not optimizer.is_elementwise
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        cuts = (placement.first_slices, placement.homes)
        itemsizes = {code: DType(code).itemsize for code in set(message.dtypes)}
        small: list[tuple[Slice, Extent]] = []
        types, nbytes = (0, 0), 0
        for key, shape, code, pulled_as, form, first, home in zip(*columns, *cuts, strict=True):
            if form or (home != rank and home < num_servers):
                continue  # a sparse table, or the whole key lives on another server
            where = (form, home, num_servers, first, placement.slice_bytes)
            pieces = [
                (piece, Extent(key, shape, piece.start))
                for piece in slices_of(shape, itemsizes[code], *where)
                if piece.server == rank and piece.number not in self.blocks
            ]
            key_bytes = sum(padded(piece.count * itemsizes[code]) for piece, _ in pieces)
            if len(pieces) > 1 or req.travels_alone(key_bytes):
                blocks = [self._add(message, [piece], code, pulled_as) for piece in pieces]
                for block in blocks if len(blocks) > 1 else ():
                    block.joint = blocks
                continue
            if types != (code, pulled_as) or alone or not self.blocks.has_room_for(nbytes + key_bytes, len(small) + 1):
                if small:
                    self._add(message, small, *types)
                small, nbytes, types = [], 0, (code, pulled_as)
            small += pieces
            nbytes += key_bytes
        if small:
            self._add(message, small, *types)

    def _add(self, message: msg.Assign, pieces: Sequence[tuple[Slice, Extent]], code: int, pulled_as: int) -> Block:
        """Add a block of these slices."""
        block = Block.of(
            message.store,
            [piece.number for piece, _ in pieces],
            [extent for _, extent in pieces],
            [piece.count for piece, _ in pieces],
            DType(code),
            MODES[message.mode],
            self.kernels,
            self._allocate,
            None if pulled_as == code else DType(pulled_as),
        )
        block.round.leave_out(message.later)
        self.blocks.add(block)
        return block

    def _assign_tables(self, message: msg.Assign, rank: int, num_servers: int) -> str:
        """Add the rows of tables. Returns why that failed, or ''."""
        placement = message.placement
        columns = (message.keys, message.shapes, message.dtypes, message.forms)
        failure = ""
        for key, shape, code, form, first, home in zip(*columns, placement.first_slices, placement.homes, strict=True):
            if not form:
                continue
            dtype, row = DType(code), max(1, math.prod(shape[1:]))
            for piece in slices_of(shape, dtype.itemsize, form, home, num_servers, first, placement.slice_bytes):
                if piece.server != rank or piece.number in self.tables:
                    continue
                initializer = None if form == msg.ROWS else initializer_from(form)
                bounds = (piece.start // row, piece.stop // row)
                try:
                    rows = TableRows(key, piece.number, shape, dtype, *bounds, initializer, self.row_kernels)
                except MemoryError as error:
                    failure = failure or str(error)
                    continue
                table = SparseTable(message.store, rows, Round(key, MODES[message.mode]), initializer is not None)
                table.round.leave_out(message.later)
                self.tables[piece.number] = table
        return failure

    # Checkpoints: see `CheckpointSource`.

    def key_of(self, number: int) -> int | str:
        """Return the key of a slice of this server."""
        holder, position = self._locate(number)
        return holder.key_of(position)

    def images_of(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SliceImage], Buffer | None]:
        """Return slices of a single holder: see `CheckpointSource`."""
        located = [self._locate(number) for number in numbers]
        holder = located[0][0]
        return holder.saved([position for _, position in located], self._updaters.get(holder.store), contents)

    def wanted(self, store: int) -> list[WantedSlice]:
        """Return the content that a checkpoint must have for a store."""
        updater = self._updaters.get(store)
        return [wanted for holder in self._of(store) for wanted in holder.wanted(updater)]

    def restore(self, store: int, found: Sequence[SliceImage]) -> None:
        """Continue from a checkpoint. Contributions of departed workers to open rounds belong to the old values."""
        counts = [0 if one.state is None else one.state.count for one in found if one.has_state]
        version = max((holder.round.version for holder in self._of(store)), default=0)
        for holder in self._of(store):
            holder.round.keep_only(self.peers.workers)
            if counts:  # else the checkpoint has only weights
                holder.round.restored = max(counts) - version
        self.load(store, found)
        self._close_open()

    def load(self, store: int, found: Sequence[SliceImage]) -> None:
        """Replace values and states by those of images."""
        updater = self._updaters.get(store)
        self.blocks.isolate(np.array([one.number for one in found if one.number in self.blocks], np.uint32))
        for one in found:
            self._locate(one.number)[0].load(one, updater)

    # Messages of workers about arrays.

    def initialise(self, sender: Member, message: msg.InitValues | msg.ReplaceValues) -> None:
        """Store the first values of slices, or replace their values."""
        arrays = PayloadView(message.arrays).arrays(0, len(message.ids))
        for begin, end in self._ranges(sender, message.runs, message.ids, message.arrays):
            runs = message.runs[begin:end]
            for first, last, block in self.blocks.cover(message.ids[begin:end], runs):
                put = block.initialise if isinstance(message, msg.InitValues) else block.replace
                put(arrays[begin + first : begin + last])
                self._look(block)
                self._to(sender).acknowledge(int(runs[first]), block.ids, block.version)
                self.close_if_ready(block)

    def pull_state(self, sender: Member, message: msg.PullState) -> None:
        """Send parts of the optimizer state. The sender has no push in flight."""
        for row, block in self._isolated(sender, message):
            part, run, ids = int(message.parts[row]), int(message.runs[row]), message.ids[row : row + 1]
            if part == slice_parts.TOTALS:
                block = self._seen_by(PullRequest(sender, run, int(message.steps[row]), 0), block)
                updates = self._updates(block, block.version) if block.round.policy.is_lockstep else -1
                totals = np.array([block.round.samples, updates], np.float64)
                self._to(sender).state(run, ids, block.version, DType.FLOAT64, [totals])
                continue
            try:
                if block.round.counted.get(sender.node.rank, 0) < message.steps[row]:
                    raise errors.PushRefused(
                        f"a push of {sender} to {name_of(block.key)} is still under way: pull before"
                    )
                with self.kernels.active():
                    found = slice_parts.read_part(block, self._updaters.get(block.store), part, self.kernels)
            except errors.PushRefused as error:
                self._refuse(sender, run, ids, error)
            else:
                dtype = slice_parts.part_dtype(part, block.dtype)
                self._to(sender).state(run, ids, block.version, dtype, [found])

    def replace_state(self, sender: Member, message: msg.ReplaceState) -> None:
        """Replace parts of the optimizer state."""
        arrays = views(message.arrays)
        for row, block in self._isolated(sender, message):
            part, run = int(message.parts[row]), int(message.runs[row])
            try:
                with self.kernels.active():
                    slice_parts.replace_part(block, self._updaters.get(block.store), part, arrays[row], self.kernels)
            except errors.PushRefused as error:
                self._refuse(sender, run, block.ids, error)
            else:
                self._to(sender).acknowledge(run, block.ids, block.version)

    def _isolated(self, sender: Member, message: msg.PullState | msg.ReplaceState) -> list[tuple[int, Block]]:
        """Return the valid rows, each with the block of its slice, isolated unless `TOTALS` are meant."""
        good = self._checked(sender, message.runs, message.ids)
        if alone := [row for row in good if message.parts[row] != slice_parts.TOTALS]:
            self.blocks.isolate(np.unique(message.ids[np.array(alone)]))
        return [(row, self.blocks.of(int(message.ids[row]))[0]) for row in good]

    def push(self, sender: Member, message: msg.Push, now: float, offer: Offer | None = None) -> None:
        """Offer contributions to blocks; `offer` does so with a contribution to a block."""
        offer = offer or self._offer
        payload = PayloadView(message.arrays)
        settings = [setting_of(numbers) for numbers in message.settings]
        columns = (message.runs, message.steps, message.flags, message.setting_of)
        for begin, end in self._ranges(sender, message.runs, message.ids, message.arrays, message.flags):
            some = [column[begin:end] for column in columns]
            for first, last, block in self.blocks.cover_merged(message.ids[begin:end], *some):
                row, stop = begin + first, begin + last
                flags, versions = int(message.flags[row]), message.versions
                values = _NO_VALUES
                if not flags & _EMPTY:
                    values = payload.stretch(row, stop, block.dtype)[: block.pool.size]
                contribution = Contribution(
                    sender,
                    int(message.runs[row]),
                    int(message.steps[row]),
                    int(versions[row] if stop - row == 1 else versions[row:stop].min()),
                    int(message.samples[row]),
                    flags,
                    settings[int(message.setting_of[row])],
                    values,
                    message.pull,
                )
                offer(block, contribution, now)

    def _offer(self, block: Block, contribution: Contribution, now: float) -> None:
        try:
            verdict = block.offer(contribution, now)
        except errors.PushRefused as error:
            self._refuse(contribution.member, contribution.run, block.ids, error)
            return
        if verdict is Verdict.ACCEPTED:
            self.close_if_ready(block)
        elif verdict is Verdict.ALREADY_COUNTED:
            self._answer(block, contribution)

    def push_joined(self, sender: Member, message: msg.JoinedPush, now: float) -> None:
        """Offer sums of the pushes of several workers of the sender's host; the sender gets the reply for all of them.

        All are refused if the sender may not speak for these workers, or handed back if one of them is lost.
        """
        members = [one.member for one in message.contributors]
        strangers = [str(member) for member in members if not self.peers.are_neighbours(sender, member)]
        if not strangers and sender in members and self.peers.lost.isdisjoint(members):
            self.push(sender, as_push(message), now, partial(self._offer_sum, message.contributors))
            return
        names = ", ".join(strangers) or "others only"
        obstacle = f"the sender speaks for {names}, and may speak for itself and the workers of its host"
        for begin, end in stretches(message.runs):
            run, ids = int(message.runs[begin]), message.ids[begin:end]
            if strangers or sender not in members:
                self._refuse(sender, run, ids, obstacle)
            else:
                self._to(sender).hand_back(run, ids)

    def _offer_sum(
        self, contributors: Sequence[msg.Contributor], block: Block, summed: Contribution, now: float
    ) -> None:
        """Offer a sum as a contribution of each worker that has pushed a part of it."""
        contributions = parts_of_sum(summed, contributors)
        try:
            verdict = block.offer_sum(contributions, now)
        except errors.PushRefused as error:
            self._refuse(summed.member, summed.run, block.ids, error)
            return
        if verdict is Verdict.ACCEPTED:
            self.close_if_ready(block)
        elif verdict is Verdict.HAND_BACK:
            self._to(summed.member).hand_back(summed.run, block.ids)
        else:
            for contribution in contributions:
                self._answer(block, contribution)

    def pull(self, sender: Member, message: msg.Pull, now: float) -> None:
        """Answer requests for values, or let them wait."""
        for begin, end in self._ranges(sender, message.runs, message.ids):
            stretch = slice(begin, end)
            ids, runs = message.ids[stretch], message.runs[stretch]
            steps, versions = message.steps[stretch], message.versions[stretch]
            for first, last, block in self.blocks.cover(ids, runs):
                rows = slice(first, last)
                found = [(0, last - first, block)]
                if not _is_even(block, sender.node.rank, steps[rows], versions[rows]):
                    found = self.blocks.cover(ids[rows], steps[rows], versions[rows])
                for start, stop, part in found:
                    asked = slice(first + start, first + stop)
                    step, version = int(steps[asked].max()), int(versions[asked].max())
                    part.round.wait(PullRequest(sender, int(runs[first]), step, version), now)
                    self._answer_pulls(part)

    def _ranges(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Iterator[tuple[int, int]]:
        """Yield the valid rows, as (begin, end) in which no slice is named twice; the other rows are refused.

        Two pulls of a key may come in the same message. A run that names a slice twice comes from a broken peer.
        """
        for begin, end in _consecutive(self._checked(sender, runs, ids, arrays, flags)):
            if len(set(ids[begin:end].tolist())) == end - begin:
                yield begin, end
                continue
            for first, last in stretches(runs[begin:end]):
                some = slice(begin + first, begin + last)
                if len(set(ids[some].tolist())) == last - first:
                    yield begin + first, begin + last
                else:
                    reason = "a slice is named twice in one request"
                    self._refuse(sender, int(runs[begin + first]), ids[some], reason)

    def _checked(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Sequence[int]:
        """Return the rows with a slice of this server and an array that fits; the other rows are refused."""
        if self.blocks.fit(ids, arrays):
            return range(len(ids))
        wrong = dict(self.blocks.misfits(ids, arrays, flags))
        for row, is_kept in wrong.items():
            number = int(ids[row])
            what = "has another size or dtype than was declared" if is_kept else f"is not kept by {self.peers.name}"
            reason = f"slice {number} {what}"
            self._refuse(sender, int(runs[row]), ids[row : row + 1], reason)
        return [row for row in range(len(ids)) if row not in wrong]

    # Messages of workers about rows of tables.

    def initialise_rows(self, sender: Member, message: msg.InitRows) -> None:
        """Store first values of rows."""
        for i, table, run, row_ids, values in self._rows_of(sender, message):
            if not table.has_value:
                table.rows.put(row_ids, values)
            if not message.flags[i] & msg.MORE:
                table.has_value = True
                self._look(table)
                self._to(sender).acknowledge(run, table.ids, table.round.version)
                self.close_if_ready(table)

    def push_rows(self, sender: Member, message: msg.PushRows, now: float) -> None:
        """Offer contributions of rows to tables."""
        settings = [setting_of(numbers) for numbers in message.settings]
        for i, table, run, row_ids, values in self._rows_of(sender, message):
            numbers = (int(message.steps[i]), int(message.versions[i]), int(message.samples[i]))
            flags, setting = int(message.flags[i]), settings[int(message.setting_of[i])]
            contribution = Contribution(sender, run, *numbers, flags & ~msg.MORE, setting, values, row_ids=row_ids)
            try:
                verdict = table.offer(contribution, bool(flags & msg.MORE), now)
            except errors.PushRefused as error:
                table.spoil(sender.node.rank, run)
                self._refuse(sender, run, table.ids, error)
                continue
            if verdict is Verdict.ACCEPTED:
                self.close_if_ready(table)
            elif verdict is Verdict.ALREADY_COUNTED and not flags & msg.MORE:
                self._answer(table, contribution)

    def pull_rows(self, sender: Member, message: msg.PullRows, now: float) -> None:
        """Answer requests for rows, or let them wait."""
        arrays = views(message.arrays)
        for i, table in self._tables_of(sender, message.runs, message.ids):
            run, row_ids = int(message.runs[i]), arrays[i]
            obstacle = table.obstacle_to_pull(row_ids)
            if obstacle:
                self._refuse(sender, run, table.ids, obstacle)
                continue
            table.round.wait(PullRequest(sender, run, int(message.steps[i]), int(message.versions[i]), row_ids), now)
            self._answer_pulls(table)

    def _rows_of(
        self, sender: Member, message: msg.InitRows | msg.PushRows
    ) -> Iterator[tuple[int, SparseTable, int, RowIds, Bits]]:
        """Yield (index in the message, table, run, row ids, values) of each part that fits its table, and refuse the
        other parts."""
        arrays = views(message.arrays)
        for i, table in self._tables_of(sender, message.runs, message.ids):
            run, row_ids, values = int(message.runs[i]), arrays[2 * i], arrays[2 * i + 1]
            obstacle = table.obstacle_to(sender, run, row_ids, values)
            if obstacle:
                self._refuse(sender, run, table.ids, obstacle)
            else:
                yield i, table, run, row_ids, values

    def _tables_of(self, sender: Member, runs: U32, ids: U32) -> Iterator[tuple[int, SparseTable]]:
        """Yield the rows of a message with a table of this server, each with the table; the other rows are refused."""
        for i, number in enumerate(ids.tolist()):
            table = self.tables.get(number)
            if table is None:
                self._refuse(sender, int(runs[i]), ids[i : i + 1], f"{self.peers.name} has no table slice {number}")
            else:
                yield i, table

    # Hints and invariants.

    def waits(self, opened_before: float) -> Iterator[RoundWait]:
        """Yield the rounds for which workers have waited since before that time, in the order of slices."""
        return (self._wait(holder) for holder in self._open() if holder.round.open_since <= opened_before)

    def _wait(self, holder: Holder) -> RoundWait:
        """Describe the wait of the workers that wait for a round."""
        round_ = holder.round
        if not holder.has_value:
            first = min(self.peers.workers, default=0)
            values = "value" if isinstance(holder, Block) else "values"
            return RoundWait(round_, f"give {name_of(round_.key)} its first {values}", (first,))
        missing: tuple[int, ...] = ()
        if round_.slots:
            present = contributors(holder.together(self._updaters.get(holder.store)))
            missing = round_.missing(self.peers.awaited, present)
        elif isinstance(holder, SparseTable):  # a worker that pulls waits for its push, of which parts are missing
            missing = tuple(sorted({pull.member.node.rank for pull in round_.pulls}))
        return RoundWait(round_, f"push {name_of(round_.key)} (step {round_.version + 1})", missing)

    def validate(self) -> None:
        """Check every invariant."""
        for holder in self:
            holder.validate()
            round_ = holder.round
            if round_.slots or round_.admission is not None:  # else no round can close
                full = is_complete(holder.together(self._updaters.get(holder.store)), self.peers.awaited)
                assert not full, "a full round is closed at once"
            if round_.pulls and holder.has_value:
                assert not any(map(round_.satisfies, round_.pulls)), "a pull that can be answered is answered"


def _fate(member: Member, store: int, counted: Sequence[tuple[int, int]], examples: int) -> msg.Fate:
    """Summarise (pushes counted, slices with that number)."""
    pushes = [count for count, _ in counted]
    least, most = min(pushes), max(pushes)
    slices = sum(number for count, number in counted if count == most)
    of = sum(number for _, number in counted)
    return msg.Fate(member.node.rank, member.incarnation, store, least, most, slices, of, examples)


def _consecutive(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Return the consecutive stretches of ascending numbers, as (begin, end)."""
    if isinstance(rows, range):
        return [(rows.start, rows.stop)] if rows else []
    ranges: list[tuple[int, int]] = []
    for row in rows:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    return ranges


def _is_even(block: Block, rank: int, steps: U32, versions: U32) -> bool:
    """Whether the same round answers a pull for all slices of a block."""
    if len(block) == 1:
        return True
    for wanted, present in ((steps, block.round.counted.get(rank, 0)), (versions, block.version)):
        lag = np.maximum(wanted, np.uint32(present))
        if (lag != lag[0]).any():
            return False
    return True


# Rounds for which workers wait.


@dataclass(slots=True)
class RoundWait:
    """An open round for which workers wait: the missing deed, and the ranks that have to do it."""

    round: Round
    deed: str
    missing: tuple[int, ...]

    def describe(self, now: float) -> str:
        """Return a sentence about the wait."""
        names = ", ".join(f"worker-{rank}" for rank in self.missing)
        return waiting(now - self.round.open_since, names, self.deed)


def hints(waits: Iterable[RoundWait], now: float) -> list[fx.Effect]:
    """Return messages to the workers that wait: for which round, how long, and for which workers.

    A worker that waits for no other worker gets no message: its push is still in flight, perhaps through a leader.
    """
    messages: dict[Member, msg.Waiting] = {}
    for wait in waits:
        if not wait.missing:
            continue
        waited = now - wait.round.open_since
        waiters = [one.member for one in wait.round.slots.values()] + [pull.member for pull in wait.round.pulls]
        for member in waiters:
            messages.setdefault(member, msg.Waiting(wait.deed, wait.missing, waited))
    return [fx.Send(member, message) for member, message in messages.items()]


def code_of(error: Exception) -> msg.ErrorCode:
    """Return the error code for a round that was not applied."""
    return msg.ErrorCode.OPTIMIZER_MISMATCH if isinstance(error, errors.OptimizerMismatch) else msg.ErrorCode.REFUSED


def _is_in_step(holder: Holder, version: int) -> bool:
    """Whether a slice was at most two versions behind this version when the promise was given."""
    admission = holder.round.admission
    limit = None if admission is None else admission.limit
    # While this slice stood still at its limit, other slices of the step may have been a version ahead, and have
    # promised another version.
    return limit is not None and limit >= version - 2
