"""The operations as functions that wait for their results, under Horovod's names and with its arguments.

Those that do not work in place differentiate: a result has a gradient where an input requires one, and the backward
pass calls operations too, so all ranks make it, over graphs of the same shape. What a gradient is follows Horovod:

=============  =============================================================================
allreduce      the same allreduce of the gradient
allgather      this rank's rows of the average of the ranks' gradients
broadcast      on the root the average of the ranks' gradients, zeros elsewhere
alltoall       what was received goes back to where it came from
reducescatter  all ranks' rows of the gradient, times the number of ranks for Sum
=============  =============================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvdist.collective import calls
from kvdist.collective.calls import ProcessSet, Tensors, global_process_set, group_of, synchronize
from kvdist.collective.compression import Compression, NoneCompressor
from kvdist.collective.reduction import Average, ReduceOp, Sum, op_of

Several = list[torch.Tensor]


class _Through(torch.autograd.Function):
    """A function of tensors, given with the function that takes the gradients of its results to those of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[[Several], Several], back: Callable[[Several], Several], *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.back = back
        return tuple(run(list(tensors)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return (None, None, *ctx.back(list(grads)))


def _through(
    tensors: Sequence[torch.Tensor], run: Callable[[Several], Several], back: Callable[[Several], Several]
) -> Several:
    requires = torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
    if not requires:
        return run(list(tensors))
    return list(_Through.apply(run, back, *tensors))  # type: ignore[no-untyped-call]


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

    def run(small: Several) -> Several:
        handle = calls.grouped_allreduce_async(small, average, name, op, prescale_factor, postscale_factor, process_set)
        return list(synchronize(handle))

    def back(grads: Several) -> Several:
        same = op_of(average, op)
        if same not in (Average, Sum):
            raise RuntimeError(f"allreduce with {same.name} has no gradient; give it tensor.detach()")
        plain = Compression.none
        return grouped_allreduce(grads, None, None, plain, same, prescale_factor, postscale_factor, process_set)

    pairs = [_compressed(tensor, compression) for tensor in tensors]
    results = _through([small for small, _ in pairs], run, back)
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
        result: torch.Tensor = synchronize(calls.sparse_allreduce_async(tensor, name, op_of(average, op), process_set))
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
    handle = calls.grouped_allreduce_async_(tensors, average, name, op, prescale_factor, postscale_factor, process_set)
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
    handle = calls.allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = synchronize(handle)
    return result


# Allgather.


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """The rows of each tensor from all ranks, in rank order; arguments and errors as in `allgather`."""

    def run(given: Several) -> Several:
        return list(synchronize(calls.grouped_allgather_async(given, name, process_set)))

    def back(grads: Several) -> Several:
        group = group_of(process_set)
        # The ranks gathered different numbers of rows, which only they know.
        rows = torch.tensor([[tensor.shape[0] for tensor in tensors]])
        of_ranks = synchronize(calls.allgather_async(rows, None, process_set))
        averages = grouped_allreduce(grads, op=Average, process_set=process_set)
        begins = of_ranks[: group.rank].sum(0).tolist()
        return [
            average[begin : begin + tensor.shape[0]]
            for average, begin, tensor in zip(averages, begins, tensors, strict=True)
        ]

    tensors = list(tensors)
    return _through(tensors, run, back)


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

    def run(given: Several) -> Several:
        return [synchronize(calls.broadcast_async(given[0], root_rank, name, process_set))]

    def back(grads: Several) -> Several:
        group = group_of(process_set)
        average = allreduce(grads[0], op=Average, process_set=process_set)
        return [average if group.ranks[group.rank] == root_rank else torch.zeros_like(average)]

    return _through([tensor], run, back)[0]


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Replace a tensor by that of one rank, and return it; arguments and errors as in `broadcast`."""
    result: torch.Tensor = synchronize(calls.broadcast_async_(tensor, root_rank, name, process_set))
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

    def run(given: Several) -> Several:
        rows, counts = synchronize(calls.submit(process_set, calls.exchange(given[0], splits, name)))
        received.append(counts)
        return [rows]

    def back(grads: Several) -> Several:
        returned, _ = alltoall(grads[0], received[0], None, process_set)
        kept = tensor.shape[0] - returned.shape[0]
        return [torch.cat([returned, returned.new_zeros((kept, *returned.shape[1:]))]) if kept else returned]

    rows = _through([tensor], run, back)[0]
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

    def run(small: Several) -> Several:
        return list(
            synchronize(
                calls.grouped_reducescatter_async(small, name, op, process_set, prescale_factor, postscale_factor)
            )
        )

    def back(grads: Several) -> Several:
        factor = prescale_factor * postscale_factor * (group_of(process_set).size if op is Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], None, process_set)

    pairs = [_compressed(tensor, compression) for tensor in tensors]
    results = _through([small for small, _ in pairs], run, back)
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
