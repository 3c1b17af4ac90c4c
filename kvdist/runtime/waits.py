"""How threads of the user's program wait in calls of kvdist: which do, whether another may act, and for room.

A deadlock may be declared only if no thread can act any more. So every other thread counts as able to act, unless it is
known to make no calls of kvdist: threads of kvdist itself, idle threads of executors, and those of some libraries. A
daemon that has never called kvdist, such as a server of metrics, counts as able to act until the wait has lasted a
minute.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Container
from concurrent.futures import Future, wait
from concurrent.futures import thread as executors
from types import FrameType
from typing import Any, TypeVar
from weakref import WeakSet

Result = TypeVar("Result")

_waits: dict[int, float] = {}
"""Thread → since when it waits in a call of kvdist without a time-out, in monotonic seconds."""

_callers: WeakSet[threading.Thread] = WeakSet()
"""Threads that have called kvdist."""

NEVER_CALLED_S = 60.0
"""Time for which a daemon that has never called kvdist is expected to: it may load data first, or compile."""
OWN_THREADS = ("kvdist-node", "kvdist-disk", "kvdist-kernels", "kvdist-profiler", "kvdist-timeline")
"""Threads of kvdist that never wait for the user, and run the user's code only to deliver results."""
NAMED_MAX = 4
"""Threads that a sentence names."""
PASSIVE_MODULES = (
    "IPython",
    "ipykernel",
    "multiprocessing.queues",
    "tensorboard",
    "tensorboardX",
    "torch.utils.data",
    "torch.utils.tensorboard",
    "tqdm",
    "wandb",
    "zmq",
)
"""Libraries whose threads make no calls of kvdist: progress bars, loggers, loaders of data, the collector of pyzmq."""


os.register_at_fork(after_in_child=_waits.clear)


class _Noted(threading.local):
    """Whether the present thread is among the callers, and for how long it has waited."""

    is_caller = False
    waited_s = 0.0


_noted = _Noted()


def note_call() -> None:
    """Record that the present thread calls kvdist."""
    if not _noted.is_caller:
        _noted.is_caller = True
        _callers.add(threading.current_thread())


def waited_s() -> float:
    """Seconds that the present thread has waited in calls of kvdist."""
    return _noted.waited_s


class WaitingCall:
    """A context in which the present thread waits in a call of kvdist, without a time-out."""

    __slots__ = ("_before", "_thread")

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        note_call()
        self._before = _waits.get(self._thread)  # a signal handler of the user may wait inside a wait
        _waits[self._thread] = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            _noted.waited_s += time.monotonic() - _waits.pop(self._thread)
        else:
            _waits[self._thread] = self._before


