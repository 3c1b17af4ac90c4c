"""Training with TensorFlow: tapes, Keras' `fit`, and optimizers and hooks of `tf.compat.v1`."""

from __future__ import annotations

import contextlib
from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

import kvdist.tensorflow as hvd
from kvdist.errors import CollectiveMismatch, ProcessSetError
from tests.collective.ranks import returned, run_ranks
from tests.keras.models import SAMPLES, data, linear, of_keras, weights

pytestmark = of_keras
v1 = tf.compat.v1
keras_warns = pytest.mark.filterwarnings("ignore:Gradients do not exist for variables")


def test_a_tape_gives_averages_in_the_structure_that_was_asked_for():
    def step(rank):
        table, factor, other = tf.Variable(tf.ones([4, 2])), tf.Variable(1.0), tf.Variable([3.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank, 3])) * factor + other[0] * (rank + 1.0)
        tape = hvd.DistributedGradientTape(tape)
        found = tape.gradient(loss, {"table": table, "rest": (factor, other)})
        assert isinstance(found["table"], tf.IndexedSlices)
        return [np.array(tf.convert_to_tensor(gradient)).tolist() for gradient in tf.nest.flatten(found)]

    expected = [4.0, [1.5], [[0.5, 0.5], [0.5, 0.5], [0.0, 0.0], [1.0, 1.0]]]
    assert returned(run_ranks(2, step)) == [expected] * 2


@keras_warns
def test_a_variable_without_a_gradient_is_left_alone_as_by_keras_itself():
    """The oracle is Keras with the same gradients: a step with zeros would go on with momentum and decay."""

    def train(optimizer):
        used, unused = tf.Variable([1.0]), tf.Variable([1.0])
        for second in (tf.ones(1), None, None):
            optimizer.apply([tf.ones(1), second], [used, unused])
        return float(used[0]), float(unused[0])

    def of_rank(rank):
        return train(hvd.DistributedOptimizer(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1)))

    assert returned(run_ranks(2, of_rank)) == [train(keras.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.1))] * 2


def test_arguments_of_the_keras_within_have_the_order_of_horovods():
    def train(rank):
        variable = tf.Variable([1.0])
        plain = (None, "", "", hvd.keras.Compression.none, False, 1.0, hvd.Average)
        optimizer = hvd.keras.DistributedOptimizer(keras.optimizers.SGD(1.0), *plain, 2, True)
        seen = []
        for gradient in (1.0, 3.0):
            optimizer.apply([tf.constant([gradient + rank])], [variable])
            seen.append(float(variable[0]))
        return seen

    assert returned(run_ranks(2, train)) == [[1.0, -1.5]] * 2
    best = hvd.keras.callbacks.BestModelCheckpoint("loss", 1, True, "max", 5)
    assert (best.save_weights_only, best.mode, best.save_freq) == (True, "max", 5)


@keras_warns
def test_a_variable_that_no_pass_of_a_step_uses_is_left_alone_too():
    def train(rank):
        used, unused = tf.Variable([1.0]), tf.Variable([1.0])
        sgd = keras.optimizers.SGD(0.1, weight_decay=0.1)
        optimizer = hvd.DistributedOptimizer(sgd, backward_passes_per_step=2)
        for _ in range(2):
            optimizer.apply([tf.ones(1), None], [used, unused])
        return float(used[0]) < 1.0, float(unused[0])

    assert returned(run_ranks(2, train)) == [(True, 1.0)] * 2


def test_sources_without_a_gradient_keep_none_and_ranks_that_differ_in_it_get_an_error():
    def step(rank):
        x, y = tf.Variable([1.0]), tf.Variable([1.0])
        with tf.GradientTape(persistent=True) as tape:
            loss, differs = 3.0 * x, x * y if rank else x
        tape = hvd.DistributedGradientTape(tape)
        found = tape.gradient(loss, [y, x])
        with pytest.raises(CollectiveMismatch, match="different operations"):
            tape.gradient(differs, [x, y])
        zeros = tape.gradient(differs, [x, y], unconnected_gradients=tf.UnconnectedGradients.ZERO)
        return found[0], found[1].numpy().tolist(), zeros[1].numpy().tolist()

    assert returned(run_ranks(2, step)) == [(None, [3.0], [0.5])] * 2


