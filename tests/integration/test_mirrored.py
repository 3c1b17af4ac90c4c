"""The mirrored system's own tests of dense values, with its numbers, on real clusters of several sizes."""

from __future__ import annotations

import pytest

CHECKED = "checked on"


def run(job, workers, servers, *command, **variables):
    job.launch(workers, servers, *command, **variables)
    job.succeed()
    lines = job.processes["launcher"].lines_with(CHECKED)
    assert len(lines) == workers, job.transcript()


@pytest.mark.slow_cases("1-auto-dist", "2-auto-dist_sync", "4-auto-dist_device_sync")
@pytest.mark.parametrize(
    ("workers", "transport", "store"),
    [
        (1, "auto", "dist"),
        (2, "auto", "dist_sync"),
        pytest.param(2, "tcp", "p3", marks=pytest.mark.slow),
        (4, "auto", "dist_device_sync"),
    ],
)
def test_dense_values_have_the_known_numbers(job, workers, transport, store):
    run(job, workers, 2, "mirrored.py", "numpy", store, KVDIST_TRANSPORT=transport)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "transport", "store"),
    [
        (1, "tcp", "dist_sync_device"),
        (4, "tcp", "p3store_dist"),
        (7, "auto", "dist_sync"),
        (7, "tcp", "dist_device_sync"),
    ],
)
def test_dense_values_have_the_known_numbers_on_seven_workers_too(job, workers, transport, store):
    run(job, workers, workers, "mirrored.py", "numpy", store, KVDIST_TRANSPORT=transport)


@pytest.mark.slow_cases("2-auto")
@pytest.mark.parametrize(
    ("workers", "transport"),
    [
        (2, "auto"),
        pytest.param(2, "tcp", marks=pytest.mark.slow),
        pytest.param(7, "auto", marks=pytest.mark.slow),
    ],
)
def test_compressed_values_have_the_known_numbers(job, workers, transport):
    run(job, workers, 2, "mirrored.py", "compression", "dist_sync", KVDIST_TRANSPORT=transport)


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("workers", [1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 7))])
def test_trainers_have_the_known_numbers_and_update_where_the_table_says(job, workers):
    pytest.importorskip("torch")
    run(job, workers, 2, "mirrored.py", "torch", "dist_sync")
