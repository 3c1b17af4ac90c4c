"""Stores of MXNet whose values rest on kvdist's servers: importing this module makes them known to MXNet.

    import kvdist_store
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("kvdist"))

``kvdist`` waits for all workers in each step; ``kvdist_async`` does not. MXNet's own names of distributed stores, such
as ``dist_sync``, mean these stores too, for scripts in which they are written. Rules that hold here:

* MXNet's engine is waited for, so every call but `push` is done when it returns.
* An optimizer is translated once, by `kvdist_translation`; its rates and its `rescale_grad` are read at every push.
* A step of `gluon.Trainer` or `Module` is one call with all its parameters.
* kvdist does not import this, and nothing in it is changed for this.
"""

from __future__ import annotations

import functools
import json
import os
from contextlib import contextmanager
from pathlib import Path

import mxnet as mx
import numpy as np
from kvdist_translation import require_same_on_dense, tell, translated
from mxnet.base import MXNetError

from kvdist import RowSparse, kv, profiler
from kvdist.mxnet.arrays import is_sparse, listed, read, write_rows, written

NAMES = (
    *("kvdist", "kvdist_sync", "dist", "dist_sync", "dist_device_sync", "dist_sync_device"),
    *("kvdist_async", "dist_async", "dist_device_async", "dist_async_device"),
)
NAMES_OF_SUMS = ("horovod", "byteps")
OF_PROFILER = ("set_config", "set_state", "pause", "resume", "dump")


@functools.cache
def also_of_mxnet(error: type[Exception]) -> type[Exception]:
    """A class of errors that is `MXNetError` besides."""
    return type(error.__name__, (error, MXNetError), {})


def as_in_c(method):
    """A method of a store that refuses arguments with an `MXNetError`, as MXNet's library does."""

    @functools.wraps(method)
    def wrapped(*args, **kwargs):
        try:
            return method(*args, **kwargs)
        except MXNetError:
            raise
        except (TypeError, ValueError, KeyError) as error:
            raise also_of_mxnet(type(error))(*error.args).with_traceback(error.__traceback__) from None

    return wrapped


