"""`KVStore`: the methods of every store, implemented over the primitives of a `Backend`.

Invariants of every store:

- A *key* is an `int` or a `str`; a call takes a single key or a list of them, never both types at once.
- A *value* is a NumPy array or a torch tensor of the types of `kvdist.dtypes`, or some rows of a table: a `RowSparse`
  or a sparse COO tensor. For a single key it may be a list of them, one per device, which are summed. For a list of
  keys it is a list of as many values.
- ``None`` in place of a pushed value means "no gradient on this worker": an empty contribution that counts, so no
  worker waits for it.
- Arguments are never written (except where a result goes in place) and never kept by reference. Results never change
  after they are returned.
- A list call handles its keys in the order of the list; a higher `priority` overtakes a lower one.
- Mistakes of the caller raise at the call. A failure of a peer fails the call that waits for it.
"""

from __future__ import annotations

import builtins
import contextlib
import math
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from kvdist.errors import KvdistError, OptimizerMismatch, StoreClosed, failure_of
from kvdist.kvstore import values as _values
from kvdist.kvstore.adapter import KVStoreBase
from kvdist.kvstore.backend import (
    PLAIN,
    Ability,
    Average,
    Backend,
    Lending,
    LoadJob,
    MembershipWatcher,
    PushOptions,
    PushPull,
    Reduction,
    SaveJob,
)
from kvdist.kvstore.registry import require_body, require_head
from kvdist.kvstore.sparse import MixedTransfers
from kvdist.kvstore.values import Key, Keys, UpdaterFunction, Value
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create
from kvdist.optimizer.states import SliceState
from kvdist.removed import AVERAGES_ELSEWHERE, removed_keywords

if TYPE_CHECKING:
    from kvdist.kvstore.checkpoints import Checkpoint


