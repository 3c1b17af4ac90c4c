"""Keras' optimizers that average gradients over ranks, on the torch backend."""

from __future__ import annotations

import importlib

import numpy as np
import pytest
import torch

from kvdist.errors import CollectiveMismatch
from tests.collective.ranks import returned, run_ranks
from tests.keras.models import SAMPLES, data, linear, of_keras, weights

pytestmark = of_keras


def variables(keras, *shapes):
    return [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]


@pytest.mark.parametrize("name", ["SGD", "Adam", "RMSprop", "Adagrad", "Ftrl", "Lamb"])
def test_two_ranks_with_half_the_batch_each_become_what_one_with_all_of_it_becomes(keras, hvd, name):
    def train(rank, size):
        optimizer = getattr(keras.optimizers, name)(learning_rate=0.05)
        model = linear(keras, hvd.DistributedOptimizer(optimizer))
        model.fit(*data(rank, size), batch_size=SAMPLES // size, epochs=3, verbose=0)
        return weights(model)

    (alone,) = returned(run_ranks(1, train, 1))
    first, second = returned(run_ranks(2, train, 2))
    for ours, other, theirs in zip(first, second, alone, strict=True):
        np.testing.assert_array_equal(ours, other)
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_the_wrapped_optimizer_is_the_same_object_with_its_state_and_the_name_of_its_class(keras, hvd):
    plain = keras.optimizers.Adam(0.1)
    model = linear(keras, plain)
    model.fit(*data(), epochs=2, verbose=0)
    before = [np.array(variable) for variable in map(keras.ops.convert_to_numpy, plain.variables)]
    wrapped = hvd.DistributedOptimizer(plain)
    assert wrapped is plain and type(wrapped).__name__ == "Adam" and isinstance(wrapped, keras.optimizers.Adam)
    assert int(wrapped.iterations) == 2
    for variable, array in zip(wrapped.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(variable), array)


def test_op_predivide_and_compression_reach_the_operation(keras, hvd):
    def step(rank, options):
        (weight,) = variables(keras, (3,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.apply([torch.full((3,), rank + 1.0)], [weight])
        return keras.ops.convert_to_numpy(weight).tolist()

    assert returned(run_ranks(2, step, {"op": hvd.Sum})) == [[-3.0] * 3] * 2
    assert returned(run_ranks(2, step, {})) == [[-1.5] * 3] * 2
    assert returned(run_ranks(2, step, {"gradient_predivide_factor": 4.0})) == [[-1.5] * 3] * 2
    assert returned(run_ranks(2, step, {"compression": hvd.Compression.fp16})) == [[-1.5] * 3] * 2


def test_a_gradient_that_is_none_on_one_rank_counts_as_zeros(keras, hvd):
    def step(rank):
        pair = variables(keras, (2,), (3,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.apply([torch.ones(2), None if rank else torch.full((3,), 4.0)], pair)
        return [keras.ops.convert_to_numpy(one).tolist() for one in pair]

    assert returned(run_ranks(2, step)) == [[[-1.0, -1.0], [-2.0, -2.0, -2.0]]] * 2


def test_the_gradients_that_were_given_are_not_changed(keras, hvd):
    def step(rank):
        gradient = torch.full((3,), float(rank))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.apply([gradient], variables(keras, (3,)))
        return gradient.tolist()

    assert returned(run_ranks(2, step)) == [[0.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(("divides", "update"), [(True, 1.0), (False, 4.0)])
def test_of_ten_steps_with_four_passes_two_are_updates_and_all_ten_are_counted(keras, hvd, divides, update):
    def steps(rank):
        (weight,) = variables(keras, (2,))
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(1.0), backward_passes_per_step=4, average_aggregated_gradients=divides
        )
        seen = []
        for _ in range(10):
            optimizer.apply([torch.full((2,), -2.0 * rank)], [weight])
            seen.append(float(keras.ops.convert_to_numpy(weight)[0]))
        return seen, int(optimizer.iterations)

    expected = [0.0] * 3 + [update] * 4 + [2 * update] * 3
    assert returned(run_ranks(2, steps)) == [(expected, 10)] * 2


def test_one_rank_that_overflows_makes_all_of_them_skip_the_step(keras, hvd):
    def step(rank):
        (weight,) = variables(keras, (2,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 4.0))
        optimizer.apply([torch.tensor([4.0, float("inf") if rank else 4.0])], [weight])
        skipped = keras.ops.convert_to_numpy(weight).tolist()
        scale = float(optimizer.dynamic_scale)
        optimizer.apply([torch.tensor([2.0, 2.0 + 4 * rank])], [weight])
        return skipped, scale, keras.ops.convert_to_numpy(weight).tolist()

    assert returned(run_ranks(2, step)) == [([0.0, 0.0], 2.0, [-1.0, -2.0])] * 2


def test_ranks_with_different_gradients_get_an_error_each(keras, hvd):
    def step(rank):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0)).apply(
            [torch.ones(2)] * (rank + 1), variables(keras, *[(2,)] * (rank + 1))
        )

    first, second = run_ranks(2, step)
    assert isinstance(first, CollectiveMismatch) and str(first) == str(second)
    assert "'gradients of SGD' of float32[2], float32[2] (Average)" in str(first), first


def test_what_cannot_be_wrapped_is_refused_with_a_reason(keras, hvd):
    with pytest.raises(TypeError, match="takes an optimizer of Keras 3, not a SGD"):
        hvd.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], 0.1))
    wrapped = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(wrapped)
    with pytest.raises(ValueError, match="at least 1"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=0)
    with pytest.raises(ValueError, match="use one of them"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0, gradient_accumulation_steps=2), backward_passes_per_step=2)
    with pytest.raises(ValueError, match="is for op=Average"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=hvd.Sum, gradient_predivide_factor=2.0)
    with pytest.raises(ValueError, match="Average, Sum or Adasum"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), op=4)


