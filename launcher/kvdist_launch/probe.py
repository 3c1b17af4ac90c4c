"""Facts that a host finds out before any process starts on it: about itself, and how fast it reaches another host.

Each answer is a plain value of JSON. Nothing raises: problems and unknown facts are part of the answer, so that a
table can show all hosts.

Speed is measured by round trips and a burst of bytes over a TCP connection, from the dialler to the listener. The
dialler must know a token that the launcher drew for this pair. Every wait is bounded.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import selectors
import shutil
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvdist.config.addresses import address_of_interface, this_machine
from kvdist.config.processes import module_words
from kvdist.config.sockets import raise_open_files_limit
from kvdist.errors import ConfigError
from kvdist.version import __version__
from kvdist_launch.root_socket import listen, port_of

DIAL_S = 3.0
"""Time that a host may take to reach the scheduler's port."""

ROUND_TRIPS = 31
"""Number of round trips of a byte; their median counts."""

WARM_UP_TRIPS = 5
"""Round trips before the measured ones, while addresses are resolved and caches fill."""

BURST_S = 0.3
BURST_BYTES = 256 * 1024
"""Bytes per send call of a burst."""

BYTES_WAIT_S = 3.0
"""Time to wait for the next bytes of the other side."""

SERVE_S = 5.0
"""Time for a whole measurement on the listening side; on slow lines the bytes that have come by then count."""

TOKEN_BYTES = 16
REPORT = struct.Struct("<QQ")
"""The listener's count: bytes, and nanoseconds from the first to the last."""

ENVIRON = ("CUDA_VISIBLE_DEVICES", "SSH_CONNECTION")
"""Variables of the host that a plan depends on."""


def usable_cores() -> int:
    """How many CPU cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1  # macOS has no affinities


def facts_of_this_host() -> dict[str, Any]:
    """Facts of this host that do not depend on the job. Raises the limit of open files for processes that are started
    later."""
    return {
        "version": __version__,
        "python": sys.executable,
        "python_version": ".".join(map(str, sys.version_info[:3])),
        "cores": usable_cores(),
        "open_files": raise_open_files_limit(),
        "gpus": len(glob.glob("/dev/nvidia[0-9]*")),
        "machine": this_machine(),
        "environ": {name: os.environ[name] for name in ENVIRON if name in os.environ},
    }


@dataclass(frozen=True)
class LinkSpeed:
    """Speed of the link between two hosts, measured in one direction.

    Attributes:
        latency_ms: median round trip of a byte, in milliseconds.
        mb_per_s: megabytes (10⁶ bytes) per second of a burst.
        problem: why the speed could not be measured; empty if it was.
    """

    latency_ms: float = 0.0
    mb_per_s: float = 0.0
    problem: str = ""


class HostProbe:
    """Answers questions about this host and measures links: in an agent, and in the launcher for its machine.

    Args:
        selector: waits for the dialler of a measurement.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        self._selector = selector
        self._listening: socket.socket | None = None
        self._speed_listening: socket.socket | None = None
        self._token = b""

    def answer(self, kind: str, fields: dict[str, Any]) -> dict[str, Any]:
        """The answer to a question.

        Args:
            kind: ``prepare``, ``measure_listen``, ``measure_dial``, ``measure_end`` or ``measure_compute``.
            fields: for ``prepare``: ``folder``: a folder that must be writable; ``cwd``: a folder that must exist;
                ``dial``: (address, port) to be reached; ``interface``: a network card, or a network, in which this host
                has an address;
                ``ports``: of which at least one has to be free; ``listen``: (address, ports) for the job's root. For a
                measurement: ``address`` (numeric), ``token`` (hexadecimal digits) and, to dial, ``port``.
        """
        if kind == "prepare":
            return {**_answers(fields), **self._listen(fields.get("listen"))}
        if kind == "measure_compute":
            return measure_compute()
        if kind == "measure_end":
            self.end_measurement()
            return {}
        address, token = str(fields["address"]), bytes.fromhex(str(fields["token"]))
        if kind == "measure_listen":
            return self._listen_for_measurement(address, token)
        return asdict(measure_speed(address, int(fields["port"]), token))

    def take_listening(self) -> socket.socket | None:
        """The listening socket of the job's root, if `prepare` asked for it; the caller closes it."""
        listening, self._listening = self._listening, None
        return listening

    def end_measurement(self) -> None:
        """Stop listening for a measurement."""
        if self._speed_listening is not None:
            self._selector.unregister(self._speed_listening)
            self._speed_listening.close()
            self._speed_listening = None

    def close(self) -> None:
        """Close all sockets."""
        self.end_measurement()
        if self._listening is not None:
            self._listening.close()

    def _listen(self, where: Sequence[Any] | None) -> dict[str, Any]:
        if not where:
            return {}
        try:
            self._listening = listen(*where)
            return {"port": port_of(self._listening)}
        except ConfigError as error:
            return {"problem": str(error)}

    def _listen_for_measurement(self, address: str, token: bytes) -> dict[str, Any]:
        self.end_measurement()
        self._token = token
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            self._speed_listening = socket.create_server((address, 0), family=family)
        except OSError as error:
            return {"problem": f"cannot listen at {address}: {os.strerror(error.errno or 0)}"}
        self._selector.register(self._speed_listening, selectors.EVENT_READ, self._serve)
        return {"port": int(self._speed_listening.getsockname()[1])}

    def _serve(self) -> None:
        if self._speed_listening is None:
            return
        # The other side sees what goes wrong here.
        with contextlib.suppress(OSError):
            stream, _ = self._speed_listening.accept()
            with stream:
                serve_measurement(stream, self._token)


