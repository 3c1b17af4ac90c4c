"""The place of every element of a key: its server and its slice. Pure arithmetic.

A key with fewer than `bigarray_bound` elements lives whole on a server (its *home*); a larger key is cut into a
contiguous range per server. Either way it is handled in slices of at most `slice_bytes`, so that sending, summing and
updating overlap. Slices have numbers that are unique in the cluster and consecutive within a key, in the order of the
elements.

Elements that an optimizer must see together stay together: for a rule that needs lengths of the whole, a key lives
whole on a server, however large; for a rule that needs rows, it is cut between rows, and slices hold whole rows.

A table of rows is cut between rows, too, but into one slice per server, of any size: its messages carry only the rows
that matter.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kvdist.optimizer.base import Optimizer
from kvdist.protocol import messages as msg

PAGE_ELEMENTS = 4096
"""Number of elements that fill whole pages with any dtype."""
LINE_ELEMENTS = 16
"""Slices that are too short for pages begin at cache lines: then none has to be padded, and thus copied, to be sent."""
PAGES_PER_RANGE_MIN = 16
"""Shorter ranges would become too unequal."""

HASH_MULTIPLIER = 9973
"""MXNet places key k on server (k · 9973) mod S."""


@dataclass(slots=True, unsafe_hash=True)  # not frozen: there are as many as slices, and that takes five times as long
class Slice:
    """Elements `start` to `stop` of a key, in row-major order, kept by server `server`."""

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

    Boundary i is round(size · i / parts) with halves rounded up, as MXNet cuts a large array; of ranges that are
    long enough it is rounded further, to whole pages, so that they can be mapped side by side.
    """
    unit = PAGE_ELEMENTS if size >= PAGES_PER_RANGE_MIN * PAGE_ELEMENTS * parts else 1
    bounds = [(2 * size * i + parts * unit) // (2 * parts * unit) * unit for i in range(parts)]
    return list(pairwise([*bounds, size]))


class Keep(enum.Enum):
    """The part of a key that must stay together, because its optimizer needs it so."""

    NOTHING = enum.auto()
    ROWS = enum.auto()
    WHOLE = enum.auto()


def keep_for(optimizer: Optimizer | None) -> Keep:
    """The part of a key that this optimizer needs together."""
    if optimizer is None:
        return Keep.NOTHING
    return Keep.WHOLE if optimizer.needs_norms else Keep.ROWS if optimizer.by_rows else Keep.NOTHING


def row_length(shape: Sequence[int]) -> int:
    """Elements of a row of a key, at least 1."""
    return max(1, math.prod(shape[1:]))


def cut(
    size: int, itemsize: int, home: int, num_servers: int, first_slice: int, slice_bytes: int, row: int = 1
) -> list[Slice]:
    """The slices of a key, in the order of its elements.

    Args:
        size: elements of the key; 0 gives an empty slice, so that every key takes part in rounds.
        itemsize: bytes per element.
        home: the rank of the server that keeps the whole key, or `Placement.CUT`, or `Placement.CUT_AT_ROWS`.
        first_slice: the number of the first slice.
        slice_bytes: the most bytes of a slice that has more than a row.
        row: elements of a row, where it is cut between those.
    """
    if home == msg.Placement.CUT_AT_ROWS:
        rows = cut(size // row, itemsize * row, msg.Placement.CUT, num_servers, first_slice, slice_bytes)
        return [Slice(one.number, one.server, one.start * row, one.stop * row) for one in rows]
    if home == msg.Placement.CUT:
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
        elif parts > 1 and step >= PAGE_ELEMENTS:
            step = min(-(-step // LINE_ELEMENTS) * LINE_ELEMENTS, length_max)
        for low in range(start, stop, step) if step else [start]:
            slices.append(Slice(first_slice + len(slices), server, low, min(low + step, stop)))
    return slices


def slices_of(
    shape: Sequence[int], itemsize: int, form: str, home: int, num_servers: int, first_slice: int, slice_bytes: int
) -> list[Slice]:
    """The slices of a key of any form: see `cut`; those of a table of rows are as many as servers keep it."""
    size = math.prod(shape)
    if home < num_servers and (form or size * itemsize <= slice_bytes):
        return [Slice(first_slice, home, 0, size)]  # the usual case of a small key
    row = row_length(shape)
    if not form:
        return cut(size, itemsize, home, num_servers, first_slice, slice_bytes, row)
    pieces = enumerate(ranges(size // row, num_servers))
    return [Slice(first_slice + server, server, start * row, stop * row) for server, (start, stop) in pieces]


class Placer:
    """Chooses where new keys live, and numbers their slices. The scheduler of a cluster has it.

    Args:
        num_servers: servers to choose from.
        bigarray_bound: elements from which on a key is cut over all servers.
        slice_bytes: the most bytes a slice may have.
        by_hash: place by MXNet's hash of the key instead of balancing bytes.
    """

    def __init__(
        self,
        num_servers: int,
        bigarray_bound: int,
        slice_bytes: int,
        by_hash: bool = False,
    ) -> None:
        self.num_servers = num_servers
        self.bigarray_bound = bigarray_bound
        self.slice_bytes = slice_bytes
        self.by_hash = by_hash
        self.loads_bytes = [0] * num_servers
        self._next_slice = 0
        self._next_index = 0

    def place(
        self,
        keys: Sequence[int | str],
        shapes: Sequence[Sequence[int]],
        itemsizes: Sequence[int],
        keep: Keep = Keep.NOTHING,
        forms: Sequence[str] = (),
        slice_bytes: int = 0,
    ) -> msg.Placement:
        """Assign each key a home and slice numbers. Larger keys choose first, so that the bytes balance well.

        Args:
            keys, shapes, itemsizes: name, shape, and bytes per element of each key.
            keep: the part of each key that must stay together.
            forms: form of each key; empty if all are arrays.
            slice_bytes: largest size of a slice in bytes; 0 is the placer's.
        """
        slice_bytes = slice_bytes or self.slice_bytes
        homes = [msg.Placement.CUT] * len(keys)
        forms = forms or [""] * len(keys)
        nbytes = [math.prod(shape) * itemsize for shape, itemsize in zip(shapes, itemsizes, strict=True)]
        indices = [self._index(key) for key in keys] if self.by_hash else [0] * len(keys)
        for i in sorted(range(len(keys)), key=nbytes.__getitem__, reverse=True):
            homes[i] = self._home(indices[i], shapes[i], nbytes[i], itemsizes[i], keep, slice_bytes, bool(forms[i]))
        first_slices = []
        for i, home in enumerate(homes):
            first_slices.append(self._next_slice)
            if home < self.num_servers and nbytes[i] <= slice_bytes:
                self._next_slice += 1
                continue
            where = (home, self.num_servers, self._next_slice, slice_bytes)
            self._next_slice += len(slices_of(shapes[i], itemsizes[i], forms[i], *where))
        return msg.Placement(tuple(first_slices), tuple(homes), slice_bytes)

    def _index(self, key: int | str) -> int:
        """The integer that MXNet hashes: the key, or for a name the order of its first appearance."""
        if isinstance(key, int):
            return key
        self._next_index += 1
        return self._next_index - 1

    def _home(
        self,
        index: int,
        shape: Sequence[int],
        nbytes: int,
        itemsize: int,
        keep: Keep,
        slice_bytes: int,
        is_table: bool,
    ) -> int:
        loads = self.loads_bytes
        is_large = nbytes >= self.bigarray_bound * itemsize
        at_rows = is_table or keep is Keep.ROWS
        may_cut = is_table or keep is not Keep.WHOLE
        if may_cut and (is_large or (at_rows and not is_table and nbytes > slice_bytes)):
            unit_bytes = (row_length(shape) if at_rows else 1) * itemsize
            for server, (start, stop) in enumerate(ranges(nbytes // unit_bytes, self.num_servers)):
                loads[server] += (stop - start) * unit_bytes
            return msg.Placement.CUT_AT_ROWS if at_rows and not is_table else msg.Placement.CUT
        home = index * HASH_MULTIPLIER % self.num_servers if self.by_hash else loads.index(min(loads))
        loads[home] += nbytes
        return home
