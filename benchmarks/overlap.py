"""What sending gradients during the backward pass gains or costs, in a cluster of real processes on this machine.

    python benchmarks/overlap.py --workers 2 --servers 2

Each worker trains the perceptron 784-2048-2048-2048-10 on batches of 64, twice in one process: without and with
``overlap=True``, in turns, so that whatever else the machine does meets both alike. Both must end with the same bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from cluster import environment, launch_command, worker_command

TIMEOUT_S = 600.0


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures training steps without and with overlap.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--update", choices=["store", "workers"], default="store", help="who updates the weights")
    parser.add_argument("--bucket-mib", type=float, default=0, help="size of a bucket; 0 is the library's own")
    parser.add_argument("--turns", type=int, default=6, help="each of some steps without and with overlap")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="overlap-") as folder:
        run(options, Path(folder))
        measured = [json.loads(file.read_text()) for file in Path(folder).glob("*.json")]
    print(f"{options.workers} workers, {options.servers} servers, {options.optimizer}, updated by the {options.update}")
    print(f"{'':16} {'median ms':>10} {'p10 ms':>8} {'of it forward and backward':>28}")
    for name in ("without overlap", "with overlap"):
        steps = [step for worker in measured for step in worker[name]]
        whole = sorted(step["whole_s"] * 1e3 for step in steps)
        passes = statistics.median(step["passes_s"] * 1e3 for step in steps)
        print(f"{name:16} {statistics.median(whole):10.1f} {whole[len(whole) // 10]:8.1f} {passes:28.1f}")


def run(options: argparse.Namespace, folder: Path) -> None:
    """Run the workers to their end; their output is shown only when they fail."""
    names = ("optimizer", "update", "bucket_mib", "turns")
    words = [str(getattr(options, name)) for name in names]
    command = launch_command(options.workers, options.servers, worker_command("overlap_worker.py", *words, str(folder)))
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nthe cluster ended with code {done.returncode}")


if __name__ == "__main__":
    main()
