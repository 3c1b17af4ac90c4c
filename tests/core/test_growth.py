"""Nothing that machines keep grows with the steps of a run, and no message costs work for all pairs of workers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from unittest import mock

import pytest

from kvdist.core.reliable import Reliable
from kvdist.core.scheduler.keys import StoreKeys
from tests.core.growth import growth, sizes
from tests.core.test_keys import answered, declare, member
from tests.core.wired import Wired
from tests.core.work import Work, counting_lines
from tests.simulation import (
    DELAYED,
    GOES_BACK,
    LEASES,
    QUORUM,
    QUOTA,
    REPLICAS,
    RETURNS,
    Scenario,
    run,
)

STEPS = 28
"""After these, and after twice as many, the sizes of all containers are compared."""
ROUNDS = 2 * STEPS + 4
EXAMPLES = 9 * ROUNDS // 2
"""Of an epoch, of which there are two: three workers use nine in a step."""

STEADY = {
    "rows, means and checkpoints": Scenario(
        num_workers=3, rounds=ROUNDS, optimizer="sgd", tables=True, means=range(1, ROUNDS, 2)
    ),
    "a second model": Scenario(num_workers=3, rounds=ROUNDS, second=True, on_loss="continue"),
    "async": Scenario(num_workers=3, rounds=ROUNDS, mode="async", optimizer="sgd", tables=True, saves=0.1),
    "sums of hosts": Scenario(num_workers=4, rounds=ROUNDS, hosts=2, local_reduce="on", saves=0.1),
    "leases": replace(LEASES, num_workers=3, examples=EXAMPLES),
    "leases beside snapshots": replace(GOES_BACK, examples=EXAMPLES),
    "leases of a scheduler that may return": replace(RETURNS, examples=EXAMPLES),
    "snapshots": replace(GOES_BACK, rounds=ROUNDS),
    "a scheduler that may return": replace(RETURNS, rounds=ROUNDS),
    "a quota": replace(QUOTA, rounds=ROUNDS, again=None),
    "quorum": replace(QUORUM, rounds=ROUNDS, again=None),
    "delays": replace(DELAYED, rounds=ROUNDS),
    "replicas": replace(REPLICAS, rounds=ROUNDS, tables=True),
}
"""Runs in which nobody comes, leaves or is lost before the end, so that nothing may grow."""

CROWD = replace(
    RETURNS, num_workers=200, victims=("scheduler",), rounds=1, fault_round=0, spread_s=0.003, holds=False, saves=0.0
)
LINES_MAX = 25 * CROWD.num_workers
"""A message costs no more lines on the average: some for each worker, but not for each pair of them."""
STEP_LINES_MAX = 1500
"""The same of messages that come from each worker in each step: what they cost has nothing to do with the others."""
LINES_PER_EFFECT_MAX = 100
"""And so many more for each thing that has to be done for it: there may be one for each worker that has waited."""


@pytest.mark.slow_cases(
    *("a second model", "async", "leases", "leases of a scheduler that may return"),
    *("snapshots", "quorum", "delays"),
)
@pytest.mark.parametrize("name", STEADY)
def test_what_is_kept_does_not_grow_with_the_steps(name: str) -> None:
    scenario = replace(STEADY[name], victims=())
    growing = set(growth(0, scenario, STEPS))
    for seed in (1, 2):  # what is only under way grows by chance, and so not in each of these runs
        growing &= set(growth(seed, scenario, STEPS)) if growing else set()
    assert not growing


def test_no_message_among_200_workers_costs_work_for_all_pairs_of_them() -> None:
    with counting_lines() as work, mock.patch.object(Reliable, "validate"):  # that looks at all links each time
        result = run(0, CROWD)
    assert result.happened["return"], "all have told a scheduler that was started again who is there"
    assert not work.beyond(LINES_MAX, LINES_PER_EFFECT_MAX)
    assert not work.beyond(STEP_LINES_MAX, LINES_PER_EFFECT_MAX, ("Push", "Pull", "Values", "Counted", "Ack"))


def keys_of(count: int) -> dict[int | str, tuple[int, ...]]:
    return {f"key {number}": (1,) for number in range(count)}


def declared_by(num_workers: int, keys: int) -> Wired:
    wired = Wired(num_workers, 1, on_loss="continue")
    for rank in range(num_workers):
        wired.declare(rank, keys_of(keys))
    wired.settle()
    return wired


def loss_while_keys_have_no_values(keys: int) -> Work:
    wired = declared_by(3, keys)
    with counting_lines() as work:
        wired.kill("worker-2")
        wired.settle()
    assert ("Scheduler", "Seen") in work.lines and "scheduler" not in wired.stopped, "the one with values is there"
    return work


def cut_for(newcomers: int) -> Work:
    wired = declared_by(newcomers + 1, 20)
    for rank in range(newcomers + 1):
        wired.set_optimizer(rank, "test")
    wired.give(0, {key: [0.0] for key in keys_of(20)})
    wired.settle()
    for rank in range(1, newcomers + 1):
        wired.kill(f"worker-{rank}")
        wired.come_back(rank)
        wired.declare(rank, keys_of(20))
    wired.settle()
    with counting_lines() as work:
        for rank in range(1, newcomers + 1):
            wired.take_part(rank)
        wired.settle()
    assert len(wired.scheduler.membership.awaited) == newcomers + 1
    assert work.times["Server", "Roster"] <= 4, "all but the first have joined together"
    return work


def lines_of_a_mark(num_workers: int) -> float:
    """On the average, of one that comes while a round is open, as a worker has yet to push."""
    wired = declared_by(num_workers, 4)
    values: dict[int | str, list[float]] = {key: [1.0] for key in keys_of(4)}
    wired.give(0, values)
    wired.settle()
    for rank in range(1, num_workers):
        wired.push(rank, values)
    with counting_lines() as work:
        for rank in range(1, num_workers):
            wired.save(rank, "/nowhere/step-1", *values)
        wired.settle()
    assert work.times["Server", "MarkPushes"] == num_workers - 1 and not wired.works, "no slice is taken yet"
    return work.lines["Server", "MarkPushes"] / (num_workers - 1)


def test_a_mark_of_a_checkpoint_costs_no_more_where_many_have_marked() -> None:
    assert lines_of_a_mark(48) < 1.2 * lines_of_a_mark(6)


def test_a_loss_while_keys_have_no_values_costs_no_square_of_the_keys() -> None:
    few, many = (loss_while_keys_have_no_values(keys).lines["Scheduler", "Seen"] for keys in (200, 800))
    assert many < 6 * few


def test_a_cut_costs_no_square_of_the_workers_that_join_by_it() -> None:
    few, many = (cut_for(newcomers).lines["Server", "Roster"] for newcomers in (6, 24))
    assert many < 6 * few


def test_of_the_orders_in_which_workers_have_declared_keys_nothing_is_kept() -> None:
    workers, messages = 40, 10
    store, random = StoreKeys(0, "sync", member(0), 64, lambda pushes: set()), Random(0)
    for number in range(messages):
        for rank in random.sample(range(workers), workers):
            declare(store, rank, {f"key {number}": (1,)})
        store.mark_placed(store.take_agreed(set(range(workers))))
        assert len(answered(store)) == workers
    assert max(sizes([store]).values()) <= 2 * messages, sizes([store]).most_common(3)


def test_what_a_newcomer_waits_for_is_not_looked_at_after_messages_that_say_nothing_of_it() -> None:
    keys = 300
    wired = declared_by(3, keys)
    wired.kill("worker-1")
    wired.come_back(1)
    request = wired.declare(1, keys_of(keys + 1))
    wired.settle()
    with counting_lines() as work:
        wired.advance(30.0)
    assert work.times["Scheduler", "Alive"] > 10
    assert work.lines["Scheduler", "Alive"] < keys * work.times["Scheduler", "Alive"]
    assert request not in wired.completed
    for rank in (0, 2):
        wired.declare(rank, keys_of(keys + 1))
    wired.settle()
    assert request in wired.completed
