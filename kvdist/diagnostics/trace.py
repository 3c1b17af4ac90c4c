"""Bounded traces of events with their times, and their files, which Perfetto and ``chrome://tracing`` open.

Rules:

* Memory is bounded: a trace keeps its newest events, and its file has the number of older events that were dropped.
* The file is a whole JSON text at every moment: it is written beside its path and renamed in a single step.
* The file at a path is the newest trace written to it, in any order of the writes. Only a trace with an event worth a
  file replaces a finished trace.
* Adding an event takes no lock, so any thread and any signal handler may add events.

Times come from `time.monotonic_ns`, which all processes of a Linux host share, so traces of a host fit together. Clocks
of different hosts are unrelated.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any

EVENTS_MAX = 1_000_000
"""Largest number of events that a trace may keep: about half a gigabyte."""

SPANS_PER_PIECE = 50
"""Spans that are converted without a pause for other threads: well under a millisecond of work."""

now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Span:
    """An event with a start and an end. `overlaps`: other spans of its thread may begin in it and end after it."""

    number: int
    name: str
    category: str
    begin_ns: int
    end_ns: int
    thread: int
    arguments: dict[str, Any]
    overlaps: bool


@dataclass(frozen=True, slots=True)
class TraceSnapshot:
    """The contents of a trace at a moment."""

    spans: deque[Span]
    threads: dict[int, str]
    events_max: int
    dropped: int
    tells: bool
    """Whether any event was worth a file."""

    @property
    def last(self) -> int:
        """Number of the newest span; -1 without spans."""
        return self.spans[-1].number if self.spans else -1

    def text(self, process: str, about: dict[str, Any]) -> Iterator[str]:
        """Yield the text of the file in pieces: an object of the trace event format, times in microseconds.

        Args:
            process: the name that viewers show, such as ``server-1``.
            about: further entries of the file's ``otherData``.
        """
        pid, rest = os.getpid(), iter(self.spans)
        said = {**about, "process": process, "events_max": self.events_max, "events_dropped": self.dropped}
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(said)},"traceEvents":[\n'
        yield json.dumps(_named(pid, 0, "process_name", process))
        for thread, name in self.threads.items():
            yield ",\n" + json.dumps(_named(pid, thread, "thread_name", name))
        while some := list(islice(rest, SPANS_PER_PIECE)):
            yield "".join(f",\n{event}" for span in some for event in _told(pid, span))
        yield "\n]}\n"


class Trace:
    """The newest spans of a process.

    Args:
        events_max: number of spans that are kept.
    """

    def __init__(self, events_max: int) -> None:
        self.events_max = events_max
        self._spans: deque[Span] = deque(maxlen=events_max)
        self._numbers = count()
        self._threads: dict[int, str] = {}
        self._dropped = 0
        """Spans dropped before the last change of `events_max`."""
        self._tells = False

    def add(
        self,
        name: str,
        category: str,
        begin_ns: int,
        arguments: dict[str, Any],
        *,
        overlaps: bool = False,
        tells: bool = True,
        end_ns: int = 0,
    ) -> None:
        """Add a span of the calling thread, from `begin_ns` to `end_ns` or now; `tells`: whether it is worth a file."""
        self._tells = self._tells or tells
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        number = next(self._numbers)
        self._spans.append(Span(number, name, category, begin_ns, end_ns or now_ns(), thread, arguments, overlaps))

    @property
    def last(self) -> int:
        """Number of the newest span; -1 without spans."""
        return self._spans[-1].number if self._spans else -1

    def keep(self, events_max: int) -> None:
        """Change the number of spans to keep. Spans that other threads add during the call may be missing."""
        self._dropped = self.snapshot().dropped
        dropped_now = max(0, len(self._spans) - events_max)
        self._spans = deque(self._spans.copy(), maxlen=events_max)
        self._dropped += dropped_now
        self.events_max = events_max

    def snapshot(self) -> TraceSnapshot:
        """Copy the trace: some ten milliseconds for a million spans."""
        tells, spans = self._tells, self._spans.copy()
        dropped = max(self._dropped, spans[0].number) if len(spans) == self.events_max else self._dropped
        return TraceSnapshot(spans, self._threads.copy(), self.events_max, dropped, tells)


@dataclass(frozen=True, slots=True)
class TraceCopy:
    """A snapshot on its way to a file."""

    path: Path
    trace_number: int
    """Number of the trace among those of its process, in the order in which they began."""
    snapshot: TraceSnapshot
    process: str
    about: dict[str, Any]

    @property
    def age(self) -> tuple[int, int]:
        """Number of the trace and of its newest span; newer copies have greater ages."""
        return self.trace_number, self.snapshot.last


class _Overtaken(Exception):
    """A newer copy was written to the path while this copy was being written."""


class TraceFiles:
    """The files of a process's traces. Any thread may write a copy; a signal handler also within another write."""

    def __init__(self) -> None:
        self._writing = threading.RLock()
        self._newest: dict[Path, tuple[int, int]] = {}
        """Path → age of the copy in its file."""
        self._finished: dict[Path, int] = {}
        """Path → number of the first trace that was finished in its file."""

    def put(self, copy: TraceCopy) -> None:
        """Write a copy, unless its file is newer, or is a finished trace and the copy has no event worth a file.

        Raises:
            OSError: the copy cannot be written; the file stays as it was.
        """
        with self._writing:
            older_finished = self._finished.get(copy.path, copy.trace_number) < copy.trace_number
            if self.has(copy.path, copy.age) or (older_finished and not copy.snapshot.tells):
                return
            with contextlib.suppress(_Overtaken):
                write(copy.path, self._pieces(copy))
                self._newest[copy.path] = copy.age

    def has(self, path: Path, age: tuple[int, int]) -> bool:
        """Return whether the file has a copy of this age or newer. Takes no lock."""
        return self._newest.get(path, (0, 0)) >= age

    def finish(self, path: Path, trace_number: int) -> None:
        """Record that a trace has ended, even if its last copy is still to be written. Takes no lock."""
        self._finished.setdefault(path, trace_number)

    def _pieces(self, copy: TraceCopy) -> Iterator[str]:
        yield from copy.snapshot.text(copy.process, copy.about)
        if self.has(copy.path, copy.age):
            raise _Overtaken


