"""What is computed on arrays, as a table of functions: the seam that every backend fills.

Rules that hold at this seam: arrays are one-dimensional, C-contiguous and of `DType.storage` (bfloat16 travels as the
bits in uint16) or, where a function says so, of `DType.accumulate`. A kernel never keeps a reference to an array. A
kernel checks its arguments before it writes. There is no inheritance: a backend is the reference with some fields
replaced (`dataclasses.replace`) by functions that were measured to be faster and that give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from numpy.typing import NDArray

from kvdist.dtypes import DType

Array = NDArray[Any]

CHUNK_ELEMENTS = 64 * 1024
"""How many elements an element-wise rule of several passes takes at a time.

A chunk costs some five microseconds of calls, and its arrays (256 KiB each in float32) should stay in the cache from
pass to pass. On slices of 4 MiB with a 32 MiB cache, whole slices were up to 10 % faster for sgd and adam (20 % with
momentum), 32 Ki 10 to 20 % and 8 Ki 70 to 100 % slower: 64 Ki is the price of scratch memory that stays small.
"""

SOURCES_MAX = 4
"""How many arrays a compiled kernel sums in one call."""

NUMBERS_MAX = 7
"""How many scalars an `Equation` has at most."""


class WeightedSum(Protocol):
    """out = Σ scales[i] · contributions[i], added in the order given, in `dtype.accumulate`."""

    def __call__(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """Write the sum to `out`.

        When all scales are equal, the sum is multiplied once, at its end; otherwise each contribution is multiplied
        before it is added. A scale of exactly 1 multiplies nothing. No contributions give zeros. Integers wrap around.
        Overflow to infinity gives no warning.

        Args:
            contributions: arrays of `dtype.storage` and the length of `out`; may be read-only and unaligned.
            scales: one finite number for each contribution; integers take only 1.
            dtype: the element type of the contributions.
            out: an array that overlaps no contribution. Its own type says what is written: `dtype.accumulate`, or
                `dtype.storage`, to which halves are rounded once, to nearest even.

        Raises:
            TypeError: an array has another type than `dtype` says.
            ValueError: lengths differ, or an integer contribution has a scale.
        """


class ToFloat32(Protocol):
    """The exact float32 values of float16 or bfloat16."""

    def __call__(self, bits: Array, dtype: DType, out: Array | None = None) -> Array:
        """Return `out`, or a new float32 array of the length of `bits`.

        Raises:
            TypeError: `dtype` is not a half.
        """


class FromFloat32(Protocol):
    """Halves from float32: rounded to nearest even; what is too large becomes infinite, NaN stays NaN."""

    def __call__(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        """Return `out`, or a new array of `dtype.storage` of the length of `values`.

        Raises:
            TypeError: `dtype` is not a half.
        """


class Equation(NamedTuple):
    """One update of an optimizer as a compiled kernel needs it: which rule, and its scalars.

    Attributes:
        name: a rule that backends may know: ``sgd``, ``sgd_momentum``, ``nag``, ``adam``, ``adamw``.
        numbers: in the rule's order; each is rounded once to the type of the arrays. At most `NUMBERS_MAX`.
    """

    name: str
    numbers: tuple[float, ...]


class FusedUpdate(Protocol):
    """Sum, scale, clip and apply an optimizer's rule, reading and writing memory once."""

    def __call__(
        self,
        equation: Equation,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        clip: float | None,
        out: Array,
        states: Sequence[Array],
    ) -> bool:
        """Do all of it and return True, or nothing and return False: then the caller goes the way of many passes.

        The result has the same bits either way. Arguments have been checked; none is refused here.

        Args:
            equation: the rule.
            weight: the present weight; only read.
            contributions: as of `WeightedSum`, and of the type of `weight`.
            scales: likewise.
            clip: elements of the scaled sum are cut to ±clip; None for no cut.
            out: receives the new weight; may be `weight`, overlaps nothing else.
            states: the rule's arrays, updated in place.
        """


@dataclass(frozen=True)
class Kernels:
    """One backend: a name for the log, and its functions."""

    name: str
    weighted_sum: WeightedSum
    to_float32: ToFloat32
    from_float32: FromFloat32
    fused_update: FusedUpdate
