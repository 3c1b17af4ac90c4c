"""A little training run on wired machines, what it must have come to, and what a checkpoint of it has."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvdist.checkpoint.format import read_manifest
from kvdist.checkpoint.shards import Shards
from kvdist.checkpoint.snapshot import Manifest, SliceImage, WantedSlice
from kvdist.config.settings import Limits
from kvdist.dtypes import from_name
from kvdist.errors import CheckpointError
from tests.core.wired import Wired

FULL = "the disk is full"
SMALL = Limits(slice_bytes=64)
VALUES: dict[int | str, list[float]] = {"w": [float(i) for i in range(50)], "b": [1, 2], 3: [7], "none": []}
"""One key that is cut over all servers, in several slices on each; small ones that are one block; an empty one."""


def a_cluster(num_workers: int = 2, num_servers: int = 2, mode: str = "sync", **options: Any) -> Wired:
    wired = Wired(num_workers, num_servers, SMALL, bigarray_bound=42, **options)
    wired.initialise(VALUES, mode)
    set_optimizer(wired, "sgd", learning_rate=1.0, momentum=0.5)
    return wired


def set_optimizer(wired: Wired, name: str, **numbers: Any) -> None:
    for rank in range(len(wired.workers)):
        wired.set_optimizer(rank, name, **numbers)
    wired.settle()


def gradients(rank: int, turn: int) -> dict[int | str, list[float]]:
    return {key: [float(1 + rank + 3 * turn + i % 3) for i in range(len(value))] for key, value in VALUES.items()}


def push(wired: Wired, rank: int, turn: int) -> None:
    wired.push(rank, gradients(rank, turn))


def push_all(wired: Wired, *turns: int) -> None:
    for turn in turns:
        for rank in range(len(wired.workers)):
            push(wired, rank, turn)
    wired.settle()


def moment(ranks: Sequence[int], turns: int) -> tuple[dict[int | str, Any], dict[int | str, Any]]:
    """Values and momenta after so many rounds of these workers."""
    values = {key: np.array(value, np.float32) for key, value in VALUES.items()}
    momenta = {key: np.zeros_like(value) for key, value in values.items()}
    for turn in range(turns):
        for key in VALUES:
            summed = np.sum([np.array(gradients(rank, turn)[key], np.float32) for rank in ranks], axis=0)
            momenta[key] = np.float32(0.5) * momenta[key] - summed
            values[key] = values[key] + momenta[key]
    return values, momenta


def save_all(wired: Wired, folder: Path, **options: Any) -> list[int]:
    return [wired.save(rank, folder, *VALUES, **options) for rank in range(len(wired.workers))]


def read(folder: Path, key: int | str, names: tuple[str, ...] = ("momentum",), dtype: str = "float32") -> SliceImage:
    manifest = read_manifest(folder)
    size = next(one.shape[0] for one in manifest.keys if one.key == key)
    wanted = WantedSlice(0, key, 0, size, from_name(dtype), names, has_state=True)
    return Shards(folder, manifest).read(wanted, manifest.contents)


def require_moment(folder: Path, ranks: Sequence[int], turns: int) -> Manifest:
    values, momenta = moment(ranks, turns)
    for key in VALUES:
        found = read(folder, key)
        assert found.weight is not None and found.has_state
        assert np.array_equal(found.weight, values[key]), f"{key}: {found.weight} is not {values[key]}"
        if found.state is None:
            assert turns == 0, "what was never updated has no states"
            continue
        assert np.array_equal(found.state.arrays[0], momenta[key]), f"{key}: {found.state} is not {momenta[key]}"
        assert found.state.count == turns
    return read_manifest(folder)


def require_nothing_left(wired: Wired) -> None:
    """Nobody keeps anything of a checkpoint, in memory or under way."""
    assert not len(wired.scheduler.checkpoints)
    assert not wired.works
    for server in wired.servers:
        assert not server.checkpoints._open and not server.checkpoints.awaited
        for block in server.shard.blocks:
            buffers = [block.published, *block.pool.free_buffers]
            assert all(buffer is not None and buffer.leases == 0 for buffer in buffers)


def failures(wired: Wired, requests: Sequence[int]) -> list[str]:
    for request in requests:
        assert isinstance(wired.failed.get(request), CheckpointError), f"{request}: {wired.failed.get(request)!r}"
    return [str(wired.failed[request]) for request in requests]
