"""A launcher run as a process of its own, with stand-ins for scheduler and servers."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvdist
import kvdist_launch

PACKAGES = [str(Path(package.__file__).parents[1]) for package in (kvdist, kvdist_launch)]
ROLES = str(Path(__file__).with_name("roles.py"))
DRIVER = """
import sys
from kvdist_launch.cli import main
raise SystemExit(main(sys.argv[2:], role_command=(sys.executable, sys.argv[1])))
"""
TIMEOUT_S = 30


class Launch:
    """One run of the launcher: its output so far, and how to talk to it."""

    def __init__(self, words: tuple[str, ...], env: dict[str, str]) -> None:
        argv = [sys.executable, "-c", DRIVER, ROLES, *words]
        self.process = subprocess.Popen(argv, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    def line_with(self, text: str) -> str:
        """Read standard output up to a line that contains `text`."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if text in line.decode():
                return line.decode()
        raise AssertionError(f"no line contains {text!r}")

    def pid_of(self, name: str) -> int:
        """The pid that the process `name` printed."""
        return int(self.line_with(f"[{name}] pid ").split()[-1])

    def error_line_with(self, text: str) -> str:
        """Read standard error up to a line that contains `text`."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if text in line.decode():
                return line.decode()
        raise AssertionError(f"no line contains {text!r}")

    def finish(self) -> tuple[int, str, str]:
        """The exit code and what was not yet read of standard output and standard error."""
        out, err = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, (out or b"").decode(errors="surrogateescape"), err.decode()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launch]]:
    """``launch('-n', '2', …)``: start the launcher, and see that it has ended when the test has."""
    fifo = tmp_path / "goodbye"
    os.mkfifo(fifo)
    own = {"PYTHONPATH": os.pathsep.join(PACKAGES), "GOODBYE_FIFO": str(fifo)}
    started: list[Launch] = []

    def start(*words: str) -> Launch:
        started.append(Launch(words, {**os.environ, **own}))
        return started[-1]

    yield start
    for each in started:
        each.process.send_signal(signal.SIGTERM)  # Does nothing to one that has ended.
        each.process.communicate(timeout=TIMEOUT_S)


@pytest.fixture
def is_gone() -> Callable[..., bool]:
    """``is_gone(pid, timeout_s)``: whether that process has ended, waiting for it at most so long."""

    def check(pid: int, timeout_s: float = 0.0) -> bool:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([descriptor], [], [], timeout_s)[0])
        finally:
            os.close(descriptor)

    return check
