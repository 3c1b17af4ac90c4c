"""Starts MXNet's processes on this machine: scheduler, servers and workers, or workers with kvdist's servers."""

from __future__ import annotations

from pathlib import Path

from cluster import ROOT, Start, environment, free_port, launch_command, worker_script
from peers.environments import python_made_by

SCRIPT = Path(__file__).with_name("mxnet.sh")
BRIDGE = ROOT / "examples" / "mxnet_bridge"


def mxnet_starts(workers: int, servers: int, arguments: list[str], script: str = "mxnet_worker.py") -> list[Start]:
    """The processes of a cluster whose workers run a script of `benchmarks/workers` with these arguments."""
    python = python_made_by(SCRIPT)
    shared = environment(
        DMLC_PS_ROOT_URI="127.0.0.1",
        DMLC_PS_ROOT_PORT=str(free_port()),
        DMLC_NODE_HOST="127.0.0.1",
        DMLC_NUM_WORKER=str(workers),
        DMLC_NUM_SERVER=str(servers),
    )
    # Importing MXNet in these roles is what runs them.
    roles = ["scheduler"] + ["server"] * servers
    starts = [Start([python, "-c", "import mxnet"], shared | {"DMLC_ROLE": role}, helper=True) for role in roles]
    command = [python, worker_script(script), *arguments]
    return starts + [Start(command, shared | {"DMLC_ROLE": "worker"})] * workers


def bridge_starts(workers: int, servers: int, arguments: list[str]) -> list[Start]:
    """A cluster of kvdist in which MXNet's Trainer does the work; servers run with the Python of this process."""
    python = python_made_by(BRIDGE / "environment.sh")
    command = [python, str(BRIDGE / "run.py"), worker_script("gluon_worker.py"), *arguments]
    return [Start(launch_command(workers, servers, command), environment(KMP_BLOCKTIME="0"))]


def hvd_starts(workers: int, servers: int, arguments: list[str], has_numba: bool = False) -> list[Start]:
    """A cluster of kvdist in which a DistributedTrainer of `kvdist.mxnet` does the work.

    Args:
        workers, servers: how many.
        arguments: of the workers.
        has_numba: whether servers run with the Python of this process, not with that of MXNet's environment.
    """
    python = python_made_by(BRIDGE / "environment.sh")
    command = [python, worker_script("hvd_trainer_worker.py"), *arguments]
    launched = launch_command(workers, servers, command)
    return [Start(launched if has_numba else [python, *launched[1:]], environment(KMP_BLOCKTIME="0"))]
