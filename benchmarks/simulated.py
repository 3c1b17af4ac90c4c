"""A cluster of kvdist's own nodes on a modelled network, and what a step of it takes. `scale.py` says what for."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

import numpy as np
from modelled import Card, Clock, Costs, Host, ModelledTransport, Network, Process
from workers.workload import Spec

from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core.joining import Introduction
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server import replies
from kvdist.core.server.server import Server
from kvdist.core.worker import requests, transfers
from kvdist.core.worker.requests import (
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Plan,
    Register,
    Run,
    RunKind,
    Transfer,
    make_plan,
)
from kvdist.core.worker.worker import Worker
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import Role
from kvdist.optimizer.registry import create
from kvdist.protocol import wire
from kvdist.protocol.messages import Configure
from kvdist.runtime.node import Node
from kvdist.version import __version__

ENDPOINT = "memory://scheduler"
STORE = 0
NEVER_S = 1e9
SHRINK = 1024
"""Of large arrays: 4 MiB become 4 KiB."""
SMALL_SIZE = 16384
"""Arrays of fewer elements are not shrunk."""
ROLES = ("scheduler", "server", "worker")


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


@dataclass(frozen=True)
class Machines:
    """What each host has."""

    cores: int
    card: Card


@dataclass(frozen=True)
class Prediction:
    """What came of a shape."""

    step_s: float
    server_messages: float
    """A step, sent and received by one server."""
    worker_messages: float
    """The same of a worker."""
    server_busy: float
    """The share of a step in which the busiest server's loop works."""
    scheduler_busy: float
    formed_s: float
    """Until all workers have agreed on the keys."""
    formed_scheduler_s: float
    """The scheduler's processor time until then."""
    processor_s: dict[str, float]
    """A step, of all processes of a role: ``server turning`` of their nodes, ``server carrying`` of transports."""


@dataclass(frozen=True)
class Mark:
    """The state of things when all workers have done a number of steps."""

    at: float
    messages: dict[str, int]
    turning_s: dict[str, float]
    carrying_s: dict[str, float]


