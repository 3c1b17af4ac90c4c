"""Horovod's operations as functions, asynchronous and blocking.

An asynchronous function returns a `Handle` at once, for `synchronize`. Until that returns, the operation's tensors must
not be changed or read. A name that ends with an underscore works in place. Blocking functions that do not work in place
are differentiable; their backward passes call operations too, so all ranks must run them over graphs of the same shape:

=============  ==========================================================================
allreduce      the same allreduce of the gradient
allgather      this rank's rows of the average of the ranks' gradients
broadcast      on the root the average of the ranks' gradients, zeros elsewhere
alltoall       received gradients return to the ranks that sent the rows
reducescatter  all ranks' rows of the gradient, times the number of ranks for Sum
=============  ==========================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn

import torch

from kvdist.collective.adasum import AdasumOperation
from kvdist.collective.engine import ALL_RANKS, current
from kvdist.collective.group import Group
from kvdist.collective.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    BarrierOperation,
    Broadcast,
    Operation,
    ReduceScatter,
)
from kvdist.collective.process_sets import ProcessSet as ProcessSet
from kvdist.collective.process_sets import global_process_set as global_process_set
from kvdist.collective.reduction import Adasum, Average, Compression, NoneCompressor, ReduceOp, Sum, op_of
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
        if group.number != ALL_RANKS:
            raise ValueError("Adasum works on all ranks, not on a process set")
        return AdasumOperation(name or "", tensors, outputs, group.size, prescale, postscale)

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
    submit(process_set, lambda _: BarrierOperation()).result()


TensorList = list[torch.Tensor]


class _Differentiable(torch.autograd.Function):
    """A function of tensors, given with the function that takes the gradients of its results to those of its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        run: Callable[[TensorList], TensorList],
        back: Callable[[TensorList], TensorList],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.back(list(grads)))


def _differentiable(
    tensors: Sequence[torch.Tensor], run: Callable[[TensorList], TensorList], back: Callable[[TensorList], TensorList]
) -> TensorList:
    requires = torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
    if not requires:
        return run(list(tensors))
    return list(_Differentiable.apply(run, back, *tensors))  # type: ignore[no-untyped-call]


# Allreduce.


def grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Tensors reduced over the ranks, as one unit.

    Args:
        tensors: of any shapes and dtypes, on one device; the same ones on all ranks. Small ones travel together.
        average: an older spelling of `op`: True for Average, False for Sum.
        name: for messages; no two operations of one name may be under way.
        compression: how they travel, `Compression.fp16` say.
        op: Average if nothing is said. Averages of integers are rounded down.
        prescale_factor, postscale_factor: each tensor is multiplied before and after; integers by a product in float64,
            rounded down.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
        TypeError: something is no dense tensor, or of a type that cannot be reduced so.
        ValueError: both `average` and `op` are given, or Adasum for ranks that are no power of two.
    """

    def run(small: TensorList) -> TensorList:
        handle = grouped_allreduce_async(small, average, name, op, prescale_factor, postscale_factor, process_set)
        return list(synchronize(handle))

    def back(grads: TensorList) -> TensorList:
        same = op_of(average, op)
        if same not in (Average, Sum):
            raise RuntimeError(f"allreduce with {same.name} has no gradient; give it tensor.detach()")
        contiguous_values = Compression.none
        return grouped_allreduce(
            grads, None, None, contiguous_values, same, prescale_factor, postscale_factor, process_set
        )

    pairs = [_compressed(tensor, compression) for tensor in tensors]
    results = _differentiable([small for small, _ in pairs], run, back)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def _compressed(tensor: torch.Tensor, compression: type[NoneCompressor]) -> tuple[torch.Tensor, Any]:
    # What is no tensor is refused by the operation, which says why.
    return compression.compress(tensor) if isinstance(tensor, torch.Tensor) else (tensor, None)


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """A tensor reduced over the ranks; arguments and errors as in `grouped_allreduce`.

    A sparse COO tensor may be given for Average and Sum, without compression and factors.
    """
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
        if compression is not Compression.none or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise ValueError("allreduce of a sparse tensor has no compression and no factors; use to_dense()")
        result: torch.Tensor = synchronize(sparse_allreduce_async(tensor, name, op_of(average, op), process_set))
        return result
    return grouped_allreduce([tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set)[
        0
    ]


def grouped_allreduce_(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Replace tensors by their reductions over the ranks, and return them; arguments as in `grouped_allreduce`."""
    handle = grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
    return list(synchronize(handle))


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Replace a tensor by its reduction over the ranks, and return it; arguments as in `grouped_allreduce`."""
    handle = allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


# Allgather.


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """The rows of each tensor from all ranks, in rank order; arguments and errors as in `allgather`."""

    def run(given: TensorList) -> TensorList:
        return list(synchronize(grouped_allgather_async(given, name, process_set)))

    def back(grads: TensorList) -> TensorList:
        group = group_of(process_set)
        # The ranks gathered different numbers of rows, which only they know.
        rows = torch.tensor([[tensor.shape[0] for tensor in tensors]])
        of_ranks = synchronize(allgather_async(rows, None, process_set))
        averages = grouped_allreduce(grads, op=Average, process_set=process_set)
        begins = of_ranks[: group.rank].sum(0).tolist()
        return [
            average[begin : begin + tensor.shape[0]]
            for average, begin, tensor in zip(averages, begins, tensors, strict=True)
        ]

    tensors = list(tensors)
    return _differentiable(tensors, run, back)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The rows of all ranks, in rank order; they may have different numbers of them, and no rows at all.

    Args:
        tensor: with one dimension at least; sizes but the first are the same on all ranks.
        name: for messages; no two operations of one name may be under way.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
        TypeError: something is no dense tensor.
        ValueError: it is a scalar.
    """
    return grouped_allgather([tensor], name, process_set)[0]


