"""The GPUs on which values of one store lie, and how those values are read and written there.

A value on a GPU that the store may use is read as `OnDevice`, where one of the host is read as bits. Rules:

* No GPU is touched but those on which values lie.
* ``KVDIST_GPU=host``, a store whose name does not ask for GPUs and a process without a library for them: values are
  brought to the host as they come, by their own library, and everything happens there. The first time is logged.
"""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvdist.dtypes import DType
from kvdist.errors import DeviceError
from kvdist.kernels.gpu import HOST, has_library, open_gpu
from kvdist.kernels.interface import Array, Device
from kvdist.kvstore import values
from kvdist.kvstore.values import Bits, Key, Shape

LOG = logging.getLogger("kvdist")


@dataclass(frozen=True, slots=True, eq=False)
class OnDevice:
    """Bits that lie on a GPU."""

    device: Device
    array: Array

    @property
    def size(self) -> int:
        """Elements."""
        return int(self.array.size)

    @property
    def nbytes(self) -> int:
        """Bytes."""
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
"""What one device contributes to a key."""


class Devices:
    """The GPUs of one store.

    Args:
        setting: ``KVDIST_GPU``.
        insists: whether the store's name asks for sums on GPUs, so that a library for them may not be missing.
        open_device: gives the GPU of a number, driven as the setting says.
    """

    def __init__(self, setting: str, insists: bool, open_device: Callable[[int, str], Device] = open_gpu) -> None:
        self._setting = setting
        self._insists = insists
        self._open = open_device
        self._opened: dict[int, Device] = {}
        self._lock = threading.Lock()  # results are brought to GPUs on the thread of the node
        self._is_off = setting == HOST or not (insists or has_library(setting))
        self._said = False
        self._pin_with: Callable[[Device], None] | None = None

    def pin_with(self, pin: Callable[[Device], None]) -> None:
        """Call this with the first GPU that is used: it pins the memory from which the store sends."""
        self._pin_with = pin

    def of(self, value: Any) -> Device | None:
        """The GPU on which a value lies; None for the host, and where values are brought there.

        Raises:
            DeviceError: the GPU cannot be used.
        """
        index = values.gpu_of(value)
        if index is None:
            return None
        if self._is_off:
            self._say_so(index)
            return None
        return self.at(index)

    def at(self, index: int) -> Device:
        """The GPU of a number."""
        with self._lock:
            device = self._opened.get(index)
            if device is None:
                device = self._open(index, self._setting)
                if self._pin_with is not None and not self._opened:
                    self._pin_with(device)
                self._opened[index] = device
            return device

    def read(self, value: Any, dtype: DType) -> Part:
        """What a value holds, where it lies; no copy of what is contiguous."""
        device = self.of(value)
        if device is None:
            return values.read_bits(value)
        return OnDevice(device, device.view(values.in_order(value), dtype))

    def place(self, value: Any, dtype: DType) -> OnDevice | None:
        """The value's own memory on a GPU, to be written into; None where it has none in order.

        Autograd is told that a tensor changes, as by `values.writable_bits`.
        """
        device = self.of(value)
        if device is None or not values.is_in_order(value):
            return None
        return OnDevice(device, device.view(values.about_to_change(value), dtype))

    def _say_so(self, index: int) -> None:
        if not self._said:
            self._said = True
            why = "KVDIST_GPU is host" if self._setting == HOST else "no library for GPUs is installed"
            LOG.warning("values on cuda:%d are brought to the host and summed there: %s", index, why)


def require_one_kind(key: Key, parts: Sequence[Any]) -> None:
    """Check that the values of one key lie all on the host or all on GPUs.

    Raises:
        DeviceError: some lie here and some there; the message says which.
    """
    if len(parts) < 2:
        return
    places = [values.gpu_of(part) for part in parts]
    if None in places and any(place is not None for place in places):
        said = ", ".join("cpu" if place is None else f"cuda:{place}" for place in places)
        raise DeviceError(
            f"the values of key {key!r} lie on {said}: a sum is made on GPUs or on the host, so move all of them to one"
            " or the other, as with tensor.to(...)"
        )


def as_host_bits(parts: Sequence[Part]) -> list[Bits]:
    """All of them in the host's memory."""
    return [part.on_host() if isinstance(part, OnDevice) else part for part in parts]


def uploaded(bits: Bits, device: Device) -> OnDevice:
    """A copy on a GPU. Waits for it."""
    copy = device.kernels.empty(bits.size, bits.dtype)
    device.upload(bits, copy)
    device.mark().wait()
    return OnDevice(device, copy)


def new_value(kind: str, device: Device, shape: Shape, dtype: DType) -> Any:
    """An array of a kind (`values.kind_of`) on a GPU, whose content means nothing."""
    made = values.empty_tensor(kind, shape, dtype)
    return device.kernels.empty(math.prod(shape), dtype.storage).reshape(shape) if made is None else made
