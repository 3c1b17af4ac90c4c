"""One GPU, as one library drives it: the seam between what kvdist does with arrays on a device and who does it.

Rules that hold at this seam:

* Arrays are those of the library: one-dimensional, C-contiguous, in the memory of the device, of `DType.storage` or
  `DType.accumulate`, as at `kvdist.kernels.interface`. They have ``size``, ``dtype``, ``nbytes``, can be cut with
  slices of step 1, and, under `Kernels.active`, ``array[...] = x`` fills them with a number or with another array of
  the device. (The library itself does that, on its own current stream, and `active` makes it the one below.)
* Everything is asked for on the stream that is current in the calling thread: torch's, where torch has begun to use
  CUDA, else the library's own. It is done in that order, later. Nothing here waits but `Mark.wait` and what says so.
* Only this device is touched; the device that was current before a call is current after it.
* Memory comes from torch's allocator where torch has begun to use CUDA, so that the two do not starve each other.
* What goes wrong is a `DeviceError` in a sentence.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Kernels


class Mark(Protocol):
    """A moment in the order of a device's stream."""

    def wait(self) -> None:
        """Block this thread, and no other, until everything that was asked for before the mark is done."""


class Device(Protocol):
    """One GPU."""

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
    def obeys_numpy(self) -> bool:
        """Whether NumPy's functions work on its arrays, so that rules without a kernel run on it."""

    @property
    def kernels(self) -> Kernels:
        """The functions on its arrays. All take and give arrays of this device."""

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

    def mark(self) -> Mark:
        """Now, in the order of this thread's stream."""

    def stream(self) -> Any:
        """The stream that is current in this thread, for `on`."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Make a stream of this device the current one of this thread for a while, whichever thread it came from."""

    def pin(self, host: Array) -> Any:
        """Register host memory, so that copies from and to it run beside the program and at full speed.

        Returns:
            An object to be kept for as long as that is wanted: when it is let go, the memory is as before. None where
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
        """Add what 2-bit codes are worth to `total`, of float32. The codes are as of `kvdist.kernels.quantised`."""

    def add_dequantised_1bit(self, data: Array, threshold: float, total: Array) -> None:
        """Add what 1-bit codes are worth to `total`, of float32."""

    def merge_rows(self, indices: Array, rows: Array, dtype: DType) -> tuple[Array, Array]:
        """Sum rows that share an index. Waits for the device, because nobody knows before how many are left.

        Args:
            indices: int64, one for each row, in any order.
            rows: the rows one after the other, of `dtype`; halves are summed in float32 and rounded once.
            dtype: their element type.

        Returns:
            The different indices in ascending order, and as many rows. Rows of one index are added in the order given.
        """

    def gather_rows(self, table: Array, indices: Array, out: Array) -> None:
        """out[i] = table[indices[i]], for rows of ``out.size // indices.size`` elements; no index is out of range."""

    def add_rows(self, table: Array, indices: Array, rows: Array) -> None:
        """table[indices[i]] += rows[i], of one floating type that NumPy has. No index comes twice."""

    def all_finite(self, arrays: Sequence[Array], dtype: DType) -> bool:
        """Whether no element is infinite or NaN: one launch over all arrays, and one wait for one number."""