def _answers(questions: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    if questions.get("interface"):
        try:
            answer["address"] = address_of_interface(str(questions["interface"]))
        except ConfigError as error:
            answer["no_interface"] = str(error)
    if questions.get("folder"):
        answer["folder"] = folder_facts(str(questions["folder"]))
    if questions.get("cwd"):
        answer["has_cwd"] = os.path.isdir(str(questions["cwd"]))
    if questions.get("ports"):
        answer["has_port"] = any(map(is_port_free, questions["ports"]))
    if questions.get("dial"):
        answer["unreachable"] = why_unreachable(*questions["dial"])
    return answer


def folder_facts(path: str) -> dict[str, Any]:
    """Whether a folder is writable, or can be created, and its free space in bytes.

    Args:
        path: absolute.
    """
    nearest = Path(path)
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    if not nearest.is_dir():
        return {"free_bytes": 0, "problem": f"{nearest} is not a folder"}
    problem = "" if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written to"
    try:
        free_bytes = shutil.disk_usage(nearest).free
    except OSError as error:
        return {"free_bytes": 0, "problem": f"{nearest}: {error.strerror}"}
    return {"free_bytes": free_bytes, "problem": problem}


def is_port_free(port: int) -> bool:
    """Whether a port is free at every address of this host."""
    try:
        socket.create_server(("", port)).close()
    except OSError:
        return False
    return True


def why_unreachable(host: str, port: int) -> str:
    """Why this host cannot reach a port; '' if it can."""
    try:
        with socket.create_connection((host, port), timeout=DIAL_S):
            return ""
    except OSError as error:
        return unreachable(host, port, error)


def unreachable(host: str, port: int, error: OSError) -> str:
    """Why a connection to a port failed, in words."""
    if isinstance(error, TimeoutError):
        return f"no answer from {host}:{port} within {DIAL_S:g} s: a firewall, or no route"
    reason = errno.errorcode.get(error.errno or 0, "")
    return f"{host}:{port} cannot be reached from there: {error.strerror or error} {reason}".rstrip()


def serve_measurement(stream: socket.socket, token: bytes) -> None:
    """Run the listening side of a measurement.

    Raises:
        OSError: the other side disconnected, was too slow, or did not know the token.
    """
    deadline = time.monotonic() + SERVE_S
    stream.settimeout(BYTES_WAIT_S)
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


def measure_speed(address: str, port: int, token: bytes) -> LinkSpeed:
    """Measure the link to a listener.

    Args:
        address: its address, as seen from this host.
        port: its port.
        token: the token that it expects first.
    """
    try:
        with socket.create_connection((address, port), timeout=DIAL_S) as stream:
            return _measure(stream, token)
    except OSError as error:
        return LinkSpeed(problem=unreachable(address, port, error))


def _measure(stream: socket.socket, token: bytes) -> LinkSpeed:
    stream.settimeout(BYTES_WAIT_S)
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
        return LinkSpeed(problem="too little arrived to tell how fast")
    return LinkSpeed(statistics.median(trips) * 1e3, nbytes / duration_ns * 1e3)


def measure_compute() -> dict[str, Any]:
    """How fast this host multiplies matrices: ``gflops``, or a ``problem``. Measured by NumPy in a separate process."""
    argv = [sys.executable, *module_words("kvdist"), "estimate", "--measure"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SERVE_S, check=True)
        return {"gflops": float(done.stdout)}
    except subprocess.TimeoutExpired:
        return {"problem": f"its speed was not measured within {SERVE_S:g} s"}
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().rpartition("\n")[2]
        return {"problem": f"its speed cannot be measured: {last}"}


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
