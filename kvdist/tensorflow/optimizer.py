"""Averaged gradients for TensorFlow's three ways to train: tapes, Keras' optimizers, those of `tf.compat.v1`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from kvdist.collective import Adasum, Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.gradients import Distributed, ReduceOptions, put_before
from kvdist.collective.reduction import NoneCompressor
from kvdist.collective.tensorflow_bridge import averaged_gradients, call, variable_of
from kvdist.keras.optimizer import DistributedOptimizer as OfKeras
from kvdist.keras.optimizer import Groups, check_groups, variables_of


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    use_locking: bool = False,  # noqa: ARG001
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    backward_passes_per_step: int = 1,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make an optimizer average its gradients over the ranks; return the same object.

    Args:
        optimizer: of Keras 3, or of `tf.compat.v1.train`, whose `compute_gradients` then gives averages; with Adasum it
            gives this rank's gradients, and `apply_gradients` combines what the ranks' own steps change.
        name, use_locking: accepted for compatibility; the name is used in messages.
        device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
        gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set,
        scale_local_gradients: see `kvdist.keras.DistributedOptimizer`. Optimizers of `tf.compat.v1` have one backward
            pass per step.

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
        check_groups(num_groups, groups)
        options = ReduceOptions(
            name or optimizer.get_name(),
            ReduceOp(op),
            compression,
            gradient_predivide_factor,
            process_set,
            sparse_as_dense,
            scales_local=scale_local_gradients,
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
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        num_groups,
        groups,
        backward_passes_per_step,
        average_aggregated_gradients,
        process_set,
        scale_local_gradients,
    )


class AveragedOptimizer(Distributed):
    """The first base of optimizers of `tf.compat.v1`."""

    kvdist_options: ReduceOptions

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable each rank's own."""
        _keep_local(self.kvdist_options, var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Gradients and variables as the optimizer's own method gives them, the gradients averaged over the ranks."""
        own: Callable[..., Any] = super().compute_gradients  # type: ignore[misc]
        pairs: list[tuple[Any, Any]] = own(*args, **kwargs)
        if self.kvdist_options.op is Adasum:
            return pairs
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        averaged = averaged_gradients(gradients, variables, self.kvdist_options)
        return list(zip(averaged, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Use the gradients, with Adasum followed by the Adasum of what that changed."""
        own: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        pairs, options = list(grads_and_vars), self.kvdist_options
        if options.op is not Adasum or not options.has_others:
            return own(pairs, global_step, name)
        shared = [one for gradient, one in pairs if gradient is not None and id(variable_of(one)) not in options.local]
        # Copies by way of NumPy: what TensorFlow reads of a variable can share its memory.
        before = call(list, [one.read_value() for one in shared])
        with tf.control_dependencies(before):
            applied = own(pairs, global_step, name)
        with tf.control_dependencies([] if applied is None else [applied]):
            changes = [one.read_value() - start for one, start in zip(shared, before, strict=True)]
        combined = averaged_gradients(changes, shared, options)
        return tf.group(
            *(one.assign(start + change) for one, start, change in zip(shared, before, combined, strict=True))
        )


class AveragedTape(Distributed):
    """The first base of tapes."""

    kvdist_options: ReduceOptions

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a source each rank's own."""
        _keep_local(self.kvdist_options, source)

    def gradient(self, target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any) -> Any:
        """The gradients as the tape's own method gives them, averaged over the ranks."""
        del use_generic_names  # Horovod's, for names that are not used here
        own: Callable[..., Any] = super().gradient  # type: ignore[misc]
        gradients = own(target, sources, *args, **kwargs)
        flat = tf.nest.flatten(gradients)
        averaged = averaged_gradients(flat, tf.nest.flatten(sources), self.kvdist_options)
        return tf.nest.pack_sequence_as(gradients, averaged)

    def get_local_and_global_gradients(
        self, target: Any, sources: Any, *args: Any, **kwargs: Any
    ) -> tuple[list[tuple[Any, Any]], list[tuple[Any, Any]]]:
        """Return the pairs of source and gradient of local sources, and those of all others."""
        local: list[tuple[Any, Any]] = []
        shared: list[tuple[Any, Any]] = []
        for source, gradient in zip(sources, self.gradient(target, sources, *args, **kwargs), strict=True):
            pairs = local if id(variable_of(source)) in self.kvdist_options.local else shared
            pairs.append((source, gradient))
        return local, shared


def _keep_local(options: ReduceOptions, variable: Any) -> None:
    value = variable_of(variable)
    options.local[id(value)] = value


def _become(instance: Any, front: type, options: ReduceOptions) -> Any:
    options.for_gradients()
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
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Make a tape's `gradient` return averages over the ranks; return the same object.

    The gradient of a source that the target does not depend on stays None, on all ranks alike. The tape gets a method
    `register_local_source(source)`: gradients of such a source stay each rank's own.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse: accepted for compatibility, without effect.
        op: Average, Sum, or Adasum of the gradients.
        compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups, process_set,
        scale_local_gradients: see `kvdist.keras.DistributedOptimizer`.

    Raises:
        ValueError: it is wrapped already, or the arguments contradict each other.
    """
    check_groups(num_groups, groups)
    options = ReduceOptions(
        "tape",
        ReduceOp(op),
        compression,
        gradient_predivide_factor,
        process_set,
        sparse_as_dense,
        scales_local=scale_local_gradients,
    )
    return _become(gradtape, AveragedTape, options)


def PartialDistributedGradientTape(
    gradtape: Any,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    op: ReduceOp = Average,
    gradient_predivide_factor: float = 1.0,
    num_groups: int = 0,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedGradientTape`, with the gradients of some layers each rank's own.

    Args:
        local_layers: a built layer of Keras, or some.
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
        groups, process_set, scale_local_gradients: see `DistributedGradientTape`.

    Raises:
        ValueError: `local_layers` has something else than layers.
    """
    local = variables_of(local_layers)
    tape = DistributedGradientTape(
        gradtape,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        op,
        gradient_predivide_factor,
        num_groups,
        groups,
        process_set,
        scale_local_gradients,
    )
    for variable in local:
        tape.register_local_source(variable)
    return tape
