"""Memory in which contributions wait until a server has counted them, laid out as their plan says.

A plan's buffers are used again and again, because the first touch of fresh memory costs several times a copy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from kvdist.core.requests import Bits, Plan, RunPlan
from kvdist.dtypes import DType
from kvdist.kernels.interface import Kernels

SETS_KEPT_MAX = 2
"""One set is being filled while the other one is under way."""


class RunBuffer:
    """The payload of one run, and a typed view of each of its slices."""

    def __init__(self, plan: RunPlan) -> None:
        memory = np.zeros(max(plan.nbytes, 1), np.uint8)  # zeroed once, so that the padding is defined
        self.payload = memory.data[: plan.nbytes]
        self.views: list[Bits] = []
        for piece, code in zip(plan.pieces, plan.dtypes.tolist(), strict=True):
            dtype = DType(code)
            stop = piece.offset + (piece.stop - piece.start) * dtype.itemsize
            self.views.append(memory[piece.offset : stop].view(dtype.storage))


class Staging:
    """The buffers of one plan: as many sets as are under way at once."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.nbytes = sum(run.nbytes for run in plan.runs)
        """Bytes of one set of buffers."""
        # What a burst of pushes needed more than this is not kept.
        self._free: deque[list[RunBuffer]] = deque(maxlen=SETS_KEPT_MAX)

    def fill(self, arrays: Sequence[Sequence[Bits]], kernels: Kernels) -> list[RunBuffer]:
        """Copy each key's array into a set of buffers, summing over devices on the way: one pass over the bytes.

        Args:
            arrays: per key of the plan its contributions, one per device, as bits.
            kernels: what sums.
        """
        try:
            buffers = self._free.pop()
        except IndexError:
            buffers = [RunBuffer(run) for run in self.plan.runs]
        for run, buffer in zip(self.plan.runs, buffers, strict=True):
            for piece, view in zip(run.pieces, buffer.views, strict=True):
                parts = arrays[piece.index]
                if len(parts) == 1:
                    view[...] = parts[0][piece.start : piece.stop]
                else:
                    dtype = self.plan.keys[piece.index].dtype
                    pieces = [part[piece.start : piece.stop] for part in parts]
                    kernels.weighted_sum(pieces, [1.0] * len(parts), dtype, view)
        return buffers

    def give_back(self, buffers: list[RunBuffer]) -> None:
        """These buffers are counted; they may be filled again. Called from the node's thread."""
        self._free.append(buffers)
