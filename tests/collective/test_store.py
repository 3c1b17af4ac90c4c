"""`kv.create('collective')`: every promise of a store, kept by ranks that sum among themselves."""

from __future__ import annotations

import resource
import threading
import time

import numpy as np
import pytest
import torch

import kvdist.collective as hvd
from kvdist import BarrierTimeout, InitMismatch, KeyNotInitialised, LazyRows, RowSparse, StoreClosed, kv
from kvdist.checkpoint import folders
from kvdist.collective.basics import current
from kvdist.errors import (
    CheckpointError,
    CollectiveError,
    CollectiveMismatch,
    ConfigError,
    ProcessSetError,
    RankLostError,
)
from kvdist.kvstore import collective, collective_store, local
from kvdist.kvstore.checkpoints import gather
from kvdist.kvstore.registry import COLLECTIVE_NAMES
from tests.cases import each
from tests.collective.ranks import returned, run_ranks


def on_ranks(size, program):
    """What each rank's ``program(store, rank)`` returned."""

    def be(rank):
        with kv.create("collective") as store:
            return program(store, rank)

    return run_ranks(size, be)


def full(number, shape=(2, 3)):
    return np.full(shape, number, np.float32)


@each("name", [*COLLECTIVE_NAMES, "Horovod"])
def test_the_names_of_stores_without_servers(name):
    def program(rank):
        with kv.create(name) as store:
            kind = type(store._backend)
            return kind, store.type, store.rank, store.num_workers, store.num_servers, store.num_dead_nodes()

    expected = [(collective.CollectiveBackend, name.lower(), rank, 2, 0, 0) for rank in range(2)]
    assert returned(run_ranks(2, program)) == expected


def test_it_works_in_a_process_that_is_alone():
    with kv.create("collective") as store:
        store.init("a", full(1))
        store.push("a", full(4), average=True)
        assert store.pull("a").tolist() == full(4).tolist()
        assert hvd.is_initialized()
    assert not hvd.is_initialized(), "whoever begins the engine ends it"


def test_a_store_leaves_the_engine_that_the_program_has_begun():
    hvd.init()
    try:
        kv.create("collective").close()
        assert hvd.is_initialized()
    finally:
        hvd.shutdown()


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_pushpull_sums_over_devices_and_workers_three_times(size):
    shapes = [(2, 3), (1200, 12), (), (0, 5), (1,)]
    keys = list(range(200, 200 + len(shapes)))

    def program(store, rank):
        store.broadcast(keys, [full(1, shape) for shape in shapes], out=[full(0, shape) for shape in shapes])
        for _ in range(3):
            given = [[full(rank + 1, shape), full(1, shape)] for shape in shapes]
            store.pushpull(keys, given)
            for arrays in given:
                for array in arrays:
                    np.testing.assert_array_equal(array, size * (size + 1) / 2 + size)

    returned(on_ranks(size, program))


def test_the_first_worker_gives_the_values_and_pulls_are_of_the_kind_that_was_given():
    def program(store, rank):
        store.init(["a", "b"], [full(rank + 1), torch.full((4,), rank + 7, dtype=torch.bfloat16)])
        a, b = store.pull(["a", "b"])
        assert isinstance(a, np.ndarray) and b.dtype is torch.bfloat16
        store.init("a", full(9))  # again changes nothing
        return a.tolist(), b.tolist(), store.pull("a").tolist()

    for a, b, again in returned(on_ranks(2, program)):
        assert (a, b, again) == (full(1).tolist(), [7.0] * 4, full(1).tolist())


def test_a_push_replaces_the_value_and_an_updater_changes_it_on_every_worker():
    def program(store, rank):
        store.init(3, full(10))
        grad = full(rank + 1)
        store.push(3, grad)
        grad[:] = 100  # the call has returned, so it is the caller's again
        replaced = store.pull(3)

        def subtract(key, received, stored):
            stored -= received

        store.set_updater(subtract)
        store.push(3, full(rank))
        out = np.zeros((2, 3), np.float32)
        store.pushpull(3, full(1), out=out)
        return replaced[0, 0], out[0, 0], store.pull(3)[0, 0]

    assert returned(on_ranks(2, program)) == [(3.0, 0.0, 0.0)] * 2  # 3 - 1 - 2


