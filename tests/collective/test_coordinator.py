"""Rank 0's decisions, with literal times and no threads."""

import pytest

from kvdist.collective.coordinator import STEADY, Coordinator, named
from kvdist.collective.signature import JOIN_SIGNATURE, REFUSED, Signature
from kvdist.errors import ProtocolError
from kvdist.protocol.collective import (
    WHOLE_JOB,
    Agreed,
    AllConnected,
    AllJoined,
    CallReport,
    DefineOperation,
    Farewell,
    GroupFailed,
    GroupMembers,
    LastCalls,
    Mismatch,
    OperationFailed,
    Participate,
    RankBye,
    RankGone,
    RankHello,
    RankLeaving,
    RankWaits,
    Reorder,
    StallWarning,
    Throttle,
)
from tests.cases import each

SUM = Signature("allreduce", "a", ("float32[3]",), "Sum")
LONGER = Signature("allreduce", "a", ("float32[4]",), "Sum")
GATHER = Signature("allgather", "", ("float32[*]",))
BARRIER = Signature("barrier", "", ())


def came(size, **options):
    """A coordinator to whom all ranks have come, rank r from host h<r>."""
    made = Coordinator(size, **options)
    for rank in range(size):
        answers = made.hear(rank, RankHello("t", rank, size, f"h{rank}", f"m{rank}", "1"), 0.0)
    hosts, machines = (tuple(f"{letter}{rank}" for rank in range(size)) for letter in "hm")
    assert answers == [(rank, AllConnected(hosts, machines)) for rank in range(size)]
    return made


class Caller:
    """A rank that calls operations."""

    def __init__(self, coordinator, rank, group=0):
        self.coordinator, self.rank, self.group, self.called = coordinator, rank, group, 0

    def call(self, *signatures, waits=True, done=0, now=1.0):
        for signature in signatures:
            self.coordinator.hear(self.rank, DefineOperation(*vars_of(signature)), now)
        entries = b"".join(bytes([waits]) + signature.digest for signature in signatures)
        answers = self.coordinator.hear(self.rank, CallReport(self.group, self.called, done, entries), now)
        self.called += len(signatures)
        return answers


def vars_of(signature):
    return signature.kind, signature.name, signature.tensors, signature.detail, signature.device


def callers(size, **options):
    coordinator = came(size, **options)
    return coordinator, [Caller(coordinator, rank) for rank in range(size)]


# The beginning.


def test_until_all_have_come_the_missing_are_known():
    coordinator = Coordinator(3)
    coordinator.hear(1, RankHello("t", 1, 3, "h1", "m1", "1"), 0.0)
    assert coordinator.missing == [0, 2]
    assert coordinator.tick(100.0) == []


@each(
    "hello",
    [RankHello("t", 1, 3, "h", "m", "1"), RankHello("t", 5, 3, "h", "m", "1"), RankHello("t", 0, 4, "h", "m", "1")],
)
def test_who_comes_twice_or_belongs_elsewhere_is_refused(hello):
    coordinator = Coordinator(3)
    coordinator.hear(1, RankHello("t", 1, 3, "h1", "m1", "1"), 0.0)
    with pytest.raises(ProtocolError):
        coordinator.hear(hello.rank, hello, 0.0)
    assert coordinator.missing == [0, 2]


# Agreement.


def test_who_waits_is_told_when_the_last_rank_has_called_the_same():
    _, (first, second, third) = callers(3)
    assert first.call(SUM) == []
    assert second.call(SUM, waits=False) == []
    assert third.call(SUM) == [(0, Agreed(0, 1)), (2, Agreed(0, 1))]


def test_nobody_is_told_anything_when_nobody_waits():
    _, (first, second) = callers(2)
    assert first.call(SUM, GATHER, waits=False) == []
    assert second.call(SUM, GATHER, SUM, waits=False) == []


def test_agreement_runs_ahead_of_the_work_by_many_operations():
    _, (first, second) = callers(2)
    first.call(*[SUM, GATHER] * 50)
    assert second.call(*[SUM, GATHER] * 50) == [(0, Agreed(0, 100)), (1, Agreed(0, 100))]


