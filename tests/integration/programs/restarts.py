"""Workers that get a signal at random moments and started again: ``restarts.py FOLDER LIVES SPARED SIGNAL``.

Each push adds one to a digit of its worker's own, so every element of a weight says how many pushes of whom are in it.
The file ``RANK.LIFE`` in the folder has a byte for each push that came back. The signal goes to all but one worker,
which is spared; all go on until every one is in its last life and has pushed in it for a while.
"""

import os
import random
import signal
import sys
import threading
import time

import numpy as np

from kvdist import kv

DIGIT = 1 << 12
"""More pushes than any worker makes; four of these fit into the 53 bits of a float64."""
SIZES = {"small": 3, "large": 600_000, "whole": 60_000}
"""One is cut over all servers, others live on one."""
AFTER = 20
"""How many pushes each worker makes in its last life at least."""


def main():
    folder, lives, spared = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    life = int(os.environ.get("KVDIST_RESTARTS", "0"))
    store = kv.create("dist")
    names = [*SIZES, "ready"]
    store.set_optimizer("sgd", learning_rate=1.0)
    sizes = [*SIZES.values(), store.num_workers]
    store.init(names, [np.zeros(size) for size in sizes])
    is_last = life == lives or store.rank == spared
    if not is_last:
        moment = random.Random(f"{store.rank} {life}").uniform(0.02, 0.6)
        threading.Timer(moment, os.kill, (os.getpid(), signal.Signals[sys.argv[4]])).start()
    done = os.open(os.path.join(folder, f"{store.rank}.{life}"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    out = [np.zeros(size) for size in sizes]
    ready = np.zeros(store.num_workers)
    ready[store.rank] = is_last
    while (-out[-1]).min() < AFTER:
        values = [np.full(size, float(DIGIT**store.rank)) for size in SIZES.values()]
        store.pushpull(names, [*values, ready], out=out)
        os.write(done, b".")
        time.sleep(0.01)
    whole = np.concatenate(out[:-1])
    found = [(-whole).astype(np.int64) // DIGIT**rank % DIGIT for rank in range(store.num_workers)]
    print(f"counted {[[int(one.min()), int(one.max())] for one in found]}", flush=True)
    store.close()


main()
