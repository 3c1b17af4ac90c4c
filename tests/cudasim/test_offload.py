"""Sums and updates of servers on a GPU in the simulator: the bits of the host."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create, offload
from kvdist.optimizer.base import Piece
from kvdist.optimizer.offload import DeviceUpdater, offloaded
from kvdist.optimizer.states import Part
from tests.cases import each
from tests.cudasim import cupy_stub

RULES = [("sgd", {}), ("sgd", {"momentum": 0.9, "clip_gradient": 0.5}), ("adam", {}), ("ftml", {}), ("rmsprop", {})]
FLOATS = [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16]


@pytest.fixture(scope="module")
def device():
    return cupy_stub.load(cupy_stub.Stub()).open_device(0)


def drawn(seed, dtype, size):
    values = np.random.default_rng(seed).standard_normal(size)
    if dtype is DType.BFLOAT16:
        return REFERENCE.from_float32(values.astype(np.float32), dtype)
    return values.astype(dtype.storage)


def updated(updater, weight, turn, dtype, index="w", count=3):
    out = np.empty_like(weight)
    grads = [drawn(10 * turn + i, dtype, weight.size) for i in range(count)]
    for grad in grads:
        grad.flags.writeable = False  # as what peers show
    piece = Piece(index, weight, grads, [0.5, 1.0, 0.25][:count], out, Extent(index, (weight.size,)))
    updater.update_together([piece], dtype, 0.05, 0.1)
    return out


@each("dtype", FLOATS)
@each("name, numbers", RULES)
def test_a_rule_with_a_kernel_gives_the_bits_of_the_host(device, name, numbers, dtype):
    rule = create(name, multi_precision=True, **numbers)
    here, there = Updater(rule), DeviceUpdater(rule, device)
    for size in (0, 1, 67):
        ours = theirs = drawn(0, dtype, size)
        for turn in (1, 2, 3):
            ours = updated(there, ours, turn, dtype, index=size, count=turn)
            theirs = updated(here, theirs, turn, dtype, index=size, count=turn)
            assert ours.tobytes() == theirs.tobytes()
        own, other = there.states[size], here.states[size]
        assert own.count == other.count == 3
        assert [one.tobytes() for one in own.arrays] == [one.tobytes() for one in other.arrays]


@each("dtype", FLOATS)
def test_arrays_are_joined_split_saved_and_restored_there(device, dtype):
    rule = create("adam", multi_precision=True)
    here, there = Updater(rule), DeviceUpdater(rule, device)
    parts = (Part("a", 0, 3), Part("b", 4, 1), Part("c", 8, 0))
    for side in (here, there):
        for part in parts:
            updated(side, drawn(part.start, dtype, part.count), 1, dtype, part.index)
        side.join("all", parts, 8, dtype)
    assert (
        updated(there, drawn(5, dtype, 8), 2, dtype, "all").tobytes()
        == updated(here, drawn(5, dtype, 8), 2, dtype, "all").tobytes()
    )
    for side in (here, there):
        side.split("all", parts)
    again = DeviceUpdater(rule, device)
    for part in parts:
        again.restore(part.index, there.states[part.index])
        weight = drawn(9, dtype, part.count)
        assert (
            updated(again, weight, 3, dtype, part.index).tobytes()
            == updated(here, weight, 3, dtype, part.index).tobytes()
        )


@each("dtype", list(DType))
def test_sums_have_the_bits_of_the_host(device, dtype, monkeypatch):
    monkeypatch.setattr(offload, "SUMMED_BYTES_MIN", 1)
    sources = [np.arange(100).astype(dtype.storage) for _ in range(3)]
    if dtype.is_floating:
        sources = [drawn(i, dtype, 100) for i in range(3)]
    ours, theirs = np.empty(100, dtype.storage), np.empty(100, dtype.storage)
    offloaded(device, REFERENCE).weighted_sum(sources, [1.0] * 3, dtype, ours)
    REFERENCE.weighted_sum(sources, [1.0] * 3, dtype, theirs)
    assert ours.tobytes() == theirs.tobytes()


def test_a_rule_that_needs_the_host_is_refused(device):
    with pytest.raises(DeviceError, match="sgld cannot run on cuda:0"):
        DeviceUpdater(create("sgld"), device)
