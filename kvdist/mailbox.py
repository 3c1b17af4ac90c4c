"""What other threads leave for the thread of a node, and when that has to look.

Most of it is urgent: somebody waits. What is not may wait a little for more of its kind, because two threads of Python
that hand work over at every call spend their time waiting for each other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from kvdist.core.effects import NEVER, Event
from kvdist.core.requests import Request

QUIET_S, GATHER_S = 0.0005, 0.01
"""What is not urgent waits until nothing has been added to it for the one time, and no longer than the other."""

Finish = Callable[[], Any]
"""Called on the node's thread when a request is fulfilled, before its future resolves; gives the future's result."""


class Answer(Protocol):
    """Takes the outcome of a request; a `concurrent.futures.Future` is one."""

    def set_result(self, result: Any) -> None:
        """The request is fulfilled."""

    def set_exception(self, exception: BaseException) -> None:
        """It is not, and why."""


@dataclass(slots=True)
class Errand:
    """A request that is still to be made: `make` gets its number, on the node's thread."""

    make: Callable[[int], Request]
    answer: Answer
    finish: Finish | None


class Mailbox:
    """In order, and safe from any thread.

    Args:
        wake: makes the node's thread look.
        clock: monotonic seconds.
    """

    def __init__(self, wake: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._wake = wake
        self._clock = clock
        self._items: list[Errand | Event] = []
        # Reentrant, because a signal handler of the user may call us while the thread it interrupted holds it.
        self._lock = threading.RLock()
        self._closed = False
        self._due = NEVER
        self._latest = NEVER
        """When it is due at the latest."""

    @property
    def due(self) -> float:
        """When the node's thread should look; `NEVER` when there is nothing."""
        return self._due

    def put(self, item: Errand | Event, urgent: bool = True) -> bool:
        """Leave something; False when nobody will look any more."""
        with self._lock:
            if self._closed:
                return False
            self._items.append(item)
            wakes = self._due == NEVER or (urgent and self._due > 0)
            if urgent:
                self._due = -NEVER
            elif self._due > 0:
                now = self._clock()
                self._latest = min(self._latest, now + GATHER_S)
                self._due = min(self._latest, now + QUIET_S)
            if wakes:
                self._wake()
            return True

    def touch(self) -> None:
        """Something was added to what waits."""
        with self._lock:
            if self._due > 0:
                self._due = min(self._latest, self._clock() + QUIET_S)

    def take(self, now: float) -> list[Errand | Event]:
        """All of it, if it is due."""
        if now < self._due:
            return []
        with self._lock:
            items, self._items, self._due, self._latest = self._items, [], NEVER, NEVER
            return items

    def close(self) -> list[Errand | Event]:
        """Take no more; what is left."""
        with self._lock:
            self._closed = True
            items, self._items, self._due, self._latest = self._items, [], NEVER, NEVER
            return items
