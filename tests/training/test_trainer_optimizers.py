"""The trainer with schedules, masters, and rules that look at whole parameters, on every kind of store."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

from kvdist import Trainer
from kvdist.dtypes import DType
from kvdist.kvstore.values import read_bits
from kvdist.lr_scheduler import FactorScheduler, MultiFactorScheduler
from kvdist.optimizer import Extent, Updater, create
from tests.cases import each

torch.set_num_threads(1)

WAYS = {
    "alone": {"kvstore": None},
    "here": {"kvstore": "dist", "update_on_kvstore": False},
    "servers": {"kvstore": "dist"},
    "overlap": {"kvstore": "dist", "overlap": True},
}
every_way = pytest.mark.parametrize("way", WAYS)


@pytest.fixture
def train(way):
    trainers = []

    def make(params, optimizer, numbers):
        trainers.append(Trainer(params, optimizer, numbers, **WAYS[way]))
        return trainers[-1]

    yield make
    for trainer in trainers:
        trainer.close()


@every_way
def test_a_schedule_counts_steps_and_multiplies_with_the_groups_factor(train):
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    groups = [{"params": [first]}, {"params": [second], "lr_mult": 2.0}]
    trainer = train(groups, "sgd", {"lr_scheduler": FactorScheduler(1, 0.5, base_lr=1.0)})
    for total in (1, 1.5, 1.75):
        first.grad = second.grad = None
        (first.sum() + second.sum()).backward()
        trainer.step()
        assert (first == -total).all() and (second == -2 * total).all()
    with pytest.raises(AttributeError, match="the learning rate follows FactorScheduler"):
        trainer.set_learning_rate(0.1)


@every_way
def test_halves_with_masters_take_small_steps_and_loaded_weights_count(train):
    weight = nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    trainer = train([weight], "sgd", {"learning_rate": 2.0**-12, "multi_precision": True})
    for _ in range(32):
        weight.grad = None
        weight.sum().backward()
        trainer.step()
    assert (weight == 1 - 2.0**-7).all()
    with torch.no_grad():
        weight.fill_(3)
    trainer.broadcast_parameters()
    weight.grad = None
    weight.sum().backward()
    trainer.step()
    assert (weight == 3).all()


@every_way
@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("lars", {"momentum": 0.9, "eta": 0.1}),
        ("lamb", {"wd": 0.1}),
        ("lans", {}),
        ("nadam", {}),
        ("sgld", {"seed": 3}),
    ],
)
def test_a_network_follows_an_updater_that_has_its_parameters_whole(train, way, name, numbers):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))
    twin, updater = copy.deepcopy(net), Updater(create(name, **numbers))
    trainer = train(net.parameters(), name, numbers)
    inputs = torch.randn(4, 7)
    for _ in range(5):
        for model in (net, twin):
            model.zero_grad()
            model(inputs).square().mean().backward()
        trainer.step()
        for key, parameter in enumerate(twin.parameters()):
            shape, bits = tuple(parameter.shape), read_bits(parameter.detach())
            grad = read_bits(parameter.grad)
            updater.update(key, bits, [grad], [1.0], DType.FLOAT32, bits, extent=Extent(key, shape))
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            np.testing.assert_allclose(ours.detach().numpy(), theirs.detach().numpy(), rtol=1e-5, atol=1e-6)


@every_way
def test_the_rows_of_an_embedding_have_a_history_each(train):
    table = nn.Embedding(4, 3)
    nn.init.zeros_(table.weight)
    trainer = train(table.parameters(), "groupadagrad", {"learning_rate": 1.0, "epsilon": 0.0})
    (table(torch.tensor([0, 2, 2])) * torch.tensor([1.0, 2.0, 2.0])).sum().backward()
    gradient = table.weight.grad.clone()
    trainer.step()
    expected = torch.zeros(4, 3)
    for row in (0, 2):
        expected[row] = -gradient[row] / gradient[row].square().mean().sqrt()
    used = [0, 2]  # a row of zeros divides 0 by 0 without ε
    torch.testing.assert_close(table.weight.detach()[used], expected[used])


def test_a_schedule_in_the_optimizer_and_one_on_the_worker_give_the_same_weights():
    schedule = MultiFactorScheduler([1, 3], 0.5, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.25)
    with_schedule, by_hand = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    trainers = [
        Trainer([with_schedule], "adam", {"lr_scheduler": schedule}, kvstore="dist"),
        Trainer([by_hand], "adam", kvstore="dist"),
    ]
    for step in range(1, 6):
        trainers[1].set_learning_rate(schedule(step))
        for weight, trainer in zip((with_schedule, by_hand), trainers, strict=True):
            weight.grad = None
            (weight**2).sum().backward()
            trainer.step()
        assert torch.equal(with_schedule, by_hand)
    for trainer in trainers:
        trainer.close()


@each("on_store", [True, False])
def test_the_learning_rate_with_a_schedule_is_that_of_the_last_step(on_store):
    weight = torch.nn.Parameter(torch.zeros(10))
    schedule = FactorScheduler(2, 0.1, base_lr=1.0)
    options = {"learning_rate": 1.0, "lr_scheduler": schedule}
    trainer = Trainer([weight], "sgd", options, kvstore="dist", update_on_kvstore=on_store)
    rate = 1.0
    for step in range(10):
        weight.grad = torch.ones(10)
        before = weight.detach().clone()
        trainer.step(1)
        assert torch.allclose(before - weight.detach(), torch.full((10,), trainer.learning_rate), atol=1e-6)
        if step % 2 == 0:
            assert trainer.learning_rate == pytest.approx(rate)
            rate *= 0.1
    trainer.close()
