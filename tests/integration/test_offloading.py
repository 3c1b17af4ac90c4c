"""Servers on GPUs as real processes: without a GPU they end at once; with a device of the tests values are exact."""

from __future__ import annotations

import re

import pytest

from tests.integration.processes import program


def has_gpu() -> bool:
    torch = pytest.importorskip("torch")
    return bool(torch.cuda.is_available())


def cluster(job, workers, servers, *command, limit=(), device="cuda:0,cuda:1", **variables):
    """Start a cluster by hand, the servers on devices of the tests."""
    variables |= {"KVDIST_SERVER_DEVICE": device}
    job.node("scheduler", workers, servers, **variables)
    for rank in range(servers):
        env = {**job.environment("server", workers, servers), "KVDIST_RANK": str(rank), **variables}
        job.start(f"server-{rank}", program("offloading.py", *limit), **env)
    for rank in range(workers):
        job.node(f"worker-{rank}", workers, servers, *command, **variables)


@pytest.mark.slow_cases("variable")
@pytest.mark.skipif(has_gpu(), reason="there is a GPU")
@pytest.mark.parametrize("by", ["option", "variable"])
def test_a_server_without_its_gpu_ends_in_a_sentence_before_it_joins_and_everybody_is_told_its_name(job, by):
    options = ["--server-device", "cuda:0"] if by == "option" else []
    variables = {} if options else {"KVDIST_SERVER_DEVICE": "cuda:0"}
    job.launch(2, 1, "nothing.py", options=options, **variables)
    assert job.finish() == {"launcher": 1}
    launcher = job.processes["launcher"]
    (sentence,) = launcher.lines_with("s0 │ ")  # and no traceback
    assert "kvdist: this server was to sum and update on cuda:0, and without --server-device" in sentence
    lost = launcher.lines_with("server-0 was lost: exited with code 1 before it had joined the cluster")
    # A worker that was still starting when the scheduler ended is told nothing, and ended by the launcher.
    assert {line.partition(" │ ")[0] for line in lost} <= {"w0", "w1"}, job.transcript()
    assert "; job ended with exit code 1: this server was to sum and update on" in launcher.text.splitlines()[-1]


@pytest.mark.slow_cases("asynchronous-dist_async-auto", "asynchronous-dist_async-tcp", "exact_weights-dist-tcp")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize(("scenario", "store"), [("exact_weights", "dist"), ("asynchronous", "dist_async")])
def test_integer_gradients_give_exact_weights_on_devices(job, scenario, store, transport):
    cluster(job, 2, 2, "values.py", scenario, store, KVDIST_TRANSPORT=transport, KVDIST_SECURITY="none")
    job.succeed()
    for rank in (0, 1):
        (line,) = job.processes[f"server-{rank}"].lines_with(" pinned")
        up, down, pinned = map(int, re.findall(r"(\d+) (?:up|down|pinned)", line))
        assert line.startswith(f"cuda:{rank}: ") and up > down > 0, line
        assert (pinned > 0) == (transport == "auto"), line


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("library", "scenario"),
    # numba has no kernel for the rule of the others.
    [("cupy", "exact_weights"), ("cupy", "replaced_values"), ("cupy", "sum_replaces"), ("numba", "sum_replaces")],
)
def test_integer_gradients_give_exact_weights_on_a_gpu(job, library, scenario):
    pytest.importorskip(library, reason=f"{library} is not here: NOT RUN ON A GPU")
    variables = {"KVDIST_GPU": library}
    job.launch(2, 2, "values.py", scenario, "dist", options=["--server-device", "cuda:0"], **variables)
    job.succeed()
    assert len(job.processes["launcher"].lines_with("values rest, and are summed and updated, on cuda:0")) == 2


@pytest.mark.slow_cases("dtypes", "many_small", "replaced_values", "sum_replaces")
@pytest.mark.parametrize("scenario", ["sum_replaces", "many_small", "replaced_values", "dtypes"])
def test_workers_cannot_tell_where_servers_compute(job, scenario):
    cluster(job, 2, 2, "values.py", scenario, "dist")
    job.succeed()


def test_a_device_whose_memory_is_full_ends_its_server_in_a_sentence_and_everybody_hears_of_it(job):
    cluster(job, 2, 1, "values.py", "exact_weights", "dist", limit=("1000000",), device="cuda:0")
    codes = job.finish()
    server = job.processes["server-0"]
    assert codes["server-0"] == 1 and "Traceback" not in server.text
    assert len(server.lines_with("kvdist: cuda:0 has no memory left for ")) == 1, server.text
    for name, process in job.processes.items():
        assert name == "server-0" or ("server-0" in process.text and codes[name] != 0), job.transcript()
