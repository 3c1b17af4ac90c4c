"""Works under the profiler: ``profiled.py SCENARIO``, and the period of the renewal of its file for ``for_ever``."""

import os
import sys
from pathlib import Path

import numpy as np

from kvdist import KvdistError, kv, profiler

STEPS = 4


def both_sides():
    """Rank 0 traces the servers, all trace themselves."""
    profiler.set_config(filename="work.json")
    profiler.start()
    store = kv.create("dist")
    store.init(["small", "big"], [np.zeros(3, np.float32), np.zeros((1200, 1200), np.float32)])
    if store.rank == 0:
        profiler.set_config(filename="served.json", max_events=500, profile_process="server")
        profiler.start(profile_process="server")
        for name in ("../served.json", "a/b"):
            try:
                profiler.set_config(filename=name, profile_process="server")
            except ValueError as error:
                print(f"refused: {error}")
        try:
            profiler.set_config(filename="other.json", profile_process="server")
        except KvdistError as error:
            print(f"refused: {error}")
    store.barrier()
    for _ in range(STEPS):
        store.pushpull(["small", "big"], [np.ones(3, np.float32), np.ones((1200, 1200), np.float32)])
    store.barrier()
    profiler.dump()
    if store.rank == 0:
        profiler.dump(profile_process="server")
    store.barrier()
    store.close()


def for_ever():
    """Pushes until it is killed."""
    profiler.set_config(filename="work.json", dump_period=float(sys.argv[2]), max_events=1_000_000)
    profiler.start()
    store = kv.create("dist")
    store.init("w", np.zeros(3, np.float32))
    store.barrier()
    profiler.dump(finished=False)
    path = Path(os.environ["KVDIST_PROFILE_DIR"], f"work.worker-{store.rank}.json")
    first, step, renewed = path.stat().st_ino, 0, False
    while True:
        store.pushpull("w", np.ones(3, np.float32))
        step += 1
        if step == 50:
            print("50 steps", flush=True)
        if step >= 50 and not renewed and path.stat().st_ino != first:
            renewed = True
            print("renewed", flush=True)


{"both_sides": both_sides, "for_ever": for_ever}[sys.argv[1]]()
