"""Tables of rows: the same calls, with the same results, on a store of this process and on an embedded cluster."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch

from kvdist import InitMismatch, KeyNotInitialised, LazyRows, RowSparse, kv
from kvdist.kvstore import sparse

ROWS = 10


@pytest.fixture(params=["local", "dist"])
def store(request):
    with kv.create(request.param) as made:
        yield made


def table(values=1.0, dtype=np.float32, rows=ROWS):
    return RowSparse(np.arange(rows), np.full((rows, 3), values, dtype))


def rows_of(indices, value, shape=(ROWS, 3), dtype=np.float32):
    return RowSparse(indices, np.full((len(indices), *shape[1:]), value, dtype), shape)


def column(store, key="t", rows=ROWS):
    """The first element of every row."""
    return store.row_sparse_pull(key, row_ids=np.arange(rows)).values[:, 0].tolist()


def test_a_pull_brings_each_named_row_once_in_order_whatever_the_shape_of_the_ids(store):
    store.init("t", RowSparse(np.arange(ROWS), np.arange(ROWS * 3, dtype=np.float32).reshape(ROWS, 3)))
    rows = store.row_sparse_pull("t", row_ids=np.array([[7, 2], [2, 9]]))
    assert rows.indices.tolist() == [2, 7, 9]
    assert rows.values[:, 0].tolist() == [6, 21, 27]
    assert rows.shape == (ROWS, 3)


def test_a_pull_of_no_rows_brings_none(store):
    store.init("t", table())
    rows = store.row_sparse_pull("t", row_ids=[])
    assert len(rows) == 0 and rows.values.shape == (0, 3)


def test_without_an_optimizer_the_sum_replaces_the_whole_table(store):
    store.init("t", table())
    store.push("t", rows_of([3, 1, 3], 2))
    assert column(store) == [0, 2, 0, 4, 0, 0, 0, 0, 0, 0]
    store.push("t", rows_of([5], 1))
    assert column(store) == [0, 0, 0, 0, 0, 1, 0, 0, 0, 0]


def test_with_an_optimizer_the_rows_that_were_pushed_change(store):
    store.set_optimizer("test", rescale_grad=2)
    store.init("t", table())
    store.push("t", rows_of([0, 9], 3))
    assert column(store) == [7, 1, 1, 1, 1, 1, 1, 1, 1, 7]
    store.push("t", rows_of([], 3))
    assert column(store) == [7, 1, 1, 1, 1, 1, 1, 1, 1, 7]
    store.push("t", None)
    assert column(store) == [7, 1, 1, 1, 1, 1, 1, 1, 1, 7]


def test_rows_of_several_devices_are_summed(store):
    store.init("t", table())
    store.push("t", [rows_of([1, 2], 1), rows_of([2, 4], 10), rows_of([2], 100)])
    assert column(store) == [0, 1, 111, 0, 10, 0, 0, 0, 0, 0]


def test_an_array_pushed_to_a_table_means_all_rows(store):
    store.init("t", table())
    store.push("t", np.full((ROWS, 3), 4, np.float32))
    assert column(store) == [4] * ROWS


def test_rows_pushed_to_an_array_are_an_array_with_zeros(store):
    store.init("w", np.ones((4, 2), np.float32))
    store.push("w", RowSparse([3, 1], np.ones((2, 2), np.float32), (4, 2)))
    assert store.pull("w")[:, 0].tolist() == [0, 1, 0, 1]
    store.pushpull("w", torch.eye(4)[:, :2].to_sparse(1), out=(out := np.empty((4, 2), np.float32)))
    assert out.tolist() == np.eye(4)[:, :2].tolist()


def test_pushpull_brings_the_rows_back_in_place(store):
    store.set_optimizer("test")
    store.init("t", table())
    rows = rows_of([6, 2], 5)
    store.pushpull("t", rows)
    assert rows.indices.tolist() == [2, 6]
    assert rows.values.tolist() == [[6, 6, 6], [6, 6, 6]]


def test_pushpull_brings_the_rows_that_the_result_names(store):
    store.set_optimizer("test")
    store.init("t", table())
    out = rows_of([6, 7], 0)
    store.pushpull("t", rows_of([6, 2], 5), out=out)
    assert out.values[:, 0].tolist() == [6, 1]


def test_pushpull_into_an_array_brings_the_whole_table(store):
    store.set_optimizer("test")
    store.init("t", table())
    out = np.zeros((ROWS, 3), np.float32)
    store.pushpull("t", rows_of([6, 2], 5), out=out)
    assert out[:, 0].tolist() == [1, 1, 6, 1, 1, 1, 6, 1, 1, 1]


def test_a_list_may_name_arrays_and_tables(store):
    store.init(["w", "t"], [np.zeros(2, np.float32), table()])
    store.push(["t", "w"], [rows_of([1], 3), np.ones(2, np.float32)])
    array, rows = np.empty(2, np.float32), np.empty((ROWS, 3), np.float32)
    store.pull(["w", "t"], out=[array, rows])
    assert array.tolist() == [1, 1] and rows[:, 0].tolist() == [0, 3] + [0] * 8
    whole = store.pull(["t", "w"], ignore_sparse=False)
    assert whole[0].values[:, 0].tolist() == [0, 3] + [0] * 8 and whole[1].tolist() == [1, 1]
    first, second = store.row_sparse_pull(["t", "t"], row_ids=[np.array([1]), np.array([0])])
    assert (first.values[0, 0], second.values[0, 0]) == (3, 0)
    store.pushpull(["w", "t"], [np.ones(2, np.float32), rows_of([0], 1)], out=[array, rows])
    assert array.tolist() == [1, 1] and rows[:, 0].tolist() == [1] + [0] * 9


def test_several_results_get_the_same_rows_or_each_its_own(store):
    store.init("t", table())
    results = [rows_of([], 0), rows_of([], 0)]
    store.row_sparse_pull("t", out=results, row_ids=[4])
    assert [result.indices.tolist() for result in results] == [[4], [4]]
    assert not np.shares_memory(results[0].values, results[1].values)
    store.row_sparse_pull("t", out=results, row_ids=[np.array([1]), np.array([2, 3])])
    assert [result.indices.tolist() for result in results] == [[1], [2, 3]]


def test_pull_leaves_a_sparse_result_alone_unless_told_otherwise(store):
    store.init("t", table())
    out = rows_of([2], 7)
    store.pull("t", out=out)
    assert out.values.tolist() == [[7, 7, 7]]
    store.pull("t", out=out, ignore_sparse=False)
    assert out.indices.tolist() == list(range(ROWS))


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32, np.int64, np.uint8])
def test_other_element_types_are_kept(store, dtype):
    store.init("t", table(1, dtype))
    store.push("t", rows_of([1, 1, 4], 3, dtype=dtype))
    rows = store.row_sparse_pull("t", row_ids=[1, 4])
    assert rows.values.dtype == dtype and rows.values[:, 0].tolist() == [6, 3]


def test_sparse_tensors_are_tables_and_rows_come_back_as_tensors(store):
    store.init("t", torch.ones(ROWS, 3, dtype=torch.bfloat16).to_sparse(1))
    values = torch.ones(3, 3, dtype=torch.bfloat16)
    grad = torch.sparse_coo_tensor([[4, 4, 0]], values, (ROWS, 3), check_invariants=True)
    store.push("t", grad)
    rows = store.row_sparse_pull("t", row_ids=torch.tensor([0, 4]))
    assert rows.values.dtype == torch.bfloat16 and rows.values[:, 0].tolist() == [1, 2]
    assert rows.to_torch().to_dense()[4].tolist() == [2, 2, 2]


def test_a_declared_table_is_larger_than_any_memory(store):
    shape = (1 << 32, 8)
    store.set_optimizer("adagrad", learning_rate=0.5)
    store.init("t", LazyRows(shape, "float32", "uniform(0.1,seed=5)"))
    ids = [0, 1 << 31, (1 << 32) - 1]
    before = store.row_sparse_pull("t", row_ids=ids)
    assert (np.abs(before.values) <= 0.1).all() and np.unique(before.values).size == 24
    store.push("t", RowSparse([ids[1]], np.ones((1, 8), np.float32), shape))
    after = store.row_sparse_pull("t", row_ids=ids)
    assert np.allclose(after.values[1], before.values[1] - 0.5) and (after.values[::2] == before.values[::2]).all()


def test_a_second_init_of_the_same_table_changes_nothing_and_of_another_is_refused(store):
    store.init("t", table(1))
    store.init("t", table(2))
    assert column(store) == [1] * ROWS
    for other in (table(1, np.float64), table(1, rows=11), LazyRows((ROWS, 3)), np.ones((ROWS, 3), np.float32)):
        with pytest.raises(InitMismatch, match="key 't' was initialised"):
            store.init("t", other)


@pytest.mark.parametrize(
    ("ids", "error", "words"),
    [
        ([10], ValueError, "rows 0 to 9, and row 10 was asked for"),
        ([-1], ValueError, "rows 0 to 9, and row -1"),
        ([1.0], TypeError, "row ids must be integers, not float64"),
        ([[1], [2, 3]], ValueError, "key 't': the lists of row ids differ in length"),
        (None, ValueError, "needs row_ids"),
    ],
)
def test_wrong_ids_are_refused_with_the_table_named(store, ids, error, words):
    store.init("t", table())
    with pytest.raises(error, match=words):
        store.row_sparse_pull("t", row_ids=ids)
    assert column(store) == [1] * ROWS


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        (rows_of([1], 1, (9, 3)), ValueError, r"key 't' is a table of shape \(10, 3\), .* of shape \(9, 3\)"),
        (rows_of([1], 1, (10, 4)), ValueError, r"of shape \(10, 4\)"),
        (np.ones((9, 3), np.float32), ValueError, "key 't' has shape"),
        (torch.eye(10)[:, :3].to_sparse(), ValueError, "key 't'.*sparse dimension"),
        ("rows", TypeError, "key 't'"),
    ],
)
def test_rows_that_do_not_fit_are_refused_and_nothing_is_lost(store, value, error, words):
    store.set_optimizer("test")
    store.init("t", table())
    with pytest.raises(error, match=words):
        store.push("t", value)
    store.push("t", rows_of([0], 1))
    assert column(store) == [2] + [1] * 9


def test_all_rows_of_a_table_for_which_there_is_no_memory_are_refused_by_name(store, monkeypatch):
    store.init("t", LazyRows((1 << 35, 8)))

    def nothing_left(info, rows):
        raise MemoryError("Unable to allocate 1.00 TiB")

    monkeypatch.setattr(sparse, "_room", nothing_left)
    with pytest.raises(MemoryError, match="key 't': no memory for all 34359738368 rows of the table"):
        store.pull("t", ignore_sparse=False)
    with pytest.raises(ValueError, match="key 't' is a table of shape"):
        store.pull("t", out=rows_of([1], 1), ignore_sparse=False)


def test_results_that_cannot_take_rows_are_refused(store):
    store.init(["t", "w"], [table(), np.ones(3, np.float32)])
    with pytest.raises(TypeError, match=r"rows are pulled into a RowSparse, not into ndarray; use RowSparse.zeros"):
        store.row_sparse_pull("t", out=np.ones((10, 3), np.float32), row_ids=[1])
    with pytest.raises(TypeError, match="key 'w' is an array, not a table of rows"):
        store.row_sparse_pull("w", row_ids=[1])
    for rows in (RowSparse([1], [np.float32(1)], (3,)), torch.ones(3).to_sparse()):
        with pytest.raises(TypeError, match="key 'w' is an array, which cannot be written into rows: give an array"):
            store.pushpull("w", rows)
    assert store.pull("w").tolist() == [1, 1, 1]
    with pytest.raises(KeyNotInitialised, match="'u'"):
        store.row_sparse_pull("u", row_ids=[1])
    with pytest.raises(ValueError, match="key 't' is a table of rows: row_sparse_pull"):
        store.pull("t")
    with pytest.raises(ValueError, match="2 results need as many row_ids, got 3"):
        store.row_sparse_pull("t", out=[rows_of([], 0)] * 2, row_ids=[np.array([1])] * 3)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (RowSparse([], np.zeros((0, 0), np.float32), (4, 0)), "have no elements"),
        (LazyRows((4, 1 << 22)), "a row of shape .* has 16777216 bytes"),
    ],
)
def test_tables_whose_rows_cannot_travel_are_refused(store, value, words):
    with pytest.raises(ValueError, match=f"key 't': .*{words}"):
        store.init("t", value)


def test_an_optimizer_that_cannot_update_a_table_is_refused_by_name(store):
    store.init("t", table())
    with pytest.raises(ValueError, match="lars needs the norm of the whole parameter, and the table 't'"):
        store.set_optimizer("lars")


def test_a_table_that_the_optimizer_cannot_update_is_refused_by_name(store):
    store.set_optimizer("adam")
    with pytest.raises(ValueError, match="lazy_update=True"):
        store.init("t", LazyRows((10, 3)))


def test_what_came_before_a_table_that_is_refused_can_be_saved(tmp_path):
    with kv.create("local") as store:
        store.set_optimizer("adam")
        with pytest.raises(ValueError, match="lazy_update=True"):
            store.init(["t", "lazy"], [table(), LazyRows((10, 3))])
        assert column(store) == [1.0] * 10
        store.save_checkpoint(tmp_path, 1).result()
        store.init(["t", "a"], [table(), np.zeros(3, np.float32)])  # a second init of the first changes nothing
        assert column(store) == [1.0] * 10


def test_futures_have_the_rows(store):
    store.init("t", table())
    pushed = store.push_async("t", rows_of([2], 5))
    pulled = store.row_sparse_pull_async("t", row_ids=[2])
    assert pushed.result() is None and pulled.result().values[0, 0] == 5
    store.pushpull_async("t", rows := rows_of([3], 5)).result()
    assert rows.values[0, 0] == 5
    assert store.pull_async("t", ignore_sparse=False).result().values[:, 0].tolist() == [0, 0, 0, 5] + [0] * 6


def test_broadcast_gives_a_new_table_out_and_refuses_to_replace_one(store):
    out = np.zeros((ROWS, 3), np.float32)
    store.broadcast("t", table(4), out)
    assert (out == 4).all()
    with pytest.raises(ValueError, match="key 't' is a table of rows that has values already"):
        store.broadcast("t", table(5), out)


def test_broadcast_replaces_the_arrays_that_stand_beside_a_new_table(store):
    store.init("w", np.ones(2, np.float32))
    array, rows = np.zeros(2, np.float32), np.zeros((ROWS, 3), np.float32)
    store.broadcast(["w", "t"], [np.full(2, 8, np.float32), table(4)], [array, rows])
    assert array.tolist() == [8, 8] and (rows == 4).all()
    assert store.pull("w").tolist() == [8, 8]


def test_one_result_for_a_list_of_one_key_and_none_too_few(store):
    store.init("t", table(5))
    store.row_sparse_pull(["t"], out=(out := rows_of([], 0)), row_ids=[[3]])
    assert out.values.tolist() == [[5, 5, 5]]
    with pytest.raises(ValueError, match="2 keys need as many row_ids and results, got 2 and 1"):
        store.row_sparse_pull(["t", "t"], out=out, row_ids=[[1], [2]])


def test_pulls_of_small_arrays_are_gathered_beside_a_table_too():
    with kv.create("dist") as store:
        names = [f"w{i}" for i in range(5)]
        store.init(["t", *names], [table(), *(np.full(2, i, np.float32) for i in range(5))])
        outs = [np.empty(2, np.float32) for _ in names]
        coalescer = store._backend.arrays._coalescer
        gathered = mock.Mock(wraps=coalescer.pull)
        with mock.patch.object(coalescer, "pull", gathered):
            futures = [store.pull_async(name, out=out) for name, out in zip(names, outs, strict=True)]
        for future in futures:
            future.result()
        assert gathered.call_count == 5
        assert [out[0] for out in outs] == [0, 1, 2, 3, 4]


def test_a_function_updates_no_tables():
    with kv.create("local") as store:
        store.init("w", np.ones(2, np.float32))
        store.set_updater(lambda key, received, stored: None)
        with pytest.raises(TypeError, match="key 't' is a table of rows, which only an optimizer updates"):
            store.init("t", table())
    with kv.create("local") as store:
        store.init("t", table())
        with pytest.raises(TypeError, match="key 't' is a table of rows, which only an optimizer updates"):
            store.set_updater(lambda key, received, stored: None)


def test_a_result_with_as_many_rows_is_filled_where_it_lies(store):
    store.init("t", table(3))
    out = rows_of([1, 2], 0)
    memory = out.values
    store.row_sparse_pull("t", out=out, row_ids=[7, 9])
    assert out.indices.tolist() == [7, 9] and memory.tolist() == [[3, 3, 3], [3, 3, 3]]
    memory.flags.writeable = False
    store.row_sparse_pull("t", out=(fixed := RowSparse([1, 2], memory, (ROWS, 3))), row_ids=[4, 5])
    assert fixed.indices.tolist() == [4, 5] and not np.shares_memory(fixed.values, memory)
