"""What people do with torch: accumulate, tie, be lazy, change weights by hand, forget zero_grad, meet NaN."""

import gc

import numpy as np
import pytest
import torch
from torch import nn

from kvdist.kvstore.base import KVStore
from kvdist.kvstore.local import LocalBackend
from kvdist.training.trainer import Trainer
from tests.cases import each

torch.set_num_threads(1)


class Cluster(KVStore):
    """A local store that passes for one of two workers, and writes down what is pushed."""

    def __init__(self):
        super().__init__(LocalBackend("dist"))
        self.pushed = []

    @property
    def num_workers(self):
        return 2

    @property
    def num_servers(self):
        return 1

    def pushpull(self, key, value, out=None, priority=0, *, average=False, samples=0):
        self.pushed.append([None if one is None else len(one) for one in value])
        super().pushpull(key, value, out, priority, average=average, samples=samples)


HERE_AND_THERE = pytest.mark.parametrize("on_store", [True, False])


def parameter(number=0.0, shape=(4,)):
    return nn.Parameter(torch.full(shape, float(number)))


def make(params, **options):
    options = {"kvstore": Cluster(), "optimizer_params": {"learning_rate": 1.0}, **options}
    return Trainer(params, "sgd", **options)


def backward(*weights, factor=1.0):
    for weight in weights:
        (weight * factor).sum().backward()


def assert_all(tensor, number):
    np.testing.assert_array_equal(tensor.detach().numpy(), number)


# Several passes, shared parameters, lazy modules.


@HERE_AND_THERE
def test_several_backward_passes_make_one_step(on_store):
    trainer = make([weight := parameter()], update_on_kvstore=on_store)
    for step in range(1, 3):
        weight.grad = None
        for factor in (1, 2, 4):
            with trainer.no_sync():
                backward(weight, factor=factor)
        trainer.step()
        assert_all(weight, -7 * step)


@HERE_AND_THERE
def test_a_parameter_of_two_layers_has_one_key_and_the_sum_of_its_gradients(on_store):
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    nn.init.ones_(first.weight)
    second.weight = first.weight
    net = nn.Sequential(first, second)
    trainer = make([*first.parameters(), *second.parameters()], update_on_kvstore=on_store)
    net(torch.ones(1, 3)).sum().backward()  # 3 from the first layer, 3 from the second
    expected = 1 - first.weight.grad
    trainer.step()
    assert trainer.kvstore.pushed[0][:1] == [1] and len(trainer.kvstore.pushed[0]) == (1 if on_store else 2)
    assert second.weight is first.weight
    torch.testing.assert_close(first.weight.detach(), expected)


@each("kvstore", [None, "cluster"])
def test_a_lazy_module_is_trained_once_a_forward_pass_has_given_it_a_shape(kvstore):
    net = nn.LazyLinear(2)
    trainer = make(net.parameters(), kvstore=Cluster() if kvstore else None)
    optimizer = trainer.as_torch_optimizer()
    for attempt in (trainer.step, trainer.broadcast_parameters):
        with pytest.raises(RuntimeError, match="parameter 0, parameter 1 has no shape yet.*run one forward pass"):
            attempt()
    net(torch.ones(1, 3)).sum().backward()
    before = net.weight.detach().clone()
    optimizer.step()
    torch.testing.assert_close(net.weight.detach(), before - 1)


def test_replicas_that_became_different_are_refused():
    nets = nn.LazyLinear(2), nn.LazyLinear(2)
    trainer = make(zip(*(net.parameters() for net in nets), strict=True))
    for size, net in enumerate(nets, start=3):
        net(torch.ones(1, size)).sum().backward()
    with pytest.raises(ValueError, match="replicas of parameter 0 differ"):
        trainer.step()


# Weights that were changed by hand.


def loaded(weight):
    with torch.no_grad():
        weight.fill_(5)


@each("devices", [1, 2])
def test_weights_that_were_changed_by_hand_are_refused_until_they_are_everybodys(devices):
    replicas, other = [parameter() for _ in range(devices)], [parameter() for _ in range(devices)]
    trainer = make({"w": replicas, "x": other})
    backward(*replicas, *other)
    trainer.step()
    pushes = len(trainer.kvstore.pushed)
    loaded(replicas[0])
    for replica in replicas + other:
        replica.grad = None
    backward(*replicas, *other)
    for _ in range(2):  # it is not forgotten
        with pytest.raises(RuntimeError, match=r"'w' was changed outside of step.*broadcast_parameters\(\) on every"):
            trainer.step()
    assert len(trainer.kvstore.pushed) == pushes
    trainer.broadcast_parameters()
    for replica in replicas:
        assert_all(replica, 5)
    trainer.step()
    for replica in replicas:
        assert_all(replica, 5 - devices / devices)


