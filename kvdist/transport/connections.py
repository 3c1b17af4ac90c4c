"""Which connection of a bound ZeroMQ socket is which route: pure bookkeeping over what the monitor and messages say.

The monitor names a connection by its file descriptor, a message names it by libzmq's routing id, and the descriptor can
be asked of a message, so a route's first message ties the two. The system gives a descriptor out again when it is
closed, but libzmq reports the break before it closes: when a message of a new connection can be read, the end of the
old one is in the monitor. So whoever calls `meet` reads the monitor first.

Then one doubt is left: the message may be the last word of the old connection, read late. libzmq's routing ids count
upwards, so when both have spoken the higher one is the new connection. While only one has, it is taken for the new
one: no living peer is ever called lost, and a dead one at the latest when a send to it fails.
"""

from __future__ import annotations


class Connections:
    """The connections that one bound socket has accepted.

    Attributes:
        strangers: how many were closed without having passed the handshake.
    """

    def __init__(self) -> None:
        self.strangers = 0
        self._open: set[int] = set()
        self._owner: dict[int, bytes] = {}
        self._greeting: dict[int, None] = {}
        self._is_refusing = False

    @property
    def have_spoken(self) -> bool:
        """Whether any connection is open that has said something."""
        return bool(self._owner)

    def accepted(self, descriptor: int) -> None:
        """A connection was accepted and begins its handshake."""
        self._open.add(descriptor)
        self._greeting[descriptor] = None

    def handshaken(self) -> None:
        """A handshake succeeded. Which one is not said: the oldest is a guess that only the count hangs on."""
        self._greeting.pop(next(iter(self._greeting), -1), None)

    def refused(self) -> None:
        """A handshake failed; that connection is the next one to be closed. Not every failure is announced."""
        self.strangers += 1
        self._is_refusing = True

    def closed(self, descriptor: int) -> bytes | None:
        """A connection is over; the routing id that it had, if it ever spoke."""
        self._open.discard(descriptor)
        name = self._owner.pop(descriptor, None)
        if name is None and descriptor in self._greeting and not self._is_refusing:
            self.strangers += 1
        self._greeting.pop(descriptor, None)
        self._is_refusing = False
        return name

    def meet(self, name: bytes, descriptor: int) -> bytes | None:
        """A routing id is heard for the first time; returns the one whose connection turns out to be over, if any."""
        if descriptor not in self._open:
            return name
        self._greeting.pop(descriptor, None)
        earlier = self._owner.get(descriptor)
        if earlier is not None and is_older(name, earlier):
            return name
        self._owner[descriptor] = name
        return earlier


def is_older(name: bytes, other: bytes) -> bool:
    """Whether a routing id was given out before another: a zero byte, then four that count up and wrap."""
    difference = int.from_bytes(name[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % (1 << 32) >= 1 << 31
