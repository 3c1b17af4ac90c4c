"""`Trainer(clip_norm=...)`: the gradient that updates the weights has at most this norm, as torch computes it."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from kvdist import Trainer, kv
from kvdist.naming import model_of
from kvdist.optimizer import create
from kvdist.training.parameters import collect
from kvdist.training.trainer_config import statement
from tests.cases import each

PLAIN_SGD = {"learning_rate": 0.5}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 1)).to(dtype)


def set_grads(net, factor, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        parameter.grad = (factor * torch.randn(parameter.shape, generator=generator)).to(dtype)


def clipped_by_torch(net, max_norm):
    """The gradients, and the norm before."""
    other = copy.deepcopy(net)
    for parameter, own in zip(other.parameters(), net.parameters(), strict=True):
        parameter.grad = own.grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(other.parameters(), max_norm)
    return [parameter.grad for parameter in other.parameters()], float(norm)


@each("kvstore", [None, "dist"])
@each("dtype", [torch.float32, torch.float16, torch.bfloat16])
@each("factor", [0.01, 7.0, math.inf, math.nan])
def test_gradients_and_norm_are_those_of_torch(kvstore, dtype, factor):
    net = network(dtype)
    trainer = Trainer(net.parameters(), "sgd", PLAIN_SGD, kvstore, clip_norm=1.0)
    assert trainer.grad_norm is None
    set_grads(net, factor, dtype)
    expected, norm = clipped_by_torch(net, 1.0)
    trainer.step()
    torch.testing.assert_close(trainer.grad_norm, norm, rtol=0, atol=0, equal_nan=True)
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0, equal_nan=True)
    if trainer.kvstore is not None:
        trainer.kvstore.close()


def test_weights_are_those_of_torch_over_accumulated_passes():
    ours, theirs = network(), network()
    trainer = Trainer(ours.parameters(), "sgd", {"learning_rate": 0.1, "momentum": 0.9}, None, clip_norm=0.3)
    optimizer = torch.optim.SGD(theirs.parameters(), 0.1, momentum=0.9)
    for step in range(5):
        ours.zero_grad()
        theirs.zero_grad()
        for part in range(2):
            inputs = torch.randn(4, 3, generator=torch.Generator().manual_seed(2 * step + part))
            ours(inputs).square().mean().backward()
            theirs(inputs).square().mean().backward()
        trainer.step()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.3)
        optimizer.step()
        for own, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(own, other, rtol=0, atol=1e-6)


@each("kvstore", [None, "dist"])
@each("rescale", [1.0, 0.25])
def test_with_a_size_it_is_what_the_rule_gets_that_is_clipped(kvstore, rescale):
    net = network()
    weights = [parameter.detach().clone() for parameter in net.parameters()]
    trainer = Trainer(net.parameters(), "sgd", {**PLAIN_SGD, "rescale_grad": rescale}, kvstore, clip_norm=1.0)
    set_grads(net, 7.0)
    for parameter in net.parameters():
        parameter.grad *= rescale / 2
    expected, norm = clipped_by_torch(net, 1.0)
    set_grads(net, 7.0)
    trainer.step(2)
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-6)
    for parameter, grad, before in zip(net.parameters(), expected, weights, strict=True):
        torch.testing.assert_close(parameter, before - 0.5 * grad)
    if trainer.kvstore is not None:
        trainer.kvstore.close()


def test_between_allreduce_grads_and_update_the_norm_is_that_of_the_update():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", PLAIN_SGD, "dist", clip_norm=1.0)
    set_grads(net, 7.0)
    _, norm = clipped_by_torch(net, 1.0)
    trainer.allreduce_grads()
    trainer.update(10)
    assert trainer.grad_norm == pytest.approx(norm / 10, rel=1e-6)
    assert trainer.kvstore is not None
    trainer.kvstore.close()


def test_replicas_stay_equal_and_their_mean_is_clipped():
    nets = [network(), network()]
    pairs = zip(*(net.parameters() for net in nets), strict=True)
    trainer = Trainer(pairs, "sgd", PLAIN_SGD, "device", clip_norm=1.0)
    set_grads(nets[0], 4.0)
    set_grads(nets[1], 8.0)
    mean = network()
    set_grads(mean, 6.0)
    expected, norm = clipped_by_torch(mean, 1.0)
    trainer.step()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-6)
    for own, other, grad in zip(nets[0].parameters(), nets[1].parameters(), expected, strict=True):
        assert torch.equal(own, other)
        torch.testing.assert_close(own.grad, grad)


def test_a_scaler_is_undone_before_and_a_step_that_it_skips_stays_skipped():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", PLAIN_SGD, "dist", clip_norm=1.0)
    optimizer, scaler = trainer.as_torch_optimizer(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    inputs = torch.full((2, 3), 3.0)
    scaler.scale(net(inputs).square().mean()).backward()
    plain = network()
    plain(inputs).square().mean().backward()
    expected, norm = clipped_by_torch(plain, 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-5)
    for parameter, grad in zip(net.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)
    before = [parameter.detach().clone() for parameter in net.parameters()]
    set_grads(net, math.inf)
    scaler.scale(torch.zeros(()))
    scaler.step(optimizer)
    for parameter, weight in zip(net.parameters(), before, strict=True):
        assert torch.equal(parameter, weight)
    assert trainer.kvstore is not None
    trainer.kvstore.close()


def test_sparse_gradients_count_where_the_worker_updates_and_are_refused_on_servers():
    def table():
        torch.manual_seed(0)
        return torch.nn.Embedding(6, 2, sparse=True)

    layer = table()
    trainer = Trainer(layer.parameters(), "sgd", PLAIN_SGD, None, clip_norm=0.5)
    layer(torch.tensor([1, 1, 4])).sum().backward()
    trainer.step()
    assert trainer.grad_norm == pytest.approx(math.sqrt(4 + 4 + 1 + 1))
    for where in (None, True):
        layer = table()
        with kv.create("dist") as store:
            trainer = Trainer(layer.parameters(), "sgd", PLAIN_SGD, store, update_on_kvstore=where, clip_norm=0.5)
            layer(torch.tensor([1, 1, 4])).sum().backward()
            with pytest.raises(ValueError, match="some gradients are sparse.*clip_norm"):
                trainer.step()


def test_compressed_sums_are_clipped():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", PLAIN_SGD, "dist", {"type": "fp16"}, clip_norm=1.0)
    set_grads(net, 7.0)
    _, norm = clipped_by_torch(net, 1.0)
    trainer.step()
    assert trainer.grad_norm == pytest.approx(norm, rel=1e-3)
    clipped = torch.cat([parameter.grad.flatten() for parameter in net.parameters()])
    assert float(clipped.norm()) == pytest.approx(1.0, rel=1e-3)
    assert trainer.kvstore is not None
    trainer.kvstore.close()


def test_without_it_there_is_no_norm():
    net = network()
    trainer = Trainer(net.parameters(), "sgd", PLAIN_SGD, None)
    set_grads(net, 7.0)
    trainer.step()
    assert trainer.grad_norm is None


@each(
    "arguments, error, message",
    [
        ({"clip_norm": 0}, ValueError, "clip_norm is 0; the largest norm"),
        ({"clip_norm": -1.0}, ValueError, "clip_norm is -1.0"),
        ({"clip_norm": math.nan}, ValueError, "clip_norm is nan"),
        ({"clip_norm": "1"}, TypeError, "clip_norm must be a number or None, not str"),
        ({"clip_norm": True}, TypeError, "not bool"),
        ({"update_on_kvstore": True, "kvstore": "device"}, ValueError, "store 'dist', not 'device': leave update_on"),
        ({"update_on_kvstore": True, "kvstore": None}, ValueError, "leave update_on_kvstore out, and the workers upd"),
        ({"overlap": True}, ValueError, "cannot be combined with overlap=True"),
        ({"share_weights": True}, ValueError, "cannot be combined with share_weights=True"),
        ({"kvstore": "dist_async"}, ValueError, "the store 'dist_async' has none"),
        ({"kvstore": "Dist_Device_Async"}, ValueError, "has none"),
    ],
)
def test_what_cannot_be_is_refused_when_the_trainer_is_made(arguments, error, message):
    with pytest.raises(error, match=message):
        Trainer(network().parameters(), "sgd", **{"kvstore": "dist", "clip_norm": 1.0, **arguments})


def test_an_asynchronous_store_is_refused_by_itself_too():
    with kv.create("dist_async") as store, pytest.raises(ValueError, match="has none"):
        Trainer(network().parameters(), "sgd", kvstore=store, clip_norm=1.0)


def test_workers_that_clip_otherwise_do_not_train_together():
    parameters = collect(network().parameters())
    said = {statement(parameters, by, norm) for by in (create("sgd"), None) for norm in (None, 1.0, 1.0000001)}
    assert len(said) == 6


def test_of_a_worker_that_joins_only_the_model_is_compared():
    parameters = collect(network().parameters())
    ways = [(by, norm, loaded) for by in (create("sgd"), None) for norm in (None, 1.0) for loaded in ("", "0a1")]
    assert {model_of(statement(parameters, *way)) for way in ways} == {"4 parameters, trained are 0-3"}
    assert model_of(statement([parameters[0], parameters[2]], None)) == "2 parameters, trained are 0-1"
    assert model_of("begins with step 400") == ""
