"""Lock of a directory of checkpoints: only a single job at a time saves into it.

The lock is the file ``lock.json`` in that directory, created by the process that writes manifests, and removed when its
job ends. Invariants:

* The owner holds a ``flock`` on the file, which the kernel releases when the process ends for any reason. A lock of
  this host that no process holds is stale, as its process was killed, and is taken over.
* The content of the file is for people, and for other hosts, whose kernels may not see the ``flock``. On a file system
  without ``flock`` only the content counts: a lock is stale if it is of this kernel and its process has ended. The name
  of the host is not enough, as cloned machines share it.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

from kvdist.checkpoint.files import make_durable, make_folder, open_regular, read_regular
from kvdist.config.addresses import boot_id, host_name
from kvdist.config.processes import may_run, this_process
from kvdist.errors import CheckpointError

LOG = logging.getLogger("kvdist")

NAME = "lock.json"
FORMAT = "kvdist lock"
BYTES_MAX = 4096
ATTEMPTS = 100
PAUSE_S = 0.05
"""Time between two attempts, while another process is creating or removing the lock."""
EMPTY_ATTEMPTS = ATTEMPTS // 2
"""Number of pauses after which an empty lock is stale: its process was killed before it wrote the content."""


@dataclass(slots=True, eq=False)
class _Lock:
    """A lock that this process holds."""

    descriptor: int
    made: list[Path]
    """Folders that were created for the lock, innermost first."""
    owners: Counter[Locks] = field(default_factory=Counter)
    """Holder → number of times it has taken the lock and not released it."""


class Locks:
    """Locks of a store, or of the scheduler of a job."""

    def take(self, directory: Path, run: str = "") -> str:
        """Lock a directory, and create it if it is missing. Locks of this process are counted.

        Args:
            directory: directory of checkpoints.
            run: run of the lost process that this process replaces; '' for a new run.

        Returns:
            The run, which identifies this job.

        Raises:
            CheckpointError: another job holds the lock; the message has the job and the remedy.
            OSError: the directory cannot be written.
        """
        with _MUTEX:
            if run and not _RUN:
                _RUN.append(run)
            place = directory.resolve()
            lock = _HELD.get(place)
            if lock is not None and not _is_at(lock.descriptor, place / NAME):
                os.close(_HELD.pop(place).descriptor)  # the lock was removed, perhaps with the folder
                lock = None
            if lock is None:
                release_when_terminated()
                lock = _HELD[place] = _taken(place)
            lock.owners[self] += 1
            return _run()

    def release(self, directory: Path) -> None:
        """Undo a single `take`. The last unlocks the directory, and removes empty folders that were created for the
        lock."""
        with _MUTEX:
            place = directory.resolve()
            lock = _HELD.get(place)
            if lock is not None:
                lock.owners -= Counter([self])  # drops holders with a count of 0
                if not lock.owners:
                    _released(place, _HELD.pop(place))

    def close(self) -> None:
        """Release all locks of this holder."""
        with _MUTEX:
            for place in [place for place, lock in _HELD.items() if self in lock.owners]:
                _HELD[place].owners[self] = 1
                self.release(place)


def require_run(directory: Path, run: str, wait_s: float = ATTEMPTS * PAUSE_S) -> None:
    """Check that this process sees a directory locked by this run.

    Raises:
        CheckpointError: it does not see the lock within `wait_s`: network file systems may show a new file late.
    """
    by = time.monotonic() + wait_s
    while (found := _content(directory / NAME).get("run")) != run:
        if time.monotonic() >= by:
            raise CheckpointError(
                f"{directory} is not the folder that the scheduler of this job sees under this path (this process sees"
                f" {'another' if found else 'no'} {NAME} in it): scheduler, servers and workers need a shared file"
                " system, at the same path on every host"
            )
        time.sleep(PAUSE_S)


_MUTEX = threading.RLock()
_HELD: dict[Path, _Lock] = {}
_Seen: TypeAlias = "dict[tuple[int, int, int], float]"
"""(device, inode, time of change) of a lock without content → time at which this process saw it first, on its monotonic
clock."""
NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
"""Errors of ``flock`` on a file system without it, such as Lustre mounted without that option."""
_RUN: list[str] = []
"""Run of this process and its job, drawn when first needed."""
ONLY_CONTENT = "only the content of that file shows whether another job saves into the folder"
_WARNED: list[str] = []
"""Last clauses of the warnings about file systems without ``flock`` that were logged."""


def _run() -> str:
    if not _RUN:
        _RUN.append(secrets.token_hex(8))
    return _RUN[0]


def _taken(directory: Path) -> _Lock:
    """Create the lock, or take over a stale lock."""
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    path = directory / NAME
    seen: _Seen = {}
    try:
        for _ in range(ATTEMPTS):
            make_folder(directory)  # another job may remove it when it ends
            descriptor = _attempt(path, seen)
            if descriptor is not None:
                make_durable(directory)
                return _Lock(descriptor, made)
            time.sleep(PAUSE_S)
    except BaseException:
        _remove_empty(made)
        raise
    raise CheckpointError(f"{path} is not a lock of kvdist; if no other job saves there, remove it")


def _attempt(path: Path, seen: _Seen) -> int | None:
    """Try to lock, and return the descriptor of the lock; None to try again."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        is_new = True
    except FileNotFoundError:
        return None
    except FileExistsError:
        try:
            with open_regular(path):  # neither a link nor a file whose opening could block
                descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        is_new = False
    try:
        has_flock = flocked(descriptor, fcntl.LOCK_EX | (0 if is_new else fcntl.LOCK_NB), path, ONLY_CONTENT)
        if _is_at(descriptor, path) and (is_new or _is_left_over(path, has_flock, seen)):
            _write(descriptor)
            if has_flock or is_new or _is_ours_still(path):
                return descriptor
    except BlockingIOError:
        owner = _content(path)
        if owner:
            os.close(descriptor)
            raise CheckpointError(_refusal(path, owner)) from None
    except BaseException:
        if is_new and _is_at(descriptor, path):
            path.unlink(missing_ok=True)
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def flocked(descriptor: int, operation: int, path: Path, otherwise: str) -> bool:
    """Lock an open file. Returns False if its file system lacks ``flock``, and logs a warning about this once.

    Args:
        descriptor, path: the file.
        operation: operation of ``flock``.
        otherwise: last clause of the warning: the protection of the file without ``flock``.

    Raises:
        BlockingIOError: another process has locked the file.
    """
    try:
        fcntl.flock(descriptor, operation)
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        if otherwise not in _WARNED:
            _WARNED.append(otherwise)
            LOG.warning("the file system of %s does not support flock (%s): %s", path, error.strerror, otherwise)
        return False
    return True


