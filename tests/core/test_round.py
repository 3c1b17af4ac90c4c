"""Rounds: whose numbers hold where workers say different ones, and what is promised while a cut is made."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.core.policy import SYNC
from kvdist.core.round import Contribution, Round, agreed_settings
from kvdist.errors import OptimizerMismatch
from kvdist.nodes import Member, worker
from tests.cases import each


def push(rank: int, incarnation: int, rate: float | None, step: int = 0) -> Contribution:
    """A contribution of a worker that names a learning rate."""
    setting = (rate, None, None)
    return Contribution(Member(worker(rank), incarnation), 1, step, 0, 0, 0, setting, np.zeros(0, np.float32))


def said(*rates: tuple[int, int, float | None]) -> list[Contribution]:
    """Contributions of (rank, incarnation, learning rate)."""
    return [push(*one) for one in rates]


@each(
    "present, later, rate",
    [
        (said((0, 1, 0.5), (1, 2, 0.5)), {1}, 0.5),
        (said((0, 1, 0.1), (1, 7, 0.5)), {1}, 0.1),
        (said((0, 7, 0.5), (1, 2, 0.1), (2, 3, 0.1)), {0}, 0.1),
        (said((0, 9, 0.5), (1, 8, 0.2)), {0, 1}, 0.2),  # none is left of those that began
        (said((0, 9, 0.5), (1, 2, None)), {0}, None),
    ],
)
def test_the_numbers_of_those_that_were_there_before_hold(
    present: list[Contribution], later: set[int], rate: float | None
) -> None:
    assert agreed_settings("w", present, later) == (rate, None)


@each("later", [set(), {2}])
def test_those_that_began_together_must_agree(later: set[int]) -> None:
    present = said((0, 1, 0.5), (1, 2, 0.1), (2, 9, 0.5))
    with pytest.raises(OptimizerMismatch, match="worker-0 .*; worker-1 "):
        agreed_settings("w", present, later)


def test_who_is_asked_twice_how_far_it_is_promises_no_more_than_before() -> None:
    round_ = Round("w", SYNC)
    round_.promise()
    for step in (0, 1):
        round_.offer(push(0, 1, None, step), 0.0)
        if round_.is_complete({0}):
            round_.close()
    round_.promise()
    assert (round_.version, round_.held_version(1), round_.is_complete({0})) == (1, 0, False), "one more, not two"
    round_.admit([1], 1)
    assert round_.is_complete({0})


def test_a_round_that_counts_nobody_leaves_its_slots_alone() -> None:
    round_ = Round("w", SYNC)
    round_.offer(push(0, 1, None), 0.0)
    assert (round_.close([]), round_.version, set(round_.slots)) == ([], 1, {0}), "as joint blocks may order"


def test_who_goes_back_makes_no_version_before_a_cut_and_newcomers_begin_there() -> None:
    round_ = Round("w", SYNC)
    round_.promise()
    round_.rewind(3, {0}, set())
    for more, version in ((0, 3), (1, 2)):
        round_.promise(more)
        assert (round_.held_version(more), round_.version) == (version, 3), "newcomers take part from version 3 on"
    round_.offer(push(0, 1, None, 3), 0.0)
    assert not round_.is_complete({0})
    round_.admit([1], 3)
    assert not round_.is_complete({0, 1}) and round_.is_complete({0})


def test_after_a_rollback_rounds_know_who_has_joined_later_whatever_they_knew() -> None:
    """A server that replaces a lost server judges a late worker's numbers, and counts its pushes, as the others do."""
    rounds = Round("w", SYNC), Round("w", SYNC)
    rounds[0].admit([2], 50)
    for round_ in rounds:
        round_.rewind(60, {0, 1, 2}, {2, 7})
    assert [round_.began for round_ in rounds] == [{2: 60}] * 2
