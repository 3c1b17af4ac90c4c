"""A cluster of one inside the process: the whole store without a launcher, in a notebook or a debugger."""

from __future__ import annotations

import logging
import threading

import numpy as np
import pytest
import torch

from kvdist import (
    ForkError,
    InitMismatch,
    KeyNotInitialised,
    OptimizerMismatch,
    PushRefused,
    RowSparse,
    StoreClosed,
    Trainer,
    kv,
    optimizer,
)
from tests.cases import each


@pytest.fixture
def store():
    with kv.create("dist") as store:
        yield store


def ones(*shape, dtype=np.float32):
    return np.ones(shape, dtype)


def test_one_warning_names_the_launcher_however_many_stores_there_are(caplog):
    with caplog.at_level(logging.WARNING, "kvdist"), kv.create("dist"), kv.create("dist_async"):
        pass
    (record,) = caplog.records
    assert "running alone" in record.message and "kvdist-launch -n WORKERS -s SERVERS COMMAND" in record.message


def test_it_is_one_worker_and_one_server(store):
    assert (store.rank, store.num_workers, store.num_servers, store.type) == (0, 1, 1, "dist")
    assert store.is_capable("optimizer")
    with pytest.raises(ValueError, match="unknown capability"):
        store.is_capable("flight")
    store.barrier()
    store.barrier(timeout=60)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 5), (1_000_003,)])
def test_a_push_replaces_the_value_and_an_optimizer_updates_it(store, shape):
    store.init("w", ones(*shape))
    np.testing.assert_array_equal(store.pull("w"), ones(*shape))
    store.push("w", np.full(shape, 2, np.float32))
    np.testing.assert_array_equal(store.pull("w"), 2 * ones(*shape))
    store.set_optimizer("sgd", learning_rate=0.5)
    store.push("w", ones(*shape))
    np.testing.assert_array_equal(store.pull("w"), 1.5 * ones(*shape))


def test_pushpull_in_place_with_out_and_with_devices(store):
    store.init([1, 2], [ones(3), ones(2, 2)])
    values = [[ones(3), 2 * ones(3)], [ones(2, 2)]]
    store.pushpull([1, 2], values)
    assert [array.tolist() for array in values[0]] == [[3.0] * 3] * 2 and values[1][0].tolist() == [[1.0] * 2] * 2
    given, out = ones(3), torch.zeros(3)
    store.pushpull(1, given, out=out, average=True)
    assert out.tolist() == [1.0] * 3 and given.tolist() == [1.0] * 3


def test_asynchronous_calls_give_futures(store):
    store.init("w", ones(3))
    assert store.push_async("w", 3 * ones(3)).result(timeout=60) is None
    assert store.pull_async("w").result(timeout=60).tolist() == [3.0] * 3
    out = ones(3)
    assert store.pushpull_async("w", 4 * ones(3), out=out).result(timeout=60) is None
    assert out.tolist() == [4.0] * 3


def test_broadcast_initialises_and_later_replaces(store):
    out = torch.zeros(3)
    store.broadcast("w", torch.ones(3), out)
    assert out.tolist() == [1.0] * 3
    store.set_optimizer("test")
    store.push("w", torch.ones(3))
    store.broadcast("w", torch.full((3,), 9.0), [out, other := torch.zeros(3)])
    assert out.tolist() == other.tolist() == [9.0] * 3
    assert isinstance(store.pull("w"), torch.Tensor)


def test_empty_makes_an_array_to_push(store):
    array = store.empty((3, 2), "float16")
    assert array.shape == (3, 2) and array.dtype == np.float16
    assert store.empty(3).dtype == np.float32
    with pytest.raises(TypeError, match="bfloat16"):
        store.empty(3, "bfloat16")
    array[...] = 2
    store.init("w", array)
    assert (store.pull("w") == 2).all()


def test_what_was_handed_out_never_changes_and_what_was_handed_in_is_never_kept(store):
    given = ones(5)
    store.init("w", given)
    given[...] = 7
    first = store.pull("w")
    store.push("w", 2 * ones(5))
    second = store.pull("w")
    second[...] = 9
    assert first.tolist() == [1.0] * 5 and store.pull("w").tolist() == [2.0] * 5


def test_stores_have_keys_and_optimizers_of_their_own(store):
    with kv.create("dist_async") as other, kv.create("dist") as third:
        for each, number in ((store, 1), (other, 2), (third, 3)):
            each.init("w", number * ones(3))
        other.set_optimizer("test")
        other.push("w", ones(3))
        third.push("w", ones(3))
        assert [each.pull("w")[0] for each in (store, other, third)] == [1, 3, 1]
    assert store.pull("w")[0] == 1


def test_a_closed_store_can_be_followed_by_another_one():
    for round_ in range(3):
        with kv.create("dist") as store:
            with pytest.raises(KeyNotInitialised, match="key 'w' has not been initialised"):
                store.pull("w")
            store.init("w", np.full(3, round_))
            assert (store.pull("w") == round_).all()
        store.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "kvdist-node"]


