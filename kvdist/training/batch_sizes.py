"""`Speed`: how long this worker computes for an example, and which batch size would take it as long as the others.

Source: Chen et al., Semi-Dynamic Load Balancing: Efficient Distributed Learning in Non-Dedicated Environments (LB-BSP,
2020), with the speeds of the last steps for a prediction.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

import torch

STEPS = 16
"""The median of the last so many steps counts: a pause changes nothing."""


class Speed:
    """Of a worker: how many examples it computes in a second, by what passes between two steps.

    Nothing is measured before it is asked for.

    Args:
        devices: where the gradients are computed; of CUDA devices it is waited for what they were given.
        clock: the time in seconds.
    """

    def __init__(self, devices: Sequence[torch.device], clock: Callable[[], float] = time.monotonic) -> None:
        self._devices = [device for device in devices if device.type == "cuda"]
        self._clock = clock
        self._is_wanted = False
        self._since: float | None = None
        self._seconds: deque[float] = deque(maxlen=STEPS)
        """For an example, in each of the last steps."""

    def computed(self, samples: int) -> None:
        """Gradients of so many examples are ready, or will be soon."""
        if self._since is not None and samples:
            for device in self._devices:
                torch.cuda.synchronize(device)
            self._seconds.append((self._clock() - self._since) / samples)

    def stepped(self) -> None:
        """The step is made, and computing goes on."""
        if self._is_wanted:
            self._since = self._clock()

    def examples_per_s(self) -> float:
        """0 if nothing was measured. From the first call on steps are."""
        self._is_wanted = True
        return 1.0 / max(statistics.median(self._seconds), 1e-9) if self._seconds else 0.0

    def share(self, batch_size: int, mean: float) -> int:
        """What this worker computes while one of the mean speed computes a batch; at least 1 example."""
        own = self.examples_per_s()
        return max(1, round(batch_size * own / mean)) if own and mean > 0 else batch_size