@each("dtype", ["float16", "bfloat16", "float64", "int8", "uint8", "int32", "int64"])
def test_values_of_every_type_are_summed_and_averaged(dtype):
    first = 0 if dtype == "uint8" else -8

    def program(store, rank):
        kind = getattr(torch, dtype)
        store.init("a", torch.zeros(17, dtype=kind))
        grad = torch.arange(first, first + 17).to(kind) * (rank + 1)
        total = torch.empty(17, dtype=kind)
        store.pushpull("a", grad, out=total)
        store.pushpull("a", grad, average=True)
        return total.tolist(), grad.tolist()

    for total, mean in returned(on_ranks(2, program)):
        sums = [3 * value for value in range(first, first + 17)]
        assert total == sums
        assert mean == [one / 2 if "float" in dtype else int(one / 2) for one in sums]  # Horovod cuts fractions off


def test_an_average_divides_by_all_workers_and_a_key_that_nobody_gave_stays():
    def program(store, rank):
        store.init([0, 1, 2], [full(5)] * 3)
        outs = [full(0) for _ in range(3)]
        store.pushpull([0, 1, 2], [full(rank + 1), full(6) if rank == 1 else None, None], out=outs, average=True)
        return [float(out[0, 0]) for out in outs], [float(one[0, 0]) for one in store.pull([0, 1, 2])]

    assert returned(on_ranks(3, program)) == [([2.0, 2.0, 5.0],) * 2] * 3


def test_workers_exchange_bytes_of_different_lengths():
    contents = [b"", b"\0\1\0", b"x" * 70_000]

    def program(store, rank):
        return [gather(store._backend, contents[rank]), gather(store._backend, b""), gather(store._backend, b"0")]

    expected = [dict(enumerate(contents)), dict.fromkeys(range(3), b""), dict.fromkeys(range(3), b"0")]
    assert returned(on_ranks(3, program)) == [expected] * 3


def test_results_go_wherever_there_is_room_and_inputs_stay_as_they_are():
    def program(store, rank):
        store.init([0], [np.zeros((3, 4), np.float32)])
        given = torch.full((3, 4), float(rank + 1))
        read_only = np.full((3, 4), 1, np.float32)
        read_only.flags.writeable = False
        aside = torch.zeros(4, 3).T
        swapped = [torch.full((3, 4), 1.0), torch.full((3, 4), 2.0)]
        store.pushpull(0, [given, read_only.copy()], out=[aside, np.zeros((4, 3), np.float32).T])
        store.pushpull(0, read_only, out=torch.empty(3, 4))
        store.pushpull(0, swapped, out=[swapped[1], swapped[0]])
        assert given.tolist() == [[rank + 1.0] * 4] * 3
        return aside.flatten().tolist(), swapped[0].flatten().tolist(), swapped[1].flatten().tolist()

    assert returned(on_ranks(2, program)) == [([5.0] * 12, [6.0] * 12, [6.0] * 12)] * 2


def test_rows_that_are_pushed_to_an_array_are_summed_as_an_array():
    def program(store, rank):
        store.init(0, np.zeros((5, 2), np.float32))
        store.push(0, RowSparse([rank, 4], np.ones((2, 2), np.float32), (5, 2)))
        return store.pull(0)[:, 0].tolist()

    assert returned(on_ranks(2, program)) == [[1.0, 1.0, 0.0, 0.0, 2.0]] * 2


def test_many_calls_under_way_are_done_in_their_order():
    def program(store, rank):
        store.init(list(range(30)), [np.zeros(7, np.float32)] * 30)
        futures = [store.push_async(key, np.full(7, key + rank, np.float32)) for key in range(30)]
        again = [store.push_async(key, np.full(7, 100.0 + key, np.float32)) for key in range(30)]
        outs = [np.zeros(7, np.float32) for _ in range(30)]
        pulled = store.pull_async(list(range(30)), outs)
        results = [torch.full((7,), float(rank))]
        reduced = store.pushpull_async([0], results)
        for future in [*futures, *again, pulled, reduced]:
            assert future.result(20) is None
        return [out[0] for out in outs], results[0].tolist()

    for pulled, reduced in returned(on_ranks(2, program)):
        assert pulled == [2 * (100.0 + key) for key in range(30)]
        assert reduced == [1.0] * 7


