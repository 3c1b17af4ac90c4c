"""The far end of `costs.py`: takes messages from a transport and says what taking them has cost it.

``carry_worker.py ENDPOINT``: dials, then answers each message with the processor time of its own threads so far, but
those that begin with ``#`` only when it is asked. Ends when its parent closes the pipe on its standard input.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cluster  # noqa: F401  # puts the checkout on the path

from kvdist.config.settings import Limits
from kvdist.transport.base import Arrived, Route
from kvdist.transport.zeromq import ZeroMQTransport

KEPT = 25
"""What has arrived is kept so long, as a server keeps contributions and a worker values."""


def main() -> None:
    transport = ZeroMQTransport(Limits())
    route = transport.connect(sys.argv[1])
    transport.send(route, [b"here"])
    ended = threading.Event()

    def listen() -> None:
        sys.stdin.read()
        ended.set()
        transport.wake()

    threading.Thread(target=listen, daemon=True).start()
    kept: deque[object] = deque(maxlen=KEPT)
    while not ended.is_set():
        for event in transport.recv(1.0):
            if isinstance(event, Arrived):
                kept.append(event.frames)
                if bytes(event.frames[0][:1]) != b"#":
                    tell(transport, route)
    transport.close()


def tell(transport: ZeroMQTransport, route: Route) -> None:
    """The seconds of this thread, and those of all."""
    transport.send(route, [json.dumps([time.thread_time(), time.process_time()]).encode()])


if __name__ == "__main__":
    main()
