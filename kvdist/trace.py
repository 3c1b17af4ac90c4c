"""A bounded record of what happened when, and its file, which Perfetto and ``chrome://tracing`` open.

Rules that hold here:

* Memory is bounded: a trace keeps its newest events, and its file says how many older ones are gone.
* The file is a whole JSON text at every moment: it is written beside its place and then put there in one step.
* Noting an event takes no lock, so any thread may, a signal handler too.

Times are those of `time.monotonic_ns`, which on Linux all processes of a host share: their traces fit together as they
are. Between hosts the clocks have nothing in common.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
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

    def add(
        self, name: str, category: str, begin_ns: int, arguments: dict[str, Any], *, overlaps: bool = False
    ) -> None:
        """Note what began then and ends now, on the calling thread."""
        thread = threading.get_native_id()
        if thread not in self._threads:
            self._threads[thread] = threading.current_thread().name
        number = next(self._numbers)
        self._spans.append(Span(number, name, category, begin_ns, now_ns(), thread, arguments, overlaps))

    @property
    def last(self) -> int:
        """The number of the newest span; -1 if there is none."""
        return self._spans[-1].number if self._spans else -1

    def text(self, process: str, about: dict[str, Any]) -> Iterator[str]:
        """What the file holds, piece by piece: an object of the trace event format, times in microseconds.

        Args:
            process: the name that viewers show, such as ``server-1``.
            about: what else the file says of itself.
        """
        pid, spans = os.getpid(), list(self._spans.copy())
        dropped = spans[0].number if len(spans) == self.events_max else 0
        said = {**about, "process": process, "events_max": self.events_max, "events_dropped": dropped}
        yield f'{{"displayTimeUnit":"ms","otherData":{json.dumps(said)},"traceEvents":[\n'
        yield json.dumps(_named(pid, 0, "process_name", process))
        for thread, name in self._threads.copy().items():
            yield ",\n" + json.dumps(_named(pid, thread, "thread_name", name))
        for start in range(0, len(spans), SPANS_PER_PIECE):
            some = spans[start : start + SPANS_PER_PIECE]
            yield "".join(f",\n{event}" for span in some for event in _told(pid, span))
        yield "\n]}\n"


def write(path: Path, pieces: Iterable[str]) -> None:
    """Put a text in the place of what is there, in one step.

    Raises:
        OSError: it could not be written; what was there is there still.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "w", encoding="utf-8") as file:
            file.writelines(pieces)
        os.replace(beside, path)
    except BaseException:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise


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
