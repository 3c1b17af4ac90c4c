"""The element types a key may have: a closed table, so that no peer can name a type we did not choose.

`storage` is the NumPy type that carries the bits. bfloat16 has no NumPy type: its bits travel and rest as
uint16, and the kernels do its arithmetic in float32. `accumulate` is the type in which contributions are summed:
halves in float32, all other types in the same type.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np


class DType(enum.IntEnum):
    """Element types; the values are the codes on the wire and never change.

    Attributes:
        storage: the NumPy type of the bytes.
        accumulate: the NumPy type of sums.
        itemsize: bytes per element.
        label: the name a user knows, such as ``float32``.
        is_floating: whether an optimizer can work on it.
    """

    storage: np.dtype[Any]
    accumulate: np.dtype[Any]
    itemsize: int
    label: str
    is_floating: bool

    FLOAT32 = 1, "<f4", "<f4"
    FLOAT64 = 2, "<f8", "<f8"
    FLOAT16 = 3, "<f2", "<f4"
    BFLOAT16 = 4, "<u2", "<f4"
    INT8 = 5, "<i1", "<i1"
    INT32 = 6, "<i4", "<i4"
    INT64 = 7, "<i8", "<i8"
    UINT8 = 8, "<u1", "<u1"

    def __new__(cls, code: int, storage: str, accumulate: str) -> DType:
        # Plain attributes, not properties that look something up: servers read them for every slice.
        member = int.__new__(cls, code)
        member._value_ = code
        member.storage = np.dtype(storage)
        member.accumulate = np.dtype(accumulate)
        member.itemsize = member.storage.itemsize
        member.is_floating = member.accumulate.kind == "f"
        return member

    def __init__(self, *_: object) -> None:
        self.label = self.name.lower()

    @property
    def of_states(self) -> DType:
        """The element type of an optimizer's states for elements of this type."""
        return DType.FLOAT64 if self is DType.FLOAT64 else DType.FLOAT32


_BY_NAME = {dtype.label: dtype for dtype in DType}


def from_name(name: str) -> DType:
    """The element type called `name` (``float32``, ``bfloat16``, …).

    Raises:
        TypeError: a key cannot have this type.
    """
    try:
        return _BY_NAME[name]
    except KeyError:
        raise TypeError(f"values of dtype {name} are not supported; use one of {', '.join(_BY_NAME)}") from None
