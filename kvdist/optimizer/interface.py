"""What a server needs of whoever sums and updates its slices: the seam between its host and a GPU of it.

Rules that hold at this seam: arrays are those of the host's memory, going in and coming out, wherever the work is done;
and the bits are the same wherever it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Kernels
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import Part, SliceState
from kvdist.optimizer.step import Extent, Piece


class SliceUpdater(Protocol):
    """An optimizer and the states of all slices that it has updated. For one thread."""

    @property
    def optimizer(self) -> Optimizer:
        """The rule and its numbers."""

    @property
    def states(self) -> Mapping[Hashable, SliceState]:
        """The state of each index that has been updated. The arrays may be live: copy what must not change."""

    def update(
        self,
        index: Hashable,
        weight: Array,
        contributions: Sequence[Array],
        scales: Sequence[float],
        dtype: DType,
        out: Array,
        lr: float | None = None,
        wd: float | None = None,
        extent: Extent | None = None,
    ) -> None:
        """Sum the contributions, apply the rule, write the new weight to `out`. On an error nothing has changed.

        Args:
            index: names the state, such as a key and the number of its slice.
            weight: the present weight, one-dimensional, of `dtype.storage`. It is only read. If it was the `out` of
                the update before under this index, it still has what that wrote.
            contributions: gradients of the same length and type; none at all is a gradient of zeros.
            scales: a finite factor for each contribution.
            dtype: the element type.
            out: another array like `weight`, or `weight` itself; it overlaps nothing else.
            lr: what `Optimizer.pushed_lr` said where the gradient comes from; None for this optimizer's word on a key
                called `index`.
            wd: weight decay, likewise.
            extent: where the array lies in its parameter; None for a whole one-dimensional parameter called `index`.

        Raises:
            TypeError: the dtype is not a floating type, or an array has another type.
            ValueError: lengths differ, a number is not finite, or the rule needs more than this array.
        """

    def update_together(
        self, pieces: Sequence[Piece], dtype: DType, lr: float | None = None, wd: float | None = None
    ) -> None:
        """Update all pieces of one parameter. A rule that needs norms can have them only so, or of one whole piece.

        Args:
            pieces: in the order of their elements.
            dtype, lr, wd: as of `update`.

        Raises:
            TypeError, ValueError: as of `update`; nothing has changed.
        """

    def restore(self, index: Hashable, state: SliceState | None) -> None:
        """Go on from this state, which is the updater's from now on. It fits the array called `index`.

        None: as if it had never been updated.
        """

    def joinable(self, indices: Iterable[Hashable]) -> bool:
        """Whether these have had the same history, so that they can go on as one."""

    def join(self, index: Hashable, parts: Sequence[Part], size: int, dtype: DType) -> None:
        """Make one state, called `index`, of those of its parts; one copy. Elements of no part start as zeros.

        Args:
            index: names the longer array.
            parts: where the arrays with a state of their own lie in it; they must be `joinable`.
            size: its elements.
            dtype: its element type.
        """

    def split(self, index: Hashable, parts: Sequence[Part]) -> None:
        """Give each part its stretch of the state called `index`: the opposite of `join`, without a copy."""


@dataclass(frozen=True)
class Arithmetic:
    """Who computes for the slices of a server.

    Attributes:
        kernels: sum, decode and cast.
        new_updater: what updates the slices of a store with an optimizer. It raises `DeviceError` where that optimizer
            cannot run.
    """

    kernels: Kernels
    new_updater: Callable[[Optimizer], SliceUpdater]
