"""One push for a host: what is summed, what leaves together, and what a server reads of it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.round import UNANSWERED, Contribution, Setting
from kvdist.core.server.decoding import as_push, parts_of_sum
from kvdist.core.traffic import Traffic
from kvdist.core.worker import transfers as worker_transfers
from kvdist.core.worker.host_aggregation import HostAggregation, HostRound, HostRounds
from kvdist.core.worker.requests import Run, RunKind, RunPart, RunPlan, Transfer
from kvdist.core.worker.transfers import Transfers
from kvdist.dtypes import DType
from kvdist.nodes import Member, worker
from kvdist.protocol.arrays import offsets, views
from kvdist.protocol.messages import Contributor, Flag, JoinedPush
from tests.cases import each

OPEN: Setting = (None, None, None)
MEMBERS = {rank: Member(worker(rank), 10 + rank) for rank in range(4)}


def own_run(number: int, size: int, dtype: DType, server: int = 0, priority: int = 0) -> Run:
    """The run of worker 1, with this slice behind another."""
    ids, dtypes, counts = np.array([99, number], np.uint32), np.full(2, dtype, np.uint8), np.array([1, size], np.uint32)
    nbytes = offsets(dtypes, counts)[1]
    plan = RunPlan(server, ids, counts, dtypes, (), nbytes, {99: 0, number: 1}, np.zeros(2, np.intp))
    run = Run(plan)
    run.begin(70, Transfer(5, RunKind.PUSH, "push", [run], priority), ids, ids)
    return run


def host_round(number: int, values: dict[int, list[float] | None], dtype: DType = DType.FLOAT32) -> HostRound:
    """A full round of worker 1's host; None is an empty contribution."""
    made = HostRound(number, 0.0)
    for rank, value in values.items():
        array, flags = np.array(value or [], dtype.storage), int(Flag.EMPTY) if value is None else 0
        run = 70 if rank == 1 else 90 + rank
        made.shares[rank] = Contribution(MEMBERS[rank], run, 2 + rank, 7 - rank, rank, flags, OPEN, array)
    return made


def summed(made: HostRound, size: int, dtype: DType = DType.FLOAT32, server: int = 0, priority: int = 0) -> Run:
    """The sum of a round, as the leader sends it."""
    leader = HostAggregation("on", Limits())
    leader.attach(Transfers(Limits(), Traffic()))
    return leader._summed(made, own_run(made.number, size, dtype, server, priority))


def messages(runs: Sequence[Run], near: bool = False) -> list[JoinedPush]:
    """What leaves for server 0."""
    transfers = Transfers(Limits(), Traffic())
    transfers.add_server(0, near)
    for run in runs:
        transfers.send_directly(RunPart(run))
    found = [message for _, message, _ in transfers.pop_messages()]
    assert all(isinstance(message, JoinedPush) for message in found)
    transfers.validate()
    return [message for message in found if isinstance(message, JoinedPush)]


def elements(message: JoinedPush) -> list[list[float]]:
    return [array.tolist() for array in views(message.arrays)]


def joined(made: HostRound, size: int, dtype: DType = DType.FLOAT32) -> tuple[list[int], list[tuple[int, int]]]:
    """The ranks in the sum of a round, and (rank, run) of those that push by themselves."""
    rounds = HostRounds(MEMBERS[1], MEMBERS, 5.0)
    rounds.hand_back_apart(made, own_run(made.number, size, dtype).plan)
    apart = [(member.node.rank, run) for member, slices in rounds.back.items() for run, _ in slices]
    return sorted(made.shares), sorted(apart)


def test_the_first_contributor_is_the_lowest_rank_with_a_gradient() -> None:
    (message,) = messages([summed(host_round(7, {3: [1, 2, 3], 1: None, 2: [10, 20, 30]}), 3)])
    assert message.contributors == (Contributor(2, 12, 4, 2), Contributor(3, 13, 5, 3), Contributor(1, 11, 3, 1))
    assert elements(message) == [[11, 22, 33]] and message.arrays.nbytes == 16
    assert (message.ids.tolist(), message.runs.tolist(), message.versions.tolist()) == ([7], [70], [4])
    assert message.flags.tolist() == [0] and np.isnan(message.settings[0]).all() and not message.pull


def test_a_round_without_any_gradient_has_no_bytes() -> None:
    (message,) = messages([summed(host_round(7, {1: None, 2: None}), 3)])
    assert elements(message) == [[]] and message.flags.tolist() == [int(Flag.EMPTY)] and not message.arrays.nbytes
    assert [one.rank for one in message.contributors] == [1, 2]


