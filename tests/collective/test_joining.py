"""Ranks that have no more data let the others go on."""

import pytest
import torch

import kvdist.collective as hvd
from kvdist.collective.operations import zeros_operation
from kvdist.errors import CollectiveError, CollectiveMismatch
from kvdist.protocol.collective import Participate
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


@each("dtype", [torch.float32, torch.int16, torch.float16])
def test_an_average_with_those_who_have_joined_divides_by_the_number_of_all(dtype):
    def program(rank):
        results = []
        if rank:
            results = [hvd.allreduce(torch.full((17, 3), 12, dtype=dtype), name=str(i)).max().item() for i in range(3)]
        return results, hvd.join()

    first, *others = returned(run_ranks(3, program))
    assert first[0] == []
    assert [results for results, _ in others] == [[8, 8, 8]] * 2
    assert {last for _, last in (first, *others)} <= {1, 2}
    assert len({last for _, last in (first, *others)}) == 1


def test_ranks_may_join_one_after_the_other_and_the_last_is_returned_and_all_go_on():
    def program(rank):
        seen = []
        for step in range(4 * (rank + 1)):
            seen.append(hvd.allreduce(torch.ones(5), op=hvd.Sum, name=f"g{step % 2}")[0].item())
        last = hvd.join()
        return seen, last, hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist()

    results = returned(run_ranks(3, program))
    assert [seen for seen, _, _ in results] == [[3.0] * 4, [3.0] * 4 + [2.0] * 4, [3.0] * 4 + [2.0] * 4 + [1.0] * 4]
    assert [last for _, last, _ in results] == [2, 2, 2]
    assert [after for _, _, after in results] == [[3.0, 3.0]] * 3


def test_groups_of_tensors_are_played_too():
    def program(rank):
        if rank == 0:
            return hvd.join()
        tensors = [torch.ones(2), torch.ones(3, 0), torch.ones((), dtype=torch.float64), torch.ones(70_000)]
        results = hvd.grouped_allreduce(tensors, op=hvd.Sum)
        assert all(torch.equal(result, tensor) for result, tensor in zip(results, tensors, strict=True))
        return hvd.join()

    assert returned(run_ranks(2, program)) == [1, 1]


REFUSED = {
    "allgather": lambda: hvd.allgather(torch.ones(2)),
    "broadcast": lambda: hvd.broadcast(torch.ones(2), 1),
    "alltoall": lambda: hvd.alltoall(torch.ones(3)),
    "reducescatter": lambda: hvd.reducescatter(torch.ones(2)),
    "barrier": lambda: hvd.barrier(),
    "Min": lambda: hvd.allreduce(torch.ones(2), op=hvd.Min),
    "Product": lambda: hvd.allreduce(torch.ones(2), op=hvd.Product),
}


@each("what", REFUSED)
def test_what_zeros_would_falsify_raises_while_somebody_has_joined(what):
    def program(rank):
        if rank:
            with pytest.raises(CollectiveMismatch, match="rank 0 called join"):
                REFUSED[what]()
        return hvd.join()

    assert set(returned(run_ranks(3, program))) <= {1, 2}


def test_join_again_and_again():
    def program(rank):
        return [hvd.join() for _ in range(3)][-1] in (0, 1)

    assert returned(run_ranks(2, program)) == [True, True]


def test_operations_that_are_under_way_when_all_join_are_done():
    def program(rank):
        handles = [hvd.allreduce_async(torch.full((3,), float(rank)), op=hvd.Sum, name=f"{i}") for i in range(30)]
        hvd.join()
        return [hvd.synchronize(handle)[0].item() for handle in handles]

    assert returned(run_ranks(3, program)) == [[3.0] * 30] * 3


def test_join_behind_a_pending_operation_lets_the_others_go_on_and_that_one_takes_part_as_it_is():
    """Horovod counts a join when it is called. What the rank called before has its values, the rest zeros."""

    def program(rank):
        if rank == 0:
            handle = hvd.allreduce_async(torch.full((2,), 5.0), name="a", op=hvd.Sum)
            unnamed = hvd.allreduce_async(torch.full((3,), 7.0), op=hvd.Sum)
            last = hvd.join()
            return hvd.synchronize(handle).tolist(), hvd.synchronize(unnamed).tolist(), last
        b = hvd.allreduce(torch.ones(2), name="b", op=hvd.Sum).tolist()
        assert b == [1.0, 1.0]
        a = hvd.allreduce(torch.ones(2), name="a", op=hvd.Sum).tolist()
        return a, hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist(), hvd.join()

    assert returned(run_ranks(2, program)) == [([6.0, 6.0], [8.0, 8.0, 8.0], 1)] * 2


def test_what_only_a_rank_that_has_joined_called_is_summed_with_zeros_once_all_have():
    def program(rank):
        handle = hvd.allreduce_async(torch.full((2,), 1.0 + rank), name=f"only {rank}", op=hvd.Sum)
        hvd.join()
        return hvd.synchronize(handle).tolist()

    assert returned(run_ranks(2, program)) == [[1.0, 1.0], [2.0, 2.0]]


def test_a_rank_in_join_hears_of_one_that_leaves():
    def program(rank):
        if rank == 0:
            with pytest.raises(CollectiveError, match="rank 1 on host .* is gone"):
                hvd.join()
        return rank

    assert returned(run_ranks(2, program)) == [0, 1]


def test_alone_one_is_the_last():
    assert returned(run_ranks(1, lambda rank: (hvd.join(), hvd.allreduce(torch.ones(1)).item(), rank))) == [(0, 1.0, 0)]


@each("text", ["float32[*, 3]", "nonsense[3]", "float32[-1]", "float32", "Tensor[2]"])
def test_zeros_are_made_of_nothing_but_a_dtype_and_a_shape(text):
    with pytest.raises(CollectiveError, match="cannot make zeros"):
        zeros_operation(Participate(0, 0, "allreduce", "", (text,), "Sum"))
