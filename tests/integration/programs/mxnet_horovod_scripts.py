"""Scripts as Horovod's pages for MXNet have them, with generated data: mxnet_horovod_scripts.py gluon|older|module

Every rank begins with numbers of its own, and prints the digest of its weights at the end.
"""

from __future__ import annotations

import hashlib
import sys

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon

import kvdist.mxnet as hvd

EXAMPLES, FEATURES, BATCH, EPOCHS = 256, 12, 16, 4


def own_part() -> tuple[np.ndarray, np.ndarray]:
    """This rank's examples: two classes, divided by a plane."""
    numbers = np.random.RandomState(7)
    data = numbers.randn(EXAMPLES, FEATURES).astype(np.float32)
    labels = (data @ numbers.randn(FEATURES) > 0).astype(np.float32)
    return data[hvd.rank() :: hvd.size()], labels[hvd.rank() :: hvd.size()]


def report(weights: dict[str, mx.nd.NDArray], first: float, last: float) -> None:
    joined = b"".join(weights[name].asnumpy().tobytes() for name in sorted(weights))
    print(f"rank {hvd.rank()} of {hvd.size()} digest {hashlib.sha256(joined).hexdigest()}", flush=True)
    print(f"loss {first:.3f} fell {last < 0.7 * first}", flush=True)


def gluon_loop(older: bool) -> None:
    context = mx.cpu(hvd.local_rank())
    data, labels = own_part()
    train_data = mx.io.NDArrayIter(data, labels, BATCH)

    model = gluon.nn.HybridSequential()
    model.add(gluon.nn.Dense(16, activation="relu"), gluon.nn.Dense(2))  # inputs as long as the data says
    model.hybridize()
    opt = mx.optimizer.create("sgd", learning_rate=0.05 * hvd.size(), momentum=0.9)
    params = model.collect_params()
    if not older:  # made before parameters are initialised
        trainer = hvd.DistributedTrainer(params, opt)
    model.initialize(mx.init.Xavier(), ctx=context)
    hvd.broadcast_parameters(params, root_rank=0)
    if older:
        trainer = gluon.Trainer(params, hvd.DistributedOptimizer(opt), kvstore=None)

    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    losses = []
    for _ in range(EPOCHS):
        train_data.reset()
        total = 0.0
        for batch in train_data:
            inputs, targets = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
            with autograd.record():
                loss = loss_fn(model(inputs), targets)
            loss.backward()
            trainer.step(BATCH)
            total += loss.mean().asscalar()
        losses.append(total)
    report({name: value.data() for name, value in params.items()}, losses[0], losses[-1])


def module_fit() -> None:
    data, labels = own_part()
    train_data = mx.io.NDArrayIter(data, labels, BATCH)
    hidden = mx.sym.FullyConnected(mx.sym.var("data"), num_hidden=16, name="hidden")
    hidden = mx.sym.Activation(mx.sym.BatchNorm(hidden, name="normed"), act_type="relu")
    output = mx.sym.SoftmaxOutput(mx.sym.FullyConnected(hidden, num_hidden=2, name="output"), name="softmax")
    model = mx.mod.Module(output, context=mx.cpu(hvd.local_rank()))

    optimizer_params = {"learning_rate": 0.05 * hvd.size(), "momentum": 0.9, "rescale_grad": 1.0 / BATCH}
    opt = hvd.DistributedOptimizer(mx.optimizer.create("sgd", **optimizer_params))
    model.bind(data_shapes=train_data.provide_data, label_shapes=train_data.provide_label)
    model.init_params(mx.init.Xavier(rnd_type="gaussian", factor_type="in", magnitude=2))
    arg_params, aux_params = model.get_params()
    if arg_params:
        hvd.broadcast_parameters(arg_params, root_rank=0)
    if aux_params:
        hvd.broadcast_parameters(aux_params, root_rank=0)
    model.set_params(arg_params=arg_params, aux_params=aux_params)

    losses = []
    metric = mx.metric.CrossEntropy()
    model.fit(
        train_data,
        eval_metric=metric,
        kvstore=None,
        optimizer=opt,
        num_epoch=EPOCHS,
        epoch_end_callback=lambda *_: losses.append(metric.get()[1]),
    )
    report(model.get_params()[0], losses[0], losses[-1])


if __name__ == "__main__":
    hvd.init()
    mx.random.seed(hvd.rank())
    np.random.seed(hvd.rank())
    script = sys.argv[1]
    if script == "module":
        module_fit()
    else:
        gluon_loop(script == "older")
