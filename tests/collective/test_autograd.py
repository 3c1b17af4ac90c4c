"""Gradients through the operations, with the values of Horovod's tests."""

from __future__ import annotations

import pytest
import torch

import kvdist.collective as hvd
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

SIZE = 3


def leaf(*shape, value=1.0):
    return torch.full(shape, value, requires_grad=True)


def gradient(result, *inputs, factor=1.0):
    (result * factor).sum().backward()
    return [one.grad for one in inputs]


def test_the_gradient_of_a_sum_is_the_sum_of_gradients_and_that_of_an_average_their_average():
    def program(rank):
        grads = []
        for op in (hvd.Sum, hvd.Average):
            mine = leaf(2, 3)
            grads += gradient(hvd.allreduce(mine, op=op), mine)
        own = leaf(2)  # each rank with another gradient
        grads += gradient(hvd.allreduce(own, op=hvd.Sum), own, factor=rank + 1.0)
        return [grad.unique().tolist() for grad in grads]

    assert returned(run_ranks(SIZE, program)) == [[[3.0], [1.0], [6.0]]] * SIZE


def test_factors_and_compression_count_in_gradients_too():
    def program(rank):
        scaled, small, both = leaf(2), leaf(2), [leaf(3), leaf(1)]
        grads = gradient(hvd.allreduce(scaled, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), scaled)
        compressed = hvd.allreduce(small, compression=hvd.Compression.fp16, op=hvd.Sum)
        assert compressed.dtype == torch.float32
        grads += gradient(compressed, small)
        first, _ = hvd.grouped_allreduce(both, op=hvd.Sum)  # the second one is not used
        grads += gradient(first, *both)
        return [grad.tolist() for grad in grads]

    expected = [[6.0, 6.0], [3.0, 3.0], [3.0] * 3, [0.0]]
    assert returned(run_ranks(SIZE, program)) == [expected] * SIZE


def test_gathered_rows_bring_back_the_average_of_their_gradients():
    def program(rank):
        mine = leaf(rank + 1, 2)
        result = hvd.allgather(mine)
        weights = torch.arange(float(len(result))).unsqueeze(1) + rank  # mean over the ranks: number of the row + 1
        return gradient(result, mine, factor=weights)[0].tolist()

    assert returned(run_ranks(SIZE, program)) == [
        [[1.0, 1.0]],
        [[2.0, 2.0], [3.0, 3.0]],
        [[4.0, 4.0], [5.0, 5.0], [6.0, 6.0]],
    ]


def test_of_a_broadcast_the_root_alone_has_a_gradient():
    def program(rank):
        mine = leaf(2, value=float(rank))
        result = hvd.broadcast(mine, 1)
        assert result.tolist() == [1.0, 1.0]
        return gradient(result, mine)[0].tolist()

    assert returned(run_ranks(SIZE, program)) == [[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]


@each("with_splits", [False, True])
def test_gradients_of_exchanged_rows_go_back_to_their_senders(with_splits):
    def program(rank):
        mine = leaf(SIZE * (rank + 1) + (2 if with_splits else 0), 2)
        splits = torch.full((SIZE,), rank + 1, dtype=torch.int32) if with_splits else None
        result = hvd.alltoall(mine, splits)
        rows, received = result if with_splits else (result, None)
        assert received is None or received.tolist() == [1, 2, 3]
        return gradient(rows, mine, factor=rank + 1.0)[0][:, 0].tolist()

    for rank, grads in enumerate(returned(run_ranks(SIZE, program))):
        to_ranks = [receiver + 1.0 for receiver in range(SIZE) for _ in range(rank + 1)]
        assert grads == to_ranks + ([0.0, 0.0] if with_splits else [])


def test_the_gradient_of_a_scattered_sum_is_the_number_of_ranks():
    def program(rank):
        grads = []
        for op, before, after in [(hvd.Sum, 1.0, 1.0), (hvd.Average, 1.0, 1.0), (hvd.Sum, 0.5, 4.0)]:
            mine = leaf(4, 2)
            result = hvd.reducescatter(mine, op=op, prescale_factor=before, postscale_factor=after)
            grads += gradient(result, mine)
        return [grad.unique().tolist() for grad in grads]

    assert returned(run_ranks(SIZE, program)) == [[[3.0], [1.0], [6.0]]] * SIZE


def test_second_derivatives_go_through_too():
    def program(rank):
        mine = leaf(2, value=2.0)
        (slope,) = torch.autograd.grad(hvd.allreduce(mine**3, op=hvd.Sum).sum(), mine, create_graph=True)
        return slope.tolist(), gradient(slope, mine)[0].tolist()

    assert returned(run_ranks(2, program)) == [([24.0, 24.0], [24.0, 24.0])] * 2


def test_what_has_no_gradient_says_so_in_the_backward_pass():
    def program(rank):
        mine = leaf(2)
        result = hvd.allreduce(mine, op=hvd.Max)
        with pytest.raises(RuntimeError, match=r"Max has no gradient; pass tensor.detach\(\)"):
            result.sum().backward()
        plain = hvd.allreduce(mine.detach(), op=hvd.Max)
        with torch.no_grad():
            return plain.requires_grad, hvd.allreduce(mine).requires_grad

    assert returned(run_ranks(2, program)) == [(False, False)] * 2
