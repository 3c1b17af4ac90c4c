"""`Embedding`: a layer whose rows live on the servers, so a table may be larger than a worker's memory.

`forward` pulls each row of the batch once and looks up ids in these rows; the backward pass computes their gradients;
`step` pushes the gradients, and requests the rows of the next batch if `prefetch` has named it. A worker holds only its
batch's rows.
"""

from __future__ import annotations

import copy
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from kvdist.config.policies import Asynchronous
from kvdist.errors import ConfigError
from kvdist.kvstore import create as create_store
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.rowsparse import LazyRows, RowSparse
from kvdist.kvstore.values import Key
from kvdist.optimizer.initializer import Initializer
from kvdist.schema import real_number
from kvdist.training.trainer_config import require_samples

Ids = npt.NDArray[np.int64]


class _Batch(NamedTuple):
    """The lookups of a forward pass."""

    ids: torch.Tensor
    """Row ids, int64, as in the call."""
    unique: torch.Tensor
    """Each id once, ascending."""
    places: torch.Tensor
    """Position of each id in `unique`; of the shape of `ids`."""
    order: torch.Tensor
    """Positions in the flat `ids`, sorted by id; positions of the same id in ascending order."""
    starts: torch.Tensor
    """Index in `order` of the first position of each id of `unique`."""

    @property
    def rows(self) -> Ids:
        """The rows to be pulled."""
        rows: Ids = self.unique.cpu().numpy()
        return rows


