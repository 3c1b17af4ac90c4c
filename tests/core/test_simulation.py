"""Hundreds of small clusters through simulated weather; and proof that the simulation would notice a broken rule."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvdist.checkpoint.snapshot import SliceImage
from kvdist.config.settings import Limits
from kvdist.core.joining import Joining
from kvdist.core.machine import ChildEnded, Effect, Event, PeerDisconnected, Send
from kvdist.core.policy import Policy
from kvdist.core.reliable import PeerLink, Reliable
from kvdist.core.round import Admission, Contribution, PullRequest, Round, Verdict
from kvdist.core.scheduler.agreement import Agreement, Questions
from kvdist.core.scheduler.checkpoints import Checkpoints, LoadUnderWay, SaveUnderWay
from kvdist.core.scheduler.keys import Keys
from kvdist.core.scheduler.leases import LeaseHolder, Leases, Queue, Range
from kvdist.core.scheduler.losses import Losses
from kvdist.core.scheduler.membership import Membership
from kvdist.core.scheduler.newcomers import Newcomers
from kvdist.core.scheduler.rollback import Rollback, Snapshot
from kvdist.core.scheduler.scheduler import Scheduler
from kvdist.core.server import checkpoints, replica, shard, slice_parts
from kvdist.core.server.block import Block, BlockRows, Blocks
from kvdist.core.server.buffers import Buffer, BufferPool, ReplyBuffers
from kvdist.core.server.checkpoints import Restoring, ServerCheckpoint, ServerCheckpoints
from kvdist.core.server.holder import Holder
from kvdist.core.server.peers import Peers
from kvdist.core.server.progress import Quotas
from kvdist.core.server.replica import CopiedShard, ReplicatedServer, ReplicatedShard
from kvdist.core.server.replies import Reply
from kvdist.core.server.server import Server
from kvdist.core.server.shard import Shard
from kvdist.core.server.sparse_table import SparseTable
from kvdist.core.server.table_rows import TableRows
from kvdist.core.worker import newcomer
from kvdist.core.worker.host_aggregation import HostAggregation, HostRound, HostRounds
from kvdist.core.worker.pending import BarrierCalls, SavingCalls
from kvdist.core.worker.progress import ProgressReports
from kvdist.core.worker.requests import LoadStore, Request, RunPart
from kvdist.core.worker.transfers import LEADER, SliceTable, Transfers
from kvdist.core.worker.worker import Worker
from kvdist.dtypes import DType
from kvdist.nodes import Member, Role
from kvdist.optimizer.base import Piece
from kvdist.optimizer.offload import DeviceUpdater, on_device
from kvdist.optimizer.states import SliceState
from kvdist.optimizer.updater import Updater
from kvdist.protocol.messages import (
    Barrier,
    Fate,
    Fill,
    Flag,
    HandedBack,
    JoinedPush,
    Lease,
    Message,
    Progress,
    Push,
    Rejected,
    Rewind,
    Rewound,
    Roster,
    Saved,
    Seen,
    SetOptimizer,
    SnapshotTaken,
    TakeRestored,
)
from kvdist.runtime.journal import Journal
from kvdist.runtime.node import Node
from tests import simulation
from tests.cases import each
from tests.core import row_runs, row_workload
from tests.simulation import IMPATIENT, JOINING, PROMPT, SCENARIOS, STORM, Scenario, SimulationError, run

SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1"))
"""Seeds per scenario; `make test-all` runs 10, and `python -m tests.simulation --seeds N` more."""
SEEDS_MAX = max(SEEDS, 10)
"""Seeds within which all that a scenario is there for must have happened."""
FIRST_SEEDS = {
    "async checkpoints": (3,),
    "checkpoints in a storm": (3, 0),
    "exact quota at rest and a dead server": (3,),
    "fills and saves rows in a hurry": (16,),
    "fills near the end": (2,),
    "goes on loading": (15,),
    "goes on parted": (2,),
    "goes on with sums of hosts": (1, 16),
    "goes on with sums of hosts in a storm": (1, 5),
    "goes on with sums under way for long": (4, 8),
    "goes on without rank 0": (3,),
    "joins as rank 0": (3,),
    "joins async": (2,),
    "joins offloaded": (5,),
    "joins when all were lost": (7,),
    "joins with a far scheduler": (6,),
    "joins with rows": (3,),
    "late at barriers in a storm": (3,),
    "odd": (5,),
    "offloaded in a storm": (3, 0),
    "quota at rest and a dead server": (4,),
    "replicas and a scheduler that returns": (8,),
    "replicas parted for a moment": (4,),
    "scheduler returns after it has given up who was silent": (3,),
    "scheduler returns to checkpoints": (11,),
    "scheduler while a loss is settled": (13,),
    "waits with rows": (3,),
}
"""Seeds of long scenarios with which to begin: in these all happens, and by turns it takes up to ten."""
MUTANT_SEEDS = 40
"""Within so many seeds a broken rule must be noticed."""
MUTANT_EVENTS_MAX = 30_000
"""More mean that a mutant spins; the longest of their scenarios has two thirds of that."""

DROPPED = ("sum without its leader dropped", "sum without a follower dropped")

FAULTS = {
    "cuts": ("cut", "lost in a cut"),
    "storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "async storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "leaver in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "hosts in cuts": ("cut", "lost in a cut"),
    "encoded in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "offloaded in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "hosts in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "leader leaves in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "killed leader": ("crash",),
    "killed follower": ("crash",),
    "paused follower": ("pause",),
    "paused leader": ("pause",),
    "killed worker": ("crash",),
    "killed server": ("crash",),
    "killed scheduler": ("crash",),
    "short pause": ("pause",),
    "paused worker while the cluster forms": ("pause",),
    "paused server while the cluster forms": ("pause",),
    "paused scheduler while the cluster forms": ("pause",),
    "paused worker while a cluster forms that goes on": ("pause",),
    "checkpoints of hosts in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "checkpoints in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "late at barriers in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "checkpoint and a killed server": ("crash",),
    "checkpoint and a paused worker": ("pause",),
    "long pause": ("pause",),
    "rows in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "rows async in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "rows and a leaver in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "rows and checkpoints in a storm": ("cut", "lost", "duplicated", "lost in a cut"),
    "rows and a killed server": ("crash",),
    "rows and a paused worker": ("pause",),
    "goes on without a zombie": ("pause", "fenced"),
    "leases of a zombie": ("pause", "fenced"),
    "goes on with sums of a zombie": ("pause", "fenced"),
    "leases in a storm": ("crash", "cut", "lost", "duplicated"),
    "goes on or is doomed": ("crash", "doomed"),
    "goes on with rows in a storm": ("crash", "cut", "lost", "duplicated"),
    "goes on saving in a storm": ("crash", "cut", "lost", "duplicated"),
    "goes on in a storm": ("crash", "cut", "lost", "duplicated"),
    "goes back with full disks": ("crash", "went back", "full disk"),
    **{
        name: ("crash", "started again", "went back", *(("torn snapshot",) if scenario.torn else ()))
        for name, scenario in SCENARIOS.items()
        if name.startswith("goes back") and not name.endswith("disks")
    },
    "scheduler returns in a storm": ("crash", "return", "cut", "lost", "duplicated"),
    **{
        name: ("crash", "return")
        for name in SCENARIOS
        if name.startswith("scheduler ") and name != "scheduler returns in a storm"
    },
    **{
        name: ("crash",)
        for name in SCENARIOS
        if name.startswith(("goes on", "leases ")) and not name.endswith(("storm", "zombie", "doomed"))
    },
    **{name: ("crash", "return") for name in SCENARIOS if name.startswith("leases ") and "scheduler" in name},
    **{
        name: ("crash", "started again", *(("lost", "cut") if scenario.weather is STORM else ("joined",)))
        for name, scenario in SCENARIOS.items()
        if name.startswith("leases and newcomers")
    },
    **{
        f"leases and newcomers{how} and a scheduler that returns": ("crash", "return", "started again", "joined")
        for how in ("", " on replicas")
    },
    "replicas and a zombie": ("pause", "fenced"),
    "replicas and a scheduler that returns": ("crash", "return"),
    **{
        name: ("crash", *(("lost", "cut") if scenario.weather is STORM else ()))
        for name, scenario in SCENARIOS.items()
        if name.startswith("replicas") and any(one.startswith("server") for one in scenario.victims)
        if scenario.pause_s is None and not scenario.returns_s
    },
    **{
        name: ("crash", "started again", *(("lost", "cut") if scenario.weather is STORM else ()))
        for name, scenario in SCENARIOS.items()
        if name.startswith("fills")
    },
    **{
        name: ("crash", "started again", "joined", *(("lost", "cut") if scenario.weather is STORM else ()))
        for name, scenario in SCENARIOS.items()
        if name.startswith("joins")
    },
    "fills in a hurry while the scheduler dies": ("crash", "return", "started again"),
    "joins while the scheduler is away": ("crash", "return", "started again", "joined"),
    "joins as the scheduler dies": ("crash", "return", "started again", "joined"),
    **{
        name: ("crash", "started again", "joined", *(("lost", "cut") if scenario.weather is STORM else ()))
        for name, scenario in SCENARIOS.items()
        if name.startswith("waits")
    },
    **{
        name: ("crash", *(("lost", "cut") if scenario.weather is STORM else ()))
        for name, scenario in SCENARIOS.items()
        if scenario.quota and scenario.victims
    },
    **{
        f"{policy} {what}": faults
        for policy in ("quota", "exact quota", "quorum", "delays")
        for what, faults in (
            ("in a storm", ("cut", "lost", "duplicated")),
            ("at rest in a storm", ("cut", "lost", "duplicated")),
            ("and newcomers", ("crash", "started again", "joined")),
            ("at rest and newcomers", ("crash", "started again", "joined")),
            ("and workers that are waited for", ("crash", "started again", "joined")),
            ("and a scheduler that returns", ("crash", "return")),
            ("goes back", ("crash", "started again", "went back")),
        )
        if f"{policy} {what}" in SCENARIOS
    },
    **{
        name: ("parted", "parted one way", "kept back by a wall", "silent behind a wall")
        for name, scenario in SCENARIOS.items()
        if scenario.parted_s
    },
    "parted": ("parted", "parted one way", "silent behind a wall", "ended for a wall"),
    **{
        name: ("parted", "parted one way", "silent behind a wall", "given up behind a wall", *happens)
        for name, *happens in (
            ("goes on parted", "fenced"),
            ("goes on parted in any way", "ended for a wall"),
            ("goes on parted in a storm", "cut", "lost", "duplicated"),
            ("leases parted", "fenced"),
            ("scheduler returns to a parted network", "crash", "return"),
            ("joins while the network is parted", "ended by the launcher", "joined"),
            ("waits while the network is parted", "started again", "joined"),
            ("goes back parted", "ended by the launcher", "went back"),
            ("replicas parted", "fenced"),
            ("a server parted from its copies",),
            ("one of two servers parted from the other",),
            ("fills parted", "ended by the launcher", "started again"),
        )
    },
    "odd": ("nothing is joined", "acknowledgements wait as long as they may"),
    "odd and async": ("all is joined", "a window of one byte"),
    "odd in a storm": ("repeated at once", "cut", "lost", "duplicated"),
    "odd sums of hosts": ("messages have one part", "nobody is patient", "crash"),
    "odd newcomers": ("timers fire late", "rosters share a long gap", "crash", "joined"),
    "odd waits": ("nothing is joined", "blocks have two slices", "crash", "joined"),
    "odd leases": ("leases are as long as can be", "crash", "joined"),
    "odd schedulers": ("timers fire late", "crash", "return"),
    "odd snapshots": ("tables grow row by row", "blocks merge at once", "crash", "went back"),
    "odd copies": ("copies are filled in by single elements", "crash", "started again"),
    "odd copies in a hurry": ("copies are filled in at once", "little is under way", "crash", "started again"),
    "odd and parted": ("acknowledgements wait as long as they may", "parted", "given up behind a wall"),
    "goes on with sums of hosts": ("crash", *DROPPED),
    "goes on with sums of hosts in a storm": ("crash", "cut", "lost", "duplicated", *DROPPED),
    "goes on with sums under way for long": (
        "crash",
        "share of a lost worker",
        *DROPPED,
    ),
    "joins sums of hosts": ("crash", "started again", "joined", "sum with a lost worker came late"),
}
"""Scenario → the faults that must have struck, or it has shown nothing."""

QUICKLY_PARTED = ("goes on parted", "replicas parted for a moment", "waits while the network is parted")

USED = ("Push in several frames", "Values in several frames")


def used_in(scenario: Scenario) -> Iterator[str]:
    """What a scenario must exercise, or it has shown nothing."""
    is_short = scenario.pause_s is not None and scenario.pause_s < scenario.limits.patience_s
    goes_on = scenario.on_loss != "fail" and not any(name.startswith("server") for name in scenario.victims)
    goes_on = goes_on or scenario.returns_s > 0
    is_complete = not scenario.victims or is_short or goes_on
    if not scenario.is_odd:  # which may join or cut it all
        yield from USED
    if scenario.barrier_s:
        yield "late at a barrier"
    if scenario.parted_s or scenario.is_odd:
        return  # what is said of faults is enough
    if scenario.quota:
        return  # rounds in step, as others show
    if scenario.examples:
        if scenario.saves:
            yield "checkpoint"
        return
    if scenario.snapshot_s is not None:
        return  # what is said of faults is enough
    if scenario.replicas:
        if scenario.fills and scenario.lives > 1:
            yield "struck while copies are filled in" if scenario.hurries else "filled"
        if scenario is SCENARIOS["fills as a checkpoint is loaded"]:
            yield "restored"
        elif scenario.saves:
            yield from ("checkpoint", "not saved for a dead server")
        return
    if scenario.fault_round < 0:
        return  # most of its runs end early
    if scenario.holds:
        yield "held"
    if scenario.encodes:
        yield "decoded"
    if scenario.offloaded:
        yield "offloaded"
    if scenario.tables:
        yield "rows in parts"
        yield "PushRows in several frames"
    elif scenario.hosts is None and (not scenario.victims or goes_on):
        yield "round of several slices"
    if scenario.hosts is not None and scenario.mode == "sync":
        yield "summed on a host"
    if scenario.on_loss == "wait":
        if scenario.fault_round > 0 and scenario.weather.delay_s >= JOINING.weather.delay_s:
            yield "a step once more"  # near servers have a step as a whole, or not at all
    elif goes_on and not scenario.returns_s and not (scenario.again and scenario.hosts):
        yield "in part"
    if scenario.returns_s and scenario.fault_round == 1 and not scenario.is_at_join:  # servers hold versions then
        yield "closed meanwhile"
    if is_complete and scenario.saves:
        yield "checkpoint"
        yield "restored"
    if scenario.full >= 0.1:
        yield "full disk"
    if scenario.hosts is not None and (scenario.leaver == 0 or scenario.limits in (IMPATIENT, PROMPT)):
        yield "handed back"


LONG = {
    "async checkpoints",
    "async hosts",
    "checkpoint and a paused worker",
    "checkpoints of hosts",
    "checkpoints of hosts in a storm",
    "encoded async",
    "encoded in a storm",
    "goes on saving rows",
    "goes on with sums of a zombie",
    "goes on with sums of hosts in a storm",
    *[name for name, scenario in SCENARIOS.items() if scenario.hurries],
    "fills async",
    "fills in a storm",
    "fills offloaded",
    "fills rows",
    "fills rows again and again",
    "fills saving",
    "fills while workers die",
    "fills with momentum",
    "fills near the end",
    "goes back again and again",
    "goes back and then loses a worker",
    "goes back as it saves",
    "goes back encoded",
    "goes back holding",
    "goes back in a storm",
    "goes back saving",
    "goes back saving with a far scheduler",
    "goes back when too few are left",
    "goes back with full disks",
    "goes back with momentum",
    "goes back with rows",
    "goes back without both servers",
    "hosts in cuts",
    "impatient hosts",
    "joins again and again in a storm",
    "joins as rank 0",
    "joins async",
    "joins before the first mean",
    "joins beside another",
    "joins from the start",
    "joins offloaded",
    "joins when too few are left",
    "joins while the scheduler is away",
    "joins with rows",
    "leader leaves in a storm",
    "leader leaves one host",
    "leases",
    "leases and a leaver",
    "leases and a scheduler that dies with workers",
    "leases and a scheduler that returns to the end",
    "leases and newcomers on replicas and a scheduler that returns",
    "leases async",
    "leases on hosts",
    "leases of all but one",
    "long async",
    *[name for name, scenario in SCENARIOS.items() if scenario.is_odd and name not in ("odd", "odd leases")],
    "offloaded",
    "offloaded and a leaver",
    "offloaded and encoded",
    "offloaded async",
    "offloaded beside rows",
    "offloaded on hosts",
    "offloaded sums",
    "replicas",
    "replicas and a zombie",
    "replicas and a scheduler that returns",
    "replicas and checkpoints",
    "replicas and leases",
    "replicas and newcomers",
    "replicas and two dead neighbours",
    "replicas async",
    "replicas encoded",
    "replicas from the start",
    "replicas in a storm",
    "replicas of rows in a storm",
    "replicas of two servers",
    "replicas offloaded",
    *[name for name, scenario in SCENARIOS.items() if scenario.parted_s and name not in QUICKLY_PARTED],
    "rows and a leaver in a storm",
    "rows and a paused worker",
    "rows and checkpoints in a storm",
    "rows async",
    "rows async in a storm",
    "rows updated",
    "scheduler and a worker with rows",
    "scheduler returns and leaver",
    "scheduler returns in a storm",
    "scheduler returns to the end",
    "scheduler returns twice",
    "scheduler returns where losses end the job",
    "scheduler returns while keys are declared",
    "scheduler while a loss is settled",
    *[name for name in SCENARIOS if name.startswith("waits ") and name != "waits with rows"],
}
ALIKE = {
    "exact quota": "quota",
    "quorum": "quota",
    "delays": "quota",
    "leases and newcomers": "leases",
    "goes back leasing": "goes back",
}
"""Beginning of a name → another: what happens to both is quick with the latter, and with the former if it is `HARD`."""
HARD = (" in a storm", " at rest in a storm", " and a dead worker")


def is_shown_by_others(name: str) -> bool:
    """Whether a harder scenario of the same kind is quick, or another to which the same happens."""
    quick = SCENARIOS.keys() - LONG
    if any(f"{name}{how}" in quick for how in (" in a storm", " again and again")):
        return True
    rests = [(other, name.removeprefix(begin)) for begin, other in ALIKE.items() if name.startswith(begin)]
    return any(f"{other}{rest}" in quick and rest not in HARD for other, rest in rests)


@pytest.mark.slow_cases(*LONG, *filter(is_shown_by_others, SCENARIOS))
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_request_is_answered_and_every_weight_is_exact(name: str) -> None:
    happened: Counter[str] = Counter()
    used: Counter[str] = Counter()
    wanted = (*used_in(SCENARIOS[name]), *FAULTS.get(name, ()), "read")
    for count, seed in enumerate(dict.fromkeys([*FIRST_SEEDS.get(name, ()), *range(SEEDS_MAX)])):
        if count >= SEEDS and all((happened + used)[kind] for kind in wanted):
            break
        result = run(seed, SCENARIOS[name])
        happened += result.happened
        used += result.used
        used["read"] += result.reads
    missing = [kind for kind in wanted if not (happened + used)[kind]]
    assert not missing, f"not all happened: {missing} did not, of {happened + used}"
    if name not in FAULTS:
        assert not happened.keys() - {"lost in a cut"}, "what is under way to a process that ends well is lost too"


@each("name", ["killed worker", "killed server", "killed scheduler"])
def test_a_death_strikes_in_every_seed_and_everybody_knows_within_a_second(name: str) -> None:
    for seed in range(100, 104):
        result = run(seed, SCENARIOS[name])
        assert result.happened["crash"] == 1
        assert 0 < result.detected_s < 1.0


def test_a_seed_repeats_exactly() -> None:
    first, second = run(3, SCENARIOS["cuts"]), run(3, SCENARIOS["cuts"])
    assert first.happened["cut"] > 0
    assert first.trace == second.trace


def test_another_seed_is_another_story() -> None:
    assert run(3, SCENARIOS["storm"]).trace != run(4, SCENARIOS["storm"]).trace


OFFLOADED = [name for name, scenario in SCENARIOS.items() if scenario.offloaded]


@pytest.mark.slow_cases(*{*OFFLOADED} - {"offloaded beside rows", "offloaded in a storm"})
@pytest.mark.parametrize("name", OFFLOADED)
def test_with_servers_on_devices_the_same_happens_at_the_same_time(name: str) -> None:
    there, here = run(0, SCENARIOS[name]), run(0, replace(SCENARIOS[name], offloaded=False))
    assert there.used["offloaded"] > 0 == here.used["offloaded"]
    assert there.trace == here.trace


def test_one_worker_and_three_servers_work_too() -> None:
    for seed in range(3):
        run(seed, replace(SCENARIOS["storm"], num_workers=1, num_servers=3))


# Mutants: with a rule switched off, some seed must fail.


ORIGINAL_REPLICATE, ORIGINAL_PLACE_OF = CopiedShard.replicate, Round.verdict_on
ORIGINAL_FORWARD = ReplicatedShard._forward
ORIGINAL_PACKED, ORIGINAL_PUBLISHED = slice_parts.packed, ReplicatedServer._published


ORIGINAL_SAVED, ORIGINAL_COVER = Checkpoints.saved, Blocks.cover_merged
ORIGINAL_BEGIN_LOADING = Checkpoints._begin_loading


def publishes_at_once(self: ReplicatedServer, effects: list[Any]) -> list[Any]:
    log, self._log = self._log, []
    self._told += len(log)
    return [*(Send(self._backup, *one) for one in log if self._backup is not None), *effects]


def forgets_who_is_in_it(self: ReplicatedShard, holders: Any, rounds: Sequence[Any], *sums: Any) -> None:
    ORIGINAL_FORWARD(self, holders, [()] * len(rounds), *sums)


def lags_behind(self: CopiedShard, message: Any) -> None:
    """Apply what is forwarded one message late."""
    before, self.__dict__["late"] = self.__dict__.get("late"), message
    if before is not None:
        ORIGINAL_REPLICATE(self, before)


def counts_what_is_sent_again(self: Round, contribution: Any) -> Verdict:
    rank = contribution.member.node.rank
    self.counted[rank] = min(contribution.step, self.counted.get(rank, 0))
    return ORIGINAL_PLACE_OF(self, contribution)


def fills_in_without_counters(round_: Round) -> Any:
    """What a worker sends again counts twice after a second death."""
    return (), -1


def fills_in_without_states(image: SliceImage) -> Any:
    """The rule begins anew in a copy that was filled in."""
    return ORIGINAL_PACKED(replace(image, state=None))


def says_it_is_whole_at_once(self: ReplicatedServer) -> bool:
    """A server says that its backup has everything, and has not given it anything."""
    return self._backup is not None


def fills_in_late(self: ReplicatedServer, effects: list[Any]) -> list[Any]:
    """What is filled in overtakes, or is overtaken by, the rounds that follow it."""
    fills = [one for one in self._log if isinstance(one[0], Fill)]
    late = self.__dict__.pop("late", [])
    self.__dict__["late"] = fills
    self._log = [*(one for one in self._log if not isinstance(one[0], Fill)), *late]
    return ORIGINAL_PUBLISHED(self, effects)


def merges_meanwhile(self: Blocks, ids: Any, *columns: Any) -> list[BlockRows]:
    """A block may be half in the copy."""
    self.may_merge = True
    return ORIGINAL_COVER(self, ids, *columns)


def believes_old_words(self: Membership, rank: int, epoch: int) -> bool:
    """Whatever a server has said of its copy holds, though another one has it now."""
    return self._uncopied.pop(rank, None) is not None


def loads_at_once(self: Checkpoints, loading: LoadUnderWay) -> list[Effect]:
    """What is on its way to a copy comes behind what that has read."""
    with mock.patch.object(Membership, "is_filling", False):
        return ORIGINAL_BEGIN_LOADING(self, loading)


def opens_what_is_over(self: Checkpoints, sender: Member, message: Saved, now: float) -> list[Effect]:
    """What a server says late of a checkpoint begins another one."""
    with mock.patch.object(self, "saves", {message.store: message.counter}):
        return ORIGINAL_SAVED(self, sender, message, now)


def forgets_who_is_unaware(self: Checkpoints, server: Member, unaware: Any) -> None:
    for saving in self._saving.values():
        saving.servers.pop(server.node, None)


def counts_messages(self: Round, contribution: Contribution, now: float) -> Verdict:
    """A round counts messages: whoever comes takes the next free slot."""
    slot = contribution.member.node.rank
    while slot in self.slots:
        slot += 1
    self.slots[slot] = contribution
    return Verdict.ACCEPTED


def hands_on_what_comes_twice(self: Reliable, link: PeerLink, seq: int, message: Any, now: float) -> Any:
    verdict = ORIGINAL_SEQUENCE(self, link, seq, message, now)
    return None if seq <= link.received else verdict


def hands_on_pushes_that_come_twice(self: Reliable, link: PeerLink, seq: int, message: Any, now: float) -> Any:
    verdict = ORIGINAL_SEQUENCE(self, link, seq, message, now)
    return None if seq <= link.received and isinstance(message, Push) else verdict


def tries_pushes_that_come_twice(self: Reliable, link: PeerLink, seq: int, message: Any, now: float) -> Any:
    """The machine sees them, but what it answers is not said: an answer that comes twice is another broken rule."""
    verdict = ORIGINAL_SEQUENCE(self, link, seq, message, now)
    if verdict is not None and seq <= link.received and isinstance(message, Push):
        self.machine.handle(link.peer, message, now)
    return verdict


def accepts_gaps(self: Reliable, link: PeerLink, seq: int, message: Any, now: float) -> Any:
    if seq > link.received:
        link.received = seq - 1
    return ORIGINAL_SEQUENCE(self, link, seq, message, now)


def acknowledges_too_much(self: Reliable, link: PeerLink, ack: int, now: float) -> Any:
    return ORIGINAL_ACKNOWLEDGE(self, link, ack + 1 if ack else 0, now)


def never_repeats(self: Reliable, link: PeerLink, now: float, messages_max: int | None = None) -> Any:
    link.retry_due = now + link.retry_s if link.unacknowledged else float("inf")
    return []


def writes_into_leased_buffers(self: BufferPool) -> Buffer:
    return self.free_buffers.pop(0) if self.free_buffers else self.fresh()


def writes_into_parts(self: BufferPool, buffer: Buffer) -> None:
    """What a block that was split had published is written, while readers of the whole of it go on."""
    self.free_buffers.append(buffer)


def forgets_the_step(self: Round, pull: PullRequest) -> bool:
    return self.version >= pull.version


def loses_what_is_open(self: Block, begin: int, end: int) -> Block:
    """Splitting a block forgets the contributions to its open round."""
    part = ORIGINAL_PART(self, begin, end)
    part.round.slots.clear()
    return part


def merges_what_differs(self: Block, other: Block) -> bool:
    """Neighbours merge although they have had different rounds."""
    return self.published is not None and other.published is not None and self.round.is_quiet and other.round.is_quiet


def holds_nothing(self: Block, member: Member) -> Buffer | None:
    """What a worker reads in place is free for the next version."""
    ORIGINAL_HOLD(self, member)
    self.lent[member].leases -= 1
    return None


def lets_go_too_early(self: Block, member: Member) -> Buffer | None:
    """A held version is free as soon as its successor is sent, not when that has arrived."""
    before = ORIGINAL_HOLD(self, member)
    if before is not None:
        before.leases -= 1
    return None


def knows_a_weight_by_its_name(self: DeviceUpdater, piece: Piece, dtype: DType) -> Any:
    """Whatever was published since, the device goes on from what it has."""
    resident = self._residents.pop(piece.index, None)
    return ORIGINAL_WEIGHT(self, piece, dtype) if resident is None else resident.array


def restores_the_state_alone(self: DeviceUpdater, index: Any, state: SliceState | None) -> None:
    self._updater.restore(index, None if state is None else on_device(state, self._device))


def forgets_the_line(self: SliceTable, run: Any) -> RunPart:
    ORIGINAL_ENTER(self, run)
    return RunPart(run)


def hands_back_what_it_forwards(self: HostRounds, host_round: HostRound) -> None:
    ORIGINAL_COMPLETE(self, host_round)
    for share in host_round.shares.values():
        self.hand_back_share(host_round.number, share)


def says_nothing_again(self: Transfers) -> None:
    """The leader has left, and its followers wait for its answers."""
    self._outboxes[LEADER].forget()


def leases_nothing(self: ServerCheckpoints, cut: ServerCheckpoint, numbers: Sequence[int]) -> None:
    """What is being saved may be written again."""
    ORIGINAL_TAKE(self, cut, numbers)
    taken = dict(cut.taken)
    cut.release()
    cut.taken = taken


def copies_nothing(self: SliceState) -> SliceState:
    return self


def waits_for_all_marks(round_: Round, marks: Any, workers: Any, is_exact: bool) -> bool:
    """The moment has passed by then, if anybody runs ahead."""
    return ORIGINAL_IS_DUE(round_, marks, workers, False)


def waits_for_one_mark(round_: Round, marks: Any, workers: Any, is_exact: bool) -> bool:
    """An asynchronous store is saved without what others have pushed."""
    return ORIGINAL_IS_DUE(round_, marks, workers, True)


def takes_over_a_half(self: Restoring, message: Any) -> Any:
    """What this server could read counts, whatever the others say."""
    return ORIGINAL_END(self, TakeRestored(message.request, message.store, 0))


def restores_no_state(self: Updater, index: Any, state: SliceState) -> None:
    """Only weights come back."""


def is_complete_without_servers(self: SaveUnderWay) -> bool:
    return bool(self.saves) and all(node.role is not Role.WORKER for node in self.agreement.missing())


def counts_messages_of_rows(self: SparseTable, contribution: Contribution, more: bool, now: float) -> Verdict:
    """Each part of a contribution takes the next free slot."""
    slot = contribution.member.node.rank
    while slot in self.round.slots:
        slot += 1
    self.round.slots[slot] = contribution
    return Verdict.ACCEPTED


def takes_the_last_part(self: SparseTable, contribution: Contribution, more: bool, now: float) -> Verdict:
    self.arriving.pop(contribution.member.node.rank, None)
    return ORIGINAL_OFFER(self, contribution, more, now)


def writes_into_leased_answers(self: ReplyBuffers, nbytes: int) -> Buffer:
    for buffer in self.all:
        if len(buffer.payload) >= nbytes:
            return buffer
    return ORIGINAL_BUFFER(self, nbytes)


def leaves_out_servers_without_rows(*arguments: Any, **options: Any) -> Any:
    """Who has no rows for a server sends it nothing."""
    runs, memory = row_runs.push_runs(*arguments, **options)
    return [run for run in runs if any(chunk.rows for chunk in run.chunks)] or runs[:1], memory


def answers_at_once(self: Shard, table: Holder) -> None:
    """Rows that wait for first values are answered without them."""
    if not isinstance(table, SparseTable):
        ORIGINAL_ANSWER_PULLS(self, table)
        return
    pulls, table.round.pulls = table.round.pulls, []
    for pull in pulls:
        self._answer_pull(table, pull)


def keeps_what_is_lost(self: Round, ranks: Set[int]) -> dict[int, int]:
    """What a lost worker has pushed lies there, and counts."""
    return dict.fromkeys(ranks, 0)


def settles_last(self: Server, message: Roster, now: float) -> list[Effect]:
    effects = ORIGINAL_ROSTER(self, message, now)
    return sorted(effects, key=lambda one: isinstance(one, Send) and isinstance(one.message, Seen))


def closes_before_it_drops(self: Server, message: Roster, now: float) -> list[Effect]:
    """Rounds that waited for the lost ones only are closed with what these have pushed."""
    drop = self._drop

    def late(lost: Mapping[int, Member]) -> dict[int, tuple[Fate, ...]]:
        self.shard.roster(lost.keys())
        return drop(lost)

    with mock.patch.object(self, "_drop", late):
        return ORIGINAL_ROSTER(self, message, now)


def listens_to_the_lost(self: Server, source: Member, message: Message) -> str | None:
    return None if source in self.peers.lost else ORIGINAL_REFUSES(self, source, message)


def thinks_the_silent_have_ended(self: Membership, member: Member, cause: str, has_ended: bool) -> None:
    """What a worker that was only silent may still read is written again."""
    ORIGINAL_LOSE(self, member, cause, True)


def goes_on_without(agreements: str) -> Callable[[Scheduler, float], list[Effect]]:
    """When a worker is lost, these agreements wait for it."""

    def without_departed(self: Scheduler, now: float) -> list[Effect]:
        with mock.patch.object(*{
            "barriers": (self, "_pass_barriers"),
            "checkpoints": (self.checkpoints, "advance_all"),
            "keys": (self.keys, "advance_all"),
        }[agreements], lambda *_: []):  # fmt: skip
            return ORIGINAL_WITHOUT(self, now)

    return without_departed


def keeps_marks(self: ServerCheckpoints, lost: Set[int]) -> None:
    """A checkpoint waits for pushes of a lost worker."""


def knows_no_giver(self: Keys, number: int) -> int | None:
    """Nobody notices that a key can never get its first value."""
    return None


def counts_early_pushes(self: Round) -> Set[int]:
    """What a newcomer has pushed for a later version is in the next one."""
    return self.slots.keys()


def waits_from_the_start(self: Admission, ranks: Any, version: int) -> set[int]:
    """A round waits for newcomers that push for a later version."""
    return set(ranks)


def promises_nothing(self: Admission, version: int) -> bool:
    """Slices go on while the scheduler looks for the highest version."""
    return True


def tells_of_the_cluster_at_once(self: Newcomers, stranger: Member, hello: Any, now: float) -> list[Effect]:
    """A newcomer speaks to servers that have not heard of it."""
    effects = ORIGINAL_HELLO(self, stranger, hello, now)
    waiting, self.introductions = self.introductions, set()
    return [*effects, *(Send(member, self._membership.roster) for member in waiting)]


def begins_at_none(self: SliceTable, ids: Any, steps: Any) -> None:
    """A newcomer counts its pushes from the first one."""


def refuses_early_hellos(self: Newcomers, node: Any, stranger: Member, hello: Any, now: float) -> list[Effect]:
    return [Send(stranger, Rejected("it is taken"))]


def loads_with_the_others(self: newcomer.Newcomer, request: Request) -> list[Effect] | None:
    """What a newcomer loads at its start waits for the others, who load later."""
    return None if isinstance(request, LoadStore) else ORIGINAL_ACCEPT(self, request)


def takes_part_before_it_pushes(self: newcomer.Newcomer, request: Request) -> list[Effect] | None:
    """A worker for which rounds wait waits itself for others at what they have agreed on before."""
    self.looks_on = self.looks_on and not self.is_member
    return ORIGINAL_ACCEPT(self, request)


def waits_for_newcomers(self: Membership, pushes: int) -> set[Member]:
    """What the others agree on before the newcomer's place in the program waits for it."""
    return set()


