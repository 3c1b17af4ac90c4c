"""One worker of `checkpoint.py`: steps without a pause, saves now and then, and writes down what each step took.

Seconds go to ``<out>/<rank>.json``: of steps with no checkpoint under way (``quiet``), of those in which one was
called (``called``), of those while it was written (``beside``), and until it was complete (``complete``).
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
from workload import parse_arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from checkpoint import SAVES

from kvdist import kv


def main() -> None:
    options = parse_arguments()
    store = kv.create(options.store)
    store.set_optimizer(options.optimizer, learning_rate=0.01)
    keys = list(range(options.spec.count))
    grads = [np.ones(size, np.float32) for size in options.spec.sizes]
    outs = [np.empty(size, np.float32) for size in options.spec.sizes]
    store.init(keys, [np.zeros(size, np.float32) for size in options.spec.sizes])
    took: dict[str, list[float]] = {"quiet": [], "called": [], "beside": [], "complete": []}

    def step(kind: str | None) -> None:
        started = time.perf_counter()
        store.pushpull(keys, grads, out=outs)
        if kind is not None:
            took[kind].append(time.perf_counter() - started)

    for _ in range(options.warmup):
        step(None)
    for save in range(SAVES):
        for _ in range(options.steps):
            step("quiet")
        begun = time.perf_counter()
        future = store.save_checkpoint(options.out, save)
        future.add_done_callback(lambda _, begun=begun: took["complete"].append(time.perf_counter() - begun))
        step("called")
        # All workers make as many steps, whoever hears first that it is complete.
        while store.average(float(future.done())) < 1.0:
            step("beside")
        future.result()
    (Path(options.out) / f"{store.rank}.json").write_text(json.dumps(took))
    store.close()


if __name__ == "__main__":
    main()
