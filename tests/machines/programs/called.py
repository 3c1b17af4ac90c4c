"""A function that `kvdist_launch.run` calls on two machines, and what becomes of it: ``main(HOW, FOLDER)``."""

from __future__ import annotations

import os
import signal
import time

import kvdist_launch

LETTER = bytes(range(256)) * (5 << 12)
"""5 MiB: more than fits into a pipe or a frame."""


def work(how, letter):
    """Sum over the ranks, then return, raise, be killed, or kill the agent of the machine."""
    import torch

    import kvdist.collective as hvd

    hvd.init()
    total = hvd.allreduce(torch.tensor([float(hvd.rank() + 1)]), op=hvd.Sum).item()
    if how == "return":
        return hvd.rank(), total, os.environ["SSH_CONNECTION"].split()[2], letter
    if hvd.rank() == 1 and how == "raise":
        raise LookupError("no such thing")
    if hvd.rank() == 1:
        os.kill(os.getppid() if how == "lose" else os.getpid(), signal.SIGKILL)
    time.sleep(600)
    return None


def main(how: str, folder: str) -> None:
    """Call it on d1 and d2, and print the outcome."""
    try:
        results = kvdist_launch.run(work, (how, LETTER), np=2, hosts="d1:1,d2:1", sync_dst_dir=folder)
    except kvdist_launch.WorkerFailure as failure:
        print("failure", (failure.rank, failure.host, failure.exit_code, failure.kind))
        print(failure)
    else:
        print("results", [result[:3] for result in results], all(result[3] == LETTER for result in results))
