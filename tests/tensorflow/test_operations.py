"""Operations on TensorFlow's tensors: eager, in functions and in graphs, with their gradients."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import tensorflow as tf

import kvdist.tensorflow as hvd
from kvdist.errors import CollectiveMismatch, ConfigError
from tests.cases import each
from tests.collective.ranks import returned, run_ranks
from tests.keras.models import of_keras

pytestmark = of_keras
DIFFERENT = "ranks called different operations"
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


def test_operations_of_one_run_of_a_session_find_each_other_in_any_order_on_a_single_thread():
    # A thread of its own for each rank, which no operation that waits may keep.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=1, use_per_session_threads=True)

    def operate(rank):
        with tf.Graph().as_default(), tf.compat.v1.Session(config=config) as session:
            x = tf.constant([rank + 1.0, 4.0])
            sums = [hvd.allreduce(x * i, op=hvd.Sum) for i in range(8)]
            run = [*sums, hvd.allgather(x[:1]), hvd.broadcast(x, 1)]
            # Each rank makes its own ones wait for another.
            with tf.control_dependencies([sums[2] if rank else sums[0]]):
                last = tf.identity(sums[0] if rank else sums[2])
            return [lists(session.run([*run, last])[:-1]) for _ in range(3)][-1]

    expected = [*([3.0 * i, 8.0 * i] for i in range(8)), [1.0, 2.0], [2.0, 4.0]]
    assert returned(run_ranks(2, operate)) == [expected] * 2


def test_operations_without_names_find_each_other_by_their_tensors_where_ranks_make_them_in_different_orders():
    def operate(rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            tensors = [tf.constant([value + rank], name=name) for name, value in (("a", 1.0), ("b", 10.0))]
            sums = {x.name: hvd.allreduce(x, op=hvd.Sum) for x in (tensors if rank else reversed(tensors))}
            return lists(session.run([sums["a:0"], sums["b:0"]]))

    assert returned(run_ranks(2, operate)) == [[[3.0], [21.0]]] * 2


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


@pytest.mark.parametrize("mode", ["eager", "function"])
def test_rows_are_exchanged_and_scattered(mode):
    def operate(rank):
        def values(x):
            rows = tf.reshape(x, [4, 1])
            sent, counts = hvd.alltoall(rows, tf.constant([1, 2]))
            return (
                hvd.alltoall(x),
                sent,
                counts,
                hvd.reducescatter(x),
                hvd.reducescatter(x[:3], op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.5),
                *hvd.grouped_reducescatter([x, rows], op=hvd.Sum),
                *hvd.grouped_allgather([x[:1], rows[rank:1]]),
                *hvd.grouped_allreduce([x[:2], x[2:]], op=hvd.Max),
                *hvd.grouped_allreduce([x[:2], tf.constant([rank + 2])], op=hvd.Product, prescale_factor=1.0),
                *hvd.grouped_allreduce([x[:2]], average=False, postscale_factor=0.5),
            )

        return lists((tf.function(values) if mode == "function" else values)(tf.range(4.0) + 10.0 * rank))

    gathered = [[0.0, 10.0], [[0.0]]]
    reduced = [[10.0, 11.0], [12.0, 13.0], [0.0, 11.0], [6], [5.0, 6.0]]
    first, second = returned(run_ranks(2, operate))
    assert first[:3] == [[0.0, 1.0, 10.0, 11.0], [[0.0], [10.0]], [1, 1]]
    assert second[:3] == [[2.0, 3.0, 12.0, 13.0], [[1.0], [2.0], [11.0], [12.0]], [2, 2]]
    assert first[3:7] == [[5.0, 6.0], [10.0, 12.0], [10.0, 12.0], [[10.0], [12.0]]]
    assert second[3:7] == [[7.0, 8.0], [14.0], [14.0, 16.0], [[14.0], [16.0]]]
    assert first[7:] == second[7:] == gathered + reduced


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_four_ranks_get_the_values_that_horovods_documents_say(mode):
    """The oracle is NumPy, by the sentences of Horovod's reference."""
    ranks = 4
    of_ranks = [np.arange(6, dtype=np.float32) - 2 + rank for rank in range(ranks)]
    integers = [np.array([-7, 7], np.int32) - rank for rank in range(ranks)]
    halves = [np.array([rank + 1, 300], np.float16) for rank in range(ranks)]  # a product of these is infinite
    stack, total = np.stack(of_ranks), np.sum(of_ranks, 0)

    def operate(rank):
        def values(x, i, h):
            rows = tf.IndexedSlices(tf.reshape(x[: rank + 1], [-1, 1]), tf.range(rank + 1), tf.constant([ranks, 1]))
            return {
                "average": hvd.allreduce(x),
                "sum": hvd.allreduce(x, average=False),
                "min": hvd.allreduce(x, op=hvd.Min),
                "max": hvd.allreduce(x, op=hvd.Max),
                "product": hvd.allreduce(x, op=hvd.Product),
                "adasum of equals": hvd.allreduce(tf.ones(3), op=hvd.Adasum),
                "scaled": hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0),
                "average of integers": hvd.allreduce(i),
                "scaled integers": hvd.allreduce(i, op=hvd.Sum, prescale_factor=0.5),
                "group": tf.concat(hvd.grouped_allreduce([x, x[:2]], op=hvd.Sum), 0),
                "product of a group": tf.concat(hvd.grouped_allreduce([h, h[:1]], op=hvd.Product), 0),
                "rows of slices": tf.convert_to_tensor(hvd.allreduce(rows)),
                "rows": hvd.allgather(x[: rank + 1]),
                "group of rows": tf.concat(hvd.grouped_allgather([x[:1], x[1 : rank + 1]]), 0),
                "of rank 2": hvd.broadcast(x, 2),
                "parts": hvd.alltoall(x[:4]),
                "parts of given sizes": hvd.alltoall(x, tf.constant([0, 1, 2, 3]))[0],
                "counts": hvd.alltoall(x, tf.constant([0, 1, 2, 3]))[1],
                "scattered": hvd.reducescatter(x, op=hvd.Sum),
                "group scattered": hvd.grouped_reducescatter([x], prescale_factor=2.0)[0],
            }

        with contextlib.ExitStack() as graph:
            if mode == "session":
                graph.enter_context(tf.Graph().as_default())
            made = (tf.function(values) if mode == "function" else values)(
                tf.constant(of_ranks[rank]), tf.constant(integers[rank]), tf.constant(halves[rank])
            )
            if mode == "session":
                made = graph.enter_context(tf.compat.v1.Session()).run(made)
            return {name: np.array(value).tolist() for name, value in made.items()}

    begins, sizes = [0, 2, 4, 5], [2, 2, 1, 1]  # the first ranks have one row more
    parts = [0, 0, 1, 3]  # where each rank's begins, by the splits
    for rank, found in enumerate(returned(run_ranks(ranks, operate))):
        own = slice(begins[rank], begins[rank] + sizes[rank])
        expected = {
            "average": total / ranks,
            "sum": total,
            "min": stack.min(0),
            "max": stack.max(0),
            "product": stack.prod(0),
            "adasum of equals": np.ones(3),
            "scaled": total * 1.5,
            "average of integers": np.trunc(np.sum(integers, 0) / ranks),
            "scaled integers": np.sum([np.trunc(one * 0.5) for one in integers], 0),
            "group": np.concatenate([total, total[:2]]),
            "product of a group": np.array([24, np.inf, 24], np.float16),
            "rows of slices": [[sum(float(one[row]) for one in of_ranks[row:]) / ranks] for row in range(ranks)],
            "rows": np.concatenate([one[: i + 1] for i, one in enumerate(of_ranks)]),
            "group of rows": np.concatenate([stack[:, 0], *(one[1 : i + 1] for i, one in enumerate(of_ranks))]),
            "of rank 2": of_ranks[2],
            "parts": stack[:, rank],
            "parts of given sizes": stack[:, parts[rank] : parts[rank] + rank].ravel(),
            "counts": np.full(ranks, rank),
            "scattered": total[own],
            "group scattered": 2 * total[own] / ranks,
        }
        assert found == {name: np.array(value).tolist() for name, value in expected.items()}, rank


