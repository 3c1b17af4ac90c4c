"""Images per second of training on two workers: kvdist's Trainer beside torch DDP (gloo) and one process on one core.

    python benchmarks/end_to_end.py --model mlp --model transformer --model resnet18

Efficiency is what W workers train per second over W times what one process trains. All systems take turns; each must
end with the same weights on all its workers, and kvdist must end where DDP does.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cluster import Start, end_on_terminate, environment, launch_command, run_together, worker_command
from peers.environments import Absent
from peers.torch_gloo import torch_starts
from systems import Measured, take_turns

BATCHES = {"mlp": 64, "transformer": 4, "resnet18": 32}
SYSTEMS = {
    "alone": "one process, one core",
    "apart": "as many processes, each alone",
    "kvdist": "kvdist Trainer",
    "kvdist-overlap": "kvdist Trainer, overlap=True",
    "kvdist-share": "kvdist Trainer, share_weights=True",
    "collective": "kvdist Trainer, collective",
    "collective-overlap": "kvdist Trainer, collective, overlap=True",
    "ddp": "torch DDP (gloo)",
    "ddp-views": "torch DDP (gloo), gradient_as_bucket_view",
}
WITHOUT_EXCHANGE = ("alone", "apart")
TRAINER_ARGUMENTS = {"kvdist-overlap": "overlap", "kvdist-share": "share_weights", "collective-overlap": "overlap"}
MOVED_TOLERANCE = 0.01
"""Relative, of how far all weights together have moved: the systems add floats in different orders, and training
magnifies that: 2 % of a single parameter within 5 steps of ResNet-18. A sum instead of an average doubles it."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Training:
    """What is trained, by how many, for how long."""

    model: str
    workers: int = 2
    servers: int = 2
    steps: int = 30
    warmup: int = 5

    def __str__(self) -> str:
        return f"{self.model}, {self.workers} workers, batches of {BATCHES[self.model]}"

    def images_per_s(self, system: str, measured: Measured) -> float:
        """What all workers of a system train in a second."""
        return BATCHES[self.model] * (1 if system == "alone" else self.workers) / measured.median_s


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    for model in options.model or list(BATCHES):
        steps = options.steps or (6 if model == "resnet18" else 30)
        training = Training(model, options.workers, options.servers, steps)
        print_table(training, measure(training, options.system or list(SYSTEMS), options.turns))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures training.")
    parser.add_argument("--model", choices=list(BATCHES), action="append", help="may be repeated; default: all")
    parser.add_argument("--system", choices=list(SYSTEMS), action="append", help="may be repeated; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--steps", type=int, help="timed steps in each turn (default: 30, and 6 for ResNet-18)")
    parser.add_argument("--turns", type=int, default=3)
    return parser.parse_args()


def measure(
    training: Training,
    systems: list[str],
    turns: int,
    start: Callable[[Training, str, str], list[Start]] | None = None,
) -> dict[str, Measured]:
    """Have these systems train in turns; the seconds of their steps, by system, in the order given.

    Args:
        start: the processes of one turn, given training, system and folder; None for those of `starts`.
    """
    ends: dict[str, list[float]] = {}

    def one_turn(system: str, folder: str) -> None:
        run_together((start or starts)(training, system, folder))
        if system in WITHOUT_EXCHANGE:
            return
        ends[system] = same_weights(Path(folder))
        compare(ends)

    return take_turns(systems, one_turn, turns)


def starts(training: Training, system: str, folder: str) -> list[Start]:
    """The processes of one turn."""
    command = command_of(training, system, folder)
    if system.startswith("ddp"):
        return torch_starts(training.workers, command, ONE_THREAD)
    if system in WITHOUT_EXCHANGE:
        ranks = range(1 if system == "alone" else training.workers)
        return [Start(command, environment(**ONE_THREAD, RANK=str(rank))) for rank in ranks]
    servers = 0 if system.startswith("collective") else training.servers
    require_argument(TRAINER_ARGUMENTS.get(system))
    return [Start(launch_command(training.workers, servers, command), environment(**ONE_THREAD))]


def command_of(training: Training, system: str, folder: str) -> list[str]:
    """The argument list of one worker."""
    words = ["--system", system, "--model", training.model, "--out", folder]
    words += ["--steps", str(training.steps), "--warmup", str(training.warmup)]
    return worker_command("train_worker.py", *words)


def require_argument(name: str | None) -> None:
    """Leave a system out whose Trainer argument this version does not have."""
    try:
        from kvdist import Trainer
    except ImportError as error:
        raise Absent(str(error)) from error
    if name and name not in inspect.signature(Trainer).parameters:
        raise Absent(f"this version's Trainer has no argument {name}")


def same_weights(folder: Path) -> list[float]:
    """How far each parameter has moved from its first value, which must be the same on all workers.

    Raises:
        RuntimeError: it is not: whatever was fast, it was not training.
    """
    ends = [json.loads(file.read_text())["moved"] for file in sorted(folder.glob("*.end"))]
    if not ends or any(end != ends[0] for end in ends):
        raise RuntimeError(f"the {len(ends)} workers ended with different weights")
    return list(ends[0])


def compare(ends: dict[str, list[float]]) -> None:
    """What several workers have trained must be the same, whichever system they used.

    Raises:
        RuntimeError: it is not.
    """
    together = {system: end for system, end in ends.items() if system not in WITHOUT_EXCHANGE}
    first, expected = next(iter(together.items()))
    for system, end in together.items():
        if not math.isclose(sum(end), sum(expected), rel_tol=MOVED_TOLERANCE):
            raise RuntimeError(f"{system} has moved the weights by {sum(end):.6g}, {first} by {sum(expected):.6g}")


def print_table(training: Training, measured: dict[str, Measured]) -> None:
    """One line a system."""
    print(f"\n{training}")
    print(f"{'':36} {'step, ms':>9} {'images/s':>9} {'efficiency':>11}")
    single = measured.get("alone", Measured())
    for system, one in measured.items():
        if not one.seconds:
            print(f"{SYSTEMS[system]:36} left out: {one.left_out.splitlines()[-1]}")
            continue
        rate = training.images_per_s(system, one)
        workers = 1 if system == "alone" else training.workers
        share = rate / (workers * training.images_per_s("alone", single)) if single.seconds else math.nan
        print(f"{SYSTEMS[system]:36} {one.median_s * 1e3:9.1f} {rate:9.1f} {share:11.0%}", flush=True)


if __name__ == "__main__":
    main()
