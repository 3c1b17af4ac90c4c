"""How the ranks of a job find each other: a TCPStore of torch, at the address that the launcher named.

Without a launcher's address all ranks are on the same machine: rank 0 takes a free port and leaves its number in a
private folder of the user, under the name of the job, until all ranks have come. A file left by a killed process is
recognised: that process is dead, or a process with its number began at another time. Later jobs remove such files.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from kvdist.config.addresses import address_of_interface, host_name, own_addresses
from kvdist.config.endpoints import is_loopback, tcp_endpoint
from kvdist.config.environment import Meeting, World, keep_descriptor
from kvdist.config.processes import may_run, this_process
from kvdist.config.settings import CollectiveSettings
from kvdist.config.sockets import WITHOUT_MEETING, private_folder, require_private_folder
from kvdist.errors import CollectiveError, ConfigError, first_line
from kvdist.transport.endpoints import endpoint_of_listener

LOOPBACK = "127.0.0.1"


def own_address(world: World, settings: CollectiveSettings) -> str:
    """This machine's address for the other ranks: as set by the user, else the address that routes towards rank 0.

    Raises:
        ConfigError: the interface that was set does not exist.
        CollectiveError: this machine has no route to rank 0.
    """
    host = world.meeting.host or LOOPBACK
    if is_loopback(host):
        return host if ":" in host else LOOPBACK
    if settings.node_host:
        return settings.node_host
    if settings.interface:
        return address_of_interface(settings.interface, prefers_ipv6=":" in host)
    try:
        found = socket.getaddrinfo(host, world.meeting.port or 1, type=socket.SOCK_DGRAM)[0]
        with socket.socket(*found[:3]) as towards:
            towards.connect(found[4])
            address = str(towards.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise CollectiveError(f"{host_name()} has no route to rank 0 at {host}: {error}") from error
    if is_loopback(address) and world.local_size < world.size:
        # Many systems give their own name a loopback address, which other machines cannot reach.
        others = [str(own.address) for own in own_addresses() if not own.address.is_loopback]
        return others[0] if others else address
    return address


LOOK_AGAIN_S = 0.02
"""Interval at which a rank checks for rank 0's port file, or for a listener."""
PORT_FILES = "rank0-"
"""The beginning of the names of port files."""
KEPT_S = 86_400
"""The age at which a port file is removed. Processes with different PID namespaces may share the folder, so only the
age tells whether a killed process has left a file."""


def meet(world: World, timeout_s: float) -> PrefixStore:
    """Return a store that all ranks of the job share.

    Raises:
        CollectiveError: rank 0 does not come in time, or its port is taken.
        ConfigError: the folder for port files cannot be created, or other users can enter it, or the inherited
            descriptor is another socket in this process.
    """
    meeting, deadline = world.meeting, time.monotonic() + timeout_s
    is_master = world.rank == 0 and not meeting.is_served
    host, port = meeting.host, meeting.port
    if not host:
        host = LOOPBACK
        port = 0 if is_master else _left_port(_port_file(meeting), timeout_s)
    if is_master and meeting.listen_fd is not None:
        _take_listening(meeting.listen_fd, tcp_endpoint(host, port))
    try:
        shared = _open(meeting, host, port, is_master, timeout_s, deadline)
    except (RuntimeError, OSError) as error:
        what = "cannot listen at" if is_master else f"has found no rank 0 within {timeout_s:g} s at"
        is_chosen = is_master and meeting.host and meeting.listen_fd is None
        advice = " (set MASTER_ADDR and MASTER_PORT of all ranks to another port)" if is_chosen else ""
        raise CollectiveError(
            f"rank {world.rank} on {host_name()} {what} {host}:{port}: {first_line(error)}{advice}"
        ) from error
    leave_port(world, shared)
    return shared


def _take_listening(descriptor: int, expected: str) -> None:
    keep_descriptor(descriptor)
    endpoint = endpoint_of_listener(descriptor)
    if endpoint.rpartition(":")[2] != expected.rpartition(":")[2]:
        raise ConfigError(
            f"KVDIST_LISTEN_FD is {descriptor}, a socket that listens at {endpoint}, but all ranks dial {expected}: the"
            " program that starts this process must let it inherit that socket under this number"
        )


