"""Slices in a group behave as slices alone, whatever happens; and a group costs what it promises."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvdist.core import groups as groups_module
from kvdist.core.effects import Send
from kvdist.core.group import Group
from kvdist.core.groups import APART_MAX, ROUNDS_WORTH_IT, STRIKES_MAX
from kvdist.core.table import Table
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import Flag, Packet, Pull, Push, Stamp, Values
from tests.core.rivals import LISTS, SIZES, Step, Watched, assert_nobody_notices, draw, live, no_groups
from tests.core.wired import JOB, Wired

NAN = math.nan
LIST = {"a": [1, 2, 3], "b": [4], "c": [5, 6]}
OPTIMIZERS = [(), ("sgd", "adam", "test")]
STORIES = int(os.environ.get("SIMULATION_SEEDS", "10"))
"""Drawn stories per kind of store."""


def whole(number: float) -> dict[int | str, Sequence[float] | None]:
    """A contribution of equal numbers to all keys of the list."""
    return {key: [number] * len(value) for key, value in LIST.items()}


def made(workers: int = 2, mode: str = "sync", optimizer: str = "", **numbers: Any) -> Watched:
    """A cluster whose list of keys is in a group already."""
    wired = Watched(workers, 1)
    wired.initialise(LIST, mode)
    if optimizer:
        for rank in range(workers):
            wired.set_optimizer(rank, optimizer, **numbers)
        wired.settle()
    for rank in range(workers):
        wired.push(rank, whole(0))
    wired.settle()
    assert group(wired).rounds == (workers if mode == "async" else 1)
    return wired


def table(wired: Wired) -> Table:
    return wired.servers[0].table


def group(wired: Wired) -> Group:
    (found,) = table(wired)._groups
    return found


def has_group(wired: Wired) -> bool:
    return bool(list(table(wired)._groups))


def values(wired: Wired, request: int, keys: Sequence[int | str] = ("a", "b", "c")) -> list[list[float]]:
    return [wired.value(request, key) for key in keys]


# The same story with groups and without.


@pytest.mark.parametrize("optimizers", OPTIMIZERS, ids=["sums", "optimizers"])
def test_nobody_notices_a_group_in_a_synchronous_store(optimizers: tuple[str, ...]) -> None:
    rounds = [
        assert_nobody_notices(draw(seed, workers=3, steps=40, optimizers=optimizers), servers=1 + seed % 2)
        for seed in range(STORIES)
    ]
    assert sum(rounds) > STORIES


def test_nobody_notices_a_group_in_an_asynchronous_store() -> None:
    rounds = []
    for seed in range(STORIES):
        story = [Step("optimizer", optimizer="adam"), *draw(seed, 3, 40, optimizers=("test", "sgd"))]
        rounds.append(assert_nobody_notices(story, mode="async"))
    assert sum(rounds) > STORIES


@pytest.mark.parametrize("seed", range(4))
def test_nobody_notices_a_group_while_most_calls_are_unusual(seed: int) -> None:
    assert_nobody_notices(draw(100 + seed, workers=2, steps=40, rare=0.7, optimizers=("adam",)), workers=2)


def forgets_a_contribution(self: Group, push: Any) -> None:
    """Dissolving loses what is in the slots."""


def counts_too_early(self: Group, pull: Any) -> bool:
    return bool((self.versions >= pull.versions).all())


@pytest.mark.parametrize(("name", "wrong"), [("_spread", forgets_a_contribution), ("satisfies", counts_too_early)])
def test_the_comparison_would_notice_a_broken_group(name: str, wrong: Any) -> None:
    with mock.patch.object(Group, name, wrong), pytest.raises(AssertionError):
        for seed in range(20):
            assert_nobody_notices(draw(seed, workers=3, steps=40), servers=1)


def test_a_story_without_groups_has_none() -> None:
    with no_groups():
        assert live(draw(1, workers=2, steps=20), workers=2)[1] == 0


def test_the_stories_have_keys_of_several_dtypes_in_lists_that_overlap() -> None:
    assert {key for keys in LISTS for key in keys} == set(SIZES)
    assert set(LISTS[3]) < set(LISTS[0]) and set(LISTS[4]) & set(LISTS[0])


# One thing at a time.


def test_a_list_that_all_push_is_one_round_and_one_answer() -> None:
    wired = made()
    wired.log.clear()
    reads = [wired.pushpull(rank, whole(rank + 1)) for rank in (0, 1)]
    wired.settle()
    assert [values(wired, read) for read in reads] == [[[3] * 3, [3], [3] * 2]] * 2
    assert group(wired).rounds == 2
    assert sum("Values(" in line for line in wired.log) == 2
    assert group(wired).versions.tolist() == [2, 2, 2]


def test_a_pull_of_part_of_the_list_in_mid_round_gets_the_value_before_it() -> None:
    wired = made()
    first = wired.pushpull(0, whole(1))
    wired.settle()
    read = wired.pull(1, "b", "c")
    wired.settle()
    assert values(wired, read, ["b", "c"]) == [[0], [0, 0]]
    assert not has_group(wired) and first not in wired.completed
    second = wired.pushpull(1, whole(2))
    wired.settle()
    assert values(wired, first) == values(wired, second) == [[3] * 3, [3], [3] * 2]


def test_a_pull_of_part_of_the_list_waits_for_the_workers_own_push() -> None:
    wired = made()
    wired.push(0, whole(1))
    read = wired.pull(0, "b")
    wired.settle()
    assert read not in wired.completed
    wired.push(1, whole(2))
    wired.settle()
    assert wired.value(read, "b") == [3]


def test_a_pull_of_the_whole_list_waits_in_the_group() -> None:
    wired = made()
    wired.push(0, whole(1))
    own, other = wired.pull(0, *LIST), wired.pull(1, *LIST)
    wired.settle()
    assert has_group(wired) and own not in wired.completed
    assert values(wired, other) == [[0] * 3, [0], [0] * 2]
    wired.push(1, whole(2))
    wired.settle()
    assert has_group(wired)
    assert values(wired, own) == [[3] * 3, [3], [3] * 2]


def test_an_empty_contribution_to_one_of_the_keys_counts_and_adds_nothing() -> None:
    wired = made()
    reads = [wired.pushpull(0, {**whole(1), "b": None}), wired.pushpull(1, whole(2))]
    wired.settle()
    assert [values(wired, read) for read in reads] == [[[3] * 3, [2], [3] * 2]] * 2
    for rank in (0, 1):
        reads.append(wired.pushpull(rank, whole(5)))
    wired.settle()
    assert has_group(wired)
    assert values(wired, reads[-1]) == [[10] * 3, [10], [10] * 2]


def test_an_average_divides_by_the_contributions_of_the_round() -> None:
    wired = made()
    reads = [wired.pushpull(rank, whole(4 + 4 * rank), flag=int(Flag.AVERAGE)) for rank in (0, 1)]
    wired.settle()
    assert values(wired, reads[0]) == [[6] * 3, [6], [6] * 2]
    assert group(wired).rounds == 2


def test_workers_that_disagree_all_get_an_error_and_the_next_round_works() -> None:
    wired = made(optimizer="sgd", learning_rate=1.0)
    requests = [wired.push(rank, whole(1), setting=(0.5 + rank, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], OptimizerMismatch)
        assert "worker-0 says lr 0.5, wd 0; worker-1 says lr 1.5, wd 0" in str(wired.failed[request])
    assert not has_group(wired)
    read = wired.pull(0, *LIST)
    wired.settle()
    assert values(wired, read) == [list(value) for value in LIST.values()]
    reads = [wired.pushpull(rank, whole(1), setting=(0.5, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    assert has_group(wired)
    assert values(wired, reads[1]) == [[0, 1, 2], [3], [4, 5]]


def test_a_push_that_is_said_twice_is_counted_once() -> None:
    wired = made()
    wired.push(0, whole(1))
    source, to, packet = wired.wire[0]
    wired.settle()
    stamp = packet.stamp
    again = Stamp(JOB, stamp.term, stamp.epoch, stamp.source, stamp.destination, stamp.seq + 1, stamp.ack, 0)
    wired.hear(to, Packet(again, packet.message))
    assert source == "worker-0" and not has_group(wired)
    read = wired.pushpull(1, whole(2))
    wired.settle()
    assert values(wired, read) == [[3] * 3, [3], [3] * 2]


def test_a_worker_that_leaves_in_mid_round_is_counted_once_more() -> None:
    wired = made(3)
    wired.push(2, whole(10))
    wired.push(0, whole(1))
    wired.leave(2)
    wired.advance(0.1)
    assert not has_group(wired)
    reads = [wired.pushpull(1, whole(2))]
    wired.settle()
    assert values(wired, reads[0]) == [[13] * 3, [13], [13] * 2]
    reads = [wired.pushpull(rank, whole(1)) for rank in (0, 1)]
    wired.settle()
    assert values(wired, reads[0]) == [[2] * 3, [2], [2] * 2]
    assert has_group(wired)


def test_a_round_that_only_waited_for_somebody_who_leaves_is_closed() -> None:
    wired = made()
    reads = [wired.pushpull(0, whole(1)), wired.pull(0, *LIST)]
    wired.settle()
    assert not wired.completed.keys() & set(reads)
    wired.leave(1)
    wired.settle()
    assert [values(wired, read) for read in reads] == [[[1] * 3, [1], [1] * 2]] * 2


@pytest.mark.parametrize(("name", "numbers"), [("sgd", {"momentum": 0.5}), ("adam", {})])
def test_what_an_optimizer_remembers_goes_into_the_group_and_out_again(name: str, numbers: dict[str, Any]) -> None:
    def train(wired: Wired) -> list[list[float]]:
        wired.initialise(LIST)
        for rank in (0, 1):
            wired.set_optimizer(rank, name, learning_rate=0.5, **numbers)
        wired.settle()
        for turn in range(6):
            for rank in (0, 1):
                wired.push(rank, whole(turn + rank) if turn != 3 else {**whole(2), "b": None})
            if turn == 4:
                wired.pull(0, "a")
            wired.settle()
        read = wired.pull(0, *LIST)
        wired.settle()
        return values(wired, read)

    grouped = train(Wired(2, 1))
    with no_groups():
        assert train(Wired(2, 1)) == grouped


def test_keys_that_were_updated_more_often_than_others_stay_apart() -> None:
    wired = Wired(1, 1)
    wired.initialise(LIST)
    wired.set_optimizer(0, "adam")
    wired.settle()
    for push in ({"a": [1, 1, 1]}, whole(1)):
        wired.push(0, push)
        wired.settle()
    assert not has_group(wired), "Adam's correction depends on the number of updates"
    wired.push(0, {"b": [1], "c": [1, 1]})
    wired.settle()
    assert has_group(wired)


def test_another_optimizer_in_mid_training_begins_with_the_next_round() -> None:
    wired = made()
    wired.push(0, whole(1))
    wired.settle()
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    assert not has_group(wired)
    read = wired.pushpull(1, whole(2))
    wired.settle()
    assert values(wired, read) == [[3] * 3, [3], [3] * 2]
    reads = [wired.pushpull(rank, whole(1)) for rank in (0, 1)]
    wired.settle()
    assert has_group(wired)
    assert values(wired, reads[0]) == [[5] * 3, [5], [5] * 2]


def test_new_values_in_mid_round_replace_those_of_the_group() -> None:
    wired = made(optimizer="test")
    wired.push(1, whole(1))
    wired.settle()
    request = wired.replace({"a": [10, 10, 10], "b": [20], "c": [30, 30]})
    wired.settle()
    assert request in wired.completed and not has_group(wired)
    read = wired.pushpull(0, whole(2))
    wired.settle()
    assert values(wired, read) == [[13] * 3, [23], [33] * 2]


def test_integers_in_a_group_are_not_updated_by_an_optimizer() -> None:
    wired = Wired(1, 1)
    wired.declare(0, {"i": (2,), "j": (1,)}, dtype="int32")
    wired.settle()
    wired.give(0, {"i": [1, 2], "j": [3]})
    wired.set_optimizer(0, "sgd")
    wired.settle()
    for _ in range(3):
        request = wired.push(0, {"i": [1, 1], "j": [1]})
        wired.settle()
        assert isinstance(wired.failed[request], PushRefused)
    read = wired.pull(0, "i", "j")
    wired.settle()
    assert (wired.value(read, "i"), wired.value(read, "j")) == ([1, 2], [3])


def test_slices_of_several_dtypes_or_named_twice_are_no_group() -> None:
    wired = Wired(1, 1)
    for dtype, key in (("float32", "x"), ("float64", "y")):
        wired.declare(0, {key: (2,)}, dtype=dtype)
    wired.settle()
    wired.give(0, {"x": [1, 1], "y": [1, 1]})
    read = wired.pushpull(0, {"x": [2, 2], "y": [3, 3]})
    wired.settle()
    assert not has_group(wired)
    assert (wired.value(read, "x"), wired.value(read, "y")) == ([2, 2], [3, 3])
    column = np.zeros(2, np.uint32)
    arrays = Arrays(np.array([1, 1], np.uint8), np.array([2, 2], np.uint32), bytes(16))
    octets = column.astype(np.uint8)
    twice = Push(False, column, column, column + 1, column, column, octets, ((NAN, NAN, NAN),), octets, arrays)
    table(wired).push(wired.member("worker-0"), twice, 0.0)
    assert not has_group(wired)
    assert table(wired).shards[0].counted == {0: 2}


def test_two_lists_that_overlap_take_turns() -> None:
    wired = Watched(2, 1)
    wired.initialise({"a": [0], "b": [0], "c": [0]})
    for turn in range(3 * STRIKES_MAX):
        keys = ("a", "b") if turn % 2 else ("b", "c")
        reads = [wired.pushpull(rank, {key: [turn + rank] for key in keys}) for rank in (0, 1)]
        wired.settle()
        assert wired.value(reads[0], "b") == [2 * turn + 1]
    assert [version for version, _, _ in wired.everything().values()] == [12, 24, 12]


# Waiting.


def test_a_long_round_names_its_key_and_who_is_missing() -> None:
    wired = made()
    wired.pushpull(0, whole(1))
    wired.advance(4.0)
    assert has_group(wired)
    assert table(wired).explain(wired.now) == "round 1 of key 'a' has waited 4.0 s for worker-1"
    wired.advance(11.0)
    assert not has_group(wired)
    assert wired.servers[0].explain(wired.now) == "round 1 of key 'a' has waited 15.0 s for worker-1"
    assert wired.workers[0].explain(wired.now) == (
        "worker-0: pushpull of key 'a', 'b', 'c' has waited 15.0 s; round 1 of key 'a' lacks worker-1 (host-1)"
    )


def test_a_pull_that_waits_is_not_younger_because_another_one_comes() -> None:
    wired = made()
    ids = group(wired).ids
    runs = np.full(3, 99, np.uint32)
    for rank, now in ((0, 100.0), (1, 105.0)):
        table(wired).pull(wired.member(f"worker-{rank}"), Pull(runs, ids, runs * 0 + 2, runs * 0), now)
    assert group(wired).open_since == 100.0
    assert len(group(wired).pulls) == 2


@pytest.mark.parametrize(
    ("steps", "versions", "answered"),
    [([1, 2, 1], [0, 0, 0], [0, 2]), ([0, 1, 1], [1, 1, 2], [0, 1]), ([2, 3, 2], [0, 0, 0], [])],
    ids=["own pushes", "versions", "rounds to come"],
)
def test_a_slice_that_can_be_answered_never_waits_for_others_of_its_run(
    steps: list[int], versions: list[int], answered: list[int]
) -> None:
    wired = made()
    ids, runs = group(wired).ids, np.full(3, 99, np.uint32)
    pull = Pull(runs, ids, np.array(steps, np.uint32), np.array(versions, np.uint32))
    table(wired).pull(wired.member("worker-0"), pull, 100.0)
    messages = [one.message for one in table(wired).take_answers() if isinstance(one, Send)]
    assert not has_group(wired)
    said = [number for message in messages if isinstance(message, Values) for number in message.ids.tolist()]
    assert said == ids[answered].tolist()
    table(wired).validate()


@pytest.mark.parametrize("steps", [[0, 1, 0], [1, 1, 1], [2, 2, 2]], ids=["earlier", "present", "next"])
def test_a_pull_that_one_round_answers_for_all_slices_stays_in_the_group(steps: list[int]) -> None:
    wired = made()
    ids, runs = group(wired).ids, np.full(3, 99, np.uint32)
    table(wired).pull(wired.member("worker-0"), Pull(runs, ids, np.array(steps, np.uint32), runs * 0), 100.0)
    assert has_group(wired)
    assert len(table(wired).take_answers()) == (max(steps) < 2)


def test_pulls_of_the_same_run_in_one_message_are_answered_each_by_itself() -> None:
    wired = made()
    ids = np.tile(group(wired).ids, 2)
    runs = np.array([5] * 3 + [6] * 3, np.uint32)
    member = wired.member("worker-0")
    steps = np.array([9] * 3 + [1] * 3, np.uint32)
    table(wired).pull(member, Pull(runs, ids, steps, runs * 0), 0.0)
    table(wired).pull(member, Pull(runs[:3], ids[:3], steps[3:], runs[:3] * 0), 0.0)
    messages = [one.message for one in table(wired).take_answers() if isinstance(one, Send)]
    assert [message.runs.tolist() for message in messages if isinstance(message, Values)] == [[6] * 3, [5] * 3]
    assert len(group(wired).pulls) == 1


# What it costs.


def read_late(wired: Watched) -> list[tuple[str, str, Packet]]:
    """Six versions are asked for by a worker that gets none of them; checks that none is written."""
    late = []
    for turn in range(6):
        wired.pull(0, *LIST)
        wired.deliver()
        late.append(wired.wire.pop())
        wired.push(1, whole(turn + 1))
        wired.settle()
        wired.check_bytes()
    return late


def test_what_was_handed_out_is_never_written_while_a_worker_has_not_got_it() -> None:
    wired = made(mode="async", optimizer="test")
    late = read_late(wired)
    buffers = [group(wired).published, *group(wired)._spare]
    assert sum(buffer.leases for buffer in buffers) == 6
    assert len(buffers) == 7, "one for each version that is read, and the present one"
    wired.wire.extend(late)
    wired.advance(1.0)
    assert not any(buffer.leases for buffer in buffers)
    for _ in range(6):
        wired.push(1, whole(1))
        wired.settle()
    assert {id(buffer) for buffer in (group(wired).published, *group(wired)._spare)} == set(map(id, buffers))


def test_a_group_that_writes_where_somebody_reads_is_noticed() -> None:
    wired = made(mode="async", optimizer="test")

    def wrong(self: Group) -> Any:
        return self._spare.pop(0) if self._spare else self._new_buffer()

    with mock.patch.object(Group, "_target", wrong), pytest.raises(AssertionError, match="bytes changed under way"):
        read_late(wired)


def test_memory_does_not_grow_over_a_thousand_rounds() -> None:
    wired = made()
    asked: list[int] = []

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        return np.empty(nbytes, np.uint8)

    group(wired)._allocate = table(wired)._allocate = allocate
    for shard in table(wired).shards.values():
        shard.allocate = allocate
    for _ in range(1000):
        for rank in (0, 1):
            wired.pushpull(rank, whole(1))
        wired.settle()
    assert group(wired).rounds == 1001
    assert len(asked) <= 2 and len(group(wired)._spare) <= 3


def test_memory_does_not_grow_while_groups_are_made_and_dissolved() -> None:
    wired = made()
    with mock.patch.object(groups_module, "STRIKES_MAX", 1 << 30):
        for _ in range(50):
            for rank in (0, 1):
                wired.pushpull(rank, whole(1))
            wired.settle()
            wired.pull(0, "a")
            wired.settle()
    assert not has_group(wired)
    assert all(len(shard.spare) <= 2 for shard in table(wired).shards.values())
    assert len(table(wired)._groups._records) == 1


def dissolve(wired: Wired) -> None:
    wired.pull(0, "a")
    wired.settle()
    assert not has_group(wired)


def one_round(wired: Wired) -> None:
    for rank in (0, 1):
        wired.push(rank, whole(1))
    wired.settle()


def test_slices_that_are_taken_apart_again_and_again_stay_apart() -> None:
    wired = made()
    for strikes in range(1, STRIKES_MAX):
        dissolve(wired)
        one_round(wired)
        assert has_group(wired), strikes
    dissolve(wired)
    one_round(wired)
    assert not has_group(wired)
    for _ in range(APART_MAX // 2):
        assert not has_group(wired)
        one_round(wired)
    assert has_group(wired), "tried again"
    dissolve(wired)
    one_round(wired)
    assert not has_group(wired)


def test_a_group_that_lived_long_begins_without_strikes() -> None:
    wired = made()
    for _ in range(STRIKES_MAX - 1):
        dissolve(wired)
        one_round(wired)
    for _ in range(ROUNDS_WORTH_IT - 1):
        one_round(wired)
    for _ in range(STRIKES_MAX):
        dissolve(wired)
        one_round(wired)
        assert has_group(wired)


def test_values_that_are_read_where_they_lie_are_not_answered_by_a_group() -> None:
    wired = made(mode="async", optimizer="test")
    read = wired.pushpull(0, whole(1), flag=int(Flag.HOLD))
    wired.advance(1.0)
    assert not has_group(wired)
    assert values(wired, read) == [[2, 3, 4], [5], [6, 7]]
    held = [shard.held[wired.member("worker-0")] for shard in table(wired).shards.values()]
    before = [buffer.array.tolist() for buffer in held]
    for turn in range(5):
        wired.push(1, whole(turn + 1))
        wired.settle()
    assert [buffer.array.tolist() for buffer in held] == before
