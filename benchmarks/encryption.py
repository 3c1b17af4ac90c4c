"""What encryption costs a step: unencrypted, and by CURVE with one and with two threads for the bytes.

    sudo python benchmarks/encryption.py --write

Two workers push and pull `--spec` through two servers, over sockets only: on the loopback of one host, and, as root,
between two network namespaces ("hosts", with a server and a worker each) that are joined by a pair of virtual cards
without a limit. All processes share the same cores, and a busy machine tells more by the processor time of a step: it
is what all processes of a job have used, less what a job of one step uses. A connection stays with one thread: a second
one helps where there are several connections and cores.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

from cluster import ROOT, Start, end_on_terminate, machine, run_together, worker_command
from models import parse_spec
from namespaces import HOSTS, Host, kvdist_starts, limited_hosts
from peers.environments import Absent
from systems import Measured, Work, take_turns

RESULTS = ROOT / "benchmarks" / "results" / "encryption"
TCP = {"KVDIST_TRANSPORT": "tcp"}
KINDS = {"plain": "unencrypted", "curve": "CURVE, 1 I/O thread", "curve-2": "CURVE, 2 I/O threads"}
PLACES = {"loopback": "loopback", "veth": "two namespaces, veth"}


class Here(Host):
    """This host, with its loopback."""

    def inside(self, start: Start) -> Start:
        return start


@dataclass
class Cost:
    """What was measured of one kind in one place."""

    steps: Measured = field(default_factory=Measured)
    processor_s: list[float] = field(default_factory=list)
    """Of a step, in all processes together; one number a turn."""


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        secret = Path(folder, "secret")
        secret.touch(0o600)
        secret.write_bytes(os.urandom(32))
        measured = {"loopback": measure(options, str(secret), [Here("", "127.0.0.1", "lo")] * HOSTS)}
        try:
            with limited_hosts(None) as hosts:
                measured["veth"] = measure(options, str(secret), hosts)
        except Absent as error:
            print(f"LEFT OUT: two namespaces: {error}", flush=True)
    text = table(measured, options)
    print(text)
    if options.write:
        RESULTS.with_suffix(".md").write_text(text)
        found = [
            {"place": place, "kind": kind, "seconds": cost.steps.seconds, "processor_s": cost.processor_s}
            for place, costs in measured.items()
            for kind, cost in costs.items()
        ]
        RESULTS.with_suffix(".json").write_text(json.dumps({"machine": machine(), "measured": found}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures what encryption costs a step.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--steps", type=int, default=8, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}.md and .json")
    return parser.parse_args()


def variables_of(kind: str, secret: str) -> dict[str, str]:
    """What every process of such a job is told."""
    if kind == "plain":
        return TCP | {"KVDIST_SECURITY": "none"}
    threads = "2" if kind == "curve-2" else "1"
    return TCP | {"KVDIST_SECURITY": "curve", "KVDIST_SECRET_FILE": secret, "KVDIST_IO_THREADS": threads}


def measure(options: argparse.Namespace, secret: str, hosts: list[Host]) -> dict[str, Cost]:
    """What a step costs by kind, each in turns."""
    costs = {kind: Cost() for kind in KINDS}

    def run(kind: str, steps: int, folder: str) -> float:
        """A job of so many steps; the processor seconds it has used."""
        work = Work(options.spec, servers=HOSTS, workers=HOSTS, steps=steps, warmup=2)
        starts = kvdist_starts(worker_command("kvdist_worker.py", *work.arguments(kind, folder)), hosts)
        variables = variables_of(kind, secret)
        before = processor_s()
        run_together([replace(start, environment=start.environment | variables) for start in starts])
        return processor_s() - before

    def one_turn(kind: str, folder: str) -> None:
        with tempfile.TemporaryDirectory(prefix="bench-") as elsewhere:
            little = run(kind, 1, elsewhere)
        costs[kind].processor_s.append((run(kind, options.steps, folder) - little) / (options.steps - 1))

    for kind, steps in take_turns(list(KINDS), one_turn, options.turns).items():
        costs[kind].steps = steps
    return costs


def processor_s() -> float:
    """What all processes have used that this one has started and waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def table(measured: dict[str, dict[str, Cost]], options: argparse.Namespace) -> str:
    """A line for each place and kind, with how many times as much it costs as unencrypted."""
    head = ["", "", "median ms", "times", "least ms", "times", "processor ms", "times"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head))]
    for place, costs in measured.items():
        plain: list[float] = []
        for kind, cost in costs.items():
            if not cost.steps.seconds:
                why = cost.steps.left_out.splitlines()[-1]
                lines.append(f"| {PLACES[place]} | {KINDS[kind]} | left out: {why} | | | | | |")
                continue
            numbers = [cost.steps.median_s, min(cost.steps.seconds), statistics.median(cost.processor_s)]
            plain = plain or numbers
            cells = [f"{one * 1e3:.0f} | {one / other:.2f}" for one, other in zip(numbers, plain, strict=True)]
            lines.append(f"| {PLACES[place]} | {KINDS[kind]} | {' | '.join(cells)} |")
    return (
        "# What encryption costs\n\n"
        f"{options.spec} float32, {options.spec.payload_bytes / 1e6:.0f} MB, pushed and pulled by {HOSTS} workers"
        f" through {HOSTS} servers over sockets only, on {os.cpu_count()} cores\nthat all of them share. Medians over"
        f" {options.turns} turns of {options.steps} steps on each worker, least of all\nsteps, and processor time of a"
        " step in all processes; *times* as much as unencrypted. Made by\n"
        "`python benchmarks/encryption.py --write`.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
