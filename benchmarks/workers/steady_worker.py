"""A worker that pushes and pulls until it is stopped, and tells its driver by a pipe how it starts and ends."""

from __future__ import annotations

import json
import os
import sys
import time

import numpy as np
from workload import LEARNING_RATE, MOMENTUM, Spec

from kvdist import kv

STEPS_BEFORE_READY = 10


def main() -> None:
    pipe, spec, optimizer = sys.argv[1], Spec.parse(sys.argv[2]), sys.argv[3]
    store = kv.create("dist")
    keys = list(range(spec.count))
    grads = [np.ones(size, np.float32) for size in spec.sizes]
    outs = [np.empty(size, np.float32) for size in spec.sizes]
    if optimizer != "none":
        momentum = {"momentum": MOMENTUM} if optimizer == "sgd" else {}
        store.set_optimizer(optimizer, learning_rate=LEARNING_RATE, **momentum)
    store.init(keys, [np.zeros(size, np.float32) for size in spec.sizes])
    step = 0
    try:
        while True:
            store.pushpull(keys, grads, out=outs)
            step += 1
            if step == STEPS_BEFORE_READY:
                tell(pipe, event="ready", rank=store.rank)
    except Exception as error:
        tell(pipe, event="raised", rank=store.rank, kind=type(error).__name__, message=str(error))
        raise


def tell(pipe: str, **fields: object) -> None:
    """One line to the driver, whole, since it is shorter than what a pipe takes at once. The clock is the machine's."""
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **fields})[:4000] + "\n"
    descriptor = os.open(pipe, os.O_WRONLY)
    try:
        os.write(descriptor, line.encode())
    finally:
        os.close(descriptor)


if __name__ == "__main__":
    main()
