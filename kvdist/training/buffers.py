"""Buffers of a network: the running statistics of BatchNorm and the like, which no gradient trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdist.kvstore.base import KVStore
from kvdist.training.replicas import Replicas

if TYPE_CHECKING:
    import torch


def sync_buffers(net: torch.nn.Module | Replicas, store: KVStore | None) -> None:
    """Make the buffers of a network the same on all workers and devices, in place; every worker calls it.

    Buffers of floating types, such as a running mean, become the mean over the workers; integers and booleans, such as
    a count of batches, become rank 0's. Of `Replicas` they are first the mean over this worker's devices, and the first
    device's. Call it before an evaluation, or before saving the ``state_dict``. The keys and the optimizer of the store
    are not touched.

    Args:
        net: the network, on each worker with the same buffers; or its replicas.
        store: whose workers take part. None: only the devices of these replicas.

    Raises:
        InitMismatch: the workers' networks have different buffers.
        TypeError: the store is not a `KVStore`, or a buffer is of a type that none can hold.
    """
    import torch

    nets = list(net) if isinstance(net, Replicas) else [net]
    if not isinstance(store, KVStore) and not (store is None and isinstance(net, Replicas)):
        raise TypeError(f"sync_buffers needs a store of kvdist, such as kv.create('dist'), not {type(store).__name__}")
    replicas = list(zip(*([buffer.detach() for buffer in one.buffers()] for one in nets), strict=True))
    floating = [one for one in replicas if one[0].is_floating_point()]
    for dtype in dict.fromkeys(one[0].dtype for one in floating):
        members = [one for one in floating if one[0].dtype == dtype]
        flat = _mean_over_devices(members)
        _scatter(flat if store is None else store.average(flat), members)
    others = [one for one in replicas if not one[0].is_floating_point()]
    plain = [one[0].cpu().to(torch.uint8) if one[0].dtype == torch.bool else one[0].cpu() for one in others]
    for one, value in zip(others, plain if store is None else store.from_rank_0(plain), strict=True):
        for buffer in one:
            buffer.copy_(value)


def _mean_over_devices(members: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
    """All members in one array of host memory; halves are added in float32."""
    import torch

    flats = [torch.cat([one.reshape(-1).cpu() for one in of_device]) for of_device in zip(*members, strict=True)]
    if len(flats) == 1:
        return flats[0]
    wide = torch.stack(flats).to(torch.promote_types(flats[0].dtype, torch.float32))
    return wide.mean(0).to(flats[0].dtype)


def _scatter(flat: Any, members: Sequence[Sequence[torch.Tensor]]) -> None:
    parts = flat.split([one[0].numel() for one in members])
    for one, part in zip(members, parts, strict=True):
        for buffer in one:
            buffer.copy_(part.view(buffer.shape))
