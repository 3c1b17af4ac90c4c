"""A network and processors as numbers, on which the real nodes of kvdist run: the ground of `scale.py`.

What is real: the machines, the messages they exchange, their order, and the processor time that this Python takes for
each turn of a node, which is measured while the simulation runs. What is modelled: bytes. Arrays are `shrink` times
smaller than those they stand for, and their bytes count `shrink` times: on the card, and as processor time per byte, as
`costs.py` measures it. A host has cores, for which all threads of its processes queue: the node's, and the one with
which its transport carries bytes. It has one card of a bandwidth each way.

One worker may stand for several that do the same: what it says and hears then costs whoever is at the other end so many
times as much, in processor time as on the card, and costs the worker what it costs one.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial

import cluster  # noqa: F401  # puts the checkout on the path
import numpy as np

from kvdist.runtime.node import Node
from kvdist.transport.base import Arrived, Buffer, Connected, Disconnected, Event, Route, Transport

COLD_BYTES = 32 << 20
"""What the caches hold, nearly enough."""
SLEEPERS_BONUS_S = 0.003
"""Linux's default."""


@dataclass(frozen=True)
class Costs:
    """Seconds of processor time, as `measure_costs` finds them."""

    give_message_s: float
    """A node's thread, until the transport has a message."""
    give_byte_s: float
    send_message_s: float
    """The transport's thread at the sender, with what the kernel does for it."""
    send_byte_s: float
    receive_message_s: float
    """The transport's thread at the receiver."""
    receive_byte_s: float
    take_message_s: float
    """A node's thread, to have a message from the transport."""
    take_byte_s: float
    wake_s: float
    """A node's thread that waited, each time it goes on; and whoever wakes it."""
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


Job = Callable[[], float]
"""Begins some work; gives the seconds that it takes."""


@dataclass(eq=False)
class Thread:
    """What a kernel knows of a thread: how much of the processors it has had."""

    had_s: float = 0.0


class Cores:
    """What serves so many jobs at once: of those who wait, first who has had least, as kernels do.

    Who has slept long comes first, but not for as long as it has slept.
    """

    def __init__(self, clock: Clock, count: int) -> None:
        self._clock = clock
        self._free = count
        self._waiting: list[tuple[float, int, Thread, Job, Callable[[], None]]] = []
        self._order = itertools.count()
        self._least_s = 0.0
        """What those who were served last have had."""

    def run(self, thread: Thread, job: Job, then: Callable[[], None]) -> None:
        """Begin a job as soon as a core is free for it; `then` is called when it is done."""
        thread.had_s = max(thread.had_s, self._least_s - SLEEPERS_BONUS_S)
        if self._free:
            self._free -= 1
            self._begin(thread, job, then)
        else:
            heapq.heappush(self._waiting, (thread.had_s, next(self._order), thread, job, then))

    def _begin(self, thread: Thread, job: Job, then: Callable[[], None]) -> None:
        def done() -> None:
            if self._waiting:
                self._begin(*heapq.heappop(self._waiting)[2:])
            else:
                self._free += 1
            then()

        self._least_s = max(self._least_s, thread.had_s)
        took = job()
        thread.had_s += took
        self._clock.at(self._clock.now + took, done)


class Rotation:
    """A thread or a card: it does one job at a time, and the lanes of those who wait take turns.

    Args:
        server: does the jobs.
        seconds: how long a job of some amount takes.
    """

    def __init__(self, server: Cores, seconds: Callable[[float], float]) -> None:
        self.busy_s = 0.0
        self._server = server
        self._thread = Thread()
        self._seconds = seconds
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
        took = self._seconds(amount)
        self.busy_s += took

        def done() -> None:
            then()
            if lane in self._lanes:
                self._lanes[lane] = self._lanes.pop(lane)  # behind all that came meanwhile
            self._next()

        self._server.run(self._thread, lambda: took, done)


