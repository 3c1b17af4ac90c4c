"""The parts of which pushes and pulls of rows are made, without a cluster: buffers, runs, futures, checked values."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from kvdist.config.settings import Limits
from kvdist.core.sharding import slices_of
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import KeyInfo, RunKind, Transfer
from kvdist.dtypes import DType
from kvdist.kvstore import keys, sparse
from kvdist.kvstore.backend import PushOptions, combined
from kvdist.kvstore.placement import Devices
from kvdist.kvstore.rowsparse import RowSparse
from kvdist.kvstore.sparse import BUFFER_UNIT_BYTES, BUFFERS_KEPT_MAX, PUSHED_BYTES_MAX, RowStaging, RowTransfers
from kvdist.protocol.messages import ROWS, Flag, Placement
from kvdist.runtime.waits import UnderWay
from kvdist.transport.shared_memory.allocator import HeapAllocator
from tests.cases import each


def info_of(shape: tuple[int, ...] = (10, 3), dtype: DType = DType.FLOAT32, servers: int = 2) -> KeyInfo:
    slices = slices_of(shape, dtype.itemsize, ROWS, Placement.CUT, servers, 0, 64)
    return KeyInfo("t", shape, dtype, tuple(slices), form=ROWS)


class Recorder:
    """Stands for a cluster and for `ArrayTransfers`: keeps what is submitted, and finishes it when told."""

    def __init__(self) -> None:
        self.memory, self.traffic, self.optimizer = HeapAllocator(), Traffic(), None
        self.node = self.view = self
        self.far, self.must_update = False, False
        self.config = SimpleNamespace(limits=Limits())
        self.transfers: list[Transfer] = []
        self.finishes: list[Any] = []
        self.under_way = UnderWay(1 << 30)

    def check(self) -> None:
        """Pushes can be made."""

    def shares_memory(self, rank: int) -> bool:
        return rank == 1

    def is_far(self, rank: int) -> bool:
        return self.far

    def submit(self, make: Any, finish: Any) -> Future[Any]:
        self.transfers.append(make(len(self.transfers)))
        self.finishes.append(finish)
        return Future()

    def ask(self, make: Any) -> None:
        self.transfers.append(make(len(self.transfers)))


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def moves(recorder: Recorder) -> RowTransfers:
    return RowTransfers(recorder, recorder)  # type: ignore[arg-type]


def sent(transfer: Transfer) -> list[tuple[int, list[int], list[float]]]:
    """Of each run and message: the server, the ids, and the first elements of the rows."""
    found = []
    for run in transfer.runs:
        for chunk in run.chunks:
            ids = np.frombuffer(chunk.payload[: 8 * chunk.rows], np.int64)
            values = np.frombuffer(chunk.payload[8 * chunk.rows :], np.float32)[: chunk.rows * run.row_length]
            assert len(chunk.payload) % 8 == 0
            found.append((run.plan.server, ids.tolist(), values[:: run.row_length].tolist()))
    return found


TERMS = PushOptions(False, 0)
HERE = Devices("host", insists=False)


# Buffers.


def test_a_buffer_is_used_again_by_what_nearly_fills_it() -> None:
    buffers = RowStaging(HeapAllocator())
    small, large = buffers.take(100), buffers.take(3 << 20)
    assert len(small) == BUFFER_UNIT_BYTES and len(large) == 3 << 20
    buffers.give_back([small, large])
    assert buffers.take(200 << 10) is not large, "much too large"
    assert buffers.take(1 << 20) is large
    assert buffers.take(0) is small
    assert buffers.take(0) is not small


def test_only_the_newest_buffers_are_kept() -> None:
    buffers = RowStaging(HeapAllocator())
    taken = [buffers.take(1) for _ in range(BUFFERS_KEPT_MAX + 3)]
    buffers.give_back(taken)
    again = [buffers.take(1) for _ in range(BUFFERS_KEPT_MAX + 3)]
    kept = [one for one in again if any(one is before for before in taken)]
    assert len(kept) == BUFFERS_KEPT_MAX and kept[0] is taken[3]


def test_no_two_threads_have_the_same_buffer() -> None:
    buffers = RowStaging(HeapAllocator())
    start = threading.Barrier(4)

    def work(mark: int) -> None:
        start.wait()
        for _ in range(300):
            mine = [buffers.take(64) for _ in range(3)]
            for one in mine:
                one[:64] = mark
            assert all((one[:64] == mark).all() for one in mine)
            buffers.give_back(mine)

    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(work, mark) for mark in range(4)]:
            future.result()


# Runs.


def test_every_server_gets_its_rows_and_an_empty_part_where_it_has_none(
    recorder: Recorder, moves: RowTransfers
) -> None:
    info = info_of()
    moves.push(info, (np.array([0, 4, 9]), np.arange(9, dtype=np.float32).reshape(3, 3)), 0, TERMS)
    moves.push(info, (np.array([7]), np.ones((1, 3), np.float32)), 0, TERMS)
    moves.push(info, None, 0, PushOptions(True, 5))
    first, second, third = recorder.transfers
    assert sent(first) == [(0, [0, 4], [0, 3]), (1, [9], [6])]
    assert sent(second) == [(0, [], []), (1, [7], [1])]
    assert sent(third) == [(0, [], []), (1, [], [])]
    assert [run.stays for run in first.runs] == [False, True]
    flags = [int(run.flags[0]) for one in (second, third) for run in one.runs]  # type: ignore[index]
    assert flags == [0, 0, Flag.EMPTY | Flag.AVERAGE, Flag.EMPTY | Flag.AVERAGE]
    assert {run.samples for run in third.runs} == {5} and third.kind is RunKind.PUSH


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.UINT8, DType.FLOAT64])
def test_what_stands_behind_the_values_is_zero_although_memory_is_used_again(
    recorder: Recorder, moves: RowTransfers, dtype: DType
) -> None:
    info = info_of(dtype=dtype, servers=1)
    for turn in range(2):
        moves.push(info, (np.arange(5), np.full((5, 3), 255 - turn, dtype.storage)), 0, TERMS)
        (run,) = recorder.transfers[-1].runs
        payload = run.chunks[0].payload
        nbytes = 40 + 15 * dtype.itemsize
        assert len(payload) == -(-nbytes // 8) * 8 and not any(payload[nbytes:])
        recorder.finishes[-1]()


@pytest.mark.parametrize("is_far", [False, True])
def test_many_rows_travel_in_several_messages_in_order(
    recorder: Recorder, moves: RowTransfers, monkeypatch: pytest.MonkeyPatch, is_far: bool
) -> None:
    recorder.far = is_far
    if is_far:
        recorder.config = SimpleNamespace(limits=Limits(slice_bytes=45))  # two rows of 8 + 12 bytes
    for limit in () if is_far else ("PUSHED_BYTES_MAX", "MESSAGE_BYTES_MAX"):
        monkeypatch.setattr(sparse, limit, 45)
    info = info_of()
    ids = np.array([0, 1, 2, 4, 5, 6, 7, 8])
    moves.push(info, (ids, np.repeat(ids, 3).reshape(8, 3).astype(np.float32)), 0, TERMS)
    assert sent(recorder.transfers[0]) == [
        (0, [0, 1], [0, 1]),
        (0, [2, 4], [2, 4]),
        (1, [5, 6], [5, 6]),
        (1, [7, 8], [7, 8]),
    ]
    assert [len(run.chunks) for run in recorder.transfers[0].runs] == [2, 2]
    out = np.zeros(24, np.float32)
    moves.pull(info, ids, out, 0)
    runs = recorder.transfers[1].runs
    assert [np.frombuffer(run.chunks[0].payload, np.int64).tolist() for run in runs] == [[0, 1], [2, 4], [5, 6], [7, 8]]
    for number, run in enumerate(runs):
        run.sinks[0][...] = number
    assert out.tolist() == [0] * 6 + [1] * 6 + [2] * 6 + [3] * 6


def test_rows_of_the_largest_size_travel(recorder: Recorder, moves: RowTransfers) -> None:
    info = info_of((7, keys.ROW_BYTES_MAX), DType.UINT8, 1)
    moves.push(info, (np.arange(7), np.ones((7, keys.ROW_BYTES_MAX), np.uint8)), 0, TERMS)
    (run,) = recorder.transfers[0].runs
    assert [chunk.rows for chunk in run.chunks] == [6, 1]
    assert all(len(chunk.payload) <= PUSHED_BYTES_MAX for chunk in run.chunks)


def test_a_pull_asks_only_the_servers_that_have_some_of_the_rows(recorder: Recorder, moves: RowTransfers) -> None:
    moves.pull(info_of(servers=3), np.array([0, 9]), np.zeros(6, np.float32), 4)
    moves.pull(info_of(), np.zeros(0, np.int64), np.zeros(0, np.float32), 0)
    assert [run.plan.server for run in recorder.transfers[0].runs] == [0, 2]
    assert recorder.transfers[0].priority == 4 and not recorder.transfers[1].runs


def test_memory_is_not_used_again_before_its_push_is_counted(recorder: Recorder, moves: RowTransfers) -> None:
    info, ids = info_of(), np.arange(10)
    for value in (1, 2, 3):
        moves.push(info, (ids, np.full((10, 3), value, np.float32)), 0, TERMS)
    recorder.finishes[1]()  # the first fails and is never finished
    moves.push(info, (ids, np.full((10, 3), 4, np.float32)), 0, TERMS)
    shown = [sent(transfer)[0][2][0] for transfer in recorder.transfers]
    assert shown == [1, 4, 3, 4]


def test_first_values_that_could_not_be_given_keep_their_memory(recorder: Recorder, moves: RowTransfers) -> None:
    rows = (np.arange(10), np.ones((10, 3), np.float32))

    def fail(make: Any) -> None:
        Recorder.ask(recorder, make)
        raise ConnectionError

    recorder.ask = fail  # type: ignore[method-assign]
    with pytest.raises(ConnectionError):
        moves.give(info_of(), rows)
    moves.push(info_of(), (np.arange(10), np.full((10, 3), 7, np.float32)), 0, TERMS)
    assert sent(recorder.transfers[0])[0][2] == [1] * 5


# Futures.


def test_one_future_stands_for_several_and_its_result_is_made_once() -> None:
    parts: list[Future[Any]] = [Future(), Future()]
    made: list[int] = []
    whole = combined(parts, lambda: made.append(1) or "done")
    parts[1].set_result(None)
    assert not whole.done() and not made
    parts[0].set_result(None)
    assert whole.result() == "done" and made == [1]


def test_the_first_error_of_several_is_told_when_all_are_done_and_nothing_is_made() -> None:
    parts: list[Future[Any]] = [Future(), Future(), Future()]
    whole = combined(parts, lambda: pytest.fail("nothing is made"))
    parts[2].set_exception(KeyError("late"))
    parts[1].set_exception(ValueError("early"))
    assert not whole.done()
    parts[0].set_result(None)
    with pytest.raises(ValueError, match="early"):
        whole.result()


def test_of_no_futures_the_result_is_there_and_an_error_in_making_it_too() -> None:
    assert combined([], lambda: 5).result() == 5
    with pytest.raises(ZeroDivisionError):
        combined([], lambda: 1 // 0).result()
    assert not combined([Future()]).cancel(), "parts are under way"


def test_one_future_for_many_that_several_threads_resolve() -> None:
    for _ in range(50):
        parts: list[Future[Any]] = [Future() for _ in range(8)]
        made: list[int] = []
        whole = combined(parts, lambda made=made: made.append(1))
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda part: part.set_result(None), parts))
        assert whole.done() and made == [1]


# What is handed in.


def test_gradients_of_devices_are_summed_in_order_and_none_is_none() -> None:
    info = info_of((4, 2), servers=1)
    one = RowSparse([3, 1, 3], np.array([[1, 1], [2, 2], [4, 4]], np.float32), (4, 2))
    found = keys.gradient(info, [one, np.ones((4, 2), np.float32)], HERE)
    assert found is not None
    assert found[0].tolist() == [0, 1, 2, 3] and found[1][:, 0].tolist() == [1, 3, 1, 6]
    alone = keys.gradient(info, [one], HERE)
    assert alone is not None and alone[0].tolist() == [1, 3] and alone[1][:, 1].tolist() == [2, 5]
    assert keys.gradient(info, [], HERE) is None
    nothing = keys.gradient(info, [RowSparse.zeros((4, 2))], HERE)
    assert nothing is not None and len(nothing[0]) == 0 and nothing[1].shape == (0, 2)


def test_halves_of_devices_are_summed_in_float32() -> None:
    info = info_of((2, 1), DType.FLOAT16, 1)
    parts = [RowSparse([0], np.array([[value]], np.float16), (2, 1)) for value in (2048, 1, 1)]
    found = keys.gradient(info, parts, HERE)
    assert found is not None and found[1].tolist() == [[2050]]


@each(
    "ids",
    [
        [[3, 1], [3, 0]],
        np.array([[3, 1], [3, 0]], np.uint8),
        torch.tensor([[3, 1], [3, 0]], dtype=torch.int32),
        np.array([[3, 1], [3, 0]], ">i8"),
    ],
)
def test_wanted_rows_are_each_named_once_in_order(ids: Any) -> None:
    found = keys.wanted(info_of(servers=1), ids)
    assert found.dtype == np.int64 and found.tolist() == [0, 1, 3]


def test_no_rows_may_be_wanted_in_any_shape() -> None:
    assert keys.wanted(info_of(), np.zeros((3, 0), np.int64)).tolist() == []


def test_ids_that_are_in_order_already_are_a_copy_of_the_callers() -> None:
    ids = np.array([1, 4, 6])
    found = keys.wanted(info_of(servers=1), ids)
    assert found.tolist() == [1, 4, 6] and not np.shares_memory(found, ids)


@each(
    "ids, error, words",
    [
        ([10], ValueError, "has rows 0 to 9, and row 10 was asked for"),
        (np.array([1 << 63], np.uint64), ValueError, f"and row {1 << 63} was asked for"),
        ([-1, 3], ValueError, "and row -1 was asked for"),
        ([True], TypeError, "row ids must be integers, not bool"),
        (["1"], TypeError, "row ids must be integers"),
        (torch.tensor([1.5]), TypeError, "row ids must be integers, not float32"),
    ],
)
def test_wanted_rows_that_are_none_are_refused(ids: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        keys.wanted(info_of(), ids)


def test_a_table_without_rows_has_none_to_want() -> None:
    with pytest.raises(ValueError, match="row 0 was asked for"):
        keys.wanted(info_of((0, 3), servers=1), [0])
