"""The outbox: what a worker sends to one server, by priority, joined, and within the window.

Rules that hold here:

* Higher priority first, then first come, first served. Order never decides correctness: a pull says which pushes it
  must see, and a slice has at most one push under way.
* Small runs of one kind leave in one message, up to `join_bytes_max`, so that a thousand small pushes are a handful
  of messages. Larger ones leave together up to `FAR_BYTES_MAX`, without being copied: where many servers cut each
  key into many slices, messages would otherwise cost more than bytes.
* Bytes that the server has not acknowledged never exceed the window, unless a single message does.
* A message that has left cannot be overtaken. So with priority slices the window of a line is small, and messages are a
  small part of it: enough to spare both sides a message for each slice. Memory that the server reads in place has the
  whole window.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeVar

import numpy as np

from kvdist.core.worker.requests import ALONE_BYTES_MIN, RunData, RunKind
from kvdist.dtypes import DType
from kvdist.nodes import Member
from kvdist.protocol.arrays import U8, U32, Arrays, Coded, Payload, coded_sizes, offsets
from kvdist.protocol.messages import (
    MORE,
    CompressedPush,
    Flag,
    InitRows,
    InitValues,
    JoinedPush,
    Pull,
    PullRows,
    PullState,
    Push,
    PushRows,
    ReplaceState,
    ReplaceValues,
)

Column = TypeVar("Column", U8, U32)
"""One number per slice."""

DataMessage = (
    Push
    | CompressedPush
    | JoinedPush
    | Pull
    | InitValues
    | ReplaceValues
    | InitRows
    | PushRows
    | PullRows
    | PullState
    | ReplaceState
)

PARTS_PER_MESSAGE_MAX = 4096
_EMPTY = int(Flag.EMPTY)
NEAR_BYTES_MAX = 16 << 20
"""Large parts that stay on this host travel together up to this size, whether the server reads them where they lie or a
socket takes them there at the speed of memory: enough to make messages rare, little enough for the server to begin
while the next ones are made."""
FAR_BYTES_MAX = 1 << 20
"""Large parts that cross a network travel together only up to this size, because the server cannot sum what has not
arrived: a message of 16 MiB is a seventh of a second of a line of 1 Gbit/s."""
DECODED_BYTES_MAX = 4 << 20
"""Encoded parts travel together only up to this size of their elements: a server decodes a message as a whole, and the
values that answer it go back together."""
PRIORITY_MESSAGES_PER_WINDOW = 4
"""Into how many messages the window of priority slices goes, so that the line is busy while one is acknowledged."""
FRAMES_MAX = 64
"""Payload frames of a message."""
SETTINGS_PER_MESSAGE_MAX = 256
"""`Push.setting_of` is one byte per slice."""


@dataclass(slots=True, eq=False)
class Run:
    """A run on its way: what it carries, and how many of its slices have no reply."""

    number: int
    request: int
    kind: RunKind
    data: RunData
    steps: U32
    versions: U32
    left: int
    """Slices without an answer."""
    priority: int = 0
    key_by_key: bool = False

    @property
    def batch_key(self) -> tuple[RunKind, int, float]:
        """Equal for runs that may travel in one message: what they do, and their encoding."""
        encoded = self.data.encoded
        return (self.kind, 0, 0.0) if encoded is None else (self.kind, encoded.encoding, encoded.parameter)


class RunPart:
    """Those slices of a run that may leave: nearly always all of them.

    Args:
        run: the run.
        positions: which of its slices, in ascending order; None for all.
    """

    __slots__ = ("_positions", "nbytes", "run")

    def __init__(self, run: Run, positions: Sequence[int] | None = None) -> None:
        self.run = run
        whole = positions is None or len(positions) == len(run.data.plan.ids)
        self._positions = None if whole else np.array(positions, np.intp)
        payload = run.data.payload
        self.nbytes = 0 if payload is None else len(payload) if whole else sum(map(len, self._pieces()))

    @property
    def ids(self) -> U32:
        """(n,) the slices."""
        return self._of(self.run.data.plan.ids)

    @property
    def steps(self) -> U32:
        """(n,) the worker's push counters."""
        return self._of(self.run.steps)

    @property
    def versions(self) -> U32:
        """(n,) the versions that were seen."""
        return self._of(self.run.versions)

    @property
    def dtypes(self) -> U8:
        """(n,) codes of element types."""
        return self._of(self.run.data.plan.dtypes)

    @property
    def counts(self) -> U32:
        """(n,) elements in the payload; 0 for an empty contribution."""
        return self._of(self._run_counts())

    @property
    def flags(self) -> U8:
        """(n,) flags."""
        flags = self.run.data.flags
        return self._of(np.zeros(len(self.run.data.plan.ids), np.uint8) if flags is None else flags)

    @property
    def setting_of(self) -> U8:
        """(n,) indices into the run's own settings."""
        own = self.run.data.setting_of
        return self._of(np.zeros(len(self.run.data.plan.ids), np.uint8) if own is None else own)

    @property
    def parts(self) -> U8:
        """(n,) which parts of an optimizer's state."""
        assert self.run.data.parts is not None
        return self._of(self.run.data.parts)

    @property
    def entries(self) -> U32:
        """(n,) entries in the encoded payload."""
        assert self.run.data.encoded is not None
        return self._of(self.run.data.encoded.entries)

    @property
    def decoded_nbytes(self) -> int:
        """Bytes of an encoded payload once it is decoded, at most; 0 for a plain one."""
        return 0 if self.run.data.encoded is None else self.run.data.plan.nbytes

    def payload(self) -> Payload:
        """The bytes: the memory of the run, or copies of the pieces of a part."""
        if self.run.data.payload is None:
            return b""
        return self.run.data.payload if self._positions is None else b"".join(self._pieces())

    def _of(self, column: Column) -> Column:
        return column if self._positions is None else column[self._positions]

    def _run_counts(self) -> U32:
        flags, counts = self.run.data.flags, self.run.data.plan.counts
        return counts if flags is None else np.where(flags & _EMPTY, np.uint32(0), counts)

    def _pieces(self) -> list[memoryview]:
        assert self.run.data.payload is not None and self._positions is not None
        encoded = self.run.data.encoded
        if encoded is None:
            starts, total = offsets(self.run.data.plan.dtypes, self._run_counts())
        else:
            sizes = coded_sizes(encoded.encoding, encoded.entries)
            starts, total = offsets(np.full(len(sizes), DType.UINT8, np.uint8), sizes.astype(np.uint32))
        bounds = [*starts.tolist(), total]
        return [self.run.data.payload[bounds[i] : bounds[i + 1]] for i in self._positions.tolist()]


