"""The operations against the numbers of Horovod's own tests."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import kvdist.collective as hvd
from kvdist.collective.operations import ALONE_BYTES, FLAT_BYTES, partition
from kvdist.errors import CollectiveError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
REALS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COMPLEX = [torch.complex64, torch.complex128]
ROWS = [17, 32, 81, 12, 15, 23, 22]


def numbers(dtype, dims, high=20):
    """The same ones on every rank."""
    generator = torch.Generator().manual_seed(1234 + dims)
    return torch.randint(0, high, (5,) * dims, generator=generator).to(dtype)


def same(results, expected):
    for result in returned(results):
        assert result.dtype == expected.dtype and result.shape == expected.shape
        assert torch.equal(result, expected), (result, expected)


# Allreduce.


@each("size", [1, 2, 3])
def test_the_sum_of_the_same_tensor_is_that_times_the_number_of_ranks(size):
    kinds = [(dtype, dims) for dtype in [*INTEGERS, *REALS, *COMPLEX] for dims in (0, 1, 2, 3)]

    def program(rank):
        return [hvd.allreduce(numbers(dtype, dims), op=hvd.Sum) for dtype, dims in kinds]

    for results in returned(run_ranks(size, program)):
        for (dtype, dims), result in zip(kinds, results, strict=True):
            assert result.dtype == dtype
            assert torch.equal(result, numbers(dtype, dims) * size), (dtype, dims)


def test_averages_of_integers_are_rounded_down_and_those_of_others_are_not():
    def program(rank):
        whole = [hvd.allreduce(torch.tensor([3, -4, 7 * rank]).to(dtype)) for dtype in INTEGERS[1:]]
        return whole, [hvd.allreduce(torch.tensor([3.0, -4.0, 7.0 * rank], dtype=dtype)) for dtype in REALS]

    for whole, broken in returned(run_ranks(2, program)):
        assert [result.tolist() for result in whole] == [[3, -4, 3]] * 4
        assert [result.tolist() for result in broken] == [[3.0, -4.0, 3.5]] * 4


def test_the_average_of_equal_integers_is_that_integer_whatever_the_number_of_ranks():
    def program(rank):
        return hvd.allreduce(torch.arange(1000))

    same(run_ranks(3, program), torch.arange(1000))


def test_min_max_and_product_are_over_the_ranks():
    def program(rank):
        mine = torch.tensor([rank + 1, 3 - rank, 2])
        return [
            hvd.allreduce(mine.to(dtype), op=op).tolist()
            for op in (hvd.Min, hvd.Max, hvd.Product)
            for dtype in (*INTEGERS, *REALS)
        ]

    expected = [[1, 1, 2]] * 9 + [[3, 3, 2]] * 9 + [[6, 6, 8]] * 9
    assert returned(run_ranks(3, program)) == [expected] * 3


def test_of_truths_the_sum_is_whether_any_is_true_and_the_minimum_whether_all_are():
    def program(rank):
        mine = torch.tensor([True, False, rank == 1])
        return [hvd.allreduce(mine, op=op).tolist() for op in (hvd.Sum, hvd.Max, hvd.Min, hvd.Product)]

    some, every = [True, False, True], [True, False, False]
    assert returned(run_ranks(2, program)) == [[some, some, every, every]] * 2


@each("dtype", [*INTEGERS, *REALS])
def test_factors_multiply_before_and_after_and_integers_are_cut_each_time(dtype):
    def program(rank):
        mine = torch.tensor([1, 3, 5]).to(dtype)
        return [
            hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5),
            hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.4),
            hvd.allreduce(mine, prescale_factor=2.0, postscale_factor=0.5),
            hvd.allreduce_(mine.clone(), op=hvd.Sum, prescale_factor=0.5),
        ]

    def floored(values):
        return torch.tensor(values).floor().to(dtype) if dtype in INTEGERS else torch.tensor(values).to(dtype)

    half = [0.0, 2.0, 4.0] if dtype in INTEGERS else [1.0, 3.0, 5.0]
    for halved, fifths, twice, in_place in returned(run_ranks(2, program)):
        assert torch.equal(halved, floored(half)) and torch.equal(in_place, halved)
        torch.testing.assert_close(fifths, floored([0.8, 2.4, 4.0]), rtol=1e-2 if dtype in REALS else 0, atol=0)
        assert torch.equal(twice, floored([1.0, 3.0, 5.0]))


@each("dtype", [one for one in INTEGERS if one is not torch.uint8])
def test_factors_and_averages_of_negative_integers_are_cut_toward_zero(dtype):
    """Horovod's `ScaleBufferCPUImpl` assigns a product in double to the integer, which C++ cuts."""

    def program(rank):
        mine = torch.tensor([-7, -1, 7, -8]).to(dtype)
        odd = mine if rank else torch.zeros(4, dtype=dtype)
        return [
            hvd.allreduce(mine, op=hvd.Sum, prescale_factor=0.5).tolist(),
            hvd.allreduce(mine, op=hvd.Sum, postscale_factor=0.3).tolist(),
            hvd.allreduce(odd).tolist(),
            hvd.allreduce(odd, postscale_factor=3.0).tolist(),
            hvd.reducescatter(odd)[: 2 - rank].tolist(),
        ]

    sums = [-14, -2, 14, -16]
    expected = [
        [2 * int(0.5 * one) for one in (-7, -1, 7, -8)],
        [int(0.3 * one) for one in sums],
        [int(one / 2) for one in (-7, -1, 7, -8)],
        [int(one * (3.0 / 2)) for one in (-7, -1, 7, -8)],
    ]
    first, second = returned(run_ranks(2, program))
    assert first[:4] == second[:4] == expected
    assert (first[4], second[4]) == ([-3, 0], [3])