def test_a_difference_is_told_to_all_with_who_called_what_and_the_group_goes_on():
    _, (first, second, third) = callers(3)
    first.call(SUM)
    second.call(LONGER)
    answers = third.call(LONGER)
    text = (
        "ranks called different operations as operation 0: rank 0 allreduce 'a' of float32[3] (Sum), ranks 1 and 2"
        " allreduce 'a' of float32[4] (Sum); call them in the same order on all ranks"
    )
    assert answers == [(rank, Mismatch(0, 0, False, text)) for rank in range(3)]
    first.call(SUM)
    second.call(SUM)
    assert third.call(SUM) == [(rank, Agreed(0, 2)) for rank in range(3)]


def test_what_was_agreed_on_before_a_difference_is_told_before_it():
    _, (first, second) = callers(2)
    first.call(GATHER, SUM)
    answers = second.call(GATHER, LONGER)
    assert [type(message) for _, message in answers] == [Agreed, Agreed, Mismatch, Mismatch]
    assert answers[0] == (0, Agreed(0, 1))


OTHER = Signature("allreduce", "b", ("float32[3]",), "Sum")


def test_named_operations_in_another_order_are_done_in_one_and_who_called_them_later_is_told_which():
    _, (first, second) = callers(2)
    first.call(SUM, OTHER)
    throttled = [(rank, Throttle(0, True)) for rank in range(2)]
    assert second.call(OTHER) == [(0, Reorder(0, 0, 1)), (1, Agreed(0, 1)), *throttled]
    assert second.call(SUM) == [(0, Agreed(0, 2)), (1, Agreed(0, 2))]


def test_who_has_begun_a_named_operation_sets_the_order():
    _, (first, second, third) = callers(3)
    first.call(OTHER, SUM)
    second.call(SUM, OTHER, waits=False)
    answers = third.call(OTHER, SUM)
    assert answers[:4] == [(0, Reorder(0, 0, 1)), (2, Reorder(0, 0, 1)), (0, Agreed(0, 2)), (2, Agreed(0, 2))]


def test_unnamed_operations_pair_by_their_order_past_named_ones():
    _, (first, second) = callers(2)
    first.call(SUM, GATHER, BARRIER)
    assert second.call(GATHER)[0] == (0, Reorder(0, 0, 1))
    assert second.call(BARRIER)[0] == (0, Reorder(0, 1, 2))
    assert second.call(SUM)[-2:] == [(0, Agreed(0, 3)), (1, Agreed(0, 3))]


def test_ranks_wait_for_agreement_for_some_time_after_another_order_and_then_no_more():
    _, (first, second) = callers(2)
    first.call(SUM, OTHER)
    assert second.call(OTHER, SUM)[-1] == (1, Throttle(0, True))
    later = [GATHER] * (STEADY - 3)
    first.call(*later)
    assert second.call(*later)[-1] == (1, Agreed(0, STEADY - 1))
    first.call(GATHER)
    assert second.call(GATHER)[-2:] == [(rank, Throttle(0, False)) for rank in range(2)]


def test_any_number_of_operations_may_be_under_way_in_another_order():
    _, (first, second) = callers(2)
    many = [Signature("allreduce", f"n{i}", ("float32[3]",), "Sum") for i in range(5000)]
    assert first.call(*many) == []
    answers = second.call(*reversed(many))
    assert [m.call for rank, m in answers if isinstance(m, Reorder) and rank == 1] == list(range(4999, 0, -1))
    assert not any(isinstance(m, Mismatch) for _, m in answers)


def test_names_that_no_rank_can_share_are_refused_when_all_are_stuck():
    coordinator, (first, second) = callers(2)
    first.call(SUM)
    assert second.call(OTHER) == []
    assert coordinator.hear(0, RankWaits(0, 0), 1.0) == []
    refused = coordinator.hear(1, RankWaits(0, 0), 1.0)
    assert [rank for rank, _ in refused] == [0, 1]
    assert "rank 0 allreduce 'a' of float32[3] (Sum), rank 1 allreduce 'b' of float32[3] (Sum)" in refused[0][1].text


