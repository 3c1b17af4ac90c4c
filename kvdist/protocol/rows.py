"""What is said about tables of rows: keys of which a message carries some rows, each with its id.

A table has one slice on each server that keeps rows of it. Row ids are those of the whole table, 64 bits, strictly
ascending within a message's slice. In `arrays` each slice has two entries: the ids (int64), then the values of those
rows, one after the other. A contribution too large for a message comes in several, all but the last with `MORE`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvdist.protocol.arrays import U8, U32, Arrays

ROWS = "rows"
"""The form of a table whose first values are sent."""

MORE = 128
"""A flag: further rows of the same contribution, or of the same first values, follow."""


@dataclass(frozen=True, slots=True, eq=False)
class InitRows:
    """Worker 0 → server: the first values of rows; rows that are not named are zero. Repeated, it changes nothing."""

    KIND: ClassVar[int] = 60
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    flags: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class PushRows:
    """Worker → server: contributions of rows; one without rows counts, too. The other columns are those of `Push`."""

    KIND: ClassVar[int] = 61
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    samples: U32
    flags: U8
    settings: tuple[tuple[float, float, float], ...]
    setting_of: U8
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class PullRows:
    """Worker → server: send these rows as soon as my first `steps` pushes are counted and `versions` is reached.

    `arrays` has one entry for each slice: the ids.
    """

    KIND: ClassVar[int] = 62
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    steps: U32
    versions: U32
    arrays: Arrays


@dataclass(frozen=True, slots=True, eq=False)
class RowValues:
    """Server → worker: the values of the rows that `PullRows` named, in its order. One entry for each slice."""

    KIND: ClassVar[int] = 63
    SEQUENCED: ClassVar[bool] = True
    runs: U32
    ids: U32
    versions: U32
    arrays: Arrays
