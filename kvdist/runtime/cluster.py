"""This process's membership in a cluster: a worker node and its thread, shared by all stores of the process.

If the environment describes a cluster, this process joins it as a worker. If it describes none, a cluster with a worker
and a server runs inside this process, in a single thread. A wrong environment is an error. The process leaves with the
last `close()`, else when the interpreter ends.
"""

from __future__ import annotations

import atexit
import logging
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Protocol

from kvdist import errors
from kvdist.config.addresses import host_name
from kvdist.config.environment import (
    cluster_from_env,
    embedded_cluster_from_env,
    is_of_multiprocessing,
    read_setting,
    require_own_place,
    take_place,
    without_effect,
)
from kvdist.config.exit_codes import tell_what_lingers
from kvdist.config.settings import ClusterConfig
from kvdist.config.sockets import scheduler_endpoint
from kvdist.core.joining import Introduction
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.commands import Handler
from kvdist.core.server.server import Server
from kvdist.core.traffic import Traffic
from kvdist.core.worker import requests as req
from kvdist.core.worker.worker import Worker
from kvdist.kernels.cpu import choose
from kvdist.kernels.interface import Device
from kvdist.nodes import Role
from kvdist.runtime.io_thread import Disk
from kvdist.runtime.node import Node, run_together
from kvdist.runtime.preparations import prepare
from kvdist.runtime.process_name import name_process
from kvdist.runtime.waits import UnderWay, UserThreads
from kvdist.transport.base import Transport
from kvdist.transport.factory import bind_port, open_transport
from kvdist.transport.inproc import InprocNetwork
from kvdist.transport.shared_memory.allocator import Allocator, HeapAllocator
from kvdist.version import __version__

LOG = logging.getLogger("kvdist")

EXIT_WAIT_S = 30.0
"""Longest wait of the interpreter's end for the node's thread, which may be in a callback of the user."""

HANDLERS: dict[int, Handler] = {}
"""Command → its handler on the servers of this process."""

EMBEDDED_ENDPOINT = "inproc://kvdist-scheduler"
EMBEDDED_SERVER_ENDPOINT = "inproc://kvdist-server"


class Leasing(Protocol):
    """The examples of the cluster's data that this process has leased."""

    def tell(self) -> None:
        """Report the number of used examples."""

    def give_back(self) -> None:
        """Return unused examples, so that others can lease them."""

    def rolled_back(self) -> None:
        """Drop all leases, as all have gone back to a snapshot."""


class RollsBack(Protocol):
    """A store, when all go back to a snapshot."""

    def forget_pushes(self) -> None:
        """Drop pushes that have not left, and residuals of earlier pushes."""

    def rolled_back(self, step: int) -> None:
        """Tell the user that the values are those of this step."""


