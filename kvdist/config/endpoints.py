"""Endpoints as text: ``tcp://host:port`` and ``ipc:///path``. Pure; `kvdist.config.addresses` asks the system."""

from __future__ import annotations

import ipaddress


def tcp_endpoint(host: str, port: int) -> str:
    """``tcp://host:port`` with the brackets that an IPv6 address needs."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of a tcp:// endpoint, without brackets."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def stays_on_host(endpoint: str) -> bool:
    """Whether bytes sent to an endpoint stay on this machine, where sending is as fast as memory."""
    if endpoint.startswith("ipc://"):
        return True
    address = endpoint.removeprefix("tcp://")
    host = address[1:].partition("]")[0] if address.startswith("[") else address.partition(":")[0]
    return address != endpoint and is_loopback(host)


def crosses_network(endpoint: str) -> bool:
    """Whether bytes sent to an endpoint may leave this machine."""
    return endpoint.startswith("tcp://") and not stays_on_host(endpoint)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host` (a name or an address)."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
