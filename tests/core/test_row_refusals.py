"""Messages about rows that are well formed and wrong: each is refused by name, nothing changes, neighbours go on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.config.settings import Limits
from kvdist.core.machine import Send
from kvdist.core.server.buffers import BUFFER_UNIT_BYTES, BUFFERS_KEPT_MAX, Buffer
from kvdist.core.server.checkpoints import ServerCheckpoints
from kvdist.core.server.peers import Peers
from kvdist.core.server.replies import Replies
from kvdist.core.server.shard import Shard, hints
from kvdist.core.server.sparse_table import SparseTable
from kvdist.core.traffic import Traffic
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, server, worker
from kvdist.optimizer.registry import create
from kvdist.optimizer.updater import Arithmetic, Updater
from kvdist.protocol.arrays import Arrays, padded
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import (
    MORE,
    ROWS,
    Assign,
    Counted,
    Flag,
    InitRows,
    Packet,
    Placement,
    PullRows,
    PushRows,
    Refused,
    Stamp,
    Values,
)
from kvdist.protocol.wire import decode, encode

FLOAT32, FLOAT64, INT64 = 1, 2, 7
A, B = Member(worker(0), 10), Member(worker(1), 11)
DECIDES = ((float("nan"),) * 3,)


class Fed:
    """The tables of one server of two, fed with messages: 't' of 10 rows and 'lazy' of 2**40, each of two elements."""

    def __init__(self) -> None:
        self.allocated: list[int] = []
        self.peers = Peers("server-1")
        self.replies = Replies(Limits(), Traffic(), self.peers)
        arithmetic = Arithmetic(REFERENCE, Updater)
        self.shard = Shard(Limits(), arithmetic, REFERENCE, self.allocate, self.replies, ServerCheckpoints(self.peers))
        keys, shapes = ("t", "lazy"), ((10, 2), (1 << 40, 2))
        placement = Placement((0, 2), (Placement.CUT, Placement.CUT), 64)
        self.shard.assign(Assign(1, 0, "sync", keys, shapes, (1, 1), (1, 1), (ROWS, "zeros"), placement), 1, 2)
        self.roster({0: A, 1: B})
        self.say(A, init(rows([5, 9], 1)))

    def roster(self, workers: dict[int, Member]) -> None:
        gone = self.peers.workers.keys() - workers.keys()
        self.peers.workers = workers
        self.peers.rest(set())
        self.shard.roster(gone)

    def allocate(self, nbytes: int) -> Any:
        self.allocated.append(nbytes)
        return np.zeros(nbytes, np.uint8)

    def say(self, sender: Member, message: Any, now: float = 0.0) -> list[Send]:
        """A worker says something that came over the wire; the answers."""
        stamp = Stamp(1, 1, sender, 2, 1, 0, 0)
        read = decode([bytes(frame) for frame in encode(Packet(stamp, message))]).message
        match read:
            case InitRows():
                self.shard.initialise_rows(sender, read)
            case PushRows():
                self.shard.push_rows(sender, read, now)
            case PullRows():
                self.shard.pull_rows(sender, read, now)
        effects: list[Any] = self.replies.pop_messages()
        self.shard.validate()
        self.replies.validate()
        return effects

    def refusals(self, sender: Member, message: Any) -> list[str]:
        """The reasons with which a message is refused, without any other answer."""
        answers = self.say(sender, message)
        assert all(isinstance(answer.message, Refused) and answer.to == sender for answer in answers), answers
        return [answer.message.reason for answer in answers]

    def values(self, ids: Sequence[int] = (5, 6, 7, 8, 9), number: int = 1) -> list[float]:
        """First elements of rows, read directly."""
        block = self.shard.tables[number].rows
        out = np.zeros(2 * len(ids), np.float32)
        block.gather(np.array(ids), out)
        return out[::2].tolist()


def rows(ids: Sequence[int], value: float, width: int = 2, dtype: Any = np.float32) -> tuple[Any, Any]:
    return np.array(ids, np.int64), np.full(len(ids) * width, value, dtype)


def u32(*numbers: int) -> Any:
    return np.array(numbers, np.uint32)


def u8(*numbers: int) -> Any:
    return np.array(numbers, np.uint8)


def laid_out(*arrays: Any) -> Arrays:
    codes = {np.dtype(np.float32): FLOAT32, np.dtype(np.float64): FLOAT64, np.dtype(np.int64): INT64}
    parts = [array.tobytes() + b"\0" * (padded(array.nbytes) - array.nbytes) for array in arrays]
    return Arrays(u8(*(codes[one.dtype] for one in arrays)), u32(*(len(one) for one in arrays)), b"".join(parts))


def init(*given: Any, flags: int = 0, run: int = 1, number: int = 1) -> InitRows:
    n = len(given)
    arrays = laid_out(*(array for pair in given for array in pair))
    return InitRows(u32(*[run] * n), u32(*[number] * n), u8(*[flags] * n), arrays)


def push(
    *given: Any, run: int = 7, numbers: Sequence[int] = (1,), step: int = 0, flags: Sequence[int] = (0,)
) -> PushRows:
    n = len(given)
    arrays = laid_out(*(array for pair in given for array in pair))
    column, one = u32(*[step] * n), u32(*[run] * n)
    return PushRows(one, u32(*numbers), column, u32(*[0] * n), u32(*[0] * n), u8(*flags), DECIDES, u8(*[0] * n), arrays)


def pull(*ids: Any, run: int = 8, numbers: Sequence[int] = (1,), steps: Sequence[int] = (0,)) -> PullRows:
    n = len(ids)
    return PullRows(u32(*[run] * n), u32(*numbers), u32(*steps), u32(*[0] * n), laid_out(*ids))


@pytest.fixture
def fed() -> Fed:
    return Fed()


WRONG = {
    "not ascending": (rows([7, 6], 1), "key 't': rows must ascend from 5 to 9 here"),
    "twice the same": (rows([6, 6], 1), "rows must ascend"),
    "not ascending between its ends": (rows([5, 8, 7, 9], 1), "rows must ascend"),
    "negative": (rows([-1, 6], 1), "rows must ascend from 5"),
    "of another server": (rows([4, 5], 1), "rows must ascend from 5"),
    "beyond the table": (rows([5, 10], 1), "rows must ascend from 5 to 9"),
    "far beyond": (rows([(1 << 63) - 1], 1), "rows must ascend from 5 to 9"),
    "wider": (rows([5, 6], 1, width=3), "key 't': 2 rows of another size or dtype than was declared"),
    "narrower": (rows([5, 6], 1, width=1), "2 rows of another size"),
    "of another dtype": (rows([5], 1, dtype=np.float64), "1 rows of another size or dtype"),
    "none, of another dtype": (rows([], 1, dtype=np.float64), "0 rows of another size or dtype"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_rows_are_refused_by_name_while_their_neighbours_in_the_message_count(fed: Fed, name: str) -> None:
    wrong, reason = WRONG[name]
    (said,) = fed.refusals(A, push(wrong, rows([1 << 39], 4), numbers=(1, 3), flags=(0, 0)))
    assert reason in said
    fed.say(B, push(rows([(1 << 39) + 1], 5), numbers=(3,)))
    assert fed.values([1 << 39, (1 << 39) + 1], number=3) == [4, 5]
    assert fed.values() == [1, 0, 0, 0, 1]
    # The worker may push again: nothing of it has been counted.
    fed.say(A, push(rows([6], 2), run=12))
    fed.say(B, push(rows([6], 3), run=9))
    assert fed.values() == [0, 5, 0, 0, 0]


@pytest.mark.parametrize("name", [name for name in WRONG if "rows must" in WRONG[name][1]])
def test_pulls_of_wrong_rows_are_refused_and_nothing_is_allocated(fed: Fed, name: str) -> None:
    (ids, _), reason = WRONG[name]
    (said,) = fed.refusals(A, pull(ids))
    assert reason in said
    assert not fed.allocated


def test_unknown_slices_are_refused_by_number(fed: Fed) -> None:
    for message in (push(rows([5], 1), numbers=(0,)), pull(np.array([5]), numbers=(0,)), init(rows([5], 1), number=0)):
        assert fed.refusals(B, message) == ["server-1 has no table slice 0"]


def test_a_pull_too_large_for_a_message_is_refused_before_anything_is_allocated(fed: Fed) -> None:
    table = fed.shard.tables[3]
    count = 1 + DEFAULT.payload_bytes_max // 8
    ids = np.arange(1 << 39, (1 << 39) + count)
    with mock.patch.object(table.rows, "gather", side_effect=AssertionError("nothing is read")):
        named = Arrays(u8(INT64), u32(count), ids.tobytes())
        fed.shard.pull_rows(A, PullRows(u32(1), u32(3), u32(0), u32(0), named), 0.0)
    (refused,) = fed.replies.pop_messages()
    assert isinstance(refused, Send) and isinstance(refused.message, Refused)
    assert f"key 'lazy': {count} rows are too many for one message" in refused.message.reason
    assert not fed.allocated and not table.round.pulls


def test_a_push_that_is_repeated_counts_once_and_the_first_wins(fed: Fed) -> None:
    assert not fed.say(A, push(rows([5], 2)))
    assert not fed.say(A, push(rows([6], 100)))
    answers = fed.say(B, push(rows([5], 3), run=9))
    assert {answer.to for answer in answers} == {A, B}
    assert fed.values() == [5, 0, 0, 0, 0]
    (again,) = fed.say(A, push(rows([6], 100)))
    assert isinstance(again.message, Counted)
    assert fed.values() == [5, 0, 0, 0, 0] and fed.shard.tables[1].round.version == 1


def test_a_push_out_of_turn_is_refused(fed: Fed) -> None:
    (said,) = fed.refusals(A, push(rows([5], 2), step=1))
    assert "worker-0" in said and "sent its push 1 of key 't', but only 0 of its pushes have been counted" in said


def test_a_contribution_in_parts_counts_with_the_last_one(fed: Fed) -> None:
    fed.say(B, push(rows([5, 9], 1), run=9))
    for part in (rows([5, 6], 1), rows([], 1), rows([8], 2)):
        assert not fed.say(A, push(part, flags=(MORE,)))
    assert fed.shard.tables[1].round.version == 0
    assert len(fed.say(A, push(rows([9], 3)))) == 2
    assert fed.values() == [2, 1, 0, 2, 4]
    assert not fed.shard.tables[1].arriving


@pytest.mark.parametrize("between", [[], [rows([], 1)]])
def test_parts_that_do_not_ascend_are_refused_with_all_that_belongs_to_them(fed: Fed, between: list[Any]) -> None:
    fed.say(B, push(rows([5], 1), run=9))
    for part in [rows([5, 7], 1), *between]:
        assert not fed.say(A, push(part, flags=(MORE,)))
    (said,) = fed.refusals(A, push(rows([7, 8], 1), flags=(MORE,)))
    assert "worker-0" in said and "sent rows that do not ascend of key 't'" in said
    assert fed.refusals(A, push(rows([9], 1))) == ["key 't': an earlier part of the same rows was refused"]
    assert fed.shard.tables[1].round.version == 0 and not fed.shard.tables[1].arriving
    fed.say(A, push(rows([9], 4), run=12))
    assert fed.values() == [1, 0, 0, 0, 4]


def test_a_part_that_cannot_be_taken_spoils_those_before_and_behind_it(fed: Fed) -> None:
    fed.say(B, push(rows([5], 1), run=9))
    assert not fed.say(A, push(rows([5], 1), flags=(MORE,)))
    assert "another size or dtype" in fed.refusals(A, push(rows([6], 1, width=3), flags=(MORE,)))[0]
    assert fed.refusals(A, push(rows([7], 1))) == ["key 't': an earlier part of the same rows was refused"]
    assert fed.values() == [1, 0, 0, 0, 1]
    fed.say(A, push(rows([7], 6), run=12))
    assert fed.values() == [1, 0, 6, 0, 0]


def test_parts_of_two_pushes_or_with_and_without_a_gradient_do_not_mix(fed: Fed) -> None:
    for odd in (push(rows([6], 1), run=70), push(rows([], 1), flags=(int(Flag.EMPTY),))):
        fed.say(A, push(rows([5], 1), flags=(MORE,)))
        (said,) = fed.refusals(A, odd)
        assert "a part of another push between those of key 't'" in said
        fed.shard.tables[1].spoilt.clear()


def test_parts_without_memory_for_all_of_them_count_as_a_push_that_is_refused(fed: Fed) -> None:
    """Or the counter of the worker's next push would not fit."""
    fed.say(B, push(rows([5], 1), run=9))
    assert not fed.say(A, push(rows([5], 1), flags=(MORE,)))
    with mock.patch.object(SparseTable, "_joined", side_effect=MemoryError("no room")):
        answers = {answer.to: answer.message for answer in fed.say(A, push(rows([6], 1)))}
    assert isinstance(answers[A], Refused) and answers[A].reason == "key 't': no room"
    assert isinstance(answers[B], Counted) and fed.values() == [1, 0, 0, 0, 0]
    fed.say(A, push(rows([7], 6), run=12, step=1))
    fed.say(B, push(rows([7], 1), run=13, step=1))
    assert fed.shard.tables[1].round.version == 2 and fed.values() == [0, 0, 7, 0, 0]


