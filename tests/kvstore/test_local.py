"""The stores within a process: sums over devices, updaters, and what may never alias."""

from concurrent.futures import Future

import numpy as np
import pytest
import torch

from kvdist.dtypes import DType
from kvdist.errors import InitMismatch, KeyNotInitialised, OptimizerMismatch, StoreClosed
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.optimizer import create
from tests.cases import each

SHAPE = (4, 4)
LISTS = [[5, 7, 11], ["b", "c", "d"]]
DEVICES = 4


def numpy_full(number, shape=SHAPE):
    return np.full(shape, number, np.float32)


def torch_full(number, shape=SHAPE):
    return torch.full(shape, float(number))


@pytest.fixture(params=["local", "device"])
def store(request):
    with KVStore(LocalBackend(request.param)) as store:
        yield store


@pytest.fixture(params=[numpy_full, torch_full], ids=["numpy", "torch"])
def full(request):
    return request.param


def assert_all(arrays, number):
    for array in arrays if isinstance(arrays, list) else [arrays]:
        np.testing.assert_array_equal(np.asarray(array), np.full(SHAPE, number))


def test_a_store_within_a_process_is_one_worker_without_servers(store):
    assert (store.rank, store.num_workers, store.num_servers) == (0, 1, 0)
    assert store.type in ("local", "device")
    assert store.is_capable("optimizer") and store.is_capable("Optimizer")
    with pytest.raises(ValueError, match="unknown capability 'sparse'"):
        store.is_capable("sparse")
    store.barrier()


@pytest.mark.parametrize("key", [3, "a"])
def test_a_push_without_updater_replaces_the_value(store, full, key):
    store.init(key, full(0))
    store.push(key, full(1))
    assert_all(store.pull(key), 1)
    store.push(key, full(3))
    assert_all(store.pull(key), 3)


@pytest.mark.parametrize("keys", LISTS)
def test_a_list_of_keys_is_one_call(store, full, keys):
    store.init(keys, [full(0)] * 3)
    store.push(keys, [full(4)] * 3)
    outs = [full(-1) for _ in keys]
    assert store.pull(keys, out=outs) is None
    assert_all(outs, 4)
    assert isinstance(store.pull(keys[:1]), list)


def test_what_comes_back_is_of_the_kind_that_was_given_to_init(store):
    store.init(["n", "t"], [numpy_full(1), torch_full(1)])
    array, tensor = store.pull(["n", "t"])
    assert isinstance(array, np.ndarray) and isinstance(tensor, torch.Tensor)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8"])
def test_every_dtype_is_summed_over_devices(store, dtype):
    one = torch.ones(3, dtype=getattr(torch, dtype))
    store.init(1, one * 0)
    store.pushpull(1, [one, one * 2, one * 4], out=(out := one * 0))
    assert out.tolist() == [7, 7, 7] and out.dtype == one.dtype


def test_values_of_several_devices_are_summed_and_all_outputs_written(store, full):
    store.init(3, full(0))
    store.push(3, [full(1)] * DEVICES)
    outs = [full(0) for _ in range(DEVICES)]
    store.pull(3, out=outs)
    assert_all(outs, DEVICES)


def test_a_repeated_key_in_one_call_is_summed(store, full):
    store.init([5, 7], [full(0), full(0)])
    store.push([5, 7, 5], [full(1), full(2), full(4)])
    assert_all(store.pull(5), 5)
    assert_all(store.pull(7), 2)


@pytest.mark.parametrize("keys", LISTS)
def test_an_updater_gets_the_sum_and_the_stored_value_of_the_stored_kind(store, full, keys):
    seen = []

    def add(key, received, stored):
        seen.append((key, type(received), type(stored)))
        stored += received
        received += 100  # whatever it does to what it received, nobody else sees

    store.init(keys, [full(0)] * 3)
    store.set_updater(add)
    pushed = [[full(1)] * DEVICES for _ in keys]
    for _ in range(4):
        store.push(keys, pushed)
    assert_all(store.pull(keys), 16)
    assert_all(pushed[0], 1)
    assert seen[:3] == [(key, type(full(0)), type(full(0))) for key in keys]


def test_an_updater_must_be_callable(store):
    with pytest.raises(TypeError, match="an updater is a function"):
        store.set_updater("sgd")


def test_the_optimizer_runs_in_the_store_and_its_numbers_may_change_between_pushes(store, full):
    optimizer = create("sgd", learning_rate=1)
    store.init("w", full(10))
    store.set_optimizer(optimizer)
    store.push("w", [full(1), full(1)])
    assert_all(store.pull("w"), 8)
    optimizer.learning_rate, optimizer.rescale_grad, optimizer.lr_mult["w"] = 2, 0.5, 3
    store.push("w", full(1))
    assert_all(store.pull("w"), 5)


