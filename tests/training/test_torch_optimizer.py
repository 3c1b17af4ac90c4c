"""`Trainer.as_torch_optimizer`: torch's own schedulers, scaler and habits work with it."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.lr_scheduler import FactorScheduler
from kvdist.optimizer import create
from kvdist.training.trainer import Trainer
from tests.cases import each

torch.set_num_threads(1)


class Cluster(KVStore):
    """A local store that passes for one of two workers, and writes down the numbers and gradients of its pushes."""

    def __init__(self):
        super().__init__(LocalBackend("dist"))
        self.rates, self.pushed = [], []

    @property
    def num_workers(self):
        return 2

    def set_optimizer(self, optimizer, **hyperparameters):
        self.optimizer = optimizer
        super().set_optimizer(optimizer, **hyperparameters)

    def pushpull(self, key, value, out=None, priority=0, *, average=False, samples=0):
        assert average
        self.pushed.append([None if one is None else one[0].clone() for one in value])
        if self.has_optimizer:
            self.rates.append([(self.optimizer.pushed_lr(one), self.optimizer.wd_for(one)) for one in key])
        super().pushpull(key, value, out, priority, average=average, samples=samples)

    def push_async(self, key, value, priority=0, *, average=False, samples=0):
        self.rates.append([(self.optimizer.pushed_lr(one), self.optimizer.wd_for(one)) for one in key])
        return super().push_async(key, value, priority, average=average, samples=samples)


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def pair(name="sgd", theirs=torch.optim.SGD, lr=0.1, **options):
    """Equal networks, with an optimizer of ours and one of torch's."""
    ours, other = network(), network()
    trainer = Trainer(ours.parameters(), name, {"learning_rate": lr}, **{"kvstore": Cluster(), **options})
    return trainer, (ours, trainer.as_torch_optimizer()), (other, theirs(other.parameters(), lr=lr))


def assert_same(net, other):
    for mine, expected in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)


def test_it_is_an_optimizer_of_torch_with_groups_that_can_be_read():
    first, second = network().parameters(), network(1).parameters()
    groups = [{"params": list(first), "lr_mult": 2.0}, {"params": list(second), "wd_mult": 0.0}]
    trainer = Trainer(groups, "adam", {"learning_rate": 0.5, "wd": 0.25}, kvstore=None)
    optimizer = trainer.as_torch_optimizer()
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert trainer.as_torch_optimizer() is optimizer
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 4]
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(1.0, 0.25), (0.5, 0.0)]
    with pytest.raises(RuntimeError, match="parameters cannot be added to a trainer"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


@each("options", [{}, {"update_on_kvstore": False}, {"kvstore": None}, {"overlap": True}])
@each(
    "schedule",
    [
        lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 4),  # from 0 up
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=9, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [
                torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
            ],
            [3],
        ),
    ],
)
def test_schedulers_of_torch_make_the_same_training(schedule, options):
    trainer, *both = pair(**options)
    runs = [(net, optimizer, schedule(optimizer)) for net, optimizer in both]
    for _ in range(8):
        x = torch.randn(6, 5)
        for net, optimizer, scheduler in runs:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
    assert_same(runs[0][0], runs[1][0])
    assert trainer.learning_rate == pytest.approx(runs[1][1].param_groups[0]["lr"])


@each("options", [{"update_on_kvstore": False}, {"kvstore": None}])
def test_one_cycle_with_its_defaults_makes_the_same_training_where_the_worker_updates(options):
    _, *both = pair("adam", torch.optim.Adam, 0.01, **options)
    runs = [(net, each, torch.optim.lr_scheduler.OneCycleLR(each, 0.03, total_steps=9)) for net, each in both]
    seen = []
    for _ in range(8):
        x = torch.randn(6, 5)
        for net, optimizer, scheduler in runs:
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            scheduler.step()
        seen.append(runs[0][1].param_groups[0]["betas"])
    assert_same(runs[0][0], runs[1][0])
    assert len(set(seen)) > 4, "the momentum is cycled"


