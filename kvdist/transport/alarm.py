"""A bell that any thread may ring to end another thread's poll."""

from __future__ import annotations

import os
import threading


class Wakeup:
    """A pipe whose reading end becomes readable; many rings before a rest are one.

    Attributes:
        fileno: the reading end, to be polled.
    """

    def __init__(self) -> None:
        self.fileno, self._writer = os.pipe()
        self._lock = threading.RLock()  # a signal handler may ring while this thread rings
        self._ringing = False
        self._closed = False

    def ring(self) -> None:
        with self._lock:
            # Under the lock, because a closed descriptor's number may belong to another file by now.
            if not self._ringing and not self._closed:
                self._ringing = True
                os.write(self._writer, b"\0")

    def rest(self) -> bool:
        """Be silent again; True."""
        with self._lock:
            os.read(self.fileno, 1)
            self._ringing = False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fileno)
            os.close(self._writer)
