"""The connections that a bound ZeroMQ socket has accepted: which is which route, and what silent ones may take.

`Connections` is pure bookkeeping over what the monitor and messages say. The monitor names a connection by its file
descriptor, a message names it by libzmq's routing id, and the descriptor can be asked of a message, so a route's first
message ties the two. The system gives a descriptor out again when it is closed, but libzmq reports the break before it
closes: when a message of a new connection can be read, the end of the old one is in the monitor. So the monitor is read
before `meet` is called. That the new one was accepted may not be there yet: with several threads of libzmq, one says so
while another brings its first message already.

Then one doubt is left: the message may be the last word of the old connection, read late. libzmq's routing ids count
upwards, so when both have spoken the higher one is the new connection. While only one has, it is taken for the new
one: no living peer is ever called lost, and a dead one at the latest when a send to it fails.

`SilentConnections` bounds connections that have not sent a message. libzmq bounds the bytes of a frame, but neither the
frames of an incomplete message nor the connections. `Bounds` limits their number and the bytes, counted by the kernel,
that each and all of them may bring; beyond that they are shut down, and a member dials again. A refusal is
logged once for each address, and again when the reason is certain. If a connection is over before its address could be
seen, its refusal is logged only where nothing as certain has been: it may be any of the named ones.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass
from operator import itemgetter

from kvdist.transport.tcp_info import NOWHERE, Address, bytes_received, remote_address, shut_down


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


LOG = logging.getLogger("kvdist")

TOLD_MAX = 10
"""How many addresses are named in the log; later ones are only counted elsewhere."""
FAILURES_MAX = 100
"""Of how many connections refused at the same time the reasons are kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What the silent connections of a listener may take.

    Attributes:
        connections: how many there may be.
        bytes_each: how many bytes one may have brought.
        bytes_all: how many all together.
    """

    connections: int
    bytes_each: int
    bytes_all: int


class SilentConnections:
    """The connections of one listener that have not sent a message yet.

    Attributes:
        shut_down: how many were shut down for what they took.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.shut_down = 0
        self._bounds = bounds
        self._addresses: dict[int, Address] = {}
        self._brought: dict[int, int] = {}
        """Bytes of each at the last look."""
        self._failures: deque[tuple[str, bool]] = deque(maxlen=FAILURES_MAX)
        """Why connections are refused that have not been closed yet, and whether that is certain, in order."""
        self._told: dict[str, bool] = {}
        """Address → whether the reason that was told was certain."""

    def accepted(self, descriptor: int) -> None:
        """Note a new connection."""
        self._brought.pop(descriptor, None)
        self._addresses[descriptor] = remote_address(descriptor)
        if self._bounds is not None and len(self._addresses) > self._bounds.connections:
            oldest = next(iter(self._addresses))
            self._shut_down(oldest, f"more than {self._bounds.connections} connections have said nothing yet")

    def known(self, descriptor: int) -> Address:
        """Note that a connection has sent a message; returns its remote address, or `NOWHERE`."""
        self._brought.pop(descriptor, None)
        return self._addresses.pop(descriptor, NOWHERE)

    @property
    def are_watched(self) -> bool:
        """Whether some came by the network, so that `look` must be called again soon."""
        return self._bounds is not None and any(address != NOWHERE for address in self._addresses.values())

    def look(self) -> None:
        """Ask the kernel how much each has brought."""
        if self._bounds is not None:
            self._brought = {one: bytes_received(one) for one, address in self._addresses.items() if address != NOWHERE}

    def judge(self) -> None:
        """Shut down the connections that had brought too much at the last look.

        Call it when every message that was complete then has been read: a connection that has sent one is exempt.
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
        """Note why a connection that is about to be closed has failed; '' if that need not be logged.

        Which one is not known. It is the next silent one to be closed, or, where several threads of libzmq refuse at
        the same time, one of the next: for people that is near enough.
        """
        self._failures.append((why, is_certain))

    def closed(self, descriptor: int, endpoint: str) -> None:
        """Note that a connection to `endpoint` is over."""
        self._brought.pop(descriptor, None)
        address, port = self._addresses.pop(descriptor, ("", -1))
        if port < 0 or not self._failures:
            return
        failure, is_certain = self._failures.popleft()
        if not self._addresses:
            self._failures.clear()  # the connections they belong to are over
        told = [self._told[address]] if address in self._told else []
        if not address:
            told = list(self._told.values())
        is_news = not any(told) if is_certain else not told
        if failure and is_news and (address in self._told or len(self._told) < TOLD_MAX):
            self._told[address] = is_certain
            came = f" from {address}" if address else ""
            LOG.warning("%s refused a connection%s: %s", endpoint, came, failure)
