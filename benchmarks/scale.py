"""How far the design carries, beyond this machine: kvdist's own machines under a modelled network, up to 1,000 workers.

    python benchmarks/scale.py                        # predictions; some minutes on an idle machine
    python benchmarks/scale.py --validate             # and beside them real runs on this machine, at 2, 4 and 8 workers
    python benchmarks/scale.py --shape 1000,100,separate,sync
    python benchmarks/scale.py --validate --write     # all of it, to results/scale.json, scale.md and scale.png

Efficiency is the cost model's least time over the predicted one. With M bytes of gradients a worker, n workers, k
servers and cards of B bytes per second each way, the least time is max(M/B, nM/(kB)) with servers on machines of their
own, and ((k-1)/k + (n-1)/k) M/B where k of the workers' machines have one too: for k = n the 2(n-1)M/(nB) of a ring
all-reduce.
`modelled.py` says what is real here and what is modelled.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster import end_on_terminate, machine
from costs import measure_costs
from modelled import Card, Costs
from models import parse_spec
from simulated import Machines, Prediction, Shape, predict, predict_forming
from validation import validate
from workers.workload import Spec

RESULTS = Path(__file__).resolve().parent / "results"
LAYOUTS = ("colocated", "separate")
LARGE = 100
"""Workers from which one step is counted."""
MANY = 50
"""So many workers stand for all of a cluster of more, where they have hosts of their own."""
COSTS_REPEATS = 3

SHAPES = [
    *(Shape(n, n, layout, mode) for mode in ("sync", "async") for layout in LAYOUTS for n in (8, 32)),
    *(Shape(100, 100, layout) for layout in LAYOUTS),
    *(Shape(100, 10, mode=mode) for mode in ("sync", "async")),
    *(Shape(1000, 100, mode=mode) for mode in ("sync", "async")),
]

COLUMNS = {
    "workers": "{:d}",
    "servers": "{:d}",
    "layout": "{}",
    "mode": "{}",
    "step ms": "{:.0f}",
    "bound ms": "{:.0f}",
    "efficiency": "{:.0%}",
    "ring ms": "{:.0f}",
    "messages a server": "{:.0f}",
    "messages a worker": "{:.0f}",
    "server busy": "{:.0%}",
    "scheduler busy": "{:.1%}",
    "formed s": "{:.1f}",
    "of that scheduler s": "{:.1f}",
    "one stands for": "{:d}",
    "processor s": "{:.0f}",
    "MB": "{:.0f}",
}
"""Of the table, and how their values are written."""


@dataclass(frozen=True)
class Result:
    """A shape and what came of it."""

    shape: Shape
    prediction: Prediction
    bound_s: float
    ring_s: float
    formed: tuple[float, float] | tuple[()]
    """Seconds until the cluster is ready, and those of them in which the scheduler works; asked of ``sync`` only."""
    stands_for: int
    """How many workers were taken as one."""
    took_s: float
    """Of this machine's processor."""
    peak_bytes: int
    """Of this machine's memory."""

    def row(self) -> dict[str, Any]:
        """A value for each column."""
        shape, found = self.shape, self.prediction
        values: list[Any] = [shape.workers, shape.servers, shape.layout, shape.mode]
        values += [found.step_s * 1e3, self.bound_s * 1e3, self.bound_s / found.step_s, self.ring_s * 1e3]
        values += [found.server_messages, found.worker_messages, found.server_busy, found.scheduler_busy]
        values += [*(self.formed or (None, None)), self.stands_for, self.took_s, self.peak_bytes / 1e6]
        return dict(zip(COLUMNS, values, strict=True))


def cells(row: dict[str, Any]) -> list[str]:
    """A row as it is printed."""
    return ["" if row[name] is None else form.format(row[name]) for name, form in COLUMNS.items()]


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    costs = least_of([measure_costs(min) for _ in range(COSTS_REPEATS)])
    print(f"as measured here: {', '.join(f'{name} {value:.3g}' for name, value in vars(costs).items())}")
    validations = validate(options.spec, options.turns) if options.validate else []
    machines = Machines(options.cores, Card(options.gbit * 1e9 / 8, options.latency_us * 1e-6))
    print(
        f"\n{options.spec} ({options.spec.payload_bytes / 1e6:.1f} MB), {options.gbit:g} Gbit/s, "
        f"{options.latency_us:g} us, {machines.cores} cores a host: predictions\n{' | '.join(COLUMNS)}"
    )
    rows = []
    one = partial(predict_alone, spec=options.spec, machines=machines, costs=costs, together_max=options.together)
    # Each in a process of its own, which begins with clean memory and tells how much it took.
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for result in pool.imap(one, options.shape or SHAPES, chunksize=1):
            rows.append(result.row())
            print(" | ".join(cells(rows[-1])), flush=True)
            if options.write:  # each time, so that a run that is ended keeps what it has
                write(options, costs, [validation.row() for validation in validations], rows)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicts clusters beyond this machine.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--shape", type=Shape.parse, action="append", help="WORKERS,SERVERS,LAYOUT,MODE")
    parser.add_argument("--gbit", type=float, default=10.0, help="of each card, each way (default: 10)")
    parser.add_argument("--latency-us", type=float, default=50.0, help="from card to card (default: 50)")
    parser.add_argument("--cores", type=int, default=8, help="of each host (default: 8)")
    parser.add_argument("--validate", action="store_true", help="real runs on this machine beside predictions of them")
    parser.add_argument("--turns", type=int, default=3, help="fresh real clusters for each validation")
    parser.add_argument("--together", type=int, default=MANY, help=f"workers that may stand for more (default: {MANY})")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="predictions at once (default: the cores)")
    parser.add_argument("--write", action="store_true", help="keep what comes out in results/")
    return parser.parse_args()