def exempts_nobody_later(self: Agreement[Any]) -> Set[Member]:
    """What is being agreed on when a newcomer becomes a member waits for it."""
    later, self.joined_later = self.joined_later, frozenset
    self.unasked |= later()
    return self.unasked


def awaits_marks_of_all(self: ServerCheckpoints, snapshot: ServerCheckpoint) -> Set[int]:
    """A checkpoint of a server waits for those, too, that have joined later in the program."""
    return self._peers.awaited


def needs_others(self: Losses, member: Member, said: str) -> bool:
    others = (self._membership.members.keys() | self._membership.newcomers.keys()) - {member.node}
    return bool(others) and ORIGINAL_MAY_GO_ON(self, member, said)


def stops_servers(*_: Any) -> None:
    """When the last worker is lost, the servers are told to stop."""


def forgets_lives(self: Scheduler, event: ChildEnded, now: float) -> list[Effect]:
    """A line about an earlier process of a rank is about the present one."""
    peer = self.membership.peers[event.node]
    return ORIGINAL_ENDED(self, replace(event, life=self.membership.lives[peer.member]), now)


ORIGINAL_NUMBER = Scheduler._number
ORIGINAL_BARRIER = Scheduler._barrier
ORIGINAL_MAY_GO_ON = Losses.may_go_on
ORIGINAL_HELLO = Newcomers.hello
ORIGINAL_ACCEPT = newcomer.Newcomer.accept
ORIGINAL_ENDED = Scheduler._child_ended


