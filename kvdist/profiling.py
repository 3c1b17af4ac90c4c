"""`Profiler`: traces one node into one file, from `start` to `dump`; by a call, or by a command of a worker.

While it runs, a thread renews the file now and then, each time a whole one. So however the process ends there is a
valid file, in which at most the last moments are missing. Renewing takes at most a twentieth of one processor.
"""

from __future__ import annotations

import atexit
import json
import logging
import math
import os
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvdist.core.rounds import Rounds
from kvdist.core.server import Server
from kvdist.errors import KvdistError
from kvdist.node import Node
from kvdist.nodes import UNRANKED
from kvdist.protocol.commands import HEAD_OF_USERS_MAX
from kvdist.trace import EVENTS_MAX, Trace, now_ns, write
from kvdist.tracing import NodeTrace, TracedRounds
from kvdist.version import __version__

LOG = logging.getLogger("kvdist")

PROFILER_HEAD = HEAD_OF_USERS_MAX + 1
"""The number of the command that controls the profiler of a server."""
REST = 20
"""How many times as long as it took to renew the file it is then left alone."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class TraceSettings:
    """Where a trace goes and how large it becomes.

    Raises (on construction):
        ValueError: a number is out of range, or the name is empty.
    """

    filename: str = "profile.json"
    events_max: int = 100_000
    dump_period_s: float = 1.0

    def __post_init__(self) -> None:
        if not self.filename:
            raise ValueError("the file name of a trace is empty")
        if not 1 <= self.events_max <= EVENTS_MAX:
            raise ValueError(f"a trace keeps 1 to {EVENTS_MAX} events, not {self.events_max}")
        if not (math.isfinite(self.dump_period_s) and self.dump_period_s > 0):
            raise ValueError(f"the time between two dumps is {self.dump_period_s}; it must be a positive number of s")

    def as_command(self) -> str:
        """The body of the command that gives these to a server."""
        return json.dumps({"do": "set_config", **vars(self)})


def require_plain(filename: str) -> None:
    """Refuse a name that could lead out of the directory that whoever started the server chose.

    Raises:
        ValueError: it is anything but letters, digits, dots, dashes and underlines.
    """
    if not _PLAIN_NAME.fullmatch(filename) or filename in (".", ".."):
        raise ValueError(
            f"{filename[:80]!r} cannot be the file name of a server's trace: it has 1 to 64 of the characters A-Z a-z"
            " 0-9 . _ - and no directory; KVDIST_PROFILE_DIR of the server chooses where it lies"
        )


class Profiler:
    """Traces one node. Every method may be called again, and does nothing then.

    Args:
        find_folder: says where files lie whose names have no directory; asked when a trace begins.
    """

    def __init__(self, find_folder: Callable[[], Path]) -> None:
        self._find_folder = find_folder
        self._folder = Path()
        self._settings = TraceSettings()
        self._node: Node | None = None
        self._trace: Trace | None = None
        self._records = False
        # Reentrant, because Ctrl-C may interrupt the thread that holds it, whose handler may dump.
        self._lock = threading.RLock()
        self._ended = threading.Event()
        """Set when the thread that renews the file shall end."""
        self._thread: threading.Thread | None = None
        self._written = (-2, "")
        """The newest event in the file, and its name."""
        self._pid = os.getpid()

    def attach(self, node: Node) -> None:
        """Trace this node from now on, at once if the profiler runs already."""
        with self._lock:
            self._node = node
            if self._records:
                self._engage()

    def set_config(self, settings: TraceSettings) -> None:
        """Choose where the next trace goes.

        Raises:
            KvdistError: one is being made, with other settings.
        """
        with self._lock:
            if settings == self._settings:
                return
            if self._trace is not None:
                raise KvdistError("a trace is being made: finish it with profiler.dump() before it is configured anew")
            self._settings = settings

    def start(self) -> None:
        """Record from now on, into the trace that there is, if it has not been finished.

        Raises:
            KvdistError: its file cannot be written.
        """
        with self._lock:
            if self._records:
                return
            fresh = self._trace is None
            self._trace = self._trace or Trace(self._settings.events_max)
            if fresh:
                self._written = (-2, "")
                self._folder, self._pid = self._find_folder(), os.getpid()
                try:
                    self._write()
                except KvdistError:
                    self._trace = None
                    raise
                atexit.register(self._at_exit)
            self._records = True
            self._engage()
            if self._thread is None:
                self._ended = threading.Event()
                self._thread = threading.Thread(
                    target=self._renew, args=(self._ended,), name="kvdist-profiler", daemon=True
                )
                self._thread.start()

    def stop(self) -> None:
        """Record no more, and write what there is."""
        self.pause()
        with self._lock:
            self._end_thread()
            self._write()

    def pause(self) -> None:
        """Record no more until `resume`."""
        with self._lock:
            self._records = False
            if self._node is not None:
                self._node.trace = None
                if isinstance(self._node.machine, Server):
                    self._node.machine.table.rounds = Rounds()

    def resume(self) -> None:
        """Record again, if a trace is being made."""
        with self._lock:
            if self._trace is not None:
                self.start()

    def dump(self, finished: bool) -> Path | None:
        """Write what there is, and return where; None if no node has been traced.

        Args:
            finished: end the trace; another `start` makes a new one.

        Raises:
            KvdistError: it cannot be written. What was there is there still.
        """
        with self._lock:
            path = self._write()
            if finished:
                self.pause()
                self._end_thread()
                self._trace = None
                atexit.unregister(self._at_exit)
            return path

    def perform(self, head: int, body: str, rank: int) -> None:
        """The handler of the command by which a worker controls this profiler; see `Handler`.

        Raises:
            ValueError: the body is none of the calls that there are, or the file name is not plain.
        """
        match json.loads(body):
            case {"do": "set_config", "filename": str(name), "events_max": int(most), "dump_period_s": float(period)}:
                require_plain(name)
                self.set_config(TraceSettings(name, most, period))
            case {"do": "dump", "finished": bool(finished)}:
                self.dump(finished)
            case {"do": "start"}:
                self.start()
            case {"do": "stop"}:
                self.stop()
            case {"do": "pause"}:
                self.pause()
            case {"do": "resume"}:
                self.resume()
            case _:
                raise ValueError(f"the profiler knows no call {body[:80]!r}")

    def _engage(self) -> None:
        if self._node is not None and self._trace is not None:
            self._node.trace = NodeTrace(self._trace)
            if isinstance(self._node.machine, Server):
                self._node.machine.table.rounds = TracedRounds(self._trace)

    def _end_thread(self) -> None:
        self._ended.set()
        self._thread = None

    def _renew(self, ended: threading.Event) -> None:
        """The thread's work: write the file again and again."""
        pause_s, complaint = self._settings.dump_period_s, ""
        while not ended.wait(pause_s):
            began = now_ns()
            try:
                self._write()
            except KvdistError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    LOG.warning("%s", error)
            pause_s = max(self._settings.dump_period_s, REST * (now_ns() - began) / 1e9)

    def _at_exit(self) -> None:
        with self._lock:
            self._end_thread()
            try:
                self._write()
            except KvdistError as error:
                LOG.warning("%s", error)

    def _write(self) -> Path | None:
        """Write the file, unless all that is known stands in it already."""
        with self._lock:
            node, trace = self._node, self._trace
            # A forked child has a copy of this, but the file is its parent's.
            if node is None or trace is None or node.machine.me.node.rank == UNRANKED or os.getpid() != self._pid:
                return None
            process = str(node.machine.me)
            named = self._folder / self._settings.filename
            path = named.with_name(f"{named.stem}.{process}{named.suffix}").absolute()
            state = (trace.last, str(path))
            if state != self._written:
                about = {"version": __version__, "host": socket.gethostname(), "clock": "time.monotonic_ns"}
                try:
                    write(path, trace.text(process, about))
                except OSError as error:
                    raise KvdistError(
                        f"the trace of {process} cannot be written to {path} ({error}); KVDIST_PROFILE_DIR and"
                        " profiler.set_config(filename=...) choose where it goes"
                    ) from error
                self._written = state
            return path
