"""What a worker knows of the keys of a store, and the checks of what a call says about them.

Whatever can be known to be wrong here raises here, before anything is sent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised
from kvdist.kvstore import values
from kvdist.kvstore.tables import form_of, require_table
from kvdist.kvstore.values import Key
from kvdist.protocol.limits import DEFAULT
from kvdist.rowsparse import LazyRows, RowSparse

Given = Sequence[tuple[Key, list[Any]]]
"""Keys and per key the arrays of its devices."""
Fresh = tuple[Key, Any, tuple[int, ...], DType, str]
"""A new key with its first array, its shape, dtype and form."""
Matched = Sequence[tuple[KeyInfo, list[Any]]]
"""The same with what is known of each key, and the arrays found to fit it."""


_TABLES = (RowSparse, LazyRows)


class KeyTable:
    """The initialised keys.

    Attributes:
        infos: key → shape, dtype and where it lives.
        nbytes: of all keys together.
        plain: for keys of NumPy's own types what an array must look like: (info, shape, dtype).
    """

    def __init__(self) -> None:
        self.infos: dict[Key, KeyInfo] = {}
        self.nbytes = 0
        self.plain: dict[Key, tuple[KeyInfo, tuple[int, ...], np.dtype[Any]]] = {}
        self.tables: dict[Key, KeyInfo] = {}
        """Those that are tables of rows."""
        self._kinds: dict[Key, str] = {}

    def __len__(self) -> int:
        return len(self.infos)

    def __contains__(self, key: Key) -> bool:
        return key in self.infos

    def __getitem__(self, key: Key) -> KeyInfo:
        """What is known of a key.

        Raises:
            KeyNotInitialised: nothing is.
        """
        info = self.infos.get(key)
        if info is None:
            raise KeyNotInitialised(values.unknown_key(key, self.infos))
        return info

    @property
    def all(self) -> tuple[KeyInfo, ...]:
        """What is known of every key, in the order of their initialisation."""
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

    def like(self, info: KeyInfo, bits: Any) -> Any:
        """An array of the key's kind, shape and dtype that shows these bits."""
        return values.like(self._kinds[info.key], info.shape, info.dtype, bits)

    def no_rows(self, info: KeyInfo) -> RowSparse:
        """A `RowSparse` of a table without any rows, of the table's kind."""
        if self._kinds[info.key] == "torch":
            empty = values.like("torch", (0, *info.shape[1:]), info.dtype, np.zeros(0, info.dtype.storage))
            return RowSparse([], empty, info.shape)
        return RowSparse.zeros(info.shape, info.dtype.label)

    def undeclared(self, given: Given) -> list[Fresh]:
        """The keys of an init that are new.

        Raises:
            InitMismatch: a key that is not new has another shape or dtype now.
            TypeError, ValueError: a key or shape cannot be sent.
        """
        fresh = []
        shapes: set[tuple[int, ...]] = set()
        for key, arrays in given:
            shape, dtype, form = described(key, arrays)
            info = self.infos.get(key)
            if info is None:
                _require_sendable_key(key)
                if shape not in shapes:  # many keys have few shapes
                    _require_sendable_shape(key, shape)
                    shapes.add(shape)
                fresh.append((key, arrays[0], shape, dtype, form))
            elif (shape, dtype, form) != (info.shape, info.dtype, info.form):
                kinds = [f", as a table of rows ({one})" if one else "" for one in (info.form, form)]
                raise InitMismatch(
                    f"key {key!r} was initialised with shape {info.shape} and dtype {info.dtype.label}{kinds[0]},"
                    f" and now with shape {shape} and dtype {dtype.label}{kinds[1]}"
                )
        values.require_same_type(tuple(one[0] for one in fresh), self.infos)
        return fresh

    def matched(self, given: Given, *, writable: bool = False) -> Matched:
        """What is known of the keys, when every array fits.

        Raises:
            KeyNotInitialised: a key is not known.
            TypeError, ValueError: an array has another dtype or shape, or cannot be written.
        """
        check = values.require_writable if writable else values.require
        matched = [(self[key], arrays) for key, arrays in given]
        for info, arrays in matched:
            for array in arrays:
                check(info.key, array, info.shape, info.dtype)
        return matched


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
        raise ValueError(f"key {key!r} has {len(shape)} dimensions; at most {DEFAULT.dims_max} are supported")
    if math.prod(length for length in shape if length) > DEFAULT.elements_max:
        raise ValueError(f"key {key!r} has shape {shape}; at most {DEFAULT.elements_max} elements are supported")
