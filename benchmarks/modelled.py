"""A network and processors as numbers, on which the real nodes of kvdist run: the ground of `scale.py`.

What is real: the machines, the messages they exchange, their order, and the processor time that this Python takes for
each turn of a node, which is measured while the simulation runs. What is modelled: bytes. Arrays are `shrink` times
smaller than those they stand for, and their bytes count `shrink` times: on the card, and as processor time per byte, as
measured on this machine. Hosts have cores, which all their processes share, and one card of a bandwidth each way.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

import cluster  # noqa: F401  # puts the checkout on the path

from kvdist.node import Node
from kvdist.transport.base import Arrived, Buffer, Connected, Event, Route, Transport


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time, as `measure_costs` finds them."""

    send_message_s: float
    send_byte_s: float
    receive_message_s: float
    receive_byte_s: float
    sum_byte_s: float
    """A server, for each byte of a contribution."""
    update_byte_s: float
    """The same with SGD on the server."""
    copy_byte_s: float
    """A worker, for each byte of a value that it writes where the user wants it."""


@dataclass(frozen=True)
class Card:
    """A host's network card."""

    bytes_per_s: float
    latency_s: float


class Clock:
    """The time, and all that will happen."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Have something happen."""
        self.events += 1
        heapq.heappush(self._heap, (max(when, self.now), self.events, action))

    def step(self) -> bool:
        """Let the next thing happen; False if nothing will."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True


class Rotation:
    """Something that serves one job at a time, and those who wait in turns: as a card serves its connections.

    Args:
        clock: the time.
        start: begins a job of some amount; gives the time at which it will be done.
    """

    def __init__(self, clock: Clock, start: Callable[[float], float]) -> None:
        self._clock = clock
        self._start = start
        self._lanes: dict[Hashable, deque[tuple[float, Callable[[], None]]]] = {}
        self._busy = False

    def add(self, lane: Hashable, amount: float, then: Callable[[], None]) -> None:
        """A job behind all others of its lane; `then` is called when it is done."""
        self._lanes.setdefault(lane, deque()).append((amount, then))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._lanes:
            self._busy = False
            return
        self._busy = True
        lane = next(iter(self._lanes))
        jobs = self._lanes.pop(lane)
        amount, then = jobs.popleft()
        if jobs:
            self._lanes[lane] = jobs

        def done() -> None:
            then()
            if lane in self._lanes:
                self._lanes[lane] = self._lanes.pop(lane)  # behind all that came meanwhile
            self._next()

        self._clock.at(self._start(amount), done)


class Host:
    """A machine: cores that take work in the order in which it comes, and a card."""

    def __init__(self, clock: Clock, cores: int, card: Card) -> None:
        self.clock = clock
        self.card = card
        self._sending = Rotation(clock, lambda size: clock.now + size / card.bytes_per_s)
        self._received_at = 0.0
        """When the card is free again to receive."""
        self._cores = [0.0] * cores

    def work(self, seconds: float) -> float:
        """Occupy the first core that is free; when the work is done."""
        done = max(self.clock.now, self._cores[0]) + seconds
        heapq.heapreplace(self._cores, done)
        return done

    def cross(self, there: Host, lane: Hashable, size: int, arrived: Callable[[], None]) -> None:
        """Carry bytes of a connection from this host's card to another's, which takes them as they come."""
        if there is self:
            arrived()
            return

        def sent() -> None:
            # The first byte arrived when it was sent: on an idle way both cards are busy at once, not one by one.
            took = size / there.card.bytes_per_s
            first_byte = self.clock.now + self.card.latency_s - size / self.card.bytes_per_s
            there._received_at = max(first_byte, there._received_at) + took
            self.clock.at(there._received_at, arrived)

        self._sending.add(lane, size, sent)


@dataclass(eq=False)
class Link:
    """One connection as one of its ends sees it: its route."""

    owner: ModelledTransport
    peer: ModelledTransport
    other: Link | None = None
    """The same as the peer sees it."""


@dataclass(frozen=True)
class Network:
    """What all processes share."""

    clock: Clock
    costs: Costs
    shrink: int
    listening: dict[str, ModelledTransport] = field(default_factory=dict)
    counted: dict[str, float] = field(default_factory=lambda: {"messages": 0, "bytes": 0})


class ModelledTransport(Transport):
    """The verbs of a transport. What a node sends leaves when its turn is over."""

    strangers_refused = 0

    def __init__(self, network: Network, host: Host) -> None:
        self.network = network
        self.host = host
        self.on_event: Callable[[], None] = lambda: None
        self.outgoing: list[tuple[Link, list[Buffer]]] = []
        self.inbox: deque[Event] = deque()
        self._carrying = Rotation(network.clock, host.work)
        """The thread that carries its bytes."""

    def bind(self, endpoint: str) -> str:
        self.network.listening[endpoint] = self
        return endpoint

    def connect(self, endpoint: str) -> Route:
        peer = self.network.listening[endpoint]
        link = Link(self, peer)
        link.other = Link(peer, self, link)
        self._deliver(Connected(link))
        return link

    def shares(self, route: Route) -> bool:
        return False

    def send_all(self, to: Route, messages: Sequence[Sequence[Buffer]]) -> None:
        for frames in messages:
            self.send(to, frames)

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        assert isinstance(to, Link)
        self.outgoing.append((to, list(frames)))

    def depart(self) -> None:
        """Carry what was sent during a turn, now that the turn is over."""
        outgoing, self.outgoing = self.outgoing, []
        for link, frames in outgoing:
            self._carry(link, frames)

    def _carry(self, link: Link, frames: list[Buffer]) -> None:
        """The sender's thread of bytes, the cards, the receiver's thread: each takes one message after another."""
        network, peer, route = self.network, link.peer, link.other
        assert route is not None
        costs = network.costs
        size = sum(len(frame) for frame in frames[:2]) + network.shrink * payload_bytes(frames)
        network.counted["messages"] += 1
        network.counted["bytes"] += size
        event = Arrived(route, [memoryview(frame).toreadonly() for frame in frames])
        taking_s = costs.receive_message_s + size * costs.receive_byte_s
        sending_s = costs.send_message_s + size * costs.send_byte_s

        def arrived() -> None:
            peer._carrying.add(route, taking_s, lambda: peer._deliver(event))

        self._carrying.add(link, sending_s, lambda: self.host.cross(peer.host, link, size, arrived))

    def _deliver(self, event: Event) -> None:
        self.inbox.append(event)
        self.on_event()

    def recv(self, timeout_s: float) -> list[Event]:
        events = list(self.inbox)
        self.inbox.clear()
        return events

    def wake(self) -> None:
        self.on_event()

    def close(self, linger_s: float = 0.0) -> None:
        self.inbox.clear()


def payload_bytes(frames: Sequence[Buffer]) -> int:
    """The bytes of arrays in a message."""
    return sum(memoryview(frame).nbytes for frame in frames[2:])


class Process:
    """One node, which turns when something has happened and takes its host's time for it."""

    def __init__(self, network: Network, host: Host, make: Callable[[ModelledTransport], Node], copies: bool) -> None:
        self.network = network
        self.transport = ModelledTransport(network, host)
        self.byte_work_s = 0.0
        """What the present turn owes for bytes that it has touched; its kernels add to it."""
        self.busy_s = 0.0
        """Processor time of all turns."""
        self._copies = copies
        """It writes the arrays that arrive somewhere else, as a worker does."""
        self.after_turn: Callable[[], None] = lambda: None
        self._free_at = 0.0
        self._awake = False
        self._timer_at = float("inf")
        self.node = make(self.transport)
        self.transport.on_event = self.wake
        self.wake()

    def wake(self) -> None:
        """Turn as soon as the process is free."""
        if not self._awake:
            self._awake = True
            self.network.clock.at(self._free_at, self._turn)

    def _turn(self) -> None:
        self._awake = False
        if self.node.stopped:
            return
        clock = self.network.clock
        self.byte_work_s = self._copying_s() if self._copies else 0.0
        started = time.thread_time()
        self.node.turn(0.0)
        took = time.thread_time() - started + self.byte_work_s
        if self.node.failure is not None:
            raise self.node.failure
        self.busy_s += took
        self._free_at = self.transport.host.work(took)
        clock.at(self._free_at, self._turned)
        due = max(self.node.reliable.deadline, clock.now)
        if due < self._timer_at:
            self._timer_at = due
            clock.at(due, self._timer)

    def _turned(self) -> None:
        self.transport.depart()
        self.after_turn()

    def _copying_s(self) -> float:
        arrived = [event.frames for event in self.transport.inbox if isinstance(event, Arrived)]
        return self.network.shrink * self.network.costs.copy_byte_s * sum(payload_bytes(frames) for frames in arrived)

    def _timer(self) -> None:
        if self.network.clock.now >= self._timer_at:
            self._timer_at = float("inf")
        self.wake()
