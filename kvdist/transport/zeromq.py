"""Frames over ZeroMQ, by tcp:// and ipc://. The only module that imports zmq.

The rules, each the result of a measurement:

* `bind` makes a ROUTER, `connect` a DEALER of its own. Nobody chooses routing ids: with chosen ones a second client of
  the same name connects, sends without error and never hears anything.
* Every send is DONTWAIT with ROUTER_MANDATORY, and SNDHWM is unlimited. Any finite value would need a queue of our own
  behind it that a ROUTER cannot wake (it calls itself writable as soon as *one* peer is), so the waiting messages stay
  in libzmq's queue of that peer: a full peer holds back nobody else, and the I/O thread goes on sending while the
  node computes. What bounds the memory is the credit in bytes that the core keeps. RCVHWM is unlimited for the same
  reason and for two of libzmq's defects: over ipc:// it forgets what the kernel still holds of a peer that closes
  while the receive queue is full, and a connection whose reading stands still aborts the process if its heartbeat
  falls due after the peer has gone (an assertion, `!_io_error`, in libzmq 4.3.5).
* A break is seen by a monitor on each socket, a millisecond after a kill -9; silence is seen by heartbeats.
* A break is reported after the last message that came before it.

A forked child shares the descriptors but not the I/O thread: a send there would return normally and never leave. The
child must not use the transport (the node above refuses to); dropping or closing it there is safe, sends nothing and
removes no file of the parent's.
"""

from __future__ import annotations

import abc
import errno
import math
import os
import struct
import threading
import time
from collections.abc import Sequence
from typing import cast

import zmq
from zmq.utils.garbage import gc as zero_copy_releaser

from kvdist.config import Limits
from kvdist.errors import ConfigError, StoreClosed
from kvdist.transport.alarm import Alarm
from kvdist.transport.base import Arrived, Buffer, Connected, Disconnected, Event, Route, Transport
from kvdist.transport.connections import Connections
from kvdist.transport.endpoints import bind_error, check_form, check_path_is_free, unlink_if_ours
from kvdist.transport.heap import keep_freed_memory

ZERO_COPY_FROM_BYTES = 64 << 10
"""Below this a copy is cheaper than the bookkeeping of a shared buffer, and leaves the bytes aligned."""

BATCH_MESSAGES = 64
BATCH_BYTES = 32 << 20
"""What one `recv` takes from one socket at most, so that one poll serves many messages and no peer starves another."""

BACKLOG, HANDSHAKE_MS, RECONNECT_MS, RECONNECT_MS_MAX = 4096, 5_000, 100, 2_000
RETRANSMIT_MS_MAX = 10_000
"""How long the kernel may go on retransmitting to a peer that is gone before the connection breaks."""

MORE, NOW = int(zmq.SNDMORE) | int(zmq.DONTWAIT), int(zmq.DONTWAIT)
ACCEPTED, UP, DISCONNECTED = map(int, (zmq.EVENT_ACCEPTED, zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED))
FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
WATCHED = ACCEPTED | DISCONNECTED | UP | int(FAILED)

MONITOR_EVENT = struct.Struct("=HI")
LAST_WORDS_S = 0.02
"""Time for the I/O thread to write what `send` has just been given."""


