"""The socket at which a job's root (scheduler or rank 0) will listen: bound before anything starts, and inherited.

A free port that is chosen first and bound later can be taken in between. So the launcher binds the socket first; the
root inherits the descriptor (``KVDIST_LISTEN_FD``), and every process knows the port from the start.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence

from kvdist.config.settings import SETTINGS
from kvdist.config.sockets import SCHEME, listen_at, local_endpoint, port_of_local, remove, require_private_folder
from kvdist.errors import ConfigError

VARIABLE = "KVDIST_LISTEN_FD"

BACKLOG = 4096
"""Length of the queue of connections: all processes of a job dial at once."""
LOOPBACK = "127.0.0.1"
LOCAL_PORTS = range(1024, 65536)
"""Range of ports for sockets of this machine, where a port is only a part of a file name."""
LOCAL_TRIES = 100


def ports_of(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The ports to choose from, by ``KVDIST_PORT_RANGE``; empty for any port.

    Raises:
        ConfigError: the variable is not a range of ports.
    """
    first, last = SETTINGS["KVDIST_PORT_RANGE"].read(environ) or (0, -1)
    return tuple(range(first, last + 1))


def listen(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """A socket that listens at an address of this machine.

    Args:
        host: the address, numeric.
        ports: ports to choose from; an empty sequence leaves the choice to the system.

    Raises:
        ConfigError: the address is not this machine's, or every port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # Jobs that start together on one machine should not all try the first one first.
    start = int.from_bytes(os.urandom(4), "big") % len(ports) if ports else 0
    for port in [*ports[start:], *ports[:start]] or [0]:
        try:
            made = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::")
        except OSError as error:
            if error.errno == errno.EADDRINUSE and ports:
                continue
            raise ConfigError(f"this job cannot listen at {host}: {error.strerror}") from error
        return made
    raise ConfigError(
        f"every port from {ports[0]} to {ports[-1]} of {host} is taken, and the job needs one of them; widen"
        " --port-range (KVDIST_PORT_RANGE), or leave it out"
    )


@contextlib.contextmanager
def listening_here(ports: Sequence[int], is_local: bool) -> Iterator[socket.socket]:
    """The socket of the root of a job on this machine; closed and removed at the end.

    Args:
        ports: ports to choose from; empty for any port.
        is_local: whether the socket is a file that only this user can reach, instead of a TCP port.

    Raises:
        ConfigError: the socket cannot be created.
    """
    if not is_local:
        with listen(LOOPBACK, ports) as made:
            yield made
        return
    with _listen_at_file(ports) as made:
        path = made.getsockname()
        inode = os.stat(path).st_ino
        try:
            yield made
        finally:
            remove(path, inode)  # the root does so itself, unless it was killed


def _listen_at_file(ports: Sequence[int]) -> socket.socket:
    require_private_folder()
    choice = ports or LOCAL_PORTS
    for port in random.sample(choice, min(LOCAL_TRIES, len(choice))):
        try:
            return listen_at(local_endpoint(port).removeprefix(SCHEME))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"this job cannot listen at {local_endpoint(port)}: {error.strerror}") from error
    raise ConfigError(
        "every local port that was tried belongs to another job of yours: end some, or widen --port-range"
        " (KVDIST_PORT_RANGE)"
    )


def port_of(listening: socket.socket) -> int:
    """The port of a listening socket."""
    if listening.family == socket.AF_UNIX:
        return port_of_local(f"{SCHEME}{listening.getsockname()}") or 0
    return int(listening.getsockname()[1])


def turn_away(listening: socket.socket) -> None:
    """Close the connections that have arrived so far: checks whether the port can be reached."""
    listening.setblocking(False)
    try:
        while True:
            listening.accept()[0].close()
    except BlockingIOError:
        listening.setblocking(True)
