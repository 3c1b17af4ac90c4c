"""The few verbs of torch.distributed that collective operations use, over process groups of kvdist.

Torch's default process group is never touched: frameworks behave differently when it exists (Keras wraps models in
DistributedDataParallel), and the user may have process groups. Several ranks may live in a process, as threads.

CPU tensors travel by gloo and CUDA tensors by NCCL, whose group is created at the first CUDA tensor, by all ranks at
the same operation. Sums of CPU tensors go through memory that the ranks of a host share, and by gloo only between
hosts. Only the thread of the group that owns the channel calls it, in the order of the operations; ranks match
operations by that order alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work  # type: ignore[attr-defined]

from kvdist.collective import shared_memory
from kvdist.collective.reduction import TORCH_OPS
from kvdist.errors import CollectiveError
from kvdist.reduce_op import Average, ReduceOp, Sum

GLOO_THREADS = 2
"""Operations of a group that gloo performs concurrently."""

LOOK_AGAIN_S = 0.005
"""Interval at which a connecting rank checks the store for a key of another rank."""
GIVE_UP_S = 10.0
"""Time that an abandoned connection may take to end."""
SLOW_PEER_S = 7 * 24 * 3600.0
"""Timeout of gloo, which notices a lost peer without it and must wait for a slow peer."""
NCCL_S = 60.0
"""Timeout of NCCL, which does not notice a lost peer."""


class ConnectingStore(Store):
    """A store whose waits for other ranks end when they are abandoned, in gloo's constructor too.

    A thread that waited in C++ could not be ended, and would abort the process as the interpreter ends.

    Args:
        name: prefix that separates its keys from other uses of the same store.
        store: the store that the ranks share.
        abandoned: set when this rank gives up.
    """

    def __init__(self, name: str, store: Store, abandoned: threading.Event) -> None:
        super().__init__()
        self._store = PrefixStore(name, store)
        self._abandoned = abandoned

    def set(self, key: str, value: str) -> None:
        """Publish a value to the other ranks."""
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Wait for a value of a rank."""
        self.wait([key])
        return self._store.get(key)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these keys exist; gloo's timeout is longer than any wait.

        Raises:
            CollectiveError: this rank has given up.
        """
        while not self._store.check(keys):
            if self._abandoned.wait(LOOK_AGAIN_S):
                raise CollectiveError("the connections to the other ranks were given up")


class Channel:
    """The connections of a group.

    Args:
        store: shared by exactly the ranks of the group.
        rank: rank of this process within the group.
        size: number of ranks of the group.
        address: address under which the other ranks reach this machine.
        shares_memory: whether this rank sums in memory that it shares with the other ranks of its host.
    """

    def __init__(self, store: Store, rank: int, size: int, address: str, shares_memory: bool = True) -> None:
        self.rank = rank
        self.size = size
        self._store = store
        self._address = address
        self._shares_memory = shares_memory
        self._abandoned = threading.Event()
        self._memory: shared_memory.SharedMemory | None = None
        # Any: torch's annotations do not have the verbs of its groups.
        self._gloo: Any = None
        self._nccl: Any = None

    def open(self) -> None:
        """Connect to the other ranks; blocks until all are connected, so none can leave while another connects.

        Raises:
            CollectiveError: `abandon` was called.
            RuntimeError: torch cannot connect.
        """
        self._gloo = self._connected("gloo", self.rank, self.size)
        if self.size > 1:
            host = shared_memory.host_of_this_process() if self._shares_memory else ""
            store = ConnectingStore("memory", self._store, self._abandoned)
            self._memory = shared_memory.connected(store, self.rank, self.size, host, self._sum_over_hosts)
            self._gloo.barrier().wait()  # last: who leaves may take the store along

    def abandon(self) -> None:
        """End the waits of `open` for other ranks. Safe from any thread."""
        self._abandoned.set()

    @property
    def waits_in_begin(self) -> bool:
        """Whether beginning an operation may block until the other ranks call it."""
        return self._memory is not None

    def all_reduce(self, tensors: Iterable[torch.Tensor], op: ReduceOp) -> list[Work]:
        """Begin to replace each of these contiguous tensors by the reduction of all ranks' tensors.

        Sums through shared memory are done when this returns: later operations may wait for others as they begin. Each
        tensor is begun as soon as `tensors` yields it, so the next may be prepared meanwhile.
        """
        memory = self._memory if op in (Sum, Average) else None
        if memory is None:
            return [self._of(tensor).allreduce(tensor, TORCH_OPS[op]) for tensor in tensors]
        works: list[Work] = []

        def shared() -> Iterator[torch.Tensor]:
            for tensor in tensors:
                if tensor.device.type == "cpu" and tensor.dtype in shared_memory.DTYPES:
                    yield tensor
                else:
                    works.append(self._of(tensor).allreduce(tensor, TORCH_OPS[op]))

        memory.sum(shared())
        return works

    def all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> Work:
        """Begin to write the ranks' equal-sized tensors one after another into `output`."""
        return self._of(tensor)._allgather_base(output, tensor)  # type: ignore[no-any-return]

    def broadcast(self, tensor: torch.Tensor, root: int) -> Work:
        """Begin to replace a tensor by the root's."""
        return self._of(tensor).broadcast(tensor, root)  # type: ignore[no-any-return]

    def all_to_all(
        self, output: torch.Tensor, tensor: torch.Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Work:
        """Begin to send each rank its rows of `tensor`; `received` and `sent` are the numbers of rows."""
        return self._of(tensor).alltoall_base(output, tensor, list(received), list(sent))  # type: ignore[no-any-return]

    def reduce_scatter(self, output: torch.Tensor, parts: list[torch.Tensor], op: ReduceOp) -> Work:
        """Begin to reduce the ranks' `parts`; this rank gets its part in `output`."""
        return self._of(output).reduce_scatter(output, parts, TORCH_OPS[op])  # type: ignore[no-any-return]

    def barrier(self) -> Work:
        """Begin to wait for all ranks of the group."""
        return self._gloo.barrier()  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Abort operations of NCCL and shared memory; gloo notices a lost peer itself. Safe from any thread."""
        if (memory := self._memory) is not None:
            memory.abort()
        if self._nccl is not None:
            self._nccl.abort()

    def close(self) -> None:
        """Release the process groups; no operation may be in progress."""
        memory, self._memory = self._memory, None
        if memory is not None:
            memory.close()
        self._gloo = None
        self._nccl = None

    def _connected(self, name: str, rank: int, size: int) -> Any:
        """A process group for CPU tensors."""
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=SLOW_PEER_S)
        options._devices = [ProcessGroupGloo.create_device(self._address)]
        options._threads = GLOO_THREADS
        return ProcessGroupGloo(ConnectingStore(name, self._store, self._abandoned), rank, size, options)

    def _sum_over_hosts(self, ranks: list[int]) -> Callable[[torch.Tensor], None]:
        """Connect the first ranks of the hosts, of which this is one; returns a function that sums a tensor over
        them."""
        group = self._connected("hosts", ranks.index(self.rank), len(ranks))
        return lambda tensor: group.allreduce(tensor, TORCH_OPS[Sum]).wait()

    def _of(self, tensor: torch.Tensor) -> Any:
        if tensor.device.type == "cpu":
            return self._gloo
        if tensor.device.type != "cuda":
            raise CollectiveError(f"tensors on {tensor.device} cannot be sent; move them to the CPU or a CUDA device")
        if self._nccl is None:
            self._nccl = self._on_gpus()
        return self._nccl

    def _on_gpus(self) -> Any:
        """Create the process group for CUDA tensors."""
        try:
            from torch.distributed import ProcessGroupNCCL
        except ImportError as error:
            raise CollectiveError("this build of torch has no NCCL, which CUDA tensors need") from error
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=NCCL_S)
        return ProcessGroupNCCL(PrefixStore("nccl", self._store), self.rank, self.size, options)


class ConnectingGroup:
    """A group whose ranks are still connecting.

    Gloo waits for the address of each rank, for ever if a rank has died. So a thread connects, and gives up when the
    control channel reports a loss by `fail`.

    Args:
        number: number of the group.
        ranks: its members.
    """

    is_open = False

    def __init__(self, number: int, ranks: Sequence[int]) -> None:
        self.number = number
        self.ranks = tuple(ranks)
        self._opened: Future[None] = Future()

    def fail(self, error_of: Callable[[str], BaseException], from_sequence: int = 0) -> None:
        """Give up, because a rank was lost or the job has failed."""
        with contextlib.suppress(InvalidStateError):
            self._opened.set_exception(error_of("the connections to the other ranks"))

    def stuck_at(self, since: float, one_left: bool) -> int | None:
        """None: no operation has been called yet."""

    def open(self, channel: Channel) -> None:
        """Connect a channel to the other ranks.

        Raises:
            CollectiveError: a rank was lost.
            RuntimeError: torch cannot connect.
        """
        thread = threading.Thread(target=self._run, args=(channel,), name="kvdist-opening", daemon=True)
        thread.start()
        try:
            self._opened.result()
        except BaseException:
            channel.abandon()
            # A rank that died after it had said its address keeps gloo for ever, where nothing wakes it any more.
            thread.join(GIVE_UP_S)
            raise

    def _run(self, channel: Channel) -> None:
        try:
            channel.open()
        except Exception as error:  # noqa: BLE001 (`open` raises it)
            with contextlib.suppress(InvalidStateError):
                self._opened.set_exception(error)
        else:
            try:
                self._opened.set_result(None)
            except InvalidStateError:  # nobody waits any more
                channel.close()
