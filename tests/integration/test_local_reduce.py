"""Workers of one host sum before anything crosses the network: real processes, all on one host with
`KVDIST_LOCAL_REDUCE=on`, and with network namespaces as hosts."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator

import pytest

from tests.integration.processes import program
from tests.integration.test_patience import SLOW
from tests.namespaces import Host, link

ON = {"KVDIST_LOCAL_REDUCE": "on"}
PUSHED_BYTES = 10 * 300_001 * 4
"""What one worker pushes in `programs/local_reduce.py traffic`."""


def leaders(text: str) -> int:
    return len(re.findall(r"done on \d+: leads True, summed True", text))


def test_orders_groups_and_kinds_of_calls_may_differ_from_worker_to_worker(job):
    launcher = job.launch(3, 2, "local_reduce.py", "mixed", **ON)
    job.succeed()
    assert leaders(launcher.text) == 1 and len(launcher.lines_with("done on")) == 3


def test_values_are_those_of_workers_that_push_by_themselves(job):
    scenarios = ["exact_weights", "dtypes", "missing_gradients", "many_small", "replaced_values"]
    launcher = job.launch(3, 2, "values.py", ",".join(scenarios), "dist", **ON)
    job.succeed()
    assert all(len(launcher.lines_with(f"{scenario} checked on")) == 3 for scenario in scenarios), job.transcript()


def test_an_asynchronous_store_pushes_by_itself(job):
    job.launch(3, 2, "values.py", "asynchronous", "dist_async", **ON)
    job.succeed()


def test_small_windows_and_slices_change_no_value(job):
    settings = {"KVDIST_SLICE_BYTES": "65536", "KVDIST_WINDOW_BYTES": "200000", "KVDIST_SHARED_BYTES_MAX": "4000000"}
    launcher = job.launch(3, 2, "local_reduce.py", "mixed", **ON, **settings)
    job.succeed()
    assert leaders(launcher.text) == 1


@pytest.mark.slow
def test_shared_weights_are_what_they_are_without_it(job):
    job.launch(2, 2, "shared_weights.py", "same", KVDIST_TRANSPORT="auto", **ON)
    job.succeed()


def test_workers_that_disagree_on_the_learning_rate_are_all_told(job):
    launcher = job.launch(2, 2, "local_reduce.py", "disagree", **ON)
    job.succeed()
    lines = launcher.lines_with("mismatch: server-")
    assert len(lines) == 2 and all("worker-1 says lr 0.25" in line for line in lines), job.transcript()


def test_the_leader_may_leave_first_and_the_others_go_on(job):
    launcher = job.launch(3, 2, "local_reduce.py", "leader_first", **ON)
    job.succeed()
    assert len(launcher.lines_with("done on")) == 3


def test_the_push_of_a_worker_that_leaves_at_once_counts(job):
    launcher = job.launch(3, 2, "faults.py", "leaves_a_push_behind", **ON)
    job.succeed()
    assert len(launcher.lines_with("checked")) == 3


@pytest.mark.slow_cases("worker-1")
@pytest.mark.parametrize("victim", ["worker-0", "worker-1"])
def test_kill_9_of_a_leader_or_a_follower_is_named_everywhere(job, victim):
    job.cluster(3, 2, "faults.py", "endless", "20000000", **ON)
    for rank in range(3):
        job.line(f"worker-{rank}", "going")
    job.kill(victim)
    job.finish()
    assert job.processes[victim].code == -signal.SIGKILL
    for name, process in job.processes.items():
        assert name == victim or (f"{victim} (host " in process.text and "was lost" in process.text), job.transcript()


def test_a_slow_follower_is_waited_for_and_named(job, tmp_path):
    path = tmp_path / "fifo"
    os.mkfifo(path)
    launcher = job.launch(3, 2, "faults.py", "slow", str(path), KVDIST_EXPLAIN_AFTER_S="1", **ON)
    job.line("launcher", "late")
    for rank in (0, 2):
        job.match("launcher", SLOW.format(rank=rank))
    assert "a round is over" not in launcher.text
    path.open("wb").close()
    job.line("launcher", "late", count=2)
    job.line("launcher", "a round is over", count=3)
    path.open("wb").close()
    job.succeed()


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    with link() as pair:
        yield pair


def sent_and_received(job, hosts, setting: str, attempt: int = 0, workers: int = 2) -> tuple[int, int]:
    """Bytes over the card of the workers' host in a job whose server is on the other."""
    far, near = hosts
    shared = {"DMLC_PS_ROOT_URI": far.address, "KVDIST_SECURITY": "none", "KVDIST_LOCAL_REDUCE": setting}
    before = near.traffic()
    for role in ("scheduler", "server"):
        inside = far.inside(sys.executable, "-m", "kvdist")
        variables = {**job.environment(role, workers, 1), **shared, "DMLC_NODE_HOST": far.address}
        job.start(f"{role} {setting} {attempt}", inside, **variables)
    for rank in range(workers):
        inside = near.inside(*program("local_reduce.py", "traffic"))
        variables = {**job.environment("worker", workers, 1), **shared, "KVDIST_RANK": str(rank)}
        job.start(f"worker-{rank} {setting} {attempt}", inside, **variables)
    job.succeed()
    after = near.traffic()
    return after[0] - before[0], after[1] - before[1]


def test_two_workers_of_a_host_send_as_many_bytes_over_the_network_as_one(job, hosts):
    alone = sent_and_received(job, hosts, "off")
    assert all(number > 1.9 * PUSHED_BYTES for number in alone), alone
    for attempt in range(3):
        together = sent_and_received(job, hosts, "auto", attempt)
        assert leaders(job.processes[f"worker-0 auto {attempt}"].text) == 1
        # A machine that stands still for seconds has a worker push by itself, or a message said again.
        if max(together) < 1.2 * PUSHED_BYTES:
            break
    assert all(PUSHED_BYTES < number < 1.2 * PUSHED_BYTES for number in together), together
