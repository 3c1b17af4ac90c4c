"""Single values of Keras and its users through collective operations."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.collective.ranks import returned, run_ranks
from tests.keras.models import of_keras

pytestmark = of_keras


def test_numbers_arrays_and_tensors_are_reduced_and_come_back_as_arrays(keras, hvd):
    def reduce(rank):
        return [
            hvd.allreduce(rank + 1.0).item(),
            hvd.allreduce(rank + 1, average=False).item(),
            hvd.allreduce(torch.tensor([rank, 2.0]), op=hvd.Sum).tolist(),
            hvd.allreduce(keras.Variable([rank * 4.0])).tolist(),
            hvd.allreduce([[rank], [2]], name="a list").tolist(),
        ]

    expected = [1.5, 3, [1.0, 4.0], [2.0], [[0], [2]]]
    assert returned(run_ranks(2, reduce)) == [expected] * 2


def test_rows_are_gathered_broadcast_and_scattered(keras, hvd):
    def move(rank):
        gathered = hvd.allgather(np.full((rank + 1, 2), rank))
        return gathered[:, 0].tolist(), hvd.broadcast([rank, 5], 1).tolist(), hvd.reducescatter([4.0, rank]).tolist()

    assert returned(run_ranks(2, move)) == [([0, 1, 1], [1, 5], [4.0]), ([0, 1, 1], [1, 5], [0.5])]


def test_a_value_that_was_given_is_not_changed(keras, hvd):
    def reduce(rank):
        mine, tensor = np.full(3, float(rank)), torch.full((3,), float(rank))
        hvd.allreduce(mine)
        hvd.allreduce(tensor)
        hvd.broadcast(tensor, 0)
        return mine.tolist(), tensor.tolist()

    assert returned(run_ranks(2, reduce)) == [([0.0] * 3, [0.0] * 3), ([1.0] * 3, [1.0] * 3)]


def test_elastic_training_is_refused_by_its_name(hvd):
    with pytest.raises(NotImplementedError, match=r"kvdist\.keras\.elastic is not offered"):
        _ = hvd.elastic.KerasState
