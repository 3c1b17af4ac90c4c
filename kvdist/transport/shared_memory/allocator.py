"""Memory whose frames may travel without a copy: the interface between the transport and the code that fills frames.

Frames of several servers are shown side by side as a single array by a *window*: their pages are mapped a second time
at neighbouring addresses, and nothing is copied. In steady state the same few combinations come again and again, so
windows are cached by the frames that they show. A window may be written, because torch has no read-only tensors, and a
write to a page that is mapped only for reading would kill the process. Such a write is private: others do not see it,
and the page no longer shows the peer's memory.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kvdist.errors import StoreClosed
from kvdist.transport.shared_memory.arena import Arena
from kvdist.transport.shared_memory.mapping import PAGE_BYTES, Bytes, address_of, map_side_by_side
from kvdist.transport.shared_memory.segments import Pin, Segment, SegmentTable

LOG = logging.getLogger("kvdist")


class Allocator(Protocol):
    """Allocates the memory of values. Methods may be called from any thread unless they say otherwise."""

    def allocate(self, nbytes: int) -> NDArray[np.uint8]:
        """Allocate `nbytes` of undefined content, freed when the last array that shows them is collected."""

    def owns(self, array: NDArray[Any]) -> bool:
        """Whether all of a contiguous array lies in memory of this allocator, so that peers of this host can map it."""

    def show(self, arrays: Sequence[NDArray[Any]]) -> NDArray[np.uint8] | None:
        """Show arrays that peers sent side by side as a single array without a copy; None if impossible. One thread
        only."""

    def pin(self, pin: Pin) -> None:
        """Pin memory for a GPU: allocations and the memory of peers of this host, present and later. Same thread as
        `show`."""

    def forget_shown(self) -> None:
        """Forget all shown arrays: they may have been written to, or their peers may have ended.

        Same thread as `show`, or after it has ended.
        """


class HeapAllocator:
    """Allocates ordinary memory of this process, which peers cannot map."""

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
    """Allocates memory of an arena, which processes of this host can map.

    When the arena is full, or the system has no more memory of that kind, it allocates ordinary memory. Then values are
    sent instead of shown; that is slower and is reported once. It also does when the arena has been closed: nothing is
    sent any more, and calls of the node raise the reason.
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
        except StoreClosed:  # between a call's first look at the node and this, as in a process that was given up
            pass
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


WINDOWS_MAX = 256


class WindowCache:
    """Caches windows by the frames that they show. For a single thread.

    Args:
        tables: tables in which segments are looked up: that of the arena, and that of the transport.
        windows_max: number of windows that are kept; the least recently used is dropped first.
    """

    def __init__(self, tables: Sequence[SegmentTable], windows_max: int = WINDOWS_MAX) -> None:
        self.tables = tuple(tables)
        self._windows_max = windows_max
        self._windows: OrderedDict[tuple[tuple[Segment, int, int], ...], Bytes] = OrderedDict()
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._windows)

    def clear(self) -> None:
        """Forget all windows, because one may have been written to. Each is unmapped with the last array over it."""
        self._windows.clear()

    def view(self, frames: Sequence[memoryview]) -> Bytes | None:
        """The bytes of the frames in a row, without a copy, valid as long as an array shows them.

        None where that is impossible: a frame does not lie in an open segment, does not begin at a page, or does not
        fill whole pages and is not the last; or this process may map no more, which is reported once.
        """
        key = self._stretches(frames)
        if key is None:
            return None
        window = self._windows.get(key)
        if window is None:
            try:
                window = self._open(key)
            except OSError as error:
                if not self._has_failed:
                    self._has_failed = True
                    LOG.warning("values are copied instead of shown where they lie: %s", error)
                return None
        self._windows.move_to_end(key)
        return window

    def _stretches(self, frames: Sequence[memoryview]) -> tuple[tuple[Segment, int, int], ...] | None:
        stretches: list[tuple[Segment, int, int]] = []
        for frame in frames:
            nbytes = frame.nbytes
            if nbytes == 0 or (stretches and stretches[-1][2] % PAGE_BYTES):
                return None
            place = self._find(address_of(frame), nbytes)
            if place is None or place[1] % PAGE_BYTES:
                return None
            stretches.append((*place, nbytes))
        return tuple(stretches) or None

    def _find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        for table in self.tables:
            place = table.find(address, nbytes)
            if place is not None:
                return place
        return None

    def _open(self, key: tuple[tuple[Segment, int, int], ...]) -> Bytes:
        # Windows over the memory of a departed peer will not be requested again.
        for old in [old for old in self._windows if any(segment.file.descriptor is None for segment, _, _ in old)]:
            del self._windows[old]
        stretches = [
            (segment.file.descriptor, segment.offset + offset, nbytes)
            for segment, offset, nbytes in key
            if segment.file.descriptor is not None
        ]
        window = map_side_by_side(stretches)
        self._windows[key] = window
        if len(self._windows) > self._windows_max:
            self._windows.popitem(last=False)
        return window
