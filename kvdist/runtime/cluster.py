"""This process's membership in a cluster: one worker node and its thread, shared by all stores of the process.

Three ways of becoming a member: the environment describes a cluster (this process joins it as a worker), or it
describes none (a cluster of one worker and one server runs inside this process, in one thread), or it is wrong (an
error says how). Leaving is explicit with the last `close()`, else it happens when the interpreter ends.
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
from kvdist.core.commands import Handler
from kvdist.core.joining import Introduction
from kvdist.core.scheduler.scheduler import Scheduler
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
"""How long the interpreter's end waits for the node's thread, which may be in a callback of the user's."""

HANDLERS: dict[int, Handler] = {}
"""Command → its handler on the servers of this process."""

EMBEDDED_ENDPOINT = "inproc://kvdist-scheduler"
EMBEDDED_SERVER_ENDPOINT = "inproc://kvdist-server"


class Leasing(Protocol):
    """What this process has leased of the cluster's data."""

    def tell(self) -> None:
        """Say how many are used."""

    def give_back(self) -> None:
        """Let others have what is not used."""

    def rolled_back(self) -> None:
        """All have gone back to a snapshot: what is leased is void."""


class RollsBack(Protocol):
    """A store, when all go back to a snapshot."""

    def forget_pushes(self) -> None:
        """Drop what has not left, and what is left of pushes."""

    def rolled_back(self, step: int) -> None:
        """Tell the user that the values are those of this step."""


