"""Transfers of a worker: runs in flight to the servers, the outboxes, and the replies.

A slice has at most a single push of this worker in flight; the next push waits in line until that is counted. Runs take
their places in the lines of all their slices at once, in the order of the user's calls. Each slice goes on by itself: a
free slice never waits for another of its run, or workers that group their keys differently would wait for each other. A
transfer is finished when every slice of every run has its reply: counted, valued or refused.

An outbox is the queue of messages to a server, by priority, joined, and within the window:

* Higher priority first, then first come, first served. Order never decides correctness: a pull names the pushes that
  its answer must have, and a slice has at most a single push in flight.
* Small runs of the same kind leave in the same message, up to `join_bytes_max`, so that a thousand small pushes are a
  handful of messages. Larger runs leave together up to `FAR_BYTES_MAX`, without being copied: where many servers cut
  each key into many slices, messages would otherwise cost more than bytes.
* Bytes that the server has not acknowledged never exceed the window, unless a single message does.
* A message that has left cannot be overtaken. So with priority slices the window of a line is small, and messages are a
  small part of it: enough to spare both sides a message for each slice. Memory that the server reads in place has the
      whole window.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvdist.config.settings import Limits
from kvdist.core.traffic import Traffic
from kvdist.core.worker import requests as req
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.protocol import messages as msg
from kvdist.protocol.arrays import ITEMSIZES, U8, U32, Arrays, Bits, Coded, Payload, stretches, views

PARTS_PER_MESSAGE_MAX = 4096
NEAR_BYTES_MAX = 16 << 20
"""Size up to which large parts that stay on this host travel together, whether the server reads them in place or a
socket copies them at memory speed: large enough to keep messages rare, small enough for the server to begin while the
next messages are built."""
FAR_BYTES_MAX = 1 << 20
"""Large parts that cross a network travel together only up to this size, because the server cannot sum what has not
arrived: a message of 16 MiB is a seventh of a second of a line of 1 Gbit/s."""
DECODED_BYTES_MAX = 4 << 20
"""Encoded parts travel together only up to this size of their elements: a server decodes a message as a whole, and the
values that answer it go back together."""
PRIORITY_MESSAGES_PER_WINDOW = 4
"""Messages in the window of priority slices, so that the line is busy while a message is acknowledged."""
FRAMES_MAX = 64
"""Payload frames of a message."""
SETTINGS_PER_MESSAGE_MAX = 256
"""`Push.setting_of` is a byte per slice."""
LEADER = -1
"""Replaces a server's rank: the worker of this host that pushes to servers for the others."""


_HALVES = (int(DType.FLOAT16), int(DType.BFLOAT16))


@dataclass(frozen=True, slots=True)
class Credit:
    """The token of a message: its bytes are back in the window once it is acknowledged."""

    server: int
    nbytes: int
    contributors: tuple[msg.Contributor, ...] = ()
    """For a joined push: the pushes in it, repeated for each part."""


