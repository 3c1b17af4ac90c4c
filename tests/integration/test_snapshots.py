"""Servers are killed and started again, and all go on from the newest snapshot with exact weights."""

from __future__ import annotations

import re

import pytest

from tests.integration.test_leases import found

OPTIONS = ["--on-loss", "continue", "--restart", "3"]
EVERY = {"KVDIST_SNAPSHOT_INTERVAL_S": "0.02"}
STEPS, WORKERS = 40, 2
FINAL = STEPS * (STEPS + 1) // 2 * sum(range(WORKERS + 1))

HELD = """
import os, pathlib, time
from kvdist import kv
kv.register_command(1)(lambda head, body, rank: None)
while os.environ.get("KVDIST_RESTARTS", "0") != "0" and not pathlib.Path(__file__).with_name("dead").exists():
    time.sleep(0.01)
"""
"""Servers that are started again wait until the worker is dead."""


def launched(job, tmp_path, *more, options=()):
    """A job whose worker 0 waits in the middle, when there is a snapshot."""
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    options = [*OPTIONS, "--snapshots", str(tmp_path / "snapshots"), *options]
    launcher = job.launch(WORKERS, 2, "snapshots.py", str(tmp_path), *more, options=options, **EVERY, **root)
    job.line("launcher", "waits in the middle")
    job.wait(lambda: any((tmp_path / "snapshots").glob("step-*/manifest.json")), "there is a snapshot")
    return launcher


@pytest.mark.parametrize(
    ("victims", "program"),
    [
        (["server-1"], ()),
        (["server-0", "server-1"], ()),
        pytest.param(["server-1"], ("trainer",), marks=pytest.mark.slow),
        (["server-1"], ("trainer", "--policy", "local_sgd:4")),
    ],
)
def test_killed_servers_come_back_and_all_go_on_from_the_newest_snapshot(job, tmp_path, victims, program):
    launcher = launched(job, tmp_path, *program[:1], options=program[1:])
    final = FINAL / WORKERS if "local_sgd:4" in program else FINAL  # the mean of what each has changed
    for name in victims:
        job.kill(name)
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+) after \d+ steps again, told of \[(.*)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [final] * WORKERS, job.transcript()
    assert all(told for _, told in ends), "both heard of it"
    for name in victims:
        assert launcher.lines_with(f"{name} was started 2 times; it was killed by signal 9"), job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()


def test_a_worker_that_is_killed_while_all_go_back_is_waited_for_and_no_step_is_made_without_it(job, tmp_path):
    (tmp_path / "held.py").write_text(HELD)
    options = ["--min-workers", str(WORKERS), "--server-module", "held", "--env", f"PYTHONPATH={tmp_path}"]
    launcher = launched(job, tmp_path, "trainer", options=options)
    job.kill("server-1")
    job.line("launcher", "all go back to the newest snapshot")
    job.kill("worker-1")
    job.line("launcher", "worker-1 (pid")
    (tmp_path / "dead").touch()
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+) after", launcher.text)
    assert [float(value) for value in ends] == [FINAL] * WORKERS, job.transcript()
    for name in ("server-1", "worker-1"):
        assert launcher.lines_with(f"{name} was started 2 times; it was killed by signal 9"), job.transcript()
    assert launcher.lines_with("training waits for 1 more worker(s)"), job.transcript()
    assert launcher.lines_with("training goes on: 2 workers are there"), job.transcript()


@pytest.mark.parametrize(
    ("loader_workers", "victims"),
    [("0", ["server-1"]), pytest.param("2", ["server-0", "server-1"], marks=pytest.mark.slow)],
)
def test_all_go_back_to_where_the_snapshot_was_in_the_data_and_each_example_counts_once(
    job, tmp_path, loader_workers, victims
):
    snapshots = tmp_path / "snapshots"
    options = [*OPTIONS, "--snapshots", str(snapshots)]
    more = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "SNAPSHOTS": str(snapshots), "LOADER_TEMP": str(tmp_path)}
    command = ("leases.py", "6000", "2", "8", loader_workers, "dist", "{}")
    launcher = job.launch(3, 2, *command, options=options, **EVERY, **more)
    job.line("launcher", "waits in the middle")
    for name in victims:
        job.kill(name)
    (snapshots / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("all have gone back to step"), job.transcript()
    _, counts = found(job)
    assert counts == {(2, 2): 6000}, job.transcript()


def test_a_scheduler_that_comes_back_knows_the_newest_snapshot_and_all_go_back_to_it(job, tmp_path):
    launcher = launched(job, tmp_path)
    job.kill("scheduler")
    step = int(job.line("launcher", "the newest snapshot is that of step").split(" step ")[1].split(":")[0])
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    ends = re.findall(r"ended with (\S+) after \d+ steps again, told of \[(.*)\]", launcher.text)
    assert [float(value) for value, _ in ends] == [FINAL] * WORKERS, job.transcript()
    assert ends[0][1] == str(step), "no newer one could be made while worker 0 stood still"
    assert launcher.lines_with("the scheduler was started 2 times"), job.transcript()


def test_of_a_dist_async_store_a_killed_server_alone_goes_back_and_the_loss_that_is_said_is_the_loss(job, tmp_path):
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "KVDIST_SNAPSHOT_INTERVAL_S": "1000"}
    options = [*OPTIONS, "--snapshots", str(tmp_path / "snapshots")]
    launcher = job.launch(WORKERS, 2, "snapshots_async.py", str(tmp_path), options=options, **root)
    job.wait(lambda: any((tmp_path / "snapshots").glob("step-*/manifest.json")), "there is a snapshot")
    (tmp_path / "snapshot").touch()
    job.wait(lambda: len(launcher.lines_with("waits for go")) == WORKERS, "all have made 25 steps")
    job.kill("server-1")
    (tmp_path / "go").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    (said,) = launcher.lines_with("goes on from the snapshot of step")
    lost = {int(rank): int(count) for count, rank in re.findall(r"(\d+) of worker-(\d)", said)}
    assert lost.keys() == set(range(WORKERS)) and min(lost.values()) >= 20, said
    ends = set(re.findall(r"(first|second) ended with (\[.*\])", launcher.text))
    assert ends == {("first", str([100] * WORKERS)), ("second", str([100 - lost[0], 100 - lost[1]]))}, job.transcript()
