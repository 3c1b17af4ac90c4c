"""Keras' optimizers that average gradients over the ranks before they use them.

A distributed optimizer is the same object; its class becomes a subclass with the same name, so its state and its saved
form stay those of the original class. The gradients are reduced in `apply`, which every loop of Keras calls.

With a `LossScaleOptimizer` the gradients of that outermost optimizer are reduced: its test for finite gradients then
sees the same gradients on all ranks, and all of them skip a step or none.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras

from kvdist.collective import Adasum, Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.gradients import Distributed, ReduceOptions, put_before
from kvdist.collective.reduction import NoneCompressor
from kvdist.keras.values import averaged, value_of

Groups = int | Sequence[Sequence[Any]] | None


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    num_groups: int = 0,
    groups: Groups = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    process_set: ProcessSet = global_process_set,
    scale_local_gradients: bool = True,
) -> Any:
    """Let a Keras optimizer average its gradients over the ranks. Returns the same object.

    On the torch backend a variable without a gradient takes part with zeros; on TensorFlow its gradient stays None,
    which must be so on all ranks. Ranks outside the process set use their local gradients. The optimizer gets a method
    `register_local_var(variable)`: gradients of such a variable are not averaged.

    Args:
        optimizer: a Keras optimizer, built or not. Its learning rate is not scaled by the number of ranks.
        name: name of the operation in messages, equal on all ranks; None for the class name of the optimizer.
        device_dense, device_sparse: accepted for Horovod, without effect.
        compression: `Compression.none` or `Compression.fp16`.
        sparse_as_dense: send `IndexedSlices` of TensorFlow as dense tensors instead of gathering their rows.
        gradient_predivide_factor: as in `ReduceOptions.predivide_factor`.
        op: Average, Sum or Adasum; Adasum combines the weight changes of each rank's step instead of the gradients.
        num_groups, groups: checked, but without effect: all gradients of a step travel together.
        backward_passes_per_step: number of calls of `apply` whose gradients are added up before they are reduced and
            used once; `iterations` counts all calls.
        average_aggregated_gradients: divide the accumulated gradients by the number of calls.
        process_set: ranks that take part.
        scale_local_gradients: divide gradients of local variables by the number of ranks.

    Raises:
        TypeError: `optimizer` is not a Keras 3 optimizer.
        ValueError: it is already distributed, or arguments contradict each other.
    """
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise TypeError(f"DistributedOptimizer takes an optimizer of Keras 3, not a {type(optimizer).__name__}")
    if backward_passes_per_step > 1 and optimizer.gradient_accumulation_steps:
        raise ValueError(
            "the optimizer has gradient_accumulation_steps, and backward_passes_per_step would add up a second time:"
            " use one of them"
        )
    check_groups(num_groups, groups)
    # Not the optimizer's own name, which each rank numbers by itself.
    called = name or f"gradients of {type(optimizer).__name__}"
    options = ReduceOptions(
        called,
        ReduceOp(op),
        compression,
        gradient_predivide_factor,
        process_set,
        sparse_as_dense,
        backward_passes_per_step,
        scales_local=scale_local_gradients,
    )
    return distribute(optimizer, Distribution(options.for_gradients(), average_aggregated_gradients))


def PartialDistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[NoneCompressor] = Compression.none,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: ReduceOp = Average,
    groups: Groups = None,
    process_set: ProcessSet = global_process_set,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """`DistributedOptimizer` that does not average the gradients of some layers.

    Args:
        local_layers: a built Keras layer, or a list of layers.
        optimizer, name, device_dense, device_sparse, compression, sparse_as_dense, gradient_predivide_factor, op,
            groups, process_set, scale_local_gradients: as in `DistributedOptimizer`.

    Raises:
        ValueError: an entry of `local_layers` is not a layer.
    """
    local = variables_of(local_layers)
    made = DistributedOptimizer(
        optimizer,
        name,
        device_dense,
        device_sparse,
        compression,
        sparse_as_dense,
        gradient_predivide_factor,
        op,
        groups=groups,
        process_set=process_set,
        scale_local_gradients=scale_local_gradients,
    )
    for variable in local:
        made.register_local_var(variable)
    return made


def variables_of(local_layers: Any) -> list[Any]:
    """The trainable variables of a layer, of a list of layers, or of None.

    Raises:
        ValueError: an entry is not a layer, or has not been built.
    """
    layers = [local_layers] if isinstance(local_layers, keras.layers.Layer) else list(local_layers or ())
    for layer in layers:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(f"local_layers takes layers of Keras, not a {type(layer).__name__}: {layer!r}")
        if not layer.built:
            raise ValueError(f"the local layer {layer.name!r} has no variables yet; build the model first")
    return [variable for layer in layers for variable in layer.trainable_weights]


def check_groups(num_groups: int, groups: Any) -> None:
    """Check Horovod's two arguments for groups of gradients.

    Raises:
        ValueError: they are neither a number of groups nor lists of variables.
    """
    if num_groups:
        warnings.warn("num_groups is Horovod's older word for groups", DeprecationWarning, stacklevel=3)
    chosen = num_groups or None if groups is None else groups
    if chosen is not None and not isinstance(chosen, list) and not (isinstance(chosen, int) and chosen > 0):
        raise ValueError(f"groups is {chosen!r}; it must be a positive number, or a list of lists of variables")


class Distributing(Distributed):
    """First base of the class of a distributed optimizer, in front of the optimizer's class."""

    kvdist_distribution: Distribution

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Apply the average of the ranks' gradients."""
        own: Callable[..., None] = super().apply  # type: ignore[misc]
        self.kvdist_distribution.apply(self, list(grads), trainable_variables, own)

    def register_local_var(self, var: Any) -> None:
        """Keep the gradients of a variable local to each rank."""
        self.kvdist_distribution.keep_local(var)


