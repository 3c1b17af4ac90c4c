"""What leaves at the end of a message: small values joined, large ones shown, each leased once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvdist.core.machine import Effect, Send
from kvdist.core.policy import SYNC
from kvdist.core.server import replies
from kvdist.core.server.block import Block
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.replies import Reply
from kvdist.core.traffic import Traffic
from kvdist.dtypes import DType
from kvdist.nodes import Member, worker
from kvdist.optimizer.base import Extent
from kvdist.protocol.arrays import views
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import Counted, ErrorCode, Refused, Values
from tests.cases import each

READER = Member(worker(0), 1)
SMALL, LARGE = 3, replies.JOIN_BYTES_MAX // 4 + 1
"""Elements."""


def block(number: int, count: int = SMALL, dtype: DType = DType.FLOAT32) -> Block:
    made = Block.of(0, [number], [Extent(f"k{number}", (count,))], [count], dtype, SYNC)
    made.round.version = number + 10
    made.initialise([np.full(count, number, dtype.storage)])
    return made


def sent(effects: Sequence[Effect]) -> list[Send]:
    assert all(isinstance(effect, Send) and effect.to == READER for effect in effects)
    return [effect for effect in effects if isinstance(effect, Send)]


def values_of(blocks: Sequence[Block], payload_bytes_max: int = 1 << 20) -> list[Send]:
    answers = Reply()
    for one in blocks:
        answers.value(int(one.ids[0]) + 100, one)
    return sent(answers.messages(READER, payload_bytes_max, Traffic()))


def contents(send: Send) -> list[tuple[int, int, int, list[float]]]:
    """(run, slice, version, first element if any) of each value of a message."""
    message = send.message
    assert isinstance(message, Values)
    columns = (message.runs.tolist(), message.ids.tolist(), message.versions.tolist())
    return [(*row, array[:1].tolist()) for *row, array in zip(*columns, views(message.arrays), strict=True)]


def leased(blocks: Sequence[Block]) -> list[int]:
    return [0 if one.published is None else one.published.leases for one in blocks]


def test_small_values_are_copied_together_and_not_leased() -> None:
    blocks = [block(0), block(1, 5), block(2, 0), block(3, 1, DType.FLOAT64)]
    (send,) = values_of(blocks)
    assert contents(send) == [(100, 0, 10, [0]), (101, 1, 11, [1]), (102, 2, 12, []), (103, 3, 13, [3])]
    assert isinstance(send.message, Values) and isinstance(send.message.arrays.payload, bytes)
    assert send.token is None and leased(blocks) == [0] * 4


def test_large_values_are_shown_and_leased_until_the_one_message_is_acknowledged() -> None:
    blocks = [block(0, LARGE), block(1), block(2, LARGE), block(3)]
    large, small = values_of(blocks)
    assert [row[1] for row in contents(large)] == [0, 2] and [row[1] for row in contents(small)] == [1, 3]
    buffers = [blocks[0].published, blocks[2].published]
    assert large.token == tuple(buffers) and leased(blocks) == [1, 0, 1, 0]
    assert isinstance(large.message, Values)
    frames = [buffer.payload for buffer in buffers if buffer is not None]
    assert all(frame is own for frame, own in zip(large.message.arrays.frames, frames, strict=True))


def test_a_value_that_two_runs_want_is_leased_twice() -> None:
    one = block(0, LARGE)
    (send,) = values_of([one, one])
    assert leased([one]) == [2] and send.token == (one.published, one.published)
    assert [row[3] for row in contents(send)] == [[0], [0]]


@each("extra", [0, 1])
def test_a_value_of_exactly_the_limit_is_small(extra: int) -> None:
    one = block(0, replies.JOIN_BYTES_MAX // 4 + extra)
    values_of([one])
    assert leased([one]) == [extra]


@pytest.mark.parametrize("count", [1, 31, 32, 33, 64, 65])
def test_no_message_has_more_frames_than_a_receiver_takes(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replies, "JOIN_BYTES_MAX", 0)
    blocks = [block(number) for number in range(count)]
    sends = values_of(blocks)
    sizes = [len(send.message.arrays.frames) for send in sends if isinstance(send.message, Values)]
    assert sum(sizes) == count and len(sizes) == -(-count // replies.FRAMES_MAX)
    assert max(sizes) <= min(replies.FRAMES_MAX, DEFAULT.payload_frames_max)
    assert [row[1] for send in sends for row in contents(send)] == list(range(count))
    tokens = [buffer for send in sends if isinstance(send.token, tuple) for buffer in send.token]
    assert tokens == [one.published for one in blocks]


def test_small_values_leave_in_messages_of_a_limited_size() -> None:
    blocks = [block(number) for number in range(5)]
    assert [len(contents(send)) for send in values_of(blocks, payload_bytes_max=32)] == [2, 2, 1]
    assert [len(contents(send)) for send in values_of(blocks, payload_bytes_max=1)] == [1] * 5


def test_held_values_lease_the_new_version_and_give_back_the_old_one_with_the_message() -> None:
    blocks = [block(0), block(1, 0), block(2, LARGE)]
    first: list[Buffer] = []
    for one in blocks:
        assert one.published is not None
        first.append(one.published)
    answers = Reply()
    for one in blocks:
        answers.lend(READER, 7, one)
    (send,) = sent(answers.messages(READER, 1 << 20, Traffic()))
    assert send.token == () and [buffer.leases for buffer in first] == [1, 1, 1]
    assert isinstance(send.message, Values) and len(send.message.arrays.frames) == 2
    for one in blocks:
        one.replace([np.full(one.pool.size, 9, np.float32)])
        answers = Reply()
        answers.lend(READER, 8, one)
        (send,) = sent(answers.messages(READER, 1 << 20, Traffic()))
        assert send.token == (first[int(one.ids[0])],) and first[int(one.ids[0])].leases == 1
        assert one.published is not None and one.lent[READER] is one.published and one.published.leases == 1


def test_an_answer_that_is_not_sent_gives_back_the_old_version_of_a_held_value() -> None:
    one = block(0)
    first = one.published
    assert first is not None
    one.lend(READER)
    one.replace([np.full(one.pool.size, 9, np.float32)])
    answers = Reply()
    answers.lend(READER, 8, one)
    answers.drop()
    assert one.published is not None and (first.leases, one.published.leases) == (0, 1)


def test_a_held_value_without_elements_alone_has_an_empty_payload() -> None:
    one = block(0, 0)
    answers = Reply()
    answers.lend(READER, 7, one)
    (send,) = sent(answers.messages(READER, 1 << 20, Traffic()))
    assert isinstance(send.message, Values) and send.message.arrays.nbytes == 0
    assert len(send.message.arrays.frames) == 1


def test_a_block_of_several_slices_is_answered_by_one_frame_that_shows_its_buffer() -> None:
    counts = [SMALL, 0, LARGE]
    made = Block.of(0, [4, 5, 6], [Extent(f"k{count}", (count,)) for count in counts], counts, DType.FLOAT32, SYNC)
    made.initialise([np.full(count, position, np.float32) for position, count in enumerate(counts)])
    answers = Reply()
    answers.value(7, made)
    answers.acknowledge(8, made.ids, made.version)
    values, counted = sent(answers.messages(READER, 1 << 20, Traffic()))
    assert values.token == (made.published,) and leased([made]) == [1]
    assert contents(values) == [(7, 4, 0, [0]), (7, 5, 0, []), (7, 6, 0, [2])]
    assert isinstance(counted.message, Counted) and counted.token is None
    assert (counted.message.runs.tolist(), counted.message.ids.tolist()) == ([8] * 3, [4, 5, 6])


def test_what_was_counted_and_refused_leaves_in_one_message_for_each_reason() -> None:
    answers = Reply()
    answers.acknowledge(1, np.array([4], np.uint32), 0)
    answers.acknowledge(2, np.array([5], np.uint32), 0)
    for number, reason in ((6, "too wide"), (7, "unknown"), (8, "too wide")):
        answers.refuse(3, np.array([number], np.uint32), ErrorCode.REFUSED, reason)
    counted, wide, unknown = [send.message for send in sent(answers.messages(READER, 1 << 20, Traffic()))]
    assert isinstance(counted, Counted) and isinstance(wide, Refused) and isinstance(unknown, Refused)
    assert (counted.runs.tolist(), counted.ids.tolist()) == ([1, 2], [4, 5])
    assert (wide.ids.tolist(), wide.reason, unknown.ids.tolist()) == ([6, 8], "too wide", [7])


def test_nothing_to_say_is_no_message() -> None:
    assert Reply().messages(READER, 1 << 20, Traffic()) == []
