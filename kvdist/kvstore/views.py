"""Results that are read where servers of this host keep them, instead of being copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from kvdist.core.traffic import Traffic
from kvdist.core.worker.requests import ALONE_BYTES_MIN, Bits, KeyInfo, Plan, RunData, RunPlan
from kvdist.kvstore.key_table import KeyTable
from kvdist.kvstore.staging import Shares
from kvdist.protocol.messages import Flag
from kvdist.transport.shared_memory.memory import Allocator


class Views:
    """The keys of one call whose results stay in the servers' memory: large ones, all of whose servers share it.

    Args:
        plan: the keys and their runs.
        shares: whether the server of a rank shares memory with this process.
    """

    def __init__(self, plan: Plan, shares: Shares) -> None:
        self._plan = plan
        self._indices = [
            i
            for i, info in enumerate(plan.keys)
            if info.pulled_as is None and _is_large(info) and _all_share(info, shares)
        ]
        self._wanted = set(self._indices)
        self._kept: dict[int, list[tuple[int, int, dict[int, Bits]]]] = {index: [] for index in self._indices}
        """Key → its slices: (start, stop, the run's values by their place)."""

    def keeps(self, run: RunPlan) -> bool:
        """Whether the result of this run stays where it is."""
        return len(run.pieces) == 1 and run.pieces[0].index in self._wanted

    def keeping(self, run: RunData) -> RunData:
        """The run, asking for a result that may be read where it lies."""
        kept: dict[int, Bits] = {}
        (piece,) = run.plan.pieces
        self._kept[piece.index].append((piece.start, piece.stop, kept))
        assert run.flags is not None
        return replace(run, flags=run.flags | np.uint8(Flag.HOLD), kept=kept)

    def shown(self, memory: Allocator, results: Sequence[Bits], keys: KeyTable, traffic: Traffic) -> list[Any]:
        """The results have come: per key an array that shows it, or None after copying it to `results`."""
        found: list[Any] = [None] * len(self._plan.keys)
        for index in self._indices:
            info = self._plan.keys[index]
            pieces = sorted(self._kept[index], key=lambda piece: piece[:2])
            window = memory.show([kept[0].view(np.uint8) for _, _, kept in pieces])
            if window is not None:
                found[index] = shown = keys.like(info, window.view(info.dtype.storage))
                if isinstance(shown, np.ndarray):
                    shown.flags.writeable = False  # what torch does not know
                continue
            for start, stop, kept in pieces:
                results[index][start:stop] = kept[0]
                traffic.copied_out += kept[0].nbytes
        return found


def _is_large(info: KeyInfo) -> bool:
    return all(piece.count * info.dtype.itemsize >= ALONE_BYTES_MIN for piece in info.slices)


def _all_share(info: KeyInfo, shares: Shares) -> bool:
    return all(shares(piece.server) for piece in info.slices)
