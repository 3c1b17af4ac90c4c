"""Files of a machine: sockets of jobs that stay on it, the secret of a job, and the limit of open files.

Sockets lie in a folder that only their user can enter. The file of a scheduler is named after the network namespace and
the port, so that only processes with the same loopback address and port find each other. Every other listener adds a
random part. The folder's path depends on the user alone, not on variables such as TMPDIR that may differ between the
shells of a job. The folder stays; a listener removes its file, and the next listener that binds or closes removes the
files of killed processes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from kvdist.config.endpoints import tcp_endpoint
from kvdist.config.settings import ClusterConfig
from kvdist.errors import ConfigError

SCHEME = "ipc://"
BACKLOG = 4096
TABLE = Path("/proc/net/unix")
"""Every socket of this network namespace that has an address."""


def private_folder() -> str:
    """The folder of this user's sockets."""
    return f"/tmp/kvdist-{os.geteuid()}"


def local_endpoint(port: int) -> str:
    """Endpoint of the scheduler of a job on this machine whose root has this port of a loopback address."""
    return f"{SCHEME}{private_folder()}/{_network()}-{port}"


def scheduler_endpoint(config: ClusterConfig) -> str:
    """Endpoint at which the scheduler of a cluster binds and which all other processes dial."""
    return local_endpoint(config.root_port) if config.is_local else tcp_endpoint(config.root_host, config.root_port)


def further_endpoint(port: int) -> str:
    """A free endpoint for another listener of the same job."""
    return f"{local_endpoint(port)}-{os.urandom(4).hex()}"


def port_of_local(endpoint: str) -> int | None:
    """The port of a `local_endpoint`; None for any other endpoint."""
    head, _, port = endpoint.rpartition("-")
    return int(port) if port.isdigit() and endpoint == local_endpoint(int(port)) and head else None


WITH_SERVERS = (
    "or let the job use TCP: KVDIST_SECURITY=curve encrypts it (processes that no launcher starts need"
    " KVDIST_SECRET_FILE and KVDIST_RANK too), KVDIST_SECURITY=none does not"
)
WITHOUT_SERVERS = (
    "or set KVDIST_SECURITY=none for all ranks, which then use TCP ports that every user of this machine can reach"
)
WITHOUT_MEETING = (
    "or set MASTER_ADDR=127.0.0.1, MASTER_PORT to a free port and KVDIST_SECURITY=none for all ranks, which then use"
    " TCP ports that every user of this machine can reach"
)
"""Advice for a job that cannot use the folder, for messages."""


def require_private_folder(otherwise: str = WITH_SERVERS) -> None:
    """Create the private folder, or check its owner and mode.

    Args:
        otherwise: alternative to the folder, for the message.

    Raises:
        ConfigError: the folder cannot be created, or other users could reach its files.
    """
    folder = private_folder()
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        found, parent = os.lstat(folder), os.stat(os.path.dirname(folder)).st_mode
    except OSError as error:
        raise ConfigError(
            f"the folder {folder} for the sockets of this machine cannot be made ({error.strerror}): make it possible,"
            f" {otherwise}"
        ) from error
    cure = "remove it"
    if not stat.S_ISDIR(found.st_mode):
        problem = "is not a folder"
    elif found.st_uid != os.geteuid():
        problem = f"belongs to user {found.st_uid}, and this process runs as user {os.geteuid()}"
        cure = "have that user remove it"
    elif stat.S_IMODE(found.st_mode) & 0o077:
        problem = f"can be entered by others (mode {stat.S_IMODE(found.st_mode):04o}, expected 0700)"
    elif parent & stat.S_IWOTH and not parent & stat.S_ISVTX:
        problem = "can be renamed by others, as the folder around it has no sticky bit"
        cure = f"chmod +t {os.path.dirname(folder)}"
    else:
        return
    raise ConfigError(f"{folder}, where the sockets of this machine lie, {problem}: {cure}, {otherwise}")


def is_bound(endpoint: str) -> bool:
    """Whether the system lists a process that listens at a `local_endpoint`."""
    return endpoint.removeprefix(SCHEME) in (_bound_paths() or ())


