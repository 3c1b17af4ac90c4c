"""`Trainer`: updates the parameters of a torch network through a store, in place of a ``torch.optim`` optimizer.

`trainer_config` decides where weights are updated, `grad_checks` reads torch's version counters. Invariants:

* Nothing is sent before the first `step` (or `allreduce_grads`, `update`, `broadcast_parameters`), which makes rank 0's
  weights those of all workers.
* With ``overlap=True`` gradients travel in buckets during the backward pass, from the second step on: see
  `kvdist.buckets` and `kvdist.training.overlap`.
* Weights are written in place, or with ``share_weights=True`` shown in the servers' memory; torch counts either as a
  change, so a backward pass through the old weights raises.
* Where possible, errors in this worker's part of a step are raised before anything of it is sent.
* All parameters travel in one list call, in the order given, so the first layers, which the next forward pass needs
  first, come first. Keys are positions: 0, 1, 2, …; where parameters have names, those of rank 0, which the first step
  asks for, so that a name is the same parameter on all workers.
* Where workers update, all must update the same parameters by the same numbers. One more key tells: see
  `kvdist.training.ballot`. A parameter without a gradient on any worker stays as it is everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch

from kvdist.checkpoint.shards import samples_in, updates_in
from kvdist.config.policies import Asynchronous, LocalSteps, Pace, TrainingPolicy, updates_between
from kvdist.errors import ConfigError, KvdistError, RolledBackError
from kvdist.kvstore import create as create_store
from kvdist.kvstore.adapter import Adapted, KVStoreBase
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.checkpoints import Checkpoint, absolute, own_steps
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.naming import NamedKey
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState, digest
from kvdist.optimizer.torch_rules import TorchRule
from kvdist.protocol.messages import Due, DueWhen
from kvdist.schema import real_number, whole_number
from kvdist.training.ballot import Ballot
from kvdist.training.batch_sizes import Speed
from kvdist.training.data import Batches, DrivenSampler, HandedOut, SplitSampler, count_as_used
from kvdist.training.grad_checks import Stale, Watch, refuse_changed, refuse_nonfinite, refuse_untrained
from kvdist.training.join import Join, NextStep
from kvdist.training.local_steps import Exchanges, OuterSteps, outer_optimizer
from kvdist.training.overlap import Overlap, weakly
from kvdist.training.parameters import (
    Grads,
    Parameter,
    collect,
    divide,
    identities,
    multipliers,
    named_keys,
    reordered,
    require_shapes,
    scale,
)
from kvdist.training.torch_optimizer import TorchOptimizer
from kvdist.training.trainer_config import (
    ASYNCHRONOUS,
    checked_clip_norm,
    choose_store,
    compression_of,
    decide_update_on_kvstore,
    fit,
    group_entries,
    make_optimizer,
    model_statement,
    policy_of,
    refuse_overflow,
    refuse_overlap_of_snapshots,
    refuse_sent,
    refuse_size,
    refuse_updated_there,
    refuse_what_contradicts,
    require_averages,
    require_enough,
    require_joinable,
    require_policy,
    require_samples,
    require_survivable,
    require_unused,
    statement,
)
from kvdist.training.training_state import TrainingState
from kvdist.training.weights import LocalUpdate, SharedWeights

LOG = logging.getLogger("kvdist")
BATCH_SIZE_LIMIT = 1 << 32
"""Batch sizes are smaller: they travel as 32 bits."""


class Trainer:
    """Optimizer for the parameters of a torch network, with gradients summed over devices and workers.

    It replaces a ``torch.optim`` optimizer: call `step` after each backward pass. The update runs in the store or in
    each worker (`update_on_kvstore`).

    Args:
        params: ``net.parameters()``, ``net.named_parameters()``, a dict of names to parameters (used in the order of
            sorted names), or parameter groups ``{'params': …, 'lr_mult': …, 'wd_mult': …}``. With several devices each
            entry is a list of the replicas of a parameter, one per device, as in ``zip(net0.parameters(),
            net1.parameters())``. Duplicates count once. Workers match parameters by name, or by position if they have
            no names, so a set needs names. Parameters with ``requires_grad=False`` at this time are not trained; the
            first step only copies the values of rank 0 into them.
        optimizer: a name such as ``'adam'`` or ``'torch.adamw'``, a `kvdist.optimizer.Optimizer`, or a ``torch.optim``
            optimizer of the same parameters. Parameter groups and schedulers of the latter stay in effect, but call
            `step` of the trainer instead of its ``step``.
        optimizer_params: hyper-parameters for a name, such as ``{'learning_rate': .001}``. With ``'torch.…'`` they have
            torch's names, such as ``'lr'``, also as entries of parameter groups.
        kvstore: a name for `kvdist.kv.create`, which the first step calls; a `KVStore` or custom
            `kvdist.kv.KVStoreBase`; None to update without a store.
        compression_params: compression of gradients, such as ``{'type': '2bit', 'threshold': 0.5}``; see
            `KVStore.set_gradient_compression`. Trained parameters must be float32. None keeps the setting of the store.
        update_on_kvstore: True: the store holds the optimizer and returns weights. False: the store sums gradients, and
            each worker updates. None: the store updates if it can, unless ``MXNET_UPDATE_ON_KVSTORE=0`` is set.
        overlap: send gradients during the backward pass, in buckets, instead of in `step`. The resulting weights are
            bitwise equal; only without servers and with three workers or more do they differ by rounding. Requires
            losses that are means, `step` without arguments, and a single backward pass per step outside `no_sync`.
            Gradients must not change between ``backward()`` and ``step()``. If the store updates, a learning rate that
            is set between the two applies to the next step.
        share_weights: let large parameters point into the shared memory of servers on this host after a step, instead
            of copying the weights. Requires a store that updates and a single device; not with `overlap`. Other
            parameters are copied.
        reject_nonfinite: check gradients of this worker before they are sent, which reads them once. On NaN or infinity
            `step` raises `FloatingPointError` with the worker and the parameter. Not with `overlap`.
        clip_norm: largest L2 norm of the gradient of a step, over all parameters, as with
            ``torch.nn.utils.clip_grad_norm_(parameters, clip_norm)`` under DistributedDataParallel. It applies to the
            mean of the gradients of all workers, or with ``step(batch_size)`` to their sum. Must be positive; infinity
            only measures `grad_norm`. The workers update, or with ``update_on_kvstore=True`` the servers of a
            synchronous ``dist`` store, where a norm that is not finite raises `FloatingPointError`. Not with `overlap`,
            `share_weights` or ``dist_async``. None: no clipping.
        average_half_life: will be removed; use ``torch.optim.swa_utils.AveragedModel`` on a worker. Sets
            `Optimizer.average_half_life`; under a policy of local steps an update is an exchange.

    Raises:
        TypeError: parameters or optimizer are of a wrong type.
        ValueError: parameters do not match each other, or arguments contradict each other.
        ConfigError: the workers update, and ``KVDIST_KERNELS=numba``, which cannot be imported.
    """

    _has_warned = _has_warned_of_grads = False
    _undivided = 0
    """Examples that `batches` reads on every worker, as no sampler divides them; 0 for none."""

    def __init__(
        self,
        params: Any,
        optimizer: str | Optimizer | torch.optim.Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: str | KVStoreBase | None = "device",
        compression_params: Mapping[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        overlap: bool = False,
        share_weights: bool = False,
        reject_nonfinite: bool = False,
        clip_norm: float | None = None,
        average_half_life: float | None = None,
    ) -> None:
        self._optimizer = make_optimizer(params, optimizer, optimizer_params)
        as_made = self._optimizer.__getstate__()
        self._parameters = collect(params, group_entries(optimizer, self._optimizer))
        self._num_devices = len(self._parameters[0].replicas)
        self._scale = self._optimizer.rescale_grad
        refuse_what_contradicts(
            kvstore, self._num_devices, compression_params, update_on_kvstore, overlap, share_weights, reject_nonfinite
        )
        self._clip_norm = checked_clip_norm(clip_norm, kvstore, update_on_kvstore, overlap, share_weights)
        self._grad_norm: torch.Tensor | float | None = None
        self._kvstore_wanted = kvstore
        self._compression_params = compression_params
        self._update_on_kvstore_wanted = update_on_kvstore if clip_norm is None else bool(update_on_kvstore)
        self._kvstore: KVStoreBase | None = None
        self._exchange: Exchange | None = None  # there is one when there is a store
        self._update_on_kvstore = False
        self._between: Exchanges | None = None  # there is one where not every step is an exchange
        self._started = self._closed = self._shows_averages = self._has_chosen = self._has_keys = False
        self._watcher = weakly(self._rolled_back)
        self._overlaps, self._shares = overlap, share_weights
        self._shared: SharedWeights | None = None
        self._join: Join | None = None  # there is one within `join`
        self._overlap: Overlap | None = None  # there is one once the first step has found a store to send to
        self._rejects_nonfinite = reject_nonfinite
        self._nonfinite_steps = self._updates = 0
        self._speed = Speed([replica.device for replica in self._parameters[0].replicas])
        self._samples = self._handed = 0
        """Examples in the weights, where no server counts them; those that `SplitSampler`s gave since the last step."""
        self._behind = 0
        """How many steps of the others `batches` leaves out, because this worker has joined a running job."""
        self._joined_at: int | None = None
        """At which version it has, once that is known."""
        self._loaded_updates = 0
        """By how many updates a loaded checkpoint was ahead of the steps made here."""
        self._is_void = False
        """Whether all have gone back to a snapshot, and the weights here are not yet those."""
        self._handed_out: HandedOut = {}
        self._queue: DrivenSampler | None = None
        """What `batches` has iterated last."""
        self._position: Mapping[str, Any] | None = None
        """In the data, of a checkpoint that was loaded."""
        self._loaded_states: Sequence[SliceState | None] = [None] * sum(one.trained for one in self._parameters)
        """Of the trained parameters, until the first step has a place for them."""
        self._torch_optimizer: TorchOptimizer | None = None
        self._training_state: TrainingState | None = None
        self._assign_keys()
        self._summed: list[bool] | None = None
        """For which trained parameters the last `allreduce_grads` found a gradient anywhere, until they are updated."""
        self._optimizer.set_lr_mult({**self._optimizer.lr_mult, **multipliers(self._parameters, "lr_mult")})
        self._optimizer.set_wd_mult({**self._optimizer.wd_mult, **multipliers(self._parameters, "wd_mult")})
        given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        has_numbers = isinstance(self._optimizer, TorchRule) and any(one.group for one in self._parameters)
        if given is not None or has_numbers:
            self._torch_optimizer = self._shown_as_torch(given)
            self._sync_hyperparameters()
        self._optimizer.take(as_made, average_half_life)

    def _assign_keys(self) -> None:
        """Let the place of each parameter be its key."""
        self._local = LocalUpdate(self._optimizer, self._parameters)
        self._trained = [(key, one) for key, one in enumerate(self._parameters) if one.trained]
        self._untrained = [one for one in self._parameters if not one.trained]
        self._watch = Watch([parameter for _, parameter in self._trained])

    def _match_names(self, store: KVStore) -> str:
        """Let parameters with names have the keys that they have on worker 0, whatever the order in which they came.

        Returns:
            What has been agreed on so far, for `statement`; '' if there are no names, and places count.

        Raises:
            InitMismatch: another worker has other parameters.
        """
        known_by = identities(self._parameters)
        if known_by is None or (store.num_workers == 1 and store.on_loss == "fail"):
            return ""
        store.agree(model_statement(self._parameters, known_by))
        (others,) = store.from_rank_0([known_by])
        order = reordered(known_by, others)
        if order == sorted(order):
            return "by their names, "
        key_of = {place: key for key, place in enumerate(order)}
        states = {id(one): state for (_, one), state in zip(self._trained, self._loaded_states, strict=True)}
        self._parameters[:] = [self._parameters[place] for place in order]
        for table in (self._optimizer.lr_mult, self._optimizer.wd_mult):
            factors = {key_of.get(key, key): factor for key, factor in table.items()}
            table.clear()
            table.update(factors)
        self._assign_keys()
        self._loaded_states = [states[id(one)] for _, one in self._trained]
        if self._torch_optimizer is not None:
            self._torch_optimizer.rekey(key_of)
            self._sync_hyperparameters()
        return "by their names, "

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raises a `TypeError`: a trainer cannot be pickled or copied."""
        raise TypeError(
            "a Trainer cannot be pickled, copied or sent to another process: its store belongs to the process that"
            " created it. Keep trainers out of data sets and models; save_states and save_checkpoint keep the state of"
            " a trainer"
        )

    def step(
        self, batch_size: float | None = None, ignore_stale_grad: bool = False, *, samples: int | None = None
    ) -> None:
        """Make a training step: combine the gradients of all devices and workers, update the weights, and fetch them.

        The first call of a trainer copies the weights of rank 0 to all workers before the update. Under a policy with
        local steps (`kvdist.local_sgd`, `kvdist.diloco`, `kvdist.quota`) the step updates the weights of this worker
        alone, and an exchange follows when it is due; under a quota without local steps it adds up gradients until the
        quota is reached. After a rollback (``--snapshots``) the call makes no step: it fetches the weights of the
        snapshot and returns, and `version` is lower than before.

        What becomes of the gradients:

        - ``step()``: losses are means over the examples of a device, as in torch. Gradients are averaged over workers
          and devices, as in DistributedDataParallel.
        - ``step(samples=n)``: losses are means, for batches of unequal sizes. The gradient of this worker gets the
          weight n divided by the sum of n over all workers, so the step equals that of a single batch of all examples.
        - ``step(batch_size)``: losses are sums, as in Gluon. The gradient of this worker is divided by its
          `batch_size`, and the results are summed over the workers. The size may differ from step to step.

        A parameter whose ``grad`` is None on every device of every worker stays unchanged. If it is None on some of
        them, those contribute nothing and get the update of the others; no worker waits for them. If the workers
        update, ``grad`` holds the applied gradient afterwards.

        With ``overlap=True`` every worker must call `step` after each backward pass outside `no_sync`, even after a
        pass that failed: gradients that were sent count, and the other workers wait for the rest. `step` raises errors
        of such gradients at the latest, after all transfers have ended.

        Args:
            batch_size: number of examples of this worker, on all devices; None for losses that are means.
            samples: number of examples (or tokens) over which the loss of this worker is the mean, on all devices. All
                workers of the step must pass it; a worker without examples calls `skip_step`. On ``dist_async``, where
                each push is an update, it does not weight.
            ignore_stale_grad: False raises an error for a gradient that an earlier step has already used, because
                neither a backward pass nor ``zero_grad()`` has renewed it. True leaves such a gradient out.

        Raises:
            ValueError: a number is out of range, both numbers are passed, or a number is passed with ``overlap=True``;
                or `samples` differs from the number of examples that a `QueueSampler` has delivered through `batches`.
            OptimizerMismatch: only some workers pass `samples`.
            RuntimeError: a gradient is stale, weights in the store were changed other than by `step`, or gradients were
                changed after ``overlap=True`` had sent them.
            FloatingPointError: a gradient is not finite (``reject_nonfinite=True``), or on every worker, the norm by
                which servers clip is not finite.
        """
        if self._overlaps and batch_size is not None:
            refuse_size(f"step({batch_size})")
        if samples is not None:
            handed_out = self._unpushed() - (0 if self._between is None else self._between.handed_out)
            samples = require_samples(samples, batch_size, self._overlaps, handed_out)
            self._speed.computed(samples)
        self._start()
        examples = self._fresh if samples is None else samples
        with self._counting_what_leaves(), self._skipping_rollback():
            self._take_part()
            self._step(batch_size, Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE, samples)
        self._count_as_used()
        self._report_times(examples)

    def batches(self, loader: Iterable[Any]) -> Batches:
        """Iterate a loader and let its `SplitSampler` or `QueueSampler` count the batches that a step has used.

        Write ``for inputs, targets in trainer.batches(loader):`` instead of ``for inputs, targets in loader:`` to save
        the position of the sampler. Then ``sampler.state_dict()`` is the position after the last `step`. It includes
        neither batches that worker processes of the loader have prepared, nor batches whose gradients wait for the next
        step (`no_sync`, or several backward passes). A run that resumes from it, in the same process after a ``break``
        or in another process, makes the remaining steps and uses each example once.

        Call it once and iterate the result in each epoch, or call it anew in each epoch; both do the same. With a
        `QueueSampler` a single iteration covers all epochs. ``len()`` of the result is the length of the loader. For
        validation iterate the loader itself, because no step follows. A loader without such a sampler is iterated
        unchanged.

        A worker that was started again while the others went on gets fewer batches than that, and none of epochs that
        are over. A loop may then be empty, so that variables of its body, such as ``loss``, are unset after it.

        Args:
            loader: a ``torch.utils.data.DataLoader`` with ``sampler=SplitSampler(...)`` or
                ``sampler=QueueSampler(...)``, or with torch's ``BatchSampler`` around such a sampler; or any other
                iterable.
        """
        return Batches(loader, self._handed_out, self)

    def skip_step(self) -> None:
        """Take part in a step without gradients, for example because the gradients of this worker are unusable.

        The step uses the gradients of the other workers. If all workers skip it, the weights stay unchanged.

        Raises:
            RuntimeError: ``overlap=True`` has already sent gradients.
        """
        if self._overlaps:
            raise RuntimeError("skip_step() is too late with overlap=True: gradients leave during backward()")
        self._start()
        self._require_weights_unchanged()
        self._meet_others()
        self._skip_step()
        self._count_as_used()
        self._report_times(0)

    @contextlib.contextmanager
    def join(self) -> Iterator[None]:
        """Return a context in which workers may have different numbers of batches, including none.

        It works like torch's ``Join`` with DistributedDataParallel. A worker that reaches the end of the block takes
        part in the steps of the other workers without gradients, until all workers are done; a mean still divides by
        the number of all workers. All workers leave the block together, with equal weights. Every worker must enter it.
        Each step costs an additional small exchange.

        Inside the block call only `step` (also that of `as_torch_optimizer`) and `skip_step`. Other calls that wait for
        workers, such as a barrier, raise `DeadlockError` once a worker is done. If an exception leaves the block on a
        worker, the next step of the others raises `RuntimeError`.

        The context has no effect with a single worker, without a store, and on ``dist_async``, where no worker waits.

        Raises:
            NotImplementedError: the store is not a ``dist`` store, or with ``overlap=True``.
            RuntimeError: `join` is nested, or another worker has left the block by an exception.
            InitMismatch: the workers update and enter with different learning rates, momenta or multipliers.
        """
        if self._join is not None:
            raise RuntimeError("trainer.join() is within another trainer.join(): one of them is enough")
        self._start()
        if self._between is not None and not self._between.counts_steps:
            raise ConfigError(
                f"trainer.join() under the policy {policy_of(self._kvstore)}: workers make as many steps as they can,"
                " and none waits for another's; iterate trainer.batches(loader) with a QueueSampler"
            )
        if self._kvstore is None or not require_joinable(self._kvstore, self._overlaps):
            yield
            return
        self._sync_hyperparameters()
        live = None if self._update_on_kvstore else self._optimizer
        with create_store("dist") as own:
            self._join = Join(own, live, len(self._parameters))
            try:
                yield
                self._require_weights_unchanged()
                while self._join.meet(NextStep.DONE):
                    self._show_numbers()
                    self._skip_step()
            except Exception:
                self._join.leave()
                raise
            finally:
                self._join = None

    def as_torch_optimizer(self) -> TorchOptimizer:
        """Return this trainer as a ``torch.optim.Optimizer``, for torch's schedulers, `GradScaler` or Lightning.

        Its parameter groups are those of the trainer, with ``lr`` and ``weight_decay``. Changes apply from the next
        step on, also on servers. If the workers update, ``momentum`` and ``betas`` may change too, as OneCycleLR does;
        on servers they are fixed. Its ``step()`` calls `step` without arguments. Its ``state_dict()`` includes the
        optimizer state, also if servers keep it. Every call returns the same object.

        Raises:
            ValueError: the optimizer has an `lr_scheduler`.
        """
        if self._torch_optimizer is None:
            self._torch_optimizer = self._shown_as_torch(None)
        return self._torch_optimizer

    def _shown_as_torch(self, given: torch.optim.Optimizer | None) -> TorchOptimizer:
        return TorchOptimizer(
            self._parameters,
            self._optimizer,
            self._step_of_torch,
            self._optimizer_states,
            self._load_optimizer_states,
            self._overlaps,
            given,
        )

    def allreduce_grads(self, *, average: bool = False, ignore_stale_grad: bool = False) -> None:
        """Replace each gradient by its sum over devices and workers, for example to clip before `update`.

        Args:
            average: divide the sum by the number of workers, as ``step()`` does; then call ``update()``. Required with
                ``overlap=True``, where gradients are divided before they are sent.
            ignore_stale_grad: as in `step`; pass the same value to `update`.

        Raises:
            RuntimeError: the store updates the weights, a gradient is stale, or a gradient was changed after
                ``overlap=True`` had sent it.
            ValueError: ``overlap=True`` without ``average=True``.
        """
        if self._overlaps and not average:
            raise ValueError(
                "with overlap=True gradients are averaged over the workers while the backward pass runs; call"
                " allreduce_grads(average=True), or make the trainer with overlap=False"
            )
        self._start()
        if self._update_on_kvstore:
            refuse_updated_there("allreduce_grads")
        self._sync_hyperparameters()
        if self._join is not None:
            raise RuntimeError(
                "allreduce_grads() cannot be used within trainer.join(), because a worker that is done cannot repeat"
                " your changes of gradients. Call step(), with clip_norm to clip"
            )
        if self._overlap is not None:
            self._overlap.finish()
        elif self._exchange is not None:
            grads = self._watch.grads(Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE)
            self._require_finite(grads)
            self._summed = self._exchange.sum(grads, average, self._said(None))

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights in this process with the current gradients, after `allreduce_grads`.

        Args:
            batch_size: divisor of the summed gradients, equal on all workers; None divides by the number of devices.
            ignore_stale_grad: as in `step`.

        Raises:
            RuntimeError: the store updates the weights, a gradient is stale, or gradients are still being summed.
        """
        self._start()
        if self._update_on_kvstore:
            refuse_updated_there("update")
        self._require_nothing_sent("update", "allreduce_grads(average=True)")
        grads = self._watch.grads(Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE)
        self._warn_without(any(grads))
        examples, sent = self._fresh, self._overlap or (None if self._summed is None else self._exchange)
        summed, self._summed = self._summed or [True] * len(grads), None
        given = [grad is not None and is_summed for grad, is_summed in zip(grads, summed, strict=True)]
        self._update_here(self._divisor(batch_size), given, self._said(batch_size) if sent is None else sent.examples)
        self._count_as_used()
        self._report_times(examples)

    def exchange(self) -> None:
        """Under a policy, exchange the steps since the last exchange, so that all workers have the same weights.

        Call it on all workers before an evaluation and after the last step: after equally many steps if the policy
        counts steps (`kvdist.local_sgd`, `kvdist.diloco`), at any time under `kvdist.quota`. The trainer's
        `save_checkpoint` makes an exchange itself. Without a policy, or without steps since the last exchange, it does
        nothing.
        """
        self._finish_exchange(together=True)

    def _finish_exchange(self, together: bool) -> None:
        self._require_training_weights()
        between = self._between
        if between is None or (between.counts_steps and not between.passed):
            return
        self._require_weights_unchanged()
        with self._counting_what_leaves(), self._skipping_rollback():
            if self._is_void:
                self._go_back()
            else:
                before = between.rounds
                try:
                    between.finish(together)
                finally:
                    self._note_weights()  # they were written, also if it failed
                self._note_version(since=before)
        self._count_as_used()

    def _push_before_leaving(self) -> None:
        """Push what steps at this worker's own pace have made, unless a batch was handed out since the last one."""
        between = self._between
        if between is not None and not between.counts_steps and self._unpushed() == between.handed_out:
            self._finish_exchange(together=False)

    @contextlib.contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Return a context in which the parameters are the servers' averages of the weights (`average_half_life`).

        Will be removed in a later version; use ``torch.optim.swa_utils.AveragedModel``. Usage: ``with
        trainer.averaged_weights(): evaluate(net)``, on any number of workers. The parameters are the training weights
        again afterwards. Inside the block memory holds the weights twice, and no call may make a step or transfer
        weights. Buffers are not averaged; for BatchNorm see ``torch.optim.swa_utils.update_bn``.

        Raises:
            ConfigError: `average_half_life` is not set, or no servers update.
            RuntimeError: contexts are nested, or gradients of an unfinished step have been sent.
            PushRefused: as in `KVStore.pull`.
        """
        self._require_nothing_sent("averaged_weights", "step()")
        self._start()
        store = self._kvstore
        if not isinstance(store, KVStore):
            raise ConfigError("there are no averages of the weights: give kvstore='dist' and an average_half_life")
        averages = [[torch.empty_like(replica) for replica in one.replicas] for _, one in self._trained]
        is_answered = not self._trained
        while not is_answered:
            with contextlib.suppress(RolledBackError):  # ask again: the store has those of a snapshot now
                store.pull([key for key, _ in self._trained], out=averages, average=True)
                is_answered = True
        replicas = [replica for _, one in self._trained for replica in one.replicas]
        weights = [replica.data for replica in replicas]
        self._shows_averages = True
        try:
            for replica, average in zip(replicas, (one for own in averages for one in own), strict=True):
                replica.data = average
            yield
        finally:
            for replica, weight in zip(replicas, weights, strict=True):
                replica.data = weight
            self._shows_averages = False

    def _require_training_weights(self) -> None:
        if self._shows_averages:
            raise RuntimeError(
                "within trainer.averaged_weights() the parameters are averages: leave the block before you train, save"
                " or load"
            )

    def broadcast_parameters(self) -> None:
        """Copy the current weights of rank 0 to all workers, devices and the store. The optimizer state stays.

        Call it on every worker after the weights were changed other than by `step`, for example by ``load_state_dict``.
        An average of the weights (`average_half_life`) restarts from them.

        Raises:
            RuntimeError: gradients of an unfinished step have been sent (``overlap=True``).
        """
        self._require_nothing_sent("broadcast_parameters", "step()")
        self._require_training_weights()
        if not self._started:
            self._start()
        elif self._exchange is not None:
            self._settle()
            self._exchange.broadcast()
            self._note_weights()

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the optimizer state without the weights; see `KVStore.save_optimizer_states`."""
        state = self._state("save_states")
        state.tell_samples(self._samples)
        state.save_states(fname)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load an optimizer state from `save_states`; see `KVStore.load_optimizer_states`."""
        self._state("load_states").load_states(fname)
        folder = absolute(fname)
        self._go_on_from(updates_in(folder))
        self._samples = samples_in(folder)

    def save_checkpoint(
        self, directory: str | os.PathLike[str], step: int, *, state: Any = None, keep: int | None = None
    ) -> Future[Path]:
        """Save the current weights and optimizer states; see `KVStore.save_checkpoint`.

        If the workers update, the call blocks until all files are written. Buffers, such as those of BatchNorm, are not
        saved. Under a policy of local steps the call first makes an `exchange`; the checkpoint then has the weights,
        the state of the outer optimizer, and the state of each worker's local optimizer, whose writing the call awaits.
        """
        self.exchange()
        training_state = self._state("save_checkpoint")
        training_state.tell_samples(self._samples)
        return training_state.save_checkpoint(directory, step, state, keep, self._updates)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Load weights and optimizer states from a checkpoint, on every device; see `KVStore.load_checkpoint`.

        Under a policy of local steps, each worker's local optimizer gets the state that the worker of the same rank has
        saved. Without such a state, and on a worker that joins a running job, it restarts and logs that.
        """
        self._settle()
        checkpoint = self._state("load_checkpoint").load_checkpoint(directory, step, states)
        if states and self._updates_between and not self._take_part():
            self._state("load_checkpoint").load_own(checkpoint.folder)
        saved = self._go_on_from(self._updates_of(checkpoint.folder)) if states else self._updates
        self._samples = samples_in(checkpoint.folder) if states else self._samples
        if checkpoint.step == saved < self.version:
            checkpoint = replace(checkpoint, step=self.version)  # the others have gone on from there
        if self._update_on_kvstore and self._exchange is not None:
            self._exchange.fetch()
        self._note_weights()
        self._position = checkpoint.data
        if self._queue is not None and checkpoint.data is not None:
            self._queue.restore(checkpoint.data)
        return checkpoint

    def _updates_of(self, folder: Path) -> int:
        """How many updates the weights of a checkpoint have had: steps that each worker had made, if it says those."""
        steps = own_steps(folder) if self._between is not None and self._between.counts_steps else None
        return updates_in(folder) * self._every if steps is None else steps

    def _note_version(self, since: int) -> None:
        """Remember how many steps the weights have after the exchanges since then: it follows not from their number."""
        if self._between is not None and self._between.counts_steps and self._joined_at is None:
            self._between.known += [(rounds, self._updates) for rounds in range(since + 1, self._between.rounds + 1)]

    def _settle(self) -> None:
        """Wait until nothing of this worker is under way that was made with weights which are replaced now."""
        if self._between is not None:
            self._between.settle()

    def _go_on_from(self, updates: int) -> int:
        """How many updates what was loaded has had; a worker that joins a running job is some steps behind then."""
        if self._take_part():
            self._behind = max(self._updates - updates, 0)
        else:
            self._loaded_updates += updates - self._updates
            self._updates = updates
            if self._between is not None:
                self._note_version(since=self._between.rounds - 1)
        return updates

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients and send nothing.

        Use it for all passes of a step except the last, as in DistributedDataParallel, and for passes whose gradients
        are not used. The last pass, outside the context, sends the accumulated gradients. Without ``overlap=True`` it
        has no effect.
        """
        return contextlib.nullcontext() if self._overlap is None else self._overlap.paused()

    def close(self) -> None:
        """Release the parameters, and close the store if the trainer created it. A second call does nothing.

        Call it after a step. Later backward passes send nothing, and `step` raises. Calling it is only necessary

        - with ``overlap=True``, before another trainer takes the same parameters;
        - before another trainer takes the same kvdist `Optimizer`, which `close` resets to its earlier state;
        - before another job saves into the same folder while this process lives.

        Raises:
            CheckpointError: the last checkpoint failed, and its future was not read.
        """
        if self._closed:
            return
        self._closed = True
        self._release()
        try:
            if isinstance(self._kvstore, KVStore) and self._kvstore is not self._kvstore_wanted:
                self._kvstore.close()
        finally:
            self._release_optimizer()
            if self._training_state is not None:
                self._training_state.close()

    def _release_optimizer(self) -> None:
        """Let another trainer have the optimizer, unless a store that stays open has it with this one's rule."""
        store, rule = self._kvstore, self._optimizer.rule()
        is_held = isinstance(store, KVStore) and not store._closed and store._backend.optimizer is self._optimizer
        if not is_held or copy.copy(self._optimizer).rule() == rule:
            self._optimizer.release()

    def _release(self) -> None:
        """Let go of the parameters, and end what runs beside the steps."""
        if self._overlap is not None:
            self._overlap.remove_hooks()
        if self._between is not None:
            self._between.close()

    @property
    def kvstore(self) -> KVStoreBase | None:
        """Store in use; None before the first step, or if the trainer updates without a store."""
        return self._kvstore

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of this trainer. Its learning rate, wd and multipliers may change at any time."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """Current learning rate, before multipliers of parameter groups; with a schedule, the rate of the last step."""
        self._sync_hyperparameters()
        schedule = self._optimizer.lr_scheduler
        return self._optimizer.learning_rate if schedule is None else schedule(self._updates)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, also on servers. Every worker must set the same rate.

        With ``overlap=True`` and a store that updates, a step begins when its first gradient is sent.
        """
        self._sync_hyperparameters()
        self._optimizer.learning_rate = lr
        self._sync_hyperparameters()

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient of the last step before clipping, equal on all workers; may be infinite or NaN.

        The same as the result of ``clip_grad_norm_``. None before the first step, and without `clip_norm`.
        """
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def version(self) -> int:
        """Number of updates in the weights, including those before a loaded checkpoint.

        Under a policy of local steps it is the number of steps of this worker, including those before a checkpoint. For
        a worker that joins later, each exchange counts as the policy's number of steps, even an exchange that came
        early.

        A worker that joins a running job can read the progress of the others before its first step, if `kvstore` is a
        store and not a name: ``for step in range(trainer.version, steps)`` begins at their step.
        """
        self._take_part()
        return self._updates

    @property
    def samples_seen(self) -> int:
        """Number of examples in the weights: those of all counted steps of all workers.

        A step counts the examples that `batches` has delivered from a `SplitSampler` or `QueueSampler`; otherwise
        `samples` of ``step(samples=n)``, or `batch_size` if it is the number of examples of this worker alone. Other
        steps count 0. The last step of a lost worker counts if its gradient is in at least one slice of the weights.

        If servers update, they keep the count, with the steps of workers that have left and the steps before a
        checkpoint; reading it costs a small message. Under a policy of local steps it covers what was exchanged, and on
        ``dist_async`` all arrived pushes, which may be more than the weights of this worker include.

        Raises:
            NotImplementedError: several workers hold the optimizer together (``'hybrid'``, or ``'collective'`` with
                ``update_on_kvstore=True``), so that no process knows the examples of the others.
        """
        self._take_part()
        store = self._kvstore
        if not isinstance(store, KVStore) or not self._update_on_kvstore or not self._trained:
            return self._samples
        found, is_answered = None, False
        while not is_answered:
            with contextlib.suppress(RolledBackError):  # ask again: the store has the weights of a snapshot now
                found, is_answered = store._backend.totals(self._counted_keys), True
        if found is None and store.num_workers > 1:
            raise NotImplementedError(
                f"samples_seen: the workers of the store {store.type!r} hold the optimizer together, and none knows of"
                " how many examples the steps of the others are; give update_on_kvstore=False"
            )
        return self._samples if found is None else found[0]

    @property
    def _counted_keys(self) -> list[int]:
        """Of these servers say how many examples are in them: of one parameter for each part that is exchanged."""
        places = [0] if self._between is None else self._between.counted
        return [self._trained[place][0] for place in places]

    @property
    def samples_dropped(self) -> int:
        """Number of examples of this worker whose gradients came too late and were dropped.

        Only `kvdist.asynchronous` with ``max_delay`` drops gradients. A step of unknown size counts as 1. A warning is
        logged once when more than a fifth of all examples are dropped.
        """
        return 0 if self._between is None else self._between.samples_dropped

    def advise_batch_size(self, batch_size: int) -> int:
        """Return the batch size at which this worker computes as long as the others, if the mean size is `batch_size`.

        Will be removed in a later version; use ``kvdist.quota`` for machines of unequal speed. All workers call it at
        the same step, for example every 20 steps, and wait for each other; it compares the examples per second of their
        last 16 steps. Measuring begins with the first call, which returns `batch_size`, and waits for CUDA devices in
        each step. The total of the sizes stays about the same. Use ``step(samples=n)``, and assign the result to
        ``loader.batch_sampler.batch_size``.

        Args:
            batch_size: size for a worker of mean speed, at least 1, equal on all workers.

        Returns:
            The size, at least 1; `batch_size` itself for a single worker, and if nothing was measured.

        Raises:
            ValueError: `batch_size` is below 1.
            ConfigError: workers do not make each step together (``dist_async``, or a policy).
        """
        if whole_number("batch_size", batch_size) < 1:
            raise ValueError(f"batch_size is {batch_size}; it is the number of examples of a batch, at least 1")
        self._start()
        store = self._kvstore
        if not isinstance(store, KVStore) or store.num_workers == 1:
            return batch_size
        if self._between is not None or store.type in ASYNCHRONOUS:
            raise ConfigError(
                "advise_batch_size is for workers that wait for each other in each step, which they do not under a"
                " policy and on dist_async: leave it out"
            )
        own = self._speed.examples_per_s()
        with self._skipping_rollback():
            batch_size = self._speed.share(batch_size, store.average(own, counts=own > 0))
        self._speed.resumed()
        return batch_size

    @property
    def nonfinite_steps(self) -> int:
        """Number of steps in which gradients of this worker were not finite and not used.

        ``reject_nonfinite=True`` and a `GradScaler` count them.
        """
        return self._nonfinite_steps

    def _start(self) -> None:
        if self._closed:
            raise RuntimeError("this trainer has been closed; make another one")
        self._require_training_weights()
        if self._started:
            return
        if isinstance(self._optimizer, TorchRule):
            self._sync_hyperparameters()  # until the store has them, all may change
        require_shapes(self._parameters)
        if not self._has_chosen:  # once, as others count the stores that are made
            compresses = self._compression_params is not None
            self._kvstore = choose_store(self._kvstore_wanted, self._num_devices, create_store, compresses)
            self._has_chosen = True
        half_life = self._optimizer.average_half_life
        try:
            self._start_with(self._kvstore)
            self._started = True
            if any(state is not None for state in self._loaded_states):
                self._replace_states(self._loaded_states)
        except BaseException:  # as before, so that the next call may try again
            self._started = False
            self._release()
            self._exchange = self._between = self._shared = self._overlap = None
            self._update_on_kvstore = False
            self._optimizer.change_here("average_half_life", half_life)
            raise
        self._loaded_states = ()
        if any(isinstance(one, SplitSampler) for one in self._handed_out):  # before this the store had but a name
            self._warn_of_parts()
        if self._undivided:
            self._warn_of_whole_data(self._undivided)

    def _start_with(self, store: KVStoreBase | None) -> None:
        if store is not None:
            policy = policy_of(store)
            if policy is not None:
                sends_otherwise = self._overlaps or self._shares or self._update_on_kvstore_wanted is not None
                require_policy(policy, self._num_devices, self._clip_norm, sends_otherwise, store)
                require_enough(policy, store.num_workers)
            self._update_on_kvstore = policy is not None or decide_update_on_kvstore(
                store,
                self._kvstore_wanted,
                self._update_on_kvstore_wanted,
                self._parameters,
                self._clip_norm is not None,
            )
            require_survivable(store, self._update_on_kvstore)
        if self._optimizer.average_half_life is not None:
            require_averages(store, self._update_on_kvstore)
        if store is not None:
            self._begin_with(store)

    def _begin_with(self, store: KVStoreBase) -> None:
        agreed = self._match_names(store) if isinstance(store, KVStore) else ""
        policy = policy_of(store)
        local_steps = updates_between(policy)
        needs_more, here = self._overlaps or self._shares, not self._update_on_kvstore
        if isinstance(store, KVStore) and not self._has_keys:
            require_unused(store)
        used = fit(store, self._parameters, needs_more, compression_of(policy, self._compression_params), here)
        refuse_overlap_of_snapshots(store, self._overlaps)
        if isinstance(store, KVStore) and self._watcher not in store._backend.rollback_watchers:
            store._backend.rollback_watchers.insert(0, self._watcher)
        outer = outer_optimizer(policy) if policy is not None and local_steps else None
        if outer is not None:  # then the weights of the servers are averaged, not those here
            outer.change_here("average_half_life", self._optimizer.average_half_life)
            self._optimizer.change_here("average_half_life", None)
        words = "" if policy is None else f", policy {policy}"
        used.agree(
            agreed
            + statement(
                self._parameters,
                self._optimizer if here or local_steps else None,
                self._clip_norm,
                digest(self._loaded_states),
            )
            + words
        )
        # With overlap the hyper-parameters of a step are fixed when it begins, so the store has a copy of its own.
        sent = self._optimizer.twin() if self._overlaps else self._optimizer
        if self._update_on_kvstore:
            used.set_optimizer(sent if outer is None else outer)
        if self._shares and self._update_on_kvstore:
            self._shared = SharedWeights([parameter for _, parameter in self._trained])
        self._exchange = Exchange(used, self._parameters, self._trained, self._shared)
        if policy is not None:
            self._between = self._exchange.between = self._exchanges_by(policy, self._exchange)
        self._has_keys = True  # or some, if this fails
        self._exchange.broadcast()
        self._note_weights()
        ballot = None if self._update_on_kvstore else self._exchange.open_ballot(self._optimizer)
        if self._overlaps:
            assert isinstance(used, KVStore)
            self._optimizer.rescale_grad = self._scale / self._num_devices
            sent_or_none = sent if self._update_on_kvstore else None
            refresh = weakly(self._sync_hyperparameters)
            more = (refresh, ballot, weakly(self._unused))
            self._overlap = Overlap(used, self._trained, self._optimizer, sent_or_none, *more)

    def _exchanges_by(self, policy: TrainingPolicy, exchange: Exchange) -> Exchanges:
        trained = [parameter for _, parameter in self._trained]
        if isinstance(policy, LocalSteps) and policy.quorum is None:
            ways = (exchange.update_some, exchange.begin_update, exchange.take)
            return OuterSteps(policy, trained, self._unpushed, *ways, self._handed_out)
        if isinstance(policy, Asynchronous):  # features at a seam: loaded where they are used
            from kvdist.training.alone import AloneSteps

            return AloneSteps(policy, trained, self._unpushed, exchange.update, exchange.report, exchange.take)
        from kvdist.training.quota import QuorumSteps, QuotaSteps

        kind = QuorumSteps if isinstance(policy, LocalSteps) else QuotaSteps
        calls = (exchange.begin_update, exchange.report, exchange.take)
        return kind(policy, trained, self._unpushed, *calls, self._handed_out, self._landed)

    def _state(self, method: str) -> TrainingState:
        self._require_nothing_sent(method, "step()")
        self._start()
        if self._training_state is None:
            where = (self._kvstore, self._update_on_kvstore, self._updates_between)
            self._training_state = TrainingState(self._parameters, self._local, *where)
        return self._training_state

    def _optimizer_states(self) -> Sequence[SliceState | None]:
        """The optimizer's state of each trained parameter; not a collective call."""
        if not self._started:
            return self._loaded_states
        return self._state("state_dict").states([key for key, _ in self._trained])

    def _load_optimizer_states(self, states: Sequence[SliceState | None]) -> None:
        """Load states: at the first step, or after it as soon as every worker has called this."""
        if not self._started:
            self._loaded_states = states
            return
        self._require_nothing_sent("load_state_dict", "step()")
        if isinstance(self._kvstore, KVStore) and not self._updates_between:
            self._kvstore.agree(f"loads the optimizer state {digest(states) or 'of no updates'}")
        self._replace_states(states)

    def _replace_states(self, states: Sequence[SliceState | None]) -> None:
        self._state("load_state_dict").replace_states([key for key, _ in self._trained], states)

    def _divisor(self, batch_size: float | None) -> float:
        divisor = self._num_devices if batch_size is None else batch_size
        if not 0 < real_number("batch_size", divisor) < BATCH_SIZE_LIMIT:
            raise ValueError(
                f"batch_size is {batch_size}; it is the number of examples in the gradients, above 0 and below 2^32"
            )
        return divisor

    # A step.

    def _step(self, batch_size: float | None, on_stale: Stale, samples: int | None = None) -> None:
        divisor = self._divisor(batch_size)
        if self._is_void:
            self._go_back()
            return
        self._sync_hyperparameters()
        refuse_untrained(self._untrained)
        if self._overlap is not None:
            self._warn_without(any(one.has_grad for _, one in self._trained))
            self._finish_overlap(self._overlap, divisor, on_stale)
            return
        self._require_weights_unchanged()
        grads = self._watch.grads(on_stale)
        self._warn_without(any(grads))
        self._require_finite(grads)
        if self._between is not None:
            samples = self._known_samples(self._between, samples)
            self._between.require_alike(samples)
        self._meet_others()
        average: Average = batch_size is None if samples is None else "samples"
        said = self._said(batch_size) if samples is None else samples
        if self._exchange is None:
            self._update_here(divisor, [grad is not None for grad in grads], said)
        elif self._between is not None:
            with self._between.stepping():
                self._between.add(grads, samples or 0)
                self._between.examples += said
                self._between.given += said or 1  # as dropped ones count
                if self._between.sums_gradients:
                    self._optimizer.rescale_grad = self._scale / divisor
                    self._watch.note_grads()
                else:
                    self._update_here(divisor, [grad is not None for grad in grads], 0)
                    self._note_weights()
                self._count_step(self._between)
        elif self._update_on_kvstore:
            with self._rescaled(divisor):
                self._update_there(grads, average, said)
        else:
            # Each worker divides before the sum: others may give other sizes, or skip this step.
            divide(grads, divisor)
            given = self._exchange.sum(grads, average, said)
            self._update_here(1, given, self._exchange.examples)

    def _meet_others(self) -> None:
        """Within `join`, say that this worker makes a step; nothing is sent after this that could be refused here."""
        if self._join is not None:
            self._sync_hyperparameters()
            self._join.meet(NextStep.STEPS)

    def _show_numbers(self) -> None:
        """Let the groups of the torch optimizer follow numbers that came from another worker."""
        if self._torch_optimizer is not None and not self._update_on_kvstore:
            self._torch_optimizer.follow()

    def _skip_step(self) -> None:
        with self._counting_what_leaves(), self._skipping_rollback():
            if self._is_void:
                self._go_back()
                return
            nothing: Grads = [None] * len(self._trained)
            if self._between is not None:
                self._watch.note_grads()
                with self._between.stepping():
                    self._count_step(self._between)
            elif self._kvstore is None or self._exchange is None or self._kvstore.num_workers == 1:
                self._watch.note_grads()
            elif self._update_on_kvstore:
                self._update_there(nothing, average=True, samples=0 if self._queue is None else self._queue.unused)
            else:
                given = self._exchange.sum(nothing, average=True)
                self._update_here(1, given, self._exchange.examples)

    def _step_of_torch(self, *, skip: bool) -> None:
        if skip:
            self._nonfinite_steps += 1
            self.skip_step()
            return
        self._start()
        examples = self._fresh
        with self._counting_what_leaves(), self._skipping_rollback():
            self._take_part()
            self._step(None, Stale.USE)
        self._count_as_used()
        self._report_times(examples)

    def _warn_of_parts(self) -> None:
        """Say once that a fixed part of the data does not go with workers at their own pace, if the store is known."""
        store = self._kvstore_wanted if self._kvstore is None else self._kvstore
        if not isinstance(store, KVStore) or store.rank or self._has_warned:
            return
        policy = policy_of(store)
        if policy is not None and policy.pace is not Pace.TOGETHER:
            where = f"under the policy {policy}"
        elif policy is None and store.type in ASYNCHRONOUS and store.num_workers > 1:
            where = f"on {store.type}"
        else:
            return
        self._has_warned = True
        LOG.warning(
            "SplitSampler gives each worker an equal part of the data, but %s workers do not wait for each other, so"
            " fast workers finish their parts first: with QueueSampler(len(data)) each takes as many examples as it"
            " can",
            where,
        )

    def _warn_of_whole_data(self, examples: int) -> None:
        """Say once that nothing divides the data over the workers; at the first step where the store has but a name."""
        self._undivided = examples
        store = self._kvstore_wanted if self._kvstore is None else self._kvstore
        if not isinstance(store, KVStore) or store.num_workers == 1 or store.rank or self._has_warned:
            return
        self._has_warned = True
        LOG.warning(
            "this DataLoader has no sampler of kvdist, so each of the %d workers reads all %d examples of its data set."
            " Unless that is the part of one worker, pass sampler=QueueSampler(len(data)), or"
            " SplitSampler(len(data), store.num_workers, store.rank)",
            store.num_workers,
            examples,
        )

    def _warn_without(self, has_grads: bool) -> None:
        """Say once that a step has no gradient at all here; other workers may have some."""
        if self._has_warned_of_grads or has_grads:
            return
        self._has_warned_of_grads = True
        LOG.warning(
            "step() found no gradient of the %d trained parameters (%s, ...): call loss.backward() before step(). Where"
            " it was called, the parameters were replaced after the Trainer was created (a new layer, weight_norm,"
            " load_state_dict(assign=True)): create it later. A worker without examples calls skip_step()",
            len(self._trained),
            self._trained[0][1].label,
        )

    def _known_samples(self, between: Exchanges, samples: int | None) -> int | None:
        """Of how many examples a step is under a policy, also where `batches` knows it."""
        if samples is not None or between.counts_steps:
            return samples
        return (self._handed if self._queue is None else self._unpushed() - between.handed_out) or None

    def _count_step(self, between: Exchanges) -> None:
        """A step of this worker is over; make an exchange if it is time."""
        between.passed += 1
        between.handed_out = self._unpushed()
        self._updates += between.counts_steps
        try:
            between.after_step()
        finally:
            self._note_weights()  # they may have been written, also if it failed

    def _landed(self, versions: int) -> None:
        """The weights of so many versions more are here."""
        self._updates += versions

    def _count_as_used(self) -> None:
        """Of batches whose steps no exchange has taken to the servers, nothing counts yet."""
        if self._between is None or (self._between.counts_steps and not self._between.passed):
            count_as_used(self._handed_out)
        self._handed = 0

    def _report_times(self, examples: int) -> None:
        """A step of so many examples is over: tell the scheduler, now and then, how the time goes."""
        times = self._speed.stepped(examples)
        if times is not None and isinstance(self._kvstore, KVStore):
            self._kvstore._backend.report_times(times)

    @contextlib.contextmanager
    def _counting_what_leaves(self) -> Iterator[None]:
        """Let batches count as used whose push has left, also where a foreign error interrupts the wait for its answer.

        Ctrl-C, say, or a loader's process that has died. What the store itself raises says that nothing was counted.
        """
        before = self._batches_pushed
        try:
            yield
        except (KvdistError, FloatingPointError):
            raise
        except BaseException:
            if self._batches_pushed > before and (self._between is None or self._between.counts_steps):
                count_as_used(self._handed_out)
            raise

    @property
    def _batches_pushed(self) -> int:
        backend = self._kvstore._backend if isinstance(self._kvstore, KVStore) else None
        return backend.batches_pushed if isinstance(backend, DistBackend) else 0

    def _count_what_has_left(self) -> None:
        """Count what has left and not returned, before what is not used goes to others or to a new iteration."""
        if self._overlap is not None and self._overlap.is_open:
            count_as_used(self._handed_out)
        elif self._between is not None:
            count_as_used(self._between.left())
            self._between.handed_out = self._unpushed()

    def _take_part(self) -> bool:
        """Whether this worker has joined a running job; the others wait for its steps from the first call on."""
        store = self._kvstore_wanted if self._kvstore is None else self._kvstore
        if not isinstance(store, KVStore) or not store._backend.came_late or self._closed:
            return False
        if self._joined_at is None:
            self._start()
            self._joined_at = self._behind = store._backend.take_part() * self._every
            self._catch_up(self._joined_at)
        return True

    def _catch_up(self, version: int) -> None:
        """Take the weights that others have made while this worker was not awaited."""
        self._updates = max(self._updates, version)
        if self._exchange is not None and self._update_on_kvstore:
            self._exchange.fetch()
            self._note_weights()

    def _recount(self) -> None:
        """Ask servers how many updates there were, while no step is under way.

        Who made the last of them may be lost; and before the version from which on a worker that joins takes part,
        others may have found no data, so that some versions are made of nothing.
        """
        store = self._kvstore
        is_counted = self._between is None or not self._between.counts_steps
        if isinstance(store, KVStore) and self._update_on_kvstore and self._trained and is_counted:
            totals = store._backend.totals(self._counted_keys)
            if totals is not None and totals[1] >= 0:
                self._updates = totals[1]

    @contextlib.contextmanager
    def _skipping_rollback(self) -> Iterator[None]:
        """Make no step if all go back to a snapshot meanwhile."""
        try:
            yield
        except RolledBackError:
            self._go_back()

    def _rolled_back(self, step: int) -> None:
        """A server was lost, and the store has the weights of a snapshot; whichever call has heard of it."""
        self._updates = step * self._every + self._loaded_updates
        self._is_void = True
        if self._between is not None:
            self._between.rewind(step)
            for rounds, updates in self._between.known[-1:]:
                self._updates = updates + (step - rounds) * self._every
        if self._queue is not None:
            self._queue.rolled_back()

    def _go_back(self) -> None:
        """Take the weights of a snapshot; this step is not made."""
        self._watch.note_grads()
        assert self._exchange is not None
        while self._is_void:
            self._is_void = False
            with contextlib.suppress(RolledBackError):  # another server was lost meanwhile
                self._exchange.fetch()
        self._note_weights()

    @property
    def _updates_between(self) -> bool:
        """Whether this worker updates its weights between two exchanges."""
        return self._between is not None and not self._between.sums_gradients

    @property
    def _every(self) -> int:
        """Steps for each update of the weights on the store."""
        return 1 if self._between is None else self._between.every

    def _unused(self) -> int:
        """How many examples `batches` has handed out that no push has."""
        return self._handed if self._queue is None else self._queue.unused

    @property
    def _fresh(self) -> int:
        """How many examples `batches` has handed out since the last step."""
        return self._unused() - (0 if self._between is None else self._between.handed_out)

    def _unpushed(self) -> int:
        """The same of a queue alone, which counts what pushes bring."""
        return 0 if self._queue is None else self._queue.unused

    def _said(self, batch_size: float | None) -> int:
        """Of how many examples a step is that does not say its samples; 0 if that is not known."""
        handed_out, size = self._unused(), 0 if batch_size is None else max(1, round(batch_size))
        return handed_out if handed_out or self._queue is not None else size

    def _finish_overlap(self, overlap: Overlap, divisor: float, on_stale: Stale) -> None:
        stale = self._watch.left_out(Stale.USE if on_stale is Stale.USE else Stale.LEAVE_OUT)
        changed = self._watch.changed()
        try:
            given = overlap.finish(frozenset(position for position, _ in stale))
        finally:
            self._note_weights()  # they were written, also if it failed
        if self._update_on_kvstore:
            self._updates += 1
            self._watch.note_grads()
        else:
            self._update_here(divisor, given, overlap.examples)
        if on_stale is Stale.REFUSE:
            self._watch.refuse(stale, "other gradients were sent already, so this step was made without it")
        # Only after the transfers have ended; by then the store's weights have replaced the changed ones.
        refuse_changed(changed, "gradients were sent already, so this step was made and the change is lost")

    def _update_there(self, grads: Grads, average: Average, samples: int) -> None:
        assert self._exchange is not None
        try:
            self._grad_norm = self._exchange.update(grads, average, samples, self._clip_norm)
        finally:
            self._note_weights()  # they were written, also if it failed
        self._updates += 1
        self._samples += samples
        self._watch.note_grads()

    def _update_here(self, divisor: float, given: list[bool], samples: int) -> None:
        self._sync_hyperparameters()
        members = [one for one, is_given in zip(self._trained, given, strict=True) if is_given]
        with self._rescaled(divisor):
            if self._clip_norm is not None:
                self._clip([parameter for _, parameter in members], self._clip_norm)
            self._local.apply(members)
        for _, parameter in self._trained:
            parameter.drop_filled()
        self._updates += self._between is None
        self._samples += samples
        self._watch.note_grads()

    @contextlib.contextmanager
    def _rescaled(self, divisor: float) -> Iterator[None]:
        """Divide gradients within it; the optimizer is the user's, and a copy of it must not keep the divisor."""
        self._optimizer.rescale_grad = self._scale / divisor
        try:
            yield
        finally:
            self._optimizer.rescale_grad = self._scale

    def _clip(self, parameters: Sequence[Parameter], clip_norm: float) -> None:
        """Scale ``grad`` to what the rule applies, and clip it; all replicas of a parameter have the same gradient."""
        scale(parameters, self._optimizer.rescale_grad)
        self._optimizer.rescale_grad = 1.0
        for device in reversed(range(self._num_devices)):  # the first one's norm is kept
            replicas = [parameter.replicas[device] for parameter in parameters]
            self._grad_norm = torch.nn.utils.clip_grad_norm_(replicas, clip_norm)

    def _sync_hyperparameters(self) -> None:
        """Exchange learning rate and weight decay with the groups of the torch optimizer."""
        if self._torch_optimizer is not None:
            updates_there = self._started and self._update_on_kvstore and not self._updates_between
            self._torch_optimizer.tell(updates_here=not updates_there)

    def _note_weights(self) -> None:
        if self._update_on_kvstore:
            self._watch.note_weights()

    def _require_nothing_sent(self, method: str, first: str) -> None:
        if self._overlap is not None and self._overlap.is_open:
            refuse_sent(method, first)

    def _require_weights_unchanged(self) -> None:
        if self._shared is not None:
            self._shared.require_unchanged()
        refuse_changed(self._watch.changed(), "nothing was sent in this step")

    def _require_finite(self, grads: Grads) -> None:
        self._nonfinite_steps += 1  # unless they are finite
        if self._rejects_nonfinite:
            rank = 0 if self._kvstore is None else self._kvstore.rank
            refuse_nonfinite(self._trained, grads, rank, self._local.devices)
        self._nonfinite_steps -= 1


