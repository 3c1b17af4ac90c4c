"""A whole cluster in one thread, on a simulated network and clock: everything follows from a seed.

The machines are the real ones, run by the real `Node` over a transport that exists in memory. After each event the
machine that saw it is validated; at the end the weights are compared with what they must be, every request must have
been answered, and every process must have ended. A failure names its seed: `run(seed, scenario)` repeats it exactly.

    python -m tests.simulation --seeds 5000            # all scenarios, seeds 0 to 4999, on all cores
    python -m tests.simulation --total 100000 --first 5000 --minutes 480
    python -m tests.simulation --scenario storm --seed 42 --trace
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from kvdist.checkpoint.snapshot import EVERYTHING
from kvdist.config.losses import SCHEDULER_AWAY_S
from kvdist.config.settings import ClusterConfig, Limits
from kvdist.core.joining import HELLO_INTERVAL_S, Introduction
from kvdist.core.machine import ChildEnded, Effect
from kvdist.core.round import UNANSWERED, Contribution, Verdict
from kvdist.core.scheduler.membership import Membership
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server import block, replies, server
from kvdist.core.server.block import Block, apply_round
from kvdist.core.server.buffers import Buffer
from kvdist.core.server.decoding import decoded
from kvdist.core.server.progress import Quotas
from kvdist.core.server.replica import ReplicatedServer
from kvdist.core.server.server import Server
from kvdist.core.server.shard import Shard
from kvdist.core.server.sparse_table import SparseTable
from kvdist.core.worker import requests
from kvdist.core.worker.host_aggregation import HostAggregation, HostRound, HostRounds
from kvdist.core.worker.worker import Worker
from kvdist.diagnostics.record import Reader, Writer
from kvdist.diagnostics.replay import Difference, replay
from kvdist.diagnostics.ring import Ring
from kvdist.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    FencedError,
    JobOver,
    PeerLostError,
    RolledBackError,
)
from kvdist.kernels.interface import Kernels
from kvdist.kernels.reference import REFERENCE
from kvdist.nodes import HOST_MARK, Member, NodeId, Role
from kvdist.optimizer import offload
from kvdist.optimizer.offload import arithmetic_on
from kvdist.optimizer.updater import SliceUpdater
from kvdist.protocol.messages import CompressedPush, Due, DueWhen, JoinedPush, Push
from kvdist.runtime import journal as journals
from kvdist.runtime.journal import ASIDE, Journal
from kvdist.runtime.node import Node
from kvdist.version import __version__
from tests.core.leasing import LeasingUser, QuotaLeasingUser, require_position, require_used_once
from tests.core.network import Network, Process, SimulatedTransport, Wall, Weather
from tests.core.odd_choices import EXPLAINING, NAMES, odd_choices
from tests.core.shelf import FULL, SNAPSHOTS, Shelf, SimulatedDisk, content
from tests.core.workload import BIGARRAY_BOUND, Job, Oracle, User
from tests.devices import NumpyDevice

SCHEDULER_ENDPOINT = "memory://scheduler"
EVENTS_MAX = 500_000
"""More mean that somebody spins."""
TIME_MAX_S = 400.0
"""Simulated seconds after which whoever still waits hangs."""
SLICE_BYTES = 64
FORMED, FORMING = -2, -3
RETURN_S = 20.0
"""Simulated seconds within which a worker comes back that was the last."""
AWAY_S = 10.0
"""Simulated seconds within which all connect to a scheduler that was started again."""
VERDICT_S = 1.0
"""Simulated seconds within which everybody must know of a death."""
PORTION = 5
"""Seeds that a process runs before it asks for more: two seconds."""
PROGRESS_S = 60.0
"""Real seconds between lines of progress."""
PARTED_VERDICT_S = 5.0
"""The same beyond twice the patience, where the network is parted: who reaches nobody has to find out by itself."""


@dataclass(frozen=True)
class Scenario:
    """What is simulated.

    leaver: who leaves after `leaver_rounds`; None = the last worker.
    hosts: worker r and server r are on host r modulo this; None = nobody knows of hosts.
    local_reduce: what the workers of a host sum before it crosses the network.
    holds: whether results are read where servers keep them now and then.
    saves: how probable it is that a checkpoint follows a round.
    tables: whether there are tables of rows, too.
    examples: how many examples the data has that workers lease; 0 for rounds without data.
    means: after which rounds workers average a number, in a store of its own.
    quota: after how many examples of all workers a round is due; 0: at once.
    second: whether there is a second model, which is declared after the first one.
    when: what else that number is of.
    barrier_s: for how long a worker waits at a barrier at most, before it calls it again; 0: for ever.
    in_step: whether a worker has what came of a round before it begins the next one, where it need not.
    full: how probable it is that a work of a disk fails.
    torn: how probable it is that the newest snapshot is damaged, where there is one before it.
    encodes: how probable it is that a push of float32 travels encoded; unless it is 0, values come back as halves.
    offloaded: whether servers sum and update on devices.
    last_s: how long after all others the last worker is started.
    victims: who is hit once a worker is in its `fault_round`-th round (-1: has declared its keys; -2: has joined; -3:
        all victims are welcome), within `spread_s` of that: killed, or paused for `pause_s`.
    on_loss: what follows when a worker is lost.
    min_workers: with fewer workers than so many rounds stay open.
    replicas: how many other servers keep a copy of a server's slices.
    fills: whether servers are started again, too, and get copies while the others go on.
    hurries: whether the next one is hit as soon as it may be lost, and the scheduler, too, if that comes back; else
        when every slice has a copy again.
    later: who is hit within `spread_s` of another moment: when the first of the victims that are servers, or workers if
        there are none, was given up, or a scheduler is back.
    is_at_join: whether that moment is while a worker that has come later waits to be a member.
    again: in how many seconds a victim is started again, at least and at most; None = never.
    lives: how often, if each is struck again.
    parted_s: for how long the network is parted, at least and at most; None = it is not. It begins as victims are hit.
    parts: whom the network parts: `any` processes from any others, in both directions or one; or `few` from all others:
        one worker at least, not all, and at most one server if the others go on without that; or `copies`, a server
        from the next one, to which it gives its copies, and from no other.
    """

    num_workers: int = 2
    num_servers: int = 2
    rounds: int = 3
    mode: str = "sync"
    optimizer: str | None = None
    leaver_rounds: int | None = None
    leaver: int | None = None
    hosts: int | None = None
    local_reduce: str = "auto"
    holds: bool = True
    saves: float = 0.35
    tables: bool = False
    examples: int = 0
    means: Sequence[int] = ()
    quota: int = 0
    second: bool = False
    when: DueWhen = DueWhen.QUOTA
    barrier_s: float = 0.0
    in_step: bool = False
    full: float = 0.04
    torn: float = 0.0
    encodes: float = 0.0
    offloaded: bool = False
    weather: Weather = Weather()
    forced_cuts: int = 0
    """Connections broken for certain while the workers work."""
    last_s: float = 0.0
    victims: tuple[str, ...] = ()
    fault_round: int = 1
    spread_s: float = 0.003
    pause_s: float | None = None
    returns_s: float = 0.0
    """A killed scheduler is started again within so many seconds; 0: it is not."""
    on_loss: str = "fail"
    min_workers: int | None = None
    replicas: int = 0
    fills: bool = False
    hurries: bool = False
    later: str = ""
    is_at_join: bool = False
    again: tuple[float, float] | None = None
    lives: int = 1
    is_odd: bool = False
    """Whether the seed draws what is legal and rare, see `tests/core/odd_choices.py`."""
    parted_s: tuple[float, float] | None = None
    parts: str = "any"
    snapshot_s: float | None = None
    """Seconds between snapshots; None = there are none, and the loss of a server ends the job."""
    limits: Limits = Limits(slice_bytes=SLICE_BYTES, window_bytes=160)


@dataclass
class Result:
    """What became of a run."""

    trace: list[str]
    happened: Counter[str]
    events: int
    simulated_s: float
    failures: dict[str, Exception | None]
    """Process → why it stopped; None if it stopped well."""
    detected_s: float = 0.0
    """From the fault to the end of the last process that it ended."""
    reads: int = 0
    used: Counter[str] = field(default_factory=Counter)
    """How often what is rare was exercised: rounds of groups, values held, messages of several payload frames."""


@dataclass
class Cluster:
    """The processes of one run."""

    scenario: Scenario
    seed: int
    network: Network
    processes: dict[str, Process] = field(default_factory=dict)
    users: dict[str, User] = field(default_factory=dict)
    shelf: Shelf = field(default_factory=Shelf)
    oracle: Oracle | None = None
    devices: list[NumpyDevice] = field(default_factory=list)
    struck_at: float | None = None
    dumps: Path | None = None
    """Where processes that fail write their dumps. With it all that machines are told is kept, and told again to new
    ones at the end."""
    struck: set[str] = field(default_factory=set)
    """The processes that were hit, and are given up for that."""
    woken_at: float = 0.0
    """When a process that was paused goes on."""
    given_up: dict[str, float] = field(default_factory=dict)
    """Process → when the scheduler gave up one of its rank for the first time."""
    lost: set[Member] = field(default_factory=set)
    """Where the network is parted: all that a scheduler has given up."""
    struck_later: bool = False
    dead_servers: list[str] = field(default_factory=list)
    """In the order of their deaths."""
    filled: int = 0
    """How often every slice had a copy again."""
    hurried: int = 0
    """How often a server was struck that may be lost, or the next one is about to be."""
    starting: int = 0
    """Processes that are about to be started again."""
    journal: Path = Path()
    """Of its scheduler."""
    look: Callable[[Cluster], None] | None = None
    """Called whenever a worker has come to its next round."""


class SimulationError(AssertionError):
    """Something that must not happen did; the message names the seed, `trace` is what happened before."""

    def __init__(self, text: str, trace: Sequence[str]) -> None:
        super().__init__(text)
        self.trace = trace


@contextmanager
def small_messages() -> Iterator[None]:
    """Sizes at which messages are joined, sent alone or leased, and sums offloaded, fitted to slices of a few bytes."""
    with (
        mock.patch.object(offload, "SUMMED_BYTES_MIN", 8),
        mock.patch.object(requests, "ALONE_BYTES_MIN", 48),
        mock.patch.object(replies, "JOIN_BYTES_MAX", 24),
    ):
        yield


@contextmanager
def counting(used: Counter[str]) -> Iterator[None]:
    """Count what a run exercises."""
    hold, summed, hand_back = Block.lend, HostAggregation._summed, HostRounds.hand_back
    offer, offer_sum = SparseTable.offer, Block.offer_sum
    drop_sum, push_joined, set_members = Shard._drop_sum, Shard.push_joined, HostRounds.set_members

    def counted_apply(
        blocks: Sequence[Block], rounds: Sequence[Sequence[Contribution]], updater: SliceUpdater | None
    ) -> None:
        used["round of several slices"] += any(len(block) > 1 for block in blocks)
        apply_round(blocks, rounds, updater)

    def counted_hold(self: Block, member: Member) -> Buffer | None:
        used["held"] += 1
        return hold(self, member)

    def counted_sum(self: HostAggregation, host_round: HostRound, own: requests.Run) -> requests.Run:
        used["summed on a host"] += 1
        return summed(self, host_round, own)

    def counted_decode(message: CompressedPush, kernels: Kernels) -> Push:
        used["decoded"] += 1
        return decoded(message, kernels)

    def counted_return(self: HostRounds, host_round: HostRound) -> None:
        used["handed back"] += 1
        hand_back(self, host_round)

    def counted_offer(self: SparseTable, contribution: Contribution, more: bool, now: float) -> Verdict:
        used["rows in parts"] += more
        return offer(self, contribution, more, now)

    def counted_drop(self: Shard, block: Block, rank: int) -> None:
        before = dict(block.round.slots)
        drop_sum(self, block, rank)
        dropped = before.keys() - block.round.slots.keys()
        if dropped:
            used["sum without its leader dropped" if rank == min(dropped) else "sum without a follower dropped"] += 1
            used["follower asked again"] += any(before[one].run != UNANSWERED for one in dropped - {min(dropped)})

    def counted_joined(self: Shard, sender: Member, message: JoinedPush, now: float) -> None:
        lost = any(one.member in self.peers.lost for one in message.contributors)
        used["sum with a lost worker came late"] += lost
        push_joined(self, sender, message, now)

    def counted_offer_sum(self: Block, contributions: Sequence[Contribution], now: float) -> Verdict:
        verdict = offer_sum(self, contributions, now)
        used["sum came after a push of its own"] += verdict is Verdict.HAND_BACK
        return verdict

    def counted_members(self: HostRounds, members: Mapping[int, Member]) -> None:
        used["share of a lost worker"] += any(one.shares.keys() - members.keys() for one in self._rounds.values())
        set_members(self, members)

    with (
        mock.patch.object(Shard, "_drop_sum", counted_drop),
        mock.patch.object(Shard, "push_joined", counted_joined),
        mock.patch.object(Block, "offer_sum", counted_offer_sum),
        mock.patch.object(HostRounds, "set_members", counted_members),
        mock.patch.object(SparseTable, "offer", counted_offer),
        mock.patch.object(block, "apply_round", counted_apply),
        mock.patch.object(Block, "lend", counted_hold),
        mock.patch.object(HostAggregation, "_summed", counted_sum),
        mock.patch.object(HostRounds, "hand_back", counted_return),
        mock.patch.object(server, "decoded", counted_decode),
    ):
        yield


def run(
    seed: int, scenario: Scenario, dumps: Path | None = None, look: Callable[[Cluster], None] | None = None
) -> Result:
    """Simulate one cluster to its end.

    Args:
        seed: what everything follows from.
        scenario: what is simulated.
        look: called whenever a worker has come to its next round.
        dumps: where processes that fail write their dumps; and all that machines were told is told again to new ones,
            which must answer the same.

    Raises:
        SimulationError: an invariant broke, a value was wrong, a request or a process did not end.
    """
    network = Network(seed, scenario.weather)
    cluster = Cluster(scenario, seed, network, dumps=dumps, look=look)
    try:
        with (
            small_messages(),
            counting(network.used),
            judging_quotas(cluster),
            ExitStack() as stack,
        ):
            if scenario.is_odd:
                # With dumps, all that a process remembers would be written at each of its explanations.
                names = [name for name in NAMES if dumps is None or name != EXPLAINING]
                odd = odd_choices(Random(repr((seed, scenario))), scenario.limits, network.happened, names)
                limits, network.late_s = stack.enter_context(odd)
                cluster.scenario = replace(scenario, limits=limits)
            if scenario.returns_s:
                folder = stack.enter_context(TemporaryDirectory())
                cluster.journal = Path(folder) / "journal"
                entries = Random(repr(("journal", seed))).choice((7, 60, journals.ENTRIES_MAX))
                stack.enter_context(mock.patch.object(journals, "ENTRIES_MAX", entries))
                stack.callback(_close_journal, cluster)
            _build(cluster)
            events = _play(cluster)
            _judge(cluster)
            _replay(cluster)
    except AssertionError as error:
        raise SimulationError(f"seed {seed}: {error}", network.trace) from error
    ends = [process.ended_at for process in cluster.processes.values()]
    return Result(
        network.trace,
        network.happened,
        events,
        max(ends),
        {name: process.node.failure for name, process in cluster.processes.items()},
        0.0 if cluster.struck_at is None else max(ends) - cluster.struck_at,
        sum(user.reads for user in cluster.users.values()),
        network.used,
    )


@contextmanager
def judging_quotas(cluster: Cluster) -> Iterator[None]:
    """Check that a round is due only when those that are there have made enough, or have learned that it was."""
    tell, scenario = Quotas._tell, cluster.scenario

    def judged(self: Quotas, due: Due) -> list[Effect]:
        oracle = cluster.oracle
        assert oracle is not None
        is_judged = scenario.when == DueWhen.QUOTA and not scenario.examples  # those without data do not wait for more
        if is_judged and not due.together and due.step not in oracle.due:
            made = oracle.made.get(due.step, {})
            there = sum(samples for member, samples in made.items() if self._peers.has(member))
            assert there >= scenario.quota, f"round {due.step} is due, and {there} of {made} are of workers there"
        return tell(self, due)

    with mock.patch.object(Quotas, "_tell", judged):
        yield


def _build(cluster: Cluster) -> None:
    scenario, network = cluster.scenario, cluster.network
    job = Job(
        scenario.num_workers,
        scenario.rounds,
        scenario.mode,
        scenario.optimizer,
        scenario.leaver_rounds,
        scenario.leaver,
        scenario.holds,
        scenario.saves,
        scenario.encodes,
        scenario.tables,
        scenario.in_step or (scenario.again is not None and not (scenario.snapshot_s and scenario.mode == "async")),
        scenario.examples,
        scenario.means,
        scenario.on_loss == "wait",
        scenario.quota,
        scenario.second,
        scenario.when,
        scenario.barrier_s,
    )
    oracle = cluster.oracle = Oracle(job, network.random)
    oracle.books.is_void = partial(_has_given_up, cluster)
    oracle.books.awaited = [job.rounds_of(rank) for rank in range(job.num_workers)] if job.waits else None
    oracle.books.may_rest = job.examples > 0
    oracle.books.newcomers_above = scenario.num_workers + scenario.num_servers

    order = [("scheduler", Role.SCHEDULER, 0)]
    order += [(f"server-{rank}", Role.SERVER, rank) for rank in range(scenario.num_servers)]
    order += [(f"worker-{rank}", Role.WORKER, rank) for rank in range(scenario.num_workers)]
    for name, role, rank in order:
        late_s = scenario.last_s if (name, role, rank) == order[-1] else 0.0
        network.after(late_s + network.random.uniform(0, 0.3), partial(_start, cluster, name, role, rank))


def _has_given_up(cluster: Cluster, member: Member) -> bool:
    """Whether the others go on without this process, whatever it thinks."""
    scheduler = cluster.processes["scheduler"].node.machine
    return isinstance(scheduler, Scheduler) and member in scheduler.membership.lost


def _start(cluster: Cluster, name: str, role: Role, rank: int, life: int = 0) -> Process:
    network, oracle = cluster.network, cluster.oracle
    assert oracle is not None
    process = cluster.processes[name] = Process(
        name, network, lambda transport: _node(cluster, role, rank, transport, life)
    )
    if role is Role.SCHEDULER:
        process.after_turn = partial(_note_losses, cluster, process)
    if role is Role.WORKER:
        kind = User if not oracle.job.examples else QuotaLeasingUser if oracle.job.quota else LeasingUser
        user = kind(rank, process.node, oracle.job, oracle, network.random, cluster.shelf, life)
        cluster.users[name] = user
        process.after_turn = lambda: _turned(cluster, user)
        user.advance()
    return process


def _note_losses(cluster: Cluster, process: Process) -> None:
    """The scheduler has turned: who was given up just now?"""
    scheduler = process.node.machine
    assert isinstance(scheduler, Scheduler)
    _strike_filled(cluster, scheduler.membership)
    for name in {str(member.node) for member in scheduler.membership.lost} - cluster.given_up.keys():
        cluster.given_up[name] = cluster.network.now
    for member in scheduler.membership.lost.keys() - cluster.lost if cluster.scenario.parted_s else ():
        cluster.lost.add(member)
        for process in cluster.processes.values():  # what a server hears that was given up comes to nothing
            process.is_void |= process.node.machine.me == member and member.node.role is Role.SERVER
        _note_parted(cluster, member)


def _note_parted(cluster: Cluster, member: Member) -> None:
    """The scheduler has given up a process that it does not reach, or that does not reach others."""
    assert cluster.oracle is not None
    cluster.network.used["given up behind a wall"] += 1
    name = next(name for name, one in cluster.processes.items() if one.node.machine.me == member)
    if name in cluster.users:
        cluster.oracle.lost.add(member.node.rank)
    if cluster.scenario.again is not None and not cluster.processes[name].crashed:
        cluster.starting += 1
        cluster.network.after(cluster.network.random.uniform(0.0, 1.0), partial(_end_given_up, cluster, name))


def _end_given_up(cluster: Cluster, name: str) -> None:
    """The launcher ends a process that was given up, if it still runs, and starts it again."""
    cluster.starting -= 1
    victim = cluster.processes[name]
    if not victim.ended:
        cluster.network.used["ended by the launcher"] += 1
        _kill(victim)
    _will_start_again(cluster, name)


def _tell(cluster: Cluster, node: NodeId, life: int) -> None:
    """The launcher's line about a process that was killed comes late now and then."""
    if cluster.processes["scheduler"].ended:
        return  # it is said once more to the next one
    cluster.processes["scheduler"].node.post(ChildEnded(node, "killed", False, life))


