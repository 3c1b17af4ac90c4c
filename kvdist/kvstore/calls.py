"""Calls that may name arrays and tables of rows in one list: each key goes its way, and one future stands for all.

Everything is checked before the first part is sent. As long as a store has no tables, this costs one look.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias

import numpy as np

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo
from kvdist.kvstore import values
from kvdist.kvstore.base import Keys, Value
from kvdist.kvstore.device import Devices
from kvdist.kvstore.keys import Ids, KeyTable, Rows, as_table, gradient, require_rows, wanted
from kvdist.kvstore.staging import Lending, PushOptions
from kvdist.kvstore.values import Bits, Key
from kvdist.rowsparse import RowSparse
from kvdist.runtime.waits import AwaitedFuture

LOG = logging.getLogger("kvdist")

_Plain: TypeAlias = tuple[Keys, Value] | None
"""Keys and values of arrays, if there are any among those of a call."""


class ArrayMoves(Protocol):
    """ArrayTransfers values of keys that are arrays; every method as of `Calls`."""

    def push(self, key: Keys, value: Value, priority: int, options: PushOptions) -> None: ...

    def push_async(self, key: Keys, value: Value, priority: int, options: PushOptions) -> Future[None]: ...

    def pull(self, key: Keys, out: Value | None, priority: int) -> Future[Any]: ...

    def pull_gathered(self, key: Keys, out: Value, priority: int) -> Future[Any]: ...

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None,
        priority: int,
        options: PushOptions,
        lending: Lending,
        hold: bool = False,
    ) -> Future[Any]: ...

    def watch(self, future: Future[None]) -> None:
        """Remember the error of a push, as nobody waits for it."""


class TableMoves(Protocol):
    """ArrayTransfers rows of keys that are tables."""

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Push rows; None: there is no gradient here."""

    def pull(self, info: KeyInfo, ids: Ids, out: Bits, priority: int) -> Future[None]:
        """Pull the rows `ids`, strictly ascending, into `out`: (k · row length,)."""


@dataclass(slots=True)
class _RowPull:
    """Rows that a call wants, the memory that takes them, and what to do then."""

    info: KeyInfo
    ids: Ids
    bits: Bits
    finish: Callable[[], None]


