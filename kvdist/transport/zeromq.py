"""The transport between processes: frames over ZeroMQ, by tcp:// and ipc://.

Invariants, each the result of a measurement:

* `bind` creates a ROUTER, each `connect` a separate DEALER. libzmq chooses routing ids: with ids chosen by kvdist a
  second client of the same name connects, sends without error and never receives anything.
* Every send is DONTWAIT with ROUTER_MANDATORY, and SNDHWM is unlimited. Any finite value would need another queue
  behind it that a ROUTER cannot wake (it calls itself writable as soon as *one* peer is), so the waiting messages stay
  in libzmq's queue of that peer: a full peer does not hold back others, and the I/O thread goes on sending while the
  node computes. Memory is bounded by the credit in bytes that the core keeps. RCVHWM is unlimited for the same reason
  and for two of libzmq's defects: over ipc:// it forgets bytes that the kernel still holds of a peer that closes while
  the receive queue is full, and a connection whose reading is suspended aborts the process if its heartbeat falls due
  after the peer has disconnected (an assertion, `!_io_error`, in libzmq 4.3.5).
* A break is seen by a monitor on each socket, a millisecond after a kill -9.
* Silence is judged by the bytes that arrive (`tcp_info`): both sides probe each other, so a connection whose peer lives
  receives bytes at each heartbeat, and a busy connection receives bytes all the time, however slow it is. Over ipc://,
  where the kernel does not count bytes and no line is slow, libzmq judges by the answers to its probes.
* A break is reported after the last message that came before it.

A forked child shares the descriptors but not the I/O thread: a send in it would return normally and never leave. The
child must not use the transport (the node above refuses to); dropping or closing it in the child is safe, sends nothing
and removes no file of the parent's.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence

import zmq
from zmq.utils.garbage import gc as zero_copy_releaser

from kvdist.config.settings import REDIAL_S_MIN, Limits
from kvdist.config.sockets import OPEN_FILES_BASE, RAISED_MAX, SCHEME, listen_at, remove
from kvdist.errors import ConfigError, StoreClosed
from kvdist.nodes import NodeId
from kvdist.transport.base import Buffer, Event, Route, Transport
from kvdist.transport.connections import Bounds
from kvdist.transport.curve import Credentials, ZapAuthenticator
from kvdist.transport.endpoints import bind_error, check_form, endpoint_of_listener
from kvdist.transport.sockets import (
    ZERO_COPY_FROM_BYTES,
    BoundSocket,
    DialledSocket,
    MonitoredSocket,
    PeerRoute,
    transmit,
)
from kvdist.transport.tcp_info import CAN_JUDGE

BACKLOG = 4096
HANDSHAKE_MS, HANDSHAKE_MS_DIALLED = 5_000, 8_000
"""Time limits of a handshake: for a listener, which may itself be too busy for it; and for a dialler, which begins to
wait before the listener accepts: longer, so that the listener hangs up, and knows that only time ran out."""
LOOKS_PER_SILENCE, SILENCE_LOOK_S_MIN, SILENCE_LOOK_S_MAX = 8, 0.01, 1.0
"""Number of checks for silent connections within the allowed silence, and limits of their interval in seconds; a
further check comes when the most silent connection reaches the allowed silence."""

JUDGED_PROBE_S_MAX, VERDICT_PROBE_S = 0.5, 0.1
"""Longest interval of libzmq's probes where it judges silence itself; and the interval in the scheduler, whose verdict
counts: the patience begins with the first probe that is not answered."""

LOOK_MS = 100
"""Interval of the checks of connections that have not sent a message yet, and time that a refused connection stays open
to receive the reason."""
SILENT_SHARE = 4
"""Connections that have not sent a message may take this fraction (1 in 4) of the descriptors of this process."""

LAST_WORDS_S = 0.02
"""Time for the I/O thread to write the last messages of `send`."""

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""
KEPT_BYTES_MAX = 256 << 20
MAPPED_BYTES_MIN = 32 << 20
"""The largest threshold that glibc accepts; larger blocks are still mapped."""

RELEASE_S = 5.0


def keep_freed_memory() -> None:
    """Make glibc's malloc keep the memory of large messages; do nothing with another C library.

    libzmq allocates every message it receives with `malloc`. By default glibc maps large blocks afresh and unmaps them
    when they are freed, so that each received page is faulted in anew: 23,000 page faults for a step of 105 MB, a
    quarter of the time spent in the kernel. With these settings the same step has 2,700. Freed memory stays with the
    process up to `KEPT_BYTES_MAX`.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # musl has no such knob
    mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


