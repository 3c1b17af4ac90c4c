"""The optimizer state of a block, in the parts that messages carry (`PullState`, `ReplaceState`). Pure.

Part 0 is numbers, float64: the count of updates, then the numbers of the rule. Parts 1 and on are the arrays of
`Optimizer.kept_names`, of `DType.accumulate`, at the end the average of the weights if it is kept, and `MASTER` is the
float32 weight behind a weight in halves. `TOTALS` is beside the state: the number of examples summed in the value, and
in a pull also the number of updates where a round has pushes of all workers.
"""

from __future__ import annotations

import numpy as np

from kvdist import errors
from kvdist.core.server.block import Block
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.naming import name_of
from kvdist.optimizer.states import SliceState, is_count
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.arrays import Bits

NUMBERS, MASTER, TOTALS = 0, 255, 252
COUNTS = (NUMBERS, TOTALS)
"""Parts that are float64, whatever the values are."""


def read_part(block: Block, updater: SliceUpdater | None, part: int, kernels: Kernels) -> Bits:
    """Return a copy of a part of the state; before the first update, the state with which that begins.

    Raises:
        PushRefused: the state has no such part.
    """
    state = _state(block, updater, kernels)
    if part == NUMBERS:
        return np.array([state.count, *state.scalars], np.float64)
    return _array(block, state, part).copy()


def replace_part(block: Block, updater: SliceUpdater | None, part: int, values: Bits, kernels: Kernels) -> None:
    """Replace a part of the state. The numbers come first; a count of 0 makes the slice new.

    Raises:
        PushRefused: the state has no such part, or the part has another size or type.
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
    """Return views of the average of the weights of each slice of a block: to be copied at once."""
    state = updater.states.get(block)
    if state is None:
        assert block.published is not None
        state = SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], kernels)
    places = zip(block.pool.starts, block.counts.tolist(), strict=True)
    return [state.arrays[-1][start : start + count] for start, count in places]


def state_dtype(dtype: DType) -> DType:
    """Return the dtype of the states of elements of this dtype."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def _state(block: Block, updater: SliceUpdater | None, kernels: Kernels) -> SliceState:
    """Return a copy of the present state."""
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
