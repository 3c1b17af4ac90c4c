"""Signals as bytes on a pipe, so that one selector waits for them together with everything else."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType

INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals by which the user or the system asks a job to end."""

Handler = Callable[[int, FrameType | None], object] | int | None


class Mailbox:
    """While entered, numbers that are posted from any thread make `descriptor` readable.

    Without signals of its own: for threads that are not the main one, where Python allows none.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._writer = -1
        self._lock = threading.Lock()

    def __enter__(self) -> Mailbox:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            os.close(self._writer)
            self._writer = -1
        os.close(self.descriptor)

    def post(self, number: int) -> None:
        """As if that signal had come. Does nothing while not entered."""
        with self._lock:
            if self._writer != -1:
                with contextlib.suppress(BlockingIOError):  # full of numbers that nobody has read yet
                    os.write(self._writer, bytes([number]))

    def read(self) -> list[int]:
        """The numbers that came since the last call; repetitions may be merged."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


class Signals(Mailbox):
    """While entered, SIGCHLD and the interruptions do nothing but make `descriptor` readable.

    Must be entered in the main thread, before children are started: they then get the default treatment of SIGINT
    even where a shell started the launcher in the background, with SIGINT ignored.
    """

    def __init__(self) -> None:
        super().__init__()
        self._wakeup_before = -1
        self._handlers_before: dict[int, Handler] = {}

    def __enter__(self) -> Signals:
        super().__enter__()
        self._wakeup_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*INTERRUPTIONS, signal.SIGCHLD):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # Under nohup the job is meant to outlive its terminal.
            self._handlers_before[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._handlers_before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        super().__exit__(kind, error, trace)


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A Python-level handler must exist for the interpreter to write to the pipe."""
