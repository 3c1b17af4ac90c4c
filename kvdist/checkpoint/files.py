"""Durable files: complete, checked and permanent before they get their names.

Invariants:

* A file gets its final name only when all its bytes are on the disk; until then its name ends in ``.part``.
* The name has the first digits of the SHA-256 of the content, so it never replaces a file with other content.
* Only regular files are read, never through a symbolic link, and opening a file never blocks, as a named pipe would.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
from collections.abc import Iterable, Iterator
from io import FileIO
from pathlib import Path
from typing import IO

from kvdist.checkpoint.snapshot import FileRecord
from kvdist.errors import CheckpointError

CHUNK_BYTES = 8 << 20
DIGITS = 16
"""Number of digits of the checksum in a name."""
PART = ".part"


def write_file(folder: Path, stem: str, suffix: str, parts: Iterable[memoryview]) -> FileRecord:
    """Write ``<stem>-<digits><suffix>`` into the folder, in a single pass over the bytes. Creates a missing folder.

    Args:
        folder: folder of the file.
        stem: beginning of its name.
        suffix: end of its name, with the dot.
        parts: content, as contiguous views of bytes.

    Raises:
        OSError: writing failed, as on a full disk. No unfinished file is left. If only the sync of the folder failed,
            the complete file stays, as an earlier attempt may have written the same file.
    """
    make_folder(folder)
    with _unfinished(folder / f"{stem}{suffix}") as unfinished:
        nbytes, digits = _write(unfinished, parts)
        record = FileRecord(f"{stem}-{digits[:DIGITS]}{suffix}", nbytes, digits)
        os.replace(unfinished, folder / record.name)
    make_durable(folder)
    return record


def replace_file(path: Path, content: bytes) -> None:
    """Replace the content of a file atomically: a reader sees the old content or the new content."""
    with _unfinished(path) as unfinished:
        _write(unfinished, [memoryview(content)])
        os.replace(unfinished, path)
    make_durable(path.parent)


def write_named_file(path: Path, parts: Iterable[memoryview], overwrite: bool) -> FileRecord:
    """Write a file under this exact name atomically. Its folder must exist.

    Raises:
        FileExistsError: the file exists, and `overwrite` is False.
        OSError: writing failed, as on a full disk. No unfinished file is left.
    """
    with _unfinished(path) as unfinished:
        nbytes, digits = _write(unfinished, parts)
        if overwrite:
            os.replace(unfinished, path)
        else:
            _rename_to_nothing(unfinished, path)
    make_durable(path.parent)
    return FileRecord(path.name, nbytes, digits)


@contextlib.contextmanager
def _unfinished(path: Path) -> Iterator[Path]:
    """Yield the temporary name of a file that is being written. After any failure no file has this name."""
    unfinished = path.with_name(f"{path.name}.{os.getpid()}{PART}")
    unfinished.unlink(missing_ok=True)  # from a killed process with the same process id, or from a stranger
    try:
        yield unfinished
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _write(unfinished: Path, parts: Iterable[memoryview]) -> tuple[int, str]:
    """Write a new file and make its bytes permanent; returns its length and its checksum."""
    digest, nbytes = hashlib.sha256(), 0
    with open(unfinished, "xb", buffering=0) as file:
        for part in parts:
            nbytes += len(part)
            _write_part(file, digest, part)
            del part  # or two parts would be in memory at once
        os.fsync(file.fileno())
    return nbytes, digest.hexdigest()


def _write_part(file: IO[bytes], digest: hashlib._Hash, part: memoryview) -> None:
    for start in range(0, len(part), CHUNK_BYTES):
        chunk = part[start : start + CHUNK_BYTES]
        digest.update(chunk)
        while chunk:
            chunk = chunk[file.write(chunk) :]


def _rename_to_nothing(unfinished: Path, path: Path) -> None:
    """Rename a file, unless a file has the new name already."""
    try:
        os.link(unfinished, path)
    except FileExistsError:
        raise
    except OSError:  # the file system lacks hard links
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(unfinished, path)
    else:
        unfinished.unlink()


def make_folder(folder: Path) -> None:
    """Create a folder and its parents, and make each permanent: a file is lost with the name of its folder."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)  # another process may be creating it, too
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    make_durable(folder.parent)


