"""Where the processes of a job meet: the addresses under which each host reaches the scheduler, or rank 0.

An alias that ssh knows is no address, so addresses are never taken from the hosts' names. A host says which address it
sees this machine under (ssh's own variable), which is the one its processes can dial, if it is this machine's and not
that of a router in between.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from kvdist.config.addresses import address_of_interface
from kvdist.errors import ConfigError
from kvdist_launch.fleet import Station

ANY_ADDRESS, ANY_IPV4_ADDRESS = "::", "0.0.0.0"


def root_addresses(
    stations: Sequence[Station],
    root: Station | None,
    interface: str | None = None,
    is_ours: Callable[[str], bool] | None = None,
    has_servers: bool = True,
) -> list[str]:
    """For each host the address of the job's root, as it is reached from there.

    Args:
        stations: the hosts. One where the root runs has been asked for its address on the interface, if any.
        root: where the scheduler runs, or in a job without servers rank 0; None is this machine.
        interface: the name of a network card, or a network, in which the address has to be.
        is_ours: whether this machine has an address.
        has_servers: whether the root is a scheduler.

    Raises:
        ConfigError: a host sees this machine behind a router, so that it cannot be dialled from there; or there is no
            such interface.
    """
    if root is not None and not root.is_here:
        if root.found.get("no_interface"):
            raise ConfigError(f"{root.host.name}: {root.found['no_interface']}")
        return [str(root.found.get("address") or root.address)] * len(stations)
    if interface is not None:
        return [address_of_interface(interface)] * len(stations)
    is_ours = is_address_of_this_machine if is_ours is None else is_ours
    for station in stations:
        if station.seen_as and not is_ours(station.seen_as):
            advice = (
                f"a scheduler here. Let it run on one of the hosts: --scheduler-on {station.host.name}"
                if has_servers
                else f"rank 0 here. Name {station.host.name} before localhost in the list of hosts"
            )
            raise ConfigError(
                f"{station.host.name} sees this machine as {station.seen_as}, which is none of its addresses (NAT, or a"
                f" jump host): processes there could not reach {advice}"
            )
    seen = [station.seen_as for station in stations if station.seen_as]
    here = seen[0] if seen else "127.0.0.1"
    return [station.seen_as or here for station in stations]


def listening_address(addresses: Sequence[str]) -> str:
    """Where the root listens so that it is reached under all of these."""
    if len(set(addresses)) == 1:
        return addresses[0]
    return ANY_ADDRESS if any(":" in address for address in addresses) else ANY_IPV4_ADDRESS


def is_address_of_this_machine(address: str) -> bool:
    """Whether one of this machine's network cards has it."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
