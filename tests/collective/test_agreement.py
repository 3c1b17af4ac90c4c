"""Ranks that call different things all get the same error, and go on."""

import random
import re
import threading
import time

import pytest
import torch

import kvdist.horovod as hvd
from kvdist.collective import coordinator
from kvdist.collective.basics import current, using
from kvdist.collective.consistency import STUCK_S
from kvdist.collective.group import Group
from kvdist.collective.operations import Operation
from kvdist.collective.signature import Signature
from kvdist.config.settings import CollectiveSettings
from kvdist.errors import CollectiveError, CollectiveMismatch, RankLostError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def splits(*numbers, dtype=torch.int32):
    return torch.tensor(numbers, dtype=dtype)


ONES = torch.ones(6)
JOBS = 40
DIFFERENT = {
    "shape": lambda rank: hvd.allreduce(torch.ones(17 + rank)),
    "dimensions": lambda rank: hvd.allreduce(torch.ones([2] * (1 + rank))),
    "dtype": lambda rank: hvd.allreduce(torch.ones(3, dtype=[torch.float32, torch.float64, torch.int32][rank])),
    "name": lambda rank: hvd.allreduce(ONES, name=f"grad.{rank}"),
    "operation": lambda rank: hvd.barrier() if rank else hvd.allreduce(ONES),
    "op": lambda rank: hvd.allreduce(ONES, op=hvd.Sum if rank else hvd.Max),
    "prescale": lambda rank: hvd.allreduce(ONES, prescale_factor=1.0 + rank),
    "postscale": lambda rank: hvd.allreduce(ONES, postscale_factor=1.0 + rank),
    "root": lambda rank: hvd.broadcast(ONES, root_rank=rank),
    "other dimensions of rows": lambda rank: hvd.allgather(torch.ones(2, 3 + rank)),
    "members of a group": lambda rank: hvd.grouped_allreduce([ONES] * (1 + rank)),
    "parts": lambda rank: hvd.alltoall(ONES, splits(2, 2, 2) if rank else None),
}


@each("what", DIFFERENT)
def test_a_difference_raises_the_same_on_all_ranks_before_any_data_flows(what):
    def program(rank):
        with pytest.raises(CollectiveMismatch) as caught:
            DIFFERENT[what](rank)
        after = hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum)
        return str(caught.value), after.tolist()

    results = returned(run_ranks(3, program))
    assert len({text for text, _ in results}) == 1
    assert results[0][0].startswith("ranks called different operations as operation 0: rank 0 ")
    assert "rank 1" in results[0][0] or "ranks 1 and 2" in results[0][0]
    assert [after for _, after in results] == [[3.0, 3.0]] * 3


WRONG = {
    "sum of splits": lambda: hvd.alltoall(ONES, splits(9, 9, 9)),
    "type of splits": lambda: hvd.alltoall(ONES, splits(2, 2, 2, dtype=torch.int64)),
    "indivisible": lambda: hvd.alltoall(torch.ones(7)),
    "scalar": lambda: hvd.reducescatter(torch.tensor(1.0)),
    "root": lambda: hvd.broadcast(ONES, root_rank=7),
    "no tensor": lambda: hvd.allreduce("x"),
    "name that is too long": lambda: hvd.allreduce(ONES, name="ä" * 2049),
    "name that is no text": lambda: hvd.allreduce(ONES, name=7),
}


@each("what", WRONG)
def test_an_error_of_all_ranks_is_raised_by_each_and_they_go_on(what):
    def program(rank):
        with pytest.raises((ValueError, TypeError)) as caught:
            WRONG[what]()
        assert not isinstance(caught.value, CollectiveError)
        return hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum).tolist()

    assert returned(run_ranks(3, program)) == [[3.0, 3.0]] * 3