def test_a_second_optimizer_of_the_same_rule_keeps_the_state_and_another_rule_is_refused(store, full):
    store.init("w", full(0))
    store.set_optimizer("sgd", learning_rate=1, momentum=0.5)
    store.push("w", full(1))
    store.set_optimizer("sgd", learning_rate=2, momentum=0.5)
    store.push("w", full(1))
    assert_all(store.pull("w"), -1 - 0.5 - 2)
    with pytest.raises(OptimizerMismatch, match="cannot be changed to.*adam.*Create a second store"):
        store.set_optimizer("adam")


@pytest.mark.parametrize("with_optimizer", [False, True])
def test_no_gradient_changes_nothing(store, full, with_optimizer):
    store.init([1, 2], [full(5), full(5)])
    if with_optimizer:
        store.set_optimizer("test")
    out = full(0)
    store.push(1, None)
    store.pushpull([1, 2], [None, full(1)], out=[out, full(0)])
    assert_all(out, 5)
    assert_all(store.pull(2), 6 if with_optimizer else 1)


def test_average_divides_by_the_one_worker(store, full):
    store.init(1, full(0))
    store.push(1, [full(1), full(2)], average=True)
    assert_all(store.pull(1), 3)


def test_pushpull_without_out_writes_into_every_array_that_was_pushed(store, full):
    store.init([1, 2], [full(0)] * 2)
    value = [[full(1), full(2)], [full(4)]]
    store.pushpull([1, 2], value)
    assert_all(value[0], 3)
    assert_all(value[1], 4)


def test_pushpull_with_out_leaves_what_was_pushed(store, full):
    store.init(1, full(0))
    value, out = full(2), full(0)
    store.pushpull(1, value, out=out)
    assert_all([value, out], 2)


def test_nothing_that_was_handed_in_or_out_is_shared_with_the_store(store, full):
    first = full(1)
    store.init(1, first)
    first += 10
    assert_all(store.pull(1), 1)
    pushed = full(2)
    store.push(1, pushed)
    pushed += 10
    pulled = store.pull(1)
    assert_all(pulled, 2)
    pulled += 10
    kept = store.pull(1)
    store.push(1, full(3))
    assert_all(kept, 2)
    assert_all(store.pull(1), 3)


def test_a_repeated_init_changes_nothing(store, full):
    store.init(1, full(1))
    store.init(1, full(2))
    assert_all(store.pull(1), 1)


@pytest.mark.parametrize("other", [np.zeros((4, 5), np.float32), np.zeros((4, 4))])
def test_a_repeated_init_of_another_shape_or_dtype_is_refused(store, other):
    store.init(["w"], [numpy_full(1)])
    with pytest.raises(InitMismatch, match=r"'w' was initialised with shape \(4, 4\) and dtype float32, and now with"):
        store.init(["new", "w"], [numpy_full(1), other])
    with pytest.raises(KeyNotInitialised):
        store.pull("new")


def test_broadcast_gives_the_value_to_all_outputs_and_again_to_a_key_that_has_one(store, full):
    outs = [[full(0), full(0)], [full(0)]]
    store.broadcast([1, 2], [full(7), full(7)], out=outs)
    assert_all(outs[0] + outs[1], 7)
    store.broadcast(1, full(8), out=outs[0])
    assert_all(outs[0], 8)
    assert_all(store.pull(1), 8)


def test_futures_are_resolved_with_the_result(store, full):
    store.init(1, full(1))
    assert store.push_async(1, full(2)).result(timeout=0) is None
    assert_all(store.pull_async(1).result(timeout=0), 2)
    future = store.pushpull_async(1, value := [full(1), full(2)])
    assert isinstance(future, Future) and future.done()
    assert_all(value, 3)


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "push_async", "pull_async", "pushpull_async"])
def test_an_unknown_key_is_named_with_those_there_are(store, call):
    with pytest.raises(KeyNotInitialised, match="key 'w' has not been initialised, and neither has any other"):
        getattr(store, call)("w", numpy_full(1))
    store.init(list(range(7)), [numpy_full(1)] * 7)
    message = r"key 'w' has not been initialised; call init first. The store has the keys 0, 1, 2, 3, 4, … \(7 in all\)"
    with pytest.raises(KeyNotInitialised, match=message):
        getattr(store, call)("w", numpy_full(1))


