"""Processes of this machine: started, watched and ended by process group.

Every child leads a session of its own. Its group's id is its process id, and stays reserved as long as the child is
not reaped; so children are reaped last, and a signal to a group can never reach a stranger that got the number anew.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import IO

from kvdist.errors import ConfigError
from kvdist_launch import guard
from kvdist_launch.command import NOT_EXECUTABLE, NOT_FOUND, CommandError
from kvdist_launch.ending import Ending
from kvdist_launch.plan import Process

PORTS = range(20000, 32768)
"""Where the scheduler's port is sought: below the ports that Linux and macOS hand out to programs that ask for any,
so nobody is given the chosen one by accident between our test and the scheduler's bind."""

PORT_ATTEMPTS_MAX = 100


class Child:
    """One started process.

    Args:
        process: what to start.

    Raises (on construction):
        OSError: it could not be started.
    """

    def __init__(self, process: Process) -> None:
        self.node = process.node
        self._popen = subprocess.Popen(
            process.argv,
            env=process.env,
            bufsize=0,
            stdin=subprocess.PIPE if process.is_told_of_endings else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        if self._popen.stdin is not None:
            # A scheduler that does not read must not stop the launcher.
            os.set_blocking(self._popen.stdin.fileno(), False)

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's."""
        return self._popen.pid

    @property
    def outputs(self) -> tuple[IO[bytes], IO[bytes]]:
        """The reading ends of its standard output and standard error."""
        if self._popen.stdout is None or self._popen.stderr is None:
            raise ValueError(f"{self.node} was started without pipes")
        return self._popen.stdout, self._popen.stderr

    def ending(self) -> Ending | None:
        """How it ended; None while it runs. It stays unreaped."""
        result = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if result is None:
            return None
        status = result.si_status if result.si_code == os.CLD_EXITED else -result.si_status
        return Ending(self.node, self.pid, status)

    def signal_group(self, number: int) -> None:
        """Send a signal to it and to whatever it has started in its group."""
        # Errors mean that nobody is left who could be told: macOS says "permission" of a group of zombies.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)

    def tell(self, line: str) -> None:
        """Write a line to its standard input, if it has one and is there to read it."""
        if self._popen.stdin is None:
            return
        # It may have ended, or stand still; the job's course deals with both.
        with contextlib.suppress(BrokenPipeError, BlockingIOError):
            os.write(self._popen.stdin.fileno(), line.encode() + b"\n")

    def reap(self) -> None:
        """Kill what is left of its group, itself included, and give its number back."""
        self.signal_group(signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout, self._popen.stderr):
            if pipe is not None:
                pipe.close()


class Guard:
    """A process that ends the children should the launcher be killed; see `guard`."""

    def __init__(self, children: Sequence[Child]) -> None:
        argv = [sys.executable, "-I", "-S", guard.__file__, *(str(child.pid) for child in children)]
        silent = subprocess.DEVNULL
        self._popen = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=silent, stderr=silent, start_new_session=True
        )

    def dismiss(self) -> None:
        """The children have ended in order."""
        self._popen.communicate(guard.DONE)


def start(processes: Sequence[Process]) -> list[Child]:
    """Start all processes, in order.

    Raises:
        CommandError: one could not be started; those already started have been killed.
    """
    children: list[Child] = []
    for process in processes:
        try:
            children.append(Child(process))
        except OSError as error:
            for child in children:
                child.reap()
            code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
            text = f"{process.node} could not be started: {process.argv[0]}: {error.strerror}"
            raise CommandError(text, code) from error
    return children


def free_port(host: str) -> int:
    """A TCP port of `host` on which nobody listens.

    Raises:
        ConfigError: none was found.
    """
    for _ in range(PORT_ATTEMPTS_MAX):
        port = PORTS[int.from_bytes(os.urandom(4), "big") % len(PORTS)]
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port for the scheduler was found on {host} between {PORTS[0]} and {PORTS[-1]}")