def listen_at(path: str) -> socket.socket:
    """A socket that listens at a path; replaces the socket file of a killed process.

    Raises:
        ConfigError: the path is a file of another kind.
        OSError: another process listens at the path (EADDRINUSE), or the system refuses.
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
    """Remove the file of a listener that ends, unless another process has bound the path since, and stale files."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError), _locked(folder):
        sweep(folder)
        if os.stat(path).st_ino == inode:
            os.unlink(path)


def sweep(folder: str) -> None:
    """Remove the files in the private folder that have no listener any more. Call it with the folder locked."""
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
        raise ConfigError(f"cannot bind {SCHEME}{path}: the file there is not a socket; choose another path")
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
    """The paths of all sockets of this network namespace; None where the system does not list them."""
    try:
        lines = TABLE.read_text("utf-8", "surrogateescape").splitlines()[1:]
    except OSError:
        return None
    return frozenset(words[7] for line in lines if len(words := line.split(maxsplit=7)) == 8)


def _network() -> int:
    """Inode of this process's network namespace, in which loopback addresses are valid; 0 if unknown."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return 0


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Lock the folder: no other process binds or removes a file in it meanwhile."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


# The secret of a job.

SECRET_BYTES_MIN = 32
SECRET_BYTES_MAX = 64 << 10
OTHERS = 0o007
"""Permissions of a secret that are refused. A group may read it, as Kubernetes lets a group read mounted files."""


def read_secret(path: str) -> bytes:
    """Content of the file of a secret: a line end counts, so copies must be exact.

    Raises:
        ConfigError: the file cannot be read, is open to all users, or is too short or too long.
    """
    name = f"KVDIST_SECRET_FILE is {path!r}"
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"{name}, which cannot be read: {error.strerror}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{name}, which is not a regular file")
        if mode & OTHERS:
            mode = stat.S_IMODE(mode)
            raise ConfigError(f"{name}, and every user of this machine may use it (mode {mode:04o}): chmod 600 {path}")
        secret = os.read(descriptor, SECRET_BYTES_MAX + 1)
    finally:
        os.close(descriptor)
    if not SECRET_BYTES_MIN <= len(secret) <= SECRET_BYTES_MAX:
        length = f"{len(secret)} bytes" if len(secret) <= SECRET_BYTES_MAX else f"more than {SECRET_BYTES_MAX} bytes"
        raise ConfigError(
            f"{name}, which has {length}; a secret has at least {SECRET_BYTES_MIN}, made at random, as by"
            f" head -c {SECRET_BYTES_MIN} /dev/urandom"
        )
    return secret


# Open files.

# Each connection is an open file, and so is the memory of each process of the same host. Systems give a process 1,024
# by default and allow many more (`ulimit -Hn`): the soft limit is there to be raised.
RAISED_MAX = 1 << 20
"""Highest soft limit that is set, even below the hard limit: some programs close every descriptor up to the limit at
their start."""

OPEN_FILES_BASE, PER_WORKER, PER_SERVER = 64, 3, 5
"""Open files of a process, measured: some 20 in any case; a worker opens five for each server, most of them by ZeroMQ,
and a server two for each worker of its host. The rest is for the script, its libraries and checkpoints."""


def raise_open_files_limit() -> int:
    """Raise this process's soft limit to the hard limit, for itself and its children. Returns the new soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = RAISED_MAX if hard == resource.RLIM_INFINITY else min(hard, RAISED_MAX)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError):  # macOS has another, lower limit that it does not report
            return soft
        return wanted
    return RAISED_MAX if soft == resource.RLIM_INFINITY else soft


def open_files_warning(limit: int, num_workers: int, num_servers: int) -> str:
    """A warning if `limit` open files are too few for a process of a job of that size, else ''."""
    needed = OPEN_FILES_BASE + PER_WORKER * num_workers + PER_SERVER * num_servers
    if limit >= needed:
        return ""
    return (
        f"a process may have {limit} files open, but in a job of {num_workers} workers and {num_servers} servers it may"
        f" need {needed}: raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd, --ulimit nofile= of docker)"
    )
