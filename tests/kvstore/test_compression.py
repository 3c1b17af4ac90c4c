"""Stores of one process under compression, and an embedded cluster: what arrives, what is kept, what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist import kv
from kvdist.errors import StoreClosed
from kvdist.kvstore.rowsparse import RowSparse
from tests.cases import each

SHAPES = {3: (4, 4), 5: (100, 100), 7: (33,)}
RATE = 2
DEVICES = 4


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """So much is encoded here that kernels would be compiled beside it, on a thread that outlives its test."""
    monkeypatch.setenv("KVDIST_KERNELS", "numpy")


def simulated(kind, gradient, residual, threshold):
    """What the store receives of a device's gradient; the residual is updated."""
    limit = np.float32(threshold)
    residual += gradient
    if kind == "2bit":
        worth = np.where(residual >= limit, limit, np.where(residual <= -limit, -limit, np.float32(0)))
    else:
        worth = np.where(residual > limit, np.float32(1), np.float32(-1))
    residual -= worth
    return worth


@pytest.fixture(params=["device", "local_allreduce_device"])
def device(request):
    with kv.create(request.param) as store:
        yield store


def opened(store, kind, threshold):
    """The store, compressing, with keys of ones; pulled before anything is pushed."""
    store.set_gradient_compression({"type": kind, "threshold": threshold})
    store.set_optimizer("test", rescale_grad=RATE)
    store.init(list(SHAPES), [np.ones(shape, np.float32) for shape in SHAPES.values()])
    assert all((store.pull(key) == 1).all() for key in SHAPES), "the first value is not compressed"
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES.values()]
    store.broadcast(list(SHAPES), zeros, out=[zero.copy() for zero in zeros])
    return store


def pushed(store, number):
    """The value of every key after each device has pushed this number everywhere: one for all."""
    arrays = [[np.full(shape, number, np.float32) for _ in range(DEVICES)] for shape in SHAPES.values()]
    store.push(list(SHAPES), arrays)
    (value,) = {float(one) for key in SHAPES for one in store.pull(key).flat}
    return value


@pytest.mark.parametrize("threshold", [-0.5, 0, 0.5])
def test_one_bit_has_the_known_numbers_of_the_mirrored_system(device, threshold):
    store = opened(device, "1bit", threshold)
    assert [pushed(store, 1) for _ in range(10)] == [8 * (i + 1) for i in range(10)]
    assert [pushed(store, -1) for _ in range(10)] == [8 * (9 - i) for i in range(10)]


@pytest.mark.parametrize("threshold", [-0.5, 0, 0.5])
def test_one_bit_keeps_what_it_has_not_sent(device, threshold):
    store = opened(device, "1bit", threshold)
    assert [pushed(store, number) for number in (2, 0, -2)] == [8, 16, 8]


def test_two_bits_have_the_known_numbers_of_the_mirrored_system(device):
    store = opened(device, "2bit", 0.5)
    assert [pushed(store, number) for number in (0, 0.4, 0.2, 0.2, 0.2)] == [0, 0, 4, 4, 8]
    # The residual is 0 but for rounding: .4 + .2 - .5 + .2 + .2 - .5.
    store.broadcast(list(SHAPES), [np.full(s, 8, np.float32) for s in SHAPES.values()], out=[
        np.empty(s, np.float32) for s in SHAPES.values()])  # fmt: skip
    assert [pushed(store, -0.5) for _ in range(10)] == [8 - 4 * (i + 1) for i in range(10)]


@pytest.mark.parametrize(("kind", "threshold"), [("2bit", 0.5), ("2bit", 0.1), ("1bit", 0.0), ("1bit", -0.5)])
def test_random_gradients_arrive_as_a_simulation_says(device, kind, threshold):
    store = opened(device, kind, threshold)
    rng = np.random.default_rng(11)
    residuals = {key: [np.zeros(shape, np.float32) for _ in range(DEVICES)] for key, shape in SHAPES.items()}
    expected = {key: np.zeros(shape, np.float32) for key, shape in SHAPES.items()}
    for _ in range(5):
        for key, shape in SHAPES.items():
            grads = [rng.uniform(-0.6, 0.6, shape).astype(np.float32) for _ in range(DEVICES)]
            total = np.zeros(shape, np.float32)
            for grad, residual in zip(grads, residuals[key], strict=True):
                total += simulated(kind, grad, residual, threshold)
            expected[key] += RATE * total
            store.push(key, grads)
            np.testing.assert_allclose(store.pull(key), expected[key], rtol=1e-6)


