"""A paced worker of a job in which something is wrong from some step on, and when each of its steps was.

python verdict_worker.py FOLDER UNIT_S STEPS STEP KIND

It is wrong with the last worker, from step STEP on: `compute` (2.5 times as slow), `data` (each batch comes 0.45 s
late), or `pause` (stopped for 2 s in that step). A `line` or a `server` is made slow by who starts the job; the workers
of these have more to send, and the servers the rule of `sleeping_rule.py`. Nothing is wrong with any other KIND.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import sleeping_rule  # noqa: F401  # registers its rule
import torch
from torch.utils.data import DataLoader, Dataset

from kvdist import SplitSampler, Trainer, kv

BATCH, SLOWNESS, DATA_S, PAUSE_S, JITTER = 8, 2.5, 0.45, 2, 0.1
ELEMENTS = {"line": 250_000}


class Examples(Dataset[torch.Tensor]):
    """Nothing to learn; with a delay for each, if that is set."""

    def __init__(self, length: int) -> None:
        self._length = length
        self.delay_s = 0.0

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.delay_s)
        return torch.zeros(1)


def stand_still() -> None:
    """Stop this process; another one lets it go on."""
    subprocess.Popen(["sh", "-c", f"sleep {PAUSE_S}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


def main() -> None:
    folder, unit_s, steps, since, kind = Path(sys.argv[1]), float(sys.argv[2]), *map(int, sys.argv[3:5]), sys.argv[5]
    torch.set_num_threads(1)
    weights = [torch.nn.Parameter(torch.zeros(ELEMENTS.get(kind, 1000) // 4)) for _ in range(4)]
    with kv.create("dist") as store:
        is_it, chance = store.rank == store.num_workers - 1, random.Random(store.rank)
        examples = Examples(BATCH * steps * store.num_workers)
        sampler = SplitSampler(len(examples), store.num_workers, store.rank)
        trainer = Trainer(weights, "sleeping" if kind == "server" else "sgd", {"learning_rate": 0.1}, kvstore=store)
        made: list[float] = []
        for step, _ in enumerate(trainer.batches(DataLoader(examples, BATCH, sampler=sampler))):
            is_wrong = is_it and step >= since
            examples.delay_s = DATA_S / BATCH if is_wrong and kind == "data" else 0.0
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            slowness = SLOWNESS if is_wrong and kind == "compute" else 1.0
            time.sleep(unit_s * slowness * chance.uniform(1 - JITTER, 1 + JITTER))
            if is_it and step == since and kind == "pause":
                stand_still()
            trainer.step()
            made.append(time.monotonic())
        (folder / f"{store.rank}.json").write_text(json.dumps(made))


if __name__ == "__main__":
    main()
