"""Starts Horovod's workers on this machine by its own launcher, over gloo."""

from __future__ import annotations

import os
from pathlib import Path

from cluster import Start, environment, worker_script
from peers.environments import python_made_by

SCRIPT = Path(__file__).with_name("horovod.sh")


def horovod_starts(workers: int, arguments: list[str], script: str = "horovod_worker.py") -> list[Start]:
    """horovodrun, and under it a script of `benchmarks/workers` with these arguments in every worker."""
    python = Path(python_made_by(SCRIPT))
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"  # it starts programs by name
    command = [str(python.with_name("horovodrun")), "--gloo", "-np", str(workers)]
    return [Start([*command, str(python), worker_script(script), *arguments], environment(PATH=path))]
