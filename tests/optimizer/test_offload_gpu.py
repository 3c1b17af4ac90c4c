"""Sums and updates of servers on a real GPU, from pinned memory of an arena: ``python -m pytest -m gpu``."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Extent, Updater, create
from kvdist.optimizer.offload import SUMMED_BYTES_MIN, DeviceUpdater, offloaded
from kvdist.transport.shared_memory.arena import Arena
from tests.cases import each
from tests.kernels.test_gpu import WITHOUT_A_KERNEL, opened
from tests.optimizer.formulas import IDS, NO_DECAY, TABLE, shape_of
from tests.optimizer.test_offload import drawn, updated

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 1000, 300_007)
EVERY = [pytest.param(*case, id=case_id) for case, case_id in zip(TABLE, IDS, strict=True) if case[0] != "sgld"]


@pytest.fixture(scope="module")
def device():
    return opened(0)


@pytest.fixture
def arena(device):
    with contextlib.closing(Arena(1 << 30)) as arena:
        arena.table.pin_all(device.pin)
        yield arena


def lying_in(arena, values):
    array = arena.allocate(values.nbytes).view(values.dtype)
    array[...] = values
    return array


@each("name, numbers, formula", EVERY)
@each("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_a_rule_follows_the_host_and_with_a_kernel_to_the_bit(device, arena, name, numbers, formula, dtype):
    rule = create(name, clip_gradient=0.5, multi_precision=True, **numbers)
    here, there = Updater(rule), DeviceUpdater(rule, device)
    for size in SIZES:
        ours, theirs = lying_in(arena, drawn(0, dtype, size)), drawn(0, dtype, size)
        spare = arena.allocate(ours.nbytes).view(ours.dtype)
        extent = Extent("w", shape_of(size) if size else (0, 1))
        for turn in range(4):
            how = {"index": size, "rates": (0.05, 0.0 if name in NO_DECAY else 0.1), "extent": extent}
            ours, spare = updated(there, ours, turn, dtype, kept=spare, **how), ours
            theirs = updated(here, theirs, turn, dtype, **how)
        if name not in WITHOUT_A_KERNEL:
            assert ours.tobytes() == theirs.tobytes(), size
        own, other = (REFERENCE.to_float32(each, dtype) if dtype is DType.BFLOAT16 else each for each in (ours, theirs))
        np.testing.assert_allclose(own, other, rtol=1e-2 if dtype is DType.BFLOAT16 else 1e-4, atol=1e-5)
        assert there.states[size].count == here.states[size].count == 4


@each("dtype", list(DType))
def test_long_sums_have_the_bits_of_the_host(device, arena, dtype):
    size = SUMMED_BYTES_MIN // dtype.itemsize + 5
    sources = [lying_in(arena, (np.arange(size) * (i + 1) % 11).astype(dtype.storage)) for i in range(3)]
    if dtype is DType.BFLOAT16:
        sources = [lying_in(arena, drawn(i, dtype, size)) for i in range(3)]
    ours, theirs = arena.allocate(sources[0].nbytes).view(dtype.storage), np.empty(size, dtype.storage)
    offloaded(device, REFERENCE).weighted_sum(sources, [1.0] * 3, dtype, ours)
    REFERENCE.weighted_sum(sources, [1.0] * 3, dtype, theirs)
    assert ours.tobytes() == theirs.tobytes()
