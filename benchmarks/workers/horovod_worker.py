"""One worker of Horovod on MXNet arrays, over gloo, at the common work. Runs in Horovod's own environment."""

from __future__ import annotations

import horovod.mxnet as hvd
import mxnet as mx
import numpy as np
from workload import measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    hvd.init()
    grads = [mx.nd.zeros((size,)) for size in options.spec.sizes]
    nothing = mx.nd.zeros((1,))

    def prepare() -> None:
        for grad in grads:
            grad[:] = hvd.rank() + 1
        mx.nd.waitall()

    def exchange() -> None:
        # As its DistributedTrainer does it: one call a tensor, by name, the first layers first.
        for index, grad in enumerate(grads):
            hvd.allreduce_(grad, average=False, name=str(index), priority=-index)
        for grad in grads:
            grad.wait_to_read()

    def barrier() -> None:
        hvd.allreduce_(nothing, name="barrier")
        nothing.wait_to_read()

    def results() -> list[np.ndarray]:
        return [grad.asnumpy() for grad in grads]

    measure(options, hvd.rank(), hvd.size(), prepare, barrier, exchange, results)
    hvd.shutdown()


if __name__ == "__main__":
    main()