class Cluster:
    """A membership. Created only by `ProcessCluster.join`.

    Args:
        config: settings of the cluster.
        node: node of the worker.
        memory: allocator of arrays that are to be sent.
        run: function of the thread.
        is_embedded: whether the whole cluster is in this process, so that another cluster may follow it.
    """

    def __init__(
        self, config: ClusterConfig, node: Node, memory: Allocator, run: Callable[[], None], is_embedded: bool = False
    ) -> None:
        self.config = config
        self.node = node
        self.memory = memory
        self.traffic = Traffic()
        """Bytes of values that threads of the user have touched."""
        self.under_way = UnderWay(config.limits.under_way_bytes)
        assert isinstance(node.machine, Worker)
        node.machine.watch(UserThreads(self.under_way))
        self.is_embedded = is_embedded
        self.rank = -1
        self.came_late = False
        """Whether this process joined a running job."""
        self.stores_open = 0
        self._next_store = 0
        self.stores: list[RollsBack] = []
        """Stores that are notified when all go back to a snapshot."""
        self.batches_pushed = 0
        """Number of pushes with examples that were submitted to the node."""
        self.leasing: Leasing | None = None
        """Leased examples of this process, which it returns when it leaves; None if it leases none."""
        self._retained: set[Future[Any]] = set()
        self._thread = threading.Thread(target=run, name="kvdist-node", daemon=True)

    def start(self) -> None:
        """Run the node and wait until the cluster is complete.

        Raises:
            ConfigError: the scheduler refused this process.
            DeadlineExceeded: the scheduler or other members did not appear in time.
        """
        self._thread.start()
        try:
            self.rank = self.ask(req.Register)
            self.came_late = self.rank not in self.node.view.members
        except BaseException:
            self.leave("it was interrupted while joining")
            raise
        if not self.is_embedded:
            name_process(f"{Role.WORKER}-{self.rank}")

    def open_store(self) -> int:
        """Return the number of a new store. All workers must open their stores in the same order."""
        self.stores_open += 1
        self._next_store += 1
        return self._next_store - 1

    def ask(self, make: Callable[[int], req.Request]) -> Any:
        """Submit a request to the worker, and wait for its result."""
        return self.wait(self.node.submit(make))

    def wait(self, future: Future[Any]) -> Any:
        """Wait for a future, and return its result.

        Raises:
            RuntimeError: a callback of a future calls this on the node's thread, which would wait for itself.
        """
        if threading.current_thread() is self._thread and not future.done():
            raise RuntimeError(
                "this call waits for the cluster, but runs in a callback of a future, on the thread that delivers the"
                " answers; use the *_async calls in callbacks, or wait on another thread"
            )
        trace = self.node.trace
        try:
            return future.result() if trace is None else trace.wait(future)
        except errors.RolledBackError as error:
            raise self.accept_rollback(error) from error

    @property
    def rolled_back(self) -> errors.RolledBackError | None:
        """Error of every call until the user has seen it; nearly always None."""
        machine = self.node.machine
        assert isinstance(machine, Worker)
        return machine.rolled_back

    def accept_rollback(self, error: errors.RolledBackError) -> errors.RolledBackError:
        """Accept a rollback, as the user is about to see its error: later calls are meant for the time after it.

        Returns:
            The error to raise once all have gone back: another server may have been lost meanwhile.
        """
        if self.rolled_back is None or threading.current_thread() is self._thread:
            return error
        for store in self.stores:
            store.forget_pushes()  # their values belong to steps that are undone
        newest: errors.RolledBackError | None = self.node.submit(req.AcceptRollback).result()
        if newest is None:
            return error  # another thread has seen it
        if self.leasing is not None:
            self.leasing.rolled_back()
        for store in self.stores:
            store.rolled_back(newest.step)
        return newest

    def retain(self, future: Future[Any]) -> None:
        """Stay in the cluster until a future is done: a checkpoint needs this process to become complete."""
        self._retained.add(future)
        future.add_done_callback(self._retained.discard)

    def leave(self, failure: str = "", *, wait: bool = True, ends: bool = False) -> None:
        """Leave the cluster: send a goodbye, wait for the answer, and end the thread. A `failure` makes it a loss.

        Args:
            failure: reason why this process cannot go on; '' if it leaves well.
            wait: whether to wait for retained futures first, unless there is a failure.
            ends: whether the process ends, without having closed its stores.

        Raises:
            DeadlockError: the last pushes wait for workers that wait for this worker.
            DeadlineExceeded: the last pushes have waited for ``KVDIST_STALL_SHUTDOWN_S``.
        """
        if wait and not failure:
            for future in list(self._retained):
                future.exception()
        if self.leasing is not None and not (failure or self.node.stopped):
            self.leasing.give_back()
        endless: errors.KvdistError | None = None
        if not self.node.stopped:
            try:
                self.ask(lambda number: req.Leave(number, failure, ends))
            except errors.RolledBackError as error:
                LOG.warning("this worker leaves without repeating the steps that were lost with a server: %s", error)
                self.leave(failure, wait=wait, ends=ends)
                return
            except (errors.DeadlockError, errors.DeadlineExceeded) as error:
                endless = error  # the goodbye has waited in vain
            except errors.KvdistError:
                pass  # the cluster ended first, and every open request has failed
        self._thread.join()
        # Else a process that continues without its cluster would keep the servers' memory mapped.
        self.memory.forget_shown()
        if not (failure or ends):
            tell_what_lingers()
        if endless is not None:
            raise endless

    def wait_for_thread(self, timeout_s: float) -> None:
        """Wait until the thread of a cluster that this process has left, or that failed, has ended.

        The wait comes before the interpreter's end, which stops threads in the middle of their work. A thread that is
        stopped in torch, even while it frees a tensor, aborts the process.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            LOG.warning(
                "a callback of a future has not returned %g s after the script's end; the process ends without it",
                timeout_s,
            )


class ProcessCluster:
    """The cluster of this process, which may be in a single cluster at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: Cluster | None = None
        self.after_leaving: list[Callable[[], None]] = []
        """Functions to call at the interpreter's end, after this process has left its cluster, if any."""

    @property
    def present(self) -> Cluster | None:
        """Cluster of this process; None if it is in none."""
        cluster = self._present
        return None if cluster is None or cluster.node.stopped else cluster

    def join(self) -> Cluster:
        """Return the cluster of this process; join it first if need be."""
        with self._lock:
            present = self._present
            if present is not None:
                present.node.check_fork()
                if not present.node.stopped:
                    return present
                if not present.is_embedded:
                    raise present.node.failure or errors.StoreClosed(
                        "this process has left the cluster and cannot join it again; keep one store open until the end"
                    )
            config = cluster_from_env()
            place = "" if config is None else f"{config.rank} at {config.root_host}:{config.root_port} in {config.job}"
            may_be_one_more = config is not None and config.rank is None and config.on_loss != "fail"
            if config is not None and (is_of_multiprocessing() or not may_be_one_more):
                require_own_place(place)
            cluster = _embedded() if config is None else _joined(config)
            prepare(cluster.node)
            cluster.start()
            self._present = cluster
            if place:
                take_place(f"{Role.WORKER}-{cluster.rank}", place)
            for sentence in without_effect() if cluster.rank == 0 else ():
                LOG.warning(sentence)
            return cluster

    def at_exit(self) -> None:
        """Leave the cluster as the interpreter ends, then call the functions of `after_leaving`."""
        try:
            self._leave_at_exit()
        finally:
            for action in self.after_leaving:
                action()

    def _leave_at_exit(self) -> None:
        """Leave the cluster, with a failure if the interpreter ends by an exception."""
        cluster = self._present
        if cluster is None:
            return
        try:
            cluster.node.check_fork()
        except errors.KvdistError:
            return
        if cluster.node.stopped:
            cluster.wait_for_thread(EXIT_WAIT_S)
            return
        cluster.leave(errors.failure_of(getattr(sys, "last_value", None)), ends=True)


