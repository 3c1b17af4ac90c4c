"""Opens the transport that the configuration of a process asks for, and finds a port for it to listen at.

ZeroMQ is imported when the first socket is opened: a process without sockets, as with the store ``device`` or an
embedded cluster, does not wait for the import.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdist.config.endpoints import tcp_endpoint
from kvdist.config.settings import ClusterConfig
from kvdist.config.sockets import (
    further_endpoint,
    open_files_warning,
    raise_open_files_limit,
    read_secret,
    require_private_folder,
    scheduler_endpoint,
)
from kvdist.errors import ConfigError
from kvdist.nodes import SCHEDULER, NodeId, Role, server, worker
from kvdist.transport.base import Transport
from kvdist.transport.endpoints import AddressInUse
from kvdist.transport.shared_memory.allocator import Allocator, HeapAllocator, SharedAllocator, WindowCache
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.transport import SharedMemoryTransport

if TYPE_CHECKING:
    from kvdist.transport.curve import Credentials
    from kvdist.transport.zeromq import ZeroMQTransport

LOG = logging.getLogger("kvdist")


def open_transport(config: ClusterConfig) -> tuple[Transport, Allocator]:
    """ZeroMQ, and shared memory between processes of a host where the system has it and the configuration allows it.

    Raises this process's limit of open files, and warns where it is too low for the cluster.
    """
    warning = open_files_warning(raise_open_files_limit(), config.num_workers, config.num_servers)
    if warning:
        LOG.warning(warning)
    sockets = open_sockets(config)
    if config.transport == "tcp":
        return sockets, HeapAllocator()
    obstacle = SharedMemoryTransport.available()
    if obstacle is not None:
        LOG.info("every byte is sent: %s", obstacle)
        return sockets, HeapAllocator()
    arena = Arena(config.limits.shared_bytes_max)
    transport = SharedMemoryTransport(sockets, arena)
    return transport, SharedAllocator(arena, WindowCache([arena.table, transport.table]))


def open_sockets(config: ClusterConfig) -> ZeroMQTransport:
    """ZeroMQ alone, encrypted if the configuration has a secret.

    Raises:
        ConfigError: the secret cannot be used, or the private folder for sockets of this machine cannot be created.
    """
    from kvdist.transport.zeromq import JUDGED_PROBE_S_MAX, VERDICT_PROBE_S, ZeroMQTransport

    if config.is_local:
        require_private_folder()
    if config.security == "none" and config.role is Role.SCHEDULER and not config.supervised:
        LOG.warning(
            "KVDIST_SECURITY is none: the sockets of this job are plain TCP, and any process that can connect to %s can"
            " read and change the model",
            scheduler_endpoint(config),
        )
    return ZeroMQTransport(
        config.limits,
        credentials_of(config),
        config.io_threads,
        config.num_workers + config.num_servers,
        probe_s=VERDICT_PROBE_S if config.role is Role.SCHEDULER else JUDGED_PROBE_S_MAX,
    )


def credentials_of(config: ClusterConfig) -> Credentials | None:
    """The keys of this process and the names of the processes that may dial it; None for a job that does not encrypt.

    Raises:
        ConfigError: the secret is missing or cannot be used, or this process does not know its rank.
    """
    if config.secret_file is None:
        return None
    secret = read_secret(config.secret_file)
    rank = 0 if config.role is Role.SCHEDULER else config.rank
    if rank is None:
        raise ConfigError(
            "KVDIST_RANK is not set, but in an encrypted job (KVDIST_SECRET_FILE) each process has a separate key,"
            " derived from its role and rank: kvdist-launch sets it; without kvdist-launch set it for each process,"
            " from 0 for the servers and from 0 for the workers"
        )
    from kvdist.transport.curve import Credentials

    processes = {SCHEDULER, *map(server, range(config.num_servers)), *map(worker, range(config.num_workers))}
    return Credentials(NodeId(config.role, rank), secret, frozenset(processes))


def bind_port(transport: Transport, config: ClusterConfig, host: str) -> str:
    """Listen at a free port of `host`, within the configured range if any, or at a file; return the endpoint.

    Raises:
        ConfigError: this machine does not have the address, or every port of the range is taken.
    """
    if config.is_local:
        return transport.bind(further_endpoint(config.root_port))
    if config.port_range is None:
        return transport.bind(tcp_endpoint(host, 0))
    return bind_first_free(transport, host, _ports(config, *config.port_range))


def bind_first_free(transport: Transport, host: str, ports: Sequence[int]) -> str:
    """Listen at the first free port of a range, in this order; return the endpoint.

    Raises:
        ConfigError: this machine does not have the address, or every port is taken.
    """
    for port in ports:
        try:
            return transport.bind(tcp_endpoint(host, port))
        except AddressInUse:
            continue
    raise ConfigError(
        f"every port of {host} from {min(ports)} to {max(ports)} is in use (KVDIST_PORT_RANGE): widen the range, or"
        " stop the programs that listen on them"
    )


def _ports(config: ClusterConfig, first: int, last: int) -> list[int]:
    """All ports of the range, rotated so that each process of the job begins at a different port if the range is large
    enough."""
    ports = list(range(first, last + 1))
    if config.rank is None:
        begin = os.getpid()
    else:
        begin = {Role.SCHEDULER: 0, Role.SERVER: 1, Role.WORKER: 1 + config.num_servers}[config.role] + config.rank
    begin %= len(ports)
    return ports[begin:] + ports[:begin]
