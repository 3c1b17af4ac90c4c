"""A network and a clock that exist only in memory: everything that can go wrong does, when the seed says so.

One heap of (time, number, action) is all the time there is. Connections behave as those of ZeroMQ were measured to:
order holds within a connection; when it breaks, what the dialling side had under way is lost up to some message and
the rest follows after the reconnection, what the other side had under way is lost altogether, nobody is told which
messages those were, and the accepting side may hear the new connection before it learns of the end of the old one.

While the network is parted nothing arrives from one side on the other, or on neither. TCP keeps what was sent, so it
arrives later if the connection holds; where nothing was heard for long, both ends break it; and nobody can dial, as
that takes both directions.
"""

from __future__ import annotations

import heapq
import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass, field
from functools import partial
from typing import get_args

from kvdist.core.machine import Effect
from kvdist.nodes import Member, NodeId, Role
from kvdist.protocol.messages import Message
from kvdist.runtime.node import Node
from kvdist.transport.base import Arrived, Buffer, Connected, Disconnected, Event, Route, Transport

KINDS: dict[int, str] = {message.KIND: message.__name__ for message in get_args(Message)}
RECONNECT_S = 0.1
"""How long a dialling side waits before it tries again."""


@dataclass(frozen=True)
class Weather:
    """What the network does to messages."""

    delay_s: float = 0.002
    """The longest that a message is under way."""
    scheduler_delay_s: float | None = None
    """The same to and from the scheduler, if that is farther away."""
    loss: float = 0.0
    """Probability that a single message vanishes."""
    duplication: float = 0.0
    """Probability that a message arrives a second time."""
    cut: float = 0.0
    """Probability, at each message, that its connection breaks."""


@dataclass
class Wall:
    """Who cannot reach whom for a while: hosts by the names of their processes, without lives."""

    senders: Set[str]
    receivers: Set[str]
    is_one_way: bool
    ends_at: float
    silent_at: float
    """When both ends break a connection that has brought nothing since the wall is there."""

    def blocks(self, sender: str, receiver: str) -> bool:
        """Whether nothing gets from one process to another."""
        ends = sender.partition(",")[0], receiver.partition(",")[0]
        ways = [ends] if self.is_one_way else [ends, ends[::-1]]
        return any(one in self.senders and other in self.receivers for one, other in ways)

    def stands_between(self, one: str, other: str) -> bool:
        """Whether nothing gets through in one direction at least."""
        return self.blocks(one, other) or self.blocks(other, one)


class Network:
    """The clock, the heap of what will happen, and who listens where."""

    def __init__(self, seed: int, weather: Weather) -> None:
        self.random = random.Random(seed)
        self.weather = weather
        self.now = 0.0
        self.listening: dict[str, SimulatedTransport] = {}
        self.happened: Counter[str] = Counter()
        """Faults by kind: a test of a fault asserts that there was one."""
        self.used: Counter[str] = Counter()
        """What was exercised, likewise."""
        self.trace: list[str] = []
        self.late_s = 0.0
        """How late timers may fire."""
        self.calm = False
        """No more faults from now on."""
        self.wall: Wall | None = None
        """What parts the network now."""
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Have something happen at a time."""
        self._counter += 1
        heapq.heappush(self._heap, (max(time, self.now), self._counter, action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have something happen later."""
        self.at(self.now + delay_s, action)

    def step(self) -> bool:
        """Let the next thing happen; False if nothing will."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True

    def chance(self, probability: float, kind: str) -> bool:
        """Whether a fault of this kind strikes now."""
        if not probability or self.calm or self.random.random() >= probability:
            return False
        self.happened[kind] += 1
        return True

    def part(self, wall: Wall, transports: Iterable[SimulatedTransport]) -> None:
        """Let some not reach others for a while."""
        self.wall = wall
        sides = f"{sorted(wall.senders)} {'-|' if wall.is_one_way else '|'} {sorted(wall.receivers)}"
        self.say(f"parted: {sides} until {wall.ends_at:.6f}")
        lives = {id(life): life for one in transports for life in one.lives if life.alive}
        behind = [life for life in lives.values() if wall.stands_between(*life.ends)]
        self.happened["parted"] += bool(behind)
        for life in behind if wall.silent_at < wall.ends_at else ():
            self.happened["silent behind a wall"] += 1
            self.at(wall.silent_at + self.random.uniform(0.0, 0.2), partial(life.cut, "no sign of life", True))
        self.at(wall.ends_at, self._heal)

    def _heal(self) -> None:
        self.wall = None
        self.say("healed")

    def heard_at(self, time: float, sender: str, receiver: str) -> tuple[float, bool]:
        """When one end of a connection notices that the other has closed it, and whether by its silence alone."""
        wall = self.wall
        if wall is None or not wall.blocks(sender, receiver) or time >= wall.ends_at:
            return time, False
        return max(time, min(wall.silent_at, wall.ends_at)), wall.silent_at < wall.ends_at

    def delay(self, ends: Sequence[str] = ()) -> float:
        """How long the next message is under way between these, in seconds."""
        far_s = self.weather.scheduler_delay_s
        return self.random.uniform(0.0001, far_s if far_s and "scheduler" in ends else self.weather.delay_s)

    def say(self, text: str) -> None:
        """Write a line of the trace."""
        self.trace.append(f"{self.now:.6f} {text}")


@dataclass(eq=False)
class Freight:
    """One message under way: not a copy, so it shows whether its sender keeps its hands off."""

    frames: list[memoryview]
    checksum: int
    was_told: bool = False
    """The machine has had it once: its sender may have it back by now, though it arrives again."""

    @classmethod
    def of(cls, frames: list[memoryview]) -> Freight:
        """The message as it is now."""
        return cls(frames, _checksum(frames))

    @property
    def is_intact(self) -> bool:
        """Whether it is as it was when it was sent."""
        return self.checksum == _checksum(self.frames)


def _checksum(frames: Sequence[memoryview]) -> int:
    checksum = 0
    for frame in frames[2:]:
        checksum = zlib.crc32(frame, checksum)
    return checksum


@dataclass(eq=False)
class Dialled:
    """A connection as the dialling side sees it, over all its lives. It is that side's route."""

    dialler: SimulatedTransport
    endpoint: str
    life: Life | None = None
    waiting: list[list[memoryview]] = field(default_factory=list)


