"""One worker of kvdist at the common work."""

from __future__ import annotations

import os

import numpy as np
from workload import LEARNING_RATE, MOMENTUM, measure, parse_arguments

from kvdist import kv


def main() -> None:
    options = parse_arguments()
    store = kv.create(options.store)
    is_collective = options.store == "collective"
    spec = options.spec
    keys = list(range(spec.count))
    make = np.empty if options.store_arrays == "plain" else store.empty
    grads = [make((size,), np.float32) for size in spec.sizes]
    outs = [make((size,), np.float32) for size in spec.sizes]
    if options.optimizer != "none":
        momentum = {"momentum": MOMENTUM} if options.optimizer == "sgd" else {}
        store.set_optimizer(options.optimizer, learning_rate=LEARNING_RATE, wd=0.0, **momentum)
    if is_collective:
        share_cores(store.num_workers)
        store.leave_unkept(keys)  # as a Trainer does
        outs = grads
    store.init(keys, [np.zeros(size, np.float32) for size in spec.sizes])

    def prepare() -> None:
        for grad in grads:
            grad[:] = store.rank + 1

    results = outs

    def exchange() -> None:
        nonlocal results
        if is_collective:
            store.pushpull(keys, grads)
        elif options.store_arrays == "shared":
            shown = store.pushpull_shared(keys, grads, outs)
            results = [out if one is None else one for one, out in zip(shown, outs, strict=True)]
        elif options.call == "pushpull":
            store.pushpull(keys, grads, out=outs)
        elif options.call == "push_pull":
            store.push(keys, grads)
            store.pull(keys, out=outs)
        else:
            for key in keys:
                store.push(key, grads[key])
            for future in [store.pull_async(key, out=outs[key]) for key in keys]:
                future.result()

    measure(options, store.rank, store.num_workers, prepare, store.barrier, exchange, lambda: results)
    store.close()


def share_cores(workers: int) -> None:
    """Use as many threads as torch's workers under comparison do."""
    import torch

    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


if __name__ == "__main__":
    main()
