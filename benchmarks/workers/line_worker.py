"""One end of a plain TCP connection that sends and receives at once: what the line gives to a program that does nothing
else. ``line_worker.py listen|dial ADDRESS PORT BYTES REPEATS FOLDER``; the seconds of each repeat go to the folder."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from pathlib import Path

CHUNK_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 20.0


def main() -> None:
    side, address, port, size, repeats, folder = sys.argv[1:]
    connection = accepted(address, int(port)) if side == "listen" else dialled(address, int(port))
    with connection:
        seconds = [exchange(connection, int(size)) for _ in range(int(repeats))]
    Path(folder, f"{side}.json").write_text(json.dumps(seconds))


def accepted(address: str, port: int) -> socket.socket:
    with socket.create_server((address, port)) as listener:
        listener.settimeout(CONNECT_TIMEOUT_S)
        connection = listener.accept()[0]
    connection.settimeout(None)
    return connection


def dialled(address: str, port: int) -> socket.socket:
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            return socket.create_connection((address, port))
        except ConnectionRefusedError:  # the other end has not started yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)


def exchange(connection: socket.socket, size: int) -> float:
    """Send `size` bytes and receive as many, at once; the seconds until both are done."""
    start = time.perf_counter()
    sender = threading.Thread(target=send, args=(connection, size))
    sender.start()
    buffer, left = bytearray(CHUNK_BYTES), size
    while left:
        received = connection.recv_into(buffer, min(left, CHUNK_BYTES))
        if not received:
            raise ConnectionError("the other end has gone")
        left -= received
    sender.join()
    return time.perf_counter() - start


def send(connection: socket.socket, size: int) -> None:
    chunk = bytes(CHUNK_BYTES)
    for start in range(0, size, CHUNK_BYTES):
        connection.sendall(chunk[: min(CHUNK_BYTES, size - start)])


if __name__ == "__main__":
    main()
