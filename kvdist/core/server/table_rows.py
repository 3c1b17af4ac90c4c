"""`TableRows`: the rows of a sparse table on a server, their optimizer states, and the update of a round.

Invariants:

* Values are updated in place: no temporary is as large as all rows, and what leaves is a copy.
* A round changes all of its rows or, on an error, nothing.
* The arithmetic is `Updater`'s, so a row gets the bits that it would get in a dense parameter.

The rows are *eager*, with memory for all of them, or *lazy*: then a row takes memory once it has been put or updated,
and until then reads as the initializer's first value.

A round visits either the rows that were pushed or all rows, chunk by chunk. Passes over the memory of the visited
rows, beside those that the updater counts: none where they are consecutive (all rows are), because a chunk then shows
the table's memory. Otherwise a pass to gather the weights and a pass for each state, and as many to write them back; a
contribution that lacks some of a chunk's rows costs a further pass, to be spread over zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kvdist.checkpoint.snapshot import STATES, WEIGHTS, SliceImage, WantedSlice
from kvdist.core.server.row_storage import GrowingRows, RowIndex, Slots, Where, clear, copied, put, stretch_of, take
from kvdist.dtypes import DType
from kvdist.kernels.interface import CHUNK_ELEMENTS, Array, Equation, Kernels, Rows
from kvdist.optimizer.base import Extent, Optimizer
from kvdist.optimizer.initializer import Initializer, Zeros, initializer_from
from kvdist.optimizer.states import SliceState, has_master
from kvdist.optimizer.updater import Updater, summed_clip

_Apply = Callable[[Sequence[Array], Array, SliceState, int], object]
"""Updates rows in place: contributions, weight, state, and the first row's number where the rows follow each other."""


