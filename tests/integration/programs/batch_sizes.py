"""Workers of speeds 3, 1 and 2 by a clock that counts examples: the batch sizes that each is advised to take."""

import sys

import torch
from torch.utils.data import DataLoader, TensorDataset

from kvdist import ConfigError, QueueSampler, Trainer, kv
from kvdist.training.batch_sizes import Speed

SPEEDS, EXAMPLES, EVERY = (3.0, 1.0, 2.0), 400, 2


def main(store_name):
    computed_s = 0.0
    data = TensorDataset(torch.arange(1.0, EXAMPLES + 1))
    with kv.create(store_name) as store:
        weight = torch.nn.Parameter(torch.zeros(1))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        trainer._speed = Speed([], lambda: computed_s)
        loader = DataLoader(data, 12, sampler=QueueSampler(EXAMPLES, shuffle=False))
        sizes = []
        for (x,) in trainer.batches(loader):
            sizes.append(len(x))
            weight.grad = None
            (weight * x).mean().backward()
            computed_s += len(x) / SPEEDS[store.rank]
            trainer.step(samples=len(x))
            if store_name == "dist_async":
                try:
                    trainer.advise_batch_size(12)
                except ConfigError as error:
                    print("refused:", error, flush=True)
                    return
            if trainer.version % EVERY == 0:
                loader.batch_sampler.batch_size = trainer.advise_batch_size(12)
        print(f"rank {store.rank} sizes {sizes} version {trainer.version} seen {trainer.samples_seen}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
