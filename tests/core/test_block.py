"""A block of one slice: rounds are sets, what was handed out never changes."""

from __future__ import annotations

import importlib
import itertools
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvdist.core.policy import ASYNC, SYNC, Policy
from kvdist.core.round import Contribution, PullRequest, Verdict
from kvdist.core.server.block import Block, apply_round
from kvdist.core.server.holder import is_complete
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, worker
from kvdist.optimizer import registry
from kvdist.optimizer.base import Extent
from kvdist.optimizer.registry import create
from kvdist.optimizer.updater import Updater
from kvdist.protocol.messages import Flag
from tests.cases import each

OPEN = None


def fresh(policy: Policy = SYNC, dtype: DType = DType.FLOAT32) -> Block:
    return Block.of(0, [4], [Extent("w", (3,))], [3], dtype, policy)


def block(policy: Policy = SYNC, dtype: DType = DType.FLOAT32, first: list[float] | None = None) -> Block:
    made = fresh(policy, dtype)
    made.initialise([np.array(first or [1, 2, 3], dtype.storage)])
    return made


def close(made: Block, updater: Updater | None = None) -> list[Contribution]:
    contributions = made.round.close()
    apply_round([made], [contributions], updater)
    return contributions


def contribution(rank: int, values: list[float], step: int = 0, **options: Any) -> Contribution:
    setting = options.get("setting", (OPEN, OPEN, OPEN))
    dtype = options.get("dtype", DType.FLOAT32)
    flags = options.get("flags", 0)
    samples = options.get("samples", 0)
    return Contribution(
        Member(worker(rank), rank + 1), 9, step, 0, samples, flags, setting, np.array(values, dtype.storage), False
    )


def offer_all(made: Block, *contributions: Contribution) -> None:
    for one in contributions:
        assert made.offer(one, 0.0) is Verdict.ACCEPTED


def value(made: Block) -> list[float]:
    assert made.published is not None
    values: list[float] = made.published.array.tolist()
    return values


def test_the_first_value_stays_when_another_one_is_given() -> None:
    made = block()
    made.initialise([np.zeros(3, np.float32)])
    assert value(made) == [1, 2, 3]
    assert made.version == 0


def test_without_an_optimizer_the_sum_replaces_the_value() -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1]), contribution(2, [10, 20, 30]))
    assert is_complete([made], {0, 2})
    close(made)
    assert value(made) == [11, 21, 31]
    assert made.version == 1 and made.round.counted == {0: 1, 2: 1}


def test_the_first_contribution_of_a_worker_wins() -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1]))
    assert made.offer(contribution(0, [9, 9, 9]), 1.0) is Verdict.REPEATED
    close(made)
    assert value(made) == [1, 1, 1]


def test_a_push_that_was_counted_before_is_not_added_again() -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1]))
    close(made)
    assert made.offer(contribution(0, [1, 1, 1]), 1.0) is Verdict.ALREADY_COUNTED
    assert not made.round.slots


def test_a_push_from_the_future_is_refused() -> None:
    with pytest.raises(PushRefused, match=r"worker-3 sent its push 2 of key 'w', but only 0"):
        block().offer(contribution(3, [1, 1, 1], step=2), 0.0)


def test_a_round_is_summed_in_rank_order_whoever_comes_first() -> None:
    pushes = [contribution(0, [1e8, 0, 1]), contribution(1, [1, 1, 1]), contribution(2, [-1e8, 1, 1])]
    results = set()
    for order in itertools.permutations(pushes):
        made = block()
        offer_all(made, *order)
        close(made)
        results.add(tuple(value(made)))
    assert results == {(0.0, 2.0, 3.0)}, "in float32 1e8 + 1 is 1e8, so the order is visible"


def test_what_was_handed_out_never_changes() -> None:
    made = block()
    buffers = []
    for step in range(5):
        assert made.published is not None
        made.published.leases += 1
        buffers.append((made.published, made.published.array.tolist()))
        offer_all(made, contribution(0, [step, step, step], step))
        close(made)
    assert len({id(buffer) for buffer, _ in buffers}) == 5
    assert all(buffer.array.tolist() == seen for buffer, seen in buffers)


def test_two_buffers_are_enough_while_nobody_reads_and_a_third_serves_one_reader() -> None:
    made = block()
    used = set()
    for step in range(6):
        used.add(id(made.published))
        if step == 2:
            assert made.published is not None
            made.published.leases += 1
        offer_all(made, contribution(0, [1, 1, 1], step))
        close(made)
    assert len(used) == 3


def test_a_refused_round_keeps_the_value_and_lets_the_counters_go_on() -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1], setting=(0.1, 0, 1)), contribution(1, [1, 1, 1], setting=(0.2, 0, 1)))
    updater = Updater(create("sgd", learning_rate=0.5), REFERENCE)
    with pytest.raises(OptimizerMismatch, match=r"worker-0 says lr 0.1, wd 0; worker-1 says lr 0.2, wd 0"):
        close(made, updater)
    assert value(made) == [1, 2, 3]
    assert (made.version, made.round.counted, made.round.slots) == (1, {0: 1, 1: 1}, {})
    offer_all(
        made, contribution(0, [1, 1, 1], 1, setting=(0.5, 0, 1)), contribution(1, [1, 1, 1], 1, setting=(0.5, 0, 1))
    )
    close(made, updater)
    assert value(made) == [0, 1, 2]


