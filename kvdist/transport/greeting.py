"""What a listener says before anything is encrypted: whether it speaks ZMTP, and with which mechanism.

A handshake that fails without a reason may have met a port of another secret, or a proxy whose own target is not up
yet. Only the first one has greeted.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from kvdist.config.endpoints import split_endpoint

GREETING_BYTES = 64
MECHANISM = slice(12, 32)
SIGNATURE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""As much as the other side waits for. It would hang up without a word at a mechanism that is not its own."""
PATIENCE_S = 1.0
"""For the whole exchange, which holds up the node. The name has been resolved for libzmq just before."""
SUSPICIOUS_FAILURES, SUSPICIOUS_S = 3, 8.0
"""Handshakes broken off within so many seconds after which it is asked why."""

Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]


def mechanism_at(endpoint: str) -> str:
    """``CURVE``, ``NULL`` or another word of whoever listens at a tcp:// endpoint; '' if nobody greets there."""
    if not endpoint.startswith("tcp://"):
        return ""
    heard = b""
    # A name with an empty or a long label cannot be encoded.
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, address = _dialled_at(*split_endpoint(endpoint))
        deadline = time.monotonic() + PATIENCE_S
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(PATIENCE_S)
            probe.connect(address)
            probe.sendall(SIGNATURE)
            while len(heard) < GREETING_BYTES and (left_s := deadline - time.monotonic()) > 0:
                probe.settimeout(left_s)
                piece = probe.recv(GREETING_BYTES - len(heard))
                if not piece:
                    break
                heard += piece
    if len(heard) < MECHANISM.stop or heard[0] != 0xFF or heard[9] != 0x7F:
        return ""
    return heard[MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _dialled_at(host: str, port: int) -> Resolved:
    """The one address of a name that libzmq dials: the first of IPv6, else of IPv4."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return next((one for one in found if one[0] == socket.AF_INET6), found[0])


class Suspicion:
    """Handshakes that were broken off one after the other, soon after each other.

    One may be that of a process that is about to end. A busy process lets handshakes run into their deadline, which
    takes seconds each.
    """

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._has_greeted = False
        self.is_certain = False
        """Whether a handshake that fails now fails at somebody who has greeted before it began to."""

    def clear(self) -> None:
        """Somebody was reached, or nobody was there."""
        self._count = 0
        self._has_greeted = self.is_certain = False

    def greeted(self) -> None:
        """Whoever was asked has greeted. Failures that are only read now may be older, and a proxy's."""
        self._has_greeted = True

    def caught_up(self) -> None:
        """Every failure so far has been read: what is read from now on is later than the greeting."""
        self.is_certain = self._has_greeted

    def grows(self) -> bool:
        """Whether, with this one, there are enough to look into it."""
        now = time.monotonic()
        if self._count == 0 or now > self._since + SUSPICIOUS_S:
            self._count, self._since = 0, now
        self._count += 1
        if self._count < SUSPICIOUS_FAILURES:
            return False
        self._count = 0
        return True
