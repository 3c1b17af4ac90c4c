"""Where every element of a key lives: on which server, in which slice. Pure arithmetic.

A key with fewer than `bigarray_bound` elements lives whole on one server (its *home*); a larger one is cut into one
contiguous range per server. Either way it is handled in slices of at most `slice_bytes`, so that sending, summing
and updating overlap. Slices have numbers that are unique in the cluster and consecutive within a key, in the order of
the elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdist.protocol.messages import Placement

PAGE_ELEMENTS = 4096
"""So many elements fill whole pages, whatever their type."""
PAGES_PER_RANGE_MIN = 16
"""Shorter ranges would become too unequal."""

HASH_MULTIPLIER = 9973
"""The mirrored system places key k on server (k · 9973) mod S."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements `start` to `stop` of one key, in row-major order, kept by server `server`."""

    number: int
    server: int
    start: int
    stop: int

    @property
    def count(self) -> int:
        """Elements in it."""
        return self.stop - self.start


def ranges(size: int, parts: int) -> list[tuple[int, int]]:
    """`size` elements in `parts` contiguous ranges of nearly equal length.

    Boundary i is round(size · i / parts) with halves rounded up, as the mirrored system cuts a large array; of ranges
    that are long enough it is rounded further, to whole pages, so that they can be mapped side by side.
    """
    unit = PAGE_ELEMENTS if size >= PAGES_PER_RANGE_MIN * PAGE_ELEMENTS * parts else 1
    bounds = [(2 * size * i + parts * unit) // (2 * parts * unit) * unit for i in range(parts)]
    return list(pairwise([*bounds, size]))


def cut(size: int, itemsize: int, home: int, num_servers: int, first_slice: int, slice_bytes: int) -> list[Slice]:
    """The slices of a key, in the order of its elements.

    Args:
        size: elements of the key; 0 gives one empty slice, so that every key takes part in rounds.
        itemsize: bytes per element.
        home: the rank of the server that keeps the whole key, or `Placement.CUT`.
        first_slice: the number of the first slice.
        slice_bytes: the most bytes a slice may have.
    """
    if home == Placement.CUT:
        pieces = [(server, *bounds) for server, bounds in enumerate(ranges(size, num_servers))]
    else:
        pieces = [(home, 0, size)]
    length_max = max(1, slice_bytes // itemsize)
    slices: list[Slice] = []
    for server, start, stop in pieces:
        parts = max(1, -(-(stop - start) // length_max))
        step = -(-(stop - start) // parts)
        if step >= PAGES_PER_RANGE_MIN * PAGE_ELEMENTS:
            step = min(-(-step // PAGE_ELEMENTS) * PAGE_ELEMENTS, length_max)
        for low in range(start, stop, step) if step else [start]:
            slices.append(Slice(first_slice + len(slices), server, low, min(low + step, stop)))
    return slices


class Placer:
    """Chooses where new keys live, and numbers their slices. One per cluster, in the scheduler.

    Args:
        num_servers: servers to choose from.
        bigarray_bound: elements from which on a key is cut over all servers.
        slice_bytes: the most bytes a slice may have.
        by_hash: place by the mirrored system's hash of the key instead of balancing bytes.
    """

    def __init__(self, num_servers: int, bigarray_bound: int, slice_bytes: int, by_hash: bool = False) -> None:
        self.num_servers = num_servers
        self.bigarray_bound = bigarray_bound
        self.slice_bytes = slice_bytes
        self.by_hash = by_hash
        self.loads_bytes = [0] * num_servers
        self._next_slice = 0
        self._next_index = 0

    def place(self, keys: Sequence[int | str], sizes: Sequence[int], itemsizes: Sequence[int]) -> Placement:
        """Give each key a home and numbers. Larger keys choose first, so that the bytes balance well."""
        homes = [Placement.CUT] * len(keys)
        indices = [self._index(key) for key in keys]
        for i in sorted(range(len(keys)), key=lambda i: -sizes[i] * itemsizes[i]):
            homes[i] = self._home(indices[i], sizes[i], itemsizes[i])
        first_slices = []
        for i, home in enumerate(homes):
            first_slices.append(self._next_slice)
            slices = cut(sizes[i], itemsizes[i], home, self.num_servers, self._next_slice, self.slice_bytes)
            self._next_slice += len(slices)
        return Placement(tuple(first_slices), tuple(homes), self.slice_bytes)

    def _index(self, key: int | str) -> int:
        """The integer that the mirrored system hashes: the key, or for a name the order of its first appearance."""
        if isinstance(key, int):
            return key
        self._next_index += 1
        return self._next_index - 1

    def _home(self, index: int, size: int, itemsize: int) -> int:
        if size >= self.bigarray_bound:
            for server, (start, stop) in enumerate(ranges(size, self.num_servers)):
                self.loads_bytes[server] += (stop - start) * itemsize
            return Placement.CUT
        if self.by_hash:
            home = index * HASH_MULTIPLIER % self.num_servers
        else:
            home = min(range(self.num_servers), key=lambda server: (self.loads_bytes[server], server))
        self.loads_bytes[home] += size * itemsize
        return home
