"""What a worker knows of each slice: how often it has pushed it, which version it has seen, what waits in line.

A slice has at most one push of this worker under way; the next one stands in line until the first is counted. Runs
take their places in the lines of all their slices at once, in the order of the user's calls. Each slice goes on by
itself: one that is free never waits for another of its run, or workers that group their keys differently would wait
for each other for ever.
"""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvdist.core.worker.outbox import Part, Run
from kvdist.protocol.arrays import U32


class SliceTable:
    """One row per slice number, growing as keys are placed."""

    def __init__(self) -> None:
        self.pushed: U32 = np.zeros(0, np.uint32)
        """Pushes submitted by the user's thread so far."""
        self.versions: U32 = np.zeros(0, np.uint32)
        """The newest version seen."""
        self.detour: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are summed with those of other workers of this host."""
        self.has_rounds: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its pushes are counted only together with those of all other workers."""
        self._lent: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        """Whether its push is with the leader of this host, and not answered."""
        self._lent_run: U32 = np.zeros(0, np.uint32)
        """The run of that push."""
        self._busy: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._lines: dict[int, deque[Run]] = {}

    def grow(self, size: int) -> None:
        """Have rows for slices 0 to `size - 1`. The table at least doubles when it grows."""
        if size > len(self.pushed):
            more = max(size - len(self.pushed), len(self.pushed))
            self.pushed = np.concatenate([self.pushed, np.zeros(more, np.uint32)])
            self.versions = np.concatenate([self.versions, np.zeros(more, np.uint32)])
            self._busy = np.concatenate([self._busy, np.zeros(more, np.bool_)])
            self.detour = np.concatenate([self.detour, np.zeros(more, np.bool_)])
            self.has_rounds = np.concatenate([self.has_rounds, np.zeros(more, np.bool_)])
            self._lent = np.concatenate([self._lent, np.zeros(more, np.bool_)])
            self._lent_run = np.concatenate([self._lent_run, np.zeros(more, np.uint32)])

    def enter(self, run: Run) -> Part | None:
        """Give a pushing run its step numbers and its places in line; returns what of it may leave at once."""
        ids = run.data.plan.ids
        run.steps = self.pushed[ids]
        self.pushed[ids] += 1
        busy = self._busy[ids]
        self._busy[ids] = True
        if not busy.any():
            return Part(run)
        for number in ids[busy].tolist():
            self._lines.setdefault(number, deque()).append(run)
        free = np.flatnonzero(~busy).tolist()
        return Part(run, free) if free else None

    def counted(self, ids: U32) -> list[Part]:
        """These pushes are counted; returns what may leave now, the slices of one run together."""
        self._busy[ids] = False
        if not self._lines:
            return []
        freed: dict[int, tuple[Run, list[int]]] = {}
        for number in ids.tolist():
            line = self._lines.get(number)
            if line is None:
                continue
            self._busy[number] = True
            run = line.popleft()
            if not line:
                del self._lines[number]
            freed.setdefault(run.number, (run, []))[1].append(run.data.plan.positions[number])
        return [Part(run, sorted(positions)) for run, positions in freed.values()]

    def lend(self, part: Part) -> None:
        """These pushes are given to the leader."""
        self._lent[part.ids] = True
        self._lent_run[part.ids] = part.run.number

    def regain(self, ids: U32) -> None:
        """The leader has answered these pushes, or handed them back."""
        self._lent[ids] = False

    def take_lent(self) -> dict[int, list[int]]:
        """Run → its slices whose pushes the leader had. It has them no more."""
        found: dict[int, list[int]] = {}
        for number in np.flatnonzero(self._lent).tolist():
            found.setdefault(int(self._lent_run[number]), []).append(number)
        self._lent[:] = False
        return found

    @property
    def has_lent(self) -> bool:
        """Whether the leader has a push that it has not answered."""
        return bool(self._lent.any())

    def saw(self, ids: U32, versions: U32) -> None:
        """These versions have been seen."""
        self.versions[ids] = np.maximum(self.versions[ids], versions)

    def counted_pushes(self) -> U32:
        """(n,) how many pushes of each slice are counted."""
        counted = self.pushed - self._busy
        for number, line in self._lines.items():
            counted[number] -= len(line)
        return counted.astype(np.uint32)

    @property
    def has_lines(self) -> bool:
        """Whether any run waits for a push of its own worker."""
        return bool(self._lines)

    def validate(self) -> None:
        """Check every invariant."""
        for number, line in self._lines.items():
            assert line and self._busy[number], "a line stands only before a busy slice"
        assert not (self._lent & ~self._busy).any(), "only what is under way is with the leader"
