"""`Ring`: the last events of a node, which are inputs of its machine and their answers, and the file for them.

Events are kept as entries of `record`, without values. The file, a *dump*, is written when the process fails, gets
SIGTERM, has an uncaught exception, or explains a long wait; a later dump replaces an earlier dump. `why` reads it. A
process that is killed writes no dump.

A dump is a text of lines. The first line is a JSON object about the process, each other line an entry of the record.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from kvdist import errors
from kvdist.config.addresses import host_name
from kvdist.core import machine as fx
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server.server import Server
from kvdist.core.worker import requests as req
from kvdist.core.worker.pending import Threads
from kvdist.core.worker.worker import Worker
from kvdist.diagnostics.record import (
    Asked,
    Beginning,
    Did,
    Entry,
    Explained,
    Observed,
    Received,
    Sent,
    ThreadsSaid,
    Ticked,
    Writer,
    ids_of,
    recorded,
    without_values,
    words_of,
)
from kvdist.diagnostics.trace import write
from kvdist.nodes import Member
from kvdist.protocol import messages as msg
from kvdist.runtime.node import Recorder
from kvdist.runtime.waits import OWN_THREADS
from kvdist.transport.base import Buffer
from kvdist.version import __version__

LOG = logging.getLogger("kvdist")

HEADERS_BYTES_MAX = 32 << 20
"""Most bytes of the headers of all entries, so that long lists of keys do not fill the memory."""
FRAMES_MAX = 12
"""Number of the innermost calls of a thread that a dump has."""


class Ring(Recorder):
    """The last events of a node, since the creation of its machine.

    Args:
        machine: the machine, before its first input.
        job: tag of the job.
        events_max: most events that are kept.
        folder: folder of the dump; None to write no dump.
        clock: monotonic seconds.
        is_revived: whether the machine had inputs in an earlier process, which are not in the dump.
    """

    def __init__(
        self,
        machine: fx.Machine,
        job: int,
        events_max: int,
        folder: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        is_revived: bool = False,
    ) -> None:
        self.beginning = beginning_of(machine, job)
        self.entries: deque[Entry] = deque()
        self.dropped = int(is_revived)
        """Number of entries that were dropped, at least."""
        self._machine = machine
        self._events_max = events_max
        self._folder = folder
        self._clock = clock
        self._owner = os.getpid()
        self._written: Path | None = None
        self._headers_bytes = 0
        self._works: dict[int, object] = {}
        """Number → token of each work with the disk that has not ended."""
        self._next_work = 0
        self._wait = ""
        """Explanation of the wait of this process when its end began; see `_note_wait`."""
        self._calls: dict[str, list[str]] = {}
        """Thread of the user → its calls when the end of this process began."""
        self._failure_said = ""
        """The failure with which the user's program left."""
        if isinstance(machine, Worker):
            machine.watch(_HeardThreads(machine._threads, self))

    # The events of the node.

    def received(self, now: float, frames: Sequence[Buffer], message: msg.Message) -> None:
        """Keep a message that came."""
        if type(message) is msg.Abort:
            self._note_wait()
        envelope, header, *payload = frames
        nbytes = sum([memoryview(frame).nbytes for frame in payload]) if payload else -1
        entry = Received(now, bytes(envelope), bytes(header), nbytes, ids_of(message) if payload else ())
        self._keep(entry, len(entry.header))

    def observed(self, now: float, event: fx.Event) -> None:
        """Keep an event other than a message."""
        work = -1
        if isinstance(event, fx.Persisted):
            work = next(number for number, token in self._works.items() if token is event.token)
            del self._works[work]
            event = without_values(event)
        self._keep(Observed(now, event, work))

    def ticked(self, now: float) -> None:
        """Keep that a timer of the machine expired."""
        self._keep(Ticked(now))

    def asked(self, now: float, requests: Sequence[req.Request]) -> None:
        """Keep requests of the user."""
        for request in requests:
            if isinstance(request, req.Leave):
                self._failure_said = request.failure
                self._note_wait()
        self._keep(Asked(now, tuple(map(recorded, requests))))

    def threads_said(self, question: str, answer: Any) -> Any:
        """Keep an answer about the user's threads to the machine, and return it."""
        self._keep(ThreadsSaid(question, answer))
        return answer

    def sent(self, to: Member, frames: Sequence[Buffer]) -> None:
        """Keep a message of the machine; no frames if it could not leave."""
        entry = Sent(to, bytes(frames[0]), bytes(frames[1])) if frames else Sent(to)
        self._keep(entry, len(entry.header))

    def did(self, effect: fx.Effect) -> None:
        """Keep an effect that sends no message."""
        work = self._next_work
        if isinstance(effect, fx.Persist):
            self._works[work] = effect.token
            self._next_work += 1
        self._keep(Did(words_of(effect, work)))

    def explained(self, now: float, text: str) -> None:
        """Keep the explanation of a long wait, and write the dump."""
        self._keep(Explained(now, text))
        self.write("a long wait")

    def ended(self, failure: Exception | None) -> None:
        """Write the dump if the node has failed or was interrupted; else remove the dump of a wait that is over."""
        if failure is not None:
            self.write(f"{type(failure).__name__}: {failure}", failure)
        elif self._failure_said:
            self.write(self._failure_said)
        elif isinstance(sys.exc_info()[1], KeyboardInterrupt):
            self.write(f"ended by signal {signal.SIGINT.value} ({signal.SIGINT.name})")
        elif self._written is not None:
            self._written.unlink(missing_ok=True)  # the dump of a wait that is over

    def _note_wait(self) -> None:
        """Note the waits of machine and threads as the end begins: soon both have moved on."""
        if not self._calls:
            self._wait, self._calls = self._explained(), _calls_of_user()

    def _keep(self, entry: Entry, nbytes: int = 0) -> None:
        entries = self.entries
        entries.append(entry)
        self._headers_bytes += nbytes
        while len(entries) > self._events_max or self._headers_bytes > HEADERS_BYTES_MAX:
            oldest = entries.popleft()
            self.dropped += 1
            if isinstance(oldest, Received | Sent):
                self._headers_bytes -= len(oldest.header)

    # The dump.

    def write(self, reason: str, failure: Exception | None = None) -> None:
        """Write the dump into its folder; log a warning if that fails.

        Args:
            reason: why the dump is written now, for people.
            failure: why the node stopped.
        """
        if self._folder is None or os.getpid() != self._owner:  # a forked child writes no dump
            return
        path = self._folder / f"{self._machine.me}.{self._owner}.dump"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write(path, self._lines(reason, failure))
        except Exception as error:  # noqa: BLE001  # a job never fails for the lack of a dump
            LOG.warning("%s cannot write its dump to %s: %s", self._machine.me, path, error)
        else:
            if self._written is not None and self._written != path:
                self._written.unlink(missing_ok=True)  # the dump of a wait, before this process had a rank
            self._written = path

    def _lines(self, reason: str, failure: Exception | None) -> Iterator[str]:
        writer, entries = Writer(), self.entries.copy()
        about = {
            "kvdist": __version__,
            "process": str(self._machine.me),
            "host": host_name(),
            "pid": os.getpid(),
            "reason": reason,
            "failure": None if failure is None else _told(failure),
            "wait": self._wait or self._explained(),
            "wall": time.time(),
            "monotonic": self._clock(),
            "step": self._machine.step,
            "dropped": self.dropped,
            "threads": {**(self._calls or _calls_of_user()), **_uncaught()},
            "beginning": writer.plain(self.beginning),
        }
        yield json.dumps(about) + "\n"
        for entry in entries:
            yield json.dumps(writer.plain(entry)) + "\n"

    def _explained(self) -> str:
        try:
            return self._machine.explain(self._clock()) or ""
        except RuntimeError:  # a signal handler reads the machine from another thread, while it changes
            return ""


