"""How many Python calls one gradient takes, and in how many files: the walk of docs/walk.md, counted.

    python benchmarks/walk.py                 # calls by file
    python benchmarks/walk.py --functions     # every function, with how often it is called

A Trainer makes a step with three parameters on a cluster within this process: worker, server and scheduler run in one
thread, beside that of the Trainer, so `sys.setprofile` sees all of them. Counted are the calls of functions in kvdist
in one step, from ``trainer.step()`` until it returns; the median of `STEPS` steps. Turns of a loop in which nothing had
arrived, was asked or was due are left out, as are what torch and NumPy do.
"""

from __future__ import annotations

import argparse
import logging
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import kvdist
from kvdist import Trainer, kv
from kvdist.runtime.node import Node

STEPS = 21
WARMUP = 5
PARAMETERS = ((64, 32), (64,), (10, 64))
PACKAGE = Path(kvdist.__file__).parent
LOOP = {"run_together", "wait", "run"}
"""Functions of the loop that turns the nodes: they turn as well where nothing happens."""


class CallCounter:
    """Counts calls of functions of kvdist on all threads, without idle turns of nodes."""

    def __init__(self) -> None:
        self.is_counting = False
        self._total: Counter[tuple[str, str]] = Counter()
        self._of_thread: dict[int, list[Counter[tuple[str, str]]]] = {}
        """Thread → counts outside of turns, and those of each turn that it is in."""

    def note(self, frame: FrameType, event: str, argument: Any) -> None:
        """What ``sys.setprofile`` calls."""
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(str(PACKAGE)):
            return
        counts = self._of_thread.setdefault(threading.get_ident(), [])
        is_turn = code is Node.turn.__code__
        if event == "return":
            if is_turn and counts:
                turn = counts.pop()
                if argument:
                    (counts[-1] if counts else self._total).update(turn)
            return
        if is_turn:
            counts.append(Counter())
        if self.is_counting:
            file = str(Path(code.co_filename).relative_to(PACKAGE))
            if code.co_name not in LOOP or not file.startswith("runtime/"):
                (counts[-1] if counts else self._total)[file, getattr(code, "co_qualname", code.co_name)] += 1

    def take(self) -> Counter[tuple[str, str]]:
        """The counts since the last call of this method."""
        total, self._total = self._total, Counter()
        return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--functions", action="store_true", help="print every function")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    counter = CallCounter()
    threading.setprofile(counter.note)  # of the nodes' thread, which the Trainer starts
    parameters = [torch.nn.Parameter(torch.ones(*shape)) for shape in PARAMETERS]
    store = kv.create("dist")
    trainer = Trainer(parameters, "sgd", {"learning_rate": 0.1}, kvstore=store)
    counts: list[Counter[tuple[str, str]]] = []
    for step in range(WARMUP + STEPS):
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        counter.take()
        counter.is_counting = step >= WARMUP
        sys.setprofile(counter.note if step >= WARMUP else None)
        trainer.step()
        sys.setprofile(None)
        counter.is_counting = False
        if step >= WARMUP:
            counts.append(counter.take())
    threading.setprofile(None)
    store.close()
    report(sorted(counts, key=Counter.total)[len(counts) // 2], options.functions)


def report(counts: Counter[tuple[str, str]], shows_functions: bool) -> None:
    """Print the counts of one step."""
    files: Counter[str] = Counter()
    for (file, _), number in counts.items():
        files[file] += number
    print(f"a gradient takes {counts.total():,} calls of {len(counts)} functions in {len(files)} files of kvdist")
    for file, number in files.most_common():
        print(f"{number:6} {file}")
        if shows_functions:
            for (of, name), times in counts.most_common():
                if of == file:
                    print(f"{times:12} {name}")


if __name__ == "__main__":
    main()
