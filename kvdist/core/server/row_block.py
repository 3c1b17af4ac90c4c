"""The rows of a table that one server has: their values, what an optimizer remembers of them, and one round's update.

Rules that hold here:

* Values are updated where they lie: nothing here is as large as the block, and what is handed out is a copy.
* A round changes all of its rows or, on an error, nothing.
* The arithmetic is `Updater`'s, so a row gets the bits that it would get in a dense parameter.

The block is *eager*, with memory for all its rows, or *lazy*: then a row takes memory once it has been put or updated,
and until then reads as the initialiser's first value.

A round visits either the rows that somebody pushed or all rows, chunk by chunk. Passes over the memory of the visited
rows, beside those that the updater counts: none where they follow each other (all rows are such a case), because a
chunk then shows the block's own memory. Otherwise one to gather the weights and one for each state, and as many to
bring them back; a contribution that lacks some of a chunk's rows costs one more, to be spread over zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kvdist.core.server.row_index import RowIndex
from kvdist.core.server.row_memory import GrowingRows, Slots, clear, put, stretch_of, take
from kvdist.core.server.row_merge import Gradients, merged
from kvdist.core.server.row_states import RowStates
from kvdist.dtypes import DType
from kvdist.initializer import Initializer, Zeros
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Kernels
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.states import SliceState


@dataclass(frozen=True, eq=False)
class RowSnapshot:
    """Everything a block holds, in memory of its own.

    Attributes:
        ids: the rows that exist, increasing; None: all of the block.
        values: theirs, flat, of `DType.storage`.
        state: what the optimizer remembers of them, each array flat; None: nothing.
        initializer: what the other rows read as; None in a block that has memory for all rows.
    """

    ids: Slots | None
    values: Array
    state: SliceState | None
    initializer: Initializer | None


_Apply = Callable[[Sequence[Array], Array, SliceState, int], object]
"""Updates rows in place: contributions, weight, state, and the first row's number where the rows follow each other."""


