"""Workers with values on GPUs, which are NumPy's here, in a cluster of threads with real sockets and shared memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from kvdist.core.policy import SYNC
from kvdist.errors import DeviceError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.placement import Devices
from tests.devices import NumpyDevice
from tests.integration.test_passes import Job, running

SIZES = {"large": 150_001, "wide": 70_000, "small": 7, "one": 1, "empty": 0}
KEYS = list(SIZES)
GPUS = 2


class Workers:
    """Stores of two workers, each with GPUs of its own."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.gpus = [[NumpyDevice(index) for index in range(GPUS)] for _ in job.clusters]
        self.stores = [
            KVStore(DistBackend("dist_device_sync", SYNC, cluster, devices=Devices("auto", True, self.opener(rank))))
            for rank, cluster in enumerate(job.clusters)
        ]
        job.stores += self.stores

    def opener(self, rank: int) -> Callable[[int], NumpyDevice]:
        return self.gpus[rank].__getitem__

    def on_all(self, call: Callable[[int, KVStore], Any]) -> None:
        self.job.on_all(lambda rank, _: call(rank, self.stores[rank]))


@pytest.fixture(params=["tcp", "auto"])
def workers(request: pytest.FixtureRequest) -> Iterator[Workers]:
    with running(request.param) as job:
        yield Workers(job)


def gradient(key: str, rank: int, index: int, step: int, dtype: Any = np.float32) -> np.ndarray:
    return (np.arange(SIZES[key]) % 7 + 2 * rank + index + 3 * step).astype(dtype)


def total(key: str, step: int, workers: int = 2) -> np.ndarray:
    return sum(gradient(key, rank, index, step) for rank in range(workers) for index in range(GPUS))


def test_gradients_of_all_gpus_are_summed_and_the_sums_come_back_to_all(workers: Workers) -> None:
    def run(rank: int, store: KVStore) -> None:
        gpus = workers.gpus[rank]
        store.init(KEYS, [gpus[0].array(np.zeros(SIZES[key], np.float32)) for key in KEYS])
        outs = [[gpu.array(np.zeros(SIZES[key], np.float32)) for gpu in gpus] for key in KEYS]
        for step in range(3):
            values = [[gpu.array(gradient(key, rank, gpu.index, step)) for gpu in gpus] for key in KEYS]
            store.pushpull(KEYS, values, out=outs)
            for key, arrays in zip(KEYS, outs, strict=True):
                for array in arrays:
                    assert np.array_equal(array.memory, total(key, step)), (key, step)

    workers.on_all(run)


def test_what_crosses_is_one_sum_down_and_one_result_up(workers: Workers) -> None:
    nbytes = 4 * sum(SIZES.values())

    def run(rank: int, store: KVStore) -> None:
        gpus = workers.gpus[rank]
        store.init(KEYS, [np.zeros(SIZES[key], np.float32) for key in KEYS])
        values = [[gpu.array(gradient(key, rank, gpu.index, 0)) for gpu in gpus] for key in KEYS]
        store.pushpull(KEYS, values)
        down, up = sum(gpu.downloaded_bytes for gpu in gpus), sum(gpu.uploaded_bytes for gpu in gpus)
        assert nbytes <= down < 1.01 * nbytes + 64, "of two gradients one sum goes down"
        assert nbytes <= up < 1.01 * nbytes + 256 * len(KEYS), "the second GPU gets its results from the first"
        assert all(gpu.downloaded_bytes > 0 for gpu in gpus), "both of them sum"
        if workers.job.clusters[0].config.transport != "tcp":
            assert gpus[0].pinned_bytes > nbytes, "the memory from which is sent, and that in which results arrive"

    workers.on_all(run)


