"""A cluster whose workers push and pull for ever, and what they tell: the ground of `failure.py` and `memory.py`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import launch_command, running, worker_command

START_TIMEOUT_S = 60.0


@dataclass
class SteadyCluster:
    """A launcher whose workers all have taken their first steps, and the pipe by which they tell of their end."""

    launcher: subprocess.Popen[bytes]
    log: Path
    pipe: int
    _partial: bytes = b""

    def told(self, deadline: float) -> list[dict[str, Any]]:
        """What workers have told since the last call; waits for something until `deadline`, then returns nothing."""
        if not select.select([self.pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return []
        *lines, self._partial = (self._partial + os.read(self.pipe, 1 << 16)).split(b"\n")
        return [json.loads(line) for line in lines]

    def wait_until_ready(self, workers: int) -> None:
        """Return when every worker is training.

        Raises:
            RuntimeError: they are not within a minute; the message holds what the launcher printed.
        """
        ready: set[int] = set()
        deadline = time.monotonic() + START_TIMEOUT_S
        while len(ready) < workers:
            told = self.told(deadline)
            if not told or any(event["event"] == "raised" for event in told):
                raise RuntimeError(f"the cluster did not start:\n{self.log.read_text(errors='replace')}")
            ready.update(event["rank"] for event in told)


@contextlib.contextmanager
def steady_cluster(workers: int, servers: int, spec: str, optimizer: str = "none") -> Iterator[SteadyCluster]:
    """A cluster at work, gone when the block ends."""
    with tempfile.TemporaryDirectory(prefix="steady-") as folder:
        path, log = Path(folder, "pipe"), Path(folder, "log")
        os.mkfifo(path)
        pipe = os.open(path, os.O_RDWR)  # for writing too, so that it never reads as ended
        command = launch_command(workers, servers, worker_command("steady_worker.py", str(path), spec, optimizer))
        try:
            with running(command, log) as launcher:
                cluster = SteadyCluster(launcher, log, pipe)
                cluster.wait_until_ready(workers)
                yield cluster
        finally:
            os.close(pipe)
