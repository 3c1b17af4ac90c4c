"""Memory that comes back when nobody shows it any more, from whatever thread and in whatever form."""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdist.errors import ForkError, StoreClosed
from kvdist.transport.shared_memory.arena import LINE_BYTES, PAGES_FROM_BYTES, Arena
from kvdist.transport.shared_memory.mapping import PAGE_BYTES, address_of
from kvdist.transport.shared_memory.segments import HEADER_BYTES
from tests.cases import each
from tests.transport.mappings import Pins, segments_mapped

SEGMENT = 1 << 20


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(8 * SEGMENT, SEGMENT)
    yield made
    made.close()


@each("nbytes", [0, 1, 63, 64, 65, 65471, 65472, 65473, 65535, 65536, 65537, SEGMENT - HEADER_BYTES])
def test_what_is_allocated_has_the_size_asked_for_is_aligned_and_writable(arena: Arena, nbytes: int) -> None:
    arena.allocate(1)  # so that the next one does not begin at a page by chance
    array = arena.allocate(nbytes)
    assert type(array) is np.ndarray and array.dtype == np.uint8 and array.shape == (nbytes,)
    address = array.__array_interface__["data"][0]
    assert address % (PAGE_BYTES if nbytes >= PAGES_FROM_BYTES else LINE_BYTES) == 0
    array[:] = 7
    assert (array == 7).all()


def test_a_request_larger_than_a_segment_gets_one_of_its_own(arena: Arena) -> None:
    array = arena.allocate(3 * SEGMENT + 1)
    assert arena.bytes_reserved == 3 * SEGMENT + PAGE_BYTES + HEADER_BYTES
    array[-1] = 1


