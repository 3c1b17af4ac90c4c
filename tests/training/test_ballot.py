"""What workers that update by themselves tell each other: numbers that sums of float32 must leave as they are."""

from __future__ import annotations

from random import Random

import numpy as np

from kvdist.kvstore.backend import SAMPLES_MAX
from kvdist.optimizer.registry import create
from kvdist.training.ballot import Ballot
from tests.cases import each, pairs

GIVEN = [True, False]


def ballots(num_workers: int) -> list[Ballot]:
    return [Ballot(2, create("sgd"), len(GIVEN), rank, num_workers) for rank in range(num_workers)]


@each(
    "num_workers, examples, is_averaged, is_weighted",
    pairs([2, 3, 7, 600], [1, 1000, (1 << 24) + 1, SAMPLES_MAX], [False, True], [False, True]),
)
def test_the_examples_of_a_step_are_counted_exactly_however_many(
    num_workers: int, examples: int, is_averaged: bool, is_weighted: bool
) -> None:
    random = Random(num_workers * examples)
    told = [examples - random.randrange(examples) for _ in range(num_workers)]
    members = ballots(num_workers)
    result = np.zeros_like(members[0].cast(GIVEN, average=False))
    for member, number in zip(members, told, strict=True):
        result += member.cast(GIVEN, is_averaged, is_weighted, number)
    if is_averaged:
        result /= np.float32(num_workers)
    assert result.dtype == np.float32 and members[0].examples(result) == sum(told)
    assert members[0].share(result) == np.float32(1 / num_workers if is_averaged else 1)


def test_who_skips_a_step_has_no_examples_in_it() -> None:
    first, second = ballots(2)
    result = first.cast(GIVEN, average=True, examples=(1 << 24) + 1) + second.cast([False, False], True, examples=77)
    assert first.examples(result) == (1 << 24) + 1
    assert first.read(result)[0] == GIVEN and first.read(result)[1].tolist() == [1, 0, 0]
