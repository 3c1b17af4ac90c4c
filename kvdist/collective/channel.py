"""The few verbs of torch.distributed that are used here, over groups of our own.

Torch's default process group is never touched: frameworks change what they do when there is one (Keras wraps models in
DistributedDataParallel), and a process of ours may have groups of its user's beside it. Several ranks may live in one
process, as threads, each with its channel.

CPU tensors go by gloo and CUDA tensors by NCCL, whose group is made when the first CUDA tensor comes, on all ranks at
the same operation. Every call is made by the one thread of the group that owns the channel, in the order of the
operations; that order is all by which ranks match them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from kvdist.collective.reduction import TORCH_OPS, ReduceOp
from kvdist.errors import CollectiveError

GLOO_THREADS = 2
"""Operations of one group that gloo works on at the same time."""

SLOW_PEER_S = 7 * 24 * 3600.0
"""Gloo's own time-out. A peer that is gone is noticed otherwise, and for one that is slow one waits."""
NCCL_S = 60.0
"""That of NCCL, which does not notice a peer that is gone."""


class Channel:
    """A group of ranks that do operations together.

    Args:
        store: shared by the ranks of the group, and by nobody else.
        rank, size: this one's place in the group.
        address: of this machine, where the others reach it.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._address = address
        # Any: torch's annotations do not have the verbs of its groups.
        self._gloo: Any = None
        self._nccl: Any = None

    def open(self) -> None:
        """Connect to the others; blocks until all of them have, so that none can leave while another still connects."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=SLOW_PEER_S)
        options._devices = [ProcessGroupGloo.create_device(self._address)]
        options._threads = GLOO_THREADS
        self._gloo = ProcessGroupGloo(PrefixStore("gloo", self._store), self.rank, self.size, options)
        if self.size > 1:
            self._gloo.barrier().wait()

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> Work:
        """Begin to replace a contiguous tensor by what `op` makes of all ranks' ones."""
        return self._of(tensor).allreduce(tensor, TORCH_OPS[op])  # type: ignore[no-any-return]

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Begin to write the ranks' equal-sized tensors one after the other into `output`."""
        return self._of(tensor)._allgather_base(output, tensor)  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to replace a tensor by that of one rank of the group."""
        return self._of(tensor).broadcast(tensor, root)  # type: ignore[no-any-return]

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Begin to send each rank its rows of `tensor`; the numbers of rows are given."""
        return self._of(tensor).alltoall_base(output, tensor, list(received), list(sent))  # type: ignore[no-any-return]

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: ReduceOp) -> Work:
        """Begin to reduce the ranks' `parts`, of which this rank gets its own in `output`."""
        return self._of(output).reduce_scatter(output, parts, TORCH_OPS[op])  # type: ignore[no-any-return]

    def barrier(self) -> Work:
        """Begin to wait for all ranks of the group."""
        return self._gloo.barrier()  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Give up what is under way on GPUs, which would wait for a peer that is gone; from any thread.

        Gloo notices that itself.
        """
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Let go of the groups; nothing may be under way."""
        self._gloo = None
        self._nccl = None

    def _of(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._gloo
        if tensor.device.type != "cuda":
            raise CollectiveError(f"tensors on {tensor.device} cannot be sent; move them to the CPU or a CUDA device")
        if self._nccl is None:
            self._nccl = self._on_gpus()
        return self._nccl

    def _on_gpus(self) -> Any:
        """The group for CUDA tensors, made at the first of them."""
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise CollectiveError("this build of torch has no NCCL, which CUDA tensors need") from error
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_S)
        return ProcessGroupNCCL(PrefixStore("nccl", self._store), self.rank, self.size, options)
