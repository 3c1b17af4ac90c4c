"""TensorFlow's values through collective operations: at once in eager execution, as an op within a graph.

Ops of a graph run in any order that its edges allow, but ranks must agree on an order. So values that belong together
share an op, such as all gradients of a step, and within a tf.function each of these ops waits for the previous. In a
graph of `tf.compat.v1`, where a run asks for some ops only, every op has a name that is the same on all ranks.

Values leave TensorFlow as NumPy arrays: one copy each way, and on GPUs a trip to the host. An op keeps the engine that
was current when it was created, whichever thread runs it.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
import torch

from kvdist import collective
from kvdist.collective import Average, Compression, ProcessSet, ReduceOp, Sum, global_process_set
from kvdist.collective.api import group_of
from kvdist.collective.engine import current, using
from kvdist.collective.functions import broadcast_each
from kvdist.collective.gradients import ReduceOptions
from kvdist.collective.reduction import NoneCompressor
from kvdist.errors import CollectiveError, CollectiveMismatch

Work = Callable[[list[torch.Tensor]], Sequence[torch.Tensor]]
Back = Callable[[list[Any], list[Any]], Sequence[Any]]


def call(work: Work, tensors: Sequence[Any], dtypes: Sequence[Any] | None = None) -> list[Any]:
    """Apply a function of torch tensors to copies of TensorFlow's tensors; without gradients.

    Args:
        work: gets a torch tensor for each tensor; it may change them.
        tensors: tensors of TensorFlow, eager or of the graph that is being built.
        dtypes: dtypes of the results; None for those of the tensors.

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
        try:
            results = run(*[tensor.numpy() for tensor in tensors])
        except (CollectiveMismatch, NotImplementedError, TypeError, ValueError) as error:
            raise _of_tensorflow(error) from None
        return [tf.convert_to_tensor(result, dtype) for result, dtype in zip(results, dtypes, strict=True)]
    return _in_graph(run, tensors, dtypes)


