"""Horovod's operations on TensorFlow's tensors and variables: eager, in functions, in graphs of `tf.compat.v1`.

Operations on tensors have gradients. Variables get equal values at once, within a function, or by a hook of a
`MonitoredTrainingSession`. Accepted for compatibility, without effect: `device_dense` and `device_sparse`, where an op
is placed, and `ignore_name_scope`, because names are the program's alone.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from kvdist import collective
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, Sum, global_process_set, tensorflow_bridge
from kvdist.collective.api import group_of
from kvdist.collective.engine import current, using
from kvdist.collective.reduction import NoneCompressor
from kvdist.collective.tensorflow_bridge import (
    call,
    check_rows,
    gathered,
    joined_rows,
    named,
    of_given,
    of_gradient,
    operation,
    reduced,
)
from kvdist.reduce_op import op_of


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return a tensor reduced over the ranks; arguments and errors as in `grouped_allreduce`."""
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        name,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001
    name: str | None = None,
) -> list[Any]:
    """Return tensors reduced over the ranks as a unit, by default averaged.

    The rows of `IndexedSlices` are gathered from all ranks. Averages of integers are float64, as in TensorFlow's
    division.

    Args:
        tensors: list of tensors, variables or `IndexedSlices`, of any shapes and dtypes.
        average: Horovod's older spelling of `op`: True for Average, False for Sum.
        device_dense, device_sparse, ignore_name_scope: accepted for Horovod, without effect.
        compression: compression of the tensors for the network.
        op: reduction operator. Only Average and Sum have gradients and accept `IndexedSlices`.
        prescale_factor, postscale_factor: factors of each tensor before and after the reduction.
        process_set: ranks that take part.
        name: name of the operation in messages.

    Raises:
        NotImplementedError: `IndexedSlices` with a factor or another `op`.
        ValueError: both `average` and `op` are passed.
    """
    chosen = op_of(average, op)
    dense = [tensor for tensor in tensors if not isinstance(tensor, tf.IndexedSlices)]
    slices = [tensor for tensor in tensors if isinstance(tensor, tf.IndexedSlices)]
    if slices:
        check_rows(chosen)
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise NotImplementedError(
                "IndexedSlices are not scaled; convert them to a tensor, or leave the factors at 1.0"
            )
    results = iter(reduced(dense, name, chosen, compression, prescale_factor, postscale_factor, process_set))
    rows = iter(_summed_rows(slices, chosen, name, process_set))
    return [next(rows) if isinstance(tensor, tf.IndexedSlices) else next(results) for tensor in tensors]


def _summed_rows(slices: Sequence[Any], op: ReduceOp, name: str | None, process_set: ProcessSet) -> list[Any]:
    if not slices:
        return []
    parts = [tf.convert_to_tensor(part) for one in slices for part in (one.values, one.indices)]
    found = gathered(parts, name and f"rows of {name}", process_set)
    return joined_rows(slices, found, op, group_of(process_set).size)


