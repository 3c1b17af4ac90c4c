"""Pieces of memory that other processes of this user can map: made by their owner, opened and checked by a peer.

A segment is a file that has no name (memfd), so nothing is left behind when a process is killed. A peer that knows
the owner's pid and descriptor number opens it through ``/proc``. Both numbers are given out again by the system, and
what a peer says may be wrong, so nothing is believed:

* The file must be one of ours and sealed against shrinking: reading a mapping whose file was cut kills the process.
* Its first page must hold the token that the descriptor names, 16 random bytes.
* What is read must lie behind that page and within the size that the system tells.
"""

from __future__ import annotations

import fcntl
import os
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from kvdist.errors import ProtocolError
from kvdist.transport.mapping import PAGE_BYTES, Bytes, address_of, map_file

NAME = "kvdist-arena"
MAGIC = b"kvdist's arena 1"
TOKEN_BYTES = 16
HEADER_BYTES = PAGE_BYTES
"""The first page: the magic, the token, zeros."""


@dataclass(eq=False)
class Segment:
    """One mapped segment, one's own or a peer's.

    Attributes:
        owner: the pid of the process that made it.
        number: its descriptor in that process.
        token: what its first page says.
        memory: all of it, the first page included. Outlives `close` as long as somebody shows it.
        file: its descriptor in this process; None after `close`.
        pin: keeps its pages in place for a GPU; None where there is none, or where that cannot be.
    """

    owner: int
    number: int
    token: bytes
    memory: Bytes
    file: int | None
    pin: object = None

    def __post_init__(self) -> None:
        self.nbytes = self.memory.nbytes
        self.address = address_of(self.memory)
        self.view = self.memory.data

    def close(self) -> None:
        """Give up the descriptor. Who has mapped the segment keeps it."""
        if self.file is not None:
            os.close(self.file)
            self.file = None


def create_segment(nbytes: int) -> Segment:
    """A new segment of this process, of whole pages, every page of it backed by memory.

    Raises:
        OSError: the system refused.
    """
    file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        # Writing to a page for the first time takes some ten times as long as writing to it again. fallocate says when
        # there is no memory; entering the pages at the mapping then costs what it would cost without.
        os.posix_fallocate(file, 0, nbytes)
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        memory = map_file(file, nbytes, writable=True)
    except BaseException:
        os.close(file)
        raise
    token = os.urandom(TOKEN_BYTES)
    segment = Segment(os.getpid(), file, token, memory, file)
    segment.view[: len(MAGIC) + TOKEN_BYTES] = MAGIC + token
    return segment


def open_segment(owner: int, number: int, token: bytes) -> Segment:
    """A peer's segment, mapped to be read.

    Raises:
        ProtocolError: it is gone, or not what it should be.
    """
    path = f"/proc/{owner}/fd/{number}"
    try:
        # Looked at before it is opened: opening a file of another kind may have effects.
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{NAME}"):
            raise ProtocolError(f"descriptor {number} of process {owner} is {target}, no shared memory of kvdist")
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ProtocolError(f"cannot open the shared memory of process {owner}: {error.strerror}") from error
    try:
        return Segment(owner, number, token, _checked(file, owner, token), file)
    except OSError as error:
        os.close(file)
        raise ProtocolError(f"cannot map the shared memory of process {owner}: {error.strerror}") from error
    except ProtocolError:
        os.close(file)
        raise


def _checked(file: int, owner: int, token: bytes) -> Bytes:
    if not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"the shared memory of process {owner} is not sealed against shrinking")
    nbytes = os.fstat(file).st_size
    if nbytes < HEADER_BYTES:
        raise ProtocolError(f"the shared memory of process {owner} has {nbytes} bytes, less than its first page")
    memory = map_file(file, nbytes)
    if memory[: len(MAGIC) + TOKEN_BYTES].tobytes() != MAGIC + token:
        raise ProtocolError(f"the shared memory of process {owner} is another one than was named")
    return memory


Pin = Callable[[Bytes], object]
"""Registers memory with a GPU, which then copies from and to it at full speed, until what is returned is let go."""


class SegmentTable:
    """Which segment an address lies in. Changed under its owner's lock, read by any thread without one."""

    def __init__(self) -> None:
        self._rows: tuple[list[int], list[Segment]] = ([], [])
        self._pin: Pin | None = None

    def __len__(self) -> int:
        return len(self._rows[1])

    def segments(self) -> list[Segment]:
        """All of them."""
        return list(self._rows[1])

    def pin_all(self, pin: Pin) -> None:
        """Pin every segment, those to come too, each once and for as long as it is in the table."""
        self._pin = pin
        for segment in self.segments():
            if segment.pin is None:  # another thread may have added it meanwhile
                segment.pin = pin(segment.memory)

    def add(self, segment: Segment) -> None:
        if self._pin is not None:
            segment.pin = self._pin(segment.memory)
        self._replace([*self._rows[1], segment])

    def discard(self, segment: Segment) -> None:
        segment.pin = None  # now, and not after its pages are unmapped
        self._replace([other for other in self._rows[1] if other is not segment])

    def find(self, address: int, nbytes: int) -> tuple[Segment, int] | None:
        """The segment that holds all of a buffer, and the buffer's offset in it."""
        starts, segments = self._rows
        index = bisect_right(starts, address) - 1
        if index < 0:
            return None
        segment = segments[index]
        offset = address - segment.address
        return (segment, offset) if offset + nbytes <= segment.nbytes else None

    def _replace(self, segments: list[Segment]) -> None:
        segments.sort(key=lambda segment: segment.address)
        self._rows = ([segment.address for segment in segments], segments)
