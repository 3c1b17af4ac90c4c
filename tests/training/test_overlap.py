"""The trainer with ``overlap=True``: what is sent when, that the weights are those without, and what is refused."""

import functools
from concurrent.futures import Future

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from kvdist.errors import ForkError, PeerLostError
from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.training import overlap as overlap_module
from kvdist.training.overlap import Overlap
from kvdist.training.trainer import Trainer
from tests.cases import each

torch.set_num_threads(1)


class Cluster(KVStore):
    """A local store that passes for one of two workers, and writes down what is asked of it."""

    def __init__(self, type_name="dist"):
        super().__init__(LocalBackend(type_name))
        self.calls, self.rates = [], []
        self.instead = {}
        """Verb → an error that its call raises, or a future that it returns without doing anything."""

    @property
    def num_workers(self):
        return 2

    @property
    def num_servers(self):
        return 2

    def set_optimizer(self, optimizer, **hyperparameters):
        self.optimizer = optimizer
        super().set_optimizer(optimizer, **hyperparameters)

    def push_async(self, key, value, priority=0, *, average=False, samples=0):
        assert average and not samples
        self.rates.append(self.optimizer.learning_rate)
        return self._answer("push", key, priority, lambda: self.push(key, value))

    def pull_async(self, key, out=None, priority=0, ignore_sparse=True):
        return self._answer("pull", key, priority, lambda: self.pull(key, out))

    def pushpull_async(self, key, value, out=None, priority=0, *, average=False, samples=0):
        assert average and not samples
        return self._answer("pushpull", key, priority, lambda: self.pushpull(key, value, out))

    def _answer(self, verb, key, priority, work):
        self.calls.append((verb, key, priority))
        instead = self.instead.get(verb)
        if isinstance(instead, Exception):
            raise instead
        if instead is not None:
            return instead
        work()
        future = Future()
        future.set_result(None)
        return future


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Buckets of 40 bytes: in `network` the last layer is one, and so on."""
    monkeypatch.setattr(overlap_module, "Overlap", functools.partial(Overlap, bucket_bytes=40))


def parameter(number=0.0, shape=(10,)):
    return nn.Parameter(torch.full(shape, number))


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def make(params, **options):
    options = {"optimizer_params": {"learning_rate": 1.0}, "kvstore": Cluster(), "overlap": True, **options}
    return Trainer(params, options.pop("optimizer", "sgd"), **options)


def started(params, **options):
    """A trainer that has made everybody's weights equal, so the next pass is sent."""
    trainer = make(params, **options)
    trainer.broadcast_parameters()
    return trainer


def backward(*weights, factor=1.0):
    for weight in weights:
        weight.grad = None
    sum((weight * factor).sum() for weight in weights).backward()


def assert_all(tensor, number):
    np.testing.assert_array_equal(tensor.detach().float().numpy(), number)


# What is sent when.


def test_buckets_are_pushed_during_backward_and_weights_are_pulled_in_step():
    net, store = network(), Cluster()
    trainer = make(net.parameters(), kvstore=store)
    loss = net(torch.ones(2, 5)).square().mean()
    loss.backward()
    assert store.calls == []  # nothing is sent before the first step
    pushes = [("push", [2, 3], 0), ("push", [0, 1], 1)]
    pulls = [("pull", [0, 1], 1), ("pull", [2, 3], 0)]
    trainer.step()
    assert store.calls == pushes + pulls
    before = [one.detach().clone() for one in net.parameters()]
    net.zero_grad()
    net(torch.ones(2, 5)).square().mean().backward()
    assert store.calls == pushes + pulls + pushes
    assert all(torch.equal(one, old) for one, old in zip(net.parameters(), before, strict=True))
    trainer.step()
    assert store.calls == 2 * (pushes + pulls)
    assert not any(torch.equal(one, old) for one, old in zip(net.parameters(), before, strict=True))


def test_where_workers_update_sums_come_back_in_place_during_backward():
    net, store = network(), Cluster()
    trainer = started(net.parameters(), kvstore=store, update_on_kvstore=False)
    net(torch.ones(2, 5)).square().mean().backward()
    assert store.calls == [("pushpull", [2, 3], 0), ("pushpull", [0, 1], 1)]
    trainer.step()
    assert store.calls[2:] == [("pushpull", [4], 0)], "who had which gradient"


