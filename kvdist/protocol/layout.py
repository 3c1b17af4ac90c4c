"""Where the arrays of a payload lie: each starts at the next multiple of eight bytes after the one before it.

Both sides compute this from dtypes and counts alone, so no offset travels and none can be wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.protocol.messages import ALIGNMENT_BYTES, U8, U32, Arrays

ITEMSIZES = np.zeros(256, np.int64)
"""(256,) bytes per element by dtype code; 0 where no dtype has that code."""
for _dtype in DType:
    ITEMSIZES[_dtype] = _dtype.itemsize
ITEMSIZES.flags.writeable = False

_STORAGE = {int(dtype): dtype.storage for dtype in DType}


def padded_sizes(dtypes: U8, counts: U32) -> npt.NDArray[np.int64]:
    """The (n,) bytes that each array occupies, padding included.

    No product or sum of them overflows: a count is below 2**32, an element has at most 8 bytes, and a message has
    at most 2**20 slices.
    """
    sizes: npt.NDArray[np.int64] = ITEMSIZES[dtypes] * counts
    sizes += ALIGNMENT_BYTES - 1
    sizes &= -ALIGNMENT_BYTES
    return sizes


def offsets(dtypes: U8, counts: U32) -> tuple[npt.NDArray[np.int64], int]:
    """The (n,) byte offset at which each array starts, and the bytes of the whole payload."""
    sizes = padded_sizes(dtypes, counts)
    ends = np.cumsum(sizes)
    return ends - sizes, int(ends[-1]) if len(ends) else 0


class PayloadView:
    """A payload seen as its arrays, read-only and without a copy.

    A payload whose address is not a multiple of 8 (a transport may hand out any) is copied once as a whole.

    Raises:
        ValueError: the payload is not as long as dtypes and counts say.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._starts, total = offsets(arrays.dtypes, arrays.counts)
        base: npt.NDArray[np.uint8] = np.frombuffer(memoryview(arrays.payload).toreadonly(), np.uint8)
        if len(base) != total:
            raise ValueError(f"the payload has {len(base)} bytes where its dtypes and counts make {total}")
        if base.__array_interface__["data"][0] % ALIGNMENT_BYTES:
            base = base.copy()
            base.flags.writeable = False
        self._base = base

    def arrays(self, begin: int, end: int) -> list[npt.NDArray[Any]]:
        """The 1-D arrays of entries `begin` to `end`, each of its dtype's storage type."""
        dtypes, counts = self._arrays.dtypes[begin:end], self._arrays.counts[begin:end]
        codes = dtypes.tolist()
        # The total is a multiple of 8, so the whole payload can be seen as each type, and an array is a slice of that.
        typed = {code: self._base.view(_STORAGE[code]) for code in set(codes)}
        firsts = (self._starts[begin:end] // ITEMSIZES[dtypes]).tolist()
        return [
            typed[code][first : first + count]
            for code, first, count in zip(codes, firsts, counts.tolist(), strict=True)
        ]

    def stretch(self, begin: int, end: int, dtype: DType) -> npt.NDArray[Any]:
        """The entries `begin` to `end`, all of one dtype, as one 1-D array that shows the padding too."""
        last = self._starts[end] if end < len(self._starts) else len(self._base)
        return self._base[self._starts[begin] : last].view(dtype.storage)


def views(arrays: Arrays) -> list[npt.NDArray[Any]]:
    """One array per entry; see `PayloadView`."""
    return PayloadView(arrays).arrays(0, len(arrays.counts))


def stretches(numbers: U32) -> list[tuple[int, int]]:
    """Where equal numbers stand together: (begin, end) of each stretch, in order."""
    if not len(numbers):
        return []
    ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
