"""Begin of the launcher's commands, before slow imports, and their end.

Inherited state (descriptors, signals, the umask, the folder) is checked once, and repaired for the process and its
children. Signals that its caller has chosen to ignore stay ignored; an ignored SIGINT is no such choice, as a shell
ignores it for background commands. Until any process has been started, a signal ends the command at once, with the exit
code that a job would have.
"""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

INTERRUPTIONS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
"""Signals by which the user or the system asks a job to end."""

UMASK_MAX = 0o077
"""Most restrictive umask: a process can use the files that it creates."""


def is_ignored(number: int) -> bool:
    """Whether the caller of this process has chosen that it ignores this signal, as ``nohup`` does."""
    return signal.getsignal(number) == signal.SIG_IGN


class Beginning:
    """Signal handler of a command that has started no process yet.

    Args:
        program: name of the command in messages.
    """

    def __init__(self, program: str) -> None:
        self._program = program

    def __call__(self, number: int, _: FrameType | None) -> None:
        try:
            os.write(2, f"{self._program}: interrupted before anything was started\n".encode())
        finally:
            os._exit(128 + number)


def begin(program: str) -> None:
    """Begin a command: repair inherited state, and let signals end it until it has started a process.

    Args:
        program: name of the command in messages.

    Raises:
        SystemExit: the current folder was removed.
    """
    for number in INTERRUPTIONS:
        if not is_ignored(number):
            signal.signal(number, Beginning(program))
    inherit(program)


def end(code: int) -> int:
    """Ignore further signals at the end of a command, and return its exit code."""
    for number in INTERRUPTIONS:
        signal.signal(number, signal.SIG_IGN)
    return code


def inherit(program: str) -> None:
    """Repair inherited state of this process, for itself and its children.

    Args:
        program: name of the command in messages.

    Raises:
        SystemExit: the current folder was removed.
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
