"""Which stretches of a range of addresses are free: first fit, neighbours joined. Pure bookkeeping."""

from __future__ import annotations

from bisect import bisect_left


class FreeSpace:
    """The free stretches, in order of address, none touching another."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """(start, end) of each."""
        return list(zip(self._starts, self._ends, strict=True))

    def take(self, nbytes: int, alignment: int) -> int | None:
        """The start of `nbytes` that were free, a multiple of `alignment`; None when there is no such place."""
        for index, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            begin = -(-start // alignment) * alignment
            if begin + nbytes <= end:
                rest = [(start, begin), (begin + nbytes, end)]
                self._put(index, index + 1, [(left, right) for left, right in rest if left < right])
                return begin
        return None

    def give(self, start: int, nbytes: int) -> None:
        """Make a stretch free that was not."""
        end = start + nbytes
        index = bisect_left(self._starts, start)
        first, last = index, index
        if index > 0 and self._ends[index - 1] == start:
            first, start = index - 1, self._starts[index - 1]
        if index < len(self._starts) and self._starts[index] == end:
            last, end = index + 1, self._ends[index]
        self._put(first, last, [(start, end)])

    def _put(self, first: int, last: int, stretches: list[tuple[int, int]]) -> None:
        self._starts[first:last] = [start for start, _ in stretches]
        self._ends[first:last] = [end for _, end in stretches]