class KVStore(KVStoreBase):
    """Key-value store of arrays, shared by the devices of a process and by the workers of a cluster.

    A key is an `int` or a `str`; a call takes a single key or a list of keys of the same type. A value is a NumPy
    array, a torch tensor, or some rows of a table: a `RowSparse` or a sparse COO tensor. For a single key the value may
    also be a list of arrays, one per device, which the store sums. For a list of keys it is a list of as many values.
    ``None`` as a pushed value means that this worker has no gradient for the key; the empty contribution counts, so no
    worker waits for it. Arguments are never changed, except where a result is written in place, and returned arrays
    never change later.

    Every method that transfers values raises:

    - `StoreClosed` after `close()`;
    - `KeyNotInitialised` for a key that was not passed to `init` or `broadcast` before;
    - `TypeError` for a key or a value of a wrong type, `ValueError` for a wrong shape;
    - on a cluster `PeerLostError` if a process that the call waits for is lost, and `DeadlockError` if workers wait for
      each other.

    Args:
        backend: implementation of the store. Users call `kvdist.kv.create` with a name instead.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._mixed = MixedTransfers(backend)
        self._closed = False
        self._calls_at_close: list[Callable[[bool], None]] = []

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"worker {self.rank} of {self.num_workers}, {self._backend.holdings}"
        return f"<{self.type} store, {state}>"

    @property
    def type(self) -> str:
        """Name with which the store was created, such as ``dist``."""
        return self._backend.type

    @property
    def rank(self) -> int:
        """Number of this worker, from 0 to `num_workers` - 1."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """Number of workers that share the store; 1 for stores within a process."""
        return self._backend.num_workers

    @property
    def num_servers(self) -> int:
        """Number of servers that hold the values; 0 for stores within a process."""
        return self._backend.num_servers

    @property
    def has_optimizer(self) -> bool:
        """Whether this process has called `set_optimizer`: then a push is a gradient, else a sum replaces the value."""
        return self._backend.optimizer is not None

    def num_dead_nodes(self) -> int:
        """Number of processes of the cluster that are known to be lost. Sends no message, and also works after a loss.

        The number is 0 as long as calls succeed, because a loss ends the job unless ``KVDIST_ON_LOSS`` is ``wait`` or
        ``continue``. Workers that left by `close` are not lost. A worker that the cluster has given up counts itself.
        """
        return self._backend.num_dead_nodes()

    @property
    def on_loss(self) -> str:
        """Effect of the loss of a worker (``KVDIST_ON_LOSS``).

        ``fail``: the job ends. ``wait``: the other workers wait until it is started again. ``continue``: they go on
        without it.
        """
        return self._backend.on_loss

    @property
    def members(self) -> tuple[int, ...]:
        """Ranks of the present workers, ascending: workers that neither left nor were lost."""
        return self._backend.members

    def on_membership_change(self, function: MembershipWatcher) -> None:
        """Register ``function(before, after)``, to be called with the old and the new `members` after each change.

        The next call on this store runs the function first, on the calling thread. Several functions run in the order
        of registration. An exception of a function leaves the call.
        """
        self._backend.watchers.append(function)

    def on_rollback(self, function: Callable[[int], None]) -> None:
        """Register ``function(step)``, to be called when all workers go back to the snapshot of `step`.

        This happens when a server is lost (``KVDIST_SNAPSHOTS``).

        The function runs on the user's thread: in the call that raises `RolledBackError`, just before the error, or in
        ``Trainer.step()``, which returns normally. Several functions run in the order of registration.
        """
        self._backend.rollback_watchers.append(function)

    # Keys.

    def init(self, key: Keys, value: Value) -> None:
        """Give keys their first value. Returns when every worker has declared the keys.

        The value of rank 0 is stored; the other ranks only declare shape and dtype. A second `init` of a key with the
        same shape and dtype changes nothing.

        Args:
            key: a key or a list of keys.
            value: an array, or a list with an array per key. Of several arrays per key only the first is used.

        Raises:
            InitMismatch: two workers, or two calls, declare different shapes or dtypes for a key.
            ConfigError: the job waits for lost workers (``KVDIST_ON_LOSS=wait``), the store has an optimizer, and two
                steps are complete. A worker that returns could not take part in the earlier rounds of the new key.
        """
        self._begin()
        with self._backend.reporting():
            given = _values.pairs(key, value)
        self._backend.declare(given)

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Copy the value of rank 0 into the store and into `out` on every worker. Returns when the value has arrived.

        For a new key it is `init` and `pull`. A key that already has a value gets the value of rank 0 instead, and
        keeps its optimizer state; weights that rank 0 has loaded from a file reach all workers in this way. Every
        worker must call it.

        Args:
            key: a key or a list of keys.
            value: as in `init`; only the value of rank 0 is read.
            out: as in `pull`.
            priority: keys with a higher number are sent first.
        """
        self._begin()
        with self._backend.reporting():
            given = _values.pairs(key, value)
        self._backend.replace(given, key, out, priority)

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Exempt keys from gradient compression. Every worker calls it, before `init` of the keys.

        Args:
            keys: a list of keys.

        Raises:
            ValueError: a key is already initialised and compressed.
        """
        self._begin()
        self._backend.leave_uncompressed(keys)

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        """Announce that keys are only used with `pushpull` and never pulled. Call it before `init` of the keys.

        It is a hint: a store without servers then keeps no copy of their sums.

        Args:
            keys: a list of keys.
        """
        self._begin()
        self._backend.leave_unkept(keys)

    def expect_rows(self, keys: Sequence[Key]) -> None:
        """Announce that most gradients of the keys are sparse: a few rows each. Call it before `init` of the keys.

        It is a hint, and must be the same on every worker: the store ``hybrid`` keeps such keys on servers.

        Args:
            keys: a list of keys.
        """
        self._begin()
        self._backend.expect_rows(keys)

    # Values.

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: Average = False, samples: int = 0) -> None:
        """Add a contribution to keys. The store sums it over devices, then over workers, and applies the sum.

        With an optimizer or updater the sum is the gradient of an update; without, it replaces the value. If no device
        of any worker has a value for a key, its stored value stays. The call returns at once, unless pushes that no
        server has counted yet take more than ``KVDIST_UNDER_WAY_BYTES``. The caller may change `value` as soon as the
        call has returned. The next call on the store raises an error that occurs later.

        Args:
            key: a key or a list of keys.
            value: a value per key as described for the class; ``None`` for a key without a gradient on this worker.
            priority: keys with a higher number are sent first.
            average: False for the sum. True divides it by the number of all workers, including workers that push
                ``None``, but not by the number of devices. Integers are rounded toward zero; on servers several workers
                can average only floats. On ``dist_async`` each push is an update by itself and is divided by 1.
                ``'samples'`` is for values that are means over `samples` examples: the result is the mean over the
                examples of all workers, and all of them must pass it. It needs a ``dist`` store, and changes nothing on
                a local store.
            samples: number of examples behind the values, which servers count; 0 if unknown.
        """
        self._begin()
        options = PushOptions(average, samples) if average or samples else PLAIN
        self._transfer(PushPull(key, value, None, priority, Lending.NOTHING, options, pulls=False))

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: Average = False, samples: int = 0
    ) -> Future[None]:
        """Start a `push` and return a future that resolves when the contribution has been counted."""
        self._begin()
        options = PushOptions(average, samples)
        return self._transfer(PushPull(key, value, None, priority, Lending.RESIDENT, options, pulls=False))

    @removed_keywords(average=AVERAGES_ELSEWHERE)
    def pull(self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True) -> Any:
        """Copy the values of keys into `out`, or into new arrays. Blocks until they have arrived.

        The values include at least every earlier push of this worker.

        Args:
            key: a key or a list of keys.
            out: an array per key, or several, of the shape declared in `init`. Every array is written, and values are
                converted to its dtype. None creates new arrays.
            priority: keys with a higher number are sent first.
            ignore_sparse: treatment of tables of rows. True leaves a `RowSparse` in `out` unchanged, and is an error
                without `out`. False pulls all rows. A dense array in `out` gets all rows in both cases.

        Returns:
            None, or with ``out=None`` a new array per key, of the kind passed to `init`: an array for a single key, a
            list for a list.
        """
        self._begin()
        call = PushPull(key, None, out, priority, Lending.EVERYTHING, PLAIN, False, True, ignore_sparse)
        return self._result_of(self._transfer(call))

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """Start a `pull` and return a future of its result. Do not touch `out` until the future resolves."""
        self._begin()
        return self._transfer(PushPull(key, None, out, priority, Lending.RESIDENT, PLAIN, False, True, ignore_sparse))

    def pushpull(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: Average = False,
        samples: int = 0,
    ) -> None:
        """Push keys and pull their new values in a single round trip. Blocks until the values are written.

        The new values are those that include this push: with an optimizer or updater the updated weights, without one
        the sum of the contributions (their mean with `average`). A synchronous ``dist`` store has them when every live
        worker has pushed the key, so the call waits for all; ``dist_async`` and local stores have them at once.

        Args:
            key: a key or a list of keys.
            value: values to push, as in `push`.
            out: arrays for the result, as in `pull`; None writes the result into every array of `value`.
            priority: keys with a higher number are sent first.
            average, samples: as in `push`.
        """
        # The caller waits, so large arrays are sent from where they are: a pass over the bytes less, and the first of
        # them are under way at once.
        self._begin()
        options = PushOptions(average, samples) if average or samples else PLAIN
        self._result_of(self._transfer(PushPull(key, value, out, priority, Lending.EVERYTHING, options)), lends=True)

    def pushpull_async(
        self,
        key: Keys,
        value: Value,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: Average = False,
        samples: int = 0,
    ) -> Future[None]:
        """Start a `pushpull` and return its future. Do not touch `out` (or `value`, in place) until it resolves."""
        self._begin()
        return self._transfer(PushPull(key, value, out, priority, Lending.RESIDENT, PushOptions(average, samples)))

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: Average = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull` that returns large results as views of the shared memory of servers on this host, without a copy.

        A view is valid until the next `pushpull_shared` of its key; some time after that call has returned, it shows
        another version. Do not write to a view: other processes would not see the change, and later results at the same
        address would show it. `broadcast` of the key repairs such a value.

        Args:
            key, value, priority, average, samples: as in `pushpull`.
            out: arrays for results that cannot be shown: from a server on another host, or of a small key.

        Returns:
            A list with an entry per key: a view of the shape and dtype of the key, or None if the result was written
            into `out`.
        """
        self._begin()
        call = PushPull(key, value, out, priority, Lending.EVERYTHING, PushOptions(average, samples), shared=True)
        shown: list[Any] | None = self._result_of(self._transfer(call), lends=True)
        return [None] * len(_values.pairs(key, out)) if shown is None else shown

    def pushpull_clipped(
        self,
        key: Keys,
        value: Value,
        clip_norm: float,
        out: Value | None = None,
        priority: int = 0,
        *,
        average: Average = False,
        samples: int = 0,
    ) -> float:
        """`pushpull` of gradients that servers clip by their global norm, as ``torch.nn.utils.clip_grad_norm_`` does.

        The norm is the L2 norm over all keys of the call, of the sums over all workers (of the means with `average`),
        multiplied by the optimizer's `rescale_grad`. No key is updated before the norm is known. The call costs an
        additional small message to and from each server, and a pass over the gradients on the servers. Every worker
        must pass the same keys and the same `clip_norm`.

        Args:
            key, value, out, priority, average, samples: as in `pushpull`.
            clip_norm: largest norm, above 0.

        Returns:
            The norm before clipping, computed in float64 and equal on all workers.

        Raises:
            FloatingPointError: the norm is not finite. All workers get the error, and the values stay unchanged.
            NotImplementedError: the store is not a synchronous ``dist`` store.
            OptimizerMismatch: workers pass different values of `clip_norm`.
            TypeError: a key is a table of rows.
        """
        self._begin(Ability.CLIPPING)
        if not clip_norm > 0:
            raise ValueError(f"clip_norm is {clip_norm}; the largest norm of a gradient must be more than 0")
        call = PushPull(key, value, out, priority, Lending.EVERYTHING, PushOptions(average, samples))
        norm = self._backend.pushpull_clipped(call, clip_norm)
        if self._backend.errors:  # of a push that this call was to see
            raise self._backend.errors.popleft()
        return norm

    def row_sparse_pull(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Any:
        """Pull some rows of tables: keys whose first value was a `RowSparse`, a sparse tensor or a `LazyRows`.

        The rows include at least every earlier push of this worker.

        Args:
            key: a key or a list of keys.
            out: a `RowSparse` of the table's shape, whose rows are replaced, or several, which all get the same rows;
                for a list of keys, a list with an entry per key. None creates new objects.
            priority: keys with a higher number are sent first.
            row_ids: integers of any shape and order, repetitions allowed: an array, a tensor or a list. For a list of
                keys, a single set of ids for all keys or a list of as many sets. For several results of a single key, a
                list of as many sets.

        Returns:
            None, or with ``out=None`` a `RowSparse` per key, with each requested row once, in ascending order; for a
            single key the `RowSparse` alone.

        Raises:
            TypeError: the key is an array, an id is not an integer, or `out` is not a `RowSparse`.
            ValueError: an id is not a row of the table, or lists differ in length.
        """
        return self._result_of(self.row_sparse_pull_async(key, out, priority, row_ids))

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Future[Any]:
        """Start a `row_sparse_pull` and return a future of its result. Do not touch `out` until the future resolves."""
        self._begin(Ability.ROWS)
        return self._mixed.pull_rows(key, out, priority, row_ids)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Create an uninitialised NumPy array that the store can send without copying it.

        On a cluster the array lies in shared memory, which servers of this host read directly. Do not change it until a
        `pushpull`, or the future of `push_async` or `pushpull_async`, is done. A forked child process shares the array
        with its parent.

        Args:
            shape: number of elements, or a sequence of dimensions.
            dtype: a name, a NumPy dtype or a torch dtype, except bfloat16, which only torch tensors have (`TypeError`).

        Returns:
            A `numpy.ndarray` of this shape and dtype.
        """
        wanted = _values.as_numpy_dtype(dtype)
        lengths = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
        return self._backend.allocate(math.prod(lengths) * wanted.itemsize).view(wanted).reshape(lengths)

    # All workers together.

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker has called `barrier`.

        Pushes in flight are not awaited. With ``dist_async``, pull before the barrier the values that other workers
        must see after it.

        Args:
            timeout: seconds; None waits as long as the other workers live.

        Raises:
            BarrierTimeout: some workers did not arrive in time; `missing` holds their ranks.
            ValueError: `timeout` is not positive.
        """
        self._begin()
        if timeout is not None and not (isinstance(timeout, float | int) and timeout > 0):
            raise ValueError(
                f"the time-out of a barrier is {timeout!r}; it must be a positive number of seconds, or None"
            )
        self._backend.meet(timeout)

    def agree(self, statement: str) -> None:
        """Wait until every worker has called `agree`, and require all of them to pass the same text.

        A program calls it before the first gradient, to detect workers that were started with different settings. A
        worker that joins a running job passes before its first push; only the description of the model by its `Trainer`
        is compared.

        Args:
            statement: text of at most 8192 bytes in UTF-8; bytes beyond that are not compared.

        Raises:
            InitMismatch: the texts differ. All workers get the error, which quotes the text of each.
        """
        self._begin()
        self._backend.meet(statement=statement)

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """Return the mean over the workers of a number or an array, such as a loss or an accuracy.

        Every worker must call it, with the same shape and dtype, and waits for the others. Keys and optimizer of the
        store are not involved.

        Args:
            value: a number, a NumPy array, or a torch tensor. Integers and booleans are averaged as float64.
            counts: False excludes the value of this worker, for example because it had no examples; `value` must still
                have the right shape. If no worker counts, the result is NaN.

        Returns:
            A float for a number, otherwise a new array or tensor of the kind and shape of `value`.

        Raises:
            InitMismatch: workers pass different shapes or dtypes; the message lists both.
        """
        self._begin()
        with self._backend.reporting():
            array = _values.as_averaged(value)
        (mean,) = self._backend.reduce([array], Reduction.MEAN if counts else Reduction.MEAN_OF_OTHERS)
        return _values.as_given(value, mean)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """Return copies of the arrays of rank 0. Every worker must call it, with the same shapes and dtypes.

        Keys and optimizer of the store are not involved.

        Args:
            values: NumPy arrays or torch tensors of the types of `kvdist.dtypes`; only the values of rank 0 are read.

        Returns:
            A list of new arrays, of the kinds, shapes and dtypes of `values`.

        Raises:
            InitMismatch: workers pass different shapes or dtypes; the message lists both.
        """
        self._begin()
        with self._backend.reporting():
            for value in values:
                _values.describe(value)
        return self._backend.reduce(values, Reduction.RANK_0)

    # What is done to the values.

    def is_capable(self, capability: str) -> bool:
        """Whether the store has a capability; the only one is ``optimizer``, the ability to update values itself.

        Args:
            capability: ``optimizer``, in any case.

        Raises:
            ValueError: the capability is unknown.
        """
        if capability.lower() != self.OPTIMIZER:
            raise ValueError(f"unknown capability {capability!r}; the only capability is {self.OPTIMIZER!r}")
        return Ability.OPTIMIZER in self._backend.abilities

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Install an optimizer. From then on a push is a gradient, and the store updates the values.

        The store keeps a reference to the object: each push reads its learning rate, multipliers and `rescale_grad`.
        Every worker calls `set_optimizer` before its first push. Servers use the optimizer from the first of these
        calls on, also for a push of another worker that is already in flight.

        Args:
            optimizer: an `Optimizer`, or the name of an optimizer.
            hyperparameters: hyper-parameters for a name, such as ``learning_rate=0.1``.

        Raises:
            OptimizerMismatch: another worker, or an earlier call, has chosen a different optimizer.
            NotImplementedError: the store cannot update values (`is_capable`).
        """
        self._begin(Ability.OPTIMIZER)
        chosen = create(optimizer, **hyperparameters)
        present = self._backend.optimizer
        with self._backend.reporting():
            if present is not None and chosen.rule() != present.rule():
                raise OptimizerMismatch(
                    f"this store updates its values with {present}; it cannot be changed to {chosen}. Create a second"
                    " store for that"
                )
        self._backend.set_optimizer(chosen)

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Install a function that updates values: ``updater(key, received, stored)`` must change `stored` in place.

        Both arrays are of the kind passed to `init`. Only stores within a process can run a function.

        Raises:
            TypeError: `updater` is not callable, or the values are on servers.
        """
        self._begin(Ability.UPDATER)
        if not callable(updater):
            raise TypeError(f"an updater is a function of (key, received, stored), not {type(updater).__name__}")
        self._backend.set_updater(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress later pushes of float32 keys.

        The rounding error of a push stays on this worker, per key, and is added to the next push. Every worker calls it
        with the same parameters before the first key is initialised. A second call with the same parameters changes
        nothing.

        Args:
            compression_params: a dict. ``type`` is ``2bit`` or ``1bit`` (with a ``threshold``, default 0.5), ``fp16``,
                ``bf16``, ``int8``, ``int4``, or ``topk`` (with a ``ratio``, default 0.01). ``pull``, ``fp16`` or
                ``bf16``, also rounds pulled values; stores within a process ignore it.

        Raises:
            TypeError, ValueError: the parameters are wrong, the store has other ones, a key is already initialised, or
                the store does not compress (``local``, ``nccl``).
            InitMismatch: another worker passes other parameters.
        """
        self._begin(Ability.COMPRESSION)
        self._backend.compress(compression_params)

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Run the handler for `head` on every server. Returns when all servers have run it.

        Handlers are registered with `kvdist.kv.register_command`, in modules that the servers import at start
        (``--server-module``). A server runs a handler between two messages; pushes in flight may be applied before or
        after it. A store within a process has no servers, and the call does nothing.

        Args:
            head: number of the command, 0 to 2147483647.
            body: text for the handler, at most 65536 bytes in UTF-8.

        Raises:
            KvdistError: a server has no handler for `head`, or the handler raised. The message names the server, the
                command and the exception. The handlers of the other servers have run nevertheless.
        """
        self._begin()
        require_head(head)
        require_body(body)
        self._backend.command(head, body)

    # Files.

    def save_checkpoint(
        self,
        directory: str | os.PathLike[str],
        step: int,
        *,
        state: Any = None,
        keep: int | None = None,
        names: Mapping[Key, str] | None = None,
    ) -> Future[Path]:
        """Save values and optimizer states as of this worker's latest push, while training goes on.

        Every worker calls it at the same step with the same arguments, except `state`. Servers write in parallel into
        ``<directory>/step-<step>/``. All processes of the cluster must see that folder under the same path, below the
        servers' ``KVDIST_CHECKPOINT_ROOT``. A second call first waits until the earlier checkpoint is complete.

        In a synchronous store the checkpoint is a consistent cut: the same step on all servers. In an asynchronous
        store each slice includes at least the pushes that precede the call.

        Args:
            directory: folder for the checkpoints of this store alone.
            step: a number from 0, such as the number of steps so far.
            state: JSON-compatible state of this worker, such as ``sampler.state_dict()``, which `load_checkpoint`
                returns.
            keep: number of newest checkpoints to keep in `directory`; None keeps all.
            names: names for the keys in the output of `kvdist export`; read on rank 0 only.

        Returns:
            A future of the checkpoint's folder, which resolves when the checkpoint is complete and durable. If a
            process could not write, the future raises `CheckpointError`, and earlier checkpoints stay as they were. An
            error that the caller never reads from the future is reported by the next `save_checkpoint`, by `close`, or
            by the exit code of the process.

        Raises:
            TypeError, ValueError: an argument is not as described above, or the store has no keys.
            CheckpointError: the directory is outside the servers' root, cannot be written, or is in use by another job;
                the first call for a directory waits for this check. Or the previous checkpoint failed and its future
                was not read.
        """
        return self._save(SaveJob(directory, step, state, keep, names))

    def _save(self, job: SaveJob) -> Future[Path]:
        """See `save_checkpoint`."""
        self._begin()
        return self._backend.save(job)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Restore values and optimizer states from a checkpoint of any number of workers and servers.

        Every worker calls it, after equally many pushes. The keys must already be initialised with the shapes and
        dtypes of the checkpoint, and `set_optimizer` called with the same optimizer. If the call fails, nothing has
        changed. Arrays that were pulled before keep the old values: pull again.

        Args:
            directory: folder of the checkpoints.
            step: step of the checkpoint; None for the newest.
            states: False leaves the optimizer states as they are.

        Returns:
            A `Checkpoint` with the step and the `state` of each worker.

        Raises:
            CheckpointError: the checkpoint is missing, damaged, incomplete, of a newer version, or does not fit the
                store.
        """
        return self._load(LoadJob(directory, step, states=states))

    def _load(self, job: LoadJob) -> Checkpoint:
        """See `load_checkpoint`."""
        self._begin()
        checkpoint: Checkpoint = self._backend.load(job)
        return checkpoint

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save the optimizer state of every key, without the values. Every worker calls it and waits.

        Args:
            fname: folder to create: a checkpoint with states only. An existing folder is replaced at the end.
            dump_optimizer: accepted for MXNet, without effect: name and numbers of the optimizer are always saved.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        self._begin()
        self._backend.wait(self._backend.save(SaveJob(fname, states_only=True)))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Restore optimizer states from `save_optimizer_states`. Every worker calls it and waits.

        A store without an optimizer gets the saved one.

        Args:
            fname: folder that `save_optimizer_states` has written.

        Raises:
            CheckpointError: the folder is missing, damaged, or does not fit the store.
        """
        self._begin()
        self._backend.load(LoadJob(fname, values=False))

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """Return copies of the optimizer states of keys; None for a key that was never updated.

        A single worker may call it, while none of its pushes is in flight. In a synchronous store all states are of the
        same step; in an asynchronous store other workers' pushes go on meanwhile.

        Args:
            keys: keys of arrays, not of tables.

        Returns:
            A list with a `SliceState` or None per key.

        Raises:
            NotImplementedError: the store does not support it.
            PushRefused: pushes of this worker are in flight, or the store has no optimizer.
        """
        self._begin(Ability.STATES)
        return self._backend.states(keys)

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Replace the optimizer states of keys. The values stay.

        Every worker calls it with the same states, while no worker has a push in flight. Servers take the states from
        the lowest present rank, before any later push of that worker. The other workers return at once; only in a job
        that goes on without lost workers do they wait for the servers.

        Args:
            keys: keys of arrays, not of tables.
            states: a list as returned by `optimizer_states`; None for a key that was never updated.

        Raises:
            NotImplementedError: the store does not support it.
            PushRefused: a state does not fit its key, or the store has no optimizer.
        """
        self._begin(Ability.STATES)
        self._backend.replace_states(keys, states)

    # The store.

    def close(self, wait: bool = True) -> None:
        """Leave the cluster. The store cannot be used afterwards; a second call does nothing.

        The other workers go on without this one. If an exception leaves the ``with`` block of the store, or the program
        calls ``sys.exit`` with a code other than 0, the worker counts as lost instead (`on_loss`), because it has not
        finished its part.

        Args:
            wait: wait for a checkpoint that is still being written; ignored if an exception leaves the ``with`` block.

        Raises:
            CheckpointError: the last checkpoint failed, and its future was not read.
        """
        self._close(wait, "")

    def _close(self, wait: bool, failure: str) -> None:
        with contextlib.ExitStack() as stack:
            for call in self._calls_at_close:
                stack.callback(call, wait)
            if not self._closed:
                if wait:
                    self._backend.check_rollback()
                self._closed = True
                self._backend.close(wait, failure)

    def _at_close(self, call: Callable[[bool], None]) -> None:
        """Let `close` call this when the store has been left, with its `wait`: a trainer saves through a store, too."""
        self._calls_at_close.append(call)

    def _begin(self, ability: Ability | None = None) -> None:
        """Every call begins here: the store is open, it can do this, and no push before has failed unheard."""
        backend = self._backend
        if self._closed:
            raise StoreClosed(f"this {self.type!r} store has been closed; close it after its last use")
        if ability is not None:
            backend.require_able(ability)
        backend.check()
        if backend.errors:
            raise backend.errors.popleft()

    def _transfer(self, call: PushPull) -> Future[Any]:
        if call.options is not PLAIN and call.options.is_weighted:
            self._backend.require_able(Ability.WEIGHTS)
        if self._backend.keys.tables:
            return self._mixed.transfer(call)
        return self._backend.transfer(call)

    def _result_of(self, future: Future[Any], lends: bool = False) -> Any:
        result = self._backend.wait(future, lends)
        if self._backend.errors:  # of a push that this call was to see
            raise self._backend.errors.popleft()
        return result

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises a `TypeError`: a store cannot be pickled or copied."""
        raise TypeError(
            f"a {self.type!r} store cannot be pickled, copied or sent to another process: it belongs to the process"
            " that created it. Hand over plain values, such as store.rank and store.num_workers, and keep stores out of"
            " data sets, models and what else is copied; save_checkpoint keeps the values of a store"
        )

    def __enter__(self) -> KVStore:
        return self

    def __exit__(
        self, kind: builtins.type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # The error of the block says more than one of the closing that follows from it. A checkpoint that has failed
        # is not forgotten: the exit code reports it, should the process end as if all was well.
        with contextlib.suppress(KvdistError):
            self._close(False, failure_of(error))
