"""Custom stores: the interface to implement (`KVStoreBase`), and how a trainer calls such a store (`Adapted`).

A store that implements all of `kvdist.KVStore` satisfies the interface too. A store that implements only the interface
is called as MXNet calls it: key by key, with a list of arrays, an array per device, and a higher priority for
parameters that the next forward pass needs earlier. Such a store gets zeros for a missing gradient, never None; it is
never asked for an average but gets gradients that are already divided.

Write a class like this, and `kvdist.kv.create` accepts its name in lower case::

    @kv.register
    class Mine(kv.KVStoreBase):
        ...

    trainer = Trainer(net.parameters(), 'sgd', kvstore='mine')
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

from kvdist.kvstore.backend import Average
from kvdist.kvstore.registry import register
from kvdist.optimizer.base import Optimizer


class KVStoreBase(abc.ABC):
    """Base class of custom stores: the methods that a `Trainer` calls.

    Keys are the positions of the parameters, 0, 1, 2, …; values are lists of torch tensors, a tensor per device.
    """

    OPTIMIZER = "optimizer"
    """Name of the capability to update values, the only capability that `is_capable` knows."""

    register = staticmethod(register)
    """Same as `kvdist.kv.register`, under MXNet's name: ``@KVStoreBase.register``."""

    @property
    @abc.abstractmethod
    def type(self) -> str:
        """Name with which the store was created."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """Number of this worker, from 0 to `num_workers` - 1."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """Number of workers that share the store."""

    @abc.abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write the `value` of rank 0 into every array of `out`, on every worker, and store it under the key.

        A later call with the same key replaces the value.
        """

    @abc.abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum the arrays of `value` over devices and workers, and write the result into every array of `out`.

        The result is the sum, or with an optimizer the value of the key after an update with that sum. ``out=None``
        writes into `value`.
        """

    @abc.abstractmethod
    def is_capable(self, capability: str) -> bool:
        """Whether the store has a capability; a `Trainer` asks for ``optimizer``: updates by `set_optimizer`."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Any) -> None:
        """Install a `kvdist.optimizer.Optimizer` that updates values from then on; its numbers may change at any time.

        Raises:
            NotImplementedError: the store cannot update values.
        """


class Adapted:
    """A custom store with the methods that a trainer calls.

    Args:
        store: the custom store.
    """

    def __init__(self, store: KVStoreBase) -> None:
        self._store = store

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store."""
        return self._store.num_workers

    @property
    def rank(self) -> int:
        """Rank of this worker."""
        return self._store.rank

    def agree(self, statement: str) -> None:
        """Do nothing: the interface has no method that compares statements of workers."""

    def leave_uncompressed(self, keys: Sequence[int]) -> None:
        """Do nothing: the interface has no compression."""

    def leave_unkept(self, keys: Sequence[int]) -> None:
        """Do nothing: the interface has no such hint."""

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Install the optimizer with which the store updates values."""
        self._store.set_optimizer(optimizer)

    def broadcast(self, keys: Sequence[int], values: Sequence[Any], out: Sequence[list[Any]]) -> None:
        """Set each key to the value of rank 0, on all devices."""
        for key, value, places in zip(keys, values, out, strict=True):
            self._store.broadcast(key, value, places)

    def pushpull(
        self,
        keys: Sequence[int],
        value: Sequence[list[Any] | None],
        out: Sequence[list[Any] | None] | None = None,
        *,
        average: Average = False,
        samples: int = 0,
    ) -> None:
        """Sum each key's arrays and write the result into all arrays of `out`; None for the arrays of `value`.

        Raises:
            NotImplementedError: `average` asks for means over samples.
        """
        if average == "samples":
            raise NotImplementedError(
                f"step(samples=n) is not possible where {type(self._store).__name__} updates the weights, as it cannot"
                " weight gradients: give the Trainer update_on_kvstore=False"
            )
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