class Host:
    """A machine: cores, and a card."""

    def __init__(self, clock: Clock, cores: int, card: Card) -> None:
        self.clock = clock
        self.cores = Cores(clock, cores)
        self.card = card
        self._sending = Rotation(Cores(clock, 1), lambda size: size / card.bytes_per_s)
        self._received_at = 0.0
        """When the card is free again to receive."""
        self.moved_bytes = 0.0
        """By all its processes so far."""

    def cross(self, there: Host, lane: Hashable, leaving: float, coming: float, arrived: Callable[[], None]) -> None:
        """Carry bytes of a connection from this host's card to another's, which takes them as they come.

        Args:
            leaving: bytes that this card sends.
            coming: bytes that the other one receives.
        """
        if there is self:
            arrived()
            return

        def sent() -> None:
            # The first byte arrived when it was sent: on an idle way both cards are busy at once, not one by one.
            took = coming / there.card.bytes_per_s
            last_byte = self.clock.now + self.card.latency_s
            first_byte = last_byte - leaving / self.card.bytes_per_s
            there._received_at = max(first_byte, there._received_at) + took
            self.clock.at(max(last_byte, there._received_at), arrived)

        self._sending.add(lane, leaving, sent)


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
    is_one_host: bool = False
    listening: dict[str, ModelledTransport] = field(default_factory=dict)


class ModelledTransport(Transport):
    """The verbs of a transport. What a node sends leaves when its turn is over."""

    strangers_refused = 0

    def __init__(self, network: Network, host: Host, stands_for: int = 1) -> None:
        self.network = network
        self.host = host
        self.stands_for = stands_for
        self.on_event: Callable[[], None] = lambda: None
        self.outgoing: list[tuple[Link, Arrived, float]] = []
        self.inbox: deque[Event] = deque()
        self.arrived_bytes = 0.0
        """Of arrays, in the inbox."""
        self.messages = 0
        """Sent and received."""
        self.node_s = 0.0
        """What its messages have cost the node's thread since it was last asked."""
        self.carrying = Rotation(host.cores, lambda seconds: seconds)
        """The thread that carries its bytes."""
        self.links: list[Link] = []
        """As this side sees them."""
        self.is_gone = False

    def bind(self, endpoint: str) -> str:
        if endpoint in self.network.listening:
            raise ValueError(f"two processes listen at {endpoint}")
        self.network.listening[endpoint] = self
        return endpoint

    def connect(self, endpoint: str, to: object = None) -> Route:
        peer = self.network.listening[endpoint]
        link = Link(self, peer)
        link.other = Link(peer, self, link)
        self.links.append(link)
        peer.links.append(link.other)
        self.inbox.append(Connected(link))
        self.on_event()
        return link

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        assert isinstance(to, Link) and to.other is not None
        network, costs = self.network, self.network.costs
        size = len(frames[0]) + len(frames[1]) + network.shrink * payload_bytes(frames)
        times = to.peer.stands_for
        self.messages += times
        self.host.moved_bytes += times * size
        self.node_s += times * (costs.give_message_s + size * costs.give_byte_s)
        event = Arrived(to.other, [memoryview(frame).toreadonly() for frame in frames])
        self.outgoing.append((to, event, size))

    def depart(self) -> None:
        """Carry what was sent during a turn, now that the turn is over."""
        outgoing, self.outgoing = self.outgoing, []
        for link, event, size in outgoing:
            self._carry(link, event, size)

    def _carry(self, link: Link, event: Arrived, size: float) -> None:
        """The sender's thread of bytes, the cards, the receiver's thread: each takes one message after another."""
        costs, peer = self.network.costs, link.peer
        here, there = peer.stands_for, self.stands_for
        sending_s = here * (costs.send_message_s + size * costs.send_byte_s)
        taking_s = there * (costs.receive_message_s + size * costs.receive_byte_s)

        def arrived() -> None:
            peer.carrying.add(event.route, taking_s, lambda: peer._deliver(event, size, there))

        def cross() -> None:
            self.host.cross(peer.host, link, here * size, there * size, arrived)

        self.carrying.add(link, sending_s, cross)

    def _deliver(self, event: Event, size: float, times: int) -> None:
        if self.is_gone:
            return
        costs = self.network.costs
        self.inbox.append(event)
        self.messages += times
        self.host.moved_bytes += times * size
        self.node_s += times * (costs.take_message_s + size * costs.take_byte_s)
        self.arrived_bytes += times * size
        self.on_event()

    def crash(self) -> None:
        """Say nothing more; those who were connected see it."""
        self.is_gone = True
        self.outgoing.clear()
        self.inbox.clear()
        clock = self.network.clock
        for link in self.links:
            assert link.other is not None
            event, peer = Disconnected(link.other, "connection reset"), link.peer
            clock.at(clock.now + self.host.card.latency_s, partial(peer._deliver, event, 0.0, 1))
        for endpoint in [name for name, one in self.network.listening.items() if one is self]:
            del self.network.listening[endpoint]

    def hang_up(self, route: Route) -> None:
        """Nobody is a stranger here."""

    def recv(self, timeout_s: float) -> list[Event]:
        events = list(self.inbox)
        self.inbox.clear()
        self.arrived_bytes = 0.0
        return events

    def wake(self) -> None:
        self.on_event()

    def close(self, linger_s: float = 0.0) -> None:
        self.inbox.clear()


