"""A worker is killed under policies that do not wait for all; the others go on, and the weights have what counts."""

from __future__ import annotations

import ast
import re

import pytest

STEPS = 40


def ends(launcher):
    """What the workers say that came to the end: rank, weights, version, steps that were dropped."""
    return [
        (int(one[1]), ast.literal_eval(one[2]), int(one[3]), int(one[4]))
        for line in launcher.lines_with("ended with [")
        if (one := re.search(r"w(\d).*ended with (\[.*\]), version (\d+), dropped (\d+)$", line))
    ]


@pytest.mark.parametrize(
    "policy",
    [
        "quota:4",
        "quota:8,local_steps",
        pytest.param("local_sgd:3,quorum=2", marks=pytest.mark.slow),
        "async:2",
    ],
)
@pytest.mark.parametrize("victim", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_the_others_go_on_without_a_killed_worker(job, policy, victim):
    launcher = job.launch(
        4, 2, "policies.py", policy, str(victim), str(STEPS), options=["--on-loss", "continue", "--replicas", "1"]
    )
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("was killed by signal 9 (SIGKILL); the other workers go on"), "the fault happened"
    said = ends(launcher)
    assert sorted(rank for rank, *_ in said) == [rank for rank in range(4) if rank != victim], job.transcript()
    weights = said[0][1]
    assert all(own == weights for _, own, *_ in said), "all have the same weights"
    assert sum(weights) > 0
    if policy.startswith("async"):
        assert all(weights[rank] == STEPS - dropped for rank, _, _, dropped in said), "each push counts, or is dropped"
        assert weights[victim] <= 5
    elif policy == "quota:4":
        (version,) = {version for _, _, version, _ in said}
        assert sum(weights) == pytest.approx(round(sum(weights))), "each version is a mean of one step each"
        assert version - 4 <= round(sum(weights)) <= version, "but for those that were of nothing, at the end"


@pytest.mark.parametrize("policy", ["quota:4", pytest.param("quota:8,local_steps", marks=pytest.mark.slow)])
def test_a_killed_worker_that_is_started_again_takes_part_in_a_quota(job, policy):
    options = ["--on-loss", "continue", "--restart", "9"]
    launcher = job.launch(4, 2, "policies.py", policy, "2", str(STEPS), "10", options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-2 was started 2 times; it was killed by signal 9"), "the fault happened"
    said = ends(launcher)
    assert sorted(rank for rank, *_ in said) == [0, 1, 2, 3], job.transcript()
    weights = said[0][1]
    assert all(own == weights for _, own, *_ in said), "all have the same weights"
    assert weights[2] >= 10, "its first process has made five steps at most"
    if policy == "quota:4":
        assert sum(weights) == pytest.approx(round(sum(weights))), "each version is a mean of one step each"
