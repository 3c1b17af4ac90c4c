"""Values that workers exchange beside training: means of metrics, and what rank 0 has.

Invariants:

* They travel in a store of their own, made when it is first needed, so the user's keys and optimizer are not touched.
* Every call begins with a barrier at which all workers state what they exchange, so a mistake is an error on all.
* Keys are named by dtype and shape, so a metric that is averaged at each epoch is one key.
"""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvdist.kvstore import values
from kvdist.kvstore.base import KVStore

_SHARE = "share of the workers with a value"


class MetricsExchange:
    """The exchange of one store.

    Args:
        make: makes a synchronous store of the same workers.
    """

    def __init__(self, make: Callable[[], KVStore]) -> None:
        self._make = make
        self._store: KVStore | None = None

    def average(self, value: Any, counts: bool) -> Any:
        """See `KVStore.average`."""
        array = as_averaged(value)
        (key,), said = _keys([array])
        store = self._agreed(f"average of {said}")
        result, share = like(array), np.zeros(1)
        store.init([key, _SHARE], [array, share])
        mine = np.ones(1) if counts else np.zeros(1)
        # A worker without a value counts in the divisor of an average, so the share of those with one is averaged too.
        store.pushpull([key, _SHARE], [array if counts else None, mine], out=[result, share], average=True)
        if share[0] == 0:
            result[...] = float("nan")  # what is stored is the mean of an earlier call
        elif share[0] != 1:
            result /= float(share[0])
        return as_given(value, result)

    def from_rank_0(self, arrays: Sequence[Any]) -> list[Any]:
        """See `KVStore.from_rank_0`."""
        if not arrays:
            return []
        keys, said = _keys(arrays)
        store = self._agreed(f"values of rank 0: {said}")
        results = [like(array) for array in arrays]
        store.broadcast(keys, list(arrays), out=results)
        return results

    def close(self) -> None:
        """Leave the store, if there is one."""
        if self._store is not None:
            self._store.close()

    def _agreed(self, statement: str) -> KVStore:
        if self._store is None:
            self._store = self._make()
        self._store.agree(statement)
        return self._store


def as_averaged(value: Any) -> Any:
    """The value as an array or tensor of a floating type, which nobody else has.

    Raises:
        TypeError: it is neither a number nor an array that a store could hold.
    """
    if isinstance(value, numbers.Number | np.generic) and not isinstance(value, complex | np.complexfloating):
        return np.array(value, np.float64)
    if isinstance(value, np.ndarray):
        return value.astype(np.float64) if value.dtype.kind in "biu" else _described(value).copy()
    if values.is_tensor(value):
        tensor = value.detach()
        is_whole = not tensor.is_floating_point() and not tensor.is_complex()
        return tensor.double() if is_whole else _described(tensor).clone()
    raise TypeError(f"average takes a number, a NumPy array or a torch tensor, not {type(value).__name__}")


def as_given(value: Any, result: Any) -> Any:
    """The result in the form of what was given: a float for a number."""
    return float(result) if isinstance(value, numbers.Number | np.generic) else result


def like(array: Any) -> Any:
    """A new array of the kind, shape and dtype of a value, with zeros."""
    return array.detach().new_zeros(array.shape) if values.is_tensor(array) else np.zeros_like(array)


def _described(value: Any) -> Any:
    values.describe(value)
    return value


def _keys(arrays: Sequence[Any]) -> tuple[list[str], str]:
    """A key for each array, and all of them in words."""
    seen: Counter[str] = Counter()
    named = []
    for array in arrays:
        shape, dtype = values.describe(array)
        said = f"{dtype.label} of shape {shape}"
        seen[said] += 1
        named.append((f"{said}, {seen[said]}", said))
    return [key for key, _ in named], "; ".join(said for _, said in named)
