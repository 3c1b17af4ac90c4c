"""`Trainer`: updates the parameters of a torch network through a store, in place of a ``torch.optim`` optimizer.

`trainer_config` decides where weights are updated, `Steps` make the steps, `Model` has the parameters of this process,
`grad_checks` reads torch's version counters. Invariants:

* Nothing is sent before the first `step` (or `allreduce_grads`, `update`, `broadcast_parameters`), which makes rank 0's
  weights those of all workers.
* With ``overlap=True`` gradients travel in buckets during the backward pass, from the second step on: see
  `kvdist.buckets` and `kvdist.training.overlap`.
* Weights are written in place, or with ``share_weights=True`` shown in the servers' memory; torch counts either as a
  change, so a backward pass through the old weights raises.
* Where possible, errors in this worker's part of a step are raised before anything of it is sent.
* All parameters travel in a single list call, in the order of `params`, so the first layers, which the next forward
  pass needs first, come first. Keys are positions: 0, 1, 2, …; where parameters have names, those of rank 0, which the
  first step asks for, so that a name is the same parameter on all workers.
* Where workers update, all must update the same parameters by the same numbers. A further key carries
  votes on both: see `kvdist.training.ballot`. A parameter without a gradient on any worker stays as it is everywhere.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from kvdist.checkpoint.shards import samples_in, updates_in
from kvdist.config.policies import Asynchronous, LocalSteps, Pace, TrainingPolicy, updates_between
from kvdist.errors import ConfigError, KvdistError, RolledBackError
from kvdist.kvstore import create as create_store
from kvdist.kvstore.adapter import KVStoreBase
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.checkpoints import Checkpoint, absolute, own_steps
from kvdist.kvstore.dist import DistBackend
from kvdist.optimizer.base import Optimizer
from kvdist.optimizer.states import SliceState, digest
from kvdist.optimizer.torch_rules import TorchRule
from kvdist.removed import AVERAGES_ELSEWHERE, removed_keywords
from kvdist.training.data import Batches, Feed, SplitSampler
from kvdist.training.grad_checks import Stale
from kvdist.training.join import Join, NextStep
from kvdist.training.local_steps import OuterSteps, outer_optimizer
from kvdist.training.model import Model
from kvdist.training.overlap import OverlappedSteps
from kvdist.training.parameters import collect, require_shapes
from kvdist.training.step_clock import StepClock
from kvdist.training.steps import AloneSteps, ServerSteps, StepCall, Steps, WorkerSteps
from kvdist.training.torch_optimizer import TorchOptimizer
from kvdist.training.trainer_config import (
    ASYNCHRONOUS,
    check_losses,
    checked_clip_norm,
    choose_store,
    compression_of,
    decide_update_on_kvstore,
    group_entries,
    make_optimizer,
    policy_of,
    prepare_store,
    refuse_size,
    refuse_what_contradicts,
    require_enough,
    require_joinable,
    require_policy,
    require_samples,
    require_unused,
    statement,
)
from kvdist.training.training_state import TrainingState
from kvdist.training.weights import SharedWeights

LOG = logging.getLogger("kvdist")

REMOVED = {
    "advise_batch_size": "kvdist.quota for machines of unequal speed; the scheduler names slow machines",
    "averaged_weights": AVERAGES_ELSEWHERE,
}
"""Methods of earlier versions → what to use instead."""


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

    Raises:
        TypeError: parameters or optimizer are of a wrong type.
        ValueError: parameters do not match each other, or arguments contradict each other.
        ConfigError: the workers update, and ``KVDIST_KERNELS=numba``, which cannot be imported.
    """

    @removed_keywords(average_half_life=AVERAGES_ELSEWHERE)
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
    ) -> None:
        rule = make_optimizer(params, optimizer, optimizer_params)
        as_made = rule.__getstate__()
        parameters = collect(params, group_entries(optimizer, rule))
        num_devices = len(parameters[0].replicas)
        refuse_what_contradicts(
            kvstore, num_devices, compression_params, update_on_kvstore, overlap, share_weights, reject_nonfinite
        )
        clip_norm = checked_clip_norm(clip_norm, kvstore, update_on_kvstore, overlap, share_weights)
        given = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
        self._model = Model(parameters, rule, clip_norm, reject_nonfinite, given)
        self._feed = Feed()
        self._steps: Steps | None = None
        """How steps are made; None before the first one."""
        self._kvstore_wanted = kvstore
        self._compression_params = compression_params
        self._update_on_kvstore_wanted = update_on_kvstore if clip_norm is None else bool(update_on_kvstore)
        self._kvstore: KVStoreBase | None = None
        self._overlaps, self._shares = overlap, share_weights
        self._closed = self._has_chosen = self._has_keys = self._has_warned = False
        self._watcher = weakly(self._rolled_back)
        self._clock = StepClock()
        self._joined_at: int | None = None
        """Version at which this worker has joined a running job, once that is known."""
        self._loaded_updates = 0
        """Updates by which a loaded checkpoint was ahead of the steps made here."""
        self._is_void = False
        """Whether all have gone back to a snapshot, and the weights here are not yet those."""
        self._training_state: TrainingState | None = None
        self._shown: TorchOptimizer | None = None
        """The trainer in the form of an optimizer of torch; None until the user asks for it."""
        if given is not None:
            self.as_torch_optimizer()  # takes over its state
        rule.take(as_made)

    if not TYPE_CHECKING:  # for type checkers all other attributes would exist too

        def __getattr__(self, name: str) -> NoReturn:
            """Raises an `AttributeError`: the trainer has no such attribute, or not any more."""
            instead = f"; it was removed: use {REMOVED[name]}" if name in REMOVED else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{instead}")

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
        if self._overlaps and not batch_size is samples is None:
            refuse_size(f"step({batch_size})" if samples is None else f"step(samples={samples})")
        if samples is not None:
            pending = 0 if self._steps is None else self._steps.pending
            samples = require_samples(samples, batch_size, self._feed.unpushed - pending)
        self._make_step(StepCall(batch_size, samples, Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE))

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
        return Batches(loader, self._feed, self)

    def skip_step(self) -> None:
        """Take part in a step without gradients, for example because the gradients of this worker are unusable.

        The step uses the gradients of the other workers. If all workers skip it, the weights stay unchanged.

        Raises:
            RuntimeError: ``overlap=True`` has already sent gradients.
        """
        steps = self._start()
        self._model.groups.read()  # those of the step that the others make
        self._model.require_unchanged()
        steps.meet()
        self._skip_step()
        self._end_step(0)

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
        steps = self._start()
        if steps.join is not None:
            raise RuntimeError("trainer.join() is within another trainer.join(): one of them is enough")
        if steps.has_own_pace:
            raise ConfigError(
                f"trainer.join() under the policy {policy_of(self._kvstore)}: workers make as many steps as they can,"
                " and none waits for another's; iterate trainer.batches(loader) with a QueueSampler"
            )
        if self._kvstore is None or not require_joinable(self._kvstore, self._overlaps):
            yield
            return
        model = self._model
        model.groups.read()
        groups = None if steps.on_server else model.groups
        with create_store("dist") as own:
            join = steps.join = Join(own, groups, len(model.parameters))
            try:
                yield
                model.require_unchanged()
                while join.meet(NextStep.DONE):
                    self._skip_step()
            except Exception:
                join.leave()
                raise
            finally:
                steps.join = None

    def as_torch_optimizer(self) -> TorchOptimizer:
        """Return this trainer as a ``torch.optim.Optimizer``, for torch's schedulers, `GradScaler` or Lightning.

        Its parameter groups are those of the trainer, with ``lr`` and ``weight_decay``. Changes apply from the next
        step on, also on servers. If the workers update, ``momentum`` and ``betas`` may change too, as OneCycleLR does;
        on servers they are fixed. Its ``step()`` calls `step` without arguments. Its ``state_dict()`` includes the
        optimizer state, also if servers keep it. Every call returns the same object.

        Raises:
            ValueError: the optimizer has an `lr_scheduler`.
        """
        if self._shown is None:
            self._shown = TorchOptimizer(
                self._model.parameters,
                self._model.groups,
                self._step_of_torch,
                self._optimizer_states,
                self._load_optimizer_states,
                self._overlaps,
            )
        return self._shown

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
        self._start().sum_gradients(average, Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE)

    def update(self, batch_size: float | None = None, ignore_stale_grad: bool = False) -> None:
        """Update the weights in this process with the current gradients, after `allreduce_grads`.

        Args:
            batch_size: divisor of the summed gradients, equal on all workers; None divides by the number of devices.
            ignore_stale_grad: as in `step`.

        Raises:
            RuntimeError: the store updates the weights, a gradient is stale, or gradients are still being summed.
        """
        call = StepCall(batch_size, None, Stale.LEAVE_OUT if ignore_stale_grad else Stale.REFUSE)
        steps = self._start()
        examples = self._feed.unused
        steps.update(call)
        self._end_step(examples)

    def exchange(self) -> None:
        """Under a policy, exchange the steps since the last exchange, so that all workers have the same weights.

        Call it on all workers before an evaluation and after the last step: after equally many steps if the policy
        counts steps (`kvdist.local_sgd`, `kvdist.diloco`), at any time under `kvdist.quota`. The trainer's
        `save_checkpoint` makes an exchange itself. Without a policy, or without steps since the last exchange, it does
        nothing.
        """
        self._exchange(together=True)

    def _exchange(self, together: bool) -> None:
        steps = self._steps
        if steps is None or steps.is_exchanged:
            return
        self._model.require_unchanged()
        with self._counting_what_leaves(), self._skipping_rollback():
            if self._is_void:
                self._go_back()
            else:
                before = steps.rounds
                steps.exchange(together)
                self._note_version(since=before)
        self._count_as_used()

    def _push_before_leaving(self) -> None:
        """Push the steps of a worker at its own pace, unless a batch was handed out since the last step."""
        steps = self._steps
        if steps is not None and steps.has_own_pace and self._feed.unpushed == steps.pending:
            self._exchange(together=False)

    def broadcast_parameters(self) -> None:
        """Copy the current weights of rank 0 to all workers, devices and the store. The optimizer state stays.

        Call it on every worker after the weights were changed other than by `step`, for example by ``load_state_dict``.

        Raises:
            RuntimeError: gradients of an unfinished step have been sent (``overlap=True``).
        """
        self._require_nothing_sent("broadcast_parameters", "step()")
        if self._steps is None:
            self._start()
        else:
            self._steps.broadcast()

    def save_states(self, fname: str | os.PathLike[str]) -> None:
        """Save the optimizer state without the weights; see `KVStore.save_optimizer_states`."""
        state = self._state("save_states")
        state.tell_samples(self._model.samples)
        state.save_states(fname)

    def load_states(self, fname: str | os.PathLike[str]) -> None:
        """Load an optimizer state from `save_states`; see `KVStore.load_optimizer_states`."""
        self._state("load_states").load_states(fname)
        folder = absolute(fname)
        self._go_on_from(updates_in(folder))
        self._model.samples = samples_in(folder)

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
        training_state.tell_samples(self._model.samples)
        return training_state.save_checkpoint(directory, step, state, keep, self._model.updates)

    def load_checkpoint(
        self, directory: str | os.PathLike[str], step: int | None = None, *, states: bool = True
    ) -> Checkpoint:
        """Load weights and optimizer states from a checkpoint, on every device; see `KVStore.load_checkpoint`.

        Under a policy of local steps, each worker's local optimizer gets the state that the worker of the same rank has
        saved. Without such a state, and on a worker that joins a running job, it restarts and logs that.
        """
        if self._steps is not None:
            self._steps.settle()
        checkpoint = self._state("load_checkpoint").load_checkpoint(directory, step, states)
        steps, model, feed = self._start(), self._model, self._feed
        if states and steps.on_server and steps.updates_here and not self._take_part():
            self._state("load_checkpoint").load_own(checkpoint.folder)
        saved = self._go_on_from(self._updates_of(checkpoint.folder)) if states else model.updates
        model.samples = samples_in(checkpoint.folder) if states else model.samples
        if checkpoint.step == saved < self.version:
            checkpoint = replace(checkpoint, step=self.version)  # the others have gone on from there
        if steps.on_server:
            steps.fetch()
        feed.position = checkpoint.data
        if feed.queue is not None and checkpoint.data is not None:
            feed.queue.restore(checkpoint.data)
        return checkpoint

    def _updates_of(self, folder: Path) -> int:
        """Return the updates in the weights of a checkpoint: the steps of each worker, if the checkpoint has those."""
        steps = self._start()
        own = own_steps(folder) if steps.counts_steps else None
        return updates_in(folder) * steps.every if own is None else own

    def _note_version(self, since: int) -> None:
        if self._steps is not None and self._joined_at is None:
            self._steps.note_version(since, self._model.updates)

    def _go_on_from(self, updates: int) -> int:
        """Count from the updates of a loaded state; a worker that joins a running job is some steps behind then."""
        model = self._model
        if self._take_part():
            self._feed.behind = max(model.updates - updates, 0)
        else:
            self._loaded_updates += updates - model.updates
            model.updates = updates
            self._note_version(since=self._start().rounds - 1)
        return updates

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which backward passes accumulate gradients and send nothing.

        Use it for all passes of a step except the last, as in DistributedDataParallel, and for passes whose gradients
        are not used. The last pass, outside the context, sends the accumulated gradients. Without ``overlap=True`` it
        has no effect.
        """
        return contextlib.nullcontext() if self._steps is None else self._steps.paused()

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
        if self._steps is not None:
            self._steps.close()
        try:
            if isinstance(self._kvstore, KVStore) and self._kvstore is not self._kvstore_wanted:
                self._kvstore.close()
        finally:
            self._release_optimizer()
            if self._training_state is not None:
                self._training_state.close()

    def _release_optimizer(self) -> None:
        """Let another trainer have the optimizer, unless a store that stays open has it with this one's rule."""
        store, optimizer = self._kvstore, self._model.optimizer
        is_held = isinstance(store, KVStore) and not store._closed and store._backend.optimizer is optimizer
        if not is_held or copy.copy(optimizer).rule() == optimizer.rule():
            optimizer.release()

    @property
    def kvstore(self) -> KVStoreBase | None:
        """Store in use; None before the first step, or if the trainer updates without a store."""
        return self._kvstore

    @property
    def optimizer(self) -> Optimizer:
        """Optimizer of this trainer. Its learning rate, wd and multipliers may change at any time."""
        if not self._closed:
            self._model.groups.read_numbers()
        return self._model.optimizer

    @property
    def learning_rate(self) -> float:
        """Current learning rate, before multipliers of parameter groups; with a schedule, the rate of the last step."""
        optimizer = self.optimizer
        schedule = optimizer.lr_scheduler
        return optimizer.learning_rate if schedule is None else schedule(self._model.updates)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step on, also on servers. Every worker must set the same rate.

        With ``overlap=True`` and a store that updates, a step begins when its first gradient is sent.
        """
        self._model.optimizer.learning_rate = lr

    @property
    def grad_norm(self) -> float | None:
        """Norm of the gradient of the last step before clipping, equal on all workers; may be infinite or NaN.

        The same as the result of ``clip_grad_norm_``. None before the first step, and without `clip_norm`.
        """
        return None if self._model.grad_norm is None else float(self._model.grad_norm)

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
        return self._model.updates

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
        is_counted = self._steps is not None and self._steps.on_server and bool(self._model.trained)
        if not isinstance(store, KVStore) or not is_counted:
            return self._model.samples
        found, is_answered = None, False
        while not is_answered:
            with contextlib.suppress(RolledBackError):  # ask again: the store has the weights of a snapshot now
                found, is_answered = store._backend.totals(self._counted_keys), True
        if found is None and store.num_workers > 1:
            raise NotImplementedError(
                f"samples_seen: the workers of the store {store.type!r} hold the optimizer together, and none knows of"
                " how many examples the steps of the others are; give update_on_kvstore=False"
            )
        return self._model.samples if found is None else found[0]

    @property
    def _counted_keys(self) -> list[int]:
        """Keys of which servers count examples: a parameter of each part that is exchanged by itself."""
        return [self._model.trained[position].key for position in self._start().counted]

    @property
    def samples_dropped(self) -> int:
        """Number of examples of this worker whose gradients came too late and were dropped.

        Only `kvdist.asynchronous` with ``max_delay`` drops gradients. A step of unknown size counts as 1. A warning is
        logged once when more than a fifth of all examples are dropped.
        """
        return 0 if self._steps is None else self._steps.samples_dropped

    @property
    def nonfinite_steps(self) -> int:
        """Number of steps in which gradients of this worker were not finite and not used.

        ``reject_nonfinite=True`` and a `GradScaler` count them.
        """
        return self._model.nonfinite_steps

    def _start(self) -> Steps:
        """Return the steps of this trainer, which the first call chooses."""
        if self._closed:
            raise RuntimeError("this trainer has been closed; make another one")
        if self._steps is not None:
            return self._steps
        model = self._model
        if isinstance(model.optimizer, TorchRule):
            model.groups.read()  # until the store has them, all may change
        require_shapes(model.parameters)
        if not self._has_chosen:  # once, as others count the stores that are made
            compresses = self._compression_params is not None
            self._kvstore = choose_store(self._kvstore_wanted, model.num_devices, create_store, compresses)
            self._has_chosen = True
        steps = None
        try:
            steps = self._choose_steps(self._kvstore)
            steps.begin()
            model.groups.updates_here, self._steps = steps.updates_here, steps
            if any(state is not None for state in model.loaded_states):
                self._replace_states(model.loaded_states)
        except BaseException:  # as before, so that the next call may try again
            if steps is not None:
                steps.close()
            self._steps, model.shared, model.groups.updates_here = None, None, True
            raise
        model.loaded_states = ()
        if any(isinstance(one, SplitSampler) for one in self._feed.reached):  # the store had but a name before
            self._warn_of_parts()
        if self._feed.undivided:
            self._warn_of_whole_data(self._feed.undivided)
        return steps

    def _choose_steps(self, store: KVStoreBase | None) -> Steps:
        """Decide where weights are updated and how, agree with the other workers, and prepare the store.

        Raises:
            ConfigError, ValueError, TypeError: the arguments do not go together, or not with the store or its policy.
            InitMismatch: the workers differ in their parameters or numbers.
        """
        model, policy = self._model, policy_of(store)
        on_server = False
        if store is not None:
            clips = model.clip_norm is not None
            if policy is not None:
                sends_otherwise = self._overlaps or self._shares or self._update_on_kvstore_wanted is not None
                require_policy(policy, model.num_devices, model.clip_norm, sends_otherwise)
                require_enough(policy, store.num_workers)
            on_server = policy is not None or decide_update_on_kvstore(
                store, self._kvstore_wanted, self._update_on_kvstore_wanted, model.parameters, clips
            )
            check_losses(store, policy, on_server, self._overlaps)
        if store is None:
            return AloneSteps(model, self._feed)
        return self._steps_with(store, policy, on_server)

    def _steps_with(self, store: KVStoreBase, policy: TrainingPolicy | None, on_server: bool) -> Steps:
        """Agree with the other workers, prepare the store, and return the steps with it; see the table in `steps`."""
        model, feed = self._model, self._feed
        model.rank = store.rank
        agreed = model.match_names(store) if isinstance(store, KVStore) else ""
        if isinstance(store, KVStore) and not self._has_keys:
            require_unused(store)
        compression = compression_of(policy, self._compression_params)
        used = prepare_store(store, model.parameters, self._overlaps or self._shares, compression, not on_server)
        if isinstance(store, KVStore) and self._watcher not in store._backend.rollback_watchers:
            store._backend.rollback_watchers.insert(0, self._watcher)
        local_steps = policy is not None and updates_between(policy)
        outer = outer_optimizer(policy) if policy is not None and local_steps else None
        updates_here = model.optimizer if local_steps or not on_server else None
        words = "" if policy is None else f", policy {policy}"
        used.agree(
            agreed + statement(model.parameters, updates_here, model.clip_norm, digest(model.loaded_states)) + words
        )
        # With overlap the hyper-parameters of a step are fixed when it begins, so the store has a copy of its own.
        sent = model.optimizer.twin() if self._overlaps else model.optimizer
        if on_server:
            used.set_optimizer(sent if outer is None else outer)
        if self._shares and on_server:
            model.shared = SharedWeights(model.trained)
        self._has_keys = True  # or some, if this fails
        if isinstance(used, KVStore) and policy is not None:
            return steps_of_policy(policy, model, feed, used)
        if isinstance(used, KVStore) and self._overlaps:
            return OverlappedSteps(model, feed, used, sent if on_server else None)
        return ServerSteps(model, feed, used) if on_server else WorkerSteps(model, feed, used, self._always_averages)

    _always_averages = False
    """Whether the store averages gradients also in steps with a batch size, as Horovod's trainer does."""

    def _state(self, method: str) -> TrainingState:
        self._require_nothing_sent(method, "step()")
        steps = self._start()
        if self._training_state is None:
            where = (self._kvstore, steps.on_server, steps.on_server and steps.updates_here)
            self._training_state = TrainingState(self._model.parameters, self._model.local, *where)
        return self._training_state

    def _optimizer_states(self) -> Sequence[SliceState | None]:
        """The optimizer's state of each trained parameter; not a collective call."""
        if self._steps is None:
            return self._model.loaded_states
        return self._state("state_dict").states([one.key for one in self._model.trained])

    def _load_optimizer_states(self, states: Sequence[SliceState | None]) -> None:
        """Load states: at the first step, or after it as soon as every worker has called this."""
        steps = self._steps
        if steps is None:
            self._model.loaded_states = states
            return
        self._require_nothing_sent("load_state_dict", "step()")
        if isinstance(self._kvstore, KVStore) and not (steps.on_server and steps.updates_here):
            self._kvstore.agree(f"loads the optimizer state {digest(states) or 'of no updates'}")
        self._replace_states(states)

    def _replace_states(self, states: Sequence[SliceState | None]) -> None:
        self._state("load_state_dict").replace_states([one.key for one in self._model.trained], states)

    # A step.

    def _make_step(self, call: StepCall) -> None:
        steps = self._start()
        examples = self._feed.unused - steps.pending if call.samples is None else call.samples
        with self._counting_what_leaves(), self._skipping_rollback():
            self._take_part()
            if self._is_void:
                self._go_back()
            else:
                steps.step(call)
        self._end_step(examples)

    def _skip_step(self) -> None:
        with self._counting_what_leaves(), self._skipping_rollback():
            if self._is_void:
                self._go_back()
            else:
                self._start().skip()

    def _step_of_torch(self, skip: bool) -> None:
        if skip:
            self._model.nonfinite_steps += 1
            self.skip_step()
        else:
            self._make_step(StepCall(None, None, Stale.USE))

    def _end_step(self, examples: int) -> None:
        """Count batches as used, and report to the scheduler now and then how the time of steps goes."""
        self._count_as_used()
        times = self._clock.stepped(examples)
        if times is not None and isinstance(self._kvstore, KVStore):
            self._kvstore._backend.report_times(times)

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
        self._feed.undivided = examples
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

    def _count_as_used(self) -> None:
        """Count batches as used, unless their steps are still to be exchanged."""
        if self._steps is None or self._steps.is_exchanged:
            self._feed.count_as_used()
        self._feed.examples = 0

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
            if self._batches_pushed > before and not (self._steps is not None and self._steps.has_own_pace):
                self._feed.count_as_used()
            raise

    @property
    def _batches_pushed(self) -> int:
        backend = self._kvstore._backend if isinstance(self._kvstore, KVStore) else None
        return backend.batches_pushed if isinstance(backend, DistBackend) else 0

    def _count_what_has_left(self) -> None:
        if self._steps is not None:
            self._steps.count_what_has_left()

    def _take_part(self) -> bool:
        """Whether this worker has joined a running job; the others wait for its steps from the first call on."""
        store = self._kvstore_wanted if self._kvstore is None else self._kvstore
        if not isinstance(store, KVStore) or not store._backend.came_late or self._closed:
            return False
        if self._joined_at is None:
            steps = self._start()
            self._joined_at = self._feed.behind = store._backend.take_part() * steps.every
            self._catch_up(self._joined_at)
        return True

    def _catch_up(self, version: int) -> None:
        """Take the weights that others have made while this worker was not awaited."""
        self._model.updates = max(self._model.updates, version)
        if self._steps is not None and self._steps.on_server:
            self._steps.fetch()

    def _recount(self) -> None:
        """Ask servers how many updates there were, while no step is under way.

        Who made the last of them may be lost; and before the version from which on a worker that joins takes part,
        others may have found no data, so that some versions are made of nothing.
        """
        store, steps = self._kvstore, self._start()
        if isinstance(store, KVStore) and steps.on_server and self._model.trained and not steps.counts_steps:
            totals = store._backend.totals(self._counted_keys)
            if totals is not None and totals[1] >= 0:
                self._model.updates = totals[1]

    @contextlib.contextmanager
    def _skipping_rollback(self) -> Iterator[None]:
        """Make no step if all go back to a snapshot meanwhile."""
        try:
            yield
        except RolledBackError:
            self._go_back()

    def _rolled_back(self, step: int) -> None:
        """A server was lost, and the store has the weights of a snapshot; whichever call has heard of it."""
        updates = step * (1 if self._steps is None else self._steps.every) + self._loaded_updates
        self._model.updates = updates if self._steps is None else self._steps.rewind(step, updates)
        self._is_void = True
        if self._feed.queue is not None:
            self._feed.queue.rolled_back()

    def _go_back(self) -> None:
        """Take the weights of a snapshot; this step is not made."""
        self._model.watch.note_grads()
        while self._is_void:
            self._is_void = False
            with contextlib.suppress(RolledBackError):  # another server was lost meanwhile
                self._start().fetch()

    def _require_nothing_sent(self, method: str, first: str) -> None:
        if self._steps is not None:
            self._steps.require_nothing_sent(method, first)


def steps_of_policy(policy: TrainingPolicy, model: Model, feed: Feed, store: KVStore) -> Steps:
    """Return the steps of a policy; their modules are loaded where they are used."""
    if isinstance(policy, LocalSteps) and policy.quorum is None:
        return OuterSteps(policy, model, feed, store)
    if isinstance(policy, Asynchronous):
        from kvdist.training.asynchronous import AsynchronousSteps

        return AsynchronousSteps(policy, model, feed, store)
    from kvdist.training.quota import QuorumSteps, QuotaSteps

    return (QuorumSteps if isinstance(policy, LocalSteps) else QuotaSteps)(policy, model, feed, store)


def weakly(method: Callable[[int], object]) -> Callable[[int], None]:
    """Wrap a method so that it does not keep its object alive; without the object a call does nothing."""
    reference = weakref.WeakMethod(method)

    def call(number: int) -> None:
        alive = reference()
        if alive is not None:
            alive(number)

    return call