def leases_twice(self: Queue, batch: int, wanted: int, workers: int) -> Range | None:
    """A range stays free when it is leased."""
    taken = ORIGINAL_LEASE(self, batch, wanted, workers)
    if taken is not None and taken.start % 4 == 0:
        self.give_back([taken])
    return taken


def gives_back_at_once(self: Leases, member: Member) -> None:
    """What a lost worker has told of decides, not what servers have counted."""
    self._waiting.pop(member, None)
    self._reclaim(member)


def gives_back_what_counts(self: Leases, member: Member, fates: Iterable[Fate]) -> None:
    ORIGINAL_SETTLED(self, member, ())


def believes_newcomers(self: Leases, sender: Member, message: Lease, now: float) -> list[Effect]:
    self._version = max(self._version, message.version)
    return ORIGINAL_LEASES_LEASE(self, sender, message, now)


def awaits_all(self: Peers, ranks: Set[int]) -> None:
    """Rounds wait for workers without data."""
    self.resting, self.awaited = set(ranks), set(self.workers)


def ends_when_nothing_is_free(self: Leases) -> None:
    """What others still hold, or may have lost, is not waited for."""
    holders, unsettled = self._holders, self._unaccounted
    self._holders, self._unaccounted = {member: LeaseHolder(0) for member in holders}, set()
    try:
        ORIGINAL_ADVANCE(self)
    finally:
        self._holders, self._unaccounted = holders, unsettled


