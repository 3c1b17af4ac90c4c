"""What leaves for one server: by priority, joined, within the window."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.core.sharding import cut
from kvdist.core.worker import transfers as module
from kvdist.core.worker.requests import ALONE_BYTES_MIN, KeyInfo, Run, RunKind, RunPart, Transfer, make_plan
from kvdist.core.worker.transfers import Credit, Outbox
from kvdist.dtypes import DType
from kvdist.protocol.arrays import views
from kvdist.protocol.limits import DEFAULT
from kvdist.protocol.messages import Flag, InitValues, Pull, Push, ReplaceValues
from tests.cases import each

NAN = math.nan
OWN = ((NAN, NAN, NAN),)


def run(
    number: int,
    kind: RunKind = RunKind.PUSH,
    size: int = 3,
    priority: int = 0,
    settings: tuple[tuple[float, float, float], ...] = OWN,
    flags: int | None = None,
    samples: int = 0,
    stays: bool = False,
) -> Run:
    """A run of one slice; slice and run have the same number."""
    info = KeyInfo(f"k{number}", (size,), DType.FLOAT32, tuple(cut(size, 4, 0, 1, number, 1 << 30)))
    (plan,) = make_plan([info], 1 << 30).runs
    payload = None if kind is RunKind.PULL else memoryview(np.full(plan.nbytes // 4, number, np.float32).tobytes())
    if flags is not None and flags & Flag.EMPTY:
        payload = memoryview(b"")
    column = None if flags is None else np.array([flags], np.uint8)
    made = Run(plan, payload, (), column, settings, samples=samples, stays=stays)
    steps = np.array([number + 1], np.uint32)
    made.begin(number, Transfer(1, kind, kind.value, [made], priority), steps, steps + 1)
    return made


def filled(*runs: Run, window: int = 1 << 20, join: int = 1 << 16, near: bool = False) -> Outbox:
    outbox = Outbox(3, window, join, near)
    for one in runs:
        outbox.add(RunPart(one))
    return outbox


def taken(outbox: Outbox) -> list[list[int]]:
    """The runs of each message that may leave now."""
    messages = []
    while (pair := outbox.next_message()) is not None:
        messages.append(pair[0].runs.tolist())
    return messages


def test_each_slice_of_a_joined_push_keeps_the_number_of_its_examples() -> None:
    pair = filled(run(1, samples=32), run(2), run(3, samples=7)).next_message()
    assert pair is not None and isinstance(pair[0], Push)
    assert pair[0].samples.tolist() == [32, 0, 7]


def test_small_runs_of_one_kind_leave_in_one_message() -> None:
    outbox = filled(run(1), run(2), run(3))
    pair = outbox.next_message()
    assert pair is not None
    message, credit = pair
    assert isinstance(message, Push) and not message.pull
    assert message.runs.tolist() == message.ids.tolist() == [1, 2, 3]
    assert (message.steps.tolist(), message.versions.tolist()) == ([2, 3, 4], [3, 4, 5])
    assert [array.tolist() for array in views(message.arrays)] == [[1] * 3, [2] * 3, [3] * 3]
    assert credit == Credit(3, 48)
    assert outbox.is_empty


def test_each_kind_becomes_its_own_message() -> None:
    kinds = [RunKind.PUSH, RunKind.PULL, RunKind.PUSHPULL, RunKind.INITIALISE, RunKind.REPLACE]
    outbox = filled(*(run(i, kind) for i, kind in enumerate(kinds)))
    messages = []
    while (pair := outbox.next_message()) is not None:
        messages.append(pair[0])
    assert [type(message) for message in messages] == [Push, Pull, Push, InitValues, ReplaceValues]
    assert [message.pull for message in messages if isinstance(message, Push)] == [False, True]


def test_higher_priority_leaves_first_then_who_came_first() -> None:
    large = module.FAR_BYTES_MAX // 4
    runs = run(1, size=large), run(2, size=large, priority=5), run(3, size=large, priority=5)
    outbox = filled(*runs, window=1 << 24)
    assert taken(outbox) == [[2], [3], [1]]


def test_priority_decides_between_kinds_too() -> None:
    assert taken(filled(run(1), run(2, RunKind.PULL, priority=1))) == [[2], [1]]


def test_large_slices_travel_together_up_to_a_limit_each_where_it_lies() -> None:
    size = module.FAR_BYTES_MAX // 3 // 8 * 8
    runs = [run(i, size=size // 4) for i in range(5)]
    outbox = filled(*runs, window=1 << 24)
    pair = outbox.next_message()
    assert pair is not None and isinstance(pair[0], Push)
    assert list(pair[0].arrays.payload) == [one.payload for one in runs[:3]]
    assert all(frame is one.payload for frame, one in zip(pair[0].arrays.payload, runs, strict=False))
    assert taken(outbox) == [[3, 4]]


def test_a_large_slice_travels_without_small_ones_and_without_a_copy() -> None:
    large = run(1, size=ALONE_BYTES_MIN // 4)
    outbox = filled(large, run(2))
    pair = outbox.next_message()
    assert pair is not None and isinstance(pair[0], Push)
    assert pair[0].arrays.payload is large.payload
    assert taken(outbox) == [[2]]


def test_joined_messages_have_a_size_limit() -> None:
    assert taken(filled(run(1), run(2), run(3), join=32)) == [[1, 2], [3]]


def sliced(*runs: Run, near: bool = False, slices: int = 2) -> Outbox:
    """An outbox of a store with priority slices, whose window has room for so many of them."""
    outbox = filled(near=near)
    outbox.keep_little_flying(slices * ALONE_BYTES_MIN)
    for one in runs:
        outbox.add(RunPart(one))
    return outbox


SLICE = ALONE_BYTES_MIN // 4
"""Elements."""


def test_what_is_urgent_waits_for_no_more_than_the_window_of_priority_slices() -> None:
    outbox = sliced(*(run(i, size=SLICE) for i in range(6)))
    assert taken(outbox) == [[0], [1]]
    outbox.add(RunPart(run(9, size=SLICE, priority=1)))
    outbox.add(RunPart(run(8, size=3, priority=2)))
    outbox.release(Credit(3, ALONE_BYTES_MIN))
    assert taken(outbox) == [[8]]
    outbox.release(Credit(3, ALONE_BYTES_MIN))
    assert taken(outbox) == [[9]]


def test_without_priority_slices_the_same_leave_together() -> None:
    assert taken(filled(*(run(i, size=SLICE) for i in range(6)))) == [[0, 1, 2, 3, 4, 5]]


def test_priority_slices_join_up_to_a_quarter_of_their_window() -> None:
    outbox = sliced(*(run(i, size=SLICE) for i in range(9)), slices=8)
    assert taken(outbox) == [[0, 1], [2, 3], [4, 5], [6, 7]]


@each("stays", [True, False])
def test_priority_slices_bound_nothing_that_stays_on_the_host(stays: bool) -> None:
    outbox = sliced(*(run(i, size=SLICE, stays=stays) for i in range(6)), near=not stays)
    assert taken(outbox) == [[0, 1, 2, 3, 4, 5]]


def test_a_slice_of_another_store_that_is_larger_than_the_window_of_priority_slices_leaves_alone() -> None:
    outbox = sliced(run(1, size=4 * SLICE), run(2, size=SLICE))
    assert taken(outbox) == [[1]]
    outbox.release(Credit(3, 4 * ALONE_BYTES_MIN))
    assert taken(outbox) == [[2]]


def test_the_window_of_priority_slices_is_never_larger_than_the_usual_one() -> None:
    outbox = filled(run(1), run(2), run(3), window=32, join=16)
    outbox.keep_little_flying(1 << 20)
    assert taken(outbox) == [[1], [2]]


def test_the_window_holds_back_until_bytes_have_arrived() -> None:
    outbox = filled(run(1), run(2), run(3), window=32, join=16)
    assert taken(outbox) == [[1], [2]]
    outbox.release(Credit(3, 16))
    assert taken(outbox) == [[3]]
    assert outbox.flying_bytes == 32


def test_joining_never_exceeds_what_is_left_of_the_window() -> None:
    outbox = filled(run(1), run(2), run(3), run(4), window=40, join=1 << 16)
    assert taken(outbox) == [[1, 2]]
    assert outbox.flying_bytes == 32


def test_a_message_larger_than_the_window_leaves_when_nothing_else_is_under_way() -> None:
    outbox = filled(run(1, size=100), run(2), window=64)
    assert taken(outbox) == [[1]]
    outbox.release(Credit(3, 400))
    assert taken(outbox) == [[2]]


def test_a_pull_has_no_bytes_and_asks_for_steps_and_versions() -> None:
    pair = filled(run(4, RunKind.PULL)).next_message()
    assert pair is not None and isinstance(pair[0], Pull)
    assert (pair[0].steps.tolist(), pair[0].versions.tolist(), pair[1].nbytes) == ([5], [6], 0)


def test_an_empty_contribution_takes_no_bytes() -> None:
    pair = filled(run(1, flags=int(Flag.EMPTY)), run(2)).next_message()
    assert pair is not None and isinstance(pair[0], Push)
    assert pair[0].flags.tolist() == [1, 0]
    assert pair[0].arrays.counts.tolist() == [0, 3]
    assert [array.tolist() for array in views(pair[0].arrays)] == [[], [2, 2, 2]]


def test_settings_of_joined_runs_become_one_table() -> None:
    slow, fast = ((0.1, 0.0, 1.0),), ((0.5, 0.0, 1.0),)
    pair = filled(run(1, settings=slow), run(2, settings=fast), run(3, settings=slow)).next_message()
    assert pair is not None and isinstance(pair[0], Push)
    chosen = [pair[0].settings[i] for i in pair[0].setting_of.tolist()]
    assert chosen == [slow[0], fast[0], slow[0]]


def test_more_settings_than_a_byte_counts_split_the_message() -> None:
    runs = [run(i, settings=((float(i), 0.0, 1.0),)) for i in range(module.SETTINGS_PER_MESSAGE_MAX + 3)]
    sizes = [len(numbers) for numbers in taken(filled(*runs))]
    assert sizes == [module.SETTINGS_PER_MESSAGE_MAX, 3]


def test_a_part_of_a_run_takes_only_its_slices_and_their_bytes() -> None:
    infos = [KeyInfo(f"k{i}", (3,), DType.FLOAT32, tuple(cut(3, 4, 0, 1, i, 1 << 30))) for i in range(4)]
    (plan,) = make_plan(infos, 1 << 30).runs
    # The third slice is empty: it has no bytes, so the fourth one lies where the third would have been.
    payload = memoryview(np.array([0, 0, 0, 9, 1, 1, 1, 9, 3, 3, 3, 9], np.float32).tobytes())
    flags = np.array([0, 0, int(Flag.EMPTY), 0], np.uint8)
    settings = ((0.1, 0.0, 1.0), (0.5, 0.0, 1.0))
    whole = Run(plan, payload, (), flags, settings, np.array([0, 1, 0, 1], np.uint8))
    steps = np.arange(4, dtype=np.uint32)
    whole.begin(7, Transfer(1, RunKind.PUSH, "push", [whole]), steps, steps)
    outbox = Outbox(3, 1 << 20, 1 << 16)
    outbox.add(RunPart(whole, [1, 2, 3]))
    pair = outbox.next_message()
    assert pair is not None and isinstance(pair[0], Push)
    message, credit = pair
    assert (message.ids.tolist(), message.steps.tolist(), message.flags.tolist()) == ([1, 2, 3], [1, 2, 3], [0, 1, 0])
    assert [array.tolist() for array in views(message.arrays)] == [[1, 1, 1], [], [3, 3, 3]]
    assert [message.settings[i][0] for i in message.setting_of.tolist()] == [0.5, 0.1, 0.5]
    assert credit.nbytes == 32


# Several payload frames.

LARGE = ALONE_BYTES_MIN // 4
"""Elements of a slice that travels without being copied together with others."""


def one_message(outbox: Outbox) -> Push:
    pair = outbox.next_message()
    assert pair is not None and isinstance(pair[0], Push)
    return pair[0]


def lengths(message: Push) -> list[int]:
    return [memoryview(frame).nbytes for frame in message.arrays.frames]


def test_large_runs_that_stay_where_they_are_leave_together_each_as_its_own_frame() -> None:
    runs = [run(i, size=LARGE, stays=True) for i in range(3)]
    message = one_message(filled(*runs))
    assert message.ids.tolist() == [0, 1, 2]
    assert isinstance(message.arrays.payload, tuple)
    assert all(frame is one.payload for frame, one in zip(message.arrays.frames, runs, strict=True))
    assert [array[0] for array in views(message.arrays)] == [0, 1, 2]


def test_large_runs_to_a_near_server_leave_together_without_a_copy() -> None:
    runs = [
        run(1),
        *(run(i, RunKind.PUSHPULL, size=LARGE + i) for i in range(2, 5)),
        run(5, RunKind.PUSHPULL),
    ]
    outbox = filled(*runs, near=True)
    assert taken(outbox) == [[1], [2, 3, 4, 5]]
    message = one_message(filled(*runs[1:], near=True))
    assert all(frame is one.payload for frame, one in zip(message.arrays.frames, runs[1:4], strict=False))
    assert [array[0] for array in views(message.arrays)] == [2, 3, 4, 5]


def test_large_runs_to_a_near_server_leave_together_up_to_a_size_and_within_the_window() -> None:
    each = module.NEAR_BYTES_MAX // 4
    runs = [run(i, size=each // 4) for i in range(6)]
    assert taken(filled(*runs, window=1 << 30, near=True)) == [[0, 1, 2, 3], [4, 5]]
    assert taken(filled(*runs, window=3 * each, near=True)) == [[0, 1, 2]]


def test_small_neighbours_share_a_frame_between_large_ones() -> None:
    sizes = [3, 5, LARGE, 1, LARGE + 1, LARGE, 7, 2]
    message = one_message(filled(*(run(i, size=size, stays=True) for i, size in enumerate(sizes))))
    nbytes = [-(-4 * size // 8) * 8 for size in sizes]
    assert lengths(message) == [sum(nbytes[:2]), nbytes[2], nbytes[3], nbytes[4], nbytes[5], sum(nbytes[6:])]
    shown = views(message.arrays)
    assert [len(array) for array in shown] == sizes
    assert all((array == i).all() for i, array in enumerate(shown))


def test_what_has_no_bytes_makes_no_frame() -> None:
    empty = int(Flag.EMPTY)
    runs = [run(0, flags=empty, stays=True), run(1, size=LARGE, stays=True), run(2, flags=empty, stays=True)]
    message = one_message(filled(*runs))
    assert lengths(message) == [ALONE_BYTES_MIN]
    assert message.arrays.counts.tolist() == [0, LARGE, 0]
    nothing = one_message(filled(run(0, flags=empty, stays=True), run(1, flags=empty, stays=True)))
    assert nothing.arrays.nbytes == 0 and len(nothing.arrays.frames) == 1


def test_what_stays_and_what_does_not_are_not_mixed() -> None:
    runs = [run(1, stays=True), run(2), run(3), run(4, size=LARGE, stays=True), run(5, stays=True), run(6, size=LARGE)]
    assert taken(filled(*runs)) == [[1], [2, 3], [4, 5], [6]]


def test_priority_is_kept_when_large_runs_leave_together() -> None:
    runs = [run(i, size=LARGE, priority=i % 3, stays=True) for i in range(7)]
    assert taken(filled(*runs)) == [[2, 5, 1, 4, 0, 3, 6]]


@each("first_is_small", [False, True])
def test_a_message_has_no_more_frames_than_a_receiver_takes(first_is_small: bool) -> None:
    runs = [run(i, size=1 if (i % 2 == 0) is first_is_small else ALONE_BYTES_MIN // 4, stays=True) for i in range(150)]
    outbox = filled(*runs, window=1 << 30)
    seen: list[int] = []
    while (pair := outbox.next_message()) is not None:
        assert isinstance(pair[0], Push)
        assert len(pair[0].arrays.frames) <= min(module.FRAMES_MAX, DEFAULT.payload_frames_max)
        assert pair[1].nbytes == pair[0].arrays.nbytes
        seen += pair[0].runs.tolist()
    assert seen == list(range(150))


def test_runs_that_stay_leave_together_up_to_a_size() -> None:
    each = module.NEAR_BYTES_MAX // 4
    runs = [run(i, size=each // 4, stays=True) for i in range(6)]
    assert taken(filled(*runs, window=1 << 30)) == [[0, 1, 2, 3], [4, 5]]


def test_several_frames_never_exceed_what_is_left_of_the_window() -> None:
    runs = [run(i, size=LARGE, stays=True) for i in range(5)]
    outbox = filled(*runs, window=2 * ALONE_BYTES_MIN + 8)
    assert taken(outbox) == [[0, 1]]
    outbox.release(Credit(3, ALONE_BYTES_MIN))
    assert taken(outbox) == [[2]]
    assert outbox.flying_bytes == 2 * ALONE_BYTES_MIN


def test_credits_cannot_be_released_twice() -> None:
    outbox = filled(run(1))
    pair = outbox.next_message()
    assert pair is not None
    outbox.release(pair[1])
    with pytest.raises(AssertionError, match="released once"):
        outbox.release(pair[1])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([1, 3, 40, LARGE - 2, LARGE, LARGE + 1]),
            st.booleans(),
            st.booleans(),
            st.integers(-1, 1),
            st.sampled_from([RunKind.PUSH, RunKind.PUSHPULL, RunKind.PULL]),
        ),
        max_size=25,
    ),
    st.sampled_from([64, ALONE_BYTES_MIN, 5 * ALONE_BYTES_MIN]),
    st.sampled_from([16, 1 << 16]),
)
def test_whatever_is_queued_leaves_once_within_the_window_and_the_credit_is_exact(
    queue: list[tuple[int, bool, bool, int, RunKind]], window: int, join: int
) -> None:
    runs = [
        run(
            i,
            kind,
            size,
            priority,
            flags=int(Flag.EMPTY) if empty and kind is not RunKind.PULL else None,
            stays=stays,
        )
        for i, (size, empty, stays, priority, kind) in enumerate(queue)
    ]
    outbox = filled(*runs, window=window, join=join)
    seen: list[int] = []
    flying: list[Credit] = []
    while not outbox.is_empty:
        while (pair := outbox.next_message()) is not None:
            message, credit = pair
            assert credit.nbytes == (0 if isinstance(message, Pull) else message.arrays.nbytes)
            flying.append(credit)
            seen += message.runs.tolist()
            if not isinstance(message, Pull):
                _check_values(message, runs)
            assert outbox.flying_bytes <= window or len([one for one in flying if one.nbytes]) == 1
        if flying:
            outbox.release(flying.pop(0))
    for credit in flying:
        outbox.release(credit)
    assert outbox.flying_bytes == 0
    assert sorted(seen) == list(range(len(runs)))


def _check_values(message: Push | InitValues | ReplaceValues, runs: list[Run]) -> None:
    for number, array in zip(message.runs.tolist(), views(message.arrays), strict=True):
        flags = runs[number].flags
        expected = 0 if flags is not None and flags[0] & Flag.EMPTY else runs[number].plan.counts[0]
        assert len(array) == expected and (array == number).all()
