"""`Profiler`: traces one node into one file, from `start` to `dump`; by a call, or by a command of a worker.

While the profiler runs, a thread rewrites the whole file from time to time. However the process ends, the file is
valid, and at most the last moments are missing. Rewriting takes at most a twentieth of a processor.

Rules:

* No file of a trace is written under the lock of a `Profiler`, so beginning or pausing a trace never waits for a file.
* A command of a worker, which runs on the server's only thread, takes a snapshot; the profiler's thread writes it after
  the command is answered. Errors that a check of the path cannot find, such as a full disk, are logged then.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import queue
import re
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdist import errors
from kvdist.config.environment import profile_dir_from_env, read_setting
from kvdist.core.round import Contribution
from kvdist.core.server.block import Block
from kvdist.core.server.holder import Holder
from kvdist.core.server.server import Server
from kvdist.core.server.shard import Shard
from kvdist.core.worker import requests as req
from kvdist.diagnostics.trace import EVENTS_MAX, Trace, TraceCopy, TraceFiles, now_ns, require_writable
from kvdist.nodes import UNRANKED
from kvdist.protocol import messages as msg
from kvdist.runtime.cluster import HANDLERS
from kvdist.runtime.node import Node, Tracer
from kvdist.version import __version__

LOG = logging.getLogger("kvdist")

PROFILER_HEAD = msg.HEAD_OF_USERS_MAX + 1
"""Number of the command that controls the profiler of a server."""
REST = 20
"""Pause after rewriting the file, as a multiple of the time that it took."""
DUMP_PERIOD_MAX_S = 86_400.0
"""Longest time between two rewrites of the file."""
CALLS_OPEN_MAX = 100_000
"""Largest number of open calls that are noted; further calls are not."""
_PLAIN_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class TraceSettings:
    """Where a trace goes and how large it becomes.

    Raises (on construction):
        TypeError: a setting has the wrong type.
        ValueError: a number is out of range, or the name cannot be that of a file.
    """

    filename: str = "profile.json"
    events_max: int = 100_000
    dump_period_s: float = 1.0

    def __post_init__(self) -> None:
        _require_file_name(self.filename)
        if not isinstance(self.events_max, int) or isinstance(self.events_max, bool):
            raise TypeError(f"max_events is an int, not {type(self.events_max).__name__}")
        if not 1 <= self.events_max <= EVENTS_MAX:
            raise ValueError(f"a trace keeps 1 to {EVENTS_MAX} events, not {self.events_max}")
        if not isinstance(self.dump_period_s, int | float) or isinstance(self.dump_period_s, bool):
            raise TypeError(f"dump_period is a number of seconds, not {type(self.dump_period_s).__name__}")
        if not 0 < self.dump_period_s <= DUMP_PERIOD_MAX_S:
            raise ValueError(
                f"the time between two dumps is {self.dump_period_s}; it must be more than 0 s and at most"
                f" {DUMP_PERIOD_MAX_S:.0f} s, which is a day"
            )

    def as_fields(self) -> dict[str, object]:
        """Return the fields of the command that sends these settings to a server."""
        return {**vars(self), "dump_period_s": float(self.dump_period_s)}


def _require_file_name(name: object) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the file name of a trace is a str or a path, not {type(name).__name__}")
    if not name:
        raise ValueError("the file name of a trace is empty")
    if os.path.basename(name) in ("", ".", ".."):
        raise ValueError(f"{name[:80]!r} names a directory: a trace needs the name of a file, such as profile.json")
    try:
        os.fsencode(name)
    except UnicodeEncodeError:
        raise ValueError(f"{name[:80]!r} cannot be the name of a file: it has characters that files' cannot") from None
    if "\0" in name:
        raise ValueError(f"{name[:80]!r} cannot be the name of a file: it has a NUL")


def require_plain(filename: str) -> None:
    """Refuse a name that could lead out of the directory that was chosen when the server was started.

    Raises:
        ValueError: the name is not 1 to 64 letters, digits, dots, dashes and underlines, or is "." or "..".
    """
    if not _PLAIN_NAME.fullmatch(filename) or filename in (".", ".."):
        raise ValueError(
            f"{filename[:80]!r} cannot be the file name of a server's trace: it has 1 to 64 of the characters A-Z a-z"
            " 0-9 . _ - and no directory; KVDIST_PROFILE_DIR of the server chooses where it lies"
        )


# The events of a node that go into a trace.


class _CallStart(threading.local):
    """Time at which this thread's call began, if no request has been submitted for it yet; else 0."""

    since_ns = 0


