"""The sockets of the control channel: where rank 0 listens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdist.config.addresses import is_loopback, tcp_endpoint
from kvdist.config.collective_settings import CollectiveSettings
from kvdist.config.limits import Limits
from kvdist.config.local_sockets import further_endpoint, require_private_folder
from kvdist.errors import ConfigError
from kvdist.protocol.collective import MESSAGE_BYTES_MAX
from kvdist.transport.endpoints import AddressInUse

if TYPE_CHECKING:
    from kvdist.transport.zeromq import ZeroMQTransport


def open_transport(settings: CollectiveSettings) -> ZeroMQTransport:
    """ZeroMQ, without encryption.

    A rank that stands still is not a lost one here; one whose machine is gone is, as it acknowledges no heartbeat.

    Raises:
        ConfigError: encryption is asked for.
    """
    if settings.secret_file is not None or settings.security == "curve":
        name = "KVDIST_SECURITY=curve" if settings.secret_file is None else "KVDIST_SECRET_FILE"
        raise ConfigError(
            f"{name} asks for encryption, and what ranks send to each other by collective operations (gloo, NCCL) is"
            " not encrypted: unset it if they are on one machine or in a network that you trust, or use 'dist'"
        )
    from kvdist.transport.zeromq import ZeroMQTransport

    limits = Limits(frame_bytes_max=MESSAGE_BYTES_MAX, patience_s=settings.patience_s)
    return ZeroMQTransport(limits, judges_silence=False)


def listen(transport: ZeroMQTransport, address: str, settings: CollectiveSettings) -> str:
    """Listen at a free port of an address, one of the range if there is one, and return the endpoint.

    Where all ranks are on one machine that is a file, unless ``KVDIST_SECURITY`` is ``none``.

    Raises:
        ConfigError: there is no such address here, or every port of the range is taken.
    """
    if is_loopback(address) and settings.security is None:
        require_private_folder()
        return transport.bind(further_endpoint(0))
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
