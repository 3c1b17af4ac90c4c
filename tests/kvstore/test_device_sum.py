"""Sums over GPUs that do not all reach each other: where they are made, and what crosses."""

from __future__ import annotations

import numpy as np

from kvdist.dtypes import DType
from kvdist.kvstore.device import summed
from kvdist.kvstore.placement import OnDevice, home_of
from tests.cases import each
from tests.devices import NumpyDevice


def machine(*islands: set[int]) -> list[NumpyDevice]:
    every = set().union(*islands)
    own = {index: island for island in islands for index in island}
    return [NumpyDevice(index, frozenset(every - own[index])) for index in sorted(every)]


@each(
    "islands, crossed",
    [([{0, 1, 2, 3}], [1, 2, 3]), ([{0, 1}, {2, 3}], [1, 2]), ([{0}, {1, 2, 3}], [1]), ([{0}, {1}, {2, 3}], [1, 2])],
)
@each("into", [True, False])
def test_one_array_crosses_from_each_island_and_the_sum_is_whole(islands, crossed, into):
    gpus = machine(*islands)
    parts = [OnDevice(gpu, gpu.array(np.full(5, 2.0**gpu.index, np.float32))) for gpu in gpus]
    out = gpus[0].array(np.zeros(5, np.float32)) if into else None
    total = summed(gpus[0], parts, DType.FLOAT32, out)
    assert (total.array.memory == 15).all() and total.device is gpus[0]
    assert [source for source, _ in gpus[0].copied] == crossed
    assert out is None or total.array is out


def test_a_single_part_is_not_copied_and_the_home_is_the_one_with_the_fewest_bytes():
    (gpu, other) = machine({0, 1})
    part = OnDevice(gpu, gpu.array(np.ones(3, np.float32)))
    assert summed(gpu, [part], DType.FLOAT32).array is part.array
    assert home_of([gpu, other], {0: 8, 1: 4}) is other and home_of([gpu, other], {}) is gpu
