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

import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import wraps
from types import FunctionType
from typing import Any, NoReturn, ParamSpec, TypeVar, cast

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
from kvdist.collective.reduction import Compression, NoneCompressor
from kvdist.collective.signature import kind_of
from kvdist.protocol.collective import TEXT_BYTES_MAX
from kvdist.reduce_op import Adasum, Average, ReduceOp, Sum, op_of

Tensors = Sequence[torch.Tensor]
TensorList = list[torch.Tensor]
Args = ParamSpec("Args")
Result = TypeVar("Result")


class Handle:
    """Handle of an asynchronous operation; see `synchronize`."""

    def __init__(self, future: Future[Any], finish: Callable[[Any], Any]) -> None:
        self._future = future
        self._finish = finish
        self._finished: list[Any] = []

    @property
    def is_done(self) -> bool:
        """Whether the operation has ended, successfully or not."""
        return self._future.done()

    def result(self) -> Any:
        """Wait for the result of the operation. A second call returns the same object."""
        if not self._finished:
            self._finished.append(self._finish(self._future.result()))
        return self._finished[0]

    __call__ = result
    """Horovod's sparse handles are called."""


def poll(handle: Handle) -> bool:
    """Whether an operation has ended, so that `synchronize` returns or raises at once.

    Args:
        handle: result of an asynchronous function.
    """
    return handle.is_done


