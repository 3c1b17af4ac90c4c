"""Slices in a block together behave as slices alone, whatever happens; and a block costs what it promises."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.machine import Send
from kvdist.core.round import Contribution, PullRequest
from kvdist.core.server import replies
from kvdist.core.server.block import ROUNDS_WORTH_IT, Block
from kvdist.core.server.buffers import BufferPool
from kvdist.core.server.shard import Shard
from kvdist.core.worker import requests
from kvdist.dtypes import DType
from kvdist.errors import OptimizerMismatch, PushRefused
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import Flag, Packet, Pull, Push, Stamp, Values
from tests.cases import each
from tests.core.rivals import LISTS, SIZES, Step, Watched, assert_nobody_notices, draw, live, slices_alone
from tests.core.wired import JOB, Wired

NAN = math.nan
LIST = {"a": [1, 2, 3], "b": [4], "c": [5, 6]}
OPTIMIZERS = [(), ("sgd", "adam", "test")]
STORIES = int(os.environ.get("SIMULATION_SEEDS", "2"))
"""Drawn stories per kind of store."""


def whole(number: float) -> dict[int | str, Sequence[float] | None]:
    """A contribution of equal numbers to all keys of the list."""
    return {key: [number] * len(value) for key, value in LIST.items()}


def made(workers: int = 2, mode: str = "sync", optimizer: str = "", **numbers: Any) -> Watched:
    """A cluster whose list of keys is one block."""
    wired = Watched(workers, 1)
    wired.initialise(LIST, mode)
    if optimizer:
        for rank in range(workers):
            wired.set_optimizer(rank, optimizer, **numbers)
        wired.settle()
    for rank in range(workers):
        wired.push(rank, whole(0))
    wired.settle()
    assert block(wired).version == (workers if mode == "async" else 1)
    return wired


def shard(wired: Wired) -> Shard:
    return wired.servers[0].shard


def block(wired: Wired) -> Block:
    (found,) = shard(wired).blocks
    return found


def sizes(wired: Wired) -> list[int]:
    """How many slices each block has."""
    return [len(one) for one in sorted(shard(wired).blocks, key=lambda one: int(one.ids[0]))]


def values(wired: Wired, request: int, keys: Sequence[int | str] = ("a", "b", "c")) -> list[list[float]]:
    return [wired.value(request, key) for key in keys]


def test_a_full_round_and_a_pull_that_were_left_open_are_invariants_broken() -> None:
    wired = made()
    shard(wired).validate()
    one, (first, second) = block(wired), (wired.member(f"worker-{rank}") for rank in (0, 1))
    assert one.published is not None
    one.round.pulls.append(PullRequest(first, 1, 0, 0))
    with pytest.raises(AssertionError, match="a pull that can be answered is answered"):
        shard(wired).validate()
    one.round.pulls.clear()
    for member in (first, second):
        shard(wired).validate()
        one.offer(Contribution(member, 1, 1, 0, 1, 0, (None, None, None), one.published.array, pull=False), 0.0)
    with pytest.raises(AssertionError, match="a full round is closed at once"):
        shard(wired).validate()


# The same story with slices together and alone.


@pytest.mark.parametrize("optimizers", OPTIMIZERS, ids=["sums", "optimizers"])
def test_nobody_notices_a_block_in_a_synchronous_store(optimizers: tuple[str, ...]) -> None:
    rounds = [
        assert_nobody_notices(draw(seed, workers=3, steps=40, optimizers=optimizers), servers=1 + seed % 2)
        for seed in range(STORIES)
    ]
    assert sum(rounds) > STORIES


def test_nobody_notices_a_block_in_an_asynchronous_store() -> None:
    rounds = []
    for seed in range(STORIES):
        story = [Step("optimizer", optimizer="adam"), *draw(seed, 3, 40, optimizers=("test", "sgd"))]
        rounds.append(assert_nobody_notices(story, mode="async"))
    assert sum(rounds) > STORIES


@each("seed", range(4))
def test_nobody_notices_a_block_while_most_calls_are_unusual(seed: int) -> None:
    assert_nobody_notices(draw(100 + seed, workers=2, steps=40, rare=0.7, optimizers=("adam",)), workers=2)


def loses_what_is_open(self: Block, begin: int, end: int) -> Block:
    part = PART(self, begin, end)
    part.round.slots.clear()
    return part


def merges_what_differs(self: Block, other: Block) -> bool:
    return self.published is not None and other.published is not None and self.round.is_quiet and other.round.is_quiet


PART = Block._part


@each("owner, name, wrong", [(Block, "_part", loses_what_is_open), (Block, "may_merge", merges_what_differs)])
def test_the_comparison_would_notice_a_broken_block(owner: type, name: str, wrong: Any) -> None:
    with mock.patch.object(owner, name, wrong), pytest.raises(AssertionError):
        for seed in range(20):
            assert_nobody_notices(draw(seed, workers=3, steps=40), servers=1)


def test_a_story_of_slices_alone_has_no_round_of_several() -> None:
    with slices_alone():
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
    assert block(wired).version == 2
    assert sum("Values(" in line for line in wired.log) == 2


def test_a_pull_of_part_of_the_list_in_mid_round_gets_the_value_before_it() -> None:
    wired = made()
    first = wired.pushpull(0, whole(1))
    wired.settle()
    read = wired.pull(1, "b", "c")
    wired.settle()
    assert values(wired, read, ["b", "c"]) == [[0], [0, 0]]
    assert sizes(wired) == [1, 2] and first not in wired.completed
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


def test_a_pull_of_the_whole_list_does_not_split_it() -> None:
    wired = made()
    wired.push(0, whole(1))
    own, other = wired.pull(0, *LIST), wired.pull(1, *LIST)
    wired.settle()
    assert sizes(wired) == [3] and own not in wired.completed
    assert values(wired, other) == [[0] * 3, [0], [0] * 2]
    wired.push(1, whole(2))
    wired.settle()
    assert sizes(wired) == [3]
    assert values(wired, own) == [[3] * 3, [3], [3] * 2]


def test_an_empty_contribution_to_one_of_the_keys_counts_and_adds_nothing() -> None:
    wired = made()
    reads = [wired.pushpull(0, {**whole(1), "b": None}), wired.pushpull(1, whole(2))]
    wired.settle()
    assert [values(wired, read) for read in reads] == [[[3] * 3, [2], [3] * 2]] * 2
    assert sizes(wired) == [1, 1, 1]
    for rank in (0, 1):
        reads.append(wired.pushpull(rank, whole(5)))
    wired.settle()
    assert values(wired, reads[-1]) == [[10] * 3, [10], [10] * 2]


def test_an_average_divides_by_the_contributions_of_the_round() -> None:
    wired = made()
    reads = [wired.pushpull(rank, whole(4 + 4 * rank), flag=int(Flag.AVERAGE)) for rank in (0, 1)]
    wired.settle()
    assert values(wired, reads[0]) == [[6] * 3, [6], [6] * 2]
    assert block(wired).version == 2


def test_workers_that_disagree_all_get_an_error_and_the_next_round_works() -> None:
    wired = made(optimizer="sgd", learning_rate=1.0)
    requests = [wired.push(rank, whole(1), setting=(0.5 + rank, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], OptimizerMismatch)
        assert "worker-0 says lr 0.5, wd 0; worker-1 says lr 1.5, wd 0" in str(wired.failed[request])
    read = wired.pull(0, *LIST)
    wired.settle()
    assert values(wired, read) == [list(value) for value in LIST.values()]
    reads = [wired.pushpull(rank, whole(1), setting=(0.5, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    assert sizes(wired) == [3]
    assert values(wired, reads[1]) == [[0, 1, 2], [3], [4, 5]]


def test_a_push_that_is_said_twice_is_counted_once() -> None:
    wired = made()
    wired.push(0, whole(1))
    source, to, packet = wired.wire[0]
    wired.settle()
    stamp = packet.stamp
    again = Stamp(JOB, stamp.epoch, stamp.source, stamp.destination, stamp.seq + 1, stamp.ack, 0)
    wired.hear(to, Packet(again, packet.message))
    assert source == "worker-0" and sizes(wired) == [3]
    read = wired.pushpull(1, whole(2))
    wired.settle()
    assert values(wired, read) == [[3] * 3, [3], [3] * 2]


def test_a_worker_that_leaves_in_mid_round_is_counted_once_more() -> None:
    wired = made(3)
    wired.push(2, whole(10))
    wired.push(0, whole(1))
    wired.leave(2)
    wired.advance(0.1)
    reads = [wired.pushpull(1, whole(2))]
    wired.settle()
    assert values(wired, reads[0]) == [[13] * 3, [13], [13] * 2]
    reads = [wired.pushpull(rank, whole(1)) for rank in (0, 1)]
    wired.settle()
    assert values(wired, reads[0]) == [[2] * 3, [2], [2] * 2]
    assert sizes(wired) == [3]


def test_a_round_that_only_waited_for_somebody_who_leaves_is_closed() -> None:
    wired = made()
    reads = [wired.pushpull(0, whole(1)), wired.pull(0, *LIST)]
    wired.settle()
    assert not wired.completed.keys() & set(reads)
    wired.leave(1)
    wired.settle()
    assert [values(wired, read) for read in reads] == [[[1] * 3, [1], [1] * 2]] * 2


@each("name, numbers", [("sgd", {"momentum": 0.5}), ("adam", {})])
def test_what_an_optimizer_remembers_is_split_and_merged_with_the_values(name: str, numbers: dict[str, Any]) -> None:
    def train(wired: Wired) -> list[list[float]]:
        wired.initialise(LIST)
        for rank in (0, 1):
            wired.set_optimizer(rank, name, learning_rate=0.5, **numbers)
        wired.settle()
        for turn in range(3 + 2 * ROUNDS_WORTH_IT):
            for rank in (0, 1):
                wired.push(rank, whole(turn + rank) if turn != 3 else {**whole(2), "b": None})
            if turn == 4:
                wired.pull(0, "a")
            wired.settle()
        read = wired.pull(0, *LIST)
        wired.settle()
        return values(wired, read)

    together = train(Wired(2, 1))
    with slices_alone():
        assert train(Wired(2, 1)) == together


def test_keys_that_were_updated_more_often_than_others_stay_apart() -> None:
    wired = made(1, optimizer="adam")
    wired.push(0, {"a": [1, 1, 1]})
    wired.settle()
    assert sizes(wired) == [1, 2]
    rounds(wired, 2)
    assert sizes(wired) == [1, 2], "Adam's correction depends on the number of updates"


def test_another_optimizer_in_mid_training_begins_with_the_next_round() -> None:
    wired = made()
    wired.push(0, whole(1))
    wired.settle()
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    read = wired.pushpull(1, whole(2))
    wired.settle()
    assert values(wired, read) == [[3] * 3, [3], [3] * 2]
    reads = [wired.pushpull(rank, whole(1)) for rank in (0, 1)]
    wired.settle()
    assert sizes(wired) == [3]
    assert values(wired, reads[0]) == [[5] * 3, [5], [5] * 2]


@each("before", [True, False])
def test_a_rule_that_looks_at_whole_parameters_has_them_in_blocks_of_their_own(before: bool) -> None:
    wired = Watched(1, 1)
    if before:
        wired.set_optimizer(0, "lamb")
        wired.settle()
    wired.initialise(LIST)
    if not before:
        assert sizes(wired) == [3]
        wired.set_optimizer(0, "lamb")
        wired.settle()
    rounds(wired, 2 * ROUNDS_WORTH_IT)
    assert sizes(wired) == [1, 1, 1]


def test_new_values_in_mid_round_replace_those_of_a_block() -> None:
    wired = made(optimizer="test")
    wired.push(1, whole(1))
    wired.settle()
    request = wired.replace({"a": [10, 10, 10], "b": [20], "c": [30, 30]})
    wired.settle()
    assert request in wired.completed
    read = wired.pushpull(0, whole(2))
    wired.settle()
    assert values(wired, read) == [[13] * 3, [23], [33] * 2]


def test_integers_in_a_block_are_not_updated_by_an_optimizer() -> None:
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


def test_slices_of_several_dtypes_are_several_blocks() -> None:
    wired = Wired(1, 1)
    for dtype, key in (("float32", "x"), ("float64", "y")):
        wired.declare(0, {key: (2,)}, dtype=dtype)
    wired.settle()
    wired.give(0, {"x": [1, 1], "y": [1, 1]})
    read = wired.pushpull(0, {"x": [2, 2], "y": [3, 3]})
    wired.settle()
    assert sizes(wired) == [1, 1]
    assert (wired.value(read, "x"), wired.value(read, "y")) == ([2, 2], [3, 3])


def raw_push(wired: Wired, numbers: Sequence[int], steps: Sequence[int], runs: Sequence[int], flag: int = 0) -> None:
    """A push of ones as a broken peer may send it, of slices of `LIST`."""
    ids, n = np.array(numbers, np.uint32), len(numbers)
    counts = np.array([len(list(LIST.values())[number]) for number in numbers], np.uint32)
    payload = b"".join(np.ones(count + count % 2, np.float32).tobytes() for count in counts.tolist())
    zeros = np.zeros(n, np.uint32)
    columns = (np.array(runs, np.uint32), ids, np.array(steps, np.uint32), zeros, zeros, np.full(n, flag, np.uint8))
    arrays = Arrays(np.full(n, DType.FLOAT32, np.uint8), counts, payload)
    message = Push(bool(flag), *columns, ((NAN, NAN, NAN),), np.zeros(n, np.uint8), arrays)
    shard(wired).push(wired.member("worker-0"), message, 0.0)


def acknowledged(wired: Wired) -> list[Any]:
    """Take what the table has to say, as if each message had arrived."""
    messages = []
    for send in [effect for effect in wired.servers[0].replies.pop_messages() if isinstance(effect, Send)]:
        messages.append(send.message)
        if isinstance(send.token, tuple):
            wired.servers[0].acknowledged(send.to, [send.token], 0.0)
    return messages


def test_a_run_that_names_a_slice_twice_is_refused_and_the_others_are_not() -> None:
    wired = made(1)
    raw_push(wired, [0, 0, 1], [1, 1, 1], [7, 7, 8])
    assert [type(message).__name__ for message in acknowledged(wired)] == ["Counted", "Refused"]
    assert [shard(wired).blocks.of(number)[0].version for number in range(3)] == [1, 2, 1]
    shard(wired).validate()


def test_what_is_held_may_be_split_by_what_follows_in_the_same_message() -> None:
    wired = made(1)
    hold = int(Flag.HOLD)
    raw_push(wired, [0, 1, 2], [1, 1, 1], [1, 1, 1], hold)
    acknowledged(wired)
    raw_push(wired, [0, 1, 2, 1], [2, 2, 2, 3], [2, 2, 2, 3], hold)
    acknowledged(wired)
    for number in range(3):
        raw_push(wired, [number], [3 + (number == 1)], [4 + number], hold)
        acknowledged(wired)
    held = [one.lent[wired.member("worker-0")] for one in shard(wired).blocks]
    assert all(buffer is one.published for buffer, one in zip(held, shard(wired).blocks, strict=True))
    shard(wired).validate()


@each("mode", ["sync", "async"])
def test_first_values_may_come_slice_by_slice_while_others_wait_for_them(mode: str) -> None:
    wired = Wired(2, 1)
    for rank in (0, 1):
        wired.declare(rank, {key: (len(value),) for key, value in LIST.items()}, mode)
    wired.settle()
    if mode == "async":
        for rank in (0, 1):
            wired.set_optimizer(rank, "test")
        wired.settle()
    all_of_them = wired.pull(1, *LIST)
    pushed = wired.push(1, whole(1)) if mode == "async" else all_of_them
    wired.settle()
    one = wired.pull(0, "b")
    for key, value in LIST.items():
        wired.give(0, {key: value})
        wired.settle()
    assert {one, all_of_them, pushed} <= wired.completed.keys()


def test_small_keys_between_large_ones_are_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "ALONE_BYTES_MIN", 64)
    wired = Wired(2, 1)
    keys = {f"{kind}{i}": [0.0] * (20 if kind == "large" else 2) for i in range(4) for kind in ("large", "s", "t")}
    wired.initialise(keys)
    for turn in range(3):
        reads = [wired.pushpull(rank, {key: [1.0] * len(value) for key, value in keys.items()}) for rank in (0, 1)]
        wired.settle()
        assert sorted(sizes(wired)) == [1, 1, 1, 1, 8], turn
    assert wired.value(reads[1], "t3") == [2, 2]


def test_no_memory_for_a_merge_leaves_slices_apart() -> None:
    wired = made()
    split(wired)

    def nothing_left(nbytes: int) -> Any:
        raise MemoryError

    for one in shard(wired).blocks:
        one.pool.fresh().leases = 0
        one.pool.free_buffers.append(one.pool.fresh())
    blocks = list(shard(wired).blocks)
    with mock.patch.object(BufferPool, "fresh", nothing_left):
        for rank in (0, 1):
            wired.push(rank, whole(1))
        wired.settle()
    assert list(shard(wired).blocks) == blocks and sizes(wired) == [1, 2]
    rounds(wired)
    assert sizes(wired) == [3]


def test_one_message_cuts_a_block_once() -> None:
    wired = made(1)
    with mock.patch.object(Block, "split", autospec=True, side_effect=Block.split) as splits:
        raw_push(wired, [0, 1, 2], [1, 1, 1], [7, 8, 9])
    assert splits.call_count == 1 and sizes(wired) == [1, 1, 1]


def test_two_lists_that_overlap_take_turns() -> None:
    wired = Watched(2, 1)
    wired.initialise({"a": [0], "b": [0], "c": [0]})
    for turn in range(24):
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
    assert wired.servers[0].explain(wired.now) == "waiting 4.0 s for worker-1 to push key 'a' (step 2)"
    wired.advance(11.0)
    assert wired.servers[0].explain(wired.now) == "waiting 15.0 s for worker-1 to push key 'a' (step 2)"
    assert wired.workers[0].explain(wired.now) == (
        "worker-0: waiting 15.0 s for worker-1 (host-1) to push key 'a' (step 2), in pushpull of key 'a', 'b', 'c'"
    )


def test_a_pull_that_waits_is_not_younger_because_another_one_comes() -> None:
    wired = made()
    ids = block(wired).ids
    runs = np.full(3, 99, np.uint32)
    for rank, now in ((0, 100.0), (1, 105.0)):
        shard(wired).pull(wired.member(f"worker-{rank}"), Pull(runs, ids, runs * 0 + 2, runs * 0), now)
    assert block(wired).round.open_since == 100.0
    assert len(block(wired).round.pulls) == 2


@each(
    "steps, versions, answered",
    [([1, 2, 1], [0, 0, 0], [0, 2]), ([0, 1, 1], [1, 1, 2], [0, 1]), ([2, 3, 2], [0, 0, 0], [])],
)
def test_a_slice_that_can_be_answered_never_waits_for_others_of_its_run(
    steps: list[int], versions: list[int], answered: list[int]
) -> None:
    wired = made()
    ids, runs = block(wired).ids, np.full(3, 99, np.uint32)
    pull = Pull(runs, ids, np.array(steps, np.uint32), np.array(versions, np.uint32))
    shard(wired).pull(wired.member("worker-0"), pull, 100.0)
    messages = [one.message for one in wired.servers[0].replies.pop_messages() if isinstance(one, Send)]
    assert len(sizes(wired)) > 1
    said = [number for message in messages if isinstance(message, Values) for number in message.ids.tolist()]
    assert said == ids[answered].tolist()
    shard(wired).validate()


@each("steps", [[0, 1, 0], [1, 1, 1], [2, 2, 2]])
def test_a_pull_that_one_round_answers_for_all_slices_does_not_split_them(steps: list[int]) -> None:
    wired = made()
    ids, runs = block(wired).ids, np.full(3, 99, np.uint32)
    shard(wired).pull(wired.member("worker-0"), Pull(runs, ids, np.array(steps, np.uint32), runs * 0), 100.0)
    assert sizes(wired) == [3]
    assert len(wired.servers[0].replies.pop_messages()) == (max(steps) < 2)


def test_a_pull_that_waits_holds_up_no_other_of_the_same_message() -> None:
    wired = made()
    ids = np.tile(block(wired).ids, 2)
    runs = np.array([5] * 3 + [6] * 3, np.uint32)
    member = wired.member("worker-0")
    steps = np.array([9] * 3 + [1] * 3, np.uint32)
    shard(wired).pull(member, Pull(runs, ids, steps, runs * 0), 0.0)
    shard(wired).pull(member, Pull(runs[:3], ids[:3], steps[3:], runs[:3] * 0), 0.0)
    messages = [one.message for one in wired.servers[0].replies.pop_messages() if isinstance(one, Send)]
    assert [message.runs.tolist() for message in messages if isinstance(message, Values)] == [[6] * 3 + [5] * 3]
    assert len(block(wired).round.pulls) == 1


# What it costs.


def rounds(wired: Wired, count: int = 1) -> None:
    for _ in range(count):
        for rank in range(len(wired.workers)):
            wired.push(rank, whole(1))
        wired.settle()


def split(wired: Wired) -> None:
    wired.pull(0, "a")
    wired.settle()
    assert sizes(wired) == [1, 2]


def test_small_keys_are_one_block_from_the_beginning_and_large_ones_alone() -> None:
    wired = Wired(1, 1, limits=Limits(slice_bytes=64))
    wired.declare(0, {"a": (4,), "b": (4,), "c": (40,), "d": (4,), "e": (12,)})
    wired.settle()
    assert sizes(wired) == [3, 1, 1, 1, 1], "at most 64 bytes, and no part of a larger key"


def test_what_was_handed_out_is_never_written_while_a_worker_has_not_got_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    wired = made(mode="async", optimizer="test")
    late = read_late(wired)
    buffers = [block(wired).published, *block(wired).pool.free_buffers]
    assert sum(buffer.leases for buffer in buffers if buffer is not None) == 6
    assert len(buffers) == 7, "one for each version that is read, and the present one"
    wired.wire.extend(late)
    wired.advance(1.0)
    assert not any(buffer.leases for buffer in buffers if buffer is not None)
    for _ in range(6):
        wired.push(1, whole(1))
        wired.settle()
    assert {id(buffer) for buffer in (block(wired).published, *block(wired).pool.free_buffers)} == set(map(id, buffers))


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


def test_a_block_that_writes_where_somebody_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    wired = made(mode="async", optimizer="test")

    def wrong(self: BufferPool) -> Any:
        return self.free_buffers.pop(0) if self.free_buffers else self.fresh()

    changed = pytest.raises(AssertionError, match="bytes changed under way")
    with mock.patch.object(BufferPool, "acquire", wrong), changed:
        read_late(wired)


def test_what_is_read_of_a_block_is_not_written_when_it_has_been_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    wired = made(mode="async", optimizer="test")
    wired.pull(0, *LIST)
    wired.deliver()
    late = wired.wire.pop()
    split(wired)
    for turn in range(6):
        wired.push(1, whole(turn + 1))
        wired.settle()
        wired.check_bytes()
    wired.wire.append(late)
    wired.advance(1.0)
    assert not any(buffer.leases for one in shard(wired).blocks for buffer in one.pool.free_buffers)


def test_memory_does_not_grow_over_hundreds_of_rounds() -> None:
    wired = made()
    asked: list[int] = []

    def allocate(nbytes: int) -> Any:
        asked.append(nbytes)
        return np.empty(nbytes, np.uint8)

    block(wired).pool.allocate = allocate
    for _ in range(300):
        for rank in (0, 1):
            wired.pushpull(rank, whole(1))
        wired.settle()
    assert block(wired).version == 301
    assert len(asked) <= 2 and len(block(wired).pool.free_buffers) <= 3


def test_a_block_that_was_split_early_merges_later_and_later() -> None:
    wired = made()
    split(wired)
    rounds(wired)
    assert sizes(wired) == [3], "it was one from the beginning, and did not cost a copy"
    for wait in (ROUNDS_WORTH_IT, 2 * ROUNDS_WORTH_IT, 4 * ROUNDS_WORTH_IT):
        split(wired)
        rounds(wired, wait)
        assert sizes(wired) == [1, 2]
        rounds(wired)
        assert sizes(wired) == [3]


def test_several_cuts_by_one_message_or_several_count_once() -> None:
    wired = made()
    split(wired)
    rounds(wired)
    for key in LIST:
        wired.pull(0, key)
        wired.settle()
    assert sizes(wired) == [1, 1, 1]
    rounds(wired, ROUNDS_WORTH_IT + 1)
    assert sizes(wired) == [3]


def test_a_block_that_lived_long_merges_at_once() -> None:
    wired = made()
    for _ in range(3):
        split(wired)
        rounds(wired)
        assert sizes(wired) == [3]
        rounds(wired, ROUNDS_WORTH_IT)


def test_memory_does_not_grow_while_blocks_are_split_and_merged() -> None:
    wired = made()
    for _ in range(20):
        rounds(wired, ROUNDS_WORTH_IT)
        split(wired)
        rounds(wired)
        assert sizes(wired) == [3]
    assert all(len(one.pool.free_buffers) <= 2 for one in shard(wired).blocks)
    assert len(shard(wired).blocks._all) == 1


def test_values_that_are_read_where_they_lie_stay_when_the_block_goes_on() -> None:
    wired = made(mode="async", optimizer="test")
    read = wired.pushpull(0, whole(1), flag=int(Flag.HOLD))
    wired.advance(1.0)
    assert values(wired, read) == [[2, 3, 4], [5], [6, 7]]
    held = block(wired).lent[wired.member("worker-0")]
    before = held.array.tolist()
    for turn in range(5):
        wired.push(1, whole(turn + 1))
        wired.settle()
    split(wired)
    for turn in range(5):
        wired.push(1, whole(turn + 1))
        wired.settle()
    assert held.array.tolist() == before
