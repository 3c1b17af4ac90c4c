"""How long a TCP connection of libzmq has brought nothing, by the kernel's count of what arrives.

ZeroMQ's own heartbeats cannot judge a connection that carries much: libzmq sees a frame when it is whole, and the
answer to a probe waits behind all that lies in the socket buffers of both sides. At 8 Mbit/s a frame of 4 MB is four
seconds without a sign of life, though bytes arrive all the time. The kernel notes when the last segment came.

A descriptor belongs to libzmq's I/O thread, which may close it at any time, and the system gives it out again. So it
is looked at by its number, where the worst is a wrong answer; and what is hung up is a copy that was looked at itself.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys

CAN_JUDGE = sys.platform == "linux"
"""Whether this system tells when a connection has last brought something."""

TCP_INFO = getattr(socket, "TCP_INFO", 11)
_INFO = struct.Struct("=B51xI")
"""The beginning of Linux's ``struct tcp_info``: the state, and milliseconds since data has last come."""
_ESTABLISHED = 1


def silence_s(descriptor: int) -> float:
    """Seconds since this connection has last brought something; 0 if it is no TCP connection that is up."""
    try:
        # With a protocol given, Python does not ask the descriptor for it, which may be closed or a file by now.
        connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, descriptor)
    except OSError:
        return 0.0
    try:
        return _silence_s(connection)
    finally:
        connection.detach()


def hang_up(descriptor: int, port: int, after_s: float) -> bool:
    """End a connection that has brought nothing for so long; whether it was one.

    Args:
        descriptor: its number, of libzmq.
        port: the listener's, at whichever end that is; other connections are left alone.
        after_s: how many seconds.
    """
    with contextlib.suppress(OSError, IndexError):
        # A file is not even duplicated: closing the duplicate would drop the locks that the process has on it.
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with _copy(descriptor) as connection:
            ports = (connection.getsockname()[1], connection.getpeername()[1])
            if port in ports and _silence_s(connection) >= after_s:
                connection.shutdown(socket.SHUT_RDWR)
                return True
    return False


def _copy(descriptor: int) -> socket.socket:
    copy = os.dup(descriptor)
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, copy)
    except BaseException:
        os.close(copy)
        raise


def _silence_s(connection: socket.socket) -> float:
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _INFO.size)
    except OSError:
        return 0.0
    if len(info) < _INFO.size:
        return 0.0
    state, milliseconds = _INFO.unpack(info)
    return milliseconds / 1e3 if state == _ESTABLISHED else 0.0