def test_pushes_that_nobody_waits_for_and_futures_have_the_values_of_their_call(workers: Workers) -> None:
    def run(rank: int, store: KVStore) -> None:
        gpu = workers.gpus[rank][0]
        store.init(KEYS, [gpu.array(np.zeros(SIZES[key], np.float32)) for key in KEYS])
        for step in range(3):
            values = [gpu.array(gradient(key, rank, 0, step)) for key in KEYS]
            store.push(KEYS, values)
            for value in values:  # the arrays are the program's again: what it asks of the GPU comes after
                value.memory[...] = -1
            outs = [gpu.array(np.zeros(SIZES[key], np.float32)) for key in KEYS]
            store.pull_async(KEYS, outs).result()
            for key, out in zip(KEYS, outs, strict=True):
                assert np.array_equal(out.memory, gradient(key, 0, 0, step) + gradient(key, 1, 0, step))
        future = store.pushpull_async(KEYS, [gpu.array(gradient(key, rank, 0, 9)) for key in KEYS], outs)
        future.result()
        assert all(
            np.array_equal(out.memory, gradient(key, 0, 0, 9) + gradient(key, 1, 0, 9))
            for key, out in zip(KEYS, outs, strict=True)
        )

    workers.on_all(run)


def test_types_gpus_and_hosts_may_mix_from_key_to_key_and_some_have_no_gradient(workers: Workers) -> None:
    dtypes = {"large": np.float32, "wide": np.float16, "small": np.int32, "one": np.float64, "empty": np.float32}

    def run(rank: int, store: KVStore) -> None:
        gpus = workers.gpus[rank]
        store.init(KEYS, [np.zeros(SIZES[key], dtypes[key]) for key in KEYS])
        values: list[Any] = [
            [gpu.array(gradient(key, rank, gpu.index, 0, dtype)) for gpu in gpus] for key, dtype in dtypes.items()
        ]
        values[1] = gpus[1].array(gradient("wide", rank, 0, 0, np.float16))
        values[3] = gradient("one", rank, 0, 0, np.float64)
        outs: list[Any] = [gpus[rank].array(np.zeros(SIZES[key], dtypes[key])) for key in KEYS]
        outs[2] = [np.zeros(7, np.int32), gpus[0].array(np.zeros(7, np.int32))]
        store.pushpull(KEYS, values, out=outs)
        assert np.array_equal(outs[0].memory, total("large", 0))
        assert np.array_equal(outs[1].memory, sum(gradient("wide", each, 0, 0, np.float16) for each in (0, 1)))
        assert np.array_equal(outs[2][0], total("small", 0)) and np.array_equal(outs[2][1].memory, total("small", 0))
        assert np.array_equal(outs[3].memory, sum(gradient("one", each, 0, 0) for each in (0, 1)))
        values = [None if rank == 0 and key != "small" else one for key, one in zip(KEYS, values, strict=True)]
        store.pushpull(KEYS, values, out=outs)
        assert np.array_equal(outs[0].memory, sum(gradient("large", 1, index, 0) for index in range(GPUS)))
        assert np.array_equal(outs[2][0], total("small", 0))

    workers.on_all(run)


@pytest.mark.parametrize("kind", ["2bit", "fp16", "topk"])
def test_codes_are_made_on_the_gpu_and_are_those_of_the_host(workers: Workers, kind: str) -> None:
    found: dict[tuple[str, int], list[np.ndarray]] = {}

    def run(rank: int, store: KVStore, name: str, put: Callable[[np.ndarray], Any]) -> None:
        store.set_gradient_compression({"type": kind})
        store.init(KEYS, [put(np.zeros(SIZES[key], np.float32)) for key in KEYS])
        outs = [np.zeros(SIZES[key], np.float32) for key in KEYS]
        for step in range(3):
            generator = np.random.default_rng(10 * step + rank)
            grads = [generator.standard_normal(SIZES[key]).astype(np.float32) for key in KEYS]
            store.pushpull(KEYS, [put(grad) for grad in grads], out=outs)
        found[name, rank] = outs

    workers.on_all(lambda rank, store: run(rank, store, "gpu", workers.gpus[rank][0].array))
    workers.job.on_all(lambda rank, store: run(rank, store, "host", lambda values: values))
    for rank in (0, 1):
        for one, other in zip(found["gpu", rank], found["host", rank], strict=True):
            assert np.array_equal(one, other)
    if kind == "2bit":
        down = workers.gpus[0][0].downloaded_bytes
        assert down < 3 * sum(SIZES.values()) / 4 * 1.1 + 4 * sum(SIZES.values()), "codes, and the first values, whole"


