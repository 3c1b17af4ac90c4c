"""What a trainer sends while the backward pass still runs, and what it waits for in `step`.

Two ways, by who updates:

* The store: each bucket's gradients are pushed during the backward pass, and servers sum and update meanwhile. The
  weights are pulled in `step` only, straight into place, bucket by bucket: autograd still needs the old ones until
  the pass has ended, and a weight that changed before would make it raise. A push is one copy of the gradient, or none
  where its memory is shared; a pull is one write of the weight. A `pushpull` during the pass would need a second
  buffer for the weights and one copy of them more.
* The workers: each bucket's gradients are replaced by their sums in place. From the moment its hook has fired nobody
  but the store touches a gradient, until `finish` has returned.

Rules that hold here:

* A step's numbers (learning rate, weight decay, multipliers) are those at its first gradient. Buckets leave at
  different times on different workers, and one round must not see two learning rates. So the store has an optimizer of
  its own, which takes over the numbers of the user's when a step begins.
* The number of pushes of each key must be the same on all workers. So `finish` sends everything, waits for everything,
  and only then says what was wrong with it.
* A gradient that was sent stays as it is until `finish`. Clipping it, say, would do nothing on the store, silently; the
  version counters of torch tell, and it is an error.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from kvdist.buckets import BUCKET_BYTES, Bucket, GradientBuckets
from kvdist.errors import ForkError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.optimizer.base import LIVE, Optimizer
from kvdist.training.parameters import Parameter

if TYPE_CHECKING:
    import torch


class Overlap(GradientBuckets):
    """The pushes of a trainer's steps, made as the gradients come.

    Args:
        store: where they go.
        trained: keys and parameters.
        live: the optimizer whose numbers the user may change.
        sent: the store's own copy of it; None when the workers update.
        refresh: brings `live` up to date when a step begins.
        ballot_key: where workers that update say which gradients they have; see `kvdist.training.step`.
        bucket_bytes: the size of a bucket.
    """

    def __init__(
        self,
        store: KVStore,
        trained: Sequence[tuple[int, Parameter]],
        live: Optimizer,
        sent: Optimizer | None,
        refresh: Callable[[], None] = lambda: None,
        ballot_key: int | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self._store = store
        self._trained = trained
        self._live = live
        self._sent = sent
        self._refresh = refresh
        self._ballot_key = ballot_key
        self._had: set[int] = set()
        """Keys for which this worker has sent gradients in this step."""
        self._left_out: frozenset[int] = frozenset()
        """Positions of parameters whose gradients are not to be used in the step that is being finished."""
        self._under_way: list[Future[Any]] = []
        self._watched: list[tuple[Parameter, int, torch.Tensor, int]] = []
        """Sent gradients: parameter, device, the gradient, and its version."""
        names = [parameter.name for _, parameter in trained]
        # Servers know a push by its keys. Elsewhere sums may be matched by their order, and a worker whose pass leaves
        # a layer out must not send the layers after it first.
        in_order = store.type not in DIST_NAMES
        super().__init__(names, [parameter.replicas for _, parameter in trained], bucket_bytes, in_order=in_order)

    def begin(self) -> None:
        """A step begins: its numbers are those of now."""
        self._refresh()
        if self._sent is not None:
            for name in LIVE:
                setattr(self._sent, name, getattr(self._live, name))

    def start(self, bucket: Bucket) -> None:
        """Send a bucket's gradients; returns at once."""
        members = [self._trained[member] for member in bucket.members]
        left_out = {self._trained[member][0] for member in bucket.members if member in self._left_out}
        self._had.update(key for key, one in members if key not in left_out and one.grads() is not None)
        if self._sent is None:
            members = self._with_somewhere_to_go(members, left_out)
            left_out = set()
        if not members:
            return
        keys = [key for key, _ in members]
        grads = [None if key in left_out else parameter.grads() for key, parameter in members]
        send = self._store.pushpull_async if self._sent is None else self._store.push_async
        self._under_way.append(send(keys, grads, priority=bucket.priority, average=True))
        self._watch([parameter for _, parameter in members])

    def finish(self, left_out: frozenset[int] = frozenset()) -> list[bool]:
        """Send what is left, wait for everything, and have the new weights, or the sums, in place.

        Args:
            left_out: positions of parameters that no backward pass has reached, and whose gradients are old.

        Returns:
            For each trained parameter whether anybody is known to have had a gradient.

        Raises:
            KvdistError: the store could not do it.
            RuntimeError: a gradient was changed after it had been sent.
        """
        self._left_out = left_out
        try:
            self.complete()
            changed = self._changed()
            ballot = self._vote()
            if self._sent is not None:
                self._under_way += [self._pull(bucket) for bucket in reversed(self.buckets)]
        except ForkError:
            self._under_way = []  # they are the parent's: nothing resolves them here
            raise
        finally:
            # Whatever was wrong, nothing is under way afterwards: neither out of gradients nor into weights.
            under_way, self._under_way, self._watched = self._under_way, [], []
            self._left_out, self._had = frozenset(), set()
            wait(under_way)
        for future in under_way:
            future.result()
        if changed:
            raise RuntimeError(
                f"the gradient of {changed} was changed after it had been sent. With overlap=True gradients leave"
                " during backward(), so clipping, scaling or zeroing them before step() comes too late. Use"
                " overlap=False; or make the trainer with update_on_kvstore=False, and call"
                " allreduce_grads(average=True), clip, and update() instead of step()"
            )
        given = [bool(share > 0) for share in ballot[: len(self._trained)]]
        for (_, parameter), is_given in zip(self._trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        return given

    def _vote(self) -> NDArray[np.float32]:
        """Say which gradients there are here; once it is not under way any more, whether anybody had them."""
        had = [key in self._had for key, _ in self._trained]
        ballot = np.array([*had, any(had), False], np.float32)  # the last two as in `Exchange`: this one averages
        if self._ballot_key is not None:
            self._under_way.append(self._store.pushpull_async([self._ballot_key], [ballot], average=True))
        return ballot

    def _with_somewhere_to_go(
        self, members: list[tuple[int, Parameter]], left_out: set[int]
    ) -> list[tuple[int, Parameter]]:
        """Those whose sum is wanted: on a cluster all, as others may have the gradient that is missing here."""
        if self._store.num_workers == 1:
            members = [(key, one) for key, one in members if one.grads() is not None and key not in left_out]
        for key, parameter in members:
            parameter.fill_grads()
            if key in left_out:
                for grad in parameter.grads() or ():
                    grad.zero_()
        return members

    def _pull(self, bucket: Bucket) -> Future[Any]:
        # The same list of keys as in the push, so that both share a plan, here and on the servers.
        members = [self._trained[member] for member in bucket.members]
        weights = [parameter.replicas for _, parameter in members]
        return self._store.pull_async([key for key, _ in members], weights, bucket.priority)

    def _watch(self, parameters: Sequence[Parameter]) -> None:
        for parameter in parameters:
            for device, replica in enumerate(parameter.replicas):
                grad = replica.grad
                # Into other than plain host memory the store writes by an operation of torch, which counts as a change.
                plain = grad is not None and grad.device.type == "cpu" and grad.is_contiguous()
                if grad is not None and (plain or self._sent is not None):
                    self._watched.append((parameter, device, grad, grad._version))

    def _changed(self) -> str:
        """The names of the parameters whose gradients are not what was sent."""
        changed = [
            parameter.name
            for parameter, device, grad, version in self._watched
            if parameter.replicas[device].grad is not grad or grad._version != version
        ]
        return ", ".join(dict.fromkeys(changed))


def weakly(method: Callable[[], None]) -> Callable[[], None]:
    """A method for hooks, which must not keep its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    return call
