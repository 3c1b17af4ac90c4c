"""How soon a job goes on after a fault: medians, and the worst of many.

    python benchmarks/faults.py --repeats 20
    python benchmarks/faults.py --repeats 20 --kind server --snapshots   # without copies: all go back to a snapshot
    python benchmarks/faults.py --repeats 20 --kind kill --kind stop --patience 2 --workers 3

Jobs of small steps. A fault strikes each worker once, but worker 0, which observes: how long until the first round that
the others close without the victim, and until the first counted push of its replacement, without what the script's own
imports take; and how long each part of that was. Up to two rounds that end after a fault may still have the victim's
pushes, so the third is taken. A job has each rank struck once only, so that all had the same time to come back.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from cluster import end_on_terminate
from storm import SHARES, WORDS, WORKER_KINDS, Fault, Job, Life, survives

VICTIM_ROUNDS = 2
WITHIN_S = 60.0
LOOK_S = 0.05
MINUTES = 600.0
"""Of data, so that it never ends by itself."""

Found = TypeVar("Found")


def strike(job: Job, kind: str, chance: random.Random) -> tuple[float, dict[str, float]]:
    """One fault: seconds until the next round was closed, and of each part until its replacement's first push."""
    job.wait_for_steps()
    spared = ["worker-0", *(fault.victim for fault in job.faults)]
    fault = wait_for(job, lambda: job.strike(kind, chance, spared), f"there is no {kind}")
    closed_s = wait_for(job, lambda: next_round(job, fault), f"no round after {fault}") - fault.at
    return closed_s, parts_s(job, fault) if kind in WORKER_KINDS else {}


def next_round(job: Job, fault: Fault) -> float | None:
    """When worker 0 had the first round that cannot have the victim."""
    (observer,) = (one for one in job.lives() if one.rank == 0)
    later = [at for at, _ in observer.steps if at > fault.at]
    return later[VICTIM_ROUNDS] if len(later) > VICTIM_ROUNDS else None


def parts_s(job: Job, fault: Fault) -> dict[str, float]:
    """How long each part took until the replacement's first counted push, without its imports."""

    def found() -> Life | None:
        later = [one for one in job.lives() if f"worker-{one.rank}" == fault.victim and one.life > fault.life]
        return next((one for one in later if one.steps), None)

    one = wait_for(job, found, f"no replacement after {fault}")
    return {
        "until it was started": one.began - fault.at,
        "its data": one.loaded - one.imported,
        "its store": one.joined - one.loaded,
        "its first batch": one.batch - one.joined,
        "its first step": one.steps[0][0] - one.batch,
    }


def wait_for(job: Job, found: Callable[[], Found | None], otherwise: str) -> Found:
    """What is found at last.

    Raises:
        RuntimeError: the job ended, or nothing was found within a minute.
    """
    deadline = time.monotonic() + WITHIN_S
    while (one := found()) is None:
        if job.wait(LOOK_S) or time.monotonic() > deadline:
            raise RuntimeError(f"{otherwise}:\n{job.text()[-3000:]}")
    return one


def told(seconds: list[float]) -> str:
    """Median and worst, which is the 99th percentile of fewer than a hundred."""
    return f"median {statistics.median(seconds):.2f} s, worst {max(seconds):.2f} s"


def measure(options: argparse.Namespace, kind: str) -> None:
    """Print what one kind of fault costs."""
    chance, outcomes, each = random.Random(options.seed), [], options.workers - 1 if kind in WORKER_KINDS else 1
    while len(outcomes) < options.repeats:
        with Job(options, MINUTES, relays=kind == "cut") as job:
            outcomes += [strike(job, kind, chance) for _ in range(min(each, options.repeats - len(outcomes)))]
    who = "worker" if kind in WORKER_KINDS else kind
    print(f"{who} {WORDS[kind]}, {options.repeats} times, patience {options.patience:g} s:")
    print(f"  first round closed by the others: {told([closed_s for closed_s, _ in outcomes])}", flush=True)
    if back := [parts for _, parts in outcomes if parts]:
        alone = told([sum(parts.values()) for parts in back])
        print(f"  its replacement's first counted push, without the script's imports: {alone}")
        medians = [f"{part} {statistics.median([parts[part] for parts in back]):.3f} s" for part in back[0]]
        print(f"    of that (medians): {', '.join(medians)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--kind", choices=list(SHARES), action="append", help="may be repeated; default: each")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--patience", type=float, default=1.0)
    parser.add_argument("--period", type=float, default=0.01, help="seconds that a step takes at least")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--option", action="append", default=[], help="another word for kvdist-launch: --option=--replicas"
    )
    parser.add_argument("--snapshots", action="store_true", help="servers write snapshots, and keep no copies")
    options = parser.parse_args()
    options.peer, options.store = None, "dist"
    end_on_terminate()
    for kind in options.kind or SHARES:
        if kind in WORKER_KINDS or survives(options, kind):
            measure(options, kind)
        else:
            print(f"left out: killing a {kind} ends a job that leases its data, as a short trial has shown", flush=True)


if __name__ == "__main__":
    main()