@pytest.mark.parametrize("mode", ["eager", "function", "session"])
def test_two_process_sets_of_four_ranks_do_every_operation_and_refuse_the_other_ranks(mode):
    def operate(rank):
        sets = [hvd.add_process_set(ranks) for ranks in ([0, 2], [1, 3])]
        own, other = sets[rank % 2], sets[1 - rank % 2]

        def values():
            x = tf.constant([rank + 1.0, 10.0])
            return {
                "sum": hvd.allreduce(x, op=hvd.Sum, process_set=own),
                "group": hvd.grouped_allreduce([x, x[:1]], op=hvd.Max, process_set=own),
                "rows": hvd.allgather(x, process_set=own),
                "of the last": hvd.broadcast(x, 2 + rank % 2, process_set=own),
                "parts": hvd.alltoall(x, process_set=own),
                "scattered": hvd.reducescatter(x, op=hvd.Sum, process_set=own),
                "slices": hvd.allreduce(
                    tf.IndexedSlices(x, tf.constant([rank, 0])), op=hvd.Sum, process_set=own
                ).indices,
                "all": hvd.allreduce(x, op=hvd.Sum),
            }

        def foreign():
            return hvd.allreduce(tf.ones(4), process_set=other)

        with contextlib.ExitStack() as graph:
            if mode != "session":
                made = (tf.function(values) if mode == "function" else values)()
                with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {rank} is not"):
                    (tf.function(foreign) if mode == "function" else foreign)()
            else:
                graph.enter_context(tf.Graph().as_default())
                session = graph.enter_context(tf.compat.v1.Session())
                made = session.run(values())
                with pytest.raises(tf.errors.InvalidArgumentError, match=f"rank {rank} is not"):
                    session.run(foreign())
        return tf.nest.map_structure(lambda value: np.array(value).tolist(), made)

    for rank, found in enumerate(returned(run_ranks(4, operate))):
        first, last, place = rank % 2 + 1.0, rank % 2 + 3.0, rank // 2
        assert found == {
            "sum": [first + last, 20.0],
            "group": [[last, 10.0], [last]],
            "rows": [first, 10.0, last, 10.0],
            "of the last": [last, 10.0],
            "parts": [[first, last], [10.0, 10.0]][place],
            "scattered": [[first + last], [20.0]][place],
            "slices": [rank % 2, 0, rank % 2 + 2, 0],
            "all": [10.0, 40.0],
        }, rank


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_operation_with_a_gradient_has_horovods(ranks):
    """Horovod's rules: those of the ops that `horovod/tensorflow/mpi_ops.py` registers gradients for."""

    def operate(rank):
        @tf.function
        def gradients(x):
            own = float(rank + 1)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(x)
                slices = tf.IndexedSlices(x, tf.range(ranks))
                results = {
                    "grouped sum": hvd.grouped_allreduce([x, 2.0 * x], op=hvd.Sum, prescale_factor=0.5),
                    "grouped average": hvd.grouped_allreduce([x, x]),
                    "rows of slices": hvd.allreduce(slices).values,
                    "grouped gather": hvd.grouped_allgather([x, 3.0 * x]),
                    "alltoall": hvd.alltoall(x),
                    "alltoall of some": hvd.alltoall(x, tf.constant([1] + [0] * (ranks - 1)))[0],
                    "scatter sum": hvd.reducescatter(x, op=hvd.Sum, postscale_factor=3.0),
                    "scatter average": hvd.reducescatter(x),
                    "grouped scatter": hvd.grouped_reducescatter([x, x], op=hvd.Sum),
                }
                losses = {
                    name: tf.add_n([tf.reduce_sum(one) * own for one in tf.nest.flatten(result)])
                    for name, result in results.items()
                }
            return {name: tape.gradient(loss, x) for name, loss in losses.items()}

        found = gradients(tf.ones(ranks))
        return {name: np.array(value).tolist() for name, value in found.items()}

    mean = (ranks + 1) / 2
    every = [float(rank + 1) for rank in range(ranks)]
    for rank, found in enumerate(returned(run_ranks(ranks, operate))):
        assert found == {
            "grouped sum": [0.5 * 3 * mean * ranks] * ranks,
            "grouped average": [2 * mean] * ranks,
            "rows of slices": [mean / ranks] * ranks,
            "grouped gather": [4 * mean] * ranks,
            "alltoall": every,
            "alltoall of some": [1.0] + [0.0] * (ranks - 1),
            "scatter sum": [3 * ranks * one for one in every],
            "scatter average": every,
            "grouped scatter": [2 * ranks * one for one in every],
        }, rank


