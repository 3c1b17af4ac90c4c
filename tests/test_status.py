"""``kvdist status``: which jobs run on this machine, with real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvdist.status import JobProcess, oldest, processes

COMMAND = [sys.executable, "-m", "kvdist", "status"]
CHILD = "import subprocess; print('there', flush=True); subprocess.run(['sleep', '60'])"


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[str, dict[str, subprocess.Popen[str]]]]:
    """A job's id and its processes, of which worker-0 has a subprocess with the same environment."""
    name, started = uuid.uuid4().hex[:16], {}
    for role, rank in (("scheduler", 0), ("server", 0), ("worker", 0), ("worker", 1)):
        place = {"DMLC_ROLE": role, "KVDIST_RANK": str(rank), "KVDIST_JOB": name, "KVDIST_SECRET_FILE": "/secret"}
        place |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": "9091"}
        process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            env={**os.environ, **place},
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        started[f"{role}-{rank}"] = process
    yield name, started
    for process in started.values():
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def listed(name: str) -> list[str]:
    """The lines of one job."""
    text = subprocess.run(COMMAND, capture_output=True, text=True, check=True).stdout
    (found,) = [part for part in text.split("\n\n") if part.startswith(f"job {name} ")]
    return found.splitlines()


def test_each_process_of_a_job_is_listed_once_and_its_subprocesses_are_not(job, tmp_path):
    name, started = job
    first, *lines = listed(name)
    assert first.startswith(f"job {name} in {tmp_path}, for ") and "secret" not in "".join(lines)
    names = {"scheduler": "scheduler-0"} | {one: one for one in ("server-0", "worker-0", "worker-1")}
    assert [line.split()[:3] for line in lines] == [[one, "pid", str(started[names[one]].pid)] for one in names]


def test_a_stopped_process_is_named_with_what_lets_it_go_on(job):
    name, started = job
    pid = started["worker-1"].pid
    os.kill(pid, signal.SIGSTOP)
    while Path(f"/proc/{pid}/stat").read_text().split()[2] != "T":
        time.sleep(0.01)
    *_, last = listed(name)
    assert last.endswith(f"stopped by a signal; kill -CONT {pid} lets it go on")


def test_a_machine_without_jobs_is_told_how_to_start_one(tmp_path, monkeypatch, capsys):
    from kvdist import __main__, status

    monkeypatch.setattr(status, "processes", lambda: processes(tmp_path))
    assert __main__.main(["status"]) == 0
    assert capsys.readouterr().out.startswith("No job of this user runs on this machine. kvdist-launch -n 2")


def test_jobs_with_one_name_and_two_schedulers_are_two_jobs():
    def process(pid: int, scheduler: str) -> JobProcess:
        return JobProcess("", "worker", 0, pid, "S", pid, 1, "/srv", scheduler)

    found = oldest(iter([process(3, "b:1"), process(2, "a:1"), process(4, "a:1")]))
    assert [(one.pid, one.scheduler) for one in found] == [(2, "a:1"), (3, "b:1")]
