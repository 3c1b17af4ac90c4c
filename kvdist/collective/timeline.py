"""A timeline of the operations of a rank, which Perfetto and ``chrome://tracing`` open.

A thread rewrites the whole file from time to time, so a valid file exists however the process ends. The trace is
bounded and keeps its newest events. Rank 0 writes to `path` itself; other ranks insert their number before the suffix,
as in ``timeline.rank1.json``, so all ranks may use the same path.

Events have Horovod's names, and operations too, as in ``allreduce.loss``: ``QUEUE`` until the group's thread takes the
operation, ``NEGOTIATE_ALLREDUCE`` until all ranks agree on it, ``ALLREDUCE`` until it is done. ``CYCLE_START`` marks
when the queue was empty.
"""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from kvdist.config.paths import expanded
from kvdist.diagnostics.trace import Trace, TraceCopy, TraceFiles, now_ns, require_writable

LOG = logging.getLogger("kvdist")

EVENTS_MAX = 200_000
PERIOD_S = 0.05
PAUSE_RATIO = 20
"""The pause after each rewrite of the file, in multiples of the time that the rewrite took."""


class Timeline:
    """Records nothing: the timeline of a group without a file."""

    def now(self) -> int:
        """The time, in nanoseconds, or 0 where it is not needed."""
        return 0

    def negotiated(self, kind: str, name: str, called_ns: int, asked_ns: int) -> int:
        """Record that all ranks agree on an operation that the group's thread took at `asked_ns`; return `now`."""
        return 0

    def finished(self, kind: str, name: str, since_ns: int) -> None:
        """Record that the operation is done."""

    def mark_cycle(self) -> None:
        """Record that the queue is empty."""


NO_TIMELINE = Timeline()


class FileTimeline(Timeline):
    """Records to a file.

    Args:
        path: path of rank 0's file.
        rank: rank of this process.
        marks_cycles: whether to mark when the queue is empty.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: str, rank: int, marks_cycles: bool = False) -> None:
        self.path = _of_rank(Path(expanded(path)).absolute(), rank)
        require_writable(self.path)
        self._process = f"rank {rank}"
        self._about = {"start_time_since_epoch_in_micros": time.time_ns() // 1000}
        self._marks_cycles = marks_cycles
        self._trace = Trace(EVENTS_MAX)
        self._files = TraceFiles()
        self._written: int | None = None
        self._stopped = threading.Event()
        self._rewrite()
        self._thread = threading.Thread(target=self._run, name="kvdist-timeline", daemon=True)
        self._thread.start()

    def now(self) -> int:
        return now_ns()

    def negotiated(self, kind: str, name: str, called_ns: int, asked_ns: int) -> int:
        self._add("QUEUE", kind, name, called_ns, asked_ns)
        return self._add(f"NEGOTIATE_{_label(kind)}", kind, name, asked_ns)

    def finished(self, kind: str, name: str, since_ns: int) -> None:
        self._add(_label(kind), kind, name, since_ns)

    def mark_cycle(self) -> None:
        if self._marks_cycles:
            self._trace.add("CYCLE_START", "cycle", now_ns(), {})

    def stop(self) -> None:
        """Write the rest and end the thread; a second call does nothing."""
        self._stopped.set()
        self._thread.join()

    def _add(self, label: str, kind: str, name: str, since_ns: int, end_ns: int = 0) -> int:
        about = {"name": f"{_verb(kind)}.{name or 'noname'}"}
        # Operations that were called before the timeline began have no time.
        self._trace.add(label, kind, since_ns or end_ns or now_ns(), about, overlaps=True, end_ns=end_ns)
        return now_ns()

    def _run(self) -> None:
        rest_s = PERIOD_S
        while not self._stopped.wait(rest_s):
            rest_s = max(PERIOD_S, PAUSE_RATIO * self._rewrite())
        self._rewrite()

    def _rewrite(self) -> float:
        """Rewrite the file if there are new events; return the seconds that it took."""
        begun_ns, snapshot = now_ns(), self._trace.snapshot()
        if snapshot.last != self._written:
            try:
                self._files.put(TraceCopy(self.path, 1, snapshot, self._process, self._about))
                self._written = snapshot.last
            except OSError as error:
                LOG.warning("the timeline cannot be written to %s: %s", self.path, error)
        return (now_ns() - begun_ns) / 1e9


def _verb(kind: str) -> str:
    """Horovod's word for an operation: members of a group and objects have that of the operation which transfers
    them."""
    return kind.removeprefix("grouped ").removesuffix("_object").replace(" ", "_")


def _label(kind: str) -> str:
    return _verb(kind).upper()


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