def test_values_of_a_key_on_both_sides_are_refused_before_anything_is_sent(workers: Workers) -> None:
    def run(rank: int, store: KVStore) -> None:
        gpu = workers.gpus[rank][0]
        store.init("small", gpu.array(np.zeros(7, np.float32)))
        with pytest.raises(DeviceError, match=r"the values of key 'small' are on cuda:0, cpu"):
            store.push("small", [gpu.array(np.ones(7, np.float32)), np.ones(7, np.float32)])
        out = gpu.array(np.zeros(7, np.float32))
        store.pushpull("small", gpu.array(np.ones(7, np.float32)), out=out)
        assert (out.memory == 2).all()

    workers.on_all(run)


def test_a_gpu_that_fails_while_it_copies_fails_the_push_with_its_sentence(workers: Workers) -> None:
    def run(rank: int, store: KVStore) -> None:
        gpu = workers.gpus[rank][0]
        store.init("wide", gpu.array(np.zeros(SIZES["wide"], np.float32)))
        broken = NumpyDevice(1)
        broken.catch_up = _broken  # type: ignore[method-assign]
        workers.gpus[rank][1] = broken
        with pytest.raises(DeviceError, match="cuda:1 has fallen off the bus"):
            store.pushpull("wide", broken.array(np.ones(SIZES["wide"], np.float32)))
        store.pushpull("wide", gpu.array(np.ones(SIZES["wide"], np.float32)))

    workers.on_all(run)


def _broken(number: int) -> None:
    raise DeviceError("cuda:1 has fallen off the bus")


def test_large_results_that_could_be_shown_come_to_the_gpus_where_they_are_wanted(workers: Workers) -> None:
    size = 3 << 20

    def run(rank: int, store: KVStore) -> None:
        gpu = workers.gpus[rank][0]
        store.init("shown", gpu.array(np.zeros(size, np.float32)))
        out = gpu.array(np.zeros(size, np.float32))
        for step in range(2):
            shown = store.pushpull_shared(["shown"], [gpu.array(np.full(size, step + 1, np.float32))], [out])
            assert shown == [None] and (out.memory == 2 * (step + 1)).all()

    workers.on_all(run)


def test_a_gpu_without_memory_left_fails_a_push_and_nothing_is_copied_behind_it(workers: Workers) -> None:
    keys = ["large", "wide", "small"]

    def run(rank: int, store: KVStore) -> None:
        gpus = workers.gpus[rank]
        store.init(keys, [np.zeros(SIZES[key], np.float32) for key in keys])
        outs = [np.zeros(SIZES[key], np.float32) for key in keys]
        for summed in range(len(keys)):  # the others lie on one GPU, and go down without another array there
            values = [
                [gpu.array(gradient(key, rank, gpu.index, 0)) for gpu in (gpus if place == summed else gpus[:1])]
                for place, key in enumerate(keys)
            ]
            for gpu in gpus:
                gpu.memory_bytes_max = gpu.allocated_bytes
            with pytest.raises(DeviceError, match="has no memory left for"):
                store.push(keys, values)
            assert not any(gpu.pending for gpu in gpus), "the buffers are others' by now"
            for gpu in gpus:
                gpu.memory_bytes_max = 1 << 40
            store.pushpull(keys, values, out=outs)
            assert np.array_equal(outs[summed], total(keys[summed], 0))

    workers.on_all(run)


def test_an_error_on_the_thread_of_the_node_is_that_of_the_call_or_of_the_next_one(workers: Workers) -> None:
    def run(rank: int, store: KVStore) -> None:
        gpu = workers.gpus[rank][0]
        store.init("wide", gpu.array(np.zeros(SIZES["wide"], np.float32)))
        broken = NumpyDevice(1)
        broken.catch_up = _broken  # type: ignore[method-assign]
        workers.gpus[rank][1] = broken
        store.push("wide", broken.array(np.ones(SIZES["wide"], np.float32)))
        with pytest.raises(DeviceError, match="cuda:1 has fallen off the bus"):
            store.pull("wide", np.zeros(SIZES["wide"], np.float32))
        store.barrier()
        out = gpu.array(np.zeros(SIZES["wide"], np.float32))
        broken_out = broken.array(np.zeros(SIZES["wide"], np.float32))
        broken.upload = lambda host, array: _broken(0)  # type: ignore[method-assign]
        for call in (store.pull, lambda *args: store.pull_async(*args).result()):
            with pytest.raises(DeviceError, match="cuda:1 has fallen off the bus"):
                call("wide", broken_out)
            call("wide", out)

    workers.on_all(run)
