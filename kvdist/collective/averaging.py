"""How gradients are averaged that a framework hands over all at once, as Keras and TensorFlow do.

They travel as one unit, so that the ranks agree about the whole list or none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kvdist.collective import (
    Average,
    Compression,
    ProcessSet,
    ReduceOp,
    Sum,
    global_process_set,
    grouped_allreduce,
)
from kvdist.collective.compression import NoneCompressor


@dataclass(frozen=True)
class Averaging:
    """What becomes of the gradients of the ranks.

    Attributes:
        name: of the operation, in messages and timelines.
        op: Average or Sum.
        compression: one of `Compression`, by which they travel.
        predivide_factor: f of an average for which gradients are divided by f before they are summed, and by size / f
            afterwards: half precision overflows later.
        process_set: the ranks that take part.
    """

    name: str = "gradients"
    op: ReduceOp = Average
    compression: type[NoneCompressor] = field(default=Compression.none)
    predivide_factor: float = 1.0
    process_set: ProcessSet = global_process_set

    def __post_init__(self) -> None:
        if self.op not in (Average, Sum):
            raise ValueError(f"op is {ReduceOp(self.op).name}; gradients are combined by Average or Sum")
        if self.predivide_factor != 1.0 and self.op is not Average:
            raise ValueError("gradient_predivide_factor belongs to op=Average; leave it at 1.0 with op=Sum")

    @property
    def ranks(self) -> int:
        """How many ranks take part."""
        return self.process_set.size()

    def of(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The ranks' gradients as one list, new tensors; all ranks give the same dtypes and shapes.

        Raises:
            CollectiveError: the ranks disagree, or one is gone.
        """
        if not gradients:
            return []
        return grouped_allreduce(
            [gradient.detach() for gradient in gradients],
            name=self.name,
            compression=self.compression,
            op=self.op,
            prescale_factor=1.0 / self.predivide_factor,
            postscale_factor=self.predivide_factor,
            process_set=self.process_set,
        )
