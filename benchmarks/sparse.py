"""Tables of rows: random rows pushed and pulled, beside MXNet; all rows beside an array; a table of a terabyte; and the
layer `Embedding` beside `torch.nn.Embedding(sparse=True)`.

    python benchmarks/sparse.py                  # all of it, about ten minutes
    python benchmarks/sparse.py --only random
    python benchmarks/sparse.py --write          # into results/sparse.json and results/sparse.md

MXNet must be given all rows at the start, by one worker, and none of its arrays may have 2 GiB: its table is one that
this leaves room for. kvdist is measured on that one as well, and on the larger one that it is made for.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster import (
    PLAIN_TCP,
    ROOT,
    Start,
    cluster_of,
    environment,
    launch_command,
    machine,
    run_together,
    running,
    worker_command,
)
from kernels import copy_bytes_per_s
from memory import memory_of
from peers.mxnet import mxnet_starts
from systems import Measured, take_turns

DIM = 64
PUSHED = 100_000
WORKERS = SERVERS = 2
LARGE_ROWS, MXNET_ROWS, ALL_ROWS = 10_000_000, 4_000_000, 400_000
DECLARED_ROWS, DECLARED_SHARE = 4_000_000_000, 0.001
EMBEDDING_RULES = ("sgd", "adagrad")
LAYERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "torch.nn.Embedding(sparse=True), one process": (0, ("--layer", "torch")),
    "kvdist.Embedding, 1 worker, 1 server": (1, ("--layer", "kvdist")),
    "the same, with prefetch": (1, ("--layer", "kvdist", "--prefetch")),
    "kvdist.Embedding with prefetch, 2 workers, 2 servers": (2, ("--layer", "kvdist", "--prefetch")),
}
"""How many workers and as many servers, 0 for none; and what they are told."""
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True)
class Work:
    """One exchange of rows."""

    rows: int
    pushed: int
    options: tuple[str, ...] = ()
    steps: int = 10
    warmup: int = 3

    def arguments(self, folder: str) -> list[str]:
        """What every worker is told."""
        numbers = {"rows": self.rows, "dim": DIM, "pushed": self.pushed, "steps": self.steps, "warmup": self.warmup}
        words = [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        return [*words, *self.options, "--out", folder]


def starts(work: Work, folder: str, *options: str, **variables: str) -> list[Start]:
    """The processes of kvdist that do it."""
    command = worker_command("kvdist_rows_worker.py", *work.arguments(folder), *options)
    return [Start(launch_command(WORKERS, SERVERS, command), environment(**variables))]


def kvdist(work: Work, *options: str, **variables: str) -> Callable[[str], None]:
    """A turn of kvdist."""
    return lambda folder: run_together(starts(work, folder, *options, **variables))


def mxnet(work: Work) -> Callable[[str], None]:
    """A turn of MXNet."""
    return lambda folder: run_together(
        mxnet_starts(WORKERS, SERVERS, work.arguments(folder), script="mxnet_rows_worker.py")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Measures tables of rows.")
    parser.add_argument("--only", choices=["random", "all", "declared", "embedding"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": machine(), "date": time.strftime("%Y-%m-%d")}
    lines: list[str] = []
    if options.only in (None, "random"):
        lines += random_rows(found, options.turns)
    if options.only in (None, "all"):
        lines += all_rows(found, options.turns)
    if options.only in (None, "declared"):
        lines += declared(found)
    if options.only in (None, "embedding"):
        lines += embedding(found, options.turns)
    print("\n".join(lines))
    if options.write:
        (RESULTS / "sparse.json").write_text(json.dumps(found, indent=1) + "\n")
        (RESULTS / "sparse.md").write_text(_page(found, lines))


def random_rows(found: dict[str, Any], turns: int) -> list[str]:
    """Random rows of a large table, with AdaGrad on the servers."""
    # Enough steps before the clock runs that most rows have been touched, and with them the memory that they lie in.
    each = [Work(rows, PUSHED, steps=20, warmup=2 * rows // (WORKERS * PUSHED)) for rows in (LARGE_ROWS, MXNET_ROWS)]
    large, same = each
    systems = {
        f"kvdist, {_millions(MXNET_ROWS)} rows, given": kvdist(same, "--whole"),
        f"MXNet 1.9.1, {_millions(MXNET_ROWS)} rows, given": mxnet(same),
        f"kvdist, {_millions(LARGE_ROWS)} rows, declared": kvdist(large),
        f"kvdist, {_millions(LARGE_ROWS)} rows, declared, TCP": kvdist(large, **PLAIN_TCP),
    }
    copy = copy_bytes_per_s(5)
    measured = take_turns(systems, lambda name, folder: systems[name](folder), turns)
    found["random"] = {name: one.turn_medians_s for name, one in measured.items()}
    found["copy_bytes_per_s"] = copy
    lines = [
        "",
        (
            f"{PUSHED} random rows of {DIM} float32 per worker and step pushed, and the same pulled; AdaGrad on the"
            f" servers; {WORKERS} workers, {SERVERS} servers:"
        ),
        "",
        "| | ms a step | rows/s pushed and pulled | of copy bandwidth |",
        "|---|---|---|---|",
    ]
    for name, one in measured.items():
        lines.append(_random_line(name, one, copy))
    names = list(systems)
    if measured[names[1]].seconds:
        ratios = _ratios(measured[names[1]], measured[names[0]])
        found["random_ratio"] = ratios
        told = f"kvdist is {statistics.median(ratios):.1f} times as fast as MXNet on the same table"
        lines += ["", f"{told} (turns: {_told(ratios)})"]
    return lines


def _random_line(name: str, one: Measured, copy: float) -> str:
    if not one.seconds:
        return f"| {name} | left out: {one.left_out} | | |"
    rows = WORKERS * PUSHED / one.median_s
    # Pushed and pulled by each worker: read and written once each, at the least.
    moved = 2 * 2 * 4 * DIM * rows
    return f"| {name} | {one.median_s * 1e3:.0f} | {rows / 1e6:.2f} M | {moved / copy:.0%} |"


def all_rows(found: dict[str, Any], turns: int) -> list[str]:
    """All rows of a table, beside the same bytes as an array."""
    work = Work(ALL_ROWS, ALL_ROWS)
    systems = {"rows": kvdist(work, "--whole"), "array": kvdist(work, "--dense")}
    measured = take_turns(systems, lambda name, folder: systems[name](folder), turns)
    ratios = _ratios(measured["rows"], measured["array"])
    found["all"] = {name: one.turn_medians_s for name, one in measured.items()}
    each = ", ".join(f"as {name} {one.median_s * 1e3:.0f} ms" for name, one in measured.items())
    return [
        "",
        (
            f"All {ALL_ROWS} rows of {DIM} float32 ({ALL_ROWS * DIM * 4 / 1e6:.0f} MB) pushed and pulled: {each};"
            f" {statistics.median(ratios):.2f} times the array (turns: {_told(ratios)})"
        ),
    ]


def declared(found: dict[str, Any]) -> list[str]:
    """What servers take for a table of a terabyte of which few rows are touched."""
    steps = round(DECLARED_ROWS * DECLARED_SHARE / (WORKERS * PUSHED))
    work = Work(DECLARED_ROWS, PUSHED, steps=steps, warmup=0)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        command = worker_command("kvdist_rows_worker.py", *work.arguments(folder))
        with running(launch_command(WORKERS, SERVERS, command), Path(folder) / "log") as launcher:
            most = 0
            while launcher.poll() is None:
                servers = [one for one in cluster_of(launcher.pid) if one.name.startswith("server")]
                try:
                    most = max(most, sum(memory_of(one.pid)[0] for one in servers))
                except (OSError, IndexError, KeyError):
                    continue  # one ended while it was looked at
                time.sleep(0.2)
    touched = steps * WORKERS * PUSHED * DIM * 4
    found["declared"] = {"declared_bytes": DECLARED_ROWS * DIM * 4, "touched_bytes": touched, "servers_bytes": most}
    return [
        "",
        (
            f"A table declared with {DECLARED_ROWS * DIM * 4 / 1e12:.2f} TB, of which {DECLARED_SHARE:.1%} was touched"
            f" ({touched / 1e9:.2f} GB of weights, as much again of AdaGrad's history): the servers took"
            f" {most / 1e9:.2f} GB together at the most"
        ),
    ]


def embedding(found: dict[str, Any], turns: int) -> list[str]:
    """A layer that is trained alone, beside torch's, whose table is in the one process that trains."""
    lines = [
        "",
        (
            f"An embedding of {_millions(MXNET_ROWS)} rows of {DIM} float32, {PUSHED} random ids a step: forward pass,"
            " backward pass and update, in ids/s of each worker:"
        ),
        "",
        "| | " + " | ".join(EMBEDDING_RULES) + " |",
        "|---" * (1 + len(EMBEDDING_RULES)) + "|",
    ]
    measured = {rule: take_turns(LAYERS, partial(_embedding_turn, rule), turns) for rule in EMBEDDING_RULES}
    found["embedding"] = {
        rule: {name: one.turn_medians_s for name, one in each.items()} for rule, each in measured.items()
    }
    for name in LAYERS:
        cells = [f"{PUSHED / measured[rule][name].median_s / 1e6:.2f} M" for rule in EMBEDDING_RULES]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _embedding_turn(rule: str, name: str, folder: str) -> None:
    nodes, options = LAYERS[name]
    arguments = Work(MXNET_ROWS, PUSHED, ("--rule", rule, *options), steps=20, warmup=10).arguments(folder)
    command = worker_command("embedding_worker.py", *arguments)
    run_together([Start(launch_command(nodes, nodes, command) if nodes else command, environment())])


def _ratios(slow: Measured, fast: Measured) -> list[float]:
    return [a / b for a, b in zip(slow.turn_medians_s, fast.turn_medians_s, strict=False)]


def _told(ratios: list[float]) -> str:
    return ", ".join(f"{ratio:.2f}" for ratio in ratios)


def _millions(rows: int) -> str:
    return f"{rows / 1e6:g} M"


def _page(found: dict[str, Any], lines: list[str]) -> str:
    described = ", ".join(f"{name} {value}" for name, value in found["machine"].items())
    title = f"# Tables of rows\n\n`python benchmarks/sparse.py --write`, {found['date']}; {described}\n"
    return title + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