def meet_again(world: World, store: PrefixStore, timeout_s: float) -> PrefixStore:
    """Return the same store over a new connection: an abandoned thread may still wait in the old connection.

    Raises:
        CollectiveError: rank 0, or the process that served the store, has ended.
    """
    before: TCPStore = store.underlying_store  # type: ignore[assignment]
    deadline = time.monotonic() + timeout_s
    try:
        return _open(world.meeting, before.host, before.port, False, timeout_s, deadline)
    except (RuntimeError, OSError) as error:
        where = f"{before.host}:{before.port}"
        raise CollectiveError(
            f"rank {world.rank} on {host_name()} cannot reach the rendezvous store of this job at {where} any more"
            f" within {timeout_s:g} s (KVDIST_START_TIMEOUT_S): {first_line(error)}"
        ) from error


def _open(meeting: Meeting, host: str, port: int, is_master: bool, timeout_s: float, deadline: float) -> PrefixStore:
    """Connect to the store of a job, or serve it.

    Raises:
        OSError, RuntimeError: the deadline has passed.
    """
    if not is_master:
        _await_listener(host, port, deadline)
    store = _within(
        deadline,
        lambda: TCPStore(
            host,
            port,
            None,
            is_master,
            timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=meeting.listen_fd if is_master else None,
        ),
    )
    return PrefixStore(f"kvdist/{meeting.job}", store)


def _await_listener(host: str, port: int, deadline: float) -> None:
    """Wait until a process listens at the address; torch's own wait is twice as long and prints internals.

    Raises:
        OSError: no process listens before the deadline.
    """
    while True:
        try:
            socket.create_connection((host, port), max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() + LOOK_AGAIN_S >= deadline:
                raise
        time.sleep(LOOK_AGAIN_S)


def _within(deadline: float, make: Callable[[], TCPStore]) -> TCPStore:
    """Return the result of `make`, within the deadline: torch waits for ever for a listener that does not answer.

    Raises:
        TimeoutError: the deadline is over.
        RuntimeError: `make` has failed.
    """
    made: Future[TCPStore] = Future()

    def run() -> None:
        try:
            made.set_result(make())
        except Exception as error:  # noqa: BLE001 (it is raised where the result is asked for)
            made.set_exception(error)

    threading.Thread(target=run, name="kvdist-meeting", daemon=True).start()
    try:
        return made.result(max(0.0, deadline - time.monotonic()) + 1.0)
    except futures.TimeoutError:
        raise TimeoutError(
            "a process listens there but does not answer: it is another program, or rank 0 has not called init()"
        ) from None


def _port_file(meeting: Meeting) -> Path:
    """The port file of this job, in the private folder of the user's sockets.

    Raises:
        ConfigError: the folder cannot be created.
    """
    require_private_folder(WITHOUT_MEETING)
    job = "".join(letter if letter.isalnum() or letter in "-._" else "_" for letter in meeting.job)
    return Path(private_folder()) / f"{PORT_FILES}{job}"


def leave_port(world: World, store: PrefixStore) -> None:
    """Write the port file if this is rank 0 of a job without a rendezvous address."""
    if _leaves_port(world):
        _write_port(_port_file(world.meeting), store.underlying_store.port)  # type: ignore[attr-defined]


def _leaves_port(world: World) -> bool:
    return world.rank == 0 and world.size > 1 and not world.meeting.host and not world.meeting.is_served


def forget_port(world: World) -> None:
    """Remove this rank 0's port file, if it has written one."""
    if _leaves_port(world):
        path = _port_file(world.meeting)
        with contextlib.suppress(OSError):
            if path.read_text().split()[1:] == [this_process()]:
                path.unlink()


def _write_port(path: Path, port: int) -> None:
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(f"{port} {this_process()}")
    written.replace(path)
    _sweep(path.parent)


def _sweep(folder: Path) -> None:
    """Remove the old port files of killed processes."""
    for path in folder.glob(f"{PORT_FILES}*"):
        with contextlib.suppress(OSError):  # another job's rank 0 sweeps too
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()


def _left_port(path: Path, timeout_s: float) -> int:
    """Wait for a port file of a live process and return its port."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError):
            port, process = path.read_text().split()
            if may_run(process):
                return int(port)
        time.sleep(LOOK_AGAIN_S)
    raise CollectiveError(
        f"rank 0 has not started within {timeout_s:g} s (KVDIST_START_TIMEOUT_S): it left no port in {path}, where"
        " ranks of the same machine meet if MASTER_ADDR and MASTER_PORT are not set"
    )
