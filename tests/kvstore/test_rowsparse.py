"""`RowSparse` and `LazyRows`: what they take, what they refuse, and sums of repeated rows."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.kvstore.rowsparse import LazyRows, RowSparse, canonical
from kvdist.optimizer.initializer import Normal, Zeros
from tests.cases import each

torch = pytest.importorskip("torch")

F32, F16, BF16 = DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16


def rows(count, length=2, dtype=np.float32):
    return np.arange(1, count * length + 1, dtype=dtype).reshape(count, length)


# Construction.


def test_rows_are_kept_as_they_were_given_and_nothing_is_copied():
    ids, values = np.array([4, 0]), rows(2)
    sparse = RowSparse(ids, values, (6, 2))
    assert sparse.indices is ids
    assert sparse.values is values
    assert (sparse.shape, sparse.dtype, len(sparse), sparse.is_torch) == ((6, 2), F32, 2, False)
    tensor = torch.from_numpy(values)
    assert RowSparse(ids, tensor).values.data_ptr() == tensor.data_ptr()


@each("ids", [[3, 1], (3, 1), np.array([3, 1], np.uint8), torch.tensor([3, 1], dtype=torch.int32)])
def test_ids_may_be_any_integers(ids):
    sparse = RowSparse(ids, rows(2))
    assert sparse.indices.dtype == np.int64
    assert sparse.indices.tolist() == [3, 1]
    assert sparse.shape == (4, 2)


def test_there_may_be_no_rows_and_rows_may_have_any_shape():
    assert RowSparse([], np.zeros((0, 3), np.float32)).shape == (0, 3)
    assert RowSparse([], np.zeros((0, 3, 4), np.float16), (9, 3, 4)).to_dense().shape == (9, 3, 4)
    assert RowSparse([2], np.array([5.0]), (4,)).to_dense().tolist() == [0, 0, 5, 0]


@each(
    "ids, values, shape, error, said",
    [
        (np.array([1.0]), rows(1), None, TypeError, "row ids must be integers, not float64: cast them"),
        (torch.tensor([1.0]), rows(1), None, TypeError, "row ids must be integers, not float32"),
        (np.array([True]), rows(1), None, TypeError, "row ids must be integers, not bool"),
        ([[1], [2]], rows(2), None, ValueError, r"one dimension, not the shape \(2, 1\)"),
        ([2, -3], rows(2), None, ValueError, "at least 0 and fit int64, and -3 is among them"),
        (np.array([2**63], np.uint64), rows(1), None, ValueError, "fit int64, and 9223372036854775808"),
        ([0, 5], rows(2), (5, 2), ValueError, r"row 5 is out of range: an array of shape \(5, 2\) has 5 rows"),
        ([0], rows(2), None, ValueError, "1 row ids need as many rows of values, got 2"),
        ([0], rows(1), (5, 3), ValueError, r"rows of an array of shape \(5, 3\) have shape \(3,\), got"),
        ([0], rows(1), (5,), ValueError, r"have shape \(\), got \(2,\)"),
        ([0], rows(1), (5, -2), ValueError, "whole numbers of at least 0"),
        ([0], rows(1), (), ValueError, "one or more whole numbers"),
        ([0], rows(1), 5, ValueError, "a shape is a tuple of whole numbers, not 5"),
        ([0], np.float32(3), None, TypeError, "must be a NumPy array or a torch tensor, not float32"),
        ([0], np.array(3.0), None, ValueError, "but are a scalar"),
        ([0], rows(1, dtype=np.complex64), None, TypeError, "values of dtype complex64 are not supported"),
        ([0], "rows", None, TypeError, "not str"),
        ([0], torch.eye(1).to_sparse(), None, TypeError, "RowSparse.from_torch takes sparse tensors"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_is_wrong(ids, values, shape, error, said):
    with pytest.raises(error, match=said):
        RowSparse(ids, values, shape)


def test_a_tensor_that_needs_a_gradient_is_detached():
    values = torch.ones(1, 2, requires_grad=True)
    assert not RowSparse([0], values).values.requires_grad


def test_its_text_is_short_however_many_rows_it_has():
    text = repr(RowSparse(np.arange(10**5), np.zeros((10**5, 1), np.float16), (10**6, 1)))
    assert text == "RowSparse(100000 rows [0, 1, 2, 3, 4, 5, …] of (1000000, 1), float16, numpy)"


# Other forms.


def test_repeated_rows_have_their_sum_when_dense():
    sparse = RowSparse([3, 1, 3], rows(3), (5, 2))
    np.testing.assert_array_equal(sparse.to_dense(), [[0, 0], [3, 4], [0, 0], [6, 8], [0, 0]])


@each("dtype", ["float32", "float64", "float16", "int32", "bfloat16"])
def test_dense_arrays_and_tensors_come_back_as_they_were(dtype):
    dense = torch.zeros(6, 2, 3, dtype=getattr(torch, dtype))
    dense[1, 0, 2], dense[4] = -2, 7
    sparse = RowSparse.from_dense(dense)
    assert sparse.indices.tolist() == [1, 4]
    assert torch.equal(sparse.to_dense(), dense)
    if dtype != "bfloat16":
        plain = RowSparse.from_dense(dense.numpy())
        assert not plain.is_torch
        np.testing.assert_array_equal(plain.to_dense(), dense.numpy())
    again = RowSparse.from_torch(sparse.to_torch())
    assert again.shape == (6, 2, 3)
    assert torch.equal(again.to_dense(), dense)


def test_a_row_of_zeros_of_either_sign_is_left_out_and_one_with_nan_is_not():
    for kind in (torch.float32, torch.bfloat16):
        dense = torch.tensor([[0.0, -0.0], [0.0, float("nan")]], dtype=kind)
        assert RowSparse.from_dense(dense).indices.tolist() == [1]


def test_the_gradient_of_a_sparse_embedding_is_coalesced():
    net = torch.nn.Embedding(10, 3, sparse=True)
    (net(torch.tensor([7, 1, 1])) * torch.tensor([[1.0], [2.0], [3.0]])).sum().backward()
    sparse = RowSparse.from_torch(net.weight.grad)
    assert sparse.indices.tolist() == [1, 7]
    assert sparse.values.tolist() == [[5, 5, 5], [1, 1, 1]]
    assert sparse.is_torch
    coalesced = sparse.to_torch()
    assert coalesced.is_coalesced()
    assert torch.equal(coalesced.to_dense(), net.weight.grad.to_dense())


def test_from_torch_refuses_dense_tensors_and_several_sparse_dimensions():
    with pytest.raises(TypeError, match="takes a sparse COO tensor, not a tensor of layout torch.strided; from_dense"):
        RowSparse.from_torch(torch.ones(2, 2))
    with pytest.raises(TypeError, match="not ndarray"):
        RowSparse.from_torch(np.ones(2))
    with pytest.raises(ValueError, match=r"2 sparse dimensions: convert it, such as by dense.to_sparse\(1\)"):
        RowSparse.from_torch(torch.eye(2).to_sparse())


def test_one_without_rows_is_what_a_pull_writes_into():
    for dtype, is_torch in (("float32", False), (np.float16, False), (torch.float64, False), ("bfloat16", True)):
        sparse = RowSparse.zeros((4, 2), dtype)
        assert (len(sparse), sparse.shape, sparse.is_torch) == (0, (4, 2), is_torch)


# Assignment.


def test_other_rows_take_the_place_of_the_present_ones():
    sparse = RowSparse.zeros((4, 2))
    sparse.assign([1, 3], rows(2))
    assert sparse.indices.tolist() == [1, 3]
    assert sparse.to_dense().tolist() == [[0, 0], [1, 2], [0, 0], [3, 4]]
    assert sparse.shape == (4, 2)


def test_values_stay_of_the_kind_that_they_were():
    tensor, array = RowSparse([0], torch.ones(1, 2)), RowSparse([0], np.ones((1, 2), np.float32))
    tensor.assign([0], np.full((1, 2), 3, np.float32))
    array.assign([0], torch.full((1, 2), 4.0))
    assert torch.equal(tensor.values, torch.full((1, 2), 3.0))
    assert isinstance(array.values, np.ndarray)
    half = RowSparse.zeros((2, 2), "bfloat16")
    half.assign([1], np.full((1, 2), 0x4040, np.uint16))
    assert torch.equal(half.values, torch.full((1, 2), 3.0, dtype=torch.bfloat16))


@each(
    "ids, values, error",
    [
        ([9], rows(1), ValueError),
        ([0], rows(2), ValueError),
        ([0], rows(1, 3), ValueError),
        ([0], rows(1, dtype=np.float64), TypeError),
        ([0.5], rows(1), TypeError),
    ],
)
def test_a_refused_assignment_changes_nothing(ids, values, error):
    sparse = RowSparse([2], rows(1), (4, 2))
    with pytest.raises(error):
        sparse.assign(ids, values)
    assert sparse.indices.tolist() == [2]
    assert sparse.values.tolist() == [[1, 2]]


# Canonical form.


def test_what_is_in_order_already_is_returned_without_a_copy():
    for ids in (np.array([], np.int64), np.array([5]), np.array([0, 3, 4])):
        values = rows(len(ids))
        found, same = canonical(ids, values, F32)
        assert found is ids
        assert same is values


def one_by_one(ids, values, dtype):
    """Each row's sum, added in the order given."""
    wide = REFERENCE.to_float32(values.reshape(-1), dtype).reshape(values.shape) if dtype in (F16, BF16) else values
    sums = {}
    with np.errstate(all="ignore"):
        for one, row in zip(ids.tolist(), wide, strict=True):
            sums[one] = sums[one] + row if one in sums else row
    total = np.array([sums[one] for one in sorted(sums)])
    if dtype in (F16, BF16):
        total = REFERENCE.from_float32(np.ascontiguousarray(total).reshape(-1), dtype).reshape(total.shape)
    return np.array(sorted(sums)), total


