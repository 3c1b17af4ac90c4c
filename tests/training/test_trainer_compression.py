"""What a trainer does with ``compression_params``: within a process, and on an embedded cluster of one worker."""

from __future__ import annotations

import pytest
import torch

from kvdist import kv
from kvdist.kvstore.base import KVStore
from kvdist.training.trainer import Trainer
from tests.cases import each

torch.set_num_threads(1)
TWO_BIT = {"type": "2bit", "threshold": 0.5}


@pytest.fixture(autouse=True)
def without_a_compiler(monkeypatch):
    """So much is encoded here that kernels would be compiled beside it, on a thread that outlives its test."""
    monkeypatch.setenv("KVDIST_KERNELS", "numpy")


def stepped(trainer, weights, gradient, steps):
    """The one number that all weights are after these steps, all on the same gradient."""
    for _ in range(steps):
        for replicas in weights:
            for weight in replicas if isinstance(replicas, list) else [replicas]:
                weight.grad = torch.full_like(weight, gradient)
        trainer.step(1)
    flat = [weight for replicas in weights for weight in (replicas if isinstance(replicas, list) else [replicas])]
    (value,) = {float(one) for weight in flat for one in weight.detach().unique()}
    return value


@each("update_on_kvstore", [True, False, None])
@each("store", ["device", "dist"])
def test_one_device_is_compressed_whoever_updates(store, update_on_kvstore):
    weights = [torch.nn.Parameter(torch.zeros(3, 2)), torch.nn.Parameter(torch.zeros(70_000))]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, compression_params=TWO_BIT,
                      update_on_kvstore=update_on_kvstore)  # fmt: skip
    assert [stepped(trainer, weights, 0.2, 1) for _ in range(6)] == [0, 0, -0.5, -0.5, -1, -1]
    assert trainer.kvstore is not None
    trainer.close()


@each("update_on_kvstore", [True, False])
@each("store, expected", [("device", [-1, -2]), ("dist", [-0.5, -1])])
def test_a_device_store_compresses_each_device_and_a_cluster_their_sum(store, expected, update_on_kvstore):
    weights = [[torch.nn.Parameter(torch.zeros(5)) for _ in range(2)]]
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=store, compression_params=TWO_BIT,
                      update_on_kvstore=update_on_kvstore)  # fmt: skip
    assert [stepped(trainer, weights, 0.75, 1) for _ in range(2)] == expected
    trainer.close()


def test_weights_without_gradients_stay_whole_though_values_come_back_as_halves():
    frozen = torch.nn.Parameter(torch.full((3,), 1 / 3), requires_grad=False)
    counter = torch.nn.Parameter(torch.arange(3), requires_grad=False)
    weight = torch.nn.Parameter(torch.full((3,), 1 / 3))
    trainer = Trainer([weight, frozen, counter], "sgd", {"learning_rate": 1.0}, kvstore="dist",
                      compression_params={"type": "topk", "ratio": 1, "pull": "fp16"})  # fmt: skip
    trainer.broadcast_parameters()
    assert (frozen == 1 / 3).all() and counter.tolist() == [0, 1, 2]
    assert (weight == torch.full((3,), 1 / 3).half().float()).all()
    trainer.close()


def test_a_store_that_was_told_by_its_user_is_used_as_it_is():
    with kv.create("dist") as store:
        store.set_gradient_compression(TWO_BIT)
        weight = torch.nn.Parameter(torch.zeros(5))
        trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=store, update_on_kvstore=False)
        assert stepped(trainer, [weight], 0.25, 2) == -0.5
    with kv.create("dist") as store:
        store.set_gradient_compression(TWO_BIT)
        other = Trainer([torch.nn.Parameter(torch.zeros(5))], "sgd", kvstore=store, compression_params={"type": "fp16"})
        with pytest.raises(ValueError, match="cannot change to fp16"):
            other.broadcast_parameters()


def test_loaded_weights_and_states_begin_with_an_empty_residual(tmp_path):
    weight = torch.nn.Parameter(torch.zeros(5))
    trainer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore="dist", compression_params=TWO_BIT)
    assert stepped(trainer, [weight], 0.25, 1) == 0
    trainer.save_checkpoint(tmp_path, 1).result()
    trainer.load_checkpoint(tmp_path)
    assert [stepped(trainer, [weight], 0.25, 1) for _ in range(2)] == [0, -0.5]
    trainer.close()


@each("store", ["local", "local_update_cpu", "nccl"])
def test_stores_that_do_not_compress_are_refused_at_the_first_step(store):
    weight = torch.nn.Parameter(torch.zeros(5))
    trainer = Trainer([weight], "sgd", kvstore=store, compression_params=TWO_BIT)
    with pytest.raises(ValueError, match="does not compress gradients: that needs 'dist' or 'device'"):
        stepped(trainer, [weight], 1.0, 1)


def test_a_parameter_of_another_type_is_named():
    weights = [torch.nn.Parameter(torch.zeros(5)), torch.nn.Parameter(torch.zeros(5, dtype=torch.float64))]
    with kv.create("dist") as store:
        trainer = Trainer(weights, "sgd", kvstore=store, compression_params=TWO_BIT)
        with pytest.raises(TypeError, match="parameter 1 .*is float64, and this store compresses"):
            trainer.broadcast_parameters()


class Mine(kv.KVStoreBase):
    """The least that a trainer needs."""

    type, rank, num_workers = "mine", 0, 1

    def broadcast(self, key, value, out, priority=0):
        raise AssertionError("it is refused before")

    def pushpull(self, key, value, out=None, priority=0):
        raise AssertionError("it is refused before")

    def is_capable(self, capability):
        return False

    def set_optimizer(self, optimizer):
        raise AssertionError("it is refused before")

    def save_optimizer_states(self, fname, dump_optimizer=False):
        raise AssertionError("it is refused before")

    def load_optimizer_states(self, fname):
        raise AssertionError("it is refused before")


def test_a_store_of_the_users_own_knows_no_compression():
    trainer = Trainer([torch.nn.Parameter(torch.zeros(5))], "sgd", kvstore=Mine(), compression_params=TWO_BIT)
    assert not isinstance(Mine(), KVStore)
    with pytest.raises(ValueError, match="does not support .* or compression_params"):
        trainer.broadcast_parameters()