def test_a_missing_gradient_without_variables_is_refused(keras, hvd):
    def step(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0))
        optimizer.build(variables(keras, (2,)))
        with pytest.raises(ValueError, match="pass the variables"):
            optimizer.apply([None])

    returned(run_ranks(2, step))


def test_local_variables_keep_their_own_gradients(keras, hvd):
    def step(rank, options):
        shared, local = variables(keras, (1,), (1,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.register_local_var(local)
        optimizer.apply([torch.full((1,), rank + 1.0)] * 2, [shared, local])
        return [keras.ops.convert_to_numpy(one).tolist() for one in (shared, local)]

    assert returned(run_ranks(2, step, {})) == [[[-1.5], [-0.5]], [[-1.5], [-1.0]]]
    assert returned(run_ranks(2, step, {"scale_local_gradients": False})) == [[[-1.5], [-1.0]], [[-1.5], [-2.0]]]


def test_the_layers_of_a_partial_optimizer_are_local(keras, hvd):
    def train(rank):
        first, second = keras.layers.Dense(2), keras.layers.Dense(1)
        model = keras.Sequential([keras.Input((3,)), first, second])
        optimizer = hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=[first])
        model.compile(optimizer=optimizer, loss="mse")
        local = hvd.callbacks.BroadcastGlobalVariablesCallback(0, local_variables=first.trainable_weights)
        model.fit(*data(rank, 2), verbose=0, callbacks=[local])
        return weights(model)

    first, second = returned(run_ranks(2, train))
    assert [np.array_equal(one, other) for one, other in zip(first, second, strict=True)] == [False, False, True, True]


def test_local_layers_are_layers_and_built(keras, hvd):
    with pytest.raises(ValueError, match="takes layers of Keras, not a str"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=["dense"])
    with pytest.raises(ValueError, match="has no variables yet"):
        hvd.PartialDistributedOptimizer(keras.optimizers.SGD(0.1), local_layers=keras.layers.Dense(1))


def test_adasum_adds_steps_that_are_orthogonal_and_averages_parallel_ones(keras, hvd):
    def step(rank, gradients):
        (weight,) = variables(keras, (2,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.5), op=hvd.Adasum)
        optimizer.apply([torch.tensor(gradients[rank])], [weight])
        return keras.ops.convert_to_numpy(weight).tolist()

    # The first step of Adam is the learning rate, whatever the gradient: the changes are combined, not the gradients.
    for gradients, expected in (([[3.0, 0.0], [0.0, 7.0]], [-0.5, -0.5]), ([[3.0, 3.0], [7.0, 7.0]], [-0.5, -0.5])):
        for found in returned(run_ranks(2, step, gradients)):
            np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_ranks_outside_the_process_set_use_their_own_gradients(keras, hvd):
    def step(rank):
        (weight,) = variables(keras, (1,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=hvd.add_process_set([0, 1]))
        optimizer.apply([torch.full((1,), rank + 1.0)], [weight])
        return keras.ops.convert_to_numpy(weight).tolist()

    assert returned(run_ranks(3, step)) == [[-1.5], [-1.5], [-3.0]]


def test_arguments_have_horovods_order(keras, hvd):
    def step(rank):
        (weight,) = variables(keras, (1,))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), *plain, 0, None)
        optimizer.apply([torch.full((1,), rank + 1.0)], [weight])
        return keras.ops.convert_to_numpy(weight).tolist()

    plain = (None, "", "", hvd.Compression.none, False, 1.0, hvd.Average)
    assert returned(run_ranks(2, step)) == [[-1.5]] * 2
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), *plain, 2)


def test_groups_of_gradients_are_checked(keras, hvd):
    with pytest.raises(ValueError, match="groups is 0; it must be a positive number"):
        hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), groups=0)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        assert hvd.DistributedOptimizer(keras.optimizers.SGD(0.1), num_groups=2) is not None


def test_another_backend_of_keras_is_refused_with_what_to_set(keras, hvd, monkeypatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(ImportError, match="and the backend is 'jax': set KERAS_BACKEND=torch"):
        importlib.reload(hvd)
