"""The store ``device`` with values on GPUs, which are NumPy's here: where keys rest, what crosses, and that the numbers
are those of the host."""

from __future__ import annotations

import itertools
import sys
from typing import Any

import numpy as np
import pytest

from kvdist.errors import DeviceError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.kvstore.placement import Devices
from kvdist.optimizer import create
from tests.cases import each
from tests.devices import DeviceArray, NumpyDevice

SIZE = 37


class Machine:
    """A store and its GPUs."""

    def __init__(self, count: int = 2, **options: Any) -> None:
        self.gpus = [NumpyDevice(index, **options) for index in range(count)]
        self.store = KVStore(LocalBackend("device", devices=Devices("auto", True, self.gpus.__getitem__)))

    def on(self, index: int, values: Any) -> DeviceArray:
        return self.gpus[index].array(np.asarray(values))


@pytest.fixture
def machine() -> Machine:
    return Machine()


def floats(seed: int, size: int = SIZE) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def test_values_of_two_gpus_are_summed_on_one_and_come_back_to_both(machine):
    machine.store.init("w", machine.on(0, floats(0)))
    grads = [floats(1), floats(2)]
    outs = [machine.on(index, np.zeros(SIZE, np.float32)) for index in (0, 1)]
    machine.store.pushpull("w", [machine.on(0, grads[0]), machine.on(1, grads[1])], out=outs)
    for out in outs:
        assert np.array_equal(out.memory, grads[0] + grads[1])
    assert [gpu.downloaded_bytes + gpu.uploaded_bytes for gpu in machine.gpus] == [0, 0]


def test_nothing_crosses_to_the_host_in_a_step_with_an_optimizer(machine):
    machine.store.init("w", machine.on(0, floats(0)))
    machine.store.set_optimizer("adam", learning_rate=0.1)
    host = KVStore(LocalBackend("device"))
    host.init("w", floats(0))
    host.set_optimizer("adam", learning_rate=0.1)
    for step in range(4):
        grads = [floats(2 * step + 1), floats(2 * step + 2)]
        machine.store.push("w", [machine.on(index, grad) for index, grad in enumerate(grads)])
        host.push("w", grads)
    assert [gpu.downloaded_bytes + gpu.uploaded_bytes for gpu in machine.gpus] == [0, 0]
    assert np.array_equal(machine.store.pull("w").memory, host.pull("w"))


def test_keys_are_spread_over_the_gpus_by_their_bytes(machine):
    sizes = {"a": 100, "b": 60, "c": 30, "d": 20}
    for key, size in sizes.items():
        machine.store.init(key, machine.on(0, np.zeros(size, np.float32)))
    for key, size in sizes.items():
        machine.store.push(key, [machine.on(index, np.ones(size, np.float32)) for index in (0, 1)])
    homes = {key: machine.store.pull(key).device.index for key in sizes}
    assert homes == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert all((machine.store.pull(key).memory == 2).all() for key in sizes)


def test_a_key_whose_values_come_from_one_gpu_rests_there(machine):
    machine.store.init("w", machine.on(0, floats(0)))
    machine.store.push("w", machine.on(1, floats(1)))
    assert machine.store.pull("w").device.index == 1


def test_a_key_that_began_on_the_host_moves_to_the_gpu_that_contributes_and_comes_back_as_an_array(machine):
    machine.store.init("w", floats(0))
    machine.store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
    machine.store.push("w", machine.on(1, floats(1)))
    found = machine.store.pull("w")
    assert isinstance(found, np.ndarray) and np.array_equal(found, floats(0) - floats(1))


def test_what_comes_from_the_host_later_is_brought_to_the_key(machine):
    machine.store.init("w", machine.on(0, floats(0)))
    machine.store.push("w", machine.on(0, floats(1)))
    machine.store.push("w", floats(2))
    out = np.empty(SIZE, np.float32)
    machine.store.pull("w", out=out)
    assert np.array_equal(out, floats(2))
    machine.store.broadcast("w", floats(3), out=out)
    assert np.array_equal(out, floats(3)) and np.array_equal(machine.store.pull("w").memory, floats(3))


