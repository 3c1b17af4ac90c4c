"""How far the design carries, beyond this machine: kvdist's own machines under a modelled network, up to 1,000 workers.

    python benchmarks/scale.py                        # predictions; those of 100 workers and more take minutes each
    python benchmarks/scale.py --validate             # and beside them real runs on this machine, at 2, 4 and 8 workers
    python benchmarks/scale.py --shape 1000,100,separate,sync

Efficiency is the cost model's least time over the predicted one. With M bytes of gradients a worker, n workers, k
servers and cards of B bytes per second each way, the least time is max(M/B, nM/(kB)) with servers on machines of their
own, and ((k-1)/k + (n-1)/k) M/B where k of the workers' machines have one too: for k = n the 2(n-1)M/(nB) of a ring
all-reduce.
`modelled.py` says what is real here and what is modelled.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
from cluster import end_on_terminate
from costs import measure_costs
from modelled import Card, Clock, Costs, Host, ModelledTransport, Network, Process
from models import parse_spec
from systems import Work, measure
from workers.workload import Spec

from kvdist.config import ClusterConfig, Limits
from kvdist.core import answers, outbox, requests
from kvdist.core.joining import Introduction
from kvdist.core.requests import (
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Kind,
    Plan,
    Register,
    RunData,
    SetStoreOptimizer,
    Transfer,
    make_plan,
)
from kvdist.core.scheduler import Scheduler
from kvdist.core.server import Server
from kvdist.core.worker import Worker
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.reference import REFERENCE
from kvdist.node import Node
from kvdist.nodes import Role
from kvdist.optimizer.registry import create
from kvdist.version import __version__

ENDPOINT = "memory://scheduler"
STORE = 0
NEVER_S = 1e9
SHRINK = 1024
"""Of large arrays: 4 MiB become 4 KiB."""
LARGE = 100
"""Workers from which one step is counted, since each takes minutes."""
SMALL_SIZE = 16384
"""Arrays of fewer elements are not shrunk."""


LAYOUTS = ("colocated", "separate")


@dataclass(frozen=True)
class Shape:
    """A cluster to be predicted."""

    workers: int
    servers: int
    layout: str = "separate"
    """``separate``, ``colocated`` (a server beside each of the first workers), or ``one-host`` for all processes."""
    mode: str = "sync"

    @classmethod
    def parse(cls, text: str) -> Shape:
        workers, servers, layout, mode = text.split(",")
        return cls(int(workers), int(servers), layout, mode)


SHAPES = [
    *(Shape(n, n, layout, mode) for mode in ("sync", "async") for layout in LAYOUTS for n in (2, 8, 32)),
    *(Shape(100, 100, layout) for layout in LAYOUTS),
    Shape(100, 10),
    Shape(1000, 100),
    Shape(1000, 100, mode="async"),
]


@dataclass(frozen=True)
class Machines:
    """What each host has."""

    cores: int
    card: Card


@dataclass(frozen=True)
class Prediction:
    """What came of a shape."""

    step_s: float
    messages: float
    """A step, in the whole cluster."""
    server_busy: float
    """The share of a step in which the busiest server's loop works."""
    scheduler_busy: float
    formed_s: float
    """Until all workers have agreed on the keys."""


def predict(shape: Shape, spec: Spec, machines: Machines, costs: Costs, steps: int = 2) -> Prediction:
    """Run a cluster of this shape for some steps, of which the first is not counted."""
    shrink = SHRINK if min(spec.sizes) >= SMALL_SIZE else 1
    network = Network(Clock(), costs, shrink)
    with shrunk_thresholds(shrink):
        simulated = Simulated(shape, spec, network, machines, steps + 1)
        marks = [simulated.run_until(step) for step in range(steps + 2)]
    first, last = marks[1], marks[-1]
    took = last.at - first.at
    names = [name for name in first.busy_s if name.startswith("server")]
    shares = {name: (last.busy_s[name] - first.busy_s[name]) / took for name in [*names, "scheduler"]}
    messages = (last.messages - first.messages) / steps
    return Prediction(took / steps, messages, max(shares[name] for name in names), shares["scheduler"], marks[0].at)


