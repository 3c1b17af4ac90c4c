"""Buffers of a network: the running statistics of BatchNorm and the like, which no gradient trains."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvdist.kvstore.base import KVStore

if TYPE_CHECKING:
    import torch


def sync_buffers(net: torch.nn.Module, store: KVStore) -> None:
    """Make the buffers of a network the same on all workers, in place; every worker calls it.

    Buffers of floating types, such as a running mean, become the mean over the workers; integers and booleans, such as
    a count of batches, become rank 0's. Call it before an evaluation, or before saving the ``state_dict``. The keys and
    the optimizer of the store are not touched.

    Args:
        net: the network; on each worker with the same buffers.
        store: whose workers take part.

    Raises:
        InitMismatch: the workers' networks have different buffers.
        TypeError: the store is not a `KVStore`, or a buffer is of a type that none can hold.
    """
    import torch

    if not isinstance(store, KVStore):
        raise TypeError(f"sync_buffers needs a store of kvdist, such as kv.create('dist'), not {type(store).__name__}")
    buffers = [buffer.detach() for buffer in net.buffers()]
    floating = [buffer for buffer in buffers if buffer.is_floating_point()]
    for dtype in dict.fromkeys(buffer.dtype for buffer in floating):
        members = [buffer for buffer in floating if buffer.dtype == dtype]
        _scatter(store.average(torch.cat([member.reshape(-1).cpu() for member in members])), members)
    others = [buffer for buffer in buffers if not buffer.is_floating_point()]
    plain = [buffer.cpu().to(torch.uint8) if buffer.dtype == torch.bool else buffer.cpu() for buffer in others]
    for buffer, value in zip(others, store.from_rank_0(plain), strict=True):
        buffer.copy_(value)


def _scatter(flat: Any, members: Sequence[torch.Tensor]) -> None:
    parts = flat.split([member.numel() for member in members])
    for member, part in zip(members, parts, strict=True):
        member.copy_(part.view(member.shape))
