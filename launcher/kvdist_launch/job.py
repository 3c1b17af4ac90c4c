"""When a job has failed, which process failed it, which processes have to end, and the summary of the job.

Pure but for `write_summary`: exits, signals and times come in, actions come out. Rules:

- The job is done when every worker has ended with exit code 0. Scheduler and servers then end by themselves; the
  launcher terminates those that do not.
- The first process that fails is the cause. The others get a grace period to notice (they raise `PeerLostError`), then
  SIGTERM, then SIGKILL. Later failures are consequences and are not named.
- A process that ends because it lost a peer is a consequence even if it was seen first (a failing worker reports to
  the scheduler before its process has ended): it is the cause only if nothing else failed. For a scheduler or server
  it is not a failure at all once every worker has succeeded.
- A server that ends with 0 while workers run is right if the scheduler also ends with 0 (every worker has sent
  its goodbye). Otherwise that server is the cause.
- Without servers the launcher tells no process of a failure: ranks tell each other through their operations, and the
  others are terminated after the grace.
- Where a job goes on without lost workers (``--on-loss continue``), a failing worker is reported and recorded, while
  others run or a worker has finished. If the scheduler ends the job all the same, the last such failure is the cause.
- In such a job a scheduler or server that is killed when every worker has ended with 0 fails nothing, and is not
  started again.
- Where single processes are started again (``--restart N``), `Restarts` decides whether and when. Each start is a
  new life, and the end of an earlier life changes nothing. Once the job fails, is interrupted, or was dissolved by the
  scheduler, nothing is started any more.
- A process that a signal has stopped for 3 s, or a third of the patience, is reported in every phase. If the others
  lose it because it was silent, the closing line says that. Reported after 10 s are workers for whose end the job
  waits: when all have left the cluster, or have sent goodbye and are awaited by the others (``--on-loss wait``), or in
  a job without servers when others have finished. They may have other work, and are left alone; but if each of them is
  stopped, or has ended but for threads, they are killed after the grace.
- Where all workers wait for each other, that deadlock is the cause, whichever process is seen to end first.
- If other processes still run half a second after a failure, the launcher reports the failure and how long the job
  waits.
- The closing lines are a paragraph: the last lines of the cause, if the user has not just seen them; how often which
  process was started, and how the others ended, if not for the loss of another process; and last the cause,
  or that all workers ended by the same error, the error, and what to do if the error does not name that.
- A first interruption sends SIGINT to the workers; servers live on so that workers can still save. Processes that
  still run after the grace are terminated. A second interruption kills.

A summary (``--json-summary``) is a JSON object:

- ``version``: kvdist's; ``exit_code``: the launcher's.
- ``duration_s``: from the launcher's start to the last process's end.
- ``outcome``: ``finished``, ``failed``, ``interrupted``, or ``not started`` if something was wrong before any start.
- ``sentence``: the closing sentence for people.
- ``first_failure``: null, or the cause: ``node`` (``worker-3``), ``role``, ``rank``, ``host`` (empty on a single
  machine), ``pid``, ``exit_code`` or ``signal``, ``after_s`` since its start, ``last_lines`` (both outputs).
- ``processes``: an entry for each start, also of earlier attempts and lives: ``node``, ``host``, ``pid``,
  ``restarts`` (how often it had been started before), ``exit_code`` or ``signal``, ``started_s`` and ``ended_s`` since
  the launcher's start. A process of a lost host has ``lost``, a sentence, in the place of the code.
"""

from __future__ import annotations

import contextlib
import enum
import os
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvdist.config.losses import LossPolicy
from kvdist.config.settings import Limits
from kvdist.errors import INCOMPLETE, UNHANDLED
from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist.version import __version__
from kvdist_launch.exits import CLAUSE_MAX, SIGNAL_BASE, ProcessExit, process_name, signal_name
from kvdist_launch.output import shortened

if TYPE_CHECKING:
    from kvdist_launch.restarts import Restarts

TIMES_MAX = 4
"""Ends of a process by the same signal or code, of which each is listed with its time."""

REPEAT_S = 0.25
"""Signals within this time are a single request: `timeout`, hang-ups and wrappers that forward signals send two."""

CRASHES = frozenset({signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL, signal.SIGFPE})
"""Signals by which a mistake in compiled code ends a process."""

STILL_S = 10.0
"""How long a process may keep a job from ending before it is reported."""

NOTICE_S = 0.5
"""How long other processes may still run after a failure before the launcher reports it."""

STOPPED_S_MAX = 3.0
"""How long a signal may have stopped a process before it is reported."""

WITHOUT_COPY = (
    "no other process has its weights. --replicas 1 would keep a copy, or --snapshots DIR with --restart N a snapshot"
    " (not of a dist_async store)"
)
"""What to do about a lost server where the others would continue; workers have printed more."""

