"""When a job has failed, which process failed it, which processes are told to end, and the summary of the job.

Pure but for `write_summary`: exits, signals and times come in, actions come out. Rules:

- The job is done when every worker has ended with 0. Scheduler and servers then end by themselves, or are ended.
- The first process that fails is the cause. The others get a grace to notice (they raise `PeerLostError`), then
  SIGTERM, then SIGKILL. Later failures are consequences and are not named.
- A process that ends because it lost a peer is a consequence even if it was seen first (a failing worker reports to the
  scheduler before its process has ended): it is the cause only if nothing else failed. For a scheduler or server it is
  not a failure at all once every worker has succeeded.
- A server that ends with 0 while workers run is right when the scheduler also ends with 0 (all workers have said
  goodbye). Otherwise that server is the cause.
- Without servers the launcher tells nobody of a failure: ranks tell each other through their operations, and the others
  are terminated after the grace.
- A first interruption sends SIGINT to the workers; servers live on so that workers can still save. What is left after
  the grace is terminated. A second interruption kills.

A summary is one JSON object:

- ``version``: kvdist's; ``exit_code``: the launcher's.
- ``duration_s``: from the launcher's start to the last process's end.
- ``outcome``: ``finished``, ``failed``, ``interrupted``, or ``not started`` if something was wrong before any start.
- ``sentence``: the closing sentence for people.
- ``first_failure``: null, or the cause: ``node`` (``worker-3``), ``role``, ``rank``, ``host`` (empty if there is only
  one machine), ``pid``, ``exit_code`` or ``signal``, ``after_s`` since its own start, ``last_lines`` (both outputs).
- ``processes``: one for each that was started, those of earlier attempts too: ``node``, ``host``, ``pid``,
  ``exit_code`` or ``signal``, ``started_s`` and ``ended_s`` since the job's start. For a process of a lost host,
  ``lost`` is a sentence in the place of the code.
"""

from __future__ import annotations

import contextlib
import enum
import os
import re
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdist.config.exit_codes import EXIT_PEER_LOST
from kvdist.errors import PeerLostError, RankLostError
from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist.version import __version__

PEER_LOST_TRACEBACK = re.compile(
    rb"(?:\[rank[0-9]+\]: )?(?:%s):"
    % b"|".join(f"{one.__module__}.{one.__qualname__}".encode() for one in (PeerLostError, RankLostError))
)
"""How the last line of a traceback begins when a worker did not catch the error; torch.distributed puts the rank before
it. Most such workers end with EXIT_PEER_LOST, but a program may have a hook of its own for uncaught exceptions."""

HOST_LOST = 255
"""What ssh ends with when the connection is gone, and so does a job that loses a host."""

SENTENCE_MAX = 300
"""Characters of another process's last line that are repeated."""

SIGNAL_BASE = 128
"""A shell's exit code for a process that a signal killed is this plus the signal's number."""


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """The end of the process in seat `node`.

    Attributes:
        pid: the process's id.
        status: its exit code, or minus the number of the signal that killed it (as in `subprocess`).
        last_error_line: the last line it printed to standard error.
        host: the host it ran on; empty where there is only this machine.
        lost: why nothing is known but that its host cannot be reached any more; then there is no status of its own.
    """

    node: NodeId
    pid: int
    status: int
    last_error_line: bytes = b""
    host: str = ""
    lost: str = ""

    @property
    def is_failure(self) -> bool:
        """Whether it ended in any other way than exit code 0."""
        return self.status != 0

    @property
    def is_consequence(self) -> bool:
        """Whether it says of itself that it failed because another process was lost."""
        says_so = self.node.role is Role.WORKER and PEER_LOST_TRACEBACK.match(self.last_error_line) is not None
        return self.status == EXIT_PEER_LOST or (self.status == 1 and says_so)

    @property
    def doubt(self) -> int:
        """Orders endings seen at the same moment: the likelier one is the first cause, the lower."""
        if self.status < 0 or self.lost:
            return 0
        return 3 if self.is_consequence else 1 if self.is_failure else 2

    @property
    def exit_code(self) -> int:
        """The code with which the launcher passes this ending on."""
        if self.is_consequence:
            return EXIT_PEER_LOST
        return SIGNAL_BASE - self.status if self.status < 0 else self.status

    @property
    def report(self) -> str:
        """The line, without line end, that tells the scheduler."""
        how = f"signal {-self.status}" if self.status < 0 else f"exit {self.status}"
        if self.lost:
            how = f"lost {self.host}"
        return f"ended {self.node.role} {self.node.rank} {how}"

    def __str__(self) -> str:
        who = f"{self.node} on {self.host} (pid {self.pid})" if self.host else f"{self.node} (pid {self.pid})"
        if self.lost:
            return f"{who} was lost: {self.lost}"
        if self.status < 0:
            return f"{who} was killed by {signal_name(-self.status)}"
        if self.is_consequence:
            # Its last line says which peer, in the words of the scheduler.
            lost = self.last_error_line.decode(errors="replace").partition(": ")[2].strip()[:SENTENCE_MAX]
            return f"{who} lost a peer and ended with exit code {self.status}" + (f" ({lost})" if lost else "")
        return f"{who} {'failed' if self.status else 'ended early'} with exit code {self.status}"