def test_first_values_of_which_a_part_is_refused_never_become_the_first_values() -> None:
    fed = Fed()
    table = fed.shard.tables[1]
    table.has_value = False
    assert not fed.say(A, init(rows([5], 3), flags=MORE))
    assert "rows must ascend" in fed.refusals(A, init(rows([99], 3), flags=MORE))[0]
    assert fed.refusals(A, init(rows([6], 3))) == ["key 't': an earlier part of the same rows was refused"]
    assert not table.has_value
    (done,) = fed.say(A, init(rows([5, 6, 7, 8, 9], 2), run=2))
    assert isinstance(done.message, Counted) and fed.values() == [2] * 5


def test_what_was_arriving_from_a_worker_that_is_gone_is_dropped(fed: Fed) -> None:
    fed.say(A, push(rows([5], 2), run=9))
    fed.say(B, push(rows([5], 1), flags=(MORE,)))
    fed.roster({0: A})
    (counted,) = fed.replies.pop_messages()
    assert isinstance(counted, Send) and counted.to == A
    assert fed.values() == [2, 0, 0, 0, 0] and not fed.shard.tables[1].arriving


def test_an_answer_to_a_worker_that_was_replaced_is_not_sent_and_its_memory_is_free(fed: Fed) -> None:
    fed.shard.pull_rows(Member(worker(1), 99), pull(np.array([5])), 0.0)
    assert not fed.replies.pop_messages()
    assert fed.allocated == [BUFFER_UNIT_BYTES]
    fed.say(A, pull(np.array([5])))
    assert fed.allocated == [BUFFER_UNIT_BYTES]