@dataclass(eq=False)
class Life:
    """One life of a connection. It is the accepting side's route."""

    dialled: Dialled
    acceptor: SimulatedTransport
    alive: bool = True
    spoken: bool = False
    up: deque[Freight] = field(default_factory=deque)
    """Under way to the acceptor."""
    down: deque[Freight] = field(default_factory=deque)
    up_at: float = 0.0
    """When the last message under way arrives: none overtakes another."""
    down_at: float = 0.0

    @property
    def ends(self) -> tuple[str, str]:
        """Who has dialled, and whom."""
        return self.dialled.dialler.name, self.acceptor.name

    def carry(self, frames: list[memoryview], upwards: bool) -> None:
        """Send one message, or lose it, or send it twice, or break."""
        network = self.acceptor.network
        weather = network.weather
        first, self.spoken = not self.spoken, True
        # The first word on a connection says whose it is. Only another break can lose it, not the network alone.
        if not first and network.chance(weather.loss, "lost"):
            return
        freight = Freight.of(frames)
        self._depart(freight, upwards)
        if network.chance(weather.duplication, "duplicated"):
            self._depart(freight, upwards)
        if network.chance(weather.cut, "cut"):
            network.after(network.delay(), self.cut)

    def _depart(self, freight: Freight, upwards: bool) -> None:
        network = self.acceptor.network
        ends = self.ends
        network.say(f"{ends[not upwards]} -> {ends[upwards]} {_kind(freight.frames)}")
        if upwards:
            self.up.append(freight)
            self.up_at = max(self.up_at, network.now + network.delay(ends))
            network.at(self.up_at, lambda: self._arrive(upwards))
        else:
            self.down.append(freight)
            self.down_at = max(self.down_at, network.now + network.delay(ends))
            network.at(self.down_at, lambda: self._arrive(upwards))

    def _arrive(self, upwards: bool) -> None:
        if not self.alive:
            return
        network, ends = self.acceptor.network, self.ends
        if network.wall is not None and network.wall.blocks(ends[not upwards], ends[upwards]):
            network.happened["kept back by a wall"] += 1
            network.at(network.wall.ends_at + network.delay(ends), lambda: self._arrive(upwards))
            return
        if upwards:
            self.acceptor.arrive(self, self.up.popleft())
        else:
            self.dialled.dialler.arrive(self.dialled, self.down.popleft())

    def cut(self, reason: str = "connection reset", after_silence: bool = False) -> None:
        """Break: what was under way is lost, but for the end of what the dialling side had queued."""
        if not self.alive:
            return
        self.alive = False
        network = self.acceptor.network
        kept_from = network.random.randint(0, len(self.up))
        network.happened["lost in a cut"] += kept_from + len(self.down)
        self.dialled.waiting = [freight.frames for freight in list(self.up)[kept_from:]]
        self.dialled.life = None
        network.say(f"cut {self.dialled.dialler.name} - {self.acceptor.name}")
        dialler, acceptor = self.ends
        noticed_at, is_silent = network.heard_at(network.now + network.delay(), acceptor, dialler)
        broken = Disconnected(self.dialled, reason, after_silence or is_silent)
        network.at(noticed_at, lambda: self.dialled.dialler.happen(broken))
        is_slow = network.random.random() < 0.3 and not after_silence  # who breaks a silent one knows of it
        notice_s = network.delay() + (RECONNECT_S * 1.5 if is_slow else 0.0)
        heard_at, is_silent = network.heard_at(network.now + notice_s, dialler, acceptor)
        over = Disconnected(self, reason, after_silence or is_silent)
        network.at(heard_at, lambda: self.acceptor.happen(over))
        again_at = network.now + RECONNECT_S * network.random.uniform(0.1, 1.0)
        network.at(max(again_at, noticed_at), lambda: self.dialled.dialler.dial(self.dialled))

    def end(self) -> None:
        """One side has closed: what is under way still arrives, then the other side hears of the end."""
        self.acceptor.network.at(max(self.up_at, self.down_at) + 0.001, lambda: self.cut("closed by the peer"))


