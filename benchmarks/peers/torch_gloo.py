"""Starts workers that talk by torch's collectives over gloo, with the variables that torchrun would set."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping

from cluster import Start, environment, free_port
from peers.environments import Absent


def torch_starts(workers: int, command: list[str], variables: Mapping[str, str] | None = None) -> list[Start]:
    """`workers` processes that run `command` as the ranks of one group on this machine."""
    if importlib.util.find_spec("torch") is None:
        raise Absent(f"{sys.executable} has no torch")
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(workers)}
    shared |= {"GLOO_SOCKET_IFNAME": "lo", **(variables or {})}
    return [Start(command, environment(**shared, RANK=str(rank))) for rank in range(workers)]
