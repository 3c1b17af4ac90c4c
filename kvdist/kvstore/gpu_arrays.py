"""Arrays on GPUs that are no tensors: those of CuPy and numba, by what their libraries have in common.

For stores that bring them to the host. What works with them where they lie is `kvdist.kvstore.devices`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvdist.dtypes import DType
from kvdist.kernels.gpu import gpu_index


def is_one(value: Any) -> bool:
    """Whether the value is an array on a GPU."""
    return getattr(value, "__cuda_array_interface__", None) is not None


def describe(value: Any, known: Mapping[np.dtype[Any], DType], supported: str) -> tuple[tuple[int, ...], DType]:
    """Shape and element type.

    Raises:
        TypeError: the type is not one that a key may have.
    """
    dtype = known.get(np.dtype(value.dtype))
    if dtype is None:
        raise TypeError(f"arrays of dtype {value.dtype} are not supported; use one of {supported}")
    return tuple(value.shape), dtype


def is_in_order(value: Any) -> bool:
    """Whether it is contiguous in C order."""
    interface = value.__cuda_array_interface__
    strides = interface.get("strides")
    if strides is None or math.prod(interface["shape"]) == 0:
        return True
    expected = np.dtype(interface["typestr"]).itemsize
    for length, stride in zip(reversed(interface["shape"]), reversed(strides), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True


def read(value: Any) -> NDArray[Any]:
    """A copy in the host's memory, in C order."""
    get = getattr(value, "get", None) or value.copy_to_host
    return np.ascontiguousarray(get())


def write(value: Any, bits: NDArray[Any]) -> None:
    """Copy host memory into it."""
    put = getattr(value, "set", None) or value.copy_to_device
    put(np.ascontiguousarray(bits).reshape(value.shape))


def kind_of(value: Any) -> str:
    """Its library, and the number of its GPU."""
    return f"{type(value).__module__.partition('.')[0]}:{gpu_index(value)}"


def like(library: str, index: int, array: NDArray[Any]) -> Any:
    """A copy of host memory on a GPU, as an array of the library."""
    if library == "cupy":
        cupy = sys.modules["cupy"]
        with cupy.cuda.Device(index):
            return cupy.asarray(array)
    cuda = sys.modules[library].cuda
    with cuda.gpus[index]:
        return cuda.to_device(array)
