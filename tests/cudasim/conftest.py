"""Tests that run kernels for GPUs in numba's simulator, which has to be chosen before numba is imported.

So they are collected only where NUMBA_ENABLE_CUDASIM=1 is set; `tests/kernels/test_cudasim.py` runs them so in a
process of their own. By hand: ``NUMBA_ENABLE_CUDASIM=1 python -m pytest tests/cudasim``.

A launch costs some threads of Python and an element some microseconds: arrays of a few hundred elements will do. Memory
is NumPy's, of `tests.cudasim.cupy_stub`.
"""

from __future__ import annotations

import os

import pytest

SIMULATED = os.environ.get("NUMBA_ENABLE_CUDASIM") == "1"

collect_ignore_glob = [] if SIMULATED else ["test_*.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A kernel's numbers are NumPy's here, and NumPy warns where a GPU overflows without a word."""
    for item in items:
        if "cudasim" in item.path.parts:
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning"))
