"""Adasum against its formula."""

from __future__ import annotations

import pytest
import torch

import kvdist.collective as hvd
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def formula(vectors):
    """Pairs of neighbours, then pairs of pairs, in float64."""
    vectors = [vector.double() for vector in vectors]
    while len(vectors) > 1:
        vectors = [pair(a, b) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def pair(a, b):
    def coefficient(own):
        square = own.dot(own).item()
        return 1.0 if square < 1.5e-154 else 1.0 - a.dot(b).item() / (2 * square)

    return coefficient(a) * a + coefficient(b) * b


def vector(rank, elements, dtype=torch.float32):
    return torch.randn(elements, generator=torch.Generator().manual_seed(rank)).to(dtype)


@each("size, elements", [(1, 5), (2, 1), (2, 17), (4, 3), (4, 1001), (8, 37)])
def test_the_result_is_that_of_the_formula_on_all_ranks(size, elements):
    def program(rank):
        return hvd.allreduce(vector(rank, elements), op=hvd.Adasum)

    results = returned(run_ranks(size, program))
    expected = formula([vector(rank, elements) for rank in range(size)])
    torch.testing.assert_close(results[0].double(), expected, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(result, results[0]) for result in results)  # to the bit, or ranks would drift apart


def test_each_tensor_of_a_group_is_a_vector_of_its_own():
    dtypes = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float32]
    sizes = [7, 5, 3, 4, 0]

    def make(rank):
        return [vector(rank, count, dtype) for count, dtype in zip(sizes, dtypes, strict=True)]

    def program(rank):
        mine = make(rank)
        results = hvd.grouped_allreduce(mine, op=hvd.Adasum)
        hvd.grouped_allreduce_(mine, op=hvd.Adasum)
        assert all(torch.equal(a, b) for a, b in zip(mine, results, strict=True))
        return results

    for results in returned(run_ranks(4, program)):
        for result, dtype, *vectors in zip(results, dtypes, *(make(rank) for rank in range(4)), strict=True):
            assert result.dtype == dtype
            expected = formula(vectors)
            small = {torch.float16: 2e-3, torch.bfloat16: 2e-2, torch.float64: 1e-14}.get(dtype, 1e-5)
            torch.testing.assert_close(result.double(), expected, rtol=small, atol=small)


@each("scale", [1e-18, 1e-3, 1.0, 1e18])
def test_orthogonal_vectors_are_added_and_parallel_ones_averaged(scale):
    def program(rank):
        own = torch.zeros(4)
        own[rank] = scale
        parallel = torch.full((2, 2), scale) * (1 + 2 * (rank % 2))  # lengths 1 and 3
        return hvd.allreduce(own, op=hvd.Adasum), hvd.allreduce(parallel, op=hvd.Adasum)

    for orthogonal, parallel in returned(run_ranks(4, program)):
        torch.testing.assert_close(orthogonal / scale, torch.ones(4))
        torch.testing.assert_close(parallel / scale, torch.full((2, 2), 2.0))


def test_zero_and_tiny_vectors_change_nothing_and_overflow_nothing():
    def program(rank):
        huge_and_zero = torch.full((3,), 3e38 if rank else 0.0)
        huge_and_tiny = torch.full((3,), 3e38 if rank else 1e-45)
        return [hvd.allreduce(mine, op=hvd.Adasum).tolist() for mine in (huge_and_zero, huge_and_tiny, torch.zeros(2))]

    big = [torch.tensor(3e38).item()] * 3
    for zero, tiny, nothing in returned(run_ranks(2, program)):
        assert zero == big and nothing == [0.0, 0.0]
        assert tiny == pytest.approx([1.5e38] * 3)  # parallel, so it is their mean


def test_factors_multiply_before_and_after():
    def program(rank):
        return hvd.allreduce(torch.ones(3), op=hvd.Adasum, prescale_factor=2.0, postscale_factor=3.0).tolist()

    assert returned(run_ranks(2, program)) == [[6.0] * 3] * 2


def test_ranks_that_are_no_power_of_two_and_integers_are_refused():
    def program(rank):
        return hvd.allreduce(torch.ones(3), op=hvd.Adasum)

    for error in run_ranks(3, program):
        assert isinstance(error, NotImplementedError) and "Adasum needs a power of two of ranks, got 3" in str(error)
    (error,) = run_ranks(1, lambda _: hvd.allreduce(torch.ones(3).int(), op=hvd.Adasum))
    assert isinstance(error, TypeError) and "floating-point tensors, not int32" in str(error)
