"""Sums and updates on a GPU, for a server whose values are published from the host's memory.

Weights and states stay on the device; gradients come from workers, so they cross the bus in any case, and so does the
new weight, once, whatever the number of its readers. Bytes that cross in a round of W contributions of n bytes:

* with an optimizer, W·n up and n down, and a single wait; n more up if the device does not have the present weight: in
  the first update, and after the weight was replaced or restored, or its slices were joined or split. On the device the
  rule makes the passes that `kvdist.optimizer.updater` counts, or a single pass if the device has a fused kernel;
* without an optimizer, W·n up and n down, and a single wait, unless `offloaded` leaves the sum to the host.

Invariants:

* All work is in the order of a single stream, and every call waits for its end. So scratch memory is reused at once,
  and no memory of the caller is read or written after a call has returned.
* A weight on the device is identified by the host array in which it was published. A publisher never shows an array
  again with a content that no update wrote, or the device would go on from the former content; see `Block.replace`.
* Tables of rows stay in the host's memory, and so do the sums and updates of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.interface import Array, Device, Kernels
from kvdist.kernels.reference import check_sum
from kvdist.naming import name_of
from kvdist.optimizer.base import Optimizer, Piece
from kvdist.optimizer.states import Part, SliceState
from kvdist.optimizer.updater import Arithmetic, Updater, check_arrays

SUMMED_BYTES_MIN = 1 << 20
"""Size of the shortest arrays that are summed on the device; the host sums shorter arrays.

