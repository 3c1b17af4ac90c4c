"""The GPU on which a value lies, and the one place where GPUs are opened.

No GPU library is imported, and no GPU is touched, before a value lies on a GPU or a setting names a GPU. Then CuPy and
numba-cuda are imported, and the GPU and their versions are logged.
"""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

from kvdist.errors import DeviceError
from kvdist.kernels.interface import Device

LOG = logging.getLogger("kvdist")

HOST = "host"
"""Value of ``KVDIST_GPU`` that keeps all arithmetic in the host's memory."""

_ON_GPU = (2, 13)
"""DLPack's codes of CUDA memory, plain and managed."""

OR_THE_HOST = "or set KVDIST_GPU=host to bring gradients to the host and sum them there"


def gpu_index(value: Any) -> int | None:
    """Index of the GPU on which a value lies; None for host memory, or for a value that is not an array.

    Raises:
        DeviceError: the array does not say on which GPU it lies, and CuPy or numba-cuda, which find it, is missing.
    """
    if getattr(value, "__cuda_array_interface__", None) is None and not _is_cuda_tensor(value):
        return None
    where = getattr(value, "__dlpack_device__", None)
    if where is not None:
        code, index = where()
        return int(index) if int(code) in _ON_GPU else None
    try:
        from kvdist.kernels.cupy_runtime import index_of  # arrays of numba do not say where they lie
    except ImportError as error:
        raise DeviceError(
            f"an array of {type(value).__module__.partition('.')[0]} lies on a GPU, which needs {_missing(error)}, or"
            " copy it to the host"
        ) from error
    return index_of(value)


def _is_cuda_tensor(value: Any) -> bool:
    """Whether a value is a torch tensor on a GPU: with grad or bfloat16 it lacks ``__cuda_array_interface__``."""
    return bool(getattr(value, "is_cuda", False))


def open_gpu(index: int, otherwise: str = OR_THE_HOST) -> Device:
    """Open a GPU.

    Args:
        index: index among the visible GPUs.
        otherwise: advice for the message, if CuPy or numba-cuda is missing.

    Raises:
        DeviceError: the GPU does not exist, or its driver or a library is missing; the message has the remedy.
    """
    try:
        from kvdist.kernels.cupy_device import open_device
    except ImportError as error:
        raise DeviceError(f"cuda:{index} needs {_missing(error)}, {otherwise}") from error
    device = open_device(index)
    LOG.info("%s is driven by %s", device.name, device.library)
    return device


def _missing(error: ImportError) -> str:
    return (
        f"CuPy and numba-cuda, and one of them cannot be imported ({error}): install both with"
        " `pip install cupy-cuda12x 'numba-cuda[cu12]'`"
    )


def has_libraries() -> bool:
    """Whether CuPy and numba-cuda are installed; the check imports neither."""
    return all(importlib.util.find_spec(module) is not None for module in ("cupy", "numba_cuda"))
