"""Means over the workers, values of rank 0 and bytes of all, in one process; several workers are tested on clusters."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvdist import kv
from kvdist.kvstore.checkpoints import gather


@pytest.fixture(params=["local", "dist"])
def store(request):
    with kv.create(request.param) as store:
        yield store


@pytest.mark.parametrize("value", [3, 3.0, True, np.float32(3), np.int8(3)])
def test_the_mean_of_a_number_is_a_float(store, value):
    mean = store.average(value)
    assert type(mean) is float and mean == float(value)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.arange(6, dtype=np.float16).reshape(2, 3), np.float16),
        (np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.float64),
        (np.arange(3), np.float64),
        (np.array([True, False]), np.float64),
        (np.zeros((0, 3), np.float32), np.float32),
        (np.array(2.5, np.float32), np.float32),
        (torch.ones(2, 3, dtype=torch.bfloat16), torch.bfloat16),
        (torch.arange(3), torch.float64),
        (torch.ones(3, requires_grad=True), torch.float32),
        (torch.arange(6.0).view(2, 3).t(), torch.float32),
    ],
)
def test_the_mean_of_an_array_is_a_new_one_of_its_kind_and_shape(store, value, dtype):
    for _ in range(2):
        mean = store.average(value)
        assert type(mean) is type(value) and mean.shape == value.shape and mean.dtype == dtype
        assert mean is not value and mean.tolist() == value.tolist()
        mean[...] = 7  # and it is the caller's
    assert 7 not in np.asarray(value.tolist())


def test_a_mean_in_which_nobody_takes_part_is_not_a_number(store):
    assert store.average(4.0) == 4
    assert math.isnan(store.average(4.0, counts=False))
    assert np.isnan(store.average(np.ones(3), counts=False)).all()


@pytest.mark.parametrize("value", ["text", None, 1j, [1.0], np.array(["a"]), torch.zeros(2, dtype=torch.complex64)])
def test_what_has_no_mean_is_refused(store, value):
    with pytest.raises(TypeError):
        store.average(value)


def test_values_of_rank_0_are_new_arrays_of_the_same_kinds(store):
    given = [np.arange(3), np.arange(3), torch.ones(2, 2), np.array(5, np.uint8)]
    for _ in range(2):
        copies = store.from_rank_0(given)
        for copy, value in zip(copies, given, strict=True):
            assert type(copy) is type(value) and copy is not value
            assert copy.dtype == value.dtype and copy.tolist() == value.tolist()
            copy[...] = 0
    assert store.from_rank_0([]) == []


@pytest.mark.parametrize("content", [b"", b"\0", b"text" * 100_000])
def test_bytes_come_back_by_rank(store, content):
    assert gather(store._backend, content) == gather(store._backend, content) == {0: content}


def test_keys_and_optimizer_of_the_store_are_not_touched(store):
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init([0, 1], [np.ones(3, np.float32)] * 2)
    store.average(np.ones(3, np.float32))
    store.from_rank_0([np.zeros(3, np.float32)])
    assert store.pull(0).tolist() == [1, 1, 1]


def test_no_process_is_known_to_be_lost(store):
    assert store.num_dead_nodes() == 0


def test_a_closed_store_averages_nothing():
    for name in ("local", "dist"):
        store = kv.create(name)
        store.average(1.0)
        store.close()
        for call in (lambda store=store: store.average(1.0), lambda store=store: store.from_rank_0([np.ones(1)])):
            with pytest.raises(RuntimeError, match="has been closed"):
                call()
