"""What a user may hand in for a table of rows, and what its rows are then: ids in order, each once, and their bits."""

from __future__ import annotations

import math
import sys
from collections.abc import Container, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo
from kvdist.kvstore import values
from kvdist.kvstore.device_rows import dense_there, merged_gradient
from kvdist.kvstore.devices import Devices
from kvdist.kvstore.values import Key
from kvdist.protocol.messages import ROWS
from kvdist.rowsparse import LazyRows, RowSparse, canonical, is_strictly_increasing

Ids: TypeAlias = npt.NDArray[np.int64]
"""(k,) row ids, strictly ascending."""
Rows: TypeAlias = tuple[Ids, npt.NDArray[Any]]
"""Ids, and the bits of their rows: (k, row length)."""

_PLAIN = (np.ndarray, RowSparse)

ROW_BYTES_MAX = 8 << 20
"""A row travels in one message."""


def is_sparse(value: Any) -> bool:
    """Whether a value is rows instead of an array."""
    if isinstance(value, _PLAIN):
        return isinstance(value, RowSparse)
    return values.is_tensor(value) and value.layout is not sys.modules["torch"].strided


def as_table(key: Key, value: Any) -> Any:
    """A sparse tensor as `RowSparse`; everything else as it is.

    Raises:
        TypeError, ValueError: a sparse tensor of another layout, or with more sparse dimensions than one.
    """
    if isinstance(value, _PLAIN) or not is_sparse(value):
        return value
    try:
        return RowSparse.from_torch(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"key {key!r}: {error}") from None


def form_of(value: Any) -> str:
    """How a key that begins with this value is declared: '' for an array."""
    if isinstance(value, LazyRows):
        assert not isinstance(value.initializer, str), "made so by its constructor"
        return value.initializer.describe()
    return ROWS if isinstance(value, RowSparse) else ""


def require_table(key: Key, shape: Sequence[int], itemsize: int) -> None:
    """Refuse a table whose rows cannot travel."""
    nbytes = math.prod(shape[1:]) * itemsize
    if not nbytes:
        raise ValueError(f"key {key!r}: the rows of a table of shape {tuple(shape)} have no elements")
    if nbytes > ROW_BYTES_MAX:
        raise ValueError(
            f"key {key!r}: a row of shape {tuple(shape[1:])} has {nbytes} bytes, where {ROW_BYTES_MAX} are allowed."
            " Initialise it with an array instead, which is cut anywhere"
        )


def require_no_tables(tables: Container[Key], replaced: Sequence[tuple[Key, Any]]) -> None:
    """Refuse new values for tables that have values."""
    for key, _ in replaced:
        if key in tables:
            raise ValueError(
                f"key {key!r} is a table of rows that has values already, which broadcast does not replace:"
                " push to it, or load a checkpoint"
            )


def as_dense(array: Any, devices: Devices) -> Any:
    """A sparse value as an array, for a key that is one: where it lies, if that is a GPU that is used."""
    if not is_sparse(array):
        return array
    dense = dense_there(array, devices)
    return as_table("", array).to_dense() if dense is None else dense


def gradient(info: KeyInfo, arrays: Sequence[Any], devices: Devices) -> Rows | None:
    """The sum over devices of what is pushed to a table; None where there is nothing.

    Args:
        info: the table.
        arrays: per device rows, or an array of the whole table's shape, all of whose rows are meant.
        devices: the GPUs that are used.

    Raises:
        TypeError, ValueError: one does not fit the table; the message names the key.
    """
    there = merged_gradient(info, arrays, devices)
    if there is not None:
        return there
    parts = [_rows_of(info, array) for array in arrays]
    if len(parts) < 2:
        return parts[0] if parts else None
    ids, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    return canonical(ids, rows, info.dtype)


def require_rows(info: KeyInfo, value: RowSparse) -> None:
    """Refuse rows of another table."""
    if value.dtype is not info.dtype:
        raise TypeError(
            f"key {info.key!r} holds {info.dtype.label}, but the rows given are {value.dtype.label}; convert them"
        )
    if value.shape != info.shape:
        raise ValueError(
            f"key {info.key!r} is a table of shape {info.shape}, but the rows given are of shape {value.shape}:"
            f" RowSparse(indices, values, {info.shape}) says what they are rows of"
        )


def wanted(info: KeyInfo, row_ids: Any) -> Ids:
    """The rows that a pull wants: their ids, each once and ascending.

    Args:
        info: the table.
        row_ids: integers of any shape and order, with repetitions: an array, a tensor or a list.

    Raises:
        TypeError: they are not integers.
        ValueError: one is not a row of the table, or lists of them differ in length.
    """
    try:
        given = row_ids.detach().cpu().numpy() if values.is_tensor(row_ids) else np.asarray(row_ids)
    except ValueError:
        raise ValueError(f"key {info.key!r}: the lists of row ids differ in length, so they are no array") from None
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"key {info.key!r}: row ids are integers, and these are {given.dtype}; cast them")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= info.shape[0]:
        wrong = low if low < 0 else high
        raise ValueError(f"key {info.key!r} has rows 0 to {info.shape[0] - 1}, and row {wrong} was asked for")
    if given.ndim == 1 and is_strictly_increasing(given):  # one pass instead of a sort
        return given.astype(np.int64)
    return np.unique(given.astype(np.int64, copy=False))


def _rows_of(info: KeyInfo, array: Any) -> Rows:
    value = as_table(info.key, array)
    if isinstance(value, RowSparse):
        require_rows(info, value)
        return value.canonical()
    values.require(info.key, value, info.shape, info.dtype)
    return np.arange(info.shape[0]), values.read_bits(value).reshape(info.shape[0], row_length(info.shape))
