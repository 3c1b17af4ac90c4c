"""Stores without servers in real jobs that have some: where the ranks meet through the cluster."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")


def assert_all_say(job, workers, sentences, scenario, *arguments, **variables):
    """Every worker of a job with two servers ends a scenario of `programs/collective.py` with these sentences."""
    job.launch(workers, 2, "collective.py", scenario, *arguments, **variables)
    job.succeed()
    lines = [line.split(" │ ", 1)[1] for line in job.processes["launcher"].worker_lines()]
    for sentence in sentences:
        said = sorted(line for line in lines if line.startswith(sentence))
        assert said == [f"{sentence} on {rank} of {workers}" for rank in range(workers)]


@pytest.mark.parametrize("workers", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_in_a_job_with_servers_it_gives_the_bits_that_they_give(job, workers):
    assert_all_say(job, workers, ["the same bits"], "exact")


def test_a_hybrid_store_trains_as_servers_alone_do_and_keeps_tables_beside_arrays(job, tmp_path):
    variables = {"KVDIST_CHECKPOINT_ROOT": str(tmp_path)}
    assert_all_say(job, 2, ["the same towers", "tables"], "hybrid", str(tmp_path / "saved"), **variables)