@each("dtype", [DType.INT8, DType.UINT8, DType.INT64, DType.FLOAT64])
def test_a_sum_is_of_the_type_of_its_key(dtype: DType) -> None:
    (message,) = messages([summed(host_round(7, {1: [100] * 3, 2: [100] * 3}, dtype), 3, dtype)])
    wanted = np.array([100], dtype.storage) + np.array([100], dtype.storage)
    assert elements(message) == [wanted.tolist() * 3] and message.arrays.dtypes.tolist() == [dtype]


def test_a_value_is_wanted_if_any_worker_wants_it() -> None:
    made = host_round(7, {1: [1], 2: [2]})
    made.shares[2].pull = True
    (message,) = messages([summed(made, 1)])
    assert message.pull


def test_what_differs_is_handed_back() -> None:
    made = host_round(7, {1: [1], 2: [2], 3: [4]})
    made.shares[2].setting = (0.25, None, 1.0)
    assert joined(made, 1) == ([1, 3], [(2, 92)])
    made = host_round(7, {1: [1], 2: [2], 3: [4]})
    made.shares[3].flags = int(Flag.AVERAGE)
    assert joined(made, 1) == ([1, 2], [(3, 93)])
    assert joined(host_round(7, {1: [1], 2: [2, 3], 3: [4]}), 1) == ([1, 3], [(2, 92)])


def test_means_over_other_numbers_of_samples_are_handed_back_but_empty_ones_are_not() -> None:
    made = host_round(7, {0: None, 1: [1], 2: [2], 3: [4]})
    for share, samples in zip(made.shares.values(), (9, 8, 7, 8), strict=True):
        share.flags |= int(Flag.WEIGHTED)
        share.samples = samples
    assert joined(made, 1) == ([0, 1, 3], [(2, 92)])
    made.shares[0].flags = int(Flag.EMPTY)
    assert joined(made, 1) == ([1, 3], [(0, 90)])


def test_where_the_leader_has_nobody_to_sum_with_all_is_handed_back() -> None:
    made = host_round(7, {1: [1], 2: [2]})
    made.shares[2].setting = (0.25, None, 1.0)
    assert joined(made, 1) == ([], [(1, 70), (2, 92)])


def test_small_slices_with_the_same_pushes_travel_together_and_large_ones_apart() -> None:
    large = [1.0] * 16384
    runs = [summed(host_round(number, {1: [1], 2: [1]}), 1) for number in (1, 3)]
    runs += [summed(host_round(2, {1: large, 2: large}), 16384), summed(host_round(4, {1: [1], 3: [1]}), 1)]
    assert sorted(message.ids.tolist() for message in messages(runs)) == [[1, 3], [2], [4]]


def test_sums_leave_by_priority_and_share_the_settings_that_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    made = [host_round(number, {1: [1], 2: [1]}) for number in range(4)]
    for number, one in enumerate(made):
        for share in one.shares.values():
            share.setting = (float(number // 2), 0.0, 1.0)
    found = messages([summed(one, 1, priority=number == 2) for number, one in enumerate(made)])
    assert [message.ids.tolist() for message in found] == [[2, 0, 1, 3]]
    assert found[0].setting_of.tolist() == [0, 1, 2, 0]
    monkeypatch.setattr(worker_transfers, "SETTINGS_PER_MESSAGE_MAX", 1)
    assert len(messages([summed(host_round(number, {1: [1], 2: [1]}), 1) for number in range(3)])) == 3


def test_a_server_reads_a_contribution_of_each_worker_and_answers_only_the_sender() -> None:
    (message,) = messages([summed(host_round(1, {1: None, 2: [1, 2], 3: [3, 4]}), 2)])
    push = as_push(message)
    assert (push.runs.tolist(), push.ids.tolist(), elements(message)) == ([70], [1], [[4, 6]])
    array = views(push.arrays)[0]
    parts = parts_of_sum(Contribution(MEMBERS[1], 70, 0, 5, 0, 0, OPEN, array, True), message.contributors)
    told = [(one.member, one.run, one.step, one.samples, one.is_empty, one.summed_with) for one in parts]
    assert told == [
        (MEMBERS[2], UNANSWERED, 4, 2, False, (2, 3, 1)),
        (MEMBERS[3], UNANSWERED, 5, 3, True, (2, 3, 1)),
        (MEMBERS[1], 70, 3, 1, True, (2, 3, 1)),
    ]
    assert parts[0].values is array and not parts[1].values.size and all(one.pull for one in parts)