@each("schedule", [torch.optim.lr_scheduler.OneCycleLR, torch.optim.lr_scheduler.CyclicLR])
def test_a_momentum_that_servers_would_not_learn_of_is_refused(schedule):
    _, (net, optimizer), _ = pair(kvstore=Cluster())
    words = {"total_steps": 9} if schedule is torch.optim.lr_scheduler.OneCycleLR else {"base_lr": 0.1}
    schedule(optimizer, max_lr=0.3, **words)
    net(torch.randn(6, 5)).square().mean().backward()
    with pytest.raises(ValueError, match="momentum has changed from 0.0 to 0.9.* with cycle_momentum=False"):
        optimizer.step()


def test_one_cycle_needs_a_momentum_to_cycle():
    _, (net, optimizer), _ = pair(kvstore=None)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=9)
    net(torch.randn(6, 5)).square().mean().backward()
    with pytest.raises(ValueError, match="needs other states than the optimizer has: give that number from the start"):
        optimizer.step()


def test_groups_that_are_assigned_count():
    trainer, (ours, optimizer), (other, theirs) = pair()
    for one in (optimizer, theirs):
        one.param_groups = [{**group, "lr": 0.5} for group in one.param_groups]
    x = torch.randn(6, 5)
    for net, one in ((ours, optimizer), (other, theirs)):
        net(x).square().mean().backward()
        one.step()
    assert_same(ours, other)
    assert trainer.learning_rate == 0.5


def test_groups_of_a_trainer_have_one_momentum():
    net = network()
    groups = [{"params": list(layer.parameters())} for layer in (net[0], net[2])]
    optimizer = Trainer(groups, "adam", kvstore=None).as_torch_optimizer()
    optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    net(torch.randn(6, 5)).square().mean().backward()
    with pytest.raises(ValueError, match="betas is different in .*0.5.*a trainer needs the same in all"):
        optimizer.step()


def test_a_learning_rate_in_a_group_is_seen_by_the_store_at_the_next_push():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    groups = [{"params": weights[0], "lr_mult": 0.5}, {"params": weights[1]}]
    trainer = Trainer(groups, "sgd", {"learning_rate": 1.0, "wd": 0.5}, kvstore=(store := Cluster()))
    optimizer = trainer.as_torch_optimizer()

    def step():
        for weight in weights:
            weight.grad = torch.ones(2)
        optimizer.step()
        return store.rates[-1]

    assert step() == [(0.5, 0.5), (1.0, 0.5)]
    for group in optimizer.param_groups:
        group["lr"] *= 0.25
    assert step() == [(0.125, 0.5), (0.25, 0.5)] and trainer.learning_rate == 0.25
    optimizer.param_groups[1]["lr"] = 0.0
    assert step() == [(0.125, 0.5), (0.0, 0.5)]
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert step() == [(0.125, 0.0), (0.0, 0.5)]
    for group, lr in zip(optimizer.param_groups, (0.5, 1.0), strict=True):
        group["lr"] = lr
    trainer.set_learning_rate(2.0)  # the trainer's word is as good
    assert step() == [(1.0, 0.0), (2.0, 0.5)]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 2.0]


@each(
    "numbers, declared, expected",
    [
        ([0.1], [1.0], (0.1, [1.0])),
        ([0.3], [0.5], (0.6, [0.5])),
        ([0.2, 0.1], [2.0, 1.0], (0.1, [2.0, 1.0])),
        ([0.0, 0.0], [2.0, 1.0], (0.0, [2.0, 1.0])),
        ([0.0, 0.5], [1.0, 1.0], (0.5, [0.0, 1.0])),
        ([0.5, 0.0], [0.0, 1.0], (0.5, [1.0, 0.0])),
    ],
)
def test_numbers_of_groups_become_one_number_and_factors(numbers, declared, expected):
    groups = [{"params": [nn.Parameter(torch.ones(1))], "lr_mult": factor} for factor in declared]
    trainer = Trainer(groups, "sgd", {"learning_rate": 1.0}, kvstore=None)
    for group, number in zip(trainer.as_torch_optimizer().param_groups, numbers, strict=True):
        group["lr"] = number
    optimizer = trainer.optimizer
    assert (optimizer.learning_rate, [optimizer.lr_mult.get(key, 1.0) for key in range(len(numbers))]) == expected


