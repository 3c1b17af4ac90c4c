"""The future of a pull of one small key, of which a loop makes a thousand in a step.

A `concurrent.futures.Future` makes a condition and a lock when it is made. Most of those of a loop are done, all at
once, before anybody looks at them. So the base class is initialised here only when somebody has to wait, adds a
callback, or hands the future to `concurrent.futures` or `asyncio`. Rules that hold here:

* What the base class keeps is made under one lock, and an outcome is noted under the same one: whichever comes second
  sees the first.
* What the base class keeps is asked for by whoever waits, and then the pull hurries: it may not have left yet.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from kvdist.runtime.user_threads import AwaitedFuture

# Reentrant, because a signal handler of the user may call us while the thread it interrupted holds it.
_LOCK = threading.RLock()


class PullFuture(AwaitedFuture[None]):
    """A future of None that cannot be cancelled: the answer may be under way into the user's array.

    Args:
        hurry: called when somebody waits.
    """

    _is_whole = False
    """The base class is initialised. On the class, so that each future need not set it."""
    _is_done = False
    _error: BaseException | None = None

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry

    def __getattr__(self, name: str) -> Any:
        # Of all attributes only those that the base class sets when it is initialised can be missing.
        if self._is_whole:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        if not self._is_done:
            self._hurry()
        self._become_whole()
        return getattr(self, name)

    def cancel(self) -> bool:
        """Always False."""
        return False

    def cancelled(self) -> bool:
        """Always False."""
        return False

    def running(self) -> bool:
        """Whether it is not done."""
        return not self._is_done

    def done(self) -> bool:
        """Whether the result is in its array, or never will be."""
        return self._is_done

    def result(self, timeout: float | None = None) -> None:
        """Wait until the result is in its array.

        Raises:
            TimeoutError: it is not there after so many seconds.
            KvdistError: what the pull failed with.
        """
        if not self._is_done:
            self._hurry()
            super().result(timeout)
        elif self._error is not None:
            raise self._error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and return what the pull failed with; None if it did not."""
        if self._is_done:
            return self._error
        self._hurry()
        return super().exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[None]], object]) -> None:
        """Have `fn` called when it is done. Nobody waits for that, so the pull need not hurry."""
        self._become_whole()
        super().add_done_callback(fn)

    def set_result(self, result: None) -> None:
        """The result is in its array."""
        fulfil([self])

    def set_exception(self, exception: BaseException | None) -> None:
        """It never will be."""
        assert exception is not None
        fail([self], exception)

    def _become_whole(self) -> None:
        """Have what the base class keeps."""
        with _LOCK:
            if not self._is_whole:
                # Made elsewhere and put here at once: another thread may use each part as soon as it is there.
                base: Future[None] = Future()
                base.set_running_or_notify_cancel()
                vars(self).update(vars(base))
                self._is_whole = True
                if self._is_done:
                    self._tell()

    def _tell(self) -> None:
        """Let the base class wake who waits, and call who wants to be called."""
        if self._error is None:
            super().set_result(None)
        else:
            super().set_exception(self._error)


def fulfil(futures: Sequence[PullFuture]) -> None:
    """The results of these are in their arrays."""
    with _LOCK:
        for future in futures:
            future._is_done = True
        whole = [future for future in futures if future._is_whole]
    for future in whole:
        future._tell()


def fail(futures: Sequence[PullFuture], error: BaseException) -> None:
    """These have failed."""
    with _LOCK:
        for future in futures:
            future._error = error
            future._is_done = True
        whole = [future for future in futures if future._is_whole]
    for future in whole:
        future._tell()