def test_a_gradient_of_averaged_gradients_is_averaged_again():
    def operate(rank):
        x = tf.constant([rank + 1.0])
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = x**3
            (slope,) = hvd.DistributedGradientTape(inner).gradient(loss, [x])
        return slope.numpy().tolist(), outer.gradient(slope, x).numpy().tolist()

    # The slope is 3 x^2, on average 7.5, and its own slope 6 x times the average of the ranks' ones.
    assert returned(run_ranks(2, operate)) == [([7.5], [6.0]), ([7.5], [12.0])]


def test_an_operator_without_a_gradient_says_so():
    def operate(rank):
        x = tf.constant([1.0])
        with tf.GradientTape() as tape:
            tape.watch(x)
            largest = hvd.allreduce(x, op=hvd.Max)
        with pytest.raises(RuntimeError, match="allreduce with Max has no gradient"):
            tape.gradient(largest, x)
        return True

    assert returned(run_ranks(1, operate)) == [True]


def test_adasum_adds_what_is_orthogonal_and_averages_what_is_parallel():
    def operate(rank):
        unit = tf.one_hot(rank, 2)
        return lists([hvd.allreduce(unit, op=hvd.Adasum), hvd.allreduce(tf.ones(3), op=hvd.Adasum)])

    assert returned(run_ranks(2, operate)) == [[[1.0, 1.0], [1.0, 1.0, 1.0]]] * 2