def payload_bytes(frames: Sequence[Buffer]) -> int:
    """The bytes of arrays in a message."""
    return sum(memoryview(frame).nbytes for frame in frames[2:])


class Caches:
    """What this processor has at hand. A real process finds it full of the arrays that it has just moved."""

    def __init__(self) -> None:
        self._memory = np.ones(COLD_BYTES, np.uint8)

    def fill(self, nbytes: float) -> None:
        """Have something else there."""
        self._memory[: int(min(nbytes, COLD_BYTES))] += 1


CACHES = Caches()


class Process:
    """One node, which turns when something has happened and takes its host's time for it.

    Args:
        stands_for: as many of its kind that do the same.
        hears: as many of each that it hears.
        copies: it writes the arrays that arrive somewhere else, as a worker does.
        stopwatch: by which its turns are timed. The default leaves out what others take of the processor, and is a
            system call.
    """

    def __init__(
        self,
        network: Network,
        host: Host,
        make: Callable[[ModelledTransport], Node],
        stands_for: int = 1,
        hears: int = 1,
        copies: bool = False,
        stopwatch: Callable[[], float] = time.thread_time,
    ) -> None:
        self.network = network
        self._stopwatch = stopwatch
        self.transport = ModelledTransport(network, host, stands_for)
        self.byte_work_s = 0.0
        """What the present turn owes for bytes that it has touched; its kernels add to it."""
        self.busy_s = 0.0
        """Processor time of all turns."""
        self.turns = 0
        self._copies = copies
        self._hears = hears
        self.after_turn: Callable[[], None] = lambda: None
        self._thread = Thread()
        self._turning = self._again = False
        self._moved_before = 0.0
        """What its host had moved at its last turn."""
        self._timer_at = float("inf")
        self.node = make(self.transport)
        self.transport.on_event = self.wake
        self.wake()

    def wake(self) -> None:
        """Turn as soon as the process has a core."""
        if self._turning:
            self._again = True
        else:
            self._turning = True
            self.transport.node_s += self.network.costs.wake_s
            self.transport.host.cores.run(self._thread, self._turn, self._turned)

    def _turn(self) -> float:
        self._again = False
        if self.node.stopped or self.transport.is_gone:
            return 0.0
        transport = self.transport
        CACHES.fill(transport.host.moved_bytes - self._moved_before)
        self._moved_before = transport.host.moved_bytes
        self.byte_work_s = transport.arrived_bytes * self.network.costs.copy_byte_s if self._copies else 0.0
        started = self._stopwatch()
        self.node.turn(0.0)
        python_s = self._stopwatch() - started
        took = self._hears * python_s + self.byte_work_s + transport.node_s
        transport.node_s = 0.0
        if self.node.failure is not None:
            raise self.node.failure
        self.busy_s += took
        self.turns += 1
        return took

    def _turned(self) -> None:
        self._turning = False
        if self.transport.is_gone:
            return
        self.transport.depart()
        self.after_turn()
        clock = self.network.clock
        due = max(self.node.reliable.deadline, clock.now)
        if self._again:
            self.wake()
        elif due < self._timer_at:
            self._timer_at = due
            clock.at(due, self._timer)

    def crash(self) -> None:
        """Be gone, as after signal 9."""
        self.transport.crash()

    def _timer(self) -> None:
        if self.network.clock.now >= self._timer_at:
            self._timer_at = float("inf")
        self.wake()
