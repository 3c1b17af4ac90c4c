"""What numba's device does beyond the battery: several devices, threads, tensors of torch, refusals in sentences."""

from __future__ import annotations

import threading
import weakref
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.gpu import gpu_index
from kvdist.kernels.numba_cuda import NumbaDevice, _Owned, _torch_with_cuda, index_of, open_device
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.kvstore.placement import Devices
from kvdist.optimizer import Updater, create
from kvdist.optimizer.states import Part
from tests.cases import each

SINGLE = np.dtype(np.float32)


@pytest.fixture
def device():
    return open_device(0)


def up(device, host):
    array = device.kernels.empty(host.size, host.dtype)
    device.upload(host, array)
    return array


def down(device, array):
    host = np.empty(array.size, array.dtype)
    device.download(array, host)
    device.mark().wait()
    return host


def test_there_are_several_devices_and_no_more():
    assert [open_device(index).name for index in range(4)] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    with pytest.raises(DeviceError, match="there is no cuda:4: 4 device"):
        open_device(4)
    with pytest.raises(DeviceError, match="there is no cuda:-1"):
        open_device(-1)


def test_a_machine_without_a_driver_is_named(monkeypatch):
    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "cuda_error", lambda: "\nCUDA driver library cannot be found\n")
    with pytest.raises(DeviceError, match="no CUDA driver or device was found .CUDA driver library cannot be found"):
        open_device(0)


def test_arrays_go_from_device_to_device():
    first, second = open_device(0), open_device(3)
    source, out = up(first, np.arange(5, dtype=np.float32)), second.kernels.zeros(5, SINGLE)
    second.copy(source, out, first)
    np.testing.assert_array_equal(down(second, out), np.arange(5))
    assert first.reaches(second) and second.reaches(first)


def test_an_array_of_another_device_is_no_value_of_this_one():
    first, second = open_device(0), open_device(1)
    with pytest.raises(DeviceError, match="is on cuda:0, but must be on cuda:1"):
        second.view(up(first, np.zeros(3, np.float32)), DType.FLOAT32)


def test_a_copy_between_libraries_is_refused(device):
    other = SimpleNamespace(index=1, name="cuda:1", library="another library", mark=lambda: object())
    with pytest.raises(DeviceError, match="cuda:1 is driven by another library: all devices of a store need one"):
        device.copy(up(device, np.zeros(3, np.float32)), device.kernels.zeros(3, SINGLE), other)


def test_a_copy_between_types_or_lengths_is_refused(device):
    with pytest.raises(ValueError, match="3 elements of float32 cannot be copied to 4 of float32"):
        device.upload(np.zeros(3, np.float32), device.kernels.zeros(4, SINGLE))
    with pytest.raises(ValueError, match="3 elements of float64 cannot be copied to 3 of float32"):
        device.upload(np.zeros(3), device.kernels.zeros(3, SINGLE))


