"""One program that sums over all ranks, under everything that may start it, with nothing changed in it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvdist.errors import ConfigError

pytest.importorskip("torch", reason="WAYS INTO COLLECTIVES ARE NOT TESTED: torch is not installed")
collective = pytest.importorskip("kvdist.collective")

TIMEOUT_S = 100
TOGETHER_S = 30.0
"""One failing rank ends all others within this time, on a slow machine too; they would wait for one that sleeps."""

SUM = """
import torch
import kvdist.collective as hvd
hvd.init()
total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
places = f"{hvd.local_rank()} of {hvd.local_size()} here, {hvd.cross_rank()} of {hvd.cross_size()} across"
print(f"rank {hvd.rank()} of {hvd.size()}, {places}: {total:g}\\n", end="", flush=True)
hvd.shutdown()
"""
LAST = """
import os, time, torch
import kvdist.collective as hvd
hvd.init()
hvd.barrier()
print("pid", os.getpid(), flush=True)
if hvd.rank() == 1:
    time.sleep(60)
hvd.allreduce(torch.ones(3))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "sum.py"
    path.write_text(SUM)
    return str(path)


def run(argv: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=TIMEOUT_S)


def told(shown: str) -> list[str]:
    """What the ranks have said of themselves, whatever stands before it."""
    return sorted(re.findall(r"rank \d.*", shown))


def expected(size: int) -> list[str]:
    """The same, where all are on one machine and have summed."""
    total = size * (size + 1) // 2
    return [f"rank {rank} of {size}, {rank} of {size} here, 0 of 1 across: {total}" for rank in range(size)]


def launched(module: str, *words: str) -> list[str]:
    return [sys.executable, "-m", module, *words]


@pytest.mark.slow_cases("kvdist_launch")
@pytest.mark.parametrize(
    "start",
    [
        ("kvdist_launch", "-n", "2", "-s", "0"),
        ("kvdist_launch.run_cli", "-np", "2", "-H", "localhost:2"),
        ("torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
    ],
    ids=lambda start: start[0],
)
def test_a_program_runs_under_launchers_of_python(start, program, env):
    python = [] if start[0].startswith("torch") else [sys.executable]
    done = run(launched(*start, *python, program), env)
    assert (done.returncode, told(done.stdout)) == (0, expected(2)), done.stderr


def test_a_program_runs_alone(program, env):
    done = run([sys.executable, program], env)
    assert (done.returncode, told(done.stdout)) == (0, expected(1)), done.stderr


@pytest.mark.machines
def test_a_program_runs_under_mpirun(program, mpi_env):
    done = run(["mpirun", "-np", "2", "-bind-to", "none", "-map-by", "slot", sys.executable, program], mpi_env)
    assert (done.returncode, told(done.stdout)) == (0, expected(2)), done.stderr


@pytest.mark.machines
def test_a_program_runs_under_srun_and_is_told_that_a_batch_script_is_none_of_its_tasks(program, slurm_env, tmp_path):
    done = run(["srun", "--ntasks=2", sys.executable, program], slurm_env)
    assert (done.returncode, told(done.stdout)) == (0, expected(2)), done.stderr
    script, out = tmp_path / "job.sh", tmp_path / "job.out"
    script.write_text(f"#!/bin/sh\n{sys.executable} {program}\nsrun {sys.executable} {program}\n")
    run(["sbatch", "--wait", "--ntasks=2", f"--chdir={tmp_path}", f"--output={out}", str(script)], slurm_env)
    assert "SLURM_STEP_NODELIST is not set: start it with srun" in out.read_text()
    assert told(out.read_text()) == expected(2)


@pytest.mark.slow_cases("pmi", "slurm", "horovod")
@pytest.mark.parametrize("kind", ["mpi", "pmi", "slurm", "horovod"])
def test_the_variables_of_other_launchers_are_enough(kind, program, env):
    job = {"PMIX_NAMESPACE": f"test{os.getpid()}", "PMI_JOBID": f"test{os.getpid()}", "SLURM_JOB_ID": str(os.getpid())}
    ranks = []
    for rank in ("0", "1"):
        own = {
            "mpi": {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": rank,
                    "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            "pmi": {"PMI_RANK": rank, "PMI_SIZE": "2", "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": "2"},
            "slurm": {"SLURM_PROCID": rank, "SLURM_NTASKS": "2", "SLURM_LOCALID": rank, "SLURM_NODEID": "0",
                      "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "vm", "SLURM_STEP_TASKS_PER_NODE": "2"},
            "horovod": {"HOROVOD_RANK": rank, "HOROVOD_SIZE": "2"},
        }[kind]  # fmt: skip
        argv = [sys.executable, program]
        ranks.append(subprocess.Popen(argv, env={**env, **job, **own}, stdout=subprocess.PIPE, text=True))
    shown = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert told("".join(shown)) == expected(2)


def test_half_of_what_a_launcher_says_is_refused_with_a_sentence(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    sentence = "OMPI_COMM_WORLD_RANK is set and OMPI_COMM_WORLD_SIZE not: Open MPI's mpirun sets both"
    with pytest.raises(ConfigError, match=sentence):
        collective.init()


def test_a_rank_that_is_killed_within_an_operation_is_named_and_ends_the_others_in_time(launch, is_gone):
    started = launch("-n", "3", "-s", "0", sys.executable, "-c", LAST)
    lines = [started.line_with("pid ") for _ in range(3)]
    pids = {line.partition(" ")[0]: int(line.split()[-1]) for line in lines}
    os.kill(pids["w1"], signal.SIGKILL)
    began = time.monotonic()
    code, _, err = started.finish()
    assert time.monotonic() - began < TOGETHER_S, err
    assert code == 128 + signal.SIGKILL
    last = err.splitlines()[-1]
    assert f"worker-1 (pid {pids['w1']}) was killed by signal 9 (SIGKILL)" in last
    assert all(is_gone(pid) for pid in pids.values())


def test_a_store_of_servers_is_refused_where_there_are_none(launch):
    script = "from kvdist import kv; kv.create('dist')"
    code, _, err = launch("-n", "2", "-s", "0", sys.executable, "-c", script).finish()
    assert code == 1
    assert "this job has no servers (DMLC_NUM_SERVER is 0): use kv.create('collective')" in err