def test_a_wait_that_is_over_is_no_sign_of_being_stuck():
    coordinator, (first, second) = callers(2)
    first.call(SUM, OTHER)
    second.call(OTHER, SUM, LONGER)
    first.call(GATHER)
    assert coordinator.hear(0, RankWaits(0, 2), 1.0) == []
    assert coordinator.hear(1, RankWaits(0, 1), 1.0) == [], "operation 1 is agreed on"
    assert len(coordinator.hear(1, RankWaits(0, 2), 1.0)) == 2


def test_what_differs_in_more_than_its_order_is_refused_at_once_as_the_call_that_it_is():
    _, (first, second) = callers(2)
    first.call(OTHER, SUM)
    answers = second.call(LONGER)
    assert [(rank, message.call) for rank, message in answers] == [(0, 1), (1, 0)]
    assert second.call(OTHER) == [(0, Agreed(0, 2)), (1, Agreed(0, 2))]


def test_a_stall_names_who_has_not_called_that_name_however_much_it_called():
    coordinator, (first, second) = callers(2, stall_check_s=10.0)
    first.call(SUM, now=0.0)
    second.call(OTHER, GATHER, now=0.0)
    ((_, said),) = coordinator.tick(10.0)
    assert "for rank 1 (h1) to call allreduce 'a' of float32[3] (Sum)" in said.text
    assert "rank 1 called allgather of float32[*] last" in said.text


def test_a_difference_that_somebody_has_begun_already_ends_the_group():
    _, (first, second) = callers(2)
    first.call(SUM, waits=False)
    answers = second.call(LONGER)
    assert [message.is_fatal for _, message in answers] == [True, True]
    first.call(SUM)
    assert second.call(SUM) == []


def refused(signature, reason="ValueError: splits are wrong"):
    return Signature(signature.kind, signature.name, (), REFUSED + reason)


def test_a_rank_that_could_not_call_is_named_with_its_reason():
    _, (first, second) = callers(2)
    first.call(GATHER)
    answers = second.call(refused(GATHER))
    text = "rank 1 on host h1 cannot call operation 0: ValueError: splits are wrong"
    assert answers == [(rank, Mismatch(0, 0, False, text)) for rank in range(2)]


@each("order", [(0, 1), (1, 0)])
def test_a_call_that_is_refused_is_that_of_its_name_whatever_waits(order):
    _, ranks = callers(2)
    calls = [[refused(SUM), OTHER], [OTHER, SUM]]
    answers = [answer for rank in order for answer in ranks[rank].call(*calls[rank])]
    failed = [(rank, message.call, message.text) for rank, message in answers if isinstance(message, Mismatch)]
    text = "rank 0 on host h0 cannot call allreduce 'a' (operation 0): ValueError: splits are wrong"
    assert failed == [(0, 0, text), (1, 1, text)]
    for caller in ranks:
        later = caller.call(GATHER)
    assert later == [(rank, Agreed(0, 3)) for rank in range(2)]


def test_ranks_that_all_could_not_call_go_on():
    _, (first, second) = callers(2)
    first.call(refused(SUM, "ValueError: 1 row"))
    second.call(refused(SUM, "ValueError: 2 rows"))
    first.call(SUM)
    assert second.call(SUM)[-1] == (1, Agreed(0, 2))


def test_what_the_others_cannot_call_is_counted_by_who_has_joined():
    _, (first, second, third) = callers(3)
    first.call(JOIN_SIGNATURE)
    second.call(refused(SUM))
    answers = third.call(refused(SUM))
    assert [(rank, type(message)) for rank, message in answers] == [(1, Mismatch), (2, Mismatch), (0, Participate)]
    assert answers[-1] == (0, Participate(0, 0))


def test_process_sets_agree_each_for_itself():
    coordinator, everybody = callers(3)
    for rank in (0, 2):
        coordinator.hear(rank, GroupMembers(1, (0, 2)), 1.0)
    first, third = Caller(coordinator, 0, 1), Caller(coordinator, 2, 1)
    everybody[1].call(BARRIER)
    first.call(SUM)
    assert third.call(SUM) == [(0, Agreed(1, 1)), (2, Agreed(1, 1))]


