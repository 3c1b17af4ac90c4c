"""What makes ranks start alike: parameters, the state of an optimizer; and what they report together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvdist.collective.blocking import allreduce
from kvdist.collective.calls import (
    ProcessSet,
    global_process_set,
    group_of,
    grouped_broadcast_async_,
    refuse,
    synchronize,
)
from kvdist.collective.objects import broadcast_object
from kvdist.collective.reduction import Average

Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]] | Iterable[torch.Tensor]


def broadcast_parameters(params: Parameters, root_rank: int = 0, process_set: ProcessSet = global_process_set) -> None:
    """Replace parameters by those of one rank.

    Args:
        params: ``model.state_dict()``, which is sent in the order of its names; ``model.named_parameters()``, or a list
            of tensors, in its own order. Entries that are None are skipped.
        root_rank: the rank whose parameters they are, by its number among all.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks have other parameters.
        TypeError: something is no tensor.
    """
    named = [(name, tensor) for name, tensor in _named(params) if tensor is not None]
    for name, tensor in named:
        if not isinstance(tensor, torch.Tensor):
            refuse(
                process_set,
                TypeError(
                    f"{name or 'a parameter'} is a {type(tensor).__name__}, and broadcast_parameters sends tensors;"
                    " send it with broadcast_object, and leave it out here"
                ),
            )
    for device in dict.fromkeys(tensor.device for _, tensor in named):
        here = [(name, tensor) for name, tensor in named if tensor.device == device]
        label = f"{here[0][0]} to {here[-1][0]}" if here[0][0] else "parameters"
        synchronize(grouped_broadcast_async_([tensor for _, tensor in here], root_rank, label, process_set))


def _named(params: Parameters) -> list[tuple[str, Any]]:
    if isinstance(params, Mapping):
        return sorted(params.items())
    return [pair if isinstance(pair, tuple) else ("", pair) for pair in params]


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> None:
    """Make the state and the options of an optimizer those of one rank.

    What is sent is the root's ``state_dict()``. No step is made for it, so no parameter moves and no counter advances
    on ranks that had no state yet; and an optimizer without state has its learning rate sent too.

    Args:
        optimizer: of the same class and parameters on all ranks.
        root_rank: the rank whose state it is, by its number among all.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed.
        TypeError: on the root, something in the state cannot be sent; the message says what, and where.
        ValueError: the root's optimizer has other parameter groups.
    """
    group = group_of(process_set)
    is_root = group.ranks[group.rank] == root_rank
    state = broadcast_object(optimizer.state_dict() if is_root else None, root_rank, "optimizer state", process_set)
    if not is_root:
        optimizer.load_state_dict(state)


def metric_average(
    value: float | torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> float:
    """The average of a number over the ranks: a loss, an accuracy.

    Args:
        value: this rank's, or a tensor of one element.
        name: for messages.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed.
    """
    mine = torch.tensor(float(value), dtype=torch.float64)
    return float(allreduce(mine, name=name, op=Average, process_set=process_set))
