"""`kvdist.mxnet` in the environments of the bridge to MXNet, where there is neither torch nor numba.

`make test-all` makes the environments. Without them the tests are skipped, and say how to make them.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.integration.processes import prefix_of
from tests.integration.test_mxnet_bridge import ENVIRONMENTS, PROGRAMS, ROOT, TIMEOUT_S, launch, python_of

EXAMPLE = ROOT / "examples" / "mxnet_horovod.py"
CHECKS, SCRIPTS = PROGRAMS / "mxnet_horovod.py", PROGRAMS / "mxnet_horovod_scripts.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(TIMEOUT_S + 20)]


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("script", ["gluon", "older", "module"])
def test_horovods_scripts_end_with_equal_weights_on_ranks_that_begin_differently(job, script, workers):
    launcher = launch(job, "1.9.1", workers, SCRIPTS, script)
    job.succeed(TIMEOUT_S)
    digests = {line.split()[-1] for line in launcher.lines_with(f" of {workers} digest ")}
    assert len(digests) == 1, job.transcript()
    assert len(launcher.lines_with("fell True")) == workers, job.transcript()


@pytest.mark.parametrize("version", ENVIRONMENTS)
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(
    "scenarios",
    ["places sums rows gathered broadcasts", "trainers whole_batch", "differences"],
    ids=["operations", "training", "differences"],
)
def test_every_rank_has_what_is_computed_by_hand_or_by_one_process(job, version, workers, scenarios):
    launcher = launch(job, version, workers, CHECKS, *scenarios.split())
    job.succeed(TIMEOUT_S)
    assert len(launcher.lines_with(f"checked {scenarios}")) == workers, job.transcript()


@pytest.mark.parametrize("version", ENVIRONMENTS)
def test_a_wrong_call_is_refused_with_what_to_do(job, version):
    alone = job.start("alone", [python_of(version), str(CHECKS), "wrong_calls"])
    job.succeed(TIMEOUT_S)
    assert alone.lines_with("checked wrong_calls"), job.transcript()
    assert alone.lines_with("init() was called before: this process already is rank 0 of 1"), job.transcript()
    (line,) = alone.lines_with("broadcast_parameters() never broadcast ")
    assert re.search(r"'\S*1\S*weight', which got no value: run a forward pass", line), line


def test_the_end_of_a_process_names_parameters_that_were_never_broadcast(job):
    alone = job.start("alone", [python_of("1.9.1"), str(CHECKS), "ends"])
    job.succeed(TIMEOUT_S)
    assert alone.lines_with("broadcast_parameters() never broadcast "), job.transcript()


WITHOUT_SERVERS = {
    "kvdist-run": {},
    "Open MPI's mpirun": {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"},
}


@pytest.mark.parametrize("launcher", WITHOUT_SERVERS)
def test_a_job_without_servers_is_refused_with_the_line_to_type(job, launcher):
    python = python_of("1.9.1")
    words = [python, str(SCRIPTS), "gluon"]
    if launcher == "kvdist-run":
        words = [str(ROOT / ".venv-bridge" / "bin" / "kvdist-run"), "-np", "4", *words]
    started = job.start("started", words, **WITHOUT_SERVERS[launcher])
    assert job.finish(TIMEOUT_S) == {"started": 1}, job.transcript()
    typed = f"start it with kvdist-launch -n 4 -s 1 python {SCRIPTS} gluon"
    assert any(typed in line for line in started.lines_with("this job of 4 processes, started by")), job.transcript()


IMPORTED = """
import json, sys
import mxnet
before = set(sys.modules)
import kvdist.mxnet, kvdist.__main__, kvdist_launch.cli
import kvdist.core.server.server, kvdist.core.scheduler.scheduler, kvdist.transport.zeromq
tops = {name.partition(".")[0] for name in set(sys.modules) - before}
print("imported", json.dumps(sorted(tops - set(sys.stdlib_module_names))))
"""


def test_kvdist_needs_pyzmq_numpy_and_msgpack_alone(job):
    process = job.start("process", [python_of("1.9.1"), "-c", IMPORTED])
    job.succeed(TIMEOUT_S)
    (line,) = process.lines_with("imported ")
    third = {name for name in json.loads(line.removeprefix("imported ")) if not name.startswith(("kvdist", "_cython"))}
    assert third == {"zmq", "msgpack"}, third  # NumPy is MXNet's


def test_the_example_learns_the_digits_on_two_workers(job):
    launcher = launch(job, "1.9.1", 2, EXAMPLE)
    job.succeed(TIMEOUT_S)
    found = []
    for name in ("worker-0", "worker-1"):
        lines = [line.removeprefix(prefix_of(name)) for line in launcher.lines_with("Test_acc")]
        found.append([float(line.split()[-1]) for line in lines if line.startswith("Epoch ")])
    assert found[0] == found[1] and len(found[0]) == 15 and found[0][-1] > 0.95, job.transcript()
