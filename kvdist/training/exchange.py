"""What a trainer exchanges with its store in a step, but for what leaves during the backward pass (`overlap`).

Rules that hold here:

* All parameters travel in one list call, in the order given, so the first layers, which the next forward pass needs
  first, come first. Their keys are their positions, 0, 1, 2, ….
* Where workers update, all must update the same parameters, or their weights would part. So they say, in one more key,
  which gradients they have: a parameter for which nobody has one stays as it is, everywhere. There they also say
  whether they average: where no server divides for each of them, all that have gradients must do the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from kvdist.kvstore.adapted import Adapted
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.names import DIST_NAMES
from kvdist.training.parameters import Parameter
from kvdist.training.shared_weights import SharedWeights

if TYPE_CHECKING:
    from torch import Tensor

CONVENTIONS = 2
"""Elements of a ballot behind those of the parameters: one for averages, one for sums."""

Grads: TypeAlias = "Sequence[list[Tensor] | None]"
"""For each trained parameter its gradients, one per device; None where there is none."""


class Exchange:
    """The traffic of a trainer.

    Args:
        store: where it goes.
        parameters: all of them.
        trained: those with gradients, and their keys.
        shared: which of them show the servers' memory; None where that was not asked for.
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
        self._ballot_key = len(parameters)
        self._shared = shared
        self.always_averages = False
        """Whether sums are averages in steps with a batch size too."""

    def broadcast(self) -> None:
        """Make rank 0's weights everybody's."""
        if self._shared is not None:
            self._shared.own()
        replicas = [parameter.replicas for parameter in self._parameters]
        self._store.broadcast(list(range(len(replicas))), [one[0] for one in replicas], out=replicas)

    def fetch(self) -> None:
        """Write the store's present values into all parameters."""
        if self._shared is not None:
            self._shared.own()
        assert isinstance(self._store, KVStore)
        self._store.pull(list(range(len(self._parameters))), out=[one.replicas for one in self._parameters])

    def open_ballot(self) -> int | None:
        """Make the key in which workers say which gradients they have, needed for `sum`; None for one worker alone."""
        if self._store.num_workers == 1:
            return None
        self._store.leave_uncompressed([self._ballot_key])
        ballot = torch.zeros(len(self._trained) + CONVENTIONS, dtype=torch.float32, device="cpu")
        self._store.broadcast([self._ballot_key], [ballot], out=[[ballot]])
        return self._ballot_key

    def update(self, grads: Grads, average: bool, samples: int) -> None:
        """Send gradients to a store that updates, and get the new weights."""
        weights = [parameter.replicas for _, parameter in self._trained]
        if self._shared is None:
            self._store.pushpull(self._keys, grads, out=weights, average=average, samples=samples)
            return
        assert isinstance(self._store, KVStore)
        shown = self._store.pushpull_shared(self._keys, grads, weights, average=average, samples=samples)
        self._shared.take(shown)

    def sum(self, grads: Grads, average: bool) -> list[bool]:
        """Replace the gradients, on every device, by their sums over devices and workers.

        Returns:
            For each trained parameter whether anybody had a gradient. Where nobody had one, there is none afterwards.

        Raises:
            ValueError: some workers average and others do not, where that cannot be.
        """
        average = average or self.always_averages
        if self._store.num_workers == 1:
            here = [grad is not None for grad in grads]
            self._sum([position for position, is_here in enumerate(here) if is_here], grads, average)
            return here
        given = self._sum(range(len(grads)), grads, average, is_voted=True)
        for (_, parameter), is_given in zip(self._trained, given, strict=True):
            if not is_given:
                parameter.drop_filled()
        return given

    def _sum(self, positions: Sequence[int], grads: Grads, average: bool, is_voted: bool = False) -> list[bool]:
        """Sum these; with a vote, say which gradients there are, and return for which of them somebody had one."""
        members = [self._trained[position] for position in positions]
        for _, parameter in members:
            parameter.fill_grads()
        keys = [key for key, _ in members]
        given = [grads[position] for position in positions]
        places = [parameter.grads() or [] for _, parameter in members]
        here = [grad is not None for grad in given]
        # Who has nothing to give, as in a step that is skipped, goes along with the others.
        convention = [any(here) and average, any(here) and not average]
        ballot = torch.tensor([*here, *convention], dtype=torch.float32, device="cpu")
        if is_voted:
            keys, given, places = [*keys, self._ballot_key], [*given, [ballot]], [*places, [ballot]]
        # In place is the shorter way, and the usual case: all that is written was given.
        complete = all(one is not None and len(one) == len(place) for one, place in zip(given, places, strict=True))
        if keys:
            self._store.pushpull(keys, given, out=None if complete else places, average=average)
        *shares, averaging, summing = ballot.tolist()
        if averaging > 0 and summing > 0 and isinstance(self._store, KVStore) and self._store.type not in DIST_NAMES:
            raise ValueError(
                "some workers called step(), which averages over the workers, and others step(batch_size), which sums:"
                f" the store {self._store.type!r} cannot do both in one step. Call the same on all workers"
            )
        return [share > 0 for share in shares]


def divide(grads: Grads, divisor: float) -> None:
    """Divide gradients in place."""
    present = [grad for given in grads for grad in given or ()]
    if present and divisor != 1:
        torch._foreach_div_(present, divisor)


def scale(parameters: Sequence[Parameter], factor: float) -> None:
    """Multiply the gradients of parameters, on every device, in place."""
    present = [grad for parameter in parameters for grad in parameter.grads() or ()]
    if present and factor != 1:
        torch._foreach_mul_(present, factor)
