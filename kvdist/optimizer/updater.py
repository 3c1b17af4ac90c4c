"""Runs an optimizer on many arrays and keeps their states: on a server for slices, in a local store for whole keys.

The rule is run chunk by chunk: a chunk's gradient, weight and states stay in the processor's cache for all passes of
the rule, so that memory is read once and written once for any number of passes. From memory a float32 update thus
reads n contributions, the weight and the states, and writes the weight and the states; over the cache it makes max(n -
1, 1) passes for the sum (one more for a scale), a pass for clipping, and a pass for each operation of the rule. Halves
add a pass to widen the weight and a pass (seven for bfloat16) to round it; with a float32 master as many again, and
two to compare, because the master follows a weight that was changed otherwise. A backend that has compiled the rule
does all of it in a single pass, with the same bits; for halves, all float32 arithmetic.

A rule with norms reads everything once more for each of its turns: first all pieces of the parameter are measured,
then all are updated. Squares are summed in float64, so how a parameter is cut shows in the last bits at most.

An `Updater` belongs to a single thread: it owns scratch memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from kvdist.dtypes import DType, from_name
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Equation, Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.naming import name_of
from kvdist.optimizer.base import Extent, Optimizer, Piece, States, Step, apply_equation, formula_of
from kvdist.optimizer.states import Part, SliceState, joined, state_size


class SliceUpdater(Protocol):
    """An optimizer and the states of all slices that it has updated. For a single thread."""

    @property
    def optimizer(self) -> Optimizer:
        """The rule and its numbers."""

    @property
    def states(self) -> Mapping[Hashable, SliceState]:
        """The state of each index that has been updated. The arrays may be live: copy what must not change."""

    def update_together(
        self,
        pieces: Sequence[Piece],
        dtype: DType,
        lr: float | None = None,
        wd: float | None = None,
        pusher: int | None = None,
    ) -> None:
        """Update an array, or all arrays of a parameter for a rule that needs norms of the whole: of each, sum the
        contributions, apply the rule, write the new weight to `out`. On an error nothing has changed.

        Args:
            pieces: in the order of their elements.
            dtype: the element type.
            lr: `Optimizer.pushed_lr` of the process that computed the gradient; None for that of this optimizer for the
                key `Piece.index`.
            wd: weight decay, likewise.
            pusher: as of `Step`.

        Raises:
            TypeError: the dtype is not a floating type, or an array has another type.
            ValueError: lengths differ, a number is not finite, or the rule needs more than these arrays.
        """

    def restore(self, index: Hashable, state: SliceState | None) -> None:
        """Go on from this state, which is the updater's from now on. It fits the array called `index`.

        None: as if it had never been updated.
        """

    def joinable(self, indices: Iterable[Hashable]) -> bool:
        """Whether these have had the same history, so that they can be joined."""

    def join(self, index: Hashable, parts: Sequence[Part], size: int, dtype: DType) -> None:
        """Join the states of `parts` into a state called `index`, by a single copy. Elements of no part start as zeros.

        Args:
            index: names the longer array.
            parts: places of the arrays that have a state; they must be `joinable`.
            size: its elements.
            dtype: its element type.
        """

    def split(self, index: Hashable, parts: Sequence[Part]) -> None:
        """Give each part its stretch of the state called `index`: the opposite of `join`, without a copy."""


@dataclass(frozen=True)
class Arithmetic:
    """What computes for the slices of a server.

    Attributes:
        kernels: sum, decode and cast.
        new_updater: what updates the slices of a store with an optimizer. It raises `DeviceError` where that optimizer
            cannot run.
    """

    kernels: Kernels
    new_updater: Callable[[Optimizer], SliceUpdater]


@dataclass(slots=True, eq=False)
class _PieceUpdate:
    """Update of a piece, with its state and the numbers of the update."""

    piece: Piece
    state: SliceState
    step: Step


_Chunk = tuple[Array, Array, Array, tuple[Array, ...], Array, Step]
"""Weight, gradient, out, states, scratch, step: what a rule gets at a time. `out` is of `DType.storage`, the weight as
wide as the gradient."""


class Updater:
    """Optimizer together with the states of all slices that it has updated.

    Args:
        optimizer: the rule and its hyper-parameters.
        kernels: backend for sums and casts.
    """

    def __init__(self, optimizer: Optimizer, kernels: Kernels = REFERENCE) -> None:
        self.optimizer = optimizer
        self._kernels = kernels
        self._states: dict[Hashable, SliceState] = {}
        self._scratch: dict[np.dtype[Any], tuple[Array, ...]] = {}

    @property
    def states(self) -> Mapping[Hashable, SliceState]:
        """States by index. The arrays are live: copy what must not change."""
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
        extent: Extent | None = None,
    ) -> None:
        """Update an array; see `update_together` and `Piece`.

        Args:
            index, weight, contributions, scales, out: as in `Piece`.
            dtype, lr, wd: as in `update_together`.
            extent: as in `Piece`; None for a whole one-dimensional parameter named `index`.

        Raises:
            TypeError, ValueError: as in `update_together`.
        """
        extent = Extent(index, (weight.size,)) if extent is None else extent
        self.update_together([Piece(index, weight, contributions, scales, out, extent)], dtype, lr, wd)

    def update_together(
        self,
        pieces: Sequence[Piece],
        dtype: DType,
        lr: float | None = None,
        wd: float | None = None,
        pusher: int | None = None,
    ) -> None:
        """See `SliceUpdater`."""
        lr, wd = self._rates(pieces[0].index, lr, wd)
        if self.optimizer.norm_count or self.optimizer.by_rows:
            self._check_extents(pieces)
        updates = [self._begin(piece, dtype, lr, wd, pusher) for piece in pieces]
        if self.optimizer.norm_count:
            norms = self._norms(updates, dtype)
            updates = [_PieceUpdate(one.piece, one.state, one.step.knowing(norms)) for one in updates]
        for one in updates:
            self._apply(one, dtype)

    def equation(self, index: Hashable, count: int, lr: float | None, wd: float | None) -> Equation | None:
        """Return the formula of update number `count`, from 1, of the array `index`; see `Optimizer.equation`."""
        lr, wd = self._rates(index, lr, wd)
        return self.optimizer.equation(self.optimizer.lr_at(lr, count), wd, count)

    def state_of(self, index: Hashable) -> SliceState | None:
        """State of an index; None if it was never updated. Its arrays are live: copy what must not change."""
        return self._states.get(index)

    def restore(self, index: Hashable, state: SliceState | None) -> None:
        """Set the state of an index, which the updater then owns; None removes it. See `SliceUpdater`."""
        self._states.pop(index, None)
        if state is not None:
            self._states[index] = state

    def joinable(self, indices: Iterable[Hashable]) -> bool:
        """Whether the states of these indices can be joined; see `SliceUpdater`."""
        states = [self._states.get(index) for index in indices]
        histories = {(0, None) if state is None else state.history for state in states}
        return self.optimizer.is_elementwise and len(histories) == 1

    def join(self, index: Hashable, parts: Sequence[Part], size: int, dtype: DType) -> None:
        """Join the states of `parts` into a single state, which copies them once; see `SliceUpdater`."""
        present = [(part, state) for part in parts if (state := self._states.get(part.index)) is not None]
        with self._kernels.active():
            whole = joined(present, size, dtype, self._kernels)
        for part, _ in present:
            del self._states[part.index]
        if whole is not None:
            self._states[index] = whole

    def split(self, index: Hashable, parts: Sequence[Part]) -> None:
        """Split a state into views for `parts`, without copying; see `SliceUpdater`."""
        state = self._states.pop(index, None)
        if state is not None:
            self._states.update((part.index, state.part(part.start, part.count)) for part in parts)

    def __call__(self, index: Hashable, grad: Array, weight: Array) -> None:
        """Update a local weight in place, as MXNet's updaters do.

        Args:
            index: the key; its learning rate and weight decay are the optimizer's.
            grad: the gradient, of the shape and type of `weight`; multiplied by the optimizer's `rescale_grad`.
            weight: a NumPy array of a floating type and any shape; written.

        Raises:
            TypeError: the types differ, or are not floating types; or the weight is no array, such as a list.
            ValueError: the shapes differ.
        """
        if not hasattr(weight, "dtype"):
            raise TypeError(
                "an Updater takes one key with its gradient and its weight, both arrays: call it once for each key"
            )
        dtype = from_name(weight.dtype.name)
        if grad.shape != weight.shape:
            raise ValueError(f"{name_of(index)}: the gradient has shape {grad.shape}, the weight {weight.shape}")
        if grad.dtype != weight.dtype:
            raise TypeError(
                f"{name_of(index)}: the gradient is {grad.dtype}, the weight {weight.dtype}: cast one of them"
            )
        flat = np.ascontiguousarray(weight).reshape(-1)
        flat_grad = np.ascontiguousarray(grad).reshape(-1)
        extent = Extent(index, weight.shape)
        self.update(index, flat, [flat_grad], [self.optimizer.rescale_grad], dtype, flat, extent=extent)
        if not weight.flags.c_contiguous:  # then `flat` is a copy
            np.copyto(weight, flat.reshape(weight.shape))

    def _rates(self, index: Hashable, lr: float | None, wd: float | None) -> tuple[float, float]:
        """What the push said, or what the optimizer says."""
        if lr is None:
            lr = self.optimizer.pushed_lr(index)
        if wd is None:
            wd = self.optimizer.wd_for(index)
        if not (isfinite(lr) and isfinite(wd)):
            raise ValueError(f"{index!r} cannot be updated with learning rate {lr} and weight decay {wd}: not finite")
        return lr, wd

    def _check_extents(self, pieces: Sequence[Piece]) -> None:
        """Whether the rule sees as much of the parameter as it needs."""
        optimizer, extent = self.optimizer, pieces[0].extent
        if optimizer.needs_norms:
            ends = [piece.extent.start + piece.weight.size for piece in pieces]
            if [piece.extent.start for piece in pieces] + [extent.size] != [0, *ends]:
                raise ValueError(
                    f"{optimizer.name} needs the norm of the whole parameter {extent.key!r}, which lies on several"
                    " servers: call set_optimizer before init, so that its parameters are not cut"
                )
        if optimizer.by_rows:
            row = max(1, extent.row_length)
            if any(piece.extent.start % row or piece.weight.size % row for piece in pieces):
                raise ValueError(
                    f"{optimizer.name} needs whole rows of the parameter {extent.key!r}, which is cut elsewhere:"
                    " call set_optimizer before init, so that it is cut between rows"
                )

    def _begin(self, piece: Piece, dtype: DType, lr: float, wd: float, pusher: int | None) -> _PieceUpdate:
        """A piece with its state, which is not kept yet, and the numbers of this update; refused if it cannot be."""
        check_arrays(piece, dtype)
        optimizer = self.optimizer
        state = self._states.get(piece.index)
        if state is None:
            with self._kernels.active():
                state = SliceState.fresh(optimizer, piece.weight, dtype, piece.extent, self._kernels)
        else:
            self._check_state(piece, state, dtype)
        count = state.count + 1
        rate = optimizer.lr_at(lr, count)
        optimizer.check_update(rate, wd, piece.extent)
        scalars = optimizer.for_key(piece.extent.key).advance(state.scalars, count) if state.scalars else ()
        step = Step(rate, wd, count, piece.extent, piece.extent.start, scalars, pusher=pusher)
        return _PieceUpdate(piece, state, step)

    def _check_state(self, piece: Piece, state: SliceState, dtype: DType) -> None:
        if not state.arrays:
            return
        expected = state_size(self.optimizer, piece.weight.size, piece.extent)
        for array in state.arrays:
            if array.size != expected or array.dtype != dtype.accumulate:
                raise ValueError(
                    f"{piece.index!r} had {array.size} elements of {array.dtype} at its last update, "
                    f"now {expected} of {dtype.accumulate}: give another array another index"
                )

    def _scratch_for(self, dtype: DType, length: int) -> tuple[Array, ...]:
        """Three arrays of a chunk: the gradient, scratch memory of the rule, and for halves the weight."""
        accumulate = dtype.accumulate
        scratch = self._scratch.get(accumulate)
        if scratch is None or scratch[0].size < length:
            scratch = tuple(self._kernels.empty(max(length, CHUNK_ELEMENTS), accumulate) for _ in range(3))
            self._scratch[accumulate] = scratch
        return scratch

    def _apply(self, update: _PieceUpdate, dtype: DType) -> None:
        """Update a piece, then keep its state and the number of the update."""
        if update.piece.weight.size:  # without elements there are no norms
            equation = formula_of(self.optimizer, update.step)
            if not self._update_fused(update, equation, dtype):
                self._update_chunks(update, equation, dtype)
        state, step = update.state, update.step
        state.count, state.scalars = step.count, step.scalars
        self._states[update.piece.index] = state

    def _update_fused(self, update: _PieceUpdate, equation: Equation | None, dtype: DType) -> bool:
        """Let the backend do all in a single pass, if it can."""
        piece, state = update.piece, update.state
        return equation is not None and self._kernels.fused_update(
            equation,
            piece.weight,
            piece.contributions,
            piece.scales,
            summed_clip(self.optimizer),
            piece.out,
            equation.chosen(state.arrays),
            dtype,
            state.master,
        )

    def _norms(self, updates: Sequence[_PieceUpdate], dtype: DType) -> tuple[float, ...]:
        """What `measure` asks for, over all pieces of the parameter."""
        measure = self.optimizer.measure
        norms: tuple[float, ...] = ()
        for turn in range(self.optimizer.norm_count):
            updates = [_PieceUpdate(one.piece, one.state, one.step.knowing(norms)) for one in updates]
            sums: list[tuple[float, ...]] = []
            with self._kernels.active(), np.errstate(all="ignore"):
                for update in updates:
                    for weight, grad, _, arrays, scratch, step in self._chunks(update, dtype):
                        measured = measure(turn, weight, grad, arrays, scratch, step)
                        sums.append(tuple([self._kernels.squares(array) for array in measured]))
            norms += tuple(math.sqrt(sum(column)) for column in zip(*sums, strict=True))
        return norms

    def _update_chunks(self, update: _PieceUpdate, equation: Equation | None, dtype: DType) -> None:
        """Update a piece chunk by chunk."""
        rule = self.optimizer
        if type(rule).apply is not Optimizer.apply:
            equation = None
        # A model that diverges shows inf and NaN, not warnings of its server.
        with self._kernels.active(), np.errstate(all="ignore"):
            for weight, grad, out, arrays, scratch, step in self._chunks(update, dtype):
                target = out if weight.dtype == out.dtype else weight
                if equation is None:
                    rule.apply(weight, grad, target, arrays, scratch, step)
                elif target is out or not self._fused_chunk(equation, weight, grad, target, arrays):
                    apply_equation(equation, weight, grad, target, arrays, scratch)
                if target is not out:
                    self._kernels.from_float32(weight, dtype, out)

    def _fused_chunk(self, equation: Equation, weight: Array, grad: Array, out: Array, states: States) -> bool:
        """Let the backend update a chunk of halves, widened and with its gradient summed, in a pass if it can."""
        chosen = equation.chosen(states)
        return self._kernels.fused_update(equation, weight, [grad], (1.0,), None, out, chosen, DType.FLOAT32)

    def _chunks(self, update: _PieceUpdate, dtype: DType) -> Iterator[_Chunk]:
        """The piece in parts that fit into the cache, each with its gradient, summed and clipped."""
        piece, state, step = update.piece, update.state, update.step
        weight, contributions, scales, out = piece.weight, piece.contributions, piece.scales, piece.out
        row = max(1, piece.extent.row_length) if self.optimizer.by_rows else 1
        length = max(1, self._kernels.chunk_elements // row) * row
        size = weight.size
        scratch = self._scratch_for(dtype, min(length, size))
        if 0 < size <= length and weight.dtype == dtype.accumulate:  # the usual case of short ones
            grad = self._gradient(contributions, scales, dtype, scratch[0][:size])
            yield weight, grad, out, state.arrays, scratch[1][:size], step
            return
        for start in range(0, size, length):
            count = min(length, size - start)
            part = slice(start, start + count)
            grad = self._gradient([each[part] for each in contributions], scales, dtype, scratch[0][:count])
            rows = slice(start // row, (start + count) // row)
            yield (
                self._wide(weight[part], state.master, part, dtype, scratch),
                grad,
                out[part],
                tuple([array[rows] for array in state.arrays]),
                scratch[1][:count],
                step.moved(start) if start else step,
            )

    def _gradient(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, grad: Array) -> Array:
        self._kernels.weighted_sum(contributions, scales, dtype, grad)
        clip = summed_clip(self.optimizer)
        if clip is not None:
            grad.clip(-clip, clip, out=grad)
        return grad

    def _wide(
        self, weight: Array, master: Array | None, part: slice, dtype: DType, scratch: tuple[Array, ...]
    ) -> Array:
        """The weight in the type of sums: itself, or its master, or a widened copy."""
        if dtype.storage == dtype.accumulate:
            return weight
        wide = self._kernels.to_float32(weight, dtype, scratch[2][: weight.size])
        if master is None:
            return wide
        own = master[part]
        # Loaded or broadcast weights, say: where the stored bits are not the master's, they are newer.
        changed = self._kernels.from_float32(own, dtype).view(np.uint16) != weight.view(np.uint16)
        if changed.any():
            np.copyto(own, wide, where=changed)
        return own


def summed_clip(optimizer: Optimizer) -> float | None:
    """Limit of the elements of the summed gradient before the rule; None for no clipping, or if the rule clips."""
    return None if optimizer.clips_itself else optimizer.clip_gradient


def check_arrays(piece: Piece, dtype: DType) -> None:
    """Refuse arrays and scales that do not fit each other.

    Raises:
        TypeError, ValueError: as of `SliceUpdater.update_together`.
    """
    index, weight, scales, out = piece.index, piece.weight, piece.scales, piece.out
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
    if len(piece.contributions) != len(scales) or not all(map(isfinite, scales)):
        count = len(piece.contributions)
        raise ValueError(f"{index!r}: {count} contributions need as many finite scales, not {scales}")
    for contribution in piece.contributions:
        if contribution.dtype != storage:
            raise TypeError(f"{index!r}: gradients of {dtype.label} are {storage}, not {contribution.dtype}")
        if contribution.size != size:
            raise ValueError(f"{index!r}: a gradient has {contribution.size} elements, the weight {size}")
