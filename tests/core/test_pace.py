"""Who is slow, why, since when, and what it costs: histories of reports, and what the scheduler says of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvdist.config.settings import ClusterConfig
from kvdist.core.machine import Log
from kvdist.core.scheduler.membership import Membership
from kvdist.core.worker.requests import ReportTimes
from kvdist.diagnostics.attach import judge_pace
from kvdist.diagnostics.pace import Verdicts
from kvdist.nodes import UNRANKED, Member, NodeId, Role, server, worker
from kvdist.protocol.messages import Hello, StepTimes
from kvdist.version import __version__
from tests.cases import each
from tests.core.wired import Wired

USUAL_S = 0.3


@dataclass
class Step:
    """Of one worker, in seconds; `sending` is a part of what it waits."""

    data: float = 0.0
    compute: float = USUAL_S
    sending: float = 0.0
    samples: int = 0


@dataclass
class Unreported:
    """The sums of a worker's next report."""

    since: float = 0.0
    steps: int = 0
    samples: int = 0
    sums: list[float] = field(default_factory=lambda: [0.0] * 4)


Plan = Callable[[int, int], Step]
"""What the worker of a rank does in a step."""


class Job:
    """Workers whose steps take as long as they are told to, and servers; all report as real ones do.

    Args:
        workers, servers: how many.
        waits: whether a step of one is a step of all.
        busy: for how long each server computes in a round.
        answers_at_once: whether that is while the workers compute, and not while they wait.
    """

    def __init__(
        self,
        workers: int = 3,
        servers: int = 1,
        waits: bool = True,
        busy: Sequence[float] = (),
        answers_at_once: bool = False,
    ) -> None:
        self.membership = Membership(ClusterConfig(Role.SCHEDULER, "h", 1, workers, servers), 1)
        hello = Hello(-1, "rack", 0, "", workers, servers, __version__, 0)
        for number in range(servers):
            self.membership.admit(Member(NodeId(Role.SERVER, UNRANKED), 100 + number), hello)
        for rank in range(workers):
            host = Hello(rank, f"box{rank}", 0, "", workers, servers, __version__, 0)
            self.membership.admit(Member(NodeId(Role.WORKER, UNRANKED), 200 + rank), host)
        self.verdicts = Verdicts(self.membership, [60, 40][:servers])
        self.waits, self.busy = waits, [*busy] or [0.0] * servers
        self.answers_s = 0.002 + (0.0 if answers_at_once else max(self.busy))
        self.said: list[str] = []
        self.now: dict[int, float] = dict.fromkeys(range(workers), 0.0)
        self.steps: dict[int, int] = dict.fromkeys(range(workers), 0)
        self.said_at: list[tuple[float, int]] = []
        self._unreported = {rank: Unreported() for rank in range(workers)}
        self._servers_at = 0.0

    def run(self, seconds: float, plan: Plan = lambda rank, step: Step()) -> None:
        """Go on for so long."""
        end = min(self.now.values()) + seconds
        while min(self.now.values()) < end:
            if self.waits:
                self._make({rank: plan(rank, self.steps[rank]) for rank in self.now})
            else:
                rank = min(self.now, key=lambda one: self.now[one])
                self._make({rank: plan(rank, self.steps[rank])})

    def _make(self, made: dict[int, Step]) -> None:
        took = max(one.data + one.compute + one.sending for one in made.values()) + self.answers_s
        for rank, one in made.items():
            mine = self._unreported[rank]
            mine.steps += 1
            mine.samples += one.samples
            for place, number in enumerate((one.data, one.compute, took - one.data - one.compute, one.sending)):
                mine.sums[place] += number
            self.now[rank] += took
            self.steps[rank] += 1
            if self.now[rank] - mine.since >= 1.0:
                sums = [round(1e6 * number) for number in mine.sums]
                self._hear(
                    self.membership.members[worker(rank)], StepTimes(mine.steps, mine.samples, *sums), self.now[rank]
                )
                self._unreported[rank] = Unreported(self.now[rank])
        now = min(self.now.values())
        if now >= self._servers_at + 1.0:
            self._servers_at = now
            for rank, busy_s in enumerate(self.busy):
                times = StepTimes(0, 0, 0, round(1e6 * busy_s), round(1e6 * (took - busy_s)), 0)
                self._hear(self.membership.servers[server(rank)], times, now)

    def _hear(self, member: Member, times: StepTimes, now: float) -> None:
        for effect in self.verdicts.heard(member, times, now):
            assert isinstance(effect, Log)
            self.said.append(effect.text)
            self.said_at.append((now, min(self.steps.values())))

    def at_end(self) -> list[str]:
        """What is said at the end."""
        return [effect.text for effect in self.verdicts.summary() if isinstance(effect, Log)]


