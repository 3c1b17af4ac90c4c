"""Signals as bytes on a pipe, so that one selector waits for them together with everything else."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import FrameType, TracebackType

INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals by which the user or the system asks a job to end."""

Handler = Callable[[int, FrameType | None], object] | int | None


class Signals:
    """While entered, SIGCHLD and the interruptions do nothing but make `descriptor` readable.

    Must be entered in the main thread, before children are started: they then get the default treatment of SIGINT
    even where a shell started the launcher in the background, with SIGINT ignored.
    """

    def __init__(self) -> None:
        self.descriptor = -1
        self._writer = -1
        self._wakeup_before = -1
        self._handlers_before: dict[int, Handler] = {}

    def __enter__(self) -> Signals:
        self.descriptor, self._writer = os.pipe()
        os.set_blocking(self.descriptor, False)
        os.set_blocking(self._writer, False)
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
        os.close(self.descriptor)
        os.close(self._writer)

    def read(self) -> list[int]:
        """The numbers of the signals that came since the last call; repetitions may be merged."""
        try:
            return list(os.read(self.descriptor, 4096))
        except BlockingIOError:
            return []


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """A Python-level handler must exist for the interpreter to write to the pipe."""
