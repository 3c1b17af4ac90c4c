"""Gradients that are not finite: which one it is, and what is wrong with it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdist.parameters import Parameter

if TYPE_CHECKING:
    import torch


def refuse_nonfinite(
    trained: Sequence[tuple[int, Parameter]], grads: Sequence[Sequence[torch.Tensor] | None], rank: int
) -> None:
    """Check that all gradients are finite; one pass over their bytes.

    Args:
        trained: keys and parameters.
        grads: for each of them its gradients, one per device.
        rank: of this worker, for the message.

    Raises:
        FloatingPointError: one is not; it names rank, key and parameter.
    """
    for (key, parameter), given in zip(trained, grads, strict=True):
        for grad in given or ():
            if not bool(grad.isfinite().all()):
                nan = int(grad.isnan().sum())
                infinite = int(grad.isinf().sum())
                raise FloatingPointError(
                    f"the gradient of {parameter.name} (key {key}) on rank {rank} is not finite: {nan} NaN and"
                    f" {infinite} infinite of {grad.numel()} elements. Nothing was sent, so the other workers wait:"
                    " call skip_step() to go on without this worker's gradients, or end the job"
                )
