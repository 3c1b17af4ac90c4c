"""How soon the first layer's weights are there on a slow line: priority slices, the usual ones, and MXNet's P3.

    sudo python benchmarks/p3.py --peer mxnet --write

Two "hosts", network namespaces with a server and a worker each, and 1 Gbit/s between them, as in `namespaces.py`. Each
worker has the gradients of VGG-16 one after the other, the last layer first, in a backward pass that is a wait of
`--backward-s` seconds; then it waits for the weights in the order in which a forward pass needs them. Told is how long
after the backward pass the first layer, all convolutions, and all weights were in. Nothing is updated: sums come back.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from cluster import ROOT, Start, end_on_terminate, machine, run_together, worker_command, worker_script
from models import parse_spec
from namespaces import HOSTS, Host, bound_s, kvdist_starts, limited_hosts, mxnet_starts_inside
from peers.environments import Absent

RESULTS = ROOT / "benchmarks" / "results" / "p3"
WORKER = "first_layer_worker.py"
FULLY_CONNECTED = 6
"""The last parameters of VGG-16, which have nine tenths of the bytes."""


@dataclass(frozen=True)
class Contender:
    """A system, and what it is told in its environment."""

    label: str
    system: str
    variables: dict[str, str]


CONTENDERS = {
    "kvdist": Contender("kvdist", "kvdist", {}),
    "kvdist-p3": Contender("kvdist, priority slices", "kvdist", {"KVDIST_PRIORITY_SLICES": "1"}),
    "mxnet": Contender("MXNet 1.9.1", "mxnet", {}),
    "mxnet-p3": Contender(
        "MXNet 1.9.1, P3, water mark 10", "mxnet", {"DMLC_PS_VAN_TYPE": "p3", "DMLC_PS_WATER_MARK": "10"}
    ),
}
"""The water mark is the one with which MXNet's launcher starts P3."""

Steps = list[list[float]]
"""Per step of a worker, after how many seconds each parameter was in."""


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    names = [name for name in CONTENDERS if not name.startswith("mxnet") or options.peer]
    try:
        with limited_hosts(options.mbit) as hosts:
            measured = take_turns(names, lambda name, folder: run_one(name, options, hosts, folder), options.turns)
    except Absent as error:
        raise SystemExit(f"SKIPPED: {error}") from error
    rows = [row(CONTENDERS[name].label, steps) for name, steps in measured.items() if steps]
    text = table(rows, options)
    print(text)
    if options.write:
        RESULTS.with_suffix(".md").write_text(text)
        said = {"machine": machine(), "options": {"mbit": options.mbit, "backward_s": options.backward_s}}
        RESULTS.with_suffix(".json").write_text(json.dumps(said | {"seconds": measured}) + "\n")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures how soon the first layer's weights are in.")
    parser.add_argument("--mbit", type=int, default=1000, help="of each card, in each direction (default: 1000)")
    parser.add_argument("--backward-s", type=float, default=0.3, help="length of the backward pass (default: 0.3)")
    parser.add_argument("--steps", type=int, default=3, help="timed steps in each turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--peer", choices=["mxnet"], help="measure it too")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}.md and .json")
    return parser.parse_args()


def take_turns(names: list[str], one_turn: Callable[[str, Path], None], turns: int) -> dict[str, Steps]:
    """A B A B, as in `systems.py`; who fails is left out, aloud."""
    measured: dict[str, Steps] = {name: [] for name in names}
    left = list(names)
    for _ in range(turns):
        for name in list(left):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                try:
                    one_turn(name, Path(folder))
                    measured[name] += [step for file in Path(folder).glob("*.json") for step in read(file)]
                except (Absent, RuntimeError) as error:
                    left.remove(name)
                    measured[name] = []
                    print(f"LEFT OUT: {name}: {error}", flush=True)
    return measured


def read(file: Path) -> Steps:
    steps: Steps = json.loads(file.read_text())
    return steps


def run_one(name: str, options: argparse.Namespace, hosts: list[Host], folder: Path) -> None:
    contender = CONTENDERS[name]
    spec = parse_spec("vgg16")
    words = [contender.system, spec.text, str(options.steps), str(options.backward_s), str(folder)]
    run_together([told(start, contender) for start in starts(contender, words, hosts)])


def starts(contender: Contender, words: list[str], hosts: list[Host]) -> list[Start]:
    """The processes of a turn, each in its namespace."""
    if contender.system == "kvdist":
        return kvdist_starts(worker_command(WORKER, *words), hosts)
    usual = worker_script("mxnet_worker.py")
    found = mxnet_starts_inside(words, hosts)
    return [replace(one, command=[worker_script(WORKER) if w == usual else w for w in one.command]) for one in found]


def told(start: Start, contender: Contender) -> Start:
    return replace(start, environment=start.environment | contender.variables)


def row(label: str, steps: Steps) -> list[str]:
    """Medians in milliseconds, and the span of the first layer's. A layer is a weight and a bias."""
    first = sorted(step[1] for step in steps)
    columns = [[step[i] for step in steps] for i in (1, -FULLY_CONNECTED - 1, -1)]
    medians = [f"{statistics.median(column) * 1e3:.0f}" for column in columns]
    return [label, medians[0], f"{first[0] * 1e3:.0f} to {first[-1] * 1e3:.0f}", *medians[1:]]


def table(rows: list[list[str]], options: argparse.Namespace) -> str:
    spec = parse_spec("vgg16")
    head = ["", "first layer ms", "from, to", "13 convolutions ms", "all weights ms"]
    lines = [f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]
    return (
        "# The first layer on a slow line\n\n"
        f"VGG-16, {spec.payload_bytes / 1e6:.0f} MB of gradients a worker, {HOSTS} hosts with a worker and a server"
        f" each, {options.mbit} Mbit/s each\nway. Milliseconds after a backward pass of {options.backward_s:g} s,"
        f" medians over {options.turns} turns of {options.steps} steps on each\nworker. The line alone takes"
        f" {bound_s(spec, options.mbit) * 1e3:.0f} ms from the first gradient on. Made by\n"
        "`python benchmarks/p3.py --peer mxnet --write`.\n\n" + "\n".join(lines) + "\n"
    )


if __name__ == "__main__":
    main()
