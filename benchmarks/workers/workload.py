"""The work that every store under comparison does, said once. Runs in kvdist's environment and in its peers'.

A step is one push of all keys and one pull of the results, or one all-reduce of them; the clock runs from the first
call until every result can be read. Workers start each step together. Every element that worker r pushes is r + 1, so
every element that comes back is known: a step whose sum is wrong ends the benchmark, since a wrong number has no speed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

LEARNING_RATE = 0.01
MOMENTUM = 0.9
TOLERANCE = 1e-4
CHECKED_ELEMENTS = 64
"""How many elements of each array are compared, spread over it; all of them would be the larger part of the run."""


CALLS = ("pushpull", "push_pull", "per_key")
"""One list call; two of them; or a Python loop that pushes key by key and one that pulls key by key."""


@dataclass(frozen=True)
class Spec:
    """The float32 arrays that travel, and what they are called in tables.

    Written ``25x1048576`` (COUNTxELEMENTS), or ``name=1x9408+53x64`` for arrays of different sizes, in their order.
    """

    name: str
    sizes: tuple[int, ...]

    @classmethod
    def parse(cls, text: str) -> Spec:
        name, _, runs = text.rpartition("=")
        sizes: list[int] = []
        for run in runs.split("+"):
            count, _, size = run.partition("x")
            if not (count.isdigit() and size.isdigit()):
                raise argparse.ArgumentTypeError(f"{run!r} is not COUNTxELEMENTS, such as 25x1048576")
            sizes += [int(size)] * int(count)
        return cls(name or runs, tuple(sizes))

    @property
    def text(self) -> str:
        """What `parse` reads."""
        runs = "+".join(f"{len(list(same))}x{size}" for size, same in itertools.groupby(self.sizes))
        return runs if runs == self.name else f"{self.name}={runs}"

    def __str__(self) -> str:
        return self.name

    @property
    def count(self) -> int:
        """How many arrays."""
        return len(self.sizes)

    @property
    def payload_bytes(self) -> int:
        """What one worker pushes in a step, and what it pulls."""
        return 4 * sum(self.sizes)


def parse_arguments() -> argparse.Namespace:
    """The arguments that the driver gives to every worker, whichever system it measures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--system", default="", help="which of the systems that this worker knows")
    parser.add_argument("--spec", type=Spec.parse, required=True)
    parser.add_argument("--store", default="dist_sync")
    parser.add_argument("--call", choices=CALLS, default="pushpull")
    parser.add_argument("--store-arrays", choices=["plain", "resident", "shared"], default="plain")
    parser.add_argument("--optimizer", choices=["none", "sgd", "adam"], default="none")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    parser.add_argument("--out", required=True, help="directory for this worker's result")
    return parser.parse_args()


class Expected:
    """The value that every element must have after each step."""

    def __init__(self, optimizer: str, num_workers: int) -> None:
        self._rule = {"none": self._replace, "sgd": self._sgd, "adam": self._adam}[optimizer]
        self._grad = num_workers * (num_workers + 1) / 2
        self._value, self._mean, self._variance, self._step = 0.0, 0.0, 0.0, 0

    def after_step(self) -> float:
        self._step += 1
        self._rule()
        return self._value

    def _replace(self) -> None:
        self._value = self._grad

    def _sgd(self) -> None:
        self._mean = MOMENTUM * self._mean - LEARNING_RATE * self._grad
        self._value += self._mean

    def _adam(self) -> None:
        self._mean = 0.9 * self._mean + 0.1 * self._grad
        self._variance = 0.999 * self._variance + 0.001 * self._grad**2
        lr = LEARNING_RATE * math.sqrt(1 - 0.999**self._step) / (1 - 0.9**self._step)
        self._value -= lr * self._mean / (math.sqrt(self._variance) + 1e-8)


def check(arrays: list[Any], allowed: list[float], step: int) -> None:
    """Every array holds one of the values.

    Raises:
        SystemExit: it does not; the benchmark has measured something else than it says.
    """
    for index, array in enumerate(arrays):
        sample = array[:: max(1, array.size // CHECKED_ELEMENTS)]
        if not any(np.abs(sample - value).max() <= TOLERANCE * max(1.0, abs(value)) for value in allowed):
            raise SystemExit(f"step {step}, key {index}: {sample[:4]} came back, one of {allowed} was due")


def measure(
    options: argparse.Namespace,
    rank: int,
    num_workers: int,
    prepare: Callable[[], None],
    barrier: Callable[[], None],
    exchange: Callable[[], None],
    results: Callable[[], list[Any]],
) -> None:
    """Run the steps and write their seconds to ``<out>/<rank>.json``.

    Args:
        prepare: writes the gradients, as a backward pass would; not timed.
        barrier: returns when all workers are there.
        exchange: one step's push and pull; returns when every result can be read.
        results: the arrays that the last step gave, as NumPy arrays of one dimension.
    """
    expected = Expected(options.optimizer, num_workers)
    seconds = []
    for step in range(options.warmup + options.steps):
        prepare()
        barrier()
        start = time.perf_counter()
        exchange()
        seconds.append(time.perf_counter() - start)
        barrier()  # what follows takes cores, and the others may still be measuring
        if "async" not in options.store:
            check(results(), [expected.after_step()], step)
        elif options.optimizer == "none":
            check(results(), [float(each + 1) for each in range(num_workers)], step)
    path = os.path.join(options.out, f"{rank}.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(seconds[options.warmup :], file)