@pytest.mark.parametrize("call", ["push", "pull", "pushpull", "broadcast"])
@pytest.mark.parametrize(
    ("value", "error", "message"),
    [
        (np.zeros((4, 5), np.float32), ValueError, r"key 2 has shape \(4, 4\), but the value has shape \(4, 5\)"),
        (np.zeros(SHAPE, bool), TypeError, "key 2: arrays of dtype bool are not supported"),
        ("text", TypeError, "key 2: a value must be a NumPy array or a torch tensor, not str"),
    ],
)
def test_a_wrong_value_is_refused_before_anything_is_changed(store, call, value, error, message):
    store.init([1, 2], [numpy_full(0)] * 2)
    arguments = [[numpy_full(1), value]] if call != "broadcast" else [[numpy_full(1)] * 2, [numpy_full(1), value]]
    with pytest.raises(error, match=message):
        getattr(store, call)([1, 2], *arguments)
    assert_all(store.pull(1), 0)


def test_init_needs_a_value_for_every_key(store):
    with pytest.raises(ValueError, match="key 2 has no value"):
        store.init([1, 2], [numpy_full(1), None])
    with pytest.raises(ValueError, match=r"key 1 has shape \(4, 4\), but the value has shape \(1,\)"):
        store.init(1, [numpy_full(1), np.zeros(1, np.float32)])
    with pytest.raises(TypeError, match="key 1: a value must be"):
        store.init(1, 3.5)


def test_a_result_cannot_go_into_a_read_only_array_and_then_nothing_is_pushed(store):
    store.init(1, numpy_full(0))
    frozen = numpy_full(1)
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="key 1: .*read-only"):
        store.pushpull(1, frozen)
    assert_all(store.pull(1), 0)
    store.push(1, frozen)
    assert_all(store.pull(1), 1)


def test_empty_makes_an_array_of_the_shape_and_dtype(store):
    assert store.empty((2, 3)).shape == (2, 3) and store.empty(4).dtype == np.float32
    assert store.empty((), torch.int64).dtype == np.int64
    assert store.empty(np.int64(5)).shape == (5,)
    with pytest.raises(TypeError, match="NumPy has no bfloat16"):
        store.empty(2, "bfloat16")


def test_a_closed_store_cannot_be_used():
    store = KVStore(LocalBackend("local"))
    with store:
        store.init(1, numpy_full(1))
    store.close()
    calls = [store.init, store.push, store.pushpull, lambda key, value: store.broadcast(key, value, value), store.pull]
    for call in [*calls, lambda key, value: store.pull(key), lambda key, value: store.barrier()]:
        with pytest.raises(StoreClosed, match="this 'local' store has been closed"):
            call(1, numpy_full(1))


@pytest.mark.parametrize("grouped", [False, True])
def test_ten_rounds_of_random_gradients_on_four_devices_match_the_sum(store, grouped):
    shapes = {3: (4, 4), 5: (100, 100), 7: (301, 301)}
    random = np.random.default_rng(7)
    weights = {key: random.uniform(-1, 1, shape).astype(np.float32) for key, shape in shapes.items()}
    expected = {key: weight.astype(np.float64) for key, weight in weights.items()}
    store.set_optimizer("test", rescale_grad=0.1)
    store.init(list(weights), list(weights.values()))
    for _ in range(10):
        grads = {key: list(random.uniform(-1, 1, (4, *shape)).astype(np.float32)) for key, shape in shapes.items()}
        for keys in [list(shapes)] if grouped else [[key] for key in shapes]:
            store.push(keys, [grads[key] for key in keys])
        for key in shapes:
            expected[key] += 0.1 * np.sum(grads[key], axis=0, dtype=np.float64)
            outs = [np.empty(shapes[key], np.float32) for _ in range(4)]
            store.pull(key, out=outs)
            for out in outs:
                assert np.abs(out - expected[key]).sum() / np.abs(expected[key]).sum() < 1e-6


@each("dtype", DType)
def test_values_of_several_devices_are_summed_in_every_type(dtype):
    store = KVStore(LocalBackend("device"))
    tensors = [torch.full((5,), number).to(getattr(torch, dtype.label)) for number in (1, 2, 4)]
    store.init("w", torch.zeros(5).to(tensors[0].dtype))
    store.push("w", tensors)
    assert store.pull("w").tolist() == [7] * 5
    assert [tensor[0].item() for tensor in tensors] == [1, 2, 4]


def test_halves_of_several_devices_are_summed_in_float32():
    # 2048 + 1 + 1 is 2050; in float16, step by step, it would stay 2048.
    store = KVStore(LocalBackend("device"))
    store.init("w", np.zeros(1, np.float16))
    store.push("w", [np.array([number], np.float16) for number in (2048, 1, 1)])
    assert store.pull("w")[0] == 2050
