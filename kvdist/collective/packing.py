"""Which tensors of an operation travel together, and the memory that they travel in.

Small tensors of one dtype are copied into flat buffers, so that a thousand of them cost a few operations; large ones
travel from where they are. Which is which follows from dtypes and sizes alone, never from how a tensor lies in memory:
all ranks must cut alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch._utils import _unflatten_dense_tensors

from kvdist.collective.reduction import scale_

ALONE_BYTES = 512 << 10
"""A tensor of so many bytes travels alone: copying it would cost more than another operation."""
FLAT_BYTES = 4 << 20
"""A flat buffer is full with so many bytes, so that one is packed while the one before is under way."""

WIDENED = {torch.int16: torch.int32}
"""Types that gloo and NCCL cannot reduce → those in which they do."""


def partition(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The positions of tensors that travel together, those without elements left out."""
    parts: list[list[int]] = []
    filling: dict[torch.dtype, tuple[list[int], int]] = {}
    for position, tensor in enumerate(tensors):
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes >= ALONE_BYTES:
            parts.append([position])
        elif nbytes:
            part, filled = filling.get(tensor.dtype, ([], FLAT_BYTES))
            if filled + nbytes > FLAT_BYTES:
                part, filled = [], 0
                parts.append(part)
            part.append(position)
            filling[tensor.dtype] = (part, filled + nbytes)
    return parts


def overlapping(tensors: Sequence[torch.Tensor]) -> frozenset[int]:
    """The positions of tensors that share memory with another one, such as one that is given twice."""
    spans = sorted((tensor.data_ptr(), _end(tensor), i) for i, tensor in enumerate(tensors) if tensor.numel())
    found: set[int] = set()
    furthest, owner = 0, -1
    for begin, end, i in spans:
        if begin < furthest:
            found |= {i, owner}
        if end > furthest:
            furthest, owner = end, i
    return frozenset(found)


def _end(tensor: torch.Tensor) -> int:
    """The address behind the last byte of a tensor."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr() + (last + 1) * tensor.element_size()


class Load:
    """Tensors that travel together.

    Args:
        outputs: where results go, all of one dtype and device.
        dtype: in which they travel; None for their own.
        is_apart: whether outputs must not be written to before everything is done.

    Attributes:
        buffer: what travels, contiguous: the only output itself where that is possible.
    """

    def __init__(
        self, outputs: Sequence[torch.Tensor], dtype: torch.dtype | None = None, *, is_apart: bool = False
    ) -> None:
        first = outputs[0]
        self._outputs = list(outputs)
        self._views: list[torch.Tensor] | None = None
        if len(outputs) == 1 and first.is_contiguous() and dtype in (None, first.dtype) and not is_apart:
            self.buffer = first
            return
        self.buffer = first.new_empty(sum(output.numel() for output in outputs), dtype=dtype)
        # One call of torch for all views: a thousand calls would take longer than what is sent.
        self._views = list(_unflatten_dense_tensors(self.buffer, self._outputs))  # type: ignore[no-untyped-call]

    @property
    def octets(self) -> torch.Tensor:
        """The buffer as bytes, for what is moved and not reckoned with: there are dtypes that gloo does not know."""
        return octets_of(self.buffer)

    def fill(self, tensors: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """Take tensors in, each multiplied by a factor; one pass, and one over what is in the cache for a factor."""
        if self._views is not None:
            torch._foreach_copy_(self._views, list(tensors))
        elif tensors[0] is not self.buffer:
            self.buffer.copy_(tensors[0])
        scale_(self.buffer, factor)

    def unpack(self) -> None:
        """Write to the outputs; one pass, or none where the buffer is the output."""
        if self._views is not None:
            torch._foreach_copy_(self._outputs, self._views)


def octets_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without a copy."""
    return tensor.view(-1).view(torch.uint8)
