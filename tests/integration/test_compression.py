"""Compressed pushes and pulls on real clusters, with exact numbers."""

from __future__ import annotations

import pytest


def run(job, workers, servers, *scenarios, **variables):
    job.launch(workers, servers, "compression.py", *scenarios, **variables)
    job.succeed()
    assert len(job.processes["launcher"].lines_with("checked on")) == workers, job.transcript()


def test_trainers_compress_whoever_updates(job):
    pytest.importorskip("torch")
    run(job, 2, 2, "trainer", "overlapped")


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_loops_halves_and_disagreements_have_the_known_results(job, transport):
    run(job, 2, 2, "loops", "halves", "disagreement", KVDIST_TRANSPORT=transport)


@pytest.mark.slow
def test_what_is_compressed_goes_to_the_servers_though_workers_sum_for_their_host(job):
    run(job, 3, 2, "loops", "halves", KVDIST_LOCAL_REDUCE="on")
