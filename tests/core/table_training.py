"""A little training run of tables of rows on wired machines, what it must have come to, and what a checkpoint has.

Numbers are such that float32 is exact. With momentum and lazy updates, a row that nobody pushes rests.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.checkpoint.format import read_manifest
from kvdist.checkpoint.shards import Shards
from kvdist.checkpoint.snapshot import EVERYTHING, Manifest, SavedKey, WantedSlice
from kvdist.core.sharding import row_length
from kvdist.core.worker.requests import DeclareKeys, KeyInfo, RowChunk, Run, RunKind, RunPlan, Transfer
from kvdist.dtypes import DType
from kvdist.protocol.messages import ROWS
from tests.core.training import SMALL, set_optimizer
from tests.core.wired import SERVER_DECIDES, Wired

Rows = Mapping[int, float]
"""Row → the number that all of its elements are."""

BEGINS = 2.0
TABLES: dict[int | str, tuple[tuple[int, int], str]] = {
    "eager": ((23, 3), ROWS),
    5: ((4, 2), ROWS),
    "lazy": ((1_000_000, 2), f"constant({BEGINS})"),
    "untouched": ((1000, 2), "zeros"),
    "home": ((9, 1), "zeros"),
}
"""Tables that are cut over all servers, and tables that one of them has; one that is never pushed."""
PUSHED: tuple[int | str, ...] = ("eager", 5, "lazy", "home")
NUMBERS = {"learning_rate": 1.0, "momentum": 0.5, "lazy_update": True}


def a_cluster(
    num_workers: int = 2,
    num_servers: int = 2,
    mode: str = "sync",
    gives: bool = True,
    numbers: Mapping[str, Any] | None = NUMBERS,
) -> Wired:
    """Tables with their first values, if worker 0 `gives` them, and an optimizer of these numbers, if there are any."""
    wired = Wired(num_workers, num_servers, SMALL, bigarray_bound=42)
    for rank in range(num_workers):
        declare(wired, rank, TABLES, mode)
    wired.settle()
    if numbers is not None:
        set_optimizer(wired, "sgd", **numbers)
    if gives:
        give(wired)
    return wired


def declare(wired: Wired, rank: int, tables: Mapping[int | str, tuple[tuple[int, int], str]], mode: str) -> None:
    shapes, forms = zip(*tables.values(), strict=True)
    kinds = (DType.FLOAT32,) * len(tables)
    wired.ask(rank, lambda n: DeclareKeys(n, 0, mode, tuple(tables), tuple(shapes), kinds, forms=tuple(forms)))


def give(wired: Wired) -> None:
    """Worker 0 sends the first values of tables all of whose rows exist."""
    for key, (shape, form) in TABLES.items():
        if form == ROWS:
            send(wired, 0, RunKind.INITIALISE, key, {row: first(key, row) for row in range(shape[0])})
    wired.settle()


def first(key: int | str, row: int) -> float:
    """How a row begins."""
    form = TABLES[key][1]
    return float(row % 7) if form == ROWS else 0.0 if form == "zeros" else BEGINS


def gradient(rank: int, turn: int, key: int | str) -> Rows:
    """What a worker contributes: some rows, sometimes none."""
    generator = random.Random(f"{rank} {turn} {key}")
    count = generator.choice((0, 1, 3))
    rows = TABLES[key][0][0]
    return {row: float(1 + rank + generator.randrange(4)) for row in generator.sample(range(min(rows, 40)), count)}


def push(wired: Wired, rank: int, turn: int) -> None:
    for key in PUSHED:
        # The rows of a lazy one lie far apart, on all servers.
        far = 24_999 if key == "lazy" else 1
        rows = {row * far: value for row, value in gradient(rank, turn, key).items()}
        send(wired, rank, RunKind.PUSH, key, rows)


def push_all(wired: Wired, *turns: int) -> None:
    for turn in turns:
        for rank in range(len(wired.workers)):
            push(wired, rank, turn)
    wired.settle()


def moment(ranks: Sequence[int], turns: int) -> tuple[dict[int | str, dict[int, float]], dict[int | str, Any]]:
    """Of each table the rows that are not as they began, and the momenta, after so many rounds of these workers."""
    values: dict[int | str, dict[int, float]] = {key: {} for key in TABLES}
    momenta: dict[int | str, dict[int, float]] = {key: {} for key in TABLES}
    for turn in range(turns):
        for key in PUSHED:
            far, summed = (24_999 if key == "lazy" else 1), {}
            for rank in ranks:
                for row, value in gradient(rank, turn, key).items():
                    summed[row * far] = summed.get(row * far, 0.0) + value
            for row, value in summed.items():
                momenta[key][row] = 0.5 * momenta[key].get(row, 0.0) - value
                values[key][row] = values[key].get(row, first(key, row)) + momenta[key][row]
    return values, momenta


def expected(ranks: Sequence[int], turns: int) -> dict[int | str, list[float]]:
    """What `values_of` gives."""
    values, _ = moment(ranks, turns)
    return {key: [values[key].get(row, first(key, row)) for row in probed(key)] for key in TABLES}


def probed(key: int | str) -> list[int]:
    """Rows that are read, touched and untouched."""
    rows = TABLES[key][0][0]
    return [row * 24_999 for row in range(40)] if key == "lazy" else list(range(min(rows, 40)))


def values_of(wired: Wired, rank: int = 0) -> dict[int | str, list[float]]:
    """The first elements of rows, as a worker reads them; all elements of a row must be alike."""
    found: dict[int | str, list[float]] = {}
    for key in TABLES:
        rows = pull(wired, rank, key, probed(key))
        assert (rows == rows[:, :1]).all()
        found[key] = rows[:, 0].tolist()
    return found


def pull(wired: Wired, rank: int, key: int | str, rows: Sequence[int]) -> npt.NDArray[np.float32]:
    info, ids = wired.infos[key], np.array(rows, np.int64)
    out = np.full((len(ids), row_length(info.shape)), np.nan, np.float32)
    runs = []
    for plan, begin, end in shares(info, ids):
        chunk = RowChunk(end - begin, ids[begin:end].view(np.uint8).data)
        runs.append(Run(plan, sinks=[out[begin:end].reshape(-1)], chunks=(chunk,), row_length=out.shape[1]))
    request = wired.ask(rank, lambda n: Transfer(n, RunKind.PULL, f"pull of {key}", runs))
    wired.settle()
    assert request in wired.completed, wired.failed.get(request)
    return out


def send(wired: Wired, rank: int, kind: RunKind, key: int | str, rows: Rows) -> int:
    """Give first values of rows, or push them."""
    info = wired.infos[key]
    length = row_length(info.shape)
    ids = np.array(sorted(rows), np.int64)
    values = np.array([[rows[row]] * length for row in sorted(rows)], np.float32).reshape(-1)
    flags, settings = (None, ()) if kind is RunKind.INITIALISE else (np.zeros(1, np.uint8), (SERVER_DECIDES,))
    runs = []
    for plan, begin, end in shares(info, ids):
        part = values[begin * length : end * length].tobytes()
        payload = ids[begin:end].tobytes() + part + b"\0" * (-len(part) % 8)
        chunk = RowChunk(end - begin, memoryview(payload))
        runs.append(Run(plan, flags=flags, settings=settings, chunks=(chunk,), row_length=length))
    return wired.ask(rank, lambda n: Transfer(n, kind, f"{kind.value} of {key}", runs))


def shares(info: KeyInfo, ids: npt.NDArray[np.int64]) -> list[tuple[RunPlan, int, int]]:
    """Per slice of a table its plan, and which stretch of the ids is its own."""
    found = []
    for piece in info.slices:
        ends = [end // row_length(info.shape) for end in (piece.start, piece.stop)]
        begin, end = np.searchsorted(ids, ends).tolist()
        one, codes = np.array([piece.number], np.uint32), np.array([info.dtype], np.uint8)
        plan = RunPlan(piece.server, one, np.zeros(1, np.uint32), codes, (), 0, {piece.number: 0}, np.zeros(1, np.intp))
        found.append((plan, begin, end))
    return found


def save_all(wired: Wired, folder: Path, **options: Any) -> list[int]:
    return [wired.save(rank, folder, *TABLES, **options) for rank in range(len(wired.workers))]


def load_all(wired: Wired, folder: Path, contents: tuple[str, ...] = EVERYTHING) -> list[int]:
    return [wired.load(rank, folder, contents) for rank in range(len(wired.workers))]


def require_moment(folder: Path, ranks: Sequence[int], turns: int) -> Manifest:
    """What was saved is that moment: every row, its momentum, and no row that does not exist."""
    manifest = read_manifest(folder)
    assert manifest.keys == tuple(SavedKey(key, shape, "float32", form) for key, (shape, form) in TABLES.items())
    values, momenta = moment(ranks, turns)
    for key, (shape, form) in TABLES.items():
        lazy_row = 0 if form == ROWS else shape[1]
        size = math.prod(shape)
        wanted = WantedSlice(0, key, 0, size, DType.FLOAT32, ("momentum",), has_state=True, lazy_row=lazy_row)
        found = Shards(folder, manifest).read(wanted, manifest.contents)
        assert found.weight is not None
        rows = list(range(shape[0])) if form == ROWS else sorted(values[key])
        if form != ROWS:
            assert found.ids is not None and found.ids.tolist() == rows and found.initializer == form
        assert found.weight.tolist() == [values[key].get(r, first(key, r)) for r in rows for _ in range(shape[1])]
        if found.state is None:
            assert not values[key], "what was never updated has no states"
            continue
        assert found.state.arrays[0].tolist() == [momenta[key].get(r, 0.0) for r in rows for _ in range(shape[1])]
        assert found.state.count == turns
    return manifest


def require_nothing_left(wired: Wired) -> None:
    """Nobody keeps anything of a checkpoint, in memory or under way."""
    assert not len(wired.scheduler.checkpoints)
    assert not wired.works
    for server in wired.servers:
        assert not server.checkpoints._open and not server.checkpoints.awaited