class ReleaserUse:
    """Ends pyzmq's thread for buffers sent without a copy when the last transport closes, unless others need it.

    pyzmq starts a thread and a context per process at the first such send, and keeps them to the end.
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
            # All releases pass through a single queue: when the marker's is done, those of the closed sockets are.
            marker = zmq.Frame(b"end", copy=False, track=True)
            tracker = marker.tracker
            del marker
            tracker.wait(RELEASE_S)
            if not zero_copy_releaser.refs:
                zero_copy_releaser.stop()


releaser_use = ReleaserUse()


class Wakeup:
    """A pipe that ends another thread's poll; repeated calls of `wake` before a `clear` count once.

    Attributes:
        fileno: the reading end, to be polled.
    """

    def __init__(self) -> None:
        self.fileno, self._writer = os.pipe()
        self._lock = threading.RLock()  # a signal handler may call `wake` while this thread does
        self._is_set = False
        self._closed = False

    def wake(self) -> None:
        with self._lock:
            # Under the lock, because a closed descriptor's number may belong to another file by now.
            if not self._is_set and not self._closed:
                self._is_set = True
                os.write(self._writer, b"\0")

    def clear(self) -> bool:
        """Make the pipe unreadable again; returns True."""
        with self._lock:
            os.read(self.fileno, 1)
            self._is_set = False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fileno)
            os.close(self._writer)


class ZeroMQTransport(Transport):
    """Carries frames between processes. See the module for its invariants.

    Args:
        limits: the largest frame, and how long a peer may be silent.
        credentials: the names of this process and of its possible peers; None for connections without encryption.
        io_threads: number of threads of libzmq that transfer and encrypt bytes, each for some of the connections.
        peers_max: number of processes that may dial this process.
        judges_silence: whether a silent peer counts as lost. If not, a peer is lost only when its machine stops
            acknowledging bytes; a process that stands still is not.
        probe_s: longest interval of libzmq's probes where it judges silence itself.
    """

    def __init__(
        self,
        limits: Limits,
        credentials: Credentials | None = None,
        io_threads: int = 1,
        peers_max: int = 0,
        judges_silence: bool = True,
        probe_s: float = JUDGED_PROBE_S_MAX,
    ) -> None:
        self.limits = limits
        self._probe_s = min(limits.heartbeat_s, probe_s)
        self._judges_silence = judges_silence
        self._silence_look_s = min(SILENCE_LOOK_S_MAX, limits.silence_s / LOOKS_PER_SILENCE)
        self._silence_look_at = 0.0
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        descriptors = RAISED_MAX if soft == resource.RLIM_INFINITY else soft
        # All members at once, where as many that have spoken, and the process itself, still find room beside them.
        share = max(descriptors // SILENT_SHARE, min(peers_max, descriptors - OPEN_FILES_BASE - peers_max))
        # A member may have a window full on the way before its first message is read.
        each = max(2 * limits.frame_bytes_max, limits.window_bytes + limits.frame_bytes_max)
        self._bounds = Bounds(share, each, max(8 * limits.frame_bytes_max, limits.window_bytes * peers_max, each))
        self._credentials = credentials
        self._pid = os.getpid()
        keep_freed_memory()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads)
        self._poller = zmq.Poller()
        self._links: list[MonitoredSocket] = []
        self._bound: list[BoundSocket] = []
        self._link_of: dict[object, MonitoredSocket | ZapAuthenticator] = {}
        self._authenticator: ZapAuthenticator | None = None
        self._suspects: set[MonitoredSocket] = set()
        self._files: list[tuple[str, int]] = []
        self._hanging_up: dict[PeerRoute, float] = {}
        """Routes whose connections are to end → when."""
        self._look_at = 0.0
        self._wakeup = Wakeup()
        self._poller.register(self._wakeup.fileno, zmq.POLLIN)
        self._closed = False
        releaser_use.enter()

    @property
    def strangers_refused(self) -> int:
        return sum(link.connections.strangers for link in self._bound)

    def bind(self, endpoint: str) -> str:
        self._check_open()
        endpoint = check_form(endpoint)
        if endpoint.startswith(SCHEME):
            # libzmq would remove what lies at the path: a stranger's file, or a living server's socket.
            try:
                return self.bind_listening(listen_at(endpoint.removeprefix(SCHEME)).detach())
            except OSError as error:
                raise bind_error(endpoint, error.errno or 0, error.strerror or str(error)) from error
        link = self._listen(endpoint)
        # libzmq writes 127.0.0.1 as [::ffff:127.0.0.1]; only its port is new.
        port = link.socket.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        link.endpoint = f"{endpoint.rpartition(':')[0]}:{port}"
        return link.endpoint

    def bind_listening(self, descriptor: int) -> str:
        """Accept connections at an inherited listening socket, which this transport owns from now on, with its file.

        Raises:
            ConfigError: the descriptor is not a listening socket.
        """
        self._check_open()
        endpoint = endpoint_of_listener(descriptor)
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
        if endpoint.startswith(SCHEME):
            path = endpoint.removeprefix(SCHEME)
            self._files.append((path, os.stat(path).st_ino))
        return self._listen(endpoint, descriptor).endpoint

    def _listen(self, endpoint: str, descriptor: int = -1) -> BoundSocket:
        made = self._socket(zmq.ROUTER, endpoint)
        names = None
        if self._credentials is not None:
            names = self._authenticate(self._credentials).names
            self._credentials.guard(made)
        if descriptor >= 0:
            made.set(zmq.USE_FD, descriptor)
        link = BoundSocket(made, endpoint, names, self._bounds)
        try:
            made.bind(endpoint)
        except zmq.ZMQError as error:
            link.close()
            raise bind_error(endpoint, error.errno or 0, error.strerror or str(error)) from error
        self._watch(link)
        return link

    def _authenticate(self, credentials: Credentials) -> ZapAuthenticator:
        """The authenticator, created before the first socket is bound."""
        if self._authenticator is None:
            made = self._authenticator = ZapAuthenticator(self._context, credentials)
            self._link_of[made.socket] = made
            self._poller.register(made.socket, zmq.POLLIN)
        return self._authenticator

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        self._check_open()
        endpoint = check_form(endpoint)
        made, me = self._socket(zmq.DEALER, endpoint), None
        if self._credentials is not None:
            if to is None:
                made.close()
                raise ValueError(f"connect({endpoint!r}) needs `to`: an encrypted connection names its peer")
            me = self._credentials.me
            self._credentials.introduce(made, to)
        link = DialledSocket(made, endpoint, me, to if me is not None else None)
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
        if type(to) is not PeerRoute:
            raise TypeError(f"{to!r} is not a route of this transport; use what connect or an arrival gave")
        # All frames are looked at before the first one leaves: an error in the middle would leave half a message in
        # the socket, and the next message would become its other half.
        pieces = [self._piece(frame) for frame in frames]
        if not pieces:
            raise ValueError("a message has at least one frame")
        if to.gone or transmit(to, pieces):
            return
        if isinstance(to.link, DialledSocket):
            to.link.redial()
            transmit(to, pieces)
            return
        to.link.lose(to)
        self._suspects.add(to.link)
        self._wakeup.wake()

    def hang_up(self, route: Route) -> None:
        if type(route) is PeerRoute and isinstance(route.link, BoundSocket):
            self._hanging_up.setdefault(route, time.monotonic() + LOOK_MS / 1000.0)

    def recv(self, timeout_s: float) -> list[Event]:
        self._check_open()
        now = time.monotonic()
        deadline = now + timeout_s
        events: list[Event] = []
        while True:
            wait_ms = math.ceil((min(deadline, self._silence_look_at) - now) * 1000.0)
            if self._hanging_up or any(link.is_watched for link in self._bound):
                wait_ms = min(wait_ms, LOOK_MS)
            ready = {self._link_of.get(item) for item, _ in self._poller.poll(max(0, wait_ms))}
            woken = None in ready and self._wakeup.clear()  # the wakeup pipe is not a link
            if self._authenticator in ready:
                self._answer_authentication()
            for link in self._links:
                if link in ready or link in self._suspects:
                    link.collect(events)
            self._suspects.clear()
            # After the monitors have been read: what they say is closed is not looked at.
            if (now := time.monotonic()) >= self._silence_look_at:
                self._hang_up_silent(now)
            self._look_at_strangers()
            if events or woken:
                return events
            # Nothing of it concerned the caller, such as a stranger: go on waiting.
            now = time.monotonic()
            if now >= deadline:
                return events

    def _hang_up_silent(self, now: float) -> None:
        longest_s, after_s = 0.0, self.limits.silence_s
        if self._judges_silence and CAN_JUDGE:
            for link in self._links:
                longest_s = max(longest_s, link.hang_up_silent(after_s, self.limits.quiet_s))
        self._silence_look_at = now + min(self._silence_look_s, max(after_s - longest_s, SILENCE_LOOK_S_MIN))

    def wake(self) -> None:
        self._wakeup.wake()

    def close(self, linger_s: float = 0.0) -> None:
        if self._closed:
            return
        is_ours = os.getpid() == self._pid  # pyzmq leaves sockets of a forked child alone, the files are the parent's
        if is_ours:
            self._drain(linger_s)
        self._closed = True
        self._wakeup.close()
        if not is_ours:
            return
        for link in self._links:
            link.close()
        if self._authenticator is not None:
            self._authenticator.close()
        self._context.term()
        for path, inode in self._files:
            remove(path, inode)
        releaser_use.leave()

    def _answer_authentication(self) -> None:
        if self._authenticator is not None:
            self._authenticator.answer()

    def _look_at_strangers(self) -> None:
        """End connections that were refused, or exceed the limits."""
        now = time.monotonic()
        for peer in [peer for peer, due in self._hanging_up.items() if due <= now] if self._hanging_up else ():
            del self._hanging_up[peer]
            if isinstance(peer.link, BoundSocket):
                peer.link.hang_up(peer)
        if now >= self._look_at:
            self._look_at = now + LOOK_MS / 1000.0
            for link in self._bound:
                link.look()

    def _drain(self, linger_s: float) -> None:
        """Stay until every peer that dialled in has disconnected, so that last messages arrive.

        libzmq's LINGER is not used: a lingering socket does not read, see the module.
        """
        now = time.monotonic()
        at_least, at_most = now + min(linger_s, LAST_WORDS_S), now + linger_s
        while now < at_least or (now < at_most and any(link.has_peers for link in self._links)):
            self._poller.poll(10)
            self._answer_authentication()
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

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        limits = self.limits
        made = self._context.socket(kind)
        patience_ms = round(limits.patience_s * 1000)
        libzmq_judges = self._judges_silence and not (CAN_JUDGE and endpoint.startswith("tcp://"))
        probe_s = self._probe_s if libzmq_judges else limits.heartbeat_s
        options = {
            zmq.LINGER: 0,
            zmq.SNDHWM: 0,
            zmq.RCVHWM: 0,
            zmq.MAXMSGSIZE: limits.frame_bytes_max,
            zmq.HEARTBEAT_IVL: round(probe_s * 1000),
            zmq.HEARTBEAT_TIMEOUT: patience_ms if libzmq_judges else 0,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS if kind == zmq.ROUTER else HANDSHAKE_MS_DIALLED,
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: 10,
            zmq.TCP_KEEPALIVE_INTVL: 5,
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.TCP_MAXRT: patience_ms,
            zmq.IPV6: 1,
        }
        if kind == zmq.ROUTER:
            options |= {zmq.ROUTER_MANDATORY: 1, zmq.BACKLOG: BACKLOG}
        else:
            options |= {zmq.IMMEDIATE: 0, zmq.CONNECT_TIMEOUT: round(limits.dial_s * 1000)}
            options |= {zmq.RECONNECT_IVL: round(REDIAL_S_MIN * 1000)}
            options |= {zmq.RECONNECT_IVL_MAX: round(limits.redial_s * 1000)}
        for option, value in options.items():
            made.set(option, value)
        return made

    def _watch(self, link: MonitoredSocket) -> None:
        self._links.append(link)
        if isinstance(link, BoundSocket):
            self._bound.append(link)
        for item in (link.socket, link.monitor):
            self._link_of[item] = link
            self._poller.register(item, zmq.POLLIN)
