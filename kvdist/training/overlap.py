"""`OverlappedSteps` of a trainer: gradients leave while the backward pass still runs, and `step` waits for the answers.

If the store updates, each bucket's gradients are pushed during the backward pass, and the weights are pulled in `step`,
straight into place: autograd needs the old weights until the pass has ended. A push is at most a copy of the gradient,
a pull a write of the weight; a `pushpull` during the pass would cost a second buffer and a copy. If the workers update,
each bucket's gradients are replaced by their sums in place. Invariants:

* Hyper-parameters of a step are those at its first gradient: buckets leave at different times on different workers, and
  a round must not see two learning rates. So the store has a copy of the optimizer, refreshed when a step begins.
* All workers push each key equally often. So `finish` sends everything and waits for it before it raises.
* A sent gradient must not change until `finish`: clipping it would silently have no effect on the store. torch's
  version counters reveal it, and it is an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvdist.buckets import BUCKET_BYTES, Bucket, GradientBuckets
from kvdist.errors import ForkError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.optimizer.base import LIVE, Optimizer
from kvdist.runtime.waits import wait_for
from kvdist.training.ballot import Ballot
from kvdist.training.data import Feed
from kvdist.training.grad_checks import Stale, refuse_changed
from kvdist.training.model import Model
from kvdist.training.parameters import Grads, Parameter
from kvdist.training.steps import StepCall, StoreSteps, open_ballot
from kvdist.training.trainer_config import refuse_sent, refuse_updated_there

if TYPE_CHECKING:
    import torch


class OverlappedSteps(StoreSteps):
    """Steps whose gradients leave in buckets during the backward pass, from the second step on.

    Args:
        model, feed, store: as of `StoreSteps`.
        sent: the store's copy of the optimizer; None where the workers update.
    """

    def __init__(self, model: Model, feed: Feed, store: KVStore, sent: Optimizer | None) -> None:
        super().__init__(model, feed, store)
        self.on_server, self.updates_here = sent is not None, sent is None
        self.buckets = Overlap(store, model, feed, sent)

    def begin(self) -> None:
        super().begin()
        model = self._model
        if self.updates_here:
            self.buckets.ballot = open_ballot(self._store, model)
        model.optimizer.rescale_grad = model.scale / model.num_devices

    def step(self, call: StepCall) -> None:
        model = self._model
        model.groups.read()
        model.refuse_untrained()
        model.warn_without(any(one.has_grad for one in model.trained))
        stale = model.watch.left_out(Stale.USE if call.on_stale is Stale.USE else Stale.LEAVE_OUT)
        changed = model.watch.changed()
        try:
            has_grad = self.buckets.finish(frozenset(position for position, _ in stale))
        finally:
            self.note_weights()  # they were written, also if it failed
        if self.on_server:
            model.updates += 1
            model.watch.note_grads()
        else:
            model.update(call.divisor(model.num_devices), has_grad, self.buckets.examples)
        if call.on_stale is Stale.REFUSE:
            model.watch.refuse(stale, "other gradients were sent already, so this step was made without it")
        # Only after the transfers have ended; by then the store's weights have replaced the changed ones.
        refuse_changed(changed, "gradients were sent already, so this step was made and the change is lost")

    def _make(self, grads: Grads, call: StepCall) -> None:
        raise AssertionError("gradients are not collected before a step: they have left")

    def skip(self) -> None:
        raise RuntimeError("skip_step() is too late with overlap=True: gradients leave during backward()")

    def sum_gradients(self, average: bool, on_stale: Stale) -> None:
        if self.on_server:
            refuse_updated_there("allreduce_grads")
        self._model.groups.read()
        self.buckets.finish()

    def update(self, call: StepCall) -> None:
        if self.on_server:
            refuse_updated_there("update")
        self.require_nothing_sent("update", "allreduce_grads(average=True)")
        self._update(call, None, self.buckets.examples)

    def count_what_has_left(self) -> None:
        if self.buckets.is_open:
            self._feed.count_as_used()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        return self.buckets.paused()

    def require_nothing_sent(self, method: str, first: str) -> None:
        if self.buckets.is_open:
            refuse_sent(method, first)

    def close(self) -> None:
        self.buckets.remove_hooks()


class Overlap(GradientBuckets):
    """Sends the gradients of a trainer's steps as they come.

    Args:
        store: the store that receives them.
        model: the parameters, and the optimizer whose hyper-parameters the user may change.
        feed: knows how many examples a step sums.
        sent: the store's copy of the optimizer; None where the workers update.
        bucket_bytes: size of a bucket.
    """

    def __init__(
        self,
        store: KVStore,
        model: Model,
        feed: Feed,
        sent: Optimizer | None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._store = store
        self._model = model
        self._feed = feed
        self._sent = sent
        self.ballot: Ballot | None = None
        """The vote on gradients, where several workers update."""
        self._had: set[int] = set()
        """Keys whose gradients this worker has sent in this step."""
        self._left_out: frozenset[int] = frozenset()
        """Positions of parameters whose gradients the current step ignores."""
        self.examples = 0
        """Examples of the gradients of all workers in the last step, where the workers update."""
        self._under_way: list[Future[Any]] = []
        self._watched: list[tuple[Parameter, int, torch.Tensor, int]] = []
        """Sent gradients: parameter, device, the gradient, and its version."""
        trained = model.trained
        names = [parameter.label for parameter in trained]
        # Servers match pushes by keys. Other stores may match sums by their order, and a worker whose pass leaves out a
        # layer must not send the layers after it first.
        in_order = self._store.type not in DIST_NAMES
        super().__init__(names, [parameter.replicas for parameter in trained], bucket_bytes, in_order=in_order)

    def begin(self) -> None:
        """Begin a step with the current hyper-parameters."""
        self._model.groups.read()
        if self._sent is not None:
            for name in LIVE:
                setattr(self._sent, name, getattr(self._model.optimizer, name))

    def start(self, bucket: Bucket) -> None:
        """Send a bucket's gradients without waiting."""
        members = [self._model.trained[member] for member in bucket.members]
        left_out = {self._model.trained[member].key for member in bucket.members if member in self._left_out}
        self._had.update(one.key for one in members if one.key not in left_out and one.grads() is not None)
        if self._sent is None:
            members = self._with_somewhere_to_go(members, left_out)
            left_out = set()
        if not members:
            return
        keys = [parameter.key for parameter in members]
        grads = [None if parameter.key in left_out else parameter.grads() for parameter in members]
        send = self._store.pushpull_async if self._sent is None else self._store.push_async
        self._under_way.append(send(keys, grads, priority=bucket.priority, average=True, samples=self._feed.unused))
        self._watch(members)

    def finish(self, left_out: frozenset[int] = frozenset()) -> list[bool]:
        """Send the remaining buckets and wait until the new weights, or the sums, are in place.

        Args:
            left_out: positions of parameters with stale gradients.

        Returns:
            For each trained parameter whether a worker is known to have had a gradient.

        Raises:
            KvdistError: the store failed.
            RuntimeError: a gradient was changed after it had been sent.
            OptimizerMismatch: the workers update, and their optimizers have different numbers.
        """
        self._left_out = left_out
        try:
            self.complete()
            changed = self._changed()
            had, vote = self._vote()
            if self._sent is not None:
                self._under_way += [self._pull(bucket) for bucket in reversed(self.buckets)]
        except ForkError:
            self._under_way = []  # the parent's futures, which nothing resolves here
            raise
        finally:
            # After an error too, no transfer out of gradients or into weights is in progress.
            under_way, self._under_way, self._watched = self._under_way, [], []
            self._left_out, self._had = frozenset(), set()
            wait_for(under_way)
        for future in under_way:
            future.result()
        if changed:
            raise RuntimeError(
                f"the gradient of {changed} was changed after it had been sent. With overlap=True gradients leave"
                " during backward(), so clipping, scaling or zeroing them before step() comes too late. Use"
                " overlap=False; or make the trainer with update_on_kvstore=False, and call"
                " allreduce_grads(average=True), clip, and update() instead of step()"
            )
        given, self.examples = had, self._feed.unused
        if vote is not None and self.ballot is not None:
            given, self.examples = self.ballot.read(vote)[0], self.ballot.examples(vote)
        for parameter, is_given in zip(self._model.trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        if vote is not None and self.ballot is not None:
            self.ballot.require_equal_numbers(vote)
        return given

    def _vote(self) -> tuple[list[bool], NDArray[np.float32] | None]:
        """Which gradients this worker has; and the ballot that was sent, which becomes that of all workers."""
        had = [parameter.key in self._had for parameter in self._model.trained]
        if self.ballot is None:
            return had, None
        vote = self.ballot.cast(had, average=True, examples=self._feed.unused)
        self._under_way.append(self._store.pushpull_async([self.ballot.key], [vote], average=True))
        return had, vote

    def _with_somewhere_to_go(self, members: list[Parameter], left_out: set[int]) -> list[Parameter]:
        """The members to sum: on a cluster all, because others may have a gradient that this worker lacks."""
        if self._store.num_workers == 1:
            members = [one for one in members if one.grads() is not None and one.key not in left_out]
        for parameter in members:
            parameter.fill_grads()
            if parameter.key in left_out:
                for grad in parameter.grads() or ():
                    grad.zero_()
        return members

    def _pull(self, bucket: Bucket) -> Future[Any]:
        # The same list of keys as the push, so both share a plan, here and on the servers.
        members = [self._model.trained[member] for member in bucket.members]
        weights = [parameter.replicas for parameter in members]
        return self._store.pull_async([parameter.key for parameter in members], weights, bucket.priority)

    def _watch(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            for device, replica in enumerate(parameter.replicas):
                grad = replica.grad
                # Results outside plain host memory are written by torch operations, which count as changes.
                plain = grad is not None and grad.device.type == "cpu" and grad.is_contiguous()
                if grad is not None and (plain or self._sent is not None):
                    self._watched.append((parameter, device, grad, grad._version))

    def _changed(self) -> str:
        """The names of the parameters whose gradients were changed after they were sent."""
        changed = [
            parameter.label
            for parameter, device, grad, version in self._watched
            if parameter.replicas[device].grad is not grad or grad._version != version
        ]
        return ", ".join(dict.fromkeys(changed))
