"""Which processes of a job are restarted after they have ended, and when (``--restart N``). Pure.

Rules:

- A process that a signal killed is restarted; a worker also after a lost peer (exit code 75), with its host lost, and
  after any other failure.
- The same failure a second time, whichever workers had it, ends the job: the same exception and exit code, or for
  processes that lived for less than a minute the same last line on standard error, if any, and exit code. A mistake of
  the program would take worker after worker, so this ends the job. A signal is no mistake of the program, also
  where a shell between reports it by its exit code.
- A start comes at once after a life that was at work, if a signal, a lost host or a lost peer ended it: nothing
  indicates that the next life ends so, too. At work is a worker that has completed a step, a server that has joined the
  others again, and the scheduler when it knows of either.
- What may repeat by itself is started at once the first time, then after 1, 2, 4 and more seconds, at most 30: a life
  that ends before it was at work, or by its exception or exit code. A life of a minute begins anew.
- After a lost peer it is a second at the least, see `CONSEQUENCE_DELAY_S`.
- Each process is started again at most N times.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from kvdist.errors import FencedError
from kvdist.nodes import NodeId, Role
from kvdist_launch.exits import SENTENCE_MAX, SIGNAL_BASE, ProcessExit
from kvdist_launch.output import shortened

RESTARTED = frozenset({Role.WORKER, Role.SCHEDULER})
"""The roles whose processes can join the cluster that they were lost to. Servers can with snapshots or
copies of their slices."""

HEALTHY_S = 60.0
"""Life of a process, in seconds, after which its end is not put down to how it was started."""

DELAY_MAX_S = 30.0

CONSEQUENCE_DELAY_S = 1.0
"""A process that lost a peer may know that the job ends; by then the process that is the cause of it has ended too."""

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
    """How often each process was started, and the words with which it ended.

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
        """What follows this failure; None if no start would mend it.

        Args:
            one: how the process ended.
            lived_s: seconds since its start.
            was_at_work: whether it had completed a step, or the equivalent for its role.
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
    """Why it ended, if its program is the reason; empty if not, or if unknown."""
    if one.status <= 0 or one.lost or one.is_consequence:
        return ""
    line = shortened(one.last_line, SENTENCE_MAX)
    if line.startswith(FENCED):
        return ""  # the others gave it up, whatever it did
    if one.error:
        return shortened(one.error, SENTENCE_MAX)
    if SIGNAL_BASE < one.status < SIGNAL_BASE + signal.NSIG:
        return ""  # a shell's word for a signal
    return (line or f"exit code {one.status}") if lived_s < HEALTHY_S else ""


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"
