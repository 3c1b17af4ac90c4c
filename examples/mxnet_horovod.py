"""A script of Horovod's for MXNet, with one import changed: a network of Gluon learns handwritten digits.

In MXNet's environment, which examples/mxnet_bridge/environment.sh makes, with two workers and a server, or alone:

    kvdist-launch -n 2 -s 1 python examples/mxnet_horovod.py
    python examples/mxnet_horovod.py

The data comes with scikit-learn: 1,797 images of 8 × 8 pixels. Every fifth is for testing. Each rank trains on its part
of the others, and all of them test the same weights.
"""

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from sklearn.datasets import load_digits

import kvdist.mxnet as hvd  # was: import horovod.mxnet as hvd

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=32, help="images per step of each rank")
parser.add_argument("--lr", type=float, default=0.05, help="for one rank; scaled by their number")
args = parser.parse_args()

hvd.init()
context = mx.cpu(hvd.local_rank())
mx.random.seed(hvd.rank())
print(f"rank {hvd.rank()} of {hvd.size()}", flush=True)

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.float32)
is_test = np.arange(len(images)) % 5 == 0
own = np.flatnonzero(~is_test)
own = own[: len(own) // hvd.size() * hvd.size()][hvd.rank() :: hvd.size()]
train_data = mx.io.NDArrayIter(images[own], labels[own], args.batch_size, shuffle=True, last_batch_handle="discard")

model = gluon.nn.HybridSequential()
model.add(gluon.nn.Dense(64, activation="relu"), gluon.nn.Dense(10))
model.hybridize()
params = model.collect_params()
opt = mx.optimizer.create("sgd", learning_rate=args.lr * hvd.size(), momentum=0.9)
trainer = hvd.DistributedTrainer(params, opt)
model.initialize(mx.init.Xavier(), ctx=context)
hvd.broadcast_parameters(params, root_rank=0)  # as soon as the first batch has told their shapes
loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    train_data.reset()
    for batch in train_data:
        data, label = batch.data[0].as_in_context(context), batch.label[0].as_in_context(context)
        with autograd.record():
            loss = loss_fn(model(data), label)
        loss.backward()
        trainer.step(args.batch_size)
    guesses = model(mx.nd.array(images[is_test], ctx=context)).argmax(axis=1).asnumpy()
    print(f"Epoch {epoch}: Test_acc {(guesses == labels[is_test]).mean():.6f}", flush=True)
