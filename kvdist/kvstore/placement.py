"""Placement of a store's values: in host memory or on GPUs.

No GPU library is loaded before a value lies on a GPU. Sums and transfers are in `kvdist.kvstore.device`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdist.core.worker.requests import KeyInfo
from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.interface import Array, Device
from kvdist.kvstore import values
from kvdist.kvstore.values import Bits, Key
from kvdist.naming import name_of

LOG = logging.getLogger("kvdist")


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """Bits that lie on a GPU."""

    device: Device
    array: Array

    @property
    def size(self) -> int:
        """Number of elements."""
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        """Number of bytes."""
        return int(self.array.nbytes)

    def on_host(self) -> Bits:
        """A copy in the host's memory. Waits for the GPU."""
        bits: Bits = np.empty(self.size, self.array.dtype)
        self.device.download(self.array, bits)
        self.device.mark().wait()
        return bits

    def __getitem__(self, place: slice) -> OnDevice:
        return OnDevice(self.device, self.array[place])


Part = Bits | OnDevice
"""The contribution of a device to a key."""


Matched = Sequence[tuple[KeyInfo, list[Any]]]
"""The keys of a call, each with the arrays of its devices, whose shapes and dtypes are checked."""


class Devices:
    """The GPUs of a store.

    Args:
        setting: ``KVDIST_GPU``; by default values of GPUs are brought to the host.
        insists: whether the store's name asks for sums on GPUs, so that a missing GPU library is an error.
        open_device: opens a GPU from its index; None for `kvdist.kernels.gpu.open_gpu`.
    """

    def __init__(
        self, setting: str = "host", insists: bool = False, open_device: Callable[[int], Device] | None = None
    ) -> None:
        self._setting = setting
        self._insists = insists
        self._open = open_device
        self._opened: dict[int, Device] = {}
        self._lock = threading.Lock()  # results are brought to GPUs on the thread of the node
        self._is_off: bool | None = None
        """Whether values are brought to the host; None until a value lies on a GPU."""
        self._pin_with: Callable[[Device], None] | None = None

    def pin_with(self, pin: Callable[[Device], None]) -> None:
        """Call this with the first GPU that is used: it pins the memory from which the store sends."""
        self._pin_with = pin

    def of(self, value: Any) -> Device | None:
        """The GPU on which a value lies; None for a value on the host, and for all if GPU values are brought to the
        host.

        Raises:
            DeviceError: the GPU cannot be used.
        """
        index = values.gpu_of(value)
        if index is None:
            return None
        if self._is_off is None:
            self._is_off = self._brings_to_host(index)
        return None if self._is_off else self.at(index)

    def at(self, index: int) -> Device:
        """The GPU with this index, opened at the first call."""
        with self._lock:
            device = self._opened.get(index)
            if device is None:
                from kvdist.kernels.gpu import open_gpu  # a feature at a seam: loaded where it is used

                device = (self._open or open_gpu)(index)
                if self._pin_with is not None and not self._opened:
                    self._pin_with(device)
                self._opened[index] = device
            return device

    def read(self, value: Any, dtype: DType) -> Part:
        """The elements of a value, where it lies; a contiguous value is not copied."""
        device = self.of(value)
        if device is None:
            return values.read_bits(value)
        return OnDevice(device, device.view(values.in_order(value), dtype))

    def place(self, value: Any, dtype: DType) -> OnDevice | None:
        """The value's GPU memory, to be written into; None if it is not contiguous, not on a GPU, or of another type.

        Autograd learns that a tensor changes, as in `values.writable_bits`.
        """
        device = self.of(value)
        if device is None or not values.is_in_order(value) or values.describe(value)[1] is not dtype:
            return None
        return OnDevice(device, device.view(values.about_to_change(value), dtype))

    def _brings_to_host(self, index: int) -> bool:
        from kvdist.kernels.gpu import HOST, has_libraries  # a feature at a seam: loaded where it is used

        if self._setting != HOST and (self._insists or has_libraries()):
            return False
        why = "KVDIST_GPU is host" if self._setting == HOST else "CuPy or numba-cuda is not installed"
        LOG.warning("values on cuda:%d are brought to the host and summed there: %s", index, why)
        return True


def names_gpus(matched: Sequence[tuple[KeyInfo, Sequence[Any]]]) -> bool:
    """Whether any value lies on a GPU."""
    return any(values.gpu_of(array) is not None for _, arrays in matched for array in arrays)


def require_one_kind(key: Key, parts: Sequence[Any]) -> None:
    """Check that the values of a key lie all on the host or all on GPUs.

    Raises:
        DeviceError: some values lie on the host and some on GPUs; the message lists the devices.
    """
    if len(parts) < 2:
        return
    places = [values.gpu_of(part) for part in parts]
    if None in places and any(place is not None for place in places):
        said = ", ".join("cpu" if place is None else f"cuda:{place}" for place in places)
        raise DeviceError(
            f"the values of {name_of(key)} are on {said}, but a sum needs all of them on GPUs or all on the host: move"
            " them, as with tensor.to(...)"
        )


def as_host_bits(parts: Sequence[Part]) -> list[Bits]:
    """The parts as bits in host memory."""
    return [part.on_host() if isinstance(part, OnDevice) else part for part in parts]


def home_of(devices: Sequence[Device], load: Mapping[int, int]) -> Device:
    """The GPU with the fewest summed bytes so far; the first of several.

    Args:
        devices: GPUs of the contributions.
        load: index of a GPU → bytes that it has summed.
    """
    return min(devices, key=lambda device: load.get(device.index, 0))
