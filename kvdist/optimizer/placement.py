"""Which rules run on which devices, and states that move between those and the host."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from kvdist.errors import DeviceError
from kvdist.kernels.device import Device
from kvdist.kernels.interface import Array
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState


def require_runs_on(optimizer: Optimizer, device: Device) -> None:
    """Check that a device can run a rule: in one piece by a kernel, or function by function if it obeys NumPy's.

    Raises:
        DeviceError: it cannot; the message says why and what to do.
    """
    has_kernel = optimizer.equation(0.1, 0.0, 1) is not None
    if not optimizer.on_host and (has_kernel or device.obeys_numpy):
        return
    why = (
        "it draws its random numbers on the host"
        if optimizer.on_host
        else f"{device.library} has no kernel for it, and cupy, which runs every rule, is not installed or not chosen"
    )
    raise DeviceError(
        f"{optimizer.name} cannot run on {device.name} ({why}): use another optimizer, or keep the values in the host's"
        " memory (KVDIST_GPU=host on workers, no --server-device for servers)"
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