def test_rows_travel_dense_when_that_is_asked_for():
    def step(rank):
        table = tf.Variable(tf.ones([3, 1]))
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [rank]))
        found = hvd.DistributedGradientTape(tape, sparse_as_dense=True).gradient(loss, table)
        assert isinstance(found, tf.Tensor)
        return found.numpy().ravel().tolist()

    assert returned(run_ranks(2, step)) == [[0.5, 0.5, 0.0]] * 2


@pytest.mark.parametrize("run_eagerly", [False, True], ids=["function", "eager"])
def test_two_ranks_that_fit_half_the_batch_each_become_what_one_with_all_of_it_becomes(run_eagerly):
    def train(rank, size):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.05))
        model = linear(keras, optimizer, seed=rank, run_eagerly=run_eagerly)
        callbacks = [
            hvd.keras.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.keras.callbacks.MetricAverageCallback(),
            hvd.keras.callbacks.LearningRateWarmupCallback(0.05, warmup_epochs=1, steps_per_epoch=1),
        ]
        history = model.fit(
            *data(rank, size), batch_size=SAMPLES // size, epochs=3, verbose=0, callbacks=callbacks
        ).history
        return weights(model), history["loss"], history["lr"]

    (alone,) = returned(run_ranks(1, train, 1))
    first, second = returned(run_ranks(2, train, 2))
    for ours, other, theirs in zip(first[0], second[0], alone[0], strict=True):
        np.testing.assert_array_equal(ours, other)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert first[1:] == second[1:]
    np.testing.assert_allclose(first[1], alone[1], rtol=1e-5)


def test_of_ten_steps_with_four_passes_two_are_updates_and_all_ten_are_counted():
    def steps(rank):
        weight = tf.Variable([0.0, 0.0])
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=4, average_aggregated_gradients=True
        )

        @tf.function
        def step():
            optimizer.apply_gradients([(tf.fill([2], -2.0 * rank), weight)])

        seen = []
        for _ in range(10):
            step()
            seen.append(float(weight[0]))
        return seen, int(optimizer.iterations)

    assert returned(run_ranks(2, steps)) == [([0.0] * 3 + [1.0] * 4 + [2.0] * 3, 10)] * 2


def test_an_embedding_trains_in_a_function_with_its_rows_gathered():
    def train(rank):
        initializer = keras.initializers.RandomNormal(seed=3)
        layers = [keras.layers.Embedding(5, 2, embeddings_initializer=initializer), keras.layers.Flatten()]
        model = keras.Sequential([keras.Input((1,)), *layers, keras.layers.Dense(1, kernel_initializer=initializer)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.5)), loss="mse")
        model.fit(np.array([[rank], [4]]), np.ones((2, 1)), batch_size=2, epochs=2, verbose=0)
        return [array.tolist() for array in weights(model)]

    first, second = returned(run_ranks(2, train))
    assert first == second


def test_momentum_that_is_compiled_into_a_graph_is_not_corrected_and_that_is_said():
    def train(rank):
        model = linear(keras, keras.optimizers.SGD(0.1, momentum=0.9))
        callback = hvd.keras.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.5**epoch)
        callback.set_model(model)
        with pytest.warns(UserWarning, match="momentum_correction has no effect"):
            callback.on_train_begin()
        return callback.momentum_correction

    assert returned(run_ranks(1, train)) == [False]


def test_an_optimizer_of_sessions_computes_averages_and_applies_them():
    def train(rank):
        with tf.Graph().as_default(), v1.Session() as session:
            table = v1.get_variable("table", initializer=tf.ones([3, 1]))
            factor = v1.get_variable("factor", initializer=2.0 + rank)
            loss = tf.reduce_sum(tf.gather(table, [rank])) * factor
            optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
            train_op = optimizer.minimize(loss)
            session.run(v1.global_variables_initializer())
            session.run(hvd.broadcast_global_variables(1))
            assert session.run(factor) == 3.0
            session.run(train_op)
            return session.run(table).ravel().tolist(), float(session.run(factor))

    assert returned(run_ranks(2, train)) == [([-0.5, -0.5, 1.0], 2.0)] * 2


