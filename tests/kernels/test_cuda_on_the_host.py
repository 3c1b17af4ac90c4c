"""The text of the CUDA kernels, compiled for this processor and held against the reference: no GPU is needed."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.cupy_cuda import arithmetic
from kvdist.kernels.reference import REFERENCE
from tests.kernels.cuda_host import HostDevice
from tests.kernels.device_battery import *  # noqa: F403
from tests.kernels.device_battery import LONG, tame, up
from tests.kernels.update_battery import *  # noqa: F403


@pytest.fixture(scope="session")
def device(cuda_library):
    return HostDevice(cuda_library)


@pytest.fixture(scope="session")
def sizes():
    return LONG[:-1]  # of many blocks, as the longest, which takes ten times as long


def test_few_blocks_sum_many_squares(device, monkeypatch):
    monkeypatch.setattr(arithmetic, "SQUARES_BLOCKS_MAX", 3)
    given = tame(70001, 1, DType.FLOAT32)
    assert device.kernels.squares(up(device, given)) == pytest.approx(REFERENCE.squares(given), rel=1e-12)


def test_memory_of_the_runtime_begins_where_wide_loads_may(device):
    assert [device.kernels.empty(size, np.dtype(np.uint8)).ctypes.data % 16 for size in (1, 15, 16, 4096)] == [0] * 4
