"""The keys of a store: what a worker knows of them, and whether what a call gives fits.

A key is an array or a *table* of rows. Mistakes that a worker can know raise in this module, before anything is sent.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
from collections.abc import Container, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import Slice, row_length
from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised
from kvdist.kvstore import values
from kvdist.kvstore.placement import Devices, Matched, names_gpus
from kvdist.kvstore.rowsparse import LazyRows, RowSparse, canonical, is_strictly_increasing
from kvdist.kvstore.values import Bits, Key
from kvdist.naming import LISTED_MAX, name_of, names_of
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import ROWS

LOG = logging.getLogger("kvdist")

KeyArrays = Sequence[tuple[Key, list[Any]]]
"""Keys and per key the arrays of its devices."""
Fresh = tuple[Key, Any, tuple[int, ...], DType, str]
"""A new key with its first array, its shape, dtype and form."""


_TABLES = (RowSparse, LazyRows)

_READABLE = 0x101
"""`ndarray.flags.num` of an array in C order and aligned; asked for each array of each call."""
_WRITABLE = 0x501
"""The same of an array that may be written."""
LISTED_KEYS_MIN = 1024
LISTED_TIMES_MAX = 4
"""Lists of keys are remembered while they have this many keys in all, or this many times those of the table."""

_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")


@dataclass(frozen=True, slots=True, eq=False)
class PlainList:
    """Different keys of NumPy's element types in some order, as calls name them again and again.

    Attributes:
        infos: the keys.
        dtypes, shapes: of each, what its array must have.
        is_flat: whether all arrays have a single dimension.
        largest: the bytes of the largest.
    """

    infos: tuple[KeyInfo, ...]
    dtypes: list[np.dtype[Any]]
    shapes: list[tuple[int, ...]]
    is_flat: bool
    largest: int


class KeyTable:
    """The initialised keys.

    Attributes:
        infos: key → shape, dtype and where it lives.
        nbytes: of all keys together.
        plain: for keys of NumPy's element types, the form of their arrays: (info, shape, dtype).
    """

    def __init__(self) -> None:
        self.infos: dict[Key, KeyInfo] = {}
        self.nbytes = 0
        self.plain: dict[Key, tuple[KeyInfo, tuple[int, ...], np.dtype[Any]]] = {}
        self.tables: dict[Key, KeyInfo] = {}
        """The keys that are tables of rows."""
        self._lists: dict[tuple[Key, ...], PlainList] = {}
        """Lists that calls have named lately, the oldest first."""
        self.listed = 0
        """Keys in all lists that are remembered."""
        self._lists_lock = threading.RLock()  # a signal handler of the user may call us
        self._kinds: dict[Key, str] = {}
        self._has_warned = False
        """Whether the log has the warning about rows as places of results."""

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, key: Key) -> bool:
        return key in self.infos

    def __getitem__(self, key: Key) -> KeyInfo:
        """The `KeyInfo` of a key.

        Raises:
            KeyNotInitialised: nothing is.
        """
        info = self.infos.get(key)
        if info is None:
            raise KeyNotInitialised(values.unknown_key(key, self.infos))
        return info

    @property
    def all(self) -> tuple[KeyInfo, ...]:
        """The `KeyInfo` of every key, in the order of their initialisation."""
        return tuple(self.infos.values())

    def add(self, info: KeyInfo, array: Any) -> None:
        """Enter a key that was agreed on; values that come back are of the kind of `array`."""
        self.infos[info.key] = info
        if info.form:
            self.tables[info.key] = info
            self._kinds[info.key] = "torch" if isinstance(array, RowSparse) and array.is_torch else "numpy"
            return
        self._kinds[info.key] = values.kind_of(array)
        dtype = info.dtype
        if dtype is not DType.BFLOAT16:  # whose bits look like an array of another type
            self.plain[info.key] = (info, info.shape, dtype.storage)
        self.nbytes += info.size * dtype.itemsize

    def plain_one(self, key: Any, value: Any, writable: bool = False) -> tuple[KeyInfo, Bits] | None:
        """A single key and its NumPy array in order, with as few checks as possible, for loops over keys; else None."""
        if type(key) is not int and type(key) is not str:
            return None
        expected = self.plain.get(key)
        if expected is None or type(value) is not np.ndarray:
            return None
        info, shape, dtype = expected
        flags = _WRITABLE if writable else _READABLE
        if value.dtype is not dtype or value.shape != shape or value.flags.num & flags != flags:
            return None
        return info, value if value.ndim == 1 else value.reshape(-1)

    def plain_list(self, key: Any, value: Any, writable: bool = False) -> tuple[PlainList, list[Bits]] | None:
        """The usual case: a list of different keys, a NumPy array in order for each. Else None.

        With thousands of small keys these checks are much of a step, so each is a pass of C over the list.
        """
        if not isinstance(key, list | tuple) or not isinstance(value, list | tuple) or len(key) != len(value):
            return None
        expected, arrays = self._plain_list_of(tuple(key)), list(value)
        if expected is None or set(map(type, arrays)) != {np.ndarray}:
            return None
        if list(map(_dtype_of, arrays)) != expected.dtypes or list(map(_shape_of, arrays)) != expected.shapes:
            return None
        flags = _WRITABLE if writable else _READABLE
        if any(found & flags != flags for found in {array.flags.num for array in arrays}):
            return None
        return expected, arrays if expected.is_flat else [array.reshape(-1) for array in arrays]

    def _plain_list_of(self, names: tuple[Any, ...]) -> PlainList | None:
        """The form of arrays for these keys; None if they are not all different, known and of the same type."""
        if set(map(type, names)) not in ({int}, {str}):  # True and 1.0 equal 1
            return None
        found = self._lists.get(names)
        if found is not None:
            return found
        rows = [self.plain.get(one) for one in names]
        plain = [row for row in rows if row is not None]
        if len(plain) < len(names) or len(set(names)) < len(names):
            return None
        infos, shapes, dtypes = zip(*plain, strict=True)
        largest = max(info.size * dtype.itemsize for info, _, dtype in plain)
        found = PlainList(infos, list(dtypes), list(shapes), set(map(len, shapes)) == {1}, largest)
        with self._lists_lock:
            self.listed += 0 if names in self._lists else len(names)
            self._lists[names] = found
            while self.listed > max(LISTED_KEYS_MIN, LISTED_TIMES_MAX * len(self.infos)) and len(self._lists) > 1:
                oldest = next(iter(self._lists))
                if self._lists.pop(oldest, None) is not None:
                    self.listed -= len(oldest)
        return found

    def like(self, info: KeyInfo, bits: Any) -> Any:
        """An array of the key's kind, shape and dtype that shows these bits."""
        return values.like(self._kinds[info.key], info.shape, info.dtype, bits)

    def no_rows(self, info: KeyInfo) -> RowSparse:
        """A `RowSparse` of a table without any rows, of the table's kind."""
        if self._kinds[info.key] == "torch":
            empty = values.like("torch", (0, *info.shape[1:]), info.dtype, np.zeros(0, info.dtype.storage))
            return RowSparse([], empty, info.shape)
        return RowSparse.zeros(info.shape, info.dtype.label)

    def undeclared(self, given: KeyArrays) -> list[Fresh]:
        """The keys of an init that are new.

        Raises:
            InitMismatch: a key that is not new has another shape or dtype now.
            TypeError, ValueError: the arrays are not the first values of a key; the message names it.
        """
        fresh = []
        for key, arrays in given:
            arrays = [as_table(key, array) for array in arrays]
            shape, dtype, form = described(key, arrays)
            info = self.infos.get(key)
            if info is None:
                fresh.append((key, arrays[0], shape, dtype, form))
            elif (shape, dtype, form) != (info.shape, info.dtype, info.form):
                kinds = [f", as a table of rows ({one})" if one else "" for one in (info.form, form)]
                raise InitMismatch(
                    f"{name_of(key)} was initialised with shape {info.shape} and dtype {info.dtype.label}{kinds[0]},"
                    f" and now with shape {shape} and dtype {dtype.label}{kinds[1]}"
                )
        values.require_same_type(tuple(one[0] for one in fresh), self.infos)
        return fresh

    def matched(self, given: KeyArrays) -> Matched:
        """Check that every array fits its key, and replace in `given` an array of another dtype by a copy.

        Raises:
            KeyNotInitialised: a key is not known.
            TypeError, ValueError: an array has another shape, or a dtype that no key has.
        """
        matched = [(self[key], arrays) for key, arrays in given]
        for info, arrays in matched:
            for i, array in enumerate(arrays):
                if not values.has_dtype(info.key, array, info.shape, info.dtype):
                    arrays[i] = values.converted(array, info.dtype)
        return matched

    def contributed(self, given: KeyArrays, devices: Devices) -> Matched:
        """Do the same for what a call contributes to arrays; rows become arrays."""
        return self.matched([(key, [as_dense(key, array, devices) for array in arrays]) for key, arrays in given])

    def writable(self, given: KeyArrays, skips_rows: bool = False) -> Matched:
        """Check that a result can be written into every array, of any dtype.

        Args:
            given: keys and their arrays.
            skips_rows: whether a `RowSparse` or sparse tensor is left out, with a warning, instead of refused.

        Raises:
            KeyNotInitialised: a key is not known.
            TypeError, ValueError: an array has another shape, or cannot be written.
        """
        matched = [(self[key], arrays) for key, arrays in given]
        for info, arrays in matched:
            has_rows = False
            for array in arrays:
                if is_sparse(array):
                    has_rows = True
                else:
                    values.require_writable(info.key, array, info.shape, info.dtype)
            if has_rows:
                self._leave_rows(info, skips_rows)
                arrays[:] = [array for array in arrays if not is_sparse(array)]
        return matched

    def _leave_rows(self, info: KeyInfo, skips: bool) -> None:
        if not skips:
            raise TypeError(f"{info.name} is an array, which cannot be written into rows: give an array as out")
        if not self._has_warned:
            self._has_warned = True
            LOG.warning("%s is an array: pull leaves rows given as out as they are; give an array as out", info.name)