def predict(
    shape: Shape,
    spec: Spec,
    machines: Machines,
    costs: Costs,
    steps: int = 2,
    together: bool = False,
    stands_for: int = 1,
) -> Prediction:
    """Run a cluster of this shape for some steps, of which the first is not counted.

    Args:
        together: workers wait for each other before each step, and its time is the mean of theirs.
        stands_for: each worker stands for so many; they must have hosts of their own.
    """
    if shape.workers % stands_for or (stands_for > 1 and shape.layout != "separate"):
        raise ValueError(f"{shape}: {stands_for} workers cannot be taken as one")
    shrink = SHRINK if min(spec.sizes) >= SMALL_SIZE else 1
    network = Network(Clock(), costs, shrink, shape.layout == "one-host")
    fewer = replace(shape, workers=shape.workers // stands_for)
    with shrunk_thresholds(shrink), no_garbage():
        simulated = Simulated(fewer, spec, network, machines, steps + 1, together, stands_for)
        marks = [simulated.run_until(step) for step in range(steps + 2)]
    return summary(marks, [user.seconds for user in simulated.users], together)


def predict_forming(shape: Shape, spec: Spec, machines: Machines, costs: Costs) -> tuple[float, float]:
    """Seconds until all workers of a cluster have agreed on the keys, and those in which its scheduler worked."""
    shrink = SHRINK if min(spec.sizes) >= SMALL_SIZE else 1
    with shrunk_thresholds(shrink), no_garbage():
        network = Network(Clock(), costs, shrink, shape.layout == "one-host")
        simulated = Simulated(shape, spec, network, machines, 0, False, 1)
        formed = simulated.run_until(0)
    return formed.at, formed.turning_s["scheduler"]


def summary(marks: Sequence[Mark], seconds: Sequence[Sequence[float]], together: bool) -> Prediction:
    """What the marks say, the first of which is that of a cluster without a step."""
    formed, first, last = marks[0], marks[1], marks[-1]
    steps = len(marks) - 2
    took = last.at - first.at
    counts = {name: (last.messages[name] - first.messages[name]) / steps for name in last.messages}
    turned = {name: last.turning_s[name] - first.turning_s[name] for name in last.turning_s}
    carried = {name: last.carrying_s[name] - first.carrying_s[name] for name in last.carrying_s}
    servers = [name for name in turned if name.startswith("server")]
    spent = {
        f"{role} {kind}": sum(value for name, value in values.items() if name.startswith(role)) / steps
        for role in ROLES
        for kind, values in (("turning", turned), ("carrying", carried))
    }
    return Prediction(
        step_s=fmean(one for own in seconds for one in own[1:]) if together else took / steps,
        server_messages=max(counts[name] for name in servers),
        worker_messages=max(count for name, count in counts.items() if name.startswith("worker")),
        server_busy=max(turned[name] for name in servers) / took,
        scheduler_busy=turned["scheduler"] / took,
        formed_s=formed.at,
        formed_scheduler_s=formed.turning_s["scheduler"],
        processor_s=spent,
    )


@contextmanager
def shrunk_thresholds(shrink: int) -> Iterator[None]:
    """Sizes at which messages are joined or sent alone, for arrays that are smaller than what they stand for."""
    thresholds = [(requests, "ALONE_BYTES_MIN"), (replies, "JOIN_BYTES_MAX"), (replies, "TOGETHER_BYTES_MAX")]
    thresholds += [(transfers, name) for name in ("FAR_BYTES_MAX", "NEAR_BYTES_MAX")]
    before = [getattr(module, name) for module, name in thresholds]
    try:
        for (module, name), value in zip(thresholds, before, strict=True):
            setattr(module, name, value // shrink)
        yield
    finally:
        for (module, name), value in zip(thresholds, before, strict=True):
            setattr(module, name, value)


@contextmanager
def no_garbage() -> Iterator[None]:
    """Without the collector, which would walk over a thousand processes' objects in the turn of one."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def long_headers_read_once() -> Iterator[None]:
    """One process plays all here: what a thousand are told in the same words, as who is there, is read by the first."""
    read, latest = wire._read_message, (None, None)

    def read_message(kind: Any, header: Any, payload: Any, limits: Any) -> Any:
        nonlocal latest
        if len(header) < wire.LONG_BYTES or kind.has_payload:
            return read(kind, header, payload, limits)
        whole = header if isinstance(header, bytes) else header.obj
        if whole is not latest[0]:
            latest = whole, read(kind, header, payload, limits)
        return latest[1]

    wire._read_message = read_message
    try:
        yield
    finally:
        wire._read_message = read


STEP_MAX_S = 1000.0
"""Of simulated time: a step that takes longer never ends."""


class Simulated:
    """A cluster of a shape, all its processes, and users that do one `pushpull` of all keys after the other."""

    def __init__(
        self,
        shape: Shape,
        spec: Spec,
        network: Network,
        machines: Machines,
        steps: int,
        together: bool,
        stands_for: int,
    ) -> None:
        self.network = network
        self.processes: dict[str, Process] = {}
        config = shrunk_config(shape, network.shrink)
        hosts = place(shape, network.clock, machines)
        self.users: list[User] = []
        work = Exercise(spec, network, shape.mode, config.limits.slice_bytes, steps, together)
        for name, host in hosts.items():
            role, _, rank = name.partition("-")
            summing_s = network.costs.sum_byte_s if shape.mode == "sync" else network.costs.update_byte_s
            charge = partial(self._charge, name, stands_for * summing_s * network.shrink)
            make = partial(make_node, config, Role(role), int(rank or 0), charge)
            many = {"stands_for": stands_for, "copies": True} if role == "worker" else {"hears": stands_for}
            process = self.processes[name] = Process(network, host, make, **many)
            if role == "worker":
                user = User(int(rank), process.node, work)
                self.users.append(user)
                process.after_turn = user.advance
                user.advance()

    def _charge(self, name: str, byte_s: float, nbytes: int) -> None:
        self.processes[name].byte_work_s += nbytes * byte_s

    def run_until(self, step: int) -> Mark:
        """Let time pass until every worker has done so many steps."""
        clock = self.network.clock
        patience_s = clock.now + STEP_MAX_S
        behind = [user for user in self.users if user.steps_done < step]
        while behind:
            while behind[-1].steps_done < step:
                if not clock.step() or clock.now > patience_s:
                    waits = [process.node.machine.explain(clock.now) for process in self.processes.values()]
                    raise RuntimeError(f"a step does not end: {'; '.join(filter(None, waits))}")
            behind.pop()
        return Mark(
            clock.now,
            {name: process.transport.messages for name, process in self.processes.items()},
            {name: process.busy_s for name, process in self.processes.items()},
            {name: process.transport.carrying.busy_s for name, process in self.processes.items()},
        )


def shrunk_config(shape: Shape, shrink: int) -> ClusterConfig:
    """A cluster's settings, with arrays smaller than what they stand for, and nobody in a hurry."""
    default = Limits()
    limits = replace(
        default,
        slice_bytes=default.slice_bytes // shrink,
        window_bytes=default.window_bytes // shrink,
        connect_timeout_s=NEVER_S,
        form_timeout_s=NEVER_S,
    )
    bound = max(1, ClusterConfig.bigarray_bound // shrink)
    return ClusterConfig(
        Role.SCHEDULER, "scheduler", 1, shape.workers, shape.servers, bigarray_bound=bound, limits=limits
    )


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


def make_node(
    config: ClusterConfig, role: Role, rank: int, charge: Charge, transport: ModelledTransport, life: int = 0
) -> Node:
    """The node of one process, the `life`-th of its rank; a server's kernels charge it for the bytes they read."""
    network, limits = transport.network, config.limits
    # On one host workers see by the address that the way is short.
    port = 1 + rank + (config.num_servers if role is Role.WORKER else 0)
    address = f"127.0.0.1:{port}" if network.is_one_host else f"{role}-{rank}:1"
    endpoint = transport.bind(ENDPOINT if role is Role.SCHEDULER else f"tcp://{address}")
    token = ((1 if role is Role.SERVER else 2) + 2 * life) * 1_000_000 + rank
    seats = (config.num_workers, config.num_servers)
    said = Introduction(role, token, rank, f"host-{rank}", 100 + rank, endpoint, *seats, __version__, ENDPOINT, life)
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


class Exercise:
    """What every user does, and what of it they share: none looks at the values, so one memory does for all."""

    def __init__(self, spec: Spec, network: Network, mode: str, run_bytes_max: int, steps: int, together: bool) -> None:
        self.clock = network.clock
        self.sizes = [max(1, size // network.shrink) for size in spec.sizes]
        self.mode = mode
        self.steps = steps
        self.together = together
        self._run_bytes_max = run_bytes_max
        self._placed: list[KeyInfo] = []
        self.plan: Plan | None = None
        self.exchanged: list[Run] = []

    def take(self, placed: Sequence[KeyInfo]) -> None:
        """These are the keys; all are told the same."""
        if self.plan is None:
            self._placed = list(placed)
            self.plan = make_plan(self._placed, self._run_bytes_max)
            self.exchanged = carried(self.plan, [np.zeros(info.size, np.float32) for info in placed])
        assert [info.slices[0] for info in placed] == [info.slices[0] for info in self._placed]

    def exchange(self) -> list[Run]:
        """What moves in one step."""
        return [replace(run) for run in self.exchanged]

    def first_values(self) -> list[Run]:
        """What gives the keys their first values."""
        assert self.plan is not None
        return carried(self.plan, None)


Program = Generator["Future[Any]", None, None]


class User:
    """The user's thread of one worker."""

    def __init__(self, rank: int, node: Node, exercise: Exercise) -> None:
        self.steps_done = -1
        """-1 until all workers have the keys."""
        self.seconds: list[float] = []
        """Of each step."""
        self._rank = rank
        self._node = node
        self._exercise = exercise
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
        submit, exercise = self._node.submit, self._exercise
        yield from self._begin()
        self.steps_done = 0
        for step in range(exercise.steps):
            if exercise.together:
                yield submit(lambda number: EnterBarrier(number, STORE))
            start = exercise.clock.now
            yield submit(lambda number: Transfer(number, RunKind.PUSHPULL, "pushpull", exercise.exchange()))
            self.seconds.append(exercise.clock.now - start)
            self.steps_done = step + 1

    def _begin(self) -> Program:
        """Join, and agree on the keys."""
        submit, exercise = self._node.submit, self._exercise
        yield from self._declare()
        if self._rank == 0:
            yield submit(lambda number: Transfer(number, RunKind.INITIALISE, "init", exercise.first_values()))
        yield submit(lambda number: EnterBarrier(number, STORE))

    def _declare(self) -> Program:
        submit, exercise = self._node.submit, self._exercise
        yield submit(Register)
        keys = tuple(range(len(exercise.sizes)))
        shapes, dtypes = tuple((size,) for size in exercise.sizes), (DType.FLOAT32,) * len(keys)
        declared = submit(lambda number: DeclareKeys(number, STORE, exercise.mode, keys, shapes, dtypes))
        yield declared
        exercise.take(declared.result())
        if exercise.mode != "sync":
            yield submit(lambda number: Configure(number, STORE, create("sgd").describe()))


def carried(plan: Plan, results: list[Array] | None) -> list[Run]:
    """What the runs of a plan carry: zeros, and where the answers go."""
    found = []
    for run in plan.runs:
        sinks = () if results is None else [results[piece.index][piece.start : piece.stop] for piece in run.pieces]
        flags, settings = np.zeros(len(run.ids), np.uint8), ((np.nan,) * 3,)
        extra = (flags, settings) if results is not None else ()
        found.append(Run(run, memoryview(bytes(run.nbytes)), sinks, *extra))
    return found
