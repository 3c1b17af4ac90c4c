"""What a checkpoint costs the training beside it, and how long it takes until it is on the disk.

    python benchmarks/checkpoint.py                       # 25 arrays of 4 MB with Adam, on the disk of the home folder
    python benchmarks/checkpoint.py --folder /mnt/fast
    python benchmarks/checkpoint.py --snapshots 10        # pairs of runs with and without snapshots, ten minutes each
    python benchmarks/checkpoint.py --snapshots 4 --every 5 --seconds 60   # what one costs, by taking many

Two workers step without a pause; some steps in, all call `save_checkpoint` and go on. Reported are the median step
without one under way, the step in which it is called, the median of those while servers write, and the seconds until
the future is done, beside those of writing and syncing as many bytes by one process.

With ``--snapshots`` runs with and without snapshots take turns, and what is reported is how much fewer steps a second
there are with them: the mean over the pairs, and the interval that has it in 95 of 100 draws of as many pairs. With
``--every`` one is begun after so many seconds, which shows in a short run, and what one costs is reported.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from cluster import Start, end_on_terminate, environment, launch_command, run_together, worker_command
from models import parse_spec
from systems import Work

SAVES = 3
CHUNK = bytes(8 << 20)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures checkpoints.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--folder", type=Path, default=Path.home(), help="where to write; emptied afterwards")
    parser.add_argument("--snapshots", type=int, metavar="PAIRS", help="measure snapshots, in so many pairs of runs")
    parser.add_argument("--seconds", type=float, default=300.0, help="of each run of a pair")
    parser.add_argument("--every", type=float, help="seconds from snapshot to snapshot; by what one takes if not set")
    options = parser.parse_args()
    end_on_terminate()
    if options.snapshots:
        compare_snapshots(Work(options.spec, optimizer="adam"), options)
        return
    work = Work(options.spec, optimizer="adam", steps=20, warmup=20)
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.folder) as folder:
        command = worker_command("checkpoint_worker.py", *work.arguments("kvdist", folder))
        run_together([Start(launch_command(2, 2, command), environment(KVDIST_CHECKPOINT_ROOT=folder))])
        told = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in (0, 1)]
        nbytes = sum(path.stat().st_size for path in Path(folder).glob("step-*/server-*")) // SAVES
        plain_s = write_plainly(Path(folder) / "plain", nbytes)

    def median_ms(name: str) -> float:
        return 1e3 * statistics.median(second for one in told for second in one[name])

    print(f"{options.spec} with Adam: {nbytes / 1e6:.0f} MB a checkpoint, medians of {SAVES}, two workers and servers")
    print(f"a step without one {median_ms('quiet'):.1f} ms, in which it is called {median_ms('called'):.1f} ms,")
    print(f"while servers write {median_ms('beside'):.1f} ms; complete after {median_ms('complete'):.0f} ms")
    print(f"writing and syncing as much by one process alone: {1e3 * plain_s:.0f} ms")


def compare_snapshots(work: Work, options: argparse.Namespace) -> None:
    """Print what snapshots cost."""
    pairs, seconds, every = options.snapshots, options.seconds, options.every
    costs: list[float] = []
    for pair in range(pairs):
        turns = ((True, False), (False, True))[pair % 2]
        rates = {takes: rate_of(work, seconds, options.folder, takes, every) for takes in turns}
        costs.append(100 * (1 - rates[True] / rates[False]))
        print(f"pair {pair + 1}: {rates[False]:.2f} steps a second, with snapshots {rates[True]:.2f}", flush=True)
    low, high = interval_of(costs)
    how_often = f"one each {every:g} s" if every else "intervals by what a snapshot takes"
    print(f"{work.spec} with Adam, {seconds:g} s a run, {how_often}:")
    print(f"snapshots cost {statistics.mean(costs):.2f} % of the steps ({low:.2f} to {high:.2f} %, {pairs} pairs)")
    if every:
        one, least, most = (every * cost / 100 for cost in (statistics.mean(costs), low, high))
        print(f"one costs {one:.2f} s of training ({least:.2f} to {most:.2f} s)")


def rate_of(work: Work, seconds: float, folder: Path, takes_snapshots: bool, every: float | None) -> float:
    """Steps a second."""
    with tempfile.TemporaryDirectory(prefix="snapshots-", dir=folder) as out:
        command = worker_command("snapshot_worker.py", *work.arguments("kvdist", out))
        options = ["--on-loss", "continue", "--restart", "1"]
        options += ["--snapshots", f"{out}/snapshots"] if takes_snapshots else []
        launch = launch_command(work.workers, work.servers, command)
        launch[launch.index("--") : launch.index("--")] = options
        variables = environment(KVDIST_CHECKPOINT_ROOT=out, SECONDS_OF_STEPS=str(seconds))
        if every:
            variables["KVDIST_SNAPSHOT_INTERVAL_S"] = str(every)
        run_together([Start(launch, variables)], timeout_s=seconds + 300)
        if takes_snapshots and not any(Path(out).glob("snapshots/step-*/manifest.json")):
            raise SystemExit("no snapshot was complete: give the runs more --seconds")
        return float((Path(out) / "0.rate").read_text())


def interval_of(costs: Sequence[float]) -> tuple[float, float]:
    """What the mean is between in 95 of 100 draws, with replacement, of as many."""
    draw = random.Random(0)
    means = sorted(statistics.mean(draw.choices(costs, k=len(costs))) for _ in range(2000))
    return means[50], means[1949]


def write_plainly(path: Path, nbytes: int) -> float:
    """Seconds until so many bytes of one file are on the disk."""
    started = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for _ in range(nbytes // len(CHUNK)):
            file.write(CHUNK)
        os.fsync(file.fileno())
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
