"""Two workers of which one does what the test explains afterwards: ``why.py SCENARIO [FIFO]``."""

import os
import sys

import numpy as np

from kvdist import kv

STEPS = 5


def stand_still(fifo):
    """Block in a read, without kvdist."""
    print("standing still", flush=True)
    with open(fifo, "rb") as words:
        words.read()


def main(scenario, fifo=""):
    if scenario == "comes late" and os.environ["KVDIST_RANK"] == "1":
        stand_still(fifo)
    store = kv.create("dist")
    odd = store.rank == 1
    store.init(["w", "v"], [np.zeros(4, np.float32), np.zeros(3, np.float32)])
    out = [np.zeros(4, np.float32), np.zeros(3, np.float32)]
    for _ in range(STEPS):
        store.pushpull(["w", "v"], out)
    if scenario == "raises" and odd:
        raise ValueError("the learning rate went overboard")
    if scenario == "stands still" and odd:
        stand_still(fifo)
    if scenario == "barrier" and odd:
        store.barrier()
    if scenario == "other keys":
        store.pushpull("w" if odd else "v", out[0 if odd else 1])
    if scenario == "waits":
        print("waiting", flush=True)
        store.barrier() if odd else stand_still(fifo)
    store.pushpull(["w", "v"], out)


main(*sys.argv[1:])
