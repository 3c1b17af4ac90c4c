"""A ZeroMQ socket with its monitor and its routes: turns libzmq's monitor events into events of the transport."""

from __future__ import annotations

import abc
import contextlib
import errno
import struct
from collections.abc import Iterable, Mapping
from typing import cast

import zmq

from kvdist.config.sockets import SCHEME
from kvdist.nodes import NodeId
from kvdist.transport.base import Arrived, Buffer, Connected, DialRefused, Disconnected, Event
from kvdist.transport.connections import Bounds, Connections, SilentConnections
from kvdist.transport.handshake import (
    Suspicion,
    mechanism_at,
    why_not_let_in,
    why_other_mechanism,
    why_other_secret,
    why_other_sockets,
)
from kvdist.transport.tcp_info import NOWHERE, shut_down, shut_down_silent, silence_s

ZERO_COPY_FROM_BYTES = 64 << 10
"""Size from which a shared buffer is cheaper than a copy; copies are also aligned."""

BATCH_MESSAGES = 64
BATCH_BYTES = 32 << 20
"""Limits of one `recv` per socket, so that a poll serves many messages and no peer starves another."""

MORE, NOW = int(zmq.SNDMORE) | int(zmq.DONTWAIT), int(zmq.DONTWAIT)
ACCEPTED, UP, DISCONNECTED = map(int, (zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED))
CONNECTED = int(zmq.EVENT_CONNECTED)
BROKEN_OFF = int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
MISUNDERSTOOD, NOT_LET_IN = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
NOBODY_THERE = int(zmq.EVENT_CLOSED)
WATCHED = ACCEPTED | CONNECTED | DISCONNECTED | UP | BROKEN_OFF | MISUNDERSTOOD | NOT_LET_IN | NOBODY_THERE
OTHER_MECHANISM = int(zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH)
OTHER_KEY = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)

MONITOR_EVENT = struct.Struct("=HI")


class PeerRoute:
    """A route: the socket, and on the bound side the routing id that goes first."""

    __slots__ = ("address", "descriptor", "fell_silent", "gone", "link", "name", "prefix", "send")

    def __init__(self, link: MonitoredSocket, prefix: bytes | None, name: NodeId | None = None) -> None:
        self.link = link
        self.prefix = prefix
        self.name = name
        self.send = link.socket.send
        self.gone = False
        self.descriptor = -1
        """Descriptor of the connection, on the bound side."""
        self.address = NOWHERE
        """Remote address of that connection."""
        self.fell_silent = False
        """Whether its connection had received no bytes for a while when it was closed, by either end."""

    def __repr__(self) -> str:
        return f"<route {'to' if self.prefix is None else self.prefix.hex() + ' at'} {self.link.endpoint}>"


def transmit(to: PeerRoute, pieces: list[tuple[Buffer, bool]]) -> bool:
    """Send a message whole or not at all; False when the route has ended.

    As the queue has no limit, libzmq refuses only routes that have ended. On the bound side it refuses the prefix, and
    when the connection breaks later it takes back the first frames and drops the others. A DEALER may refuse any frame;
    after the first, it drops the rest of the message, which must still be sent to it.
    """
    send = to.send
    if to.prefix is not None:
        try:
            send(to.prefix, MORE)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            return False
    last, refused = len(pieces) - 1, False
    for index, (frame, copy) in enumerate(pieces):
        try:
            send(frame, MORE if index < last else NOW, copy)
        except zmq.Again:
            refused = True
            if index == 0:
                break
    return not refused


