"""The context and the streams of one GPU, as numba drives it.

Rules that hold here: everything is asked for on the stream that is current in the calling thread, with the device's
context current for as long as the call takes. numba makes a context current on a stack of each thread, so the one that
was current before is current again. Often that is none. What numba owns is therefore let go through `Held`: numba gives
memory, events and pinned pages back where the last reference ends, and the driver refuses that without a context.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, SupportsInt

from numba import cuda
from numba.cuda.cudadrv.driver import CudaAPIError

from kvdist.errors import DeviceError
from kvdist.kernels.numba_gpu_parts import SIMULATED

_OUT_OF_MEMORY = 2
_OLD_DRIVER = {35: "CUDA_ERROR_INSUFFICIENT_DRIVER", 222: "CUDA_ERROR_UNSUPPORTED_PTX_VERSION"}
"""Numbers of the driver's errors, as in cuda.h."""


class Streams:
    """Of one GPU. Safe to use from several threads.

    Args:
        index: its number among the visible ones.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self._known: dict[int, Any] = {}
        self._chosen = threading.local()
        self._capability: tuple[int, ...] = ()

    @contextmanager
    def current(self) -> Iterator[None]:
        """With this device current; what the driver or torch's allocator says is wrong comes out as a sentence.

        Raises:
            DeviceError: what was asked for was refused.
        """
        try:
            with cuda.gpus[self.index]:
                yield
        except (DeviceError, TypeError, ValueError):  # ours already, or the caller's
            raise
        except Exception as error:
            raise self.refusal(error) from error

    def refusal(self, error: Exception) -> DeviceError:
        """What an error of numba, the driver or torch means."""
        code = error.args[0] if isinstance(error, CudaAPIError) else None
        code = int(code) if isinstance(code, SupportsInt) else None
        if code == _OUT_OF_MEMORY or isinstance(error, MemoryError) or "out of memory" in str(error).lower():
            return DeviceError(
                f"the memory of cuda:{self.index} is full: make batches or buckets smaller, or give it fewer processes"
            )
        if code in _OLD_DRIVER:
            return DeviceError(
                f"the driver of cuda:{self.index} is too old for this numba ({_OLD_DRIVER[code]}): install a newer"
                " driver, or CUDA libraries of an older version"
            )
        why = " ".join(str(error).split()) or type(error).__name__
        return DeviceError(f"cuda:{self.index} cannot do what was asked of it through numba: {why}")

    def capability(self) -> tuple[int, ...]:
        """What kind of device it is: kernels are compiled for a kind. It must be current."""
        if not self._capability:
            self._capability = tuple(cuda.gpus[self.index].compute_capability)
        return self._capability

    def handle(self) -> int:
        """The stream that is current in this thread, as the driver calls it: torch's where torch uses CUDA; 0 is the
        default stream."""
        torch = torch_with_cuda()
        if torch is not None:
            return int(torch.cuda.current_stream(self.index).cuda_stream)
        chosen: int = getattr(self._chosen, "handle", 0)
        return chosen

    def stream(self) -> Any:
        """The same as an object of numba."""
        if SIMULATED:
            return 0
        handle = self.handle()
        stream = self._known.get(handle)
        if stream is None:
            # One object for each: numba remembers how kernels are launched by it.
            stream = self._known[handle] = cuda.external_stream(handle) if handle else cuda.default_stream()
        return stream

    @contextmanager
    def on(self, handle: int) -> Iterator[None]:
        """Make a stream of this device the current one of this thread for a while."""
        torch = torch_with_cuda()
        if torch is not None:
            where = f"cuda:{self.index}"
            stream = torch.cuda.ExternalStream(handle, where) if handle else torch.cuda.default_stream(where)
            with torch.cuda.stream(stream):
                yield
            return
        before = self.handle()
        self._chosen.handle = handle
        try:
            yield
        finally:
            self._chosen.handle = before

    def wait(self) -> None:
        """Block this thread until what it has asked for is done."""
        if not SIMULATED:
            with self.current():
                self.stream().synchronize()


class Held:
    """Something of numba's, which is let go with the device current when this is.

    Args:
        native: that; nobody else may keep it.
        streams: of its device.
    """

    def __init__(self, native: Any, streams: Streams) -> None:
        self._native = [native]
        weakref.finalize(self, _let_go, self._native, streams)

    @property
    def native(self) -> Any:
        """It."""
        return self._native[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        interface: dict[str, Any] = self.native.__cuda_array_interface__
        return interface


def _let_go(held: list[Any], streams: Streams) -> None:
    with suppress(DeviceError), streams.current():  # at the end of the program CUDA may be gone before us
        held.clear()


def torch_with_cuda() -> Any:
    """The module torch if it has begun to use CUDA in this process, else None."""
    torch: Any = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None
