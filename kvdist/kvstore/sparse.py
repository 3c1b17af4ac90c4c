"""Tables of rows: pushes and pulls of rows on a cluster, and calls that name arrays and tables in the same list.

No buffer here is as large as a table. Passes over the rows of a push: sorted and without repetitions already, one (into
the memory they are sent from); otherwise one more to bring them into order. Of a pull: one, from the transport's memory
into the result.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo, RowChunk, Run, RunKind, RunPlan, Transfer
from kvdist.kvstore import values
from kvdist.kvstore.backend import Backend, Lending, PushOptions, PushPull, TableTransfers, combined
from kvdist.kvstore.keys import Ids, Rows, as_table, gradient, require_rows, wanted
from kvdist.kvstore.push_pull import ArrayTransfers, hyperparameters_of, refuse_to_sum
from kvdist.kvstore.rowsparse import RowSparse
from kvdist.kvstore.values import Key, Keys, Value
from kvdist.naming import name_of
from kvdist.protocol.arrays import Bits, padded
from kvdist.protocol.messages import Flag
from kvdist.runtime.cluster import Cluster
from kvdist.transport.shared_memory.allocator import Allocator

LOG = logging.getLogger("kvdist")

_Plain: TypeAlias = tuple[Keys, Value] | None
"""Keys and values of arrays, if a call has any."""

MESSAGE_BYTES_MAX = 16 << 20
"""More rows are pulled by several messages, so that a server gathers some while others are under way."""
PUSHED_BYTES_MAX = 56 << 20
"""More are pushed in several. Not fewer, as a server sums only what has come whole, and joins parts by a copy. What
crosses a network travels by `Limits.slice_bytes` all the same, either way: a copy costs little then."""
BUFFERS_KEPT_MAX = 16
BUFFER_UNIT_BYTES = 64 << 10


class RowStaging:
    """Memory in which rows wait until a server has counted them; used again, because fresh memory is slow.

    Args:
        memory: where it lies.
    """

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least this number of bytes, and not much more."""
        with self._lock:
            for i, buffer in enumerate(self._free):
                if nbytes <= len(buffer) <= 4 * nbytes + BUFFER_UNIT_BYTES:
                    return self._free.pop(i)
        return self._memory.allocate(max(1, -(-nbytes // BUFFER_UNIT_BYTES)) * BUFFER_UNIT_BYTES)

    def give_back(self, buffers: Sequence[npt.NDArray[np.uint8]]) -> None:
        """These may be filled again. Called from the node's thread."""
        with self._lock:
            self._free += buffers
            del self._free[: max(0, len(self._free) - BUFFERS_KEPT_MAX)]


class RowTransfers:
    """Pushes and pulls of the tables of a store.

    Args:
        cluster: this process's membership.
        moves: what submits requests, and knows the optimizer.
    """

    def __init__(self, cluster: Cluster, moves: ArrayTransfers) -> None:
        self._cluster = cluster
        self._moves = moves
        self._buffers = RowStaging(cluster.memory)
        self._largest: dict[Key, int] = {}
        """Table → bytes of the largest push to it: what a contribution to it may be."""

    def give(self, info: KeyInfo, rows: Rows) -> None:
        """Send first values, and wait until the servers have them."""
        runs, buffers = self._laid_out(info, rows, None, (), 0)
        label = f"init of {info.name}"
        self._moves.ask(lambda number: Transfer(number, RunKind.INITIALISE, label, runs))
        self._buffers.give_back(buffers)

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Push rows; without any it still counts. None: this worker has no gradient."""
        if self._moves.optimizer is None and self._moves.must_update:
            refuse_to_sum(self._moves.on_loss)
        flags = options.flags | (Flag.EMPTY if rows is None else 0)
        setting = hyperparameters_of(info, self._moves.optimizer)
        nbytes, under_way = 0 if rows is None else sum(array.nbytes for array in rows), self._cluster.under_way
        largest = self._largest.get(info.key, 0)
        if nbytes > largest:
            self._largest[info.key] = nbytes
            under_way.grow(nbytes - largest)
        label = f"push of rows of {info.name}"

        def submit() -> Future[None]:
            runs, buffers = self._laid_out(info, rows, int(flags), (setting,), options.samples)
            return self._moves.submit(
                lambda number: Transfer(number, RunKind.PUSH, label, runs, priority),
                lambda: self._buffers.give_back(buffers),
            )

        return under_way.count(nbytes, self._moves.check, submit)

    def pull(self, info: KeyInfo, ids: Ids, out: Bits, priority: int) -> Future[None]:
        """Pull rows.

        Args:
            info: the table.
            ids: which, strictly ascending.
            out: (k · row length,) takes them.
            priority: higher goes first.
        """
        length = row_length(info.shape)
        runs = []
        for plan, begin, end in _shares(info, ids):
            nbytes_max = self._message_bytes_max(plan.server, MESSAGE_BYTES_MAX)
            step = max(1, nbytes_max // (length * info.dtype.itemsize + ids.itemsize))
            for low in range(begin, end, step):
                high = min(low + step, end)
                chunk = RowChunk(high - low, ids[low:high].view(np.uint8).data)
                sinks = [out[low * length : high * length]]
                runs.append(Run(plan, sinks=sinks, chunks=(chunk,), row_length=length))
        label = f"pull of rows of {info.name}"
        return self._moves.submit(lambda number: Transfer(number, RunKind.PULL, label, runs, priority), _nothing)

    def _message_bytes_max(self, server: int, near: int) -> int:
        return min(near, self._cluster.config.limits.slice_bytes) if self._cluster.node.view.is_far(server) else near

    def _laid_out(
        self,
        info: KeyInfo,
        rows: Rows | None,
        flags: int | None,
        settings: tuple[tuple[float, float, float], ...],
        samples: int,
    ) -> tuple[list[Run], list[npt.NDArray[np.uint8]]]:
        """What every server of the table gets, be it no rows, and the memory that it lies in."""
        ids, values = _NO_ROWS if rows is None else rows
        length = row_length(info.shape)
        row_bytes = length * info.dtype.itemsize
        own_flags = None if flags is None else np.array([flags], np.uint8)
        runs, buffers = [], []
        for plan, begin, end in _shares(info, ids):
            chunks = []
            step = max(1, self._message_bytes_max(plan.server, PUSHED_BYTES_MAX) // (row_bytes + ids.itemsize))
            for low in range(begin, end, step) or (begin,):
                count = min(low + step, end) - low
                ids_bytes, values_bytes = count * ids.itemsize, count * row_bytes
                nbytes = ids_bytes + padded(values_bytes)
                buffer = self._buffers.take(nbytes)
                buffer[:ids_bytes].view(np.int64)[...] = ids[low : low + count]
                if count:
                    target = buffer[ids_bytes : ids_bytes + values_bytes].view(info.dtype.storage)
                    target.reshape(count, length)[...] = values[low : low + count]
                buffer[ids_bytes + values_bytes : nbytes] = 0
                buffers.append(buffer)
                chunks.append(RowChunk(count, buffer[:nbytes].data))
                self._cluster.traffic.copied_in += values_bytes
            stays = self._cluster.node.view.shares_memory(plan.server)
            runs.append(Run(plan, None, (), own_flags, settings, None, None, stays, samples, chunks, length))
        return runs, buffers


_NO_ROWS: Rows = (np.zeros(0, np.int64), np.zeros((0, 1), np.uint8))


def _nothing() -> None:
    """The rows are where they are wanted."""


def _shares(info: KeyInfo, ids: Ids) -> list[tuple[RunPlan, int, int]]:
    """Return for each server of a table the plan of a run, and the stretch of the ids for it."""
    length = row_length(info.shape)
    bounds = np.searchsorted(ids, [piece.start // length for piece in info.slices[1:]]).tolist()
    stretches = zip([0, *bounds], [*bounds, len(ids)], strict=True)
    return [
        (_plan(piece.server, piece.number, info), begin, end)
        for piece, (begin, end) in zip(info.slices, stretches, strict=True)
    ]


def _plan(server: int, number: int, info: KeyInfo) -> RunPlan:
    """Return the plan of a run of a slice; each run has the number of its rows."""
    nothing = np.zeros(1, np.uint32)
    dtypes: Any = np.array([info.dtype], np.uint8)
    return RunPlan(server, np.array([number], np.uint32), nothing, dtypes, (), 0, {number: 0}, np.zeros(1, np.intp))


@dataclass(slots=True)
class _RowPull:
    """Rows that a call wants, the memory that takes them, and what to do then."""

    info: KeyInfo
    ids: Ids
    bits: Bits
    finish: Callable[[], None]


class MixedTransfers:
    """Calls that may name arrays and tables in the same list: each key goes its way, and a future stands for all.

    Everything is checked before the first part is sent.

    Args:
        backend: moves arrays and rows.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._keys = backend.keys
        self._has_logged_skip = False

    def transfer(self, call: PushPull) -> Future[Any]:
        """Push and pull keys; some may be tables."""
        if not call.pushes:
            return self._pull(call)
        plain, tables = self._apart(call.key, call.value)
        gradients = [(info, gradient(info, arrays, self._backend.devices)) for info, arrays in tables]
        if call.pulls:
            return self._pushpull(call, plain, gradients)
        futures = [] if plain is None else [self._arrays(call, *plain)]
        pushed = [self._rows.push(info, rows, call.priority, call.options) for info, rows in gradients]
        if call.lending is Lending.NOTHING:
            for future in pushed:
                future.add_done_callback(self._backend.note_failed)
        return combined([*futures, *pushed])

    def pull_rows(self, key: Keys, out: Any, priority: int, row_ids: Any) -> Future[Any]:
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
            raise ValueError(f"{len(names)} keys need as many row_ids and results, got {len(ids_of)} and {len(outs)}")
        made: list[RowSparse] = []
        pulls: list[_RowPull] = []
        for name, ids, own in zip(names, ids_of, outs, strict=True):
            info = self._table(name)
            targets = (
                [self._keys.no_rows(info)] if own is None else list(own) if isinstance(own, (list, tuple)) else [own]
            )
            made += targets[:1]
            pulls += self._named_rows(info, targets, ids)

        def finish() -> Any:
            _finish(pulls)
            return None if out is not None else made if is_list else made[0]

        return combined(self._submitted(pulls, priority), finish)

    # Parts of calls.

    def _apart(self, key: Keys, value: Value) -> tuple[_Plain, list[tuple[KeyInfo, list[Any]]]]:
        """Split a call into a call about arrays and a call about tables."""
        tables = self._keys.tables
        if not isinstance(key, (list, tuple)):
            one = values.keys(key)[0]
            return ((one, value), []) if one not in tables else (None, [(tables[one], values.pairs(one, value)[0][1])])
        pairs = values.pairs(key, value)
        plain = [(one, arrays) for one, arrays in pairs if one not in tables]
        rest = [(tables[one], arrays) for one, arrays in pairs if one in tables]
        return (([one for one, _ in plain], [arrays or None for _, arrays in plain]) if plain else None), rest

    def _arrays(self, call: PushPull, key: Keys, value: Value, out: Value = None) -> Future[Any]:
        """The part of a call that is about arrays."""
        return self._backend.transfer(replace(call, key=key, value=value, out=out))

    @property
    def _rows(self) -> TableTransfers:
        assert self._backend.rows is not None, "there are tables"
        return self._backend.rows

    def _submitted(self, pulls: Sequence[_RowPull], priority: int) -> list[Future[Any]]:
        return [self._rows.pull(pull.info, pull.ids, pull.bits, priority) for pull in pulls]

    def _pull(self, call: PushPull) -> Future[Any]:
        if isinstance(call.key, (int, str)) and call.key not in self._keys.tables:
            return self._backend.transfer(call)
        if call.out is None:
            return self._pull_new(call)
        plain, places = self._apart(call.key, call.out)
        pulls = [pull for info, arrays in places for pull in self._places(info, arrays, call.ignore_sparse)]
        # Not joined to other calls: it has a future of its own.
        arrays = replace(call, lending=Lending.EVERYTHING)
        futures = [] if plain is None else [self._arrays(arrays, plain[0], None, plain[1])]
        return combined(futures + self._submitted(pulls, call.priority), lambda: _finish(pulls))

    def _pushpull(self, call: PushPull, plain: _Plain, gradients: Sequence[tuple[KeyInfo, Rows | None]]) -> Future[Any]:
        in_place = call.out is None
        plain_out, places = self._apart(call.key, call.value if in_place else call.out)
        pulls = [pull for info, arrays in places for pull in self._results(info, arrays, in_place)]
        futures: list[Future[Any]] = []
        if plain is not None and plain_out is not None:
            futures.append(self._arrays(call, *plain, None if in_place else plain_out[1]))
        futures += [self._rows.push(info, rows, call.priority, call.options) for info, rows in gradients]
        futures += self._submitted(pulls, call.priority)

        def finish() -> Any:
            _finish(pulls)
            shown = futures[0].result() if call.shared and plain is not None else None
            if shown is None:
                return None
            rest = iter(shown)
            return [None if one in self._keys.tables else next(rest) for one, _ in values.pairs(call.key, call.value)]

        return combined(futures, finish)

    def _pull_new(self, call: PushPull) -> Future[Any]:
        """Every value of the keys: new arrays, and `RowSparse` with all rows."""
        futures: list[Future[Any]] = []
        parts: list[Callable[[], Any]] = []
        for one in values.keys(call.key):
            if one not in self._keys.tables:
                future = self._arrays(call, one, None)
                futures.append(future)
                parts.append(future.result)
                continue
            info = self._keys.tables[one]
            if call.ignore_sparse:
                raise ValueError(
                    f"{name_of(one)} is a table of rows: row_sparse_pull brings the rows that you name,"
                    " pull(…, ignore_sparse=False) all of them, and pull(…, out=array) writes them into an array"
                )
            target = self._keys.no_rows(info)
            pulls = self._all_rows(info, target)
            futures += self._submitted(pulls, call.priority)
            parts.append(partial(_finished, pulls, target))
        many = isinstance(call.key, (list, tuple))
        return combined(futures, lambda: [part() for part in parts] if many else parts[0]())

    def _places(self, info: KeyInfo, arrays: Sequence[Any], ignore_sparse: bool) -> list[_RowPull]:
        """What a `pull` into these wants of a table: all rows."""
        pulls = []
        for array in arrays:
            if not isinstance(array, RowSparse):
                pulls.append(self._into_array(info, array))
            elif not ignore_sparse:
                pulls += self._all_rows(info, array)
            elif not self._has_logged_skip:
                self._has_logged_skip = True
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
                    f"{info.name}: rows cannot be written into a sparse tensor; give out=, or push a RowSparse"
                )
            else:
                pulls.append(self._into_array(info, array))
        return pulls

    def _into_array(self, info: KeyInfo, array: Any) -> _RowPull:
        values.require_writable(info.key, array, info.shape, info.dtype)
        bits = values.writable_bits(array, info.dtype)
        if bits is not None:
            return _RowPull(info, np.arange(info.shape[0]), bits, lambda: None)
        made = np.empty(info.size, info.dtype.storage)
        return _RowPull(info, np.arange(info.shape[0]), made, lambda: values.write_bits(array, made, info.dtype))

    def _all_rows(self, info: KeyInfo, target: RowSparse) -> list[_RowPull]:
        require_rows(info, target)
        count = info.shape[0]
        try:
            # The values before the ids: so a table far larger than the memory is refused before any of it is filled.
            bits = _room(info, count)
            return [self._named(info, [target], np.arange(count), bits)]
        except MemoryError as error:
            raise MemoryError(
                f"{info.name}: no memory for all {count} rows of the table, {info.size * info.dtype.itemsize} bytes:"
                " pass the ids of the rows that you need to row_sparse_pull"
            ) from error

    def _named_rows(self, info: KeyInfo, targets: Sequence[Any], row_ids: Any) -> list[_RowPull]:
        """Return pulls into `RowSparse` results: a single pull if all want the same rows."""
        for target in targets:
            if not isinstance(target, RowSparse):
                raise TypeError(
                    f"{info.name}: rows are pulled into a RowSparse, not into {type(target).__name__}; use"
                    f" RowSparse.zeros({info.shape})"
                )
            require_rows(info, target)
        each = list(row_ids) if isinstance(row_ids, (list, tuple)) and _are_arrays(row_ids) else [row_ids]
        if len(each) not in (1, len(targets)):
            raise ValueError(f"{info.name}: {len(targets)} results need as many row_ids, got {len(each)}")
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
                own = values.recast(rows, info.dtype, target.dtype)
                target.assign(ids, own if i == 0 else own.copy())

        return _RowPull(info, ids, bits, finish)

    def _table(self, key: Key) -> KeyInfo:
        info = self._keys.tables.get(key)
        if info is None:
            self._backend.require(key)
            raise TypeError(
                f"{name_of(key)} is an array, not a table of rows (a key initialised with a RowSparse or LazyRows): use"
                " pull"
            )
        return info


def _room_in(info: KeyInfo, targets: Sequence[RowSparse], rows: int) -> Bits:
    """The memory of a result that has as many rows already: the first touch of fresh memory costs more than a copy."""
    own = targets[0].values if len(targets) == 1 and len(targets[0]) == rows else None
    may_write = values.is_tensor(own) or (isinstance(own, np.ndarray) and own.flags.writeable)
    bits = values.writable_bits(own, info.dtype) if may_write else None
    return _room(info, rows) if bits is None else bits


def _room(info: KeyInfo, rows: int) -> Bits:
    """Memory for a number of rows of a table."""
    return np.empty(rows * row_length(info.shape), info.dtype.storage)


def _finish(pulls: Sequence[_RowPull]) -> None:
    for pull in pulls:
        pull.finish()


def _finished(pulls: Sequence[_RowPull], target: RowSparse) -> RowSparse:
    _finish(pulls)
    return target


def _are_arrays(row_ids: Sequence[Any]) -> bool:
    """Whether row ids are a list for each result, not a list of numbers."""
    return bool(row_ids) and all(isinstance(one, np.ndarray) or values.is_tensor(one) for one in row_ids)