def signal_name(number: int) -> str:
    """``signal 9 (SIGKILL)``, or the bare number when the system has no name for it."""
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"


REPEAT_S = 0.25
"""Signals within this time are one request: `timeout`, hang-ups and wrappers that forward signals send two."""


@dataclass(frozen=True)
class GracePeriods:
    """How long is waited before the next, harder step.

    Attributes:
        grace_s: for the others to end by themselves after a failure or an interruption.
        farewell_s: for scheduler and servers to end after the last worker has.
        terminate_s: between SIGTERM and SIGKILL.
    """

    grace_s: float = 5.0
    farewell_s: float = 5.0
    terminate_s: float = 2.0


@dataclass(frozen=True, slots=True)
class SendSignal:
    """Send `number` to the process group of the process in seat `node`."""

    node: NodeId
    number: int


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the user."""

    text: str


Action = SendSignal | Say


class Phase(enum.Enum):
    """What the job is going through; each phase with a deadline leads to TERMINATING, and that to KILLING."""

    RUNNING = enum.auto()
    CLOSING = enum.auto()
    FAILING = enum.auto()
    INTERRUPTED = enum.auto()
    TERMINATING = enum.auto()
    KILLING = enum.auto()


class Job:
    """The state of one job.

    Attributes:
        deadline: when `tick` must be called next, unless all is over; None when only an event can change anything.
        cause: the ending that failed the job; None while there is none.
    """

    def __init__(self, nodes: Sequence[NodeId], now: float, patience: GracePeriods | None = None) -> None:
        self._patience = GracePeriods() if patience is None else patience
        self._started = now
        self._nodes = list(nodes)
        self._alive = list(nodes)
        self._phase = Phase.RUNNING
        self._early: tuple[ProcessExit, float] | None = None
        self._interruption: int | None = None
        self._interrupted_at = now
        self._cause_at = now
        self.cause: ProcessExit | None = None
        self.deadline: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether every process has ended."""
        return not self._alive

    @property
    def is_interrupted(self) -> bool:
        """Whether the user or the system asked for its end."""
        return self._interruption is not None

    def ended(self, endings: Iterable[ProcessExit], now: float) -> list[Action]:
        """Take note of processes that ended; those of one call count as having ended at the same moment."""
        batch = sorted(endings, key=lambda ending: ending.doubt)
        for ending in batch:
            self._alive.remove(ending.node)
        for ending in batch:
            self._judge(ending, now)
        if self._phase in (Phase.RUNNING, Phase.CLOSING) and self.cause is not None:
            return self._fail(now)
        if self._phase is Phase.RUNNING and not self._workers_alive():
            self._early = None
            self._enter(Phase.CLOSING, now + self._patience.farewell_s)
        elif self._phase is Phase.INTERRUPTED and not self._workers_alive():
            return self._terminate(now)
        return []

    def interrupt(self, number: int, now: float) -> list[Action]:
        """The launcher was sent the signal `number`: ask everybody to end, or at the second time kill them."""
        if self._interruption is not None:
            return self._kill() if now - self._interrupted_at >= REPEAT_S else []
        self._interruption, self._interrupted_at = number, now
        if self._phase in (Phase.TERMINATING, Phase.KILLING):
            return self._kill()
        if self._phase is not Phase.RUNNING:
            return self._terminate(now)
        self._enter(Phase.INTERRUPTED, now + self._patience.grace_s)
        text = f"{signal_name(number)}: ending the workers; once more kills everything at once"
        return [Say(text), *self._signal_all(signal.SIGINT, self._workers_alive())]

    def tick(self, now: float) -> list[Action]:
        """Do what is due at `now`."""
        if self.deadline is None or now < self.deadline:
            return []
        if self._phase is Phase.TERMINATING:
            return self._kill()
        if self._phase is Phase.RUNNING and self._early is not None:
            self._blame(*self._early)
            return self._terminate(now)
        return self._overdue() + self._terminate(now)

    def exit_code(self) -> int:
        """The launcher's exit code, once the job is over."""
        if self.cause is not None:
            return self.cause.exit_code or 1
        return 0 if self._interruption is None else SIGNAL_BASE + self._interruption

    def summary(self, now: float) -> str:
        """The job in one sentence, once it is over."""
        if self.cause is not None:
            what = f"{self.cause} after {_seconds(self._cause_at - self._started)}"
        elif self._interruption is not None:
            what = f"interrupted by {signal_name(self._interruption)} after {_seconds(now - self._started)}"
        else:
            roles = [role for role in (Role.WORKER, Role.SERVER) if any(node.role is role for node in self._nodes)]
            return f"{' and '.join(map(self._count, roles))} finished in {_seconds(now - self._started)}"
        return f"{what}; job ended with exit code {self.exit_code()}"

    def _judge(self, ending: ProcessExit, now: float) -> None:
        """Whether this ending, the next in order of time, is what failed the job."""
        if self._phase not in (Phase.RUNNING, Phase.CLOSING, Phase.FAILING):
            return
        if ending.is_failure:
            self._accuse(ending, now)
        elif self._phase is Phase.RUNNING and ending.node == SCHEDULER:
            # It ends with 0 only when the cluster was dissolved in order, servers included.
            self._early, self.deadline = None, None
        elif self._phase is Phase.RUNNING and ending.node.role is Role.SERVER:
            self._suspect(ending, now)

    def _accuse(self, ending: ProcessExit, now: float) -> None:
        is_needed = ending.node.role is Role.WORKER or bool(self._workers_alive())
        if ending.is_consequence and self.cause is None and not is_needed:
            return
        if self.cause is None and self._early is not None and ending.is_consequence:
            self._blame(*self._early)
        elif self.cause is None or (self.cause.is_consequence and not ending.is_consequence):
            self._blame(ending, now)

    def _suspect(self, ending: ProcessExit, now: float) -> None:
        if self._early is None and self._workers_alive() and SCHEDULER in self._alive:
            self._early, self.deadline = (ending, now), now + self._patience.grace_s

    def _blame(self, ending: ProcessExit, at: float) -> None:
        self.cause, self._cause_at = ending, at

    def _fail(self, now: float) -> list[Action]:
        self._enter(Phase.FAILING, now + self._patience.grace_s)
        if self.is_over:
            return []
        return [Say(f"{self.cause}; the others get {self._patience.grace_s:g} s to end")]

    def _enter(self, phase: Phase, deadline: float | None) -> None:
        self._phase, self.deadline = phase, deadline

    def _overdue(self) -> list[Action]:
        """Say who kept the job from ending, where the user would otherwise only see it wait."""
        if self._phase not in (Phase.CLOSING, Phase.INTERRUPTED):
            return []
        if self._phase is Phase.CLOSING:
            late, waited_s, since = self._alive, self._patience.farewell_s, "the last worker's end"
        else:
            late, waited_s, since = self._workers_alive(), self._patience.grace_s, "the interruption"
        names = ", ".join(map(str, late))
        return [Say(f"{names} did not end within {waited_s:g} s of {since}; terminating")]

    def _terminate(self, now: float) -> list[Action]:
        self._enter(Phase.TERMINATING, now + self._patience.terminate_s)
        return self._signal_all(signal.SIGTERM, self._alive)

    def _kill(self) -> list[Action]:
        self._enter(Phase.KILLING, None)
        return self._signal_all(signal.SIGKILL, self._alive)

    def _signal_all(self, number: int, nodes: Iterable[NodeId]) -> list[Action]:
        return [SendSignal(node, number) for node in nodes]

    def _workers_alive(self) -> list[NodeId]:
        return [node for node in self._alive if node.role is Role.WORKER]

    def _count(self, role: Role) -> str:
        count = sum(node.role is role for node in self._nodes)
        return f"{count} {role}" if count == 1 else f"{count} {role}s"


