"""Exit codes with which a supervisor (the launcher, Slurm, systemd) tells a lost peer from a bug."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, NoReturn

from kvdist.errors import PeerLostError

EXIT_PEER_LOST = 75
"""This process ended because another one was lost: sysexits.h's EX_TEMPFAIL, which says that trying again may help."""

EXIT_CONFIG = 2
"""The environment or the command line is wrong."""


FRAMES_OF_OURS_MAX = 3
"""How many frames of kvdist a traceback shows below the program's call."""


def exit_with_peer_lost() -> None:
    """From now on, as a peer is lost, an uncaught `PeerLostError` ends the process with `EXIT_PEER_LOST`.

    `sys.excepthook`, the program's own or another library's, prints the exception, with few frames of ours. It is
    wrapped when a peer is lost and not earlier, because one that was installed over ours would not expect that ours
    raises `SystemExit`. An interactive interpreter does not end. Nor does an exception of a thread end a process, as
    ever in Python.
    """
    if not isinstance(sys.excepthook, _ExitHook):
        sys.excepthook = _ExitHook()


class _ExitHook:
    def __init__(self) -> None:
        self._hook = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        ends = isinstance(error, PeerLostError) and not (hasattr(sys, "ps1") or sys.flags.inspect)
        if ends:
            _cut_after_call(trace)
        self._hook(kind, error, trace)
        if ends:
            raise SystemExit(EXIT_PEER_LOST)


def _cut_after_call(trace: TracebackType | None) -> None:
    """Cut a traceback that ends in kvdist below the program's call, as what follows does not help its reader."""
    ours: list[TracebackType] = []
    while trace is not None:
        module = trace.tb_frame.f_globals.get("__name__", "")
        ours = [*ours, trace] if module.partition(".")[0] in ("kvdist", "concurrent") else []
        trace = trace.tb_next
    if len(ours) > FRAMES_OF_OURS_MAX:
        ours[FRAMES_OF_OURS_MAX - 1].tb_next = None


class _NotingExit:
    """A `sys.exit` that keeps its last status: a handler of `atexit` cannot see the `SystemExit`."""

    status: Any = None

    def __call__(self, status: Any = None, /) -> NoReturn:
        self.status = status
        raise SystemExit(status)


def note_exits() -> None:
    """Let `end_with` know the status that `sys.exit` gets."""
    if not isinstance(sys.exit, _NotingExit):
        sys.exit = _NotingExit()


class _End:
    """Ends the process when the interpreter deletes it."""

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code

    def __del__(self, end: Any = os._exit) -> None:  # a default, as the names of this module are gone by then
        end(self._exit_code)


def end_with(exit_code: int) -> None:
    """Replace the exit code of a process that would end with 0; called by a handler of `atexit`.

    An uncaught exception keeps its code, and so does `sys.exit`, once `note_exits` was called. All other handlers are
    called, and files closed: `sys` is what the interpreter clears last.
    """
    if hasattr(sys, "last_value"):  # an uncaught exception
        return
    status = sys.exit.status if isinstance(sys.exit, _NotingExit) else None
    own = status & 0xFF if isinstance(status, int) else int(status is not None)
    setattr(sys, "_kvdist_end", _End(own or exit_code))  # noqa: B010 (types do not know the attribute)
