"""The keys of a collective store: what all workers have declared, in which type each travels, what fits them.

What is wrong with a call is found here before the others hear of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised
from kvdist.kvstore import values
from kvdist.kvstore.allreduce import dtype_of
from kvdist.kvstore.base import Keys, Value
from kvdist.kvstore.device import Devices
from kvdist.kvstore.keys import as_dense, as_table, is_sparse
from kvdist.kvstore.values import Key, Shape
from kvdist.optimizer.compression import Half, from_params
from kvdist.rowsparse import LazyRows, RowSparse

ROWS_ADVICE = (
    "tables of rows need servers, which this store does not have: use 'hybrid', which keeps them on servers and sums"
    " everything else without, or 'dist'"
)

Info = tuple[Shape, DType]
Fresh = tuple[Key, Any, Info]
"""A key that is new, its value, and what it is."""
Agree = Callable[[str, Callable[[list[str]], str]], None]
"""Compares what all workers say; the second argument makes the sentence where they differ."""


class CollectiveKeys:
    """The keys of one store.

    Args:
        devices: the GPUs that it uses.
    """

    def __init__(self, devices: Devices) -> None:
        self.infos: dict[Key, Info] = {}
        self.types: dict[Key, tuple[torch.dtype, torch.dtype]] = {}
        """Of a key's values, and that in which they travel."""
        self.half: Half | None = None
        """As what values of float32 travel, but for those of `uncompressed`."""
        self._uncompressed: set[Key] = set()
        self._devices = devices

    def __len__(self) -> int:
        return len(self.infos)

    def __getitem__(self, key: Key) -> Info:
        info = self.infos.get(key)
        if info is None:
            raise KeyNotInitialised(values.unknown_key(key, self.infos))
        return info

    def fresh(self, given: Sequence[tuple[Key, list[Any]]]) -> list[Fresh]:
        """Those that are new, with what this worker says of them.

        Raises:
            InitMismatch: one has been declared otherwise before.
            TypeError, ValueError: a value cannot be a key's.
        """
        fresh = []
        for one, arrays in given:
            if any(isinstance(as_table(one, array), RowSparse | LazyRows) for array in arrays):
                raise TypeError(f"key {one!r}: {ROWS_ADVICE}")
            info = values.first_shape(one, arrays)
            known = self.infos.get(one, info)
            if known != info:
                raise InitMismatch(f"key {one!r} was initialised with {_said(known)}, and now with {_said(info)}")
            if one not in self.infos:
                fresh.append((one, arrays[0], info))
        values.require_same_type((one for one, _, _ in fresh), self.infos)
        for one, _, (_, dtype) in fresh:
            if self._is_compressed(one) and dtype is not DType.FLOAT32:
                raise TypeError(
                    f"key {one!r} is {dtype.label}, and this store compresses gradients, which it can do for float32"
                    " only: convert it, or call leave_uncompressed for this key before"
                )
        return fresh

    def add(self, fresh: Sequence[Fresh], agree: Agree) -> list[tuple[Key, Any]]:
        """Know these, which all workers have declared alike when this returns; they, with their values.

        Raises:
            InitMismatch: workers have declared different ones.
        """
        if fresh:
            agree("\n".join(f"key {one!r}: {_said(info)}" for one, _, info in fresh), first_difference)
        self.infos.update((one, info) for one, _, info in fresh)
        for one, _, (_, dtype) in fresh:
            own = dtype_of(dtype.label)
            is_compressed = self.half is not None and self._is_compressed(one)
            self.types[one] = own, dtype_of(self.half.dtype.label) if self.half and is_compressed else own
        return [(one, array) for one, array, _ in fresh]

    def matched(self, key: Keys, value: Value) -> list[tuple[Key, list[Any]]]:
        """The keys of a call with what is given for them, which fits; rows as arrays."""
        found = []
        for one, arrays in values.pairs(key, value):
            shape, dtype = self[one]
            if any(map(is_sparse, arrays)):
                arrays = [as_dense(as_table(one, array), self._devices) for array in arrays]
            for array in arrays:
                values.require(one, array, shape, dtype)
            found.append((one, arrays))
        return found

    def writable(self, key: Keys, out: Value) -> list[tuple[Key, list[Any]]]:
        """The keys of a call with where it wants its results, which fits."""
        places = values.pairs(key, out)
        for one, arrays in places:
            shape, dtype = self[one]
            for array in arrays:
                values.require_writable(one, array, shape, dtype)
        return places

    def compression(self, params: Mapping[str, Any], store_type: str) -> Half:
        """The compression that is meant.

        Raises:
            TypeError, ValueError: none is, or one that comes too late, or one that cannot be summed on its way.
        """
        chosen = from_params(params)
        half = chosen.codec
        if not isinstance(half, Half):
            raise ValueError(
                f"the store {store_type!r} sums while values travel, so it compresses by 'fp16' or 'bf16' alone, not by"
                f" {chosen}; 'dist' does the others"
            )
        if self.half is not None and self.half != half:
            raise ValueError(f"this store compresses by {self.half}; it cannot change to {half}: create a second store")
        if self.half is None and self.infos:
            raise ValueError("set the compression before the first key is initialised, on every worker")
        return half

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """See `KVStore.leave_uncompressed`."""
        for one in keys:
            if one in self.infos and self._is_compressed(one):
                raise ValueError(f"key {one!r} is initialised and compressed; call leave_uncompressed before its init")
        self._uncompressed.update(keys)

    def _is_compressed(self, key: Key) -> bool:
        return self.half is not None and key not in self._uncompressed


def first_difference(all_said: list[str]) -> str:
    """The sentence for workers that have declared different keys, one a line."""
    lines = itertools.zip_longest(*(said.split("\n") for said in all_said), fillvalue="no further key")
    differing = next(one for one in lines if len(set(one)) > 1)
    said = "; ".join(f"worker-{rank}: {line}" for rank, line in enumerate(differing))
    return f"workers declared different keys: {said}. All must declare the same ones in the same order"


def _said(info: Info) -> str:
    return f"{info[1].label} of shape {info[0]}"
