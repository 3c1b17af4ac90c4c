"""Stretches side by side: what is shown, what cannot be, and when it is unmapped. Between processes elsewhere."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import permutations

import numpy as np
import pytest

from kvdist.transport.shared_memory.allocator import SharedAllocator, WindowCache
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.mapping import PAGE_BYTES
from tests.cases import each
from tests.transport.mappings import segments_mapped

SEGMENT = 1 << 20
PIECE = 16 * PAGE_BYTES


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * SEGMENT, SEGMENT)
    yield made
    made.close()


def pieces(arena: Arena, *sizes: int) -> list[np.ndarray]:
    arrays = []
    for number, size in enumerate(sizes):
        arrays.append(arena.allocate(size))
        arrays[-1][:] = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    return arrays


@each("last", [1, 7, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 70_001])
def test_frames_in_any_order_and_of_several_segments_are_one_array(arena: Arena, last: int) -> None:
    arrays = pieces(arena, PIECE, SEGMENT // 2, SEGMENT // 2, PIECE)
    tail = pieces(arena, last if last >= 1 << 16 else 1 << 16)[0][:last]
    cache = WindowCache([arena.table])
    for order in permutations(arrays, 3):
        frames = [memoryview(array) for array in (*order, tail)]
        window = cache.view(frames)
        assert window is not None and window.dtype == np.uint8
        assert (window == np.concatenate([*order, tail])).all()


def test_a_window_shows_what_is_written_later(arena: Arena) -> None:
    left, right = pieces(arena, PIECE, PIECE)
    window = WindowCache([arena.table]).view([memoryview(right), memoryview(left)])
    assert window is not None
    left[5], right[6] = 200, 201
    assert window[PIECE + 5] == 200 and window[6] == 201


def test_what_is_written_to_a_window_is_seen_by_nobody_else(arena: Arena) -> None:
    left, right = pieces(arena, PIECE, PIECE)
    before = left.copy()
    window = WindowCache([arena.table]).view([memoryview(left), memoryview(right)])
    assert window is not None
    window[7] ^= 0xFF
    assert (left == before).all() and window[7] == before[7] ^ 0xFF


def test_one_frame_has_a_window_where_it_lies_in_a_segment(arena: Arena) -> None:
    cache = WindowCache([arena.table])
    (frame,) = pieces(arena, PIECE)
    window = cache.view([memoryview(frame)])
    assert window is not None and (window == frame).all() and len(cache) == 1
    assert cache.view([memoryview(bytearray(PIECE))]) is None


def test_what_cannot_be_mapped_side_by_side_is_none(arena: Arena) -> None:
    cache = WindowCache([arena.table])
    left, right = (memoryview(array) for array in pieces(arena, PIECE, PIECE))
    assert cache.view([left, memoryview(bytes(PIECE))]) is None
    assert cache.view([left[:-1], right]) is None
    assert cache.view([left, right[1:]]) is None
    assert cache.view([left, right[:0]]) is None
    assert cache.view([]) is None
    assert len(cache) == 0


def test_a_window_that_the_system_refuses_is_none_and_reported_once(
    arena: Arena, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(stretches: object) -> np.ndarray:
        raise OSError(errno.ENOMEM, "cannot map 65536 bytes: Cannot allocate memory")

    monkeypatch.setattr("kvdist.transport.shared_memory.allocator.map_side_by_side", refused)
    cache = WindowCache([arena.table])
    frames = [memoryview(array) for array in pieces(arena, PIECE, PIECE)]
    assert cache.view(frames) is None and cache.view(frames) is None and len(cache) == 0
    (record,) = caplog.records
    assert "values are copied" in record.message and "Cannot allocate memory" in record.message


def test_the_window_asked_for_the_longest_ago_goes_first_and_lives_while_it_is_shown(arena: Arena) -> None:
    cache = WindowCache([arena.table], windows_max=2)
    a, b, c = (memoryview(array) for array in pieces(arena, PIECE, PIECE, PIECE))
    before = segments_mapped()
    shown = cache.view([b, a])
    assert shown is not None
    cache.view([c, a])
    assert cache.view([b, a]) is shown
    cache.view([a, c])
    assert len(cache) == 2 and cache.view([b, a]) is shown
    cache.view([c, b])
    cache.view([c, a])
    assert len(cache) == 2
    assert bytes(shown) == bytes(b) + bytes(a)
    del cache, shown
    assert segments_mapped() == before


def test_a_cleared_cache_keeps_nothing_and_a_window_that_is_shown_lasts(arena: Arena) -> None:
    cache, (a, b, c) = WindowCache([arena.table]), pieces(arena, PIECE, PIECE, PIECE)
    before = segments_mapped()
    shown = cache.view([memoryview(b), memoryview(a)])
    cache.view([memoryview(c), memoryview(a)])
    cache.clear()
    assert shown is not None and len(cache) == 0
    assert (shown == np.concatenate([b, a])).all()
    assert segments_mapped() > before
    del shown
    assert segments_mapped() == before


def test_windows_over_memory_that_was_closed_are_let_go(arena: Arena) -> None:
    other = Arena(SEGMENT, SEGMENT)
    cache = WindowCache([arena.table, other.table])
    (a, b), (c, d) = pieces(arena, PIECE, PIECE), pieces(other, PIECE, PIECE)
    assert cache.view([memoryview(b), memoryview(c)]) is not None
    assert cache.view([memoryview(d), memoryview(c)]) is not None
    other.close()
    assert cache.view([memoryview(b), memoryview(a)]) is not None
    assert len(cache) == 1


def test_when_the_node_has_ended_memory_is_to_be_had_and_asking_the_node_says_why_it_ended(arena: Arena) -> None:
    allocator = SharedAllocator(arena, WindowCache([arena.table]))
    arena.close()
    memory = allocator.allocate(PIECE)
    assert memory.nbytes == PIECE and not allocator.owns(memory)
