"""Where the ranks of a job reach this machine."""

from __future__ import annotations

import socket

from kvdist.config.addresses import address_of_interface, host_name, is_loopback, own_addresses
from kvdist.config.collective_settings import CollectiveSettings
from kvdist.config.environment import World
from kvdist.errors import CollectiveError

LOOPBACK = "127.0.0.1"


def own_address(world: World, settings: CollectiveSettings) -> str:
    """The address that the others dial: what the user has set, else the one that this machine has towards rank 0.

    Raises:
        ConfigError: there is no such interface.
        CollectiveError: there is no way to rank 0.
    """
    host = world.meeting.host or LOOPBACK
    if is_loopback(host):
        return host if ":" in host else LOOPBACK
    if settings.node_host:
        return settings.node_host
    if settings.interface:
        return address_of_interface(settings.interface, prefers_ipv6=":" in host)
    try:
        found = socket.getaddrinfo(host, world.meeting.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:3]) as towards:
            towards.connect(found[4])
            address = str(towards.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise CollectiveError(f"{host_name()} has no way to rank 0 at {host}: {error}") from error
    if is_loopback(address) and world.local_size < world.size:
        # Rank 0's own name, which many systems give a loopback address that others cannot dial.
        others = [str(own.address) for own in own_addresses() if not own.address.is_loopback]
        return others[0] if others else address
    return address
