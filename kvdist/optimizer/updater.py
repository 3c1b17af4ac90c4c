"""Runs an optimizer on many arrays and keeps their states: on a server for slices, in a local store for whole keys.

The rule is run chunk by chunk: a chunk's gradient, weight and states stay in the processor's cache for all passes of
the rule, so that memory is read once and written once however many passes there are. From memory a float32 update
thus reads n contributions, the weight and the states, and writes the weight and the states; over the cache it makes
max(n - 1, 1) passes for the sum (one more for a scale), one for clipping, and those counted at each rule. Halves add
one to widen the weight and one (seven for bfloat16) to round it. A backend that has the rule in one piece does all of
it in one pass, with the same bits.

An `Updater` belongs to one thread: it owns scratch memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any

import numpy as np

from kvdist.dtypes import DType, from_name
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer.base import Optimizer


@dataclass(slots=True)
class SliceState:
    """What an optimizer remembers of one slice.

    Attributes:
        count: how many updates it has had.
        arrays: one for each of `Optimizer.state_names`, of `DType.accumulate`.
    """

    count: int
    arrays: tuple[Array, ...]


@dataclass(frozen=True, slots=True)
class Part:
    """A stretch of a longer array: the `count` elements from `start` are what `index` names alone."""

    index: Hashable
    start: int
    count: int


class Updater:
    """An optimizer and the states of all slices that it has updated.

    Args:
        optimizer: the rule and its numbers.
        kernels: the backend for sums and casts.
    """

    def __init__(self, optimizer: Optimizer, kernels: Kernels = REFERENCE) -> None:
        self.optimizer = optimizer
        self._kernels = kernels
        self._states: dict[Hashable, SliceState] = {}
        self._scratch: dict[np.dtype[Any], tuple[Array, ...]] = {}

    @property
    def states(self) -> Mapping[Hashable, SliceState]:
        """The state of each index that has been updated. The arrays are live: copy what must not change."""
        return MappingProxyType(self._states)

    def update(
        self,
        index: Hashable,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        dtype: DType,
        out: Array,
        lr: float | None = None,
        wd: float | None = None,
    ) -> None:
        """Sum the contributions, apply the rule, write the new weight to `out`. On an error nothing has changed.

        Args:
            index: names the state, such as a key and the number of its slice.
            weight: the present weight, one-dimensional, of `dtype.storage`. It is only read.
            contributions: gradients of the same length and type; none at all is a gradient of zeros.
            scales: a finite factor for each contribution.
            dtype: the element type.
            out: another array like `weight`, or `weight` itself; it overlaps nothing else.
            lr: learning rate, None for the optimizer's own for a key called `index`.
            wd: weight decay, likewise.

        Raises:
            TypeError: the dtype is not a floating type, or an array has another type.
            ValueError: lengths differ, or a number is not finite.
        """
        lr = self.optimizer.lr_for(index) if lr is None else lr
        wd = self.optimizer.wd_for(index) if wd is None else wd
        self._check(index, weight, contributions, scales, dtype, out)
        if not (isfinite(lr) and isfinite(wd)):
            raise ValueError(f"{index!r} cannot be updated with learning rate {lr} and weight decay {wd}: not finite")
        state = self._state_for(index, weight.size, dtype)
        if not self._run_fused(weight, contributions, scales, out, state, lr, wd):
            scratch = self._scratch_for(dtype)
            with np.errstate(all="ignore"):  # a model that diverges shows inf and NaN, not warnings of its server
                if weight.size <= CHUNK_ELEMENTS:
                    self._run(weight, contributions, scales, dtype, out, state.arrays, scratch, lr, wd, state.count + 1)
                else:
                    self._run_in_chunks(weight, contributions, scales, dtype, out, state, scratch, lr, wd)
        state.count += 1
        self._states[index] = state

    def joinable(self, indices: Iterable[Hashable]) -> bool:
        """Whether these have had the same number of updates, so that they can go on as one."""
        states = [self._states.get(index) for index in indices]
        return len({0 if state is None else state.count for state in states}) == 1

    def join(self, index: Hashable, parts: Sequence[Part], size: int, dtype: DType) -> None:
        """Make one state, called `index`, of those of its parts; one copy. Elements of no part start as zeros.

        Args:
            index: names the longer array.
            parts: where the arrays with a state of their own lie in it; they must be `joinable`.
            size: its elements.
            dtype: its element type.
        """
        states = [(part, self._states.pop(part.index, None)) for part in parts]
        arrays = tuple(np.zeros(size, dtype.accumulate) for _ in self.optimizer.state_names)
        count = 0
        for part, state in states:
            if state is None:
                continue
            count = state.count
            for array, own in zip(arrays, state.arrays, strict=True):
                array[part.start : part.start + part.count] = own
        if count:
            self._states[index] = SliceState(count, arrays)

    def split(self, index: Hashable, parts: Sequence[Part]) -> None:
        """Give each part its stretch of the state called `index`: the opposite of `join`, without a copy."""
        state = self._states.pop(index, None)
        if state is None:
            return
        for part in parts:
            stretches = tuple(array[part.start : part.start + part.count] for array in state.arrays)
            self._states[part.index] = SliceState(state.count, stretches)

    def __call__(self, index: Hashable, grad: Array, weight: Array) -> None:
        """Update a local weight in place, as MXNet's updaters do.

        Args:
            index: the key; its learning rate and weight decay are the optimizer's.
            grad: the gradient, of the shape and type of `weight`; multiplied by the optimizer's `rescale_grad`.
            weight: a NumPy array of a floating type and any shape; written.

        Raises:
            TypeError: the types differ or are no floating type.
            ValueError: the shapes differ.
        """
        dtype = from_name(weight.dtype.name)
        if grad.shape != weight.shape:
            raise ValueError(f"key {index!r}: the gradient has shape {grad.shape}, the weight {weight.shape}")
        if grad.dtype != weight.dtype:
            raise TypeError(f"key {index!r}: the gradient is {grad.dtype}, the weight {weight.dtype}: cast one of them")
        flat = np.ascontiguousarray(weight).reshape(-1)
        flat_grad = np.ascontiguousarray(grad).reshape(-1)
        self.update(index, flat, [flat_grad], [self.optimizer.rescale_grad], dtype, flat)
        if not weight.flags.c_contiguous:  # then `flat` is a copy
            np.copyto(weight, flat.reshape(weight.shape))

    def _check(
        self,
        index: Hashable,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        dtype: DType,
        out: Array,
    ) -> None:
        if not dtype.is_floating:
            raise TypeError(
                f"{index!r} is of {dtype.label}: optimizers update floating types only; "
                "use a floating-point key, or no optimizer"
            )
        storage, size = dtype.storage, weight.size
        if weight.dtype != storage or out.dtype != storage:
            raise TypeError(f"{index!r}: weights of {dtype.label} are {storage}, not {weight.dtype} and {out.dtype}")
        if out.size != size:
            raise ValueError(f"{index!r}: the weight has {size} elements, the array for the new one {out.size}")
        if len(contributions) != len(scales) or not all(map(isfinite, scales)):
            raise ValueError(f"{index!r}: {len(contributions)} contributions need as many finite scales, not {scales}")
        for contribution in contributions:
            if contribution.dtype != storage:
                raise TypeError(f"{index!r}: gradients of {dtype.label} are {storage}, not {contribution.dtype}")
            if contribution.size != size:
                raise ValueError(f"{index!r}: a gradient has {contribution.size} elements, the weight {size}")

    def _state_for(self, index: Hashable, size: int, dtype: DType) -> SliceState:
        state = self._states.get(index)
        if state is None:
            names = self.optimizer.state_names
            return SliceState(0, tuple(np.zeros(size, dtype.accumulate) for _ in names))
        for array in state.arrays:
            if array.size != size or array.dtype != dtype.accumulate:
                raise ValueError(
                    f"{index!r} had {array.size} elements of {array.dtype} at its last update, "
                    f"now {size} of {dtype.accumulate}: give another array another index"
                )
        return state

    def _scratch_for(self, dtype: DType) -> tuple[Array, ...]:
        """Three arrays of a chunk: the gradient, the rule's own, and for halves the weight."""
        accumulate = dtype.accumulate
        scratch = self._scratch.get(accumulate)
        if scratch is None:
            scratch = tuple(np.empty(CHUNK_ELEMENTS, accumulate) for _ in range(3))
            self._scratch[accumulate] = scratch
        return scratch

    def _run_fused(
        self,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        out: Array,
        state: SliceState,
        lr: float,
        wd: float,
    ) -> bool:
        """Let the backend do all in one pass, if it can."""
        optimizer = self.optimizer
        equation = optimizer.equation(lr, wd, state.count + 1)
        return equation is not None and self._kernels.fused_update(
            equation, weight, contributions, scales, optimizer.clip_gradient, out, state.arrays
        )

    def _run_in_chunks(
        self,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        dtype: DType,
        out: Array,
        state: SliceState,
        scratch: tuple[Array, ...],
        lr: float,
        wd: float,
    ) -> None:
        for start in range(0, weight.size, CHUNK_ELEMENTS):
            part = slice(start, start + CHUNK_ELEMENTS)
            parts = [contribution[part] for contribution in contributions]
            arrays = tuple(array[part] for array in state.arrays)
            self._run(weight[part], parts, scales, dtype, out[part], arrays, scratch, lr, wd, state.count + 1)

    def _run(
        self,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        dtype: DType,
        out: Array,
        arrays: tuple[Array, ...],
        scratch: tuple[Array, ...],
        lr: float,
        wd: float,
        count: int,
    ) -> None:
        """Update one chunk."""
        kernels, optimizer, size = self._kernels, self.optimizer, weight.size
        grad, temporary = scratch[0][:size], scratch[1][:size]
        kernels.weighted_sum(contributions, scales, dtype, grad)
        if optimizer.clip_gradient is not None:
            grad.clip(-optimizer.clip_gradient, optimizer.clip_gradient, out=grad)
        if grad.dtype == out.dtype:
            optimizer.apply(weight, grad, out, arrays, temporary, lr, wd, count)
            return
        wide = kernels.to_float32(weight, dtype, scratch[2][:size])
        optimizer.apply(wide, grad, wide, arrays, temporary, lr, wd, count)
        kernels.from_float32(wide, dtype, out)
