"""The compressions of `kvdist.collective` for tensors of TensorFlow too."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from kvdist.collective.reduction import BF16Compressor, CastCompressor, FP16Compressor, NoneCompressor


class _CastsBoth(CastCompressor):
    """Casts tensors of TensorFlow, and leaves those of torch to its other base."""

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """The tensor in another dtype, and its original dtype."""
        if not tf.is_tensor(tensor):
            return super().compress(tensor)
        dtype = tf.as_dtype(str(cls.dtype).removeprefix("torch."))
        return (tf.cast(tensor, dtype) if tensor.dtype.is_floating else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """The tensor in its original dtype."""
        return tf.cast(tensor, ctx) if tf.is_tensor(tensor) else CastCompressor.decompress(tensor, ctx)


class _FP16(_CastsBoth, FP16Compressor):
    """Sends floating-point tensors as float16."""


class _BF16(_CastsBoth, BF16Compressor):
    """Sends floating-point tensors as bfloat16."""


class Compression:
    """Compressions by name, as in ``compression=hvd.Compression.fp16``."""

    none = NoneCompressor
    fp16 = _FP16
    bf16 = _BF16
