"""`join`: a rank that has no more data lets the others go on, and takes part in what they do with zeros."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.operation import Operation
from kvdist.collective.operations import AllReduce
from kvdist.collective.reduction import ReduceOp
from kvdist.collective.signature import JOIN_SIGNATURE
from kvdist.errors import CollectiveError
from kvdist.protocol.collective import Play

_TENSOR = re.compile(r"([a-z0-9]+)\[((?:[0-9]+(?:, [0-9]+)*)?)\]")
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


class Join(Operation):
    """The place of `join` among the operations of a rank; what it means is done by the group."""

    def __init__(self) -> None:
        self.signature = JOIN_SIGNATURE

    def begin(self, channel: Channel) -> list[Work]:
        return []

    def finish(self) -> Any:
        return None


def with_zeros(play: Play) -> AllReduce:
    """The part that a rank which has joined has in an operation of the others.

    Raises:
        CollectiveError: it cannot be made of what is known of it.
    """
    tensors = [_zeros(text, play.device) for text in play.tensors]
    return AllReduce(play.name, tensors, tensors, ReduceOp[play.detail.partition(",")[0]])


def _zeros(text: str, device: str) -> torch.Tensor:
    match = _TENSOR.fullmatch(text)
    if match is None or match[1] not in _DTYPES:
        raise CollectiveError(f"this rank has joined, and cannot make zeros for {text!r}")
    shape = [int(size) for size in match[2].split(", ")] if match[2] else []
    return torch.zeros(shape, dtype=_DTYPES[match[1]], device=device)
