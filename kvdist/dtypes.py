"""The element types a key may have: a closed table, so that no peer can name a type we did not choose.

`storage` is the NumPy type that carries the bits. bfloat16 has no NumPy type: its bits travel and rest as
uint16, and the kernels do its arithmetic in float32. `accumulate` is the type in which contributions are summed:
halves in float32, everything else in its own.
"""

from __future__ import annotations

import enum

import numpy as np


class DType(enum.IntEnum):
    """Element types; the values are the codes on the wire and never change."""

    FLOAT32 = 1
    FLOAT64 = 2
    FLOAT16 = 3
    BFLOAT16 = 4
    INT8 = 5
    INT32 = 6
    INT64 = 7
    UINT8 = 8

    @property
    def label(self) -> str:
        """The name a user knows, such as ``float32``."""
        return self.name.lower()

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The NumPy type of the bytes."""
        return _STORAGE[self]

    @property
    def accumulate(self) -> np.dtype[np.generic]:
        """The NumPy type of sums."""
        return _ACCUMULATE.get(self, _STORAGE[self])

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _STORAGE[self].itemsize

    @property
    def is_floating(self) -> bool:
        """Whether an optimizer can work on it."""
        return self in (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32, DType.FLOAT64)


_STORAGE: dict[DType, np.dtype[np.generic]] = {
    DType.FLOAT32: np.dtype("<f4"),
    DType.FLOAT64: np.dtype("<f8"),
    DType.FLOAT16: np.dtype("<f2"),
    DType.BFLOAT16: np.dtype("<u2"),
    DType.INT8: np.dtype("<i1"),
    DType.INT32: np.dtype("<i4"),
    DType.INT64: np.dtype("<i8"),
    DType.UINT8: np.dtype("<u1"),
}
_ACCUMULATE: dict[DType, np.dtype[np.generic]] = {
    DType.FLOAT16: np.dtype("<f4"),
    DType.BFLOAT16: np.dtype("<f4"),
}
_BY_NAME = {dtype.label: dtype for dtype in DType}


def from_name(name: str) -> DType:
    """The element type called `name` (``float32``, ``bfloat16``, …).

    Raises:
        TypeError: the type is not one that a key may have.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TypeError(f"values of dtype {name} are not supported; use one of {', '.join(_BY_NAME)}") from None
