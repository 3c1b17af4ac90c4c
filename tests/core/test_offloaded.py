"""Servers that sum and update on a device: the bits of the host in whatever they go through, and who is told what."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.policy import MODES
from kvdist.core.round import Contribution
from kvdist.core.server import block as blocks_of_servers
from kvdist.core.server.block import Block, apply_round
from kvdist.dtypes import DType
from kvdist.errors import ConfigError, DeviceError
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, worker
from kvdist.optimizer import create
from kvdist.optimizer.base import Extent
from kvdist.optimizer.offload import DeviceUpdater, arithmetic_on
from tests.cases import each
from tests.core import training
from tests.core.wired import Wired
from tests.devices import NumpyDevice

SMALL = Limits(slice_bytes=64)
SIZES = {"cut": 60, "a": 3, "b": 1, "none": 0, "c": 2, "whole": 20}
RUNS = [
    ("sgd", {}, "float32", False),
    ("sgd", {"momentum": 0.9}, "float16", True),
    ("adam", {"clip_gradient": 1.0}, "bfloat16", False),
    ("lars", {"momentum": 0.5}, "float32", False),
    ("lamb", {}, "float16", True),
    ("ftrl", {}, "bfloat16", False),
]
"""Each rule with one type: tests/optimizer/test_offload.py has the arithmetic of every rule in every type."""


def a_pair(num_servers: int = 2, num_workers: int = 2) -> tuple[Wired, Wired]:
    """Two clusters, the servers of the second on devices."""
    devices = [NumpyDevice(rank) for rank in range(num_servers)]
    here = Wired(num_workers, num_servers, SMALL, bigarray_bound=42)
    return here, Wired(num_workers, num_servers, SMALL, bigarray_bound=42, devices=devices)


def values(generator: random.Random, key: str, dtype: str) -> list[float]:
    drawn = np.array([generator.gauss(0, 1) for _ in range(SIZES[key])], np.float32)
    stored = REFERENCE.from_float32(drawn, DType.BFLOAT16) if dtype == "bfloat16" else drawn
    return list(stored.tolist())


def trained(wired: Wired, seed: int, name: str, numbers: dict[str, float], dtype: str, masters: bool) -> list[bytes]:
    """What workers read in a life of all kinds: blocks of several slices, lone pushes, replaced values, a leaver."""
    generator = random.Random(seed)
    training.set_optimizer(wired, name, multi_precision=masters, **numbers)
    wired.initialise({key: values(generator, key, dtype) for key in SIZES}, dtype=dtype)
    reads: list[tuple[int, str]] = []
    for turn in range(14):
        ranks = (0, 1) if turn < 11 else (0,)
        if turn == 11:
            wired.leave(1)
            wired.settle()
        apart = generator.random() < 0.4
        for rank in ranks:
            gradients: dict[str, list[float] | None] = {key: values(generator, key, dtype) for key in SIZES}
            if apart and generator.random() < 0.5:
                gradients[generator.choice(list(SIZES))] = None
            lists = [[key] for key in SIZES] if apart else [["cut", "whole"], ["a", "b", "none", "c"]]
            for keys in lists:
                read = wired.pushpull(rank, {key: gradients[key] for key in keys})
                reads += [(read, key) for key in keys]
        wired.settle()
        for _ in range(generator.choice((0, 0, 1, 2))):
            wired.replace({key: values(generator, key, dtype) for key in ("cut", "b", "whole")})
            wired.settle()
    assert not wired.failed
    return [wired.results[read][key].tobytes() for read, key in reads]


@pytest.mark.parametrize(("name", "numbers", "dtype", "masters"), RUNS)
def test_workers_read_the_bits_that_they_would_read_from_hosts(
    name: str, numbers: dict[str, float], dtype: str, masters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds = []

    def counted(blocks: Sequence[Block], *arguments: Any) -> None:
        rounds.extend([1] * any(len(block) > 1 for block in blocks))
        apply_round(blocks, *arguments)

    monkeypatch.setattr(blocks_of_servers, "apply_round", counted)
    for seed in (1, 2):
        here, there = a_pair()
        run = (seed, name, numbers, dtype, masters)
        assert trained(there, *run) == trained(here, *run)
        devices = [device for device in there.devices if isinstance(device, NumpyDevice)]
        assert all(device.downloaded_bytes for device in devices)
    assert bool(rounds) == (name not in ("lars", "lamb")), "blocks were split and merged"


def test_steady_rounds_upload_contributions_and_download_weights() -> None:
    device = NumpyDevice()
    wired = Wired(3, 1, SMALL, bigarray_bound=42, devices=[device])
    training.set_optimizer(wired, "adam")
    wired.initialise({"w": [0.0] * 16})
    for turn in range(6):
        before = device.uploaded_bytes, device.downloaded_bytes
        for rank in range(3):
            wired.pushpull(rank, {"w": [float(turn + rank)] * 16})
        wired.settle()
        moved = device.uploaded_bytes - before[0], device.downloaded_bytes - before[1]
        assert moved == ((3 if turn else 4) * 64, 64)


def test_a_value_that_is_replaced_again_and_again_is_the_one_that_is_updated() -> None:
    updater = DeviceUpdater(create("test"), NumpyDevice())
    block = Block.of(0, [0], [Extent("w", (2,))], [2], DType.FLOAT32, MODES["sync"])
    block.initialise([np.array([1, 1], np.float32)])
    member = Member(worker(0), 1)
    step = 0
    for replaced in (0, 1, 2, 3, 4, 0, 2):
        for turn in range(replaced):
            block.replace([np.array([10 * turn, 7], np.float32)])
        assert block.published is not None
        expected = (block.published.array + 1).tolist()
        ones = np.ones(2, np.float32)
        for _ in range(2):
            block.offer(Contribution(member, 0, step, 0, 1, 0, (0.0, 0.0, 1.0), ones, pull=False), 0.0)
            apply_round([block], [block.round.close()], updater)
            step += 1
        assert block.published.array.tolist() == [expected[0] + 1, expected[1] + 1]


# Checkpoints.


@each("to_device", [False, True])
def test_what_was_saved_on_a_device_goes_on_on_a_host_and_the_other_way_round(tmp_path: Path, to_device: bool) -> None:
    devices = [NumpyDevice(0), NumpyDevice(1)]
    first = training.a_cluster(devices=() if to_device else devices)
    training.push_all(first, 0, 1)
    saves = training.save_all(first, tmp_path)
    first.settle_works()
    assert all(save in first.completed for save in saves)
    training.require_moment(tmp_path, (0, 1), 2)
    second = training.a_cluster(devices=devices if to_device else ())
    training.push_all(second, 7)  # what is forgotten
    loads = [second.load(rank, tmp_path) for rank in (0, 1)]
    second.settle_works()
    assert all(load in second.completed for load in loads)
    training.push_all(second, 2, 3)
    read = second.pull(0, *training.VALUES)
    second.settle()
    wanted, _ = training.moment((0, 1), 4)
    assert {key: second.value(read, key) for key in training.VALUES} == {key: wanted[key].tolist() for key in wanted}


def test_what_is_being_saved_on_a_device_stays_while_training_goes_on(tmp_path: Path) -> None:
    wired = training.a_cluster(devices=[NumpyDevice(0), NumpyDevice(1)])
    training.push_all(wired, 0)
    saves = training.save_all(wired, tmp_path)
    wired.settle()
    training.push_all(wired, 1, 2)
    wired.settle_works()
    assert all(save in wired.completed for save in saves)
    training.require_moment(tmp_path, (0, 1), 1)
    training.require_nothing_left(wired)


# Who is told what.


def test_an_optimizer_that_cannot_run_there_is_refused_to_every_worker_and_another_one_may_be_chosen() -> None:
    wired = Wired(2, 2, devices=[NumpyDevice(rank) for rank in (0, 1)])
    requests = [wired.set_optimizer(rank, "sgld") for rank in (0, 1)]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], ConfigError)
        words = str(wired.failed[request])
        assert words.startswith("server-0: sgld cannot run on cuda:0") and "--server-device" in words
    chosen = [wired.set_optimizer(rank, "sgd") for rank in (0, 1)]
    wired.settle()
    assert all(request in wired.completed for request in chosen)


def test_a_device_whose_memory_is_full_ends_the_server_and_is_no_fault_of_a_push() -> None:
    device = NumpyDevice()
    wired = Wired(1, 1, devices=[device])
    training.set_optimizer(wired, "adam")
    wired.initialise({"w": [1.0] * 1000})
    device.memory_bytes_max = device.allocated_bytes + 5000
    wired.push(0, {"w": [1.0] * 1000})
    with pytest.raises(DeviceError, match="cuda:0 has no memory left for"):
        wired.settle()


def test_tables_of_rows_stay_on_the_host() -> None:
    device = NumpyDevice()
    wired = Wired(2, 1, devices=[device])
    assert wired.servers[0].shard.row_kernels is REFERENCE
    assert wired.servers[0].shard.kernels.name == arithmetic_on(device, REFERENCE).kernels.name