class ZeroMQTransport(Transport):
    """Carries frames between processes. See the module for the rules.

    Attributes:
        limits: gives the largest frame, the receive queue and the heartbeat.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._pid = os.getpid()
        keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._poller = zmq.Poller()
        self._links: list[_Link] = []
        self._link_of: dict[object, _Link] = {}
        self._suspects: set[_Link] = set()
        self._files: list[tuple[str, int]] = []
        self._alarm = Alarm()
        self._poller.register(self._alarm.fileno, zmq.POLLIN)
        self._closed = False
        _releaser_use.enter()

    @property
    def strangers_refused(self) -> int:
        return sum(link.connections.strangers for link in self._links if isinstance(link, _Bound))

    def bind(self, endpoint: str) -> str:
        self._check_open()
        endpoint = check_form(endpoint)
        if endpoint.startswith("ipc://"):
            check_path_is_free(endpoint)
        link = _Bound(self._socket(zmq.ROUTER), endpoint)
        try:
            link.socket.bind(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise bind_error(endpoint, error.errno or 0, error.strerror or str(error)) from error
        self._watch(link)
        if endpoint.startswith("ipc://"):
            path = endpoint.removeprefix("ipc://")
            self._files.append((path, os.stat(path).st_ino))
        else:
            # libzmq tells 127.0.0.1 as [::ffff:127.0.0.1]; only its port is news.
            port = link.socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
            link.endpoint = f"{endpoint.rpartition(':')[0]}:{port}"
        return link.endpoint

    def connect(self, endpoint: str) -> Route:
        self._check_open()
        endpoint = check_form(endpoint)
        link = _Dialled(self._socket(zmq.DEALER), endpoint)
        try:
            link.socket.connect(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise ConfigError(
                f"cannot dial {endpoint}: {error.strerror}; write tcp://host:port or ipc:///path"
            ) from error
        self._watch(link)
        return link.route

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        self._check_open()
        if type(to) is not _Peer:
            raise TypeError(f"{to!r} is not a route of this transport; use what connect or an arrival gave")
        # All frames are looked at before the first one leaves: an error in the middle would leave half a message in
        # the socket, and the next message would become its other half.
        pieces = [self._piece(frame) for frame in frames]
        if not pieces:
            raise ValueError("a message has at least one frame")
        if to.gone or _transmit(to, pieces):
            return
        if isinstance(to.link, _Dialled):
            to.link.redial()
            _transmit(to, pieces)
            return
        to.link.lose(to)
        self._suspects.add(to.link)
        self._alarm.ring()

    def send_all(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        for frames in messages:
            self.send(to, frames)

    def shares(self, route: Route) -> bool:
        return False

    def recv(self, timeout_s: float) -> list[Event]:
        self._check_open()
        deadline = time.monotonic() + timeout_s
        events: list[Event] = []
        wait_ms = math.ceil(timeout_s * 1000.0)
        while True:
            ready = {self._link_of.get(item) for item, _ in self._poller.poll(max(0, wait_ms))}
            woken = None in ready and self._alarm.rest()  # the alarm is no link
            for link in self._links:
                if link in ready or link in self._suspects:
                    link.collect(events)
            self._suspects.clear()
            if events or woken:
                return events
            # What happened was of no interest above, such as a stranger: go on waiting.
            wait_ms = math.ceil((deadline - time.monotonic()) * 1000.0)
            if wait_ms <= 0:
                return events

    def wake(self) -> None:
        self._alarm.ring()

    def close(self, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        is_ours = os.getpid() == self._pid  # pyzmq leaves sockets of a forked child alone, the files are the parent's
        if is_ours:
            self._see_off(linger_s)
        self._closed = True
        self._alarm.close()
        if not is_ours:
            return
        for link in self._links:
            link.close()
        self._context.term()
        for path, inode in self._files:
            unlink_if_ours(path, inode)
        _releaser_use.leave()

    def _see_off(self, linger_s: float) -> None:
        """Stay until every peer that dialled in has gone, so that last words arrive.

        libzmq's own LINGER is not used: the reading of a socket that lingers stands still, see above.
        """
        now = time.monotonic()
        at_least, at_most = now + min(linger_s, LAST_WORDS_S), now + linger_s
        while now < at_least or (now < at_most and any(link.has_peers for link in self._links)):
            self._poller.poll(10)
            for link in self._links:
                link.collect([])
            now = time.monotonic()

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this transport is closed; make a new one")

    def _piece(self, frame: Buffer) -> tuple[Buffer, bool]:
        """The frame and whether to copy it."""
        if type(frame) is bytes:
            size = len(frame)
        else:
            frame = memoryview(frame)
            size = frame.nbytes
            if not frame.c_contiguous:
                raise ValueError("a frame must be one contiguous run of bytes; copy it first")
        if size < ZERO_COPY_FROM_BYTES:
            return frame, True
        if size > self.limits.frame_bytes_max:
            raise ValueError(
                f"a frame of {size} bytes is over the limit of {self.limits.frame_bytes_max} (Limits.frame_bytes_max), "
                "and the peer would close the connection; send it in pieces"
            )
        return frame, False

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        limits = self.limits
        made = self._context.socket(kind)
        heartbeat_ms, silence_ms = round(limits.heartbeat_s * 1000), round(limits.silence_s * 1000)
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: limits.frame_bytes_max,
            zmq.HEARTBEAT_IVL: heartbeat_ms,
            zmq.HEARTBEAT_TIMEOUT: silence_ms,
            zmq.HEARTBEAT_TTL: silence_ms,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 10,
            zmq.TCP_KEEPALIVE_INTVL: 5,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.TCP_MAXRT: RETRANSMIT_MS_MAX,
            zmq.IPV6: 1,
        }
        if kind == zmq.ROUTER:
            options |= {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: BACKLOG}
        else:
            options |= {zmq.IMMEDIATE: 0, zmq.RECONNECT_IVL: RECONNECT_MS, zmq.RECONNECT_IVL_MAX: RECONNECT_MS_MAX}
        for option, value in options.items():
            made.set(option, value)
        return made

    def _watch(self, link: _Link) -> None:
        self._links.append(link)
        for item in (link.socket, link.monitor):
            self._link_of[item] = link
            self._poller.register(item, zmq.POLLIN)


class _Peer:
    """A route: the socket, and on the bound side whom to name first."""

    __slots__ = ("gone", "link", "prefix", "send")

    def __init__(self, link: _Link, prefix: bytes | None) -> None:
        self.link = link
        self.prefix = prefix
        self.send = link.socket.send
        self.gone = False

    def __repr__(self) -> str:
        return f"<route {'to' if self.prefix is None else self.prefix.hex() + ' at'} {self.link.endpoint}>"


def _transmit(to: _Peer, pieces: list[tuple[Buffer, bool]]) -> bool:
    """Send one message whole or not at all; False when nobody is there.

    Without a limit on the queue, what libzmq refuses is a route that has ended. On the bound side it says so at the
    prefix, and when the connection breaks later it takes back the first frames and drops the others. A DEALER may say
    so at any frame; after the first, it drops the rest of the message, which must be given to it.
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