# The exchange of a step.


class Exchange:
    """The exchange of a trainer with its store.

    Args:
        store: the store.
        parameters: all of the trainer's.
        trained: keys and parameters that have gradients.
        shared: the parameters that show the servers' memory; None without ``share_weights``.
    """

    def __init__(
        self,
        store: KVStore | Adapted,
        parameters: Sequence[Parameter],
        trained: Sequence[tuple[int, Parameter]],
        shared: SharedWeights | None = None,
    ) -> None:
        self._store = store
        self._parameters = parameters
        self._trained = trained
        self._keys = [key for key, _ in trained]
        self._ballot: Ballot | None = None
        self._shared = shared
        self.always_averages = False
        """Whether sums are averages in steps with a batch size too."""
        self.between: Exchanges | None = None
        """What a worker does between two exchanges, by a policy."""
        self.examples = 0
        """Of how many the gradients of all workers in the last sum were, as far as that is known."""

    def broadcast(self) -> None:
        """Copy rank 0's weights to all workers."""
        if self._shared is not None:
            self._shared.own()
        replicas = [parameter.carried for parameter in self._parameters]
        self._store.broadcast(named_keys(self._parameters), [one[0] for one in replicas], out=replicas)
        if self.between is not None:
            self.between.begin()

    def fetch(self) -> None:
        """Write the store's current values into all parameters."""
        if self._shared is not None:
            self._shared.own()
        assert isinstance(self._store, KVStore)
        self._store.pull(list(range(len(self._parameters))), out=[one.carried for one in self._parameters])
        if self.between is not None:
            self.between.begin()

    def open_ballot(self, optimizer: Optimizer) -> Ballot | None:
        """Make the ballot, which `sum` needs; None for a single worker.

        Args:
            optimizer: what each worker updates with.
        """
        store, key = self._store, len(self._parameters)
        if store.num_workers == 1:
            return None
        store.leave_uncompressed([key])
        self._ballot = Ballot(key, optimizer, len(self._trained), store.rank, store.num_workers)
        blank = torch.from_numpy(np.zeros_like(self._ballot.cast([False] * len(self._trained), average=False)))
        named = NamedKey(key, "the vote on who has which gradients")
        store.broadcast([named], [blank], out=[[blank]])
        return self._ballot

    def update(self, grads: Grads, average: Average, samples: int, clip_norm: float | None = None) -> float | None:
        """Send gradients to a store that updates, and get the new weights; the norm, if they are clipped."""
        weights = [parameter.replicas for _, parameter in self._trained]
        if clip_norm is not None:
            assert isinstance(self._store, KVStore)
            return self._store.pushpull_clipped(self._keys, grads, clip_norm, weights, average=average, samples=samples)
        if self._shared is None:
            self._store.pushpull(self._keys, grads, out=weights, average=average, samples=samples)
            return None
        assert isinstance(self._store, KVStore)
        shown = self._store.pushpull_shared(self._keys, grads, weights, average=average, samples=samples)
        self._shared.take(shown)
        return None

    def update_some(self, grads: Grads, average: Average, samples: int, which: Sequence[int]) -> None:
        """The same of some of the trained parameters, by their positions."""
        keys, weights = [self._keys[one] for one in which], [self._trained[one][1].replicas for one in which]
        self._store.pushpull(keys, grads, out=weights, average=average, samples=samples)

    def begin_update(
        self, grads: Grads, average: Average, samples: int, out: list[torch.Tensor], which: Sequence[int] | None = None
    ) -> Future[Any]:
        """Send what an exchange is of, of all parameters or of some.

        Returns:
            A future, which is done when the new weights are in `out`, one tensor a parameter.
        """
        assert isinstance(self._store, KVStore)
        keys = self._keys if which is None else [self._keys[one] for one in which]
        places = [[one] for one in out]
        return self._store.pushpull_async(keys, grads, out=places, average=average, samples=samples)

    def report(self, samples: int, when: DueWhen, quota: int, now: bool, together: bool) -> Future[Due | None]:
        """Say how much there is since the last push; see `DistBackend.report_progress`."""
        return self._backend.report_progress(self._keys[0], samples, when, quota, now, together)

    def take(self, future: Future[Any]) -> Any:
        """The result of one of these futures."""
        return self._backend.wait(future)

    @property
    def _backend(self) -> DistBackend:
        assert isinstance(self._store, KVStore) and isinstance(self._store._backend, DistBackend)
        return self._store._backend

    def sum(self, grads: Grads, average: Average, samples: int = 0) -> list[bool]:
        """Replace the gradients, on every device, by their sums over devices and workers.

        Args:
            grads: per trained parameter, on every device; None without one.
            average: whether the sums are divided: by the number of workers, or by that of all samples.
            samples: of how many examples this worker's are; 0 if that is not known.

        Returns:
            For each trained parameter whether any worker had a gradient. Without one, it has none afterwards.

        Raises:
            ValueError: some workers average and others sum, on a store that cannot mix the two; or only some give
                their samples.
            OptimizerMismatch: the workers' optimizers have different numbers.
        """
        is_weighted = average == "samples"
        average = self.always_averages or (average is True)
        here = [grad is not None for grad in grads]
        if self._ballot is None:
            self._sum([position for position, is_here in enumerate(here) if is_here], grads, average)
            self.examples = samples
            return here
        if is_weighted:
            refuse_overflow(grads)
            divide(grads, 1 / samples)
        vote = self._ballot.cast(here, average and not is_weighted, is_weighted, samples)
        self._sum(range(len(grads)), grads, average, (self._ballot.key, torch.from_numpy(vote)))
        given, (averaging, summing, weighing) = self._ballot.read(vote)
        for (_, parameter), is_given in zip(self._trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        self._ballot.require_equal_numbers(vote)
        self.examples = self._ballot.examples(vote)
        if weighing:
            if averaging or summing:
                raise ValueError(
                    "some workers called step(samples=n), which weighs their gradients, and others step() or"
                    " step(batch_size): call the same on all workers"
                )
            scale([parameter for _, parameter in self._trained], 1 / (self.examples * self._ballot.share(vote)))
        if averaging and summing and isinstance(self._store, KVStore) and self._store.type not in DIST_NAMES:
            raise ValueError(
                "some workers called step(), which averages over the workers, and others step(batch_size), which sums:"
                f" the store {self._store.type!r} cannot do both in one step. Call the same on all workers"
            )
        return given

    def _sum(
        self, positions: Sequence[int], grads: Grads, average: bool, vote: tuple[int, torch.Tensor] | None = None
    ) -> None:
        """Sum the gradients at these positions, and a vote: its key and its array."""
        members = [self._trained[position] for position in positions]
        for _, parameter in members:
            parameter.fill_grads()
        keys = [key for key, _ in members]
        given = [grads[position] for position in positions]
        places = [parameter.grads() or [] for _, parameter in members]
        if vote is not None:
            key, ballot = vote
            keys, given, places = [*keys, key], [*given, [ballot]], [*places, [ballot]]
        # In place is cheaper, and the usual case: every result has a given gradient.
        complete = all(one is not None and len(one) == len(place) for one, place in zip(given, places, strict=True))
        if keys:
            self._store.pushpull(keys, given, out=None if complete else places, average=average)
