"""The message of contributions that travel in fewer bytes than their elements have: like those of `messages`.

What the bytes of each encoding mean is in WIRE.md; who computes them is `kvdist.optimizer.compression`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import ClassVar

from kvdist.protocol.arrays import U8, U32, Payload


class Encoding(enum.IntEnum):
    """How elements of float32 are encoded. The codes never get a second meaning."""

    TWO_BIT = 1
    ONE_BIT = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    TOP_K = 5


@dataclass(frozen=True, slots=True, eq=False)
class Coded:
    """Encoded arrays back to back in one payload frame or several, as those of `Arrays`.

    counts: (n,) elements of each array, 0 for an empty contribution; entries: (n,) how many of them travel, which is
    all, but for top-k; encoding: the code of one encoding for all; parameter: the threshold of 2-bit and 1-bit, else 0.
    """

    counts: U32
    entries: U32
    encoding: int
    parameter: float
    payload: Payload | tuple[Payload, ...]

    @property
    def frames(self) -> tuple[Payload, ...]:
        """The payload frames."""
        return self.payload if isinstance(self.payload, tuple) else (self.payload,)

    @property
    def nbytes(self) -> int:
        """Of all payload frames."""
        return sum(memoryview(frame).nbytes for frame in self.frames)


@dataclass(frozen=True, slots=True, eq=False)
class CompressedPush:
    """Worker → server: contributions of float32, encoded. The columns are those of `Push`, and so are the answers."""

    KIND: ClassVar[int] = 29
    SEQUENCED: ClassVar[bool] = True
    pull: bool
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    samples: U32
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    setting_of: U8
    arrays: Coded
