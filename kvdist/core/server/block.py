"""`Block`: slices of a server that are summed, updated and sent as one; `Blocks` finds them. A private layout.

Messages, placement and snapshots name keys and slices, never blocks. A thousand small parameters are one block, a slice
of 4 MiB is a block by itself. Rules that hold here:

* All slices of a block have the same counters. What happens to some of them only splits the block first.
* What has been handed out never changes: a new version is written into another buffer than one that is read.
* Contributions are summed in rank order, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvdist import errors
from kvdist.core.policy import Policy
from kvdist.core.round import (
    PullRequest,
    Round,
    Setting,
    Verdict,
    agreed_settings,
    require_optimizer,
    scales_of,
)
from kvdist.core.server.buffers import Allocate, Buffer, BufferPool, ordinary_memory
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

# Plain numbers: operators of enums are written in Python, and these are asked for every block of every push.
_EMPTY = int(msg.Flag.EMPTY)
_HOLD = int(msg.Flag.HOLD)
_ADDS_NOTHING = int(msg.Flag.EMPTY | msg.Flag.CARRIED)

SLICES_MAX = 1024
"""Of one block: cutting off one slice after the other costs the square of it."""
ROUNDS_WORTH_IT = 16
"""A merged block that is split again within this many rounds was not worth the copy."""
MERGE_AFTER_MAX = 4096
"""The most rounds that parts of such a block wait before they merge again; first `ROUNDS_WORTH_IT`, then doubled."""


@dataclass(slots=True)
class Contribution:
    """What one worker adds to the next version of a block."""

    member: Member
    run: int
    step: int
    version: int
    """The oldest version of a slice that the worker had seen."""
    samples: int
    flags: int
    setting: Setting
    values: Bits
    """As long as the block's buffer; of an empty contribution nothing."""
    pull: bool
    silent: bool = False
    """Whether it came with that of another worker, which gets the reply for both."""

    @property
    def is_empty(self) -> bool:
        """Whether it only counts: there is no gradient, or it is in the sum that another contribution carries."""
        return bool(self.flags & _ADDS_NOTHING)

    @property
    def reads_in_place(self) -> bool:
        """Whether the worker reads the new value in place."""
        return bool(self.flags & _HOLD)


