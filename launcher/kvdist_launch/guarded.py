"""The launcher's end of the guard: what is not to outlive this process is named there as it comes into being."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

from kvdist_launch import guard


class Guard:
    """A process that ends groups of processes should this one be killed; see `guard`."""

    def __init__(self) -> None:
        silent = subprocess.DEVNULL
        self._popen = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__],
            bufsize=0, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True,
        )  # fmt: skip

    def watch(self, group: int) -> None:
        """This group of processes has been started."""
        self._tell(f"group {group}")

    def mark(self, name: str, value: str) -> None:
        """This stands in the environment of all processes that are started from now on."""
        self._tell(f"mark {name}={value}")

    def dismiss(self) -> None:
        """Everything has ended in order."""
        self._popen.communicate(guard.DONE)

    def _tell(self, line: str) -> None:
        # If somebody killed the guard, the job goes on without one.
        with contextlib.suppress(BrokenPipeError):
            if self._popen.stdin is not None:
                self._popen.stdin.write(os.fsencode(line) + b"\n")