class Calls:
    """What `DistStore` lets in.

    Args:
        keys: the initialised keys.
        arrays: moves those that are arrays.
        rows: moves those that are tables.
        require: raises `KeyNotInitialised` for a key that is neither.
        devices: the GPUs that are used.
    """

    def __init__(
        self,
        keys: KeyTable,
        arrays: ArrayMoves,
        rows: TableMoves,
        require: Callable[[Key], object],
        devices: Devices,
    ) -> None:
        self._keys = keys
        self._arrays = arrays
        self._rows = rows
        self._require = require
        self._devices = devices
        self._said_skipped = False

    def push(self, key: Keys, value: Value, priority: int, options: PushOptions) -> None:
        """Push; nobody waits for the answer."""
        if not self._keys.tables:
            self._arrays.push(key, value, priority, options)
            return
        plain, gradients = self._pushed(key, value)
        if plain is not None:
            self._arrays.push(*plain, priority, options)
        for info, rows in gradients:
            self._arrays.watch(self._rows.push(info, rows, priority, options))

    def push_async(self, key: Keys, value: Value, priority: int, options: PushOptions) -> Future[None]:
        """Push; the future resolves when it is counted."""
        if not self._keys.tables:
            return self._arrays.push_async(key, value, priority, options)
        plain, gradients = self._pushed(key, value)
        futures = [] if plain is None else [self._arrays.push_async(*plain, priority, options)]
        return combined(futures + [self._rows.push(info, rows, priority, options) for info, rows in gradients])

    def pull(self, key: Keys, out: Value | None, priority: int, ignore_sparse: bool) -> Future[Any]:
        """Pull into `out`, or into new arrays."""
        if not self._keys.tables:
            return self._arrays.pull(key, out, priority)
        if out is None:
            return self._pull_new(key, priority, ignore_sparse)
        plain, places = self._apart(key, out)
        pulls = [pull for info, arrays in places for pull in self._places(info, arrays, ignore_sparse)]
        futures = [] if plain is None else [self._arrays.pull(*plain, priority)]
        return combined(futures + self._submitted(pulls, priority), lambda: _finish(pulls))

    def pull_gathered(self, key: Keys, out: Value, priority: int, ignore_sparse: bool) -> Future[Any]:
        """`pull` into `out`, together with other pulls of small keys that are asked for one by one."""
        if not self._keys.tables or (isinstance(key, (int, str)) and key not in self._keys.tables):
            return self._arrays.pull_gathered(key, out, priority)
        return self.pull(key, out, priority, ignore_sparse)

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None,
        priority: int,
        options: PushOptions,
        lending: Lending,
        hold: bool = False,
    ) -> Future[Any]:
        """Push and pull the result; with `hold` the future has per key what shows it, or None."""
        if not self._keys.tables:
            return self._arrays.pushpull(key, value, out, priority, options, lending, hold)
        plain, gradients = self._pushed(key, value)
        plain_out, places = self._apart(key, value if out is None else out)
        pulls = [pull for info, arrays in places for pull in self._results(info, arrays, in_place=out is None)]
        futures: list[Future[Any]] = []
        if plain is not None and plain_out is not None:
            results = None if out is None else plain_out[1]
            futures.append(self._arrays.pushpull(*plain, results, priority, options, lending, hold))
        futures += [self._rows.push(info, rows, priority, options) for info, rows in gradients]
        futures += self._submitted(pulls, priority)

        def finish() -> Any:
            _finish(pulls)
            if not hold:
                return None
            shown = iter(futures[0].result() if plain is not None else ())
            return [None if one in self._keys.tables else next(shown) for one, _ in values.pairs(key, value)]

        return combined(futures, finish)

    def row_sparse_pull(self, key: Keys, out: Any, priority: int, row_ids: Any) -> Future[Any]:
        """Pull rows of tables: see `KVStore.row_sparse_pull`."""
        if row_ids is None:
            raise ValueError("row_sparse_pull needs row_ids: the ids of the rows, for each key or for all of them")
        names = values.keys(key)
        is_list = isinstance(key, (list, tuple))
        ids_of = list(row_ids) if is_list and isinstance(row_ids, (list, tuple)) else [row_ids] * len(names)
        if out is None:
            outs = [None] * len(names)
        else:
            outs = list(out) if is_list and isinstance(out, (list, tuple)) else [out]
        if len(ids_of) != len(names) or len(outs) != len(names):
            raise ValueError(f"there are {len(names)} keys, {len(ids_of)} row_ids and {len(outs)} places for results")
        made: list[RowSparse] = []
        pulls: list[_RowPull] = []
        for name, ids, own in zip(names, ids_of, outs, strict=True):
            info = self._table(name)
            targets = [self._made(info)] if own is None else list(own) if isinstance(own, (list, tuple)) else [own]
            made += targets[:1]
            pulls += self._named_rows(info, targets, ids)

        def finish() -> Any:
            _finish(pulls)
            return None if out is not None else made if is_list else made[0]

        return combined(self._submitted(pulls, priority), finish)

    # Parts of calls.

    def _apart(self, key: Keys, value: Value) -> tuple[_Plain, list[tuple[KeyInfo, list[Any]]]]:
        """What of a call is about arrays, as arguments of one like it, and what about tables."""
        tables = self._keys.tables
        if not isinstance(key, (list, tuple)):
            one = values.keys(key)[0]
            return ((one, value), []) if one not in tables else (None, [(tables[one], values.pairs(one, value)[0][1])])
        pairs = values.pairs(key, value)
        plain = [(one, arrays) for one, arrays in pairs if one not in tables]
        rest = [(tables[one], arrays) for one, arrays in pairs if one in tables]
        return (([one for one, _ in plain], [arrays or None for _, arrays in plain]) if plain else None), rest

    def _pushed(self, key: Keys, value: Value) -> tuple[_Plain, list[tuple[KeyInfo, Rows | None]]]:
        plain, tables = self._apart(key, value)
        return plain, [(info, gradient(info, arrays, self._devices)) for info, arrays in tables]

    def _submitted(self, pulls: Sequence[_RowPull], priority: int) -> list[Future[Any]]:
        return [self._rows.pull(pull.info, pull.ids, pull.bits, priority) for pull in pulls]

    def _pull_new(self, key: Keys, priority: int, ignore_sparse: bool) -> Future[Any]:
        """Every value of the keys: new arrays, and `RowSparse` with all rows."""
        futures: list[Future[Any]] = []
        parts: list[Callable[[], Any]] = []
        for one in values.keys(key):
            if one not in self._keys.tables:
                future = self._arrays.pull(one, None, priority)
                futures.append(future)
                parts.append(future.result)
                continue
            info = self._keys.tables[one]
            if ignore_sparse:
                raise ValueError(
                    f"key {one!r} is a table of rows: row_sparse_pull brings the rows that you name,"
                    " pull(…, ignore_sparse=False) all of them, and pull(…, out=array) writes them into an array"
                )
            target = self._made(info)
            pulls = self._all_rows(info, target)
            futures += self._submitted(pulls, priority)
            parts.append(partial(_finished, pulls, target))
        many = isinstance(key, (list, tuple))
        return combined(futures, lambda: [part() for part in parts] if many else parts[0]())

    def _places(self, info: KeyInfo, arrays: Sequence[Any], ignore_sparse: bool) -> list[_RowPull]:
        """What a `pull` into these wants of a table: all rows."""
        pulls = []
        for array in arrays:
            if not isinstance(array, RowSparse):
                pulls.append(self._into_array(info, array))
            elif not ignore_sparse:
                pulls += self._all_rows(info, array)
            elif not self._said_skipped:
                self._said_skipped = True
                LOG.info("pull leaves RowSparse results as they are; use row_sparse_pull, or ignore_sparse=False")
        return pulls

    def _results(self, info: KeyInfo, arrays: Sequence[Any], in_place: bool) -> list[_RowPull]:
        """What a `pushpull` into these wants of a table: the rows that a `RowSparse` names, all rows for an array."""
        pulls = []
        for array in arrays:
            if isinstance(array, RowSparse):
                pulls += self._named_rows(info, [array], array.indices)
            elif in_place and array is not as_table(info.key, array):
                raise TypeError(
                    f"key {info.key!r}: rows cannot be written into a sparse tensor; give out=, or push a RowSparse"
                )
            else:
                pulls.append(self._into_array(info, array))
        return pulls

    def _into_array(self, info: KeyInfo, array: Any) -> _RowPull:
        values.require_writable(info.key, array, info.shape, info.dtype)
        bits = values.writable_bits(array)
        if bits is not None:
            return _RowPull(info, np.arange(info.shape[0]), bits, lambda: None)
        made = np.empty(info.size, info.dtype.storage)
        return _RowPull(info, np.arange(info.shape[0]), made, lambda: values.write_bits(array, made))

    def _all_rows(self, info: KeyInfo, target: RowSparse) -> list[_RowPull]:
        require_rows(info, target)
        count = info.shape[0]
        try:
            # The values before the ids: so a table far larger than the memory is refused before any of it is filled.
            bits = _room(info, count)
            return [self._named(info, [target], np.arange(count), bits)]
        except MemoryError as error:
            raise MemoryError(
                f"key {info.key!r}: there is no memory for all {count} rows of the table,"
                f" {info.size * info.dtype.itemsize} bytes: name those that you need to row_sparse_pull"
            ) from error

    def _named_rows(self, info: KeyInfo, targets: Sequence[Any], row_ids: Any) -> list[_RowPull]:
        """Pulls into `RowSparse` results: one for all of them if they want the same rows."""
        for target in targets:
            if not isinstance(target, RowSparse):
                raise TypeError(
                    f"key {info.key!r}: rows are pulled into a RowSparse, not into {type(target).__name__};"
                    f" RowSparse.zeros({info.shape}) makes one"
                )
            require_rows(info, target)
        each = list(row_ids) if isinstance(row_ids, (list, tuple)) and _are_arrays(row_ids) else [row_ids]
        if len(each) not in (1, len(targets)):
            raise ValueError(f"key {info.key!r}: there are {len(targets)} results and {len(each)} row_ids")
        shares = [list(targets)] if len(each) == 1 else [[target] for target in targets]
        found = [wanted(info, ids) for ids in each]
        return [
            self._named(info, share, ids, _room_in(info, share, len(ids)))
            for share, ids in zip(shares, found, strict=True)
        ]

    def _named(self, info: KeyInfo, targets: Sequence[RowSparse], ids: Ids, bits: Bits) -> _RowPull:
        def finish() -> None:
            rows = bits.reshape(len(ids), *info.shape[1:])
            for i, target in enumerate(targets):
                target.assign(ids, rows if i == 0 else rows.copy())

        return _RowPull(info, ids, bits, finish)

    def _made(self, info: KeyInfo) -> RowSparse:
        return self._keys.no_rows(info)

    def _table(self, key: Key) -> KeyInfo:
        info = self._keys.tables.get(key)
        if info is None:
            self._require(key)
            raise TypeError(
                f"key {key!r} is not a table of rows: a key initialised with a RowSparse or LazyRows is one,"
                " and pull brings arrays"
            )
        return info