PROCESS_CLUSTER = ProcessCluster()
atexit.register(PROCESS_CLUSTER.at_exit)


def server_node(
    config: ClusterConfig,
    endpoint: str,
    scheduler: str,
    device: Device | None,
    transport: Transport,
    memory: Allocator,
    disk: Disk | None = None,
) -> Node:
    """Create the node of a server, which does not run yet.

    Args:
        config: settings of the cluster.
        endpoint: address at which the server listens.
        scheduler: address of the scheduler.
        device: GPU that sums and updates; None for the host.
        transport: transport that is bound to `endpoint`.
        memory: allocator of the values.
        disk: disk for checkpoints; None for the disk of this host.
    """
    kernels = choose(read_setting("KVDIST_KERNELS"))
    arithmetic = None
    if device is not None:
        from kvdist.optimizer.offload import arithmetic_on  # a feature at a seam: loaded where it is used

        arithmetic = arithmetic_on(device, kernels)
        memory.pin(device.pin)
    introduced = introduction(config, endpoint, scheduler)
    kind: type[Server] = Server
    if config.replicas:
        from kvdist.core.server.replica import ReplicatedServer  # a feature at a seam: loaded where it is used

        kind = ReplicatedServer
    machine = kind(introduced, config.limits, kernels, time.monotonic(), memory.allocate, HANDLERS, arithmetic)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s, disk=disk)
    prepare(node)
    return node


