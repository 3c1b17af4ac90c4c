"""Operations of workers on MXNet's arrays, by a store of the type ``dist`` without an optimizer: servers only sum.

Invariants:

* A call is done when it returns.
* A key consists of its name, shape, dtype, and the operator. Workers compare new keys before a value travels, so that a
  difference is an error on all of them.
* Bytes of different lengths are gathered in a single table of rows, in which each worker has a separate range.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from kvdist.config.addresses import this_machine
from kvdist.config.environment import World, placed
from kvdist.dtypes import DType
from kvdist.errors import ConfigError, InitMismatch
from kvdist.kvstore import create
from kvdist.kvstore.rowsparse import LazyRows, RowSparse
from kvdist.mxnet.arrays import MXArray, array_of, described, is_sparse, leaf_of, read, scaled, write_rows, written
from kvdist.naming import minority_first
from kvdist.protocol.objects import Octets, decode_from, encode_or_reason
from kvdist.reduce_op import Average, ReduceOp, Sum

SIZES, TABLE = "sizes of what ranks gather", "what ranks gather"
ROW_ELEMENTS = 512
"""Elements of a row of the table of gathered bytes; int64, so that a row has 4096 bytes."""
ROW_BYTES = 8 * ROW_ELEMENTS
ROWS_MAX = 1 << 20
"""Largest number of rows of a worker in that table."""

Group = tuple[str, Sequence[MXArray]]
"""A name, the same on all workers, and this worker's arrays of that name, an array for each device."""


