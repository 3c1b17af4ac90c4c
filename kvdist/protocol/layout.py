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


def views(arrays: Arrays) -> list[npt.NDArray[Any]]:
    """One read-only 1-D array per entry, of the dtype's storage type, showing the payload without a copy.

    A payload whose address is not a multiple of 8 (a transport may hand out any) is copied once as a whole.

    Raises:
        ValueError: the payload is not as long as dtypes and counts say.
    """
    starts, total = offsets(arrays.dtypes, arrays.counts)
    base: npt.NDArray[np.uint8] = np.frombuffer(memoryview(arrays.payload).toreadonly(), np.uint8)
    if len(base) != total:
        raise ValueError(f"the payload has {len(base)} bytes where its dtypes and counts make {total}")
    if base.__array_interface__["data"][0] % ALIGNMENT_BYTES:
        base = base.copy()
        base.flags.writeable = False
    # The total is a multiple of 8, so the whole payload can be seen as each type, and an array is a slice of that.
    codes = arrays.dtypes.tolist()
    typed = {code: base.view(_STORAGE[code]) for code in set(codes)}
    firsts = (starts // ITEMSIZES[arrays.dtypes]).tolist()
    return [
        typed[code][first : first + count]
        for code, first, count in zip(codes, firsts, arrays.counts.tolist(), strict=True)
    ]