def _kind(frames: Sequence[memoryview]) -> str:
    """What is under way, for the trace: the envelope's sixth byte says it."""
    return KINDS.get(frames[0][5], "?")


class SimulatedTransport(Transport):
    """The verbs over the network in memory."""

    strangers_refused = 0

    def __init__(self, network: Network, name: str, on_event: Callable[[], None]) -> None:
        self.network = network
        self.name = name
        self.closed = False
        self.frozen = False
        """Its process is paused: it answers nobody who dials."""
        self._on_event = on_event
        self.received: Freight | None = None
        """What the machine is reading now."""
        self._inbox: deque[tuple[Event, Freight | None]] = deque()
        self.lives: list[Life] = []
        """The connections that it has had."""

    def bind(self, endpoint: str) -> str:
        self.network.listening[endpoint] = self
        return endpoint

    def connect(self, endpoint: str, to: NodeId | None = None) -> Route:
        dialled = Dialled(self, endpoint)
        self.network.after(self.network.delay(), lambda: self.dial(dialled))
        return dialled

    def dial(self, dialled: Dialled) -> None:
        """Try to reach the other side, again and again."""
        acceptor = self.network.listening.get(dialled.endpoint)
        if self.closed:
            return
        wall = self.network.wall
        is_parted = wall is not None and acceptor is not None and wall.stands_between(self.name, acceptor.name)
        if acceptor is None or acceptor.closed or acceptor.frozen or self.frozen or is_parted:
            self.network.after(RECONNECT_S, lambda: self.dial(dialled))
            return
        life = dialled.life = Life(dialled, acceptor)
        self.lives.append(life)
        acceptor.lives.append(life)
        self.happen(Connected(dialled))
        waiting, dialled.waiting = dialled.waiting, []
        for frames in waiting:
            life.carry(frames, upwards=True)

    def send(self, to: Route, frames: Sequence[Buffer]) -> None:
        views = [memoryview(frame).toreadonly() for frame in frames]
        if isinstance(to, Life):
            if to.alive:
                to.carry(views, upwards=False)
            return
        assert isinstance(to, Dialled)
        if to.life is None:
            to.waiting.append(views)
        else:
            to.life.carry(views, upwards=True)

    def hang_up(self, route: Route) -> None:
        """Nobody is a stranger here."""

    def recv(self, timeout_s: float) -> list[Event]:
        """One event at a time, so that a machine is checked after each."""
        if not self._inbox:
            return []
        event, self.received = self._inbox.popleft()
        return [event]

    @property
    def has_mail(self) -> bool:
        """Whether something has arrived that was not read."""
        return bool(self._inbox)

    def happen(self, event: Event) -> None:
        """Something has happened on a connection."""
        if not self.closed:
            self._inbox.append((event, None))
            self._on_event()

    def arrive(self, route: Route, freight: Freight) -> None:
        """A message has come."""
        if not self.closed:
            self._inbox.append((Arrived(route, freight.frames), freight))
            self._on_event()

    def wake(self) -> None:
        self._on_event()

    def close(self, linger_s: float = 0.0) -> None:
        if not self.closed:
            self.closed = True
            for life in self.lives:
                life.end()

    def break_off(self, reason: str, after_silence: bool = False) -> None:
        """Every connection of this side breaks."""
        for life in self.lives:
            life.cut(reason, after_silence)

    def cut_one(self) -> bool:
        """Break one connection; False if there is none."""
        alive = [life for life in self.lives if life.alive]
        if alive:
            self.network.happened["cut"] += 1
            self.network.random.choice(alive).cut()
        return bool(alive)


