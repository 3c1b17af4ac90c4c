"""The store: what `init`, `push`, `pull` and their kin do, by exact numbers, on two workers and two servers."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

import kvdist
from kvdist import LazyRows, RowSparse, kv
from tests.acceptance.together import ROOT, Together, same
from tests.cases import each

two = Together(
    2, 2, ["--server-module", "tests.acceptance.handlers"],
    MXNET_KVSTORE_BIGARRAY_BOUND="1000", KVDIST_CHECKPOINT_ROOT="/",
)  # fmt: skip
"""Keys of a thousand elements and more are cut over the servers."""
SMALL, LARGE = (2, 3), (301, 307)
HALVES = ("float16", "bfloat16")
TYPES = ("float16", "bfloat16", "float32", "float64", "int8", "int32", "int64", "uint8")
SYNCHRONOUS = ("dist", "dist_sync", "dist_device_sync", "dist_sync_device", "p3", "p3store_dist")
ASYNCHRONOUS = ("dist_async", "dist_device_async", "dist_async_device")
LOCAL = ("local", "local_update_cpu", "local_allreduce_cpu", "device", "local_allreduce_device")
COLLECTIVE = ("collective", "horovod", "allreduce", "byteps")


def full(shape, value, dtype=np.float32):
    return np.full(shape, value, dtype)


def shared(name):
    """A path that all workers of the job share and no other job has."""
    return str(Path(tempfile.gettempdir()) / name)


# First values.


@two
def test_the_first_value_is_rank_0s_whatever_the_others_gave(store):
    assert (store.rank in (0, 1), store.num_workers, store.num_servers, store.type) == (True, 2, 2, "dist")
    keys = ["small", "large", "half"]
    shapes, dtypes = [SMALL, LARGE, SMALL], [np.float32, np.float32, np.float16]
    store.init(keys, [full(*what[:1], 7 + 100 * store.rank, what[1]) for what in zip(shapes, dtypes, strict=True)])
    for value, shape, dtype in zip(store.pull(keys), shapes, dtypes, strict=True):
        assert value.shape == shape and value.dtype == dtype
        same(value, full(shape, 7))


@two
def test_a_repeated_init_changes_nothing_and_one_of_another_shape_or_type_is_refused(store):
    store.init("w", full(SMALL, 1))
    store.init("w", full(SMALL, 2))
    same(store.pull("w"), full(SMALL, 1))
    for other in (full((3, 2), 1), full(SMALL, 1, np.float64)):
        with pytest.raises(kvdist.InitMismatch, match="w"):
            store.init("w", other)
    same(store.pull("w"), full(SMALL, 1))


@two
def test_workers_that_init_another_shape_or_type_all_get_an_error_that_names_the_key():
    rank = int(os.environ["KVDIST_RANK"])
    for own in (full(2 + rank, 1), full(2, 1, (np.float32, np.float64)[rank])):
        with kv.create("dist") as store, pytest.raises(kvdist.InitMismatch, match="w.*worker-[01]"):
            store.init("w", own)


@two
def test_keys_are_agreed_by_name_and_not_by_their_order():
    keys = ["a", "b", "c"]
    for name in ("dist", "p3"):
        with kv.create(name) as store:
            order = keys[::-1] if store.rank else keys
            store.init(order, [full(2, "abc".index(key)) for key in order])
            store.pushpull(order, out := [full(2, 10 * "abc".index(key) + store.rank) for key in order])
            for key, value in zip(order, out, strict=True):
                same(value, full(2, 20 * "abc".index(key) + 1))


@two
def test_broadcast_gives_rank_0s_present_values_again_and_again(store):
    for number in (3, 4):
        out = [np.zeros(SMALL, np.float32), np.zeros(SMALL, np.float32)]
        store.broadcast("w", full(SMALL, number + 10 * store.rank), out)
        for value in (*out, store.pull("w")):
            same(value, full(SMALL, number))
        store.pushpull("w", full(SMALL, 1), out=out[0])
        same(out[0], full(SMALL, 2))


# Sums.


@two
def test_the_sum_over_devices_then_workers_replaces_the_value_where_there_is_no_optimizer(store):
    assert not store.has_optimizer
    for shape in (SMALL, LARGE):
        store.init(str(shape), full(shape, 50))
        for turn in range(3):
            devices = [full(shape, 1 + turn + 10 * store.rank), full(shape, 100)]
            store.push(str(shape), devices)
            same(store.pull(str(shape)), full(shape, 2 * (1 + turn) + 10 + 200))
            same(devices[0], full(shape, 1 + turn + 10 * store.rank))


@two
def test_pushpull_writes_in_place_or_into_out_and_then_leaves_what_was_pushed(store):
    store.init("w", np.zeros(LARGE, np.float32))
    for _ in range(2):
        devices = [full(LARGE, 1 + store.rank), full(LARGE, 4)]
        assert store.pushpull("w", devices) is None
        for value in devices:
            same(value, full(LARGE, 11))
        given, out = full(LARGE, store.rank), [np.zeros(LARGE, np.float32) for _ in range(2)]
        store.pushpull("w", given, out=out)
        same(given, full(LARGE, store.rank))
        for value in out:
            same(value, full(LARGE, 1))


@two
def test_two_pushes_of_one_worker_are_two_rounds(store):
    store.init("w", np.zeros(2, np.float32))
    store.set_optimizer("test")
    for number in (1, 10):
        store.push("w", full(2, number * (1 + store.rank)))
    same(store.pull("w"), [33, 33])


@two
def test_none_is_an_empty_contribution_that_counts(store):
    store.init("w", full(2, 5))
    store.push("w", None)
    same(store.pull("w"), [5, 5])
    store.push("w", full(2, 8) if store.rank else None)
    same(store.pull("w"), [8, 8])
    store.pushpull("w", None if store.rank else full(2, 6), out=(out := full(2, 0)), average=True)
    same(out, [3, 3])


@two
def test_an_average_divides_by_the_workers_and_not_by_the_devices(store):
    store.init("w", np.zeros(2, np.float32))
    store.pushpull("w", [full(2, 2 * store.rank), full(2, 8)], out=(out := full(2, 0)), average=True)
    same(out, [9, 9])
    store.push("w", full(2, 1 + store.rank), average=True)
    same(store.pull("w"), [1.5, 1.5])


@two
def test_keys_are_words_or_numbers_alone_or_in_lists_and_lists_of_lists_are_devices(store):
    store.init(3, full(2, 0))
    store.init([4, 5], [full(2, 0), full(3, 0)])
    store.push([3, 4], [[full(2, 1), full(2, 2)], [full(2, 3), full(2, 4)]])
    for value, wanted in zip(store.pull([3, 4, 5]), ([6, 6], [14, 14], [0, 0, 0]), strict=True):
        same(value, wanted)
    out = [[full(2, 0), full(2, 0)], [full(2, 0)]]
    assert store.pull([3, 4], out=out) is None
    same(out[0][0], [6, 6]), same(out[0][1], [6, 6]), same(out[1][0], [14, 14])
    store.push([3, 3, 4], [full(2, 1), [full(2, 1), full(2, 1)], None])
    one, other = store.pull([3, 3])
    one.fill(0)
    same(other, [6, 6])
    for key in ("word", ["word"], [3, "word"], 1.5, None):
        with pytest.raises(TypeError):
            store.init(key, [full(2, 0)] * 2 if isinstance(key, list) and len(key) == 2 else full(2, 0))


@two
def test_every_type_is_summed_in_its_kind_and_comes_back_as_the_kind_that_was_given_to_init(store):
    import torch

    for name in TYPES:
        tensor = torch.arange(1, 7).reshape(2, 3).to(getattr(torch, name))
        store.init(f"torch {name}", tensor)
        back = store.pull(f"torch {name}")
        assert isinstance(back, torch.Tensor) and back.dtype == tensor.dtype and torch.equal(back, tensor)
        store.push(f"torch {name}", tensor * (store.rank + 1))
        assert torch.equal(store.pull(f"torch {name}"), tensor * 3), name
        if name == "bfloat16":
            continue
        store.init(f"numpy {name}", tensor.numpy())
        store.push(f"numpy {name}", tensor)  # of the other kind
        array = store.pull(f"numpy {name}")
        assert isinstance(array, np.ndarray) and array.dtype == name
        same(array, tensor.numpy() * 2)
        store.pull(f"numpy {name}", out=(other := torch.zeros_like(tensor)))
        assert torch.equal(other, tensor * 2)


@two
def test_halves_are_summed_in_float32_and_rounded_once(store):
    import torch

    for name, large in (("float16", 2048), ("bfloat16", 256)):
        one = torch.ones(3, dtype=getattr(torch, name))
        store.init(name, one)
        store.push(name, [one * large, one, one] if store.rank == 0 else None)
        same(store.pull(name), [large + 2] * 3)  # large + 1 is large, were it rounded each time


@two
def test_shapes_that_do_not_fit_are_refused_with_both_and_unknown_keys_by_name(store):
    store.init("w", full(SMALL, 1))
    for call in (store.push, store.pushpull):
        with pytest.raises(ValueError, match=r"(?s)(?=.*\(2, 3\))(?=.*\(3, 2\))(?=.*w)"):
            call("w", full((3, 2), 1))
    with pytest.raises(TypeError, match="complex64"):
        store.push("w", full(SMALL, 1, np.complex64))
    with pytest.raises(kvdist.KeyNotInitialised, match="unheard"):
        store.push("unheard", full(SMALL, 1))
    with pytest.raises(KeyError, match="unheard"):
        store.pull("unheard")
    store.push("w", full(SMALL, 2))
    same(store.pull("w"), full(SMALL, 4))


# What belongs to whom.


@two
def test_what_was_pushed_may_be_changed_at_once(store):
    for shape in (SMALL, LARGE):
        store.init(str(shape), np.zeros(shape, np.float32))
        store.set_optimizer("test")
        given = np.zeros(shape, np.float32)
        for turn in range(5):
            given.fill(turn + store.rank)
            store.push(str(shape), given)
            given.fill(1e6)
        same(store.pull(str(shape)), full(shape, 2 * (0 + 1 + 2 + 3 + 4) + 5))


@two
def test_what_was_handed_out_never_changes(store):
    for shape in (SMALL, LARGE):
        first = full(shape, 1)
        store.init(str(shape), first)
        pulled, values = [], []
        for turn in range(5):
            pulled.append(store.pull(str(shape)))
            store.pushpull(str(shape), value := full(shape, turn + store.rank))
            values.append(value)
        for turn in range(5):
            same(pulled[turn], full(shape, 2 * turn - 1 if turn else 1))
            same(values[turn], full(shape, 2 * turn + 1))
        pulled[-1].fill(99)  # nor does the store
        same(store.pull(str(shape)), full(shape, 9))
        same(first, full(shape, 1))


@two
def test_futures_resolve_when_the_work_is_done(store):
    shape = LARGE
    store.init("w", np.zeros(shape, np.float32))
    given = store.empty(shape)
    assert given.shape == shape and given.dtype == np.float32 and isinstance(given, np.ndarray)
    given.fill(store.rank + 1)
    assert store.push_async("w", given, priority=3).result(60) is None
    same(store.pull_async("w").result(60), full(shape, 3))
    store.pull_async("w", out=(out := np.zeros(shape, np.float32)), priority=-1).result(60)
    same(out, full(shape, 3))
    store.pushpull_async("w", given, out=out).result(60)
    same(out, full(shape, 3))
    given.fill(5)
    store.pushpull("w", given)
    same(given, full(shape, 10))


@two
def test_shared_results_show_the_value_or_are_written_into_out(store):
    store.init(["small", "large"], [full(SMALL, 0), full((600, 700), 0)])
    out = [full(SMALL, 0), full((600, 700), 0)]
    for turn in range(3):
        given = [full(SMALL, turn), full((600, 700), turn + store.rank)]
        shown = store.pushpull_shared(["small", "large"], given, out)
        for there, written, wanted in zip(shown, out, (2 * turn, 2 * turn + 1), strict=True):
            same(written if there is None else there, full(written.shape, wanted))


# Optimizers.


@two
def test_with_an_optimizer_the_servers_update(store):
    assert store.is_capable("optimizer") and not store.has_optimizer
    with pytest.raises(ValueError, match="optimizer"):
        store.is_capable("flight")
    store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
    store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)  # the same is one call
    assert store.has_optimizer
    store.init(["w", "v"], [full(SMALL, 1), full(LARGE, 1)])
    weight, momentum = 1.0, 0.0
    for turn in range(4):
        store.push(["w", "v"], [full(SMALL, turn + store.rank), full(LARGE, turn + store.rank)])
        momentum = 0.5 * momentum - 0.5 * (2 * turn + 1)
        weight += momentum
        same(store.pull("w"), full(SMALL, weight))
        same(store.pull("v"), full(LARGE, weight))


@two
def test_another_optimizer_is_refused_whoever_gives_it():
    with kv.create("dist") as store:
        store.set_optimizer("sgd", learning_rate=0.5)
        with pytest.raises(kvdist.OptimizerMismatch):
            store.set_optimizer("adam")
    with kv.create("dist") as store:
        if store.rank == 0:
            store.set_optimizer("sgd", learning_rate=0.5)
        store.barrier()
        if store.rank == 1:
            with pytest.raises(ValueError, match="momentum"):
                store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        store.barrier()


@two
def test_rates_and_multipliers_travel_with_every_push_and_the_rest_is_frozen(store):
    from kvdist import optimizer

    chosen = optimizer.create("sgd", learning_rate=1.0, momentum=0.0)
    store.set_optimizer(chosen)
    store.init([0, 1], [full(2, 0), full(2, 0)])
    chosen.lr_mult[1] = 10.0
    weights = np.zeros(2)
    for rate, rescale in ((1.0, 1.0), (0.5, 1.0), (0.25, 4.0)):
        chosen.learning_rate, chosen.rescale_grad = rate, rescale
        store.push([0, 1], [full(2, 1), full(2, 1)])
        weights -= 2 * rate * rescale * np.array([1, 10])
    same(store.pull(0), [weights[0]] * 2), same(store.pull(1), [weights[1]] * 2)
    chosen.wd, chosen.rescale_grad = 0.5, 1.0
    chosen.wd_mult[1] = 0.0
    store.push([0, 1], [full(2, 0), full(2, 0)])
    same(store.pull(0), [weights[0] * (1 - 0.25 * 0.5)] * 2), same(store.pull(1), [weights[1]] * 2)
    with pytest.raises(AttributeError, match="momentum"):
        chosen.momentum = 0.5


@two
def test_workers_whose_learning_rates_differ_in_a_round_are_named():
    with kv.create("dist") as store, pytest.raises(kvdist.OptimizerMismatch, match="worker-[01]"):
        from kvdist import optimizer

        store.set_optimizer(chosen := optimizer.create("sgd", learning_rate=1.0))
        store.init("w", full(2, 0))
        chosen.learning_rate = 1.0 + store.rank
        store.pushpull("w", full(2, 1))


@two
def test_an_optimizer_of_the_operators_own_runs_on_the_servers(store):
    from tests.acceptance import handlers

    store.set_optimizer(handlers.SignDescent(learning_rate=0.25))
    store.init("w", full(2, 0))
    store.push("w", full(2, -3 + store.rank))
    same(store.pull("w"), [0.25, 0.25])


@two
def test_every_push_is_an_update_of_an_asynchronous_store_and_one_without_an_optimizer_is_refused():
    for name in ASYNCHRONOUS:
        with kv.create(name) as store:
            assert store.type == name
            store.init("w", full(SMALL, 0))
            with pytest.raises(kvdist.PushRefused, match="optimizer"):
                store.push_async("w", full(SMALL, 1)).result(60)
    with kv.create("dist_async") as store:
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["w", "v"], [full(SMALL, 0), full(LARGE, 0)])
        for _ in range(5 + store.rank):  # nobody waits for anybody
            store.push(["w", "v"], [full(SMALL, 1 + store.rank), full(LARGE, 1 + store.rank)])
        store.pull(["w", "v"])
        store.barrier()
        same(store.pull("w"), full(SMALL, -(5 + 12))), same(store.pull("v"), full(LARGE, -(5 + 12)))


@two
def test_states_of_an_optimizer_are_saved_and_loaded():
    folder = "states"
    with kv.create("dist") as store:
        store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
        store.init("w", full(LARGE, 0))
        store.push("w", full(LARGE, 1))  # the momentum is -2
        store.save_optimizer_states(shared(folder), dump_optimizer=True)
        store.push("w", full(LARGE, 0))
        same(store.pull("w"), full(LARGE, -3))
        store.load_optimizer_states(shared(folder))
        store.push("w", full(LARGE, 0))
        same(store.pull("w"), full(LARGE, -4))
    with kv.create("dist") as store:  # the optimizer comes with its states
        store.init("w", full(LARGE, 7))
        store.load_optimizer_states(shared(folder))
        store.push("w", full(LARGE, 0))
        same(store.pull("w"), full(LARGE, 6))
        with pytest.raises(kvdist.CheckpointError):
            store.load_optimizer_states(shared("nothing"))
    with kv.create("dist") as store:
        store.barrier()
        if store.rank == 0:
            files = {path.suffix for path in Path(shared(folder)).rglob("*") if path.is_file()}
            assert {".safetensors", ".json"} <= files, files
            shutil.rmtree(shared(folder))


# Tables of rows.


def rows(ids, value, shape, dtype=np.float32):
    return RowSparse(ids, full((len(ids), *shape[1:]), value, dtype), shape)


@two
def test_rows_that_were_not_given_are_zero_and_only_those_that_are_named_come(store):
    shape = (6, 2)
    store.init("t", rows([4, 1], 5 + store.rank, shape))
    found = store.row_sparse_pull("t", row_ids=[[4, 0], [1, 4]])
    assert found.indices.tolist() == [0, 1, 4] and found.shape == shape
    same(found.values, [[0, 0], [5, 5], [5, 5]])
    out = [RowSparse.zeros(shape), RowSparse.zeros(shape)]
    assert store.row_sparse_pull("t", out=out, row_ids=np.array([1])) is None
    for one in out:
        assert one.indices.tolist() == [1]
        same(one.values, [[5, 5]])
    store.row_sparse_pull("t", out=out, row_ids=[np.array([4]), np.array([1, 0])])  # for each result its own
    assert [one.indices.tolist() for one in out] == [[4], [0, 1]]
    same(store.row_sparse_pull_async("t", row_ids=[4]).result(60).values, [[5, 5]])
    for ids, error in (([6], ValueError), ([-1], ValueError), ([0.5], TypeError)):
        with pytest.raises(error, match="t"):
            store.row_sparse_pull("t", row_ids=ids)


@two
def test_pushed_rows_are_summed_with_their_repetitions_over_devices_and_workers(store):
    shape = (6, 2)
    store.set_optimizer("test")
    store.init("t", rows([0, 1, 2, 3, 4, 5], 1, shape))
    store.push("t", [RowSparse([3, 0, 3], full((3, 2), 1), shape), rows([store.rank], 10, shape)])
    same(store.row_sparse_pull("t", row_ids=range(6)).values[:, 0], [1 + 2 + 10, 11, 1, 1 + 4, 1, 1])
    store.push("t", RowSparse.zeros(shape))  # no rows, and nobody waits
    store.pushpull("t", gradient := rows([store.rank, 5], 1, shape))
    assert gradient.indices.tolist() == [store.rank, 5]
    same(gradient.values[:, 0], [(14, 12)[store.rank], 3])
    store.pushpull("t", rows([2], 1, shape), out=(out := rows([5, 2], 0, shape)))
    same(out.to_dense()[:, 0], [0, 0, 3, 0, 0, 3])


@two
def test_without_an_optimizer_the_sum_replaces_the_whole_table(store):
    store.init("t", rows([0, 1, 2], 9, (3, 2)))
    store.push("t", rows([store.rank], 1 + store.rank, (3, 2)))
    same(store.row_sparse_pull("t", row_ids=[0, 1, 2]).values, [[1, 1], [2, 2], [0, 0]])


@two
def test_a_pull_of_a_table_brings_all_rows_into_an_array_and_leaves_rows_in_out_as_they_are(store):
    store.init("t", rows([1], 4, (3, 2)))
    store.pull("t", out=(array := full((3, 2), 9)))
    same(array, [[0, 0], [4, 4], [0, 0]])
    out = rows([2], 7, (3, 2))
    store.pull("t", out=out)
    same(out.values, [[7, 7]])
    store.pull("t", out=out, ignore_sparse=False)
    same(out.to_dense(), array)
    same(store.pull("t", ignore_sparse=False).to_dense(), array)
    with pytest.raises(Exception, match="row_sparse_pull"):
        store.pull("t")
    with pytest.raises(ValueError, match="checkpoint"):  # a table that has values is not replaced
        store.broadcast("t", rows([1], 1, (3, 2)), out)
    same(store.row_sparse_pull("t", row_ids=[1]).values, [[4, 4]])


@two
def test_tables_may_be_torchs_sparse_tensors_and_rows_may_be_pushed_to_an_array(store):
    import torch

    sparse = torch.sparse_coo_tensor([[0, 2, 2]], [[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]], (3, 2))
    store.init("t", sparse)
    found = store.row_sparse_pull("t", row_ids=torch.tensor([2, 0]))
    assert isinstance(found.values, torch.Tensor)
    same(found.to_dense(), [[1, 1], [0, 0], [5, 5]])
    store.push("t", sparse)
    same(store.row_sparse_pull("t", row_ids=[0, 1, 2]).values[:, 0], [2, 0, 10])
    store.init("array", full((3, 2), 1))
    store.push("array", rows([store.rank], 3, (3, 2)))
    same(store.pull("array"), [[3, 3], [3, 3], [0, 0]])
    with pytest.raises(TypeError, match="csr"):
        store.init("csr", torch.eye(3).to_sparse_csr())


@two
def test_a_table_that_is_only_declared_has_rows_once_they_are_updated(store):
    shape = (1 << 37, 2)
    store.set_optimizer("sgd", learning_rate=1.0)
    ways = ("constant(0.5)", "uniform(0.5)", "normal(0.5)")
    store.init(["c", "u", "n"], [LazyRows(shape, "float32", way) for way in ways])
    ids = [0, 7, (1 << 37) - 1]
    same(store.row_sparse_pull("c", row_ids=ids).values, full((3, 2), 0.5))
    store.push("c", rows([7, ids[2]], 1 + store.rank, shape))
    same(store.row_sparse_pull("c", row_ids=ids).values[:, 0], [0.5, -2.5, -2.5])
    many = np.arange(500)
    uniform, normal = (store.row_sparse_pull(key, row_ids=many).values for key in "un")
    assert abs(uniform).max() <= 0.5 and abs(uniform).max() > 0.45 and abs(uniform.mean()) < 0.05
    assert 0.45 < normal.std() < 0.55 and abs(normal.mean()) < 0.06
    same(store.row_sparse_pull("u", row_ids=many[100:110]).values, uniform[100:110])
    with kv.create("dist") as other:
        other.set_optimizer("adam")
        with pytest.raises(Exception, match="lazy_update"):
            other.init("t", LazyRows(shape))
            other.push("t", rows([0], 1, shape))
            other.pull("t", out=full((1, 2), 0))


@two
def test_rows_without_a_gradient_go_on_unless_the_update_is_lazy():
    for lazy, wanted in ((False, [-2 - 1 - 2, -2 - 1]), (True, [-2 - 3, -2])):
        with kv.create("dist") as store:
            store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5, lazy_update=lazy)
            store.init("t", RowSparse.zeros((3, 1)))
            store.push("t", rows([0, 1], 1, (3, 1)))
            store.push("t", rows([0], 1, (3, 1)))  # the momentum of row 1 is -2
            same(store.row_sparse_pull("t", row_ids=[0, 1]).values[:, 0], wanted)
            same(store.row_sparse_pull("t", row_ids=[2]).values, [[0]])


# Compression.


@two
def test_2bit_sends_the_threshold_with_its_sign_and_keeps_the_rest_on_each_worker(store):
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})  # the same changes nothing
    store.init("w", np.zeros(4, np.float32))
    rest = np.zeros((2, 4), np.float32)
    gradients = np.array([[0.125, 0.375, 0.5, -9.0], [-0.25, 0.25, 4.0, 0.0]], np.float32)
    for turn in range(6):
        rest += gradients
        sent = np.where(rest >= 0.5, 0.5, np.where(rest <= -0.5, -0.5, 0))
        rest -= sent
        store.push("w", gradients[store.rank])
        same(store.pull("w"), sent.sum(0))
        if turn == 2:
            store.push("w", None)  # changes no rest
    store.broadcast("w", np.ones(4, np.float32), np.zeros(4, np.float32))
    store.pushpull("w", (out := np.full(4, 0.375, np.float32)))
    same(out, [0, 0, 0, 0])  # the rest began anew


@two
def test_2bit_is_exact_for_keys_that_are_cut_and_for_the_sum_over_devices(store):
    store.set_gradient_compression({"type": "2bit", "threshold": 2.0})
    store.init("w", np.zeros(LARGE, np.float32))
    rest = np.zeros(LARGE, np.float32)
    generator = np.random.default_rng(store.rank)
    others = np.random.default_rng(1 - store.rank)
    theirs = np.zeros(LARGE, np.float32)
    for _ in range(4):
        sums = []
        for rng, kept in ((generator, rest), (others, theirs)):
            devices = [rng.integers(-8, 9, LARGE).astype(np.float32) / 4 for _ in range(2)]
            kept += devices[0] + devices[1]
            sent = np.where(kept >= 2, 2, np.where(kept <= -2, -2, 0)).astype(np.float32)
            kept -= sent
            sums.append((devices, sent))
        store.push("w", sums[0][0])
        same(store.pull("w"), sums[0][1] + sums[1][1])


@two
def test_1bit_sends_1_above_the_threshold_and_minus_1_below(store):
    store.set_gradient_compression({"type": "1bit", "threshold": 0.25})
    store.init("w", np.zeros(5, np.float32))
    rest, gradient = np.zeros(5, np.float32), np.array([0.0, 0.25, 0.5, -3.0, 3.0], np.float32)
    for _ in range(5):
        rest += gradient
        sent = np.where(rest > 0.25, 1, -1)
        rest -= sent
        store.push("w", gradient)
        same(store.pull("w"), 2 * sent)


@two
def test_halves_are_rounded_and_topk_sends_the_largest_whole_and_both_keep_the_rest():
    import torch

    gradient = np.array([1 + 2**-13, 3.0, -5.0, 1e-3], np.float32)
    for way in ("fp16", "bf16"):
        with kv.create("dist") as store:
            store.set_gradient_compression({"type": way})
            store.init("w", np.zeros(4, np.float32))
            rest, half = torch.zeros(4), torch.float16 if way == "fp16" else torch.bfloat16
            for _ in range(3):
                rest += torch.from_numpy(gradient)
                sent = rest.to(half).float()
                rest -= sent
                store.push("w", gradient)
                same(store.pull("w"), 2 * sent)
    with kv.create("dist") as store:
        store.set_gradient_compression({"type": "topk", "ratio": 0.25})
        store.init("w", np.zeros(4, np.float32))
        for wanted in ([0, 0, -5, 0], [0, 6, 0, 0], [0, 0, -10, 0]):
            store.push("w", gradient)
            same(store.pull("w"), np.array(wanted) * 2)


@two
def test_pulled_halves_are_rounded_once_and_the_servers_keep_float32(store):
    store.set_gradient_compression({"type": "fp16", "pull": "fp16"})
    store.set_optimizer("test")
    store.init("w", np.full(2, 2048, np.float32))
    for turn in range(1, 5):
        store.push("w", full(2, 0.25))
        same(store.pull("w"), np.full(2, 2048 + turn / 2).astype(np.float16))


@two
def test_what_cannot_be_compressed_is_refused_by_name_or_travels_as_it_is(store):
    for params, error in (
        ({"type": "3bit"}, ValueError),
        ({"type": "2bit", "treshold": 1}, (TypeError, ValueError)),
        ({"type": "2bit", "threshold": -1}, ValueError),
        ({"type": "topk", "ratio": 2}, ValueError),
    ):
        with pytest.raises(error):
            store.set_gradient_compression(params)
    store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(ValueError, match="2bit"):
        store.set_gradient_compression({"type": "1bit"})
    with pytest.raises(TypeError, match="double"):
        store.init("double", full(2, 0, np.float64))
    store.leave_uncompressed(["double", "single"])
    store.init(["double", "single"], [full(2, 0, np.float64), full(2, 0)])
    store.push(["double", "single"], [full(2, 0.125, np.float64), full(2, 0.125)])
    same(store.pull("double"), [0.25, 0.25]), same(store.pull("single"), [0.25, 0.25])
    store.init("t", RowSparse.zeros((3, 2)))
    store.push("t", rows([1], 0.125, (3, 2)))
    same(store.row_sparse_pull("t", row_ids=[1]).values, [[0.25, 0.25]])
    store.init("w", full(2, 0))
    with pytest.raises(ValueError, match="w"):
        store.leave_uncompressed(["w"])
    with kv.create("dist") as other:
        other.init("w", full(2, 0))
        with pytest.raises(ValueError):
            other.set_gradient_compression({"type": "2bit"})


@two
def test_workers_that_compress_otherwise_are_told():
    with kv.create("dist") as store, pytest.raises(kvdist.InitMismatch):
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5 + store.rank})
        store.init("w", full(2, 0))


# Beside keys.


@two
def test_averages_and_values_of_rank_0_and_agreements_have_nothing_to_do_with_keys(store):
    import torch

    store.set_optimizer("sgd")
    assert store.average(store.rank) == 0.5 and isinstance(store.average(1.0), float)
    same(store.average(full((2, 2), store.rank)), full((2, 2), 0.5))
    mean = store.average(torch.full((3,), 4.0 * store.rank))
    assert isinstance(mean, torch.Tensor)
    same(mean, [2, 2, 2])
    assert store.average(float(store.rank), counts=store.rank == 1) == 1
    assert np.isnan(store.average(1.0, counts=False))
    first, second = store.from_rank_0([np.arange(3) * (store.rank + 1), torch.full((2,), store.rank)])
    assert first.tolist() == [0, 1, 2] and first.dtype == np.int64 and second.tolist() == [0, 0]
    store.agree("three layers")
    with pytest.raises(kvdist.InitMismatch, match="layers.*worker-|worker-.*layers"):
        store.agree(f"{store.rank} layers")
    assert store.num_dead_nodes() == 0


@two
def test_a_barrier_that_is_over_names_who_is_missing_and_can_be_passed_later(store):
    store.init("w", full(1, 0))
    if store.rank == 0:
        with pytest.raises(kvdist.BarrierTimeout, match="worker-1") as caught:
            store.barrier(timeout=0.2)
        assert list(caught.value.missing) == [1]
    store.push("w", full(1, 1))
    same(store.pull("w"), [2])  # so rank 1 comes when rank 0 has given up
    store.barrier()
    store.barrier(timeout=60)


@two
def test_commands_run_on_every_server_and_their_errors_reach_the_caller(store):
    body = shared("command")
    if store.rank == 0:
        store.send_command_to_servers(1, body)
        found = sorted(Path(body).parent.glob("command-*"))
        assert [path.read_text() for path in found] == ["1 on 0", "1 on 1"]
        with pytest.raises(kvdist.KvdistError, match="(?s)server-1.*no .*command here"):
            store.send_command_to_servers(2, body)
        assert Path(f"{body}-0").read_text() == "run", "the other server has run it"
        with pytest.raises(kvdist.KvdistError, match="(?s)77.*1.*2"):
            store.send_command_to_servers(77, body)
        for path in found:
            path.unlink()
        for head, text in ((-1, ""), (1 << 31, ""), (1, "x" * 65537)):
            with pytest.raises(ValueError):
                store.send_command_to_servers(head, text)
    store.barrier()


@two
def test_second_stores_are_namespaces_with_modes_and_optimizers_of_their_own():
    with kv.create("dist") as first, kv.create("dist_sync") as second, kv.create("dist_async") as third:
        first.set_optimizer("test"), third.set_optimizer("sgd", learning_rate=1.0)
        for number, store in enumerate((first, second, third)):
            store.init("w", full(2, number))
            store.push("w", full(2, 1))
            store.barrier()
        store.pull("w"), store.barrier()
        for store, wanted in ((first, 2), (second, 2), (third, 0)):
            same(store.pull("w"), [wanted] * 2)
    with pytest.raises(kvdist.StoreClosed):
        first.pull("w")
    with pytest.raises(RuntimeError):
        first.push("w", full(2, 1))
    first.close()


@two
def test_every_name_of_a_store_on_servers_makes_one():
    for name in (*SYNCHRONOUS, "DIST"):
        with kv.create(name) as store:
            assert store.type.lower() == name.lower() and store.num_workers == 2
            store.init(["w", "v"], [full(SMALL, 0), full(LARGE, 0)])
            for turn in range(2):
                store.push(["w", "v"], [full(SMALL, turn + store.rank), full(LARGE, turn)], priority=-turn)
                same(store.pull("w"), full(SMALL, 2 * turn + 1)), same(store.pull("v"), full(LARGE, 2 * turn))


@two
def test_no_function_of_a_worker_runs_on_servers(store):
    with pytest.raises(TypeError):
        store.set_updater(lambda key, received, stored: None)


@two
def test_traces_of_workers_and_servers_are_files_that_a_viewer_opens(store):
    from kvdist import profiler

    folder = Path(shared("traces"))
    folder.mkdir(exist_ok=True)
    profiler.set_config(filename=str(folder / "own.json"))
    profiler.start()
    store.init("w", full(2, 0))
    store.pushpull("w", full(2, 1))
    profiler.dump()
    trace = json.loads((folder / f"own.worker-{store.rank}.json").read_text())
    assert {"pushpull"} <= {word for event in trace["traceEvents"] for word in event["name"].split()}, trace
    store.barrier()
    if store.rank == 0:
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()


@two
def test_stores_for_the_collective_and_hybrid_way_work_beside_servers():
    with kv.create("collective") as store:
        store.init("w", full(2, 0))
        store.pushpull("w", out := full(2, store.rank + 1))
        same(out, [3, 3])
    with kv.create("hybrid") as store:  # tables on servers, the rest among the workers
        assert (store.type, store.num_workers) == ("hybrid", 2)
        store.set_optimizer("sgd", learning_rate=1.0)
        store.init(["w", "t"], [full(2, 0), LazyRows((1 << 30, 2), "float32", "zeros")])
        store.push("w", full(2, 1))
        store.push("t", rows([store.rank, 1 << 29], 1, (1 << 30, 2)))
        same(store.pull("w"), [-2, -2])
        same(store.row_sparse_pull("t", row_ids=[0, 1, 1 << 29]).values[:, 0], [-1, -1, -2])


@two
def test_rules_that_need_whole_parameters_or_rows_are_chosen_before_init_and_refuse_tables(store):
    store.init("large", full(LARGE, 0))
    with pytest.raises(Exception, match="large"):
        store.set_optimizer("lamb")
    for name in ("lars", "lamb", "lans"):
        with kv.create("dist") as other:
            other.set_optimizer(name)
            with pytest.raises(Exception, match="t"):
                other.init("t", RowSparse.zeros((3, 2)))
                other.push("t", rows([0], 1, (3, 2)))
                other.row_sparse_pull("t", row_ids=[0])


# Stores within this process.


@each("name", [*LOCAL, "nccl"])
def test_a_store_within_a_process_sums_over_devices_and_replaces_or_updates(name):
    with kv.create(name) as store:
        assert (store.type, store.rank, store.num_workers, store.num_servers) == (name, 0, 1, 0)
        store.init(["w", "v"], [full(SMALL, 1), full(2, 1)])
        devices = [full(SMALL, 1), full(SMALL, 2)]
        store.push("w", devices)
        devices[0].fill(99)
        same(store.pull("w"), full(SMALL, 3))
        store.pushpull("w", devices, out=(out := full(SMALL, 0)))
        same(out, full(SMALL, 101))
        store.set_updater(lambda key, received, stored: np.add(stored, 10 * received, out=stored))
        store.push("v", [full(2, 1), full(2, 2)])
        same(store.pull("v"), [31, 31])
        store.send_command_to_servers(1, "nobody")
        store.barrier()
        assert store.num_dead_nodes() == 0 and store.average(3) == 3


def test_a_store_within_a_process_updates_with_an_optimizer_and_saves_its_states(tmp_path):
    weights = []
    for load in (False, True):
        with kv.create("local") as store:
            store.set_optimizer("sgd", learning_rate=1.0, momentum=0.5)
            store.init("w", full(2, 0))
            if load:
                store.load_optimizer_states(tmp_path / "states")
            else:
                store.push("w", full(2, 2))
                store.save_optimizer_states(tmp_path / "states")
            before = store.pull("w")
            store.push("w", full(2, 0))
            weights.append(store.pull("w") - before)
    for moved in weights:
        same(moved, [-1, -1])


@each("name", ["device", "local_allreduce_device"])
def test_a_device_store_compresses_each_device(name):
    with kv.create(name) as store:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
        store.init("w", full(2, 0))
        for wanted in ([0.5, 0], [1.0, 0.5], [0.5, 0.5], [1.0, -0.5 + 0.5]):
            store.push("w", [full(2, [0.5, 0.375]), full(2, [0.25, -0.125])])
            same(store.pull("w"), wanted)


def test_stores_on_the_host_do_not_compress():
    with kv.create("local") as store, pytest.raises(ValueError, match="device"):
        store.set_gradient_compression({"type": "2bit"})


def test_an_unknown_name_is_an_error_that_lists_the_names():
    with pytest.raises(ValueError) as caught:
        kv.create("dits")
    listed = set(re.findall(r"\w+", str(caught.value)))
    assert {*SYNCHRONOUS, *ASYNCHRONOUS, *LOCAL, *COLLECTIVE, "nccl", "hybrid"} <= listed, caught.value
    with pytest.raises(TypeError):
        kv.create(7)


@each("name, instead", [("teststore", "regist"), ("dist_device", "dist_device_sync")])
def test_names_that_people_try_are_answered_with_what_to_use(name, instead):
    with pytest.raises(ValueError, match=instead):
        kv.create(name)


def test_an_updater_applies_an_optimizer_to_arrays():
    updater = kvdist.optimizer.Updater(kvdist.optimizer.create("sgd", learning_rate=0.5, momentum=0.5))
    weight = full(2, 1)
    for wanted in (0.5, -0.25):
        updater("w", full(2, 1), weight)
        same(weight, [wanted] * 2)


@each("name", ["ftrl", "ftml"])
def test_rules_that_divide_by_the_rate_refuse_0(name):
    with kv.create("local") as store:
        store.set_optimizer(name, learning_rate=0)
        store.init("w", full(2, 1))
        with pytest.raises(ValueError, match="w"):
            store.push("w", full(2, 1))


# A job that loses a process, forks, or traces itself.

LOSES = """
    import os, sys
    import numpy as np
    import kvdist
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(2, np.float32))
    child = os.fork()
    if not child:
        try:
            store.pull("w")
        except kvdist.ForkError:
            os._exit(3)
        os._exit(0)
    print("in the child:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    try:
        while True:
            store.pushpull("w", np.ones(2, np.float32))
    except kvdist.PeerLostError as error:
        assert isinstance(error, ConnectionError) and "server-1" in str(error)
        print("lost:", error.node, bool(error.host), bool(error.cause), type(error.step).__name__,
              store.num_dead_nodes(), flush=True)
        sys.exit(75)
"""


def test_the_loss_of_a_process_is_an_exception_with_its_name_and_a_forked_child_has_no_store(job, script):
    launcher = job.launch(2, 2, sys.executable, script(LOSES))
    job.line("launcher", "in the child: 3", count=2)
    job.kill("server-1")
    assert job.finish() == {"launcher": 137}
    assert launcher.lines_with("w0 │ lost:") == ["w0 │ lost: server-1 True True NoneType 1"], job.transcript()


TRACED = """
    import numpy as np
    from kvdist import kv

    with kv.create("dist") as store:
        store.init("w", np.zeros(2, np.float32))
        store.pushpull("w", np.ones(2, np.float32))
"""


def test_workers_and_servers_trace_themselves_where_a_variable_says_so(job, script, tmp_path):
    own = {"MXNET_PROFILER_AUTOSTART": "1", "KVDIST_PROFILE_DIR": str(tmp_path / "traces")}
    (tmp_path / "traces").mkdir()
    job.launch(2, 2, sys.executable, script(TRACED), **own)
    job.succeed()
    found = {path.name: json.loads(path.read_text()) for path in (tmp_path / "traces").iterdir()}
    assert set(found) == {f"profile.{role}-{rank}.json" for role in ("worker", "server") for rank in range(2)}
    assert all(trace["traceEvents"] for trace in found.values())


# Clusters by hand, and none.

ALONE = """
    import sys
    import numpy as np
    from kvdist import kv

    for name in sys.argv[1:]:
        with kv.create(name) as store:
            assert (store.type, store.rank, store.num_workers) == (name, 0, 1), (store.type, store.rank)
            store.init("w", np.ones(3, np.float32))
            store.pushpull("w", value := np.full(3, 4, np.float32))
            assert value.tolist() == [4, 4, 4]
            print(name, store.num_servers, flush=True)
"""


def test_without_a_cluster_one_is_started_inside_the_process_and_a_line_says_so(job, script):
    process = job.start("alone", [sys.executable, script(ALONE), "dist"])
    job.succeed()
    lines = process.text.splitlines()
    assert lines[-1] == "dist 1" and len(lines) <= 3, lines
    assert any("DMLC_ROLE" in line or "cluster" in line for line in lines[:-1]), lines


def test_stores_without_servers_work_in_a_process_that_is_alone(job, script):
    process = job.start("alone", [sys.executable, script(ALONE), *COLLECTIVE])
    job.succeed()
    for name in COLLECTIVE:
        assert f"{name} 0" in process.text


@pytest.mark.parametrize("missing", ["DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER"])
def test_half_an_environment_is_an_error_that_names_what_is_missing(monkeypatch, job, missing):
    for name, value in job.environment("worker", 1, 1).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(missing)
    with pytest.raises(kvdist.ConfigError, match=missing):
        kv.create("dist")


@pytest.mark.parametrize("names", [("RANK", "WORLD_SIZE"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")])
def test_the_environment_of_another_launcher_is_an_error(monkeypatch, names):
    for name, value in zip(names, ("0", "2"), strict=True):
        monkeypatch.setenv(name, value)
    with pytest.raises(kvdist.ConfigError, match="kvdist-launch"):
        kv.create("dist")


BY_HAND = """
    import numpy as np
    from kvdist import kv

    with kv.create("dist") as store:
        store.init("w", np.zeros((1100, 1000), np.float32))
        store.pushpull("w", value := np.full((1100, 1000), store.rank + 1, np.float32))
        print(store.rank, value.min(), value.max(), store.num_servers, flush=True)
"""


@pytest.mark.parametrize("ours", [False, True])
def test_a_cluster_is_described_by_mxnets_names_or_their_twins(job, script, ours):
    twins = {"DMLC_ROLE": "ROLE", "DMLC_PS_ROOT_URI": "ROOT_URI", "DMLC_PS_ROOT_PORT": "ROOT_PORT",
             "DMLC_NUM_WORKER": "NUM_WORKER", "DMLC_NUM_SERVER": "NUM_SERVER"}  # fmt: skip
    path = script(BY_HAND)
    for name in ("scheduler", "server-0", "server-1", "worker-0", "worker-1"):
        role = name.partition("-")[0]
        argv = [sys.executable, path] if role == "worker" else [sys.executable, "-m", "kvdist"]
        own = job.environment(role, 2, 2)
        if ours:  # ours win
            own = {f"KVDIST_{twins[word]}": value for word, value in own.items()} | {"DMLC_NUM_WORKER": "7"}
        else:
            own |= {"DMLC_PS_VAN_TYPE": "p3", "PS_RESEND": "1"}
        job.start(name, argv, PYTHONPATH=str(ROOT), **own)
    job.succeed()
    said = sorted(job.processes[f"worker-{rank}"].lines_with("3.0 3.0 2")[0] for rank in range(2))
    assert said == ["0 3.0 3.0 2", "1 3.0 3.0 2"]
    if not ours:
        assert "PS_RESEND" in job.transcript(), "a variable that changes nothing is named"
