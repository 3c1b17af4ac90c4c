"""One push for a host: which rows carry a sum, what leaves together, and what a server reads of it."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.core import host_aggregation
from kvdist.core.host_aggregation import HostRound, PushJoiner, Share
from kvdist.core.round import Setting
from kvdist.core.server.buffers import ordinary_memory
from kvdist.core.server.decoding import joined_slices
from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import Run, RunKind, RunPlan, Transfer
from kvdist.core.worker.transfers import Ready
from kvdist.dtypes import DType
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Member, worker
from kvdist.protocol.arrays import views
from kvdist.protocol.messages import Flag
from tests.cases import each

OPEN: Setting = (None, None, None)
MEMBERS = {rank: Member(worker(rank), 10 + rank) for rank in range(4)}


def joiner(join_bytes_max: int = 1 << 20, payload_bytes_max: int = 1 << 26) -> PushJoiner:
    return PushJoiner(MEMBERS[1], REFERENCE, ordinary_memory, join_bytes_max, payload_bytes_max, Traffic())


def own_run(server: int = 0, priority: int = 0) -> Run:
    ids = np.zeros(1, np.uint32)
    plan = RunPlan(server, ids, ids, np.zeros(1, np.uint8), (), 0, {0: 0}, np.zeros(1, np.intp))
    run = Run(plan)
    run.begin(70, Transfer(5, RunKind.PUSH, "push", [run], priority), ids, ids)
    return run


def host_round(
    number: int,
    values: dict[int, list[float] | None],
    pull: int | None = None,
    own: Run | None = None,
    **change: object,
) -> HostRound:
    """A full round of worker 1's host; None is an empty contribution."""
    settings = change.get("settings", {})
    dtype = change.get("dtype", DType.FLOAT32)
    assert isinstance(settings, dict) and isinstance(dtype, DType)
    made = HostRound(number, 0.0)
    for rank, value in values.items():
        array = np.array(value or [], dtype.storage)
        flags = int(Flag.EMPTY) if value is None else 0
        mine = (own or own_run()) if rank == 1 else None
        made.shares[rank] = Share(
            MEMBERS[rank], 70 if rank == 1 else 90 + rank, 2, 2, rank, flags, settings.get(rank, OPEN), dtype, array,
            rank == pull, mine,
        )  # fmt: skip
    return made


def rows(ready: Ready) -> list[tuple[int, int, int, list[float]]]:
    """(slice, rank, flags, elements) of each row."""
    message = ready.message
    arrays = [array.tolist() for array in views(message.arrays)]
    return list(zip(message.ids.tolist(), message.ranks.tolist(), message.flags.tolist(), arrays, strict=True))


def test_rows_stand_by_rank_and_the_first_with_a_gradient_has_the_sum() -> None:
    (ready,) = joiner().join([host_round(7, {3: [1, 2, 3], 1: None, 2: [10, 20, 30]})])
    assert rows(ready) == [(7, 1, 1, []), (7, 2, 0, [11, 22, 33]), (7, 3, 16, [])]
    assert ready.message.runs.tolist() == [70] * 3 and ready.message.samples.tolist() == [1, 2, 3]
    assert set(ready.members) == {MEMBERS[1], MEMBERS[2], MEMBERS[3]} and ready.nbytes == 16


def test_a_round_without_any_gradient_has_no_bytes() -> None:
    (ready,) = joiner().join([host_round(7, {1: None, 2: None})])
    assert rows(ready) == [(7, 1, 1, []), (7, 2, 1, [])] and ready.nbytes == 0


def test_what_differs_in_settings_is_not_summed() -> None:
    settings = {1: (0.5, None, 1.0), 2: (0.25, None, 1.0), 3: (0.5, None, 1.0)}
    (ready,) = joiner().join([host_round(7, {1: [1], 2: [2], 3: [4]}, settings=settings)])
    assert rows(ready) == [(7, 1, 0, [5]), (7, 2, 0, [2]), (7, 3, 16, [])]
    assert ready.message.setting_of.tolist() == [0, 1, 0]
    assert ready.message.settings[1][0] == 0.25 and np.isnan(ready.message.settings[1][1])