@pytest.mark.parametrize("mode", ["eager", "session"])
def test_questions_are_answered_when_they_are_run(mode):
    def operate(rank):
        one = hvd.add_process_set([1])
        with contextlib.ExitStack() as stack:
            if mode == "session":
                stack.enter_context(tf.Graph().as_default())
            number = one.process_set_id
            answers = [hvd.rank_op(), hvd.local_rank_op(), hvd.size_op(), hvd.size_op(number), hvd.local_size_op()]
            answers += [hvd.process_set_included_op(number), hvd.process_set_included_op(77)]
            return stack.enter_context(tf.compat.v1.Session()).run(answers) if mode == "session" else lists(answers)

    assert returned(run_ranks(2, operate)) == [[0, 0, 2, 1, 2, 0, -3], [1, 1, 2, 1, 2, 1, -3]]


@pytest.mark.parametrize("ranks", [2, 4])
def test_in_a_session_the_rank_that_joins_first_takes_part_with_zeros_in_each_of_several_rounds(ranks):
    """It makes fewer operations than the others; all have the names of tensors that each rank makes."""

    def operate(rank):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            rounds = []
            for first in (0, 1):
                x = tf.constant([4.0])
                total = 0.0 if rank == first else session.run(hvd.allreduce(x, op=hvd.Sum)).item()
                last = session.run(hvd.join())
                assert last != first
                rounds.append((total, hvd.allgather_object(int(last)) == [last] * ranks))
            return rounds

    full = 4.0 * (ranks - 1)
    expected = [[(0.0 if rank == first else full, True) for first in (0, 1)] for rank in range(ranks)]
    assert returned(run_ranks(ranks, operate)) == expected