class MonitoredSocket(abc.ABC):
    """A socket, the monitor that watches it, and the routes that lead through it."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(WATCHED)
        self.lost: list[PeerRoute] = []
        self.is_drained = True
        """Whether the last read of messages emptied the socket."""
        self._hung_up: set[int] = set()
        """Descriptors of connections that were ended for their silence and have not been reported closed yet."""
        self._quiet: set[int] = set()
        """Descriptors of connections that had received nothing for some heartbeats at the last check."""

    def hang_up_silent(self, after_s: float, quiet_s: float) -> float:
        """End connections that have received nothing for `after_s`, and note which are quiet.

        Args:
            after_s: silence in seconds after which a connection is ended.
            quiet_s: silence in seconds after which a break may be due to the silence: the peer may have ended the
                connection.

        Returns:
            The longest silence, in seconds, of the remaining connections.
        """
        port, longest_s = self.endpoint.rpartition(":")[2], 0.0
        if not port.isdigit():
            return longest_s  # of ipc://, where libzmq judges
        for descriptor in self.descriptors:
            silent_s = silence_s(descriptor)
            if silent_s >= quiet_s:
                self._quiet.add(descriptor)
            elif silent_s > 0.0:  # else it may be over, which the monitor has not said yet
                self._quiet.discard(descriptor)
            if silent_s < after_s:
                longest_s = max(longest_s, silent_s)
            elif shut_down_silent(descriptor, int(port), after_s):
                self._hung_up.add(descriptor)
        return longest_s

    def fell_silent(self, descriptor: int) -> bool:
        """Whether a connection that is reported closed was silent before. Forgets the connection."""
        silent = descriptor in self._hung_up or descriptor in self._quiet
        self._hung_up.discard(descriptor)
        self._quiet.discard(descriptor)
        return silent

    @property
    @abc.abstractmethod
    def descriptors(self) -> Iterable[int]:
        """The descriptors of the connections that are up."""

    def collect(self, events: list[Event]) -> None:
        """Append new events. A break is reported after the messages before it: only when no message is left."""
        self.read_monitor(events)
        self.is_drained = self.read_messages(events)
        if self.is_drained:
            self.report_lost(events)

    @abc.abstractmethod
    def observe(self, event: int, value: int, events: list[Event]) -> None:
        """Handle an event of the monitor."""

    @abc.abstractmethod
    def read_message(self, events: list[Event]) -> int:
        """Read a message; returns its bytes. Raises `zmq.Again` when none is waiting."""

    @abc.abstractmethod
    def lose(self, peer: PeerRoute) -> None:
        """Record that the connection of this route has ended."""

    def read_monitor(self, events: list[Event]) -> None:
        receive = self.monitor.recv
        try:
            while True:
                event, value = MONITOR_EVENT.unpack(receive(NOW))
                receive(NOW)  # the endpoint, which is known
                self.observe(event, value, events)
        except zmq.Again:
            return

    def read_messages(self, events: list[Event]) -> bool:
        """Read a batch of messages; returns whether no message is left."""
        total = 0
        try:
            for _ in range(BATCH_MESSAGES):
                total += self.read_message(events)
                if total >= BATCH_BYTES:
                    return False
        except zmq.Again:
            return True
        return False

    def report_lost(self, events: list[Event]) -> None:
        for peer in self.lost:
            why = "brought nothing for long (KVDIST_PATIENCE_S)" if peer.fell_silent else "was closed or broke"
            where = "" if self.endpoint.startswith(SCHEME) else f" at {self.endpoint}"
            events.append(Disconnected(peer, f"the connection{where} {why}", peer.fell_silent))
        self.lost.clear()

    @property
    @abc.abstractmethod
    def has_peers(self) -> bool:
        """Whether a peer that dialled in is still connected."""

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class DialledSocket(MonitoredSocket):
    """A DEALER: a single route, for as long as the transport lives.

    Args:
        socket: the DEALER.
        endpoint: where it dials.
        me: the name of this process, if the connection is encrypted.
        to: the name of the process that must listen at the endpoint, likewise.
    """

    has_peers = False

    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, me: NodeId | None = None, to: NodeId | None = None
    ) -> None:
        super().__init__(socket, endpoint)
        self.route = PeerRoute(self, None, to)
        self.up = False
        self.complained = False
        self._me = me
        self._suspicion = Suspicion()
        self._absence = Suspicion()
        self._descriptor = -1

    @property
    def descriptors(self) -> Iterable[int]:
        return (self._descriptor,) if self.up else ()

    def observe(self, event: int, value: int, events: list[Event]) -> None:
        if event == CONNECTED:
            self._descriptor = value
        elif event == UP:
            self.report_lost(events)
            self.up, self.complained, self.route.fell_silent = True, False, False
            self._suspicion.clear()
            events.append(Connected(self.route))
        elif event == DISCONNECTED and self.up:
            # Within a host libzmq ends silent connections, and does not say so; a dial tells whether nobody is there.
            self.route.fell_silent = self.fell_silent(value) or self.endpoint.startswith(SCHEME)
            self.complained = True  # that it does not come back is the same news
            self.lose(self.route)
        elif event == DISCONNECTED and not self.complained:
            # It was never up: the handshake failed. libzmq dials again and again; this is reported once.
            self.complained = True
            reason = (
                f"the process at {self.endpoint} broke off the handshake or did not finish it in time: it may be busy,"
                " or not a node of this cluster"
            )
            events.append(Disconnected(self.route, reason))
        elif event == NOBODY_THERE:
            self._suspicion.clear()
            if self.route.fell_silent and self.endpoint.startswith(SCHEME):
                self.route.fell_silent = False
                self.lost.append(self.route)
            if self._absence.grows() and (why := why_other_sockets(self.endpoint, self._me)):
                self.refuse(why, events)
        elif event == NOT_LET_IN:
            self.refuse(why_not_let_in(self.endpoint, self._me), events)
        elif event == MISUNDERSTOOD and value == OTHER_MECHANISM:
            self.refuse(why_other_mechanism(self.endpoint, self._me), events)
        elif event == BROKEN_OFF and value != errno.EAGAIN:
            if self._suspicion.is_certain:
                self.refuse(why_other_secret(self.endpoint, self._me, self.route.name), events)
            elif self._suspicion.grows():
                self._ask(events)

    def read_monitor(self, events: list[Event]) -> None:
        super().read_monitor(events)
        self._suspicion.caught_up()

    def _ask(self, events: list[Event]) -> None:
        """Ask the listener for its mechanism: handshakes fail, and libzmq cannot say why."""
        mechanism = mechanism_at(self.endpoint)
        if not mechanism:
            return
        if (mechanism == "CURVE") != (self._me is not None):
            self.refuse(why_other_mechanism(self.endpoint, self._me), events)
        elif self._me is not None:
            self._suspicion.greeted()

    def refuse(self, reason: str, events: list[Event]) -> None:
        """Stop dialling: the other side will never accept this process."""
        if self.route.gone:
            return
        self.route.gone = True
        with contextlib.suppress(zmq.ZMQError):  # it may have stopped by itself
            self.socket.disconnect(self.endpoint)
        events.append(DialRefused(self.route, reason))

    def redial(self) -> None:
        """Dial again after libzmq has stopped dialling, as it does when a peer broke the protocol."""
        # libzmq would ignore a connect to an endpoint that it believes to be dialling already.
        self.socket.disconnect(self.endpoint)
        self.socket.connect(self.endpoint)

    def read_message(self, events: list[Event]) -> int:
        frames: list[memoryview] = []
        total = _read_frames(self.socket, frames)
        if not self.up:
            # The monitor already knows that the connection is up, which must be reported first.
            self.read_monitor(events)
        events.append(Arrived(self.route, frames, self.route.name))
        return total

    def lose(self, peer: PeerRoute) -> None:
        if self.up:
            self.up = False
            self.lost.append(peer)


class BoundSocket(MonitoredSocket):
    """A ROUTER: a route for every connection that has sent a message; `Connections` maps routing ids to connections.

    Args:
        socket: the ROUTER.
        endpoint: where it listens.
        names: identity that comes with each message → the process, for those that may dial; None without encryption.
        bounds: limits for connections that have not sent a message yet.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        names: Mapping[str, NodeId] | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        super().__init__(socket, endpoint)
        self.peers: dict[bytes, PeerRoute] = {}
        self.connections = Connections()
        self._names = names
        self._silent = SilentConnections(bounds)
        self._read_since_look = 0

    @property
    def has_peers(self) -> bool:
        return self.connections.have_spoken

    @property
    def is_watched(self) -> bool:
        """Whether a connection has not sent a message yet, so that `look` must be called again soon."""
        return self._silent.are_watched

    def look(self) -> None:
        """Shut down silent connections over the limits, once every message that might show a member has been read.

        libzmq takes messages from connections in turn, so that no message is left that was complete at the last `look`
        when as many have been read as there are connections, twice because connections come and go meanwhile.
        """
        if self.is_drained:
            self._silent.look()
            self._silent.judge()
        elif self._read_since_look >= 2 * self.connections.count:
            self._silent.judge()  # by what was seen before these were read
            self._silent.look()
        else:
            return
        self._read_since_look = 0

    def hang_up(self, peer: PeerRoute) -> None:
        """End the connection of a route."""
        self.read_monitor([])
        if not peer.gone:
            shut_down(peer.descriptor, peer.address)

    @property
    def descriptors(self) -> Iterable[int]:
        return self.connections.descriptors

    def observe(self, event: int, value: int, events: list[Event]) -> None:
        if event == ACCEPTED:
            if self.connections.accepted(value):
                self._silent.accepted(value)
        elif event == UP:
            self.connections.handshaken()
        elif event == DISCONNECTED:
            self._silent.closed(value, self.endpoint)
            name = self.connections.closed(value)
            silent = self.fell_silent(value)
            if name in self.peers:
                self.peers[name].fell_silent = silent
            self.lose_named(name)
        elif event == BROKEN_OFF and value == errno.EAGAIN and self._names is not None:
            # Time ran out. The authenticator answers from this thread, which may have been busy: not a stranger.
            self._silent.refused("", is_certain=False)
            self.connections.refused(is_stranger=False)
        elif event in (BROKEN_OFF, MISUNDERSTOOD, NOT_LET_IN):
            self._silent.refused(_why_refused(event, value, self._names is not None), is_certain=event != BROKEN_OFF)
            self.connections.refused()

    def read_message(self, events: list[Event]) -> int:
        frames: list[memoryview] = []
        name = self.socket.recv(NOW)
        self._read_since_look += 1
        peer = self.peers.get(name)
        if peer is not None:
            total = _read_frames(self.socket, frames)
        else:
            first = self.socket.recv(NOW, False)
            total = _read_frames(self.socket, frames, first)
            descriptor = _descriptor_of(first)
            sender = None if self._names is None else self._names.get(_user_of(first))
            if descriptor is None or (sender is None and self._names is not None):
                return total
            peer = self.meet(name, descriptor, sender, events)
        events.append(Arrived(peer, frames, peer.name))
        return total

    def meet(self, name: bytes, descriptor: int, sender: NodeId | None, events: list[Event]) -> PeerRoute:
        """The route of a connection whose first message has come."""
        self.read_monitor(events)
        peer = self.peers[name] = PeerRoute(self, name, sender)
        peer.descriptor, peer.address = descriptor, self._silent.known(descriptor)
        self.lose_named(self.connections.meet(name, descriptor))
        return peer

    def lose_named(self, name: bytes | None) -> None:
        if name is not None and name in self.peers:
            self.lose(self.peers[name])

    def lose(self, peer: PeerRoute) -> None:
        if not peer.gone:
            peer.gone = True
            self.lost.append(peer)

    def report_lost(self, events: list[Event]) -> None:
        for peer in self.lost:
            del self.peers[peer.prefix or b""]
        super().report_lost(events)


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The descriptor of the connection that brought a frame; None for ZMTP 1.0, which has no handshake."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _user_of(frame: zmq.Frame) -> str:
    """The authenticated identity of the connection that brought a frame; '' without authentication."""
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


