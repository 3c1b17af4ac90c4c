"""Real clusters on this machine beside their predictions: the time of a step, and the processor time that it takes.

On one host everything shares the cores, so a step takes as long as the processors' work for it. Other work on the
machine makes a step longer, but adds little to the processor time of ours. What others had of the processors during the
real steps is measured, and a step without that part of it is what a prediction is compared with.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from cluster import PLAIN_TCP, Start, environment, launch_command, run_together, worker_command
from costs import measure_costs
from modelled import Card, Costs
from simulated import ROLES, Machines, Prediction, Shape, predict
from systems import Work
from workers.workload import Spec

SERVERS = 2
WARMUP, STEPS = 3, 8
OTHERS = "others"
KINDS = [f"{role} {kind}" for role in ROLES for kind in ("turning", "carrying")]


@dataclass(frozen=True)
class Real:
    """What the steps of real clusters took."""

    seconds: list[float]
    """Of each step, the mean over the workers."""
    processor_s: list[dict[str, float]]
    """Of each step, by role and kind of thread."""
    others: list[float]
    """Of each step, the share of all cores that other work on the machine had."""

    def __add__(self, other: Real) -> Real:
        return Real(self.seconds + other.seconds, self.processor_s + other.processor_s, self.others + other.others)

    @property
    def step_s(self) -> float:
        """Median."""
        return statistics.median(self.seconds)

    @property
    def own_step_s(self) -> float:
        """Median without the part in which the cores did other work: what a step takes where there is none."""
        return statistics.median(step * (1.0 - others) for step, others in zip(self.seconds, self.others, strict=True))

    def processor_of(self, kind: str) -> float:
        """Median."""
        return statistics.median(spent[kind] for spent in self.processor_s)


@dataclass(frozen=True)
class Validation:
    """A prediction beside what happened."""

    workers: int
    predicted: Prediction
    real: Real

    def row(self) -> dict[str, object]:
        """For people and for files; milliseconds."""
        modelled_s, real_s = (sum(map(of, KINDS)) for of in (self.predicted.processor_s.get, self.real.processor_of))
        return {
            "workers": self.workers,
            "predicted_ms": round(self.predicted.step_s * 1e3, 1),
            "measured_ms": round(self.real.step_s * 1e3, 1),
            "others": round(statistics.median(self.real.others), 2),
            "measured_without_others_ms": round(self.real.own_step_s * 1e3, 1),
            "ratio": round(self.predicted.step_s / self.real.own_step_s, 2),
            "processor_predicted_ms": round(modelled_s * 1e3, 1),
            "processor_measured_ms": round(real_s * 1e3, 1),
            "processor_ratio": round(modelled_s / real_s, 2),
            "processors": {
                kind: [round(self.predicted.processor_s[kind] * 1e3, 1), round(self.real.processor_of(kind) * 1e3, 1)]
                for kind in KINDS
            },
        }


def validate(spec: Spec, turns: int) -> list[Validation]:
    """Clusters of 2, 4 and 8 workers over TCP on this machine. Costs are measured again beside each of them."""
    found = []
    for workers in (2, 4, 8):
        real, costs = Real([], [], []), []
        for _ in range(turns):
            costs.append(measure_costs())
            real += run(Work(spec, workers=workers, servers=SERVERS, steps=STEPS, warmup=WARMUP))
        found.append(Validation(workers, predict_here(workers, spec, median_of(costs)), real))
        print_validation(found[-1])
    return found


def predict_here(workers: int, spec: Spec, costs: Costs) -> Prediction:
    """A cluster on this machine alone."""
    machines = Machines(len(os.sched_getaffinity(0)), Card(float("inf"), 0.0))
    return predict(Shape(workers, SERVERS, "one-host"), spec, machines, costs, steps=4, together=True)


def median_of(costs: list[Costs]) -> Costs:
    """Each cost by itself."""
    return Costs(**{name: statistics.median(vars(one)[name] for one in costs) for name in vars(costs[0])})


def run(work: Work) -> Real:
    """One real cluster."""
    with tempfile.TemporaryDirectory(prefix="scale-") as folder:
        command = worker_command("scale_worker.py", *work.arguments("kvdist-tcp", folder))
        variables = environment(**PLAIN_TCP, OMP_NUM_THREADS="1")
        run_together([Start(launch_command(work.workers, work.servers, command), variables)])
        return read(Path(folder), work.workers)


def read(folder: Path, workers: int) -> Real:
    """What its workers wrote."""
    each = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)]
    seconds = [statistics.fmean(step) for step in zip(*each, strict=True)]
    spent = json.loads((folder / "processors.json").read_text())
    cores = len(os.sched_getaffinity(0))
    others = [step[OTHERS] / (cores * took) for step, took in zip(spent, seconds, strict=True)]
    return Real(seconds, [by_kind(step) for step in spent], others)


def by_kind(spent: dict[str, float]) -> dict[str, float]:
    """Processor time by role and kind of thread, such as ``server carrying``, of that by process."""
    found = dict.fromkeys(KINDS, 0.0)
    for name, seconds in spent.items():
        process, _, kind = name.partition(" ")
        if kind:
            found[f"{process.partition('-')[0]} {kind}"] += seconds
    return found


def print_validation(found: Validation) -> None:
    row = found.row()
    print(
        f"{row['workers']} workers: step {row['predicted_ms']} ms predicted, {row['measured_ms']} ms measured, "
        f"others had {row['others']:.0%}, without them {row['measured_without_others_ms']} ms, ratio {row['ratio']}; "
        f"processor time {row['processor_predicted_ms']} ms predicted, {row['processor_measured_ms']} ms measured, "
        f"ratio {row['processor_ratio']}",
        flush=True,
    )
    for kind, (predicted, measured) in found.row()["processors"].items():  # type: ignore[attr-defined]
        print(f"    {kind:20} {predicted:8.1f} predicted {measured:8.1f} measured")
