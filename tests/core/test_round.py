"""Whose numbers hold in a round of workers that say different ones."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvdist.core.round import Setting, agreed_settings
from kvdist.errors import OptimizerMismatch
from kvdist.nodes import Member, worker
from tests.cases import each


@dataclass
class Said:
    """A contribution of a worker that names a learning rate."""

    member: Member
    setting: Setting
    step: int = 0
    samples: int = 0
    flags: int = 0


def said(*rates: tuple[int, int, float | None]) -> list[Said]:
    """Of (rank, incarnation, learning rate)."""
    return [Said(Member(worker(rank), incarnation), (rate, None, None)) for rank, incarnation, rate in rates]


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
    present: list[Said], later: set[int], rate: float | None
) -> None:
    assert agreed_settings("w", present, later) == (rate, None)


@each("later", [set(), {2}])
def test_those_that_began_together_must_agree(later: set[int]) -> None:
    present = said((0, 1, 0.5), (1, 2, 0.1), (2, 9, 0.5))
    with pytest.raises(OptimizerMismatch, match="worker-0 .*; worker-1 "):
        agreed_settings("w", present, later)
