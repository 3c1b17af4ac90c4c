"""When contributions make a version."""

from __future__ import annotations

import pytest

from kvdist.config.settings import Limits
from kvdist.core.policy import ASYNC, MODES, P3, P3_ASYNC, QUOTA, SYNC, Policy, with_priority_slices
from tests.cases import each


def test_a_synchronous_version_needs_every_live_worker() -> None:
    assert not SYNC.is_full({0}, {0, 2})
    assert SYNC.is_full({2, 0}, {0, 2})


def test_a_contribution_of_somebody_who_left_does_not_stand_for_a_live_worker() -> None:
    assert not SYNC.is_full({1, 0}, {0, 2})
    assert SYNC.is_full({1, 0}, {0})


def test_missing_names_whom_a_version_waits_for() -> None:
    assert SYNC.missing({1}, {0, 1, 5}) == (0, 5)
    assert ASYNC.missing(set(), {0, 1}) == ()


def test_an_asynchronous_version_is_made_of_each_contribution_and_needs_an_optimizer() -> None:
    assert not ASYNC.is_full(set(), {0, 1})
    assert ASYNC.is_full({1}, {0, 1})
    assert ASYNC.needs_optimizer and not SYNC.needs_optimizer


def test_a_version_of_so_many_contributions_is_refused_as_long_as_nothing_decides_about_late_ones() -> None:
    with pytest.raises(ValueError, match="policy 'first_2' closes a version after 2 contributions"):
        Policy("first_2", close=2, needs_optimizer=False)


def test_policies_are_found_by_the_word_on_the_wire() -> None:
    assert MODES == {"sync": SYNC, "quota": QUOTA, "async": ASYNC, "p3": P3, "p3_async": P3_ASYNC}


@each("plain, sliced", [(SYNC, P3), (ASYNC, P3_ASYNC)])
def test_priority_slices_change_how_a_store_sends_and_not_when_its_versions_are_made(plain, sliced) -> None:
    assert with_priority_slices(plain) is with_priority_slices(sliced) is sliced
    same = ("close", "needs_optimizer", "is_lockstep")
    assert [getattr(plain, name) for name in same] == [getattr(sliced, name) for name in same]
    limits = Limits(slice_bytes=4096, priority_slice_bytes=64)
    assert (plain.slice_bytes(limits), sliced.slice_bytes(limits)) == (4096, 64)