@each("dtype", [F32, DType.FLOAT64, F16, BF16, DType.INT8])
@each("length", [1, 2, 5])
@each(
    "ids",
    [
        np.array([3, 3]),
        np.array([5, 2, 9, 0]),
        np.random.default_rng(0).integers(0, 40, 100),
        np.random.default_rng(1).integers(0, 500, 3000),
        np.concatenate([np.zeros(2000, np.int64), np.arange(60)]),
    ],
)
def test_repeated_rows_are_summed_in_the_order_given(dtype, length, ids):
    rng = np.random.default_rng(2)
    numbers = rng.standard_normal((len(ids), length)) * 10.0 ** rng.integers(-3, 3, (len(ids), 1))
    if dtype in (F16, BF16):
        values = REFERENCE.from_float32(numbers.astype(np.float32).reshape(-1), dtype).reshape(numbers.shape)
    else:
        values = numbers.astype(dtype.storage)
    before = values.copy()
    found, sums = canonical(ids, values, dtype)
    expected_ids, expected = one_by_one(ids, values, dtype)
    np.testing.assert_array_equal(found, expected_ids)
    assert sums.dtype == dtype.storage
    np.testing.assert_array_equal(sums, expected)
    np.testing.assert_array_equal(values, before)


# Declared tables.


