"""Starts, watches and ends the processes of a host by process group; ends and signals are events of a selector.

`LocalProcesses` runs processes on this machine; `RemoteProcesses` forwards everything to an agent on another machine,
which uses `LocalProcesses`. Both report to a listener. The owner of the selector calls the callbacks registered with
it.

Every child leads its own session. Its group's id is its process id, and stays reserved as long as the child is not
reaped; so children are reaped last, and a signal to a group can never reach a stranger that got the number anew.
"""

from __future__ import annotations

import abc
import contextlib
import os
import selectors
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import FrameType
from typing import IO, Any, Protocol

from kvdist.errors import ConfigError
from kvdist.nodes import NodeId
from kvdist_launch.exits import ProcessExit
from kvdist_launch.plan import Process
from kvdist_launch.probe import HostProbe
from kvdist_launch.root_socket import VARIABLE as LISTEN_VARIABLE
from kvdist_launch.security import VARIABLE as SECRET_VARIABLE
from kvdist_launch.security import SecretFile
from kvdist_launch.start import INTERRUPTIONS, Beginning, is_ignored
from kvdist_launch.watchdog import Watchdog

NOT_FOUND = 127
NOT_EXECUTABLE = 126
"""Exit codes of a shell for a command that it does not find or cannot execute."""

MARK = "KVDIST_WATCHDOG"
"""Variable in all processes of a watchdog; its value is unique to the watchdog. A process that is restarted after its
agent was killed has another value: the old agent's watchdog must not end it with the processes of the old agent."""

OUT, ERR, RESULT = 0, 1, 2
"""The outputs of a process; the third is the pipe for the result of a called process, see `plan.Process`."""

BEAT_S = 1.0
"""Interval of the calls of `HostProcesses.beat`."""

READ_BYTES = 64 * 1024
"""Bytes read from a process's output at a time, so that a process that prints much does not keep the others waiting."""

SHELLS = frozenset({b"ash", b"bash", b"busybox", b"dash", b"ksh", b"sh", b"zsh"})
"""Programs that do nothing while their only child process runs."""

SignalHandler = Callable[[int, FrameType | None], object] | int | None


class CommandError(ConfigError):
    """The command cannot be started; `exit_code` is the exit code of a shell for it."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@contextlib.contextmanager
def handling_interruptions(handler: Callable[[int, FrameType | None], object]) -> Iterator[None]:
    """While entered, call `handler` on interruptions (the user or the system asks for the end), unless they are
    ignored.

    On exit the earlier handlers are restored, but the signals that `Beginning` handled are ignored: a command only has
    to end then.
    """
    before = {number: signal.signal(number, handler) for number in INTERRUPTIONS if not is_ignored(number)}
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, signal.SIG_IGN if isinstance(one, Beginning) else one)


class SignalPipe:
    """While entered, interruptions only make `descriptor` readable, and the ends of children are kept for the launcher.

    Must be entered in the main thread, before children are started: they then get the default treatment of SIGINT even
    where a shell started the launcher in the background, with SIGINT ignored.
    """

    def __init__(self) -> None:
        self.descriptor = self._writer = -1
        self._wakeup_before = -1
        self._handlers_before: dict[int, SignalHandler] = {}

    def __enter__(self) -> SignalPipe:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in INTERRUPTIONS:
            if number != signal.SIGINT and is_ignored(number):
                continue  # Under nohup, for one, the job is meant to outlive its terminal.
            self._handlers_before[number] = signal.signal(number, _do_nothing)
        # Ignored, or with a handler that reaps, exit codes of children would be lost.
        self._handlers_before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._writer)
        os.close(self.descriptor)

    def read(self) -> list[int]:
        """The numbers of the signals since the last call; repetitions may be merged."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A Python-level handler must exist for the interpreter to write to the pipe."""


class ProcessListener(Protocol):
    """Receives the events of processes."""

    def started(self, host: str, pids: Sequence[tuple[NodeId, int]]) -> None:
        """Processes of a host run under these process ids."""

    def output(self, node: NodeId, stream: int, data: bytes) -> None:
        """A process has printed, or written a piece of its result."""

    def stopped(self, node: NodeId, pid: int) -> None:
        """A signal stopped process `pid`: the node's process or a child that it waits for; 0 if it continues."""

    def output_ended(self, node: NodeId, stream: int) -> None:
        """This output has ended."""

    def ended(self, exits: Sequence[ProcessExit]) -> None:
        """Processes have ended, at the same moment. Their last output may still be in flight."""

    def settled(self, exits: Sequence[ProcessExit]) -> None:
        """All output of these ended processes has been passed on."""


