"""The kernel's information about libzmq's TCP connections, and how to end a connection.

ZeroMQ's heartbeats cannot judge a busy connection: libzmq sees a frame only when it is whole, and the answer to a probe
waits behind all bytes in the socket buffers of both sides. At 8 Mbit/s a frame of 4 MB is four seconds without a
heartbeat, though bytes arrive all the time. The kernel records when the last segment came.

A descriptor belongs to libzmq's I/O thread, which may close it at any time, and the system reuses the number, perhaps
for a file of this process. So a descriptor is read by its number, where the worst case is a wrong answer; and only a
duplicate is shut down, after it was checked itself. A file is not even duplicated: closing the duplicate would drop the
locks that the process has on it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator

CAN_JUDGE = sys.platform == "linux"
"""Whether this system reports when a connection last received bytes."""

TCP_INFO = getattr(socket, "TCP_INFO", 11)
_SILENCE = struct.Struct("=B51xI")
"""The beginning of Linux's ``struct tcp_info``: the state, and milliseconds since data last came."""
_RECEIVED = struct.Struct("=128xQ")
"""The beginning of ``struct tcp_info`` up to the number of received bytes."""
_ESTABLISHED = 1

Address = tuple[str, int]
NOWHERE: Address = ("", 0)
"""The address of a closed connection, or of a connection that did not come over the network."""


def silence_s(descriptor: int) -> float:
    """Seconds since this connection last received bytes; 0 if it is not a TCP connection that is up."""
    state, milliseconds = _tcp_info(descriptor, _SILENCE)
    return milliseconds / 1e3 if state == _ESTABLISHED else 0.0


def bytes_received(descriptor: int) -> int:
    """Number of bytes that a TCP connection has received; 0 if it is closed, or the system does not report it."""
    return _tcp_info(descriptor, _RECEIVED)[0]


def remote_address(descriptor: int) -> Address:
    """Remote address of an accepted connection; `NOWHERE` if it is closed, or did not come over the network."""
    with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connection.getpeername()[:2]
            return str(host).removeprefix("::ffff:"), int(port)
    return NOWHERE


def shut_down(descriptor: int, address: Address) -> bool:
    """End a connection if its remote address still is `address`; returns whether it was.

    libzmq then sees the end of the connection, and closes it.
    """
    if address != NOWHERE and remote_address(descriptor) == address:
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def shut_down_silent(descriptor: int, port: int, after_s: float) -> bool:
    """End a connection that has received nothing for `after_s`; returns whether it was such a connection.

    Args:
        descriptor: libzmq's descriptor of it.
        port: the listener's, at either end; other connections are left alone.
        after_s: silence in seconds.
    """
    with contextlib.suppress(OSError, IndexError), _duplicate(descriptor) as connection:
        ports = (connection.getsockname()[1], connection.getpeername()[1])
        if port in ports and silence_s(connection.fileno()) >= after_s:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _tcp_info(descriptor: int, form: struct.Struct) -> tuple[int, ...]:
    """Fields of ``struct tcp_info`` of a descriptor; zeros if it is not a TCP connection, or the system does not report
    them."""
    zeros = (0, 0)
    try:
        # With a protocol given, Python does not ask the descriptor for it, which may be closed or a file by now.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return zeros
    try:
        return form.unpack(connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, form.size))
    except (OSError, struct.error):
        return zeros
    finally:
        connection.detach()


@contextlib.contextmanager
def _duplicate(descriptor: int) -> Iterator[socket.socket]:
    """A duplicate of a descriptor as a socket. Raises OSError if the descriptor is not a socket."""
    if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
        raise OSError(f"descriptor {descriptor} is not a socket")
    duplicate = os.dup(descriptor)
    try:
        connection = socket.socket(fileno=duplicate)
    except BaseException:
        os.close(duplicate)
        raise
    with connection:
        yield connection