def test_values_on_the_host_and_on_a_gpu_for_one_key_are_refused_and_nothing_has_changed(machine):
    machine.store.init(["v", "w"], [machine.on(0, floats(0)), machine.on(0, floats(1))])
    with pytest.raises(DeviceError, match=r"the values of key 'w' are on cuda:0, cpu, .*: move them"):
        machine.store.push(["v", "w"], [machine.on(0, floats(2)), [machine.on(0, floats(3)), floats(4)]])
    assert np.array_equal(machine.store.pull("v").memory, floats(0))


def test_halves_are_not_rounded_on_the_way():
    machine = Machine(3)
    machine.gpus[0].unreachable = frozenset({1, 2})
    values = np.array([1.0, 2**-11, 2**-11], np.float16)  # one by one the small ones vanish beside 1, together not
    machine.store.init("w", machine.on(0, np.zeros(1, np.float16)))
    machine.store.push("w", [machine.on(index, values[index : index + 1]) for index in range(3)])
    assert machine.store.pull("w").memory[0] == np.float16(1 + 2**-10)


@each("kind", ["2bit", "1bit", "fp16", "int8", "int4", "topk"])
def test_compressed_contributions_are_those_of_the_host(kind):
    machine, host = Machine(), KVStore(LocalBackend("device"))
    params = {"type": kind, **({"threshold": 0.5} if "bit" in kind else {})}
    for store in (machine.store, host):
        store.set_gradient_compression(params)
    machine.store.init("w", machine.on(0, floats(0)))
    host.init("w", floats(0))
    for step in range(5):
        grads = [floats(2 * step + 1), floats(2 * step + 2)]
        machine.store.push("w", [machine.on(index, grad) for index, grad in enumerate(grads)])
        host.push("w", grads)
        assert np.array_equal(machine.store.pull("w").memory, host.pull("w"))


@each("kind", ["2bit", "1bit", "fp16"])
def test_codes_of_gpus_that_do_not_reach_the_home_cross_one_by_one(kind):
    machine, host = Machine(4), KVStore(LocalBackend("device"))
    machine.gpus[0].unreachable = machine.gpus[1].unreachable = frozenset({2, 3})
    machine.gpus[2].unreachable = machine.gpus[3].unreachable = frozenset({0, 1})
    for store, first in ((machine.store, machine.on(0, floats(0))), (host, floats(0))):
        store.set_gradient_compression({"type": kind})
        store.init("w", first)
    for step in range(3):
        grads = [floats(4 * step + index + 1) for index in range(4)]
        machine.store.push("w", [machine.on(index, grad) for index, grad in enumerate(grads)])
        host.push("w", grads)
        assert np.array_equal(machine.store.pull("w").memory, host.pull("w"))
    assert {source for source, _ in machine.gpus[0].copied} >= {2, 3}, "the far ones reached the home"


def test_codes_cross_between_gpus_in_place_of_numbers():
    machine = Machine()
    machine.store.set_gradient_compression({"type": "2bit"})
    machine.store.init("w", machine.on(0, np.zeros(1600, np.float32)))
    machine.store.push("w", [machine.on(index, floats(index, 1600)) for index in (0, 1)])
    assert (1, 400) in machine.gpus[0].copied and (1, 6400) not in machine.gpus[0].copied


@each("before, after", [*itertools.product(["host", "gpu"], repeat=2)])
def test_a_checkpoint_goes_on_wherever_the_keys_rest(tmp_path, before, after):
    def made(place: str) -> Any:
        machine = Machine()
        put = (lambda values: machine.on(0, values)) if place == "gpu" else (lambda values: values)
        machine.store.init("w", put(floats(0)))
        machine.store.set_optimizer("adam", learning_rate=0.1)
        return machine.store, put

    straight, put = made("host")
    for step in range(4):
        straight.push("w", put(floats(step + 1)))
    store, put = made(before)
    for step in range(2):
        store.push("w", put(floats(step + 1)))
    store.save_checkpoint(tmp_path, 2).result()
    store, put = made(after)
    store.load_checkpoint(tmp_path)
    for step in range(2, 4):
        store.push("w", put(floats(step + 1)))
    found = store.pull("w")
    assert np.array_equal(found if after == "host" else found.memory, straight.pull("w"))