class NodeTrace(Tracer):
    """Notes what a node does. The calls of the user overlap; messages and rounds nest on the node's thread.

    Args:
        trace: the trace that gets the events.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._called = _CallStart()
        self._calls: dict[int, tuple[str, int, dict[str, Any]]] = {}
        """Number of a request → its label, start and arguments. Only the node's thread uses it."""

    # On the user's threads.

    def called(self) -> None:
        """Note that the user has called a method; a request may follow."""
        self._called.since_ns = now_ns()

    def take_since(self) -> int:
        """Return the start of the call whose request is being submitted."""
        since_ns, self._called.since_ns = self._called.since_ns, 0
        return since_ns or now_ns()

    def wait(self, future: Future[Any]) -> Any:
        """Return the result of a future, with the wait in the trace."""
        since = now_ns()
        try:
            return future.result()
        finally:
            self.trace.add("wait", "wait", since, {})

    # On the node's thread.

    def asked(self, request: req.Request, since_ns: int) -> None:
        """Note a request to the machine; `since_ns` is 0 if tracing began after the request was submitted."""
        if since_ns and len(self._calls) < CALLS_OPEN_MAX:
            label, arguments = _told(request)
            self._calls[request.request] = (label, since_ns, arguments)

    def answered(self, request: int, error: Exception | None = None) -> None:
        """Add the call of a request that has been fulfilled or has failed."""
        label, since, arguments = self._calls.pop(request, ("", 0, {}))
        if since:
            if error is not None:
                arguments["error"] = f"{type(error).__name__}: {error}"
            self.trace.add(label, "call", since, arguments, overlaps=True)

    def handled(self, packet: msg.Packet, since_ns: int) -> None:
        """Add a message that has been handled, with its effects."""
        tells = True
        arguments: dict[str, Any] = {"from": str(packet.stamp.source), "step": packet.stamp.step}
        match packet.message:
            case (
                msg.Push(ids=ids, arrays=arrays)
                | msg.CompressedPush(ids=ids, arrays=arrays)
                | msg.JoinedPush(ids=ids, arrays=arrays)
                | msg.Values(ids=ids, arrays=arrays)
                | msg.InitValues(ids=ids, arrays=arrays)
                | msg.ReplaceValues(ids=ids, arrays=arrays)
            ):
                arguments |= {"slices": len(ids), "bytes": arrays.nbytes}
            case msg.Pull(ids=ids):
                arguments |= {"slices": len(ids)}
            case msg.Perform(head=head):
                # Commands of kvdist itself are those of the profiler.
                arguments |= {"command": head}
                tells = head <= msg.HEAD_OF_USERS_MAX
            case msg.Ack() | msg.Roster() | msg.Stop():
                tells = False
        self.trace.add(type(packet.message).__name__, "message", since_ns, arguments, tells=tells)


def trace_rounds(shard: Shard, trace: Trace | None) -> None:
    """Wrap `Shard.apply` to trace each round of blocks, its sum and its update, under the key of its first slice.

    Args:
        shard: the shard of a server.
        trace: the trace; None to stop tracing.
    """
    shard.__dict__.pop("apply", None)
    if trace is None:
        return
    original = shard.apply

    def apply(holders: Sequence[Holder], rounds: Sequence[Sequence[Contribution]]) -> None:
        since = now_ns()
        original(holders, rounds)
        blocks = [holder for holder in holders if isinstance(holder, Block)]
        if not blocks:
            return
        arguments = {
            "key": blocks[0].key,
            "version": blocks[0].version,
            "contributions": len(rounds[0]),
            "bytes": sum(int(block.counts.sum()) * block.dtype.itemsize for block in blocks),
            "slices": sum(len(block) for block in blocks),
        }
        trace.add(f"round of key {blocks[0].key!r}", "round", since, arguments)

    shard.apply = apply  # type: ignore[method-assign]


