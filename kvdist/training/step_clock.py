"""`StepClock`: how the time of this worker's steps is spent, for the scheduler, which names slow machines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from kvdist.protocol.messages import StepTimes
from kvdist.runtime.waits import waited_s

REPORT_S = 1.0
"""Least time between two reports."""


class StepClock:
    """Measures how the time between reports is spent: loading data, computing, waiting for the store.

    Args:
        clock: returns the time in seconds.
        waited: returns the seconds for which the present thread has waited for the store.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, waited: Callable[[], float] = waited_s) -> None:
        self._clock = clock
        self._waited = waited
        self._begun: tuple[float, float] | None = None
        """Begin of the first step that no report has, and the seconds of waiting until then."""
        self._steps = self._samples = 0
        """Steps and examples that no report has."""
        self._data_s = 0.0

    def loading(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Iterate a loader, and measure its time but for waits for the store."""
        clock, waited = self._clock, self._waited
        since = clock() - waited()
        batches = iter(loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            self._data_s += clock() - waited() - since
            yield batch
            since = clock() - waited()

    def stepped(self, samples: int = 0) -> StepTimes | None:
        """Count a step of so many examples, 0 if their number is not known.

        Returns:
            The times since the last report, if that was at least `REPORT_S` ago; the first step begins the first
            report.
        """
        now, waited = self._clock(), self._waited()
        times, begun = None, self._begun
        if begun is not None:
            self._steps += 1
            self._samples += samples
            if now - begun[0] < REPORT_S:
                return None
            blocked_s = waited - begun[1]
            seconds = (self._data_s, now - begun[0] - blocked_s - self._data_s, blocked_s)
            data_us, compute_us, blocked_us = (max(round(part * 1e6), 0) for part in seconds)
            times = StepTimes(self._steps, self._samples, data_us, compute_us, blocked_us, 0)
        self._begun, self._steps, self._samples, self._data_s = (now, waited), 0, 0, 0.0
        return times