def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Concatenate the rows of all ranks, in rank order; arguments as in `grouped_allgather`."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Concatenate the rows of each tensor over all ranks, as a unit, in rank order.

    Args:
        tensors: list of tensors with at least one dimension; ranks may have different numbers of rows.
        name: name of the operation in messages.
        ignore_name_scope: accepted for Horovod, without effect.
        process_set: ranks that take part.
    """
    return gathered(tensors, name, process_set)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the tensor of the root rank.

    Args:
        tensor: tensor of the same shape and dtype on all ranks.
        root_rank: global rank whose tensor is sent.
        name: name of the operation in messages.
        ignore_name_scope: accepted for Horovod, without effect.
        process_set: ranks that take part.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = named(name, "broadcast", [tensor])

    def work(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return [collective.broadcast_(values[0], root_rank, name, process_set)]

    def back(upstream: list[Any], _: list[Any]) -> list[Any]:
        averages = of_given(lambda given: reduced(given, of_gradient(name), Average, process_set=process_set), upstream)
        return averages if collective.rank() == root_rank else of_given(_zeros, averages)

    return operation([tensor], work, back, [tensor.shape])[0]


def _zeros(tensors: Sequence[Any]) -> list[Any]:
    # Not zeros_like: the other ranks wait for the average, so that it must be computed.
    return [tensor * 0 for tensor in tensors]


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send each rank its rows of a tensor, and return the rows for this rank, in rank order.

    Args:
        tensor: tensor with at least one dimension.
        splits: int32 tensor with the number of rows for each rank; None for equal parts. Rows beyond their sum are not
            sent.
        name: name of the operation in messages.
        ignore_name_scope: accepted for Horovod, without effect.
        process_set: ranks that take part.

    Returns:
        The received rows; with `splits` a pair of the rows and the number of rows from each rank, int32.
    """
    tensor = tf.convert_to_tensor(tensor)
    name = named(name, "alltoall", [tensor])
    given = [] if splits is None else [tf.convert_to_tensor(splits)]

    def work(values: list[torch.Tensor]) -> list[torch.Tensor]:
        sent = values[1] if given else _equal_parts(values[0], group_of(process_set).size)
        rows, counts = collective.alltoall(values[0], sent, name, process_set)
        return [rows, counts]

    def back(upstream: list[Any], results: list[Any]) -> list[Any]:
        if upstream[0] is None:
            return [None] * (1 + len(given))
        returned, _ = alltoall(upstream[0], results[1], of_gradient(name), ignore_name_scope, process_set)
        kept = tf.shape(tensor)[0] - tf.shape(returned)[0]
        return [tf.pad(returned, [[0, kept]] + [[0, 0]] * (tensor.shape.rank - 1))] + [None] * len(given)

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape, [group_of(process_set).size]]
    rows, counts = operation([tensor, *given], work, back, shapes, [tensor.dtype, tf.int32])
    return rows if splits is None else (rows, counts)


