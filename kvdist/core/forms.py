"""What each slice of a server must look like, so that a message for thousands of them is checked in a few calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.protocol.arrays import U8, U32, Arrays
from kvdist.protocol.messages import Flag

# A plain number: operators of enums are written in Python.
_EMPTY = int(Flag.EMPTY)


class Forms:
    """Elements and dtype of each slice that is kept here, by its number."""

    def __init__(self) -> None:
        self._counts: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        """-1 for a slice that is not kept here."""
        self._dtypes: U8 = np.zeros(0, np.uint8)

    def enter(self, slices: Sequence[tuple[int, int, DType]]) -> None:
        """Note slices: (number, elements, dtype). The table at least doubles when it grows, or inits would copy it."""
        if not slices:
            return
        numbers, counts, dtypes = zip(*slices, strict=True)
        size = len(self._counts)
        if max(numbers) >= size:
            more = max(max(numbers) + 1 - size, size)
            self._counts = np.concatenate([self._counts, np.full(more, -1, np.int64)])
            self._dtypes = np.concatenate([self._dtypes, np.zeros(more, np.uint8)])
        places = np.array(numbers)
        self._counts[places] = counts
        self._dtypes[places] = dtypes

    def fit(self, ids: U32, arrays: Arrays | None) -> bool:
        """Whether all of these are plainly right: the usual case, in few calls."""
        if int(ids.max()) >= len(self._counts):
            return False
        expected = self._counts[ids]
        if arrays is None:
            return bool((expected >= 0).all())
        return bool((expected == arrays.counts).all() and (self._dtypes[ids] == arrays.dtypes).all())

    def misfits(self, ids: U32, arrays: Arrays | None, flags: U8 | None) -> Iterator[tuple[int, bool]]:
        """Those that are wrong: (position, whether the slice is kept here at all).

        An empty contribution has no array to look at.

        Args:
            ids: slices.
            arrays: what came for them, if anything.
            flags: of contributions.
        """
        inside = ids < len(self._counts)
        within = np.where(inside, ids, 0)
        expected = np.where(inside, self._counts[within], -1) if len(self._counts) else np.full(len(ids), -1)
        good = expected >= 0
        if arrays is not None and good.any():
            fits = (arrays.counts == expected) & (arrays.dtypes == self._dtypes[within])
            if flags is not None:
                fits |= (flags & _EMPTY).astype(bool)
            good &= fits
        for i in np.flatnonzero(~good).tolist():
            yield i, bool(expected[i] >= 0)
