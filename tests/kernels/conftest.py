"""Fixtures of the tests of kernels."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.kernels.cuda_host import Library


@pytest.fixture(scope="session")
def cuda_library(tmp_path_factory):
    """The CUDA kernels for this processor; processes of tests that run side by side compile them once."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ here: THE CUDA KERNELS ARE NOT RUN")
    folder = tmp_path_factory.getbasetemp()
    folder = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "cuda_on_host"
    folder.mkdir(exist_ok=True)
    return Library(folder)
