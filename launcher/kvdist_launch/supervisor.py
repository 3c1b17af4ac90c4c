"""Runs the processes of a plan to their end: a selector loop for output, exits, signals and deadlines.

`Job` decides, `Supervisor` carries out. `Supervisor.run` returns only when every process it started has ended and been
reaped, together with the rest of their process groups.
"""

from __future__ import annotations

import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Protocol

from kvdist.config.exit_codes import LINGERS
from kvdist.config.losses import LossPolicy
from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist_launch.exits import ProcessExit, signal_name
from kvdist_launch.job import INDENT, Action, GracePeriods, Job, Restart, Say, SendSignal
from kvdist_launch.output import ERR, NEWS, OUT, JobOutput, Sink, short_name
from kvdist_launch.plan import Process
from kvdist_launch.processes import BEAT_S, RESULT, HostProcesses, SignalPipe
from kvdist_launch.start import INTERRUPTIONS

Assignment = tuple[HostProcesses, Process]
"""A process, and the processes of the host on which to run it."""

DRAIN_S = 0.5
"""How long to wait for output of processes that outlive their parents (such as ``tee``)."""

FAR_DRAIN_S = 3.0
"""Time to wait for that output if agents of other hosts drain it first."""

DEBUGGER_PROMPT = b"(Pdb) "


class Interrupted(Exception):
    """The user wants to end a job that has not begun.

    Attributes:
        number: the number of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(f"interrupted by {signal_name(number)} before anything was started")
        self.number = number


class Calls(Protocol):
    """Handles the processes that execute a call: the data that they get, and their answers.

    Attributes:
        data: the bytes of the call.
    """

    data: bytes

    @property
    def deadline(self) -> float | None:
        """When to end the job, by the monotonic clock; None lets it run."""

    def expire(self, now: float) -> None:
        """`deadline` has come, and the job is being ended: the next deadline, if any, is a later one."""

    def begun(self) -> None:
        """Every process has been started, and is sent the call."""

    def received(self, node: NodeId, data: bytes) -> None:
        """A piece of a process's answer."""


