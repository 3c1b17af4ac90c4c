"""A block of rows on its way into a checkpoint and back: all of an eager one, what exists of a lazy one. Pure.

Rows are changed in place, so a block is copied when it is taken: one pass over what exists. An eager block is written
as a slice of an array is, so that either can be read as the other. Of a lazy one the rows that exist are written, and
how the others begin *now*: that is not as the table was declared once a sum has replaced its value.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist.checkpoint.snapshot import STATES, WEIGHTS, ReadSlice, SavedSlice, WantedSlice
from kvdist.core.server.row_block import RowBlock, RowSnapshot
from kvdist.initializer import Initializer, Zeros, initializer_from
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import has_master


def taken(block: RowBlock, version: int, optimizer: Optimizer | None, contents: Sequence[str]) -> SavedSlice:
    """A copy of the block.

    Args:
        block: what is saved.
        version: how many rounds it has had.
        optimizer: what updates it.
        contents: what is wanted of it.
    """
    copy = block.snapshot()
    weight = copy.values if WEIGHTS in contents else None
    begins = "" if copy.initializer is None else copy.initializer.describe()
    kept = SavedSlice(block.key, *_range(block), block.dtype, version, weight, ids=copy.ids, initializer=begins)
    state = copy.state if STATES in contents else None
    if state is None or optimizer is None:
        return kept
    names = optimizer.state_names
    return SavedSlice(
        *(kept.key, kept.start, kept.count, kept.dtype, version, weight),
        dict(zip(names, state.arrays, strict=True)),
        state.count,
        state.scalars,
        state.master,
        copy.ids,
        begins,
    )


def wanted(block: RowBlock, optimizer: Optimizer | None) -> WantedSlice:
    """What a checkpoint must have of the block; it is the `number` of the block's that comes back."""
    where = (block.number, block.key, *_range(block), block.dtype)
    lazy_row = block.row_length if block.is_lazy else 0
    if optimizer is None:
        return WantedSlice(*where, lazy_row=lazy_row)
    row = block.row_length if optimizer.by_rows else 1
    master = has_master(optimizer, block.dtype)
    from_weight = master or bool(optimizer.states_from_weight)
    return WantedSlice(*where, optimizer.state_names, row, master, True, from_weight, lazy_row)


def restore(block: RowBlock, found: ReadSlice, optimizer: Optimizer | None) -> None:
    """Go on from what was found, as if all rows of the table existed: a row that was not found is one that begins.

    What was not asked for stays as it is: with weights alone each row keeps its states, with states alone its value.
    """
    has_states = found.state is not None or found.is_fresh
    if found.weight is not None and (has_states or optimizer is None):
        block.restore(RowSnapshot(found.ids, found.weight, found.state, _initializer(found)), optimizer)
    elif found.weight is not None:
        _put(block, found)
    elif has_states and optimizer is not None:
        block.restore_states(found.ids, found.state, optimizer)


def _put(block: RowBlock, found: ReadSlice) -> None:
    """Other values, and the same states."""
    assert found.weight is not None
    if found.ids is None:
        block.put(np.arange(block.first, block.stop), found.weight)
        return
    begins = _initializer(found) or Zeros()
    block.initializer = begins
    gone = np.setdiff1d(block.ids, found.ids, assume_unique=True)
    block.put(gone, begins.rows(gone, block.row_length, block.dtype))
    block.put(found.ids, found.weight)


def _initializer(found: ReadSlice) -> Initializer | None:
    return initializer_from(found.initializer) if found.initializer else None


def _range(block: RowBlock) -> tuple[int, int]:
    """Its first element and how many it has."""
    return block.first * block.row_length, (block.stop - block.first) * block.row_length
