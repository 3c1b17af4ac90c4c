"""The shard of a server: its slices, what pushes and pulls do to them, where their rounds close, and the replies. Pure.

Walk of a push: `DenseShard.push` → every row is checked (`_checked`) → the blocks that the rows name
(`Blocks.cover_merged`) → `Block.offer` → `Shard.close_if_ready`: when the round is complete (`close_round`), the next
version is made (`apply_round`), and every worker that waited has a `Reply`. What arises from one message for one worker
leaves in as few messages as can be (`Replies.pop_messages`). Rows of tables go the same way in `SparseShard`.

A large value leaves as a view of its block's published buffer. The buffer is *leased* until the worker has acknowledged
the message, and no new version is written into a leased buffer.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import numpy as np

from kvdist import errors
from kvdist.checkpoint.snapshot import ReadSlice, SavedSlice, WantedSlice
from kvdist.config.settings import Limits
from kvdist.core import machine as fx
from kvdist.core.policy import POLICIES
from kvdist.core.round import Holder, PullRequest, Round, Verdict, close_round, contributors, is_complete, setting_of
from kvdist.core.server import block_state
from kvdist.core.server.block import Block, Blocks, Contribution, apply_round
from kvdist.core.server.buffers import Allocate, Buffer
from kvdist.core.server.decoding import joined_slices
from kvdist.core.server.peers import Peers
from kvdist.core.server.snapshots import Snapshots
from kvdist.core.sharding import Slice, slices_of
from kvdist.core.traffic import Traffic
from kvdist.core.worker import requests as req
from kvdist.dtypes import DType
from kvdist.naming import name_of, waiting
from kvdist.nodes import Member
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.updater import Arithmetic, SliceUpdater
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U8, U32, Arrays, Bits, Payload, PayloadView, padded, stretches, views

# Plain numbers: operators of enums are written in Python, and these are asked for every block of every push.
_EMPTY = int(msg.Flag.EMPTY)
_CARRIED = int(msg.Flag.CARRIED)
_MEASURE = int(msg.Flag.MEASURE)
_CLIPPED = int(msg.Flag.MEASURE | msg.Flag.APPLY)
_NO_VALUES = np.zeros(0, np.uint8)


class AveragePull(PullRequest):
    """A worker that waits for the average of the weights."""

    __slots__ = ()


ApplyRound = Callable[[Sequence[Block], Sequence[Sequence[Contribution]], SliceUpdater | None], None]


class StoredHolder(Holder, Protocol):
    """A block or a sparse table, as a shard keeps it."""

    @property
    def store(self) -> int:
        """The number of the store."""

    def forget(self, gone: Set[int]) -> None:
        """Drop what belongs to departed workers. Complete contributions still count."""

    def drop(self, lost: Set[int]) -> dict[int, int]:
        """Drop what lost workers have pushed and is not counted. Returns rank → how many pushes are."""

    def validate(self) -> None:
        """Check every invariant."""


H = TypeVar("H", bound=StoredHolder)


LatePush: TypeAlias = msg.Push | msg.CompressedPush | msg.JoinedPush | msg.PushRows


class Ledger(Protocol):
    """Is told what becomes of every push."""

    def round_closed(self, holder: StoredHolder, contributions: Sequence[Any]) -> None:
        """The contributions of a round that has just been closed; `holder.round.version` is what they make."""

    def refused(self, holder: StoredHolder, contributions: Sequence[Any], reason: str) -> None:
        """These, which are counted, have not been applied."""

    def dropped(self, holder: StoredHolder, lost: Mapping[int, Member]) -> None:
        """Nothing more of these lost workers, by rank, will be counted here."""

    def rolled_back(self, holder: StoredHolder) -> None:
        """What made later versions than the present one is undone."""

    def fenced(self, member: Member, message: LatePush, holder: Callable[[int], StoredHolder | None]) -> None:
        """A push has come of a worker that was given up before: nothing of it is counted. `holder` has a slice."""


class Shard(abc.ABC, Generic[H]):
    """The slices of one kind that live on a server, in holders: blocks, or sparse tables.

    Args:
        replies: what workers are told.
        snapshots: the checkpoints under way.
    """

    def __init__(self, replies: Replies, snapshots: Snapshots) -> None:
        self.ledger: Ledger | None = None
        """What becomes of every push is written there."""
        self._credited: dict[tuple[int, int], int] = {}
        """(incarnation of a lost worker, store) → of how many of its examples the slices are taken to be made."""
        self.peers = replies.peers
        self._to = replies.to
        self._traffic = replies.traffic
        self._snapshots = snapshots
        snapshots.add(self)

    # What is here.

    @abc.abstractmethod
    def __iter__(self) -> Iterator[H]:
        """All holders. They may be split or merged on the way."""

    @abc.abstractmethod
    def holder(self, number: int) -> H | None:
        """What holds a slice; None if it is not here."""

    def _of(self, store: int) -> Iterator[H]:
        return (holder for holder in self if holder.store == store)

    def _open(self) -> list[H]:
        """The holders with an open round or waiting pulls, in the order of their slices."""
        return sorted((one for one in self if not one.round.is_quiet), key=lambda one: int(one.ids[0]))

    # Rounds.

    def close_if_ready(self, holder: H) -> None:
        """Close its open round as long as it is complete, and answer all that waited for that."""
        together = self._together(holder)
        while rounds := close_round(together, self.peers.awaited):
            if self.ledger is not None:
                for one, contributions in zip(together, rounds, strict=True):
                    self.ledger.round_closed(one, contributions)
            try:
                self._apply(together, rounds)
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
                self._look(one)
        for one in together:
            self._answer_pulls(one)

    def _answer_pulls(self, holder: H) -> None:
        for pull in holder.round.take_satisfied() if holder.has_value else ():
            self._answer_pull(holder, pull)

    def _close_open(self) -> None:
        """Close the rounds that are complete, now that others are awaited."""
        joining = [one for one in self if one.round.admission is not None and one.round.is_quiet]
        for holder in [*self._open(), *joining]:
            self.close_if_ready(holder)

    def _together(self, holder: H) -> Sequence[H]:
        """The holders whose rounds are closed together with that of one of them."""
        return (holder,)

    @abc.abstractmethod
    def _apply(self, holders: Sequence[H], rounds: Sequence[Sequence[Any]]) -> None:
        """Make the next version of the contributions to each of these.

        Raises:
            OptimizerMismatch, PushRefused: they cannot be applied; nothing has changed.
        """

    @abc.abstractmethod
    def _answer(self, holder: H, contribution: Any) -> None:
        """Tell a worker what has become of its contribution."""

    @abc.abstractmethod
    def _answer_pull(self, holder: H, pull: Any) -> None:
        """Send what a worker has asked for."""

    def _look(self, holder: H) -> None:
        """Let checkpoints look at what has other counters now."""
        if self._snapshots.awaited:
            self._snapshots.look(holder.ids.tolist())

    def _refuse(self, member: Member, run: int, ids: U32, reason: object) -> None:
        self._to(member).refuse(run, ids, msg.ErrorCode.REFUSED, str(reason))

    # What the scheduler says.

    def drop(self, lost: Mapping[int, Member]) -> list[msg.Fate]:
        """Drop what these lost workers have pushed and is not counted; say how much is."""
        counted: dict[tuple[int, int], list[tuple[int, int]]] = {}
        examples: dict[tuple[int, int], int] = {}
        for holder in self:
            for rank in lost.keys() & holder.round.examples.keys():
                place = (rank, holder.store)
                examples[place] = max(examples.get(place, 0), holder.round.examples[rank])
        for holder in self:
            is_used = bool(holder.round.version or holder.round.slots)
            for rank in lost:  # what is in some of the slices counts, and no push of it follows to the others
                holder.round.credit(examples.get((rank, holder.store), 0) - holder.round.examples.get(rank, 0))
            for rank, pushes in holder.drop(lost.keys()).items():
                if is_used:
                    counted.setdefault((rank, holder.store), []).append((pushes, len(holder.ids)))
                    self._credited[lost[rank].incarnation, holder.store] = examples.get((rank, holder.store), 0)
            if self.ledger is not None:
                self.ledger.dropped(holder, lost)
        return [_fate(lost[place[0]], place[1], found, examples.get(place, 0)) for place, found in counted.items()]

    def credit(self, fates: Iterable[msg.Fate]) -> None:
        """Count the examples of lost workers that slices elsewhere have, and those here have not."""
        for fate in fates:
            place = (fate.incarnation, fate.store)
            more = fate.examples - self._credited.get(place, fate.examples)
            if more > 0:
                self._credited[place] = fate.examples
                for holder in self._of(fate.store):
                    holder.round.credit(more)

    def promise(self, more: int) -> list[int]:
        """Promise to make at most `more` versions of each slice until `admit`; returns where each promise was made."""
        return [round_.promise(more) for round_ in self._rounds_of_steps]

    @property
    def steps_made(self) -> int:
        """The highest version of what pushes of each step update."""
        return max((round_.version for round_ in self._rounds_of_steps), default=0)

    @property
    def _rounds_of_steps(self) -> list[Round[Any, Any]]:
        return [one.round for one in self if one.round.policy.is_lockstep and self.updates(one.store)]

    def admit(self, message: msg.Cut) -> list[tuple[int, int, int, int]]:
        """Let workers that came later take part: see `Cut`. Returns (rank, slice, and the columns of `Counters`)."""
        found: list[tuple[int, int, int, int]] = []
        # Where nobody else is there, versions from the present one up to that of the cut are made of nothing.
        is_alone = message.store < 0 and self.peers.awaited <= set(message.ranks)
        made = self._versions_made() if is_alone else {}
        for holder in self:
            ranks = message.ranks if message.store < 0 else _lacking(holder, message)
            if not ranks and message.store >= 0:
                continue
            if self.peers.waits and message.store < 0:
                if self._is_awaited(holder, message.version):
                    holder.round.rejoin(ranks)
                    step = min(holder.round.version, message.version)
                    updates = self._updates(holder, step)
                    found += [(rank, number, step, updates) for rank in ranks for number in holder.ids.tolist()]
                    continue
                holder.drop(set(ranks))
            version = self._version_for(holder, message) if holder.round.policy.is_lockstep else 0
            holder.round.admit(ranks, version)
            step = msg.LATER if version is None else version
            updates = self._updates(holder, min(version or 0, made.get(holder.store, msg.LATER)))
            found += [(rank, number, step, updates) for rank in ranks for number in holder.ids.tolist()]
        self._close_open()
        return found

    def begin_together(self, store: int) -> list[tuple[int, int, int, int]]:
        """Nobody has pushed to these slices yet, and pushes to them belong to steps: who has come back makes each step
        from its place on, so their rounds leave nobody out. Returns the same as `admit`."""
        found: list[tuple[int, int, int, int]] = []
        for holder in self._of(store) if self.updates(store) else ():
            since = {} if holder.round.admission is None else holder.round.admission.since
            ranks = [rank for rank, version in since.items() if version == fx.NEVER]
            if ranks and not (holder.round.version or holder.round.slots):
                holder.round.admit(ranks, 0)
                updates = self._updates(holder, 0)
                found += [(rank, number, 0, updates) for rank in ranks for number in holder.ids.tolist()]
        return found

    @staticmethod
    def _updates(holder: StoredHolder, version: int) -> int:
        """How many updates its weights have had at this version."""
        return max(version + holder.round.restored, 0)

    def _versions_made(self) -> dict[int, int]:
        """Store → the highest version of its slices that are pushed in each step."""
        highest: dict[int, int] = {}
        for holder in self:
            if holder.round.policy.is_lockstep:
                highest[holder.store] = max(highest.get(holder.store, 0), holder.round.version)
        return highest

    def _is_awaited(self, holder: H, version: int) -> bool:
        """Whether a worker that has rejoined (``--on-loss wait``) continues at this version, the lowest of its step.

        It continues at the holder's version or at the one before, whose pull it repeats. A holder without any round
        begins at version 0 for all workers.
        """
        round_ = holder.round
        if not (round_.version or round_.slots):
            return self.updates(holder.store) or not version
        return self.updates(holder.store) and version <= round_.version <= version + 1

    def _version_for(self, holder: H, message: msg.Cut) -> int | None:
        """From which version on workers take part that came later; None for not yet.

        All slices of a step have the same one. Slices that are pushed less often, such as means of an epoch, have other
        versions, which say nothing of the step. Their moment is a barrier, where none of their rounds is open.
        """
        if message.store >= 0:
            return holder.round.version + any(one.round.slots for one in self._together(holder))
        if self.peers.waits:
            return None
        return message.version if _is_in_step(holder, message.version) else None

    def versions_at(self, message: msg.TakeSnapshot) -> dict[int, int]:
        """Slice of a store → the version at which a snapshot has it. To be asked between `promise` and `admit`."""
        found: dict[int, int] = {}
        for holder in self._of(message.store):
            version = message.version if _is_in_step(holder, message.version) else holder.round.version
            found |= dict.fromkeys(holder.ids.tolist(), version)
        return found

    def roll_back(self, store: int, read: Sequence[ReadSlice]) -> list[tuple[int, H]]:
        """Continue from a snapshot. Slices that it lacks are of sums, which nobody needs: they begin anew.

        Args:
            store: the store of the snapshot.
            read: its slices, of this shard and others.

        Returns:
            (slice, its holder) of all slices of this shard.
        """
        self._begin_anew()
        found = [one for one in read if self.holder(one.number) is not None]
        self._load(store, found)
        versions = {one.number: one.version for one in found}
        for holder in self:
            holder.round.rewind(versions.get(int(holder.ids[0]), 0), self.peers.workers)
            if self.ledger is not None:
                self.ledger.rolled_back(holder)
        self.promise(0)  # until a cut, as too few workers may be there
        return [(number, holder) for holder in self for number in holder.ids.tolist()]

    @abc.abstractmethod
    def _begin_anew(self) -> None:
        """Drop what has arrived and is not complete; let each slice be alone, with a value if it is of a sum."""

    @abc.abstractmethod
    def updates(self, store: int) -> bool:
        """Whether pushes to a store are gradients."""

    def valueless(self) -> list[int]:
        """The slices without first values."""
        return [number for holder in self if not holder.has_value for number in holder.ids.tolist()]

    def roster(self, gone: Set[int]) -> None:
        """Go on without these ranks: they are no longer waited for, and wait for nothing."""
        for holder in self:
            holder.forget(gone)
        self._close_open()

    # Checkpoints: see `SnapshotSource`.

    @abc.abstractmethod
    def key_of(self, number: int) -> int | str:
        """The key of a slice that is here."""

    @abc.abstractmethod
    def copies(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SavedSlice], Buffer | None]:
        """See `SnapshotSource`."""

    @abc.abstractmethod
    def wanted(self, store: int) -> list[WantedSlice]:
        """See `SnapshotSource`."""

    def restore(self, store: int, found: Sequence[ReadSlice]) -> None:
        """Continue from a checkpoint. Contributions of departed workers to open rounds belong to the old values."""
        counts = [0 if one.state is None else one.state.count for one in found if one.is_fresh or one.state is not None]
        version = max((holder.round.version for holder in self._of(store)), default=0)
        for holder in self._of(store):
            holder.round.drop_departed(self.peers.workers)
            if counts:  # else the weights alone are loaded
                holder.round.restored = max(counts) - version
        self._load(store, found)
        self._close_open()

    @abc.abstractmethod
    def _load(self, store: int, found: Sequence[ReadSlice]) -> None:
        """Replace values and states by what was found."""

    # For people and tests.

    def waits(self, opened_before: float) -> Iterator[RoundWait]:
        """The rounds for which workers wait since before then, in the order of slices."""
        return (self._wait(one) for one in self._open() if one.round.open_since <= opened_before)

    @abc.abstractmethod
    def _wait(self, holder: H) -> RoundWait:
        """What the workers that wait for its round wait for."""

    def validate(self) -> None:
        """Check every invariant."""
        for holder in self:
            holder.validate()
            one = holder.round
            if one.slots or one.admission is not None:  # else there is nothing to close
                full = is_complete(self._together(holder), self.peers.awaited)
                assert not full, "a full round is closed at once"
            if one.pulls and holder.has_value:
                assert not any(map(one.satisfies, one.pulls)), "a pull that can be answered is answered"


class DenseShard(Shard[Block]):
    """The slices that live on one server, except those of sparse tables.

    Args:
        limits: sizes and times.
        arithmetic: the backend for sums and updates.
        allocate: gives memory for values.
        replies: what workers are told.
        snapshots: the checkpoints under way.
    """

    def __init__(
        self, limits: Limits, arithmetic: Arithmetic, allocate: Allocate, replies: Replies, snapshots: Snapshots
    ) -> None:
        super().__init__(replies, snapshots)
        self.kernels = arithmetic.kernels
        self.apply: ApplyRound = apply_round
        """The profiler replaces it."""
        self._allocate = allocate
        self._new_updater = arithmetic.new_updater
        self._updaters: dict[int, SliceUpdater] = {}
        """Store → what updates its values; absent while a sum replaces them."""
        self.blocks = Blocks(limits.slice_bytes, self._updaters.get)

    # What the scheduler decides.

    def assign(self, message: msg.Assign, rank: int, num_servers: int) -> None:
        """Add the slices of these keys that are for the server of this rank; small neighbours are one block."""
        placement, alone = message.placement, not self._may_share_blocks(message.store)
        columns = (message.keys, message.shapes, message.dtypes, message.pulled_as, message.forms)
        places = (placement.first_slices, placement.homes)
        itemsizes = {code: DType(code).itemsize for code in set(message.dtypes)}
        small: list[tuple[Slice, Extent]] = []
        types, nbytes = (0, 0), 0
        for key, shape, code, pulled_as, form, first, home in zip(*columns, *places, strict=True):
            if form or (home != rank and home < num_servers):
                continue  # a sparse table, or the whole key lives on another server
            where = (form, home, num_servers, first, placement.slice_bytes)
            pieces = [
                (piece, Extent(key, shape, piece.start))
                for piece in slices_of(shape, itemsizes[code], *where)
                if piece.server == rank and piece.number not in self.blocks
            ]
            own_bytes = sum(padded(piece.count * itemsizes[code]) for piece, _ in pieces)
            if len(pieces) > 1 or req.travels_alone(own_bytes):
                blocks = [self._add(message, [piece], code, pulled_as) for piece in pieces]
                for block in blocks if len(blocks) > 1 else ():
                    block.joint = blocks
                continue
            if types != (code, pulled_as) or alone or not self.blocks.has_room_for(nbytes + own_bytes, len(small) + 1):
                if small:
                    self._add(message, small, *types)
                small, nbytes, types = [], 0, (code, pulled_as)
            small += pieces
            nbytes += own_bytes
        if small:
            self._add(message, small, *types)

    def _add(self, message: msg.Assign, pieces: Sequence[tuple[Slice, Extent]], code: int, pulled_as: int) -> Block:
        """A block of these slices."""
        block = Block.of(
            message.store,
            [piece.number for piece, _ in pieces],
            [extent for _, extent in pieces],
            [piece.count for piece, _ in pieces],
            DType(code),
            POLICIES[message.mode],
            self.kernels,
            self._allocate,
            None if pulled_as == code else DType(pulled_as),
        )
        block.round.leave_out(message.later)
        self.blocks.add(block)
        return block

    def _may_share_blocks(self, store: int) -> bool:
        """Whether the rule may update several slices as one, because it is elementwise."""
        updater = self._updaters.get(store)
        return updater is None or updater.optimizer.is_elementwise

    def drop(self, lost: Mapping[int, Member]) -> list[msg.Fate]:
        """See `Shard`. What came in one sum with something of these workers cannot be taken apart, and goes, too."""
        for block in self:
            for rank in lost.keys() & block.round.slots.keys():
                self._drop_sum(block, rank)
        return super().drop(lost)

    def _drop_sum(self, block: Block, rank: int) -> None:
        """Drop the sum that has this worker's contribution, if there is one; who is to get the answer sends again."""
        slots = block.round.slots
        if rank not in slots:
            return
        neighbours = self.peers.neighbours_of(slots[rank].member)
        summed = [one for one in slots.values() if neighbours.get(one.member.node.rank) == one.member]
        if not any(one.flags & _CARRIED for one in summed):
            return  # each has bytes of its own
        for one in summed:
            del slots[one.member.node.rank]
            if not one.silent:
                self._to(one.member).hand_back(one.run, block.ids)

    def release(self, member: Member) -> None:
        """The process of a lost worker has ended, and reads nothing in place any more."""
        for block in self:
            block.release(member)

    def updates(self, store: int) -> bool:
        """Whether pushes to a store are gradients."""
        return store in self._updaters

    def set_optimizer(self, store: int, optimizer: Optimizer) -> None:
        """Treat pushes to the store as gradients from now on. Raises `DeviceError` where the optimizer cannot run."""
        updater = self._new_updater(optimizer)
        self._updaters.pop(store, None)
        if not optimizer.is_elementwise:
            for block in list(self._of(store)):
                self.blocks.isolate(block.ids)
        self._updaters[store] = updater
        self._close_open()

    # What is here.

    def __iter__(self) -> Iterator[Block]:
        """All blocks."""
        return iter(self.blocks)

    def holder(self, number: int) -> Block | None:
        """The block of a slice, if it is here."""
        return self.blocks.of(number)[0] if number in self.blocks else None

    def key_of(self, number: int) -> int | str:
        """The key of a slice that is here."""
        block, position = self.blocks.of(number)
        return block.key_of(position)

    def copies(self, numbers: Sequence[int], contents: Sequence[str]) -> tuple[list[SavedSlice], Buffer | None]:
        """Slices of one block as they are now."""
        block = self.blocks.of(numbers[0])[0]
        positions = [self.blocks.of(number)[1] for number in numbers]
        return block_state.saved(block, positions, self._updaters.get(block.store), contents)

    def wanted(self, store: int) -> list[WantedSlice]:
        """What a checkpoint must hold for the arrays of a store."""
        updater = self._updaters.get(store)
        return [
            block_state.wanted(block, position, updater) for block in self._of(store) for position in range(len(block))
        ]

    def _begin_anew(self) -> None:
        for block in self.blocks.isolate(np.concatenate([np.zeros(0, np.uint32), *(one.ids for one in self)])):
            block.kept, block.merged_at, block.merge_after = (), -1, 0
            if not self.updates(block.store):
                block.initialise([np.zeros(int(block.counts[0]), block.dtype.storage)])

    def _load(self, store: int, found: Sequence[ReadSlice]) -> None:
        blocks = self.blocks.isolate(np.array([one.number for one in found], np.uint32)) if found else ()
        for block, one in zip(blocks, found, strict=True):
            block_state.load(block, one, self._updaters.get(store))

    # What workers say.

    def initialise(self, sender: Member, message: msg.InitValues | msg.ReplaceValues) -> None:
        """First values of slices, or others in place of the present ones."""
        arrays = PayloadView(message.arrays).arrays(0, len(message.ids))
        for begin, end in self._ranges(sender, message.runs, message.ids, message.arrays):
            runs = message.runs[begin:end]
            for first, last, block in self.blocks.cover(message.ids[begin:end], runs):
                put = block.initialise if isinstance(message, msg.InitValues) else block.replace
                put(arrays[begin + first : begin + last])
                if isinstance(message, msg.ReplaceValues):
                    block_state.begin_average(block, self._updaters.get(block.store))
                self._look(block)
                self._to(sender).acknowledge(int(runs[first]), block.ids, block.version, msg.Outcome.INITIALISED)
                self.close_if_ready(block)

    def pull_state(self, sender: Member, message: msg.PullState, now: float) -> None:
        """Send parts of the optimizer state. The sender has no push under way, unless it asks for averages."""
        averages = np.array(list(map(self._is_average, message.ids.tolist(), message.parts.tolist())), np.bool_)
        if averages.any():
            runs, ids, steps = (column[averages] for column in (message.runs, message.ids, message.steps))
            self._pull(AveragePull, sender, runs, ids, steps, np.zeros_like(steps), now)
            if averages.all():
                return
            runs, ids, steps = (column[~averages] for column in (message.runs, message.ids, message.steps))
            message = msg.PullState(runs, ids, steps, message.parts[~averages])
        for row, block in self._isolated(sender, message):
            part, run, ids = int(message.parts[row]), int(message.runs[row]), message.ids[row : row + 1]
            if part == block_state.TOTALS:
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
                    found = block_state.read_part(block, self._updaters.get(block.store), part, self.kernels)
            except errors.PushRefused as error:
                self._refuse(sender, run, ids, error)
            else:
                dtype = DType.FLOAT64 if part in block_state.COUNTS else block_state.state_dtype(block.dtype)
                self._to(sender).state(run, ids, block.version, dtype, [found])

    def _is_average(self, number: int, part: int) -> bool:
        block = self.holder(number)
        return block is not None and block_state.is_average(block, self._updaters.get(block.store), part)

    def replace_state(self, sender: Member, message: msg.ReplaceState) -> None:
        """Replace parts of the optimizer state."""
        arrays = views(message.arrays)
        for row, block in self._isolated(sender, message):
            part, run = int(message.parts[row]), int(message.runs[row])
            try:
                with self.kernels.active():
                    block_state.replace_part(block, self._updaters.get(block.store), part, arrays[row], self.kernels)
            except errors.PushRefused as error:
                self._refuse(sender, run, block.ids, error)
            else:
                self._to(sender).acknowledge(run, block.ids, block.version, msg.Outcome.INITIALISED)

    def _isolated(self, sender: Member, message: msg.PullState | msg.ReplaceState) -> list[tuple[int, Block]]:
        """The valid rows, each with the block of its slice, alone if its state is meant. One may be named twice."""
        good = self._checked(sender, message.runs, message.ids)
        if alone := [row for row in good if message.parts[row] != block_state.TOTALS]:
            self.blocks.isolate(np.unique(message.ids[np.array(alone)]))
        return [(row, self.blocks.of(int(message.ids[row]))[0]) for row in good]

    def push(self, sender: Member, message: msg.Push, now: float) -> None:
        """Contributions."""
        payload = PayloadView(message.arrays)
        settings = [setting_of(numbers) for numbers in message.settings]
        columns = (message.runs, message.steps, message.flags, message.setting_of)
        for begin, end in self._ranges(sender, message.runs, message.ids, message.arrays, message.flags):
            own = [column[begin:end] for column in columns]
            for first, last, block in self.blocks.cover_merged(message.ids[begin:end], *own):
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
                self._offer(block, contribution, now)

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

    def push_joined(
        self, sender: Member, message: msg.JoinedPush, neighbours: Mapping[int, Member], now: float
    ) -> None:
        """Contributions of several workers of the sender's host; the sender gets the reply for all of them.

        Args:
            sender: the leader of its host.
            message: one row per slice and worker.
            neighbours: rank → worker of that host, departed ones included.
            now: the time.
        """
        ids = np.unique(message.ids)
        self.blocks.isolate(ids[[int(number) in self.blocks for number in ids]])
        for joined in joined_slices(sender, message, neighbours):
            ids = np.array([joined.number], np.uint32)
            block = self.holder(joined.number)
            try:
                if block is None:
                    raise errors.PushRefused(f"slice {joined.number} is not kept by {self.peers.name}")
                joined.require_fit(block)
                lost = self.peers.lost and any(one.member in self.peers.lost for one in joined.contributions)
                verdict = Verdict.REPEATED if lost else block.offer_joined(joined.contributions, now)
            except errors.PushRefused as error:
                self._refuse(sender, joined.run, ids, error)
                continue
            if verdict is Verdict.ACCEPTED:
                self.close_if_ready(block)
            elif verdict is Verdict.REPEATED:
                self._to(sender).hand_back(joined.run, ids)
            else:
                for contribution in joined.contributions:
                    self._answer(block, contribution)

    def pull(self, sender: Member, message: msg.Pull, now: float) -> None:
        """Requests for values."""
        self._pull(PullRequest, sender, message.runs, message.ids, message.steps, message.versions, now)

    def _pull(
        self, kind: type[PullRequest], sender: Member, runs: U32, ids: U32, steps: U32, versions: U32, now: float
    ) -> None:
        for begin, end in self._ranges(sender, runs, ids):
            stretch = slice(begin, end)
            own_ids, own_runs, own_steps, own_versions = ids[stretch], runs[stretch], steps[stretch], versions[stretch]
            for first, last, block in self.blocks.cover(own_ids, own_runs):
                rows = slice(first, last)
                found = [(0, last - first, block)]
                if not _is_even(block, sender.node.rank, own_steps[rows], own_versions[rows]):
                    found = self.blocks.cover(own_ids[rows], own_steps[rows], own_versions[rows])
                for start, stop, part in found:
                    own = slice(first + start, first + stop)
                    step, version = int(own_steps[own].max()), int(own_versions[own].max())
                    part.round.wait(kind(sender, int(own_runs[first]), step, version), now)
                    self._answer_pulls(part)

    def _ranges(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Iterator[tuple[int, int]]:
        """The valid rows, as (begin, end) in which no slice is named twice; the others are refused.

        Two pulls of one key may come in one message. A run that names a slice twice comes from a broken peer.
        """
        for begin, end in _consecutive(self._checked(sender, runs, ids, arrays, flags)):
            if len(set(ids[begin:end].tolist())) == end - begin:
                yield begin, end
                continue
            for first, last in stretches(runs[begin:end]):
                own = slice(begin + first, begin + last)
                if len(set(ids[own].tolist())) == last - first:
                    yield begin + first, begin + last
                else:
                    reason = "a slice is named twice in one request"
                    self._refuse(sender, int(runs[begin + first]), ids[own], reason)

    def _checked(
        self, sender: Member, runs: U32, ids: U32, arrays: Arrays | None = None, flags: U8 | None = None
    ) -> Sequence[int]:
        """The rows whose slice is here and whose array has its size and dtype; the others are refused."""
        if self.blocks.fit(ids, arrays):
            return range(len(ids))
        wrong = dict(self.blocks.misfits(ids, arrays, flags))
        for row, is_kept in wrong.items():
            number = int(ids[row])
            what = "has another size or dtype than was declared" if is_kept else f"is not kept by {self.peers.name}"
            reason = f"slice {number} {what}"
            self._refuse(sender, int(runs[row]), ids[row : row + 1], reason)
        return [row for row in range(len(ids)) if row not in wrong]

    # Rounds.

    def _together(self, block: Block) -> Sequence[Block]:
        """All blocks of a parameter whose rule needs norms of the whole, or this one."""
        updater = self._updaters.get(block.store) if block.joint else None
        return block.joint if updater is not None and updater.optimizer.needs_norms else (block,)

    def _apply(self, blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]]) -> None:
        if self.peers.waits:
            for block, own in zip(blocks, rounds, strict=True):
                block.previous = block.published
                block.samples_before = block.round.samples - sum(one.samples for one in own)
        updater, flags = self._updaters.get(blocks[0].store), 0
        for contribution in rounds[0]:
            flags |= contribution.flags
        if flags & _CLIPPED:
            from kvdist.core.server import clipping  # a feature at a seam: loaded where it is used

            self._count(rounds)
            optimizer = None if updater is None else updater.optimizer
            rounds = [clipping.turn(block, own, optimizer) for block, own in zip(blocks, rounds, strict=True)]
        elif blocks[0].kept:
            for block in blocks:
                block.kept = ()  # no second push came, as the norm was not finite: memory of a gradient
        self.apply(blocks, rounds, updater)
        self._count(rounds)

    def _count(self, rounds: Sequence[Sequence[Contribution]]) -> None:
        for contributions in rounds:
            for contribution in contributions:
                if not contribution.is_empty:
                    self._traffic.summed += contribution.values.nbytes

    def _answer(self, block: Block, contribution: Contribution) -> None:
        if contribution.silent:
            return
        reply, run = self._to(contribution.member), contribution.run
        if (refusal := block.round.refusal_of(contribution)) is not None:
            reply.refuse(run, block.ids, *refusal)
        elif contribution.flags & _MEASURE:
            reply.measured(run, block)
        elif contribution.pull and contribution.reads_in_place and block.pulled_as is None:
            reply.lend(contribution.member, run, block)
        elif contribution.pull:
            reply.value(run, block)
        else:
            reply.acknowledge(run, block.ids, block.version, msg.Outcome.COUNTED)

    def _answer_pull(self, block: Block, pull: PullRequest) -> None:
        if type(pull) is not AveragePull:
            self._to(pull.member).value(pull.run, self._seen_by(pull, block))
        elif block.previous is not None and block.round.is_before(pull):
            reason = (
                f"the average of {name_of(block.key)} has the step in it already that {pull.member} repeats, as it has"
                " come back: make that step before you pull the average"
            )
            self._refuse(pull.member, pull.run, block.ids, reason)
        else:
            with self.kernels.active():
                found = block_state.averages(block, self._updaters[block.store], self.kernels)
            dtype = block_state.state_dtype(block.dtype)
            self._to(pull.member).state(pull.run, block.ids, block.version, dtype, found)

    @staticmethod
    def _seen_by(pull: PullRequest, block: Block) -> Block:
        """A block in the version that answers a pull."""
        return block.before if block.previous is not None and block.round.is_before(pull) else block

    def _wait(self, block: Block) -> RoundWait:
        if not block.has_value:
            first = min(self.peers.workers, default=0)
            return RoundWait(block.round, f"give {name_of(block.key)} its first value", (first,))
        missing: tuple[int, ...] = ()
        if block.round.slots:
            present = contributors(self._together(block))
            missing = block.round.missing(self.peers.awaited, present)
        return RoundWait(block.round, f"push {name_of(block.key)} (step {block.version + 1})", missing)