class _HeardThreads:
    """The user's threads; their answers to the machine are kept."""

    def __init__(self, threads: Threads, ring: Ring) -> None:
        self._threads = threads
        self._ring = ring

    def blocked_since(self) -> float | None:
        """See `kvdist.core.worker.pending.Threads`, for all four methods."""
        return self._ring.threads_said("blocked_since", self._threads.blocked_since())  # type: ignore[no-any-return]

    def may_act(self, now: float) -> str:
        """Return the threads that may act; not kept, as only explanations need them, which are not answers."""
        return self._threads.may_act(now)

    def longest_wait_since(self) -> float | None:
        """Keep and return the start of the longest wait."""
        return self._ring.threads_said(  # type: ignore[no-any-return]
            "longest_wait_since", self._threads.longest_wait_since()
        )

    def room_wait(self) -> str:
        """Keep and return the wait of a push for room."""
        return self._ring.threads_said("room_wait", self._threads.room_wait())  # type: ignore[no-any-return]


def beginning_of(machine: fx.Machine, job: int) -> Beginning:
    """Return the arguments with which a machine was created; only before its first input."""
    if isinstance(machine, Scheduler):
        first = machine.membership._next_incarnation
        return Beginning(machine._started_at, job, machine.limits, machine.config, first)
    assert isinstance(machine, Server | Worker)
    joining = machine.joining
    commands = tuple(sorted(machine._handlers)) if isinstance(machine, Server) else ()
    aggregation = machine.aggregation if isinstance(machine, Worker) else None
    local_reduce = "" if aggregation is None else aggregation._setting
    replicas = machine.REPLICAS if isinstance(machine, Server) else 0
    made = (None, 0, joining.introduction, commands, local_reduce)
    return Beginning(joining.started_at, job, machine.limits, *made, replicas=replicas)