def begins_its_own(self: Scheduler, sender: Member, message: Any, opened: Any, count: int) -> int | None:
    """No call of a newcomer is one that others have made."""
    is_late = sender in self.membership.since
    return ORIGINAL_NUMBER(self, sender, message, {} if is_late else opened, count)


def hears_no_repeats(self: Scheduler, sender: Member, message: Barrier, now: float) -> list[Effect]:
    """A barrier that is called again is another one."""
    return ORIGINAL_BARRIER(self, sender, replace(message, repeats=False), now)


def stays_late(self: BarrierCalls) -> None:
    """Who has gone back is still at the barrier at which it was late."""


def tells_no_numbers(self: SavingCalls, stores: Any, counts: Any) -> None:
    """Who has rested knows nothing of the checkpoints that the others have made."""


def wakes_into_checkpoints(self: Checkpoints) -> bool:
    return False


def forgets_what_is_held(self: Leases, version: int) -> None:
    """Only what is free is left when a snapshot begins."""
    ORIGINAL_SNAPSHOT_BEGINS(self, version)
    for holder in (self._unused_at_snapshot or {}).values():
        holder.ranges.clear()


def knows_no_examples(self: ServerCheckpoints, snapshot: ServerCheckpoint, examples: Any) -> None:
    """A snapshot has none of what workers have leased."""


