"""A trainer with an optimizer of torch, or with its name and groups: the weights are those of torch alone."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from kvdist import Embedding, Trainer, kv
from kvdist.optimizer import create
from tests.cases import each
from tests.collective.ranks import returned, run_ranks

torch.set_num_threads(1)

WAYS = {
    "alone": {"kvstore": None},
    "local": {"kvstore": "local", "update_on_kvstore": True},
    "servers": {"kvstore": "dist"},
    "workers": {"kvstore": "dist", "update_on_kvstore": False},
    "overlap": {"kvstore": "dist", "overlap": True},
    "collective": {"kvstore": "collective"},
}
every_way = pytest.mark.parametrize("way", WAYS)
INPUTS = torch.randn(16, 7, generator=torch.Generator().manual_seed(1))
TARGETS = INPUTS.sum(1, keepdim=True).sin()
GROUPS = [
    ("SGD", {"lr": 0.05, "momentum": 0.9}, {"lr": 0.01, "momentum": 0.0}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}, {"weight_decay": 0.0}),
    ("Adam", {"lr": 0.01, "betas": (0.8, 0.95)}, {"eps": 1e-4, "amsgrad": True, "lr": 0.002}),
    ("NAdam", {"lr": 0.005}, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
    ("RMSprop", {"lr": 0.005}, {"momentum": 0.5, "alpha": 0.9}),
    ("RAdam", {"lr": 0.01, "foreach": True}, {"betas": (0.5, 0.9)}),
    ("Adamax", {"lr": 0.01, "eps": 1e-3, "capturable": False}, {"betas": (0.5, 0.9)}),
    ("Adagrad", {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": True}, {"lr_decay": 0.01, "fused": True}),
    ("Adadelta", {"lr": 0.5}, {"rho": 0.5, "weight_decay": 0.1}),
]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 1))


def groups_of(net, numbers):
    """Torch's usual two groups: matrices, and biases with numbers of their own."""
    matrices, others = (
        [one for one in net.parameters() if one.ndim > 1],
        [one for one in net.parameters() if one.ndim < 2],
    )
    return [{"params": matrices}, {"params": others, **numbers}]


def backward(*nets):
    for net in nets:
        net.zero_grad()
        nn.functional.mse_loss(net(INPUTS), TARGETS).backward()


def assert_same(net, other):
    for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-6)


def train(steps, trainer, net, schedule, other, theirs, their_schedule):
    for _ in range(steps):
        backward(net, other)
        trainer.step()
        theirs.step()
        schedule.step()
        their_schedule.step()


def by_instance(name, numbers, groups, way):
    net = network()
    given = getattr(torch.optim, name)(groups_of(net, groups), **numbers)
    return net, Trainer(net.parameters(), given, **WAYS[way]), given


def by_name(name, numbers, groups, way):
    net = network()
    trainer = Trainer(groups_of(net, groups), f"torch.{name}", numbers, **WAYS[way])
    return net, trainer, trainer.as_torch_optimizer()


@pytest.mark.slow_cases("collective", "local", "overlap", "workers")
@every_way
@each("make", [by_instance, by_name])
@each("name, numbers, groups", GROUPS)
def test_groups_and_schedules_give_torchs_weights_after_a_hundred_steps(way, make, name, numbers, groups):
    net, trainer, optimizer = make(name, numbers, groups, way)
    other = network()
    theirs = getattr(torch.optim, name)(groups_of(other, groups), **numbers)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(one, 120) for one in (optimizer, theirs)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step", UserWarning)  # by_name steps otherwise
        train(100, trainer, net, schedules[0], other, theirs, schedules[1])
    trainer.close()
    assert_same(net, other)


@each("way", ["alone", "servers"])
@each("name, numbers, groups", GROUPS)
def test_a_run_of_torch_goes_on_here_and_a_run_from_here_goes_on_in_torch(way, name, numbers, groups):
    """States in torch's format, both ways; 10 steps in torch, 10 here, 10 in torch."""
    net, other = network(), network()
    theirs, before = (getattr(torch.optim, name)(groups_of(one, groups), **numbers) for one in (other, net))
    for _ in range(10):
        backward(net, other)
        theirs.step()
        before.step()
    trainer = Trainer(net.parameters(), before, **WAYS[way])  # with its state
    for _ in range(10):
        backward(net, other)
        trainer.step()
        theirs.step()
    state = trainer.as_torch_optimizer().state_dict()
    trainer.close()
    after = getattr(torch.optim, name)(groups_of(net, groups), **numbers)
    after.load_state_dict(state)
    for _ in range(10):
        backward(net, other)
        after.step()
        theirs.step()
    assert_same(net, other)


