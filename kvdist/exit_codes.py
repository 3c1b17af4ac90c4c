"""Exit codes with which a supervisor (the launcher, Slurm, systemd) tells a lost peer from a bug."""

from __future__ import annotations

import sys
from types import TracebackType

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
