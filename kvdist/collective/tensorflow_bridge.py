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
from kvdist.collective.basics import current, using
from kvdist.collective.gradients import ReduceOptions
from kvdist.errors import CollectiveError

Work = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]


def call(work: Work, tensors: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[Any]:
    """Have torch tensors made of TensorFlow's, as copies, do `work` with them, and give back what comes of it.

    Args:
        work: gets as many tensors; they are its own to change.
        tensors: of TensorFlow, eager or of the graph that is being built.
        dtypes: of the results; None for those of the tensors.

    Raises:
        CollectiveError: the operation fails, where TensorFlow executes eagerly. From within a graph it comes as an
            error of TensorFlow with the same text.
    """
    # A graph outlives the engine, whose connections are to go with it.
    engine_of_graph = weakref.ref(current())
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    dtypes = [tensor.dtype for tensor in tensors] if dtypes is None else list(dtypes)

    def run(*arrays: Any) -> list[Any]:
        engine = engine_of_graph()
        if engine is None:
            raise CollectiveError("the ranks for which this graph was built have been shut down; build it anew")
        with using(engine):
            return [to_numpy(result) for result in work([to_torch(array) for array in arrays])]

    if tf.executing_eagerly():
        results = run(*[tensor.numpy() for tensor in tensors])
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
    # Being stateful, these ops wait for each other within a function, and for branches and loops that have some.
    return list(tf.numpy_function(run, tensors, dtypes, stateful=True))


def to_torch(array: Any) -> torch.Tensor:
    """A tensor of its own; bfloat16, which NumPy does not have, too."""
    array = np.array(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def to_numpy(tensor: torch.Tensor) -> Any:
    """An array that shows the tensor's memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


def same_shapes(results: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Tell a graph that results are shaped like other tensors."""
    for result, tensor in zip(results, tensors, strict=True):
        if not tf.executing_eagerly():
            result.set_shape(tensor.shape)
    return list(results)


# Gradients.


def averaged_gradients(
    gradients: Sequence[Any], variables: Sequence[Any], averaging: ReduceOptions, sparse_as_dense: bool = False
) -> list[Any]:
    """The ranks' gradients as one list, in one op; of a variable without one, zeros travel.

    Args:
        gradients: tensors, `IndexedSlices` or None.
        variables: whose they are, of TensorFlow or Keras.
        averaging: what is done.
        sparse_as_dense: `IndexedSlices` become dense tensors; else the ranks' rows are gathered, and one row can be
            there several times.
    """
    if averaging.ranks == 1 or not gradients:
        return list(gradients)
    given = [
        _dense(gradient, variables[i] if gradient is None else None, sparse_as_dense)
        for i, gradient in enumerate(gradients)
    ]
    is_sparse = [isinstance(gradient, tf.IndexedSlices) for gradient in given]
    dense = [gradient for gradient, sparse in zip(given, is_sparse, strict=True) if not sparse]
    rows = [gradient for gradient, sparse in zip(given, is_sparse, strict=True) if sparse]
    flat = [*dense, *(part for gradient in rows for part in (gradient.values, gradient.indices))]

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*averaging.of(tensors[: len(dense)]), *_gathered(tensors[len(dense) :], averaging)]

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


def _gathered(parts: list[torch.Tensor], averaging: ReduceOptions) -> list[torch.Tensor]:
    """Values and indices in turns: the rows of all ranks, the values divided for an average."""
    if not parts:
        return []
    gathered = collective.grouped_allgather(parts, f"rows of {averaging.name}", averaging.process_set)
    if averaging.op is Average:
        for values in gathered[::2]:
            values /= averaging.ranks
    return gathered


# Variables.


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Give all ranks one rank's values of variables, in place; in a graph of `tf.compat.v1` the op that does it."""
    variables = [variable_of(variable) for variable in variables]
    # The names in a session's graph are the same on all ranks. Others are numbered as a rank has made them.
    names = [variable.name if is_deferred() else f"variable {i}" for i, variable in enumerate(variables)]

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        handles = [
            collective.broadcast_async_(tensor, root_rank, name, process_set)
            for tensor, name in zip(tensors, names, strict=True)
        ]
        return [collective.synchronize(handle) for handle in handles]

    if not variables:
        return tf.group() if is_deferred() else None
    values = [variable.read_value() for variable in variables]
    results = same_shapes(call(work, values), values)
    assignments = [variable.assign(result) for variable, result in zip(variables, results, strict=True)]
    return tf.group(*assignments) if is_deferred() else None


def is_deferred() -> bool:
    """Whether ops wait for a session to run them; within a function they run with it."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def variable_of(variable: Any) -> Any:
    """TensorFlow's variable, of which Keras' one is a wrapping."""
    return variable if isinstance(variable, tf.Variable) else variable.value
