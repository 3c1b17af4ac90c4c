"""Workers of a ``dist_async`` store, of which a server is killed: ``snapshots_async.py FOLDER``.

Rank r pushes 10⁶ʳ in each step, so a weight says how many pushes of each worker are in it. All wait after 5 steps until
FOLDER/snapshot is there, and rank 0 after 25 until FOLDER/go is, while the others go on slowly.
"""

import sys
import time
from pathlib import Path

import numpy as np

from kvdist import kv

STEPS = 100
WAITS = {5: "snapshot", 25: "go"}
KEYS = ["first", "second"]
"""One on each server."""


def main():
    store = kv.create("dist_async")
    store.set_optimizer("sgd", learning_rate=1.0)
    store.init(KEYS, [np.zeros(3), np.zeros(3)])
    for step in range(STEPS):
        if step in WAITS:
            print(f"waits for {WAITS[step]}", flush=True)
            while not (Path(sys.argv[1]) / WAITS[step]).exists() and not (step == 25 and store.rank):
                time.sleep(0.01)
        time.sleep(0.01)
        gradients = [np.full(3, -(10.0 ** (6 * store.rank))) for _ in KEYS]
        store.pushpull(KEYS, gradients)
    store.barrier()
    for key, value in zip(KEYS, store.pull(KEYS), strict=True):
        assert (value == value[0]).all(), value
        counts = [int(value[0]) // 10 ** (6 * rank) % 10**6 for rank in range(store.num_workers)]
        print(f"{key} ended with {counts}", flush=True)
    store.barrier()
    store.close()


if __name__ == "__main__":
    main()
