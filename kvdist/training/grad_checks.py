"""Checks of weights and gradients before a step: changed weights, stale gradients, NaN and infinity.

Every torch tensor counts the operations that wrote to it. Invariants:

* If the count of a weight that the store updates has changed since the last step, the next pull would silently undo the
  change: an error.
* A gradient is *stale* if it is the tensor, at the count, that the last step used: no backward pass came in between.
* Writes past the counter (``weight.data``, NumPy on its memory) are not noticed.
* Gradients are held by weak references.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

from kvdist.dtypes import DType
from kvdist.kvstore import values
from kvdist.kvstore.placement import Devices, OnDevice
from kvdist.training.parameters import Parameter

if TYPE_CHECKING:
    import torch


Place: TypeAlias = tuple[int, int]
"""(Position of a parameter, device)."""


class Stale(enum.Enum):
    """How to treat a gradient that no backward pass has renewed since the last step."""

    REFUSE = enum.auto()
    LEAVE_OUT = enum.auto()
    USE = enum.auto()


class Watch:
    """The version counters of weights and gradients after the last step.

    Args:
        parameters: the trained parameters.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        # Flat, because every step iterates over them.
        self._replicas = [replica for parameter in parameters for replica in parameter.replicas]
        self._places = [(i, device) for i, one in enumerate(parameters) for device in range(len(one.replicas))]
        self._weights: list[int] = []
        """Version counter of each replica; empty if the store does not update."""
        self._taken: list[tuple[weakref.ref[torch.Tensor], int] | None] = []
        """Gradient of each replica that the last step used, and its version counter at that step."""

    def note_weights(self) -> None:
        """Record the version counters of the weights; from now on only the trainer may write to them."""
        self._weights = [replica._version for replica in self._replicas]

    def changed(self) -> list[str]:
        """The names of the parameters that were written to since `note_weights`."""
        if not self._weights or self._weights == [replica._version for replica in self._replicas]:
            return []
        pairs = zip(self._places, self._replicas, self._weights, strict=True)
        changed = [self._parameters[i].label for (i, _), replica, count in pairs if replica._version != count]
        return list(dict.fromkeys(changed))

    def note_grads(self) -> None:
        """Record the current gradients as used."""
        grads = [replica.grad for replica in self._replicas]
        self._taken = [None if grad is None else (weakref.ref(grad), grad._version) for grad in grads]

    def grads(self, on_stale: Stale) -> list[list[torch.Tensor] | None]:
        """For each parameter its gradients; None for a parameter without a gradient.

        Raises:
            RuntimeError: a gradient is stale, and `on_stale` is `REFUSE`.
        """
        left_out = self.left_out(on_stale)
        grads: list[list[torch.Tensor] | None] = [parameter.grads() for parameter in self._parameters]
        if not left_out:
            return grads
        return [
            [
                replica.grad
                for device, replica in enumerate(parameter.replicas)
                if replica.grad is not None and (position, device) not in left_out
            ]
            or None
            for position, parameter in enumerate(self._parameters)
        ]

    def left_out(self, on_stale: Stale) -> set[Place]:
        """The places of stale gradients; none with `Stale.USE`.

        Raises:
            RuntimeError: a gradient is stale, and `on_stale` is `REFUSE`.
        """
        stale = set() if on_stale is Stale.USE else self._stale()
        if on_stale is Stale.REFUSE:
            self.refuse(stale, "nothing was sent in this step")
        return stale

    def refuse(self, stale: set[Place], consequence: str) -> None:
        """Raise if any gradient is stale.

        Args:
            stale: places of the stale gradients.
            consequence: effect on this step, for the message.

        Raises:
            RuntimeError: `stale` is not empty.
        """
        if stale:
            names = [self._parameters[position].label for position in sorted({position for position, _ in stale})]
            raise RuntimeError(
                f"{'the gradients' if len(names) > 1 else 'the gradient'} of {_some(names)} used by the last step, and"
                f" no backward pass has renewed {'them' if len(names) > 1 else 'it'}"
                f" ({consequence}). Call zero_grad() before each backward pass, or pass ignore_stale_grad=True to leave"
                " such parameters out. Torch must see that a gradient is new: write it by grad.copy_(), not by"
                " grad.data or NumPy"
            )

    def _stale(self) -> set[Place]:
        found = set()
        for place, replica, taken in zip(self._places, self._replicas, self._taken, strict=False):
            grad = replica.grad
            if grad is None or not replica.requires_grad or taken is None:
                continue  # no gradient, or frozen meanwhile
            if taken[0]() is grad and taken[1] == grad._version:
                found.add(place)
        return found


