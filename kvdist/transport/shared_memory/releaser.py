"""pyzmq's thread for buffers that were sent without a copy: one a process, ended when the last transport has closed."""

from __future__ import annotations

import threading

import zmq
from zmq.utils.garbage import gc as zero_copy_releaser

RELEASE_S = 5.0


class ReleaserUse:
    """Ends pyzmq's thread for buffers sent without a copy, when the last transport closes and nobody else needs it.

    pyzmq starts one thread and context a process at the first such send and keeps them to the end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._transports = 0
        self._is_foreign = False

    def enter(self) -> None:
        with self._lock:
            if self._transports == 0:
                self._is_foreign = zero_copy_releaser.is_alive()
            self._transports += 1

    def leave(self) -> None:
        with self._lock:
            self._transports -= 1
            if self._transports or self._is_foreign or not zero_copy_releaser.is_alive():
                return
            # Releases pass through one queue: when this one is done, those of the closed sockets are.
            marker = zmq.Frame(b"end", copy=False, track=True)
            tracker = marker.tracker
            del marker
            tracker.wait(RELEASE_S)
            if not zero_copy_releaser.refs:
                zero_copy_releaser.stop()


releaser_use = ReleaserUse()
