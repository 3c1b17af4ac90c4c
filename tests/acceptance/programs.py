"""Programs of workers that several files of tests run, and what is waited for in them."""

from __future__ import annotations

from tests.integration.processes import Job

ROUNDS = """
    import os, sys, time
    import numpy as np
    from kvdist import kv

    store = kv.create("dist")
    store.init("w", np.zeros(20_000, np.float32))
    store.init("ends", np.zeros(1, np.float32))
    end, idle = (os.path.join(sys.argv[1], name) for name in ("end", "idle"))
    rounds = 0
    while True:
        idles = False
        while os.path.exists(idle):
            if not idles:  # said for the same look that makes it idle, so that it never idles without a word
                print("idle", flush=True)
            idles = True
            time.sleep(0.05)
        value = np.full(20_000, rounds, np.float32)
        ends = np.full(1, store.rank == 0 and os.path.exists(end), np.float32)
        store.pushpull(["w", "ends"], [value, ends])
        assert (value == store.num_workers * rounds).all()
        rounds += 1
        if rounds % 20 == 0:
            print("round", flush=True)
        if ends[0]:
            break
    store.close()
    print("right in all rounds")
"""
"""Training until a file `end` exists in a folder, with pauses while there is one called `idle`; each round checks what
came back."""


def is_going_on(job: Job, name: str = "worker-0") -> None:
    """Wait for rounds of `ROUNDS` that were made after now."""
    job.line(name, "round", count=len(job.processes[name].lines_with("round")) + 2)