@each(
    "message",
    [
        GroupMembers(1, (0, 2)),
        GroupMembers(1, (1, 7)),
        GroupMembers(1, (2, 1)),
        GroupMembers(0, (0, 1)),
        CallReport(9, 0, 0, bytes(9)),
        CallReport(0, 5, 0, bytes(9)),
        CallReport(0, 0, 0, bytes(8)),
    ],
)
def test_what_makes_no_sense_is_refused_and_changes_nothing(message):
    coordinator, (first, second, third) = callers(3)
    with pytest.raises(ProtocolError):
        coordinator.hear(1, message, 1.0)
    first.call(SUM)
    second.call(SUM)
    assert len(third.call(SUM)) == 3


# The end.


def test_a_lost_rank_is_told_to_the_others_once():
    coordinator, _ = callers(3)
    assert coordinator.lose(1, "its connection broke") == [
        (0, RankGone(1, "h1", "its connection broke")),
        (2, RankGone(1, "h1", "its connection broke")),
    ]
    assert coordinator.lose(1, "again") == []
    assert coordinator.lose(2, "of grief") == []


def test_a_rank_that_leaves_is_no_lost_one_and_its_work_counts():
    coordinator, _ = callers(2)
    assert coordinator.hear(1, RankBye("", ((0, 7),)), 1.0) == [(1, Farewell()), (0, RankGone(1, "h1", "", ((0, 7),)))]
    assert coordinator.lose(1, "its connection broke") == []


def test_a_rank_that_says_why_it_ends_is_a_lost_one():
    coordinator, _ = callers(2)
    answers = coordinator.hear(1, RankBye("ended by ValueError: no data", ()), 1.0)
    assert answers[1] == (0, RankGone(1, "h1", "ended by ValueError: no data"))


def test_an_error_of_its_own_ends_the_group_at_once():
    coordinator, _ = callers(2)
    answers = coordinator.hear(1, OperationFailed(0, 3, False, "allgather failed on rank 1"), 1.0)
    assert answers == [(rank, GroupFailed(0, "allgather failed on rank 1")) for rank in range(2)]


def test_a_broken_connection_waits_for_the_news_of_a_lost_rank():
    coordinator, _ = callers(3)
    assert coordinator.hear(0, OperationFailed(0, 3, True, "connection closed by peer"), 1.0) == []
    assert coordinator.tick(1.5) == []
    assert coordinator.lose(2, "killed")[0] == (0, RankGone(2, "h2", "killed"))
    assert coordinator.tick(9.0) == []


def test_a_broken_connection_that_nothing_explains_ends_the_job():
    coordinator, _ = callers(2)
    coordinator.hear(0, OperationFailed(0, 3, True, "allreduce failed on rank 0"), 1.0)
    assert coordinator.tick(2.9) == []
    assert coordinator.tick(3.1) == [(rank, GroupFailed(WHOLE_JOB, "allreduce failed on rank 0")) for rank in range(2)]


LEAVES = {
    "says its last calls": [LastCalls(((0, 3), (1, 7)))],
    "has left": [RankBye("", ((0, 3), (1, 7)))],
    "has left while it joined": [LastCalls(((1, 7),)), RankBye("", ((0, 3), (1, 7)))],
}


@each("is_told_first", [False, True])
@each("how", LEAVES)
def test_a_connection_that_a_leaving_rank_has_let_go_of_ends_only_what_it_has_not_called(how, is_told_first):
    coordinator = came(3)
    for rank in (1, 2):
        coordinator.hear(rank, GroupMembers(1, (1, 2)), 1.0)
    said = [(1, message) for message in LEAVES[how]]
    trouble = [(2, OperationFailed(group, count, True, "closed by peer")) for group, count in ((0, 3), (1, 7))]
    for rank, message in said + trouble if is_told_first else trouble + said:
        coordinator.hear(rank, message, 1.0)
    assert coordinator.tick(9.0) == []
    coordinator.hear(2, OperationFailed(1, 6, True, "closed by peer"), 9.0)
    assert coordinator.tick(19.0)[0] == (0, GroupFailed(WHOLE_JOB, "closed by peer")), (
        "what it had called was to be done"
    )


def test_last_calls_are_told_to_the_others_once_and_not_of_who_has_left():
    coordinator = came(3)
    assert coordinator.hear(1, LastCalls(((0, 3),)), 1.0) == [(r, RankLeaving(1, "h1", ((0, 3),))) for r in (0, 2)]
    assert coordinator.hear(1, LastCalls(((0, 2),)), 1.0) == []
    coordinator.hear(2, RankBye("", ((0, 3),)), 1.0)
    assert coordinator.hear(2, LastCalls(((0, 2),)), 1.0) == []