def only(rank: int, slow: Step, since: int = 0, until: int = 1 << 30) -> Plan:
    """One worker is otherwise in these steps."""
    return lambda of, step: slow if of == rank and since <= step < until else Step()


def noisy(plan: Plan, spread: float, seed: int = 0) -> Plan:
    """The same with times that vary, and now and then a step that takes twice as long."""
    chance = random.Random(seed)

    def varied(rank: int, step: int) -> Step:
        one = plan(rank, step)
        factor = chance.lognormvariate(0.0, spread) * (2.0 if chance.random() < 0.01 else 1.0)
        return Step(one.data * factor, one.compute * factor, one.sending, one.samples)

    return varied


QUOTA = " With --policy quota:512,local_steps nothing would wait for it (docs/unequal.md)."
WITHOUT = "and would take 0.30 s without this delay."
SLOW = {
    "a slow machine": (
        only(2, Step(compute=1.2)),
        "worker-2 (box2) computes 4.0x slower than the others, since the start.",
        f"A round takes 1.20 s, {WITHOUT}{QUOTA}",
    ),
    "one that has become slow": (
        only(2, Step(compute=0.75), since=50),
        "worker-2 (box2) has become 2.5x slower, since step 52.",
        f"A round takes 0.75 s, {WITHOUT} Look what else runs there, and for heat and swapping.",
    ),
    "slow data": (
        only(1, Step(data=0.4)),
        "worker-1 (box1) waits for its data for 0.40 s in a step (the others: 0.00 s), since the start.",
        f"A round takes 0.70 s, {WITHOUT} Give its DataLoader more workers, or bring the data nearer to it.",
    ),
    "a slow line": (
        only(1, Step(sending=0.42)),
        "worker-1 (box1) waits for its slow line for 0.40 s in a step (the others: 0.00 s), since the start.",
        (
            "A round takes 0.72 s, and would take 0.32 s without this delay. Look at its cable and Wi-Fi, or send less:"
            " compression, or --policy diloco:100,bits=8."
        ),
    ),
    "two causes": (
        only(1, Step(data=0.4, compute=0.6)),
        "worker-1 (box1) takes 3.3x as long as the others for a step, and not for one cause alone, since the start.",
        f"A round takes 1.00 s, {WITHOUT}{QUOTA}",
    ),
}


@each("name", SLOW)
def test_a_slow_worker_is_named_with_cause_beginning_cost_and_remedy(name: str) -> None:
    plan, sentence, more = SLOW[name]
    job = Job()
    job.run(90, plan)
    assert job.said == [f"{sentence} {more}"]
    (told,) = job.at_end()
    assert told.startswith(f"{sentence} The job has waited ")


def test_a_worker_that_stands_still_once_is_named() -> None:
    job = Job()
    job.run(60, only(1, Step(compute=2.3), since=50, until=51))
    assert job.said == ["worker-1 (box1) stood still once, for 2.00 s, about step 49."]
    assert job.at_end() == [f"{job.said[0]} The job has waited 2.00 s for it in all."]


def test_it_is_said_within_20_rounds_and_what_it_takes_to_report_them() -> None:
    job = Job()
    job.run(60, only(2, Step(compute=0.6), since=100))
    (_, step) = job.said_at[0]
    assert 100 < step <= 125


def test_the_end_of_the_job_names_what_has_cost_most_and_no_more_than_three() -> None:
    job = Job(6)
    job.run(
        120,
        lambda rank, step: Step(compute=0.3 if rank < 3 else 0.6 + 0.1 * (rank - 3)) if rank < 5 else Step(data=0.9),
    )
    assert len(job.said) == 3
    told = job.at_end()
    assert [text.split()[0] for text in told] == ["worker-5", "worker-4", "worker-3"]
    assert "The job has waited" in told[0]


def test_of_two_workers_one_is_the_other() -> None:
    job = Job(2)
    job.run(30, only(1, Step(compute=0.6)))
    assert job.said[0].startswith("worker-1 (box1) computes 2.0x slower than the other, since the start.")


def test_where_rounds_wait_for_several_no_single_one_has_the_cost() -> None:
    job = Job(4)
    job.run(60, lambda rank, step: Step(compute=1.2 if rank > 1 else 0.3, samples=16))
    others = "computes 4.0x slower than the others, since the start. A round takes 1.20 s, and others are as slow."
    quota = " With --policy quota:256,local_steps nothing would wait for it (docs/unequal.md)."
    assert job.said == [f"worker-2 (box2) {others}{quota}", f"worker-3 (box3) {others}{quota}"]


