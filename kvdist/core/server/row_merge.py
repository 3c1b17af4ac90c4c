"""The gradients of one round, each of some rows, as gradients of the rows that any of them has.

The union of their ids is visited chunk by chunk. Where a contribution has every row of a chunk, its values are shown
as they lie; elsewhere they are spread over a chunk of zeros. So nothing is as large as the union, and a contribution
that is alone, or equal in ids to all others, is never copied.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvdist.core.server.row_memory import Slots, clear, put
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array


class Gradients:
    """The contributions of one round, over a list of rows that holds all of theirs.

    Args:
        count: how many rows are visited.
        places: for each contribution the place of each of its rows among them; None: it has all of them, in order.
        values: for each contribution a matrix with its rows.
        rows_max: rows of a chunk.
        dtype: the element type.
    """

    def __init__(
        self, count: int, places: Sequence[Slots | None], values: Sequence[Array], rows_max: int, dtype: DType
    ) -> None:
        self.count = count
        self._places = places
        self._values = values
        self._rows_max = rows_max
        self._bounds = np.arange(0, count + rows_max, rows_max).clip(max=count)
        self._cuts = [None if one is None else np.searchsorted(one, self._bounds) for one in places]
        rows = min(rows_max, count)
        self._spread = [
            np.zeros((0 if one is None else rows, matrix.shape[1]), dtype.storage)
            for one, matrix in zip(places, values, strict=True)
        ]
        """For each contribution a chunk, which is zeros whenever it is not in use."""

    @property
    def chunks(self) -> range:
        """The numbers of the chunks."""
        return range(len(self._bounds) - 1)

    @property
    def whole(self) -> list[Array] | None:
        """All of each contribution, flat, if each has all rows; else None."""
        if any(places is not None for places in self._places):
            return None
        return [values.reshape(-1) for values in self._values]

    def bounds(self, chunk: int) -> tuple[int, int]:
        """The first of its rows, and the first that follows it."""
        return int(self._bounds[chunk]), int(self._bounds[chunk + 1])

    def of(self, chunk: int) -> list[Array]:
        """Each contribution over the rows of a chunk, flat. To be given back by `done`."""
        start, stop = self.bounds(chunk)
        return [self._one(number, chunk, start, stop - start) for number in range(len(self._values))]

    def done(self, chunk: int) -> None:
        """What `of` gave is used no more."""
        start, stop = self.bounds(chunk)
        for number, places in enumerate(self._places):
            low, high = self._cut(number, chunk)
            if places is not None and high - low < stop - start:
                clear(self._spread[number], places[low:high] - start)

    def _cut(self, number: int, chunk: int) -> tuple[int, int]:
        cuts = self._cuts[number]
        return self.bounds(chunk) if cuts is None else (int(cuts[chunk]), int(cuts[chunk + 1]))

    def _one(self, number: int, chunk: int, start: int, count: int) -> Array:
        low, high = self._cut(number, chunk)
        values, places = self._values[number][low:high], self._places[number]
        if places is None or high - low == count:
            return values.reshape(-1)
        spread = self._spread[number]
        put(spread, places[low:high] - start, values)
        return spread[:count].reshape(-1)


def merged(ids: Sequence[Slots]) -> tuple[Slots, list[Slots | None]]:
    """The union of strictly increasing ids, and where in it each of them lies; None: it is the union.

    One contribution, or several with equal ids, cost a comparison; else the union is one sort of all ids, which come in
    sorted runs, and the places one search each.
    """
    if not ids:
        return np.zeros(0, np.int64), []
    largest = max(ids, key=len)
    is_whole = [one is largest or (len(one) == len(largest) and bool((one == largest).all())) for one in ids]
    if all(whole or not len(one) for whole, one in zip(is_whole, ids, strict=True)):
        union = largest
    else:
        union = np.sort(np.concatenate(ids), kind="stable")
        union = union[np.concatenate([[True], union[1:] != union[:-1]])]
    return union, [None if len(one) == len(union) else np.searchsorted(union, one) for one in ids]
