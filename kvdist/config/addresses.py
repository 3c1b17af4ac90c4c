"""Addresses of this machine and its interfaces, as the system lists them."""

from __future__ import annotations

import array
import contextlib
import hashlib
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdist.config.endpoints import is_loopback
from kvdist.errors import ConfigError

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
OWN_ADDRESSES_MAX = 1024


def host_name() -> str:
    """Name of this machine, for messages."""
    return socket.gethostname()


def boot_id() -> str:
    """Identifier of the running kernel, different on other machines and after a restart; '' if unknown."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    return ""


def this_machine() -> str:
    """Twelve hexadecimal digits that processes have in common if and only if they are on the same machine.

    They are a digest of the running kernel and the network namespace, since containers that act as machines have
    separate namespaces. The host name replaces either if it is unknown; alone it would not do, as cloned machines have
    the same name.
    """
    namespace = ""
    with contextlib.suppress(OSError):
        namespace = str(os.stat("/proc/self/ns/net").st_ino)
    seen = f"{boot_id() or host_name()} {namespace or host_name()}"
    return hashlib.blake2b(seen.encode(), digest_size=6).hexdigest()


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine on the route to `host`, which a server on this machine should announce.

    Raises:
        ConfigError: the name does not resolve, or no route exists; the message has the reason.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        # Connecting a datagram socket sends nothing; it only asks the kernel which card it would use.
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:  # an empty or a long label cannot be encoded
        raise ConfigError(
            f"no way from this machine to the scheduler at {host}:{port} ({error});"
            " check DMLC_PS_ROOT_URI, or set DMLC_NODE_HOST to this machine's address"
        ) from error


@dataclass(frozen=True)
class OwnAddress:
    """An address of this machine."""

    interface: str
    address: Address

    def __str__(self) -> str:
        return f"{self.interface} {self.address}"


def own_addresses() -> list[OwnAddress]:
    """The addresses of this machine's interfaces, without link-local ones, which are only valid with an interface."""
    found = [*_own_ipv4(), *_own_ipv6()]
    return [one for one in found if not one.address.is_link_local]


def address_of_interface(text: str, prefers_ipv6: bool = False) -> str:
    """The address of this machine on a named interface, or in a network such as ``10.0.0.0/8``.

    A loopback address is returned only for ``lo`` and for a network that has no others.

    Args:
        text: the user's setting: the name of an interface, or a network.
        prefers_ipv6: whether an IPv6 address is preferred if an interface has addresses of both kinds.

    Raises:
        ConfigError: this machine has no such address; the message lists its addresses.
    """
    own = own_addresses()
    if "/" in text:
        try:
            network = ipaddress.ip_network(text, strict=False)
        except ValueError as error:
            raise ConfigError(f"DMLC_INTERFACE is {text!r}, which is not a network: {error}") from None
        # 0.0.0.0/0 does not mean the address at which no other machine reaches this one.
        fits = [one for one in own if one.address in network and (network.is_loopback or not one.address.is_loopback)]
        what = "and this machine has no address in it" + ("" if network.is_loopback else " but loopback ones at most")
    elif _is_address(text):
        fits, what = [], "an address: write the name of its interface, or ADDRESS/32 (IPv6: ADDRESS/128)"
    else:
        fits, what = [one for one in own if one.interface == text], "which has no address here"
    if not fits:
        known = ", ".join(map(str, own)) or "none has an address"
        raise ConfigError(f"DMLC_INTERFACE is {text!r}, {what}; interfaces: {known}")
    wanted = 6 if prefers_ipv6 else 4
    return str(min(fits, key=lambda one: one.address.version != wanted).address)


def own_addresses_of(host: str, preferred: str | None = None) -> list[str]:
    """All addresses of this machine that a name or an address stands for, to listen at.

    Other processes may dial any of these addresses: libzmq takes the first IPv6 address that the name has on the
    machine of the caller, whatever the order on this machine.

    Args:
        host: the name or address that other processes dial.
        preferred: leaves out addresses of other interfaces than that of this address, if the name stands for it.

    Raises:
        ConfigError: the name does not resolve, or to no address of this machine.
    """
    if _is_address(host) or host == "*":
        return [host]
    try:
        meant = list(dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo(host, None)))
    except (OSError, UnicodeError) as error:  # an empty or a long label cannot be encoded
        raise ConfigError(f"DMLC_PS_ROOT_URI is {host!r}, a name that does not resolve here ({error})") from error
    interfaces = {str(one.address): one.interface for one in own_addresses()}
    # All of 127.0.0.0/8 is this machine's, but only one address of it is listed; ::1 is not where IPv6 is turned off.
    here = [one for one in meant if not interfaces or one in interfaces or (is_loopback(one) and ":" not in one)]
    if not here:
        raise ConfigError(
            f"DMLC_PS_ROOT_URI is {host!r}, which is {', '.join(meant)}, but the scheduler runs here, and this machine"
            f" has {', '.join(map(str, own_addresses()))}"
        )
    if preferred in here:
        return [one for one in here if interfaces.get(one) == interfaces.get(str(preferred))]
    return here


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _own_ipv4() -> Iterator[OwnAddress]:
    """IPv4 addresses as Linux lists them: a name of 16 bytes, then an address whose length depends on the machine."""
    if not sys.platform.startswith("linux"):
        return
    import fcntl

    siocgifconf, entry_bytes = 0x8912, 40 if struct.calcsize("P") == 8 else 32
    room = array.array("B", bytes(entry_bytes * OWN_ADDRESSES_MAX))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        answer = fcntl.ioctl(probe.fileno(), siocgifconf, struct.pack("iP", len(room), room.buffer_info()[0]))
    used = int.from_bytes(answer[:4], sys.byteorder)
    for start in range(0, used, entry_bytes):
        entry = room[start : start + entry_bytes].tobytes()
        name = entry[:16].partition(b"\0")[0].decode("utf-8", "replace")
        yield OwnAddress(name.partition(":")[0], ipaddress.IPv4Address(entry[20:24]))


def _own_ipv6() -> Iterator[OwnAddress]:
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text("ascii").splitlines():
            words = line.split()
            yield OwnAddress(words[5], ipaddress.IPv6Address(bytes.fromhex(words[0])))
