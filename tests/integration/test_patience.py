"""Nobody dies, but somebody is slow, late, gone early, forked, or has closed its store."""

from __future__ import annotations

import os

import pytest

SLOW = r"worker-{rank}: waiting \d+\.\d s for worker-1 \(\S+\) to push key 'w' \(step 1\), in pushpull of key 'w'"
"""The explanation that comes sooner or later: at first, somebody else may be late, or nobody may know yet who is."""


@pytest.fixture
def fifo(tmp_path):
    """The path of a FIFO, and how to let whoever waits at it go on."""
    path = tmp_path / "fifo"
    os.mkfifo(path)

    def release():
        path.open("wb").close()

    return path, release


def test_a_slow_worker_is_waited_for_and_named(job, fifo):
    path, release = fifo
    launcher = job.launch(3, 2, "faults.py", "slow", str(path), KVDIST_EXPLAIN_AFTER_S="1")
    job.line("launcher", "late")
    for rank in (0, 2):
        job.match("launcher", SLOW.format(rank=rank))
    assert "a round is over" not in launcher.text, "the others wait"
    release()
    job.line("launcher", "late", count=2)
    job.line("launcher", "a round is over", count=3)
    release()
    job.succeed()
    assert len(launcher.lines_with("a round is over")) == 6


@pytest.mark.slow_cases("end")
@pytest.mark.parametrize("how", ["close", "end"])
def test_a_worker_may_leave_early_and_the_others_go_on(job, how):
    launcher = job.launch(3, 2, "faults.py", "leaves_early", how)
    job.succeed()
    assert len(launcher.lines_with("left early")) == 1
    assert len(launcher.lines_with("went on to the end")) == 2


def test_the_push_of_a_worker_that_leaves_at_once_counts(job):
    launcher = job.launch(3, 2, "faults.py", "leaves_a_push_behind")
    job.succeed()
    assert len(launcher.lines_with("checked")) == 3


def test_a_barrier_with_a_time_out_names_who_is_missing_and_can_be_tried_again(job, fifo):
    path, release = fifo
    launcher = job.launch(3, 1, "faults.py", "late_to_barrier", str(path))
    for rank in (0, 2):
        job.match("launcher", rf"w{rank} │ timed out: worker-1 \(\S+\) did not reach barrier 0 within \d\.\d s")
    release()
    job.succeed()
    assert len(launcher.lines_with("met")) == 3


def test_a_forked_child_is_refused_and_the_parent_goes_on(job):
    launcher = job.launch(2, 1, "faults.py", "forked")
    job.succeed()
    refused = launcher.lines_with("in the child: ")
    assert len(refused) == 2 * 3 * 5
    assert all("a store does not survive a fork; use it in the parent only" in line for line in refused)
    assert len(launcher.lines_with("the parent went on")) == 2


def test_a_data_loader_that_forks_feeds_the_training(job):
    launcher = job.launch(2, 1, "faults.py", "loader")
    job.succeed()
    assert len(launcher.lines_with("trained")) == 2


def test_a_closed_store_says_so(job):
    launcher = job.launch(2, 1, "faults.py", "after_close")
    job.succeed()
    said = launcher.lines_with("StoreClosed: ")
    assert len(said) == 2 * 8, job.transcript()
    closed = [line for line in said if "this 'dist' store has been closed; close it after" in line]
    left = [line for line in said if "has left the cluster and cannot join it again" in line]
    assert (len(closed), len(left)) == (14, 2), job.transcript()