class Cluster:
    """One membership. Made by `ProcessCluster.join`, not by hand.

    Args:
        config: the cluster.
        node: the worker's node.
        memory: where arrays lie that are to be sent.
        run: what the thread does.
        is_embedded: the whole cluster lives in this process, so another one may be made after it.
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
        """Whether this process has joined a running job."""
        self.stores_open = 0
        self._next_store = 0
        self.stores: list[RollsBack] = []
        """What hears of it when all go back to a snapshot."""
        self.batches_pushed = 0
        """How many pushes that say their examples have been handed to the node."""
        self.leasing: Leasing | None = None
        """If this process trains on leased examples, which others may have when it leaves."""
        self._retained: set[Future[Any]] = set()
        self._thread = threading.Thread(target=run, name="kvdist-node", daemon=True)

    def start(self) -> None:
        """Run the node and wait until the cluster is complete.

        Raises:
            ConfigError: the scheduler refused this process.
            DeadlineExceeded: the scheduler or the rest of the cluster did not turn up.
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
        """A number for a new store: all workers must open theirs in the same order."""
        self.stores_open += 1
        self._next_store += 1
        return self._next_store - 1

    def ask(self, make: Callable[[int], req.Request]) -> Any:
        """Hand the worker a request and wait for its result."""
        return self.wait(self.node.submit(make))

    def wait(self, future: Future[Any]) -> Any:
        """The result of a future.

        Raises:
            RuntimeError: called on the node's own thread, by a callback of a future, which would wait for itself.
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
        """What every call fails with, until the user has seen it; nearly always None."""
        machine = self.node.machine
        assert isinstance(machine, Worker)
        return machine.rolled_back

    def accept_rollback(self, error: errors.RolledBackError) -> errors.RolledBackError:
        """The user is about to see this error: what is called from now on is meant for after it.

        Returns:
            What to raise, when all have gone back: another server may have been lost meanwhile.
        """
        if self.rolled_back is None or threading.current_thread() is self._thread:
            return error
        for store in self.stores:
            store.forget_pushes()  # of values that are no more
        newest: errors.RolledBackError | None = self.node.submit(req.AcceptRollback).result()
        if newest is None:
            return error  # another thread has seen it
        if self.leasing is not None:
            self.leasing.rolled_back()
        for store in self.stores:
            store.rolled_back(newest.step)
        return newest

    def retain(self, future: Future[Any]) -> None:
        """Stay in the cluster until this is done: a checkpoint, which needs this process to be complete."""
        self._retained.add(future)
        future.add_done_callback(self._retained.discard)

    def leave(self, failure: str = "", *, wait: bool = True, ends: bool = False) -> None:
        """Say goodbye, wait until it is heard, and end the thread. With a `failure` this process is lost.

        Args:
            failure: why this process cannot go on.
            wait: first for what holds it.
            ends: the process ends, and has closed no store.

        Raises:
            DeadlockError: pushes that have to arrive first wait for workers that wait for this one.
            DeadlineExceeded: they have waited for as long as ``KVDIST_STALL_SHUTDOWN_S``.
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
                endless = error  # leaving itself waited in vain
            except errors.KvdistError:
                pass  # the cluster ended first, and every open request has failed
        self._thread.join()
        # Or a process that goes on without its cluster would keep the servers' memory mapped, when nothing else does.
        self.memory.forget_shown()
        if not (failure or ends):
            tell_what_lingers()
        if endless is not None:
            raise endless

    def wait_for_thread(self, timeout_s: float) -> None:
        """Wait until the thread of a cluster that this process has left, or that failed, has ended.

        Before the interpreter does: it ends threads that still run in the middle of whatever they do, and one that is
        in torch then, if only to free a tensor, aborts the process.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            LOG.warning(
                "a callback of a future has not returned %g s after the script's end; the process ends without it",
                timeout_s,
            )


class ProcessCluster:
    """The one cluster that this process may be in at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._present: Cluster | None = None
        self.after_leaving: list[Callable[[], None]] = []
        """What to do at the interpreter's end, after this process has left its cluster, if it was in one."""

    @property
    def present(self) -> Cluster | None:
        """The cluster that this process is in, if it is in one."""
        cluster = self._present
        return None if cluster is None or cluster.node.stopped else cluster

    def join(self) -> Cluster:
        """The cluster of this process, joined now if it has not been."""
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
        """The interpreter ends: leave the cluster, then do what is to be done after that."""
        try:
            self._leave_at_exit()
        finally:
            for action in self.after_leaving:
                action()

    def _leave_at_exit(self) -> None:
        """Say goodbye, and say so if the interpreter ends by an exception."""
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
    """The node of a server, to be run.

    Args:
        endpoint: where it listens, with `transport`.
        scheduler: where its scheduler does.
        device: where it sums and updates; None for the host.
        memory: where its values lie.
        disk: where checkpoints go; None for anywhere on this machine.
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
    """The GPU of this name, ready for work; None for the host's processor.

    There is no falling back: who asks for a GPU gets it, or this error.

    Args:
        name: ``cpu``, or ``cuda:0`` and so on, as ``KVDIST_SERVER_DEVICE`` takes it.

    Raises:
        ConfigError: ``KVDIST_GPU`` keeps all arithmetic on the host.
        DeviceError: there is no such GPU, no driver, or no library for it.
    """
    if name == "cpu":
        return None
    from kvdist.kernels import gpu  # a feature at a seam: loaded where it is used

    setting = read_setting("KVDIST_GPU")
    if setting == gpu.HOST:
        raise errors.ConfigError(
            f"KVDIST_SERVER_DEVICE is {name!r}, but KVDIST_GPU is {gpu.HOST!r}, which keeps a process off its GPUs:"
            " change one of them, or set KVDIST_GPU for workers alone"
        )
    try:
        # KVDIST_GPU=host, which helps a worker, would be refused above.
        device = gpu.open_gpu(int(name.partition(":")[2]), setting, otherwise="or let servers compute on their hosts")
    except errors.DeviceError as error:
        wish = f"this server was to sum and update on {name}, and without --server-device would do so on its host"
        raise errors.DeviceError(f"{wish}: {error}") from error
    LOG.info("values rest, and are summed and updated, on %s", device.name)
    return device


def introduction(config: ClusterConfig, endpoint: str, scheduler_endpoint: str) -> Introduction:
    """What this process says of itself to the scheduler; `endpoint` is where it listens, if it does."""
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
    # What is in a sum cannot go back to a snapshot.
    if config.local_reduce != "off" and config.num_workers > 1 and config.snapshots is None:
        from kvdist.core.host_aggregation import HostAggregation  # a feature at a seam: loaded where it is used

        aggregation = HostAggregation(config.local_reduce, config.limits, memory.allocate)
    machine = Worker(introduced, config.limits, time.monotonic(), aggregation)
    node = Node(machine, transport, config.job_tag, config.limits.explain_after_s)
    return Cluster(config, node, memory, node.run)


def _endpoint_for_neighbours(config: ClusterConfig, transport: Transport) -> str:
    """Where other workers of this host reach this one, if it is to sum for them; '' for nowhere."""
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
    """A scheduler, a server and a worker in this process, in one thread, without sockets."""
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
