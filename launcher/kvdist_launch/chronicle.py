"""Who started and ended when and how, in one job: the end of what users read, and ``--json-summary``.

Pure but for `write_summary`: times come in as seconds of a monotonic clock.

A summary is one JSON object:

- ``version``: kvdist's.
- ``exit_code``: the launcher's.
- ``duration_s``: from the launcher's start to the last process's end.
- ``outcome``: ``finished``, ``failed``, ``interrupted``, or ``not started`` when something was wrong before any process
  was started.
- ``sentence``: the closing sentence for people.
- ``first_failure``: null, or what failed the job: ``node`` (``worker-3``), ``role``, ``rank``, ``host`` (empty where
  there is only one machine), ``pid``, ``exit_code`` or ``signal``, ``after_s`` since its own start, ``last_lines``
  (texts, both outputs as they came).
- ``processes``: one for each that was started, those of earlier attempts too: ``node``, ``host``, ``pid``,
  ``exit_code`` or ``signal``, ``started_s`` and ``ended_s`` since the job's start. A process whose host was lost has
  ``lost``, a sentence, in the place of its code.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvdist.nodes import NodeId, Role
from kvdist.version import __version__
from kvdist_launch.ending import Ending, signal_name

INDENT = "    "


@dataclass
class Life:
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
    ending: Ending | None = None
    is_told_to_end: bool = False


class Chronicle:
    """What happened in one job.

    Args:
        now: when it began.
    """

    def __init__(self, now: float) -> None:
        self._began = now
        self._lives: list[Life] = []
        self._earlier = 0
        self._sentence = ""
        self._cause: Ending | None = None
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
        self._lives += [Life(node, host, now - self._began) for node, host in processes]

    def told_to_end(self, node: NodeId) -> None:
        """The launcher sent a process a signal."""
        for life in self._lives:
            if life.node == node and life.ending is None:
                life.is_told_to_end = True

    def ended(self, endings: Iterable[Ending], now: float) -> None:
        """These have ended."""
        for ending in endings:
            for life in self._lives:
                if life.node == ending.node and life.ending is None:
                    life.ending, life.ended_s = ending, now - self._began

    def conclude(self, sentence: str, cause: Ending | None = None, last_lines: Sequence[str] = ()) -> list[str]:
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
            "processes": [_told(life) for life in self._lives if life.ending is not None],
        }

    def _failure(self, cause: Ending) -> dict[str, Any]:
        life = self._life_of(cause)
        return {
            "node": str(cause.node),
            "role": str(cause.node.role),
            "rank": cause.node.rank,
            "host": life.host,
            **_how(cause),
            "after_s": round(life.ended_s - life.started_s, 3),
            "last_lines": self._last_lines,
        }

    def _life_of(self, ending: Ending) -> Life:
        """Whose end it was; an ending may have been told of with more details than were known at first."""
        same = (life for life in self._lives if life.ending is not None and life.ending.pid == ending.pid)
        return next((life for life in same if life.node == ending.node), Life(ending.node, "", 0.0))

    def _others(self, cause: Ending) -> str:
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
        summary: what `Chronicle.summary` made.

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


def _told(life: Life) -> dict[str, Any]:
    how = {} if life.ending is None else _how(life.ending)
    times = {"started_s": round(life.started_s, 3), "ended_s": round(life.ended_s, 3)}
    return {"node": str(life.node), "host": life.host, **how, **times}


def _how(ending: Ending) -> dict[str, Any]:
    if ending.lost:
        return {"pid": ending.pid, "lost": ending.lost}
    code = {"signal": -ending.status} if ending.status < 0 else {"exit_code": ending.status}
    return {"pid": ending.pid, **code}


def _fate(life: Life, ending: Ending) -> tuple[str, str]:
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
