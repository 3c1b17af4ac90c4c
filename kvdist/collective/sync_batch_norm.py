"""Batch normalisation over the batches of all ranks as if they were a single batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from kvdist.collective.api import ProcessSet, allreduce, global_process_set, group_of, refuse
from kvdist.reduce_op import Sum


class SyncBatchNorm(_BatchNorm):
    """Batch normalisation with the mean and variance of the batches of all ranks.

    It replaces ``BatchNorm1d`` to ``BatchNorm3d``, on CPU and GPU, and behaves like them in evaluation. Ranks may have
    batches of different sizes, including empty ones. All ranks must run it forward and backward in the same order.

    Args:
        num_features: number of channels, the size of dimension 1 of the input.
        eps, momentum, affine, track_running_stats: as in ``BatchNorm2d``.
        process_set: ranks that take part.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)
        self.process_set = process_set

    @classmethod
    def convert_sync_batchnorm(cls, module: nn.Module, process_set: ProcessSet = global_process_set) -> nn.Module:
        """Replace each batch normalisation layer of a model by this class, keeping parameters and statistics."""
        result = module
        if isinstance(module, _BatchNorm) and not isinstance(module, cls):
            result = cls(
                module.num_features,
                module.eps,
                module.momentum,
                module.affine,
                module.track_running_stats,
                process_set,
            )
            result.weight, result.bias = module.weight, module.bias
            result.running_mean, result.running_var = module.running_mean, module.running_var
            result.num_batches_tracked = module.num_batches_tracked
            result.training = module.training
        for name, child in module.named_children():
            result.add_module(name, cls.convert_sync_batchnorm(child, process_set))
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2 or input.shape[1] != self.num_features:
            raise ValueError(
                f"SyncBatchNorm of {self.num_features} channels takes inputs [batch, {self.num_features}, ...], not"
                f" {list(input.shape)}"
            )

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise the input by channel.

        Args:
            input: tensor of shape (examples, num_features, …).

        Raises:
            CollectiveError: a reduction failed.
            ValueError: the number of channels is wrong, or all ranks together have a single value per channel.
        """
        uses_batch = self.training or self.running_mean is None
        if not uses_batch or group_of(self.process_set).size == 1:
            return super().forward(input)
        try:
            self._check_input_dim(input)
        except ValueError as error:
            refuse(self.process_set, error, "allreduce")
        result, mean, variance, count = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, self.weight, self.bias, self.eps, self.process_set
        )
        if self.training and self.running_mean is not None:
            self._track(mean, variance, count)
        return result  # type: ignore[no-any-return]

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class _Normalise(torch.autograd.Function):
    """The function, with an allreduce of a few numbers for each channel, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        process_set: ProcessSet,
    ) -> tuple[torch.Tensor, ...]:
        wide = input if input.dtype is torch.float64 else input.float()
        # float64: the square of a mean is subtracted from a mean of squares.
        moments = allreduce(_moments(wide), op=Sum, process_set=process_set)
        count = moments[-1]
        if count <= 1:
            raise ValueError("SyncBatchNorm needs more than 1 value for each channel over all ranks")
        mean, square = moments[:-1].view(2, -1) / count
        variance = (square - mean * mean).clamp_(min=0.0)
        scale = (variance + eps).rsqrt()
        shape = _shape(input)
        normal = (wide - mean.to(wide.dtype).view(shape)) * scale.to(wide.dtype).view(shape)
        ctx.save_for_backward(normal, weight, scale, count)
        ctx.process_set = process_set
        ctx.mark_non_differentiable(mean, variance, count)
        result = normal if weight is None else normal * weight.to(wide.dtype).view(shape)
        result = result if bias is None else result + bias.to(wide.dtype).view(shape)
        return result.to(input.dtype, copy=True), mean, variance, count

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[torch.Tensor | None, ...]:
        normal, weight, scale, count = ctx.saved_tensors
        shape, dims = _shape(grad), _dims(grad)
        wide = grad.to(normal.dtype)
        grad_bias, grad_weight = wide.sum(dims), (wide * normal).sum(dims)
        mine = torch.cat([grad_bias, grad_weight]).double()
        sums = allreduce(mine, op=Sum, process_set=ctx.process_set) / count
        mean, along = sums.to(normal.dtype).view(2, -1)
        factor = scale.to(normal.dtype) if weight is None else scale.to(normal.dtype) * weight.to(normal.dtype)
        result = (wide - mean.view(shape) - normal * along.view(shape)) * factor.view(shape)
        if weight is None:
            return result.to(grad.dtype), None, None, None, None
        return result.to(grad.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype), None, None


def _dims(tensor: torch.Tensor) -> list[int]:
    """All dimensions except the channels."""
    return [0, *range(2, tensor.dim())]


def _shape(tensor: torch.Tensor) -> list[int]:
    """The shape in which numbers for each channel broadcast to a tensor."""
    return [1, -1] + [1] * (tensor.dim() - 2)


def _moments(tensor: torch.Tensor) -> torch.Tensor:
    """The sums of values and of squares for each channel, and the number of values, float64."""
    channels = tensor.shape[1]
    count = tensor.numel() // channels if channels else 0
    if not count:
        return tensor.new_zeros(2 * channels + 1, dtype=torch.float64)
    variance, mean = torch.var_mean(tensor, _dims(tensor), correction=0)
    mean, variance = mean.double(), variance.double()
    return torch.cat([mean * count, (variance + mean * mean) * count, mean.new_full((1,), count)])