def test_changed_weights_are_noticed_with_overlap_too_when_their_gradients_have_left():
    class Pushes(Cluster):
        def push_async(self, key, value, priority=0, *, average=False, samples=0):
            return super().push_async(key, value, priority, average=average)

    trainer = make([weight := parameter()], kvstore=Pushes(), overlap=True)
    trainer.broadcast_parameters()
    loaded(weight)
    backward(weight)
    with pytest.raises(RuntimeError, match="was changed outside of step.*this step was made and the change is lost"):
        trainer.step()
    assert_all(weight, -1)
    weight.grad = None
    backward(weight)
    trainer.step()
    assert_all(weight, -2)


@each("kvstore", [None, "cluster"])
def test_where_this_worker_updates_weights_may_be_changed(kvstore):
    trainer = make([weight := parameter()], kvstore=Cluster() if kvstore else None, update_on_kvstore=False)
    backward(weight)
    trainer.step()
    loaded(weight)
    weight.grad = None
    backward(weight)
    trainer.step()
    assert_all(weight, 4)


def test_a_step_that_failed_does_not_count_as_a_change_by_hand():
    trainer = make([weight := parameter()])
    trainer.broadcast_parameters()
    weight.grad = torch.ones(4)
    original, store = KVStore.pushpull, trainer.kvstore

    def lost(*args, **kwargs):
        original(store, *args, **kwargs)
        raise ConnectionError("gone")

    store.pushpull = lost
    with pytest.raises(ConnectionError):
        trainer.step()
    del store.pushpull
    trainer.step()
    assert_all(weight, -2)


# Gradients that are old.