def test_a_future_cannot_be_cancelled_and_its_answer_still_comes():
    has_tried = threading.Event()

    def program(store, rank):
        store.init("a", full(1))
        assert rank == 0 or has_tried.wait(60)
        futures = [store.push_async("a", full(2)), store.pull_async("a"), store.pushpull_async("a", full(rank))]
        if rank == 0:
            assert not any(future.done() or future.cancel() for future in futures)
            has_tried.set()
        return [np.asarray(future.result(60)).tolist() for future in futures], store.pull("a").tolist()

    for result in returned(on_ranks(2, program)):
        assert result == ([None, full(4).tolist(), None], full(1).tolist())


def test_a_store_that_is_refused_does_not_keep_the_engine(monkeypatch):
    with pytest.raises(ProcessSetError):
        collective_store("collective", number=7)
    assert not hvd.is_initialized()
    monkeypatch.setenv("KVDIST_KERNELS", "none such")
    with pytest.raises(ConfigError, match="KVDIST_KERNELS"):
        kv.create("collective")
    assert not hvd.is_initialized()


def test_halves_travel_where_that_is_asked_for_and_only_for_those_keys():
    value = 1 + 2**-14  # which a half cannot hold

    def program(store, rank):
        store.leave_uncompressed(["whole"])
        store.set_gradient_compression({"type": "fp16"})
        store.set_gradient_compression({"type": "fp16"})
        store.init(["half", "whole"], [full(0)] * 2)
        given = [full(value), full(value)]
        store.pushpull(["half", "whole"], given)
        with pytest.raises(ValueError, match="cannot change to bf16"):
            store.set_gradient_compression({"type": "bf16"})
        return [float(one[0, 0]) for one in given]

    assert returned(on_ranks(2, program)) == [[2.0, 2 * value]] * 2


def test_what_the_store_cannot_do_is_refused_with_what_can():
    with kv.create("collective") as store:
        with pytest.raises(NotImplementedError, match="no servers.*each worker updates"):
            store.set_optimizer("sgd")
        assert not store.is_capable("optimizer")
        for table in (LazyRows((5, 2)), RowSparse([0], np.ones((1, 2), np.float32), (5, 2))):
            with pytest.raises(TypeError, match="key 'table': tables of rows need servers.*use 'hybrid'"):
                store.init("table", table)
        with pytest.raises(TypeError, match="use 'hybrid'"):
            store.row_sparse_pull("table", row_ids=[0])
        with pytest.raises(ValueError, match="'fp16' or 'bf16' alone, not by 2bit.*'dist' does the others"):
            store.set_gradient_compression({"type": "2bit"})
        with pytest.raises(KeyNotInitialised):
            store.push("a", full(1))
        store.init("a", full(1))
        with pytest.raises(ValueError, match="has shape"):
            store.push("a", full(1, (3,)))
        with pytest.raises(ValueError, match="before the first init"):
            store.set_gradient_compression({"type": "fp16"})
        with pytest.raises(ValueError, match="time-out of a barrier is 0"):
            store.barrier(0)
    with pytest.raises(StoreClosed):
        store.pull("a")


def test_workers_that_declare_different_keys_all_hear_which_and_can_go_on():
    def program(store, rank):
        with pytest.raises(InitMismatch) as caught:
            store.init([0, 1], [full(0), full(0, (2, 3 + rank))])
        store.init([0], [full(rank + 4)])
        return str(caught.value), store.pull(0)[0, 0]

    said = "worker-0: key 1: float32 of shape (2, 3); worker-1: key 1: float32 of shape (2, 4)"
    for message, value in returned(on_ranks(2, program)):
        assert said in message
        assert value == 4


def test_workers_average_and_share_and_agree_beside_their_keys():
    def program(store, rank):
        mean = store.average(rank)
        some = store.average(torch.tensor([1.0, rank]), counts=rank > 0)
        (first,) = store.from_rank_0([np.arange(3) + rank])
        store.agree("the same")
        with pytest.raises(InitMismatch, match="worker-0 says: rank 0; worker-1 says: rank 1"):
            store.agree(f"rank {rank}")
        nothing = store.average(1.0, counts=False)
        return mean, some.tolist(), first.tolist(), np.isnan(nothing)

    assert returned(on_ranks(3, lambda store, rank: store.average(rank))) == [1.0] * 3
    assert returned(on_ranks(2, program)) == [(0.5, [1.0, 1.0], [0, 1, 2], True)] * 2


