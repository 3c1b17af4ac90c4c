"""What people do with torch, on real clusters: nobody waits for ever, and all workers have the same weights."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

SCENARIOS = ("skipped", "refused", "missing", "accumulated", "changed", "buffers")


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_keep_together_whatever_one_of_them_does(job, tmp_path, workers):
    # Any optimizer of torch makes this directory, in the job's own if it is not told of another place.
    job.launch(workers, 2, "habits.py", *SCENARIOS, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
    job.succeed()
    launcher = job.processes["launcher"]
    assert len(launcher.lines_with("checked on")) == workers, job.transcript()
    said = launcher.lines_with(
        "parameter 1 of shape (3, 5) on worker-1 is not finite: 1 NaN and 0 infinite of 15 elements"
    )
    assert len(said) == 2 and all(line.startswith("w1 │ refused: ") for line in said), job.transcript()
