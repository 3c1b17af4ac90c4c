"""The course of a job: when it has failed, what the first cause was, and who is told to end, when and how.

Pure: endings, signals and the time come in; what to do comes out. The rules:

- The job is done when every worker has ended with 0. Scheduler and servers then end by themselves, or are ended.
- The first process that fails fails the job. The others get a grace to notice (they raise `PeerLostError`), then
  SIGTERM, then SIGKILL. Later failures are consequences and are not named.
- Who ends because it lost a peer is a consequence even if it was seen first (a failing worker tells the scheduler
  before its process has ended): it is named only if nothing else failed. Of a scheduler or server it is no failure
  at all once every worker has succeeded: whatever it missed, nobody needed it any more.
- A server that ends with 0 while workers run is odd, but right when the scheduler also ends with 0: all workers
  have said goodbye and only finish work of their own. Otherwise the server is the first cause.
- In a job without servers nobody is told of a failure from here: ranks tell each other as far as they use operations,
  and who does something else is terminated after the grace.
- A first interruption asks: the workers get SIGINT, and servers live on so that workers can still save; whatever
  is left after the grace is terminated. A second one kills.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvdist.nodes import SCHEDULER, NodeId, Role
from kvdist_launch.ending import SIGNAL_BASE, Ending, signal_name

REPEAT_S = 0.25
"""Signals within this time are one request: `timeout`, hang-ups and wrappers that forward signals send two."""


@dataclass(frozen=True)
class Patience:
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


class Course:
    """The state of one job.

    Attributes:
        deadline: when `tick` must be called next, unless all is over; None when only an event can change anything.
        cause: the ending that failed the job; None while there is none.
    """

    def __init__(self, nodes: Sequence[NodeId], now: float, patience: Patience | None = None) -> None:
        self._patience = Patience() if patience is None else patience
        self._started = now
        self._nodes = list(nodes)
        self._alive = list(nodes)
        self._phase = Phase.RUNNING
        self._early: tuple[Ending, float] | None = None
        self._interruption: int | None = None
        self._interrupted_at = now
        self._cause_at = now
        self.cause: Ending | None = None
        self.deadline: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether every process has ended."""
        return not self._alive

    @property
    def is_interrupted(self) -> bool:
        """Whether the user or the system asked for its end."""
        return self._interruption is not None

    def ended(self, endings: Iterable[Ending], now: float) -> list[Action]:
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

    def _judge(self, ending: Ending, now: float) -> None:
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

    def _accuse(self, ending: Ending, now: float) -> None:
        is_needed = ending.node.role is Role.WORKER or bool(self._workers_alive())
        if ending.is_consequence and self.cause is None and not is_needed:
            return
        if self.cause is None and self._early is not None and ending.is_consequence:
            self._blame(*self._early)
        elif self.cause is None or (self.cause.is_consequence and not ending.is_consequence):
            self._blame(ending, now)

    def _suspect(self, ending: Ending, now: float) -> None:
        if self._early is None and self._workers_alive() and SCHEDULER in self._alive:
            self._early, self.deadline = (ending, now), now + self._patience.grace_s

    def _blame(self, ending: Ending, at: float) -> None:
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
