"""Which of many links is due next: exact, and without looking at all of them at each message.

A server has a link to each of a thousand workers, turns for every message, and asks each time how long it may wait. The
links stand in a heap by when they were due. One whose time has moved on stays where it is and is put right when it
comes to the top; one whose time has come nearer is entered again, and its former place means nothing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

from kvdist.core.machine import NEVER

SPARE_ENTRIES = 64
"""So many places that mean nothing are never worth a clearing."""


class Due(Protocol):
    """What can be due."""

    listed: float
    """The time of its place in the heap, kept by `Dues`; NEVER if it has none."""

    @property
    def due(self) -> float:
        """When something has to be done for it, or NEVER."""


Thing = TypeVar("Thing", bound=Due)


class Dues(Generic[Thing]):
    """When the first of some things is due."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Thing]] = []
        self._numbers = itertools.count()
        self._listed = 0
        """Things with a place."""

    @property
    def first(self) -> float:
        """When the first of all is due, or NEVER."""
        while self._heap:
            listed, _, thing = self._heap[0]
            if listed == thing.listed == thing.due:
                return listed
            heapq.heappop(self._heap)
            if listed == thing.listed:
                self._forget(thing)
                self.enter(thing)
        return NEVER

    def enter(self, thing: Thing) -> None:
        """Something may be due earlier than it was. What is due later, or never any more, need not be told."""
        due = thing.due
        if due >= thing.listed:
            return
        self._listed += thing.listed == NEVER
        thing.listed = due
        heapq.heappush(self._heap, (due, next(self._numbers), thing))
        if len(self._heap) > 4 * self._listed + SPARE_ENTRIES:
            self._heap = [entry for entry in self._heap if entry[0] == entry[2].listed]
            heapq.heapify(self._heap)

    def take(self, now: float) -> Iterator[Thing]:
        """Those that are due, the first one first. Whoever takes one does what it is due for."""
        while self.first <= now:
            thing = heapq.heappop(self._heap)[2]
            self._forget(thing)
            yield thing
            self.enter(thing)

    def _forget(self, thing: Thing) -> None:
        thing.listed = NEVER
        self._listed -= 1
