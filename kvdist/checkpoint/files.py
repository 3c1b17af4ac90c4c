"""Durable files: written whole, checked and made permanent before they have their name.

Rules that hold here:

* A file gets its final name only when all its bytes are on the disk; until then it ends in ``.part``.
* The name has the first digits of the SHA-256 of the content, so it never replaces a file with another content.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kvdist.errors import CheckpointError

CHUNK_BYTES = 8 << 20
DIGITS = 16
"""Of the checksum, in a name."""
PART = ".part"


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file without opening it.

    Attributes:
        name: within its folder.
        nbytes: its length.
        sha256: of its content, 64 hexadecimal digits.
    """

    name: str
    nbytes: int
    sha256: str


def write_file(folder: Path, stem: str, suffix: str, parts: Iterable[memoryview]) -> FileRecord:
    """Write ``<stem>-<digits><suffix>`` into the folder, which is made if need be. One pass over the bytes.

    Args:
        folder: where.
        stem: how its name begins.
        suffix: how its name ends, with the dot.
        parts: the content; each a contiguous view of bytes.

    Raises:
        OSError: the disk is full, say. Nothing of the file is left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f"{stem}{suffix}.{os.getpid()}{PART}"
    digest, nbytes = hashlib.sha256(), 0
    try:
        with open(unfinished, "wb", buffering=0) as file:
            for part in parts:
                for start in range(0, len(part), CHUNK_BYTES):
                    chunk = part[start : start + CHUNK_BYTES]
                    digest.update(chunk)
                    nbytes += len(chunk)
                    while chunk:
                        chunk = chunk[file.write(chunk) :]
            os.fsync(file.fileno())
        record = FileRecord(f"{stem}-{digest.hexdigest()[:DIGITS]}{suffix}", nbytes, digest.hexdigest())
        os.replace(unfinished, folder / record.name)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    make_durable(folder)
    return record


def replace_file(path: Path, content: bytes) -> None:
    """Give the file this content at one stroke: whoever reads it finds the old one or the new one."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    try:
        with open(unfinished, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise
    make_durable(path.parent)


def make_durable(folder: Path) -> None:
    """Make what was named, renamed and removed in the folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_present(folder: Path, record: FileRecord) -> None:
    """Whether the file is there, with its length.

    Raises:
        CheckpointError: it is not.
    """
    path = folder / record.name
    try:
        nbytes = path.stat().st_size
    except OSError as error:
        raise CheckpointError(
            f"{path} is not there ({error.strerror}). Servers, workers and scheduler must all see the folder of"
            " checkpoints under the same path: on several hosts it must be on a file system that they share"
        ) from None
    if nbytes != record.nbytes:
        raise CheckpointError(f"{path} has {nbytes} bytes where {record.nbytes} were written: it is cut off or changed")


def require_intact(folder: Path, record: FileRecord) -> None:
    """Whether the file is there and has its content, by its checksum; one pass over it.

    Raises:
        CheckpointError: it is not, or has another.
    """
    require_present(folder, record)
    path = folder / record.name
    if record_of(folder, record.name).sha256 != record.sha256:
        raise CheckpointError(f"{path} is damaged: its content does not have the checksum with which it was written")


def record_of(folder: Path, name: str) -> FileRecord:
    """What is known of a file that is there; one pass over it."""
    digest, nbytes = hashlib.sha256(), 0
    with open(folder / name, "rb", buffering=0) as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileRecord(name, nbytes, digest.hexdigest())


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Say of an `OSError` what could not be done."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what}: {error.strerror or error}") from error
