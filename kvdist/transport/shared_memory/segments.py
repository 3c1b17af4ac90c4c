"""Shared memory files (memfd): created by their owner, opened, checked and mapped by peers of the same user.

A file has no name (memfd), so a killed process leaves none behind. A process has a single file for all memory that its
peers may read, which only grows, so that it costs a descriptor in this process and in each peer, however large it
becomes. Each time it has grown, the new part is mapped as another segment.

A peer that knows the owner's pid and descriptor number opens the file through ``/proc``. The system reuses both
numbers, and the peer's data may be wrong, so everything is checked:

* The file must be of kvdist and sealed against shrinking: reading a mapping whose file was cut kills the process.
* Its first page must hold the token of the greeting, 16 random bytes.
* All reads must lie behind that page and within the size that the system reports.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from kvdist.errors import ProtocolError
from kvdist.transport.shared_memory.mapping import PAGE_BYTES, Bytes, address_of, lengthen_file, map_file

NAME = "kvdist-arena"
MAGIC = b"kvdist's arena 2"
TOKEN_BYTES = 16
HEADER_BYTES = PAGE_BYTES
"""The first page: the magic, the token, zeros."""


class Exhausted(ProtocolError):
    """This process has reached a limit of open or mapped files; the peer is not at fault."""


class SharedFile:
    """A file of shared memory, of this process or of a peer.

    Attributes:
        owner: the pid of the process that created it.
        number: its descriptor in that process.
        token: the token on its first page.
        descriptor: its descriptor in this process; None after `close`.
        bytes_mapped: offset up to which it is mapped in this process, except for its first page.
    """

    def __init__(self, owner: int, number: int, token: bytes, descriptor: int) -> None:
        self.owner = owner
        self.number = number
        self.token = token
        self.descriptor: int | None = descriptor
        self.bytes_mapped = HEADER_BYTES

    def grow(self, nbytes: int) -> Segment:
        """Add `nbytes`, whole pages, to a file of this process.

        Raises:
            OSError: the system refused.
        """
        memory = lengthen_file(self._open(), self.bytes_mapped, nbytes)
        return self._mapped(memory)

    def map_rest(self, end: int) -> Segment:
        """Map the part that a peer has added since the last call.

        Args:
            end: offset that the file must reach.

        Raises:
            ProtocolError: it ends before.
            Exhausted: this process may map no more.
        """
        descriptor = self._open()
        nbytes = os.fstat(descriptor).st_size
        if end > nbytes:
            raise ProtocolError(f"byte {end} is not in the shared memory of process {self.owner}, which has {nbytes}")
        try:
            memory = map_file(descriptor, self.bytes_mapped, nbytes - self.bytes_mapped)
        except OSError as error:
            raise _error("map", self.owner, error) from error
        return self._mapped(memory)

    def close(self) -> None:
        """Close the descriptor. Mapped segments stay mapped."""
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None

    def _open(self) -> int:
        assert self.descriptor is not None, "closed files are not mapped"
        return self.descriptor

    def _mapped(self, memory: Bytes) -> Segment:
        segment = Segment(self, self.bytes_mapped, memory)
        self.bytes_mapped += memory.nbytes
        return segment


@dataclass(eq=False)
class Segment:
    """A mapped stretch of a file.

    Attributes:
        file: the file.
        offset: offset of its begin in the file.
        memory: all of it. Outlives the file as long as an array shows it.
        pin: keeps its pages in place for a GPU; None without a GPU, or where pinning failed.
    """

    file: SharedFile
    offset: int
    memory: Bytes
    pin: object = None

    def __post_init__(self) -> None:
        self.nbytes = self.memory.nbytes
        self.address = address_of(self.memory)
        self.view = self.memory.data


def create_file() -> SharedFile:
    """A new file of this process with only its first page.

    Raises:
        OSError: the system refused.
    """
    descriptor = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    token = os.urandom(TOKEN_BYTES)
    try:
        os.posix_fallocate(descriptor, 0, HEADER_BYTES)
        os.pwrite(descriptor, MAGIC + token, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(descriptor)
        raise
    return SharedFile(os.getpid(), descriptor, token, descriptor)


def open_file(owner: int, number: int, token: bytes) -> SharedFile:
    """A peer's file.

    Raises:
        ProtocolError: it does not exist, or is not a sealed file of kvdist with this token.
        Exhausted: this process may open no more files.
    """
    path = f"/proc/{owner}/fd/{number}"
    try:
        # Looked at before it is opened: opening a file of another kind may have effects.
        target = os.readlink(path)
        if not target.startswith(f"/memfd:{NAME}"):
            raise ProtocolError(
                f"descriptor {number} of process {owner} is {target}, which is not shared memory of kvdist"
            )
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise _error("open", owner, error) from error
    try:
        _check(descriptor, owner, token)
    except OSError as error:  # another kind of file has got this descriptor number meanwhile
        os.close(descriptor)
        raise _error("read", owner, error) from error
    except BaseException:
        os.close(descriptor)
        raise
    return SharedFile(owner, number, token, descriptor)


def _check(descriptor: int, owner: int, token: bytes) -> None:
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise ProtocolError(f"the shared memory of process {owner} is not sealed against shrinking")
    nbytes = os.fstat(descriptor).st_size
    if nbytes < HEADER_BYTES:
        raise ProtocolError(f"the shared memory of process {owner} has {nbytes} bytes, less than its first page")
    if os.pread(descriptor, len(MAGIC) + TOKEN_BYTES, 0) != MAGIC + token:
        raise ProtocolError(f"the shared memory of process {owner} does not have the token that was named")


def _error(verb: str, owner: int, error: OSError) -> ProtocolError:
    """The error for a refused system call."""
    what = f"cannot {verb} the shared memory of process {owner}"
    if error.errno == errno.EMFILE:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return Exhausted(f"{what}: this process has open all of the {soft} files that it may (raise it: ulimit -n)")
    if error.errno == errno.ENFILE:
        return Exhausted(f"{what}: this machine has open all files that it may (raise it: sysctl fs.file-max)")
    if error.errno == errno.ENOMEM:
        return Exhausted(f"{what}: this process may map no more memory (see ulimit -v, sysctl vm.max_map_count)")
    return ProtocolError(f"{what}: {error.strerror}")


Pin = Callable[[Bytes], object]
"""Registers memory with a GPU, which then copies from and to it at full speed, until the returned object is freed."""


class SegmentTable:
    """Finds the segment of an address. Changed under its owner's lock, read by any thread without one."""

    def __init__(self) -> None:
        self._rows: tuple[list[int], list[Segment]] = ([], [])
        self._pin: Pin | None = None

    def __len__(self) -> int:
        return len(self._rows[1])

    def segments(self) -> list[Segment]:
        """All segments."""
        return list(self._rows[1])

    def pin_all(self, pin: Pin) -> None:
        """Pin every present and later segment, each once and for as long as it is in the table."""
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
        """The segment that contains a whole buffer, and the buffer's offset in it; None if no segment does."""
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
