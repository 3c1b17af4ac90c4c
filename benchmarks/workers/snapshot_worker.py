"""One worker of `checkpoint.py --snapshots`: steps without a pause for some seconds, and says how many a second."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
from workload import parse_arguments

from kvdist import kv


def main() -> None:
    options = parse_arguments()
    store = kv.create(options.store)
    store.set_optimizer(options.optimizer, learning_rate=0.01)
    keys = list(range(options.spec.count))
    grads = [np.ones(size, np.float32) for size in options.spec.sizes]
    outs = [np.empty(size, np.float32) for size in options.spec.sizes]
    store.init(keys, [np.zeros(size, np.float32) for size in options.spec.sizes])
    for _ in range(options.warmup):
        store.pushpull(keys, grads, out=outs)
    store.barrier()
    steps, begun = 0, time.perf_counter()
    # All workers make as many steps, whoever sees first that the time is over.
    while store.average(float(time.perf_counter() - begun > float(os.environ["SECONDS_OF_STEPS"]))) < 1.0:
        for _ in range(options.steps):
            store.pushpull(keys, grads, out=outs)
        steps += options.steps
    rate = steps / (time.perf_counter() - begun)
    (Path(options.out) / f"{store.rank}.rate").write_text(str(rate))
    store.close()


if __name__ == "__main__":
    main()
