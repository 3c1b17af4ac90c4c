"""What a process has mapped, for tests of what is let go."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np

from kvdist.transport.shared_memory.mapping import address_of


def segments_mapped() -> int:
    """How many stretches of shared memory, one's own or a peer's, this process has mapped.

    What earlier tests left in cycles is collected first: collected between two counts it would change the second.
    """
    gc.collect()
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:kvdist-arena")


class Pins:
    """What is pinned now, by its address."""

    def __init__(self) -> None:
        self.present: dict[int, int] = {}

    def __call__(self, memory: np.ndarray) -> object:
        address = address_of(memory)
        assert address not in self.present, "memory is pinned once"
        self.present[address] = memory.nbytes
        return _Pinned(self, address)


class _Pinned:
    def __init__(self, pins: Pins, address: int) -> None:
        self._pins, self._address = pins, address

    def __del__(self) -> None:
        del self._pins.present[self._address]
