"""One worker whose DistributedTrainer on MXNet's arrays does the common work: Horovod's, or that of `kvdist.mxnet`.

A step of the benchmark is one of the Trainer, until all weights can be read. Runs in an environment of MXNet.
"""

from __future__ import annotations

import mxnet as mx
import numpy as np
from workload import LEARNING_RATE, MOMENTUM, measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    if options.system == "horovod-trainer":
        import horovod.mxnet as hvd
    else:
        import kvdist.mxnet as hvd
    hvd.init()
    params = [mx.gluon.Parameter(f"p{i}", shape=(size,)) for i, size in enumerate(options.spec.sizes)]
    for param in params:
        param.initialize(init="zeros")
    numbers = {
        "learning_rate": LEARNING_RATE,
        "wd": 0,
        **({"momentum": MOMENTUM} if options.optimizer == "sgd" else {}),
    }
    trainer = hvd.DistributedTrainer({param.name: param for param in params}, options.optimizer, numbers)
    nothing = mx.nd.zeros((1,))

    def prepare() -> None:
        with mx.autograd.record():
            outputs = [param.data() * (hvd.rank() + 1) for param in params]
        mx.autograd.backward(outputs)  # a Trainer updates by gradients of a backward pass alone
        mx.nd.waitall()

    def exchange() -> None:
        trainer.step(1 / hvd.size())  # the sum of all gradients, as in the other systems
        mx.nd.waitall()

    def barrier() -> None:
        hvd.allreduce_(nothing, name="barrier")
        nothing.wait_to_read()

    def results() -> list[np.ndarray]:
        return [param.data().asnumpy() for param in params]

    measure(options, hvd.rank(), hvd.size(), prepare, barrier, exchange, results)
    hvd.shutdown()


if __name__ == "__main__":
    main()
