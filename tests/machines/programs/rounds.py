"""A worker: rounds of exact sums, with a file beside it that must have come along. What it does is its first word."""

import os
import sys
import time
from pathlib import Path

import numpy as np

from kvdist import kv


def main() -> int:
    does, rounds = sys.argv[1], int(sys.argv[2])
    beside = Path(__file__).with_name("beside.txt").read_text().strip()
    store = kv.create("dist")
    print(f"worker {store.rank} pid {os.getpid()} found {beside} in {Path.cwd()}", flush=True)
    store.init("w", np.zeros(100_000, np.float32))
    for turn in range(rounds):
        found = np.full(100_000, store.rank + turn, np.float32)
        store.pushpull("w", found)
        wanted = sum(rank + turn for rank in range(store.num_workers))
        assert (found == wanted).all(), (found[0], wanted)
        if does == "fail" and store.rank == 1 and turn == 3:
            raise ValueError("the learning rate went overboard")
        if does == "last":
            time.sleep(0.05)
            print(f"round {turn}", flush=True)
    security = "curve" if os.environ.get("KVDIST_SECRET_FILE") else os.environ["KVDIST_SECURITY"]
    print(f"worker {store.rank} is done, security {security}", flush=True)
    store.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