def test_every_call_on_a_closed_store_says_so():
    store = kv.create("dist")
    store.init("w", ones(3))
    store.close()
    calls = {
        "init": ("x", ones(3)),
        "push": ("w", ones(3)),
        "pull": ("w",),
        "pushpull": ("w", ones(3)),
        "push_async": ("w", ones(3)),
        "pull_async": ("w",),
        "pushpull_async": ("w", ones(3)),
        "broadcast": ("w", ones(3), ones(3)),
        "barrier": (),
        "set_optimizer": ("sgd",),
    }
    for name, arguments in calls.items():
        with pytest.raises(StoreClosed, match="this 'dist' store has been closed; close it after its last use"):
            getattr(store, name)(*arguments)


def test_mistakes_raise_at_the_call_and_leave_the_store_as_it_was(store):
    store.init("w", ones(3))
    known = "key 'v' has not been initialised; call init first. The store has the keys"
    with pytest.raises(KeyNotInitialised, match=known):
        store.push("v", ones(3))
    with pytest.raises(ValueError, match=r"key 'w' has shape \(3,\), but the value has shape \(4,\)"):
        store.push("w", ones(4))
    with pytest.raises(TypeError, match="key 'w': arrays of dtype bool are not supported; use one of float32"):
        store.push("w", ones(3, dtype=bool))
    with pytest.raises(InitMismatch, match="key 'w' was initialised with shape"):
        store.init("w", ones(4))
    with pytest.raises(ValueError, match="key 'x' has no value; init needs an array for every key"):
        store.init("x", None)
    with pytest.raises(TypeError, match="a key must be an int or a str, not float"):
        store.init(1.5, ones(3))
    with pytest.raises(TypeError, match="servers run no functions from workers"):
        store.set_updater(print)
    read_only = ones(3)
    read_only.flags.writeable = False
    with pytest.raises(ValueError, match="key 'w': the array .* is read-only"):
        store.pull("w", out=read_only)
    assert store.pull("w").tolist() == [1.0] * 3


def test_an_optimizer_is_chosen_once(store):
    store.init("w", ones(3))
    with pytest.raises(ValueError, match="sgdd"):
        store.set_optimizer("sgdd")
    chosen = optimizer.create("sgd", learning_rate=1.0, momentum=0.5)
    store.set_optimizer(chosen)
    store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    with pytest.raises(OptimizerMismatch, match=r"with sgd\(.*momentum=0.5\); it cannot be changed to adam\("):
        store.set_optimizer("adam")


def test_integers_cannot_have_an_optimizer_that_needs_fractions(store):
    store.init("n", ones(3, dtype=np.int32))
    store.set_optimizer("adam")
    with pytest.raises(PushRefused, match="key 'n'"):
        store.pushpull("n", ones(3, dtype=np.int32))


def test_an_asynchronous_store_without_an_optimizer_refuses_pushes():
    with kv.create("dist_async") as store:
        store.init("w", ones(3))
        with pytest.raises(PushRefused, match="call set_optimizer before the first push"):
            store.pushpull("w", ones(3))


def test_the_error_of_a_push_that_nobody_waited_for_is_raised_by_close():
    store = kv.create("dist_async")
    store.init("w", ones(3))
    store.push("w", ones(3))
    with pytest.raises(PushRefused, match="key 'w'"):
        store.close()
    store.close()


def test_a_trainer_runs_alone():
    weight = torch.nn.Parameter(torch.ones(4))
    with kv.create("dist") as store:
        trainer = Trainer([weight], "sgd", {"learning_rate": 0.5}, kvstore=store)
        for _ in range(3):
            weight.grad = None
            weight.sum().backward()
            trainer.step()
    assert weight.tolist() == [-0.5] * 4


def test_a_node_that_was_forked_refuses_to_work(store, monkeypatch):
    store.init("w", ones(3))
    with monkeypatch.context() as child:
        child.setattr(store._backend._cluster.node, "_forked", True)
        with pytest.raises(ForkError, match="a store does not survive a fork"):
            store.push("w", ones(3))
        with pytest.raises(ForkError, match="a store does not survive a fork"):
            kv.create("dist")
    store.push("w", ones(3))


def test_a_future_cannot_be_cancelled_and_its_answer_still_comes(store):
    store.init("w", ones(3))
    futures = [store.push_async("w", ones(3)) for _ in range(3)]
    assert not any(future.cancel() for future in futures)
    assert [future.result(60) for future in futures] == [None] * 3
    np.testing.assert_array_equal(store.pull("w"), ones(3))


def test_a_blocking_call_in_a_callback_is_an_error_and_not_a_deadlock(store):
    store.init("w", ones(3))
    raised, done = [], threading.Event()

    def callback(_):
        try:
            store.pull("w")
        except RuntimeError as error:
            raised.append(str(error))
        done.set()

    store.push_async("w", ones(3)).add_done_callback(callback)
    assert done.wait(60)
    assert "runs in a callback of a future" in raised[0]


