"""The bridge to MXNet, 1.9.1 and 2.0.0b1, in environments of their own: exact numbers, and scripts as they are.

`make test-all` makes the environments. Without them the tests are skipped, and say how to make them.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.integration.processes import prefix_of

ROOT = Path(__file__).resolve().parents[2]
BRIDGE = ROOT / "examples" / "mxnet_bridge"
ENVIRONMENTS = {"1.9.1": ".venv-bridge", "2.0.0b1": ".venv-bridge-2"}
PROGRAMS = ROOT / "tests" / "integration" / "programs"
TIMEOUT_S = 240.0
"""For processes that import MXNet, on a machine that runs other tests beside it."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 20)]


def python_of(version):
    """The interpreter that has this MXNet; the test is skipped where there is none."""
    folder = ROOT / ENVIRONMENTS[version]
    if not (folder / ".installed").exists():
        pytest.skip(f"MXNet {version} is not installed: run {BRIDGE.relative_to(ROOT)}/environment.sh {version}")
    return str(folder / "bin" / "python")


def launch(job, version, workers, *command, **variables):
    """kvdist-launch in MXNet's environment, whose servers have no numba and an old NumPy, too."""
    python = python_of(version)
    words = ["-m", "kvdist_launch", "-n", str(workers), "-s", "2", "--", python, *map(str, command)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "launcher")])
    return job.start("launcher", [python, *words], PYTHONPATH=path, KMP_BLOCKTIME="0", **variables)


def accuracy(process, name):
    """What a process printed last of its accuracy, and after how many epochs."""
    lines = [line.removeprefix(prefix_of(name)) for line in process.lines_with("Test_acc")]
    own = [float(line.split()[-1]) for line in lines if line.startswith("Epoch ")]
    return own[-1], len(own)


@pytest.mark.parametrize("version", ENVIRONMENTS)
@pytest.mark.parametrize(
    "scenarios",
    ["values gluon_step here", "rules not_translated schedule_goes_on resumed"],
    ids=["values", "optimizers"],
)
def test_two_workers_and_two_servers_compute_what_mxnet_does(job, tmp_path, version, scenarios):
    words = scenarios.split()
    launcher = launch(job, version, 2, PROGRAMS / "bridge.py", tmp_path, *words, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.succeed(TIMEOUT_S)
    assert len(launcher.lines_with(f"bridge checked {scenarios}")) == 2, job.transcript()


NIGHTLY = {
    "values": "init dense devices asynchronous other_optimizers names sums wrong_calls",
    "rows": "rows rows_without_any big_rows rows_of_lists rows_by_optimizers",
    "compression": "two_bit two_bit_random one_bit compressed_later compressed_trainer",
    "trainers": "gluon_step trainer_types against_local trainer_by_name updater_states",
}
ONLY_IN_1 = {
    "sparse trainers": "gluon_sparse_step trainer_reset sparse_fit",
    "module": "module_fit first_weights sparse_module",
}
"""MXNet 2 has no Module, and no row_sparse parameters in Gluon."""


@pytest.mark.parametrize(
    ("version", "groups"),
    [
        pytest.param(version, groups, id=f"{version} {name}")
        for version in ENVIRONMENTS
        for name, groups in {**NIGHTLY, **(ONLY_IN_1 if version == "1.9.1" else {})}.items()
    ],
)
def test_what_the_nightly_scripts_of_mxnet_check_holds_on_the_servers(job, version, groups):
    workers = 3 if version == "1.9.1" else 2
    launcher = launch(job, version, workers, BRIDGE / "run.py", PROGRAMS / "mxnet_nightly.py", *groups.split())
    job.succeed(TIMEOUT_S)
    for group in groups.split():
        passed = [line for line in launcher.lines_with(f"passed {group}") if line.split()[-1] == group]
        assert len(passed) == workers, job.transcript()


@pytest.mark.parametrize("version", ENVIRONMENTS)
def test_mxnets_profiler_traces_the_servers_too(job, tmp_path, version):
    run = [BRIDGE / "run.py", PROGRAMS / "mxnet_nightly.py", "profiled"]
    launch(job, version, 1, *run, KVDIST_PROFILE_DIR=str(tmp_path))
    job.succeed(TIMEOUT_S)
    for server in (0, 1):
        trace = json.loads((tmp_path / f"server.server-{server}.json").read_text())
        assert any("round" in event["name"] for event in trace["traceEvents"]), job.transcript()


def test_run_finds_the_modules_beside_a_script(job, tmp_path):
    (tmp_path / "beside.py").write_text("number = 17")
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint('found', beside.number, sys.argv[1:], __name__)")
    process = job.start("script", [python_of("1.9.1"), str(BRIDGE / "run.py"), str(script), "--lr", "1"])
    job.succeed(TIMEOUT_S)
    assert process.lines_with("found 17 ['--lr', '1'] __main__"), job.transcript()


def test_an_unmodified_gluon_script_trains_on_kvdist_as_well_as_on_a_store_of_mxnet(job):
    launcher = launch(job, "1.9.1", 2, BRIDGE / "run.py", BRIDGE / "train.py", "--kvstore", "dist_sync")
    job.succeed(TIMEOUT_S)
    first, second = accuracy(launcher, "worker-0"), accuracy(launcher, "worker-1")
    assert first == second
    alone = job.start("alone", [python_of("1.9.1"), str(BRIDGE / "train.py"), "--kvstore", "local"])
    job.succeed(TIMEOUT_S)
    assert len(launcher.lines_with("of 2 on dist_sync")) == 2 and len(alone.lines_with("worker 0 of 1 on local")) == 1
    for reached, epochs in (first, accuracy(alone, "alone")):
        assert reached > 0.95 and epochs == 15, job.transcript()