class Process:
    """One node of the cluster: it turns whenever something happens, until it stops, crashes or is paused."""

    def __init__(self, name: str, network: Network, make: Callable[[SimulatedTransport], Node]) -> None:
        self.name = name
        self.network = network
        self.crashed = False
        self.ended = False
        self.ended_at = 0.0
        self.paused = False
        self.is_zombie = False
        """It stands still for long enough to be given up."""
        self.is_void = False
        """Whether others go on without it, and may write again where it reads: what it does then does not matter."""
        self.after_turn: Callable[[], None] = lambda: None
        self._turning = False
        self._timer_at = float("inf")
        self.transport = SimulatedTransport(network, name, self.wake)
        self.node = make(self.transport)
        machine = self.node.machine
        self._handle = machine.handle
        if self.node.journal is None:  # which would have to write down this process
            machine.handle = self._watched  # type: ignore[method-assign]
        self.wake()

    def wake(self) -> None:
        """Turn as soon as may be."""
        if not self._turning and not self.ended:
            self._turning = True
            self.network.after(0.0, self._turn)

    def crash(self) -> None:
        """End without a word, as after kill -9."""
        self.crashed = self.ended = True
        self.ended_at = self.network.now
        self.network.happened["crash"] += 1
        self.network.say(f"crash {self.name}")
        if self.network.random.random() < 0.5:
            self.transport.break_off("connection reset")
        self.transport.close()

    def pause(self, seconds: float, silence_s: float) -> None:
        """Stand still, as after SIGSTOP; after `silence_s` the peers break the connections."""
        self.paused = self.transport.frozen = True
        self.network.happened["pause"] += 1
        self.network.say(f"pause {self.name} for {seconds:g} s")
        self.is_zombie = seconds > silence_s
        if self.is_zombie:
            self.network.after(silence_s, lambda: self.transport.break_off("no sign of life", after_silence=True))
        self.network.after(seconds, self._resume)

    def _resume(self) -> None:
        self.paused = self.transport.frozen = False
        self.wake()

    def _watched(self, sender: Member, message: Message, now: float) -> list[Effect]:
        """What a machine is told must be what was sent, though bytes are not copied on the way."""
        freight = self.transport.received
        if freight is not None and len(freight.frames) > 3:
            self.network.used[f"{type(message).__name__} in several frames"] += 1
        if freight is not None:
            # The followers of a leader that was given up have pushed by themselves. Nobody hears what it makes of it.
            is_void = self.is_void or (self.is_zombie and sender.node.role is Role.WORKER)
            assert freight.was_told or freight.is_intact or is_void, (
                f"a {type(message).__name__} from {sender} changed under way"
            )
            freight.was_told = True
        return self._handle(sender, message, now)

    def _turn(self) -> None:
        self._turning = False
        if self.ended or self.paused:
            return
        self.node.turn(0.0)
        self.node.reliable.validate()
        self.after_turn()
        if self.node.stopped:
            self.ended = True
            self.ended_at = self.network.now
            self.network.say(f"end {self.name}: {self.node.failure or 'well'}")
            self.node.finish()
            return
        if self.transport.has_mail:
            self.wake()
        # The clock of a scheduler that takes the place of another has stood still between the two.
        away_s = self.network.now - self.node.clock()
        due = max(self.node.reliable.deadline + away_s + (1e-9 if away_s else 0.0), self.network.now)
        if due < self._timer_at:
            self._timer_at = due
            late_s = self.network.random.uniform(0.0, self.network.late_s) if self.network.late_s else 0.0
            self.network.at(due + late_s, self._timer)

    def _timer(self) -> None:
        if self.network.now >= self._timer_at:
            self._timer_at = float("inf")
        self.wake()