class Supervisor:
    """Runs an attempt at a job. The processes of each host are created with its selector, and it is their listener.

    Args:
        output: takes what processes print.
        err: where the launcher's messages go.
        grace: how long to wait for processes that should end.
        launched: the start of the launcher, by the monotonic clock; None is now.
        takes_signals: whether the signals of this process interrupt the job; only in the main thread.
        is_quiet: whether the closing lines and the notes before the start are left out, because the caller reports
            the end in another way.
        calls: what processes get and answer that are called; None if they run commands.

    Attributes:
        is_quiet: as in the arguments.
        job: the state of the attempt.
    """

    def __init__(
        self,
        output: JobOutput,
        err: Sink,
        grace: GracePeriods,
        launched: float | None = None,
        takes_signals: bool = True,
        is_quiet: bool = False,
        calls: Calls | None = None,
    ) -> None:
        self.selector = selectors.DefaultSelector()
        self.job = Job((), time.monotonic(), grace, launched)
        self._losses = LossPolicy()
        self._output = output
        self._err = err
        self._sinks = {*output.sinks, err}
        self._grace = grace
        self._signals = SignalPipe() if takes_signals else None
        self.is_quiet = is_quiet
        self._calls = calls
        self._hosts: list[HostProcesses] = []
        self._host_of: dict[NodeId, HostProcesses] = {}
        self._processes: dict[NodeId, Process] = {}
        self._listening: socket.socket | None = None
        self._secret: bytes | None = None
        self._elsewhere: Callable[[Process], Assignment] | None = None
        self._known: dict[tuple[NodeId, str], str] = {}
        """(process, first word) → the last such line about it, for a restarted scheduler. The line about an exit stays
        when the process is restarted: the scheduler may not have read it."""
        self._alive: set[NodeId] = set()
        self._with_stdin: NodeId | None = None
        self._has_explained_stdin = False
        self._is_running = False
        self._beat_at = 0.0
        self._depth = 0

    def run(
        self,
        assignments: Sequence[tuple[HostProcesses, Sequence[Process]]],
        listening: socket.socket | None = None,
        secret: bytes | None = None,
        elsewhere: Callable[[Process], Assignment] | None = None,
        losses: LossPolicy | None = None,
    ) -> int:
        """Start all processes, wait until all have ended, print how, and return the job's exit code.

        Args:
            assignments: the processes that each host starts, in order.
            listening: the socket of a scheduler (or rank 0) of this machine.
            secret: what encrypts the job's traffic.
            elsewhere: finds another place for a process whose host was lost; None if all run on this machine.
            losses: what follows when a process is lost.

        Raises:
            CommandError: a process could not be started; none is left.
            ConfigError: log files cannot be written; no process was started.
        """
        self._listening, self._secret, self._elsewhere = listening, secret, elsewhere
        self._losses = losses or self._losses
        self._expect(assignments)
        with self:
            try:
                for host, processes in assignments:
                    host.keeps_socket = self._keeps_socket
                    host.start(processes, listening, secret)
                    self.job.started([(process.node, host.host) for process in processes], time.monotonic())
                if not self._keeps_socket:
                    self._stop_listening()
                self._call(self._calls)
                self._watch()
                self._drain()
            finally:
                self._stop_listening()
                for host in self._hosts:
                    host.hang_up()
                for host in self._hosts:
                    host.release()
            if not self.is_quiet:
                self._conclude()
        return self.job.exit_code()

    @property
    def _keeps_socket(self) -> bool:
        """Whether the root may be started again, and needs its socket then."""
        return Role.SCHEDULER in self._losses.restarted

    def _stop_listening(self) -> None:
        if self._listening is not None:
            self._listening.close()

    def _call(self, calls: Calls | None) -> None:
        if calls is not None:
            for host in self._hosts:
                host.call(calls.data)
            calls.begun()

    def _expect(self, assignments: Sequence[tuple[HostProcesses, Sequence[Process]]]) -> None:
        processes = [process for _, some in assignments for process in some]
        self._hosts = [host for host, _ in assignments]
        self._host_of = {process.node: host for host, some in assignments for process in some}
        self._processes = {process.node: process for process in processes}
        self._alive = {process.node for process in processes}
        self._with_stdin = next((process.node for process in processes if process.has_stdin), None)
        nodes = [one.node for one in processes]
        self.job = Job(nodes, time.monotonic(), self._grace, self.job.launched, self._losses)
        named = ((node, host.host) for node, host in self._host_of.items())
        for warning in self._output.open(named, self._with_stdin):
            self.say(warning)
        self._is_running = True

    def __enter__(self) -> Supervisor:
        """Listen to signals from now on; `run` does so by itself, and may be called inside."""
        self._depth += 1
        if self._depth == 1:
            if self._signals is not None:
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
            if self._signals is not None:
                self._signals.__exit__(kind, error, trace)

    def attend(self, hosts: Iterable[HostProcesses]) -> None:
        """Watch hosts on which no process has been started yet; `run` then watches those that start any."""
        self._hosts = list(hosts)

    def host_of(self, node: NodeId) -> str:
        """The name of a process's host; empty if that is this machine."""
        return self._host_of[node].host

    def last_lines(self, node: NodeId) -> list[str]:
        """The last lines that a process printed."""
        return [line.decode(errors="replace") for line in self._output.last_lines(node)]

    @property
    def is_on_terminal(self) -> bool:
        """Whether the launcher's messages go to a terminal, which can show a progress bar."""
        return self._err.is_terminal

    def say(self, text: str) -> None:
        """Print a message of the launcher."""
        self._err.say(text)

    def note(self, text: str) -> None:
        """Print a line without the launcher's prefix."""
        self._err.write_lines(b"", [text.encode(errors="surrogateescape") + b"\n"])

    # As the listener of the processes.

    def started(self, host: str, pids: Sequence[tuple[NodeId, int]]) -> None:
        self.job.placed(pids)
        if host:
            for node, pid in pids:
                self._tell_scheduler(node, f"placed {node.role} {node.rank} {host} {pid}")

    def output(self, node: NodeId, stream: int, data: bytes) -> None:
        if stream == RESULT:
            if self._calls is not None:
                self._calls.received(node, data)
            return
        lines = self._output.feed(node, stream, data)
        if node == SCHEDULER and stream == OUT:
            self._take_news(lines)
        if stream == ERR and any(LINGERS.encode() in line for line in lines):
            self.job.lingers(node, time.monotonic())
        if DEBUGGER_PROMPT in data and node != self._with_stdin and not self._has_explained_stdin:
            self._has_explained_stdin = True
            self.say(
                f"{node} has stopped in a debugger, but has no standard input: to type there, start the job on this"
                f" machine with kvdist-launch --stdin {short_name(node)}"
            )

    def _take_news(self, lines: Sequence[bytes]) -> None:
        """Handle the scheduler's reports about workers and servers."""
        for found in filter(None, map(NEWS.fullmatch, lines)):
            node, life = NodeId(Role(found[2].decode()), int(found[3])), int(found[4])
            if found[1] == b"joined":
                self.job.joined(node, life)
            elif found[1] == b"at work":
                self.job.at_work(node, life)
            elif found[1] == b"leaves":
                self.job.leaves(node, life, time.monotonic())
            else:
                self._perform(self.job.given_up(node, life))

    def stopped(self, node: NodeId, pid: int) -> None:
        self.job.stopped(node, pid, time.monotonic())

    def output_ended(self, node: NodeId, stream: int) -> None:
        if stream != RESULT:
            self._output.finish(node, stream)

    def ended(self, exits: Sequence[ProcessExit]) -> None:
        exits = [one for one in exits if one.life == self._processes[one.node].life]
        self._alive.difference_update(one.node for one in exits)
        for one in exits:
            self._tell_scheduler(one.node, one.report)
            if one.node == SCHEDULER and not one.is_failure:
                self._stop_listening()  # it will not be started again, so nothing must be accepted there

    def settled(self, exits: Sequence[ProcessExit]) -> None:
        # The last output of the processes is on the screen by now, so reasons stand before conclusions.
        out = self._output
        explained = [
            replace(one, last_error_line=out.last_error_line(one.node), exception_line=out.exception_line(one.node))
            for one in exits
        ]
        self._perform(self.job.ended(explained, time.monotonic()))

    def _tell_scheduler(self, about: NodeId, line: str) -> None:
        if about != SCHEDULER:
            self._known[about, line.partition(" ")[0]] = line
        if SCHEDULER in self._alive:
            self._host_of[SCHEDULER].tell(SCHEDULER, line)

    def _start_again(self, node: NodeId, life: int) -> None:
        """Start a process that has ended; if its host is lost, on another host."""
        host, process = self._host_of[node], self._processes[node]
        if host.failure and self._elsewhere is not None:
            host, process = self._elsewhere(process)
            host.keeps_socket = self._keeps_socket
            if host not in self._hosts:
                self._hosts.append(host)
            self.say(f"{node} is started again on {host.host or 'this machine'}")
        process = process.again(life)
        self._host_of[node], self._processes[node] = host, process
        self._alive.add(node)
        self._output.open_again(node, host.host, life, self._with_stdin)
        self.job.started([(node, host.host)], time.monotonic())
        host.start([process], self._listening if process.is_root else None, self._secret)
        if node == SCHEDULER:
            for line in self._known.values():
                host.tell(SCHEDULER, line)

    # The loop.

    def _watch(self) -> None:
        while not self.job.is_over:
            end_at = None if self._calls is None else self._calls.deadline
            deadline = min((at for at in (self.job.deadline, end_at) if at is not None), default=None)
            self.turn(None if deadline is None else max(0.0, deadline - time.monotonic()))
            now = time.monotonic()
            if self._calls is not None and end_at is not None and end_at <= now:
                self._calls.expire(now)
                self._perform(self.job.interrupt(signal.SIGTERM, now))
            self._perform(self.job.tick(now))

    def turn(self, timeout_s: float | None) -> None:
        """Handle pending events, and wait up to `timeout_s` for the first; None waits without limit.

        Raises:
            Interrupted: the user wants the job to end, and it has not begun.
        """
        until_beat_s = max(0.0, self._beat_at - time.monotonic())
        for key, _ in self.selector.select(until_beat_s if timeout_s is None else min(timeout_s, until_beat_s)):
            key.data()
        self._output.tick()
        is_full = self._output.is_full
        for host in self._hosts:
            host.pause(is_full)
        now = time.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + BEAT_S
            for host in self._hosts:
                host.beat(now)

    def _drain(self) -> None:
        """Read the rest of the output. A slow reader of the launcher's output delays the deadline."""
        for host in self._hosts:
            host.dismiss()
        patience_s = FAR_DRAIN_S if any(host.host for host in self._hosts) else DRAIN_S
        deadline = time.monotonic() + patience_s
        while not all(host.is_silent for host in self._hosts) and (left_s := deadline - time.monotonic()) > 0:
            self.turn(left_s)
            if self._output.is_full:
                deadline = time.monotonic() + patience_s
        self._output.close()

    def _conclude(self) -> None:
        cause = self.job.cause
        ending = () if cause is None else (self.last_lines(cause.node), self._output.is_on_screen(cause.node))
        for line in self.job.conclude(time.monotonic(), *ending):
            (self.note if line.startswith(INDENT) else self.say)(line)

    def _take_signals(self) -> None:
        for number in self._signals.read() if self._signals is not None else ():
            if number in INTERRUPTIONS and not self._is_running:
                raise Interrupted(number)
            if number in INTERRUPTIONS:
                self._perform(self.job.interrupt(number, time.monotonic()))

    def _perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case Say(text):
                    self.say(text)
                case SendSignal(node, number):
                    self._host_of[node].signal_group(node, number)
                case Restart(node, life):
                    self._start_again(node, life)
