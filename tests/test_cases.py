"""The cases that tests take instead of full products are enough."""

from itertools import combinations, product

import pytest

from tests.cases import case, pairs

AXES = ("abcde", (1, 2, 3), (True, False), "xyz")


def in_pairs(cases):
    return {pair for one in cases for pair in combinations(enumerate(one), 2)}


def test_each_pair_of_values_is_in_one_of_few_cases():
    cases = pairs(*AXES)
    assert in_pairs(cases) == in_pairs(product(*AXES))
    assert 15 <= len(cases) < 20 and cases == pairs(*AXES)


def test_only_cases_that_can_be_are_taken_and_all_pairs_that_can_be_are_in_them():
    def where(letter, number, flag, other):
        return flag or number != 3

    cases = pairs(*AXES, where=where)
    assert in_pairs(cases) == in_pairs(one for one in product(*AXES) if where(*one))


def test_a_case_that_fails_is_named(capsys):
    with pytest.raises(AssertionError), case("adam", 3):
        raise AssertionError
    assert capsys.readouterr().out == "failed in the case of adam 3\n"