def test_a_barrier_says_who_has_not_come_and_can_be_passed_later():
    told = threading.Event()

    def program(store, rank):
        if rank == 0:
            with pytest.raises(BarrierTimeout) as caught:
                store.barrier(0.2)
            assert caught.value.missing == (1,)
            told.set()
        else:
            assert told.wait(20)
        store.barrier(20)
        store.barrier(20)
        return "passed"

    assert returned(on_ranks(2, program)) == ["passed"] * 2


def test_values_come_back_from_a_checkpoint_with_each_workers_own_state(tmp_path):
    def program(store, rank):
        store.init(["a", "b"], [full(1), np.arange(5)])
        store.push("a", full(rank + 1))
        folder = store.save_checkpoint(tmp_path, 4, state={"rank": rank}, names={"a": "weight"}).result()
        store.push("a", full(50))
        found = store.load_checkpoint(tmp_path)
        return folder == found.folder, found.step, found.state, store.pull("a")[0, 0], store.pull("b").tolist()

    results = returned(on_ranks(2, program))
    assert results == [(True, 4, {"rank": rank}, 3.0, [0, 1, 2, 3, 4]) for rank in range(2)]


def test_a_sum_that_ends_while_the_workers_agree_on_a_checkpoint_keeps_nobody_waiting(tmp_path, monkeypatch):
    stores, really_find = {}, folders.find

    def find(directory, step):
        # As another thread may, or the handler of a signal. The engine's thread takes the sum before the ranks agree.
        stores[threading.get_ident()].push("a", full(50))
        return really_find(directory, step)

    def program(store, rank):
        stores[threading.get_ident()] = store
        store.init("a", full(1))
        store.save_checkpoint(tmp_path, 4)
        store.load_checkpoint(tmp_path)
        return store.pull("a")[0, 0]

    monkeypatch.setattr(folders, "find", find)
    assert returned(on_ranks(2, program)) == [1.0] * 2


def test_states_that_one_worker_cannot_read_fail_on_all(tmp_path):
    def program(store, rank):
        store.init("a", full(1))
        store.save_optimizer_states(tmp_path / "states")
        with pytest.raises(CheckpointError, match="no-such" if rank else "worker-1 failed: .*no-such"):
            store.load_optimizer_states(tmp_path / ("no-such" if rank else "states"))
        return store.average(float(rank))

    assert returned(on_ranks(2, program)) == [0.5] * 2


def test_workers_that_save_different_steps_are_told_which_and_nothing_is_written(tmp_path):
    def program(store, rank):
        store.init("a", full(1))
        with pytest.raises(InitMismatch, match="do not agree. worker-0 says: saves .*step-0.*worker-1 says: .*step-1"):
            store.save_checkpoint(tmp_path, rank)
        with pytest.raises(InitMismatch, match="keep 1"):
            store.save_checkpoint(tmp_path, 2, keep=rank + 1)
        assert list(tmp_path.iterdir()) == []
        return store.save_checkpoint(tmp_path, 3).result().name

    assert returned(on_ranks(2, program)) == ["step-3"] * 2


def test_a_file_that_one_worker_cannot_write_fails_the_checkpoint_on_all_and_leaves_none(tmp_path):
    def program(store, rank):
        store.init("a", full(1))
        error = store.save_checkpoint(tmp_path, 4, state="x" * (1 << 20) * rank).exception()
        assert isinstance(error, CheckpointError)
        store.barrier()  # until worker 0 has removed its file
        return str(error), (tmp_path / "step-4").exists(), store.save_checkpoint(tmp_path, 5, state=rank).result().name

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, before[1]))  # the state of worker 1 is too large for a file
    try:
        (other, *rest), (own, *others_rest) = returned(on_ranks(2, program))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert other == f"worker-1 failed: {own}" and "could not be used for a checkpoint: File too large" in own
    assert rest == others_rest == [False, "step-5"]


def test_nccl_is_a_store_of_this_process_where_that_is_alone(caplog):
    with kv.create("nccl") as store:
        assert type(store._backend) is local.LocalBackend
    assert "in a process that is alone" in caplog.text


