"""`kvdist.kernels.cupy_cuda.device` over a stub of CuPy: what a GPU would be asked for, and what becomes of errors."""

from __future__ import annotations

import gc
import sys
import types

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from tests.kernels import cupy_stub
from tests.kernels.device_battery import *  # noqa: F403
from tests.kernels.device_battery import SHORT, down, up

SINGLE = np.dtype(np.float32)


@pytest.fixture
def stub(cuda_library):
    return cupy_stub.Stub(cuda_library)


@pytest.fixture
def gpu(stub):
    return cupy_stub.load(stub)


@pytest.fixture
def device(gpu):
    return gpu.open_device(0)


@pytest.fixture(scope="session")
def sizes():
    return SHORT


@pytest.fixture
def torch(monkeypatch):
    """A torch that has begun to use CUDA, on a side stream."""
    memories = []

    def alloc(size, index):
        memories.append(cupy_stub.Memory(size))
        return memories[-1].ptr

    streams = {index: types.SimpleNamespace(cuda_stream=0x50 + index) for index in range(2)}
    cuda = types.SimpleNamespace(
        is_initialized=lambda: True, current_stream=streams.get, caching_allocator_alloc=alloc,
        caching_allocator_delete=lambda address: None,
    )  # fmt: skip
    module = types.SimpleNamespace(cuda=cuda, Tensor=type("Tensor", (), {}), memories=memories)
    monkeypatch.setitem(sys.modules, "torch", module)
    return module


def test_work_goes_to_the_stream_that_is_current_in_torch_and_memory_comes_from_its_allocator(torch, device, stub):
    assert device.mark().event.stream == 0x50
    array = up(device, np.arange(5, dtype=np.float32))
    assert len(torch.memories) == 1
    device.kernels.weighted_sum([array], [2.0], DType.FLOAT32, array)
    np.testing.assert_array_equal(down(device, array), np.arange(5) * 2)
    assert stub.devices == [0] and len(stub.streams) == 1 and stub.allocators == [None]