@each("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_halves_have_a_row_with_bytes_each(dtype: DType) -> None:
    (ready,) = joiner().join([host_round(7, {1: [1], 2: [2]}, dtype=dtype)])
    assert rows(ready) == [(7, 1, 0, [1]), (7, 2, 0, [2])]


@each("dtype", [DType.INT8, DType.UINT8, DType.INT64, DType.FLOAT64])
def test_everything_else_is_summed_in_its_own_type(dtype: DType) -> None:
    (ready,) = joiner().join([host_round(7, {1: [100] * 3, 2: [100] * 3}, dtype=dtype)])
    wanted = np.array([100], dtype.storage) + np.array([100], dtype.storage)
    assert rows(ready)[0][3] == wanted.tolist() * 3


def test_small_slices_travel_together_and_large_ones_alone() -> None:
    large = [1.0] * 16384
    rounds = [host_round(1, {1: [1], 2: [1]}), host_round(2, {1: large, 2: large}), host_round(3, {1: [1], 2: [1]})]
    assert [sorted({row[0] for row in rows(ready)}) for ready in joiner().join(rounds)] == [[2], [1, 3]]


def test_small_slices_leave_when_there_are_enough_bytes_of_them() -> None:
    rounds = [host_round(number, {1: [1, 2], 2: [1, 2]}) for number in range(5)]
    assert [len(rows(ready)) for ready in joiner(join_bytes_max=16).join(rounds)] == [4, 4, 2]


def test_small_slices_leave_when_there_are_enough_rows_or_settings_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [{1: (float(number), 0.0, 1.0), 2: (float(number), 1.0, 1.0)} for number in range(300)]
    rounds = [host_round(number, {1: [1], 2: [1]}, settings=settings[number]) for number in range(300)]
    messages = [ready.message for ready in joiner().join(rounds)]
    assert [len(message.settings) for message in messages] == [256, 256, 88]
    monkeypatch.setattr(host_aggregation, "ROWS_PER_MESSAGE_MAX", 5)
    few = joiner().join([host_round(number, {1: [1], 2: [1]}) for number in range(5)])
    assert [len(ready.message.ids) for ready in few] == [4, 4, 2]


def test_servers_priorities_and_who_wants_values_part_messages() -> None:
    rounds = [
        host_round(1, {1: [1], 2: [1]}, pull=2),
        host_round(2, {1: [1], 2: [1]}, own=own_run(server=1)),
        host_round(3, {1: [1], 2: [1]}, own=own_run(priority=4)),
        host_round(4, {1: [1], 2: [1]}, pull=1),
    ]
    found = set()
    for one in joiner().join(rounds):
        slices = tuple(sorted({row[0] for row in rows(one)}))
        found.add((one.server, one.priority, one.message.pull, slices))
    assert found == {(0, 0, True, (1, 4)), (1, 0, False, (2,)), (0, 4, False, (3,))}


def test_a_slice_fits_if_what_cannot_be_summed_fits() -> None:
    summed = host_round(1, {rank: [1, 2, 3, 4] for rank in range(4)})
    apart = host_round(1, {rank: [1, 2, 3, 4, 5, 6, 7, 8] for rank in range(4)}, dtype=DType.FLOAT16)
    assert joiner(payload_bytes_max=16).fits(summed)
    assert joiner(payload_bytes_max=64).fits(apart) and not joiner(payload_bytes_max=63).fits(apart)


def test_a_server_reads_the_contributions_of_each_slice_and_answers_only_the_sender() -> None:
    rounds = [host_round(1, {1: [1, 2], 2: [3, 4]}), host_round(2, {1: None, 3: [5, 6]})]
    (ready,) = joiner().join(rounds)
    first, second = joined_slices(MEMBERS[1], ready.message, MEMBERS)
    assert (first.number, first.run, second.number) == (1, 70, 2)
    told = [(one.member, one.silent, one.is_empty, one.samples) for one in first.contributions]
    assert told == [(MEMBERS[1], False, False, 1), (MEMBERS[2], True, True, 2)]
    assert first.contributions[0].values.tolist() == [4, 6]
    assert second.counts == [2] and second.dtypes == [DType.FLOAT32] and not second.strangers


def test_a_server_hears_for_whom_the_sender_may_not_speak() -> None:
    (ready,) = joiner().join([host_round(1, {1: [1], 2: [2]})])
    (only,) = joined_slices(MEMBERS[1], ready.message, {1: MEMBERS[1]})
    assert only.strangers == [2]
