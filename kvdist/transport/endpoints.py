"""Endpoints: their form, inherited listening sockets, and messages for errors that libzmq reports by number."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from kvdist.config.endpoints import tcp_endpoint
from kvdist.config.sockets import SCHEME
from kvdist.errors import ConfigError
from kvdist.nodes import HOST_MARK

LISTENING = "0A"
"""State of a listening socket in ``/proc/net/tcp``."""


def owner_of_port(port: int) -> str:
    """``process 4242 (python)`` that listens at a port; '' if it cannot be seen, as with other users' processes."""
    return _owner_of(_listening_inodes(port))


def owner_of_file(path: str) -> str:
    """``process 4242 (python)`` whose socket is bound to a path; '' if it cannot be seen."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/net/unix").read_text("utf-8", "surrogateescape").splitlines()[1:]
        return _owner_of(line.split()[6] for line in lines if line.endswith(f" {path}"))
    return ""


def _owner_of(inodes: Iterable[str]) -> str:
    wanted = {f"socket:[{inode}]" for inode in inodes}
    if not wanted:
        return ""
    for folder in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            if any(os.readlink(folder / name) in wanted for name in os.listdir(folder)):
                return f"process {folder.parent.name} ({(folder.parent / 'comm').read_text('utf-8').strip()})"
    return ""


def _listening_inodes(port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in Path("/proc/net", table).read_text("ascii").splitlines()[1:]:
                words = line.split()
                if words[3] == LISTENING and int(words[1].rpartition(":")[2], 16) == port:
                    yield words[9]


def endpoint_of_listener(descriptor: int) -> str:
    """The endpoint of an inherited descriptor at which connections can be accepted.

    Raises:
        ConfigError: the descriptor is not a listening socket.
    """
    name = f"KVDIST_LISTEN_FD is {descriptor}"
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{name}, which is not a socket; it must be an inherited listening socket")
        duplicate = os.dup(descriptor)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{name}, but no such descriptor is open here ({error}); the program that starts this process must"
            " let it inherit the descriptor"
        ) from error
    with socket.socket(fileno=duplicate) as one:
        is_known = one.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and one.type == socket.SOCK_STREAM
        if not is_known or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(
                f"{name}, a socket that does not listen for connections; bind it (TCP or a file) and call listen on it"
            )
        if one.family == socket.AF_UNIX:
            return f"{SCHEME}{one.getsockname()}"
        return tcp_endpoint(*one.getsockname()[:2])


def with_host(endpoint: str, host: str) -> str:
    """The endpoint with a mark that names the host on which its shared memory can be opened."""
    return f"{endpoint}{HOST_MARK}{host}"


def split_host(endpoint: str) -> tuple[str, str]:
    """The endpoint without its host mark, and the host; '' without a mark."""
    plain, mark, host = endpoint.rpartition(HOST_MARK)
    return (plain, host) if mark else (endpoint, "")


def check_form(endpoint: str) -> str:
    """The endpoint without its host mark. Raises `ConfigError` unless it is ``tcp://host:port`` or ``ipc:///path``."""
    endpoint, _ = split_host(endpoint)
    scheme, separator, address = endpoint.partition("://")
    if not separator or scheme not in ("tcp", "ipc") or not address:
        raise ConfigError(f"{endpoint!r} is not an endpoint; write tcp://host:port or ipc:///path")
    host, _, port = address.rpartition(":")
    if scheme == "tcp" and ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ConfigError(f"{endpoint!r}: an IPv6 address stands in brackets; write tcp://[{host}]:{port}")
    if scheme == "tcp" and not (host and port.isascii() and port.isdigit() and int(port) <= 65535):
        raise ConfigError(f"{endpoint!r}: a port from 0 to 65535 follows the host; write tcp://host:port")
    return endpoint


class AddressInUse(ConfigError):
    """Another process listens at the address, so another port may be free."""

    def __str__(self) -> str:
        # Finding the owner looks at every descriptor of the machine, so it is done only for an error that is shown.
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
    """The error for a refused bind; `text` describes an error number that is not expected."""
    if number == errno.EADDRINUSE:
        return AddressInUse(endpoint)
    advice = {
        errno.EADDRNOTAVAIL: "it is not an address of this machine; use an address that `ip address` lists",
        errno.ENODEV: "it is not an address or interface of this machine; use an address that `ip address` lists",
        errno.EACCES: "this user may not; choose a port from 1024 up, or a folder that this user may write to",
    }
    name = errno.errorcode.get(number, "")
    code = f" (errno {number}, {name})" if name else f" (errno {number})"
    return ConfigError(f"cannot bind {endpoint}: {advice.get(number, text)}{code}")
