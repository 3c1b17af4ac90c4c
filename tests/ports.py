"""A port for a test that must name one beforehand."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def held_port(number: int = 0) -> Iterator[int]:
    """A port of loopback at which nobody listens, and which nobody else is given meanwhile.

    It is bound, so the system hands it to no socket that takes any port. Whoever asks for it by its number, and allows
    its address to be used again, as everything here does that listens, can listen at it.

    Args:
        number: of the port, where something else has chosen it already.
    """
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", number))
        yield held.getsockname()[1]
