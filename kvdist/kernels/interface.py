"""What is computed on arrays, as a table of functions: the seam that every backend fills.

Rules that hold at this seam: arrays are one-dimensional, C-contiguous and of `DType.storage` (bfloat16 travels as the
bits in uint16) or, where a function says so, of `DType.accumulate`. A kernel never keeps a reference to an array. A
kernel checks its arguments before it writes. There is no inheritance: a backend is the reference with some fields
replaced (`dataclasses.replace`) by functions that were measured to be faster and that give the same bits.
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
"""How many elements an element-wise rule of several passes takes at a time.

A chunk costs some five microseconds of calls, and its arrays (256 KiB each in float32) should stay in the cache from
pass to pass. On slices of 4 MiB with a 32 MiB cache, whole slices were up to 10 % faster for sgd and adam (20 % with
momentum), 32 Ki 10 to 20 % and 8 Ki 70 to 100 % slower: 64 Ki is the price of scratch memory that stays small.
"""

SOURCES_MAX = 4
"""How many arrays a compiled kernel sums in one call."""

STATES_MAX = 3
"""How many states a rule has at most for which a kernel is compiled."""

NUMBERS_MAX = 10
"""How many numbers an `Equation` has at most."""

Expression = Callable[..., Any]
"""A rule: a function of gradient, weight, states and numbers. See `kvdist.kernels.elementwise`."""


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
    """One update of an optimizer: its rule, and the numbers of this update.

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
        """Name of the rule: for messages, and by which kernels of GPUs know the rules of this package."""
        rule = self.expression
        ours = rule.__module__.startswith("kvdist.optimizer.")
        return rule.__name__ if ours else f"{rule.__module__}.{rule.__qualname__}"

    def chosen(self, states: Sequence[Array]) -> Sequence[Array]:
        """The states that the expression takes, out of all states of the optimizer."""
        return states if self.places is None else [states[place] for place in self.places]


