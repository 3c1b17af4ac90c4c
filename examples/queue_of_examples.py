"""Workers that take the next examples when they need them; each is used once per epoch, whoever dies.

    kvdist-launch -n 4 -s 2 --on-loss continue python examples/queue_of_examples.py

Kill workers while it runs (`kill -9`, or SIGTERM): the others use what those have not. It runs alone, too.
"""

import argparse

import torch
from torch.utils.data import DataLoader, TensorDataset

from kvdist import QueueSampler, Trainer, kv

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--examples", type=int, default=2000)


def main() -> None:
    arguments = parser.parse_args()
    torch.manual_seed(0)
    inputs = torch.randn(arguments.examples, 8)
    targets = inputs @ torch.arange(8.0).reshape(8, 1)
    data = TensorDataset(inputs, targets)
    net = torch.nn.Linear(8, 1)

    with kv.create("dist") as store:
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.05}, kvstore=store)
        loader = DataLoader(data, 20, sampler=QueueSampler(len(data), epochs=arguments.epochs))
        used = 0
        for some, wanted in trainer.batches(loader):
            torch.nn.functional.mse_loss(net(some), wanted).backward()
            trainer.step()
            net.zero_grad()
            used += len(some)
        loss = torch.nn.functional.mse_loss(net(inputs), targets)
        print(f"worker {store.rank}: used {used} examples, version {trainer.version}, loss {loss.item():.2g}")


if __name__ == "__main__":
    main()