def test_an_answer_is_leased_until_it_is_acknowledged_and_its_memory_used_again(fed: Fed) -> None:
    (first,) = fed.say(A, pull(np.array([5, 6])))
    (second,) = fed.say(A, pull(np.array([9])))
    assert [isinstance(one.message, Values) for one in (first, second)] == [True, True]
    (mine,), (other,) = first.token, second.token  # type: ignore[misc]
    assert isinstance(mine, Buffer) and mine is not other and (mine.leases, other.leases) == (1, 1)
    assert fed.allocated == [BUFFER_UNIT_BYTES] * 2
    shown = bytes(first.message.arrays.payload)
    fed.say(A, push(rows([5], 7)))
    fed.say(B, push(rows([5], 7)))
    assert bytes(first.message.arrays.payload) == shown, "what was handed out does not change"
    mine.leases -= 1
    (third,) = fed.say(A, pull(np.array([5])))
    assert third.token == (mine,) and len(fed.allocated) == 2


def test_only_so_many_buffers_are_kept_and_none_that_somebody_reads(fed: Fed) -> None:
    answers = [fed.say(A, pull(np.array([5])))[0] for _ in range(2 * BUFFERS_KEPT_MAX)]
    assert len(fed.shard.buffers.all) == 2 * BUFFERS_KEPT_MAX
    for answer in answers[1:]:
        answer.token[0].leases -= 1  # type: ignore[index]
    ids = np.arange(1 << 39, (1 << 39) + 100_000)  # too large for any of them
    fed.say(A, pull(ids, numbers=(3,)))
    assert len(fed.shard.buffers.all) <= BUFFERS_KEPT_MAX + 1
    assert answers[0].token[0] in fed.shard.buffers.all  # type: ignore[index]


