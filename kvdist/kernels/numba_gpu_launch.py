"""Kernels for GPUs by their names: compiled once, and launched over as many threads as there is work for."""

from __future__ import annotations

import threading
from typing import Any

from numba import cuda

from kvdist.errors import DeviceError
from kvdist.kernels import numba_gpu_coding, numba_gpu_rows, numba_gpu_sums
from kvdist.kernels.numba_gpu_parts import SIMULATED
from kvdist.kernels.numba_gpu_streams import Streams

THREADS = 2 if SIMULATED else 256
"""In a block. In the simulator each costs a thread of Python: few, but more than one, so that strides are walked."""

BLOCKS_MIN, BLOCKS_MAX = (1, 2) if SIMULATED else (128, 132 * 16)
"""More work than so many blocks have threads is walked in strides: enough to fill the largest GPUs of today. Of fewer
than the least numba warns, and a block without work costs next to nothing."""

Name = tuple[str, str, int]
"""What a kernel does, for which type (`DType.label`), and for how many sources, where that matters."""

_LOCK = threading.RLock()
"""numba compiles one kernel at a time, and its simulator runs one at a time."""

_COMPILED: dict[tuple[Name, Any], Any] = {}
"""By name and kind of device (`Streams.capability`)."""


def template(name: Name) -> tuple[Any, tuple[Any, ...]]:
    """The text of a kernel and the types of its arguments.

    Raises:
        KeyError: there is none of that name.
    """
    for templates in (numba_gpu_sums.template, numba_gpu_coding.template, numba_gpu_rows.template):
        found = templates(*name)
        if found is not None:
            return found
    raise KeyError(name)


def names() -> list[Name]:
    """Kernels of every kind, for tests that compile them all."""
    return numba_gpu_sums.names() + numba_gpu_coding.names() + numba_gpu_rows.names()


def compiled(name: Name, capability: Any) -> Any:
    """The kernel of a name for a kind of device; compiled at its first use. Such a device must be current.

    Raises:
        DeviceError: it cannot be compiled here.
    """
    key = name, capability
    kernel = _COMPILED.get(key)
    if kernel is None:
        with _LOCK:
            kernel = _COMPILED.get(key)
            if kernel is None:
                kernel = _COMPILED[key] = _compile(name)
    return kernel


def _compile(name: Name) -> Any:
    function, signature = template(name)
    if SIMULATED:
        return cuda.jit(function)
    try:
        return cuda.jit(signature)(function)
    except Exception as error:
        raise DeviceError(
            f"numba cannot compile its kernel {'_'.join(map(str, name))} for this device ({type(error).__name__}:"
            f" {error}): numba-cuda needs the compiler of a CUDA toolkit that the driver knows, such as that of"
            " numba-cuda[cu12]; or install cupy, whose kernels are used instead"
        ) from error


def launch(streams: Streams, name: Name, elements: int, *arguments: Any) -> None:
    """Run a kernel over so many elements on the current stream.

    Args:
        streams: of the device.
        name: of the kernel.
        elements: pieces of work, one for a thread.
        arguments: as numba takes them.
    """
    launch_blocks(streams, name, -(-elements // THREADS), *arguments)


def launch_blocks(streams: Streams, name: Name, blocks: int, *arguments: Any) -> None:
    """Run a kernel that shares out its work by blocks."""
    if blocks <= 0:
        return
    with streams.current():
        kernel = compiled(name, streams.capability())
        shape = max(BLOCKS_MIN, min(blocks, BLOCKS_MAX)), THREADS
        if SIMULATED:
            with _LOCK:
                kernel[shape](*arguments)
        else:
            kernel[(*shape, streams.stream())](*arguments)