def write(path: Path, pieces: Iterable[str]) -> None:
    """Replace a file by a text, in a single step.

    Raises:
        OSError: the text could not be written; the file stays as it was.
    """
    with _name_beside(path) as beside:
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        os.replace(beside, path)


def require_writable(path: Path) -> None:
    """Refuse a path to which no file can be written, and leave its file as it is.

    Raises:
        OSError: no file can be written.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _name_beside(path) as beside, open(beside, "w", encoding="utf-8"):
        pass


@contextlib.contextmanager
def _name_beside(path: Path) -> Iterator[Path]:
    """Yield a path that no other write of this process uses. Its low number keeps leftovers of killed processes few."""
    with _naming:
        number = next(number for number in count() if (path, number) not in _names_taken)
        _names_taken.add((path, number))
    beside = path.with_name(f".{path.name}.{number}.part")
    try:
        yield beside
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
        _names_taken.discard((path, number))


_naming = threading.RLock()
_names_taken: set[tuple[Path, int]] = set()


def _named(pid: int, thread: int, what: str, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": thread, "ts": 0, "args": {"name": name}}


def _told(pid: int, span: Span) -> list[str]:
    """Convert a span to a complete event, or, if it overlaps, to a pair that viewers show on a separate line."""
    begin_us, end_us = span.begin_ns / 1000, span.end_ns / 1000
    event = {"name": span.name, "cat": span.category, "pid": pid, "tid": span.thread, "ts": begin_us}
    if not span.overlaps:
        return [json.dumps({**event, "ph": "X", "dur": end_us - begin_us, "args": span.arguments})]
    begin = {**event, "ph": "b", "id": span.number, "args": span.arguments}
    return [json.dumps(begin), json.dumps({**event, "ph": "e", "id": span.number, "ts": end_us, "args": {}})]
