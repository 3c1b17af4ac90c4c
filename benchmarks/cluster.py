"""Starts kvdist clusters for the benchmarks and tells their processes apart, by what the system says of them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
WORKERS = ROOT / "benchmarks" / "workers"


def environment(**variables: str) -> dict[str, str]:
    """This process's environment without a cluster in it, and with the checkout on the path."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVDIST_"))}
    paths = [str(ROOT), str(ROOT / "launcher"), clean.get("PYTHONPATH", "")]
    return clean | {"PYTHONPATH": os.pathsep.join(path for path in paths if path)} | variables


def launch_command(workers: int, servers: int, command: list[str]) -> list[str]:
    """The argument list that runs `command` in every worker of a fresh cluster."""
    return [sys.executable, "-m", "kvdist_launch", "-n", str(workers), "-s", str(servers), "--", *command]


def worker_command(script: str, *arguments: str) -> list[str]:
    """The argument list of a script in `benchmarks/workers`."""
    return [sys.executable, str(WORKERS / script), *arguments]


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


def machine() -> dict[str, str | int]:
    """What a number must be read with."""
    model = "unknown"
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), model)
    return {"processor": model, "cores": len(os.sched_getaffinity(0)), "python": sys.version.split()[0]}
