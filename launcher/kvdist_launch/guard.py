"""Ends a job's processes when the launcher itself was killed; a program, started as ``python guard.py PGID…``.

A launcher that gets SIGKILL cannot clean up, and its workers may be computing or sleeping without ever noticing.
This second process waits for the end of a pipe from the launcher. ``done`` on it means that all is well; an end
without it means that the launcher is gone. The processes then get a moment to end as the scheduler tells them,
SIGTERM, and SIGKILL.

The alternative, PR_SET_PDEATHSIG, needs code between fork and exec (slow, and unsafe beside threads), fires when the
starting *thread* ends, and reaches no grandchildren. Only modules that Python has loaded anyway are imported.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 2.0
"""For the scheduler, which sees the end of its standard input, to end the job in order."""

TERMINATE_S = 1.0
"""Between SIGTERM and SIGKILL."""

DONE = b"done\n"


def main(arguments: list[str]) -> int:
    """Wait for the launcher's end and return 0 if it went in order, else 1 after ending all `arguments` (pgids)."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if _read_all(0).endswith(DONE):
        return 0
    groups = [int(argument) for argument in arguments]
    for number, delay_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, TERMINATE_S)):
        time.sleep(delay_s)
        for group in groups:
            _send(group, number)
    return 1


def _read_all(descriptor: int) -> bytes:
    read = b""
    while data := os.read(descriptor, 64):
        read += data
    return read


def _send(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except OSError:
        return  # It has ended.


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
