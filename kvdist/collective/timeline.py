"""What the operations of a rank did when, in a file that Perfetto and ``chrome://tracing`` open.

A thread renews the file now and then, each time a whole one, so that there is a valid one however the process ends. The
trace is bounded: it keeps its newest events. Rank 0 writes where it is told; any other rank puts its number before the
ending, as in ``timeline.rank1.json``, so that all may be told the same.

Events have Horovod's names: ``QUEUE``, until the group's thread has come to the operation; ``NEGOTIATE_ALLREDUCE``,
until all ranks are known to be at it; ``ALLREDUCE``, until it is done. ``CYCLE_START`` marks when the thread had done
all there was.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from kvdist.runtime.trace import Trace, TraceCopy, TraceFiles, now_ns, require_writable

LOG = logging.getLogger("kvdist")

EVENTS_MAX = 200_000
PERIOD_S = 1.0
REST = 20
"""How many times as long as it took to renew the file it is then left alone."""


class Timeline:
    """Notes nothing: what a group has while nobody wants a timeline."""

    def now(self) -> int:
        """The time, in nanoseconds, or 0 where it is not needed."""
        return 0

    def queued(self, kind: str, name: str, since_ns: int) -> int:
        """The group's thread has come to an operation that was called then. Returns the time, as `now`."""
        return 0

    def negotiated(self, kind: str, name: str, since_ns: int) -> int:
        """All ranks are known to be at it. Returns the time, as `now`."""
        return 0

    def finished(self, kind: str, name: str, since_ns: int) -> None:
        """It is done."""

    def mark_cycle(self) -> None:
        """The thread has done all there was."""


NO_TIMELINE = Timeline()


class FileTimeline(Timeline):
    """Notes in a file.

    Args:
        path: of rank 0's file.
        rank: this one.
        marks_cycles: whether to mark where the thread has done all there was.

    Raises:
        OSError: nothing can be written there.
    """

    def __init__(self, path: str, rank: int, marks_cycles: bool = False) -> None:
        self.path = _of_rank(Path(path).absolute(), rank)
        require_writable(self.path)
        self._process = f"rank {rank}"
        self._marks_cycles = marks_cycles
        self._trace = Trace(EVENTS_MAX)
        self._files = TraceFiles()
        self._written: int | None = None
        self._stopped = threading.Event()
        self._renew()
        self._thread = threading.Thread(target=self._run, name="kvdist-timeline", daemon=True)
        self._thread.start()

    def now(self) -> int:
        return now_ns()

    def queued(self, kind: str, name: str, since_ns: int) -> int:
        return self._add("QUEUE", kind, name, since_ns)

    def negotiated(self, kind: str, name: str, since_ns: int) -> int:
        return self._add(f"NEGOTIATE_{_label(kind)}", kind, name, since_ns)

    def finished(self, kind: str, name: str, since_ns: int) -> None:
        self._add(_label(kind), kind, name, since_ns)

    def mark_cycle(self) -> None:
        if self._marks_cycles:
            self._trace.add("CYCLE_START", "cycle", now_ns(), {})

    def stop(self) -> None:
        """Write the last of it and end the thread; a second call does nothing."""
        self._stopped.set()
        self._thread.join()

    def _add(self, label: str, kind: str, name: str, since_ns: int) -> int:
        # Operations that were called before the timeline began have no time.
        self._trace.add(label, kind, since_ns or now_ns(), {"name": name} if name else {}, overlaps=True)
        return now_ns()

    def _run(self) -> None:
        rest_s = PERIOD_S
        while not self._stopped.wait(rest_s):
            rest_s = max(PERIOD_S, REST * self._renew())
        self._renew()

    def _renew(self) -> float:
        """Write the file anew if there is anything new; how many seconds that took."""
        begun_ns, snapshot = now_ns(), self._trace.snapshot()
        if snapshot.last != self._written:
            try:
                self._files.put(TraceCopy(self.path, 1, snapshot, self._process, {}))
                self._written = snapshot.last
            except OSError as error:
                LOG.warning("the timeline cannot be written to %s: %s", self.path, error)
        return (now_ns() - begun_ns) / 1e9


def _label(kind: str) -> str:
    return kind.upper().replace(" ", "_")


def _of_rank(path: Path, rank: int) -> Path:
    return path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