class HostProcesses(abc.ABC):
    """The processes of a host. Methods that concern an agent do nothing for local processes.

    Attributes:
        host: the host's name, for people; empty for this machine.
        failure: why the host is lost; empty while it is not.
        keeps_socket: whether the root may be restarted, and needs its socket then.
        answers: question → the last answer to it; see `ask`.
    """

    host = ""
    failure = ""
    keeps_socket = False

    def __init__(self) -> None:
        self.answers: dict[str, dict[str, Any]] = {}

    @abc.abstractmethod
    def ask(self, question: str, **fields: Any) -> None:
        """Ask the host a question of `HostProbe.answer`, whose answer will be in `answers`."""

    @abc.abstractmethod
    def start(
        self, processes: Sequence[Process], listening: socket.socket | None = None, secret: bytes | None = None
    ) -> None:
        """Start processes, in order, beside the running ones. A process that has ended may be restarted.

        Args:
            processes: at least one.
            listening: the socket of the job's root, if the root is among `processes` and the socket is on this machine.
            secret: the key that encrypts the job's traffic, the same each time; None if nothing is encrypted.

        Raises:
            CommandError: a process could not be started for the first time; none is left. A process that cannot be
                restarted counts as having ended.
        """

    @abc.abstractmethod
    def call(self, data: bytes) -> None:
        """Send the bytes of a call, possibly very many, to every process that waits for a call."""

    @abc.abstractmethod
    def signal_group(self, node: NodeId, number: int) -> None:
        """Send a signal to a process and to the processes that it has started in its group."""

    @abc.abstractmethod
    def tell(self, node: NodeId, line: str) -> None:
        """Write a line to the standard input of a process that has one."""

    @abc.abstractmethod
    def beat(self, now: float) -> None:
        """Check for processes that a signal has stopped, or exchange heartbeats with the agent that checks.

        To be called every `BEAT_S`.
        """

    def dismiss(self) -> None:  # noqa: B027  # only agents need it
        """Let the agent pass on output in flight: all processes have ended."""

    @property
    @abc.abstractmethod
    def is_silent(self) -> bool:
        """Whether all outputs have ended."""

    def hang_up(self) -> None:  # noqa: B027  # only agents need it
        """Tell an agent to shut down, without waiting for it: `release` comes next."""

    @abc.abstractmethod
    def release(self) -> None:
        """Kill the rest of every process group and free all resources."""

    @abc.abstractmethod
    def pause(self, paused: bool) -> None:
        """Stop reading output because its reader does not keep up, or read it again."""


class ChildProcess:
    """A started process.

    Args:
        process: the process to start.
        settings: environment variables added to those of `process`.
        listening: a listening socket that it inherits.

    Attributes:
        ending: a descriptor that is readable once the process has ended.

    Raises (on construction):
        OSError: it could not be started.
    """

    def __init__(self, process: Process, settings: Mapping[str, str], listening: socket.socket | None = None) -> None:
        self.node = process.node
        self.life = process.life
        env = {**process.environment.over(os.environ), **settings}
        self._selector: selectors.BaseSelector | None = None
        self._unsent = memoryview(b"")
        self._result: IO[bytes] | None = None
        argv, inherited = list(process.argv), []
        if listening is not None:
            inherited.append(listening.fileno())
            env[LISTEN_VARIABLE] = str(listening.fileno())
        with contextlib.ExitStack() as on_error, contextlib.ExitStack() as theirs:
            if process.is_called:
                inward, outward = os.pipe()
                self._result = on_error.enter_context(open(inward, "rb", buffering=0))
                theirs.callback(os.close, outward)
                inherited.append(outward)
                argv.append(str(outward))
            is_written_to = process.is_told_of_endings or process.is_called
            self._popen = subprocess.Popen(
                argv,
                env=env,
                cwd=process.cwd,
                pass_fds=inherited,
                bufsize=0,
                stdin=None if process.has_stdin else subprocess.PIPE if is_written_to else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
            on_error.callback(self._popen.kill)
            self._watcher: threading.Thread | None = None
            try:
                self.ending = os.pidfd_open(self.pid)
            except (AttributeError, OSError):  # not Linux, or an old or a simulated one
                self.ending, writing = os.pipe()
                self._watcher = threading.Thread(target=_close_at_end, args=(self.pid, writing))
                self._watcher.start()
            on_error.pop_all()
        if self._popen.stdin is not None:
            # A scheduler that does not read must not stop the launcher.
            os.set_blocking(self._popen.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._popen.pid

    @property
    def outputs(self) -> tuple[IO[bytes], ...]:
        """The reading ends of its standard output, its standard error, and the pipe of its result, if it has one."""
        if self._popen.stdout is None or self._popen.stderr is None:
            raise ValueError(f"{self.node} was started without pipes")
        printed = self._popen.stdout, self._popen.stderr
        return printed if self._result is None else (*printed, self._result)

    def exit(self) -> ProcessExit | None:
        """How it ended; None while it runs. It stays unreaped.

        Raises:
            ConfigError: this program has taken the exit code, by ignoring SIGCHLD or by a handler that reaps.
        """
        try:
            result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError as error:
            raise ConfigError(
                f"the exit code of {self.node} is lost, because this program ignores SIGCHLD or reaps all children in a"
                " handler of it: set signal.signal(signal.SIGCHLD, signal.SIG_DFL) before kvdist_launch.run"
            ) from error
        if result is None:
            return None
        status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return ProcessExit(self.node, self.pid, status, life=self.life)

    def stopped(self) -> int:
        """The id of the stopped process: itself, or on Linux, if it is a shell, the child that it waits for; 0 if none
        is."""
        result = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is not None:
            return self.pid if result.si_code == os.CLD_STOPPED else 0
        return _stopped_below(self.pid)

    def signal_group(self, number: int) -> None:
        """Send a signal to it and to the processes that it has started in its group."""
        # Errors mean that the group has ended: macOS says "permission" of a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tell(self, line: str) -> None:
        """Write a line to its standard input, unless it has none or has closed it."""
        if self._popen.stdin is None:
            return
        # It may have ended, or be stopped; the state of the job deals with both.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._popen.stdin.fileno(), line.encode() + b"\n")

    def call(self, data: bytes, selector: selectors.BaseSelector) -> None:
        """Write a call to its standard input as fast as it reads, if it waits for a call, and close that input."""
        if self._result is not None and self._popen.stdin is not None:
            self._selector, self._unsent = selector, memoryview(data)
            selector.register(self._popen.stdin, selectors.EVENT_WRITE, self._send)

    def _send(self) -> None:
        if self._popen.stdin is None:
            return
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self._popen.stdin.fileno(), self._unsent[:READ_BYTES]) :]
        except BlockingIOError:
            return
        except BrokenPipeError:
            pass  # It has ended; its exit code is reported elsewhere.
        self._end_call()

    def _end_call(self) -> None:
        if self._selector is not None and self._popen.stdin is not None:
            self._selector.unregister(self._popen.stdin)
            self._selector = None
            self._popen.stdin.close()

    def reap(self) -> None:
        """Kill the rest of its group, itself included, and release its process id."""
        self.signal_group(signal.SIGKILL)
        if self._watcher is not None:
            self._watcher.join()  # it waits for the process id, which may be a stranger's once it is free
        self._popen.wait()
        os.close(self.ending)
        self._end_call()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr, self._result):
            if pipe is not None:
                pipe.close()


