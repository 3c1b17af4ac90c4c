"""Rounds of rows over several workers, as a server runs them, and what workers send for them."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.server import row_storage
from kvdist.core.server.buffers import BUFFERS_KEPT_MAX
from kvdist.core.worker.requests import DeclareKeys, RunKind, Transfer
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.protocol.messages import ROWS, Flag
from tests.core.row_runs import Tables, pull_runs, push_runs

INT64, FLOAT32, FLOAT64 = 7, 1, 2
LIMITS = Limits(explain_after_s=5.0)


@pytest.fixture
def wired() -> Tables:
    """Two workers; one server."""
    return Tables(2, 1)


@pytest.fixture
def cut() -> Tables:
    """Two workers; a table of six rows on three servers."""
    return Tables(2, 3, bigarray_bound=4, rows_max=1)


# Rounds.


def test_a_round_is_closed_when_both_have_pushed_and_its_sum_replaces_all_rows(wired: Tables) -> None:
    wired.table()
    first = wired.push_rows(0, {1: 10, 4: 20})
    read = wired.pull_rows(0)
    wired.settle()
    assert not {first, read} & wired.completed.keys()
    second = wired.push_rows(1, {4: 3, 5: 7})
    wired.settle()
    assert {first, second} <= wired.completed.keys()
    assert wired.rows(read) == [0, 10, 0, 0, 23, 7]


def test_an_optimizer_changes_only_the_rows_that_somebody_pushed(wired: Tables) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "test", rescale_grad=2)
    wired.table(form="constant(5)")
    wired.push_rows(0, {0: 1})
    wired.push_rows(1, {0: 10, 3: 100})
    wired.settle()
    assert wired.now_there() == [27, 5, 5, 205, 5, 5]
    (table,) = wired.servers[0].shard.tables.values()
    assert table.rows.rows_touched == 2


def test_no_rows_and_no_gradient_both_count_but_only_rows_make_a_sum(wired: Tables) -> None:
    wired.table()
    for rows in (({}, {}), ({}, None)):
        requests = [wired.push_rows(rank, rows[rank]) for rank in (0, 1)]
        wired.settle()
        assert set(requests) <= wired.completed.keys()
        assert wired.now_there() == [0] * 6
    wired.push_rows(0, {2: 3})
    wired.push_rows(1, {2: 4})
    for rank in (0, 1):
        wired.push_rows(rank, None)
    wired.settle()
    assert wired.now_there() == [0, 0, 7, 0, 0, 0]
    (table,) = wired.servers[0].shard.tables.values()
    assert table.round.version == 4 and table.round.counted == {0: 4, 1: 4}


def test_rows_may_be_pushed_and_pulled_before_the_first_values(wired: Tables) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.table(first=None)
    read = wired.pull_rows(1, [2, 5])
    for rank in (0, 1):
        wired.push_rows(rank, {5: 1 + rank})
    after = wired.pull_rows(1, [2, 5])
    wired.settle()
    assert not {read, after} & wired.completed.keys()
    wired.give_rows(0, {2: 100, 5: 200})
    wired.settle()
    # Whoever waits is answered when there is a value, and rounds that are full are closed by then.
    assert wired.rows(read) == wired.rows(after) == [100, 203]


def test_first_values_in_several_messages_are_there_with_the_last_one() -> None:
    wired = Tables(1, 1, rows_max=2)
    wired.table(first=None)
    read = wired.pull_rows(0)
    wired.give_rows(0, dict.fromkeys(range(5), 3))
    wired.settle()
    assert wired.rows(read) == [3, 3, 3, 3, 3, 0]
    wired.give_rows(0, dict.fromkeys(range(6), 8))
    wired.settle()
    assert wired.now_there() == [3, 3, 3, 3, 3, 0]


def test_each_server_keeps_its_rows_and_every_server_gets_a_contribution(cut: Tables) -> None:
    info = cut.table()
    assert [(piece.server, piece.start, piece.stop) for piece in info.slices] == [(0, 0, 4), (1, 4, 8), (2, 8, 12)]
    for turn in range(3):
        requests = [cut.push_rows(0, {0: turn, 1: 2, 5: 3}), cut.push_rows(1, {5: 10})]
        cut.settle()
        assert set(requests) <= cut.completed.keys()
    assert [cut.now_there(rank=rank) for rank in (0, 1)] == [[2, 2, 0, 0, 0, 13]] * 2
    assert all(table.round.version == 3 for server in cut.servers for table in server.shard.tables.values())


def test_more_servers_than_rows_leave_some_without(cut: Tables) -> None:
    cut.table(shape=(2, 3))
    for rank in (0, 1):
        cut.push_rows(rank, {1: 1 + rank})
    cut.settle()
    assert cut.now_there() == [0, 3]


def test_a_second_push_waits_for_the_first_and_a_pull_sees_all_before_it(wired: Tables) -> None:
    wired.table()
    pushes = [wired.push_rows(0, {0: turn + 1}) for turn in range(3)]
    read = wired.pull_rows(0, [0])
    wired.settle()
    assert sum("PushRows" in line for line in wired.log) == 1
    for turn in range(3):
        assert read not in wired.completed
        wired.push_rows(1, {0: 10 * (turn + 1)})
        wired.settle()
        assert pushes[turn] in wired.completed
    assert wired.rows(read) == [33]


def test_means_are_over_those_who_contributed(wired: Tables) -> None:
    wired.table()
    wired.push_rows(0, {1: 8}, flag=Flag.AVERAGE)
    wired.push_rows(1, {2: 4}, flag=Flag.AVERAGE)
    wired.settle()
    assert wired.now_there() == [0, 4, 2, 0, 0, 0]
    wired.push_rows(0, {1: 8}, flag=Flag.AVERAGE)
    wired.push_rows(1, None)
    wired.settle()
    assert wired.now_there() == [0, 4, 0, 0, 0, 0]


def test_sums_are_made_in_the_order_of_ranks_whoever_comes_first() -> None:
    large, small = 2.0**25, 1.0
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0)):
        wired = Tables(3, 1)
        wired.table()
        for rank in order:
            wired.push_rows(rank, {0: (small, large, -large)[rank]})
            wired.settle()
        # (1 + 2**25) - 2**25 is 0 in float32, in any other order of these it is not.
        assert wired.now_there()[0] == 0


def test_an_asynchronous_store_counts_each_push_at_once_and_needs_an_optimizer(wired: Tables) -> None:
    wired.table(mode="async")
    refused = wired.push_rows(1, {1: 1})
    wired.settle()
    assert isinstance(wired.failed[refused], PushRefused)
    assert "key 't': a dist_async store has no rounds to sum, so it needs an optimizer" in str(wired.failed[refused])
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    wired.push_rows(1, {1: 1, 2: 5})
    wired.push_rows(1, {1: 10})
    wired.settle()
    assert wired.now_there(rank=1) == [1, 12, 6, 1, 1, 1]


def test_workers_that_disagree_on_the_learning_rate_all_get_an_error_that_names_them(wired: Tables) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    wired.table()
    requests = [wired.push_rows(rank, {0: 1}, setting=(0.1 + rank, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], OptimizerMismatch)
        assert "key 't' in one round: worker-0 says lr 0.1, wd 0; worker-1 says lr 1.1" in str(wired.failed[request])
    assert wired.now_there() == [1] * 6
    for rank in (0, 1):
        wired.push_rows(rank, {0: 1}, setting=(0.25, 0.0, 1.0))
    wired.settle()
    assert wired.now_there() == [0.5, 1, 1, 1, 1, 1]


def test_a_table_that_the_pushed_numbers_do_not_allow_is_refused_and_goes_on(wired: Tables) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", lazy_update=False)
    wired.table(form="constant(1)")
    requests = [wired.push_rows(rank, {0: 1}, setting=(0.5, 0.1, 1.0)) for rank in (0, 1)]
    wired.settle()
    assert all("lazy table 't' do not exist: pass lazy_update=True" in str(wired.failed[one]) for one in requests)
    for rank in (0, 1):
        wired.push_rows(rank, {0: 1}, setting=(0.5, 0.0, 1.0))
    wired.settle()
    assert wired.now_there() == [0, 1, 1, 1, 1, 1]


# Leaving.


def test_a_worker_that_leaves_is_counted_once_more_and_waits_for_nothing(wired: Tables) -> None:
    wired.table()
    wired.push_rows(1, {0: 1})
    wired.pull_rows(1)
    wired.settle()
    (table,) = wired.servers[0].shard.tables.values()
    assert len(table.round.pulls) == 1
    wired.leave(1)
    wired.advance(0.1)
    assert not table.round.pulls
    for gift, expected in ((10, 11), (7, 7)):
        wired.push_rows(0, {0: gift})
        wired.settle()
        assert wired.now_there() == [expected, 0, 0, 0, 0, 0]


def test_a_round_that_lacked_only_the_worker_that_leaves_is_closed(wired: Tables) -> None:
    wired.table()
    request, read = wired.push_rows(0, {0: 9}), wired.pull_rows(0, [0])
    wired.settle()
    wired.leave(1)
    wired.advance(0.1)
    assert request in wired.completed and wired.rows(read) == [9]


def test_a_worker_leaves_when_all_parts_of_its_push_have_arrived() -> None:
    wired = Tables(2, 1, rows_max=1, limits=Limits(window_bytes=32, slice_bytes=16))
    wired.table()
    wired.push_rows(1, dict.fromkeys(range(6), 4))
    wired.leave(1)
    (table,) = wired.servers[0].shard.tables.values()
    wired.settle()
    wired.advance(1.0)
    assert "worker-1" in wired.stopped and not table.arriving
    wired.push_rows(0, {0: 1})
    wired.settle()
    assert wired.now_there() == [5, 4, 4, 4, 4, 4]


# What workers send.


def test_a_large_push_and_pull_travel_in_parts_and_in_order() -> None:
    wired = Tables(1, 1, rows_max=2, limits=Limits(slice_bytes=8))
    wired.table()
    wired.log.clear()
    read = wired.push_rows(0, {row: row + 1 for row in range(5)})
    pull = wired.pull_rows(0)
    wired.settle()
    pushed = [line.split("PushRows")[1] for line in wired.log if "PushRows" in line]
    assert [("[128]" in line, "[4]" in line) for line in pushed] == [(True, False), (True, False), (False, True)]
    assert read in wired.completed and wired.rows(pull) == [1, 2, 3, 4, 5, 0]
    assert sum(": Values" in line for line in wired.log) == 3


def test_small_pushes_of_several_tables_share_a_message(wired: Tables) -> None:
    infos = [wired.table(key) for key in "abc"]
    wired.log.clear()
    runs = [push_runs(info, np.array([0]), np.ones((1, 2), np.float32), 1)[0][0] for info in infos]
    wired.ask(0, lambda number: Transfer(number, RunKind.PUSH, "push of three", runs))
    wired.push_rows(1, {2: 5}, "b")
    for key in "ac":
        wired.push_rows(1, None, key)
    wired.settle()
    assert sum("worker-0 -> server-0: PushRows" in line for line in wired.log) == 1
    assert [wired.now_there(key) for key in "abc"] == [[1, 0, 0, 0, 0, 0], [1, 0, 5, 0, 0, 0], [1, 0, 0, 0, 0, 0]]


def test_settings_of_pushes_that_share_a_message_stay_apart(wired: Tables) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    infos = [wired.table(key) for key in "ab"]
    for rank in (0, 1):
        runs = []
        for info, lr in zip(infos, (1.0, 0.25), strict=True):
            ones = np.ones((1, 2), np.float32)
            runs += push_runs(info, np.array([0]), ones, 1, settings=((lr, 0.0, 1.0),))[0]
        wired.ask(rank, lambda number, runs=runs: Transfer(number, RunKind.PUSH, "push of two", runs))
    wired.settle()
    assert (wired.now_there("a")[0], wired.now_there("b")[0]) == (-1, 0.5)


def test_higher_priority_leaves_first_and_the_window_is_kept() -> None:
    wired = Tables(1, 1, rows_max=2, limits=Limits(window_bytes=32, slice_bytes=8))
    for key in "ab":
        wired.table(key)
    wired.advance(1.0)
    wired.log.clear()
    wired.push_rows(0, dict.fromkeys(range(6), 1), "a")
    wired.push_rows(0, dict.fromkeys(range(6), 2), "b", priority=1)
    assert len(wired.log) == 1, "two rows of 16 bytes fill the window"
    wired.settle()
    wired.advance(1.0)
    order = [int(line.split("ids=[")[1][0]) for line in wired.log if "PushRows" in line]
    assert order == [0, 1, 1, 1, 0, 0]
    assert wired.now_there("a") == [1] * 6 and wired.now_there("b") == [2] * 6


def test_pulls_of_small_runs_share_a_message(wired: Tables) -> None:
    infos = [wired.table(key) for key in "ab"]
    wired.log.clear()
    outs = [np.zeros((2, 2), np.float32) for _ in infos]
    ids = np.array([1, 4])
    runs = [run for info, out in zip(infos, outs, strict=True) for run in pull_runs(info, ids, out, 1)]
    request = wired.ask(0, lambda number: Transfer(number, RunKind.PULL, "pull of two", runs))
    wired.settle()
    assert request in wired.completed and all((out == 1).all() for out in outs)
    assert sum("worker-0 -> server-0: PullRows" in line for line in wired.log) == 1


def test_a_pull_of_nothing_is_complete_at_once(wired: Tables) -> None:
    wired.table()
    wired.log.clear()
    request = wired.pull_rows(0, [])
    assert request in wired.completed and not wired.log


# Patience.


def test_those_who_wait_for_rows_are_told_for_whom(wired: Tables) -> None:
    wired.table()
    wired.push_rows(0, {0: 1})
    wired.advance(12.0)
    assert any("worker-0: Waiting(deed=\"push key 't' (step 1)\", ranks=(1,)" in line for line in wired.log)
    assert wired.servers[0].explain(wired.now) == "waiting 12.0 s for worker-1 to push key 't' (step 1)"
    assert "waiting 12.0 s for worker-1 (host-1) to push key 't' (step 1), in push of t" in str(
        wired.workers[0].explain(wired.now)
    )


def test_those_who_wait_for_first_values_are_told_who_has_them(wired: Tables) -> None:
    wired.table(first=None)
    wired.pull_rows(1)
    wired.advance(12.0)
    assert wired.servers[0].explain(wired.now) == "waiting 12.0 s for worker-0 to give key 't' its first values"
    wired.leave(0)
    wired.advance(1.0)
    assert "for worker-1" in str(wired.servers[0].explain(wired.now))


# Tables that cannot be.


def test_a_table_for_which_a_server_has_no_memory_is_refused_to_all_and_the_arrays_beside_it_are_there() -> None:
    wired = Tables(2, 2, bigarray_bound=4)
    with mock.patch.object(row_storage.mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory")):
        for rank in (0, 1):
            columns = (("w", "t"), ((3,), (6, 2)), (DType.FLOAT32,) * 2)
            wired.ask(rank, lambda number, c=columns: DeclareKeys(number, 0, "sync", *c, forms=("", ROWS)))
        wired.settle()
    errors = [str(error) for error in wired.failed.values()]
    assert len(errors) == 2 and not wired.stopped
    for error in errors:
        assert "server-0: this machine has no memory for 3 rows of table 't', 24 bytes" in error
        assert "LazyRows" in error
    wired.initialise({"w": [1, 2, 3]})
    read = wired.pull(1, "w")
    wired.settle()
    assert wired.value(read, "w") == [1, 2, 3]
    columns = (("t",), ((6, 2),), (DType.FLOAT32,))
    again = wired.ask(1, lambda number: DeclareKeys(number, 0, "sync", *columns, forms=(ROWS,)))
    wired.settle()
    assert "has no memory" in str(wired.failed[again])


def test_a_round_for_whose_rows_there_is_no_memory_is_refused_to_all_and_changes_nothing() -> None:
    wired = Tables(2, 1)
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.table(shape=(1000, 2), form="constant(1)")
    rows = dict.fromkeys(range(500), 1)
    with mock.patch.object(row_storage.mmap, "mmap", side_effect=OSError(12, "Cannot allocate memory")):
        requests = [wired.push_rows(rank, rows) for rank in (0, 1)]
        wired.settle()
    assert all("key 't': no memory for" in str(wired.failed[request]) for request in requests)
    assert not wired.stopped and set(wired.now_there()) == {1}
    for rank in (0, 1):
        wired.push_rows(rank, {3: 1})
    wired.settle()
    assert wired.now_there()[2:5] == [1, 3, 1]


def test_a_pull_for_whose_answer_there_is_no_memory_is_refused_and_the_next_one_is_answered(wired: Tables) -> None:
    wired.table(form="constant(5)")
    with mock.patch.object(wired.servers[0].shard.buffers, "allocate", side_effect=MemoryError):
        request = wired.pull_rows(0)
        wired.settle()
    assert "key 't': server-0 has no memory for an answer of 6 rows: pull fewer" in str(wired.failed[request])
    assert not wired.stopped and wired.now_there() == [5] * 6


def test_a_table_that_workers_declare_otherwise_is_refused_to_all_naming_who_said_what() -> None:
    for shape, form, said in (
        ((6, 3), ROWS, "worker-0 declares key 't' with shape (6, 2); worker-1 with shape (6, 3);"),
        ((6, 2), "", "as a table of rows; worker-1 with shape (6, 2) and dtype float32;"),
        (
            (6, 2),
            "zeros",
            "; worker-1 with shape (6, 2) and dtype float32, as a table of rows that begin as zeros;",
        ),
    ):
        wired = Tables(2, 1)
        for rank, (own_shape, own_form) in enumerate((((6, 2), ROWS), (shape, form))):
            columns = (("t",), (own_shape,), (DType.FLOAT32,))
            forms = (own_form,)
            wired.ask(rank, lambda number, c=columns, f=forms: DeclareKeys(number, 0, "sync", *c, forms=f))
        wired.settle()
        assert len(wired.failed) == 2
        for error in map(str, wired.failed.values()):
            assert error.startswith("worker-0 declares key 't' with shape (6, 2)")
            assert said in error


def test_of_the_buffers_of_many_answers_at_once_few_are_kept(wired: Tables) -> None:
    wired.table()
    tables = wired.servers[0].shard
    for rank in (0, 1):
        for _ in range(BUFFERS_KEPT_MAX):
            wired.pull_rows(rank)
    wired.settle()
    most = len(tables.buffers.all)
    for rank in (0, 1, 0, 1):
        wired.pull_rows(rank)
        wired.settle()
    assert most == 2 * BUFFERS_KEPT_MAX and len(tables.buffers.all) == BUFFERS_KEPT_MAX
