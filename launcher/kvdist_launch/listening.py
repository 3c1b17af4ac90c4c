"""The socket at which a job's root (scheduler or rank 0) will listen: bound before anything starts, and handed down.

A port that is sought, found free and bound later by somebody else can be taken in between. This one is bound first;
the root inherits the descriptor (``KVDIST_LISTEN_FD``), and every process can be told its port at its start.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping, Sequence

from kvdist.errors import ConfigError
from kvdist.variables import port_range

VARIABLE = "KVDIST_LISTEN_FD"

BACKLOG = 4096
"""All processes of a job dial at once."""


def ports_of(environ: Mapping[str, str]) -> tuple[int, ...]:
    """The ports to choose from where ``KVDIST_PORT_RANGE`` names some, as for servers; none is any.

    Raises:
        ConfigError: the variable has no range of ports.
    """
    first, last = port_range(environ.get("KVDIST_PORT_RANGE") or "") or (0, -1)
    return tuple(range(first, last + 1))


def listen(host: str, ports: Sequence[int] = ()) -> socket.socket:
    """A socket that listens at an address of this machine.

    Args:
        host: the address, numeric.
        ports: those to choose from; none leaves the choice to the system.

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


def port_of(listening: socket.socket) -> int:
    """The port at which it listens."""
    return int(listening.getsockname()[1])


def turn_away(listening: socket.socket) -> None:
    """Close the connections that came to it so far: probes of whether the port can be reached."""
    listening.setblocking(False)
    try:
        while True:
            listening.accept()[0].close()
    except BlockingIOError:
        listening.setblocking(True)