def test_halves_are_multiplied_in_float32():
    def program(rank):
        return hvd.allreduce(torch.full((3,), 2049.0).half() + rank * 2, op=hvd.Sum, postscale_factor=1 / 3)

    total = torch.tensor(2048.0).half() + torch.tensor(2050.0).half()
    same(run_ranks(2, program), (total.float() * torch.tensor(1 / 3)).half().expand(3))


def test_an_operation_in_place_returns_the_tensor_it_was_given():
    def program(rank):
        whole, strided, scalar = torch.full((4, 6), float(rank)), torch.full((6, 4), float(rank)).T, torch.tensor(rank)
        lone = torch.full((4, 3), float(rank), requires_grad=True)
        assert hvd.allreduce_(whole, op=hvd.Sum) is whole
        assert hvd.synchronize(hvd.allreduce_async_(strided, op=hvd.Sum)) is strided
        group = [strided, scalar]
        assert all(a is b for a, b in zip(hvd.grouped_allreduce_(group, op=hvd.Sum), group, strict=True))
        assert hvd.allreduce_(lone, op=hvd.Sum) is lone and lone.grad_fn is None
        return whole.unique().tolist(), strided.unique().tolist(), scalar.item(), lone.unique().tolist()

    assert returned(run_ranks(2, program)) == [([1.0], [2.0], 1, [1.0])] * 2


def test_inputs_stay_as_they_were():
    def program(rank):
        mine = torch.arange(60).view(3, 4, 5).transpose(0, 2).float()
        before = mine.clone()
        group = [mine, mine.half(), torch.ones(ALONE_BYTES)]
        hvd.grouped_allreduce(group, op=hvd.Sum, prescale_factor=3.0)
        hvd.allreduce(mine, prescale_factor=3.0)
        hvd.reducescatter(mine, prescale_factor=3.0)
        hvd.broadcast(mine + rank, 1)
        assert torch.equal(mine, before) and torch.equal(group[1], before.half()) and group[2].unique() == 1
        return hvd.allreduce(mine, op=hvd.Sum)

    same(run_ranks(2, program), 2 * torch.arange(60).view(3, 4, 5).transpose(0, 2).float())