def _told(failure: Exception) -> dict[str, Any]:
    about: dict[str, Any] = {"type": type(failure).__name__, "text": str(failure)}
    if isinstance(failure, errors.PeerLostError):
        about |= {"node": failure.node, "host": failure.host, "cause": failure.cause, "step": failure.step}
    return about


def _calls_of_user() -> dict[str, list[str]]:
    """Return thread of the user → its calls, the innermost first."""
    frames = sys._current_frames()
    return {
        thread.name: _calls(frames.get(thread.ident or 0))
        for thread in threading.enumerate()
        if thread.name not in OWN_THREADS
    }


def _calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < FRAMES_MAX:
        calls.append(_place(frame, frame.f_lineno))
        frame = frame.f_back
    return calls


def _uncaught() -> dict[str, list[str]]:
    """Return the main thread → the calls that an uncaught exception went through, the innermost first; or nothing."""
    trace: TracebackType | None = getattr(sys, "last_traceback", None)
    calls = (
        [] if trace is None else [_place(frame, line) for frame, line in traceback.walk_tb(trace)][::-1][:FRAMES_MAX]
    )
    return {threading.main_thread().name: calls} if calls else {}


def _place(frame: FrameType, line: int) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{line}" + ("" if code.co_name == "<module>" else f" in {code.co_name}")


def write_at_exit(ring: Ring) -> None:
    """Write the dump when the interpreter ends by an exception."""

    def at_exit() -> None:
        error = getattr(sys, "last_value", None)
        if error is not None:
            ring._note_wait()
            ring.write(f"an uncaught {type(error).__name__}: {error}")

    atexit.register(at_exit)


def write_when_terminated(ring: Ring) -> None:
    """Let SIGTERM write the dump before it ends this process, or before the program's handler runs.

    Does nothing outside the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    before = signal.getsignal(signal.SIGTERM)

    def end_by(number: int, frame: FrameType | None) -> None:
        ring.write(f"ended by signal {number} ({signal.Signals(number).name})")
        if callable(before):
            before(number, frame)
        elif before != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end_by)