class RowBlock:
    """The rows from `first` up to `stop` of one table.

    Args:
        key: the table's.
        number: of this block, for messages.
        shape: of the whole table.
        dtype: its element type.
        first, stop: which rows.
        initializer: what a row reads as before it exists; None: all rows exist, as zeros.
        kernels: the backend for sums and casts.

    Raises:
        MemoryError: there is none for all rows of an eager block.

    Attributes:
        key, number, shape, dtype, first, stop: as given.
        row_length: elements of a row.
        initializer: as given, until a sum replaces the value of a lazy block: its other rows are zeros then.
    """

    def __init__(
        self,
        key: int | str,
        number: int,
        shape: tuple[int, ...],
        dtype: DType,
        first: int,
        stop: int,
        initializer: Initializer | None,
        kernels: Kernels,
    ) -> None:
        self.key = key
        self.number = number
        self.shape = shape
        self.dtype = dtype
        self.first = first
        self.stop = stop
        self.row_length = math.prod(shape[1:])
        self.initializer = initializer
        self._kernels = kernels
        self._index = None if initializer is None else RowIndex()
        self._weight = GrowingRows(self.row_length, dtype.storage)
        self._states = RowStates(dtype, self.row_length, kernels)
        self._nonzero: Slots | None = np.zeros(0, np.int64)
        """Of an eager block the rows that may be other than zeros; None: any may be."""
        self._rows_max = max(1, CHUNK_ELEMENTS // max(1, self.row_length))
        self._scratch: list[Array] = []
        if initializer is None:
            self._reserve_all()

    @property
    def is_lazy(self) -> bool:
        """Whether rows take memory only once they have been put or updated."""
        return self._index is not None

    @property
    def rows_touched(self) -> int:
        """How many rows exist; all of an eager block."""
        return self.stop - self.first if self._index is None else self._index.count

    @property
    def ids(self) -> Slots:
        """The rows that exist, increasing."""
        return np.arange(self.first, self.stop) if self._index is None else np.sort(self._index.ids)

    @property
    def updates(self) -> int:
        """How many rounds an optimizer has applied."""
        return self._states.count

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that exist, their states and their index."""
        each = self._weight.row_nbytes + self._states.row_nbytes
        return self.rows_touched * each + (0 if self._index is None else self._index.nbytes)

    def put(self, ids: Slots, values: Array) -> None:
        """Assign rows. States stay, and so does the count of updates.

        Args:
            ids: rows of the table, int64, strictly increasing.
            values: theirs, flat, of `dtype.storage`; copied.

        Raises:
            ValueError, TypeError: a row is not of this block, ids do not increase, or sizes or types do not fit.
        """
        rows = self._checked(ids, values)
        where = stretch_of(self._made(ids))  # first of all, as it may move the memory
        put(self._weight.rows, where, rows)
        if self._index is None and self._nonzero is not None:
            # A list that long costs as much as the rows themselves.
            is_long = 4 * (len(self._nonzero) + len(ids)) > self.rows_touched
            self._nonzero = None if is_long else np.union1d(self._nonzero, ids - self.first)

    def gather(self, ids: Slots, out: Array) -> None:
        """Read rows. One that does not exist gives its first value, and goes on not existing.

        Args:
            ids: rows of the table, int64, strictly increasing.
            out: receives their values, flat, of `dtype.storage`.

        Raises:
            ValueError, TypeError: as of `put`.
        """
        rows = self._checked(ids, out)
        slots = self._found(ids)
        missing = slots < 0
        if not missing.any():
            take(self._weight.rows, stretch_of(slots), rows)
            return
        assert self.initializer is not None, "all rows of an eager block exist"
        absent = np.flatnonzero(missing)
        present = np.flatnonzero(~missing)
        if len(present):
            rows[present] = self._weight.rows[slots[present]]
            first = np.empty((len(absent), self.row_length), self.dtype.storage)
            self.initializer.fill(ids[absent], first, self.dtype)
            rows[absent] = first
        else:
            self.initializer.fill(ids, rows, self.dtype)

    def update(
        self,
        contributions: Sequence[tuple[Slots, Array]],
        scales: Sequence[float],
        optimizer: Optimizer | None,
        lr: float | None = None,
        wd: float | None = None,
    ) -> None:
        """Apply one round.

        With an optimizer its rule gets the sum of the contributions as the gradient: for all rows of the block, zeros
        where nobody pushed; or, with `lazy_update` or a rule that rests, only for rows that somebody pushed. Without
        one the sum becomes the whole value: rows that nobody pushed become zeros.

        Args:
            contributions: in rank order; of each its ids (as of `put`; none is allowed) and its values, flat.
            scales: a finite factor for each contribution.
            optimizer: the rule, or None.
            lr, wd: what the pushes said (`Optimizer.pushed_lr`); None: the optimizer's own for this key.

        Raises:
            ValueError, TypeError: as of `put`, or the rule cannot update such a table (see `obstacle`) or refuses a
                number; nothing has changed.
        """
        ids = [one for one, _ in contributions]
        values = [self._checked(*one) for one in contributions]
        if optimizer is None:
            self._replace(ids, values, scales)
            return
        decay = optimizer.wd_for(self.key) if wd is None else wd
        refusal = obstacle(optimizer, self.key, self.shape, self.is_lazy, decay)
        if refusal is not None:
            raise ValueError(refusal)
        updater = self._states.serve(optimizer, self._weight, self.rows_touched, exactly=not self.is_lazy)

        def apply(gradients: Sequence[Array], weight: Array, state: SliceState, row: int) -> SliceState:
            extent = Extent(self.key, self.shape, (self.first + row) * self.row_length)
            updater.restore(self.key, state)
            updater.update(self.key, weight, gradients, scales, self.dtype, weight, lr, wd, extent)
            after = updater.states[self.key]
            updater.restore(self.key, None)  # what shows the block's memory must not outlive the chunk
            return after

        # Without elements first: what would be refused is refused before anything has changed.
        nothing = np.zeros(0, self.dtype.storage)
        after = apply([nothing] * len(values), nothing.copy(), self._states.shown(slice(0, 0)).copy(), 0)
        if optimizer.lazy_update or optimizer.rests(decay):
            union, places = merged(ids)
            self._visit(Gradients(len(union), places, values, self._rows_max, self.dtype), self._made(union), apply)
        else:
            rows = self.stop - self.first
            everywhere = [None if len(one) == rows else one - self.first for one in ids]
            self._visit(Gradients(rows, everywhere, values, self._rows_max, self.dtype), None, apply)
        self._states.count, self._states.scalars = after.count, after.scalars
        self._nonzero = None

    def snapshot(self) -> RowSnapshot:
        """A copy of everything, rows in the order of their ids."""
        if self._index is None:
            everything = slice(0, self.rows_touched)
            return RowSnapshot(None, self._weight.rows.copy().reshape(-1), self._states.copy(everything), None)
        order = np.argsort(self._index.ids)
        values = self._weight.rows[order].reshape(-1)
        return RowSnapshot(self._index.ids[order], values, self._states.copy(order), self.initializer)

    def restore(self, snapshot: RowSnapshot, optimizer: Optimizer | None) -> None:
        """Go on from a snapshot, which is only read; what was here is gone.

        Args:
            snapshot: of a block with these rows, eager or lazy. An eager block may get some rows only: the others are
                zeros then, with fresh states.
            optimizer: whose state the snapshot's is; None: it is left out.

        Raises:
            ValueError, TypeError: it does not fit; nothing has changed but, if the state is another rule's, the values.
        """
        ids = np.arange(self.first, self.stop) if snapshot.ids is None else snapshot.ids
        rows = self._checked(ids, snapshot.values)
        self._states.forget()
        if self._index is None:
            if len(ids) < self.rows_touched:
                self._weight.rows.fill(0)
            self._nonzero = None
        else:
            self._index.clear()
            self.initializer = snapshot.initializer or Zeros()
        where = stretch_of(self._made(ids))
        put(self._weight.rows, where, rows)
        if optimizer is not None and snapshot.state is not None:
            self._states.serve(optimizer, self._weight, self.rows_touched, exactly=not self.is_lazy)
            self._states.restore(snapshot.state, where)

    def restore_states(self, ids: Slots | None, state: SliceState | None, optimizer: Optimizer) -> None:
        """Go on from other states; values stay.

        Args:
            ids: rows of the table, as of `put`; None: all of the block. Those of a lazy block exist from now on.
            state: theirs, of this optimizer; all other rows begin anew. None: all do.

        Raises:
            ValueError: the state is another rule's.
        """
        self._states.forget()
        if state is not None:
            where = stretch_of(self._made(np.arange(self.first, self.stop) if ids is None else ids))
            self._states.serve(optimizer, self._weight, self.rows_touched, exactly=not self.is_lazy)
            self._states.restore(state, where)

    def validate(self) -> None:
        """Check every invariant."""
        assert 0 <= self.first <= self.stop <= self.shape[0], "the block lies in its table"
        assert len(self._weight.rows) >= self.rows_touched, "every row that exists has memory"
        if self._index is not None:
            self._index.validate()
            ids = self._index.ids
            assert ((ids >= self.first) & (ids < self.stop)).all(), "rows that exist are rows of the block"
        elif self._nonzero is not None:
            rest = np.ones(self.rows_touched, np.bool_)
            rest[self._nonzero] = False
            assert not self._weight.rows[rest].any(), "rows that are not listed as filled are zeros"

    def _reserve_all(self) -> None:
        rows = self.stop - self.first
        try:
            self._weight.reserve(rows, exactly=True)
        except MemoryError as error:
            raise MemoryError(
                f"there is no memory for {rows} rows of table {self.key!r}, {rows * self._weight.row_nbytes} bytes, on"
                " this machine: declare it with LazyRows, whose rows take memory once they are updated, or start more"
                " servers"
            ) from error

    def _replace(self, ids: Sequence[Slots], values: Sequence[Array], scales: Sequence[float]) -> None:
        """Make the sum the whole value. It costs the rows that are pushed and those that were other than zeros."""

        def apply(gradients: Sequence[Array], weight: Array, _state: SliceState, _row: int) -> None:
            self._kernels.weighted_sum(gradients, scales, self.dtype, weight)

        nothing = np.zeros(0, self.dtype.storage)
        self._kernels.weighted_sum([nothing] * len(values), scales, self.dtype, nothing.copy())  # refuses wrong scales
        union, places = merged(ids)
        if self._index is not None:
            self._index.clear()
            self._states.forget()
            self.initializer = Zeros()
        elif len(union) < self.rows_touched:
            clear(self._weight.rows, slice(None) if self._nonzero is None else self._nonzero)
        slots = self._made(union)
        self._visit(Gradients(len(union), places, values, self._rows_max, self.dtype), slots, apply, reads=False)
        self._nonzero = slots

    def _visit(self, gradients: Gradients, slots: Slots | None, apply: _Apply, reads: bool = True) -> None:
        """Go through all chunks: of the rows in these slots, or of the whole block. `reads`: the old values matter."""
        everywhere = slice(0, gradients.count) if slots is None else stretch_of(slots)
        whole = gradients.whole
        if whole is not None and isinstance(everywhere, slice):  # nothing to gather or spread: one chunk is enough
            shown = self._weight.rows[everywhere].reshape(-1)
            apply(whole, shown, self._states.shown(everywhere), everywhere.start)
            return
        for chunk in gradients.chunks:
            start, stop = gradients.bounds(chunk)
            where = slice(start, stop) if slots is None else stretch_of(slots[start:stop])
            values = gradients.of(chunk)
            if isinstance(where, slice):
                apply(values, self._weight.rows[where].reshape(-1), self._states.shown(where), where.start)
            else:
                weight, *kept = self._scratch_for(stop - start)
                if reads:
                    take(self._weight.rows, where, weight)
                apply(values, weight.reshape(-1), self._states.taken(where, kept), 0)
                put(self._weight.rows, where, weight)
                self._states.put(where, kept)
            gradients.done(chunk)

    def _scratch_for(self, rows: int) -> list[Array]:
        """Matrices of so many rows, for the weight and for each state."""
        widths = self._states.widths
        wanted = [(self.row_length, self.dtype.storage), *((width, self.dtype.accumulate) for width in widths)]
        if [(one.shape[1], one.dtype) for one in self._scratch] != wanted:
            self._scratch = [np.empty((self._rows_max, width), dtype) for width, dtype in wanted]
        return [one[:rows] for one in self._scratch]

    # Rows and slots.

    def _found(self, ids: Slots) -> Slots:
        """The slots of rows, -1 for those that do not exist."""
        return ids - self.first if self._index is None else self._index.find(ids)

    def _made(self, ids: Slots) -> Slots:
        """The slots of rows, which exist from now on."""
        slots = self._found(ids)
        if self._index is None:
            return slots
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            new = ids[missing]
            start = self._index.count
            stop = start + len(new)
            assert self.initializer is not None, "a lazy block has one"
            self._weight.reserve(stop)
            self.initializer.fill(new, self._weight.rows[start:stop], self.dtype)
            self._states.create(start, stop, self._weight)
            slots[missing] = self._index.add(new)  # last, so that rows that find no memory do not exist
        return slots

    def _checked(self, ids: Slots, values: Array) -> Array:
        """The values as a matrix of rows, if ids and values are what they should be."""
        if ids.dtype != np.int64 or values.dtype != self.dtype.storage:
            raise TypeError(
                f"rows of {self.key!r} are int64 ids and values of {self.dtype.storage}, not {ids.dtype} and"
                f" {values.dtype}"
            )
        if len(ids) and (int(ids[0]) < self.first or int(ids[-1]) >= self.stop):
            wrong = int(ids[0]) if int(ids[0]) < self.first else int(ids[-1])
            raise ValueError(f"row {wrong} of {self.key!r} is not among the rows {self.first} to {self.stop - 1} here")
        if len(ids) > 1 and not (ids[1:] > ids[:-1]).all():
            raise ValueError(f"the row ids of {self.key!r} must increase strictly: sort them and sum what is repeated")
        if values.ndim != 1 or not values.flags.c_contiguous:
            raise ValueError(f"values of rows of {self.key!r} are one-dimensional and contiguous, not {values.shape}")
        if values.size != len(ids) * self.row_length:
            raise ValueError(
                f"{len(ids)} rows of {self.key!r} have {len(ids) * self.row_length} elements, not {values.size}"
            )
        return values.reshape(len(ids), self.row_length)


def obstacle(
    optimizer: Optimizer, key: int | str, shape: tuple[int, ...], is_lazy: bool, wd: float | None = None
) -> str | None:
    """Why an optimizer cannot update a row-sparse table, as a sentence; None: it can.

    Args:
        optimizer: the rule and its numbers.
        key, shape: the table's.
        is_lazy: whether its rows come into being when they are touched.
        wd: the weight decay of the update; None: what the optimizer says now.
    """
    decay = optimizer.wd_for(key) if wd is None else wd
    if optimizer.needs_norms:
        return (
            f"{optimizer.name} needs the norm of the whole parameter, and the table {key!r} is cut by rows: give it a"
            " store of its own with another optimizer, such as adagrad"
        )
    if optimizer.by_place and (is_lazy or optimizer.lazy_update):
        return (
            f"{optimizer.name} moves every element in every update, so the table {key!r} must be given whole, and"
            " lazy_update must be False: or choose another optimizer, such as adagrad"
        )
    if is_lazy and not (optimizer.lazy_update or optimizer.rests(decay)):
        return (
            f"{optimizer} with weight decay {decay:g} changes rows that have no gradient, and most rows of the lazy"
            f" table {key!r} do not exist: pass lazy_update=True, or choose a rule that leaves them alone, such as"
            " adagrad or sgd without momentum and weight decay"
        )
    try:
        optimizer.check_update(1.0, decay, Extent(key, shape))
    except ValueError as error:
        return str(error)
    return None