def _seconds(duration_s: float) -> str:
    return f"{duration_s:.1f} s"


INDENT = "    "


@dataclass
class ProcessRecord:
    """One process from its start to its end.

    Attributes:
        node: its seat.
        host: where it ran; empty where there is only one machine.
        started_s, ended_s: when, since the job's start.
        ending: how it ended; None while it runs.
        is_told_to_end: whether the launcher sent it a signal.
    """

    node: NodeId
    host: str
    started_s: float
    ended_s: float = 0.0
    ending: ProcessExit | None = None
    is_told_to_end: bool = False


class JobSummary:
    """What happened in one job.

    Args:
        now: when it began.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._lives: list[ProcessRecord] = []
        self._earlier = 0
        self._sentence = ""
        self._cause: ProcessExit | None = None
        self._last_lines: list[str] = []

    def begin(self) -> None:
        """Another attempt at the job. How the one before ended is kept until this one has ended, too."""
        self._earlier = len(self._lives)

    def give_up(self, why: str) -> str:
        """Another attempt could not begin. Returns what is told of it and of how the one before ended.

        Args:
            why: what was in its way.
        """
        self._sentence += f"; it could not be started anew: {why}"
        return self._sentence

    def started(self, processes: Iterable[tuple[NodeId, str]], now: float) -> None:
        """These were started, each on its host; the host is empty where there is only one machine."""
        self._lives += [ProcessRecord(node, host, now - self._began) for node, host in processes]

    def told_to_end(self, node: NodeId) -> None:
        """The launcher sent a process a signal."""
        for life in self._lives:
            if life.node == node and life.ending is None:
                life.is_told_to_end = True

    def ended(self, endings: Iterable[ProcessExit], now: float) -> None:
        """These have ended."""
        for ending in endings:
            for life in self._lives:
                if life.node == ending.node and life.ending is None:
                    life.ending, life.ended_s = ending, now - self._began

    def conclude(self, sentence: str, cause: ProcessExit | None = None, last_lines: Sequence[str] = ()) -> list[str]:
        """The attempt is over. Returns what is told of it, the sentence last.

        Args:
            sentence: how it ended.
            cause: what failed it; None if nothing did.
            last_lines: the last that process printed.
        """
        self._sentence, self._cause, self._last_lines = sentence, cause, list(last_lines)
        if cause is None:
            return [sentence]
        told = [f"the last lines of {cause.node}:", *(INDENT + line for line in last_lines)] if last_lines else []
        others = self._others(cause)
        return [*told, *([others] if others else []), sentence]

    def summary(self, exit_code: int, now: float, reason: str = "") -> dict[str, Any]:
        """The object that ``--json-summary`` writes; see the module.

        Args:
            exit_code: the launcher's.
            now: when all was over.
            reason: why the job was not started, or not all of it; empty if it was.
        """
        cause = self._cause
        # Where one host could not start its part, others may have.
        outcome = (
            "not started" if reason and not self._lives
            else "interrupted" if cause is None and not reason
            else "failed"
        )  # fmt: skip
        return {
            "version": __version__,
            "exit_code": exit_code,
            "duration_s": round(now - self._began, 3),
            "outcome": "finished" if exit_code == 0 else outcome,
            "sentence": reason or self._sentence,
            "first_failure": None if cause is None else self._failure(cause),
            "processes": [_record_fields(life) for life in self._lives if life.ending is not None],
        }

    def _failure(self, cause: ProcessExit) -> dict[str, Any]:
        life = self._life_of(cause)
        return {
            "node": str(cause.node),
            "role": str(cause.node.role),
            "rank": cause.node.rank,
            "host": life.host,
            **_exit_fields(cause),
            "after_s": round(life.ended_s - life.started_s, 3),
            "last_lines": self._last_lines,
        }

    def _life_of(self, ending: ProcessExit) -> ProcessRecord:
        """Whose end it was; an ending may have been told of with more details than were known at first."""
        same = (life for life in self._lives if life.ending is not None and life.ending.pid == ending.pid)
        return next((life for life in same if life.node == ending.node), ProcessRecord(ending.node, "", 0.0))

    def _others(self, cause: ProcessExit) -> str:
        """How everybody else ended, one clause for each way."""
        blamed = self._life_of(cause)
        fates: dict[tuple[str, str], Counter[Role]] = {}
        for life in self._lives[self._earlier :]:
            if life.ending is not None and life is not blamed:
                fates.setdefault(_fate(life, life.ending), Counter())[life.node.role] += 1
        return "; ".join(_clause(fate, counts) for fate, counts in fates.items())


def write_summary(path: Path, summary: dict[str, Any]) -> None:
    """Write a summary so that whoever reads the file finds all of it, or none.

    Args:
        path: the file. A link is followed, and what is no file, such as a pipe, is written to.
        summary: what `JobSummary.summary` made.

    Raises:
        OSError: it cannot be written.
    """
    # Imported here because few ask for it, and every job would wait for it.
    import json

    text = json.dumps(summary, indent=2) + "\n"
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
    """Remove the summary of an earlier job: if this one leaves none, nobody shall take that for its own.

    What is no file, and what cannot be removed, stays.
    """
    with contextlib.suppress(OSError):
        if path.is_file():
            path.resolve().unlink()


def _record_fields(life: ProcessRecord) -> dict[str, Any]:
    how = {} if life.ending is None else _exit_fields(life.ending)
    times = {"started_s": round(life.started_s, 3), "ended_s": round(life.ended_s, 3)}
    return {"node": str(life.node), "host": life.host, **how, **times}


def _exit_fields(ending: ProcessExit) -> dict[str, Any]:
    if ending.lost:
        return {"pid": ending.pid, "lost": ending.lost}
    code = {"signal": -ending.status} if ending.status < 0 else {"exit_code": ending.status}
    return {"pid": ending.pid, **code}


def _fate(life: ProcessRecord, ending: ProcessExit) -> tuple[str, str]:
    """How a process ended, with the verb for one and for several."""
    if ending.lost:
        return "was lost with its host", "were lost with their hosts"
    if not ending.is_failure:
        return "finished", "finished"
    if life.is_told_to_end:
        return "was ended by the launcher", "were ended by the launcher"
    if ending.is_consequence:
        return "lost a peer", "lost a peer"
    if ending.status < 0:
        return f"was killed by {signal_name(-ending.status)}", f"were killed by {signal_name(-ending.status)}"
    return f"failed with exit code {ending.status}", f"failed with exit code {ending.status}"


def _clause(fate: tuple[str, str], counts: Counter[Role]) -> str:
    parts = [_counted(role, counts[role]) for role in (Role.WORKER, Role.SERVER, Role.SCHEDULER) if counts[role]]
    named = ", ".join(parts[:-1]) + " and " + parts[-1] if len(parts) > 1 else parts[0]
    return f"{named} {fate[0] if counts.total() == 1 else fate[1]}"


def _counted(role: Role, count: int) -> str:
    return "the scheduler" if role is Role.SCHEDULER else f"{count} {role}" if count == 1 else f"{count} {role}s"
