"""Values of Keras through collective operations, on every backend.

On the torch backend variables and gradients are torch's tensors and are sent unchanged. On TensorFlow's they go through
`kvdist.collective.tensorflow_bridge`, which is imported only on that backend.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import torch

from kvdist import collective
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, global_process_set
from kvdist.collective.functions import broadcast_each
from kvdist.collective.gradients import ReduceOptions
from kvdist.collective.reduction import NoneCompressor


def averaged(gradients: Sequence[Any], variables: Sequence[Any] | None, options: ReduceOptions) -> list[Any]:
    """Reduce gradients over the ranks; on the torch backend zeros are sent for a variable without a gradient.

    Args:
        gradients: tensors of the backend, or None.
        variables: the variables of the gradients; may be None if no gradient is None and none is local.
        options: how they are reduced.

    Raises:
        ValueError: `variables` is None, but is needed.
    """
    if options.local and variables is None:
        raise ValueError("some variables are local: pass the variables to apply() too")
    if keras.backend.backend() == "tensorflow":
        from kvdist.collective.tensorflow_bridge import averaged_gradients

        return averaged_gradients(gradients, variables or [], options)
    if variables is None and any(gradient is None for gradient in gradients):
        raise ValueError("a gradient is None, but all ranks must send one: pass the variables to apply() too")
    if not options.local:
        return _reduced(gradients, variables or [], options)
    values = [value_of(variable) for variable in variables or ()]
    reduce = functools.partial(_reduced, options=options)
    return options.reduce_shared(gradients, values, reduce, operator.truediv)


def _reduced(gradients: Sequence[Any], variables: Sequence[Any], options: ReduceOptions) -> list[Any]:
    given = [
        torch.zeros_like(value_of(variables[i])) if gradient is None else gradient
        for i, gradient in enumerate(gradients)
    ]
    return options.reduce(given)


def value_of(variable: Any) -> Any:
    """The backend's variable behind a Keras variable, or the variable itself."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def broadcast_values(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> None:
    """Replace Keras variables by those of the root rank."""
    if keras.backend.backend() == "tensorflow":
        from kvdist.collective.tensorflow_bridge import broadcast_variables

        broadcast_variables([variable.value for variable in variables], root_rank, process_set=process_set)
        return
    # Not Keras' names: each rank numbers layers and optimizers by itself.
    named = [(f"variable {i}", variable.value.detach()) for i, variable in enumerate(variables)]
    broadcast_each(named, root_rank, process_set)


def broadcast_global_variables(root_rank: int, model: Any) -> None:
    """Replace the weights and the optimizer state of a built model by those of the root rank.

    Unlike Horovod's function it takes the model, because Keras 3 keeps no list of all variables. The seeds of random
    layers stay different on each rank.
    """
    optimizer = model.optimizer
    broadcast_values([*model.weights, *([] if optimizer is None else optimizer.variables)], root_rank)


# Single values.


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: ReduceOp | None = None,
    compression: type[NoneCompressor] = Compression.none,
    process_set: ProcessSet = global_process_set,
) -> np.ndarray[Any, Any]:
    """Return a number, array or tensor reduced over the ranks, by default averaged, as a NumPy array."""
    result = collective.allreduce(
        tensor_of(value),
        average=average,
        name=name,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )
    return result.cpu().numpy()


def allgather(
    value: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Concatenate the rows of all ranks' arrays, in rank order; the numbers of rows may differ."""
    return collective.allgather(tensor_of(value), name, process_set).cpu().numpy()


def broadcast(
    value: Any, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return the value of the root rank; the values of the other ranks must have its dtype and shape."""
    return collective.broadcast(tensor_of(value), root_rank, name, process_set).cpu().numpy()


def reducescatter(
    value: Any, name: str | None = None, op: ReduceOp = Average, process_set: ProcessSet = global_process_set
) -> np.ndarray[Any, Any]:
    """Return this rank's part of the rows of the average or sum of all ranks' arrays."""
    result = collective.reducescatter(tensor_of(value), op=op, name=name, process_set=process_set)
    return result.cpu().numpy()


def tensor_of(value: Any) -> torch.Tensor:
    """A new tensor with the value of a number, an array or a backend's tensor; Python's numbers keep 64 bits."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return torch.from_numpy(array_of(value).copy())


def array_of(value: Any) -> np.ndarray[Any, Any]:
    """The value of a number, an array, a variable or a backend's tensor."""
    if isinstance(value, keras.Variable):
        value = value.value
    if keras.ops.is_tensor(value):
        value = keras.ops.convert_to_numpy(value)
    return np.asarray(value)