def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result.

    Args:
        handle: result of an asynchronous function. Do not touch the tensors of the operation before this call returns.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
    """
    return handle.result()


def submit(
    process_set: ProcessSet,
    kind: str,
    name: str | None,
    build: Callable[[Group], Operation],
    finish: Callable[[Any], Any] = lambda result: result,
) -> Handle:
    """Submit the operation that `build` makes for the group of a process set.

    If `build` raises, the other ranks' operation of this kind and name raises too.
    """
    engine, number = current(), process_set._number()
    group = engine.group(number)
    known = ""
    try:
        known = _checked_name(name or "")
        operation = build(group)
    except Exception as error:
        engine.refuse(error, number, kind, known)
        raise
    return Handle(engine.submit(operation, number), finish)


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"the name of an operation must be a str, not {type(name).__name__}: {name!r}")
    nbytes = len(name.encode("utf-8", "replace"))
    if nbytes > TEXT_BYTES_MAX:
        raise ValueError(
            f"the name of an operation has {nbytes} bytes, more than the {TEXT_BYTES_MAX} that a message holds:"
            f" {name[:60]!r}..."
        )
    return name


def refuse(process_set: ProcessSet, error: Exception, kind: str, name: str = "") -> NoReturn:
    """Raise an error, here and on the other ranks, in place of an operation that cannot be called here."""
    current().refuse(error, process_set._number(), kind, name)
    raise error


def group_of(process_set: ProcessSet) -> Group:
    """The group of a process set that this rank is a member of."""
    return current().group(process_set._number())


def _first(results: Any) -> Any:
    return results[0]


def _like(tensors: Tensors) -> TensorList:
    """New tensors for results that are not written in place."""
    return [
        torch.empty_like(tensor, memory_format=torch.contiguous_format) if isinstance(tensor, torch.Tensor) else tensor
        for tensor in tensors
    ]


class _Differentiable(torch.autograd.Function):
    """A function of tensors with a function that maps gradients of the results to gradients of the inputs."""

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
    tensors: Tensors, run: Callable[[TensorList], TensorList], back: Callable[[TensorList], TensorList]
) -> TensorList:
    requires = torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )
    if not requires:
        return run(list(tensors))
    return list(_Differentiable.apply(run, back, *tensors))  # type: ignore[no-untyped-call]


def _compressed(
    tensors: Tensors,
    compression: type[NoneCompressor],
    run: Callable[[TensorList], TensorList],
    back: Callable[[TensorList], TensorList],
) -> TensorList:
    """As `_differentiable`, over compressed tensors."""
    # The operation refuses what is not a tensor.
    pairs = [compression.compress(one) if isinstance(one, torch.Tensor) else (one, None) for one in tensors]
    results = _differentiable([small for small, _ in pairs], run, back)
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


# Allreduce.


@dataclass(slots=True)
class Call:
    """An operation with its arguments, which an asynchronous, an in-place and a blocking function begin each its way.

    Attributes:
        kind, name: of its signature.
        tensors: its inputs.
        build: makes the operation for a group and the tensors for the results.
        process_set: the ranks that take part.
        finish: makes the result from the operation's.
    """

    kind: str
    name: str | None
    tensors: TensorList
    build: Callable[[Group, TensorList], Operation]
    process_set: ProcessSet
    finish: Callable[[Any], Any] = list

    def begin(self) -> Handle:
        """Begin it with new tensors for the results."""
        return self._begin(lambda group: self.build(group, _like(self.tensors)))

    def begin_in_place(self) -> Handle:
        """Begin it with the inputs as outputs."""
        return self._begin(lambda group: self.build(group, self.tensors))

    def _begin(self, build: Callable[[Group], Operation]) -> Handle:
        return submit(self.process_set, kind_of(self.kind, len(self.tensors)), self.name, build, self.finish)


def arguments_of(make: Callable[Args, Call]) -> Callable[[Callable[[Call], Result]], Callable[Args, Result]]:
    """Turn a function of a call into one of the arguments from which `make` makes the call, with their signature.

    The reference on the site reads the source, so `docs/signatures.py` does the same there.
    """

    def decorate(function: Callable[[Call], Result]) -> Callable[Args, Result]:
        # A copy that has the user's name for it, because Python says that name of wrong arguments.
        own = cast("FunctionType", make)
        named = FunctionType(own.__code__, own.__globals__, function.__name__, own.__defaults__)
        named.__qualname__ = function.__qualname__

        @wraps(function)
        def begun(*args: Args.args, **kwargs: Args.kwargs) -> Result:
            call: Call = named(*args, **kwargs)
            return function(call)

        begun.__annotations__ = {**make.__annotations__, "return": function.__annotations__["return"]}
        signature = inspect.signature(make).replace(return_annotation=begun.__annotations__["return"])
        begun.__signature__ = signature  # type: ignore[attr-defined]
        return begun

    return decorate


def _grouped_allreduce(
    tensors: Tensors,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    def build(group: Group, outputs: TensorList) -> Operation:
        chosen = op_of(average, op)
        if chosen is not Adasum:
            return AllReduce(name or "", given, outputs, chosen, prescale_factor, postscale_factor)
        if group.number != ALL_RANKS:
            raise NotImplementedError("Adasum works on all ranks, not on a process set")
        return AdasumOperation(name or "", given, outputs, group.size, prescale_factor, postscale_factor)

    given = list(tensors)
    return Call("allreduce", name, given, build, process_set)


def _allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Call:
    call = _grouped_allreduce([tensor], average, name, op, prescale_factor, postscale_factor, process_set)
    call.finish = _first
    return call


@arguments_of(_grouped_allreduce)
def grouped_allreduce_async(call: Call) -> Handle:
    """Start to reduce tensors over the ranks, as a unit; the result is a list. See `grouped_allreduce`."""
    return call.begin()


@arguments_of(_grouped_allreduce)
def grouped_allreduce_async_(call: Call) -> Handle:
    """Start to replace tensors by their reductions over the ranks, as a unit. See `grouped_allreduce`."""
    return call.begin_in_place()


@arguments_of(_grouped_allreduce)
def grouped_allreduce_(call: Call) -> list[torch.Tensor]:
    """Replace tensors by their reductions over the ranks, and return them; arguments as in `grouped_allreduce`."""
    return call.begin_in_place().result()  # type: ignore[no-any-return]


@arguments_of(_allreduce)
def allreduce_async(call: Call) -> Handle:
    """Start to reduce a tensor over the ranks. See `allreduce`."""
    return call.begin()


@arguments_of(_allreduce)
def allreduce_async_(call: Call) -> Handle:
    """Start to replace a tensor by its reduction over the ranks. See `allreduce`."""
    return call.begin_in_place()


@arguments_of(_allreduce)
def allreduce_(call: Call) -> torch.Tensor:
    """Replace a tensor by its reduction over the ranks, and return it; arguments as in `grouped_allreduce`."""
    return call.begin_in_place().result()  # type: ignore[no-any-return]


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
    """Reduce tensors over the ranks, as a unit. Small tensors travel together.

    Args:
        tensors: list of tensors of any shapes and dtypes, on the same device; the same list on all ranks.
        average: Horovod's older spelling of `op`: True for Average, False for Sum.
        name: name of the operation in messages, unique among operations in progress.
        compression: compression of the tensors for the network, such as `Compression.fp16`.
        op: reduction operator; None for Average. Averages of integers are rounded toward zero.
        prescale_factor, postscale_factor: factors of each tensor before and after the reduction. Integers are
            multiplied in float64 and rounded toward zero.
        process_set: ranks that take part.

    Returns:
        A list of new tensors with the shapes and dtypes of `tensors`.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
        NotImplementedError: Adasum on a process set, or on a number of ranks that is not a power of two.
        TypeError: a value is not a dense tensor, or `op` cannot reduce its dtype.
        ValueError: both `average` and `op` are passed.
    """

    def run(given: TensorList) -> TensorList:
        call = _grouped_allreduce(given, average, name, op, prescale_factor, postscale_factor, process_set)
        return call.begin().result()  # type: ignore[no-any-return]

    def back(grads: TensorList) -> TensorList:
        same = op_of(average, op)
        if same not in (Average, Sum):
            raise RuntimeError(f"allreduce with {same.name} has no gradient; pass tensor.detach()")
        plain = Compression.none
        return grouped_allreduce(grads, None, None, plain, same, prescale_factor, postscale_factor, process_set)

    return _compressed(tensors, compression, run, back)


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
    """Reduce a tensor over the ranks; arguments and errors as in `grouped_allreduce`.

    Average and Sum also accept a sparse COO tensor, without compression and factors.
    """
    if isinstance(tensor, torch.Tensor) and tensor.layout == torch.sparse_coo:
        if compression is not Compression.none or prescale_factor != 1.0 or postscale_factor != 1.0:
            raise ValueError("allreduce of a sparse tensor has no compression and no factors; use to_dense()")
        result: torch.Tensor = synchronize(sparse_allreduce_async(tensor, name, op_of(average, op), process_set))
        return result
    results = grouped_allreduce(
        [tensor], average, name, compression, op, prescale_factor, postscale_factor, process_set
    )
    return results[0]


SPARSE_ALLREDUCE = "sparse allreduce"


def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to sum or average the sparse COO tensors of the ranks; only their entries are sent, no zeros.

    The result is a sparse tensor that repeats an index for each rank with an entry; ``coalesce()`` adds them up.

    Raises:
        TypeError: the tensor is not sparse.
        ValueError: `op` is neither Average nor Sum.
    """
    reduced = op_of(None, op)

    def build(_: Group) -> Operation:
        if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.sparse_coo:
            raise TypeError("sparse_allreduce_async takes sparse COO tensors; use allreduce_async for others")
        if reduced not in (Average, Sum):
            raise ValueError(f"sparse tensors are reduced by Average or Sum, not {reduced.name}")
        # Indices as rows: ranks have different numbers of them.
        parts = [tensor.detach()._indices().t().contiguous(), tensor.detach()._values()]
        return AllGather(name or "", parts, SPARSE_ALLREDUCE, f"{reduced.name} to {list(tensor.shape)}")

    def whole(results: Any) -> torch.Tensor:
        indices, values = results
        if reduced is Average:
            values = values / divisor if values.is_floating_point() else values.div(divisor, rounding_mode="trunc")
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, device=values.device, check_invariants=False)

    divisor = group_of(process_set).size
    return submit(process_set, kind_of(SPARSE_ALLREDUCE, 2), name, build, whole)


