"""Ways to start: by the launcher, by hand with variables, alone without a cluster. All end well and leave nothing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.integration.processes import program


@pytest.fixture
def popen():
    """Every process of these tests is started from scratch."""
    return subprocess.Popen


def test_a_launched_job_ends_well(job):
    launcher = job.launch(2, 2, "nothing.py")
    job.succeed()
    assert "2 workers and 2 servers finished in " in launcher.text.splitlines()[-1]


def test_a_command_may_be_one_quoted_string(job):
    path = program("values.py")[-1]
    launcher = job.launch(1, 1, f"{sys.executable} {path} own_writes dist")
    job.succeed()
    assert launcher.lines_with("w0 │ own_writes checked on 0 of 1")


def test_a_job_started_by_hand_ends_well(job):
    job.cluster(2, 2, "values.py", "sum_replaces", "dist")
    job.succeed()
    for rank in range(2):
        assert job.processes[f"worker-{rank}"].text == f"sum_replaces checked on {rank} of 2\n"
    assert [job.processes[name].text for name in ("scheduler", "server-0", "server-1")] == ["", "", ""]


def test_without_ranks_the_scheduler_gives_them_out(job):
    for role, count in (("scheduler", 1), ("server", 2), ("worker", 3)):
        argv = program("values.py", "sum_replaces", "dist") if role == "worker" else [sys.executable, "-m", "kvdist"]
        for i in range(count):
            job.start(f"{role} {i}", argv, **job.environment(role, 3, 2))
    job.succeed()
    ranks = sorted(line for process in job.processes.values() for line in process.lines_with("checked"))
    assert ranks == [f"sum_replaces checked on {rank} of 3" for rank in range(3)]


def test_our_names_of_the_variables_do_the_same(job):
    for role in ("scheduler", "server", "worker"):
        argv = program("values.py", "sum_replaces", "dist") if role == "worker" else [sys.executable, "-m", "kvdist"]
        variables = {
            name.replace("DMLC_PS_", "KVDIST_").replace("DMLC_", "KVDIST_"): value
            for name, value in job.environment(role, 1, 1).items()
        }
        job.start(role, argv, **variables)
    job.succeed()
    assert job.processes["worker"].lines_with("checked on 0 of 1")


@pytest.mark.slow_cases("server-1", "worker-0")
@pytest.mark.parametrize("last", ["scheduler", "server-1", "worker-0"])
def test_processes_may_start_in_any_order(job, last):
    names = ["worker-1", "worker-0", "server-1", "server-0", "scheduler"]
    names.remove(last)
    for name in names:
        job.node(name, 2, 2, "values.py", "sum_replaces", "dist", KVDIST_EXPLAIN_AFTER_S="0.5")
    job.line("worker-1", " waited " if last != "scheduler" else "waiting for the scheduler")
    job.node(last, 2, 2, "values.py", "sum_replaces", "dist")
    job.succeed()


@pytest.mark.parametrize(("scenario", "store"), [("exact_weights", "dist"), ("asynchronous", "dist_async")])
def test_a_script_runs_alone_with_one_warning(job, scenario, store):
    alone = job.start("alone", program("values.py", scenario, store))
    job.succeed()
    assert len(alone.lines_with("running alone")) == 1
    assert alone.lines_with("checked on 0 of 1")


def test_a_script_alone_that_raises_ends_with_its_own_traceback(job):
    alone = job.start("alone", [sys.executable, "-c", "from kvdist import kv; kv.create('dist'); 1 / 0"])
    job.finish()
    assert alone.code == 1
    assert alone.text.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_a_script_that_forgets_to_close_its_store_ends_well(job):
    script = "import numpy; from kvdist import kv; kv.create('dist').init(1, numpy.ones(3))"
    job.launch(2, 1, sys.executable, "-c", script)
    job.succeed()