@dataclass(slots=True)
class Outbox:
    """The queue towards a server."""

    server: int
    window_bytes: int
    join_bytes_max: int
    is_near: bool = False
    """Whether the server is on this host."""
    far_window_bytes: int = 0
    """The window for messages that cross a network."""
    far_bytes_max: int = 0
    """Size up to which large parts join across a network; 0 is `FAR_BYTES_MAX`."""
    flying_bytes: int = 0
    _heaps: dict[req.BatchKey, list[tuple[int, int, req.RunPart]]] = field(default_factory=dict)
    """Queued parts by `Run.batch_key`; no heap is empty."""
    _arrivals: int = 0

    def __post_init__(self) -> None:
        self.far_window_bytes = self.far_window_bytes or self.window_bytes

    def keep_little_flying(self, window_bytes: int) -> None:
        """Shrink the window of a line, so that urgent slices wait for few bytes; messages are a quarter of it."""
        self.far_window_bytes = min(self.window_bytes, window_bytes)
        self.far_bytes_max = self.far_window_bytes // PRIORITY_MESSAGES_PER_WINDOW
        self.join_bytes_max = min(self.join_bytes_max, self.far_bytes_max)

    def add(self, part: req.RunPart) -> None:
        """Queue slices that may be sent."""
        self._arrivals += 1
        heap = self._heaps.setdefault(part.run.batch_key, [])
        heapq.heappush(heap, (-part.run.priority, self._arrivals, part))

    def next_message(self) -> tuple[msg.Message, Credit] | None:
        """Return the next message that may be sent, and the credit that it uses; None if no message may."""
        heap = min(self._heaps.values(), key=lambda heap: heap[0][:2], default=None)
        if heap is None:
            return None
        window_bytes = self._window(heap[0][2])
        if self.flying_bytes >= window_bytes:
            return None
        if self.flying_bytes and self.flying_bytes + heap[0][2].nbytes > window_bytes:
            return None
        parts = self._joinable(heap, window_bytes - self.flying_bytes)
        run = parts[0].run
        if not heap:
            del self._heaps[run.batch_key]
        message = _message(parts)
        nbytes = sum(part.nbytes for part in parts)
        self.flying_bytes += nbytes
        return message, Credit(self.server, nbytes, run.contributors * len(parts))

    def _window(self, part: req.RunPart) -> int:
        return self.window_bytes if self.is_near or part.run.stays else self.far_window_bytes

    def release(self, credit: Credit) -> None:
        """Return the credit of a message that the server has received."""
        self.flying_bytes -= credit.nbytes
        assert self.flying_bytes >= 0, "credits are released once"

    @property
    def is_empty(self) -> bool:
        """Whether the queue is empty."""
        return not self._heaps

    def forget(self) -> None:
        """Drop the queue."""
        self._heaps.clear()

    def _joinable(self, heap: list[tuple[int, int, req.RunPart]], window_left: int) -> list[req.RunPart]:
        first = heapq.heappop(heap)[2]
        parts = [first]
        stays, large = first.run.stays, first.nbytes >= req.ALONE_BYTES_MIN
        near = stays or self.is_near
        total, frames, decoded = first.nbytes, 1, first.decoded_nbytes
        far_max = (self.far_bytes_max or FAR_BYTES_MAX) if large else self.join_bytes_max
        together_max = NEAR_BYTES_MAX if near else far_max
        room = min(together_max, window_left)
        settings = len(first.run.settings)
        while heap and len(parts) < PARTS_PER_MESSAGE_MAX:
            part = heap[0][2]
            settings += len(part.run.settings)
            frames += part.nbytes >= req.ALONE_BYTES_MIN
            decoded += part.decoded_nbytes
            if part.run.stays is not stays or ((part.nbytes >= req.ALONE_BYTES_MIN) is not large and not near):
                break
            if total + part.nbytes > room or settings > SETTINGS_PER_MESSAGE_MAX or 2 * frames > FRAMES_MAX:
                break
            if decoded > DECODED_BYTES_MAX:
                break
            parts.append(heapq.heappop(heap)[2])
            total += part.nbytes
        return parts


