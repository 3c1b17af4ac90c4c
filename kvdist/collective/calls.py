"""The operations as asynchronous functions, under Horovod's names and with its arguments.

Each returns a handle at once, for `synchronize`. Until that has returned, the tensors of the operation must not be
changed or read. A name with an underscore at its end works in place. Nothing here is differentiable; the functions of
`kvdist.collective.blocking`, which wait, are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch

from kvdist.collective.adasum import AdasumReduce
from kvdist.collective.engine import EVERYBODY
from kvdist.collective.group import Group, Operation
from kvdist.collective.operations import AllGather, AllReduce, AllToAll, Barrier, Broadcast, ReduceScatter
from kvdist.collective.present import current
from kvdist.collective.process_sets import ProcessSet as ProcessSet
from kvdist.collective.process_sets import global_process_set as global_process_set
from kvdist.collective.reduction import Adasum, Average, ReduceOp, Sum, op_of
from kvdist.protocol.collective import TEXT_BYTES_MAX

Tensors = Sequence[torch.Tensor]


class Handle:
    """An operation that is under way; see `synchronize`."""

    def __init__(self, future: Future[Any], finish: Callable[[Any], Any]) -> None:
        self._future = future
        self._finish = finish
        self._finished: list[Any] = []

    @property
    def is_done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for it. A second call gives the same."""
        if not self._finished:
            self._finished.append(self._finish(self._future.result()))
        return self._finished[0]


def poll(handle: Handle) -> bool:
    """Whether an operation is over, so that `synchronize` returns, or raises, at once."""
    return handle.is_done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
    """
    return handle.result()


def submit(
    process_set: ProcessSet, build: Callable[[Group], Operation], finish: Callable[[Any], Any] = lambda result: result
) -> Handle:
    """Have the ranks of a process set do an operation together, which is built for their group.

    Where it cannot be built here, the other ranks are told, and what they have called in its place raises too.
    """
    engine, number = current(), process_set._number()
    group = engine.group(number)
    try:
        operation = build(group)
        _check_name(operation.signature.name)
    except Exception as error:
        engine.refuse(error, number)
        raise
    return Handle(engine.submit(operation, number), finish)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of an operation is a text, not {type(name).__name__}: {name!r}")
    nbytes = len(name.encode("utf-8", "replace"))
    if nbytes > TEXT_BYTES_MAX:
        raise ValueError(
            f"the name of an operation has {nbytes} bytes, and at most {TEXT_BYTES_MAX} are sent to the other ranks:"
            f" {name[:60]!r}..."
        )


def refuse(process_set: ProcessSet, error: Exception) -> NoReturn:
    """Raise, here and on the other ranks, in the place of an operation that cannot be called here."""
    current().refuse(error, process_set._number())
    raise error


def group_of(process_set: ProcessSet) -> Group:
    """The ranks of a process set, of which this rank is one."""
    return current().group(process_set._number())


def _first(results: Any) -> Any:
    return results[0]


def _like(tensors: Tensors) -> list[torch.Tensor]:
    """Somewhere for results that are not written in place."""
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if isinstance(tensor, torch.Tensor) else tensor
        for tensor in tensors
    ]


# Allreduce.


def _reduction(
    name: str | None,
    tensors: Tensors,
    outputs: Tensors,
    given: tuple[bool | None, ReduceOp | None],
    prescale: float,
    postscale: float,
) -> Callable[[Group], Operation]:
    def build(group: Group) -> Operation:
        op = op_of(*given)
        if op is not Adasum:
            return AllReduce(name or "", tensors, outputs, op, prescale, postscale)
        if group.number != EVERYBODY:
            raise ValueError("Adasum works on all ranks, not on a process set")
        return AdasumReduce(name or "", tensors, outputs, group.size, prescale, postscale)

    return build


def grouped_allreduce_async(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce tensors over the ranks, as one unit; the result is a list. See `grouped_allreduce`."""
    tensors = list(tensors)
    build = _reduction(name, tensors, _like(tensors), (average, op), prescale_factor, postscale_factor)
    return submit(process_set, build)


