"""One run of kvdist-launch on the launcher's machine: its output so far, and how to wait for what must happen."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tests.machines.machines import PYTHONPATH, Machines

TIMEOUT_S = 120.0


class Launched:
    """A launcher.

    Args:
        machines: among them the one it runs on.
        folder: where it is called.
        words: its arguments.
        variables: of its environment, besides the test's own.
    """

    def __init__(self, machines: Machines, folder: Path, words: Sequence[str], variables: Mapping[str, str]) -> None:
        self.machines = machines
        self.text = ""
        argv = machines.command([sys.executable, "-m", "kvdist_launch", *words])
        env = {**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONUNBUFFERED": "1", **variables}
        env.pop("SSH_AUTH_SOCK", None)
        self.process = subprocess.Popen(
            argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        self._selector = selectors.DefaultSelector()
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        self._selector.register(self.process.stdout, selectors.EVENT_READ)

    def wait_for(self, text: str, timeout_s: float = TIMEOUT_S) -> None:
        """Read until a text has been printed."""
        self._wait(lambda: text in self.text, text, timeout_s)

    def line_with(self, text: str) -> str:
        """The one line that contains a text, once it has been printed to its end."""
        self._wait(lambda: any(text in line for line in self.text.split("\n")[:-1]), text, TIMEOUT_S)
        (line,) = self.lines_with(text)
        return line

    def finish(self, timeout_s: float = TIMEOUT_S) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + timeout_s
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    @property
    def pid(self) -> int:
        """Of kvdist-launch itself; ``ip``, ``unshare`` and the shell have replaced themselves by it."""
        return self.process.pid

    def signal(self, number: int) -> None:
        """Send the launcher a signal."""
        os.kill(self.pid, number)

    def lines_with(self, text: str) -> list[str]:
        """The lines so far that contain a text."""
        return [line for line in self.text.splitlines() if text in line]

    def end(self) -> None:
        """The test is over."""
        if self.process.poll() is None:
            self.signal(signal.SIGKILL)
        self.process.wait()
        self._selector.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _wait(self, is_there: Callable[[], bool], text: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert self._read(deadline), f"{text!r} was not printed:\n{self.text}"

    def _read(self, deadline: float) -> bool:
        """Take what was printed; False at the end of the output, or when time is up."""
        assert self.process.stdout is not None
        if not self._selector.get_map() or not self._selector.select(max(0.0, deadline - time.monotonic())):
            return False
        data = os.read(self.process.stdout.fileno(), 65536)
        if not data:
            self._selector.unregister(self.process.stdout)
            return False
        self.text += data.decode(errors="replace")
        return True
