"""The work on tables of rows that every system under comparison does, said once. Runs in either one's environment.

A step is one push of random rows and one pull of the same rows; the clock runs from the first call until the rows can
be read. The optimizer is AdaGrad on the server, the table starts as zeros, and the gradients are ones: so every row
that was pushed for the first time is minus the learning rate afterwards, and that is looked at.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import numpy as np

LEARNING_RATE = 0.05
TOLERANCE = 1e-3
SEED = 7


def parse_arguments() -> argparse.Namespace:
    """The arguments that the driver gives to every worker."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, required=True, help="of the table")
    parser.add_argument("--dim", type=int, required=True, help="elements of a row")
    parser.add_argument("--pushed", type=int, required=True, help="random rows of each step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--whole", action="store_true", help="the table is given, not declared")
    parser.add_argument("--dense", action="store_true", help="all rows, as an array")
    parser.add_argument("--out", required=True, help="directory for this worker's result")
    return parser.parse_args()


def measure(
    options: argparse.Namespace,
    rank: int,
    barrier: Callable[[], None],
    exchange: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> None:
    """Run the steps and write their seconds to ``<out>/<rank>.json``.

    Args:
        options: of the command line.
        rank: this worker's.
        barrier: returns when all workers are there.
        exchange: pushes rows (ids ascending, values) and returns those rows as they are afterwards.
    """
    random = np.random.default_rng(SEED + rank)
    gradients = np.ones((options.pushed, options.dim), np.float32)
    seconds = []
    for step in range(options.warmup + options.steps):
        if options.pushed == options.rows:
            ids = np.arange(options.rows)
        else:
            ids = np.unique(random.integers(0, options.rows, options.pushed))
        barrier()
        start = time.perf_counter()
        pulled = exchange(ids, gradients[: len(ids)])
        seconds.append(time.perf_counter() - start)
        if step == 0 and not np.allclose(pulled, -LEARNING_RATE, atol=TOLERANCE):
            raise SystemExit(f"{pulled[:2]} came back, {-LEARNING_RATE} was due")
        barrier()  # what follows takes cores, and the others may still be measuring
    with open(os.path.join(options.out, f"{rank}.json"), "w", encoding="utf-8") as file:
        json.dump(seconds[options.warmup :], file)
