"""A slice of an array on its way into a checkpoint and back. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.checkpoint.manifest import STATES, WEIGHTS
from kvdist.checkpoint.slices import ReadSlice, SavedSlice, WantedSlice
from kvdist.core.shard import Buffer, Shard
from kvdist.optimizer.interface import SliceUpdater
from kvdist.optimizer.states import has_master


def taken(shard: Shard, updater: SliceUpdater | None, contents: Sequence[str]) -> tuple[SavedSlice, Buffer | None]:
    """The slice as it is now: see `Keeper.taken`.

    The weight is not copied: what is published never changes, so it is leased. States change in place: one pass over
    them, two where they come from a GPU.
    """
    buffer = shard.published if WEIGHTS in contents else None
    present = None if updater is None or STATES not in contents else updater.states.get(shard.number)
    state = None if present is None else present.copy()
    if buffer is not None:  # from here on nothing fails
        buffer.leases += 1
    weight = None if buffer is None else buffer.array
    where = (shard.key, shard.extent.start, shard.count, shard.dtype, shard.version, weight)
    if updater is None or state is None:
        return SavedSlice(*where), buffer
    states = dict(zip(updater.optimizer.state_names, state.arrays, strict=True))
    return SavedSlice(*where, states, state.count, state.scalars, state.master), buffer


def wanted(shard: Shard, updater: SliceUpdater | None) -> WantedSlice:
    """What a checkpoint must have of it."""
    where = (shard.number, shard.key, shard.extent.start, shard.count, shard.dtype)
    if updater is None:
        return WantedSlice(*where)
    optimizer = updater.optimizer
    row = max(1, shard.extent.row_length) if optimizer.by_rows else 1
    master = has_master(optimizer, shard.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.state_names, row, master, has_state=True, from_weight=from_weight)


def restore(shard: Shard, found: ReadSlice, updater: SliceUpdater | None) -> None:
    """Go on from what was found. One copy of the weight."""
    if found.weight is not None:
        shard.replace(found.weight)
    if updater is not None and (found.state is not None or found.is_fresh):
        updater.restore(found.number, found.state)
