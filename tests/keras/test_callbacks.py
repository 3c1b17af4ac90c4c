"""The callbacks: Horovod's formulas to the number, and equal models on all ranks."""

from __future__ import annotations

import types

import numpy as np
import pytest
import torch

from kvdist.errors import CollectiveMismatch
from tests.collective.ranks import returned, run_ranks
from tests.keras.models import data, linear, of_keras, weights

pytestmark = of_keras


class Watch:
    """Makes a callback that keeps what it sees of the optimizer in every batch."""

    def __new__(cls, keras, model):
        seen = types.SimpleNamespace(rates=[], momenta=[], logs=[])

        class Watching(keras.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.rates.append(float(model.optimizer.learning_rate))
                seen.momenta.append(model.optimizer.momentum)

            def on_epoch_end(self, epoch, logs=None):
                seen.logs.append(dict(logs))

        seen.callback = Watching()
        return seen


def trained(keras, optimizer, callbacks, epochs, steps=5):
    """What a watch saw that stands before the callbacks' ends of batches."""
    model = linear(keras, optimizer)
    watch = Watch(keras, model)
    x, y = data()
    callbacks = [watch.callback, *callbacks]
    model.fit(x[: 2 * steps], y[: 2 * steps], batch_size=2, epochs=epochs, verbose=0, callbacks=callbacks)
    return watch


def test_the_warm_up_of_four_ranks_begins_and_ends_with_horovods_numbers(keras, hvd):
    def warm_up(rank):
        callback = hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.4, warmup_epochs=5)
        return trained(keras, keras.optimizers.SGD(0.4), [callback], 6).rates

    rates = returned(run_ranks(4, warm_up))
    assert rates[0] == rates[1] == rates[2] == rates[3]
    single = np.float32
    expected = [single(0.1 * ((i + 1) / 5 * 3 / 5 + 1)) for i in range(25)]
    np.testing.assert_allclose(rates[0][:25], expected, rtol=1e-6)
    assert rates[0][0] == single(0.112)
    assert rates[0][24:] == [single(0.4)] * 6


def test_a_rate_of_twenty_epochs_is_a_warm_up_two_stairs_and_a_line(keras, hvd):
    schedule, warm_up = hvd.callbacks.LearningRateScheduleCallback, hvd.callbacks.LearningRateWarmupCallback

    def train(rank):
        callbacks = [
            warm_up(0.4, warmup_epochs=5),
            schedule(0.4, lambda epoch: 0.1, start_epoch=5, end_epoch=10),
            schedule(0.4, 0.5, start_epoch=10, end_epoch=15),
            schedule(0.4, lambda epoch: epoch / 100, start_epoch=15, end_epoch=20, staircase=False),
        ]
        return trained(keras, keras.optimizers.SGD(0.4), callbacks, 21, steps=2).rates

    first, second = returned(run_ranks(2, train))
    assert first == second
    by_epoch = np.array(first).reshape(21, 2)
    np.testing.assert_allclose(by_epoch[:5].ravel(), [0.2 * ((i + 1) / 2 / 5 + 1) for i in range(10)], rtol=1e-6)
    np.testing.assert_allclose(by_epoch[5:10], 0.04, rtol=1e-6)
    np.testing.assert_allclose(by_epoch[10:15, 0], [0.4 * 0.5**i for i in range(5)], rtol=1e-6)
    np.testing.assert_allclose(by_epoch[15:20].ravel(), [0.004 * (15 + i / 2) for i in range(10)], rtol=1e-6)
    assert by_epoch[20].tolist() == [by_epoch[19, 1]] * 2


@pytest.mark.parametrize("corrects", [True, False])
def test_momentum_is_corrected_in_the_batch_in_which_the_rate_changes_and_only_there(keras, hvd, corrects):
    def train(rank):
        callback = hvd.callbacks.LearningRateScheduleCallback(
            0.2, lambda epoch: 0.5**epoch, momentum_correction=corrects
        )
        return trained(keras, keras.optimizers.SGD(0.2, momentum=0.8), [callback], 2, steps=3).momenta

    (momenta,) = returned(run_ranks(1, train))
    np.testing.assert_allclose(momenta, [0.8, 0.8, 0.8, 0.4 if corrects else 0.8, 0.8, 0.8], rtol=1e-6)