def test_factors_of_single_keys_last_when_a_group_changes():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 1.0}, kvstore=None)
    trainer.optimizer.set_lr_mult({0: 0.1})
    optimizer = trainer.as_torch_optimizer()
    optimizer.param_groups[0]["lr"] *= 0.5
    assert [round(trainer.optimizer.pushed_lr(key), 9) for key in (0, 1)] == [0.05, 0.5]


def test_a_factor_of_a_key_lasts_when_a_schedule_writes_the_rate_of_its_group():
    trainer = Trainer([nn.Parameter(torch.ones(1))], "sgd", {"learning_rate": 1.0}, kvstore=None)
    group = trainer.as_torch_optimizer().param_groups[0]
    trainer.optimizer.lr_mult[0] = 0.5
    for rate in (1.0, 0.25):
        group["lr"] = rate
        assert trainer.optimizer.pushed_lr(0) == rate / 2 and group["lr"] == trainer.learning_rate == rate


def test_gluons_spelling_writes_the_groups_also_through_an_optimizer_of_the_user():
    net, chosen = network(), create("sgd", learning_rate=1.0, wd=0.5)
    groups = [
        {"params": list(layer.parameters()), "lr_mult": factor} for layer, factor in ((net[0], 2.0), (net[2], -3))
    ]
    trainer = Trainer(groups, chosen, kvstore=None)
    shown = trainer.as_torch_optimizer().param_groups
    assert [group["lr"] for group in shown] == [2.0, -3.0]
    shown[0]["lr"], shown[1]["lr"] = 1.0, -1.5
    chosen.wd = 0.25  # does not undo what the groups have got
    assert [(group["lr"], group["weight_decay"]) for group in shown] == [(1.0, 0.25), (-1.5, 0.25)]
    chosen.learning_rate = 0.1
    assert [group["lr"] for group in shown] == [0.2, 0.1 * -3]
    for made in (copy.copy(chosen), chosen.twin()):
        made.learning_rate = 8.0
    trainer.close()
    chosen.learning_rate = 8.0  # the trainer's no more
    assert [group["lr"] for group in shown] == [0.2, 0.1 * -3] and trainer.learning_rate == 8.0


def test_a_rate_that_is_set_is_what_schedules_go_on_from():
    trainer = Trainer(network().parameters(), "sgd", {"learning_rate": 1.0}, kvstore=None)
    optimizer = trainer.as_torch_optimizer()
    trainer.set_learning_rate(8.0)
    assert optimizer.param_groups[0]["lr"] == 8.0


def test_two_schedules_are_one_too_many():
    schedule = FactorScheduler(10, 0.5, base_lr=0.1)
    trainer = Trainer(network().parameters(), "sgd", {"lr_scheduler": schedule}, kvstore=None)
    with pytest.raises(ValueError, match="the optimizer has an lr_scheduler"):
        trainer.as_torch_optimizer()


def test_a_closure_is_called_once_with_gradients_enabled_and_its_loss_comes_back():
    _, (net, optimizer), _ = pair()
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = net(torch.ones(2, 5)).square().mean()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    with torch.no_grad():
        second = optimizer.step(closure)
    assert calls == [True, True] and second < first


