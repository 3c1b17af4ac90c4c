"""First values of rows that are created at their first use.

A row's first value is a function of the initialiser, the row's id and the column, and of nothing else: it does not
depend on the number of servers, on the server that has the row, or on the order in which rows are touched. Random
values are counter-based: the seed and the id form a 64-bit counter, which a mixer scrambles. They are computed in
float64, rounded to float32, and then to the type of the table.

An initialiser travels in a message as the short text of `describe`, never as code.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.quantization import from_float32
from kvdist.schema import WHOLE_MAX, finite_number, whole_number

TEXT_CHARACTERS_MAX = 100
"""Length of the longest text that `initializer_from` reads."""

SCALE_MAX = 1e37
"""The largest scale: a normal number may be nine times as large, and must still be a float32."""

_CHUNK_ELEMENTS = 16 * 1024
"""Number of random elements that are generated at a time, so that intermediate arrays stay in the cache."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: consecutive multiples of it lie far apart."""


class Initializer(ABC):
    """Rule for the first values of rows. Instances are frozen and compare by value."""

    @abstractmethod
    def describe(self) -> str:
        """The text that `initializer_from` reads."""

    @abstractmethod
    def fill(self, ids: Array, rows: Array, dtype: DType) -> None:
        """Write the first values of rows.

        Args:
            ids: row ids, int64.
            rows: shape (k, row_length), of `dtype.storage`, C-contiguous; written.
            dtype: the element type.
        """

    def check(self, dtype: DType) -> None:  # noqa: B027  # zeros fit every type
        """Refuse an element type that cannot hold the values.

        Raises:
            ValueError: the type cannot; the message has the remedy.
        """

    def rows(self, ids: Array, row_length: int, dtype: DType) -> Array:
        """The first values of rows as a new one-dimensional array of `dtype.storage`, k·row_length elements.

        Args:
            ids: row ids, integers of at least 0, in any order.
            row_length: elements of a row.
            dtype: the element type.
        """
        values = np.empty((len(ids), row_length), dtype.storage)
        self.fill(np.asarray(ids, np.int64), values, dtype)
        return values.reshape(-1)


@dataclass(frozen=True)
class Zeros(Initializer):
    """All elements are 0."""

    def describe(self) -> str:
        """``zeros``."""
        return "zeros"

    def fill(self, ids: Array, rows: Array, dtype: DType) -> None:
        """See `Initializer.fill`."""
        rows.fill(0)


@dataclass(frozen=True)
class Constant(Initializer):
    """All elements are the same number.

    Attributes:
        value: the number, finite.
    """

    value: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "value", finite_number("the value of a constant initialiser", self.value))

    def describe(self) -> str:
        """The text of the initialiser, such as ``constant(0.5)``."""
        return f"constant({self.value!r})"

    def check(self, dtype: DType) -> None:
        """Refuse an integer type if the value is not a whole number within its range."""
        if not dtype.is_floating:
            bounds = np.iinfo(dtype.storage)
            if not (self.value.is_integer() and bounds.min <= self.value <= bounds.max):
                raise ValueError(f"rows of {dtype.label} cannot start as {self.value!r}: give a whole number in range")

    def fill(self, ids: Array, rows: Array, dtype: DType) -> None:
        """See `Initializer.fill`."""
        with np.errstate(over="ignore"):
            if dtype is DType.BFLOAT16:
                rows.fill(from_float32(np.array([self.value], np.float32), dtype)[0])
            else:
                rows.fill(self.value if dtype.is_floating else int(self.value))