def goes_on_in_the_data(self: Leases, position: Any) -> None:
    """The weights go back, and the place in the data does not."""


def lets_them_sleep(self: Leases, position: Any) -> None:
    """Who had nothing to train on is not waited for, though there is something now."""
    resting = dict(self._membership.resting)
    self._membership.resting.clear()
    ORIGINAL_GO_BACK(self, position)
    self._membership.resting.update(resting)


ORIGINAL_SNAPSHOT_BEGINS = Leases.snapshot_begins
ORIGINAL_GO_BACK = Leases.roll_back
ORIGINAL_LEASE = Queue.lease
ORIGINAL_LEASES_LEASE = Leases.lease
ORIGINAL_SETTLED = Leases.account
ORIGINAL_ADVANCE = Leases.advance


def says_it_is_quiet_at_once(self: Transfers) -> bool:
    return True


def goes_on_with_the_first_server(self: Worker, sender: Member, message: Rewound, now: float) -> list[Effect]:
    """Other servers have not gone back yet."""
    if self._rewinding is not None:
        self._rewinding.told.update(self.peers.servers.values())
    return ORIGINAL_REWOUND(self, sender, message, now)


def tells_the_user_nothing(self: Worker, message: Rewind, now: float) -> list[Effect]:
    """What was called before somebody knew goes on, and is made of weights that are no more."""
    effects = ORIGINAL_REWIND(self, message, now)
    self.rolled_back = None
    return effects


def takes_slices_as_they_are(holder: Holder, version: int) -> bool:
    return False


def keeps_the_numbers_of_what_was_dropped(self: Checkpoints) -> list[Effect]:
    """The scheduler has counted calls that their callers will make again."""
    saves, loads = dict(self.saves), dict(self.loads)
    effects = ORIGINAL_DROP_ALL(self)
    self.saves, self.loads = saves, loads
    return effects


def goes_on_before_the_cut(self: Shard, store: int, read: Any) -> list[tuple[int, int]]:
    """Servers make versions again as soon as they have gone back, however few workers are there."""
    with mock.patch.object(type(self), "promise", lambda shard, more=1: []):
        return ORIGINAL_ROLL_BACK(self, store, read)


def counts_what_is_torn(self: Rollback, sender: Member, message: SnapshotTaken) -> list[Effect]:
    """A snapshot is one as soon as a server has written its part."""
    effects = ORIGINAL_TAKEN(self, sender, message)
    self.written += [] if self._making is None else [self._making]
    return effects


def refuses_early_words(self: Server, source: Member, message: Message) -> str | None:
    if source.node.role is Role.WORKER and not self.joining.complete:
        return "it is not a worker of this cluster"
    return ORIGINAL_REFUSES(self, source, message)


def keeps_what_it_counted(self: Round, version: int, ranks: Iterable[int], later: Set[int]) -> None:
    counted = self.counted
    ORIGINAL_ROUND_REWIND(self, version, ranks, later)
    self.counted = counted or self.counted


ORIGINAL_REWOUND = Worker._rewound
ORIGINAL_READ = Checkpoints._read
ORIGINAL_REWIND = Worker._rewind
ORIGINAL_TAKEN = Rollback.snapshot_taken
ORIGINAL_DROP_ALL = Checkpoints.drop_all
ORIGINAL_ROLL_BACK = Shard.roll_back
ORIGINAL_ROUND_REWIND = Round.rewind


def reads_what_is_torn(self: Checkpoints, loading: LoadUnderWay, failure: str) -> list[Effect]:
    return ORIGINAL_READ(self, loading, "")


def goes_further_back_in_silence(self: Rollback, damaged: Snapshot, failure: str) -> list[Effect]:
    """Workers think that all go back to the newest snapshot."""
    self.written.remove(damaged)
    back, to = self.way_back, self.newest
    assert back is not None and to is not None
    self._to, self.way_back = to, replace(back, folder=to.folder, is_reading=False)
    return self._checkpoints.roll_back(self.way_back)


def leaves_what_is_torn(self: Rollback, sender: Member, message: SnapshotTaken) -> list[Effect]:
    """Older snapshots go in the place of damaged ones."""
    self._useless.clear()
    return ORIGINAL_TAKEN(self, sender, message)


def knows_one_version(self: Round, pull: PullRequest) -> bool:
    """Who comes back reads the present version of each slice."""
    return False


def keeps_no_rows(self: TableRows, ids: Any, optimizer: Any, wd: Any) -> Any:
    """The rows that a round changes are not copied before."""
    return np.zeros(0, np.int64), np.zeros(0, self.dtype.storage)


def loses_what_was_before(self: Block, begin: int, end: int) -> Block:
    """Splitting a block forgets the version before."""
    part = ORIGINAL_PART(self, begin, end)
    part.previous = None
    return part


def forgets_what_counts(self: Round, ranks: Set[int]) -> None:
    """Who comes back is counted in each slice as if it had never been there."""
    ORIGINAL_DROP(self, ranks)


def begins_at_the_highest(self: Newcomers) -> int:
    """Who comes back goes on at the highest version of all slices."""
    return max(one.highest for one in self._membership.views.answers)


def awaits_who_is_there(self: Peers, ranks: Set[int]) -> None:
    """Rounds do not wait for workers that are away."""
    self.resting, self.awaited = set(ranks), self.workers.keys() - ranks


def leaves_out_who_has_come_back(self: Shard, store: int) -> list[tuple[int, int, int, int]]:
    """Rounds of keys that are declared after a worker has come back do not wait for it."""
    return []


def judges_silence_while_it_forms(self: Scheduler, event: Event, now: float) -> list[Effect]:
    """Who is silent counts as lost after its time, whether all have come or not."""
    effects = ORIGINAL_OBSERVE(self, event, now)
    if isinstance(event, PeerDisconnected):
        self.membership.suspect(event.member, now + self._grace_s(event.after_silence), event.reason)
    return effects