def test_the_learning_rate_of_the_push_wins_over_the_optimizers_own() -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1], setting=(0.25, 0.0, 2.0)))
    close(made, Updater(create("sgd", learning_rate=100.0), REFERENCE))
    assert value(made) == [0.5, 1.5, 2.5]


def test_each_contribution_is_rescaled_by_its_own_factor() -> None:
    made = block()
    offer_all(
        made, contribution(0, [1, 1, 1], setting=(OPEN, OPEN, 2)), contribution(1, [1, 1, 1], setting=(OPEN, OPEN, 3))
    )
    close(made)
    assert value(made) == [5, 5, 5]


def test_an_average_divides_by_all_contributions_the_empty_ones_too() -> None:
    made = block()
    average, empty = int(Flag.AVERAGE), int(Flag.AVERAGE | Flag.EMPTY)
    offer_all(made, contribution(0, [4, 8, 12], flags=average), contribution(1, [], flags=empty))
    close(made)
    assert value(made) == [2, 4, 6]


def test_a_mean_over_samples_weighs_each_contribution_by_its_own() -> None:
    made = block()
    weighted = int(Flag.WEIGHTED)
    offer_all(
        made,
        contribution(0, [4, 8, 12], flags=weighted, samples=3),
        contribution(1, [8, 0, 4], flags=weighted, samples=1),
        contribution(2, [], flags=int(Flag.EMPTY | Flag.WEIGHTED), samples=4),  # no gradient of this key, but a loss
        contribution(3, [], flags=int(Flag.EMPTY | Flag.AVERAGE), samples=6),  # a skipped step
    )
    close(made)
    assert value(made) == [2.5, 3, 5]


@each("flags", [(int(Flag.WEIGHTED), 0), (int(Flag.WEIGHTED), int(Flag.WEIGHTED))])
def test_contributions_of_which_one_has_no_samples_are_refused_and_the_value_stays(flags: tuple[int, int]) -> None:
    made = block()
    offer_all(made, contribution(0, [1, 1, 1], flags=flags[0], samples=2), contribution(1, [1, 1, 1], flags=flags[1]))
    with pytest.raises((OptimizerMismatch, PushRefused), match="samples"):
        close(made)
    assert value(made) == [1, 2, 3]


def test_a_round_of_empty_contributions_counts_and_changes_nothing() -> None:
    made = block()
    offer_all(made, contribution(0, [], flags=int(Flag.EMPTY)), contribution(1, [], flags=int(Flag.EMPTY)))
    close(made)
    assert value(made) == [1, 2, 3]
    assert made.version == 1


def test_integers_are_not_updated_by_an_optimizer_and_the_error_names_the_key() -> None:
    made = block(dtype=DType.INT32)
    offer_all(made, contribution(0, [1, 1, 1], dtype=DType.INT32))
    with pytest.raises(PushRefused, match="key 'w'"):
        close(made, Updater(create("sgd"), REFERENCE))
    assert value(made) == [1, 2, 3]


def test_an_asynchronous_push_without_an_optimizer_is_refused_with_what_to_do() -> None:
    made = block(ASYNC)
    offer_all(made, contribution(0, [1, 1, 1]))
    with pytest.raises(PushRefused, match="call set_optimizer before the first push"):
        close(made)


def test_asynchronous_pushes_that_wait_for_the_first_value_make_one_version_each() -> None:
    made = block(ASYNC)
    offer_all(made, contribution(1, [10, 0, 0]), contribution(0, [1, 0, 0]))
    updater = Updater(create("test"), REFERENCE)
    assert [one.member.node.rank for one in close(made, updater)] == [0]
    assert (made.version, value(made)) == (1, [2, 2, 3])
    assert [one.member.node.rank for one in close(made, updater)] == [1]
    assert (made.version, value(made)) == (2, [12, 2, 3])


@pytest.fixture
def compensated() -> type[Any]:
    """The rule of the example, which is registered for this test alone."""
    with mock.patch.dict(registry._BY_NAME):
        return importlib.import_module("examples.delay_compensation").DelayCompensation


def test_a_rule_knows_whose_push_an_asynchronous_update_is_so_dc_asgd_remembers_what_each_worker_has(
    compensated: type[Any],
) -> None:
    rate, lamda = 0.5, 0.25
    made, updater = block(ASYNC), Updater(compensated(learning_rate=rate, workers=2, lamda=lamda), REFERENCE)
    weight, pulled, steps = np.array([1, 2, 3], np.float32), {}, [0, 0, 0]
    for turn, rank in enumerate([0, 1, 1, 2, 0, 1]):
        grad = np.array([1, -2, turn], np.float32)
        offer_all(made, contribution(rank, grad.tolist(), step=steps[rank]))
        close(made, updater)
        steps[rank] += 1
        late = weight - pulled.get(rank, np.array([1, 2, 3], np.float32)) if rank < 2 else 0
        weight = weight - rate * (grad + lamda * grad * grad * late)
        pulled[rank] = weight
        assert value(made) == weight.tolist(), f"turn {turn}"


