"""Who updates the weights: every row of the mirrored system's table, mended."""

from __future__ import annotations

import pytest

from kvdist.core.policy import ASYNC
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.training import trainer_config
from kvdist.training.trainer_config import ASYNCHRONOUS, store_updates, would_only_copy
from tests.cases import each

ROUNDS = ["device", "nccl", "dist", "dist_sync", "dist_device_sync", "p3", "p3store_dist", "mine"]


@each("store", ["local", *ROUNDS])
@each(
    "capable, wanted, by_default, expected",
    [
        (True, None, True, True),
        (True, None, False, False),
        (True, True, True, True),
        (True, True, False, True),
        (True, False, True, False),
        (True, False, False, False),
        (False, None, True, False),
        (False, None, False, False),
        (False, False, True, False),
    ],
)
def test_a_store_of_rounds_updates_as_wanted_or_where_it_can_and_may(store, capable, wanted, by_default, expected):
    assert store_updates(store, capable, wanted, by_default=by_default) is expected


@each("wanted", [None, True])
@each("by_default", [True, False])
@each("store", sorted(ASYNCHRONOUS))
def test_an_asynchronous_store_always_updates(store, by_default, wanted):
    assert store_updates(store, True, wanted, by_default=by_default)


@each("store", sorted(ASYNCHRONOUS))
def test_an_asynchronous_store_cannot_give_back_sums(store):
    with pytest.raises(ValueError, match=f"'{store}' trains asynchronously, which needs update_on_kvstore=True"):
        store_updates(store, True, False)


def test_a_store_that_cannot_update_cannot_be_told_to():
    with pytest.raises(ValueError, match="'mine' cannot update weights, but update_on_kvstore=True asks for it"):
        store_updates("mine", False, True)


@each(
    "sizes, wanted, expected",
    [
        ([3, trainer_config.BIG_PARAMETER_ELEMENTS], None, True),
        ([3, trainer_config.BIG_PARAMETER_ELEMENTS + 1], None, False),
        ([3, trainer_config.BIG_PARAMETER_ELEMENTS + 1], True, True),
    ],
)
def test_one_big_parameter_leaves_the_update_to_the_devices_unless_somebody_said_otherwise(sizes, wanted, expected):
    assert store_updates("local", True, wanted, sizes=sizes) is expected


def test_the_asynchronous_names_are_those_of_the_stores():
    assert {name for name, policy in DIST_NAMES.items() if policy is ASYNC} == ASYNCHRONOUS


@each("devices, workers, servers, expected", [(1, 1, 0, True), (2, 1, 0, False), (1, 1, 1, False), (1, 2, 0, False)])
def test_a_store_within_a_process_is_of_no_use_to_one_device(devices, workers, servers, expected):
    assert would_only_copy(devices, workers, servers) is expected


@each(
    "has_servers, capable, wanted, by_default, expected",
    [
        (True, True, None, True, True),
        (True, True, None, False, True),
        (True, True, True, True, True),
        (False, True, None, True, False),
        (False, True, True, True, True),
        (False, True, False, True, False),
        (True, False, None, True, False),
    ],
)
def test_with_sparse_gradients_servers_update_and_processes_only_when_told(
    has_servers, capable, wanted, by_default, expected
):
    found = store_updates(
        "dist", capable, wanted, by_default=by_default, has_servers=has_servers, has_sparse_grads=True
    )
    assert found is expected


@each("wanted, clips", [(False, False), (None, True), (True, True)])
def test_with_sparse_gradients_servers_cannot_be_told_to_leave_the_update_to_workers_or_to_clip(wanted, clips):
    with pytest.raises(ValueError, match="some gradients are sparse, and the store 'dist' keeps its values on servers"):
        store_updates("dist", True, wanted, has_servers=True, has_sparse_grads=True, clips=clips)
