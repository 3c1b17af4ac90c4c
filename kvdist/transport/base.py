"""The interface of transports, which carry frames and know nothing of their meaning.

A transport carries lists of byte frames between *routes*. A route is an opaque, hashable token of the transport: the
result of `connect` for a connection that this side dialled, the token under which the first message arrived for a
connection that a peer dialled. A connection that breaks and comes back may arrive under a new route.

The contract, kept by every transport:

* Order holds per route, and a message arrives whole or not at all. It may be lost when a connection breaks,
  and is not reported then: the core retransmits.
* `send` never blocks and never drops silently: messages that cannot leave now wait in a queue of the transport until
  they can, or until the route has ended, which is reported as `Disconnected`.
* A large frame is not copied by `send`. Its bytes must stay unchanged until the receiver's answer proves that they
  arrived.
* Frames that `recv` returns are read-only buffers that live as long as they are referenced; large frames are no copies.
* Only `wake` may be called from another thread.
"""

from __future__ import annotations

import abc
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvdist.nodes import NodeId

Route = Hashable
"""An opaque token for one direction in which frames can be sent."""

Buffer = bytes | bytearray | memoryview
"""A contiguous run of bytes. Buffers that `recv` returns support `memoryview()`."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """A whole message: the frames as they were sent."""

    route: Route
    frames: list[memoryview]
    sender: NodeId | None = None
    """The process whose key the connection has; None without encryption, and within a process."""


@dataclass(frozen=True, slots=True)
class Connected:
    """A dialled route is up, for the first time or again after a break."""

    route: Route


@dataclass(frozen=True, slots=True)
class MemoryShared:
    """The peer reads large frames in this transport's shared memory, until this route breaks or is up anew."""

    route: Route


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection under this route broke or was closed by the peer. `reason` is for people."""

    route: Route
    reason: str
    after_silence: bool = False
    """Whether the connection had been silent for a while before; either side may have broken it for that."""


@dataclass(frozen=True, slots=True)
class DialRefused:
    """The listener of a dialled route will never accept this process, because of `reason`: the keys do not match."""

    route: Route
    reason: str


Event = Arrived | Connected | MemoryShared | Disconnected | DialRefused


class Transport(abc.ABC):
    """Carries frames. See the module for the contract."""

    @property
    @abc.abstractmethod
    def strangers_refused(self) -> int:
        """Connections to this side that were closed because they did not speak kvdist's protocol."""

    @abc.abstractmethod
    def bind(self, endpoint: str) -> str:
        """Accept connections at `endpoint` (``tcp://127.0.0.1:0``, ``ipc:///…``) and return it with the port filled in.

        Raises:
            ConfigError: the address is taken or not this machine's; the message names it.
        """

    @abc.abstractmethod
    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        """Dial `endpoint`; returns at once. Frames sent before the connection is up wait for it.

        Args:
            endpoint: as a `bind` returned it.
            to: the process that listens at it. An encrypted transport needs it, and connects to no other process.
        """

    @abc.abstractmethod
    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        """Queue a message. If the route has ended it is discarded: its `Disconnected` was or will be reported."""

    def send_all(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        """`send` each of these messages, in order; cheaper where the transport can pack small messages."""
        for frames in messages:
            self.send(to, frames)

    @abc.abstractmethod
    def hang_up(self, route: Route) -> None:
        """End the connection of a stranger that has dialled in, once messages to it had time to leave.

        Does nothing for a route that this side has dialled.
        """

    @abc.abstractmethod
    def recv(self, timeout_s: float) -> list[Event]:
        """Return new events, in order: at once if there are any, else after `timeout_s` seconds or a `wake`."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make a `recv` that waits, or the next one, return soon. Safe from any thread, and after `close`."""

    @abc.abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Wait at most `linger_s` seconds for peers that dialled in to disconnect, then free every socket, file and
        thread.

        So last messages to them arrive. To be sure that a dialled peer has received a message, wait for its answer
        first. Idempotent.
        """
