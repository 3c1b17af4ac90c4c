"""The least that a store of your own must do for a `Trainer`: the contract of the mirrored system's ``KVStoreBase``.

A store that does all of `kvdist.KVStore` does this too. One that does only this is called by the Trainer as the
mirrored system's is: key by key, with a list of arrays, one per device, and a priority that is higher for parameters
that the next forward pass needs earlier. Such a store is never given None for a missing gradient (it gets zeros), and
never asked for an average (it gets gradients that are divided already).

Write a class like this, and `kvdist.kv.create` knows it by its name in lower case::

    @kv.register
    class Mine(kv.KVStoreBase):
        ...

    trainer = Trainer(net.parameters(), 'sgd', kvstore='mine')
"""

from __future__ import annotations

import abc
from typing import Any

from kvdist.kvstore.own import register

OPTIMIZER = "optimizer"
"""The capability to update values; the one that `KVStoreBase.is_capable` is asked for."""


class KVStoreBase(abc.ABC):
    """What a `Trainer` needs of a store; derive from it for one of your own.

    Keys are the positions of the parameters, 0, 1, 2, …; values are torch tensors.
    """

    register = staticmethod(register)
    """`kvdist.kv.register`, where the mirrored system has it: ``@KVStoreBase.register``."""

    @property
    @abc.abstractmethod
    def type(self) -> str:
        """The name with which the store was created."""

    @property
    @abc.abstractmethod
    def rank(self) -> int:
        """This worker's number, from 0 to `num_workers` - 1."""

    @property
    @abc.abstractmethod
    def num_workers(self) -> int:
        """How many workers share the store."""

    @abc.abstractmethod
    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """Write rank 0's `value` into every array of `out`, on every worker, and remember it as the key's.

        A later call for the same key gives it another value.
        """

    @abc.abstractmethod
    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        """Sum the arrays of `value` over devices and workers, and write the result into every array of `out`.

        The result is the sum; with an optimizer it is the value of the key, updated with that sum. ``out=None`` means
        into `value`.
        """

    @abc.abstractmethod
    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something; asked for ``optimizer``: update values by `set_optimizer`."""

    @abc.abstractmethod
    def set_optimizer(self, optimizer: Any) -> None:
        """Update values with this `kvdist.optimizer.Optimizer` from now on, whose numbers may change at any time.

        Raises:
            NotImplementedError: the store is not capable of it.
        """
