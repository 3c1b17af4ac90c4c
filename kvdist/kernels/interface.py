"""Computations on arrays, as a table of functions that every backend fills.

Invariants: arrays are one-dimensional, C-contiguous and of `DType.storage` (bfloat16 as its bits in uint16) or, where a
function documents it, of `DType.accumulate`. A kernel never keeps a reference to an array. A kernel checks its
arguments before it writes. Backends do not inherit: a backend is the reference with some fields replaced
(`dataclasses.replace`) by functions that were measured to be faster and that produce the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdist.dtypes import DType

Array = NDArray[Any]

CHUNK_ELEMENTS = 64 * 1024
"""Number of elements that an element-wise rule of several passes takes at a time.

A chunk costs some five microseconds of calls, and its arrays (256 KiB each in float32) should stay in the cache from
pass to pass. On slices of 4 MiB with a 32 MiB cache, whole slices were up to 10 % faster for sgd and adam (20 % with
momentum), 32 Ki 10 to 20 % and 8 Ki 70 to 100 % slower: 64 Ki is the price of scratch memory that stays small.
"""

SOURCES_MAX = 4
"""Number of arrays that a compiled kernel sums in a single call."""

STATES_MAX = 3
"""Largest number of states of a rule for which a kernel is compiled."""

NUMBERS_MAX = 10
"""Largest number of numbers of an `Equation`."""

Expression = Callable[..., Any]
"""A rule: a function of gradient, weight, states and numbers. See `kvdist.kernels.elementwise`."""


class WeightedSum(Protocol):
    """out = Σ scales[i] · contributions[i], summed in the order of `contributions`, in `dtype.accumulate`."""

    def __call__(self, contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        """Write the sum to `out`.

        When all scales are equal, the sum is multiplied once, at its end; otherwise each contribution is multiplied
        before it is added. A scale of exactly 1 multiplies nothing. No contributions give zeros. Integers wrap around.
        Overflow to infinity gives no warning.

        Args:
            contributions: arrays of `dtype.storage` and the length of `out`; may be read-only and unaligned.
            scales: a finite number for each contribution; integers take only 1.
            dtype: the element type of the contributions.
            out: an array that overlaps no contribution. Its type is the type of the result: `dtype.accumulate`, or
                `dtype.storage`, to which halves are rounded once, to nearest even.

        Raises:
            TypeError: an array does not have the type of `dtype`.
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
    """Halves from float32: rounded to nearest even; too large values become infinite, NaN stays NaN."""

    def __call__(self, values: Array, dtype: DType, out: Array | None = None) -> Array:
        """Return `out`, or a new array of `dtype.storage` of the length of `values`.

        Raises:
            TypeError: `dtype` is not a half.
        """


class Equation(NamedTuple):
    """An update of an optimizer: its rule, and the numbers of this update.

    Attributes:
        expression: the rule; see `kvdist.kernels.elementwise`.
        numbers: last arguments of the expression; each is rounded once to the type of the arrays. At most
            `NUMBERS_MAX`.
        places: places, among the optimizer's states, of the states that the expression takes; None for all.
        is_negative: whether the gradient is negated first, because the rule maximises.
    """

    expression: Expression
    numbers: tuple[float, ...]
    places: tuple[int, ...] | None = None
    is_negative: bool = False

    @property
    def name(self) -> str:
        """Name of the rule for messages; with its module, unless the rule is of this package."""
        rule = self.expression
        ours = rule.__module__.startswith("kvdist.optimizer.")
        return rule.__name__ if ours else f"{rule.__module__}.{rule.__qualname__}"

    def chosen(self, states: Sequence[Array]) -> Sequence[Array]:
        """The states that the expression takes, out of all states of the optimizer."""
        return states if self.places is None else [states[place] for place in self.places]


class UpdateKernel(NamedTuple):
    """Name of a compiled kernel of an update; each name is compiled once.

    Attributes:
        expression: the rule.
        states: number of its states.
        label: element type, ``float32`` or ``float64``.
        by_rows: whether the kernel updates rows of a matrix where they lie.
    """

    expression: Expression
    states: int
    label: str
    by_rows: bool

    def __str__(self) -> str:
        return f"{self.expression.__name__}{'_rows' if self.by_rows else ''}_{self.label}"


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
        dtype: DType,
        master: Array | None = None,
    ) -> bool:
        """Make the update and return True, or do nothing and return False: then the caller makes it in many passes.

        The result has the same bits either way. Arguments have been checked; the kernel refuses none.

        Args:
            equation: the rule and its numbers.
            weight: the present weight; only read.
            contributions: as of `WeightedSum`, and of the type of `weight`.
            scales: as of `WeightedSum`.
            clip: elements of the scaled sum are cut to ±clip; None for no cut.
            out: receives the new weight; may be `weight`, which may be a contribution too; overlaps nothing else.
            states: states of `Equation.chosen`, of `dtype.accumulate`; updated in place.
            dtype: element type of the weight and the contributions. Halves are widened, updated in float32 and rounded
                to nearest even.
            master: the float32 weight behind a half weight, updated in its place; where it does not round to the stored
                weight, another writer has changed that, and the master follows first. None for no master.
        """


