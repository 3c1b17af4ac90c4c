"""What compression is worth on a slow line: step times on two "hosts", network namespaces with 1 Gbit/s between them.

    sudo python benchmarks/compression.py

Each host has a server and a worker; a step is one `pushpull` of 25 arrays of 1 Mi float32. Half of what a worker pushes
and pulls crosses the line, in each direction as much, so a step takes at least (pushed + pulled bytes) / 2 at the speed
of the line. Results are checked in every step. The kernels are those of a running job: compiled while the first steps,
which are not timed, are made.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

from cluster import end_on_terminate, machine, run_together, worker_command
from models import parse_spec
from namespaces import HOSTS, Host, kvdist_starts, limited_hosts
from peers.environments import Absent
from systems import Measured, Work, take_turns

RESULTS = Path(__file__).resolve().parent / "results"


@dataclass(frozen=True)
class Way:
    """How values travel: bits of an element that is pushed, and of one that is pulled."""

    label: str
    pushed_bits: int = 32
    pulled_bits: int = 32


WAYS = {
    "whole": Way("not compressed"),
    "fp16": Way("fp16", pushed_bits=16),
    "fp16-fp16": Way("fp16, pulls in fp16", 16, 16),
    "2bit": Way("2-bit", pushed_bits=2),
    "2bit-fp16": Way("2-bit, pulls in fp16", 2, 16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures compressed pushes and pulls over a slow line.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--mbit", type=int, default=1000, help="of each card, in each direction (default: 1000)")
    parser.add_argument("--steps", type=int, default=6, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--save", action="store_true", help=f"write compression.md and .json to {RESULTS.name}/")
    options = parser.parse_args()
    end_on_terminate()
    work = Work(options.spec, servers=HOSTS, workers=HOSTS, steps=options.steps, warmup=6)
    try:
        measured = measure(work, options.turns, options.mbit)
    except Absent as error:
        raise SystemExit(f"SKIPPED: {error}") from error
    lines = table(work, measured, options.mbit)
    print("\n".join(lines))
    if options.save:
        save(lines, work, measured, options.mbit)


def measure(work: Work, turns: int, mbit: int) -> dict[str, Measured]:
    """Seconds of every step by way, each in turns between the same two namespaces.

    Raises:
        Absent: namespaces cannot be made here.
    """
    with limited_hosts(mbit) as hosts:
        return take_turns(list(WAYS), lambda name, folder: run_way(name, work, hosts, folder), turns)


def run_way(name: str, work: Work, hosts: list[Host], folder: str) -> None:
    command = worker_command("compression_worker.py", *work.arguments(name, folder))
    run_together(kvdist_starts(command, hosts))


def least_s(work: Work, way: Way, mbit: int) -> float:
    """The least time of a step by what crosses the line."""
    elements = work.spec.payload_bytes // 4
    crossing = elements * (way.pushed_bits + way.pulled_bits) / 8 * (HOSTS - 1) / HOSTS
    return crossing / (mbit * 1e6 / 8)


def table(work: Work, measured: dict[str, Measured], mbit: int) -> list[str]:
    """One row a way, in Markdown."""
    lines = [
        f"{work}; {HOSTS} hosts of {mbit} Mbit/s each way.",
        "",
        "| | median ms | p90 ms | times as fast | least by the line, ms |",
        "|---|---|---|---|---|",
    ]
    whole = measured["whole"]
    for name, one in measured.items():
        if not one.seconds:
            lines.append(f"| {WAYS[name].label} | left out: {one.left_out.splitlines()[-1]} | | | |")
            continue
        gain = whole.median_s / one.median_s if whole.seconds else float("nan")
        lines.append(
            f"| {WAYS[name].label} | {one.median_s * 1e3:.0f} | {one.quantile_s(0.9) * 1e3:.0f} | {gain:.2f} |"
            f" {least_s(work, WAYS[name], mbit) * 1e3:.0f} |"
        )
    return lines


def save(lines: list[str], work: Work, measured: dict[str, Measured], mbit: int) -> None:
    record = {
        "machine": machine(),
        "work": str(work),
        "mbit": mbit,
        "seconds": {name: one.seconds for name, one in measured.items()},
    }
    text = "# Compression on a slow line\n\nMade by `benchmarks/compression.py --save`.\n\n" + "\n".join(lines) + "\n"
    (RESULTS / "compression.md").write_text(text, encoding="utf-8")
    (RESULTS / "compression.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {RESULTS}")


if __name__ == "__main__":
    main()
