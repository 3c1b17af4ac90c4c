"""Workers are killed at random moments and started again by the launcher, and every push counts once."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

WORKERS = 4


@pytest.mark.parametrize(
    ("number", "lives", "spared"),
    [
        ("SIGKILL", 2, 3),
        pytest.param("SIGKILL", 2, 0, marks=pytest.mark.slow),
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


def test_who_comes_back_when_the_others_have_finished_is_ended_and_the_job_has_succeeded(job, tmp_path):
    options = ["--on-loss", "continue", "--restart", "9"]
    launcher = job.launch(3, 2, "survival.py", "comes_late", str(tmp_path / "back"), options=options)
    job.finish()
    assert launcher.code == 0, job.transcript()
    assert launcher.lines_with("worker-1 is ended, as the others have finished before it had joined them")
    assert launcher.lines_with("2 workers and 2 servers finished in"), job.transcript()
