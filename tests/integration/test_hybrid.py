"""The store ``hybrid`` as its two sides make it: the place in the data, and who is there."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


def test_one_worker_goes_on_within_its_data_wherever_its_keys_are(job, tmp_path):
    launcher = job.launch(1, 1, "hybrid_queue.py", str(tmp_path), KVDIST_CHECKPOINT_ROOT=str(tmp_path))
    job.succeed()
    said = [line.partition("│ ")[2] for line in launcher.worker_lines()]
    keys = ["1 of 1 keys", "0 of 2 keys", "1 of 3 keys"]
    assert said == [f"{one} on servers> | 24 40 64 64" for one in keys], job.transcript()


def test_who_watches_the_members_of_a_hybrid_store_hears_that_one_has_left(job):
    launcher = job.launch(2, 1, "hybrid_members.py")
    job.succeed()
    assert launcher.lines_with("heard [((0, 1), (0,))] members (0,)"), job.transcript()


def test_an_average_divides_by_the_number_of_all_workers_that_are_in_one_update(job):
    launcher = job.launch(3, 1, "divisor.py", KVDIST_POLICY="diloco:100")
    job.succeed()
    for kind, found in {"dist": 2.0, "collective": 2.0, "hybrid": 2.0, "dist_async": 6.0}.items():
        assert len(launcher.lines_with(f"│ {kind} [{found}, {found}] 2.0")) == 3, job.transcript()
    told = launcher.lines_with("and the store 'collective' has none: it exchanges in each step")
    assert len(told) == 3, "the job has a policy, which is for the stores on servers"
