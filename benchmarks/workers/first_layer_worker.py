"""One worker that sends gradients as a backward pass has them, the last layer first, and waits for the weights as a
forward pass needs them. Runs in kvdist's environment and in MXNet's.

    first_layer_worker.py SYSTEM SPEC STEPS BACKWARD_S FOLDER

The backward pass is a wait of so many seconds, the same for each parameter. Every call has the priority that Gluon's
Trainer gives it, minus the index of the parameter. A list for each step goes to the folder: how long after the backward
pass each parameter's weights were in, where the parameters are awaited in their order.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from workload import Spec, check

WARMUP = 1


def main() -> None:
    system, text, steps, backward_s, folder = sys.argv[1:]
    spec = Spec.parse(text)
    rank, num_workers, prepare, barrier, send, results = (with_mxnet if system == "mxnet" else with_kvdist)(spec)
    seconds = []
    for step in range(WARMUP + int(steps)):
        prepare()
        barrier()
        start = time.perf_counter()
        waits = []
        for done, key in enumerate(reversed(range(spec.count)), start=1):
            time.sleep(max(0.0, start + float(backward_s) * done / spec.count - time.perf_counter()))
            waits.append(send(key))
        end = start + float(backward_s)
        own = []
        for wait in reversed(waits):
            wait()
            own.append(time.perf_counter() - end)
        seconds.append(own)
        barrier()
        check(results(), [num_workers * (num_workers + 1) / 2], step)
    Path(folder, f"{rank}.json").write_text(json.dumps(seconds[WARMUP:]))


Call = Callable[[], Any]
Parts = tuple[int, int, Call, Call, Callable[[int], Call], Call]
"""Rank, workers; what writes gradients; the barrier; what sends a key and returns how to wait for it; the results."""


def with_kvdist(spec: Spec) -> Parts:
    """A store of kvdist, with arrays that servers of this host read where they lie."""
    from kvdist import kv

    store = kv.create("dist")
    grads = [store.empty((size,), np.float32) for size in spec.sizes]
    outs = [store.empty((size,), np.float32) for size in spec.sizes]

    def prepare() -> None:
        for grad in grads:
            grad[:] = store.rank + 1

    store.init(list(range(spec.count)), [np.zeros(size, np.float32) for size in spec.sizes])

    def send(key: int) -> Call:
        return store.pushpull_async(key, grads[key], outs[key], priority=-key).result

    return store.rank, store.num_workers, prepare, store.barrier, send, lambda: outs


def with_mxnet(spec: Spec) -> Parts:
    """The same of MXNet."""
    import mxnet as mx

    store = mx.kv.create("dist_sync")
    grads = [mx.nd.zeros((size,)) for size in spec.sizes]
    outs = [mx.nd.zeros((size,)) for size in spec.sizes]
    for key, size in enumerate(spec.sizes):
        store.init(key, mx.nd.zeros((size,)))

    def prepare() -> None:
        for grad in grads:  # a pull writes into what was pushed
            grad[:] = store.rank + 1
        mx.nd.waitall()

    def send(key: int) -> Call:
        store.pushpull(key, grads[key], out=outs[key], priority=-key)
        return outs[key].wait_to_read

    return store.rank, store.num_workers, prepare, store._barrier, send, lambda: [out.asnumpy() for out in outs]


if __name__ == "__main__":
    main()
