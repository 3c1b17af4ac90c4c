"""Where a server sums and updates: on its host, or on a GPU of it."""

from __future__ import annotations

import logging

from kvdist.config.environment import read_setting
from kvdist.errors import ConfigError, DeviceError
from kvdist.kernels.interface import Device, Kernels
from kvdist.optimizer.updater import Arithmetic

LOG = logging.getLogger("kvdist")


def open_server_device(name: str) -> Device | None:
    """The GPU of this name, ready for work; None for the host's processor.

    There is no falling back: who asks for a GPU gets it, or this error.

    Args:
        name: ``cpu``, or ``cuda:0`` and so on, as ``KVDIST_SERVER_DEVICE`` takes it.

    Raises:
        ConfigError: ``KVDIST_GPU`` keeps all arithmetic on the host.
        DeviceError: there is no such GPU, no driver, or no library for it.
    """
    if name == "cpu":
        return None
    from kvdist.kernels import gpu  # a feature at a seam: loaded where it is used

    setting = read_setting("KVDIST_GPU")
    if setting == gpu.HOST:
        raise ConfigError(
            f"KVDIST_SERVER_DEVICE is {name!r}, but KVDIST_GPU is {gpu.HOST!r}, which keeps a process off its GPUs:"
            " change one of them, or set KVDIST_GPU for workers alone"
        )
    try:
        # KVDIST_GPU=host, which helps a worker, would be refused above.
        device = gpu.open_gpu(int(name.partition(":")[2]), setting, otherwise="or let servers compute on their hosts")
    except DeviceError as error:
        wish = f"this server was to sum and update on {name}, and without --server-device would do so on its host"
        raise DeviceError(f"{wish}: {error}") from error
    LOG.info("values rest, and are summed and updated, on %s", device.name)
    return device


def arithmetic_of(device: Device | None, kernels: Kernels) -> Arithmetic | None:
    """The sums and updates of a server on this device; None for those of its host."""
    if device is None:
        return None
    from kvdist.optimizer.offload import arithmetic_on  # a feature at a seam: loaded where it is used

    return arithmetic_on(device, kernels)
