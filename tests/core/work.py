"""How much machines do: the lines of code of `kvdist.core` that they run, by what they are told.

That does not depend on how busy this computer is, as processor time does.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import kvdist.core
from kvdist.core.reliable import Reliable

CORE = str(Path(kvdist.core.__file__).parent)


class Work:
    """The lines that machines have run.

    Attributes:
        lines: (class of the machine, what it was told) → how many, of all of these together.
        times: the same → how often.
        effects: the same → what these machines wanted done then.
    """

    def __init__(self) -> None:
        self.lines: Counter[tuple[str, str]] = Counter()
        self.times: Counter[tuple[str, str]] = Counter()
        self.effects: Counter[tuple[str, str]] = Counter()

    def beyond(self, lines: int, lines_per_effect: int, told: Iterable[str] = ()) -> dict[str, int]:
        """What has cost more lines on the average than so many, and so many more for each effect: how many it was.

        Args:
            lines, lines_per_effect: the budget.
            told: only of these kinds of messages; none for all.
        """
        means = {kind: self.lines[kind] // times for kind, times in self.times.items()}
        budgets = {kind: lines + lines_per_effect * self.effects[kind] / times for kind, times in self.times.items()}
        known = set(told) or {what for _, what in means}
        return {" ".join(kind): mean for kind, mean in means.items() if kind[1] in known and mean > budgets[kind]}


@contextmanager
def counting_lines() -> Iterator[Work]:
    """Count the lines that all machines run meanwhile."""
    work, run = Work(), 0

    def trace_line(frame: FrameType, event: str, given: Any) -> Any:
        nonlocal run
        run += 1
        return trace_line

    def trace(frame: FrameType, event: str, given: Any) -> Any:
        return trace_line if frame.f_code.co_filename.startswith(CORE) else None

    def counted(verb: str) -> Any:
        original = getattr(Reliable, verb)

        def run_verb(self: Reliable, told: Any, *more: Any) -> Any:
            nonlocal run
            what = type(told.message).__name__ if verb == "receive" else verb
            kind, before, traced = (type(self.machine).__name__, what), run, sys.gettrace()
            sys.settrace(trace)
            try:
                effects = original(self, told, *more)
            finally:
                sys.settrace(traced)
            work.lines[kind] += run - before
            work.times[kind] += 1
            work.effects[kind] += len(effects)
            return effects

        return mock.patch.object(Reliable, verb, run_verb)

    with ExitStack() as stack:
        for verb in ("receive", "observe", "tick", "perform"):
            stack.enter_context(counted(verb))
        yield work
