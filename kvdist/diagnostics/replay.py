"""Replay: a new machine gets the inputs of a record, and must answer the same. Pure.

The machine computes with zeros, as a record has no values. Answers are compared by the parts that do not depend on
values: receivers, envelopes and headers of messages, their order, and all other effects.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from kvdist.core import machine as fx
from kvdist.core.reliable import Reliable
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.core.worker.host_aggregation import HostAggregation
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
    """The first difference between a record and its replay.

    Attributes:
        number: number of the input, from 0.
        told: the input.
        recorded, replayed: the first answers that differ; None if that side has no more answers.
    """

    number: int
    told: Input
    recorded: Any
    replayed: Any


class RecordedThreads:
    """The user's threads, with their answers from a record."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[Any]] = defaultdict(deque)

    def will_say(self, said: Sequence[ThreadsSaid]) -> None:
        """Replace the answers by those for the next input."""
        self._answers.clear()
        for one in said:
            self._answers[one.question].append(one.answer)

    def blocked_since(self) -> float | None:
        """See `kvdist.core.worker.pending.Threads`, for all four methods."""
        return self._next("blocked_since", None)  # type: ignore[no-any-return]

    def may_act(self, now: float) -> str:
        """Return the recorded threads that may act."""
        return self._next("may_act", "")  # type: ignore[no-any-return]

    def longest_wait_since(self) -> float | None:
        """Return the recorded start of the longest wait."""
        return self._next("longest_wait_since", None)  # type: ignore[no-any-return]

    def room_wait(self) -> str:
        """Return the recorded wait of a push for room."""
        return self._next("room_wait", "")  # type: ignore[no-any-return]

    def _next(self, question: str, otherwise: Any) -> Any:
        answers = self._answers[question]
        return answers.popleft() if answers else otherwise


def machine_of(beginning: Beginning, threads: RecordedThreads) -> fx.Machine:
    """Create a machine as the recorded machine was created."""
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
    """Replace a handler of commands: the user's handler runs only on its server."""


def replay(beginning: Beginning, entries: Sequence[Entry]) -> Difference | fx.Machine:
    """Play a whole record to a new machine.

    Args:
        beginning: how the machine was created.
        entries: all entries of the record. Answers to the last input may be missing.

    Returns:
        The first difference; the machine if nothing differs.
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
    """Yield each input with the threads' answers and the machine's answers that followed."""
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
    """Plays inputs to a machine, and remembers its works with the disk."""

    def __init__(self, reliable: Reliable) -> None:
        self._reliable = reliable
        self._works: list[object] = []

    def tell(self, told: Input) -> list[fx.Effect]:
        """Give the machine an input, and return its effects."""
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
        """Convert an effect to an entry of a record."""
        if isinstance(effect, fx.Transmit):
            message = effect.packet.message
            if (isinstance(message, msg.Replicate) and message.has_rows) or (
                isinstance(message, msg.Fill) and msg.ROW_IDS in message.parts
            ):
                return Sent(effect.to)  # the number of rows depends on ids, of which a record has only the last
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
