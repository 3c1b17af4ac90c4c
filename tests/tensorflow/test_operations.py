"""Operations on TensorFlow's tensors: eager, in functions and in graphs, with their gradients."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import kvdist.tensorflow as hvd
from kvdist.errors import ConfigError
from tests.collective.ranks import returned, run_ranks
from tests.keras.models import of_keras

pytestmark = of_keras
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.int32, tf.int64, tf.uint8]


def lists(tensors):
    return [np.array(tensor).tolist() for tensor in tensors]


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_tensors_are_reduced_gathered_and_broadcast(mode):
    def operate(rank):
        def values(x):
            return (
                hvd.allreduce(x),
                hvd.allreduce(x, op=hvd.Max),
                hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, compression=hvd.Compression.fp16),
                hvd.allgather(x[: rank + 1]),
                hvd.broadcast(x, 1),
                *hvd.grouped_allreduce([x, x[:1]], op=hvd.Sum),
            )

        return lists((tf.function(values) if mode == "function" else values)(tf.constant([rank + 1.0, 4.0])))

    expected = [[1.5, 4.0], [2.0, 4.0], [6.0, 16.0], [1.0, 2.0, 4.0], [2.0, 4.0], [3.0, 8.0], [3.0]]
    assert returned(run_ranks(2, operate)) == [expected] * 2


def test_operations_of_a_session_give_the_same_values():
    def operate(rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.constant([rank + 1.0, 4.0])
            return lists(session.run(op) for op in (hvd.allreduce(x), hvd.allgather(x), hvd.broadcast(x, 0)))

    assert returned(run_ranks(2, operate)) == [[[1.5, 4.0], [1.0, 4.0, 2.0, 4.0], [1.0, 4.0]]] * 2


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
def test_every_type_keeps_its_type(dtype):
    def operate(rank):
        result = hvd.allreduce(tf.cast([rank, 5], dtype), op=hvd.Sum)
        return result.dtype.name, tf.cast(result, tf.float64).numpy().tolist()

    assert returned(run_ranks(2, operate)) == [(dtype.name, [1.0, 10.0])] * 2


def test_gradients_pass_through_as_horovods_do():
    def operate(rank):
        @tf.function
        def gradients(x):
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                results = {
                    "sum": hvd.allreduce(x, op=hvd.Sum),
                    "average": hvd.allreduce(x),
                    "gather": hvd.allgather(x) * tf.range(4.0),
                    "broadcast": hvd.broadcast(x, 1),
                }
            return {name: tape.gradient(result, x) for name, result in results.items()}

        return {name: np.array(value).tolist() for name, value in gradients(tf.constant([rank + 1.0, 4.0])).items()}

    first, second = returned(run_ranks(2, operate))
    assert first == {"sum": [2.0, 2.0], "average": [1.0, 1.0], "gather": [0.0, 1.0], "broadcast": [0.0, 0.0]}
    assert second == {"sum": [2.0, 2.0], "average": [1.0, 1.0], "gather": [2.0, 3.0], "broadcast": [1.0, 1.0]}


def test_many_operations_of_a_function_are_done_in_the_order_of_the_program():
    def operate(rank):
        @tf.function
        def many(x):
            # Nothing but the order of the program says which comes first, and mixed up they would not fit.
            return [hvd.allreduce(tf.fill([i + 1], x), op=hvd.Sum, name=f"number {i}") for i in range(30)]

        def with_branches(x):
            first = hvd.allreduce(x, op=hvd.Sum)
            second = tf.cond(x > 0, lambda: hvd.allgather([x]), lambda: hvd.allgather([x, x]))
            return first, second, hvd.allreduce(tf.stack([x, x]), op=hvd.Sum)

        assert lists(tf.function(with_branches)(tf.constant(rank + 1.0))) == [3.0, [1.0, 2.0], [3.0, 3.0]]
        for _ in range(3):
            results = lists(many(tf.constant(rank + 1.0)))
        return results

    expected = [[3.0] * (i + 1) for i in range(30)]
    assert returned(run_ranks(2, operate)) == [expected] * 2


def test_rows_of_indexed_slices_are_gathered_and_averaged():
    def operate(rank):
        rows = tf.IndexedSlices(tf.fill([rank + 1, 2], 4.0), tf.range(rank + 1), tf.constant([3, 2]))
        result = hvd.allreduce(rows)
        return result.indices.numpy().tolist(), tf.convert_to_tensor(result).numpy().tolist()

    assert returned(run_ranks(2, operate)) == [([0, 0, 1], [[4.0, 4.0], [2.0, 2.0], [0.0, 0.0]])] * 2


def test_variables_of_tensorflow_and_keras_become_those_of_the_root():
    def operate(rank):
        import keras

        ours = [tf.Variable([float(rank)] * 3), keras.Variable(rank + 5), tf.Variable(tf.zeros([0, 2]))]
        hvd.broadcast_variables(ours, root_rank=1)
        within = tf.Variable(rank)
        tf.function(lambda: hvd.broadcast_variables([within], 0))()
        return [ours[0].numpy().tolist(), int(ours[1]), int(within)]

    assert returned(run_ranks(2, operate)) == [[[1.0] * 3, 6, 0]] * 2


def test_an_error_reaches_the_program_eagerly_and_from_a_graph():
    def operate(rank):
        with pytest.raises(ValueError, match="root_rank 5"):
            hvd.broadcast(tf.zeros(2), 5)
        with pytest.raises(tf.errors.OpError, match="root_rank 5"):
            tf.function(lambda: hvd.broadcast(tf.zeros(2), 5))()
        return True

    assert returned(run_ranks(2, operate)) == [True, True]


def test_without_init_the_error_says_what_to_call():
    with pytest.raises(ConfigError, match="call init"):
        hvd.allreduce(tf.zeros(2))
