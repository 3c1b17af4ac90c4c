"""The first of many that are due is always known, however often their times change."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvdist.core.machine import NEVER
from kvdist.core.reliable import SPARE_ENTRIES, Deadlines


@dataclass(eq=False)
class Task:
    due: float = NEVER
    listed: float = NEVER


times = st.one_of(st.integers(0, 20).map(float), st.just(NEVER))


@given(st.lists(st.tuples(st.integers(0, 4), times), max_size=60))
def test_the_first_is_the_least_of_all(changes: list[tuple[int, float]]) -> None:
    dues: Deadlines[Task] = Deadlines()
    tasks = [Task() for _ in range(5)]
    for index, due in changes:
        tasks[index].due = due
        dues.enter(tasks[index])
        assert dues.first == min(task.due for task in tasks)


@given(st.lists(st.tuples(st.integers(0, 4), times), max_size=60), st.integers(0, 20))
def test_each_that_is_due_is_taken_once_and_no_other(changes: list[tuple[int, float]], now: int) -> None:
    dues: Deadlines[Task] = Deadlines()
    tasks = [Task() for _ in range(5)]
    for index, due in changes:
        tasks[index].due = due
        dues.enter(tasks[index])
    expected = sorted(task.due for task in tasks if task.due <= now)
    taken = []
    for task in dues.pop_due(now):
        taken.append(task.due)
        task.due = NEVER
    assert taken == expected
    assert dues.first == min(task.due for task in tasks)


def test_one_that_stays_due_later_is_taken_then() -> None:
    dues: Deadlines[Task] = Deadlines()
    task = Task(due=1.0)
    dues.enter(task)
    for taken in dues.pop_due(1.0):
        taken.due = 3.0
    assert dues.first == 3.0


def test_places_that_mean_nothing_do_not_pile_up() -> None:
    dues: Deadlines[Task] = Deadlines()
    task = Task()
    for due in range(10_000, 0, -1):
        task.due = float(due)
        dues.enter(task)
    assert len(dues._heap) <= 4 + SPARE_ENTRIES
    assert dues.first == 1.0
