"""One worker of a cluster that `scale.py` has predicted: pushes and pulls, and writes down what each step has cost.

Each worker writes the seconds of its steps to ``<out>/<rank>.json``. The first one reads from the kernel, before and
after each step, the processor time of every thread of the cluster and that of everything else, and writes it to
``<out>/processors.json``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import numpy as np
from workload import parse_arguments

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from cluster import cluster_of

from kvdist import kv

ALL_OTHERS = "others"
FIRST_JIFFIES, IDLE_JIFFIES = slice(0, 8), slice(3, 5)
"""Of the numbers of `/proc/stat`: those that add up to all time, and those without work."""


def main() -> None:
    options = parse_arguments()
    store = kv.create(options.store)
    keys = list(range(options.spec.count))
    grads = [np.ones(size, np.float32) for size in options.spec.sizes]
    outs = [np.empty(size, np.float32) for size in options.spec.sizes]
    if options.optimizer != "none":
        store.set_optimizer(options.optimizer, learning_rate=0.0)
    store.init(keys, [np.zeros(size, np.float32) for size in options.spec.sizes])
    pids = {process.pid: process.name for process in cluster_of(os.getppid())} if store.rank == 0 else {}
    seconds, spent = [], []
    for _ in range(options.warmup + options.steps):
        store.barrier()
        before = processor_seconds(pids)
        store.barrier()
        start = time.perf_counter()
        store.pushpull(keys, grads, out=outs)
        seconds.append(time.perf_counter() - start)
        store.barrier()
        after = processor_seconds(pids)
        spent.append({name: after[name] - before.get(name, 0.0) for name in after})
    Path(options.out, f"{store.rank}.json").write_text(json.dumps(seconds[options.warmup :]))
    if store.rank == 0:
        Path(options.out, "processors.json").write_text(json.dumps(spent[options.warmup :]))
    store.close()


def processor_seconds(pids: dict[int, str]) -> dict[str, float]:
    """Processor time so far, by process and kind of thread, such as ``server-0 carrying``; of no process, nothing."""
    if not pids:
        return {}
    found: dict[str, float] = {}
    for pid, name in pids.items():
        for task in Path(f"/proc/{pid}/task").iterdir():
            kind = "carrying" if (task / "comm").read_text().startswith("ZMQbg/IO") else "turning"
            nanoseconds = int((task / "schedstat").read_text().split()[0])
            found[f"{name} {kind}"] = found.get(f"{name} {kind}", 0.0) + nanoseconds * 1e-9
    numbers = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    busy = (sum(numbers[FIRST_JIFFIES]) - sum(numbers[IDLE_JIFFIES])) / os.sysconf("SC_CLK_TCK")
    return found | {ALL_OTHERS: busy - sum(found.values())}


if __name__ == "__main__":
    main()
