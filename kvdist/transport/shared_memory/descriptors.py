"""The bytes that replace frames in shared memory, and the messages by which two processes agree to use them.

Bytes, little-endian:

* A *greeting* is a message of a single frame: the magic, the pid and descriptor number of the sender's file (u32 each),
  its token, and the token of the receiver's file if the sender has read it, else zeros.
* A *fallback* is a message of a single frame: the magic, and in UTF-8 why its sender cannot read the receiver's file
  any more. The receiver sends every frame whole from then on.
* A *pack* is a message of a single frame that holds several messages of small frames, because each message that leaves
  wakes the thread that writes: the magic, then for each message the number of its frames, their lengths (u32 each) and
      the frames themselves.
* A *table* is the last frame of a message: the magic, then for each frame that was left out its index (u64), its offset
  in the sender's file and its length (u64 each). In its place in the message stands an empty frame.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kvdist.errors import ProtocolError
from kvdist.transport.shared_memory.segments import TOKEN_BYTES, SharedFile

GREETING_MAGIC = b"\xffkvdist:greeting"
FALLBACK_MAGIC = b"\xffkvdist:fallback"
TABLE_MAGIC = b"\xffkvdist:table\2\0\0"
PACK_MAGIC = b"\xffkvdist:pack\1\0\0\0"
FRAMES_MAX = 64
"""Largest number of frames of a message in a pack."""
MAGIC_BYTES = 16
GREETING = struct.Struct("<16sII16s16s")
ENTRY = struct.Struct("<QQQ")
NO_TOKEN = bytes(TOKEN_BYTES)
REASON_BYTES_MAX = 500


@dataclass(frozen=True, slots=True)
class Greeting:
    """The sender's file, and which file it could read."""

    owner: int
    number: int
    token: bytes
    has_read: bytes


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Location of the bytes of a frame."""

    frame: int
    offset: int
    length: int


def greeting(file: SharedFile, has_read: bytes = NO_TOKEN) -> bytes:
    return GREETING.pack(GREETING_MAGIC, file.owner, file.number, file.token, has_read)


def read_greeting(frames: Sequence[memoryview]) -> Greeting | None:
    """The greeting, or None for an ordinary message."""
    if len(frames) != 1 or frames[0].nbytes != GREETING.size or frames[0][:MAGIC_BYTES] != GREETING_MAGIC:
        return None
    _, owner, number, token, has_read = GREETING.unpack(frames[0])
    return Greeting(owner, number, token, has_read)


def fallback(reason: str) -> bytes:
    return FALLBACK_MAGIC + reason.encode()[:REASON_BYTES_MAX]


def read_fallback(frames: Sequence[memoryview]) -> str | None:
    """The reason, or None for an ordinary message."""
    if len(frames) != 1 or frames[0][:MAGIC_BYTES] != FALLBACK_MAGIC:
        return None
    return bytes(frames[0][MAGIC_BYTES : MAGIC_BYTES + REASON_BYTES_MAX]).decode(errors="replace")


def entry(frame: int, offset: int, length: int) -> bytes:
    return ENTRY.pack(frame, offset, length)


def table(entries: Sequence[bytes]) -> bytes:
    return b"".join([TABLE_MAGIC, *entries])


def is_table(frame: bytes | bytearray | memoryview) -> bool:
    """Whether a contiguous frame begins as a table does."""
    return memoryview(frame).cast("B")[:MAGIC_BYTES] == TABLE_MAGIC


def read_table(frames: Sequence[memoryview]) -> list[Descriptor]:
    """The entries of the last frame.

    Raises:
        ProtocolError: they do not fit the message.
    """
    entries = frames[-1][MAGIC_BYTES:]
    if len(entries) % ENTRY.size:
        raise ProtocolError(f"a table of {len(entries)} bytes, where an entry has {ENTRY.size}")
    found = [Descriptor(*fields) for fields in ENTRY.iter_unpack(entries)]
    left_out = [one.frame for one in found]
    if len(set(left_out)) < len(left_out) or any(index >= len(frames) - 1 or frames[index] for index in left_out):
        raise ProtocolError("a table that names a frame twice, or one that is there")
    return found


def pack(messages: Sequence[Sequence[bytes | bytearray | memoryview]]) -> bytes:
    pieces: list[bytes | bytearray | memoryview] = [PACK_MAGIC]
    for frames in messages:
        views = [memoryview(frame).cast("B") for frame in frames]
        pieces.append(struct.pack(f"<{len(views) + 1}I", len(views), *map(len, views)))
        pieces += views
    return b"".join(pieces)


def is_pack(frames: Sequence[bytes | bytearray | memoryview]) -> bool:
    """Whether a message looks like a pack."""
    return len(frames) == 1 and memoryview(frames[0]).cast("B")[:MAGIC_BYTES] == PACK_MAGIC


def read_pack(frame: memoryview) -> list[list[memoryview]]:
    """The messages of a pack; they show its memory.

    Raises:
        ProtocolError: its lengths do not fit.
    """
    messages = []
    position, end = MAGIC_BYTES, len(frame)
    try:
        while position < end:
            (count,) = struct.unpack_from("<I", frame, position)
            if not 0 < count <= FRAMES_MAX:
                raise ProtocolError(f"a message of {count} frames in a pack")
            lengths = struct.unpack_from(f"<{count}I", frame, position + 4)
            position += 4 + 4 * count
            if position + sum(lengths) > end:
                raise ProtocolError("a pack that ends within a message")
            frames = []
            for length in lengths:
                frames.append(frame[position : position + length])
                position += length
            messages.append(frames)
    except struct.error:
        raise ProtocolError("a pack that ends within a message") from None
    return messages