@each(
    "error, sentence",
    [
        (CudaAPIError(2, "CUDA_ERROR_OUT_OF_MEMORY"), "the memory of cuda:2 is full: make batches or buckets smaller"),
        (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), "the memory of cuda:2 is full"),
        (CudaAPIError(35, "CUDA_ERROR_INSUFFICIENT_DRIVER"), "the driver of cuda:2 is too old for this numba"),
        (CudaAPIError(222, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"), "the driver of cuda:2 is too old for this numba"),
        (CudaAPIError(700, "an illegal\naddress"), "cuda:2 failed in numba: .*an illegal"),
    ],
)
def test_what_the_driver_refuses_is_said_in_a_sentence(error, sentence):
    with pytest.raises(DeviceError, match=sentence), NumbaDevice(2).current():
        raise error


def test_mistakes_of_a_caller_stay_what_they_are():
    for error in (TypeError("wrong"), ValueError("wrong"), DeviceError("said already")):
        with pytest.raises(type(error), match=str(error)), NumbaDevice(0).current():
            raise error


def test_a_tensor_of_torch_is_seen_in_its_own_memory(device):
    for dtype, kind in ((DType.FLOAT32, torch.float32), (DType.BFLOAT16, torch.bfloat16), (DType.INT64, torch.int64)):
        tensor = torch.arange(6).to(kind).reshape(2, 3)
        array = device.view(tensor, dtype)
        assert array.size == 6 and array.dtype == dtype.storage
        array[2:4][...] = 0
        assert tensor.flatten().tolist() == [0, 1, 0, 0, 4, 5]


def test_a_parameter_of_torch_is_seen_without_its_history(device):
    parameter = torch.nn.Parameter(torch.ones(3))
    device.view(parameter, DType.FLOAT32)[...] = 0
    assert parameter.tolist() == [0, 0, 0]


def test_values_of_another_shape_or_type_are_refused(device):
    with pytest.raises(ValueError, match="not contiguous"):
        device.view(torch.zeros(3, 4).t(), DType.FLOAT32)
    wrong = [(torch.zeros(3), DType.FLOAT64), (torch.zeros(3), DType.INT32), (torch.ones(3).int(), DType.FLOAT32)]
    for value, dtype in wrong:
        with pytest.raises(TypeError, match=f"was passed as {dtype.label}"):
            device.view(value, dtype)


def test_arrays_have_no_other_assignments_or_cuts(device):
    array = device.kernels.zeros(4, SINGLE)
    with pytest.raises(TypeError, match="filled with a number or another array"):
        array[...] = np.zeros(4, np.float32)
    for key in (slice(None, None, 2), 1):
        with pytest.raises(TypeError, match="slices of step 1"):
            array[key]
    array[1:3] = up(device, np.float32([5, 6]))
    np.testing.assert_array_equal(down(device, array), [0, 5, 6, 0])
    copied = array.copy()
    array[...] = 0
    np.testing.assert_array_equal(down(device, copied), [0, 5, 6, 0])


def test_kernels_take_no_arrays_of_the_host(device):
    with pytest.raises(TypeError, match="arrays that its device has made or viewed, not ndarray"):
        device.kernels.weighted_sum([np.zeros(3, np.float32)] * 2, [1.0, 1.0], DType.FLOAT32, np.zeros(3, np.float32))


def test_arrays_are_filled_with_numbers_of_every_type(device):
    for dtype in DType:
        array = device.kernels.empty(5, dtype.storage)
        array[...] = 3
        array[1:3] = 7.0 if dtype.storage.kind == "f" else 7
        np.testing.assert_array_equal(down(device, array), np.array([3, 7, 7, 3, 3], dtype.storage))


def test_each_thread_has_a_current_stream(device):
    assert device.stream() == 0
    with device.on(5):
        assert device.stream() == 5
        with device.on(device.stream()), device.on(0):
            assert device.stream() == 0
        assert device.stream() == 5
        seen: list[int] = []
        thread = threading.Thread(target=lambda: seen.append(device.stream()))
        thread.start()
        thread.join()
    assert device.stream() == 0 and seen == [0]


def test_arrays_say_where_they_lie():
    array = open_device(3).kernels.zeros(6, SINGLE)
    assert gpu_index(array) == 3 and array.shape == (6,)
    given = array.reshape((2, 3))
    given[1, 2] = 5
    assert down(open_device(3), array)[5] == 5
    assert index_of(array) == 0


def test_a_store_keeps_and_sums_values_where_they_lie():
    gpus = [open_device(index) for index in range(2)]
    store = KVStore(LocalBackend("device", devices=Devices("numba", True)))
    store.init("w", up(gpus[0], np.zeros(40, np.float32)))
    store.set_optimizer("sgd", learning_rate=0.5)
    store.push("w", [up(gpu, np.full(40, 2 + gpu.index, np.float32)) for gpu in gpus])
    out = gpus[1].kernels.zeros(40, SINGLE)
    store.pull("w", out=out)
    np.testing.assert_array_equal(down(gpus[1], out), np.full(40, -2.5, np.float32))


def test_threads_may_launch_at_the_same_time(device):
    sums: list[float] = []

    def add() -> None:
        out = device.kernels.empty(100, SINGLE)
        for _ in range(5):
            device.kernels.weighted_sum([up(device, np.ones(100, np.float32))] * 3, [1.0] * 3, DType.FLOAT32, out)
            sums.append(float(down(device, out).sum()))

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [300.0] * 20


def test_states_of_neighbours_are_joined_and_split_on_the_device(device):
    updater = Updater(create("adam"), device.kernels)
    halves = [up(device, np.arange(4, dtype=np.float32)) for _ in range(2)]
    for index, weight in enumerate(halves):
        updater.update(index, weight, [up(device, np.ones(4, np.float32))], [1.0], DType.FLOAT32, weight)
    updater.join("both", [Part(0, 0, 4), Part(1, 4, 4)], 8, DType.FLOAT32)
    assert down(device, updater.states["both"].arrays[0]).size == 8
    assert (down(device, updater.states["both"].arrays[0]) > 0).all()
    assert (down(device, updater.states["both"].copy().arrays[1]) > 0).all()
    updater.split("both", [Part(0, 0, 4), Part(1, 4, 4)])
    assert updater.states[1].arrays[0].size == 4


# The host.


def test_what_has_no_kernel_is_computed_in_the_host_s_memory_and_logged_once(device, caplog):
    halves = np.arange(5, dtype=np.float16)
    for _ in range(2):
        out = device.kernels.empty(5, halves.dtype)
        device.kernels.weighted_sum([up(device, halves)] * 2, [1.0, 1.0], DType.FLOAT16, out)
        np.testing.assert_array_equal(down(device, out), halves * 2)
    (record,) = [record for record in caplog.records if "sums of float16" in record.getMessage()]
    assert "computed in the host's memory" in record.getMessage() and "cupy-cuda12x" in record.getMessage()


def test_torch_has_no_word_before_it_uses_cuda():
    assert _torch_with_cuda() is None


def test_what_numba_owns_is_released_with_its_device_current():
    class Owned:
        pass

    class Watched(NumbaDevice):
        @contextmanager
        def current(self):
            seen.append("current")
            yield
            seen.append("as before")

    owned, seen = Owned(), []
    weakref.finalize(owned, seen.append, "released")
    held = _Owned(owned, Watched(2))
    del owned
    assert seen == []
    del held
    assert seen == ["current", "released", "as before"]