@pytest.mark.parametrize(("ranks", "divides"), [(2, False), (4, True)])
@pytest.mark.parametrize("mode", ["graph", "function", "eager"])
def test_an_optimizer_of_tf1_makes_two_updates_in_ten_passes_of_four_a_step_and_counts_all_ten(mode, ranks, divides):
    def train(rank):
        with contextlib.ExitStack() as stack:
            if mode == "graph":
                stack.enter_context(tf.Graph().as_default())
                session = stack.enter_context(v1.Session())
            shared, rows, local = variables = [tf.Variable(tf.zeros(shape)) for shape in ([2], [ranks, 1], [1])]
            count = tf.Variable(0, dtype=tf.int64)
            # It has slots, which no branch of a graph can make; without momentum its rule is plain descent.
            optimizer = hvd.DistributedOptimizer(
                v1.train.MomentumOptimizer(1.0, 0.0), backward_passes_per_step=4, average_aggregated_gradients=divides
            )
            optimizer.register_local_var(local)

            def step(factor):
                def loss():
                    of_rows = tf.reduce_sum(tf.gather(rows, [rank, rank]))
                    return factor * (rank * tf.reduce_sum(shared) + of_rows + 2.0 * tf.reduce_sum(local))

                return optimizer.apply_gradients(optimizer.compute_gradients(loss, variables), count)

            if mode == "graph":
                factor = v1.placeholder(tf.float32, [])
                op = step(factor)
                session.run([v1.global_variables_initializer(), v1.local_variables_initializer()])
                run, values_of = (lambda given: session.run(op, {factor: given})), session.run
            else:
                run, values_of = (tf.function(lambda given: [step(given)][:0]) if mode == "function" else step), list
            seen = []
            for factor_of_pass in range(1, 11):
                run(np.float32(factor_of_pass) if mode == "graph" else tf.constant(float(factor_of_pass)))
                seen.append([np.array(one).ravel().tolist() for one in values_of([*variables, count])])
            return seen

    def after(passes):
        # The factors of the first four passes add up to 10, those of the next four to 26.
        total = {0: 0.0, 1: 10.0, 2: 36.0}[passes // 4] / (4 if divides else 1)
        mean = total * (ranks - 1) / 2
        return [[-mean] * 2, [-2.0 * total / ranks] * ranks, [-2.0 * total / ranks], [passes]]

    assert returned(run_ranks(ranks, train)) == [[after(passes) for passes in range(1, 11)]] * ranks


def test_the_hook_gives_all_sessions_the_variables_of_the_root():
    def train(rank):
        with tf.Graph().as_default():
            variable = v1.get_variable("v", initializer=[rank + 1.0])
            with v1.train.MonitoredTrainingSession(hooks=[hvd.BroadcastGlobalVariablesHook(1)]) as session:
                return session.run(variable).tolist()

    assert returned(run_ranks(2, train)) == [[2.0]] * 2


def test_xla_compiles_no_operation():
    def operate(rank):
        with pytest.raises(tf.errors.InvalidArgumentError, match="unsupported operations"):
            tf.function(lambda: hvd.allreduce(tf.ones(2)), jit_compile=True)()
        return linear(keras, hvd.DistributedOptimizer(keras.optimizers.SGD())).jit_compile

    assert returned(run_ranks(1, operate)) == [False]


def test_what_cannot_be_done_is_refused_with_a_reason():
    with pytest.raises(RuntimeError, match=r"use broadcast_variables\("):
        hvd.broadcast_global_variables(0)
    with pytest.raises(TypeError, match="of Keras 3 or of tf.compat.v1.train, not a str"):
        hvd.DistributedOptimizer("adam")
    with pytest.raises(ValueError, match="one backward pass per step"):
        hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), backward_passes_per_step=2, op=hvd.Adasum)
    optimizer = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(optimizer)
    with tf.GradientTape() as tape:
        pass
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tape))
    with pytest.raises(TypeError, match="takes a tf.GradientTape, got builtins.list"):
        hvd.DistributedGradientTape([tape])


