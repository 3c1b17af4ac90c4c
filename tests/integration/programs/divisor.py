"""One of three workers has a gradient of 6, and the others none: averages divide by the number of all workers.
Then the workers exchange bytes.

On ``dist_async`` each push is an update of its own, and divided by 1.
"""

import os

import numpy as np

from kvdist import kv
from kvdist.kvstore.checkpoints import gather
from kvdist.optimizer import SGD

CONTENTS = [[b"", b"1" * 70_000, b"\0\1\0"], [b"a", b"", b"c" * 3], [b""] * 3]
"""Bytes of each worker, in three exchanges."""

with kv.create("dist"):  # which keeps the process in the cluster
    for kind in ("dist", "collective", "hybrid", "dist_async"):
        if kind == "dist_async":
            del os.environ["KVDIST_POLICY"]  # which is for steps of all workers
        with kv.create(kind) as store:
            found = np.zeros(2, np.float32)
            if kind == "dist_async":  # which needs one
                store.set_optimizer(SGD(learning_rate=1.0))
            store.init("k", found)
            store.pushpull("k", np.full(2, 6, np.float32) if store.rank == 1 else None, out=found, average=True)
            if kind == "dist_async":
                store.barrier()  # the push may come after this worker's pull
                store.pull("k", out=found)
            mean = store.average(6.0 if store.rank == 1 else 0.0)
            for contents in CONTENTS:
                assert gather(store._backend, contents[store.rank]) == dict(enumerate(contents))
            print(kind, np.abs(found).tolist(), mean, flush=True)