class _Lookup(torch.autograd.Function):
    """`torch.nn.functional.embedding` with a backward pass that is faster on a CPU, for the same sums."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, batch: _Batch) -> torch.Tensor:
        ctx.save_for_backward(batch.places, batch.order, batch.starts)
        return torch.nn.functional.embedding(batch.places, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places, order, starts), grad = ctx.saved_tensors, gradients[0]
        flat = grad.reshape(-1, grad.shape[-1])
        if not grad.is_cpu:  # it keeps the order of the sums there, too
            return torch.ops.aten.embedding_dense_backward(grad, places, len(starts), -1, False), None
        if grad.dtype is torch.float64:  # which torch has no vectorised sum of bags for
            return grad.new_zeros(len(starts), grad.shape[-1]).index_add_(0, places.reshape(-1), flat), None
        return torch.nn.functional.embedding_bag(order, flat, starts, mode="sum"), None


class Embedding(torch.nn.Module):
    """Embedding layer whose table of rows is kept in a store; `step` pushes the gradients of the rows to it.

    The layer has no torch parameters. Set the optimizer with ``store.set_optimizer``, and save the rows with
    ``store.save_checkpoint``. Every worker creates the layer with the same arguments, and calls `step` equally often.

    Args:
        num_embeddings: number of rows of the table.
        embedding_dim: number of elements of a row.
        store: a `KVStore` with an optimizer, or a name for `kvdist.kv.create`.
        key: key of the table in the store; layers with the same key share the table.
        initializer: initial value of the rows: ``zeros``, ``constant(0.5)``, ``uniform(0.07,seed=3)`` or
            ``normal(0.01,seed=3)``. A row takes no memory before its first update.
        dtype: element type, such as ``float32``, ``bfloat16`` or ``torch.float16``.
        padding_idx: id of a row that reads as zeros and has no gradient; None for no such row.

    Raises:
        ValueError: a size is not positive, the initializer is unknown, or `padding_idx` is not a row.
        TypeError: `store` is not a store, or the element type is not a floating-point type that a key may have.
        InitMismatch: workers, or layers with the same key, declare different tables.
        ConfigError: the store has a policy without an exchange in every step, such as `kvdist.diloco`.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        store: KVStore | str,
        key: Key = "embedding",
        initializer: Initializer | str = "normal(0.01)",
        dtype: Any = "float32",
        padding_idx: int | None = None,
    ) -> None:
        super().__init__()
        declared = LazyRows((num_embeddings, embedding_dim), dtype, initializer)
        if not declared.dtype.is_floating:
            raise TypeError(f"rows with gradients cannot be {declared.dtype.label}: use float32, or a half")
        if num_embeddings < 1 or embedding_dim < 1:
            raise ValueError(f"an embedding of shape {(num_embeddings, embedding_dim)} has nothing to look up")
        if padding_idx is not None and not 0 <= padding_idx < num_embeddings:
            raise ValueError(f"padding_idx is {padding_idx}; it must be a row from 0 to {num_embeddings - 1}")
        made = create_store(store) if isinstance(store, str) else store
        if not isinstance(made, KVStore):
            raise TypeError(f"store must be a kvdist store or the name of one, not {type(store).__name__}")
        policy = made._backend.policy
        if policy is not None:
            is_async = isinstance(policy, Asynchronous)
            why = "servers weigh or drop late gradients" if is_async else "workers do not push in each step"
            raise ConfigError(
                f"the table {key!r} needs an update in each step, but its store has the policy {policy}, under which"
                f" {why}: pass the policy to the store of the Trainer alone, kv.create('dist', policy=...), and give"
                f" the table another store, kv.create({'dist_async' if is_async else 'dist'!r})"
            )
        self.num_embeddings = num_embeddings
        self.embedding_dim = embedding_dim
        self.key = key
        self.padding_idx = padding_idx
        self._store = made
        self._shape = (num_embeddings, embedding_dim)
        self._used: list[tuple[Ids, torch.Tensor]] = []
        """Ids and rows of the forward passes since the last `step`."""
        self._wanted: _Batch | None = None
        """Named by `prefetch` and not yet requested from the store."""
        self._coming: tuple[_Batch, Future[RowSparse]] | None = None
        made.init(key, declared)

    def __deepcopy__(self, memo: dict[int, Any]) -> Embedding:
        """Another layer of the same table. Rows are not copied; gradients waiting for `step` stay with this layer."""
        made = self.__class__.__new__(self.__class__)
        memo[id(self)] = made
        fresh = {"_store": self._store, "_used": [], "_wanted": None, "_coming": None}
        kept = {name: copy.deepcopy(value, memo) for name, value in self.__dict__.items() if name not in fresh}
        made.__dict__.update(kept | fresh)
        return made

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to be pickled, as by ``torch.save(model)``.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"the rows of the Embedding {self.key!r} live on a store, which cannot be pickled: save the other layers by"
            " state_dict(), and the rows by store.save_checkpoint"
        )

    def extra_repr(self) -> str:
        """Return the arguments for ``print``."""
        return f"{self.num_embeddings}, {self.embedding_dim}, key={self.key!r}, store={self._store!r}"

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Look up rows.

        Args:
            ids: integer tensor of any shape, on any device.

        Returns:
            A tensor of shape (*ids.shape, embedding_dim) on the device of `ids`.

        Raises:
            TypeError, ValueError: an id is not an integer, or not a row of the table.
        """
        batch = self._batch_of(_checked(ids))
        rows = self._rows(batch).to(ids.device)
        if self.padding_idx is not None:
            rows[batch.unique == self.padding_idx] = 0
        if torch.is_grad_enabled() and self.training:
            rows.requires_grad_()
            self._used.append((batch.rows, rows))
        if not rows.requires_grad:
            return torch.nn.functional.embedding(batch.places, rows)
        looked_up: torch.Tensor = _Lookup.apply(rows, batch)  # type: ignore[no-untyped-call]
        return looked_up

    def prefetch(self, ids: torch.Tensor) -> None:
        """Start to pull the rows that the next forward pass will look up.

        The request is sent at once, or, while gradients wait for `step`, after they are pushed; after a `step` that
        precedes the pass, it is sent again. So the rows are those that `forward` would pull. Only a change from outside
        this layer, such as by a second layer with the same key or by `load_checkpoint`, may be missed. A forward pass
        with other ids pulls their rows.

        Args:
            ids: as in `forward`.
        """
        with torch.inference_mode(False):  # the backward pass of training may need what is made here
            self._wanted = self._batch_of(_checked(ids).clone())  # who gave them may write over them
        if not self._used:
            self._ask()

    def step(self, batch_size: float | None = None, *, samples: int | None = None) -> None:
        """Push the gradients of all forward passes since the last call. Returns at once.

        Every worker calls it after each backward pass, even if its batch had no ids, because the empty push counts. If
        the job waits for lost workers (``KVDIST_ON_LOSS=wait``), the call returns when the gradients are counted.

        Args:
            batch_size: None for losses that are means; gradients are averaged over the workers, as by
                ``Trainer.step()``. A number for losses that are sums; the gradients of this worker are divided by it,
                then summed over the workers.
            samples: number of examples over which the loss of this worker is the mean, as in
                ``Trainer.step(samples=n)``.

        Raises:
            OptimizerMismatch: only some workers pass `samples`.
            ValueError: a number is not positive, or both numbers are set; or the store has no optimizer, so that
                gradients would replace the table.
        """
        if not self._store.has_optimizer:
            raise ValueError(
                f"the store of the Embedding {self.key!r} has no optimizer, so gradients would replace its rows: call"
                " store.set_optimizer on every worker"
            )
        if batch_size is not None and not 0 < real_number("batch_size", batch_size) < float("inf"):
            raise ValueError(f"batch_size is {batch_size}; it must be a positive number")
        if samples is not None:
            samples = require_samples(samples, batch_size)
        used, self._used = self._used, []
        if self._wanted is None and self._coming is not None:  # asked for before this push, so they lack its update
            self._wanted, self._coming = self._coming[0], None
        grads = [(ids, rows.grad) for ids, rows in used if rows.grad is not None]
        gradient = self._gradient(grads, batch_size)
        average: Average = batch_size is None if samples is None else "samples"
        if self._store.on_loss == "wait":
            # Who repeats a step of a lost worker finds it only if nobody is further than the next one.
            self._store.push_async(self.key, gradient, average=average, samples=samples or 0).result()
        else:
            self._store.push(self.key, gradient, average=average, samples=samples or 0)
        self._ask()

    def _gradient(self, grads: list[tuple[Ids, torch.Tensor]], batch_size: float | None) -> RowSparse | None:
        """The gradient to push; None if no backward pass has reached a row."""
        if not grads:
            return None
        ids = np.concatenate([ids for ids, _ in grads]) if len(grads) > 1 else grads[0][0]
        values = torch.cat([grad for _, grad in grads]) if len(grads) > 1 else grads[0][1]
        if batch_size is not None:
            values = values / batch_size
        if self.padding_idx is not None:
            is_row = ids != self.padding_idx
            ids, values = ids[is_row], values[torch.from_numpy(is_row).to(values.device)]
        return RowSparse(ids, values, self._shape)

    def _ask(self) -> None:
        """Request the rows of the batch that `prefetch` has named."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._coming = wanted, self._store.row_sparse_pull_async(self.key, row_ids=wanted.rows)

    def _batch_of(self, ids: torch.Tensor) -> _Batch:
        """The lookups of these ids: the batch that `prefetch` has prepared for the same ids, else a new batch."""
        if self._coming is not None:
            batch = self._coming[0]
            if batch.ids.device == ids.device and torch.equal(batch.ids, ids):
                return batch
        ascending, order = torch.sort(ids.reshape(-1), stable=True)
        unique, numbers, counts = torch.unique_consecutive(ascending, return_inverse=True, return_counts=True)
        places = torch.empty_like(numbers)
        places[order] = numbers
        return _Batch(ids, unique, places.view(ids.shape), order, counts.cumsum(0) - counts)

    def _rows(self, batch: _Batch) -> torch.Tensor:
        """A new tensor with the current values of the rows of a batch."""
        coming, self._coming = self._coming, None
        if coming is not None and np.array_equal(coming[0].rows, batch.rows):
            pulled = coming[1].result()
        else:
            pulled = self._store.row_sparse_pull(self.key, row_ids=batch.rows)
        values = pulled.values
        return torch.from_numpy(values) if isinstance(values, np.ndarray) else values


def _checked(ids: torch.Tensor) -> torch.Tensor:
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype is torch.bool:
        what = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise TypeError(f"ids are a tensor of integers, not {what}; torch.as_tensor(ids, dtype=torch.int64) makes one")
    return ids.detach().to(torch.int64)