INDENT = "    "


@dataclass(frozen=True)
class GracePeriods:
    """How long the launcher waits before the next, harder step, in seconds.

    Attributes:
        grace_s: time for the other processes to end by themselves after a failure or an interruption.
        farewell_s: time for scheduler and servers to end after the last worker has ended.
        terminate_s: time between SIGTERM and SIGKILL.
        patience_s: silence of a process after which the others evict it.
    """

    grace_s: float = 5.0
    farewell_s: float = 5.0
    terminate_s: float = 2.0
    patience_s: float = Limits.patience_s

    @property
    def stopped_s(self) -> float:
        """How long a signal may have stopped a process before the user reads it, who can let it go on in time."""
        return min(STOPPED_S_MAX, self.patience_s / 3)


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send `number` to the process group of `node`."""

    node: NodeId
    number: int


@dataclass(frozen=True, slots=True)
class Say:
    """Print a message for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Restart:
    """Restart `node`; `life` is the number of this start, counted from 1 for the first restart."""

    node: NodeId
    life: int


Action = SendSignal | Say | Restart


@dataclass
class ProcessRecord:
    """A process from its start to its end, in seconds since the launcher's start.

    Attributes:
        host: where it runs; empty on a single machine.
        exit: how it ended; None while it runs.
        was_signalled: whether the launcher sent it a signal.
    """

    node: NodeId
    host: str
    started_s: float
    ended_s: float = 0.0
    exit: ProcessExit | None = None
    was_signalled: bool = False


class Phase(enum.Enum):
    """Phases of a job; each phase with a deadline leads to TERMINATING, and that to KILLING."""

    RUNNING = enum.auto()
    CLOSING = enum.auto()
    FAILING = enum.auto()
    INTERRUPTED = enum.auto()
    TERMINATING = enum.auto()
    KILLING = enum.auto()


