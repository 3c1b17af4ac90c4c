"""Leases of examples, as the scheduler keeps them: what is refused, what goes back, where a checkpoint is."""

from __future__ import annotations

from typing import Any

import pytest

from kvdist.core.scheduler.leases import LeaseHolder, Plan, Queue, Range, merged, position_of, restored, split
from kvdist.errors import ConfigError
from kvdist.protocol.messages import Lease, Leased, Used
from tests.cases import each
from tests.core.wired import Wired

PLAN = (100, 2, True, 7)


@pytest.fixture
def wired() -> Wired:
    made = Wired(3, 1, on_loss="continue")
    made.initialise({"w": [0.0]})
    for rank in range(3):
        made.set_optimizer(rank, "test")
    made.settle()
    return made


def lease(wired: Wired, rank: int, used: int = 0, *, number: int = 0, plan: Any = PLAN, rests: bool = False) -> int:
    request = wired.ask(rank, lambda one: Lease(one, 0, number, *plan, 10, 40, used, used, rests))
    wired.settle()
    return request


def given(wired: Wired, request: int) -> Range:
    leased = wired.completed[request]
    assert isinstance(leased, Leased)
    return Range(leased.epoch, leased.start, leased.stop)


def refusal(wired: Wired, request: int) -> str:
    error = wired.failed[request]
    assert isinstance(error, ConfigError)
    return str(error)


def test_nothing_is_leased_where_the_others_wait_for_a_lost_worker() -> None:
    wired = Wired(2, 1, on_loss="wait")
    assert "use a SplitSampler, or continue" in refusal(wired, lease(wired, 0))


def test_ranges_are_whole_batches_and_shrink_towards_the_end_of_an_epoch() -> None:
    queue = Queue.of(Plan(1000, 2, True, 0))
    sizes = []
    while (taken := queue.lease(10, 40, 3)) is not None:
        sizes.append(taken.size)
    assert sizes[0] == 40 and sizes[-1] == 10 and sum(sizes) == 2000
    assert all(size % 10 == 0 for size in sizes)


def test_ranges_that_touch_are_one_and_those_that_are_named_twice_count_once() -> None:
    ranges = [Range(0, 30, 40), Range(0, 0, 10), Range(0, 10, 20), Range(0, 35, 50), Range(1, 50, 60), Range(1, 5, 5)]
    assert merged(ranges, 60) == [Range(0, 0, 20), Range(0, 30, 50), Range(1, 50, 60)]
    assert merged([*ranges, Range(2, 0, 70), Range(3, 9, 60)], 60)[2:] == [Range(1, 50, 180)], "over the end of epochs"


def test_a_million_epochs_are_one_range_and_each_is_leased_by_itself() -> None:
    queue = Queue.of(plan := Plan(10, 1_000_000, True, 0))
    taken = [queue.lease(4, 4, 1) for _ in range(4)]
    assert taken == [Range(0, 0, 4), Range(0, 4, 8), Range(0, 8, 10), Range(1, 0, 4)]
    queue.give_back([Range(0, 8, 10)])
    position = position_of(0, plan, queue.free)
    assert position["left"] == [[0, 8, 10], [1, 4, 9_999_990]]
    huge = Plan(2**63 - 1, 2**31 - 1, False, 0)
    assert position_of(0, huge, Queue.of(huge).free)["left"] == [[0, 0, huge.length * huge.epochs]]
    _, _, again = restored(position)
    assert [again.lease(4, 4, 1) for _ in range(2)] == [Range(0, 8, 10), Range(1, 4, 8)]


def test_what_is_used_goes_from_the_first_range_on() -> None:
    holder = LeaseHolder(0, 5, [Range(0, 0, 10), Range(0, 40, 50)])
    holder.use(3)  # an older number
    holder.use(18)
    assert (holder.ranges, holder.left) == ([Range(0, 43, 50)], 7)


def test_ranges_are_split_after_a_number_of_places() -> None:
    ranges = [Range(0, 0, 10), Range(1, 40, 50)]
    assert split(ranges, 13) == ([Range(0, 0, 10), Range(1, 40, 43)], [Range(1, 43, 50)])
    assert (split(ranges, 0), split(ranges, 99)) == (([], ranges), (ranges, []))


def test_a_place_in_the_data_is_read_back() -> None:
    plan, left = Plan(100, 2, True, 7), [Range(0, 90, 100), Range(1, 0, 100)]
    number, again, queue = restored(position_of(3, plan, left))
    assert (number, again, queue.free) == (3, plan, [Range(0, 90, 200)])


@each(
    "change",
    [
        {"left": [[0, 90, 201]]},
        {"left": [[1, 100, 101]]},
        {"left": [[2, 0, 5]]},
        {"left": [[0, 5]]},
        {"left": 3},
        {"seed": "x"},
        {"length": None},
    ],
)
def test_a_place_that_is_none_is_refused(change: dict[str, Any]) -> None:
    position = position_of(0, Plan(100, 2, True, 7), [Range(0, 90, 100)])
    with pytest.raises(ValueError, match="the place in the data"):
        restored({**position, **change})


def test_workers_get_different_ranges_and_a_lost_one_gives_back_what_no_server_has_counted(wired: Wired) -> None:
    ranges = [given(wired, lease(wired, rank)) for rank in range(3)]
    assert ranges == [Range(0, 0, 10), Range(0, 10, 20), Range(0, 20, 30)]
    for rank in range(3):
        wired.pushpull(rank, {"w": [1]}, samples=4)
    wired.settle()
    wired.push(1, {"w": [1]}, samples=4)  # nobody else pushes in that round
    wired.settle()
    wired.kill("worker-1")
    wired.advance(10.0)
    assert given(wired, lease(wired, 0, 4)) == Range(0, 14, 20)


