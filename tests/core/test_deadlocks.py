"""Deadlocks are found, all of them and no others: random programs on a simulated cluster, judged by a small model.

A worker's program is a list of calls: it declares keys, pushes without waiting, pulls, meets at barriers, computes,
exchanges what it has made when all others do so too, and leaves. `ends` says whether all programs come to their ends.
Where they do, no process may fail, however long somebody computes; where they do not, every worker that is left raises
`DeadlockError`.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest

from kvdist.config.settings import Limits
from kvdist.core.worker.requests import (
    DeclareKeys,
    EnterBarrier,
    KeyInfo,
    Leave,
    Register,
    ReportProgress,
    Run,
    RunKind,
    Transfer,
    make_plan,
)
from kvdist.dtypes import DType
from kvdist.errors import DeadlockError
from kvdist.nodes import Role
from kvdist.protocol.messages import DueWhen, Progress
from tests.core.network import Network, Process, Weather
from tests.simulation import Cluster, Scenario, _node

ELEMENTS = 20
"""Of a key: three slices of 64 bytes."""
LIMITS = Limits(slice_bytes=64, window_bytes=160)
END_S = 120.0
"""Simulated seconds after which every deadlock has been found."""
SOON_S = 10.0
"""Simulated seconds within which a deadlock must be found, where nothing is lost."""
SERVER_DECIDES = ((float("nan"),) * 3,)

ENOUGH = 1000
"""Examples that nobody makes."""

Call = tuple[str, Any]


def programs(seed: int) -> list[list[Call]]:
    """Of two to four workers; in some all make the same calls but for one difference."""
    draw = random.Random(seed)
    keys = ["a", "b", "c"][: draw.randint(1, 3)]
    shared: list[Call] = []
    for _ in range(draw.randint(2, 8)):
        kinds = ["push", "push", "push", "pull", "pull", "barrier", "compute", "meet"]
        kind = draw.choice(kinds)
        shared.append((kind, draw.uniform(0, 25) if kind == "compute" else draw.choice(keys)))
    made = []
    for _ in range(draw.randint(2, 4)):
        calls = list(shared)
        if draw.random() < 0.4:
            first, second = draw.randrange(len(calls)), draw.randrange(len(calls))
            calls[first], calls[second] = calls[second], calls[first]
        if draw.random() < 0.3:
            del calls[draw.randrange(len(calls))]
        order = draw.sample(keys, len(keys)) if draw.random() < 0.2 else keys
        inits = [("init", key) for key in (*order, "x")]
        made.append([*inits, *chain.from_iterable(map(whole, calls)), ("leave", None)])
    return made


def whole(call: Call) -> list[Call]:
    """An exchange is a push that waits until all others come to theirs, and the new weights. It has its own key."""
    return [("meet", "x"), ("push", "x"), ("pull", "x")] if call[0] == "meet" else [call]


def ends(programs: Sequence[Sequence[Call]]) -> bool:
    """Whether every worker comes to the end of its program."""
    at = [0] * len(programs)
    pushed: list[Counter[str]] = [Counter() for _ in programs]
    arrived: list[Counter[str]] = [Counter() for _ in programs]  # at barriers, and at the inits of keys
    left: set[int] = set()

    def goes_on(rank: int, call: Call) -> bool:
        live = [other for other in range(len(programs)) if other not in left]
        kind, key = call
        match kind:
            case "push" | "compute":
                return True
            case "pull":
                return all(pushed[other][key] >= pushed[rank][key] for other in live)
            case "leave":
                return all(pushed[other][one] >= count - 1 for other in live for one, count in pushed[rank].items())
            case _:
                name = kind if kind in ("barrier", "meet") else f"init {key}"
                return all(arrived[other][name] >= arrived[rank][name] for other in live)

    def begin(rank: int) -> None:
        if at[rank] < len(programs[rank]):
            kind, key = programs[rank][at[rank]]
            pushed[rank][key] += kind == "push"
            name = kind if kind in ("barrier", "meet") else f"init {key}"
            arrived[rank][name] += kind in ("barrier", "meet", "init")

    for rank in range(len(programs)):
        begin(rank)
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            if at[rank] < len(program) and goes_on(rank, program[at[rank]]):
                at[rank] += 1
                moved = True
                if at[rank] == len(program):
                    left.add(rank)
                begin(rank)
    return len(left) == len(programs)


class User:
    """The only thread of a worker's program."""

    def __init__(self, rank: int, calls: Sequence[Call], network: Network) -> None:
        self.rank = rank
        self.process: Process | None = None
        self.error: BaseException | None = None
        self.done = False
        self._calls = [("register", None), *calls]
        self._network = network
        self._waits: Future[Any] | None = None
        self.waits_since = 0.0
        self._busy_until = 0.0
        self._infos: dict[str, KeyInfo] = {}

    # What the worker asks.

    def blocked_since(self) -> float | None:
        return None if self._waits is None or self._waits.done() else self.waits_since

    def may_act(self, now: float) -> str:
        return ""

    def longest_wait_since(self) -> float | None:
        return self.blocked_since()

    def room_wait(self) -> str:
        return ""

    # What it does.

    def advance(self) -> None:
        while not self.done and self._network.now >= self._busy_until:
            if self._waits is not None and not self._waits.done():
                return
            waited, self._waits = self._waits, None
            if waited is not None and waited.exception() is not None:
                self.error, self.done = waited.exception(), True
                return
            if waited is not None and isinstance(waited.result(), tuple) and self._give(waited.result()[0]):
                return
            if not self._calls:
                self.done = True
                return
            self._begin(*self._calls.pop(0))

    def _begin(self, kind: str, key: Any) -> None:
        match kind:
            case "register":
                self._wait_for(Register)
            case "init":
                shape, dtype = ((ELEMENTS,),), (DType.FLOAT64,)
                self._wait_for(lambda number: DeclareKeys(number, 0, "sync", (key,), shape, dtype))
            case "push":
                self._submit(lambda number: Transfer(number, RunKind.PUSH, f"push of {key}", self._runs(key)))
            case "pull":
                plan = make_plan([self._infos[key]], 64)
                result = np.zeros(ELEMENTS)
                runs = [Run(run, sinks=[result[piece.start : piece.stop] for piece in run.pieces]) for run in plan.runs]
                self._wait_for(lambda number: Transfer(number, RunKind.PULL, f"pull of {key}", runs))
            case "barrier":
                self._wait_for(lambda number: EnterBarrier(number, 0))
            case "meet":
                piece = self._infos[key].slices[0]
                progress = Progress(piece.number, 0, 0, DueWhen.QUOTA, ENOUGH, False, True)
                self._wait_for(lambda number: ReportProgress(number, piece.server, progress))
            case "compute":
                self._busy_until = self._network.now + key
                assert self.process is not None
                self._network.at(self._busy_until, self.process.wake)
            case "leave":
                self._wait_for(Leave)

    def _give(self, info: KeyInfo) -> bool:
        """The first values, if they are this worker's to give."""
        self._infos[str(info.key)] = info
        if info.giver == self.rank:
            self._wait_for(lambda number: Transfer(number, RunKind.INITIALISE, "init", self._runs(str(info.key))))
        return info.giver == self.rank

    def _runs(self, key: str) -> list[Run]:
        plan = make_plan([self._infos[key]], 64)
        return [Run(run, memoryview(bytes(run.nbytes)), settings=SERVER_DECIDES) for run in plan.runs]

    def _submit(self, make: Any) -> Future[Any]:
        assert self.process is not None
        return self.process.node.submit(make)

    def _wait_for(self, make: Any) -> None:
        self._waits, self.waits_since = self._submit(make), self._network.now


