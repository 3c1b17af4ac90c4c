"""One of three workers has a gradient of 6, and the others none: averages divide by the number of all workers."""

import numpy as np

from kvdist import kv

with kv.create("dist"):  # which keeps the process in the cluster
    for kind in ("dist", "collective", "hybrid"):
        with kv.create(kind) as store:
            found = np.zeros(2, np.float32)
            store.init("k", found)
            store.pushpull("k", np.full(2, 6, np.float32) if store.rank == 1 else None, out=found, average=True)
            mean = store.average(6.0 if store.rank == 1 else 0.0)
            print(kind, found.tolist(), mean, flush=True)
