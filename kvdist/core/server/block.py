"""`Block`: slices of a server that are summed, updated and sent together; `Blocks` finds them. A private layout.

Messages, placement and snapshots name keys and slices, never blocks. A thousand small parameters are a single block, a
slice of 4 MiB is a block by itself. Invariants:

* All slices of a block have the same counters. An event that concerns only some of them splits the block first.
* A version that readers have never changes: a new version is written into another buffer than those in use.
* Contributions are summed in rank order, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.checkpoint.snapshot import STATES, WEIGHTS, SliceImage, WantedSlice
from kvdist.core.policy import Policy
from kvdist.core.round import (
    UNANSWERED,
    Contribution,
    Round,
    RowIds,
    Verdict,
    agreed_settings,
    require_optimizer,
    scales_of,
)
from kvdist.core.server.buffers import Allocate, Buffer, BufferPool, ordinary_memory
from kvdist.core.server.holder import Holder, optimizer_of
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.naming import name_of
from kvdist.nodes import Member
from kvdist.optimizer.base import Extent, Piece
from kvdist.optimizer.states import Part
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import U8, U32, Arrays, Bits

# Plain numbers: operators of enums are written in Python, and these are compared for every block of every push.
_EMPTY, _HOLD = int(msg.Flag.EMPTY), int(msg.Flag.HOLD)

SLICES_MAX = 1024
"""Slices of a block: splitting off each of n slices in turn costs n²."""
ROUNDS_WORTH_IT = 16
"""A merged block that is split again within this many rounds was not worth the copy."""
MERGE_AFTER_MAX = 4096
"""The most rounds that parts of such a block wait before they merge again; first `ROUNDS_WORTH_IT`, then doubled."""


@dataclass(slots=True, eq=False, repr=False)
class Block(Holder):
    """Slices of the same store and dtype, side by side in a buffer.

    Attributes:
        store: the number of the store.
        ids: (n,) the slices.
        extents: the place of each slice in its parameter, with the parameter's key.
        pulled_as: the dtype in which workers receive the values: `dtype`, or halves of it.
    """

    store: int
    ids: U32
    extents: Sequence[Extent]
    pool: BufferPool
    round: Round
    kernels: Kernels = REFERENCE
    pulled_as: DType | None = None
    published: Buffer | None = None
    """The present values; None before all first values have arrived."""
    previous: Buffer | None = None
    """The values of the version before, where all wait for lost workers, as a lost worker may repeat that step. They
    need no lease: the next round, which writes the buffer, has a push of every worker, and no worker pushes before all
    slices have completed the repeated step."""
    samples_before: int = 0
    """`Round.samples` of the previous version."""
    joint: Sequence[Block] = ()
    """All blocks of the parameter on this server, if several: a rule that needs norms updates them together."""
    lent: dict[Member, Buffer] = field(default_factory=dict)
    """Worker → the version that it reads in place. Each such buffer has a lease for it, which stays when the worker
    leaves, because its process may go on reading. See `release`."""
    merged_at: int = -1
    """The version at which the block was merged; -1 if it was not."""
    merge_after: int = 0
    """The version from which on the block may merge with others."""
    wait: int = 0
    """How many rounds the parts wait until they merge again, if the block is split too early."""
    kept: Sequence[Contribution] = ()
    """The contributions of a round that was only measured: see `kvdist.core.server.clipping`."""
    squares: float = 0.0
    """The sum of squares of the last measured round."""
    _halves: Halves | None = None

    @classmethod
    def of(
        cls,
        store: int,
        ids: Sequence[int],
        extents: Sequence[Extent],
        counts: Sequence[int],
        dtype: DType,
        policy: Policy,
        kernels: Kernels = REFERENCE,
        allocate: Allocate = ordinary_memory,
        pulled_as: DType | None = None,
    ) -> Block:
        """Create a block without values."""
        pool = BufferPool(dtype, np.array(counts, np.uint32), allocate)
        key = extents[0].key
        assert isinstance(key, int | str)
        return cls(store, np.array(ids, np.uint32), tuple(extents), pool, Round(key, policy), kernels, pulled_as)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"the block of {name_of(self.key)}"  # as errors of rules name what they are to update

    @property
    def key(self) -> int | str:
        """The key of the first slice."""
        return self.round.key

    def key_of(self, position: int) -> int | str:
        """Return the key of the slice at a position."""
        key = self.extents[position].key
        assert isinstance(key, int | str)
        return key

    @property
    def dtype(self) -> DType:
        """The element type of the values."""
        return self.pool.dtype

    @property
    def counts(self) -> U32:
        """(n,) elements of each slice."""
        return self.pool.counts

    @property
    def nbytes(self) -> int:
        """Bytes of the values."""
        return self.pool.size * self.dtype.itemsize

    @property
    def version(self) -> int:
        """How many rounds have been closed."""
        return self.round.version

    @property
    def has_value(self) -> bool:  # type: ignore[override]  # read-only: it follows from `published`
        """Whether the first values have arrived."""
        return self.published is not None

    def values(self, position: int) -> Bits:
        """Return the present value of the slice at a position."""
        assert self.published is not None
        return self.pool.array(self.published, position)

    # Values from outside a round.

    def initialise(self, values: Sequence[Bits]) -> None:
        """Publish the first values of all slices, by a single copy. Existing values stay."""
        if self.published is None:
            self.replace(values)

    def replace(self, values: Sequence[Bits]) -> None:
        """Replace the values by a single copy. The version stays, as no round has closed."""
        # In fresh memory, so that only updates write into free buffers: an updater recognises the weight that it wrote
        # last by its array, and must not meet that array with another content.
        target = self.pool.fresh()
        for position, array in enumerate(values):
            self.pool.array(target, position)[...] = array
        self.publish(target)
        self.previous = None
        self.pool.free_buffers = [buffer for buffer in self.pool.free_buffers if buffer.leases]

    # Rounds.

    def offer(self, contribution: Contribution, now: float) -> Verdict:
        """Put a contribution into its slot.

        Raises:
            PushRefused: the worker's push counter does not fit, which only a broken peer can cause.
        """
        verdict = self.round.offer(contribution, now)
        if verdict is Verdict.REPEATED and contribution.run != UNANSWERED:
            present = self.round.slots[contribution.member.node.rank]
            if present.run == UNANSWERED:
                # The leader that summed it has left: its worker gets a reply for itself.
                present.run, present.pull = contribution.run, contribution.pull
                present.flags |= contribution.flags & _HOLD
        return verdict

    def offer_sum(self, contributions: Sequence[Contribution], now: float) -> Verdict:
        """Put the contributions of several workers, summed together, into their slots: all or none.

        `HAND_BACK` if a worker among them has given the sender up, and has pushed for itself.

        Raises:
            PushRefused: as `offer`, or contributions to this block are not summed.
        """
        if not self.round.policy.is_lockstep:
            raise errors.PushRefused(
                f"{name_of(self.key)} is asynchronous: contributions are applied one by one, not summed on the way"
            )
        verdicts = {self.round.verdict_on(contribution) for contribution in contributions}
        if len(verdicts) > 1 or verdicts == {Verdict.REPEATED}:
            return Verdict.HAND_BACK
        if verdicts == {Verdict.ACCEPTED}:
            for contribution in contributions:
                self.round.offer(contribution, now)
        return verdicts.pop()

    def together(self, updater: SliceUpdater | None) -> Sequence[Block]:
        """Return all blocks of the parameter if the rule needs norms of the whole, else this block."""
        return self.joint if self.joint and updater is not None and updater.optimizer.needs_norms else (self,)

    def keep_version(self, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """Keep the present version, of which a worker that comes back may repeat the step."""
        self.previous = self.published
        self.samples_before = self.round.samples - sum(one.samples for one in contributions)

    def apply(self, rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None) -> None:
        """Publish the next version of the block and of those updated together with it."""
        apply_round(self.together(updater), rounds, updater)

    def summed(self, contributions: Sequence[Contribution], scales: Sequence[float]) -> tuple[Buffer, RowIds | None]:
        """Return the scaled sum of contributions, in a buffer of the pool."""
        buffer = self.pool.acquire()
        self.kernels.weighted_sum([one.values for one in contributions], scales, self.dtype, buffer.array)
        return buffer, None

    def forwarded(self, total: Buffer | None, row_ids: RowIds | None) -> list[Arrays]:
        """Show the buffer of a sum, which returns to the pool; the caller leases it."""
        dtypes = np.full(len(self), self.dtype, np.uint8)
        if total is None:
            return [Arrays(dtypes, np.zeros(len(self), np.uint32), b"")]
        self.pool.give_back(total)
        return [Arrays(dtypes, self.counts, total.payload)]

    def publish(self, buffer: Buffer) -> None:
        """Publish a version in a buffer of `pool`."""
        if self._halves is not None:
            self._halves.forget()
        if self.published is not None:
            self.pool.give_back(self.published)
        self.published = buffer

    def lend(self, member: Member) -> Buffer | None:
        """Let a worker read the present version in place; return the buffer that it has read so far.

        That buffer stays leased until the worker has acknowledged the new version; the caller releases it then.
        """
        assert self.published is not None
        before = self.lent.get(member)
        self.lent[member] = self.published
        self.published.leases += 1
        return before

    def release(self, member: Member) -> None:
        """Release the buffer that a lost worker has read in place, now that its process has ended."""
        buffer = self.lent.pop(member, None)
        if buffer is not None:
            buffer.leases -= 1

    # Checkpoints and rollbacks.

    def saved(
        self, positions: Sequence[int], updater: SliceUpdater | None, contents: Sequence[str]
    ) -> tuple[list[SliceImage], Buffer | None]:
        """See `Holder`. The weight is leased, not copied.

        States change in place: they are copied in a single pass, two where they come from a GPU.
        """
        present = None if updater is None or STATES not in contents else updater.states.get(self)
        buffer = self.published if WEIGHTS in contents else None
        slices = []
        for position in positions:
            extent, count = self.extents[position], int(self.counts[position])
            weight = None if buffer is None else self.values(position)
            about = (
                int(self.ids[position]),
                self.key_of(position),
                extent.start,
                count,
                self.dtype,
                self.version,
                weight,
            )
            image, state = SliceImage(*about, samples=self.round.samples), None
            if present is not None:
                state = (present if len(self) == 1 else present.part(self.pool.starts[position], count)).copy()
            if updater is not None and STATES in contents:
                image = image.with_state(state, updater.optimizer)
            slices.append(image)
        if buffer is not None:  # from here on nothing fails
            buffer.leases += 1
        return slices, buffer

    def wanted(self, updater: SliceUpdater | None) -> list[WantedSlice]:
        """See `Holder`."""
        columns = zip(self.ids.tolist(), self.counts.tolist(), self.extents, strict=True)
        return [
            WantedSlice(number, self.key_of(position), extent.start, count, self.dtype).updated_by(
                optimizer_of(updater), extent.row_length
            )
            for position, (number, count, extent) in enumerate(columns)
        ]

    def load(self, image: SliceImage, updater: SliceUpdater | None) -> None:
        """See `Holder`. The weight is copied once."""
        if image.weight is not None:
            self.replace([image.weight])
        if updater is not None and image.has_state:
            updater.restore(self, image.state)
            self.round.samples = image.samples

    def clear_for_rollback(self, is_updated: bool) -> None:
        """See `Holder`."""
        self.kept, self.merged_at, self.merge_after = (), -1, 0
        if not is_updated:
            self.initialise([np.zeros(int(self.counts[0]), self.dtype.storage)])

    # Values on their way to workers.

    @property
    def before(self) -> Block:
        """The version before the present version, as a block to read."""
        assert self.previous is not None
        round_ = replace(self.round, version=self.version - 1, samples=self.samples_before)
        return replace(self, round=round_, published=self.previous, _halves=None)

    @property
    def outgoing(self) -> Buffer:
        """The present version in the dtype in which it travels."""
        assert self.published is not None
        if self.pulled_as is None:
            return self.published
        if self._halves is None:
            self._halves = Halves(BufferPool(self.pulled_as, self.counts, self.pool.allocate), self.kernels)
        return self._halves.of(self)

    @property
    def outgoing_dtype(self) -> DType:
        """The dtype in which values travel."""
        return self.dtype if self.pulled_as is None else self.pulled_as

    # Splitting and merging.

    def split(self, bounds: Sequence[int], updater: SliceUpdater | None) -> list[Block]:
        """Replace this block by several. No copy: they show the same memory.

        Args:
            bounds: the first slice of each part, from 0, and the number of slices.
            updater: updates the store; None without an optimizer.
        """
        parts = [self._part(begin, end) for begin, end in pairwise(bounds)]
        for buffer in self.lent.values():
            buffer.leases += len(parts) - 1
        if updater is not None:
            updater.split(self, self._places_of(parts))
        return parts

    def _part(self, begin: int, end: int) -> Block:
        pool = BufferPool(self.dtype, self.counts[begin:end], self.pool.allocate)
        first = self.pool.starts[begin]
        elements = slice(first, first + pool.size)
        whole = self.round
        round_ = replace(
            whole,
            key=self.key_of(begin),
            slots={rank: replace(one, values=one.values[elements]) for rank, one in whole.slots.items()},
            counted=dict(whole.counted),
            began=dict(whole.began),
            examples=dict(whole.examples),
            refused=dict(whole.refused),
            pulls=list(whole.pulls),
            admission=None if whole.admission is None else replace(whole.admission, since=dict(whole.admission.since)),
        )
        ids, extents = self.ids[begin:end], self.extents[begin:end]
        part = Block(self.store, ids, extents, pool, round_, self.kernels, self.pulled_as)
        part.lent, part.merge_after, part.wait = dict(self.lent), self.merge_after, self.wait
        part.samples_before = self.samples_before
        part.kept = [replace(one, values=one.values[elements]) for one in self.kept]
        if self.merged_at >= 0:
            is_early = self.version - self.merged_at < ROUNDS_WORTH_IT
            part.merge_after, part.wait = (self.version + self.wait, self.wait) if is_early else (self.version, 0)
        if self.published is not None:
            part.published = self.pool.part(self.published, begin, end)
        if self.previous is not None:
            part.previous = self.pool.part(self.previous, begin, end)
        return part

    def may_merge(self, other: Block) -> bool:
        """Whether two neighbours in a message agree in everything that a block has once, and are worth a copy."""
        mine, its = self.round, other.round
        return (
            self.version >= self.merge_after
            and other.version >= other.merge_after
            and not (self.joint or other.joint)
            and (self.store, self.dtype, self.pulled_as) == (other.store, other.dtype, other.pulled_as)
            and (mine.version, mine.restored) == (its.version, its.restored)
            and (mine.counted, mine.examples) == (its.counted, its.examples)
            and mine.admission is its.admission is None
            and self.published is not None
            and other.published is not None
            and not (mine.refused or its.refused or self.lent or other.lent or self.kept or other.kept)
            and mine.is_quiet
            and its.is_quiet
        )

    @classmethod
    def merged(cls, blocks: Sequence[Block], updater: SliceUpdater | None) -> Block:
        """Replace several blocks by a single block. Values and states are copied once."""
        first = blocks[0]
        counts = np.concatenate([block.counts for block in blocks])
        pool = BufferPool(first.dtype, counts, first.pool.allocate)
        ids = np.concatenate([block.ids for block in blocks])
        extents = [extent for block in blocks for extent in block.extents]
        whole = cls(first.store, ids, extents, pool, replace(first.round), first.kernels, first.pulled_as)
        whole.merged_at, longest = first.version, max(block.wait for block in blocks)
        whole.wait = min(max(2 * longest, ROUNDS_WORTH_IT), MERGE_AFTER_MAX)
        began = [item for block in blocks for item in block.round.began.items()]
        whole.round.began = {rank: min(first for one, first in began if one == rank) for rank, _ in began}
        # A push of a lost worker may be in some of them alone: it counts as done, as its data do.
        whole.round.samples = max(block.round.samples for block in blocks)
        whole.samples_before = max(block.samples_before for block in blocks)
        whole.published = pool.joined([(block.pool, block.published) for block in blocks])
        whole.previous = pool.joined([(block.pool, block.previous) for block in blocks])
        if updater is not None:
            updater.join(whole, whole._places_of(blocks), pool.size, first.dtype)
        return whole

    def _places_of(self, parts: Sequence[Block]) -> list[Part]:
        """The positions of its parts."""
        places, position = [], 0
        for part in parts:
            places.append(Part(part, self.pool.starts[position], part.pool.size))
            position += len(part)
        return places

    def validate(self) -> None:
        """Check every invariant."""
        self.round.validate()
        assert self.published is None or self.published not in self.pool.free_buffers, (
            "the published buffer is not free"
        )
        for contribution in self.round.slots.values():
            assert contribution.is_empty or contribution.values.size == self.pool.size, "a contribution fits"


def pusher_of(block: Block, contributions: Sequence[Contribution]) -> int | None:
    """Return the rank whose push becomes a version, in an asynchronous store; None in other stores."""
    return None if block.round.policy.is_lockstep or not contributions else contributions[0].member.node.rank


def apply_round(
    blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None
) -> None:
    """Publish the next version of a block, or of all blocks of a parameter together.

    Passes over a block with W contributions: W reads and a write; with an optimizer also the passes of its rule. The
    published buffer is read, never written.

    Args:
        blocks: several only where the rule needs norms of the whole parameter.
        rounds: for each block the contributions, which are counted already.
        updater: applies the rule; None: the sum replaces the value.

    Raises:
        OptimizerMismatch, PushRefused: they cannot be applied, and the values stay as they were.
    """
    first, present = blocks[0], []
    for own in rounds:
        present.append([contribution for contribution in own if not contribution.is_empty])
    spoken = next(filter(None, present), None)
    if spoken is None:
        return
    require_optimizer(first.key, first.round.policy, updater)
    lr, wd = agreed_settings(first.key, spoken, first.round.began.keys(), first.round.policy)
    optimizer = None if updater is None else updater.optimizer
    factors = [scales_of(own, every, optimizer) for own, every in zip(present, rounds, strict=True)]
    targets, pieces = [], []
    try:
        for block, own, scales in zip(blocks, present, factors, strict=True):
            assert block.published is not None
            target = block.pool.acquire()
            targets.append(target)
            values = [contribution.values for contribution in own]
            if updater is None:
                block.kernels.weighted_sum(values, scales, block.dtype, target.array)
                continue
            extent = block.extents[0] if len(block.extents) == 1 else Extent(block, (block.pool.size,))
            pieces.append(Piece(block, block.published.array, values, scales, target.array, extent))
        if updater is not None:
            updater.update_together(pieces, first.dtype, lr, wd, pusher_of(first, rounds[0]))
    except (TypeError, ValueError) as error:
        for block, target in zip(blocks, targets, strict=True):
            block.pool.give_back(target)
        raise errors.PushRefused(f"{name_of(first.key)}: {error}") from error
    for block, target in zip(blocks, targets, strict=True):
        block.publish(target)


class Halves:
    """The values of a block of float32 as halves, for workers that asked for halves.

    A version is cast once, when the first worker wants it, and all workers are shown the same bytes.

    Args:
        pool: the buffers for halves.
        kernels: the backend for casts.
    """

    def __init__(self, pool: BufferPool, kernels: Kernels) -> None:
        self._pool = pool
        self._kernels = kernels
        self._present: Buffer | None = None

    def of(self, block: Block) -> Buffer:
        """Return the present values. The first call is a pass over them."""
        if self._present is None:
            target = self._pool.acquire()
            for position in range(len(block)):
                array = self._pool.array(target, position)
                self._kernels.from_float32(block.values(position), self._pool.dtype, array)
            self._present = target
        return self._present

    def forget(self) -> None:
        """Drop the halves, before another version is published."""
        if self._present is not None:
            self._pool.give_back(self._present)
            self._present = None


BlockRows = tuple[int, int, Block]
"""(begin, end, block): the rows of a message that are all slices of a block, in order."""


class Blocks:
    """All blocks of a server, looked up for whole messages in a few calls. Each slice is in exactly one block.

    Args:
        bytes_max: the largest size of a block of several slices.
        updater_of: returns the updater of a store, by its number; None while a sum replaces values.
    """

    def __init__(self, bytes_max: int, updater_of: Callable[[int], SliceUpdater | None]) -> None:
        self.may_merge = True
        """Whether neighbours in a message merge into a block."""
        self._bytes_max = bytes_max
        self._updater_of = updater_of
        self._all: dict[int, Block] = {}
        """By the number in `_block`."""
        self._next = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Elements of each slice; -1 for a slice that this server does not keep."""
        self._dtypes: U8 = np.zeros(0, np.uint8)
        self._block: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._position: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """The position of each slice in its block."""

    def __iter__(self) -> Iterator[Block]:
        """Iterate over a list of the present blocks: blocks may be split or merged meanwhile."""
        return iter(list(self._all.values()))

    def __contains__(self, number: int) -> bool:
        return number < len(self._counts) and bool(self._counts[number] >= 0)

    def has_room_for(self, nbytes: int, slices: int) -> bool:
        """Whether a block of several slices may be of this size."""
        return nbytes <= self._bytes_max and slices <= SLICES_MAX

    def of(self, number: int) -> tuple[Block, int]:
        """Return the block of a slice of this server, and the position of the slice in it."""
        return self._all[int(self._block[number])], int(self._position[number])

    def add(self, block: Block) -> None:
        """Add a block, whose slices are in no other block."""
        size = len(self._counts)
        last = int(block.ids.max())
        if last >= size:  # the tables at least double, or each init would copy them
            more = max(last + 1 - size, size)
            self._counts = np.concatenate([self._counts, np.full(more, -1, np.int64)])
            self._dtypes = np.concatenate([self._dtypes, np.zeros(more, np.uint8)])
            self._block = np.concatenate([self._block, np.zeros(more, np.int64)])
            self._position = np.concatenate([self._position, np.zeros(more, np.int64)])
        self._counts[block.ids] = block.counts
        self._dtypes[block.ids] = block.dtype
        self._enter(block)

    def _enter(self, block: Block) -> None:
        self._all[self._next] = block
        self._block[block.ids] = self._next
        self._position[block.ids] = np.arange(len(block))
        self._next += 1

    # Whether a message is right.

    def fit(self, ids: U32, arrays: Arrays | None) -> bool:
        """Whether all slices and arrays are as declared: the usual case, in few calls."""
        if int(ids.max()) >= len(self._counts):
            return False
        expected = self._counts[ids]
        if arrays is None:
            return bool((expected >= 0).all())
        return bool((expected == arrays.counts).all() and (self._dtypes[ids] == arrays.dtypes).all())

    def misfits(self, ids: U32, arrays: Arrays | None, flags: U8 | None) -> Iterator[tuple[int, bool]]:
        """Yield the wrong rows: (row, whether this server keeps the slice).

        An empty contribution has no array.

        Args:
            ids: slices.
            arrays: their arrays, if the message has arrays.
            flags: flags of contributions.
        """
        inside = ids < len(self._counts)
        within = np.where(inside, ids, 0)
        expected = np.where(inside, self._counts[within], -1) if len(self._counts) else np.full(len(ids), -1)
        good = expected >= 0
        if arrays is not None and good.any():
            fits = (arrays.counts == expected) & (arrays.dtypes == self._dtypes[within])
            if flags is not None:
                fits |= (flags & _EMPTY).astype(bool)
            good &= fits
        for i in np.flatnonzero(~good).tolist():
            yield i, bool(expected[i] >= 0)

    # Blocks for a message.

    def cover(self, ids: U32, *columns: npt.NDArray[np.generic]) -> list[BlockRows]:
        """Return the rows of a message as whole blocks, which are split where necessary.

        Args:
            ids: slices of this server, each once.
            columns: numbers that must be equal for all rows of a block.
        """
        return self._cover(ids, _changes(columns, len(ids)))

    def cover_merged(self, ids: U32, *columns: npt.NDArray[np.generic]) -> list[BlockRows]:
        """Return the same as `cover`, after neighbours have merged where they may."""
        changes = _changes(columns, len(ids))
        rows = self._cover(ids, changes)
        return rows if len(rows) < 2 or changes.all() or not self.may_merge else self._merge(rows, changes)

    def isolate(self, ids: U32) -> list[Block]:
        """Return a block for each of these slices, each named once."""
        return [block for _, _, block in self._cover(ids, np.ones(max(len(ids) - 1, 0), np.bool_))]

    def _cover(self, ids: U32, changes: npt.NDArray[np.bool_]) -> list[BlockRows]:
        if not len(ids):
            return []
        numbers, positions = self._block[ids], self._position[ids]
        breaks = changes | (numbers[1:] != numbers[:-1]) | (positions[1:] != positions[:-1] + 1)
        bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(ids)]
        found = [(begin, end, self._all[number]) for begin, end, number in _firsts(bounds, numbers)]
        cuts: dict[int, set[int]] = {}
        for begin, end, block in found:
            if end - begin < len(block):
                first = int(positions[begin])
                cuts.setdefault(int(numbers[begin]), {0, len(block)}).update((first, first + end - begin))
        if not cuts:
            return found
        for number, cut in cuts.items():
            self._split(number, sorted(cut))
        return [(begin, end, self._all[number]) for begin, end, number in _firsts(bounds, self._block[ids])]

    def _split(self, number: int, bounds: Sequence[int]) -> None:
        block = self._all[number]
        parts = block.split(bounds, self._updater_of(block.store))
        del self._all[number]
        for part in parts:
            self._enter(part)

    def _merge(self, rows: Sequence[BlockRows], changes: npt.NDArray[np.bool_]) -> list[BlockRows]:
        merged: list[BlockRows] = []
        run: list[BlockRows] = []
        nbytes = slices = 0
        for one in rows:
            begin, _, block = one
            fits = bool(run) and self.has_room_for(nbytes + block.nbytes, slices + len(block))
            if fits and not changes[begin - 1] and run[-1][2].may_merge(block):
                run.append(one)
                nbytes, slices = nbytes + block.nbytes, slices + len(block)
                continue
            merged += self._merged(run)
            run, nbytes, slices = [one], block.nbytes, len(block)
        return merged + list(self._merged(run))

    def _merged(self, run: Sequence[BlockRows]) -> Sequence[BlockRows]:
        if len(run) < 2:
            return run
        blocks = [block for _, _, block in run]
        updater = self._updater_of(blocks[0].store)
        if updater is not None and not updater.joinable(blocks):
            return run
        try:
            whole = Block.merged(blocks, updater)
        except MemoryError:
            return run  # they do as well apart
        for block in blocks:
            del self._all[int(self._block[block.ids[0]])]
        self._enter(whole)
        return [(run[0][0], run[-1][1], whole)]


def _firsts(bounds: Sequence[int], numbers: npt.NDArray[np.int64]) -> Iterator[tuple[int, int, int]]:
    """Return (begin, end, number of the first row) between these bounds."""
    return zip(bounds[:-1], bounds[1:], numbers[bounds[:-1]].tolist(), strict=True)


def _changes(columns: Sequence[npt.NDArray[np.generic]], rows: int) -> npt.NDArray[np.bool_]:
    """Return (rows - 1,) whether any column differs from the row before."""
    changes = np.zeros(max(rows - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return changes