def leaves_no_time(self: Membership, due: float) -> None:
    """Who is silent when the last one comes is lost at once."""
    ORIGINAL_JUDGE_SILENT(self, 0.0)


def judges_the_scheduler_while_it_forms(self: Joining, grace_s: float, after_silence: bool, now: float) -> float:
    """A scheduler that is silent counts as lost after its time, whether all have come or not."""
    return now + grace_s + self.away_s


ORIGINAL_OBSERVE, ORIGINAL_JUDGE_SILENT = Scheduler.observe, Membership.judge_silent
ORIGINAL_DROP = Round.drop


def leaves_out_events(self: Journal, now: float, event: Event) -> None:
    """The journal has nothing of what the launcher sees."""
    if not isinstance(event, ChildEnded):
        ORIGINAL_OBSERVED(self, now, event)


def begins_no_work_again(self: Node, journal: Journal) -> None:
    """What the last process had begun with the disk stays undone."""
    with mock.patch.object(type(self._disk), "begin", lambda disk, work, done: None):
        ORIGINAL_KEEP(self, journal)


def begins_a_job_of_its_own(self: Journal) -> bool:
    """A scheduler that is started again does not read what the last one has written."""
    return True


def writes_no_more(self: Journal, now: float) -> None:
    """When the state is written anew, what comes after it is lost."""
    ORIGINAL_WRITE_STATE(self, now)
    if now:
        self._is_complete = False


ORIGINAL_OBSERVED = Journal.observed
ORIGINAL_KEEP, ORIGINAL_WRITE_STATE = Node.keep, Journal.write_state


def installs_again(self: Server, message: SetOptimizer, now: float) -> list[Effect]:
    """The optimizer begins anew, without its state."""
    self._optimizers.clear()
    return ORIGINAL_SET_OPTIMIZER(self, message, now)


GRACE_S = Limits.reconnect_grace_s


def drops_rows_alone(self: Shard, block: Block, rank: int) -> None:
    """The pushes of a sum are dropped one by one, though one of them has the bytes of all."""


def takes_late_sums(self: Shard, sender: Member, message: JoinedPush, now: float) -> None:
    """A sum with a worker that was given up counts if it comes late."""
    lost, self.peers.lost = self.peers.lost, set()
    try:
        ORIGINAL_PUSH_JOINED(self, sender, message, now)
    finally:
        self.peers.lost = lost


def forwards_what_is_lost(self: HostRounds, members: Any) -> None:
    """A leader sums what a worker has pushed that was given up."""
    self.members = dict(members)
    for host_round in [one for one in self._rounds.values() if one.shares.keys() >= self.members.keys()]:
        self._complete(host_round)


def says_nothing_of_sums(self: Reply, run: int, ids: Any) -> None:
    """A server drops a sum, and nobody hears of it."""


def keeps_it_to_itself(self: HostAggregation, message: HandedBack) -> None:
    """A leader does not tell its followers what a server has handed back."""


def awaits_all_at_once(self: Round, ranks: Sequence[int]) -> None:
    """Rounds of new keys wait for all members, whatever those have agreed on."""


def follows_as_a_newcomer(self: Worker, message: Roster, now: float) -> list[Effect]:
    """A worker that was started again gives its pushes to a leader that does not know it."""
    aggregation = self.aggregation
    effects = ORIGINAL_WORKER_ROSTER(self, message, now)
    if self.aggregation is not aggregation:
        self.aggregation = aggregation
        effects += aggregation.roster(self.me, self.peers.everyone)
    return effects


ORIGINAL_PUSH_JOINED = Shard.push_joined
ORIGINAL_WORKER_ROSTER = Worker._roster
ORIGINAL_SET_OPTIMIZER = Server._set_optimizer
ORIGINAL_ROSTER = Server._roster
ORIGINAL_REFUSES = Server.refuses
ORIGINAL_LOSE = Membership.lose
ORIGINAL_WITHOUT = Scheduler._without_departed
ORIGINAL_OFFER, ORIGINAL_ANSWER_PULLS = SparseTable.offer, Shard._answer_pulls
ORIGINAL_BUFFER = ReplyBuffers.acquire
ORIGINAL_COMPLETE = HostRounds._complete
ORIGINAL_TAKE = ServerCheckpoints._copy
ORIGINAL_IS_DUE = checkpoints._is_due
ORIGINAL_END = Restoring.end
ORIGINAL_SEQUENCE = Reliable._sequence
ORIGINAL_ACKNOWLEDGE = Reliable._acknowledge
ORIGINAL_ENTER = SliceTable.enter
ORIGINAL_HOLD = Block.lend
ORIGINAL_PART = Block._part
ORIGINAL_WEIGHT = DeviceUpdater._weight

Patches = list[tuple[type | ModuleType, str, Any]]
ORIGINAL_HEARD = Quotas.heard
ORIGINAL_TAKE_ROUND = Round.close
ORIGINAL_DROP = Round.drop


def adds_up_reports(self: Quotas, sender: Member, message: Progress, now: float) -> list[Effect]:
    before = self._said.get(message.slice, {}).get(sender)
    if before is not None and before.step == message.step:
        message = replace(message, samples=before.samples + message.samples)
    return ORIGINAL_HEARD(self, sender, message, now)


def keeps_what_the_lost_have_said(self: Quotas, now: float) -> list[Effect]:
    return [effect for number in self._said for effect in self._look(number, now)]


def keeps_the_samples_of_the_lost(self: Round, ranks: Set[int]) -> dict[int, int]:
    """What the lost have pushed is dropped, and the mean is over their examples all the same."""
    samples = sum(one.samples for rank, one in self.slots.items() if rank in ranks)
    pushes = ORIGINAL_DROP(self, ranks)
    for one in [*self.slots.values()][:1]:
        one.samples += samples
    return pushes


def counts_reports(self: Quotas, sender: Member, message: Progress, now: float) -> list[Effect]:
    """How many reports there were, rather than which workers have something."""
    if message.samples:
        counted = self.__dict__.setdefault("counted", Counter())
        counted[message.slice, message.step] += 1
    return ORIGINAL_HEARD(self, sender, message, now)


def is_enough_by_count(
    self: Quotas, number: int, reports: Mapping[int, Progress], awaited: Set[int], now: float
) -> bool:
    counted = self.__dict__.setdefault("counted", Counter())
    return any(counted[number, one.step] >= one.quota for one in reports.values())


def closes_without_one(self: Policy, present: Set[int], members: Set[int]) -> bool:
    """Each slice takes the first that come, and sees others than the next slice does."""
    return bool(present) and len(present) >= len(members) - 1


def drops_what_this_slice_finds_late(self: Round, ranks: Sequence[int] | None = None) -> list[Any]:
    taken = ORIGINAL_TAKE_ROUND(self, ranks)
    for one in taken:
        if not self.policy.is_lockstep and self.version - 1 - one.version > 2:
            one.flags |= Flag.EMPTY
    return taken


def tells_what_it_was_told(self: ProgressReports) -> list[int]:
    """After a rollback, what was due before it still is."""
    return [said.request for said in self._said.values() if self._pending.get(said.request) is not None]