def test_who_pulls_behind_a_push_that_is_still_arriving_is_named_as_who_is_awaited(fed: Fed) -> None:
    fed.say(A, push(rows([5], 1), flags=(MORE,)))
    fed.say(A, pull(np.array([5]), steps=(1,)))
    (wait,) = fed.shard.waits(9.0)
    assert wait.describe(9.0) == "waiting 9.0 s for worker-0 to push key 't' (step 1)"
    (hint,) = hints(fed.shard.waits(4.0), 9.0)
    assert isinstance(hint, Send) and hint.to == A and hint.message.ranks == (0,)  # type: ignore[union-attr]


def test_an_optimizer_makes_sums_gradients(fed: Fed) -> None:
    fed.shard.set_optimizer(0, create("test", rescale_grad=3))
    fed.say(A, push(rows([5], 1)))
    fed.say(B, push(rows([6], 2)))
    assert fed.values() == [4, 6, 0, 0, 1]


# Whatever a broken worker may say that a message can carry.

IDS = st.lists(st.sampled_from([-1, 0, 4, 5, 6, 7, 9, 10, 1 << 39, (1 << 40) - 1, 1 << 40, (1 << 63) - 1]), max_size=4)
NUMBER = st.sampled_from([0, 1, 2, 3, 4, (1 << 32) - 1])
SMALL = st.integers(0, 2)