def _in_graph(run: Callable[..., list[Any]], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """The results of an op that calls a function of arrays."""

    def run_or_differ(*arrays: Any) -> list[Any]:
        try:
            return ["", *run(*arrays)]
        except CollectiveMismatch as error:
            return [str(error), *(np.zeros(0, dtype.as_numpy_dtype) for dtype in dtypes)]

    if is_deferred():
        difference, *results = _element(run_or_differ, tensors, [tf.string, *dtypes])
    else:
        # Stateful ops wait for each other within a function, also across branches and loops.
        difference, *results = tf.numpy_function(run_or_differ, tensors, [tf.string, *dtypes], stateful=True)
    with tf.control_dependencies([_fail_with(difference)]):
        return [tf.identity(result) for result in results]


def _fail_with(text: Any) -> Any:
    """An op that raises `tf.errors.FailedPreconditionError` unless the text is empty.

    Errors that a Python function raises in a graph can only become other errors. So two values are inserted under the
    same key of a table, which refuses the second and names the key: the text.
    """
    table = tf.raw_ops.AnonymousHashTable(key_dtype=tf.string, value_dtype=tf.int32)
    values = tf.stack([0, tf.strings.length(text)])
    return tf.raw_ops.InitializeTableV2(table_handle=table, keys=tf.stack([text, text]), values=values)


def _element(run: Callable[..., Any], tensors: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """An op of a session that occupies none of the session's threads while it waits.

    An op that calls a Python function occupies a thread, and ops of a run have no order: once waiting ops occupy all
    threads, the ops that other ranks wait for never begin. The ops of data sets have separate threads.
    """
    # A data set has at least one tensor, and an operation such as join has none.
    data = tf.data.Dataset.from_tensors((tf.zeros([]), *tensors))
    data = data.map(lambda _, *values: tuple(tf.numpy_function(run, values, dtypes, stateful=True)))
    known = {"output_types": dtypes, "output_shapes": [tf.TensorShape(None)] * len(dtypes)}
    pooled = tf.raw_ops.PrivateThreadPoolDataset(
        input_dataset=tf.data.experimental.to_variant(data), num_threads=1, **known
    )
    return list(tf.raw_ops.DatasetToSingleElement(dataset=pooled, **known))


def _of_tensorflow(error: Exception) -> Exception:
    """The same error as an error that is also TensorFlow's, of the class that Horovod's ops raise."""
    is_mismatch = isinstance(error, CollectiveMismatch)
    kind = tf.errors.FailedPreconditionError if is_mismatch else tf.errors.InvalidArgumentError
    own: Any = type(error)
    made: Exception = _both(own, kind)(None, None, str(error))
    return made.with_traceback(error.__traceback__)


@functools.cache
def _both(own: Any, kind: Any) -> Any:
    return type(own.__name__, (own, kind), {"__init__": kind.__init__, "__module__": own.__module__})


def operation(
    tensors: Sequence[Any], work: Work, back: Back, shapes: Sequence[Any], dtypes: Sequence[Any] | None = None
) -> list[Any]:
    """Apply a function of torch tensors, with a gradient.

    Args:
        tensors: tensors of TensorFlow, or values that can be converted.
        work: the function.
        back: computes the gradients of the tensors from the gradients of the results, which are dense, and the results;
            None stands for the gradient of integers.
        shapes: the static shapes of the results.
        dtypes: dtypes of the results; None for those of the tensors.
    """

    @tf.custom_gradient  # type: ignore[untyped-decorator, unused-ignore]
    def apply(*values: Any) -> Any:
        results = call(work, values, dtypes)
        for result, shape in zip(results, shapes, strict=True):
            result.set_shape(shape)

        def gradients(*upstream: Any) -> Sequence[Any]:
            # For a result that is not used TensorFlow may pass zeros of another dtype.
            given = [
                tf.cast(tf.convert_to_tensor(one), result.dtype) if has_gradient(result) else None
                for one, result in zip(upstream, results, strict=True)
            ]
            return back(given, results)

        return results, gradients

    return list(apply(*[tf.convert_to_tensor(tensor) for tensor in tensors]))


def has_gradient(tensor: Any) -> bool:
    """Whether gradients pass through a tensor's dtype."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def of_given(function: Callable[[list[Any]], Sequence[Any]], upstream: Sequence[Any]) -> list[Any]:
    """Apply a function of gradients to all gradients but None."""
    results = iter(function([one for one in upstream if one is not None]))
    return [None if one is None else next(results) for one in upstream]


def reduced(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    compression: type[NoneCompressor] = Compression.none,
    prescale: float = 1.0,
    postscale: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Reduce tensors over the ranks, as a unit; the gradient is reduced in the same way."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    name = named(name, "allreduce", tensors)

    def work(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return collective.grouped_allreduce(values, None, name, compression, op, prescale, postscale, process_set)

    def back(upstream: list[Any], _: list[Any]) -> Sequence[Any]:
        if op not in (Average, Sum):
            raise RuntimeError(f"allreduce with {op.name} has no gradient; pass tf.stop_gradient(tensor)")
        same = (of_gradient(name), op, Compression.none, prescale, postscale, process_set)
        return of_given(lambda given: reduced(given, *same), upstream)

    return operation(tensors, work, back, [tensor.shape for tensor in tensors]) if tensors else []


def gathered(tensors: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    """Gather the rows of tensors from all ranks, as a unit; the gradient is that of this rank's rows, averaged."""
    tensors = [tf.convert_to_tensor(tensor) for tensor in tensors]
    name = named(name, "allgather", tensors)

    def work(values: list[torch.Tensor]) -> list[torch.Tensor]:
        return collective.grouped_allgather(values, name, process_set)

    def back(upstream: list[Any], _: list[Any]) -> Sequence[Any]:
        return _of_own_rows(upstream, tensors, name, process_set)

    return operation(tensors, work, back, [_any_rows(tensor) for tensor in tensors]) if tensors else []


def _any_rows(tensor: Any) -> Any:
    return [None, *tensor.shape[1:]] if tensor.shape.rank else tensor.shape


def _of_own_rows(
    upstream: Sequence[Any], tensors: Sequence[Any], name: str | None, process_set: ProcessSet
) -> list[Any]:
    """The gradients of tensors from those of their gathered rows; None for tensors without a gradient."""
    average = functools.partial(reduced, name=of_gradient(name), op=Average, process_set=process_set)
    averages = of_given(average, upstream)
    rows = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in tensors])
    with tf.control_dependencies([one for one in averages if one is not None]):
        (of_ranks,) = gathered([rows[tf.newaxis]], None, process_set)
    begins = tf.reduce_sum(of_ranks[: group_of(process_set).rank], 0)
    return [None if average is None else average[begins[i] : begins[i] + rows[i]] for i, average in enumerate(averages)]


