"""Workers that make steps until a file is there, of which one sleeps six times as long: ``sleeping.py FILE RANK``."""

import os
import sys
import time

import torch

from kvdist import Trainer, kv


def main(file, rank):
    with kv.create("dist") as store:
        weight = torch.nn.Parameter(torch.zeros(1))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store)
        while not store.average(float(os.path.exists(file))):
            time.sleep(0.3 if store.rank == int(rank) else 0.05)
            weight.grad = torch.ones(1)
            trainer.step()


if __name__ == "__main__":
    main(*sys.argv[1:])