def test_the_rate_is_logged_under_both_names(keras, hvd):
    def train(rank):
        model = linear(keras, keras.optimizers.SGD(0.25))
        callback = hvd.callbacks.LearningRateScheduleCallback(0.25, lambda epoch: 1 / (epoch + 1))
        history = model.fit(*data(), epochs=2, verbose=0, callbacks=[callback]).history
        return history["lr"], history["learning_rate"]

    assert returned(run_ranks(1, train)) == [([0.25, 0.125], [0.25, 0.125])]


def test_the_end_of_a_warm_up_is_told_by_rank_0_alone(keras, hvd, capsys):
    def train(rank):
        callback = hvd.callbacks.LearningRateWarmupCallback(0.4, warmup_epochs=2, verbose=1)
        trained(keras, keras.optimizers.SGD(0.4), [callback], 3)

    returned(run_ranks(2, train))
    said = [line for line in capsys.readouterr().out.splitlines() if line]
    assert said == ["Epoch 2: finished gradual learning rate warmup to 0.4."]


def test_a_warm_up_of_unknown_length_says_what_is_missing(keras, hvd):
    callback = hvd.callbacks.LearningRateWarmupCallback(0.4)
    callback.set_model(linear(keras, "sgd"))
    callback.set_params({"steps": None})
    with pytest.raises(ValueError, match=r"LearningRateWarmupCallback\(steps_per_epoch=...\)"):
        callback.on_train_begin()
    with pytest.raises(ValueError, match="initial_lr is None"):
        hvd.callbacks.LearningRateScheduleCallback(None, 0.1)


def test_metrics_become_the_mean_of_the_ranks_in_place_and_before_later_callbacks(keras, hvd):
    def end(rank):
        logs = {"loss": rank + 1.0, "accuracy": torch.tensor(rank / 2), "of_classes": np.array([rank, 4.0])}
        callback = hvd.callbacks.MetricAverageCallback()
        callback.on_epoch_end(0, logs)
        callback.on_epoch_end(1, {})
        return logs["loss"], logs["accuracy"], logs["of_classes"].tolist()

    assert returned(run_ranks(2, end)) == [(1.5, 0.25, [0.5, 4.0])] * 2


def test_ranks_with_other_metrics_get_an_error_that_names_them(keras, hvd):
    def end(rank):
        hvd.callbacks.MetricAverageCallback().on_epoch_end(0, {"loss": 1.0, ("val_loss" if rank else "accuracy"): 2.0})

    first, second = run_ranks(2, end)
    assert isinstance(first, CollectiveMismatch) and str(first) == str(second)
    assert "metrics accuracy, loss" in str(first) and "metrics loss, val_loss" in str(first)