class Ranks:
    """The workers of the job that the environment describes.

    Attributes:
        store: their store.
        world: this worker's rank, and the size and machines of the job.
        awaited: parameter that is to be broadcast once it has a value → its name.
    """

    def __init__(self) -> None:
        self.store = create("dist", policy="sync")
        self.world = World(self.store.rank, self.store.num_workers, launcher="the cluster")
        self.awaited: dict[Any, str] = {}
        self._declared: set[str] = set()
        self._table = self.world.size * ROWS_MAX, ROW_ELEMENTS
        """The shape of the table of gathered bytes."""
        self.store.init([SIZES, TABLE], [np.zeros(self.world.size, np.int64), LazyRows(self._table, DType.INT64)])
        self.world = placed(self.world, self.gather_objects(this_machine()))

    def reduce(
        self, groups: Sequence[Group], op: ReduceOp = Sum, priority: int = 0, before: float = 1.0, after: float = 1.0
    ) -> None:
        """Replace arrays by their sums over devices and workers, which an average divides by the number of workers.

        Args:
            groups: dense and row_sparse arrays; each row_sparse array gets the rows that any worker has.
            op: `Sum` or `Average`.
            priority: higher goes first.
            before, after: factors of the summands, and of the result.
        """
        keyed = [(f"{name} of {described(arrays[0])}, {op.name}", arrays) for name, arrays in groups]
        self._declare(keyed)
        divisor = self.world.size if op is Average else 1
        dense = [one for one in keyed if not is_sparse(one[1][0])]
        rows = [one for one in keyed if is_sparse(one[1][0])]
        if dense:
            with written([arrays for _, arrays in dense]) as rooms:
                given = [[scaled(read(one), before) for one in arrays] for _, arrays in dense]
                self.store.pushpull([key for key, _ in dense], given, rooms, priority)
                for room in [room for each in rooms for room in each] if (after, divisor) != (1.0, 1) else ():
                    room[...] = scaled(room, after, divisor)
        if rows:
            self._reduce_rows(rows, priority, before, after, divisor)

    def _reduce_rows(self, keyed: Sequence[Group], priority: int, before: float, after: float, divisor: int) -> None:
        keys = [key for key, _ in keyed]
        given = [[read(one) for one in arrays] for _, arrays in keyed]
        pushed = [[RowSparse(one.indices, scaled(one.values, before), one.shape) for one in each] for each in given]
        self.store.push(keys, pushed, priority)
        own = [np.unique(np.concatenate([one.indices for one in each])) for each in given]
        ids = [np.unique(np.concatenate(of_key)) for of_key in zip(*self.gather_objects(own), strict=True)]
        for rows, (_, arrays) in zip(self.store.row_sparse_pull(keys, None, priority, ids), keyed, strict=True):
            rows.assign(rows.indices, scaled(rows.values, after, divisor))
            for array in arrays:
                write_rows(rows, array)

    def broadcast(self, groups: Sequence[Group], root: int, priority: int = 0) -> None:
        """Replace dense arrays, those of all devices, by the first array of a worker.

        Raises:
            TypeError: an array is row_sparse.
        """
        for name, arrays in groups:
            if is_sparse(arrays[0]):
                raise TypeError(f"{name}: the array is row_sparse; broadcast a dense one, by .tostype('default')")
        keyed = [(f"{name} of {described(arrays[0])}, from rank {root}", arrays) for name, arrays in groups]
        self._declare(keyed)
        if keyed:
            with written([arrays for _, arrays in keyed]) as rooms:
                given = [read(arrays[0]) if self.world.rank == root else None for _, arrays in keyed]
                self.store.pushpull([key for key, _ in keyed], given, rooms, priority)

    def _declare(self, keyed: Sequence[Group]) -> None:
        """Initialise new keys with the shapes and dtypes of their arrays, once all workers have named the same keys."""
        fresh = {key: arrays[0] for key, arrays in keyed if key not in self._declared}
        if not fresh:
            return
        require_same(self.gather_objects(list(fresh)))
        tables = {key: LazyRows(one.shape, np.dtype(one.dtype).name) for key, one in fresh.items() if is_sparse(one)}
        self.store.init(list(fresh), [tables[key] if key in tables else read(one) for key, one in fresh.items()])
        self._declared |= fresh.keys()

    def gather_objects(self, obj: Any) -> list[Any]:
        """Copies of the objects of all workers, in the order of their ranks.

        Raises:
            CollectiveError: the object of another worker cannot be sent.
            TypeError, ValueError: this worker's cannot.
        """
        given, failure = encode_or_reason(obj, leaf_of)
        gathered = self.gather(given)
        if failure is not None:
            raise failure
        return [decode_from(rank, octets, array_of) for rank, octets in enumerate(gathered)]

    def gather(self, octets: Octets) -> list[Octets]:
        """The bytes of each worker; their lengths may differ.

        Raises:
            ValueError: this worker's bytes do not fit in the table.
        """
        rank, nbytes = self.world.rank, np.zeros(self.world.size, np.int64)
        nbytes[rank] = len(octets)
        rows = np.zeros((-(-len(octets) // ROW_BYTES), ROW_ELEMENTS), np.int64)
        if len(rows) > ROWS_MAX:
            raise ValueError(f"{len(octets)} bytes are to be gathered, and {ROWS_MAX * ROW_BYTES} are allowed per rank")
        rows.view(np.uint8).reshape(-1)[: len(octets)] = octets
        self.store.push(TABLE, RowSparse(rank * ROWS_MAX + np.arange(len(rows)), rows, self._table))
        self.store.pushpull(SIZES, nbytes)
        counts = -(-nbytes // ROW_BYTES)
        ids = np.concatenate([other * ROWS_MAX + np.arange(count) for other, count in enumerate(counts)])
        found = self.store.row_sparse_pull(TABLE, row_ids=ids).values.view(np.uint8)
        parts = np.split(found, np.cumsum(counts)[:-1])
        return [part.reshape(-1)[:length] for part, length in zip(parts, nbytes, strict=True)]


of_process: list[Ranks] = []
"""The `Ranks` that `init` has created; empty before `init`."""


def current() -> Ranks:
    """The ranks of this process's job.

    Raises:
        ConfigError: `init` was not called.
    """
    if not of_process:
        raise ConfigError("kvdist.mxnet has not been initialized; use hvd.init()")
    return of_process[0]


def require_same(told: Sequence[Sequence[str]]) -> None:
    """Compare the descriptions of the workers' next exchange, item by item.

    Raises:
        InitMismatch: they differ; the message names the first difference.
    """
    for items in zip_longest(*told, fillvalue="nothing more"):
        said = [f"{who} {'give' if ' ' in who else 'gives'} {item}" for who, item in minority_first(enumerate(items))]
        if len(said) > 1:
            raise InitMismatch(
                f"{', but '.join(said)}: every rank must give the same names, shapes and dtypes in the same order"
            )
