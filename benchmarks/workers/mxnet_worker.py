"""One worker of MXNet's parameter server at the common work. Runs in MXNet's own environment."""

from __future__ import annotations

import mxnet as mx
import numpy as np
from workload import LEARNING_RATE, MOMENTUM, measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    store = mx.kv.create(options.store)
    spec = options.spec
    keys = list(range(spec.count))
    grads = [mx.nd.zeros((size,)) for size in spec.sizes]
    outs = [mx.nd.zeros((size,)) for size in spec.sizes]
    if options.optimizer != "none":
        momentum = {"momentum": MOMENTUM} if options.optimizer == "sgd" else {}
        store.set_optimizer(mx.optimizer.create(options.optimizer, learning_rate=LEARNING_RATE, wd=0, **momentum))
    store.init(keys, [mx.nd.zeros((size,)) for size in spec.sizes])

    def prepare() -> None:
        # A pull writes into what was pushed, where one device pushed it: without this the next step would push sums.
        for grad in grads:
            grad[:] = store.rank + 1
        mx.nd.waitall()

    def exchange() -> None:
        if options.call == "pushpull":
            store.pushpull(keys, grads, out=outs)
        elif options.call == "push_pull":
            store.push(keys, grads)
            store.pull(keys, out=outs)
        else:  # neither call waits: its engine runs them side by side, in order for each key
            for key in keys:
                store.push(key, grads[key])
            for key in keys:
                store.pull(key, out=outs[key])
        for out in outs:
            out.wait_to_read()

    def results() -> list[np.ndarray]:
        return [out.asnumpy() for out in outs]

    measure(options, store.rank, store.num_workers, prepare, store._barrier, exchange, results)
    store._barrier()


if __name__ == "__main__":
    main()
