"""Slices of arrays on their way into a checkpoint and back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvdist.checkpoint.snapshot import STATES, WEIGHTS, ReadSlice, SavedSlice, WantedSlice
from kvdist.core.policy import Policy
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Buffer
from kvdist.optimizer.states import has_master
from kvdist.optimizer.updater import SliceUpdater


@dataclass(frozen=True, slots=True)
class KeptSlice:
    """One slice of a block: see `Kept`."""

    owner: Block
    position: int

    @property
    def number(self) -> int:
        """Its name among all slices."""
        return int(self.owner.ids[self.position])

    @property
    def key(self) -> int | str:
        """Whose slice it is."""
        key = self.owner.extents[self.position].key
        assert isinstance(key, int | str)
        return key

    @property
    def policy(self) -> Policy:
        """When its rounds are closed."""
        return self.owner.round.policy

    @property
    def version(self) -> int:
        """How many rounds have been closed."""
        return self.owner.version

    @property
    def counted(self) -> Mapping[int, int]:
        """Worker rank → how many of its pushes are in the value."""
        return self.owner.round.counted

    @property
    def has_value(self) -> bool:
        """Whether its first value is there."""
        return self.owner.published is not None


def taken(
    block: Block, positions: Sequence[int], updater: SliceUpdater | None, contents: Sequence[str]
) -> tuple[list[SavedSlice], Buffer | None]:
    """Slices of a block as they are now: see `Keeper.taken`.

    The weight is not copied: what is published never changes, so it is leased. States change in place: one pass over
    them, two where they come from a GPU.
    """
    present = None if updater is None or STATES not in contents else updater.states.get(block)
    buffer = block.published if WEIGHTS in contents else None
    saved = []
    for position in positions:
        extent, count = block.extents[position], int(block.counts[position])
        weight = None if buffer is None else block.values(position)
        where = (KeptSlice(block, position).key, extent.start, count, block.dtype, block.version, weight)
        if updater is None or present is None:
            saved.append(SavedSlice(*where))
            continue
        own = present if len(block) == 1 else present.part(block.pool.starts[position], count)
        state = own.copy()
        states = dict(zip(updater.optimizer.state_names, state.arrays, strict=True))
        saved.append(SavedSlice(*where, states, state.count, state.scalars, state.master))
    if buffer is not None:  # from here on nothing fails
        buffer.leases += 1
    return saved, buffer


def wanted(block: Block, position: int, updater: SliceUpdater | None) -> WantedSlice:
    """What a checkpoint must have of a slice."""
    kept, extent = KeptSlice(block, position), block.extents[position]
    where = (kept.number, kept.key, extent.start, int(block.counts[position]), block.dtype)
    if updater is None:
        return WantedSlice(*where)
    optimizer = updater.optimizer
    row = max(1, extent.row_length) if optimizer.by_rows else 1
    master = has_master(optimizer, block.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.state_names, row, master, has_state=True, from_weight=from_weight)


def restore(block: Block, found: ReadSlice, updater: SliceUpdater | None) -> None:
    """Let a block of one slice go on from what was found. One copy of the weight."""
    if found.weight is not None:
        block.replace([found.weight])
    if updater is not None and (found.state is not None or found.is_fresh):
        updater.restore(block, found.state)