class _Link(abc.ABC):
    """One socket, the monitor that watches it, and the routes that lead through it."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(WATCHED)
        self.lost: list[_Peer] = []

    def collect(self, events: list[Event]) -> None:
        """Append what happened. A break comes after the messages before it: only when no message is left."""
        self.read_monitor(events)
        if self.read_messages(events):
            self.report_lost(events)

    @abc.abstractmethod
    def observe(self, event: int, value: int, events: list[Event]) -> None:
        """Take one event of the monitor."""

    @abc.abstractmethod
    def read_message(self, events: list[Event]) -> int:
        """Take one message; its bytes. Raises `zmq.Again` when there is none."""

    @abc.abstractmethod
    def lose(self, peer: _Peer) -> None:
        """Note that the connection of this route is gone."""

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
        """Take a batch of messages; whether no message is left."""
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
        why = f"the connection at {self.endpoint} was closed, broke, or was silent for longer than KVDIST_SILENCE_S"
        events += [Disconnected(peer, why) for peer in self.lost]
        self.lost.clear()

    @property
    @abc.abstractmethod
    def has_peers(self) -> bool:
        """Whether somebody who dialled in is still there."""

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class _Dialled(_Link):
    """A DEALER: one route, for as long as the transport lives."""

    has_peers = False

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        super().__init__(socket, endpoint)
        self.route = _Peer(self, None)
        self.up = False
        self.complained = False

    def observe(self, event: int, value: int, events: list[Event]) -> None:
        if event == UP:
            self.report_lost(events)
            self.up, self.complained = True, False
            events.append(Connected(self.route))
        elif event == DISCONNECTED and self.up:
            self.lose(self.route)
        elif event == DISCONNECTED and not self.complained:
            # It was never up: the handshake failed. libzmq may dial again and again, but once is enough to say so.
            self.complained = True
            reason = f"whoever listens at {self.endpoint} refused the handshake; is it a node of this cluster?"
            events.append(Disconnected(self.route, reason))

    def redial(self) -> None:
        """Dial again where libzmq has given up, as it does after a peer that broke the protocol."""
        # It would take the same endpoint for one that it is dialling already.
        self.socket.disconnect(self.endpoint)
        self.socket.connect(self.endpoint)

    def read_message(self, events: list[Event]) -> int:
        frames: list[memoryview] = []
        total = _read_frames(self.socket, frames)
        if not self.up:
            # The monitor has it already that the connection is up, and it must be said first.
            self.read_monitor(events)
        events.append(Arrived(self.route, frames))
        return total

    def lose(self, peer: _Peer) -> None:
        if self.up:
            self.up = False
            self.lost.append(peer)


class _Bound(_Link):
    """A ROUTER: a route for every connection that sent something. `Connections` knows which is which."""

    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        super().__init__(socket, endpoint)
        self.peers: dict[bytes, _Peer] = {}
        self.connections = Connections()

    @property
    def has_peers(self) -> bool:
        return self.connections.have_spoken

    def observe(self, event: int, value: int, events: list[Event]) -> None:
        if event == ACCEPTED:
            self.connections.accepted(value)
        elif event == UP:
            self.connections.handshaken()
        elif event == DISCONNECTED:
            self.lose_named(self.connections.closed(value))
        else:
            self.connections.refused()

    def read_message(self, events: list[Event]) -> int:
        frames: list[memoryview] = []
        name = self.socket.recv(NOW)
        peer = self.peers.get(name)
        if peer is not None:
            total = _read_frames(self.socket, frames)
        else:
            first = self.socket.recv(NOW, False)
            total = _read_frames(self.socket, frames, first)
            descriptor = _descriptor_of(first)
            if descriptor is None:
                return total
            peer = self.meet(name, descriptor, events)
        events.append(Arrived(peer, frames))
        return total

    def meet(self, name: bytes, descriptor: int, events: list[Event]) -> _Peer:
        """The route of a connection heard for the first time."""
        self.read_monitor(events)
        peer = self.peers[name] = _Peer(self, name)
        self.lose_named(self.connections.meet(name, descriptor))
        return peer

    def lose_named(self, name: bytes | None) -> None:
        if name is not None and name in self.peers:
            self.lose(self.peers[name])

    def lose(self, peer: _Peer) -> None:
        if not peer.gone:
            peer.gone = True
            self.lost.append(peer)

    def report_lost(self, events: list[Event]) -> None:
        for peer in self.lost:
            del self.peers[peer.prefix or b""]
        super().report_lost(events)


def _descriptor_of(frame: zmq.Frame) -> int | None:
    """The connection that brought a frame; None for bytes without a handshake, which libzmq takes for ZMTP 1.0."""
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return None


def _read_frames(socket: zmq.Socket[bytes], frames: list[memoryview], first: zmq.Frame | None = None) -> int:
    """Append the frames of one message; their bytes.

    A large frame is a view of libzmq's memory, which lives as long as the view. A small one lies unaligned in libzmq's
    read buffer and would keep all of it alive: it is copied, and what Python allocates is aligned for every dtype.
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


class _ReleaserUse:
    """Ends pyzmq's thread for buffers sent without a copy, when the last transport closes and nobody else needs it.

    pyzmq starts one thread and context a process at the first such send and keeps them to the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports = 0
        self._is_foreign = False

    def enter(self) -> None:
        with self._lock:
            if self._transports == 0:
                self._is_foreign = zero_copy_releaser.is_alive()
            self._transports += 1

    def leave(self) -> None:
        with self._lock:
            self._transports -= 1
            if self._transports or self._is_foreign or not zero_copy_releaser.is_alive():
                return
            # Releases pass through one queue: when this one is done, those of the closed sockets are.
            marker = zmq.Frame(b"end", copy=False, track=True)
            tracker = marker.tracker
            del marker
            tracker.wait(RELEASE_S)
            if not zero_copy_releaser.refs:
                zero_copy_releaser.stop()


RELEASE_S = 5.0
_releaser_use = _ReleaserUse()