class _Random(Initializer):
    """Random numbers. Columns 2j and 2j + 1 come from word j of the row."""

    _name: ClassVar[str]

    scale: float
    seed: int

    def __post_init__(self) -> None:
        scale = finite_number(f"the scale of {self._name}", self.scale)
        seed = whole_number(f"the seed of {self._name}", self.seed)
        if not 0 <= scale <= SCALE_MAX:
            raise ValueError(f"the scale of {self._name} must be at least 0 and at most {SCALE_MAX:g}, not {scale:g}")
        if not 0 <= seed <= WHOLE_MAX:
            raise ValueError(f"the seed of {self._name} must be from 0 to {WHOLE_MAX}, not {seed}")
        object.__setattr__(self, "scale", scale)
        object.__setattr__(self, "seed", seed)

    def describe(self) -> str:
        """The text of the initialiser, such as ``uniform(0.07,seed=3)``."""
        return f"{self._name}({self.scale!r},seed={self.seed})"

    def check(self, dtype: DType) -> None:
        """Refuse integer types."""
        if not dtype.is_floating:
            raise ValueError(
                f"rows of {dtype.label} cannot start as {self._name} numbers: use zeros or constant(1), say"
            )

    def fill(self, ids: Array, rows: Array, dtype: DType) -> None:
        """See `Initializer.fill`. Goes chunk by chunk."""
        row_length = rows.shape[1]
        columns = np.arange(1, (row_length + 1) // 2 + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        start = _mixed(np.array([self.seed], np.uint64) + np.uint64(_GOLDEN))
        count = max(1, _CHUNK_ELEMENTS // max(1, row_length))
        for first in range(0, len(ids), count):
            part = ids[first : first + count].astype(np.uint64)
            bases = _mixed((part + np.uint64(1)) * np.uint64(_GOLDEN) + start)
            even, odd = self._pairs(_mixed(bases[:, np.newaxis] + columns))
            values = np.empty((len(part), row_length), np.float32)
            values[:, 0::2] = even
            values[:, 1::2] = odd[:, : row_length // 2]
            with np.errstate(over="ignore"):
                if dtype is DType.BFLOAT16:
                    values = from_float32(values.reshape(-1), dtype).reshape(values.shape)
                rows[first : first + count] = values

    @abstractmethod
    def _pairs(self, words: Array) -> tuple[Array, Array]:
        """Two numbers of each random word, in float64."""


@dataclass(frozen=True)
class Uniform(_Random):
    """Numbers spread evenly between -scale and scale.

    Attributes:
        scale: half the width, at least 0.
        seed: a whole number; another seed, other numbers.
    """

    _name = "uniform"

    scale: float = 0.07
    seed: int = 0

    def _pairs(self, words: Array) -> tuple[Array, Array]:
        """Map each half of a word to the middle of a step, out of 2^32 equal steps."""
        step = self.scale * 2.0**-31
        high = (words >> np.uint64(32)).astype(np.float64)
        low = (words & np.uint64(0xFFFFFFFF)).astype(np.float64)
        return (high - (2.0**31 - 0.5)) * step, (low - (2.0**31 - 0.5)) * step


@dataclass(frozen=True)
class Normal(_Random):
    """Normally distributed numbers around 0.

    Attributes:
        scale: the standard deviation, at least 0.
        seed: a whole number; another seed, other numbers.
    """

    _name = "normal"

    scale: float = 0.01
    seed: int = 0

    def _pairs(self, words: Array) -> tuple[Array, Array]:
        """The halves of a word are a point of the unit square; Box and Muller make two normal numbers of it."""
        radius = (words >> np.uint64(32)).astype(np.float64)
        np.add(radius, 1.0, out=radius)  # above 0, for the logarithm
        np.multiply(radius, 2.0**-32, out=radius)
        np.log(radius, out=radius)
        np.multiply(radius, -2.0, out=radius)
        np.sqrt(radius, out=radius)
        np.multiply(radius, self.scale, out=radius)
        cosine, sine = _direction(words)
        return np.multiply(radius, cosine, out=cosine), np.multiply(radius, sine, out=sine)


_RANDOM = {"uniform": Uniform, "normal": Normal}
_NUMBER = r"([-+]?[0-9]{1,30}(?:\.[0-9]{0,30})?(?:[eE][-+]?[0-9]{1,4})?)"
_CONSTANT_TEXT = re.compile(rf"constant\( *{_NUMBER} *\)", re.ASCII)
_RANDOM_TEXT = re.compile(rf"(uniform|normal)\( *{_NUMBER} *(?:, *seed *= *([0-9]{{1,16}}) *)?\)", re.ASCII)


def initializer_from(text: str | Initializer) -> Initializer:
    """The initialiser that a text names; an `Initializer` is returned itself.

    Args:
        text: ``zeros``, ``constant(0.5)``, ``uniform(0.07)`` or ``normal(0.01)``, the last two perhaps with a seed:
            ``normal(0.01,seed=3)``. Untrusted.

    Raises:
        ValueError: the text is of another form, or a number is infinite, negative or too large.
    """
    if isinstance(text, Initializer):
        return text
    if isinstance(text, str) and len(text) <= TEXT_CHARACTERS_MAX:
        if text == "zeros":
            return Zeros()
        if found := _CONSTANT_TEXT.fullmatch(text):
            return Constant(float(found[1]))
        if found := _RANDOM_TEXT.fullmatch(text):
            return _RANDOM[found[1]](float(found[2]), int(found[3] or 0))
    raise ValueError(
        f"an initialiser is written zeros, constant(0.5), uniform(0.07) or normal(0.01,seed=3), not {text!r:.80}"
    )


def _mixed(words: Array) -> Array:
    """Scramble 64-bit words in place, bijectively: the last steps of splitmix64 (Steele, Lea and Flood, 2014)."""
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def _direction(words: Array) -> tuple[Array, Array]:
    """Cosine and sine of uniformly distributed angles, from the lower halves of words.

    Their lower 30 bits are an angle of at most 45 degrees; bit 31 mirrors it, bit 30 exchanges the axes. Series of so
    few terms are exact to 3e-9, a third of the work of the functions for any angle, and have the same bits everywhere.
    """
    exchanged = words & np.uint64(0x40000000) != 0
    angle = (words & np.uint64(0x3FFFFFFF)).astype(np.float64)
    angle -= 2.0**29 - 0.5
    angle *= math.pi * 2.0**-31
    square = angle * angle
    cosine = _series(square, (-1 / 3628800, 1 / 40320, -1 / 720, 1 / 24, -1 / 2, 1.0))
    sine = _series(square, (1 / 362880, -1 / 5040, 1 / 120, -1 / 6, 1.0))
    sine *= angle
    signs = cosine.view(np.uint64)
    signs ^= (words & np.uint64(0x80000000)) << np.uint64(32)  # mirrored
    return np.where(exchanged, sine, cosine), np.where(exchanged, cosine, sine)


def _series(variable: Array, factors: tuple[float, ...]) -> Array:
    """Value of the polynomial with these factors, the factor of the highest power first."""
    total = np.multiply(variable, factors[0])
    for factor in factors[1:-1]:
        total += factor
        total *= variable
    total += factors[-1]
    return total
