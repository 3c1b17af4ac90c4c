"""The data plane of a worker: runs on their way to the servers, and the answers that come back.

A transfer is finished when every slice of every run has its answer: counted, valued or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvdist.config import Limits
from kvdist.core.outbox import Credit, DataMessage, Outbox, Part, Run
from kvdist.core.requests import Transfer
from kvdist.core.slices import SliceTable
from kvdist.core.traffic import Traffic
from kvdist.protocol.layout import stretches, views
from kvdist.protocol.messages import U32, Counted, Refused, Values


@dataclass(slots=True)
class Finished:
    """What an answer of a server has brought to an end.

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
        self._traffic = traffic
        self.slices = SliceTable()
        self._outboxes: dict[int, Outbox] = {}
        self._ready: set[int] = set()
        """Servers to whom something may have become free to leave. Looking at all of them at each answer would cost a
        worker with a hundred servers more than the answer."""
        self._runs: dict[int, Run] = {}
        self._runs_left: dict[int, int] = {}
        """Request → its runs without all their answers."""
        self._next_run = 0
        self._flying_messages = 0

    def add_server(self, rank: int, is_near: bool) -> None:
        """There is a server to send to; `is_near` if the way there is memory, though a socket's."""
        self._outboxes[rank] = Outbox(rank, self._limits.window_bytes, self._limits.slice_bytes, is_near)

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
            part = self.slices.enter(run) if request.kind.pushes else Part(run)
            if part is not None:
                self._add(part)

    def take(self) -> Iterator[tuple[int, DataMessage, Credit]]:
        """Everything that may leave now: (server, message, credit)."""
        for rank in sorted(self._ready):
            outbox = self._outboxes[rank]
            while (taken := outbox.take()) is not None:
                self._flying_messages += 1
                yield rank, *taken
            self._ready.discard(rank)

    def release(self, credit: Credit) -> None:
        """A message has arrived; its bytes are back in the window."""
        self._flying_messages -= 1
        self._outboxes[credit.server].release(credit)
        self._ready.add(credit.server)

    def values(self, message: Values) -> Finished:
        """Copy values to where they are wanted; returns what is finished."""
        arrays = views(message.arrays)
        for run, begin, end in self._segments(message.runs):
            positions = run.data.plan.places(message.ids[begin:end])
            if run.data.kept is not None:
                run.data.kept.update(zip(positions, arrays[begin:end], strict=True))
                continue
            sinks = run.data.sinks
            for position, array in zip(positions, arrays[begin:end], strict=True):
                # The one copy of a pulled value on this side: from the transport's memory into the user's.
                sinks[position][...] = array
            self._traffic.copied_out += sum([array.nbytes for array in arrays[begin:end]])
        return self.answered(message)

    def refused(self, message: Refused) -> set[int]:
        """The requests in which slices were refused, but for those that are answered key by key."""
        return {run.request for run, _, _ in self._segments(message.runs) if not run.key_by_key}

    def answered(self, message: Values | Counted | Refused) -> Finished:
        """These slices of these runs have their answer; returns what is finished."""
        if not isinstance(message, Refused):
            self.slices.saw(message.ids, message.versions)
        finished = Finished()
        for run, begin, end in self._segments(message.runs):
            if run.kind.pushes:
                for freed in self.slices.counted(message.ids[begin:end]):
                    self._add(freed)
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

    @property
    def everything_arrived(self) -> bool:
        """Whether all that was ever submitted has been received by its server."""
        waiting = self._flying_messages or self.slices.has_lines
        return not waiting and all(outbox.is_empty for outbox in self._outboxes.values())

    def clear(self) -> None:
        """Forget everything: nobody will answer any more."""
        self._runs.clear()
        self._runs_left.clear()
        self._outboxes.clear()
        self._ready.clear()

    def validate(self) -> None:
        """Check every invariant."""
        self.slices.validate()
        for run in self._runs.values():
            assert run.request in self._runs_left, "a run belongs to a transfer that is not finished"
            assert 0 < run.left <= len(run.data.plan.ids)
        for rank, outbox in self._outboxes.items():
            assert outbox.flying_bytes >= 0
            assert rank in self._ready or outbox.take() is None, "what may leave has left"

    def _add(self, part: Part) -> None:
        rank = part.run.data.plan.server
        self._outboxes[rank].add(part)
        self._ready.add(rank)

    def _segments(self, runs: U32) -> Iterator[tuple[Run, int, int]]:
        """The stretches of an answer that belong to one run that still waits: (run, begin, end)."""
        for begin, end in stretches(runs):
            run = self._runs.get(int(runs[begin]))
            if run is not None:
                yield run, begin, end