Rows = tuple[Array, Array]
"""Row ids, (k,) int64 and strictly increasing, and the values of those rows, (k, width)."""


class UpdateRows(Protocol):
    """`FusedUpdate` of some rows of a matrix in place: each row is read once and written once."""

    def __call__(
        self,
        equation: Equation,
        weight: Array,
        slots: Array,
        ids: Array,
        contributions: Sequence[Rows],
        scales: Sequence[float],
        clip: float | None,
        states: Sequence[Array],
        dtype: DType,
    ) -> bool:
        """Make the update and return True, or do nothing and return False: then the caller gathers the rows first.

        The result has the bits of `FusedUpdate`. Arguments have been checked; the kernel refuses none.

        Args:
            equation: the rule.
            weight: shape (rows, width), C-contiguous, of `dtype.storage`; updated in place.
            slots: (k,) int64, the rows of `weight` to be updated, each once.
            ids: (k,) int64, strictly increasing: the id of each slot.
            contributions: rows whose ids are among `ids`. A contribution that lacks a row adds zeros to it.
            scales: a finite number for each contribution.
            clip: elements of the scaled sum are cut to ±clip; None for no cut.
            states: states of `Equation.chosen`, of `dtype.accumulate` and with a row for each slot; updated in place.
                If a state does not have the width of `weight`, the kernel does nothing.
            dtype: element type of the weight and the contributions.
        """