def named(name: str | None, kind: str, tensors: Sequence[Any]) -> str | None:
    """The name of an operation: in the graph of a session a unique name, the same on all ranks.

    The ops of a run have no order in a session, so that the ranks pair them by name. Without a name it is derived from
    the first tensor, as in Horovod: ranks may create their ops in different orders, or leave some out.
    """
    if not tensors or not is_deferred():
        return name
    return str(tf.compat.v1.get_default_graph().unique_name(name or f"{kind} of {tensors[0].name}"))


def of_gradient(name: str | None) -> str | None:
    """The name of the operation that a gradient needs."""
    return None if name is None else f"gradient of {name}"


def to_torch(array: Any) -> torch.Tensor:
    """Copy an array to a torch tensor; also bfloat16, which NumPy does not have."""
    array = np.array(array)
    is_bfloat16 = array.dtype.name == "bfloat16"
    tensor = torch.from_numpy(array.view(np.int16) if is_bfloat16 else array)
    # The strides of an empty array can be 0, with which torch shows no bytes.
    tensor = tensor if tensor.numel() else tensor.new_empty(tensor.shape)
    return tensor.view(torch.bfloat16) if is_bfloat16 else tensor


def to_numpy(tensor: torch.Tensor) -> Any:
    """An array that shares the tensor's memory."""
    if tensor.dtype is torch.bfloat16:
        return tensor.contiguous().view(torch.int16).numpy().view(tf.bfloat16.as_numpy_dtype)
    return tensor.numpy()


# Gradients.


def averaged_gradients(gradients: Sequence[Any], variables: Sequence[Any], options: ReduceOptions) -> list[Any]:
    """Reduce gradients over the ranks, in a single op.

    Args:
        gradients: tensors, `IndexedSlices` or None, which stays None and must be None on all ranks. The ranks' rows of
            `IndexedSlices` are gathered, and rows can repeat, unless ``options.sparse_as_dense``.
        variables: the variables of the gradients, of TensorFlow or Keras; local ones keep their gradients.
        options: how they are reduced.

    Raises:
        NotImplementedError: Adasum, Min, Max or Product of `IndexedSlices`; the same in Horovod.
    """
    if not options.local:
        return _reduced_gradients(gradients, options)
    values = [variable_of(variable) for variable in variables]
    return options.reduce_shared(gradients, values, lambda shared, _: _reduced_gradients(shared, options), divided)


