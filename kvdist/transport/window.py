"""Stretches of shared memory shown side by side as one array, for a value that one server holds or several.

The pages are mapped a second time at neighbouring addresses; nothing is copied. In steady state the same few
combinations come again and again, so windows are kept and found by what they show.

A window may be written, for torch knows no tensor that may not, and a write to a page that is mapped only for reading
would kill the process. Nobody else sees what is written, and the page shows the peer's memory no more.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence

from kvdist.transport.shared_memory.mapping import PAGE_BYTES, Bytes, address_of, map_side_by_side
from kvdist.transport.shared_memory.segments import Segment, SegmentTable

LOG = logging.getLogger("kvdist")

WINDOWS_MAX = 256


class WindowCache:
    """Windows by what they show. Used by one thread.

    Args:
        tables: where segments are looked for: of the arena, and of the transport.
        windows_max: how many are kept; the one that was not asked for the longest goes first.
    """

    def __init__(self, tables: Sequence[SegmentTable], windows_max: int = WINDOWS_MAX) -> None:
        self.tables = tuple(tables)
        self._windows_max = windows_max
        self._windows: OrderedDict[tuple[tuple[Segment, int, int], ...], Bytes] = OrderedDict()
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._windows)

    def clear(self) -> None:
        """Forget them all, because somebody may have written to one. Each is unmapped when nobody shows it."""
        self._windows.clear()

    def view(self, frames: Sequence[memoryview]) -> Bytes | None:
        """The bytes of the frames in a row, without a copy, valid as long as somebody shows the array.

        None when that cannot be: a frame does not lie in a segment that is open, does not begin at a page, or does
        not fill whole pages and is not the last; or this process may map no more, which is reported once.
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
        # What shows the memory of a peer that has gone will not be asked for again.
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
