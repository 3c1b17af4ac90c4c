"""How the launcher's commands begin, before they import what takes time, and how they end.

What a process inherits (descriptors, signals, the umask, the folder) is looked at here, once, and put right for itself
and for all that it starts; what its caller has chosen to ignore stays ignored. A SIGINT
is not: a shell ignores it for what it starts in the background. Until anything has been started, a signal ends the
process at once, with the exit code that a job would have.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals by which the user or the system asks a job to end."""

UMASK_MAX = 0o077
"""A process can use the files that it makes."""


def is_ignored(number: int) -> bool:
    """Whether the caller of this process has chosen that it ignores this signal, as ``nohup`` does."""
    return signal.getsignal(number) == signal.SIG_IGN


class Beginning:
    """Handles signals while a command, called `program` for people, has started nothing."""

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, number: int, _: FrameType | None) -> None:
        try:
            os.write(2, f"{self._program}: interrupted before anything was started\n".encode())
        finally:
            os._exit(128 + number)


def begin(program: str) -> None:
    """Begin a command: put right what it has inherited, and let signals end it while nothing has been started.

    Args:
        program: its name, for people.

    Raises:
        SystemExit: its folder is gone.
    """
    for number in INTERRUPTIONS:
        if not is_ignored(number):
            signal.signal(number, Beginning(program))
    inherit(program)


def end(code: int) -> int:
    """End a command with this exit code, which it returns: nothing is left that a signal could end."""
    for number in INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)
    return code


def inherit(program: str) -> None:
    """Put right what this process has inherited, for itself and for what it starts.

    Args:
        program: its name, for people.

    Raises:
        SystemExit: its folder is gone.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next thing that is opened would be taken for it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 (it stays open)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, the exit codes of children would be lost
    os.umask(os.umask(UMASK_MAX) & UMASK_MAX)
    try:
        os.getcwd()
    except FileNotFoundError:
        sys.stderr.write(f"{program}: error: the current folder was removed: change to another one\n")
        raise SystemExit(2) from None
