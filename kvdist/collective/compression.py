"""What is done to gradients before they travel, and undone afterwards: Horovod's two ways, and bfloat16."""

from __future__ import annotations

from typing import ClassVar

import torch


class NoneCompressor:
    """Leaves tensors as they are. Derive from it for a way of your own."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor, and what `decompress` wants to know."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004
        """The tensor."""
        return tensor


class CastCompressor(NoneCompressor):
    """Lets floating-point tensors travel in another type."""

    dtype: ClassVar[torch.dtype] = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """The tensor in that type, and the one it had."""
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """The tensor in the dtype it had."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(CastCompressor):
    """Lets floating-point tensors travel as float16: of 11 bits, up to 65504."""


class BF16Compressor(CastCompressor):
    """Lets floating-point tensors travel as bfloat16: of 8 bits, as far as float32 reaches."""

    dtype = torch.bfloat16


class Compression:
    """The ways by name, as in ``compression=hvd.Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
