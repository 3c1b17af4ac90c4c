"""The data plane of a worker: runs on their way to the servers, and the answers that come back.

A transfer is finished when every slice of every run has its answer: counted, valued or refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvdist.config import Limits
from kvdist.core.outbox import Credit, DataMessage, Outbox, Part, Ready, Run
from kvdist.core.requests import Transfer
from kvdist.core.slices import SliceTable
from kvdist.core.traffic import Traffic
from kvdist.protocol.layout import stretches, views
from kvdist.protocol.messages import U32, Counted, HandedBack, Refused, Values

LEADER = -1
"""In place of a server's rank: the worker of this host that pushes to servers for the others."""


class Transfers:
    """All transfers of a worker.

    Args:
        limits: the window and the size of joined messages.
        traffic: where passes are counted.
    """

    def __init__(self, limits: Limits, traffic: Traffic) -> None:
        self._limits = limits
        self.traffic = traffic
        self.slices = SliceTable()
        self._outboxes: dict[int, Outbox] = {}
        self._runs: dict[int, Run] = {}
        self._runs_left: dict[int, int] = {}
        """Request → its runs without all their answers."""
        self._next_run = 0
        self._flying_messages = 0
        self._detours: list[Part] = []
        """What may leave, and is summed with the pushes of other workers of this host."""

    def add_server(self, rank: int) -> None:
        """There is a server to send to, or a leader."""
        self._outboxes[rank] = Outbox(rank, self._limits.window_bytes, self._limits.slice_bytes)

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
                priority=request.priority,
            )
            self._runs[run.number] = run
            part = self.slices.enter(run) if request.kind.pushes else Part(run)
            if part is not None:
                self._leave(part)

    def _leave(self, part: Part) -> None:
        """All slices of a run are on one server and of one store, so they go the same way."""
        if part.run.kind.pushes and self.slices.detour[part.run.data.plan.ids[0]]:
            self._detours.append(part)
        else:
            self.send_directly(part)

    def send_directly(self, part: Part) -> None:
        """This goes to its server."""
        self._outboxes[part.run.data.plan.server].add(part)

    def send_ready(self, ready: Ready) -> None:
        """This goes to a server as it is."""
        self._outboxes[ready.server].add_ready(ready)

    def take_detours(self) -> list[Part]:
        """What may leave and is summed on this host first."""
        detours, self._detours = self._detours, []
        return detours

    def give_to_leader(self, part: Part) -> None:
        """This goes to the leader, who answers for the server."""
        self.slices.lend(part)
        self._outboxes[LEADER].add(part)

    def handed_back(self, message: HandedBack) -> None:
        """The leader does not push these."""
        for run, begin, end in self._segments(message.runs):
            positions = run.data.plan.positions
            part = Part(run, sorted(positions[number] for number in message.ids[begin:end].tolist()))
            self.slices.regain(part.ids)
            self.send_directly(part)

    def take_back(self) -> None:
        """The leader has left: what it has not answered goes to the servers, who may have it in a sum."""
        self._outboxes[LEADER].forget()
        for number, positions in self.slices.take_lent().items():
            run = self._runs[number]
            self.send_directly(Part(run, sorted(run.data.plan.positions[one] for one in positions)))

    def take(self) -> Iterator[tuple[int, DataMessage, Credit]]:
        """Everything that may leave now: (server, message, credit)."""
        for rank, outbox in self._outboxes.items():
            while (taken := outbox.take()) is not None:
                self._flying_messages += 1
                yield rank, *taken

    def release(self, credit: Credit) -> None:
        """A message has arrived; its bytes are back in the window."""
        self._flying_messages -= 1
        self._outboxes[credit.server].release(credit)

    def values(self, message: Values) -> list[int]:
        """Copy values to where they are wanted; returns the requests that are finished."""
        arrays = views(message.arrays)
        for run, begin, end in self._segments(message.runs):
            if not run.kind.pulls:
                continue  # another worker of this host wanted them
            sinks, positions = run.data.sinks, run.data.plan.positions
            if run.data.kept is not None:
                numbers = message.ids[begin:end].tolist()
                run.data.kept.update(zip([positions[n] for n in numbers], arrays[begin:end], strict=True))
                continue
            for number, array in zip(message.ids[begin:end].tolist(), arrays[begin:end], strict=True):
                # The one copy of a pulled value on this side: from the transport's memory into the user's.
                sinks[positions[number]][...] = array
                self.traffic.copied_out += array.nbytes
        return self.answered(message)

    def refused(self, message: Refused) -> dict[int, int]:
        """The requests in which slices were refused, each with the server that keeps them."""
        return {run.request: run.data.plan.server for run, _, _ in self._segments(message.runs)}

    def pushed_stretches(self, runs: U32) -> list[tuple[int, int]]:
        """The stretches of an answer that belong to pushes."""
        return [(begin, end) for run, begin, end in self._segments(runs) if run.kind.pushes]

    def answered(self, message: Values | Counted | Refused) -> list[int]:
        """These slices of these runs have their answer; returns the requests that are finished."""
        if not isinstance(message, Refused):
            self.slices.saw(message.ids, message.versions)
        finished = []
        for run, begin, end in self._segments(message.runs):
            if run.kind.pushes:
                self.slices.regain(message.ids[begin:end])
                for freed in self.slices.counted(message.ids[begin:end]):
                    self._leave(freed)
            run.left -= end - begin
            if run.left == 0:
                del self._runs[run.number]
                self._runs_left[run.request] -= 1
                if not self._runs_left[run.request]:
                    del self._runs_left[run.request]
                    finished.append(run.request)
        return finished

    def awaited_servers(self, request: int) -> Sequence[int]:
        """The ranks of the servers that have not answered a request."""
        return sorted({run.data.plan.server for run in self._runs.values() if run.request == request})

    @property
    def everything_arrived(self) -> bool:
        """Whether all that was ever submitted has been received by its server."""
        waiting = self._flying_messages or self.slices.has_lines or self._detours
        return not waiting and all(outbox.is_empty for outbox in self._outboxes.values())

    def clear(self) -> None:
        """Forget everything: nobody will answer any more."""
        self._runs.clear()
        self._runs_left.clear()
        self._outboxes.clear()
        self._detours.clear()

    def validate(self) -> None:
        """Check every invariant."""
        self.slices.validate()
        for run in self._runs.values():
            assert run.request in self._runs_left, "a run belongs to a transfer that is not finished"
            assert 0 < run.left <= len(run.data.plan.ids)
        for outbox in self._outboxes.values():
            assert outbox.flying_bytes >= 0

    def _segments(self, runs: U32) -> Iterator[tuple[Run, int, int]]:
        """The stretches of an answer that belong to one run that still waits: (run, begin, end)."""
        for begin, end in stretches(runs):
            run = self._runs.get(int(runs[begin]))
            if run is not None:
                yield run, begin, end
