"""What a message may contain at most: the numbers of WIRE.md's table of limits.

A limit is looked at before anything is allocated for what it limits.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES_MIN = 8
"""The smallest size of slices: one element of the widest type."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The largest message that this side reads. Lengths of text are counted in bytes of UTF-8."""

    header_bytes_max: int = 16 << 20
    """Frame 1."""
    payload_bytes_max: int = 64 << 20
    """Frame 2 and those behind it together."""
    payload_frames_max: int = 64
    """Frame 2 and those behind it."""
    slices_max: int = 1 << 20
    """Slices that one message is about."""
    settings_max: int = 256
    """Distinct settings in a push; an index into them has one byte."""
    keys_max: int = 1 << 20
    """Keys in one request."""
    key_bytes_max: int = 1024
    """A key that is text."""
    dims_max: int = 32
    """Dimensions of a shape."""
    elements_max: int = 1 << 38
    """Elements of one key."""
    name_bytes_max: int = 1024
    """A host, an end point, a mode, a version, the name of a process."""
    sentence_bytes_max: int = 8192
    """A text for people; a sender cuts longer ones."""
    body_bytes_max: int = 64 << 10
    """The text of a command."""
    members_max: int = 1 << 16
    """Processes in a roster, and workers awaited."""
    entries_max: int = 64
    """Entries of an optimizer's description."""
    entry_name_bytes_max: int = 64
    """The name of such an entry."""


DEFAULT = WireLimits()
"""What WIRE.md states. A sender keeps to these."""