def test_without_torch_work_goes_to_the_stream_that_is_current_in_cupy(device, stub, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with stub.cuda.Stream(0x77):
        assert device.mark().event.stream == 0x77
    assert device.mark().event.stream == 0


def test_a_copy_from_another_device_waits_for_it_there_and_lets_it_go_on_behind_the_copy(torch, gpu, stub):
    one, other = gpu.open_device(0), gpu.open_device(1)
    array, out = up(one, np.arange(5, dtype=np.float32)), other.kernels.zeros(5, SINGLE)
    other.copy(array, out, one)
    np.testing.assert_array_equal(down(other, out), np.arange(5))
    assert [(stream, event.stream) for stream, event in stub.waited] == [(0x51, 0x50), (0x50, 0x51)]
    other.copy(array, out, one)
    assert stub.peers == {(1, 0)}


def test_peers_that_somebody_else_has_connected_are_no_error(gpu, stub):
    stub.peers.add((1, 0))
    one, other = gpu.open_device(0), gpu.open_device(1)
    other.copy(up(one, np.arange(5, dtype=np.float32)), other.kernels.zeros(5, SINGLE), one)


def test_pinned_memory_is_registered_for_as_long_as_it_is_held(device, stub):
    host = np.zeros(100, np.float32)
    hold = device.pin(host)
    assert stub.registered == {host.ctypes.data: 400}
    assert device.pin(host) is None
    del hold
    gc.collect()
    assert stub.registered == {}


def test_memory_that_cannot_be_written_to_is_registered_as_such(device, stub):
    host = np.zeros(100, np.float32)
    host.flags.writeable = False
    stub.read_only.add(host.ctypes.data)
    hold = device.pin(host)
    assert hold is not None and stub.registered == {host.ctypes.data: 400}


def test_a_kernel_is_compiled_once(device, stub):
    array = device.kernels.zeros(5, SINGLE)
    for _ in range(3):
        device.kernels.weighted_sum([array], [1.0], DType.FLOAT32, array)
    assert stub.log == ["weighted_sum<float, float, 1, 4>"]


def test_a_device_that_is_not_there_is_refused_in_a_sentence(gpu, stub):
    with pytest.raises(DeviceError, match="there is no cuda:2: cuda:0 to cuda:1 are visible here"):
        gpu.open_device(2)
    stub.count = 1
    with pytest.raises(DeviceError, match="there is no cuda:-1: cuda:0 is visible here"):
        gpu.open_device(-1)


def test_no_driver_and_no_device_are_told_in_a_sentence(gpu, stub):
    stub.failure = cupy_stub.CUDARuntimeError(35, "cudaErrorInsufficientDriver: too old")
    with pytest.raises(DeviceError, match="the driver is missing or older than CuPy's CUDA 12.x; install or update"):
        gpu.open_device(0)
    stub.failure = cupy_stub.CUDARuntimeError(100, "cudaErrorNoDevice: none")
    with pytest.raises(DeviceError, match="no GPU is visible: run on a machine with a GPU"):
        gpu.open_device(0)


def test_a_full_memory_is_told_in_a_sentence(device, stub):
    for failure in (
        MemoryError("Out of memory allocating 1,024 bytes."),
        RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
        cupy_stub.CUDARuntimeError(2, "cudaErrorMemoryAllocation: out of memory"),
    ):
        stub.failure = failure
        with pytest.raises(DeviceError, match="the memory of cuda:0 is full .*: keep fewer or smaller values there"):
            device.kernels.empty(10, SINGLE)


def test_a_compiler_that_fails_is_told_in_a_sentence(device, stub):
    array = device.kernels.zeros(5, SINGLE)
    stub.failure = cupy_stub.CompileException("cuda_fp16.h: no such file\nmore")
    with pytest.raises(DeviceError, match="CuPy cannot compile for cuda:0: cuda_fp16.h: no such file; install CuPy"):
        device.kernels.weighted_sum([array], [1.0], DType.FLOAT32, array)


def test_what_fails_later_is_told_by_who_waits(device, stub):
    mark = device.mark()
    stub.failure = cupy_stub.CUDARuntimeError(700, "cudaErrorIllegalAddress: an illegal memory access")
    with pytest.raises(DeviceError, match="cuda:0 failed: cudaErrorIllegalAddress"):
        mark.wait()


def test_arrays_of_other_libraries_are_refused(device):
    host = np.zeros(5, np.float32)
    with pytest.raises(TypeError, match="works on arrays of CuPy, not on ndarray: give `view` of it"):
        device.kernels.weighted_sum([host], [1.0], DType.FLOAT32, host)


def test_a_view_of_a_wrong_type_or_shape_is_refused(device):
    array = device.kernels.zeros(6, SINGLE)
    with pytest.raises(TypeError, match="an array of float32 was given where float64 is expected"):
        device.view(array, DType.FLOAT64)
    with pytest.raises(ValueError, match="not contiguous"):
        device.view(array[::2], DType.FLOAT32)


def test_copies_need_arrays_of_one_type_and_length(device):
    array = device.kernels.zeros(6, SINGLE)
    with pytest.raises(ValueError, match="5 elements of float32 cannot be copied to 6 of float32"):
        device.upload(np.zeros(5, np.float32), array)
    with pytest.raises(ValueError, match="6 elements of float32 cannot be copied to 6 of float64"):
        device.download(array, np.zeros(6))
    with pytest.raises(ValueError, match="only contiguous"):
        device.upload(np.zeros(12, np.float32)[::2], array)


def test_what_a_kernel_would_fail_on_is_refused(gpu):
    one, other = gpu.open_device(0), gpu.open_device(1)
    array = one.kernels.zeros(6, SINGLE)
    with pytest.raises(ValueError, match="cuda:1 was given an array on cuda:0: use `copy`"):
        other.kernels.squares(array)
    with pytest.raises(ValueError, match="strided or not aligned"):
        one.kernels.squares(array[::2])
    with pytest.raises(ValueError, match="strided or not aligned"):
        one.kernels.squares(array.view(np.uint8)[1:-3].view(np.float32))


def test_what_does_not_fit_into_a_bucket_is_refused(device):
    array, out = device.kernels.zeros(6, SINGLE), device.kernels.zeros(30, np.dtype(np.uint8))
    with pytest.raises(ValueError, match="24 bytes at 8 do not fit into a bucket of 30"):
        device.pack([array, array], [0, 8], out)
    with pytest.raises(ValueError, match="24 bytes at -4 do not fit"):
        device.unpack(out, [-4], [array])
    with pytest.raises(ValueError, match="1 arrays need as many offsets, not 2"):
        device.pack([array], [0, 8], out)
    with pytest.raises(TypeError, match="a bucket is an array of uint8, not float32"):
        device.pack([], [], array)


def test_rows_that_do_not_fit_are_refused(device):
    indices, rows = device.kernels.zeros(4, np.dtype(np.int64)), device.kernels.zeros(6, SINGLE)
    with pytest.raises(ValueError, match="row data has 6 elements, which is not a multiple of 4 rows"):
        device.add_rows(rows, indices, rows)
    with pytest.raises(TypeError, match="indices of rows are int64, not float32"):
        device.merge_rows(rows, rows, DType.FLOAT32)
    with pytest.raises(TypeError, match="one of float32, float64 and float16 are added, not int64 to float32"):
        device.add_rows(rows, indices, indices)