def test_a_lease_is_given_back_once(wired: Wired) -> None:
    lease(wired, 0)
    first = wired.ask(0, lambda one: Used(one, 4, True))
    wired.settle()
    again = wired.ask(0, lambda one: Used(one, 4, True))
    wired.settle()
    assert first in wired.completed and given(wired, lease(wired, 1)) == Range(0, 4, 14)
    assert refusal(wired, again).endswith("worker-0 gives back examples, but it has none: a lease is given back once")


def test_a_snapshot_has_what_was_used_up_to_its_version_though_more_was_used_and_leased_meanwhile(wired: Wired) -> None:
    for rank in range(3):
        lease(wired, rank)
    leases = wired.scheduler.leases
    assert leases is not None
    leases.snapshot_begins(1)
    incarnations = [wired.member(f"worker-{rank}").incarnation for rank in range(3)]
    assert given(wired, lease(wired, 0, 10)) == Range(0, 30, 40)
    first = wired.ask(1, lambda one: Used(one, 8, True))  # of what it had used after that version, 3 are left there
    wired.settle()
    assert first in wired.completed and given(wired, lease(wired, 2, 10)) == Range(0, 18, 20)
    found = leases.position_at(dict(zip(incarnations, (12, 5, 10), strict=True)))
    assert found is not None
    assert found["left"] == [[0, 15, 20], [0, 32, 200]]


def test_a_snapshot_has_nothing_of_who_joins_by_its_cut_and_all_that_counts_of_who_was_lost(wired: Wired) -> None:
    for rank in range(2):
        lease(wired, rank)
    leases = wired.scheduler.leases
    assert leases is not None
    leases.snapshot_begins(1)
    wired.scheduler.membership.since[wired.member("worker-2")] = 1
    assert given(wired, lease(wired, 2)) == Range(0, 20, 30)
    wired.pushpull(0, {"w": [1]}, samples=10)
    for rank in (1, 2):
        wired.pushpull(rank, {"w": [1]}, samples=4)
    wired.settle()
    wired.kill("worker-1")
    wired.advance(10.0)
    found = leases.position_at({wired.member("worker-0").incarnation: 10, wired.member("worker-2").incarnation: 4})
    assert found is not None
    assert found["left"] == [[0, 14, 200]]


def test_nobody_has_used_more_than_it_was_given(wired: Wired) -> None:
    lease(wired, 0)
    request = wired.ask(0, lambda one: Used(one, 11, False))
    wired.settle()
    assert "worker-0 says that it has used 11 examples, but it was leased fewer" in refusal(wired, request)


def test_workers_whose_samplers_differ_are_told_so(wired: Wired) -> None:
    lease(wired, 0)
    request = lease(wired, 1, plan=(90, 2, True, 7))
    assert "the workers do not agree: worker-0 has QueueSampler(100, epochs=2" in refusal(wired, request)
    assert "worker-1 has QueueSampler(90, epochs=2" in refusal(wired, request)


def test_one_sampler_comes_after_the_other(wired: Wired) -> None:
    lease(wired, 0)
    assert "begins another QueueSampler while" in refusal(wired, lease(wired, 1, number=1))


def test_the_pass_is_over_for_all_when_all_is_used_and_the_next_one_begins(wired: Wired) -> None:
    short = (15, 1, False, 0)
    assert given(wired, lease(wired, 0, plan=short)) == Range(0, 0, 10)
    assert given(wired, lease(wired, 1, plan=short)) == Range(0, 10, 15)
    resting = lease(wired, 2, plan=short, rests=True)
    assert wired.servers[0].peers.awaited == {0, 1}
    others = [lease(wired, 0, 10, plan=short, rests=True), lease(wired, 1, 5, plan=short, rests=True)]
    assert [wired.completed[request].is_over for request in (resting, *others)] == [True] * 3
    assert wired.completed[resting].version == 10, "the most updates that anybody knows"
    assert wired.servers[0].peers.awaited == {0, 1, 2}
    assert wired.completed[lease(wired, 2, plan=short)].is_over, "who comes late is told, too"
    assert given(wired, lease(wired, 2, number=1, plan=short)) == Range(0, 0, 10)


def test_versions_that_nobody_makes_before_who_joins_takes_part_are_no_updates() -> None:
    wired, short = Wired(2, 1, on_loss="continue"), (15, 1, False, 0)
    wired.initialise({"w": [0.0]})
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    lease(wired, 0, plan=short)
    for _ in range(3):
        for rank in (0, 1):
            wired.push(rank, {"w": [1.0]})
        wired.settle()
    wired.kill("worker-1")
    wired.settle()
    wired.come_back(1)
    wired.declare(1, {"w": (1,)})
    wired.settle()
    place = wired.take_part(1)
    wired.settle()
    assert wired.completed[place] == 4, "it looks on until the others have made the version that is open"
    lease(wired, 0, 10, plan=short)
    ended = [lease(wired, 0, 15, plan=short, rests=True), lease(wired, 1, plan=short, rests=True)]
    assert all(wired.completed[request].is_over for request in ended)
    (block,) = wired.servers[0].shard.blocks
    assert block.version == 4, "and nobody has made it"
    assert wired.servers[0].shard._updates(block, block.version) == 3