def make_durable(folder: Path) -> None:
    """Make new, changed and removed names in a folder survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


def check_room(folder: Path, stem: str, nbytes: int) -> None:
    """Check that a file of this size and stem could be written into a folder, as far as can be known.

    Raises:
        CheckpointError: the disk has less free space.
        OSError: no file can be written into the folder.
    """
    make_folder(folder)
    with _unfinished(folder / stem) as probe:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        probe.unlink()
    found = os.statvfs(folder)
    room = found.f_bavail * found.f_frsize
    if found.f_blocks and room < nbytes:
        raise CheckpointError(
            f"{folder} has room for {room} bytes, and a part of the checkpoint needs {nbytes}: make room, or save"
            " elsewhere"
        )


def open_regular(path: Path) -> FileIO:
    """Open a regular file for reading, unbuffered. Never blocks, and follows no symbolic link at the end of the path.

    Raises:
        CheckpointError: the path leads to something else: a link, a named pipe, a device.
        OSError: the file is missing, or may not be read.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        if path.is_symlink() or error.errno == errno.ENXIO:  # the error for a socket
            raise _not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _not_regular(path)
    return FileIO(descriptor, "rb")


def read_regular(path: Path, nbytes_max: int) -> bytes:
    """Return the content of a short regular file.

    Raises:
        CheckpointError: as in `open_regular`, or the file is longer than `nbytes_max`.
        OSError: the file is missing, or cannot be read.
    """
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > nbytes_max:
            raise CheckpointError(f"{path} has {nbytes} bytes, where at most {nbytes_max} are expected")
        return file.readall()


def _not_regular(path: Path) -> CheckpointError:
    kind = "a symbolic link" if path.is_symlink() else "not a regular file"
    return CheckpointError(f"{path} is {kind}; the files of a checkpoint must be regular files: put a copy there")


def require_present(folder: Path, record: FileRecord) -> None:
    """Check that a file exists and has its length.

    Raises:
        CheckpointError: the file is missing, not regular, or has another length.
    """
    path = folder / record.name
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(
            f"{path} is not there ({error.strerror}). Servers, workers and scheduler must all see the folder of"
            " checkpoints under the same path: on several hosts it must be on a file system that they share. And no"
            " other store may save into it"
        ) from None
    if not stat.S_ISREG(found.st_mode):
        raise _not_regular(path)
    if found.st_size != record.nbytes:
        raise CheckpointError(
            f"{path} has {found.st_size} bytes where {record.nbytes} were written: it is cut off or changed"
        )


def require_intact(folder: Path, record: FileRecord) -> None:
    """Check that a file exists and has its checksum, in a single pass over the file.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is damaged.
    """
    require_present(folder, record)
    path = folder / record.name
    with explained(f"{path} could not be read"):
        found = record_of(folder, record.name)
    if found.sha256 != record.sha256:
        raise CheckpointError(f"{path} is damaged: its content does not have the checksum with which it was written")


def record_of(folder: Path, name: str) -> FileRecord:
    """Return the record of an existing file, in a single pass over the file."""
    digest, nbytes = hashlib.sha256(), 0
    with open_regular(folder / name) as file:
        for chunk in iter(lambda: file.read(CHUNK_BYTES), b""):
            digest.update(chunk)
            nbytes += len(chunk)
    return FileRecord(name, nbytes, digest.hexdigest())


def read_intact(folder: Path, record: FileRecord) -> bytes:
    """Return the content of a short file.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is damaged.
    """
    require_present(folder, record)
    path = folder / record.name
    with explained(f"{path} could not be read"):
        content = read_regular(path, record.nbytes)
    if hashlib.sha256(content).hexdigest() != record.sha256:
        raise CheckpointError(f"{path} is damaged: its content does not have the checksum with which it was written")
    return content


@contextlib.contextmanager
def explained(what: str) -> Iterator[None]:
    """Convert an `OSError` to a `CheckpointError` about the operation `what`."""
    try:
        yield
    except OSError as error:
        named = f" ({error.filename})" if error.filename and str(error.filename) not in what else ""
        raise CheckpointError(f"{what}: {error.strerror or error}{named}") from error
