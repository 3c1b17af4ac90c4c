"""Children inherit the variables by which a process is in a job: they do not take its place, nor its descriptors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cases import each
from tests.forks import Forked

TIMEOUT_S = 200

STORE = ("kvdist_launch", "-n", "1", "-s", "1"), "from kvdist import kv; store = kv.create('dist')"
RANK = ("kvdist_launch.run_cli", "-np", "2"), "import kvdist.horovod as hvd; hvd.init()"
MULTIPROCESSING = """
import multiprocessing
child = multiprocessing.get_context({method!r}).Process(target=print, args=("the child ran",))
child.start()
child.join()
raise SystemExit(child.exitcode)
"""
SUBPROCESS = """
import subprocess, sys
raise SystemExit(subprocess.run([sys.executable, *sys.argv]).returncode)
"""
STARTS = {
    "spawn": MULTIPROCESSING.format(method="spawn"),
    "forkserver": MULTIPROCESSING.format(method="forkserver"),
    "subprocess": SUBPROCESS,
}


@pytest.fixture
def run(forked: type[Forked]) -> Callable[[tuple[str, ...], Path, str], subprocess.CompletedProcess[str]]:
    """``run(launcher, script, text)`` writes the script and launches it: launcher and workers are forked."""

    def launched(launcher: tuple[str, ...], script: Path, text: str) -> subprocess.CompletedProcess[str]:
        script.write_text(text)
        argv = [sys.executable, "-m", *launcher, sys.executable, str(script)]
        with forked(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            out, err = process.communicate(timeout=TIMEOUT_S)
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    return launched


@each("begin, how", [*((STORE, how) for how in STARTS), (RANK, "spawn")])
def test_a_child_in_the_place_of_its_parent_is_told_so_and_of_the_guard(run, tmp_path, begin, how):
    launcher, first = begin
    done = run(launcher, tmp_path / "train.py", first + STARTS[how])
    by = "" if how == "subprocess" else ", started by multiprocessing,"
    assert done.returncode == 1 and "the child ran" not in done.stdout
    told = [line for line in done.stderr.splitlines() if "kvdist.errors." in line]
    assert told and f"is a child of worker-{told[0].partition('w')[2][0]} (process " in told[0], done.stderr
    assert f"){by} and cannot have its place" in told[0] and 'if __name__ == "__main__":' in told[0], done.stderr


@each("policy", ["continue", "wait"])
def test_a_child_of_a_worker_without_a_rank_is_not_one_more(run, tmp_path, policy):
    launcher, first = STORE
    unranked = f"import os; os.environ.pop('KVDIST_RANK', None)\n{first}"
    done = run((*launcher, "--on-loss", policy), tmp_path / "train.py", unranked + STARTS["spawn"])
    assert "is a child of worker-0 (process " in done.stderr and "the child ran" not in done.stdout, done.stderr
    assert 'if __name__ == "__main__":' in done.stderr


@each("begin", [STORE, RANK])
def test_with_the_guard_children_run(run, tmp_path, begin):
    launcher, first = begin
    guarded = MULTIPROCESSING.format(method="spawn").strip().replace("\n", "\n    ")
    done = run(launcher, tmp_path / "train.py", f"if __name__ == '__main__':\n    {first}\n    {guarded}\n")
    assert done.returncode == 0 and "the child ran" in done.stdout, done.stderr


NESTED = """
import subprocess, sys
store.close()
inner = [sys.executable, "-m", "kvdist_launch", "-n", "1", "-s", "1", sys.executable, "-c", sys.argv[0] and INNER]
raise SystemExit(subprocess.run(inner).returncode)
"""


def test_a_worker_starts_a_job_of_its_own(run, tmp_path):
    launcher, first = STORE
    text = f"INNER = {first + '; print(1 + store.rank, store.num_workers)'!r}\n{first}{NESTED}"
    done = run(launcher, tmp_path / "train.py", text)
    assert done.returncode == 0 and "1 1" in done.stdout, done.stderr


DESCRIPTOR = """
import os, subprocess, sys
before = os.environ.get("KVDIST_LISTEN_FD")
import kvdist.horovod as hvd
hvd.init()
seen = subprocess.run([sys.executable, "-c", "import os; print(os.environ.get('KVDIST_LISTEN_FD'))"],
                      capture_output=True, text=True).stdout.strip()
print("rank", hvd.rank(), before is not None, seen, before and os.get_inheritable(int(before)))
hvd.shutdown()
hvd.init()
hvd.barrier()
"""


def test_the_descriptor_that_rank_0_has_inherited_is_not_left_to_children(run, tmp_path):
    done = run(RANK[0], tmp_path / "train.py", DESCRIPTOR)
    told = sorted(line.partition("│ ")[2] for line in done.stdout.splitlines())
    assert (done.returncode, told) == (0, ["rank 0 True None False", "rank 1 False None None"]), done.stderr


def test_a_number_that_is_another_descriptor_here_is_named(run, tmp_path):
    (tmp_path / "inner.py").write_text(RANK[1])
    wrapper = f"import subprocess, sys\nsubprocess.run([sys.executable, {str(tmp_path / 'inner.py')!r}], check=True)\n"
    done = run(RANK[0], tmp_path / "wrapper.py", wrapper)
    assert done.returncode == 1
    assert "kvdist.errors.ConfigError: KVDIST_LISTEN_FD is " in done.stderr and "inherit" in done.stderr, done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_child_with_a_place_of_its_own_takes_it(monkeypatch, rank):
    from kvdist.config.environment import require_own_place, take_place

    monkeypatch.setenv("KVDIST_TAKEN_BY", "")
    take_place("worker-0", "0 at here")
    require_own_place("0 at here")
    script = f"from kvdist.config.environment import require_own_place as own; own('{rank} at here')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, "is a child of worker-0" in done.stderr) == ((1, True) if rank == "0" else (0, False))
