"""Tests that run kernels for GPUs in numba's simulator, which has to be chosen before numba is imported.

So they are collected only where NUMBA_ENABLE_CUDASIM=1 is set; `tests/kernels/test_cudasim.py` runs them so in a
process of their own. By hand: ``NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cudasim``.

The simulator is one machine with `DEVICES` GPUs here. Their memory is that of the host, and a torch tensor of the CPU
counts as one of any of them (`Device.view`). A launch costs some threads of Python and an element some microseconds:
arrays of a few hundred elements will do.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

DEVICES = 4
SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

collect_ignore_glob = [] if SIMULATED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel's numbers are NumPy's here, and NumPy warns where a GPU overflows without a word."""
    for item in items:
        if "cudasim" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))


@pytest.fixture(scope="session", autouse=SIMULATED)
def several_devices() -> Iterator[None]:
    """A machine with several GPUs: the simulator has one, and a list of more is all that it takes."""
    from numba import cuda
    from numba.cuda.simulator.cudadrv.devices import FakeCUDAContext

    before, cuda.gpus.lst = cuda.gpus.lst, tuple(FakeCUDAContext(index) for index in range(DEVICES))
    yield
    cuda.gpus.lst = before
