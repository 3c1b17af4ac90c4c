"""What an optimizer remembers of one slice, in parts that travel: for `PullState` and `ReplaceState`. Pure.

Part 0 are numbers, float64: how many updates it has had, then the rule's own. Part 1 and on are the arrays of
`Optimizer.state_names`, of `DType.accumulate`, and `MASTER` is the float32 weight behind a half one.
"""

from __future__ import annotations

import numpy as np

from kvdist.core.shard import Bits, Shard
from kvdist.dtypes import DType
from kvdist.errors import PushRefused
from kvdist.kernels.interface import Kernels
from kvdist.optimizer.interface import SliceUpdater
from kvdist.optimizer.states import SliceState, is_count

NUMBERS, MASTER = 0, 255


def read(shard: Shard, updater: SliceUpdater | None, part: int, kernels: Kernels) -> Bits:
    """A copy of a part. Of a slice that was never updated it is what its first update would begin with.

    Raises:
        PushRefused: there is no such part.
    """
    state = _state(shard, updater, kernels)
    if part == NUMBERS:
        return np.array([state.count, *state.scalars], np.float64)
    return _array(shard, state, part).copy()


def replace(shard: Shard, updater: SliceUpdater | None, part: int, values: Bits, kernels: Kernels) -> None:
    """Take another part in place of the present one. The numbers come first; 0 updates make the slice a new one.

    Raises:
        PushRefused: there is no such part, or it has another size or type.
    """
    state = _state(shard, updater, kernels)
    assert updater is not None
    expected = np.zeros(1 + len(state.scalars)) if part == NUMBERS else _array(shard, state, part)
    if (values.size, values.dtype) != (expected.size, expected.dtype):
        raise PushRefused(
            f"part {part} of the optimizer's state of key {shard.key!r} has {values.size} elements of {values.dtype},"
            f" where {updater.optimizer.name} keeps {expected.size} of {expected.dtype}"
        )
    if part == NUMBERS:
        count, *scalars = values.tolist()
        if not is_count(count):
            raise PushRefused(f"the optimizer's state of key {shard.key!r} cannot have had {count} updates")
        state.count, state.scalars = int(count), tuple(scalars)
        updater.restore(shard.number, state if count else None)
        return
    _array(shard, state, part)[...] = values
    updater.restore(shard.number, state)


def wide(dtype: DType) -> DType:
    """The type of the states of such an element."""
    return DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32


def _state(shard: Shard, updater: SliceUpdater | None, kernels: Kernels) -> SliceState:
    """A copy of the present state."""
    if updater is None or shard.published is None:
        raise PushRefused(f"key {shard.key!r} has no optimizer's state: call set_optimizer before")
    state = updater.states.get(shard.number)
    if state is not None:
        return state.copy()
    return SliceState.fresh(updater.optimizer, shard.published.array, shard.dtype, shard.extent, kernels)


def _array(shard: Shard, state: SliceState, part: int) -> Bits:
    found = state.master if part == MASTER else state.arrays[part - 1] if part <= len(state.arrays) else None
    if found is None:
        raise PushRefused(f"the optimizer's state of key {shard.key!r} has no part {part}")
    return found
