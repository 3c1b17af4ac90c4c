"""A worker of a given speed that learns the digits from a queue for some seconds, and says how much was made.

python unequal_worker.py FOLDER UNIT_S SECONDS SPEED...
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from kvdist import QueueSampler, Trainer, kv

BATCH = 16
EPOCHS = 10_000


def main() -> None:
    folder, unit_s, seconds, *speeds = Path(sys.argv[1]), *map(float, sys.argv[2:])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    digits = load_digits()
    data = TensorDataset(torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with kv.create("dist") as store:
        trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1}, kvstore=store)
        sampler = QueueSampler(len(digits.target), epochs=EPOCHS)
        computed, began = 0.0, 0.0
        looks: list[tuple[float, int, int]] = []
        """When there was a new version, which one, and of how many examples in all."""
        for inputs, targets in trainer.batches(DataLoader(data, BATCH, sampler=sampler)):
            if not began:
                store.barrier()
                began, end = time.monotonic(), time.monotonic() + seconds
            if not looks or trainer.version > looks[-1][1]:
                looks.append((time.monotonic(), trainer.version, trainer.samples_seen))
            if time.monotonic() >= end:
                break
            due = time.monotonic() + unit_s / speeds[store.rank]
            net.zero_grad()
            cross_entropy(net(inputs), targets).backward()
            time.sleep(max(0.0, due - time.monotonic()))
            computed += unit_s / speeds[store.rank]
            trainer.step(samples=len(inputs))
        took = time.monotonic() - began
        first, last = looks[1], looks[-1]  # from version to version, as examples count when one is complete
        found = {
            "examples_per_s": (last[2] - first[2]) / (last[0] - first[0]),
            "versions_per_s": (last[1] - first[1]) / (last[0] - first[0]),
            "busy": computed / took,
        }
        (folder / f"{store.rank}.json").write_text(json.dumps(found))
        trainer.exchange()


if __name__ == "__main__":
    main()
