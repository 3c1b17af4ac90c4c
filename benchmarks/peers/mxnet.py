"""Starts MXNet's scheduler, servers and workers on this machine, each a process with its role in its environment."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT_S = 600.0


def mxnet_python() -> str:
    """The Python that has MXNet, installed on the first call."""
    made = subprocess.run([str(FOLDER / "mxnet.sh")], stdout=subprocess.PIPE, text=True, check=True)
    return made.stdout.strip()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_mxnet(workers: int, servers: int, arguments: list[str]) -> None:
    """Run `mxnet_worker.py` with these arguments in a cluster of its own, to the end.

    Raises:
        RuntimeError: a worker failed.
    """
    python = mxnet_python()
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DMLC_", "KVDIST_"))}
    environment |= {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(workers),
        "DMLC_NUM_SERVER": str(servers),
    }
    # Importing MXNet in these roles is what runs them.
    with contextlib.ExitStack() as running:
        for role in ["scheduler"] + ["server"] * servers:
            running.enter_context(process([python, "-c", "import mxnet"], environment | {"DMLC_ROLE": role}))
        command = [python, str(FOLDER.parent / "workers" / "mxnet_worker.py"), *arguments]
        started = [
            running.enter_context(process(command, environment | {"DMLC_ROLE": "worker"})) for _ in range(workers)
        ]
        codes = [worker.wait(TIMEOUT_S) for worker in started]
    if any(codes):
        raise RuntimeError(f"MXNet's workers ended with {codes}")


@contextlib.contextmanager
def process(command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is given ten seconds to end by itself, then ended."""
    with subprocess.Popen(command, env=environment) as started:
        try:
            yield started
            with contextlib.suppress(subprocess.TimeoutExpired):
                started.wait(10)
        finally:
            started.kill()
