"""Encrypted transports for tests: every one has the same name, so each may dial each without being told whom."""

from __future__ import annotations

from kvdist.config.settings import Limits
from kvdist.nodes import SCHEDULER, NodeId, server, worker
from kvdist.transport.base import Route
from kvdist.transport.curve import Credentials
from kvdist.transport.zeromq import ZeroMQTransport
from tests.transport.patience import PATIENT

SECRET = bytes(range(32))
EVERYBODY = frozenset([SCHEDULER, server(0), server(1), worker(0), worker(1)])


def credentials(me: NodeId = SCHEDULER, secret: bytes = SECRET, peers: frozenset[NodeId] = EVERYBODY) -> Credentials:
    return Credentials(me, secret, peers)


class Encrypted(ZeroMQTransport):
    """One that dials the scheduler, unless it is told otherwise."""

    def __init__(self, limits: Limits = PATIENT, own: Credentials | None = None, io_threads: int = 1) -> None:
        super().__init__(limits, own or credentials(), io_threads)

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        return super().connect(endpoint, to or SCHEDULER)