class SliceTable:
    """A worker's state of each slice: its pushes, the newest version seen, the runs in line. Grows with keys."""

    _COLUMNS = (
        *("pushed", "versions", "aggregated", "is_lockstep"),
        *("_delegated", "_delegated_run", "_busy"),
    )

    def __init__(self) -> None:
        self.pushed: U32 = np.zeros(0, np.uint32)
        """Pushes submitted by the user's thread so far."""
        self.versions: U32 = np.zeros(0, np.uint32)
        """The newest version seen."""
        self.aggregated: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are summed with those of other workers of this host."""
        self.is_lockstep: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are counted only together with those of all other workers."""
        self._delegated: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its push is with the leader of this host, and not answered."""
        self._delegated_run: U32 = np.zeros(0, np.uint32)
        """The run of that push."""
        self._busy: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._lines: dict[int, deque[req.Run]] = {}
        self.has_rested = False
        """Whether this worker was left out of rounds because it had no data; see `rounds`."""

    def grow(self, size: int) -> None:
        """Ensure rows for slices 0 to `size - 1`. The table at least doubles when it grows."""
        if size > len(self.pushed):
            more = max(size - len(self.pushed), len(self.pushed))
            for name in self._COLUMNS:
                column = getattr(self, name)
                setattr(self, name, np.concatenate([column, np.zeros(more, column.dtype)]))

    def begin_at(self, ids: U32, steps: U32) -> None:
        """Continue counters from these numbers of pushes of other workers, from before this worker joined."""
        if len(ids):
            self.grow(int(ids.max()) + 1)
            self.pushed[ids] = steps

    def drop(self) -> None:
        """Record that no push is in flight any more."""
        self._busy[:] = False
        self._delegated[:] = False
        self._lines.clear()

    def rewind(self, ids: U32, versions: U32) -> None:
        """Set slices to these versions, with as many pushes of this worker."""
        self.begin_at(ids, versions)
        self.versions[ids] = versions

    def enter(self, run: req.Run) -> req.RunPart | None:
        """Assign step numbers and places in line to a pushing run; returns the part that may be sent at once."""
        ids = run.plan.ids
        run.steps = self.pushed[ids]
        self.pushed[ids] += 1
        busy = self._busy[ids]
        self._busy[ids] = True
        if not busy.any():
            return req.RunPart(run)
        for number in ids[busy].tolist():
            self._lines.setdefault(number, deque()).append(run)
        free = np.flatnonzero(~busy).tolist()
        return req.RunPart(run, free) if free else None

    def mark_counted(self, ids: U32) -> list[req.RunPart]:
        """Record that a server has counted these pushes. Returns the parts that may be sent now, by run."""
        self._busy[ids] = False
        if not self._lines:
            return []
        freed: dict[int, tuple[req.Run, list[int]]] = {}
        for number in ids.tolist():
            line = self._lines.get(number)
            if line is None:
                continue
            self._busy[number] = True
            run = line.popleft()
            if not line:
                del self._lines[number]
            freed.setdefault(run.number, (run, []))[1].append(run.plan.positions[number])
        return [req.RunPart(run, sorted(positions)) for run, positions in freed.values()]

    def delegate(self, part: req.RunPart) -> None:
        """Record that these pushes are with the leader of this host."""
        self._delegated[part.ids] = True
        self._delegated_run[part.ids] = part.run.number

    def reclaim(self, ids: U32) -> None:
        """Record that the leader has answered these pushes, or handed them back."""
        self._delegated[ids] = False

    def reclaim_all(self) -> dict[int, list[int]]:
        """Withdraw every push from the leader. Returns run → its slices."""
        found: dict[int, list[int]] = {}
        for number in np.flatnonzero(self._delegated).tolist():
            found.setdefault(int(self._delegated_run[number]), []).append(number)
        self._delegated[:] = False
        return found

    @property
    def has_delegated(self) -> bool:
        """Whether the leader has a push that it has not answered."""
        return bool(self._delegated.any())

    def saw(self, ids: U32, versions: U32) -> None:
        """Record that these versions have been seen."""
        self.versions[ids] = np.maximum(self.versions[ids], versions)

    def counted_pushes(self) -> U32:
        """(n,) number of counted pushes of each slice."""
        counted = self.pushed - self._busy
        for number, line in self._lines.items():
            counted[number] -= len(line)
        return counted.astype(np.uint32)

    def rounds(self, counted: U32) -> tuple[U32, U32]:
        """Pushes of this worker as rounds of all workers, which the workers can compare with each other.

        They are the same numbers until a worker rests: rounds that the others close meanwhile have no push of it.

        Args:
            counted: (n,) as `counted_pushes` returns them.

        Returns:
            (n,) number of closed rounds of each slice that this worker knows of; and (n,) number of rounds in which it
                has pushed, or was left out. 0 for slices without rounds.
        """
        closed = np.maximum(counted, self.versions) if self.has_rested else counted
        pushed = self.pushed + (closed - counted)
        return np.where(self.is_lockstep, closed, np.uint32(0)), np.where(self.is_lockstep, pushed, np.uint32(0))

    def rounds_of(self, number: int) -> int:
        """Return the number of rounds before the next push of a slice; without rounds, the number of pushes."""
        if number >= len(self.pushed):
            return 0  # no key is declared
        pushed = int(self.pushed[number])
        if not (self.has_rested and self.is_lockstep[number]):
            return pushed
        under_way = int(self._busy[number]) + len(self._lines.get(number, ()))
        return max(pushed, int(self.versions[number]) + under_way)

    @property
    def has_lines(self) -> bool:
        """Whether a run waits for an earlier push of this worker."""
        return bool(self._lines)

    def validate(self) -> None:
        """Check every invariant."""
        for number, line in self._lines.items():
            assert line and self._busy[number], "a line stands only before a busy slice"
        assert not (self._delegated & ~self._busy).any(), "only what is under way is with the leader"


@dataclass(slots=True)
class Finished:
    """Requests and keys that a reply has completed.

    Attributes:
        requests: complete now.
        keys: (request, indices of keys) of requests that are answered key by key.
    """

    requests: list[int] = field(default_factory=list)
    keys: list[tuple[int, list[int]]] = field(default_factory=list)


class Transfers:
    """All transfers of a worker.

    Args:
        limits: the window and the size of joined messages.
        traffic: counters of passes over values.
    """

    def __init__(self, limits: Limits, traffic: Traffic) -> None:
        self._limits = limits
        self.traffic = traffic
        self.kernels: Kernels = REFERENCE
        """The backend that widens values in half precision."""
        self.slices = SliceTable()
        self._outboxes: dict[int, Outbox] = {}
        self._ready: set[int] = set()
        """Servers to which a message may be sendable. Checking all outboxes at each reply would cost a worker with many
        servers more than the reply."""
        self._keeps_little_flying = False
        self._runs: dict[int, req.Run] = {}
        self._runs_left: dict[int, int] = {}
        """Request → its runs without all their answers."""
        self._next_run = 0
        self._flying_messages = 0
        self._to_aggregate: list[req.RunPart] = []
        """Parts that may be sent and are summed with the pushes of other workers of this host."""

    def add_server(self, rank: int, is_near: bool) -> None:
        """Add a server, or a leader, to send to; `is_near` if it is on this host."""
        self._outboxes[rank] = Outbox(rank, self._limits.window_bytes, self._limits.slice_bytes, is_near)
        if self._keeps_little_flying:
            self.keep_little_flying()

    def keep_little_flying(self) -> None:
        """Share a small window on the lines of this worker, because a store has priority slices."""
        self._keeps_little_flying = True
        limits = self._limits
        far = [outbox for outbox in self._outboxes.values() if not outbox.is_near]
        for outbox in far:
            share = limits.priority_window_bytes // len(far)
            outbox.keep_little_flying(max(share, limits.priority_slice_bytes))

    def start(self, request: req.Transfer) -> None:
        """Queue the runs of a transfer, at least one."""
        self._runs_left[request.request] = len(request.runs)
        for run in request.runs:
            ids = run.plan.ids
            self._next_run = (self._next_run + 1) & 0xFFFFFFFF
            run.begin(self._next_run, request, self.slices.pushed[ids], self.slices.versions[ids])
            self._runs[run.number] = run
            part = self.slices.enter(run) if request.kind.pushes else req.RunPart(run)
            if part is not None:
                self._leave(part)

    def _leave(self, part: req.RunPart) -> None:
        """Send slices of a run to their server, or to the sums of this host."""
        run = part.run
        # Encoded contributions cannot be summed, and are small. What is clipped is read once more after its answer.
        is_summed = run.kind.pushes and run.encoded is None and self.slices.aggregated[run.plan.ids[0]]
        if is_summed and not run.is_clipped:
            self._to_aggregate.append(part)
        else:
            self.send_directly(part)

    def send_directly(self, part: req.RunPart) -> None:
        """Send a part to its server."""
        run = part.run
        server = run.plan.server
        if not run.chunks:
            self._add(server, part)
        for index in range(len(run.chunks)):
            self._add(server, req.RunPart(run, chunk=index))

    def send_again(self, server: int, is_near: bool) -> None:
        """Repeat unanswered requests to the server that has the slices of a lost server, and their counters.

        Args:
            server: the number of the lost server.
            is_near: whether the new server is on this host.
        """
        outbox = self._outboxes[server]
        outbox.forget()
        outbox.is_near = is_near
        counted = self.slices.counted_pushes()
        for run in [run for run in self._runs.values() if run.plan.server == server]:
            if run.kind.pushes:
                under_way = np.flatnonzero(counted[run.plan.ids] == run.steps).tolist()
                if under_way:
                    self.send_directly(req.RunPart(run, under_way))
                continue
            if run.answered is not None:
                self.send_directly(req.RunPart(run, np.flatnonzero(~run.answered).tolist()))
                continue
            run.left = len(run.plan.ids)  # which of its answers have come is not known: ask for all of them anew
            self.send_directly(req.RunPart(run))

    def take_aggregated(self) -> list[req.RunPart]:
        """Remove and return the parts that are summed on this host before they are sent."""
        parts, self._to_aggregate = self._to_aggregate, []
        return parts

    def delegate(self, part: req.RunPart) -> None:
        """Send a part to the leader of this host, which replies for the server."""
        self.slices.delegate(part)
        self._add(LEADER, part)

    def handed_back(self, message: msg.HandedBack) -> None:
        """Send slices to their servers, because the leader does not."""
        for run, begin, end in self._segments(message.runs):
            positions = run.plan.positions
            part = req.RunPart(run, sorted(positions[number] for number in message.ids[begin:end].tolist()))
            self.slices.reclaim(part.ids)
            self.send_directly(part)

    def reclaim(self) -> None:
        """Send pushes without an answer of the leader, which has left, to the servers; they may have them in a sum."""
        self._outboxes[LEADER].forget()
        for number, positions in self.slices.reclaim_all().items():
            run = self._runs[number]
            self.send_directly(req.RunPart(run, sorted(run.plan.positions[one] for one in positions)))

    def pop_messages(self) -> Iterator[tuple[int, msg.Message, Credit]]:
        """Remove and return the messages that may be sent now: (server, message, credit)."""
        for rank in sorted(self._ready):
            outbox = self._outboxes[rank]
            while (taken := outbox.next_message()) is not None:
                self._flying_messages += 1
                yield rank, *taken
            self._ready.discard(rank)

    def note(self, rank: int) -> Credit:
        """The token of a message to a server that belongs to no transfer."""
        self._flying_messages += 1
        return Credit(rank, 0)

    def release(self, credit: Credit) -> None:
        """Return the bytes of a message that has arrived to the window."""
        self._flying_messages -= 1
        self._outboxes[credit.server].release(credit)
        self._ready.add(credit.server)

    def values(self, message: msg.Values) -> Finished:
        """Copy values to the user's arrays. Returns the completed requests and keys."""
        arrays = views(message.arrays)
        for run, begin, end in self._segments(message.runs):
            if not run.kind.pulls:
                continue  # for another worker of this host
            positions = run.plan.positions_of(message.ids[begin:end])
            if run.kept is not None:
                run.kept.update(zip(positions, arrays[begin:end], strict=True))
                continue
            sinks = run.sinks
            if (message.arrays.dtypes[begin:end] != run.plan.dtypes[positions]).any():
                codes = message.arrays.dtypes[begin:end].tolist()
                self._widen([sinks[position] for position in positions], arrays[begin:end], codes)
                continue
            own = sinks if isinstance(positions, range) else [sinks[position] for position in positions]
            for sink, array in zip(own, arrays[begin:end], strict=True):
                # The one copy of a pulled value on this side: from the transport's memory into the user's.
                sink[...] = array
            columns = message.arrays
            self.traffic.copied_out += int(ITEMSIZES.take(columns.dtypes[begin:end]) @ columns.counts[begin:end])
        return self.answered(message)

    def _widen(self, sinks: Sequence[Bits], arrays: Sequence[Bits], codes: Sequence[int]) -> None:
        """Copy values, some of them in half precision, to the user's arrays: a single pass over them on this side."""
        for sink, array, code in zip(sinks, arrays, codes, strict=True):
            if code in _HALVES and sink.dtype == DType.FLOAT32.storage:
                self.kernels.to_float32(array, DType(code), sink)
            else:
                sink[...] = array
            self.traffic.copied_out += sink.nbytes

    def refused(self, message: msg.Refused) -> dict[int, int]:
        """The requests with refused slices, each with the server that refused."""
        return {run.request: run.plan.server for run, _, _ in self._segments(message.runs)}

    def run(self, number: int) -> req.Run:
        """Return a run without all its answers."""
        return self._runs[number]

    def pushed_stretches(self, runs: U32) -> list[tuple[int, int]]:
        """The stretches of an answer that belong to pushes."""
        return [(begin, end) for run, begin, end in self._segments(runs) if run.kind.pushes]

    def answered(self, message: msg.Values | msg.Counted | msg.Refused) -> Finished:
        """Record the replies of these slices. Returns the completed requests and keys."""
        if not isinstance(message, msg.Refused):
            self.slices.saw(message.ids, message.versions)
        finished = Finished()
        for run, begin, end in self._segments(message.runs):
            if run.kind.pushes:
                self.slices.reclaim(message.ids[begin:end])
                for freed in self.slices.mark_counted(message.ids[begin:end]):
                    self._leave(freed)
            if run.answered is not None:
                found = run.plan.positions_of(message.ids[begin:end])
                run.answered[found] = True
                finished.keys.append((run.request, run.plan.key_of[found].tolist()))
            run.left -= end - begin
            if run.left == 0:
                del self._runs[run.number]
                self._runs_left[run.request] -= 1
                if not self._runs_left[run.request]:
                    del self._runs_left[run.request]
                    finished.requests.append(run.request)
        return finished

    def awaited_servers(self, request: int) -> Sequence[int]:
        """The ranks of the servers that have not answered a request."""
        return sorted({run.plan.server for run in self._runs.values() if run.request == request})

    def is_open(self, request: int) -> bool:
        """Whether this is a transfer without all its answers."""
        return request in self._runs_left

    def awaited_rounds(self) -> tuple[U32, U32] | None:
        """Return the pushes without which no answer can come; None if an answer can.

        Returns:
            (n,) number of rounds in which this worker has pushed each slice that has rounds, and (n,) number of rounds
                in which every worker must have pushed it before the next answer; 0 where no answer is awaited. See
                `SliceTable.rounds`.
        """
        slices, counted = self.slices, self.slices.counted_pushes()
        for run in self._runs.values():
            ids = run.plan.ids
            if run.kind.pushes:
                waits = counted[ids] <= run.steps
            elif run.kind is req.RunKind.PULL:
                waits = counted[ids] < run.steps
            else:
                return None
            if np.count_nonzero(waits & slices.is_lockstep[ids]) != run.left:
                return None
        closed, pushed = slices.rounds(counted)
        return pushed, np.where(pushed > closed, closed + np.uint32(1), np.uint32(0))

    def first_awaited(self, request: int, awaited: U32) -> int:
        """Return the first slice of a request whose round it waits for; -1 if it waits for no round."""
        for run in self._runs.values():
            if run.request == request:
                waited = run.plan.ids[awaited[run.plan.ids] > 0]
                if len(waited):
                    return int(waited[0])
        return -1

    @property
    def is_idle(self) -> bool:
        """Whether every transfer has its replies."""
        return not self._runs_left

    @property
    def everything_arrived(self) -> bool:
        """Whether everything submitted has been received by its server."""
        waiting = self._flying_messages or self.slices.has_lines or self._to_aggregate
        return not waiting and all(outbox.is_empty for outbox in self._outboxes.values())

    def clear(self) -> None:
        """Forget everything: no replies will come."""
        self._runs.clear()
        self._runs_left.clear()
        self._outboxes.clear()
        self._ready.clear()
        self._to_aggregate.clear()

    def drop(self) -> None:
        """Forget transfers without a reply and queued messages; sent messages stay in flight until their server has
        them."""
        self._runs.clear()
        self._runs_left.clear()
        self._to_aggregate.clear()
        self.slices.drop()
        for outbox in self._outboxes.values():
            outbox.forget()

    @property
    def is_quiet(self) -> bool:
        """Whether no message is in flight to any server."""
        return not self._flying_messages

    def validate(self) -> None:
        """Check every invariant."""
        self.slices.validate()
        for run in self._runs.values():
            assert run.request in self._runs_left, "a run belongs to a transfer that is not finished"
            assert 0 < run.left <= len(run.plan.ids)
        for rank, outbox in self._outboxes.items():
            assert outbox.flying_bytes >= 0
            assert rank in self._ready or outbox.next_message() is None, "what may leave has left"

    def _add(self, rank: int, part: req.RunPart) -> None:
        self._outboxes[rank].add(part)
        self._ready.add(rank)

    def _segments(self, runs: U32) -> Iterator[tuple[req.Run, int, int]]:
        """Yield the stretches of an answer that belong to a run that still waits: (run, begin, end)."""
        for begin, end in stretches(runs):
            run = self._runs.get(int(runs[begin]))
            if run is not None:
                yield run, begin, end


