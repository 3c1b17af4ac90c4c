"""Arrays on the wire: columns of numbers in a header, and values in payload frames."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

U8 = npt.NDArray[np.uint8]
U32 = npt.NDArray[np.uint32]
Payload = bytes | bytearray | memoryview

ALIGNMENT_BYTES = 8
"""Each array in a payload starts at a multiple of this."""


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    """Arrays back to back in one payload frame or several, each starting at a multiple of 8 bytes.

    dtypes: (n,) codes of `kvdist.dtypes.DType`; counts: (n,) elements; encoding: 0 = the elements themselves. Each
    of several frames holds whole arrays.
    """

    dtypes: U8
    counts: U32
    payload: Payload | tuple[Payload, ...]
    encoding: int = 0

    @property
    def frames(self) -> tuple[Payload, ...]:
        """The payload frames."""
        return self.payload if isinstance(self.payload, tuple) else (self.payload,)

    @property
    def nbytes(self) -> int:
        """Of all payload frames."""
        return sum(len(frame) if type(frame) is bytes else memoryview(frame).nbytes for frame in self.frames)


def padded(nbytes: int) -> int:
    """`nbytes` rounded up to where the next array of a payload may start."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