def refuse_changed(changed: list[str], consequence: str) -> None:
    """Raise if weights of the store were changed.

    Args:
        changed: names of the changed weights.
        consequence: effect on this step, for the message.

    Raises:
        RuntimeError: `changed` is not empty.
    """
    if changed:
        raise RuntimeError(
            f"{_some(changed)} changed outside of step(). The store holds these weights and would overwrite the change."
            " After changing weights, such as by load_state_dict(), call trainer.broadcast_parameters() on every"
            f" worker, which copies the weights of rank 0 to all; {consequence}. A network that writes to its own"
            " weights (such as nn.Embedding with max_norm) needs update_on_kvstore=False"
        )


def refuse_untrained(parameters: Sequence[Parameter]) -> None:
    """Raise if a parameter that was frozen at the trainer's creation has a gradient, which would have no effect.

    Args:
        parameters: the frozen parameters.

    Raises:
        RuntimeError: a parameter has a gradient.
    """
    names = [
        one.label
        for one in parameters
        if any(replica.requires_grad and replica.grad is not None for replica in one.replicas)
    ]
    if names:
        raise RuntimeError(
            f"{_some(names)} frozen when the trainer was created, but with a gradient now: workers agree on the trained"
            " parameters at the beginning. Create the trainer with all parameters that will be trained (a parameter"
            " without a gradient stays as it is), or close it and create another one"
        )


_NAMED_MAX = 5


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED_MAX} more" if len(names) > _NAMED_MAX else ""
    verb = "was" if len(names) == 1 else "were"
    return f"{', '.join(names[:_NAMED_MAX])}{more} {verb}"


def refuse_nonfinite(
    trained: Sequence[Parameter],
    grads: Sequence[Sequence[torch.Tensor] | None],
    rank: int,
    devices: Devices,
) -> None:
    """Refuse gradients that are not finite, in a single pass over their bytes and a single wait for each GPU.

    Args:
        trained: the trained parameters.
        grads: for each parameter its gradients, a tensor per device.
        rank: rank of this worker, for the message.
        devices: the GPUs that are used.

    Raises:
        FloatingPointError: a gradient is not finite; the message names the worker and the parameter.
    """
    if _all_on_gpus_finite([grad for given in grads for grad in given or ()], devices):
        return
    for parameter, given in zip(trained, grads, strict=True):
        for grad in given or ():
            if not bool(grad.isfinite().all()):
                nan = int(grad.isnan().sum())
                infinite = int(grad.isinf().sum())
                raise FloatingPointError(
                    f"the gradient of {parameter.label} on worker-{rank} is not finite: {nan} NaN and"
                    f" {infinite} infinite of {grad.numel()} elements. Nothing was sent, so the other workers wait:"
                    " call skip_step() to go on without this worker's gradients, or end the job"
                )


def _all_on_gpus_finite(grads: Sequence[torch.Tensor], devices: Devices) -> bool:
    """Whether all gradients are on GPUs and finite; if not, the caller checks each gradient."""
    together: dict[tuple[int, DType], list[OnDevice]] = {}
    for grad in grads:
        dtype = values.describe(grad)[1]
        part = devices.read(grad, dtype)
        if not isinstance(part, OnDevice):
            return False
        together.setdefault((part.device.index, dtype), []).append(part)
    return bool(together) and all(
        parts[0].device.all_finite([part.array for part in parts], dtype) for (_, dtype), parts in together.items()
    )
