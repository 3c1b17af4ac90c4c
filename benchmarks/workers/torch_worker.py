"""One worker of torch's collectives over gloo at the common work: all-reduce by tensor, of one tensor, and DDP.

DDP has no call that only exchanges gradients: they travel while they are made. So its step includes a backward pass,
the smallest there is, which writes each gradient once.
"""

from __future__ import annotations

import argparse
import gc
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from workload import measure, parse_arguments


def main() -> None:
    options = parse_arguments()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["WORLD_SIZE"])))
    dist.init_process_group("gloo")
    if options.system == "ddp":
        run_ddp(options)
    elif options.system == "gloo-packed":
        run_packed(options)
    else:
        run_allreduce(options)
    gc.collect()  # a DDP that is still there when its group goes can abort the process
    dist.barrier()
    dist.destroy_process_group()


def run_allreduce(options: argparse.Namespace) -> None:
    sizes = options.spec.sizes if options.system == "gloo-tensors" else [sum(options.spec.sizes)]
    grads = [torch.empty(size) for size in sizes]

    def exchange() -> None:
        for work in [dist.all_reduce(grad, async_op=True) for grad in grads]:
            work.wait()

    finish(options, lambda: [grad.fill_(dist.get_rank() + 1) for grad in grads], exchange, lambda: grads)


def run_packed(options: argparse.Namespace) -> None:
    grads = [torch.empty(size) for size in options.spec.sizes]
    flat = torch.empty(sum(options.spec.sizes))
    parts = list(flat.split(options.spec.sizes))

    def exchange() -> None:
        torch._foreach_copy_(parts, grads)
        dist.all_reduce(flat)
        torch._foreach_copy_(grads, parts)

    finish(options, lambda: [grad.fill_(dist.get_rank() + 1) for grad in grads], exchange, lambda: grads)


def run_ddp(options: argparse.Namespace) -> None:
    model = DistributedDataParallel(Weights(options.spec.sizes))
    weights = list(model.module.parameters())
    # DDP averages, and the sum is what every system here must give.
    factor = (dist.get_rank() + 1) * dist.get_world_size()

    def exchange() -> None:
        (model() * factor).backward()

    finish(options, lambda: model.zero_grad(set_to_none=False), exchange, lambda: [one.grad for one in weights])


class Weights(torch.nn.Module):
    """Parameters of these sizes, and a number whose derivative by each of their elements is 1."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.zeros(size) for size in sizes)

    def forward(self) -> torch.Tensor:
        return torch.stack([Touch.apply(weight) for weight in self.weights]).sum()


class Touch(torch.autograd.Function):
    """Reads nothing on the way forward: only the gradients are to be of a size."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        ctx.size = weight.numel()
        return weight.new_zeros(())

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad.expand(ctx.size)


def finish(
    options: argparse.Namespace,
    prepare: Callable[[], object],
    exchange: Callable[[], None],
    tensors: Callable[[], list[torch.Tensor]],
) -> None:
    def results() -> list[object]:
        return [tensor.numpy() for tensor in tensors()]

    measure(options, dist.get_rank(), dist.get_world_size(), prepare, dist.barrier, exchange, results)


if __name__ == "__main__":
    main()
