"""What is saved of a distributed optimizer is what Keras saves of the optimizer."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest

from tests.collective.ranks import returned, run_ranks
from tests.keras.models import data, linear, of_keras, weights

pytestmark = of_keras


def states(keras, optimizer):
    return [np.array(keras.ops.convert_to_numpy(variable)) for variable in optimizer.variables]


def saved(keras, hvd, path, rank=0):
    """A model with a distributed Adam after some steps, saved by one rank."""
    model = linear(keras, hvd.DistributedOptimizer(keras.optimizers.Adam(0.05)))
    model.fit(*data(rank, 2), batch_size=4, epochs=2, verbose=0)
    if rank == 0:
        model.save(path)
    hvd.broadcast(0, 0)  # nobody goes on before it is there
    return model


def test_a_model_is_loaded_with_its_optimizer_distributed_and_goes_on_as_if_never_saved(keras, hvd, tmp_path):
    path = tmp_path / "model.keras"

    def train(rank):
        model = saved(keras, hvd, path, rank)
        loaded = hvd.load_model(path)
        assert loaded.optimizer.__class__.__mro__[1].__name__ == "Distributing"
        for was, now in zip(states(keras, model.optimizer), states(keras, loaded.optimizer), strict=True):
            np.testing.assert_array_equal(was, now)
        for one in (model, loaded):
            one.fit(*data(rank, 2), batch_size=4, shuffle=False, verbose=0)
        return weights(model)[0].tolist(), weights(loaded)[0].tolist()

    first, second = returned(run_ranks(2, train))
    assert first == second and first[0] == first[1]


def test_keras_alone_loads_what_was_saved_and_nothing_in_it_names_this_library(keras, hvd, tmp_path):
    path = tmp_path / "model.keras"
    returned(run_ranks(2, lambda rank: saved(keras, hvd, path, rank) and None))
    loaded = keras.saving.load_model(path)
    assert isinstance(loaded.optimizer, keras.optimizers.Adam)
    assert int(loaded.optimizer.iterations) == 6
    with zipfile.ZipFile(path) as archive:
        config = json.loads(archive.read("config.json"))
    assert config["compile_config"]["optimizer"]["module"] == "keras.optimizers"
    assert "kvdist" not in json.dumps(config)


def test_optimizers_of_before_keras_3_are_refused_by_the_name_of_the_argument(hvd, tmp_path):
    with pytest.raises(
        ValueError, match=r"load_model\(legacy_opts=True\) is for optimizers of keras.optimizers.legacy"
    ):
        hvd.load_model(tmp_path / "model.keras", None, None, hvd.Compression.none, True)


class Halving:
    """Makes an optimizer that Keras does not know."""

    def __new__(cls, keras):
        class HalvingSGD(keras.optimizers.SGD):
            def update_step(self, gradient, variable, learning_rate):
                super().update_step(gradient / 2, variable, learning_rate)

        return HalvingSGD


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_optimizers_that_keras_does_not_know_are_named(keras, hvd, tmp_path):
    path = tmp_path / "model.keras"
    halving = Halving(keras)

    def save_and_load(rank):
        linear(keras, hvd.DistributedOptimizer(halving(0.5))).save(path)
        return hvd.load_model(path, custom_optimizers=[halving]).optimizer

    (loaded,) = returned(run_ranks(1, save_and_load))
    assert isinstance(loaded, halving) and float(loaded.learning_rate) == 0.5
    # Keras itself takes a class there, and no function that makes one.
    for load in (hvd.load_model, keras.saving.load_model):
        with pytest.raises(ValueError, match="Could not interpret optimizer identifier"):
            load(path, custom_objects={"HalvingSGD": lambda **config: halving(**config)})
