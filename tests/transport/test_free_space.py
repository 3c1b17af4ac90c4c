"""Free stretches against a model that knows every unit of memory by name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvdist.transport.shared_memory.arena import FreeSpace

SIZE = 200
REGIONS = ((7, 107), (108, 8 + SIZE))
"""Two ranges that do not touch."""

STEPS = st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.sampled_from([1, 4, 16])), max_size=60)


def fresh() -> FreeSpace:
    space = FreeSpace()
    for start, end in REGIONS:
        space.give(start, end - start)
    return space


@given(STEPS)
def test_what_is_taken_is_free_aligned_and_never_taken_twice(steps: list[tuple[bool, int, int]]) -> None:
    space = fresh()
    free = {unit for start, end in REGIONS for unit in range(start, end)}
    taken: list[tuple[int, int]] = []
    for is_taking, number, alignment in steps:
        if is_taking:
            start = space.take(number, alignment)
            places = [at for at in sorted(free) if at % alignment == 0 and set(range(at, at + number)) <= free]
            assert start == (places[0] if places else None)
            if start is not None:
                free -= set(range(start, start + number))
                taken.append((start, number))
        elif taken:
            start, length = taken.pop(number % len(taken))
            space.give(start, length)
            free |= set(range(start, start + length))
        shown = [unit for start, end in space.stretches for unit in range(start, end)]
        assert shown == sorted(free)
        ends = [end for _, end in space.stretches]
        assert all(end < start for end, (start, _) in zip(ends, space.stretches[1:], strict=False)), "not joined"


@given(STEPS, st.randoms())
def test_when_all_is_given_back_it_is_whole_again(steps: list[tuple[bool, int, int]], random: object) -> None:
    space = fresh()
    taken = [(space.take(number, alignment), number) for _, number, alignment in steps]
    random.shuffle(taken)  # type: ignore[attr-defined]
    for start, number in taken:
        if start is not None:
            space.give(start, number)
    assert space.stretches == list(REGIONS)
