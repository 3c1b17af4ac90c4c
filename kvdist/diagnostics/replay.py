"""A machine that is told again what a record says it was told: it must answer the same. Pure.

It computes with zeros, as a record has no values. So answers are compared by what does not depend on values: who is
sent which envelope and header, in which order, and what else is done.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvdist.core import machine as fx
from kvdist.core.host_aggregation import HostAggregation
from kvdist.core.reliable import Reliable
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.core.worker.worker import Worker
from kvdist.diagnostics.record import (
    Asked,
    Beginning,
    Did,
    Entry,
    Input,
    Observed,
    Received,
    Sent,
    ThreadsSaid,
    Ticked,
    played,
    words_of,
)
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Role
from kvdist.protocol import messages as msg
from kvdist.protocol.wire import encode


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a replay is not what was recorded.

    Attributes:
        number: of the input, counted from 0.
        told: the input.
        recorded, replayed: the first answers that differ; None if there is none on that side.
    """

    number: int
    told: Input
    recorded: Any
    replayed: Any


class RecordedThreads:
    """The user's threads, as a record says that they answered."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[Any]] = defaultdict(deque)

    def will_say(self, said: Sequence[ThreadsSaid]) -> None:
        """The answers to the next input."""
        self._answers.clear()
        for one in said:
            self._answers[one.question].append(one.answer)

    def blocked_since(self) -> float | None:
        """See `kvdist.core.worker.pending.Threads`, as the others."""
        return self._next("blocked_since", None)  # type: ignore[no-any-return]

    def may_act(self, now: float) -> str:
        """The threads that may act."""
        return self._next("may_act", "")  # type: ignore[no-any-return]

    def longest_wait_since(self) -> float | None:
        """Since when one waits."""
        return self._next("longest_wait_since", None)  # type: ignore[no-any-return]

    def room_wait(self) -> str:
        """What a push waits for."""
        return self._next("room_wait", "")  # type: ignore[no-any-return]

    def _next(self, question: str, otherwise: Any) -> Any:
        answers = self._answers[question]
        return answers.popleft() if answers else otherwise


def machine_of(beginning: Beginning, threads: RecordedThreads) -> fx.Machine:
    """A machine as it was when it was made."""
    if beginning.config is not None:
        return Scheduler(beginning.config, beginning.now, beginning.first_incarnation)
    introduction, limits = beginning.introduction, beginning.limits
    assert introduction is not None
    if introduction.role is Role.SERVER:
        handlers = dict.fromkeys(beginning.commands, _do_nothing)
        kind: type[Server] = Server
        if beginning.replicas:
            from kvdist.core.server.replica import ReplicatedServer  # a feature at a seam: loaded where it is used

            kind = ReplicatedServer
        return kind(introduction, limits, REFERENCE, beginning.now, handlers=handlers)
    aggregation = HostAggregation(beginning.local_reduce, limits) if beginning.local_reduce else None
    worker = Worker(introduction, limits, beginning.now, aggregation)
    worker.watch(threads)
    return worker


def _do_nothing(head: int, body: str, rank: int) -> None:
    """Take the place of a handler of commands, which is the user's and runs nowhere but on its server."""


def replay(beginning: Beginning, entries: Sequence[Entry]) -> Difference | fx.Machine:
    """Tell a new machine all that a record says, from its beginning.

    Args:
        beginning: how the machine was made.
        entries: all of them. The answers to the last input may be missing.

    Returns:
        The first difference, or, if there is none, the machine.
    """
    threads = RecordedThreads()
    reliable = Reliable(machine_of(beginning, threads), beginning.job)
    player = _Player(reliable)
    steps = list(_steps(entries))
    for number, (told, said, recorded) in enumerate(steps):
        threads.will_say(said)
        replayed = list(map(player.answer, player.tell(told)))
        if isinstance(told, Ticked):
            # Links that are due at the same time have no order.
            recorded, replayed = sorted(recorded, key=str), sorted(replayed, key=str)
        if number == len(steps) - 1 and len(recorded) < len(replayed):
            break
        for one, other in zip_longest(recorded, replayed):
            if not _equal(one, other):
                return Difference(number, told, one, other)
    return reliable.machine


_Step = tuple[Input, list[ThreadsSaid], list[Sent | Did]]


def _steps(entries: Sequence[Entry]) -> Iterator[_Step]:
    """Each input with what followed from it."""
    step: _Step | None = None
    for entry in entries:
        if isinstance(entry, Received | Observed | Ticked | Asked):
            if step is not None:
                yield step
            step = (entry, [], [])
        elif isinstance(entry, ThreadsSaid) and step is not None:
            step[1].append(entry)
        elif isinstance(entry, Sent | Did):
            assert step is not None, "a machine answers nothing before it is told anything"
            step[2].append(entry)
    if step is not None:
        yield step


class _Player:
    """Tells a machine inputs, and remembers its works with the disk."""

    def __init__(self, reliable: Reliable) -> None:
        self._reliable = reliable
        self._works: list[object] = []

    def tell(self, told: Input) -> list[fx.Effect]:
        """What it does with an input."""
        reliable = self._reliable
        match told:
            case Received(now):
                return reliable.receive(told.packet(), now)
            case Observed(now, event, work):
                if isinstance(event, fx.Persisted):
                    event = replace(event, token=self._works[work])
                return reliable.observe(event, now)
            case Ticked(now):
                return reliable.tick(now)
        machine = reliable.machine
        assert isinstance(machine, Worker)
        requests = list(map(played, told.requests))
        submit: Callable[[], list[fx.Effect]] = lambda: machine.submit(requests, told.now)  # noqa: E731
        return reliable.perform(submit, told.now)

    def answer(self, effect: fx.Effect) -> Sent | Did:
        """An effect as a record has it."""
        if isinstance(effect, fx.Transmit):
            message = effect.packet.message
            if isinstance(message, msg.ReplicateRows) or (
                isinstance(message, msg.Fill) and msg.ROW_IDS in message.parts
            ):
                return Sent(effect.to)  # how many rows these are depends on ids of which a record has the last ones
            try:
                envelope, header, *_ = encode(effect.packet)
            except ValueError:  # ids among zeros do not ascend
                return Sent(effect.to)
            return Sent(effect.to, bytes(envelope), bytes(header))
        if isinstance(effect, fx.Persist):
            self._works.append(effect.token)
        return Did(words_of(effect, len(self._works) - 1))


def _equal(recorded: Sent | Did | None, replayed: Sent | Did | None) -> bool:
    if isinstance(recorded, Sent) and isinstance(replayed, Sent) and not (recorded.header and replayed.header):
        return recorded.to == replayed.to
    return recorded == replayed
