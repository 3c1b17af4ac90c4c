"""Ends a job's processes when the launcher itself was killed: a program, ``python watchdog.py``, and its client.

A launcher that gets SIGKILL cannot clean up, and its workers may be computing or sleeping without ever noticing. The
program reads lines from a pipe: ``group 4242`` is a process group that must not outlive the launcher, written as soon
as it exists; ``gone 4242`` revokes that, as the number may be reused; ``mark NAME=VALUE`` is in the environment of all
processes of the job and of no others, and identifies processes that were just being started or left their group. A
launcher that ends in order kills the program. If the pipe ends before that, the processes get a moment to end by order
of the scheduler, then SIGTERM, then SIGKILL.

The alternative, PR_SET_PDEATHSIG, needs code between fork and exec (slow, and unsafe beside threads), fires when the
starting *thread* ends, and reaches no grandchildren. The program imports only modules that Python has loaded anyway.
"""

from __future__ import annotations

import os
import signal
import sys
import time

GRACE_S = 2.0
"""Time for the scheduler, which sees the end of its standard input, to end the job in order."""

TERMINATE_S = 1.0
"""Time between SIGTERM and SIGKILL."""


class Watchdog:
    """Client in the launcher: starts the program, and registers processes that must not outlive the launcher."""

    def __init__(self) -> None:
        import subprocess  # here, as the program itself does without

        silent = subprocess.DEVNULL
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__],
            bufsize=0, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True,
        )  # fmt: skip

    def watch(self, group: int) -> None:
        """Register a process group that has been started."""
        self._tell(f"group {group}")

    def forget(self, group: int) -> None:
        """Remove a process group that has ended."""
        self._tell(f"gone {group}")

    def mark(self, name: str, value: str) -> None:
        """Register a variable in the environment of all processes that are started from now on."""
        self._tell(f"mark {name}={value}")

    def dismiss(self) -> None:
        """End the program, even if it is stopped, after the job has ended in order."""
        self._popen.kill()
        self._popen.communicate()

    def _tell(self, line: str) -> None:
        try:
            if self._popen.stdin is not None:
                self._popen.stdin.write(os.fsencode(line) + b"\n")
        except BrokenPipeError:
            return  # It was killed; the job goes on without one.


def main() -> int:
    """Wait for the launcher's end, and end the registered processes. Returns 1."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    text = b""
    while data := os.read(0, 64):
        text += data
    # A last line without an end was cut off.
    lines = [line.split(b" ", 1) for line in text.splitlines(keepends=True) if line.endswith(b"\n")]
    groups: dict[int, None] = {}
    for word, value in lines:
        if word == b"group":
            groups[int(value)] = None
        elif word == b"gone":
            groups.pop(int(value), None)
    marks = [value[:-1] for word, value in lines if word == b"mark"]
    for number, delay_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, TERMINATE_S)):
        time.sleep(delay_s)
        for group in groups:
            _send(-group, number)
        for process in _marked(marks):
            _send(process, number)
    return 1


def _marked(marks: list[bytes]) -> list[int]:
    """Ids of the processes that have any of these assignments in their environment, if the system shows it."""
    found = []
    for name in os.listdir("/proc") if marks and os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{name}/environ", "rb") as environ:
                variables = environ.read().split(b"\0")
        except OSError:
            continue  # No process, or another user's.
        if any(mark in variables for mark in marks):
            found.append(int(name))
    return found


def _send(target: int, number: int) -> None:
    """Send a signal to a process, or to a group if `target` is minus its number."""
    try:
        os.kill(target, number)
    except OSError:
        return  # It has ended.


if __name__ == "__main__":
    raise SystemExit(main())
