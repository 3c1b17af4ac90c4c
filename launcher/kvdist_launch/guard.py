"""Ends a job's processes when the launcher itself was killed; a program, started as ``python guard.py``.

A launcher that gets SIGKILL cannot clean up, and its workers may be computing or sleeping without ever noticing.
This second process reads a pipe from the launcher: ``group 4242`` names what is not to outlive it,
as it comes into being, ``done`` on the last line means that all is well. An end without that means that the launcher
is gone. The processes then get a moment to end as the scheduler tells them, SIGTERM, and SIGKILL.

``mark NAME=VALUE`` is what stands in the environment of all processes of the job and of no other. It finds the one that
was just being started and not yet named, and those that left their group.

The alternative, PR_SET_PDEATHSIG, needs code between fork and exec (slow, and unsafe beside threads), fires when the
starting *thread* ends, and reaches no grandchildren. Only modules that Python has loaded anyway are imported.
"""

from __future__ import annotations

import os
import signal
import time

GRACE_S = 2.0
"""For the scheduler, which sees the end of its standard input, to end the job in order."""

TERMINATE_S = 1.0
"""Between SIGTERM and SIGKILL."""

DONE = b"done\n"


def main() -> int:
    """Wait for the launcher's end and return 0 if it went in order, else 1 after ending all that it named."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    said = _read_all(0)
    if said.endswith(DONE):
        return 0
    # A last line without an end is one that was cut off.
    lines = [line.split(b" ", 1) for line in said.splitlines(keepends=True) if line.endswith(b"\n")]
    groups = [int(value) for word, value in lines if word == b"group"]
    marks = [value[:-1] for word, value in lines if word == b"mark"]
    for number, delay_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, TERMINATE_S)):
        time.sleep(delay_s)
        for group in groups:
            _send(-group, number)
        for process in _marked(marks):
            _send(process, number)
    return 1


def _read_all(descriptor: int) -> bytes:
    read = b""
    while data := os.read(descriptor, 64):
        read += data
    return read


def _marked(marks: list[bytes]) -> list[int]:
    """The processes that have one of these in their environment, where the system shows that."""
    found = []
    for name in os.listdir("/proc") if marks and os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            continue  # No process, or not ours.
        if any(mark in variables for mark in marks):
            found.append(int(name))
    return found


def _send(target: int, number: int) -> None:
    """Send a signal to a process, or to a group if that is minus its number."""
    try:
        os.kill(target, number)
    except OSError:
        return  # It has ended.


if __name__ == "__main__":
    raise SystemExit(main())