def test_a_key_that_is_named_twice_gives_two_arrays(store):
    store.init("w", ones(3))
    first, second = store.pull(["w", "w"])
    first[0] = 9
    np.testing.assert_array_equal(second, ones(3))


def test_the_keys_of_a_store_are_of_one_type(store):
    store.init("w", ones(3))
    with pytest.raises(TypeError, match="a store's keys are all int or all str"):
        store.init(3, ones(3))


@pytest.mark.parametrize(
    ("key", "shape", "message"),
    [
        ("k" * 2000, (1,), "longer than 1024 bytes"),
        ("\udc80", (1,), "lone surrogates"),
        (1 << 70, (1,), "does not fit into 64 bits"),
        ("w", (1,) * 33, "33 dimensions"),
        ("w", (0, 1 << 49), "elements are supported"),
    ],
)
def test_what_no_message_can_carry_is_refused_at_the_call(store, key, shape, message):
    with pytest.raises(ValueError, match=message):
        store.init(key, np.empty(shape, np.float32))
    store.barrier()


def test_an_infinite_learning_rate_is_refused_at_the_call(store):
    store.init("w", ones(3))
    sgd = optimizer.create("sgd", learning_rate=1e300)
    store.set_optimizer(sgd)
    sgd.set_lr_mult({"w": 1e300})
    with pytest.raises(ValueError, match="they must be finite"):
        store.push("w", ones(3))
    sgd.set_lr_mult({"w": 0.0})
    store.push("w", ones(3))
    np.testing.assert_array_equal(store.pull("w"), ones(3))


def test_buffers_are_not_kept_for_every_order_of_a_list(store):
    keys = list(range(8))
    store.init(keys, [np.ones(1 << 20, np.float32) for _ in keys])
    for turn in range(8):
        rotated = keys[turn:] + keys[:turn]
        store.pushpull(rotated, [np.ones(1 << 20, np.float32) for _ in keys])
    # Each order has a plan of 32 MiB; four times the model may be kept.
    assert len(store._backend.arrays._stagings) <= 4


@pytest.mark.parametrize("compression", [None, {"type": "fp16"}])
@pytest.mark.parametrize(
    "fails", ["kvstore.push_pull.cut", "kvstore.push_pull.SharedResults", "runtime.node.Node.submit"]
)
def test_a_push_that_an_exception_cuts_off_leaves_no_bytes_under_way(monkeypatch, compression, fails):
    small, large, huge = (np.ones(count, np.float32) for count in (3, 100_000, 3 << 20))
    rows = RowSparse([1, 3], np.ones((2, 4), np.float32), (5, 4))

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with kv.create("dist") as store:
        if compression is not None:
            store.set_gradient_compression(compression)
        store.init(["s", "l", "h", "t"], [small, large, huge, RowSparse.zeros((5, 4))])
        calls = [
            lambda: store.push("s", small),
            lambda: store.push("l", large),
            lambda: store.push(["h", "l"], [huge, large]),
            lambda: store.push("t", rows),
            lambda: store.push_async("l", large).result(),
            lambda: store.pushpull("l", large),
            lambda: store.pushpull(["h", "l"], [huge, large]),  # in parts where it is compressed
            lambda: store.pushpull_shared(["l"], [large], [np.empty_like(large)]),
        ]
        interrupted = 0
        with monkeypatch.context() as patched:
            patched.setattr(f"kvdist.{fails}", interrupt)
            for call in calls:
                try:
                    call()
                except KeyboardInterrupt:
                    interrupted += 1
        assert interrupted
        for call in calls:
            call()
        store.pull(["s", "l", "h"])
        under_way = store._backend._cluster.under_way
    assert under_way.nbytes == 0


@each("compression", [None, {"type": "fp16"}])
def test_whatever_way_a_push_takes_its_bytes_are_under_way_until_it_is_counted(compression):
    small, large = np.ones(3, np.float32), np.ones(100_000, np.float32)
    rows = RowSparse([1, 3], np.ones((2, 4), np.float32), (5, 4))
    with kv.create("dist") as store:
        if compression is not None:
            store.set_gradient_compression(compression)
        store.init(["s", "l", "t"], [small, large, RowSparse.zeros((5, 4))])
        under_way = store._backend._cluster.under_way
        for _ in range(3):
            store.push("s", small)
            store.push(["s", "l"], [small, large])
            store.push("l", None)
            store.push("t", rows)
            store.push_async("l", large).result()
            store.pushpull("l", large, out=np.zeros_like(large))
            store.pushpull_async(["l", "t"], [large, rows]).result()
        assert under_way.room >= 2 * (large.nbytes + small.nbytes + rows.values.nbytes)
        with pytest.raises(ValueError):
            store.push("l", large, samples=-1)
        store.pull(["s", "l"])
    assert under_way.nbytes == 0
