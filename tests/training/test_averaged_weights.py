"""`average_half_life`: the servers' average of the weights, as pulled, shown in a net, saved, loaded and exported."""

from __future__ import annotations

import pytest
import torch

from kvdist import ConfigError, Trainer, diloco, kv, local_sgd, quota
from tests.cases import each

HALF_LIFE = 3.0
SGD = {"learning_rate": 0.1, "momentum": 0.9}


def network(seed=0, width=40):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, width), torch.nn.Tanh(), torch.nn.Linear(width, 1))


def backward(net, seed):
    generator = torch.Generator().manual_seed(seed)
    net.zero_grad()
    net(torch.randn(8, 3, generator=generator)).square().mean().backward()


def averaged_by_torch(net):
    decay = 0.5 ** (1 / HALF_LIFE)
    averaged = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay))
    averaged.update_parameters(net)  # the weights before the first step
    return averaged


def copies(net):
    return [parameter.detach().clone() for parameter in net.parameters()]


def assert_close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=1e-5, atol=1e-6)


@each("kind", ["dist", "dist_async"])
@each("optimizer", [("sgd", SGD), ("adam", {}), ("lars", SGD), ("torch.adamw", {"lr": 0.01})])
def test_it_is_that_of_torch_and_the_training_weights_are_back_to_the_bit(kind, optimizer):
    net = network()
    averaged = averaged_by_torch(net)
    with kv.create(kind) as store:
        trainer = Trainer(net.parameters(), *optimizer, kvstore=store, average_half_life=HALF_LIFE)
        for step in range(6):
            backward(net, step)
            trainer.step()
            averaged.update_parameters(net)
            before, places = copies(net), [parameter.data_ptr() for parameter in net.parameters()]
            with trainer.averaged_weights():
                assert_close(net.parameters(), averaged.module.parameters())
                assert not torch.equal(net[0].weight, before[0])
            assert [parameter.data_ptr() for parameter in net.parameters()] == places
            assert all(map(torch.equal, net.parameters(), before))


def test_one_of_torchs_own_optimizers_is_averaged_too():
    net = network()
    averaged = averaged_by_torch(net)
    with kv.create("dist") as store:
        optimizer = torch.optim.SGD([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.01}], 0.1)
        trainer = Trainer(net.parameters(), optimizer, kvstore=store, average_half_life=HALF_LIFE)
        for step in range(4):
            backward(net, step)
            trainer.step()
            averaged.update_parameters(net)
        with trainer.averaged_weights():
            assert_close(net.parameters(), averaged.module.parameters())
        own = trainer.as_torch_optimizer().state_dict()
        assert_close([own["state"][0]["average"]], [averaged.module[0].weight])
        trainer.as_torch_optimizer().load_state_dict(own)
        with trainer.averaged_weights():
            assert_close(net.parameters(), averaged.module.parameters())


@each("policy", [diloco(2), local_sgd(2)])
@each("optimizer", [SGD, {"learning_rate": 0.1}])
@each("whose", ["trainer", "optimizer"])
def test_under_a_policy_of_local_steps_it_is_of_the_exchanged_weights_and_training_is_as_without(
    policy, optimizer, whose
):
    net, plain = network(), network()
    averaged = averaged_by_torch(net)
    given = ("sgd", {**optimizer, "average_half_life": HALF_LIFE}) if whose == "optimizer" else ("sgd", optimizer)
    half_life = HALF_LIFE if whose == "trainer" else None
    with kv.create("dist", policy=policy) as store, kv.create("dist", policy=policy) as other:
        trainer = Trainer(net.parameters(), *given, kvstore=store, average_half_life=half_life)
        without = Trainer(plain.parameters(), "sgd", optimizer, kvstore=other)
        for step in range(6):
            for one, its in ((net, trainer), (plain, without)):
                backward(one, step)
                its.step()
            assert all(map(torch.equal, net.parameters(), plain.parameters()))
            if step % 2:
                averaged.update_parameters(net)
        with trainer.averaged_weights():
            assert_close(net.parameters(), averaged.module.parameters())
        assert trainer.optimizer.average_half_life is None


def test_under_a_quota_it_is_of_its_versions():
    net = network()
    averaged = averaged_by_torch(net)
    with kv.create("dist", policy=quota(1000)) as store:
        trainer = Trainer(net.parameters(), "sgd", SGD, kvstore=store, average_half_life=HALF_LIFE)
        for step in range(6):
            backward(net, step)
            trainer.step(samples=8)
            trainer.exchange()
            averaged.update_parameters(net)
        with trainer.averaged_weights():
            assert_close(net.parameters(), averaged.module.parameters())
        trainer.close()


def test_within_the_block_nothing_trains_and_an_error_leaves_the_training_weights():
    net = network()
    with kv.create("dist") as store:
        trainer = Trainer(net.parameters(), "sgd", SGD, kvstore=store, average_half_life=HALF_LIFE)
        backward(net, 0)
        trainer.step()
        before = copies(net)
        for call in (trainer.step, trainer.exchange, trainer.broadcast_parameters, lambda: trainer.load_states("x")):
            with (
                pytest.raises(RuntimeError, match="the parameters are averages: leave the block"),
                trainer.averaged_weights(),
            ):
                call()
        assert all(map(torch.equal, net.parameters(), before))
        backward(net, 1)
        trainer.step()


def test_where_workers_update_torchs_is_named():
    with kv.create("dist") as store:
        for kvstore, where in ((None, None), ("device", None), (store, False)):
            trainer = Trainer(network().parameters(), "sgd", SGD, kvstore, None, where, average_half_life=HALF_LIFE)
            with pytest.raises(ConfigError, match="torch.optim.swa_utils.AveragedModel"):
                trainer.step()
        trainer = Trainer(network().parameters(), "sgd", SGD, kvstore=store)
        with (
            pytest.raises(ConfigError, match="keeps no averages of the weights: give its optimizer"),
            trainer.averaged_weights(),
        ):
            pass