def simulate(seed: int, made: list[list[Call]], weather: Weather) -> tuple[list[User], dict[str, Process], float]:
    """Run these programs on two servers to their end; the time of it."""
    network = Network(seed, weather)
    reduce = network.random.choice(["on", "off"])
    scenario = Scenario(num_workers=len(made), limits=LIMITS, local_reduce=reduce, hosts=2)
    cluster = Cluster(scenario, seed, network)
    users = [User(rank, calls, network) for rank, calls in enumerate(made)]

    def start(role: Role, rank: int, name: str) -> None:
        process = Process(name, network, lambda transport: _node(cluster, role, rank, transport))
        cluster.processes[name] = process
        if role is Role.WORKER:
            user = users[rank]
            user.process = process
            machine: Any = process.node.machine
            machine.watch(user)
            process.after_turn = user.advance
            user.advance()

    for role, count in ((Role.SCHEDULER, 1), (Role.SERVER, 2), (Role.WORKER, len(made))):
        for rank in range(count):
            name = f"{role}-{rank}"
            network.after(network.random.uniform(0, 0.1), partial(start, role, rank, name))
    while network.step() and network.now < END_S:
        if len(cluster.processes) == 3 + len(made) and all(one.ended for one in cluster.processes.values()):
            break
    for user in users:
        user.advance()
    return users, cluster.processes, network.now


@pytest.mark.parametrize("weather", [Weather(), Weather(0.05, loss=0.05, duplication=0.05)], ids=["calm", "lossy"])
@pytest.mark.parametrize("seeds", [range(20), pytest.param(range(20, 120), marks=pytest.mark.slow)], ids=str)
def test_programs_that_end_are_left_alone_and_all_others_raise_on_every_worker(seeds, weather):
    judged = Counter[bool]()
    for seed in seeds:
        made = programs(seed)
        users, processes, now = simulate(seed, made, weather)
        is_good = ends(made)
        judged[is_good] += 1
        failures = {name: process.node.failure for name, process in processes.items() if process.node.failure}
        if is_good:
            if weather.loss:  # words of farewell may be lost, too
                failures = {name: error for name, error in failures.items() if isinstance(error, DeadlockError)}
            assert not failures, f"seed {seed}: {made} ends, but {failures}"
            assert all(user.done for user in users), f"seed {seed}: {made} ends, but did not in {now} s"
        else:
            assert all(user.done for user in users), f"seed {seed}: {made} hangs, and nobody was told"
            assert isinstance(failures["scheduler-0"], DeadlockError), f"seed {seed}: {failures}"
            if weather.loss:
                continue  # the verdict is said once, and may be lost
            raised = [user for user in users if user.error is not None]
            assert raised, f"seed {seed}: nobody raised"
            errors = [*(user.error for user in raised), *failures.values()]
            assert all(isinstance(error, DeadlockError) for error in errors), f"seed {seed}: {errors}"
            late_s = now - max(user.waits_since for user in raised)
            assert late_s < SOON_S, f"seed {seed}: found after {late_s} s"
    assert judged[True] and judged[False], "both are tried"
