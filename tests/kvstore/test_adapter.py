"""Stores of the user's own: what the contract asks, and that a trainer needs no more."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvdist import Trainer, kv
from kvdist.kvstore.adapter import Adapted
from tests.cases import each


class Mine(kv.KVStoreBase):
    """A store within a process that keeps the contract and nothing more, and writes down what it is asked for."""

    def __init__(self, workers=1, capable=False):
        self.workers, self.capable = workers, capable
        self.values, self.calls, self.optimizer = {}, [], None

    @property
    def type(self):
        return "mine"

    @property
    def rank(self):
        return 0

    @property
    def num_workers(self):
        return self.workers

    def broadcast(self, key, value, out, priority=0):
        self.calls.append(("broadcast", key, priority))
        self.values[key] = value.detach().clone()
        for one in out:
            one.detach().copy_(self.values[key])

    def pushpull(self, key, value, out=None, priority=0):
        self.calls.append(("pushpull", key, priority))
        total = sum(one.detach() for one in value) * self.workers  # as if all workers gave the same
        if self.optimizer is None:
            self.values[key] = total
        else:
            self.values[key] = self.values[key] - self.optimizer.learning_rate * self.optimizer.rescale_grad * total
        for one in value if out is None else out:
            one.detach().copy_(self.values[key])

    def is_capable(self, capability):
        return self.capable and capability == "optimizer"

    def set_optimizer(self, optimizer):
        if not self.capable:
            raise NotImplementedError
        self.optimizer = optimizer


def parameters(*numbers):
    return [torch.nn.Parameter(torch.full((4,), float(number))) for number in numbers]


def backward(weights, factor=1.0):
    for weight in weights:
        weight.grad = None
        (weight * factor).sum().backward()


def assert_all(tensors, number):
    for tensor in tensors:
        np.testing.assert_array_equal(tensor.detach(), number)


@pytest.fixture(autouse=True)
def what_was_registered_is_forgotten(monkeypatch):
    monkeypatch.setattr("kvdist.kvstore.registry.REGISTERED", {})


def test_a_store_that_lacks_a_part_of_the_contract_cannot_be_made():
    class Half(kv.KVStoreBase):
        """Nearly nothing."""

    with pytest.raises(TypeError, match="abstract.*broadcast"):
        Half()


def test_a_store_of_kvdist_keeps_the_contract():
    with kv.create("local") as store:
        assert isinstance(store, kv.KVStoreBase)


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("capable", [False, True])
def test_a_trainer_trains_with_it_by_name(workers, capable):
    made = []

    @kv.register
    class Own(Mine):
        """Made by its name."""

        def __init__(self):
            super().__init__(workers, capable)
            made.append(self)

    weights = parameters(1, 2)
    trainer = Trainer(weights, "sgd", {"learning_rate": 0.5}, kvstore="own")
    for step in range(1, 3):
        backward(weights)
        trainer.step()
        assert_all(weights[:1], 1 - 0.5 * step)
        assert_all(weights[1:], 2 - 0.5 * step)
    assert trainer.kvstore is made[0]
    assert (made[0].optimizer is trainer.optimizer) == capable
    pushed = [call for call in made[0].calls if call[0] == "pushpull"]
    assert pushed[:2] == [("pushpull", 0, 0), ("pushpull", 1, -1)], "what is needed first has the highest priority"


@each("capable", [False, True])
def test_gluons_convention_sums_over_the_workers(capable):
    weights = parameters(0)
    trainer = Trainer(weights, "sgd", {"learning_rate": 1.0}, kvstore=Mine(workers=3, capable=capable))
    backward(weights, factor=4.0)
    trainer.step(2)
    assert_all(weights, -3 * 4 / 2)


def test_several_devices_and_a_missing_gradient_need_nothing_of_the_store():
    replicas, unused = parameters(1, 2), parameters(5)
    trainer = Trainer([replicas, unused * 2], "sgd", {"learning_rate": 1.0}, kvstore=Mine(capable=True))
    for replica in replicas:
        replica.sum().backward()
    given = replicas[0].grad
    trainer.step(1)
    assert_all(replicas, 1 - 2)
    assert_all(unused, 5)
    assert replicas[0].grad is given
    assert_all([given], 1)


def test_what_a_store_of_ones_own_cannot_do_is_said():
    for options in ({"overlap": True}, {"share_weights": True}):
        weights = parameters(1)
        trainer = Trainer(weights, "sgd", kvstore=Mine(capable=True), **options)
        backward(weights)
        with pytest.raises(ValueError, match="'mine' does not support overlap=True, share_weights=True"):
            trainer.step()
    with pytest.raises(ValueError, match="'mine' cannot update weights"):
        Trainer(parameters(1), "sgd", kvstore=Mine(), update_on_kvstore=True).broadcast_parameters()


def test_a_registered_class_of_another_kind_is_refused_by_the_trainer():
    @kv.register
    class Thing:
        """No store at all."""

    with pytest.raises(TypeError, match="the store 'thing' is a Thing, which a Trainer cannot use: derive it"):
        Trainer(parameters(1), "sgd", kvstore="thing").broadcast_parameters()


def test_the_mirrored_systems_way_to_register_is_the_same():
    @kv.KVStoreBase.register
    class Theirs(Mine):
        """Made by its name."""

    assert type(kv.create("theirs")) is Theirs


def test_only_classes_are_registered():
    with pytest.raises(TypeError, match="register takes a class, not Mine"):
        kv.register(Mine())


def test_an_average_is_made_of_copies():
    store, (weight,) = Mine(workers=2), parameters(0)
    grad = torch.full((4,), 3.0)
    Adapted(store).pushpull([0], [[grad]], [[weight.detach()]], average=True)
    assert_all([weight], 3)
    assert_all([grad], 3)


# The mirrored system's tests of custom stores, on a store of ours.


@each("keys", [(3, [4, 5, 6]), ("a", ["b", "c", "d"])])
def test_broadcast_and_pushpull_of_single_keys_lists_and_devices(keys):
    single, several = keys
    with kv.create("device") as store:
        out = np.zeros((4, 4))
        store.broadcast(single, np.ones((4, 4)), out)
        assert (out == 1).all()
        outs = [[np.zeros((4, 4)) for _ in range(4)] for _ in several]
        store.broadcast(several, [np.ones((4, 4))] * 3, outs)
        assert all((one == 1).all() for per_key in outs for one in per_key)
        values = [np.ones((4, 4)) for _ in range(4)]
        store.pushpull(single, values, out=outs[0])
        assert all((one == 4).all() for one in outs[0]) and all((one == 1).all() for one in values)
        store.pushpull(single, values)
        assert all((one == 4).all() for one in values)
        lists = [[np.full((4, 4), 2.0) for _ in range(4)] for _ in several]
        store.pushpull(several, lists)
        assert all((one == 8).all() for per_key in lists for one in per_key)