def _equal_parts(tensor: torch.Tensor, size: int) -> torch.Tensor | None:
    """Equal numbers of rows as splits, or None where there are none, which the operation refuses."""
    is_even = tensor.dim() > 0 and tensor.shape[0] % size == 0
    return torch.full([size], tensor.shape[0] // size, dtype=torch.int32, device="cpu") if is_even else None


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's part of the rows of the reduced tensor; arguments as in `grouped_reducescatter`."""
    return _scattered([tensor], device_dense, compression, op, process_set, prescale_factor, postscale_factor, name)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Return this rank's part of the rows of each reduced tensor, as a unit.

    If the number of rows is not divisible by the number of ranks, the first ranks get an additional row.

    Args:
        tensors: list of tensors with at least one dimension, of the same shapes and dtypes on all ranks.
        device_dense: accepted for Horovod, without effect.
        compression: compression of the tensors for the network.
        op: Average or Sum.
        process_set: ranks that take part.
        prescale_factor, postscale_factor: factors of each tensor before and after the reduction.
    """
    return _scattered(tensors, device_dense, compression, op, process_set, prescale_factor, postscale_factor, None)


def _scattered(
    tensors: Sequence[Any],
    device_dense: str,  # noqa: ARG001
    compression: type[NoneCompressor],
    op: ReduceOp,
    process_set: ProcessSet,
    prescale: float,
    postscale: float,
    name: str | None,
) -> list[Any]:
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    name = named(name, "reducescatter", tensors)

    def work(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return collective.grouped_reducescatter(values, name, compression, op, process_set, prescale, postscale)

    def back(upstream: list[Any], _: list[Any]) -> list[Any]:
        factor = prescale * postscale * (group_of(process_set).size if op == Sum else 1)
        given = [one if one is None or factor == 1.0 else one * tf.cast(factor, one.dtype) for one in upstream]
        return of_given(lambda grads: gathered(grads, of_gradient(name), process_set), given)

    shapes = [[None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape for tensor in tensors]
    return operation(tensors, work, back, shapes) if tensors else []


def join() -> Any:
    """Take part in the allreduces of the other ranks with zeros, until all ranks have called `join`.

    Returns:
        The last rank that called `join`, int32, equal on all ranks.
    """
    return call(lambda _: [torch.tensor(collective.join(), dtype=torch.int32, device="cpu")], [], [tf.int32])[0]


# Questions, answered when a graph is run.


def rank_op(name: str | None = None) -> Any:
    """Return the rank of this process, int32."""
    return _answer(collective.rank, name or "rank")


def local_rank_op(name: str | None = None) -> Any:
    """Return the rank of this process on its machine, int32."""
    return _answer(collective.local_rank, name or "local_rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set, int32.

    Raises:
        ValueError: the set is unknown; in a graph, a TensorFlow error with the same text.
    """
    return _answer(functools.partial(_size_of, process_set_id), name or "size")


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks on this machine, int32."""
    return _answer(collective.local_size, name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return whether this rank is a member of a process set, int32: 1 or 0; -1 before `init`, -3 for an unknown set."""
    return _answer(functools.partial(_is_included, process_set_id), name or "process_set_included")


def _size_of(number: int) -> int:
    sets = current().sets
    if number not in sets:
        raise ValueError(f"there is no process set {number}; add_process_set() returns one with its process_set_id")
    return len(sets[number])


def _is_included(number: int) -> int:
    if not collective.is_initialized():
        return _NOT_INITIALIZED
    members = current().sets.get(number)
    return _UNKNOWN_SET if members is None else int(collective.rank() in members)


_NOT_INITIALIZED, _UNKNOWN_SET = -1, -3
"""Horovod's numbers."""


def _answer(ask: Callable[[], int], name: str) -> Any:
    """The answer to a question, by the engine that is current now, or else when a graph is run."""
    made_in = weakref.ref(current()) if collective.is_initialized() else None

    def run() -> Any:
        engine = made_in() if made_in is not None else None
        with contextlib.nullcontext() if engine is None else using(engine):
            return np.int32(ask())

    if tf.executing_eagerly():
        return tf.constant(run())
    answer = tf.numpy_function(run, [], tf.int32, stateful=True, name=name)
    answer.set_shape([])
    return answer


# Objects.


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the object of the root rank, as `kvdist.collective.broadcast_object`; the session is ignored."""
    return collective.broadcast_object(obj, root_rank, name, process_set)


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function that takes an object and returns that of the root rank; the session is ignored."""
    return lambda obj: collective.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return the objects of all ranks, as `kvdist.collective.allgather_object`; the session is ignored."""
    return collective.allgather_object(obj, name, process_set)


# Variables.


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Replace variables by those of the root rank, and return their values; arguments as in `broadcast_variables`."""
    del name  # each variable has its own
    done = tensorflow_bridge.broadcast_variables(variables, root_rank, process_set)
    with tf.control_dependencies([] if done is None else [done]):
        return [tensorflow_bridge.variable_of(variable).read_value() for variable in variables]


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Replace variables by those of the root rank.

    Args:
        variables: list of TensorFlow or Keras variables, the same on all ranks in the same order.
        root_rank: global rank whose values are sent.
        process_set: ranks that take part.
        inplace: accepted for Horovod, without effect: variables always change in place.

    Returns:
        None, or in a graph the op.
    """
    del inplace
    return tensorflow_bridge.broadcast_variables(variables, root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """Return the op that copies all variables of the graph from the root rank to all ranks, in `tf.compat.v1`.

    Raises:
        RuntimeError: TensorFlow executes eagerly and has no list of all variables.
    """
    if tf.executing_eagerly():
        raise RuntimeError(
            "there is no list of all variables where TensorFlow executes eagerly: use broadcast_variables(variables of"
            " the model and of the optimizer, root_rank)"
        )
    return tensorflow_bridge.broadcast_variables(tf.compat.v1.global_variables(), root_rank)


class BroadcastGlobalVariablesHook(tf.compat.v1.train.SessionRunHook):
    """Session hook that copies the root rank's variables to all ranks after they are initialised or restored.

    Args:
        root_rank: global rank whose values are sent, usually 0, which restores a checkpoint.
        device: device of the op; '' lets TensorFlow choose.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._op: Any = None

    def begin(self) -> None:
        """Add the op to the graph before the graph is finalized."""
        if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device):
                self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run the op."""
        session.run(self._op)