@each("what", WRONG)
def test_an_error_of_one_rank_raises_on_all_and_names_it(what):
    def program(rank):
        if rank == 1:
            with pytest.raises((ValueError, TypeError)) as caught:
                WRONG[what]()
        else:
            with pytest.raises(CollectiveMismatch) as caught:
                hvd.allreduce(ONES)
        return str(caught.value), hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum).tolist()

    first, second, third = returned(run_ranks(3, program))
    assert first[0] == third[0] and "rank 1 on host" in first[0] and "cannot call operation 0" in first[0]
    assert second[0].splitlines()[0] in first[0]
    assert [after for _, after in (first, second, third)] == [[3.0, 3.0]] * 3


def test_an_error_of_some_ranks_raises_where_the_others_call_that_name_and_nowhere_else():
    """Jobs in which every rank has another order, and some call what the others can and they cannot."""
    right = {
        "allreduce": lambda name: hvd.allreduce_async(torch.ones(2), name=name, op=hvd.Sum),
        "grouped allreduce": lambda name: hvd.grouped_allreduce_async([ONES, ONES], name=name, op=hvd.Sum),
        "allgather": lambda name: hvd.allgather_async(torch.ones(1), name=name),
        "broadcast": lambda name: hvd.broadcast_async(torch.ones(2), 0, name=name),
        "reducescatter": lambda name: hvd.reducescatter_async(torch.ones(3), name=name),
        "alltoall": lambda name: hvd.alltoall_async(torch.ones(3), name=name),
    }
    wrong = {
        "allreduce": lambda name: hvd.allreduce_async(torch.ones(2), True, name, hvd.Sum),
        "grouped allreduce": lambda name: hvd.grouped_allreduce_async([ONES, "x"], name=name),
        "allgather": lambda name: hvd.allgather_async(torch.tensor(1.0), name=name),
        "broadcast": lambda name: hvd.broadcast_async(torch.ones(2), 9, name=name),
        "reducescatter": lambda name: hvd.reducescatter_async(torch.ones(3), name=name, op=hvd.Max),
        "alltoall": lambda name: hvd.alltoall_async(torch.ones(4), name=name),
    }

    def job(seed):
        """Named operations with the ranks that cannot call them, and the places of three without names."""
        draw = random.Random(seed)
        kinds = draw.choices(list(right), k=draw.randint(1, 6))
        named = [
            (kind, f"{seed}.{i}", draw.sample(range(3), draw.choice([0, 0, 1, 2]))) for i, kind in enumerate(kinds)
        ]
        return named, [("allreduce", None, draw.sample(range(3), draw.choice([0, 0, 1]))) for _ in range(3)]

    def run(rank, seed):
        named, unnamed = job(seed)
        draw, handles, errors = random.Random(3 * seed + rank), [], []
        draw.shuffle(named)
        while named or unnamed:
            kind, name, refusing = draw.choice([calls for calls in (named, unnamed) if calls]).pop(0)
            if rank in refusing:
                with pytest.raises((NotImplementedError, TypeError, ValueError)):
                    wrong[kind](name)
            else:
                handles.append((kind, name, refusing, right[kind](name)))
        for kind, name, refusing, handle in handles:
            if not refusing:
                handle.result()
                continue
            with pytest.raises(CollectiveMismatch) as caught:
                handle.result()
            errors.append(str(caught.value))
            assert name is None or f"cannot call {kind} {name!r} (" in errors[-1]
            assert any(f"rank {other} on host" in errors[-1] for other in refusing)
        return hvd.allreduce(torch.ones(1), name=f"after {seed}", op=hvd.Sum).item()

    def program(rank):
        return [run(rank, seed) for seed in range(JOBS)]

    assert returned(run_ranks(3, program)) == [[3.0] * JOBS] * 3


def test_a_name_that_was_refused_is_free_for_the_next_call_of_its_rank():
    def program(rank):
        with pytest.raises(ValueError if rank else CollectiveMismatch):
            hvd.allreduce(ONES, average=True if rank else None, op=hvd.Sum, name="same")
        return hvd.allreduce(ONES, op=hvd.Sum, name="same").tolist()

    assert returned(run_ranks(2, program)) == [[2.0] * 6] * 2


