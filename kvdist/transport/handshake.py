"""Why a dialled handshake fails: finds out the reasons that libzmq does not report, and words them.

A handshake that fails without a reason may have met a listener with another secret, or a proxy whose target is not up
yet. Only a listener greets: before any encryption it sends that it speaks ZMTP, and with which mechanism.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import Any

from kvdist.config.endpoints import split_endpoint, stays_on_host, tcp_endpoint
from kvdist.config.sockets import is_bound, local_endpoint, port_of_local
from kvdist.nodes import NodeId

GREETING_BYTES = 64
MECHANISM = slice(12, 32)
SIGNATURE = b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00"
"""The part of the greeting that the listener waits for. It would hang up silently at a mechanism other than its own."""
PATIENCE_S = 1.0
"""Time limit of the whole exchange, which blocks the node. The name has just been resolved for libzmq."""
SUSPICIOUS_FAILURES, SUSPICIOUS_S = 3, 8.0
"""Number of handshakes broken off within this time, in seconds, that is looked into."""

Resolved = tuple[socket.AddressFamily, socket.SocketKind, int, str, tuple[Any, ...]]


def mechanism_at(endpoint: str) -> str:
    """The mechanism of the listener at a tcp:// endpoint, such as ``CURVE`` or ``NULL``; '' without a greeting."""
    if not endpoint.startswith("tcp://"):
        return ""
    heard = b""
    # A name with an empty or a long label cannot be encoded.
    with contextlib.suppress(OSError, UnicodeError):
        family, kind, protocol, _, address = _dialled_at(*split_endpoint(endpoint))
        deadline = time.monotonic() + PATIENCE_S
        with socket.socket(family, kind, protocol) as probe:
            probe.settimeout(PATIENCE_S)
            probe.connect(address)
            probe.sendall(SIGNATURE)
            while len(heard) < GREETING_BYTES and (left_s := deadline - time.monotonic()) > 0:
                probe.settimeout(left_s)
                piece = probe.recv(GREETING_BYTES - len(heard))
                if not piece:
                    break
                heard += piece
    if len(heard) < MECHANISM.stop or heard[0] != 0xFF or heard[9] != 0x7F:
        return ""
    return heard[MECHANISM].rstrip(b"\0").decode("ascii", "replace")


def _dialled_at(host: str, port: int) -> Resolved:
    """The address that libzmq dials for a name: the first of IPv6, else of IPv4."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return next((one for one in found if one[0] == socket.AF_INET6), found[0])


class Suspicion:
    """Counts handshakes that were broken off soon after each other.

    A single failure may be due to a process that is about to end. A busy process lets handshakes run into their
    deadline, which takes seconds each.
    """

    def __init__(self) -> None:
        self._count = 0
        self._since = 0.0
        self._has_greeted = False
        self.is_certain = False
        """Whether a handshake that fails now fails at a listener that had greeted before."""

    def clear(self) -> None:
        """Reset, as a handshake succeeded, or no process listens at the endpoint."""
        self._count = 0
        self._has_greeted = self.is_certain = False

    def greeted(self) -> None:
        """Note that the listener has greeted. Failures that are read until `caught_up` may be older, and a proxy's."""
        self._has_greeted = True

    def caught_up(self) -> None:
        """Note that every failure so far has been read: later failures are later than the greeting."""
        self.is_certain = self._has_greeted

    def grows(self) -> bool:
        """Count a failure; returns whether the failures are enough to look into."""
        now = time.monotonic()
        if self._count == 0 or now > self._since + SUSPICIOUS_S:
            self._count, self._since = 0, now
        self._count += 1
        if self._count < SUSPICIOUS_FAILURES:
            return False
        self._count = 0
        return True


def why_other_secret(endpoint: str, me: NodeId | None, to: NodeId | None) -> str:
    """The message about a listener that greets and then breaks off every handshake."""
    return (
        f"{endpoint} does not know the key of this {me}, or is not {to}: it is of another job, or KVDIST_SECRET_FILE"
        " holds another secret; all processes of a job need the same"
    )


def why_not_let_in(endpoint: str, me: NodeId | None) -> str:
    """The message about a listener that has the secret and refuses the name of this process."""
    return (
        f"{endpoint} has the same secret, but no {me} in its cluster: KVDIST_RANK, DMLC_NUM_WORKER and"
        " DMLC_NUM_SERVER must be those of the job"
    )


def why_other_mechanism(endpoint: str, me: NodeId | None) -> str:
    """The message about a listener that encrypts where this process (`me` is None) does not, or the reverse."""
    if me is None:
        return (
            f"{endpoint} encrypts, and this process has no secret: set KVDIST_SECRET_FILE to the file with the secret"
            " of the job, and KVDIST_SECURITY not to none"
        )
    return (
        f"{endpoint} does not encrypt, and this process does: give KVDIST_SECRET_FILE to all processes of a job or to"
        " none"
    )


def why_other_sockets(endpoint: str, me: NodeId | None) -> str:
    """The message about a scheduler of this machine that listens at the other kind of socket; '' if none does."""
    here = "this process has no secret" if me is None else "this process has a secret"
    advice = "give all processes of a job the same KVDIST_SECRET_FILE and KVDIST_SECURITY"
    port = port_of_local(endpoint)
    if port is not None:
        other = tcp_endpoint("127.0.0.1", port)
        mechanism = mechanism_at(other)
        what = "encrypts" if mechanism == "CURVE" else "is plain TCP (KVDIST_SECURITY=none)"
        return f"{other} {what}, and {here}: {advice}" if mechanism else ""
    if endpoint.startswith("tcp://") and stays_on_host(endpoint):
        other = local_endpoint(split_endpoint(endpoint)[1])
        if is_bound(other):
            kind = "dials TCP (KVDIST_SECURITY=none)" if me is None else "has a secret"
            return f"{other} does not encrypt, and this process {kind}: {advice}"
    return ""
