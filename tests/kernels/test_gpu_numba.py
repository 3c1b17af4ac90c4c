"""The updates that numba has kernels for, on a real GPU: ``python -m pytest -m gpu``."""

from __future__ import annotations

import pytest

from tests.kernels.numba_battery import *  # noqa: F403
from tests.kernels.test_gpu import opened

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return opened("numba", 0)
