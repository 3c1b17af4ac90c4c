"""Endpoints: what libzmq would take silently or refuse with a number is refused here with a sentence."""

from __future__ import annotations

import errno

from kvdist.errors import ConfigError
from kvdist.nodes import HOST_MARK
from kvdist.transport.owners import owner_of_file, owner_of_port


def with_host(endpoint: str, host: str) -> str:
    """The endpoint, saying on which host its shared memory can be opened."""
    return f"{endpoint}{HOST_MARK}{host}"


def split_host(endpoint: str) -> tuple[str, str]:
    """The endpoint without its host mark, and what the mark said; '' when there was none."""
    plain, mark, host = endpoint.rpartition(HOST_MARK)
    return (plain, host) if mark else (endpoint, "")


def check_form(endpoint: str) -> str:
    """The endpoint without its host mark. Raises `ConfigError` when it is no ``tcp://host:port`` or ``ipc:///path``."""
    endpoint, _ = split_host(endpoint)
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not address:
        raise ConfigError(f"{endpoint!r} is no endpoint; write tcp://host:port or ipc:///path")
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{endpoint!r}: an IPv6 address stands in brackets; write tcp://[{host}]:{port}")
    if scheme == "tcp" and not (host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{endpoint!r}: a port from 0 to 65535 follows the host; write tcp://host:port")
    return endpoint


class AddressInUse(ConfigError):
    """Somebody else listens there, so another port may do."""

    def __str__(self) -> str:
        # Whose it is takes a look at every descriptor of the machine, so only a sentence that is shown has it.
        endpoint = str(self.args[0])
        scheme, _, address = endpoint.partition("://")
        port = address.rpartition(":")[2]
        owner = ""
        if scheme == "ipc":
            owner = owner_of_file(address)
        elif port.isdigit():
            owner = owner_of_port(int(port))
        owner = owner or "another process"
        return (
            f"cannot bind {endpoint}: it is in use by {owner}; end that one or choose another port or path"
            f" (errno {errno.EADDRINUSE}, EADDRINUSE)"
        )


def bind_error(endpoint: str, number: int, text: str) -> ConfigError:
    """The sentence for a refused bind; `text` stands for an error number that is not expected."""
    if number == errno.EADDRINUSE:
        return AddressInUse(endpoint)
    advice = {
        errno.EADDRNOTAVAIL: "it is not an address of this machine; give one that `ip address` lists here",
        errno.ENODEV: "it is not an address or interface of this machine; give one that `ip address` lists here",
        errno.EACCES: "this user may not; choose a port from 1024 up, or a folder of your own",
    }
    name = errno.errorcode.get(number, "")
    code = f" (errno {number}, {name})" if name else f" (errno {number})"
    return ConfigError(f"cannot bind {endpoint}: {advice.get(number, text)}{code}")
