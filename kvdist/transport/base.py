"""The interface of transports, which carry frames and know nothing of their meaning.

A transport carries lists of byte frames between *routes*. A route is an opaque, hashable token that the transport
made: for a connection that this side dialled it is what `connect` returned, for one that a peer dialled it is the
token under which that connection's first message arrived. A connection that breaks and comes back may arrive
under a new route.

The contract, kept by every transport:

* Order holds per route, and a message arrives whole or not at all. It may be lost when a connection breaks,
  and is not reported then: the core retransmits.
* `send` never blocks and never drops silently: what cannot leave now waits in a queue of the transport until it can,
  or until the route is gone, which is reported as `Disconnected`.
* A frame handed to `send` is not copied when it is large. Its bytes must stay unchanged until the receiver's answer
  proves that they arrived.
* Frames that `recv` returns are read-only buffers that live as long as they are referenced; large ones are not copies.
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
"""A contiguous run of bytes. What `recv` returns supports `memoryview()`."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """One whole message: the frames as they were sent."""

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
    """Whether it had brought nothing for a while before; either side may have broken it for that."""


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
        """Connections to this side that were closed because they did not speak our protocol."""

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
            to: who listens there. An encrypted transport needs it, and speaks with no other process.
        """

    @abc.abstractmethod
    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        """Hand a message over. To a route that is gone it is discarded: its `Disconnected` was or will be reported."""

    def send_all(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        """`send` each of these messages, in order; cheaper where the transport can carry small ones together."""
        for frames in messages:
            self.send(to, frames)

    @abc.abstractmethod
    def hang_up(self, route: Route) -> None:
        """End the connection of a stranger that has dialled in, once what was sent to it had time to leave.

        Nothing happens to a route that this side has dialled.
        """

    @abc.abstractmethod
    def recv(self, timeout_s: float) -> list[Event]:
        """What has happened, in order: at once when there is something, else after `timeout_s` seconds or a `wake`."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make a `recv` that waits, or the next one, return soon. Safe from any thread, and after `close`."""

    @abc.abstractmethod
    def close(self, linger_s: float = 0.0) -> None:
        """Wait at most `linger_s` seconds for peers that dialled in to go, then free every socket, file and thread.

        So last messages to them arrive. To be sure that a dialled peer has one, wait for its answer first.
        Idempotent.
        """
