"""The digits, learned by workers that may be killed at any time and come back.

    kvdist-launch -n 4 -s 2 --on-loss continue --restart 100 python examples/digits_survive.py

The servers hold the weights and go on with the workers that are there. A worker that is started again runs this script
from its first line: it finds the weights that the others have, and takes part from their next step on.
"""

import argparse
import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from kvdist import Trainer, kv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=30, help="how often all workers together see the images")
parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
parser.add_argument("--lr", type=float, default=0.003)
args = parser.parse_args()

torch.set_num_threads(1)
torch.manual_seed(0)
store, progress = kv.create("dist"), kv.create("dist")

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(images)) % 5 == 0
train_images, train_labels = images[~is_test], labels[~is_test]

net = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(16 * 4 * 4, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)
trainer = Trainer(net.parameters(), "adam", {"learning_rate": args.lr}, kvstore=store)

# How many batches all workers together have learned from. The servers count them, so that whoever comes back sees how
# far the others are, and all end in the same step.
progress.set_optimizer("sgd", learning_rate=1.0)
progress.init("batches", torch.zeros(1))
done = progress.pull("batches")
total = args.epochs * len(train_images) // args.batch_size

life = int(os.environ.get("KVDIST_RESTARTS", "0"))
print(f"worker {store.rank} of {store.num_workers} begins at batch {int(done)} of {total}", flush=True)
chance = torch.Generator().manual_seed(1000 * life + store.rank)
while done < total:
    chosen = torch.randint(len(train_images), (args.batch_size,), generator=chance)
    net.zero_grad()
    cross_entropy(net(train_images[chosen]), train_labels[chosen]).backward()
    trainer.step()  # averages over the workers that are there
    progress.pushpull("batches", -torch.ones(1), out=done)
    if store.rank == min(store.members) and int(done) % 500 < len(store.members):
        print(f"batch {int(done)} of {total}, {len(store.members)} workers", flush=True)

with torch.no_grad():
    right = net(images[is_test]).argmax(dim=1) == labels[is_test]
print(f"Test_acc {float(right.float().mean()):.6f}", flush=True)
store.close()
