"""The port of a scheduler under Slurm is free where it runs; stand-ins for Slurm's commands run the tasks here."""

from __future__ import annotations

import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvdist_launch.emit import FIND_PORT
from tests.ports import free_port

SRUN = """\
#!/bin/bash
# Runs what follows the options once for each of --ntasks, each with the standard input, on "the node" that this is.
while [[ $1 == --* ]]; do
  case $1 in --ntasks=*) tasks=${1#*=} ;; esac
  shift
done
script=$(cat)
export SLURM_NODEID=0 SLURM_STEP_TASKS_PER_NODE=$tasks
for ((rank = 0; rank < tasks; rank++)); do
  SLURM_PROCID=$rank SLURM_LOCALID=$rank "$@" <<<"$script" &
  started+=($!)
done
for one in "${started[@]}"; do wait "$one" || code=$?; done
exit "${code:-0}"
"""
SCONTROL = "#!/bin/sh\necho localhost\n"
STORE = (
    "import os; from kvdist import kv; s = kv.create('dist'); os.write(1, b'worker %d is done\\n' % s.rank); s.close()"
)
"""Its line leaves whole: processes of srun share a pipe."""
TIMEOUT_S = 200


@pytest.fixture
def slurm(tmp_path: Path, env: dict[str, str]) -> dict[str, str]:
    """The variables of an allocation of one node."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(stat.S_IRWXU)
    port = next(port for port in iter(free_port, None) if port < 30000)  # the last digits of which are those of a job
    allocation = {"SLURM_JOB_ID": str(port), "SLURM_JOB_NODELIST": "localhost", "SLURM_JOB_NUM_NODES": "1"}
    return {**env, **allocation, "PATH": f"{tmp_path}:{env['PATH']}"}


@pytest.mark.parametrize("words", [("--launcher", "slurm"), ("--emit", "sbatch")])
def test_a_job_runs_where_another_has_the_port_that_its_number_would_give(slurm, words):
    launch = [sys.executable, "-m", "kvdist_launch", "-n", "2", "-s", "1", *words, "--", sys.executable, "-c", STORE]
    with socket.create_server(("127.0.0.1", 20000 + int(slurm["SLURM_JOB_ID"]) % 10000)):
        done = subprocess.run(launch, env=slurm, capture_output=True, text=True, timeout=TIMEOUT_S)
        if "--emit" in words:
            bash = ["bash", "-s"]
            done = subprocess.run(bash, env=slurm, input=done.stdout, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr
    assert sorted(line for line in done.stdout.splitlines() if "is done" in line) == [
        f"worker {rank} is done" for rank in range(2)
    ]


def test_a_node_without_a_free_port_is_named():
    done = subprocess.run([sys.executable, "-c", FIND_PORT, "192.0.2.1", "20000"], capture_output=True, text=True)
    assert done.returncode == 1 and "kvdist: no port of 192.0.2.1 is free for the scheduler: " in done.stderr
