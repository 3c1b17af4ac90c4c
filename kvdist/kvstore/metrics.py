"""Values that workers exchange beside training: means of metrics, arrays of rank 0, and bytes of every worker.

Invariants:

* They travel in a separate store, created at the first call, so the user's keys and optimizer are not touched.
* Every call begins with a barrier at which all workers state what they exchange, so a mistake is an error on all.
* Keys are named by dtype and shape, so a metric that is averaged at each epoch needs a single key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from kvdist.kvstore import values
from kvdist.kvstore.backend import Reduction
from kvdist.kvstore.base import KVStore

_SHARE = "share of the workers with a value"


class MetricsExchange:
    """The exchange of a store.

    Args:
        make: makes a synchronous store of the same workers.
    """

    def __init__(self, make: Callable[[], KVStore]) -> None:
        self._make = make
        self._store: KVStore | None = None

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        """Return the sums or means of arrays over the workers, or the arrays of rank 0, as new arrays."""
        if not arrays:
            return []
        keys, said = _keys(arrays)
        if self._store is None:
            self._store = self._make()
        if how is Reduction.RANK_0:
            self._store.agree(f"values of rank 0: {said}")
            results = [values.zeros_like(array) for array in arrays]
            self._store.broadcast(keys, list(arrays), out=results)
            return results
        self._store.agree(f"{'sum' if how is Reduction.SUM else 'average'} of {said}")
        return self._summed(self._store, keys, arrays, how)

    def close(self) -> None:
        """Leave the separate store."""
        if self._store is not None:
            self._store.close()

    def _summed(self, store: KVStore, keys: list[str], arrays: Sequence[Any], how: Reduction) -> list[Any]:
        results, share = [values.zeros_like(array) for array in arrays], np.zeros(1)
        counts, is_mean = how is not Reduction.MEAN_OF_OTHERS, how is not Reduction.SUM
        store.init([*keys, _SHARE], [*arrays, share])
        given = [*(array if counts else None for array in arrays), np.full(1, float(counts))]
        # An average divides by the number of all workers, so the share of those with a value is averaged too.
        store.pushpull([*keys, _SHARE], given, out=[*results, share], average=is_mean)
        for result in results if is_mean else ():
            if share[0] == 0:
                result[...] = float("nan")  # what is stored is the mean of an earlier call
            elif share[0] != 1:
                result /= float(share[0])
        return results


def _keys(arrays: Sequence[Any]) -> tuple[list[str], str]:
    """Return a key for each array, and a description of all arrays."""
    seen: Counter[str] = Counter()
    named = []
    for array in arrays:
        shape, dtype = values.describe(array)
        said = f"{dtype.label} of shape {shape}"
        seen[said] += 1
        named.append((f"{said}, {seen[said]}", said))
    return [key for key, _ in named], "; ".join(said for _, said in named)


class Workers(Protocol):
    """Workers that exchange arrays: the backend of a store, or its ranks."""

    rank: int
    num_workers: int

    def reduce(self, arrays: Sequence[Any], how: Reduction) -> list[Any]:
        """See `Backend.reduce`."""


RANKS = 4096
"""Ranks that `gather` tells apart, at least: workers that join a job have higher ranks than those of its start."""


def gather(workers: Workers, content: bytes) -> dict[int, bytes]:
    """Return the bytes of every live worker, by rank. Every worker must call it.

    Each worker adds its bytes to its row of a table, and zeros to the rows of the others.
    """
    sizes = np.zeros(max(RANKS, workers.num_workers), np.int64)
    sizes[workers.rank] = len(content) + 1
    (sizes,) = workers.reduce([sizes], Reduction.SUM)
    ranks = np.flatnonzero(sizes).tolist()
    rows = np.zeros((len(ranks), 1 << int(sizes.max()).bit_length()), np.uint8)  # few widths, so few keys
    rows[ranks.index(workers.rank), : len(content) + 1] = np.frombuffer(content + b"\1", np.uint8)
    (rows,) = workers.reduce([rows], Reduction.SUM)
    ends = sizes[ranks] - 1
    # A row without its last byte is that of a worker that was lost between the two sums.
    return {rank: row[:end].tobytes() for rank, end, row in zip(ranks, ends, rows, strict=True) if row[end]}
