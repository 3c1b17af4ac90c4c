"""Which moment of a table of rows is saved, and how servers go on from it: as of arrays, but rows change in place."""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest

from kvdist.checkpoint.format import NAME
from kvdist.checkpoint.snapshot import STATES, WEIGHTS, ReadShards, Sweep, WriteManifest, WriteShard
from kvdist.core.server.table_rows import TableRows
from kvdist.core.worker.requests import RunKind
from tests.cases import each
from tests.core.table_training import (
    NUMBERS,
    TABLES,
    a_cluster,
    expected,
    first,
    give,
    load_all,
    pull,
    push,
    push_all,
    require_moment,
    require_nothing_left,
    save_all,
    send,
    values_of,
)
from tests.core.training import FULL, failures


@each("seed", range(12))
def test_a_synchronous_checkpoint_is_one_moment_whoever_runs_ahead_or_lags(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)
    wired = a_cluster(3)
    calls = [generator.choice((0, 1, 2)) for _ in range(60)]
    progress, requests = [0, 0, 0], []
    for rank in [*calls, *[0, 1, 2] * 6]:
        at = progress[rank]
        if at == 3:
            requests.append(wired.save(rank, tmp_path, *TABLES, step=3))
        elif at < 6:
            push(wired, rank, at if at < 3 else at - 1)
        progress[rank] += 1
        wired.deliver(min(len(wired.wire), generator.randrange(12)))
        if wired.works and generator.random() < 0.2:
            wired.work()
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    manifest = require_moment(tmp_path, (0, 1, 2), 3)
    assert manifest.exact and manifest.num_servers == 2
    assert values_of(wired) == expected((0, 1, 2), 5), "training has gone on"
    require_nothing_left(wired)


def test_marks_that_come_after_the_pushes_find_the_moment_too(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0, 1)
    requests = save_all(wired, tmp_path)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, (0, 1), 2)


def test_the_mark_of_one_worker_is_enough_to_keep_the_moment(tmp_path: Path) -> None:
    wired = a_cluster()
    push(wired, 0, 0)
    wired.save(0, tmp_path, *TABLES)
    push(wired, 0, 1)
    wired.settle()
    push(wired, 1, 0)
    wired.settle()
    assert [type(one.work) for one in wired.works] == [WriteShard, WriteShard], "both write before worker 1 has called"
    wired.save(1, tmp_path, *TABLES)
    push(wired, 1, 1)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 1)


def test_what_is_written_does_not_change_while_rounds_go_on(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle()
    held = [wired.works.popleft() for _ in range(2)]
    push_all(wired, 1, 2, 3, 4)
    for one in held:
        wired.finish(one)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 1)
    require_nothing_left(wired)


def test_a_checkpoint_waits_for_first_values_of_tables(tmp_path: Path) -> None:
    wired = a_cluster(gives=False)
    requests = save_all(wired, tmp_path)
    wired.settle()
    assert not wired.works
    give(wired)
    wired.settle_works()
    assert all(request in wired.completed for request in requests)
    require_moment(tmp_path, (0, 1), 0)


def test_an_asynchronous_checkpoint_has_all_pushes_that_were_marked(tmp_path: Path) -> None:
    wired = a_cluster(mode="async")
    push_all(wired, 0)
    push(wired, 1, 1)
    wired.settle()
    wired.save(0, tmp_path, *TABLES)
    wired.settle()
    assert not wired.works, "nothing is taken before all have marked"
    wired.save(1, tmp_path, *TABLES)
    wired.settle_works()
    saved = values_of(wired)
    push_all(wired, 2)
    load_all(wired, tmp_path)
    wired.settle_works()
    assert values_of(wired) == saved


def test_a_worker_that_leaves_does_not_hold_up_the_checkpoint_of_a_table(tmp_path: Path) -> None:
    wired = a_cluster(3)
    push_all(wired, 0)
    for rank in (0, 1):
        push(wired, rank, 1)
        wired.save(rank, tmp_path, *TABLES)
    wired.settle()
    assert not wired.works
    wired.leave(2)  # which closes the round
    wired.settle_works()
    assert (tmp_path / NAME).exists()
    require_nothing_left(wired)


# Other numbers of servers.


@pytest.mark.parametrize("before", [1, 2, 3])
@pytest.mark.parametrize("after", [1, 2, 3, 5])
def test_any_number_of_servers_goes_on_to_the_bit(tmp_path: Path, before: int, after: int) -> None:
    wired = a_cluster(num_servers=before)
    push_all(wired, 0, 1)
    save_all(wired, tmp_path)
    wired.settle_works()
    other = a_cluster(num_servers=after)
    push_all(other, 7, 8)
    requests = load_all(other, tmp_path)
    other.settle_works()
    assert all(request in other.completed for request in requests)
    assert values_of(other) == expected((0, 1), 2)
    push_all(other, 2, 3)
    assert values_of(other) == expected((0, 1), 4)
    save_all(other, tmp_path / "again")
    other.settle_works()
    require_moment(tmp_path / "again", (0, 1), 4)  # no row has come into being that would not have
    require_nothing_left(other)


def test_rows_that_do_not_exist_stay_so(tmp_path: Path) -> None:
    wired = a_cluster()
    save_all(wired, tmp_path)
    wired.settle_works()
    other = a_cluster()
    push_all(other, 0, 1)
    load_all(other, tmp_path)
    other.settle_works()
    blocks = [table.rows for server in other.servers for table in server.shard.tables.values()]
    assert {block.key for block in blocks if block.is_lazy} == {"lazy", "untouched", "home"}
    assert all(block.rows_touched == 0 and block.updates == 0 for block in blocks if block.is_lazy)
    assert values_of(other) == expected((0, 1), 0)


