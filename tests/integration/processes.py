"""Real clusters for tests: processes that are started, watched with deadlines, killed, and checked to be gone.

A `Job` holds every process of one test, whether started by hand with ``DMLC_*`` variables or by kvdist-launch. All its
processes carry a mark in their environment and have a directory of their own for temporary files, so that at the end
whatever is left can be found, however it was started. Nothing here sleeps: one selector waits for output and endings.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.namespaces import Host
from tests.ports import HOST, free_port

PROGRAMS = Path(__file__).with_name("programs")
MARK = "PYTEST_JOB_OF_KVDIST"
TIMEOUT_S = 100.0
"""For anything that must happen at all. What must happen soon has a deadline of its own in its test."""
TICKS_MAX = 44
"""Of a worker between a loss and its own end: 4.4 s by its own clock (`programs/ticking.py`), less than `PATIENT`."""
PATIENT = {"KVDIST_PATIENCE_S": "60", "KVDIST_EXPLAIN_AFTER_S": "60"}
"""What every job has that is not told otherwise. A machine that runs other tests may let a process stand still for
seconds, which is no loss and needs no explanation; and a loss that is noticed is noticed by its broken connection."""
LOOK_AGAIN_S = 0.1
"""How often it is looked whether something holds that no output tells."""
READ_BYTES = 1 << 16
EXIT_PEER_LOST = 75
EXIT_CONFIG = 2


class Process:
    """One started process, its exit code, and all it has printed, both outputs in one text."""

    def __init__(
        self, name: str, argv: list[str], env: Mapping[str, str], popen: type[subprocess.Popen[bytes]]
    ) -> None:
        self.name = name
        self.text = ""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")  # a character may come in two pieces
        self.popen = popen(
            argv, env=dict(env), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.ended_at: float | None = None
        """When it was seen to have ended, in monotonic seconds."""

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def code(self) -> int | None:
        """Its exit code, minus a signal's number, or None while it runs."""
        return self.popen.returncode

    def lines_with(self, text: str) -> list[str]:
        """The lines so far that contain a text."""
        return [line for line in self.text.splitlines() if text in line]

    def worker_lines(self) -> list[str]:
        """The lines so far of a launcher's workers, with their prefixes."""
        return [line for line in self.text.splitlines() if re.match(r"w[0-9]+ │ ", line)]


def prefix_of(name: str) -> str:
    """What the launcher writes before the lines of ``worker-0``, for one."""
    role, _, rank = name.partition("-")
    return f"{role[0]}{rank} │ " if rank else "sched │ "


