"""The hosts of a job, reached through agents over ssh: connected, checked and watched concurrently on one selector.

When the pipe ends, for any reason, the host is lost: every process of it that was not seen to end is then reported as
lost, with the last line of ssh as the reason. The agent ends them on its side.

During long operations the agents get a heartbeat every second.

Before any process starts all hosts are checked concurrently: the result is a table, and a sentence for each problem.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvdist.config.addresses import this_machine
from kvdist.config.settings import Limits
from kvdist.errors import ConfigError
from kvdist.nodes import NodeId
from kvdist.version import __version__
from kvdist_launch.agent_protocol import (
    GREETING,
    PAYLOAD_BYTES_MAX,
    PIPE_READ_BYTES,
    Frame,
    FrameDecoder,
    FrameError,
    FrameWriter,
    exit_of,
    node_of,
)
from kvdist_launch.exits import HOST_LOST, ProcessExit
from kvdist_launch.hosts import Host
from kvdist_launch.output import LineSplitter, all_printable, printable, text_table
from kvdist_launch.plan import Process
from kvdist_launch.probe import facts_of_this_host
from kvdist_launch.processes import BEAT_S, NOT_EXECUTABLE, CommandError, HostProcesses, LocalProcesses, ProcessListener
from kvdist_launch.ssh import SshOptions, agent_command, login_of, words_of_host
from kvdist_launch.supervisor import Supervisor

NOISE_LINES_MAX = 20
"""Lines of ssh and of login scripts that are kept to explain a failure."""

BEFORE_BYTES_MAX = 64 * 1024
"""Bytes of the output of login scripts, before the agent's first line, that are kept."""

KEY_CHANGED = "IDENTIFICATION HAS CHANGED"
"""Part of ssh's message about a host whose key has changed."""

END_S = 3.0
"""Time that an agent may take to leave after it was asked to."""

LOOK_S = 10.0
"""Time limit for connecting and all questions together."""
GREETING_S = 8.0
"""Time limit for a host to accept the login and start its agent; part of `LOOK_S`."""
SILENT_BEATS_MIN = 3
"""Lower limit of the patience, in heartbeats, which are a second apart."""
ANSWER_S_MIN = 1.0
"""Time that agents have for a question at least."""


