"""A worker that trains one network without and with overlap, in turns, and writes down what each step took."""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import kvdist.training.trainer
from kvdist import KVStore, Trainer, kv
from kvdist.training.overlap import Overlap

SIZES = (784, 2048, 2048, 2048, 10)
BATCH = 64
STEPS_PER_TURN = 8
"""The first one of a turn is not counted, nor is the first turn."""


class Side:
    """One network with its trainer and store."""

    def __init__(self, optimizer: str, update: str, overlap: bool) -> None:
        torch.manual_seed(0)
        layers = [(nn.Linear(*sizes), nn.ReLU()) for sizes in itertools.pairwise(SIZES)]
        self.net = nn.Sequential(*[layer for pair in layers for layer in pair][:-1])
        self.store: KVStore = kv.create("dist")
        ways = {"kvstore": self.store, "update_on_kvstore": update == "store", "overlap": overlap}
        self.trainer = Trainer(self.net.parameters(), optimizer, {"learning_rate": 0.01}, **ways)
        self.steps: list[dict[str, float]] = []

    def step(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, float]:
        """One step of training, begun by all workers together; its seconds."""
        self.store.barrier()
        start = time.perf_counter()
        self.net.zero_grad()
        nn.functional.cross_entropy(self.net(x), y).backward()
        passed = time.perf_counter()
        self.trainer.step()
        return {"whole_s": time.perf_counter() - start, "passes_s": passed - start}


def main() -> None:
    optimizer, update, bucket_mib, turns, folder = sys.argv[1:]
    if float(bucket_mib):
        kvdist.training.trainer.Overlap = functools.partial(Overlap, bucket_bytes=int(float(bucket_mib) * (1 << 20)))
    torch.set_num_threads(1)
    sides = [Side(optimizer, update, overlap) for overlap in (False, True)]
    torch.manual_seed(1 + sides[0].store.rank)
    x, y = torch.randn(BATCH, SIZES[0]), torch.randint(0, SIZES[-1], (BATCH,))
    for turn in range(int(turns)):
        for side in sides:
            steps = [side.step(x, y) for _ in range(STEPS_PER_TURN)]
            side.steps += steps[1:] if turn else []
    without, with_ = sides
    if not all(map(torch.equal, without.net.parameters(), with_.net.parameters())):
        sys.exit("the weights with overlap differ from those without")
    seconds = {"without overlap": without.steps, "with overlap": with_.steps}
    Path(folder, f"{without.store.rank}.json").write_text(json.dumps(seconds))
    for side in sides:
        side.store.close()


if __name__ == "__main__":
    main()
