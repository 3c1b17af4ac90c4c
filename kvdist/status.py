"""``kvdist status``: the jobs of this user on this machine, by the environments of their processes in ``/proc``.

A worker's subprocesses inherit its environment, so only the oldest process with the same job, role and rank counts.
"""

from __future__ import annotations

import argparse
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
ROLES = ("scheduler", "server", "worker")
STATES = {"T": "stopped by a signal", "t": "stopped by a debugger"}
"""Letter of a process state in ``/proc/PID/stat`` → words; processes with other letters run or wait."""
HERE = {"", "127.0.0.1", "localhost"}
"""Addresses of the scheduler of a job on this machine."""


@dataclass(frozen=True, slots=True)
class JobProcess:
    """A process of a job.

    Attributes:
        job: the job's id; '' if it was started without the launcher.
        role, rank: its role and rank; the rank is -1 if the scheduler assigns it.
        started: clock ticks from the start of the machine to that of the process.
        scheduler: the address of the job's scheduler.
    """

    job: str
    role: str
    rank: int
    pid: int
    state: str
    started: int
    memory_mb: int
    folder: str
    scheduler: str

    @property
    def name(self) -> str:
        """``worker-1``, or ``scheduler``."""
        return self.role if self.role == "scheduler" else f"{self.role}-{self.rank if self.rank >= 0 else '?'}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the arguments of ``kvdist status``: it has none."""
    parser.set_defaults(command=_answer)


def _answer(_: argparse.Namespace) -> tuple[str, int]:
    jobs: dict[tuple[str, str], list[JobProcess]] = defaultdict(list)
    for process in oldest(processes()):
        jobs[process.job, process.scheduler].append(process)
    if not jobs:
        return "No job of this user runs on this machine. kvdist-launch -n 2 -s 2 python train.py starts one.", 0
    return "\n\n".join(_described(found) for found in jobs.values()), 0


def processes(proc: Path = PROC) -> Iterator[JobProcess]:
    """The processes that have the environment of a job and that this user may read; not this one."""
    for folder in proc.iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                found = _read(folder)
            except (OSError, ValueError, IndexError):
                continue  # it has ended, or belongs to another user
            if found is not None:
                yield found


def _read(folder: Path) -> JobProcess | None:
    entries = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
    variables = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    role = variables.get("DMLC_ROLE") or ("worker" if "KVDIST_RANK" in variables else "")
    if role not in ROLES:
        return None
    # The name in parentheses may have any characters.
    fields = (folder / "stat").read_text(errors="replace").rpartition(")")[2].split()
    rank = variables.get("KVDIST_RANK", "-1")
    return JobProcess(
        job=variables.get("KVDIST_JOB", ""),
        role=role,
        rank=int(rank) if rank.lstrip("-").isdigit() else -1,
        pid=int(folder.name),
        state=fields[0],
        started=int(fields[19]),
        memory_mb=int(fields[21]) * os.sysconf("SC_PAGE_SIZE") // 10**6,
        folder=os.readlink(folder / "cwd"),
        scheduler=":".join(filter(None, (variables.get("DMLC_PS_ROOT_URI"), variables.get("DMLC_PS_ROOT_PORT")))),
    )


def oldest(found: Iterator[JobProcess]) -> list[JobProcess]:
    """The oldest process of each place in a job, as its subprocesses have its environment; by job, role and rank."""
    places: dict[tuple[str, str, str, int], JobProcess] = {}
    for process in sorted(found, key=lambda one: (one.started, one.pid)):
        pid = process.pid if process.rank < 0 and process.role != "scheduler" else -1
        places.setdefault((process.job, process.scheduler, process.role, pid if pid >= 0 else process.rank), process)
    return sorted(places.values(), key=lambda one: (one.job, one.scheduler, ROLES.index(one.role), one.rank, one.pid))


def _described(found: list[JobProcess]) -> str:
    first = min(found, key=lambda one: one.started)
    folder = next((one.folder for one in found if one.role == "worker"), first.folder)
    where = "" if first.scheduler.partition(":")[0] in HERE else f", whose scheduler is at {first.scheduler}"
    lines = [f"job {first.job or 'started by hand'} in {folder}, for {_age(first.started)}{where}:"]
    for process in found:
        state = STATES.get(process.state, "running")
        cure = f"; kill -CONT {process.pid} lets it go on" if process.state == "T" else ""
        lines.append(f"  {process.name:10} pid {process.pid:<8} {process.memory_mb:6,} MB  {state}{cure}")
    return "\n".join(lines)


def _age(ticks: int) -> str:
    """The time since so many clock ticks after the start of the machine: ``5 s``, ``3 min``, ``2 h 5 min``."""
    uptime_s = float((PROC / "uptime").read_text().split()[0])
    minutes, seconds = divmod(max(0, round(uptime_s - ticks / os.sysconf("SC_CLK_TCK"))), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min" if minutes else f"{seconds} s"
