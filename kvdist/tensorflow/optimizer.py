"""Averaged gradients for TensorFlow's three ways to train: tapes, Keras' optimizers, those of `tf.compat.v1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.gradients import Distributed, ReduceOptions, put_before
from kvdist.collective.reduction import NoneCompressor
from kvdist.collective.tensorflow_bridge import averaged_gradients
from kvdist.keras.optimizer import DistributedOptimizer as OfKeras


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001
    *,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make an optimizer average its gradients over the ranks; return the same object.

    Args:
        optimizer: of Keras 3, or of `tf.compat.v1.train`, whose `compute_gradients` then gives averages.
        name, use_locking: accepted for compatibility; the name is used in messages.
        device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
        gradient_predivide_factor, average_aggregated_gradients, process_set: see `kvdist.keras.DistributedOptimizer`.
            Optimizers of `tf.compat.v1` have one backward pass per step.

    Raises:
        TypeError: it is neither.
        ValueError: it is wrapped already, or the arguments contradict each other.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step != 1:
            raise ValueError(
                "an optimizer of tf.compat.v1 has one backward pass per step; use one of Keras for more, or add the"
                " gradients up in the graph"
            )
        called = name or optimizer.get_name()
        options = ReduceOptions(
            called, ReduceOp(op), compression, gradient_predivide_factor, process_set, sparse_as_dense
        )
        return _become(optimizer, AveragedOptimizer, options)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(
            f"DistributedOptimizer takes an optimizer of Keras 3 or of tf.compat.v1.train, not a"
            f" {type(optimizer).__name__}"
        )
    return OfKeras(
        optimizer,
        name,
        device_dense=device_dense,
        device_sparse=device_sparse,
        compression=compression,
        sparse_as_dense=sparse_as_dense,
        gradient_predivide_factor=gradient_predivide_factor,
        op=op,
        backward_passes_per_step=backward_passes_per_step,
        average_aggregated_gradients=average_aggregated_gradients,
        process_set=process_set,
    )


class AveragedOptimizer(Distributed):
    """The first base of optimizers of `tf.compat.v1`."""

    kvdist_options: ReduceOptions

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Gradients and variables as the optimizer's own method gives them, the gradients averaged over the ranks."""
        own: Callable[..., Any] = super().compute_gradients  # type: ignore[misc]
        pairs = own(*args, **kwargs)
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        averaged = averaged_gradients(gradients, variables, self.kvdist_options)
        return list(zip(averaged, variables, strict=True))


class AveragedTape(Distributed):
    """The first base of tapes."""

    kvdist_options: ReduceOptions

    def gradient(self, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """The gradients as the tape's own method gives them, averaged over the ranks."""
        own: Callable[..., Any] = super().gradient  # type: ignore[misc]
        gradients = own(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients)
        averaged = averaged_gradients(flat, tf.nest.flatten(sources), self.kvdist_options)
        return tf.nest.pack_sequence_as(gradients, averaged)


def _become(instance: Any, front: type, options: ReduceOptions) -> Any:
    options.require_linear()
    put_before(instance, front)
    instance.kvdist_options = options
    return instance


def DistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Make a tape's `gradient` return averages over the ranks; return the same object.

    A source without a gradient takes part with zeros.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse: accepted for compatibility, without effect.
        compression, sparse_as_dense, op, gradient_predivide_factor, process_set: see `DistributedOptimizer`.

    Raises:
        ValueError: it is wrapped already, or the arguments contradict each other.
    """
    options = ReduceOptions("tape", ReduceOp(op), compression, gradient_predivide_factor, process_set, sparse_as_dense)
    return _become(gradtape, AveragedTape, options)