@dataclass(slots=True, eq=False, repr=False)
class Block:
    """One or more slices of one store and dtype, side by side in one buffer.

    Attributes:
        store: the number of the store.
        ids: (n,) the slices.
        extents: where each lies in its parameter, whose key it has.
        pulled_as: the dtype in which workers get the values: `dtype`, or halves of it.
    """

    store: int
    ids: U32
    extents: Sequence[Extent]
    pool: BufferPool
    round: Round[Contribution, PullRequest]
    kernels: Kernels = REFERENCE
    pulled_as: DType | None = None
    published: Buffer | None = None
    """The present values; None before all first ones have arrived."""
    previous: Buffer | None = None
    """Those of the version before, where all wait for lost workers, one of which may repeat that step. Nothing has to
    release it: the next round, which writes it, has a push of every worker, and nobody pushes before that step is over
    in all slices."""
    samples_before: int = 0
    """Of how many examples those are made; see `Round.samples`."""
    joint: Sequence[Block] = ()
    """All blocks here of the same parameter, if there are several: a rule that needs norms updates them together."""
    lent: dict[Member, Buffer] = field(default_factory=dict)
    """Worker → the version that it reads where it lies. Each is leased once for that; for good, when the worker leaves,
    because its process may go on reading. See `release`."""
    merged_at: int = -1
    """The version at which it was merged; -1 if it was not."""
    merge_after: int = 0
    """The version from which on it may merge with others."""
    wait: int = 0
    """How many rounds its parts wait until they merge again, if it is split too early."""
    kept: Sequence[Contribution] = ()
    """Of a round that was only measured: see `kvdist.core.server.clipping`."""
    squares: float = 0.0
    """Of what was measured last."""
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
        """A new block, without values."""
        pool = BufferPool(dtype, np.array(counts, np.uint32), allocate)
        key = extents[0].key
        assert isinstance(key, int | str)
        round_: Round[Contribution, PullRequest] = Round(key, policy)
        return cls(store, np.array(ids, np.uint32), tuple(extents), pool, round_, kernels, pulled_as)

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"the block of {name_of(self.key)}"  # as errors of rules name what they are to update

    @property
    def key(self) -> int | str:
        """Of its first slice."""
        return self.round.key

    def key_of(self, position: int) -> int | str:
        """Of one of its slices."""
        key = self.extents[position].key
        assert isinstance(key, int | str)
        return key

    @property
    def dtype(self) -> DType:
        """Of the values."""
        return self.pool.dtype

    @property
    def counts(self) -> U32:
        """(n,) elements of each slice."""
        return self.pool.counts

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.pool.size * self.dtype.itemsize

    @property
    def version(self) -> int:
        """How many rounds have been closed."""
        return self.round.version

    @property
    def has_value(self) -> bool:
        """Whether its first values are there."""
        return self.published is not None

    def values(self, position: int) -> Bits:
        """The present value of one of its slices."""
        assert self.published is not None
        return self.pool.array(self.published, position)

    # Values that no round makes.

    def initialise(self, values: Sequence[Bits]) -> None:
        """Take the first values of all slices; one copy. Existing values stay."""
        if self.published is None:
            self.replace(values)

    def replace(self, values: Sequence[Bits]) -> None:
        """Take other values in place of the present ones; one copy. The version stays: no round made it."""
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
        if verdict is Verdict.REPEATED and not contribution.silent:
            present = self.round.slots[contribution.member.node.rank]
            if present.silent:
                # The leader that summed it has left: its worker gets its own reply.
                present.run, present.pull, present.silent = contribution.run, contribution.pull, False
                present.flags |= contribution.flags & _HOLD
        return verdict

    def offer_joined(self, contributions: Sequence[Contribution], now: float) -> Verdict:
        """Put the contributions of several workers, summed together, into their slots: all or none.

        `REPEATED` if there is one of these workers that has given its sender up, and has pushed by itself.

        Raises:
            PushRefused: only some of them are the next pushes of their workers, which only a broken peer can cause.
        """
        counted = [self.round.counted.get(contribution.member.node.rank, 0) for contribution in contributions]
        if all(contribution.step < own for contribution, own in zip(contributions, counted, strict=True)):
            return Verdict.ALREADY_COUNTED
        for contribution, own in zip(contributions, counted, strict=True):
            if contribution.step != own:
                raise errors.PushRefused(
                    f"push {contribution.step} of {contribution.member} to {name_of(self.key)} came in a sum, but"
                    f" {own} of its pushes have been counted"
                )
        if any(contribution.member.node.rank in self.round.slots for contribution in contributions):
            return Verdict.REPEATED
        for contribution in contributions:
            self.round.offer(contribution, now)
        return Verdict.ACCEPTED

    def publish(self, buffer: Buffer) -> None:
        """Publish a version, a buffer of `pool`."""
        if self._halves is not None:
            self._halves.forget()
        if self.published is not None:
            self.pool.give_back(self.published)
        self.published = buffer

    def lend(self, member: Member) -> Buffer | None:
        """Let a worker read the present version in place; return the one that it read until now.

        That one stays leased until the worker has acknowledged the new one; the caller releases it then.
        """
        assert self.published is not None
        before = self.lent.get(member)
        self.lent[member] = self.published
        self.published.leases += 1
        return before

    def forget(self, gone: Set[int]) -> None:
        """These workers wait for nothing any more."""
        self.round.forget(gone)

    def drop(self, lost: Set[int]) -> dict[int, int]:
        """Drop what lost workers have pushed and is not counted. Returns rank → how many pushes are."""
        return self.round.drop(lost)

    def release(self, member: Member) -> None:
        """Return the buffer that a lost worker has read in place, now that its process has ended."""
        buffer = self.lent.pop(member, None)
        if buffer is not None:
            buffer.leases -= 1

    # What travels to workers.

    @property
    def before(self) -> Block:
        """The version before the present one, as a block to read."""
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
            bounds: where each begins, from 0, and the number of slices.
            updater: what updates the store.
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
        own = self.round
        round_ = replace(
            own,
            key=self.key_of(begin),
            slots={rank: replace(one, values=one.values[elements]) for rank, one in own.slots.items()},
            counted=dict(own.counted),
            began=dict(own.began),
            examples=dict(own.examples),
            refused=dict(own.refused),
            pulls=list(own.pulls),
            admission=None if own.admission is None else replace(own.admission, since=dict(own.admission.since)),
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
        """Whether two neighbours in a message are equal in everything that a block has once, and worth a copy."""
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
        """Replace several blocks by one. One copy of values and states."""
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
    """The rank of the worker of whose push a version is made, in an asynchronous store; None in others."""
    return None if block.round.policy.is_lockstep or not contributions else contributions[0].member.node.rank


def apply_round(
    blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None
) -> None:
    """Make the next version of a block, or of all blocks of one parameter together.

    Passes over a block, W contributions: without an optimizer W reads and one write; with one as many more as its rule
    says. The published buffer is read, never written.

    Args:
        blocks: several only where the rule needs norms of the whole parameter.
        rounds: for each of them the contributions, which are counted already.
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
    """The values of a block of float32 as halves, for workers that asked to get them so.

    A version is cast once, when the first worker wants it, and all workers are shown the same bytes.

    Args:
        pool: gives buffers for them.
        kernels: what casts.
    """

    def __init__(self, pool: BufferPool, kernels: Kernels) -> None:
        self._pool = pool
        self._kernels = kernels
        self._present: Buffer | None = None

    def of(self, block: Block) -> Buffer:
        """The present values. One pass over them, the first time."""
        if self._present is None:
            target = self._pool.acquire()
            for position in range(len(block)):
                array = self._pool.array(target, position)
                self._kernels.from_float32(block.values(position), self._pool.dtype, array)
            self._present = target
        return self._present

    def forget(self) -> None:
        """Drop the halves: there is another version."""
        if self._present is not None:
            self._pool.give_back(self._present)
            self._present = None


BlockRows = tuple[int, int, Block]
"""(begin, end, block): the rows of a message that are all slices of a block, in order."""


class Blocks:
    """All blocks of a server, found for whole messages in a few calls. Each slice is in one block.

    Args:
        bytes_max: the most that blocks of several slices have.
        updater_of: what updates a store, by its number; None while a sum replaces values.
    """

    def __init__(self, bytes_max: int, updater_of: Callable[[int], SliceUpdater | None]) -> None:
        self.may_merge = True
        """Whether neighbours in a message become one block."""
        self._bytes_max = bytes_max
        self._updater_of = updater_of
        self._all: dict[int, Block] = {}
        """By the number in `_block`."""
        self._next = 0
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Elements of each slice; -1 for one that is not kept here."""
        self._dtypes: U8 = np.zeros(0, np.uint8)
        self._block: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._position: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """Of each slice in its block."""

    def __iter__(self) -> Iterator[Block]:
        """A snapshot: blocks may be split or merged on the way."""
        return iter(list(self._all.values()))

    def __contains__(self, number: int) -> bool:
        return number < len(self._counts) and bool(self._counts[number] >= 0)

    def has_room_for(self, nbytes: int, slices: int) -> bool:
        """Whether a block of several slices may be of this size."""
        return nbytes <= self._bytes_max and slices <= SLICES_MAX

    def of(self, number: int) -> tuple[Block, int]:
        """The block of a slice that is kept here, and its position there."""
        return self._all[int(self._block[number])], int(self._position[number])

    def add(self, block: Block) -> None:
        """Add a block, whose slices are in no other."""
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
        """The wrong rows: (row, whether the slice is here at all).

        An empty contribution has no array.

        Args:
            ids: slices.
            arrays: what came for them, if anything.
            flags: of contributions.
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
        """The rows of a message as whole blocks, which are split where necessary.

        Args:
            ids: slices that are kept here, each once.
            columns: what must be equal for all rows of a block.
        """
        return self._cover(ids, _changes(columns, len(ids)))

    def cover_merged(self, ids: U32, *columns: npt.NDArray[np.generic]) -> list[BlockRows]:
        """As `cover`, and neighbours merge where they may."""
        changes = _changes(columns, len(ids))
        rows = self._cover(ids, changes)
        return rows if len(rows) < 2 or changes.all() or not self.may_merge else self._merge(rows, changes)

    def isolate(self, ids: U32) -> list[Block]:
        """A block for each of these slices, each named once."""
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
    """(begin, end, number of the first row) between these bounds."""
    return zip(bounds[:-1], bounds[1:], numbers[bounds[:-1]].tolist(), strict=True)


def _changes(columns: Sequence[npt.NDArray[np.generic]], rows: int) -> npt.NDArray[np.bool_]:
    """(rows - 1,) whether any column differs from the row before."""
    changes = np.zeros(max(rows - 1, 0), np.bool_)
    for column in columns:
        changes |= column[1:] != column[:-1]
    return changes