class RowPart:
    """Some rows of a run of one slice, as much as one message may carry.

    Args:
        run: the run.
        index: which of its chunks.
    """

    __slots__ = ("_chunk", "_is_last", "nbytes", "run")

    def __init__(self, run: Run, index: int) -> None:
        self.run = run
        self._chunk = run.data.chunks[index]
        self._is_last = index == len(run.data.chunks) - 1
        self.nbytes = len(self._chunk.payload)

    @property
    def ids(self) -> U32:
        """(1,) the slice."""
        return self.run.data.plan.ids

    @property
    def steps(self) -> U32:
        """(1,) the worker's push counter."""
        return self.run.steps

    @property
    def versions(self) -> U32:
        """(1,) the version that was seen."""
        return self.run.versions

    @property
    def dtypes(self) -> U8:
        """(2,) of ids and values; (1,) of ids, for a pull."""
        return np.array([DType.INT64, *self.run.data.plan.dtypes][: self._width], np.uint8)

    @property
    def counts(self) -> U32:
        """(2,) or (1,) elements of each."""
        rows = self._chunk.rows
        return np.array([rows, rows * self.run.data.row_length][: self._width], np.uint32)

    @property
    def flags(self) -> U8:
        """(1,) flags."""
        flags = self.run.data.flags
        more = np.uint8(0 if self._is_last else MORE)
        return np.array([more], np.uint8) if flags is None else flags | more

    @property
    def decoded_nbytes(self) -> int:
        """Rows are not encoded."""
        return self.nbytes

    @property
    def setting_of(self) -> U8:
        """(1,) index into the run's own settings."""
        return np.zeros(1, np.uint8)

    def payload(self) -> Payload:
        """The bytes of the chunk."""
        return self._chunk.payload

    @property
    def _width(self) -> int:
        return 1 if self.run.kind is RunKind.PULL_ROWS else 2


AnyPart = RunPart | RowPart


@dataclass(frozen=True, slots=True, eq=False)
class Ready:
    """A complete message: the joined push of a host."""

    server: int
    priority: int
    message: JoinedPush
    nbytes: int
    members: tuple[Member, ...]
    """The workers whose contributions it has."""