def _told(request: req.Request) -> tuple[str, dict[str, Any]]:
    """Return the label of a request, for people, and its arguments in the trace."""
    match request:
        case req.Transfer(label=label, runs=runs, priority=priority):
            nbytes = sum(run.plan.nbytes for run in runs)
            return label, {"bytes": nbytes, "slices": sum(len(run.plan.ids) for run in runs), "priority": priority}
        case req.DeclareKeys(keys=keys):
            return f"declaration of {len(keys)} key(s)", {"keys": len(keys)}
        case msg.Configure() | msg.Command() | msg.Lease() | msg.Used():
            return req.label_of(request), {}
        case req.EnterBarrier():
            return "barrier", {}
        case req.ClaimFolder():
            return "lock of a folder of checkpoints", {}
        case req.SaveStore(step=step, keys=keys):
            return f"checkpoint of step {step}", {"keys": len(keys)}
        case req.LoadStore():
            return "loading of a checkpoint", {}
        case req.UseKernels():
            return "choice of kernels", {}
        case req.Register():
            return "joining the cluster", {}
        case req.TakePart():
            return "taking part in a running job", {}
        case req.ReportTimes(times=times):
            return req.label_of(request), {"steps": times.steps}
        case req.ReportProgress(progress=progress):
            return "report of progress", {"samples": progress.samples}
        case req.Leave():
            return "leaving the cluster", {}
        case req.AcceptRollback():
            return "going back to a snapshot", {}


# When the node is traced.


