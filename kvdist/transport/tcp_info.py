"""What the kernel knows of libzmq's TCP connections, and how one is ended.

ZeroMQ's own heartbeats cannot judge a connection that carries much: libzmq sees a frame when it is whole, and the
answer to a probe waits behind all that lies in the socket buffers of both sides. At 8 Mbit/s a frame of 4 MB is four
seconds without a sign of life, though bytes arrive all the time. The kernel notes when the last segment came.

A descriptor belongs to libzmq's I/O thread, which may close it at any time, and the system gives it out again, perhaps
to a file of this process. So a descriptor is read by its number, where the worst is a wrong answer; and what is shut
down is a duplicate that was checked itself. A file is not even duplicated: closing the duplicate would drop the locks
that the process has on it.
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
"""Whether this system tells when a connection has last brought something."""

TCP_INFO = getattr(socket, "TCP_INFO", 11)
_SILENCE = struct.Struct("=B51xI")
"""The beginning of Linux's ``struct tcp_info``: the state, and milliseconds since data has last come."""
_RECEIVED = struct.Struct("=128xQ")
"""The same up to the number of bytes that have come."""
_ESTABLISHED = 1

Address = tuple[str, int]
NOWHERE: Address = ("", 0)
"""The address of a connection that is over, or that did not come by the network."""


def silence_s(descriptor: int) -> float:
    """Seconds since this connection has last brought something; 0 if it is not a TCP connection that is up."""
    state, milliseconds = _tcp_info(descriptor, _SILENCE)
    return milliseconds / 1e3 if state == _ESTABLISHED else 0.0


def bytes_received(descriptor: int) -> int:
    """How many bytes have come by a TCP connection; 0 if it is over, or the system does not tell."""
    return _tcp_info(descriptor, _RECEIVED)[0]


def remote_address(descriptor: int) -> Address:
    """Where an accepted connection comes from; `NOWHERE` if it is over already, or did not come by the network."""
    with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
        if connection.family in (socket.AF_INET, socket.AF_INET6):
            host, port = connection.getpeername()[:2]
            return str(host).removeprefix("::ffff:"), int(port)
    return NOWHERE


def shut_down(descriptor: int, address: Address) -> bool:
    """End a connection if it still is the one from that address; whether it was.

    libzmq then sees the end of the connection, and closes it.
    """
    if address != NOWHERE and remote_address(descriptor) == address:
        with contextlib.suppress(OSError), _duplicate(descriptor) as connection:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def shut_down_silent(descriptor: int, port: int, after_s: float) -> bool:
    """End a connection that has brought nothing for so long; whether it was one.

    Args:
        descriptor: its number, of libzmq.
        port: the listener's, at whichever end that is; other connections are left alone.
        after_s: how many seconds.
    """
    with contextlib.suppress(OSError, IndexError), _duplicate(descriptor) as connection:
        ports = (connection.getsockname()[1], connection.getpeername()[1])
        if port in ports and silence_s(connection.fileno()) >= after_s:
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _tcp_info(descriptor: int, form: struct.Struct) -> tuple[int, ...]:
    """The fields of ``struct tcp_info`` of a descriptor; zeros if it is not a TCP connection, or they are not told."""
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
    """A socket of our own for a descriptor. Raises OSError if that is not a socket."""
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
