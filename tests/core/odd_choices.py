"""What is legal and rare, chosen by the seed: FoundationDB calls these points BUGGIFY.

The program chooses sizes and times by limits, which are constants, as its core has no chance in it. A run of the
simulation draws some of the rows below and puts other values in their place. Each is one that some size of a model,
some speed of a network or some setting would bring about: what may be joined goes alone, or all at once; an
acknowledgement waits as long as it may; a timer fires late; what is repeated, is so at once.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest import mock

from kvdist.config.settings import Limits
from kvdist.core import machine, reliable
from kvdist.core.scheduler import leases, scheduler
from kvdist.core.server import block, buffers, replica, replies, row_storage, slice_parts
from kvdist.core.worker import pending, requests, transfers
from kvdist.optimizer import offload
from kvdist.runtime import node

LARGE = 1 << 20

CONSTANTS: Mapping[str, Sequence[tuple[ModuleType | type, str, Any]]] = {
    "nothing is joined": [
        (requests, "ALONE_BYTES_MIN", 1),
        (transfers, "PARTS_PER_MESSAGE_MAX", 1),
        (replies, "JOIN_BYTES_MAX", 0),
        (replies, "TOGETHER_BYTES_MAX", 1),
        (node, "MESSAGES_TOGETHER", 1),
    ],
    "all is joined": [
        (requests, "ALONE_BYTES_MIN", LARGE),
        (replies, "JOIN_BYTES_MAX", LARGE),
        (node, "MESSAGES_TOGETHER", LARGE),
    ],
    "messages have one part": [
        (transfers, "SETTINGS_PER_MESSAGE_MAX", 1),
        (pending, "SLICES_PER_MARK", 1),
        (requests, "KEYS_PER_MESSAGE", 1),
    ],
    "acknowledgements wait as long as they may": [(reliable, "ACK_DELAY_S", 1.5), (node, "ACK_DELAY_S", 1.5)],
    "each message is acknowledged": [(machine.Machine, "ack_bytes_max", 0)],
    "repeated at once": [(reliable, "RETRY_S", 0.01)],
    "copies are filled in by single elements": [
        (slice_parts, "PIECE_BYTES_MAX", 8),
        (slice_parts, "FILL_BYTES_MAX", 8),
        (replica, "FILLS_AHEAD", 1),
    ],
    "copies are filled in at once": [(replica, "FILLS_AHEAD", LARGE)],
    "blocks merge at once": [(block, "ROUNDS_WORTH_IT", 0), (block, "MERGE_AFTER_MAX", 0)],
    "blocks have two slices": [(block, "SLICES_MAX", 2)],
    "tables grow row by row": [(row_storage, "_ROWS_MIN", 1), (buffers, "BUFFERS_KEPT_MAX", 0)],
    "all is summed on devices": [(offload, "SUMMED_BYTES_MIN", 0)],
    "leases are as long as can be": [(leases, "SHARES", 1)],
    "rosters share a long gap": [(scheduler, "ROSTER_GAP_S", 0.05)],
}
"""By name: the constants that have another value."""
EXPLAINING = "nobody is patient"
LIMITS: Mapping[str, Mapping[str, Any]] = {
    "a window of one byte": {"window_bytes": 1},
    "little is under way": {"under_way_bytes": 1, "priority_window_bytes": 1},
    EXPLAINING: {"explain_after_s": 0.02},
}
"""By name: the limits that are others."""
LATE = "timers fire late"
LATE_S = 0.05
"""Far less than any wait of which somebody dies."""
NAMES = (*CONSTANTS, *LIMITS, LATE)


@contextmanager
def odd_choices(
    random_: random.Random, limits: Limits, happened: Counter[str], only: Sequence[str] = NAMES
) -> Iterator[tuple[Limits, float]]:
    """Choose for one run.

    Args:
        random_: chooses.
        limits: of the scenario.
        happened: counts what is chosen.
        only: what there is to choose from.

    Yields: the limits, and how late timers may fire, in seconds.
    """
    chosen = [name for name in only if random_.random() < 0.35] or [random_.choice(only)]
    happened.update(chosen)
    with ExitStack() as stack:
        for name in chosen:
            for owner, constant, value in CONSTANTS.get(name, ()):
                stack.enter_context(mock.patch.object(owner, constant, value))
            limits = replace(limits, **LIMITS.get(name, {}))
        yield limits, LATE_S if LATE in chosen else 0.0