def test_a_group_may_mix_dtypes_shapes_and_sizes():
    def make(rank):
        shapes = [(3,), (), (0, 4), (2, 3), (ALONE_BYTES // 4,), (17, 17), (1,)]
        dtypes = [torch.float32, torch.int16, torch.float32, torch.float16, torch.float32, torch.int64, torch.bool]
        return [torch.ones(shape).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]

    def program(rank):
        return hvd.grouped_allreduce(make(rank), op=hvd.Sum), hvd.grouped_allreduce([])

    for results, none in returned(run_ranks(3, program)):
        assert none == []
        for result, one in zip(results, make(0), strict=True):
            assert result.dtype == one.dtype and torch.equal(result, (one * 3).to(one.dtype))


def test_many_names_are_under_way_at_once():
    def program(rank):
        mine = [torch.full((count % 7 + 1,), float(count)) for count in range(300)]
        handles = [hvd.allreduce_async(one, name=f"tensor {i}", op=hvd.Sum) for i, one in enumerate(mine)]
        in_place = [hvd.allreduce_async_(one.clone(), op=hvd.Average) for one in mine]
        for handle, one in zip(handles, mine, strict=True):
            assert torch.equal(hvd.synchronize(handle), one * 2)
        for handle, one in zip(in_place, mine, strict=True):
            assert torch.equal(hvd.synchronize(handle), one)
        return all(map(hvd.poll, handles + in_place))

    assert returned(run_ranks(2, program)) == [True, True]


@each("way, dtype", [(hvd.Compression.fp16, torch.float16), (hvd.Compression.bf16, torch.bfloat16)])
def test_compression_rounds_once_and_keeps_the_dtype(way, dtype):
    def program(rank):
        mine = torch.linspace(0, 1, 11, dtype=torch.float64)
        return hvd.allreduce(mine, compression=way, op=hvd.Sum), hvd.allreduce(torch.arange(3), compression=way)

    for real, whole in returned(run_ranks(2, program)):
        assert torch.equal(real, (2 * torch.linspace(0, 1, 11, dtype=torch.float64).to(dtype)).double())
        assert whole.tolist() == [0, 1, 2]


# How tensors are packed.


def test_small_tensors_of_a_dtype_travel_together_and_large_ones_alone():
    small, large = torch.empty(100), torch.empty(ALONE_BYTES // 4)
    double, none = torch.empty(10, dtype=torch.float64), torch.empty(0)
    assert partition([small, large, double, small, none, double]) == [[0, 3], [1], [2, 5]]


def test_flat_buffers_are_no_larger_than_said():
    tensors = [torch.empty(ALONE_BYTES // 8) for _ in range(FLAT_BYTES // (ALONE_BYTES // 2) + 1)]
    assert partition(tensors) == [list(range(len(tensors) - 1)), [len(tensors) - 1]]


def test_ranks_cut_alike_however_their_tensors_lie_in_memory():
    def program(rank):
        large = torch.ones(ALONE_BYTES // 4, 2)
        group = [large.T if rank else torch.ones(2, ALONE_BYTES // 4), torch.ones(3, 4).T if rank else torch.ones(4, 3)]
        return [result.unique().tolist() for result in hvd.grouped_allreduce(group, op=hvd.Sum)]

    assert returned(run_ranks(2, program)) == [[[2.0], [2.0]]] * 2


# Allgather.


@each("size", [1, 3])
def test_gathered_rows_are_those_of_the_ranks_in_order(size):
    dtypes = [*INTEGERS, *REALS, *COMPLEX, torch.bool]

    def program(rank):
        plain = [hvd.allgather(torch.full((2, 3), rank).to(dtype)) for dtype in dtypes]
        ragged = [hvd.allgather(torch.full((ROWS[rank], 3), rank).to(dtype)) for dtype in dtypes]
        return plain, ragged

    for plain, ragged in returned(run_ranks(size, program)):
        for dtype, even, uneven in zip(dtypes, plain, ragged, strict=True):
            assert torch.equal(even, torch.cat([torch.full((2, 3), rank).to(dtype) for rank in range(size)]))
            wanted = torch.cat([torch.full((ROWS[rank], 3), rank).to(dtype) for rank in range(size)])
            assert uneven.dtype == dtype and torch.equal(uneven, wanted)


def test_ranks_may_have_no_rows_and_rows_no_elements():
    def program(rank):
        some = hvd.allgather(torch.full((2 * rank, 2), float(rank)))
        return some.tolist(), hvd.allgather(torch.empty(0)).shape, hvd.allgather(torch.empty(rank + 1, 0, 2)).shape

    assert returned(run_ranks(2, program)) == [([[1.0, 1.0]] * 2, (0,), (3, 0, 2))] * 2


def test_a_group_is_gathered_as_one():
    def program(rank):
        first, second = hvd.grouped_allgather([torch.full((rank + 1,), rank), torch.full((1, 2), rank).half().T])
        handle = hvd.grouped_allgather_async([torch.tensor([rank])])
        return first.tolist(), second.tolist(), hvd.synchronize(handle)[0].tolist()

    assert returned(run_ranks(2, program)) == [([0, 1, 1], [[0.0], [0.0], [1.0], [1.0]], [0, 1])] * 2


# Broadcast.


def test_all_get_the_tensor_of_the_root():
    dtypes = [*INTEGERS, *REALS, *COMPLEX, torch.bool]

    def program(rank):
        results = []
        for dtype in dtypes:
            mine = torch.full((3, 2), rank).to(dtype)
            copy = hvd.broadcast(mine, 1)
            assert copy is not mine and torch.equal(mine, torch.full((3, 2), rank).to(dtype))
            assert hvd.broadcast_(mine.T, 1) is not mine
            results.append((copy.to(torch.complex128).real.unique().tolist(), torch.equal(mine, copy)))
        return results, hvd.broadcast(torch.tensor(rank + 5), 0).item(), hvd.broadcast(torch.empty(0, 3), 0).shape

    expected = ([([1.0], True)] * len(dtypes), 5, (0, 3))
    assert returned(run_ranks(2, program)) == [expected] * 2


def test_a_leaf_that_requires_a_gradient_is_replaced_without_being_recorded():
    def program(rank):
        weight = torch.nn.Parameter(torch.full((3,), float(rank)))
        assert hvd.broadcast_(weight, 1) is weight
        return weight.grad_fn is None and weight.tolist()

    assert returned(run_ranks(2, program)) == [[1.0] * 3] * 2


# Tensors that are not what they seem.


@each("count", [5, 300_000])
def test_a_tensor_that_is_given_twice_or_shares_memory_with_another_is_reduced_once(count):
    def program(rank):
        tensor = torch.full((count,), rank + 1.0)
        whole = torch.full((count + 3,), rank + 1.0)
        hvd.grouped_allreduce_([tensor, tensor, whole[:-3], torch.ones(2), whole[3:]], op=hvd.Sum, prescale_factor=2.0)
        return tensor.unique().tolist(), whole.unique().tolist()

    assert returned(run_ranks(2, program)) == [([6.0], [6.0])] * 2


def test_tensors_of_inference_mode_can_be_sent_within_it_and_without():
    def program(rank):
        with torch.inference_mode():
            ones = torch.full((4,), rank + 1.0)
            inner = [
                hvd.allreduce(ones, op=hvd.Sum, prescale_factor=2.0),
                hvd.allreduce_(ones.clone(), op=hvd.Average),
                hvd.allreduce(ones, op=hvd.Adasum),
                hvd.allgather(ones),
                hvd.broadcast_(torch.full((2, 3), float(rank)).T, 1),
                hvd.reducescatter(ones, op=hvd.Sum),
            ]
        assert not hvd.allreduce(ones).is_inference()
        return [one.flatten().tolist() for one in inner]

    expected = [[6.0] * 4, [1.5] * 4, [1.5] * 4, [1.0] * 4 + [2.0] * 4, [1.0] * 6, [3.0] * 2]
    assert returned(run_ranks(2, program)) == [expected] * 2


def test_conjugates_and_negatives_are_sent_as_what_they_stand_for():
    def program(rank):
        conjugate = torch.tensor([1 + 2j, 3j]).conj()
        negative = conjugate.imag
        assert negative.is_neg()
        return [
            hvd.allreduce(conjugate, op=hvd.Sum).tolist(),
            hvd.broadcast(conjugate, 0).tolist(),
            hvd.allgather(negative).tolist(),
            hvd.allreduce(negative, op=hvd.Sum).tolist(),
        ]

    expected = [[2 - 4j, -6j], [1 - 2j, -3j], [-2.0, -3.0, -2.0, -3.0], [-4.0, -6.0]]
    assert returned(run_ranks(2, program)) == [expected] * 2


@each("tensor", [torch.ones(1).expand(4), torch.tensor([1j]).conj()])
def test_what_cannot_be_written_to_is_refused_before_anything_is_begun(tensor):
    def program(rank):
        for call in (hvd.allreduce_, lambda one: hvd.broadcast_(one, 0)):
            with pytest.raises(ValueError, match=r"cannot write to .*; clone\(\) it"):
                call(tensor)
        return hvd.allreduce(tensor, op=hvd.Sum).tolist()

    assert returned(run_ranks(2, program)) == [(2 * tensor).tolist()] * 2


# Alltoall.


@each("size", [1, 2, 3])
def test_everything_received_equals_its_sender(size):
    def program(rank):
        results = []
        for dims in (1, 2, 3):
            rows = size * (rank + 1)
            mine = torch.full((rows, *(2,) * (dims - 1)), rank, dtype=torch.int64)
            results.append(hvd.alltoall(mine, torch.tensor([rank + 1] * size, dtype=torch.int32)))
        return results

    for results in returned(run_ranks(size, program)):
        for dims, (received, splits) in enumerate(results, 1):
            assert splits.dtype == torch.int32 and splits.tolist() == list(range(1, size + 1))
            assert received.numel() == size * (size + 1) // 2 * 2 ** (dims - 1)
            senders = torch.repeat_interleave(torch.arange(size), torch.arange(1, size + 1))
            assert torch.equal(received.view(len(senders), -1)[:, 0], senders)


def test_without_splits_all_get_equally_many_rows():
    def program(rank):
        return [hvd.alltoall(torch.arange(4).to(dtype) + 10 * rank).tolist() for dtype in (*INTEGERS, *REALS)]

    assert returned(run_ranks(2, program)) == [[[0, 1, 10, 11]] * 9, [[2, 3, 12, 13]] * 9]


def test_a_rank_may_send_all_to_one_and_nothing_to_others():
    def program(rank):
        mine = torch.full((3, 2), rank)
        to_second = hvd.alltoall(mine, torch.tensor([0, 3], dtype=torch.int32))
        nothing = hvd.alltoall(mine, torch.tensor([0, 0], dtype=torch.int32))
        flat = hvd.alltoall(torch.empty(2, 0), torch.tensor([1, 1], dtype=torch.int32))
        handle = hvd.alltoall_async(torch.empty(0, 2))
        return [*map(list, (to_second[0].shape, to_second[1], nothing[0].shape, flat[0].shape))], hvd.synchronize(
            handle
        )

    first, second = returned(run_ranks(2, program))
    assert first[0] == [[0, 2], [0, 0], [0, 2], [2, 0]] and first[1].shape == (0, 2)
    assert second[0] == [[6, 2], [3, 3], [0, 2], [2, 0]]


# Reducescatter.


@each("size", [1, 2, 3])
def test_each_rank_gets_its_rows_of_the_sum(size):
    dtypes = [*INTEGERS, *REALS]

    def program(rank):
        return [hvd.reducescatter(numbers(dtype, 2).repeat(4 * size, 1), op=hvd.Sum) for dtype in dtypes]

    for rank, results in enumerate(returned(run_ranks(size, program))):
        for dtype, result in zip(dtypes, results, strict=True):
            whole = numbers(dtype, 2).repeat(4 * size, 1) * size
            assert result.dtype == dtype and torch.equal(result, whole[rank * 20 : rank * 20 + 20])


def test_the_first_ranks_have_one_row_more_and_the_last_may_have_none():
    def program(rank):
        mine = torch.arange(8).view(4, 2)
        few = hvd.reducescatter(torch.ones(1, 2), op=hvd.Sum)
        scaled = hvd.reducescatter(mine, op=hvd.Sum, prescale_factor=0.5, postscale_factor=2.0)
        return hvd.reducescatter(mine).tolist(), list(few.shape), scaled.tolist()

    first, second, third = returned(run_ranks(3, program))
    assert first == ([[0, 1], [2, 3]], [1, 2], [[0, 0], [6, 6]])
    assert second == ([[4, 5]], [0, 2], [[12, 12]])
    assert third == ([[6, 7]], [0, 2], [[18, 18]])


def test_a_group_is_scattered_as_one_and_may_be_compressed():
    def program(rank):
        first, second = hvd.grouped_reducescatter([torch.ones(2), torch.ones(4, dtype=torch.int16)], op=hvd.Sum)
        small = hvd.reducescatter(torch.full((2, 2), 0.1), compression=hvd.Compression.fp16)
        handle = hvd.reducescatter_async(torch.ones(2), op=hvd.Average)
        return first.tolist(), second.tolist(), small.dtype, small.unique().tolist(), hvd.synchronize(handle).tolist()

    expected = ([2.0], [2, 2], torch.float32, [torch.tensor(0.1).half().float().item()], [1.0])
    assert returned(run_ranks(2, program)) == [expected] * 2


# Sparse.


def test_sparse_tensors_are_added_without_their_zeros():
    def program(rank):
        indices = torch.tensor([[0, rank + 1, rank + 1], [0, 1, 1]])
        mine = torch.sparse_coo_tensor(indices, torch.tensor([2.0, 4.0, 4.0]), (4, 2), check_invariants=True)
        total = hvd.synchronize(hvd.sparse_allreduce_async(mine, "table", hvd.Sum))
        assert total.is_sparse and total._nnz() == 6
        average, dense = hvd.allreduce(mine), hvd.allreduce(mine.to_dense())
        rows = torch.sparse_coo_tensor(
            [[rank]], torch.ones(1, 3), (5, 3), check_invariants=True
        )  # values that are rows
        return torch.equal(average.to_dense(), dense), hvd.allreduce(rows, op=hvd.Sum).to_dense()[:, 0].tolist()

    assert returned(run_ranks(2, program)) == [(True, [1.0, 1.0, 0.0, 0.0, 0.0])] * 2


# What is refused on the rank that asks for it.

REFUSED = {
    "a NumPy array": (lambda: hvd.allreduce(np.ones(3)), TypeError, "torch.from_numpy"),
    "a list": (lambda: hvd.broadcast([1.0], 0), TypeError, "broadcast takes torch tensors, not list"),
    "a sparse tensor": (lambda: hvd.allgather(torch.eye(2).to_sparse()), TypeError, "dense tensors"),
    "a dense tensor as sparse": (lambda: hvd.sparse_allreduce_async(torch.eye(2)), TypeError, "sparse COO"),
    "two ways to say it": (
        lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum),
        ValueError,
        "provide only one of them",
    ),
    "an average of bools": (lambda: hvd.allreduce(torch.ones(1).bool()), TypeError, "no average"),
    "an order of complex numbers": (
        lambda: hvd.allreduce(torch.ones(1).cfloat(), op=hvd.Max),
        TypeError,
        "have no order",
    ),
    "a type nobody reduces": (
        lambda: hvd.allreduce(torch.ones(1).to(torch.float8_e5m2)),
        TypeError,
        "float8_e5m2 tensors is not possible",
    ),
    "an unknown root": (lambda: hvd.broadcast(torch.ones(1), 1), ValueError, "root_rank 1 is not one of"),
    "rows of a scalar": (lambda: hvd.allgather(torch.tensor(1)), ValueError, r"reshape\(1\)"),
    "a scattered scalar": (lambda: hvd.reducescatter(torch.tensor(1)), ValueError, "scalar"),
    "a scattered maximum": (
        lambda: hvd.reducescatter(torch.ones(1), op=hvd.Max),
        NotImplementedError,
        "Average and Sum",
    ),
    "too many rows": (lambda: hvd.alltoall(torch.ones(1), torch.tensor([2], dtype=torch.int32)), ValueError, "has 1"),
    "long splits": (lambda: hvd.alltoall(torch.ones(1), torch.tensor([1])), ValueError, "int32"),
    "two splits": (
        lambda: hvd.alltoall(torch.ones(2), torch.tensor([1, 1], dtype=torch.int32)),
        ValueError,
        "needs 1 numbers",
    ),
    "negative splits": (
        lambda: hvd.alltoall(torch.ones(2), torch.tensor([-1], dtype=torch.int32)),
        ValueError,
        "splits are",
    ),
}


@each("what", REFUSED)
def test_what_cannot_be_done_is_refused_with_a_sentence_that_says_what_can(what):
    call, error, sentence = REFUSED[what]
    (raised,) = run_ranks(1, lambda _: call())
    assert isinstance(raised, error)
    with pytest.raises(error, match=sentence):
        raise raised


ON_ONE_RANK = {
    "both arguments": (
        lambda: hvd.allreduce_async(torch.ones(2), True, op=hvd.Sum),
        lambda: hvd.allreduce(torch.ones(2)),
    ),
    "a dense tensor": (
        lambda: hvd.sparse_allreduce_async(torch.ones(2)),
        lambda: hvd.allreduce(torch.eye(2).to_sparse()),
    ),
    "an epoch": (
        lambda: hvd.broadcast_parameters({"epoch": 3}),
        lambda: hvd.broadcast_parameters({"epoch": torch.ones(1)}),
    ),
    "an unknown root": (lambda: hvd.broadcast_object(1, 5), lambda: hvd.broadcast_object(1, 0)),
    "a scattered maximum": (
        lambda: hvd.reducescatter(torch.ones(2), op=hvd.Max),
        lambda: hvd.reducescatter(torch.ones(2)),
    ),
}


@each("what", ON_ONE_RANK)
def test_what_is_refused_on_one_rank_raises_on_the_other_and_both_go_on(what):
    wrong, right = ON_ONE_RANK[what]

    def program(rank):
        with pytest.raises((NotImplementedError, TypeError, ValueError) if rank else CollectiveError) as raised:
            (wrong if rank else right)()
        return str(raised.value), hvd.allreduce(torch.tensor(1.0), op=hvd.Sum).item()

    (told, total), (own, other) = returned(run_ranks(2, program))
    assert own in told and "rank 1" in told and total == other == 2.0


def test_rows_that_do_not_divide_need_splits():
    results = run_ranks(2, lambda _: hvd.alltoall(torch.ones(3)))
    assert all(isinstance(result, ValueError) and "3 rows" in str(result) for result in results)


def test_a_single_element_may_have_any_stride():
    def program(rank):
        one = torch.full((1,), rank + 1.0).as_strided((1, 1), (1, 0))
        return hvd.allgather(one).tolist(), hvd.broadcast(one, 1).tolist()

    assert returned(run_ranks(2, program)) == [([[1.0], [2.0]], [[2.0]])] * 2
