"""What an optimizer remembers of a block of one slice, in parts that travel: for `PullState` and `ReplaceState`. Pure.

Part 0 are numbers, float64: how many updates it has had, then the rule's own. Part 1 and on are the arrays of
`Optimizer.state_names`, of `DType.accumulate`, and `MASTER` is the float32 weight behind a half one.
"""

from __future__ import annotations

import numpy as np

from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Bits
from kvdist.dtypes import DType
from kvdist.errors import PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.optimizer.states import SliceState, is_count
from kvdist.optimizer.updater import SliceUpdater

NUMBERS, MASTER = 0, 255


def read(block: Block, updater: SliceUpdater | None, part: int, kernels: Kernels) -> Bits:
    """A copy of a part. Of a slice that was never updated it is what its first update would begin with.

    Raises:
        PushRefused: there is no such part.
    """
    state = _state(block, updater, kernels)
    if part == NUMBERS:
        return np.array([state.count, *state.scalars], np.float64)
    return _array(block, state, part).copy()


def replace(block: Block, updater: SliceUpdater | None, part: int, values: Bits, kernels: Kernels) -> None:
    """Take another part in place of the present one. The numbers come first; 0 updates make the slice a new one.

    Raises:
        PushRefused: there is no such part, or it has another size or type.
    """
    state = _state(block, updater, kernels)
    assert updater is not None
    expected = np.zeros(1 + len(state.scalars)) if part == NUMBERS else _array(block, state, part)
    if (values.size, values.dtype) != (expected.size, expected.dtype):
        raise PushRefused(
            f"part {part} of the optimizer's state of key {block.key!r} has {values.size} elements of {values.dtype},"
            f" where {updater.optimizer.name} keeps {expected.size} of {expected.dtype}"
        )
    if part == NUMBERS:
        count, *scalars = values.tolist()
        if not is_count(count):
            raise PushRefused(f"the optimizer's state of key {block.key!r} cannot have had {count} updates")
        state.count, state.scalars = int(count), tuple(scalars)
        updater.restore(block, state if count else None)
        return
    _array(block, state, part)[...] = values
    updater.restore(block, state)


def wide(dtype: DType) -> DType:
    """The type of the states of such an element."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def _state(block: Block, updater: SliceUpdater | None, kernels: Kernels) -> SliceState:
    """A copy of the present state."""
    if updater is None or block.published is None:
        raise PushRefused(f"key {block.key!r} has no optimizer's state: call set_optimizer before")
    state = updater.states.get(block)
    if state is not None:
        return state.copy()
    return SliceState.fresh(updater.optimizer, block.published.array, block.dtype, block.extents[0], kernels)


def _array(block: Block, state: SliceState, part: int) -> Bits:
    found = state.master if part == MASTER else state.arrays[part - 1] if part <= len(state.arrays) else None
    if found is None:
        raise PushRefused(f"the optimizer's state of key {block.key!r} has no part {part}")
    return found
