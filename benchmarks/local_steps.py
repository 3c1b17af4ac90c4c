"""Slow links: the share of time that workers compute while they exchange a model of 30 M parameters every 100 steps.

    sudo python benchmarks/local_steps.py
    sudo python benchmarks/local_steps.py --mbit 50 --ways "diloco:100" "diloco:100,fragments=4 int4:bf16"

Two "hosts", network namespaces with a server and a worker each, and a slow line between (see namespaces.py). Steps are
paced: `--unit` seconds asleep, then the worker's own optimizer. What such a step takes before the first exchange has
begun is computing, and all that steps take longer in the two periods after the first one is not. A way is a policy, and
behind it how pushes and answers are compressed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

from cluster import end_on_terminate, run_together, worker_command
from namespaces import kvdist_starts, limited_hosts
from peers.environments import Absent

WAYS = ["diloco:100", "diloco:100,fragments=4,bits=8", "diloco:100,fragments=4 int4:bf16"]


def measured(way: str, mbit: int, options: argparse.Namespace) -> list[dict[str, float]]:
    """What each worker has found, by rank.

    Raises:
        Absent: namespaces cannot be made here.
        RuntimeError: the job failed; the message holds what it printed.
    """
    policy, _, compression = way.partition(" ")
    with limited_hosts(mbit) as hosts, tempfile.TemporaryDirectory(prefix="local-steps-") as folder:
        words = (folder, str(options.unit), str(options.steps), compression)
        run_together(kvdist_starts(worker_command("local_steps_worker.py", *words), hosts, KVDIST_POLICY=policy))
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(len(hosts))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=int, nargs="+", default=[1000, 200, 50], help="of each card, in each direction")
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--unit", type=float, default=0.03, help="seconds of sleep in a step")
    parser.add_argument("--steps", type=int, default=100, help="of a period, as the policies say")
    options = parser.parse_args()
    end_on_terminate()
    print(f"{'share of time computing, by Mbit/s':36}", *(f"{one:>16}" for one in options.mbit))
    for way in options.ways:
        print(f"{way:36}", end="", flush=True)
        for mbit in options.mbit:
            try:
                found = measured(way, mbit, options)
            except Absent as error:
                raise SystemExit(f"SKIPPED: {error}") from error
            share, step_s = (statistics.mean(one[name] for one in found) for name in ("share", "step_s"))
            print(f" {share:5.0%} of {step_s * 1e3:4.0f} ms", end="", flush=True)
        print()


if __name__ == "__main__":
    sys.exit(main())
