"""Ports for tests that must name one beforehand: held until it is used, or where nobody is given it by accident."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

HOST = "127.0.0.1"


@contextlib.contextmanager
def held_port(number: int = 0) -> Iterator[int]:
    """A port of loopback at which nobody listens, and which nobody else is given meanwhile.

    It is bound, so the system hands it to no socket that takes any port. Whoever asks for it by its number, and allows
    its address to be used again, as everything here does that listens, can listen at it.

    Args:
        number: of the port, where something else has chosen it already.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind((HOST, number))
        yield held.getsockname()[1]


def free_port() -> int:
    """A port below those that the system hands out, so that nobody gets it by accident."""
    while True:
        port = 20000 + int.from_bytes(os.urandom(2), "big") % 12000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
