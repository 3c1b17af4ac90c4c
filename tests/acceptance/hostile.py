"""A stranger at a TCP port of a job: speaks ZMTP and, by kvdist/protocol/WIRE.md, the language of kvdist."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import msgpack

HERE = "127.0.0.1"
READ_S = 60.0
IDLE_LOOKS, LOOK_S = 10, 0.005
"""A process that has messages to read does not sleep for so many looks in a row, with this pause between them."""
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
ENVELOPE = struct.Struct("<4sBBHIIIQQQQIB3x")
MORE, LONG, COMMAND = 1, 2, 4
ABORT, ACK, REJECTED = 34, 31, 3
PEER_LOST = 6
"""The code of an Abort."""
SCHEDULER, SERVER, WORKER = 0, 1, 2


def frame(content: bytes, flags: int = 0) -> bytes:
    """A frame of ZMTP."""
    if len(content) < 256:
        return bytes([flags, len(content)]) + content
    return bytes([flags | LONG]) + len(content).to_bytes(8, "big") + content


def message(kind: int, fields: list[object], job: int, role: int, rank: int, incarnation: int) -> bytes:
    """A whole message of kvdist without a payload."""
    envelope = ENVELOPE.pack(b"KVDI", 2, kind, 0, job, 0, rank, incarnation, 0, 0, 0, 0, role)
    return frame(envelope, MORE) + frame(msgpack.packb(fields))


@contextlib.contextmanager
def dialled(port: int) -> Iterator[socket.socket]:
    """A connection after the handshake."""
    with socket.create_connection((HERE, port), READ_S) as connection:
        connection.sendall(GREETING)
        received(connection, len(GREETING))
        connection.sendall(frame(READY, COMMAND))
        read_frame(connection)
        yield connection


def received(connection: socket.socket, nbytes: int) -> bytes:
    """So many bytes; fewer if the other side hangs up."""
    data = b""
    while len(data) < nbytes:
        piece = connection.recv(nbytes - len(data))
        if not piece:
            break
        data += piece
    return data


def read_frame(connection: socket.socket) -> tuple[int, bytes]:
    """Flags and content of the next frame; (0, b'') if the other side hangs up."""
    head = received(connection, 1)
    if not head:
        return 0, b""
    size = received(connection, 8 if head[0] & LONG else 1)
    return head[0], received(connection, int.from_bytes(size, "big"))


def read_message(connection: socket.socket) -> list[bytes]:
    """The frames of the next message, heartbeats left out; none if the other side hangs up."""
    frames: list[bytes] = []
    with contextlib.suppress(ConnectionResetError):
        while True:
            flags, content = read_frame(connection)
            if flags & COMMAND:
                continue
            if content:
                frames.append(content)
            if not flags & MORE:
                break
    return frames


def listening_ports(pid: int) -> set[int]:
    """The TCP ports at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    tables = [Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def resident_bytes(pid: int) -> int:
    """The memory that a process has now."""
    (line,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) << 10


def wait_until_read(pid: int) -> None:
    """Wait until a process has read all that came: its main thread, the node's, sleeps."""
    deadline, idle = time.monotonic() + READ_S, 0
    while idle < IDLE_LOOKS:
        assert time.monotonic() < deadline, f"process {pid} has messages to read after {READ_S:g} s"
        time.sleep(LOOK_S)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
        idle = idle + 1 if state == "S" else 0
