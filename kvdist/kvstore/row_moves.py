"""How rows of tables move: pushes and pulls of a `DistStore` for keys that are `RowSparse`.

Nothing here is as large as a table. Passes over the rows of a push: sorted and without repetitions already, one (into
the memory they are sent from); otherwise one more to bring them into order. Of a pull: one, from the transport's memory
into the result.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import KeyInfo, RowChunk, RunData, RunKind, RunPlan, Transfer
from kvdist.kvstore.arguments import hyperparameters_of
from kvdist.kvstore.keys import Ids, Rows
from kvdist.kvstore.push_pull import ArrayTransfers
from kvdist.kvstore.staging import PushOptions
from kvdist.kvstore.values import Key
from kvdist.protocol.arrays import Bits, padded
from kvdist.protocol.messages import Flag
from kvdist.runtime.cluster import Cluster
from kvdist.transport.shared_memory.allocator import Allocator

MESSAGE_BYTES_MAX = 16 << 20
"""More rows are pulled by several messages, so that a server gathers some while others are under way."""
PUSHED_BYTES_MAX = 56 << 20
"""More are pushed in several. Not fewer, as a server sums only what has come whole, and joins parts by a copy. What
crosses a network travels by `Limits.slice_bytes` all the same, either way: there a copy costs little."""
BUFFERS_KEPT_MAX = 16
BUFFER_UNIT_BYTES = 64 << 10


class RowBuffers:
    """Memory in which rows wait until a server has counted them; used again, because fresh memory is slow.

    Args:
        memory: where it lies.
    """

    def __init__(self, memory: Allocator) -> None:
        self._memory = memory
        self._free: list[npt.NDArray[np.uint8]] = []
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """At least so many bytes, and not much more."""
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
    """Pushes and pulls of the tables of one store.

    Args:
        cluster: this process's membership.
        moves: what submits requests, and knows the optimizer.
    """

    def __init__(self, cluster: Cluster, moves: ArrayTransfers) -> None:
        self._cluster = cluster
        self._moves = moves
        self._buffers = RowBuffers(cluster.memory)
        self._largest: dict[Key, int] = {}
        """Table → bytes of the largest push to it: what a contribution to it may be."""

    def give(self, info: KeyInfo, rows: Rows) -> None:
        """Send first values, and wait until the servers have them."""
        runs, buffers = self._laid_out(info, rows, None, (), 0)
        label = f"init of key {info.key!r}"
        self._moves.ask(lambda number: Transfer(number, RunKind.INITIALISE_ROWS, label, runs))
        self._buffers.give_back(buffers)

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Push rows; without any it still counts. None: there is no gradient here."""
        flags = (Flag.AVERAGE if options.average else 0) | (Flag.EMPTY if rows is None else 0)
        setting = hyperparameters_of(info, self._moves.optimizer)
        nbytes, under_way = 0 if rows is None else sum(array.nbytes for array in rows), self._cluster.under_way
        largest = self._largest.get(info.key, 0)
        if nbytes > largest:
            self._largest[info.key] = nbytes
            under_way.grow(nbytes - largest)
        label = f"push of rows of key {info.key!r}"

        def submit() -> Future[None]:
            runs, buffers = self._laid_out(info, rows, int(flags), (setting,), options.samples)
            return self._moves.submit(
                lambda number: Transfer(number, RunKind.PUSH_ROWS, label, runs, priority),
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
                runs.append(RunData(plan, sinks=sinks, chunks=(chunk,), row_length=length))
        label = f"pull of rows of key {info.key!r}"
        return self._moves.submit(lambda number: Transfer(number, RunKind.PULL_ROWS, label, runs, priority), _nothing)

    def _message_bytes_max(self, server: int, near: int) -> int:
        return min(near, self._cluster.config.limits.slice_bytes) if self._cluster.is_far(server) else near

    def _laid_out(
        self,
        info: KeyInfo,
        rows: Rows | None,
        flags: int | None,
        settings: tuple[tuple[float, float, float], ...],
        samples: int,
    ) -> tuple[list[RunData], list[npt.NDArray[np.uint8]]]:
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
            stays = self._cluster.shares_memory(plan.server)
            runs.append(RunData(plan, None, (), own_flags, settings, None, None, stays, samples, chunks, length))
        return runs, buffers


_NO_ROWS: Rows = (np.zeros(0, np.int64), np.zeros((0, 1), np.uint8))


def _nothing() -> None:
    """The rows are where they are wanted."""


def _shares(info: KeyInfo, ids: Ids) -> list[tuple[RunPlan, int, int]]:
    """Per server of a table: how to reach it, and which stretch of the ids is its own."""
    length = row_length(info.shape)
    bounds = np.searchsorted(ids, [piece.start // length for piece in info.slices[1:]]).tolist()
    stretches = zip([0, *bounds], [*bounds, len(ids)], strict=True)
    return [
        (_plan(piece.server, piece.number, info), begin, end)
        for piece, (begin, end) in zip(info.slices, stretches, strict=True)
    ]


def _plan(server: int, number: int, info: KeyInfo) -> RunPlan:
    """The plan of a run of one slice; how much of it travels is said by each run."""
    nothing = np.zeros(1, np.uint32)
    dtypes: Any = np.array([info.dtype], np.uint8)
    return RunPlan(server, np.array([number], np.uint32), nothing, dtypes, (), 0, {number: 0}, np.zeros(1, np.intp))