class Job:
    """The processes of one test.

    Args:
        folder: an empty directory for the job's temporary files.
        mark: what tells this job's processes from all others.
        popen: starts a process.
    """

    def __init__(self, folder: Path, mark: str, popen: type[subprocess.Popen[bytes]] = subprocess.Popen) -> None:
        self.folder = folder
        self.port = free_port()
        self.processes: dict[str, Process] = {}
        self._mark = mark
        self._popen = popen
        self._selector = selectors.DefaultSelector()
        self._ends: dict[str, int] = {}

    # Starting.

    def start(self, name: str, argv: list[str], **variables: str) -> Process:
        """Start any process as a part of the job, with these variables on top of the test's own."""
        env = {**os.environ, MARK: self._mark, "PYTHONUNBUFFERED": "1"}
        env |= {"TMPDIR": str(self.folder), "XDG_RUNTIME_DIR": str(self.folder), **PATIENT, **variables}
        process = self.processes[name] = Process(name, argv, env, self._popen)
        assert process.popen.stdout is not None
        os.set_blocking(process.popen.stdout.fileno(), False)
        self._selector.register(process.popen.stdout, selectors.EVENT_READ, process)
        self._ends[name] = os.pidfd_open(process.pid)
        self._selector.register(self._ends[name], selectors.EVENT_READ, process)
        return process

    def launch(
        self, workers: int, servers: int, *command: str, options: Sequence[str] = (), **variables: str
    ) -> Process:
        """Start kvdist-launch; `command` is a program of this folder, or an executable, and its arguments."""
        words = ["-m", "kvdist_launch", "-n", str(workers), "-s", str(servers), *options, "--", *program(*command)]
        return self.start("launcher", [sys.executable, *words], **variables)

    def cluster(self, workers: int, servers: int, *command: str, **variables: str) -> None:
        """Start a cluster by hand: the scheduler, the servers, and workers that run `command`."""
        for name in ["scheduler", *(f"server-{i}" for i in range(servers)), *(f"worker-{i}" for i in range(workers))]:
            self.node(name, workers, servers, *command, **variables)

    def node(
        self, name: str, workers: int, servers: int, *command: str, host: Host | None = None, **variables: str
    ) -> Process:
        """Start one process of a cluster by hand; servers and scheduler run ``python -m kvdist``."""
        role, _, rank = name.partition("-")
        argv = program(*command) if role == "worker" else [sys.executable, "-m", "kvdist"]
        if host is not None:
            argv = host.inside(*argv)
        env = self.environment(role, workers, servers)
        if rank:
            env["KVDIST_RANK"] = rank
        return self.start(name, argv, **{**env, **variables})

    def environment(self, role: str, workers: int, servers: int) -> dict[str, str]:
        """The variables that a user would type."""
        return {
            "DMLC_ROLE": role,
            "DMLC_PS_ROOT_URI": HOST,
            "DMLC_PS_ROOT_PORT": str(self.port),
            "DMLC_NUM_WORKER": str(workers),
            "DMLC_NUM_SERVER": str(servers),
        }

    # Watching.

    def wait(self, is_done: Callable[[], bool], what: str, timeout_s: float = TIMEOUT_S) -> None:
        """Take in outputs and endings until something holds; fail with everything printed so far if it never does."""
        deadline = time.monotonic() + timeout_s
        while not is_done():
            ready = self._selector.select(max(0.0, min(LOOK_AGAIN_S, deadline - time.monotonic())))
            if not ready and time.monotonic() >= deadline:
                raise AssertionError(f"not within {timeout_s:g} s: {what}\n{self.transcript()}")
            for key, _ in ready:
                self._take(key.data, key.fileobj)

    def line(self, name: str, text: str, timeout_s: float = TIMEOUT_S, count: int = 1) -> str:
        """Wait until a process has printed `count` lines that contain a text; the last of them."""
        process = self.processes[name]

        def printed() -> bool:
            # The last piece may be a line that is not complete yet.
            return len([line for line in process.text.split("\n")[:-1] if text in line]) >= count

        self.wait(lambda: printed() or process.code is not None, f"{name} prints {text!r}", timeout_s)
        assert printed(), f"{name} ended with {process.code} and never printed {text!r}\n{self.transcript()}"
        return process.lines_with(text)[count - 1]

    def match(self, name: str, pattern: str) -> None:
        """Wait until a process has printed a line, all of it, of which the end is like this."""
        process = self.processes[name]

        def printed() -> bool:
            return any(re.search(f"{pattern}$", line) for line in process.text.split("\n")[:-1])

        self.wait(lambda: printed() or process.code is not None, f"{name} prints {pattern!r}")
        assert printed(), f"{name} ended with {process.code} and never printed {pattern!r}\n{self.transcript()}"

    def finish(self, timeout_s: float = TIMEOUT_S, *, but: str = "") -> dict[str, int]:
        """Wait until every process (`but` one) has ended and return the exit codes."""
        awaited = [process for process in self.processes.values() if process.name != but]
        self.wait(lambda: all(p.code is not None for p in awaited), "every process ends", timeout_s)
        return {process.name: process.code for process in awaited if process.code is not None}

    def succeed(self, timeout_s: float = TIMEOUT_S) -> None:
        """Wait until every process has ended, and well."""
        codes = self.finish(timeout_s)
        assert not any(codes.values()), f"exit codes {codes}\n{self.transcript()}"

    def kill(self, name: str, number: signal.Signals = signal.SIGKILL) -> float:
        """Send a signal to a process, the launcher's children by the same names; the monotonic time of it."""
        os.kill(self.pid_of(name), number)
        return time.monotonic()

    def pid_of(self, name: str) -> int:
        """The process id of a process, or of a child of the launcher."""
        own = self.processes.get(name)
        return own.pid if own else self.children()[name]

    def children(self) -> dict[str, int]:
        """Name → process id of scheduler, servers and workers that the launcher has started."""
        launcher = self.processes["launcher"].pid
        found = {}
        for task in Path(f"/proc/{launcher}/task").glob("*"):
            for pid in (task / "children").read_text().split():
                variables = environment_of(int(pid))
                role = variables.get("DMLC_ROLE")
                if role:
                    found[role if role == "scheduler" else f"{role}-{variables['KVDIST_RANK']}"] = int(pid)
        return found

    def transcript(self) -> str:
        """Everything printed so far, for messages of failed assertions."""
        parts = [f"--- {p.name} (exit code {p.code}):\n{p.text}" for p in self.processes.values()]
        return "\n".join(parts)

    def _take(self, process: Process, source: object) -> None:
        if isinstance(source, int):
            process.popen.wait()
            process.ended_at = time.monotonic()
            self._selector.unregister(source)
            os.close(self._ends.pop(process.name))
        # What it printed before its end is in the pipe by now.
        pipe = process.popen.stdout
        while pipe is not None and not pipe.closed:
            try:
                data = os.read(pipe.fileno(), READ_BYTES)
            except BlockingIOError:
                return
            process.text += process.decoder.decode(data, final=not data)
            if not data:
                self._selector.unregister(pipe)
                pipe.close()

    def ticks(self) -> dict[str, int]:
        """How often each process has said that it runs."""
        return {name: process.text.split("\n").count("tick") for name, process in self.processes.items()}

    def assert_soon(self, before: Mapping[str, int], ticks_max: int = TICKS_MAX) -> None:
        """Check that no process has gone on for long, by its own clock, since it had ticked so often."""
        gone_on = {name: count - before[name] for name, count in self.ticks().items()}
        assert max(gone_on.values()) <= ticks_max, f"{gone_on}\n{self.transcript()}"

    # Ending.

    def left_behind(self, within_s: float = 0.0) -> list[str]:
        """Processes, ports and files of this job that are still there after a while; orphans are nobody's children."""
        deadline = time.monotonic() + within_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(LOOK_AGAIN_S)
        return left

    def _left(self) -> list[str]:
        left = [f"process {pid} ({command_of(pid)})" for pid in self.marked()]
        left += [f"file {path}" for path in sorted(self.folder.iterdir())]
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self.port))
            except OSError:
                left.append(f"port {self.port} is taken")
        return left

    def marked(self) -> list[int]:
        """The processes of this job that run, whoever started them."""
        return [int(path.name) for path in Path("/proc").glob("[0-9]*") if self._is_marked(int(path.name))]

    def close(self) -> None:
        """Kill what is left and free the descriptors."""
        for pid in self.marked():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes.values():
            process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()
        for descriptor in self._ends.values():
            os.close(descriptor)
        self._selector.close()

    def _is_marked(self, pid: int) -> bool:
        return environment_of(pid).get(MARK) == self._mark


def program(*command: str) -> list[str]:
    """The argument list of a program in the folder of programs, or of any other command."""
    first, *arguments = command or ("nothing.py",)
    if first.endswith(".py"):
        return [sys.executable, str(PROGRAMS / first), *arguments]
    return [first, *arguments]


def environment_of(pid: int) -> dict[str, str]:
    """The variables a process was started with; none when it is gone or another user's."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def command_of(pid: int) -> str:
    """The command line of a process, for messages."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