A transfer is some five calls of 10 µs and a wait, in which a core adds about a megabyte, often from its cache. For
longer arrays the bus decides: 25 GB/s and more from pinned memory, against 10 to 20 GB/s of a core. Not yet measured on
a GPU.
"""
SCRATCH_ALIGNMENT_BYTES = 256
"""Alignment of arrays in scratch memory, as that of GPU allocators, so that loads stay as wide."""


def arithmetic_on(device: Device, host: Kernels) -> Arithmetic:
    """Sums and updates on the device; all other kernels are those of the host."""
    return Arithmetic(offloaded(device, host), partial(DeviceUpdater, device=device))


class DeviceUpdater:
    """An `Updater` on a device, for arrays of the host: a `SliceUpdater`. See the module.

    Args:
        optimizer: the rule and its numbers.
        device: the device that holds weights and states.

    Raises:
        DeviceError: the rule cannot run on the device.
    """

    def __init__(self, optimizer: Optimizer, device: Device) -> None:
        require_runs_on(optimizer, device)
        self.optimizer = optimizer
        self._device = device
        self._updater = Updater(optimizer, device.kernels)
        self._residents: dict[Hashable, _Resident] = {}
        self._scratch = _Scratch(device)

    @property
    def states(self) -> Mapping[Hashable, SliceState]:
        """See `SliceUpdater`. Each state is downloaded when it is read."""
        return _DownloadedStates(self._updater.states, self._device)

    def update_together(
        self,
        pieces: Sequence[Piece],
        dtype: DType,
        lr: float | None = None,
        wd: float | None = None,
        pusher: int | None = None,
    ) -> None:
        """See `SliceUpdater`. The contributions to all pieces are on the device at once, for rules that need norms.

        Raises:
            TypeError, ValueError: as in `SliceUpdater`.
            DeviceError: the device has failed, and its weights and states are undefined.
        """
        for piece in pieces:
            check_arrays(piece, dtype)
        try:
            there = self._uploaded(pieces, dtype)
            self._updater.update_together(there, dtype, lr, wd, pusher)
            for piece, moved in zip(pieces, there, strict=True):
                self._device.download(moved.out, piece.out)
        except MemoryError as error:  # of the device's library, in a rule that makes arrays
            keys = name_of(pieces[0].extent.key)
            raise DeviceError(f"{self._device.name} has no memory left to update {keys}: {error}") from error
        finally:
            # Also when refused: what was being uploaded belongs to others.
            self._device.mark().wait()
        for piece, moved in zip(pieces, there, strict=True):
            self._residents[piece.index] = _Resident(piece.out, moved.out)

    def restore(self, index: Hashable, state: SliceState | None) -> None:
        """See `SliceUpdater`. Uploads the state once."""
        self._residents.pop(index, None)
        self._updater.restore(index, None if state is None else on_device(state, self._device))

    def joinable(self, indices: Iterable[Hashable]) -> bool:
        return self._updater.joinable(indices)

    def join(self, index: Hashable, parts: Sequence[Part], size: int, dtype: DType) -> None:
        """See `SliceUpdater`. Nothing crosses the bus now; the next update uploads the weight."""
        for part in parts:
            self._residents.pop(part.index, None)
        self._updater.join(index, parts, size, dtype)

    def split(self, index: Hashable, parts: Sequence[Part]) -> None:
        """See `SliceUpdater`. Nothing crosses the bus now; the next updates upload the weights."""
        self._residents.pop(index, None)
        self._updater.split(index, parts)

    def _uploaded(self, pieces: Sequence[Piece], dtype: DType) -> list[Piece]:
        """The pieces on the device, each to be updated in place. Removes their weights from `_residents`."""
        counts = [piece.weight.size for piece in pieces for _ in piece.contributions]
        scratch = iter(self._scratch.cut(counts, dtype.storage))
        there = []
        for piece in pieces:
            contributions = []
            for contribution in piece.contributions:
                contributions.append(next(scratch))
                self._device.upload(contribution, contributions[-1])
            weight = self._weight(piece, dtype)
            there.append(Piece(piece.index, weight, contributions, piece.scales, weight, piece.extent))
        return there

    def _weight(self, piece: Piece, dtype: DType) -> Array:
        # Taken out until the update is done: after one that failed, the weight is uploaded anew.
        resident = self._residents.pop(piece.index, None)
        if resident is not None and resident.host is piece.weight:
            return resident.array
        array = self._device.kernels.empty(piece.weight.size, dtype.storage)
        self._device.upload(piece.weight, array)
        return array


def offloaded(device: Device, host: Kernels) -> Kernels:
    """The host's kernels, except that the device computes long sums.

    Compressed contributions are decoded on the host.
    """
    sources, sums = _Scratch(device), _Scratch(device)

    def weighted_sum(contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        if len(contributions) < 2 or out.nbytes < SUMMED_BYTES_MIN:
            host.weighted_sum(contributions, scales, dtype, out)
            return
        check_sum(contributions, scales, dtype, out)
        try:
            there = sources.cut([out.size] * len(contributions), dtype.storage)
            for contribution, array in zip(contributions, there, strict=True):
                device.upload(contribution, array)
            (total,) = sums.cut([out.size], out.dtype)
            device.kernels.weighted_sum(there, scales, dtype, total)
            device.download(total, out)
        finally:
            device.mark().wait()

    return replace(host, name=f"{host.name}, sums on {device.name}", weighted_sum=weighted_sum)


@dataclass(frozen=True, slots=True, eq=False)
class _Resident:
    """A weight on the device, and the host array in which it was published."""

    host: Array
    array: Array


class _Scratch:
    """Reused memory of a device: each call returns arrays in the memory of the call before."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: dict[np.dtype[Any], Array] = {}

    def cut(self, counts: Sequence[int], dtype: np.dtype[Any]) -> list[Array]:
        """An array of each length, side by side."""
        unit = SCRATCH_ALIGNMENT_BYTES // dtype.itemsize
        *starts, size = accumulate((-(-count // unit) * unit for count in counts), initial=0)
        whole = self._arrays.get(dtype)
        if whole is None or whole.size < size:
            self._arrays.pop(dtype, None)  # first, or there would be room for both
            del whole
            whole = self._arrays[dtype] = self._device.kernels.empty(size, dtype)
        return [whole[start : start + count] for start, count in zip(starts, counts, strict=True)]


class _DownloadedStates(Mapping[Hashable, SliceState]):
    """States on a device, shown as copies in the host's memory."""

    def __init__(self, states: Mapping[Hashable, SliceState], device: Device) -> None:
        self._states = states
        self._device = device

    def __getitem__(self, index: Hashable) -> SliceState:
        return on_host(self._states[index], self._device)

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)


def require_runs_on(optimizer: Optimizer, device: Device) -> None:
    """Check that a rule can run on a device.

    Raises:
        DeviceError: the rule needs the host; the message has the reason and the remedy.
    """
    if optimizer.on_host:
        raise DeviceError(
            f"{optimizer.name} cannot run on {device.name} (it draws its random numbers on the host): use another"
            " optimizer, or keep the values in the host's memory (KVDIST_GPU=host on workers, no --server-device for"
            " servers)"
        )


def on_host(state: SliceState, device: Device) -> SliceState:
    """A copy in the host's memory of a state on a device. Waits for the device."""

    def down(array: Array) -> Array:
        copy = np.empty(array.size, array.dtype)
        device.download(array, copy)
        return copy

    copy = _mapped(state, down)
    device.mark().wait()
    return copy


def on_device(state: SliceState, device: Device) -> SliceState:
    """A copy on a device of a state in the host's memory. Waits for the device."""

    def up(array: Array) -> Array:
        copy = device.kernels.empty(array.size, array.dtype)
        device.upload(np.ascontiguousarray(array), copy)
        return copy

    copy = _mapped(state, up)
    device.mark().wait()
    return copy


def _mapped(state: SliceState, copy: Callable[[Array], Array]) -> SliceState:
    master = None if state.master is None else copy(state.master)
    return SliceState(state.count, tuple([copy(array) for array in state.arrays]), state.scalars, master)