def _fate(member: Member, store: int, counted: Sequence[tuple[int, int]], examples: int) -> msg.Fate:
    """Of (pushes counted, slices with so many)."""
    pushes = [count for count, _ in counted]
    least, most = min(pushes), max(pushes)
    slices = sum(number for count, number in counted if count == most)
    of = sum(number for _, number in counted)
    return msg.Fate(member.node.rank, member.incarnation, store, least, most, slices, of, examples)


def _consecutive(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Consecutive stretches of ascending numbers: (begin, end) of each."""
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
    """Whether one and the same round answers a pull for all slices of a block."""
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
    """An open round for which workers wait: what has to be done, and the ranks that have to do it."""

    round: Round[Any, Any]
    deed: str
    missing: tuple[int, ...]

    def describe(self, now: float) -> str:
        """One sentence."""
        names = ", ".join(f"worker-{rank}" for rank in self.missing)
        return waiting(now - self.round.open_since, names, self.deed)


def hints(waits: Iterable[RoundWait], now: float) -> list[fx.Effect]:
    """Messages to the workers that wait: for which round, how long, and for whom.

    Whoever waits for no worker hears nothing: its own push is still under way, perhaps through a leader.
    """
    messages: dict[Member, msg.Waiting] = {}
    for wait in waits:
        if not wait.missing:
            continue
        waited = now - wait.round.open_since
        for waiter in (*wait.round.slots.values(), *wait.round.pulls):
            messages.setdefault(waiter.member, msg.Waiting(wait.deed, wait.missing, waited))
    return [fx.Send(member, message) for member, message in messages.items()]


def code_of(error: Exception) -> msg.ErrorCode:
    """The code with which a round that was not applied is refused."""
    return msg.ErrorCode.OPTIMIZER_MISMATCH if isinstance(error, errors.OptimizerMismatch) else msg.ErrorCode.REFUSED


# Replies: collected while one message is handled, small values joined, large ones sent without a copy.

JOIN_BYTES_MAX = 64 << 10
"""Values up to this size are copied together into one frame; larger ones are frames of their own, without a copy."""
TOGETHER_BYTES_MAX, FRAMES_MAX = 16 << 20, 32
"""The size of a message of replies that stays on this host."""


class Leased(Protocol):
    """Memory that is being read while `leases` is not 0."""

    leases: int


class Replies:
    """The replies of a server.

    Args:
        limits: sizes.
        traffic: counts passes over values.
        peers: who is alive, and how far away.
    """

    def __init__(self, limits: Limits, traffic: Traffic, peers: Peers) -> None:
        self.limits = limits
        self.traffic = traffic
        self.peers = peers
        self._all: dict[Member, Reply] = {}

    def to(self, member: Member) -> Reply:
        """The reply to one worker."""
        reply = self._all.get(member)
        if reply is None:
            reply = self._all[member] = Reply()
        return reply

    def pop_messages(self) -> list[fx.Effect]:
        """Everything collected since the last time. A worker that left meanwhile gets nothing."""
        effects: list[fx.Effect] = []
        for member, reply in self._all.items():
            if self.peers.has(member):
                is_near = member not in self.peers.far
                effects += reply.messages(member, self.limits.slice_bytes, self.traffic, is_near)
            else:
                reply.drop()
        self._all = {}
        return effects

    def validate(self) -> None:
        """Check every invariant."""
        assert not self._all, "replies leave with the message that caused them"


@dataclass(slots=True)
class Reply:
    """The reply to one worker."""

    _counted: list[tuple[int, U32, int, int]] = field(default_factory=list)
    """(run, slices, version, outcome)"""
    _values: list[tuple[int, Block]] = field(default_factory=list)
    """(run, block)"""
    _lent: list[tuple[int, Block, Buffer, Buffer | None]] = field(default_factory=list)
    """(run, block, what it shows, what the worker has read until now)"""
    _measured: list[tuple[int, U32, int, float]] = field(default_factory=list)
    """(run, slices, version, the sum of their squares)"""
    _states: list[msg.Values] = field(default_factory=list)
    _rows: list[tuple[msg.RowValues, Leased]] = field(default_factory=list)
    """(message, the buffer that it shows)"""
    _refused: dict[tuple[msg.ErrorCode, str], list[tuple[int, U32]]] = field(default_factory=dict)
    """(code, reason) → [(run, slices)]"""
    _handed_back: list[tuple[int, U32]] = field(default_factory=list)
    """(run, slices)"""

    def acknowledge(self, run: int, ids: U32, version: int, outcome: msg.Outcome) -> None:
        """Say that contributions, or first values, of these slices were counted."""
        self._counted.append((run, ids, version, outcome))

    def value(self, run: int, block: Block) -> None:
        """Send the block's present values."""
        self._values.append((run, block))

    def lend(self, member: Member, run: int, block: Block) -> None:
        """Send the block's present values, which the worker reads in place."""
        before = block.lend(member)  # at once: a later row of the message may split the block
        self._lent.append((run, block, block.lent[member], before))

    def measured(self, run: int, block: Block) -> None:
        """Send the block's sum of squares."""
        self._measured.append((run, block.ids, block.version, block.squares))

    def state(self, run: int, ids: U32, version: int, dtype: DType, parts: Sequence[Bits]) -> None:
        """Send a part of the optimizer state of each of these slices; one copy."""
        memory, position = np.zeros(sum(padded(part.nbytes) for part in parts), np.uint8), 0
        for part in parts:
            memory[position : position + part.nbytes] = part.view(np.uint8)
            position += padded(part.nbytes)
        count = len(parts)
        arrays = Arrays(_u8([dtype] * count), _u32([part.size for part in parts]), memory.data)
        columns = (_u32([run] * count), ids, _u32([version] * count), _u8([msg.Outcome.COUNTED] * count))
        self._states.append(msg.Values(*columns, arrays))

    def rows(self, message: msg.RowValues, buffer: Leased) -> None:
        """Send rows, which lie in this buffer."""
        buffer.leases += 1
        self._rows.append((message, buffer))

    def refuse(self, run: int, ids: U32, code: msg.ErrorCode, reason: str) -> None:
        """Refuse these slices."""
        self._refused.setdefault((code, reason), []).append((run, ids))

    def hand_back(self, run: int, ids: U32) -> None:
        """Ask for these contributions once more, each by itself: the sum that they came in was dropped."""
        self._handed_back.append((run, ids))

    def drop(self) -> None:
        """Say nothing."""
        for _, buffer in self._rows:
            buffer.leases -= 1

    def messages(
        self, member: Member, payload_bytes_max: int, traffic: Traffic, is_near: bool = True
    ) -> list[fx.Effect]:
        """The reply in as few messages as possible.

        Args:
            member: the worker.
            payload_bytes_max: the size up to which small values are joined, and large ones that cross a network.
            traffic: counts passes over values.
            is_near: whether the worker is on this host.
        """
        together_max = TOGETHER_BYTES_MAX if is_near else payload_bytes_max
        effects: list[fx.Effect] = [fx.Send(member, state) for state in self._states]
        effects += self._value_messages(member, payload_bytes_max, together_max, traffic)
        if self._measured:
            effects.append(fx.Send(member, _squares(self._measured)))
        if self._counted:
            runs, ids, versions, outcomes = zip(*self._counted, strict=True)
            columns = (_repeated(runs, ids), _joined(ids), _repeated(versions, ids))
            effects.append(fx.Send(member, msg.Counted(*columns, _repeated(outcomes, ids).astype(np.uint8))))
        for (code, reason), slices in self._refused.items():
            runs, ids = zip(*slices, strict=True)
            effects.append(fx.Send(member, msg.Refused(_repeated(runs, ids), _joined(ids), code, reason)))
        if self._handed_back:
            runs, ids = zip(*self._handed_back, strict=True)
            effects.append(fx.Send(member, msg.HandedBack(_repeated(runs, ids), _joined(ids))))
        effects += [fx.Send(member, message, (buffer,)) for message, buffer in self._rows]
        return effects

    def _value_messages(
        self, member: Member, payload_bytes_max: int, together_max: int, traffic: Traffic
    ) -> list[fx.Effect]:
        effects: list[fx.Effect] = []
        large = _LargeValues()
        for run, block, shown, before in self._lent:
            if large.is_full(len(shown.payload), together_max):
                effects.append(large.message(member))
                large = _LargeValues()
            large.add(run, block, shown.payload, before)
        small: list[tuple[int, Block]] = []
        small_bytes = 0
        for run, block in self._values:
            buffer = block.outgoing
            nbytes = len(buffer.payload)
            if nbytes > JOIN_BYTES_MAX:
                if large.is_full(nbytes, together_max):
                    effects.append(large.message(member))
                    large = _LargeValues()
                buffer.leases += 1
                large.add(run, block, buffer.payload, buffer)
                continue
            if small and small_bytes + nbytes > payload_bytes_max:
                effects.append(_copied(member, small))
                small, small_bytes = [], 0
            small.append((run, block))
            small_bytes += nbytes
            traffic.joined += nbytes
        if large.frames:
            effects.append(large.message(member))
        if small:
            effects.append(_copied(member, small))
        return effects


@dataclass(slots=True)
class _LargeValues:
    """Values that leave in one message, each block's as a frame that shows its buffer."""

    blocks: list[tuple[int, Block]] = field(default_factory=list)
    frames: list[memoryview] = field(default_factory=list)
    leased: list[Buffer] = field(default_factory=list)
    nbytes: int = 0

    def is_full(self, nbytes: int, together_max: int) -> bool:
        return bool(self.frames) and (self.nbytes + nbytes > together_max or len(self.frames) >= FRAMES_MAX)

    def add(self, run: int, block: Block, payload: memoryview, leased: Buffer | None) -> None:
        self.blocks.append((run, block))
        self.frames.append(payload)
        self.nbytes += len(payload)
        if leased is not None:
            self.leased.append(leased)

    def message(self, member: Member) -> fx.Send:
        frames = [frame for frame in self.frames if len(frame)]  # a value without elements has none
        payload = tuple(frames) if len(frames) > 1 else frames[0] if frames else b""
        return fx.Send(member, _message(self.blocks, payload), tuple(self.leased))


def _copied(member: Member, batch: Sequence[tuple[int, Block]]) -> fx.Send:
    """One message with copies of small values: one pass over them."""
    return fx.Send(member, _message(batch, b"".join([block.outgoing.payload for _, block in batch])))


def _message(batch: Sequence[tuple[int, Block]], payload: Payload | tuple[Payload, ...]) -> msg.Values:
    runs, blocks = zip(*batch, strict=True)
    ids = [block.ids for block in blocks]
    dtypes = _repeated([block.outgoing_dtype for block in blocks], ids).astype(np.uint8)
    return msg.Values(
        _repeated(runs, ids),
        _joined(ids),
        _repeated([block.version for block in blocks], ids),
        np.full(len(dtypes), msg.Outcome.COUNTED, np.uint8),
        Arrays(dtypes, _joined([block.counts for block in blocks]), payload),
    )


def _squares(measured: Sequence[tuple[int, U32, int, float]]) -> msg.Values:
    """One float64 for the first slice of each block, and nothing for its others."""
    runs, ids, versions, squares = zip(*measured, strict=True)
    counts = np.concatenate([np.arange(len(own)) == 0 for own in ids]).astype(np.uint32)
    dtypes = np.full(len(counts), DType.FLOAT64, np.uint8)
    arrays = Arrays(dtypes, counts, np.array(squares, np.float64).tobytes())
    outcomes = np.full(len(counts), msg.Outcome.COUNTED, np.uint8)
    return msg.Values(_repeated(runs, ids), _joined(ids), _repeated(versions, ids), outcomes, arrays)


def _repeated(numbers: Sequence[int], ids: Sequence[U32]) -> U32:
    """One number for each group of slices, repeated for each of them."""
    return np.repeat(_u32(numbers), [len(own) for own in ids])


def _joined(columns: Sequence[U32]) -> U32:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _u32(numbers: Sequence[int]) -> U32:
    return np.array(numbers, np.uint32)


def _u8(numbers: Sequence[int]) -> U8:
    return np.array(numbers, np.uint8)


def _is_in_step(holder: StoredHolder, version: int) -> bool:
    """Whether a slice was about as far as those for which this version is the next but one at most."""
    admission = holder.round.admission
    limit = None if admission is None else admission.limit
    # While this slice stood still at its limit, others of the step may have been one version ahead, and were found
    # when they had made one more.
    return limit is not None and limit >= version - 2


def _lacking(holder: StoredHolder, message: msg.Cut) -> list[int]:
    """Those of the workers of a cut that do not take part in this one's rounds yet, if it is of the cut's store."""
    admission = holder.round.admission
    if admission is None or holder.store != message.store:
        return []
    return [rank for rank in message.ranks if admission.since.get(rank) == fx.NEVER]
