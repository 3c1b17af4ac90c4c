"""Runs the processes of a plan to their end: one selector loop for output, endings, signals and deadlines.

It knows no rule of its own: `Job` decides, this carries out. It returns only when every process it started has
ended and been reaped, together with what they left in their process groups.
"""

from __future__ import annotations

import math
import selectors
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from types import TracebackType

from kvdist.nodes import SCHEDULER, NodeId
from kvdist_launch.job import INDENT, Action, GracePeriods, Job, JobSummary, ProcessExit, Say, SendSignal, signal_name
from kvdist_launch.output import JobOutput, Sink, short_name
from kvdist_launch.plan import Process
from kvdist_launch.processes import INTERRUPTIONS, EventPipe, HostProcesses, SignalPipe

DRAIN_S = 0.5
"""How long the output of processes is awaited that outlive the one that started them (such as ``tee``)."""

FAR_DRAIN_S = 3.0
"""The same where agents of other hosts drain first."""

DEBUGGER_PROMPT = b"(Pdb) "

BEAT_S = 1.0
"""How often agents are shown that the launcher lives."""


class Interrupted(Exception):
    """The user wants to end a job that has not begun.

    Attributes:
        number: of the signal that said so.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)} before anything was started")
        self.number = number


class Supervisor:
    """Runs one job. Its crews are made with its selector, and it listens to them.

    Args:
        transcript: takes what processes print.
        err: where the launcher's own messages go.
        patience: how long is waited for processes that should end.
        chronicle: takes note of what happens; None if nobody reads it.
        signals: brings the endings of processes and the wishes of users; None takes the signals of this process.
        is_quiet: whether nothing is said of how the job ended, because whoever called is told otherwise.
    """

    def __init__(
        self,
        transcript: JobOutput,
        err: Sink,
        patience: GracePeriods,
        chronicle: JobSummary | None = None,
        signals: EventPipe | None = None,
        is_quiet: bool = False,
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self._transcript = transcript
        self._err = err
        self._sinks = {*transcript.sinks, err}
        self._patience = patience
        self._signals = SignalPipe() if signals is None else signals
        self._is_quiet = is_quiet
        self._chronicle = JobSummary(time.monotonic()) if chronicle is None else chronicle
        self._course = Job((), time.monotonic(), patience)
        self._crews: list[HostProcesses] = []
        self._crew_of: dict[NodeId, HostProcesses] = {}
        self._alive: set[NodeId] = set()
        self._with_stdin: NodeId | None = None
        self._has_explained_stdin = False
        self._is_running = False
        self._beat_at = math.inf
        self._depth = 0

    def run(
        self,
        assignments: Sequence[tuple[HostProcesses, Sequence[Process]]],
        listening: socket.socket | None = None,
        secret: bytes | None = None,
    ) -> int:
        """Start everything, wait until all has ended, say how, and return the job's exit code.

        Args:
            assignments: what each crew is to start, in order.
            listening: where a scheduler of this machine listens.
            secret: what encrypts the job's traffic.

        Raises:
            CommandError: a process could not be started; none is left.
            ConfigError: log files cannot be written; nothing was started.
        """
        nodes = [process.node for _, processes in assignments for process in processes]
        self._crews = [crew for crew, _ in assignments]
        self._crew_of = {process.node: crew for crew, processes in assignments for process in processes}
        self._alive = set(nodes)
        self._with_stdin = next((one.node for _, processes in assignments for one in processes if one.has_stdin), None)
        self._course = Job(nodes, time.monotonic(), self._patience)
        self._chronicle.begin()
        hosts = ((node, crew.host) for node, crew in self._crew_of.items())
        for warning in self._transcript.open(hosts, self._with_stdin):
            self.say(warning)
        self._is_running = True
        self._beat_at = time.monotonic() if any(crew.host for crew in self._crews) else math.inf
        with self:
            try:
                for crew, processes in assignments:
                    crew.start(processes, listening, secret)
                    self._chronicle.started([(process.node, crew.host) for process in processes], time.monotonic())
                if listening is not None:
                    listening.close()
                self._watch()
                self._drain()
            finally:
                for crew in self._crews:
                    crew.hang_up()
                for crew in self._crews:
                    crew.release()
        if not self._is_quiet:
            self._conclude()
        return self._course.exit_code()

    def __enter__(self) -> Supervisor:
        """Listen to signals from now on; `run` does so by itself, and may be called inside."""
        self._depth += 1
        if self._depth == 1:
            self._signals.__enter__()
            self.selector.register(self._signals.descriptor, selectors.EVENT_READ, self._take_signals)
            for sink in self._sinks:
                sink.attend(self.selector)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            for sink in self._sinks:
                sink.finish()
            self.selector.close()
            self._signals.__exit__(kind, error, trace)

    @property
    def cause(self) -> ProcessExit | None:
        """What failed the job; None while nothing has."""
        return self._course.cause

    @property
    def is_interrupted(self) -> bool:
        """Whether the user or the system asked for the job's end."""
        return self._course.is_interrupted

    def last_lines(self, node: NodeId) -> list[str]:
        """What a process printed last."""
        return [line.decode(errors="replace") for line in self._transcript.last_lines(node)]

    @property
    def is_on_terminal(self) -> bool:
        """Whether somebody watches who can be shown a progress bar."""
        return self._err.is_terminal

    def say(self, text: str) -> None:
        """Print a message of the launcher's own."""
        self._err.say(text)

    def note(self, text: str) -> None:
        """Print a line that has a form of its own."""
        self._err.write_lines(b"", [text.encode(errors="surrogateescape") + b"\n"])

    # What the crews tell.

    def started(self, host: str, pids: Sequence[tuple[NodeId, int]]) -> None:
        if host:
            for node, pid in pids:
                self._tell_scheduler(f"placed {node.role} {node.rank} {host} {pid}")

    def output(self, node: NodeId, stream: int, data: bytes) -> None:
        self._transcript.feed(node, stream, data)
        if DEBUGGER_PROMPT in data and node != self._with_stdin and not self._has_explained_stdin:
            self._has_explained_stdin = True
            self.say(
                f"{node} has stopped in a debugger, but has no standard input: to type there, start the job on this"
                f" machine with kvdist-launch --stdin {short_name(node)}"
            )

    def output_ended(self, node: NodeId, stream: int) -> None:
        self._transcript.finish(node, stream)

    def ended(self, endings: Sequence[ProcessExit]) -> None:
        self._alive.difference_update(ending.node for ending in endings)
        for ending in endings:
            self._tell_scheduler(ending.report)

    def settled(self, endings: Sequence[ProcessExit]) -> None:
        # Reasons before conclusions: the last words are on the screen by now.
        told = [replace(one, last_error_line=self._transcript.last_error_line(one.node)) for one in endings]
        now = time.monotonic()
        self._chronicle.ended(told, now)
        self._perform(self._course.ended(told, now))

    def _tell_scheduler(self, line: str) -> None:
        """Write to the scheduler, while there is one; a job without servers has none."""
        if SCHEDULER in self._alive:
            self._crew_of[SCHEDULER].tell(SCHEDULER, line)

    def _watch(self) -> None:
        while not self._course.is_over:
            deadline = self._course.deadline
            self.turn(None if deadline is None else max(0.0, deadline - time.monotonic()))
            self._perform(self._course.tick(time.monotonic()))

    def turn(self, timeout_s: float | None) -> None:
        """Take what has happened, or happens within that time.

        Raises:
            Interrupted: the user wants the job to end, and it has not begun.
        """
        until_beat_s = max(0.0, self._beat_at - time.monotonic())
        wait_s = until_beat_s if timeout_s is None else min(timeout_s, until_beat_s)
        for key, _ in self.selector.select(None if wait_s == math.inf else wait_s):
            key.data()
        is_full = self._transcript.is_full
        for crew in self._crews:
            crew.pause(is_full)
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for crew in self._crews:
                crew.beat(now)

    def _drain(self) -> None:
        """Read what is still on its way. A reader that does not keep up is waited for."""
        for crew in self._crews:
            crew.dismiss()
        patience_s = FAR_DRAIN_S if any(crew.host for crew in self._crews) else DRAIN_S
        deadline = time.monotonic() + patience_s
        while not all(crew.is_silent for crew in self._crews) and (left_s := deadline - time.monotonic()) > 0:
            self.turn(left_s)
            if self._transcript.is_full:
                deadline = time.monotonic() + patience_s
        self._transcript.close()

    def _conclude(self) -> None:
        """Say how the job ended: after a failure, reasons before the sentence that has the exit code."""
        cause = self._course.cause
        last_lines = [] if cause is None else self.last_lines(cause.node)
        for line in self._chronicle.conclude(self._course.summary(time.monotonic()), cause, last_lines):
            if line.startswith(INDENT):
                self.note(line)
            else:
                self.say(line)

    def _take_signals(self) -> None:
        numbers = self._signals.read()
        if signal.SIGCHLD in numbers:
            for crew in self._crews:
                crew.take_endings()
        for number in numbers:
            if number in INTERRUPTIONS and not self._is_running:
                raise Interrupted(number)
            if number in INTERRUPTIONS:
                self._perform(self._course.interrupt(number, time.monotonic()))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    self.say(text)
                case SendSignal(node, number):
                    self._chronicle.told_to_end(node)
                    self._crew_of[node].signal_group(node, number)
