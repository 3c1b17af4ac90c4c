"""How much of the sum of their speeds up to 1,000 unequal machines make under a quota, by simulation, while some die.

    python benchmarks/scale_unequal.py                      # hours; prints a table. A case of 1,000: 12 to 25 minutes
    python benchmarks/scale_unequal.py --write              # and keeps its rows in results/scale_unequal.md
    python benchmarks/scale_unequal.py --shape 256,quota,1

kvdist's own machines on the modelled network of `scale.py`. Speeds fall evenly from 1 to a quarter. A batch of 32
examples takes 4 s at speed 1, and a fifth more or less. With gradients a version is due after 32 examples for each
worker, with local steps after eight times as many; a server counts them by reports, as in training. A machine that
dies loses what it has made since its last push, and is replaced after a minute. The launcher says at once that it was
killed; a host that falls silent would hold up everybody for its patience. What counts is the examples of complete
versions. Plain `dist`, and DDP, would go at the pace of the slowest: at 40 % of the sum of these speeds.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from cluster import end_on_terminate
from modelled import Card, Clock, Costs, Network, Process
from models import parse_spec
from simulated import (
    NEVER_S,
    STORE,
    Exercise,
    Machines,
    Program,
    Shape,
    User,
    long_headers_read_once,
    make_node,
    no_garbage,
    place,
    shrunk_config,
    shrunk_thresholds,
)
from workers.workload import Spec

from kvdist.core.machine import ChildEnded
from kvdist.core.worker.requests import KeyInfo, ReportProgress, RunKind, TakePart, Transfer
from kvdist.nodes import NodeId, Role
from kvdist.protocol.messages import Due, DueWhen, Flag, Progress

RESULTS = Path(__file__).resolve().parent / "results"
BATCH, BATCH_S = 32, 4.0
"""Examples of a gradient, and the seconds that it takes at speed 1."""
SLOWEST = 0.25
BATCHES = {"quota": 1, "quota, local steps": 8}
"""Of each worker, on average, in a version."""
AWAY_S = 60.0
"""Until a machine that died is replaced."""
WARM_UP_S = 120.0
HORIZON_S = {"quota": 300.0, "quota, local steps": 1200.0}
"""What is simulated behind that: some fifty versions of gradients, or 24 of local steps."""
SHRINK = 1024
CASES = [(workers, way, dying) for workers in (64, 256, 1000) for way in BATCHES for dying in (0.0, 0.01, 0.75)]
"""Workers, policy, and the share that dies in an hour: of 0.75 a quarter in 20 minutes."""


class Trainee(User):
    """A worker that computes at its own pace, reports, and pushes when it is due; see `kvdist.training.quota`."""

    def __init__(self, rank: int, process: Process, exercise: Exercise, job: Job, life: int) -> None:
        self._job, self._life, self.is_dead = job, life, False
        self.counted: list[tuple[float, int]] = []
        """When its pushes were in a version, and of how many examples."""
        self._samples, self._pushed = 0, 0
        self._due: Future[Due | None] | None = None
        self._under_way: Future[Any] | None = None
        self._piece: Any = None
        self._chance = random.Random(f"{rank} {life}")
        self._process = process
        super().__init__(rank, process.node, exercise)

    def _work(self) -> Program:
        submit, exercise = self._node.submit, self._exercise
        if self._life == 0:
            yield from self._begin()
        else:
            yield from self._declare()
            yield submit(lambda number: TakePart(number, STORE))
        self.steps_done = 0
        info: KeyInfo = exercise._placed[0]
        self._piece = info.slices[0]
        self._compute()

    def _compute(self) -> None:
        took = BATCH_S / self._job.speeds[self._rank] * self._chance.uniform(0.8, 1.2)
        self._exercise.clock.at(self._exercise.clock.now + took, self._end_batch)

    def _end_batch(self) -> None:
        if self.is_dead:
            return
        self._samples += BATCH
        if self._due is None or not self._due.done():
            self._report()
        self._push_if_due()
        self._compute()

    def _report(self) -> None:
        progress = Progress(self._piece.number, 0, self._samples, DueWhen.QUOTA, self._job.quota, False, False)
        self._due = self._node.submit(lambda number: ReportProgress(number, self._piece.server, progress))

    def advance(self) -> None:
        super().advance()
        if self.steps_done >= 0 and not self.is_dead:
            self._push_if_due()

    def _push_if_due(self) -> None:
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()
            self.counted.append((self._exercise.clock.now, self._pushed))
            self._under_way = None
        due = self._due
        if due is None or not due.done() or due.result() is None or self._under_way is not None:
            return
        self._pushed, self._samples = self._samples, 0
        runs = [replace(run, samples=self._pushed) for run in self._exercise.exchange()]
        for run in runs:
            run.flags = run.flags | int(Flag.WEIGHTED) | (0 if self._pushed else int(Flag.EMPTY))
            if not self._pushed:
                run.payload = memoryview(b"")
        self._under_way = self._node.submit(lambda number: Transfer(number, RunKind.PUSHPULL, "step", runs))
        self._report()


@dataclass(frozen=True)
class Goodput:
    """What came of a case."""

    workers: int
    way: str
    dying: float
    minutes: float
    deaths: int
    of_all: float
    """Examples that counted, of what all machines would make alone if none died."""
    of_present: float
    """The same, of what those make that are there."""
    version_s: float
    server_busy: float
    processor_s: float


class Job:
    """A cluster of unequal workers, some of which die."""

    def __init__(self, workers: int, way: str, spec: Spec, machines: Machines, costs: Costs) -> None:
        self.speeds = [1 - (1 - SLOWEST) * rank / (workers - 1) for rank in range(workers)]
        self.quota, self.horizon_s = BATCHES[way] * BATCH * workers, HORIZON_S[way]
        shape = Shape(workers, max(2, workers // 125), mode="quota")
        self.network = Network(Clock(), costs, SHRINK)
        config = shrunk_config(shape, SHRINK)
        patient = replace(config.limits, patience_s=NEVER_S)
        self._config = replace(config, on_loss="continue", limits=patient)
        self._work = Exercise(spec, self.network, "quota", self._config.limits.slice_bytes, 0, False)
        self.processes: dict[str, Process] = {}
        self.users: list[Trainee] = []
        self.newest: dict[int, Trainee] = {}
        self.away: list[tuple[float, float, float]] = []
        """Speed of a machine that died, when, and when another took its place."""
        for name, host in place(shape, self.network.clock, machines).items():
            role, _, rank = name.partition("-")
            self._start(Role(role), int(rank or 0), host, 0)

    def _start(self, role: Role, rank: int, host: Any, life: int) -> None:
        name = str(role) if role is Role.SCHEDULER else f"{role}-{rank}"
        charge = partial(self._charge, name, self.network.costs.update_byte_s * SHRINK)
        make = partial(make_node, self._config, role, rank, charge, life=life)
        is_worker = role is Role.WORKER
        # A thousand workers' turns are short beside their batches, and their clock would take most of the simulation.
        stopwatch = time.perf_counter if is_worker else time.thread_time
        process = self.processes[name] = Process(self.network, host, make, copies=is_worker, stopwatch=stopwatch)
        if is_worker:
            user = self.newest[rank] = Trainee(rank, process, self._work, self, life)
            self.users.append(user)
            process.after_turn = user.advance
            user.advance()

    def _charge(self, name: str, byte_s: float, nbytes: int) -> None:
        self.processes[name].byte_work_s += nbytes * byte_s

    def kill(self, rank: int) -> None:
        """A machine dies, unless it is away; the launcher says so, and starts another one later."""
        user, clock = self.newest[rank], self.network.clock
        if user.is_dead or user.steps_done < 0:
            return
        user.is_dead = True
        process = self.processes[f"worker-{rank}"]
        process.crash()
        self.processes["scheduler"].node.post(ChildEnded(NodeId(Role.WORKER, rank), "killed", False, user._life))
        self.away.append((self.speeds[rank], clock.now, clock.now + AWAY_S))
        host, life = process.transport.host, user._life + 1
        clock.at(clock.now + AWAY_S, lambda: self._start(Role.WORKER, rank, host, life))

    def run(self, dying: float) -> Goodput:
        clock, began = self.network.clock, time.process_time()
        while any(user.steps_done < 0 for user in self.users):
            assert clock.step()
        start = clock.now + WARM_UP_S
        end = start + self.horizon_s
        chance = random.Random(1)
        for _ in range(round(dying * self.horizon_s / 3600 * len(self.speeds))):
            rank = chance.randrange(len(self.speeds))
            clock.at(chance.uniform(start, end), partial(self.kill, rank))
        servers = [process for name, process in self.processes.items() if name.startswith("server")]
        busy = None
        while clock.now < end:
            assert clock.step()
            if busy is None and clock.now >= start:
                busy = [server.busy_s for server in servers]
        assert busy is not None
        counted = sum(samples for user in self.users for at, samples in user.counted if start <= at < end)
        most = sum(self.speeds) * BATCH / BATCH_S * self.horizon_s
        gone = sum(speed * (min(back, end) - at) for speed, at, back in self.away) * BATCH / BATCH_S
        versions = max(sum(start <= at < end for at, _ in user.counted) for user in self.users)
        return Goodput(
            len(self.speeds), "", dying, self.horizon_s / 60, len(self.away), counted / most, counted / (most - gone),
            self.horizon_s / max(1, versions),
            max(server.busy_s - before for server, before in zip(servers, busy, strict=True)) / self.horizon_s,
            time.process_time() - began,
        )  # fmt: skip


def goodput(case: tuple[int, str, float]) -> Goodput:
    """What a cluster makes; alone in its process."""
    workers, way, dying = case
    kept = json.loads((RESULTS / "scale.json").read_text())
    machines = Machines(8, Card(10e9 / 8, 50e-6))
    with shrunk_thresholds(SHRINK), no_garbage(), long_headers_read_once():
        job = Job(workers, way, parse_spec("1x1048576"), machines, Costs(**kept["costs"]))
        return replace(job.run(dying), way=way)


COLUMNS = "workers, policy, dying an hour, minutes, deaths, of all speeds, of those there, version s, server busy"


def row(found: Goodput) -> str:
    values = [str(found.workers), found.way, f"{found.dying:.0%}", f"{found.minutes:g}", str(found.deaths)]
    values += [f"{found.of_all:.1%}", f"{found.of_present:.1%}", f"{found.version_s:.1f}", f"{found.server_busy:.1%}"]
    return f"| {' | '.join(values)} |"


def write(found: Goodput) -> None:
    """Keep this row beside those of other cases, in the order of `CASES`."""
    path, names = RESULTS / "scale_unequal.md", COLUMNS.split(", ")
    head = [f"| {' | '.join(names)} |", f"| {' | '.join('---' for _ in names)} |"]
    kept = [line for line in path.read_text().splitlines() if line.startswith("| ")][2:] if path.exists() else []
    rows = {tuple(line.split(" | ")[:3]): line for line in [*kept, row(found)]}
    places = [(f"| {workers}", way, f"{dying:.0%}") for workers, way, dying in CASES]
    lines = [
        rows[case] for case in sorted(rows, key=lambda case: places.index(case) if case in places else len(places))
    ]
    said = ["# Unequal workers by the thousand: predictions", "", (__doc__ or "").split("\n\n")[2].strip(), ""]
    path.write_text("\n".join([*said, *head, *lines, ""]))


def parse(text: str) -> tuple[int, str, float]:
    workers, way, dying = text.split(",")
    return int(workers), {"local": "quota, local steps"}.get(way, way), float(dying)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", type=parse, action="append", help="WORKERS,quota or local,SHARE DYING AN HOUR")
    parser.add_argument("--jobs", type=int, default=1, help="simulations at once")
    parser.add_argument("--write", action="store_true", help="keep the rows in results/scale_unequal.md")
    options = parser.parse_args()
    end_on_terminate()
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=1) as pool:
        for found in pool.imap(goodput, options.shape or CASES, chunksize=1):
            print(row(found), f"{found.processor_s:.0f} s", flush=True)
            if options.write:
                write(found)


if __name__ == "__main__":
    main()
