"""Exit codes with which a supervisor (the launcher, Slurm, systemd) tells a lost peer from a bug."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

from kvdist.errors import PeerLostError

EXIT_PEER_LOST = 75
"""This process ended because another one was lost: sysexits.h's EX_TEMPFAIL, which says that trying again may help."""

EXIT_CONFIG = 2
"""The environment or the command line is wrong."""


def exit_with_peer_lost() -> None:
    """A peer is lost: from now on, an exception that says so and that nobody catches ends with `EXIT_PEER_LOST`.

    `sys.excepthook`, the program's own or another library's, prints the exception as before. It is wrapped when a peer
    is lost and not earlier, because one that was installed over ours would not expect that ours raises `SystemExit`.
    An interactive interpreter does not end. Nor does an exception of a thread end a process, as ever in Python.
    """
    if not isinstance(sys.excepthook, _ExitHook):
        sys.excepthook = _ExitHook()


class _ExitHook:
    def __init__(self) -> None:
        self._hook = sys.excepthook

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        self._hook(kind, error, trace)
        if isinstance(error, PeerLostError) and not (hasattr(sys, "ps1") or sys.flags.inspect):
            raise SystemExit(EXIT_PEER_LOST)


class _NotingExit:
    """`sys.exit`, which keeps the exception that it raises."""

    def __init__(self) -> None:
        self.raised: SystemExit | None = None

    def __call__(self, status: Any = None, /) -> NoReturn:
        self.raised = SystemExit(status)
        raise self.raised


def note_exits() -> None:
    """From now on `has_own_failure` knows of calls of `sys.exit`; called when the exit code may have to be replaced."""
    if not isinstance(sys.exit, _NotingExit):
        sys.exit = _NotingExit()


def has_own_failure() -> bool:
    """Whether the program ends with an exit code that is not 0 by itself: an uncaught exception, or `sys.exit`.

    Asked by a handler of `atexit`, which is not told: Python forgets a `SystemExit` before. One that something caught
    does not count, nor does one that was raised without `sys.exit`.
    """
    if hasattr(sys, "last_value"):
        return True
    error = sys.exit.raised if isinstance(sys.exit, _NotingExit) else None
    if error is None or error.code is None or error.code == 0:
        return False
    # The first entry is the outermost frame, before Python 3.12 of those with a handler. Where it was caught the frame
    # has gone on; where it was only let through, by a `with` block say, the frame has ended where it was raised.
    trace = error.__traceback__
    return trace is None or trace.tb_frame.f_lasti == trace.tb_lasti


class _Handlers:
    """What `atexit` holds; `atexit.unregister` compares with each, which is the one way to see them.

    Args:
        drops: whether this one is to go.
    """

    def __init__(self, drops: Callable[[object], bool]) -> None:
        self._drops = drops
        self.found: list[object] = []

    def __eq__(self, other: object) -> bool:
        self.found.append(other)
        return self._drops(other)

    __hash__ = None  # type: ignore[assignment]


def exit_handlers() -> list[object]:
    """What is to be called at the end of the process."""
    handlers = _Handlers(lambda _: False)
    atexit.unregister(handlers)  # type: ignore[arg-type]
    return handlers.found


def end_after(handlers: list[object], exit_code: int) -> NoReturn:
    """Call these handlers of `atexit`, the last registered first, and end the process; called by a handler.

    Args:
        handlers: those that have not been called yet, of which the calling one is none.
        exit_code: of the process.
    """
    atexit.unregister(_Handlers(lambda one: not any(one is kept for kept in handlers)))  # type: ignore[arg-type]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
            stream.flush()
    os._exit(exit_code)