def test_a_reason_of_any_length_is_told():
    def program(rank):
        with pytest.raises((ValueError, CollectiveMismatch)) as caught:
            hvd.alltoall(torch.ones(4), splits=splits(*[1] * 3000) if rank == 1 else None)
        return str(caught.value)

    first, second = returned(run_ranks(2, program))
    assert "rank 1 on host" in first and "ValueError: splits are [1, 1" in first
    assert len(first) < 1200 < len(second)


def test_a_name_may_be_as_long_as_a_message_takes_and_a_longer_one_says_so():
    def program(rank):
        hvd.allreduce(ONES, name="ä" * 2048)
        with pytest.raises(ValueError, match="has 4098 bytes, more than the 4096 that a message holds"):
            hvd.allreduce(ONES, name="ä" * 2049)
        if rank == 0:
            return hvd.join()
        hvd.allreduce(ONES, op=hvd.Sum, name="ä" * 2048)
        return hvd.join()

    assert returned(run_ranks(2, program)) == [1, 1]


def test_a_name_that_is_under_way_is_a_value_error_there_and_the_next_operation_matches():
    def program(rank):
        first = hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum) if rank == 0 else None
        if rank == 0:
            with pytest.raises(ValueError, match="same name as another tensor that is currently being processed") as it:
                hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum)
            assert isinstance(it.value, hvd.HorovodInternalError)
            of_another_kind = hvd.broadcast_async(torch.ones(1), 0, name="same")
            called.set()
        called.wait()
        if rank == 1:
            first = hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum)
            of_another_kind = hvd.broadcast_async(torch.zeros(1), 0, name="same")
        after = hvd.allreduce(torch.full((2,), float(rank)), op=hvd.Sum).tolist()
        return hvd.synchronize(first).tolist(), hvd.synchronize(of_another_kind).item(), after

    called = threading.Event()
    assert returned(run_ranks(2, program)) == [([2.0, 2.0], 1.0, [1.0, 1.0])] * 2


def test_named_operations_pair_in_any_order_per_rank():
    """As in Horovod; also where earlier steps were all in one order, which the response cache knows."""
    names = [f"n{i}" for i in range(40)]

    def program(rank):
        results, orders = [], random.Random(rank)
        for step in range(6):
            order = list(names)
            if step in (2, 3, 5):
                orders.shuffle(order)
            values = {name: torch.full((3,), float(names.index(name) + rank)) for name in order}
            handles = {name: hvd.allreduce_async_(values[name], name=name, op=hvd.Sum) for name in order}
            unnamed = hvd.allreduce(torch.full((2,), float(step)), op=hvd.Sum)
            results.append([hvd.synchronize(handles[name])[0].item() for name in names] + unnamed.tolist())
        return results

    expected = [[3.0 * i + 3 for i in range(40)] + [3.0 * step] * 2 for step in range(6)]
    assert returned(run_ranks(3, program)) == [expected] * 3