def _read_frames(socket: zmq.Socket[bytes], frames: list[memoryview], first: zmq.Frame | None = None) -> int:
    """Append the frames of a message; returns their bytes.

    A large frame is a view of libzmq's memory, which lives as long as the view. A small frame lies unaligned in
    libzmq's read buffer and would keep all of it alive: it is copied into memory of Python, which is aligned for every
    dtype.
    """
    receive = socket.recv
    frame = receive(NOW, False) if first is None else first
    total = 0
    while True:
        size = len(frame)
        total += size
        frames.append(memoryview(frame.bytes if size < ZERO_COPY_FROM_BYTES else cast(bytes, frame)).toreadonly())
        if not frame.more:
            return total
        frame = receive(NOW, False)


def _why_refused(event: int, value: int, encrypts: bool) -> str:
    """Why a handshake failed on this side; '' for a stranger that speaks another protocol."""
    if event == NOT_LET_IN:
        return "it has the secret of this job, but its role and rank are not of this cluster"
    if value == OTHER_KEY:
        return "its secret is not that of this job, or it wanted another process than this one"
    if value == OTHER_MECHANISM:
        return "it does not encrypt" if encrypts else "it encrypts, and this process does not"
    if event == BROKEN_OFF:
        otherwise = "has another secret or none" if encrypts else "encrypts, unlike this job"
        return f"it broke off the handshake: it is no process of kvdist, has ended, gave up waiting, or {otherwise}"
    return ""