def _is_ours_still(path: Path) -> bool:
    """Return whether this process owns a lock that it has taken over without ``flock``, where the last of several
    writers owns it."""
    time.sleep(PAUSE_S)
    return _content(path).get("run") == _run()


def _is_left_over(path: Path, has_flock: bool, seen: _Seen) -> bool:
    """Return whether a lock that no process of this host holds, as far as is known without ``flock``, may be taken
    over; False to try again.

    Raises:
        CheckpointError: the owner may be live.
    """
    owner = _content(path)
    if not owner:
        found = path.stat()  # empty while it is being created, or for ever if its process was killed meanwhile
        now = time.monotonic()  # clocks of file servers, and clocks that are set meanwhile, do not count
        since = seen.setdefault((found.st_dev, found.st_ino, found.st_mtime_ns), now)
        return not found.st_size and now - since > EMPTY_ATTEMPTS * PAUSE_S
    if not _is_gone(owner, has_flock):
        raise CheckpointError(_refusal(path, owner))
    LOG.warning("%s was left over from a job that has ended (%s); it is taken over", path, _described(owner))
    return True


def _is_gone(owner: dict[str, Any], has_flock: bool) -> bool:
    """Return whether the owner of a lock has ended, as far as this host can know."""
    ours, theirs, is_this_host = boot_id(), owner.get("boot"), owner.get("host") == host_name()
    if not has_flock and (not ours or ours != theirs):
        return False  # the owner may be on a clone of this host
    if ours and theirs:  # else a kernel does not report its boot id
        if ours != theirs:
            return is_this_host  # a host that has been rebooted since
        if has_flock:
            return True
    # Another container of this kernel may number processes anew, but has another host name.
    return is_this_host and not _may_run(owner.get("process"))


def _may_run(process: object) -> bool:
    """Return whether the owner of a lock of this host may be live, and is another process than this."""
    if process == this_process():
        return False  # this process knows its locks
    try:
        return may_run(str(process))
    except ValueError:
        return True  # the file does not name a process


def _refusal(path: Path, owner: dict[str, Any]) -> str:
    return (
        f"another job saves into {path.parent} ({_described(owner)}): save into another folder, or wait until that job"
        f" has ended. If it does not run any more, remove {path}"
    )


def _described(owner: dict[str, Any]) -> str:
    pid, host, since, run = (str(owner.get(name))[:80] for name in ("pid", "host", "since", "run"))
    if owner.get("host") == host_name() and owner.get("boot") != boot_id():
        host += " (before it was started again, or another host of that name)"
    return f"process {pid} on host {host}, since {since}, run {run}"


def _write(descriptor: int) -> None:
    content = {
        "format": FORMAT,
        "host": host_name(),
        "boot": boot_id(),
        "pid": os.getpid(),  # for people
        "process": this_process(),
        "run": _run(),
        "since": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    os.ftruncate(descriptor, 0)
    text = json.dumps(content, indent=1).encode() + b"\n"
    if os.pwrite(descriptor, text, 0) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.fsync(descriptor)


def _content(path: Path) -> dict[str, Any]:
    """Return the content of a lock; empty if the lock is missing, or is being written."""
    try:
        found = json.loads(read_regular(path, BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def _is_at(descriptor: int, path: Path) -> bool:
    """Return whether a path still leads to this open file."""
    with contextlib.suppress(OSError):
        return os.path.samestat(os.fstat(descriptor), os.lstat(path))
    return False


def _released(directory: Path, lock: _Lock) -> None:
    with contextlib.suppress(OSError):
        if _is_at(lock.descriptor, directory / NAME):
            (directory / NAME).unlink()
    os.close(lock.descriptor)
    _remove_empty(lock.made)


def _remove_empty(folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # a folder is not empty
        for folder in folders:
            folder.rmdir()


def release_when_terminated() -> None:
    """Release the locks on SIGTERM before the process ends, as other hosts could not see its end.

    A handler of the program itself stays; outside the main thread nothing changes.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_by)


def _end_by(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # first, so that a second signal ends the process at once
    _release_all()
    os.kill(os.getpid(), number)


def _release_all() -> None:
    """Release all locks at the end of this process."""
    with _MUTEX:
        while _HELD:
            _released(*_HELD.popitem())


def _forget() -> None:
    """Drop the locks in a forked child: they belong to its parent, and must end with the parent."""
    global _MUTEX
    _MUTEX = threading.RLock()
    for lock in _HELD.values():
        os.close(lock.descriptor)
    _HELD.clear()
    _RUN.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget)