class LocalProcesses(HostProcesses):
    """The processes of this machine.

    Args:
        selector: waits for their outputs; the data of a key is the callback.
        listener: receives the events.

    Attributes:
        probe: answers the questions about this machine.
    """

    def __init__(self, selector: selectors.BaseSelector, listener: ProcessListener) -> None:
        super().__init__()
        self.probe = HostProbe(selector)
        self._selector = selector
        self._listener = listener
        self._children: dict[NodeId, ChildProcess] = {}
        self._running: list[ChildProcess] = []
        self._open: dict[tuple[NodeId, int], IO[bytes]] = {}
        self._watchdog: Watchdog | None = None
        self._mark = os.urandom(8).hex()
        self._secret: SecretFile | None = None
        self._is_paused = False
        self._stopped: dict[NodeId, int] = {}

    def ask(self, question: str, **fields: Any) -> None:
        self.answers[question] = self.probe.answer(question, fields)

    def start(
        self, processes: Sequence[Process], listening: socket.socket | None = None, secret: bytes | None = None
    ) -> None:
        # First, so that a launcher that is killed while it starts processes leaves none.
        watchdog = self._watch()
        if secret is not None and self._secret is None:
            self._secret = SecretFile(secret)
        settings = {MARK: self._mark}
        if self._secret is not None:
            settings[SECRET_VARIABLE] = str(self._secret.path)
        made: list[ChildProcess] = []
        for process in processes:
            is_again = self._retire(process.node)
            try:
                child = ChildProcess(process, settings, listening if process.is_root else None)
            except OSError as error:
                self._refuse(process, error, is_again)
                continue
            watchdog.watch(child.pid)
            self._children[child.node] = child
            made.append(child)
        self._running += made
        for child in made:
            self._attend(child)
        self._listener.started(self.host, [(child.node, child.pid) for child in made])

    def _watch(self) -> Watchdog:
        """The watchdog of all processes started by this object; started on first use."""
        if self._watchdog is None:
            self._watchdog = Watchdog()
            self._is_paused = False
            self._watchdog.mark(MARK, self._mark)
        return self._watchdog

    def _attend(self, child: ChildProcess) -> None:
        """Read the outputs of a process from now on, and wait for its end."""
        for stream, pipe in enumerate(child.outputs):
            os.set_blocking(pipe.fileno(), False)
            self._open[child.node, stream] = pipe
            if not self._is_paused:
                self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, child.node, stream))
        self._selector.register(child.ending, selectors.EVENT_READ, self._take_exits)

    def _retire(self, node: NodeId) -> bool:
        """Release an ended process that is to be restarted. Returns whether it had been started before."""
        child = self._children.pop(node, None)
        if child is None:
            return False
        for stream in (OUT, ERR, RESULT):
            # A child of the process may still hold the pipe, and would be taken for its successor.
            if (node, stream) in self._open:
                self._end_output(node, stream)
        child.reap()
        if self._watchdog is not None:
            self._watchdog.forget(child.pid)
        return True

    def _refuse(self, process: Process, error: OSError, is_again: bool) -> None:
        """Report that a process cannot be started: raise at a first start, count a restart as an exit."""
        code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        text = f"{process.node} could not be started: {process.argv[0]}: {error.strerror}"
        if not is_again:
            self.release()
            raise CommandError(text, code) from error
        exits = [ProcessExit(process.node, 0, code, life=process.life)]
        self._listener.output(process.node, ERR, f"{text}\n".encode())
        self._listener.ended(exits)
        self._listener.settled(exits)

    def call(self, data: bytes) -> None:
        for child in self._running:
            child.call(data, self._selector)

    def signal_group(self, node: NodeId, number: int) -> None:
        self._children[node].signal_group(number)

    def tell(self, node: NodeId, line: str) -> None:
        self._children[node].tell(line)

    def pause(self, paused: bool) -> None:
        if paused == self._is_paused:
            return
        self._is_paused = paused
        for (node, stream), pipe in self._open.items():
            if paused:
                self._selector.unregister(pipe)
            else:
                self._selector.register(pipe, selectors.EVENT_READ, partial(self._read, node, stream))

    def _take_exits(self) -> None:
        """Report all processes that have ended: they count as having ended at the same moment."""
        exits = [one for child in self._running if (one := child.exit()) is not None]
        if not exits:
            return
        ended = {one.node for one in exits}
        for child in self._running:
            if child.node in ended:
                self._selector.unregister(child.ending)
        self._running = [child for child in self._running if child.node not in ended]
        for one in exits:
            if one.is_failure:
                # Its children may hold its sockets open and so hide its end from the others.
                self.signal_group(one.node, signal.SIGKILL)
        self._listener.ended(exits)
        for node in ended:
            for stream in (OUT, ERR, RESULT):
                self._read(node, stream)  # one read takes what a pipe holds
        self._listener.settled(exits)

    def beat(self, now: float) -> None:
        before, self._stopped = self._stopped, {}
        for child in self._running:
            pid = child.stopped()
            if pid:
                self._stopped[child.node] = pid
            if pid != before.get(child.node, 0):
                self._listener.stopped(child.node, pid)

    @property
    def is_silent(self) -> bool:
        return not self._open

    def release(self) -> None:
        self.pause(True)
        self._open.clear()
        for child in self._running:
            self._selector.unregister(child.ending)
        self._running.clear()
        for child in self._children.values():
            child.signal_group(signal.SIGKILL)
        for child in self._children.values():
            child.reap()
        self._children.clear()
        self.probe.close()
        if self._secret is not None:
            self._secret.remove()
            self._secret = None
        if self._watchdog is not None:
            self._watchdog.dismiss()
            self._watchdog = None

    def _read(self, node: NodeId, stream: int) -> None:
        pipe = self._open.get((node, stream))
        if pipe is None:
            return  # It ended earlier in the same turn of the loop.
        try:
            data = os.read(pipe.fileno(), READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self._listener.output(node, stream, data)
        else:
            self._end_output(node, stream)

    def _end_output(self, node: NodeId, stream: int) -> None:
        pipe = self._open.pop((node, stream))
        if not self._is_paused:
            self._selector.unregister(pipe)
        self._listener.output_ended(node, stream)


def _stopped_below(pid: int) -> int:
    """The id of the process below this shell that a signal has stopped, while the shell waits for it; 0 if none is."""
    with contextlib.suppress(OSError, ValueError):  # not Linux, or it has ended, or has not one child
        name, state = _told(pid)
        with open(f"/proc/{pid}/task/{pid}/children", "rb") as listed:
            (child,) = map(int, listed.read().split())
        if name in SHELLS and state == b"S":
            return child if _told(child)[1] == b"T" else _stopped_below(child)
    return 0


def _told(pid: int) -> tuple[bytes, bytes]:
    """The name of a process, and its state as the system's letter."""
    with open(f"/proc/{pid}/stat", "rb") as told:
        name, _, rest = told.read().partition(b"(")[2].rpartition(b")")
    return name, rest.split()[0]


def _close_at_end(pid: int, writing: int) -> None:
    """Wait for the end of a process, which stays unreaped, and close a descriptor."""
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    os.close(writing)
