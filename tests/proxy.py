"""A relay between real processes that understands ZMTP well enough to hit single messages at a chosen byte.

A `Proxy` carries the connections of a job that does not encrypt. It parses what libzmq says (a greeting, then frames;
RFC 23), and asks the test's fault about each message of kvdist what is to become of it. Servers announce where they
listen in their hello; the proxy writes a front of its own there, so that workers dial it too.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from kvdist.config.endpoints import split_endpoint, tcp_endpoint
from kvdist.protocol.messages import Hello, Roster
from kvdist.protocol.wire import KINDS, MAGIC, decode, encode

GREETING_BYTES = 64
MORE, LONG, COMMAND = 1, 2, 4
RECEIVE_BYTES = 1 << 16
JOIN_S = 10.0

NAMES = {code: form.message.__name__ for code, form in KINDS.items()}


@dataclass(frozen=True)
class Passing:
    """One message on its way.

    Attributes:
        kind: the name of its class.
        up: whether it goes from the process that dialled to the one that listens.
        link: the port at which the proxy was dialled, to tell servers and the scheduler apart.
        life: how many connections there were at that port before this one.
        number: how many messages went before it on this connection in this direction.
        frames: its frames.
    """

    kind: str
    up: bool
    link: int
    life: int
    number: int
    frames: tuple[bytes, ...]


@dataclass(frozen=True)
class Drop:
    """It never arrives, and the connection stays."""


@dataclass(frozen=True)
class Twice:
    """It arrives a second time."""


@dataclass(frozen=True)
class Later:
    """It arrives after this time, and so does what follows it."""

    seconds: float


@dataclass(frozen=True)
class Cut:
    """The connection breaks after `nbytes` bytes of frame `frame`, its length included; None: after the whole frame."""

    frame: int
    nbytes: int | None = None


Fate = Drop | Twice | Later | Cut | None
Fault = Callable[[Passing], Fate]


class Proxy:
    """Carries connections, and does to their messages what `fault` says. A context: at its end all are closed.

    Args:
        fault: asked for each message, in the order of each connection; called under a lock.
        fronts_in: the messages in which endpoints of servers are replaced by fronts: `Hello`, where servers dial the
            proxy, or `Roster`, where one worker does and all its connections are to pass.
    """

    def __init__(self, fault: Fault, fronts_in: str = "Hello") -> None:
        self.fronts_in = fronts_in
        self.fired: Counter[str] = Counter()
        """Fates that came to pass, and ``'Cut Push'`` for instance, of which message."""
        self.passed: Counter[str] = Counter()
        """Messages that arrived, by kind."""
        self.lives: Counter[int] = Counter()
        """Port of a front → connections."""
        self._fault = fault
        self._lock = threading.RLock()
        self._fronts: dict[int, int] = {}
        self._targets: dict[int, int] = {}
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._held = {True: threading.Event(), False: threading.Event()}
        for event in self._held.values():
            event.set()
        self._closed = False

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for event in self._held.values():
            event.set()
        with self._lock:
            for one in list(self._sockets):
                self._close(one)
        for thread in self._threads:
            thread.join(JOIN_S)
        assert not any(thread.is_alive() for thread in self._threads), "the proxy's threads have ended"

    def front(self, target: int) -> int:
        """The port where the proxy listens for a port of a process; the same one for the same port."""
        with self._lock:
            if target not in self._fronts:
                listener = socket.create_server(("127.0.0.1", 0))
                self._sockets.add(listener)
                self._fronts[target] = listener.getsockname()[1]
                self._targets[self._fronts[target]] = target
                self._start(self._accept, listener)
            return self._fronts[target]

    def move(self, target: int, to: int) -> None:
        """Carry connections that are dialled from now on to another port, where another process listens."""
        with self._lock:
            self._targets[self._fronts[target]] = to

    def hold(self, up: bool) -> None:
        """From now on let nothing through in one direction, be it new connections' greetings; see `let_go`."""
        self._held[up].clear()
        self.fired["held"] += 1

    def let_go(self, up: bool) -> None:
        """Let what is held go on."""
        self._held[up].set()

    # Threads.

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        port = listener.getsockname()[1]
        while not self._closed:
            try:
                dialler, _ = listener.accept()
            except OSError:
                return
            try:
                acceptor = socket.create_connection(("127.0.0.1", self._targets[port]))
            except OSError:  # the process has ended
                dialler.close()
                continue
            with self._lock:
                life = self.lives[port]
                self.lives[port] += 1
                self._sockets |= {dialler, acceptor}
            for one in (dialler, acceptor):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._start(self._pump, dialler, acceptor, True, port, life)
            self._start(self._pump, acceptor, dialler, False, port, life)

    def _pump(self, source: socket.socket, sink: socket.socket, up: bool, link: int, life: int) -> None:
        try:
            _Stream(self, source, sink, up, link, life).run()
        except OSError:
            pass
        finally:
            self._close(source)
            self._close(sink)

    def _close(self, one: socket.socket) -> None:
        """End a connection at once: what is under way is lost, as by a broken line."""
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
        with self._lock:
            self._sockets.discard(one)

    def fate_of(self, passing: Passing) -> Fate:
        """What becomes of a message."""
        with self._lock:
            fate = None if self._closed else self._fault(passing)
            if fate is not None:
                name = type(fate).__name__
                self.fired[name] += 1
                self.fired[f"{name} {passing.kind}"] += 1
            if not isinstance(fate, Drop | Cut):
                self.passed[passing.kind] += 1
        return fate

    def wait_while_held(self, up: bool) -> None:
        """Return when this direction is open."""
        self._held[up].wait()


