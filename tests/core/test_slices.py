"""A worker's lines before its slices: one push of a slice under way, and no two runs wait for each other."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvdist.core.worker.requests import Run, RunKind, RunPart, RunPlan, Transfer
from kvdist.core.worker.transfers import SliceTable


def run(number: int, *ids: int) -> Run:
    column = np.array(ids, np.uint32)
    positions = {number: i for i, number in enumerate(ids)}
    plan = RunPlan(0, column, column, column.astype(np.uint8), (), 0, positions, np.zeros(len(ids), np.intp))
    made = Run(plan, settings=((math.nan,) * 3,))
    made.begin(number, Transfer(number, RunKind.PUSH, "push", [made]), column, column)
    return made


def ids(*numbers: int) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.array(numbers, np.uint32)


@pytest.fixture
def table() -> SliceTable:
    made = SliceTable()
    made.grow(4)
    return made


def test_rows_are_added_and_never_lost(table: SliceTable) -> None:
    table.enter(run(1, 3))
    table.grow(6)
    table.grow(2)
    assert table.pushed.tolist()[:6] == [0, 0, 0, 1, 0, 0] and not table.pushed[6:].any()


def test_steps_count_the_pushes_of_each_slice(table: SliceTable) -> None:
    first, second = run(1, 0, 1), run(2, 1, 2)
    table.enter(first)
    table.enter(second)
    assert first.steps.tolist() == [0, 0]
    assert second.steps.tolist() == [1, 0]


def left(*parts: RunPart | None) -> list[tuple[int, list[int]]]:
    """What may leave: (run, slices)."""
    return [(part.run.number, part.ids.tolist()) for part in parts if part is not None]


def test_the_second_push_of_a_slice_waits_until_the_first_is_counted(table: SliceTable) -> None:
    assert left(table.enter(run(1, 0, 1))) == [(1, [0, 1])]
    assert left(table.enter(run(2, 1))) == []
    assert table.has_lines
    assert left(*table.mark_counted(ids(0))) == []
    assert left(*table.mark_counted(ids(1))) == [(2, [1])]
    assert not table.has_lines


def test_a_free_slice_of_a_run_does_not_wait_for_its_neighbours(table: SliceTable) -> None:
    table.enter(run(1, 0))
    table.enter(run(2, 1))
    assert left(table.enter(run(3, 0, 1, 2))) == [(3, [2])]
    table.validate()
    assert left(*table.mark_counted(ids(1))) == [(3, [1])]
    assert left(*table.mark_counted(ids(0))) == [(3, [0])]


def test_slices_that_are_freed_together_leave_together(table: SliceTable) -> None:
    table.enter(run(1, 0, 1, 2))
    assert left(table.enter(run(2, 2, 1, 0))) == []
    assert left(*table.mark_counted(ids(0, 1, 2))) == [(2, [2, 1, 0])]


def test_lines_are_served_in_the_order_of_the_calls(table: SliceTable) -> None:
    assert left(*(table.enter(run(i, 2)) for i in range(4))) == [(0, [2])]
    assert [left(*table.mark_counted(ids(2))) for _ in range(4)] == [[(1, [2])], [(2, [2])], [(3, [2])], []]


def test_overlapping_runs_in_any_order_all_leave(table: SliceTable) -> None:
    runs = [run(0, 0, 1), run(1, 1, 2), run(2, 2, 0), run(3, 1, 0), run(4, 3, 2, 1, 0)]
    sent = [part for part in map(table.enter, runs) if part is not None]
    seen: list[tuple[int, int]] = []
    while sent:
        part = sent.pop(0)
        seen += [(part.run.number, number) for number in part.ids.tolist()]
        sent += table.mark_counted(part.ids)
        table.validate()
    assert sorted(seen) == sorted((one.number, number) for one in runs for number in one.plan.ids.tolist())
    assert not table.has_lines


def test_versions_never_go_back(table: SliceTable) -> None:
    table.saw(ids(1, 2), ids(5, 7))
    table.saw(ids(1, 2), ids(6, 3))
    assert table.versions.tolist() == [0, 6, 7, 0]
