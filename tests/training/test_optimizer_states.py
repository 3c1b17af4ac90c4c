"""`as_torch_optimizer().state_dict()`: torch's format, the same bits afterwards, and errors where it does not fit."""

from __future__ import annotations

import copy
import io

import numpy as np
import pytest
import torch

from kvdist import PushRefused, Trainer, kv
from kvdist.optimizer.states import digest
from tests.cases import each

MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}


def network(dtype=torch.float32, width=40):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, width), torch.nn.Linear(width, 3)).to(dtype)


class Run:
    """A network in training."""

    def __init__(self, rule="adam", numbers=None, kvstore=None, dtype=torch.float32, saved=None, **arguments):
        self.net = network(dtype)
        self.dtype = dtype
        numbers = {"learning_rate": 0.01, **(numbers or {})}
        self.trainer = Trainer(self.net.parameters(), rule, numbers, kvstore, **arguments)
        self.optimizer = self.trainer.as_torch_optimizer()
        if saved is not None:
            saved.seek(0)
            weights, state = torch.load(saved)
            self.net.load_state_dict(weights)
            self.optimizer.load_state_dict(state)

    def train(self, *steps):
        for step in steps:
            self.optimizer.zero_grad()
            inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(step)).to(self.dtype)
            self.net(inputs).square().mean().backward()
            self.optimizer.step()

    def saved(self):
        file = io.BytesIO()
        torch.save((self.net.state_dict(), self.optimizer.state_dict()), file)
        return file

    def close(self):
        self.trainer.close()
        return [parameter.detach() for parameter in self.net.parameters()]


@each(
    "kvstore, update_on_kvstore", [(None, None), ("local", True), ("dist", None), ("dist", False), ("dist_async", None)]
)
@each(
    "rule, numbers",
    [
        ("adam", {}),
        ("sgd", {"momentum": 0.9}),
        ("sgd", {}),
        ("nadam", {}),
        ("lamb", {}),
        ("rmsprop", {"centered": True}),
        ("dcasgd", {"momentum": 0.9}),
    ],
)
@each("dtype", [torch.float32, torch.bfloat16])
def test_a_run_that_was_saved_goes_on_with_the_same_bits(kvstore, update_on_kvstore, rule, numbers, dtype):
    arguments = (rule, {**numbers, "multi_precision": True}, kvstore, dtype)
    whole = Run(*arguments, update_on_kvstore=update_on_kvstore)
    whole.train(0, 1, 2)
    saved = whole.saved()
    whole.train(3, 4)
    later = Run(*arguments, saved=saved, update_on_kvstore=update_on_kvstore)
    later.train(3, 4)
    states = [run.optimizer.state_dict()["state"] for run in (whole, later)]
    for index, state in states[0].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, states[1][index][name]), (index, name)
    for own, other in zip(whole.close(), later.close(), strict=True):
        assert torch.equal(own, other)