def test_a_single_device_is_compressed_too_and_nothing_given_is_written(device):
    device.set_gradient_compression({"type": "2bit"})
    device.init("w", np.zeros(5, np.float32))
    gradient = np.array([0.4, 0.5, -7, 0, 0.6], np.float32)
    before = gradient.copy()
    device.push("w", gradient)
    assert device.pull("w").tolist() == [0, 0.5, -0.5, 0, 0.5]
    np.testing.assert_array_equal(gradient, before)
    device.pushpull("w", gradient)
    assert gradient.tolist() == [0.5, 0.5, -0.5, 0, 0.5]


@pytest.fixture(params=["device", "dist", "dist_async"])
def store(request):
    with kv.create(request.param) as made:
        if request.param == "dist_async":
            made.set_optimizer("test")  # w += g
        yield made


def test_calls_of_all_kinds_share_one_residual(store):
    store.set_gradient_compression({"type": "2bit"})
    store.set_optimizer("test")
    store.init(["a", "b"], [np.zeros(3, np.float32), np.zeros((40, 1000), np.float32)])
    part = [np.full(3, 0.25, np.float32), np.full((40, 1000), 0.25, np.float32)]
    seen = []

    def look():
        seen.append([float(one.flat[-1]) for one in store.pull(["a", "b"])])

    store.push("a", part[0])  # a small key alone
    store.push("b", part[1])
    look()
    store.push(["a", "b"], part)
    look()
    store.push_async("a", part[0]).result()
    store.push_async(["b"], [part[1]]).result()
    look()
    outs = [np.empty_like(one) for one in part]
    store.pushpull(["a", "b"], part, out=outs)
    assert [float(one.flat[0]) for one in outs] == [1, 1]
    store.pushpull_async(["a", "b"], part, out=outs).result()
    store.push(["a", "b"], [None, part[1]])  # an empty contribution leaves the residual alone
    look()
    store.push("a", part[0])
    look()
    assert seen == [[0, 0], [0.5, 0.5], [0.5, 0.5], [1, 1.5], [1.5, 1.5]]


def test_a_refused_push_leaves_the_residual_alone(store):
    store.set_gradient_compression({"type": "2bit"})
    store.set_optimizer("test")
    store.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
    quarter = np.full(3, 0.25, np.float32)
    store.push(["a", "b"], [quarter, quarter])
    for wrong, error in ((np.zeros(4, np.float32), ValueError), (np.zeros(3, bool), TypeError), (7, TypeError)):
        for call in (store.push, store.push_async, store.pushpull):
            with pytest.raises(error, match="key 'b'"):
                call(["a", "b"], [quarter, wrong])
    store.push(["a", "b"], [quarter, quarter])
    assert [store.pull(key).tolist() for key in "ab"] == [[0.5] * 3] * 2


def test_values_that_are_replaced_begin_with_an_empty_residual(store, tmp_path):
    store.set_gradient_compression({"type": "2bit"})
    store.set_optimizer("test")
    store.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
    rest = np.full(3, 0.25, np.float32)
    store.push(["a", "b"], [rest, rest])
    store.broadcast("a", np.ones(3, np.float32), out=np.empty(3, np.float32))
    store.push(["a", "b"], [rest, rest])
    assert [store.pull(key).tolist() for key in "ab"] == [[1] * 3, [0.5] * 3]
    store.save_checkpoint(tmp_path, 1).result()
    store.push(["a", "b"], [np.full(3, 0.375, np.float32)] * 2)  # residuals .125 and .375
    store.load_checkpoint(tmp_path)
    store.push(["a", "b"], [rest, rest])
    assert [store.pull(key).tolist() for key in "ab"] == [[1] * 3, [0.5] * 3]


def test_states_that_are_loaded_leave_values_and_residuals_alone(store, tmp_path):
    store.set_gradient_compression({"type": "2bit"})
    store.set_optimizer("test")
    store.init("a", np.zeros(3, np.float32))
    store.push("a", np.full(3, 0.25, np.float32))
    store.save_optimizer_states(tmp_path / "states")
    store.load_optimizer_states(tmp_path / "states")
    store.push("a", np.full(3, 0.25, np.float32))
    assert store.pull("a").tolist() == [0.5] * 3


@each("name", ["local", "local_update_cpu", "local_allreduce_cpu", "nccl"])
def test_stores_that_do_not_compress_say_which_do(name):
    with kv.create(name) as local, pytest.raises(ValueError, match="needs 'dist' or 'device'"):
        local.set_gradient_compression({"type": "2bit"})