def test_a_key_that_is_only_summed_keeps_no_value():
    def program(store, rank):
        store.leave_unkept([0])
        store.broadcast([0, 1], [full(rank), full(rank)], out=[full(9), full(9)])
        grad = full(1)
        store.pushpull([0, 1], [grad, full(1)])
        with pytest.raises(ValueError, match="does not keep them"):
            store.pull(0)
        return grad[0, 0], store.pull(1)[0, 0]

    assert returned(on_ranks(2, program)) == [(2.0, 2.0)] * 2


def test_what_is_wrong_on_one_worker_is_told_to_all_and_the_next_call_works():
    def program(store, rank):
        store.init("a", full(0))
        with pytest.raises((ValueError, CollectiveError), match="key 'a' has shape"):
            store.pushpull("a", full(1, (2, 3 + rank)))
        grad = full(1)
        store.pushpull("a", grad)
        return grad[0, 0]

    assert returned(on_ranks(2, program)) == [2.0] * 2


def test_workers_that_push_different_keys_are_told_which():
    def program(store, rank):
        store.init(["a", "b"], [full(0), full(0)])
        with pytest.raises(CollectiveMismatch, match="key 'a'.*key 'b'"):
            store.pushpull("b" if rank else "a", full(1))

    returned(on_ranks(2, program))


def test_keys_that_differ_between_the_first_and_the_last_are_told_too():
    def program(store, rank, count):
        keys = list(range(count))
        store.init(keys, [full(0)] * count)
        keys[1], keys[2] = (1, 2) if rank else (2, 1)
        with pytest.raises(CollectiveMismatch, match="keys 0, 2, 1, 3.*keys 0, 1, 2, 3|20 keys, 0 to 19, checksum"):
            store.pushpull(keys, [full(1)] * count)

    for count in (4, 20):
        returned(on_ranks(2, lambda store, rank, count=count: program(store, rank, count)))


def test_averages_and_sums_of_one_key_are_refused_on_all_workers():
    def program(store, rank):
        store.init("a", full(7))
        with pytest.raises(CollectiveMismatch, match="1 of the 2 workers with a value for key 'a' ask for an average"):
            store.pushpull("a", full(1), out=full(0), average=rank == 0)
        return store.pull("a")[0, 0]

    assert returned(on_ranks(2, program)) == [7.0] * 2


def test_who_gives_nothing_has_no_say_in_whether_it_is_an_average():
    def program(store, rank):
        store.init("a", full(7))
        results = []
        for wanted, average in ((True, False), (False, True), (True, True)):
            out = full(0)
            store.pushpull("a", full(2) if rank else None, out=out, average=wanted if rank else average)
            results.append(out[0, 0])
        return results

    assert returned(on_ranks(2, program)) == [[1.0, 2.0, 1.0]] * 2


def heard_of(store):
    """Wait until this rank has heard that another one is gone."""
    deadline = time.monotonic() + 60
    while store._backend._ranks._group._failure is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


NOTICED = {
    "by the one who waits": lambda store: store.pushpull_async("a", full(1)).result(60),
    "by the one who calls": lambda store: (heard_of(store), store.pushpull_async("a", full(1)).result(60)),
    "at a barrier": lambda store: store.barrier(),
}


@each("how", NOTICED)
def test_a_lost_worker_is_counted_however_it_is_noticed(how):
    def program(store, rank):
        store.init("a", full(0))
        if rank == 1:
            raise SystemError("this one ends")
        with pytest.raises(RankLostError):
            NOTICED[how](store)
        return store.num_dead_nodes()

    assert on_ranks(2, program)[0] == 1


def test_workers_that_are_done_are_not_lost():
    gone = threading.Event()

    def be(rank):
        store = kv.create("collective")
        store.init("a", full(0))
        store.pushpull("a", full(1))
        if rank == 0:
            assert gone.wait(60)
            heard_of(store)
            assert store.num_dead_nodes() == 0
        store.close()
        return store.num_dead_nodes()

    def program(rank):
        try:
            return be(rank)
        finally:
            if rank == 1:
                current().close()
                gone.set()

    assert returned(run_ranks(2, program)) == [0, 0]
