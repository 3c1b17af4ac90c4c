"""Averaged gradients for TensorFlow's three ways to train: tapes, Keras' optimizers, those of `tf.compat.v1`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
import torch

from kvdist.collective import Adasum, Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.gradients import Distributed, ReduceOptions, put_before
from kvdist.collective.reduction import NoneCompressor
from kvdist.collective.tensorflow_bridge import averaged_gradients, call, divided, named, of_given, variable_of
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
    """Let an optimizer average its gradients over the ranks. Returns the same object.

    Args:
        optimizer: an optimizer of Keras 3, or of `tf.compat.v1.train`. The `compute_gradients` of the latter returns
            averages; with Adasum it returns local gradients, and `apply_gradients` combines the weight changes of the
            ranks.
        name, use_locking: accepted for Horovod; the name appears in messages.
        device_dense, device_sparse, compression, sparse_as_dense, backward_passes_per_step, op,
            gradient_predivide_factor, average_aggregated_gradients, num_groups, groups, process_set,
            scale_local_gradients: as in `kvdist.keras.DistributedOptimizer`. With several backward passes per step, an
            optimizer of `tf.compat.v1` accumulates gradients in `compute_gradients`, in variables of the collection
            LOCAL_VARIABLES, and `apply_gradients` changes variables in the last pass only; `global_step` counts all
            passes.

    Raises:
        TypeError: `optimizer` is neither of the two kinds.
        ValueError: it is already distributed, or arguments contradict each other.
    """
    if isinstance(optimizer, tf.compat.v1.train.Optimizer):
        if backward_passes_per_step != 1 and op == Adasum:
            raise ValueError(
                "with Adasum an optimizer of tf.compat.v1 has one backward pass per step; use one of Keras for more"
            )
        check_groups(num_groups, groups)
        options = ReduceOptions(
            name or optimizer.get_name(),
            ReduceOp(op),
            compression,
            gradient_predivide_factor,
            process_set,
            sparse_as_dense,
            backward_passes_per_step,
            scales_local=scale_local_gradients,
        )
        made = _become(optimizer, AveragedOptimizer, options)
        made.kvdist_passes = _Passes(options, average_aggregated_gradients)
        return made
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
    """First base of distributed optimizers of `tf.compat.v1`."""

    kvdist_options: ReduceOptions
    kvdist_passes: _Passes

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable local to each rank."""
        _keep_local(self.kvdist_options, var)

    def compute_gradients(self, *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Pairs of gradients and variables of the optimizer's original method, the gradients averaged over the ranks.

        With several backward passes per step, they are the sums of this rank's gradients until the last pass.
        """
        own: Callable[..., Any] = super().compute_gradients  # type: ignore[misc]
        pairs: list[tuple[Any, Any]] = own(*args, **kwargs)
        if self.kvdist_options.op is Adasum:
            return pairs
        gradients, variables = [gradient for gradient, _ in pairs], [variable for _, variable in pairs]
        if self.kvdist_options.passes > 1:
            averaged = self.kvdist_passes.averaged(gradients, [variable_of(one) for one in variables])
        else:
            averaged = averaged_gradients(gradients, variables, self.kvdist_options)
        return list(zip(averaged, variables, strict=True))

    def apply_gradients(self, grads_and_vars: Any, global_step: Any = None, name: str | None = None) -> Any:
        """Apply the gradients; with Adasum then combine the resulting changes over the ranks."""
        own: Callable[..., Any] = super().apply_gradients  # type: ignore[misc]
        pairs, options = list(grads_and_vars), self.kvdist_options
        if options.passes > 1:
            return self.kvdist_passes.applied(pairs, global_step, lambda: own(pairs, global_step, name))
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


class _Passes:
    """Gradients of the backward passes of a step, which add up in variables that are neither saved nor broadcast.

    Args:
        options: how the sums are reduced over the ranks.
        divides: whether they are divided by the number of passes.
    """

    def __init__(self, options: ReduceOptions, divides: bool) -> None:
        self._options = options
        self._divisor = options.passes if divides else 1
        self._count: Any = None
        self._sums: list[Any] = []
        self._summed: set[int] = set()
        """Positions of the variables that have had a gradient."""

    def averaged(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Add gradients up, and return the sums: in the last pass of a step those of all ranks, else this rank's."""
        if self._count is None:
            self._make_variables(variables)
        self._summed |= {i for i, gradient in enumerate(gradients) if gradient is not None}
        is_first = tf.equal(self._count.read_value(), 0)
        sums: list[Any] = [None] * len(gradients)
        for i in sorted(self._summed):
            total = self._sums[i].read_value()
            gradient = tf.zeros_like(total) if gradients[i] is None else tf.convert_to_tensor(gradients[i])
            sums[i] = tf.where(is_first, gradient, total + gradient)
        with tf.control_dependencies([self._sums[i].assign(sums[i], read_value=False) for i in sorted(self._summed)]):
            is_last = tf.equal(self._count.assign((self._count.read_value() + 1) % self._options.passes), 0)
        results = self._options.reduce_shared(
            sums, variables, lambda shared, _: self._reduced(shared, is_last), divided
        )
        return [None if one is None else divided(one, self._divisor) for one in results]

    def applied(self, pairs: Sequence[tuple[Any, Any]], global_step: Any, own: Callable[[], Any]) -> Any:
        """Call the optimizer's original `apply_gradients` in the last pass of a step; in the others count only."""

        def count() -> Any:
            return None if global_step is None else global_step.assign_add(1, read_value=False)

        with tf.control_dependencies([gradient for gradient, _ in pairs if gradient is not None]):
            is_last = tf.equal(self._count.read_value(), 0)
        return tf.group(tf.cond(is_last, lambda: _after(own()), lambda: _after(count())))

    def _make_variables(self, variables: Sequence[Any]) -> None:
        local = {"trainable": False, "use_resource": True, "collections": [tf.compat.v1.GraphKeys.LOCAL_VARIABLES]}
        with tf.init_scope():
            self._count = tf.compat.v1.Variable(0, name="kvdist_pass", **local)
            zeros = [tf.zeros(variable.shape, variable.dtype.base_dtype) for variable in variables]
            self._sums = [tf.compat.v1.Variable(one, name="kvdist_sum", **local) for one in zeros]

    def _reduced(self, sums: Sequence[Any], is_last: Any) -> list[Any]:
        given = [one for one in sums if one is not None]
        if not self._options.has_others or not given:
            return list(sums)
        name = named(self._options.name, "allreduce", given) or self._options.name
        options = dataclasses.replace(self._options, name=name)

        def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            # Not in a branch of the graph, where an operation that waits would keep one of the session's threads.
            *values, last = tensors
            return options.reduce(values) if last else values

        results = call(work, [*given, is_last], [one.dtype for one in given])
        for result, one in zip(results, given, strict=True):
            result.set_shape(one.shape)
        return of_given(lambda _: results, sums)


def _after(done: Any) -> Any:
    """A value for a branch of a graph, once an op is done."""
    with tf.control_dependencies([] if done is None else [done]):
        return tf.constant(0)


class AveragedTape(Distributed):
    """First base of distributed tapes."""

    kvdist_options: ReduceOptions

    def register_local_source(self, source: Any) -> None:
        """Keep the gradients of a source local to each rank."""
        _keep_local(self.kvdist_options, source)

    def gradient(self, target: Any, sources: Any, *args: Any, use_generic_names: bool = False, **kwargs: Any) -> Any:
        """The gradients of the tape's original method, averaged over the ranks."""
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
    """Let the `gradient` method of a tape return averages over the ranks. Returns the same object.

    The gradient of a source on which the target does not depend stays None, on all ranks alike. The tape gets a method
    `register_local_source(source)`: gradients of such a source are not averaged.

    Args:
        gradtape: a `tf.GradientTape`.
        device_dense, device_sparse: accepted for Horovod, without effect.
        op: Average, Sum, or Adasum of the gradients.
        compression, sparse_as_dense, gradient_predivide_factor, num_groups, groups, process_set, scale_local_gradients:
            as in `kvdist.keras.DistributedOptimizer`.

    Raises:
        TypeError: `gradtape` is not a tape.
        ValueError: it is already distributed, or arguments contradict each other.
    """
    if not isinstance(gradtape, tf.GradientTape):
        kind = type(gradtape)
        raise TypeError(f"DistributedGradientTape takes a tf.GradientTape, got {kind.__module__}.{kind.__qualname__}")
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
    """`DistributedGradientTape` that does not average the gradients of some layers.

    Args:
        local_layers: a built Keras layer, or a list of layers.
        gradtape, device_dense, device_sparse, compression, sparse_as_dense, op, gradient_predivide_factor, num_groups,
            groups, process_set, scale_local_gradients: as in `DistributedGradientTape`.

    Raises:
        ValueError: an entry of `local_layers` is not a layer.
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