def test_compression_comes_before_the_first_key_and_is_set_once(store):
    store.set_gradient_compression({"type": "2bit"})
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    with pytest.raises(ValueError, match="cannot change to 1bit with the threshold 0.5"):
        store.set_gradient_compression({"type": "1bit"})
    with pytest.raises(ValueError, match="known are '2bit'"):
        store.set_gradient_compression({"type": "4bit"})
    with pytest.raises(TypeError, match="dict"):
        store.set_gradient_compression("2bit")


def test_compression_that_comes_too_late_names_the_keys(store):
    store.init(["a", "b"], [np.zeros(3, np.float32)] * 2)
    with pytest.raises(ValueError, match="before the first init, but 'a', 'b' have been initialised"):
        store.set_gradient_compression({"type": "2bit"})
    store.init([f"k{i}" for i in range(9)], [np.zeros(3, np.float32)] * 9)
    with pytest.raises(ValueError, match="'k2', … have been"):
        store.set_gradient_compression({"type": "2bit"})


def test_keys_of_other_types_are_refused_by_name_unless_they_are_left_out(store):
    store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(TypeError, match="key 'n' is int64, and this store compresses"):
        store.init(["w", "n"], [np.zeros(3, np.float32), np.zeros(3, np.int64)])
    store.leave_uncompressed(["n", "exact"])
    store.set_optimizer("test")
    store.init(["w", "n", "exact"], [np.zeros(3, np.float32), np.zeros(3), np.zeros(3, np.float32)])
    store.push(["w", "n", "exact"], [np.full(3, 0.75, kind) for kind in (np.float32, np.float64, np.float32)])
    store.push("exact", np.full(3, 0.125, np.float32))
    assert [store.pull(key).tolist() for key in ("w", "n", "exact")] == [[0.5] * 3, [0.75] * 3, [0.875] * 3]
    with pytest.raises(ValueError, match="key 'w' is initialised and compressed"):
        store.leave_uncompressed(["w"])
    store.leave_uncompressed(["n"])


def test_a_closed_store_compresses_nothing(store):
    store.close()
    with pytest.raises(StoreClosed):
        store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(StoreClosed):
        store.leave_uncompressed(["a"])


def test_values_come_back_as_halves_where_that_is_asked_for():
    third = np.float32(1) / 3
    for name, label in (("fp16", np.float16(third)), ("bf16", 0.333984375)):
        with kv.create("dist") as store:
            store.leave_uncompressed(["whole"])
            store.set_gradient_compression({"type": "topk", "ratio": 1, "pull": name})
            keys, sizes = ["w", "large", "whole", *"defg"], [5, 1 << 18, 5, 1, 3, 0, 7]
            store.init(keys, [np.full(size, third, np.float32) for size in sizes])
            expected = [third if key == "whole" else np.float32(label) for key in keys]
            for _ in range(3):
                for value, number, size in zip(store.pull(keys), expected, sizes, strict=True):
                    assert value.dtype == np.float32 and (value == number).all() and value.size == size
                store.pushpull(keys, [np.full(size, third, np.float32) for size in sizes], out=store.pull(keys))
            out = np.empty(1 << 18, np.float32)
            store.pull_async("large", out=out).result()
            assert (out == np.float32(label)).all()
            (shown,) = store.pushpull_shared(["large"], [np.full(1 << 18, third, np.float32)], [out])
            assert shown is None and (out == np.float32(label)).all()


def test_a_store_whose_values_do_not_travel_has_nothing_to_pull_as_halves():
    with kv.create("device") as store, pytest.raises(ValueError, match="'pull' is for stores whose values travel"):
        store.set_gradient_compression({"type": "2bit", "pull": "fp16"})


@each("name", ["device", "dist"])
def test_tables_of_rows_travel_as_they_are(name):
    with kv.create(name) as store:
        store.set_gradient_compression({"type": "2bit"})
        store.set_optimizer("test")
        store.init(["t", "h"], [RowSparse([0], np.zeros((1, 2), dtype), (4, 2)) for dtype in (np.float32, np.float16)])
        store.push("t", RowSparse([3, 1], np.full((2, 2), 0.25, np.float32), (4, 2)))
        rows = store.row_sparse_pull("t", row_ids=np.array([1, 2, 3]))
        assert np.asarray(rows.values).tolist() == [[0.25] * 2, [0.0] * 2, [0.25] * 2]
