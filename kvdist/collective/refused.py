"""What a rank puts in the place of an operation that it could not call, so that the others do not wait for it."""

from __future__ import annotations

from typing import Any

from torch.distributed import Work

from kvdist.collective.channel import Channel
from kvdist.collective.operation import Operation
from kvdist.collective.signature import REFUSED, Signature

TOLD_MAX = 1000
"""So many letters of the reason are told."""


class RefusedOperation(Operation):
    """Says to all ranks why this one did not call an operation.

    Args:
        error: why.
    """

    def __init__(self, error: BaseException) -> None:
        told = f"{type(error).__name__}: {error}"
        # What is longer than a message takes would have another digest on rank 0.
        self.signature = Signature(REFUSED, "", (), told if len(told) <= TOLD_MAX else f"{told[:TOLD_MAX]}...")

    def begin(self, channel: Channel) -> list[Work]:
        return []

    def finish(self) -> Any:
        return None