class Job:
    """The state of an attempt at a job. Times are seconds of a monotonic clock.

    Args:
        nodes: all processes.
        now: the start of this attempt.
        grace: how long to wait for processes to end.
        launched: the start of the launcher; None is `now`.
        losses: what follows when a process is lost.

    Attributes:
        cause: the exit that failed the job; None without a cause.
        records: every process that was started.
        killed: the workers that were killed because nothing but their end kept the job from ending.
        sentence: how the attempt ended; empty until `conclude`.
        last_lines: the last lines of the process that failed the job; see `conclude`.
    """

    def __init__(
        self,
        nodes: Sequence[NodeId],
        now: float,
        grace: GracePeriods | None = None,
        launched: float | None = None,
        losses: LossPolicy | None = None,
    ) -> None:
        self._policy = losses or LossPolicy()
        self._grace = GracePeriods() if grace is None else grace
        self._losses: list[tuple[ProcessExit, float]] = []
        """The failures after which the others continued, and their times."""
        self._restarts: Restarts | None = None
        if self._policy.restart:
            # Imported here because few ask for it, and every job would wait for it.
            from kvdist_launch.restarts import Restarts

            self._restarts = Restarts(self._policy.restart, self._policy.restarted)
        self._due: dict[NodeId, float] = {}
        """Processes to restart → time of the restart."""
        self._lives: Counter[NodeId] = Counter()
        """Number of restarts by process."""
        self._joined: dict[NodeId, int] = {}
        """Restarted process → the last life in which it joined the cluster."""
        self._at_work: dict[NodeId, int] = {}
        """Process → the last life in which it was at work."""
        self._leaving: dict[NodeId, int] = {}
        """The life of each in which it sent goodbye, while the others wait for how it ends."""
        self._late: list[NodeId] = []
        """Restarted workers that had not rejoined when the other workers finished."""
        self._is_dissolved = False
        self._why = ""
        """Explanation appended to the cause, after a semicolon."""
        self._began = now
        self._nodes = list(nodes)
        self._alive = list(nodes)
        self._phase = Phase.RUNNING
        self._early_server: tuple[ProcessExit, float] | None = None
        self._interruption: int | None = None
        self._interrupted_at = now
        self._cause_at = now
        self._pids: dict[NodeId, int] = {}
        self._has_finished = False
        """Whether a worker has ended with 0."""
        self._still: dict[NodeId, float] = {}
        """Idle process (stopped by a signal, or ended except for threads) → time since when."""
        self._stopped: dict[NodeId, int] = {}
        """Idle process that a signal has stopped → id of the stopped process: itself or the child that it waits for."""
        self._lost_peer = ""
        """The peer that the job lost or awaited and why, if the process that ended first is not the cause of that."""
        self._untold: dict[NodeId, str] = {}
        """The report about those, which is due after `STILL_S`."""
        self._changed_at = now
        """Time when a process last ended or a process last became idle or active."""
        self._is_end_told = False
        self._kill_at: float | None = None
        """When to kill the idle processes that alone keep the job from ending."""
        self.killed: list[NodeId] = []
        self.launched = now if launched is None else launched
        self.cause: ProcessExit | None = None
        self._phase_until: float | None = None
        """The end of the phase."""
        self._notice: tuple[float, str] | None = None
        """When the launcher reports why the job fails, if other processes still run, and the sentence."""
        self.records: list[ProcessRecord] = []
        self.sentence = ""
        self.last_lines: list[str] = []

    @property
    def deadline(self) -> float | None:
        """When `tick` must be called next; None if only an event can change anything."""
        told = (self._still[node] + self._grace.stopped_s for node in self._untold)
        noticed = self._notice[0] if self._notice and not self.is_over else None
        times = (self._phase_until, *self._due.values(), *told, self._end_told_at(), self._kill_at, noticed)
        return min((at for at in times if at is not None), default=None)

    @property
    def is_over(self) -> bool:
        """Whether every process has ended and none awaits a restart."""
        return not self._alive and not self._due

    @property
    def is_interrupted(self) -> bool:
        """Whether the user or the system has interrupted the job."""
        return self._interruption is not None

    def started(self, processes: Iterable[tuple[NodeId, str]], now: float) -> None:
        """Record processes that were started, each with its host (empty on a single machine)."""
        self.records += [ProcessRecord(node, host, now - self.launched) for node, host in processes]

    def placed(self, pids: Iterable[tuple[NodeId, int]]) -> None:
        """Record the process ids of processes."""
        self._pids.update(pids)

    def stopped(self, node: NodeId, pid: int, now: float) -> None:
        """A signal has stopped a process, or the process of this process id that it waits for; 0: it goes on."""
        if node in self._alive:
            self._forget_still(node, now)
            if pid:
                self._still[node] = now
                self._stopped[node] = pid
                self._untold[node] = (
                    f"has been stopped by a signal for {self._grace.stopped_s:.2g} s; kill -CONT {pid} lets it go on"
                )

    def lingers(self, node: NodeId, now: float) -> None:
        """A worker reports that it has ended but for threads, for as long as `STILL_S`."""
        if node in self._alive:
            self._forget_still(node, now)
            self._still[node] = now - STILL_S

    def _forget_still(self, node: NodeId, now: float) -> None:
        self._still.pop(node, None)
        self._stopped.pop(node, None)
        self._untold.pop(node, None)
        self._changed_at, self._is_end_told, self._kill_at = now, False, None

    def ended(self, exits: Iterable[ProcessExit], now: float) -> list[Action]:
        """Take note of processes that ended; those of the same call count as having ended at the same moment."""
        batch = sorted((one for one in exits if one.life >= self._lives[one.node]), key=lambda one: one.doubt)
        for one in batch:
            self._alive.remove(one.node)
            self._forget_still(one.node, now)
            self._has_finished |= one.node.role is Role.WORKER and not one.is_failure
            for record in self._running(one.node):
                record.exit, record.ended_s = one, now - self.launched
        told = [action for one in batch for action in self._judge(one, now)]
        if self._phase in (Phase.RUNNING, Phase.CLOSING) and self.cause is not None:
            self._fail(now)
            return []
        return [*told, *self._go_on(now)]

    def _go_on(self, now: float) -> list[Action]:
        """Proceed after exits that did not fail the job: end the rest once the last worker has ended."""
        if self._phase is Phase.RUNNING and not self._is_worked_on():
            self._early_server = None
            self._enter(Phase.CLOSING, now + self._grace.farewell_s)
        elif self._phase is Phase.INTERRUPTED and not self._workers_alive():
            return self._terminate(now)
        return []

    def joined(self, node: NodeId, life: int) -> None:
        """Record that a restarted process has joined the cluster."""
        self._joined[node] = life

    def at_work(self, node: NodeId, life: int) -> None:
        """A worker has completed a step in this life, or a server has joined; so is the scheduler that reports it."""
        self._at_work |= {node: life, SCHEDULER: self._lives[SCHEDULER]}

    def leaves(self, node: NodeId, life: int, now: float) -> None:
        """A worker sends goodbye at its end, and all wait for the exit code of this life."""
        self._leaving[node], self._changed_at, self._is_end_told = life, now, False

    def given_up(self, node: NodeId, life: int) -> list[Action]:
        """The others go on without a process that may still exist, stopped or cut off: it must not go on either."""
        if self._phase is not Phase.RUNNING or node not in self._alive or self._lives[node] != life:
            return []
        why = "wait for one in its place" if self._policy.waits else "go on without it"
        text = f"{node} has been given up, and its process is ended, as the others {why}"
        return [Say(text), SendSignal(node, signal.SIGKILL)]

    def interrupt(self, number: int, now: float) -> list[Action]:
        """The launcher got the signal `number`: ask the workers to end; a second time, kill everything."""
        if self.is_over and self.cause is None:
            return []  # it has its outcome
        if self._interruption is not None:
            return self._kill(now) if now - self._interrupted_at >= REPEAT_S else []
        self._interruption, self._interrupted_at = number, now
        if self._phase in (Phase.TERMINATING, Phase.KILLING):
            return self._kill(now)
        if self._phase is not Phase.RUNNING or not self._workers_alive():
            return self._terminate(now)
        self._enter(Phase.INTERRUPTED, now + self._grace.grace_s)
        text = f"{signal_name(number)}: asking the workers to end; a second one kills everything at once"
        return [Say(text), *self._signal_all(signal.SIGINT, self._workers_alive())]

    def tick(self, now: float) -> list[Action]:
        """Take the actions that are due at `now`."""
        again = self._start_due(now) + self._tell_still(now) + self._await_end(now) + self._tell_failure(now)
        if self._phase_until is None or now < self._phase_until:
            return again
        if self._phase is Phase.KILLING:
            self._enter(Phase.KILLING, None)
            return [Say(f"{self._names(self._alive)} did not end within {STILL_S:g} s of SIGKILL; the system keeps it")]
        if self._phase is Phase.TERMINATING:
            return self._kill(now)
        if self._phase is Phase.RUNNING and self._early_server is not None:
            self._blame(*self._early_server)
            return self._terminate(now)
        return self._overdue() + self._terminate(now)

    def _start_due(self, now: float) -> list[Action]:
        nodes = [node for node, at in self._due.items() if at <= now]
        for node in nodes:
            del self._due[node]
        self._alive += nodes
        self._lives.update(nodes)
        self.killed = [node for node in self.killed if node not in nodes]
        return [Restart(node, self._lives[node]) for node in nodes]

    def _tell_still(self, now: float) -> list[Action]:
        due = [node for node in self._untold if self._still[node] + self._grace.stopped_s <= now]
        return [Say(f"{self._names([node])} {self._untold.pop(node)}") for node in due]

    def _tell_failure(self, now: float) -> list[Action]:
        if self._notice is None or now < self._notice[0]:
            return []
        (_, text), self._notice = self._notice, None
        return [Say(text)]

    def _awaited(self) -> list[NodeId]:
        """Workers whose end the job waits for: all have left the cluster, or without a scheduler others have
        finished."""
        if self._phase is not Phase.RUNNING or self._due:
            return []
        alive = self._workers_alive()
        has_left = all(self._leaving.get(node) == self._lives[node] for node in alive)
        return alive if has_left or self._is_dissolved or (self._has_finished and SCHEDULER not in self._nodes) else []

    def _end_told_at(self) -> float | None:
        """When to report for whose end the job waits; None after the report, or if they still take part in it."""
        awaited = self._awaited()
        if not awaited or self._is_end_told:
            return None
        if all(node in self._still for node in awaited):
            return max(self._still[node] for node in awaited) + STILL_S
        return self._changed_at + STILL_S

    def _await_end(self, now: float) -> list[Action]:
        """Report which workers the job waits for, and kill those that will not end by themselves."""
        awaited, told_at = self._awaited(), self._end_told_at()
        if told_at is not None and told_at <= now:
            self._is_end_told = True
            text = f"the job waits for the end of {self._names(awaited)}"
            if all(node in self._still for node in awaited):
                self._kill_at = now + self._grace.grace_s
                text += f", and kills {'it' if len(awaited) == 1 else 'them'} in {self._grace.grace_s:g} s"
            return [Say(text)]
        if self._kill_at is None or now < self._kill_at:
            return []
        self._kill_at, self.killed = None, awaited
        return [SendSignal(node, signal.SIGKILL) for node in awaited]

    def _names(self, nodes: Iterable[NodeId]) -> str:
        hosts = {record.node: record.host for record in self.records}
        return ", ".join(process_name(node, self._pids.get(node, 0), hosts.get(node, "")) for node in nodes)

    def exit_code(self) -> int:
        """The launcher's exit code, once the job is over."""
        if self.cause is not None:
            return self.cause.exit_code or 1
        return 0 if self._interruption is None else SIGNAL_BASE + self._interruption

    def conclude(self, now: float, last_lines: Sequence[str] = (), is_on_screen: bool = False) -> list[str]:
        """Close the records. Returns the closing lines, the sentence that names the cause last.

        Args:
            now: when the last process ended.
            last_lines: the last lines printed by the process that failed the job.
            is_on_screen: whether the user has just seen them.
        """
        self.sentence, self.last_lines = self._closing_sentence(now), list(last_lines)
        facts = self._lives_told()
        shown: list[str] = []
        if self.cause is not None:
            facts += filter(None, [self._fates_of_others()])
            if last_lines and not (is_on_screen or self._deadlock or self._lost_peer):
                shown = [f"the last lines of {self.cause.node}:", *(INDENT + line for line in last_lines)]
        return [*shown, *([". ".join(facts)] if facts else []), self.sentence]

    def record_of_cause(self, cause: ProcessExit) -> ProcessRecord:
        """The record of the process that failed the job."""
        return next((one for one in self.records if one.exit is cause), ProcessRecord(cause.node, cause.host, 0.0))

    def _closing_sentence(self, now: float) -> str:
        if self.cause is not None:
            after = f"after {_seconds(self._cause_at - self._began)}"
            if self._lost_peer:
                return f"job ended with exit code {self.exit_code()} {after}: {self._lost_peer}"
            everyone = self._everyone
            failed = f"{everyone} failed with exit code {self.cause.status}" if everyone else str(self.cause)
            what = f"{'deadlock' if self._deadlock else failed} {after}{self._why}"
        elif self._interruption is not None:
            what = f"interrupted by {signal_name(self._interruption)} after {_seconds(now - self._began)}"
        else:
            lost = [one for one in self._last_exits() if any(one is loss for loss, _ in self._losses)]
            gone = {*self._late, *(one.node for one in lost)}
            nodes = [node for node in self._nodes if node != SCHEDULER and node not in gone]
            counts: Counter[Role] = Counter(node.role for node in nodes)
            ways = ", ".join(map(str, lost))
            return f"{_counted(counts)} finished in {_seconds(now - self._began)}" + (f"; {ways}" if ways else "")
        return f"{what}; job ended with exit code {self.exit_code()}{self._explanation()}"

    @property
    def _deadlock(self) -> str:
        """The workers that wait for each other, as a text, if the job ended by a deadlock; else empty."""
        ends = [] if self.cause is None else [self.cause, *self._last_exits()]
        return next((one.deadlock for one in ends if one.deadlock), "")

    def _explanation(self) -> str:
        """Explanation and advice that follow the exit code in the closing sentence."""
        if self.cause is None:
            return ""
        if self._deadlock:
            return f": {self._deadlock}"
        error = self.cause.error
        if error and error not in self._why:
            alike, total = self._alike()
            return f": {error}" + (f" (on {alike} of {total} workers)" if 1 < alike < total else "")
        if self.cause.status > 0 and not (error or self._why):
            return self.cause.last_words
        cure = "" if error or self._why else self._cure(self.cause)
        return f"; {cure}" if cure else ""

    @property
    def _everyone(self) -> str:
        """``all 3 workers``, if all of several workers ended by the error of the cause; else empty."""
        alike, total = self._alike()
        if alike < total or total < 2 or (self.cause and self.cause.error in self._why):
            return ""
        return "both workers" if total == 2 else f"all {total} workers"

    def _alike(self) -> tuple[int, int]:
        """How many workers ended by the error of the cause, and the number of workers."""
        alike = [one for one in self._last_exits() if self._is_same(one) and one.node.role is Role.WORKER]
        return len(alike), sum(node.role is Role.WORKER for node in self._nodes)

    def _is_same(self, other: ProcessExit) -> bool:
        """Whether a process ended by the same error as the process that failed the job."""
        return self.cause is not None and bool(self.cause.error) and other.error == self.cause.error

    def _cure(self, cause: ProcessExit) -> str:
        """Advice about a process that cannot explain its end itself; empty where only its program could."""
        if cause.status >= 0 and not cause.lost:
            return ""
        hints = []
        if cause.status == -signal.SIGKILL and not cause.lost:
            hints.append("if nobody sent that signal, the kernel may have, because memory ran out: see dmesg")
        elif -cause.status in CRASHES and not cause.lost:
            hints.append("-x PYTHONFAULTHANDLER=1 shows the line where it crashed")
        if SCHEDULER not in self._nodes:
            hints.append("--on-worker-exit restart:N starts the job again, from a checkpoint that the script loads")
        elif cause.node.role is Role.SERVER:
            with_copy = "--on-loss continue --replicas 1 lets another server go on with a copy of the weights"
            keeps = self._policy.has_replicas or Role.SERVER in self._policy.restarted
            hints += [] if keeps else [WITHOUT_COPY if self._policy.on_loss == "continue" else with_copy]
        elif not self._policy.goes_on:
            hints.append("--on-loss continue --restart N lets the others go on, and starts it again")
        return "; ".join(hints)

    def _fates_of_others(self) -> str:
        """How the processes ended that did not end by the error of the cause, a clause for each way."""
        fates: dict[str, Counter[Role]] = {}
        last = self._last_exits()
        for record in self.records:
            how = record.exit
            if how is None or how is self.cause or how.deadlock or self._is_same(how):
                continue
            if how.is_consequence and not record.was_signalled:
                continue  # it ended as every process does that loses another one
            if any(how is one for one in last):
                fates.setdefault(_fate(record, how), Counter())[record.node.role] += 1
        return "; ".join(_clause(fate, counts) for fate, counts in fates.items())

    def _last_exits(self) -> list[ProcessExit]:
        """How each process ended the last time."""
        return list({record.node: record.exit for record in self.records if record.exit is not None}.values())

    def _lives_told(self) -> list[str]:
        """A sentence for each restarted process: how often it was started, and how it ended each time."""
        ends: dict[NodeId, list[tuple[str, float]]] = {}
        since_s = self._began - self.launched
        for record in self.records:
            if record.exit is not None and record.exit.is_failure and not record.was_signalled:
                ends.setdefault(record.node, []).append((record.exit.way, record.ended_s - since_s))
        names = {node: "the scheduler" if node == SCHEDULER else str(node) for node in self._lives}
        lines = {node: f"{names[node]} was started {1 + starts} times" for node, starts in self._lives.items()}
        return [f"{line}; it {_ways(ends[node])}" for node, line in lines.items()]

    def _judge(self, one: ProcessExit, now: float) -> list[Action]:
        """Decide whether this exit, the next in order of time, failed the job. Returns the actions if it did not."""
        if self._phase not in (Phase.RUNNING, Phase.CLOSING, Phase.FAILING):
            return []
        if one.is_failure and one.node not in self._late:
            told = self._survive(one, now)
            if told is None:
                self._accuse(one, now)
            return told or []
        if self._phase is Phase.RUNNING and one.node == SCHEDULER:
            # It ends with 0 only if the cluster was dissolved in order, servers included.
            self._early_server, self._phase_until = None, None
            return self._dissolve()
        if self._phase is Phase.RUNNING and one.node.role is Role.SERVER:
            self._suspect(one, now)
        return []

    def _dissolve(self) -> list[Action]:
        """Kill restarted workers that have not rejoined: the others have finished, and they would wait for long."""
        self._is_dissolved = True
        self._late = [one for one in self._workers_alive() if self._joined.get(one, 0) != self._lives[one]]
        told: list[Action] = [Say(f"{one} is not started again: the others have finished") for one in self._due]
        told += [Say(f"{one} is ended, as the others have finished before it had joined them") for one in self._late]
        self._due.clear()
        return told + self._signal_all(signal.SIGKILL, self._late)

    def _survive(self, one: ProcessExit, now: float) -> list[Action] | None:
        """Let the others go on after a failure, if they can. Returns the actions; None if the failure ends the job."""
        if self.cause is not None:
            self._note_repeated(one)
            return None
        was_killed = one.node.role is not Role.WORKER and (one.status < 0 or bool(one.lost))
        if was_killed and self._policy.goes_on and self._is_done():
            self._losses.append((one, now))
            return [Say(f"{one}; it is not started again, as all workers have finished")]
        if self._phase is not Phase.RUNNING:
            return None
        verdict = None
        if self._restarts and not self._is_dissolved:
            verdict = self._restarts.judge(one, self._lived_s(one), self._at_work.get(one.node) == one.life)
        if verdict is not None and verdict.ends_job:
            self._why = f"; {verdict.text}"
            return None
        if verdict is not None and verdict.delay_s is not None:
            self._due[one.node] = now + verdict.delay_s
        elif not self._is_survived(one):
            return None
        self._losses.append((one, now))
        if one.node in self._due:
            return [Say(f"{one}; {verdict.text if verdict else ''}")]
        why = f"; {verdict.text}" if verdict else ""
        workers = "the other workers wait for it" if self._policy.waits else "the other workers go on"
        others = workers if one.node.role is Role.WORKER else "the others go on if one has a copy of all that it had"
        return [] if one.is_consequence and not why else [Say(f"{one}{why}; {others}")]

    def _note_repeated(self, one: ProcessExit) -> None:
        """Explain in the closing line that an error came twice, also where its consequences were seen first."""
        if self._restarts and not (self._why or one.is_consequence) and self._phase is Phase.FAILING:
            verdict = self._restarts.judge(one, self._lived_s(one))
            self._why = f"; {verdict.text}" if verdict is not None and verdict.ends_job else ""

    def _lived_s(self, one: ProcessExit) -> float:
        return next((record.ended_s - record.started_s for record in self.records if record.exit is one), 0.0)

    def _is_survived(self, one: ProcessExit) -> bool:
        """Whether the others go on without this process."""
        if one.node.role is Role.SERVER:
            return self._policy.has_replicas and self._is_worked_on()
        if not self._policy.goes_on or one.node.role is not Role.WORKER:
            return False
        ends = [record.exit for record in self.records if record.node.role is Role.WORKER]
        return self._is_worked_on() or any(end is not None and not end.is_failure for end in ends)

    def _accuse(self, one: ProcessExit, now: float) -> None:
        losses = [loss for loss in self._losses if loss[0].node not in self._alive]
        if one.is_consequence and self.cause is None and losses:
            # Only the scheduler knows that the job cannot go on; it says so to everybody.
            own = [loss for loss in losses if not loss[0].is_consequence]
            self._blame(*(own or losses)[-1])
            self._why = f"; {INCOMPLETE}" if one.lost_peer.endswith(INCOMPLETE) else ""
            return
        is_needed = one.node.role is Role.WORKER or self._is_worked_on()
        if one.is_consequence and self.cause is None and not is_needed:
            return
        if self.cause is None and self._early_server is not None and one.is_consequence:
            self._blame(*self._early_server)
        elif self.cause is None or (self.cause.is_consequence and not one.is_consequence):
            self._blame(one, now)

    def _suspect(self, one: ProcessExit, now: float) -> None:
        if self._early_server is None and self._is_worked_on() and SCHEDULER in self._alive:
            self._early_server, self._phase_until = (one, now), now + self._grace.grace_s

    def _blame(self, one: ProcessExit, at: float) -> None:
        self.cause, self._cause_at, self._lost_peer = one, at, self._loss_behind(one)
        if one.node in self.killed:
            self._why = "; the job had waited for nothing but its end"

    def _loss_behind(self, one: ProcessExit) -> str:
        """Which process this process lost or awaited, and why: the scheduler does not see that a silent process is
        stopped."""
        for node, pid in self._stopped.items():
            if one.lost_peer.startswith(f"{node} (") and UNHANDLED not in one.lost_peer:
                return (
                    f"{self._names([node])} was stopped by a signal and silent for longer than"
                    f" {self._grace.patience_s:g} s (KVDIST_PATIENCE_S); kill -CONT {pid} in time lets it go on"
                )
        return one.lost_peer or one.gave_up

    def _fail(self, now: float) -> None:
        self._enter(Phase.FAILING, now + self._grace.grace_s)
        named = "a deadlock" if self.cause is not None and self.cause.deadlock else self.cause
        what = shortened(self._lost_peer, CLAUSE_MAX) or named
        text = f"{what}{self._why}; waiting up to {self._grace.grace_s:g} s for the other processes to exit"
        self._notice = (now + NOTICE_S, text)

    def _enter(self, phase: Phase, until: float | None) -> None:
        self._phase, self._phase_until, self._notice = phase, until, None
        self._due.clear()

    def _overdue(self) -> list[Action]:
        """Name the processes that keep the job from ending."""
        if self._phase is Phase.CLOSING:
            late, waited_s, since = self._alive, self._grace.farewell_s, "the last worker's end"
        elif self._phase is Phase.INTERRUPTED:
            late, waited_s, since = self._workers_alive(), self._grace.grace_s, "the interruption"
        else:
            return []
        names = ", ".join(map(str, late))
        return [Say(f"{names} did not end within {waited_s:g} s of {since}; terminating")]

    def _terminate(self, now: float) -> list[Action]:
        self._enter(Phase.TERMINATING, now + self._grace.terminate_s)
        return self._signal_all(signal.SIGTERM, self._alive)

    def _kill(self, now: float) -> list[Action]:
        self._enter(Phase.KILLING, now + STILL_S)
        return self._signal_all(signal.SIGKILL, self._alive)

    def _signal_all(self, number: int, nodes: Iterable[NodeId]) -> list[Action]:
        nodes = list(nodes)
        for record in (record for node in nodes for record in self._running(node)):
            record.was_signalled = True
        return [SendSignal(node, number) for node in nodes]

    def _running(self, node: NodeId) -> list[ProcessRecord]:
        return [record for record in self.records if record.node == node and record.exit is None]

    def _workers_alive(self) -> list[NodeId]:
        return [node for node in self._alive if node.role is Role.WORKER]

    def _is_done(self) -> bool:
        """Whether all workers have finished, except those that the job goes on without."""
        last = {one.node: one.exit for one in self.records if one.node.role is Role.WORKER}
        return self._phase is Phase.CLOSING or all(how is not None and not how.is_failure for how in last.values())

    def _is_worked_on(self) -> bool:
        """Whether workers run, or will run."""
        return any(node.role is Role.WORKER for node in (*self._alive, *self._due))


