"""The requests of a worker's user that are not fulfilled yet, in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvdist.core.machine import NEVER, CompleteRequest, Effect, FailRequest


@dataclass(slots=True, eq=False)
class Pending:
    """A request that is not fulfilled yet."""

    request: int
    label: str
    since: float
    error: Exception | None = None
    due: float = field(default=NEVER)
    """When it fails for lateness."""
    asked: bool = False
    """It is late, and the scheduler was asked who is missing."""
    in_background: bool = False
    """Its user goes on meanwhile, so that what else waits is of more interest."""


class PendingRequests:
    """All of them."""

    def __init__(self) -> None:
        self._all: dict[int, Pending] = {}
        """In the order of the calls, so the first one is the oldest."""
        self._timed: dict[int, Pending] = {}
        """Those with a deadline."""

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, request: int) -> Pending:
        return self._all[request]

    def get(self, request: int) -> Pending | None:
        """The request of this number, if it waits."""
        return self._all.get(request)

    def __iter__(self) -> Iterator[Pending]:
        return iter(self._all.values())

    @property
    def newest(self) -> Pending:
        """The last call of those that wait; there must be one."""
        return next(reversed(self._all.values()))

    @property
    def oldest(self) -> Pending | None:
        """The one that has waited longest; of those in the background if there is no other."""
        found = None
        for pending in self._all.values():
            if not pending.in_background:
                return pending
            found = found or pending
        return found

    @property
    def timed(self) -> list[Pending]:
        """Those with a deadline."""
        return list(self._timed.values())

    @property
    def deadline(self) -> float:
        """When the first of them is late."""
        return min((pending.due for pending in self._timed.values()), default=NEVER)

    def open(self, request: int, label: str, now: float, due: float = NEVER) -> Pending:
        """Note a request; with `due` it is late then."""
        pending = self._all[request] = Pending(request, label, now, due=due)
        if due < NEVER:
            self._timed[request] = pending
        return pending

    def close(self, pending: Pending, result: object = None) -> Effect:
        """It has its answer, or its error."""
        self._all.pop(pending.request, None)
        self._timed.pop(pending.request, None)
        if pending.error is not None:
            return FailRequest(pending.request, pending.error)
        return CompleteRequest(pending.request, result)

    def fail_all(self, error: Exception) -> list[Effect]:
        """None of them will be answered any more."""
        effects: list[Effect] = [FailRequest(request, error) for request in self._all]
        self._all.clear()
        self._timed.clear()
        return effects
