"""A convolutional network learns handwritten digits on several workers; the servers hold the weights and run Adam.

    kvdist-launch -n 2 -s 2 python examples/digits.py

Without a launcher it runs alone, as a cluster of one: ``python examples/digits.py``. The data is real and comes with
scikit-learn: 1,797 images of 8 × 8 pixels. Every worker trains on its part of the images and then tests the same
weights on the same held-out images, so all of them print the same accuracy.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kvdist import SplitSampler, Trainer, kv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=25)
parser.add_argument("--batch-size", type=int, default=16, help="images per worker and step")
parser.add_argument("--lr", type=float, default=0.005)
parser.add_argument("--store", default="dist", help="the type of the store, such as dist or dist_async")
args = parser.parse_args()

# The workers of one machine share its cores: more threads than that would only get in each other's way.
torch.set_num_threads(1)
# The order of the images and the first weights are the same in every run.
torch.manual_seed(0)

# Step 1: a store on the cluster that this process was started in.
store = kv.create(args.store)
print(f"worker {store.rank} of {store.num_workers}", flush=True)

# The data: every fifth image is for testing, the others are for training.
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
labels = torch.tensor(digits.target)
is_test = torch.arange(len(images)) % 5 == 0
train = TensorDataset(images[~is_test], labels[~is_test])
test_images, test_labels = images[is_test], labels[is_test]

# Step 2: each worker trains on its own part of the training data.
sampler = SplitSampler(len(train), store.num_workers, store.rank, seed=0)
loader = DataLoader(train, args.batch_size, sampler=sampler)

net = nn.Sequential(
    nn.Conv2d(1, 16, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.Conv2d(16, 32, kernel_size=3, padding=1),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(32 * 4 * 4, 64),
    nn.ReLU(),
    nn.Linear(64, 10),
)

# Step 3: the trainer hands gradients to the store, whose servers update the weights.
trainer = Trainer(net.parameters(), "adam", {"learning_rate": args.lr}, kvstore=store)


def accuracy() -> float:
    """The share of the held-out images that the network names right."""
    net.eval()
    with torch.no_grad():
        right = net(test_images).argmax(dim=1) == test_labels
    return float(right.float().mean())


for epoch in range(args.epochs):
    # Later epochs take smaller steps. The servers learn of it with the next gradients.
    trainer.set_learning_rate(args.lr * (1 - epoch / args.epochs))
    net.train()
    for batch, target in loader:
        net.zero_grad()
        cross_entropy(net(batch), target).backward()
        trainer.step()  # averages the gradients over the workers
    print(f"Epoch {epoch}: Test_acc {accuracy():.6f}", flush=True)

store.close()