@each("way", ["alone", "servers"])
def test_a_saved_state_of_torch_loads_into_a_trainer_that_has_the_rules_name(way):
    net, other = network(), network()
    theirs = torch.optim.AdamW(other.parameters(), lr=0.01)
    for _ in range(10):
        backward(other)
        theirs.step()
    net.load_state_dict(other.state_dict())
    trainer = Trainer(net.parameters(), "torch.adamw", {"lr": 0.5}, **WAYS[way])
    trainer.as_torch_optimizer().load_state_dict(theirs.state_dict())
    for _ in range(10):
        backward(net, other)
        trainer.step()
        theirs.step()
    trainer.close()
    assert_same(net, other)


@each("way", ["alone", "workers"])
def test_one_cycle_cycles_the_betas_of_a_given_optimizer_where_the_worker_updates(way):
    net, trainer, given = by_instance("AdamW", {"lr": 0.01}, {}, way)
    other = network()
    theirs = torch.optim.AdamW(groups_of(other, {}), lr=0.01)
    schedules = [torch.optim.lr_scheduler.OneCycleLR(one, [0.02, 0.05], total_steps=110) for one in (given, theirs)]
    train(100, trainer, net, schedules[0], other, theirs, schedules[1])
    trainer.close()
    assert_same(net, other)


@each("way, used", [("servers", 0.5), ("workers", 0.5), ("overlap", 0.1)])
def test_a_rate_that_is_set_before_step_is_that_of_the_step_unless_gradients_have_left(way, used):
    weight = nn.Parameter(torch.zeros(1))
    given = torch.optim.SGD([weight], lr=0.1)
    trainer = Trainer([weight], given, **WAYS[way])
    weight.sum().backward()
    trainer.step()  # overlap begins with the second step
    given.zero_grad()
    weight.sum().backward()
    given.param_groups[0]["lr"] = 0.5
    trainer.step()
    assert weight.item() == pytest.approx(-0.1 - used)
    trainer.close()


def test_betas_that_change_on_servers_are_refused_and_nothing_is_sent():
    net, trainer, given = by_instance("Adam", {"lr": 0.01}, {}, "servers")
    given.param_groups[0]["betas"] = (0.5, 0.999)  # before the first step they may
    backward(net)
    trainer.step()
    given.param_groups[0]["betas"] = (0.6, 0.999)
    backward(net)
    with pytest.raises(
        ValueError, match=r"betas has changed from \(0.5, .* to \(0.6, .*but the weights are updated on the store"
    ):
        trainer.step()
    trainer.close()


def test_the_own_step_and_state_of_a_given_optimizer_are_refused():
    net, trainer, given = by_instance("Adam", {}, {}, "alone")
    backward(net)
    for call, instead in [
        (given.step, "trainer.step"),
        (given.state_dict, "as_torch_optimizer"),
        (lambda: given.load_state_dict(given.state), "as_torch_optimizer"),
    ]:
        with pytest.raises(RuntimeError, match=f"would act on this process alone.*{instead}"):
            call()
    trainer.step()
    with pytest.raises(ValueError, match="belongs to another Trainer"):
        Trainer(net.parameters(), given, kvstore=None)