MUTANTS: dict[str, tuple[str, Patches]] = {
    "reports of progress are added up": ("quota", [(Quotas, "heard", adds_up_reports)]),
    "who has rested counts its own pushes for rounds": (
        "exact quota at rest",
        [(SliceTable, "rounds_of", lambda self, number: int(self.pushed[number]))],
    ),
    "who has the slices of a lost server hears of no progress": (
        "quota and a dead server",
        [(ProgressReports, "again", lambda self, number: [])],
    ),
    "a lost worker is waited for under a quota": (
        "quota and a dead worker",
        [(Quotas, "roster", lambda self, now: [])],
    ),
    "what a lost worker has reported counts": (
        "quota and a worker that dies in a long round",
        [(Quotas, "roster", keeps_what_the_lost_have_said)],
    ),
    "a mean is over the examples of lost workers, too": (
        "quota and two dead workers",
        [(Round, "drop", keeps_the_samples_of_the_lost)],
    ),
    "workers are counted by their reports": (
        "quorum",
        [(Quotas, "heard", counts_reports), (Quotas, "_is_enough", is_enough_by_count)],
    ),
    "each slice closes a version when all but one have pushed it": (
        "quorum",
        [(Policy, "is_full", closes_without_one)],
    ),
    "a quorum that is not there any more is waited for": (
        "quorum and a dead worker",
        [(Quotas, "roster", lambda self, now: [])],
    ),
    "each slice judges how late a gradient is": ("delays", [(Round, "close", drops_what_this_slice_finds_late)]),
    "what was due before all went back still is": (
        "quota goes back",
        [(ProgressReports, "rewind", tells_what_it_was_told)],
    ),
    "a server goes back and knows of progress after that": ("quota goes back", [(Quotas, "clear", lambda self: None)]),
    "who has something under way is quiet": (
        "goes back in a storm",
        [(Transfers, "is_quiet", property(says_it_is_quiet_at_once))],
    ),
    "workers go on before all servers have gone back": (
        "goes back",
        [(Worker, "_rewound", goes_on_with_the_first_server)],
    ),
    "users do not hear that all went back": ("goes back", [(Worker, "_rewind", tells_the_user_nothing)]),
    "a snapshot is of many moments": ("goes back", [(shard, "_is_in_step", takes_slices_as_they_are)]),
    "a torn snapshot counts": ("goes back", [(Rollback, "snapshot_taken", counts_what_is_torn)]),
    "what was read of a torn snapshot counts": (
        "goes back from torn snapshots",
        [(Checkpoints, "_read", reads_what_is_torn)],
    ),
    "workers do not hear that a snapshot is torn": (
        "goes back from torn snapshots",
        [(Rollback, "_without", goes_further_back_in_silence)],
    ),
    "torn snapshots stay in the place of good ones": (
        "goes back from torn snapshots",
        [(Rollback, "snapshot_taken", leaves_what_is_torn)],
    ),
    "a server refuses workers that it does not know yet": (
        "goes back without both servers",
        [(Server, "refuses", refuses_early_words)],
    ),
    "counters stay where they were": ("goes back", [(Round, "rewind", keeps_what_it_counted)]),
    "what is called before a worker is quiet counts": (
        "goes back saving with a far scheduler",
        [(Rollback, "ignores", lambda rollback, sender: False)],
    ),
    "numbers of dropped checkpoints are not given again": (
        "goes back saving with a far scheduler",
        [(Checkpoints, "drop_all", keeps_the_numbers_of_what_was_dropped)],
    ),
    "versions are made between a rollback and the next cut": (
        "goes back when too few are left",
        [(Shard, "roll_back", goes_on_before_the_cut)],
    ),
    "an optimizer is installed again": ("fills", [(Server, "_set_optimizer", installs_again)]),
    "the journal lacks what falls due": (
        "scheduler returns after it has given up who was silent",
        [(Journal, "ticked", lambda self, now: None)],
    ),
    "the journal lacks what the launcher says": (
        "goes back and loses its scheduler on the way",
        [(Journal, "observed", leaves_out_events)],
    ),
    "works with the disk do not begin again": (
        "scheduler returns twice",
        [(Node, "keep", begins_no_work_again)],
    ),
    "the journal is not read": ("scheduler returns", [(Journal, "is_new", property(begins_a_job_of_its_own))]),
    "the journal ends with its first state": ("scheduler returns", [(Journal, "write_state", writes_no_more)]),
    "a scheduler that was started again does not notice who comes back": (
        "scheduler and a worker",
        [(Reliable, "is_apart", lambda self, member: False)],
    ),
    "a round counts messages, and they come twice": (
        "storm",
        [(Round, "offer", counts_messages), (Reliable, "_sequence", hands_on_pushes_that_come_twice)],
    ),
    "what comes twice is handled twice": ("storm", [(Reliable, "_sequence", hands_on_what_comes_twice)]),
    "gaps are accepted": ("storm", [(Reliable, "_sequence", accepts_gaps)]),
    "what is not there yet is acknowledged": ("storm", [(Reliable, "_acknowledge", acknowledges_too_much)]),
    "nothing is repeated": ("storm", [(Reliable, "_repeat", never_repeats)]),
    "leased buffers are written": ("async storm", [(BufferPool, "acquire", writes_into_leased_buffers)]),
    "parts of leased buffers are written": ("async storm", [(BufferPool, "give_back", writes_into_parts)]),
    "a block that is split loses its open round": ("calm", [(Block, "_part", loses_what_is_open)]),
    "blocks merge that differ": ("calm", [(Block, "may_merge", merges_what_differs)]),
    "held buffers are written": ("async", [(Block, "lend", holds_nothing)]),
    "held buffers are written before their successor is there": ("async storm", [(Block, "lend", lets_go_too_early)]),
    "a pull does not wait for its own pushes": ("calm", [(Round, "satisfies", forgets_the_step)]),
    "what was forwarded is handed back": ("one host", [(HostRounds, "_complete", hands_back_what_it_forwards)]),
    "followers do not push again when the leader has left": (
        "leader leaves one host",
        [(Transfers, "reclaim", says_nothing_again)],
    ),
    "what is being saved is written": ("checkpoints", [(ServerCheckpoints, "_copy", leases_nothing)]),
    "states are saved that go on changing": ("checkpoints", [(SliceState, "copy", copies_nothing)]),
    "the moment of a checkpoint passes by": (
        "checkpoints of hosts in a storm",
        [(checkpoints, "_is_due", waits_for_all_marks)],
    ),
    "some pushes before a checkpoint are not in it": (
        "async checkpoints",
        [(checkpoints, "_is_due", waits_for_one_mark)],
    ),
    "a checkpoint does not wait for servers": (
        "checkpoints",
        [(SaveUnderWay, "is_complete", property(is_complete_without_servers))],
    ),
    "half a checkpoint is loaded": ("async checkpoints", [(Restoring, "end", takes_over_a_half)]),
    "states are not loaded": ("checkpoints", [(Updater, "restore", restores_no_state)]),
    "a device goes on from a weight that was replaced": (
        "offloaded",
        [
            (DeviceUpdater, "_weight", knows_a_weight_by_its_name),
            (DeviceUpdater, "restore", restores_the_state_alone),
        ],
    ),
    "two pushes of a slice are under way": ("calm", [(SliceTable, "enter", forgets_the_line)]),
    "two pushes of rows are under way": ("rows", [(SliceTable, "enter", forgets_the_line)]),
    "a round counts messages of rows": ("rows updated", [(SparseTable, "offer", counts_messages_of_rows)]),
    "only the last part of a contribution counts": ("rows updated", [(SparseTable, "offer", takes_the_last_part)]),
    "a pull of rows does not wait for its own pushes": ("rows", [(Round, "satisfies", forgets_the_step)]),
    "a pull of rows waits for nothing": (
        "rows",
        [(Shard, "_answer_pulls", answers_at_once)],
    ),
    "leased answers are written": ("rows async", [(ReplyBuffers, "acquire", writes_into_leased_answers)]),
    "what lost workers have pushed counts": ("goes on with one", [(Round, "drop", keeps_what_is_lost)]),
    "rounds close before what is lost is dropped": ("goes on", [(Server, "_roster", closes_before_it_drops)]),
    "servers listen to workers that were given up": (
        "goes on without a zombie",
        [(Server, "refuses", listens_to_the_lost)],
    ),
    "what a silent worker reads is written": (
        "goes on without a zombie",
        [(Membership, "lose", thinks_the_silent_have_ended)],
    ),
    "a silent worker is given up as late as where that ends the job": (
        "goes on without a zombie",
        [(Limits, "reconnect_grace_s", lambda limits, after_silence, goes_on=False: GRACE_S(limits, after_silence))],
    ),
    "barriers wait for lost workers": ("goes on", [(Scheduler, "_without_departed", goes_on_without("barriers"))]),
    "keys wait for lost workers": (
        "goes on from the start",
        [(Scheduler, "_without_departed", goes_on_without("keys"))],
    ),
    "checkpoints wait for lost workers": (
        "goes on loading",
        [(Scheduler, "_without_departed", goes_on_without("checkpoints"))],
    ),
    "marks of lost workers stay": ("goes on saving in a storm", [(ServerCheckpoints, "unmark", keeps_marks)]),
    "first values that never come are awaited": ("goes on or is doomed", [(Keys, "giver_of", knows_no_giver)]),
    "the pushes of a sum are dropped one by one": (
        "goes on with sums of hosts",
        [(Shard, "_drop_sum", drops_rows_alone)],
    ),
    "a late sum counts for a lost worker": (
        "goes on with sums under way for long",
        [(Shard, "push_joined", takes_late_sums)],
    ),
    "leaders forward what is lost": (
        "goes on with sums under way for long",
        [(HostRounds, "set_members", forwards_what_is_lost)],
    ),
    "servers drop sums and say nothing": ("goes on with sums of hosts", [(Reply, "hand_back", says_nothing_of_sums)]),
    "followers do not hear that a sum was dropped": (
        "goes on with sums of hosts",
        [(HostAggregation, "handed_back", keeps_it_to_itself)],
    ),
    "newcomers give their pushes to a leader": (
        "joins sums of hosts",
        [(Worker, "_roster", follows_as_a_newcomer)],
    ),
    "early pushes of newcomers count": ("joins", [(Round, "ready", counts_early_pushes)]),
    "rounds wait for newcomers too early": ("joins", [(Admission, "of", waits_from_the_start)]),
    "slices go on while a cut is made": ("joins with a far scheduler", [(Admission, "allows", promises_nothing)]),
    "newcomers speak before servers know them": ("joins", [(Newcomers, "hello", tells_of_the_cluster_at_once)]),
    "counters of newcomers begin at none": ("joins", [(SliceTable, "begin_at", begins_at_none)]),
    "newcomers give values": ("joins", [(newcomer, "GIVES", ())]),
    "newcomers load": ("joins while others save", [(newcomer.Newcomer, "accept", loads_with_the_others)]),
    "newcomers agree before their first push": (
        "joins",
        [(newcomer.Newcomer, "accept", takes_part_before_it_pushes)],
    ),
    "rounds are closed by too few": (
        "joins when too few are left",
        [(Newcomers, "_lacking", lambda newcomers, joining=0: 0)],
    ),
    "the first mean waits for a newcomer": ("joins before the first mean", [(Round, "leave_out", awaits_all_at_once)]),
    "an early hello is refused": ("joins", [(Newcomers, "delay_claimant", refuses_early_hellos)]),
    "what comes before a newcomer waits for it": ("joins", [(Membership, "joined_later", waits_for_newcomers)]),
    "what is under way waits for a newcomer": (
        "joins while others save",
        [(Agreement, "exempted", property(exempts_nobody_later))],
    ),
    "servers' checkpoints wait for a newcomer": (
        "joins while others save",
        [(ServerCheckpoints, "_awaited", awaits_marks_of_all)],
    ),
    "the last loss ends the job": ("joins when all were lost", [(Losses, "may_go_on", needs_others)]),
    "nobody waits for one that comes back": (
        "joins when all were lost",
        [(Scheduler, "_wait_for_return", stops_servers)],
    ),
    "a late line ends the next life": ("joins again and again", [(Scheduler, "_child_ended", forgets_lives)]),
    "newcomers begin barriers of their own": ("joins", [(Scheduler, "_number", begins_its_own)]),
    "a barrier that is called again is the next one": (
        "late at barriers in a storm",
        [(Scheduler, "_barrier", hears_no_repeats)],
    ),
    "who goes back is still late at a barrier": (
        "goes back from late barriers",
        [(BarrierCalls, "forget", stays_late)],
    ),
    "who comes back reads the present": ("waits", [(Round, "is_before", knows_one_version)]),
    "rows of the version before are not kept": ("waits with rows", [(TableRows, "visited", keeps_no_rows)]),
    "a block that is split loses the version before": ("waits", [(Block, "_part", loses_what_was_before)]),
    "what counts of the lost counts again": ("waits", [(Round, "drop_uncounted", forgets_what_counts)]),
    "who comes back begins at the highest version": ("waits", [(Newcomers, "_version", begins_at_the_highest)]),
    "nobody waits for who is away": ("waits", [(Peers, "rest", awaits_who_is_there)]),
    "keys that are declared later leave out who has come back": (
        "waits while a second model begins",
        [(Shard, "begin_together", leaves_out_who_has_come_back)],
    ),
    "a silent process is lost before the last one has come": (
        "paused worker while the cluster forms",
        [(Scheduler, "observe", judges_silence_while_it_forms)],
    ),
    "a silent process is lost as soon as the last one has come": (
        "paused server while the cluster forms",
        [(Membership, "judge_silent", leaves_no_time)],
    ),
    "a silent scheduler is lost before the last process has come": (
        "paused scheduler while the cluster forms",
        [(Joining, "scheduler_due", judges_the_scheduler_while_it_forms)],
    ),
    "examples are leased twice": ("leases", [(Queue, "lease", leases_twice)]),
    "leases of the lost go back before servers have settled": (
        "leases of lost workers",
        [(Leases, "on_lost", gives_back_at_once)],
    ),
    "what servers have counted of the lost goes back": (
        "leases of lost workers",
        [(Leases, "account", gives_back_what_counts)],
    ),
    "what is leased is not left when a snapshot begins": (
        "goes back leasing",
        [(Leases, "snapshot_begins", forgets_what_is_held)],
    ),
    "nobody knows which examples a snapshot has": (
        "goes back leasing",
        [(ServerCheckpoints, "_note_trained", knows_no_examples)],
    ),
    "the place in the data does not go back": ("goes back leasing", [(Leases, "roll_back", goes_on_in_the_data)]),
    "who rests sleeps through a rollback": ("goes back leasing near the end", [(Leases, "roll_back", lets_them_sleep)]),
    "who joins and finds no data is awaited": (
        "leases and newcomers when too few are left",
        [(Scheduler, "idle", 0)],
    ),
    "a checkpoint is complete before what the lost have used is known": (
        "leases and newcomers again and again",
        [(Server, "_roster", settles_last)],
    ),
    "a version that is still to come counts as made": (
        "leases and newcomers",
        [(Leases, "lease", believes_newcomers)],
    ),
    "rounds wait for workers without data": ("leases", [(Peers, "rest", awaits_all)]),
    "the data end while others hold some": ("leases near the end", [(Leases, "advance", ends_when_nothing_is_free)]),
    "who has rested does not know of checkpoints": ("leases", [(SavingCalls, "begin_at", tells_no_numbers)]),
    "checkpoints wait for who has rested": (
        "leases",
        [(Checkpoints, "is_saving", property(wakes_into_checkpoints))],
    ),
    "rounds are published before the backup has them": (
        "replicas and a dead server",
        [(ReplicatedServer, "_published", publishes_at_once)],
    ),
    "a backup does not know who is in a round": (
        "replicas async",
        [(ReplicatedShard, "_forward", forgets_who_is_in_it)],
    ),
    "a copy that is behind is taken over": ("replicas async", [(CopiedShard, "replicate", lags_behind)]),
    "what is sent again counts twice": ("replicas async", [(Round, "verdict_on", counts_what_is_sent_again)]),
    "what lost servers have not answered is not sent again": (
        "replicas and a dead server",
        [(Transfers, "send_again", lambda transfers, server, is_near: None)],
    ),
    "what comes before a server is known to be lost is refused": (
        "replicas and a dead server",
        [(ReplicatedServer, "_is_early", lambda machine, message: False)],
    ),
    "checkpoints lack what was marked at a lost server": (
        "replicas and checkpoints",
        [(Checkpoints, "server_lost", forgets_who_is_unaware)],
    ),
    "a copy is filled in without counters": (
        "fills again and again",
        [(replica, "_standings", fills_in_without_counters)],
    ),
    "a copy is filled in without states": ("fills with momentum", [(slice_parts, "packed", fills_in_without_states)]),
    "a copy that is not whole is taken over": (
        "fills until its server is killed",
        [(ReplicatedServer, "is_whole", property(says_it_is_whole_at_once))],
    ),
    "a server waits for ever for a backup that it cannot reach": (
        "a server parted from its copies",
        [(ReplicatedServer, "_await_backup", lambda self, reason, now: None)],
    ),
    "rounds overtake what is filled in": ("fills", [(ReplicatedServer, "_published", fills_in_late)]),
    "blocks merge while copies are filled in": (
        "fills async in a hurry",
        [(Blocks, "cover_merged", merges_meanwhile)],
    ),
    "an old word of a copy counts": (
        "fills in a hurry with a far scheduler",
        [(Membership, "copied", believes_old_words)],
    ),
    "a store is loaded while copies are filled in": (
        "fills as a checkpoint is loaded",
        [(Checkpoints, "_begin_loading", loads_at_once)],
    ),
    "what is said late of a checkpoint begins another": (
        "fills saving",
        [(Checkpoints, "saved", opens_what_is_over)],
    ),
    "a server that comes back owes answers to what it was not asked": (
        "fills while workers die",
        [(Questions, "exempt", lambda self, server: None)],
    ),
    "servers without rows get no contribution": (
        "rows",
        [(row_workload, "push_runs", leaves_out_servers_without_rows)],
    ),
}