@dataclass(frozen=True, slots=True)
class Credit:
    """The token of a message: its bytes are back in the window once it is acknowledged."""

    server: int
    nbytes: int
    members: tuple[Member, ...] = ()
    """Of a joined push: the workers whose contributions it has."""


@dataclass(slots=True)
class Outbox:
    """The queue towards one server."""

    server: int
    window_bytes: int
    join_bytes_max: int
    is_near: bool = False
    """Whether the server is on this host."""
    far_window_bytes: int = 0
    """The window for what crosses a network."""
    far_bytes_max: int = 0
    """Up to how many bytes large parts join there; 0 is `FAR_BYTES_MAX`."""
    flying_bytes: int = 0
    _heaps: dict[tuple[RunKind, int, float], list[tuple[int, int, AnyPart]]] = field(default_factory=dict)
    """By `Run.batch_key`."""
    _ready: list[tuple[int, int, Ready]] = field(default_factory=list)
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self.far_window_bytes = self.far_window_bytes or self.window_bytes

    def keep_little_flying(self, window_bytes: int) -> None:
        """Shrink the window of a line, so that urgent slices wait for few bytes; messages are a quarter of it."""
        self.far_window_bytes = min(self.window_bytes, window_bytes)
        self.far_bytes_max = self.far_window_bytes // PRIORITY_MESSAGES_PER_WINDOW
        self.join_bytes_max = min(self.join_bytes_max, self.far_bytes_max)

    def add(self, part: AnyPart) -> None:
        """Queue slices that may leave."""
        self._arrivals += 1
        heap = self._heaps.setdefault(part.run.batch_key, [])
        heapq.heappush(heap, (-part.run.priority, self._arrivals, part))

    def add_ready(self, ready: Ready) -> None:
        """Queue a complete message."""
        self._arrivals += 1
        heapq.heappush(self._ready, (-ready.priority, self._arrivals, ready))

    def take(self) -> tuple[DataMessage, Credit] | None:
        """The next message that may leave, and the credit that it uses."""
        heaps = [heap for heap in self._heaps.values() if heap]
        heap = min(heaps, key=lambda heap: heap[0][:2], default=None)
        if self._ready and (heap is None or self._ready[0][:2] < heap[0][:2]):
            return self._take_ready()
        if heap is None:
            return None
        window_bytes = self._window(heap[0][2])
        if self.flying_bytes >= window_bytes:
            return None
        if self.flying_bytes and self.flying_bytes + heap[0][2].nbytes > window_bytes:
            return None
        parts = self._joinable(heap, window_bytes - self.flying_bytes)
        message = _message(parts)
        nbytes = sum(part.nbytes for part in parts)
        self.flying_bytes += nbytes
        return message, Credit(self.server, nbytes)

    def _take_ready(self) -> tuple[DataMessage, Credit] | None:
        ready = self._ready[0][2]
        if self.flying_bytes and self.flying_bytes + ready.nbytes > self.far_window_bytes:
            return None
        heapq.heappop(self._ready)
        self.flying_bytes += ready.nbytes
        return ready.message, Credit(self.server, ready.nbytes, ready.members)

    def _window(self, part: AnyPart) -> int:
        return self.window_bytes if self.is_near or part.run.data.stays else self.far_window_bytes

    def release(self, credit: Credit) -> None:
        """Return the credit of a message that the server has received."""
        self.flying_bytes -= credit.nbytes
        assert self.flying_bytes >= 0, "credits are released once"

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to leave."""
        return not self._ready and not any(self._heaps.values())

    def forget(self) -> None:
        """Drop what waits to leave."""
        self._heaps.clear()

    def _joinable(self, heap: list[tuple[int, int, AnyPart]], window_left: int) -> list[AnyPart]:
        first = heapq.heappop(heap)[2]
        parts = [first]
        stays, large = first.run.data.stays, first.nbytes >= ALONE_BYTES_MIN
        near = stays or self.is_near
        total, frames, decoded = first.nbytes, 1, first.decoded_nbytes
        far_max = (self.far_bytes_max or FAR_BYTES_MAX) if large else self.join_bytes_max
        together_max = NEAR_BYTES_MAX if near else far_max
        room = min(together_max, window_left)
        settings = len(first.run.data.settings)
        while heap and len(parts) < PARTS_PER_MESSAGE_MAX:
            part = heap[0][2]
            settings += len(part.run.data.settings)
            frames += part.nbytes >= ALONE_BYTES_MIN
            decoded += part.decoded_nbytes
            if part.run.data.stays is not stays or ((part.nbytes >= ALONE_BYTES_MIN) is not large and not near):
                break
            if total + part.nbytes > room or settings > SETTINGS_PER_MESSAGE_MAX or 2 * frames > FRAMES_MAX:
                break
            if decoded > DECODED_BYTES_MAX:
                break
            parts.append(heapq.heappop(heap)[2])
            total += part.nbytes
        return parts


def _message(parts: Sequence[AnyPart]) -> DataMessage:
    ids = [part.ids for part in parts]
    numbers = _per_slice([part.run.number for part in parts], ids)
    steps, versions = _joined([part.steps for part in parts]), _joined([part.versions for part in parts])
    kind = parts[0].run.kind
    if kind is RunKind.PULL:
        return Pull(numbers, _joined(ids), steps, versions)
    if kind is RunKind.PULL_STATE:
        return PullState(numbers, _joined(ids), steps, _state_parts(parts))
    counts, payload = _joined([part.counts for part in parts]), _payload(parts)
    if kind.pushes:
        settings, setting_of = _settings(parts)
        samples = _per_slice([part.run.data.samples for part in parts], ids)
        flags = _joined([part.flags for part in parts])
        columns = (numbers, _joined(ids), steps, versions, samples, flags, settings, setting_of)
        encoded = parts[0].run.data.encoded
        if encoded is not None:
            entries = _joined([part.entries for part in parts if isinstance(part, RunPart)])
            coded = Coded(counts, entries, encoded.encoding, encoded.parameter, payload)
            return CompressedPush(kind is RunKind.PUSHPULL, *columns, coded)
        dtypes = _joined([part.dtypes for part in parts])
        arrays = Arrays(dtypes, counts, payload)
        return (
            PushRows(*columns, arrays)
            if kind is RunKind.PUSH_ROWS
            else Push(kind is RunKind.PUSHPULL, *columns, arrays)
        )
    arrays = Arrays(_joined([part.dtypes for part in parts]), counts, payload)
    if kind is RunKind.INITIALISE:
        return InitValues(numbers, _joined(ids), arrays)
    if kind is RunKind.REPLACE:
        return ReplaceValues(numbers, _joined(ids), arrays)
    if kind is RunKind.REPLACE_STATE:
        return ReplaceState(numbers, _joined(ids), _state_parts(parts), arrays)
    if kind is RunKind.PULL_ROWS:
        return PullRows(numbers, _joined(ids), steps, versions, arrays)
    return InitRows(numbers, _joined(ids), _joined([part.flags for part in parts]), arrays)


def _state_parts(parts: Sequence[AnyPart]) -> U8:
    return _joined([part.parts for part in parts if isinstance(part, RunPart)])


def _per_slice(numbers: Sequence[int], ids: Sequence[U32]) -> U32:
    """One number of each part, repeated for each of its slices."""
    return _joined([np.full(len(own), number, np.uint32) for number, own in zip(numbers, ids, strict=True)])


def _joined(arrays: list[Column]) -> Column:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _payload(parts: Sequence[AnyPart]) -> Payload | tuple[Payload, ...]:
    """The bytes of all parts: a frame for each large one, and one for small ones that are neighbours."""
    if len(parts) == 1:
        return parts[0].payload()
    frames: list[Payload] = []
    for is_small, group in groupby(parts, lambda part: part.nbytes < ALONE_BYTES_MIN):
        payloads = [part.payload() for part in group]
        # Small parts: one more pass over bytes that are few. Arrays are padded, so they stay aligned.
        frames += [joined] if is_small and (joined := b"".join(payloads)) else [] if is_small else payloads
    return tuple(frames) if len(frames) > 1 else frames[0] if frames else b""


def _settings(parts: Sequence[AnyPart]) -> tuple[tuple[tuple[float, float, float], ...], U8]:
    """One table for all parts: each run's own, one behind the other, but the first one's only once."""
    first = parts[0].run.data.settings
    settings = list(first)
    columns: list[U8] = []
    for part in parts:
        own = part.run.data.settings
        if own == first:
            columns.append(part.setting_of)
        else:
            columns.append((part.setting_of + np.uint8(len(settings))).astype(np.uint8))
            settings += own
    return tuple(settings), _joined(columns)