def test_weights_and_the_optimizers_state_become_those_of_the_root_before_the_first_step(keras, hvd):
    def train(rank):
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.01 * (rank + 1)))
        model = linear(keras, optimizer, seed=rank)
        if rank == 1:  # as after loading a checkpoint
            model.optimizer.build(model.trainable_variables)
            model.optimizer.iterations.assign(7)
        before = weights(model)
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(1)]
        model.fit(*data(rank, 2), batch_size=6, epochs=1, verbose=0, callbacks=callbacks)
        return before, weights(model), int(optimizer.iterations), float(optimizer.learning_rate)

    (other, first, *of_first), (root, second, *of_second) = returned(run_ranks(2, train))
    assert not np.array_equal(other[0], root[0])
    for ours, theirs in zip(first, second, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert of_first == of_second == [9, pytest.approx(0.02)]


def test_a_model_may_be_broadcast_without_a_callback(keras, hvd):
    def broadcast(rank):
        model = linear(keras, keras.optimizers.Adam(0.1), seed=rank)
        model.optimizer.build(model.trainable_variables)
        model.optimizer.iterations.assign(rank + 3)
        hvd.broadcast_global_variables(1, model)
        return [array.tolist() for array in weights(model)], int(model.optimizer.iterations)

    root = [array.tolist() for array in weights(linear(keras, "sgd", seed=1))]
    assert returned(run_ranks(2, broadcast)) == [(root, 4)] * 2


def test_a_rank_that_has_made_other_models_before_trains_with_the_others(keras, hvd):
    def train(rank):
        if rank == 0:
            linear(keras, keras.optimizers.Adam(0.1))
        model = linear(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.1)), seed=rank)
        model.fit(*data(rank, 2), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        return weights(model)[0].tolist()

    first, second = returned(run_ranks(2, train))
    assert first == second


def test_where_a_model_is_not_built_all_ranks_broadcast_after_the_first_batch(keras, hvd):
    def train(rank):
        initializer = keras.initializers.RandomNormal(seed=rank)
        model = keras.Sequential([keras.layers.Dense(1, kernel_initializer=initializer)])
        model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), loss="mse")
        if rank == 0:  # as after loading a checkpoint
            model.build((None, 3))
        callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        callback.set_model(model)
        callback.on_train_begin()
        if rank == 1:
            model.build((None, 3))
        before = weights(model)[0]
        model.optimizer.apply([torch.zeros(3, 1), torch.zeros(1)], model.trainable_variables)
        callback.on_train_batch_end(0)
        after = weights(model)[0]
        callback.on_train_batch_end(1)
        return before, after

    (first, first_after), (second, second_after) = returned(run_ranks(2, train))
    assert not np.array_equal(first, second)
    np.testing.assert_array_equal(first_after, first)
    np.testing.assert_array_equal(second_after, first)


def test_local_variables_stay_each_ranks_own(keras, hvd):
    def train(rank):
        model = linear(keras, hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)))
        kernel, bias = model.weights
        kernel.assign(np.full((3, 1), float(rank)))
        bias.assign([float(rank)])
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(1, local_variables=[bias])]
        model.fit(*data(rank, 2), verbose=0, callbacks=callbacks)
        return [array.ravel().tolist() for array in weights(model)]

    assert returned(run_ranks(2, train)) == [[[1.0] * 3, [0.0]], [[1.0] * 3, [1.0]]]


def test_the_optimizer_that_keras_put_into_a_loss_scale_gives_way_to_that_one(keras, hvd):
    def train(rank):
        inner = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        model = linear(keras, inner)
        model.optimizer = outer = keras.optimizers.LossScaleOptimizer(inner)  # as compile() does for half precision
        model.fit(*data(rank, 2), verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
        assert model.optimizer is outer
        return type(outer).__mro__[1].__name__, type(inner).__mro__[1].__name__, weights(model)[0].tolist()

    first, second = returned(run_ranks(2, train))
    assert first == second
    assert first[0] == "Distributing" and first[1] != "Distributing"


def test_a_model_in_torchs_own_data_parallelism_is_refused(keras, hvd):
    model = linear(keras, "sgd")
    model.ddp_model = torch.nn.Identity()
    callback = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
    callback.set_model(model)
    with pytest.raises(ValueError, match="do not call torch.distributed.init_process_group"):
        callback.on_train_begin()


def test_the_best_model_is_written_by_rank_0_alone(keras, hvd, tmp_path):
    def train(rank):
        model = linear(keras, "sgd")
        best = hvd.callbacks.BestModelCheckpoint("loss", filepath=tmp_path / f"{rank}.keras")
        model.fit(*data(), verbose=0, callbacks=[best])

    returned(run_ranks(2, train))
    assert [path.name for path in tmp_path.iterdir()] == ["0.keras"]
    best = hvd.callbacks.BestModelCheckpoint("loss", 1, "max", 5)  # in the order of horovod.keras
    assert (best.mode, best.save_freq) == ("max", 5)


def test_the_best_weights_are_written_alone(keras, hvd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train(rank):
        model = linear(keras, "sgd")
        model.fit(*data(), verbose=0, callbacks=[hvd.callbacks.BestModelCheckpoint("loss", save_weights_only=True)])
        return weights(model)

    ((kernel, bias),) = returned(run_ranks(1, train))
    again = linear(keras, "sgd", seed=5)
    again.load_weights(tmp_path / "best_model.weights.h5")
    assert [kernel.tolist(), bias.tolist()] == [array.tolist() for array in weights(again)]
