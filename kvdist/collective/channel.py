"""The few verbs of torch.distributed that collective operations use, over process groups of our own.

Torch's default process group is never touched: frameworks behave differently when there is one (Keras wraps models in
DistributedDataParallel), and the user may have groups of their own. Several ranks may live in one process, as threads.

CPU tensors travel by gloo and CUDA tensors by NCCL, whose group is made at the first CUDA tensor, by all ranks at the
same operation. Only the thread of the group that owns the channel calls it, in the order of the operations; ranks match
operations by that order alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
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


class ConnectingGroup:
    """A group that is not there yet, as far as it is told of the end of things.

    Args:
        number: that of the group.
        ranks: its members.
    """

    is_open = False

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self._opened: Future[None] = Future()

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """One of the ranks is gone, or everything is over."""
        with contextlib.suppress(InvalidStateError):
            self._opened.set_exception(error_of("the connections to the other ranks"))

    def open(self, channel: Channel) -> None:
        """Connect a channel to the other ranks.

        Raises:
            CollectiveError: one of them is gone.
            RuntimeError: torch could not.
        """
        threading.Thread(target=self._run, args=(channel,), name="kvdist-opening", daemon=True).start()
        self._opened.result()

    def _run(self, channel: Channel) -> None:
        try:
            channel.open()
        except Exception as error:  # noqa: BLE001 (whoever waits for it is told)
            with contextlib.suppress(InvalidStateError):
                self._opened.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                self._opened.set_result(None)