def test_named_operations_of_two_threads_pair_in_whichever_order_they_run():
    def program(rank):
        def call(name, mine, go, then):
            go.wait(30)
            # The other rank begins with the other name, and each waits for its own result.
            found[rank, name] = hvd.allreduce(torch.full((2,), mine), name=name, op=hvd.Sum)[0].item()
            then.set()

        engine, go, never = current(), threading.Event(), threading.Event()

        def within(*args):
            with using(engine):
                call(*args)

        go.set()
        order = ["a", "b"] if rank == 0 else ["b", "a"]
        threads = [threading.Thread(target=within, args=(name, 1.0 + len(name), go, never)) for name in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return [found[rank, name] for name in "ab"]

    found = {}
    assert returned(run_ranks(2, program)) == [[4.0, 4.0]] * 2


@each("is_first", [True, False])
def test_a_thread_may_call_a_name_long_after_all_others_wait_for_it(is_first, caplog):
    """Horovod never gives up, and warns; any other thread of the process may be the one that calls the name next."""

    def program(rank):
        def wait_for_first():
            with using(engine):
                first.append(hvd.allreduce(torch.full((2,), float(rank)), name="ab"[rank], op=hvd.Sum).tolist())

        engine, first = current(), []
        if not is_first:
            hvd.allreduce(torch.ones(1), name="before")
        thread = threading.Thread(target=wait_for_first)
        thread.start()
        time.sleep(1.6 * STUCK_S)
        second = hvd.allreduce(torch.full((2,), float(rank)), name="ba"[rank], op=hvd.Sum).tolist()
        thread.join(60)
        return [second, *first]

    settings = CollectiveSettings(stall_check_s=0.2)
    assert returned(run_ranks(2, program, settings=settings)) == [[[1.0, 1.0]] * 2] * 2
    # Of the one or the other: whichever has waited for so long first.
    assert re.search(r"to call allreduce '[ab]' of float32\[2\]", caplog.text)


def test_an_operation_that_is_done_ends_though_the_next_one_still_waits_for_another_rank():
    def program(rank):
        if rank == 0:
            last = hvd.allreduce_async(torch.ones(1), name="first", op=hvd.Sum)
            behind = hvd.allreduce_async(torch.ones(1), name="behind", op=hvd.Sum)
            results = [hvd.synchronize(last).item()]
            ended.set()
            return [*results, hvd.synchronize(behind).item()]
        results = [hvd.allreduce(torch.ones(1), name="first", op=hvd.Sum).item()]
        assert ended.wait(60), "rank 0 has waited for what only comes later"
        return [*results, hvd.allreduce(torch.ones(1), name="behind", op=hvd.Sum).item()]

    ended = threading.Event()
    assert returned(run_ranks(2, program, settings=CollectiveSettings())) == [[2.0, 2.0]] * 2


def test_ranks_that_go_back_to_one_order_begin_again_what_they_know(monkeypatch):
    monkeypatch.setattr(coordinator, "STEADY", 8)

    def program(rank):
        for step in range(12):
            names = [f"n{i}" for i in range(8)]
            if step == 3 and rank:
                names.reverse()
            handles = [hvd.allreduce_async(ONES, name=name, op=hvd.Sum) for name in names]
            assert [hvd.synchronize(handle)[0].item() for handle in handles] == [2.0] * 8
            hvd.barrier()
        calls = current()._check._calls_of[0]
        return calls.is_throttled, calls.cache.begin(Signature("allreduce", "n0", ("float32[6]",), "Sum").digest)

    assert returned(run_ranks(2, program)) == [(False, True)] * 2


def test_what_a_rank_called_by_other_names_before_it_left_does_not_hold_the_others_for_ever():
    def program(rank):
        handle = hvd.allreduce_async(ONES, name=f"only {rank}")
        if rank == 0:
            with pytest.raises(CollectiveError, match="only 0"):
                hvd.synchronize(handle)
        return rank

    assert returned(run_ranks(2, program)) == [0, 1]


@each("size", [6, 4096])
def test_ranks_that_differ_where_the_program_branches_have_begun_nothing(size):
    def program(rank):
        for name in "abacabac":
            hvd.allreduce(ONES if name != "c" else torch.ones(size), name=name)
        hvd.allreduce(ONES, name="a")
        with pytest.raises(CollectiveMismatch) as caught:
            # Each has been agreed on behind "a" before. Gloo would add what fits, and end the process for the rest.
            hvd.allreduce(ONES if rank == 1 else torch.ones(size), name="b" if rank == 1 else "c")
        return str(caught.value), hvd.allreduce(ONES, op=hvd.Sum, name="on").tolist()

    results = returned(run_ranks(3, program))
    assert results == results[:1] * 3
    assert (
        f"as operation 9: ranks 0 and 2 allreduce 'c' of float32[{size}] (Average), rank 1 allreduce 'b'"
        in (results[0][0])
    )
    assert results[0][1] == [3.0] * 6


def test_who_does_something_new_has_not_begun_it_when_the_others_do_what_they_always_do():
    def program(rank):
        for name in "abab":
            hvd.allreduce(ONES, name=name)
        with pytest.raises(CollectiveMismatch, match="ranks 0 and 2 allreduce 'a' .*, rank 1 allreduce 'b'"):
            # The others have begun, and wait for what rank 1 never sends.
            hvd.allreduce(ONES, name="b" if rank == 1 else "a")
        return rank

    assert returned(run_ranks(3, program)) == [0, 1, 2]


class Broken(Operation):
    """Fails on one rank, where the others have begun."""

    def __init__(self, error):
        self.signature = Signature("test", "broken", ())
        self._error = error

    def begin(self, channel):
        if self._error is not None:
            raise self._error
        return [channel.barrier()]

    def finish(self):
        return None


def test_an_error_in_the_middle_of_an_operation_ends_the_group_on_all_ranks_with_its_rank():
    def program(rank):
        with pytest.raises(CollectiveError) as caught:
            current().submit(Broken(MemoryError("no room") if rank == 1 else None)).result()
        return str(caught.value)

    results = returned(run_ranks(3, program))
    assert len(set(results)) == 1
    assert results[0].startswith("test 'broken' failed on rank 1 on host ")
    assert results[0].endswith("MemoryError: no room")


def test_a_thousand_operations_may_be_under_way_at_once_and_names_may_never_end():
    def program(rank):
        for step in range(2):
            handles = [hvd.allreduce_async(torch.full((3,), float(i)), name=f"{step}.{i}") for i in range(1000)]
            assert [hvd.synchronize(handle)[0].item() for handle in handles] == list(range(1000))
        return rank

    assert returned(run_ranks(2, program)) == [0, 1]


def test_a_rank_that_shuts_down_is_named_by_the_others_operations():
    def program(rank):
        hvd.allreduce(ONES)
        if rank == 1:
            return None
        with pytest.raises(RankLostError) as caught:
            hvd.allreduce(ONES, name="late")
        assert caught.value.node == "rank 1"
        return str(caught.value)

    results = returned(run_ranks(3, program))
    for rank in (0, 2):
        assert "has called shutdown()" in results[rank]
        assert f"rank {rank} waited for allreduce 'late' of float32[6] (Average)" in results[rank]


def test_what_a_rank_has_done_before_it_left_is_still_done_by_the_others():
    def program(rank):
        handle = hvd.broadcast_async(torch.full((3,), float(rank)), root_rank=1)
        if rank == 1:
            hvd.synchronize(handle)
            left.set()
            return None
        left.wait()
        return hvd.synchronize(handle).tolist()

    left = threading.Event()
    first, _, third = returned(run_ranks(3, program))
    assert first == third == [1.0] * 3


def test_what_needs_nothing_of_a_rank_that_has_left_may_still_be_called(monkeypatch):
    def program(rank):
        tensor = torch.full((3,), float(rank))
        for _ in range(3):
            hvd.broadcast_(tensor, root_rank=0)
        if rank == 2:
            assert told.wait(20)
        hvd.broadcast_(tensor, root_rank=0)
        return tensor.tolist()

    def fail(group, error_of, from_sequence=0):
        fail_really(group, error_of, from_sequence)
        if group.rank == 2:
            told.set()

    told, fail_really = threading.Event(), Group.fail
    monkeypatch.setattr(Group, "fail", fail)
    assert returned(run_ranks(3, program)) == [[0.0] * 3] * 3


def test_rank_0_may_be_the_first_to_leave():
    def program(rank):
        hvd.allreduce(ONES)
        if rank == 0:
            return None
        with pytest.raises(RankLostError, match="rank 0 on host .* is gone"):
            hvd.allreduce(ONES)
        return rank

    assert returned(run_ranks(3, program)) == [None, 1, 2]
