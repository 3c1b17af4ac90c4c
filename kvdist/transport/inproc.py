"""Frames between the nodes of a process, by reference.

For the embedded one-worker cluster and for tests of whole clusters. Invariants:

* The lock of the network guards everything: transports may live in a single thread that runs several nodes in turn
  (`InprocNetwork.wait` wakes it when a node has an event) or in a thread each.
* A large frame is passed as a read-only view of the sender's memory; a small frame that the sender could still change
  is copied, as a socket would copy it.
* A dialled route outlives its peer, as it does over sockets: messages sent meanwhile wait, and the route is up again
  when the endpoint is bound again. The bound side then sees a new route.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from kvdist.errors import ConfigError, StoreClosed
from kvdist.nodes import NodeId
from kvdist.transport.base import Arrived, Buffer, Connected, Disconnected, Event, Route, Transport

SCHEME = "inproc://"
COPY_BELOW_BYTES = 64 << 10


class InprocNetwork:
    """State that the transports of a process share: the bound names, and the condition that their threads wait for."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._transports: list[InprocTransport] = []
        self._bound: dict[str, InprocTransport] = {}

    def transport(self) -> InprocTransport:
        """A new transport on this network."""
        with self._changed:
            made = InprocTransport(self)
            self._transports.append(made)
        return made

    def wait(self, timeout_s: float) -> bool:
        """Wait until a transport has an event or was woken; False after `timeout_s` seconds without.

        Consumes no event: the following `recv` of that transport returns at once.
        """
        with self._changed:
            return self._changed.wait_for(lambda: any(one._is_ready() for one in self._transports), timeout_s)


class _InprocRoute:
    """An end of a connection: the route of the transport that owns it."""

    __slots__ = ("dialled", "endpoint", "other", "owner", "used", "waiting")

    def __init__(self, owner: InprocTransport, endpoint: str, dialled: bool) -> None:
        self.owner = owner
        self.endpoint = endpoint
        self.dialled = dialled
        self.other: _InprocRoute | None = None
        self.used = False  # a route that was never reported is not reported as lost
        self.waiting: deque[list[memoryview]] = deque()

    def __repr__(self) -> str:
        return f"<route {'to' if self.dialled else 'at'} {self.endpoint} #{id(self):x}>"


class InprocTransport(Transport):
    """The transport of a node on an `InprocNetwork`. Created by `InprocNetwork.transport`."""

    def __init__(self, network: InprocNetwork) -> None:
        self._network = network
        self._changed = network._changed
        self._inbox: deque[Event] = deque()
        self._ends: dict[_InprocRoute, None] = {}
        self._woken = False
        self._closed = False

    @property
    def strangers_refused(self) -> int:
        return 0  # only this process can connect

    def bind(self, endpoint: str) -> str:
        _check(endpoint)
        with self._changed:
            self._check_open()
            if endpoint in self._network._bound:
                raise ConfigError(f"cannot bind {endpoint}: the name is taken in this network; choose another one")
            self._network._bound[endpoint] = self
            for transport in self._network._transports:
                for end in transport._ends:
                    if end.dialled and end.endpoint == endpoint and end.other is None:
                        _join(end, self)
            self._changed.notify_all()
        return endpoint

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        _check(endpoint)
        with self._changed:
            self._check_open()
            end = _InprocRoute(self, endpoint, dialled=True)
            self._ends[end] = None
            if endpoint in self._network._bound:
                _join(end, self._network._bound[endpoint])
                self._changed.notify_all()
        return end

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        if not frames:
            raise ValueError("a message has at least one frame")
        views = [_view(frame) for frame in frames]
        with self._changed:
            self._check_open()
            if not isinstance(to, _InprocRoute) or to.owner is not self:
                raise TypeError(f"{to!r} is not a route of this transport; use what connect or an arrival gave")
            if to.other is not None:
                _deliver(to.other, views)
                self._changed.notify_all()
            elif to.dialled:
                to.waiting.append(views)

    def hang_up(self, route: Route) -> None:
        """Do nothing: a process has no strangers in itself."""

    def recv(self, timeout_s: float) -> list[Event]:
        with self._changed:
            self._check_open()
            self._changed.wait_for(self._is_ready, timeout_s)
            self._woken = False
            events = list(self._inbox)
            self._inbox.clear()
        return events

    def wake(self) -> None:
        with self._changed:
            self._woken = not self._closed
            self._changed.notify_all()

    def close(self, linger_s: float = 0.0) -> None:
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._woken = False
            self._inbox.clear()
            self._network._transports.remove(self)
            bound = self._network._bound
            for endpoint in [name for name, transport in bound.items() if transport is self]:
                del bound[endpoint]
            for end in self._ends:
                _part(end)
            self._ends.clear()
            self._changed.notify_all()

    def _is_ready(self) -> bool:
        return bool(self._inbox) or self._woken or self._closed

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed("this transport is closed; make a new one")


def _check(endpoint: str) -> None:
    if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
        raise ConfigError(f"{endpoint!r} is not an endpoint of the in-process transport; write inproc://name")


def _view(frame: Buffer) -> memoryview:
    """A read-only view of bytes that do not change: the sender's memory if large, a copy if small."""
    if isinstance(frame, bytes):
        return memoryview(frame)
    view = memoryview(frame)
    if not view.c_contiguous:
        raise ValueError("a frame must be one contiguous run of bytes; copy it first")
    if view.nbytes < COPY_BELOW_BYTES:
        return memoryview(view.tobytes())
    return view.cast("B").toreadonly()


def _join(dialled: _InprocRoute, bound: InprocTransport) -> None:
    """Connect a dialled end to the transport that bound its endpoint, and deliver the messages that waited."""
    answering = _InprocRoute(bound, dialled.endpoint, dialled=False)
    bound._ends[answering] = None
    dialled.other, answering.other = answering, dialled
    dialled.owner._inbox.append(Connected(dialled))
    while dialled.waiting:
        _deliver(answering, dialled.waiting.popleft())


def _deliver(to: _InprocRoute, frames: list[memoryview]) -> None:
    to.used = True
    to.owner._inbox.append(Arrived(to, frames))


def _part(end: _InprocRoute) -> None:
    """Report this end's closing to the other side; a dialled other side goes on waiting for its endpoint."""
    other, end.other = end.other, None
    if other is None:
        return
    other.other = None
    if other.dialled or other.used:
        other.owner._inbox.append(Disconnected(other, f"the peer at {other.endpoint} closed its transport"))
    if not other.dialled and other.owner is not end.owner:
        del other.owner._ends[other]
