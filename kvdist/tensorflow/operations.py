"""Horovod's operations on TensorFlow's tensors and variables: eager, in functions, in graphs of `tf.compat.v1`.

Operations on tensors have gradients. Variables get equal values at once, within a function, or by a hook of a
`MonitoredTrainingSession`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

from kvdist import collective
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, global_process_set, tensorflow_bridge
from kvdist.collective.gradients import ReduceOptions
from kvdist.collective.reduction import NoneCompressor, op_of
from kvdist.collective.tensorflow_bridge import averaged_gradients, call, same_shapes


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """A tensor reduced over the ranks, averaged unless `op` says otherwise.

    Of `IndexedSlices` the ranks' rows are gathered, for Average and Sum.

    Args:
        tensor: what is reduced.
        average: Horovod's older spelling of `op`: True for Average, False for Sum.
        device_dense, device_sparse: accepted for compatibility, without effect.
        compression: how it travels.
        op: how the ranks' tensors are combined.
        prescale_factor, postscale_factor: the tensor is multiplied before and after.
        name: in messages.
        process_set: the ranks that take part.
    """
    chosen = op_of(average, op)
    if isinstance(tensor, tf.IndexedSlices):
        if prescale_factor != 1.0 or postscale_factor != 1.0:
            raise ValueError("IndexedSlices are not scaled; convert them to a tensor, or leave the factors at 1.0")
        options = ReduceOptions(name or "indexed slices", chosen, compression, process_set=process_set)
        return averaged_gradients([tensor], [None], options.require_linear())[0]

    factors: dict[str, Any] = {"prescale_factor": prescale_factor, "postscale_factor": postscale_factor}

    def reduced(value: torch.Tensor) -> torch.Tensor:
        return collective.allreduce(
            value, name=name, compression=compression, op=chosen, process_set=process_set, **factors
        )

    def gradient(_: Any, upstream: Any) -> Any:
        return allreduce(upstream, op=chosen, name=_of_gradient(name), process_set=process_set, **factors)

    return _with_gradient(tensor, reduced, gradient)


def _with_gradient(
    tensor: Any,
    work: Callable[[torch.Tensor], torch.Tensor],
    gradient: Callable[[Any, Any], Any],
    any_rows: bool = False,
) -> Any:
    """Apply a function of a torch tensor.

    Args:
        tensor: of TensorFlow.
        work: the function.
        gradient: makes the gradient of the tensor from the tensor and the gradient of the result.
        any_rows: whether the result can have another number of rows than the tensor.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def apply(value: Any) -> Any:
        def of_list(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [work(tensors[0])]

        def back(upstream: Any) -> Any:
            return gradient(value, upstream)

        (result,) = call(of_list, [value])
        result.set_shape([None, *value.shape[1:]] if any_rows else value.shape)
        return result, back

    return apply(tf.convert_to_tensor(tensor))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Gather the rows of all ranks, in rank order; ranks may have different numbers of rows."""

    def gathered(value: torch.Tensor) -> torch.Tensor:
        return collective.allgather(value, name, process_set)

    def gradient(value: Any, upstream: Any) -> Any:
        def own_rows(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [_own_rows(tensors[0], int(tensors[1]), name, process_set)]

        return same_shapes(call(own_rows, [upstream, tf.shape(value)[0]], [value.dtype]), [value])[0]

    return _with_gradient(tensor, gathered, gradient, any_rows=True)


def _own_rows(upstream: torch.Tensor, rows: int, name: str | None, process_set: ProcessSet) -> torch.Tensor:
    """This rank's rows of the averaged gradient of gathered rows."""
    averaged = collective.allreduce(upstream, name=_of_gradient(name), op=Average, process_set=process_set)
    counts = collective.allgather(torch.tensor([rows]), process_set=process_set).tolist()
    before = sum(counts[: process_set.rank()])
    return averaged[before : before + rows]


def broadcast(
    tensor: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """One rank's tensor, on all ranks."""

    def sent(value: torch.Tensor) -> torch.Tensor:
        return collective.broadcast_(value, root_rank, name, process_set)

    def gradient(_: Any, upstream: Any) -> Any:
        averaged = allreduce(upstream, op=Average, name=_of_gradient(name), process_set=process_set)
        return averaged if collective.rank() == root_rank else tf.zeros_like(averaged)

    return _with_gradient(tensor, sent, gradient)


def grouped_allreduce(
    tensors: list[Any],
    op: ReduceOp = Average,
    compression: type[NoneCompressor] = Compression.none,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Tensors averaged or summed over the ranks, as one unit. Gradients do not pass through it."""
    options = ReduceOptions(name or "tensors", ReduceOp(op), compression, process_set=process_set)
    return averaged_gradients(tensors, tensors, options.require_linear())


def _of_gradient(name: str | None) -> str | None:
    return None if name is None else f"gradient of {name}"


# Variables.


def broadcast_variables(
    variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set, inplace: bool = False
) -> Any:
    """Replace variables by those of one rank.

    Args:
        variables: of TensorFlow or Keras, the same ones on all ranks in the same order.
        root_rank: the rank whose values they are.
        process_set: the ranks that take part.
        inplace: accepted for compatibility; it is always in place.

    Returns:
        None, or in a graph the op that does it.
    """
    del inplace
    return tensorflow_bridge.broadcast_variables(variables, root_rank, process_set)


def broadcast_global_variables(root_rank: int) -> Any:
    """The op that gives all ranks one rank's values of all variables of the graph, in `tf.compat.v1`.

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
    """Give all ranks one rank's variables once a session has initialised or restored them.

    Args:
        root_rank: whose values they are, usually 0, which restores a checkpoint.
        device: where the op is placed; '' leaves it to TensorFlow.
    """

    def __init__(self, root_rank: int, device: str = "") -> None:
        super().__init__()
        self._root_rank = root_rank
        self._device = device
        self._op: Any = None

    def begin(self) -> None:
        """Add the op to the graph, which is finished afterwards."""
        if self._op is None or self._op.graph is not tf.compat.v1.get_default_graph():
            with tf.device(self._device):
                self._op = broadcast_global_variables(self._root_rank)

    def after_create_session(self, session: Any, coord: Any) -> None:
        """Run it."""
        session.run(self._op)
