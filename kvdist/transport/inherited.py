"""A listening descriptor that this process has inherited, looked at before libzmq gets it."""

from __future__ import annotations

import os
import socket
import stat

from kvdist.config.endpoints import tcp_endpoint
from kvdist.config.sockets import SCHEME
from kvdist.errors import ConfigError


def endpoint_of_listener(descriptor: int) -> str:
    """The endpoint of an inherited descriptor at which connections can be accepted.

    Raises:
        ConfigError: it is none.
    """
    name = f"KVDIST_LISTEN_FD is {descriptor}"
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{name}, which is no socket; it must be a listening socket that this process inherits")
        duplicate = os.dup(descriptor)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"{name}, but no such descriptor is open here ({error}); whoever starts this process must let it"
            " inherit the descriptor"
        ) from error
    with socket.socket(fileno=duplicate) as one:
        is_known = one.family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX) and one.type == socket.SOCK_STREAM
        if not is_known or not one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            raise ConfigError(
                f"{name}, a socket that does not listen for connections; bind it (TCP or a file) and call listen on it"
            )
        if one.family == socket.AF_UNIX:
            return f"{SCHEME}{one.getsockname()}"
        return tcp_endpoint(*one.getsockname()[:2])