class Profiler:
    """Traces a node. Every method may be called again, and does nothing then.

    Args:
        find_folder: returns the folder of files whose names have no directory; called when a trace begins.
    """

    def __init__(self, find_folder: Callable[[], Path]) -> None:
        self._find_folder = find_folder
        self._folder = Path()
        self._settings = TraceSettings()
        self._node: Node | None = None
        self._trace: Trace | None = None
        self._trace_number = 0
        self._records = False
        self._claimed = False
        """Whether a call has begun the present trace or joined it; else the environment began it."""
        # Reentrant: Ctrl-C may interrupt the thread that holds the lock, and its handler may dump.
        self._lock = threading.RLock()
        self._files = TraceFiles()
        self._copies: queue.SimpleQueue[TraceCopy | None] = queue.SimpleQueue()
        """Copies for the thread to write; None to make it check whether it is still wanted."""
        self._thread: threading.Thread | None = None
        self._thread_wanted = False
        self._pid = os.getpid()

    def attach(self, node: Node) -> None:
        """Choose the node to trace; tracing starts at once if the profiler runs already."""
        with self._lock:
            self._node = node
            if self._records:
                self._engage()

    def set_config(self, settings: TraceSettings) -> None:
        """Configure the next trace; the present trace too, if the environment began it and no call joined it.

        Raises:
            KvdistError: a trace that a call began or joined is in progress with other settings, or the path cannot be
                written.
        """
        with self._lock:
            if settings == self._settings:
                return
            if self._trace is not None and self._claimed:
                raise errors.KvdistError("a trace is in progress: finish it with profiler.dump() before set_config()")
            before, self._settings = self._settings, settings
            if self._trace is None:
                return
            try:
                self._require_place()
            except errors.KvdistError:
                self._settings = before
                raise
            self._trace.keep(settings.events_max)
            self._trace_number += 1
            self._hand_over(self._copy())

    def start(self, by_call: bool = False) -> None:
        """Record from now on, into the present trace if it is not finished, else into a new trace.

        Args:
            by_call: whether a call starts the profiler, not the environment.

        Raises:
            KvdistError: the file of the trace cannot be written.
        """
        with self._lock:
            if not self._records:
                if self._trace is None:
                    self._begin()
                self._records = True
                self._engage()
                self._thread_wanted = True
                self._hand_over(self._copy())
            self._claimed = self._claimed or by_call

    def stop(self, waits: bool = True) -> None:
        """Stop recording, and write the trace.

        Args:
            waits: whether to wait until the trace is written; else the profiler's thread writes it.
        """
        with self._lock:
            self.pause()
            self._thread_wanted = False
        try:
            self._write_out(waits)
        finally:
            self._look()

    def pause(self) -> None:
        """Stop recording until `resume`."""
        with self._lock:
            self._records = False
            if self._node is not None:
                self._node.trace = None
                if isinstance(self._node.machine, Server):
                    trace_rounds(self._node.machine.shard, None)

    def resume(self) -> None:
        """Record again, if a trace is in progress."""
        with self._lock:
            if self._trace is not None:
                self.start()

    def dump(self, finished: bool, waits: bool = True) -> Path | None:
        """Write the trace and return its path; None if no node has been traced.

        Args:
            finished: whether the trace ends; the next `start` begins a new trace.
            waits: whether to wait until the trace is written; else the profiler's thread writes it.

        Raises:
            KvdistError: the trace cannot be written. An older file stays as it is.
        """
        path = self._write_out(waits)
        if finished:
            with self._lock:
                self.pause()
                if path is not None:
                    self._files.finish(path, self._trace_number)
                self._trace, self._claimed, self._thread_wanted = None, False, False
                if self._thread is None:
                    atexit.unregister(self._at_exit)
            self._look()
        return path

    def perform(self, head: int, body: str, rank: int) -> None:
        """Handle the command by which a worker controls this profiler; see `Handler`. Another thread writes the trace.

        Raises:
            TypeError, ValueError: the body is not a known call, or the file name is not plain.
            KvdistError: a path cannot be written, or a trace is in progress.
        """
        match json.loads(body):
            case {"do": "set_config", "filename": str(name), "events_max": int(most), "dump_period_s": float(period)}:
                require_plain(name)
                self.set_config(TraceSettings(name, most, period))
            case {"do": "dump", "finished": bool(finished)}:
                self.dump(finished, waits=False)
            case {"do": "start"}:
                self.start(by_call=True)
            case {"do": "stop"}:
                self.stop(waits=False)
            case {"do": "pause"}:
                self.pause()
            case {"do": "resume"}:
                self.resume()
            case _:
                raise ValueError(f"the profiler knows no call {body[:80]!r}")

    # Under the lock.

    def _begin(self) -> None:
        self._folder, self._pid = self._find_folder(), os.getpid()
        self._trace = Trace(self._settings.events_max)
        self._trace_number += 1
        try:
            self._require_place()
        except errors.KvdistError:
            self._trace = None
            raise

    def _engage(self) -> None:
        if self._node is not None and self._trace is not None:
            self._node.trace = NodeTrace(self._trace)
            if isinstance(self._node.machine, Server):
                trace_rounds(self._node.machine.shard, self._trace)

    def _path(self) -> Path | None:
        node = self._node
        # A forked child has a copy of the profiler, but the file belongs to its parent.
        if node is None or self._trace is None or node.view.me.node.rank == UNRANKED or os.getpid() != self._pid:
            return None
        named = self._folder / self._settings.filename
        return named.with_name(f"{named.stem}.{node.view.me}{named.suffix}").absolute()

    def _require_place(self) -> None:
        path, node = self._path(), self._node
        if path is not None and node is not None:
            try:
                require_writable(path)
            except OSError as error:
                raise _unwritable(path, str(node.view.me), error) from error

    def _copy(self) -> TraceCopy | None:
        """Return a copy of the trace to write; None if the file has all of its events already."""
        path, node, trace = self._path(), self._node, self._trace
        if path is None or node is None or trace is None or self._files.has(path, (self._trace_number, trace.last)):
            return None
        about = {"version": __version__, "host": socket.gethostname(), "clock": "time.monotonic_ns"}
        return TraceCopy(path, self._trace_number, trace.snapshot(), str(node.view.me), about)

    def _hand_over(self, copy: TraceCopy | None) -> None:
        """Let the thread write a copy; start the thread if it does not run."""
        self._copies.put(copy)
        if not self._thread_wanted:
            self._copies.put(None)
        if self._thread is None:
            atexit.unregister(self._at_exit)
            atexit.register(self._at_exit)
            thread = threading.Thread(target=self._run, name="kvdist-profiler", daemon=True)
            thread.start()
            self._thread = thread

    # Without the lock.

    def _write_out(self, waits: bool) -> Path | None:
        with self._lock:
            path, copy = self._path(), self._copy()
            if copy is not None and not waits:
                self._require_place()
                self._hand_over(copy)
        if copy is not None and waits:
            self._write(copy)
        return path

    def _write(self, copy: TraceCopy) -> None:
        try:
            self._files.put(copy)
        except OSError as error:
            raise _unwritable(copy.path, copy.process, error) from error

    def _look(self) -> None:
        """Let the thread end after its last copy, if it is not wanted any more."""
        if self._thread is not None:
            self._copies.put(None)

    def _run(self) -> None:
        """Run the thread: write the copies in the queue, and rewrite the file from time to time."""
        pause_s, complaint = self._settings.dump_period_s, ""
        while True:
            try:
                copy = self._copies.get(timeout=pause_s)
            except queue.Empty:
                with self._lock:
                    copy = self._copy()
            else:
                if copy is None and self._ends():
                    return
            began = now_ns()
            try:
                if copy is not None:
                    self._write(copy)
            except Exception as error:  # noqa: BLE001  # the next write may succeed, whatever the error
                if str(error) != complaint:
                    complaint = str(error)
                    LOG.warning("%s", error)
            pause_s = max(self._settings.dump_period_s, REST * (now_ns() - began) / 1e9)
            del copy  # or a finished trace would stay in memory

    def _ends(self) -> bool:
        with self._lock:
            if self._thread_wanted or not self._copies.empty():
                return False
            self._thread = None
            if self._trace is None:
                atexit.unregister(self._at_exit)
            return True

    def _at_exit(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._thread_wanted = False
            thread = self._thread
        self._look()
        if thread is not None:
            thread.join()
        with self._lock:
            copy = self._copy()
        try:
            if copy is not None:
                self._write(copy)
        except errors.KvdistError as error:
            LOG.warning("%s", error)


def _unwritable(path: Path, process: str, error: OSError) -> errors.KvdistError:
    return errors.KvdistError(
        f"the trace of {process} cannot be written to {path} ({error}); KVDIST_PROFILE_DIR and"
        " profiler.set_config(filename=...) choose where it goes"
    )


class ProcessProfilers:
    """The profilers of this process: of its worker, and of the last server that was attached."""

    def __init__(self) -> None:
        self.worker = Profiler(profile_dir_from_env)
        self._server = Profiler(profile_dir_from_env)

    def attach(self, node: Node) -> None:
        """Trace a node: at once with ``KVDIST_PROFILER_AUTOSTART``, else when its profiler is started."""
        profiler = self.worker
        if isinstance(node.machine, Server):
            profiler = self._server = Profiler(profile_dir_from_env)
        profiler.attach(node)
        if read_setting("KVDIST_PROFILER_AUTOSTART"):
            profiler.start()

    def perform(self, head: int, body: str, rank: int) -> None:
        """Handle the command by which a worker controls the server's profiler; see `Profiler.perform`."""
        self._server.perform(head, body, rank)


PROFILERS = ProcessProfilers()
HANDLERS[PROFILER_HEAD] = PROFILERS.perform