def open_server_device(name: str) -> Device | None:
    """Open a GPU by its name; None for the host's processor.

    If the GPU cannot be opened, this is an error, without a fallback to the host.

    Args:
        name: ``cpu``, ``cuda:0`` and so on, as in ``KVDIST_SERVER_DEVICE``.

    Raises:
        ConfigError: ``KVDIST_GPU`` keeps all arithmetic on the host.
        DeviceError: the GPU, its driver or its library is missing.
    """
    if name == "cpu":
        return None
    from kvdist.kernels import gpu  # a feature at a seam: loaded where it is used

    if read_setting("KVDIST_GPU") == gpu.HOST:
        raise errors.ConfigError(
            f"KVDIST_SERVER_DEVICE is {name!r}, but KVDIST_GPU is {gpu.HOST!r}, which keeps a process off its GPUs:"
            " change one of them, or set KVDIST_GPU for workers alone"
        )
    try:
        # The usual advice, KVDIST_GPU=host, helps only workers: it is refused above.
        device = gpu.open_gpu(int(name.partition(":")[2]), otherwise="or let servers compute on their hosts")
    except errors.DeviceError as error:
        wish = f"this server was to sum and update on {name}, and without --server-device would do so on its host"
        raise errors.DeviceError(f"{wish}: {error}") from error
    LOG.info("values rest, and are summed and updated, on %s", device.name)
    return device


def introduction(config: ClusterConfig, endpoint: str, scheduler_endpoint: str) -> Introduction:
    """Return the introduction of this process to the scheduler; `endpoint` is its address, '' if it has none."""
    # Not a secret: it only has to differ between processes that start at the same time.
    token = random.SystemRandom().getrandbits(63) | 1
    return Introduction(
        config.role,
        token,
        config.rank,
        host_name(),
        os.getpid(),
        endpoint,
        config.num_workers,
        config.num_servers,
        __version__,
        scheduler_endpoint,
        config.restarts or 0,
    )


def _joined(config: ClusterConfig) -> Cluster:
    if config.role is not Role.WORKER:
        raise errors.ConfigError(
            f"DMLC_ROLE is {config.role}, but only workers create stores; start this process with"
            " `python -m kvdist` instead of your script"
        )
    transport, memory = open_transport(config)
    endpoint = "" if isinstance(memory, HeapAllocator) else _endpoint_for_neighbours(config, transport)
    introduced = introduction(config, endpoint, scheduler_endpoint(config))
    aggregation = None
    # A contribution in a sum of a host cannot go back to a snapshot.
    if config.local_reduce != "off" and config.num_workers > 1 and config.snapshots is None:
        from kvdist.core.worker.host_aggregation import HostAggregation  # a feature at a seam: loaded where it is used

        aggregation = HostAggregation(config.local_reduce, config.limits, memory.allocate)
    machine = Worker(introduced, config.limits, time.monotonic(), aggregation)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s)
    return Cluster(config, node, memory, node.run)


def _endpoint_for_neighbours(config: ClusterConfig, transport: Transport) -> str:
    """Return the address at which this worker sums for others of its host; '' if it does not."""
    if config.local_reduce == "off" or config.num_workers == 1:
        return ""
    try:
        return bind_port(transport, config, "127.0.0.1")
    except errors.ConfigError as error:
        if config.local_reduce == "on":
            raise
        LOG.info("this worker does not sum for others of its host: %s", error)
        return ""


def _embedded() -> Cluster:
    """Create a scheduler, a server and a worker in this process, in a single thread, without sockets."""
    LOG.warning(
        "kv.create('dist'): running alone, as the environment names no cluster. For several workers, start by"
        " `kvdist-launch -n WORKERS -s SERVERS COMMAND`"
    )
    config = embedded_cluster_from_env()
    device = open_server_device(config.server_device(0))
    network, memory = InprocNetwork(), HeapAllocator()
    transports = {role: network.transport() for role in Role}
    transports[Role.SCHEDULER].bind(EMBEDDED_ENDPOINT)
    transports[Role.SERVER].bind(EMBEDDED_SERVER_ENDPOINT)
    scheduler = Scheduler(replace(config, role=Role.SCHEDULER), time.monotonic())
    worker = Worker(introduction(config, "", EMBEDDED_ENDPOINT), config.limits, time.monotonic())
    of_server = replace(config, role=Role.SERVER), EMBEDDED_SERVER_ENDPOINT, EMBEDDED_ENDPOINT, device
    nodes = [
        Node(scheduler, transports[Role.SCHEDULER], config.job_tag, config.limits.explain_after_s),
        server_node(*of_server, transports[Role.SERVER], memory),
        Node(worker, transports[Role.WORKER], config.job_tag, config.limits.explain_after_s),
    ]
    prepare(nodes[0])
    return Cluster(config, nodes[-1], memory, lambda: run_together(nodes, network.wait), is_embedded=True)
