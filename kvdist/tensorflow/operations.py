"""Horovod's operations on TensorFlow's tensors, with gradients: eager, in functions, in graphs of `tf.compat.v1`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import torch

from kvdist import collective
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, global_process_set
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

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def reduce(value: Any) -> Any:
        def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            result = collective.allreduce(
                tensors[0],
                name=name,
                compression=compression,
                op=chosen,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                process_set=process_set,
            )
            return [result]

        def gradient(upstream: Any) -> Any:
            return allreduce(
                upstream,
                op=chosen,
                prescale_factor=prescale_factor,
                postscale_factor=postscale_factor,
                name=_of_gradient(name),
                process_set=process_set,
            )

        return same_shapes(call(work, [value]), [value])[0], gradient

    return reduce(tf.convert_to_tensor(tensor))


def allgather(tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> Any:
    """Gather the rows of all ranks, in rank order; ranks may have different numbers of rows."""

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def gather(value: Any) -> Any:
        def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [collective.allgather(tensors[0], name, process_set)]

        def gradient(upstream: Any) -> Any:
            def own_rows(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
                return [_own_rows(tensors[0], int(tensors[1]), name, process_set)]

            rows = tf.shape(value)[0]
            return same_shapes(call(own_rows, [upstream, rows], [value.dtype]), [value])[0]

        (result,) = call(work, [value])
        result.set_shape([None, *value.shape[1:]])
        return result, gradient

    return gather(tf.convert_to_tensor(tensor))


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

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def send(value: Any) -> Any:
        def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            return [collective.broadcast_(tensors[0], root_rank, name, process_set)]

        def gradient(upstream: Any) -> Any:
            averaged = allreduce(upstream, op=Average, name=_of_gradient(name), process_set=process_set)
            return averaged if collective.rank() == root_rank else tf.zeros_like(averaged)

        return same_shapes(call(work, [value]), [value])[0], gradient

    return send(tf.convert_to_tensor(tensor))


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
