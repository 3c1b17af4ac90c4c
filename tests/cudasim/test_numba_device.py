"""The batteries of devices for numba's, whose kernels run in the simulator."""

from __future__ import annotations

import pytest

from kvdist.kernels.numba_cuda import open_device
from tests.kernels.device_battery import *  # noqa: F403
from tests.kernels.numba_battery import *  # noqa: F403


@pytest.fixture(scope="module")
def device():
    return open_device(0)


@pytest.fixture
def sizes():
    return SHORT  # noqa: F405