class KVDist(mx.kv.KVStore):
    """A store on kvdist's servers, made by ``mx.kv.create`` with one of `NAMES`.

    Args:
        name: with ``_async`` in it servers apply each push as it comes; else they wait for every worker.
    """

    def __init__(self, name: str = "kvdist") -> None:
        # Without MXNet's own __init__, which wants the handle of a store in C.
        self._type = "kvdist_sync" if name == "kvdist" else name
        self._mode = "dist_async" if "_async" in name else "dist"
        self._store = kv.create(self._mode)
        self._dtypes: dict = {}
        """Of every key."""
        self._tables: set = set()
        """Keys whose first value was row_sparse."""
        self._has_pushed = False
        self._compression = None
        """What `set_gradient_compression` got."""
        self._optimizer = None
        """The one of MXNet that the script has, and changes."""
        self._translated = None
        self._updater = None
        """Where `gluon.Trainer.load_states` looks for the optimizer."""
        self._gathered: list | None = None
        """The calls of `pushpull` that are to travel as one."""

    def __del__(self) -> None:
        """Free nothing, where MXNet's own frees its handle."""

    @property
    def type(self) -> str:
        """The name with ``dist`` in it, which MXNet reads: ``_sync`` lets Module divide by the examples of all."""
        return self._type

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self._store.rank

    @property
    def num_workers(self) -> int:
        """How many workers there are."""
        return self._store.num_workers

    def is_capable(self, capability: str) -> bool:
        """True for ``optimizer``.

        Raises:
            ValueError: another capability.
        """
        return self._store.is_capable(capability)

    @as_in_c
    def init(self, key, value) -> None:
        """Give keys their first value, which is that of rank 0; every worker calls it."""
        keys, values = listed(key, value)
        self._store.init(keys, self._firsts(keys, values))

    @as_in_c
    def broadcast(self, key, value, out, priority: int = 0) -> None:
        """Give every worker rank 0's values, in the store and in `out`; every worker calls it."""
        keys, values = listed(key, value)
        firsts = self._firsts(keys, values)
        with written(listed(key, out)[1]) as outs:
            self._store.broadcast(keys, firsts, outs, priority)

    @as_in_c
    def push(self, key, value, priority: int = 0) -> None:
        """Contribute: with an optimizer gradients, without one new values; summed over devices, then over workers."""
        keys, values = listed(key, value)
        self._prepare(keys, values)
        self._store.push(keys, [[read(one) for one in arrays] for arrays in values], priority)

    @as_in_c
    def pull(self, key, out=None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Read keys into `out`, whose row_sparse arrays stay as they are.

        Raises:
            MXNetError: `ignore_sparse` is False and an array is row_sparse, which `row_sparse_pull` is for.
        """
        if out is None:
            raise ValueError("pull needs out: the arrays that receive the values")
        keys, outs = listed(key, out)
        if not ignore_sparse and any(is_sparse(one) for arrays in outs for one in arrays):
            raise MXNetError("a distributed store pulls row_sparse arrays by row_sparse_pull, which takes row_ids")
        dense = [(k, arrays) for k, arrays in zip(keys, outs, strict=True) if not is_sparse(arrays[0])]
        if dense:
            keys, outs = zip(*dense, strict=True)
            with written(outs) as given:
                self._store.pull(list(keys), given, priority)

    @as_in_c
    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        """Contribute, and read the result into `out`, or into `value` where there is no `out`."""
        keys, values = listed(key, value)
        outs = values if out is None else listed(key, out)[1]
        if self._gathered is not None:
            self._gathered += zip(keys, values, outs, strict=True)
            return
        if any(is_sparse(one) for arrays in outs for one in arrays):
            raise MXNetError("pushpull returns dense arrays: push rows, and pull them by row_sparse_pull")
        self._prepare(keys, values)
        with written(outs) as given:
            self._store.pushpull(keys, [[read(one) for one in arrays] for arrays in values], given, priority)

    @contextmanager
    def one_call(self):
        """Let every `pushpull` in the block, each of another key, travel with the others when it ends."""
        self._gathered = []
        try:
            yield
            calls = self._gathered
        finally:
            self._gathered = None
        if calls:
            self.pushpull(*(list(column) for column in zip(*calls, strict=True)))

    @as_in_c
    def row_sparse_pull(self, key, out=None, priority: int = 0, row_ids=None) -> None:
        """Read rows of tables into row_sparse arrays, whose content they become.

        Args:
            key: one key or a list.
            out: row_sparse arrays, as the values of `push`.
            priority: higher goes first.
            row_ids: an array of numbers in any order and with repetitions, for each array of `out` or for all of a key.

        Raises:
            MXNetError: an array of `out` is dense.
        """
        keys, outs = listed(key, out)
        if not all(is_sparse(one) for arrays in outs for one in arrays):
            raise MXNetError("row_sparse_pull needs row_sparse arrays as out; dense ones are for pull")
        many = isinstance(key, (list, tuple))
        _, wanted = listed(key, [row_ids] * len(keys) if many and not isinstance(row_ids, (list, tuple)) else row_ids)
        asked = []
        for name, arrays, ids in zip(keys, outs, wanted, strict=True):
            groups = [arrays] if len(ids) == 1 else [[one] for one in arrays]
            for own, group in zip(ids, groups, strict=True):
                rows = own.asnumpy().astype(np.int64)
                asked.append((self._store.row_sparse_pull_async(name, None, priority, rows), group))
        for future, group in asked:
            rows = future.result()
            for array in group:
                write_rows(rows, array)

    @as_in_c
    def set_gradient_compression(self, compression_params) -> None:
        """Compress what is pushed to keys of float32 from now on; every worker calls it.

        Raises:
            ValueError: a worker has pushed, and the optimizer remembers more of rows than their values.
        """
        if self._compression is not None or not self._dtypes:
            self._store.set_gradient_compression(compression_params)
        else:
            self._move(self._translated, compression_params)
        self._compression = compression_params

    def set_optimizer(self, optimizer) -> None:
        """Let the servers update the values as an optimizer of MXNet would; every worker calls it.

        In place of another one it begins anew, as in MXNet: what that one remembers is forgotten.

        Raises:
            ValueError, TypeError: kvdist has none that does the same; the message says why, and what to do instead.
        """
        chosen = translated(optimizer)
        if self._translated is None:
            self._store.set_optimizer(chosen)
        else:
            self._move(chosen, self._compression)
        self._optimizer, self._translated = optimizer, chosen
        self._updater = Updater(self, optimizer)

    def _move(self, optimizer, compression) -> None:
        """Take the values to another store of kvdist, of which each has one optimizer and one compression for its life.

        States go with them where the optimizer stays.
        """
        keys = list(self._dtypes)
        keeps = optimizer is not None and optimizer is self._translated
        has_states = keeps and self._tables and (optimizer.state_names or optimizer.multi_precision)
        if has_states and self._store.average(self._has_pushed) > 0:  # on dist_async perhaps by some workers only
            raise ValueError(
                "set_gradient_compression must come before the first push where an optimizer with states or"
                f" multi_precision updates row_sparse keys, and {optimizer.name} does"
            )
        old, store = self._store, kv.create(self._mode)
        if compression is not None:
            store.set_gradient_compression(compression)
            store.leave_uncompressed([key for key in keys if self._dtypes[key] != np.float32])
        if optimizer is not None:
            store.set_optimizer(optimizer)
        if keys:
            values = old.pull(keys, ignore_sparse=False)
            if self._mode == "dist_async":
                old.barrier()  # now everybody's pushes are in the values
                values = old.pull(keys, ignore_sparse=False)
            store.init(keys, values)
        dense = [key for key in keys if key not in self._tables]
        if keeps and dense:
            store.replace_optimizer_states(dense, old.optimizer_states(dense))
            store.barrier()
        old.close()
        self._store = store

    def save_optimizer_states(self, fname, dump_optimizer: bool = False) -> None:
        """Save what the servers remember of every key in the folder `fname`, and the counts of updates beside it.

        Every worker calls it. The optimizer's numbers are always saved too, whatever `dump_optimizer` says.
        """
        self._require_optimizer()
        self._store.save_optimizer_states(fname)
        if self.rank == 0:
            counts_beside(fname).write_text(json.dumps(list(self._optimizer._index_update_count.items())))
        self._store.barrier()

    def load_optimizer_states(self, fname) -> None:
        """Give the servers back what was saved, and this worker's optimizer its counts; every worker calls it."""
        self._require_optimizer()
        counts = dict(json.loads(counts_beside(fname).read_text()))
        self._store.load_optimizer_states(fname)
        self._optimizer._index_update_count.update(counts)
        self._optimizer.num_update = max([self._optimizer.begin_num_update, *counts.values()])

    def barrier(self) -> None:
        """Wait until every worker is here."""
        self._store.barrier()

    _barrier = barrier  # the name in MXNet's own stores

    def close(self) -> None:
        """Leave the cluster. A script that does not call it leaves when it ends."""
        self._store.close()

    def _set_updater(self, updater) -> None:
        """Refuse: a function cannot run on servers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("an updater is a function, which servers do not run: use set_optimizer")

    def _send_command_to_servers(self, head, body) -> None:
        """Let every server run the handler registered there, see `kvdist.kv.register_command`."""
        self._store.send_command_to_servers(head, body)

    def _firsts(self, keys, values) -> list:
        """The first values of keys, which are tables where they or their gradients are row_sparse."""
        firsts = [read(arrays[0]) for arrays in values]
        for place, (key, first) in enumerate(zip(keys, firsts, strict=True)):
            parameter = self._optimizer and self._optimizer.param_dict.get(key)
            if getattr(parameter, "_grad_stype", "default") == "row_sparse" and isinstance(first, np.ndarray):
                firsts[place] = RowSparse(np.arange(len(first)), first, first.shape)
        self._dtypes.update((key, arrays[0].dtype) for key, arrays in zip(keys, values, strict=True))
        self._tables.update(key for key, first in zip(keys, firsts, strict=True) if isinstance(first, RowSparse))
        if self._compression is not None:
            self._store.leave_uncompressed([key for key in keys if self._dtypes[key] != np.float32])
        return firsts

    def _prepare(self, keys, values) -> None:
        """Give the servers' optimizer the numbers of this push."""
        self._has_pushed = True
        if self._optimizer is None:
            return
        tell(self._translated, self._optimizer, keys)
        for key, arrays in zip(keys, values, strict=True):
            if key not in self._tables and is_sparse(arrays[0]):
                require_same_on_dense(self._translated, key)

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise ValueError("this store has no optimizer, so there are no states: call set_optimizer first")


class Updater:
    """What MXNet calls the updater of a store.

    Args:
        store: its servers update.
        optimizer: the one of the script.
    """

    def __init__(self, store: KVDist, optimizer) -> None:
        self.optimizer = optimizer
        self._store = store

    @property
    def states(self) -> dict:
        """A copy of what the servers remember of each dense key, as kvdist's optimizers have it.

        An array, or a tuple where there are several; None where there is none. Other workers need not ask, but no push
        of this one may be under way.
        """
        keys = [key for key in self._store._dtypes if key not in self._store._tables]
        found = {}
        for key, state in zip(keys, self._store._store.optimizer_states(keys) if keys else (), strict=True):
            arrays = tuple(mx.nd.array(one, dtype=one.dtype) for one in state.arrays) if state else ()
            found[key] = arrays if len(arrays) > 1 else (*arrays, None)[0]
        return found


class Sums(KVDist):
    """A store that sums and does not update, under MXNet's names of those on Horovod and BytePS."""

    @property
    def local_rank(self) -> int:
        """This worker's number on its machine."""
        return int(os.environ.get("KVDIST_LOCAL_RANK", 0))

    def is_capable(self, capability: str) -> bool:
        """False for ``optimizer``.

        Raises:
            ValueError: another capability.
        """
        return not super().is_capable(capability)

    @as_in_c
    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        """Sum over all workers into `out`, or in place where there is no `out`; keys need no `broadcast` before."""
        new = [pair for pair in zip(*listed(key, value), strict=True) if pair[0] not in self._dtypes]
        if new:
            self.init(*map(list, zip(*new, strict=True)))
        super().pushpull(key, value, out, priority)

    def set_optimizer(self, optimizer) -> None:
        """Refuse: weights are updated by the workers.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(f"{self.type} only sums: leave out update_on_kvstore, or use dist_sync")


def counts_beside(fname) -> Path:
    """Where the counts of updates lie that belong to saved states."""
    return Path(f"{fname}.updates.json")


def in_one_call(step, store_of):
    """A step of MXNet's whose parameters travel by one `pushpull`, where its store is a `KVDist`."""

    @functools.wraps(step)
    def wrapped(*args):
        store = store_of(*args)
        if not isinstance(store, KVDist):
            return step(*args)
        with store.one_call():
            return step(*args)

    return wrapped


def made_by_name(create):
    """MXNet's choice of a store, which takes a name without ``dist`` for none where there is one device."""

    @functools.wraps(create)
    def wrapped(kvstore, *args):
        is_ours = isinstance(kvstore, str) and kvstore.lower() in (*NAMES, *NAMES_OF_SUMS)
        return create(mx.kv.create(kvstore) if is_ours else kvstore, *args)

    return wrapped


def with_first_weights(initialize):
    """Module's first use of a store, after which weights that the workers update are those of rank 0 on all of them."""

    @functools.wraps(initialize)
    def wrapped(kvstore, param_arrays, arg_params, param_names, update_on_kvstore):
        is_ours = isinstance(kvstore, KVDist) and not update_on_kvstore
        if is_ours:
            require_dense("weights", param_names, param_arrays)
        initialize(kvstore, param_arrays, arg_params, param_names, update_on_kvstore)
        if is_ours:
            for name, arrays in zip(param_names, param_arrays, strict=True):
                kvstore.pull(name, arrays)

    return wrapped


def of_dense_gradients(update):
    """Module's step where the workers update: it leaves gradients of rows to each worker, so these are refused."""

    @functools.wraps(update)
    def wrapped(param_arrays, grad_arrays, updater, num_device, kvstore=None, param_names=None):
        if isinstance(kvstore, KVDist):
            require_dense("gradients", param_names, grad_arrays)
        update(param_arrays, grad_arrays, updater, num_device, kvstore, param_names)

    return wrapped


def require_dense(what, names, values) -> None:
    """Refuse parameters whose weights or gradients are row_sparse, where the workers of Module update.

    Raises:
        MXNetError: names the first of them.
    """
    for name, arrays in zip(names, values, strict=True):
        if arrays[0] is not None and is_sparse(arrays[0]):
            raise MXNetError(
                f"the {what} of {name!r} are row_sparse, and Module would leave them to each worker where the workers"
                " update: let the servers update (dist_sync without MXNET_UPDATE_ON_KVSTORE=0), or make them dense"
            )


def for_servers_too(theirs, ours):
    """A function of MXNet's profiler that with ``profile_process='server'`` is kvdist's."""

    @functools.wraps(theirs)
    def wrapped(*args, **kwargs):
        is_for_servers = "server" in (*args, kwargs.get("profile_process"))
        return (ours if is_for_servers else theirs)(*args, **kwargs)

    return wrapped


for name in NAMES:
    mx.kv.KVStoreBase.kv_registry[name] = functools.partial(KVDist, name)
for name in NAMES_OF_SUMS:
    mx.kv.KVStoreBase.kv_registry[name] = functools.partial(Sums, name)
for name in OF_PROFILER:
    setattr(mx.profiler, name, for_servers_too(getattr(mx.profiler, name), getattr(profiler, name)))
trainer = mx.gluon.Trainer
trainer._allreduce_grads = in_one_call(trainer._allreduce_grads, lambda own: own._kvstore)
for user in (mx.model, mx.gluon.trainer):
    user._create_kvstore = made_by_name(user._create_kvstore)
if hasattr(mx, "module"):  # gone from MXNet 2
    mx.module.module._create_kvstore = mx.model._create_kvstore
    for user in (mx.module.module, mx.model):
        user._initialize_kvstore = with_first_weights(user._initialize_kvstore)
        user._update_params = of_dense_gradients(user._update_params)
        user._update_params_on_kvstore = in_one_call(user._update_params_on_kvstore, lambda *own: own[2])
