"""How soon and how fast one host reaches another: round trips and a burst of bytes over one TCP connection.

One side listens for a moment, the other dials. What is measured goes with the dialler's bytes: from it to the listener.
Whoever connects must know a token that the launcher drew for this pair, so nobody else can keep the listener busy.
Everything waits for a bounded time only.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import statistics
import struct
import time
from dataclasses import dataclass
from typing import Any

from kvdist_launch.probe import DIAL_S, unreachable

ROUND_TRIPS = 31
"""Small ones, of which the median counts."""

WARM_UP_TRIPS = 5
"""Before those: the first ones find addresses and fill caches."""

BURST_S = 0.3
BURST_BYTES = 256 * 1024
"""Given to the system at a time."""

PATIENCE_S = 3.0
"""For the other side's next bytes."""

SERVE_S = 5.0
"""For a whole measurement on the listening side; slow lines are measured by what has come by then."""

TOKEN_BYTES = 16
REPORT = struct.Struct("<QQ")
"""What the listener counted: bytes, and nanoseconds from the first to the last."""


@dataclass(frozen=True)
class Speed:
    """What was measured of one direction between two hosts.

    Attributes:
        latency_ms: of a small round trip, the median.
        mb_per_s: megabytes (10⁶ bytes) per second of a burst.
        problem: why there are no numbers; empty if there are.
    """

    latency_ms: float = 0.0
    mb_per_s: float = 0.0
    problem: str = ""


class Ear:
    """Listens for one measurement at a time.

    Args:
        selector: waits for who dials.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._listening: socket.socket | None = None
        self._token = b""

    def open(self, address: str, token: str) -> dict[str, Any]:
        """Listen at an address of this machine. Returns the port, or the problem.

        Args:
            address: numeric.
            token: what whoever dials must say first, in hexadecimal digits.
        """
        self.close()
        self._token = bytes.fromhex(token)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._listening = socket.create_server((address, 0), family=family)
        except OSError as error:
            return {"problem": f"cannot listen at {address}: {os.strerror(error.errno or 0)}"}
        self._selector.register(self._listening, selectors.EVENT_READ, self._serve)
        return {"port": int(self._listening.getsockname()[1])}

    def close(self) -> None:
        """Listen no more."""
        if self._listening is not None:
            self._selector.unregister(self._listening)
            self._listening.close()
            self._listening = None

    def _serve(self) -> None:
        if self._listening is None:
            return
        # What goes wrong here, the other side sees.
        with contextlib.suppress(OSError):
            stream, _ = self._listening.accept()
            with stream:
                answer(stream, self._token)


def answer(stream: socket.socket, token: bytes) -> None:
    """Be the listening side of one measurement.

    Raises:
        OSError: the other side went away, was too slow, or did not know the token.
    """
    deadline = time.monotonic() + SERVE_S
    stream.settimeout(PATIENCE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _exactly(stream, TOKEN_BYTES) != token:
        raise ConnectionAbortedError("a stranger")
    for _ in range(WARM_UP_TRIPS + ROUND_TRIPS):
        stream.sendall(_exactly(stream, 1))
    room = memoryview(bytearray(BURST_BYTES))
    nbytes, begun, ended = 0, 0, 0
    while time.monotonic() < deadline and (count := stream.recv_into(room)):
        ended = time.perf_counter_ns()
        # The first piece was on its way before the clock ran.
        nbytes, begun = (nbytes + count, begun) if begun else (0, ended)
    stream.sendall(REPORT.pack(nbytes, ended - begun))


def dial(address: str, port: int, token: str) -> Speed:
    """Measure the way to a listener.

    Args:
        address: its address, as it is reached from here.
        port: its port.
        token: what it wants to hear first, in hexadecimal digits.
    """
    try:
        with socket.create_connection((address, port), timeout=DIAL_S) as stream:
            return _measure(stream, bytes.fromhex(token))
    except OSError as error:
        return Speed(problem=unreachable(address, port, error))


def _measure(stream: socket.socket, token: bytes) -> Speed:
    stream.settimeout(PATIENCE_S)
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.sendall(token)
    trips = [_round_trip(stream) for _ in range(WARM_UP_TRIPS + ROUND_TRIPS)][WARM_UP_TRIPS:]
    burst = bytes(BURST_BYTES)
    until = time.monotonic() + BURST_S
    while time.monotonic() < until:
        stream.sendall(burst)
    stream.shutdown(socket.SHUT_WR)
    stream.settimeout(SERVE_S)
    nbytes, duration_ns = REPORT.unpack(_exactly(stream, REPORT.size))
    if not duration_ns:
        return Speed(problem="too little arrived to tell how fast")
    return Speed(statistics.median(trips) * 1e3, nbytes / duration_ns * 1e3)


def _round_trip(stream: socket.socket) -> float:
    begun = time.perf_counter()
    stream.sendall(b"x")
    _exactly(stream, 1)
    return time.perf_counter() - begun


def _exactly(stream: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = stream.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("the other side closed the connection")
        data += piece
    return data