class _End(OSError):
    """The connection has ended."""


class _Stream:
    """One direction of one connection."""

    def __init__(
        self, proxy: Proxy, source: socket.socket, sink: socket.socket, up: bool, link: int, life: int
    ) -> None:
        self._proxy, self._source, self._sink = proxy, source, sink
        self._up, self._link, self._life = up, link, life
        self._unread = b""

    def run(self) -> None:
        """Carry until the connection ends."""
        self._greet()
        number = 0
        while True:
            frames: list[bytes] = []
            is_whole = False
            while not is_whole:
                flags, body = self._frame()
                if flags & COMMAND:  # libzmq's own: it also comes between two frames of a message
                    self._proxy.wait_while_held(self._up)
                    self._sink.sendall(packed(flags, body))
                    continue
                frames.append(body)
                is_whole = not flags & MORE
            self._proxy.wait_while_held(self._up)
            passing = self._passing(frames, number)
            number += 1
            self._deliver(passing)

    def _greet(self) -> None:
        """The greeting in the pieces in which it comes: each side waits for the beginning of the other's."""
        left = GREETING_BYTES
        while left:
            piece = self._source.recv(left)
            if not piece:
                raise _End
            self._proxy.wait_while_held(self._up)
            self._sink.sendall(piece)
            left -= len(piece)

    def _passing(self, bodies: list[bytes], number: int) -> Passing:
        kind = "?"
        if bodies[0][:4] == MAGIC and len(bodies[0]) > 5:
            kind = NAMES[bodies[0][5]]
            if kind == self._proxy.fronts_in:
                bodies = self._with_fronts(bodies)
        return Passing(kind, self._up, self._link, self._life, number, tuple(bodies))

    def _with_fronts(self, bodies: list[bytes]) -> list[bytes]:
        """A hello whose server is reached through the proxy, or a roster with such servers."""
        packet = decode(bodies)
        message = packet.message
        assert isinstance(message, Hello | Roster)
        if isinstance(message, Hello):
            message = replace(message, endpoint=self._front_of(message.endpoint))
        else:
            peers = tuple(replace(peer, endpoint=self._front_of(peer.endpoint)) for peer in message.peers)
            message = replace(message, peers=peers)
        return [bytes(frame) for frame in encode(replace(packet, message=message))]

    def _front_of(self, endpoint: str) -> str:
        if not endpoint:
            return endpoint
        host, port = split_endpoint(endpoint)
        return tcp_endpoint(host, self._proxy.front(port))

    def _deliver(self, passing: Passing) -> None:
        fate = self._proxy.fate_of(passing)
        last = len(passing.frames) - 1
        whole = [packed(MORE * (place < last), body) for place, body in enumerate(passing.frames)]
        match fate:
            case None:
                self._sink.sendall(b"".join(whole))
            case Twice():
                self._sink.sendall(b"".join(whole) * 2)
            case Later(seconds):
                time.sleep(seconds)
                self._sink.sendall(b"".join(whole))
            case Cut(frame, nbytes):
                self._sink.sendall(b"".join(whole[:frame]) + whole[frame][:nbytes])
                raise _End
            case Drop():
                pass

    def _frame(self) -> tuple[int, bytes]:
        (flags,) = self._read(1)
        (length,) = struct.unpack(">Q", self._read(8)) if flags & LONG else self._read(1)
        return flags, self._read(length)

    def _read(self, nbytes: int) -> bytes:
        pieces = [self._unread]
        missing = nbytes - len(self._unread)
        while missing > 0:
            piece = self._source.recv(max(RECEIVE_BYTES, min(missing, 1 << 20)))
            if not piece:
                raise _End
            pieces.append(piece)
            missing -= len(piece)
        data = b"".join(pieces)
        self._unread = data[nbytes:]
        return data[:nbytes]


def packed(flags: int, body: bytes) -> bytes:
    """A frame with its flags and length."""
    if len(body) > 255:
        return struct.pack(">BQ", flags | LONG, len(body)) + body
    return struct.pack(">BB", flags & ~LONG, len(body)) + body


# Faults.


def first_of_each_kind(make: Callable[[Passing], Fate], but: frozenset[str] = frozenset()) -> Fault:
    """What `make` says of the first message of each kind at each front."""
    seen: set[tuple[str, int]] = set()

    def fault(passing: Passing) -> Fate:
        place = (passing.kind, passing.link)
        if passing.kind in but or place in seen:
            return None
        seen.add(place)
        return make(passing)

    return fault


def cut_at_every_frame(seed: int, lives: int) -> Fault:
    """Each connection of the first ones breaks, a message later each, at a frame's end or at any byte of it."""
    chance = random.Random(seed)

    def fault(passing: Passing) -> Fate:
        if passing.life >= lives or passing.number < passing.life + 1 or passing.up is not bool(passing.life % 2):
            return None
        frame = chance.randrange(len(passing.frames))
        size = len(packed(0, passing.frames[frame]))
        return Cut(frame, chance.choice([None, 0, 1, size - 1, chance.randrange(size)]))

    return fault


def weather(loss: int, twice: int, late: int, late_s: float) -> Fault:
    """One in so many messages is lost, comes twice, or comes later by up to `late_s`; 0 for none."""
    chance = random.Random(late)
    count = 0

    def fault(_: Passing) -> Fate:
        nonlocal count
        count += 1
        if loss and count % loss == 0:
            return Drop()
        if twice and count % twice == 0:
            return Twice()
        return Later(chance.uniform(0, late_s)) if late and count % late == 0 else None

    return fault