@st.composite
def anything(draw: st.DrawFn) -> Any:
    """A message about up to three slices, most of whose numbers could be right."""
    count = draw(st.integers(1, 3))
    wanted = [sorted(set(draw(IDS))) if draw(st.booleans()) else draw(IDS) for _ in range(count)]
    numbers = [draw(NUMBER) for _ in range(count)]
    run, step = draw(SMALL), draw(SMALL)
    if draw(st.booleans()):
        return pull(*(np.array(ids, np.int64) for ids in wanted), run=run, numbers=numbers, steps=[step] * count)
    width, dtype = draw(st.sampled_from([1, 2, 2, 2, 3])), draw(st.sampled_from([np.float32] * 4 + [np.float64]))
    pairs = [rows(ids, draw(st.sampled_from([1, 2, float("nan"), float("inf")])), width, dtype) for ids in wanted]
    flags = [draw(st.sampled_from([0, MORE, int(Flag.AVERAGE)])) if ids else draw(st.sampled_from([0, 1, 129]))
             for ids in wanted]  # fmt: skip
    if draw(st.integers(0, 9)) == 0:
        one = np.array(numbers, np.uint32)
        return InitRows(u32(*[run] * count), one, u8(*(flag & MORE for flag in flags)),
                        laid_out(*(array for pair in pairs for array in pair)))  # fmt: skip
    return push(*pairs, run=run, numbers=numbers, step=step, flags=flags)


@settings(max_examples=100)
@given(
    spoken=st.lists(st.tuples(st.sampled_from([A, B]), anything()), min_size=1, max_size=12),
    optimizer=st.sampled_from([None, "test", "adagrad"]),
)
def test_whatever_is_said_is_answered_or_waits_and_rounds_go_on(
    spoken: list[tuple[Member, Any]], optimizer: str | None
) -> None:
    fed = Fed()
    if optimizer:
        fed.shard.set_optimizer(0, create(optimizer))
    for sender, message in spoken:
        for answer in fed.say(sender, message):
            assert isinstance(answer.message, Refused | Counted | Values)
            assert answer.to in (A, B)
            encode(Packet(Stamp(1, 1, Member(server(1), 5), 0, 1, 0, 0), answer.message))
    assert all(wait.describe(99.0) for wait in fed.shard.waits(99.0))
    assert all(nbytes == BUFFER_UNIT_BYTES for nbytes in fed.allocated), "nothing is as large as somebody says"
    # Both workers go on as they should, and the next round is what it must be.
    table = fed.shard.tables[1]
    table.round.slots.clear()
    table.arriving.clear()
    version = table.round.version
    for member in (A, B):
        fed.say(member, push(rows([6], 1), run=50, step=table.round.counted.get(member.node.rank, 0)))
    assert table.round.version == version + 1
    if optimizer is None:
        assert fed.values() == [0, 2, 0, 0, 0]
