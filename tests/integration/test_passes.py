"""How often a byte of a gradient is touched, counted: scheduler, servers and workers in threads of one process.

Their sockets and their shared memory are real; a process may map its own memory like that of another.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest

from kvdist.config.endpoints import tcp_endpoint
from kvdist.config.settings import ClusterConfig
from kvdist.config.sockets import scheduler_endpoint
from kvdist.core.policy import SYNC
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.core.traffic import Traffic
from kvdist.core.worker.host_aggregation import HostAggregation
from kvdist.core.worker.worker import Worker
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.nodes import Role
from kvdist.runtime.cluster import Cluster, introduction
from kvdist.runtime.node import Node
from kvdist.transport.factory import open_transport
from kvdist.transport.shared_memory.transport import SharedMemoryTransport
from kvdist.transport.zeromq import ZeroMQTransport
from tests.integration.processes import HOST
from tests.ports import free_port
from tests.transport.patience import PATIENCE_S, PATIENT

WORKERS = SERVERS = 2
LARGE = 3 << 20
"""Elements of a key that is cut over both servers, in slices of several MiB."""


@dataclass
class Job:
    """A whole cluster in this process."""

    stores: list[KVStore]
    clusters: list[Cluster]
    servers: list[Node]

    def on_all(self, act: object) -> None:
        """Call ``act(rank, store)`` on every worker at once."""
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                act(rank, self.stores[rank])  # type: ignore[operator]
            except BaseException as error:  # noqa: BLE001  # shown below, where the test can fail
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(WORKERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors

    def traffic(self) -> Traffic:
        """The sum over all processes."""
        machines = [node.machine for node in self.servers]
        found = [cluster.traffic for cluster in self.clusters]
        found += [cluster.node.machine.traffic for cluster in self.clusters if isinstance(cluster.node.machine, Worker)]
        found += [machine.traffic for machine in machines if isinstance(machine, Server)]
        return Traffic(*(sum(getattr(one, name) for one in found) for name in Traffic.__dataclass_fields__))

    def carried(self) -> int:
        """Bytes that workers gave to sockets."""
        transports = [cluster.node.transport for cluster in self.clusters]
        return sum(one.bytes_whole for one in transports if isinstance(one, SharedMemoryTransport))


def node_of(config: ClusterConfig) -> tuple[Node, object]:
    now = time.monotonic()
    if config.role is Role.SCHEDULER:
        sockets = ZeroMQTransport(config.limits)
        sockets.bind(scheduler_endpoint(config))
        return Node(Scheduler(config, now), sockets, config.job_tag, 10.0), None
    transport, memory = open_transport(config)
    is_dialled = config.role is Role.SERVER or config.local_reduce == "on"
    endpoint = transport.bind(tcp_endpoint(HOST, 0)) if is_dialled else ""
    introduced = introduction(config, endpoint, scheduler_endpoint(config))
    aggregation = HostAggregation(config.local_reduce, config.limits, memory.allocate)
    machine: Server | Worker = (
        Server(introduced, config.limits, REFERENCE, now, memory.allocate)
        if config.role is Role.SERVER
        else Worker(introduced, config.limits, now, aggregation)
    )
    return Node(machine, transport, config.job_tag, 10.0), memory


@contextlib.contextmanager
def running(transport: str, local_reduce: str = "auto") -> Iterator[Job]:
    # A worker whose leader waits for a processor would push by itself after half the wait that is explained.
    limits = replace(PATIENT, explain_after_s=2 * PATIENCE_S)
    ways = {"transport": transport, "local_reduce": local_reduce}
    config = ClusterConfig(Role.SCHEDULER, HOST, free_port(), WORKERS, SERVERS, security="none", limits=limits, **ways)
    scheduler, _ = node_of(config)
    servers = [node_of(replace(config, role=Role.SERVER, rank=rank))[0] for rank in range(SERVERS)]
    threads = [threading.Thread(target=node.run) for node in (scheduler, *servers)]
    for thread in threads:
        thread.start()
    clusters = []
    for rank in range(WORKERS):
        own = replace(config, role=Role.WORKER, rank=rank)
        node, memory = node_of(own)
        clusters.append(Cluster(own, node, memory, node.run))  # type: ignore[arg-type]
    joining = [threading.Thread(target=cluster.start) for cluster in clusters]
    for thread in joining:
        thread.start()
    for thread in joining:
        thread.join()
    job = Job([KVStore(DistBackend("dist", SYNC, cluster)) for cluster in clusters], clusters, servers)
    try:
        yield job
    finally:
        closing = [threading.Thread(target=store.close) for store in job.stores]
        for thread in closing:
            thread.start()
        for thread in [*closing, *threads]:
            thread.join()


def settle(job: Job, keys: list[str], arrays: list[np.ndarray]) -> None:
    """First values, and a round, so that every route shares memory and every buffer exists."""
    zeros = [np.zeros_like(array) for array in arrays]
    job.on_all(lambda rank, store: store.init(keys, zeros))
    job.on_all(lambda rank, store: store.pushpull(keys, [array.copy() for array in arrays]))
    shared = [cluster.node.view.shares_memory(rank) for cluster in job.clusters for rank in range(SERVERS)]
    assert all(shared) or job.clusters[0].config.transport == "tcp"


def difference(after: Traffic, before: Traffic) -> dict[str, int]:
    names = Traffic.__dataclass_fields__
    return {name: getattr(after, name) - getattr(before, name) for name in names}


@pytest.mark.skipif(SharedMemoryTransport.available() is not None, reason=str(SharedMemoryTransport.available()))
@pytest.mark.parametrize("kind", ["plain", "resident", "shared"])
def test_a_byte_of_a_gradient_is_touched_as_often_as_promised(kind: str) -> None:
    with running("auto") as job:
        keys, nbytes = ["w"], 4 * LARGE
        settle(job, keys, [np.ones(LARGE, np.float32)])

        def arrays(store: KVStore) -> np.ndarray:
            array: np.ndarray = np.empty(LARGE, np.float32) if kind == "plain" else store.empty(LARGE)
            array[:] = 1
            return array

        values = [arrays(store) for store in job.stores]
        outs = [np.zeros(LARGE, np.float32) for _ in job.stores]
        before, carried = job.traffic(), job.carried()

        def step(rank: int, store: KVStore) -> None:
            if kind == "shared":
                (shown,) = store.pushpull_shared(keys, [values[rank]], [outs[rank]])
                assert shown is not None and (shown == WORKERS).all()
            else:
                store.pushpull(keys, [values[rank]], out=[outs[rank]])
                assert (outs[rank] == WORKERS).all()

        job.on_all(step)
        each = WORKERS * nbytes
        assert difference(job.traffic(), before) == {
            "copied_in": each if kind == "plain" else 0,
            "copied_out": 0 if kind == "shared" else each,
            "summed": each,
            "joined": 0,
            "passed_on": 0,
        }
        assert job.carried() - carried < nbytes / 100, "no value went through a socket"


@pytest.mark.skipif(SharedMemoryTransport.available() is not None, reason=str(SharedMemoryTransport.available()))
def test_many_small_gradients_are_summed_as_one_and_answered_without_a_copy() -> None:
    with running("auto") as job:
        keys = [f"k{i}" for i in range(300)]
        arrays = [np.ones(1000, np.float32) for _ in keys]
        settle(job, keys, arrays)
        before, carried = job.traffic(), job.carried()
        job.on_all(lambda rank, store: store.pushpull(keys, [array.copy() for array in arrays]))
        each = WORKERS * len(keys) * 4000
        assert difference(job.traffic(), before) == {
            "copied_in": each,
            "copied_out": each,
            "summed": each,
            "joined": 0,
            "passed_on": 0,
        }
        assert job.carried() - carried < each / 10


def test_without_shared_memory_a_waiting_call_lends_its_large_arrays() -> None:
    with running("tcp") as job:
        settle(job, ["w"], [np.ones(LARGE, np.float32)])
        values, outs = np.ones(LARGE, np.float32), [np.zeros(LARGE, np.float32) for _ in range(WORKERS)]
        before = job.traffic()
        job.on_all(lambda rank, store: store.pushpull("w", values, out=outs[rank]))
        each = WORKERS * 4 * LARGE
        found = difference(job.traffic(), before)
        assert found == {"copied_in": 0, "copied_out": each, "summed": each, "joined": 0, "passed_on": 0}


@pytest.mark.skipif(SharedMemoryTransport.available() is not None, reason=str(SharedMemoryTransport.available()))
def test_a_host_that_pushes_once_sums_in_one_pass_and_copies_the_value_once_for_all_others() -> None:
    with running("auto", local_reduce="on") as job:
        settle(job, ["w"], [np.ones(LARGE, np.float32)])
        values, outs = np.ones(LARGE, np.float32), [np.zeros(LARGE, np.float32) for _ in range(WORKERS)]
        before, carried = job.traffic(), job.carried()
        job.on_all(lambda rank, store: store.pushpull("w", values, out=outs[rank]))
        assert all((out == WORKERS).all() for out in outs)
        nbytes = 4 * LARGE
        assert difference(job.traffic(), before) == {
            "copied_in": (WORKERS - 1) * nbytes,  # the leader reads its own gradient where it is
            "copied_out": WORKERS * nbytes,
            "summed": WORKERS * nbytes + nbytes,  # by the leader, and one sum by the servers
            "joined": 0,
            "passed_on": nbytes,
        }
        assert job.carried() - carried < nbytes / 100, "no value went through a socket"