class AwaitedFuture(Future[Result]):
    """A future of a call that records the threads that wait for it without a time-out."""

    def result(self, timeout: float | None = None) -> Result:
        """See `concurrent.futures.Future.result`."""
        if timeout is not None or self.done():
            return super().result(timeout)
        with WaitingCall():
            return super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See `concurrent.futures.Future.exception`."""
        if timeout is not None or self.done():
            return super().exception(timeout)
        with WaitingCall():
            return super().exception()


def wait_for(futures: Collection[Future[Any]]) -> None:
    """Wait until all of these are done, successfully or not; records that this thread waits."""
    if not all(future.done() for future in futures):
        with WaitingCall():
            wait(futures)


class AwaitedLock:
    """A lock whose owner may wait for other workers; records the threads that wait for the lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def acquire(self, blocking: bool = True) -> bool:
        """See `threading.Lock.acquire`."""
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        with WaitingCall():
            return self._lock.acquire()

    def release(self) -> None:
        """See `threading.Lock.release`."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class UnderWay:
    """Bytes of pushes that the servers have not counted yet. A push without room blocks.

    Args:
        bytes_max: the room in bytes, if it is not less than two contributions to all keys. With that much, workers that
            push the same keys in opposite orders do not wait for each other.
    """

    def __init__(self, bytes_max: int) -> None:
        self.nbytes = 0
        self.waiting = 0
        """Pushes that wait for room."""
        self.room = bytes_max
        """Largest number of bytes in flight."""
        self._contribution_bytes = 0
        # Reentrant, because a signal handler of the user may push while the thread it interrupted holds it.
        self._changed = threading.Condition(threading.RLock())

    def grow(self, nbytes: int) -> None:
        """Record that a contribution to all keys has grown by `nbytes`."""
        with self._changed:
            self._contribution_bytes += nbytes
            self.room = max(self.room, 2 * self._contribution_bytes)
            self._changed.notify_all()

    def enter(self, nbytes: int, check: Callable[[], None]) -> None:
        """Count the bytes of a push, as soon as they fit.

        Args:
            nbytes: bytes of the values, before any compression.
            check: raises the reason if the push has become impossible. Called after each wait.
        """
        with self._changed:
            # A callback of a future pushes on the thread that brings the answers, which must not wait for them.
            if self.nbytes + nbytes > self.room and threading.current_thread().name not in OWN_THREADS:
                self._wait_for_room(nbytes, check)
            self.nbytes += nbytes

    def count(self, nbytes: int, check: Callable[[], None], submit: Callable[[], Future[Result]]) -> Future[Result]:
        """Submit a push whose bytes count until its future is done, or until `submit` has raised.

        Args:
            nbytes, check: as in `enter`.
            submit: lays out the push and submits it.
        """
        self.enter(nbytes, check)
        counted = {nbytes}

        def leave(_: object) -> None:
            with self._changed:  # once, even if a signal interrupts us after the callback was added
                while counted:
                    self.leave(counted.pop())

        try:
            future = submit()
            future.add_done_callback(leave)
        except BaseException:
            leave(None)
            raise
        return future

    def _wait_for_room(self, nbytes: int, check: Callable[[], None]) -> None:
        self.waiting += 1
        try:
            with WaitingCall():
                while self.nbytes and self.nbytes + nbytes > self.room:
                    self._changed.wait()
                    check()
        finally:
            self.waiting -= 1

    def leave(self, nbytes: int) -> None:
        """Release the bytes of a push that was counted, or never will be."""
        with self._changed:
            self.nbytes -= nbytes
            if self.waiting:
                self._changed.notify_all()

    def wake(self) -> None:
        """Let waiting pushes check whether they are still possible."""
        with self._changed:
            self._changed.notify_all()


class UserThreads:
    """The threads of the user's program, as `kvdist.core.worker.pending.Threads` asks for them.

    Args:
        under_way: counts the bytes of pushes in flight; pushes without room wait in it.
    """

    def __init__(self, under_way: UnderWay) -> None:
        self._under_way = under_way

    def room_wait(self) -> str:
        """Why a push waits for room; '' if none does."""
        under_way = self._under_way
        if not under_way.waiting:
            return ""
        nbytes, room = under_way.nbytes, under_way.room
        return f"for room: {nbytes:,} bytes are under way, and KVDIST_UNDER_WAY_BYTES allows {room:,}"

    def blocked_since(self) -> float | None:
        """Since when every thread that may act waits in a call of kvdist; None while a thread does not."""
        waits = dict(_waits)
        if not waits:
            return None
        others = _others(waits)
        if _has_strangers() or not all(map(_may_never_call, others)):
            return None
        return max(waits.values()) + (NEVER_CALLED_S if others else 0.0)

    def may_act(self, now: float) -> str:
        """Threads that may act while others wait, such as ``'MainThread'``; '' if none does, or no thread waits."""
        waits = dict(_waits)
        if not waits:
            return ""
        others = _others(waits)
        if now - max(waits.values()) >= NEVER_CALLED_S:
            others = [thread for thread in others if not _may_never_call(thread)]
        names = [repr(thread.name) for thread in others]
        return ", ".join(names[:NAMED_MAX]) + (f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else "")

    def longest_wait_since(self) -> float | None:
        """Since when the longest waiting thread waits; None if none does."""
        return min(dict(_waits).values(), default=None)


def _others(waits: Container[int]) -> list[threading.Thread]:
    """The threads that neither wait in kvdist nor are known to make no calls of it."""
    frames = sys._current_frames()
    return [
        thread
        for thread in threading.enumerate()
        if thread.ident not in waits and not _is_passive(thread, frames.get(thread.ident or 0))
    ]


def _has_strangers() -> bool:
    """Whether a thread runs Python now that Python did not start."""
    return not sys._current_frames().keys() <= {thread.ident for thread in threading.enumerate()}


def _may_never_call(thread: threading.Thread) -> bool:
    """Whether a thread is assumed to make no calls of kvdist, after a while."""
    return thread.daemon and thread not in _callers


def _is_passive(thread: threading.Thread, frame: FrameType | None) -> bool:
    """Whether a thread that does not wait in kvdist makes no calls of kvdist either."""
    if thread.name in OWN_THREADS:
        return True
    target: Any = getattr(thread, "_target", None)
    if target is executors._worker and frame is not None and frame.f_code is executors._worker.__code__:
        return True  # It waits for work, which only a thread that acts can give to it.
    modules = (type(thread).__module__, getattr(target, "__module__", None) or "")
    return any(module == name or module.startswith(f"{name}.") for module in modules for name in PASSIVE_MODULES)
