"""From gradients on GPUs to the payloads of a push: summed where they lie, and one copy to the host.

For each run of a plan: small pieces are packed into one array on each GPU (one launch), the packed arrays are summed on
one of the GPUs (one pass), and the sum is copied into the run's payload, from which it is sent. A large piece is summed
and copied as it is; that of a single GPU goes straight down, without a pass on the GPU.

All of this is asked for and not waited for: while one run is copied, the next one is summed. Whoever sends a payload
waits for its mark before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from kvdist.core.worker.requests import Piece, Plan, RunPlan
from kvdist.dtypes import DType
from kvdist.kernels.interface import Array, Device, DeviceEvent, Kernels
from kvdist.kvstore.device_sum import home_of, summed
from kvdist.kvstore.devices import OnDevice, Part, as_host_bits
from kvdist.kvstore.values import Bits
from kvdist.protocol.arrays import padded

_OCTET = np.dtype(np.uint8)


@dataclass(frozen=True, slots=True)
class _Item:
    """One piece of a run whose contributions lie on GPUs."""

    piece: Piece
    dtype: DType
    parts: list[OnDevice]
    view: Bits
    """Where its sum is wanted."""

    @property
    def places(self) -> tuple[int, ...]:
        """The numbers of the GPUs, in the order of the contributions."""
        return tuple([part.device.index for part in self.parts])


class Descent:
    """Brings the contributions of one store down."""

    def __init__(self) -> None:
        self._load = Counter[int]()
        """GPU → bytes that were summed there."""

    def bring(
        self,
        plan: Plan,
        run: RunPlan,
        payload: memoryview,
        views: Sequence[Bits],
        arrays: Sequence[Sequence[Part]],
        kernels: Kernels,
        marks: list[DeviceEvent],
    ) -> None:
        """Ask for everything that fills a run's payload.

        Args:
            plan, run: what is sent.
            payload: of the run; zeros where nothing lies.
            views: of the run's pieces in it.
            arrays: per key of the plan its contributions. Those of the host are summed at once.
            kernels: the host's.
            marks: takes what has to be waited for before the payload is sent, or used for something else.
        """
        items = []
        for piece, view in zip(run.pieces, views, strict=True):
            dtype = plan.keys[piece.index].dtype
            parts = [part[piece.start : piece.stop] for part in arrays[piece.index]]
            on_gpus = [part for part in parts if isinstance(part, OnDevice)]
            if on_gpus:
                items.append(_Item(piece, dtype, on_gpus, view))
            else:
                kernels.weighted_sum(as_host_bits(parts), [1.0] * len(parts), dtype, view)
        if len(items) > 1 and len(items) == len(run.pieces) and len({item.places for item in items}) == 1:
            marks.append(self._together(run, payload, items))
            return
        for item in items:
            marks.append(self._alone(item))

    def _alone(self, item: _Item) -> DeviceEvent:
        home = self._home(item, item.view.nbytes)
        home.download(summed(home, item.parts, item.dtype).array, item.view)
        return home.mark()

    def _together(self, run: RunPlan, payload: memoryview, items: Sequence[_Item]) -> DeviceEvent:
        home = self._home(items[0], run.nbytes)
        offsets = [item.piece.offset for item in items]
        packed = []
        for place, first in enumerate(items[0].parts):
            device = first.device
            bucket = device.kernels.zeros(run.nbytes, _OCTET)
            device.pack([item.parts[place].array for item in items], offsets, bucket)
            packed.append(OnDevice(device, bucket))
        total = packed[0].array if len(packed) == 1 else _total(home, packed, items)
        home.download(total, np.frombuffer(payload, np.uint8))
        return home.mark()

    def _home(self, item: _Item, nbytes: int) -> Device:
        home = home_of([part.device for part in item.parts], self._load)
        self._load[home.index] += nbytes
        return home


def _total(home: Device, packed: Sequence[OnDevice], items: Sequence[_Item]) -> Array:
    """The sum of packed arrays: one pass for each stretch of one element type, padding included."""
    total = home.kernels.empty(packed[0].size, _OCTET)
    for dtype, stretch in groupby(items, key=lambda item: item.dtype):
        pieces = [item.piece for item in stretch]
        last = pieces[-1]
        stop = last.offset + padded((last.stop - last.start) * dtype.itemsize)
        place = slice(pieces[0].offset, stop)
        parts = [OnDevice(one.device, one.array[place].view(dtype.storage)) for one in packed]
        summed(home, parts, dtype, total[place].view(dtype.storage))
    return total