@contextmanager
def shrunk_thresholds(shrink: int) -> Iterator[None]:
    """Sizes at which messages are joined or sent alone, for arrays that are smaller than what they stand for."""
    with (
        mock.patch.object(requests, "ALONE_BYTES_MIN", requests.ALONE_BYTES_MIN // shrink),
        mock.patch.object(outbox, "ALONE_BYTES_MIN", outbox.ALONE_BYTES_MIN // shrink),
        mock.patch.object(answers, "JOIN_BYTES_MAX", answers.JOIN_BYTES_MAX // shrink),
    ):
        yield


@dataclass(frozen=True)
class Mark:
    """The state of things when all workers have done a number of steps."""

    at: float
    messages: float
    busy_s: dict[str, float]


class Simulated:
    """A cluster of a shape, all its processes, and users that do one `pushpull` of all keys after the other."""

    def __init__(self, shape: Shape, spec: Spec, network: Network, machines: Machines, steps: int) -> None:
        self.network = network
        self.processes: dict[str, Process] = {}
        default = Limits()
        limits = replace(
            default,
            slice_bytes=default.slice_bytes // network.shrink,
            window_bytes=default.window_bytes // network.shrink,
            connect_timeout_s=NEVER_S,
            form_timeout_s=NEVER_S,
        )
        bound = max(1, ClusterConfig.bigarray_bound // network.shrink)
        config = ClusterConfig(
            Role.SCHEDULER, "scheduler", 1, shape.workers, shape.servers, bigarray_bound=bound, limits=limits
        )
        hosts = place(shape, network.clock, machines)
        self.users: list[User] = []
        sizes = [max(1, size // network.shrink) for size in spec.sizes]
        for name, host in hosts.items():
            role, _, rank = name.partition("-")
            summing_s = network.costs.sum_byte_s if shape.mode == "sync" else network.costs.update_byte_s
            charge = partial(self._charge, name, summing_s * network.shrink)
            make = partial(make_node, config, Role(role), int(rank or 0), charge)
            process = self.processes[name] = Process(network, host, make, copies=role == "worker")
            if role == "worker":
                user = User(int(rank), process.node, sizes, shape.mode, limits.slice_bytes, steps)
                self.users.append(user)
                process.after_turn = user.advance
                user.advance()

    def _charge(self, name: str, byte_s: float, nbytes: int) -> None:
        self.processes[name].byte_work_s += nbytes * byte_s

    def run_until(self, step: int) -> Mark:
        """Let time pass until every worker has done so many steps."""
        while any(user.steps_done < step for user in self.users):
            if not self.network.clock.step():
                raise RuntimeError("nothing will ever happen again")
        busy = {name: process.busy_s for name, process in self.processes.items()}
        return Mark(self.network.clock.now, self.network.counted["messages"], busy)


def place(shape: Shape, clock: Clock, machines: Machines) -> dict[str, Host]:
    """Every process's host, the scheduler first and the workers last."""
    servers, workers = ([f"{role}-{i}" for i in range(count)] for role, count in roles(shape))
    fresh = partial(Host, clock, machines.cores, machines.card)
    if shape.layout == "one-host":
        host = fresh()
        return dict.fromkeys(["scheduler", *servers, *workers], host)
    homes = [fresh() for _ in workers]
    theirs = homes[: len(servers)] if shape.layout == "colocated" else [fresh() for _ in servers]
    return {"scheduler": fresh(), **dict(zip(servers, theirs, strict=True)), **dict(zip(workers, homes, strict=True))}


def roles(shape: Shape) -> tuple[tuple[str, int], tuple[str, int]]:
    return ("server", shape.servers), ("worker", shape.workers)


Charge = Callable[[int], None]


def make_node(config: ClusterConfig, role: Role, rank: int, charge: Charge, transport: ModelledTransport) -> Node:
    """The node of one process; a server's kernels charge it for the bytes they read."""
    network, limits = transport.network, config.limits
    endpoint = transport.bind(ENDPOINT if role is Role.SCHEDULER else f"memory://{role}-{rank}")
    token = (1 if role is Role.SERVER else 2) * 1_000_000 + rank
    seats = (config.num_workers, config.num_servers)
    said = Introduction(role, token, rank, f"host-{rank}", 100 + rank, endpoint, *seats, __version__, ENDPOINT)
    now = network.clock.now

    def weighted_sum(contributions: Sequence[Array], scales: Sequence[float], dtype: DType, out: Array) -> None:
        charge(sum(array.nbytes for array in contributions))
        REFERENCE.weighted_sum(contributions, scales, dtype, out)

    machine: Scheduler | Server | Worker
    if role is Role.SCHEDULER:
        machine = Scheduler(config, now)
    elif role is Role.SERVER:
        machine = Server(said, limits, replace(REFERENCE, weighted_sum=weighted_sum), now)
    else:
        machine = Worker(said, limits, now)
    return Node(machine, transport, job=1, explain_after_s=NEVER_S, clock=lambda: network.clock.now)


Program = Generator["Future[Any]", None, None]


class User:
    """The user's thread of one worker."""

    def __init__(self, rank: int, node: Node, sizes: list[int], mode: str, run_bytes_max: int, steps: int) -> None:
        self.steps_done = -1
        """-1 until all workers have the keys."""
        self._rank = rank
        self._node = node
        self._sizes = sizes
        self._mode = mode
        self._run_bytes_max = run_bytes_max
        self._steps = steps
        self._program = self._work()
        self._awaited: Future[Any] = next(self._program)

    def advance(self) -> None:
        """Go on as far as the answers allow."""
        while self._awaited.done():
            self._awaited.result()
            try:
                self._awaited = next(self._program)
            except StopIteration:
                self._awaited = Future()  # it has nothing more to wait for

    def _work(self) -> Program:
        submit = self._node.submit
        yield submit(Register)
        keys = tuple(range(len(self._sizes)))
        shapes, dtypes = tuple((size,) for size in self._sizes), (DType.FLOAT32,) * len(keys)
        declared = submit(lambda number: DeclareKeys(number, STORE, self._mode, keys, shapes, dtypes))
        yield declared
        infos: list[KeyInfo] = list(declared.result())
        plan = make_plan(infos, self._run_bytes_max)
        results = [np.zeros(info.size, np.float32) for info in infos]
        if self._mode == "async":
            yield submit(lambda number: SetStoreOptimizer(number, STORE, create("sgd").describe()))
        if self._rank == 0:
            yield submit(lambda number: Transfer(number, Kind.INITIALISE, "init", carried(plan, None)))
        yield submit(lambda number: EnterBarrier(number, STORE))
        self.steps_done = 0
        for step in range(self._steps):
            runs = carried(plan, results)
            yield submit(lambda number, runs=runs: Transfer(number, Kind.PUSHPULL, "pushpull", runs))
            self.steps_done = step + 1


def carried(plan: Plan, results: list[Array] | None) -> list[RunData]:
    """What the runs of a plan carry: zeros, and where the answers go."""
    found = []
    for run in plan.runs:
        sinks = () if results is None else [results[piece.index][piece.start : piece.stop] for piece in run.pieces]
        flags, settings = np.zeros(len(run.ids), np.uint8), ((np.nan,) * 3,)
        extra = (flags, settings) if results is not None else ()
        found.append(RunData(run, memoryview(bytes(run.nbytes)), sinks, *extra))
    return found


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


def main() -> None:
    options = parse_arguments()
    end_on_terminate()
    card = Card(options.gbit * 1e9 / 8, options.latency_us * 1e-6)
    costs = measure_costs()
    print(f"as measured here: {', '.join(f'{name} {value:.3g}' for name, value in vars(costs).items())}")
    if options.validate:
        validate(options, costs)
    print_predictions(options, Machines(options.cores, card), costs)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Predicts clusters beyond this machine.")
    parser.add_argument("--spec", type=parse_spec, default=parse_spec("25x1048576"), help="as for push_pull.py")
    parser.add_argument("--shape", type=Shape.parse, action="append", help="WORKERS,SERVERS,LAYOUT,MODE")
    parser.add_argument("--gbit", type=float, default=10.0, help="of each card, each way (default: 10)")
    parser.add_argument("--latency-us", type=float, default=50.0, help="from card to card (default: 50)")
    parser.add_argument("--cores", type=int, default=8, help="of each host (default: 8)")
    parser.add_argument("--validate", action="store_true", help="real runs on this machine beside predictions of them")
    parser.add_argument("--turns", type=int, default=3, help="fresh real clusters for each validation")
    return parser.parse_args()


def validate(options: argparse.Namespace, costs: Costs) -> None:
    """Predict clusters on this machine alone, over TCP, and run them."""
    here = Machines(len(os.sched_getaffinity(0)), Card(float("inf"), 0.0))
    print(f"\n{options.spec}: one host of {here.cores} cores, TCP on the loopback, 2 servers")
    print(f"{'workers':>8} {'predicted ms':>13} {'measured ms':>12} {'predicted/measured':>19}")
    for workers in (2, 4, 8):
        predicted = predict(Shape(workers, 2, "one-host"), options.spec, here, costs).step_s
        work = Work(options.spec, workers=workers, steps=8, warmup=2)
        measured = measure(work, ["kvdist-tcp"], options.turns)["kvdist-tcp"]
        if not measured.seconds:
            print(f"{workers:8} {predicted * 1e3:13.1f} {'failed':>12}")
            continue
        real = measured.median_s
        print(f"{workers:8} {predicted * 1e3:13.1f} {real * 1e3:12.1f} {predicted / real:19.2f}", flush=True)


def print_predictions(options: argparse.Namespace, machines: Machines, costs: Costs) -> None:
    """One line a shape."""
    size, card = options.spec.payload_bytes, machines.card
    print(
        f"\n{options.spec} ({size / 1e6:.1f} MB), {options.gbit:g} Gbit/s, {options.latency_us:g} us, "
        f"{machines.cores} cores a host: predictions"
    )
    print(
        f"{'workers':>8} {'servers':>8} {'layout':>10} {'mode':>6} {'step ms':>9} {'bound ms':>9} {'efficiency':>11} "
        f"{'ring ms':>8} {'messages':>9} {'server busy':>12} {'scheduler':>10} {'formed s':>9} {'took s':>7}"
    )
    for shape in options.shape or SHAPES:
        started = time.monotonic()
        found = predict(shape, options.spec, machines, costs, steps=1 if shape.workers >= LARGE else 2)
        least, ring = bound_s(shape, size, card), ring_s(shape.workers, size, card)
        print(
            f"{shape.workers:8} {shape.servers:8} {shape.layout:>10} {shape.mode:>6} {found.step_s * 1e3:9.1f} "
            f"{least * 1e3:9.1f} {least / found.step_s:11.0%} {ring * 1e3:8.1f} {found.messages:9.0f} "
            f"{found.server_busy:12.0%} {found.scheduler_busy:10.1%} {found.formed_s:9.2f} "
            f"{time.monotonic() - started:7.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
