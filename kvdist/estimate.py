"""``kvdist estimate``: what each way of training together would achieve on machines of known speeds, by a simple model.

Pure arithmetic; ``kvdist doctor`` applies it to measured speeds and lines. A *batch* is a machine's share of a step; at
speed 1 its step takes `step_s`. An exchange of all gradients or weights among k machines, by a ring or by servers on
the same machines, takes 2 (k - 1) / k of their bytes over the slowest line. Rates are batches in a second.
"""

from __future__ import annotations

import argparse
import math
import shlex
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BACKWARD = 2 / 3
"""Fraction of a step's time that the backward pass takes; DDP exchanges gradients during it."""
STALE = 0.8
"""Value of a gradient that may be of the previous weights: on equal machines a quota of gradients needed 1.23 times as
long as DDP to the same accuracy (a simulation, with everything tuned for each)."""
LOCAL_BATCHES = 8
"""Batches of each machine in an exchange of ``quota(..., local_steps=True)``, or as many as hide the exchange."""
WITHOUT_SERVERS = ("-s", "0", "--security", "none")
"""Words for ``kvdist-launch``: collectives between machines, which cannot be encrypted."""
OF_COLLECTIVES = "with kv.create('collective'), or DDP by torchrun"
COMMAND = "python train.py"
"""The user's command in a line to paste."""
LOCAL_STEPS = 100
"""Steps between two exchanges of ``diloco``, and upper limit of the batches of each machine in a quota."""
ALIKE = 0.05
"""Relative difference below which modes are equally good; the first of them is the simplest."""
MEASURED_S = 0.5
BATCH = 32
"""Examples in the batch of a machine, unless `batch` is set."""
SIDE = 512
"""Size of the square matrices that are multiplied to measure a machine."""


@dataclass(frozen=True)
class MachineSpeed:
    """A machine.

    Attributes:
        name: name of its host.
        speed: number of batches it computes while a machine of speed 1 computes one.
        mb_per_s: megabytes (10⁶ bytes) in a second over the slowest of its lines, in the slower direction.
    """

    name: str
    speed: float
    mb_per_s: float


@dataclass(frozen=True)
class Mode:
    """The estimate for a way of training.

    Attributes:
        name: the policy, store or command that selects it.
        rate: effective batches in a second: a batch of a machine that trains alone counts as 1.
        why: the limiting factor.
        machines: the names of the machines that take part.
        options: words for ``kvdist-launch``.
        note: a comment on the line that starts a job in this mode; '' for no comment.
    """

    name: str
    rate: float
    why: str
    machines: tuple[str, ...]
    options: tuple[str, ...] = ()
    note: str = ""


def modes(machines: Sequence[MachineSpeed], parameters: float, step_s: float, batch: int = BATCH) -> list[Mode]:
    """The estimate for each mode, the simplest mode first.

    Args:
        machines: the machines; at least one.
        parameters: number of float32 weights of the model.
        step_s: seconds that a batch takes at speed 1, without any exchange.
        batch: examples in a batch.
    """
    order = sorted(machines, key=lambda machine: -machine.speed)
    count, fastest, slowest = len(order), order[0], order[-1]
    name = fastest.name
    found = [Mode(f"{name} alone", fastest.speed / step_s, "one machine", (name,), note=f"on {name}")]
    if count == 1:
        return found

    def exchange_s(several: Sequence[MachineSpeed]) -> float:
        line = min(machine.mb_per_s for machine in several)
        return 2 * (len(several) - 1) / len(several) * 4e-6 * parameters / line

    def ddp(several: Sequence[MachineSpeed]) -> Mode:
        compute_s, exchange = step_s / several[-1].speed, exchange_s(several)
        took_s = max(compute_s, (1 - BACKWARD) * compute_s + exchange)
        why = f"waits for {several[-1].name}" if took_s == compute_s else "the network"
        names = tuple(machine.name for machine in several)
        shown = "all" if len(several) == count else ", ".join(names)
        return Mode(f"DDP on {shown}", len(several) / took_s, why, names, WITHOUT_SERVERS, OF_COLLECTIVES)

    best = max((ddp(order[:several]) for several in range(2, count + 1)), key=lambda mode: round(mode.rate, 9))
    found += dict.fromkeys((best, ddp(order)))
    exchange, together = exchange_s(order), sum(machine.speed for machine in order) / step_s
    compute_s = step_s / slowest.speed
    why = f"waits for {slowest.name}" if compute_s > exchange else "the network"
    names = tuple(machine.name for machine in machines)
    found.append(Mode("dist", count / (compute_s + exchange), why, names))
    hidden = min(LOCAL_STEPS, max(LOCAL_BATCHES, math.ceil(exchange * together / count)))
    for name, batches, worth, words in (
        (f"quota({count} batches)", count, STALE, ""),
        (f"quota({count * hidden} batches, local_steps=True)", count * hidden, 1.0, ",local_steps"),
    ):
        made_s = batches / together
        why = "the sum of all speeds" if made_s >= exchange else "the network"
        rate, options = worth * batches / max(made_s, exchange), ("--policy", f"quota:{batches * batch}{words}")
        found.append(Mode(name, rate, why, names, options, f"for batches of {batch} examples (--batch)"))
    round_s = LOCAL_STEPS * compute_s + exchange
    why = f"waits for {slowest.name}" if LOCAL_STEPS * compute_s > exchange else "the network"
    options = ("--policy", f"diloco:{LOCAL_STEPS}")
    found.append(Mode(f"diloco({LOCAL_STEPS})", LOCAL_STEPS * count / round_s, why, names, options))
    return found