def test_a_rank_that_joins_takes_part_with_zeros():
    def operate(rank):
        total = [] if rank else hvd.allreduce(tf.constant([4.0])).numpy().tolist()
        return total, hvd.join().numpy().tolist()

    assert returned(run_ranks(2, operate)) == [([2.0], 0), ([], 0)]


def test_variables_are_replaced_in_place_and_objects_sent():
    def operate(rank):
        variable = tf.Variable([float(rank)])
        values = hvd.broadcast_([variable], 1)
        send = hvd.broadcast_object_fn(root_rank=1)
        return lists([values[0], variable]), send({"rank": rank}), hvd.allgather_object(rank, None, "ranks")

    assert returned(run_ranks(2, operate)) == [([[1.0], [1.0]], {"rank": 1}, [0, 1])] * 2


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


@each(
    "options, message",
    [
        ({"op": hvd.Min}, "Average or Sum, not Min"),
        ({"op": hvd.Product}, "Average or Sum, not Product"),
        ({"op": hvd.Adasum}, "Average or Sum, not Adasum"),
        ({"prescale_factor": 2.0}, "not scaled"),
    ],
)
def test_slices_that_cannot_be_reduced_are_refused_before_anything_is(options, message):
    def operate(rank):
        rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([rank]), tf.constant([2, 2]))
        if rank == 0:  # alone: rank 1 would have to take part in what was begun
            with pytest.raises(NotImplementedError, match=message):
                hvd.grouped_allreduce([rows, tf.ones(3)], **options)
        return lists([hvd.allreduce(tf.fill(2, rank + 1.0))])

    assert returned(run_ranks(2, operate)) == [[[1.5, 1.5]]] * 2


def test_rows_of_integers_are_divided_as_tensorflow_divides():
    def operate(rank):
        rows = tf.IndexedSlices(tf.constant([[3]]), tf.constant([rank]), tf.constant([2, 1]))
        mean, total = hvd.grouped_allreduce([rows, tf.constant([1, 3])])[0], hvd.allreduce(rows, op=hvd.Sum)
        with pytest.raises(NotImplementedError, match="Average or Sum, not Max"):
            hvd.allreduce(rows, op=hvd.Max)
        with pytest.raises(NotImplementedError, match="not scaled"):
            hvd.allreduce(rows, prescale_factor=2.0)
        return mean.values.dtype.name, mean.values.numpy().tolist(), total.values.dtype.name

    assert returned(run_ranks(2, operate)) == [("float64", [[1.5], [1.5]], "int32")] * 2


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
        with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank 5"):
            hvd.broadcast(tf.zeros(2), 5)
        with pytest.raises(CollectiveMismatch, match=DIFFERENT):
            hvd.allreduce(tf.zeros(2 + rank))
        with pytest.raises(tf.errors.FailedPreconditionError, match=DIFFERENT):
            hvd.allreduce(tf.zeros(2 + rank))
        with pytest.raises(tf.errors.InvalidArgumentError, match="root_rank 5"):
            tf.function(lambda: hvd.broadcast(tf.zeros(2), 5))()
        with pytest.raises(tf.errors.FailedPreconditionError, match=f"Key {DIFFERENT}"):
            tf.function(lambda: hvd.allreduce(tf.zeros(2 + rank)))()
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            unlike = hvd.allreduce(tf.zeros(2 + rank))
            with pytest.raises(tf.errors.FailedPreconditionError, match=f"Key {DIFFERENT}"):
                session.run(unlike)
            assert session.run(hvd.allreduce(rank + 1.0)) == 1.5
        return True

    assert returned(run_ranks(2, operate)) == [True, True]


def test_without_init_the_error_says_what_to_call():
    with pytest.raises(ConfigError, match="call init"):
        hvd.allreduce(tf.zeros(2))


def test_horovods_private_question_how_ops_are_executed_has_an_answer_at_both_of_its_places():
    with tf.Graph().as_default():
        deferred = hvd._executing_eagerly(), hvd.util._executing_eagerly()
    assert (deferred, hvd._executing_eagerly(), hvd.util._executing_eagerly()) == ((False, False), True, True)