def _ways(ends: Sequence[tuple[str, float]]) -> str:
    """How a process ended several times, each end with its time; equal ends are joined."""
    times: dict[str, list[float]] = {}
    for way, at_s in ends:
        times.setdefault(way, []).append(at_s)
    parts = []
    for way, found in times.items():
        listed = [f"{at_s:.1f}" for at_s in found]
        after = _joined(listed) if len(found) <= TIMES_MAX else listed[-1]
        parts.append(f"{way}{f' {len(found)} times, the last time' if len(found) > TIMES_MAX else ''} after {after} s")
    return ", ".join(parts)


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.1f} s"


def _fate(record: ProcessRecord, how: ProcessExit) -> str:
    """How a process ended, as a predicate that follows its name."""
    if how.lost:
        return "was lost with its host"
    if not how.is_failure:
        return "finished"
    if record.was_signalled:
        return "was ended by the launcher"
    return f"was killed by {signal_name(-how.status)}" if how.status < 0 else f"failed with exit code {how.status}"


def _clause(fate: str, counts: Counter[Role]) -> str:
    if counts.total() > 1:
        fate = fate.replace("was ", "were ").replace("its host", "their hosts")
    return f"{_counted(counts)} {fate}"


def _counted(counts: Counter[Role]) -> str:
    """``2 workers, 1 server and the scheduler``."""
    parts = [
        "the scheduler" if role is Role.SCHEDULER else f"{counts[role]} {role}{'s' if counts[role] > 1 else ''}"
        for role in (Role.WORKER, Role.SERVER, Role.SCHEDULER)
        if counts[role]
    ]
    return _joined(parts)


