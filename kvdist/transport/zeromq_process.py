"""What a process sets up once for ZeroMQ: malloc, pyzmq's thread, and the pipe that wakes a poll."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import zmq
from zmq.utils.garbage import gc as zero_copy_releaser

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""
KEPT_BYTES_MAX = 256 << 20
MAPPED_BYTES_MIN = 32 << 20
"""The most that glibc accepts; larger blocks are still mapped."""


def keep_freed_memory() -> None:
    """Make glibc's malloc keep the memory of large messages; do nothing where the C library is another one.

    libzmq allocates every message it receives with `malloc`. By default glibc maps large blocks afresh and unmaps them
    when they are freed, so that each received page is faulted in anew: 23,000 page faults for a step of 105 MB, a
    quarter of the time spent in the kernel. With these settings the same step has 2,700. What is freed stays with the
    process up to `KEPT_BYTES_MAX`.
    """
    if sys.platform != "linux":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return  # musl has no such knob
    mallopt(M_MMAP_THRESHOLD, MAPPED_BYTES_MIN)
    mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


RELEASE_S = 5.0


class ReleaserUse:
    """Ends pyzmq's thread for buffers sent without a copy when the last transport closes, unless others need it.

    pyzmq starts one thread and one context per process at the first such send, and keeps them to the end.
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


class Wakeup:
    """A pipe that ends another thread's poll; many calls of `wake` before a `clear` are one.

    Attributes:
        fileno: the reading end, to be polled.
    """

    def __init__(self) -> None:
        self.fileno, self._writer = os.pipe()
        self._lock = threading.RLock()  # a signal handler may call `wake` while this thread does
        self._is_set = False
        self._closed = False

    def wake(self) -> None:
        with self._lock:
            # Under the lock, because a closed descriptor's number may belong to another file by now.
            if not self._is_set and not self._closed:
                self._is_set = True
                os.write(self._writer, b"\0")

    def clear(self) -> bool:
        """Make the pipe unreadable again; returns True."""
        with self._lock:
            os.read(self.fileno, 1)
            self._is_set = False
        return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            os.close(self.fileno)
            os.close(self._writer)