def grouped_allreduce_async_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to replace tensors by their reductions over the ranks, as one unit. See `grouped_allreduce`."""
    tensors = list(tensors)
    build = _reduction(name, tensors, tensors, (average, op), prescale_factor, postscale_factor)
    return submit(process_set, build)


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to reduce a tensor over the ranks. See `allreduce`."""
    build = _reduction(name, [tensor], _like([tensor]), (average, op), prescale_factor, postscale_factor)
    return submit(process_set, build, _first)


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to replace a tensor by its reduction over the ranks. See `allreduce`."""
    build = _reduction(name, [tensor], [tensor], (average, op), prescale_factor, postscale_factor)
    return submit(process_set, build, _first)


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to add up sparse COO tensors of the ranks, which send what they have and no zeros.

    The result is sparse and has an index as often as ranks had it; ``coalesce()`` adds them up.

    Raises:
        TypeError: the tensor is not sparse.
        ValueError: `op` is neither Average nor Sum.
    """
    reduced = op_of(None, op)

    def build(_: Group) -> Operation:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise TypeError("sparse_allreduce_async takes sparse COO tensors; for all others there is allreduce_async")
        if reduced not in (Average, Sum):
            raise ValueError(f"sparse tensors are reduced by Average or Sum, not {reduced.name}")
        # Indices as rows: ranks have different numbers of them.
        parts = [tensor.detach()._indices().t().contiguous(), tensor.detach()._values()]
        return AllGather(name or "", parts, "sparse allreduce", f"{reduced.name} to {list(tensor.shape)}")

    def whole(results: Any) -> torch.Tensor:
        indices, values = results
        if reduced is Average:
            values = values / divisor if values.is_floating_point() else values.div(divisor, rounding_mode="floor")
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    divisor = group_of(process_set).size
    return submit(process_set, build, whole)


# Allgather, broadcast, alltoall, reducescatter.


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to gather the rows of each tensor from all ranks, as one unit; the result is a list."""
    tensors = list(tensors)
    return submit(process_set, lambda _: AllGather(name or "", tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to gather the rows of all ranks. See `allgather`."""
    return submit(process_set, lambda _: AllGather(name or "", [tensor]), _first)


def _broadcast(name: str | None, tensors: Tensors, outputs: Tensors, root_rank: int) -> Callable[[Group], Operation]:
    return lambda group: Broadcast(name or "", tensors, outputs, root_rank, root_in(group, root_rank))


def root_in(group: Group, root_rank: int) -> int:
    """A rank's place in a group, given its number among all.

    Raises:
        ValueError: it is not in it.
    """
    if root_rank not in group.ranks:
        raise ValueError(f"root_rank is {root_rank}, which is none of the ranks {list(group.ranks)} of the process set")
    return group.ranks.index(root_rank)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to get the tensor of one rank, given by its number among all."""
    return submit(process_set, _broadcast(name, [tensor], _like([tensor]), root_rank), _first)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to replace a tensor by that of one rank, given by its number among all."""
    return submit(process_set, _broadcast(name, [tensor], [tensor], root_rank), _first)


def grouped_broadcast_async_(
    tensors: Tensors, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Begin to replace tensors by those of one rank, as one unit."""
    tensors = list(tensors)
    return submit(process_set, _broadcast(name, tensors, tensors, root_rank))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Begin to send each rank its rows of a tensor, and to get one's own from all. See `alltoall`."""
    build = exchange(tensor, splits, name)
    return submit(process_set, build, _first) if splits is None else submit(process_set, build)


def exchange(tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None) -> Callable[[Group], Operation]:
    """The operation of an alltoall, whose result is the rows and how many came from each rank."""
    return lambda group: AllToAll(name or "", tensor, splits, group.size)


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce tensors, as one unit, and to give each rank its part of the rows; the result is a list."""
    tensors = list(tensors)
    return submit(
        process_set, lambda _: ReduceScatter(name or "", tensors, ReduceOp(op), prescale_factor, postscale_factor)
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Begin to reduce a tensor and to give each rank its part of the rows. See `reducescatter`."""
    return submit(
        process_set,
        lambda _: ReduceScatter(name or "", [tensor], ReduceOp(op), prescale_factor, postscale_factor),
        _first,
    )


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called it."""
    submit(process_set, lambda _: Barrier()).result()
