"""What a worker has to send to one server: in order of priority, joined, and never more at once than the window.

Rules that hold here:

* Higher priority first, then first come, first served. Order never decides correctness: a pull says which pushes it
  must see, and a slice has at most one push under way.
* Small runs of one kind leave in one message, up to `join_bytes_max`, so that a thousand small pushes are a handful
  of messages.
* Bytes that the server has not acknowledged never exceed the window, unless a single message does.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from kvdist.core.requests import ALONE_BYTES_MIN, Kind, RunData
from kvdist.protocol.messages import U8, U32, Arrays, InitValues, Payload, Pull, Push, ReplaceValues

Column = TypeVar("Column", U8, U32)
"""One number per slice."""

DataMessage = Push | Pull | InitValues | ReplaceValues

RUNS_PER_MESSAGE_MAX = 4096
SETTINGS_PER_MESSAGE_MAX = 256
"""`Push.setting_of` is one byte per slice."""


@dataclass(slots=True, eq=False)
class Run:
    """A run on its way: what it carries, and what of it is still unanswered."""

    number: int
    request: int
    kind: Kind
    data: RunData
    steps: U32
    versions: U32
    left: int
    """Slices without an answer."""
    blockers: int = 0
    """Slices whose previous push is not counted yet."""
    priority: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of payload that it sends."""
        return 0 if self.data.payload is None else len(self.data.payload)


@dataclass(frozen=True, slots=True)
class Credit:
    """The token of a message: its bytes are back in the window once it is acknowledged."""

    server: int
    nbytes: int


@dataclass(slots=True)
class Outbox:
    """The queue towards one server."""

    server: int
    window_bytes: int
    join_bytes_max: int
    flying_bytes: int = 0
    _heaps: dict[Kind, list[tuple[int, int, Run]]] = field(default_factory=dict)
    _arrivals: int = 0

    def add(self, run: Run) -> None:
        """Queue a run that may leave as far as its slices are concerned."""
        self._arrivals += 1
        heapq.heappush(self._heaps.setdefault(run.kind, []), (-run.priority, self._arrivals, run))

    def take(self) -> tuple[DataMessage, Credit] | None:
        """The next message that may leave now, and the credit it uses."""
        heaps = [heap for heap in self._heaps.values() if heap]
        if not heaps or self.flying_bytes >= self.window_bytes:
            return None
        heap = min(heaps, key=lambda heap: heap[0][:2])
        if self.flying_bytes and self.flying_bytes + heap[0][2].nbytes > self.window_bytes:
            return None
        runs = self._joinable(heap)
        message = _message(runs)
        nbytes = sum(run.nbytes for run in runs)
        self.flying_bytes += nbytes
        return message, Credit(self.server, nbytes)

    def release(self, credit: Credit) -> None:
        """The server has received these bytes."""
        self.flying_bytes -= credit.nbytes
        assert self.flying_bytes >= 0, "credits are released once"

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to leave."""
        return not any(self._heaps.values())

    def _joinable(self, heap: list[tuple[int, int, Run]]) -> list[Run]:
        first = heapq.heappop(heap)[2]
        runs = [first]
        total = first.nbytes
        settings = len(first.data.settings)
        room = min(self.join_bytes_max, self.window_bytes - self.flying_bytes)
        while heap and first.nbytes < ALONE_BYTES_MIN and len(runs) < RUNS_PER_MESSAGE_MAX:
            run = heap[0][2]
            settings += len(run.data.settings)
            if run.nbytes >= ALONE_BYTES_MIN or total + run.nbytes > room:
                break
            if settings > SETTINGS_PER_MESSAGE_MAX:
                break
            runs.append(heapq.heappop(heap)[2])
            total += run.nbytes
        return runs


def _message(runs: Sequence[Run]) -> DataMessage:
    plans = [run.data.plan for run in runs]
    numbers = _joined([np.full(len(run.data.plan.ids), run.number, np.uint32) for run in runs])
    ids = _joined([plan.ids for plan in plans])
    kind = runs[0].kind
    if kind is Kind.PULL:
        return Pull(numbers, ids, _joined([run.steps for run in runs]), _joined([run.versions for run in runs]))
    counts = _joined([_counts(run) for run in runs])
    arrays = Arrays(_joined([plan.dtypes for plan in plans]), counts, _payload(runs))
    if kind is Kind.INITIALISE:
        return InitValues(numbers, ids, arrays)
    if kind is Kind.REPLACE:
        return ReplaceValues(numbers, ids, arrays)
    settings, setting_of = _settings(runs)
    return Push(
        pull=kind is Kind.PUSHPULL,
        runs=numbers,
        ids=ids,
        steps=_joined([run.steps for run in runs]),
        versions=_joined([run.versions for run in runs]),
        samples=np.zeros(len(ids), np.uint32),
        flags=_joined([_flags(run) for run in runs]),
        settings=settings,
        setting_of=setting_of,
        arrays=arrays,
    )


def _joined(arrays: list[Column]) -> Column:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _payload(runs: Sequence[Run]) -> Payload:
    payloads = [run.data.payload for run in runs if run.data.payload is not None]
    if not payloads:
        return b""
    # Several small runs: one more pass over bytes that are few. Runs are padded, so the parts stay aligned.
    return payloads[0] if len(payloads) == 1 else b"".join(payloads)


def _counts(run: Run) -> U32:
    flags = run.data.flags
    counts = run.data.plan.counts
    return counts if flags is None else np.where(flags & 1, np.uint32(0), counts)


def _flags(run: Run) -> U8:
    return run.data.flags if run.data.flags is not None else np.zeros(len(run.data.plan.ids), np.uint8)


def _settings(runs: Sequence[Run]) -> tuple[tuple[tuple[float, float, float], ...], U8]:
    """One table for all runs: each run's own, one behind the other."""
    settings: list[tuple[float, float, float]] = []
    parts: list[U8] = []
    for run in runs:
        base = len(settings)
        own = run.data.setting_of
        own = np.zeros(len(run.data.plan.ids), np.uint8) if own is None else own
        same = runs[0].data.settings == run.data.settings
        parts.append(own if same else (own + np.uint8(base)).astype(np.uint8))
        if not same or base == 0:
            settings += run.data.settings
    return tuple(settings), _joined(parts)
