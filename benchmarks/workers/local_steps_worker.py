"""A worker whose computing is a time asleep, with a model of 30 M parameters: how much of the time it computes.

python local_steps_worker.py FOLDER UNIT_S STEPS [PUSHED:PULLED]
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch

from kvdist import Trainer, kv

WIDTH, LAYERS, WORDS = 512, 8, 9_000
"""Of a GPT: 8 layers of 12 WIDTH² parameters, and the words."""
PERIODS = 3
"""The first of which is not timed."""
ALONE = 20
"""So many steps are made before the first exchange begins, of 4 fragments or fewer: a step of these is what computing
takes."""


def main() -> None:
    folder, unit_s, steps = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    pushed, _, pulled = (sys.argv[4] if len(sys.argv) > 4 else "").partition(":")
    compression = ({"type": pushed} | ({"pull": pulled} if pulled else {})) if pushed else None
    torch.set_num_threads(1)
    shapes = [(WORDS, WIDTH), *[(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)] * LAYERS]
    weights = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    with kv.create("dist") as store:
        optimizer = torch.optim.SGD(weights, lr=0.01)
        trainer = Trainer(weights, optimizer, kvstore=store, compression_params=compression)
        times = []
        for step in range(PERIODS * steps):
            times.append(time.monotonic())
            for weight in weights:
                weight.grad = torch.full_like(weight, 1.0 / (step + 1 + store.rank))
            time.sleep(unit_s)
            trainer.step()
        took = time.monotonic() - times[steps]
        trainer.exchange()
        alone_s = statistics.median(end - begin for begin, end in pairwise(times[1:ALONE]))
        found = {"share": (PERIODS - 1) * steps * alone_s / took, "step_s": alone_s}
        (folder / f"{store.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
