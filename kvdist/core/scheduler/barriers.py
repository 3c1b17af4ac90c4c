"""Barriers: sets of workers that have arrived, per store and count. Arriving twice is arriving once.

Whoever arrives makes a statement, which may be empty. Those of a barrier must be equal, or it fails for all: so workers
find out that they are about to train different models before the first gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, field

from kvdist.core.machine import Effect, Send
from kvdist.nodes import Member
from kvdist.protocol.messages import Barrier, Done, ErrorCode, Failed, Waiting


@dataclass(slots=True)
class _Open:
    """Who has arrived, with which request and statement, and since when the first one waits."""

    since: float
    arrived: dict[int, tuple[Member, int, str]] = field(default_factory=dict)


class Barriers:
    """All barriers of a cluster."""

    def __init__(self) -> None:
        self._open: dict[tuple[int, int], _Open] = {}
        self._passed: dict[int, int] = {}
        """Store → how many of its barriers everybody has passed."""

    def enter(self, sender: Member, message: Barrier, live: Set[int], now: float) -> list[Effect]:
        """A worker arrives, or asks again and is told who is missing."""
        if message.counter < self._passed.get(message.store, 0):
            return [Send(sender, Done(message.request))]
        barrier = self._open.setdefault((message.store, message.counter), _Open(now))
        asked_before = sender.node.rank in barrier.arrived
        # The newest request is the one that waits: an earlier one may have run out of its time.
        barrier.arrived[sender.node.rank] = (sender, message.request, message.statement)
        return [Send(sender, _hint(message.counter, barrier, live, now))] if asked_before else self.release(live)

    def release(self, live: Set[int]) -> list[Effect]:
        """Let everybody go on where all live workers have arrived."""
        effects: list[Effect] = []
        for (store, counter), barrier in list(self._open.items()):
            if live <= barrier.arrived.keys():
                del self._open[store, counter]
                self._passed[store] = counter + 1
                effects += _answers(barrier)
        return effects

    def hints(self, live: Set[int], now: float) -> Iterator[Effect]:
        """Tell everybody who waits for whom."""
        for (_, counter), barrier in self._open.items():
            hint = _hint(counter, barrier, live, now)
            yield from (Send(member, hint) for member, _, _ in barrier.arrived.values())

    def waits(self, live: Set[int]) -> Iterator[tuple[int, int, Set[int]]]:
        """(rank, request, who has to arrive) of all who wait."""
        for barrier in self._open.values():
            missing = live - barrier.arrived.keys()
            yield from ((rank, request, missing) for rank, (_, request, _) in barrier.arrived.items())

    def oldest_wait(self, live: Set[int]) -> tuple[int, float, tuple[int, ...]] | None:
        """The count of the barrier that waits longest, since when, and for whom."""
        if not self._open:
            return None
        (_, counter), barrier = min(self._open.items(), key=lambda item: item[1].since)
        return counter, barrier.since, tuple(sorted(live - barrier.arrived.keys()))

    def validate(self, live: Set[int]) -> None:
        """Check every invariant."""
        for barrier in self._open.values():
            assert not live or not live <= barrier.arrived.keys(), "a full barrier is released at once"


def _answers(barrier: _Open) -> list[Effect]:
    statements = {statement for _, _, statement in barrier.arrived.values()}
    if len(statements) == 1:
        return [Send(member, Done(request)) for member, request, _ in barrier.arrived.values()]
    said = [f"{member} says: {text or 'nothing'}" for _, (member, _, text) in sorted(barrier.arrived.items())]
    reason = f"the workers do not agree. {'; '.join(said)}. Every worker must run the same program on the same model"
    code = ErrorCode.INIT_MISMATCH
    return [Send(member, Failed(request, code, reason)) for member, request, _ in barrier.arrived.values()]


def _hint(counter: int, barrier: _Open, live: Set[int], now: float) -> Waiting:
    return Waiting(f"barrier {counter}", tuple(sorted(live - barrier.arrived.keys())), now - barrier.since)
