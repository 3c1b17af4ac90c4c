"""How long one push and pull of a list of arrays takes, in a cluster of real processes on this machine.

    python benchmarks/push_pull.py --workers 2 --servers 2 --spec 25x1048576 --spec 1000x1000 --peer mxnet

With ``--peer mxnet`` the same work runs on MXNet 1.9.1 as well, in turns with kvdist within the same run, so that
whatever else the machine does meets both alike. What a step is, and how its result is checked, stands in
`workers/workload.py`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from cluster import environment, launch_command, machine, worker_command
from peers.mxnet import run_mxnet
from workers.workload import Spec

RESULTS = Path(__file__).resolve().parent / "results"
TIMEOUT_S = 600.0
IN_PROCESS_STORES = ("local", "device")


@dataclass(frozen=True)
class Result:
    """What one system took for one piece of work."""

    system: str
    spec: str
    median_ms: float
    p90_ms: float
    gigabytes_per_s: float
    keys_per_s: float
    steps: int


def main() -> None:
    options = parse_arguments()
    results: list[Result] = []
    for spec in options.spec or [Spec(25, 1 << 20), Spec(1000, 1000)]:
        seconds = measure(options, spec)
        measured = [summarise(system, spec, taken) for system, taken in seconds.items()]
        print_table(options, spec, measured)
        results += measured
    if options.json:
        path = RESULTS / options.json
        path.parent.mkdir(exist_ok=True)
        work = {name: value for name, value in vars(options).items() if name not in ("json", "spec")}
        record = {"machine": machine(), "work": work, "results": [asdict(result) for result in results]}
        path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        print(f"written to {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures push and pull.")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--spec", type=Spec.parse, action="append", help="COUNTxELEMENTS of float32; may be repeated")
    parser.add_argument("--store", default="dist_sync", help="type of the store (default: dist_sync)")
    parser.add_argument("--call", choices=["pushpull", "push_pull"], default="pushpull", help="one list call, or two")
    parser.add_argument("--arrays", choices=["plain", "resident"], default="plain", help="resident: of store.empty")
    parser.add_argument("--optimizer", choices=["none", "sgd", "adam"], default="none", help="on the servers")
    parser.add_argument("--steps", type=int, default=20, help="timed steps in each turn")
    parser.add_argument("--warmup", type=int, default=3, help="steps before those")
    parser.add_argument("--turns", type=int, default=3, help="clusters started for each system, taking turns")
    parser.add_argument("--peer", choices=["mxnet"], help="compare with it, in turns")
    parser.add_argument("--json", metavar="FILE", help=f"write the results to FILE, in {RESULTS.name}/ if relative")
    options = parser.parse_args()
    if options.peer and options.store in IN_PROCESS_STORES:
        parser.error(f"--peer compares clusters, and {options.store} is a store within one process")
    return options


def measure(options: argparse.Namespace, spec: Spec) -> dict[str, list[float]]:
    """Seconds of every step on every worker, by system."""
    systems: dict[str, Callable[[list[str]], None]] = {"kvdist": lambda arguments: run_kvdist(options, arguments)}
    if options.peer == "mxnet":
        systems["MXNet 1.9.1"] = lambda arguments: run_mxnet(options.workers, options.servers, arguments)
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for _ in range(options.turns):
        for system, run in systems.items():
            with tempfile.TemporaryDirectory(prefix="push-pull-") as folder:
                run(worker_arguments(options, spec, folder))
                for file in Path(folder).glob("*.json"):
                    seconds[system] += json.loads(file.read_text())
    return seconds


def worker_arguments(options: argparse.Namespace, spec: Spec, folder: str) -> list[str]:
    names = ("store", "call", "arrays", "optimizer", "steps", "warmup")
    shared = [word for name in names for word in (f"--{name}", str(getattr(options, name)))]
    return [*shared, "--spec", str(spec), "--out", folder]


def run_kvdist(options: argparse.Namespace, arguments: list[str]) -> None:
    """Run the work on kvdist, to the end; its output is shown only when it fails."""
    command = worker_command("kvdist_worker.py", *arguments)
    if options.store not in IN_PROCESS_STORES:
        command = launch_command(options.workers, options.servers, command)
    done = subprocess.run(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        sys.exit(f"{done.stdout}\nkvdist ended with code {done.returncode}")


def summarise(system: str, spec: Spec, seconds: list[float]) -> Result:
    median = statistics.median(seconds)
    return Result(
        system=system,
        spec=str(spec),
        median_ms=round(median * 1e3, 2),
        p90_ms=round(sorted(seconds)[int(len(seconds) * 0.9)] * 1e3, 2),
        gigabytes_per_s=round(spec.payload_bytes / median / 1e9, 3),
        keys_per_s=round(spec.count / median),
        steps=len(seconds),
    )


def print_table(options: argparse.Namespace, spec: Spec, results: list[Result]) -> None:
    """One line a system, and how they compare."""
    print(
        f"\n{spec} float32 ({spec.payload_bytes / 1e6:.1f} MB) · {options.workers} workers, {options.servers} servers"
        f" · {options.store}, {options.call}, {options.arrays} arrays, optimizer {options.optimizer}"
    )
    print(f"{'':12} {'median ms':>10} {'p90 ms':>10} {'GB/s each way':>14} {'keys/s':>10} {'steps':>6}")
    for result in results:
        print(
            f"{result.system:12} {result.median_ms:10.1f} {result.p90_ms:10.1f} {result.gigabytes_per_s:14.2f} "
            f"{result.keys_per_s:10.0f} {result.steps:6}"
        )
    for peer in results[1:]:
        ratio = peer.median_ms / results[0].median_ms
        print(f"ratio: kvdist is {ratio:.2f} times as fast as {peer.system}", flush=True)


if __name__ == "__main__":
    main()
