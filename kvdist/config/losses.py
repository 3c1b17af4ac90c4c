"""What follows when a process of a job is lost, and what may not be combined with that: the only list of it. Pure.

The launcher fills a `LossPolicy` by its options, each process by its variables; a `Trainer`, a store and the scheduler
add what they know of the training. `LossPolicy.check` refuses what contradicts itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from kvdist.config.policies import Asynchronous, LocalSteps, TrainingPolicy
from kvdist.errors import ConfigError
from kvdist.nodes import Role

SCHEDULER_AWAY_S = 60.0
"""Default of `LossPolicy.away_s` where the others go on without lost processes."""
RETURN_S = 600.0
"""Default of `LossPolicy.return_limit_s` where all wait for lost workers: long enough to start a process by hand."""


@dataclass(frozen=True)
class LossPolicy:
    """What a job does when a process is lost. See the settings of the same names.

    Attributes:
        restart: how often each lost process is started again (``--restart``).
        on_worker_exit: how often the whole job is started again (``--on-worker-exit``).
        target: what starts the processes in place of the launcher, such as ``--emit kubernetes``.
        policy: when workers exchange; None for each step.
        workers_update: whether the weights are updated by the workers.
        overlaps: whether gradients leave during the backward pass.
        has_rounds: whether pushes of workers wait for each other.
        leases: whether the workers lease their examples.
        is_launched: whether a launcher asks.
        options: field → its value as the user wrote it after an option; other fields were set by variables.
    """

    on_loss: str = field(default="fail", metadata={"variable": "KVDIST_ON_LOSS"})
    num_workers: int = 1
    num_servers: int = 1
    max_workers: int | None = field(default=None, metadata={"variable": "KVDIST_MAX_WORKERS"})
    min_workers: int | None = field(default=None, metadata={"variable": "KVDIST_MIN_WORKERS"})
    replicas: int = field(default=0, metadata={"variable": "KVDIST_REPLICAS"})
    snapshots: str | None = field(default=None, metadata={"variable": "KVDIST_SNAPSHOTS"})
    return_s: float | None = field(default=None, metadata={"variable": "KVDIST_RETURN_S"})
    scheduler_away_s: float | None = field(default=None, metadata={"variable": "KVDIST_SCHEDULER_AWAY_S"})
    policy: TrainingPolicy | None = field(default=None, metadata={"variable": "KVDIST_POLICY"})
    restart: int = 0
    on_worker_exit: int = 0
    target: str = ""
    workers_update: bool = False
    overlaps: bool = False
    has_rounds: bool = True
    leases: bool = False
    is_launched: bool = False
    options: Mapping[str, object] = field(default_factory=dict)

    @property
    def goes_on(self) -> bool:
        """Whether the job survives the loss of a worker."""
        return self.on_loss != "fail" and self.num_servers > 0

    @property
    def waits(self) -> bool:
        """Whether the other workers wait until a lost worker is back."""
        return self.on_loss == "wait" and self.num_servers > 0

    @property
    def has_replicas(self) -> bool:
        """Whether the job survives the loss of a server, because another server has a copy of its slices."""
        return self.goes_on and self.replicas > 0

    @property
    def restarted(self) -> frozenset[Role]:
        """Roles whose processes are started again after a loss."""
        if not self.restart:
            return frozenset()
        if self.waits:
            return frozenset({Role.WORKER})
        can_return = self.snapshots is not None or self.has_replicas
        return frozenset(Role) if can_return else frozenset({Role.WORKER, Role.SCHEDULER})

    @property
    def keeps_journal(self) -> bool:
        """Whether the scheduler writes a journal, by which it goes on when the launcher starts it again."""
        return self.restart > 0 and not self.target

    @property
    def away_s(self) -> float:
        """How long the others go on without a scheduler that was lost, in seconds; 0: its loss ends the job."""
        if self.scheduler_away_s is not None:
            return self.scheduler_away_s
        return SCHEDULER_AWAY_S if self.on_loss == "continue" else 0.0

    @property
    def return_limit_s(self) -> float:
        """How long a job waits for a worker that comes back, in seconds; 0: not at all."""
        if self.return_s is not None:
            return self.return_s
        return RETURN_S if self.on_loss == "wait" else 0.0

    @property
    def most_workers(self) -> int:
        """The most workers at a time."""
        return self.max_workers or self.num_workers

    def check(self) -> None:
        """Raise a `ConfigError` for the first contradiction, in a sentence that names what the user wrote."""
        if sentence := self.refusal():
            raise ConfigError(sentence)

    def refusal(self) -> str:
        """The sentence about the first contradiction; '' without any."""
        sentence = next((rule.sentence for rule in CONTRADICTIONS if rule.holds(self)), "")
        written = {each.name: _Written(each.name, self) for each in fields(self)}
        written["excluded"] = _Written(self.excluded, self)
        if not self.is_launched:
            ending = "KVDIST_ON_LOSS is 'fail', which ends the job with the first process that is lost"
            advice = "set KVDIST_ON_LOSS=continue (kvdist-launch --on-loss continue)"
            return sentence.format(it=self, **written, ending=ending, advice=advice)
        ending = (
            f"with{' --on-loss fail' if 'on_loss' in self.options else 'out --on-loss'} the first loss ends the job"
        )
        return sentence.format(it=self, **written, ending=ending, advice="add --on-loss continue")

    @property
    def excluded(self) -> str:
        """The field that lets the others go on without a lost process although all wait for it; '' without any."""
        names = ("replicas", "snapshots", "max_workers", "min_workers", "scheduler_away_s")
        return next((name for name in names if self.on_loss == "wait" and getattr(self, name)), "")

    @property
    def is_without_rounds(self) -> bool:
        """Whether each push of a worker is a version, so that workers do not wait for each other."""
        return not self.has_rounds or isinstance(self.policy, Asynchronous)

    @property
    def sends_late(self) -> bool:
        """Whether a worker makes steps that no server has heard of when the next exchange begins."""
        steps = self.policy
        return isinstance(steps, LocalSteps) and (steps.fragments > 1 or steps.steps_until_answer > 0)


@dataclass(frozen=True)
class _Written:
    """What the user wrote to set a field: an option and its value, or a variable and its value.

    In a sentence it is ``{replicas}``; as a subject ``{replicas:which}``, as a clause ``{replicas:is}``, and without
    its value ``{replicas:name}``.
    """

    field: str
    losses: LossPolicy

    def __format__(self, how: str) -> str:
        option, name = f"--{self.field.replace('_', '-')}", f"KVDIST_{self.field.upper()}"
        if self.field in self.losses.options:
            value = self.losses.options[self.field]
            return option if how == "name" else f"{option}{' is' if how == 'is' else ''} {value}"
        clause = f"{name} is {getattr(self.losses, self.field)!r}"
        if self.field in ("on_loss", "min_workers", "snapshots") and not self.losses.is_launched:
            clause += f" (kvdist-launch {option})"
        return name if how == "name" else clause + (", which" if how == "which" else "")


class _Rule(NamedTuple):
    """A contradiction, and the sentence about it."""

    holds: Callable[[LossPolicy], object]
    sentence: str


CONTRADICTIONS: tuple[_Rule, ...] = (
    # Between a loss and how processes are started.
    _Rule(lambda it: it.on_loss != "fail" and it.target == "--launcher mpi",
          "{on_loss:which} lets a job go on without lost workers, and mpirun ends it with the first process that"
          " fails; take another way to start it"),
    _Rule(lambda it: it.replicas and it.target == "--emit kubernetes",
          "{replicas:which} lets a job go on without a lost server, and a JobSet fails with its first server that"
          " does; leave it out, or take another way to start the job"),
    _Rule(lambda it: it.on_worker_exit and it.restart,
          "--on-worker-exit restart:{it.on_worker_exit} starts the whole job again after a loss, but with"
          " --restart {it.restart} the job goes on; leave one of them out"),
    _Rule(lambda it: it.on_worker_exit and it.on_loss != "fail",
          "--on-worker-exit restart:{it.on_worker_exit} starts the whole job again after a loss, but with"
          " --on-loss {it.on_loss} the job goes on; leave one of them out"),
    _Rule(lambda it: it.restart and it.on_loss == "fail",
          "--restart {it.restart} starts lost workers again while the others go on or wait, and without --on-loss"
          " a loss ends the job: add --on-loss continue or wait, or write --on-worker-exit restart:{it.restart}"
          " to start the whole job anew"),
    _Rule(lambda it: "snapshots" in it.options and it.target,
          "{snapshots}: only kvdist-launch itself starts lost servers again, on this machine or over ssh; leave it"
          " out with {it.target}"),
    # Where all wait for lost workers, nothing goes on without lost processes.
    _Rule(lambda it: it.excluded,
          "{on_loss:which} only waits for lost workers, but {excluded:is}: leave {excluded:name} out, or {advice}"),
    _Rule(lambda it: it.on_loss == "wait" and it.return_s == 0,
          "{on_loss}, but KVDIST_RETURN_S is 0, so no process would wait: set KVDIST_RETURN_S to the seconds within"
          " which a lost worker comes back, or leave it out"),
    # Numbers of workers that no job can have, or that have no use.
    _Rule(lambda it: it.max_workers is not None and it.on_loss == "fail",
          "{max_workers}: others can join only where losses do not end the job; {advice}"),
    _Rule(lambda it: it.max_workers is not None and it.max_workers < it.num_workers,
          "{max_workers:which} is less than the {it.num_workers} workers at the start"),
    _Rule(lambda it: it.min_workers is not None and it.on_loss == "fail",
          "{min_workers}: with fewer a job waits for workers that come back, and {ending}; {advice}"),
    _Rule(lambda it: it.min_workers is not None and not 1 <= it.min_workers <= it.num_workers,
          "{min_workers}: expected 1 to {it.num_workers}, the number of workers at the start"),
    _Rule(lambda it: (it.min_workers or 0) > 1 and it.is_without_rounds,
          "{min_workers}, below which training waits, and rounds of a dist_async store wait for no worker: leave it"
          " out, or use a store such as 'dist'"),
    # Copies and snapshots of slices that have no place, or no use.
    _Rule(lambda it: "snapshots" in it.options and not (it.on_loss != "fail" and it.restart and it.num_servers),
          "{snapshots}: a job goes back to them when a server was lost and is started again; add --on-loss continue"
          " --restart N, and servers (-s N)"),
    _Rule(lambda it: it.snapshots is not None and it.on_loss == "fail",
          "{snapshots}: a job goes back to them when a server was lost and is started again, but {ending}: {advice},"
          " or leave snapshots out"),
    _Rule(lambda it: it.snapshots is not None and it.is_without_rounds,
          "{snapshots:which} cannot bring back a store without rounds, which dist_async and the policy async make:"
          " take --replicas 1 instead, which loses no push"),
    _Rule(lambda it: it.replicas not in (0, 1),
          "{replicas:is}, and only 0 or 1 are possible"),
    _Rule(lambda it: it.replicas and it.replicas >= it.num_servers,
          "{replicas:which} keeps each copy on another server, but the job has only {it.num_servers}: start two"
          " servers or more (-s 2), or leave the copies out"),
    _Rule(lambda it: it.replicas and it.snapshots is not None,
          "{replicas:is} and {snapshots:is}, and a lost server is replaced by its copy or by a snapshot, not by"
          " both: leave one of them out"),
    _Rule(lambda it: it.replicas and it.on_loss == "fail",
          "{replicas:is}, but {ending}, so that copies are of no use: {advice}"),
    # Ways of training under which a lost process would take something with it.
    _Rule(lambda it: it.on_loss != "fail" and it.workers_update,
          "{on_loss:which} needs a store that updates, because servers must hold the weights, and this Trainer's"
          " workers update (update_on_kvstore=False, clip_norm, or an optimizer that servers do not have): change"
          " that, or use fail"),
    _Rule(lambda it: it.on_loss != "fail" and it.overlaps and it.snapshots is not None,
          "overlap=True cannot go back to a snapshot (KVDIST_SNAPSHOTS) yet: make the trainer with overlap=False, or"
          " leave snapshots out"),
    _Rule(lambda it: it.on_loss == "wait" and it.sends_late,
          "{on_loss:which} promises the weights of an undisturbed run, and under the policy {it.policy} a lost"
          " worker takes steps with it that no server gives back: leave fragments and delay out, or use continue"),
    _Rule(lambda it: it.on_loss == "wait" and it.is_without_rounds,
          "{on_loss}, but workers of a store without rounds (dist_async, the policy async) do not wait for each"
          " other: use continue, or a store such as 'dist'"),
    _Rule(lambda it: it.on_loss == "wait" and it.leases,
          "{on_loss:which} makes each worker's steps again as they were, and a QueueSampler gives the examples of a"
          " lost worker to others: use a SplitSampler, or continue"),
)  # fmt: skip
"""What may not be combined, in the order in which it is told: see `_Written` for the fields in sentences."""