def test_an_arena_of_any_size_has_one_file_open(arena: Arena) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arrays = [arena.allocate(SEGMENT // 2) for _ in range(10)]
    assert len(arena.table) > 2 and len(os.listdir("/proc/self/fd")) == before
    for number, array in enumerate(arrays):
        array[:] = number
    offsets = [arena.locate(array) or pytest.fail("not found") for array in arrays]
    read = [os.pread(arena.file.number, SEGMENT // 2, offset) for offset in offsets]
    assert read == [bytes([number]) * (SEGMENT // 2) for number in range(10)]


def test_memory_that_the_system_refuses_leaves_the_arena_as_it_was(arena: Arena) -> None:
    kept = arena.allocate(1000)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    mapped = int(Path("/proc/self/statm").read_text("utf-8").split()[0]) * PAGE_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (mapped + SEGMENT, hard))
    try:
        with pytest.raises(MemoryError, match="the system has no"):
            arena.allocate(4 * SEGMENT)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    array = arena.allocate(4 * SEGMENT)
    array[:] = 5
    assert os.pread(arena.file.number, 100, arena.locate(array) or 0) == bytes([5]) * 100 and kept.size


def test_beyond_its_limit_the_arena_says_so_and_goes_on_when_something_is_dropped() -> None:
    arena = Arena(SEGMENT + 5 * PAGE_BYTES, SEGMENT)
    kept = arena.allocate(SEGMENT - HEADER_BYTES)
    small = arena.allocate(4 * PAGE_BYTES)  # in what the limit leaves for a second segment
    with pytest.raises(
        MemoryError, match=r"allocate 64 bytes .* of 1069056 bytes 1069056 are .* 1060864 in use; raise"
    ):
        arena.allocate(1)
    del small
    arena.allocate(1)[:] = 1
    assert kept.size
    arena.close()


SHOWN = {
    "array": lambda array: array,
    "slice": lambda array: array[100:200][3:],
    "typed": lambda array: array[:4096].view(np.float32).reshape(4, -1)[1],
    "memoryview": lambda array: memoryview(array)[5:50],
    "frombuffer": lambda array: np.frombuffer(memoryview(array), np.uint8)[7:],
    "read-only": lambda array: memoryview(array).cast("B").toreadonly(),
}


@each("form", SHOWN)
def test_memory_is_in_use_as_long_as_anything_shows_it(arena: Arena, form: str) -> None:
    shown = SHOWN[form](arena.allocate(100_000))
    assert arena.bytes_used == 102_400
    other = arena.allocate(100_000)
    assert not np.shares_memory(np.asarray(shown), other)
    del shown, other
    assert arena.bytes_used == 0


def test_a_torch_tensor_keeps_its_memory(arena: Arena) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(arena.allocate(4096).view(np.float32))[10:20]
    assert arena.bytes_used == 4096
    del tensor
    assert arena.bytes_used == 0


def test_memory_shown_by_a_cycle_comes_back_with_it(arena: Arena) -> None:
    cycle: list[object] = [arena.allocate(4096)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert arena.bytes_used == 0


def test_the_same_size_is_given_again_and_other_sizes_from_what_is_joined(arena: Arena) -> None:
    count = (SEGMENT - HEADER_BYTES) // (64 << 10)
    arrays = [arena.allocate(64 << 10) for _ in range(count)]
    last = address_of(arrays[-1])
    del arrays[-1]
    assert address_of(arena.allocate(64 << 10)) == last
    arrays.clear()
    joined = arena.allocate(count * (64 << 10))
    assert arena.bytes_reserved == SEGMENT
    assert not np.shares_memory(joined, arena.allocate(64 << 10))


@settings(max_examples=30)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 150_000)), max_size=80))
def test_no_two_arrays_ever_overlap(steps: list[tuple[bool, int]]) -> None:
    arena = Arena(16 * SEGMENT, SEGMENT)
    arrays = []
    for number, (is_taking, amount) in enumerate(steps):
        if is_taking:
            arrays.append((arena.allocate(amount), number % 251))
            arrays[-1][0][:] = number % 251
        elif arrays:
            arrays.pop(amount % len(arrays))
    assert all((array == value).all() for array, value in arrays)
    places = sorted((array.__array_interface__["data"][0], array.size) for array, _ in arrays)
    assert all(left + size <= right for (left, size), (right, _) in pairwise(places))
    arrays.clear()
    arena.close()


def test_threads_that_allocate_and_drop_each_others_arrays_never_share_one(arena: Arena) -> None:
    wrong: list[str] = []
    pool: list[tuple[np.ndarray, int]] = []

    def work(seed: int) -> None:
        random = np.random.default_rng(seed)
        for turn in range(300):
            array = arena.allocate(int(random.integers(1, 100_000)))
            value = (seed * 50 + turn) % 256
            array[:] = value
            pool.append((array, value))
            del array
            if len(pool) > 6:
                shown, expected = pool.pop(0)
                if not (shown == expected).all():
                    wrong.append(f"{expected} was overwritten")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    pool.clear()
    assert arena.bytes_used == 0


def test_a_call_in_the_middle_of_another_one_gets_ordinary_memory(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a signal handler."""
    inner: list[np.ndarray] = []
    find = arena._find

    def interrupted(size: int) -> int:
        inner.append(arena.allocate(5000))
        return find(size)

    monkeypatch.setattr(arena, "_find", interrupted)
    outer = arena.allocate(100)
    assert arena.locate(outer) is not None and arena.locate(inner[0]) is None and inner[0].size == 5000


def test_only_buffers_of_the_arena_are_located(arena: Arena) -> None:
    array = arena.allocate(70_000)
    offset = arena.locate(array) or pytest.fail("not found")
    assert offset % PAGE_BYTES == 0 and offset >= HEADER_BYTES
    array[:] = np.arange(70_000) % 251
    assert os.pread(arena.file.number, 70_000, offset) == array.tobytes()
    assert arena.locate(memoryview(array)[1234:]) == offset + 1234
    assert arena.locate(array.view(np.int16)[5:]) == offset + 10
    assert arena.locate(bytes(100)) is None and arena.locate(np.zeros(1 << 20)) is None


def test_a_forked_child_reads_and_is_refused_to_allocate(arena: Arena) -> None:
    array = arena.allocate(100)
    array[:] = 5
    child = os.fork()
    if child == 0:
        try:
            arena.allocate(1)
        except ForkError:
            os._exit(0 if (array == 5).all() else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_after_close_arrays_live_and_nothing_more_is_given() -> None:
    arena = Arena(SEGMENT, SEGMENT)
    array = arena.allocate(1000)
    array[:] = 3
    arena.close()
    arena.close()
    with pytest.raises(StoreClosed, match="closed"):
        arena.allocate(1)
    assert arena.locate(array) is None
    del arena
    gc.collect()
    array += 1
    assert (array == 4).all()


def test_memory_is_unmapped_when_the_arena_and_its_last_array_are_gone() -> None:
    before = segments_mapped()
    arena = Arena(SEGMENT, SEGMENT)
    array = arena.allocate(1000)
    assert segments_mapped() == before + 1
    arena.close()
    del arena
    assert segments_mapped() == before + 1
    del array
    assert segments_mapped() == before


# Memory that a GPU is told of.


def test_segments_are_pinned_whole_and_once_those_to_come_too_and_let_go_with_the_arena() -> None:
    arena, pins = Arena(8 * SEGMENT, SEGMENT), Pins()
    first = arena.allocate(1000)
    arena.table.pin_all(pins)
    assert list(pins.present.values()) == [SEGMENT]
    second = arena.allocate(SEGMENT)
    arena.allocate(1000)
    assert sum(pins.present.values()) == arena.bytes_reserved > 2 * SEGMENT
    for array in (first, second):
        address = address_of(array)
        assert any(start <= address and address + array.nbytes <= start + n for start, n in pins.present.items())
    arena.close()
    assert not pins.present, "before the last array of it is gone, and its pages with that"


def test_memory_that_cannot_be_pinned_is_used_as_it_is() -> None:
    arena = Arena(8 * SEGMENT, SEGMENT)
    arena.table.pin_all(lambda memory: None)
    arena.allocate(1000)[:] = 1
    arena.close()