def _start_again(cluster: Cluster, node: NodeId, life: int) -> None:
    """Start a process again that was killed, unless the job has ended meanwhile; a launcher would know."""
    cluster.starting -= 1
    scheduler = cluster.processes["scheduler"]
    if scheduler.ended and not scheduler.crashed:
        cluster.network.used["not started again"] += 1
        return
    name = f"{node}, life {life}"
    cluster.network.used["started again"] += 1
    _start(cluster, name, node.role, node.rank, life)
    if life < cluster.scenario.lives and not (cluster.scenario.fills and node.role is Role.SERVER):
        cluster.network.after(cluster.network.random.uniform(0.01, 1.0), partial(_strike, cluster, name))


def _strike_filled(cluster: Cluster, membership: Membership) -> None:
    """Once every slice has a copy again, the next server is hit."""
    scenario, random = cluster.scenario, cluster.network.random
    struck = len(cluster.dead_servers)
    known = sum(one.node.role is Role.SERVER for one in membership.lost)
    if scenario.hurries and cluster.hurried < struck == known < scenario.lives:
        cluster.hurried = struck
        cluster.network.after(random.uniform(0.0, scenario.spread_s), partial(_strike_in_a_hurry, cluster))
        if scenario.returns_s and random.random() < 0.5:
            cluster.network.after(random.uniform(0.0, scenario.spread_s), partial(_strike, cluster, "scheduler"))
    waits_for_more = not struck or struck != known or struck != cluster.filled + 1
    if not scenario.fills or scenario.hurries or scenario.later or waits_for_more:
        return
    if len(membership.servers) == scenario.num_servers and not membership.is_filling:
        cluster.filled += 1
        cluster.network.used["filled"] += 1
        if struck >= scenario.lives:
            return
        lives = [name for name, one in cluster.processes.items() if name.startswith("server") and not one.crashed]
        cluster.network.after(random.uniform(0.0, 0.2), partial(_strike, cluster, random.choice(lives)))


def _strike_in_a_hurry(cluster: Cluster) -> None:
    """Hit a server as soon as there is one that may be lost, by what the scheduler knows."""
    scheduler = cluster.processes["scheduler"]
    machine = scheduler.node.machine
    assert isinstance(machine, Scheduler)
    may_be_lost = {one for node, one in machine.membership.servers.items() if machine.membership.may_lose(node)}
    names = [name for name, one in cluster.processes.items() if one.node.machine.me in may_be_lost and not one.ended]
    if names and not scheduler.ended:
        cluster.network.used["struck while copies are filled in"] += machine.membership.is_filling
        _strike(cluster, cluster.network.random.choice(names))
    elif not scheduler.ended or scheduler.crashed:
        cluster.network.after(0.02, partial(_strike_in_a_hurry, cluster))


def _closed(cluster: Cluster) -> int:
    """How many rounds all slices have had."""
    assert cluster.oracle is not None
    return sum(map(len, cluster.oracle.books.rounds.values()))


def _return(cluster: Cluster, closed: int) -> None:
    """The launcher starts the scheduler again, and says what it has seen of others meanwhile, or most of it."""
    network = cluster.network
    network.used["closed meanwhile"] += _closed(cluster) > closed
    network.happened["return"] += 1
    node = _start(cluster, "scheduler", Role.SCHEDULER, 0).node
    for name, process in cluster.processes.items():
        if process.ended and name != "scheduler" and (not process.crashed or network.random.random() < 0.7):
            who, _, lives = name.partition(", life ")
            role, _, rank = who.partition("-")
            ended_well = not process.crashed and process.node.failure is None
            node.post(
                ChildEnded(NodeId(Role(role), int(rank)), "killed by signal 9 (SIGKILL)", ended_well, int(lives or 0))
            )
    if cluster.scenario.later and not (cluster.dead_servers or cluster.struck_later or cluster.scenario.is_at_join):
        network.after(network.random.uniform(0.2, 1.0), partial(_strike, cluster, cluster.scenario.later))