class TableRows:
    """The rows from `first` up to `stop` of a table.

    Args:
        key: the table's key.
        number: the number of the slice.
        shape: the shape of the whole table.
        dtype: its element type.
        first, stop: which rows.
        initializer: initial value of a row, read before the row exists; None: all rows exist, as zeros.
        kernels: the backend for sums and casts.

    Raises:
        MemoryError: eager rows do not fit into memory.

    Attributes:
        key, number, shape, dtype, first, stop: see Args.
        row_length: elements of a row.
        initializer: see Args, until a sum replaces the value of lazy rows: the other rows are zeros then.
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
        self._index = None if initializer is None else RowIndex(first, stop)
        self._weight = GrowingRows(self.row_length, dtype.storage)
        self._states = RowStates(dtype, self.row_length, kernels)
        self._nonzero: Slots | None = np.zeros(0, np.int64)
        """The eager rows that may be other than zeros; None: any may be."""
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
        """How many rows exist."""
        return self.stop - self.first if self._index is None else self._index.count

    @property
    def ids(self) -> Slots:
        """The rows that exist, increasing."""
        return np.arange(self.first, self.stop) if self._index is None else np.sort(self._index.ids)

    @property
    def updates(self) -> int:
        """How many rounds an optimizer has applied to them."""
        return self._states.count

    @property
    def nbytes(self) -> int:
        """Bytes of the rows that exist, their states and their index."""
        each = self._weight.row_nbytes + self._states.row_nbytes
        return self.rows_touched * each + (0 if self._index is None else self._index.nbytes)

    def put(self, ids: Slots, values: Array) -> None:
        """Assign rows. Their states and the count of updates stay.

        Args:
            ids: rows of the table, int64, strictly increasing.
            values: their values, flat, of `dtype.storage`; copied.

        Raises:
            ValueError, TypeError: a row is outside, ids do not increase, or sizes or types do not fit.
        """
        rows = self._checked(ids, values)
        where = stretch_of(self._made(ids))  # first of all, as it may move the memory
        put(self._weight.rows, where, rows)
        if self._index is None and self._nonzero is not None:
            # A list that long costs as much as the rows themselves.
            is_long = 4 * (len(self._nonzero) + len(ids)) > self.rows_touched
            self._nonzero = None if is_long else np.union1d(self._nonzero, ids - self.first)

    def gather(self, ids: Slots, out: Array) -> None:
        """Read rows. A row that does not exist gives its first value, and is not created.

        Args:
            ids: rows of the table, int64, strictly increasing.
            out: receives their values, flat, of `dtype.storage`.

        Raises:
            ValueError, TypeError: as `put`.
        """
        rows = self._checked(ids, out)
        slots = self._found(ids)
        missing = slots < 0
        if not missing.any():
            take(self._weight.rows, stretch_of(slots), rows)
            return
        assert self.initializer is not None, "all eager rows exist"
        absent = np.flatnonzero(missing)
        present = np.flatnonzero(~missing)
        if len(present):
            rows[present] = self._weight.rows[slots[present]]
            first = np.empty((len(absent), self.row_length), self.dtype.storage)
            self.initializer.fill(ids[absent], first, self.dtype)
            rows[absent] = first
        else:
            self.initializer.fill(ids, rows, self.dtype)

    def visited(self, ids: Sequence[Slots], optimizer: Optimizer | None, wd: float | None) -> tuple[Slots, Array]:
        """Copy the rows that `update` would change, as (k,) ids and their values, flat, by a single pass.

        With a rule that visits all rows it is as large as the table.
        """
        decay = 0.0 if optimizer is None else optimizer.wd_for(self.key) if wd is None else wd
        rests = optimizer is not None and (optimizer.lazy_update or optimizer.rests(decay))
        rows = union_of(ids).copy() if rests else self.ids  # they may lie in a message
        values = np.empty(len(rows) * self.row_length, self.dtype.storage)
        self.gather(rows, values)
        return rows, values

    def update(
        self,
        contributions: Sequence[tuple[Slots, Array]],
        scales: Sequence[float],
        optimizer: Optimizer | None,
        lr: float | None = None,
        wd: float | None = None,
    ) -> None:
        """Apply a round.

        With an optimizer the sum of the contributions is the gradient: for all rows, zeros where none was pushed; or,
        with `lazy_update` or a rule that rests, only for the rows that were pushed. Without an optimizer the sum
        becomes the whole value: the other rows become zeros.

        Args:
            contributions: in rank order: ids (as for `put`; possibly none) and values, flat.
            scales: a finite factor for each contribution.
            optimizer: the rule, or None.
            lr, wd: the numbers of the push (`Optimizer.pushed_lr`); None: those of the optimizer for this key.

        Raises:
            ValueError, TypeError: as `put`, or the rule cannot update such a table (see `obstacle`) or refuses a
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
            updater.restore(self.key, None)  # a view of the rows must not outlive the chunk
            return after

        # Without elements first, so that an error comes before anything has changed.
        nothing = np.zeros(0, self.dtype.storage)
        after = apply([nothing] * len(values), nothing.copy(), self._states.shown(slice(0, 0)).copy(), 0)
        if optimizer.lazy_update or optimizer.rests(decay):
            union = union_of(ids)
            slots, equation = self._made(union), updater.equation(self.key, after.count, lr, wd)
            given = list(zip(ids, values, strict=True))
            if equation is None or not self._update_in_place(optimizer, equation, union, slots, given, scales):
                gradients = RowGradients(len(union), places_in(union, ids), values, self._rows_max, self.dtype)
                self._visit(gradients, slots, apply)
        else:
            rows = self.stop - self.first
            everywhere = [None if len(one) == rows else one - self.first for one in ids]
            self._visit(RowGradients(rows, everywhere, values, self._rows_max, self.dtype), None, apply)
        self._states.count, self._states.scalars = after.count, after.scalars
        self._nonzero = None

    def summed(self, contributions: Sequence[Rows], scales: Sequence[float]) -> tuple[Slots, Array]:
        """Return the union of the rows of contributions, and the scaled sum of their values, flat.

        Raises:
            ValueError, TypeError: the values cannot be summed.
        """
        ids = [row_ids for row_ids, _ in contributions]
        union = union_of(ids)
        places = places_in(union, ids)
        shape = (len(union), self.row_length)
        everywhere = [_spread(values, place, shape) for (_, values), place in zip(contributions, places, strict=True)]
        total = np.empty(len(union) * self.row_length, self.dtype.storage)
        self._kernels.weighted_sum(everywhere, scales, self.dtype, total)
        return union, total

    def _update_in_place(
        self,
        optimizer: Optimizer,
        equation: Equation,
        ids: Slots,
        slots: Slots,
        contributions: Sequence[Rows],
        scales: Sequence[float],
    ) -> bool:
        """Have the backend update these rows where they lie, if they do not follow each other; whether it has."""
        states = self._states.matrices
        if states is None or isinstance(stretch_of(slots), slice):
            return False
        weight, clip, chosen = self._weight.rows, summed_clip(optimizer), equation.chosen(states)
        return self._kernels.update_rows(equation, weight, slots, ids, contributions, scales, clip, chosen, self.dtype)

    # Checkpoints. Eager rows are written as a slice of a dense array is, so either can be read as the other. Of lazy
    # rows those that exist are written, with the present initializer: after a sum that is not the declared one.

    def saved(self, version: int, optimizer: Optimizer | None, contents: Sequence[str]) -> SliceImage:
        """Copy the rows that exist, in the order of their ids, in a single pass.

        Args:
            version: number of rounds of the rows.
            optimizer: the rule that updates the rows.
            contents: parts to copy: `WEIGHTS`, `STATES`.
        """
        index, ids, first_values = self._index, None, ""
        where: Where = slice(0, self.rows_touched)
        if index is not None:
            where = np.argsort(index.ids)
            ids, first_values = index.ids[where], (self.initializer or Zeros()).describe()
        weight = copied(self._weight.rows, where) if WEIGHTS in contents else None
        about = (self.number, self.key, *self._elements, self.dtype, version, weight)
        image = SliceImage(*about, ids=ids, initializer=first_values)
        if optimizer is None or STATES not in contents:
            return image
        return image.with_state(self._states.copy(where), optimizer)

    def wanted(self, optimizer: Optimizer | None) -> WantedSlice:
        """The requirements of these rows for a checkpoint."""
        lazy_row = self.row_length if self.is_lazy else 0
        wanted = WantedSlice(self.number, self.key, *self._elements, self.dtype, lazy_row=lazy_row)
        return wanted.updated_by(optimizer, self.row_length)

    def load(self, image: SliceImage, optimizer: Optimizer | None) -> None:
        """Continue from an image, eager or lazy, which is only read.

        A row that it lacks gets its first value and a fresh state; eager rows become zeros. Parts that the image lacks
        stay: with weights alone each row keeps its states, with states alone its value.

        Raises:
            ValueError, TypeError: the image does not fit; nothing has changed but, if the state is another rule's, the
                values.
        """
        ids = np.arange(self.first, self.stop) if image.ids is None else image.ids
        if image.weight is not None and (image.has_state or optimizer is None):
            self._replace_rows(ids, image.weight, image.initializer)
        elif image.weight is not None:
            if image.ids is not None:
                self.initializer = first_values = _first_values(image.initializer)
                absent = np.setdiff1d(self.ids, ids, assume_unique=True)
                self.put(absent, first_values.rows(absent, self.row_length, self.dtype))
            self.put(ids, image.weight)
        elif image.has_state:
            self._states.forget()
        if image.state is not None and optimizer is not None:
            where = stretch_of(self._made(ids))
            self._states.serve(optimizer, self._weight, self.rows_touched, exactly=not self.is_lazy)
            self._states.restore(image.state, where)

    def _replace_rows(self, ids: Slots, values: Array, initializer: str) -> None:
        """Replace the values of all rows: no other row exists from now on."""
        rows = self._checked(ids, values)
        self._states.forget()
        if self._index is None:
            if len(ids) < self.rows_touched:
                self._weight.rows.fill(0)
            self._nonzero = None
        else:
            self._index.clear()
            self.initializer = _first_values(initializer)
        where = stretch_of(self._made(ids))
        put(self._weight.rows, where, rows)

    @property
    def _elements(self) -> tuple[int, int]:
        """Number of its first element in the table, and number of its elements."""
        return self.first * self.row_length, (self.stop - self.first) * self.row_length

    def validate(self) -> None:
        """Check every invariant."""
        assert 0 <= self.first <= self.stop <= self.shape[0], "the rows are rows of the table"
        assert len(self._weight.rows) >= self.rows_touched, "every row that exists has memory"
        if self._index is not None:
            self._index.validate()
            ids = self._index.ids
            assert ((ids >= self.first) & (ids < self.stop)).all(), "rows that exist are rows of this server"
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
                f"this machine has no memory for {rows} rows of table {self.key!r}, {rows * self._weight.row_nbytes}"
                " bytes: declare the table with LazyRows, whose rows take no memory before their first update, or start"
                " more servers"
            ) from error

    def _replace(self, ids: Sequence[Slots], values: Sequence[Array], scales: Sequence[float]) -> None:
        """Replace the whole value by the sum. Costs the pushed rows and the rows that were not zero."""

        def apply(gradients: Sequence[Array], weight: Array, _state: SliceState, _row: int) -> None:
            self._kernels.weighted_sum(gradients, scales, self.dtype, weight)

        nothing = np.zeros(0, self.dtype.storage)
        self._kernels.weighted_sum([nothing] * len(values), scales, self.dtype, nothing.copy())  # refuses wrong scales
        union = union_of(ids)
        if self._index is not None:
            self._index.clear()
            self._states.forget()
            self.initializer = Zeros()
        elif len(union) < self.rows_touched:
            clear(self._weight.rows, slice(None) if self._nonzero is None else self._nonzero)
        slots = self._made(union)
        places = places_in(union, ids)
        self._visit(RowGradients(len(union), places, values, self._rows_max, self.dtype), slots, apply, reads=False)
        self._nonzero = slots

    def _visit(self, gradients: RowGradients, slots: Slots | None, apply: _Apply, reads: bool = True) -> None:
        """Apply to every chunk of the rows in these slots, or of all rows. `reads`: the old values matter."""
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
                weight, *states = self._scratch_for(stop - start)
                if reads:
                    take(self._weight.rows, where, weight)
                apply(values, weight.reshape(-1), self._states.gathered(where, states), 0)
                put(self._weight.rows, where, weight)
                self._states.put(where, states)
            gradients.done(chunk)

    def _scratch_for(self, rows: int) -> list[Array]:
        """Matrices of this many rows, for the weight and for each state."""
        widths = self._states.widths
        wanted = [(self.row_length, self.dtype.storage), *((width, self.dtype.accumulate) for width in widths)]
        if [(one.shape[1], one.dtype) for one in self._scratch] != wanted:
            self._scratch = [np.empty((self._rows_max, width), dtype) for width, dtype in wanted]
        return [one[:rows] for one in self._scratch]

    # Rows and slots.

    def _found(self, ids: Slots) -> Slots:
        """The slots of rows, -1 for rows that do not exist."""
        return ids - self.first if self._index is None else self._index.find(ids)

    def _made(self, ids: Slots) -> Slots:
        """The slots of rows, which are created where they do not exist."""
        slots = self._found(ids)
        if self._index is None:
            return slots
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            new = ids[missing]
            start = self._index.count
            stop = start + len(new)
            assert self.initializer is not None, "lazy rows have one"
            self._weight.reserve(stop)
            self.initializer.fill(new, self._weight.rows[start:stop], self.dtype)
            self._states.create(start, stop, self._weight)
            slots[missing] = self._index.add(new)  # last: rows without memory do not exist
        return slots

    def _checked(self, ids: Slots, values: Array) -> Array:
        """The values as a matrix of rows. Raises if ids or values are wrong."""
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
        key, shape: of the table.
        is_lazy: whether its rows are created when they are touched.
        wd: the weight decay of the update; None: the optimizer's.
    """
    decay = optimizer.wd_for(key) if wd is None else wd
    if optimizer.needs_norms:
        return (
            f"{optimizer.name} needs the norm of the whole parameter, and the table {key!r} is cut by rows: put it into"
            " another store with another optimizer, such as adagrad"
        )
    if optimizer.by_place and (is_lazy or optimizer.lazy_update):
        return (
            f"{optimizer.name} changes every element in every update, so the table {key!r} must be declared with all"
            " its rows, and lazy_update must be False: or choose another optimizer, such as adagrad"
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


def _first_values(initializer: str) -> Initializer:
    """Return the initial value of rows, from the text of an image; zeros for the image of eager rows."""
    return initializer_from(initializer) if initializer else Zeros()


class RowStates:
    """The optimizer states of rows by slot: those of `SliceState`, in memory that grows with the rows.

    All rows share a count of updates, as in MXNet: a row that is first touched late starts with the present count.

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
        self._arrays: list[GrowingRows] = []
        """The arrays with names, in their order; then the master, if any."""
        self._from_weight: list[bool] = []
        """For each array, whether it starts as a copy of the weight, else as zeros."""
        self._has_master = False

    @property
    def row_nbytes(self) -> int:
        """Bytes that are kept for each row."""
        return sum(array.row_nbytes for array in self._arrays)

    @property
    def widths(self) -> list[int]:
        """Elements of a row of each array that is kept."""
        return [array.rows.shape[1] for array in self._arrays]

    @property
    def matrices(self) -> list[Array] | None:
        """The arrays with names, in place; None if the rows have a master as well."""
        return None if self._has_master else [array.rows for array in self._arrays]

    def serve(self, optimizer: Optimizer, weight: GrowingRows, count: int, exactly: bool) -> Updater:
        """The updater of this optimizer, with states for the first `count` rows. Another rule begins anew.

        Args:
            optimizer: the rule.
            weight: the weights, from which some states start.
            count: the number of rows.
            exactly: whether that number is final.
        """
        if self.updater is not None and self.updater.optimizer is optimizer:
            return self.updater
        if self.updater is None or self.updater.optimizer.rule() != optimizer.rule():
            self.forget()
            self.scalars = tuple(optimizer.initial_scalars.values())
            self._allocate(optimizer)
            for array in self._arrays:
                array.reserve(count, exactly)
            self._begin(slice(0, count), weight)
        self.updater = Updater(optimizer, self._kernels)
        return self.updater

    def create(self, start: int, stop: int, weight: GrowingRows) -> None:
        """Add states for the new rows from `start` to `stop`, which have these weights."""
        for array in self._arrays:
            array.reserve(stop)
        self._begin(slice(start, stop), weight)

    def restore(self, state: SliceState, where: Where) -> None:
        """Replace the state of these rows, of the optimizer that is served.

        Raises:
            ValueError: it is of another optimizer; nothing has changed.
        """
        arrays = [*state.arrays, *([] if state.master is None else [state.master])]
        if len(arrays) != len(self._arrays) or (state.master is not None) is not self._has_master:
            raise ValueError(
                f"there are {len(state.arrays)} arrays {'without' if state.master is None else 'with'} a master, where"
                f" {len(self._arrays) - self._has_master} {'with' if self._has_master else 'without'} one are kept"
            )
        self.count, self.scalars = state.count, state.scalars
        for mine, array in zip(self._arrays, arrays, strict=True):
            width = mine.rows.shape[1]
            if width:
                put(mine.rows, where, array.reshape(-1, width))

    def copy(self, where: Where) -> SliceState | None:
        """Copy the state of these rows; None without an optimizer."""
        if self.updater is None:
            return None
        return self._state([copied(array.rows, where) for array in self._arrays])

    def shown(self, where: slice) -> SliceState:
        """The state of consecutive rows, in place."""
        return self._state([array.rows[where].reshape(-1) for array in self._arrays])

    def gathered(self, where: Where, scratch: list[Array]) -> SliceState:
        """Gather the state of rows into scratch memory: a matrix for each array."""
        for array, rows in zip(self._arrays, scratch, strict=True):
            take(array.rows, where, rows)
        return self._state([rows.reshape(-1) for rows in scratch])

    def put(self, where: Where, scratch: list[Array]) -> None:
        """Write back the state that `gathered` returned."""
        for array, rows in zip(self._arrays, scratch, strict=True):
            put(array.rows, where, rows)

    def _state(self, arrays: list[Array]) -> SliceState:
        master = arrays.pop() if self._has_master else None
        return SliceState(self.count, tuple(arrays), self.scalars, master)

    def _allocate(self, optimizer: Optimizer) -> None:
        width, dtype = 1 if optimizer.by_rows else self._row_length, self._dtype.accumulate
        self._arrays = [GrowingRows(width, dtype) for _ in optimizer.state_names]
        self._from_weight = [name in optimizer.states_from_weight for name in optimizer.state_names]
        self._has_master = has_master(optimizer, self._dtype)
        if self._has_master:
            self._arrays.append(GrowingRows(self._row_length, dtype))
            self._from_weight.append(True)

    def _begin(self, rows: slice, weight: GrowingRows) -> None:
        """Initialise the states of rows. Fresh memory is zeros already."""
        step = max(1, CHUNK_ELEMENTS // max(1, self._row_length))
        for array, from_weight in zip(self._arrays, self._from_weight, strict=True):
            for start in range(rows.start, rows.stop, step) if from_weight else ():
                part = slice(start, min(start + step, rows.stop))
                self._widen(weight.rows[part], array.rows[part])

    def _widen(self, weight: Array, out: Array) -> None:
        if self._dtype.storage == self._dtype.accumulate:
            out[...] = weight
        else:
            self._kernels.to_float32(weight.reshape(-1), self._dtype, out.reshape(-1))


class RowGradients:
    """The contributions of a round, chunk by chunk over the union of their rows.

    Where a contribution has every row of a chunk, its values are shown in place; elsewhere they are spread over a chunk
    of zeros. So no temporary is as large as the union, and equal ids are never copied.

    Args:
        count: how many rows are visited.
        places: for each contribution the position of each of its rows among them; None: it has all, in order.
        values: for each contribution a matrix with its rows.
        rows_max: rows of a chunk.
        dtype: the element type.
    """

    def __init__(
        self, count: int, places: Sequence[Slots | None], values: Sequence[Array], rows_max: int, dtype: DType
    ) -> None:
        self.count = count
        self._places = places
        self._values = values
        self._rows_max = rows_max
        self._bounds = np.arange(0, count + rows_max, rows_max).clip(max=count)
        self._cuts = [None if one is None else np.searchsorted(one, self._bounds) for one in places]
        rows = min(rows_max, count)
        self._spread = [
            np.zeros((0 if one is None else rows, matrix.shape[1]), dtype.storage)
            for one, matrix in zip(places, values, strict=True)
        ]
        """A chunk of scratch memory for each contribution, which is zeros whenever it is not in use."""

    @property
    def chunks(self) -> range:
        """The numbers of the chunks."""
        return range(len(self._bounds) - 1)

    @property
    def whole(self) -> list[Array] | None:
        """Each whole contribution, flat, if each has all rows; else None."""
        if any(places is not None for places in self._places):
            return None
        return [values.reshape(-1) for values in self._values]

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The first row of a chunk, and the first that follows it."""
        return int(self._bounds[chunk]), int(self._bounds[chunk + 1])

    def of(self, chunk: int) -> list[Array]:
        """Each contribution over the rows of a chunk, flat; call `done` afterwards."""
        start, stop = self.bounds(chunk)
        return [self._one(number, chunk, start, stop - start) for number in range(len(self._values))]

    def done(self, chunk: int) -> None:
        """Release the contributions that `of` returned."""
        start, stop = self.bounds(chunk)
        for number, places in enumerate(self._places):
            low, high = self._cut(number, chunk)
            if places is not None and high - low < stop - start:
                clear(self._spread[number], places[low:high] - start)

    def _cut(self, number: int, chunk: int) -> tuple[int, int]:
        cuts = self._cuts[number]
        return self.bounds(chunk) if cuts is None else (int(cuts[chunk]), int(cuts[chunk + 1]))

    def _one(self, number: int, chunk: int, start: int, count: int) -> Array:
        low, high = self._cut(number, chunk)
        values, places = self._values[number][low:high], self._places[number]
        if places is None or high - low == count:
            return values.reshape(-1)
        spread = self._spread[number]
        put(spread, places[low:high] - start, values)
        return spread[:count].reshape(-1)


def _spread(values: Array, places: Slots | None, shape: tuple[int, int]) -> Array:
    """Return rows at these places of a matrix whose other rows are zeros, flat; None: the matrix has no other rows."""
    if places is None:
        return values
    spread = np.zeros(shape, values.dtype)
    spread[places] = values.reshape(-1, shape[1])
    return spread.reshape(-1)


def union_of(ids: Sequence[Slots]) -> Slots:
    """The union of lists of increasing ids.

    A list, or several equal lists, cost a comparison; else the cost is a sort of all ids, in sorted parts already.
    """
    if not ids:
        return np.zeros(0, np.int64)
    largest = max(ids, key=len)
    if all(not len(one) or one is largest or np.array_equal(one, largest) for one in ids):
        return largest
    union: Slots = np.sort(np.concatenate(ids), kind="stable")
    is_first = np.ones(len(union), np.bool_)
    np.not_equal(union[1:], union[:-1], out=is_first[1:])
    return union[is_first]


def places_in(union: Slots, ids: Sequence[Slots]) -> list[Slots | None]:
    """Return the positions of each list in the union, by a search for each id; None: the list is the union."""
    return [None if len(one) == len(union) else np.searchsorted(union, one) for one in ids]
