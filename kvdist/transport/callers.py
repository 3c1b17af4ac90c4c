"""Connections of a listening socket that have not said anything yet: how much they may take, and which were refused.

libzmq bounds the bytes of a frame, but not the frames of a message that is not complete, nor the connections. So there
may only be so many of these, and each, and all together, may only bring so many bytes, which the kernel counts; beyond
that they are shut down; a member dials again.

A refusal is said once for each address, and again when the reason is certain.

Of a connection that is over before its address could be seen it is said only where nothing has been said yet that is as
certain: it may be any of those that were named.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import struct
from collections import deque
from dataclasses import dataclass
from operator import itemgetter

LOG = logging.getLogger("kvdist")

TOLD_MAX = 10
"""Addresses of which it is said; after that they are only counted elsewhere."""
FAILURES_MAX = 100
"""Refused at the same time, of which it is remembered why."""
TCP_INFO_BYTES = 136
RECEIVED = struct.Struct("=128xQ")
"""Of Linux's ``struct tcp_info``: how many bytes have come."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the connections of a listener may take that have not said anything yet.

    Attributes:
        connections: how many there may be.
        bytes_each: how many bytes one may have brought.
        bytes_all: how many all together.
    """

    connections: int
    bytes_each: int
    bytes_all: int


class SilentConnections:
    """The connections of one listener that have not said anything yet.

    Attributes:
        shut_down: how many were, for what they took.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.shut_down = 0
        self._bounds = bounds
        self._addresses: dict[int, tuple[str, int]] = {}
        self._brought: dict[int, int] = {}
        """Bytes of each at the last look."""
        self._failures: deque[tuple[str, bool]] = deque(maxlen=FAILURES_MAX)
        """Why connections are refused that have not been closed yet, and whether that is certain, in order."""
        self._told: dict[str, bool] = {}
        """Address → whether the reason that was told was certain."""

    def accepted(self, descriptor: int) -> None:
        """A connection came."""
        self._brought.pop(descriptor, None)
        self._addresses[descriptor] = _address_of(descriptor)
        if self._bounds is not None and len(self._addresses) > self._bounds.connections:
            oldest = next(iter(self._addresses))
            self._shut_down(oldest, f"more than {self._bounds.connections} connections have said nothing yet")

    def known(self, descriptor: int) -> tuple[str, int]:
        """It has said something; the address of its other end, ('', 0) if that is not of the network."""
        self._brought.pop(descriptor, None)
        return self._addresses.pop(descriptor, NOWHERE)

    @property
    def are_watched(self) -> bool:
        """Whether there are some of the network, so that `look` must be called soon again."""
        return self._bounds is not None and any(address != NOWHERE for address in self._addresses.values())

    def look(self) -> None:
        """See how much they have brought."""
        if self._bounds is not None:
            self._brought = {one: _bytes_of(one) for one, address in self._addresses.items() if address != NOWHERE}

    def judge(self) -> None:
        """Shut down those that had brought too much at the last look.

        To be called when every message has been read that was complete then: who has said something is not judged.
        """
        if self._bounds is None:
            return
        brought = self._brought
        total = sum(brought.values())
        for descriptor, nbytes in sorted(brought.items(), key=itemgetter(1), reverse=True):
            if nbytes <= self._bounds.bytes_each and total <= self._bounds.bytes_all:
                return
            total -= nbytes
            self._shut_down(descriptor, f"it has brought {nbytes} bytes and no complete message")

    def _shut_down(self, descriptor: int, why: str) -> None:
        address = self.known(descriptor)
        if shut_down(descriptor, address):
            self.shut_down += 1
            if self.shut_down <= TOLD_MAX:
                LOG.warning("a connection from %s was shut down: %s", address[0], why)

    def refused(self, why: str, is_certain: bool) -> None:
        """A connection that is about to be closed has failed; '' if that is not worth a word.

        Which one is not said. It is the next to be closed of those that are not known, or, where several threads of
        libzmq refuse at the same time, one of the next: for people that is near enough.
        """
        self._failures.append((why, is_certain))

    def closed(self, descriptor: int, endpoint: str) -> None:
        """A connection is over that came to `endpoint`."""
        self._brought.pop(descriptor, None)
        address, port = self._addresses.pop(descriptor, ("", -1))
        if port < 0 or not self._failures:
            return
        failure, is_certain = self._failures.popleft()
        if not self._addresses:
            self._failures.clear()  # whose they were has gone unseen
        told = [self._told[address]] if address in self._told else []
        if not address:
            told = list(self._told.values())
        is_news = not any(told) if is_certain else not told
        if failure and is_news and (address in self._told or len(self._told) < TOLD_MAX):
            self._told[address] = is_certain
            came = f" from {address}" if address else ""
            LOG.warning("%s refused a connection%s: %s", endpoint, came, failure)


NOWHERE = ("", 0)


def shut_down(descriptor: int, address: tuple[str, int]) -> bool:
    """End the connection of a descriptor of libzmq's, if it still is the one from that address; whether it was.

    libzmq then sees the end of the connection, and closes it.
    """
    if address != NOWHERE and _address_of(descriptor) == address:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _bytes_of(descriptor: int) -> int:
    """How many bytes have come by a TCP connection; 0 if it is over, or the system does not tell."""
    try:
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return 0
    try:
        return int(RECEIVED.unpack_from(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES))[0])
    except (OSError, AttributeError, struct.error):
        return 0
    finally:
        connection.detach()


def _address_of(descriptor: int) -> tuple[str, int]:
    """Where an accepted connection comes from; `NOWHERE` if it is over already, or not of the network.

    libzmq owns the descriptor and may close it at any time, so what is seen may be another connection by now, or a
    file of this process. A file is not even duplicated: closing the duplicate would drop the locks that the process
    has on it.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return NOWHERE
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6):
                host, port = connection.getpeername()[:2]
                return str(host).removeprefix("::ffff:"), int(port)
    return NOWHERE