def test_rank_0_is_needed_as_long_as_others_have_a_set_without_it():
    coordinator = came(3)
    assert not coordinator.is_needed
    coordinator.hear(1, GroupMembers(1, (1, 2)), 1.0)
    coordinator.hear(0, RankBye("", ()), 1.0)
    assert coordinator.is_needed
    coordinator.hear(1, RankBye("", ()), 1.0)
    assert coordinator.is_needed
    coordinator.hear(2, RankBye("", ()), 1.0)
    assert not coordinator.is_needed


def test_a_set_that_all_have_removed_needs_nobody():
    coordinator, everybody = callers(2)
    coordinator.hear(1, GroupMembers(3, (1,)), 1.0)
    for caller in everybody:
        caller.call(Signature("remove_process_set", "", (), "id 3"))
    assert not coordinator.is_needed
    assert coordinator.hear(1, CallReport(3, 0, 0, b""), 1.0) == []


# Join.


def test_who_has_joined_plays_what_the_others_do_and_all_must_wait():
    _, (first, second, third) = callers(3)
    assert first.call(JOIN_SIGNATURE) == [(rank, Throttle(0, True)) for rank in range(3)]
    second.call(SUM, waits=False)
    answers = third.call(SUM)
    assert answers == [(0, Participate(0, 0, *vars_of(SUM))), (2, Agreed(0, 1))]


def test_all_have_joined_when_the_last_has_and_it_is_named():
    _, (first, second, third) = callers(3)
    third.call(JOIN_SIGNATURE)
    first.call(SUM, JOIN_SIGNATURE)
    answers = second.call(SUM, JOIN_SIGNATURE)
    assert answers[0] == (2, Participate(0, 0, *vars_of(SUM)))
    assert [(rank, AllJoined(0, 1, 1)) for rank in range(3)] == [a for a in answers if isinstance(a[1], AllJoined)]
    assert answers[-3:] == [(rank, Throttle(0, False)) for rank in range(3)]
    first.call(SUM)
    second.call(SUM)
    assert third.call(SUM)[-1] == (2, Agreed(0, 3))


def test_what_was_called_before_a_join_that_all_have_called_is_agreed_on():
    _, (first, second) = callers(2)
    first.call(SUM, GATHER, JOIN_SIGNATURE)
    answers = second.call(SUM, GATHER, JOIN_SIGNATURE)
    assert answers[:4] == [(0, Agreed(0, 2)), (1, Agreed(0, 2)), (0, AllJoined(0, 2, 1)), (1, AllJoined(0, 2, 1))]


def test_what_a_rank_called_before_its_join_takes_part_as_it_is_and_holds_up_nothing():
    _, (first, second) = callers(2)
    first.call(SUM, JOIN_SIGNATURE)
    assert second.call(OTHER)[:2] == [(0, Participate(0, 0, *vars_of(OTHER))), (1, Agreed(0, 1))]
    assert second.call(SUM) == [(0, Agreed(0, 2)), (1, Agreed(0, 2))]
    assert second.call(JOIN_SIGNATURE)[0] == (0, AllJoined(0, 2, 1))


def test_what_was_called_before_a_join_and_nowhere_else_is_done_with_zeros_when_all_have_joined():
    _, (first, second) = callers(2)
    first.call(GATHER, SUM, JOIN_SIGNATURE)
    second.call(OTHER)
    answers = second.call(JOIN_SIGNATURE)
    assert {(rank, message.name) for rank, message in answers if isinstance(message, Participate)} >= {(1, "a")}
    assert [message.call for _, message in answers if isinstance(message, Mismatch)] == [0], "zeros would falsify it"
    assert [message for _, message in answers if isinstance(message, AllJoined)] == [AllJoined(0, 3, 1)] * 2


