"""`kvdist.kernels.cupy_device` over a stub of CuPy: the batteries, what a GPU is asked for, what becomes of errors."""

from __future__ import annotations

import gc
import sys
import threading
import types

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels import numba_cuda
from kvdist.kernels.interface import Equation
from kvdist.kernels.numba_cuda import Kernel
from kvdist.optimizer import Updater, create
from kvdist.optimizer.states import Part
from tests.cudasim import cupy_stub
from tests.kernels.device_battery import *  # noqa: F403
from tests.kernels.device_battery import SHORT, down, up
from tests.kernels.update_battery import *  # noqa: F403

SINGLE = np.dtype(np.float32)


@pytest.fixture
def stub():
    return cupy_stub.Stub()


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
    before = len(torch.memories)
    array = up(device, np.arange(5, dtype=np.float32))
    assert len(torch.memories) == before + 1
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


@pytest.fixture
def compiled(monkeypatch, gpu):
    """Names of the kernels that are compiled, and launched as on a GPU: they compute nothing here."""
    names = []

    def compile(kernel, capability):
        names.append(kernel.function.__name__)
        assert capability == (9, 0)
        return b"ptx", "entry"

    monkeypatch.setattr(gpu.cupy_runtime, "SIMULATED", False)
    monkeypatch.setattr(Kernel, "compile", compile)
    return names


def test_a_kernel_is_compiled_once(device, stub, compiled):
    array = device.kernels.zeros(5, SINGLE)
    for _ in range(3):
        device.kernels.weighted_sum([array], [1.0], DType.FLOAT32, array)
    assert compiled == ["_weighted_sum"] and stub.loaded == [b"ptx"] and len(stub.launched) == 3