class UpdateKernel(NamedTuple):
    """What names a compiled kernel of an update: it is compiled once for each of these.

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
        """Do all of it and return True, or nothing and return False: then the caller goes the way of many passes.

        The result has the same bits either way. Arguments have been checked; none is refused here.

        Args:
            equation: the rule and its numbers.
            weight: the present weight; only read.
            contributions: as of `WeightedSum`, and of the type of `weight`.
            scales: likewise.
            clip: elements of the scaled sum are cut to ±clip; None for no cut.
            out: receives the new weight; may be `weight`, which may be a contribution too; overlaps nothing else.
            states: those of `Equation.chosen`, of `dtype.accumulate`; updated in place.
            dtype: of the weight and the contributions. Halves are widened, updated in float32 and rounded to nearest
                even.
            master: the float32 weight behind a half one, updated in its place; where it does not round to the stored
                weight, another writer has changed that, and the master follows first. None for no master.
        """


Rows = tuple[Array, Array]
"""Row ids, (k,) int64 and strictly increasing, and the values of those rows, (k, width)."""


class UpdateRows(Protocol):
    """`FusedUpdate` of some rows of a matrix where they lie: each is read once and written once."""

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
        """Do all of it and return True, or nothing and return False: then the caller gathers the rows first.

        The result has the bits of `FusedUpdate`. Arguments have been checked; none is refused here.

        Args:
            equation: the rule.
            weight: shape (rows, width), C-contiguous, of `dtype.storage`; updated in place.
            slots: (k,) int64, the rows of `weight` to be updated, each once.
            ids: (k,) int64, strictly increasing: the id of each of them.
            contributions: their ids are among `ids`. One that lacks a row adds zeros to it.
            scales: one finite number for each contribution.
            clip: elements of the scaled sum are cut to ±clip; None for no cut.
            states: those of `Equation.chosen`, of `dtype.accumulate` and with a row for each slot; updated in place.
                Where one has not the width of `weight`, nothing is done.
            dtype: of the weight and the contributions.
        """


class RoundToHalf(Protocol):
    """float32 to halves; what rounding loses is kept for the next time."""

    def __call__(self, grad: Array, residual: Array, dtype: DType, out: Array) -> None:
        """Add `grad` to `residual`, round the sum to the nearest half, and take that from it.

        What is finite and too large becomes the largest half, and the rest stays in the residual. Infinities and NaN
        are passed on and leave nothing there.

        Args:
            grad: float32; only read, and may be read-only.
            residual: float32, as long; updated in place.
            dtype: of the halves.
            out: of its storage type, as long.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class Quantise(Protocol):
    """float32 into one or two bits an element; what that loses is kept for the next time: `kernels.quantization`."""

    def __call__(self, grad: Array, residual: Array, threshold: float, out: Array) -> None:
        """Add `grad` to `residual`, write the codes of the sum, and take from it what they are worth.

        Args:
            grad: float32; only read, and may be read-only.
            residual: float32, as long; updated in place.
            threshold: a number of float32.
            out: uint8: four bytes for each sixteen (2-bit) or thirty-two (1-bit) elements, rounded up.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class Dequantise(Protocol):
    """What the codes of `Quantise` are worth, in float32."""

    def __call__(self, data: Array, threshold: float, out: Array) -> None:
        """Write what each code of `data` is worth into `out`, whose length says how many there are.

        Raises:
            TypeError, ValueError: an array has another type or length.
        """


class NewArray(Protocol):
    """A new array, where the backend's arrays lie."""

    def __call__(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return `count` elements: of `Kernels.empty` their content means nothing, of `Kernels.zeros` they are 0."""


class Squares(Protocol):
    """The sum of squares of an array of a floating type that NumPy has, in float64."""

    def __call__(self, values: Array) -> float:
        """Return it; 0 for no elements."""


@dataclass(frozen=True)
class Kernels:
    """One backend: a name for the log, how many elements a rule of several passes takes at a time, and its functions.

    The arrays of a backend for GPUs are those of its library, in the device's memory; see `kvdist.kernels.interface`.
    """

    name: str
    chunk_elements: int
    active: Callable[[], AbstractContextManager[object]]
    """In it NumPy's functions on the backend's arrays, and assignments to them, run in the order of its own."""
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
        """Block this thread, and no other, until everything that was asked for before the mark is done."""


class Device(Protocol):
    """One GPU, as one library drives it: the seam between what kvdist does with arrays on a device and who does it.

    Rules that hold at this seam:

    * Arrays are those of the library: one-dimensional, C-contiguous, in the memory of the device, of `DType.storage` or
      `DType.accumulate`. They have ``size``, ``dtype``, ``nbytes``, can be cut with slices of step 1, and, under
      `Kernels.active`, ``array[...] = x`` fills them with a number or with another array of the device.
    * Everything runs later, in order, on the stream that is current in the calling thread: torch's, where torch has
      begun to use CUDA, else the library's own. Only `DeviceEvent.wait`, and methods that say so, wait.
    * Only this device is touched; the device that was current before a call is current after it.
    * Memory comes from torch's allocator where torch has begun to use CUDA, so that the two do not starve each other.
    * Errors of the library are raised as `DeviceError`.
    """

    @property
    def name(self) -> str:
        """Such as ``cuda:0``."""

    @property
    def index(self) -> int:
        """Its number among the visible ones."""

    @property
    def library(self) -> str:
        """What drives it, with its version, for the log."""

    @property
    def kernels(self) -> Kernels:
        """The functions on its arrays. All take and give arrays of this device."""

    def runs(self, equation: Equation | None) -> bool:
        """Whether an update by a rule can run here: by a kernel, or function by function on the library's arrays.

        Args:
            equation: the rule's; None for a rule that has none.
        """

    # Memory.

    def view(self, value: Any, dtype: DType) -> Array:
        """The memory of a value on this device as bits; nothing is copied.

        Args:
            value: a contiguous array with ``__cuda_array_interface__``, or a torch tensor, of `dtype`. bfloat16, which
                the interface does not have, comes as a torch tensor, or as uint16.
            dtype: its element type.
        """

    def upload(self, host: Array, out: Array) -> None:
        """Copy from host memory. `host` must not change before a mark made behind this has been waited for."""

    def download(self, array: Array, host: Array) -> None:
        """Copy to host memory of the same type and length. It is there when a mark made behind this was waited for."""

    def copy(self, array: Array, out: Array, source: Device) -> None:
        """Copy an array of `source`, this device or another, to one of this device; directly where the two can.

        The current streams of the two wait for each other, and this thread does not: what was asked of `source` before
        comes first, and what is asked of it later, such as to write the array anew, comes after.
        """

    def reaches(self, other: Device) -> bool:
        """Whether the two copy directly, not through the memory of the host."""

    def mark(self) -> DeviceEvent:
        """Now, in the order of this thread's stream."""

    def stream(self) -> Any:
        """The stream that is current in this thread, for `on`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream of this device the current one of this thread for a while, whichever thread it came from."""

    def pin(self, host: Array) -> Any:
        """Register host memory, so that copies from and to it run beside the program and at full speed.

        Returns:
            An object to be kept for as long as that is wanted: when it is released, the memory is as before. None where
            the memory could not be registered, which only makes copies slower.
        """

    # Arithmetic that only devices need.

    def pack(self, sources: Sequence[Array], offsets: Sequence[int], out: Array) -> None:
        """Copy many small arrays into one, in one launch.

        Args:
            sources: of any types.
            offsets: where each begins in `out`, in bytes: multiples of its element size. The rest stays as it is.
            out: of uint8.
        """

    def unpack(self, source: Array, offsets: Sequence[int], outs: Sequence[Array]) -> None:
        """The opposite of `pack`: fill many small arrays out of one of uint8."""

    def add_dequantised_2bit(self, data: Array, threshold: float, total: Array) -> None:
        """Add what 2-bit codes are worth to `total`, of float32. The codes are as of `kvdist.kernels.quantization`."""

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        """Add what 1-bit codes are worth to `total`, of float32."""

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        """Sum rows that share an index. Waits for the device, which alone knows how many are left.

        Args:
            indices: int64, one for each row, in any order.
            rows: the rows one after the other, of `dtype`; halves are summed in float32 and rounded once.
            dtype: their element type.

        Returns:
            The different indices in ascending order, and as many rows. Rows of one index are added in the order given.
        """

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        """table[indices[i]] += rows[i], of one floating type that NumPy has. No index comes twice."""

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """Whether no element is infinite or NaN: one launch over all arrays, and one wait for one number."""
