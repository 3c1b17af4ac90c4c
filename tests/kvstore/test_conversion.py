"""Arrays of another element type than their key's: what is pushed becomes the key's, what is pulled becomes `out`'s."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from kvdist import LazyRows, RowSparse, kv
from kvdist.dtypes import DType
from tests.cases import each

GIVEN = [1.75, -1.75, 0.5, 300.6, 1 / 3]

OF_MXNET = [
    ("float32", "float64", 1, [1.75, -1.75, 0.5, 300.6000061035156, 0.3333333432674408]),
    ("float32", "float64", 3, [5.25, -5.25, 1.5, 901.800048828125, 1.0]),
    ("float32", "float16", 2, [3.5, -3.5, 1.0, 601.0, 0.66650390625]),
    ("float32", "int32", 3, [3.0, -3.0, 0.0, 900.0, 0.0]),
    ("int32", "float32", 1, [1, -1, 0, 300, 0]),
    ("int32", "float32", 2, [2, -2, 0, 600, 0]),
    ("int32", "int64", 3, [3, -3, 0, 900, 0]),
    ("float16", "float32", 2, [3.5, -3.5, 1.0, 601.0, 0.66650390625]),
    ("float16", "float64", 3, [5.25, -5.25, 1.5, 901.5, 1.0]),
]
"""Printed by MXNet 1.9.1's store 'device': the key's type, that of the arrays, how many of them, and the sum."""

INTO = [("float16", [3.5, -3.5, 1.0, 601.0, 0.66650390625]), ("int32", [3, -3, 1, 601, 0])]
"""The same: `out`'s type, and what a pull of two float32 arrays of the key's type writes into it."""


@pytest.fixture(params=["local", "device", "dist", "collective"])
def store(request):
    with kv.create(request.param) as made:
        yield made


@pytest.fixture(params=["local", "dist"])
def tables(request):
    with kv.create(request.param) as made:
        yield made


def array(kind, numbers, dtype):
    made = np.array(numbers).astype(dtype)
    return torch.from_numpy(made) if kind == "torch" else made


KINDS = ["numpy", "torch"]


@each("key_type, given_type, count, expected", OF_MXNET)
@each("kind", KINDS)
def test_each_array_becomes_the_keys_type_before_they_are_summed(store, kind, key_type, given_type, count, expected):
    key = f"{kind}-{key_type}-{given_type}-{count}"
    store.init(key, array(kind, np.zeros(5), key_type))
    pushed = [array(kind, GIVEN, given_type) for _ in range(count)]
    store.push(key, pushed)
    assert np.asarray(store.pull(key)).tolist() == expected
    together = [array(kind, GIVEN, given_type) for _ in range(count)]
    store.pushpull([key], [together])  # in place: the sum comes back in the type of the array
    for one in together:
        assert one.dtype == pushed[0].dtype
        assert np.asarray(one).tolist() == np.array(expected).astype(given_type).tolist()


@each("out_type, expected", INTO)
@each("kind", KINDS)
def test_a_result_becomes_the_type_of_out(store, kind, out_type, expected):
    key = f"{kind}-{out_type}"
    store.init(key, array(kind, np.zeros(5), "float32"))
    store.push(key, [array(kind, GIVEN, "float32")] * 2)
    several = [array(kind, np.zeros(5), out_type), array(kind, np.zeros(5), "float64"), np.zeros(10, out_type)[::2]]
    store.pull(key, out=several)
    store.pull_async(key, out=(alone := array(kind, np.zeros(5), out_type))).result()
    for one in (several[0], several[2], alone):
        assert np.asarray(one).tolist() == expected
    assert np.asarray(several[1]).tolist() == np.asarray(store.pull(key)).tolist()


@each("key_type, given_type", [("float32", "float64"), ("float16", "float32"), ("bfloat16", "float64")])
def test_a_number_that_is_too_large_becomes_infinite_without_a_warning(tables, key_type, given_type):
    given = np.array([np.finfo(given_type).max, 1.0], given_type)
    array, table, wide = (f"{name} {key_type}" for name in ("array", "table", "wide"))
    tables.init(array, torch.zeros(2, dtype=getattr(torch, key_type)))
    tables.push(array, given)
    assert tables.pull(array).tolist() == [np.inf, 1.0]
    tables.init(table, LazyRows((2, 2), key_type))
    tables.push(table, RowSparse([0], given[None], (2, 2)))
    tables.row_sparse_pull(table, out=(rows := RowSparse.zeros((2, 2), "float32")), row_ids=[0])
    assert rows.values.tolist() == [[np.inf, 1.0]]
    tables.init(wide, np.zeros(2, given_type))
    tables.push(wide, given)
    tables.pull(wide, out=(out := np.zeros(2, np.float16)))
    assert out.tolist() == [np.inf, 1.0]


def test_a_broadcast_reaches_an_array_of_another_type(store):
    out = np.zeros(2, np.float16)
    store.broadcast("w", np.array([1 / 3, 2], np.float32), out=out)
    assert out.tolist() == [0.333251953125, 2.0]
    assert store.pull("w").tolist() == [np.float32(1 / 3), 2.0]


def test_bfloat16_converts_both_ways(store):
    store.init("w", torch.zeros(2, dtype=torch.bfloat16))
    store.push("w", np.array([1 / 3, 2.0]))
    rounded = torch.tensor([1 / 3, 2.0]).bfloat16().double().tolist()
    out = np.zeros(2)
    store.pull("w", out=out)
    assert out.tolist() == rounded and store.pull("w").dtype == torch.bfloat16


def test_an_optimizer_gets_gradients_in_the_keys_type(tables):
    tables.init("w", np.zeros(3, np.float32))
    tables.set_optimizer("sgd", learning_rate=1.0)
    tables.push("w", np.array([1, 2, 3]))
    assert tables.pull("w").tolist() == [-1, -2, -3]


def test_fractions_are_cut_off_before_the_sum(store):
    store.init("n", np.zeros(1, np.int32))
    store.push("n", [np.array([0.5]), np.array([0.5])])
    assert store.pull("n").tolist() == [0]


@each("value", [np.zeros(3, bool), np.zeros(3, complex), np.zeros(3, np.uint16), np.array(["a", "b", "c"])])
def test_types_that_no_key_has_are_refused(store, value):
    store.init("w", np.zeros(3, np.float32))
    with pytest.raises(TypeError, match=r"key 'w': arrays of dtype .* are not supported; use one of float32"):
        store.push("w", value)


def test_rows_become_the_tables_type_and_that_of_out(tables):
    tables.init("t", RowSparse.from_dense(np.ones((4, 2), np.float32)))
    tables.push("t", RowSparse([3, 0, 3], np.full((3, 2), 1 / 3), (4, 2)))
    found = tables.row_sparse_pull("t", row_ids=[0, 3]).values[:, 0].tolist()
    assert found == [np.float32(1 / 3), np.float32(2 / 3)]
    for dtype in ("float16", "float64"):
        out = RowSparse.zeros((4, 2), dtype)
        tables.row_sparse_pull("t", out=[out, twin := RowSparse.zeros((4, 2), dtype)], row_ids=[0, 3])
        assert out.dtype.label == dtype and out.values.dtype == dtype
        assert out.values[:, 0].tolist() == np.array(found).astype(dtype).tolist() == twin.values[:, 0].tolist()
    whole = np.zeros((4, 2), np.float16)
    tables.pull("t", out=whole)
    assert whole[:, 0].tolist() == np.array([found[0], 0, 0, found[1]], np.float16).tolist()
    tables.push("t", np.full((4, 2), 2))
    assert tables.row_sparse_pull("t", row_ids=[1]).values.tolist() == [[2.0, 2.0]]


def test_rows_of_bfloat16_convert_both_ways(tables):
    tables.init("t", LazyRows((4, 2), DType.BFLOAT16))
    tables.push("t", RowSparse([1], np.full((1, 2), 1 / 3), (4, 2)))
    out = RowSparse.zeros((4, 2), "float32")
    tables.row_sparse_pull("t", out=out, row_ids=[1])
    assert out.values[0].tolist() == [torch.tensor(1 / 3).bfloat16().item()] * 2


def test_a_pull_of_an_array_into_rows_warns_once_and_leaves_them(store, caplog):
    store.init("w", np.ones((4, 2), np.float32))
    rows, dense = RowSparse([1], np.full((1, 2), 2.0), (4, 2)), np.zeros((4, 2), np.float32)
    with caplog.at_level(logging.WARNING, "kvdist"):
        store.pull("w", out=rows)
        store.pull(["w"], out=[[rows, dense]])
    assert rows.indices.tolist() == [1] and rows.values.tolist() == [[2.0, 2.0]] and dense.tolist() == [[1.0] * 2] * 4
    said = [record.message for record in caplog.records if "leaves rows" in record.message]
    assert said == ["key 'w' is an array: pull leaves rows given as out as they are; give an array as out"]


def test_rows_as_the_result_of_an_array_are_refused_where_they_would_be_lost(store):
    store.init("w", np.ones((4, 2), np.float32))
    rows = RowSparse([1], np.full((1, 2), 2.0, np.float32), (4, 2))
    with pytest.raises(TypeError, match="key 'w' is an array, which cannot be written into rows: give an array as out"):
        store.pushpull("w", np.ones((4, 2), np.float32), out=rows)
    with pytest.raises(TypeError, match="key 'w' is an array, which cannot be written into rows"):
        store.pull("w", out=rows, ignore_sparse=False)
