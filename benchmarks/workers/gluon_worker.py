"""One worker of MXNet whose Trainer does the common work, on MXNet's servers or, run by the bridge, on kvdist's.

A step of the benchmark is one of the Trainer, until all weights can be read. Runs in an environment of MXNet.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from workload import LEARNING_RATE, MOMENTUM, measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    store = mx.kv.create(options.store)
    params = [mx.gluon.Parameter(f"p{i}", shape=(size,)) for i, size in enumerate(options.spec.sizes)]
    for param in params:
        param.initialize(init="zeros")
    numbers = {
        "learning_rate": LEARNING_RATE,
        "wd": 0,
        **({"momentum": MOMENTUM} if options.optimizer == "sgd" else {}),
    }
    trainer = mx.gluon.Trainer(params, options.optimizer, numbers, kvstore=store)

    def prepare() -> None:
        for param in params:
            param.grad()[:] = store.rank + 1
        mx.nd.waitall()

    def exchange() -> None:
        trainer.step(1, ignore_stale_grad=True)
        mx.nd.waitall()

    def results() -> list[np.ndarray]:
        return [param.data().asnumpy() for param in params]

    measure(options, store.rank, store.num_workers, prepare, store._barrier, exchange, results)
    store._barrier()


if __name__ == "__main__":
    main()
