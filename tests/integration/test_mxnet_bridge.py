"""The bridge to MXNet 1.9, in the environment that `make test-all` makes for it: exact numbers, and a script as it is.

Without that environment the tests are skipped, and say how to make it.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.integration.processes import prefix_of

ROOT = Path(__file__).resolve().parents[2]
BRIDGE = ROOT / "examples" / "mxnet_bridge"
PYTHON = ROOT / ".venv-bridge" / "bin" / "python"
CHECKS = ROOT / "tests" / "integration" / "programs" / "bridge.py"
MISSING = f"MXNet is not installed for the bridge's tests: run {BRIDGE.relative_to(ROOT)}/environment.sh"
TIMEOUT_S = 150.0
"""For processes that import MXNet, on a machine that runs other tests beside it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 20)]


@pytest.fixture(autouse=True)
def environment():
    if not (ROOT / ".venv-bridge" / ".installed").exists():
        pytest.skip(MISSING)


def launch(job, workers, *command, **variables):
    """kvdist-launch in MXNet's environment, whose servers have no numba and an old NumPy, too."""
    words = ["-m", "kvdist_launch", "-n", str(workers), "-s", "2", "--", str(PYTHON), *map(str, command)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    return job.start("launcher", [str(PYTHON), *words], PYTHONPATH=path, KMP_BLOCKTIME="0", **variables)


def accuracy(process, name):
    """What a process printed last of its accuracy, and after how many epochs."""
    lines = [line.removeprefix(prefix_of(name)) for line in process.lines_with("Test_acc")]
    own = [float(line.split()[-1]) for line in lines if line.startswith("Epoch ")]
    return own[-1], len(own)


@pytest.mark.parametrize("scenario", ["values", "gluon_step", "here", "rules", "not_translated", "resumed"])
def test_two_workers_and_two_servers_compute_what_mxnet_does(job, tmp_path, scenario):
    launcher = launch(job, 2, CHECKS, tmp_path, scenario, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.succeed(TIMEOUT_S)
    assert len(launcher.lines_with(f"bridge checked {scenario}")) == 2, job.transcript()


def test_an_unmodified_gluon_script_trains_on_kvdist_as_well_as_on_a_store_of_mxnet(job):
    launcher = launch(job, 2, BRIDGE / "run.py", BRIDGE / "train.py", "--kvstore", "kvdist")
    job.succeed(TIMEOUT_S)
    first, second = accuracy(launcher, "worker-0"), accuracy(launcher, "worker-1")
    assert first == second
    alone = job.start("alone", [str(PYTHON), str(BRIDGE / "train.py"), "--kvstore", "local"])
    job.succeed(TIMEOUT_S)
    assert len(launcher.lines_with("of 2 on kvdist")) == 2 and len(alone.lines_with("worker 0 of 1 on local")) == 1
    for reached, epochs in (first, accuracy(alone, "alone")):
        assert reached > 0.95 and epochs == 15, job.transcript()
