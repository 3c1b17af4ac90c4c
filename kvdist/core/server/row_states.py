"""What an optimizer remembers of the rows of one block: the states of `SliceState`, in memory that grows with the rows.

All rows share one count of updates, as in MXNet: a row that is first touched late starts with the count of its block.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvdist.core.server.row_memory import GrowingRows, Where, put, take
from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Kernels
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState, has_master
from kvdist.optimizer.updater import Updater


@dataclass(slots=True)
class Kept:
    """One array that is kept for the rows. `from_weight`: it starts as a copy of the weight, else as zeros."""

    memory: GrowingRows
    from_weight: bool


class RowStates:
    """The states of rows by slot, and the updater that moves them on.

    Args:
        dtype: the element type of the weights.
        row_length: elements of a row.
        kernels: the backend for sums and casts.
    """

    def __init__(self, dtype: DType, row_length: int, kernels: Kernels) -> None:
        self._dtype = dtype
        self._row_length = row_length
        self._kernels = kernels
        self.forget()

    def forget(self) -> None:
        """As if nothing had ever been updated."""
        self.count = 0
        self.scalars: tuple[float, ...] = ()
        self.updater: Updater | None = None
        self._kept: list[Kept] = []
        """Those with names, in their order; then the master, if there is one."""
        self._has_master = False

    @property
    def row_nbytes(self) -> int:
        """Bytes that are kept for each row."""
        return sum(kept.memory.row_nbytes for kept in self._kept)

    @property
    def widths(self) -> list[int]:
        """Elements of a row of each array that is kept."""
        return [kept.memory.rows.shape[1] for kept in self._kept]

    def serve(self, optimizer: Optimizer, weight: GrowingRows, count: int, exactly: bool) -> Updater:
        """The updater of this optimizer, with states for the first `count` rows. Another rule begins anew.

        Args:
            optimizer: the rule.
            weight: the weights, for what starts from them.
            count: how many rows there are.
            exactly: whether there will never be more.
        """
        if self.updater is not None and self.updater.optimizer is optimizer:
            return self.updater
        if self.updater is None or self.updater.optimizer.rule() != optimizer.rule():
            self.forget()
            self.scalars = tuple(optimizer.initial_scalars.values())
            self._kept = self._new(optimizer)
            for kept in self._kept:
                kept.memory.reserve(count, exactly)
            self._begin(slice(0, count), weight)
        self.updater = Updater(optimizer, self._kernels)
        return self.updater

    def create(self, start: int, stop: int, weight: GrowingRows) -> None:
        """Have states for the rows from `start` to `stop`, which have come into being with these weights."""
        for kept in self._kept:
            kept.memory.reserve(stop)
        self._begin(slice(start, stop), weight)

    def restore(self, state: SliceState, where: Where) -> None:
        """Go on from this state of these rows, of the optimizer that is served.

        Raises:
            ValueError: it is another optimizer's; nothing has changed.
        """
        arrays = [*state.arrays, *([] if state.master is None else [state.master])]
        if len(arrays) != len(self._kept) or (state.master is not None) is not self._has_master:
            raise ValueError(
                f"there are {len(state.arrays)} arrays {'with' if state.master is not None else 'without'} a master,"
                f" where {len(self._kept) - self._has_master} {'with' if self._has_master else 'without'} one are kept"
            )
        self.count, self.scalars = state.count, state.scalars
        for kept, array in zip(self._kept, arrays, strict=True):
            width = kept.memory.rows.shape[1]
            if width:
                put(kept.memory.rows, where, array.reshape(-1, width))

    def copy(self, where: Where) -> SliceState | None:
        """The state of these rows; None: there is none."""
        if self.updater is None:
            return None
        rows = [kept.memory.rows[where] for kept in self._kept]
        return self._state([(one.copy() if isinstance(where, slice) else one).reshape(-1) for one in rows])

    def shown(self, where: slice) -> SliceState:
        """The state of a stretch of rows, in place."""
        return self._state([kept.memory.rows[where].reshape(-1) for kept in self._kept])

    def taken(self, where: Where, scratch: list[Array]) -> SliceState:
        """The state of rows, gathered into scratch memory: one matrix for each array that is kept."""
        for kept, rows in zip(self._kept, scratch, strict=True):
            take(kept.memory.rows, where, rows)
        return self._state([rows.reshape(-1) for rows in scratch])

    def put(self, where: Where, scratch: list[Array]) -> None:
        """Bring back what `taken` gathered."""
        for kept, rows in zip(self._kept, scratch, strict=True):
            put(kept.memory.rows, where, rows)

    def _state(self, arrays: list[Array]) -> SliceState:
        master = arrays.pop() if self._has_master else None
        return SliceState(self.count, tuple(arrays), self.scalars, master)

    def _new(self, optimizer: Optimizer) -> list[Kept]:
        width = 1 if optimizer.by_rows else self._row_length
        wide = self._dtype.accumulate
        kept = [Kept(GrowingRows(width, wide), name in optimizer.states_from_weight) for name in optimizer.state_names]
        self._has_master = has_master(optimizer, self._dtype)
        if self._has_master:
            kept.append(Kept(GrowingRows(self._row_length, wide), True))
        return kept

    def _begin(self, rows: slice, weight: GrowingRows) -> None:
        """Give rows their first states. Fresh memory is zeros already."""
        step = max(1, CHUNK_ELEMENTS // max(1, self._row_length))
        for kept in self._kept:
            for start in range(rows.start, rows.stop, step) if kept.from_weight else ():
                part = slice(start, min(start + step, rows.stop))
                self._widen(weight.rows[part], kept.memory.rows[part])

    def _widen(self, weight: Array, out: Array) -> None:
        if self._dtype.storage == self._dtype.accumulate:
            out[...] = weight
        else:
            self._kernels.to_float32(weight.reshape(-1), self._dtype, out.reshape(-1))