def test_local_layers_keep_their_gradients_which_are_divided_by_the_number_of_ranks():
    def step(rank):
        shared, local = keras.layers.Dense(1, use_bias=False), keras.layers.Dense(1, use_bias=False)
        model = keras.Sequential([keras.Input((1,)), shared, local])
        model.set_weights([np.array([[1.0]]), np.array([[1.0]])])

        def found(**options):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(tf.constant([[rank + 1.0]])))
            tape = hvd.PartialDistributedGradientTape(tape, local_layers=local, **options)
            pairs = tape.get_local_and_global_gradients(loss, model.trainable_variables)
            return [[float(gradient[0, 0]) for _, gradient in part] for part in pairs]

        return found(), found(scale_local_gradients=False)

    # Both gradients are the input, 1 and 2: halved where local, 1.5 on average.
    assert returned(run_ranks(2, step)) == [([[0.5], [1.5]], [[1.0], [1.5]]), ([[1.0], [1.5]], [[2.0], [1.5]])]


def test_an_optimizer_of_sessions_keeps_local_variables_and_combines_steps_by_adasum():
    def train(rank, op, is_local):
        with tf.Graph().as_default(), v1.Session() as session:
            weight = v1.get_variable("weight", initializer=tf.constant([5.0, 5.0]))
            loss = tf.reduce_sum(weight * tf.one_hot(rank, 2))
            optimizer = hvd.DistributedOptimizer(v1.train.MomentumOptimizer(1.0, 0.9), op=op)
            if is_local:
                optimizer.register_local_var(weight)
            train_op = optimizer.minimize(loss)
            session.run(v1.global_variables_initializer())
            session.run(train_op)
            return session.run(weight).tolist()

    # Orthogonal changes are added; a mean would be half of them.
    assert returned(run_ranks(2, train, hvd.Adasum, False)) == [[4.0, 4.0]] * 2
    assert returned(run_ranks(2, train, hvd.Average, False)) == [[4.5, 4.5]] * 2
    assert returned(run_ranks(2, train, hvd.Average, True)) == [[4.5, 5.0], [5.0, 4.5]]


def test_adasum_is_of_the_gradients_of_a_tape_and_of_the_steps_of_an_optimizer_of_keras():
    def train(rank):
        weight = tf.Variable([5.0, 5.0])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(weight * tf.one_hot(rank, 2))
        found = hvd.DistributedGradientTape(tape, op=hvd.Adasum).gradient(loss, weight)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5), op=hvd.Adasum)
        optimizer.apply([tf.one_hot(rank, 2)], [weight])
        return found.numpy().tolist(), weight.numpy().tolist()

    # Orthogonal ones are added; means would be halves and 4.75.
    assert returned(run_ranks(2, train)) == [([1.0, 1.0], [4.5, 4.5])] * 2


def test_two_optimizers_of_one_class_step_in_one_run_of_a_session():
    def train(rank):
        with tf.Graph().as_default(), v1.Session() as session:
            weights = [v1.get_variable(f"weight{i}", initializer=tf.zeros(i + 1)) for i in range(2)]
            steps = [
                hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0)).minimize(
                    tf.reduce_sum(weight) * (rank + 1.0), var_list=[weight]
                )
                for weight in weights
            ]
            session.run(v1.global_variables_initializer())
            session.run(steps)
            return [array.tolist() for array in session.run(weights)]

    assert returned(run_ranks(2, train)) == [[[-1.5], [-1.5, -1.5]]] * 2