# Allgather.


def grouped_allgather_async(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather the rows of each tensor from all ranks, as a unit; the result is a list."""
    tensors = list(tensors)
    kind = kind_of("allgather", len(tensors))
    return submit(process_set, kind, name, lambda _: AllGather(name or "", tensors))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start to gather the rows of all ranks. See `allgather`."""
    return submit(process_set, "allgather", name, lambda _: AllGather(name or "", [tensor]), _first)


def grouped_allgather(
    tensors: Tensors, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[torch.Tensor]:
    """Gather the rows of each tensor from all ranks, in rank order; arguments and errors as in `allgather`."""
    tensors = list(tensors)

    def run(given: TensorList) -> TensorList:
        return list(synchronize(grouped_allgather_async(given, name, process_set)))

    def back(grads: TensorList) -> TensorList:
        # Only each rank knows its numbers of rows.
        rows = torch.tensor([[tensor.shape[0] for tensor in tensors]], device="cpu")
        of_ranks = synchronize(allgather_async(rows, None, process_set))
        averages = grouped_allreduce(grads, op=Average, process_set=process_set)
        begins = of_ranks[: group_of(process_set).rank].sum(0).tolist()
        return [
            average[begin : begin + tensor.shape[0]]
            for average, begin, tensor in zip(averages, begins, tensors, strict=True)
        ]

    return _differentiable(tensors, run, back)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Concatenate the rows of all ranks, in rank order; ranks may have different numbers of rows, including none.

    Args:
        tensor: tensor with at least one dimension; all sizes except the first must be equal on all ranks.
        name: name of the operation in messages, unique among operations in progress.
        process_set: ranks that take part.

    Returns:
        A new tensor, whose first size is the sum over the ranks.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
        TypeError: the value is not a dense tensor.
        ValueError: the tensor is a scalar.
    """
    return grouped_allgather([tensor], name, process_set)[0]


# Broadcast.


def _grouped_broadcast(
    tensors: Tensors, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    def build(group: Group, outputs: TensorList) -> Operation:
        return Broadcast(name or "", given, outputs, root_rank, root_in(group, root_rank))

    given = list(tensors)
    return Call("broadcast", name, given, build, process_set)


def _broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Call:
    call = _grouped_broadcast([tensor], root_rank, name, process_set)
    call.finish = _first
    return call


def root_in(group: Group, root_rank: int) -> int:
    """The rank within a group of a global rank.

    Raises:
        ValueError: it is not a member.
    """
    if root_rank not in group.ranks:
        raise ValueError(f"root_rank {root_rank} is not one of the ranks {list(group.ranks)} of the process set")
    return group.ranks.index(root_rank)


@arguments_of(_broadcast)
def broadcast_async(call: Call) -> Handle:
    """Start to fetch the tensor of the root, a global rank. See `broadcast`."""
    return call.begin()


@arguments_of(_broadcast)
def broadcast_async_(call: Call) -> Handle:
    """Start to replace a tensor by that of the root, a global rank. See `broadcast`."""
    return call.begin_in_place()


@arguments_of(_grouped_broadcast)
def grouped_broadcast_async_(call: Call) -> Handle:
    """Begin to replace tensors by those of the root, as one unit."""
    return call.begin_in_place()


@arguments_of(_broadcast)
def broadcast_(call: Call) -> torch.Tensor:
    """Replace a tensor by that of the root, and return it; arguments and errors as in `broadcast`."""
    return call.begin_in_place().result()  # type: ignore[no-any-return]


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return the tensor of the root rank.

    Args:
        tensor: tensor of the same shape and dtype on all ranks.
        root_rank: global rank whose tensor is sent, also within a process set.
        name: name of the operation in messages, unique among operations in progress.
        process_set: ranks that take part.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
        TypeError: the value is not a dense tensor.
        ValueError: the root is not in the process set.
    """

    def run(given: TensorList) -> TensorList:
        return [_broadcast(given[0], root_rank, name, process_set).begin().result()]

    def back(grads: TensorList) -> TensorList:
        group = group_of(process_set)
        average = allreduce(grads[0], op=Average, process_set=process_set)
        return [average if group.ranks[group.rank] == root_rank else torch.zeros_like(average)]

    return _differentiable([tensor], run, back)[0]


# Alltoall.


def _exchange(tensor: torch.Tensor, splits: torch.Tensor | None, name: str | None, process_set: ProcessSet) -> Handle:
    """Begin an alltoall; the result is the rows and their number from each rank."""
    return submit(process_set, "alltoall", name, lambda group: AllToAll(name or "", tensor, splits, group.size))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start to send each rank its rows of a tensor, and to receive the rows for this rank. See `alltoall`."""
    handle = _exchange(tensor, splits, name, process_set)
    return Handle(handle._future, _first) if splits is None else handle


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its rows of a tensor, and return the rows for this rank, in rank order.

    Args:
        tensor: tensor with at least one dimension; all sizes except the first must be equal on all ranks.
        splits: int32 tensor with the number of rows for each rank; None for equal parts. Rows beyond their sum are not
            sent.
        name: name of the operation in messages, unique among operations in progress.
        process_set: ranks that take part.

    Returns:
        The received rows; with `splits` a pair of the rows and the number of rows from each rank, int32.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
        TypeError: the value is not a dense tensor.
        ValueError: `splits` does not match the tensor or the ranks.
    """
    received: list[torch.Tensor] = []

    def run(given: TensorList) -> TensorList:
        rows, counts = synchronize(_exchange(given[0], splits, name, process_set))
        received.append(counts)
        return [rows]

    def back(grads: TensorList) -> TensorList:
        returned, _ = alltoall(grads[0], received[0], None, process_set)
        kept = tensor.shape[0] - returned.shape[0]
        return [torch.cat([returned, returned.new_zeros((kept, *returned.shape[1:]))]) if kept else returned]

    rows = _differentiable([tensor], run, back)[0]
    return rows if splits is None else (rows, received[0])


# Reducescatter.


def grouped_reducescatter_async(
    tensors: Tensors,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce tensors, as a unit, and to return to each rank its part of the rows; the result is a list."""
    tensors = list(tensors)
    return submit(
        process_set,
        kind_of("reducescatter", len(tensors)),
        name,
        lambda _: ReduceScatter(name or "", tensors, ReduceOp(op), prescale_factor, postscale_factor),
    )


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start to reduce a tensor and to return to each rank its part of the rows. See `reducescatter`."""
    handle = grouped_reducescatter_async([tensor], name, op, process_set, prescale_factor, postscale_factor)
    return Handle(handle._future, _first)


def grouped_reducescatter(
    tensors: Tensors,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Return this rank's part of the rows of each reduced tensor; arguments and errors as in `reducescatter`."""

    def run(given: TensorList) -> TensorList:
        handle = grouped_reducescatter_async(given, name, op, process_set, prescale_factor, postscale_factor)
        return list(synchronize(handle))

    def back(grads: TensorList) -> TensorList:
        factor = prescale_factor * postscale_factor * (group_of(process_set).size if op is Sum else 1)
        return grouped_allgather([grad * factor for grad in grads], None, process_set)

    return _compressed(tensors, compression, run, back)


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Reduce a tensor over the ranks, and return this rank's part of its rows.

    If the number of rows is not divisible by the number of ranks, the first ranks get an additional row.

    Args:
        tensor: tensor with at least one dimension, of the same shape and dtype on all ranks.
        name: name of the operation in messages, unique among operations in progress.
        compression: compression of the tensor for the network, such as `Compression.fp16`.
        op: Average or Sum.
        process_set: ranks that take part.
        prescale_factor, postscale_factor: factors of the tensor before and after the reduction.

    Raises:
        CollectiveError: the operation failed; `CollectiveMismatch` if ranks called different operations,
            `RankLostError` if a rank is lost.
        NotImplementedError: `op` is neither Average nor Sum.
        TypeError: the value is not a dense tensor, or its dtype cannot be reduced.
        ValueError: the tensor is a scalar.
    """
    return grouped_reducescatter([tensor], name, compression, op, process_set, prescale_factor, postscale_factor)[0]


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every rank has called `barrier`."""
    submit(process_set, "barrier", "", lambda _: BarrierOperation()).result()