def divided(gradient: Any, by: int) -> Any:
    """A tensor or `IndexedSlices`, divided as TensorFlow divides: integers become float64."""
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(divided(gradient.values, by), gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(by, gradient.dtype)


def _reduced_gradients(gradients: Sequence[Any], options: ReduceOptions) -> list[Any]:
    if not options.has_others or all(gradient is None for gradient in gradients):
        return list(gradients)
    given = [None if gradient is None else _dense(gradient, options.sparse_as_dense) for gradient in gradients]
    rows = [gradient for gradient in given if isinstance(gradient, tf.IndexedSlices)]
    dense = [gradient for gradient in given if gradient is not None and not isinstance(gradient, tf.IndexedSlices)]
    if rows:
        check_rows(options.op)
    results = _in_one_op(dense, rows, options)
    of_rows = iter(joined_rows(rows, results[len(dense) :], options.op, options.ranks))
    of_dense = iter(results)
    return [
        None if gradient is None else next(of_rows if isinstance(gradient, tf.IndexedSlices) else of_dense)
        for gradient in given
    ]


def joined_rows(slices: Sequence[Any], parts: Sequence[Any], op: ReduceOp, ranks: int) -> list[Any]:
    """The `IndexedSlices` of all ranks from the gathered values and indices of each.

    Args:
        slices: the `IndexedSlices` of this rank.
        parts: gathered values and indices of the first, then of the second, and so on.
        op: Average or Sum.
        ranks: the number of ranks.
    """
    joined = [
        tf.IndexedSlices(values, indices, one.dense_shape)
        for one, values, indices in zip(slices, parts[::2], parts[1::2], strict=True)
    ]
    return [divided(one, ranks) for one in joined] if op is Average else joined


def check_rows(op: ReduceOp) -> None:
    """Refuse operators that cannot reduce `IndexedSlices`.

    Raises:
        NotImplementedError: the operator is neither Average nor Sum.
    """
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"IndexedSlices are combined by Average or Sum, not {ReduceOp(op).name}: pass sparse_as_dense=True to the"
            " optimizer or tape, or tf.convert_to_tensor(slices)"
        )


def _in_one_op(dense: Sequence[Any], rows: Sequence[Any], options: ReduceOptions) -> list[Any]:
    """Reduce tensors and gather rows in a single op. Returns the tensors, then values and indices of each gradient's
    rows."""
    parts = [tf.convert_to_tensor(part) for one in rows for part in (one.values, one.indices)]
    options = dataclasses.replace(options, name=named(options.name, "allreduce", [*dense, *parts]) or options.name)
    name = f"rows of {options.name}"

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        found = options.reduce(tensors[: len(dense)])
        flat = tensors[len(dense) :]
        return [*found, *(collective.grouped_allgather(flat, name, options.process_set) if flat else [])]

    def back(upstream: list[Any], _: list[Any]) -> list[Any]:
        factors = (options.prescale, options.postscale)
        again = (of_gradient(options.name), options.op, Compression.none, *factors, options.process_set)
        of_dense = of_given(lambda given: reduced(given, *again), upstream[: len(dense)])
        with tf.control_dependencies([one for one in of_dense if one is not None]):
            of_rows = _of_own_rows(upstream[len(dense) :], parts, name, options.process_set) if parts else []
        return [*of_dense, *of_rows]

    shapes = [*(tensor.shape for tensor in dense), *(_any_rows(part) for part in parts)]
    return operation([*dense, *parts], work, back, shapes)


def _dense(gradient: Any, sparse_as_dense: bool) -> Any:
    is_sparse = isinstance(gradient, tf.IndexedSlices) and not sparse_as_dense
    return gradient if is_sparse else tf.convert_to_tensor(gradient)


# Variables.


def broadcast_variables(variables: Sequence[Any], root_rank: int, process_set: ProcessSet = global_process_set) -> Any:
    """Replace variables by those of the root rank; in a graph of `tf.compat.v1`, return the op that does it."""
    variables = [variable_of(variable) for variable in variables]
    # Names in a session's graph are the same on all ranks; elsewhere each rank numbers them by itself.
    names = [variable.name if is_deferred() else f"variable {i}" for i, variable in enumerate(variables)]

    def work(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        return broadcast_each(zip(names, tensors, strict=True), root_rank, process_set)

    if not variables:
        return tf.group() if is_deferred() else None
    values = [variable.read_value() for variable in variables]
    results = call(work, values)
    for result, value in zip(results, values, strict=True):
        result.set_shape(value.shape)
    assignments = [variable.assign(result) for variable, result in zip(variables, results, strict=True)]
    return tf.group(*assignments) if is_deferred() else None


def is_deferred() -> bool:
    """Whether ops wait for a session to run them; ops within a function run with it."""
    return not tf.executing_eagerly() and not tf.compat.v1.get_default_graph().building_function


def variable_of(variable: Any) -> Any:
    """The TensorFlow variable behind a Keras variable, or the variable itself."""
    return variable if isinstance(variable, tf.Variable) else variable.value
