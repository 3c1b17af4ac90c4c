"""The battery of updates on a real GPU: ``python -m pytest -m gpu``."""

from __future__ import annotations

import pytest

from tests.kernels.device_battery import LONG
from tests.kernels.test_gpu import opened
from tests.kernels.update_battery import *  # noqa: F403

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def device():
    return opened(0)


@pytest.fixture(scope="session")
def sizes():
    return [*LONG, 1_000_003]