def distribute(optimizer: Any, distribution: Distribution) -> Any:
    """Route `apply` of this object through a distribution."""
    own = type(optimizer)
    public = getattr(keras.optimizers, own.__name__, None)
    is_public = isinstance(public, type) and issubclass(own, public)
    # Saved files name this module, which has the optimizer's own class.
    put_before(optimizer, Distributing, "keras.optimizers" if is_public else "")
    optimizer.kvdist_distribution = distribution
    return optimizer


def release(optimizer: Any) -> Distribution:
    """Undo `distribute`."""
    distribution: Distribution = optimizer.kvdist_distribution
    optimizer.__class__ = type(optimizer).__bases__[1]
    del optimizer.kvdist_distribution
    return distribution


def with_outermost_distributed(optimizer: Any) -> Any:
    """Move the distribution to the outermost optimizer, and return that.

    `Model.compile` wraps the optimizer of a model in half precision in a `LossScaleOptimizer`, which would otherwise
    check only the gradients of its rank.
    """
    scales_loss = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    if scales_loss and not isinstance(optimizer, Distributing) and isinstance(optimizer.inner_optimizer, Distributing):
        return distribute(optimizer, release(optimizer.inner_optimizer))
    return optimizer


class Distribution:
    """Handles the gradients of an optimizer: accumulates them over passes and reduces them over the ranks.

    Args:
        options: how they are reduced over the ranks.
        divides: whether accumulated gradients are divided by the number of passes.
    """

    def __init__(self, options: ReduceOptions, divides: bool) -> None:
        self._options = options
        self._divides = divides
        # Not the optimizer's variables: they are never saved, and restored weights begin a new sum.
        self._count: Any = None
        self._sums: list[Any] = []
        self._summed: set[int] = set()
        """Positions of the variables that have had a gradient."""

    def apply(
        self, optimizer: Any, grads: list[Any], variables: Sequence[Any] | None, own: Callable[..., None]
    ) -> None:
        """Call the optimizer's undistributed `apply` (`own`) with the reduced gradients."""
        if self._options.passes == 1:
            self._step(grads, variables, own)
            return
        if variables is None:
            raise ValueError("with backward_passes_per_step over 1, pass the variables to apply() too")
        if not optimizer.built:
            optimizer.build(list(variables))  # outside the branches below, where a graph can have no new variables
        self._add(grads, list(variables))

        def step() -> None:
            factor = 1.0 / self._options.passes if self._divides else 1.0
            sums = [total.value * factor if i in self._summed else None for i, total in enumerate(self._sums)]
            self._step(sums, variables, own)
            for total in self._sums:
                total.assign(keras.ops.zeros_like(total))
            self._count.assign(0)

        keras.ops.cond(
            keras.ops.equal(self._count, self._options.passes), step, lambda: _do(optimizer.iterations.assign_add(1))
        )

    def keep_local(self, variable: Any) -> None:
        """Keep the gradients of a variable local to each rank."""
        value = value_of(variable)
        self._options.local[id(value)] = value

    def _step(self, grads: list[Any], variables: Sequence[Any] | None, own: Callable[..., None]) -> None:
        if not self._options.has_others:
            own(grads, variables)
        elif self._options.op is not Adasum:
            own(averaged(grads, variables, self._options), variables)
        elif variables is None:
            raise ValueError("with Adasum, pass the variables to apply() too")
        else:
            self._step_by_adasum(grads, variables, own)

    def _step_by_adasum(self, grads: list[Any], variables: Sequence[Any], own: Callable[..., None]) -> None:
        """Combine the changes of the ranks' local steps: rules with a state do not commute with Adasum."""
        shared = [variable for variable in variables if id(value_of(variable)) not in self._options.local]
        before = [keras.ops.copy(value_of(variable)) for variable in shared]
        own(grads, variables)
        changes = [value_of(variable) - start for variable, start in zip(shared, before, strict=True)]
        for variable, start, change in zip(shared, before, averaged(changes, shared, self._options), strict=True):
            variable.assign(start + change)

    def _add(self, grads: list[Any], variables: list[Any]) -> None:
        if self._count is None:
            self._count = keras.Variable(0, dtype="int32", trainable=False, name="passes")
            self._sums = [
                keras.Variable(
                    initializer="zeros", shape=variable.shape, dtype=variable.dtype, trainable=False, name="sum"
                )
                for variable in variables
            ]
        self._count.assign_add(1)
        for i, grad in enumerate(grads):
            if grad is not None:
                self._summed.add(i)
                self._sums[i].assign_add(keras.ops.convert_to_tensor(grad))


def _do(_: Any) -> None:
    """Return None, as both branches of a graph must."""


def load_model(
    filepath: Any,
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[NoneCompressor] = Compression.none,
    legacy_opts: bool = False,
) -> Any:
    """Load a model, and let its optimizer average gradients over the ranks.

    The file is the same whether the model was saved with a distributed optimizer or without. The optimizer state is
    loaded too.

    Args:
        filepath: file from `model.save`.
        custom_optimizers: list of optimizer classes that Keras does not know.
        custom_objects: dict of other classes and functions that Keras does not know, by name.
        compression: as in `DistributedOptimizer`.
        legacy_opts: must be False.

    Raises:
        ValueError: `legacy_opts` is True.
    """
    if legacy_opts:
        raise ValueError(
            "load_model(legacy_opts=True) is for optimizers of keras.optimizers.legacy, which Keras 3 does not have:"
            " leave it out, and save the model with an optimizer of Keras 3"
        )
    objects = {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    model = keras.saving.load_model(filepath, custom_objects={**objects, **(custom_objects or {})})
    if model.optimizer is not None:
        DistributedOptimizer(model.optimizer, compression=compression)
    return model
