"""A real Slurm cluster of one node, made for a test and ended with it: munged, slurmctld and slurmd in one folder."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.ports import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
READY_S = 30.0

CONFIGURATION = """\
ClusterName=test
SlurmctldHost={host}({address})
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
InactiveLimit=0
KillWait=5
NodeName={host} NodeAddr={address} CPUs=8 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES MaxTime=10 State=UP
"""


def missing() -> str | None:
    """Why there can be no cluster here; None if there can."""
    if os.geteuid() != 0:
        return "root is needed to start slurmd"
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    return f"{', '.join(absent)} not installed (apt install slurm-wlm munge)" if absent else None


@contextmanager
def slurm_cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Start the daemons, wait until the node is idle, and end them afterwards.

    Gives the variables for Slurm's commands.

    Raises:
        AssertionError: the node did not become idle; the message holds the logs.
    """
    for name in ("state", "spool"):
        (folder / name).mkdir()
    folder.chmod(0o755)  # munged refuses a socket whose folder others cannot enter
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o400)
    host = socket.gethostname().partition(".")[0]
    ports = {"ctld_port": free_port(), "slurmd_port": free_port()}
    text = CONFIGURATION.format(folder=folder, host=host, address="127.0.0.1", **ports)
    (folder / "slurm.conf").write_text(text)
    env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    files = {"socket": "munge.socket", "key-file": "munge.key", "log-file": "munged.log", "pid-file": "munged.pid"}
    files["seed-file"] = "munge.seed"
    daemons = []
    try:
        munge = ["munged", "--force", "--foreground", *(f"--{name}={folder / file}" for name, file in files.items())]
        for argv in (munge, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", host]):
            with (folder / f"{argv[0]}.out").open("wb") as out:
                daemons.append(subprocess.Popen(argv, env=env, stdout=out, stderr=out, stdin=subprocess.DEVNULL))
            if argv is munge:
                _await(lambda: (folder / "munge.socket").exists(), folder)
        _await(lambda: _is_idle(env), folder)
        yield env
        subprocess.run(["scancel", "--user=root", "--full"], env=env, timeout=20, check=True)
        _await(lambda: not _asked(["squeue", "-h"], env), folder)
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _is_idle(env: dict[str, str]) -> bool:
    return _asked(["sinfo", "-h", "-o", "%T"], env) == "idle"


def _asked(argv: list[str], env: dict[str, str]) -> str:
    return subprocess.run(argv, env=env, capture_output=True, text=True, timeout=20).stdout.strip()


def _await(condition: Callable[[], bool], folder: Path) -> None:
    deadline = time.monotonic() + READY_S
    while not condition():
        if time.monotonic() > deadline:
            paths = [*folder.glob("*.log"), *folder.glob("*.out")]
            logs = [f"{path.name}:\n{path.read_text(errors='replace')[-2000:]}" for path in paths]
            raise AssertionError("the cluster did not come so far\n" + "\n".join(logs))
        time.sleep(0.1)
