"""`Exchange`: what a trainer sends to its store, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from kvdist.kvstore.adapter import Adapted
from kvdist.kvstore.backend import Average
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.dist import DistBackend
from kvdist.kvstore.registry import DIST_NAMES
from kvdist.naming import NamedKey
from kvdist.optimizer.base import Optimizer
from kvdist.protocol.messages import Due, DueWhen
from kvdist.training.ballot import Ballot
from kvdist.training.model import Model
from kvdist.training.parameters import Grads, divide, named_keys, scale
from kvdist.training.trainer_config import refuse_overflow


class Exchange:
    """The exchange of a trainer with its store.

    Args:
        store: the store.
        model: the parameters; with `Model.shared`, they show the memory of servers on this host.
        always_averages: whether sums are averages in steps with a batch size too.
    """

    def __init__(self, store: KVStore | Adapted, model: Model, always_averages: bool = False) -> None:
        self._store = store
        self._model = model
        self._keys = [key for key, _ in model.trained]
        self._ballot: Ballot | None = None
        self._always_averages = always_averages
        self.examples = 0
        """Examples of the gradients of all workers in the last sum, as far as that is known."""

    @property
    def store(self) -> KVStore:
        """The store, where it is a store of kvdist."""
        assert isinstance(self._store, KVStore)
        return self._store

    @property
    def has_others(self) -> bool:
        """Whether the store has several workers."""
        return self._store.num_workers > 1

    def broadcast(self) -> None:
        """Copy rank 0's weights to all workers."""
        model = self._model
        if model.shared is not None:
            model.shared.own()
        replicas = [parameter.carried for parameter in model.parameters]
        self._store.broadcast(named_keys(model.parameters), [one[0] for one in replicas], out=replicas)

    def fetch(self) -> None:
        """Write the store's current values into all parameters."""
        parameters = self._model.parameters
        if self._model.shared is not None:
            self._model.shared.own()
        self.store.pull(list(range(len(parameters))), out=[one.carried for one in parameters])

    def open_ballot(self, optimizer: Optimizer) -> Ballot | None:
        """Make the ballot, which `sum` needs; None for a single worker.

        Args:
            optimizer: what each worker updates with.
        """
        store, key = self._store, len(self._model.parameters)
        if store.num_workers == 1:
            return None
        store.leave_uncompressed([key])
        self._ballot = Ballot(key, optimizer, len(self._model.trained), store.rank, store.num_workers)
        blank = torch.from_numpy(np.zeros_like(self._ballot.cast([False] * len(self._model.trained), average=False)))
        named = NamedKey(key, "the vote on who has which gradients")
        store.broadcast([named], [blank], out=[[blank]])
        return self._ballot

    def update(self, grads: Grads, average: Average, samples: int, clip_norm: float | None = None) -> float | None:
        """Send gradients to a store that updates, and get the new weights; the norm, if they are clipped."""
        weights = [parameter.replicas for _, parameter in self._model.trained]
        if clip_norm is not None:
            return self.store.pushpull_clipped(self._keys, grads, clip_norm, weights, average=average, samples=samples)
        shared = self._model.shared
        if shared is None:
            self._store.pushpull(self._keys, grads, out=weights, average=average, samples=samples)
            return None
        shown = self.store.pushpull_shared(self._keys, grads, weights, average=average, samples=samples)
        shared.take(shown)
        return None

    def update_some(self, grads: Grads, average: Average, samples: int, which: Sequence[int]) -> None:
        """The same of some of the trained parameters, by their positions."""
        keys, weights = [self._keys[one] for one in which], [self._model.trained[one][1].replicas for one in which]
        self._store.pushpull(keys, grads, out=weights, average=average, samples=samples)

    def begin_update(
        self, grads: Grads, average: Average, samples: int, out: list[torch.Tensor], which: Sequence[int] | None = None
    ) -> Future[Any]:
        """Send what an exchange is of, of all parameters or of some.

        Returns:
            A future, which is done when the new weights are in `out`, a tensor for each parameter.
        """
        keys = self._keys if which is None else [self._keys[one] for one in which]
        places = [[one] for one in out]
        return self.store.pushpull_async(keys, grads, out=places, average=average, samples=samples)

    def report(self, samples: int, when: DueWhen, quota: int, now: bool, together: bool) -> Future[Due | None]:
        """Report the work of this worker since its last push; see `DistBackend.report_progress`."""
        return self._backend.report_progress(self._keys[0], samples, when, quota, now, together)

    def take(self, future: Future[Any]) -> Any:
        """Return the result of such a future."""
        return self._backend.wait(future)

    @property
    def _backend(self) -> DistBackend:
        backend = self.store._backend
        assert isinstance(backend, DistBackend)
        return backend

    def sum(self, grads: Grads, average: Average, samples: int = 0) -> list[bool]:
        """Replace the gradients, on every device, by their sums over devices and workers.

        Args:
            grads: per trained parameter, on every device; None without a gradient.
            average: whether the sums are divided: by the number of workers, or by that of all samples.
            samples: of how many examples this worker's are; 0 if that is not known.

        Returns:
            For each trained parameter whether any worker had a gradient. Without that, it has no gradient afterwards.

        Raises:
            ValueError: some workers average and others sum, on a store that cannot mix the two; or only some give
                their samples.
            OptimizerMismatch: the workers' optimizers have different numbers.
        """
        is_weighted = average == "samples"
        average = self._always_averages or (average is True)
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
        for (_, parameter), is_given in zip(self._model.trained, given, strict=True):
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
            scale([parameter for _, parameter in self._model.trained], 1 / (self.examples * self._ballot.share(vote)))
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
        members = [self._model.trained[position] for position in positions]
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
