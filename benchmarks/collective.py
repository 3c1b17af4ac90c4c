"""Sums without servers: kvdist's collective store beside torch gloo, DDP and Horovod, and beside its own servers.

    python benchmarks/collective.py                       # everything
    python benchmarks/collective.py --only small --turns 1 --steps 5 --without horovod

Writes ``results/collective.json``, ``.md`` and ``.png`` after each contest. All systems take turns. Horovod needs its
own environment, which ``peers/horovod.sh`` builds on the first use, in some ten minutes.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import end_to_end
import namespaces
import systems
from cluster import end_on_terminate, machine
from end_to_end import Training
from models import parse_spec
from peers.environments import Absent
from systems import Measured, Work
from targets import Contest, Line

RESULTS = Path(__file__).resolve().parent / "results"
PEERS = ("gloo-tensors", "gloo-packed", "gloo-flat", "ddp", "horovod")
TRAINED = ("collective", "collective-overlap", "ddp", "ddp-views")
LARGE, SMALL = parse_spec("25x1048576"), parse_spec("1000x1000")
SIZES = (1024, 16384, 131072, 1048576)
PUBLISHED = "Horovod publishes 90 % (Inception V3, ResNet-101) and 68 % (VGG-16) on 512 GPUs of 128 machines"


@dataclass(frozen=True)
class Row:
    """A ratio: the peer's median over ours; at least `target` is asked for.

    less: a system whose median is taken from both first.
    """

    contest: str
    ours: str
    peer: str
    target: float
    less: str = ""


CONTESTS = (
    Contest("large-2", Work(LARGE, steps=15, warmup=5), ("collective", "kvdist", *PEERS)),
    Contest("large-4", Work(LARGE, workers=4, steps=10, warmup=3), ("collective", "kvdist", *PEERS)),
    Contest("small-2", Work(SMALL, steps=30, warmup=5), ("collective", "kvdist", *PEERS)),
    Contest("mlp-2", Training("mlp"), ("alone", "apart", *TRAINED, "kvdist")),
    Contest("transformer-2", Training("transformer"), ("alone", "apart", *TRAINED, "kvdist")),
    Contest("transformer-4", Training("transformer", workers=4), ("apart", *TRAINED)),
    Contest("transformer-line", Line(Training("transformer", steps=15)), ("alone", *TRAINED)),
    *(Contest(f"bytes-{size}", Work(parse_spec(f"25x{size}"), steps=15), ("collective", "kvdist")) for size in SIZES),
)
ROWS = (
    Row("large-2", "collective", "gloo-tensors", 1.0),
    Row("large-2", "collective", "gloo-packed", 0.95),
    Row("large-2", "collective", "horovod", 1.0),
    Row("large-4", "collective", "gloo-tensors", 1.0),
    Row("large-4", "collective", "gloo-packed", 0.95),
    Row("large-4", "collective", "horovod", 1.0),
    Row("small-2", "collective", "horovod", 1.0),
    Row("small-2", "collective", "gloo-tensors", 1.0),
    Row("mlp-2", "collective", "ddp", 1.0),
    Row("mlp-2", "collective-overlap", "ddp", 1.0),
    Row("transformer-2", "collective", "ddp", 1.0),
    Row("transformer-2", "collective-overlap", "ddp", 1.0),
    Row("transformer-2", "collective", "ddp", 2.0, less="apart"),
    Row("transformer-4", "collective", "ddp", 2.0, less="apart"),
    Row("transformer-line", "collective", "ddp", 1.0),
    Row("transformer-line", "collective-overlap", "ddp", 1.0),
)


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    contests = [one for one in CONTESTS if not options.only or any(word in one.name for word in options.only)]
    record: dict[str, Any] = {"machine": machine(), "turns": options.turns, "note": options.note, "contests": {}}
    if options.add:
        record["contests"] = json.loads((RESULTS / "collective.json").read_text(encoding="utf-8"))["contests"]
    started = time.monotonic()
    for contest in contests:
        names = [name for name in contest.systems if name not in options.without]
        work = contest.work.work if isinstance(contest.work, Line) else contest.work
        work = replace(work, steps=options.steps or work.steps)
        print(f"\n[{time.monotonic() - started:.0f} s] {contest.name}: {contest.work}", flush=True)
        measured = hold(contest, work, names, options.turns)
        record["contests"][contest.name] = {"work": str(contest.work), "systems": found(work, measured)}
        write(record)
        for name, one in record["contests"][contest.name]["systems"].items():
            print(f"{name:20} {one['median_ms'] if one['median_ms'] is not None else one['left_out']}", flush=True)
    draw(record, RESULTS / "collective.png")


def hold(contest: Contest, work: Work | Training, names: list[str], turns: int) -> dict[str, Measured]:
    """Hold a contest, with these systems and as many steps as this work says."""
    if isinstance(work, Work):
        return systems.measure(work, names, turns)
    if not isinstance(contest.work, Line):
        return end_to_end.measure(work, names, turns)
    try:
        with namespaces.limited_hosts(contest.work.mbit) as hosts:
            start = namespaces.training_starts
            return end_to_end.measure(work, names, turns, lambda what, name, at: start(name, what, hosts, at))
    except Absent as error:
        return {name: Measured(left_out=str(error)) for name in names}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures sums without servers.")
    parser.add_argument("--only", action="append", default=[], help="contests whose names have this in them")
    parser.add_argument("--without", action="append", default=[], help="a system to leave out")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, help="timed steps in each turn; default: as each contest says")
    parser.add_argument("--add", action="store_true", help="keep the contests of the last run that this one leaves out")
    parser.add_argument("--note", default="", help="what else a reader must know of this run")
    return parser.parse_args()


def found(work: Work | Training, measured: dict[str, Measured]) -> dict[str, dict[str, Any]]:
    """What is kept of a contest: per system the median in milliseconds, and for training the efficiency."""
    kept: dict[str, dict[str, Any]] = {}
    alone = measured.get("alone", Measured())
    for name, one in measured.items():
        kept[name] = {"median_ms": None, "left_out": one.left_out.splitlines()[-1:] and one.left_out.splitlines()[-1]}
        if not one.seconds:
            continue
        turns = [round(1e3 * second, 3) for second in one.turn_medians_s]
        kept[name] = {"median_ms": round(1e3 * one.median_s, 3), "turns_ms": turns, "left_out": ""}
        if isinstance(work, Training):
            rate = work.images_per_s(name, one)
            kept[name]["images_per_s"] = round(rate, 1)
            if alone.seconds and name != "alone":
                kept[name]["efficiency"] = round(rate / work.workers / work.images_per_s("alone", alone), 3)
        else:
            kept[name]["payload_bytes"] = work.spec.payload_bytes
    return kept


def write(record: dict[str, Any]) -> None:
    """Keep what has been measured so far."""
    RESULTS.mkdir(exist_ok=True)
    record["rows"] = verdicts(record["contests"])
    (RESULTS / "collective.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    (RESULTS / "collective.md").write_text(markdown(record), encoding="utf-8")


def verdicts(contests: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows whose contests were held."""
    rows = []
    for row in ROWS:
        times = contests.get(row.contest, {"systems": {}})["systems"]
        ours, peer = (times.get(name, {}).get("median_ms") for name in (row.ours, row.peer))
        less = times.get(row.less, {}).get("median_ms") if row.less else 0
        is_measured = ours and peer and less is not None
        ratio = round((peer - less) / max(ours - less, 0.1), 2) if is_measured else None
        reached = "not measured" if ratio is None else "yes" if ratio >= row.target else "no"
        rows.append(asdict(row) | {"ratio": ratio, "reached": reached})
    return rows