def named(infos: Sequence[KeyInfo]) -> str:
    """These keys for people, such as ``key 'fc1'`` or ``3 keys (0, 1, 2)``."""
    return infos[0].name if len(infos) == 1 else names_of([info.key for info in infos[:LISTED_MAX]], len(infos))


def described(key: Key, arrays: Sequence[Any]) -> tuple[tuple[int, ...], DType, str]:
    """Shape, element type and form of a key's first values.

    Raises:
        TypeError, ValueError: they are none, or no such values; the message names the key.
    """
    first = arrays[0] if arrays else None
    if isinstance(first, _TABLES):
        require_table(key, first.shape, first.dtype.itemsize)
        return first.shape, first.dtype, form_of(first)
    return *values.first_shape(key, arrays), ""


def alone(fresh: Fresh) -> KeyInfo:
    """The `KeyInfo` of a key that lies in this process alone."""
    key, _, shape, dtype, form = fresh
    return KeyInfo(key, shape, dtype, (Slice(0, 0, 0, math.prod(shape)),), form=form)


def require_sendable(fresh: Sequence[Fresh]) -> None:
    """Refuse keys and shapes that no message can carry.

    Raises:
        ValueError: a key is too long or no text, or a shape is too large; the message names the key.
    """
    shapes: set[tuple[int, ...]] = set()
    for key, _, shape, _, _ in fresh:
        _require_sendable_key(key)
        if shape not in shapes:  # many keys have few shapes
            _require_sendable_shape(key, shape)
            shapes.add(shape)


