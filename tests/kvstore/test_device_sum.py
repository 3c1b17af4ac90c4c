"""Sums over GPUs: where they are computed, what crosses, and in which order."""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kvstore.device import summed
from kvdist.kvstore.placement import OnDevice, home_of
from tests.cases import each
from tests.devices import NumpyDevice


@each("into", [True, False])
def test_each_part_crosses_once_and_the_sum_is_in_the_order_of_the_parts(into):
    gpus = [NumpyDevice(index, frozenset({2, 3} if index < 2 else {0, 1})) for index in range(4)]
    numbers = (1e8, 1.0, -1e8, 1.0)  # another order gives 2 or 0
    arrays = [gpu.array(np.full(5, number, np.float32)) for gpu, number in zip(gpus, numbers, strict=True)]
    parts = [OnDevice(array.device, array) for array in arrays]
    out = gpus[1].array(np.zeros(5, np.float32)) if into else None
    total = summed(gpus[1], parts, DType.FLOAT32, out)
    assert (total.array.memory == 1).all() and total.device is gpus[1]
    assert [source for source, _ in gpus[1].copied] == [0, 2, 3]
    assert out is None or total.array is out


def test_a_single_part_is_not_copied_and_the_home_is_the_one_with_the_fewest_bytes():
    gpu, other = NumpyDevice(0), NumpyDevice(1)
    part = OnDevice(gpu, gpu.array(np.ones(3, np.float32)))
    assert summed(gpu, [part], DType.FLOAT32).array is part.array
    assert home_of([gpu, other], {0: 8, 1: 4}) is other and home_of([gpu, other], {}) is gpu