@each("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_hook_that_a_given_optimizer_gets_later_is_refused_by_the_next_step_and_the_trainers_own_is_called(register):
    net, trainer, given = by_instance("SGD", {"lr": 1.0}, {}, "alone")
    own, called = trainer.as_torch_optimizer(), []
    getattr(own, register)(lambda *_: called.append(1))
    handle = getattr(given, register)(print)
    before = [one.detach().clone() for one in net.parameters()]
    for step in (trainer.step, own.step):
        backward(net)
        with pytest.raises(ValueError, match=r"a hook of its step\(\), print, which a Trainer never calls"):
            step()
    assert all(map(torch.equal, before, net.parameters()))
    handle.remove()
    called.clear()
    own.step()
    assert called == [1] and not any(map(torch.equal, before, net.parameters()))


class MyAdam(torch.optim.Adam):
    """A rule of the user's own, perhaps with another equation."""


def hooked(weights, register):
    optimizer = torch.optim.SGD(weights)
    getattr(optimizer, register)(lambda *_: None)
    return optimizer


@each(
    "make, error, words",
    [
        (lambda p: torch.optim.LBFGS(p), TypeError, "LBFGS .*closure several times.*DistributedOptimizer"),
        (lambda p: torch.optim.Adafactor(p), TypeError, "Adafactor .*rows and columns.*DistributedOptimizer"),
        (lambda p: torch.optim.SparseAdam(p), TypeError, "SparseAdam .*kvdist.Embedding .*lazy_update=True"),
        (lambda p: torch.optim.Muon(p[::2]), TypeError, "Muon .*whole matrices.*DistributedOptimizer"),
        (lambda p: torch.optim.ASGD(p), TypeError, "ASGD .*the step before.*DistributedOptimizer"),
        (lambda p: torch.optim.Rprop(p), TypeError, "Rprop .*full batches.*DistributedOptimizer"),
        (lambda p: MyAdam(p), TypeError, "MyAdam .*known are SGD, Adam.*not classes derived from them.*Distributed"),
        (lambda p: torch.optim.Adam, TypeError, "Adam is a class; give an instance.*'torch.adam'"),
        (lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1)), TypeError, "lr is a tensor.*float"),
        (lambda p: torch.optim.SGD(p, differentiable=True), ValueError, "gradients do not flow"),
        (lambda p: hooked(p, "register_step_pre_hook"), ValueError, "a hook .*<lambda>.*as_torch_optimizer"),
        (lambda p: hooked(p, "register_step_post_hook"), ValueError, "a hook .*<lambda>.*as_torch_optimizer"),
        (lambda p: torch.optim.SGD(p[:1]), ValueError, "is trained, and the optimizer has it not"),
        (lambda p: torch.optim.SGD([*p, nn.Parameter(torch.ones(1))]), ValueError, "that the Trainer has not"),
    ],
)
def test_what_cannot_be_carried_is_refused_with_a_remedy(make, error, words):
    weights = list(network().parameters())
    with pytest.raises(error, match=words):
        Trainer(weights, make(weights), kvstore=None)


REFUSED = {
    "Adafactor": torch.optim.Adafactor,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Muon": lambda own: torch.optim.Muon([one for one in own if one.ndim == 2]),
    "LBFGS": lambda own: torch.optim.LBFGS(own, max_iter=3),
    "of one's own": MyAdam,
}


def five_steps(net, optimizer, inputs, targets):
    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()
        return loss

    for _ in range(5):
        if isinstance(optimizer, torch.optim.LBFGS):
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()
    return net


@each("make", REFUSED.values())
def test_what_servers_cannot_do_horovods_optimizer_does_on_each_worker(make):
    import kvdist.horovod as hvd

    net, *nets = (network() for _ in range(3))  # here, as all threads share torch's seed
    whole = five_steps(net, make(list(net.parameters())), INPUTS, TARGETS)

    def program(rank):
        net = nets[rank]
        optimizer = hvd.DistributedOptimizer(make(list(net.parameters())), net.named_parameters())
        return five_steps(net, optimizer, INPUTS[rank::2], TARGETS[rank::2])

    for found in returned(run_ranks(2, program)):
        assert_same(found, whole)


def look_up(tables, step):
    """Backward passes through other rows in each step, one of them twice."""
    rows = torch.tensor([step % 9, step**2 % 7, step % 9])
    for table in tables:
        table.zero_grad()
        table(rows).sin().sum().backward()


def test_on_an_embedding_adam_with_lazy_update_is_sparse_adam():
    with kv.create("dist") as store:
        store.set_optimizer(create("adam", learning_rate=0.01, epsilon=0.1, lazy_update=True))
        table, other = Embedding(9, 4, store, initializer="uniform(0.5,seed=3)"), nn.Embedding(9, 4, sparse=True)
        with torch.no_grad():
            other.weight.copy_(table(torch.arange(9)))
        theirs = torch.optim.SparseAdam(other.parameters(), lr=0.01, eps=0.1)
        for step in range(20):
            look_up([table, other], step)
            table.step()
            theirs.step()
        torch.testing.assert_close(table(torch.arange(9)), other(torch.arange(9)), rtol=1e-6, atol=1e-6)


