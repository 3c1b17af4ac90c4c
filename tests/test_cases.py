"""`tests.cases`: a table in one test fails like the many tests it stands for."""

from __future__ import annotations

import itertools
import os

import pytest

from tests.cases import each, pairs


def test_all_cases_run_and_those_that_fail_are_named():
    seen = []

    @each("a, b", [(1, 1), (1, 2), (2, 3), (4, 4)])
    def check(a, b):
        seen.append((a, b))
        if a == 2:
            pytest.fail("DID NOT RAISE")
        assert a == b

    with pytest.raises(
        AssertionError, match=r"2 of 4 cases failed:\ncase 1, a=1, b=2: (.|\n)*case 2, a=2, b=3: DID N"
    ) as failure:
        check()
    assert seen == [(1, 1), (1, 2), (2, 3), (4, 4)]
    assert failure.value.__cause__ is not None


def test_a_case_that_skips_hides_no_other_and_all_that_skip_skip_the_test():
    seen = []

    @each("a", [1, 2, 3])
    def check(a, wrong):
        seen.append(a)
        if a != wrong:
            pytest.skip("not here")
        pytest.fail("wrong")

    with pytest.raises(AssertionError, match="1 of 3 cases failed:\ncase 2, a=3: wrong"):
        check(wrong=3)
    with pytest.raises(pytest.skip.Exception, match="not here"):
        check(wrong=None)
    assert seen == [1, 2, 3, 1, 2, 3]


def test_no_case_runs_after_the_time_of_the_test_is_over():
    seen = []

    @each("a", [1, 2])
    @each("b", [1, 2])
    def check(a, b):
        seen.append((a, b))
        pytest.fail("Timeout (>300.0s) from pytest-timeout.")

    with pytest.raises(AssertionError, match="1 of 2 cases failed:\ncase 0, a=1: 1 of 2 cases failed:\ncase 0, b=1: T"):
        check()
    assert seen == [(1, 1)]


@pytest.fixture
def three():
    return 3


@each("x", [1, 2])
@each("y", [10, 20])
def test_fixtures_are_given_and_tables_may_be_stacked(three, x, y):
    assert three == 3 and (x, y) in itertools.product([1, 2], [10, 20])


def test_what_cannot_fail_is_refused():
    with pytest.raises(ValueError, match="no case for x"):
        each("x", [])
    with pytest.raises(ValueError, match="has no argument z"):
        each("z", [1])(lambda x: None)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        each("a, b", [(1,)])


def test_few_rows_hold_every_pair():
    options = "abc", [1, 2, 3, 4], [True, False], "xyz"
    rows = pairs(*options)
    assert len(rows) <= 16 < 72
    for (i, left), (j, right) in itertools.combinations(enumerate(options), 2):
        assert {(row[i], row[j]) for row in rows} == set(itertools.product(left, right))


@each("name", ["file", "file"])
def test_each_case_has_an_empty_folder_of_its_own(tmp_path, name):
    assert not list(tmp_path.iterdir())
    (tmp_path / name).touch()


@each("number", [1, 2])
def test_what_a_case_has_patched_is_undone_for_the_next(monkeypatch, number):
    assert "OF_A_CASE" not in os.environ
    monkeypatch.setenv("OF_A_CASE", str(number))
