"""Some of the ranks among themselves."""

import threading

import pytest
import torch

import kvdist.collective as hvd
from kvdist.collective.basics import current
from kvdist.collective.process_sets import ProcessSet, add_process_sets
from kvdist.errors import CollectiveMismatch, ProcessSetError, RankLostError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def test_even_and_odd_ranks_have_results_of_their_own():
    def program(rank):
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set(ProcessSet(1, 3))
        mine = even if even.included() else odd
        assert even.included() != odd.included()
        sums = hvd.allreduce(torch.full((17,), float(rank)), op=hvd.Sum, process_set=mine)
        rows = hvd.allgather(torch.full((rank + 1, 2), rank), process_set=mine)
        root = hvd.broadcast(torch.tensor([rank]), root_rank=mine.ranks[1], process_set=mine)
        hvd.barrier()  # a rank that ends is lost to the others, whatever set they wait in
        return mine.process_set_id, mine.size(), mine.rank(), sums[0].item(), rows[:, 0].tolist(), root.item()

    assert returned(run_ranks(4, program)) == [
        (1, 2, 0, 2.0, [0, 2, 2, 2], 2),
        (2, 2, 0, 4.0, [1, 1, 3, 3, 3, 3], 3),
        (1, 2, 1, 2.0, [0, 2, 2, 2], 2),
        (2, 2, 1, 4.0, [1, 1, 3, 3, 3, 3], 3),
    ]


def test_ids_count_from_that_of_all_ranks_and_are_not_used_again():
    def program(rank):
        first, rest = hvd.add_process_set([0]), hvd.add_process_set([2, 1])
        ids = [hvd.global_process_set.process_set_id, first.process_set_id, rest.process_set_id]
        assert (hvd.global_process_set.ranks, rest.ranks) == ([0, 1, 2], [1, 2])
        assert hvd.global_process_set.size() == 3 and hvd.global_process_set.rank() == rank
        assert hvd.remove_process_set(first)
        return [*ids, hvd.add_process_set([0]).process_set_id]

    assert returned(run_ranks(3, program)) == [[0, 1, 2, 3]] * 3


@each("ranks", [[0, 2], [2, 0], [], [0, 0], [0, 3], [-1]])
def test_a_set_that_there_is_or_cannot_be_is_refused(ranks):
    def program(rank):
        hvd.add_process_set([0, 2])
        with pytest.raises(ValueError):
            hvd.add_process_set(ranks)
        return hvd.add_process_set([1]).process_set_id

    assert returned(run_ranks(3, program)) == [2, 2, 2]


@each("members", [0.5, "01", object()])
def test_what_is_no_rank_is_refused_whatever_it_is(members):
    with pytest.raises(ValueError, match="members of a process set must be integers"):
        ProcessSet(members)


@each("sets", [[[0], [0, 7]], [[0], [0.5]]])
def test_a_list_with_a_bad_set_is_the_same_error_on_all_ranks(sets):
    def program(rank):
        with pytest.raises(ValueError) as caught:
            add_process_sets(sets)
        return str(caught.value)

    results = returned(run_ranks(3, program))
    assert results == results[:1] * 3


def test_a_list_may_name_a_set_twice_and_in_any_order_of_ranks():
    def program(rank):
        rest, again, everybody = ProcessSet([2, 1] if rank else [1, 2]), ProcessSet(1, 2), ProcessSet(2, 1, 0)
        add_process_sets([[0], rest, everybody, again, [0]])
        return rest.process_set_id, everybody.process_set_id, again.process_set_id, dict(current().sets)

    # As in Horovod's test of sets that are given to init: later ones of the same ranks are ignored.
    known = {0: (0, 1, 2), 1: (0,), 2: (1, 2)}
    assert returned(run_ranks(3, program)) == [(2, None, None, known)] * 3


def test_lists_of_different_lengths_are_the_same_error_on_all_ranks():
    def program(rank):
        with pytest.raises(CollectiveMismatch) as caught:
            add_process_sets([[0]] if rank else [[0], [1]])
        return str(caught.value)

    first, second = returned(run_ranks(2, program))
    assert first == second and "rank 0 init (2 process sets), rank 1 init (1 process sets)" in first


def test_ranks_that_add_different_sets_all_get_an_error():
    def program(rank):
        with pytest.raises(CollectiveMismatch, match="add_process_set") as caught:
            hvd.add_process_set([rank])
        return str(caught.value), hvd.add_process_set([0]).process_set_id

    (first, number), second = returned(run_ranks(2, program))
    assert second == (first, number) == ((first, 1))
    assert "rank 0 add_process_set (ranks 0), rank 1 add_process_set (ranks 1)" in first


