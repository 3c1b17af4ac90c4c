"""The hash index of rows: every id has its slot, whatever the ids look like."""

from __future__ import annotations

import numpy as np
import pytest

from kvdist.core.server.row_storage import GrowingRows, RowIndex, stretch_of
from tests.cases import each

MANY = 300_000
ANYTHING = 2**63

IDS = {
    "consecutive": lambda n: np.arange(n),
    "multiples of 2^12": lambda n: np.arange(n) << 12,
    "multiples of 2^40": lambda n: np.arange(n) << 40,
    "high bits only": lambda n: (np.arange(n) << 44) | 5,
    "random": lambda n: np.unique(np.random.default_rng(1).integers(0, 2**63 - 1, n)),
    "falling": lambda n: np.arange(n)[::-1].copy(),
    "the largest": lambda n: np.int64(2**63 - 1) - np.arange(n),
}


@each("name", IDS)
def test_hundreds_of_thousands_of_ids_are_found_in_their_slots_and_others_are_not(name):
    ids = IDS[name](MANY).astype(np.int64)
    index, size = RowIndex(0, ANYTHING), len(ids)
    for start in range(0, size, 70_001):
        part = ids[start : start + 70_001]
        np.testing.assert_array_equal(index.find(part), np.full(len(part), -1))
        np.testing.assert_array_equal(index.add(part), np.arange(start, start + len(part)))
    index.validate()
    np.testing.assert_array_equal(index.ids, ids)
    order = np.random.default_rng(2).permutation(size)
    np.testing.assert_array_equal(index.find(ids[order]), order)


def test_an_index_that_has_a_place_for_every_id_finds_them_as_well():
    first, stop = 10**12, 10**12 + 1000
    index, ids = RowIndex(first, stop), np.random.default_rng(3).permutation(np.arange(first, stop))
    for _ in range(2):
        for start in range(0, 900, 90):
            part = ids[start : start + 90]
            np.testing.assert_array_equal(index.find(part), np.full(90, -1))
            index.add(part)
            index.validate()
        np.testing.assert_array_equal(index.find(ids[:900]), np.arange(900))
        np.testing.assert_array_equal(index.find(ids[900:]), np.full(100, -1))
        assert index.nbytes == 4 * 1000 + 8 * 900
        index.clear()


@pytest.mark.slow
def test_two_million_ids_in_one_batch():
    ids = np.arange(2_000_000, dtype=np.int64) << 21
    index = RowIndex(0, ANYTHING)
    index.add(ids)
    index.validate()
    assert index.nbytes <= 32 * len(ids)


@each("size", [0, 1, 127, 128, 129])
def test_the_table_grows_where_it_must(size):
    index = RowIndex(0, ANYTHING)
    for one in range(size):
        index.add(np.array([one * 3]))
        index.validate()
    assert index.count == size
    assert index.find(np.array([1, 4])).tolist() == [-1, -1]
    assert index.find(np.zeros(0, np.int64)).tolist() == []


def test_the_memory_of_an_id_is_bounded():
    index = RowIndex(0, ANYTHING)
    for _ in range(50):
        index.add(np.arange(1000) + index.count)
        assert index.nbytes <= 24 * index.count + 4 * 256


def test_after_clear_it_is_empty_and_ids_begin_at_slot_0_again():
    index = RowIndex(0, ANYTHING)
    index.add(np.arange(1000))
    index.clear()
    index.validate()
    assert index.find(np.array([3])).tolist() == [-1]
    assert index.add(np.array([3])).tolist() == [0]


@each("width", [0, 1, 3])
def test_rows_keep_their_content_while_memory_grows_and_new_ones_are_zeros(width):
    memory = GrowingRows(width, np.dtype(np.float32))
    for count in (1, 70, 71, 5000, 300_000):
        before = memory.rows.copy()
        memory.reserve(count)
        assert memory.rows.shape[0] >= count
        np.testing.assert_array_equal(memory.rows[: len(before)], before)
        assert not memory.rows[len(before) :].any()
        memory.rows[: len(before) + 1] = count


def test_a_view_that_somebody_keeps_does_not_keep_memory_from_growing():
    memory = GrowingRows(2, np.dtype(np.float64))
    memory.reserve(10)
    memory.rows[:10] = 7
    view = memory.rows[3:5]
    memory.reserve(100_000)
    assert (memory.rows[:10] == 7).all()
    assert (view == 7).all()


def test_memory_that_there_is_not_is_an_error_and_the_rows_stay():
    memory = GrowingRows(2, np.dtype(np.float64))
    memory.reserve(10)
    memory.rows[:10] = 7
    with pytest.raises(MemoryError):
        memory.reserve(2**46)
    assert (memory.rows[:10] == 7).all()
    memory.reserve(1000)
    assert (memory.rows[:10] == 7).all()
    with pytest.raises(MemoryError):
        GrowingRows(2, np.dtype(np.float64)).reserve(2**46)


@each(
    "slots, expected",
    [
        ([], slice(0, 0)),
        ([5], slice(5, 6)),
        ([5, 6, 7], slice(5, 8)),
        ([5, 7], None),
        ([0, 2, 1, 3], None),
        ([1, 0], None),
    ],
)
def test_a_stretch_is_recognised_and_nothing_else_is(slots, expected):
    given = np.array(slots, np.int64)
    found = stretch_of(given)
    assert found == expected if expected is not None else found is given
