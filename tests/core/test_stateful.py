"""A cluster of pure machines, led by hypothesis through calls, deliveries, losses and deaths in any order.

Every worker pushes integers, so what may be read is known: a prefix of the pushes of each live worker, all of one
length, and of a lost one what was counted when it was killed. Servers and the scheduler are killed, too, and come back.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from kvdist.core.machine import Effect
from kvdist.core.reliable import PeerLink, Reliable
from kvdist.core.scheduler.membership import Membership
from kvdist.core.scheduler.scheduler import Scheduler
from tests.cases import each
from tests.core.wired import Wired

KEYS = {"small": 3, "cut": 8}
"""Key → elements; the larger one is cut over both servers."""
WORKERS, SERVERS = 3, 2
RANKS = st.integers(0, WORKERS - 1)


def contribution(rank: int, step: int) -> float:
    """What every element of a push is."""
    return float((rank + 1) * (step + 1))


class ClusterCalls(RuleBasedStateMachine):
    """Calls of three workers to two servers, each of which has a copy of what the other one has."""

    @initialize()
    def start(self) -> None:
        self.wired = Wired(WORKERS, SERVERS, bigarray_bound=4, on_loss="continue", replicas=1)
        self.restarted_at = 0.0
        """When the scheduler was started again."""
        self.pushed = [0] * WORKERS
        self.counted = [0] * WORKERS
        """Of a lost worker how many of its pushes count."""
        self.live = set(range(WORKERS))
        self.reads: dict[int, tuple[int, int]] = {}
        """Request → (rank, how many pushes it follows)."""
        self.arrived: dict[int, int] = {}
        """Rank → its request, at the barrier that is open."""
        self.wired.initialise({key: [0.0] * size for key, size in KEYS.items()})
        for rank in self.live:
            self.wired.set_optimizer(rank, "sgd", learning_rate=1.0)
        self.wired.settle()

    @rule(rank=RANKS)
    def push(self, rank: int) -> None:
        if rank in self.live:
            value = contribution(rank, self.pushed[rank])
            self.wired.push(rank, {key: [value] * size for key, size in KEYS.items()})
            self.pushed[rank] += 1

    @rule(rank=RANKS)
    def pull(self, rank: int) -> None:
        if rank in self.live:
            self.reads[self.wired.pull(rank, *KEYS)] = (rank, self.pushed[rank])

    @rule(rank=RANKS)
    def barrier(self, rank: int) -> None:
        if rank in self.live and rank not in self.arrived:
            self.arrived[rank] = self.wired.barrier(rank)

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        self.wired.deliver(min(count, len(self.wired.wire)))
        self.check()

    @rule()
    @precondition(lambda self: self.wired.wire)
    def lose_all_that_is_under_way(self) -> None:
        assert self.wired.lose() > 0
        self.wired.advance(40.0)  # said again after two seconds of silence, then four, up to sixteen
        self.check()

    @rule(rank=RANKS)
    @precondition(lambda self: len(self.live) > 1)
    def kill(self, rank: int) -> None:
        if rank not in self.live:
            return
        self.wired.settle()
        self.check()
        self.counted[rank] = min(self.pushed[one] for one in self.live)
        self.live.remove(rank)
        self.arrived.pop(rank, None)
        self.reads = {request: read for request, read in self.reads.items() if read[0] != rank}
        self.wired.kill(f"worker-{rank}")
        self.wired.advance(1.0)  # servers hear of losses right after each other together, a little later
        self.check()

    @rule(rank=st.integers(0, SERVERS - 1), count=st.integers(0, 6))
    def kill_a_server(self, rank: int, count: int) -> None:
        """The other one goes on with its copy; it comes back and is given copies while training goes on."""
        told = len(self.wired.reports)
        self.wired.kill(f"server-{rank}")
        self.wired.deliver(min(count, len(self.wired.wire)))
        self.wired.return_server(rank)
        self.wired.advance(5.0)
        assert any(f"server-{rank} " in one and "survives a loss" in one for one in self.wired.reports[told:])
        self.check()

    @rule(count=st.integers(0, 6))
    def restart_the_scheduler(self, count: int) -> None:
        if self.wired.now < self.restarted_at + 1.0:
            self.wired.advance(1.0)  # a link that breaks again and again before anything has arrived is given up
        self.restarted_at = self.wired.now
        self.wired.return_scheduler()
        self.wired.deliver(min(count, len(self.wired.wire)))
        self.check()

    def check(self) -> None:
        """What has been read may have been there; nobody has passed a barrier that others have not reached."""
        assert not self.wired.failed, self.wired.failed
        for request in self.wired.completed.keys() & self.reads.keys():
            rank, steps = self.reads.pop(request)
            values = [value for key in KEYS for value in self.wired.value(request, key)]
            possible = {self.weight(version) for version in range(steps, self.pushed[rank] + 1)}
            for key, size in KEYS.items():
                found = set(self.wired.value(request, key))
                assert len(found) == 1 or size > 4, f"{key} has parts of two versions: {found}"
            assert set(values) <= possible, (rank, steps, values, possible)
        if any(request in self.wired.completed for request in self.arrived.values()):
            assert self.arrived.keys() >= self.live
            if all(request in self.wired.completed for request in self.arrived.values()):
                self.arrived.clear()

    def weight(self, version: int) -> float:
        """Every element after so many rounds."""
        pushes = [range(version if rank in self.live else min(version, self.counted[rank])) for rank in range(WORKERS)]
        return -float(np.sum([contribution(rank, step) for rank in range(WORKERS) for step in pushes[rank]]))

    def teardown(self) -> None:
        """When all live workers have pushed as often, and come to the barrier, every call is answered."""
        if not hasattr(self, "wired"):
            return
        most = max(self.pushed[rank] for rank in self.live)
        for rank in sorted(self.live):
            while self.pushed[rank] < most:
                self.push(rank)
            self.pull(rank)
            self.barrier(rank)
        self.wired.advance(40.0)
        self.check()
        assert not self.reads and not self.arrived
        for rank in sorted(self.live):
            read = self.wired.pull(rank, *KEYS)
            self.wired.settle()
            assert {value for key in KEYS for value in self.wired.value(read, key)} == {self.weight(most)}


TestCluster = ClusterCalls.TestCase
# Not to explain a failure, for which each line of all examples would be traced.
TestCluster.settings = settings(max_examples=25, stateful_step_count=30, phases={*Phase} - {Phase.explain})


def repeats_nothing(self: Reliable, link: PeerLink, now: float, messages_max: int | None = None) -> list[Effect]:
    """What is lost stays so, though the time for the next try is set."""
    self._expect_answer(link, now)
    return []


@each(
    "mutant",
    [
        mock.patch.object(Scheduler, "_pass_barriers", lambda self: []),
        mock.patch.object(Reliable, "_repeat", repeats_nothing),
        mock.patch.object(Membership, "copied", lambda self, rank, epoch: False),
    ],
)
def test_a_cluster_with_a_rule_less_is_found_out(mutant: Any) -> None:
    few = settings(max_examples=25, stateful_step_count=30, database=None, phases=[Phase.generate])
    with mutant, pytest.raises(AssertionError):
        run_state_machine_as_test(ClusterCalls, settings=few)
