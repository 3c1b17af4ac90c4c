"""Where the arrays of a payload lie: each starts at the next multiple of eight bytes after the one before it.

Both sides compute this from dtypes and counts alone, so no offset travels and none can be wrong.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvdist.dtypes import DType
from kvdist.protocol.arrays import ALIGNMENT_BYTES, U8, U32, Arrays, Payload

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

    A frame whose address is not a multiple of 8 (a transport may hand out any) is copied once as a whole.

    Raises:
        ValueError: the payload is not as long as dtypes and counts say.
    """

    def __init__(self, arrays: Arrays) -> None:
        self._arrays = arrays
        self._bases = [_aligned(frame) for frame in arrays.frames]
        self._starts, self._total = offsets(arrays.dtypes, arrays.counts)
        lengths = [len(base) for base in self._bases]
        if sum(lengths) != self._total:
            raise ValueError(f"the payload has {sum(lengths)} bytes where its dtypes and counts make {self._total}")
        self._ends = np.cumsum(lengths)

    def arrays(self, begin: int, end: int) -> list[npt.NDArray[Any]]:
        """The 1-D arrays of entries `begin` to `end`, each of its dtype's storage type."""
        dtypes, counts = self._arrays.dtypes[begin:end], self._arrays.counts[begin:end].tolist()
        codes = dtypes.tolist()
        if len(self._starts) == 1:  # a large array that travels alone
            return [self._bases[0].view(_STORAGE[code])[:count] for code, count in zip(codes, counts, strict=True)]
        frames = self._frames(begin, end)
        # A frame is a multiple of 8 bytes, so all of it can be seen as each type, and an array is a slice of that.
        pairs = set(zip(frames, codes, strict=True))
        typed = {(frame, code): self._bases[frame].view(_STORAGE[code]) for frame, code in pairs}
        before = self._ends - [len(base) for base in self._bases]
        firsts = ((self._starts[begin:end] - before[frames]) // ITEMSIZES[dtypes]).tolist()
        return [
            typed[frame, code][first : first + count]
            for frame, code, first, count in zip(frames, codes, firsts, counts, strict=True)
        ]

    def stretch(self, begin: int, end: int, dtype: DType) -> npt.NDArray[Any]:
        """The entries `begin` to `end`, all of one dtype, as one 1-D array that shows the padding too.

        One copy if they lie in several frames.
        """
        start = int(self._starts[begin])
        stop = int(self._starts[end]) if end < len(self._starts) else self._total
        last = int(np.searchsorted(self._ends, stop))
        first = last if last == 0 or start >= self._ends[last - 1] else int(np.searchsorted(self._ends, start, "right"))
        if first == last:  # nearly always
            before = int(self._ends[last]) - len(self._bases[last])
            return self._bases[last][start - before : stop - before].view(dtype.storage)
        pieces = self._bases[first : last + 1]
        pieces[0] = pieces[0][start - int(self._ends[first]) :]  # counted from its end
        pieces[-1] = pieces[-1][: stop - int(self._ends[last - 1])]
        return np.concatenate(pieces).view(dtype.storage)

    def _frames(self, begin: int, end: int) -> list[int]:
        """The frame of each entry."""
        if len(self._bases) == 1:
            return [0] * (end - begin)
        # An entry without elements may start at the very end: it lies in the last frame.
        found = np.searchsorted(self._ends, self._starts[begin:end], side="right")
        frames: list[int] = np.minimum(found, len(self._bases) - 1).tolist()
        return frames


def _aligned(frame: Payload) -> npt.NDArray[np.uint8]:
    base: npt.NDArray[np.uint8] = np.frombuffer(memoryview(frame).toreadonly(), np.uint8)
    if base.__array_interface__["data"][0] % ALIGNMENT_BYTES:
        base = base.copy()
        base.flags.writeable = False
    return base


def views(arrays: Arrays) -> list[npt.NDArray[Any]]:
    """One array per entry; see `PayloadView`."""
    return PayloadView(arrays).arrays(0, len(arrays.counts))


def stretches(numbers: U32) -> list[tuple[int, int]]:
    """Where equal numbers stand together: (begin, end) of each stretch, in order."""
    if not len(numbers):
        return []
    ends = [*(np.flatnonzero(numbers[1:] != numbers[:-1]) + 1).tolist(), len(numbers)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