@each("kvstore", [None, "dist"])
def test_names_shapes_and_meaning_of_adam_are_those_of_torch(kvstore):
    run, theirs = Run("adam", {"epsilon": 1e-8}, kvstore), network()
    optimizer = torch.optim.Adam(theirs.parameters(), 0.01)
    for step in range(3):
        run.train(step)
        optimizer.zero_grad()
        theirs(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
        optimizer.step()
    ours, expected = run.optimizer.state_dict(), optimizer.state_dict()
    run.close()
    assert ours["state"].keys() == expected["state"].keys()
    assert ours["param_groups"][0]["params"] == expected["param_groups"][0]["params"]
    for index, state in expected["state"].items():
        assert ours["state"][index].keys() == state.keys()
        for name, tensor in state.items():
            torch.testing.assert_close(ours["state"][index][name], tensor, rtol=1e-3, atol=1e-5, check_dtype=False)


def test_rules_by_rows_have_states_by_rows():
    layer = torch.nn.Linear(3, 4, bias=False)
    trainer = Trainer(layer.parameters(), "groupadagrad", kvstore="dist")
    layer(torch.ones(2, 3)).sum().backward()
    trainer.step()
    (state,) = trainer.as_torch_optimizer().state_dict()["state"].values()
    assert state["history"].shape == (4,)
    trainer.as_torch_optimizer().load_state_dict(trainer.as_torch_optimizer().state_dict())
    trainer.close()


def test_it_is_a_copy_of_one_moment():
    run = Run("sgd", {"momentum": 0.9})
    run.train(0)
    state = run.optimizer.state_dict()
    before = copy.deepcopy(state)
    run.train(1)
    for index, one in before["state"].items():
        assert torch.equal(one["momentum_buffer"], state["state"][index]["momentum_buffer"])
    assert not run.optimizer.state, "what is there would be old"


def test_before_the_first_step_there_is_what_was_loaded():
    first = Run()
    assert first.optimizer.state_dict()["state"] == {}
    first.optimizer.load_state_dict(first.optimizer.state_dict())  # as Accelerate does when it prepares
    first.train(0)
    later = Run(saved=first.saved())
    state = later.optimizer.state_dict()["state"]
    assert float(state[0]["step"]) == 1
    assert torch.equal(state[0]["exp_avg"], first.optimizer.state_dict()["state"][0]["exp_avg"])


@each("kvstore", [None, "dist"])
def test_loading_takes_effect_within_a_run_too(kvstore):
    run = Run("sgd", {"momentum": 0.9}, kvstore)
    beginning = run.optimizer.state_dict()
    run.train(0)
    once = run.optimizer.state_dict()
    run.train(1)
    run.optimizer.load_state_dict(once)
    again = run.optimizer.state_dict()
    for index, one in once["state"].items():
        assert torch.equal(one["momentum_buffer"], again["state"][index]["momentum_buffer"])
    run.optimizer.load_state_dict(beginning)
    assert run.optimizer.state_dict()["state"] == {}
    run.close()


def test_frozen_parameters_and_those_without_a_gradient_have_none():
    net = network()
    net[0].weight.requires_grad_(False)
    trainer = Trainer(net.parameters(), "sgd", MOMENTUM, "dist")
    net[1](torch.ones(1, 40)).sum().backward()
    trainer.step()
    optimizer = trainer.as_torch_optimizer()
    state = optimizer.state_dict()
    assert sorted(state["state"]) == [2, 3]
    optimizer.load_state_dict(state)
    state["state"][0] = state["state"][2]
    with pytest.raises(ValueError, match=r"without \['0'\]"):
        optimizer.load_state_dict(state)
    trainer.close()


@each("update_on_kvstore", [True, False])
def test_replicas_share_one_state(update_on_kvstore):
    def run(state=None):
        nets = [network(), network()]
        pairs = list(zip(*(net.parameters() for net in nets), strict=True))
        trainer = Trainer(pairs, "sgd", MOMENTUM, "device", update_on_kvstore=update_on_kvstore)
        if state is not None:
            trainer.as_torch_optimizer().load_state_dict(state)
        return nets, trainer

    def step(nets, trainer, seed):
        for net in nets:
            net.zero_grad()
            net(torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        trainer.step()

    nets, trainer = run()
    step(nets, trainer, 0)
    state = trainer.as_torch_optimizer().state_dict()
    assert sorted(state["state"]) == [0, 2, 4, 6]
    others, later = run(copy.deepcopy(state))
    for net, other in zip(nets, others, strict=True):
        other.load_state_dict(net.state_dict())
    step(nets, trainer, 1)
    step(others, later, 1)
    for net in others:
        for own, other in zip(nets[0].parameters(), net.parameters(), strict=True):
            assert torch.equal(own, other)


def changed(name, tensor):
    def change(state):
        state["state"][0][name] = tensor

    return change


def lost(state):
    del state["state"][0]["exp_avg"]


@each(
    "change, message",
    [
        (changed("exp_avg", torch.zeros(40, 6)), r"parameter 0 has shape \(40, 6\), but in this model \(40, 5\)"),
        (changed("momentum_buffer", torch.zeros(40, 5)), "adam keeps step, exp_avg, exp_avg_sq: it is of another"),
        (lost, "has step, exp_avg_sq, and adam keeps step, exp_avg"),
        (changed("step", torch.tensor(1.5)), "step of parameter 0 is 1.5; it counts updates"),
        (changed("step", torch.tensor(float("inf"))), "step of parameter 0 is inf"),
        (lambda state: state["param_groups"].append({}), "different number of parameter groups"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_nothing_changes(change, message):
    run = Run()
    run.train(0)
    before = run.optimizer.state_dict()
    state = copy.deepcopy(before)
    change(state)
    with pytest.raises(ValueError, match=message):
        run.optimizer.load_state_dict(state)
    after = run.optimizer.state_dict()
    assert torch.equal(before["state"][0]["exp_avg"], after["state"][0]["exp_avg"])


def test_gradients_under_way_are_waited_for_by_a_step():
    run = Run("sgd", {"momentum": 0.9}, "dist", overlap=True)
    run.train(0, 1)
    run.net(torch.ones(1, 5)).sum().backward()
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        run.optimizer.state_dict()
    run.optimizer.step()
    assert float(run.optimizer.state_dict()["state"][0]["step"]) == 3
    run.close()


def test_a_store_gives_and_takes_states_of_its_keys():
    with kv.create("dist") as store:
        store.init(["a", "b"], [np.ones(3, np.float32), np.ones((2, 2), np.float32)])
        with pytest.raises(PushRefused, match="no optimizer"):
            store.optimizer_states(["a"])
        store.set_optimizer("sgd", learning_rate=0.5, momentum=0.5)
        store.push("a", np.ones(3, np.float32))
        store.pull("a")
        a, b = store.optimizer_states(["a", "b"])
        assert b is None
        assert (a.count, a.arrays[0].tolist()) == (1, [-0.5, -0.5, -0.5])
        assert digest([a, b]) != digest([b, a]) != digest([None])
        a.arrays[0][:] = 2
        store.replace_optimizer_states(["a"], [a])
        store.push("a", np.zeros(3, np.float32))
        assert store.pull("a").tolist() == [1.5, 1.5, 1.5]
        a.arrays = (np.zeros(2, np.float32),)
        with pytest.raises(PushRefused, match="has 2 elements of float32, where sgd keeps 3 of float32"):
            store.replace_optimizer_states(["a"], [a])
        a.arrays = (np.zeros(3, np.float32), np.zeros(3, np.float32))
        with pytest.raises(PushRefused, match="state of key 'a' has no part 2"):
            store.replace_optimizer_states(["a"], [a])
        for count in (float("inf"), float("nan"), -1, 0.5):
            a.count = count
            with pytest.raises(PushRefused, match="cannot have had"):
                store.replace_optimizer_states(["a"], [a])


def _lightning(folder, net=None, optimizer=None, schedule=None, into=None):
    """Lightning 2's checkpoint: https://lightning.ai/docs/pytorch/stable/common/checkpointing_basic.html"""
    path = folder / "last.ckpt"
    if into is None:
        torch.save(
            {
                "epoch": 1,
                "global_step": 3,
                "state_dict": {f"net.{name}": tensor for name, tensor in net.state_dict().items()},
                "optimizer_states": [optimizer.state_dict()],
                "lr_schedulers": [schedule.state_dict()],
            },
            path,
        )
        return
    saved = torch.load(path, weights_only=True)
    weights = {name.removeprefix("net."): tensor for name, tensor in saved["state_dict"].items()}
    for one, state in zip(into, (weights, saved["optimizer_states"][0], saved["lr_schedulers"][0]), strict=True):
        one.load_state_dict(state)


def _hugging_face(folder, net=None, optimizer=None, schedule=None, into=None):
    """The files of `transformers.Trainer`'s checkpoint folder."""
    names = ("pytorch_model.bin", "optimizer.pt", "scheduler.pt")
    for name, one in zip(names, into or (net, optimizer, schedule), strict=True):
        if into is None:
            torch.save(one.state_dict(), folder / name)
        else:
            one.load_state_dict(torch.load(folder / name, weights_only=True))


@each("layout", [_lightning, _hugging_face])
@each("kvstore, update_on_kvstore", [("dist", True), ("dist", False), (None, None)])
def test_a_run_goes_on_from_files_of_frameworks_with_the_same_bits(layout, kvstore, update_on_kvstore, tmp_path):
    def begun():
        run = Run("adam", kvstore=kvstore, update_on_kvstore=update_on_kvstore)
        return run, torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 6)

    def train(run, schedule, *steps):
        for step in steps:
            run.train(step)
            schedule.step()

    whole, schedule = begun()
    train(whole, schedule, 0, 1, 2)
    layout(tmp_path, whole.net, whole.optimizer, schedule)
    train(whole, schedule, 3, 4)
    later, schedule = begun()
    layout(tmp_path, into=(later.net, later.optimizer, schedule))
    train(later, schedule, 3, 4)
    for own, other in zip(whole.close(), later.close(), strict=True):
        assert torch.equal(own, other)