def _require_sendable_key(key: Key) -> None:
    """What a message can carry as a key, checked where the user can see it."""
    if isinstance(key, str):
        if len(key) <= DEFAULT.key_bytes_max and key.isascii():
            return
        try:
            nbytes = len(key.encode())
        except UnicodeEncodeError:
            raise ValueError(f"key {key[:40]!r} has characters that are not text (lone surrogates)") from None
        if nbytes > DEFAULT.key_bytes_max:
            raise ValueError(f"key {key[:40]!r}… is longer than {DEFAULT.key_bytes_max} bytes; give it a shorter name")
    elif not -(1 << 63) <= key < 1 << 63:
        raise ValueError(f"key {key} does not fit into 64 bits; use a smaller number, or a name")


def _require_sendable_shape(key: Key, shape: tuple[int, ...]) -> None:
    if len(shape) > DEFAULT.dims_max:
        raise ValueError(f"{name_of(key)} has {len(shape)} dimensions; at most {DEFAULT.dims_max} are supported")
    if math.prod(length for length in shape if length) > DEFAULT.elements_max:
        raise ValueError(f"{name_of(key)} has shape {shape}; at most {DEFAULT.elements_max} elements are supported")


Ids: TypeAlias = npt.NDArray[np.int64]
"""(k,) row ids, strictly ascending."""
Rows: TypeAlias = tuple[Ids, npt.NDArray[Any]]
"""Ids, and the bits of their rows: (k, row length)."""

_PLAIN = (np.ndarray, RowSparse)

ROW_BYTES_MAX = 8 << 20
"""A row travels in a single message."""


def is_sparse(value: Any) -> bool:
    """Whether a value is rows instead of an array."""
    if isinstance(value, _PLAIN):
        return isinstance(value, RowSparse)
    return values.is_tensor(value) and value.layout is not sys.modules["torch"].strided


