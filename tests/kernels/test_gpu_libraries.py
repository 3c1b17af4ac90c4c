"""What is said of an array on a GPU where CuPy or numba-cuda cannot be imported."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvdist.errors import DeviceError
from kvdist.kernels.gpu import gpu_index, open_gpu


@pytest.fixture(autouse=True)
def without_libraries(monkeypatch):
    for module in ("cupy_runtime", "cupy_device"):
        monkeypatch.setitem(sys.modules, f"kvdist.kernels.{module}", None)


def test_a_gpu_is_not_opened_and_the_message_says_what_to_install():
    with pytest.raises(DeviceError, match="cuda:1 needs CuPy and numba-cuda, .*pip install cupy.*KVDIST_GPU=host"):
        open_gpu(1)


def test_an_array_that_does_not_say_where_it_lies_is_refused_in_a_sentence():
    array = SimpleNamespace(__cuda_array_interface__={"data": (4096, False)})
    with pytest.raises(DeviceError, match="an array of types lies on a GPU, which needs CuPy and numba-cuda, .*host"):
        gpu_index(array)