def test_a_rule_hears_of_nobody_where_several_have_pushed(compensated: type[Any]) -> None:
    made, updater = block(), Updater(compensated(learning_rate=1.0, workers=2, lamda=1.0), REFERENCE)
    for step in range(2):
        offer_all(made, contribution(0, [1, 1, 1], step), contribution(1, [1, 1, 1], step))
        close(made, updater)
    assert value(made) == [-3, -2, -1], "the sum of ones, twice, and nothing is corrected"


def test_a_pull_waits_for_the_workers_own_pushes_and_for_its_version() -> None:
    made = block()
    member = Member(worker(0), 1)
    made.round.pulls = [PullRequest(member, 1, 0, 0), PullRequest(member, 2, 1, 0), PullRequest(member, 3, 0, 2)]
    assert [pull.run for pull in made.round.take_satisfied()] == [1]
    offer_all(made, contribution(0, [1, 1, 1]))
    close(made)
    assert [pull.run for pull in made.round.take_satisfied()] == [2]
    offer_all(made, contribution(0, [1, 1, 1], 1))
    close(made)
    assert [pull.run for pull in made.round.take_satisfied()] == [3]
    assert not made.round.pulls


def test_no_round_is_complete_before_the_first_value() -> None:
    made = fresh()
    offer_all(made, contribution(0, [1, 1, 1]))
    assert not is_complete([made], {0})


def test_a_replaced_value_keeps_its_version_and_what_was_read_stays() -> None:
    made = block()
    assert made.published is not None
    before = made.published
    before.leases += 1
    made.replace([np.array([7, 8, 9], np.float32)])
    assert value(made) == [7, 8, 9] and made.version == 0
    assert before.array.tolist() == [1, 2, 3]


def test_values_that_are_replaced_again_and_again_never_come_in_an_array_that_was_shown_and_leave_none_behind() -> None:
    made = block()
    assert made.published is not None
    read = made.published
    read.leases += 1
    shown = [read.array]
    for turn in range(5):
        made.replace([np.array([turn, 8, 9], np.float32)])
        assert not any(made.published.array is array for array in shown)
        shown.append(made.published.array)
    assert [buffer.leases for buffer in made.pool.free_buffers] == [1], "what somebody reads is kept from others"
    assert read.array.tolist() == [1, 2, 3]
    read.leases -= 1
    made.replace([np.zeros(3, np.float32)])
    assert made.pool.free_buffers == []


# Values that are read where they lie.


def one_version(made: Block, step: int, rank: int = 1) -> None:
    offer_all(made, contribution(rank, [step, step, step], step))
    close(made)


def test_a_held_version_is_not_written_until_its_successor_has_arrived() -> None:
    made, reader = block(), Member(worker(0), 1)
    assert made.lend(reader) is None
    first = made.lent[reader]
    for step in range(5):
        one_version(made, step)
    assert first.array.tolist() == [1, 2, 3] and first.leases == 1
    before = made.lend(reader)
    assert before is first and first.leases == 1, "until the worker has acknowledged its successor"
    second = made.lent[reader]
    for step in range(5, 10):
        one_version(made, step)
    assert (first.array.tolist(), second.array.tolist()) == ([1, 2, 3], [4, 4, 4])
    first.leases -= 1
    for step in range(10, 13):
        one_version(made, step)
    assert first.array.tolist() != [1, 2, 3], "it is free again, and used"
    assert second.array.tolist() == [4, 4, 4]


def test_holding_the_same_version_twice_leaves_it_held_once_it_is_acknowledged() -> None:
    made, reader = block(), Member(worker(0), 1)
    made.lend(reader)
    before = made.lend(reader)
    assert before is made.published and before is not None and before.leases == 2
    before.leases -= 1
    for step in range(4):
        one_version(made, step)
    assert before.array.tolist() == [1, 2, 3]


def test_the_number_of_buffers_stays_bounded_while_one_worker_reads_slowly() -> None:
    made, slow, fast = block(), Member(worker(0), 1), Member(worker(1), 2)
    made.lend(slow)
    buffers = set()
    for step in range(50):
        one_version(made, step)
        before = made.lend(fast)
        if before is not None:
            before.leases -= 1
        assert made.published is not None
        buffers.add(id(made.published.array))
    assert len(buffers) + 1 <= 5
    assert len(made.pool.free_buffers) <= 4


def test_a_part_of_a_larger_buffer_is_never_written() -> None:
    made = block()
    assert made.published is not None
    part = made.published
    part.pooled = False
    for step in range(6):
        one_version(made, step)
    assert part.array.tolist() == [1, 2, 3] and part not in made.pool.free_buffers