def test_a_process_set_trains_together_and_other_ranks_alone():
    def step(rank):
        pair = hvd.add_process_set([0, 1])
        weight = tf.Variable([1.0])
        with tf.GradientTape() as tape:
            loss = weight * (rank + 1.0)
        (found,) = hvd.DistributedGradientTape(tape, process_set=pair).gradient(loss, [weight])
        if rank == 2:
            call = partial(hvd.allreduce, weight, process_set=pair)
            errors = tf.errors.InvalidArgumentError
            for made, kind in ((call, ProcessSetError), (call, errors), (tf.function(call), errors)):
                with pytest.raises(kind, match="rank 2 is not in process set"):
                    made()
        sgd = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=pair)
        sgd.apply([tf.constant([rank + 1.0])], [weight])
        with tf.Graph().as_default(), v1.Session() as session:
            other = v1.get_variable("weight", initializer=[1.0])
            sgd = hvd.DistributedOptimizer(v1.train.GradientDescentOptimizer(1.0), process_set=pair)
            train_op = sgd.minimize(other * (rank + 1.0))
            session.run(v1.global_variables_initializer())
            session.run(train_op)
            applied = session.run(other)
        return [one.tolist() for one in (found.numpy(), weight.numpy(), applied)]

    assert returned(run_ranks(3, step)) == [[[1.5], [-0.5], [-0.5]]] * 2 + [[[3.0], [-2.0], [-2.0]]]


@pytest.mark.parametrize("groups", [0, -1, "two"])
def test_groups_are_numbers_or_lists_of_variables(groups):
    def make(rank):
        hvd.DistributedGradientTape(tf.GradientTape(), groups=2)
        hvd.DistributedGradientTape(tf.GradientTape(), groups=[[tf.Variable(1.0)]])
        with pytest.raises(ValueError, match="must be a positive number, or a list"):
            hvd.DistributedGradientTape(tf.GradientTape(), groups=groups)
        with pytest.warns(DeprecationWarning, match="num_groups"):
            hvd.DistributedGradientTape(tf.GradientTape(), num_groups=2)
        return True

    assert returned(run_ranks(1, make)) == [True]


def test_batches_of_all_ranks_are_normalised_as_one():
    """The oracle is Keras' own layer with the whole batch; float32, sums in another order."""
    x = np.random.default_rng(0).normal(3.0, 2.0, (8, 5)).astype(np.float32)
    up = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)

    def normalise(layer, rows, upstream):
        inputs = tf.constant(rows)
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = layer(inputs, training=True)
        gradients = tape.gradient(result, [inputs, *layer.trainable_variables], tf.constant(upstream))
        return [np.array(one) for one in (result, *gradients, *layer.non_trainable_variables)]

    def train(rank):
        return normalise(hvd.SyncBatchNormalization(momentum=0.5), x[rank * 4 :][:4], up[rank * 4 :][:4])

    whole = normalise(keras.layers.BatchNormalization(momentum=0.5), x, up)
    ranks = returned(run_ranks(2, train))
    for i, join in enumerate([np.concatenate, np.concatenate, sum, sum, np.mean, np.mean]):
        parts = [rank[i] for rank in ranks]
        ours = join(parts, axis=0) if join is np.mean else join(parts)
        np.testing.assert_allclose(ours, whole[i], rtol=1e-4, atol=1e-5)


def test_ranks_count_equally_in_a_normalisation_whatever_their_batches():
    def train(rank):
        layer = hvd.SyncBatchNormalization(momentum=0.0)
        layer(tf.constant([[4.0]] * 3 if rank else [[0.0]]), training=True)
        return layer.moving_mean.numpy().tolist(), layer.moving_variance.numpy().tolist()

    assert returned(run_ranks(2, train)) == [([2.0], [4.0])] * 2


def test_normalisation_over_ranks_is_saved_and_is_not_fused():
    layer = hvd.SyncBatchNormalization(momentum=0.5)
    assert keras.layers.deserialize(keras.layers.serialize(layer)).momentum == 0.5
    with pytest.raises(ValueError, match="fused=True"):
        hvd.SyncBatchNormalization(fused=True)


def test_compressions_cast_tensors_of_tensorflow():
    for compression, dtype in ((hvd.Compression.fp16, tf.float16), (hvd.Compression.bf16, tf.bfloat16)):
        small, ctx = compression.compress(tf.ones(2, tf.float64))
        assert (small.dtype, compression.decompress(small, ctx).dtype) == (dtype, tf.float64)
        assert compression.compress(tf.ones(2, tf.int32))[0].dtype == tf.int32


def test_elastic_training_is_refused_by_its_name():
    for module in (hvd, hvd.keras):
        with pytest.raises(NotImplementedError, match=f"{module.__name__}.elastic is not offered".replace(".", "[.]")):
            _ = module.elastic.run