def push_of(part: req.RunPart) -> msg.Push:
    """The message of a part of a plain push."""
    message = _message([part])
    assert isinstance(message, msg.Push)
    return message


def _message(parts: Sequence[req.RunPart]) -> msg.Message:
    ids = [part.ids for part in parts]
    numbers = _per_slice([part.run.number for part in parts], ids)
    steps, versions = _joined([part.steps for part in parts]), _joined([part.versions for part in parts])
    kind, has_rows = parts[0].run.kind, bool(parts[0].run.chunks)
    if kind is req.RunKind.PULL and not has_rows:
        return msg.Pull(numbers, _joined(ids), steps, versions)
    if kind is req.RunKind.PULL_STATE:
        return msg.PullState(numbers, _joined(ids), steps, _joined([part.states for part in parts]))
    counts, payload = _joined([part.counts for part in parts]), _payload(parts)
    if kind.pushes:
        settings, setting_of = _settings(parts)
        samples = _per_slice([part.run.samples for part in parts], ids)
        flags = _joined([part.flags for part in parts])
        columns = (numbers, _joined(ids), steps, versions, samples, flags, settings, setting_of)
        encoded = parts[0].run.encoded
        if encoded is not None:
            entries = _joined([part.entries for part in parts])
            coded = Coded(counts, entries, encoded.encoding, encoded.parameter, payload)
            return msg.CompressedPush(kind is req.RunKind.PUSHPULL, *columns, coded)
        arrays = Arrays(_joined([part.dtypes for part in parts]), counts, payload)
        if has_rows:
            return msg.PushRows(*columns, arrays)
        if contributors := parts[0].run.contributors:
            seen = (numbers, _joined(ids), versions, flags)
            return msg.JoinedPush(kind is req.RunKind.PUSHPULL, contributors, *seen, settings, setting_of, arrays)
        return msg.Push(kind is req.RunKind.PUSHPULL, *columns, arrays)
    arrays = Arrays(_joined([part.dtypes for part in parts]), counts, payload)
    if kind is req.RunKind.INITIALISE and not has_rows:
        return msg.InitValues(numbers, _joined(ids), arrays)
    if kind is req.RunKind.REPLACE:
        return msg.ReplaceValues(numbers, _joined(ids), arrays)
    if kind is req.RunKind.REPLACE_STATE:
        return msg.ReplaceState(numbers, _joined(ids), _joined([part.states for part in parts]), arrays)
    if kind is req.RunKind.PULL:
        return msg.PullRows(numbers, _joined(ids), steps, versions, arrays)
    return msg.InitRows(numbers, _joined(ids), _joined([part.flags for part in parts]), arrays)


