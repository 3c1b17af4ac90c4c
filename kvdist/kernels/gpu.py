"""Choice of the library that drives a GPU, and the GPU on which a value lies.

No GPU library is imported, and no GPU is touched, before a value lies on a GPU or a setting names a GPU. Then CuPy
drives it, else numba. The choice is logged, with the reason.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Mapping
from typing import Any

from kvdist.errors import DeviceError
from kvdist.kernels.interface import Device

LOG = logging.getLogger("kvdist")

HOST = "host"
SETTINGS = ("auto", "cupy", "numba", HOST)
"""Values of ``KVDIST_GPU``; ``host`` keeps all arithmetic in the host's memory."""

_ON_GPU = (2, 13)
"""DLPack's codes of CUDA memory, plain and managed."""

OR_THE_HOST = "or set KVDIST_GPU=host to bring gradients to the host and sum them there"


def gpu_index(value: Any) -> int | None:
    """Index of the GPU on which a value lies; None for host memory, or for a value that is not an array."""
    if getattr(value, "__cuda_array_interface__", None) is None and not _is_cuda_tensor(value):
        return None
    where = getattr(value, "__dlpack_device__", None)
    if where is not None:
        code, index = where()
        return int(index) if int(code) in _ON_GPU else None
    from kvdist.kernels.numba_cuda import index_of  # the one library whose arrays do not say where they lie

    return index_of(value)


def _is_cuda_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor on a GPU: with grad or bfloat16 it lacks ``__cuda_array_interface__``."""
    return bool(getattr(value, "is_cuda", False))


def _cupy(index: int) -> Device:
    from kvdist.kernels.cupy_cuda.device import open_device

    return open_device(index)


def _numba(index: int) -> Device:
    from kvdist.kernels.numba_cuda import open_device

    return open_device(index)


LIBRARIES: Mapping[str, Callable[[int], Device]] = {"cupy": _cupy, "numba": _numba}
"""Name of a library → function that opens a GPU with it, in the order of the attempts."""


def open_gpu(
    index: int,
    setting: str = "auto",
    libraries: Mapping[str, Callable[[int], Device]] = LIBRARIES,
    otherwise: str = OR_THE_HOST,
) -> Device:
    """Open a GPU.

    Args:
        index: index among the visible GPUs.
        setting: a value of `SETTINGS` other than ``host``.
        libraries: libraries that may drive the GPU.
        otherwise: advice for the message, if no library can.

    Raises:
        DeviceError: the GPU does not exist, or its driver or a library is missing; the message has the remedy.
    """
    missing = []
    for name in libraries if setting == "auto" else [setting]:
        try:
            device = libraries[name](index)
        except ImportError as error:
            missing.append(f"{name} cannot be imported ({error})")
        else:
            why = "as KVDIST_GPU says" if setting != "auto" else "; ".join(missing) or "it is installed"
            LOG.info("%s is driven by %s (%s)", device.name, device.library, why)
            return device
    raise DeviceError(
        f"no installed library can compute on cuda:{index}: {'; '.join(missing)}. Install a library with `pip install"
        f" cupy-cuda12x 'numba-cuda[cu12]'`, {otherwise}"
    )


def has_library(setting: str) -> bool:
    """Whether a library that may drive GPUs is installed; the check does not import it."""
    modules = {"cupy": "cupy", "numba": "numba_cuda"}
    wanted = [modules[setting]] if setting in modules else modules.values()
    return setting != HOST and any(importlib.util.find_spec(module) is not None for module in wanted)
