"""What a process has mapped, for tests of what is let go."""

from __future__ import annotations

import gc
from pathlib import Path


def segments_mapped() -> int:
    """How many stretches of shared memory, one's own or a peer's, this process has mapped.

    What earlier tests left in cycles is collected first: collected between two counts it would change the second.
    """
    gc.collect()
    return Path("/proc/self/maps").read_text("utf-8").count("memfd:kvdist-arena")