def _node(cluster: Cluster, role: Role, rank: int, transport: SimulatedTransport, life: int = 0) -> Node:
    network, scenario = transport.network, cluster.scenario
    limits = scenario.limits
    machine: Scheduler | Server | Worker
    if role is Role.SCHEDULER:
        transport.bind(SCHEDULER_ENDPOINT)
        config = ClusterConfig(
            Role.SCHEDULER,
            "host-s",
            1,
            scenario.num_workers,
            scenario.num_servers,
            bigarray_bound=BIGARRAY_BOUND,
            on_loss=scenario.on_loss,
            min_workers=scenario.min_workers,
            return_s=RETURN_S if scenario.again is not None else 0.0,
            replicas=scenario.replicas,
            scheduler_away_s=AWAY_S if scenario.returns_s else None,
            snapshots=None if scenario.snapshot_s is None else SNAPSHOTS,
            snapshot_interval_s=scenario.snapshot_s,
            limits=limits,
        )
        return _scheduler_node(cluster, config, transport)
    endpoint = ""
    if role is Role.SERVER or scenario.hosts is not None:
        mark = "" if scenario.hosts is None else f"{HOST_MARK}host{rank % scenario.hosts}.{rank}"
        endpoint = transport.bind(f"memory://{role}-{rank}{mark}{f'.{life}' if life else ''}")
    introduction = Introduction(
        role,
        ((1 if role is Role.SERVER else 2) + 2 * life) * 1_000_000 + rank,
        rank,
        f"host-{rank}",
        100 + rank,
        endpoint,
        scenario.num_workers,
        scenario.num_servers,
        __version__,
        SCHEDULER_ENDPOINT,
        life,
    )
    if role is Role.SERVER:
        arithmetic = None
        if scenario.offloaded:
            cluster.devices.append(NumpyDevice(rank))
            arithmetic = arithmetic_on(cluster.devices[-1], REFERENCE)
        kind = ReplicatedServer if scenario.replicas else Server
        machine = kind(introduction, limits, REFERENCE, network.now, arithmetic=arithmetic)
        if cluster.oracle is not None:
            cluster.oracle.books.keep_of(machine)
    else:
        sums = HostAggregation(scenario.local_reduce, limits) if scenario.snapshot_s is None else None
        machine = Worker(introduction, limits, network.now, sums)
    machine.hears_of_work = False  # what it would say of this is only read aloud, and would move what seeds draw
    disk = SimulatedDisk(network, cluster.shelf, scenario.full, scenario.torn, partial(_may_be_torn, cluster))
    node = Node(machine, transport, 4711, limits.explain_after_s, lambda: network.now, disk)
    if cluster.dumps is not None:
        node.ring = Ring(machine, 4711, EVENTS_MAX, cluster.dumps, lambda: network.now)
    return node


def _scheduler_node(cluster: Cluster, config: ClusterConfig, transport: SimulatedTransport) -> Node:
    """A scheduler; if its loss ends no job, it keeps a journal, and the next one takes its place by that."""
    network, scenario = transport.network, cluster.scenario
    disk = SimulatedDisk(network, cluster.shelf, scenario.full, scenario.torn, partial(_may_be_torn, cluster))
    before = cluster.processes.get("scheduler")
    if before is not None:
        assert before.node.journal is not None
        before.node.journal.close(is_over=False)
        _tear(cluster.journal, network.random)
    machine = Scheduler(config, network.now)
    machine.hears_of_work = False  # what it would say of this is only read aloud, and would move what seeds draw
    node = Node(machine, transport, 4711, scenario.limits.explain_after_s, lambda: network.now, disk)
    if scenario.returns_s:
        try:
            node.keep(Journal(cluster.journal, config))
        except ConfigError as error:
            raise AssertionError(str(error)) from error
        network.used["revived by its journal"] += node.is_revived
    if cluster.dumps is not None and not node.is_revived:
        node.ring = Ring(machine, 4711, EVENTS_MAX, cluster.dumps, node.clock)
    return node


def _close_journal(cluster: Cluster) -> None:
    scheduler = cluster.processes.get("scheduler")
    if scheduler is not None and scheduler.crashed and scheduler.node.journal is not None:
        scheduler.node.journal.close(is_over=True)


