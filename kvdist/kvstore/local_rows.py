"""Tables of rows of a `LocalStore`: the same blocks of rows that servers keep, one for each table, in this process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from kvdist.core.server.table_rows import TableRows, obstacle
from kvdist.core.sharding import slices_of
from kvdist.core.worker.requests import KeyInfo
from kvdist.initializer import initializer_from
from kvdist.kernels.interface import Kernels
from kvdist.kvstore.keys import Ids, KeyTable, Rows, described
from kvdist.kvstore.local_saving import HeldTable
from kvdist.kvstore.staging import PushOptions
from kvdist.kvstore.values import Bits, Key
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.messages import ROWS
from kvdist.rowsparse import LazyRows, RowSparse


class LocalRows:
    """The tables of one store.

    Args:
        kernels: what does the arithmetic.
        optimizer: says what updates the store now; None while a sum replaces a value.
    """

    def __init__(self, kernels: Kernels, optimizer: Callable[[], Optimizer | None]) -> None:
        self.keys = KeyTable()
        self.blocks: dict[Key, TableRows] = {}
        self._kernels = kernels
        self._optimizer = optimizer

    def add(self, key: Key, value: RowSparse | LazyRows) -> None:
        """Keep a table that is not known yet; a copy."""
        shape, dtype, form = described(key, [value])
        initializer = None if form == ROWS else initializer_from(form)
        self._require_fit(key, shape, initializer is not None, self._optimizer())
        block = TableRows(key, len(self.blocks), shape, dtype, 0, shape[0], initializer, self._kernels)
        if isinstance(value, RowSparse):
            ids, rows = value.canonical()
            block.put(ids, rows.reshape(-1))
        self.blocks[key] = block
        slices = tuple(slices_of(shape, dtype.itemsize, form, 0, 1, 0, 1))
        self.keys.add(KeyInfo(key, shape, dtype, slices, form=form), value)

    @property
    def held(self) -> list[HeldTable]:
        """What is to be saved, in the order of initialisation."""
        return [HeldTable(block, self.keys[key].form) for key, block in self.blocks.items()]

    def require_fit(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer that cannot update one of the tables."""
        for key, block in self.blocks.items():
            self._require_fit(key, block.shape, block.is_lazy, optimizer)

    def push(self, info: KeyInfo, rows: Rows | None, priority: int, options: PushOptions) -> Future[None]:
        """Update the table by these rows."""
        if rows is not None:
            ids, values = rows
            optimizer = self._optimizer()
            scale = 1.0 if optimizer is None else optimizer.rescale_grad
            self.blocks[info.key].update([(ids, values.reshape(-1))], [scale], optimizer)
        return resolved(None)

    def pull(self, info: KeyInfo, ids: Ids, out: Bits, priority: int) -> Future[None]:
        """Read rows."""
        self.blocks[info.key].gather(ids, out)
        return resolved(None)

    @staticmethod
    def _require_fit(key: Key, shape: tuple[int, ...], is_lazy: bool, optimizer: Optimizer | None) -> None:
        reason = None if optimizer is None else obstacle(optimizer, key, shape, is_lazy)
        if reason:
            raise ValueError(reason)


def resolved(result: Any) -> Future[Any]:
    """A future that has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future
