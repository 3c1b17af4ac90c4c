"""A network learns handwritten digits on several devices of each worker, with the data of digits.py.

    python examples/digits_devices.py --devices cuda:0,cuda:1
    kvdist-launch -n 2 -s 2 python examples/digits_devices.py --store dist_device_sync --devices cuda:0,cuda:1

The first line is one process with two GPUs, the second are two workers with two GPUs each. ``--devices cpu,cpu`` shows
the same where there is no GPU. All workers and devices end with the same weights, so all workers print the same.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kvdist import SplitSampler, Trainer, kv, replicate, split_and_load

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=15)
parser.add_argument("--batch-size", type=int, default=32, help="images per worker and step, on all its devices")
parser.add_argument("--lr", type=float, default=0.01)
parser.add_argument("--store", default="device", help="device within one process; dist_device_sync with a launcher")
parser.add_argument("--devices", default="cuda:0" if torch.cuda.is_available() else "cpu,cpu")
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
store = kv.create(args.store)

# The data: every fifth image is for testing, the others are for training.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(images)) % 5 == 0
train = TensorDataset(images[~is_test], labels[~is_test])
sampler = SplitSampler(len(train), store.num_workers, store.rank, seed=0)
loader = DataLoader(train, args.batch_size, sampler=sampler, drop_last=True)

# One replica of the network on each device. The trainer sums over devices and workers, and keeps all the same.
devices = args.devices.split(",")
nets = replicate(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)), devices)
trainer = Trainer(nets.parameters(), "adam", {"learning_rate": args.lr}, kvstore=store)

for epoch in range(args.epochs):
    for batch, target in loader:
        parts = zip(nets, split_and_load(batch, devices), split_and_load(target, devices), strict=True)
        nets.zero_grad()
        losses = [cross_entropy(net(x), y, reduction="sum") for net, x, y in parts]
        for loss in losses:  # all forward passes are under way on their devices by now
            loss.backward()
        trainer.step(len(batch))
    with torch.no_grad():
        # Of the last replica: it has learned from the others' images only through the store.
        right = nets[-1](images[is_test].to(devices[-1])).argmax(dim=1).cpu() == labels[is_test]
    print(f"Epoch {epoch}: Test_acc {float(right.float().mean()):.6f}", flush=True)

store.close()
