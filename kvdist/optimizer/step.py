"""What an update is told beside its rule: the arrays, where they lie in their parameter, and its numbers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvdist.kernels.interface import Array


@dataclass(frozen=True, slots=True)
class Extent:
    """Which stretch of which parameter an array holds.

    Attributes:
        key: the parameter.
        shape: of the whole parameter.
        start: how many of its elements come before the array's first, in row-major order.
    """

    key: Hashable
    shape: tuple[int, ...]
    start: int = 0

    @property
    def size(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def row_length(self) -> int:
        """Elements of one row: of all that shares the first index."""
        return math.prod(self.shape[1:])


@dataclass(slots=True, eq=False)
class Piece:
    """One array of an update; see `SliceUpdater.update` for what each is."""

    index: Hashable
    weight: Array
    contributions: Sequence[Array]
    scales: Sequence[float]
    out: Array
    extent: Extent


@dataclass(slots=True, eq=False)
class Step:
    """One update of one piece of a parameter. Only to be read; it is not frozen because that would cost a microsecond.

    Attributes:
        lr: learning rate of this key in this update.
        wd: weight decay of this key in this update.
        count: how many updates the slice has had, this one included.
        extent: the slice's.
        start: elements of the parameter before the piece.
        scalars: the rule's own numbers, one for each of `Optimizer.initial_scalars`, moved on for this update.
        norms: lengths of the whole parameter that `Optimizer.measure` has asked for, in its order.
    """

    lr: float
    wd: float
    count: int
    extent: Extent
    start: int = 0
    scalars: tuple[float, ...] = ()
    norms: tuple[float, ...] = ()

    def moved(self, elements: int) -> Step:
        """The same update of a piece that begins so much later."""
        start = self.start + elements
        return Step(self.lr, self.wd, self.count, self.extent, start, self.scalars, self.norms)

    def knowing(self, norms: tuple[float, ...]) -> Step:
        """The same update with these norms."""
        return Step(self.lr, self.wd, self.count, self.extent, self.start, self.scalars, norms)