def _joined(parts: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join(filter(None, [", ".join(parts[:-1]), parts[-1]]))


def summary(jobs: Sequence[Job], exit_code: int, now: float, reason: str = "") -> dict[str, Any]:
    """The object that ``--json-summary`` writes; see the module.

    Args:
        jobs: every attempt, in order.
        exit_code: the launcher's.
        now: when the last process ended.
        reason: why the job, or part of it, was not started; empty if all of it was.
    """
    records = [record for job in jobs for record in job.records]
    concluded = last_concluded(jobs)
    # If one host could not start its part, others may have.
    outcome = (
        "finished" if exit_code == 0
        else "not started" if reason and not records
        else "interrupted" if concluded.cause is None and not reason
        else "failed"
    )  # fmt: skip
    return {
        "version": __version__,
        "exit_code": exit_code,
        "duration_s": round(now - jobs[0].launched, 3),
        "outcome": outcome,
        "sentence": reason or concluded.sentence,
        "first_failure": _first_failure(concluded),
        "processes": [_record_fields(one, one.exit) for one in records if one.exit is not None],
    }


def last_concluded(jobs: Sequence[Job]) -> Job:
    """The last attempt that came to an end, or else the last attempt."""
    return next((job for job in reversed(jobs) if job.sentence), jobs[-1])


def _first_failure(job: Job) -> dict[str, Any] | None:
    if job.cause is None or not job.sentence:
        return None
    record = job.record_of_cause(job.cause)
    return {
        "node": str(record.node),
        "role": str(record.node.role),
        "rank": record.node.rank,
        "host": record.host,
        **_exit_fields(job.cause),
        "after_s": round(record.ended_s - record.started_s, 3),
        "last_lines": job.last_lines,
    }


def _record_fields(record: ProcessRecord, how: ProcessExit) -> dict[str, Any]:
    times = {"started_s": round(record.started_s, 3), "ended_s": round(record.ended_s, 3)}
    return {"node": str(record.node), "host": record.host, **_exit_fields(how), **times}


def _exit_fields(how: ProcessExit) -> dict[str, Any]:
    of_process = {"pid": how.pid, "restarts": how.life}
    if how.lost:
        return {**of_process, "lost": how.lost}
    return {**of_process, **({"signal": -how.status} if how.status < 0 else {"exit_code": how.status})}


def write_summary(path: Path, fields: dict[str, Any]) -> None:
    """Write a summary atomically: a reader of the file finds all of it, or nothing.

    Args:
        path: the file. A link is followed; a pipe or device is written to.
        fields: the result of `summary`.

    Raises:
        OSError: it cannot be written.
    """
    # Imported here because few ask for it, and every job would wait for it.
    import json

    text = json.dumps(fields, indent=2) + "\n"
    if path.exists() and not path.is_file():
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def remove_summary(path: Path) -> None:
    """Remove the summary of an earlier job, if it is a file, so that it is not mistaken for this job's."""
    with contextlib.suppress(OSError):
        if path.is_file():
            path.resolve().unlink()
