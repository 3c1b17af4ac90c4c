"""A bounded record of what happened when, and its file, which Perfetto and ``chrome://tracing`` open.

Rules that hold here:

* Memory is bounded: a trace keeps its newest events, and its file says how many older ones are gone.
* The file is a whole JSON text at every moment: it is written beside its place and then put there in one step.
* In a place stands the newest trace that was brought there, in any order; and a finished one gives way only to
  a trace that has something to tell.
* Noting an event takes no lock, so any thread may, a signal handler too.

Times are those of `time.monotonic_ns`, which on Linux all processes of a host share: their traces fit together as they
are. Between hosts the clocks have nothing in common.
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
"""The most that a trace may be told to keep: about half a gigabyte."""

SPANS_PER_PIECE = 50
"""Made without a pause in which another thread could run: well under a millisecond of work."""

now_ns = time.monotonic_ns


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time. `overlaps`: others on the same thread may begin in it and end after it."""

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
    """What a trace held at one moment."""

    spans: deque[Span]
    threads: dict[int, str]
    events_max: int
    dropped: int
    tells: bool
    """Whether anything happened that is worth a file."""

    @property
    def last(self) -> int:
        """The number of the newest span; -1 if there is none."""
        return self.spans[-1].number if self.spans else -1

    def text(self, process: str, about: dict[str, Any]) -> Iterator[str]:
        """What the file holds, piece by piece: an object of the trace event format, times in microseconds.

        Args:
            process: the name that viewers show, such as ``server-1``.
            about: what else the file says of itself.
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
    """The newest spans of one process.

    Args:
        events_max: how many are kept.
    """

    def __init__(self, events_max: int) -> None:
        self.events_max = events_max
        self._spans: deque[Span] = deque(maxlen=events_max)
        self._numbers = count()
        self._threads: dict[int, str] = {}
        self._dropped = 0
        """How many were gone when the number to keep last changed."""
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
        """Note what began then and ends now, or at `end_ns`, on the calling thread; `tells`: it is worth a file."""
        self._tells = self._tells or tells
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        number = next(self._numbers)
        self._spans.append(Span(number, name, category, begin_ns, end_ns or now_ns(), thread, arguments, overlaps))

    @property
    def last(self) -> int:
        """The number of the newest span; -1 if there is none."""
        return self._spans[-1].number if self._spans else -1

    def keep(self, events_max: int) -> None:
        """Keep this many from now on. What another thread notes at this very moment may be missing."""
        self._dropped = self.snapshot().dropped
        dropped_now = max(0, len(self._spans) - events_max)
        self._spans = deque(self._spans.copy(), maxlen=events_max)
        self._dropped += dropped_now
        self.events_max = events_max

    def snapshot(self) -> TraceSnapshot:
        """What there is now: some ten milliseconds for a million spans."""
        tells, spans = self._tells, self._spans.copy()
        dropped = max(self._dropped, spans[0].number) if len(spans) == self.events_max else self._dropped
        return TraceSnapshot(spans, self._threads.copy(), self.events_max, dropped, tells)


@dataclass(frozen=True, slots=True)
class TraceCopy:
    """A snapshot on its way to a file."""

    path: Path
    trace_number: int
    """Traces of one process are numbered, in the order in which they began."""
    snapshot: TraceSnapshot
    process: str
    about: dict[str, Any]

    @property
    def age(self) -> tuple[int, int]:
        """Grows with time."""
        return self.trace_number, self.snapshot.last


class _Overtaken(Exception):
    """While it was being written something newer has taken its place."""


class TraceFiles:
    """The files of one process's traces. Any thread may bring a copy, also within another: a signal handler may."""

    def __init__(self) -> None:
        self._writing = threading.RLock()
        self._newest: dict[Path, tuple[int, int]] = {}
        """Place → the age of what stands there."""
        self._finished: dict[Path, int] = {}
        """Place → the number of the first trace that was finished there."""

    def put(self, copy: TraceCopy) -> None:
        """Put a copy in its place, unless something newer is there, or it would replace a finished trace by nothing.

        Raises:
            OSError: it cannot be written; what was there is there still.
        """
        with self._writing:
            older_finished = self._finished.get(copy.path, copy.trace_number) < copy.trace_number
            if self.has(copy.path, copy.age) or (older_finished and not copy.snapshot.tells):
                return
            with contextlib.suppress(_Overtaken):
                write(copy.path, self._pieces(copy))
                self._newest[copy.path] = copy.age

    def has(self, path: Path, age: tuple[int, int]) -> bool:
        """Whether this or something newer stands there. Takes no lock."""
        return self._newest.get(path, (0, 0)) >= age

    def finish(self, path: Path, trace_number: int) -> None:
        """This trace is at its end, also if its last copy is still to come. Takes no lock."""
        self._finished.setdefault(path, trace_number)

    def _pieces(self, copy: TraceCopy) -> Iterator[str]:
        yield from copy.snapshot.text(copy.process, copy.about)
        if self.has(copy.path, copy.age):
            raise _Overtaken


def write(path: Path, pieces: Iterable[str]) -> None:
    """Put a text in the place of what is there, in one step.

    Raises:
        OSError: it could not be written; what was there is there still.
    """
    with _name_beside(path) as beside:
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        os.replace(beside, path)


def require_writable(path: Path) -> None:
    """Refuse a place where nothing can be put, and leave what is there as it is.

    Raises:
        OSError: nothing can.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    with _name_beside(path) as beside, open(beside, "w", encoding="utf-8"):
        pass


@contextlib.contextmanager
def _name_beside(path: Path) -> Iterator[Path]:
    """A name that no other write of this process has at this time. The lowest, so that killed processes leave few."""
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
    """One complete event; for what overlaps a pair that viewers put on a line of its own."""
    begin_us, end_us = span.begin_ns / 1000, span.end_ns / 1000
    event = {"name": span.name, "cat": span.category, "pid": pid, "tid": span.thread, "ts": begin_us}
    if not span.overlaps:
        return [json.dumps({**event, "ph": "X", "dur": end_us - begin_us, "args": span.arguments})]
    begin = {**event, "ph": "b", "id": span.number, "args": span.arguments}
    return [json.dumps(begin), json.dumps({**event, "ph": "e", "id": span.number, "ts": end_us, "args": {}})]