def test_a_set_can_be_removed_and_added_again_and_that_of_all_cannot_be_removed():
    def program(rank):
        pair = hvd.add_process_set([0, 1])
        assert hvd.remove_process_set(hvd.global_process_set) is False
        assert hvd.remove_process_set(pair) is True
        assert hvd.remove_process_set(pair) is False
        assert hvd.remove_process_set(ProcessSet(0, 1)) is False
        with pytest.raises(ValueError, match="is not registered"):
            hvd.barrier(pair)
        hvd.add_process_set(pair)
        if rank < 2:
            hvd.barrier(pair)
        return pair.process_set_id

    assert returned(run_ranks(3, program)) == [2, 2, 2]


def test_a_rank_that_is_not_in_a_set_cannot_use_it_and_disturbs_nobody():
    def program(rank):
        first = hvd.add_process_set([0])
        if rank == 0:
            hvd.barrier(first)
            return first.rank()
        with pytest.raises(ProcessSetError, match=r"rank 1 is not in process set 1, of ranks \[0\]"):
            hvd.barrier(first)
        with pytest.raises(ValueError, match="rank 1 is not in"):
            first.rank()
        return first.included()

    assert returned(run_ranks(2, program)) == [0, False]


def test_a_set_that_waits_keeps_nobody_else_waiting():
    def program(rank):
        even, odd = hvd.add_process_set([0, 2]), hvd.add_process_set([1])
        if rank == 1:
            for _ in range(5):
                hvd.barrier(odd)
            go_on.set()
        if rank == 2:
            assert go_on.wait(30)
        if rank != 1:
            hvd.barrier(even)
        hvd.barrier()
        return rank

    go_on = threading.Event()
    assert returned(run_ranks(3, program)) == [0, 1, 2]


def test_rank_0_stays_for_a_set_of_others_until_they_have_left():
    def program(rank):
        rest = hvd.add_process_set([1, 2])
        if rank == 0:
            hvd.add_process_set([0, 1])
            left.set()
            return None
        hvd.add_process_set([0, 1])
        assert left.wait(30)
        sums = [hvd.allreduce(torch.ones(3), op=hvd.Sum, name=str(i), process_set=rest)[0].item() for i in range(20)]
        with pytest.raises(RankLostError, match="rank 0 on host"):
            hvd.barrier()
        return sum(sums)

    left = threading.Event()
    assert returned(run_ranks(3, program)) == [None, 40.0, 40.0]


def test_a_rank_that_leaves_ends_what_it_never_calls_and_still_does_what_it_has_called():
    def program(rank):
        first, second = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
        if rank == 1:
            hvd.allreduce_async(torch.full((3,), 5.0), op=hvd.Sum, name="pending")
            return None  # and the engine is closed, which waits for the others to call it too
        with pytest.raises(RankLostError, match="rank 1 on host .* has ended"):
            hvd.barrier(second if rank else first)
        return hvd.allreduce(torch.full((3,), float(rank)), op=hvd.Sum, name="pending").tolist()

    assert returned(run_ranks(3, program)) == [[7.0] * 3, None, [7.0] * 3]


def test_nothing_is_kept_of_sets_that_were_removed():
    def program(rank):
        for _ in range(3):
            made = hvd.add_process_set([0, 1])
            if rank < 2:
                hvd.allreduce(torch.ones(3), process_set=made)
            hvd.remove_process_set(made)
        engine = current()
        hvd.barrier()
        return len(engine._control.check._calls_of), len(engine._closing), list(engine._groups), list(engine.sets)

    assert returned(run_ranks(3, program)) == [(1, 0, [0], [0])] * 3


def test_sets_are_forgotten_with_their_engine():
    def program(_):
        return hvd.add_process_set([0])

    for made in returned(run_ranks(2, program)):
        assert (made.size(), made.rank(), made.included()) == (None, None, None), "as in Horovod"


def test_a_set_that_is_removed_finishes_what_was_called():
    def program(rank):
        pair = hvd.add_process_set([0, 1])
        # New to rank 0, which has to compare it before it hears that the set is no more.
        handle = hvd.allreduce_async(torch.ones(3), op=hvd.Sum, process_set=pair) if rank < 2 else None
        removed = hvd.remove_process_set(pair)
        return removed, handle and hvd.synchronize(handle).tolist()

    assert returned(run_ranks(3, program)) == [(True, [2.0] * 3), (True, [2.0] * 3), (True, None)]