class RoundToHalf(Protocol):
    """Rounding of float32 to halves; the rounding error is kept for the next call."""

    def __call__(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        """Write grad + residual, rounded to the nearest half, to `out`, and keep the rounding error in `residual`.

        A finite sum that is too large becomes the largest half, and the rest stays in the residual. Infinities and NaN
        are written to `out` and leave 0 in the residual.

        Args:
            grad: float32; only read, and may be read-only.
            residual: float32, of the length of `grad`; updated in place.
            dtype: type of the halves.
            out: array of `dtype.storage`, of the length of `grad`.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class Quantise(Protocol):
    """Codes of 1 or 2 bits for float32 elements; the error is kept for the next call. See `kernels.quantization`."""

    def __call__(self, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """Write the codes of grad + residual to `out`, and keep the quantization error in `residual`.

        Args:
            grad: float32; only read, and may be read-only.
            residual: float32, of the length of `grad`; updated in place.
            threshold: threshold of the codes, representable in float32.
            out: uint8: four bytes for each sixteen (2-bit) or thirty-two (1-bit) elements, rounded up.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class Dequantise(Protocol):
    """float32 values of the codes of `Quantise`."""

    def __call__(self, data: Array, threshold: float, out: Array) -> None:
        """Write the value of each code of `data` to `out`, whose length is the number of codes.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class NewArray(Protocol):
    """A new array in the memory of the backend."""

    def __call__(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return an array of `count` elements: uninitialized from `Kernels.empty`, 0 from `Kernels.zeros`."""


class Squares(Protocol):
    """The sum of squares of an array of a floating type that NumPy has, in float64."""

    def __call__(self, values: Array) -> float:
        """Return the sum of squares; 0 for an empty array."""


@dataclass(frozen=True)
class Kernels:
    """A backend: its name for the log, the number of elements of a chunk (see `CHUNK_ELEMENTS`), and its functions.

    The arrays of a backend for GPUs are those of its library, in the device's memory; see `Device`.
    """

    name: str
    chunk_elements: int
    active: Callable[[], AbstractContextManager[object]]
    """Context in which NumPy's functions on the backend's arrays, and assignments to them, run in the order of its
    kernels."""
    empty: NewArray
    zeros: NewArray
    squares: Squares
    weighted_sum: WeightedSum
    to_float32: ToFloat32
    from_float32: FromFloat32
    fused_update: FusedUpdate
    update_rows: UpdateRows
    round_to_half: RoundToHalf
    quantise_2bit: Quantise
    dequantise_2bit: Dequantise
    quantise_1bit: Quantise
    dequantise_1bit: Dequantise


class DeviceEvent(Protocol):
    """A moment in the order of a device's stream."""

    def wait(self) -> None:
        """Block this thread, and no other, until all work enqueued before the event is done."""


class Device(Protocol):
    """A GPU: the interface between kvdist's arithmetic on a device and the libraries that drive the device.

    Invariants:

    * Arrays are CuPy's: one-dimensional, C-contiguous, in the memory of the device, of `DType.storage` or
      `DType.accumulate`. They have ``size``, ``dtype``, ``nbytes``, can be cut with slices of step 1, and, under
      `Kernels.active`, ``array[...] = x`` fills them with a number or with another array of the device.
    * Everything runs later, in order, on the stream that is current in the calling thread: torch's, where torch has
      begun to use CUDA, else CuPy's. Only `DeviceEvent.wait`, and methods whose docstring states it, wait.
    * Only this device is touched; the device that was current before a call is current after it.
    * Memory comes from torch's allocator where torch has begun to use CUDA, so that the two do not starve each other.
    * Errors of the libraries are raised as `DeviceError`.
    """

    @property
    def name(self) -> str:
        """Name of the device, such as ``cuda:0``."""

    @property
    def index(self) -> int:
        """Index of the device among the visible GPUs."""

    @property
    def library(self) -> str:
        """Names and versions of the libraries that drive the device, for the log."""

    @property
    def kernels(self) -> Kernels:
        """The functions on the device's arrays. All take and return arrays of this device."""

    # Memory.

    def view(self, value: Any, dtype: DType) -> Array:
        """The memory of a value on this device as bits; nothing is copied.

        Args:
            value: a contiguous array with ``__cuda_array_interface__``, or a torch tensor, of `dtype`. bfloat16, which
                the interface does not have, comes as a torch tensor, or as uint16.
            dtype: the element type of the value.
        """

    def upload(self, host: Array, out: Array) -> None:
        """Enqueue a copy from host memory. `host` must not change before a wait for a later `mark`."""

    def download(self, array: Array, host: Array) -> None:
        """Enqueue a copy to host memory of the same type and length, which is valid after a wait for a later `mark`."""

    def copy(self, array: Array, out: Array, source: Device) -> None:
        """Copy an array of `source`, this device or another, to an array of this device; directly if `reaches`.

        The current streams of both devices wait for each other, and this thread does not: earlier work of `source`
        comes first, and its later work, such as to write the array anew, comes after.
        """

    def reaches(self, other: Device) -> bool:
        """Whether both devices copy directly, not through host memory."""

    def mark(self) -> DeviceEvent:
        """An event at the present end of this thread's stream."""

    def stream(self) -> Any:
        """The stream that is current in this thread, for `on`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Context in which a stream of this device, from any thread, is the current stream of this thread."""

    def pin(self, host: Array) -> Any:
        """Register host memory, so that copies from and to it run beside the program and at full speed.

        Returns:
            An object that keeps the memory registered until it is released; None if the memory could not be registered,
            which only makes copies slower.
        """

    # Arithmetic that only devices need.

    def pack(self, sources: Sequence[Array], offsets: Sequence[int], out: Array) -> None:
        """Copy many small arrays into a single array, in a single launch.

        Args:
            sources: arrays of any types.
            offsets: byte at which each source begins in `out`: a multiple of its element size. Bytes between sources
                stay as they are.
            out: array of uint8.
        """

    def unpack(self, source: Array, offsets: Sequence[int], outs: Sequence[Array]) -> None:
        """Fill many small arrays from a single array of uint8: the opposite of `pack`."""

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        """Add the values of 2-bit codes to `total`, of float32. The codes are as of `kvdist.kernels.quantization`."""

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        """Add the values of 1-bit codes to `total`, of float32."""

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        """Sum rows that share an index. Waits for the device, which alone knows the number of different indices.

        Args:
            indices: int64, an index for each row, in any order.
            rows: the rows, concatenated, of `dtype`; halves are summed in float32 and rounded once.
            dtype: element type of the rows.

        Returns:
            The different indices in ascending order, and as many rows. Rows that share an index are summed in their
            order.
        """

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        """table[indices[i]] += rows[i], of a floating type that NumPy has. No index comes twice."""

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """Whether no element is infinite or NaN: a single launch over all arrays, and a single wait."""