def predict_alone(shape: Shape, spec: Spec, machines: Machines, costs: Costs, together_max: int) -> Result:
    """One prediction; that of the cluster's forming is always of all its processes."""
    started = time.process_time()
    steps, stands_for = 1 if shape.workers >= LARGE else 2, representatives(shape, together_max)
    found = predict(shape, spec, machines, costs, steps, stands_for=stands_for)
    formed: tuple[float, float] | tuple[()] = ()
    if shape.mode == "sync":
        every = stands_for == 1
        formed = (found.formed_s, found.formed_scheduler_s) if every else predict_forming(shape, spec, machines, costs)
    took_s = time.process_time() - started
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size, card = spec.payload_bytes, machines.card
    least, ring = bound_s(shape, size, card), ring_s(shape.workers, size, card)
    return Result(shape, found, least, ring, formed, stands_for, took_s, peak_bytes)


def least_of(costs: list[Costs]) -> Costs:
    """Each cost by itself: what else disturbs this machine is not part of others."""
    return Costs(**{name: min(vars(one)[name] for one in costs) for name in vars(costs[0])})


def representatives(shape: Shape, together_max: int) -> int:
    """How many workers one stands for."""
    many = shape.layout == "separate" and shape.workers > together_max and shape.workers % together_max == 0
    return shape.workers // together_max if many else 1


def bound_s(shape: Shape, payload_bytes: int, card: Card) -> float:
    """The cost model's least time of a step."""
    once, n, k = payload_bytes / card.bytes_per_s, shape.workers, shape.servers
    if shape.layout == "colocated":
        return once * ((k - 1) + (n - 1)) / k
    return once * max(1.0, n / k)


def ring_s(workers: int, payload_bytes: int, card: Card) -> float:
    """The cost model of a ring all-reduce, with the latency of its 2(n-1) rounds."""
    rounds = 2 * (workers - 1)
    return rounds * (payload_bytes / workers / card.bytes_per_s + card.latency_s)


def write(
    options: argparse.Namespace, costs: Costs, validations: list[dict[str, Any]], rows: list[dict[str, Any]]
) -> None:
    """Keep a run for others to read."""
    told = {
        "machine": machine(),
        "spec": options.spec.text,
        "gbit": options.gbit,
        "latency_us": options.latency_us,
        "cores": options.cores,
        "costs": asdict(costs),
        "validations": validations,
        "results": rows,
    }
    (RESULTS / "scale.json").write_text(json.dumps(told, indent=1) + "\n")
    (RESULTS / "scale.md").write_text(markdown(options, validations, rows))
    try:
        from plot import draw_scale
    except ImportError:
        print("no plot: matplotlib is not installed")
    else:
        draw_scale(told, RESULTS / "scale.png")


def markdown(options: argparse.Namespace, validations: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Beyond one machine: predictions",
        "",
        f"{options.spec} float32 ({options.spec.payload_bytes / 1e6:.1f} MB), hosts of {options.cores} cores with",
        f"cards of {options.gbit:g} Gbit/s and {options.latency_us:g} us between them. Made by",
        "`python benchmarks/scale.py --validate --write`. Ring is the cost model of a ring all-reduce among the",
        "workers, with nothing but the line. Processor s and MB are what the prediction itself took.",
        "",
        *table(list(COLUMNS), [cells(row) for row in rows]),
        "",
    ]
    if validations:
        names = [name for name in validations[0] if name != "processors"]
        lines += [
            "## Validation",
            "",
            "Real clusters with 2 servers on the machine in `scale.json`, by TCP, beside predictions of them. The",
            "processor time is that of all threads of all processes. `others`: the share of the processors that other",
            "work on the machine had; a ratio is that of the prediction to the time without that share.",
            "",
            *table(names, [[str(row[name]) for name in names] for row in validations]),
            "",
        ]
    return "\n".join(lines)


def table(names: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(one)} |" for one in (names, ["---"] * len(names), *rows)]


if __name__ == "__main__":
    main()