NOTED_ON = Path(__file__).parents[2] / "docs" / "decisions" / "proof.md"
"""The page with the seed at which each broken rule was noticed, counted from 1."""


def noted_seeds() -> dict[str, int]:
    """Rule → the seed with which the search begins."""
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \| (\d+) \|$", NOTED_ON.read_text("utf-8"), re.MULTILINE)
    return {rule: int(count) - 1 for rule, count in rows}


def seeds_to_notice(scenario: str, patches: Patches, noted: int = 0) -> int | None:
    """How many seeds it takes until a scenario fails under these patches; None if it does not.

    The noted seed comes first: unless the protocol has changed since it was noted, it is the only one.
    """
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(simulation, "EVENTS_MAX", MUTANT_EVENTS_MAX))
        for owner, name, function in patches:
            stack.enter_context(mock.patch.object(owner, name, function))
        for seed in dict.fromkeys([noted, *range(MUTANT_SEEDS)]):
            try:
                run(seed, SCENARIOS[scenario])
            except SimulationError:  # any other exception may be the patch's own mistake
                return seed + 1
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_simulation_notices_a_broken_rule(name: str) -> None:
    scenario, patches = MUTANTS[name]
    noticed = seeds_to_notice(scenario, patches, noted_seeds().get(name, 0))
    assert noticed is not None, f"{name} goes unnoticed in {scenario}"


def test_a_round_is_a_set_so_a_push_that_reaches_the_server_twice_changes_nothing() -> None:
    weather = replace(STORM, duplication=0.3, loss=0.0, cut=0.0)
    struck = 0
    with mock.patch.object(Reliable, "_sequence", tries_pushes_that_come_twice):
        for seed in range(4):
            struck += run(seed, replace(SCENARIOS["storm"], weather=weather)).happened["duplicated"]
    assert struck > 0