def test_a_sum_that_replaced_a_lazy_table_comes_back_with_zeros_around_it(tmp_path: Path) -> None:
    wired = a_cluster(1, numbers=None)
    send(wired, 0, RunKind.PUSH, "lazy", {3: 4.0, 600_000: 5.0})
    wired.settle()
    save_all(wired, tmp_path)
    wired.settle_works()
    other = a_cluster(1, 3)
    assert pull(other, 0, "lazy", [4])[0, 0] == 2.0
    load_all(other, tmp_path, (WEIGHTS,))
    other.settle_works()
    assert pull(other, 0, "lazy", [2, 3, 600_000, 999_999])[:, 0].tolist() == [0.0, 4.0, 5.0, 0.0]


# Parts.


def test_weights_alone_leave_momenta_and_states_alone_leave_values(tmp_path: Path) -> None:
    wired = a_cluster(1, 2)
    row = {"lazy": 600_000, "eager": 20}
    for key, number in row.items():
        send(wired, 0, RunKind.PUSH, key, {number: 8.0})
    save_all(wired, tmp_path)  # 8 less than in the beginning, momentum: -8
    wired.settle_works()
    for key, number in row.items():
        send(wired, 0, RunKind.PUSH, key, {number: 0.0, number + 1: 2.0})
    wired.settle()  # momenta: -4, -2
    for contents, values, momenta in (((WEIGHTS,), (-8.0, 0.0), (-4.0, -2.0)), ((STATES,), (-10.0, -1.0), (-8.0, 0.0))):
        load_all(wired, tmp_path, contents)
        wired.settle_works()
        for key, number in row.items():
            before = pull(wired, 0, key, [number, number + 1])[:, 0]
            changes = before - [first(key, number), first(key, number + 1)]
            assert changes.tolist() == list(values), (contents, key)
            send(wired, 0, RunKind.PUSH, key, {number: 0.0, number + 1: 0.0})
            wired.settle()
            moved = pull(wired, 0, key, [number, number + 1])[:, 0] - before
            assert moved.tolist() == [0.5 * one for one in momenta], (contents, key)


# What fails.


@each("kind", [WriteShard, WriteManifest])
def test_a_full_disk_leaves_nothing_of_tables_and_training_goes_on(tmp_path: Path, kind: type) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    requests = save_all(wired, tmp_path)
    push_all(wired, 1)
    works = wired.settle_works(kind, FULL)
    assert any(isinstance(one, Sweep) for one in works)
    assert all(FULL in reason for reason in failures(wired, requests))
    assert not list(tmp_path.glob("*"))
    require_nothing_left(wired)
    push_all(wired, 2)
    assert values_of(wired) == expected((0, 1), 3)
    save_all(wired, tmp_path)
    wired.settle_works()
    require_moment(tmp_path, (0, 1), 3)


def test_a_table_too_large_for_a_copy_costs_the_checkpoint_and_nothing_else(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    with mock.patch.object(TableRows, "saved", mock.Mock(side_effect=MemoryError)):
        requests = save_all(wired, tmp_path)
        push_all(wired, 1)
        wired.settle_works()
    assert all("no memory for the copy" in reason for reason in failures(wired, requests))
    assert not list(tmp_path.glob("*"))
    require_nothing_left(wired)
    assert values_of(wired) == expected((0, 1), 2)


def test_a_table_that_one_server_cannot_read_is_restored_by_none(tmp_path: Path) -> None:
    wired = a_cluster()
    save_all(wired, tmp_path)
    wired.settle_works()
    push_all(wired, 0, 1)
    requests = load_all(wired, tmp_path)
    wired.settle()
    while wired.works:
        is_first = isinstance(wired.works[0].work, ReadShards) and wired.works[0].who == "server-1"
        wired.work(FULL if is_first else "")
        wired.settle()
    assert all(FULL in reason for reason in failures(wired, requests))
    assert values_of(wired) == expected((0, 1), 2)
    push_all(wired, 2)
    assert values_of(wired) == expected((0, 1), 3)


def test_what_a_departed_worker_has_pushed_was_for_the_rows_before_the_load(tmp_path: Path) -> None:
    wired = a_cluster(3)
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle_works()
    push(wired, 2, 1)
    wired.leave(2)
    wired.advance(1.0)
    assert any(table.round.slots for server in wired.servers for table in server.shard.tables.values())
    for rank in (0, 1):
        wired.load(rank, tmp_path)
    wired.settle_works()
    assert all(not table.round.slots for server in wired.servers for table in server.shard.tables.values())
    assert values_of(wired) == expected((0, 1, 2), 1)


def test_workers_that_call_at_different_steps_all_fail_and_training_goes_on(tmp_path: Path) -> None:
    wired = a_cluster()
    push_all(wired, 0)
    push(wired, 1, 1)
    requests = [wired.save(rank, tmp_path, *TABLES) for rank in (0, 1)]
    push(wired, 0, 1)
    wired.settle_works()
    assert all("every worker must call it at the same step" in reason for reason in failures(wired, requests))
    assert values_of(wired) == expected((0, 1), 2)
    require_nothing_left(wired)


def test_the_learning_rate_is_that_of_the_run_which_loads(tmp_path: Path) -> None:
    wired = a_cluster(1, 2)
    push_all(wired, 0)
    save_all(wired, tmp_path)
    wired.settle_works()
    other = a_cluster(1, 3, numbers={**NUMBERS, "learning_rate": 0.25})
    load_all(other, tmp_path)
    other.settle_works()
    assert values_of(other) == expected((0,), 1)
    before = pull(other, 0, "lazy", [77])[0, 0]
    send(other, 0, RunKind.PUSH, "lazy", {77: 4.0})
    assert pull(other, 0, "lazy", [77])[0, 0] == before - 1.0
