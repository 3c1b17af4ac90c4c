"""A long list of keys in parts, so that the first of them travel while the next are encoded.

Rules that hold here: the parts depend on the list alone, so all workers make the same; the order of the keys stays.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvdist.core.worker.requests import KeyInfo

PART_BYTES = 8 << 20
"""Of values: a millisecond of encoding, and some four messages."""


def parts_of(infos: Sequence[KeyInfo], part_bytes: int = PART_BYTES) -> list[slice]:
    """Stretches of a list of keys, each but the last of so many bytes of values or more; at least one."""
    parts, begin, nbytes = [], 0, 0
    for i, info in enumerate(infos):
        nbytes += info.size * info.dtype.itemsize
        if nbytes >= part_bytes:
            parts.append(slice(begin, i + 1))
            begin, nbytes = i + 1, 0
    if begin < len(infos) or not parts:
        parts.append(slice(begin, len(infos)))
    return parts
