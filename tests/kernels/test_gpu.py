"""The battery of devices on a real GPU, and how kvdist shares it with torch: ``python -m pytest -m gpu``.

Needs no more than NumPy, pytest, kvdist's folder, CuPy and numba-cuda; torch where it says so.
"""

from __future__ import annotations

import contextlib
import importlib
import threading

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.reference import REFERENCE
from kvdist.optimizer import Updater, create
from kvdist.optimizer.base import Extent
from tests.cases import each
from tests.kernels.device_battery import *  # noqa: F403
from tests.kernels.device_battery import HALVES, LONG, assert_same, down, tame, up

pytestmark = pytest.mark.gpu

SINGLE = np.dtype(np.float32)
ASIDE = "on a side stream of torch"
WITHOUT_A_KERNEL = ("groupadagrad", "lamb", "lans")


def opened(index):
    module = pytest.importorskip(
        "kvdist.kernels.cupy_device", reason="CuPy or numba-cuda is not here: NOT RUN ON A GPU", exc_type=ImportError
    )
    try:
        return module.open_device(index)
    except DeviceError as error:
        pytest.skip(f"NOT RUN ON A GPU: {error}")


def torch_on_gpu():
    """torch, with CUDA begun."""
    torch = pytest.importorskip("torch", reason="no torch here: INTEROPERATION IS NOT TESTED")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU: INTEROPERATION IS NOT TESTED")
    torch.cuda.init()
    return torch


@pytest.fixture(scope="module", params=["", ASIDE])
def device(request):
    """The device; a second time with a stream of torch current that does not wait for the default one."""
    device = opened(0)
    with contextlib.ExitStack() as stack:
        if request.param:
            torch = torch_on_gpu()
            stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device.index)))
        yield device


@pytest.fixture(scope="session")
def sizes():
    return [*LONG, 1_000_003]


@pytest.fixture
def torch(device):
    """torch, with CUDA begun. It is asked for after the device, which may thus find it in either state."""
    return torch_on_gpu()


@each("dtype", [DType.FLOAT32, *HALVES, DType.INT64])
def test_a_tensor_and_its_view_are_the_same_memory(device, torch, dtype):
    tensor = torch.arange(12, device=device.name).to(getattr(torch, dtype.label)).reshape(3, 4)
    view = device.view(tensor, dtype)
    out = device.view(torch.empty_like(tensor), dtype)
    device.kernels.weighted_sum([view, view], [1.0, 1.0], dtype, view)
    device.copy(view, out, device)
    device.mark().wait()
    assert (tensor.cpu().double().reshape(-1) == 2 * torch.arange(12).double()).all()
    np.testing.assert_array_equal(down(device, out).view(np.uint8), down(device, view).view(np.uint8))


def test_work_follows_what_torch_does_on_a_side_stream(device, torch):
    side = torch.cuda.Stream(device.index)
    with torch.cuda.stream(side):
        for _ in range(3):
            source = torch.ones(1 << 20, device=device.name)
            torch.cuda._sleep(20_000_000)
            source.fill_(3.0)
            out = torch.zeros_like(source)
            device.kernels.weighted_sum([device.view(source, DType.FLOAT32)], [2.0], DType.FLOAT32,
                                        device.view(out, DType.FLOAT32))  # fmt: skip
            doubled = out * 2
            device.mark().wait()
            assert bool((doubled.cpu() == 12.0).all())


def test_a_mark_waits_for_its_own_thread_s_stream(device, torch):
    seen = []

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream(device.index)):
            array = up(device, np.full(10_000, number, np.float32))
            out = device.kernels.empty(10_000, SINGLE)
            device.kernels.weighted_sum([array] * 3, [1.0] * 3, DType.FLOAT32, out)
            seen.append(bool((down(device, out) == 3 * number).all()))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 4


def test_memory_comes_from_torch_once_it_uses_cuda(device, torch):
    before = torch.cuda.memory_allocated(device.index)
    array = device.kernels.empty(1 << 20, SINGLE)
    assert torch.cuda.memory_allocated(device.index) - before >= array.nbytes
    del array
    assert torch.cuda.memory_allocated(device.index) <= before


def test_tensors_that_do_not_fit_are_refused(device, torch):
    with pytest.raises(TypeError, match="float32"):
        device.view(torch.zeros(3, device=device.name), DType.FLOAT64)
    with pytest.raises(ValueError, match="contiguous"):
        device.view(torch.zeros(3, 4, device=device.name).t(), DType.FLOAT32)
    with pytest.raises(DeviceError, match="cpu"):
        device.view(torch.zeros(3), DType.FLOAT32)


def test_a_full_memory_is_told_and_survived(device):
    with pytest.raises(DeviceError, match="full"):
        device.kernels.empty(1 << 50, SINGLE)
    assert not down(device, device.kernels.zeros(5, SINGLE)).any()


def test_there_is_no_device_of_a_number_too_high():
    opened(0)
    with pytest.raises(DeviceError, match="no cuda:4711"):
        importlib.import_module("kvdist.kernels.cupy_device").open_device(4711)


def test_devices_copy_to_each_other():
    one, other = opened(0), opened(1)
    array, out = up(one, np.arange(1001, dtype=np.float32)), other.kernels.zeros(1001, SINGLE)
    other.copy(array, out, one)
    np.testing.assert_array_equal(down(other, out), np.arange(1001))
    assert one.reaches(other) == other.reaches(one)


@each("dtype", [DType.FLOAT32, DType.BFLOAT16])
@each("name", WITHOUT_A_KERNEL)
def test_rules_without_a_kernel_of_their_own_run_as_cupy_s_functions(name, dtype):
    device = opened(0)
    finals = []
    for kernels, lift in ((REFERENCE, np.copy), (device.kernels, lambda host: up(device, host))):
        with device.kernels.active():
            updater = Updater(create(name, multi_precision=True, clip_gradient=0.5), kernels)
            weight = lift(tame(5000, 1, dtype))
            for step in range(3):
                grad = lift(tame(5000, 2 + step, dtype))
                updater.update("w", weight, [grad], [0.5], dtype, weight, extent=Extent("w", (50, 100)))
        finals.append(weight if kernels is REFERENCE else down(device, weight))
    expected, actual = (REFERENCE.to_float32(each, dtype) if dtype in HALVES else each for each in finals)
    np.testing.assert_allclose(actual, expected, rtol=1e-2 if dtype in HALVES else 1e-5, atol=1e-6)


def test_every_half_is_cast_as_the_reference_does(device):
    for dtype in HALVES:
        halves = np.arange(65536, dtype=np.uint16).view(dtype.storage)
        wide = down(device, device.kernels.to_float32(up(device, halves), dtype))
        assert_same(wide, REFERENCE.to_float32(halves, dtype), DType.FLOAT32)