def _tear(path: Path, random: Random) -> None:
    """What a process was writing when it was killed may be there in part: an entry, or a new file."""
    content = path.read_bytes()
    record = content[content.index(b"\n") + 1 :]
    nbytes = random.choice((0, 3, 12))
    with path.open("ab") as file:
        file.write(record[:nbytes])
    if nbytes == 3:
        path.with_name(path.name + ASIDE).write_bytes(content[: len(content) // 2])


def _may_be_torn(cluster: Cluster, folder: str) -> bool:
    """Whether this is a snapshot to which all, or some, go back, and there is one before it that will do."""
    machine = cluster.processes["scheduler"].node.machine
    assert isinstance(machine, Scheduler)
    rollback = machine.rollback
    if rollback is None or rollback.way_back is None:
        return False
    folders = [one.folder for one in rollback.written if not rollback._lacks(one)]
    return folder in folders[1:]


def _turned(cluster: Cluster, user: User) -> None:
    """A worker's node has turned: let its user go on, and strike when it is time."""
    before, round_before = user.rollbacks, user.round
    user.advance()
    if cluster.look is not None and user.round > round_before:
        cluster.look(cluster)
    network, scenario = cluster.network, cluster.scenario
    if user.rollbacks > before and cluster.oracle is not None:  # what has left does not make its last pushes again
        cluster.oracle.lost |= {one.rank for one in cluster.users.values() if one.has_left}
    if scenario.later and not cluster.struck_later and _is_moment(cluster, user):
        cluster.struck_later = True
        network.after(network.random.uniform(0, scenario.spread_s), partial(_strike, cluster, scenario.later))
    begins = bool(user.infos)
    if scenario.fault_round == FORMED:
        begins = user.node.machine.epoch > 0
    elif scenario.fault_round == FORMING:
        begins = all(_is_welcome(cluster, name) for name in scenario.victims)
    if user.round < scenario.fault_round or not begins or cluster.struck_at is not None:
        return
    if scenario.victims or scenario.forced_cuts or scenario.parted_s:
        cluster.struck_at = network.now
        for _ in range(scenario.forced_cuts):
            name = network.random.choice(sorted(cluster.processes))
            network.after(network.random.uniform(0, 0.01), partial(_cut, cluster, name))
    if scenario.parted_s:
        network.after(network.random.uniform(0, scenario.spread_s), partial(_part, cluster))
    for name in scenario.victims:
        spared_s = 0.03 if scenario.fault_round == FORMED else 0.0  # all others have to hear of each other
        network.after(spared_s + network.random.uniform(0, scenario.spread_s), partial(_strike, cluster, name))


def _is_welcome(cluster: Cluster, name: str) -> bool:
    """Whether a process has its seat in the cluster, or is the scheduler."""
    machine = cluster.processes[name].node.machine if name in cluster.processes else None
    return machine is not None and (isinstance(machine, Scheduler) or machine.joining.welcomed)


def _is_moment(cluster: Cluster, user: User) -> bool:
    """Whether it is time to strike who is hit later."""
    worker = user.node.machine
    if cluster.scenario.is_at_join:
        newcomer = worker._newcomer if isinstance(worker, Worker) else None
        return newcomer is not None and newcomer.is_waiting
    scheduler = cluster.processes.get("scheduler")
    told = None if scheduler is None else scheduler.node.machine
    kind = Role.SERVER if any(name.startswith("server") for name in cluster.scenario.victims) else Role.WORKER
    return isinstance(told, Scheduler) and any(one.node.role is kind for one in told.membership.lost)


def _cut(cluster: Cluster, name: str) -> None:
    cluster.processes[name].transport.cut_one()


def _strike(cluster: Cluster, name: str) -> None:
    scenario = cluster.scenario
    victim = cluster.processes[name]
    if victim.ended:
        return
    cluster.struck_at = cluster.network.now
    assert cluster.oracle is not None
    if name.startswith("server"):
        cluster.dead_servers.append(name)
    is_judged = scenario.fault_round != FORMING
    if is_judged and (name in cluster.users or scenario.replicas) and _is_given_up(cluster, name):
        cluster.struck.add(name)
        if name in cluster.users:
            cluster.oracle.lost.add(cluster.users[name].rank)
    if scenario.pause_s is None:
        _kill(victim)
        _will_start_again(cluster, name)
        if scenario.returns_s and name == "scheduler":
            closed = _closed(cluster)
            cluster.network.after(
                cluster.network.random.uniform(0.05, scenario.returns_s), partial(_return, cluster, closed)
            )
    else:
        victim.is_void = name.startswith("server")
        cluster.woken_at = cluster.network.now + scenario.pause_s
        victim.pause(scenario.pause_s, scenario.limits.silence_s)


def _kill(victim: Process) -> None:
    victim.crash()
    disk = victim.node._disk
    assert isinstance(disk, SimulatedDisk)
    disk.crash()


def _will_start_again(cluster: Cluster, name: str) -> None:
    """Have the launcher say that a process has ended, and start it again, if it does so."""
    scenario, random = cluster.scenario, cluster.network.random
    is_replaced = scenario.replicas > 0 and name.startswith("server") and not scenario.fills
    if scenario.again is None or name == "scheduler" or is_replaced:
        return
    who, _, lives = name.partition(", life ")
    role, _, rank = who.partition("-")
    node, life = NodeId(Role(role), int(rank)), int(lives or 0)
    cluster.starting += 1
    delay_s, told_s = random.uniform(*scenario.again), random.uniform(0.0, 1.0)
    cluster.network.after(told_s, partial(_tell, cluster, node, life))
    cluster.network.after(delay_s, partial(_start_again, cluster, node, life + 1))


def _part(cluster: Cluster) -> None:
    """Let some processes not reach others for a while."""
    scenario, network, random = cluster.scenario, cluster.network, cluster.network.random
    assert scenario.parted_s is not None
    names = sorted({name.partition(",")[0] for name in cluster.processes})
    if scenario.parts == "few":
        workers = [name for name in names if name.startswith("worker")]
        away = random.sample(workers, random.randint(1, len(workers) - 1))
        if scenario.replicas or scenario.snapshot_s is not None:
            away += random.sample([name for name in names if name.startswith("server")], random.randint(0, 1))
        sides = [away, [name for name in names if name not in away]]
    elif scenario.parts == "copies":
        rank = random.randrange(scenario.num_servers)
        sides = [[f"server-{rank}"], [f"server-{(rank + 1) % scenario.num_servers}"]]
    else:
        chosen = random.sample(names, random.randint(2, len(names)))
        middle = random.randint(1, len(chosen) - 1)
        sides = [chosen[:middle], chosen[middle:]]
    random.shuffle(sides)
    ends_at = network.now + random.uniform(*scenario.parted_s)
    silent_at = network.now + scenario.limits.silence_s
    wall = Wall(frozenset(sides[0]), frozenset(sides[1]), random.random() < 0.5, ends_at, silent_at)
    network.happened["parted one way"] += wall.is_one_way
    network.part(wall, [process.transport for process in cluster.processes.values()])


def _play(cluster: Cluster) -> int:
    """Let time pass until every process has ended."""
    network = cluster.network
    expected = 1 + cluster.scenario.num_servers + cluster.scenario.num_workers
    events = 0
    while True:
        is_complete = len(cluster.processes) >= expected and not cluster.starting
        if is_complete and all(process.ended for process in cluster.processes.values()):
            return events
        if not network.step():
            raise AssertionError(f"nothing will ever happen again: {_state(cluster)}")
        events += 1
        if events > EVENTS_MAX:
            raise AssertionError(f"{EVENTS_MAX} events and no end: {_state(cluster)}")
        if network.now > TIME_MAX_S:
            raise AssertionError(f"somebody hangs: {_state(cluster)}")


def _judge(cluster: Cluster) -> None:
    """Every request has been answered, and nobody failed who had no reason to."""
    assert cluster.oracle is not None
    cluster.network.used["in part"] += sum(map(cluster.oracle.books.has_in_part, cluster.oracle.lost))
    for name, user in cluster.users.items():
        process = cluster.processes[name]
        if process.crashed:
            continue
        user.advance()
        if name in cluster.struck or process.node.machine.me in cluster.lost:
            assert user.done, f"{name} did not hear that it was given up"
            continue
        if user.life and isinstance(user.error, JobOver):
            assert cluster.scenario.on_loss != "wait", f"{name} was waited for, and was told that it is too late"
            assert user.since is None, f"{name} took part, and was told that it is too late"
            cluster.network.used["too late"] += 1
            continue
        if _starts_again(cluster, name) or _has_found_nobody(cluster, process):
            continue
        cluster.network.used["joined"] += user.life > 0
        cluster.network.used["a step once more"] += user.repeats
        cluster.network.used["went back"] += user.rollbacks > 0
        cluster.network.used["late at a barrier"] += user.late
        assert user.error is None or _must_abort(cluster), f"{name} got {user.error!r}"
        assert all(future.done() for future in user.asked), f"{name} has requests that nobody answered"
        assert user.done, f"{name} did not come to its end"
    least = cluster.scenario.min_workers or 0
    for number, rounds in cluster.oracle.books.rounds.items():
        few = sum(len(counted) < least for counted in rounds[: cluster.scenario.rounds])  # then some have finished
        assert few <= 2, f"{few} rounds of slice {number} were closed by fewer than {least} workers"
        cluster.network.used["closed by few"] += few
    if cluster.scenario.examples:
        _judge_examples(cluster)
    else:
        _judge_checkpoints(cluster)
    _judge_copies(cluster)
    cluster.network.used["offloaded"] += sum(device.downloaded_bytes > 0 for device in cluster.devices)
    assert not any(device.pending for device in cluster.devices), "a copy is under way after its round"
    survivors = [process for process in cluster.processes.values() if not process.crashed]
    survivors = [process for process in survivors if not _is_too_late(process)]
    for process in survivors:
        failure = process.node.failure
        if isinstance(failure, JobOver) or _starts_again(cluster, process.name) or _has_found_nobody(cluster, process):
            continue
        if process.node.machine.me in cluster.lost:
            assert isinstance(failure, FencedError | PeerLostError), f"{process.name} was given up: {failure!r}"
            cluster.network.used["fenced"] += isinstance(failure, FencedError)
            continue
        if process.name in cluster.struck:
            # Nobody is there any more to say so; or it wakes, and a connection that broke before is long overdue.
            over_at, wakes_at = cluster.processes["scheduler"].ended_at, cluster.woken_at
            is_late = isinstance(failure, PeerLostError) and not wakes_at < process.ended_at <= over_at
            assert isinstance(failure, FencedError) or is_late, (
                f"{process.name} was given up and ended with {failure!r}"
            )
            cluster.network.used["fenced"] += not is_late
            silent_s = cluster.given_up[process.name] - (cluster.struck_at or 0.0)
            patience_s = cluster.scenario.limits.patience_s
            assert silent_s < patience_s + 1.0, f"{process.name} was given up after {silent_s:.2f} s of silence"
            continue
        if not _must_abort(cluster):
            assert failure is None, f"{process.name} ended with {failure!r}"
            continue
        assert isinstance(failure, PeerLostError), f"{process.name} ended with {failure!r} and no PeerLostError"
        if cluster.scenario.parted_s:
            late_s = process.ended_at - (cluster.struck_at or 0.0)
            away_s = 0.0 if cluster.scenario.on_loss == "fail" else SCHEDULER_AWAY_S
            longest_s = away_s + 2 * cluster.scenario.limits.patience_s + PARTED_VERDICT_S
            assert late_s < longest_s, f"{process.name} took {late_s:.2f} s to notice"
        elif cluster.scenario.pause_s is None:
            hit = {name.partition(",")[0] for name, one in cluster.processes.items() if one.crashed}
            assert failure.node in hit, f"{process.name} blames {failure.node}: {failure}"
            late_s = process.ended_at - (cluster.struck_at or 0.0)
            assert late_s < VERDICT_S, f"{process.name} took {late_s:.2f} s to notice"


def _judge_copies(cluster: Cluster) -> None:
    """Where a copy is as far as its server, they are equal to the bit.

    A server stops when it is told to, also while it fills in a copy: `alone` are the slices that it has not begun with.
    """
    machines = [one.node.machine for one in cluster.processes.values() if not one.crashed and not one.is_void]
    there = {one.me: one for one in machines if isinstance(one, ReplicatedServer)}
    for primary in there.values():
        backup = None if primary._backup is None else there.get(primary._backup)
        copy = None if backup is None else backup.copy
        kept = primary.shard
        for holder in kept if copy is not None else ():
            numbers = [] if not holder.has_value else [one for one in holder.ids.tolist() if not kept.is_alone(one)]
            for number in numbers:
                assert copy is not None
                other = copy.shard.holder(number)
                if primary._confirmed < primary._told and (other is None or not other.has_value):
                    cluster.network.used["stopped while a copy was filled in"] += 1
                    continue
                assert other is not None, f"the copy of {primary.me} lacks slice {number}"
                if (holder.round.version, holder.round.counted) != (other.round.version, other.round.counted):
                    continue  # it stopped before it had heard of that
                own, its = (of.images_of([number], EVERYTHING)[0][0] for of in (kept, copy.shard))
                assert content(own) == content(its), f"slice {number} of {primary.me} has another copy"
                cluster.network.used["compared with its copy"] += 1


def _is_too_late(process: Process) -> bool:
    """Whether this is a server that was started again and has not joined the others before they had finished."""
    machine = process.node.machine
    return isinstance(machine, Server) and bool(machine.joining.introduction.life) and not machine.joining.complete


def _has_found_nobody(cluster: Cluster, process: Process) -> bool:
    """Whether this was started again, and the job had ended before it got through, or before it could hear so: what was
    said to it was lost with a connection, and there is nobody to repeat it."""
    joining = process.node.machine.joining if isinstance(process.node.machine, Server | Worker) else None
    user, scheduler, failure = cluster.users.get(process.name), cluster.processes["scheduler"], process.node.failure
    if joining is None or not joining.introduction.life:
        return False
    if user is not None and user.since is None and isinstance(failure, PeerLostError):
        return scheduler.node.failure is None and not scheduler.crashed and scheduler.ended_at < process.ended_at
    if joining.welcomed or not isinstance(failure, DeadlineExceeded):
        return False
    began_at = process.ended_at - cluster.scenario.limits.connect_timeout_s
    is_late = not joining.hint and scheduler.ended_at < began_at + HELLO_INTERVAL_S  # not even a hello got through
    return is_late or cluster.scenario.parted_s is not None


def _starts_again(cluster: Cluster, name: str) -> bool:
    """Whether a worker was joining when a server or the scheduler was lost, and has ended for that; a launcher would
    start it again."""
    user, failure = cluster.users.get(name), cluster.processes[name].node.failure
    if user is not None and user.life and cluster.scenario.returns_s and user.since is None:
        # It had not heard who is there; the scheduler was away for longer than a connection, or is another one now.
        reasons = ("was started again before", "its connection closed and did not come back")
        machine = cluster.processes[name].node.machine
        is_unknown = isinstance(machine, Worker) and not machine.joining.complete
        if is_unknown and isinstance(failure, PeerLostError) and any(one in str(failure) for one in reasons):
            return True
    if user is None or not user.life:
        return False
    reason = "while this worker was joining" if cluster.scenario.replicas else "while it joined"
    return isinstance(failure, FencedError | PeerLostError) and reason in str(failure)


def _replay(cluster: Cluster) -> None:
    """New machines that are told the same answer the same, from records that were written down and read back."""
    for process in () if cluster.dumps is None else cluster.processes.values():
        ring = process.node.ring
        if ring is None:
            continue  # a scheduler that took the place of another
        assert not ring.dropped
        writer, reader = Writer(), Reader()
        lines = [json.dumps(writer.plain(entry)) for entry in (ring.beginning, *ring.entries)]
        beginning, *entries = [reader.value(json.loads(line)) for line in lines]
        outcome = replay(beginning, entries)
        assert not isinstance(outcome, Difference), f"{process.name}: {outcome}"
        cluster.network.used["replayed"] += len(entries)


def _judge_examples(cluster: Cluster) -> None:
    """All are used once, and every checkpoint was made."""
    assert cluster.oracle is not None
    users = [user for user in cluster.users.values() if isinstance(user, LeasingUser)]
    require_used_once(users, cluster.oracle.books, cluster.scenario.examples)
    for user in users:
        if user.rank not in cluster.oracle.lost:
            for version, future in user.saves.items():
                error = future.exception()
                is_dropped = isinstance(error, RolledBackError)
                assert error is None or is_dropped or FULL in str(error), f"checkpoint of version {version}: {error!r}"
    for folder in cluster.shelf.called_for() if cluster.scenario.mode == "sync" else ():
        require_position(users, cluster.oracle.books, cluster.scenario.examples, cluster.shelf.manifests[folder])
    cluster.network.used["checkpoint"] += len(cluster.shelf.manifests)


def _judge_checkpoints(cluster: Cluster) -> None:
    """What is there is right; what is not was refused to everybody; and nothing is left of it."""
    shelf, oracle = cluster.shelf, cluster.oracle
    assert oracle is not None
    for folder in shelf.called_for():
        oracle.require_saved(shelf, folder, int(folder[-3:]))
        cluster.network.used["checkpoint"] += 1
    if _must_abort(cluster):
        return
    stayed = [user for user in cluster.users.values() if user.job.rounds_of(user.rank) == user.job.rounds]
    stayed = [user for user in stayed if user.rank not in oracle.lost]
    joined = [user for name, user in cluster.users.items() if user.life and name not in cluster.struck]
    stayed += [user for user in joined if user.since is not None and user.since < user.job.rounds]
    for user in stayed:
        for turn, future in user.saves.items():
            error = future.exception()
            if isinstance(error, RolledBackError):
                continue
            is_due_to_a_disk = isinstance(error, CheckpointError) and FULL in str(error)
            lost = "before it had saved its slices" in str(error) or "a server is lost" in str(error)
            is_due_to_a_server = lost and cluster.scenario.replicas > 0
            cluster.network.used["not saved for a dead server"] += is_due_to_a_server
            assert error is None or is_due_to_a_disk or is_due_to_a_server, f"checkpoint {turn}: {error!r}"
            exists = f"/checkpoints/step-{turn:03}" in shelf.manifests
            assert exists == (error is None), f"worker {user.rank} was told {error!r} of checkpoint {turn}"
    assert len({user.restored for user in stayed}) == 1, "all are told the same"
    cluster.network.used["restored"] += stayed[0].restored is True
    for folder, files in shelf.files.items():
        if folder.startswith(SNAPSHOTS):
            continue  # the last one may be under way when the job ends
        named = shelf.manifests[folder].files if folder in shelf.manifests else ()
        assert files.keys() == {file.name for file in named}, f"{sorted(files)} are left in {folder}"
    for process in cluster.processes.values():
        if process.crashed:
            continue
        machine = process.node.machine
        if isinstance(machine, Scheduler):
            assert not len(machine.checkpoints), "the scheduler keeps checkpoints that are over"
        if isinstance(machine, Server) and not process.crashed:
            assert not machine.checkpoints.called_for, f"{process.name} keeps checkpoints that are over"


def _must_abort(cluster: Cluster) -> bool:
    if cluster.scenario.parted_s:
        return _is_doomed(cluster) or _ends_for_a_wall(cluster)
    paused_s = cluster.scenario.pause_s or 0.0
    if _is_doomed(cluster):
        cluster.network.used["doomed"] += 1
        return True
    struck = [name for name, process in cluster.processes.items() if process.crashed]
    if cluster.scenario.returns_s:
        struck = [name for name in struck if name != "scheduler"]
    if cluster.scenario.fault_round != FORMING:
        struck += [name for name in cluster.scenario.victims if paused_s > cluster.scenario.limits.patience_s]
    return not all(_is_given_up(cluster, name) for name in struck)


def _ends_for_a_wall(cluster: Cluster) -> bool:
    """Whether the scheduler has ended the job, as it could not reach a process, or that one others."""
    scenario, failure = cluster.scenario, cluster.processes["scheduler"].node.failure
    may_end = scenario.parts == "any" and (scenario.parted_s or (0.0, 0.0))[1] > scenario.limits.patience_s
    if failure is None:
        return False
    assert may_end and isinstance(failure, PeerLostError), f"the scheduler ended with {failure!r}"
    cluster.network.used["ended for a wall"] += 1
    return True


def _is_given_up(cluster: Cluster, name: str) -> bool:
    """Whether the others go on without this process when it is lost."""
    if name.startswith("server") and cluster.scenario.snapshot_s is not None:
        return True
    assert cluster.oracle is not None
    if name.startswith("server") and cluster.scenario.hurries and not cluster.oracle.went_back:
        return True  # it had a copy; only while a store is loaded, each loss ends the job
    if name.startswith("server") and cluster.scenario.fills:  # it is known to the scheduler what has a copy
        failure = cluster.processes["scheduler"].node.failure
        return not (isinstance(failure, PeerLostError) and failure.node == name.partition(",")[0])
    if name.startswith("server") and cluster.scenario.replicas:
        before = cluster.dead_servers[: cluster.dead_servers.index(name)]
        count, rank = cluster.scenario.num_servers, int(name[-1])
        return not any(f"server-{(rank + step) % count}" in before for step in (1, -1))
    return cluster.scenario.on_loss != "fail" and name in cluster.users


def _is_doomed(cluster: Cluster) -> bool:
    """Whether a key cannot get its first value any more, by the word of the scheduler."""
    failure = cluster.processes["scheduler"].node.failure
    reasons = ("its first value", "nobody can go back", "the only snapshot could not be written", FULL)
    return isinstance(failure, PeerLostError) and any(reason in str(failure) for reason in reasons)


def _state(cluster: Cluster) -> str:
    lines = []
    for name, process in cluster.processes.items():
        if not process.ended:
            lines.append(f"{name}: {process.node.machine.explain(cluster.network.now)}")
    return "; ".join(lines)


STORM = Weather(delay_s=0.005, loss=0.01, duplication=0.05, cut=0.004)
STORM_LIMITS = Limits(slice_bytes=SLICE_BYTES, window_bytes=160, farewell_s=60.0, patience_s=40.0)
"""What single losses have kept back, which TCP has not, is repeated message by message, two seconds each: last words
need longer, and so does the scheduler's word that a server is lost, for which workers wait as long as the patience."""

PROMPT = Limits(slice_bytes=SLICE_BYTES, window_bytes=160, explain_after_s=1.0)
"""A leader hands back after half a second what a paused worker keeps incomplete."""
IMPATIENT = Limits(slice_bytes=SLICE_BYTES, window_bytes=160, explain_after_s=0.02)
"""A leader hands back what is incomplete after a few messages, so that it races with what completes it."""

IMPATIENT_OF_SILENCE = Limits(slice_bytes=SLICE_BYTES, window_bytes=160, patience_s=2.0)
FORMS = Scenario(
    num_workers=3, optimizer="test", last_s=5.5, fault_round=FORMING, pause_s=6.0, limits=IMPATIENT_OF_SILENCE
)
"""Who stands still for three patiences wakes a moment after the last one has come."""
LATE = Scenario(num_workers=3, rounds=8, optimizer="test", saves=0.0, barrier_s=0.02)
"""Workers that call barriers again when others have not reached them in time."""
GOING_ON = Scenario(num_workers=4, rounds=6, optimizer="test", saves=0.3, spread_s=0.02, on_loss="continue")
JOINING = Scenario(
    num_workers=4,
    rounds=12,
    optimizer="test",
    saves=0.3,
    holds=False,
    spread_s=0.05,
    on_loss="continue",
    again=(0.02, 0.4),
    weather=Weather(delay_s=0.03),
)
"""A round takes about as long as a process that is started again."""
WAITING = replace(JOINING, on_loss="wait")
SLOW = Weather(delay_s=0.02)
"""What is under way is so for long, and may be lost with the one who has said it."""
NEAR_SCHEDULER = Weather(delay_s=0.4, scheduler_delay_s=0.005)
"""What is under way between workers and servers is so when all know of a loss."""
SUMMING = replace(GOING_ON, num_workers=6, hosts=2, local_reduce="on", holds=False, fault_round=2)
GOES_BACK = replace(JOINING, num_workers=3, rounds=14, saves=0.0, full=0.0, fault_round=6, snapshot_s=0.02)
GOES_BACK_LEASING = replace(GOES_BACK, examples=85)
RETURNS = replace(GOING_ON, num_workers=3, returns_s=1.5)

REPLICAS = replace(GOING_ON, num_workers=3, num_servers=3, replicas=1, saves=0.0, spread_s=0.05)

FILLS = replace(
    JOINING, num_workers=3, num_servers=3, replicas=1, fills=True, victims=("server-1",), saves=0.0, rounds=16
)

HURRIES = replace(FILLS, hurries=True, lives=6, num_workers=2, spread_s=0.2, weather=Weather(delay_s=0.02))

QUOTA = replace(GOING_ON, quota=20, holds=False, again=(0.02, 0.4), saves=0.0)
"""Rounds are in step, and of unequal parts. Server 0 counts."""
EXACT = replace(QUOTA, in_step=True)
QUORUM = replace(QUOTA, quota=2, when=DueWhen.QUORUM)
DELAYED = replace(QUOTA, mode="async", optimizer="sgd", quota=2, when=DueWhen.ASYNC, again=None, rounds=8)
"""Each push is a version. Server 0 says how late it is."""


def _at_own_pace(name: str, scenario: Scenario) -> dict[str, Scenario]:
    """What must not change what a policy promises, in lockstep."""
    still = replace(scenario, again=None)
    copies = {"num_servers": 3, "replicas": 1, "victims": ("server-0",), "spread_s": 0.3}
    return {
        name: replace(still, rounds=8),
        f"{name} in a storm": replace(still, weather=STORM, limits=STORM_LIMITS),
        f"{name} and a dead worker": replace(still, victims=("worker-1",)),
        f"{name} and newcomers": replace(
            scenario, victims=("worker-1", "worker-0"), rounds=12, weather=JOINING.weather
        ),
        f"{name} and workers that are waited for": replace(scenario, victims=("worker-1",), rounds=12, on_loss="wait"),
        f"{name} and a dead server": replace(still, fault_round=2, weather=SLOW, **copies),
        f"{name} and servers that die in a storm": replace(still, weather=STORM, limits=STORM_LIMITS, **copies),
        f"{name} goes back": replace(
            GOES_BACK,
            quota=scenario.quota,
            when=scenario.when,
            in_step=scenario.in_step,
            victims=("server-1",),
        ),
        f"{name} and a scheduler that returns": replace(still, num_workers=3, returns_s=1.5, victims=("scheduler",)),
    }


def _alone(name: str, scenario: Scenario) -> dict[str, Scenario]:
    """The same for a policy of pushes that are versions."""
    copies = {"num_servers": 3, "replicas": 1, "victims": ("server-0",), "spread_s": 0.3}
    return {
        name: scenario,
        f"{name} in a storm": replace(scenario, weather=STORM, limits=STORM_LIMITS),
        f"{name} and a dead worker": replace(scenario, victims=("worker-1",)),
        f"{name} and newcomers": replace(
            scenario, victims=("worker-1",), again=(0.02, 0.4), rounds=12, weather=JOINING.weather
        ),
        f"{name} and a leaver": replace(scenario, leaver_rounds=2, on_loss="fail"),
        f"{name} and a dead server": replace(scenario, fault_round=2, weather=SLOW, **copies),
        f"{name} and a scheduler that returns": replace(scenario, num_workers=3, returns_s=1.5, victims=("scheduler",)),
    }


def _at_rest(name: str, scenario: Scenario) -> dict[str, Scenario]:
    """What may happen while some workers rest."""
    joins = {"again": (0.02, 0.4), "weather": Weather(delay_s=0.02), "saves": 0.0}
    return {
        f"{name} at rest": scenario,
        f"{name} at rest in a storm": replace(scenario, weather=STORM, limits=STORM_LIMITS),
        f"{name} at rest and dead workers": replace(scenario, victims=("worker-1", "worker-3"), fault_round=2),
        f"{name} at rest and newcomers": replace(scenario, victims=("worker-1", "worker-3"), fault_round=2, **joins),
        f"{name} at rest and a dead server": replace(
            scenario, num_servers=3, replicas=1, victims=("server-0",), fault_round=2, spread_s=0.3, saves=0.0
        ),
    }


LEASES = replace(GOING_ON, examples=85, victims=("worker-1", "worker-3"))
LEASES_JOIN = replace(LEASES, again=(0.02, 0.4), spread_s=0.05, weather=Weather(delay_s=0.02))
RESTING = replace(LEASES, quota=20, holds=False, victims=(), saves=0.5)
"""Workers at their own pace; who has no data rests, and in the end all make exchanges."""
LEASES_RETURN = replace(LEASES, spread_s=0.3, returns_s=0.6, weather=Weather(delay_s=0.01))

PARTED = replace(
    GOING_ON,
    parted_s=(4.0, 8.0),
    parts="few",
    limits=IMPATIENT_OF_SILENCE,
    rounds=24,
    fault_round=2,
    weather=Weather(delay_s=0.1),
)
"""Longer than the patience: whoever is on the side without the scheduler is given up."""

SCENARIOS: dict[str, Scenario] = {
    "calm": Scenario(rounds=6),
    "updated": Scenario(num_workers=3, rounds=5, optimizer="test"),
    "async": Scenario(rounds=5, mode="async", optimizer="sgd"),
    "long async": Scenario(num_workers=3, rounds=10, mode="async", optimizer="sgd"),
    "cuts": Scenario(optimizer="sgd", forced_cuts=4),
    "checkpoints": Scenario(num_workers=3, rounds=6, optimizer="momentum", saves=0.7),
    "checkpoints in a storm": Scenario(
        num_workers=3, rounds=4, optimizer="momentum", saves=0.7, full=0.1, weather=STORM, limits=STORM_LIMITS
    ),
    "checkpoints of hosts": Scenario(
        num_workers=4, rounds=5, optimizer="momentum", saves=0.7, hosts=2, local_reduce="on", limits=IMPATIENT
    ),
    "checkpoints of hosts in a storm": Scenario(
        num_workers=4,
        rounds=5,
        optimizer="momentum",
        saves=0.7,
        hosts=2,
        local_reduce="on",
        weather=STORM,
        limits=STORM_LIMITS,
    ),
    "checkpoints and a leaver": Scenario(
        num_workers=3, rounds=5, leaver_rounds=3, leaver=0, optimizer="momentum", saves=0.7
    ),
    "async checkpoints": Scenario(num_workers=3, rounds=6, mode="async", optimizer="sgd", saves=0.7, full=0.1),
    "checkpoint and a killed server": Scenario(rounds=5, saves=0.8, victims=("server-0",), fault_round=2),
    "checkpoint and a paused worker": Scenario(
        num_workers=3, rounds=5, saves=0.8, victims=("worker-1",), pause_s=2.5, limits=PROMPT
    ),
    "storm": Scenario(weather=STORM, limits=STORM_LIMITS),
    "async storm": Scenario(mode="async", optimizer="test", weather=STORM, limits=STORM_LIMITS),
    "late at barriers": LATE,
    "late at barriers in a storm": replace(LATE, weather=STORM, limits=STORM_LIMITS),
    "leaver": Scenario(num_workers=3, rounds=4, leaver_rounds=2, optimizer="test"),
    "leaver in a storm": Scenario(num_workers=3, rounds=3, leaver_rounds=1, weather=STORM, limits=STORM_LIMITS),
    "offloaded": Scenario(num_workers=3, rounds=6, optimizer="momentum", saves=0.7, offloaded=True),
    "offloaded sums": Scenario(num_workers=3, rounds=6, saves=0.7, offloaded=True),
    "offloaded async": Scenario(rounds=6, mode="async", optimizer="sgd", saves=0.7, offloaded=True),
    "offloaded and a leaver": Scenario(
        num_workers=3, rounds=5, leaver_rounds=3, leaver=0, optimizer="momentum", saves=0.7, offloaded=True
    ),
    "offloaded and encoded": Scenario(
        num_workers=3, rounds=5, optimizer="test", encodes=0.6, holds=False, offloaded=True
    ),
    "offloaded in a storm": Scenario(
        num_workers=3,
        rounds=4,
        optimizer="momentum",
        saves=0.7,
        full=0.1,
        offloaded=True,
        weather=STORM,
        limits=STORM_LIMITS,
    ),
    "offloaded on hosts": Scenario(
        num_workers=4, rounds=4, hosts=2, local_reduce="on", optimizer="momentum", saves=0.7, offloaded=True
    ),
    "offloaded beside rows": Scenario(num_workers=3, rounds=5, optimizer="sgd", tables=True, saves=0.0, offloaded=True),
    "encoded": Scenario(num_workers=3, rounds=6, optimizer="test", encodes=0.6, holds=False),
    "encoded async": Scenario(rounds=5, mode="async", optimizer="sgd", encodes=0.6, holds=False),
    "encoded in a storm": Scenario(
        num_workers=3, rounds=4, encodes=0.6, holds=False, weather=STORM, limits=STORM_LIMITS
    ),
    "encoded on hosts": Scenario(num_workers=4, rounds=4, hosts=2, local_reduce="on", encodes=1.0, holds=False),
    "killed worker": Scenario(num_workers=3, rounds=5, victims=("worker-1",)),
    "killed server": Scenario(rounds=5, victims=("server-0",)),
    "killed scheduler": Scenario(rounds=5, victims=("scheduler",)),
    "one host": Scenario(num_workers=3, rounds=5, hosts=1, local_reduce="on", holds=False),
    "one host that holds": Scenario(num_workers=3, rounds=5, hosts=1, local_reduce="on", optimizer="sgd"),
    "two hosts": Scenario(num_workers=4, rounds=5, hosts=2, optimizer="test"),
    "impatient hosts": Scenario(num_workers=5, rounds=5, hosts=2, local_reduce="on", limits=IMPATIENT, holds=False),
    "async hosts": Scenario(num_workers=4, rounds=4, hosts=2, mode="async", optimizer="sgd", local_reduce="on"),
    "hosts in cuts": Scenario(num_workers=4, hosts=2, optimizer="sgd", forced_cuts=6, holds=False),
    "hosts in a storm": Scenario(num_workers=4, hosts=2, local_reduce="on", weather=STORM, limits=STORM_LIMITS),
    "follower leaves": Scenario(num_workers=4, rounds=4, leaver_rounds=2, hosts=2, local_reduce="on", optimizer="test"),
    "leader leaves": Scenario(num_workers=4, rounds=4, leaver_rounds=2, leaver=0, hosts=2, optimizer="test"),
    "leader leaves one host": Scenario(
        num_workers=3, rounds=4, leaver_rounds=2, leaver=0, hosts=1, local_reduce="on", holds=False
    ),
    "leader leaves in a storm": Scenario(
        num_workers=4,
        leaver_rounds=1,
        leaver=1,
        hosts=2,
        local_reduce="on",
        weather=STORM,
        limits=STORM_LIMITS,
        holds=False,
    ),
    "impatient leader leaves": Scenario(
        num_workers=4, rounds=4, leaver_rounds=2, leaver=0, hosts=2, local_reduce="on", limits=IMPATIENT, holds=False
    ),
    "killed leader": Scenario(num_workers=4, rounds=5, victims=("worker-0",), hosts=2),
    "killed follower": Scenario(num_workers=4, rounds=5, victims=("worker-2",), hosts=2, local_reduce="on"),
    "paused follower": Scenario(num_workers=4, victims=("worker-3",), pause_s=2.5, hosts=2, limits=PROMPT),
    "paused leader": Scenario(num_workers=4, victims=("worker-1",), pause_s=2.5, hosts=2, limits=PROMPT),
    "paused worker while the cluster forms": replace(FORMS, victims=("worker-1",)),
    "paused server while the cluster forms": replace(FORMS, victims=("server-1",)),
    "paused scheduler while the cluster forms": replace(FORMS, victims=("scheduler",)),
    "paused worker while a cluster forms that goes on": replace(FORMS, victims=("worker-0",), on_loss="continue"),
    "short pause": Scenario(victims=("server-1",), pause_s=2.5),
    "long pause": Scenario(num_workers=3, rounds=5, victims=("worker-2",), pause_s=8.0),
    "rows": Scenario(num_workers=3, rounds=6, tables=True, saves=0.0),
    **_at_own_pace("quota", QUOTA),
    # A round takes longer than the news of a death, so the dead one has reported for a round that is open.
    "quota and a worker that dies in a long round": replace(
        QUOTA, again=None, victims=("worker-1",), quota=250, weather=SLOW, spread_s=0.2
    ),
    # One of them has pushed what the other is still awaited for.
    "quota and two dead workers": replace(QUOTA, again=None, victims=("worker-1", "worker-3")),
    # The others of these are in step anyway.
    **{name: one for name, one in _at_own_pace("exact quota", EXACT).items() if one.again is None},
    **_at_own_pace("quorum", QUORUM),
    **_alone("delays", DELAYED),
    "goes on": replace(GOING_ON, victims=("worker-1",)),
    "goes on without rank 0": replace(GOING_ON, victims=("worker-0",)),
    "goes on without two": replace(GOING_ON, victims=("worker-1", "worker-3")),
    "goes on with one": replace(GOING_ON, victims=("worker-1", "worker-3", "worker-0")),
    "goes on in a storm": replace(GOING_ON, victims=("worker-1", "worker-2"), weather=STORM, limits=STORM_LIMITS),
    "goes on async": replace(GOING_ON, victims=("worker-2",), mode="async", optimizer="sgd"),
    "goes on encoded": replace(GOING_ON, victims=("worker-2",), encodes=0.6, holds=False),
    "goes on saving": replace(GOING_ON, victims=("worker-2",), optimizer="momentum", saves=0.8),
    "goes on saving in a storm": replace(
        GOING_ON, victims=("worker-2", "worker-0"), weather=STORM, limits=STORM_LIMITS, saves=0.8
    ),
    "goes on loading": replace(GOING_ON, victims=("worker-1",), spread_s=0.1, saves=1.0, fault_round=5, full=0.0),
    "goes on with rows": replace(GOING_ON, victims=("worker-2",), tables=True, saves=0.0),
    "goes on with rows in a storm": replace(
        GOING_ON,
        victims=("worker-2", "worker-1"),
        weather=STORM,
        limits=STORM_LIMITS,
        tables=True,
        saves=0.0,
    ),
    "goes on offloaded": replace(GOING_ON, victims=("worker-3",), offloaded=True, optimizer="momentum"),
    "goes on from the start": replace(GOING_ON, victims=("worker-1",), fault_round=-1, tables=True, saves=0.0),
    "goes on or is doomed": replace(GOING_ON, victims=("worker-0",), fault_round=-1, spread_s=0.01),
    "goes on without a zombie": replace(
        GOING_ON, victims=("worker-2",), pause_s=3.05, weather=STORM, limits=IMPATIENT_OF_SILENCE
    ),
    "goes on with sums of hosts": replace(SUMMING, victims=("worker-0", "worker-3")),
    "goes on with sums of hosts in a storm": replace(
        SUMMING, victims=("worker-0", "worker-3"), weather=STORM, limits=STORM_LIMITS
    ),
    "goes on with sums of a zombie": replace(SUMMING, victims=("worker-1",), pause_s=3.05, limits=IMPATIENT_OF_SILENCE),
    "goes on with sums under way for long": replace(
        SUMMING, victims=("worker-0", "worker-3"), rounds=4, saves=0.0, weather=NEAR_SCHEDULER
    ),
    "goes on without a server": replace(GOING_ON, victims=("server-1",)),
    "replicas": replace(REPLICAS),
    "replicas and a dead server": replace(REPLICAS, victims=("server-1",)),
    "replicas of two servers": replace(REPLICAS, victims=("server-0",), num_servers=2),
    "replicas async": replace(REPLICAS, victims=("server-1",), mode="async", optimizer="sgd", rounds=10),
    "replicas in a storm": replace(REPLICAS, victims=("server-2",), weather=STORM, limits=STORM_LIMITS),
    "replicas async in a storm": replace(
        REPLICAS, victims=("server-2",), mode="async", optimizer="sgd", weather=STORM, limits=STORM_LIMITS
    ),
    "replicas of rows": replace(REPLICAS, victims=("server-1",), tables=True),
    "replicas of rows in a storm": replace(
        REPLICAS, victims=("server-0",), tables=True, weather=STORM, limits=STORM_LIMITS
    ),
    "replicas and two dead servers": replace(REPLICAS, victims=("server-0", "server-2"), num_servers=4),
    "replicas and two dead neighbours": replace(REPLICAS, victims=("server-0", "server-2")),
    "replicas and a dead worker": replace(REPLICAS, victims=("server-1", "worker-1")),
    "replicas and checkpoints": replace(
        REPLICAS, victims=("server-1",), optimizer="momentum", saves=0.8, rounds=8, spread_s=0.1, weather=SLOW
    ),
    "replicas offloaded": replace(REPLICAS, victims=("server-1",), offloaded=True, optimizer="momentum"),
    "replicas encoded": replace(REPLICAS, victims=("server-1",), encodes=0.6, holds=False),
    "replicas and newcomers": replace(
        JOINING, num_servers=3, replicas=1, victims=("server-1", "worker-1"), spread_s=0.3, saves=0.0, rounds=16
    ),
    "replicas and a scheduler that returns": replace(
        REPLICAS, victims=("server-1",), later="scheduler", returns_s=1.0, saves=0.5, weather=SLOW
    ),
    "replicas and a zombie": replace(
        REPLICAS, victims=("server-1",), pause_s=3.8, weather=STORM, limits=IMPATIENT_OF_SILENCE
    ),
    "replicas and leases": replace(LEASES, num_servers=3, replicas=1, victims=("server-1", "worker-1"), saves=0.0),
    "replicas from the start": replace(REPLICAS, victims=("server-1",), fault_round=-1, spread_s=0.02, tables=True),
    "fills": replace(FILLS),
    "fills again and again": replace(FILLS, num_servers=2, rounds=40, lives=6),
    "fills until its server is killed": replace(FILLS, later="server-2", spread_s=0.15, rounds=12),
    "fills and a dead neighbour": replace(FILLS, later="server-2", rounds=30, spread_s=1.0),
    "fills with momentum": replace(FILLS, optimizer="momentum", rounds=30, lives=4),
    "fills near the end": replace(FILLS, saves=0.9, full=0.0, fault_round=13, spread_s=0.5, lives=2),
    "fills as a checkpoint is loaded": replace(
        FILLS,
        num_workers=2,
        num_servers=2,
        optimizer="test",
        rounds=3,
        saves=0.4,
        full=0.0,
        fault_round=2,
        spread_s=1.5,
        again=(0.02, 1.0),
        weather=NEAR_SCHEDULER,
    ),
    "fills async": replace(FILLS, mode="async", optimizer="sgd", later="server-2", rounds=30, spread_s=1.0),
    "fills in a storm": replace(FILLS, later="server-2", weather=STORM, limits=STORM_LIMITS, rounds=30, spread_s=1.0),
    "fills rows": replace(FILLS, tables=True, later="server-2", rounds=20, spread_s=1.0),
    "fills rows again and again": replace(FILLS, tables=True, num_servers=2, rounds=30, lives=6),
    "fills while workers die": replace(
        FILLS, victims=("server-1", "worker-1", "worker-2"), later="server-2", rounds=30, spread_s=1.0
    ),
    "fills saving": replace(FILLS, saves=0.7, optimizer="momentum", num_servers=2, rounds=24, lives=4),
    "fills offloaded": replace(FILLS, offloaded=True, optimizer="momentum", later="server-2", spread_s=1.0, rounds=24),
    "fills in a hurry": HURRIES,
    "fills in a hurry with two servers": replace(HURRIES, num_servers=2),
    "fills in a hurry with four servers": replace(HURRIES, num_servers=4, optimizer="momentum"),
    "fills rows in a hurry": replace(HURRIES, tables=True),
    "fills and saves rows in a hurry": replace(
        HURRIES, tables=True, saves=0.6, num_servers=2, optimizer="sgd", rounds=12
    ),
    "fills async in a hurry": replace(HURRIES, mode="async", optimizer="sgd"),
    "fills saving in a hurry": replace(
        HURRIES, saves=0.9, full=0.0, num_servers=2, num_workers=3, weather=Weather(delay_s=0.05)
    ),
    "fills in a hurry in a storm": replace(HURRIES, weather=STORM, limits=STORM_LIMITS),
    "fills in a hurry near the end": replace(HURRIES, saves=0.9, full=0.0, fault_round=9, rounds=12),
    "fills in a hurry with a far scheduler": replace(
        HURRIES, weather=Weather(delay_s=0.005, scheduler_delay_s=0.15), again=(0.02, 0.1)
    ),
    "fills in a hurry while the scheduler dies": replace(HURRIES, returns_s=0.4, saves=0.3),
    "fills in a hurry while workers die": replace(
        HURRIES, victims=("server-1", "worker-1", "worker-2"), num_workers=4, rounds=24
    ),
    "joins": replace(JOINING, victims=("worker-1",)),
    "joins and is late at barriers": replace(JOINING, victims=("worker-1",), barrier_s=LATE.barrier_s),
    "joins as rank 0": replace(JOINING, victims=("worker-0",)),
    "joins beside another": replace(JOINING, victims=("worker-1", "worker-2")),
    "joins with a far scheduler": replace(
        JOINING,
        victims=("worker-1", "worker-2"),
        rounds=20,
        saves=0.0,
        spread_s=0.0,
        again=(0.1, 0.3),
        weather=Weather(delay_s=0.005, scheduler_delay_s=0.15),
    ),
    "joins while the scheduler is away": replace(
        JOINING,
        victims=("worker-1", "worker-2", "scheduler"),
        returns_s=0.4,
        spread_s=1.0,
        again=(0.1, 0.3),
        weather=Weather(delay_s=0.01, scheduler_delay_s=0.15),
    ),
    "joins as the scheduler dies": replace(
        JOINING,
        victims=("worker-1",),
        later="scheduler",
        is_at_join=True,
        min_workers=4,
        returns_s=0.4,
        rounds=6,
        saves=0.0,
        weather=Weather(delay_s=0.01, scheduler_delay_s=0.05),
    ),
    "joins when too few are left": replace(
        JOINING, victims=("worker-1", "worker-2"), min_workers=3, saves=0.2, again=(0.3, 0.8)
    ),
    "joins before the first mean": replace(JOINING, victims=("worker-1", "worker-0"), means=(4, 7), saves=0.0),
    "joins when all were lost": replace(
        JOINING, victims=tuple(f"worker-{rank}" for rank in range(4)), optimizer="momentum", again=(0.5, 1.0)
    ),
    "joins again and again": replace(JOINING, victims=("worker-1", "worker-0"), rounds=24, lives=5),
    "joins in a storm": replace(JOINING, victims=("worker-1",), weather=STORM, limits=STORM_LIMITS),
    "joins again and again in a storm": replace(
        JOINING, victims=("worker-2", "worker-1"), rounds=16, lives=4, weather=STORM, limits=STORM_LIMITS
    ),
    "joins while others save": replace(JOINING, victims=("worker-1",), optimizer="momentum", saves=0.8),
    "joins with rows": replace(JOINING, victims=("worker-2",), tables=True, saves=0.0),
    "joins sums of hosts": replace(
        JOINING,
        num_workers=6,
        rounds=5,
        saves=0.0,
        hosts=2,
        local_reduce="on",
        victims=("worker-3", "worker-5"),
        fault_round=2,
        again=(0.0, 0.1),
        weather=NEAR_SCHEDULER,
    ),
    "joins async": replace(JOINING, victims=("worker-2",), mode="async", optimizer="sgd", saves=0.0),
    "joins late": replace(JOINING, victims=("worker-1",), rounds=4, fault_round=3, again=(0.0, 0.6)),
    "joins from the start": replace(JOINING, victims=("worker-1",), fault_round=-1, rounds=8),
    "joins offloaded": replace(JOINING, victims=("worker-2",), offloaded=True, optimizer="momentum"),
    "waits": replace(WAITING, victims=("worker-1",)),
    "waits for rank 0": replace(WAITING, victims=("worker-0",), optimizer="momentum"),
    "waits for two": replace(WAITING, victims=("worker-1", "worker-2")),
    "waits for all": replace(WAITING, victims=tuple(f"worker-{rank}" for rank in range(4)), again=(0.1, 1.0)),
    "waits again and again": replace(WAITING, victims=("worker-1", "worker-0"), rounds=24, lives=5),
    "waits in a storm": replace(WAITING, victims=("worker-1",), weather=STORM, limits=STORM_LIMITS),
    "waits again and again in a storm": replace(
        WAITING, victims=("worker-2", "worker-1"), rounds=16, lives=4, weather=STORM, limits=STORM_LIMITS
    ),
    "waits and saves": replace(WAITING, victims=("worker-1",), optimizer="momentum", saves=0.8),
    "waits with rows": replace(WAITING, victims=("worker-2",), tables=True, saves=0.0),
    "waits again and again with rows": replace(
        WAITING, victims=("worker-2", "worker-0"), tables=True, saves=0.0, rounds=20, lives=4
    ),
    "waits holding": replace(WAITING, victims=("worker-2",), holds=True),
    "waits encoded": replace(WAITING, victims=("worker-1",), encodes=0.6, rounds=8),
    "waits offloaded": replace(WAITING, victims=("worker-2",), offloaded=True, optimizer="momentum"),
    "waits with a far scheduler": replace(
        WAITING,
        victims=("worker-1", "worker-2"),
        saves=0.0,
        spread_s=0.0,
        again=(0.1, 0.3),
        weather=Weather(delay_s=0.005, scheduler_delay_s=0.15),
    ),
    "waits from the start": replace(WAITING, victims=("worker-1",), fault_round=-1, rounds=8),
    "waits while a second model begins": replace(
        WAITING, victims=("worker-1",), fault_round=-1, rounds=8, second=True, again=(0.0, 0.1)
    ),
    "waits at the end": replace(WAITING, victims=("worker-1",), rounds=4, fault_round=3, again=(0.0, 0.6)),
    "waits for one that left others behind": replace(WAITING, victims=("worker-1",), leaver_rounds=3, fault_round=2),
    "leases": replace(LEASES, victims=()),
    "leases of lost workers": LEASES,
    "leases and is late at barriers": replace(LEASES, barrier_s=0.005),
    "leases of all but one": replace(LEASES, victims=("worker-1", "worker-3", "worker-0"), spread_s=0.2),
    "leases in a storm": replace(LEASES, victims=("worker-1", "worker-2"), weather=STORM, limits=STORM_LIMITS),
    "leases of a zombie": replace(LEASES, victims=("worker-2",), pause_s=3.05, limits=IMPATIENT_OF_SILENCE),
    "leases async": replace(LEASES, mode="async", saves=0.0),
    **_at_rest("quota", RESTING),
    **_at_rest("exact quota", replace(RESTING, in_step=True)),
    **_at_rest("quorum", replace(RESTING, quota=2, when=DueWhen.QUORUM)),
    "leases near the end": replace(LEASES, victims=("worker-0", "worker-1", "worker-2"), fault_round=14, spread_s=0.01),
    "leases on hosts": replace(LEASES, num_workers=6, hosts=2, local_reduce="on", victims=("worker-0", "worker-3")),
    "leases and a leaver": replace(LEASES, victims=("worker-2",), leaver=1, leaver_rounds=4),
    "leases and newcomers": replace(LEASES_JOIN),
    "leases and newcomers again and again": replace(LEASES_JOIN, lives=4, examples=170),
    "leases and newcomers near the end": replace(LEASES_JOIN, fault_round=14, again=(0.0, 0.2)),
    "leases and newcomers in a storm": replace(LEASES_JOIN, weather=STORM, limits=STORM_LIMITS),
    "leases and newcomers when too few are left": replace(LEASES_JOIN, min_workers=4, fault_round=13, spread_s=0.3),
    "leases and newcomers with a far scheduler": replace(
        LEASES_JOIN, spread_s=0.5, weather=Weather(delay_s=0.005, scheduler_delay_s=0.15)
    ),
    "leases and newcomers and a scheduler that returns": replace(
        LEASES_JOIN, victims=("scheduler", "worker-1", "worker-3"), spread_s=0.5, returns_s=0.6
    ),
    "leases and newcomers on replicas": replace(
        LEASES_JOIN, num_servers=3, replicas=1, victims=("server-1", "worker-1"), spread_s=0.5, saves=0.0
    ),
    "leases and newcomers async": replace(LEASES_JOIN, mode="async", saves=0.0),
    "leases and newcomers on hosts": replace(
        LEASES_JOIN, num_workers=6, hosts=2, local_reduce="on", victims=("worker-0", "worker-3")
    ),
    "leases on replicas and a scheduler that returns": replace(
        LEASES_RETURN, num_servers=3, replicas=1, victims=("server-1",), later="scheduler", saves=0.0
    ),
    "leases and newcomers on replicas and a scheduler that returns": replace(
        LEASES_JOIN,
        num_servers=3,
        replicas=1,
        victims=("server-1", "worker-1", "worker-3", "scheduler"),
        spread_s=0.5,
        returns_s=0.6,
        saves=0.0,
    ),
    "leases and a scheduler that returns": replace(LEASES_RETURN, victims=("scheduler",)),
    "leases and a scheduler that returns twice": replace(LEASES_RETURN, victims=("scheduler",) * 3, returns_s=0.1),
    "leases and a scheduler that dies with workers": replace(
        LEASES_RETURN, victims=("scheduler", "worker-1", "worker-3", "scheduler"), returns_s=0.3
    ),
    "leases and a scheduler that dies when workers were given up": replace(
        LEASES_RETURN, victims=("worker-1", "worker-3"), later="scheduler", spread_s=0.02, returns_s=0.3
    ),
    "leases and a scheduler that returns to the end": replace(
        LEASES_RETURN, victims=("worker-0", "scheduler", "scheduler"), fault_round=14, spread_s=0.1, returns_s=0.2
    ),
    "goes back": replace(GOES_BACK, victims=("server-1",)),
    "goes back from late barriers": replace(GOES_BACK, victims=("server-1",), barrier_s=LATE.barrier_s),
    "goes back without both servers": replace(GOES_BACK, victims=("server-0", "server-1")),
    "goes back again and again": replace(GOES_BACK, victims=("server-0", "server-1"), rounds=30, lives=4),
    "goes back with momentum": replace(GOES_BACK, victims=("server-0",), optimizer="momentum"),
    "goes back with rows": replace(GOES_BACK, victims=("server-1",), tables=True),
    "goes back in a storm": replace(GOES_BACK, victims=("server-1",), weather=STORM, limits=STORM_LIMITS),
    "goes back while workers die": replace(GOES_BACK, victims=("server-1", "worker-1", "worker-2"), spread_s=0.4),
    "goes back saving": replace(GOES_BACK, victims=("server-0",), saves=0.5, optimizer="momentum"),
    "goes back with full disks": replace(GOES_BACK, victims=("server-0",), full=0.1),
    "goes back from torn snapshots": replace(GOES_BACK, victims=("server-1",), torn=0.7),
    "goes back from torn snapshots again and again": replace(
        GOES_BACK, victims=("server-0", "server-1"), torn=0.5, rounds=30, lives=4
    ),
    "goes back leasing from torn snapshots": replace(GOES_BACK_LEASING, victims=("server-1",), torn=0.7),
    "goes back as it saves": replace(
        GOES_BACK, victims=("server-1",), saves=0.9, optimizer="momentum", rounds=9, fault_round=4, spread_s=0.3
    ),
    "goes back and then loses a worker": replace(
        GOES_BACK,
        victims=("server-1",),
        later="worker-1",
        min_workers=3,
        snapshot_s=0.2,
        spread_s=0.2,
        again=(0.4, 1.0),
        weather=Weather(delay_s=0.02, scheduler_delay_s=0.1),
    ),
    "goes back when too few are left": replace(
        GOES_BACK,
        victims=("server-1",),
        later="worker-1",
        min_workers=3,
        rounds=40,
        leaver_rounds=40,
        snapshot_s=0.1,
        spread_s=0.1,
        again=(0.6, 1.0),
        weather=Weather(delay_s=0.003, scheduler_delay_s=0.2),
    ),
    "goes back saving with a far scheduler": replace(
        GOES_BACK,
        victims=("server-0",),
        saves=0.9,
        optimizer="momentum",
        rounds=16,
        fault_round=4,
        spread_s=0.3,
        weather=Weather(delay_s=0.005, scheduler_delay_s=0.15),
    ),
    "goes back holding": replace(GOES_BACK, victims=("server-0",), holds=True),
    "goes back encoded": replace(GOES_BACK, victims=("server-1",), encodes=0.6, rounds=10, fault_round=4),
    "goes back after its scheduler": replace(
        GOES_BACK, victims=("scheduler",), returns_s=0.4, later="server-1", rounds=40, optimizer="momentum"
    ),
    "goes back leasing": replace(GOES_BACK_LEASING, victims=("server-1",)),
    "goes back leasing again and again": replace(
        GOES_BACK_LEASING, victims=("server-0", "server-1"), lives=4, examples=170
    ),
    "goes back leasing near the end": replace(GOES_BACK_LEASING, victims=("server-0",), fault_round=18, spread_s=0.3),
    "goes back leasing and saving": replace(GOES_BACK_LEASING, victims=("server-0",), saves=0.3),
    "goes back leasing while workers die": replace(
        GOES_BACK_LEASING, victims=("server-1", "worker-1", "worker-2"), spread_s=0.4
    ),
    "goes back leasing when too few are left": replace(
        GOES_BACK_LEASING, victims=("server-1",), later="worker-1", min_workers=3, spread_s=1.0
    ),
    "goes back leasing after its scheduler": replace(
        GOES_BACK_LEASING, victims=("scheduler",), returns_s=0.4, later="server-1", examples=170
    ),
    "goes back leasing in a storm": replace(
        GOES_BACK_LEASING, victims=("server-1",), weather=STORM, limits=STORM_LIMITS
    ),
    "scheduler returns": replace(RETURNS, victims=("scheduler",)),
    "scheduler returns to late barriers": replace(RETURNS, victims=("scheduler",), barrier_s=LATE.barrier_s),
    "scheduler returns while keys are declared": replace(
        RETURNS, victims=("scheduler",), fault_round=-1, spread_s=0.02, tables=True, saves=0.0
    ),
    "scheduler returns while keys are placed": replace(
        RETURNS, victims=("scheduler",), fault_round=FORMED, spread_s=0.04, num_servers=3, rounds=3, weather=SLOW
    ),
    "scheduler returns to checkpoints": replace(
        RETURNS, victims=("scheduler",), optimizer="momentum", saves=0.9, full=0.1, spread_s=0.3, weather=SLOW
    ),
    "scheduler returns in a storm": replace(
        RETURNS, victims=("scheduler",), weather=STORM, limits=STORM_LIMITS, saves=0.7
    ),
    "scheduler returns twice": replace(RETURNS, victims=("scheduler",) * 3, rounds=12, returns_s=0.1, spread_s=0.4),
    "scheduler returns to the end": replace(RETURNS, victims=("scheduler",), fault_round=5, spread_s=0.1, saves=0.5),
    "scheduler and a worker": replace(RETURNS, victims=("scheduler", "worker-2"), spread_s=0.02),
    "scheduler while a loss is settled": replace(RETURNS, victims=("worker-1", "scheduler"), spread_s=0.5),
    "scheduler and a worker with rows": replace(
        RETURNS, victims=("scheduler", "worker-2"), tables=True, saves=0.0, weather=STORM, limits=STORM_LIMITS
    ),
    "scheduler returns where losses end the job": replace(RETURNS, victims=("scheduler",), on_loss="fail"),
    "scheduler returns and leaver": replace(
        RETURNS, victims=("scheduler",), leaver_rounds=3, fault_round=2, spread_s=0.2
    ),
    "parted": replace(PARTED, on_loss="fail", parts="any"),
    "parted for a moment": replace(PARTED, on_loss="fail", parts="any", parted_s=(1.0, 1.9), saves=0.5),
    "goes on parted for a moment": replace(PARTED, parts="any", parted_s=(1.0, 1.9)),
    "goes on parted": PARTED,
    "goes on parted in any way": replace(PARTED, parts="any"),
    "goes on parted in a storm": replace(PARTED, weather=STORM),
    "leases parted": replace(PARTED, examples=85),
    "scheduler returns to a parted network": replace(PARTED, victims=("scheduler",), returns_s=0.6, spread_s=0.5),
    "joins while the network is parted": replace(PARTED, again=(0.02, 0.4), rounds=12, holds=False),
    "waits while the network is parted": replace(PARTED, again=(0.02, 0.4), on_loss="wait", rounds=12, holds=False),
    "goes back parted": replace(
        GOES_BACK, parted_s=(4.0, 8.0), parts="few", limits=IMPATIENT_OF_SILENCE, snapshot_s=0.2, rounds=30
    ),
    "replicas parted for a moment": replace(
        PARTED, num_servers=3, replicas=1, saves=0.0, parts="any", parted_s=(1.0, 1.9)
    ),
    "replicas parted": replace(PARTED, num_servers=3, replicas=1, saves=0.0),
    "replicas parted in any way": replace(PARTED, num_servers=3, replicas=1, saves=0.0, parts="any"),
    "a server parted from its copies": replace(
        PARTED, num_servers=3, replicas=1, saves=0.0, parts="copies", parted_s=(1e5, 1e6)
    ),
    "one of two servers parted from the other": replace(
        PARTED, num_servers=2, replicas=1, saves=0.0, parts="copies", parted_s=(1e5, 1e6)
    ),
    "fills parted": replace(
        FILLS, victims=(), parted_s=(4.0, 8.0), parts="few", limits=IMPATIENT_OF_SILENCE, rounds=20
    ),
    "odd": Scenario(num_workers=3, rounds=6, optimizer="momentum", saves=0.7, is_odd=True),
    "odd and async": Scenario(
        num_workers=3, rounds=6, mode="async", optimizer="sgd", tables=True, saves=0.0, is_odd=True
    ),
    "odd in a storm": Scenario(
        num_workers=3, rounds=5, tables=True, saves=0.0, weather=STORM, limits=STORM_LIMITS, is_odd=True
    ),
    "odd sums of hosts": replace(SUMMING, victims=("worker-0", "worker-3"), is_odd=True),
    "odd newcomers": replace(JOINING, victims=("worker-1", "worker-0"), rounds=16, lives=2, is_odd=True),
    "odd waits": replace(WAITING, victims=("worker-1",), is_odd=True),
    "odd leases": replace(LEASES_JOIN, is_odd=True),
    "odd schedulers": replace(RETURNS, victims=("scheduler", "worker-2"), is_odd=True),
    "odd snapshots": replace(GOES_BACK, victims=("server-1",), tables=True, is_odd=True),
    "odd copies": replace(FILLS, tables=True, num_servers=2, rounds=30, lives=3, is_odd=True),
    "odd copies in a hurry": replace(HURRIES, optimizer="momentum", is_odd=True),
    "odd and parted": replace(PARTED, num_servers=3, replicas=1, saves=0.0, is_odd=True),
    "rows and checkpoints": Scenario(num_workers=3, rounds=6, optimizer="sgd", tables=True, saves=0.7),
    "rows and checkpoints in a storm": Scenario(
        optimizer="test", rounds=4, tables=True, saves=0.7, full=0.1, weather=STORM, limits=STORM_LIMITS
    ),
    "goes on saving rows": replace(GOING_ON, victims=("worker-2",), tables=True, saves=0.8),
    "rows updated": Scenario(num_workers=3, num_servers=3, rounds=5, optimizer="test", tables=True, saves=0.0),
    "rows async": Scenario(num_workers=3, rounds=5, mode="async", optimizer="sgd", tables=True, saves=0.0),
    "rows in a storm": Scenario(
        num_workers=3, optimizer="sgd", tables=True, saves=0.0, weather=STORM, limits=STORM_LIMITS
    ),
    "rows async in a storm": Scenario(
        mode="async", optimizer="test", tables=True, saves=0.0, weather=STORM, limits=STORM_LIMITS
    ),
    "rows and a leaver": Scenario(num_workers=3, rounds=4, leaver_rounds=2, tables=True, saves=0.0),
    "rows and a leaver in a storm": Scenario(
        num_workers=3,
        leaver_rounds=1,
        leaver=0,
        optimizer="test",
        tables=True,
        saves=0.0,
        weather=STORM,
        limits=STORM_LIMITS,
    ),
    "rows beside sums of hosts": Scenario(
        num_workers=4, rounds=4, hosts=2, local_reduce="on", optimizer="sgd", tables=True, saves=0.0, limits=PROMPT
    ),
    "rows and a killed server": Scenario(rounds=5, tables=True, saves=0.0, victims=("server-1",), fault_round=2),
    "rows and a paused worker": Scenario(
        num_workers=3, tables=True, saves=0.0, victims=("worker-1",), pause_s=2.5, limits=PROMPT
    ),
}
SCENARIOS |= {
    "scheduler returns while the cluster forms": replace(
        RETURNS, victims=("scheduler",) * 2, fault_round=FORMING, last_s=1.0, spread_s=1.5, returns_s=0.5, weather=SLOW
    ),
    "scheduler returns after it has given up who was silent": replace(
        RETURNS,
        num_workers=4,
        rounds=20,
        victims=("worker-1",),
        later="scheduler",
        spread_s=0.2,
        returns_s=0.2,
        limits=PROMPT,
    ),
    "goes back and loses its scheduler on the way": replace(
        GOES_BACK, victims=("server-1",), later="scheduler", returns_s=0.6
    ),
    "goes back leasing and loses its scheduler on the way": replace(
        GOES_BACK_LEASING, victims=("server-1",), later="scheduler", returns_s=0.6
    ),
}
"""By name, for tests and for the command line."""


@dataclass
class Tally:
    """What became of some runs."""

    runs: int = 0
    cpu_s: float = 0.0
    happened: Counter[str] = field(default_factory=Counter)
    used: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    """What was wrong, each with the command that repeats it."""

    def add(self, other: Tally) -> None:
        """Add up."""
        self.runs += other.runs
        self.cpu_s += other.cpu_s
        self.happened += other.happened
        self.used += other.used
        self.violations += other.violations

    def __str__(self) -> str:
        return f"{self.runs} runs in {self.cpu_s:.1f} CPU seconds, {len(self.violations)} violations"


def run_seeds(name: str, seeds: Sequence[int], end_at: float, trace: bool = False) -> Tally:
    """Run seeds of a scenario until that time by `time.monotonic`. One that fails does not end the others."""
    logging.disable(logging.ERROR)
    tally, began_s = Tally(), time.process_time()
    for seed in seeds:
        if time.monotonic() >= end_at:
            break
        tally.runs += 1
        try:
            result = run(seed, SCENARIOS[name])
        except Exception as error:  # noqa: BLE001 (whatever it is, the other runs go on)
            said = str(error) if isinstance(error, SimulationError) else f"seed {seed}: {error!r}"
            again = f"python -m tests.simulation --scenario {shlex.quote(name)} --seed {seed} --trace"
            tally.violations.append(f"{name}: {said}\n    {again}")
            if trace and isinstance(error, SimulationError):
                print("\n".join(error.trace))
            continue
        tally.happened += result.happened
        tally.used += result.used
        if trace:
            print("\n".join(result.trace))
    tally.cpu_s = time.process_time() - began_s
    return tally


def soak(counts: Mapping[str, int], first: int, processes: int, end_at: float) -> dict[str, Tally]:
    """Run so many seeds of each scenario, side by side. Violations are printed when they happen.

    What is handed out is small, so that all processes end together, and goes through all scenarios again and again, so
    that each has had as much when the time is over.
    """
    tallies = {name: Tally() for name in counts}
    begun_at = said_at = time.monotonic()
    gc.collect()
    gc.freeze()  # else each process soon has copies of all pages
    with ProcessPoolExecutor(processes, multiprocessing.get_context("fork")) as pool:
        names = {
            pool.submit(run_seeds, name, range(first + begin, first + min(begin + PORTION, counts[name])), end_at): name
            for begin in range(0, max(counts.values()), PORTION)
            for name in counts
            if begin < counts[name]
        }
        for portion in as_completed(names):
            tally = portion.result()
            tallies[names.pop(portion)].add(tally)
            for violation in tally.violations:
                print(violation, flush=True)
            if time.monotonic() - said_at >= PROGRESS_S:
                said_at = time.monotonic()
                print(f"{(said_at - begun_at) / 60:.0f} min: {sum_of(tallies)}", flush=True)
    return tallies


def sum_of(tallies: Mapping[str, Tally]) -> Tally:
    """All together."""
    whole = Tally()
    for tally in tallies.values():
        whole.add(tally)
    return whole


def main(arguments: Sequence[str] | None = None) -> int:
    """Run many seeds on all cores; print each that fails, with the command that repeats it."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.simulation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=1000, help="how many seeds of each scenario")
    parser.add_argument("--total", type=int, help="how many runs in all, as many of each scenario, in place of --seeds")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so long, whatever is left")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="how many at once; all cores")
    parser.add_argument("--seed", type=int, help="one seed only")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--scenario", choices=sorted(SCENARIOS), metavar="NAME", help="one scenario only")
    parser.add_argument("--trace", action="store_true", help="print what happened, of one seed")
    parser.add_argument("--mutants", action="store_true", help="print the table of broken rules for docs/decisions")
    options = parser.parse_args(arguments)
    if options.mutants:
        from tests.core.test_simulation import MUTANTS, seeds_to_notice  # that imports this

        logging.disable(logging.ERROR)
        for rule, (scenario, patches) in MUTANTS.items():
            print(f"| {rule} | {scenario} | {seeds_to_notice(scenario, patches)} |", flush=True)
        return 0
    names = [options.scenario] if options.scenario else list(SCENARIOS)
    if options.seed is not None:
        tallies = {name: run_seeds(name, [options.seed], float("inf"), options.trace) for name in names}
        for tally in tallies.values():
            print("".join(f"{violation}\n" for violation in tally.violations), end="")
    else:
        total = options.seeds * len(names) if options.total is None else options.total
        counts = {name: total // len(names) + (place < total % len(names)) for place, name in enumerate(names)}
        end_at = time.monotonic() + 60 * options.minutes
        tallies = soak(counts, options.first, options.processes, end_at)
    for name, tally in tallies.items():
        print(f"{name}: {tally}; {dict(tally.happened)}; {dict(tally.used)}")
    whole = sum_of(tallies)
    print(f"{len(tallies)} scenarios: {whole}")
    return 1 if whole.violations else 0


if __name__ == "__main__":
    raise SystemExit(main())
