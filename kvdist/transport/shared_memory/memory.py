"""Memory from which frames may travel without a copy: the seam between who fills it and who sends it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.segments import Pin
from kvdist.transport.window import WindowCache

LOG = logging.getLogger("kvdist")


class Allocator(Protocol):
    """Gives out bytes and knows its own. Any thread."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """That many bytes; their content means nothing. They are free again when no array shows them any more."""

    def owns(self, array: NDArray[Any]) -> bool:
        """Whether the whole contiguous array lies in what this memory gave out, so that others can be shown it."""

    def show(self, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8] | None:
        """Arrays that peers sent, side by side as one without a copy; None where that cannot be. For one thread."""

    def pin(self, pin: Pin) -> None:
        """Pin, for a GPU, what is given out and what peers of this host show, now and later. For the same thread."""

    def forget_shown(self) -> None:
        """Keep nothing that was shown: it may have been written to, or its peers are gone.

        For the same thread, or after it has ended.
        """


class HeapAllocator:
    """Bytes of this process, which nobody else can be shown."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        return np.empty(nbytes, np.uint8)

    def owns(self, array: NDArray[Any]) -> bool:
        return False

    def show(self, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8] | None:
        return None

    def pin(self, pin: Pin) -> None:
        pass  # it is the system's, and comes and goes

    def forget_shown(self) -> None:
        pass


class SharedAllocator:
    """Bytes of an arena, which processes of this host can be shown.

    When the arena is full, or the system has no more memory of that kind, they are ordinary ones. Then values are sent
    instead of shown; that is slower and is reported once.
    """

    def __init__(self, arena: Arena, windows: WindowCache) -> None:
        self._arena = arena
        self._windows = windows
        self._is_full = False

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        try:
            return self._arena.allocate(nbytes)
        except MemoryError as error:
            if not self._is_full:
                self._is_full = True
                LOG.warning("no more shared memory, so values are sent between processes of this host: %s", error)
            return np.empty(nbytes, np.uint8)

    def owns(self, array: NDArray[Any]) -> bool:
        return array.nbytes > 0 and self._arena.locate(array) is not None

    def show(self, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8] | None:
        return self._windows.view([array.data for array in arrays])

    def pin(self, pin: Pin) -> None:
        for table in self._windows.tables:
            table.pin_all(pin)

    def forget_shown(self) -> None:
        self._windows.clear()