def test_a_declared_table_costs_nothing_and_knows_what_it_would_take():
    table = LazyRows((4_000_000_000, 64), initializer="normal(0.01,seed=3)")
    assert table.nbytes == 4_000_000_000 * 256
    assert (table.dtype, table.initializer) == (F32, Normal(0.01, 3))
    assert LazyRows([3, 2], torch.bfloat16) == LazyRows((3, 2), "bfloat16", Zeros())


@each(
    "arguments, error, said",
    [
        (((), "float32"), ValueError, "one or more whole numbers"),
        (((3.5, 2), "float32"), ValueError, "whole number"),
        (((-1, 2), "float32"), ValueError, "whole numbers of at least 0"),
        (((3, 2), "float31"), TypeError, "float31"),
        (((3, 2), "complex64"), TypeError, "complex64"),
        (((3, 2), "float32", "ones"), ValueError, "an initialiser is written"),
        (((3, 2), "int32", "normal(1)"), ValueError, "rows of int32 cannot start as normal numbers"),
    ],
)
def test_a_table_that_cannot_be_is_refused(arguments, error, said):
    with pytest.raises(error, match=said):
        LazyRows(*arguments)


def test_importing_it_does_not_import_torch():
    program = "import sys, kvdist.kvstore.rowsparse; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=150)
