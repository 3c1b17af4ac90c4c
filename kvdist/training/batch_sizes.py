"""`Speed`: how the time of this worker's steps goes, and which batch size would take it as long as the others.

Source of the latter: Chen et al., Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated
Environments (LB-BSP, 2020), with the speeds of the last steps for a prediction.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from kvdist.protocol.messages import StepTimes
from kvdist.runtime.waits import waited_s

STEPS = 16
"""The median of the last so many steps counts: a pause changes nothing."""
REPORT_S = 1.0
"""Between two reports of times, at least."""


class Speed:
    """Of a worker: how many examples it computes in a second, by what passes between two steps, and what that is.

    How many examples is not measured before it is asked for.

    Args:
        devices: where the gradients are computed; of CUDA devices it is waited for what they were given, if it was
            asked how many examples are computed in a second.
        clock: the time in seconds.
        waited: for how many seconds the present thread has waited for the store.
    """

    def __init__(
        self,
        devices: Sequence[torch.device],
        clock: Callable[[], float] = time.monotonic,
        waited: Callable[[], float] = waited_s,
    ) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._clock = clock
        self._waited = waited
        self._is_wanted = False
        self._since: float | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        """For an example, in each of the last steps."""
        self._begun: tuple[float, float] | None = None
        """When the first of the steps began that no report has, and how long was waited until then."""
        self._steps = self._samples = 0
        """In no report."""
        self._data_s = 0.0

    def computed(self, samples: int) -> None:
        """Gradients of so many examples are ready, or will be soon."""
        if self._since is not None and samples:
            for device in self._devices:
                torch.cuda.synchronize(device)
            self._seconds.append((self._clock() - self._since) / samples)

    def loading(self, loader: Iterable[Any]) -> Iterator[Any]:
        """What a loader gives; how long that takes is measured, but for waits for the store."""
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

    def resumed(self) -> None:
        """Computing goes on, after a call that was no step."""
        self._since = self._clock() if self._is_wanted else None

    def stepped(self, samples: int = 0) -> StepTimes | None:
        """A step of so many examples is made, or of an unknown number, and computing goes on.

        Returns:
            How the time since the last report went, if that was a second ago; the first step begins the first one.
        """
        now, waited = self._clock(), self._waited()
        self._since = now if self._is_wanted else None
        times, begun = None, self._begun
        if begun is not None:
            self._steps += 1
            self._samples += samples
            if now - begun[0] < REPORT_S:
                return None
            blocked_s = waited - begun[1]
            seconds = (self._data_s, now - begun[0] - blocked_s - self._data_s, blocked_s)
            data_us, compute_us, blocked_us = (max(round(one * 1e6), 0) for one in seconds)
            times = StepTimes(self._steps, self._samples, data_us, compute_us, blocked_us, 0)
        self._begun, self._steps, self._samples, self._data_s = (now, waited), 0, 0, 0.0
        return times

    def examples_per_s(self) -> float:
        """0 if nothing was measured. From the first call on steps are."""
        self._is_wanted = True
        return 1.0 / max(statistics.median(self._seconds), 1e-9) if self._seconds else 0.0

    def share(self, batch_size: int, mean: float) -> int:
        """What this worker computes while one of the mean speed computes a batch; at least 1 example."""
        own = self.examples_per_s()
        return max(1, round(batch_size * own / mean)) if own and mean > 0 else batch_size
