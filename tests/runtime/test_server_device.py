"""Where a server computes: what is opened, what is refused, and the embedded cluster on a device."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest

from kvdist import kv
from kvdist.errors import ConfigError, DeviceError
from kvdist.kernels import gpu
from kvdist.runtime.cluster import open_server_device
from tests.devices import NumpyDevice


@pytest.fixture
def devices(monkeypatch):
    """Every device that is opened, in place of GPUs."""
    opened = []

    def open_gpu(index, otherwise):
        opened.append(NumpyDevice(index))
        return opened[-1]

    monkeypatch.setattr(gpu, "open_gpu", open_gpu)
    return opened


def test_the_host_needs_no_device_and_no_library(monkeypatch):
    monkeypatch.setattr(gpu, "open_gpu", None)
    assert open_server_device("cpu") is None


def test_a_gpu_is_opened_by_its_number_and_told_of(devices, caplog):
    with caplog.at_level(logging.INFO, "kvdist"):
        assert open_server_device("cuda:3") is devices[0]
    assert devices[0].name == "cuda:3"
    assert "values rest, and are summed and updated, on cuda:3" in caplog.text


def test_a_gpu_that_is_not_there_is_never_replaced_by_the_host(monkeypatch):
    def fail(index, otherwise):
        raise DeviceError(f"there is no GPU {index}")

    monkeypatch.setattr(gpu, "open_gpu", fail)
    words = "was to sum and update on cuda:1, and without --server-device .*: there is no GPU 1"
    with pytest.raises(DeviceError, match=words):
        open_server_device("cuda:1")


def test_a_server_without_a_library_is_not_told_to_do_what_it_would_refuse(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="pip install cupy-cuda12x .*, or let servers compute on their hosts$"):
        open_server_device("cuda:0")


def test_a_process_that_is_kept_off_its_gpus_cannot_be_a_server_on_one(devices, monkeypatch):
    monkeypatch.setenv("KVDIST_GPU", "host")
    with pytest.raises(ConfigError, match="KVDIST_SERVER_DEVICE is 'cuda:0', but KVDIST_GPU is 'host'.*change one"):
        open_server_device("cuda:0")
    assert not devices


@pytest.mark.parametrize("name", ["adam", "lamb", "ftrl"])
def test_the_embedded_server_computes_on_the_device_too(devices, monkeypatch, name):
    def trained():
        with kv.create("dist") as store:
            store.set_optimizer(name)
            store.init(["w", "b"], [np.arange(5, dtype=np.float32), np.ones((2, 3), np.float16)])
            for turn in range(3):
                store.push(["w", "b"], [np.full(5, turn, np.float32), np.full((2, 3), turn, np.float16)])
            return [value.tobytes() for value in store.pull(["w", "b"])]

    here = trained()
    assert not devices
    monkeypatch.setenv("KVDIST_SERVER_DEVICE", "cuda:0")
    assert trained() == here
    assert devices[0].downloaded_bytes > 0


def test_the_embedded_server_refuses_what_its_device_cannot_run(monkeypatch):
    monkeypatch.setattr(gpu, "open_gpu", lambda index, otherwise: NumpyDevice(index))
    monkeypatch.setenv("KVDIST_SERVER_DEVICE", "cuda:0")
    with kv.create("dist") as store, pytest.raises(ConfigError, match="server-0: sgld cannot run on cuda:0"):
        store.set_optimizer("sgld")
