"""`KVStore`: what every store can do, over the primitives of a `Backend`.

Rules that hold for every store:

- A *key* is an `int` or a `str`; one call takes one key or a list of them, never both types at once.
- A *value* is a NumPy array or a torch tensor of one of the types of `kvdist.dtypes`, or some of its rows: a
  `RowSparse` or a sparse COO tensor. For one key it may be a list of them, one per device, which are summed. For a list
  of keys it is a list of as many values.
- ``None`` in the place of a value that is pushed means "no gradient here": an empty contribution that counts, so no
  worker waits for it.
- Arguments are never written (except where a result goes in place) and never kept by reference. Results never change
  after they are returned.
- A list call handles its keys in the order of the list; a higher `priority` overtakes a lower one.
- The caller's mistakes raise at the call. What a peer did wrong fails the call that waits for it.
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

if TYPE_CHECKING:
    from kvdist.kvstore.checkpoints import Checkpoint


class KVStore(KVStoreBase):
    """Values by key, shared by the devices of a process and by the workers of a cluster.

    Every method that moves values raises `StoreClosed` after `close()`, `KeyNotInitialised` for a key without `init`,
    `TypeError` for a key or value of a wrong type and `ValueError` for a wrong shape. Stores on a cluster raise
    `PeerLostError` as well when a process they wait for is gone, and `DeadlockError` when the workers wait for each
    other.

    Args:
        backend: what kind of store it is. `kvdist.kv.create` makes one by its name.
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
        """The name with which the store was created, such as ``dist``."""
        return self._backend.type

    @property
    def rank(self) -> int:
        """This worker's number, from 0 to `num_workers` - 1."""
        return self._backend.rank

    @property
    def num_workers(self) -> int:
        """How many workers share the store; 1 for stores within a process."""
        return self._backend.num_workers

    @property
    def num_servers(self) -> int:
        """How many servers hold the values; 0 for stores within a process."""
        return self._backend.num_servers

    @property
    def has_optimizer(self) -> bool:
        """Whether `set_optimizer` has been called here, so that a push is a gradient; else a sum replaces the value."""
        return self._backend.optimizer is not None

    def num_dead_nodes(self) -> int:
        """How many processes of the cluster are known to be lost; it sends no message, and works after a loss too.

        Unless ``KVDIST_ON_LOSS`` lets the others go on, the loss of one ends the job, so it is 0 as long as calls
        succeed. Workers that left by `close` are not lost. In a worker that was given up itself it is at least 1.
        """
        return self._backend.num_dead_nodes()

    @property
    def on_loss(self) -> str:
        """What follows when a worker is lost: ``fail``, the job ends, or ``continue``, the others go on."""
        return self._backend.on_loss

    @property
    def members(self) -> tuple[int, ...]:
        """The ranks of the workers that are there now, in order: all that have neither left nor been lost."""
        return self._backend.members

    def on_membership_change(self, function: MembershipWatcher) -> None:
        """Call ``function(before, after)``, with the ranks of the workers, when `members` has changed.

        It is called on the thread of the next call on this store, at its beginning. Several functions are called in
        order; what one raises, the call raises.
        """
        self._backend.watchers.append(function)

    def on_rollback(self, function: Callable[[int], None]) -> None:
        """Call ``function(step)`` when a server was lost and all have gone back to the snapshot of this step.

        It is called on the user's thread, by the call that raises `RolledBackError`, just before that, or by the
        ``step()`` of a Trainer, which returns. Several functions are called in order.
        """
        self._backend.rollback_watchers.append(function)

    # Keys.

    def init(self, key: Keys, value: Value) -> None:
        """Give keys their first value; returns when every worker has declared them.

        The value of rank 0 wins; other ranks only declare shape and dtype. A repeated `init` of the same shape and
        dtype changes nothing.

        Args:
            key: one key or a list.
            value: one array, or a list as long as the keys. Only the first of several arrays per key is used.

        Raises:
            InitMismatch: workers, or this and an earlier call, gave different shapes or dtypes.
            ConfigError: all wait for lost workers (``KVDIST_ON_LOSS=wait``), the store has an optimizer, and two steps
                have been made: a worker that comes back would have no place in the rounds of a key that is new.
        """
        self._begin()
        with self._backend.reporting():
            given = _values.pairs(key, value)
        self._backend.declare(given)

    def broadcast(self, key: Keys, value: Value, out: Value, priority: int = 0) -> None:
        """Give every worker rank 0's present values, in the store and in `out`; returns when they are there.

        For new keys it is `init` and `pull`. Keys that have a value already get rank 0's in its place, and the state
        of an optimizer stays: so weights that were loaded from a file on rank 0 become everybody's. Every worker calls
        it.

        Args:
            key: one key or a list.
            value: as in `init`; only rank 0's is read.
            out: as in `pull`.
            priority: higher goes first.
        """
        self._begin()
        with self._backend.reporting():
            given = _values.pairs(key, value)
        self._backend.replace(given, key, out, priority)

    def leave_uncompressed(self, keys: Sequence[Key]) -> None:
        """Let these keys travel as they are, whatever is compressed; every worker calls it, before their `init`.

        Raises:
            ValueError: one of them is initialised, and compressed.
        """
        self._begin()
        self._backend.leave_uncompressed(keys)

    def leave_unkept(self, keys: Sequence[Key]) -> None:
        """A hint, before their `init`: sums of these keys go to the callers of `pushpull`, and no call pulls them.

        A store that would keep a copy for `pull` alone can do without.
        """
        self._begin()
        self._backend.leave_unkept(keys)

    def expect_rows(self, keys: Sequence[Key]) -> None:
        """A hint, before their `init`, the same on every worker: most gradients of these keys are a few rows.

        The store ``hybrid`` keeps such keys on servers.
        """
        self._begin()
        self._backend.expect_rows(keys)

    # Values.

    def push(self, key: Keys, value: Value, priority: int = 0, *, average: Average = False, samples: int = 0) -> None:
        """Contribute to keys: the sum over devices, then over workers, is what updates the stored value.

        With an optimizer or updater the sum updates the stored value; without one it replaces it. Returns at
        once, unless so much is pushed and not counted yet that there is no room (``KVDIST_UNDER_WAY_BYTES``). The value
        may be changed as soon as the call has returned. What fails later is raised by the next call. Where no
        device of any worker has a value, the stored one stays as it is.

        Args:
            key: one key or a list.
            value: as described for the module; ``None`` for a key without a gradient on this worker.
            priority: higher goes first.
            average: divide the sum by the number of all workers, those that push ``None`` included, and not by the
                devices; each push of ``dist_async`` is an update of its own, and divided by 1. Integers are cut toward
                zero; with servers several workers average floats only. ``'samples'``: the values are means over
                `samples` examples, and the result is the mean over the examples of all workers; then all must say so.
                For ``dist`` stores, and for local ones, where it changes nothing.
            samples: how many examples the values are of, told to the servers; 0 if it is not known.
        """
        self._begin()
        options = PushOptions(average, samples) if average or samples else PLAIN
        self._transfer(PushPull(key, value, None, priority, Lending.NOTHING, options, pulls=False))

    def push_async(
        self, key: Keys, value: Value, priority: int = 0, *, average: Average = False, samples: int = 0
    ) -> Future[None]:
        """`push` with a future that resolves when the contribution has been counted."""
        self._begin()
        options = PushOptions(average, samples)
        return self._transfer(PushPull(key, value, None, priority, Lending.RESIDENT, options, pulls=False))

    def pull(
        self,
        key: Keys,
        out: Value | None = None,
        priority: int = 0,
        ignore_sparse: bool = True,
        *,
        average: bool = False,
    ) -> Any:
        """Read keys into `out`, or into new arrays; blocks until they are there.

        A pull sees at least every push that this worker made before it.

        Args:
            key: one key or a list.
            out: arrays of the shape given to `init`; each array of a key is written, converted where it has another
                dtype. None makes new ones.
            priority: higher goes first.
            ignore_sparse: what happens to tables of rows. True: a `RowSparse` in `out` stays as it is, and without
                `out` it is an error. False: all rows are pulled. An array in `out` gets all rows in either case.
            average: read the average of the weights in place of the weights, for an optimizer with an
                `Optimizer.average_half_life`. It is of the version that this worker would pull now. That of a key of
                halves is float32, and converted as `out` wants. For `dist` stores, and keys that are arrays.

        Returns:
            With ``out=None`` one new array per key, of the kind given to `init` (one array for one key, else a list);
            otherwise None.

        Raises:
            ConfigError: with `average`, if none is kept.
            PushRefused: with `average`, if a table is among the keys, or this worker has come back with
                ``KVDIST_ON_LOSS=wait`` and has yet to repeat the step that the others have made.
        """
        self._begin(Ability.AVERAGES if average else None)
        if average:
            return self._backend.averages(key, out)
        call = PushPull(key, None, out, priority, Lending.EVERYTHING, PLAIN, False, True, ignore_sparse)
        return self._result_of(self._transfer(call))

    def pull_async(
        self, key: Keys, out: Value | None = None, priority: int = 0, ignore_sparse: bool = True
    ) -> Future[Any]:
        """`pull` with a future of its result; `out` belongs to the store until the future resolves."""
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
        """Push keys and pull the result, in one round trip; blocks until the result is written.

        Args:
            key: one key or a list.
            value: what is pushed, as in `push`.
            out: where the result goes, as in `pull`; None writes it in place into every array of `value`.
            priority: higher goes first.
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
        """`pushpull` with a future; `out` (or `value`, in place) belongs to the store until it resolves."""
        self._begin()
        return self._transfer(PushPull(key, value, out, priority, Lending.RESIDENT, PushOptions(average, samples)))

    def pushpull_shared(
        self, key: Keys, value: Value, out: Value, priority: int = 0, *, average: Average = False, samples: int = 0
    ) -> list[Any]:
        """`pushpull` whose large results stay where they are, in the memory of servers of this host.

        A pull is then no pass over the bytes at all. Such a result shows another version some time after the next
        `pushpull_shared` of its key has returned: use it until then. Do not write to it: others would not see that,
        and later results that lie in the same place would show it. `broadcast` of the key mends it.

        Args:
            key, value, priority, average, samples: as in `pushpull`.
            out: where the results go that cannot stay: of a server on another host, or of a small key.

        Returns:
            Per key an array of its kind, shape and dtype that shows the result, or None: it was written into `out`.
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
        """`pushpull` of gradients, clipped as ``torch.nn.utils.clip_grad_norm_`` does, before the servers' optimizer.

        The norm is that of the sums over all workers (with `average` their means, and times the optimizer's
        `rescale_grad`) of all keys of the call: no key is updated before it is known. It costs one small message more
        to and from each server, and one pass over the gradients there. Every worker gives the same keys and norm.

        Args:
            key, value, out, priority, average, samples: as in `pushpull`.
            clip_norm: the largest norm, above 0.

        Returns:
            The norm before clipping, the same on every worker, of squares that are summed in float64.

        Raises:
            FloatingPointError: it is not finite. Every worker gets it, and the values stay as they are.
            NotImplementedError: the store is none of the synchronous ``dist`` stores.
            OptimizerMismatch: workers gave different norms.
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
        """Read some rows of tables: of keys whose first value was a `RowSparse`, a sparse tensor or a `LazyRows`.

        Like `pull`, it sees at least every push that this worker made before it.

        Args:
            key: one key or a list.
            out: a `RowSparse` of the table's shape, whose content is replaced, or a list of them, which get
                the same rows; for a list of keys a list of these. None makes new ones.
            priority: higher goes first.
            row_ids: integers of any shape and order, with repetitions: an array, a tensor or a list. For a list of
                keys one for all of them, or a list of as many; for a list of results of one key, a list of as many
                arrays.

        Returns:
            With ``out=None`` one `RowSparse` per key (for one key it alone) that has each named row once, in ascending
            order; otherwise None.

        Raises:
            TypeError: the key is an array, ids are not integers, or `out` is not a `RowSparse`.
            ValueError: an id is not a row of the table, or lists differ in length.
        """
        return self._result_of(self.row_sparse_pull_async(key, out, priority, row_ids))

    def row_sparse_pull_async(self, key: Keys, out: Any = None, priority: int = 0, row_ids: Any = None) -> Future[Any]:
        """`row_sparse_pull` with a future of its result; `out` belongs to the store until it resolves."""
        self._begin(Ability.ROWS)
        return self._mixed.pull_rows(key, out, priority, row_ids)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """A new uninitialised NumPy array that the store can send at the least cost.

        On a cluster it lies in shared memory, and servers of this host read it where it lies: a `pushpull` copies
        nothing, `push_async` and `pushpull_async` neither, and it must not change until their future is done. A forked
        child shares it with its parent.

        Args:
            shape: its shape.
            dtype: a name, a NumPy or torch dtype. bfloat16 needs torch's own arrays and is a `TypeError` here.
        """
        wanted = _values.as_numpy_dtype(dtype)
        lengths = tuple(shape) if isinstance(shape, Iterable) else (operator.index(shape),)
        return self._backend.allocate(math.prod(lengths) * wanted.itemsize).view(wanted).reshape(lengths)

    # All workers together.

    def barrier(self, timeout: float | None = None) -> None:
        """Wait until every worker is here.

        It does not wait for pushes under way. In ``dist_async``, pull before the barrier what others must see after it.

        Args:
            timeout: seconds; None waits as long as the others live.

        Raises:
            BarrierTimeout: some workers did not come in time; `missing` holds their ranks.
        """
        self._begin()
        if timeout is not None and not timeout > 0:
            raise ValueError(
                f"the time-out of a barrier is {timeout}; it must be a positive number of seconds, or None"
            )
        self._backend.meet(timeout)

    def agree(self, statement: str) -> None:
        """A barrier at which every worker makes a statement, and all must make the same one.

        So a program finds out, before the first gradient, that its workers were not started alike. A worker that joins
        a running job passes it before its first push; only what its `Trainer` says of the model is compared.

        Args:
            statement: some words, at most 8192 bytes of UTF-8; what is longer is cut and not compared.

        Raises:
            InitMismatch: they are not all the same. Every worker gets it, and it names who said what.
        """
        self._begin()
        self._backend.meet(statement=statement)

    def average(self, value: Any, *, counts: bool = True) -> Any:
        """The mean of a number or an array over the workers: of a loss, say, or of an accuracy.

        Every worker calls it, with the same shape and dtype, and waits for the others. It has nothing to do with the
        keys of the store, or with its optimizer.

        Args:
            value: a number, a NumPy array, or a torch tensor. Integers are averaged as float64, booleans too.
            counts: whether this worker's value takes part. A worker that has nothing to say, because it had no
                examples, gives any value of the right shape and False. If no worker's takes part, the result is NaN.

        Returns:
            A float for a number, else a new array or tensor of the kind and shape of `value`.

        Raises:
            InitMismatch: workers gave different shapes or dtypes; it names who gave what.
        """
        self._begin()
        with self._backend.reporting():
            array = _values.as_averaged(value)
        (mean,) = self._backend.reduce([array], Reduction.MEAN if counts else Reduction.MEAN_OF_OTHERS)
        return _values.as_given(value, mean)

    def from_rank_0(self, values: Sequence[Any]) -> list[Any]:
        """New arrays like these with the values of rank 0; every worker calls it, with the same shapes and dtypes.

        It has nothing to do with the keys of the store, or with its optimizer.

        Args:
            values: NumPy arrays or torch tensors of the types of `kvdist.dtypes`; only rank 0's are read.

        Raises:
            InitMismatch: workers gave different shapes or dtypes; it names who gave what.
        """
        self._begin()
        with self._backend.reporting():
            for value in values:
                _values.describe(value)
        return self._backend.reduce(values, Reduction.RANK_0)

    # What is done to the values.

    def is_capable(self, capability: str) -> bool:
        """Whether the store can do something; ``optimizer`` (update values itself) is the one capability there is.

        Raises:
            ValueError: the capability is not known.
        """
        if capability.lower() != self.OPTIMIZER:
            raise ValueError(f"unknown capability {capability!r}; the one there is is {self.OPTIMIZER!r}")
        return Ability.OPTIMIZER in self._backend.abilities

    def set_optimizer(self, optimizer: Optimizer | str, **hyperparameters: Any) -> None:
        """Let the store update its values: from now on a push is a gradient.

        The store keeps this very object: its learning rate, multipliers and `rescale_grad` are read at every push.
        Every worker calls it, before its first push: servers use it from the first call on, and a push that another
        worker has under way then is updated by it.

        Args:
            optimizer: an `Optimizer`, or the name of one with its hyper-parameters.

        Raises:
            OptimizerMismatch: another worker, or an earlier call, chose a different one.
        """
        self._begin(Ability.OPTIMIZER)
        chosen = create(optimizer, **hyperparameters)
        self._backend.require_averages(chosen)
        present = self._backend.optimizer
        with self._backend.reporting():
            if present is not None and chosen.rule() != present.rule():
                raise OptimizerMismatch(
                    f"this store updates its values with {present}; it cannot be changed to {chosen}. Create a second"
                    " store for that"
                )
        self._backend.set_optimizer(chosen)

    def set_updater(self, updater: UpdaterFunction) -> None:
        """Let a function update the values: ``fn(key, received, stored)`` changes `stored` in place.

        Both arrays are of the kind given to `init`. Only stores within a process can run a function.

        Raises:
            TypeError: the updater cannot be called, or the values rest on servers.
        """
        self._begin(Ability.UPDATER)
        if not callable(updater):
            raise TypeError(f"an updater is a function of (key, received, stored), not {type(updater).__name__}")
        self._backend.set_updater(updater)

    def set_gradient_compression(self, compression_params: Mapping[str, Any]) -> None:
        """Compress what is pushed from now on: keys of float32 travel in fewer bytes.

        What a push loses is kept on this worker, for each key, and added to the next one. Every worker calls it, with
        the same parameters, before the first key is initialised; a second call with them changes nothing.

        Args:
            compression_params: ``type`` is ``2bit`` or ``1bit`` (with a ``threshold``, by default 0.5), ``fp16``,
                ``bf16``, ``int8``, ``int4``, or ``topk`` (with a ``ratio``, by default 0.01). With ``pull`` (``fp16``
                or ``bf16``) values come back rounded to halves; a store within a process has no use for that.

        Raises:
            TypeError, ValueError: the parameters are wrong, the store compresses otherwise already, keys have been
                initialised, or the store does not compress (``local``, ``nccl``).
            InitMismatch: another worker gave other parameters.
        """
        self._begin(Ability.COMPRESSION)
        self._backend.compress(compression_params)

    def send_command_to_servers(self, head: int, body: str = "") -> None:
        """Let every server run the handler that is registered there for `head`; returns when all have.

        Handlers come from modules named when the servers were started (``--server-module``); see
        `kvdist.kv.register_command`. A server runs one between two messages. Pushes that are under way may come before
        it or after. A store within a process has no servers and does nothing.

        Args:
            head: the number of the command, 0 to 2147483647.
            body: a text for the handler, at most 65536 bytes of UTF-8.

        Raises:
            KvdistError: a server has no such handler, or it raised; the message names the server, the command and the
                exception. The other servers have run theirs all the same.
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
        """Save values and optimizer states as they are after this worker's pushes so far; training goes on meanwhile.

        Every worker calls it at the same step with the same arguments, but for `state`. In a synchronous store the
        checkpoint is that very moment on all servers; in an asynchronous one each slice has at least the pushes that
        precede the call. Servers write in parallel into ``<directory>/step-<step>/``: all processes of the cluster
        must see it under the same path, below the servers' ``KVDIST_CHECKPOINT_ROOT``. A second call waits until the
        first checkpoint is complete.

        Args:
            directory: where checkpoints lie. Each store needs one of its own.
            step: a number from 0, such as how many steps were made.
            state: what this worker wants to have back, such as ``sampler.state_dict()``: whatever JSON can say.
            keep: how many of the newest checkpoints in `directory` stay; None for all.
            names: key → what `kvdist export` is to call it; of rank 0 alone.

        Returns:
            A future of the checkpoint's folder, resolved when it is complete and durable. It fails with
            `CheckpointError` if anybody could not write: the checkpoints that were there before are as they were.
            If it is not looked at, the next `save_checkpoint`, `close` or the process's exit code says so.

        Raises:
            TypeError, ValueError: an argument is not as described above, or the store has no keys.
            CheckpointError: on the first call for a directory, which waits for that: it lies outside the servers'
                root, cannot be written, or is in use by another job. Or the call before has failed, and its
                future was not looked at.
        """
        return self._save(SaveJob(directory, step, state, keep, names))

    def _save(self, job: SaveJob) -> Future[Path]:
        """See `save_checkpoint`."""
        self._begin()
        return self._backend.save(job)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Go on from a checkpoint of any number of workers and servers; every worker calls it, after equal pushes.

        The keys must have been initialised, with the shapes and dtypes they had, and `set_optimizer` called as it was.
        Nothing has changed if it fails. Values that were pulled before are the old ones: pull again.

        Args:
            directory: where checkpoints lie.
            step: the step of the checkpoint; None for the newest.
            states: whether the optimizer's states come back too; else they stay as they are.

        Returns:
            The step, and what the workers gave as their `state`.

        Raises:
            CheckpointError: there is none, it is damaged, cut off or of a newer version, or it does not fit the store.
        """
        return self._load(LoadJob(directory, step, states=states))

    def _load(self, job: LoadJob) -> Checkpoint:
        """See `load_checkpoint`."""
        self._begin()
        checkpoint: Checkpoint = self._backend.load(job)
        return checkpoint

    def save_optimizer_states(self, fname: str | os.PathLike[str], dump_optimizer: bool = False) -> None:
        """Save what the optimizer remembers of every key, without the values; every worker calls it, and waits.

        Args:
            fname: a folder, made here: a checkpoint that holds states only. One that is there is replaced at the end.
            dump_optimizer: changes nothing; the optimizer's name and numbers are always in it.

        Raises:
            CheckpointError: it could not be written.
        """
        self._begin()
        self._backend.wait(self._backend.save(SaveJob(fname, states_only=True)))

    def load_optimizer_states(self, fname: str | os.PathLike[str]) -> None:
        """Give the optimizer back what `save_optimizer_states` saved; every worker calls it, and waits.

        A store without an optimizer gets the one that was saved.

        Raises:
            CheckpointError: there is nothing there, or it is damaged, or it does not fit the store.
        """
        self._begin()
        self._backend.load(LoadJob(fname, values=False))

    def optimizer_states(self, keys: Sequence[Key]) -> list[SliceState | None]:
        """What the optimizer remembers of keys, in memory of the caller's own; None for a key that was never updated.

        One worker may call it alone, while none of its pushes is under way. In a synchronous store what it gets is of
        one moment; in an asynchronous one the others' pushes go on meanwhile.

        Args:
            keys: keys of arrays.

        Raises:
            NotImplementedError: this store cannot.
            PushRefused: pushes of this worker are under way, or there is no optimizer.
        """
        self._begin(Ability.STATES)
        return self._backend.states(keys)

    def replace_optimizer_states(self, keys: Sequence[Key], states: Sequence[SliceState | None]) -> None:
        """Give the optimizer these states in place of its own. The values stay.

        Every worker calls it with the same states, while no push of any of them is under way. Servers have them from
        the lowest rank that is there, before any later push of its; the other workers return at once, unless the job
        goes on without lost workers: then all return when the servers have them.

        Args:
            keys: keys of arrays.
            states: for each what `optimizer_states` returned; None for what was never updated.

        Raises:
            NotImplementedError: this store cannot.
            PushRefused: they do not fit, or there is no optimizer.
        """
        self._begin(Ability.STATES)
        self._backend.replace_states(keys, states)

    # The store.

    def close(self, wait: bool = True) -> None:
        """Leave: the store cannot be used afterwards. A second call does nothing.

        Others go on without this worker. Where an exception leaves a ``with``, or ``sys.exit`` of another code than 0,
        it is lost to them instead, with all that this means: it has not done its part.

        Args:
            wait: until a checkpoint that is under way is complete; not done where an exception leaves a ``with``.

        Raises:
            CheckpointError: the last checkpoint has failed, and its future was not looked at.
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
            raise StoreClosed(f"this {self.type!r} store has been closed; close it behind its last use")
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
        return self._backend.arrays.transfer(call)

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
