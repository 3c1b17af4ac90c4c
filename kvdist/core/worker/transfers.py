"""Transfers of a worker: runs on their way to the servers, and the replies that come back.

A slice has at most one push of this worker under way; the next one waits in line until the first is counted. Runs take
their places in the lines of all their slices at once, in the order of the user's calls. Each slice goes on by itself:
a free one never waits for another of its run, or workers that group their keys differently would wait for each other.

A transfer is finished when every slice of every run has its reply: counted, valued or refused.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvdist.config.settings import Limits
from kvdist.core.traffic import Traffic
from kvdist.core.worker.outbox import Credit, DataMessage, Outbox, Ready, RowPart, Run, RunPart
from kvdist.core.worker.requests import RunKind, Transfer
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.protocol.arrays import U32, Bits, stretches, views
from kvdist.protocol.messages import Counted, HandedBack, Refused, RowValues, Values

LEADER = -1
"""In place of a server's rank: the worker of this host that pushes to servers for the others."""


_HALVES = (int(DType.FLOAT16), int(DType.BFLOAT16))


class SliceTable:
    """What a worker knows of each slice: its pushes, the newest version seen, what waits in line. Grows with keys."""

    def __init__(self) -> None:
        self.pushed: U32 = np.zeros(0, np.uint32)
        """Pushes submitted by the user's thread so far."""
        self.versions: U32 = np.zeros(0, np.uint32)
        """The newest version seen."""
        self.aggregated: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are summed with those of other workers of this host."""
        self.has_rounds: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are counted only together with those of all other workers."""
        self._delegated: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its push is with the leader of this host, and not answered."""
        self._delegated_run: U32 = np.zeros(0, np.uint32)
        """The run of that push."""
        self._busy: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._lines: dict[int, deque[Run]] = {}

    def grow(self, size: int) -> None:
        """Have rows for slices 0 to `size - 1`. The table at least doubles when it grows."""
        if size > len(self.pushed):
            more = max(size - len(self.pushed), len(self.pushed))
            self.pushed = np.concatenate([self.pushed, np.zeros(more, np.uint32)])
            self.versions = np.concatenate([self.versions, np.zeros(more, np.uint32)])
            self._busy = np.concatenate([self._busy, np.zeros(more, np.bool_)])
            self.aggregated = np.concatenate([self.aggregated, np.zeros(more, np.bool_)])
            self.has_rounds = np.concatenate([self.has_rounds, np.zeros(more, np.bool_)])
            self._delegated = np.concatenate([self._delegated, np.zeros(more, np.bool_)])
            self._delegated_run = np.concatenate([self._delegated_run, np.zeros(more, np.uint32)])

    def enter(self, run: Run) -> RunPart | None:
        """Give a pushing run its step numbers and its places in line; returns what of it may leave at once."""
        ids = run.data.plan.ids
        run.steps = self.pushed[ids]
        self.pushed[ids] += 1
        busy = self._busy[ids]
        self._busy[ids] = True
        if not busy.any():
            return RunPart(run)
        for number in ids[busy].tolist():
            self._lines.setdefault(number, deque()).append(run)
        free = np.flatnonzero(~busy).tolist()
        return RunPart(run, free) if free else None

    def counted(self, ids: U32) -> list[RunPart]:
        """These pushes are counted; returns what may leave now, the slices of one run together."""
        self._busy[ids] = False
        if not self._lines:
            return []
        freed: dict[int, tuple[Run, list[int]]] = {}
        for number in ids.tolist():
            line = self._lines.get(number)
            if line is None:
                continue
            self._busy[number] = True
            run = line.popleft()
            if not line:
                del self._lines[number]
            freed.setdefault(run.number, (run, []))[1].append(run.data.plan.positions[number])
        return [RunPart(run, sorted(positions)) for run, positions in freed.values()]

    def delegate(self, part: RunPart) -> None:
        """Note that these pushes are with the leader of this host."""
        self._delegated[part.ids] = True
        self._delegated_run[part.ids] = part.run.number

    def reclaim(self, ids: U32) -> None:
        """Note that the leader has answered these pushes, or handed them back."""
        self._delegated[ids] = False

    def reclaim_all(self) -> dict[int, list[int]]:
        """Take back every push that the leader has: run → its slices."""
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
        """These versions have been seen."""
        self.versions[ids] = np.maximum(self.versions[ids], versions)

    def counted_pushes(self) -> U32:
        """(n,) how many pushes of each slice are counted."""
        counted = self.pushed - self._busy
        for number, line in self._lines.items():
            counted[number] -= len(line)
        return counted.astype(np.uint32)

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
    """What a reply has completed.

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
        traffic: where passes are counted.
    """

    def __init__(self, limits: Limits, traffic: Traffic) -> None:
        self._limits = limits
        self.traffic = traffic
        self.kernels: Kernels = REFERENCE
        """What widens values that come as halves."""
        self.slices = SliceTable()
        self._outboxes: dict[int, Outbox] = {}
        self._ready: set[int] = set()
        """Servers to which something may leave. To look at all outboxes at each reply costs a worker with many servers
        more than the reply."""
        self._keeps_little_flying = False
        self._runs: dict[int, Run] = {}
        self._runs_left: dict[int, int] = {}
        """Request → its runs without all their answers."""
        self._next_run = 0
        self._flying_messages = 0
        self._to_aggregate: list[RunPart] = []
        """What may leave, and is summed with the pushes of other workers of this host."""

    def add_server(self, rank: int, is_near: bool) -> None:
        """Add a server, or a leader, to send to; `is_near` if it is on this host."""
        self._outboxes[rank] = Outbox(rank, self._limits.window_bytes, self._limits.slice_bytes, is_near)
        if self._keeps_little_flying:
            self.keep_little_flying()

    def keep_little_flying(self) -> None:
        """Share one small window on the lines of this worker, because a store has priority slices."""
        self._keeps_little_flying = True
        limits = self._limits
        far = [outbox for outbox in self._outboxes.values() if not outbox.is_near]
        for outbox in far:
            share = limits.priority_window_bytes // len(far)
            outbox.keep_little_flying(max(share, limits.priority_slice_bytes))

    def start(self, request: Transfer) -> None:
        """Queue the runs of a transfer that has some."""
        self._runs_left[request.request] = len(request.runs)
        for data in request.runs:
            ids = data.plan.ids
            self._next_run = (self._next_run + 1) & 0xFFFFFFFF
            run = Run(
                self._next_run,
                request.request,
                request.kind,
                data,
                self.slices.pushed[ids],
                self.slices.versions[ids],
                len(ids),
                request.priority,
                request.key_by_key,
            )
            self._runs[run.number] = run
            part = self.slices.enter(run) if request.kind.pushes else RunPart(run)
            if part is not None:
                self._leave(part)

    def _leave(self, part: RunPart) -> None:
        """Send slices of a run to their server, or to the sums of this host."""
        data = part.run.data
        # Encoded contributions cannot be summed, and are small.
        if part.run.kind.pushes and data.encoded is None and self.slices.aggregated[data.plan.ids[0]]:
            self._to_aggregate.append(part)
        else:
            self.send_directly(part)

    def send_directly(self, part: RunPart) -> None:
        """Send this to its server."""
        server, chunks = part.run.data.plan.server, part.run.data.chunks
        if not chunks:
            self._add(server, part)
        for index in range(len(chunks)):
            self._add(server, RowPart(part.run, index))

    def send_ready(self, ready: Ready) -> None:
        """Send a complete message to its server."""
        self._outboxes[ready.server].add_ready(ready)
        self._ready.add(ready.server)

    def take_aggregated(self) -> list[RunPart]:
        """Remove and return what may leave and is summed on this host first."""
        parts, self._to_aggregate = self._to_aggregate, []
        return parts

    def delegate(self, part: RunPart) -> None:
        """Send this to the leader of this host, which replies for the server."""
        self.slices.delegate(part)
        self._add(LEADER, part)

    def handed_back(self, message: HandedBack) -> None:
        """Send these to their servers, because the leader does not."""
        for run, begin, end in self._segments(message.runs):
            positions = run.data.plan.positions
            part = RunPart(run, sorted(positions[number] for number in message.ids[begin:end].tolist()))
            self.slices.reclaim(part.ids)
            self.send_directly(part)

    def reclaim(self) -> None:
        """Send what the leader has not answered to the servers, because it has left; they may have it in a sum."""
        self._outboxes[LEADER].forget()
        for number, positions in self.slices.reclaim_all().items():
            run = self._runs[number]
            self.send_directly(RunPart(run, sorted(run.data.plan.positions[one] for one in positions)))

    def take(self) -> Iterator[tuple[int, DataMessage, Credit]]:
        """Remove and return everything that may leave: (server, message, credit)."""
        for rank in sorted(self._ready):
            outbox = self._outboxes[rank]
            while (taken := outbox.take()) is not None:
                self._flying_messages += 1
                yield rank, *taken
            self._ready.discard(rank)

    def release(self, credit: Credit) -> None:
        """Return the bytes of a message that has arrived to the window."""
        self._flying_messages -= 1
        self._outboxes[credit.server].release(credit)
        self._ready.add(credit.server)

    def received(self, message: Values | RowValues | Counted | Refused) -> Finished:
        """Take a reply; returns what is finished."""
        if isinstance(message, Values):
            return self.values(message)
        if isinstance(message, RowValues):
            self._place_rows(message)
        return self.answered(message)

    def _place_rows(self, message: RowValues) -> None:
        """Copy rows to the user's arrays."""
        arrays = views(message.arrays)
        for run, begin, end in self._segments(message.runs):
            for sink, array in zip(run.data.sinks, arrays[begin:end], strict=True):
                sink[...] = array  # one pass: from the transport's memory into the user's
                self.traffic.copied_out += array.nbytes

    def values(self, message: Values) -> Finished:
        """Copy values to the user's arrays; returns what is finished."""
        arrays = views(message.arrays)
        for run, begin, end in self._segments(message.runs):
            if not run.kind.pulls:
                continue  # for another worker of this host
            positions = run.data.plan.places(message.ids[begin:end])
            if run.data.kept is not None:
                run.data.kept.update(zip(positions, arrays[begin:end], strict=True))
                continue
            sinks = run.data.sinks
            if (message.arrays.dtypes[begin:end] != run.data.plan.dtypes[positions]).any():
                codes = message.arrays.dtypes[begin:end].tolist()
                self._widen([sinks[position] for position in positions], arrays[begin:end], codes)
                continue
            for position, array in zip(positions, arrays[begin:end], strict=True):
                # The one copy of a pulled value on this side: from the transport's memory into the user's.
                sinks[position][...] = array
            self.traffic.copied_out += sum([array.nbytes for array in arrays[begin:end]])
        return self.answered(message)

    def _widen(self, sinks: Sequence[Bits], arrays: Sequence[Bits], codes: Sequence[int]) -> None:
        """Copy values, some of which come as halves, to the user's arrays: the one pass over them on this side."""
        for sink, array, code in zip(sinks, arrays, codes, strict=True):
            if code in _HALVES and sink.dtype == DType.FLOAT32.storage:
                self.kernels.to_float32(array, DType(code), sink)
            else:
                sink[...] = array
            self.traffic.copied_out += sink.nbytes

    def refused(self, message: Refused) -> dict[int, int]:
        """The requests with refused slices, each with the server that refused."""
        return {run.request: run.data.plan.server for run, _, _ in self._segments(message.runs)}

    def pushed_stretches(self, runs: U32) -> list[tuple[int, int]]:
        """The stretches of an answer that belong to pushes."""
        return [(begin, end) for run, begin, end in self._segments(runs) if run.kind.pushes]

    def answered(self, message: Values | RowValues | Counted | Refused) -> Finished:
        """Note that these slices have their reply; returns what is finished."""
        if not isinstance(message, Refused):
            self.slices.saw(message.ids, message.versions)
        finished = Finished()
        for run, begin, end in self._segments(message.runs):
            if run.kind.pushes:
                self.slices.reclaim(message.ids[begin:end])
                for freed in self.slices.counted(message.ids[begin:end]):
                    self._leave(freed)
            if run.key_by_key:
                plan = run.data.plan
                finished.keys.append((run.request, plan.key_of[plan.places(message.ids[begin:end])].tolist()))
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
        return sorted({run.data.plan.server for run in self._runs.values() if run.request == request})

    def is_open(self, request: int) -> bool:
        """Whether this is a transfer without all its answers."""
        return request in self._runs_left

    def awaited_rounds(self) -> tuple[U32, U32] | None:
        """What the rounds wait for without which no answer can come; None if one can.

        Returns:
            (n,) how often this worker has pushed each slice that has rounds, and (n,) how often every worker must have
            pushed it before the next answer; 0 where no answer is awaited.
        """
        slices, counted = self.slices, self.slices.counted_pushes()
        for run in self._runs.values():
            ids = run.data.plan.ids
            if run.kind.pushes:
                waits = counted[ids] <= run.steps
            elif run.kind in (RunKind.PULL, RunKind.PULL_ROWS):
                waits = counted[ids] < run.steps
            else:
                return None
            if np.count_nonzero(waits & slices.has_rounds[ids]) != run.left:
                return None
        pushed = np.where(slices.has_rounds, slices.pushed, np.uint32(0))
        return pushed, np.where(pushed > counted, counted + np.uint32(1), np.uint32(0))

    def first_awaited(self, request: int, awaited: U32) -> int:
        """The first slice of a request for whose round it waits; -1 if there is none."""
        for run in self._runs.values():
            if run.request == request:
                waited = run.data.plan.ids[awaited[run.data.plan.ids] > 0]
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
        """Forget everything: there will be no replies."""
        self._runs.clear()
        self._runs_left.clear()
        self._outboxes.clear()
        self._ready.clear()
        self._to_aggregate.clear()

    def validate(self) -> None:
        """Check every invariant."""
        self.slices.validate()
        for run in self._runs.values():
            assert run.request in self._runs_left, "a run belongs to a transfer that is not finished"
            assert 0 < run.left <= len(run.data.plan.ids)
        for rank, outbox in self._outboxes.items():
            assert outbox.flying_bytes >= 0
            assert rank in self._ready or outbox.take() is None, "what may leave has left"

    def _add(self, rank: int, part: RunPart | RowPart) -> None:
        self._outboxes[rank].add(part)
        self._ready.add(rank)

    def _segments(self, runs: U32) -> Iterator[tuple[Run, int, int]]:
        """The stretches of an answer that belong to one run that still waits: (run, begin, end)."""
        for begin, end in stretches(runs):
            run = self._runs.get(int(runs[begin]))
            if run is not None:
                yield run, begin, end