@each("kvstore", [None, True, False])
def test_an_old_gradient_is_refused_or_left_out(kvstore):
    used, old = parameter(), parameter()
    options = {"kvstore": None} if kvstore is None else {"update_on_kvstore": kvstore}
    trainer = make({"used": used, "old": old}, **options)
    backward(used, old)
    trainer.step(1)
    backward(used)  # without zero_grad, as Gluon's users are used to
    with pytest.raises(RuntimeError, match=r"the gradient of 'old' was used by the last step.*ignore_stale_grad=True"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    assert_all(old, -1)
    assert_all(used, -1 - 2)
    backward(used, old)
    trainer.step(1)
    assert_all(old, -1 - 2)
    with pytest.raises(RuntimeError, match=r"the gradients of 'old', 'used' were used .* has renewed them"):
        trainer.step(1)


def test_an_old_gradient_on_one_of_two_devices_is_left_out():
    replicas = [parameter(), parameter()]
    trainer = make([replicas])
    backward(*replicas)
    trainer.step(1)
    replicas[1].grad = None
    backward(replicas[1], factor=3.0)
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(4,\) was used by the last step"):
        trainer.step(1)
    trainer.step(1, ignore_stale_grad=True)
    for replica in replicas:
        assert_all(replica, -2 - 3)


def test_update_after_allreduce_grads_tells_old_gradients_too():
    trainer = make([weight := parameter()], update_on_kvstore=False)
    backward(weight)
    trainer.allreduce_grads()
    trainer.update(1)
    with pytest.raises(RuntimeError, match=r"parameter 0 of shape \(4,\) was used by the last step"):
        trainer.update(1)
    trainer.update(1, ignore_stale_grad=True)
    assert_all(weight, -1)


def test_allreduce_grads_does_not_sum_what_was_summed_before():
    replicas, other = [parameter(), parameter()], [parameter(), parameter()]
    trainer = make([replicas, other], update_on_kvstore=False)
    backward(*replicas, *other)
    trainer.step(1)
    for replica in replicas:
        replica.grad = None
    backward(*replicas)
    with pytest.raises(RuntimeError, match=r"parameter 1 of shape \(4,\) was used by the last step"):
        trainer.allreduce_grads()
    before = other[0].detach().clone()
    trainer.allreduce_grads(ignore_stale_grad=True)
    trainer.update(1, ignore_stale_grad=True)
    assert torch.equal(other[0], before) and torch.equal(other[1], before)


def test_a_layer_that_is_unfrozen_later_is_an_error_and_not_left_out_in_silence():
    trained, frozen = parameter(), parameter()
    frozen.requires_grad_(False)
    trainer = make({"trained": trained, "frozen": frozen})
    backward(trained)
    trainer.step()
    frozen.requires_grad_(True)
    trained.grad = None
    backward(trained, frozen)
    with pytest.raises(RuntimeError, match="'frozen' was frozen when the trainer was created, but with a gradient now"):
        trainer.step()


@each("renew", [lambda w: w.grad.zero_(), lambda w: setattr(w, "grad", w.grad.clone())])
def test_a_gradient_that_was_written_or_replaced_is_new(renew):
    trainer = make([weight := parameter()])
    backward(weight)
    trainer.step()
    renew(weight)
    gc.collect()
    trainer.step()


@HERE_AND_THERE
def test_an_old_gradient_is_left_out_with_overlap(on_store):
    used, old = parameter(), parameter()
    trainer = make({"used": used, "old": old}, overlap=True, update_on_kvstore=on_store)
    trainer.broadcast_parameters()
    backward(used, old)
    trainer.step()
    backward(used)
    trainer.step(ignore_stale_grad=True)
    assert_all(old, -1)
    assert_all(used, -3)


def test_a_gradient_that_the_trainer_made_is_not_taken_for_the_users():
    used, unused = parameter(), parameter(5)
    trainer = make([used, unused], update_on_kvstore=False)
    for step in range(1, 4):
        used.grad = None
        backward(used)
        trainer.step()
        assert unused.grad is None
        assert_all(used, -step)
        assert_all(unused, 5)


def test_where_workers_update_complete_gradients_are_summed_in_place():
    class InPlace(Cluster):
        def pushpull(self, key, value, out=None, priority=0, *, average=False, samples=0):
            self.pushed.append(out is None)
            KVStore.pushpull(self, key, value, out, priority, average=average, samples=samples)

    trainer = make([first := parameter(), second := parameter()], kvstore=InPlace(), update_on_kvstore=False)
    backward(first, second)
    given = first.grad
    trainer.step()
    second.grad = None
    backward(first)
    trainer.step()
    assert trainer.kvstore.pushed == [True, False]
    assert first.grad is given


def test_the_default_type_and_device_of_torch_make_no_difference():
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            trainer = make([weight := nn.Parameter(torch.zeros(4, device="cpu"))], update_on_kvstore=False)
            weight.grad = torch.ones(4, device="cpu")
            trainer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    assert_all(weight, -1)


# Gradients that are not finite, and steps that are skipped.


@HERE_AND_THERE
def test_a_gradient_that_is_not_finite_is_refused_with_rank_and_key_and_counted(on_store):
    weights = {"a": parameter(), "b": parameter()}
    trainer = make(weights, update_on_kvstore=on_store, reject_nonfinite=True)
    backward(*weights.values())
    trainer.step()
    pushes = len(trainer.kvstore.pushed)
    weights["b"].grad = torch.tensor([1, float("nan"), float("inf"), -float("inf")])
    message = r"the gradient of 'b' on worker-0 is not finite: 1 NaN and 2 infinite of 4 elements.*skip_step\(\)"
    for count in (1, 2):
        weights["a"].grad.add_(0)
        with pytest.raises(FloatingPointError, match=message):
            trainer.step()
        assert trainer.nonfinite_steps == count
    assert len(trainer.kvstore.pushed) == pushes
    trainer.skip_step()
    assert trainer.kvstore.pushed[-1][:2] == [None, None], "it took part, with nothing"
    for weight in weights.values():
        assert_all(weight, -1)
        weight.grad = torch.ones(4)
    trainer.step()
    assert_all(weights["b"], -2)


def test_allreduce_grads_refuses_gradients_that_are_not_finite():
    trainer = make([weight := parameter()], update_on_kvstore=False, reject_nonfinite=True)
    weight.grad = torch.full((4,), float("inf"))
    with pytest.raises(FloatingPointError, match="0 NaN and 4 infinite"):
        trainer.allreduce_grads()


def test_without_being_asked_nobody_looks_at_gradients():
    trainer = make([weight := parameter()])
    weight.grad = torch.full((4,), float("nan"))
    trainer.step()
    assert trainer.nonfinite_steps == 0 and weight.isnan().all()


def test_gradients_that_leave_early_cannot_be_looked_at_or_skipped():
    with pytest.raises(ValueError, match="reject_nonfinite=True needs overlap=False"):
        make([parameter()], overlap=True, reject_nonfinite=True)
    with pytest.raises(RuntimeError, match=r"skip_step\(\) is too late with overlap=True"):
        make([parameter()], overlap=True).skip_step()


@each("kvstore", [None, "device"])
def test_a_process_alone_skips_by_doing_nothing(kvstore):
    trainer = make([weight := parameter()], kvstore=KVStore(LocalBackend(kvstore)) if kvstore else None)
    backward(weight)
    trainer.skip_step()
    assert_all(weight, 0)


# What the environment says.


@pytest.mark.parametrize(("setting", "expected"), [("0", False), ("1", True), ("", True)])
def test_the_environment_says_who_updates_for_those_who_do_not(monkeypatch, setting, expected):
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", setting)
    trainer = make([parameter()])
    trainer.broadcast_parameters()
    assert trainer._steps.on_server is expected
    trainer = make([parameter()], update_on_kvstore=not expected)
    trainer.broadcast_parameters()
    assert trainer._steps.on_server is not expected


def test_the_names_of_the_old_store_are_written_in_any_case(monkeypatch):
    monkeypatch.setattr("kvdist.training.trainer_config.BIG_PARAMETER_ELEMENTS", 3)
    trainer = make([[parameter(), parameter()]], kvstore="LOCAL")
    trainer.broadcast_parameters()
    assert trainer._steps.on_server is False
