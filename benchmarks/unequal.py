"""Machines of unequal speed: how much of what each could do alone they do together, under each policy.

    python benchmarks/unequal.py
    python benchmarks/unequal.py --speeds 1 0.5 0.25 --policies sync quota:256

Workers are paced: a batch of 16 takes a unit of time divided by the speed, most of it asleep, so that two cores are
enough for several of them. A machine of speed 1 alone makes 16 examples in a unit; the sum of all speeds is what
there is to reach. Examples count when their version is complete, so time runs from the first new version to the last.
``sync`` is `dist` without a policy, whose steps go at the pace of the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import environment, launch_command, worker_command

BATCH = 16


def measured(policy: str, options: argparse.Namespace) -> list[dict[str, float]]:
    """What each worker has found, by rank.

    Raises:
        RuntimeError: the job failed; the message holds what it printed.
    """
    with tempfile.TemporaryDirectory(prefix="unequal-") as folder:
        words = [folder, str(options.unit), str(options.seconds), *map(str, options.speeds)]
        command = launch_command(len(options.speeds), 2, worker_command("unequal_worker.py", *words))
        variables = {"OMP_NUM_THREADS": "1"} | ({} if policy == "sync" else {"KVDIST_POLICY": policy})
        done = subprocess.run(
            command, env=environment(**variables), capture_output=True, text=True, timeout=options.seconds + 120
        )
        if done.returncode:
            raise RuntimeError(f"{policy} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(options.speeds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=float, nargs="+", default=[1, 0.6, 0.4, 0.25])
    parser.add_argument("--unit", type=float, default=0.3, help="seconds of a batch at speed 1")
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument(
        "--policies", nargs="+", default=["sync", "quota:64", "quota:64,exact", "quota:256", "quota:512,local_steps"]
    )
    options = parser.parse_args()
    allowed = BATCH / options.unit * sum(options.speeds)
    print(f"speeds {options.speeds}: alone they make {allowed:.0f} examples/s; {os.cpu_count()} cores")
    print(f"{'policy':24} {'examples/s':>10} {'of that':>8} {'versions/s':>10} {'fastest busy':>12}")
    for policy in options.policies:
        found = measured(policy, options)
        rate = found[0]["examples_per_s"]
        fastest = options.speeds.index(max(options.speeds))
        print(
            f"{policy:24} {rate:10.1f} {rate / allowed:8.1%} {found[0]['versions_per_s']:10.2f}"
            f" {found[fastest]['busy']:12.0%}",
            flush=True,
        )


if __name__ == "__main__":
    sys.exit(main())