def as_table(key: Key, value: Any) -> Any:
    """A sparse tensor as `RowSparse`; everything else as it is.

    Raises:
        TypeError, ValueError: a sparse tensor of another layout, or with several sparse dimensions.
    """
    if isinstance(value, _PLAIN) or not is_sparse(value):
        return value
    try:
        return RowSparse.from_torch(value)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{name_of(key)}: {error}") from None


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
        raise ValueError(f"{name_of(key)}: the rows of a table of shape {tuple(shape)} have no elements")
    if nbytes > ROW_BYTES_MAX:
        raise ValueError(
            f"{name_of(key)}: a row of shape {tuple(shape[1:])} has {nbytes} bytes, where {ROW_BYTES_MAX} are allowed."
            " Initialise it with an array instead, which is cut anywhere"
        )


def require_no_tables(tables: Container[Key], replaced: Sequence[tuple[Key, Any]]) -> None:
    """Refuse new values for tables that have values."""
    for key, _ in replaced:
        if key in tables:
            raise ValueError(
                f"{name_of(key)} is a table of rows that has values already, which broadcast does not replace:"
                " push to it, or load a checkpoint"
            )


def as_dense(key: Key, array: Any, devices: Devices) -> Any:
    """A sparse value as an array, for a key that is an array: where it lies, if that is a GPU that is used."""
    if not is_sparse(array):
        return array
    if values.gpu_of(array) is not None:
        from kvdist.kvstore.device import dense_on_gpu  # a feature at a seam: loaded where it is used

        dense = dense_on_gpu(array, devices)
        if dense is not None:
            return dense
    return as_table(key, array).to_dense()


def gradient(info: KeyInfo, arrays: Sequence[Any], devices: Devices) -> Rows | None:
    """The sum over devices of values for a table, in its element type; None without values.

    Args:
        info: the table.
        arrays: per device rows, or an array of the whole table's shape, all of whose rows are meant.
        devices: the GPUs that are used.

    Raises:
        TypeError, ValueError: a value does not fit the table; the message names the key.
    """
    if names_gpus([(info, arrays)]):
        from kvdist.kvstore.device import merged_gradient  # a feature at a seam: loaded where it is used

        there = merged_gradient(info, arrays, devices)
        if there is not None:
            return there
    parts = [_rows_of(info, array) for array in arrays]
    if len(parts) < 2:
        return parts[0] if parts else None
    ids, rows = (np.concatenate(column) for column in zip(*parts, strict=True))
    return canonical(ids, rows, info.dtype)


def require_rows(info: KeyInfo, value: RowSparse) -> None:
    """Refuse rows of a table of another shape."""
    if value.shape != info.shape:
        raise ValueError(
            f"{name_of(info.key)} is a table of shape {info.shape}, but the rows are of shape {value.shape}: create"
            f" them with RowSparse(indices, values, {info.shape})"
        )


def wanted(info: KeyInfo, row_ids: Any) -> Ids:
    """The rows that a pull wants: their ids, each once and ascending.

    Args:
        info: the table.
        row_ids: integers of any shape and order, with repetitions: an array, a tensor or a list.

    Raises:
        TypeError: they are not integers.
        ValueError: an id is not a row of the table, or lists of ids differ in length.
    """
    try:
        given = row_ids.detach().cpu().numpy() if values.is_tensor(row_ids) else np.asarray(row_ids)
    except ValueError:
        raise ValueError(
            f"{name_of(info.key)}: the lists of row ids differ in length, so they do not form an array"
        ) from None
    if given.size == 0:
        return np.zeros(0, np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"{name_of(info.key)}: row ids must be integers, not {given.dtype}; cast them")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high >= info.shape[0]:
        wrong = low if low < 0 else high
        raise ValueError(f"{name_of(info.key)} has rows 0 to {info.shape[0] - 1}, and row {wrong} was asked for")
    if given.ndim == 1 and is_strictly_increasing(given):  # one pass instead of a sort
        return given.astype(np.int64)
    return np.unique(given.astype(np.int64, copy=False))


def _rows_of(info: KeyInfo, array: Any) -> Rows:
    value = as_table(info.key, array)
    if isinstance(value, RowSparse):
        require_rows(info, value)
        ids, rows = value.canonical()
        return ids, values.recast(rows, value.dtype, info.dtype)
    if not values.has_dtype(info.key, value, info.shape, info.dtype):
        value = values.converted(value, info.dtype)
    return np.arange(info.shape[0]), values.read_bits(value).reshape(info.shape[0], row_length(info.shape))