@each("signature", [GATHER, Signature("allreduce", "", ("float32[3]",), "Max")])
def test_what_zeros_would_falsify_is_refused_and_counted_while_somebody_has_joined(signature):
    _, (first, second) = callers(2)
    first.call(JOIN_SIGNATURE)
    answers = second.call(signature)
    text = (
        f"rank 1 {signature} as operation 0, but rank 0 called join(): only Sum and Average of allreduce can be done"
        " with those who have joined"
    )
    assert answers == [(1, Mismatch(0, 0, False, text)), (0, Participate(0, 0))]
    assert second.call(JOIN_SIGNATURE)[0] == (0, AllJoined(0, 1, 1))


def test_what_zeros_would_falsify_ends_the_group_if_it_has_begun():
    _, (first, second) = callers(2)
    first.call(JOIN_SIGNATURE)
    answers = second.call(GATHER, waits=False)
    assert [type(message) for _, message in answers] == [Mismatch, GroupFailed, Participate]
    assert answers[0][1].is_fatal


# Stalls.


def test_a_rank_that_is_awaited_is_named_with_the_operation_and_again_at_twice_the_time():
    coordinator, (first, second, third) = callers(3, stall_check_s=10.0, stall_shutdown_s=0.0)
    for caller in (first, second, third):
        caller.call(GATHER, waits=False, now=1.0)
    for caller in (first, third):
        caller.call(SUM, waits=False, done=1, now=5.0)
    coordinator.hear(1, CallReport(0, 1, 1, b""), 5.0)
    assert coordinator.tick(14.9) == []
    text = (
        "waiting 10.0 s for rank 1 (h1) to call allreduce 'a' of float32[3] (Sum) (operation 1); rank 1 called"
        " allgather of float32[*] last; rank 0 has called it"
    )
    assert coordinator.tick(15.0) == [(0, StallWarning(text))]
    assert coordinator.tick(20.0) == []
    assert [rank for rank, _ in coordinator.tick(25.1)] == [0]
    second.call(SUM, waits=False, done=1, now=26.0)
    for rank in range(3):
        coordinator.hear(rank, CallReport(0, 2, 2, b""), 26.0)
    assert coordinator.tick(100.0) == []


def test_a_stopped_rank_is_told_by_its_silence():
    coordinator, (first, second) = callers(2, stall_check_s=10.0, stall_shutdown_s=0.0)
    first.call(SUM, waits=False, now=1.0)
    second.call(SUM, waits=False, now=1.0)
    for second_s in range(2, 12):
        coordinator.hear(0, CallReport(0, 1, 0, b""), float(second_s))
    ((_, told),) = coordinator.tick(11.0)
    assert told.text == (
        "waiting 10.0 s for rank 1 (h1) to finish allreduce 'a' of float32[3] (Sum) (operation 0); rank 1 has been"
        " silent for 10 s; rank 0 has called it"
    )


def test_a_wait_of_other_ranks_than_0_is_told_to_rank_0_too():
    coordinator, (_, second, _) = callers(3, stall_check_s=2.0, stall_shutdown_s=0.0)
    second.call(SUM, now=0.0)
    assert [rank for rank, _ in coordinator.tick(2.0)] == [0, 1]


def test_a_stall_that_may_not_last_ends_the_job():
    coordinator, (first, _) = callers(2, stall_check_s=0.0, stall_shutdown_s=5.0)
    first.call(SUM, now=0.0)
    assert coordinator.tick(4.9) == []
    answers = coordinator.tick(5.0)
    assert [(rank, type(message)) for rank, message in answers] == [(0, GroupFailed), (1, GroupFailed)]
    text = answers[0][1].text
    assert text.startswith("waiting 5.0 s for rank 1 (h1) to call allreduce 'a' of float32[3] (Sum) (operation 0); ")
    assert "rank 1 has called nothing before; rank 0 has called it; the job ends after 5 s" in text


def test_nobody_waits_too_long_for_those_who_have_joined():
    coordinator, (first, _) = callers(2, stall_check_s=1.0, stall_shutdown_s=2.0)
    first.call(JOIN_SIGNATURE, now=0.0)
    assert coordinator.tick(50.0) == []


def test_names_of_ranks_are_short():
    assert named([3]) == "rank 3"
    assert named([0, 2, 5]) == "ranks 0, 2 and 5"
    assert named(range(100)) == "ranks 0, 1, 2, 3, 4, 5 and 94 more"
