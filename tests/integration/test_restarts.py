"""Workers are killed at random moments and started again by the launcher, and every push counts once."""

from __future__ import annotations

import ast
import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from tests.test_documentation import ROOT, fenced

WORKERS = 4


@pytest.mark.parametrize(
    ("number", "lives", "spared"),
    [
        ("SIGKILL", 2, 3),
        pytest.param("SIGKILL", 2, 0, marks=pytest.mark.slow),
        pytest.param("SIGKILL", 5, 1, marks=pytest.mark.slow),
        pytest.param("SIGSTOP", 1, 2, marks=pytest.mark.slow),
    ],
)
def test_workers_that_are_killed_or_stopped_come_back_and_every_push_counts_once(job, tmp_path, number, lives, spared):
    options = ["--on-loss", "continue", "--restart", "9", "--patience", "10" if number == "SIGKILL" else "2"]
    launcher = job.launch(WORKERS, 2, "restarts.py", str(tmp_path), str(lives), str(spared), number, options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    lines = launcher.lines_with("counted [")
    assert len(lines) == WORKERS and len({line.partition("counted ")[2] for line in lines}) == 1, job.transcript()
    counted = ast.literal_eval(lines[0].partition("counted ")[2])
    for rank, (least, most) in enumerate(counted):
        pushed = [Path(path).stat().st_size for path in sorted(tmp_path.glob(f"{rank}.*"))]
        ends = 0 if rank == spared else lives
        assert len(pushed) == ends + 1, job.transcript()
        assert sum(pushed) <= least <= most <= sum(pushed) + ends, (rank, counted, pushed, job.transcript())
        told = f"worker-{rank} was started {lives + 1} times; it was killed by signal 9"
        assert not ends or launcher.lines_with(told), "the fault happened"
    given_up = launcher.lines_with("has been given up, and its process is ended")
    assert len(given_up) == (WORKERS - 1) * (number == "SIGSTOP"), job.transcript()


def test_a_worker_that_dies_and_comes_back_while_the_scheduler_is_away_is_not_waited_for(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "9"]
    launcher = job.launch(2, 2, "restarts.py", str(tmp_path), "1", "0", "SIGCONT", options=options)
    pushed = tmp_path / "1.0"
    job.wait(lambda: pushed.exists() and pushed.stat().st_size > 0, "worker-1 has pushed")
    job.kill("scheduler")
    job.line("launcher", "the scheduler was started again and goes on where it was")
    job.kill("scheduler")
    job.kill("worker-1")
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("the scheduler was started 3 times; it was killed by signal 9"), "the fault happened"
    assert launcher.lines_with("worker-1 was started 2 times; it was killed by signal 9"), "the fault happened"
    (lost,) = launcher.lines_with(" was lost")
    assert lost.startswith("sched │ worker-1 (") and "killed by signal 9 (SIGKILL)" in lost, job.transcript()


def kill_at_random(job, launcher, count, victim=None):
    """Kill the scheduler so often, each time some moments after it was started; and a server now and then."""
    for number in range(1, count + 1):
        time.sleep(random.uniform(0.0, 0.6))
        if victim is not None and number % 4 == 1:
            job.kill(victim)
            time.sleep(random.uniform(0.0, 0.3))
        job.kill("scheduler")
        job.line("launcher", "scheduler (pid ", count=number)
        job.line("launcher", "the scheduler was started again and goes on where it was", count=number)


@pytest.mark.slow
@pytest.mark.parametrize(("count", "more"), [(50, []), (20, ["--snapshots"])])
def test_a_scheduler_that_is_killed_at_random_moments_again_and_again_ends_nothing(job, tmp_path, count, more):
    more = [one for option in more for one in (option, str(tmp_path / "snapshots"))]
    options = ["--on-loss", "continue", "--restart", str(count + 10), *more]
    root = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path), "KVDIST_SNAPSHOT_INTERVAL_S": "0.05"}
    launcher = job.launch(2, 2, "scheduler_dies.py", str(tmp_path), options=options, **root)
    if more:
        job.wait(lambda: [*(tmp_path / "snapshots").glob("step-*/manifest.json")] != [], "there is a snapshot")
    else:
        job.line("launcher", "begins")
    kill_at_random(job, launcher, count, "server-1" if more else None)
    (tmp_path / "stop").touch()
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with(f"the scheduler was started {count + 1} times"), job.transcript()
    ends = re.findall(r"ended with (\d+) in (\d+) steps, (\d+) of them again", launcher.text)
    assert len(ends) == 2 and all(int(value) == 2 * int(steps) for value, steps, _ in ends), job.transcript()
    assert not more or int(ends[0][2]) > 0, "all went back"


