"""Which processes of a job are restarted after they have ended, and when (``--restart N``). Pure.

Rules:

- A process that a signal killed is restarted; a worker also after a lost peer (exit code 75), with its host lost, and
  after any other failure.
- The same failure a second time, whichever workers had it, ends the job: the same exception and exit code, or for
  processes that lived for less than a minute the same last line on standard error, if any, and exit code. A mistake of
  the program would end each worker in turn. A signal is no mistake of the program, also where a shell in between
  reports it by its exit code.
- A restart is immediate after a life that was at work, if a signal, a lost host or a lost peer ended it: the next life
  need not end the same way. At work is a worker that has made a step, a server that has rejoined, and the scheduler
  when it knows of either.
- A failure that may repeat by itself (a life that ends before it was at work, or by its exception or exit code) leads
  to an immediate restart the first time, then after 1, 2, 4 and more seconds, at most 30. A life of at least a minute
  resets this delay.
- After a lost peer the delay is at least a second, see `CONSEQUENCE_DELAY_S`.
- Each process is restarted at most N times.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvdist.errors import FencedError
from kvdist.nodes import NodeId, Role
from kvdist_launch.exits import SENTENCE_MAX, SIGNAL_BASE, TORCH_PREFIX, ProcessExit
from kvdist_launch.output import shortened

RESTARTED = frozenset({Role.WORKER, Role.SCHEDULER})
"""Roles whose processes can rejoin the cluster after a loss. Servers can where snapshots or replicas exist."""

HEALTHY_S = 60.0
"""Life of a process, in seconds, after which its end is not put down to how it was started."""

DELAY_MAX_S = 30.0

CONSEQUENCE_DELAY_S = 1.0
"""Delay after the loss of a peer: by then the process that caused the loss has ended too, and been judged."""

FENCED = f"{FencedError.__module__}.{FencedError.__qualname__}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Consequences of a failure.

    Attributes:
        text: the consequence in words, to append after a semicolon.
        delay_s: seconds until the process is restarted; None if it is not.
        ends_job: whether the others must not go on either.
    """

    text: str
    delay_s: float | None = None
    ends_job: bool = False


class Restarts:
    """Counts the restarts of each process and remembers the errors that ended them.

    Args:
        limit: how often each process may be restarted.
        roles: roles whose processes are restarted.
    """

    def __init__(self, limit: int, roles: Collection[Role] = RESTARTED) -> None:
        self._limit = limit
        self._roles = roles
        self._count: Counter[NodeId] = Counter()
        self._in_a_row: Counter[NodeId] = Counter()
        self._said: dict[tuple[str, int], NodeId] = {}
        """(error, exit code) → the worker that it ended first."""

    def judge(self, one: ProcessExit, lived_s: float, was_at_work: bool = False) -> Verdict | None:
        """Decide what follows a failure; None if a restart would not help.

        Args:
            one: how the process ended.
            lived_s: seconds since its start.
            was_at_work: whether it had made a step, or the equivalent for its role.
        """
        is_worker = one.node.role is Role.WORKER
        if one.node.role not in self._roles or not (is_worker or (one.status < 0 and not one.lost)):
            return None
        words = _own_words(one, lived_s)
        failure = words, one.status
        if failure in self._said:
            first = self._said[failure]
            whom, who = f"{first} and {one.node}", "neither is"
            if first == one.node:
                whom, who = f"{first} twice", "it is not"
            text = f"the same error ended {whom}, so {who} started again (correct the error first): {words}"
            return Verdict(text, ends_job=True)
        if words:
            self._said[failure] = one.node
        if self._count[one.node] >= self._limit:
            return Verdict(f"it is not started again, as it has been {_times(self._limit)} (--restart {self._limit})")
        self._count[one.node] += 1
        delay_s = self._delay_s(one, lived_s, may_repeat=bool(words) or not was_at_work)
        when = f" in {delay_s:g} s" if delay_s else ""
        return Verdict(f"starting it again{when} ({self._count[one.node]} of {self._limit})", delay_s)

    def _delay_s(self, one: ProcessExit, lived_s: float, may_repeat: bool) -> float:
        row = self._in_a_row[one.node] if may_repeat and lived_s < HEALTHY_S else 0
        self._in_a_row[one.node] = row + may_repeat
        delay_s = min(2.0 ** (row - 1), DELAY_MAX_S) if row else 0.0
        return max(delay_s, CONSEQUENCE_DELAY_S) if one.is_consequence else delay_s


def _own_words(one: ProcessExit, lived_s: float) -> str:
    """The error that ended it, if its program caused it; empty if not, or not known."""
    if one.status <= 0 or one.lost or one.is_consequence:
        return ""
    line = shortened(TORCH_PREFIX.sub("", one.last_error_line.decode(errors="replace").strip()), SENTENCE_MAX)
    if line.startswith(FENCED):
        return ""  # the others gave it up, whatever it did
    if one.error:
        return shortened(one.error, SENTENCE_MAX)
    if SIGNAL_BASE < one.status < SIGNAL_BASE + signal.NSIG:
        return ""  # a shell's word for a signal
    return (line or f"exit code {one.status}") if lived_s < HEALTHY_S else ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
