"""The lock of a folder of checkpoints: one job at a time saves into it.

The lock is the file ``lock.json`` in that folder, made by the process that writes manifests, and removed when its job
ends. Rules that hold here:

* Its owner has it locked with ``flock``, which the kernel releases when the process ends, however it ends. A lock of
  this host that no process holds is left over from a process that was killed, and is taken over.
* What the file says is for other hosts, whose kernels may not know of it, and for people. It alone counts on a file
  system that has no ``flock``: a lock is left over there if it is of this kernel and its process is gone. The name of a
  host does not tell there: cloned machines have the same.
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
"""Between two attempts: another process is making or removing the lock."""
EMPTY_ATTEMPTS = ATTEMPTS // 2
"""For as many pauses a lock has been seen empty and unchanged: who made it was killed before it wrote."""


@dataclass(slots=True, eq=False)
class _Lock:
    """A lock that this process holds."""

    descriptor: int
    made: list[Path]
    """The folders that were made for it, innermost first."""
    owners: Counter[Locks] = field(default_factory=Counter)
    """Each with how often it has taken the lock and not released it."""


class Locks:
    """The folders into which one store, or the scheduler of a job, saves."""

    def take(self, directory: Path, run: str = "") -> str:
        """Lock a folder, which is made if need be, unless this process holds the lock already.

        Args:
            directory: the folder.
            run: that of the process whose place this one takes; empty for one of its own.

        Returns:
            The run: what tells this job from others.

        Raises:
            CheckpointError: another job holds the lock; says which, and what to do.
            OSError: the folder cannot be written.
        """
        with _MUTEX:
            if run and not _RUN:
                _RUN.append(run)
            place = directory.resolve()
            lock = _HELD.get(place)
            if lock is not None and not _is_at(lock.descriptor, place / NAME):
                os.close(_HELD.pop(place).descriptor)  # it was removed, with the folder perhaps
                lock = None
            if lock is None:
                release_when_terminated()
                lock = _HELD[place] = _taken(place)
            lock.owners[self] += 1
            return _run()

    def release(self, directory: Path) -> None:
        """Take back one `take`. After the last one other jobs may save there, and folders that were made for it go
        away if they are empty."""
        with _MUTEX:
            place = directory.resolve()
            lock = _HELD.get(place)
            if lock is not None:
                lock.owners -= Counter([self])  # which drops who has taken it no more
                if not lock.owners:
                    _released(place, _HELD.pop(place))

    def close(self) -> None:
        """Release all."""
        with _MUTEX:
            for place in [place for place, lock in _HELD.items() if self in lock.owners]:
                _HELD[place].owners[self] = 1
                self.release(place)


def require_run(directory: Path, run: str, wait_s: float = ATTEMPTS * PAUSE_S) -> None:
    """Whether a folder is locked by this run, as seen from here.

    Raises:
        CheckpointError: it is not, within `wait_s`: file systems of networks may show a new file late.
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
"""Locks without content, by device, inode and time of change → when this process saw them first, on its own clock."""
NO_FLOCK = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOLCK})
"""What ``flock`` gives on a file system without it, as Lustre mounted without that option."""
_RUN: list[str] = []
"""Drawn when it is first needed: one for a process, and for the job that it saves for."""
ONLY_CONTENT = "only the content of that file shows whether another job saves into the folder"
_WARNED: list[str] = []
"""Warnings about file systems without ``flock`` that were logged, by their last clause."""


def _run() -> str:
    if not _RUN:
        _RUN.append(secrets.token_hex(8))
    return _RUN[0]


def _taken(directory: Path) -> _Lock:
    """Make the lock, or take over one that is left over."""
    made = [one for one in (directory, *directory.parents) if not one.exists()]
    path = directory / NAME
    seen: _Seen = {}
    try:
        for _ in range(ATTEMPTS):
            make_folder(directory)  # which another job may remove when it ends
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
    """The descriptor of the lock, which is ours; None to try again."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        is_new = True
    except FileNotFoundError:
        return None
    except FileExistsError:
        try:
            with open_regular(path):  # no link, and nothing that would wait
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
        if is_new:
            path.unlink()
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def flocked(descriptor: int, operation: int, path: Path, otherwise: str) -> bool:
    """Lock an open file. False: its file system cannot, which a warning says once.

    Args:
        descriptor, path: the file.
        operation: the operation of ``flock``.
        otherwise: last clause of the warning: what protects the file without a lock.

    Raises:
        BlockingIOError: another process has it locked.
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
    """Whether this process has taken over a lock, where nothing keeps two from doing it at once: the last one has."""
    time.sleep(PAUSE_S)
    return _content(path).get("run") == _run()


def _is_left_over(path: Path, has_flock: bool, seen: _Seen) -> bool:
    """Whether a lock may be taken over that no process of this host holds, as far as is known without ``flock``.

    False: ask again.

    Raises:
        CheckpointError: its owner may live.
    """
    owner = _content(path)
    if not owner:
        found = path.stat()  # empty: it is being made, or who made it was killed at that
        now = time.monotonic()  # the clock of a file server, or one that is set meanwhile, does not count
        since = seen.setdefault((found.st_dev, found.st_ino, found.st_mtime_ns), now)
        return not found.st_size and now - since > EMPTY_ATTEMPTS * PAUSE_S
    if not _is_gone(owner, has_flock):
        raise CheckpointError(_refusal(path, owner))
    LOG.warning("%s was left over from a job that has ended (%s); it is taken over", path, _described(owner))
    return True


def _is_gone(owner: dict[str, Any], has_flock: bool) -> bool:
    """Whether the process that a lock names has ended, as far as this host can know."""
    ours, theirs, is_this_host = boot_id(), owner.get("boot"), owner.get("host") == host_name()
    if not has_flock and (not ours or ours != theirs):
        return False  # a clone of this host may have it
    if ours and theirs:  # else a kernel does not say which it is
        if ours != theirs:
            return is_this_host  # which was started again since
        if has_flock:
            return True
    # Another container of this kernel may count processes anew, but has another name.
    return is_this_host and not _may_run(owner.get("process"))


def _may_run(process: object) -> bool:
    """Whether the process of this host that has left its word may run, and is not this one."""
    if process == this_process():
        return False  # this one knows its locks
    try:
        return may_run(str(process))
    except ValueError:
        return True  # the file does not say


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
    """What a lock says; empty if there is none, or it is being written."""
    try:
        found = json.loads(read_regular(path, BYTES_MAX))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and found.get("format") == FORMAT else {}


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether this open file is still the one of that name."""
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
    with contextlib.suppress(OSError):  # it is not empty
        for folder in folders:
            folder.rmdir()


def release_when_terminated() -> None:
    """Let SIGTERM release the locks before it ends this process, which other hosts could not see.

    A program with a handler of its own keeps it; outside the main thread nothing changes.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _end_by)


def _end_by(number: int, _: object) -> None:
    signal.signal(number, signal.SIG_DFL)  # first: a second signal waits for nothing
    _release_all()
    os.kill(os.getpid(), number)


def _release_all() -> None:
    """This process ends: let other jobs save."""
    with _MUTEX:
        while _HELD:
            _released(*_HELD.popitem())


def _forget() -> None:
    """In a forked child: the locks are its parent's, and must end with it."""
    global _MUTEX
    _MUTEX = threading.RLock()
    for lock in _HELD.values():
        os.close(lock.descriptor)
    _HELD.clear()
    _RUN.clear()


atexit.register(_release_all)
os.register_at_fork(after_in_child=_forget)
