"""Values that workers exchange beside training: sums, means, and arrays of rank 0.

Invariants:

* They travel in a separate store, created at the first call, so the user's keys and optimizer are not touched.
* Every call begins with a barrier at which all workers state what they exchange, so a mistake is an error on all.
* Keys are named by dtype and shape, so a metric that is averaged at each epoch needs a single key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

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
        self._store.agree(f"{'exchange of bytes as' if how is Reduction.SUM else 'average of'} {said}")
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
