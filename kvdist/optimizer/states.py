"""State of an optimizer for each slice, and how states of neighbouring slices are joined and split."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Kernels
from kvdist.optimizer.base import Extent, Optimizer


@dataclass(slots=True)
class SliceState:
    """State of an optimizer for a slice; a checkpoint needs all of it in addition to the weights.

    Attributes:
        count: number of updates so far.
        arrays: arrays in the order of `Optimizer.state_names`, of dtype `DType.accumulate`.
        scalars: scalars in the order of `Optimizer.initial_scalars`.
        master: float32 weight behind a half-precision weight, with `multi_precision`; otherwise None.
    """

    count: int
    arrays: tuple[Array, ...]
    scalars: tuple[float, ...] = ()
    master: Array | None = None

    @classmethod
    def fresh(cls, optimizer: Optimizer, weight: Array, dtype: DType, extent: Extent, kernels: Kernels) -> SliceState:
        """Create the state before the first update."""
        size = state_size(optimizer, weight.size, extent)
        arrays = tuple(
            _widened(weight, dtype, kernels)
            if name in optimizer.states_from_weight
            else kernels.zeros(size, dtype.accumulate)
            for name in optimizer.state_names
        )
        master = _widened(weight, dtype, kernels) if has_master(optimizer, dtype) else None
        return cls(0, arrays, tuple(optimizer.initial_scalars.values()), master)

    @property
    def history(self) -> tuple[object, ...]:
        """Values that must be equal in neighbouring slices before their states can be joined."""
        return self.count, self.scalars

    def copy(self) -> SliceState:
        """Return a copy that shares no memory."""
        master = None if self.master is None else self.master.copy()
        return SliceState(self.count, tuple(array.copy() for array in self.arrays), self.scalars, master)

    def part(self, start: int, count: int) -> SliceState:
        """Return a view of the state of `count` elements from `start`. Not for rules `by_rows`."""
        stretch = slice(start, start + count)
        master = None if self.master is None else self.master[stretch]
        return SliceState(self.count, tuple(array[stretch] for array in self.arrays), self.scalars, master)


def is_count(number: float) -> bool:
    """Whether a number from outside can count updates; floats are exact up to the limit."""
    return 0 <= number <= 1 << 53 and number == int(number)


def digest(states: Sequence[SliceState | None]) -> str:
    """A short text that is equal for equal states; empty if all were never updated."""
    found = hashlib.blake2b(digest_size=8)
    for position, state in enumerate(states):
        if state is not None:
            found.update(repr((position, state.count, state.scalars)).encode())
            for array in (*state.arrays, *(() if state.master is None else (state.master,))):
                found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return "" if all(state is None for state in states) else found.hexdigest()


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a longer array: the `count` elements from `start` are what `index` names alone."""

    index: Hashable
    start: int
    count: int


def state_size(optimizer: Optimizer, size: int, extent: Extent) -> int:
    """Elements of each state array of a slice of `size` elements."""
    return size // max(1, extent.row_length) if optimizer.by_rows else size


def has_master(optimizer: Optimizer, dtype: DType) -> bool:
    """Whether a float32 weight is kept beside the stored weight."""
    return optimizer.multi_precision and dtype.storage != dtype.accumulate


def joined(states: Sequence[tuple[Part, SliceState]], size: int, dtype: DType, kernels: Kernels) -> SliceState | None:
    """Join the states of parts with equal history into a state of `size` elements, by a single copy; gaps are zeros."""
    if not states:
        return None
    first = states[0][1]
    arrays = tuple(kernels.zeros(size, dtype.accumulate) for _ in first.arrays)
    master = None if first.master is None else kernels.zeros(size, dtype.accumulate)
    whole = SliceState(first.count, arrays, first.scalars, master)
    for part, state in states:
        target = whole.part(part.start, part.count)
        for array, own in zip(target.arrays, state.arrays, strict=True):
            array[...] = own
        if target.master is not None and state.master is not None:
            target.master[...] = state.master
    return whole


def _widened(weight: Array, dtype: DType, kernels: Kernels) -> Array:
    """A copy of the weight in the type of sums."""
    return weight.copy() if dtype.storage == dtype.accumulate else kernels.to_float32(weight, dtype)
