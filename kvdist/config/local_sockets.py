"""Sockets of jobs that stay on one machine: files in a folder that only their user can enter.

The file of a scheduler is named after the network namespace and the port, so that processes that are told the same
loopback address and port find each other, and nobody else. Every other listener adds a random part. The folder's path
depends on the user alone, not on variables such as TMPDIR that may differ between the shells of one job. It stays;
files are removed by whoever bound them, and those of killed processes by the next that binds or closes one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvdist.errors import ConfigError

SCHEME = "ipc://"
BACKLOG = 4096
TABLE = Path("/proc/net/unix")
"""Every socket of this network namespace that has an address."""


def private_folder() -> str:
    """Where the sockets of this user lie."""
    return f"/tmp/kvdist-{os.geteuid()}"


def local_endpoint(port: int) -> str:
    """Where the scheduler of a job listens that has this port of a loopback address and stays on this machine."""
    return f"{SCHEME}{private_folder()}/{_network()}-{port}"


def further_endpoint(port: int) -> str:
    """A free place for another listener of the same job."""
    return f"{local_endpoint(port)}-{secrets.token_hex(4)}"


def port_of_local(endpoint: str) -> int | None:
    """The port of a `local_endpoint`; None for any other endpoint."""
    head, _, port = endpoint.rpartition("-")
    return int(port) if port.isdigit() and endpoint == local_endpoint(int(port)) and head else None


def require_private_folder() -> None:
    """Make the folder, or see that it is what it should be.

    Raises:
        ConfigError: it cannot be made, or others could reach what lies in it.
    """
    folder = private_folder()
    advice = "or encrypt the job (kvdist-launch --security curve, KVDIST_SECRET_FILE), which then uses TCP"
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found, parent = os.lstat(folder), os.stat(os.path.dirname(folder)).st_mode
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} for the sockets of this machine cannot be made ({error.strerror}): make it possible,"
            f" {advice}"
        ) from error
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"can be entered by others (mode {stat.S_IMODE(found.st_mode):04o}, expected 0700)"
    elif parent & stat.S_IWOTH and not parent & stat.S_ISVTX:
        problem = "can be renamed by others, as the folder around it has no sticky bit (chmod +t)"
    else:
        return
    raise ConfigError(f"{folder}, where the sockets of this machine lie, {problem}: remove it, {advice}")


def is_bound(endpoint: str) -> bool:
    """Whether somebody listens at a `local_endpoint`, as far as the system tells."""
    return endpoint.removeprefix(SCHEME) in (_bound_paths() or ())


def listen_at(path: str) -> socket.socket:
    """A socket that listens at a path, in place of one that a killed process has left there.

    Raises:
        ConfigError: something else lies there.
        OSError: somebody listens there (EADDRINUSE), or the system refuses.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _locked(os.path.dirname(path)):
            sweep(os.path.dirname(path))
            _remove_stale(path)
            made.bind(path)
            os.chmod(path, 0o600)
            made.listen(BACKLOG)
    except BaseException:
        made.close()
        raise
    return made


def remove(path: str, inode: int) -> None:
    """Remove the file of a listener that ends, unless somebody else has bound the path since, and what is stale."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError), _locked(folder):
        sweep(folder)
        if os.stat(path).st_ino == inode:
            os.unlink(path)


def sweep(folder: str) -> None:
    """Remove the files in the private folder at which nobody listens any more. To be called with the folder locked."""
    if folder != private_folder():
        return
    bound = _bound_paths()
    for entry in os.scandir(folder) if bound is not None else ():
        if entry.name.startswith(f"{_network()}-") and entry.path not in (bound or ()):
            os.unlink(entry.path)


def _remove_stale(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return
    if not stat.S_ISSOCK(mode):
        raise ConfigError(f"cannot bind {SCHEME}{path}: a file that is no socket lies there; choose another path")
    if os.path.dirname(path) == private_folder() and (bound := _bound_paths()) is not None:
        is_used = path in bound
    else:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.setblocking(False)  # a listener may be too busy to accept
            is_used = probe.connect_ex(path) != errno.ECONNREFUSED
    if is_used:
        raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    os.unlink(path)


def _bound_paths() -> frozenset[str] | None:
    """The paths of all sockets of this network namespace; None where the system does not tell."""
    try:
        lines = TABLE.read_text("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        return None
    return frozenset(words[7] for line in lines if len(words := line.split(maxsplit=7)) == 8)


def _network() -> int:
    """A number of this process's network namespace: its loopback addresses are its own."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Let nobody else bind or remove a file there meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
