"""Stores of MXNet 1.9 whose values rest on kvdist's servers: importing this module makes them known to MXNet.

    import kvdist_store
    trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=mx.kv.create("kvdist"))

``kvdist`` waits for all workers in each step, as ``dist_sync`` does; ``kvdist_async`` does not. Rules that hold here:

* Values go over as NumPy arrays: `asnumpy` waits for MXNet's engine and copies, and results are assigned to the arrays
  of all devices. So every call but `push` is done when it returns.
* An optimizer is translated once, by `translation`; its rates and its `rescale_grad` are read at every push.
* kvdist does not import this, and nothing in it is changed for this.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import mxnet as mx
import numpy as np
from translation import tell, translated

from kvdist import kv

SPARSE = "this bridge carries dense arrays only, and was given a {} one: use .tostype('default'), or a store of MXNet"


@mx.kvstore.KVStoreBase.register
class KVDist(mx.kvstore.KVStoreBase):
    """The store ``kvdist``, whose servers wait for every worker. Made by ``mx.kv.create``, without arguments."""

    mode = "dist"

    def __init__(self) -> None:
        self._store = kv.create(self.mode)
        self._optimizer = None
        """The one of MXNet that the script has, and changes."""
        self._translated = None
        self._updater = None
        """Where `gluon.Trainer.load_states` looks for the optimizer."""

    @property
    def type(self) -> str:
        """Its name. Gluon reads it: what has ``dist`` in it is shared by workers, what has ``async`` does not wait."""
        return type(self).__name__.lower()

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

    def init(self, key, value) -> None:
        """Give keys their first value, which is that of rank 0; every worker calls it."""
        keys, values = listed(key, value)
        self._store.init(keys, [arrays[0].asnumpy() for arrays in values])

    def broadcast(self, key, value, out, priority: int = 0) -> None:
        """Give every worker rank 0's values, in the store and in `out`; every worker calls it."""
        keys, values = listed(key, value)
        _, outs = listed(key, out)
        results = [empty_like(arrays[0]) for arrays in outs]
        self._store.broadcast(keys, [arrays[0].asnumpy() for arrays in values], results, priority)
        write(results, outs)

    def push(self, key, value, priority: int = 0) -> None:
        """Contribute: with an optimizer gradients, without one new values; summed over devices, then over workers."""
        keys, values = listed(key, value)
        self._tell(keys)
        self._store.push(keys, [numpy_of(arrays) for arrays in values], priority)

    def pull(self, key, out=None, priority: int = 0, ignore_sparse: bool = True) -> None:
        """Read keys into `out`."""
        if out is None:
            raise ValueError("pull needs out: the arrays that receive the values")
        keys, outs = listed(key, out)
        results = [empty_like(arrays[0]) for arrays in outs]
        self._store.pull(keys, results, priority)
        write(results, outs)

    def pushpull(self, key, value, out=None, priority: int = 0) -> None:
        """Contribute, and read the result into `out`, or into `value` where there is no `out`."""
        keys, values = listed(key, value)
        outs = values if out is None else listed(key, out)[1]
        results = [empty_like(arrays[0]) for arrays in outs]
        self._tell(keys)
        self._store.pushpull(keys, [numpy_of(arrays) for arrays in values], results, priority)
        write(results, outs)

    def row_sparse_pull(self, key, out=None, priority: int = 0, row_ids=None) -> None:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(SPARSE.format("row_sparse"))

    def set_gradient_compression(self, compression_params) -> None:
        """Not offered.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("this bridge does not compress gradients: leave out compression_params")

    def set_optimizer(self, optimizer) -> None:
        """Let the servers update the values as an optimizer of MXNet would; every worker calls it.

        Raises:
            ValueError, TypeError: kvdist has none that does the same; the message says why, and what to do instead.
        """
        chosen = translated(optimizer)
        self._store.set_optimizer(chosen)
        self._optimizer, self._translated = optimizer, chosen
        self._updater = SimpleNamespace(optimizer=optimizer)

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

    _barrier = barrier  # what scripts call that were written for MXNet's own stores

    def close(self) -> None:
        """Leave the cluster. A script that does not call it leaves when it ends."""
        self._store.close()

    def _tell(self, keys) -> None:
        if self._optimizer is not None:
            tell(self._translated, self._optimizer, keys)

    def _require_optimizer(self) -> None:
        if self._optimizer is None:
            raise ValueError("this store has no optimizer, so there are no states: call set_optimizer first")


@mx.kvstore.KVStoreBase.register
class KVDist_Async(KVDist):
    """The store ``kvdist_async``, whose servers apply each push as it comes."""

    mode = "dist_async"


def listed(key, value) -> tuple[list, list]:
    """Keys, and for each the list of its arrays, one for a device, of any spelling that MXNet allows.

    Raises:
        NotImplementedError: an array is sparse.
        ValueError: there are not as many values as keys.
    """
    is_list = isinstance(key, (list, tuple))
    keys, values = (list(key), list(value)) if is_list else ([key], [value])
    if len(keys) != len(values):
        raise ValueError(f"{len(keys)} keys were given with {len(values)} values")
    arrays = [list(one) if isinstance(one, (list, tuple)) else [one] for one in values]
    for array in (array for own in arrays for array in own):
        if array.stype != "default":
            raise NotImplementedError(SPARSE.format(array.stype))
    return keys, arrays


def numpy_of(arrays) -> list[np.ndarray]:
    """Copies in host memory."""
    return [array.asnumpy() for array in arrays]


def empty_like(array) -> np.ndarray:
    """Room for a result."""
    return np.empty(array.shape, array.dtype)


def write(results, outs) -> None:
    """Assign each key's result to its arrays on all devices."""
    for result, arrays in zip(results, outs, strict=True):
        for array in arrays:
            array[() if array.ndim == 0 else slice(None)] = result


def counts_beside(fname) -> Path:
    """Where the counts of updates lie that belong to saved states."""
    return Path(f"{fname}.updates.json")