# Broadcast.


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of one rank.

    Args:
        tensor: of the same shape and dtype on all ranks.
        root_rank: the rank whose tensor it is, by its number among all also within a process set.
        name: for messages; no two operations of one name may be under way.
        process_set: the ranks that take part.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
        TypeError: it is no dense tensor.
        ValueError: the root is not in the process set.
    """

    def run(given: TensorList) -> TensorList:
        return [synchronize(broadcast_async(given[0], root_rank, name, process_set))]

    def back(grads: TensorList) -> TensorList:
        group = group_of(process_set)
        average = allreduce(grads[0], op=Average, process_set=process_set)
        return [average if group.ranks[group.rank] == root_rank else torch.zeros_like(average)]

    return _differentiable([tensor], run, back)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace a tensor by that of one rank, and return it; arguments and errors as in `broadcast`."""
    result: torch.Tensor = synchronize(broadcast_async_(tensor, root_rank, name, process_set))
    return result


# Alltoall.


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The rows that all ranks sent to this one, in rank order.

    Args:
        tensor: with one dimension at least; sizes but the first are the same on all ranks.
        splits: int32, how many rows go to each rank, in order; None for equally many. Rows beyond their sum stay here.
        name: for messages; no two operations of one name may be under way.
        process_set: the ranks that take part.

    Returns:
        The rows; with `splits` also how many came from each rank, int32.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
        TypeError: it is no dense tensor.
        ValueError: the splits do not fit the tensor or the ranks.
    """
    received: list[torch.Tensor] = []

    def run(given: TensorList) -> TensorList:
        rows, counts = synchronize(submit(process_set, exchange(given[0], splits, name)))
        received.append(counts)
        return [rows]

    def back(grads: TensorList) -> TensorList:
        returned, _ = alltoall(grads[0], received[0], None, process_set)
        kept = tensor.shape[0] - returned.shape[0]
        return [torch.cat([returned, returned.new_zeros((kept, *returned.shape[1:]))]) if kept else returned]

    rows = _differentiable([tensor], run, back)[0]
    return rows if splits is None else (rows, received[0])


# Reducescatter.


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """This rank's part of the rows of each reduced tensor; arguments and errors as in `reducescatter`."""

    def run(small: TensorList) -> TensorList:
        return list(
            synchronize(grouped_reducescatter_async(small, name, op, process_set, prescale_factor, postscale_factor))
        )

    def back(grads: TensorList) -> TensorList:
        factor = prescale_factor * postscale_factor * (group_of(process_set).size if op is Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], None, process_set)

    pairs = [_compressed(tensor, compression) for tensor in tensors]
    results = _differentiable([small for small, _ in pairs], run, back)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's part of the rows of the reduced tensor; the first ranks have one more where they do not divide.

    Args:
        tensor: with one dimension at least, of the same shape and dtype on all ranks.
        name: for messages; no two operations of one name may be under way.
        compression: how it travels.
        op: Average or Sum.
        process_set: the ranks that take part.
        prescale_factor, postscale_factor: it is multiplied before and after.

    Raises:
        CollectiveError: it failed; `CollectiveMismatch` where ranks disagree, `RankLostError` where one is gone.
        TypeError: it is no dense tensor, or of a type that cannot be reduced so.
        ValueError: it is a scalar, or `op` is another one.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]
