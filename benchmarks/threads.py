"""What each thread of a cluster takes of the processors in a step, which says whether a step waits or works.

    python benchmarks/threads.py --spec 25x1024 --spec 10000x100

Steps are list calls of `pushpull` one after the other, by all workers, with nothing between them. The kernel counts
the time of each thread (``/proc/<pid>/task/<tid>/schedstat``), and how often it began to run. Of a busy machine the
times are larger than of an idle one, as caches are shared, but waits for a core are not in them.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from cluster import Process, cluster_of, end_on_terminate, launch_command, running
from models import parse_spec
from workers.workload import Spec

TIMEOUT_S = 120.0
WARMUP = 15
SHOWN_US_MIN = 5.0
"""What takes less in a step is left out."""

Times = dict[tuple[str, str, int], tuple[int, int]]
"""(process, name of the thread, its number) → nanoseconds that it has run, and how often it began to."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures what each thread takes in a step.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--spec", type=parse_spec, action="append", help="COUNTxELEMENTS of float32, or a model")
    parser.add_argument("--steps", type=int, default=100, help="steps that are counted")
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of a worker
    options = parser.parse_args()
    specs = options.spec or [parse_spec("25x1024"), parse_spec("10000x100")]
    if options.folder:
        work(specs[0], options.steps, Path(options.folder))
        return
    end_on_terminate()
    for spec in specs:
        measure(spec, options)


def measure(spec: Spec, options: argparse.Namespace) -> None:
    """Run a cluster and print a line for each thread that does something."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        words = ["--spec", spec.text, "--steps", str(options.steps), "--folder", name]
        command = launch_command(options.workers, options.servers, [sys.executable, __file__, *words])
        with running(command, folder / "log") as launcher:
            wait_for(folder / "begin", folder / "log")
            before = times(cluster_of(launcher.pid))
            (folder / "began").touch()
            seconds = [float(one) for one in wait_for(folder / "end", folder / "log").split()]
            after = times(cluster_of(launcher.pid))
            (folder / "ended").touch()
            launcher.wait(TIMEOUT_S)
    median_ms = statistics.median(seconds) * 1e3
    print(f"\n{spec}, {options.workers} workers, {options.servers} servers: {median_ms:.2f} ms a step")
    total_us = 0.0
    for key in sorted(after):
        first = before.get(key, (0, 0))
        run_us, begun = ((now - then) / options.steps for now, then in zip(after[key], first, strict=True))
        total_us += run_us / 1e3
        if run_us / 1e3 >= SHOWN_US_MIN:
            print(f"{key[0]:12} {key[1]:18} {run_us / 1e3:9.0f} µs, begins {begun:5.1f} times", flush=True)
    print(f"{'all':31} {total_us:9.0f} µs, {total_us / 1e3 / (os.cpu_count() or 1):.2f} ms of each core", flush=True)


def wait_for(path: Path, log: Path) -> str:
    """The content of a file as soon as it is there.

    Raises:
        RuntimeError: it does not come.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise RuntimeError(f"no {path.name} within {TIMEOUT_S:g} s:\n{log.read_text()}")
        time.sleep(0.01)
    return path.read_text()


def times(processes: list[Process]) -> Times:
    """What every thread of these has run so far."""
    found: Times = {}
    for process in processes:
        for task in Path(f"/proc/{process.pid}/task").iterdir():
            run_ns, _, begun = (task / "schedstat").read_text().split()
            found[process.name, (task / "comm").read_text().strip(), int(task.name)] = (int(run_ns), int(begun))
    return found


def work(spec: Spec, steps: int, folder: Path) -> None:
    """One worker."""
    from kvdist import kv

    with kv.create("dist") as store:
        keys = list(range(spec.count))
        grads = [np.ones(size, np.float32) for size in spec.sizes]
        outs = [np.empty(size, np.float32) for size in spec.sizes]
        store.init(keys, [np.zeros(size, np.float32) for size in spec.sizes])
        for _ in range(WARMUP):
            store.pushpull(keys, grads, out=outs)
        store.barrier()
        if store.rank == 0:
            (folder / "begin").touch()
            wait_for(folder / "began", folder / "log")
        store.barrier()
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            store.pushpull(keys, grads, out=outs)
            seconds.append(time.perf_counter() - start)
        assert all((out == store.num_workers).all() for out in outs)
        store.barrier()
        if store.rank == 0:
            made = folder / "end.new"
            made.write_text(" ".join(map(str, seconds)))
            made.rename(folder / "end")  # whole at once
            wait_for(folder / "ended", folder / "log")
        store.barrier()


if __name__ == "__main__":
    main()
