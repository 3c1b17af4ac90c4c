"""Which connection of a bound ZeroMQ socket is which route: pure bookkeeping over what the monitor and messages say.

The monitor names a connection by its file descriptor, a message names it by libzmq's routing id, and the descriptor can
be asked of a message, so a route's first message ties the two. The system gives a descriptor out again when it is
closed, but libzmq reports the break before it closes: when a message of a new connection can be read, the end of the
old one is in the monitor. So whoever calls `meet` reads the monitor first. That the new one was accepted may not be
there yet: with several threads of libzmq, one says so while another brings its first message already.

Then one doubt is left: the message may be the last word of the old connection, read late. libzmq's routing ids count
upwards, so when both have spoken the higher one is the new connection. While only one has, it is taken for the new
one: no living peer is ever called lost, and a dead one at the latest when a send to it fails.
"""

from __future__ import annotations

from collections import Counter


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
        self._silent: Counter[int] = Counter()
        """Of each descriptor, how many of its connections were closed without a message that has been read yet."""
        self._refusals = 0
        """Failed handshakes whose connections have not been closed yet."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Those of the connections that have said something."""
        return tuple(self._owner)

    @property
    def have_spoken(self) -> bool:
        """Whether any connection is open that has said something."""
        return bool(self._owner)

    @property
    def count(self) -> int:
        """How many are open."""
        return len(self._open)

    def accepted(self, descriptor: int) -> bool:
        """A connection was accepted and begins its handshake; False if it has spoken already."""
        self._open.add(descriptor)
        if descriptor in self._owner:
            return False
        self._greeting[descriptor] = None
        return True

    def handshaken(self) -> None:
        """A handshake succeeded. Which one is not said: the oldest is a guess that only the count hangs on."""
        self._greeting.pop(next(iter(self._greeting), -1), None)

    def refused(self, is_stranger: bool = True) -> None:
        """A handshake failed; that connection is about to be closed. Not every failure is announced."""
        self.strangers += is_stranger
        self._refusals += 1

    def closed(self, descriptor: int) -> bytes | None:
        """A connection is over; the routing id that it had, if it ever spoke."""
        self._open.discard(descriptor)
        name = self._owner.pop(descriptor, None)
        was_greeting = descriptor in self._greeting
        self._greeting.pop(descriptor, None)
        if name is not None:
            return name
        if self._refusals:
            self._refusals -= 1  # of several threads' refusals it may be another one; that it never speaks is the same
        else:
            self._silent[descriptor] += 1
            self.strangers += was_greeting
        return None

    def meet(self, name: bytes, descriptor: int) -> bytes | None:
        """A routing id is heard for the first time; returns the one whose connection turns out to be over, if any."""
        if descriptor not in self._open and self._silent[descriptor]:
            self._silent[descriptor] -= 1
            return name
        self._open.add(descriptor)
        self._greeting.pop(descriptor, None)
        earlier = self._owner.get(descriptor)
        if earlier is None:
            self._owner[descriptor] = name
            return None
        self._silent[descriptor] = max(0, self._silent[descriptor] - 1)
        if is_older(name, earlier):
            return name
        self._owner[descriptor] = name
        return earlier


def is_older(name: bytes, other: bytes) -> bool:
    """Whether a routing id was given out before another: a zero byte, then four that count up and wrap."""
    difference = int.from_bytes(name[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % (1 << 32) >= 1 << 31