def test_where_no_round_waits_it_is_said_once_and_costs_nothing() -> None:
    job = Job(waits=False)
    job.run(120, only(2, Step(compute=1.2)))
    assert job.said == ["worker-2 (box2) computes 4.0x slower than the others, since the start."]
    assert not job.at_end()


def test_the_end_of_slowness_is_said_and_a_speed_between_the_limits_changes_nothing() -> None:
    job = Job()
    job.run(60, only(1, Step(compute=0.6)))
    job.run(60, only(1, Step(compute=0.4)))
    assert len(job.said) == 1, "1.33 times the others is neither slow nor well again"
    job.run(60)
    assert len(job.said) == 2 and job.said[1].startswith("worker-1 (box1) is as fast as others again, after ")
    job.run(60, only(1, Step(compute=0.4)))
    assert "has become" in job.said[2], "1.33 times its own best is news, though it is not 1.5 times the others"


def test_nothing_is_said_of_fewer_than_20_steps() -> None:
    job = Job()
    job.run(22, only(1, Step(compute=1.2)))
    assert job.steps[1] < 20 and not job.said


def test_a_worker_with_smaller_batches_is_not_slow_though_it_computes_as_long() -> None:
    job = Job()
    job.run(60, lambda rank, step: Step(samples=8 if rank == 1 else 32))
    assert not job.said, "rounds take as long as without it"


def test_one_with_larger_batches_is_not_slow_either() -> None:
    job = Job()
    job.run(60, lambda rank, step: Step(compute=1.2, samples=128) if rank == 1 else Step(samples=32))
    assert not job.said


def test_what_all_have_at_once_is_nobodys() -> None:
    job = Job()
    job.run(60)
    job.run(60, lambda rank, step: Step(compute=0.9))
    assert not job.said, "the batches have become larger, say"
    job.run(60, lambda rank, step: Step(compute=5.0 if step % 60 == 0 else 0.9))
    assert not job.said, "all evaluate"


def test_of_one_workers_pauses_two_are_said() -> None:
    job = Job()
    job.run(300, lambda rank, step: Step(compute=3.0 if rank == 1 and step % 60 == 59 else USUAL_S))
    assert len(job.said) == 2


def test_a_slow_server_is_named_with_its_bytes() -> None:
    job = Job(servers=2, busy=(0.4, 0.02))
    job.run(60)
    sentence = "server-0 (rack) computes for 0.40 s in a round (the other: 0.02 s)."
    assert job.said == [f"{sentence} It has 60% of the bytes. Look what else runs there, and for heat and swapping."]
    assert job.at_end()[0].startswith(f"{sentence} The job has waited ")


def test_a_server_that_computes_while_all_compute_is_not_slow() -> None:
    job = Job(servers=2, busy=(0.2, 0.02), answers_at_once=True)
    job.run(60)
    assert not job.said


@each("workers", [2, 3, 8])
def test_nothing_is_said_of_a_balanced_job_whose_times_vary(workers: int) -> None:
    for seed in range(2):
        job = Job(workers, servers=2, busy=(0.02, 0.03))
        job.run(600, noisy(lambda rank, step: Step(data=0.01, sending=0.01), 0.2, seed))
        assert not job.said


def test_who_leaves_or_joins_is_no_news() -> None:
    job = Job(4)
    job.run(30)
    del job.now[3]
    job.membership.leave(worker(3))
    job.run(30)
    assert not job.said
    job.run(60, only(1, Step(compute=0.9)))
    assert len(job.said) == 1
    del job.now[1]
    job.membership.leave(worker(1))
    job.run(60)
    assert len(job.said) == 1, "its end is not said: it is gone"


def test_a_worker_alone_is_not_judged() -> None:
    job = Job(1)
    job.run(60, only(0, Step(compute=1.2), since=50))
    assert not job.said


def test_a_cluster_hears_of_it_while_it_trains_and_when_the_last_worker_leaves() -> None:
    wired = Wired(2, 1)
    judge_pace(wired.scheduler)
    for _ in range(30):
        wired.advance(1.0)
        for rank, (compute_us, blocked_us) in enumerate([(250_000, 750_000), (1_000_000, 0)]):
            times = StepTimes(1, 32, 0, compute_us, blocked_us, 0)
            wired.ask(rank, lambda number, times=times: ReportTimes(number, times))
    assert [text.partition(",")[0] for text in wired.reports] == [
        "worker-1 (host-1) computes 4.0x slower than the other"
    ]
    wired.leave(0)
    wired.leave(1)
    wired.settle()
    assert "The job has waited" in wired.reports[1]