class RemoteProcesses(HostProcesses):
    """The processes of another host, started by its agent at the other end of an ssh pipe.

    Args:
        host: its name, for people.
        argv: the command that starts its agent.
        selector: waits for the pipe.
        listener: receives the events of the processes.
        patience_s: silence after which the host is lost, at least 3 s; its agent sends a frame every second.

    Attributes:
        facts: the first frame of the agent, about its host; None until then.
    """

    def __init__(
        self,
        host: str,
        argv: Sequence[str],
        selector: selectors.BaseSelector,
        listener: ProcessListener,
        patience_s: float = Limits.patience_s,
    ) -> None:
        super().__init__()
        self.host = host
        self.facts: dict[str, Any] | None = None
        self._patience_s = max(patience_s, SILENT_BEATS_MIN * BEAT_S)
        self._selector = selector
        self._listener = listener
        self._alive: dict[NodeId, int] = {}
        self._lives: dict[NodeId, int] = {}
        self._refusal: CommandError | None = None
        self._ssh = _start_ssh(argv)
        self._decoder = FrameDecoder()
        self._is_greeted = False
        self._before_greeting = b""
        self._complaints = LineSplitter()
        self._noise: list[str] = []
        self._heard_at = time.monotonic()
        self._stdin, self._stdout, self._stderr = _streams(self._ssh)
        self._writer = FrameWriter(selector, self._stdin.fileno(), self._broke)
        self._open: set[int] = set()
        self._is_paused = False
        self._ends_at: float | None = None
        for stream, read in ((self._stdout, self._read), (self._stderr, self._read_complaints)):
            os.set_blocking(stream.fileno(), False)
            selector.register(stream, selectors.EVENT_READ, read)
            self._open.add(stream.fileno())

    # Requests of the launcher.

    def ask(self, question: str, **fields: Any) -> None:
        self.answers.pop(question, None)
        self._writer.send("ask", question=question, **fields)

    def start(
        self, processes: Sequence[Process], listening: socket.socket | None = None, secret: bytes | None = None
    ) -> None:
        # A scheduler on the remote host listens at the agent's socket; `listening` is a socket of this machine.
        for process in processes:
            self._alive[process.node], self._lives[process.node] = 0, process.life
        secret_text = None if secret is None else secret.hex()
        self._writer.send("start", processes=processes, secret=secret_text, keeps_socket=self.keeps_socket)

    def call(self, data: bytes) -> None:
        for begin in range(0, len(data), PAYLOAD_BYTES_MAX):
            self._writer.send("call", data[begin : begin + PAYLOAD_BYTES_MAX])
        self._writer.send("call")

    def signal_group(self, node: NodeId, number: int) -> None:
        self._writer.send("signal", node=node, number=number)

    def tell(self, node: NodeId, line: str) -> None:
        self._writer.send("tell", node=node, line=line)

    def beat(self, now: float) -> None:
        if self.failure:
            return
        self._writer.send("alive", patience_s=self._patience_s)
        if self._is_paused:
            self._heard_at = now  # there may be frames that were not read
        if now - self._heard_at > self._patience_s:
            self.lose(f"{self.host} has not answered for {self._patience_s:g} s (KVDIST_PATIENCE_S)")

    def dismiss(self) -> None:
        self._writer.send("leave")

    @property
    def is_silent(self) -> bool:
        return not self._open

    def hang_up(self) -> None:
        if self._ends_at is not None:
            return
        self._ends_at = time.monotonic() + END_S
        self.pause(False)
        self._writer.close()
        for stream in (self._stdout, self._stderr):
            if stream.fileno() in self._open:
                self._selector.unregister(stream)
        self._open.clear()
        self._stdin.close()  # ends the agent, and with it every process of the host

    def release(self) -> None:
        self.hang_up()
        if self._ssh.returncode is None:
            try:
                # All hosts were hung up at the same time, so all together take no longer than one.
                self._ssh.wait(max(0.0, (self._ends_at or 0.0) - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._ssh.kill()
                self._ssh.wait()
        self._stdout.close()
        self._stderr.close()

    def pause(self, paused: bool) -> None:
        if paused == self._is_paused or self._stdout.fileno() not in self._open:
            return
        self._is_paused = paused
        if paused:
            self._selector.unregister(self._stdout)
        else:
            self._selector.register(self._stdout, selectors.EVENT_READ, self._read)

    def lose(self, reason: str) -> None:
        """Report every process of the host as lost."""
        if self.failure:
            return
        self.failure = reason
        self._writer.close()
        self._stdin.close()  # if its agent is there after all, it ends what it has
        exits = [
            ProcessExit(node, pid, HOST_LOST, host=self.host, lost=reason, life=self._lives[node])
            for node, pid in self._alive.items()
        ]
        self._alive.clear()
        if exits:
            self._listener.ended(exits)
            self._listener.settled(exits)

    # Frames and output of the agent.

    def _read(self) -> None:
        data = self._take(self._stdout)
        if not data or self.failure:
            return  # frames of a lost host come too late
        self._heard_at = time.monotonic()
        try:
            for frame in self._decoder.feed(self._after_greeting(data)):
                self._perform(frame)
        except (FrameError, KeyError, TypeError, ValueError) as error:
            self.lose(f"its agent sent what cannot be understood ({printable(str(error))})")
        if self._refusal is not None:
            raise self._refusal

    def _after_greeting(self, data: bytes) -> bytes:
        """Return the agent's bytes in `data`. Output of login scripts before its greeting is only kept to explain
        failures."""
        if self._is_greeted:
            return data
        self._before_greeting += data
        noise, found, rest = self._before_greeting.partition(GREETING + b"\n")
        if not found:
            self._before_greeting = self._before_greeting[-BEFORE_BYTES_MAX:]
            return b""
        self._note(noise.splitlines())
        self._is_greeted, self._before_greeting = True, b""
        return rest

    def _perform(self, frame: Frame) -> None:
        fields = frame.fields
        match frame.kind:
            case "greeting":
                self.facts = all_printable(fields)
            case "output":
                self._listener.output(node_of(fields["node"]), int(fields["stream"]), frame.payload)
            case "stopped":
                self._listener.stopped(node_of(fields["node"]), int(fields["pid"]))
            case "output_ended":
                self._listener.output_ended(node_of(fields["node"]), int(fields["stream"]))
            case "ended":
                self._listener.ended(self._exits(fields))
            case "settled":
                exits = self._exits(fields)
                for one in exits:
                    self._alive.pop(one.node, None)
                self._listener.settled(exits)
            case "started":
                pids = {node_of(node): int(pid) for node, pid in fields["pids"]}
                self._alive.update(pids)
                self._listener.started(self.host, list(pids.items()))
            case "refused":
                self._alive.clear()
                text = printable(str(fields["text"]))
                self._refusal = CommandError(f"on {self.host}, {text}", int(fields["code"]) or NOT_EXECUTABLE)
            case "answer":
                self.answers[str(fields["question"])] = all_printable(fields["found"])

    def _exits(self, fields: dict[str, Any]) -> list[ProcessExit]:
        return [exit_of(one, self.host) for one in fields["endings"]]

    def _read_complaints(self) -> None:
        data = self._take(self._stderr)
        self._note(self._complaints.feed(data) if data else self._complaints.finish())

    def _note(self, lines: Sequence[bytes]) -> None:
        texts = [printable(line.decode(errors="replace").strip()) for line in lines]
        self._noise = [*self._noise, *filter(None, texts)][-NOISE_LINES_MAX:]

    def _take(self, stream: IO[bytes]) -> bytes:
        """The bytes that can be read now; empty also when the pipe has ended."""
        try:
            data = os.read(stream.fileno(), PIPE_READ_BYTES)
        except BlockingIOError:
            return b""
        if not data and stream.fileno() in self._open:
            self._selector.unregister(stream)
            self._open.discard(stream.fileno())
            if stream is self._stdout:
                self._broke()
        return data

    def _broke(self) -> None:
        """Treat the host as lost after the end of the pipe."""
        with contextlib.suppress(BlockingIOError):
            self._note(self._complaints.feed(os.read(self._stderr.fileno(), PIPE_READ_BYTES)))
        # The last line is the reason; for a changed key it says no more than for an unknown one.
        changed = [line.strip("@ ") for line in self._noise[:-1] if KEY_CHANGED in line]
        said = ": ".join([*changed, *self._noise[-1:]]) or "ssh gave no reason"
        self.lose(f"the connection to {self.host} ended ({said})")


def _start_ssh(argv: Sequence[str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    try:
        return subprocess.Popen(argv, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True)
    except FileNotFoundError:
        raise ConfigError(
            f"{argv[0]} is not installed on this machine; it is needed to reach other machines (Debian: apt install"
            " openssh-client)"
        ) from None


def _streams(ssh: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    if ssh.stdin is None or ssh.stdout is None or ssh.stderr is None:
        raise ValueError("ssh was started without pipes")
    return ssh.stdin, ssh.stdout, ssh.stderr


@dataclass
class HostConnection:
    """The connection to a host of the job.

    Attributes:
        host: as the user named it.
        processes: the processes of this host.
        facts: the first frame of its agent.
        found: the fields of the agent's answers so far.
        problem: why it cannot take part, a sentence; empty if it can.
    """

    host: Host
    processes: HostProcesses
    facts: dict[str, Any] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)
    problem: str = ""

    @property
    def is_here(self) -> bool:
        """Whether its processes are started without an agent."""
        return isinstance(self.processes, LocalProcesses)

    @property
    def is_this_machine(self) -> bool:
        """Whether its machine is this machine, even if an agent reaches it."""
        return self.is_here or self.facts.get("machine") == this_machine()

    @property
    def seen_as(self) -> str:
        """The address under which the host sees this machine; empty if it is this machine."""
        return self._connection()[0]

    @property
    def address(self) -> str:
        """The address under which this machine reached the host."""
        return self._connection()[2]

    def _connection(self) -> list[str]:
        words = str(self.facts.get("environ", {}).get("SSH_CONNECTION", "")).split()
        return words if len(words) == 4 and not self.is_here else ["", "", "", ""]


class HostPool:
    """The hosts of a job. A context manager that releases them at the end.

    Args:
        hosts: in the user's order.
        python: the interpreter of hosts that name none.
        ssh: the user's options.
        supervisor: provides the selector, and listens to the processes.

    Attributes:
        here: this machine, which need not be among the hosts.
        connections: the connections, in the order of `hosts`.
        ssh: the user's options.
    """

    def __init__(self, hosts: Sequence[Host], python: str, ssh: SshOptions, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._python = python
        self.ssh = ssh
        self._look_by = time.monotonic() + LOOK_S
        local = LocalProcesses(supervisor.selector, supervisor)
        named = next((host for host in hosts if host.is_local), Host("localhost"))
        self.here = HostConnection(named, local, facts_of_this_host())
        self.connections = [self.here if host.is_local else HostConnection(host, self._dial(host)) for host in hosts]
        supervisor.attend(one.processes for one in self.connections)

    def _dial(self, host: Host) -> RemoteProcesses:
        argv = agent_command(host, host.python or self._python, self.ssh)
        return RemoteProcesses(host.name, argv, self._supervisor.selector, self._supervisor, self.ssh.patience_s)

    def dial_again(self, connection: HostConnection) -> HostProcesses:
        """The processes of a host, through a new agent if the last agent has ended."""
        processes = connection.processes
        if processes.failure or (not connection.is_here and processes.is_silent):
            processes.hang_up()
            connection.processes = self._dial(connection.host)
        return connection.processes

    def __enter__(self) -> HostPool:
        return self

    def __exit__(self, *error: object) -> None:
        """Release all hosts concurrently."""
        self._release([self.here, *self.connections])

    def _release(self, connections: Sequence[HostConnection]) -> None:
        for one in connections:
            one.processes.dismiss()
            one.processes.hang_up()
        for one in connections:
            one.processes.release()

    def connect(self) -> None:
        """Wait for every agent's first frame; a host without it gets a problem with advice."""
        remotes = [(one, one.processes) for one in self.connections if isinstance(one.processes, RemoteProcesses)]
        self.turn_until(lambda: all(one.facts is not None or one.failure for _, one in remotes), GREETING_S)
        for connection, remote in remotes:
            if remote.failure or remote.facts is None:
                failure = remote.failure or f"no answer within {GREETING_S:g} s"
                connection.problem = explained(failure, connection.host.python or self._python, connection.host)
            else:
                connection.facts = remote.facts

    def ask(self, questions: Callable[[HostConnection], dict[str, Any]]) -> None:
        """Let every host examine itself; see `HostProbe.answer` for the questions.

        Args:
            questions: the questions for a host; a host with none is not asked.
        """
        asked = [(one, wanted) for one in self.connections if not one.problem and (wanted := questions(one))]
        answers = self.answers("prepare", asked, max(ANSWER_S_MIN, self._look_by - time.monotonic()))
        for (one, _), answer in zip(asked, answers, strict=True):
            if isinstance(answer, str):
                one.problem = answer
            else:
                one.found.update(answer)

    def answers(
        self, question: str, asked: Sequence[tuple[HostConnection, dict[str, Any]]], timeout_s: float
    ) -> list[dict[str, Any] | str]:
        """The answers of hosts to a question, or a sentence about each host that did not answer.

        Args:
            question: as for `HostProbe.answer`.
            asked: the hosts, each with the fields of its question.
            timeout_s: how long to wait for all of them.
        """
        hosts = [one.processes for one, _ in asked]
        for host, (_, wanted) in zip(hosts, asked, strict=True):
            host.ask(question, **wanted)
        self.turn_until(lambda: all(question in host.answers or host.failure for host in hosts), timeout_s)
        silent = f"its agent has not answered within {timeout_s:.2g} s"
        return [host.answers.get(question, host.failure or silent) for host in hosts]

    def turn_until(self, is_done: Callable[[], bool], timeout_s: float = float("inf")) -> None:
        """Handle events of the hosts until `is_done`, or the time is up."""
        deadline = time.monotonic() + timeout_s
        while not is_done() and (now := time.monotonic()) < deadline:
            self._supervisor.turn(deadline - now)

    def dismiss_idle(self, busy: Iterable[HostProcesses]) -> None:
        """Release the hosts that have no process to run."""
        in_use = list(busy)
        self._release([one for one in self.connections if one.processes not in in_use])


# Checks before the start.

FREE_BYTES_MIN = 64 << 20
"""Free space in the destination folder below which a host has a problem."""


def judge(connections: Iterable[HostConnection], destination: str | None, root: str = "the scheduler") -> None:
    """Turn everything that would stop the job later into a problem of its host.

    Args:
        connections: the hosts, with their answers.
        destination: the folder to copy to; None if nothing is copied.
        root: the process that all others dial.
    """
    for one in connections:
        if not one.problem:
            one.problem = "; ".join(_problems(one, destination, root))


def _problems(one: HostConnection, destination: str | None, root: str) -> list[str]:
    facts, found = one.facts, one.found
    wrong = []
    if facts["version"] != __version__:
        wrong.append(
            f"it has kvdist {facts['version']} and this machine {__version__}; install the same:"
            f" {install_command(one.host, str(facts['python']))}"
        )
    folder = found.get("folder", {})
    if destination and folder.get("problem"):
        wrong.append(str(folder["problem"]))
    elif destination and folder.get("free_bytes", 0) < FREE_BYTES_MIN:
        wrong.append(
            f"{destination} has {_size(folder.get('free_bytes', 0))} free, and needs {_size(FREE_BYTES_MIN)}; make room"
            " or name another folder with --sync-dst-dir"
        )
    if found.get("problem"):
        wrong.append(str(found["problem"]))
    if found.get("has_cwd") is False:
        wrong.append(
            "it does not have the folder in which the job was started here; copy it there with --sync-dst-dir, or start"
            " in a folder that all hosts have"
        )
    if found.get("has_port") is False:
        wrong.append("every port of the range is taken there; widen --port-range")
    missing = [gpu for gpu in one.host.gpus or () if gpu.isdigit() and int(gpu) >= facts["gpus"]]
    if missing:
        wrong.append(f"gpus= names {', '.join(missing)}, and the host has {facts['gpus']} (counted from 0)")
    if found.get("unreachable"):
        wrong.append(f"{root} cannot be reached from there: {found['unreachable']}")
    return wrong


def explained(failure: str, python: str, host: Host) -> str:
    """The message of ssh or of the remote shell, with advice; a command that helps stands at the end.

    Args:
        failure: the message.
        python: the interpreter that was to run the agent.
        host: the host.
    """
    known_as = host.name if host.port is None else f"[{host.name}]:{host.port}"
    known = [] if host.known_hosts is None else ["-f", host.known_hosts]
    port = [] if host.port is None else ["-p", str(host.port)]
    key = [] if host.identity is None else ["-i", host.identity]
    login, ssh = login_of(host), shlex.join(["ssh", *words_of_host(host), login_of(host)])
    advice = {
        # First, as ssh then also prints what it prints for an unknown key.
        KEY_CHANGED: f"the key of {host.name} has changed: find out why, as another machine may answer in its place;"
        f" {shlex.join(['ssh-keygen', '-R', known_as, *known])} forgets the old key",
        "Permission denied": "ssh must log in by key, without a password:"
        f" {shlex.join(['ssh-copy-id', *key, *port, login])}",
        "Host key verification failed": f"give --accept-new-host-keys, or connect once by hand to see the key: {ssh}",
        "Could not resolve": f"there is neither a host nor a hostfile of the name {host.name}"
        if host.is_alone
        else "check the name, or add it to ~/.ssh/config",
        "timed out": f"is the machine on, is the name {host.name} right, does a firewall block port {host.port or 22}?",
        "Connection refused": "does an ssh daemon run there, at that port?",
        "No module named": f"install kvdist there: {install_command(host, python)}",
        "No such file or directory": f"there is no {python}; give the interpreter of that host by python= or --python",
        "not found": f"there is no {python}; give the interpreter of that host by python= or --python",
    }
    for sign, what in advice.items():
        if sign in failure:
            return f"{failure}: {what}"
    return failure


def install_command(host: Host, python: str) -> str:
    """The command that copies this machine's kvdist to a host and installs it; kvdist is in no package index."""
    words = words_of_host(host)
    install = shlex.join(["ssh", *words, login_of(host), f"{python} -m pip install ./kvdist"])
    source = Path(__file__).resolve().parents[2]
    if not (source / "pyproject.toml").is_file():
        return f"copy a clone of kvdist {__version__} there, as the folder kvdist, and call {install}"
    shell = shlex.join(["ssh", *words])
    name = f"[{host.name}]" if ":" in host.name else host.name
    target = f"{login_of(host).removesuffix(host.name)}{name}:kvdist/"
    skip = ["--exclude", ".git", "--exclude", ".venv"]
    return f"{shlex.join(['rsync', '-a', *skip, '-e', shell, f'{source}/', target])} && {install}"


def require_all(connections: Sequence[HostConnection]) -> None:
    """Raise if a host has a problem.

    Raises:
        ConfigError: a host has a problem; the message has a sentence for each.
    """
    problems = [f"{one.host.name}: {one.problem}" for one in connections if one.problem]
    if problems:
        count = f"{len(problems)} of {len(connections)} hosts" if len(connections) > 1 else "the host"
        raise ConfigError(f"{count} cannot take part\n  " + "\n  ".join(problems))


def table(connections: Sequence[HostConnection], root: str = "scheduler") -> str:
    """A table with a line for each host, without empty columns.

    Args:
        connections: the hosts.
        root: the title of the column that says whether the root was reached.
    """
    titles = ("host", "address", "python", "kvdist", "cores", "GPUs", "GFLOP/s", "free", root)
    return text_table(titles, [[one.host.name, *_cells(one)] for one in connections])


def _cells(one: HostConnection) -> list[str]:
    facts, found = one.facts, one.found
    if not facts:
        return ["no connection"]
    free = found.get("folder", {}).get("free_bytes")
    unreachable = found.get("unreachable")
    return [
        "this machine" if one.is_this_machine else one.address,
        str(facts["python_version"]),
        str(facts["version"]),
        str(facts["cores"]),
        str(facts["gpus"]),
        str(found.get("gflops", "")),
        "" if free is None else _size(free),
        "" if unreachable is None else "no" if unreachable else "reached",
    ]


def _size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"
