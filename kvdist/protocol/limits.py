"""Limits of messages: the numbers of WIRE.md's table of limits.

A limit is checked before memory is allocated for the limited field.
"""

from __future__ import annotations

from dataclasses import dataclass

SLICE_BYTES_MIN = 8
"""The smallest size of slices: an element of the widest type."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """The largest message that this side reads. Lengths of text are counted in bytes of UTF-8."""

    header_bytes_max: int = 16 << 20
    """Bytes of frame 1."""
    payload_bytes_max: int = 64 << 20
    """Bytes of frame 2 and the later frames together."""
    payload_frames_max: int = 64
    """Number of frames from frame 2 on."""
    slices_max: int = 1 << 20
    """Slices in a message."""
    settings_max: int = 256
    """Distinct settings in a push; an index into them has one byte."""
    keys_max: int = 1 << 20
    """Keys in a request."""
    key_bytes_max: int = 1024
    """Bytes of a text key."""
    dims_max: int = 32
    """Dimensions of a shape."""
    elements_max: int = 1 << 38
    """Elements of a key."""
    name_bytes_max: int = 1024
    """Bytes of a host, an end point, a mode, a version, the name of a process."""
    sentence_bytes_max: int = 8192
    """Bytes of a text for people; a sender cuts longer texts."""
    body_bytes_max: int = 64 << 10
    """Bytes of the text of a command."""
    members_max: int = 1 << 16
    """Processes in a roster, and workers awaited."""
    entries_max: int = 64
    """Entries of an optimizer's description."""
    entry_name_bytes_max: int = 64
    """Bytes of the name of such an entry."""


DEFAULT = WireLimits()
"""The limits that WIRE.md states. A sender keeps to them."""
