"""What is left for a node's thread, and when that thread looks."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import NEVER, PeerConnected
from kvdist.core.worker.requests import Register
from kvdist.runtime.node import Errand, Mailbox


@dataclass
class Box:
    """A mailbox at a time that stands still, and how often it has woken its reader."""

    now: float = 100.0
    woken: int = 0
    mailbox: Mailbox = field(init=False)

    def __post_init__(self) -> None:
        self.mailbox = Mailbox(self.wake, lambda: self.now)

    def wake(self) -> None:
        self.woken += 1


@dataclass
class Until:
    """A request that grows until a time."""

    time: float

    def due(self, now: float) -> float:
        return self.time


def errand(growing: Until | None = None) -> Errand:
    future: Future[Any] = Future()
    return Errand(Register, future, None, growing)


def test_what_is_urgent_is_taken_at_once_and_wakes_once() -> None:
    box = Box()
    items = [errand(), PeerConnected(SCHEDULER_MEMBER), errand()]
    for item in items:
        assert box.mailbox.put(item)
    assert box.woken == 1
    assert box.mailbox.due < box.now
    assert box.mailbox.pop_due(box.now) == items
    assert box.mailbox.pop_due(box.now) == [] and box.mailbox.due == NEVER


def test_what_grows_is_looked_at_again_when_it_says_so() -> None:
    box = Box()
    growing = Until(100.01)
    item = errand(growing)
    box.mailbox.put(item)
    assert (box.mailbox.due, box.woken) == (100.01, 1)  # woken to learn when to look
    assert box.mailbox.pop_due(100.005) == []
    growing.time = 100.02
    assert box.mailbox.pop_due(100.01) == [] and box.mailbox.due == 100.02
    assert box.mailbox.pop_due(100.02) == [item]


def test_all_leave_together_when_the_last_is_due() -> None:
    box = Box()
    items = [errand(Until(100.01)), errand(Until(100.03)), errand(Until(100.02))]
    for item in items:
        box.mailbox.put(item)
    assert box.mailbox.pop_due(100.02) == []
    assert box.mailbox.pop_due(100.03) == items


def test_nothing_waits_for_ever_however_much_comes_after_it() -> None:
    box = Box()
    taken: list[Any] = []
    for number in range(1000):
        box.now = 100.0 + number / 10_000
        box.mailbox.put(errand(Until(box.now + 0.01)))
        taken += box.mailbox.pop_due(box.now)
    assert len(taken) > 400


def test_something_urgent_takes_what_grows_with_it_in_order() -> None:
    box = Box()
    items = [errand(Until(200.0)), errand()]
    for item in items:
        box.mailbox.put(item)
    assert box.woken == 2
    assert box.mailbox.pop_due(box.now) == items


def test_who_waits_can_hurry_what_grows_but_not_what_is_not_there() -> None:
    box = Box()
    box.mailbox.hurry()
    assert (box.mailbox.due, box.woken) == (NEVER, 0)
    item = errand(Until(200.0))
    box.mailbox.put(item)
    box.mailbox.hurry()
    box.mailbox.hurry()
    assert box.woken == 2
    box.mailbox.put(errand(Until(300.0)))
    assert box.mailbox.pop_due(box.now)[0] is item


def test_a_closed_mailbox_takes_nothing_and_gives_what_is_left() -> None:
    box = Box()
    item = errand(Until(200.0))
    box.mailbox.put(item)
    assert box.mailbox.close() == [item]
    assert not box.mailbox.put(errand())
    assert box.mailbox.due == NEVER
