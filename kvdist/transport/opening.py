"""Which transport a process of a cluster uses, and where its values lie."""

from __future__ import annotations

import logging

from kvdist.config import ClusterConfig
from kvdist.transport.arena import Arena
from kvdist.transport.base import Transport
from kvdist.transport.memory import Memory, OrdinaryMemory, SharedMemory
from kvdist.transport.shared_memory import SharedMemoryTransport
from kvdist.transport.window import WindowCache
from kvdist.transport.zeromq import ZeroMQTransport

LOG = logging.getLogger("kvdist")


def open_transport(config: ClusterConfig) -> tuple[Transport, Memory]:
    """ZeroMQ, and shared memory between processes of one host where the system has it and the configuration allows."""
    sockets = ZeroMQTransport(config.limits)
    if config.transport == "tcp":
        return sockets, OrdinaryMemory()
    obstacle = SharedMemoryTransport.available()
    if obstacle is not None:
        LOG.info("every byte is sent: %s", obstacle)
        return sockets, OrdinaryMemory()
    arena = Arena(config.limits.shared_bytes_max)
    transport = SharedMemoryTransport(sockets, arena)
    return transport, SharedMemory(arena, WindowCache([arena.table, transport.table]))