def markdown(record: dict[str, Any]) -> str:
    """The tables, for people."""
    machine = record["machine"]
    lines = [
        "# Sums without servers",
        "",
        f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']:.1f} before, torch"
        f" {machine['torch']}; {record['turns']} turns. {record['note']}".rstrip(),
        "",
        "| contest | ours | peer | ratio | asked for | reached |",
        "|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        peer = f"{row['peer']}, of both less {row['less']}" if row["less"] else row["peer"]
        cells = (row["contest"], row["ours"], peer, row["ratio"] or "", row["target"], row["reached"])
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for name, contest in record["contests"].items():
        lines += ["", f"{name}: {contest['work']}", "", "| system | median, ms | of each turn | efficiency |"]
        lines.append("|---|---|---|---|")
        for system, one in contest["systems"].items():
            if one["median_ms"] is None:
                lines.append(f"| {system} | left out: {one['left_out']} | | |")
                continue
            efficiency = f"{one['efficiency']:.0%}" if "efficiency" in one else ""
            lines.append(f"| {system} | {one['median_ms']} | {', '.join(map(str, one['turns_ms']))} | {efficiency} |")
    lines += ["", f"Efficiency is that of one machine, whose workers share its cores and memory. {PUBLISHED}.", ""]
    return "\n".join(lines)


# The picture: what is measured with servers and without, and what the cost model says of many machines.


def all_reduce_time(machines: int) -> float:
    """Of the best all-reduce, in units of the gradients' bytes over a machine's bandwidth."""
    return 2 * (machines - 1) / machines


def servers_time(share: float) -> float:
    """Of servers on `share` times as many machines of their own; on the workers' it is that of an all-reduce."""
    return max(1.0, 1 / share)


def draw(record: dict[str, Any], path: Path) -> None:
    """Write one picture with whatever the run has measured."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(15, 6))
    sweep = [one["systems"] for name, one in record["contests"].items() if name.startswith("bytes-")]
    for system, label in (("collective", "without servers (all-reduce)"), ("kvdist", "2 servers (dist_sync)")):
        points = [(one[system]["payload_bytes"], one[system]["median_ms"]) for one in sweep if one[system]["median_ms"]]
        if points:
            left.loglog(*zip(*points, strict=True), "o-", label=label)
    left.set(xlabel="bytes of gradients per worker", ylabel="ms per step, measured", title="2 workers on one machine")
    left.grid(visible=True, which="both", alpha=0.3)
    left.set_yticks([2, 5, 10, 20, 50, 100], labels=["2", "5", "10", "20", "50", "100"])
    left.set_yticks([], minor=True)
    if sweep:
        left.legend()
    counts = range(2, 33)
    right.plot(counts, [all_reduce_time(n) for n in counts], label="all-reduce, or servers on the workers' machines")
    for share, label in ((1.0, "as many"), (0.5, "half as many"), (0.25, "a quarter as many")):
        right.plot(counts, [servers_time(share)] * len(counts), "--", label=f"servers on {label} further machines")
    right.set(xlabel="machines with a worker", ylabel="time x bandwidth / bytes", title="the cost model of a network")
    right.grid(visible=True, alpha=0.3)
    right.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


if __name__ == "__main__":
    main()
