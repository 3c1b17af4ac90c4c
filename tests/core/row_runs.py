"""Runs of rows as a store makes them, with as few rows in a message as a test wants; a wired cluster with tables."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.core.sharding import Slice
from kvdist.core.worker.requests import DeclareKeys, KeyInfo, RowChunk, Run, RunKind, RunPlan, Transfer
from kvdist.dtypes import from_name
from kvdist.protocol.messages import ROWS, Flag
from tests.core.wired import SERVER_DECIDES, Wired

Array = npt.NDArray[Any]
Rows = Mapping[int, float]
"""Row → the value of all its elements."""


def push_runs(
    info: KeyInfo,
    ids: Array,
    values: Array | None,
    rows_max: int,
    flag: int = 0,
    settings: tuple[tuple[float, float, float], ...] = (SERVER_DECIDES,),
    stays: bool = False,
) -> tuple[list[Run], list[bytearray]]:
    """A run for every server of the table, and the memory that they are sent from.

    Args:
        info: the table.
        ids: strictly ascending rows.
        values: (k, row length); None is an empty contribution.
        rows_max: rows of a message.
        flag: flags beside that.
        settings: the numbers of the optimizer.
        stays: whether the server reads the memory where it lies.
    """
    flags = np.array([flag | (Flag.EMPTY if values is None else 0)], np.uint8)
    runs, memory = [], []
    for piece, begin, end in _shares(info, ids):
        chunks = []
        for low in range(begin, end, rows_max) or (begin,):
            high = min(low + rows_max, end)
            part = b"" if values is None else values[low:high].tobytes()
            buffer = bytearray(ids[low:high].tobytes() + part + b"\0" * (-len(part) % 8))
            memory.append(buffer)
            chunks.append(RowChunk(high - low, memoryview(buffer)))
        plan, length = _plan(info, piece), _row_length(info)
        runs.append(Run(plan, None, (), flags, settings, stays=stays, chunks=chunks, row_length=length))
    return runs, memory


def pull_runs(info: KeyInfo, ids: Array, out: Array, rows_max: int) -> list[Run]:
    """Runs that bring the rows `ids` into `out`, (k, row length); servers without any of them are not asked."""
    runs, flat, length = [], out.reshape(-1), _row_length(info)
    for piece, begin, end in _shares(info, ids):
        for low in range(begin, end, rows_max):
            high = min(low + rows_max, end)
            chunk = RowChunk(high - low, memoryview(ids[low:high].tobytes()))
            sinks = [flat[low * length : high * length]]
            runs.append(Run(_plan(info, piece), sinks=sinks, chunks=(chunk,), row_length=length))
    return runs


def _row_length(info: KeyInfo) -> int:
    return math.prod(info.shape[1:])


def _shares(info: KeyInfo, ids: Array) -> list[tuple[Slice, int, int]]:
    """Per server which stretch of the ids is its own."""
    length = _row_length(info)
    bounds = [np.searchsorted(ids, [one.start // length, one.stop // length]).tolist() for one in info.slices]
    return [(piece, begin, end) for piece, (begin, end) in zip(info.slices, bounds, strict=True)]


def _plan(info: KeyInfo, piece: Slice) -> RunPlan:
    one, nothing = np.array([piece.number], np.uint32), np.zeros(1, np.uint32)
    dtypes = np.array([info.dtype], np.uint8)
    return RunPlan(piece.server, one, nothing, dtypes, (), 0, {piece.number: 0}, np.zeros(1, np.intp))


class Tables(Wired):
    """A wired cluster whose workers push and pull rows, all of whose elements are alike."""

    def __init__(self, *arguments: Any, rows_max: int = 100, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.rows_max = rows_max
        """Rows of a message."""

    def table(
        self,
        key: str = "t",
        shape: tuple[int, ...] = (6, 2),
        form: str = ROWS,
        first: float | None = 1,
        mode: str = "sync",
        dtype: str = "float32",
    ) -> KeyInfo:
        """All workers declare a table, worker 0 gives all rows one value unless that is None; everything is settled."""
        kind = from_name(dtype)
        for rank in range(len(self.workers)):
            self.ask(rank, lambda number: DeclareKeys(number, 0, mode, (key,), (shape,), (kind,), forms=(form,)))
        self.settle()
        if form == ROWS and first is not None:
            self.give_rows(0, dict.fromkeys(range(shape[0]), first), key)
            self.settle()
        return self.infos[key]

    def give_rows(self, rank: int, rows: Rows, key: str = "t") -> int:
        """Send first values."""
        runs, _ = push_runs(self.infos[key], *self._arrays(key, rows), self.rows_max)
        return self.ask(rank, lambda number: Transfer(number, RunKind.INITIALISE, f"init of {key}", runs))

    def push_rows(
        self,
        rank: int,
        rows: Rows | None,
        key: str = "t",
        flag: int = 0,
        setting: tuple[float, float, float] = SERVER_DECIDES,
        priority: int = 0,
    ) -> int:
        """Contribute; None is an empty contribution."""
        ids, values = self._arrays(key, rows or {})
        given = None if rows is None else values
        runs, _ = push_runs(self.infos[key], ids, given, self.rows_max, flag, (setting,))
        return self.ask(rank, lambda number: Transfer(number, RunKind.PUSH, f"push of {key}", runs, priority))

    def pull_rows(self, rank: int, ids: Sequence[int] | None = None, key: str = "t") -> int:
        """Read rows; None: all."""
        info = self.infos[key]
        wanted = np.array(range(info.shape[0]) if ids is None else ids, np.int64)
        out = np.full((len(wanted), _row_length(info)), -77, info.dtype.storage)
        runs = pull_runs(info, wanted, out, self.rows_max)
        request = self.ask(rank, lambda number: Transfer(number, RunKind.PULL, f"pull of {key}", runs))
        self.results[request] = {key: out}
        return request

    def rows(self, request: int, key: str = "t") -> list[float]:
        """What a finished read brought: of each row its value."""
        assert request in self.completed, f"request {request} is not finished: {self.failed.get(request)}"
        out = self.results[request][key]
        assert (out == out[:, :1]).all(), "elements of a row are alike"
        return out[:, 0].tolist()

    def now_there(self, key: str = "t", rank: int = 0) -> list[float]:
        """All rows as they are."""
        request = self.pull_rows(rank, key=key)
        self.settle()
        return self.rows(request, key)

    def _arrays(self, key: str, rows: Rows) -> tuple[Array, Array]:
        info = self.infos[key]
        ids = np.array(sorted(rows), np.int64)
        values = np.array([rows[one] for one in ids.tolist()], info.dtype.storage)
        return ids, np.repeat(values[:, None], _row_length(info), axis=1)
