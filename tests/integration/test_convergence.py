"""Training converges, in step and out of step, with one, two and four workers."""

from __future__ import annotations

import pytest


@pytest.mark.slow_cases(
    "1-dist_async-logistic",
    "2-dist_async-least_squares",
    "2-dist_async-logistic",
    "2-dist_sync-logistic",
    "4-dist_async-least_squares",
    "4-dist_async-logistic",
    "4-dist_sync-least_squares",
    "4-dist_sync-logistic",
)
@pytest.mark.parametrize("problem", ["least_squares", "logistic"])
@pytest.mark.parametrize("store", ["dist_sync", "dist_async"])
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_training_converges(job, workers, store, problem):
    job.launch(workers, 2, "training.py", store, problem)
    job.succeed()
    losses = [line.split()[-2:] for line in job.processes["launcher"].lines_with("loss ")]
    assert len(losses) == workers
    for first, last in losses:
        assert float(last) < (1e-6 if problem == "least_squares" else 0.3 * float(first))
    if store == "dist_sync":
        assert len({last for _, last in losses}) == 1, "all workers end with the same weights"