def test_states_that_were_loaded_before_the_first_contribution_move_with_the_key(tmp_path):
    here, machine = KVStore(LocalBackend("device")), Machine()
    for store, first in ((here, floats(0)), (machine.store, floats(0))):
        store.init("w", first)
        store.set_optimizer("adam", learning_rate=0.1)
    here.push("w", floats(1))
    here.save_checkpoint(tmp_path, 1).result()
    machine.store.load_checkpoint(tmp_path)
    here.push("w", floats(2))
    machine.store.push("w", machine.on(1, floats(2)))
    assert np.array_equal(machine.store.pull("w"), here.pull("w"))


def test_a_function_of_the_user_gets_arrays_of_the_gpu(machine):
    machine.store.init("w", machine.on(0, floats(0)))

    def halve(key: Any, received: Any, stored: Any) -> None:
        assert key == "w" and isinstance(received, DeviceArray) and isinstance(stored, DeviceArray)
        np.multiply(received, np.float32(0.5), out=stored)

    machine.store.set_updater(halve)
    machine.store.push("w", [machine.on(0, floats(1)), machine.on(1, floats(2))])
    assert np.array_equal(machine.store.pull("w").memory, (floats(1) + floats(2)) * np.float32(0.5))


@each("begin_on_gpu", [True, False])
def test_an_optimizer_that_the_gpu_cannot_run_is_refused_and_the_value_stays(begin_on_gpu):
    machine = Machine()
    machine.store.init("w", machine.on(0, floats(0)) if begin_on_gpu else floats(0))
    with pytest.raises(DeviceError, match="sgld cannot run on cuda:0"):
        machine.store.set_optimizer(create("sgld"))
        machine.store.push("w", machine.on(0, floats(1)))
    found = machine.store.pull("w")
    assert np.array_equal(found.memory if begin_on_gpu else found, floats(0))


def test_a_gpu_without_memory_left_says_so():
    machine = Machine(1, memory_bytes_max=2 * 4 * SIZE)
    machine.store.init("w", machine.on(0, floats(0)))
    machine.store.set_optimizer("adam")
    with pytest.raises(DeviceError, match="cuda:0 has no memory left for"):
        machine.store.push("w", machine.on(0, floats(1)))


def test_without_a_library_a_value_on_a_gpu_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    store = KVStore(LocalBackend("device", devices=Devices("auto", insists=True)))
    refusal = "cuda:3 needs CuPy and numba-cuda, .*cupy.*pip install cupy-cuda12x 'numba-cuda.*KVDIST_GPU=host"
    with pytest.raises(DeviceError, match=refusal):
        store.init("w", NumpyDevice(3).array(floats(0)))


def test_where_the_user_allows_it_values_of_gpus_are_summed_on_the_host_and_that_is_said_once(caplog):
    store = KVStore(LocalBackend("device", devices=Devices("host", insists=True)))
    gpus = [NumpyDevice(0), NumpyDevice(1)]
    store.init("w", gpus[0].array(floats(0)))
    out = gpus[1].array(np.zeros(SIZE, np.float32))
    store.pushpull("w", [gpus[0].array(floats(1)), gpus[1].array(floats(2))], out=out)
    assert np.array_equal(out.memory, floats(1) + floats(2))
    assert caplog.text.count("are brought to the host and summed there: KVDIST_GPU is host") == 1


def test_an_array_out_of_order_is_refused(machine):
    machine.store.init("w", machine.on(0, np.zeros((4, 5), np.float32)))
    turned = DeviceArray(np.zeros((5, 4), np.float32).T, machine.gpus[0])
    with pytest.raises(TypeError, match="contiguous"):
        machine.store.push("w", turned)
