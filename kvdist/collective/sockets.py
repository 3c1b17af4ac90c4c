"""The sockets of the control channel: where rank 0 listens, and with which keys the ranks speak."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from kvdist.addresses import tcp_endpoint
from kvdist.collective_settings import CollectiveSettings
from kvdist.errors import ConfigError
from kvdist.limits import Limits
from kvdist.nodes import worker
from kvdist.protocol.collective import MESSAGE_BYTES_MAX
from kvdist.secret import read_secret
from kvdist.transport.endpoints import AddressInUse
from kvdist.world import World

if TYPE_CHECKING:
    from kvdist.transport.curve import Credentials
    from kvdist.transport.zeromq import ZeroMQTransport

# A stopped process is not a dead one, so ZeroMQ's own silence ends nothing here. A machine that is gone is noticed by
# the kernel, which waits for its acknowledgement of these probes, 10 s at most (`zeromq.RETRANSMIT_MS_MAX`).
LIMITS = replace(Limits(), heartbeat_s=5.0, silence_s=3600.0, frame_bytes_max=MESSAGE_BYTES_MAX)


def open_transport(world: World, settings: CollectiveSettings) -> ZeroMQTransport:
    """ZeroMQ, encrypted if there is a secret and ``KVDIST_SECURITY`` is not ``none``.

    Raises:
        ConfigError: the secret is missing or cannot be used.
    """
    from kvdist.transport.zeromq import ZeroMQTransport

    return ZeroMQTransport(LIMITS, _credentials(world, settings))


def _credentials(world: World, settings: CollectiveSettings) -> Credentials | None:
    if settings.secret_file is None and settings.security == "curve":
        raise ConfigError(
            "KVDIST_SECURITY is 'curve', but there is no secret to make keys of: set KVDIST_SECRET_FILE to a file with"
            " at least 32 random bytes, the same for all ranks"
        )
    if settings.secret_file is None or settings.security == "none":
        return None
    from kvdist.transport.curve import Credentials

    return Credentials(worker(world.rank), read_secret(settings.secret_file), frozenset(map(worker, range(world.size))))


def listen(transport: ZeroMQTransport, address: str, settings: CollectiveSettings) -> str:
    """Listen at a free port of an address, one of the range if there is one, and return the endpoint.

    Raises:
        ConfigError: there is no such address here, or every port of the range is taken.
    """
    if settings.port_range is None:
        return transport.bind(tcp_endpoint(address, 0))
    first, last = settings.port_range
    for port in range(first, last + 1):
        try:
            return transport.bind(tcp_endpoint(address, port))
        except AddressInUse:
            continue
    raise ConfigError(
        f"every port of {address} from {first} to {last} is taken (KVDIST_PORT_RANGE): widen the range, or end what"
        " listens there"
    )