def test_manual_optimisation_in_the_manner_of_lightning_works():
    # A framework wraps the step in a method of its own, and calls hooks and the scheduler itself.
    _, *both = pair()
    for net, optimizer in both:
        scheduler, seen = torch.optim.lr_scheduler.StepLR(optimizer, 3), []
        optimizer.register_step_pre_hook(lambda *_, seen=seen: seen.append("before"))
        optimizer.register_step_post_hook(lambda *_, seen=seen: seen.append("after"))
        torch.manual_seed(3)
        for batch in range(8):
            (net(torch.randn(4, 5)).square().mean() / 2).backward()
            if batch % 2:
                nn.utils.clip_grad_norm_(net.parameters(), 0.1)
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        assert seen == ["before", "after"] * 4
    assert_same(both[0][0], both[1][0])


def test_clipped_gradients_are_what_is_pushed():
    trainer, (net, optimizer), _ = pair()
    net(torch.ones(2, 5)).square().sum().backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()
    norm = torch.cat([grad.flatten() for grad in trainer.kvstore.pushed[0]]).norm()
    assert float(norm) == pytest.approx(0.5, rel=1e-5)


@each("options", [{}, {"update_on_kvstore": False}, {"kvstore": None}])
@each("unscale", [False, True])
def test_a_grad_scaler_trains_as_with_torch_and_skips_what_overflows(unscale, options):
    trainer, *both = pair(**options)
    ours = both[0][0]
    for net, optimizer in both:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        torch.manual_seed(5)
        for step in range(6):
            optimizer.zero_grad()
            scaler.scale(net(torch.randn(4, 5)).square().mean()).backward()
            if step == 2:
                net[0].bias.grad[1] = float("inf")
            if unscale:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(net.parameters(), 0.3)
            before = [weight.detach().clone() for weight in net.parameters()]
            scaler.step(optimizer)
            scaler.update()
            moved = any(not torch.equal(old, new) for old, new in zip(before, net.parameters(), strict=True))
            assert moved == (step != 2)
        assert scaler.get_scale() == 128.0  # up, down, and up again
    assert_same(ours, both[1][0])
    assert trainer.nonfinite_steps == 1
    if options == {}:
        assert trainer.kvstore.pushed[2] == [None] * 4, "the others were not kept waiting"


def test_the_scaler_and_overlap_do_not_go_together():
    trainer, (net, optimizer), _ = pair(overlap=True)
    trainer.broadcast_parameters()
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    scaler.scale(net(torch.randn(4, 5)).square().mean()).backward()
    with pytest.raises(RuntimeError, match="a GradScaler finds out too late.*overlap=False"):
        scaler.step(optimizer)


def test_its_state_has_the_numbers_of_the_groups_and_they_come_back():
    trainer, (net, optimizer), _ = pair()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for _ in range(2):
        optimizer.zero_grad()
        net(torch.ones(2, 5)).sum().backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["lr"] == pytest.approx(0.025)
    other_trainer, (other, restored), _ = pair()
    restored.load_state_dict(saved)
    other(torch.ones(2, 5)).sum().backward()
    restored.step()
    assert other_trainer.kvstore.rates[-1][0][0] == pytest.approx(0.025)
    assert trainer.learning_rate == other_trainer.learning_rate


def test_as_with_torch_a_gradient_is_used_as_often_as_there_are_steps():
    weight = nn.Parameter(torch.zeros(3))
    optimizer = Trainer([weight], "sgd", {"learning_rate": 1.0}, kvstore=Cluster()).as_torch_optimizer()
    weight.sum().backward()
    optimizer.step()
    optimizer.step()
    np.testing.assert_array_equal(weight.detach(), -2)
    optimizer.zero_grad()
    assert weight.grad is None
    optimizer.step()
    np.testing.assert_array_equal(weight.detach(), -2)


def test_nothing_of_torch_warns_whoever_makes_the_step():
    for makes in ("optimizer", "trainer"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            net = network()
            trainer = Trainer(net.parameters(), "sgd", {"learning_rate": 0.1})
            optimizer = trainer.as_torch_optimizer()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            net(torch.ones(1, 5)).sum().backward()
            (optimizer if makes == "optimizer" else trainer).step()
            scheduler.step()
