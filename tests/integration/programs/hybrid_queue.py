"""One worker of a ``hybrid`` store saves within its data, and goes on: ``hybrid_queue.py FOLDER``."""

import sys

import torch
from torch.utils.data import DataLoader

from kvdist import QueueSampler, Trainer, kv

LENGTH = 64


def train(folder, has_table, has_rest, loads):
    """Use 24 examples and save, or load and use the others."""
    with kv.create("hybrid") as store:
        table = torch.nn.Embedding(LENGTH, 2, sparse=True)
        rest = torch.nn.Linear(2, 1)
        parameters = [*table.parameters()] * has_table + [*rest.parameters()] * has_rest
        trainer = Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=store)

        def backward(batch):
            for parameter in parameters:
                parameter.grad = None
            rest(table(batch) if has_table else torch.ones(len(batch), 2)).sum().backward()

        backward(torch.arange(2))  # which tells the trainer whose gradients are sparse
        trainer.broadcast_parameters()
        if loads:
            trainer.load_checkpoint(folder)
        handed = []
        for batch in trainer.batches(DataLoader(range(LENGTH), 8, sampler=QueueSampler(LENGTH, seed=1))):
            handed += batch.tolist()
            backward(batch)
            trainer.step()
            if not loads and trainer.version == 3:
                break
        if not loads:
            trainer.save_checkpoint(folder, 1).result()
        return handed, trainer.samples_seen, repr(store).rpartition(", ")[2]


with kv.create("dist"):  # which keeps the process in the cluster
    for number, sides in enumerate([(True, False), (False, True), (True, True)]):
        folder = f"{sys.argv[1]}/{number}"
        (first, *_), (second, samples, holds) = train(folder, *sides, False), train(folder, *sides, True)
        print(holds, "|", len(first), len(second), len({*first, *second}), samples, flush=True)
