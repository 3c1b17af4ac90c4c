"""Gradients that are not finite: which one it is, and what is wrong with it, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdist.dtypes import DType
from kvdist.kvstore import values
from kvdist.kvstore.devices import Devices, OnDevice
from kvdist.training.parameters import Parameter

if TYPE_CHECKING:
    import torch


def refuse_nonfinite(
    trained: Sequence[tuple[int, Parameter]],
    grads: Sequence[Sequence[torch.Tensor] | None],
    rank: int,
    devices: Devices,
) -> None:
    """Check that all gradients are finite: one pass over their bytes, and one wait for each GPU.

    Args:
        trained: keys and parameters.
        grads: for each of them its gradients, one per device.
        rank: of this worker, for the message.
        devices: the GPUs that are used.

    Raises:
        FloatingPointError: one is not; it names rank, key and parameter.
    """
    if _all_on_gpus_finite([grad for given in grads for grad in given or ()], devices):
        return
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


def _all_on_gpus_finite(grads: Sequence[torch.Tensor], devices: Devices) -> bool:
    """Whether all gradients lie on GPUs, and are finite. Where they do not, they are looked at one by one."""
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
