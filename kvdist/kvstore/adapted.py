"""Calls a store that keeps `KVStoreBase` and nothing more, in the way in which a trainer calls a `KVStore`.

Key by key, as the mirrored system's trainer does. What such a store does not know (no gradient, an average) is made
up for here with copies, so that what the user has is not written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvdist.kvstore.contract import KVStoreBase
from kvdist.optimizer.base import Optimizer


class Adapted:
    """A store of the user's own, for a trainer.

    Args:
        store: it keeps the contract.
    """

    def __init__(self, store: KVStoreBase) -> None:
        self._store = store

    @property
    def num_workers(self) -> int:
        """How many workers share the store."""
        return self._store.num_workers

    def agree(self, statement: str) -> None:
        """Nothing: the contract has no way to compare what workers say."""

    def leave_uncompressed(self, keys: Sequence[int]) -> None:
        """Nothing: the contract knows no compression."""

    def leave_unkept(self, keys: Sequence[int]) -> None:
        """Nothing: the contract has no such hint."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Let the store update."""
        self._store.set_optimizer(optimizer)

    def broadcast(self, keys: Sequence[int], values: Sequence[Any], out: Sequence[list[Any]]) -> None:
        """Give each key the value of rank 0, on all devices."""
        for key, value, places in zip(keys, values, out, strict=True):
            self._store.broadcast(key, value, places)

    def pushpull(
        self,
        keys: Sequence[int],
        value: Sequence[list[Any] | None],
        out: Sequence[list[Any] | None] | None = None,
        *,
        average: bool = False,
        samples: int = 0,
    ) -> None:
        """Sum each key's arrays and write the result into all of `out`; None for what was given."""
        divisor = self._store.num_workers if average else 1
        for position, (key, given, places) in enumerate(zip(keys, value, out or value, strict=True)):
            assert places is not None, "a result needs a place"
            if given is None:
                arrays = [places[0].detach().new_zeros(places[0].shape)]
            elif divisor != 1:
                arrays = [array / divisor for array in given]
            else:
                arrays = given
            self._store.pushpull(key, arrays, places, -position)
