"""A process is cut off from the scheduler alone, or the scheduler from everybody: short of the patience, and beyond."""

from __future__ import annotations

import ast

import pytest

from tests.integration.processes import EXIT_PEER_LOST
from tests.proxy import Proxy

STEPS = 16
ALL = (1 << STEPS) - 1
OVER_TCP = {"KVDIST_SECURITY": "none", "KVDIST_TRANSPORT": "tcp", "KVDIST_ON_LOSS": "continue"}


def start(job, workers, cut_off, proxy, *command, **settings):
    """A cluster of two servers, in which one process, or all of them, dial the scheduler through the proxy."""
    command = command or ("trains_on",)
    settings = {**OVER_TCP, **settings}
    job.node("scheduler", workers, 2, **settings)
    port = {"DMLC_PS_ROOT_PORT": str(proxy.front(job.port))}
    for name in ["server-0", "server-1", *(f"worker-{rank}" for rank in range(workers))]:
        through = port if cut_off in (name, "all") else {}
        job.node(name, workers, 2, "survival.py", *command, **settings, **through)


def masks_of(job, rank):
    return ast.literal_eval(job.line(f"worker-{rank}", "masks ").partition("masks ")[2])


def nothing(_):
    return None


@pytest.mark.slow_cases("worker-1")
@pytest.mark.parametrize("name", ["server-1", "worker-1"])
def test_a_cut_from_the_scheduler_that_is_shorter_than_the_patience_changes_nothing(job, name):
    with Proxy(nothing, fronts_in="") as proxy:
        start(job, 2, name, proxy, KVDIST_REPLICAS="1")
        job.line("worker-0", "step 3")
        for up in (True, False):
            proxy.hold(up)
        job.line("worker-0", "step 9")
        assert proxy.fired["held"] == 2
        for up in (True, False):
            proxy.let_go(up)
        job.succeed()
        assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()


@pytest.mark.slow
def test_a_server_that_is_cut_off_from_the_scheduler_is_replaced_by_its_copy_and_does_no_harm(job, tmp_path):
    with Proxy(nothing, fronts_in="") as proxy:
        command = ("trains_on", str(tmp_path))
        start(job, 2, "server-1", proxy, *command, KVDIST_REPLICAS="1", KVDIST_PATIENCE_S="4")
        for rank in range(2):
            job.line(f"worker-{rank}", "halfway")
        for up in (True, False):
            proxy.hold(up)
        job.line("scheduler", "server-0 goes on with its slices")
        (tmp_path / "cut").touch()
        for rank in range(2):
            job.line(f"worker-{rank}", "step 15")
        for up in (True, False):
            proxy.let_go(up)
        codes = job.finish()
    assert {name: code for name, code in codes.items() if code} == {"server-1": EXIT_PEER_LOST}, job.transcript()
    assert masks_of(job, 0) == masks_of(job, 1) == {0: [ALL], 1: [ALL]}, job.transcript()
