"""`Block`: slices of a server that are summed, updated and sent as one. It is the server's private layout.

Messages, placement and snapshots name keys and slices, never blocks. A thousand small parameters are one block, a slice
of 4 MiB is a block by itself. Rules that hold here:

* All slices of a block have the same counters. What happens to some of them only splits the block first.
* What has been handed out never changes: a new version is written into another buffer than one that is read.
* Contributions are summed in rank order, so that two runs give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from kvdist.core.policy import Policy
from kvdist.core.round import (
    PullRequest,
    Round,
    Setting,
    Verdict,
    agreed_settings,
    require_optimizer,
    scale_of,
)
from kvdist.core.server.buffers import Allocate, Bits, Buffer, BufferPool, ordinary_memory
from kvdist.dtypes import DType
from kvdist.errors import PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member
from kvdist.optimizer.base import Extent
from kvdist.optimizer.states import Part
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import U32
from kvdist.protocol.messages import Flag

# Plain numbers: operators of enums are written in Python, and these are asked for every block of every push.
_HOLD = int(Flag.HOLD)
_ADDS_NOTHING = int(Flag.EMPTY | Flag.CARRIED)

ROUNDS_WORTH_IT = 16
"""A block that was split before it had so many rounds since it merged was not worth the copy."""
MERGE_AFTER_MAX = 4096
"""The most rounds that parts of such a block wait until they merge again; `ROUNDS_WORTH_IT` at first, then doubled."""


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
    """It came with that of another worker, who is answered for both."""

    @property
    def is_empty(self) -> bool:
        """Whether it only counts: there is no gradient, or it is in the sum that another contribution carries."""
        return bool(self.flags & _ADDS_NOTHING)

    @property
    def holds(self) -> bool:
        """Whether the value that answers is read where it lies."""
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
    joint: Sequence[Block] = ()
    """All blocks here of the same parameter, if there are several: a rule with norms updates them together."""
    held: dict[Member, Buffer] = field(default_factory=dict)
    """Worker → the version that it reads where it lies. Each is leased once for that; for good, when the worker leaves,
    because its process may go on reading."""
    merged_at: int = -1
    """The version at which it was merged; -1 if it was not."""
    merge_after: int = 0
    """The version from which on it may merge with others."""
    wait: int = 0
    """How many rounds its parts wait until they merge again, if it is split too early."""
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
        return f"the block of key {self.key!r}"  # as errors of rules name what they are to update

    @property
    def key(self) -> int | str:
        """Of its first slice."""
        return self.round.key

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

    def values(self, position: int) -> Bits:
        """The present value of one of its slices."""
        assert self.published is not None
        return self.pool.array(self.published, position)

    # Values that no round makes.

    def initialise(self, values: Sequence[Bits]) -> None:
        """Take the first values of all slices; one copy. Those that are there already stay."""
        if self.published is None:
            self.replace(values)

    def replace(self, values: Sequence[Bits]) -> None:
        """Take other values in place of the present ones; one copy. The version stays: no round made it."""
        # In memory of its own, so that only updates write into spare buffers: an updater knows the weight that it wrote
        # last by its array, and must not meet that array with another content.
        target = self.pool.fresh()
        for position, array in enumerate(values):
            self.pool.array(target, position)[...] = array
        self.publish(target)
        self.pool.spare = [buffer for buffer in self.pool.spare if buffer.leases]

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
                # Who summed it with others has left, so its worker asks for itself now.
                present.run, present.pull, present.silent = contribution.run, contribution.pull, False
                present.flags |= contribution.flags & _HOLD
        return verdict

    def offer_joined(self, contributions: Sequence[Contribution], now: float) -> Verdict:
        """Put the contributions of several workers, summed together, into their slots: all or none.

        Raises:
            PushRefused: only some of them are the next pushes of their workers, which only a broken peer can cause.
        """
        counted = [self.round.counted.get(contribution.member.node.rank, 0) for contribution in contributions]
        if all(contribution.step < own for contribution, own in zip(contributions, counted, strict=True)):
            return Verdict.ALREADY_COUNTED
        for contribution, own in zip(contributions, counted, strict=True):
            if contribution.step != own or contribution.member.node.rank in self.round.slots:
                raise PushRefused(
                    f"push {contribution.step} of {contribution.member} to key {self.key!r} came in a sum, but"
                    f" {own} of its pushes have been counted"
                )
        for contribution in contributions:
            self.round.offer(contribution, now)
        return Verdict.ACCEPTED

    def is_ready(self, live: Set[int]) -> bool:
        """Whether the open round can be closed while these workers are alive."""
        return self.published is not None and self.round.is_complete(live)

    def apply(self, contributions: Sequence[Contribution], updater: SliceUpdater | None) -> None:
        """Make the next version of the contributions of a round, which are counted already.

        Passes over the block, W contributions: without an optimizer W reads and one write; with one as many more as
        its rule says. The published buffer is read, never written.

        Raises:
            OptimizerMismatch, PushRefused: they cannot be applied, and the value stays as it was.
        """
        present = [contribution for contribution in contributions if not contribution.is_empty]
        if not present:
            return
        assert self.published is not None
        require_optimizer(self.key, self.round.policy, updater)
        lr, wd = agreed_settings(self.key, present)
        optimizer = None if updater is None else updater.optimizer
        scales = [scale_of(contribution, len(contributions), optimizer) for contribution in present]
        values = [contribution.values for contribution in present]
        target = self.pool.take()
        try:
            if updater is None:
                self.kernels.weighted_sum(values, scales, self.dtype, target.array)
            else:
                extent = self.extents[0] if len(self) == 1 else None
                before = self.published.array
                updater.update(self, before, values, scales, self.dtype, target.array, lr, wd, extent)
        except (TypeError, ValueError) as error:
            self.pool.give_back(target)
            raise PushRefused(f"key {self.key!r}: {error}") from error
        self.publish(target)

    def publish(self, buffer: Buffer) -> None:
        """Show this version, a buffer of `pool`, from now on."""
        if self._halves is not None:
            self._halves.forget()
        if self.published is not None:
            self.pool.give_back(self.published)
        self.published = buffer

    def hold(self, member: Member) -> Buffer | None:
        """Let a worker read the present version where it lies, and return the one that it read until now.

        That one stays leased until the worker has acknowledged the new one; the caller releases it then.
        """
        assert self.published is not None
        before = self.held.get(member)
        self.held[member] = self.published
        self.published.leases += 1
        return before

    def take_satisfied_pulls(self) -> list[PullRequest]:
        """The pulls that the present state answers; they are removed."""
        return self.round.take_satisfied() if self.published is not None else []

    # What travels to workers.

    @property
    def outgoing(self) -> Buffer:
        """The present version as it travels."""
        assert self.published is not None
        if self.pulled_as is None:
            return self.published
        if self._halves is None:
            self._halves = Halves(BufferPool(self.pulled_as, self.counts, self.pool.allocate), self.kernels)
        return self._halves.of(self)

    @property
    def outgoing_dtype(self) -> DType:
        """Of what travels."""
        return self.dtype if self.pulled_as is None else self.pulled_as

    # Splitting and merging.

    def split(self, bounds: Sequence[int], updater: SliceUpdater | None) -> list[Block]:
        """Several blocks in place of this one, which is not used any more. No copy: they show the same memory.

        Args:
            bounds: where each begins, from 0, and the number of slices.
            updater: what updates the store.
        """
        parts = [self._part(begin, end) for begin, end in pairwise(bounds)]
        for buffer in self.held.values():
            buffer.leases += len(parts) - 1
        if updater is not None:
            updater.split(self, self._places_of(parts))
        return parts

    def _part(self, begin: int, end: int) -> Block:
        pool = BufferPool(self.dtype, self.counts[begin:end], self.pool.allocate)
        first = self.pool.starts[begin]
        key = self.extents[begin].key
        assert isinstance(key, int | str)
        own = self.round
        round_ = replace(
            own,
            key=key,
            slots={rank: replace(one, values=one.values[first : first + pool.size]) for rank, one in own.slots.items()},
            counted=dict(own.counted),
            refused=dict(own.refused),
            pulls=list(own.pulls),
        )
        ids, extents = self.ids[begin:end], self.extents[begin:end]
        part = Block(self.store, ids, extents, pool, round_, self.kernels, self.pulled_as)
        part.held, part.merge_after, part.wait = dict(self.held), self.merge_after, self.wait
        if self.merged_at >= 0:
            is_early = self.version - self.merged_at < ROUNDS_WORTH_IT
            part.merge_after, part.wait = (self.version + self.wait, self.wait) if is_early else (self.version, 0)
        if self.published is not None:
            part.published = self.pool.part(self.published, begin, end)
        return part

    def may_merge(self, other: Block) -> bool:
        """Whether two neighbours in a message are equal in all that a block has once, and worth a copy."""
        mine, its = self.round, other.round
        return (
            self.version >= self.merge_after
            and other.version >= other.merge_after
            and not (self.joint or other.joint)
            and (self.store, self.dtype, self.pulled_as) == (other.store, other.dtype, other.pulled_as)
            and (mine.version, mine.counted) == (its.version, its.counted)
            and self.published is not None
            and other.published is not None
            and not (mine.refused or its.refused or self.held or other.held)
            and mine.is_quiet
            and its.is_quiet
        )

    @classmethod
    def merged(cls, blocks: Sequence[Block], updater: SliceUpdater | None) -> Block:
        """One block in place of several, which are not used any more. One copy of values and states."""
        first = blocks[0]
        counts = np.concatenate([block.counts for block in blocks])
        pool = BufferPool(first.dtype, counts, first.pool.allocate)
        ids = np.concatenate([block.ids for block in blocks])
        extents = [extent for block in blocks for extent in block.extents]
        whole = cls(first.store, ids, extents, pool, replace(first.round), first.kernels, first.pulled_as)
        whole.merged_at, longest = first.version, max(block.wait for block in blocks)
        whole.wait = min(max(2 * longest, ROUNDS_WORTH_IT), MERGE_AFTER_MAX)
        target = pool.fresh()
        position = 0
        for block in blocks:
            for own in range(len(block)):
                pool.array(target, position)[...] = block.values(own)
                position += 1
        whole.published = target
        if updater is not None:
            updater.join(whole, whole._places_of(blocks), pool.size, first.dtype)
        return whole

    def _places_of(self, parts: Sequence[Block]) -> list[Part]:
        """Where in this block its parts lie."""
        places, position = [], 0
        for part in parts:
            places.append(Part(part, self.pool.starts[position], part.pool.size))
            position += len(part)
        return places

    def validate(self, live: Set[int], jointly: bool) -> None:
        """Check every invariant. If it is updated `jointly`, its round also waits for other blocks."""
        self.round.validate()
        assert self.published is None or self.published not in self.pool.spare, "the published buffer is not spare"
        waiting = [] if self.published is None else self.round.pulls
        assert not any(self.round.satisfies(pull) for pull in waiting), "a pull that can be answered is answered"
        for contribution in self.round.slots.values():
            assert contribution.is_empty or contribution.values.size == self.pool.size, "a contribution fits"
        assert jointly or not self.is_ready(live), "a full round is closed at once"


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
            target = self._pool.take()
            for position in range(len(block)):
                array = self._pool.array(target, position)
                self._kernels.from_float32(block.values(position), self._pool.dtype, array)
            self._present = target
        return self._present

    def forget(self) -> None:
        """There is another version."""
        if self._present is not None:
            self._pool.give_back(self._present)
            self._present = None