def test_who_comes_back_when_the_others_have_finished_is_ended_and_the_job_has_succeeded(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "9"]
    launcher = job.launch(3, 2, "survival.py", "comes_late", str(tmp_path / "back"), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 is ended, as the others have finished before it had joined them")
    assert launcher.lines_with("2 workers and 2 servers finished in"), job.transcript()


def test_who_is_killed_again_and_again_after_its_first_step_is_started_again_at_once(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "9", "--log-dir", str(tmp_path)]
    launcher = job.launch(2, 1, "survival.py", "at_work", str(tmp_path), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    for life in range(1, 5):
        assert launcher.lines_with(f"killed by signal 9 (SIGKILL); starting it again ({life} of 9)"), job.transcript()
    assert not [line for line in launcher.lines_with("at work worker 1") if "│" in line], "for the launcher"


def test_with_too_few_workers_training_waits_until_enough_are_back(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "1", "--min-workers", "2"]
    launcher = job.launch(2, 2, "survival.py", "too_few", str(tmp_path), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 was started 2 times; it was killed by signal 9"), "the fault happened"
    assert launcher.lines_with("training waits for 1 more worker(s): at least 2 must be there"), job.transcript()
    assert launcher.lines_with("training goes on: 2 workers are there"), job.transcript()
    (back,) = launcher.lines_with("is back at version ")
    assert int(back.rpartition(" ")[2]) in (4, 5, 6), "the open round was closed, and at most one more"
    assert len(launcher.lines_with("ended at version 100")) == 2, job.transcript()


def test_the_first_mean_does_not_wait_for_a_worker_that_joins_later_in_the_program(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "1"]
    launcher = job.launch(2, 2, "survival.py", "first_mean", str(tmp_path), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-0 was started 2 times; it was killed by signal 9"), "the fault happened"
    assert launcher.lines_with("first mean 7.0"), job.transcript()
    assert len(launcher.lines_with("next mean 0.5 at version 16")) == 2, job.transcript()


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        (
            "(3, 5, 2)",
            "worker-1 says: 3 parameters, trained are 0-2; the workers that it joins have said: 2 parameters,",
        ),
        pytest.param("(3,)", "worker-1 says: 1 parameters, trained are 0; the workers", marks=pytest.mark.slow),
        pytest.param("(3, 7)", "with shape (7,), dtype float32", marks=pytest.mark.slow),
    ],
)
def test_who_comes_back_with_another_model_is_refused_and_the_others_go_on(job, tmp_path, sizes, said):
    options = ["--on-loss", "continue", "--restart", "1"]
    launcher = job.launch(3, 2, "survival.py", "another_model", str(tmp_path), sizes, options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 was started 2 times"), "the fault happened"
    (error,) = [line for line in launcher.lines_with("kvdist.errors.InitMismatch: ") if line.startswith("w1 │ ")]
    assert said in error and "start it with the program of the others" in error, job.transcript()
    told = launcher.lines_with("went on to the end, with the weights of all steps and of nothing else")
    assert len(told) == 2, job.transcript()


@pytest.mark.parametrize(
    ("victims", "killed_at", "waits_at", "every", "begins"),
    [
        ("1", 12, 18, 5, "step = trainer.version"),
        pytest.param("1", 12, 18, 5, "step = checkpoint.step if 'checkpoint' in vars() else 0", marks=pytest.mark.slow),
        pytest.param("0,1,2", 12, 30, 5, "step = trainer.version", id="all at once"),
        pytest.param("1", 3, 27, 55, "step = trainer.version", marks=pytest.mark.slow),
    ],
)
def test_the_script_of_the_page_on_checkpoints_goes_on_where_the_others_are(
    job, tmp_path, victims, killed_at, waits_at, every, begins
):
    (script,) = [block for block in fenced(ROOT / "docs" / "checkpoints.md", "python") if "NoCheckpoint" in block]
    assert script.count("step % 50") == script.count("step = trainer.version") == 1
    script = script.replace("step % 50", f"step % {every}").replace("step = trainer.version", begins)
    (tmp_path / "train.py").write_text(script)
    options = ["--on-loss", "continue", "--restart", "3"]
    words = ("resuming.py", str(tmp_path), victims, str(killed_at), str(waits_at))
    launcher = job.launch(3, 2, *words, options=options, KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.finish()
    assert launcher.code == 0, job.transcript()
    for rank in victims.split(","):
        told = f"worker-{rank} was started 2 times; it was killed by signal 9"
        assert launcher.lines_with(told), "the fault happened"
    back = launcher.lines_with("is back at version ")
    assert len(victims) > 1 or f"version {waits_at + 1}" in back[0], job.transcript()
    assert bool(launcher.lines_with("it was the last worker; the weights wait")) == (len(victims) > 1)
    assert len(launcher.lines_with("ended in step 60 at version 60")) == 3, job.transcript()
    states = [json.loads(path.read_text())["state"] for path in (tmp_path / "checkpoints").glob("step-55/worker-*")]
    assert [(state["epoch"], state["visited"]) for state in states] == [(2, 240)] * 3, (
        "all are at one place in the data"
    )


def test_a_worker_that_is_killed_more_often_than_it_may_be_started_again_is_not(job):
    options = ["--on-loss", "wait", "--restart", "1"]
    launcher = job.launch(2, 1, "survival.py", "ends", "is killed", options=options)
    told = job.line("launcher", "it is not started again, as it has been once (--restart 1)")
    assert "worker-1 (pid " in told and "was killed by signal 9 (SIGKILL)" in told, told
    assert len(launcher.lines_with("starting it again (1 of 1)")) == 1, "the first time it was"
    assert "worker-1" not in job.children() and "worker-0" in job.children()
    job.kill("launcher", signal.SIGINT)
    job.finish()


@pytest.mark.parametrize("dead_at", [22, pytest.param(27, marks=pytest.mark.slow)])
def test_a_worker_that_joins_in_the_middle_of_a_period_pushes_the_fragments_that_the_others_push(job, dead_at):
    options = ["--on-loss", "continue", "--restart", "9", "--policy", "diloco:8,fragments=3"]
    launcher = job.launch(3, 2, "local_steps.py", str(dead_at), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-2 was started 2 times; it was killed by signal 9"), "the fault happened"
    assert launcher.lines_with("joined at version"), job.transcript()
    digests = {line.rpartition("weights ")[2] for line in launcher.lines_with("weights ")}
    assert len(launcher.lines_with("weights ")) == 3 and len(digests) == 1, job.transcript()
    versions = {line.rpartition("version ")[2] for line in launcher.lines_with("weights ")}
    assert len(versions) == 1, job.transcript()
