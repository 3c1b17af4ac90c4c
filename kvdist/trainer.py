"""`Trainer`: updates the parameters of a torch network through a store. It takes the place of ``torch.optim``.

Rules that hold here:

* All parameters travel in one list call per step, in the order given, so the first layers, which the next forward
  pass needs first, come first. Their keys are their positions, 0, 1, 2, ….
* Nothing is sent before the first `step` (or `allreduce_grads`, `update`, `broadcast_parameters`). Then rank 0's
  weights become everybody's.
* With ``overlap=True`` gradients travel in buckets during the backward pass instead, from the second step on. Which and
  when is for `kvdist.buckets` to say, what happens to them for `kvdist.overlap`.
* Weights are written in place, or shown where they lie with ``share_weights=True``; autograd is told either way, so a
  backward pass through the old ones raises.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Mapping
from typing import Any

from kvdist.config import ClusterConfig
from kvdist.errors import ConfigError, KeyNotInitialised
from kvdist.kvstore import create as create_store
from kvdist.kvstore import values
from kvdist.kvstore.base import KVStore
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.registry import create as create_optimizer
from kvdist.optimizer.step import Extent
from kvdist.optimizer.updater import Updater
from kvdist.overlap import Overlap
from kvdist.parameters import Parameter, collect
from kvdist.shared_weights import SharedWeights

try:
    import torch
except ImportError as error:
    raise ImportError("kvdist.Trainer needs torch, which is not installed: pip install 'kvdist[torch]'") from error

LOG = logging.getLogger("kvdist")

BIG_PARAMETER_ELEMENTS = 16 * 1024 * 1024
"""With a larger parameter the store ``local`` leaves the update to the devices."""

BATCH_SIZE_LIMIT = 1 << 32
"""Sizes are below it."""

ASYNCHRONOUS = frozenset({"dist_async", "dist_device_async", "dist_async_device"})
"""Stores that cannot hand out the sum of a round, because they have no rounds."""


class Trainer:
    """Applies an optimizer to parameters, on the store or here, after summing gradients over devices and workers.

    Args:
        params: ``net.parameters()``, ``net.named_parameters()``, a dict of name to parameter (taken in the order of its
            sorted names), or torch's parameter groups ``{'params': …, 'lr_mult': …, 'wd_mult': …}``. With several
            devices each parameter is a list of its replicas, one per device, as in
            ``zip(net0.parameters(), net1.parameters())``. A parameter that appears twice counts once. Those with
            ``requires_grad=False`` when the trainer is made are not trained, only made equal to rank 0's.
        optimizer: a name such as ``'adam'``, or an `Optimizer` of kvdist.
        optimizer_params: hyper-parameters for a name, such as ``{'learning_rate': .001}``.
        kvstore: the name of a store, which the first step creates; a store; or None to update without one.
        compression_params: for gradient compression, which no store offers yet: None.
        update_on_kvstore: True: the store holds the optimizer and gives back weights. False: it sums gradients, and
            each worker updates. None: on the store where it can.
        overlap: send gradients during the backward pass, each bucket as soon as it is complete, rather than all in
            `step`. The weights come out the same, to the bit. It needs torch's convention: losses are means, and
            `step` takes no size, because that would be known too late. Each step takes the gradients of one backward
            pass; others go into `no_sync`. Gradients must stay as they are between ``backward()`` and ``step()``, and a
            learning rate set between the two is that of the next step where the store updates.
        share_weights: after a step, large parameters show the memory of the servers of this host instead of having a
            copy of it; see `kvdist.shared_weights`. Where the store cannot do that, they are copied as ever. Needs a
            store that updates, one device, and no ``overlap``.

    Raises:
        TypeError: parameters or optimizer are of a wrong type.
        ValueError: parameters do not fit each other, or settings contradict each other.
    """

    def __init__(
        self,
        params: Any,
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStore | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        overlap: bool = False,
        share_weights: bool = False,
    ) -> None:
        self._parameters = collect(params)
        self._num_devices = len(self._parameters[0].replicas)
        self._optimizer = _make_optimizer(optimizer, optimizer_params)
        self._scale = self._optimizer.rescale_grad
        if compression_params:
            raise ValueError("compression_params: no store of this version compresses gradients; leave it out")
        if kvstore is None and self._num_devices > 1:
            raise ValueError(
                f"the parameters have replicas on {self._num_devices} devices, and without a store nobody sums their"
                " gradients; use kvstore='device'"
            )
        if kvstore is not None and not isinstance(kvstore, str | KVStore):
            raise TypeError(f"kvstore is the name of a store, a KVStore, or None, not {type(kvstore).__name__}")
        self._kvstore_wanted = kvstore
        self._update_on_kvstore_wanted = update_on_kvstore
        self._kvstore: KVStore | None = None
        self._update_on_kvstore = False
        self._started = False
        self._closed = False
        if share_weights and (overlap or self._num_devices > 1 or update_on_kvstore is False):
            raise ValueError(
                "share_weights=True needs one device, a store that updates the weights, and overlap=False: parameters"
                " are to show what the servers have made"
            )
        self._overlaps = overlap
        self._shares = share_weights
        self._shared: SharedWeights | None = None
        self._overlap: Overlap | None = None
        """There is one once the first step has found a store to send to."""
        self._updaters = [Updater(self._optimizer) for _ in range(self._num_devices)]
        self._trained = [(key, one) for key, one in enumerate(self._parameters) if one.trained]
        self._optimizer.set_lr_mult({**self._optimizer.lr_mult, **_multipliers(self._parameters, "lr_mult")})
        self._optimizer.set_wd_mult({**self._optimizer.wd_mult, **_multipliers(self._parameters, "wd_mult")})

    def step(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Make one step of training: sum the gradients over devices and workers, update, and get the new weights.

        ``step()`` is torch's convention: each device's loss is a mean over its examples, and gradients are averaged
        over workers and devices, as in DistributedDataParallel. ``step(batch_size)`` is Gluon's: losses are sums; each
        worker's gradient is divided by the size it gives, its examples on all devices, and these are summed over the
        workers. The size may change from step to step. Where workers update, ``grad`` holds that sum afterwards.

        A parameter without a gradient (``grad`` is None) on every device of every worker stays as it is. Where only
        some have none, those contribute nothing and get the others' update; nobody waits for them.

        With ``overlap=True`` every worker must call it after each backward pass outside of `no_sync`, also after one
        that failed: what was sent in it counts, and the others wait for the rest. What went wrong with gradients on
        their way is raised here at the latest, when nothing is under way any more.

        Args:
            batch_size: None, or how many examples this worker's gradients sum.
            ignore_stale_grad: kept for scripts of the mirrored system. Torch does not tell old gradients from new ones,
                so this changes nothing: call ``zero_grad()`` before each backward pass.

        Raises:
            ValueError: the size is not one, or is given with ``overlap=True``.
            RuntimeError: gradients were changed after they had been sent by ``overlap=True``.
        """
        self._require_no_size(batch_size)
        self._start()
        divisor = self._divisor(batch_size)
        average = batch_size is None
        if self._overlap is not None:
            self._overlap.finish()
            if not self._update_on_kvstore:
                self._update_here(divisor)
            return
        if self._update_on_kvstore:
            if self._shared is not None:
                self._shared.require_unchanged()
            self._optimizer.rescale_grad = self._scale / divisor
            self._push_grads_pull_weights(average, samples=0 if average else max(1, round(divisor)))
            return
        if not average and self._kvstore is not None:
            # Workers may give different sizes, so each divides its own gradients, before they are summed.
            self._divide_grads(divisor)
            divisor = 1
        self._sum_grads(average)
        self._update_here(divisor)

    def allreduce_grads(self, *, average: bool = False) -> None:
        """Replace each gradient by its sum over devices and workers, for use (clipping, say) before `update`.

        Args:
            average: divide the sum by the number of workers, as ``step()`` does; then call ``update()``. Needed with
                ``overlap=True``, where they are divided on their way.

        Raises:
            RuntimeError: the weights are updated on the store, or gradients were changed after they had been sent.
            ValueError: ``overlap=True`` without ``average=True``.
        """
        if self._overlaps and not average:
            raise ValueError(
                "with overlap=True gradients are averaged over the workers while the backward pass runs; call"
                " allreduce_grads(average=True), or make the trainer with overlap=False"
            )
        self._start()
        self._require_update_here("allreduce_grads")
        if self._overlap is not None:
            self._overlap.finish()
        else:
            self._sum_grads(average)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights here with the present gradients, after `allreduce_grads`.

        Args:
            batch_size: the sums of gradients are divided by it, so every worker must give the same; None divides by
                the number of devices.
            ignore_stale_grad: as in `step`.

        Raises:
            RuntimeError: the weights are updated on the store, or gradients are still being summed.
        """
        self._start()
        self._require_update_here("update")
        self._require_nothing_sent("update", "allreduce_grads(average=True)")
        self._update_here(self._divisor(batch_size))

    def broadcast_parameters(self) -> None:
        """Make rank 0's present weights everybody's, on all devices and on the store; the optimizer's state stays.

        Call it on every worker after weights were changed other than by `step`, such as by ``load_state_dict``.

        Raises:
            RuntimeError: gradients of a step have been sent (``overlap=True``) that has not been made.
        """
        self._require_nothing_sent("broadcast_parameters", "step()")
        if not self._started:
            self._start()
        elif self._kvstore is not None:
            self._broadcast(self._kvstore)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Within this context backward passes only add to the gradients; nothing is sent.

        For all passes but the last before a step, as in DistributedDataParallel, and for those whose gradients are
        not for training. The last pass is outside of it and sends what has come together. Without ``overlap=True``
        nothing is ever sent before `step`, and this changes nothing.
        """
        return contextlib.nullcontext() if self._overlap is None else self._overlap.paused()

    def close(self) -> None:
        """Let go of the parameters, and close the store if it was given by its name; a second call does nothing.

        Backward passes send nothing any more, `step` raises. It waits for nothing: call it after a step. It is needed
        only with ``overlap=True``, where another trainer is to have the same parameters.
        """
        if self._closed:
            return
        self._closed = True
        if self._overlap is not None:
            self._overlap.remove_hooks()
        if self._kvstore is not None and self._kvstore is not self._kvstore_wanted:
            self._kvstore.close()

    @property
    def kvstore(self) -> KVStore | None:
        """The store in use; None before the first step, and when the weights are updated without one."""
        return self._kvstore

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. Its learning rate, wd and multipliers may be changed at any time."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The present learning rate, before the multipliers of groups; with a schedule its base."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Change the learning rate from the next step on, on servers too; every worker must set the same.

        With ``overlap=True`` and a store that updates, a step begins with the first gradient that it sends.
        """
        self._optimizer.learning_rate = lr

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this trainer has been closed; make another one")
        if self._started:
            return
        store = self._chosen_store()
        if store is not None:
            self._update_on_kvstore = self._decide_update_on_kvstore(store)
            _require_unused(store)
            store.agree(self._statement())
            # With overlap the numbers of a step are fixed before it is made, so the store has its own copy of them.
            sent = copy.copy(self._optimizer) if self._overlaps else self._optimizer
            if self._update_on_kvstore:
                store.set_optimizer(sent)
            if self._shares and self._update_on_kvstore:
                self._shared = SharedWeights([parameter for _, parameter in self._trained])
            self._broadcast(store)
            if self._overlaps:
                self._optimizer.rescale_grad = self._scale / self._num_devices
                sent_or_none = sent if self._update_on_kvstore else None
                self._overlap = Overlap(store, self._trained, self._optimizer, sent_or_none)
        self._kvstore = store
        self._started = True

    def _chosen_store(self) -> KVStore | None:
        if not isinstance(self._kvstore_wanted, str):
            return self._kvstore_wanted
        store = create_store(self._kvstore_wanted)
        if self._num_devices == 1 and store.num_servers == 0 and store.num_workers == 1:
            store.close()  # one device, one worker: a store would only copy
            _warn_if_alone(store.type)
            return None
        return store

    def _decide_update_on_kvstore(self, store: KVStore) -> bool:
        wanted = self._update_on_kvstore_wanted
        capable = store.is_capable("optimizer")
        if wanted and not capable:
            raise ValueError(f"the store {store.type!r} cannot update weights; leave update_on_kvstore out")
        if store.type in ASYNCHRONOUS:
            if wanted is False:
                raise ValueError(f"the store {store.type!r} trains asynchronously, which needs update_on_kvstore=True")
            return True
        if wanted is not None:
            return wanted
        if self._kvstore_wanted == "local":
            return capable and all(one.replicas[0].numel() <= BIG_PARAMETER_ELEMENTS for one in self._parameters)
        return capable

    def _broadcast(self, store: KVStore) -> None:
        if self._shared is not None:
            self._shared.own()
        replicas = [parameter.replicas for parameter in self._parameters]
        store.broadcast(list(range(len(replicas))), [one[0] for one in replicas], out=replicas)

    def _statement(self) -> str:
        """What all workers must have in common, in words. Shapes and dtypes are compared key by key."""
        trained = _ranges([key for key, _ in self._trained])
        statement = f"{len(self._parameters)} parameters, trained are {trained}"
        if self._update_on_kvstore:
            return statement  # the store compares the optimizers itself, and their numbers in each round
        return f"{statement}, on each worker by {self._optimizer.describe()}"

    def _divisor(self, batch_size: float | None) -> float:
        divisor = self._num_devices if batch_size is None else batch_size
        if not 0 < divisor < BATCH_SIZE_LIMIT:
            raise ValueError(
                f"batch_size is {batch_size}; it counts the examples behind the gradients, more than 0 and below 2^32"
            )
        return divisor

    def _divide_grads(self, divisor: float) -> None:
        grads = [grad for _, parameter in self._trained for grad in parameter.grads() or ()]
        if grads:
            torch._foreach_div_(grads, divisor)

    def _push_grads_pull_weights(self, average: bool, samples: int) -> None:
        assert self._kvstore is not None
        keys = [key for key, _ in self._trained]
        grads = [parameter.grads() for _, parameter in self._trained]
        weights = [parameter.replicas for _, parameter in self._trained]
        if self._shared is None:
            self._kvstore.pushpull(keys, grads, out=weights, average=average, samples=samples)
            return
        shown = self._kvstore.pushpull_shared(keys, grads, weights, average=average, samples=samples)
        self._shared.take(shown)

    def _sum_grads(self, average: bool) -> None:
        if self._kvstore is None:
            return
        # On a cluster others may have the gradient that is missing here, and their sum has to go somewhere.
        alone = self._kvstore.num_workers == 1
        present = [(key, one) for key, one in self._trained if not alone or one.grads() is not None]
        for _, parameter in present:
            parameter.fill_grads()
        if present:
            grads = [parameter.grads() for _, parameter in present]
            self._kvstore.pushpull([key for key, _ in present], grads, average=average)

    def _update_here(self, divisor: float) -> None:
        self._optimizer.rescale_grad = self._scale / divisor
        for key, parameter in self._trained:
            for updater, replica in zip(self._updaters, parameter.replicas, strict=True):
                if replica.grad is not None:
                    _update(updater, key, replica, replica.grad)

    def _require_no_size(self, batch_size: float | None) -> None:
        if self._overlaps and batch_size is not None:
            raise ValueError(
                f"step({batch_size}) with overlap=True: gradients have left during backward(), when nobody had said by"
                " what to divide them. Make the loss a mean over its examples and call step() without a size, or make"
                " the trainer with overlap=False"
            )

    def _require_nothing_sent(self, method: str, first: str) -> None:
        if self._overlap is not None and self._overlap.is_open:
            raise RuntimeError(
                f"{method}() while gradients of a backward pass are under way (overlap=True): call {first} before it,"
                " or put the pass into `with trainer.no_sync():` if its gradients are not to be used"
            )

    def _require_update_here(self, method: str) -> None:
        if self._update_on_kvstore:
            raise RuntimeError(
                f"{method}() cannot be used while the store updates the weights: gradients never come back. Call"
                " step(), or make the trainer with update_on_kvstore=False"
            )


def _update(updater: Updater, key: int, weight: torch.Tensor, grad: torch.Tensor) -> None:
    shape, dtype = values.describe(weight)
    values.require(key, grad, shape, dtype)
    bits = values.writable_bits(weight)
    target = values.read_bits(weight).copy() if bits is None else bits
    scales, extent = [updater.optimizer.rescale_grad], Extent(key, shape)
    updater.update(key, target, [values.read_bits(grad)], scales, dtype, target, extent=extent)
    if bits is None:
        values.write_bits(weight, target)


def _require_unused(store: KVStore) -> None:
    try:
        store.pull(0)
    except KeyNotInitialised:
        return
    raise ValueError(
        "the store holds key 0 already, so another Trainer uses it, and both would share their weights;"
        f" give each its own store: kv.create({store.type!r})"
    )


def _make_optimizer(optimizer: Any, optimizer_params: Mapping[str, Any] | None) -> Optimizer:
    by_torch = isinstance(optimizer, torch.optim.Optimizer) or (
        isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)
    )
    if by_torch:
        raise TypeError(
            "an optimizer of torch cannot travel to the servers; give a name and its numbers, such as"
            " Trainer(net.parameters(), 'adam', {'learning_rate': .001})"
        )
    return create_optimizer(optimizer, **(optimizer_params or {}))


def _multipliers(parameters: list[Parameter], entry: str) -> dict[int, float]:
    return {key: one.group[entry] for key, one in enumerate(parameters) if entry in one.group}


def _ranges(numbers: list[int]) -> str:
    """Ascending numbers in short: ``0-3, 7``."""
    starts = [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n - 1]
    ends = [n for i, n in enumerate(numbers) if i + 1 == len(numbers) or numbers[i + 1] != n + 1]
    pairs = zip(starts, ends, strict=True)
    return ", ".join(str(start) if start == end else f"{start}-{end}" for start, end in pairs)


def _warn_if_alone(name: str) -> None:
    try:
        cluster = ClusterConfig.from_env()
    except ConfigError:
        return
    if cluster is not None and cluster.num_workers > 1:
        LOG.warning(
            "this worker is one of %d, but its Trainer updates alone (kvstore=%r): each worker trains a model of its"
            " own. Give kvstore='dist' to train one together",
            cluster.num_workers,
            name,
        )