def _room_in(info: KeyInfo, targets: Sequence[RowSparse], rows: int) -> Bits:
    """The memory of a result that has as many rows already: the first touch of fresh memory costs more than a copy."""
    own = targets[0].values if len(targets) == 1 and len(targets[0]) == rows else None
    may_write = values.is_tensor(own) or (isinstance(own, np.ndarray) and own.flags.writeable)
    bits = values.writable_bits(own) if may_write else None
    return _room(info, rows) if bits is None else bits


def _room(info: KeyInfo, rows: int) -> Bits:
    """Memory for so many rows of a table."""
    return np.empty(rows * row_length(info.shape), info.dtype.storage)


def combined(futures: Sequence[Future[Any]], finish: Callable[[], Any] = lambda: None) -> Future[Any]:
    """One future for several: when all are done it has what `finish` returns, or the first error.

    `finish` is called on the thread that resolves the last one.
    """
    whole: Future[Any] = AwaitedFuture()
    whole.set_running_or_notify_cancel()
    lock = threading.Lock()
    left = len(futures)

    def one_is_done(_: Any) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left > 0:
                return
        errors = [error for error in (future.exception() for future in futures) if error is not None]
        if errors:
            whole.set_exception(errors[0])
            return
        try:
            whole.set_result(finish())
        except Exception as error:  # noqa: BLE001  # whoever waits for the future gets it
            whole.set_exception(error)

    if not futures:
        left = 1
        one_is_done(None)
    for future in futures:
        future.add_done_callback(one_is_done)
    return whole


def _finish(pulls: Sequence[_RowPull]) -> None:
    for pull in pulls:
        pull.finish()


def _finished(pulls: Sequence[_RowPull], target: RowSparse) -> RowSparse:
    _finish(pulls)
    return target


def _are_arrays(row_ids: Sequence[Any]) -> bool:
    """Whether a list of row ids is one for each result, not a list of numbers."""
    return bool(row_ids) and all(isinstance(one, np.ndarray) or values.is_tensor(one) for one in row_ids)