def _per_slice(numbers: Sequence[int], ids: Sequence[U32]) -> U32:
    """Return the number of each part, repeated for each of its slices."""
    return _joined([np.full(len(own), number, np.uint32) for number, own in zip(numbers, ids, strict=True)])


def _joined(arrays: list[req.Column]) -> req.Column:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _payload(parts: Sequence[req.RunPart]) -> Payload | tuple[Payload, ...]:
    """Return the bytes of all parts: a frame for each large part, and for neighbouring small parts together."""
    if len(parts) == 1:
        return parts[0].payload()
    frames: list[Payload] = []
    for is_small, group in groupby(parts, lambda part: part.nbytes < req.ALONE_BYTES_MIN):
        payloads = [part.payload() for part in group]
        # Small parts: one more pass over bytes that are few. Arrays are padded, so they stay aligned.
        frames += [joined] if is_small and (joined := b"".join(payloads)) else [] if is_small else payloads
    return tuple(frames) if len(frames) > 1 else frames[0] if frames else b""


def _settings(parts: Sequence[req.RunPart]) -> tuple[tuple[tuple[float, float, float], ...], U8]:
    """Return a table for all parts: the settings of the first run, and those of each run that differs."""
    first = parts[0].run.settings
    settings = list(first)
    columns: list[U8] = []
    for part in parts:
        own = part.run.settings
        if own == first:
            columns.append(part.setting_of)
        else:
            columns.append((part.setting_of + np.uint8(len(settings))).astype(np.uint8))
            settings += own
    return tuple(settings), _joined(columns)
