"""Starts processes for the benchmarks, sees that none outlives them, and tells those of a kvdist cluster apart."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout, installed or not

from kvdist.version import __version__  # noqa: E402

WORKERS = ROOT / "benchmarks" / "workers"
TIMEOUT_S = 300.0
HELPER_GRACE_S = 10.0
"""What a server or scheduler of another system has to end by itself."""


PLAIN_TCP = {"KVDIST_TRANSPORT": "tcp", "KVDIST_SECURITY": "none"}
"""Every byte goes through a TCP socket, unencrypted, as those of the systems that kvdist is compared with."""


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without a cluster in it, and with the checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVDIST_"))}
    paths = [str(ROOT), str(ROOT / "launcher"), clean.get("PYTHONPATH", "")]
    return clean | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | variables


def launch_command(workers: int, servers: int, command: list[str]) -> list[str]:
    """The argument list that runs `command` in every worker of a fresh cluster."""
    return [sys.executable, "-m", "kvdist_launch", "-n", str(workers), "-s", str(servers), "--", *command]


def worker_script(name: str) -> str:
    """The path of a script in `benchmarks/workers`."""
    return str(WORKERS / name)


def worker_command(script: str, *arguments: str) -> list[str]:
    """The argument list that runs such a script with the Python of this process."""
    return [sys.executable, worker_script(script), *arguments]


@dataclass(frozen=True)
class Start:
    """A process to be started."""

    command: list[str]
    environment: dict[str, str]
    helper: bool = False
    """It ends when the others do, and nobody minds how."""


def end_on_terminate() -> None:
    """Have SIGTERM end this program as Ctrl-C does, so that what it has started is ended with it."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def run_together(starts: list[Start], timeout_s: float = TIMEOUT_S) -> None:
    """Run processes side by side until all have ended. None, nor what it started, outlives the call.

    Raises:
        RuntimeError: one failed or took too long; the message holds what all have printed.
    """
    with tempfile.TemporaryFile() as log, contextlib.ExitStack() as stack:
        deadline = time.monotonic() + timeout_s
        started = [stack.enter_context(_process(start, log)) for start in starts]
        workers = [process for start, process in zip(starts, started, strict=True) if not start.helper]
        verdict = _wait(workers, deadline)
        if not verdict:
            _wait([process for process in started if process not in workers], time.monotonic() + HELPER_GRACE_S)
            return
        log.seek(0)
        raise RuntimeError(f"{log.read().decode(errors='replace')}\n{verdict}")


@contextlib.contextmanager
def _process(start: Start, log: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    # A session of its own, so that what it starts can be ended with it.
    process = subprocess.Popen(
        start.command, env=start.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], deadline: float) -> str:
    """Wait until all have ended or one has failed; what is wrong, or nothing."""
    ends = {os.pidfd_open(process.pid): process for process in processes}
    try:
        while ends:
            ready = select.select(list(ends), [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                return f"not at their end in time: {[process.args for process in ends.values()]}"
            for descriptor in ready:
                process = ends.pop(descriptor)
                os.close(descriptor)
                if process.wait():
                    return f"{process.args} ended with code {process.returncode}"
    finally:
        for descriptor in ends:
            os.close(descriptor)
    return ""


@dataclass(frozen=True)
class Process:
    """A process of a cluster."""

    name: str
    pid: int


@contextlib.contextmanager
def running(command: list[str], log: Path, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
    """A launcher at work, its output in `log`; ended, with all that descends from it, when the block ends."""
    with log.open("wb") as output:
        launcher = subprocess.Popen(command, env=environment(**variables), stdout=output, stderr=output)
    try:
        yield launcher
    finally:
        for process in cluster_of(launcher.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, 9)
        launcher.kill()
        launcher.wait()


def cluster_of(launcher_pid: int) -> list[Process]:
    """The scheduler, servers and workers that descend from a launcher, named as kvdist names them."""
    found = []
    for pid in descendants(launcher_pid):
        variables = environment_of(pid)
        role = variables.get("DMLC_ROLE", variables.get("KVDIST_ROLE"))
        rank = variables.get("KVDIST_RANK", "0")
        if role:
            found.append(Process(role if role == "scheduler" else f"{role}-{rank}", pid))
    return found


def descendants(pid: int) -> list[int]:
    """Children, and their children, of a process."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            for child in (task / "children").read_text().split():
                found += [int(child), *descendants(int(child))]
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment with which a process was started; empty when it is gone."""
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(entry.split("=", 1) for entry in entries if "=" in entry)


def free_port() -> int:
    """A TCP port of this host that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def machine() -> dict[str, object]:
    """What a number must be read with."""
    cpu = _first_value(Path("/proc/cpuinfo"), "model name")
    memory = _first_value(Path("/proc/meminfo"), "MemTotal")
    return {
        "processor": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory": memory,
        "system": platform.platform(),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        **{name: _version(name) for name in ("numpy", "pyzmq", "msgpack", "numba", "torch")},
        "kvdist": __version__,
    }


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


def _first_value(path: Path, name: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "unknown")
