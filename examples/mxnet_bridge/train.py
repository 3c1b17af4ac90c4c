"""A Gluon script that knows nothing of kvdist: a network with one hidden layer learns handwritten digits.

On MXNet's own store, in one process, and on kvdist's servers, with two workers:

    python examples/mxnet_bridge/train.py --kvstore local
    kvdist-launch -n 2 -s 2 python examples/mxnet_bridge/run.py examples/mxnet_bridge/train.py --kvstore kvdist

The data comes with scikit-learn: 1,797 images of 8 × 8 pixels. Every fifth is for testing. Each worker trains on its
part of the others, and all of them test the same weights.
"""

import argparse

import mxnet as mx
import numpy as np
from mxnet import autograd, gluon
from mxnet.gluon import nn
from sklearn.datasets import load_digits

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--kvstore", default="local", help="the name of the store")
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=64, help="images per step, of all workers together")
parser.add_argument("--optimizer", default="adam")
parser.add_argument("--lr", type=float, default=0.02)
args = parser.parse_args()

mx.random.seed(0)
np.random.seed(0)
store = mx.kv.create(args.kvstore)
print(f"worker {store.rank} of {store.num_workers} on {store.type}", flush=True)

digits = load_digits()
images = (digits.data / 16).astype(np.float32)
labels = digits.target.astype(np.float32)
is_test = np.arange(len(images)) % 5 == 0
own = np.flatnonzero(~is_test)
own = own[: len(own) // store.num_workers * store.num_workers][store.rank :: store.num_workers]
loader = gluon.data.DataLoader(
    gluon.data.ArrayDataset(images[own], labels[own]),
    batch_size=args.batch_size // store.num_workers,
    shuffle=True,
    last_batch="discard",
)

net = nn.HybridSequential()
net.add(nn.Dense(64, activation="relu"), nn.Dense(10))
net.initialize(mx.init.Xavier())
net.hybridize()
net(mx.nd.array(images[:1]))  # tells the layers how long their inputs are

schedule = mx.lr_scheduler.CosineScheduler(args.epochs * len(loader), base_lr=args.lr, final_lr=args.lr / 100)
optimizer = mx.optimizer.create(args.optimizer, learning_rate=args.lr, lr_scheduler=schedule)
trainer = gluon.Trainer(net.collect_params(), optimizer, kvstore=store)
loss_of = gluon.loss.SoftmaxCrossEntropyLoss()

for epoch in range(args.epochs):
    for batch, target in loader:
        with autograd.record():
            loss = loss_of(net(batch), target)
        loss.backward()
        trainer.step(args.batch_size)
    right = net(mx.nd.array(images[is_test])).argmax(axis=1).asnumpy() == labels[is_test]
    print(f"Epoch {epoch}: Test_acc {right.mean():.6f}", flush=True)
