"""The interface of an operation."""

from __future__ import annotations

import abc
from typing import Any

from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.signature import Signature


class Operation(abc.ABC):
    """Something that all ranks of a group do together."""

    signature: Signature
    cuda_device: int | None = None
    """Where its tensors are, if that is a CUDA device and is known."""

    @abc.abstractmethod
    def begin(self, channel: Channel) -> list[Work]:
        """On the group's thread: begin it. What must be known first, such as sizes, may be waited for here."""

    @abc.abstractmethod
    def finish(self) -> Any:
        """On the group's thread, once all that was begun is done: the result."""