def best_of(found: Sequence[Mode]) -> Mode:
    """The fastest mode, or the simplest of those that are hardly slower."""
    most = max(mode.rate for mode in found)
    return next(mode for mode in found if mode.rate >= (1 - ALIKE) * most)


def line_to_paste(mode: Mode, hosts: Sequence[str] = ()) -> str:
    """The command that starts a job in this mode.

    Args:
        mode: the mode.
        hosts: the words that tell ``kvdist-launch`` the hosts; empty: a list of the names of the machines.
    """
    words = [*(hosts or ("-H", ",".join(mode.machines))), "-n", str(len(mode.machines)), *mode.options]
    line = COMMAND if len(mode.machines) == 1 else f"kvdist-launch {shlex.join(words)} {COMMAND}"
    return f"{line}  # {mode.note}" if mode.note else line


def estimate(found: Sequence[Mode]) -> str:
    """The table of modes, and the recommended mode."""
    width = max(len(mode.name) for mode in found)
    alone = found[0].rate
    lines = [f"{'':<{width}}  × alone  limited by"]
    lines += [f"{mode.name:<{width}}  {mode.rate / alone:7.2f}  {mode.why}" for mode in found]
    best = best_of(found)
    lines += ["", f"take {best.name}: {best.rate / alone:.2f} times the rate of {found[0].name}"]
    return "\n".join(lines)


def measure_gflops() -> float:
    """How fast this machine multiplies float32 matrices, by NumPy on all of its cores, in 10⁹ operations a second."""
    import numpy as np

    left, right = np.full((SIDE, SIDE), 0.5, np.float32), np.full((SIDE, SIDE), 0.25, np.float32)
    np.matmul(left, right)  # starts its threads
    count, began = 0, time.perf_counter()
    while (took_s := time.perf_counter() - began) < MEASURED_S:
        np.matmul(left, right)
        count += 1
    return 2e-9 * SIDE**3 * count / took_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``kvdist estimate``, and the function that answers as `command`."""
    parser.add_argument("--speeds", type=positives, nargs="+", metavar="V", help="machine speeds; the fastest is 1")
    parser.add_argument(
        "--mb-per-s", type=positives, nargs="+", metavar="MB", help="network speed of each machine, or of all"
    )
    parser.add_argument("--names", nargs="+", metavar="NAME", help="host names (default: machine-0 …)")
    add_model_arguments(parser)
    parser.add_argument("--measure", action="store_true", help="print only this machine's speed in GFLOP/s")
    parser.set_defaults(command=_answer)


def add_model_arguments(parser: argparse._ActionsContainer) -> None:
    """Add the arguments that describe the model to be trained."""
    parser.add_argument("--parameters", type=positive, metavar="N", help="parameters of the model, such as 30e6")
    parser.add_argument("--step", type=positive, metavar="S", help="seconds per batch on the fastest machine")
    about = "batch size of each machine (default: %(default)s)"
    parser.add_argument("--batch", type=_whole, metavar="B", default=BATCH, help=about)


def positive(text: str) -> float:
    """Parse a number above 0.

    Raises:
        argparse.ArgumentTypeError: the text is not such a number.
    """
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def positives(text: str) -> list[float]:
    """Numbers above 0, with commas or blanks between them.

    Raises:
        argparse.ArgumentTypeError: a part of the text is no such number.
    """
    return [positive(one) for one in text.replace(",", " ").split() or [text]]


def flat(lists: Iterable[Iterable[float]]) -> list[float]:
    """Flatten the numbers of an argument's words, of which each may have several."""
    return [number for numbers in lists for number in numbers]


EXAMPLE = "--speeds 1,0.6,0.4,0.25 --mb-per-s 110 --parameters 30e6 --step 0.3"


def _whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, at least 1")
    return int(text)


def _answer(options: argparse.Namespace) -> tuple[str, int]:
    if options.measure:
        return f"{measure_gflops():.3f}", 0
    missing = [
        f"--{name.replace('_', '-')}"
        for name in ("speeds", "mb_per_s", "parameters", "step")
        if getattr(options, name) is None
    ]
    if missing:
        return f"kvdist estimate: {', '.join(missing)} missing; write, for example: kvdist estimate {EXAMPLE}", 2
    speeds, lines = flat(options.speeds), flat(options.mb_per_s)
    count = len(speeds)
    lines = lines * count if len(lines) == 1 else lines
    names = [name for word in options.names or () for name in word.replace(",", " ").split()]
    names = names or [f"machine-{number}" for number in range(count)]
    for option, values in (("--mb-per-s", len(lines)), ("--names", len(names))):
        if values != count:
            return f"kvdist estimate: {option} has {values} values for {count} machines of --speeds", 2
    most = max(speeds)
    machines = [MachineSpeed(name, speed / most, line) for name, speed, line in zip(names, speeds, lines, strict=True)]
    found = modes(machines, options.parameters, options.step, options.batch)
    return f"{estimate(found)}\n  {line_to_paste(best_of(found))}", 0
