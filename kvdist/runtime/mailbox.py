"""What other threads leave for the thread of a node, and when that has to look.

Most of it is urgent. What is not may wait a little for more of its kind, because two threads of Python
that hand work over at every call spend their time waiting for each other.
"""

from __future__ import annotations

import abc
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from kvdist.core.machine import NEVER, Event
from kvdist.core.worker.requests import Request

URGENT = -NEVER
WAIT_MAX_S = 0.05
"""The longest that anything waits here, however much comes after it."""

Finish = Callable[[], Any]
"""Called on the node's thread when a request is fulfilled, before its future resolves; gives the future's result."""


class Answer(Protocol):
    """Takes the outcome of a request; a `concurrent.futures.Future` is one."""

    def set_result(self, result: Any) -> None:
        """The request is fulfilled."""

    def set_exception(self, exception: BaseException) -> None:
        """It is not, and why."""


class AnswerByKey(abc.ABC):
    """Takes the outcome of a request that is answered key by key."""

    @abc.abstractmethod
    def set_keys(self, keys: Sequence[int], error: Exception | None) -> None:
        """The keys with these indices have arrived, or failed."""

    @abc.abstractmethod
    def set_result(self, result: Any) -> None:
        """All keys have been answered."""

    @abc.abstractmethod
    def set_exception(self, exception: BaseException) -> None:
        """Those keys that have not been answered will not be, and why."""


class Growing(Protocol):
    """A request that may take in more until it is made."""

    def due(self, now: float) -> float:
        """When it should be made at the latest, as far as is known now. Asked again then."""


@dataclass(slots=True)
class Errand:
    """A request that is still to be made: `make` gets its number, on the node's thread."""

    make: Callable[[int], Request]
    answer: Answer | AnswerByKey
    finish: Finish | None
    growing: Growing | None = None
    """It is not urgent: it waits for as long as this says, or until anything urgent comes."""
    since_ns: int = 0
    """When the user's call began that it is for, if anybody wants to know; see `NodeTrace`."""


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
        self._since = NEVER
        """When the first of what lies here came."""

    @property
    def due(self) -> float:
        """When the node's thread should look; `NEVER` when there is nothing."""
        return self._due

    def put(self, item: Errand | Event) -> bool:
        """Leave something; False if the mailbox is closed."""
        growing = item.growing if isinstance(item, Errand) else None
        with self._lock:
            if self._closed:
                return False
            self._items.append(item)
            if growing is None:
                self._look_by(URGENT)
            else:
                now = self._clock()
                self._since = min(self._since, now)
                self._look_by(growing.due(now))
            return True

    def hurry(self) -> None:
        """What was left here is urgent now."""
        with self._lock:
            if self._items:
                self._look_by(URGENT)

    def take(self, now: float) -> list[Errand | Event]:
        """All of it, if it is due."""
        if now < self._due:
            return []
        with self._lock:
            if self._due != URGENT and self._items:
                # In order, so what still grows keeps back what stands before it. Only the last ones of a store grow.
                last = [item for item in self._items[-2:] if isinstance(item, Errand) and item.growing]
                due = max([item.growing.due(now) for item in last if item.growing], default=URGENT)
                due = min(due, self._since + WAIT_MAX_S)
                if now < due:
                    self._due = due
                    return []
            items, self._items, self._due, self._since = self._items, [], NEVER, NEVER
            return items

    def _look_by(self, due: float) -> None:
        """Have the node's thread look no later than this; under the lock."""
        wakes = self._due == NEVER or (due == URGENT and self._due != URGENT)
        self._due = min(self._due, due)
        if wakes:
            self._wake()

    def close(self) -> list[Errand | Event]:
        """Take no more; what is left."""
        with self._lock:
            self._closed = True
            items, self._items, self._due, self._since = self._items, [], NEVER, NEVER
            return items
