"""Where elements live: ranges, slices, homes."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from kvdist.config.settings import Limits
from kvdist.core.policy import P3, P3_ASYNC, SYNC
from kvdist.core.sharding import Keep, Placer, cut, ranges, slices_of
from kvdist.protocol.messages import Placement
from tests.cases import each

CUT = Placement.CUT


@each(
    "size, parts, bounds",
    [
        (10, 4, [0, 3, 5, 8, 10]),
        (100_003, 2, [0, 50_002, 100_003]),
        (5, 2, [0, 3, 5]),
        (2, 3, [0, 1, 1, 2]),
        (0, 3, [0, 0, 0, 0]),
        (7, 1, [0, 7]),
    ],
)
def test_boundaries_round_halves_up(size: int, parts: int, bounds: list[int]) -> None:
    assert ranges(size, parts) == list(itertools.pairwise(bounds))


@given(st.integers(0, 10_000), st.integers(1, 50))
def test_short_ranges_cover_everything_once_and_differ_by_at_most_one(size: int, parts: int) -> None:
    pieces = ranges(size, parts)
    assert pieces[0][0] == 0 and pieces[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    lengths = [stop - start for start, stop in pieces]
    assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 100_000_000), st.integers(1, 50))
def test_long_ranges_begin_at_whole_pages_and_are_nearly_equal(size: int, parts: int) -> None:
    pieces = ranges(size, parts)
    assert pieces[0][0] == 0 and pieces[-1][1] == size
    assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
    lengths = [stop - start for start, stop in pieces]
    if size >= 16 * 4096 * parts:
        assert all(start % 4096 == 0 for start, _ in pieces) and max(lengths) - min(lengths) <= 2 * 4096
    else:
        assert max(lengths) - min(lengths) <= 1


@given(st.integers(1, 60_000_000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
def test_long_slices_begin_at_whole_pages_and_are_never_too_large(size: int, itemsize: int, servers: int) -> None:
    slices = cut(size, itemsize, CUT, servers, 0, 4 << 20)
    assert all(piece.count * itemsize <= 4 << 20 for piece in slices)
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices)) and slices[-1].stop == size
    if size >= 16 * 4096 * servers:
        assert all(piece.start % 4096 == 0 for piece in slices)


@given(st.integers(0, 5000), st.sampled_from([1, 2, 4, 8]), st.integers(1, 7), st.integers(1, 300), st.booleans())
def test_slices_are_consecutive_and_never_too_large(
    size: int, itemsize: int, servers: int, slice_bytes: int, whole: bool
) -> None:
    slices = cut(size, itemsize, 0 if whole else CUT, servers, 11, slice_bytes)
    assert [piece.number for piece in slices] == list(range(11, 11 + len(slices)))
    assert slices[0].start == 0 and slices[-1].stop == size
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    assert all(piece.count * itemsize <= max(slice_bytes, itemsize) for piece in slices)
    assert {piece.server for piece in slices} == ({0} if whole else set(range(servers)))


def test_slices_that_are_too_short_for_pages_begin_at_cache_lines() -> None:
    slices = cut(102_760_448, 4, CUT, 2, 0, 160_000)
    assert all(piece.start * 4 % 64 == 0 and piece.count <= 40_000 for piece in slices)
    assert len(slices) == 2 * math.ceil(102_760_448 / 2 / 40_000)


def test_a_store_with_priority_slices_has_slices_of_its_own_size() -> None:
    limits = Limits(slice_bytes=64, priority_slice_bytes=16)
    assert [policy.slice_bytes(limits) for policy in (SYNC, P3, P3_ASYNC)] == [64, 16, 16]
    placer = Placer(2, 1 << 30, 64)
    usual = placer.place(["a"], [(10,)], [4])
    small = placer.place(["b"], [(10,)], [4], slice_bytes=16)
    after = placer.place(["c"], [(1,)], [4])
    assert (usual.slice_bytes, small.slice_bytes) == (64, 16)
    assert [one.first_slices for one in (usual, small, after)] == [(0,), (1,), (4,)]


def test_a_key_without_elements_has_one_slice_so_that_it_takes_part_in_rounds() -> None:
    (piece,) = cut(0, 4, 1, 3, 5, 64)
    assert (piece.number, piece.server, piece.count) == (5, 1, 0)


def test_a_cut_key_has_a_slice_on_every_server_even_with_more_servers_than_elements() -> None:
    slices = cut(2, 4, CUT, 5, 0, 64)
    assert [piece.server for piece in slices] == [0, 1, 2, 3, 4]
    assert sum(piece.count for piece in slices) == 2


def test_an_element_larger_than_a_slice_travels_alone() -> None:
    assert [piece.count for piece in cut(3, 8, 0, 1, 0, 4)] == [1, 1, 1]


def test_a_key_is_cut_from_a_million_elements_on() -> None:
    placer = Placer(2, 1_000_000, 1 << 30)
    placement = placer.place(["below", "at"], [(999_999,), (1000, 1000)], [4, 4])
    assert placement.homes[0] in (0, 1)
    assert placement.homes[1] == CUT


def test_hashed_keys_live_where_the_mirrored_system_puts_them() -> None:
    placer = Placer(4, 1000, 64, by_hash=True)
    assert placer.place([3, 7], [(1,), (1,)], [4, 4]).homes == (3 * 9973 % 4, 7 * 9973 % 4)
    assert placer.place(["a", "b"], [(1,), (1,)], [4, 4]).homes == (0, 9973 % 4)


def test_large_keys_choose_first_so_that_bytes_balance() -> None:
    placer = Placer(2, 1000, 1 << 20)
    placement = placer.place(["small", "large", "middle"], [(10,), (100,), (90,)], [4, 4, 4])
    assert placement.homes == (1, 0, 1)
    assert placer.loads_bytes == [400, 400]


def test_later_keys_go_to_the_emptier_server_and_take_the_next_numbers() -> None:
    placer = Placer(2, 1000, 16)
    first = placer.place(["a"], [(10,)], [4])
    second = placer.place(["b"], [(1,)], [8])
    assert (first.first_slices, first.homes) == ((0,), (0,))
    assert (second.first_slices, second.homes) == ((3,), (1,))


def test_a_cut_key_loads_every_server_with_its_range() -> None:
    placer = Placer(3, 4, 64)
    placer.place(["a"], [(10,)], [2])
    assert placer.loads_bytes == [6, 8, 6]


def test_a_scalar_has_one_element() -> None:
    placement = Placer(2, bigarray_bound=100, slice_bytes=64).place(["scale", "w"], [(), (3,)], [4, 4])
    assert placement.first_slices == (0, 1)
    (scale,) = slices_of((), 4, "", placement.homes[0], 2, 0, 64)
    assert (scale.start, scale.stop) == (0, 1)


def test_a_table_has_a_slice_of_whole_rows_on_each_server_however_large_it_is() -> None:
    placer = Placer(3, bigarray_bound=20, slice_bytes=64)
    shapes = [(11, 5), (3, 2), (1,)]
    placement = placer.place(["large", "small", "next"], shapes, [4, 4, 4], forms=["rows", "zeros", ""])
    assert placement.homes[0] == Placement.CUT and placement.homes[1] >= 0
    assert placement.first_slices == (0, 3, 4)
    large = slices_of((11, 5), 4, "rows", placement.homes[0], 3, 0, 64)
    assert [(one.number, one.server, one.start, one.stop) for one in large] == [
        (0, 0, 0, 20),
        (1, 1, 20, 35),
        (2, 2, 35, 55),
    ]


def test_a_table_with_fewer_rows_than_servers_leaves_some_without() -> None:
    pieces = slices_of((2, 30), 4, "rows", Placement.CUT, 4, 7, 64)
    assert [one.number for one in pieces] == [7, 8, 9, 10]
    assert sum(one.count for one in pieces) == 60 and all(one.count in (0, 30) for one in pieces)


def test_a_small_table_of_long_rows_lives_on_a_server_whatever_must_stay_together():
    placer = Placer(2, 1_000_000, 1 << 20)
    placement = placer.place(["t"], [(10, 50_000)], [8], Keep.ROWS, ["rows"])
    assert placement.homes == (0,)