def test_a_kernel_gets_addresses_numbers_of_its_types_and_tables(device, stub, compiled):
    one, other, out = (device.kernels.zeros(300, SINGLE) for _ in range(3))
    device.kernels.weighted_sum([one, other], [0.5, 1e300], DType.FLOAT32, out)
    ((name, grid, block, given),) = stub.launched
    assert (name, grid, block) == ("entry", (numba_cuda.BLOCKS_MAX,), (numba_cuda.THREADS,))
    out_place, _, *places = given[:4]
    assert [out_place, *places] == [np.uint64(array.ctypes.data) for array in (out, one, other)]
    assert [*given[4:]] == [0.5, np.inf, 1.0, 0, 300]
    kinds = [np.uint64] * 4 + [np.float32] * 3 + [np.int32, np.int64]
    assert [type(each) for each in given] == kinds
    bucket = device.kernels.zeros(2400, np.dtype(np.uint8))
    device.pack([one, other], [0, 1200], bucket)
    *tables, count, chunks, length = stub.launched[-1][-1]
    assert all(type(each) is np.uint64 for each in tables) and len(tables) == 4
    assert (count, length) == (2, numba_cuda.CHUNK_BYTES // 8) and chunks == 2 * -(-150 // length)


def test_a_device_that_is_not_there_is_refused_in_a_sentence(gpu, stub):
    with pytest.raises(DeviceError, match="there is no cuda:4: cuda:0 to cuda:3 are visible here"):
        gpu.open_device(4)
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


def test_a_compiler_that_fails_is_told_in_a_sentence(device, compiled, monkeypatch):
    array = device.kernels.zeros(5, SINGLE)
    monkeypatch.setattr(
        Kernel, "compile", lambda kernel, capability: (_ for _ in ()).throw(OSError("no libnvvm\nmore"))
    )
    with pytest.raises(
        DeviceError, match=r"numba cannot compile _weighted_sum for cuda:0 \(OSError: no libnvvm\); .*pip"
    ):
        device.kernels.weighted_sum([array], [1.0], DType.FLOAT32, array)


def test_a_driver_older_than_the_compiler_is_told_in_a_sentence(device, compiled, stub):
    for failure in (
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION: the provided PTX was compiled with an unsupported toolchain.",
        "CUDA_ERROR_INVALID_IMAGE: device kernel image is invalid",
    ):
        stub.failure = RuntimeError(failure)
        with pytest.raises(DeviceError, match="the driver of cuda:0 is older than the compiler of numba-cuda"):
            device._runtime.prepare(numba_cuda.weighted_sum(DType.FLOAT32, DType.FLOAT32, 2))


def test_cupy_s_own_functions_that_cannot_be_compiled_are_told_in_a_sentence(device, stub):
    stub.failure = cupy_stub.CompileException("cannot open source file cuda_fp16.h\nmore")
    with pytest.raises(DeviceError, match="CuPy cannot compile for cuda:0: cannot open source file cuda_fp16.h; .*ctk"):
        device.kernels.empty(10, SINGLE)


def test_a_rule_is_not_given_up_for_a_memory_that_is_full_once(device, stub, compiled):
    one = device.kernels.zeros(3, SINGLE)
    call = Equation(plain, (0.1,)), one, [one], [1.0], None, one, [], DType.FLOAT32
    stub.failure = RuntimeError("CUDA_ERROR_OUT_OF_MEMORY: out of memory")
    with pytest.raises(DeviceError, match="the memory of cuda:0 is full"):
        device.kernels.fused_update(*call)
    stub.failure = None
    assert device.kernels.fused_update(*call)


def plain(grad, weight, rate):
    return weight - grad * rate


def test_a_rule_that_cannot_be_compiled_is_evaluated_by_cupy_s_functions_and_logged_once(device, caplog):
    def closure(grad, weight, lr):
        return weight - grad * lr * one.size

    one = up(device, np.ones(3, np.float32))
    for _ in range(2):
        assert not device.kernels.fused_update(
            Equation(closure, (0.1,)), one, [one], [1.0], None, one, [], DType.FLOAT32
        )
    (record,) = caplog.records
    assert "CuPy evaluates" in record.getMessage() and "is a closure" in record.getMessage()


def test_arrays_of_numba_lie_where_cuda_says(gpu):
    value = types.SimpleNamespace(__cuda_array_interface__={"data": (4096, False)})
    assert gpu.cupy_runtime.index_of(value) == 3


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
    updater.split("both", [Part(0, 0, 4), Part(1, 4, 4)])
    assert updater.states[1].arrays[0].size == 4


# Products of expressions.


def test_only_products_of_an_expression_are_rewritten():
    calls = []

    def times(one, other):
        calls.append((one, other))
        return one * other

    rewritten = numba_cuda._with_rounded_products(with_products, times)
    assert rewritten(2.0, 3.0, 5.0) == with_products(2.0, 3.0, 5.0)
    assert calls == [(3.0, 5.0), (2.0, 3.0), (2.0, 5.0), (-5.0, 2.0)]


RULES_OF_A_TABLE = {"one": lambda grad, weight, rate: weight - grad * rate}


def test_an_expression_without_a_def_is_refused():
    with pytest.raises(TypeError, match="cannot be read|is not defined by `def`"):
        numba_cuda.update(RULES_OF_A_TABLE["one"], DType.FLOAT32, 0, 1, 1, False, False)


def with_products(grad, weight, rate):
    weight *= rate
    weight += grad * 3.0
    return weight / grad + (grad * rate - -rate * grad)


def test_a_lambda_is_refused_wherever_it_stands():
    for rule in (
        lambda grad, weight, rate: weight - grad,
        dict(rule=lambda grad, weight, rate: weight - rate * grad)["rule"],  # noqa: C408  # its line is no program
    ):
        with pytest.raises(TypeError, match="cannot be read|is not defined by `def`"):
            numba_cuda.update(rule, DType.FLOAT32, 0, 1, 1, False, False)


def test_an_expression_whose_file_has_changed_since_the_import_is_refused(tmp_path, monkeypatch):
    file = tmp_path / "changing_rules.py"
    text = "def rule(grad, weight, rate):\n    return weight - grad * rate\n"
    for other in ("def rule(grad, weight, rate):\n    return weight + grad * rate\n", "def other():\n    pass\n"):
        file.write_text(text)
        read = {}
        exec(compile(text, str(file), "exec"), read)
        assert numba_cuda.update(read["rule"], DType.FLOAT32, 0, 1, 1, False, False)
        exec(compile(text, str(file), "exec"), read)
        file.write_text(f"{other}\n")
        with pytest.raises(TypeError, match="the file of the expression rule has changed since it was imported"):
            numba_cuda.update(read["rule"], DType.FLOAT32, 0, 1, 1, False, False)


def test_what_cannot_be_assembled_here_is_left_to_the_driver():
    assert numba_cuda.assembled(b"no program", (9, 0)) == b"no program"


def test_an_expression_without_a_source_is_refused():
    written = {}
    exec("def rule(grad, weight, rate):\n    return weight - grad * rate", written)
    with pytest.raises(TypeError, match="the source of the expression rule cannot be read"):
        numba_cuda.update(written["rule"], DType.FLOAT32, 0, 1, 1, False, False)