def test_sparse_gradients_move_all_rows_as_dense_ones_do():
    table, other = nn.Embedding(9, 4, sparse=True), nn.Embedding(9, 4)
    other.load_state_dict(table.state_dict())
    trainer = Trainer(table.parameters(), "torch.adam", {"lr": 0.01, "lazy_update": True}, kvstore="dist")
    theirs = torch.optim.Adam(other.parameters(), lr=0.01)
    for step in range(20):
        look_up([table, other], step)
        trainer.step()
        theirs.step()
    trainer.close()
    assert_same(table, other)


@each("name", ["torch.sgd", "torch.adamw"])
def test_halves_are_updated_in_float32_and_rounded_once(name):
    """One step of bfloat16 weights is that of the same weights in float32, rounded; a master goes on unrounded."""
    numbers = {"lr": 0.003, "weight_decay": 0.1}
    wide, half = (torch.linspace(0.1, 2, 50).bfloat16().to(dtype) for dtype in (torch.float32, torch.bfloat16))
    trainers = []
    for weight, more in ((wide, {}), (half, {"multi_precision": True})):
        weight.requires_grad_(True)
        trainers.append(Trainer([weight], name, {**numbers, **more}, kvstore="local", update_on_kvstore=True))
    for _ in range(10):
        for weight, trainer in zip((wide, half), trainers, strict=True):
            weight.grad = torch.full_like(weight, 0.25)
            trainer.step()
        assert torch.equal(wide.bfloat16(), half)
    assert torch.equal(trainers[1].as_torch_optimizer().state_dict()["state"][0]["master"], wide)


def test_groups_with_unknown_numbers_and_numbers_beside_an_instance_are_refused():
    weights = list(network().parameters())
    with pytest.raises(ValueError, match="cannot have 'beta1': a group has params, lr, betas"):
        Trainer([{"params": weights, "beta1": 0.9}], "torch.adam", kvstore=None)
    with pytest.raises(ValueError, match="cannot have 'lr': .*'torch.sgd'"):
        Trainer([{"params": weights, "lr": 0.9}], "sgd", kvstore=None)
    with pytest.raises(TypeError, match="takes no hyper-parameters"):
        Trainer(weights, torch.optim.SGD(weights), {"lr": 0.1}, kvstore=None)
    many = [nn.Parameter(torch.ones(1)) for _ in range(60)]
    Trainer([{"params": [one], "lr": 0.01 * i} for i, one in enumerate(many)], "torch.adam", kvstore=None)
    with pytest.raises(ValueError, match=r"differ in beta1, which takes \d{4} bytes .* takes 1024\. Let fewer"):
        Trainer([{"params": [one], "betas": (0.01 * i, 0.9)} for i, one in enumerate(many)], "torch.adam", kvstore=None)


def test_numbers_of_groups_follow_parameters_that_get_the_keys_of_rank_0():
    """The first parameter of each group keeps its key, and the others exchange theirs."""
    weights = [nn.Parameter(torch.ones(1)) for _ in range(4)]
    groups = [{"params": weights[:2]}, {"params": weights[2:], "lr": 0.5, "betas": (0.5, 0.9)}]
    model = Trainer(groups, "torch.adam", {"lr": 0.25}, kvstore=None)._model
    key_of = {0: 0, 1: 3, 2: 2, 3: 1}
    for parameter in model.parameters:
        parameter.key = key_of[parameter.key]
    model.groups.rekey(key_of)
    rule = model.optimizer
    assert [rule.for_key(key).beta1 for key in range(4)] == [0.9, 0.5, 0.5, 0.9]
    assert [rule.pushed_lr(key) for key in range(4)] == [0.25, 0.5, 0.5, 0.25]


def test_checkpoints_have_the_states(tmp_path):
    """A trainer that loads goes on as the one that saved, to the bit, on servers."""
    runs = []
    for resumes in (False, True):
        net, trainer, _ = by_instance("Adam", {"lr": 0.01}, {"amsgrad": True, "betas": (0.5, 0.9)}, "servers")
        if resumes:
            trainer.load_checkpoint(tmp_path)
        for step in range(5 if resumes else 10):
            backward(net)
            trainer.step()
            if step == 4 and not resumes:
                trainer.save_checkpoint(tmp_path, 5).result()
        runs.append([one.detach().clone() for one in net.parameters()])
        trainer.close()
    assert all(torch.equal(one, two) for one, two in zip(*runs, strict=True))
