"""Ranks as processes of their own, told who they are by the variables of a launcher that everybody may set."""

from __future__ import annotations


def as_of_torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process of a job on this machine whose rank 0 is to listen at a port."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
