"""Values are exact: real processes push integers, and every worker checks what it pulls."""

from __future__ import annotations

import pytest

SCENARIOS = [
    "sum_replaces",
    "first_values",
    "dtypes",
    "orders",
    "many_small",
    "devices",
    "awkward_shapes",
    "own_writes",
    "missing_gradients",
    "calls_key_by_key",
    "replaced_values",
    "two_stores",
]


def run(job, workers, servers, scenarios, store, **variables):
    """Launch scenarios of `programs/values.py`, one after the other in one job; every worker has checked each."""
    job.launch(workers, servers, "values.py", scenarios, store, **variables)
    job.succeed()
    for scenario in scenarios.split(","):
        for rank in range(workers):
            assert job.processes["launcher"].lines_with(f"│ {scenario} checked on {rank} of {workers}"), scenario


def test_two_workers_and_two_servers_agree_on_every_value(job):
    run(job, 2, 2, ",".join(SCENARIOS), "dist")


@pytest.mark.slow_cases("1-1", "2-2", "4-3")
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_integer_gradients_give_exact_weights(job, workers, servers):
    run(job, workers, servers, "exact_weights", "dist_sync")


@pytest.mark.slow
def test_a_small_bound_cuts_small_keys_and_changes_no_value(job):
    run(job, 2, 3, "exact_weights", "dist", MXNET_KVSTORE_BIGARRAY_BOUND="5")


def test_small_slices_and_a_small_window_change_no_value(job):
    run(job, 2, 2, "exact_weights", "dist", KVDIST_SLICE_BYTES="65536", KVDIST_WINDOW_BYTES="200000")


@pytest.mark.slow_cases("p3-exact_weights")
@pytest.mark.parametrize(
    ("name", "scenario"), [("p3", "exact_weights"), pytest.param("dist_async", "asynchronous", marks=pytest.mark.slow)]
)
def test_priority_slices_change_no_value(job, name, scenario):
    # Over sockets, of which the window is the smallest that there can be: a slice.
    settings = {"KVDIST_TRANSPORT": "tcp", "KVDIST_PRIORITY_WINDOW_BYTES": "1", "MXNET_KVSTORE_SLICE_THRESHOLD": "9000"}
    run(job, 2, 2, scenario, name, DMLC_PS_VAN_TYPE="p3", **settings)


@pytest.mark.slow
def test_placement_by_hash_changes_no_value(job):
    run(job, 2, 3, "exact_weights", "dist", KVDIST_PLACEMENT="hash")


@pytest.mark.slow_cases("1")
@pytest.mark.parametrize("workers", [1, 3])
def test_an_asynchronous_store_counts_every_push_once(job, workers):
    run(job, workers, 2, "asynchronous", "dist_async")


def test_three_workers_and_one_server_agree_on_every_value(job):
    run(job, 3, 1, "sum_replaces,missing_gradients,awkward_shapes,orders", "dist_device_sync")