@each("update_on_kvstore", [True, False])
@each("optimizer", ["sgd", "adam"])
@each("kvstore", [None, "device", "dist"])
def test_weights_are_bit_for_bit_those_without_overlap(kvstore, optimizer, update_on_kvstore):
    weights = []
    for overlap in (False, True):
        net = network()
        store = Cluster() if kvstore == "dist" else kvstore
        options = {"kvstore": store, "optimizer": optimizer, "optimizer_params": {"learning_rate": 0.1}}
        trainer = make(net.parameters(), **options, overlap=overlap, update_on_kvstore=update_on_kvstore)
        random = torch.Generator().manual_seed(1)
        for step in range(6):
            trainer.set_learning_rate(0.1 / (step + 1))
            net.zero_grad()
            net(torch.randn(6, 5, generator=random)).square().mean().backward()
            trainer.step()
        weights.append([one.detach().clone() for one in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@each("update_on_kvstore", [True, False])
def test_replicas_on_two_devices_train_as_without_overlap(update_on_kvstore):
    weights = []
    for overlap in (False, True):
        nets = [network(1), network(2)]
        replicas = zip(*(net.parameters() for net in nets), strict=True)
        trainer = make(replicas, kvstore="device", overlap=overlap, update_on_kvstore=update_on_kvstore)
        trainer.broadcast_parameters()
        for step in range(4):
            for device, net in enumerate(nets):
                net.zero_grad()
                if step != device:  # in two steps one of them has no gradient at all
                    net(torch.full((3, 5), step + device / 4)).square().mean().backward()
            trainer.step()
        weights.append([one.detach().clone() for net in nets for one in net.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*weights, strict=True))


@each("dtype", [torch.float16, torch.bfloat16, torch.float64])
@each("update_on_kvstore", [True, False])
def test_every_floating_type_is_trained_also_where_it_is_not_contiguous(dtype, update_on_kvstore):
    weight = nn.Parameter(torch.ones(3, 2, dtype=dtype).t())
    trainer = started([weight], update_on_kvstore=update_on_kvstore)
    for expected in (-1, -3):
        weight.grad = None
        (weight * 2).sum().backward()
        trainer.step()
        assert_all(weight, expected)


@each("update_on_kvstore", [True, False])
def test_a_parameter_without_a_gradient_is_sent_in_step_and_stays(update_on_kvstore):
    unused, used, store = parameter(5.0), parameter(), Cluster()
    trainer = started([unused, used], kvstore=store, update_on_kvstore=update_on_kvstore)
    for step in range(1, 3):
        backward(used)
        in_each_step = 4 if update_on_kvstore else 3  # two pushes, and two pulls or a word on who had what
        assert len(store.calls) == in_each_step * (step - 1) + 1
        trainer.step()
    assert_all(unused, 5)
    assert_all(used, -2)


def test_a_learning_rate_set_after_backward_is_that_of_the_next_step():
    first, second, store = parameter(), parameter(), Cluster()
    trainer = started([first, second], kvstore=store)
    assert store.optimizer is not trainer.optimizer
    for rate in (0.5, 0.25):
        backward(second)  # the bucket of the other one leaves in step
        trainer.set_learning_rate(rate)
        trainer.step()
    assert store.rates == [1, 1, 0.5, 0.5]
    trainer.optimizer.lr_mult[1] = 2.0
    backward(first, second)
    trainer.step()
    assert_all(second, -1 - 0.5 - 0.5)
    assert_all(first, -0.25)


# Several passes.


@each("update_on_kvstore", [True, False])
@each("overlap", [False, True])
def test_passes_within_no_sync_add_up_to_one_step(overlap, update_on_kvstore):
    weight, store = parameter(), Cluster()
    trainer = started([weight], kvstore=store, overlap=overlap, update_on_kvstore=update_on_kvstore)
    for step in range(1, 3):
        weight.grad = None
        with trainer.no_sync():
            for _ in range(2):
                weight.sum().backward()
        (weight * 2).sum().backward()
        trainer.step()
        assert_all(weight, -4 * step)


def test_a_step_after_passes_that_only_accumulated_sends_their_gradients():
    trainer = started([weight := parameter()])
    with trainer.no_sync():
        backward(weight)
    trainer.step()
    assert_all(weight, -1)


@each("update_on_kvstore", [True, False])
def test_two_passes_in_one_step_raise_in_the_second_and_the_step_says_so_again(update_on_kvstore):
    trainer = started([weight := parameter()], update_on_kvstore=update_on_kvstore)
    backward(weight)
    with pytest.raises(RuntimeError, match="an earlier pass has sent already and no step"):
        weight.sum().backward()
    with pytest.raises(
        RuntimeError, match=r"the gradient of parameter 0 of shape \(10,\) was changed after it had been sent"
    ):
        trainer.step()
    weight.grad = None
    trainer.broadcast_parameters()
    backward(weight)
    trainer.step()  # and the one after it is as if nothing had been


@each("update_on_kvstore", [True, False])
@each(
    "change",
    [
        lambda weight: nn.utils.clip_grad_norm_([weight], 0.1),
        lambda weight: weight.grad.zero_(),
        lambda weight: setattr(weight, "grad", None),
        lambda weight: setattr(weight, "grad", weight.grad.clone()),
    ],
)
def test_a_gradient_that_is_changed_between_backward_and_step_is_an_error(change, update_on_kvstore):
    trainer = started({"w": (weight := parameter())}, update_on_kvstore=update_on_kvstore)
    backward(weight)
    change(weight)
    with pytest.raises(RuntimeError, match=r"gradient of 'w' was changed.*clipping.*allreduce_grads\(average=True\)"):
        trainer.step()
    assert not trainer._steps.buckets.is_open


def test_where_workers_update_gradients_can_be_clipped_after_allreduce_grads():
    trainer = started([weight := parameter()], update_on_kvstore=False)
    for step in range(1, 3):
        backward(weight, factor=8.0)
        with pytest.raises(RuntimeError, match=r"update\(\) while gradients.*call allreduce_grads\(average=True\)"):
            trainer.update()
        trainer.allreduce_grads(average=True)
        weight.grad.clamp_(max=2.0)
        trainer.update()
        assert_all(weight, -2 * step)


# What is refused.


@each("kvstore", [None, "device", "dist"])
def test_a_batch_size_comes_too_late(kvstore):
    weight = parameter()
    trainer = make([weight], kvstore=Cluster() if kvstore == "dist" else kvstore)
    backward(weight)
    with pytest.raises(ValueError, match=r"step\(32\) with overlap=True.*Make the loss a mean"):
        trainer.step(32)
    trainer.step()
    assert_all(weight, -1)


def test_sums_that_are_not_averages_are_refused():
    with pytest.raises(ValueError, match=r"call allreduce_grads\(average=True\), or"):
        started([parameter()], update_on_kvstore=False).allreduce_grads()


def test_weights_cannot_be_broadcast_while_gradients_are_under_way():
    trainer = started([weight := parameter()])
    backward(weight)
    with pytest.raises(RuntimeError, match=r"broadcast_parameters\(\) while gradients .* call step\(\) before it"):
        trainer.broadcast_parameters()
    trainer.step()
    trainer.broadcast_parameters()


def test_a_sparse_gradient_leaves_as_an_array():
    table = nn.Embedding(4, 10, sparse=True, _weight=torch.zeros(4, 10))
    trainer = started(table.parameters(), optimizer_params={"learning_rate": 1})
    table(torch.tensor([1, 1])).sum().backward()
    trainer.step()
    assert table.weight[:, 0].tolist() == [0, -2, 0, 0]


# Errors of the store.


@each("verb", ["push", "pull"])
def test_an_error_that_came_to_a_future_is_raised_by_step(verb):
    store = Cluster()
    trainer = started([weight := parameter()], kvstore=store)
    lost = store.instead[verb] = Future()
    lost.set_exception(PeerLostError("server-0 was lost", "server-0", "host", "killed"))
    backward(weight)
    with pytest.raises(PeerLostError, match="server-0 was lost"):
        trainer.step()


def test_an_error_of_the_call_is_raised_by_backward_and_by_step():
    store = Cluster()
    trainer = started([weight := parameter()], kvstore=store)
    store.instead["push"] = OSError("gone")
    for call in (lambda: backward(weight), trainer.step):
        with pytest.raises(OSError, match="gone"):
            call()


def test_an_error_in_step_waits_for_what_is_under_way(monkeypatch):
    store, waited = Cluster(), []
    trainer = started([parameter(), late := parameter()], kvstore=store)
    pending = store.instead["push"] = Future()
    backward(late)
    store.instead["push"] = OSError("gone")
    monkeypatch.setattr("kvdist.training.overlap.wait_for", waited.append)
    with pytest.raises(OSError, match="gone"):
        trainer.step()
    assert waited == [[pending]]


def test_a_forked_child_does_not_wait_for_answers_to_its_parent():
    store = Cluster()
    trainer = started([parameter(), late := parameter()], kvstore=store)
    store.instead["push"] = Future()
    backward(late)
    store.instead["push"] = ForkError("forked")
    with pytest.raises(ForkError):
        trainer.step()


# The end.


def test_a_closed_trainer_sends_nothing_and_leaves_a_store_that_it_did_not_make():
    store = Cluster()
    trainer = started([weight := parameter()], kvstore=store)
    trainer.close()
    trainer.close()
    backward(weight)
    assert store.calls == []
    store.barrier()
    with pytest.raises(RuntimeError, match="this trainer has been closed; make another one"):
        trainer.step()


def test_a_closed_trainer_closes_the_store_that_it_made():
    trainer = make([[parameter(), parameter()]], kvstore="device", overlap=False)
    trainer.broadcast_parameters()
    store = trainer.kvstore
    trainer.close()
    with pytest.raises(Exception, match="has been closed"):
        store.barrier()


def test_a_trainer_that_is_gone_sends_nothing():
    store = Cluster()
    trainer = started([weight := parameter()], kvstore=store)
    del trainer
    backward(weight)
    assert store.calls == []


def twice(net, use_reentrant):
    """One backward pass through a layer that is used twice, each time in a checkpoint."""
    x = torch.ones(1, 2, requires_grad=True)
    for _ in range(2):
        x = checkpoint(net, x, use_reentrant=use_reentrant)
    x.sum().backward()


def test_a_gradient_that_comes_in_parts_within_a_pass_is_refused_with_remedies_that_work():
    net = nn.Linear(2, 2)
    trainer = started(net.named_parameters())
    with pytest.raises(RuntimeError, match="use_reentrant=True.*set use_reentrant=False, or overlap=False"):
        twice(net, True)
    trainer.close()
    for overlap, use_reentrant in ((True, False), (False, True)):
        net = nn.Linear(2, 2)
        trainer = started(net.named_parameters(), overlap=overlap)
        twice(net, use_reentrant)
        trainer.step()
