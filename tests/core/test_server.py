"""Rounds over several workers, as a server runs them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.joining import SCHEDULER_MEMBER
from kvdist.core.machine import PeerConnected, PeerDisconnected, Worked
from kvdist.core.server import replies
from kvdist.core.server.buffers import Buffer
from kvdist.errors import OptimizerMismatch, PeerLostError, PushRefused, StoreClosed
from kvdist.nodes import UNRANKED, Member, NodeId, Role, worker
from kvdist.protocol import wire
from kvdist.protocol.arrays import Arrays
from kvdist.protocol.messages import Flag, InitValues, Packet, Pull, Push, Stamp, Values
from tests.core.wired import JOB, Wired

NAN = math.nan


@pytest.fixture
def wired() -> Wired:
    made = Wired(2, 1)
    made.initialise({"w": [1, 2, 3], "b": [5]})
    return made


def test_a_round_is_answered_when_both_have_contributed(wired: Wired) -> None:
    first = wired.pushpull(0, {"w": [1, 1, 1]})
    wired.settle()
    assert first not in wired.completed
    second = wired.pushpull(1, {"w": [10, 20, 30]})
    wired.settle()
    assert wired.value(first, "w") == wired.value(second, "w") == [11, 21, 31]


def test_values_of_a_worker_that_is_not_first_are_not_taken(wired: Wired) -> None:
    request = wired.give(0, {"w": [9, 9, 9]})
    read = wired.pull(1, "w")
    wired.settle()
    assert request in wired.completed
    assert wired.value(read, "w") == [1, 2, 3]


def test_pushes_and_pulls_may_come_before_the_first_value() -> None:
    wired = Wired(2, 1)
    for rank in (0, 1):
        wired.declare(rank, {"w": (2,)})
    wired.settle()
    reads = [wired.pushpull(1, {"w": [1, 2]}), wired.pull(1, "w")]
    wired.push(0, {"w": [10, 20]})
    wired.settle()
    assert not set(reads) & wired.completed.keys()
    wired.give(0, {"w": [0, 0]})
    wired.settle()
    assert [wired.value(read, "w") for read in reads] == [[11, 22], [11, 22]]


def test_a_worker_that_leaves_is_counted_once_more_and_waits_for_nothing(wired: Wired) -> None:
    wired.push(1, {"w": [1, 1, 1]})
    unanswered = wired.pull(1, "w")
    wired.settle()
    assert any(block.round.pulls for block in wired.servers[0].shard.blocks)
    wired.leave(1)
    wired.advance(0.1)
    assert isinstance(wired.failed[unanswered], StoreClosed)
    assert not any(block.round.pulls for block in wired.servers[0].shard.blocks)
    for gift, expected in ((10, 11), (7, 7)):
        read = wired.pushpull(0, {"w": [gift] * 3})
        wired.settle()
        assert wired.value(read, "w") == [expected] * 3


def test_whoever_is_not_a_live_worker_changes_nothing(wired: Wired) -> None:
    server = wired.servers[0]
    member = wired.member("worker-1")
    zombie, stranger = Member(worker(1), member.incarnation + 7), Member(NodeId(Role.WORKER, UNRANKED), 5)
    pull = Pull(*(np.zeros(1, np.uint32) for _ in range(4)))
    assert server.refuses(member, pull) is None
    assert "worker-1 is not a worker of this cluster" in str(server.refuses(zombie, pull))
    assert server.refuses(stranger, pull)
    wired.leave(1)
    wired.advance(0.1)
    assert server.refuses(member, pull) == ""


def test_an_empty_contribution_counts_and_adds_nothing(wired: Wired) -> None:
    reads = [wired.pushpull(0, {"w": None, "b": [4]}), wired.pushpull(1, {"w": [1, 1, 1], "b": [2]})]
    wired.settle()
    assert wired.value(reads[0], "w") == [1, 1, 1]
    assert wired.value(reads[1], "b") == [6]


def test_workers_that_disagree_on_the_learning_rate_all_get_an_error_that_names_them(wired: Wired) -> None:
    for rank in (0, 1):
        wired.set_optimizer(rank, "sgd", learning_rate=1.0)
    requests = [wired.push(rank, {"w": [1, 1, 1]}, setting=(0.1 + rank, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    for request in requests:
        assert isinstance(wired.failed[request], OptimizerMismatch)
        assert "worker-0 says lr 0.1, wd 0; worker-1 says lr 1.1, wd 0" in str(wired.failed[request])
    reads = [wired.pushpull(rank, {"w": [1, 1, 1]}, setting=(0.5, 0.0, 1.0)) for rank in (0, 1)]
    wired.settle()
    assert [wired.value(read, "w") for read in reads] == [[0, 1, 2]] * 2


def test_an_asynchronous_store_counts_each_push_at_once() -> None:
    wired = Wired(2, 1)
    wired.initialise({"w": [0, 0]}, mode="async")
    for rank in (0, 1):
        wired.set_optimizer(rank, "test")
    wired.settle()
    reads = [wired.pushpull(1, {"w": [1, 2]}), wired.pushpull(1, {"w": [1, 2]})]
    wired.settle()
    assert [wired.value(read, "w") for read in reads] == [[1, 2], [2, 4]]


def test_an_asynchronous_push_without_an_optimizer_says_what_to_do() -> None:
    wired = Wired(1, 1)
    wired.initialise({"w": [0, 0]}, mode="async")
    request = wired.push(0, {"w": [1, 1]})
    wired.settle()
    assert isinstance(wired.failed[request], PushRefused)
    assert "server-0 refused: key 'w': a dist_async store" in str(wired.failed[request])


def test_rounds_go_on_without_a_worker_that_left_and_its_last_push_counts(wired: Wired) -> None:
    wired.push(1, {"w": [10, 10, 10]})
    wired.leave(1)
    wired.advance(0.1)
    assert "worker-1" in wired.stopped
    reads = [wired.pushpull(0, {"w": [1, 1, 1]}), wired.pushpull(0, {"w": [2, 2, 2]})]
    wired.settle()
    assert [wired.value(read, "w") for read in reads] == [[11, 11, 11], [2, 2, 2]]


def test_a_round_that_only_waited_for_somebody_who_leaves_is_closed(wired: Wired) -> None:
    read = wired.pushpull(0, {"w": [1, 1, 1]})
    wired.settle()
    assert read not in wired.completed
    wired.leave(1)
    wired.settle()
    assert wired.value(read, "w") == [1, 1, 1]


def test_one_bad_slice_is_refused_and_its_neighbours_are_not_touched(wired: Wired) -> None:
    column = np.array([0, 77], np.uint32)
    arrays = Arrays(np.array([1, 1], np.uint8), np.array([3, 3], np.uint32), bytes(32))
    push = Push(
        False, column, column, column * 0, column * 0, column * 0, column.astype(np.uint8) * 0, ((NAN, NAN, NAN),),
        column.astype(np.uint8) * 0, arrays,
    )  # fmt: skip
    me = wired.member("worker-1")
    stamp = Stamp(JOB, 1, me, wired.member("server-0").incarnation, 1, 0, 0)
    wired.hear("server-0", Packet(stamp, push))
    said = wired.log[-1]
    assert "Refused(runs=[77], ids=[77]" in said and "slice 77 is not kept by server-0" in said
    assert list(wired.servers[0].shard.blocks.of(0)[0].round.slots) == [1]


def test_a_first_value_of_another_size_is_refused(wired: Wired) -> None:
    column = np.array([0], np.uint32)
    values = InitValues(column, column, Arrays(np.array([1], np.uint8), np.array([2], np.uint32), bytes(8)))
    stamp = Stamp(JOB, 1, wired.member("worker-1"), wired.member("server-0").incarnation, 1, 0, 0)
    wired.hear("server-0", Packet(stamp, values))
    assert "slice 0 has another size or dtype than was declared" in wired.log[-1]


def test_a_large_value_is_leased_until_the_worker_has_it(monkeypatch: pytest.MonkeyPatch, wired: Wired) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    read = wired.pull(0, "w")
    wired.deliver()
    buffer = wired.servers[0].shard.blocks.of(0)[0].published
    assert buffer is not None and buffer.leases == 1
    for rank in (0, 1):
        wired.push(rank, {"w": [7, 7, 7]})
    wired.advance(0.1)
    assert wired.value(read, "w") == [1, 2, 3]
    assert buffer.leases == 0


def test_a_long_round_is_explained_and_hinted_at(wired: Wired) -> None:
    wired.push(0, {"w": [1, 1, 1]})
    wired.advance(15.0)
    sentence = wired.servers[0].explain(wired.now)
    assert sentence == "waiting 15.0 s for worker-1 to push key 'w' (step 1)"
    assert wired.workers[0].explain(wired.now) == (
        "worker-0: waiting 15.0 s for worker-1 (host-1) to push key 'w' (step 1), in push of key 'w'"
    )


def test_a_server_that_loses_the_scheduler_ends_after_a_grace() -> None:
    wired = Wired(1, 1)
    wired.observe("server-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.advance(0.3)
    assert "server-0" not in wired.stopped
    wired.advance(0.2)
    error = wired.stopped["server-0"]
    assert isinstance(error, PeerLostError) and error.node == "scheduler"


def test_a_server_speaks_up_at_once_so_that_the_scheduler_knows_its_new_connection() -> None:
    wired = Wired(1, 1)
    wired.observe("server-0", PeerDisconnected(SCHEDULER_MEMBER, "reset"))
    wired.tick()
    assert wired.log[-1].endswith("server-0 -> scheduler: Alive()")
    wired.observe("server-0", PeerConnected(SCHEDULER_MEMBER))
    wired.advance(5.0)
    assert "server-0" not in wired.stopped


# Values that are read where they lie.

HOLD = int(Flag.HOLD)


def held_by(wired: Wired, name: str, number: int = 0) -> Buffer:
    return wired.servers[0].shard.blocks.of(number)[0].lent[wired.member(name)]


@pytest.fixture
def slow() -> Wired:
    """An asynchronous cluster in which worker 0 reads where the server keeps the value, and then does nothing."""
    made = Wired(2, 1)
    made.initialise({"w": [0, 0, 0], "b": [5], "none": []}, mode="async")
    for rank in (0, 1):
        made.set_optimizer(rank, "test")
    made.settle()
    made.pushpull(0, {"w": [1, 1, 1]}, flag=HOLD)
    made.advance(0.1)
    return made


def test_a_slow_worker_reads_the_same_value_while_the_others_go_on(slow: Wired) -> None:
    buffer = held_by(slow, "worker-0")
    seen = set()
    for turn in range(20):
        slow.pushpull(1, {"w": [turn] * 3}, flag=HOLD)
        slow.advance(0.1)
        assert buffer.array.tolist() == [1, 1, 1]
        seen.add(id(slow.servers[0].shard.blocks.of(0)[0].published))
    assert len(seen) <= 4 and len(slow.servers[0].shard.blocks.of(0)[0].pool.free_buffers) <= 4


def test_a_held_value_is_free_when_the_worker_has_acknowledged_its_successor(slow: Wired) -> None:
    first = held_by(slow, "worker-0")
    slow.pushpull(0, {"w": [1, 1, 1]}, flag=HOLD)
    slow.deliver()
    assert first.leases == 1 and held_by(slow, "worker-0") is not first
    slow.settle()
    assert first.leases == 1, "it has arrived, but that is not known yet"
    slow.advance(0.1)
    assert first.leases == 0
    assert held_by(slow, "worker-0").leases == 1


def test_a_value_that_is_read_without_holding_lets_nothing_go(slow: Wired) -> None:
    first = held_by(slow, "worker-0")
    for _ in range(3):
        slow.pushpull(0, {"w": [1, 1, 1]})
        slow.pull(0, "w")
        slow.advance(0.1)
    assert held_by(slow, "worker-0") is first and first.array.tolist() == [1, 1, 1]


def test_what_a_worker_that_has_left_was_reading_stays_as_it_is(slow: Wired) -> None:
    slow.pushpull(0, {"w": [1, 1, 1]}, flag=HOLD)
    slow.advance(0.1)
    last = held_by(slow, "worker-0")
    slow.leave(0)
    slow.advance(60.0)
    assert "worker-0" in slow.stopped
    for turn in range(6):
        slow.pushpull(1, {"w": [turn] * 3}, flag=HOLD)
        slow.advance(0.1)
    # Its process may still use the weights it was shown, and nobody can know until when.
    assert last.leases == 1 and last.array.tolist() == [2, 2, 2]


def test_a_held_value_without_elements_has_no_frame_of_its_own(slow: Wired) -> None:
    slow.log.clear()
    read = slow.pushpull(0, {"w": [1, 1, 1], "none": [], "b": [2]}, flag=HOLD)
    sent = []
    while slow.wire:
        sent.append(slow.wire[0][2])
        wire.decode([bytes(frame) for frame in wire.encode(sent[-1])])
        slow.deliver()
    assert [len(packet.message.arrays.frames) for packet in sent if isinstance(packet.message, Values)] == [2]
    assert (slow.value(read, "w"), slow.value(read, "b"), slow.value(read, "none")) == ([2, 2, 2], [7], [])
    alone = slow.pushpull(0, {"none": []}, flag=HOLD)
    wire.encode(slow.wire[0][2])
    slow.deliver()
    wire.encode(slow.wire[0][2])
    slow.settle()
    assert slow.value(alone, "none") == []


# Large values in one message.


def keys_of(count: int, elements: int) -> dict[int | str, list[float]]:
    return {number: [number + 0.5] * elements for number in range(count)}


@pytest.mark.parametrize(("count", "frames"), [(1, [1]), (2, [2]), (32, [32]), (33, [32, 1]), (70, [32, 32, 6])])
def test_large_values_leave_in_one_message_of_several_frames(
    count: int, frames: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    wired = Wired(1, 1)
    wired.initialise(keys_of(count, 4))
    for block in wired.servers[0].shard.blocks:
        wired.servers[0].shard.blocks.isolate(block.ids)
    read = wired.pull(0, *range(count))
    wired.deliver()
    messages = [packet.message for _, _, packet in wired.wire]
    assert [len(message.arrays.frames) for message in messages if isinstance(message, Values)] == frames
    blocks = list(wired.servers[0].shard.blocks)
    assert all(block.published is not None and block.published.leases == 1 for block in blocks)
    wired.advance(0.1)
    assert all(block.published is not None and block.published.leases == 0 for block in blocks)
    assert [wired.value(read, key) for key in range(count)] == list(keys_of(count, 4).values())


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.1"])
def test_large_values_of_one_message_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 8)
    wired = Wired(1, 1, server_host=host)
    wired.initialise({**keys_of(5, 4), 9: [1.0], 10: [1.0] * 20})
    for block in wired.servers[0].shard.blocks:
        wired.servers[0].shard.blocks.isolate(block.ids)
    if host == "127.0.0.1":
        monkeypatch.setattr(replies, "TOGETHER_BYTES_MAX", 32)
    else:
        wired.servers[0].replies.limits = Limits(slice_bytes=32)
    read = wired.pull(0, *range(5), 9, 10)
    wired.deliver()
    sizes = [
        [memoryview(frame).nbytes for frame in packet.message.arrays.frames]
        for _, _, packet in wired.wire
        if isinstance(packet.message, Values)
    ]
    assert sizes == [[16, 16], [16, 16], [16], [80], [8]]
    wired.settle()
    assert wired.value(read, 10) == [1.0] * 20


def test_a_server_tells_how_much_it_had_to_do() -> None:
    wired = Wired(1, 1)
    wired.observe("server-0", Worked(0.25, 0.75))
    said = "server-0 -> scheduler: StepTimes(steps=0, data_us=0, compute_us=250000, blocked_us=750000, sending_us=0)"
    assert wired.log[-1].endswith(said)
