"""The optimizer state of a block, in parts that travel (`PullState`, `ReplaceState`), and slices in checkpoints. Pure.

Part 0 is numbers, float64: the count of updates, then the rule's own. Parts 1 and on are the arrays of
`Optimizer.kept_names`, of `DType.accumulate`, the last one the average of the weights if one is kept, and `MASTER` is
the float32 weight behind a half one. `TOTALS` is beside the state: of how many examples the value is made,
and in a pull also how many updates it has had where those of all workers are one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist import errors
from kvdist.checkpoint.snapshot import STATES, WEIGHTS, ReadSlice, SavedSlice, WantedSlice
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Buffer
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.optimizer.states import SliceState, has_master, is_count
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import Bits

NUMBERS, MASTER, TOTALS = 0, 255, 252
COUNTS = (NUMBERS, TOTALS)
"""Parts that are float64, whatever the values are."""


def read_part(block: Block, updater: SliceUpdater | None, part: int, kernels: Kernels) -> Bits:
    """A copy of a part of the state. Of a slice that was never updated: the state with which its first update begins.

    Raises:
        PushRefused: there is no such part.
    """
    state = _state(block, updater, kernels)
    if part == NUMBERS:
        return np.array([state.count, *state.scalars], np.float64)
    return _array(block, state, part).copy()


def replace_part(block: Block, updater: SliceUpdater | None, part: int, values: Bits, kernels: Kernels) -> None:
    """Replace a part of the state. The numbers come first; a count of 0 makes the slice a new one.

    Raises:
        PushRefused: there is no such part, or it has another size or type.
    """
    state = _state(block, updater, kernels)
    assert updater is not None
    expected = np.zeros(1 + len(state.scalars)) if part == NUMBERS else _array(block, state, part)
    if (values.size, values.dtype) != (expected.size, expected.dtype):
        raise errors.PushRefused(
            f"part {part} of the optimizer's state of {name_of(block.key)} has {values.size} elements of"
            f" {values.dtype}, where {updater.optimizer.name} keeps {expected.size} of {expected.dtype}"
        )
    if part == NUMBERS:
        count, *scalars = values.tolist()
        if not is_count(count):
            raise errors.PushRefused(f"the optimizer's state of {name_of(block.key)} cannot have had {count} updates")
        state.count, state.scalars = int(count), tuple(scalars)
        updater.restore(block, state if count else None)
        return
    _array(block, state, part)[...] = values
    updater.restore(block, state)


def is_average(block: Block, updater: SliceUpdater | None, part: int) -> bool:
    """Whether a part is the average of the weights."""
    if updater is None or updater.optimizer.average_half_life is None or not block.dtype.is_floating:
        return False
    return part == len(updater.optimizer.kept_names)


def averages(block: Block, updater: SliceUpdater, kernels: Kernels) -> list[Bits]:
    """The average of the weights of each slice of a block, where it lies: to be copied at once."""
    state = updater.states.get(block)
    if state is None:
        assert block.published is not None
        state = SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], kernels)
    places = zip(block.pool.starts, block.counts.tolist(), strict=True)
    return [state.arrays[-1][start : start + count] for start, count in places]


def begin_average(block: Block, updater: SliceUpdater | None) -> None:
    """Let the average be the present weight, which no update has made."""
    state = None if updater is None or updater.optimizer.average_half_life is None else updater.states.get(block)
    if updater is None or state is None:
        return  # what was never updated begins with the weight
    assert block.published is not None
    fresh = SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], block.kernels)
    arrays = (*state.arrays[:-1], fresh.arrays[-1])
    updater.restore(block, SliceState(state.count, arrays, state.scalars, state.master))


def state_dtype(dtype: DType) -> DType:
    """The type of the states of elements of this type."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def saved(
    block: Block, positions: Sequence[int], updater: SliceUpdater | None, contents: Sequence[str]
) -> tuple[list[SavedSlice], Buffer | None]:
    """Slices of a block as they are now: see `SnapshotSource.copies`.

    The weight is leased, not copied. States change in place: one pass over them, two where they come from a GPU.
    """
    present = None if updater is None or STATES not in contents else updater.states.get(block)
    buffer = block.published if WEIGHTS in contents else None
    found, samples = [], block.round.samples
    for position in positions:
        extent, count = block.extents[position], int(block.counts[position])
        weight = None if buffer is None else block.values(position)
        where = (block.key_of(position), extent.start, count, block.dtype, block.version, weight)
        if updater is None or present is None:
            found.append(SavedSlice(*where, samples=samples))
            continue
        own = present if len(block) == 1 else present.part(block.pool.starts[position], count)
        state = own.copy()
        states = dict(zip(updater.optimizer.kept_names, state.arrays, strict=True))
        found.append(SavedSlice(*where, states, state.count, state.scalars, state.master, samples=samples))
    if buffer is not None:  # from here on nothing fails
        buffer.leases += 1
    return found, buffer


def wanted(block: Block, position: int, updater: SliceUpdater | None) -> WantedSlice:
    """What a checkpoint must hold for a slice."""
    extent = block.extents[position]
    where = (int(block.ids[position]), block.key_of(position), extent.start, int(block.counts[position]), block.dtype)
    if updater is None:
        return WantedSlice(*where)
    optimizer = updater.optimizer
    row = max(1, extent.row_length) if optimizer.by_rows else 1
    master = has_master(optimizer, block.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.kept_names, row, master, has_state=True, from_weight=from_weight)


def load(block: Block, found: ReadSlice, updater: SliceUpdater | None) -> None:
    """Continue a block of one slice from a checkpoint. One copy of the weight."""
    has_state = found.state is not None or found.is_fresh
    if found.weight is not None:
        block.replace([found.weight])
        if not has_state:
            begin_average(block, updater)
    if updater is not None and has_state:
        updater.restore(block, found.state)
        block.round.samples = found.samples


def _state(block: Block, updater: SliceUpdater | None, kernels: Kernels) -> SliceState:
    """A copy of the present state."""
    if updater is None or block.published is None:
        raise errors.PushRefused(f"{name_of(block.key)} has no optimizer's state: call set_optimizer before")
    state = updater.states.get(block)
    if state is not None:
        return state.copy()
    return SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], kernels)


def _array(block: Block, state: SliceState, part: int) -> Bits:
    found = state.master if part == MASTER else state.arrays[part - 1] if part <= len(state.arrays) else None
    if found is None or not block.dtype.is_floating:
        raise errors.PushRefused(f"the optimizer's state of {name_of(block.key)} has no part {part}")
    return found
