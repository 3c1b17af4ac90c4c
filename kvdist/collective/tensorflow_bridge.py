"""TensorFlow's values through collective operations: at once in eager execution, as an op within a graph.

Ops of a graph run in any order that its edges allow, but ranks must agree on one. So what belongs together is one op,
such as all gradients of a step, and within a tf.function each of these ops waits for the one before it. In a graph of
`tf.compat.v1`, where a run asks for some ops only, the program determines the order.

Values leave TensorFlow as NumPy arrays: one copy each way, and on GPUs a trip to the host. An op keeps the engine that
was current when it was made, whichever thread runs it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from kvdist import collective
from kvdist.collective import Average, ProcessSet, global_process_set
from kvdist.collective.engine import current, using
from kvdist.collective.functions import broadcast_each
from kvdist.collective.gradients import ReduceOptions
from kvdist.errors import CollectiveError

Work = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def call(work: Work, tensors: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[Any]:
    """Apply a function of torch tensors to copies of TensorFlow's tensors.

    Args:
        work: gets one torch tensor for each tensor; it may change them.
        tensors: of TensorFlow, eager or of the graph that is being built.
        dtypes: of the results; None for those of the tensors.

    Raises:
        CollectiveError: the operation fails, in eager execution. A graph raises an error of TensorFlow with the same
            text.
    """
    # A graph outlives the engine, and must not keep its connections.
    engine_of_graph = weakref.ref(current())
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)

    def run(*arrays: Any) -> list[Any]:
        engine = engine_of_graph()
        if engine is None:
            raise CollectiveError("this graph was built before shutdown(); build it again")
        with using(engine):
            return [to_numpy(result) for result in work([to_torch(array) for array in arrays])]

    if tf.executing_eagerly():
        results = run(*[tensor.numpy() for tensor in tensors])
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
    # Stateful ops wait for each other within a function, also across branches and loops.
    return list(tf.numpy_function(run, tensors, dtypes, stateful=True))


def to_torch(array: Any) -> torch.Tensor:
    """Copy an array to a torch tensor; also bfloat16, which NumPy does not have."""
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Any:
    """An array that shares the tensor's memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


def same_shapes(results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Give the results of a graph the static shapes of other tensors."""
    for result, tensor in zip(results, tensors, strict=True):
        if not tf.executing_eagerly():
            result.set_shape(tensor.shape)
    return list(results)


# Gradients.


def averaged_gradients(gradients: Sequence[Any], variables: Sequence[Any], options: ReduceOptions) -> list[Any]:
    """Reduce gradients over the ranks, in one op; zeros are sent for a variable without a gradient.

    Args:
        gradients: tensors, `IndexedSlices` or None. The ranks' rows of `IndexedSlices` are gathered, and rows can
            repeat, unless the options say ``sparse_as_dense``.
        variables: the variables of the gradients, of TensorFlow or Keras.
        options: how they are reduced.
    """
    if options.ranks == 1 or not gradients:
        return list(gradients)
    given = [
        _dense(gradient, variables[i] if gradient is None else None, options.sparse_as_dense)
        for i, gradient in enumerate(gradients)
    ]
    is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in given]
    dense = [gradient for gradient, sparse in zip(given, is_sparse, strict=True) if not sparse]
    rows = [gradient for gradient, sparse in zip(given, is_sparse, strict=True) if sparse]
    flat = [*dense, *(part for gradient in rows for part in (gradient.values, gradient.indices))]

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*options.reduce(tensors[: len(dense)]), *_gathered(tensors[len(dense) :], options)]

    results = call(work, flat)
    same_shapes(results[: len(dense)], dense)
    of_dense, of_rows = iter(results[: len(dense)]), iter(results[len(dense) :])
    found = []
    for gradient, sparse in zip(given, is_sparse, strict=True):
        if not sparse:
            found.append(next(of_dense))
            continue
        values, indices = next(of_rows), next(of_rows)
        values.set_shape([None, *gradient.values.shape[1:]])
        indices.set_shape([None])
        found.append(tf.IndexedSlices(values, indices, gradient.dense_shape))
    return found


def _dense(gradient: Any, variable: Any, sparse_as_dense: bool) -> Any:
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    if isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense:
        return gradient
    return tf.convert_to_tensor(gradient)


def _gathered(parts: list[torch.Tensor], options: ReduceOptions) -> list[torch.Tensor]:
    """Gather alternating values and indices from all ranks; values are divided for an average."""
    if not parts:
        return []
    gathered = collective.grouped_allgather(parts, f"rows of {options.name}", options.process_set)
    if options.op is Average:
        for values in gathered[::2]:
            values /= options.ranks
    return gathered


# Variables.


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Replace variables by those of one rank; in a graph of `tf.compat.v1`, return the op that does it."""
    variables = [variable_of(variable) for variable in variables]
    # Names in a session's graph are the same on all ranks; elsewhere each rank numbers them by itself.
    names = [variable.name if is_deferred() else f"variable {i}" for i, variable in enumerate(variables)]

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return broadcast_each(zip(names, tensors, strict=True), root_rank, process_set)

    if not variables:
        return tf.group() if is_deferred() else None
    values = [variable.read_value() for variable in variables]
    results = same_shapes(call(work, values), values)
    assignments = [variable.assign(result) for variable, result in zip(variables, results, strict=True)]
    return tf.group(*assignments) if is_deferred() else None


def is_deferred() -> bool:
    """Whether ops wait for a session to run them; ops within a function run with it."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def variable_of(variable: Any) -> Any:
    """The TensorFlow variable behind one of Keras, or the variable itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value
