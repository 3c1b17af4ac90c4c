"""Connections that a bound ZeroMQ socket has accepted: which routing id belongs to which, and limits for silent ones.

`Connections` is pure bookkeeping over the events of the monitor and the messages. The monitor identifies a connection
by its file descriptor, a message by libzmq's routing id, and libzmq reports the descriptor of a message, so a route's
first message ties the two. The system reuses the number of a closed descriptor, but libzmq reports the break before it
closes: when a message of a new connection can be read, the end of the old connection is in the monitor. So the monitor
is read before `meet` is called. The monitor may not have reported yet that the new connection was accepted: with
several threads of libzmq, a thread may report that while another already delivers the first message.

That leaves a doubt: the message may be the last message of the old connection, read late. libzmq's routing ids count
upwards, so when both have sent messages the higher id is the new connection. While only one has, it is taken for the
new connection: no living peer is ever reported lost, and a dead peer at the latest when a send to it fails.

`SilentConnections` bounds connections that have not sent a message. libzmq bounds the bytes of a frame, but neither the
frames of an incomplete message nor the number of connections. `Bounds` limits that number and the bytes, counted by the
kernel, that each and all of them may send; connections beyond the limits are shut down, and a member dials again. A
refusal is logged once for each address, and again when the reason is certain. If a connection ends before its address
could be read, its refusal is logged only if no refusal as certain was logged before: it may be from a logged address.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass
from operator import itemgetter

from kvdist.transport.tcp_info import NOWHERE, Address, bytes_received, remote_address, shut_down


class Connections:
    """The connections that a bound socket has accepted.

    Attributes:
        strangers: number of connections that were closed before they had completed the handshake.
    """

    def __init__(self) -> None:
        self.strangers = 0
        self._open: set[int] = set()
        self._owner: dict[int, bytes] = {}
        self._greeting: dict[int, None] = {}
        self._silent: Counter[int] = Counter()
        """Descriptor → number of its connections that were closed before any message of them was read."""
        self._refusals = 0
        """Failed handshakes whose connections have not been closed yet."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Descriptors of the connections that have sent a message."""
        return tuple(self._owner)

    @property
    def have_spoken(self) -> bool:
        """Whether any open connection has sent a message."""
        return bool(self._owner)

    @property
    def count(self) -> int:
        """Number of open connections."""
        return len(self._open)

    def accepted(self, descriptor: int) -> bool:
        """Record a new connection, which begins its handshake; False if a message of it was read already."""
        self._open.add(descriptor)
        if descriptor in self._owner:
            return False
        self._greeting[descriptor] = None
        return True

    def handshaken(self) -> None:
        """Record a successful handshake. The monitor does not identify it: the oldest is a guess that affects only the
        count."""
        self._greeting.pop(next(iter(self._greeting), -1), None)

    def refused(self, is_stranger: bool = True) -> None:
        """Record a failed handshake; its connection is about to be closed. libzmq does not report every failure."""
        self.strangers += is_stranger
        self._refusals += 1

    def closed(self, descriptor: int) -> bytes | None:
        """Record the end of a connection; returns its routing id if it ever sent a message."""
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
        """Record the first message with a routing id; returns the id of the connection that turns out to be closed, if
        any."""
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
    """Whether a routing id is older than another: a zero byte, then a counter of four bytes that wraps."""
    difference = int.from_bytes(name[1:], "big") - int.from_bytes(other[1:], "big")
    return difference % (1 << 32) >= 1 << 31


LOG = logging.getLogger("kvdist")

TOLD_MAX = 10
"""Number of addresses that are named in the log; later refusals are only counted."""
FAILURES_MAX = 100
"""Number of connections refused at the same time of which the reasons are kept."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits for the silent connections of a listener.

    Attributes:
        connections: largest number of connections.
        bytes_each: bytes that a connection may have sent.
        bytes_all: bytes that all together may have sent.
    """

    connections: int
    bytes_each: int
    bytes_all: int


class SilentConnections:
    """The connections of a listener that have not sent a message yet.

    Attributes:
        shut_down: number of connections that were shut down for exceeding the limits.
    """

    def __init__(self, bounds: Bounds | None = None) -> None:
        self.shut_down = 0
        self._bounds = bounds
        self._addresses: dict[int, Address] = {}
        self._brought: dict[int, int] = {}
        """Descriptor → bytes that the connection had sent at the last `look`."""
        self._failures: deque[tuple[str, bool]] = deque(maxlen=FAILURES_MAX)
        """Reasons of failed connections that are not reported closed yet, and whether each is certain, in order."""
        self._told: dict[str, bool] = {}
        """Logged address → whether the logged reason was certain."""

    def accepted(self, descriptor: int) -> None:
        """Record a new connection."""
        self._brought.pop(descriptor, None)
        self._addresses[descriptor] = remote_address(descriptor)
        if self._bounds is not None and len(self._addresses) > self._bounds.connections:
            oldest = next(iter(self._addresses))
            self._shut_down(oldest, f"more than {self._bounds.connections} connections have said nothing yet")

    def known(self, descriptor: int) -> Address:
        """Record that a connection has sent a message; returns its remote address, or `NOWHERE`."""
        self._brought.pop(descriptor, None)
        return self._addresses.pop(descriptor, NOWHERE)

    @property
    def are_watched(self) -> bool:
        """Whether some came over the network, so that `look` must be called again soon."""
        return self._bounds is not None and any(address != NOWHERE for address in self._addresses.values())

    def look(self) -> None:
        """Ask the kernel how many bytes each connection has sent."""
        if self._bounds is not None:
            self._brought = {one: bytes_received(one) for one, address in self._addresses.items() if address != NOWHERE}

    def judge(self) -> None:
        """Shut down the connections that had sent too much at the last `look`.

        Call it when every message that was complete then has been read: a connection that has sent a message is exempt.
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
        """Record why a connection that is about to be closed has failed; '' if that need not be logged.

        libzmq does not identify the connection. It is the next silent connection to be closed or, where several threads
        of libzmq refuse at the same time, one of the next: close enough for a log.
        """
        self._failures.append((why, is_certain))

    def closed(self, descriptor: int, endpoint: str) -> None:
        """Record the end of a connection to `endpoint`, and log its refusal."""
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
