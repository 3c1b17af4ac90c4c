"""Torch's equivalents of the reduction operators, and the compression of tensors for the network."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch.distributed import ReduceOp as TorchOp

from kvdist.reduce_op import Adasum, Average, Max, Min, Product, ReduceOp, Sum

TORCH_OPS = {Average: TorchOp.SUM, Sum: TorchOp.SUM, Min: TorchOp.MIN, Max: TorchOp.MAX, Product: TorchOp.PRODUCT}
"""Torch's operators. An average is a sum that is divided afterwards: gloo has no average of integers."""

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
REALS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)


def check_reducible(kind: str, dtype: torch.dtype, op: ReduceOp, is_scaled: bool) -> None:
    """Refuse a dtype that the operator cannot reduce.

    Raises:
        TypeError: it cannot; the message names dtypes or operators that can.
    """
    name = str(dtype).removeprefix("torch.")
    if op is Adasum and dtype not in REALS:
        raise TypeError(f"{kind} with Adasum is for floating-point tensors, not {name}")
    if dtype is torch.bool and (op is Average or is_scaled):
        raise TypeError(f"{kind} of bool tensors has no average and no scale; use Sum or Max for any, Min for all")
    if dtype in COMPLEX and op not in (Average, Sum):
        raise TypeError(f"{kind} of {name} tensors is for Average and Sum: complex numbers have no order")
    if dtype not in (*INTEGERS, *REALS, *COMPLEX, torch.bool):
        raise TypeError(f"{kind} of {name} tensors is not possible; convert them, to float32 or int64 say")


def scale_(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place; integers by a product in float64, cut toward zero. Torch multiplies halves in float32."""
    if factor == 1.0:
        return
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor))  # the conversion cuts, as Horovod's does


def settle_(tensor: torch.Tensor, op: ReduceOp, size: int, postscale: float) -> None:
    """Turn the reduction over `size` ranks into the result of `op`, times a factor, in place.

    At most one pass for floating-point tensors. An average of integers is cut toward zero.
    """
    if op is not Average or size == 1:
        scale_(tensor, postscale)
    elif not (tensor.is_floating_point() or tensor.is_complex()):
        if postscale == 1.0:
            # Not a product: 49 x (1/49) is less than 1.
            tensor.div_(size, rounding_mode="trunc")
        else:
            scale_(tensor, postscale / size)
    elif postscale == 1.0:
        tensor.div_(size)
    else:
        tensor.mul_(postscale / size)


class NoneCompressor:
    """Compression that leaves tensors unchanged. Derive from it for a custom compression."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor to send, and a context for `decompress`."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:  # noqa: ARG004
        """Return the received tensor."""
        return tensor


class CastCompressor(NoneCompressor):
    """Compression that sends floating-point tensors in another dtype."""

    dtype: ClassVar[torch.dtype] = torch.float16

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.dtype | None]:
        """Return the tensor in the dtype for the network, and its original dtype."""
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: torch.dtype | None) -> torch.Tensor:
        """Return the tensor in its original dtype."""
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(CastCompressor):
    """Compression of floating-point tensors to float16: 11 bits of precision, values up to 65504."""


class BF16Compressor(CastCompressor):
    """Compression of floating-point tensors to bfloat16: 8 bits of precision, the range of float32."""

    dtype = torch.bfloat16


class Compression:
    """Compressions by name, as in ``compression=hvd.Compression.fp16``."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
