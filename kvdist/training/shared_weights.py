"""Weights that are not pulled: parameters that show the memory of the servers of this host.

A step then ends with a change of pointers, and the weights exist once per host. Rules that hold here:

* A parameter shows a version until the next step has the next one. Autograd is told at each change, so a backward pass
  through older weights raises.
* Whoever writes to such a parameter gets a private copy of that page: nobody else sees it, and the next step would not
  know of it. torch counts changes in place, so it is noticed and is an error; what goes past that count (``.data``) is
  not noticed, and is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdist.training.parameters import Parameter

if TYPE_CHECKING:
    import torch


class SharedWeights:
    """Which parameters show the memory of servers, and whether somebody else has changed them.

    Args:
        parameters: those that are trained, each with one replica.
    """

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self._parameters = parameters
        self._versions: list[int | None] = [None] * len(parameters)
        """torch's count of changes at the last step; None for a parameter with memory of its own."""
        self._changed: list[str] = []

    def require_unchanged(self) -> None:
        """Check that nobody has written to them since the last step.

        Raises:
            RuntimeError: somebody has, and `own` was not called since.
        """
        self._changed = self._changed or [
            parameter.name
            for parameter, version in zip(self._parameters, self._versions, strict=True)
            if version is not None and _weight(parameter)._version != version
        ]
        if self._changed:
            raise RuntimeError(
                f"{', '.join(self._changed)} was changed outside of step(). With share_weights=True parameters show the"
                " servers' memory, and a change here is seen by nobody else. Call trainer.broadcast_parameters() on"
                " every worker after changing weights, such as by load_state_dict(); nothing was sent in this step"
            )

    def take(self, shown: Sequence[Any]) -> None:
        """A step has brought these: per parameter a tensor that shows its new value, or None if it was written."""
        for i, (parameter, tensor) in enumerate(zip(self._parameters, shown, strict=True)):
            if tensor is None:
                self._versions[i] = None
                continue
            weight = _weight(parameter)
            # An operation on no elements at all: it writes nothing but advances the count that a graph has noted.
            weight.detach().view(-1)[:0].zero_()
            weight.data = tensor
            self._versions[i] = weight._version

    def own(self) -> None:
        """Give every parameter memory of its own, with its present value; what was changed is not lost."""
        self._changed = []
        for i, parameter in enumerate(self._parameters):
            if self._versions[i] is not None:
                weight = _weight(parameter)
                weight.data = weight.detach().clone()
                self._versions[i] = None


def _weight(parameter: Parameter) -> torch.Tensor:
    return parameter.replicas[0]
