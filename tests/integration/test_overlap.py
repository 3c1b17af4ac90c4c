"""Gradients that are sent during the backward pass, on real clusters: the same bits, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest


def run(job, workers, scenario, **variables):
    """Launch a scenario of `programs/overlap.py`; the lines that the workers printed, without their prefixes."""
    job.launch(workers, 2, "overlap.py", scenario, **variables)
    job.succeed()
    lines = printed(job)
    assert sorted(line for line in lines if line.startswith("checked on")) == [
        f"checked on {rank} of {workers}" for rank in range(workers)
    ]
    return lines


def printed(job):
    return [line.split(" │ ", 1)[1] for line in job.processes["launcher"].worker_lines()]


@pytest.mark.slow_cases("2-accumulation", "2-bfloat16", "2-loader", "2-unused")
@pytest.mark.parametrize(
    ("workers", "scenario"),
    [
        (2, "bfloat16"),
        (2, "unused"),
        (2, "accumulation"),
        (2, "loader"),
        pytest.param(3, "floats", marks=pytest.mark.slow),
        pytest.param(3, "unused", marks=pytest.mark.slow),
    ],
)
def test_all_workers_have_the_bits_that_they_have_without_overlap(job, workers, scenario):
    digests = Counter(line for line in run(job, workers, scenario) if line.startswith("digest"))
    assert list(digests.values()) == [workers] * 2, "each worker prints the same digest, one for each way to update"


@pytest.mark.slow_cases("shared memory-asynchronous")
@pytest.mark.parametrize("scenario", ["integers", "asynchronous"])
@pytest.mark.parametrize(
    "variables",
    [
        pytest.param({}, id="shared memory"),
        pytest.param({"KVDIST_TRANSPORT": "tcp"}, id="tcp", marks=pytest.mark.slow),
    ],
)
def test_gradients_of_integers_give_the_exact_weights(job, scenario, variables):
    run(job, 3, scenario, **variables)


def test_a_second_pass_is_refused_and_a_step_after_it_keeps_the_workers_together(job):
    refused = [line for line in run(job, 2, "twice") if line.startswith("refused: ")]
    assert len(refused) == 4


def test_a_worker_whose_pass_broke_off_is_not_waited_for(job):
    lines = run(job, 2, "abandoned")
    assert [line for line in lines if line.startswith("refused: ")] == ["refused: the pass broke off"]
    assert list(Counter(line for line in lines if line.startswith("digest")).values()) == [2]


def test_a_worker_that_is_killed_between_backward_and_step_is_named_to_the_other(job):
    job.launch(2, 2, "overlap.py", "killed")
    assert job.finish()["launcher"] != 0
    (line,) = [line for line in printed(job) if line.startswith("refused: ")]
    assert "worker-1" in line
